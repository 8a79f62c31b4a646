"""QDQ graphs, and products of codes, as fake-quantized graphs of floats with gradients, and the way back to codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._core import dtypes
from ..._onnx_ops.quantization import dequantize_linear, quantize_linear
from ..limits import ModelError
from .graph import Graph, Node, list_readers, select_live

_DOMAIN = "jaxquant"
_CODES = (*dtypes.INTEGERS, *dtypes.SMALL_FLOATS)
# Operators without a derivative: operators on codes in a form other than QDQ.
_BLOCKING = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "QGemm", "DynamicQuantizeLSTM")
# Operators that move codes and leave them as they are, so that they do the same with the floats.
_ARRANGING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "MaxPool")


def make_trainable(graph: Graph) -> Graph:
    """Return a graph in which constant codes are floats, and QuantizeLinear and DequantizeLinear are one operator.

    The operator is `jq.fake_quantize_linear`, which has gradients for its input and its scale.

    Raises:
        ModelError: the graph has operators on codes that have no derivative.
    """
    readers = list_readers(graph.nodes)
    fake = {node.outputs[0]: names for node in graph.nodes if (names := _match_fake(graph, node, readers))}
    blocking = _list_blocking(graph) or _list_lost(graph, fake, readers)
    if blocking:
        text = (
            "trainable=True needs a model in QDQ form, or with products of codes as export writes them for static "
            f"ranges and float results; these operators have no derivative: {sorted(blocking)}"
        )
        raise ModelError(text)
    floats = {name for names in fake.values() for name in names}
    constants, nodes, scales = dict(graph.constants), [], set()
    for node in graph.nodes:
        if node.outputs[0] in fake:
            scales.add(node.inputs[1])
            nodes.append(_make_fake(graph, node))
        elif node.op == "DequantizeLinear" and node.inputs[0] in floats:
            nodes.append(_pass_on(node))
        elif _has_constant_codes(graph, node) and _are_alike(readers[node.inputs[0]]):
            name = node.inputs[0]
            constants[name] = _dequantize(graph, node)
            is_bias = graph.constants[name].dtype == np.int32
            scales.update([] if is_bias else [node.inputs[1]])
            nodes.append(_pass_on(node) if is_bias else _make_fake(graph, node))
        else:
            nodes.append(node)
    # A scalar of a Constant node would be no parameter, but a scale is trained.
    literals = frozenset(graph.literals - scales)
    return dataclasses.replace(graph, constants=constants, nodes=tuple(nodes), literals=literals)


def quantize_constants(graph: Graph, params: Mapping[str, Any]) -> Graph:
    """Return the graph that `make_trainable` took, with the codes and scales of trained parameters.

    The bias of a Conv or Gemm gets the scale of its accumulator, as ONNX Runtime requires.
    """
    constants = dict(graph.constants)
    for name, value in params.items():
        if name in constants and constants[name].dtype not in (*_CODES, dtypes.INT32):
            constants[name] = np.asarray(value).astype(constants[name].dtype).reshape(constants[name].shape)
    producers = {name: node for node in graph.nodes for name in node.outputs}
    readers = list_readers(graph.nodes)
    for node in graph.nodes:
        if not _has_constant_codes(graph, node) or not _are_alike(readers[node.inputs[0]]):
            continue
        if node.inputs[0] not in params:
            continue
        codes, value = node.inputs[0], np.asarray(params[node.inputs[0]])
        if graph.constants[codes].dtype == np.int32:
            scale = _compute_accumulator_scale(graph, node, producers, constants)
            if scale is not None:
                constants[node.inputs[1]] = scale
            steps = np.rint(value / constants[node.inputs[1]].reshape(-1))
            # The largest float32 below 2**31. A conversion of 2**31 itself would overflow.
            constants[codes] = np.clip(steps, -(2.0**31), 2.0**31 - 128).astype(np.int32)
        else:
            scale, point = (_read_part(constants, node, i) for i in (1, 2))
            options = {"axis": node.attributes.get("axis", 1), "block_size": node.attributes.get("block_size", 0)}
            dtype = graph.constants[codes].dtype
            constants[codes] = np.asarray(quantize_linear(value, scale, point, output_dtype=dtype, **options))
    return dataclasses.replace(graph, constants=constants)


def _list_blocking(graph: Graph) -> set[str]:
    """Return the operators on codes that have no derivative, also in subgraphs."""
    found = {node.op for node in graph.nodes if node.op in _BLOCKING or node.op.startswith("QLinear")}
    bodies = [value for node in graph.nodes for value in node.attributes.values() if isinstance(value, Graph)]
    return found.union(*(_list_blocking(body) for body in bodies))


def _list_lost(graph: Graph, fake: Collection[str], readers: Mapping[str, list[Node]]) -> set[str]:
    """Return the readers of codes that stay integers, where the gradient of what is before them would be lost."""
    codes = [
        node.outputs[0]
        for node in graph.nodes
        if node.op == "QuantizeLinear" and node.outputs[0] not in fake and node.inputs[0] not in graph.inputs
    ]
    lost = set()
    for name in codes:  # grows by what is arranged
        for use in readers[name]:
            if use.op in _ARRANGING:
                codes.append(use.outputs[0])
            else:
                lost.add(f"{use.op} of the codes of QuantizeLinear")
    return lost


def _match_fake(graph: Graph, node: Node, readers: Mapping[str, list[Node]]) -> set[str]:
    """Return the tensors of codes of a QuantizeLinear that are read as floats only, with its own constant scale."""
    if node.op != "QuantizeLinear" or node.inputs[1] not in graph.constants:
        return set()
    parts = [graph.constants.get(name) for name in node.inputs[1:] if name]
    pending, found = [node.outputs[0]], set()
    while pending:
        name = pending.pop()
        uses = readers[name]
        found.add(name)
        if name in graph.outputs or not uses:
            return set()
        for use in uses:
            # A scale for each index of an axis does not follow the elements. The largest code stands for the
            # largest value with a positive scale only.
            scale: Any = parts[0]
            is_arranged = use.op in _ARRANGING and use.inputs[0] == name and scale.size == 1
            if is_arranged and (use.op != "MaxPool" or scale.reshape(()) > 0):
                pending.append(use.outputs[0])
                continue
            others = [graph.constants.get(part) for part in use.inputs[1:] if part]
            if use.op != "DequantizeLinear" or len(parts) != len(others):
                return set()
            if any(a is None or b is None or not np.array_equal(a, b) for a, b in zip(parts, others, strict=True)):
                return set()
    return found


def _are_alike(uses: Sequence[Node]) -> bool:
    """Return whether all readers of codes make the same floats of them."""
    return all(use.op == "DequantizeLinear" for use in uses) and all(
        use.inputs == uses[0].inputs and use.attributes == uses[0].attributes for use in uses
    )


def _has_constant_codes(graph: Graph, node: Node) -> bool:
    if node.op != "DequantizeLinear":
        return False
    parts = [graph.constants.get(name) for name in node.inputs if name]
    return all(part is not None for part in parts) and parts[0].dtype in (*_CODES, dtypes.INT32)  # type: ignore[union-attr]


def _make_fake(graph: Graph, node: Node) -> Node:
    """Return the node that quantizes and dequantizes at once."""
    point = graph.constants.get("".join(node.inputs[2:3]))
    dtype: Any = np.dtype(np.uint8) if point is None else point.dtype
    if node.op == "DequantizeLinear":
        dtype = graph.constants[node.inputs[0]].dtype
    kept = {key: node.attributes[key] for key in ("axis", "block_size") if key in node.attributes}
    attributes = {**kept, "dtype": dtype}
    return dataclasses.replace(node, op="FakeQuantize", domain=_DOMAIN, attributes=attributes)


def _pass_on(node: Node) -> Node:
    return dataclasses.replace(node, op="Identity", domain="", inputs=node.inputs[:1], attributes={})


def _read_part(constants: Mapping[str, np.ndarray], node: Node, position: int) -> Any:
    """Return a scale or a zero point as jaxquant's operators take it, or None."""
    if len(node.inputs) <= position or not node.inputs[position]:
        return None
    array = constants[node.inputs[position]]
    return jnp.asarray(array.reshape(()) if array.size == 1 else array)


