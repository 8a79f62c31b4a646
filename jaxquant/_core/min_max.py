"""The exact least and largest value of each slice of an array; everything that finds a range uses this module.

Floats are compared by their bits, as int32 keys that sort in the same order. XLA:CPU's own minimum and maximum of
floats can lose a NaN in a long array and treat subnormal numbers as 0. The keys keep both, and the sign of a zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import barriers, granularity, recording, sharding

_ZERO = np.int32(0)  # the key of 0
_INFINITY = np.int32(0x7F800000)  # the key of infinity; its complement is the key of -infinity
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LANES = 1024  # with fewer elements in a row, the vector units of a CPU are partly idle
_UNROLLED = 8  # the number of rows that one step of a loop reads; the loop then writes its carry an eighth as often

_Keys = tuple[jax.Array, jax.Array]


def _batch_extremes(_: Any, x: jax.Array, shape: tuple[int, ...], block_size: int | None) -> Any:
    return find_extremes(x, (x.shape[0], *shape), block_size)


@recording.mark("extremes", lambda shape, **_: [(shape, jnp.float32)] * 2, _batch_extremes)
def find_extremes(x: jax.Array, shape: tuple[int, ...], block_size: int | None) -> tuple[jax.Array, jax.Array]:
    """Return the least and the largest value of each slice, bit for bit.

    Both are NaN for a slice that contains a NaN. A slice without elements gives (inf, -inf).

    Args:
        x: float32, float16 or bfloat16.
        shape: Static. The shape of the ranges, of x's rank: each dimension is that of x, 1, or the number of blocks.
        block_size: Static. The length of a block; the last one may be short. None if all blocks are equally long.

    Returns:
        Two float32 arrays of the given shape.
    """
    return decode_ends(*_find_slice_keys(x, shape, block_size))


def find_signed_extremes(
    x: jax.Array, shape: tuple[int, ...], block_size: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (min(x, -0), max(x, 0), bits) of each slice, in the given shape without its dimensions of 1.

    The bits are those of the larger magnitude of the two, as int32. If a slice has a NaN, they are those of a NaN, and
    at least one of the other results is a NaN. A slice without elements gives (-0, 0, 0). The arguments are those of
    `find_extremes`.
    """
    low, high = _find_slice_keys(x, shape, block_size)
    kept = tuple(length for length in shape if not isinstance(length, int) or length != 1)
    # The key of -0 is -1. A negative key has the bits of its magnitude as its complement.
    low, high = lax.min(low.reshape(kept), ~_ZERO), lax.max(high.reshape(kept), _ZERO)
    bits = lax.max(lax.bitwise_not(low), high)
    low, high = (lax.bitcast_convert_type(end, jnp.float32) for end in (lax.bitwise_xor(low, _MAGNITUDE), high))
    return low, high, bits


def _find_kept_lengths(x: jax.Array, axes: tuple[int, ...]) -> list[Any]:
    return [(tuple(n for axis, n in enumerate(x.shape) if axis not in axes), jnp.float32)] * 2


def _batch_min_max(_: Any, x: jax.Array, axes: tuple[int, ...]) -> Any:
    return find_min_max(x, tuple(axis + 1 for axis in axes))


