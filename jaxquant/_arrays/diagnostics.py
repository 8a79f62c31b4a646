"""What quantization costs: the error of an array in its quantized form, and sums that saturate in int16."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import min_max
from .._kernels.affine import divide_by_scale
from . import quantized_array
from .quantized_array import QuantizedArray
from .spec import QuantSpec

_ERROR = "quantization_error"
_SUPPORTED = ("offset", "nested", "block_sizes", "packing")
# 10 log10 v = 10 / ln(10) * ln v
_DECIBELS = np.float32(10 / np.log(10))  # decibels per unit of the natural logarithm of a power ratio
_OCTAVE = np.float32(20 * np.log10(2))  # decibels per factor of two in the magnitude


class QuantizationError(NamedTuple):
    """The result of `quantization_error`: five float32 scalars."""

    sqnr_db: jax.Array
    max_abs: jax.Array
    cosine: jax.Array
    saturated: jax.Array
    used_codes: jax.Array


export.register_namedtuple_serialization(QuantizationError, serialized_name="jaxquant.QuantizationError")


def quantization_error(x: ArrayLike, q: QuantizedArray) -> QuantizationError:
    """Return how far a quantized array is from the array that was quantized.

    With y = q.dequantize(), sqnr_db = 10 log10(sum x^2 / sum (x - y)^2). The four other measures are described below.

    Everything is computed in float32. Before they are squared, x and x - y are each divided by a power of two near
    their largest magnitude, so that no square overflows and no error is too small to count. The result has no gradient.

    Args:
        x: the array that was quantized, float32, float16 or bfloat16, of q's shape.
        q: its quantized form.

    Returns:
        sqnr_db: the signal-to-quantization-noise ratio in decibels. Infinity if y equals x, which includes all zeros
            and arrays without elements; minus infinity if x is all zeros and y is not.
        max_abs: the largest |x - y|.
        cosine: sum x y / sqrt(sum x^2 sum y^2). 0 if only one of x and y is all zeros, 1 if both are.
        saturated: the fraction of elements outside the range of the codes. For integers: the elements with the
            highest, the lowest or the second lowest one, and that lie more than half a step beyond it. (The second
            lowest counts because a narrow range ends there, and q does not store whether its range was narrow. If all
            codes of 8 bits lie in the range of `reduce_range`, the ends of that range count.) For
            float8 and float4: the elements that overflow when they are rounded. For codebooks: the elements beyond the
            first or the last entry.
        used_codes: the fraction of the 2**bits codes of the format that occur. A narrow range leaves one code unused;
            for float8 and float4, the 2**bits codes include -0, NaN and infinity.
        If x or y contains a NaN or an infinity, sqnr_db and cosine are NaN, and max_abs is NaN or infinity.

    Raises:
        TypeError: q is not a QuantizedArray, or x has an unsupported dtype.
        ValueError: the shapes of x and q differ.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([0.0, 0.25, -0.75, 1.0])  # a scale of 0.5: two ties, 0.25 off each
        >>> q = jq.quantize(x, jq.QuantSpec(jnp.int2, narrow_range=False), range=(-1.0, 0.5))
        >>> q.dequantize()
        Array([ 0. ,  0. , -1. ,  0.5], dtype=float32)
        >>> error = jq.quantization_error(x, q)
        >>> [round(float(e), 3) for e in error]  # 1.0 is beyond the range
        [6.368, 0.5, 0.877, 0.25, 0.75]

    Source: Widrow and Kollar, Quantization Noise (Cambridge University Press, 2008).
    """
    # The sums run in the order of memory, so codes in another order are moved before the program, which is the same.
    q = quantized_array.check_array(_ERROR, "q", q, supports=_SUPPORTED).store_last()
    return QuantizationError(*_quantization_error(entry_point.convert_number(x), q))


@compile_entry_point(_ERROR)
def _quantization_error(x: jax.Array, q: QuantizedArray) -> tuple[jax.Array, ...]:
    checks.check_array(_ERROR, "x", x, dtypes.FLOATS)
    x, q = lax.stop_gradient((x, q))
    q = q.replace(scale=quantized_array.read_entries(q.scale), offset=quantized_array.read_entries(q.offset))
    checks.check_shape(_ERROR, "x", x, q.shape, "the shape of q")
    x, y = x.astype(jnp.float32), quantized_array.dequantize_checked(q).astype(jnp.float32)
    largest = _compute_largest(x - y)
    (x_near, x_power), (y_near, _) = (_scale_near_one(v, _compute_largest(v)) for v in (x, y))
    error, power = _scale_near_one(x - y, largest)
    # The sums are of scaled values. The scaling factors cancel in the cosine and are added back to the decibels.
    signal, size, noise = (jnp.sum(v * v) for v in (x_near, y_near, error))
    decibels = jnp.log(signal / noise) * _DECIBELS + (x_power - power).astype(jnp.float32) * _OCTAVE
    sqnr = jnp.where(noise == 0, np.float32(np.inf), decibels)
    is_finite = jnp.isfinite(signal) & jnp.isfinite(size) & jnp.isfinite(noise)
    measures = (sqnr, _compute_cosine(jnp.sum(x_near * y_near), signal, size))
    sqnr, cosine = (jnp.where(is_finite, v, np.float32(np.nan)) for v in measures)
    saturated = jnp.sum(_is_saturated(x, q), dtype=jnp.float32) / np.float32(max(x.size, 1))
    return sqnr, largest, cosine, saturated, _measure_used_codes(q)


def _compute_largest(value: jax.Array) -> jax.Array:
    """Return the largest magnitude, or NaN if the array contains one."""
    return min_max.compute_min_max(lax.abs(value), tuple(range(value.ndim)))[1]


def _scale_near_one(value: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return value / 2**n, which is exact, and n, such that the largest magnitude is near 1 and can be squared."""
    # The exponent bits of a float32 give the power of two exactly, unlike a rounded logarithm.
    power = jnp.clip((lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127, -126, 126)
    factor = lax.bitcast_convert_type((127 - power) << 23, jnp.float32)
    return value * granularity.PerTensor().expand(factor, value), power


def _compute_cosine(product: jax.Array, x_square: jax.Array, y_square: jax.Array) -> jax.Array:
    """Return the cosine of the angle between x and y from the sums of their product and of their squares."""
    is_zero = (x_square == 0) | (y_square == 0)
    both_zero = (x_square == y_square).astype(jnp.float32)
    # Divide by 1 if the cosine is not defined, because `jax_debug_nans` would raise at a NaN.
    length = jnp.sqrt(jnp.where(is_zero, np.float32(1), x_square * y_square))
    return jnp.where(is_zero, both_zero, jnp.clip(product / length, np.float32(-1), np.float32(1)))


def _is_saturated(x: jax.Array, q: QuantizedArray) -> jax.Array:
    """Return a mask of the elements of a float32 x that are outside the range of the codes of q."""
    aligned = granularity.Aligned(q.block_size)
    if q.offset is not None:
        x = x - aligned.expand(q.offset.astype(jnp.float32), x)
    value = divide_by_scale(x, aligned.expand(q.scale, x), dtypes.FLOAT32)
    if q.codebook is not None:
        first, last = q.codebook.ascending[0], q.codebook.ascending[-1]
        # The scale and `value` are both rounded quotients, so the extremes of x may miss the outer levels by a few ulp.
        slack = q.codebook.largest * 2.0**-22
        return (value < np.float32(first - slack)) | (value > np.float32(last + slack))
    if q.format in dtypes.SMALL_FLOATS:
        return dtypes.mark_overflow(value, q.codes.dtype)
    stored: Any = q.format
    low, high = dtypes.read_bounds(stored)
    codes = q.codes.astype(jnp.int32)
    if dtypes.count_bits(stored) == 8:
        # An array does not store its spec: if all codes lie in the reduced range, it was quantized with `reduce_range`.
        least, most = dtypes.derive_reduced_bounds(stored)
        is_reduced = jnp.all((codes >= least) & (codes <= most))
        low, high = jnp.where(is_reduced, least, low), jnp.where(is_reduced, most, high)
    zero_point = None if q.zero_point is None else aligned.expand(q.zero_point.astype(jnp.int32), x)
    # The difference of x from the value of its code, in steps.
    excess = value - (codes if zero_point is None else codes - zero_point).astype(jnp.float32)
    # A narrow range ends one code above the lowest one.
    return ((codes <= low + 1) & (excess < np.float32(-0.5))) | ((codes == high) & (excess > np.float32(0.5)))


def _measure_used_codes(q: QuantizedArray) -> jax.Array:
    """Return the fraction of the codes of q's format that occur in q."""
    codes = q.codes
    dtype: Any = codes.dtype if q.codebook is not None else q.format
    count = 2 ** dtypes.count_packed_bits(dtype) if q.codebook is None else len(q.codebook.levels)
    # Number the codes of every format from 0.
    if dtype in dtypes.FLOAT8:
        index = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.int32)
    elif dtype in dtypes.FLOAT4:
        wide = dtypes.decode_small_float(codes)
        index = dtypes.encode_magnitude(wide, dtype) + jnp.where(jnp.signbit(wide), count // 2, 0)
    else:
        # A code may have more bits than the table needs: the codebook takes the last ones.
        index = (codes.astype(jnp.int32) - dtypes.read_bounds(dtype)[0]) & np.int32(count - 1)
    # Under explicit sharding a scatter would need an out_sharding, so the codes are gathered first.
    index = sharding.place_whole(index)
    is_used = jnp.zeros(count, jnp.bool_).at[index].set(True, mode="promise_in_bounds")
    return jnp.mean(is_used, dtype=jnp.float32)


# Which int8 weights make the sums of 8-bit products saturate on x86-64 processors without VNNI.
#
# Such a processor has one instruction for these sums (PMADDUBSW): it multiplies uint8 activations by int8 weights and
# adds two neighbors of the contracted dimension in int16, with saturation. ONNX Runtime's kernels use it. Two products
# fit in int16 for all activations unless both weights have the same sign and add up to more than 128, because 255 * 128
# is 32640.


_COUNT = "count_saturating_pairs"
_INT8, _UINT8 = np.dtype(np.int8), np.dtype(np.uint8)


def count_saturating_pairs(weights: Any, *, contracting_axis: int = 0) -> jax.Array:
    """Return how many pairs of neighboring weights can saturate a sum on x86-64 processors without VNNI.

    On these processors ONNX Runtime computes a_0 w_0 + a_1 w_1, for uint8 activations a and int8 weights w, in int16
    with saturation. The sum can leave int16 if w_0 and w_1 have the same sign and |w_0 + w_1| > 128. If no pair can,
    the integers of the product are the same on every processor. Zero points do not matter: the kernel multiplies the
    codes themselves.

    The runtime adds elements 0 and 1, 2 and 3, and so on. All pairs of neighbors are counted here, so the result does
    not depend on where a runtime begins.

    Args:
        weights: int8 codes, or a `QuantizedArray` of any dtype. Only int8 codes can saturate: codes of 4 and 2 bits are
            small enough, and products of uint8 weights have another kernel.
        contracting_axis: Static. The axis that the product sums over: 0 for weights of shape [inputs, outputs].

    Returns:
        An int32 scalar. 0 means that the sums are exact for all activations.

    Raises:
        TypeError: `weights` are neither codes nor a QuantizedArray.
        ValueError: `contracting_axis` is out of range.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.count_saturating_pairs(jnp.array([[64, 127], [64, 2], [65, -128]], jnp.int8))
        Array(2, dtype=int32)
        >>> w = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1))
        >>> jq.count_saturating_pairs(jq.quantize(w, spec))
        Array(26, dtype=int32)
        >>> spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1), reduce_range=True)
        >>> jq.count_saturating_pairs(jq.quantize(w, spec))
        Array(0, dtype=int32)

    Source: Intel 64 instruction set reference, PMADDUBSW; ONNX Runtime 1.32, "Quantize ONNX models", "When and why do I
    need to try U8U8?".
    """
    codes = weights.codes if isinstance(weights, QuantizedArray) else weights
    checks.check_array(_COUNT, "weights", codes, dtypes.QUANTIZED)
    checks.require(codes.ndim > 0, _COUNT, "weights", "an array with an axis", "rank 0")
    axis = checks.check_axis(_COUNT, contracting_axis, codes.ndim, "contracting_axis")
    if codes.dtype != _INT8 or (isinstance(weights, QuantizedArray) and weights.codebook is not None):
        return jnp.zeros((), jnp.int32)
    wide = jnp.moveaxis(jnp.asarray(codes), axis, 0).astype(jnp.int32)
    return jnp.sum(jnp.abs(wide[:-1] + wide[1:]) > dtypes.LARGEST_PAIR, dtype=jnp.int32)


def can_saturate(weight: QuantSpec, activation: QuantSpec) -> bool:
    """Return whether weights of a spec can saturate sums of products with activations of a spec."""
    is_pair = weight.dtype == _INT8 and activation.dtype == _UINT8
    return is_pair and 2 * max(-weight.bounds[0], weight.bounds[1]) > dtypes.LARGEST_PAIR
