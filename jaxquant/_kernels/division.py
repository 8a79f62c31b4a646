"""Correctly rounded quotients of float32 and int32 arrays on every backend.

The functions use `lax` where `jnp` would read better, for the reason given in `rounding`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._core import recording
from . import barriers
from .rounding import round_to_dtype

_TINY = np.finfo(np.float32).tiny


@recording.mark("divide", lambda x, **_: (x.shape, jnp.float32), recording.map_elements)
def divide(x: jax.Array, scale: jax.Array, for_codes: bool = False) -> jax.Array:
    """Return x / scale, for two float32 arrays of the same shape, rounded once as in IEEE 754.

    A CPU rounds a division correctly as long as XLA does not replace it by a multiplication with the reciprocal. Other
    backends may divide approximately; there the quotient is corrected with its exact residual.

    Args:
        x: float32.
        scale: float32.
        for_codes: Static. Whether the quotients only become integer codes, through which no derivative passes.
    """
    if for_codes:
        # If there are few elements, the division is in a fusion without the operations that computed x.
        x = barriers.split_small_fusion(lax.stop_gradient(x), barriers.MOST_ALONE)
    # XLA rewrites x / broadcast(s) as x * broadcast(1 / s), and (a / b) / s as a / (b * s). Both round differently.
    # Neither pattern matches if both operands are results of a select. The condition has to vary along all dimensions:
    # if the condition, x and the scale all repeat their elements, XLA selects before it repeats them, and then sees a
    # broadcast again.
    # In `jax.ensure_compile_time_eval` one of the operands may be known, and the condition is that of the other.
    never = barriers.make_false(lax.stop_gradient(x if isinstance(x, Tracer) else scale), is_split=for_codes)
    quotient = lax.div(lax.select(never, scale, x), lax.select(never, x, scale))
    return lax.platform_dependent(quotient, x, scale, cpu=_keep_quotient, default=correct_quotient)


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
    """Return a mask of the float32 values that are finite and whose magnitude is at least `least`."""
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
    # The magnitudes are uint32, because int32 cannot hold that of -2**31. abs returns -2**31 unchanged, and its bits
    # read as uint32 are 2**31.
    size_x, size_d = (lax.bitcast_convert_type(jnp.abs(v), jnp.uint32) for v in (x, divisor))
    whole, rest = lax.div(size_x, size_d), lax.rem(size_x, size_d)
    # This compares 2 * rest with the divisor without computing 2 * rest, which could overflow.
    gap = size_d - rest
    rounds_up = (rest > gap) | ((rest == gap) & (whole & 1 == 1))
    size = jnp.minimum(whole + rounds_up.astype(jnp.uint32), jnp.uint32(2**20)).astype(jnp.float32)
    by_zero = jnp.where(x == 0, jnp.float32(jnp.nan), jnp.where(x < 0, -jnp.float32(jnp.inf), jnp.float32(jnp.inf)))
    return jnp.where(scale == 0, by_zero, jnp.where(negative, -size, size))
