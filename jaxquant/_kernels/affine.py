"""Quantization of real numbers to codes and back: exact quotients, rounding, scales and zero points of any granularity.

The results are the same whatever XLA rewrites. The functions use `lax` even where `jnp` would be easier to read: every
operator calls them, and JAX has to trace a jnp function again for every shape. `tests/kernels/test_numerics.py` fails
if a new version of XLA breaks one of them. The callers have checked every argument.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._core import dtypes, recording
from .._core.granularity import Aligned, Blocked, Granularity, Groups, PerAxis, PerTensor
from . import barriers, packed_codes

# Rounding to codes and to narrower float dtypes, in forms that no optimization of XLA changes.


# The floats between 2**23 and 2**24 are exactly the integers. Adding 1.5 * 2**23 to a value |v| < 2**22 therefore
# rounds v half to even, and leaves the integer in the low bits of the sum. The bits of positive floats, read as
# integers, sort as the floats do, so clamping the bits saturates the code. XLA:CPU runs this addition and integer clamp
# several times faster than round, clip and convert. _NAN_WRAP is added to the bits, modulo 2**32, before the clamp: it
# moves every quiet NaN, of either sign, below the codes and keeps +infinity above them. The 2**16 in it is a margin:
# then this also holds if a zero point of 16 bits is added to the bits.
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = int(_MAGIC.view(np.int32))
_NAN_WRAP = 0x80000000 - 0x7FC00000 + 2**16


@recording.mark("round_to_dtype", lambda value, dtype: (value.shape, jnp.float32), recording.map_elements)
def round_to_dtype(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return float32 values rounded half to even to a float dtype, but stored as float32.

    `value.astype(dtype).astype(float32)` does not round reliably, because XLA removes a pair of conversions.
    """
    # float32 values need no function with a derivative rule, which would take longer to trace than an operation.
    return _round_to_half(value, dtype) if dtype in (dtypes.BFLOAT16, dtypes.FLOAT16) else value


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_to_half(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return float32 values rounded to bfloat16 or float16, stored as float32."""
    if dtype == dtypes.BFLOAT16:
        return lax.reduce_precision(barriers.split_small_fusion(value), 8, 7)
    value = barriers.split_small_fusion(value)
    # reduce_precision flushes the subnormals of float16, the multiples of 2**-24 below 2**-14, to zero.
    small = lax.round(value * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
    small = barriers.split_small_fusion(small)
    return jnp.where(jnp.abs(value) < np.float32(2**-14), small, lax.reduce_precision(value, 5, 10))


@_round_to_half.defjvp
def _round_to_half_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # The derivative of rounding is 0 almost everywhere. Here rounding only changes the precision, so the tangent passes
    # unchanged, as it does through `astype`.
    return _round_to_half(*primals, dtype), tangents[0]


@recording.mark("encode", lambda value, dtype, **_: (value.shape, dtype), recording.map_elements)
def encode_steps(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None = None,
    most: int = barriers.MOST_SPLIT,
) -> jax.Array:  # fmt: skip
    """Return the codes of quotients in an integer dtype of 2 to 16 bits.

    code = clip(round_half_even(value) + zero_point, qmin, qmax)

    Args:
        value: float32. Infinities saturate; NaN becomes qmin.
        zero_point: int32 of value's shape, within the bounds, or None for 0.
        dtype: the integer dtype.
        bounds: (qmin, qmax); the default is the bounds of the dtype.
        most: Static. The largest number of elements that are encoded in two fusions; see `split_small_fusion`.
    """
    low, high = dtypes.read_bounds(dtype) if bounds is None else bounds
    zero = np.int32(_MAGIC_BITS + _NAN_WRAP)  # the bits that represent code 0; the low 16 are zeros
    code = lax.bitcast_convert_type(lax.add(value, _MAGIC), jnp.int32)
    # The sum of the zero point and the constant has the zero point's own shape in the compiled program, so each element
    # takes one addition with a zero point, too.
    code = lax.add(code, np.int32(_NAN_WRAP) if zero_point is None else lax.add(zero_point, np.int32(_NAN_WRAP)))
    # If there are few elements, the quotient and these additions are one fusion, and what follows is another one.
    code = barriers.split_small_fusion(code, most)
    # No subtraction of `zero` is needed: the narrowing conversion at the end drops all but the low bits.
    code = lax.clamp(zero + np.int32(low), code, zero + np.int32(high))
    if dtypes.count_bits(dtype) < 8:
        # XLA:CPU does not vectorize a loop that packs codes of less than a byte. The barrier puts the packing into a
        # loop of its own, so that the rounding keeps its vector instructions.
        code = lax.optimization_barrier(lax.convert_element_type(code, jnp.int8))
        return packed_codes.narrow_codes(code, dtype)
    return lax.convert_element_type(code, dtype)


def mark_in_range(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None
) -> jax.Array:
    """Return a mask of the quotients that round to a code of `dtype` without saturation; False for NaN."""
    if dtype in dtypes.SMALL_FLOATS:
        return ~(dtypes.mark_overflow(value, dtype) | jnp.isnan(value))
    low, high = dtypes.read_bounds(dtype) if bounds is None else bounds
    # The division before this, and the comparisons after it, are one fusion each if there are few elements.
    code = barriers.split_small_fusion(lax.round(value, lax.RoundingMethod.TO_NEAREST_EVEN))
    if zero_point is not None:
        code = code + zero_point.astype(jnp.float32)
    return (code >= low) & (code <= high)


# Floats as integers that sort as the floats do.


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
    return lax.bitwise_xor(bits, lax.bitwise_and(sign, np.int32(0x7FFFFFFF)))


# Correctly rounded quotients of float32 and int32 arrays on every backend.


_TINY = np.finfo(np.float32).tiny


@recording.mark("divide", lambda x, **_: (x.shape, jnp.float32), recording.map_elements)
def divide(x: jax.Array, scale: jax.Array, for_codes: bool = False, to_integers: bool = False) -> jax.Array:
    """Return x / scale, for two float32 arrays of the same shape, rounded once as in IEEE 754.

    A CPU rounds a division correctly as long as XLA does not replace it by a multiplication with the reciprocal. Other
    backends may divide approximately; there the quotient is corrected with its exact residual.

    Args:
        x: float32.
        scale: float32.
        for_codes: Static. Whether the quotients only become integer codes, through which no derivative passes.
        to_integers: Static. Whether the quotients are only rounded to integers of magnitudes up to 2**17; then another
            number may be returned that is rounded to the same integer.
    """
    if for_codes:
        # If there are few elements, the division is in a fusion without the operations that computed x.
        x = barriers.split_small_fusion(lax.stop_gradient(x), barriers.MOST_ALONE)
    # XLA rewrites x / broadcast(s) as x * broadcast(1 / s), and (a / b) / s as a / (b * s). Both round differently.
    # Neither pattern matches if both operands are results of a select. The condition has to vary along all dimensions:
    # if the condition, x and the scale all repeat their elements, XLA selects before it repeats them, and then sees a
    # broadcast again.
    # In `jax.ensure_compile_time_eval` one of the operands may be known; the condition depends on the other.
    never = barriers.make_false(lax.stop_gradient(x if isinstance(x, Tracer) else scale), is_split=for_codes)
    quotient = lax.div(lax.select(never, scale, x), lax.select(never, x, scale))
    correct = correct_near_ties if to_integers else correct_quotient
    return lax.platform_dependent(quotient, x, scale, cpu=_keep_quotient, default=correct)


def _keep_quotient(quotient: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
    del x, scale
    return quotient


# JAX traces an inlined function once for all divisions of the same shape. Each division is traced in this form, even
# for a CPU.
@functools.partial(jax.jit, inline=True)
def correct_quotient(approximate: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the correctly rounded quotient x / scale, given an approximate one that is a few ulp off.

    The residual x - quotient * scale tells by how many ulp the quotient must move. It is computed from the integer
    mantissas, modulo 2**32. The residual is small, so 32 bits hold it exactly although they do not hold the products.
    Integer arithmetic is exact no matter which float operations a backend fuses, contracts or flushes to zero.

    A quotient is returned unchanged if it or one of its operands is zero, subnormal, infinite or NaN.
    """
    mantissa_x, exponent_x = _split_mantissa(x)
    mantissa_s, exponent_s = _split_mantissa(scale)
    distance = lax.add(lax.sub(exponent_x, exponent_s), np.int32(150))
    result = approximate
    # The spacing of floats changes at a power of two, so a step across one misses its target; the next step corrects
    # that.
    for _ in range(3):
        result = _step_to_quotient(result, mantissa_x, mantissa_s, distance)
    ordinary = _is_ordinary(approximate, 2 * _TINY)
    for operand in (x, scale):
        ordinary = lax.bitwise_and(ordinary, _is_ordinary(operand, _TINY))
    return lax.select(ordinary, result, approximate)


@functools.partial(jax.jit, inline=True)
def correct_near_ties(approximate: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return numbers that are rounded to the same integers as the correctly rounded quotients x / scale.

    Only a quotient beside a tie, a number halfway between two integers, may be rounded to another integer than an
    approximate one that is a few ulp off. The residual x - tie * scale, computed as in `correct_quotient`, then tells
    on which side of the tie the rounded quotient is, or that it is the tie.

    A quotient is returned unchanged if it is larger than 2**17, or if it or one of its operands is zero, subnormal,
    infinite or NaN.
    """
    size = lax.abs(approximate)
    below = lax.floor(size)
    tie = lax.add(below, np.float32(0.5))
    mantissa_x, exponent_x = _split_mantissa(x)
    mantissa_s, exponent_s = _split_mantissa(scale)
    # In units of a quarter of the last place of the scale: the residual has less than 24 bits beside a tie, so 32 bits
    # hold it although they hold neither of the two products.
    shift = lax.clamp(np.int32(0), lax.add(lax.sub(exponent_x, exponent_s), np.int32(2)), np.int32(31))
    twice = lax.convert_element_type(lax.add(tie, tie), jnp.int32)
    product = lax.mul(lax.mul(twice, np.int32(2)), mantissa_s)
    residual = lax.sub(lax.shift_left(mantissa_x, shift), product)
    # Half the distance of the tie to the next float is as many of these units as the scale's mantissa, shifted. Below
    # the tie 0.5, a power of two, floats are twice as dense, but both sides of half that distance are rounded to 0.
    _, exponent = _split_mantissa(tie)
    distance = lax.clamp(np.int32(0), lax.sub(np.int32(22 + 127), exponent), np.int32(31))
    half = lax.shift_right_logical(mantissa_s, distance)
    quarter = lax.select(lax.lt(residual, lax.neg(half)), _fill(0.25, tie), _fill(0.5, tie))
    quarter = lax.select(lax.gt(residual, half), _fill(0.75, tie), quarter)
    rounded = lax.add(below, quarter)
    rounded = lax.select(lax.lt(approximate, np.float32(0)), lax.neg(rounded), rounded)
    # Eight ulp, which an approximate quotient must not be off.
    beside = lax.le(lax.abs(lax.sub(size, tie)), lax.mul(size, np.float32(2.0**-20)))
    beside = lax.bitwise_and(beside, lax.le(size, np.float32(2**17)))
    for operand in (x, scale):
        beside = lax.bitwise_and(beside, _is_ordinary(operand, _TINY))
    return lax.select(beside, rounded, approximate)


def _fill(number: float, like: jax.Array) -> jax.Array:
    return lax.full_like(like, number)


# As above, for the three calls.
@functools.partial(jax.jit, inline=True)
def _step_to_quotient(
    result: jax.Array, mantissa_x: jax.Array, mantissa_s: jax.Array, distance: jax.Array
) -> jax.Array:
    """Return an approximate quotient moved by the number of ulp that its residual tells.

    Args:
        result: the approximate quotient, float32.
        mantissa_x: the mantissa of the dividend.
        mantissa_s: the mantissa of the divisor.
        distance: the difference of their exponents, plus 150.
    """
    as_float = functools.partial(lax.convert_element_type, new_dtype=jnp.float32)
    as_int = functools.partial(lax.convert_element_type, new_dtype=jnp.int32)
    mantissa_q, exponent_q = _split_mantissa(result)
    # The shift is 23 or 24 for a quotient close to the right one. For any other the clamp keeps it within 32 bits.
    shift = lax.clamp(np.int32(20), lax.sub(distance, exponent_q), np.int32(27))
    residual = lax.sub(lax.shift_left(mantissa_x, shift), lax.mul(mantissa_q, mantissa_s))
    # A float division gives the whole number of ulp; it need not be exact. The remainder of the residual, doubled,
    # then decides between this ulp and its neighbors.
    coarse = as_int(lax.round(lax.div(as_float(residual), as_float(mantissa_s))))
    rest = lax.sub(residual, lax.mul(coarse, mantissa_s))
    rest = lax.add(rest, rest)
    # Below a power of two floats are twice as dense: halfway to the next lower one is a quarter of a step.
    is_power = lax.eq(mantissa_q, np.int32(0x800000))
    is_power = lax.bitwise_and(is_power, lax.eq(coarse, np.int32(0)))
    half = lax.shift_right_logical(mantissa_s, np.int32(1))
    below = lax.select(is_power, half, mantissa_s)
    # A rest of exactly half a step, a tie, does not occur: no quotient of two normal floats is halfway between two.
    step = lax.add(coarse, as_int(lax.gt(rest, mantissa_s)))
    step = lax.sub(step, as_int(lax.lt(rest, lax.neg(below))))
    # The bits of floats of one sign, read as integers, sort by magnitude: adding n to them moves the float n ulp.
    moved = lax.add(lax.bitcast_convert_type(result, jnp.int32), step)
    return lax.bitcast_convert_type(moved, jnp.float32)


def _is_ordinary(value: jax.Array, least: np.float32) -> jax.Array:
    """Return a mask of the finite float32 values with a magnitude of at least `least`."""
    large = lax.ge(lax.abs(value), np.float32(least))
    return lax.bitwise_and(lax.is_finite(value), large)


def _split_mantissa(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the 24-bit integer mantissa and the biased exponent of normal float32 values, both int32."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    mantissa = lax.bitwise_or(lax.bitwise_and(bits, np.int32(0x7FFFFF)), np.int32(0x800000))
    return mantissa, lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(23)), np.int32(0xFF))


def divide_in_precision(x: jax.Array, scale: jax.Array, precision: np.dtype) -> jax.Array:
    """Return, as float32, the quotient that a division in the dtype `precision` gives.

    float32 has more than twice the digits of float16 and bfloat16, so rounding the quotient to float32 and then to the
    narrower dtype gives the same result as rounding it once.
    """
    quotient = divide(round_to_dtype(x, precision), round_to_dtype(scale, precision))
    return round_to_dtype(quotient, precision)


def divide_integers(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / scale, for two int32 arrays, rounded half to even and clipped to [-2**20, 2**20], as float32.

    The bounds are beyond every code, and float32 holds every integer between them. x / 0 is infinite, 0 / 0 is NaN.
    """
    divisor = jnp.where(scale == 0, 1, scale)
    negative = (x < 0) ^ (divisor < 0)
    # The magnitudes are uint32, because int32 cannot hold 2**31. abs returns -2**31 unchanged, and its bits
    # read as uint32 are 2**31.
    size_x, size_d = (lax.bitcast_convert_type(jnp.abs(v), jnp.uint32) for v in (x, divisor))
    whole, rest = lax.div(size_x, size_d), lax.rem(size_x, size_d)
    # This compares 2 * rest with the divisor without computing 2 * rest, which could overflow.
    gap = size_d - rest
    rounds_up = (rest > gap) | ((rest == gap) & (whole & 1 == 1))
    size = jnp.minimum(whole + rounds_up.astype(jnp.uint32), jnp.uint32(2**20)).astype(jnp.float32)
    by_zero = jnp.where(x == 0, jnp.float32(jnp.nan), jnp.where(x < 0, -jnp.float32(jnp.inf), jnp.float32(jnp.inf)))
    return jnp.where(scale == 0, by_zero, jnp.where(negative, -size, size))


# Quantization of real numbers to codes and back, with a scale and a zero point of any granularity.


# What reads dequantized values: any operation, or only a contraction of two terms or more.
Use = Literal["any", "operand"]


def divide_by_scale(x: jax.Array, scale: jax.Array, precision: np.dtype) -> jax.Array:
    """Return x / scale, for two arrays of the same shape, rounded to the dtype `precision` but stored as float32."""
    if precision == dtypes.INT32:
        return divide_integers(x, scale)
    values = dtypes.scale_as_float32(scale)
    return divide_in_precision(x.astype(jnp.float32), values, precision)


def _match_batched_scale(
    mapped: dict[str, bool], x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, granularity: Granularity
) -> tuple[Any, Any, Granularity] | None:
    """Return the scale, the zero point and the granularity of an x with one more dimension, its first; or None."""
    if not mapped["x"] or mapped["scale"] != mapped.get("zero_point", mapped["scale"]):
        return None
    if mapped["scale"]:
        is_scalar = isinstance(granularity, PerTensor) and scale.ndim == 1
        return (scale, zero_point, PerAxis(0)) if is_scalar else None
    if isinstance(granularity, PerTensor):
        return scale, zero_point, granularity
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        return scale, zero_point, PerAxis(tuple(axis + 1 for axis in axes))
    if isinstance(granularity, Blocked):
        granularity = Groups((x.shape[0], *granularity.list_sizes(x.ndim - 1)))
    elif isinstance(granularity, Groups):
        granularity = Groups((x.shape[0], *granularity.sizes))
    assert isinstance(granularity, Groups | Aligned)
    return scale[None], None if zero_point is None else zero_point[None], granularity


def _batch_quantize(
    mapped: dict[str, bool], x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, granularity: Granularity,
    **statics: Any,
) -> Any:  # fmt: skip
    parts = _match_batched_scale(mapped, x, scale, zero_point, granularity)
    return None if parts is None else quantize_affine(x, *parts, **statics)


def _batch_dequantize(
    mapped: dict[str, bool], x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, granularity: Granularity,
    **statics: Any,
) -> Any:  # fmt: skip
    parts = _match_batched_scale(mapped, x, scale, zero_point, granularity)
    return None if parts is None else dequantize_affine(x, *parts, **statics)


# A jit, because JAX keeps its trace: another layer with activations of the same shape takes a fraction of the time.
@recording.mark("quantize", lambda x, dtype, **_: (x.shape, dtype), _batch_quantize)
@functools.partial(jax.jit, static_argnames=("granularity", "dtype", "precision", "saturate", "bounds"))
def quantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
    precision: np.dtype,
    saturate: bool = True,
    bounds: tuple[int, int] | None = None,
) -> jax.Array:
    """Return the codes of x.

    code = saturate(round_half_even(x / scale) + zero_point)

    Args:
        x: values, of any float dtype or int32.
        scale: the value of one step, in the shape that `granularity` expands.
        zero_point: the code of 0, in the scale's shape; None means 0. It must be 0 for a small float dtype.
        granularity: which elements of x share a scale.
        dtype: the dtype of the codes.
        precision: the dtype to which the quotient is rounded; with int32, integers are divided exactly.
        saturate: whether an overflow of a float8 dtype becomes its largest finite value.
        bounds: (qmin, qmax); the default is the bounds of the dtype.
    """
    wide_scale = granularity.expand(scale, x)
    if precision == dtypes.INT32:
        value = divide_integers(x, wide_scale)
    else:
        operands = (x.astype(jnp.float32), dtypes.scale_as_float32(wide_scale))
        operands = (round_to_dtype(value, precision) for value in operands)
        is_integer = dtype not in dtypes.SMALL_FLOATS
        quotient = divide(*operands, for_codes=is_integer, to_integers=is_integer and precision == dtypes.FLOAT32)
        value = round_to_dtype(quotient, precision)
    if dtype in dtypes.FLOAT4 and zero_point is not None:
        # The operator adds the zero point, 0, and -0 + 0 is +0. Without a zero point -0 keeps its sign.
        value = jnp.where(value == 0, np.float32(0), value)
    if dtype in dtypes.SMALL_FLOATS:
        return dtypes.encode_small_float(value, dtype, saturate)
    steps = None if zero_point is None else granularity.expand(zero_point.astype(jnp.int32), x)
    return encode_steps(value, steps, dtype, bounds)


@recording.mark("dequantize", lambda x, dtype, **_: (x.shape, dtype), _batch_dequantize)
def dequantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
    use: Use = "any",
) -> jax.Array:
    """Return the values of the codes x.

    y = (x - zero_point) * scale

    The product is rounded to float32 and then to `dtype`. With the use "operand", the values are only an operand of a
    contraction of two terms or more, which multiplies them: then no addition follows that XLA could merge with the
    product. It could with a contraction of one term, if the other operand is a constant 1.
    """
    steps = decode_steps(x, zero_point, granularity, use)
    values = dtypes.scale_as_float32(scale)
    product = steps * granularity.expand(values, x)
    product = product if use == "operand" else barriers.round_result(product)
    return round_to_dtype(product, dtype).astype(dtype)


