"""ONNX Runtime's QLinearLeakyRelu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core import barriers, checks, recording
from ..._core.entry_point import compile_entry_point
from ._arguments import check_eight_bits, convert_numbers, read_encoding
from ._tables import encode_values, list_values, look_up

_NAME = "ops.qlinear_leaky_relu"


def qlinear_leaky_relu(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    alpha: float = 0.01,
) -> jax.Array:
    """Apply a leaky ReLU to codes, as ONNX Runtime's QLinearLeakyRelu does.

    y = saturate(round_half_even(f((x - x_zero_point) * x_scale) / y_scale) + y_zero_point),
    where f(v) = v if v >= 0, else alpha * v.

    Each product and the quotient are rounded to float32, one after the other.

    Args:
        x: codes, int8 or uint8, of any shape.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        alpha: Static. The slope below 0, rounded to float32.

    Returns:
        The codes, of x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: a scale or a zero point is not a scalar, or alpha is not finite.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.ops.qlinear_leaky_relu(jnp.array([-128, -6, -2, 1, 127], jnp.int8), 0.5, 0, 0.25, 3, alpha=0.25)
        Array([-61,   0,   2,   5, 127], dtype=int8)

    Source: ONNX Runtime's com.microsoft QLinearLeakyRelu-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _NAME, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    checks.check_real(_NAME, "alpha", alpha)
    return _qlinear_leaky_relu(x, x_scale, x_zero_point, y_scale, y_zero_point, alpha=float(alpha))


@compile_entry_point(_NAME)
@recording.mark("qlinear_leaky_relu", lambda x, **_: (x.shape, x.dtype))
def _qlinear_leaky_relu(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, alpha: float,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_NAME, "x", x)
    x_encoding = read_encoding(_NAME, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)

    def leak(values: jax.Array) -> jax.Array:
        return jnp.where(values >= 0, values, barriers.round_result(values * np.float32(alpha)))

    # As in ONNX Runtime, a table: the formula runs once for each code, not for each element.
    return look_up(encode_values(leak(list_values(x_encoding)), y_encoding), x)
