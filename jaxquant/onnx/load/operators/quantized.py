"""ONNX's own operators on codes, by jaxquant's functions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike

from .... import integer
from ...._codes.bias import quantize_bias
from ...._core import recording
from ...._kernels import barriers, signed_codes
from ...._onnx_ops.convolutions import conv_integer, qlinear_conv
from ...._onnx_ops.matrix_products import matmul_integer, qlinear_matmul
from ...._onnx_ops.quantization import dequantize_linear, dynamic_quantize_linear, quantize_linear
from ...._training.fake_quantize_linear import fake_quantize_linear
from ...model_file import read_onnx_dtype
from ..graph import ROUNDED, register
from ..interpret import Call
from ..values import Tensor

_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def read_scalar(value: Any) -> Any:
    """Return an array of one element as a scalar, and anything else unchanged: ONNX allows both for a scale."""
    return value.reshape(()) if value is not None and value.size == 1 else value


def hide_point(zero_point: Tensor | None, dtype: DTypeLike) -> Tensor | None:
    """Return a zero point of weights hidden from the compiler, unless it needs no correction of the sums."""
    if not isinstance(zero_point, np.ndarray) or zero_point.size != 1 or recording.is_recording():
        return zero_point
    return zero_point if signed_codes.is_centred(zero_point, np.dtype(dtype)) else barriers.hide_number(zero_point)


def list_given(call: Call, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes that the node has, out of `names`."""
    return {name: call.get(name) for name in names if call.get(name) is not None}


def _read_dtype(call: Call, name: str) -> Any:
    number = call.get(name, 0)
    return read_onnx_dtype(number, name) if number else None


def _read_granularity(call: Call) -> dict[str, Any]:
    return {"axis": call.get("axis", 1), "block_size": call.get("block_size", 0)}


@register("QuantizeLinear", keeps=(1, 2))
def apply_quantize_linear(call: Call, x: jax.Array, scale: Tensor, zero_point: Tensor | None = None) -> Any:
    """ONNX QuantizeLinear."""
    precision = _read_dtype(call, "precision")
    # ONNX Runtime divides float16 in float32.
    precision = jnp.float32 if precision is None and x.dtype == jnp.float16 else precision
    scale, zero_point = read_scalar(scale), read_scalar(zero_point)
    return quantize_linear(
        x, scale, zero_point, output_dtype=_read_dtype(call, "output_dtype") if zero_point is None else None,
        saturate=bool(call.get("saturate", 1)), precision=precision, **_read_granularity(call),
    )  # fmt: skip


@register("DequantizeLinear", keeps=(1, 2))
def apply_dequantize_linear(call: Call, x: jax.Array, scale: Tensor, zero_point: Tensor | None = None) -> Any:
    """ONNX DequantizeLinear."""
    scale, zero_point = read_scalar(scale), read_scalar(zero_point)
    output = _read_dtype(call, "output_dtype")
    y = dequantize_linear(x, scale, zero_point, output_dtype=output, **_read_granularity(call))
    return barriers.round_result(y) if call.get(ROUNDED) and y.dtype == np.float32 else y


@register("DynamicQuantizeLinear")
def quantize_dynamically(call: Call, x: jax.Array) -> Any:
    """ONNX DynamicQuantizeLinear."""
    return tuple(dynamic_quantize_linear(x))


