"""Fusing of DequantizeLinear, operator, QuantizeLinear into operators on codes, by ONNX Runtime's rules."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .graph import WINDOW_SUM, Graph, Node, find_small_powers, select_live

_EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))
# Operators that ONNX Runtime moves quantization past; each moves or selects elements of its first input.
_MOVING = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
# Operators that it runs on codes if they have the same scale and zero point before and after.
_SANDWICHED = (*_MOVING, "Flatten", "Expand", "Gather", "Identity")
# Operators that add their operands.
_SUMS = ("Add", "Sub", "Sum")
# Operators that begin with a sum or a difference of elements; in an exported model they do as JAX does.
_INNER_SUMS = (
    *("ReduceMean", "ReduceSum", "ReduceLogSumExp", "ReduceSumSquare", "CumSum", "AveragePool", "GlobalAveragePool"),
    *("Softmax", "LogSoftmax", "BatchNormalization", "LayerNormalization", "InstanceNormalization", "Resize"),
    *("GroupNormalization", "MeanVarianceNormalization", "SkipLayerNormalization", "HardSigmoid", "HardSwish"),
)
# Operators through which XLA sees that a sum reads a product.
_PASSING = (
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Flatten", "Expand", "Gather", "Identity", "Split"),
    *("Tile", "Neg"),
)
# How far the bounds of a Clip may be inside those of the codes in ONNX Runtime.
_CLOSE = float(np.finfo(np.float32).eps)


def fuse_graph(graph: Graph, is_exported: bool = False) -> Graph:
    """Return a graph, and its subgraphs, with the patterns that ONNX Runtime fuses as operators on codes.

    The rules are those of ONNX Runtime 1.31 and 1.32 for x86-64 with all optimizations. What it leaves in floats stays
    in floats.
    """
    nodes = []
    for node in graph.nodes:
        inner = {n: fuse_graph(v, is_exported) if isinstance(v, Graph) else v for n, v in node.attributes.items()}
        body = None if node.body is None else fuse_graph(node.body, is_exported)
        nodes.append(dataclasses.replace(node, attributes=inner, body=body))
    fuser = _Fuser(dataclasses.replace(graph, nodes=tuple(nodes)), is_exported)
    return fuser.apply_rules()


class _Fuser:
    """The nodes of a graph while they are replaced."""

    def __init__(self, graph: Graph, is_exported: bool) -> None:
        self.graph = graph
        self.is_exported = is_exported
        self.sums = _SUMS if is_exported else (*_SUMS, *_INNER_SUMS)
        self.nodes = list(graph.nodes)
        self.constants = dict(graph.constants)
        self.literals = set(graph.literals)
        self.powers = find_small_powers(graph)

    def apply_rules(self) -> Graph:
        """Apply all rules, in ONNX Runtime's order."""
        self._index()
        if any(node.op in ("QuantizeLinear", "DequantizeLinear") for node in self.nodes):
            rules = (self._drop_identities, self._drop_relu, self._insert_pairs, self._insert_pairs, self._insert_pairs)
            for rule in (*rules, self._use_uint8, self._select, self._drop_conversions, self._drop_pairs):
                rule()
                self.nodes = list(select_live(self.nodes, self.graph.outputs))
                self._index()
        if self.is_exported:
            self._sum_windows()
        # Last, because the rules before look for Mul.
        self._expand_powers()
        self._round_products()
        nodes = select_live(self.nodes, self.graph.outputs)
        read = {*self.graph.outputs, *(name for node in nodes for name in node.list_reads())}
        constants = {name: array for name, array in self.constants.items() if name in read}
        return dataclasses.replace(self.graph, nodes=nodes, constants=constants, literals=frozenset(self.literals))

    def _sum_windows(self) -> None:
        """Make a sum of a mean times its number of elements: `export` writes it so, because ONNX has no such sums."""
        for place, node in enumerate(self.nodes):
            mean = self.producers.get(node.inputs[0]) if node.op == "Mul" else None
            if mean is None or mean.op != "AveragePool" or not mean.attributes.get("count_include_pad"):
                continue
            count, size = self.constants.get(node.inputs[1]), math.prod(mean.attributes["kernel_shape"])
            if count is not None and count.size == 1 and count.item() == size:
                attributes = {**mean.attributes, WINDOW_SUM: 1}
                self.nodes[place] = dataclasses.replace(mean, outputs=node.outputs, attributes=attributes)

    def _index(self) -> None:
        """Find the producer and the readers of each name."""
        self.producers = {name: node for node in self.nodes for name in node.outputs if name}
        self.readers: dict[str, list[Node]] = collections.defaultdict(list)
        for node in self.nodes:
            for name in node.list_reads():
                self.readers[name].append(node)

    def find_source(self, name: str) -> Node | None:
        """Return the DequantizeLinear that makes a value, if its scale is constant."""
        node = self.producers.get(name)
        if node is None or node.op != "DequantizeLinear" or self.find_codes_dtype(node) is None:
            return None
        # ONNX Runtime's rules want a constant scale and zero point.
        return node if all(part in self.constants for part in node.inputs[1:] if part) else None

    def find_sink(self, node: Node) -> Node | None:
        """Return the QuantizeLinear that is the only reader of a node, if its scale is constant."""
        readers = self.readers[node.outputs[0]]
        if len(readers) != 1 or readers[0].op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
            return None
        (sink,) = readers
        if sink.inputs[0] != node.outputs[0]:
            return None
        return sink if all(part in self.constants for part in sink.inputs[1:] if part) else None

    def find_codes_dtype(self, node: Node) -> np.dtype | None:
        """Return the dtype of the codes of a DequantizeLinear or QuantizeLinear, or None if it is unknown."""
        point = "".join(node.inputs[2:3])
        if point:
            return self.constants[point].dtype if point in self.constants else None
        if node.op == "QuantizeLinear":
            return None if node.attributes.get("output_dtype") else np.dtype(np.uint8)
        codes = node.inputs[0]
        if codes in self.constants:
            return self.constants[codes].dtype
        source = self.producers.get(codes)
        return self.find_codes_dtype(source) if source is not None and source.op == "QuantizeLinear" else None

    def is_per_tensor(self, node: Node) -> bool:
        """Return whether a QuantizeLinear or DequantizeLinear has a single scale."""
        return self.constants[node.inputs[1]].size == 1

    def read_affine(self, node: Node) -> tuple[str, str]:
        """Return the names of the scale and of the zero point, which is made if the node has none."""
        scale, point = [*node.inputs[1:3], ""][:2]
        if point:
            return scale, point
        dtype = self.find_codes_dtype(node)
        name = f"{scale}/zero point of {dtype}"
        self.constants[name] = np.zeros(self.constants[scale].shape, dtype)
        self.literals.add(name)
        return scale, name

    def have_same_affine(self, source: Node, sink: Node) -> bool:
        """Return whether two nodes have the same single scale and zero point."""
        if not (self.is_per_tensor(source) and self.is_per_tensor(sink)):
            return False
        parts = (self.read_affine(node) for node in (source, sink))
        left, right = ([self.constants[name].reshape(()) for name in pair] for pair in parts)
        return all(a.dtype == b.dtype and a == b for a, b in zip(left, right, strict=True))

    def _drop_identities(self) -> None:
        """Drop Identity, and Dropout without a mask: they would hide a pattern."""
        names = {
            node.outputs[0]: node.inputs[0]
            for node in self.nodes
            if node.op == "Identity" or (node.op == "Dropout" and len(node.inputs) == 1 and not any(node.outputs[1:]))
        }
        self._rename_inputs({name: source for name, source in names.items() if name not in self.graph.outputs})

    def _drop_relu(self) -> None:
        """Drop Relu and Clip before a QuantizeLinear that saturates at the same values."""
        renamed: dict[str, str] = {}
        for node in self.nodes:
            if node.op not in ("Relu", "Clip"):
                continue
            sink = self.find_sink(node)
            if sink is None or not self.is_per_tensor(sink) or self.find_codes_dtype(sink) not in _EIGHT_BITS:
                continue
            bounds = self._find_bounds(node)
            scale, point = (np.asarray(self.constants[name]).reshape(()) for name in self.read_affine(sink))
            info = np.iinfo(point.dtype)
            low, high = ((float(code) - float(point)) * float(scale) for code in (info.min, info.max))
            # The bounds may be wider than the values of the codes: QuantizeLinear saturates first.
            if bounds is not None and bounds[0] - low <= _CLOSE and high - bounds[1] <= _CLOSE:
                renamed[node.outputs[0]] = node.inputs[0]
        self._rename_inputs(renamed)

    def _find_bounds(self, node: Node) -> tuple[float, float] | None:
        """Return the bounds of Relu or Clip, if they are constant."""
        if node.op == "Relu":
            return 0.0, np.inf
        bounds = [node.attributes.get("min", -np.inf), node.attributes.get("max", np.inf)]
        for i, name in enumerate(node.inputs[1:3]):
            if name and name not in self.constants:
                return None
            bounds[i] = float(self.constants[name].reshape(())) if name else bounds[i]
        return bounds[0], bounds[1]

    def _rename_inputs(self, renamed: Mapping[str, str]) -> None:
        def resolve(name: str) -> str:
            while name in renamed:
                name = renamed[name]
            return name

        if renamed:
            self.nodes = [
                dataclasses.replace(node, inputs=tuple(resolve(name) for name in node.inputs)) for node in self.nodes
            ]

    def _insert_pairs(self) -> None:
        """Insert QuantizeLinear and DequantizeLinear behind, or before, an operator that moves quantized elements."""
        result: list[Node] = []
        for node in self.nodes:
            is_moving = node.op in _MOVING and not node.domain and not any(node.outputs[1:])
            source, sink = (self.find_source(node.inputs[0]), self.find_sink(node)) if is_moving else (None, None)
            # ONNX Runtime moves quantization with a single scale only.
            if source is not None and self.is_per_tensor(source) and not self._feeds_quantization(node):
                inner = f"{node.outputs[0]}/moved"
                pair = self._make_pair(source, inner, node.outputs[0])
                result += [dataclasses.replace(node, outputs=(inner,)), *pair]
            elif source is None and sink is not None and self.is_per_tensor(sink):
                inner = f"{node.outputs[0]}/before"
                pair = self._make_pair(sink, node.inputs[0], inner)
                result += [*pair, dataclasses.replace(node, inputs=(inner, *node.inputs[1:]))]
            else:
                result.append(node)
        self.nodes = result

    def _feeds_quantization(self, node: Node) -> bool:
        return any(reader.op == "QuantizeLinear" for reader in self.readers[node.outputs[0]])

    def _make_pair(self, like: Node, x: str, y: str) -> list[Node]:
        """Return QuantizeLinear and DequantizeLinear from x to y with the scale and zero point of a node."""
        affine, codes = self.read_affine(like), f"{y}/codes"
        attributes = {key: like.attributes[key] for key in ("axis",) if key in like.attributes}
        nodes = (("QuantizeLinear", x, codes), ("DequantizeLinear", codes, y))
        return [
            dataclasses.replace(like, op=op, inputs=(source, *affine), outputs=(target,), attributes=attributes)
            for op, source, target in nodes
        ]

    def _use_uint8(self) -> None:
        """Give QuantizeLinear to int8 with a single DequantizeLinear behind it uint8, as ONNX Runtime does on x86-64.

        The zero point is 128 more. The values are the same, but kernels that add the zero point before they round may
        round another way.
        """
        points: dict[Node, str] = {}
        for node in self.nodes:
            if node.op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
                continue
            readers = self.readers[node.outputs[0]]
            if len(readers) != 1 or readers[0].op != "DequantizeLinear" or self.find_codes_dtype(node) != np.int8:
                continue
            target = readers[0].outputs[0]
            uses = len(self.readers[target]) + (target in self.graph.outputs)
            constant = all(part in self.constants for part in (*node.inputs[1:], *readers[0].inputs[1:]) if part)
            # Another reader of the codes or of the values would see the change, and ONNX Runtime leaves the pair alone.
            if uses == 1 and constant and self.have_same_affine(node, readers[0]):
                point = node.inputs[2]
                name = f"{point}/uint8"
                self.constants[name] = (self.constants[point].astype(np.int16) + 128).astype(np.uint8)
                self.literals.add(name)
                points[node] = points[readers[0]] = name
        self.nodes = [
            dataclasses.replace(node, inputs=(*node.inputs[:2], points[node])) if node in points else node
            for node in self.nodes
        ]

    def _drop_conversions(self) -> None:
        """Run operators that move elements on codes, between DequantizeLinear and an equal QuantizeLinear."""
        replaced: dict[str, Node] = {}
        for node in self.nodes:
            if node.op not in _SANDWICHED or node.domain or any(node.outputs[1:]):
                continue
            source, sink = self.find_source(node.inputs[0]), self.find_sink(node)
            if source is None or sink is None or not self.have_same_affine(source, sink):
                continue
            if _allows_codes(node, self.find_codes_dtype(source)):
                # A chain of such operators becomes a chain on codes.
                codes = source.inputs[0]
                replaced[sink.outputs[0]] = dataclasses.replace(
                    node, inputs=(codes, *node.inputs[1:]), outputs=sink.outputs
                )
        self.nodes = [replaced.get(node.outputs[0], node) for node in self.nodes]

    def _drop_pairs(self) -> None:
        """Drop DequantizeLinear and an equal QuantizeLinear behind it, which give back the same codes."""
        renamed: dict[str, str] = {}
        for node in self.nodes:
            if node.op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
                continue
            source = self.find_source(node.inputs[0])
            constant = all(part in self.constants for part in node.inputs[1:] if part)
            if source is not None and constant and self.have_same_affine(source, node):
                renamed[node.outputs[0]] = source.inputs[0]
        self._rename_inputs(renamed)

    def _select(self) -> None:
        """Replace operators between DequantizeLinear and QuantizeLinear by operators on codes."""
        from .fuse_rules import select_operator

        replacements: dict[str, list[Node]] = {}
        for node in self.nodes:
            match = select_operator(self, node)
            if match is not None:
                last, fused = match
                replacements[last.outputs[0]] = fused
        self.nodes = [new for node in self.nodes for new in replacements.get(node.outputs[0], [node])]

    def _expand_powers(self) -> None:
        """Replace x ** 2 by x * x and x ** 3 by (x * x) * x, as ONNX Runtime computes them."""
        nodes = []
        for node in self.nodes:
            if node.op != "Pow" or node.domain or node.inputs[1] not in self.powers:
                nodes.append(node)
                continue
            (x, power), result = node.inputs, node.outputs[0]
            left = x
            if self.powers[power] == 3:
                left = f"{result}/square"
                nodes.append(dataclasses.replace(node, op="Mul", inputs=(x, x), outputs=(left,)))
            nodes.append(dataclasses.replace(node, op="Mul", inputs=(left, x)))
        self.nodes = nodes
        self._index()

    def _round_products(self) -> None:
        """Mark the products that a sum reads, which XLA would contract with it into one operation that rounds once."""
        nodes = []
        for node in self.nodes:
            if node.op == "Mul" and not node.domain and self._feeds_sum(node):
                node = dataclasses.replace(node, op="RoundedMul", domain="jaxquant")
            nodes.append(node)
        self.nodes = nodes

    def _feeds_sum(self, node: Node) -> bool:
        """Return whether a sum reads the results of a node, also behind operators that only move elements."""
        pending, seen = [node], {node}
        while pending:
            for reader in [reader for name in pending.pop().outputs for reader in self.readers[name]]:
                if reader.op in self.sums:
                    return True
                is_passing = reader.op in _PASSING and not reader.domain and not self.is_exported
                if is_passing and reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
        return False


def _allows_codes(node: Node, dtype: Any) -> bool:
    """Return whether an operator runs on codes of this dtype."""
    # MaxPool has kernels for codes of 8 bits only, and int32 is no dtype of codes.
    return dtype in _EIGHT_BITS or (node.op != "MaxPool" and dtype is not None and dtype != jnp.int32)
