"""Operators on each element: arithmetic, comparisons, logic, bits, casts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.typing import DTypeLike

from ...._core import dtypes
from ...._kernels import barriers
from ...model_file import read_onnx_dtype
from .. import float_kernels
from ..graph import ROUNDED_ONCE, register
from ..interpret import Call
from ..values import Tensor, broadcast_shapes, broadcast_to, canonicalize_dtype, convert_to_jax, namespace, wrap_result

# Functions that numpy and jax.numpy have under one name.
_UNARY = {
    **{name: name.lower() for name in ("Abs", "Ceil", "Sign", "Log", "Tan")},
    **{name: name.lower() for name in ("Sinh", "Cosh", "IsNaN")},
    "Neg": "negative",
    "Asin": "arcsin",
    "Acos": "arccos",
    "Atan": "arctan",
    "Asinh": "arcsinh",
    "Acosh": "arccosh",
    "Atanh": "arctanh",
    "Floor": "floor",
    "Not": "logical_not",
    "BitwiseNot": "invert",
    "Round": "rint",
}
_BINARY = {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "equal",
    "Less": "less",
    "Greater": "greater",
    "LessOrEqual": "less_equal",
    "GreaterOrEqual": "greater_equal",
}
_VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add"}
# Of symbolic lengths, which may be in an unknown order.
_LENGTHS = {"maximum": core.max_dim, "minimum": core.min_dim}
_NUMPY_KINDS = "biuf"


def broadcast(call: Call, *values: Any) -> list[Any]:
    """Return arrays broadcast against each other by numpy's rules, after a check of the memory that they take."""
    shape = broadcast_shapes(*(value.shape for value in values))
    call.reserve(shape, values[0].dtype)
    return [value if value.shape == shape else broadcast_to(value, shape) for value in values]


def _register_named() -> None:
    for name, function in _UNARY.items():
        register(name, folds=True)(functools.partial(_apply_unary, function))
    for name, function in _BINARY.items():
        register(name, folds=True)(functools.partial(_apply_binary, function))
    for name, function in _VARIADIC.items():
        register(name, folds=True)(functools.partial(_apply_variadic, function))


def _apply_unary(function: str, call: Any, x: Any) -> Any:
    y = wrap_result(getattr(namespace(x), function)(x))
    return y if y.dtype == x.dtype or function == "isnan" else y.astype(x.dtype)


def _apply_binary(function: str, call: Any, a: Any, b: Any) -> Any:
    return getattr(namespace(a, b), function)(*broadcast(call, a, b))


def _apply_variadic(function: str, call: Any, *values: Any) -> Any:
    if (
        function in _LENGTHS
        and all(isinstance(x, np.ndarray) for x in values)
        and any(x.dtype == object for x in values)
    ):
        return functools.reduce(np.frompyfunc(_LENGTHS[function], 2, 1), broadcast(call, *values))
    return functools.reduce(getattr(namespace(*values), function), broadcast(call, *values))


_register_named()


@register("RoundedMul", domain="jaxquant", folds=True)
def multiply_rounded(call: Call, a: Tensor, b: Tensor, most: int = barriers.MOST_SPLIT) -> Any:
    """Multiply, and round the product before a sum that follows: XLA would contract the two into one operation.

    `most` is as in `barriers.split_small_fusion`.
    """
    xp = namespace(a, b)
    product = xp.multiply(*broadcast(call, a, b))
    return barriers.round_result(product, most) if xp is jnp and product.dtype == np.float32 else product


@register("Sqrt", folds=True)
def compute_root(call: Call, x: Tensor) -> Any:
    """ONNX Sqrt, rounded: XLA would replace a division by a root by a product with an approximate inverse root."""
    y = wrap_result(namespace(x).sqrt(x)).astype(x.dtype)
    return barriers.round_result(y) if call.has_runtime_floats(y) else y


# Functions that ONNX Runtime approximates in another way than XLA.
_APPROXIMATED = {
    "Tanh": float_kernels.tanh,
    "Exp": float_kernels.exponentiate,
    "Sin": float_kernels.compute_sine,
    "Cos": float_kernels.compute_cosine,
}