@register("MatMulInteger", keeps=(1, 2, 3))
def multiply_codes(
    call: Call, a: jax.Array, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Any:
    """ONNX MatMulInteger."""
    a_point, b_point = read_scalar(a_zero_point), read_scalar(b_zero_point)
    points = [point for point in (a_point, b_point) if point is not None]
    has_matrix = isinstance(b, np.ndarray) and b.ndim == 2 and a.ndim > 1 and a.shape[-1] == len(b)
    has_rows = has_matrix and not (isinstance(a.size, int) and a.size <= len(b))
    if has_rows and all(point.ndim == 0 for point in points) and not recording.is_analyzing():
        return multiply_known_weights(a, np.asarray(b), a_point, b_point)
    return matmul_integer(a, jnp.asarray(b), a_point, hide_point(b_point, b.dtype))


def multiply_known_weights(
    a: jax.Array, b: np.ndarray, a_zero_point: Tensor | None, b_zero_point: Tensor | None
) -> jax.Array:
    """Return the int32 product of codes [..., K] and known codes [K, N], with a zero point for each operand or None.

    XLA:CPU brings b into the form of its kernel in each call, which takes half as long if the codes of a column are
    neighbors in memory.
    """
    return integer.dot_general(
        a, np.ascontiguousarray(b.T), (((a.ndim - 1,), (1,)), ((), ())), lhs_zero_point=a_zero_point,
        rhs_zero_point=hide_point(b_zero_point, b.dtype),
    )  # fmt: skip


@register("ConvInteger", keeps=(2, 3))
def convolve_codes(
    call: Call, x: jax.Array, w: jax.Array, x_zero_point: Tensor | None = None, w_zero_point: Tensor | None = None
) -> Any:
    """ONNX ConvInteger."""
    points = read_scalar(x_zero_point), hide_point(read_scalar(w_zero_point), w.dtype)
    return conv_integer(x, w, *points, **list_given(call, _CONV_ATTRIBUTES))


@register("QLinearMatMul", keeps=(1, 2, 4, 5, 6, 7))
def multiply_and_requantize(call: Call, a: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX QLinearMatMul."""
    a_scale, a_point, b, *rest = inputs
    return qlinear_matmul(a, read_scalar(a_scale), read_scalar(a_point), b, *map(read_scalar, rest))


@register("QLinearConv", keeps=(1, 2, 4, 5, 6, 7))
def convolve_and_requantize(call: Call, x: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX QLinearConv."""
    x_scale, x_point, w, w_scale, w_point, y_scale, y_point, *bias = inputs
    scales = read_scalar(x_scale), read_scalar(x_point), w, read_scalar(w_scale), read_scalar(w_point)
    b = bias[0] if bias else None
    return qlinear_conv(x, *scales, read_scalar(y_scale), read_scalar(y_point), b, **list_given(call, _CONV_ATTRIBUTES))


@register("FakeQuantize", domain="jaxquant", keeps=(2,))
def fake_quantize(call: Call, x: jax.Array, scale: jax.Array, zero_point: Tensor | None = None) -> Any:
    """Quantize and dequantize with a straight-through gradient: the operator of trainable graphs.

    The gradient of the scale is divided by sqrt(n * qmax), where n is the number of elements that share a scale (Esser
    et al., LSQ, arXiv 1902.08153): it sums over them, and would be far larger than a weight's.
    """
    dtype = call.get("dtype")
    scale, zero_point = read_scalar(jnp.asarray(scale)), read_scalar(zero_point)
    most = float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)
    # A function with symbolic shapes is exported, and not differentiated.
    count = 1 if is_symbolic_dim(x.size) else max(x.size / scale.size, 1)
    scale = _scale_gradient(scale, (count * most) ** -0.5)
    return fake_quantize_linear(x, scale, zero_point, dtype=dtype, **_read_granularity(call))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    """Return x unchanged, with its gradient multiplied by a factor."""
    return x


@_scale_gradient.defjvp
def _scale_gradient_jvp(factor: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[0] * factor


@register("QuantizeBias", domain="jaxquant", keeps=(1, 2))
def quantize_float_bias(call: Call, bias: jax.Array, x_scale: Tensor, w_scale: Tensor) -> Any:
    """Quantize a float bias in steps of the accumulator, as ONNX Runtime does when it fuses a Conv or Gemm."""
    # The bias of a fused MatMul and Add may have leading dimensions of 1.
    return quantize_bias(bias.reshape(-1), read_scalar(x_scale), read_scalar(w_scale))


def make_zero(dtype: DTypeLike) -> np.ndarray:
    """Return a zero point of 0."""
    return np.zeros((), dtype)
