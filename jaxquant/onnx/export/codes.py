"""ONNX nodes of operations on codes: QLinearConv, QLinearMatMul, ONNX Runtime's own, and lookups in tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.typing import DTypeLike

from . import values
from .elementwise import cast_value
from .graph import MICROSOFT, ModelGraph, WriterCall, writes_mark
from .values import Shape, Value

_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


def _is_single(x: Value) -> bool:
    return all(bool(n == 1) for n in x.shape)


def _store_scalar(graph: ModelGraph, x: Value, dtype: DTypeLike) -> str:
    """Return a scale or a zero point of one element as a scalar."""
    x = cast_value(graph, x, dtype)
    if x.is_known:
        return graph.add_constant(np.asarray(x.array).reshape(()))
    return graph.reshape(graph.store(x), ()) if x.shape else graph.store(x)


def _store_vector(graph: ModelGraph, x: Value, axis: int) -> str | None:
    """Return a scale or a bias as a scalar, or with one entry for each index of an axis; None if it has others."""
    if _is_single(x):
        return _store_scalar(graph, x, x.dtype)
    if any(not bool(n == 1) for a, n in enumerate(x.shape) if a != axis):
        return None
    if x.is_known:
        return graph.add_constant(np.asarray(x.array).reshape(-1), x.hint)
    return graph.reshape(graph.store(x), (x.shape[axis],))


@writes_mark("requantize")
def write_requantization(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Write the operator of a whole quantized contraction, in place of the integer one that computed the sums."""
    p, acc = call.parameters, call.parameters["acc"]
    node = graph.look_up_node(acc.name)
    # Zero points that the integer operators do not take make the sums the result of another node, which cannot be
    # replaced.
    if node is None or node.op_type not in ("ConvInteger", "MatMulInteger"):
        return None
    dtype = np.dtype(p["dtype"])
    if graph.form == "qdq" and (graph.derive_dtype(node.input[0]), dtype) != (_UINT8, _UINT8):
        graph.warnings.append(
            f"{node.name}: expected uint8 inputs and outputs, because ONNX Runtime runs float kernels on int8 between "
            "DequantizeLinear and QuantizeLinear; written as integer operators"
        )
    if graph.derive_dtype(node.input[0]) != dtype:  # no kernel
        return None
    is_conv = node.op_type == "ConvInteger"
    axis = 1 if is_conv else len(acc.shape) - 1
    bias, y_scale, y_center = p["bias"], p["y_scale"], p["y_center"]
    # QGemm takes matrices only. In the form "qdq", MatMul and Add stand for products of any rank.
    is_matrix = graph.form == "qdq" or len(acc.shape) == 2
    if not all(_is_single(x) for x in (p["a_scale"], y_scale, y_center)) or not (bias is None or is_conv or is_matrix):
        return None
    rhs_scale = _store_vector(graph, p["b_scale"], axis)
    offset = None if bias is None else _store_bias(graph, bias, axis, acc.shape)
    # In the operators with scales, unlike in the integer ones, zero points are required inputs.
    zero_points = [_read_zero_point(graph, node.input, i) for i in (0, 1)]
    if rhs_scale is None or (bias is not None and offset is None):
        return None
    # ONNX Runtime wants the scale and the zero point of the weights in one shape.
    count = 1 if _is_single(p["b_scale"]) else p["b_scale"].shape[axis]
    if count != graph.count_elements(zero_points[1]):
        zero_points[1] = _repeat_zero_point(graph, node.input, count)
    scales = [_store_scalar(graph, p["a_scale"], _FLOAT32), rhs_scale, _store_scalar(graph, y_scale, _FLOAT32)]
    operands = [node.input[0], scales[0], zero_points[0], node.input[1], scales[1], zero_points[1]]
    result = [scales[2], _store_scalar(graph, y_center, dtype)]
    name = _write_contraction(graph, node, operands, offset, result, len(acc.shape))
    return Value(tuple(call.outputs[0].shape), dtype, name)


def _write_contraction(graph: ModelGraph, node: Any, operands: Any, offset: str | None, result: Any, rank: int) -> str:
    """Return the codes of a contraction, written in the form of the graph.

    Args:
        graph: the graph.
        node: the node that computed the sums.
        operands: each operand with its scale and its zero point.
        offset: the int32 bias, or None.
        result: the scale and the zero point of the result.
        rank: the rank of the result.
    """
    attributes = {a.name: graph.read_attribute(a) for a in node.attribute}
    if graph.form == "qdq" and graph.derive_dtype(operands[0]) == _UINT8:
        return _write_qdq(graph, node, operands, offset, result, rank)
    if node.op_type == "ConvInteger":
        return graph.add("QLinearConv", [*operands, *result, *([] if offset is None else [offset])], **attributes)
    if offset is None:
        return graph.add("QLinearMatMul", [*operands, *result])
    return graph.add("QGemm", [*operands, offset, *result], domain=MICROSOFT)


