"""Counts beyond 2**32, exact: unsigned 64-bit integers in two words, as JAX has none of its own by default. Knows
nothing of what is counted."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LIMB, _MASK = 16, np.uint32(0xFFFF)
TERMS = 2**16  # a sum of so many 16-bit limbs fits a word


class Words(NamedTuple):
    """Whole numbers: high * 2**32 + low, uint32 each."""

    low: jax.Array
    high: jax.Array


def make_zeros(shape: tuple[int, ...]) -> Words:
    """Returns zeros of a shape."""
    return Words(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))


def convert_uint32(counts: jax.Array) -> Words:
    """Returns int32 counts, none of them negative."""
    low = lax.bitcast_convert_type(counts, jnp.uint32)
    return Words(low, jnp.zeros_like(low))


def add(a: Words, b: Words) -> Words:
    """Returns a + b."""
    low = a.low + b.low
    return Words(low, a.high + b.high + (low < a.low).astype(jnp.uint32))


def subtract(a: Words, b: Words) -> Words:
    """Returns a - b, which is not negative."""
    return Words(a.low - b.low, a.high - b.high - (a.low < b.low).astype(jnp.uint32))


def is_less(a: Words, b: Words) -> jax.Array:
    """Returns where a < b."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def to_float32(words: Words) -> jax.Array:
    """Returns the nearest float32, or its neighbour."""
    return words.high.astype(jnp.float32) * np.float32(2.0**32) + words.low.astype(jnp.float32)


def _split_limbs(words: Words) -> list[jax.Array]:
    return [words.low & _MASK, words.low >> _LIMB, words.high & _MASK, words.high >> _LIMB]


def _carry(limbs: list[jax.Array]) -> list[jax.Array]:
    """Returns limbs of 16 bits each; what the last one carries is lost."""
    found, carry = [], jnp.zeros_like(limbs[0])
    for limb in limbs:
        # The carry of a limb is below 2**16, and a word below it may be full: two steps, so that none overflows.
        low = (limb & _MASK) + carry
        found.append(low & _MASK)
        carry = (limb >> _LIMB) + (low >> _LIMB)
    return found


def _join_limbs(limbs: list[jax.Array]) -> Words:
    a, b, c, d = _carry(limbs)
    return Words(a | (b << _LIMB), c | (d << _LIMB))


def sum_cumulatively(words: Words) -> Words:
    """Returns the sums of the first 1, 2, ... entries of the last axis, which has at most TERMS."""
    return _join_limbs([jnp.cumsum(limb, axis=-1, dtype=jnp.uint32) for limb in _split_limbs(words)])


def sum_over_devices(words: Words, axis_name: str | tuple[str, ...]) -> Words:
    """Returns the sum over a mapped axis of at most TERMS members."""
    return _join_limbs([lax.psum(limb, axis_name) for limb in _split_limbs(words)])


def find_share(words: Words, of_it: Fraction) -> tuple[Words, jax.Array]:
    """Returns the whole part and the float32 fraction of words * of_it, where 0 <= of_it < 1.

    The factor is rounded to 64 bits: of 2**48 it misses by less than 2**-16.
    """
    factor = min(round(of_it * 2**64), 2**64 - 1)
    sums = [jnp.zeros_like(words.low) for _ in range(9)]
    for i, limb in enumerate(_split_limbs(words)):
        for j in range(4):
            product = limb * np.uint32(factor >> (_LIMB * j) & 0xFFFF)
            sums[i + j] += product & _MASK
            sums[i + j + 1] += product >> _LIMB
    limbs = _carry(sums[:8])
    rest = limbs[3].astype(jnp.float32) * np.float32(2.0**-16) + limbs[2].astype(jnp.float32) * np.float32(2.0**-32)
    return Words(limbs[4] | (limbs[5] << _LIMB), limbs[6] | (limbs[7] << _LIMB)), rest
