"""Codes of constant weights, and the nodes that read them: recipes that need no ranges of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from .graph import MICROSOFT, GraphEditor, get_attribute

# Fewer weights gain nothing.
_LEAST_SIZE = 256
# The constant inputs of operators that hold weights, and the axes that keep a scale for each index.
_WEIGHTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Conv": ((1, 0),), "ConvTranspose": ((1, 1),), "MatMul": ((1, -1), (0, -2)), "Gemm": ((1, 1), (0, 0)),
    "LSTM": ((1, 1), (2, 1)), "GRU": ((1, 1), (2, 1)), "RNN": ((1, 1), (2, 1)), "Gather": ((0, 0),),
}  # fmt: skip


class NodeWeight(NamedTuple):
    """A constant weight of a node.

    Attributes:
        place: the position among the node's inputs.
        axis: the axis with a scale for each index.
        array: the floats.
    """

    place: int
    axis: int
    array: np.ndarray


def list_weights(graph: GraphEditor, node: NodeProto) -> list[NodeWeight]:
    """Return the weights of a node that are worth codes."""
    found = []
    for place, axis in _WEIGHTS.get(node.op_type, ()) if not node.domain else ():
        array = graph.read_weight(node, place)
        if array is None or array.ndim < 2 or array.size < _LEAST_SIZE:
            continue
        if node.op_type == "Gather" and (get_attribute(node, "axis", 0) or array.ndim != 2):
            continue
        if node.op_type == "Gemm" and get_attribute(node, "transB" if place else "transA", 0):
            axis = 1 - axis
        if node.op_type == "ConvTranspose" and get_attribute(node, "group", 1) != 1:
            axis = 0  # the second axis is only the outputs of a group
        found.append(NodeWeight(place, axis % array.ndim, array))
    return found


def derive_scale(w: np.ndarray, axis: int, most: int) -> np.ndarray:
    """Return the scale of each index of an axis, for codes from -most to most."""
    largest = np.abs(w).max(axis=tuple(i for i in range(w.ndim) if i != axis))
    scale = (largest / np.float32(most)).astype(np.float32)
    return np.where(scale > 0, scale, np.float32(1))


def round_weight(w: np.ndarray, scale: np.ndarray, axis: int, most: int) -> np.ndarray:
    """Return int8 codes."""
    shape = [-1 if i == axis else 1 for i in range(w.ndim)]
    return np.clip(np.rint(w / scale.reshape(shape)), -most, most).astype(np.int8)


def store_weight(graph: GraphEditor, node: NodeProto, weight: NodeWeight) -> None:
    """Have a node read a weight as int8 codes with a scale for each output."""
    name = node.input[weight.place]
    scale = derive_scale(weight.array, weight.axis, 127)
    codes = round_weight(weight.array, scale, weight.axis, 127)
    if node.op_type == "Gather":
        _look_up_codes(graph, node, codes, scale)
        return
    parts = [graph.add_constant(codes, f"{name}_codes"), graph.add_constant(scale, f"{name}_scale")]
    values = graph.make_node("DequantizeLinear", parts, f"{name}_dequantized", axis=weight.axis)
    graph.put_before(node, values)
    node.input[weight.place] = values.output[0]


def _look_up_codes(graph: GraphEditor, node: NodeProto, codes: np.ndarray, scale: np.ndarray) -> None:
    """Replace a lookup of floats by one of codes and one of scales: only what is looked up is dequantized."""
    table, index = node.input
    found = graph.make_node("Gather", [graph.add_constant(codes, f"{table}_codes"), index], f"{table}_found")
    floats = graph.make_node("Cast", found.output, f"{table}_floats", to=TensorProto.FLOAT)
    scales = graph.add_constant(scale.reshape(-1, 1), f"{table}_scale")
    steps = graph.make_node("Gather", [scales, index], f"{table}_steps")
    product = graph.make_node("Mul", [floats.output[0], steps.output[0]], f"{table}_values")
    graph.replace(node, found, floats, steps, product)


class MatrixProduct(NamedTuple):
    """A product of an activation by a constant matrix.

    Attributes:
        weight: the matrix, inputs by outputs.
        bias: the name of what is added, or None.
    """

    weight: np.ndarray
    bias: str | None


def read_product(graph: GraphEditor, node: NodeProto) -> MatrixProduct | None:
    """Return a MatMul or a Gemm as a product by a constant matrix on the right, or None for any other node."""
    w = graph.read_weight(node, 1) if node.op_type in ("MatMul", "Gemm") and not node.domain else None
    if w is None or w.ndim != 2 or w.size < _LEAST_SIZE:
        return None
    if node.op_type == "MatMul":
        return MatrixProduct(w, None)
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    is_plain = get_attribute(node, "alpha", 1.0) == 1 and not get_attribute(node, "transA", 0)
    if not is_plain or (bias is not None and get_attribute(node, "beta", 1.0) != 1):
        return None
    return MatrixProduct(w.T if get_attribute(node, "transB", 0) else w, bias)


def quantize_dynamic_product(graph: GraphEditor, node: NodeProto, product: MatrixProduct, most: int) -> None:
    """Replace a product by one of codes, with a range that each call finds."""
    x, name = node.input[0], node.output[0]
    scale = derive_scale(product.weight, 1, most)
    codes = round_weight(product.weight, scale, 1, most)
    quantized = helper.make_node(
        "DynamicQuantizeLinear", [x], [graph.make_name(f"{name}_{part}") for part in ("codes", "scale", "zero_point")]
    )
    stored = graph.add_constant(codes, f"{node.input[1]}_codes")
    point = graph.add_constant(np.zeros((), np.int8), f"{node.input[1]}_zero_point")
    inputs = [quantized.output[0], stored, quantized.output[2], point]
    sums = graph.make_node("MatMulInteger", inputs, f"{name}_sums")
    floats = graph.make_node("Cast", sums.output, f"{name}_floats", to=TensorProto.FLOAT)
    scales = graph.add_constant(scale, f"{node.input[1]}_scale")
    steps = graph.make_node("Mul", [quantized.output[1], scales], f"{name}_steps")
    new = [quantized, sums, floats, steps, graph.make_node("Mul", [floats.output[0], steps.output[0]], f"{name}_real")]
    _add_bias(graph, node, product, new)


def _add_bias(graph: GraphEditor, node: NodeProto, product: MatrixProduct, new: list[NodeProto]) -> None:
    """Replace a node by others, the last of which is a product without the bias."""
    if product.bias is not None:
        new.append(graph.make_node("Add", [new[-1].output[0], product.bias], f"{node.output[0]}_sum"))
    graph.replace(node, *new)


Rounding = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def quantize_blocks(
    graph: GraphEditor, node: NodeProto, product: MatrixProduct, block: int, rounding: Rounding
) -> None:
    """Replace a product by MatMulNBits: 4 bits, with a scale and a zero point for each block of inputs.

    Args:
        graph: the graph.
        node: the node of the product.
        product: its matrix and bias.
        block: the number of inputs that share a scale, a power of two from 16 on.
        rounding: a function of the matrix, outputs by inputs, that returns the codes (outputs by inputs), the scales
            and the zero points (outputs by blocks).
    """
    inputs, outputs = product.weight.shape
    codes, scale, point = rounding(np.ascontiguousarray(product.weight.T))
    name, blocks = node.input[1], -(-inputs // block)
    padded = np.zeros((outputs, blocks * block), np.uint8)
    padded[:, :inputs] = codes
    padded[:, inputs:] = point[:, -1:]  # beyond the inputs there is nothing
    points = np.zeros((outputs, blocks + blocks % 2), np.uint8)
    points[:, :blocks] = point
    parts = [
        graph.add_constant(_pack(padded).reshape(outputs, blocks, block // 2), f"{name}_codes"),
        graph.add_constant(scale.astype(np.float32).reshape(-1), f"{name}_scale"),
        graph.add_constant(_pack(points).reshape(-1), f"{name}_zero_point"),
    ]
    new = graph.make_node(
        "MatMulNBits", [node.input[0], *parts], f"{node.output[0]}_product", MICROSOFT,
        K=inputs, N=outputs, bits=4, block_size=block,
    )  # fmt: skip
    _add_bias(graph, node, product, [new])


def _pack(codes: np.ndarray) -> np.ndarray:
    """Return codes of 4 bits in bytes, the first of two in the low bits."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
