"""ONNX DequantizeLinear, versions 10 to 28."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point
from .._core.granularity import check_matching, resolve_onnx
from .._core.known_values import check_float_zero_point
from .._core.number_arguments import convert_scale_number, fit_number
from .._kernels.affine import dequantize_affine

_NAME = "dequantize_linear"
_X = (*dtypes.QUANTIZED, dtypes.INT32)
_SCALE = (*dtypes.FLOATS, dtypes.E8M0)


def dequantize_linear(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Dequantize codes with their scale and zero point, as ONNX's DequantizeLinear does.

    y = (x - x_zero_point) * x_scale.

    The difference is exact; the product is computed in float32 and rounded to the output dtype once, as in ONNX Runtime
    and in ONNX's reference. If an addition follows, the product stays rounded: XLA cannot fuse the two into one
    operation. An int32 x is rounded to float32 first, and its difference wraps around.

    Args:
        x: codes of any shape: int2, uint2, int4, uint4, int8, uint8, int16, uint16, int32, one of the four float8
            or float4_e2m1fn.
        x_scale: value per step, float32, float16, bfloat16, or float8_e8m0fnu together with an `output_dtype`. Per
            tensor: a scalar or one element. Per axis: 1-D, as long as x's `axis`. With `block_size`: x's shape with
            ceil(length / block_size) in place of the length of `axis`. A Python number becomes float32.
        x_zero_point: the code of 0.0, of x_scale's shape and x's dtype. None means 0. An int is converted to x's dtype
            and used for every scale. For a float x it must be 0: a concrete value is checked; a traced one is ignored.
        axis: Static. The axis that is kept; a negative one counts from the back. Ignored if the scale is per tensor.
        block_size: Static. How many elements along `axis` share a scale; the last block may be shorter. 0 means no
            blocks.
        output_dtype: Static. float32, float16 or bfloat16; by default x_scale's dtype.

    Returns:
        The values, of x's shape, in the output dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes, axis or block_size do not fit each other, or a float x has a zero point.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.dequantize_linear(jnp.array([0, 1, 255], jnp.uint8), 0.5, 1)
        Array([ -0.5,   0. , 127. ], dtype=float32)
        >>> scale = jnp.array([[0.5, 4.0]], jnp.bfloat16)
        >>> jq.dequantize_linear(jnp.array([[-8, 7, 7]], jnp.int4), scale, block_size=2)
        Array([[-4, 3.5, 28]], dtype=bfloat16)

    Source: ONNX DequantizeLinear-10, -13, -19, -21, -23, -24, -25, -28.

    Cotangent of x_scale: g * (x - x_zero_point), summed over the elements that share the scale. Of a float x:
    g * x_scale. Integers have none.
    """
    if isinstance(x_scale, int | float):
        x_scale = convert_scale_number(_NAME, "x_scale", x_scale, None)
    # A numpy scalar that has a dtype of codes keeps it, and must match x. Other integers take the dtype of x.
    if isinstance(x_zero_point, int | np.integer) and not checks.has_dtype(x_zero_point, _X):
        x_zero_point = _convert_zero_point_number(x_zero_point, x, x_scale)
    if x_zero_point is not None:
        # Before jit: only a concrete zero point can be compared with 0.
        check_float_zero_point(_NAME, "x_zero_point", x_zero_point)
    return _dequantize_linear(x, x_scale, x_zero_point, axis=axis, block_size=block_size, output_dtype=output_dtype)


@compile_entry_point(_NAME)
def _dequantize_linear(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, *,
    axis: int, block_size: int, output_dtype: Any,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "x", x, _X)
    checks.check_array(_NAME, "x_scale", x_scale, _SCALE)
    if output_dtype is None:
        expected = "an output_dtype with it, because float8_e8m0fnu has only powers of two"
        checks.require_type(x_scale.dtype != dtypes.E8M0, _NAME, "x_scale", expected, "float8_e8m0fnu alone")
        output_dtype = x_scale.dtype
    dtype = checks.check_dtype(_NAME, "output_dtype", output_dtype, dtypes.FLOATS)
    # The granularity describes scalar, 1-D and blocked scales in one form for the arithmetic below.
    granularity = resolve_onnx(_NAME, "x_scale", x_scale, x.shape, axis, block_size)
    if x_zero_point is not None:
        checks.check_same_dtype(_NAME, "x_zero_point", x_zero_point, x.dtype, "x's")
        check_matching(_NAME, "x_zero_point", x_zero_point, x_scale, "x_scale")
    return dequantize_affine(x, x_scale, x_zero_point, granularity, dtype)


def _convert_zero_point_number(value: Any, x: Any, scale: Any) -> Any:
    """Return an int as a zero point of x's dtype and scale's shape."""
    checks.check_integer(_NAME, "x_zero_point", value)
    dtype: Any = getattr(x, "dtype", None)
    if dtype not in _X:  # the check of x raises
        return value
    return np.full(np.shape(scale), fit_number(_NAME, "x_zero_point", int(value), dtype))