def _dequantize(graph: Graph, node: Node) -> np.ndarray:
    scale, point = (_read_part(graph.constants, node, i) for i in (1, 2))
    codes = jnp.asarray(graph.constants[node.inputs[0]])
    # A bias has rank 1, for which the default axis would be out of range.
    axis = 0 if codes.ndim == 1 else node.attributes.get("axis", 1)
    return np.asarray(
        dequantize_linear(codes, scale, point, axis=axis, block_size=node.attributes.get("block_size", 0))
    )


def _compute_accumulator_scale(graph: Graph, node: Node, producers: Any, constants: Any) -> np.ndarray | None:
    """Return the product of the scales of x and w for a bias, in the shape of its scale; None if there is none."""
    for reader in graph.nodes:
        if reader.op not in ("Conv", "Gemm") or node.outputs[0] not in reader.inputs[2:3]:
            continue
        sources = [producers.get(name) for name in reader.inputs[:2]]
        if any(source is None or source.op != "DequantizeLinear" for source in sources):
            return None
        left, right = (constants.get(source.inputs[1]) for source in sources)
        shape = constants[node.inputs[1]].shape
        if left is None or right is None or left.size != 1 or right.size != int(np.prod(shape)):
            return None
        return (left.reshape(()) * right.reshape(-1)).astype(np.float32).reshape(shape)
    return None


