"""The contraction of a float array with a quantized one, in the forms that XLA fuses into few kernels with CUDA.

Dequantized to 16 bits, all weights are written to memory and read again. On an H200, with 8192 x 8192 int8 codes and
bfloat16 rows, a product then takes 136 us at 1 row, 138 at 128 and 513 at 2048, where weights of bfloat16 take 40, 51
and 386. So:

- A single row is multiplied with the values in float32 by one reduction: 38 us with int8, 84 with int4 in blocks of 32.
- Codes of 8 bits with a scale for each output, or one for all, are converted to the dtype of the floats, in which they
  are exact. XLA does this in the kernel of the product. The scale is applied to the sums: 33 us at 8 rows, 62 at 128,
  490 at 2048.
- Of a few rows, each block is contracted alone, and its scale is applied to the sum: 93 us at 8 rows of int4.

None of them rounds the weights to 16 bits. The sums of the second form overflow if they are beyond float32 before they
are scaled. With a zero point or an offset, an infinite number among a few rows may give NaN. The last two forms are
only for matrices with lengths that are multiples of 128: products of 4-bit codes, and of codes with lengths such as 3
and 5, were wrong in XLA's kernels, with jaxlib 0.11.2.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import dtypes, granularity
from .._kernels import weight_chunks, words
from .._kernels.contraction import Role

# The forms whose values have roundings of their own.
ROUNDED_FORMS = {"real_zero_point", "inverse_scale", "arithmetic"}
# With up to this many rows, blocks are contracted one by one: each has a sum for each row and output.
_FEW_ROWS, _LEAST_BLOCK = 16, 16
# Both lengths of a matrix are multiples of this in the last two forms; the docstring above says why.
_UNIT = 128


class CudaContraction(weight_chunks.WeightOnly, Protocol):
    """What these forms read of a weight-only contraction."""

    @property
    def left(self) -> Role:
        """The role of each dimension of lhs."""
        ...

    @property
    def right(self) -> Role:
        """The role of each dimension of rhs."""
        ...

    @property
    def quantized(self) -> int:
        """0 if lhs is quantized, 1 if rhs is."""
        ...

    @property
    def precision(self) -> lax.PrecisionLike:
        """As in `jax.lax.dot_general`."""
        ...

    def unflatten(self, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> QuantizedArray:
        """Return the quantized side."""
        ...

    def swap_sides(self, y: jax.Array) -> jax.Array:
        """Return a product of x and the codes, without batch dimensions, in the order of lhs and rhs."""
        ...


def contract(
    config: CudaContraction, x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None
) -> jax.Array:
    """Return the float32 contraction of x with codes."""
    # The barriers write computed or transposed entries to memory. Otherwise XLA transposes the codes instead.
    scale = lax.optimization_barrier(scale)
    zero_point = zero_point if zero_point is None else lax.optimization_barrier(zero_point)
    q = config.unflatten(codes, scale, zero_point)
    role, x_role = (config.left, config.right) if config.quantized == 0 else (config.right, config.left)
    rows = math.prod(x.shape[axis] for axis in x_role.free)
    is_static = all(isinstance(n, int) for n in (*x.shape, *q.shape)) and 0 not in (*x.shape, *q.shape)
    if not is_static or role.batch or _rounds_weights(q) or not _has_full_blocks(q):
        return weight_chunks.contract_at_once(config, x, codes, scale, zero_point)
    flat = lax.transpose(x, (*x_role.free, *x_role.contracted)).reshape(rows, -1)
    y = None
    if rows == 1:
        y = _sum_row(flat[0], q, role)
    elif _is_aligned_matrix(q) and len(role.contracted) == 1:
        precision: Any = config.precision
        if isinstance(precision, tuple) and config.quantized == 0:
            precision = precision[::-1]
        if _has_exact_codes(q, role):
            y = _scale_sums(flat, q, role, precision)
        elif rows <= _FEW_ROWS:
            y = _contract_blocks(flat, q, role, precision)
    if y is None:
        return weight_chunks.contract_at_once(config, x, codes, scale, zero_point)
    shape = (*(x.shape[axis] for axis in x_role.free), *(q.shape[axis] for axis in role.free))
    return config.swap_sides(y.reshape(shape))


def _scale_sums(x: jax.Array, q: QuantizedArray, role: Role, precision: lax.PrecisionLike) -> jax.Array:
    """Return the product of rows, [rows, contracted], with codes that are exact in the dtype of x, then scaled."""
    codes = q.codes.astype(x.dtype)
    if q.zero_point is not None:
        # The difference of two codes of 8 bits is exact in 16 bits, too.
        codes = codes - _expand_entries(q.zero_point.astype(x.dtype), codes.shape)
    y = lax.dot_general(x, codes, (((1,), role.contracted), ((), ())), precision, jnp.float32)
    scale = _expand_entries(dtypes.scale_as_float32(q.scale).reshape(1, -1), (1, y.shape[1]))
    return y * jnp.broadcast_to(scale, y.shape)


def _sum_row(x: jax.Array, q: QuantizedArray, role: Role) -> jax.Array | None:
    """Return the product of a single row, [contracted], with the values of q, as one reduction; or None."""
    x = x.astype(jnp.float32)
    if q.packing is not None:
        values = _read_words(q, role)
        return None if values is None else _sum_lanes(x, values, role.contracted == (1,))
    factors = x.reshape([q.shape[axis] for axis in role.contracted])
    ordered = lax.transpose(factors, [int(i) for i in np.argsort(role.contracted)])
    return jnp.sum(lax.broadcast_in_dim(ordered, q.shape, sorted(role.contracted)) * _read_values(q), role.contracted)


def _contract_blocks(x: jax.Array, q: QuantizedArray, role: Role, precision: lax.PrecisionLike) -> jax.Array | None:
    """Return the product of a few rows, [rows, contracted], with a matrix whose blocks are contracted, or None.

    The codes of each block are contracted alone, in the dtype of x; the scale of the block is applied to the sum.
    """
    # XLA converts unsigned codes of 4 bits in memory, which takes longer than to dequantize them.
    if q.packing is not None or q.codebook is not None or q.codes.dtype not in (*dtypes.EIGHT_BITS, jnp.int4):
        return None
    axis, (rows, depth) = role.contracted[0], x.shape
    counts = [part.shape[axis] for part in (q.scale, q.zero_point, q.offset) if part is not None]
    blocks = math.lcm(*counts)
    # A GPU rounds float32 rows in the product, but not in their sums, so that what is added would not cancel.
    is_added = len(counts) > 1 and x.dtype == dtypes.FLOAT32
    if is_added or depth % (blocks * _LEAST_BLOCK):
        return None
    cut = (blocks, depth // blocks)
    codes = q.codes.astype(x.dtype).reshape((*cut, -1) if axis == 0 else (-1, *cut))
    dimensions = (((2,), (1 if axis == 0 else 2,)), ((1,), (axis,)))
    sums = lax.dot_general(x.reshape(rows, *cut), codes, dimensions, precision, jnp.float32)

    def arrange(part: jax.Array) -> jax.Array:
        """Return the entries of the blocks as [blocks, 1, outputs]."""
        shape = (blocks, q.shape[1]) if axis == 0 else (q.shape[0], blocks)
        wide = _expand_entries(dtypes.scale_as_float32(part), shape)
        return (wide if axis == 0 else wide.T)[:, None]

    scale = arrange(q.scale)
    y = jnp.sum(sums * scale, axis=0)
    if q.zero_point is None and q.offset is None:
        return y
    # What is added to each code of a block is multiplied with the sum of the block's part of the row.
    row_sums = jnp.sum(x.reshape(rows, *cut).astype(jnp.float32), axis=2).T[:, :, None]
    added = jnp.zeros_like(scale) if q.offset is None else arrange(q.offset)
    if q.zero_point is not None:
        added = added - scale * arrange(q.zero_point)
    return y + jnp.sum(row_sums * added, axis=0)


def _read_words(q: QuantizedArray, role: Role) -> jax.Array | None:
    """Return the values of a matrix of codes in words in the order of the words, or None if that is not possible.

    Returns:
        float32 [length of the first dimension, lanes, tiles, words, parts, groups]; see `words`.
    """
    if q.packing is None or q.ndim != 2 or role.batch or len(role.contracted) != 1:
        return None
    bits, length = q.packing.bits, q.packing.length
    if not words.has_full_groups(length):
        return None
    scale, zero_point, offset = (_arrange_entries(q, part) for part in (q.scale, q.zero_point, q.offset))
    if scale is None or zero_point is None or offset is None:
        return None
    size = words.find_shape(length, bits)
    shape = (q.shape[0], size.lanes, size.tiles, size.words, size.parts, size.groups)
    planes = tuple(plane[:, None] for plane in words.split_words(q.stored_codes, bits, length))
    lane, part = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 4))
    levels = _list_levels(q)
    is_signed = levels is None and dtypes.read_bounds(q.packing.format)[0] < 0
    codes = words.read_lane(planes, bits, lane, lane, part, signed=is_signed)
    if q.zero_point is not None:
        codes = codes - zero_point.astype(jnp.int32)
    values = codes.astype(jnp.float32) if levels is None else jnp.asarray(levels)[codes]
    values = values * dtypes.scale_as_float32(scale)
    return values if q.offset is None else values + dtypes.scale_as_float32(offset)


def _read_values(q: QuantizedArray) -> jax.Array:
    """Return the values of an array in float32, by operations that XLA fuses into the kernel of their reader."""
    scale, zero_point, offset = (
        None if part is None else _expand_entries(dtypes.scale_as_float32(part), q.shape)
        for part in (q.scale, q.zero_point, q.offset)
    )
    assert scale is not None
    if q.codebook is not None:
        values = jnp.asarray(np.asarray(q.codebook.levels, np.float32))[q.codes.astype(jnp.int32)]
    else:
        values = q.codes.astype(jnp.float32)
    if zero_point is not None:
        values = values - zero_point
    values = values * scale
    return values if offset is None else values + offset


def _expand_entries(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array with full blocks along any axis with one entry for each index.

    It is broadcast, not gathered as by `granularity.expand_blocks`: XLA does not fuse a gather into a contraction.
    """
    sizes = [(n, length // n) for n, length in zip(part.shape, shape, strict=True)]
    split = tuple(itertools.chain.from_iterable(sizes))
    return lax.broadcast_in_dim(part, split, range(0, len(split), 2)).reshape(shape)


def _has_full_blocks(q: QuantizedArray) -> bool:
    """Return whether all blocks of the scale, the zero point and the offset are full."""
    for part in (q.scale, q.zero_point, q.offset):
        if part is not None:
            sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
            assert sizes is not None
            if any(n * size != length for n, size, length in zip(part.shape, sizes, q.shape, strict=True)):
                return False
    return True


def _repeat(part: jax.Array, times: int) -> jax.Array:
    """Return a matrix with each entry of a row repeated in place."""
    return _expand_entries(part, (part.shape[0], part.shape[1] * times))


def _list_levels(q: QuantizedArray) -> np.ndarray | None:
    """Return the float32 value of each code of a codebook or of float4, or None of integers."""
    assert q.packing is not None
    if q.codebook is not None:
        return np.asarray(q.codebook.levels, np.float32)
    if q.packing.format in dtypes.FLOAT4:
        return np.arange(16, dtype=np.uint8).view(dtypes.FLOAT4[0]).astype(np.float32)
    return None


def _arrange_entries(q: QuantizedArray, part: jax.Array | None) -> jax.Array | None:
    """Return a scale, a zero point or an offset in the order of the words, as `_read_words` returns them.

    An array of one element if there is none, and None if a block ends within a word.
    """
    if part is None:
        return jnp.zeros((1,) * 6, jnp.float32)
    assert q.packing is not None
    size, count = words.find_shape(q.packing.length, q.packing.bits), part.shape[1]
    run = q.shape[1] // count
    if count == 1:
        arranged = part.reshape(-1, 1, 1, 1, 1, 1)
    elif run % words.GROUP == 0:
        groups = _repeat(part, run // words.GROUP)
        arranged = groups.reshape(-1, 1, size.tiles, 1, 1, size.groups)
    elif words.GROUP % run == 0 and run % size.lanes == 0:
        entries = _repeat(part, run // size.lanes)
        entries = entries.reshape(-1, size.tiles, size.groups, size.words, size.parts, 1)
        arranged = entries.transpose(0, 5, 1, 3, 4, 2)
    elif run == 1:
        entries = part.reshape(-1, size.tiles, size.groups, size.words, size.parts, size.lanes)
        arranged = entries.transpose(0, 5, 1, 3, 4, 2)
    else:
        return None
    return _expand_entries(arranged, (q.shape[0] if part.shape[0] > 1 else 1, *arranged.shape[1:]))


def _sum_lanes(x: jax.Array, values: jax.Array, is_last: bool) -> jax.Array:
    """Return the product of a single row and values in the order of words.

    Args:
        x: float32 [contracted].
        values: as `_read_words` returns them.
        is_last: whether the words hold the contracted dimension.

    Returns:
        float32 [outputs].
    """
    _, lanes, tiles, count, parts_of_word, groups = values.shape
    if is_last:
        arranged = x.reshape(tiles, groups, count, parts_of_word, lanes).transpose(4, 0, 2, 3, 1)
        return jnp.sum(arranged[None] * values, axis=(1, 2, 3, 4, 5))
    y = jnp.sum(x[:, None, None, None, None, None] * values, axis=0)
    return y.transpose(1, 4, 2, 3, 0).reshape(-1)


def _is_aligned_matrix(q: QuantizedArray) -> bool:
    """Return whether an array is a matrix whose lengths are multiples of 128."""
    return q.ndim == 2 and all(length % _UNIT == 0 for length in q.shape)


def _has_exact_codes(q: QuantizedArray, role: Role) -> bool:
    """Return whether the codes have 8 bits, and their products have one scale and zero point for each sum."""
    if q.offset is not None or q.codebook is not None or q.packing is not None:
        return False
    if q.codes.dtype not in (*dtypes.EIGHT_BITS, *dtypes.FLOAT8):
        return False
    shared = [part for part in (q.scale, q.zero_point) if part is not None]
    return all(part.shape[axis] == 1 for part in shared for axis in role.contracted)


def _rounds_weights(q: QuantizedArray) -> bool:
    """Return whether the values have roundings of their own, so that no scaled sum of codes has the same ones."""
    return bool(ROUNDED_FORMS & set(quantized_array.list_forms(q)))
