"""What operators on codes need of scales so that they compute what DequantizeLinear, operator, QuantizeLinear do.

The scales are those that are constant in the graph. A pattern with a scale that is an input of the model is not fused,
because such a scale may be anything.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

# The dtypes of codes for which ONNX Runtime has integer kernels.
EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))


class Need(enum.Enum):
    """What an operator on codes needs of the scales of its operands."""

    SIGN = "positive"  # it compares codes, whose order is that of the values only with a positive scale
    CODES = "finite, not 0"  # codes go through, and quantizing their values has to give them back
    VALUES = "any"  # it computes with the values


# All operators that are fused. "DequantizeLinear" stands for a pair with an equal QuantizeLinear behind it.
NEEDS: dict[str, Need] = {
    **dict.fromkeys(("MaxPool", "Softmax"), Need.SIGN),
    **dict.fromkeys(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "DequantizeLinear"), Need.CODES),
    **dict.fromkeys(("Flatten", "Expand", "Gather", "Identity"), Need.CODES),
    **dict.fromkeys(("Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "Where"), Need.VALUES),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"), Need.VALUES),
}


def allows_scale(op: str, scale: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether an operator may run on codes of a dtype with a scale, or with several."""
    need = NEEDS[op]
    if need is Need.VALUES:
        return True
    values = np.abs(scale.astype(np.float64))
    # A zero point may be at either end, so that codes are this many steps away from it.
    steps = float(2 ** (8 * dtype.itemsize) - 1)
    largest = np.finfo(scale.dtype).max if scale.dtype.kind == "f" else np.finfo(np.float32).max
    gives_back = bool(np.all((values > 0) & (values * steps <= float(largest))))
    return gives_back and (need is Need.CODES or bool(np.all(scale > 0)))


def is_clip_redundant(bounds: tuple[float, float], scale: Any, point: np.ndarray) -> bool:
    """Return whether QuantizeLinear gives the same codes with a Clip before it and without.

    QuantizeLinear is monotone, so this is so if each bound has the code of what it cuts off.
    """
    low, high = (np.float32(bound) for bound in bounds)
    if not low <= high or not np.isfinite(scale) or scale == 0:
        return False
    ends = np.asarray([low, -np.inf, high, np.inf], np.float32)
    with np.errstate(all="ignore"):
        steps = np.rint(ends / np.float32(scale))
    info = np.iinfo(point.dtype)
    codes = np.clip(steps + np.float64(point), info.min, info.max)
    return bool(codes[0] == codes[1] and codes[2] == codes[3])


def drops_clip(op: str, bounds: tuple[float, float], scale: Any, point: np.ndarray) -> bool:
    """Return whether ONNX Runtime drops a Relu or Clip before QuantizeLinear, also where that changes codes.

    It never looks at the sign of the scale, and compares bounds with an absolute tolerance.
    """
    if point.dtype not in EIGHT_BITS:
        return False
    info = np.iinfo(point.dtype)
    if op == "Relu":
        return bool(point == info.min)
    least, most = (np.float32(scale) * np.float32(int(code) - int(point)) for code in (info.min, info.max))
    close = np.finfo(np.float32).eps
    return bool(np.float32(bounds[0]) - least <= close and most - np.float32(bounds[1]) <= close)
