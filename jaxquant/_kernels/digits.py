"""The contraction of float rows with integer codes, in integers: the rows are written as digits of 8 bits.

A CPU contracts int8 several times faster than float32, and reads a quarter of the bytes. A float32 row is therefore
written as a sum of int8 rows, x = factor * sum over i of digits[i] * 2**(24 - 8 i), whose contractions with the codes
are exact. A row has 47 bits, counted from its largest magnitude: 23 more than a float32 number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import small_floats
from .contraction import Role, contract_roles, spread_outward

_DIGITS = 6
# The largest number of products that int32 holds: a digit is at most 2**7 and a code minus its zero point below 2**8.
LIMIT = (2**31 - 1) // (2**7 * (2**8 - 1))
# See `has_moderate_scales`.
_LEAST_SCALE = 2.0**-60
# A row is scaled by a power of two so that its largest magnitude lies just below this, which four digits hold.
_LARGEST = 127 * 2**24


def contract_digits(
    x: jax.Array, codes: jax.Array, steps: jax.Array | None, scale: jax.Array, x_role: Role, role: Role
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 contraction of a float array with scaled codes, x on the left, and whether it is exact enough.

    The sum over digits and codes is exact. The result is rounded about as often as there are digits, and does not
    depend on an order of summation. It is not exact enough if a row contains an infinity, a NaN, or numbers too small
    for the digits of their row; nor if `has_moderate_scales` of the scales is False, which the caller asks.

    Args:
        x: float32.
        codes: int8, or codes of 2 or 4 bits.
        steps: their int32 zero point, a scalar or of the rank of the codes, or None for 0.
        scale: float32, of the rank of the codes. Like the zero point it does not vary along contracted dimensions.
        x_role: the role of each dimension of x; there are no batch dimensions.
        role: the role of each dimension of the codes.
    """
    digits, unit, is_exact = _split_digits(x, x_role.contracted)
    free, contracted = (tuple(a + 1 for a in axes) for axes in (x_role.free, x_role.contracted))
    acc = contract_roles(digits, codes, None, steps, Role((), (0, *free), contracted), role)
    unit = lax.transpose(unit, (*x_role.free, *x_role.contracted)).reshape(
        *(x.shape[a] for a in x_role.free), *(1 for _ in role.free)
    )
    scale = spread_outward(scale, role, len(x_role.free), 0)
    # The sum of the digits is below 2**56, so its product with a moderate scale is a normal number.
    return (_add_digits(acc) * scale) * unit, is_exact


def has_moderate_scales(scale: jax.Array) -> jax.Array:
    """Return whether all scales lie between 2**-60 and 2**60, which excludes NaN and infinity.

    With such scales no intermediate product overflows, or becomes a subnormal number, which XLA:CPU treats as 0.
    """
    return compute_least_scale(scale) > 0


def compute_least_scale(scale: jax.Array) -> jax.Array:
    """Return the least of the scales, a float32 scalar, or 0 if not all lie between 2**-60 and 2**60."""
    wide = small_floats.scale_as_float32(scale)
    is_moderate = (wide >= np.float32(_LEAST_SCALE)) & (wide <= np.float32(1 / _LEAST_SCALE))
    # XLA:CPU reduces floats in one call of a library, but booleans, as in `jnp.all`, in several loops.
    return jnp.min(jnp.where(is_moderate, wide, np.float32(0)))


def _split_digits(x: jax.Array, contracted: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the digits of x, the unit of each row, and whether the digits are exact enough.

    Returns:
        int8 [6, ...] with the shape of x behind; float32, of length 1 along the contracted dimensions; a bool.
    """
    largest = jnp.max(jnp.abs(x), axis=contracted, keepdims=True)
    factor, unit = compute_powers(largest, 30)
    scaled = x * factor
    # Both parts are exact: a difference to the nearest integer, and a difference to 1 of numbers close to it.
    whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = scaled - whole
    # Two digits from -128 to 127 hold -32896 to 32639, in units of 2**-16. A larger rest becomes negative.
    carries = rest >= np.float32(32639.5 / 2**16)
    whole, rest = whole + carries.astype(jnp.float32), rest - carries.astype(jnp.float32)
    size = jnp.abs(scaled)
    # The unit of the last digit is 2**-16, so a number of 4 or more has a relative error of at most 2**-19.
    is_fine = (size <= np.float32(_LARGEST)) & ((size >= 4) | (x == 0))
    is_exact = jnp.min(is_fine.astype(jnp.float32)) > 0
    # Adding 0x80 to each byte turns bytes from 0 to 255 into digits from -128 to 127, with the carries between them.
    high = lax.convert_element_type(whole, jnp.int32) + np.int32(0x80808080 - 2**32)
    low = lax.convert_element_type(lax.round(rest * np.float32(2**16)), jnp.int32) + np.int32(0x8080)
    # The barrier keeps XLA from computing both for each of the digits.
    high, low = lax.optimization_barrier((high, low))
    shifted = [lax.shift_right_logical(high, np.int32(shift)) for shift in (24, 16, 8)]
    shifted += [high, lax.shift_right_logical(low, np.int32(8)), low]
    digits = jnp.stack([lax.convert_element_type(part, jnp.int8) for part in shifted])
    return digits ^ np.int8(-128), unit, is_exact


def compute_powers(largest: jax.Array, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Return the power of two that scales a magnitude to just below 127 / 64 * 2**exponent, and its reciprocal.

    Both are normal float32. A magnitude that is too small, too large or not finite is scaled as far as that allows.

    Args:
        largest: float32, not negative.
        exponent: from 0 to 30.
    """
    # This is the biased exponent of the magnitude, plus 1 if its mantissa is at least 127 / 64.
    bits = lax.bitcast_convert_type(largest, jnp.int32) + np.int32(0x20000)
    biased = lax.clamp(np.int32(exponent + 1), lax.shift_right_logical(bits, np.int32(23)), np.int32(253))
    return _make_power(np.int32(254 + exponent) - biased), _make_power(biased - np.int32(exponent))


def _make_power(biased_exponent: jax.Array) -> jax.Array:
    """Return the powers of two with these biased exponents, which are normal float32."""
    return lax.bitcast_convert_type(lax.shift_left(biased_exponent, np.int32(23)), jnp.float32)


def _add_digits(acc: jax.Array) -> jax.Array:
    """Return the sum of the contractions of the digits, weighted by their places, as float32."""
    terms = lax.convert_element_type(acc, jnp.float32)
    # The smallest terms come first, so that their sum is rounded at their own magnitude.
    y = terms[_DIGITS - 1] * np.float32(2.0 ** (24 - 8 * (_DIGITS - 1)))
    for i in reversed(range(_DIGITS - 1)):
        y = y + terms[i] * np.float32(2.0 ** (24 - 8 * i))
    return y
