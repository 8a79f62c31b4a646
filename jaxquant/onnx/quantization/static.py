"""The recipe with static ranges: floats between codes, where ONNX Runtime makes integer kernels of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from .graph import GraphEditor, get_attribute
from .ranges import MeanObserver
from .weights import MatrixProduct, derive_scale, read_product, round_weight

# Operators that move codes; what they return has the scale of their first input.
_MOVES = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Flatten")
# Operators with a kernel on codes in ONNX Runtime, between DequantizeLinear and QuantizeLinear.
_UNARY = ("GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu")
_BINARY = ("Add", "Mul")
# A bias takes no more than half of int32, so that the sums have the other half.
_LARGEST_BIAS = 2.0**30


class ValueScale(NamedTuple):
    """The scale and the zero point of a value in uint8."""

    scale: np.float32
    zero_point: int


class Layer(NamedTuple):
    """A convolution, or a product by a constant matrix, that runs in integers.

    Attributes:
        node: its node.
        addition: the Add of a constant bias that alone reads a MatMul, or None.
        activation: the Relu, or the Clip from 0 on, that alone reads the result and that its codes contain, or None.
        top: the upper bound of the Clip, or None.
    """

    node: NodeProto
    addition: NodeProto | None
    activation: NodeProto | None
    top: float | None

    @property
    def result(self) -> str:
        """The name of what the layer returns."""
        return (self.activation or self.addition or self.node).output[0]


@dataclasses.dataclass
class Plan:
    """Which nodes of a graph run on codes.

    Attributes:
        layers: the convolutions and the products by constant matrices.
        others: operators between them.
        coded: values that are rounded to codes when they have been computed, and the values with their scales.
        entries: values that floats compute, and that are rounded to codes where the layers read them.
        tops: the upper bounds of values that a Clip bounds.
    """

    layers: list[Layer] = dataclasses.field(default_factory=list)
    others: list[NodeProto] = dataclasses.field(default_factory=list)
    coded: dict[str, str] = dataclasses.field(default_factory=dict)
    entries: list[str] = dataclasses.field(default_factory=list)
    tops: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def scaled(self) -> list[str]:
        """The values that need a range."""
        return list(dict.fromkeys([*self.coded.values(), *self.entries]))

    @property
    def inputs(self) -> dict[str, int]:
        """The activations of the layers, and the axis of their channels."""
        return {layer.node.input[0]: 1 if layer.node.op_type == "Conv" else -1 for layer in self.layers}


def make_plan(graph: GraphEditor, kept: set[int]) -> Plan:
    """Return which nodes run on codes.

    Args:
        graph: the graph.
        kept: the nodes that stay in floats, by their id; it gets the other parts of their layers, too.
    """
    plan, candidates = Plan(), list[NodeProto]()
    layers = {id(node): layer for node in graph.nodes if (layer := _read_layer(graph, node, kept)) is not None}
    read = {layer.node.input[0] for layer in layers.values()}
    for node in graph.nodes:
        layer = layers.get(id(node))
        if layer is not None:
            plan.layers.append(layer)
            # ONNX Runtime has no kernel of a convolution with floats as its result. A product with a Relu behind it, or
            # with several readers one of which reads codes, it leaves in floats.
            if node.op_type == "Conv" or layer.activation is not None or layer.result in read:
                plan.coded[layer.result] = layer.result
            plan.tops.update({} if layer.top is None else {layer.result: layer.top})
        elif id(node) not in kept and not node.domain and _runs_on_codes(graph, plan, node):
            candidates.append(node)
            plan.coded[node.output[0]] = plan.coded[node.input[0]] if node.op_type in _MOVES else node.output[0]
    _drop_unread(plan, candidates)
    plan.entries = [name for name in plan.inputs if name not in plan.coded]
    return plan


def _read_layer(graph: GraphEditor, node: NodeProto, kept: set[int]) -> Layer | None:
    """Return a node with what follows it as a layer, or None; if one part of it is kept, all are."""
    if node.domain:
        return None
    addition = None
    if not _is_convolution(graph, node):
        product = read_product(graph, node)
        if product is None or not _has_known_bias(graph, product) or graph.is_constant(node.input[0]):
            return None
        addition = _find_addition(graph, node, product) if node.op_type == "MatMul" else None
    activation, top = _find_activation(graph, addition or node)
    parts = {id(part) for part in (node, addition, activation) if part is not None}
    if kept & parts:
        kept |= parts
        return None
    return Layer(node, addition, activation, top)


def _find_addition(graph: GraphEditor, node: NodeProto, product: MatrixProduct) -> NodeProto | None:
    """Return the Add of a constant for each output that alone reads a product."""
    reader = graph.find_only_reader(node.output[0])
    if reader is None or reader.domain or reader.op_type != "Add":
        return None
    bias = graph.read_weight(reader, 1 - list(reader.input).index(node.output[0]))
    return reader if bias is not None and bias.shape == (product.weight.shape[1],) else None


def _is_convolution(graph: GraphEditor, node: NodeProto) -> bool:
    if node.op_type != "Conv" or graph.read_weight(node, 1) is None or graph.is_constant(node.input[0]):
        return False
    return len(node.input) < 3 or not node.input[2] or graph.read_weight(node, 2) is not None


def _has_known_bias(graph: GraphEditor, product: MatrixProduct) -> bool:
    if product.bias is None:
        return True
    bias = graph.find_weight(product.bias)
    # [outputs, 1] is a bias for each row, where there are as many rows as outputs.
    return bias is not None and bias.size == product.weight.shape[1] and bias.shape[-1:] in ((), (bias.size,))


def _find_activation(graph: GraphEditor, node: NodeProto) -> tuple[NodeProto | None, float | None]:
    """Return the Relu or the Clip from 0 on that alone reads a convolution, and the upper bound of the Clip."""
    reader = graph.find_only_reader(node.output[0])
    if reader is None or reader.domain:
        return None, None
    if reader.op_type == "Relu":
        return reader, None
    if reader.op_type != "Clip" or not all(graph.is_constant(name) for name in reader.input[1:] if name):
        return None, None
    bounds = [float(graph.read_constant(name).reshape(())) if name else None for name in reader.input[1:]]
    if not bounds or bounds[0] != 0:
        return None, None
    return reader, bounds[1] if len(bounds) > 1 else None


def _runs_on_codes(graph: GraphEditor, plan: Plan, node: NodeProto) -> bool:
    """Return whether an operator has a kernel on codes, and all that it reads are codes."""
    op, coded = node.op_type, plan.coded
    if op in _MOVES:
        return node.input[0] in coded and len(node.output) == 1 and all(map(graph.is_constant, node.input[1:]))
    if op in _UNARY:
        return node.input[0] in coded and not get_attribute(node, "ceil_mode", 0)
    return (op in _BINARY or op == "Concat") and len(node.input) > 1 and all(name in coded for name in node.input)


def _drop_unread(plan: Plan, candidates: list[NodeProto]) -> None:
    """Leave operators in floats whose results no layer reads: codes would only add an error."""
    read = set(plan.inputs)
    for node in reversed(candidates):
        if node.output[0] in read:
            read.update(name for name in node.input if name in plan.coded)
            plan.others.insert(0, node)
        else:
            del plan.coded[node.output[0]]


def choose_scale(lo: float, hi: float, top: float | None) -> ValueScale:
    """Return the scale of a range, which is enlarged to hold 0; `top` is a bound that no code's value may exceed."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    scale = np.float32((hi - lo) / 255)
    if not scale > 0:
        return ValueScale(np.float32(1), 0)
    # ONNX Runtime drops a Clip if the codes saturate within its bounds.
    while top is not None and lo == 0 and hi <= top and np.float32(255) * scale > np.float32(top):
        scale = np.nextafter(scale, np.float32(0))
    return ValueScale(scale, int(np.clip(np.rint(-lo / scale), 0, 255)))


