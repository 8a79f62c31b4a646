"""Models whose integer products are exact in ONNX Runtime on every processor.

On x86-64 without VNNI, ONNX Runtime's kernel for uint8 by int8 adds two neighbors along the contracted axis in int16,
which saturates; `tests.support.processor` asks whether that of this machine does. Its kernel for uint8 by uint8 is
exact everywhere. So `make_exact` adds 128 to the codes of each int8 factor to the right of a uint8 one, and to its zero
point: the same integers, hence the same sums, and all the other nodes are as they were.

ONNX Runtime has a session option that does this to a part of the models, `session.x64quantprecision` = "1". With
onnxruntime 1.31 and 1.32 it

- changes constant weights only, at the levels "extended" and "all";
- leaves QLinearMatMul of opset 21 and above as it is;
- also changes weights whose left factor is int8, and then no kernel is found for QLinearConv, QLinearMatMul (opset 20
  and below), QGemm and MatMulIntegerToFloat, so a model that has both kinds of products cannot be loaded;
- cannot load a DynamicQuantizeLSTM in which one initializer is the zero point of both weights.

It does so on every x86-64 processor.

`make_exact` depends on none of these: it serves at each level, for weights that are inputs, and next to int8 factors.

Two kernels do not saturate: ConvInteger, whose left factor is the weights, and QLinearConv with one channel and one
output in each group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"
# The position of the left factor, that of its zero point, which tells the dtype (none: always uint8), and for each
# right factor its position and that of its zero point.
_PRODUCTS: dict[tuple[str, str], tuple[int, int | None, tuple[tuple[int, int], ...]]] = {
    ("", "MatMulInteger"): (0, 2, ((1, 3),)),
    ("", "QLinearMatMul"): (0, 2, ((3, 5),)),
    ("", "QLinearConv"): (0, 2, ((3, 5),)),
    (MICROSOFT, "QLinearConv"): (0, 2, ((3, 5),)),
    (MICROSOFT, "QGemm"): (0, 2, ((3, 5),)),
    (MICROSOFT, "MatMulIntegerToFloat"): (0, 4, ((1, 5),)),
    (MICROSOFT, "DynamicQuantizeMatMul"): (0, None, ((1, 3),)),
    (MICROSOFT, "DynamicQuantizeLSTM"): (0, None, ((1, 9), (2, 11))),
    (MICROSOFT, "QAttention"): (0, 6, ((1, 7),)),
}
# Products of floats that ONNX Runtime replaces by one of these, if both factors are DequantizeLinear.
_FLOAT_PRODUCTS = ("MatMul", "Gemm", "Conv")
# What may stand between DequantizeLinear and the product.
_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand", "Slice", "Gather")


class _Scope:
    """A graph, and those around it."""

    def __init__(self, graph: Any, outer: _Scope | None) -> None:
        self.graph, self.outer = graph, outer
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.producers = {name: node for node in graph.node for name in node.output if name}
        infos = (*graph.input, *graph.value_info, *graph.output)
        self.types = {info.name: info.type.tensor_type.elem_type for info in infos if info.type.tensor_type.elem_type}

    def defines(self, name: str) -> bool:
        return name in self.constants or name in self.producers or any(info.name == name for info in self.graph.input)

    def find(self, name: str) -> _Scope | None:
        """Return the scope in which a name is defined."""
        scope: _Scope | None = self
        while scope is not None and not scope.defines(name):
            scope = scope.outer
        return scope

    def find_type(self, name: str) -> int:
        """Return the number of a tensor's dtype, or 0 if it is not known."""
        scope = self.find(name)
        if not name or scope is None:
            return 0
        if name in scope.constants:
            return scope.constants[name].data_type
        if name in scope.types:
            return scope.types[name]
        node = scope.producers[name]
        if node.op_type == "QuantizeLinear":
            return scope.find_type(node.input[2]) if len(node.input) > 2 else TensorProto.UINT8
        if node.op_type in _MOVES:
            return scope.find_type(node.input[0])
        # The last zero point is that of the result, of the operators that have one.
        points = [scope.find_type(n) for n in node.input]
        codes = [kind for kind in points if kind in (TensorProto.INT8, TensorProto.UINT8)]
        return codes[-1] if node.op_type.startswith("QLinear") and codes else 0

    def find_dequantize(self, name: str) -> tuple[_Scope, Any] | None:
        """Return the DequantizeLinear that computes a tensor, perhaps through moves, and where it is."""
        scope = self.find(name)
        node = None if scope is None else scope.producers.get(name)
        if scope is None or node is None:
            return None
        if node.op_type == "DequantizeLinear":
            return scope, node
        return scope.find_dequantize(node.input[0]) if node.op_type in _MOVES else None