# Products of codes as products of floats between DequantizeLinear and QuantizeLinear, for training, and their return.
#
# `export` writes a contraction of quantized activations and weights with a float result as QuantizeLinear,
# MatMulInteger, Cast and Mul, where Mul multiplies by the product of both scales. The integers have no derivative. The
# same numbers are a MatMul of dequantized codes, in which both scales are numbers of their own.


# Operators that may stand between the codes and their product, and between the sums and their scale.
_RESHAPING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
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
    """A graph with products of floats in place of products of codes.

    Attributes:
        graph: the graph with products of floats.
        original: the graph that it was made of.
        products: the products.
    """

    graph: Graph
    original: Graph
    products: tuple[Product, ...]

    def fold(self, quantized: Graph) -> Graph:
        """Return the original graph with the codes and scales of `graph`, which has the constants of `quantized`."""
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
    readers = list_readers(graph.nodes)
    graph = _dequantize_outputs(graph, producers, readers)
    products = [_read_product(graph, node, producers, readers) for node in graph.nodes if node.op == "MatMulInteger"]
    found = tuple(product for product in products if product is not None)
    if not found:
        return Unfolded(graph, graph, ())
    constants = dict(graph.constants)
    replaced: dict[str, list[Node]] = {}
    for product in found:
        nodes = [*_dequantize_chain(product), *_multiply(product, constants)]
        constants[product.scale] = _compute_weight_scale(constants, product)
        replaced[product.node.outputs[0]] = nodes
        # The products are reals already.
        (sums,) = (name for name in product.scaling.inputs if name != product.factor)
        same = dataclasses.replace(product.scaling, op="Identity", inputs=(sums,), attributes={})
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
    """Return a graph with DequantizeLinear before its outputs where `export` has written its arithmetic.

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
    chain = _match_chain(graph, node.inputs[0], producers) if node.op == "Cast" and len(factors) == 1 else None
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
    chain = _match_chain(graph, a, producers)
    if weights is None or weights.ndim != 2 or len(readers[b]) != 1 or chain is None:
        return None
    points = [[*part.inputs, "", ""][place] for part, place in ((chain[0], 2), (node, 2))]
    left, right = (graph.constants.get(name, np.zeros(())) if name else np.zeros(()) for name in points)
    scaling, between = _match_scaling(node, readers, set(graph.outputs))
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
    # The constant of the product becomes the constant of the scale, unless other nodes read it.
    scale = factor if len(readers[factor]) == 1 else f"{b}.scale"
    return Product(node, chain, scaling, scale, factor)


def _match_chain(graph: Graph, name: str, producers: Mapping[str, Node]) -> tuple[Node, ...] | None:
    """Return the nodes from a QuantizeLinear with a single constant scale to its codes, or None."""
    chain: list[Node] = []
    while (node := producers.get(name)) is not None:
        chain.insert(0, node)
        if node.op == "QuantizeLinear":
            scale = graph.constants.get(node.inputs[1])
            is_known = len(node.inputs) < 3 or not node.inputs[2] or node.inputs[2] in graph.constants
            return tuple(chain) if scale is not None and scale.size == 1 and is_known else None
        if node.op not in _RESHAPING:
            return None
        name = node.inputs[0]
    return None


def _match_scaling(
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
    # A reshape splits the columns, which are the last dimension, if the factor has the same last dimensions.
    ends = [tuple(int(n) for n in target[len(target) - len(shape) :]) for target in targets if target is not None]
    return factor.size == columns and all(end == shape for end in ends) and (bool(ends) or len(shape) == 1)


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


def _compute_weight_scale(constants: Mapping[str, np.ndarray], product: Product) -> np.ndarray:
    """Return the scale of the weights: the graph has its product with the scale of the activations."""
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
