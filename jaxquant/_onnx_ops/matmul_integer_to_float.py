"""ONNX Runtime's MatMulIntegerToFloat, also with a scale for each block of b's rows."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale
from ..integer import _matmul_shapes, _operands, _scaling
from . import _rows_and_columns
from ._scaled_product import multiply_scaled, read_scaled_columns

_NAME = "ops.matmul_integer_to_float"


def matmul_integer_to_float(
    a: ArrayLike,
    b: ArrayLike,
    a_scale: ArrayLike,
    b_scale: ArrayLike,
    a_zero_point: ArrayLike | None = None,
    b_zero_point: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """Multiply matrices of 8-bit codes and scale the product, as ONNX Runtime's MatMulIntegerToFloat does.

    y = float32(acc) * (a_scale * b_scale) + bias, where acc is the result of `matmul_integer`.

    The float32 operations are ONNX Runtime's, each rounded once: the scales are multiplied first, and the product is
    rounded before bias is added. acc wraps around as in `matmul_integer`.

    With a scale for each block of b's rows, y starts at 0 and adds, block by block in ascending order,
    float32(acc of the block) * (a_scale * b_scale[block]), each product and each sum rounded once.

    Args:
        a: codes, int8 or uint8, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8, not necessarily a's dtype.
        a_scale: value per step of a, float32: a scalar, or one for each row, as [M] or [..., M, 1]. A Python number
            becomes float32.
        b_scale: value per step of b, float32: a scalar; one for each column, as [N] or [..., 1, N]; or, if b has rank
            2, [blocks, N]: one for each column and each of `blocks` equal runs of rows. A Python number becomes
            float32.
        a_zero_point: the code of 0.0, in a's dtype, with a shape that a_scale may have. None means 0. An int becomes a
            scalar in a's dtype.
        b_zero_point: the code of 0.0, in b's dtype, with a shape that b_scale may have; [blocks, N] only if b_scale has
            it too. None means 0. An int becomes a scalar in b's dtype.
        bias: float32, [N]. None means 0.

    Returns:
        float32, of numpy.matmul's shape.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[0, 128, 255]], jnp.uint8)
        >>> b = jnp.array([[1, -128], [2, 127], [3, 1]], jnp.int8)
        >>> jq.ops.matmul_integer_to_float(a, b, 0.5, jnp.array([0.25, 2.0]), 128, bias=jnp.array([0.1, -1.0]))
        Array([[   31.725, 16510.   ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft MatMulIntegerToFloat-1; the blocks are an addition of this library.

    Cotangent of a_scale and of b_scale: g * acc times the other scale, summed over the elements that share the scale.
    Of bias: g summed over rows. Integers have none.
    """
    a_scale, b_scale = convert_plain_scale(_NAME, "a_scale", a_scale), convert_plain_scale(_NAME, "b_scale", b_scale)
    a_zero_point = _operands.convert_zero_point_number(_NAME, "a_zero_point", a_zero_point, a)
    b_zero_point = _operands.convert_zero_point_number(_NAME, "b_zero_point", b_zero_point, b)
    return _matmul_integer_to_float(
        a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias,
        centred=_operands.find_centred((a, b), (a_zero_point, b_zero_point)),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _matmul_integer_to_float(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, a_zero_point: jax.Array | None,
    b_zero_point: jax.Array | None, bias: jax.Array | None, *, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "a", a, _operands.EIGHT_BITS)
    checks.check_array(_NAME, "b", b, _operands.EIGHT_BITS)
    for argument, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        checks.check_array(_NAME, argument, scale, (dtypes.FLOAT32,))
    shapes = _matmul_shapes.find_shapes(_NAME, a, b)
    _rows_and_columns.check_bias(_NAME, bias, shapes)
    a_scale = _rows_and_columns.read_per_row(_NAME, "a_scale", a_scale, shapes)
    a_steps = _rows_and_columns.read_row_steps(_NAME, a, a_zero_point, shapes, centred[0])
    b_scale, b_steps = read_scaled_columns(_NAME, b, b_scale, b_zero_point, shapes, centred[1])
    y = multiply_scaled(a, b, a_steps, b_steps, a_scale, b_scale, shapes)
    return _scaling.add_bias(y, bias).reshape(shapes.out)
