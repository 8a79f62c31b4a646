"""ONNX Runtime's operators on codes, domain com.microsoft, by jaxquant's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._kernels import affine, barriers
from ...._onnx_ops.activations import qlinear_leaky_relu, qlinear_sigmoid, qlinear_softmax
from ...._onnx_ops.arithmetic import qlinear_add, qlinear_mul
from ...._onnx_ops.gather_block_quantized import gather_block_quantized
from ...._onnx_ops.matmul_nbits import matmul_nbits
from ...._onnx_ops.matrix_products import dynamic_quantize_matmul, matmul_integer_to_float, qlinear_matmul
from ...._onnx_ops.pooling import qlinear_average_pool, qlinear_global_average_pool, qlinear_reduce_mean
from ...._onnx_ops.selection import qlinear_concat, qlinear_where
from ..registry import OPERATORS, register
from . import quantized
from .activations import apply_activation
from .neural import convolve, multiply_general
from .normalization import normalize_layer, normalize_mean_square
from .quantized import list_given, make_zero, read_scalar
from .windows import find_windows

_DOMAIN = "com.microsoft"
_register = functools.partial(register, domain=_DOMAIN)
_POOL_ATTRIBUTES = ("kernel_shape", "auto_pad", "ceil_mode", "channels_last", "count_include_pad", "pads", "strides")
# For each operator: the function, its attributes, and the inputs that are codes and not scales or zero points.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[int, ...]]] = {
    "QLinearAdd": (qlinear_add, (), (0, 3)),
    "QLinearMul": (qlinear_mul, (), (0, 3)),
    "QLinearGlobalAveragePool": (qlinear_global_average_pool, ("channels_last",), (0,)),
    "QLinearReduceMean": (qlinear_reduce_mean, ("axes", "keepdims"), (0,)),
    "QLinearWhere": (qlinear_where, (), (0, 1, 4)),
    "QLinearSigmoid": (qlinear_sigmoid, (), (0,)),
    "QLinearLeakyRelu": (qlinear_leaky_relu, ("alpha",), (0,)),
    "QLinearSoftmax": (qlinear_softmax, ("axis", "opset"), (0,)),
}
# The accuracy_level of MatMulNBits that rounds its float operand to int8.
_BYTES = 4
_FLAGS = ("ceil_mode", "channels_last", "count_include_pad", "keepdims")


def _register_functions() -> None:
    def bind(function: Callable[..., Any], names: tuple[str, ...], codes: tuple[int, ...]) -> Any:
        def apply(call: Any, *inputs: Any) -> Any:
            attributes = list_given(call, names)
            attributes = {n: bool(v) if n in _FLAGS else v for n, v in attributes.items()}
            values = [x if i in codes else read_scalar(x) for i, x in enumerate(inputs)]
            return function(*values, **attributes)

        return apply

    for name, (function, attributes, codes) in _FUNCTIONS.items():
        keeps = tuple(i for i in range(9) if i not in codes)
        _register(name, keeps=keeps)(bind(function, attributes, codes))


_register_functions()


@_register("QLinearAveragePool", keeps=(1, 2, 3, 4))
def average_windows(call: Any, x: Any, *inputs: Any) -> Any:
    """ONNX Runtime's QLinearAveragePool."""
    if not call.get("channels_last", 0):
        lengths = x.shape[2:]
        windows = find_windows(call, lengths)
        if windows.find_full_padding(lengths) != windows.padding:
            call.run.cut.add(call.node.label)
    attributes = {n: bool(v) if n in _FLAGS else v for n, v in list_given(call, _POOL_ATTRIBUTES).items()}
    return qlinear_average_pool(x, *map(read_scalar, inputs), **attributes)


for _name in ("QuantizeLinear", "DequantizeLinear"):
    OPERATORS[_DOMAIN, _name] = OPERATORS["", _name]
assert quantized  # its import fills the table