class _Shift:
    """The change of one graph: its new nodes in order, and its new initializers."""

    def __init__(self, scope: _Scope, numbers: Iterator[int]) -> None:
        self.scope, self.numbers = scope, numbers
        self.nodes: list[Any] = []

    def name(self, base: str) -> str:
        return f"{base}/unsigned{next(self.numbers)}"

    def hold(self, array: np.ndarray, base: str) -> str:
        name = self.name(base)
        self.scope.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def emit(self, op: str, inputs: list[str], base: str, **attributes: Any) -> str:
        name = self.name(base)
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def add_128(self, name: str) -> str:
        """Return int8 codes + 128 as uint8."""
        scope = self.scope.find(name)
        if scope is not None and name in scope.constants:
            codes = numpy_helper.to_array(scope.constants[name])
            return self.hold((codes.astype(np.int32) + 128).astype(np.uint8), name)
        wide = self.emit("Cast", [name], name, to=TensorProto.INT32)
        moved = self.emit("Add", [wide, self.hold(np.int32(128), name)], name)
        return self.emit("Cast", [moved], name, to=TensorProto.UINT8)

    def fill_128(self, scale: str) -> str:
        """Return a zero point of 128 with the shape of a scale."""
        scope = self.scope.find(scale)
        if scope is not None and scale in scope.constants:
            return self.hold(np.full(tuple(scope.constants[scale].dims), 128, np.uint8), scale)
        shape = self.emit("Shape", [scale], scale)
        value = numpy_helper.from_array(np.array([128], np.uint8))
        return self.emit("ConstantOfShape", [shape], scale, value=value)

    def dequantize(self, name: str) -> str:
        """Return the floats of a tensor from codes of uint8 in place of int8."""
        scope = self.scope.find(name)
        assert scope is not None
        node = scope.producers[name]
        if node.op_type != "DequantizeLinear":
            inputs = [self.dequantize(node.input[0]), *node.input[1:]]
        else:
            point = self.add_128(node.input[2]) if len(node.input) > 2 and node.input[2] else ""
            inputs = [self.add_128(node.input[0]), node.input[1], point or self.fill_128(node.input[1])]
        copy = helper.make_node(node.op_type, inputs, [self.name(name)])
        copy.attribute.extend(node.attribute)
        self.nodes.append(copy)
        return copy.output[0]


def _change_product(node: Any, shift: _Shift) -> None:
    left, left_point, rights = _PRODUCTS[node.domain, node.op_type]
    scope = shift.scope
    if left_point is not None:
        kinds = {scope.find_type(node.input[left])}
        kinds |= {scope.find_type(node.input[left_point])} if len(node.input) > left_point else set()
        if TensorProto.UINT8 not in kinds:
            assert TensorProto.INT8 in kinds, f"{node.op_type}: the dtype of {node.input[left]} is not known"
            return
    for right, point in rights:
        points = node.input[point] if len(node.input) > point else ""
        if TensorProto.INT8 not in {scope.find_type(node.input[right]), scope.find_type(points)}:
            continue
        node.input[right] = shift.add_128(node.input[right])
        node.input.extend([""] * (point + 1 - len(node.input)))
        node.input[point] = shift.add_128(points) if points else shift.hold(np.uint8(128), node.input[right])


def _change_float_product(node: Any, shift: _Shift) -> None:
    found = [shift.scope.find_dequantize(name) for name in node.input[:2]]
    kinds = [where and where[0].find_type(where[1].input[0]) for where in found]
    if kinds == [TensorProto.UINT8, TensorProto.INT8]:
        node.input[1] = shift.dequantize(node.input[1])


def _list_bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _change_graph(graph: Any, outer: _Scope | None, numbers: Iterator[int]) -> None:
    scope = _Scope(graph, outer)
    shift = _Shift(scope, numbers)  # the numbers are shared: a body must not repeat a name of the graph around it
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for body in _list_bodies(copy):
            _change_graph(body, scope, numbers)
        if (node.domain, node.op_type) in _PRODUCTS:
            _change_product(copy, shift)
        elif not node.domain and node.op_type in _FLOAT_PRODUCTS:
            _change_float_product(copy, shift)
        shift.nodes.append(copy)
    del graph.node[:]
    graph.node.extend(shift.nodes)


def make_exact(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that has no product of a uint8 by an int8 factor, and computes the same."""
    assert not model.functions, "products in functions of the model are not changed"
    copy = onnx.shape_inference.infer_shapes(model)
    _change_graph(copy.graph, None, itertools.count())
    return copy
