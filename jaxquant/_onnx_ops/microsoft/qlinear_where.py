"""ONNX Runtime's QLinearWhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core import checks
from ..._core.entry_point import compile_entry_point
from ._arguments import broadcast_operands, check_eight_bits, convert_numbers, read_encoding
from ._tables import requantize_codes

_NAME = "ops.qlinear_where"


def qlinear_where(
    condition: ArrayLike,
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None,
    z_scale: ArrayLike,
    z_zero_point: ArrayLike | None,
) -> jax.Array:
    """Choose between two arrays of codes with scales of their own, as ONNX Runtime's QLinearWhere does.

    z = where(condition, requantize(x), requantize(y)), where
    requantize(x) = saturate(round_half_even((x - x_zero_point) * x_scale / z_scale) + z_zero_point).

    The product and the quotient are rounded to float32, one after the other. Codes whose scale and zero point are those
    of z do not change.

    Args:
        condition: bool.
        x: codes, int8 or uint8. `condition`, x and y broadcast against each other.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y: codes in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        z_scale: value per step of z, float32, a scalar. A Python number becomes float32.
        z_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.

    Returns:
        The codes, in x's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x, y = jnp.array([1, 3, 5], jnp.uint8), jnp.array([200], jnp.uint8)
        >>> jq.ops.qlinear_where(jnp.array([True, True, False]), x, 0.5, 0, y, 2.0, 0, 1.0, 1)  # 0.5, 1.5 and 400
        Array([  1,   3, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearWhere-1.
    """
    x_scale, x_zero_point = convert_numbers(_NAME, x, x_scale=x_scale, x_zero_point=x_zero_point)
    y_scale, y_zero_point = convert_numbers(_NAME, y, y_scale=y_scale, y_zero_point=y_zero_point)
    z_scale, z_zero_point = convert_numbers(_NAME, x, z_scale=z_scale, z_zero_point=z_zero_point)
    return _qlinear_where(
        condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point
    )  # fmt: skip


@compile_entry_point(_NAME)
def _qlinear_where(
    condition: jax.Array, x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y: jax.Array,
    y_scale: jax.Array, y_zero_point: jax.Array | None, z_scale: jax.Array, z_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "condition", condition, (np.dtype(np.bool_),))
    dtype = check_eight_bits(_NAME, "x", x)
    checks.check_same_dtype(_NAME, "y", y, dtype, "x's")
    left = read_encoding(_NAME, "x", x_scale, x_zero_point, dtype)
    right = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)
    result = read_encoding(_NAME, "z", z_scale, z_zero_point, dtype)
    # Requantize before broadcasting: a row of y is then looked up once.
    parts = (condition, requantize_codes(x, left, result), requantize_codes(y, right, result))
    return jnp.where(*broadcast_operands(_NAME, ("condition", "x", "y"), parts))