@recording.mark("min_max", _find_kept_lengths, _batch_min_max)
def find_min_max(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return (min(x, 0), max(x, 0)) over `axes` as float32 arrays: NaN where x has a NaN, 0 where x has no elements."""
    shape = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    lengths = tuple(length for axis, length in enumerate(x.shape) if axis not in axes)
    low, high = (keys.reshape(lengths) for keys in _find_slice_keys(x, shape, None))
    return decode_ends(lax.min(low, _ZERO), lax.max(high, _ZERO))


def count_members(x: Any, shape: tuple[int, ...], block_size: int | None) -> np.ndarray:
    """Return how many elements each slice has, as int64 of the given shape; the last blocks may be short."""
    counts = np.ones(shape, np.int64)
    for axis, (size, length) in enumerate(zip(find_slice_sizes(x, shape, block_size), x.shape, strict=True)):
        members = np.minimum(size, length - size * np.arange(shape[axis], dtype=np.int64))
        counts *= members.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return counts


def find_slice_sizes(x: Any, shape: tuple[int, ...], block_size: int | None) -> tuple[int, ...]:
    """Return how many indices of each dimension of x share an entry of an array of the given shape."""
    sizes = granularity.Aligned(block_size).sizes(shape, x.shape)
    assert sizes is not None
    return sizes


# Keys.


def encode_order(x: jax.Array) -> jax.Array:
    """Return int32 keys that sort as the floats do, with a NaN of negative sign below all numbers, any other above."""
    # Operations of the caller, such as a bias and an activation, are a fusion of their own if there are few elements.
    values = lax.convert_element_type(lax.stop_gradient(x), jnp.float32)
    alone = barriers.split_small_fusion(values, barriers.MOST_ALONE)
    return _flip_negative(lax.bitcast_convert_type(alone, jnp.int32))


def decode_order(keys: jax.Array) -> jax.Array:
    """Return the float32 values that `encode_order` maps to these keys."""
    return lax.bitcast_convert_type(_flip_negative(keys), jnp.float32)


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Return the keys of the bits of floats, or the bits of such keys: the mapping is its own inverse."""
    sign = lax.shift_right_arithmetic(bits, np.int32(31))
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, _MAGNITUDE))


