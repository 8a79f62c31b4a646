"""float8, float4 and float8_e8m0fnu to and from float32 by their bits. Knows nothing of what they stand for.

XLA:CPU of jax 0.12 converts these types wrongly inside the body of a scan (float8_e4m3fn overflow becomes -0, -0
becomes the NaN of float8_e4m3fnuz); integer arithmetic gives the same bits everywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dtypes

_MAGIC = np.float32(1.5 * 2**23)  # added to a small number, leaves it rounded half to even in the low bits


def _view_unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(jnp.uint4) if dtype in dtypes.FLOAT4 else np.dtype(jnp.uint8)


def _find_largest_code(dtype: np.dtype) -> int:
    return int(np.asarray(jnp.finfo(dtype).max, dtype).view(np.uint8))


def _is_fnuz(dtype: np.dtype) -> bool:
    return dtype.name.endswith("fnuz")


def encode_magnitude(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the int32 code of |value| rounded half to even, as if the exponents went on for ever. NaN is anything."""
    info = jnp.finfo(dtype)
    digits, least = int(info.nmant), int(info.minexp)
    size = lax.abs(value)
    exponent = jnp.clip((lax.bitcast_convert_type(size, jnp.int32) >> 23) - 127, least, 126)
    # A power of two takes one unit in the last place to 1, exactly.
    unit = lax.bitcast_convert_type((127 + digits - exponent) << 23, jnp.float32)
    # Far beyond every dtype here, so that the product below stays small.
    scaled = jnp.minimum(size * unit, np.float32(2.0 ** (digits + 2)))
    units = lax.bitcast_convert_type(scaled + _MAGIC, jnp.int32) - int(_MAGIC.view(np.int32))
    return ((exponent - least) << digits) + units


def find_overflow(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns where rounding alone lands beyond the largest finite value. True for infinities, False for NaN."""
    return (encode_magnitude(value, dtype) > _find_largest_code(dtype)) & ~jnp.isnan(value)


def encode_small_float(value: jax.Array, dtype: np.dtype, saturate: bool) -> jax.Array:
    """Returns float32 values in a small float dtype, rounded half to even.

    Args:
        value: float32. NaN stays NaN in float8; float4 has none and takes -0.
        dtype: a float8 or float4 dtype.
        saturate: whether overflow, infinities included, becomes the largest finite value. If not it becomes
            infinity in float8_e5m2 and NaN in the other float8; float4 saturates always.
    """
    largest, width = _find_largest_code(dtype), dtype in dtypes.FLOAT4
    sign_bit = 8 if width else 128
    code = encode_magnitude(value, dtype)
    beyond = largest if saturate or width else largest + 1  # the code after the largest is infinity or NaN
    code = jnp.where(code > largest, beyond, code)
    negative = lax.bitcast_convert_type(value, jnp.int32) < 0
    signed = code + jnp.where(negative, sign_bit, 0)
    if _is_fnuz(dtype):  # no negative zero: its code is the one NaN
        signed = jnp.where(code == 0, 0, jnp.where(code > largest, sign_bit, signed))
    nan = sign_bit if width or _is_fnuz(dtype) else _find_nan_code(dtype)
    signed = jnp.where(jnp.isnan(value), nan, signed)
    return lax.bitcast_convert_type(signed.astype(_view_unsigned(dtype)), dtype)


def _find_nan_code(dtype: np.dtype) -> int:
    return int(np.asarray(np.nan, dtype).view(np.uint8)) & 0x7F


@jax.custom_jvp
def decode_small_float(value: jax.Array) -> jax.Array:
    """Returns a small float array, or one of float8_e8m0fnu, as float32: exact. Differentiable like a conversion."""
    dtype = value.dtype
    if dtype in dtypes.FLOAT4:  # this conversion XLA does right, while a 4-bit bitcast in a scan does not compile
        return value.astype(jnp.float32)
    code = lax.bitcast_convert_type(value, _view_unsigned(dtype)).astype(jnp.int32)
    if dtype == dtypes.E8M0:
        nan = np.float32(np.nan)
        bits = jnp.where(code == 0, 1 << 22, code << 23)  # code 0 is 2**-127, a subnormal float32
        return jnp.where(code == 255, nan, lax.bitcast_convert_type(bits, jnp.float32))
    info = jnp.finfo(dtype)
    digits, least, largest = int(info.nmant), int(info.minexp), _find_largest_code(dtype)
    size = code & 127
    normal = lax.bitcast_convert_type((size << (23 - digits)) + ((126 + least) << 23), jnp.float32)
    subnormal = size.astype(jnp.float32) * np.float32(2.0 ** (least - digits))
    result = jnp.where(size < (1 << digits), subnormal, normal)
    if not _is_fnuz(dtype):
        past = np.float32(np.inf) if dtype.name == "float8_e5m2" else np.float32(np.nan)
        result = jnp.where(size == largest + 1, past, jnp.where(size > largest + 1, np.float32(np.nan), result))
    result = jnp.where(code >= 128, -result, result)
    return jnp.where(code == 128, np.float32(np.nan), result) if _is_fnuz(dtype) else result


@decode_small_float.defjvp
def _decode_small_float_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return decode_small_float(*primals), tangents[0].astype(jnp.float32)


def scale_as_float32(scale: jax.Array) -> jax.Array:
    """Returns a scale of any dtype that there is as float32: exact, but for large int32."""
    return decode_small_float(scale) if scale.dtype == dtypes.E8M0 else scale.astype(jnp.float32)
