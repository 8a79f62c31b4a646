"""The exact least and largest value of each slice of an array; everything that finds a range uses this module.

Floats are compared by their bits, as int32 keys that sort in the same order. XLA:CPU's own minimum and maximum of
floats can lose a NaN in a long array and treat subnormal numbers as 0. The keys keep both, and the sign of a zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import granularity, recording, sharding
from . import affine, barriers

_ZERO = np.int32(0)  # the key of 0
_INFINITY = np.int32(0x7F800000)  # the key of infinity; its complement is the key of -infinity
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LANES = 1024  # with fewer elements in a row, the vector units of a CPU are partly idle
_UNROLLED = 8  # the number of rows that one step of a loop reads; the loop then writes its carry an eighth as often

_Keys = tuple[jax.Array, ...]


class _Measure(NamedTuple):
    """What the reductions find in each slice.

    Attributes:
        encode: a function from floats to the int32 keys that are compared.
        merges: for each result, which of two keys it keeps.
        reductions: for each result, the same over whole dimensions.
        starts: the results for no elements.
    """

    encode: Callable[[jax.Array], jax.Array]
    merges: tuple[Callable[..., jax.Array], ...]
    reductions: tuple[Callable[..., jax.Array], ...]
    starts: tuple[np.int32, ...]


def _batch_extremes(_: object, x: jax.Array, shape: tuple[int, ...], block_size: granularity.BlockSize) -> Any:
    return compute_extremes(x, (x.shape[0], *shape), block_size)


@recording.mark("extremes", lambda shape, **_: [(shape, jnp.float32)] * 2, _batch_extremes)
def compute_extremes(
    x: jax.Array, shape: tuple[int, ...], block_size: granularity.BlockSize
) -> tuple[jax.Array, jax.Array]:
    """Return the least and the largest value of each slice, bit for bit.

    Both are NaN for a slice that contains a NaN. A slice without elements gives (inf, -inf).

    Args:
        x: float32, float16 or bfloat16.
        shape: Static. The shape of the ranges, of x's rank: each dimension is `x.shape[i]`, 1, or the number of blocks.
        block_size: Static. The length of a block; the last one may be short. Or one for each of the last dimensions.
            None if all blocks are equally long.

    Returns:
        Two float32 arrays of the given shape.
    """
    return decode_ends(*_reduce_slices(x, shape, block_size, _ENDS))


def compute_magnitudes(x: jax.Array, shape: tuple[int, ...], block_size: granularity.BlockSize) -> jax.Array:
    """Return the bits of the largest magnitude of each slice, as int32, without the dimensions of 1 of the given shape.

    They are the bits of a NaN if the slice has one, and 0 for a slice without elements. The arguments are as in
    `compute_extremes`.
    """
    (bits,) = _reduce_slices(x, shape, block_size, _MAGNITUDES)
    return bits.reshape(_drop_units(shape))


def compute_signed_extremes(
    x: jax.Array, shape: tuple[int, ...], block_size: granularity.BlockSize
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (min(x, -0), max(x, 0), bits) of each slice, in the given shape without its dimensions of 1.

    The bits are max(abs(low), abs(high)) read as int32. If a slice has a NaN, they are the bits of a NaN, and
    at least one of the other results is a NaN. A slice without elements gives (-0, 0, 0). The arguments are as in
    `compute_extremes`.
    """
    kept = _drop_units(shape)
    low, high, bits = _include_zero(*(end.reshape(kept) for end in _reduce_slices(x, shape, block_size, _ENDS)))
    low, high = (lax.bitcast_convert_type(end, jnp.float32) for end in (lax.bitwise_xor(low, _MAGNITUDE), high))
    return low, high, bits


def _list_kept_lengths(x: jax.Array, axes: tuple[int, ...]) -> list[Any]:
    return [(tuple(n for axis, n in enumerate(x.shape) if axis not in axes), jnp.float32)] * 2


def _batch_min_max(_: object, x: jax.Array, axes: tuple[int, ...]) -> Any:
    return compute_min_max(x, tuple(axis + 1 for axis in axes))


