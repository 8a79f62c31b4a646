"""Which elements share a scale. ONNX's scalar, 1-D and blocked scales, and those of x's rank that arrays carry, become
one thing here: a scale of x's shape. Knows nothing of arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import checks, sharding


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array."""

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Returns a `scale` of one element in the shape and sharding of `like`."""
        return sharding.place_like(lax.broadcast(scale.reshape(()), like.shape), like)


@dataclasses.dataclass(frozen=True)
class PerAxis:
    """One scale per index of the axis, or of the axes, that are kept; the others share it.

    Attributes:
        axis: an int, negative from the back, or several.
    """

    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        """Takes a list for a tuple; refuses what is no axis."""
        object.__setattr__(self, "axis", _check_static_axes("PerAxis", self.axis))

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Returns `scale`, of the kept axes' shape, in the shape and sharding of `like`."""
        return sharding.place_like(lax.broadcast_in_dim(scale, like.shape, _list_axes(self.axis)), like)


@dataclasses.dataclass(frozen=True)
class Blocked:
    """One scale per run of `size` indices along the axis; elsewhere a scale per index. The last run may be short.

    Attributes:
        axis: an int, negative from the back; or several, each cut into runs of the same size.
        size: how many indices make a run.
    """

    axis: int | tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        """Takes a list for a tuple; refuses what is no axis or no size."""
        object.__setattr__(self, "axis", _check_static_axes("Blocked", self.axis))
        checks.check_integer("Blocked", "size", self.size)
        checks.require(self.size > 0, "Blocked", "size", "a positive int", self.size)

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Returns `scale` with every entry along the axis repeated `size` times, in the shape of `like`."""
        axes = _list_axes(self.axis)
        return Groups(tuple(self.size if a in axes else 1 for a in range(like.ndim))).expand(scale, like)


@dataclasses.dataclass(frozen=True)
class PerToken:
    """One scale per index of all axes but the last, whatever the rank: a token's features share a scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerToken())
        >>> jq.quantize(jnp.ones((2, 5, 3)), spec).scale.shape, jq.quantize(jnp.ones(3), spec).scale.shape
        ((2, 5, 1), (1,))
    """


@dataclasses.dataclass(frozen=True)
class PerFeature:
    """One scale per index of the last axis, whatever the rank. In a Flax layer's weights: one per output feature.

    A layer knows which axes of its kernel are output features: those that the contraction keeps. That is the last axis
    of a dense layer or a convolution, several axes of `DenseGeneral` and `Einsum`, and the rows of an embedding, which
    are the outputs of `attend`.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.quantize(jnp.ones((2, 5, 3)), jq.QuantSpec(jnp.int8, jq.PerFeature())).scale.shape
        (1, 1, 3)
    """


@dataclasses.dataclass(frozen=True)
class Aligned:
    """A scale of x's rank that says it by its shape: a dimension is 1 and shared, x's with a scale per index, or
    counts runs.

    Attributes:
        block_size: the length of a run. Without one the runs are equally long.
    """

    block_size: int | None = None

    def sizes(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns how many indices of each dimension share an entry, or None where the shapes do not fit."""
        if len(scale) != len(shape):
            return None
        found = []
        for entries, length in zip(scale, shape, strict=True):
            if entries == 1:
                found.append(length)
            elif entries == length:
                found.append(1)
            elif self.block_size is not None and -(-length // self.block_size) == entries:
                found.append(self.block_size)
            elif self.block_size is None and entries and length % entries == 0:
                found.append(length // entries)
            else:
                return None
        return tuple(found)

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Returns `scale` in the shape and sharding of `like`."""
        if all(entries in (1, length) for entries, length in zip(scale.shape, like.shape, strict=True)):
            return sharding.place_like(lax.broadcast_in_dim(scale, like.shape, range(like.ndim)), like)
        sizes = self.sizes(scale.shape, like.shape)
        assert sizes is not None
        return Groups(sizes).expand(scale, like)


@dataclasses.dataclass(frozen=True)
class Groups:
    """One scale per box of `sizes` indices, one entry for each dimension. The last boxes may be short."""

    sizes: tuple[int, ...]

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Returns `scale` with every entry repeated `sizes` times, cut to the shape of `like`."""
        scale = sharding.place_whole(scale)  # a reshape does not say where its result lies
        # A box longer than its dimension repeats no more often than that is long.
        sizes = tuple(min(size, max(length, 1)) for size, length in zip(self.sizes, like.shape, strict=True))
        interleaved = tuple(n for pair in zip(scale.shape, sizes, strict=True) for n in pair)
        repeated = lax.broadcast_in_dim(scale, interleaved, tuple(range(0, 2 * scale.ndim, 2)))
        merged = tuple(length * size for length, size in zip(scale.shape, sizes, strict=True))
        return sharding.place_like(lax.slice(repeated.reshape(merged), (0,) * like.ndim, like.shape), like)


Granularity = PerTensor | PerAxis | Blocked | Groups | Aligned
Choice = PerTensor | PerAxis | Blocked | PerToken | PerFeature  # what a user chooses from


def _list_axes(axis: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else axis


def _check_static_axes(function: str, axis: Any) -> int | tuple[int, ...]:
    if not isinstance(axis, list | tuple):
        checks.check_integer(function, "axis", axis)
        return int(axis)
    for each in axis:
        checks.check_integer(function, "axis", each)
    checks.require(len(set(axis)) == len(axis) > 0, function, "axis", "one or more different ints", axis)
    return int(axis[0]) if len(axis) == 1 else tuple(int(each) for each in axis)  # one axis, however it was written


def find_scale_shape(function: str, granularity: Choice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape, of x's rank, of a scale chosen for an x of this shape."""
    if isinstance(granularity, PerTensor):
        return (1,) * len(shape)
    if isinstance(granularity, PerToken | PerFeature):
        last = checks.check_axis(function, -1, len(shape))
        return tuple(n if (a == last) == isinstance(granularity, PerFeature) else 1 for a, n in enumerate(shape))
    axes = tuple(checks.check_axis(function, a, len(shape)) for a in _list_axes(granularity.axis))
    checks.require(len(set(axes)) == len(axes), function, "axis", "different axes", granularity.axis)
    if isinstance(granularity, PerAxis):
        return tuple(n if a in axes else 1 for a, n in enumerate(shape))
    return tuple(-(-n // granularity.size) if a in axes else n for a, n in enumerate(shape))


def resolve_onnx(
    function: str,
    argument: str,
    scale: jax.Array,
    shape: tuple[int, ...],
    axis: int,
    block_size: int,
) -> Granularity:
    """Reads ONNX's granularity off a scale's shape, strictly, or raises a contract error.

    A scalar, or a 1-D scale of one element, is per tensor and `axis` is not looked at; any other 1-D scale is
    per axis; a scale of x's rank with a `block_size` is blocked. Nothing else is let through.
    """
    checks.check_integer(function, "block_size", block_size)
    checks.require(block_size >= 0, function, "block_size", "0 or a positive integer", block_size)
    if block_size > 0:
        return _resolve_blocked(function, argument, scale, shape, axis, block_size)
    checks.check_integer(function, "axis", axis)
    if scale.ndim == 0 or scale.shape == (1,):
        return PerTensor()
    checks.require(
        scale.ndim == 1,
        function,
        argument,
        "a scalar, a 1-D array (squeeze what keepdims kept), or a block_size for an array of x's rank",
        f"shape {scale.shape} with block_size=0",
    )
    kept = checks.check_axis(function, axis, len(shape))
    reason = f"x has shape {shape}, axis={axis}"
    checks.check_shape(function, argument, scale, (shape[kept],), reason)
    return PerAxis(kept)


def _resolve_blocked(
    function: str,
    argument: str,
    scale: jax.Array,
    shape: tuple[int, ...],
    axis: int,
    block_size: int,
) -> Blocked:
    kept = checks.check_axis(function, axis, len(shape))
    blocks = -(-shape[kept] // block_size)
    expected = (*shape[:kept], blocks, *shape[kept + 1 :])
    reason = f"x has shape {shape}, axis={axis}, block_size={block_size}"
    checks.check_shape(function, argument, scale, expected, reason)
    return Blocked(kept, int(block_size))


def check_matching(function: str, argument: str, zero_point: jax.Array, scale: jax.Array, scale_name: str) -> None:
    """Requires a zero point of its scale's shape; () and (1,) pass for each other, as in ONNX Runtime."""
    single = ((), (1,))
    if not (zero_point.shape in single and scale.shape in single):
        reason = f"the shape of {scale_name}"
        checks.check_shape(function, argument, zero_point, scale.shape, reason)


def find_slices(function: str, axis: int | None, shape: tuple[int, ...]) -> Granularity:
    """Reads the `axis=` of an operator that finds its own scale: None is per tensor."""
    return PerTensor() if axis is None else PerAxis(checks.check_axis(function, axis, len(shape)))


def find_reduced_axes(granularity: Granularity, rank: int) -> tuple[int, ...]:
    """Returns the axes that share one scale under a per-tensor or per-axis granularity."""
    kept = _list_axes(granularity.axis) if isinstance(granularity, PerAxis) else ()
    return tuple(a for a in range(rank) if a not in kept)


def sum_to_scale(granularity: Granularity, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Sums an array of x's shape into one of the scale's shape and placement: the transpose of `expand`."""
    # XLA:CPU adds up an array in memory four times faster than one that it is still computing.
    values = lax.platform_dependent(values, cpu=lax.optimization_barrier, default=lambda v: v)
    ones = jnp.ones_like(values)  # under shard_map the product is what varies, and its transpose sums over devices
    _, transpose = jax.vjp(lambda s: granularity.expand(s, values) * ones, scale.astype(values.dtype))
    return transpose(values)[0]
