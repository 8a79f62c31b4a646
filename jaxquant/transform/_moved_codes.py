"""The equations that move the elements of a parameter, applied to its codes, scale and zero point."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import indexing
from .._arrays.concatenate import concatenate
from .._arrays.quantized_array import QuantizedArray
from .._program import jaxpr


def move_elements(equation: Any, operands: Sequence[Any]) -> list[QuantizedArray]:
    """Return the results of an equation of `views.follow_equation` for a quantized operand.

    Args:
        equation: the equation.
        operands: the quantized array, or several to be concatenated; after it the indices of a dynamic slice. Those of
            a barrier may be other arrays, too.
    """
    name = jaxpr.find_name(equation)
    if name == "concatenate":
        return [concatenate(operands, equation.params["dimension"])]
    if name == "stack":
        axis = equation.params["axis"]
        parts = [_reshape_to(q, (*q.shape[:axis], 1, *q.shape[axis:])) for q in operands]
        return [concatenate(parts, axis)]
    if name == "optimization_barrier":
        return list(lax.optimization_barrier(tuple(operands)))
    if name == "select_n":
        # All cases are the same elements of the same parameter, as the analysis has found.
        return [operands[1]]
    return _RULES.get(name, _keep)(equation, *operands)


def can_concatenate(arrays: Sequence[QuantizedArray]) -> bool:
    """Return whether the codes of quantized arrays can stand in one array."""
    return len({(q.codes.dtype, q.scale.dtype, q.dtype, q.codebook) for q in arrays}) == 1


def _keep(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    return [q]


def _vary(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    # Inside of `jax.shard_map` the parts must differ between devices where the floats do.
    return [jax.tree.map(lambda part: jaxpr.evaluate(equation, [part])[0], q)]


def _convert(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    return [q.astype(equation.params["new_dtype"])]


def _transpose(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    return [_transpose_to(q, equation.params["permutation"])]


def _transpose_to(q: QuantizedArray, order: Sequence[int]) -> QuantizedArray:
    # The codes stay in memory as they are: transposing them would cost more than the contraction saves.
    scale, zero_point = (None if part is None else jnp.transpose(part, order) for part in (q.scale, q.zero_point))
    new = q.replace(scale=scale, zero_point=zero_point)
    return new._with_stored(q.stored_codes, indexing.find_transposed_order(q.stored_order, order))


def _reshape(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    order = equation.params["dimensions"]
    q = q if order is None else _transpose_to(q, order)
    return [_reshape_to(q, tuple(equation.outvars[0].aval.shape))]


def _squeeze(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    return [_reshape_to(q, tuple(equation.outvars[0].aval.shape))]


def _reshape_to(q: QuantizedArray, shape: tuple[int, ...]) -> QuantizedArray:
    """Return a quantized array in another shape.

    Where a merged dimension repeats a sequence of entries, each of its indices gets an entry.
    """
    scale, zero_point = (_spread(q, part, shape) for part in (q.scale, q.zero_point))
    return q.replace(scale=scale, zero_point=zero_point).reshape(shape)


def _spread(q: QuantizedArray, part: Any, shape: tuple[int, ...]) -> Any:
    """Return a scale or zero point that can be reshaped with its codes."""
    if part is None:
        return None
    for axes in _find_merged(q.shape, shape):
        # An entry for all indices of a slower dimension is repeated for those of a faster one.
        varying = [axis for axis in axes if part.shape[axis] > 1]
        for axis in axes[: axes.index(varying[-1])] if varying else ():
            part = _expand(q, part, axis)
    return part


def _find_merged(old: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """Yield the dimensions that a reshape merges, or splits in another way."""
    ends, size, axes = set(itertools.accumulate(new, operator.mul)), 1, []
    for axis, length in enumerate(old):
        size *= length
        axes.append(axis)
        if size in ends:
            yield axes
            axes = []


def _expand(q: QuantizedArray, part: jax.Array, axis: int) -> jax.Array:
    """Return a scale or zero point with an entry for each index of an axis."""
    length = q.shape[axis]
    if part.shape[axis] == length:
        return part
    size = length if part.shape[axis] == 1 else q.block_size or length // part.shape[axis]
    return indexing.expand_blocks(part, axis, size, length)


def _slice(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    parameters = equation.params
    strides = parameters["strides"] or (1,) * q.ndim
    bounds = zip(parameters["start_indices"], parameters["limit_indices"], strides, strict=True)
    return [q[tuple(slice(*bound) for bound in bounds)]]


def _split(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    parts, start, axis = [], 0, equation.params["axis"]
    for size in equation.params["sizes"]:
        parts.append(q[(*(slice(None),) * axis, slice(start, start + int(size)))])
        start += int(size)
    return parts


def _unstack(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    axis = equation.params["axis"]
    return [q[(*(slice(None),) * axis, place)] for place in range(q.shape[axis])]


def _reverse(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    dimensions = equation.params["dimensions"]
    return [q[tuple(slice(None, None, -1 if axis in dimensions else 1) for axis in range(q.ndim))]]


def _broadcast(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    shape, places = tuple(equation.outvars[0].aval.shape), tuple(equation.params["broadcast_dimensions"])
    return [_broadcast_to(q, shape, places)]


def _tile(equation: Any, q: QuantizedArray) -> list[QuantizedArray]:
    repeats = equation.params["reps"]
    # A new dimension in front of each one, merged with it.
    wide = tuple(n for pair in zip(repeats, q.shape, strict=True) for n in pair)
    shape = tuple(equation.outvars[0].aval.shape)
    return [_reshape_to(_broadcast_to(q, wide, tuple(range(1, 2 * q.ndim, 2))), shape)]


def _broadcast_to(q: QuantizedArray, shape: tuple[int, ...], places: tuple[int, ...]) -> QuantizedArray:
    def broadcast_part(part: jax.Array | None, is_scale: bool) -> jax.Array | None:
        if part is None:
            return None
        wide = [1] * len(shape)
        for axis, place in enumerate(places):
            wide[place] = part.shape[axis] if is_scale else shape[place]
        # Repeated elements share their entry, so a scale gets new dimensions of 1 only.
        return lax.broadcast_in_dim(part, tuple(wide) if is_scale else shape, places)

    scale, zero_point = (broadcast_part(part, True) for part in (q.scale, q.zero_point))
    codes = broadcast_part(q.codes, False)
    return q.replace(codes=codes, scale=scale, zero_point=zero_point, stored_order=None)


def _dynamic_slice(equation: Any, q: QuantizedArray, *starts: jax.Array) -> list[QuantizedArray]:
    sizes = tuple(equation.params["slice_sizes"])
    # One entry for each index of the axes that are cut, unless all indices share one.
    cut = [axis for axis, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    parts = []
    for part in (q.scale, q.zero_point):
        if part is None:
            parts.append(None)
            continue
        for axis in cut:
            part = part if part.shape[axis] == 1 else _expand(q, part, axis)
        zeros = [jnp.zeros_like(start) for start in starts]
        entries = [start if n != 1 else zero for start, zero, n in zip(starts, zeros, part.shape, strict=True)]
        lengths = [sizes[axis] if axis in cut and n != 1 else n for axis, n in enumerate(part.shape)]
        parts.append(lax.dynamic_slice(part, entries, lengths))
    codes = lax.dynamic_slice(q.codes, starts, sizes)
    return [q.replace(codes=codes, scale=parts[0], zero_point=parts[1], stored_order=None)]


_RULES: dict[str, Callable[..., list[QuantizedArray]]] = {
    "convert_element_type": _convert,
    "pvary": _vary,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "rev": _reverse,
    "tile": _tile,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    "unstack": _unstack,
}
