"""ONNX QLinearMatMul, versions 10 and 21, also with the bias and the float32 result of ONNX Runtime's QGemm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, recording, small_floats
from .._core.entry_point import compile_entry_point
from .._core.known_values import check_float_zero_point
from .._core.number_arguments import convert_plain_scale
from .._kernels import accumulator, signed_codes
from ..integer.dot_general import MatrixShapes, match_matrices
from . import _rows_and_columns
from ._rows_and_columns import read_per_column, read_per_row

_NAME = "qlinear_matmul"
_DTYPES = (*signed_codes.EIGHT_BITS, *dtypes.FLOAT8)


def qlinear_matmul(
    a: ArrayLike,
    a_scale: ArrayLike,
    a_zero_point: ArrayLike,
    b: ArrayLike,
    b_scale: ArrayLike,
    b_zero_point: ArrayLike,
    y_scale: ArrayLike | None,
    y_zero_point: ArrayLike | None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two matrices of codes and requantize the product, as ONNX's QLinearMatMul does.

    y = saturate(round_half_even(float32(acc + bias) * (a_scale * b_scale / y_scale)) + y_zero_point),
    where acc is the result of `matmul_integer`. Without y_scale and y_zero_point, y is a float32 array:
    y = float32(acc + bias) * (a_scale * b_scale).

    The bias and the float32 result are those of ONNX Runtime's QGemm.

    The integers are ONNX Runtime's: the scales are multiplied, then divided, in float32, and the product with
    float32(acc) is rounded half to even before the zero point is added. onnx's reference adds the zero point first,
    which differs on ties if y_zero_point is odd. acc + bias wraps around as acc does in `matmul_integer`.

    float8 operands are multiplied and summed in float32. XLA chooses the order of that sum, so the result is exact only
    if every partial sum is.

    Args:
        a: codes, int8, uint8 or one of the four float8, of rank 1 or more, in the shapes of numpy.matmul.
        a_scale: value per step of a, float32, float16 or bfloat16: a scalar, or one for each row, as [M] or [..., M,
            1]. A Python number becomes float32.
        a_zero_point: the code of 0.0, in a's dtype: a scalar, or one for each row, as a_scale; 0 for float8. An int
            becomes a scalar in a's dtype.
        b: codes: int8 or uint8 if a is one of these, otherwise one of the four float8.
        b_scale: value per step of b, float32, float16 or bfloat16: a scalar, or one for each column, as [N] or [..., 1,
            N]. A Python number becomes float32.
        b_zero_point: the code of 0.0, in b's dtype: a scalar, or one for each column, as b_scale; 0 for float8. An int
            becomes a scalar in b's dtype.
        y_scale: value per step of y, float32, float16 or bfloat16: a scalar, or one for each row of a. A Python number
            becomes float32. None together with y_zero_point=None: the result is float32, and a and b are int8 or uint8.
        y_zero_point: the code of 0.0: a scalar, or one for each row of a. Its dtype is that of y; an int becomes a
            scalar in a's dtype.
        bias: int32, [N], in steps of a_scale * b_scale, if a and b are int8 or uint8. None means 0.

    Returns:
        The codes of the product, of numpy.matmul's shape, in y_zero_point's dtype; or the product in float32.

    Raises:
        TypeError: an argument has a dtype that the operator does not support.
        ValueError: shapes do not fit each other, or a float8 zero point is not 0.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> a = jnp.array([[1], [3], [5], [7]], jnp.uint8)
        >>> b = jnp.array([[1, 2]], jnp.uint8)
        >>> jq.qlinear_matmul(a, 0.5, 0, b, 1.0, 0, 1.0, 1)  # halves go to even, then 1 is added
        Array([[1, 2],
               [3, 4],
               [3, 6],
               [5, 8]], dtype=uint8)
        >>> jq.qlinear_matmul(a, 0.5, 0, b, 1.0, 0, None, None, bias=jnp.array([-1, 510]))
        Array([[  0., 256.],
               [  1., 258.],
               [  2., 260.],
               [  3., 262.]], dtype=float32)

    Source: ONNX QLinearMatMul-10, -21; where the texts leave the order of operations open, ONNX Runtime's CPU kernel.
        com.microsoft QGemm-1.

    Cotangent of a_scale and of b_scale, if the result is float32: g * (acc + bias) times the other scale, summed over
    the elements that share the scale. Integers have none.
    """
    scales = (("a_scale", a_scale), ("b_scale", b_scale), ("y_scale", y_scale))
    a_scale, b_scale, y_scale = (convert_plain_scale(_NAME, name, scale) for name, scale in scales)
    a_zero_point = signed_codes.convert_zero_point_number(_NAME, "a_zero_point", a_zero_point, a)
    b_zero_point = signed_codes.convert_zero_point_number(_NAME, "b_zero_point", b_zero_point, b)
    # The dtype of an int is that of a: ONNX Runtime has no kernel whose result has another dtype than a.
    y_zero_point = signed_codes.convert_zero_point_number(_NAME, "y_zero_point", y_zero_point, a)
    for argument, point in (("a", a_zero_point), ("b", b_zero_point), ("y", y_zero_point)):
        check_float_zero_point(_NAME, f"{argument}_zero_point", point)
    return _qlinear_matmul(
        a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, bias,
        centred=signed_codes.find_centred((a, b), (a_zero_point, b_zero_point)),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _qlinear_matmul(
    a: jax.Array, a_scale: jax.Array, a_zero_point: jax.Array, b: jax.Array, b_scale: jax.Array,
    b_zero_point: jax.Array, y_scale: jax.Array | None, y_zero_point: jax.Array | None, bias: jax.Array | None, *,
    centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    _check_dtypes(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point, bias)
    shapes = match_matrices(_NAME, a, b)
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, (shapes.b[-1],), "one for each column of b")
    a_scale = read_per_row(_NAME, "a_scale", a_scale, shapes)
    b_scale = read_per_column(_NAME, "b_scale", b_scale, shapes)
    a_steps = _rows_and_columns.read_row_steps(_NAME, a, a_zero_point, shapes, centred[0])
    b_steps = _rows_and_columns.read_column_steps(_NAME, b, b_zero_point, shapes, centred[1])
    if y_scale is None or y_zero_point is None:
        acc = _add_bias(_rows_and_columns.multiply_matrices(a, b, a_steps, b_steps, shapes), bias)
        factors = (s.astype(jnp.float32) for s in (a_scale, b_scale))
        return accumulator.scale_by_both(acc, *factors).reshape(shapes.out)
    # Scales of rows and scales of columns have different ranks if only one operand is a stack of matrices.
    y_scale = read_per_row(_NAME, "y_scale", y_scale, shapes)
    scale = accumulator.compute_multiplier(*(_align(s, shapes) for s in (a_scale, b_scale, y_scale)))
    y_steps = _align(read_per_row(_NAME, "y_zero_point", y_zero_point, shapes), shapes)
    # A float8 zero point is 0, so only integers need the steps.
    if a.dtype in dtypes.FLOAT8:
        return _multiply_float8(a, b, scale, y_zero_point.dtype, shapes)
    acc = _rows_and_columns.multiply_matrices(a, b, a_steps, b_steps, shapes)
    # An exporter needs the scales one by one, and the multiplier does not tell them.
    if recording.is_recording():
        bias = None if bias is None else accumulator.place_part(bias, acc.ndim, None)
        scales = (_align(s, shapes) for s in (a_scale, b_scale, y_scale))
        numbers = (*scales, y_steps.astype(jnp.int32), y_zero_point.dtype)
        return accumulator.requantize_product(acc, bias, *numbers).reshape(shapes.out)
    acc = _add_bias(acc, bias)
    scale, y_steps = (accumulator.spread_over_product(v, acc) for v in (scale, y_steps.astype(jnp.int32)))
    return accumulator.requantize_accumulator(acc, scale, y_steps, y_zero_point.dtype).reshape(shapes.out)


def _check_dtypes(
    a: Any, a_scale: Any, a_zero_point: Any, b: Any, b_scale: Any, b_zero_point: Any, y_scale: Any, y_zero_point: Any,
    bias: Any,
) -> None:  # fmt: skip
    """Check which arguments are None, and the dtypes of the others except the zero points of a and b."""
    # Unlike in MatMulInteger, the zero points are required inputs, so None must not be read as 0.
    for argument, point in (("a_zero_point", a_zero_point), ("b_zero_point", b_zero_point)):
        checks.require_type(point is not None, _NAME, argument, "an array", "None")
    checks.check_array(_NAME, "a", a, _DTYPES)
    # int8 and uint8 may be mixed, and so may the float8 dtypes, but not integers with floats.
    is_integer = a.dtype in signed_codes.EIGHT_BITS
    family = signed_codes.EIGHT_BITS if is_integer else dtypes.FLOAT8
    checks.check_array(_NAME, "b", b, family)
    is_float = y_scale is None and y_zero_point is None and is_integer
    if not is_float:
        checks.check_array(_NAME, "y_zero_point", y_zero_point, family)
    for argument, scale in (("a_scale", a_scale), ("b_scale", b_scale), ("y_scale", y_scale)):
        if not (is_float and scale is None and argument == "y_scale"):
            checks.check_array(_NAME, argument, scale, dtypes.FLOATS)
    if bias is not None:
        checks.require_type(is_integer, _NAME, "bias", "None, because a is float8", checks.describe_value(bias))
        checks.check_same_dtype(_NAME, "bias", bias, dtypes.INT32, "steps of a_scale * b_scale")


def _add_bias(acc: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return the accumulator plus a bias for each column, modulo 2**32."""
    return acc if bias is None else acc + accumulator.spread_over_product(bias, acc)


def _align(value: jax.Array, shapes: MatrixShapes) -> jax.Array:
    """Return a scale or zero point of a's or b's rank with the product's rank."""
    return value.reshape((1,) * (len(shapes.product) - value.ndim) + value.shape)


def _multiply_float8(a: jax.Array, b: jax.Array, scale: jax.Array, dtype: np.dtype, shapes: MatrixShapes) -> jax.Array:
    """Return the codes of the product of two float8 operands, summed in float32."""
    lhs, rhs = (small_floats.decode_small_float(x).reshape(s) for x, s in ((a, shapes.a), (b, shapes.b)))
    # Without HIGHEST a GPU would round both operands to TF32.
    product: Any = jnp.matmul(lhs, rhs, precision=lax.Precision.HIGHEST)
    scaled = product * accumulator.spread_over_product(scale, product)
    return small_floats.encode_small_float(scaled, dtype, True).reshape(shapes.out)