def write_plan(
    graph: GraphEditor, plan: Plan, scales: Mapping[str, ValueScale], means: Mapping[str, MeanObserver], most: int
) -> None:
    """Write the nodes of a plan.

    Args:
        graph: the graph.
        plan: what runs on codes.
        scales: the scale of each value of `plan.scaled`.
        means: the means of the activations, for what rounding of weights adds to the results on average.
        most: the largest code of weights.
    """
    stored = {
        name: (
            graph.add_constant(scales[name].scale, f"{name}_scale"),
            graph.add_constant(np.uint8(scales[name].zero_point), f"{name}_zero_point"),
        )
        for name in plan.scaled
    }
    for layer in plan.layers:
        name = layer.node.input[0]
        _write_layer(graph, layer, scales[plan.coded.get(name, name)].scale, most, means[name].read())
    # Of what floats compute, the layers read the codes, and all others the floats.
    for name in plan.entries:
        quantize, values = _make_pair(graph, name, stored[name])
        for layer in plan.layers:
            if layer.node.input[0] == name:
                layer.node.input[0] = values.output[0]
        graph.put_first(name, quantize, values)
    for name, source in plan.coded.items():
        # All readers get the values of the codes: with a second reader of the floats there is no integer kernel.
        producer = graph.producers[name]
        producer.output[0] = graph.make_name(f"{name}_float")
        quantize, values = _make_pair(graph, producer.output[0], stored[source])
        values.output[0] = name
        graph.put_after(producer, quantize, values)