@register(*_APPROXIMATED, folds=True)
def approximate(call: Call, x: Tensor) -> Any:
    """ONNX Tanh, Exp, Sin and Cos."""
    if call.has_runtime_floats(x):
        return _APPROXIMATED[call.node.op](x)
    return wrap_result(getattr(namespace(x), call.node.op.lower())(x)).astype(x.dtype)


@register("Mean", folds=True)
def average_inputs(call: Call, *values: Tensor) -> Any:
    """ONNX Mean: the average of all inputs."""
    return (_apply_variadic("add", call, *values) / len(values)).astype(values[0].dtype)


@register("Div", folds=True)
def divide(call: Call, a: Tensor, b: Tensor) -> Any:
    """ONNX Div: integers are divided towards zero."""
    a, b = broadcast(call, a, b)
    xp = namespace(a, b)
    if xp is np and object in (a.dtype, b.dtype):  # lengths, which are not negative
        return a // b
    is_exact = call.has_runtime_floats(jnp.asarray(a)) or call.get(ROUNDED_ONCE) if xp is jnp else False
    if is_exact and a.dtype == np.float32:
        return float_kernels.divide(jnp.asarray(a), jnp.asarray(b))
    if a.dtype.kind not in "iu":
        return xp.divide(a, b).astype(a.dtype)
    if xp is jnp:
        return lax.div(a, b)
    # The quotient that numpy rounds down is one too small where the signs differ and a remainder is left.
    quotient = np.floor_divide(a, np.where(b == 0, np.ones_like(b), b))
    return (quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))).astype(a.dtype)


@register("Mod", folds=True)
def compute_remainder(call: Call, a: Tensor, b: Tensor) -> Any:
    """ONNX Mod: the sign is the divisor's, or with fmod=1 the dividend's."""
    xp = namespace(a, b)
    return (xp.fmod if call.get("fmod", 0) else xp.mod)(*broadcast(call, a, b))


@register("Pow", folds=True)
def raise_to_power(call: Call, base: Tensor, exponent: Tensor) -> Any:
    """ONNX Pow: the result has the dtype of the base."""
    dtype = base.dtype
    base, exponent = broadcast(call, base, exponent)
    xp = namespace(base, exponent)
    # An exponent of 0.5 must not be cut off to 0.
    if dtype.kind in "iu" and exponent.dtype.kind not in "iu":
        # float32 holds no integers above 2**24, but a compiled program has no other float type.
        base = base.astype(np.float64 if xp is np else exponent.dtype)
    elif base.dtype != exponent.dtype:
        exponent = exponent.astype(base.dtype)
    if base.dtype.kind in "iu":
        # Neither numpy nor JAX computes negative powers of integers. They are fractions, without the part after the
        # point: 0, except for the powers of 1 and -1.
        is_negative, zero = exponent < 0, xp.zeros_like(exponent)
        exponent = xp.where(is_negative & (xp.abs(base) == 1), -exponent, exponent)
        power = xp.power(base, xp.maximum(exponent, zero))
        return xp.where(exponent < 0, xp.zeros_like(power), power).astype(dtype)
    return xp.power(base, exponent).astype(dtype)


@register("BitShift", folds=True)
def shift_bits(call: Call, x: Tensor, y: Tensor) -> Any:
    """ONNX BitShift."""
    x, y = broadcast(call, x, y)
    xp = namespace(x, y)
    return xp.left_shift(x, y) if call.get("direction") == "LEFT" else xp.right_shift(x, y)


@register("IsInf", folds=True)
def mark_infinities(call: Call, x: Tensor) -> Any:
    """ONNX IsInf."""
    xp = namespace(x)
    y = xp.isinf(x)
    if not call.get("detect_negative", 1):
        y = y & (x > 0)
    return y if call.get("detect_positive", 1) else y & (x < 0)


