"""`fake_quantize_linear`: QuantizeLinear and DequantizeLinear in one call, with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point
from .._core.entry_point import (
    check_float_zero_point,
    compile_entry_point,
    convert_scale_number,
    convert_zero_point_number,
)
from .._core.granularity import check_matching, resolve_onnx
from .._onnx_ops import quantization
from .._onnx_ops.quantization import check_dynamic, compute_dynamic_range
from .rounding_vjp import LinearCodes, LinearOptions, RoundingConfig, quantize_and_dequantize

_NAME = "fake_quantize_linear"
_DYNAMIC = "dynamic_fake_quantize_linear"


def fake_quantize_linear(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis: int = 1,
    block_size: int = 0,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
    specified_outputs_name: Sequence[str] | None = None,
) -> jax.Array:
    """Apply ONNX QuantizeLinear and DequantizeLinear to x, with a straight-through gradient.

    y = (clip(round_half_even(x / scale) + zero_point, qmin, qmax) - zero_point) * scale

    The forward pass is `dequantize_linear(quantize_linear(x, ...), ..., output_dtype=x.dtype)` bit for bit. The
    backward pass treats rounding as the identity and differentiates the clipping, with a mask that is 1 where
    qmin <= round_half_even(x / scale) + zero_point <= qmax, both bounds included, and 0 elsewhere.

    Args:
        x: the values, float32, float16 or bfloat16, of any shape. A Python number becomes float32.
        scale: the value per step, float32, float16 or bfloat16; the division is done in this dtype. A scalar or one
            element is per tensor; a 1-D array as long as x's `axis` is per axis; with `block_size`, the shape is x's
            with ceil(length / block_size) in place of the axis. A Python number takes x's dtype.
        zero_point: the code of 0.0, of scale's shape: an integer array of the dtype `dtype`, or a float32 array that is
            learned, which the forward pass rounds half to even. None means 0. If a float32 zero point does not round to
            a code of `dtype`, it is moved to the nearest code if it is traced (as in training), and raises an error if
            its value is known. An int becomes an array of `dtype`.
        dtype: Static. int2, uint2, int4, uint4, int8, uint8, int16, uint16, one of the four float8 dtypes or
            float4_e2m1fn. None takes zero_point's dtype, as in `quantize_linear`; without a zero_point, or with a
            float32 one, it takes uint8, which clips negative values to 0. With a float dtype, the zero point must be 0,
            values saturate, and the mask is 1 where x / scale rounds to a finite value.
        axis: Static. The axis that is kept; negative numbers count from the back. Ignored if the scale is per tensor.
        block_size: Static. The number of elements along `axis` that share a scale; the last block may be short. 0 means
            no blocks.
        training: Static. False stores nothing for the backward pass; differentiating the call then raises an error.
        lda_coeff: Static. The factor of the gradient of x: 0 stops the gradient, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as with `jax.named_scope`.
        specified_outputs_name: Static. A list with a name for the output in a model that `jaxquant.onnx.export` writes.
            None or an empty list leaves it to the exporter.

    Returns:
        The values that the codes represent, in the shape and dtype of x.

    Raises:
        TypeError: an argument has a wrong type or an unsupported dtype.
        ValueError: shapes, axis or block_size do not fit each other; a float dtype has a zero point other than 0; the
            call is differentiated with training=False; a known scale is 0, negative, NaN or infinite (the operator
            `quantize_linear` computes with all of them, as ONNX Runtime does); or a known float32 zero point does not
            round to a code of `dtype`. An array is known if it is not traced, has at most 65536 elements, and is in the
            memory of this host.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-1.75, 0.25, 0.3, 6.25, 100.0])
        >>> fake = lambda x, scale: jq.fake_quantize_linear(x, scale, 3, dtype=jnp.uint4)
        >>> fake(x, 0.5)
        Array([-1.5,  0. ,  0.5,  6. ,  6. ], dtype=float32)
        >>> jax.grad(lambda x: fake(x, 0.5).sum())(x)
        Array([0., 1., 1., 1., 0.], dtype=float32)
        >>> jax.grad(lambda scale: fake(x, scale).sum())(jnp.float32(0.5)).round(4)
        Array(8.4, dtype=float32)

    Source: Jacob et al., arXiv 1712.05877, section 3, for fake quantization; Jain et al., arXiv 1903.08066,
    section 3, for the gradient of a scale: the derivative with rounding as the identity; training, lda_coeff,
    name and specified_outputs_name from the node of Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangents, with u = x / scale, code = the integer, m = the mask (1 or 0), z = the zero point:
    Cotangent of x: lda_coeff * g * m. Of scale: the sum over its slice of g * ((code - z) - m * u). Of a float32
    zero_point: the sum over its slice of -g * (1 - m) * scale. An integer zero_point has none.
    """
    # Python numbers become arrays here, because a traced number can no longer be checked against x's dtype.
    if isinstance(scale, int | float):
        scale = convert_scale_number(_NAME, "scale", scale, x)
    if isinstance(zero_point, int | np.integer) and not checks.has_dtype(zero_point, dtypes.QUANTIZED):
        expected = jnp.uint8 if dtype is None else dtype
        zero_point = convert_zero_point_number(_NAME, "zero_point", zero_point, expected, scale)
    entry_point.check_positive_scale(_NAME, "scale", scale)
    if zero_point is not None:
        zero_point = entry_point.convert_number(zero_point)
        code_dtype = _derive_dtype(zero_point, dtype)
        if code_dtype in dtypes.INTEGERS:
            entry_point.check_rounded_zero_point(_NAME, "zero_point", zero_point, dtypes.read_bounds(code_dtype))
        # Only a known zero point can be checked here; a traced one of a float dtype is assumed to be 0.
        check_float_zero_point(_NAME, "zero_point", zero_point)
    return _fake_quantize_linear(
        entry_point.convert_number(x), scale, zero_point,
        dtype=dtype, axis=axis, block_size=block_size, training=training, lda_coeff=lda_coeff, name=name,
        specified_outputs_name=quantization.read_output_names(_NAME, specified_outputs_name, 1),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _fake_quantize_linear(
    x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *,
    dtype: DTypeLike | None, axis: int, block_size: int, training: bool, lda_coeff: float, name: str | None,
    specified_outputs_name: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "x", x, dtypes.FLOATS)
    checks.check_array(_NAME, "scale", scale, dtypes.FLOATS)
    code_dtype = _derive_dtype(zero_point, dtype)
    quantization.check_toolkit_attributes(_NAME, training, lda_coeff, name)
    granularity = resolve_onnx(_NAME, "scale", scale, x.shape, axis, block_size)
    if zero_point is not None:
        allowed = (code_dtype, dtypes.FLOAT32) if code_dtype in dtypes.INTEGERS else (code_dtype,)
        checks.check_array(_NAME, "zero_point", zero_point, allowed)
        check_matching(_NAME, "zero_point", zero_point, scale, "scale")
    # A float dtype saturates by itself: its codes have no integer bounds.
    bounds = dtypes.read_bounds(code_dtype) if code_dtype in dtypes.INTEGERS else (-np.inf, np.inf)
    options = LinearOptions(granularity, bool(training), float(lda_coeff), _NAME)
    with quantization.name_scope(name):
        config = RoundingConfig(LinearCodes(code_dtype, bounds), linear=options)
        y: Any = quantize_and_dequantize(config, x, scale, zero_point, None)
        return quantization.name_outputs((y,), specified_outputs_name)[0]


def _derive_dtype(zero_point: Any, dtype: DTypeLike | None) -> np.dtype:
    """Return the dtype of the codes: `dtype`, or as in `quantize_linear` the zero point's dtype, or uint8."""
    if dtype is not None:
        return checks.check_dtype(_NAME, "dtype", dtype, dtypes.QUANTIZED)
    point_dtype = getattr(zero_point, "dtype", None)
    return np.dtype(point_dtype) if point_dtype in dtypes.QUANTIZED else np.dtype(jnp.uint8)


