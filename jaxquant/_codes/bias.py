"""Biases as int32, in the steps of the sums that a contraction of codes adds them to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, division, dtypes
from .._core.entry_point import compile_entry_point
from .._core.known_values import find_known
from .._core.number_arguments import convert_plain_scale
from ..integer import _scaling

_NAME = "quantize_bias"
# XLA:CPU takes less than the least normal float32 for 0. Steps are float32, which has no 2**31 - 1.
_TINY, _LIMIT = float(np.finfo(np.float32).tiny), 2.0**31


def quantize_bias(bias: ArrayLike, lhs_scale: ArrayLike, rhs_scale: ArrayLike) -> jax.Array:
    """Return a bias in steps of the product of two scales, int32, as ONNX Runtime quantizes one.

    y = saturate(round_half_even(bias / (lhs_scale * rhs_scale)))

    The product and the quotient are rounded to float32, one after the other.

    Args:
        bias: float32, of any shape.
        lhs_scale: value per step of the activations, float32, one element. A Python number becomes float32.
        rhs_scale: value per step of the weights, float32: one element, or as many as the bias has, in its order.

    Returns:
        int32, of the bias's shape. NaN becomes 0.

    Raises:
        TypeError: an argument has an unsupported dtype.
        ValueError: a scale has another number of elements; or, if they are known, a bias has more steps than int32 can
            hold, or the product of two scales is less than 2**-126, the least normal float32.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.quantize_bias(jnp.array([0.125, -1.0, 0.375]), 0.5, jnp.array([0.5, 0.25, 0.5]))  # halves go to even
        Array([ 0, -8,  2], dtype=int32)

    Source: Jacob et al., arXiv 1712.05877, section 2.4; ONNX Runtime's fusion of QLinearConv.
    """
    scales = [convert_plain_scale(_NAME, n, s) for n, s in (("lhs_scale", lhs_scale), ("rhs_scale", rhs_scale))]
    return _quantize_bias(bias, *scales)


@compile_entry_point(_NAME)
def _quantize_steps(bias: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the bias in steps, and the products of the scales."""
    checks.check_array(_NAME, "bias", bias, (dtypes.FLOAT32,))
    for argument, scale in (("lhs_scale", lhs_scale), ("rhs_scale", rhs_scale)):
        checks.check_array(_NAME, argument, scale, (dtypes.FLOAT32,))
        sizes = (1,) if argument == "lhs_scale" else (1, bias.size)
        expected = "one element" if argument == "lhs_scale" else f"one element or {bias.size}, as the bias has"
        checks.require(scale.size in sizes, _NAME, argument, expected, f"shape {scale.shape}")
    products = _scaling.multiply_scales(lhs_scale.reshape(1), rhs_scale.reshape(-1))
    wide = jnp.broadcast_to(products, (bias.size,)).reshape(bias.shape)
    steps = lax.round(division.divide(bias, wide), lax.RoundingMethod.TO_NEAREST_EVEN)
    return steps, products


def _quantize_bias(bias: Any, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
    steps, products = _quantize_steps(bias, lhs_scale, rhs_scale)
    # Outside of the compiled function, in which no value is known.
    known = find_known(steps), find_known(products)
    if known[0] is not None and known[1] is not None:
        expected = "scales whose product is at least 2**-126, the least normal float32"
        least = float(known[1].min(initial=np.inf))
        checks.require(least >= _TINY, _NAME, "lhs_scale, rhs_scale", expected, f"{least}")
        most = float(np.abs(known[0]).max(initial=0))
        expected = "biases of at most 2**31 steps of the product of the scales (a larger scale, or a float bias)"
        checks.require(not most > _LIMIT, _NAME, "bias", expected, f"{most} steps")
    return steps.astype(jnp.int32)  # XLA's conversion saturates
