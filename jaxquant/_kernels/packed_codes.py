"""Conversion between codes of 2 or 4 bits and bytes, in forms that XLA:CPU vectorizes.

Current jaxlib stores several such codes in a byte on a CPU. XLA's own conversion to or from int8 handles one code after
the other if the result has them in the same order. There are two ways around it:

- Whole bytes, or words of eight codes, are read or written by `lax.bitcast_convert_type`, and shifted. For this the
  reader must shift itself, as `float_rows` does; arrays of less than 2**16 codes are converted by XLA, because the
  bytes need a loop of their own.
- The even and the odd columns, or every fourth column, are converted as planes: XLA vectorizes the conversion of every
  second code. A contraction of each plane takes less time than one of all codes, if the planes are joined, or added,
  cheaply: that is, if the other operand has at most half as many rows as terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, sharding
from . import barriers

# Below this number of codes, XLA's own conversion costs less than an additional loop.
_LARGE = 2**16
# The float32 whose last bit is worth 1, and its bits.
_UNIT, UNIT_BITS = 2**23, 0x4B000000


def count_per_byte(codes: jax.Array, dtype: np.dtype | None = None) -> int:
    """Return how many codes a byte holds along the last dimension, of `dtype` or else of `codes.dtype`.

    It is 1 if a byte holds codes of different rows, or cannot be read as a whole.
    """
    dtype = np.dtype(codes.dtype) if dtype is None else dtype
    width = dtypes.count_packed_bits(dtype)
    is_known = dtype in dtypes.INTEGERS or dtype in dtypes.FLOAT4
    if width >= 8 or not is_known or not codes.ndim or sharding.is_placed(codes):
        return 1
    length = codes.shape[-1]
    return 8 // width if isinstance(length, int) and length and length % (8 // width) == 0 else 1


def read_bytes(codes: jax.Array) -> jax.Array:
    """Return the bytes of the codes, uint8 with a shorter last dimension, or the codes if `count_per_byte` is 1."""
    count = count_per_byte(codes)
    if count == 1:
        return codes
    return _join_last(codes, count, np.dtype(jnp.uint8))


def _join_last(codes: jax.Array, count: int, dtype: np.dtype) -> jax.Array:
    """Return codes with `count` of the last dimension in one element of another dtype."""
    if codes.dtype in dtypes.FLOAT4:
        codes = lax.bitcast_convert_type(codes, jnp.uint4)
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count), dtype)


def read_plane(stored: jax.Array, dtype: np.dtype, position: int, count: int) -> jax.Array:
    """Return the codes at one position in their bytes, as int32.

    Args:
        stored: what `read_bytes` returns, or a part of it.
        dtype: the dtype of the codes.
        position: in a byte; the codes `position`, `position + count`, ... of the last dimension are returned.
        count: what `count_per_byte` returns.
    """
    wide = stored.astype(jnp.int32)
    if count == 1:
        return wide
    width = 8 // count
    if dtypes.read_bounds(dtype)[0] == 0:
        return lax.shift_right_logical(wide, np.int32(position * width)) & np.int32(2**width - 1)
    # A shift to the left and back extends the sign.
    raised = lax.shift_left(wide, np.int32(32 - (position + 1) * width))
    return lax.shift_right_arithmetic(raised, np.int32(32 - width))


def read_words(codes: jax.Array) -> jax.Array | None:
    """Return codes of 4 bits as uint32 with a shorter last dimension, or None if they cannot be read like that."""
    return None if count_per_byte(codes) != 2 or codes.shape[-1] % 8 else _join_last(codes, 8, np.dtype(jnp.uint32))


def read_lane(words: jax.Array, dtype: np.dtype, first_bit: jax.Array) -> jax.Array:
    """Return, as int32, the codes that begin at these bits of uint32 words.

    Args:
        words: uint32.
        dtype: the dtype of the codes, of less than 8 bits.
        first_bit: int32, of the shape of `words`.
    """
    width, wide = dtypes.count_packed_bits(dtype), words.astype(jnp.int32)
    # A shift to the left and back removes the other bits and extends the sign.
    raised = lax.shift_left(wide, np.int32(32 - width) - first_bit)
    is_signed = dtypes.read_bounds(dtype)[0] < 0
    return (lax.shift_right_arithmetic if is_signed else lax.shift_right_logical)(raised, np.int32(32 - width))


def unpack_entries(codes: jax.Array, predecessor: jax.Array) -> jax.Array:
    """Return codes of less than 8 bits as int8, those of 4 bits by a loop that XLA:CPU vectorizes, others unchanged.

    The loop waits for `predecessor`; otherwise XLA would unpack those of a whole program first.
    """
    # Rows of a few entries need not be whole words.
    words = read_words(codes.reshape(-1))
    if words is None:
        return codes if dtypes.count_packed_bits(codes.dtype) == 8 else codes.astype(jnp.int8)
    shape, dtype = (*words.shape, 8), np.dtype(codes.dtype)
    first_bit = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) * np.int32(4)
    # The barriers keep XLA from reading words, or codes, one by one where they are used.
    row = jnp.broadcast_to(lax.optimization_barrier(barriers.wait_for(words, predecessor))[..., None], shape)
    return lax.optimization_barrier(read_lane(row, dtype, first_bit).astype(jnp.int8)).reshape(codes.shape)


def widen_codes(codes: jax.Array, wait: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return codes of 4 bits as int8 or uint8, or float4 numbers as bfloat16, by a loop that XLA:CPU vectorizes.

    Codes of other dtypes, and those that cannot be read as words, are returned unchanged. `wait` is applied to words.
    """
    words = read_words(codes) if dtypes.count_packed_bits(codes.dtype) == 4 else None
    if words is None:
        return codes
    shape, dtype = (*words.shape, 8), np.dtype(codes.dtype)
    first_bit = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) * np.int32(4)
    # The barriers keep XLA from reading words, or codes, one by one where they are used.
    row = jnp.broadcast_to(lax.optimization_barrier(wait(words))[..., None], shape)
    if dtype in dtypes.FLOAT4:
        wide = read_bfloat16(row, first_bit)
    else:
        wide = read_lane(row, dtype, first_bit).astype(jnp.int8 if dtypes.read_bounds(dtype)[0] < 0 else jnp.uint8)
    return lax.optimization_barrier(wide).reshape(codes.shape)