def _make_pair(graph: GraphEditor, name: str, stored: tuple[str, str]) -> tuple[NodeProto, NodeProto]:
    quantize = graph.make_node("QuantizeLinear", [name, *stored], f"{name}_codes")
    return quantize, graph.make_node("DequantizeLinear", [quantize.output[0], *stored], f"{name}_dequantized")


def _write_layer(graph: GraphEditor, layer: Layer, x_scale: np.float32, most: int, mean: np.ndarray) -> None:
    """Store the weight of a layer as int8, and its bias as int32.

    Args:
        graph: the graph.
        layer: the layer.
        x_scale: the scale of its activations.
        most: the largest code of the weight.
        mean: the mean of the activations, for each of their channels.
    """
    node = layer.node
    w = graph.read_weight(node, 1)
    assert w is not None
    axis = 0 if node.op_type == "Conv" or get_attribute(node, "transB", 0) else 1
    # The bias is the third input of the node, or an operand of the Add behind it.
    owner, place = node, 2
    if layer.addition is not None:
        owner, place = layer.addition, 1 - list(layer.addition.input).index(node.output[0])
    bias = graph.read_weight(owner, place)
    scale = derive_scale(w, axis, most)
    if bias is not None:
        # Where the weights of an output are nearly 0 its bias would leave int32.
        scale = np.maximum(scale, np.abs(bias.reshape(-1)) / np.float32(x_scale * _LARGEST_BIAS)).astype(np.float32)
    codes = round_weight(w, scale, axis, most)
    name = node.input[1]
    _read_codes(graph, node, 1, codes, scale, axis)
    if node.op_type == "MatMul" and layer.addition is None:
        return
    errors = w - codes * scale.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    shift = _find_shift(node, errors, axis, mean)
    bias = shift if bias is None else bias.reshape(-1) + shift
    step = (np.float32(x_scale) * scale).astype(np.float32)
    steps = np.clip(np.rint(bias / step.astype(np.float64)), -_LARGEST_BIAS, _LARGEST_BIAS).astype(np.int32)
    if len(owner.input) <= place:
        owner.input.append("")
    owner.input[place] = owner.input[place] or f"{name}_bias"
    _read_codes(graph, owner, place, steps, step, 0)


def _read_codes(
    graph: GraphEditor, node: NodeProto, place: int, codes: np.ndarray, scale: np.ndarray, axis: int
) -> None:
    """Have a node read codes with a scale for each index of an axis in place of an input."""
    name = node.input[place]
    # Without a zero point, ONNX Runtime leaves a Gemm in floats.
    arrays = {"codes": codes, "scale": scale, "zero_point": np.zeros(scale.shape, codes.dtype)}
    parts = [graph.add_constant(array, f"{name}_{part}") for part, array in arrays.items()]
    values = graph.make_node("DequantizeLinear", parts, f"{name}_dequantized", axis=axis)
    graph.put_before(node, values)
    node.input[place] = values.output[0]


def _find_shift(node: NodeProto, errors: np.ndarray, axis: int, mean: np.ndarray) -> np.ndarray:
    """Return what the rounding of weights takes away from each output on average, by the means of the activations."""
    if node.op_type != "Conv":
        return np.tensordot(errors.astype(np.float64), mean, ((1 - axis,), (0,)))
    groups = get_attribute(node, "group", 1)
    # [groups, outputs of a group, inputs of a group]
    sums = errors.reshape(*errors.shape[:2], -1).sum(-1, dtype=np.float64).reshape(groups, -1, errors.shape[1])
    return np.einsum("goi,gi->go", sums, mean.reshape(groups, -1)).reshape(-1)
