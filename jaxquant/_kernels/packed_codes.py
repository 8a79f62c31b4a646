"""Conversion between codes of 2 or 4 bits and bytes, in forms that XLA:CPU vectorizes.

Current jaxlib stores several such codes in a byte on a CPU. XLA's own conversion to or from int8 handles one code after
the other. The functions here read or write whole bytes by `lax.bitcast_convert_type`, and shift.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, sharding

# Below this number of codes, XLA's own conversion costs less than an additional loop.
_LARGE = 2**16


def count_planes(codes: jax.Array, dtype: np.dtype | None = None) -> int:
    """Return how many codes of a dtype, or of that of the codes, a byte holds along the last dimension.

    It is 1 if a byte holds codes of different rows, or cannot be read as a whole.
    """
    dtype = np.dtype(codes.dtype) if dtype is None else dtype
    width = dtypes.find_width(dtype)
    if width >= 8 or dtype not in dtypes.INTEGERS or not codes.ndim or sharding.is_placed(codes):
        return 1
    length = codes.shape[-1]
    return 8 // width if isinstance(length, int) and length and length % (8 // width) == 0 else 1


def read_bytes(codes: jax.Array) -> jax.Array:
    """Return the bytes of the codes, uint8 with a shorter last dimension, or the codes if `count_planes` is 1."""
    count = count_planes(codes)
    if count == 1:
        return codes
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count), jnp.uint8)


def read_plane(stored: jax.Array, dtype: np.dtype, place: int, count: int) -> jax.Array:
    """Return the codes of one place in their bytes, as int32.

    Args:
        stored: what `read_bytes` returns, or a part of it.
        dtype: the dtype of the codes.
        place: the place in a byte; the codes `place`, `place + count`, ... of the last dimension are returned.
        count: what `count_planes` returns.
    """
    wide = stored.astype(jnp.int32)
    if count == 1:
        return wide
    width = 8 // count
    if dtypes.find_bounds(dtype)[0] == 0:
        return lax.shift_right_logical(wide, np.int32(place * width)) & np.int32(2**width - 1)
    # A shift to the left and back extends the sign.
    raised = lax.shift_left(wide, np.int32(32 - (place + 1) * width))
    return lax.shift_right_arithmetic(raised, np.int32(32 - width))


def read_words(codes: jax.Array) -> jax.Array | None:
    """Return codes of 4 bits as uint32 with a shorter last dimension, or None if they cannot be read like that."""
    if count_planes(codes) != 2 or codes.shape[-1] % 8:
        return None
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8), jnp.uint32)


def read_lane(words: jax.Array, dtype: np.dtype, first_bit: jax.Array) -> jax.Array:
    """Return the codes whose lowest bits are at these places of uint32 words, as int32.

    Args:
        words: uint32.
        dtype: the dtype of the codes, of less than 8 bits.
        first_bit: int32, of the shape of `words`.
    """
    width, wide = dtypes.find_width(dtype), words.astype(jnp.int32)
    # A shift to the left and back removes the other bits and extends the sign.
    raised = lax.shift_left(wide, np.int32(32 - width) - first_bit)
    is_signed = dtypes.find_bounds(dtype)[0] < 0
    return (lax.shift_right_arithmetic if is_signed else lax.shift_right_logical)(raised, np.int32(32 - width))


def narrow_codes(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return int8 codes, which are within the bounds of a dtype of 2 or 4 bits, in that dtype."""
    if not isinstance(codes.size, int) or codes.size < _LARGE or count_planes(codes, dtype) == 1:
        return lax.convert_element_type(codes, dtype)
    pack = functools.partial(_pack_bytes, dtype=dtype)
    convert = functools.partial(lax.convert_element_type, new_dtype=dtype)
    return lax.platform_dependent(codes, cpu=pack, default=convert)


def _pack_bytes(codes: jax.Array, *, dtype: np.dtype) -> jax.Array:
    count = count_planes(codes, dtype)
    width, group = 8 // count, {2: np.uint16, 4: np.uint32}[count]
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)
    # The mask keeps the low bits of each byte. Each shift then moves the bits of a byte next to those of the one below
    # it, and the narrowing conversion keeps the lowest byte, which has received the bits of all others.
    masks = sum((2**width - 1) << (8 * place) for place in range(count))
    packed = lax.bitcast_convert_type(grouped, group) & group(masks)
    packed = functools.reduce(
        lax.bitwise_or, [lax.shift_right_logical(packed, group((8 - width) * place)) for place in range(count)]
    )
    # The barrier separates the shifts, which XLA vectorizes, from the way in which it stores narrow codes.
    stored = lax.optimization_barrier(lax.convert_element_type(packed, jnp.uint8))
    return lax.bitcast_convert_type(stored, dtype).reshape(codes.shape)
