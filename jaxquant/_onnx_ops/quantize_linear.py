"""ONNX QuantizeLinear, versions 10 to 28."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point
from .._core.entry_point import compile_entry_point
from .._core.granularity import check_matching, resolve_onnx
from .._core.known_values import check_float_zero_point
from .._core.number_arguments import convert_scale_number, convert_zero_point_number
from .._kernels.affine import quantize_affine

_NAME = "quantize_linear"
_X = (*dtypes.FLOATS, dtypes.INT32)
_SCALE = (*dtypes.FLOATS, dtypes.INT32, dtypes.E8M0)


def quantize_linear(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    saturate: bool = True,
    output_dtype: DTypeLike | None = None,
    precision: DTypeLike | None = None,
) -> jax.Array:
    """Quantize an array with a given scale and zero point, as ONNX's QuantizeLinear does.

    y = saturate(round_half_even(x / y_scale) + y_zero_point).

    The integers are ONNX Runtime's: the quotient is a true division, ties round to even, and the zero point is added
    after rounding. Values out of the dtype's range, infinities included, saturate; NaN becomes the lowest code.
    Division by a scale of 0 gives infinity or NaN, which are then handled in the same way. `fake_quantize_linear`,
    which is not an operator of ONNX, instead raises an error for a scale that is known to be 0, negative or NaN.

    The result has no gradient: integers have none in JAX, and the float8 and float4 results of this operator have none
    either. Use `fake_quantize_linear` in training.

    Args:
        x: values, float32, float16, bfloat16 or int32, of any shape; a Python number becomes float32.
        y_scale: value per step, float32, float16, bfloat16, float8_e8m0fnu, or int32 for an int32 x. Per tensor: a
            scalar or one element. Per axis: 1-D, as long as x's `axis`. With `block_size`: x's shape with
            ceil(length / block_size) in place of the length of `axis`. A Python number takes x's dtype.
        y_zero_point: the code of 0.0, of y_scale's shape and the output's dtype. None means 0. An int is converted to
            `output_dtype` and used for every scale. For a float output it must be 0: a concrete value is checked; a
            traced one is ignored, as in ONNX Runtime.
        axis: Static. The axis that is kept; a negative one counts from the back. Ignored if the scale is per tensor.
        block_size: Static. How many elements along `axis` share a scale; the last block may be shorter. 0 means no
            blocks.
        saturate: Static. For float8 only: whether values out of range, infinities included, become the largest finite
            value (True) or whatever the dtype's own conversion gives (False).
        output_dtype: Static. int2, uint2, int4, uint4, int8, uint8, int16, uint16, one of the four float8 or
            float4_e2m1fn. By default y_zero_point's dtype, or uint8 without a zero point, which saturates negative
            values to 0.
        precision: Static. float32, float16 or bfloat16: the dtype of the division. By default y_scale's dtype, or
            float32 for a float8_e8m0fnu scale. ONNX Runtime always divides float16 in float32:
            `precision=jnp.float32` gives its integers.

    Returns:
        The codes, of x's shape, in the output dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes, axis or block_size do not fit each other, or a float output has a zero point.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-2.5, -0.5, 0.5, 1.5, 300.0])
        >>> jq.quantize_linear(x, 1.0, 1, output_dtype=jnp.uint8)
        Array([  0,   1,   1,   3, 255], dtype=uint8)
        >>> weights = jnp.array([[-1.27, 0.3], [0.635, 6.0]])  # symmetric int8, one scale per column
        >>> scale = jnp.abs(weights).max(axis=0) / 127
        >>> jq.quantize_linear(weights, scale, axis=1, output_dtype=jnp.int8)
        Array([[-127,    6],
               [  64,  127]], dtype=int8)

    Source: ONNX QuantizeLinear-10, -13, -19, -21, -23, -24, -25, -28; for NaN, which the text leaves open, ONNX
    Runtime's CPU kernel.
    """
    if isinstance(y_scale, int | float):
        y_scale = convert_scale_number(_NAME, "y_scale", y_scale, x)
    # A numpy scalar that has a dtype of codes keeps it, and determines that of the output.
    if isinstance(y_zero_point, int | np.integer) and not checks.has_dtype(y_zero_point, dtypes.QUANTIZED):
        dtype = jnp.uint8 if output_dtype is None else output_dtype
        y_zero_point = convert_zero_point_number(_NAME, "y_zero_point", y_zero_point, dtype, y_scale)
    if y_zero_point is not None:
        # Before jit: only a concrete zero point can be compared with 0.
        check_float_zero_point(_NAME, "y_zero_point", y_zero_point)
    return _quantize_linear(
        entry_point.convert_number(x), y_scale, y_zero_point,
        axis=axis, block_size=block_size, saturate=saturate, output_dtype=output_dtype, precision=precision,
    )  # fmt: skip


@compile_entry_point(_NAME)
def _quantize_linear(
    x: jax.Array, y_scale: jax.Array, y_zero_point: jax.Array | None, *,
    axis: int, block_size: int, saturate: bool, output_dtype: Any, precision: Any,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "x", x, _X)
    checks.check_array(_NAME, "y_scale", y_scale, _SCALE)
    checks.check_flag(_NAME, "saturate", saturate)
    dtype = _find_output_dtype(y_zero_point, output_dtype)
    carrier = _find_precision(x, y_scale, precision)
    # The granularity describes scalar, 1-D and blocked scales in one form for the arithmetic below.
    granularity = resolve_onnx(_NAME, "y_scale", y_scale, x.shape, axis, block_size)
    if y_zero_point is not None:
        check_matching(_NAME, "y_zero_point", y_zero_point, y_scale, "y_scale")
    # Without stop_gradient JAX would differentiate the conversion to a float8 or float4 result.
    x, y_scale = jax.lax.stop_gradient((x, y_scale))
    return quantize_affine(x, y_scale, y_zero_point, granularity, dtype, carrier, bool(saturate))


def _find_output_dtype(zero_point: jax.Array | None, output_dtype: Any) -> np.dtype:
    """Check output_dtype and the dtype of the zero point, and return that of the codes."""
    if zero_point is None:
        dtype = jnp.uint8 if output_dtype is None else output_dtype
        return checks.check_dtype(_NAME, "output_dtype", dtype, dtypes.QUANTIZED)
    checks.check_array(_NAME, "y_zero_point", zero_point, dtypes.QUANTIZED)
    if output_dtype is not None:
        dtype = checks.check_dtype(_NAME, "output_dtype", output_dtype, dtypes.QUANTIZED)
        checks.check_same_dtype(_NAME, "y_zero_point", zero_point, dtype, "output_dtype")
    return zero_point.dtype


def _find_precision(x: jax.Array, scale: jax.Array, precision: Any) -> np.dtype:
    """Check precision and return the dtype of the division."""
    if precision is not None:
        return checks.check_dtype(_NAME, "precision", precision, dtypes.FLOATS)
    if scale.dtype == dtypes.INT32:
        expected = "a float dtype, or precision=, because only an int32 x is divided in int32, the dtype of y_scale"
        checks.require_type(x.dtype == dtypes.INT32, _NAME, "y_scale", expected, f"int32 with x of {x.dtype}")
    # float8_e8m0fnu has only powers of two, which few quotients are.
    return dtypes.FLOAT32 if scale.dtype == dtypes.E8M0 else scale.dtype
