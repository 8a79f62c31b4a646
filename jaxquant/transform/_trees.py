"""The trees of a prepared function: `QuantizedTree`, to save and to pass, and `TrainableTree`, to train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from .._arrays import parts
from .._arrays.quantized_array import QuantizedArray
from .._arrays.saved_programs import register_tree
from .._core import checks
from .._training.estimators import decode_estimator, encode_estimator
from ..calibration.calibrator import Range
from ._learned import LearnedScale, LearnedScales

Ranges = Mapping[str, Mapping[str, Range | LearnedScale]]


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "ranges"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedTree:
    """Everything that `Prepared.apply` needs besides the function's own arguments; made by `Prepared.convert`.

    It is a pytree: `jax.jit`, `jax.vmap`, `jax.device_put` and the functions of `jaxquant.checkpoint` take it as they
    take the parameters. A file that was loaded without `like` holds a dict, and `QuantizedTree(**tree)` makes the
    tree again. `QuantizedTree(tree).nbytes` is the size of any tree of arrays, with two codes of 4 bits in a byte.

    Attributes:
        params: the parameters: a tree of the same structure as those in floats, with a `QuantizedArray` in place of
            each weight that the rules quantize.
        ranges: the static ranges, or the scales that were trained, by the name of the contraction and the place of the
            operand. {} if all ranges are dynamic.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"w": jnp.array([[1.0], [-2.0]]), "b": jnp.ones(1)}, jnp.array([[0.5, 1.0]])
        >>> apply = lambda params, x: x @ params["w"] + params["b"][None]
        >>> prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_static())
        >>> q = prepared.convert(params, prepared.calibrate(params, [x]))
        >>> q
        QuantizedTree(1 quantized array, 1 other, 1 range, nbytes=18)
        >>> q.params["w"].codes.dtype, q.ranges["w"]["0"].hi.item()
        (dtype('int8'), 1.0)
    """

    params: Any
    ranges: Ranges = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays; codes of less than 8 bits count as they are stored in files."""
        leaves = [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        return sum(parts.count_stored_bytes(leaf) for leaf in leaves)

    def replace(self, **changes: Any) -> QuantizedTree:
        """Return the tree with other `params` or `ranges`."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        """Return the numbers of arrays and ranges, and the bytes."""
        leaves = jax.tree.leaves(self.params, is_leaf=_is_quantized)
        quantized = sum(map(_is_quantized, leaves))
        # Also in trees of other values, such as `in_axes`.
        ranges = len(jax.tree.leaves(self.ranges, is_leaf=lambda node: isinstance(node, Range | LearnedScale)))
        text = f"{_count(quantized, 'quantized array')}, {len(leaves) - quantized} other, {_count(ranges, 'range')}"
        return f"QuantizedTree({text}, nbytes={self.nbytes})"


@jax.tree_util.register_pytree_node_class
class FixedRanges(Mapping[str, Mapping[str, Range]]):
    """Ranges that training must not change: a mapping that is a node of a pytree without leaves.

    The gradient of a fixed range is 0, but that alone does not keep it: weight decay would shrink it. Here no optimizer
    sees an array. Under `jax.jit` the ranges are constants, so other ranges compile another program.

    Ranges that are traced are leaves, because the structure of a tree cannot hold tracers. So a traced function can
    return a tree that it has made, in which the ranges are fixed then.

    Args:
        ranges: the ranges by the name of the contraction and the place of the operand.
    """

    def __init__(self, ranges: Mapping[str, Mapping[str, Range]]) -> None:
        self._ranges = {
            name: {place: Range(*map(_fix, pair)) for place, pair in places.items()} for name, places in ranges.items()
        }
        self._ends = [end for places in self._ranges.values() for pair in places.values() for end in pair]
        self._is_known = all(isinstance(end, np.ndarray) for end in self._ends)
        names = tuple((name, place) for name, places in self._ranges.items() for place in places)
        ends = tuple((end.shape, end.tobytes()) for end in self._ends) if self._is_known else id(self)
        self._key = names, ends

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        """Return no leaves and the ranges; if they are traced, the ranges and their names."""
        return ((), self) if self._is_known else (self._ends, self._key[0])

    @classmethod
    def tree_unflatten(cls, static: Any, ends: Sequence[Any]) -> FixedRanges:
        """Return the ranges with other ends, if they are leaves."""
        if isinstance(static, FixedRanges):
            return static
        ranges: dict[str, dict[str, Range]] = {}
        for (name, place), *pair in zip(static, ends[::2], ends[1::2], strict=True):
            ranges.setdefault(name, {})[place] = Range(*pair)
        return cls(ranges)

    def __getitem__(self, name: str) -> Mapping[str, Range]:
        """Return the ranges of a contraction, by the place of the operand, without a gradient."""
        convert = jnp.asarray if self._is_known else jax.lax.stop_gradient
        return {place: Range(*map(convert, pair)) for place, pair in self._ranges[name].items()}

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names."""
        return iter(self._ranges)

    def __len__(self) -> int:
        """Return the number of contractions."""
        return len(self._ranges)

    def __hash__(self) -> int:
        """Return a hash of the ranges."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Return whether the other ranges are the same, bit for bit."""
        return self is other or (isinstance(other, FixedRanges) and self._key == other._key)

    def __repr__(self) -> str:
        """Return the names."""
        return f"FixedRanges({', '.join(self._ranges)})"


def _fix(end: Any) -> Any:
    # JAX also builds trees of objects that are no arrays.
    is_known = isinstance(end, jax.Array | np.ndarray | np.generic | float) and not checks.is_traced(end)
    return np.asarray(end) if is_known else end


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "scales"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainableTree:
    """Everything that `Prepared.fake_apply` needs besides the function's own arguments; made by `Prepared.trainable`.

    It is a pytree of floats, for `jax.grad` and an optimizer. `Prepared.convert` makes a `QuantizedTree` of it.
    Parameters that had codes in `prepare` stay codes: differentiate with respect to others, in `t.replace(params=...)`.

    Attributes:
        params: the parameters of the function, in floats.
        scales: `LearnedScales`, which are trained with the parameters, or `FixedRanges`, which have no leaves, so that
            no optimizer changes them. A file does not have them either: load it with `like=`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"w": jnp.array([[1.0], [-2.0]])}, jnp.array([[0.5, 1.0]])
        >>> prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=jq.recipes.w8a8_static())
        >>> t = prepared.trainable(params, prepared.calibrate(params, [x]))
        >>> gradient = jax.grad(lambda t: prepared.fake_apply(t, x).sum())(t)
        >>> jax.tree.leaves(gradient)  # x in steps of 1 / 255; the range has no gradient
        [Array([[0.49803925],
               [1.        ]], dtype=float32)]
        >>> prepared.convert(jax.tree.map(lambda p, g: p - 0.1 * g, t, gradient))
        QuantizedTree(1 quantized array, 0 other, 1 range, nbytes=14)
    """

    params: Any
    scales: FixedRanges | LearnedScales

    def replace(self, **changes: Any) -> TrainableTree:
        """Return the tree with other `params` or `scales`."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        """Return the number of arrays and the kind of the scales."""
        scales = self.scales
        text = repr(scales)
        if isinstance(scales, LearnedScales):
            activations = sum(len(places) for places in scales.activations.values())
            text = f"{scales.estimator}: {_count(len(scales.weights) + activations, 'learned scale')}"
        return f"TrainableTree({_count(len(jax.tree.leaves(self.params)), 'array')}, {text})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _encode_ranges(static: FixedRanges | Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the static part of fixed ranges as JSON: their names, and the bytes of ranges that are known."""
    if not isinstance(static, FixedRanges):
        return {"names": static}
    ends = [[str(end.dtype), end.shape, end.tobytes().hex()] for end in static._ends]
    return {"names": static._key[0], "ends": ends}


def _decode_ranges(static: dict[str, Any]) -> Any:
    names = tuple(map(tuple, static["names"]))
    if "ends" not in static:
        return names
    ends = [
        np.frombuffer(bytes.fromhex(text), jnp.dtype(dtype)).reshape(shape) for dtype, shape, text in static["ends"]
    ]
    return FixedRanges.tree_unflatten(names, ends)


register_tree(QuantizedTree)
register_tree(TrainableTree)
register_tree(FixedRanges, _encode_ranges, _decode_ranges)
register_tree(LearnedScales, lambda static: encode_estimator(*static), lambda saved: (decode_estimator(saved),))
export.register_namedtuple_serialization(LearnedScale, serialized_name="jaxquant.LearnedScale")
