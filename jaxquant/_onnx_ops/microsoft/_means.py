"""Means of codes along dimensions, from sums that are exact in int32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import barriers, division
from .. import requantize
from ._arguments import Affine


def average_codes(
    x: jax.Array, x_affine: Affine, y_affine: Affine, axes: tuple[int, ...], *, keepdims: bool
) -> jax.Array:
    """Return the codes of the means of x along `axes`, as ONNX Runtime's QLinearGlobalAveragePool computes them.

    y = saturate(round_half_even(float32(sum(x) - count * zero point of x) * scale) + zero point of y),
    where scale = scale of x / (scale of y * count)
    """
    count = math.prod(x.shape[axis] for axis in axes)
    acc = jnp.sum(x, axes, dtype=jnp.int32, keepdims=keepdims) - x_affine.steps * np.int32(count)
    divisor = barriers.round_result(y_affine.scale * np.float32(count))
    scale = jnp.broadcast_to(division.divide(x_affine.scale, divisor), acc.shape)
    steps = jnp.broadcast_to(y_affine.steps, acc.shape)
    return requantize.requantize_accumulator(acc, scale, steps, y_affine.dtype)