# `dynamic_fake_quantize_linear`: DynamicQuantizeLinear and DequantizeLinear in one call, with a gradient.


def dynamic_fake_quantize_linear(
    x: ArrayLike,
    *,
    dtype: DTypeLike = jnp.uint8,
    axis: int | None = None,
    training: bool = True,
    lda_coeff: float = 1.0,
    name: str | None = None,
    specified_outputs_name: Sequence[str] | None = None,
) -> jax.Array:
    """Apply ONNX DynamicQuantizeLinear and DequantizeLinear to x, with a straight-through gradient.

    y = (q - y_zero_point) * y_scale, with (q, y_scale, y_zero_point) = dynamic_quantize_linear(x)

    The forward pass is `dequantize_linear(*dynamic_quantize_linear(x, ...), axis=axis)` bit for bit. The backward pass
    treats rounding as the identity, and the scale and the zero point as constants, although they are computed from x.
    To differentiate through the scale too, pass the y_scale of `dynamic_quantize_linear` to `fake_quantize_linear`.

    Args:
        x: the values, float32, of any shape. A Python number becomes float32.
        dtype: Static. uint8, or int8 for the codes [-127, 127].
        axis: Static. None computes one scale for all of x. An int is the axis that is kept: each index of it has its
            own scale and zero point. Negative numbers count from the back.
        training: Static. False stores nothing for the backward pass; differentiating the call then raises an error.
        lda_coeff: Static. The factor of the gradient of x: 0 stops the gradient, -1 reverses it.
        name: Static. A name for the operation in the lowered program, as with `jax.named_scope`.
        specified_outputs_name: Static. A list with a name for the output in a model that `jaxquant.onnx.export` writes.
            None or an empty list leaves it to the exporter.

    Returns:
        The values that the codes represent, float32, in the shape of x.

    Raises:
        TypeError: x is not float32, dtype is neither uint8 nor int8, or a static argument has a wrong type.
        ValueError: axis is out of range; or the call is differentiated with training=False.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-1.0, 0.5, 126.5, 254.0])
        >>> jq.dynamic_fake_quantize_linear(x)
        Array([ -1.,   0., 126., 254.], dtype=float32)
        >>> jax.grad(lambda x: jq.dynamic_fake_quantize_linear(x, lda_coeff=0.5).sum())(x)
        Array([0.5, 0.5, 0.5, 0.5], dtype=float32)

    Source: ONNX DynamicQuantizeLinear-11 and DequantizeLinear-10; training, lda_coeff, name and
    specified_outputs_name from the node of Graiphic's Deep Learning Toolkit for LabVIEW.

    Cotangent of x: lda_coeff * g * m, where m is 1 if x rounds to a code without clipping and 0 otherwise. An extreme
    of x can be clipped, because the zero point is rounded by up to half a step.
    """
    return _dynamic_fake_quantize_linear(
        entry_point.convert_number(x), dtype=dtype, axis=axis, training=training, lda_coeff=lda_coeff, name=name,
        specified_outputs_name=quantization.read_output_names(_DYNAMIC, specified_outputs_name, 1),
    )  # fmt: skip


@compile_entry_point(_DYNAMIC)
def _dynamic_fake_quantize_linear(
    x: jax.Array, *,
    dtype: DTypeLike, axis: int | None, training: bool, lda_coeff: float, name: str | None,
    specified_outputs_name: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    code_dtype, granularity = check_dynamic(_DYNAMIC, x, dtype, axis)
    quantization.check_toolkit_attributes(_DYNAMIC, training, lda_coeff, name)
    options = LinearOptions(granularity, bool(training), float(lda_coeff), _DYNAMIC)
    config = RoundingConfig(LinearCodes(code_dtype, dtypes.derive_narrow_bounds(code_dtype)), linear=options)
    with quantization.name_scope(name):
        # The gradient treats the scale and the zero point as constants.
        _, _, scale, zero_point = compute_dynamic_range(jax.lax.stop_gradient(x), granularity, code_dtype)
        y: Any = quantize_and_dequantize(config, x, scale, zero_point, None)
        return quantization.name_outputs((y,), specified_outputs_name)[0]
