"""ONNX nodes of jaxquant's roundings and ranges, in the form of operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._core import dtypes
from ..._core import granularity as granularities
from ..load.graph import ROUNDED_ONCE
from . import elementwise, packed_weights, small_floats, values
from .elementwise import apply_operator, cast_value, make_scalar
from .graph import ModelGraph, WriterCall, writes_mark
from .values import Shape, Value

_UINT4 = np.dtype(jnp.uint4)


class ScaleLayout(NamedTuple):
    """How a scale is stored for QuantizeLinear and DequantizeLinear.

    Attributes:
        shape: the shape of the scale.
        axis: the axis of a scale of one dimension, or that is cut into blocks; None for a scalar.
        block: the length of a block, or 0.
    """

    shape: Shape
    axis: int | None
    block: int


def derive_layout(scale: Shape, granularity: Any, shape: Shape) -> ScaleLayout | None:
    """Return the layout of a scale for an array of the given shape, or None if ONNX has none."""
    if all(values.is_static((n,)) and n == 1 for n in scale):
        return ScaleLayout((), None, 0)
    if isinstance(granularity, granularities.PerAxis):
        axis = granularity.axis
        return ScaleLayout(scale, axis, 0) if isinstance(axis, int) else None
    if isinstance(granularity, granularities.PerTensor) or len(scale) != len(shape):
        return None
    varying = [axis for axis, n in enumerate(scale) if not (values.is_static((n,)) and n == 1)]
    if len(varying) == 1 and bool(scale[varying[0]] == shape[varying[0]]):
        return ScaleLayout((scale[varying[0]],), varying[0], 0)
    sizes = derive_sizes(granularity, scale, shape)
    blocked = [axis for axis, size in enumerate(sizes) if size != 1 and not bool(shape[axis] == 1)]
    is_blocked = len(blocked) == 1 and all(
        bool(n == m) for axis, (n, m) in enumerate(zip(scale, shape, strict=True)) if axis != blocked[0]
    )
    return ScaleLayout(scale, blocked[0], int(sizes[blocked[0]])) if is_blocked else None


def derive_sizes(granularity: Any, scale: Shape, shape: Shape) -> Sequence[Any]:
    """Return how many indices of each dimension share an entry of a scale."""
    if isinstance(granularity, granularities.Aligned):
        sizes = granularity.sizes(tuple(scale), tuple(shape))
        assert sizes is not None
        return sizes
    if isinstance(granularity, granularities.Groups):
        return granularity.sizes
    if isinstance(granularity, granularities.Blocked):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        return [granularity.size if axis in axes else 1 for axis in range(len(shape))]
    axes = range(len(shape))
    if isinstance(granularity, granularities.PerAxis):
        kept = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        return [1 if axis in kept else shape[axis] for axis in axes]
    return [shape[axis] for axis in axes]


def expand_scale(graph: ModelGraph, part: Value, granularity: Any, shape: Shape) -> Value:
    """Return a scale or zero point in a shape that broadcasts to `shape`."""
    if isinstance(granularity, granularities.PerTensor):
        return Value((), part.dtype, graph.reshape(graph.store(part), ())) if part.shape else part
    if isinstance(granularity, granularities.PerAxis):
        kept = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        target = tuple(shape[axis] if axis in kept else 1 for axis in range(len(shape)))
        return _reshape_value(graph, part, target)
    blocked = []
    for axis, size in enumerate(derive_sizes(granularity, part.shape, shape)):
        if size != 1 and not bool(part.shape[axis] == 1):
            blocked.append((axis, int(size)))
    for axis, size in blocked:
        part = _repeat(graph, part, axis, size, shape[axis])
    return part


def _reshape_value(graph: ModelGraph, x: Value, shape: Shape) -> Value:
    if tuple(x.shape) == tuple(shape):
        return x
    if x.is_known and values.is_static(shape):
        return values.make_known(np.asarray(x.array).reshape(shape), x.hint)
    return Value(tuple(shape), x.dtype, graph.reshape(graph.store(x), shape))


def _repeat(graph: ModelGraph, x: Value, axis: int, size: int, length: Any) -> Value:
    """Return an array with each entry along an axis repeated, cut to a length."""
    if x.is_known:
        # The last block may be shorter than the others.
        array = np.repeat(np.asarray(x.array), size, axis=axis)
        return values.make_known(np.take(array, np.arange(length), axis=axis), x.hint)
    index = graph.add_constant(np.arange(length, dtype=np.int64) // size)
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    return Value(shape, x.dtype, graph.add("Gather", [graph.store(x), index], axis=axis))


# Quantization.


@writes_mark("quantize")
def write_quantize(graph: ModelGraph, call: WriterCall) -> Value:
    """Write QuantizeLinear, or its arithmetic where the operator does not have the scale's shape or dtype."""
    p = call.parameters
    x, scale, zero_point = p["x"], p["scale"], p["zero_point"]
    shape, dtype = call.outputs[0].shape, np.dtype(p["dtype"])
    # DynamicQuantizeLinear has computed the codes together with the range.
    dynamic = graph.codes.get((x.name, scale.name)) if x.name and scale.name else None
    if dynamic is not None and zero_point is not None and zero_point.hint == "dynamic":
        return dynamic
    layout = derive_layout(scale.shape, p["granularity"], shape)
    if p["precision"] == dtypes.INT32 or dtype in dtypes.SMALL_FLOATS:
        return _quantize_small_float(graph, x, scale, p, shape)
    is_same = zero_point is None or zero_point.shape == scale.shape
    # ONNX Runtime divides everything in float32 and ignores the attribute `precision`, so other divisions are written
    # out.
    is_direct = x.dtype == scale.dtype == p["precision"] == dtypes.FLOAT32 and is_same
    is_direct = is_direct and layout is not None and has_operator(graph, dtype, layout)
    if is_direct:
        assert layout is not None
        return _write_operator(graph, x, scale, zero_point, layout, dtype, p["bounds"], shape)
    value = _divide(graph, x, expand_scale(graph, scale, p["granularity"], shape), p["precision"])
    if zero_point is not None:
        zero_point = expand_scale(graph, zero_point, p["granularity"], shape)
    return encode(graph, value, zero_point, dtype, p["bounds"])


