"""ONNX Runtime's operators on codes, domain com.microsoft, by jaxquant's functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .... import ops
from ...._kernels import affine, barriers
from ..graph import OPERATORS, register
from ..interpret import Call
from ..values import Tensor
from . import quantized
from .activations import apply_activation
from .neural import convolve, multiply_general
from .normalization import normalize_layer, normalize_mean_square
from .quantized import list_given, make_zero, read_scalar
from .windows import read_windows

_DOMAIN = "com.microsoft"
_register = functools.partial(register, domain=_DOMAIN)
# The accuracy_level of MatMulNBits that rounds its float operand to int8.
_BYTES = 4


def _register_function(name: str) -> Callable[..., Any]:
    """Register a function of `jaxquant.ops` under the name of its operator, and return what runs it.

    Its positional parameters are the inputs, its keyword-only ones the attributes.
    """
    function = getattr(ops, name)
    parameters = list(inspect.signature(function).parameters.values())
    attributes = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    inputs = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    affine = tuple(i for i, p in enumerate(inputs) if p.name.endswith(("_scale", "_zero_point")))
    flags = {p.name for p in attributes if isinstance(p.default, bool)}

    def apply(call: Call, *inputs: Tensor) -> Any:
        given = list_given(call, tuple(p.name for p in attributes))
        given = {n: bool(v) if n in flags else v for n, v in given.items()}
        return function(*(read_scalar(x) if i in affine else x for i, x in enumerate(inputs)), **given)

    _register("QLinear" + name.removeprefix("qlinear_").title().replace("_", ""), keeps=affine)(apply)
    return apply


# The others are ONNX's own, or written below.
_FUNCTIONS = {
    name: _register_function(name)
    for name in ops.__all__
    if name.startswith("qlinear_") and name not in ("qlinear_conv", "qlinear_matmul", "qlinear_concat")
}


@_register("QLinearAveragePool", keeps=(1, 2, 3, 4))
def average_windows(call: Call, x: jax.Array, *inputs: Tensor) -> Any:
    """ONNX Runtime's QLinearAveragePool."""
    if not call.get("channels_last", 0):
        lengths = x.shape[2:]
        windows = read_windows(call, lengths)
        if windows.compute_full_padding(lengths) != windows.padding:
            call.run.cut.add(call.node.label)
    return _FUNCTIONS["qlinear_average_pool"](call, x, *inputs)


for _name in ("QuantizeLinear", "DequantizeLinear"):
    OPERATORS[_DOMAIN, _name] = OPERATORS["", _name]
assert quantized  # its import fills the table


@_register("QLinearConcat", keeps=(0, 1))
def concatenate_codes(call: Call, scale: Tensor, zero_point: Tensor, *inputs: jax.Array) -> Any:
    """ONNX Runtime's QLinearConcat."""
    parts = [x if i % 3 == 0 else read_scalar(x) for i, x in enumerate(inputs)]
    return ops.qlinear_concat(read_scalar(scale), read_scalar(zero_point), *parts, axis=call.get("axis"))


