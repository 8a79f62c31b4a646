"""ONNX Runtime's QLinearConcat."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from ..._core import checks
from ..._core.entry_point import compile_entry_point
from ..._core.number_arguments import convert_plain_scale
from ...integer import _operands
from ._arguments import check_eight_bits, convert_numbers, read_encoding, read_named
from ._tables import requantize_codes

_NAME = "ops.qlinear_concat"


def qlinear_concat(
    y_scale: ArrayLike, y_zero_point: ArrayLike | None, *inputs: ArrayLike | None, axis: int
) -> jax.Array:  # fmt: skip
    """Join arrays of codes with scales of their own along an axis, as ONNX Runtime's QLinearConcat does.

    y = concatenate(requantize(inputs[0]), requantize(inputs[3]), ...), where requantize(x) =
    saturate(round_half_even((x - x_zero_point) * x_scale / y_scale) + y_zero_point).

    The product and the quotient are rounded to float32, one after the other. Codes whose scale and zero point are those
    of y do not change.

    Args:
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in the dtype of the codes. None means 0. An int becomes a scalar in the
            dtype of the codes.
        inputs: for each array its codes, its scale and its zero point, in this order. The codes are int8 or uint8, of
            one dtype and of shapes that are equal except along `axis`. The scales and the zero points are scalars like
            those of y.
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
    checks.require(count > 0 and count % 3 == 0, _NAME, "inputs", expected, f"{count} inputs")
    converted: list[Any] = [*convert_numbers(_NAME, inputs[0], y_scale=y_scale, y_zero_point=y_zero_point)]
    for i, value in enumerate(inputs):
        name = f"inputs[{i}]"
        checks.check_readable(_NAME, name, value)  # the entry point has one name for all inputs
        if i % 3 == 1:
            value = convert_plain_scale(_NAME, name, value)
        elif i % 3 == 2:
            value = _operands.convert_zero_point_number(_NAME, name, value, inputs[0])
        converted.append(value)
    checks.check_integer(_NAME, "axis", axis)
    return _qlinear_concat(*converted, axis=axis)


@compile_entry_point(_NAME)
def _qlinear_concat(y_scale: jax.Array, y_zero_point: jax.Array | None, *inputs: Any, axis: int) -> jax.Array:
    dtype = check_eight_bits(_NAME, "inputs[0]", inputs[0])
    y_encoding = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)
    axis = checks.check_axis(_NAME, axis, inputs[0].ndim)
    parts = []
    for i in range(0, len(inputs), 3):
        x, scale, zero_point = inputs[i : i + 3]
        checks.check_same_dtype(_NAME, f"inputs[{i}]", x, dtype, "that of inputs[0]")
        _check_fit(f"inputs[{i}]", x, inputs[0], axis)
        names = (f"inputs[{i + 1}]", f"inputs[{i + 2}]")
        parts.append(requantize_codes(x, read_named(_NAME, names, scale, zero_point, dtype), y_encoding))
    return lax.concatenate(parts, axis)


def _check_fit(argument: str, x: jax.Array, first: jax.Array, axis: int) -> None:
    """Check that an array has the shape of the first one except along the axis."""
    lengths, others = ([n for i, n in enumerate(array.shape) if i != axis] for array in (first, x))
    expected = f"the shape {first.shape} of inputs[0], except along axis {axis}"
    checks.require(x.ndim == first.ndim and lengths == others, _NAME, argument, expected, f"shape {x.shape}")