def has_operator(graph: ModelGraph, dtype: np.dtype, layout: ScaleLayout) -> bool:
    """Return whether the opset has QuantizeLinear for codes of a dtype and a layout of the scale."""
    return graph.opset >= 21 or (values.choose_container(dtype) in dtypes.EIGHT_BITS and not layout.block)


def _write_operator(
    graph: ModelGraph, x: Value, scale: Value, zero_point: Value | None, layout: ScaleLayout, dtype: np.dtype,
    bounds: Any, shape: Shape,
) -> Value:  # fmt: skip
    container = values.choose_container(dtype)
    scale = _reshape_value(graph, scale, layout.shape)
    name = graph.add(
        "QuantizeLinear",
        [
            graph.store_full(x, shape),
            graph.store(scale),
            graph.store(_read_zero_point(graph, zero_point, layout.shape, container)),
        ],
        axis=layout.axis,
        block_size=layout.block or None,
    )
    return _saturate(graph, Value(tuple(shape), container, name), dtype, bounds)


def _read_zero_point(graph: ModelGraph, zero_point: Value | None, shape: Shape, container: np.dtype) -> Value:
    if zero_point is None:
        return graph.fill(make_scalar(0, container), shape)
    return _reshape_value(graph, cast_value(graph, zero_point, container), shape)


def _saturate(graph: ModelGraph, codes: Value, dtype: np.dtype, bounds: Any) -> Value:
    """Return codes within the bounds, where these are narrower than their container's."""
    low, high = dtypes.read_bounds(dtype) if bounds is None else bounds
    if (low, high) == dtypes.read_bounds(codes.dtype):
        return codes
    if codes.dtype in dtypes.EIGHT_BITS:
        ends = [graph.add_constant(np.asarray(end, codes.dtype)) for end in (low, high)]
        return Value(codes.shape, codes.dtype, graph.add("Clip", [graph.store(codes), *ends]))
    inside = apply_operator(graph, "Max", [codes, make_scalar(low, codes.dtype)])
    return apply_operator(graph, "Min", [inside, make_scalar(high, codes.dtype)])


def _divide(graph: ModelGraph, x: Value, scale: Value, precision: np.dtype) -> Value:
    """Return the quotient in a precision, as float32."""
    parts = [round_value(graph, cast_value(graph, v, np.float32), precision) for v in (x, scale)]
    return round_value(graph, _divide_once(graph, *parts), precision)


def round_value(graph: ModelGraph, x: Value, dtype: DTypeLike) -> Value:
    """Return float32 values rounded to a dtype."""
    if dtype == dtypes.FLOAT32:
        return x
    return cast_value(graph, cast_value(graph, x, dtype), np.float32)


