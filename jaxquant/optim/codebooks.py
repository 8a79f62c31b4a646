"""The codebooks of optimizer states: one for values of both signs, and one for values that are never negative.

Their levels are chosen so that a few operations on the bits of floats find the nearest one, on vector units and without
a table. Other codebooks are looked up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import Codebook

_ONE = 127 << 23  # the bits of 1.0
# The bits of the magnitudes of `dynamic` are twice the bits of the integers 1 to 128, less this number.
_OFFSET = 141 << 23
_INFINITY = 255 << 23  # the bits of infinity
_MAGNITUDE = 2**31 - 1  # the bits without the sign
_ZERO = 127  # the code of 0 in `dynamic`
_SHIFT = 20  # the last bits of a float, which are 0 in each level of `logarithmic`
_LEAST = _ONE - (254 << _SHIFT)  # the bits of its least positive level


def _list_dynamic_levels() -> tuple[float, ...]:
    integers = np.arange(1, 129, dtype=np.float32).view(np.int32).astype(np.int64)
    positive = (2 * integers - _OFFSET).astype(np.int32).view(np.float32).tolist()
    # 255 levels are symmetric. The last code stands for the least positive one, because -1 must be a level: otherwise a
    # block with a negative largest number would shrink each time that it is quantized.
    return (*(-level for level in positive[:0:-1]), 0.0, *positive)


dynamic = Codebook("dynamic", _list_dynamic_levels())
"""8 bits for values of both signs: 64 levels from 1/4 to 1, 32 from 1/16 to 1/4, and so on, down to 2**-14.

This is the dynamic map of Dettmers et al., arXiv 2110.02861, section 1.2, with segments of a factor of 4 in place of
10, and with a level for -1.
"""

_POWERS = (_ONE - (np.arange(254, -1, -1, dtype=np.int32) << _SHIFT)).astype(np.int32).view(np.float32)
logarithmic = Codebook("logarithmic", (0.0, *_POWERS.tolist()))
"""8 bits for values that are never negative: 0, and 8 levels in each power of two from 1 down to 2**-31."""


def round_to_levels(codebook: Codebook, value: jax.Array) -> jax.Array:
    """Return what `codebook.encode` returns for float32 values; only the time differs."""
    if codebook == dynamic:
        return _encode_dynamic(value).astype(codebook.carrier)
    if codebook == logarithmic:
        return _encode_logarithmic(value).astype(codebook.carrier)
    return codebook.encode(value)


def read_levels(codebook: Codebook, codes: jax.Array) -> jax.Array:
    """Return what `codebook.decode` returns; only the time differs."""
    if codebook == dynamic:
        return _decode_dynamic(codes.astype(jnp.int32))
    if codebook == logarithmic:
        index = codes.astype(jnp.int32)
        bits = np.int32(_LEAST) + lax.shift_left(index - 1, jnp.full_like(index, _SHIFT))
        return lax.bitcast_convert_type(jnp.where(index == 0, 0, bits), jnp.float32)
    return codebook.decode(codes)


def _encode_dynamic(value: jax.Array) -> jax.Array:
    # XLA:CPU writes a quotient that is used several times to memory. Its bits may be used as often as need be.
    value_bits = lax.bitcast_convert_type(value, jnp.int32)
    magnitude_bits = value_bits & np.int32(_MAGNITUDE)
    magnitude = jnp.minimum(lax.bitcast_convert_type(magnitude_bits, jnp.float32), np.float32(1))
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32) + np.uint32(_OFFSET)
    # The levels are integers as floats of these bits. A last bit that is cut off marks a number above a midpoint.
    halved = lax.shift_right_logical(bits, jnp.full_like(bits, 1)) | (bits & np.uint32(1))
    position = lax.bitcast_convert_type(halved, jnp.float32)
    # At a midpoint `shifted` is an integer, exactly. Of negative levels the lower one has the larger magnitude.
    shifted = position - np.float32(0.5)
    up = jnp.ceil(shifted).astype(jnp.int32)
    # From 0 to the least level and from there to the next one the exponent changes, so these midpoints are elsewhere.
    up = jnp.where(position > np.float32(1.625), up, (position > np.float32(0.75)).astype(jnp.int32))
    down = jnp.maximum(jnp.floor(shifted).astype(jnp.int32), 0)
    # The sign bit of -0 does not matter, because `down` is 0 there.
    code = jnp.where(value_bits < 0, _ZERO - down, _ZERO + up)
    return jnp.where(magnitude_bits > _INFINITY, 0, code)


def _decode_dynamic(codes: jax.Array) -> jax.Array:
    position = codes - _ZERO
    magnitude = jnp.where(position < 0, 1 - position, position).astype(jnp.float32)
    integer = lax.bitcast_convert_type(magnitude, jnp.uint32)
    bits = integer + integer - np.uint32(_OFFSET)
    level = lax.bitcast_convert_type(jnp.where(position == 0, np.uint32(0), bits), jnp.float32)
    return jnp.where(position < 0, -level, level)


def _encode_logarithmic(value: jax.Array) -> jax.Array:
    # The bits of negative numbers are negative integers, and the bits of a NaN without a sign are above infinity's.
    bits = lax.bitcast_convert_type(value, jnp.int32)
    half = 1 << (_SHIFT - 1)
    # The number of midpoints above the least positive level that are below the value.
    above = jnp.maximum(bits, _LEAST) - np.int32(_LEAST + half + 1)
    count = lax.shift_right_arithmetic(above, jnp.full_like(above, _SHIFT)) + 1
    # Half of the least level, the midpoint to 0, has an exponent that is less by 1.
    is_positive = (bits > _LEAST - (1 << 23)) & (bits <= _INFINITY)
    return jnp.where(is_positive, 1 + jnp.minimum(count, 254), 0)
