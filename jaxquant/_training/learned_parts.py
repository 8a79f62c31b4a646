"""How a scale and a zero point that are trained become those that codes have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks


def read_scale(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Return the magnitude of a learned scale in the dtype of the spec; 0 becomes the least scale."""
    # The least scale of the scale's own dtype: float16 rounds the least float32 to 0.
    least = scale_from_range.find_least_scale(spec.scale_dtype)
    return jnp.maximum(jnp.abs(scale), least).astype(spec.scale_dtype)


def read_zero_point(spec: QuantSpec, zero_point: jax.Array) -> Any:
    """Return a learned zero point within the codes of the spec, still in float32."""
    # fake_quantize rejects a known zero point outside the codes, and training may move one there.
    if checks.is_traced(zero_point):
        return zero_point
    return jnp.clip(zero_point, *map(np.float32, spec.bounds))
