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

In QDQ form, int8 activations are no way around: ONNX Runtime changes QuantizeLinear to int8 with one DequantizeLinear
behind it to uint8 on x86-64, unless the session option `session.qdqisint8allowed` is "1".

The left factor of ConvInteger is the weights: uint8 weights by int8 codes saturate, int8 weights by uint8 codes do not.
QLinearConv with one channel and one output in each group does not saturate either.
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
    ("", "ConvInteger"): (1, 3, ((0, 2),)),
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

    def count_readers(self, name: str) -> int:
        """Return how often a tensor is read in this graph, an output of it counted as two."""
        reads = sum(list(node.input).count(name) for node in self.graph.node)
        return reads + 2 * any(info.name == name for info in self.graph.output)

    def is_unsigned(self, node: Any) -> bool:
        """Return whether DequantizeLinear reads uint8, perhaps once ONNX Runtime has changed the pair that it ends.

        Of QuantizeLinear and a single DequantizeLinear with a single reader, with a constant zero point of int8, it
        makes a pair with uint8.
        """
        if self.find_type(node.input[0]) == TensorProto.UINT8:
            return True
        quantize = self.producers.get(node.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return False
        if any(self.count_readers(name) > 1 for name in (node.input[0], node.output[0])):
            return False
        points = [each.input[2] for each in (quantize, node) if len(each.input) > 2]
        tensors = [scope.constants.get(name) for name in points if (scope := self.find(name))]
        codes = [numpy_helper.to_array(tensor) for tensor in tensors if tensor is not None]
        return len(codes) == 2 and all(code.size == 1 and code.dtype == np.int8 for code in codes)


class _Shift:
    """The change of one graph: its new nodes in order, and its new initializers."""

    def __init__(self, scope: _Scope, numbers: Iterator[int]) -> None:
        self.scope, self.numbers = scope, numbers
        self.nodes: list[Any] = []
        self.copied: list[str] = []

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
        moved = self.emit("Add", [wide, self.hold(np.array(128, np.int32), name)], name)
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
        self.copied.append(name)
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
        node.input[point] = shift.add_128(points) if points else shift.hold(np.array(128, np.uint8), node.input[right])


def _change_float_product(node: Any, shift: _Shift) -> None:
    left, right = (shift.scope.find_dequantize(name) for name in node.input[:2])
    if not left or not right or right[0].find_type(right[1].input[0]) != TensorProto.INT8:
        return
    # Behind operators that move elements ONNX Runtime inserts a pair, of which it makes one with uint8.
    if node.input[0] not in left[1].output or left[0].is_unsigned(left[1]):
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
    _drop_unread(graph, shift.copied)


def _drop_unread(graph: Any, names: list[str]) -> None:
    """Remove the nodes with these outputs if nothing reads them any more."""
    bodies = [graph]
    for body in bodies:
        bodies += [inner for node in body.node for inner in _list_bodies(node)]
    kept = {info.name for body in bodies for info in body.output}
    for name in reversed(names):  # those that read others first
        read = kept | {each for body in bodies for node in body.node for each in node.input}
        if name not in read:
            rest = [node for node in graph.node if name not in node.output]
            del graph.node[:]
            graph.node.extend(rest)


def make_exact(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that has no product of a uint8 by an int8 factor, and computes the same."""
    assert not model.functions, "products in functions of the model are not changed"
    copy = onnx.shape_inference.infer_shapes(model)
    _change_graph(copy.graph, None, itertools.count())
    return copy
