"""The table of exponentials of QLinearSoftmax, in pairs of float32, because JAX has no float64 by default.

Every product before an addition passes through `round_result`, so that the bits do not depend on what XLA contracts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._kernels import barriers
from ._multiply_add import add_exactly, multiply_exactly

_LARGEST = np.finfo(np.float32).max
# exp(5) = 148 keeps the sum of the exponentials below the largest float32.
_RESERVE = 5
# exp(v) = 2**k * exp(j / 32) * exp(rest) with |rest| <= 1 / 64, and |j| <= 12 because |v - k * log(2)| is at most 0.35.
_PARTS = 32
_MOST_PARTS = 12
_LEAST_EXPONENT = np.float32(-126 * math.log(2))  # of the smallest normal float32


def list_exponentials(scale: jax.Array, length: int) -> jax.Array:
    """Return exp((i - 255) * scale + shift) for i = 0 ... 255, float32.

    shift is as large as a float32 sum of `length` of them allows: log(largest float32 / length) - 5, or 0 if that is
    negative. The logarithm is a float32, as in ONNX Runtime.
    """
    logarithm = np.float32(math.log(np.float32(_LARGEST / np.float32(length))))
    shift = max(0.0, float(logarithm) - _RESERVE)
    steps = jnp.arange(-255, 1, dtype=jnp.float32)
    return _raise_e(*multiply_exactly(steps, jnp.broadcast_to(scale, steps.shape)), shift)


def _raise_e(high: jax.Array, low: jax.Array, shift: float) -> jax.Array:
    """Return exp(high + low + shift), 0 where that is below the normal floats, with an error of some 2**-43."""
    estimate = high + np.float32(shift)
    twos = lax.round(estimate * np.float32(1 / math.log(2)), lax.RoundingMethod.TO_NEAREST_EVEN)
    twos = jnp.clip(twos, np.float32(-126), np.float32(127))
    rest = estimate - barriers.round_result(twos * np.float32(math.log(2)))
    rest = lax.round(rest * _PARTS, lax.RoundingMethod.TO_NEAREST_EVEN)
    parts = jnp.clip(rest, np.float32(-_MOST_PARTS), np.float32(_MOST_PARTS))
    # What is left of the exponent: its two parts, shift, -twos * log(2) and -parts / 32, none of them rounded off.
    high, low = _add_pairs((high, low), _split_float64(np.full((), shift)))
    for factor, count in ((-math.log(2), twos), (-1 / _PARTS, parts)):
        product = _multiply_by_constant(count, factor)
        high, low = _add_pairs((high, low), product)
    value = _scale_pair(_add_exponential(high, low), parts)
    exponent = lax.bitcast_convert_type((twos.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(estimate < _LEAST_EXPONENT, np.float32(0), value * exponent)


def _add_exponential(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return exp(high + low) for at most 1 / 64 as a pair of float32: 1 + r + r**2 / 2 exactly, the rest in float32."""
    square, square_rest = multiply_exactly(high, high)
    tail = jnp.full_like(high, np.float32(1 / 720))
    for divisor in (120, 24, 6):
        tail = np.float32(1 / divisor) + barriers.round_result(high * tail)
    # The last bits of r**2 / 2 and of r, and r**3 / 6 + ...
    small = barriers.round_result(high * low) + barriers.round_result(high * square * tail)
    small = np.float32(0.5) * square_rest + low + small  # halves are exact
    total = add_exactly(high, np.float32(0.5) * square)
    total = _add_pairs(total, (small, jnp.zeros_like(small)))
    return _add_pairs((jnp.ones_like(high), jnp.zeros_like(high)), total)


def _scale_pair(pair: tuple[jax.Array, jax.Array], parts: jax.Array) -> jax.Array:
    """Return a pair times exp(parts / 32), rounded to float32."""
    powers = np.exp(np.arange(-_MOST_PARTS, _MOST_PARTS + 1) / _PARTS)
    places = parts.astype(jnp.int32) + np.int32(_MOST_PARTS)
    power_high, power_low = (table.at[places].get(mode="promise_in_bounds") for table in _split_float64(powers))
    product, rest = multiply_exactly(pair[0], power_high)
    rest = barriers.round_result(pair[0] * power_low) + barriers.round_result(pair[1] * power_high) + rest
    return barriers.round_result(product + rest)


def _multiply_by_constant(count: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """Return a small integer times a float64 number as a pair of float32."""
    high, low = (jnp.broadcast_to(part, count.shape) for part in _split_float64(np.full((), factor)))
    product, rest = multiply_exactly(count, high)
    return add_exactly(product, barriers.round_result(count * low) + rest)


def _add_pairs(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the sum of two pairs of float32 as a pair."""
    total, rest = add_exactly(*jnp.broadcast_arrays(a[0], b[0]))
    low, low_rest = add_exactly(*jnp.broadcast_arrays(a[1], b[1]))
    total, rest = add_exactly(total, barriers.round_result(rest + low))
    return add_exactly(total, barriers.round_result(rest + low_rest))


def _split_float64(value: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return the first 24 bits of float64 numbers and the next 24 as float32 arrays."""
    high = value.astype(np.float32)
    return jnp.asarray(high), jnp.asarray((value - high).astype(np.float32))