@_register("QLinearConcat", keeps=(0, 1))
def concatenate_codes(call: Any, scale: Any, zero_point: Any, *inputs: Any) -> Any:
    """ONNX Runtime's QLinearConcat."""
    parts = [x if i % 3 == 0 else read_scalar(x) for i, x in enumerate(inputs)]
    return qlinear_concat(read_scalar(scale), read_scalar(zero_point), *parts, axis=call.get("axis"))


@_register("MatMulIntegerToFloat", keeps=(2, 3, 4, 5))
def multiply_codes_to_float(call: Any, a: Any, b: Any, *inputs: Any) -> Any:
    """ONNX Runtime's MatMulIntegerToFloat."""
    scales = [read_scalar(x) for x in inputs[:4]]
    return matmul_integer_to_float(a, b, *scales, *inputs[4:])


@_register("DynamicQuantizeMatMul", keeps=(2, 3))
def quantize_and_multiply(call: Any, a: Any, b: Any, scale: Any, zero_point: Any = None, bias: Any = None) -> Any:
    """ONNX Runtime's DynamicQuantizeMatMul."""
    return dynamic_quantize_matmul(a, b, read_scalar(scale), read_scalar(zero_point), bias)


@_register("QGemm", keeps=(1, 2, 4, 5, 7, 8))
def multiply_general_codes(call: Any, a: Any, a_scale: Any, a_point: Any, b: Any, *inputs: Any) -> Any:
    """ONNX Runtime's QGemm; without y_scale the result is float32."""
    b_scale, b_point, c, y_scale, y_point = [*inputs, *[None] * (5 - len(inputs))]
    a = a.T if call.get("transA", 0) else a
    b = b.T if call.get("transB", 0) else b
    alpha = np.float32(call.get("alpha", 1.0))
    a_scale = read_scalar(a_scale)
    a_scale = a_scale if alpha == 1 else a_scale * alpha
    a_point, b_point = (make_zero(x.dtype) if p is None else read_scalar(p) for p, x in ((a_point, a), (b_point, b)))
    # The operator's zero points are optional; those of the function are not.
    if y_scale is not None and y_point is None:
        y_point = make_zero(a.dtype)
    bias = None if c is None else jnp.broadcast_to(c.reshape(-1), (b.shape[-1],))
    return qlinear_matmul(
        a, a_scale, a_point, b, read_scalar(b_scale), b_point, read_scalar(y_scale), read_scalar(y_point), bias
    )


@_register("MatMulNBits")
def multiply_packed(call: Any, a: Any, b: Any, scales: Any, *inputs: Any) -> Any:
    """ONNX Runtime's MatMulNBits; with accuracy_level=4 the floats are rounded to int8, as by its kernel for x86-64."""
    zero_points, order, bias = [*inputs, *[None] * (3 - len(inputs))]
    if order is not None:
        # ONNX Runtime calls this input deprecated.
        raise ValueError("MatMulNBits with g_idx is not supported")
    attributes = {name: call.get(name) for name in ("K", "N", "block_size")}
    is_float = zero_points is not None and zero_points.dtype != np.uint8
    if call.get("accuracy_level", 0) == _BYTES and a.dtype == np.float32 and not is_float:
        a = _round_to_bytes(a, call.get("block_size"))
    return matmul_nbits(a, b, scales, zero_points, bias, bits=call.get("bits", 4), **attributes)


@_register("GatherBlockQuantized")
def look_up_blocks(call: Any, data: Any, indices: Any, scales: Any, zero_points: Any = None) -> Any:
    """ONNX Runtime's GatherBlockQuantized."""
    attributes = list_given(call, ("bits", "block_size", "quantize_axis", "gather_axis"))
    return gather_block_quantized(data, indices, scales, zero_points, **attributes)


