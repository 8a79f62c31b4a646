"""ONNX nodes of element-wise primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..._core import dtypes
from ..._program import moves
from . import values
from .graph import ModelGraph, WriterCall, writes, writes_mark
from .values import UnsupportedError, Value

# ONNX Runtime computes neither these floats nor these integers on a CPU; it casts to the right ones exactly.
_WIDER = {
    **dict.fromkeys((dtypes.FLOAT16, dtypes.BFLOAT16), np.dtype(np.float32)),
    **dict.fromkeys((np.dtype(d) for d in (np.int8, np.uint8, np.int16, np.uint16, np.bool_)), np.dtype(np.int32)),
    np.dtype(np.uint32): np.dtype(np.int64),
}
_UNARY = {
    "neg": "Neg", "sign": "Sign", "floor": "Floor", "ceil": "Ceil", "exp": "Exp", "log": "Log", "tanh": "Tanh",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "erf": "Erf", "logistic": "Sigmoid",
    "sqrt": "Sqrt", "abs": "Abs",
}  # fmt: skip
_BINARY = {
    "add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min", "pow": "Pow",
}  # fmt: skip
_NAN_DTYPES = (dtypes.FLOAT16, dtypes.FLOAT32, np.dtype(np.float64))
_COMPARISONS = {"eq": "Equal", "lt": "Less", "gt": "Greater", "le": "LessOrEqual", "ge": "GreaterOrEqual"}
_LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}
_BITS = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor"}
_UINT32 = np.dtype(np.uint32)
# ONNX Runtime has these for uint32. The others are computed in int64, which is int32 in a model that JAX loads.
_UINT32_OPERATORS = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sign", *_COMPARISONS.values())


def choose_compute_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which the graph computes with values of a dtype."""
    return _WIDER.get(values.choose_container(dtype), np.dtype(dtype))


def widen_ordered(graph: ModelGraph, name: str, dtype: DTypeLike) -> str:
    """Return a tensor in a dtype that ONNX Runtime sorts, and in the same order; `narrow_ordered` is the inverse."""
    container = values.choose_container(dtype)
    if container == _UINT32:
        # The sum wraps around: 0 becomes the lowest int32.
        return graph.add("Add", [graph.cast(name, np.int32), graph.add_constant(np.int32(-(2**31)))])
    wide = choose_compute_dtype(container)
    return name if wide == container else graph.cast(name, wide)


def narrow_ordered(graph: ModelGraph, name: str, dtype: DTypeLike) -> str:
    """Return what `widen_ordered` made of a tensor, or elements of it, in its dtype."""
    container = values.choose_container(dtype)
    if container == _UINT32:
        return graph.cast(graph.add("Add", [name, graph.add_constant(np.int32(-(2**31)))]), container)
    return name if choose_compute_dtype(container) == container else graph.cast(name, container)


def apply_operator(
    graph: ModelGraph, operator: str, inputs: Sequence[Value], dtype: DTypeLike | None = None, **attributes: Any
) -> Value:
    """Return the result of an operator that broadcasts, computed in a dtype that ONNX Runtime has kernels of.

    Args:
        graph: the graph.
        operator: the operator.
        inputs: the operands, of one dtype.
        dtype: the dtype of the result, or None for the dtype of the operands.
        **attributes: the attributes of the node.
    """
    container = values.choose_container(inputs[0].dtype)
    is_direct = container == _UINT32 and operator in _UINT32_OPERATORS
    wide = container if is_direct else choose_compute_dtype(container)
    for x in inputs:
        graph.note_dtype(x.name, values.choose_container(x.dtype))
    names = [graph.store(x) if wide == container else graph.cast(graph.store(x), wide) for x in inputs]
    name = graph.add(operator, names, **attributes)
    if dtype is None and wide != container:
        name = graph.cast(name, container)
    shape = values.broadcast_shapes(*(_derive_stored_shape(x) for x in inputs))
    return Value(shape, container if dtype is None else np.dtype(dtype), name)


def _derive_stored_shape(x: Value) -> values.Shape:
    return values.shrink_array(np.asarray(x.array)).shape if x.is_known else x.shape


def make_scalar(number: Any, dtype: DTypeLike) -> Value:
    """Return a number as a value."""
    return values.make_known(np.asarray(number, values.choose_container(dtype)))


@writes(*_UNARY)
def write_unary(graph: ModelGraph, call: WriterCall) -> Value:
    """Write an operator of one operand."""
    return apply_operator(graph, _UNARY[call.name], call.inputs)


