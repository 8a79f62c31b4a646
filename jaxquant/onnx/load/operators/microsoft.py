"""ONNX Runtime's operators on codes, domain com.microsoft, by jaxquant's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from . import quantized
from .quantized import list_given, make_zero, read_scalar
from .registry import OPERATORS, register

_DOMAIN = "com.microsoft"
_register = functools.partial(register, domain=_DOMAIN)
_POOL_ATTRIBUTES = ("kernel_shape", "auto_pad", "ceil_mode", "channels_last", "count_include_pad", "pads", "strides")
# For each operator: the function, its attributes, and the inputs that are codes and not scales or zero points.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[int, ...]]] = {
    "QLinearAdd": (jq.qlinear_add, (), (0, 3)),
    "QLinearMul": (jq.qlinear_mul, (), (0, 3)),
    "QLinearAveragePool": (jq.qlinear_average_pool, _POOL_ATTRIBUTES, (0,)),
    "QLinearGlobalAveragePool": (jq.qlinear_global_average_pool, ("channels_last",), (0,)),
    "QLinearReduceMean": (jq.qlinear_reduce_mean, ("axes", "keepdims"), (0,)),
    "QLinearWhere": (jq.qlinear_where, (), (0, 1, 4)),
    "QLinearSigmoid": (jq.qlinear_sigmoid, (), (0,)),
    "QLinearLeakyRelu": (jq.qlinear_leaky_relu, ("alpha",), (0,)),
    "QLinearSoftmax": (jq.qlinear_softmax, ("axis", "opset"), (0,)),
}
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
for _name in ("QuantizeLinear", "DequantizeLinear"):
    OPERATORS[_DOMAIN, _name] = OPERATORS["", _name]
assert quantized  # its import fills the table


@_register("QLinearConcat", keeps=(0, 1))
def concatenate_codes(call: Any, scale: Any, zero_point: Any, *inputs: Any) -> Any:
    """ONNX Runtime's QLinearConcat."""
    parts = [x if i % 3 == 0 else read_scalar(x) for i, x in enumerate(inputs)]
    return jq.qlinear_concat(read_scalar(scale), read_scalar(zero_point), *parts, axis=call.get("axis"))


@_register("MatMulIntegerToFloat", keeps=(2, 3, 4, 5))
def multiply_codes_to_float(call: Any, a: Any, b: Any, *inputs: Any) -> Any:
    """ONNX Runtime's MatMulIntegerToFloat."""
    scales = [read_scalar(x) for x in inputs[:4]]
    return jq.matmul_integer_to_float(a, b, *scales, *inputs[4:])


@_register("DynamicQuantizeMatMul", keeps=(2, 3))
def quantize_and_multiply(call: Any, a: Any, b: Any, scale: Any, zero_point: Any = None, bias: Any = None) -> Any:
    """ONNX Runtime's DynamicQuantizeMatMul."""
    return jq.dynamic_quantize_matmul(a, b, read_scalar(scale), read_scalar(zero_point), bias)


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
    if y_scale is not None and y_point is None:
        y_point = make_zero(a.dtype)
    bias = None if c is None else jnp.broadcast_to(c.reshape(-1), (b.shape[-1],))
    return jq.qlinear_matmul(
        a, a_scale, a_point, b, read_scalar(b_scale), b_point, read_scalar(y_scale), read_scalar(y_point), bias
    )


@_register("MatMulNBits")
def multiply_packed(call: Any, a: Any, b: Any, scales: Any, *inputs: Any) -> Any:
    """ONNX Runtime's MatMulNBits, in floats at any accuracy_level."""
    zero_points, order, bias = [*inputs, *[None] * (3 - len(inputs))]
    if order is not None:
        raise ValueError("MatMulNBits with g_idx is not supported")
    attributes = {name: call.get(name) for name in ("K", "N", "block_size")}
    return jq.matmul_nbits(a, b, scales, zero_points, bias, bits=call.get("bits", 4), **attributes)
