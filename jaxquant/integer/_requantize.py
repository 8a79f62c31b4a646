"""The conversion of an int32 accumulator to 8 bits, with the roundings of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import recording
from .._kernels import barriers, division, rounding


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
    most = barriers.MOST_ALONE
    value = barriers.round_result(acc.astype(jnp.float32) * scale, most)
    return rounding.encode_steps(value, zero_point, dtype, most=most)


@recording.mark("requantize", lambda acc, dtype, **_: (acc.shape, dtype))
def requantize_product(
    acc: jax.Array, bias: Any, a_scale: jax.Array, b_scale: jax.Array, y_scale: jax.Array, y_steps: jax.Array,
    dtype: np.dtype,
) -> jax.Array:  # fmt: skip
    """Return the codes of an int32 product, as an exporter records them.

    Args:
        acc: int32.
        bias: int32 that broadcasts against acc, or None.
        a_scale: float32, of acc's rank or a scalar.
        b_scale: float32, of acc's rank or a scalar.
        y_scale: float32, of acc's rank or a scalar.
        y_steps: the int32 zero point of the result, of acc's rank or a scalar.
        dtype: int8 or uint8.
    """
    ones = (1,) * acc.ndim
    scales = (s.reshape(ones) if s.ndim == 0 else s for s in (a_scale, b_scale, y_scale))
    factor = jnp.broadcast_to(find_multiplier(*scales), acc.shape)
    steps = jnp.broadcast_to(y_steps.reshape(ones) if y_steps.ndim == 0 else y_steps, acc.shape)
    acc = acc if bias is None else acc + jnp.broadcast_to(bias, acc.shape)
    return requantize_accumulator(acc, factor, steps, dtype)


def place_part(part: jax.Array, rank: int, axis: int | None) -> jax.Array:
    """Return a scale or a bias with the rank of a product: of its last dimensions, or of the first and of `axis`."""
    if part.ndim == rank:
        return part
    if axis is None:
        return part.reshape((1,) * (rank - part.ndim) + part.shape)
    assert axis == 1
    shape = part.shape if part.ndim == 2 else (1, part.size)
    return part.reshape(*shape, *(1,) * (rank - 2))