def read_steps(words: jax.Array, width: int, first_bit: int | jax.Array, base: jax.Array, *, signed: bool) -> jax.Array:
    """Return, as float32, the codes that begin at these bits of words, minus a zero point.

    A code in the last bits of the float 2**23 adds itself to it. The one subtraction of a float then converts the code,
    subtracts the zero point, and extends the sign. It is exact.

    Args:
        words: uint32 or int32.
        width: the number of bits of a code.
        first_bit: an int, or int32 of the shape of `words`.
        base: what `compute_base` returns for the zero point, of a shape that broadcasts.
        signed: whether the codes are in two's complement.
    """
    wide = words.astype(jnp.uint32)
    shift = np.uint32(first_bit) if isinstance(first_bit, int) else first_bit.astype(jnp.uint32)
    # Changing the sign bit turns two's complement into codes from 0 on.
    code = lax.shift_right_logical(wide, jnp.broadcast_to(shift, wide.shape)) & np.uint32(2**width - 1)
    return lax.bitcast_convert_type(code ^ np.uint32(UNIT_BITS + signed * 2 ** (width - 1)), jnp.float32) - base


def read_float4(words: jax.Array, first_bit: int | jax.Array) -> jax.Array:
    """Return, as float32, four times the float4 numbers that begin at these bits of words, without a branch.

    Args:
        words: integers that hold the bits of the codes.
        first_bit: an int, or int32 of the shape of `words`.
    """
    wide = words.astype(jnp.uint32)
    shift = np.uint32(28 - first_bit) if isinstance(first_bit, int) else (np.int32(28) - first_bit).astype(jnp.uint32)
    # The sign is the highest bit now. Below it, two bits of the exponent and one of the fraction become those of a
    # float32 with an exponent of 2 or more.
    raised = lax.shift_left(wide, jnp.broadcast_to(shift, wide.shape))
    magnitude = lax.shift_right_logical(raised, np.uint32(6)) & np.uint32(0x01C00000)
    y = lax.bitcast_convert_type(magnitude | np.uint32(0x40000000), jnp.float32)
    # Numbers with the lowest exponent are subnormal in float4: 2 and 3 stand for 0 and 2. Others become no smaller.
    # XLA merges this product and this difference to one operation, and would not merge two sums.
    y = lax.min(y, y * np.float32(2) - np.float32(4))
    sign = raised & np.uint32(0x80000000)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.uint32) | sign, jnp.float32)