def _store_bias(graph: ModelGraph, bias: Value, axis: int, shape: Shape) -> str | None:
    """Return a bias with one entry for each feature."""
    name = _store_vector(graph, bias, axis)
    if name is None or not _is_single(bias):
        return name
    # QLinearConv and QGemm take no scalar as a bias.
    return graph.add("Expand", [name, graph.add_shape((shape[axis],))])


def _read_zero_point(graph: ModelGraph, inputs: Any, place: int) -> str:
    """Return the zero point of an operand, which the integer operators may leave out."""
    if len(inputs) > 2 + place and inputs[2 + place]:
        return inputs[2 + place]
    return graph.add_constant(np.zeros((), graph.derive_dtype(inputs[place]) or _UINT8))


def _repeat_zero_point(graph: ModelGraph, inputs: Any, count: int) -> str:
    """Return the zero point of the right operand with as many entries as it has scales."""
    zero_point = _read_zero_point(graph, inputs, 1)
    if zero_point in graph.arrays:
        return graph.add_constant(np.broadcast_to(graph.arrays[zero_point], (count,)))
    return graph.add("Expand", [zero_point, graph.ints(count)])


def _write_qdq(graph: ModelGraph, node: Any, operands: Any, offset: str | None, result: Any, rank: int) -> str:
    """Return the codes of a float operator between DequantizeLinear and QuantizeLinear."""
    x, x_scale, x_zero_point, w, w_scale, w_zero_point = operands
    is_conv = node.op_type == "ConvInteger"
    # A scalar scale has no axis, and runtimes ignore the attribute then.
    names = [
        graph.add("DequantizeLinear", [x, x_scale, x_zero_point]),
        graph.add("DequantizeLinear", [w, w_scale, w_zero_point], axis=0 if is_conv else graph.derive_rank(w) - 1),
    ]
    if offset is not None:
        scale = graph.add_product(x_scale, w_scale)
        names.append(graph.add("DequantizeLinear", [offset, scale], axis=0))
    if is_conv:
        name = graph.add("Conv", names, **{a.name: graph.read_attribute(a) for a in node.attribute})
    # ONNX Runtime makes QGemm of both. Gemm is one node, and takes matrices only.
    elif offset is not None and rank == 2:
        name = graph.add("Gemm", names)
    else:
        name = graph.add("MatMul", names[:2])
        name = name if offset is None else graph.add("Add", [name, names[2]])
    return graph.add("QuantizeLinear", [name, *result])


# ONNX Runtime's own operators.

_OPERATORS = {"qlinear_add": "QLinearAdd", "qlinear_mul": "QLinearMul"}


