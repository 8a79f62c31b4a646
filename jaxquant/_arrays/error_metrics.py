"""How far an array is from its quantized form."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, min_max, sharding, small_floats
from .._core.affine import divide_by_scale
from .._core.entry_point import compile_entry_point
from . import quantized_array
from .quantized_array import QuantizedArray

_NAME = "quantization_error"
_DECIBELS = np.float32(10 / np.log(10))  # of a natural logarithm
_OCTAVE = np.float32(20 * np.log10(2))  # decibels in a factor of two


class QuantizationError(NamedTuple):
    """What `quantization_error` returns, float32 scalars all."""

    sqnr_db: jax.Array
    max_abs: jax.Array
    cosine: jax.Array
    saturated: jax.Array
    used_codes: jax.Array


def quantization_error(x: ArrayLike, q: QuantizedArray) -> QuantizationError:
    """sqnr_db = 10 log10(sum x^2 / sum (x - y)^2) with y = q.dequantize(), and four other measures.

    float32 throughout, squares of x and of x - y each relative to the largest of its kind: neither overflows, and no
    error is too small to be seen. Nothing here carries a gradient.

    Args:
        x: what was quantized, float32, float16 or bfloat16, of q's shape.
        q: what it became.

    Returns:
        sqnr_db: the signal to quantization noise ratio in decibels. Infinity where y is x, zeros and no elements at
            all included; minus infinity where only x is all zeros.
        max_abs: the largest |x - y|.
        cosine: sum x y / sqrt(sum x^2 sum y^2). 0 where only one of x and y is all zeros, 1 where both are.
        saturated: the share of elements beyond the range of the codes. Integers: by more than half a step beyond
            the code, which is the highest, the lowest or the one after that, where a narrow range ends: whether the
            range was narrow, q does not know. Small floats: what overflows when it is rounded. Code books: beyond
            the first or the last entry.
        used_codes: the share of the format's 2**bits codes that occur. A narrow range does not use one of them; of
            small floats -0, NaN and infinity count among them.
        Where x or y holds a NaN or an infinity, the first and the third are NaN, and max_abs NaN or infinity.

    Raises:
        TypeError: q is no QuantizedArray, or x has a dtype that there is not.
        ValueError: x has another shape than q.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([0.0, 0.25, -0.75, 1.0])  # a scale of 0.5: two ties, 0.25 off each
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.int2, narrow_range=False), -1.0, 0.5)
        >>> q.dequantize()
        Array([ 0. ,  0. , -1. ,  0.5], dtype=float32)
        >>> error = jq.quantization_error(x, q)
        >>> [round(float(e), 3) for e in error]  # 1.0 is beyond the range
        [6.368, 0.5, 0.877, 0.25, 0.75]

    Source: Widrow and Kollar, Quantization Noise (Cambridge University Press, 2008).
    """
    q = quantized_array.check_array(_NAME, "q", q)
    found = _quantization_error(
        entry_point.convert_number(x), q.codes, q.scale, q.zero_point,
        dtype=q.dtype, block_size=q.block_size, codebook=q.codebook,
    )  # fmt: skip
    return QuantizationError(*found)


@compile_entry_point(_NAME)
def _quantization_error(
    x: jax.Array, values: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *,
    dtype: Any, block_size: int | None, codebook: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    checks.check_array(_NAME, "x", x, dtypes.FLOATS)
    checks.check_shape(_NAME, "x", x, values.shape, "q's")
    x, scale = lax.stop_gradient((x, scale))
    q = QuantizedArray(values, scale, zero_point, dtype=dtype, block_size=block_size, codebook=codebook)
    x, y = x.astype(jnp.float32), quantized_array.dequantize_checked(q).astype(jnp.float32)
    largest = _find_largest(x - y)
    (x_near, x_power), (y_near, _) = (_near_one(v, _find_largest(v)) for v in (x, y))
    error, power = _near_one(x - y, largest)
    signal, size, noise = (jnp.sum(v * v) for v in (x_near, y_near, error))
    decibels = jnp.log(signal / noise) * _DECIBELS + (x_power - power).astype(jnp.float32) * _OCTAVE
    sqnr = jnp.where(noise == 0, np.float32(np.inf), decibels)
    whole = jnp.isfinite(signal) & jnp.isfinite(size) & jnp.isfinite(noise)
    measures = (sqnr, _find_cosine(jnp.sum(x_near * y_near), signal, size))
    sqnr, cosine = (jnp.where(whole, v, np.float32(np.nan)) for v in measures)
    saturated = jnp.sum(_is_saturated(x, q), dtype=jnp.float32) / np.float32(max(x.size, 1))
    return sqnr, largest, cosine, saturated, _measure_used(q)


def _find_largest(value: jax.Array) -> jax.Array:
    """Returns the largest magnitude; NaN where there is one."""
    return min_max.find_min_max(lax.abs(value), tuple(range(value.ndim)))[1]


def _near_one(value: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns value / 2**n, exact, and an n for which the largest magnitude lies near 1: its square is a float32."""
    power = jnp.clip((lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127, -126, 126)
    factor = lax.bitcast_convert_type((127 - power) << 23, jnp.float32)
    return value * granularity.PerTensor().expand(factor, value), power


def _find_cosine(product: jax.Array, x_square: jax.Array, y_square: jax.Array) -> jax.Array:
    none = (x_square == 0) | (y_square == 0)
    alike = (x_square == y_square).astype(jnp.float32)  # of two arrays of zeros
    length = jnp.sqrt(jnp.where(none, np.float32(1), x_square * y_square))
    return jnp.where(none, alike, jnp.clip(product / length, np.float32(-1), np.float32(1)))


def _is_saturated(x: jax.Array, q: QuantizedArray) -> jax.Array:
    """Returns where x, float32, lies beyond what the codes of q reach."""
    aligned = granularity.Aligned(q.block_size)
    value = divide_by_scale(x, aligned.expand(q.scale, x), dtypes.FLOAT32)
    if q.codebook is not None:
        first, last = q.codebook.levels[0], q.codebook.levels[-1]
        slack = q.codebook.largest * 2.0**-22  # the scale is a rounded quotient, and so is what it divides
        return (value < np.float32(first - slack)) | (value > np.float32(last + slack))
    if q.codes.dtype in dtypes.SMALL_FLOATS:
        return small_floats.find_overflow(value, q.codes.dtype)
    low, high = dtypes.find_bounds(q.codes.dtype)
    codes = q.codes.astype(jnp.int32)
    point = None if q.zero_point is None else aligned.expand(q.zero_point.astype(jnp.int32), x)
    over = value - (codes if point is None else codes - point).astype(jnp.float32)
    # A narrow range ends one code above the lowest.
    return ((codes <= low + 1) & (over < np.float32(-0.5))) | ((codes == high) & (over > np.float32(0.5)))


def _measure_used(q: QuantizedArray) -> jax.Array:
    """Returns the share of the codes of q's format that occur."""
    values, dtype = q.codes, q.codes.dtype
    count = 2 ** dtypes.find_width(dtype)
    if dtype in dtypes.FLOAT8:
        index = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32)
    elif dtype in dtypes.FLOAT4:
        wide = small_floats.decode_small_float(values)
        index = small_floats.encode_magnitude(wide, dtype) + jnp.where(jnp.signbit(wide), count // 2, 0)
    else:
        index = values.astype(jnp.int32) - dtypes.find_bounds(dtype)[0]
    index = sharding.place_whole(index)
    seen = jnp.zeros(count, jnp.bool_).at[index].set(True, mode="promise_in_bounds")
    return jnp.mean(seen, dtype=jnp.float32)
