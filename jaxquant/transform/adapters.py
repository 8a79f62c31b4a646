"""Adapters: products of two small factors that are added to frozen codes; `AdaptedTree` holds both, to train and pass.

The factors follow their parameter through the program, as its scale does, and meet the activations where its codes do:
the contraction of an adapted parameter is that of its codes plus two small ones.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._arrays.saved_programs import register_tree
from .._core import checks, granularity
from .._kernels.weight_chunks import delay_floats
from ._adapter_axes import AdapterAxes
from ._moved_factors import AdaptedParameter, multiply_factors
from ._trees import QuantizedTree

if TYPE_CHECKING:
    from ._plan import LeafPlan

__all__ = [
    "AdaptedTree",
    "AdapterAxes",
    "LoRA",
    "align",
    "align_factors",
    "attach_adapters",
    "check_adapter",
    "check_paths",
    "compute_factor",
    "compute_norms",
    "list_factor_shapes",
    "multiply_factors",
]

_VARIANTS = ("lora", "dora", "qa")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which parameters get adapters, and what these are: w + scaling * (a @ b), for codes w that stay as they are.

    Attributes:
        rank: the number of columns of a and of rows of b.
        targets: the paths of the parameters: a pattern such as "*attn*", a compiled regular expression, which is
            searched for, or None for all parameters that are quantized.
        alpha: the scaling times the rank, or times its square root with `rank_stabilized`. None takes the rank.
        dropout: the probability with which an input of the adapter is 0, in calls of a tree with a key.
        variant: "lora"; "dora", which also trains the norm of the weights of each output; or "qa", whose factor a has
            one row for each block of inputs that shares a scale, so that `lora.merge` changes no code.
        rank_stabilized: whether the scaling is alpha / sqrt(rank) in place of alpha / rank.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the rank is not positive, alpha is 0 or not finite, the dropout is not in [0, 1), or the variant is
            unknown.

    Example:
        >>> import jaxquant as jq
        >>> jq.lora.LoRA(rank=8, targets="*attn*", alpha=16).scaling
        2.0

    Source: Hu et al., arXiv 2106.09685; "dora" is Liu et al., arXiv 2402.09353; "qa" is QA-LoRA, Xu et al., arXiv
    2309.14717; `rank_stabilized` is Kalajdzievski, arXiv 2312.03732.
    """

    rank: int
    targets: str | re.Pattern[str] | None = None
    _: dataclasses.KW_ONLY
    alpha: float | None = None
    dropout: float = 0.0
    variant: str = "lora"
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        checks.check_integer("LoRA", "rank", self.rank)
        checks.require(self.rank > 0, "LoRA", "rank", "a positive int", self.rank)
        is_path = self.targets is None or isinstance(self.targets, str | re.Pattern)
        expected = "a pattern, a compiled regular expression or None"
        checks.require_type(is_path, "LoRA", "targets", expected, checks.describe_value(self.targets))
        for name in ("alpha", "dropout"):
            value = getattr(self, name)
            is_number = (value is None and name == "alpha") or (
                isinstance(value, int | float) and not isinstance(value, bool)
            )
            checks.require_type(is_number, "LoRA", name, "a number", checks.describe_value(value))
        limits = jnp.finfo(jnp.float32)
        is_scaling = self.alpha is None or float(limits.tiny) <= abs(self.alpha) <= float(limits.max)
        expected = "a number other than 0 in the range of float32"
        checks.require(is_scaling, "LoRA", "alpha", expected, checks.describe_value(self.alpha))
        checks.require(0 <= self.dropout < 1, "LoRA", "dropout", "a number in [0, 1)", self.dropout)
        checks.check_option("LoRA", "variant", self.variant, _VARIANTS)
        checks.check_flag("LoRA", "rank_stabilized", self.rank_stabilized)

    @property
    def scaling(self) -> float:
        """The number that a @ b is multiplied with."""
        alpha = self.rank if self.alpha is None else self.alpha
        return float(alpha / (self.rank**0.5 if self.rank_stabilized else self.rank))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["frozen", "adapters", "key"], meta_fields=["settings"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AdaptedTree:
    """Converted parameters with adapters, for `Prepared.apply` and `Prepared.fake_apply`; made by `lora.adapt`.

    It is a pytree. Train `adapters`, which are floats, and put them back with `replace`.

    Attributes:
        frozen: the converted parameters and the ranges, which training does not change.
        adapters: for each adapted parameter by its path, the factors "a", with the shape (shared axes, inputs, rank),
            and "b", (shared axes, rank, outputs); with the variant "dora" also "magnitude", (shared axes, outputs).
            Shared axes are those of stacked layers, of experts and of batches.
        settings: the path and the `LoRA` of each adapted parameter. Static.
        key: a key of `jax.random` for the dropout, or None for none. Another one for each step.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"w": jnp.array([[1.0, 0.5], [-2.0, 7.0]])}, jnp.array([[0.5, 1.0]])
        >>> prepared = jq.prepare(lambda p, x: x @ p["w"], params, x, rules=jq.recipes.weight_only_int4(block=2))
        >>> adapted = jq.lora.adapt(prepared, prepared.convert(params), jq.lora.LoRA(rank=1), jax.random.key(0))
        >>> adapted
        AdaptedTree(QuantizedTree(1 quantized array, 0 other, 0 ranges, nbytes=7), w: rank 1)
        >>> loss = lambda adapters: prepared.fake_apply(adapted.replace(adapters=adapters), x).sum()
        >>> {name: g.shape for name, g in jax.grad(loss)(adapted.adapters)["w"].items()}
        {'a': (2, 1), 'b': (1, 2)}
    """

    frozen: QuantizedTree
    adapters: Mapping[str, Mapping[str, Any]]
    settings: tuple[tuple[str, LoRA], ...]
    key: Any = None

    def replace(self, **changes: Any) -> AdaptedTree:
        """Return the tree with other `adapters`, another `key` or other `frozen` parameters."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        """Return the frozen tree, and the ranks of the adapters."""
        ranks = [f"{path}: rank {lora.rank}" for path, lora in self.settings[:4]]
        more = [f"{len(self.settings) - 4} more"] if len(self.settings) > 4 else []
        return f"AdaptedTree({', '.join([repr(self.frozen), *ranks, *more])})"


def _encode_settings(static: tuple[tuple[tuple[str, LoRA], ...]]) -> list[Any]:
    rows = []
    for path, lora in static[0]:
        targets = lora.targets
        pattern = [targets.pattern, targets.flags] if isinstance(targets, re.Pattern) else targets
        rows.append([path, {**dataclasses.asdict(lora), "targets": pattern}])
    return rows


def _decode_settings(saved: list[Any]) -> tuple[tuple[tuple[str, LoRA], ...]]:
    rows = []
    for path, fields in saved:
        targets = fields["targets"]
        rows.append(
            (path, LoRA(**{**fields, "targets": re.compile(*targets) if isinstance(targets, list) else targets}))
        )
    return (tuple(rows),)


register_tree(AdaptedTree, _encode_settings, _decode_settings)


def list_factor_shapes(
    lora: LoRA, shape: Sequence[int], axes: AdapterAxes, q: QuantizedArray
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of an adapter.

    Args:
        lora: its settings.
        shape: the shape of the parameter.
        axes: its axes.
        q: its codes.
    """
    shared, outputs = (tuple(shape[axis] for axis in part) for part in (axes.shared, axes.outputs))
    # Block by block for "qa": one entry for the inputs that share a scale.
    lengths = [q.scale.shape[axis] if lora.variant == "qa" else shape[axis] for axis in axes.inputs]
    shapes = {"a": (*shared, *lengths, lora.rank), "b": (*shared, lora.rank, *outputs)}
    return {**shapes, "magnitude": (*shared, *outputs)} if lora.variant == "dora" else shapes


def align(part: jax.Array, axes: Sequence[int], rank: int) -> jax.Array:
    """Return an array with the dimensions `axes`, and one more, with all dimensions of a parameter, and one more."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    part = lax.transpose(part, (*order, len(axes)))
    lengths = dict(zip(sorted(axes), part.shape, strict=False))
    return part.reshape(*(lengths.get(axis, 1) for axis in range(rank)), part.shape[-1])


def align_factors(
    adapter: Mapping[str, Any], lora: LoRA, shape: Sequence[int], axes: AdapterAxes, q: QuantizedArray
) -> dict[str, jax.Array]:
    """Return the factors with all dimensions of their parameter and the rank as the last one, a with the scaling."""
    first, second = (*axes.shared, *axes.inputs), (*axes.shared, *axes.outputs)
    b = jnp.moveaxis(jnp.asarray(adapter["b"]), len(axes.shared), -1)
    a = align(jnp.asarray(adapter["a"]) * lora.scaling, first, len(shape))
    sizes = granularity.Aligned(q.block_size).sizes(q.scale.shape, tuple(shape))
    for axis in axes.inputs:
        if a.shape[axis] != shape[axis] and sizes is not None:
            a = granularity.expand_blocks(a, axis, sizes[axis], shape[axis])
    return {"a": a, "b": align(b, second, len(shape))}


def compute_norms(q: QuantizedArray, a: jax.Array, b: jax.Array, axes: AdapterAxes) -> jax.Array:
    """Return the length of the weights of each output, with all dimensions of the parameter.

    Args:
        q: the codes.
        a: the first factor, aligned.
        b: the second factor, aligned.
        axes: the axes of the adapter.
    """

    def measure(q: QuantizedArray, a: jax.Array, b: jax.Array, summed: tuple[int, ...]) -> jax.Array:
        floats = q.dequantize().astype(jnp.float32) + multiply_factors(a, b)
        return jnp.sqrt(jnp.sum(floats * floats, axis=summed, keepdims=True))

    if axes.shared[:1] != (0,) or q.ndim < 2:
        return measure(q, a, b, axes.inputs)
    # One layer of a stack at a time: the memory never holds floats of all.
    inner = tuple(axis - 1 for axis in axes.inputs)
    a, b = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (a, b))
    return lax.map(lambda parts: measure(parts[0], parts[1], parts[2], inner), (q.per_index(0), a, b))


def compute_factor(magnitude: jax.Array, norms: jax.Array) -> jax.Array:
    """Return what weights of some lengths are multiplied by to have others; weights that are all 0 stay 0."""
    return magnitude / jnp.where(norms == 0, 1, norms)


def check_paths(function: str, tree: AdaptedTree, names: Sequence[str], leaves: Mapping[int, LeafPlan]) -> None:
    """Raise unless a tree has the adapters that it was made with, all of them of parameters that are quantized.

    Args:
        function: the name of the public function that errors name.
        tree: the tree.
        names: the path of each parameter.
        leaves: the plans of those that are quantized.
    """
    settings, given = dict(tree.settings), tree.adapters
    expected = "the paths that the tree was made with"
    is_mapping = isinstance(given, Mapping)
    got = (", ".join(sorted(map(str, given))[:4]) or "none") if is_mapping else checks.describe_value(given)
    checks.require(is_mapping and set(given) == set(settings), function, "adapters", expected, got)
    quantized = {names[place] for place in leaves}
    for path in settings:
        expected = f"adapters of parameters that are quantized, as {path} is not"
        checks.require(path in quantized, function, "adapters", expected, path)


def check_adapter(function: str, path: str, adapter: Any, lora: LoRA, plan: LeafPlan, q: QuantizedArray) -> None:
    """Raise unless an adapter has the arrays of its settings.

    Args:
        function: the name of the public function that errors name.
        path: the path of the parameter.
        adapter: the arrays by name.
        lora: its settings.
        plan: the plan of the parameter.
        q: its codes.
    """
    axes, argument = plan.adapter, f"adapters[{path!r}]"
    assert isinstance(axes, AdapterAxes)
    expected = list_factor_shapes(lora, plan.shape, axes, q)
    text = f"arrays of the shapes {expected}"
    is_mapping = isinstance(adapter, Mapping)
    checks.require_type(is_mapping, function, argument, text, checks.describe_value(adapter))
    got = {name: tuple(jnp.shape(part)) for name, part in adapter.items()}
    checks.require(got == expected, function, argument, text, got)
    kinds = {name: str(jnp.result_type(part)) for name, part in adapter.items()}
    holds = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds.values())
    checks.require_type(holds, function, argument, "arrays of floats", kinds)


def attach_adapters(
    function: str, tree: AdaptedTree, names: Sequence[str], leaves: Mapping[int, LeafPlan], parameters: Sequence[Any]
) -> list[Any]:
    """Return the parameters of a program with their adapters.

    Args:
        function: the name of the public function that errors name.
        tree: the tree.
        names: the path of each parameter.
        leaves: the plans of those that are quantized.
        parameters: the parameters.
    """
    settings, attached = dict(tree.settings), list(parameters)
    check_paths(function, tree, names, leaves)
    previous: jax.Array | None = None
    for place, path in enumerate(names):
        if path in settings:
            value, adapter = attached[place], tree.adapters[path]
            parts = _prepare_parts(function, path, adapter, settings[path], leaves[place], value, previous)
            previous = parts.get("factor", previous)
            kind, dropout = None, settings[path].dropout
            if tree.key is not None and dropout:
                checks.require_type(checks.is_key(tree.key), function, "key", "a key of jax.random", tree.key)
                axes = leaves[place].adapter
                assert isinstance(axes, AdapterAxes)
                shape = tuple(leaves[place].shape[axis] for axis in axes.shared)
                keys = jax.random.split(jax.random.fold_in(tree.key, place), shape)
                kind = jax.random.key_impl(keys)
                data = jax.random.key_data(keys)
                parts["key"] = align(data, axes.shared, len(leaves[place].shape))
            attached[place] = AdaptedParameter(value, parts, dropout, kind)
    return attached


def _prepare_parts(
    function: str, path: str, adapter: Mapping[str, Any], lora: LoRA, plan: LeafPlan, q: QuantizedArray,
    previous: jax.Array | None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Return the parts of an adapter, aligned; what dequantizes the codes waits for `previous`."""
    axes, shape = plan.adapter, plan.shape
    assert isinstance(axes, AdapterAxes)
    check_adapter(function, path, adapter, lora, plan, q)
    parts = align_factors(adapter, lora, shape, axes, q)
    if lora.variant == "dora":
        if previous is not None and isinstance(q.scale, jax.Array):
            # Otherwise XLA:CPU dequantizes all parameters first, and keeps their floats.
            q = q.replace(scale=delay_floats(q.scale, previous))
        # The paper's section 4.3: the gradient of the length is left out.
        norms = compute_norms(lax.stop_gradient(q), *lax.stop_gradient((parts["a"], parts["b"])), axes)
        magnitude = jnp.asarray(adapter["magnitude"])[..., None]
        parts["factor"] = compute_factor(align(magnitude, (*axes.shared, *axes.outputs), len(shape)), norms[..., None])
    return parts
