"""The exact quotient, the rounded product and rounding to codes: every place where XLA's own rewriting would
change an integer is answered here, once. Knows nothing of operators, axes or zero-point conventions.

`tests/test_numerics.py` holds the canaries: they fail the day a new XLA breaks one of these.

Written in `lax` where `jnp` would read better: every operator comes through here, and each jnp function is a jitted
one, which JAX traces anew for every shape. In jnp a quantize_linear took 10 ms to trace, in lax it takes 4.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dtypes, small_floats

# Adding 1.5 * 2**23 to |v| < 2**22 leaves round-half-even(v) in the low bits of the sum. The bits of a float32 sort as
# the float does, so a clamp of the bits saturates: XLA:CPU runs this two to six times faster than round, clip and
# convert. _NAN_WRAP takes every quiet NaN, of either sign, below the codes and keeps +infinity above them.
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = int(_MAGIC.view(np.int32))
_NAN_WRAP = 0x80000000 - 0x7FC00000
_TINY = np.finfo(np.float32).tiny


def _make_false() -> jax.Array:
    """A False that no compiler pass can see through."""
    return lax.optimization_barrier(np.zeros((), np.bool_))


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale, float32 of one shape, rounded once as IEEE 754 has it, on every backend.

    CPUs divide exactly once XLA is kept from multiplying by a reciprocal. No other backend is trusted to: there
    the quotient is corrected by its exact residual.
    """
    return lax.platform_dependent(x, scale, cpu=_divide, default=_divide_and_correct)


def _divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    # XLA turns x / broadcast(s) into x * broadcast(1 / s), and (a / b) / s into a / (b * s). Neither pattern
    # matches once both operands come out of a select.
    never = _make_false()
    return lax.div(lax.select(never, scale, x), lax.select(never, x, scale))


def _divide_and_correct(x: jax.Array, scale: jax.Array) -> jax.Array:
    return correct_quotient(_divide(x, scale), x, scale)


