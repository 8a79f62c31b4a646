"""ONNX Runtime's QLinearConcat and QLinearWhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, entry_point
from .._core.entry_point import compile_entry_point, convert_float32_scale
from .encodings import (
    broadcast_operands,
    check_eight_bits,
    convert_numbers,
    read_encoding,
    read_named,
    requantize_codes,
)

# ONNX Runtime's QLinearConcat.


_QLINEAR_CONCAT = "ops.qlinear_concat"


def qlinear_concat(
    y_scale: ArrayLike, y_zero_point: ArrayLike | None, *inputs: ArrayLike | None, axis: int
) -> jax.Array:  # fmt: skip
    """Join arrays of codes with scales of their own along an axis, as ONNX Runtime's QLinearConcat does.

    y = concatenate(requantize(inputs[0]), requantize(inputs[3]), ...), where requantize(x) =
    saturate(round_half_even((x - x_zero_point) * x_scale / y_scale) + y_zero_point).

    The product and the quotient are rounded to float32, one after the other. Codes with the scale and the zero point
    of y do not change.

    Args:
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in the dtype of the codes. None means 0. An int becomes a scalar in the
            dtype of the codes.
        inputs: for each array its codes, its scale and its zero point, in this order. The codes are int8 or uint8, of
            one dtype and of shapes that are equal except along `axis`. The scales and the zero points are scalars like
            y_scale and y_zero_point.
        axis: Static. The dimension along which the arrays are joined; a negative one counts from the back.

    Returns:
        The codes, in the dtype of the inputs.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: the number of inputs is not a multiple of 3, or shapes or the axis do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a, b = jnp.array([1, 3, 5], jnp.uint8), jnp.array([200], jnp.uint8)
        >>> jq.ops.qlinear_concat(1.0, 1, a, 0.5, 0, b, 2.0, 0, axis=0)  # 0.5, 1.5, 2.5 and 400
        Array([  1,   3,   3, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearConcat-1.
    """
    expected = "one or more arrays, each followed by its scale and its zero point"
    count = len(inputs)
    checks.require(count > 0 and count % 3 == 0, _QLINEAR_CONCAT, "inputs", expected, f"{count} inputs")
    converted: list[Any] = [*convert_numbers(_QLINEAR_CONCAT, inputs[0], y_scale=y_scale, y_zero_point=y_zero_point)]
    for i, value in enumerate(inputs):
        name = f"inputs[{i}]"
        checks.check_readable(_QLINEAR_CONCAT, name, value)  # the entry point has one name for all inputs
        if i % 3 == 1:
            value = convert_float32_scale(_QLINEAR_CONCAT, name, value)
        elif i % 3 == 2:
            value = entry_point.convert_operand_zero_point(_QLINEAR_CONCAT, name, value, inputs[0])
        converted.append(value)
    checks.check_integer(_QLINEAR_CONCAT, "axis", axis)
    return _qlinear_concat(*converted, axis=axis)


@compile_entry_point(_QLINEAR_CONCAT)
def _qlinear_concat(y_scale: jax.Array, y_zero_point: jax.Array | None, *inputs: Any, axis: int) -> jax.Array:
    dtype = check_eight_bits(_QLINEAR_CONCAT, "inputs[0]", inputs[0])
    y_encoding = read_encoding(_QLINEAR_CONCAT, "y", y_scale, y_zero_point, dtype)
    axis = checks.check_axis(_QLINEAR_CONCAT, axis, inputs[0].ndim)
    parts = []
    for i in range(0, len(inputs), 3):
        x, scale, zero_point = inputs[i : i + 3]
        checks.check_same_dtype(_QLINEAR_CONCAT, f"inputs[{i}]", x, dtype, "the dtype of inputs[0]")
        _check_fit(f"inputs[{i}]", x, inputs[0], axis)
        names = (f"inputs[{i + 1}]", f"inputs[{i + 2}]")
        parts.append(requantize_codes(x, read_named(_QLINEAR_CONCAT, names, scale, zero_point, dtype), y_encoding))
    return lax.concatenate(parts, axis)


def _check_fit(argument: str, x: jax.Array, first: jax.Array, axis: int) -> None:
    """Check that an array has the shape of the first one except along the axis."""
    lengths, others = ([n for i, n in enumerate(array.shape) if i != axis] for array in (first, x))
    expected = f"the shape {first.shape} of inputs[0], except along axis {axis}"
    checks.require(x.ndim == first.ndim and lengths == others, _QLINEAR_CONCAT, argument, expected, f"shape {x.shape}")


# ONNX Runtime's QLinearWhere.


_QLINEAR_WHERE = "ops.qlinear_where"


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

    The product and the quotient are rounded to float32, one after the other. Codes with the scale and the zero point
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
    x_scale, x_zero_point = convert_numbers(_QLINEAR_WHERE, x, x_scale=x_scale, x_zero_point=x_zero_point)
    y_scale, y_zero_point = convert_numbers(_QLINEAR_WHERE, y, y_scale=y_scale, y_zero_point=y_zero_point)
    z_scale, z_zero_point = convert_numbers(_QLINEAR_WHERE, x, z_scale=z_scale, z_zero_point=z_zero_point)
    return _qlinear_where(
        condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point
    )  # fmt: skip


@compile_entry_point(_QLINEAR_WHERE)
def _qlinear_where(
    condition: jax.Array, x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y: jax.Array,
    y_scale: jax.Array, y_zero_point: jax.Array | None, z_scale: jax.Array, z_zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_QLINEAR_WHERE, "condition", condition, (np.dtype(np.bool_),))
    dtype = check_eight_bits(_QLINEAR_WHERE, "x", x)
    checks.check_same_dtype(_QLINEAR_WHERE, "y", y, dtype, "x's")
    left = read_encoding(_QLINEAR_WHERE, "x", x_scale, x_zero_point, dtype)
    right = read_encoding(_QLINEAR_WHERE, "y", y_scale, y_zero_point, dtype)
    result = read_encoding(_QLINEAR_WHERE, "z", z_scale, z_zero_point, dtype)
    # Requantize before broadcasting: a row of y is then looked up once.
    parts = (condition, requantize_codes(x, left, result), requantize_codes(y, right, result))
    return jnp.where(*broadcast_operands(_QLINEAR_WHERE, ("condition", "x", "y"), parts))