def decode_ends(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the floats of the least and the largest keys, both NaN where a NaN was among them."""
    has_nan = lax.bitwise_or(lax.lt(low, ~_INFINITY), lax.gt(high, _INFINITY))
    nan = lax.full_like(low, np.nan, jnp.float32)
    return lax.select(has_nan, nan, decode_order(low)), lax.select(has_nan, nan, decode_order(high))


# Slices.


def _find_slice_keys(x: jax.Array, shape: tuple[int, ...], block_size: int | None) -> _Keys:
    """Return the least and the largest key of each slice, in the given shape."""
    if x.size == 0:
        return jnp.full(shape, _INFINITY), jnp.full(shape, ~_INFINITY)
    for axis, size in enumerate(find_slice_sizes(x, shape, block_size)):
        if size not in (1, x.shape[axis]):
            return _find_block_keys(x, shape, block_size, axis, size)
    units = tuple(axis for axis, length in enumerate(x.shape) if length == 1)
    # Without dimensions of 1, an entry of 1 always means that the dimension is reduced.
    x, entries = lax.squeeze(x, units), [n for axis, n in enumerate(shape) if axis not in units]
    low, high = _reduce_keys(x, tuple(axis for axis, n in enumerate(entries) if n == 1))
    return low.reshape(shape), high.reshape(shape)


def _find_block_keys(x: jax.Array, shape: tuple[int, ...], block_size: int | None, axis: int, size: int) -> _Keys:
    """Return the keys of an x whose `axis` is cut into blocks.

    The full blocks become a dimension of their own, and a short last block is reduced separately. Padding it instead
    would copy x twice, because the minimum and the maximum need different fill values.
    """
    length = x.shape[axis]
    full = length // size
    x = sharding.gather_axes(x, (axis,))  # a dimension can be cut only where all of it is on one device
    ends = []
    for start, blocks, width in ((0, full, size), (full * size, 1, length - full * size)):
        if blocks == 0 or width == 0:
            continue
        part = lax.slice_in_dim(x, start, start + blocks * width, axis=axis)
        part = part.reshape(*x.shape[:axis], blocks, width, *x.shape[axis + 1 :])
        keys = _find_slice_keys(part, (*shape[:axis], blocks, 1, *shape[axis + 1 :]), block_size)
        ends.append([end.reshape(*shape[:axis], blocks, *shape[axis + 1 :]) for end in keys])
    low, high = (lax.concatenate([keys[i] for keys in ends], axis) for i in (0, 1))
    return low, high


# Reductions.


def _reduce_keys(x: jax.Array, axes: tuple[int, ...]) -> _Keys:
    """Return the least and the largest key over `axes`, without these dimensions; x has no dimension of 0 or 1."""
    if sharding.is_placed(x):
        return _reduce_each(encode_order(x), axes)
    if axes == tuple(range(x.ndim - len(axes), x.ndim)):
        return _reduce_together(x, axes)
    x, axes = _merge_neighbors(x, axes)
    if axes[-1] == x.ndim - 1:
        return _reduce_together(x, axes)
    on_cpu = functools.partial(_fold_rows, axes=axes)
    return lax.platform_dependent(x, cpu=on_cpu, default=functools.partial(_reduce_together, axes=axes))


def _reduce_each(keys: jax.Array, axes: tuple[int, ...]) -> _Keys:
    # This is for arrays whose sharding is part of their type: JAX has sharding rules for these two reductions, and it
    # cannot merge sharded dimensions.
    return lax.reduce_min(keys, axes), lax.reduce_max(keys, axes)


def _reduce_together(x: jax.Array, axes: tuple[int, ...]) -> _Keys:
    # This is for a last dimension that is reduced. One reduction finds both ends, over x in its own shape: XLA:CPU then
    # reads x once, with vector instructions, and computes x in the same loop. The loop would be scalar if it found one
    # end alone, if it reduced floats, or if x were flattened.
    # Of few elements, the keys and their reduction are one fusion each.
    keys = barriers.split_small_fusion(encode_order(x), barriers.MOST_ALONE)
    low, high = lax.reduce((keys, keys), (_INFINITY, ~_INFINITY), _merge_ends, axes)
    return low, high


def _merge_neighbors(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Return x with each run of adjacent reduced or adjacent kept dimensions merged into one, and its reduced axes.

    XLA:CPU is faster over fewer dimensions if a kept dimension comes after a reduced one. It would be slower if only
    the last dimensions were reduced, because the loop that computes x would have to split each merged index again.
    """
    groups = [(is_reduced, list(run)) for is_reduced, run in itertools.groupby(range(x.ndim), lambda a: a in axes)]
    merged = x.reshape([math.prod(x.shape[axis] for axis in run) for _, run in groups])
    return merged, tuple(i for i, (is_reduced, _) in enumerate(groups) if is_reduced)


def _merge_ends(a: Any, b: Any) -> _Keys:
    return lax.min(a[0], b[0]), lax.max(a[1], b[1])


def _fold_rows(x: jax.Array, axes: tuple[int, ...]) -> _Keys:
    # If the last dimension is kept, XLA:CPU reduces element by element. A loop over rows uses vector instructions,
    # because its carry is a row. Adjacent dimensions are merged, so the second to last dimension holds the rows.
    *outer, rows, after = x.shape
    before = math.prod(outer)
    # Several short rows are joined into one that fills the vector registers.
    joined = math.gcd(rows, 2 ** max(0, (_LANES // (before * after)).bit_length() - 1))
    table = x.reshape(before, rows // joined, joined * after)
    rows_per_step = min(_UNROLLED, table.shape[1])

    def read_rows(i: Any, ends: _Keys) -> _Keys:
        # In the last step dynamic_slice may move back and read some rows again, which changes no extreme.
        keys = encode_order(lax.dynamic_slice_in_dim(table, i * rows_per_step, rows_per_step, axis=1))
        for j in range(rows_per_step):
            row = lax.index_in_dim(keys, j, axis=1, keepdims=False)
            ends = _merge_ends(ends, (row, row))
        return ends

    first = encode_order(lax.index_in_dim(table, 0, axis=1, keepdims=False))
    ends = lax.fori_loop(0, -(-table.shape[1] // rows_per_step), read_rows, (first, first))
    low, high = (keys.reshape(before, joined, after) for keys in ends)
    low, high = lax.reduce_min(low, (1,)), lax.reduce_max(high, (1,))
    slice_shape, outer_axes = (*outer, after), axes[:-1]
    low, high = low.reshape(slice_shape), high.reshape(slice_shape)
    # XLA would merge a reduction with the loop of its only reader, which would then be split over threads.
    return lax.optimization_barrier((lax.reduce_min(low, outer_axes), lax.reduce_max(high, outer_axes)))
