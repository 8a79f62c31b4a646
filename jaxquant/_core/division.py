"""Exact quotients of float32 and of int32, on every backend.

Written in `lax` for the reason that `rounding` gives.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .barriers import make_false
from .rounding import round_to_dtype

_TINY = np.finfo(np.float32).tiny


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x / scale, float32 of one shape, rounded once as IEEE 754 has it, on every backend.

    CPUs divide exactly once XLA is kept from multiplying by a reciprocal. No other backend is trusted to: there
    the quotient is corrected by its exact residual.
    """
    return lax.platform_dependent(x, scale, cpu=_divide, default=_divide_and_correct)


def _divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    # XLA turns x / broadcast(s) into x * broadcast(1 / s), and (a / b) / s into a / (b * s). Neither pattern
    # matches once both operands come out of a select.
    never = make_false()
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
