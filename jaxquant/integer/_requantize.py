"""The conversion of an int32 accumulator to 8 bits, with the roundings of ONNX Runtime."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import barriers, division, rounding


def find_multiplier(a_scale: jax.Array, b_scale: jax.Array, y_scale: jax.Array) -> jax.Array:
    """Return float32(float32(a_scale * b_scale) / y_scale), for three scales that broadcast against each other."""
    a, b, y = (s.astype(jnp.float32) for s in (a_scale, b_scale, y_scale))
    shape = lax.broadcast_shapes(a.shape, b.shape, y.shape)
    a, b, y = (jnp.broadcast_to(s, shape) for s in (a, b, y))
    # XLA must not rewrite a * b / y: the integers depend on this order.
    return division.divide(barriers.round_result(a * b), y)


def requantize_accumulator(acc: jax.Array, scale: jax.Array, zero_point: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return clip(round_half_even(float32(acc) * scale) + zero_point) in an 8-bit dtype.

    Args:
        acc: int32.
        scale: float32, of acc's shape.
        zero_point: int32, of acc's shape, added after rounding.
        dtype: int8 or uint8.
    """
    return rounding.encode_steps(barriers.round_result(acc.astype(jnp.float32) * scale), zero_point, dtype)
