"""ONNX Runtime's QLinearSigmoid."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core import barriers, division, recording
from ..._core.entry_point import compile_entry_point
from ._arguments import check_eight_bits, convert_numbers, read_encoding
from ._multiply_add import multiply_add
from ._tables import encode_values, list_values, look_up_stored

_NAME = "ops.qlinear_sigmoid"


def qlinear_sigmoid(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Apply the logistic function to codes, as ONNX Runtime's QLinearSigmoid does.

    y = saturate(round_half_even(logistic((x - x_zero_point) * x_scale) / y_scale) + y_zero_point).

    The integers are those of ONNX Runtime's kernel for x86-64 with FMA: logistic is the quotient of two polynomials
    that it evaluates with fused operations, on values clipped to [-18, 18], and not the exact function.

    Args:
        x: codes, int8 or uint8, of any shape.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.

    Returns:
        The codes, of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: a scale or a zero point is not a scalar.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.ops.qlinear_sigmoid(jnp.array([-128, -10, 0, 10, 127], jnp.int8), 0.125, 0, 1 / 256, -128)
        Array([-128,  -71,    0,   71,  127], dtype=int8)

    Source: ONNX Runtime's com.microsoft QLinearSigmoid-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _NAME, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    return _qlinear_sigmoid(x, x_scale, x_zero_point, y_scale, y_zero_point)


@compile_entry_point(_NAME)
@recording.mark("qlinear_sigmoid", lambda x, **_: (x.shape, x.dtype))
def _qlinear_sigmoid(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_NAME, "x", x)
    x_encoding = read_encoding(_NAME, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)
    return look_up_stored(encode_values(_find_logistic(list_values(x_encoding)), y_encoding), x)


# The coefficients of x**11 ... x**1 in the dividend and of x**10 ... x**0 in the divisor.
# From MLAS, logistic.cpp. The leading 0 lets one loop evaluate both polynomials.
_COEFFICIENTS = np.array(
    [
        [0.0, 6.10247389755681e-13],
        [4.37031012579801e-11, 5.76102136993427e-09],
        [1.15627324459942e-07, 6.29106785017040e-06],
        [6.08574864600143e-05, 1.70198817374094e-03],
        [8.51377133304701e-03, 1.16817656904453e-01],
        [2.48287947061529e-01, 9.93151921023180e-01],
    ],
    np.float32,
)
# MLAS clips x to this range (logistic.cpp).
_RANGE = np.float32(18)


def _find_logistic(x: jax.Array) -> jax.Array:
    """Return ONNX Runtime's approximation of 1 / (1 + exp(-x)) in float32."""
    x = jnp.clip(x, -_RANGE, _RANGE)
    square = jnp.broadcast_to(barriers.round_result(x * x), (2, *x.shape))

    def add_coefficient(value: jax.Array, coefficient: jax.Array) -> tuple[jax.Array, None]:
        return multiply_add(value, square, jnp.broadcast_to(coefficient[:, None], value.shape)), None

    # A loop, because XLA takes seconds to compile all the steps of the fused operations in one piece.
    polynomials, _ = lax.scan(add_coefficient, jnp.zeros_like(square), jnp.asarray(_COEFFICIENTS))
    quotient = division.divide(barriers.round_result(x * polynomials[0]), polynomials[1])
    return jnp.maximum(quotient + np.float32(0.5), np.float32(0))