def read_bfloat16(words: jax.Array, first_bit: int | jax.Array) -> jax.Array:
    """Return the float4 numbers that begin at these bits of words, as bfloat16; see `read_float4`."""
    bits = lax.bitcast_convert_type(read_float4(words, first_bit) * np.float32(0.25), jnp.uint32)
    # A bfloat16 is the upper half of a float32. XLA's conversion would round, which takes longer.
    return lax.bitcast_convert_type(lax.shift_right_logical(bits, np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def compute_base(zero_point: jax.Array, width: int, *, signed: bool) -> jax.Array:
    """Return what `read_steps` subtracts for a zero point, float32, from the zero point in the dtype of the codes."""
    return zero_point.astype(jnp.float32) + np.float32(_UNIT + signed * 2 ** (width - 1))


def read_nibble(words: jax.Array, dtype: np.dtype, first_bit: int) -> jax.Array:
    """Return, as int32, the codes of 4 bits that begin at one bit of each int32 word."""
    if dtypes.read_bounds(dtype)[0] < 0:
        return lax.shift_right_arithmetic(lax.shift_left(words, np.int32(28 - first_bit)), np.int32(28))
    shifted = lax.shift_right_logical(words, np.int32(first_bit)) if first_bit else words
    return shifted & np.int32(15)


def narrow_codes(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return int8 codes, which are within the bounds of a dtype of 2 or 4 bits, in that dtype."""
    if not isinstance(codes.size, int) or codes.size < _LARGE or count_per_byte(codes, dtype) == 1:
        return lax.convert_element_type(codes, dtype)
    pack = functools.partial(_pack_bytes, dtype=dtype)
    convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
    return lax.platform_dependent(codes, cpu=pack, default=convert)


def _pack_bytes(codes: jax.Array, *, dtype: np.dtype) -> jax.Array:
    count = count_per_byte(codes, dtype)
    width, group = 8 // count, {2: np.uint16, 4: np.uint32}[count]
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)
    # The mask keeps the low bits of each byte. Each shift then moves the bits of a byte next to the bits of the
    # one below it, and the narrowing conversion keeps the lowest byte, which has received the bits of all others.
    masks = sum((2**width - 1) << (8 * position) for position in range(count))
    packed = lax.bitcast_convert_type(grouped, group) & group(masks)
    packed = functools.reduce(
        lax.bitwise_or, [lax.shift_right_logical(packed, group((8 - width) * position)) for position in range(count)]
    )
    # The barrier separates the shifts, which XLA vectorizes, from the way in which it stores narrow codes.
    stored = lax.optimization_barrier(lax.convert_element_type(packed, jnp.uint8))
    return lax.bitcast_convert_type(stored, dtype).reshape(codes.shape)


# Planes.


def count_column_planes(codes: jax.Array, *entries: jax.Array | None) -> int:
    """Return how many planes an array has, or 1 if it is not cut into planes.

    Args:
        codes: codes of any dtype and shape.
        entries: arrays of the rank of the codes, or None: their scale and zero point.
    """
    width = dtypes.count_packed_bits(codes.dtype)
    if codes.dtype not in dtypes.INTEGERS or width >= 8 or codes.ndim == 0 or sharding.is_placed(codes):
        return 1
    count, length = 8 // width, codes.shape[-1]
    if not isinstance(length, int) or length == 0 or length % count:
        return 1
    # A block of columns would be spread over the planes.
    is_uniform = all(part is None or part.shape[-1] in (1, length) for part in entries)
    return count if is_uniform else 1


def take_plane(part: jax.Array | None, plane: int, count: int) -> Any:
    """Return the columns `plane`, `plane + count`, ... of an array; one column, or None, belongs to every plane."""
    return part if part is None or part.shape[-1] == 1 else part[..., plane::count]


def take_code_plane(codes: jax.Array, plane: int, count: int) -> jax.Array:
    """Return the columns `plane`, `plane + count`, ... of the codes as int8."""
    return codes[..., plane::count].astype(jnp.int8)


def join_planes(results: list[jax.Array], axis: int) -> jax.Array:
    """Return one array in which the elements of several arrays alternate along an axis."""
    first = results[0].shape
    shape = (*first[:axis], first[axis] * len(results), *first[axis + 1 :])
    return jnp.stack(results, axis=axis + 1).reshape(shape)


def is_faster_in_planes(operands: Sequence[jax.Array], centers: Sequence[Any], roles: Sequence[Any], side: int) -> bool:
    """Return whether a contraction of integers takes less time if one operand is cut into planes.

    Args:
        operands: lhs and rhs.
        centers: their zero points, scalars or of the operands' rank, or None.
        roles: their `Role`s.
        side: 0 for lhs, 1 for rhs.
    """
    codes, role = operands[side], roles[side]
    entries = [part for part in (centers[side],) if part is not None and part.ndim]
    if count_column_planes(codes, *entries) == 1 or codes.ndim - 1 in role.batch:
        return False
    sizes = [operands[1 - side].shape[axis] for axis in roles[1 - side].free]
    depths = [codes.shape[axis] for axis in role.contracted]
    # The results are joined, or added, one after the other, which takes longer than the conversion if they are large.
    return all(isinstance(n, int) for n in (*sizes, *depths)) and 2 * math.prod(sizes) <= math.prod(depths)


def contract_planes(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Any, rhs_center: Any, *, contract: Callable[..., jax.Array],
    left: Any, right: Any, side: int,
) -> jax.Array:  # fmt: skip
    """Return the int32 contraction of two operands, one of them cut into planes.

    Args:
        lhs: int8, or codes of 2 or 4 bits.
        rhs: the same.
        lhs_center: int32, a scalar or of lhs's rank, or None for 0.
        rhs_center: int32, a scalar or of rhs's rank, or None for 0.
        contract: returns the contraction of operands like these, for example of one plane.
        left: the `Role` of each dimension of lhs.
        right: the `Role` of each dimension of rhs.
        side: 0 if lhs is cut, 1 if rhs is.
    """
    operands, centers, roles = [lhs, rhs], [lhs_center, rhs_center], (left, right)
    codes, role = operands[side], roles[side]
    count, last = count_column_planes(codes), codes.ndim - 1
    is_summed = last in role.contracted
    axis = roles[1 - side].contracted[role.contracted.index(last)] if is_summed else None
    results = []
    for plane in range(count):
        plane_operands, plane_centers = list(operands), list(centers)
        plane_operands[side] = take_code_plane(codes, plane, count)
        if axis is not None:
            plane_operands[1 - side] = lax.slice_in_dim(operands[1 - side], plane, None, count, axis)
        elif centers[side] is not None and centers[side].ndim:
            plane_centers[side] = take_plane(centers[side], plane, count)
        results.append(contract(*plane_operands, *plane_centers))
    if is_summed:
        return functools.reduce(lax.add, results)
    before = len(role.batch) + (len(left.free) if side == 1 else 0)
    return join_planes(results, before + role.free.index(last))