@writes(*_BINARY)
def write_binary(graph: ModelGraph, call: WriterCall) -> Value:
    """Write an operator of two operands."""
    x, y = call.inputs
    if x.dtype == np.bool_ and call.name in ("max", "min", "mul", "add"):
        # ONNX's arithmetic has no bools.
        return write_operator(graph, "And" if call.name in ("min", "mul") else "Or", call.inputs, np.bool_)
    clipped = _clip_codes(graph, call) if call.name in ("max", "min") and x.dtype in dtypes.EIGHT_BITS else None
    if clipped is not None:
        return clipped
    if call.name == "pow" and x.dtype != y.dtype:
        y = cast_value(graph, y, x.dtype)
    return apply_operator(graph, _BINARY[call.name], (x, y))


def _clip_codes(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Return integers of 8 bits that are limited by a known one, or None: Clip has kernels of them, Max has none."""
    x, bound = call.inputs[::-1] if call.inputs[0].is_known else call.inputs
    if x.is_known or not bound.is_known or _derive_stored_shape(bound) not in ((), (1,) * len(x.shape)):
        return None
    name, end = graph.store(x), np.asarray(bound.array).reshape(-1)[0]
    low, high = dtypes.read_bounds(x.dtype)
    if end == (low if call.name == "max" else high):  # such as a relu of uint8 codes whose zero point is 0
        return x
    node = graph.look_up_node(name)
    if call.name == "max":
        ends = [graph.add_constant(np.asarray(n, x.dtype)) for n in (end, high)]
    elif node is not None and node.op_type == "Clip" and graph.arrays.get(node.input[2]) == high:
        # The other bound of a Clip, which is loaded as Max and Min.
        name, ends = node.input[0], [node.input[1], graph.add_constant(np.asarray(end, x.dtype))]
    else:
        ends = [graph.add_constant(np.asarray(n, x.dtype)) for n in (low, end)]
    return Value(x.shape, x.dtype, graph.add("Clip", [name, *ends]))


def write_operator(
    graph: ModelGraph, operator: str, inputs: Sequence[Value], dtype: DTypeLike, **attributes: Any
) -> Value:
    """Return the result of an operator that broadcasts, in the operands' own dtypes."""
    name = graph.add(operator, [graph.store(x) for x in inputs], **attributes)
    return Value(values.broadcast_shapes(*(_derive_stored_shape(x) for x in inputs)), np.dtype(dtype), name)


@writes(*_COMPARISONS, "ne")
def write_comparison(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a comparison."""
    inputs = call.inputs
    if call.name == "ne":
        x, y = inputs
        # Only a NaN differs from itself. ONNX Runtime has kernels of IsNaN for these dtypes.
        if not x.is_known and x.name == y.name and np.dtype(x.dtype) in _NAN_DTYPES:
            return write_operator(graph, "IsNaN", [x], np.bool_)
        equal = apply_operator(graph, "Equal", inputs, np.bool_)
        return write_operator(graph, "Not", [equal], np.bool_)
    return apply_operator(graph, _COMPARISONS[call.name], inputs, np.bool_)


@writes("and", "or", "xor", "not")
def write_logic(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a logical operator of bools, or one of the bits of integers."""
    dtype = call.inputs[0].dtype
    if dtype == np.bool_:
        return write_operator(graph, "Not" if call.name == "not" else _LOGIC[call.name], call.inputs, dtype)
    if graph.opset < 18:
        raise UnsupportedError("bits of integers need opset 18")
    return write_operator(graph, "BitwiseNot" if call.name == "not" else _BITS[call.name], call.inputs, dtype)


def cast_value(graph: ModelGraph, x: Value, dtype: DTypeLike) -> Value:
    """Return a value in another dtype, which must hold the numbers."""
    target, container = values.choose_container(dtype), values.choose_container(x.dtype)
    if x.is_known:
        array = graph.hold(x.array) if target == container else np.asarray(x.array)
        return values.make_known(array.astype(target, copy=False), x.hint)
    if target == container:
        return x._replace(dtype=target)
    graph.note_dtype(x.name, container)
    if container in dtypes.EIGHT_BITS and target == np.int32:
        # Noted, so that a cast back finds the codes, and not another chain of casts.
        return Value(x.shape, target, graph.widen(graph.store(x), container, target))
    return Value(x.shape, target, graph.cast(graph.store(x), target))


@writes("reduce_precision")
def write_reduce_precision(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a rounding to the digits of a narrower float."""
    bits = (call.parameters["exponent_bits"], call.parameters["mantissa_bits"])
    # ONNX rounds by a cast, so there has to be a dtype with these digits.
    narrow = {(8, 7): dtypes.BFLOAT16, (5, 10): dtypes.FLOAT16, (8, 23): dtypes.FLOAT32}.get(bits)
    if narrow is None:
        raise UnsupportedError(f"{bits[0]} bits of exponent and {bits[1]} of mantissa")
    x = call.inputs[0]
    return x if narrow == x.dtype else cast_value(graph, cast_value(graph, x, narrow), x.dtype)


@writes("round")
def write_round(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a rounding to integers."""
    (x,) = call.inputs
    if call.parameters["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return apply_operator(graph, "Round", [x])
    # floor(size + 0.5) would round twice: it turns 0.5 - 2**-25 into 1, and changes odd numbers above 2**23.
    size = apply_operator(graph, "Abs", [x])
    whole = apply_operator(graph, "Floor", [size])
    rest = apply_operator(graph, "Sub", [size, whole])
    is_up = apply_operator(graph, "GreaterOrEqual", [rest, make_scalar(0.5, x.dtype)], np.bool_)
    size = apply_operator(graph, "Add", [whole, cast_value(graph, is_up, x.dtype)])
    return apply_operator(graph, "Mul", [apply_operator(graph, "Sign", [x]), size])


@writes("one_minus_square")
def write_one_minus_square(graph: ModelGraph, call: WriterCall) -> Value:
    """Write 1 - x * x, which is in the derivative of tanh, as JAX computes it: (1 + x) * (1 - x)."""
    (x,) = call.inputs
    return apply_operator(
        graph, "Mul", [apply_operator(graph, op, [make_scalar(1, x.dtype), x]) for op in ("Add", "Sub")]
    )


@writes("integer_pow", "square")
def write_integer_power(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a power by multiplications."""
    (x,) = call.inputs
    exponent = 2 if call.name == "square" else int(call.parameters["y"])
    # JAX multiplies, too. Pow may round to another float.
    result, power, rest = None, x, abs(exponent)
    while rest:
        if rest & 1:
            result = power if result is None else apply_operator(graph, "Mul", [result, power])
        rest >>= 1
        power = apply_operator(graph, "Mul", [power, power]) if rest else power
    one = make_scalar(1, x.dtype)
    if result is None:
        # Also for infinities, where 0 * x would be NaN. Dimensions of 1 stand for x.shape.
        return values.make_known(np.ones((1,) * len(x.shape), values.choose_container(x.dtype)))
    return result if exponent > 0 else apply_operator(graph, "Div", [one, result])


# Operators that a loaded model computes by the runtime's approximation, and their attributes, by their marks.
_RUNTIME: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("Softmax", {"axis": -1}),
    "tanh": ("Tanh", {}),
    "logistic": ("Sigmoid", {}),
    "exp_of_runtime": ("Exp", {}),
    "sin_of_runtime": ("Sin", {}),
    "cos_of_runtime": ("Cos", {}),
}


@writes_mark(*_RUNTIME)
def write_kernel(graph: ModelGraph, call: WriterCall) -> Value:
    """Write an operator that a loaded model computes by the runtime's approximation."""
    operator, attributes = _RUNTIME[call.name]
    # The metadata then names the runtime, and `load` takes the runtime's approximations for this model again.
    (output,), graph.floats = call.outputs, "runtime"
    name = graph.add(operator, [graph.store_full(call.inputs[0], output.shape)], **attributes)
    return Value(tuple(output.shape), np.dtype(output.dtype), name)


@writes("rsqrt", "log1p", "log2", "expm1", "exp2", "cbrt", "erfc", "atan2", "rem", "is_finite", "clamp")
def write_composed(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a function that ONNX lacks by several of its operators."""
    x = call.inputs[0]
    one = None if call.name in ("is_finite", "clamp", "rem") else make_scalar(1, x.dtype)

    def apply(operator: str, *operands: Any) -> Value:
        return apply_operator(graph, operator, operands)

    if call.name == "rsqrt":
        return apply("Div", one, apply("Sqrt", x))
    if call.name == "log1p":
        # Near 0 this loses digits that JAX's function keeps, and so does expm1: ONNX has no operator for either.
        return apply("Log", apply("Add", one, x))
    if call.name == "log2":
        return apply("Mul", apply("Log", x), make_scalar(1 / np.log(2), x.dtype))
    if call.name == "expm1":
        return apply("Sub", apply("Exp", x), one)
    if call.name == "exp2":
        return apply("Exp", apply("Mul", x, make_scalar(np.log(2), x.dtype)))
    if call.name == "cbrt":
        third = apply("Pow", apply("Abs", x), make_scalar(1 / 3, x.dtype))
        return apply("Mul", apply("Sign", x), third)
    if call.name == "erfc":
        return apply("Sub", one, apply("Erf", x))
    if call.name == "atan2":
        return _write_atan2(graph, *call.inputs)
    if call.name == "rem":
        # The sign is the dividend's, which Mod has with fmod=1 only.
        return apply_operator(graph, "Mod", call.inputs, fmod=1)
    if call.name == "is_finite":
        return write_is_finite(graph, x)
    if call.name == "clamp":
        low, value, high = call.inputs
        return apply("Min", apply("Max", value, low), high)
    raise UnsupportedError("no operator of ONNX")


def write_is_finite(graph: ModelGraph, x: Value) -> Value:
    """Return whether each number is neither infinite nor NaN."""
    # IsInf takes 16-bit floats from opset 20 on only.
    x = x if x.dtype == dtypes.FLOAT32 else cast_value(graph, x, np.float32)
    infinite, nan = (write_operator(graph, operator, [x], np.bool_) for operator in ("IsInf", "IsNaN"))
    return write_operator(graph, "Not", [write_operator(graph, "Or", [infinite, nan], np.bool_)], np.bool_)


def _write_atan2(graph: ModelGraph, y: Value, x: Value) -> Value:
    """Write the angle of (abs(x), abs(y)), moved to the quadrant that the signs tell."""

    def apply(operator: str, *operands: Value, dtype: DTypeLike | None = None) -> Value:
        return apply_operator(graph, operator, operands, dtype)

    zero, one = make_scalar(0, x.dtype), make_scalar(1, x.dtype)
    sizes = [apply("Abs", v) for v in (y, x)]
    # 0 / 0 and inf / inf are NaN, but points on an axis and on a diagonal.
    is_infinite = apply("GreaterOrEqual", apply("Min", *sizes), make_scalar(np.inf, x.dtype), dtype=np.bool_)
    is_origin = apply("LessOrEqual", apply("Max", *sizes), zero, dtype=np.bool_)
    ratio = choose(graph, is_infinite, one, choose(graph, is_origin, zero, apply("Div", *sizes)))
    angle = apply("Atan", ratio)
    # Only the reciprocal of a zero tells its sign, and only the reciprocal of an infinity does not.
    signs = [
        write_operator(
            graph, "Or", [apply("Less", part, zero, dtype=np.bool_) for part in (v, apply("Div", one, v))], np.bool_
        )
        for v in (y, x)
    ]  # fmt: skip
    angle = choose(graph, signs[1], apply("Sub", make_scalar(np.pi, x.dtype), angle), angle)
    # A product, because ONNX Runtime's Where turns -0 into 0.
    return apply("Mul", angle, choose(graph, signs[0], make_scalar(-1, x.dtype), one))


@writes("select_n")
def write_select(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a selection by a bool, or by an integer among several values."""
    which, *cases = call.inputs
    if len(cases) == 1:
        return cases[0]
    if which.dtype == np.bool_:
        return choose(graph, which, cases[1], cases[0])
    result = cases[0]
    for place, case in enumerate(cases[1:], 1):
        is_place = apply_operator(graph, "Equal", [which, make_scalar(place, which.dtype)], np.bool_)
        result = choose(graph, is_place, case, result)
    return result


def choose(graph: ModelGraph, condition: Value, chosen: Value, other: Value) -> Value:
    """Return `chosen` where the condition holds, and `other` elsewhere."""
    dtype = values.choose_container(chosen.dtype)
    # ONNX Runtime has no kernels of Where for the other floats and integers.
    wide = np.dtype(np.float32) if dtype in (dtypes.FLOAT16, dtypes.BFLOAT16) else dtype
    if dtype.kind in "iub" and dtype not in (np.uint8, np.int32, np.int64):
        wide = np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    cases = [x if wide == dtype else cast_value(graph, x, wide) for x in (chosen, other)]
    result = write_operator(graph, "Where", [condition, *cases], wide)
    return result if wide == dtype else cast_value(graph, result, dtype)


# A conversion has a writer of its own.
@writes(
    *(name for name in moves.MOVES if moves.keeps_indices(name) and name != "convert_element_type"),
    *("device_put", moves.BARRIER),
)
def write_identity(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write nothing: the results are the operands."""
    return list(call.inputs)
