"""Granularities: which elements of an array share a scale.

Each granularity expands a scale to the shape of x. This gives one form to the scalar, 1-D and blocked scales of ONNX
and to the scales of a `QuantizedArray`, which have x's rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from . import checks, sharding


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array."""

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Return a `scale` of one element in the shape and sharding of `like`."""
        return sharding.place_like(lax.broadcast(scale.reshape(()), like.shape), like)


@dataclasses.dataclass(frozen=True)
class PerAxis:
    """One scale per index of the given axis or axes; the elements along all other axes share it.

    Attributes:
        axis: an int, or a tuple of several; a negative one counts from the back.

    Raises:
        TypeError: an axis is not an int.
        ValueError: the tuple is empty, or names an axis twice.
    """

    axis: int | tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the axes, and store a list as a tuple."""
        object.__setattr__(self, "axis", _check_static_axes("PerAxis", self.axis))

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Return `scale`, which has the shape of the kept axes, in the shape and sharding of `like`."""
        return sharding.place_like(lax.broadcast_in_dim(scale, like.shape, _list_axes(self.axis)), like)


@dataclasses.dataclass(frozen=True)
class Blocked:
    """One scale per run of `size` indices along the axis and per index of all other axes; the last run may be short.

    Attributes:
        axis: an int, or a tuple of several, each cut into runs; a negative one counts from the back.
        size: the number of indices in a run, or a tuple with a number for each axis. Equal numbers become one.

    Raises:
        TypeError: an axis or a size is not an int.
        ValueError: a size is not positive; the tuple of axes is empty, or names an axis twice; there are not as many
            sizes as axes.
    """

    axis: int | tuple[int, ...]
    size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the axes and the sizes, and store lists as tuples."""
        given: Any = self.size
        axis = _check_static_axes("Blocked", self.axis)
        object.__setattr__(self, "axis", axis)
        sizes = tuple(given) if isinstance(given, list | tuple) else (given,)
        for size in sizes:
            checks.check_integer("Blocked", "size", size)
            checks.require(size > 0, "Blocked", "size", "a positive int", size)
        if isinstance(given, list | tuple):
            count = len(_list_axes(axis))
            checks.require(len(sizes) == count, "Blocked", "size", f"an int, or {count} of them", given)
        size = int(sizes[0]) if len(set(sizes)) == 1 else tuple(int(size) for size in sizes)
        object.__setattr__(self, "size", size)

    def list_sizes(self, rank: int) -> tuple[int, ...]:
        """Return the number of indices in a run for each dimension of an array of a rank."""
        axes = _list_axes(self.axis)
        sizes = self.size if isinstance(self.size, tuple) else (self.size,) * len(axes)
        of_axis = {axis % rank: size for axis, size in zip(axes, sizes, strict=True)} if rank else {}
        return tuple(of_axis.get(axis, 1) for axis in range(rank))

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Return `scale` with each entry along the axis repeated `size` times, in the shape of `like`."""
        return Groups(self.list_sizes(like.ndim)).expand(scale, like)


@dataclasses.dataclass(frozen=True)
class PerToken:
    """One scale per index of all axes except the last, for any rank: the features of a token share a scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerToken())
        >>> jq.quantize(jnp.ones((2, 5, 3)), spec).scale.shape, jq.quantize(jnp.ones(3), spec).scale.shape
        ((2, 5, 1), (1,))
    """


@dataclasses.dataclass(frozen=True)
class PerFeature:
    """One scale per index of the last axis, for any rank; in the weights of a Flax layer, one per output feature.

    The output features of a layer's kernel are the axes that its contraction keeps. That is the last axis in a dense
    layer or a convolution, possibly several axes in `DenseGeneral` and `Einsum`, and the rows in an embedding, which
    become the outputs of `attend`.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.quantize(jnp.ones((2, 5, 3)), jq.QuantSpec(jnp.int8, jq.PerFeature())).scale.shape
        (1, 1, 3)
    """


# The length of the runs of indices that share an entry of a scale, which its shape does not imply if the last run is
# shorter than the others: one length for all dimensions that are cut into runs, or one for each of the last dimensions,
# 1 for a dimension with runs that the shape implies. None if the shape implies all of them.
BlockSize = int | tuple[int, ...] | None


def shorten_block_size(sizes: BlockSize) -> BlockSize:
    """Return a block size in its shortest form, so that equal ones compare equal."""
    if not isinstance(sizes, tuple):
        return sizes
    used = {size for size in sizes if size != 1}
    if len(used) < 2:
        return used.pop() if used else None
    first = next(i for i, size in enumerate(sizes) if size != 1)
    return sizes[first:]


@dataclasses.dataclass(frozen=True)
class Aligned:
    """The granularity of a scale of x's rank, read from its shape.

    Along a dimension of 1 all indices share a scale, along a dimension as long as x's each index has its own, and any
    other length is the number of runs of indices that share a scale.

    Attributes:
        block_size: the length of a run, or one for each of the last dimensions. If it is None, or 1 for a dimension,
            all runs have the same length.
    """

    block_size: BlockSize = None

    def get_size(self, axis: int, rank: int) -> int | None:
        """Return the stored length of the runs of a dimension, or None."""
        if not isinstance(self.block_size, tuple):
            return self.block_size
        place = len(self.block_size) - rank + axis
        size = self.block_size[place] if place >= 0 else 1
        return None if size == 1 else size

    def sizes(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return how many indices of each dimension share an entry, or None if the shapes do not fit."""
        if len(scale) != len(shape):
            return None
        sizes = []
        for axis, (entries, length) in enumerate(zip(scale, shape, strict=True)):
            size = self.get_size(axis, len(shape))
            if entries == 1:
                sizes.append(length)
            elif entries == length:
                sizes.append(1)
            elif size is not None and -(-length // size) == entries:
                sizes.append(size)
            elif size is None and entries and length % entries == 0:
                sizes.append(length // entries)
            else:
                return None
        return tuple(sizes)

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Return `scale` in the shape and sharding of `like`."""
        # Without runs a broadcast is enough, and it keeps the sharding, which a reshape would lose.
        if all(entries in (1, length) for entries, length in zip(scale.shape, like.shape, strict=True)):
            return sharding.place_like(lax.broadcast_in_dim(scale, like.shape, range(like.ndim)), like)
        sizes = self.sizes(scale.shape, like.shape)
        assert sizes is not None
        return Groups(sizes).expand(scale, like)


@dataclasses.dataclass(frozen=True)
class Groups:
    """One scale per box of elements. `sizes` has one entry for each dimension; the last boxes may be short."""

    sizes: tuple[int, ...]

    def expand(self, scale: jax.Array, like: jax.Array) -> jax.Array:
        """Return `scale` with each entry repeated over its box, in the shape and sharding of `like`."""
        # A box may be longer than its dimension; repeating an entry beyond the dimension would only waste memory.
        sizes = tuple(min(size, max(length, 1)) for size, length in zip(self.sizes, like.shape, strict=True))
        # Broadcast [blocks, ...] to [blocks, size, ...], merge the pairs of dimensions, and cut off a short last box.
        interleaved = tuple(n for pair in zip(scale.shape, sizes, strict=True) for n in pair)
        merged = tuple(length * size for length, size in zip(scale.shape, sizes, strict=True))
        dimensions = tuple(range(0, 2 * scale.ndim, 2))
        if not sharding.is_placed(like):
            repeated = lax.broadcast_in_dim(sharding.place_whole(scale), interleaved, dimensions).reshape(merged)
            return lax.slice(repeated, (0,) * like.ndim, like.shape)
        # JAX cannot infer the sharding of the reshape. Where each device has whole boxes, it is `like.sharding`.
        mesh, kept = jax.typeof(like).sharding.mesh, sharding.match_whole_runs(like, scale.shape, sizes)
        scale = reshard(scale, NamedSharding(mesh, PartitionSpec(*kept)))
        repeated = lax.broadcast_in_dim(scale, interleaved, dimensions)
        repeated = lax.reshape(repeated, merged, out_sharding=NamedSharding(mesh, PartitionSpec(*kept)))
        return sharding.place_like(lax.slice(repeated, (0,) * like.ndim, like.shape), like)


Granularity = PerTensor | PerAxis | Blocked | Groups | Aligned
Choice = PerTensor | PerAxis | Blocked | PerToken | PerFeature  # the granularities that a user can choose


def derive_scale_shape(function: str, granularity: Choice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, of x's rank, that a scale of this granularity has for an x of the given shape."""
    if isinstance(granularity, PerTensor):
        return (1,) * len(shape)
    if isinstance(granularity, PerToken | PerFeature):
        last = checks.check_axis(function, -1, len(shape))
        if isinstance(granularity, PerFeature):
            return (*(1,) * last, shape[last])
        return (*shape[:last], 1)
    axes = tuple(checks.check_axis(function, axis, len(shape)) for axis in _list_axes(granularity.axis))
    checks.require(len(set(axes)) == len(axes), function, "axis", "distinct axes", granularity.axis)
    if isinstance(granularity, PerAxis):
        return tuple(n if a in axes else 1 for a, n in enumerate(shape))
    # Rounded up, because the last run may be short.
    sizes = granularity.list_sizes(len(shape))
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def resolve_onnx(
    function: str, argument: str, scale: jax.Array, shape: tuple[int, ...], axis: int, block_size: int
) -> Granularity:
    """Return the granularity of an ONNX operator's scale, read from its shape; raise for any other shape.

    A scalar or a 1-D scale of one element is per tensor, and `axis` is ignored. Any other 1-D scale is per axis. With a
    `block_size`, the scale must have x's rank and is blocked.
    """
    checks.check_integer(function, "block_size", block_size)
    checks.require(block_size >= 0, function, "block_size", "0 or a positive integer", block_size)
    if block_size > 0:
        dimension = checks.check_axis(function, axis, len(shape))
        expected = (*shape[:dimension], -(-shape[dimension] // block_size), *shape[dimension + 1 :])
        reason = f"x has shape {shape}, axis={axis}, block_size={block_size}"
        checks.check_shape(function, argument, scale, expected, reason)
        return Blocked(dimension, int(block_size))
    checks.check_integer(function, "axis", axis)
    if scale.ndim == 0 or scale.shape == (1,):
        return PerTensor()
    checks.require(
        scale.ndim == 1,
        function,
        argument,
        "a scalar, a 1-D array (squeeze the dimensions of 1), or a block_size for an array of x's rank",
        f"shape {scale.shape} with block_size=0",
    )
    dimension = checks.check_axis(function, axis, len(shape))
    reason = f"x has shape {shape}, axis={axis}"
    checks.check_shape(function, argument, scale, (shape[dimension],), reason)
    return PerAxis(dimension)


def check_matching(function: str, argument: str, zero_point: jax.Array, scale: jax.Array, scale_name: str) -> None:
    """Raise ContractValueError unless a zero point has the shape of its scale; () matches (1,), as in ONNX Runtime."""
    single = ((), (1,))
    if not (zero_point.shape in single and scale.shape in single):
        checks.check_shape(function, argument, zero_point, scale.shape, f"the shape of {scale_name}")


def resolve_axis(function: str, axis: int | None, shape: tuple[int, ...]) -> Granularity:
    """Return the granularity that an operator's argument `axis` means if the operator computes the scale itself."""
    return PerTensor() if axis is None else PerAxis(checks.check_axis(function, axis, len(shape)))


def list_reduced_axes(granularity: Granularity, rank: int) -> tuple[int, ...]:
    """Return the axes that share one scale under a per-tensor or per-axis granularity."""
    indexed_axes = _list_axes(granularity.axis) if isinstance(granularity, PerAxis) else ()
    return tuple(axis for axis in range(rank) if axis not in indexed_axes)


def _list_axes(axis: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else axis


def _check_static_axes(function: str, axis: Any) -> int | tuple[int, ...]:
    if not isinstance(axis, list | tuple):
        checks.check_integer(function, "axis", axis)
        return int(axis)
    for entry in axis:
        checks.check_integer(function, "axis", entry)
    checks.require(len(set(axis)) == len(axis) > 0, function, "axis", "one or more distinct ints", axis)
    # A tuple of one axis becomes that axis, so that (0,) and 0 make granularities that are equal and hash equally.
    return int(axis[0]) if len(axis) == 1 else tuple(int(entry) for entry in axis)


def expand_blocks(part: jax.Array, axis: int, size: int, length: int) -> jax.Array:
    """Return a scale or zero point with one entry per index of an axis on which each entry covers `size` indices."""
    # The last block may be short: repeat its entry as if it were whole, then cut off the excess.
    repeated = jnp.repeat(part, size, axis=axis, total_repeat_length=part.shape[axis] * size)
    return lax.slice_in_dim(repeated, 0, length, axis=axis)


def expand_along(part: jax.Array, shape: tuple[int, ...], block_size: BlockSize, axes: Sequence[int]) -> jax.Array:
    """Return a scale or zero point of codes of a shape with its blocks along `axes` expanded to one entry per index."""
    sizes = Aligned(block_size).sizes(part.shape, shape)
    assert sizes is not None
    for axis in axes:
        if part.shape[axis] not in (1, shape[axis]):
            part = expand_blocks(part, axis, sizes[axis], shape[axis])
    return part
