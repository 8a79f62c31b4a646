"""ONNX nodes of conversions between dtypes, with JAX's results where the new dtype does not hold a number.

JAX saturates floats that an integer dtype does not hold, and NaN becomes 0. ONNX leaves both open: ONNX Runtime's Cast
keeps the low bits on x86, and saturates on other processors. Of integers, JAX keeps the low bits, as Cast does, but the
graph holds codes of 2 and 4 bits in 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from onnx import NodeProto, helper

from ..._core import dtypes
from . import values
from .elementwise import apply_operator, cast_value, choose, make_scalar, write_operator
from .graph import ModelGraph, WriterCall, writes
from .values import UnsupportedError, Value

# Primitives of integers with results that may need more bits than the operands; scatters are spelled "-" or "_".
_OVERFLOWING = (
    "add", "add_any", "sub", "mul", "div", "neg", "abs", "not", "pow", "integer_pow", "square", "shift_left",
    "cumsum", "reduce_sum", "reduce_prod", "reduce_window_sum", "dot_general", "conv_general_dilated",
    "scatter_add", "scatter_mul", "scatter_sub",
)  # fmt: skip
# Nodes that are followed back from a tensor. Longer chains are taken for unknown numbers, which costs a few nodes.
_DEPTH = 12
_SAME = ("Identity", "Reshape", "Transpose", "Expand", "Slice", "Squeeze", "Unsqueeze", "Gather", "GatherElements")
_MONOTONE = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.rint}
_SELECTIONS = ("Clip", "Max", "Min", "Where", "Concat", "Neg", "Abs")
_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}


@writes("convert_element_type")
def write_cast(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a conversion."""
    (x,) = call.inputs
    old, new = np.dtype(call.parameters["input_dtypes"][0]), np.dtype(call.parameters["new_dtype"])
    if new != old and (new == dtypes.E8M0 or new in dtypes.FLOAT4):
        held = values.choose_container(new)
        raise UnsupportedError(f"{old} as {new}, which the model holds as {held}; use jq.quantize")
    # Known codes that get here are codes of weights, which the model keeps.
    x = graph.fill(x, x.shape) if x.is_known else x
    return convert(graph, x, call.parameters["new_dtype"])