@writes_mark(*_OPERATORS)
def write_combination(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the sum or the product of codes."""
    p = call.parameters
    if _is_fusible(graph, p["a"].dtype):
        operands = [[graph.store(p[x]), *_store_affine(graph, p, x)] for x in ("a", "b")]
        name = _write_between(graph, _FLOATS[call.name], operands, _store_affine(graph, p, "c"))
        return Value(values.broadcast_shapes(p["a"].shape, p["b"].shape), _UINT8, name)
    names, output = [], call.outputs[0]
    for side in ("a", "b", "c"):
        if side != "c":
            names.append(graph.store(p[side]))
        names += _store_affine(graph, p, side, np.dtype(output.dtype) if side == "c" else p[side].dtype)
    name = graph.add(_OPERATORS[call.name], names, domain=MICROSOFT)
    shape = values.broadcast_shapes(p["a"].shape, p["b"].shape)
    return Value(shape, np.dtype(output.dtype), name)


@writes_mark("qlinear_softmax", "qlinear_average_pool")
def write_unary(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Write a softmax or the means of windows of codes."""
    p, output = call.parameters, call.outputs[0]
    if call.name == "qlinear_softmax":
        # The operator only asks whether its opset is below 13, where a softmax goes over all dimensions from the axis
        # on.
        operator, attributes = "QLinearSoftmax", {"axis": p["axis"], "opset": 12 if p["flat"] else 13}
    else:
        operator, attributes = "QLinearAveragePool", _read_pooling(p["attributes"])
    names = [graph.store_full(p["x"], p["input_shapes"][0])]
    is_soft = call.name == "qlinear_softmax"
    # ONNX's own operators have no attribute for the layout of channels, and none for the softmax of earlier opsets.
    if _is_fusible(graph, p["x"].dtype) and not (is_soft and p["flat"]):
        plain = {"axis": p["axis"]} if is_soft else {k: v for k, v in attributes.items() if k != "channels_last"}
        rank = len(output.shape)
        is_last = not is_soft and attributes.get("channels_last")
        # AveragePool has the channels second.
        order = [0, rank - 1, *range(1, rank - 1)] if is_last else list(range(rank))
        operand = [graph.transpose(names[0], order), *_store_affine(graph, p, "x")]
        name = _write_between(graph, _FLOATS[call.name], [operand], _store_affine(graph, p, "y"), **plain)
        return Value(tuple(output.shape), _UINT8, graph.transpose(name, np.argsort(order).tolist()))
    for side, dtype in (("x", p["x"].dtype), ("y", np.dtype(output.dtype))):
        names += _store_affine(graph, p, side, dtype)
    name = graph.add(operator, names, domain=MICROSOFT, **attributes)
    return Value(tuple(output.shape), np.dtype(output.dtype), name)


def _read_pooling(attributes: Any) -> dict[str, Any]:
    """Return the attributes of a pooling that are not None."""
    result = {}
    for name, value in attributes._asdict().items():
        if value is not None:
            result[name] = (
                list(value) if isinstance(value, tuple) else (value if isinstance(value, str) else int(value))
            )
    return result


_FLOATS = {
    "qlinear_add": "Add",
    "qlinear_mul": "Mul",
    "qlinear_softmax": "Softmax",
    "qlinear_average_pool": "AveragePool",
    "qlinear_sigmoid": "Sigmoid",
    "qlinear_leaky_relu": "LeakyRelu",
    "qlinear_global_average_pool": "GlobalAveragePool",
}


@writes_mark("qlinear_sigmoid", "qlinear_leaky_relu", "qlinear_global_average_pool")
def write_float_operator(graph: ModelGraph, call: WriterCall) -> Value | None:
    """Write an operator of floats in the form "qdq"; otherwise the arithmetic of codes is written, or a table."""
    p, output = call.parameters, call.outputs[0]
    # GlobalAveragePool has the channels second, and no attribute for another layout.
    if not _is_fusible(graph, p["x"].dtype) or p.get("channels_last"):
        return None
    attributes = {"alpha": p["alpha"]} if "alpha" in p else {}
    operand = [graph.store_full(p["x"], p["input_shapes"][0]), *_store_affine(graph, p, "x")]
    name = _write_between(graph, _FLOATS[call.name], [operand], _store_affine(graph, p, "y"), **attributes)
    return Value(tuple(output.shape), _UINT8, name)


def _is_fusible(graph: ModelGraph, dtype: DTypeLike) -> bool:
    """Return whether operators on codes are floats between DequantizeLinear and QuantizeLinear."""
    # ONNX Runtime fuses these operators for uint8; for int8 it would compute in floats.
    return graph.form == "qdq" and dtype == _UINT8


def _store_affine(graph: ModelGraph, parameters: Any, side: str, dtype: np.dtype = _UINT8) -> list[str]:
    """Return the scale and the zero point of an operand or of the result, with codes of a dtype."""
    # Without a zero point, ONNX Runtime takes codes of int8 for uint8, and does not load the model.
    zero_point = parameters[f"{side}_zero_point"]
    zero_point = values.make_known(np.zeros((), dtype)) if zero_point is None else zero_point
    return [_store_scalar(graph, parameters[f"{side}_scale"], _FLOAT32), _store_scalar(graph, zero_point, dtype)]


def _write_between(graph: ModelGraph, operator: str, operands: Any, result: Any, **attributes: Any) -> str:
    """Return the codes of an operator of floats between DequantizeLinear and QuantizeLinear."""
    names = [graph.add("DequantizeLinear", operand) for operand in operands]
    return graph.add("QuantizeLinear", [graph.add(operator, names, **attributes), *result])


@writes_mark("look_up")
def write_lookup(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a lookup in a table of 256 entries, in the order of the codes' bits."""
    table, x = call.parameters["table"], call.parameters["x"]
    # The bits of int8 as uint8: a loaded model relies on indices that are not negative.
    index = cast_value(graph, cast_value(graph, x, _UINT8), np.int32)
    container = values.choose_container(call.outputs[0].dtype)
    name = graph.add("Gather", [graph.store_full(table, (256,)), graph.store(index)], axis=0)
    return Value(x.shape, container, name)
