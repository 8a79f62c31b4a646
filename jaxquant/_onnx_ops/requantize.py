"""From an int32 accumulator back to 8 bits, as ONNX Runtime does it. Knows no operator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import barriers, division, rounding


def find_multiplier(a_scale: jax.Array, b_scale: jax.Array, y_scale: jax.Array) -> jax.Array:
    """Returns float32(float32(a_scale * b_scale) / y_scale), for scales that broadcast against each other."""
    a, b, y = (s.astype(jnp.float32) for s in (a_scale, b_scale, y_scale))
    shape = lax.broadcast_shapes(a.shape, b.shape, y.shape)
    a, b, y = (jnp.broadcast_to(s, shape) for s in (a, b, y))
    return division.divide(barriers.round_result(a * b), y)


def requantize_accumulator(acc: jax.Array, scale: jax.Array, zero_point: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns clip(round_half_even(float32(acc) * scale) + zero_point) in an 8-bit dtype.

    Args:
        acc: int32.
        scale: float32, of acc's shape.
        zero_point: int32, of acc's shape. It is added after rounding.
        dtype: int8 or uint8.
    """
    return rounding.encode_steps(barriers.round_result(acc.astype(jnp.float32) * scale), zero_point, dtype)