def correct_quotient(approximate: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Moves an approximate float32 quotient (a few ulp off) to the correctly rounded one.

    The residual x - quotient * scale is taken on the integer mantissas, modulo 2**32. It is small, so 32 bits
    hold it exactly, whatever the backend fuses, contracts or flushes. A quotient that is zero, subnormal,
    infinite or NaN is left alone.
    """
    mantissa_x, exponent_x = _split_mantissa(x)
    mantissa_s, exponent_s = _split_mantissa(scale)
    as_float = functools.partial(lax.convert_element_type, new_dtype=jnp.float32)
    as_int = functools.partial(lax.convert_element_type, new_dtype=jnp.int32)
    distance = lax.add(lax.sub(exponent_x, exponent_s), np.int32(150))
    result = approximate
    for _ in range(3):  # a step over a power of two lands beside its aim; the next one mends it
        mantissa_q, exponent_q = _split_mantissa(result)
        shift = lax.sub(distance, exponent_q)  # 23 or 24 where the quotient is near
        shift = lax.clamp(np.int32(20), shift, np.int32(27))
        residual = lax.sub(lax.shift_left(mantissa_x, shift), lax.mul(mantissa_q, mantissa_s))
        coarse = as_int(lax.round(lax.div(as_float(residual), as_float(mantissa_s))))
        rest = lax.sub(residual, lax.mul(coarse, mantissa_s))
        rest = lax.add(rest, rest)
        # Floats lie twice as dense below a power of two, so there a quarter of a step is half way.
        power = lax.eq(mantissa_q, np.int32(0x800000))
        power = lax.bitwise_and(power, lax.eq(coarse, np.int32(0)))
        half = lax.shift_right_logical(mantissa_s, np.int32(1))
        below = lax.select(power, half, mantissa_s)
        step = lax.add(coarse, as_int(lax.gt(rest, mantissa_s)))
        step = lax.sub(step, as_int(lax.lt(rest, lax.neg(below))))
        moved = lax.add(lax.bitcast_convert_type(result, jnp.int32), step)
        result = lax.bitcast_convert_type(moved, jnp.float32)
    ordinary = _is_ordinary(approximate, 2 * _TINY)
    for operand in (x, scale):
        ordinary = lax.bitwise_and(ordinary, _is_ordinary(operand, _TINY))
    return lax.select(ordinary, result, approximate)


def _is_ordinary(value: jax.Array, least: np.float32) -> jax.Array:
    """Returns where a float32 is finite and its magnitude `least` or more."""
    large = lax.ge(lax.abs(value), np.float32(least))
    return lax.bitwise_and(lax.is_finite(value), large)


def _split_mantissa(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the 24-bit integer mantissa and the biased exponent of a normal float32, both int32."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    mantissa = lax.bitwise_or(lax.bitwise_and(bits, np.int32(0x7FFFFF)), np.int32(0x800000))
    return mantissa, lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(23)), np.int32(0xFF))


@jax.custom_jvp
def round_result(result: jax.Array) -> jax.Array:
    """Returns its float32 argument, and keeps the operation that made it from merging with the one that uses it.

    XLA fuses a multiplication with an addition that follows, in the same operator or in the user's code, and jax
    0.10 adds two constants in a row as one; both round once where a runtime rounds twice. As integers the bits of
    no float but some NaN are above those of the plain NaN: this minimum does nothing, but no compiler can tell.
    """
    bits = lax.bitcast_convert_type(result, jnp.int32)
    return lax.bitcast_convert_type(lax.min(bits, np.int32(0x7FC00000)), jnp.float32)


@round_result.defjvp
def _round_result_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_result(*primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_dtype(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds float32 values to those of float16 or bfloat16, half to even, and returns them as float32.

    `value.astype(dtype)` alone will not do: XLA drops a conversion that is undone right after.
    """
    if dtype == dtypes.BFLOAT16:
        return lax.reduce_precision(value, 8, 7)
    if dtype == dtypes.FLOAT16:
        # reduce_precision flushes what float16 keeps as subnormals: the multiples of 2**-24 below 2**-14.
        small = lax.round(value * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
        return jnp.where(jnp.abs(value) < np.float32(2**-14), small, lax.reduce_precision(value, 5, 10))
    return value


@round_to_dtype.defjvp
def _round_to_dtype_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_to_dtype(*primals, dtype), tangents[0]  # straight through: a rounding is flat nearly everywhere


def divide_in_precision(x: jax.Array, scale: jax.Array, precision: np.dtype) -> jax.Array:
    """Returns x / scale as an array of `precision` would hold it, carried in float32.

    float32 has more than twice the digits of float16 and bfloat16, so rounding twice rounds as once.
    """
    return round_to_dtype(divide(round_to_dtype(x, precision), round_to_dtype(scale, precision)), precision)


def divide_integers(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale of two int32 arrays, rounded half to even and cut to +-2**20, as float32.

    x / 0 is infinite, 0 / 0 is NaN.
    """
    divisor = jnp.where(scale == 0, 1, scale)
    negative = (x < 0) ^ (divisor < 0)
    # -2**31 has no int32 magnitude: the magnitudes are uint32.
    size_x, size_d = (lax.bitcast_convert_type(jnp.abs(v), jnp.uint32) for v in (x, divisor))
    whole, rest = lax.div(size_x, size_d), lax.rem(size_x, size_d)
    beyond = size_d - rest
    up = (rest > beyond) | ((rest == beyond) & (whole & 1 == 1))
    size = jnp.minimum(whole + up.astype(jnp.uint32), jnp.uint32(2**20)).astype(jnp.float32)
    zero = jnp.where(x == 0, jnp.float32(jnp.nan), jnp.where(x < 0, -jnp.float32(jnp.inf), jnp.float32(jnp.inf)))
    return jnp.where(scale == 0, zero, jnp.where(negative, -size, size))


def encode_steps(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None = None
) -> jax.Array:
    """Returns clip(round_half_even(value) + zero_point, qmin, qmax) as an integer dtype of 2 to 16 bits.

    Args:
        value: float32. Infinities saturate; NaN becomes qmin.
        zero_point: int32 of value's shape, within the bounds, or None for 0.
        dtype: the integer dtype.
        bounds: (qmin, qmax), by default all that the dtype holds.
    """
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    zero = np.int32(_MAGIC_BITS + _NAN_WRAP)  # the code 0; its low 16 bits are zeros
    code = lax.bitcast_convert_type(lax.add(value, _MAGIC), jnp.int32)
    code = lax.add(code, np.int32(_NAN_WRAP))
    if zero_point is None:
        code = lax.clamp(zero + np.int32(low), code, zero + np.int32(high))
    else:
        least, most = (lax.sub(zero + np.int32(end), zero_point) for end in (low, high))
        code = lax.add(lax.clamp(least, code, most), zero_point)
    if dtypes.count_bits(dtype) < 8:
        # Packing nibbles ends XLA:CPU's vector loop: 51 ms for 4096 x 4096 in one loop, 5 ms in two (jax 0.12;
        # on 0.10 the packing alone takes 40).
        code = lax.optimization_barrier(lax.convert_element_type(code, jnp.int8))
    return lax.convert_element_type(code, dtype)


def find_in_range(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None
) -> jax.Array:
    """Returns where rounding alone, without saturation, lands on a code of `dtype`. False for NaN."""
    if dtype in dtypes.SMALL_FLOATS:
        return ~(small_floats.find_overflow(value, dtype) | jnp.isnan(value))
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    code = lax.round(value, lax.RoundingMethod.TO_NEAREST_EVEN)
    if zero_point is not None:
        code = code + zero_point.astype(jnp.float32)
    return (code >= low) & (code <= high)
