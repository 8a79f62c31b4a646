"""Products of codes as products of floats between DequantizeLinear and QuantizeLinear, for training, and their return.

`export` writes a contraction of quantized activations and weights whose result is float as QuantizeLinear,
MatMulInteger, Cast and Mul, where Mul multiplies by the product of both scales. The integers have no derivative. The
same numbers are a MatMul of dequantized codes, in which both scales are numbers of their own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .graph import Graph, Node, select_live

# Operators that may stand between the codes and their product, and between the sums and their scale.
_ARRANGING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_SEARCHED = 4  # floats on either side of a quotient


class Product(NamedTuple):
    """A product of codes.

    Attributes:
        node: MatMulInteger.
        chain: the nodes between QuantizeLinear, which is the first of them, and the product.
        scaling: the Mul that multiplies the sums by the product of the scales.
        scale: the name of the scale of the weights.
        factor: the name of the product of the scales.
    """

    node: Node
    chain: tuple[Node, ...]
    scaling: Node
    scale: str
    factor: str


@dataclasses.dataclass(frozen=True)
class Unfolded:
    """A graph whose products of codes are products of floats.

    Attributes:
        graph: the graph with products of floats.
        original: the graph that it was made of.
        products: the products.
    """

    graph: Graph
    original: Graph
    products: tuple[Product, ...]

    def fold(self, quantized: Graph) -> Graph:
        """Return the original graph with the codes and scales of `graph`, whose constants are those of `quantized`."""
        if not self.products:
            return quantized
        changed = {k: v for k, v in quantized.constants.items() if k in self.original.constants}
        constants, renamed = {**self.original.constants, **changed}, {}
        for product in self.products:
            scales = (quantized.constants[name] for name in (product.chain[0].inputs[1], product.scale))
            left, right = (np.asarray(scale).reshape(-1) for scale in scales)
            shape = self.original.constants[product.factor].shape
            # Products that had the same scales, and shared this constant, need not have them after training.
            name = product.factor if product.scale == product.factor else f"{product.scale}/factor"
            constants[name] = (left * right).astype(np.float32).reshape(shape)
            inputs = tuple(name if x == product.factor else x for x in product.scaling.inputs)
            renamed[product.scaling.outputs[0]] = dataclasses.replace(product.scaling, inputs=inputs)
        nodes = tuple(renamed.get(node.outputs[0], node) for node in self.original.nodes)
        return dataclasses.replace(self.original, constants=constants, nodes=nodes)


def unfold_products(graph: Graph) -> Unfolded:
    """Return a graph in which the products of codes with constant weights are products of floats."""
    producers = {name: node for node in graph.nodes for name in node.outputs if name}
    readers: dict[str, list[Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        for name in node.list_reads():
            readers[name].append(node)
    graph = _dequantize_outputs(graph, producers, readers)
    products = [_read_product(graph, node, producers, readers) for node in graph.nodes if node.op == "MatMulInteger"]
    found = tuple(product for product in products if product is not None)
    if not found:
        return Unfolded(graph, graph, ())
    constants = dict(graph.constants)
    replaced: dict[str, list[Node]] = {}
    for product in found:
        nodes = [*_dequantize_chain(product), *_multiply(product, constants)]
        constants[product.scale] = _find_weight_scale(constants, product)
        replaced[product.node.outputs[0]] = nodes
        # The products are reals already.
        same = dataclasses.replace(product.scaling, op="Identity", inputs=(_find_other(product),), attributes={})
        replaced[product.scaling.outputs[0]] = [same]
    # The codes of one QuantizeLinear may have several readers; their floats are the same.
    nodes, seen = [], set()
    for node in graph.nodes:
        for new in replaced.get(node.outputs[0], [node]):
            if new.outputs[0] not in seen:
                seen.add(new.outputs[0])
                nodes.append(new)
    literals = graph.literals - {product.scale for product in found}
    live = select_live(nodes, graph.outputs)
    unfolded = dataclasses.replace(graph, nodes=live, constants=constants, literals=literals)
    return Unfolded(unfolded, graph, found)


def _dequantize_outputs(graph: Graph, producers: Mapping[str, Node], readers: Mapping[str, list[Node]]) -> Graph:
    """Return a graph whose outputs come from DequantizeLinear where `export` has written its arithmetic.

    In other places an operator and a QuantizeLinear may follow, with which DequantizeLinear would be fused.
    """
    nodes = []
    for node in graph.nodes:
        if node.op == "Mul" and node.outputs[0] in graph.outputs and not readers[node.outputs[0]]:
            node = _read_dequantized(graph, node, producers) or node
        nodes.append(node)
    return dataclasses.replace(graph, nodes=select_live(nodes, graph.outputs))


def _read_dequantized(graph: Graph, scaling: Node, producers: Mapping[str, Node]) -> Node | None:
    """Return the DequantizeLinear of codes that are cast, moved by their zero point and scaled; None for others."""
    factors = [graph.constants[name] for name in scaling.inputs if name in graph.constants]
    node = next((producers[name] for name in scaling.inputs if name in producers), scaling)
    point = np.zeros(())
    if node.op == "Cast" and (moved := producers.get(node.inputs[0])) is not None and moved.op == "Sub":
        point = graph.constants.get(moved.inputs[1], np.zeros(0))
        node = producers.get(moved.inputs[0], scaling)
    chain = _find_chain(graph, node.inputs[0], producers) if node.op == "Cast" and len(factors) == 1 else None
    if chain is None:
        return None
    parts = [graph.constants[name] for name in chain[0].inputs[1:] if name]
    expected = [factors[0], point][: len(parts)]
    if factors[0].dtype != parts[0].dtype:
        return None
    is_same = all(a.size == b.size == 1 and a.item() == b.item() for a, b in zip(parts, expected, strict=True))
    if not is_same or (len(parts) == 1 and np.any(point)):
        return None
    inputs = (node.inputs[0], *chain[0].inputs[1:])
    return dataclasses.replace(scaling, op="DequantizeLinear", inputs=inputs, attributes={})


def _read_product(
    graph: Graph, node: Node, producers: Mapping[str, Node], readers: Mapping[str, list[Node]]
) -> Product | None:  # fmt: skip
    """Return the product of a MatMulInteger, or None if it has another form."""
    a, b = node.inputs[:2]
    weights = graph.constants.get(b)
    chain = _find_chain(graph, a, producers)
    if weights is None or weights.ndim != 2 or len(readers[b]) != 1 or chain is None:
        return None
    points = [[*part.inputs, "", ""][place] for part, place in ((chain[0], 2), (node, 2))]
    left, right = (graph.constants.get(name, np.zeros(())) if name else np.zeros(()) for name in points)
    scaling, between = _find_scaling(node, readers, set(graph.outputs))
    if scaling is None or left.size != 1 or right.size != 1 or left.reshape(()) != right.reshape(()):
        return None
    names = [name for name in scaling.inputs if name in graph.constants]
    factor = names[0] if len(names) == 1 else ""
    if not factor or not _is_by_column(graph, graph.constants[factor], weights.shape[1], between):
        return None
    # A scale for all columns, with a zero point for each, has no form in DequantizeLinear.
    own = graph.constants.get("".join(node.inputs[3:4]))
    if len(node.inputs) > 3 and (own is None or own.size > graph.constants[factor].size):
        return None
    # The constant of the product becomes that of the scale, unless other nodes read it.
    scale = factor if len(readers[factor]) == 1 else f"{b}.scale"
    return Product(node, chain, scaling, scale, factor)


def _find_chain(graph: Graph, name: str, producers: Mapping[str, Node]) -> tuple[Node, ...] | None:
    """Return the nodes from a QuantizeLinear with a single constant scale to its codes, or None."""
    chain: list[Node] = []
    while (node := producers.get(name)) is not None:
        chain.insert(0, node)
        if node.op == "QuantizeLinear":
            scale = graph.constants.get(node.inputs[1])
            is_known = len(node.inputs) < 3 or not node.inputs[2] or node.inputs[2] in graph.constants
            return tuple(chain) if scale is not None and scale.size == 1 and is_known else None
        if node.op not in _ARRANGING:
            return None
        name = node.inputs[0]
    return None


def _find_scaling(
    node: Node, readers: Mapping[str, list[Node]], outputs: set[str]
) -> tuple[Node | None, tuple[Node, ...]]:  # fmt: skip
    """Return the Mul that scales the sums, and the nodes in between; None if the sums have other readers."""
    between: list[Node] = []
    while True:
        uses = readers[node.outputs[0]]
        if len(uses) != 1 or node.outputs[0] in outputs:
            return None, ()
        (node,) = uses
        if node.op == "Mul":
            return node, tuple(between)
        if node.op not in ("Cast", "Reshape", "Identity"):
            return None, ()
        between.append(node)


def _is_by_column(graph: Graph, factor: np.ndarray, columns: int, between: tuple[Node, ...]) -> bool:
    """Return whether a factor has one element, or one for each column of the sums, also after a reshape of these."""
    if factor.size == 1:
        return True
    leading = next(axis for axis, n in enumerate(factor.shape) if n != 1)
    shape = factor.shape[leading:]
    targets = [graph.constants.get(node.inputs[1]) for node in between if node.op == "Reshape"]
    if any(target is None for target in targets):
        return False
    # A reshape splits the columns, which are the last dimension, if the last dimensions are those of the factor.
    ends = [tuple(int(n) for n in target[len(target) - len(shape) :]) for target in targets if target is not None]
    return factor.size == columns and all(end == shape for end in ends) and (bool(ends) or len(shape) == 1)


def _find_other(product: Product) -> str:
    return next(name for name in product.scaling.inputs if name != product.factor)


def _dequantize_chain(product: Product) -> list[Node]:
    """Return the nodes that compute the operand in floats, with the names of the codes and an ending."""
    quantize, *rest = product.chain
    codes = quantize.outputs[0]
    nodes = [dataclasses.replace(quantize, op="DequantizeLinear", inputs=(codes, *quantize.inputs[1:]))]
    nodes += [dataclasses.replace(node, inputs=(_name(node.inputs[0]), *node.inputs[1:])) for node in rest]
    nodes = [dataclasses.replace(node, outputs=(_name(node.outputs[0]),)) for node in nodes]
    kept = {key: quantize.attributes[key] for key in ("axis",) if key in quantize.attributes}
    return [quantize, dataclasses.replace(nodes[0], attributes=kept), *nodes[1:]]


def _name(codes: str) -> str:
    return f"{codes}/floats"


def _multiply(product: Product, constants: dict[str, np.ndarray]) -> list[Node]:
    """Return the product of floats; add the zero point of the weights to the constants, in the form of their scale."""
    node, weights = product.node, product.node.inputs[1]
    operands = [weights, product.scale]
    point = constants.get("".join(node.inputs[3:4]))
    if point is not None:
        name = f"{weights}.zero_point"
        constants[name] = np.broadcast_to(point.reshape(-1), (constants[product.factor].size,))
        operands.append(name)
    dequantize: dict[str, Any] = {"op": "DequantizeLinear", "attributes": {"axis": 1}}
    floats = dataclasses.replace(node, inputs=tuple(operands), outputs=(_name(weights),), **dequantize)
    names = (_name(node.inputs[0]), _name(weights))
    return [floats, dataclasses.replace(node, op="MatMul", inputs=names, attributes={})]


def _find_weight_scale(constants: Mapping[str, np.ndarray], product: Product) -> np.ndarray:
    """Return the scale of the weights, whose product with that of the activations is the constant of the graph."""
    left = np.float32(constants[product.chain[0].inputs[1]].item())
    factor = constants[product.factor].reshape(-1).astype(np.float32)
    quotient = (factor.astype(np.float64) / np.float64(left)).astype(np.float32)
    # Not every quotient gives back the product, but a float next to it does, because the product is one.
    best, up, down = quotient, quotient, quotient
    for _ in range(_SEARCHED):
        up, down = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(0))
        for near in (up, down):
            best = np.where(best * left == factor, best, np.where(near * left == factor, near, best))
    return best.reshape(()) if best.size == 1 else best
