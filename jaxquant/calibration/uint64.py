"""Exact unsigned 64-bit arithmetic with pairs of uint32, because JAX has no 64-bit integers by default."""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LIMB, _MASK = 16, np.uint32(0xFFFF)
TERMS = 2**16  # the sum of this many 16-bit limbs fits in 32 bits


class Words(NamedTuple):
    """An array of 64-bit numbers, high * 2**32 + low, as two uint32 arrays."""

    low: jax.Array
    high: jax.Array


def make_zeros(shape: tuple[int, ...]) -> Words:
    """Return zeros of the given shape."""
    return Words(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))


def convert_uint32(counts: jax.Array) -> Words:
    """Return int32 counts, which must not be negative, as Words."""
    low = lax.bitcast_convert_type(counts, jnp.uint32)
    return Words(low, jnp.zeros_like(low))


def add(a: Words, b: Words) -> Words:
    """Return a + b."""
    low = a.low + b.low  # modulo 2**32: the sum is less than an operand if there was a carry
    return Words(low, a.high + b.high + (low < a.low).astype(jnp.uint32))


def subtract(a: Words, b: Words) -> Words:
    """Return a - b, which must not be negative."""
    return Words(a.low - b.low, a.high - b.high - (a.low < b.low).astype(jnp.uint32))


def is_less(a: Words, b: Words) -> jax.Array:
    """Return the mask a < b."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def to_float32(words: Words) -> jax.Array:
    """Return the nearest float32 or one of its neighbors."""
    return words.high.astype(jnp.float32) * np.float32(2.0**32) + words.low.astype(jnp.float32)


def sum_cumulatively(words: Words) -> Words:
    """Return the cumulative sums along the last axis, which must have at most TERMS entries."""
    return _join_limbs([jnp.cumsum(limb, axis=-1, dtype=jnp.uint32) for limb in _split_limbs(words)])


def sum_over_devices(words: Words, axis_name: Hashable) -> Words:
    """Return the sum over a mapped axis, which must have at most TERMS members."""
    return _join_limbs([lax.psum(limb, axis_name) for limb in _split_limbs(words)])


def multiply_by_share(words: Words, share: Fraction) -> tuple[Words, jax.Array]:
    """Return the whole part and the float32 fraction of words * share, where 0 <= share < 1.

    The share is rounded to 64 bits. For words up to 2**48 the error of the product is below 2**-16.
    """
    factor = min(round(share * 2**64), 2**64 - 1)
    # Long multiplication of four limbs by four. The upper four limbs of the product are the whole part.
    sums = [jnp.zeros_like(words.low) for _ in range(8)]
    for i, limb in enumerate(_split_limbs(words)):
        for j in range(4):
            product = limb * np.uint32(factor >> (_LIMB * j) & 0xFFFF)
            sums[i + j] += product & _MASK
            sums[i + j + 1] += product >> _LIMB
    limbs = _carry(sums)
    # The two upper limbs of the fraction are enough: they hold more digits than a float32.
    upper, lower = (limb.astype(jnp.float32) for limb in (limbs[3], limbs[2]))
    fraction = upper * np.float32(2.0**-16) + lower * np.float32(2.0**-32)
    return Words(limbs[4] | (limbs[5] << _LIMB), limbs[6] | (limbs[7] << _LIMB)), fraction


def _split_limbs(words: Words) -> list[jax.Array]:
    return [words.low & _MASK, words.low >> _LIMB, words.high & _MASK, words.high >> _LIMB]


def _carry(limbs: list[jax.Array]) -> list[jax.Array]:
    """Return the same number with limbs of 16 bits each; the carry of the last limb is dropped."""
    carried, carry = [], jnp.zeros_like(limbs[0])
    for limb in limbs:
        # A limb may fill all 32 bits, so adding the carry to it could overflow. Adding it to the lower half cannot.
        low = (limb & _MASK) + carry
        carried.append(low & _MASK)
        carry = (limb >> _LIMB) + (low >> _LIMB)
    return carried


def _join_limbs(limbs: list[jax.Array]) -> Words:
    a, b, c, d = _carry(limbs)
    return Words(a | (b << _LIMB), c | (d << _LIMB))