def decode_steps(x: jax.Array, zero_point: jax.Array | None, granularity: Granularity, use: Use = "any") -> jax.Array:
    """Return codes less their zero point, float32, exactly: integers of up to 16 bits, or small floats.

    Args:
        x: the codes, or numbers of a small float dtype as bfloat16.
        zero_point: in the dtype of the codes, or None for 0.
        granularity: which elements of x share a zero point.
        use: as in `dequantize_affine`.
    """
    if x.dtype in dtypes.SMALL_FLOATS:
        return dtypes.decode_small_float(x)
    if x.dtype in dtypes.FLOATS:
        return x.astype(jnp.float32)
    codes = x.astype(jnp.int32)  # the difference of two codes may need one bit more than a code
    if zero_point is not None:
        codes = codes - granularity.expand(zero_point.astype(jnp.int32), x)
    # Of few elements, the difference and the product are one fusion each.
    codes = codes if use == "operand" else barriers.split_small_fusion(codes)
    return codes.astype(jnp.float32)


@jax.custom_jvp
def divide_steps(steps: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return what `divide` returns, with a derivative on every backend: its corrections have none."""
    return divide(steps, divisor)


@divide_steps.defjvp
def _divide_steps_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    quotient = divide_steps(*primals)
    return quotient, (tangents[0] - quotient * tangents[1]) / primals[1]


def sum_to_scale(granularity: Granularity, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the sum of the elements that share a scale, in the scale's shape and sharding.

    This is the transpose of `expand`.
    """
    # XLA:CPU sums an array in memory several times faster than one that it computes in the same loop.
    values = lax.platform_dependent(values, cpu=lax.optimization_barrier, default=lambda array: array)
    # The product with ones matters under shard_map: it varies over the devices as x does, even if the scale does not,
    # so its transpose sums over the devices too.
    ones = jnp.ones_like(values)
    _, transpose = jax.vjp(lambda s: granularity.expand(s, values) * ones, scale.astype(values.dtype))
    return transpose(values)[0]