@recording.mark("min_max", _list_kept_lengths, _batch_min_max)
def compute_min_max(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return (min(x, 0), max(x, 0)) over `axes` as float32 arrays: NaN where x has a NaN, 0 where x has no elements."""
    shape = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    lengths = tuple(length for axis, length in enumerate(x.shape) if axis not in axes)
    low, high = (keys.reshape(lengths) for keys in _reduce_slices(x, shape, None, _ENDS))
    return decode_ends(lax.min(low, _ZERO), lax.max(high, _ZERO))


def count_members(
    x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, shape: tuple[int, ...], block_size: granularity.BlockSize
) -> np.ndarray:
    """Return how many elements each slice has, as int64 of the given shape; the last blocks may be short."""
    counts = np.ones(shape, np.int64)
    for axis, (size, length) in enumerate(zip(derive_slice_sizes(x, shape, block_size), x.shape, strict=True)):
        members = np.minimum(size, length - size * np.arange(shape[axis], dtype=np.int64))
        counts *= members.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return counts


def derive_slice_sizes(
    x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, shape: tuple[int, ...], block_size: granularity.BlockSize
) -> tuple[int, ...]:
    """Return how many indices of each dimension of x share an entry of an array of the given shape."""
    sizes = granularity.Aligned(block_size).sizes(shape, x.shape)
    assert sizes is not None
    return sizes


# Keys.


def _encode_magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of the magnitudes of floats, which sort as the magnitudes do, with a NaN above all numbers."""
    values = lax.convert_element_type(lax.stop_gradient(x), jnp.float32)
    return lax.bitwise_and(lax.bitcast_convert_type(values, jnp.int32), _MAGNITUDE)


def _include_zero(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the least key of `low` and -0, the largest of `high` and 0, and the bits of the larger magnitude."""
    # The key of -0 is -1. A negative key has the bits of its magnitude as its complement.
    low, high = lax.min(low, ~_ZERO), lax.max(high, _ZERO)
    return low, high, lax.max(lax.bitwise_not(low), high)


def decode_ends(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the floats of the least and the largest keys, both NaN where a NaN was among them."""
    has_nan = lax.bitwise_or(lax.lt(low, ~_INFINITY), lax.gt(high, _INFINITY))
    nan = lax.full_like(low, np.nan, jnp.float32)
    return lax.select(has_nan, nan, affine.decode_order(low)), lax.select(has_nan, nan, affine.decode_order(high))


_ENDS = _Measure(affine.encode_order, (lax.min, lax.max), (lax.reduce_min, lax.reduce_max), (_INFINITY, ~_INFINITY))
_MAGNITUDES = _Measure(_encode_magnitude, (lax.max,), (lax.reduce_max,), (_ZERO,))


# Slices.


def _drop_units(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape without its dimensions of 1."""
    return tuple(length for length in shape if not isinstance(length, int) or length != 1)


def _reduce_slices(x: jax.Array, shape: tuple[int, ...], block_size: granularity.BlockSize, measure: _Measure) -> _Keys:
    """Return the results of a measure for each slice, in the given shape."""
    if x.size == 0:
        return tuple(jnp.full(shape, start) for start in measure.starts)
    return _reduce_runs(x, shape, derive_slice_sizes(x, shape, block_size), measure)


def _reduce_runs(x: jax.Array, shape: tuple[int, ...], sizes: tuple[int, ...], measure: _Measure) -> _Keys:
    """Return what `_reduce_slices` returns, for the number of indices of each dimension that share an entry."""
    for axis, size in enumerate(sizes):
        if size not in (1, x.shape[axis]):
            return _reduce_blocks(x, shape, sizes, axis, measure)
    units = tuple(axis for axis, length in enumerate(x.shape) if length == 1)
    # Without dimensions of 1, an entry of 1 always means that the dimension is reduced.
    x, entries = lax.squeeze(x, units), [n for axis, n in enumerate(shape) if axis not in units]
    keys = _reduce_keys(x, tuple(axis for axis, n in enumerate(entries) if n == 1), measure)
    return tuple(key.reshape(shape) for key in keys)


def _reduce_blocks(x: jax.Array, shape: tuple[int, ...], sizes: tuple[int, ...], axis: int, measure: _Measure) -> _Keys:
    """Return the keys of x, with `axis` cut into blocks.

    The full blocks become a dimension of their own, and a short last block is reduced separately. Padding it instead
    would copy x twice, because the minimum and the maximum need different fill values.
    """
    length, size = x.shape[axis], sizes[axis]
    full = length // size
    x = sharding.gather_axes(x, (axis,))  # a dimension can be cut only where all of it is on one device
    parts = []
    for start, blocks, width in ((0, full, size), (full * size, 1, length - full * size)):
        if blocks == 0 or width == 0:
            continue
        part = lax.slice_in_dim(x, start, start + blocks * width, axis=axis)
        part = part.reshape(*x.shape[:axis], blocks, width, *x.shape[axis + 1 :])
        entries = (*shape[:axis], blocks, 1, *shape[axis + 1 :])
        keys = _reduce_runs(part, entries, (*sizes[:axis], 1, width, *sizes[axis + 1 :]), measure)
        parts.append([key.reshape(*shape[:axis], blocks, *shape[axis + 1 :]) for key in keys])
    return tuple(lax.concatenate(keys, axis) for keys in zip(*parts, strict=True))


# Reductions.


def _reduce_keys(x: jax.Array, axes: tuple[int, ...], measure: _Measure) -> _Keys:
    """Return the results of a measure over `axes`, without these dimensions; x has no dimension of 0 or 1."""
    if sharding.is_placed(x):
        return _reduce_each(measure.encode(x), axes, measure)
    if axes == tuple(range(x.ndim - len(axes), x.ndim)):
        return _reduce_together(x, axes, measure)
    x, axes = _merge_neighbors(x, axes)
    if axes[-1] == x.ndim - 1:
        return _reduce_together(x, axes, measure)
    on_cpu = functools.partial(_fold_rows, axes=axes, measure=measure)
    default = functools.partial(_reduce_together, axes=axes, measure=measure)
    return lax.platform_dependent(x, cpu=on_cpu, default=default)


def _reduce_each(keys: jax.Array, axes: tuple[int, ...], measure: _Measure) -> _Keys:
    # This is for arrays with their sharding in their type: JAX has sharding rules for these reductions, and it
    # cannot merge sharded dimensions.
    return tuple(reduce(keys, axes) for reduce in measure.reductions)


def _reduce_together(x: jax.Array, axes: tuple[int, ...], measure: _Measure) -> _Keys:
    # This is for a last dimension that is reduced. One reduction finds both ends, over x in its own shape: XLA:CPU then
    # reads x once, with vector instructions, and computes x in the same loop. The loop would be scalar if it found one
    # end or the magnitude alone, if it reduced floats, or if x were flattened.
    # Of few elements, the keys and their reduction are one fusion each.
    keys = barriers.split_small_fusion(affine.encode_order(x), barriers.MOST_ALONE)
    low, high = lax.reduce((keys, keys), (_INFINITY, ~_INFINITY), _merge_ends, axes)
    return (low, high) if measure is _ENDS else _include_zero(low, high)[2:]


def _merge_neighbors(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Return x with each run of adjacent reduced or adjacent kept dimensions merged into one, and its reduced axes.

    XLA:CPU is faster over fewer dimensions if a kept dimension comes after a reduced one. It would be slower if only
    the last dimensions were reduced, because the loop that computes x would have to split each merged index again.
    """
    groups = [(is_reduced, list(run)) for is_reduced, run in itertools.groupby(range(x.ndim), lambda a: a in axes)]
    merged = x.reshape([math.prod(x.shape[axis] for axis in run) for _, run in groups])
    return merged, tuple(i for i, (is_reduced, _) in enumerate(groups) if is_reduced)


def _merge_ends(a: _Keys, b: _Keys) -> _Keys:
    return lax.min(a[0], b[0]), lax.max(a[1], b[1])


def _fold_rows(x: jax.Array, axes: tuple[int, ...], measure: _Measure) -> _Keys:
    # If the last dimension is kept, XLA:CPU reduces element by element. A loop over rows uses vector instructions,
    # because its carry is a row. Adjacent dimensions are merged, so the second to last dimension holds the rows.
    *outer, rows, after = x.shape
    before = math.prod(outer)
    # Several short rows are joined into one that fills the vector registers.
    joined = math.gcd(rows, 2 ** max(0, (_LANES // (before * after)).bit_length() - 1))
    table = x.reshape(before, rows // joined, joined * after)
    rows_per_step = min(_UNROLLED, table.shape[1])

    def read_rows(i: jax.Array, kept: _Keys) -> _Keys:
        # In the last step dynamic_slice may move back and read some rows again, which changes no extreme.
        keys = measure.encode(lax.dynamic_slice_in_dim(table, i * rows_per_step, rows_per_step, axis=1))
        for j in range(rows_per_step):
            row = lax.index_in_dim(keys, j, axis=1, keepdims=False)
            kept = tuple(merge(key, row) for merge, key in zip(measure.merges, kept, strict=True))
        return kept

    first = measure.encode(lax.index_in_dim(table, 0, axis=1, keepdims=False))
    steps = -(-table.shape[1] // rows_per_step)
    results = lax.fori_loop(0, steps, read_rows, (first,) * len(measure.merges))
    # XLA would merge a reduction with the loop of its only reader, which would then be split over threads.
    return lax.optimization_barrier(tuple(
        reduce(reduce(keys.reshape(before, joined, after), (1,)).reshape(*outer, after), axes[:-1])
        for reduce, keys in zip(measure.reductions, results, strict=True)
    ))  # fmt: skip
