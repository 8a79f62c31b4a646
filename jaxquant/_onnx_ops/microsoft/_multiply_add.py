"""a * b + c rounded once, as the fused instruction of a CPU does, from operations that JAX offers.

XLA may contract a multiplication and a following addition into a fused instruction, or may not; it depends on what it
fuses. The functions here give the same bits either way, because every product that an addition follows is exact, or
passes through `barriers.round_result`, which no contraction crosses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._kernels import barriers


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Return a * b + c rounded once, for float32 arrays of one shape.

    The algorithm is that of Boldo and Melquiond: the exact product and the exact sums of its two parts with c, the two
    smallest of which are added with rounding to odd. The result is right unless a product of parts of a and b leaves
    the range of normal floats, which XLA:CPU flushes to zero.
    """
    product, product_rest = multiply_exactly(a, b)
    low, low_rest = add_exactly(c, product_rest)
    high, high_rest = add_exactly(product, low)
    return high + _add_to_odd(low_rest, high_rest)


def multiply_exactly(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two float32 arrays whose sum is a * b: the rounded product and its error (Dekker)."""
    product = barriers.round_result(a * b)
    (a_high, a_low), (b_high, b_low) = split_bits(a), split_bits(b)
    # The products of two halves have 24 bits: none of them is rounded, and neither is any of these sums.
    error = (a_high * b_high - product) + a_high * b_low + a_low * b_high
    return product, error + a_low * b_low


def add_exactly(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two float32 arrays whose sum is a + b: the rounded sum and its error (Knuth)."""
    total = barriers.round_result(a + b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def split_bits(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first 12 bits of the significand and the rest, two floats of at most 12 bits."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    high = lax.bitcast_convert_type(lax.bitwise_and(bits, np.int32(~0xFFF)), jnp.float32)
    return high, value - high


def _add_to_odd(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a + b rounded to odd: if inexact, the neighbor whose last bit is 1, so a second rounding sees the rest."""
    total, error = add_exactly(a, b)
    bits = lax.bitcast_convert_type(total, jnp.int32)
    # The bits of floats of one sign, read as integers, sort by magnitude.
    step = jnp.where((error > 0) == (total > 0), np.int32(1), np.int32(-1))
    is_off = (error != 0) & (lax.bitwise_and(bits, np.int32(1)) == 0)
    return lax.bitcast_convert_type(jnp.where(is_off, bits + step, bits), jnp.float32)
