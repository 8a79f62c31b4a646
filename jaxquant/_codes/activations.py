"""Activation functions of quantized arrays that change the scale: codes in, codes out."""

from __future__ import annotations

from typing import Any

import jax

from .._contractions.output import make_array
from .._onnx_ops.microsoft.qlinear_leaky_relu import qlinear_leaky_relu
from .._onnx_ops.microsoft.qlinear_sigmoid import qlinear_sigmoid
from .carrier import FakeQuantizedArray, Output, train_codes
from .pooling import read_operand


def leaky_relu(q: Any, slope: float, *, output: Output) -> Any:
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


def sigmoid(q: Any, *, output: Output) -> Any:
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