def _quantize_small_float(graph: ModelGraph, x: Value, scale: Value, p: Any, shape: Shape) -> Value:
    dtype = np.dtype(p["dtype"])
    if p["precision"] != dtypes.FLOAT32 or dtype not in dtypes.SMALL_FLOATS:
        raise values.UnsupportedError(f"codes of {dtype} with a division in {p['precision']}")
    small_floats.check_opset(graph, dtype, x.hint)
    scale = cast_value(graph, scale, np.float32)
    value = _divide(graph, x, expand_scale(graph, scale, p["granularity"], shape), p["precision"])
    if dtype in dtypes.FLOAT4:
        value = graph.fill(value, shape)
        if p["zero_point"] is not None:  # -0 + 0 is 0
            is_zero = apply_operator(graph, "Equal", [value, make_scalar(0, np.float32)], np.bool_)
            value = elementwise.choose(graph, is_zero, make_scalar(0, np.float32), value)
        return small_floats.encode(graph, value, dtype, is_saturated=True)
    one, zero = make_scalar(1, np.float32), values.make_known(np.zeros((), dtype))
    inputs = [graph.store_full(value, shape), graph.store(one), graph.store(zero)]
    name = graph.add("QuantizeLinear", inputs, saturate=int(p["saturate"]))
    return Value(tuple(shape), dtype, name)