@_register("MatMulIntegerToFloat", keeps=(2, 3, 4, 5))
def multiply_codes_to_float(call: Call, a: jax.Array, b: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX Runtime's MatMulIntegerToFloat."""
    scales = [read_scalar(x) for x in inputs[:4]]
    return ops.matmul_integer_to_float(a, b, *scales, *inputs[4:])


@_register("DynamicQuantizeMatMul", keeps=(2, 3))
def quantize_and_multiply(
    call: Call,
    a: jax.Array,
    b: jax.Array,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: jax.Array | None = None,
) -> Any:
    """ONNX Runtime's DynamicQuantizeMatMul."""
    return ops.dynamic_quantize_matmul(a, b, read_scalar(scale), read_scalar(zero_point), bias)


@_register("QGemm", keeps=(1, 2, 4, 5, 7, 8))
def multiply_general_codes(
    call: Call, a: jax.Array, a_scale: Tensor, a_point: Tensor, b: jax.Array, *inputs: jax.Array
) -> Any:
    """ONNX Runtime's QGemm; without y_scale the result is float32."""
    b_scale, b_point, c, y_scale, y_point = [*inputs, *[None] * (5 - len(inputs))]
    a = a.T if call.get("transA", 0) else a
    b = b.T if call.get("transB", 0) else b
    alpha = np.float32(call.get("alpha", 1.0))
    a_scale = read_scalar(a_scale)
    a_scale = a_scale if alpha == 1 else a_scale * alpha
    a_point, b_point = (make_zero(x.dtype) if p is None else read_scalar(p) for p, x in ((a_point, a), (b_point, b)))
    # The operator's zero points are optional; the function's are not.
    if y_scale is not None and y_point is None:
        y_point = make_zero(a.dtype)
    bias = None if c is None else jnp.broadcast_to(c.reshape(-1), (b.shape[-1],))
    return ops.qlinear_matmul(
        a, a_scale, a_point, b, read_scalar(b_scale), b_point, read_scalar(y_scale), read_scalar(y_point), bias
    )


@_register("MatMulNBits")
def multiply_packed(call: Call, a: jax.Array, b: jax.Array, scales: jax.Array, *inputs: jax.Array) -> Any:
    """ONNX Runtime's MatMulNBits; with accuracy_level=4 the floats are rounded to int8, as by its kernel for x86-64."""
    zero_points, order, bias = [*inputs, *[None] * (3 - len(inputs))]
    if order is not None:
        # ONNX Runtime calls this input deprecated.
        raise ValueError("MatMulNBits with g_idx is not supported")
    attributes = {name: call.get(name) for name in ("K", "N", "block_size")}
    is_float = zero_points is not None and zero_points.dtype != np.uint8
    if call.get("accuracy_level", 0) == _BYTES and a.dtype == np.float32 and not is_float:
        a = _round_to_bytes(a, call.get("block_size"))
    return ops.matmul_nbits(a, b, scales, zero_points, bias, bits=call.get("bits", 4), **attributes)


@_register("GatherBlockQuantized")
def look_up_blocks(
    call: Call, data: jax.Array, indices: jax.Array, scales: jax.Array, zero_points: jax.Array | None = None
) -> Any:
    """ONNX Runtime's GatherBlockQuantized."""
    attributes = list_given(call, ("bits", "block_size", "quantize_axis", "gather_axis"))
    return ops.gather_block_quantized(data, indices, scales, zero_points, **attributes)


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
def multiply_transposed(call: Call, a: jax.Array, b: jax.Array) -> Any:
    """ONNX Runtime's FusedMatMul."""
    a = a.swapaxes(-1, -2) if call.get("transA", 0) else a
    b = b.swapaxes(-1, -2) if call.get("transB", 0) else b
    y = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return y if call.get("alpha", 1.0) == 1 else y * call.get("alpha")


def _activate(call: Call, y: Any) -> Any:
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
def convolve_fused(
    call: Call, x: jax.Array, w: jax.Array, b: jax.Array | None = None, z: jax.Array | None = None
) -> Any:
    """ONNX Runtime's FusedConv: a convolution, a sum, and an activation."""
    y = convolve(call, x, w, b)
    return _activate(call, y if z is None else y + z)


@_register("FusedGemm")
def multiply_fused(call: Call, a: jax.Array, b: jax.Array, c: jax.Array | None = None) -> Any:
    """ONNX Runtime's FusedGemm."""
    y = multiply_general(call, a, b, c)
    parameters = {n: call.get(f"activation_{n}") for n in ("alpha", "beta", "gamma")}
    return apply_activation(call.get("activation"), y, **parameters) if call.get("activation") else y


@_register("Gelu", "BiasGelu")
def apply_exact_gelu(call: Call, x: jax.Array, bias: jax.Array | None = None) -> Any:
    """ONNX Runtime's Gelu and BiasGelu."""
    return jax.nn.gelu(x if bias is None else x + bias, approximate=False)


@_register("FastGelu")
def apply_fast_gelu(call: Call, x: jax.Array, bias: jax.Array | None = None) -> Any:
    """ONNX Runtime's FastGelu, by the hyperbolic tangent."""
    return jax.nn.gelu(x if bias is None else x + bias, approximate=True)


@_register("QuickGelu")
def apply_quick_gelu(call: Call, x: jax.Array) -> Any:
    """ONNX Runtime's QuickGelu."""
    return x * jax.nn.sigmoid(call.get("alpha", 1.702) * x)


@_register("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def normalize_skip(call: Call, x: jax.Array, skip: jax.Array, gamma: jax.Array, *inputs: jax.Array) -> Any:
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
