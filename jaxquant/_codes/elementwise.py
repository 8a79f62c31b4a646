"""Element-wise operations on quantized arrays: codes in, codes out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._contractions.output import make_array, read_affine, read_output
from .._core import checks, dtypes
from .._core.entry_point import read_elements
from .._core.granularity import Aligned
from .._onnx_ops.activations import qlinear_leaky_relu, qlinear_sigmoid
from .._onnx_ops.arithmetic import qlinear_add, qlinear_mul
from .fake_codes import Codes, FakeQuantizedArray, Output, has_fake, train_codes
from .pooling import read_operand


def add(a: Codes, b: Codes, *, output: Output) -> Any:
    """Add two quantized arrays, as ONNX Runtime's QLinearAdd does.

    The codes are what `qlinear_add` returns: the sum of the two values, rounded once to a code of `output`.

    Args:
        a: codes of int8 or uint8 with one scale and one zero point.
        b: the same, of the same dtype, and of a shape that broadcasts against a's.
        output: how the result is quantized: a `Quantizer` with a scale and the dtype of a; or a QuantizedArray, for
            its scale and zero point.

    Returns:
        A QuantizedArray with the scale and the zero point of `output`.

    Raises:
        TypeError: an operand is not a QuantizedArray, or a dtype differs from a's.
        ValueError: an operand has several scales, shapes do not fit each other, or `output` has no scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.uint8)
        >>> a = jq.quantize(jnp.array([0.0, 0.5, 1.5, 127.5]), spec)  # scale 0.5
        >>> y = jq.codes.add(a, a[1], output=jq.Quantizer(spec, 1.0, 1))
        >>> y.codes, y.dequantize()  # 0.5 and 2.0, to which 1 is added before the sum is rounded half to even
        (Array([  2,   2,   3, 129], dtype=uint8), Array([  1.,   1.,   2., 128.], dtype=float32))

    Source: ONNX Runtime's com.microsoft QLinearAdd-1.
    """
    return _combine("codes.add", a, b, output)


def multiply(a: Codes, b: Codes, *, output: Output) -> Any:
    """Multiply two quantized arrays element by element, as ONNX Runtime's QLinearMul does.

    The codes are what `qlinear_mul` returns.

    Args:
        a: codes of int8 or uint8 with one scale and one zero point.
        b: the same, of the same dtype, and of a shape that broadcasts against a's.
        output: how the result is quantized: a `Quantizer` with a scale and the dtype of a; or a QuantizedArray, for
            its scale and zero point.

    Returns:
        A QuantizedArray with the scale and the zero point of `output`.

    Raises:
        TypeError: an operand is not a QuantizedArray, or a dtype differs from a's.
        ValueError: an operand has several scales, shapes do not fit each other, or `output` has no scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.uint8)
        >>> a = jq.quantize(jnp.array([0.0, 0.5, 1.5, 127.5]), spec)  # scale 0.5
        >>> jq.codes.multiply(a, a, output=jq.Quantizer(spec, 0.5, 0)).dequantize()  # 0.25 is half a step
        Array([  0. ,   0. ,   2. , 127.5], dtype=float32)

    Source: ONNX Runtime's com.microsoft QLinearMul-1.
    """
    return _combine("codes.multiply", a, b, output)


_OPERATORS = {"codes.add": qlinear_add, "codes.multiply": qlinear_mul}
_FLOATS = {"codes.add": jnp.add, "codes.multiply": jnp.multiply}


def _combine(function: str, a: Codes, b: Codes, output: Output) -> Any:
    """Check the arguments of an operation on two arrays, and return its result."""
    if has_fake(a, b):
        return train_codes(functools.partial(_combine, function), _FLOATS[function], (a, b), output)
    a, b = (quantized_array.check_lazy(function, name, q) for name, q in (("a", a), ("b", b)))
    left, right = (read_affine(function, name, q) for name, q in (("a", a), ("b", b)))
    result = read_output(function, output)
    for argument, affine in (("b", right), ("output", result)):
        expected = f"codes of {left.dtype}, as a has"
        checks.require_type(affine.dtype == left.dtype, function, argument, expected, affine.dtype)
    try:
        jnp.broadcast_shapes(a.shape, b.shape)  # a dimension may be symbolic
    except ValueError:
        checks.refuse(function, "a, b", "shapes that broadcast", f"{a.shape} and {b.shape}")
    codes = _OPERATORS[function](
        a.codes, left.scale, left.zero_point, b.codes, right.scale, right.zero_point, result.scale, result.zero_point
    )
    return make_array(codes, result, dtypes.choose_wider(a.dtype, b.dtype))


# An element alone says whether it is negative, wherever it stands.
_RELU_FORMS = ("nested", "signed_scale", "block_sizes", "permutation")


def relu(q: Codes) -> Any:
    """Replace negative values by 0, which changes codes below the zero point to the zero point.

    Where a scale is negative, these are the codes above the zero point. Where it is positive, no code changes if the
    zero point is the lowest code, as in an output with a range from 0. Without signed scales q is then returned as it
    is, if that is known when the function is called or traced.

    Args:
        q: integer codes, with any scale, which may be signed or quantized itself.

    Returns:
        A QuantizedArray with the scale and the zero point of q.

    Raises:
        TypeError: q is not a QuantizedArray of integers.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([-1.0, 0.5, 1.55]), jq.QuantSpec(jnp.uint8))  # scale 0.01, zero point 100
        >>> jq.codes.relu(q).codes
        Array([100, 150, 255], dtype=uint8)

    Source: `jax.nn.relu`.
    """
    if isinstance(q, FakeQuantizedArray):
        return q.replace_values(jax.nn.relu(q.values))
    q = quantized_array.check_lazy("codes.relu", "q", q, supports=_RELU_FORMS)
    is_integer = q.codebook is None and q.codes.dtype in dtypes.INTEGERS
    expected = "codes of an integer dtype, or q.dequantize()"
    checks.require_type(is_integer, "codes.relu", "q", expected, q.codebook or q.codes.dtype)
    lowest = dtypes.read_bounds(q.codes.dtype)[0]
    known = np.zeros(()) if q.zero_point is None else read_elements(q.zero_point)
    if not q.signed_scale and known is not None and (known == lowest).all():
        return q
    return _clip_codes(q)


@functools.partial(jax.jit, inline=True)
def _clip_codes(q: QuantizedArray) -> QuantizedArray:
    """Return the array with the zero point in place of codes below it, or above it where the scale is negative."""
    codes, aligned = q.codes, Aligned(q.block_size)
    zero_point = jnp.zeros_like(codes) if q.zero_point is None else aligned.expand(q.zero_point, codes)
    clipped = jnp.maximum(codes, zero_point)
    if q.signed_scale:
        scale = quantized_array.read_entries(q.scale)
        clipped = jnp.where(aligned.expand(scale < 0, codes), jnp.minimum(codes, zero_point), clipped)
    return q.replace(codes=clipped)


# Activation functions of quantized arrays that change the scale: codes in, codes out.


def leaky_relu(q: Codes, slope: float, *, output: Output) -> Any:
    """Multiply negative values by a number, as ONNX Runtime's QLinearLeakyRelu does.

    Args:
        q: codes of int8 or uint8 with one scale and one zero point.
        slope: Static. The number.
        output: how the result is quantized.
    """
    if isinstance(q, FakeQuantizedArray):
        return train_codes(
            lambda q, y: leaky_relu(q, slope, output=y), lambda x: jax.nn.leaky_relu(x, slope), (q,), output
        )
    q, affine, result = read_operand("codes.leaky_relu", q, output)
    codes = qlinear_leaky_relu(
        q.codes, affine.scale, affine.zero_point, result.scale, result.zero_point, alpha=slope
    )  # fmt: skip
    return make_array(codes, result, q.dtype)


def sigmoid(q: Codes, *, output: Output) -> Any:
    """Apply the logistic function, as ONNX Runtime's QLinearSigmoid does.

    Args:
        q: codes of int8 or uint8 with one scale and one zero point.
        output: how the result is quantized.
    """
    if isinstance(q, FakeQuantizedArray):
        return train_codes(lambda q, y: sigmoid(q, output=y), jax.nn.sigmoid, (q,), output)
    q, affine, result = read_operand("codes.sigmoid", q, output)
    codes = qlinear_sigmoid(q.codes, affine.scale, affine.zero_point, result.scale, result.zero_point)
    return make_array(codes, result, q.dtype)