@register("Reciprocal", folds=True)
def invert_number(call: Call, x: Tensor) -> Any:
    """ONNX Reciprocal."""
    if call.has_runtime_floats(x):
        return float_kernels.divide(jnp.ones_like(x), x)
    return (np.ones((), x.dtype) / x).astype(x.dtype)


@register("Where", folds=True)
def choose(call: Call, condition: Tensor, x: Tensor, y: Tensor) -> Any:
    """ONNX Where."""
    return namespace(condition, x, y).where(*broadcast(call, condition, x, y))


@register("Clip", folds=True)
def clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Any:
    """ONNX Clip: the bounds are attributes before opset 11."""
    xp = namespace(x, low, high)
    if call.opset < 11:
        low, high = (None if call.get(n) is None else np.asarray(call.get(n), x.dtype) for n in ("min", "max"))
    y = x if low is None else xp.maximum(x, low.reshape(()))
    return y if high is None else xp.minimum(y, high.reshape(()))


@register("Cast", folds=True)
def cast(call: Call, x: Tensor) -> Any:
    """ONNX Cast."""
    return cast_to(x, read_onnx_dtype(call.get("to"), "Cast"), bool(call.get("saturate", 1)))


@register("CastLike", folds=True)
def cast_like(call: Call, x: Tensor, like: Tensor) -> Any:
    """ONNX CastLike."""
    return cast_to(x, like.dtype, bool(call.get("saturate", 1)))


@register("BitCast", folds=True)
def cast_bits(call: Call, x: Tensor) -> Any:
    """ONNX BitCast."""
    dtype = read_onnx_dtype(call.get("to"), "BitCast")
    if namespace(x) is np:
        return x.view(dtype)
    dtype = canonicalize_dtype(dtype)
    if np.bool_ in (x.dtype, dtype):
        return x.view(dtype) if x.dtype == dtype else (x != 0 if dtype == np.bool_ else x.astype(dtype))
    return lax.bitcast_convert_type(x, dtype)


def cast_to(x: Any, dtype: DTypeLike, saturate: bool = True) -> Any:
    """Return an array in another dtype, with ONNX's rules for floats of 8 bits and fewer."""
    dtype = np.dtype(dtype)
    if x.dtype == dtype or (x.dtype == object and dtype.kind in "iu"):  # symbolic lengths stay what they are
        return x
    if namespace(x) is np and all(d.isbuiltin == 1 and d.kind in _NUMPY_KINDS for d in (dtype, x.dtype)):
        return x != 0 if dtype == np.bool_ else x.astype(dtype)
    # numpy's conversions to small floats know nothing of ONNX's saturation.
    x, dtype = convert_to_jax(x), canonicalize_dtype(dtype)
    if x.dtype in (*dtypes.SMALL_FLOATS, dtypes.E8M0):
        x = x.astype(jnp.float32)
    if dtype in dtypes.SMALL_FLOATS:
        return dtypes.encode_small_float(x.astype(jnp.float32), dtype, saturate)
    if dtype == np.bool_:
        return x != 0
    if dtype in dtypes.INTEGERS and dtypes.count_bits(dtype) < 8:
        return x.astype(jnp.int32).astype(dtype)  # the low bits, as for the wider integers
    return x.astype(dtype)


@register("Identity", folds=True)
def pass_on(call: Call, x: Tensor) -> Any:
    """ONNX Identity."""
    return x


@register("Dropout", keeps=(1, 2))
def drop_out(call: Call, x: jax.Array, ratio: Tensor | None = None, training: Tensor | None = None) -> Any:
    """ONNX Dropout without training: the input, and a mask of True."""
    is_training = training is not None and bool(np.asarray(training).reshape(()))
    if is_training and (ratio is None or float(np.asarray(ratio).reshape(())) != 0):
        raise ValueError("Dropout in training mode is random, which is not supported")
    return (x, jnp.ones(x.shape, bool)) if call.has_second_output else x


@register("Erf")
def compute_error_function(call: Call, x: jax.Array) -> Any:
    """ONNX Erf."""
    # bfloat16 of ml_dtypes has the kind V.
    return jax.scipy.special.erf(x) if x.dtype.kind in "fV" else x
