"""ONNX nodes of conversions between dtypes, with JAX's results where the new dtype does not hold a number.

JAX saturates floats that an integer dtype does not hold, and NaN becomes 0. ONNX leaves both open: ONNX Runtime's Cast
keeps the low bits on x86, and saturates on other processors. Of integers, JAX keeps the low bits, as Cast does, but the
graph holds codes of 2 and 4 bits in 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._core import dtypes
from . import values
from .elementwise import apply_operator, cast_value, choose, make_scalar, write_operator
from .graph import Graph
from .ranges import find_range
from .registry import Call, writes, writes_mark
from .values import UnsupportedError, Value

# Primitives of integers whose results may need more bits than their operands; scatters are spelled "-" or "_".
_OVERFLOWING = (
    "add", "add_any", "sub", "mul", "div", "neg", "abs", "not", "pow", "integer_pow", "square", "shift_left",
    "cumsum", "reduce_sum", "reduce_prod", "reduce_window_sum", "dot_general", "conv_general_dilated",
    "scatter_add", "scatter_mul", "scatter_sub",
)  # fmt: skip


@writes("convert_element_type")
def write_cast(graph: Graph, call: Call) -> Value:
    """Write a conversion."""
    return convert(graph, call.inputs[0], call.parameters["new_dtype"])


@writes_mark("encode_small_float")
def write_small_float(graph: Graph, call: Call) -> Value:
    """Write a conversion of float32 to a float of 8 bits."""
    p = call.parameters
    dtype = np.dtype(p["dtype"])
    if dtype not in dtypes.FLOAT8 or graph.opset < 19:
        raise UnsupportedError(f"{dtype} needs a later opset")
    x, to = graph.store(p["value"]), values.find_element_type(dtype)
    return Value(p["value"].shape, dtype, graph.add("Cast", [x], to=to, saturate=int(p["saturate"])))


def convert(graph: Graph, x: Value, dtype: Any) -> Value:
    """Return a value in another dtype, with JAX's results for numbers that the dtype does not hold."""
    dtype = np.dtype(dtype)
    if dtype not in dtypes.INTEGERS and dtype.kind not in "iu":
        return cast_value(graph, x, dtype)
    if np.dtype(x.dtype) in dtypes.INTEGERS or np.dtype(x.dtype).kind in "iub":
        return wrap(graph, x, dtype)
    return _saturate(graph, x, dtype)


def keep_bits(graph: Graph, primitive: str, result: Value, dtype: Any) -> Value:
    """Return a result of a primitive with the bits that its dtype has: 8 hold it, also if it has 2 or 4."""
    is_narrow = np.dtype(dtype) in dtypes.INTEGERS and dtypes.count_bits(np.dtype(dtype)) < 8
    is_wrapped = is_narrow and primitive.replace("-", "_") in _OVERFLOWING
    return wrap(graph, result, dtype) if is_wrapped else result


def wrap(graph: Graph, x: Value, dtype: Any) -> Value:
    """Return integers in a dtype of codes, of which those of 2 and 4 bits keep only their low bits."""
    dtype = np.dtype(dtype)
    container = values.find_container(dtype)
    if x.is_known:
        return values.make_known(np.asarray(x.array).astype(dtype).astype(container), x.hint)
    low, high = dtypes.find_bounds(dtype)
    found = find_range(graph, x)
    if dtype == container or (low <= found.low and found.high <= high):
        return cast_value(graph, x, container)
    # Mod has the sign of its second operand. An overflow of the sum loses no low bit.
    x, offset = cast_value(graph, x, np.int32), make_scalar(low, np.int32)
    x = x if low == 0 else apply_operator(graph, "Sub", [x, offset])
    x = apply_operator(graph, "Mod", [x, make_scalar(high - low + 1, np.int32)])
    return cast_value(graph, x if low == 0 else apply_operator(graph, "Add", [x, offset]), container)


def _saturate(graph: Graph, x: Value, dtype: np.dtype) -> Value:
    """Return floats as the nearest integers towards 0 that a dtype holds."""
    low, high = dtypes.find_bounds(dtype)
    container = values.find_container(dtype)
    if x.is_known:
        array = np.asarray(x.array).astype(np.float64)
        # int of a Python float is exact, also at the bounds of 64 bits.
        codes = [0 if number != number else min(max(_truncate(number), low), high) for number in array.flat]
        return values.make_known(np.asarray(codes, container).reshape(array.shape), x.hint)
    found = find_range(graph, x)
    fits = found.low > low - 1 and found.high < high + 1
    if fits and found.is_number:
        return cast_value(graph, x, container)
    x = x if x.dtype == np.float64 else cast_value(graph, x, np.float32)
    if not found.is_number:
        x = choose(graph, write_operator(graph, "IsNaN", [x], np.bool_), make_scalar(0, x.dtype), x)
    return cast_value(graph, x, container) if fits else _clip(graph, x, container, (low, high))


def _truncate(number: float) -> int:
    # No dtype holds an infinity; every bound is nearer to 0 than this.
    return int(min(max(number, -(2.0**70)), 2.0**70))


def _clip(graph: Graph, x: Value, dtype: np.dtype, bounds: tuple[int, int]) -> Value:
    """Return floats that are numbers as integers within bounds."""
    low, high = (make_scalar(bound, x.dtype) for bound in bounds)
    is_held = int(high.array) == bounds[1]
    # A float dtype may lack the largest integer: the float next to it is a power of two, which is one too many.
    most = high if is_held else make_scalar(np.nextafter(high.array, low.array), x.dtype)
    inside = cast_value(graph, write_operator(graph, "Clip", [x, low, most], x.dtype), dtype)
    if is_held:
        return inside
    is_above = write_operator(graph, "GreaterOrEqual", [x, high], np.bool_)
    return choose(graph, is_above, make_scalar(bounds[1], dtype), inside)
