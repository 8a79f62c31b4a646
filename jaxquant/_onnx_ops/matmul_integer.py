"""ONNX MatMulInteger-10."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from .._core import checks
from .._core.entry_point import compile_entry_point
from .._kernels import signed_codes
from ..integer.dot_general import match_matrices
from . import _rows_and_columns

_NAME = "matmul_integer"


def matmul_integer(
    a: ArrayLike, b: ArrayLike, a_zero_point: ArrayLike | None = None, b_zero_point: ArrayLike | None = None
) -> jax.Array:
    """Multiply matrices of 8-bit codes in int32, as ONNX's MatMulInteger does.

    y = (a - a_zero_point) @ (b - b_zero_point).

    The result is exact modulo 2**32: an int32 that overflows wraps around, as the ONNX text permits. It cannot overflow
    while a has fewer than 2**31 / (255 * 255) = 33025 columns. Both operands are contracted as int8 and are never
    widened.

    Args:
        a: codes, int8 or uint8, of rank 1 or more, in the shapes of numpy.matmul.
        b: codes, int8 or uint8, not necessarily a's dtype.
        a_zero_point: the code of 0.0, in a's dtype: a scalar, or one for each row of a, as [M] or [..., M, 1]. None
            means 0. An int becomes a scalar in a's dtype.
        b_zero_point: the code of 0.0, in b's dtype: a scalar, or one for each column of b, as [N] or [..., 1, N]. None
            means 0. An int becomes a scalar in b's dtype.

    Returns:
        int32, of numpy.matmul's shape.

    Raises:
        TypeError: an operand is neither int8 nor uint8, or a zero point does not have its operand's dtype.
        ValueError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[11, 7, 255], [0, 128, 2]], jnp.uint8)
        >>> b = jnp.array([[1, -128], [2, 127], [3, 0]], jnp.int8)
        >>> jq.matmul_integer(a, b, 12, jnp.array([0, -1], jnp.int8))
        Array([[ 718, -270],
               [ 190, 16362]], dtype=int32)

    Source: ONNX MatMulInteger-10. ONNX Runtime accepts no zero point per row of a, and leaves y unset if a has no
        columns; this function follows the text, according to which that y is 0.
    """
    a_zero_point = signed_codes.convert_zero_point_number(_NAME, "a_zero_point", a_zero_point, a)
    b_zero_point = signed_codes.convert_zero_point_number(_NAME, "b_zero_point", b_zero_point, b)
    return _matmul_integer(
        a, b, a_zero_point, b_zero_point, centred=signed_codes.find_centred((a, b), (a_zero_point, b_zero_point))
    )


@compile_entry_point(_NAME)
def _matmul_integer(
    a: jax.Array, b: jax.Array, a_zero_point: jax.Array | None, b_zero_point: jax.Array | None, *,
    centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "a", a, signed_codes.EIGHT_BITS)
    checks.check_array(_NAME, "b", b, signed_codes.EIGHT_BITS)
    shapes = match_matrices(_NAME, a, b)
    a_steps = _rows_and_columns.read_row_steps(_NAME, a, a_zero_point, shapes, centred[0])
    b_steps = _rows_and_columns.read_column_steps(_NAME, b, b_zero_point, shapes, centred[1])
    return _rows_and_columns.multiply_matrices(a, b, a_steps, b_steps, shapes).reshape(shapes.out)