def _round_to_bytes(a: Any, size: int) -> Any:
    """Return rows of floats as multiples of 1/127 of the largest magnitude in each block."""
    count = -(-a.shape[-1] // size)
    widths = [(0, 0)] * (a.ndim - 1) + [(0, count * size - a.shape[-1])]
    blocks = jnp.pad(a, widths).reshape(*a.shape[:-1], count, size)
    most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    full = jnp.full_like(most, 127)
    # A block of zeros has no inverse, and stays zeros.
    inverse = jnp.where(most == 0, 0, affine.divide(full, jnp.where(most == 0, 1, most)))
    # A product with the rounded inverse, as in the kernel: a division rounds differently next to ties.
    steps = jnp.rint(barriers.round_result(blocks * inverse))
    rounded = barriers.round_result(steps * affine.divide(most, full))
    return rounded.reshape(*a.shape[:-1], count * size)[..., : a.shape[-1]]


@_register("FusedMatMul", "TransposeMatMul")
def multiply_transposed(call: Any, a: Any, b: Any) -> Any:
    """ONNX Runtime's FusedMatMul."""
    a = a.swapaxes(-1, -2) if call.get("transA", 0) else a
    b = b.swapaxes(-1, -2) if call.get("transB", 0) else b
    y = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return y if call.get("alpha", 1.0) == 1 else y * call.get("alpha")


def _activate(call: Any, y: Any) -> Any:
    """Apply the activation of a fused operator."""
    name, parameters = call.get("activation", ""), call.get("activation_params") or ()
    if not name:
        return y
    if name == "Clip":
        return jnp.clip(y, *parameters)
    if name == "Tanh":
        return jnp.tanh(y)
    return apply_activation(name, y, **dict(zip(("alpha", "beta"), parameters, strict=False)))


@_register("FusedConv")
def convolve_fused(call: Any, x: Any, w: Any, b: Any = None, z: Any = None) -> Any:
    """ONNX Runtime's FusedConv: a convolution, a sum, and an activation."""
    y = convolve(call, x, w, b)
    return _activate(call, y if z is None else y + z)


@_register("FusedGemm")
def multiply_fused(call: Any, a: Any, b: Any, c: Any = None) -> Any:
    """ONNX Runtime's FusedGemm."""
    y = multiply_general(call, a, b, c)
    parameters = {n: call.get(f"activation_{n}") for n in ("alpha", "beta", "gamma")}
    return apply_activation(call.get("activation"), y, **parameters) if call.get("activation") else y


@_register("Gelu", "BiasGelu")
def apply_exact_gelu(call: Any, x: Any, bias: Any = None) -> Any:
    """ONNX Runtime's Gelu and BiasGelu."""
    return jax.nn.gelu(x if bias is None else x + bias, approximate=False)


@_register("FastGelu")
def apply_fast_gelu(call: Any, x: Any, bias: Any = None) -> Any:
    """ONNX Runtime's FastGelu, by the hyperbolic tangent."""
    return jax.nn.gelu(x if bias is None else x + bias, approximate=True)


@_register("QuickGelu")
def apply_quick_gelu(call: Any, x: Any) -> Any:
    """ONNX Runtime's QuickGelu."""
    return x * jax.nn.sigmoid(call.get("alpha", 1.702) * x)


@_register("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def normalize_skip(call: Any, x: Any, skip: Any, gamma: Any, *inputs: Any) -> Any:
    """ONNX Runtime's SkipLayerNormalization: the normalized sum of two inputs and a bias, and the sum."""
    is_simple = "Simplified" in call.node.op
    # The simplified operator has no beta, and its bias is in that place.
    beta, bias = (None, *inputs, None)[:2] if is_simple else [*inputs, None, None][:2]
    total = x + skip if bias is None else x + skip + bias
    if is_simple:
        y, mean, inverse = normalize_mean_square(call, total, gamma), None, None
    else:
        y, mean, inverse = normalize_layer(call, total, gamma, beta)
    return y, mean, inverse, total


register("SimplifiedLayerNormalization")(normalize_mean_square)
_register("SimplifiedLayerNormalization")(normalize_mean_square)