@writes("bitcast_convert_type")
def write_bitcast(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a reinterpretation of integers of one width as signed or unsigned ones: Cast keeps their bits."""
    (x,), dtype = call.inputs, np.dtype(call.parameters["new_dtype"])
    old = np.dtype(call.parameters["input_dtypes"][0])
    is_integer = all(d.kind in "iu" or d in dtypes.INTEGERS for d in (old, dtype))
    if not is_integer or dtypes.count_bits(old) != dtypes.count_bits(dtype):
        raise UnsupportedError(f"the bits of {old} as {dtype}")
    x = graph.fill(x, x.shape) if x.is_known else x
    # Codes of 2 and 4 bits are held in 8 bits, and `wrap` keeps the low ones.
    return wrap(graph, x, dtype)


def convert(graph: ModelGraph, x: Value, dtype: DTypeLike) -> Value:
    """Return a value in another dtype, with JAX's results for numbers that the dtype does not hold."""
    dtype = np.dtype(dtype)
    if dtype not in dtypes.INTEGERS and dtype.kind not in "iu":
        return cast_value(graph, x, dtype)
    if np.dtype(x.dtype) in dtypes.INTEGERS or np.dtype(x.dtype).kind in "iub":
        return wrap(graph, x, dtype)
    return _saturate(graph, x, dtype)


def keep_bits(graph: ModelGraph, primitive: str, result: Value, dtype: DTypeLike) -> Value:
    """Return a result of a primitive with the bits that its dtype has: 8 hold it, also if it has 2 or 4."""
    is_narrow = np.dtype(dtype) in dtypes.INTEGERS and dtypes.count_bits(np.dtype(dtype)) < 8
    is_wrapped = is_narrow and primitive.replace("-", "_") in _OVERFLOWING
    return wrap(graph, result, dtype) if is_wrapped else result


def wrap(graph: ModelGraph, x: Value, dtype: DTypeLike) -> Value:
    """Return integers in a dtype of codes; codes of 2 and 4 bits keep only their low bits."""
    dtype = np.dtype(dtype)
    container = values.choose_container(dtype)
    if x.is_known:
        return values.make_known(np.asarray(x.array).astype(dtype).astype(container), x.hint)
    low, high = dtypes.read_bounds(dtype)
    found = derive_range(graph, x)
    if dtype == container or (low <= found.low and found.high <= high):
        return cast_value(graph, x, container)
    # Mod has the sign of its second operand. An overflow of the sum loses no low bit.
    x, offset = cast_value(graph, x, np.int32), make_scalar(low, np.int32)
    x = x if low == 0 else apply_operator(graph, "Sub", [x, offset])
    x = apply_operator(graph, "Mod", [x, make_scalar(high - low + 1, np.int32)])
    return cast_value(graph, x if low == 0 else apply_operator(graph, "Add", [x, offset]), container)


def _saturate(graph: ModelGraph, x: Value, dtype: np.dtype) -> Value:
    """Return floats as the nearest integers towards 0 that a dtype holds."""
    low, high = dtypes.read_bounds(dtype)
    container = values.choose_container(dtype)
    if x.is_known:
        array = np.asarray(x.array).astype(np.float64)
        # int of a Python float is exact, also at the bounds of 64 bits. No dtype has a bound as far from 0 as 2**70.
        finite = np.clip(np.where(np.isnan(array), 0, array), -(2.0**70), 2.0**70)
        codes = [min(max(int(number), low), high) for number in finite.flat]
        return values.make_known(np.asarray(codes, container).reshape(array.shape), x.hint)
    found = derive_range(graph, x)
    fits = found.low > low - 1 and found.high < high + 1
    if fits and found.is_number:
        return cast_value(graph, x, container)
    x = x if x.dtype == np.float64 else cast_value(graph, x, np.float32)
    if not found.is_number:
        x = choose(graph, write_operator(graph, "IsNaN", [x], np.bool_), make_scalar(0, x.dtype), x)
    return cast_value(graph, x, container) if fits else _clip(graph, x, container, (low, high))


def _clip(graph: ModelGraph, x: Value, dtype: np.dtype, bounds: tuple[int, int]) -> Value:
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


# What the graph tells of the numbers in a tensor: their least and largest value, and whether one may be NaN.


class NumberRange(NamedTuple):
    """The numbers that a tensor may hold.

    Attributes:
        low: the least, or -inf.
        high: the largest, or inf.
        is_number: whether no element is NaN.
    """

    low: float
    high: float
    is_number: bool


_ANY = NumberRange(-math.inf, math.inf, False)
_INT32 = NumberRange(-(2.0**31), 2.0**31 - 1, True)


def derive_range(graph: ModelGraph, x: Value) -> NumberRange:
    """Return bounds of the elements of a value."""
    if x.is_known:
        return _compute_array_range(np.asarray(x.array))
    found = _derive_tensor_range(graph, graph.store(x), _DEPTH)
    return _intersect(found, _derive_dtype_range(x.dtype))


def fits_sum(graph: ModelGraph, x: Value, lengths: Sequence[Any]) -> bool:
    """Return whether int32 holds each sum over dimensions of these lengths."""
    if not values.is_static(tuple(lengths)):
        return False
    found, count = derive_range(graph, x), math.prod(lengths)
    return count * found.low >= -(2**31) and count * found.high < 2**31


def _compute_array_range(array: np.ndarray) -> NumberRange:
    if not array.size:
        return NumberRange(0, 0, True)
    wide = array.astype(np.float64)
    has_nan = bool(np.isnan(wide).any())
    return _ANY if has_nan else NumberRange(float(wide.min()), float(wide.max()), True)


def _derive_dtype_range(dtype: DTypeLike) -> NumberRange:
    if np.dtype(dtype) == np.bool_:
        return NumberRange(0, 1, True)
    if np.dtype(dtype) in dtypes.INTEGERS or np.dtype(dtype).kind in "iu":
        low, high = dtypes.read_bounds(dtype)
        return NumberRange(float(low), float(high), True)
    return _ANY


def _intersect(x: NumberRange, y: NumberRange) -> NumberRange:
    return NumberRange(max(x.low, y.low), min(x.high, y.high), x.is_number or y.is_number)


def _derive_tensor_range(graph: ModelGraph, name: str, depth: int) -> NumberRange:
    if name in graph.arrays:
        return _compute_array_range(graph.arrays[name])
    dtype = graph.derive_dtype(name)
    known = _ANY if dtype is None else _derive_dtype_range(dtype)
    node = graph.look_up_node(name) if depth else None
    return known if node is None else _intersect(known, _derive_node_range(graph, node, depth - 1))


def _derive_node_range(graph: ModelGraph, node: NodeProto, depth: int) -> NumberRange:
    """Return the range of the first result of a node from the ranges of its operands."""
    if node.op_type == "Cast":
        to = helper.tensor_dtype_to_np_dtype(helper.get_node_attr_value(node, "to"))
        return _round_range(_derive_tensor_range(graph, node.input[0], depth), to)
    if node.op_type not in (*_SAME, *_MONOTONE, *_ARITHMETIC, *_SELECTIONS):
        return _ANY
    operands = [_derive_tensor_range(graph, name, depth) for name in node.input]
    if node.op_type == "Where" and _replaces_nan(graph, node, depth):
        operands[2] = operands[2]._replace(is_number=True)
    if node.op_type in _SAME:
        return operands[0]
    if node.op_type in _MONOTONE:
        function = _MONOTONE[node.op_type]
        return NumberRange(float(function(operands[0].low)), float(function(operands[0].high)), operands[0].is_number)
    if node.op_type in _ARITHMETIC:
        return _combine(node.op_type, operands)
    return _select_range(node.op_type, operands)


def _replaces_nan(graph: ModelGraph, node: NodeProto, depth: int) -> bool:
    """Return whether a Where chooses its last operand only if that is no NaN, which alone differs from itself."""
    condition = graph.look_up_node(node.input[0])
    if condition is None:
        return False
    if condition.op_type == "IsNaN":
        return _is_nan_only_with(graph, node.input[2], condition.input[0], depth)
    equal = graph.look_up_node(condition.input[0]) if condition.op_type == "Not" else None
    if equal is None or equal.op_type != "Equal" or equal.input[0] != equal.input[1]:
        return False
    return _is_nan_only_with(graph, node.input[2], equal.input[0], depth)


def _is_nan_only_with(graph: ModelGraph, name: str, source: str, depth: int) -> bool:
    """Return whether an element of a tensor is NaN only if the element of `source` that it is computed from is NaN."""
    if name == source:
        return True
    node = graph.look_up_node(name) if depth else None
    if node is None:
        return False
    if node.op_type in ("Round", "Floor", "Ceil", "Neg", "Abs"):
        return _is_nan_only_with(graph, node.input[0], source, depth - 1)
    if node.op_type not in ("Add", "Sub"):
        return False
    # A sum with a finite number is no NaN, whatever the other operand is.
    for x, other in (node.input, node.input[::-1]):
        bounds = _derive_tensor_range(graph, other, depth - 1)
        if bounds.is_number and math.isfinite(bounds.low) and math.isfinite(bounds.high):
            return _is_nan_only_with(graph, x, source, depth - 1)
    return False


def _select_range(operator: str, operands: Sequence[NumberRange]) -> NumberRange:
    """Return the range of a result that holds elements of its operands, or their opposites."""
    x = operands[0]
    if operator in ("Neg", "Abs"):
        opposite = NumberRange(-x.high, -x.low, x.is_number)
        ends = NumberRange(max(x.low, opposite.low, 0), max(x.high, opposite.high), x.is_number)
        return _drop_overflow(opposite if operator == "Neg" else ends)
    is_number = all(part.is_number for part in operands)
    lows, highs = [part.low for part in operands], [part.high for part in operands]
    if operator == "Max":
        return NumberRange(max(lows), max(highs), is_number)
    if operator == "Min":
        return NumberRange(min(lows), min(highs), is_number)
    if operator == "Clip":
        bottom, top = operands[1], operands[2]
        return NumberRange(max(x.low, bottom.low), min(max(x.high, bottom.low), top.high), x.is_number)
    # Where has a condition first; the operands of Concat are all alike.
    parts = operands[1:] if operator == "Where" else operands
    return NumberRange(min(p.low for p in parts), max(p.high for p in parts), all(p.is_number for p in parts))


def _combine(operator: str, operands: Sequence[NumberRange]) -> NumberRange:
    """Return the range of a sum, a difference or a product: its ends are results of ends."""
    x, y = operands
    if not all(math.isfinite(end) for end in (x.low, x.high, y.low, y.high)):
        return _ANY  # inf - inf is NaN
    ends = [_ARITHMETIC[operator](a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    # One step outward, because the graph may round each result to float32.
    low, high = (
        np.nextafter(np.float32(end), np.float32(far))
        for end, far in ((min(ends), -np.inf), (max(ends), np.inf))
    )  # fmt: skip
    return _drop_overflow(NumberRange(float(low), float(high), x.is_number and y.is_number))


def _drop_overflow(x: NumberRange) -> NumberRange:
    # The narrowest integers in which the graph computes have 32 bits. Beyond these they may have wrapped around.
    return x if x.low >= _INT32.low and x.high <= _INT32.high else _ANY


def _round_range(x: NumberRange, dtype: DTypeLike) -> NumberRange:
    """Return the range of numbers after a cast."""
    dtype = np.dtype(dtype)
    if values.choose_container(dtype).kind in "iub":
        held = _derive_dtype_range(dtype)
        # A cast to an integer dtype that does not hold all of them wraps around.
        return NumberRange(x.low, x.high, True) if held.low <= x.low and x.high <= held.high else held
    if dtype not in (dtypes.FLOAT16, dtypes.BFLOAT16, dtypes.FLOAT32, np.float64):
        return _ANY
    with np.errstate(over="ignore"):
        low, high = (float(np.asarray(end, np.float64).astype(dtype)) for end in (x.low, x.high))
    return NumberRange(low, high, x.is_number)