@writes_mark("encode")
def write_encode(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a rounding of quotients to codes."""
    p = call.parameters
    return encode(graph, p["value"], p["zero_point"], np.dtype(p["dtype"]), p["bounds"])


def encode(graph: ModelGraph, value: Value, zero_point: Value | None, dtype: np.dtype, bounds: Any) -> Value:
    """Return the codes of quotients: QuantizeLinear with a scale of 1, or Round, Add, Max and Min."""
    container = values.choose_container(dtype)
    is_single = zero_point is None or _count(zero_point) == 1
    if is_single and has_operator(graph, dtype, ScaleLayout((), None, 0)):
        if zero_point is not None and zero_point.is_known:
            zero_point = values.make_known(np.asarray(zero_point.array).reshape(-1)[:1])
        layout = ScaleLayout((), None, 0)
        return _write_operator(graph, value, make_scalar(1, np.float32), zero_point, layout, dtype, bounds, value.shape)
    low, high = dtypes.read_bounds(dtype) if bounds is None else bounds
    rounded = apply_operator(graph, "Round", [value])
    # Max and Min pass a NaN on, and its conversion to an integer is undefined. QuantizeLinear gives the lowest code.
    nan = elementwise.write_operator(graph, "IsNaN", [value], np.bool_)
    if zero_point is not None:
        rounded = apply_operator(graph, "Add", [rounded, cast_value(graph, zero_point, np.float32)])
    rounded = elementwise.choose(graph, nan, make_scalar(low, np.float32), rounded)
    inside = apply_operator(graph, "Max", [rounded, make_scalar(low, np.float32)])
    inside = apply_operator(graph, "Min", [inside, make_scalar(high, np.float32)])
    return cast_value(graph, inside, container)


def _count(x: Value) -> Any:
    shape = values.shrink_array(np.asarray(x.array)).shape if x.is_known else x.shape
    return math.prod(shape)


@writes_mark("dequantize")
def write_dequantize(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the arithmetic of a dequantization.

    ONNX Runtime replaces floats between DequantizeLinear and QuantizeLinear by other arithmetic, with other codes. It
    also replaces a matrix product of floats with weights from DequantizeLinear by one that rounds the floats to 8 bits.
    The arithmetic of weights is done when a session is created.
    """
    p = call.parameters
    codes, scale, zero_point, shape = p["x"], p["scale"], p["zero_point"], call.outputs[0].shape
    is_float = codes.dtype in dtypes.SMALL_FLOATS
    if is_float:
        small_floats.check_opset(graph, np.dtype(codes.dtype), codes.hint)
        layout = derive_layout(scale.shape, p["granularity"], shape)
        native = small_floats.write_native(graph, codes, scale, layout, shape)
        if native is not None:
            return cast_value(graph, native, np.dtype(p["dtype"]))
    if zero_point is None or is_float:
        known, held = None, None
    else:
        known, held = _expand_part(graph, zero_point, np.int32, p["granularity"], shape)
    steps = _write_steps(graph, codes, known, held)
    factors = _expand_part(graph, scale, np.float32, p["granularity"], shape)
    result = cast_value(graph, apply_operator(graph, "Mul", [steps, factors[1]]), np.dtype(p["dtype"]))
    sizes = derive_sizes(p["granularity"], scale.shape, shape)
    packed_weights.note_weights(graph, result, codes, (factors[0], known), sizes)
    return result


@writes_mark("scale_levels")
def write_levels(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a lookup of the levels of a codebook, and their product with the scales."""
    p = call.parameters
    codes, levels = p["codes"], np.asarray(p["codebook"].levels, np.float32)
    # ONNX has no codes of 3 bits. Of those of 8 levels, which have 4, the last three count.
    levels = np.tile(levels, 2) if len(levels) == 8 else levels
    if codes.is_known and codes.dtype == _UINT4 and graph.opset >= 21:
        array = np.asarray(codes.array)
        codes = Value(codes.shape, codes.dtype, graph.add_constant(array, codes.hint))
        index = graph.add("Cast", [graph.store(codes)], to=values.derive_element_type(np.int32))
    else:
        index = graph.store(cast_value(graph, _hold(graph, codes), np.int32))
    steps = Value(codes.shape, np.dtype(np.float32), graph.add("Gather", [graph.add_constant(levels), index], axis=0))
    _, factors = _expand_part(graph, p["scale"], np.float32, p["aligned"], call.outputs[0].shape)
    return apply_operator(graph, "Mul", [steps, factors])


@writes_mark("add_offset")
def write_offset(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the addition of an offset."""
    p = call.parameters
    _, offset = _expand_part(graph, p["offset"], np.float32, p["aligned"], call.outputs[0].shape)
    return apply_operator(graph, "Add", [p["values"], offset])


def _expand_part(
    graph: ModelGraph, part: Value, dtype: DTypeLike, granularity: Any, shape: Shape
) -> tuple[Value, Value]:
    """Return a scale or zero point in a shape that broadcasts to `shape`: as it is known, and as the graph holds it.

    A known one for each block is not repeated in the file, where it would take more bytes than the codes.
    """
    expanded = expand_scale(graph, cast_value(graph, part, dtype), granularity, shape)
    if not part.is_known or math.prod(expanded.shape) == math.prod(part.shape):
        return expanded, expanded
    stored = graph.fill(part, part.shape)
    return expanded, expand_scale(graph, cast_value(graph, stored, dtype), granularity, shape)


def _write_steps(graph: ModelGraph, codes: Value, known: Value | None, zero_point: Value | None) -> Value:
    """Return codes minus their zero points, int32 in the shape of the codes or None, as float32.

    Args:
        graph: the graph.
        codes: the codes.
        known: the zero points, as they are known.
        zero_point: the zero points, as the graph holds them.
    """
    if zero_point is None or known is None:
        return cast_value(graph, _hold(graph, codes), np.float32)
    if codes.is_known and known.is_known and dtypes.count_packed_bits(np.dtype(codes.dtype)) <= 4:
        # The difference of constants fits into the byte of a code. The zero points of blocks would take four bytes more
        # for each code, and a loaded model would not keep such a sum as codes.
        difference = np.asarray(codes.array).astype(np.int8) - np.asarray(known.array).astype(np.int8)
        known = values.make_known(difference, codes.hint and f"{codes.hint}.centered")
        return cast_value(graph, _hold(graph, known), np.float32)
    steps = apply_operator(graph, "Sub", [cast_value(graph, _hold(graph, codes), np.int32), zero_point])
    return cast_value(graph, steps, np.float32)


def _hold(graph: ModelGraph, codes: Value) -> Value:
    """Return codes as a tensor, so that the model stores the codes of weights and not their values."""
    if not codes.is_known:
        return codes
    container = values.choose_container(codes.dtype)
    return Value(codes.shape, container, graph.store_full(codes, codes.shape))


# The parts of other operations.


@writes_mark("divide")
def write_divide(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a division."""
    return _divide_once(graph, call.parameters["x"], call.parameters["scale"])


def _divide_once(graph: ModelGraph, x: Value, scale: Value) -> Value:
    """Return the quotient of float32 values, which a loaded model rounds once, too."""
    result = apply_operator(graph, "Div", [x, scale])
    graph.nodes[-1].doc_string = ROUNDED_ONCE
    return result


@writes_mark("round_to_dtype")
def write_round_to_dtype(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a rounding to a narrower float."""
    return round_value(graph, call.parameters["value"], call.parameters["dtype"])


@writes_mark("keep")
def write_keep(graph: ModelGraph, call: WriterCall) -> Value:
    """Write nothing: the result is the first operand."""
    return call.inputs[0]


@writes_mark("name_output")
def write_name(graph: ModelGraph, call: WriterCall) -> Value:
    """Write nothing, and note the name that an operator asks for its output."""
    x, name = call.inputs[0], call.parameters["name"]
    is_taken = x.name in graph.inputs or x.name in graph.requests
    tensor = graph.add("Identity", [graph.store(x)]) if x.is_known or is_taken else graph.store(x)
    graph.requests[tensor] = name
    return x._replace(name=tensor, array=None)


# Ranges.


@writes_mark("extremes")
def write_extremes(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write the least and the largest value of each slice."""
    p = call.parameters
    x, target = cast_value(graph, p["x"], np.float32), call.outputs[0].shape
    shape = p["input_shapes"][0]
    sizes = granularities.Aligned(p["block_size"]).sizes(tuple(target), tuple(shape))
    assert sizes is not None
    blocked = [a for a, size in enumerate(sizes) if size != 1 and not bool(target[a] == 1)]
    if len(blocked) > 1 or any(shape[axis] % sizes[axis] for axis in blocked):
        raise values.UnsupportedError("a range of each of several blocks of different lengths")
    name = graph.store_full(x, shape)
    cut, axes = list(shape), [a for a, n in enumerate(target) if bool(n == 1) and not bool(shape[a] == 1)]
    if blocked:
        axis = blocked[0]
        cut[axis : axis + 1] = [target[axis], sizes[axis]]
        name = graph.reshape(name, tuple(cut))
        axes = [a + (a > axis) for a in axes] + [axis + 1]
    results = []
    for operator in ("ReduceMin", "ReduceMax"):
        reduced = graph.reduce(operator, name, axes, keepdims=not blocked)
        if blocked:
            reduced = graph.reshape(reduced, tuple(target))
        results.append(Value(tuple(target), np.dtype(np.float32), reduced))
    return results


@writes_mark("min_max")
def write_min_max(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write the range of each slice, widened to include 0."""
    p = call.parameters
    name = graph.store_full(cast_value(graph, p["x"], np.float32), p["input_shapes"][0])
    zero, results = make_scalar(0, np.float32), []
    for operator, bound in (("ReduceMin", "Min"), ("ReduceMax", "Max")):
        end = graph.reduce(operator, name, list(p["axes"]))
        results.append(apply_operator(graph, bound, [Value(call.outputs[0].shape, np.dtype(np.float32), end), zero]))
    return results


@writes_mark("dynamic_range")
def write_dynamic_range(graph: ModelGraph, call: WriterCall) -> list[Value] | None:
    """Write DynamicQuantizeLinear; `write_quantize` takes its codes."""
    p = call.parameters
    if np.dtype(p["dtype"]) != np.uint8 or not isinstance(p["granularity"], granularities.PerTensor):
        return None
    shape = p["input_shapes"][0]
    name, scale, zero_point = _quantize_dynamically(graph, p["x"], shape, ())
    axes = list(range(len(shape)))
    float32, zero = np.dtype(np.float32), make_scalar(0, np.float32)
    low, high = (
        apply_operator(graph, bound, [Value((), float32, graph.reduce(operator, name, axes)), zero])
        for operator, bound in (("ReduceMin", "Min"), ("ReduceMax", "Max"))
    )
    return [low, high, Value((), float32, scale), Value((), np.dtype(np.uint8), zero_point, hint="dynamic")]


def _quantize_dynamically(graph: ModelGraph, x: Value, shape: Shape, ones: Shape) -> tuple[str, str, str]:
    """Write DynamicQuantizeLinear, and return x, the scale and the zero point, both of the shape `ones`."""
    name = graph.store_full(x, shape)
    codes, scale, zero_point = graph.add("DynamicQuantizeLinear", [name], 3)
    if ones:
        scale, zero_point = graph.reshape(scale, ones), graph.reshape(zero_point, ones)
    graph.codes[x.name or name, scale] = Value(tuple(shape), np.dtype(np.uint8), codes)
    return name, scale, zero_point


@writes_mark("own_range")
def write_own_range(graph: ModelGraph, call: WriterCall) -> list[Value] | None:
    """Write DynamicQuantizeLinear for the range of a whole array and codes of uint8: its integers are the same."""
    p = call.parameters
    spec, x = p["spec"], p["x"]
    (scale_shape, scale_dtype), (zero_point_shape, point_dtype) = call.outputs
    # DynamicQuantizeLinear has one formula: uint8, all codes, and a scale that is not rounded to a power of two.
    is_plain = spec.codebook is None and not spec.power_of_two and tuple(spec.bounds) == (0, 255)
    is_plain = is_plain and np.dtype(point_dtype) == np.uint8 and scale_dtype == x.dtype == dtypes.FLOAT32
    if not is_plain or any(not bool(n == 1) for n in (*scale_shape, *zero_point_shape)):
        return None
    _, scale, zero_point = _quantize_dynamically(graph, x, p["input_shapes"][0], scale_shape)
    return [
        Value(tuple(scale_shape), np.dtype(np.float32), scale),
        Value(tuple(zero_point_shape), np.dtype(np.uint8), zero_point, hint="dynamic"),
    ]
