"""Fusing of DequantizeLinear, operator, QuantizeLinear into operators on codes, by ONNX Runtime's rules."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._core.dtypes import EIGHT_BITS
from .graph import ROUNDED, WINDOW_SUM, Graph, Node, list_readers, list_small_powers, select_live

_PAIR = "DequantizeLinear"
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
# Operators that ONNX Runtime moves a Transpose past.
_ELEMENTWISE = (
    *("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Elu", "Neg", "Abs", "Cast"),
    *("Add", "Sub", "Mul", "Div", "Max", "Min"),
)
# How often ONNX Runtime applies the rules of its first level.
_MOST_STEPS = 10


def fuse_graph(graph: Graph, is_exported: bool = False, fusions: str = "all") -> tuple[Graph, tuple[Deviation, ...]]:
    """Return a graph, and its subgraphs, with the patterns that ONNX Runtime fuses as operators on codes.

    The rules are ONNX Runtime's, versions 1.31 and 1.32 for x86-64 with all optimizations. What it leaves in floats
    stays in floats.

    Args:
        graph: the graph.
        is_exported: whether `export` wrote it.
        fusions: "all"; "safe" for the patterns that change the value by no more than rounding; or "none".

    Returns:
        The graph, and the nodes of it that ONNX Runtime computes otherwise than the model says.
    """
    found: list[Deviation] = []
    return _fuse(graph, is_exported, fusions, found), tuple(found)


def _fuse(graph: Graph, is_exported: bool, fusions: str, deviations: list[Deviation]) -> Graph:
    options: Any = (is_exported, fusions, deviations)
    nodes = []
    for node in graph.nodes:
        inner = {n: _fuse(v, *options) if isinstance(v, Graph) else v for n, v in node.attributes.items()}
        body = None if node.body is None else _fuse(node.body, *options)
        nodes.append(dataclasses.replace(node, attributes=inner, body=body))
    return _Fuser(dataclasses.replace(graph, nodes=tuple(nodes)), *options).apply_rules()


class _Fuser:
    """The nodes of a graph while they are replaced."""

    def __init__(self, graph: Graph, is_exported: bool, fusions: str, deviations: list[Deviation]) -> None:
        self.graph = graph
        self.is_exported = is_exported
        self.fusions = fusions
        self.deviations = deviations
        self.sums = _SUMS if is_exported else (*_SUMS, *_INNER_SUMS)
        self.nodes = list(graph.nodes)
        self.constants = dict(graph.constants)
        self.literals = set(graph.literals)
        self.powers = list_small_powers(graph)
        self.names = {*graph.inputs, *graph.outputs, *graph.constants}
        for node in graph.nodes:
            self.names.update(node.outputs, node.list_reads())
        self.zero_points: dict[tuple[str, np.dtype], str] = {}

    def apply_rules(self) -> Graph:
        """Apply all rules, in ONNX Runtime's order."""
        self._index()
        has_codes = any(node.op in ("QuantizeLinear", "DequantizeLinear") for node in self.nodes)
        if has_codes and self.fusions != "none":
            first, later = [self._merge_pairs, self._insert_pairs], [self._drop_relu]
            # The transpositions of an exported model are the function's own, which XLA removes.
            if not self.is_exported:
                # Pairs that are merged after a bias was quantized change its value, which "safe" does not allow.
                if self.fusions == "all":
                    first.append(self._quantize_parameters)
                else:
                    later.insert(0, self._quantize_parameters)
                first.append(self._move_transposes)
            self._apply(self._drop_identities)
            for _ in range(_MOST_STEPS):
                before = self.nodes
                self._apply(*first)
                if self.nodes == before:
                    break
            # Relu and Clip are dropped only now, so that the pairs on either side of one stay two.
            self._apply(*later, self._use_uint8, self._select, self._drop_conversions, self._drop_pairs)
        if self.is_exported:
            self._sum_windows()
        # Last, because the rules before look for Mul.
        self._expand_powers()
        self._round_products()
        nodes = select_live(self.nodes, self.graph.outputs)
        read = {*self.graph.outputs, *(name for node in nodes for name in node.list_reads())}
        constants = {name: array for name, array in self.constants.items() if name in read}
        return dataclasses.replace(self.graph, nodes=nodes, constants=constants, literals=frozenset(self.literals))

    def _apply(self, *rules: Callable[[], None]) -> None:
        """Apply rules one after the other, without the nodes that they leave without readers."""
        for rule in rules:
            rule()
            self.nodes = list(select_live(self.nodes, self.graph.outputs))
            self._index()

    def _sum_windows(self) -> None:
        """Make a sum of a mean times its number of elements: `export` writes it so, because ONNX has no such sums."""
        for index, node in enumerate(self.nodes):
            mean = self.producers.get(node.inputs[0]) if node.op == "Mul" else None
            if mean is None or mean.op != "AveragePool" or not mean.attributes.get("count_include_pad"):
                continue
            count, size = self.constants.get(node.inputs[1]), math.prod(mean.attributes["kernel_shape"])
            if count is not None and count.size == 1 and count.item() == size:
                attributes = {**mean.attributes, WINDOW_SUM: 1}
                self.nodes[index] = dataclasses.replace(mean, outputs=node.outputs, attributes=attributes)

    def allows_deviation(self, node: Node, model: str, runtime: str, can_follow: bool = True) -> bool:
        """Note that a fusion changes the value by more than rounding; return whether it is made.

        Args:
            node: the node.
            model: what the model says.
            runtime: what ONNX Runtime computes.
            can_follow: whether "all" means to do the same.
        """
        if self.fusions == "safe":
            return False
        deviation = Deviation(node.label, node.op, model, runtime, can_follow)
        if deviation not in self.deviations:  # rules are applied several times
            self.deviations.append(deviation)
        return can_follow

    def allows_scale(self, op: str, node: Node) -> bool:
        """Return whether an operator may run on the codes of a DequantizeLinear, or before a QuantizeLinear."""
        dtype = self.derive_codes_dtype(node)
        return dtype is not None and allows_scale(op, self.constants[node.inputs[1]], dtype)

    def _index(self) -> None:
        """Find the producer and the readers of each name."""
        self.producers = {name: node for node in self.nodes for name in node.outputs if name}
        self.readers = list_readers(self.nodes)

    def find_reader(self, node: Node) -> Node | None:
        """Return the first node that reads a node's result, if there is one."""
        return next(iter(self.readers[node.outputs[0]]), None)

    def match_dequantize(self, name: str) -> Node | None:
        """Return the DequantizeLinear that makes a value, if its scale is constant."""
        node = self.producers.get(name)
        if node is None or node.op != "DequantizeLinear" or self.derive_codes_dtype(node) is None:
            return None
        # ONNX Runtime's rules want a constant scale and zero point.
        return node if self.has_constants(node) else None

    def match_quantize(self, node: Node) -> Node | None:
        """Return the QuantizeLinear that is the only reader of a node, if its scale is constant."""
        readers = self.readers[node.outputs[0]]
        if len(readers) != 1 or readers[0].op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
            return None
        (sink,) = readers
        if sink.inputs[0] != node.outputs[0]:
            return None
        return sink if self.has_constants(sink) else None

    def has_constants(self, node: Node) -> bool:
        """Return whether all inputs of a node after the first are constant, such as its scale and zero point."""
        return all(name in self.constants for name in node.inputs[1:] if name)

    def derive_codes_dtype(self, node: Node) -> np.dtype | None:
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
        return self.derive_codes_dtype(source) if source is not None and source.op == "QuantizeLinear" else None

    def is_per_tensor(self, node: Node) -> bool:
        """Return whether a QuantizeLinear or DequantizeLinear has a single scale."""
        return self.constants[node.inputs[1]].size == 1

    def read_affine(self, node: Node) -> tuple[str, str]:
        """Return the names of the scale and of the zero point, which is made if the node has none."""
        scale, point = [*node.inputs[1:3], ""][:2]
        if point:
            return scale, point
        dtype = self.derive_codes_dtype(node)
        assert dtype is not None
        name = self.zero_points.get((scale, dtype))
        if name is None:
            name = self.hold(f"{scale}/zero point of {dtype}", np.zeros(self.constants[scale].shape, dtype))
            self.zero_points[scale, dtype] = name
        return scale, name

    def make_name(self, name: str) -> str:
        """Return a name that no value has: the model may have the first choice, or a rule applies to a value twice."""
        base, count = name, 1
        while name in self.names:
            count += 1
            name = f"{base} {count}"
        self.names.add(name)
        return name

    def hold(self, name: str, array: np.ndarray) -> str:
        """Add a constant that is no parameter, and return its name, which begins with this one."""
        name = self.make_name(name)
        self.constants[name] = array
        self.literals.add(name)
        return name

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
            sink = self.match_quantize(node)
            if sink is None or not self.is_per_tensor(sink) or self.derive_codes_dtype(sink) not in EIGHT_BITS:
                continue
            bounds = self._read_bounds(node)
            scale, point = (np.asarray(self.constants[name]).reshape(()) for name in self.read_affine(sink))
            if bounds is None:
                continue
            # The bounds may be wider than the values of the codes: QuantizeLinear saturates first.
            if is_clip_redundant(bounds, scale, point):
                renamed[node.outputs[0]] = node.inputs[0]
            elif drops_clip(node.op, bounds, scale, point):
                model = f"cuts values off at {bounds[0]:.9g} and {bounds[1]:.9g}, before the scale {scale:.9g}"
                self.allows_deviation(node, model, "drops it", can_follow=False)
        self._rename_inputs(renamed)

    def _read_bounds(self, node: Node) -> tuple[float, float] | None:
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
        """Insert QuantizeLinear and DequantizeLinear before and behind operators that move quantized elements."""
        sources = [node for node in self.nodes if node.op == "DequantizeLinear"]
        self._insert_before()
        self._index()
        self._insert_behind(sources)

    def _insert_before(self) -> None:
        """Insert a pair before each operator of a chain that leads to a QuantizeLinear, up to a DequantizeLinear."""
        pairs: dict[str, list[Node]] = {}
        for sink in self.nodes:
            if sink.op != "QuantizeLinear" or not self._can_spread(sink):
                continue
            node = self._match_mover(sink.inputs[0])
            while node is not None:
                (x, *_), y = node.inputs, node.outputs[0]
                maker = self.producers.get(x)
                # A value that something else reads, too, is not quantized for it.
                if maker is not None and (maker.op == "DequantizeLinear" or not self._has_one_use(x)):
                    break
                pairs[y] = self._make_pair(sink, x, self.make_name(f"{y}/before"))
                node = None if maker is None else self._match_mover(x)
        nodes: list[Node] = []
        for node in self.nodes:
            pair = pairs.get(node.outputs[0], [])
            inputs = (pair[-1].outputs[0], *node.inputs[1:]) if pair else node.inputs
            nodes += [*pair, dataclasses.replace(node, inputs=inputs) if pair else node]
        self.nodes = nodes

    def _insert_behind(self, sources: Sequence[Node]) -> None:
        """Insert a pair behind each operator of the chains that begin at these DequantizeLinear nodes."""
        pairs: dict[str, list[Node]] = {}
        renamed: dict[Node, dict[str, str]] = collections.defaultdict(dict)
        for source in sources:
            pending = self._list_movers(source.outputs[0]) if self._can_spread(source) else []
            while pending:
                y = pending.pop().outputs[0]
                readers = [reader for reader in self.readers[y] if reader.op != "QuantizeLinear"]
                is_output = y in self.graph.outputs
                if (is_output and self.readers[y]) or not (is_output or readers):
                    continue
                moved = self.make_name(f"{y}/moved")
                if len(readers) == len(self.readers[y]):
                    pairs[y] = self._make_pair(source, moved, y)
                else:
                    pairs[y] = self._make_pair(source, y, moved)
                    for reader in readers:
                        renamed[reader][y] = moved
                pending += self._list_movers(y)
        nodes: list[Node] = []
        for node in self.nodes:
            node, pair = _rename(node, renamed.get(node, {})), pairs.get(node.outputs[0], [])
            if pair:
                node = dataclasses.replace(node, outputs=(pair[0].inputs[0], *node.outputs[1:]))
            nodes += [node, *pair]
        self.nodes = nodes

    def _can_spread(self, node: Node) -> bool:
        """Return whether a QuantizeLinear or DequantizeLinear has one constant scale, with which codes survive a pair.

        Values that go through codes in their order need no positive scale, and a maximum is one of them.
        """
        is_constant = self.has_constants(node)
        return is_constant and self.is_per_tensor(node) and self.allows_scale(_PAIR, node)

    def _has_one_use(self, name: str) -> bool:
        return len(self.readers[name]) == 1 and name not in self.graph.outputs

    def _match_mover(self, name: str) -> Node | None:
        """Return the operator that moves elements into a value with one use."""
        node = self.producers.get(name)
        return node if node is not None and _moves(node) and self._has_one_use(name) else None

    def _list_movers(self, name: str) -> list[Node]:
        """Return the operators that move the elements of a value."""
        return [node for node in self.readers[name] if _moves(node) and node.inputs[0] == name]

    def _make_pair(self, like: Node, x: str, y: str) -> list[Node]:
        """Return QuantizeLinear and DequantizeLinear from x to y with the scale and zero point of a node."""
        affine, codes = self.read_affine(like), self.make_name(f"{y}/codes")
        attributes = {key: like.attributes[key] for key in ("axis",) if key in like.attributes}
        nodes = (("QuantizeLinear", x, codes), ("DequantizeLinear", codes, y))
        return [
            dataclasses.replace(like, op=op, inputs=(source, *affine), outputs=(target,), attributes=attributes)
            for op, source, target in nodes
        ]

    def _match_pair(self, node: Node | None) -> Node | None:
        """Return the DequantizeLinear that alone reads a QuantizeLinear of 8 bits and has its scale and zero point."""
        if node is None or node.op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
            return None
        readers = self.readers[node.outputs[0]]
        if len(readers) != 1 or readers[0].op != "DequantizeLinear":
            return None
        for end in (node, readers[0]):
            has_parts = len(end.inputs) == 3 and all(part in self.constants for part in end.inputs[1:])
            if not has_parts or self.derive_codes_dtype(end) not in EIGHT_BITS:
                return None
        return readers[0] if self.have_same_affine(node, readers[0]) else None

    def _merge_pairs(self) -> None:
        """Make one pair of two pairs of QuantizeLinear and DequantizeLinear that follow each other.

        Their scales may differ: the range is what both of them hold. Of several pairs, the first and the second become
        one, the third and the fourth, and so on; the next step merges the results.
        """
        replaced: dict[Node, Node] = {}
        dropped: set[Node] = set()
        for head in self.nodes:
            end = None if head in dropped or head in replaced else self._match_pair(head)
            sink = None if end is None or end.outputs[0] in self.graph.outputs else self.match_quantize(end)
            last = self._match_pair(sink)
            if end is None or sink is None or last is None:
                continue
            if self.derive_codes_dtype(sink) != self.derive_codes_dtype(head):
                continue
            affine = self._share_range(head, sink)
            replaced[head] = dataclasses.replace(head, inputs=(head.inputs[0], *affine))
            replaced[last] = dataclasses.replace(last, inputs=(head.outputs[0], *affine))
            dropped |= {end, sink}
        self.nodes = [replaced.get(node, node) for node in self.nodes if node not in dropped]

    def _share_range(self, left: Node, right: Node) -> tuple[str, str]:
        """Return the names of the scale and zero point of the values that both of two pairs can hold."""
        if self.have_same_affine(left, right):
            return left.inputs[1], left.inputs[2]
        info = np.iinfo(self.derive_codes_dtype(left))  # type: ignore[arg-type]
        bounds = []
        for node in (left, right):
            scale, point = (self.constants[name].reshape(()) for name in node.inputs[1:3])
            steps = (np.float32(code - int(point)) for code in (info.min, info.max))
            bounds.append([count * np.float32(scale) for count in steps])
        low, high = max(bounds[0][0], bounds[1][0]), min(bounds[0][1], bounds[1][1])
        scale = (high - low) / np.float32(info.max - info.min)
        code = np.float32(info.min) - low / scale
        point = np.copysign(np.floor(np.abs(code) + np.float32(0.5)), code)  # half away from zero
        label = f"{left.outputs[0]} and {right.outputs[0]}"  # a pair may be merged several times
        return (
            self.hold(f"{label}/shared scale", np.asarray(scale, np.float32)),
            self.hold(f"{label}/shared zero point", np.asarray(point, info.dtype)),
        )

    def _move_transposes(self) -> None:
        """Move each Transpose behind quantization and element-wise operators if another one follows; make one of both.

        It moves past a value with several readers only if the other one undoes it. A Transpose that all operands of an
        operator have in common moves behind it, too.
        """
        following = self._list_following()
        sources: dict[str, tuple[str, tuple[int, ...]]] = {}  # each transposed value, by what it is transposed from
        nodes: list[Node] = []
        for node in self.nodes:
            names = tuple(_skip_identity(name, sources) for name in node.inputs)
            node = node if names == node.inputs else dataclasses.replace(node, inputs=names)
            y = node.outputs[0]
            if _has_perm(node):
                x, perm = node.inputs[0], tuple(node.attributes["perm"])
                x, first = sources.get(x, (x, tuple(range(len(perm)))))
                if len(first) == len(perm):
                    sources[y] = x, tuple(first[axis] for axis in perm)
                    nodes.append(_make_transpose(node, *sources[y], y))
                    continue
            operands = (
                [name for name in node.inputs if name not in self.constants] if self._is_elementwise(node) else []
            )
            perms = {sources[name][1] if name in sources else None for name in operands}
            (perm, *others) = perms or {None}
            is_free = perm is not None and bool({None, tuple(np.argsort(perm))} & following.get(y, set()))
            if perm is None or others or not (len(operands) > 1 or is_free):
                nodes.append(node)
                continue
            inputs = tuple(sources[name][0] if name in operands else name for name in node.inputs)
            sources[y] = self.make_name(f"{y}/untransposed"), perm
            moved = dataclasses.replace(node, inputs=inputs, outputs=(sources[y][0],))
            nodes += [moved, _make_transpose(node, *sources[y], y)]
        self.nodes = nodes
        self._index()
        # What is left around a Transpose that is gone are a DequantizeLinear and perhaps an equal QuantizeLinear.
        self._drop_pairs({name for y in sources if (name := _skip_identity(y, sources)) != y})

    def _list_following(self) -> dict[str, set[tuple[int, ...] | None]]:
        """Return the values that lead to a Transpose through element-wise operators and MaxPool, and the permutations.

        None stands for any permutation, where each value on the way has one reader.
        """
        found: dict[str, set[tuple[int, ...] | None]] = collections.defaultdict(set)
        for node in reversed(self.nodes):
            perms = {tuple(node.attributes["perm"]), None} if _has_perm(node) else set()
            # ONNX Runtime moves no Transpose past a float MaxPool, but it expects that it will.
            if self._is_elementwise(node) or (node.op == "MaxPool" and not node.domain):
                perms = found.get(node.outputs[0], set())
            for name in node.inputs:
                if name and name not in self.constants:
                    found[name] |= perms if self._has_one_use(name) else perms - {None}
        return found

    def _is_elementwise(self, node: Node) -> bool:
        """Return whether each element of a node's result depends on the same element of each operand, or on scalars."""
        constants = [self.constants[name] for name in node.inputs if name in self.constants]
        if node.domain or node.attributes.get("block_size") or any(array.size != 1 for array in constants):
            return False
        if node.op in ("QuantizeLinear", "DequantizeLinear"):
            return len(constants) == sum(map(bool, node.inputs[1:])) and node.inputs[0] not in self.constants
        return node.op in _ELEMENTWISE

    def _quantize_parameters(self) -> None:
        """Quantize the float weights and biases of Conv, ConvTranspose and Gemm between codes, as ONNX Runtime does.

        Weights become int8 with one scale, and biases int32 in steps of the products.
        """
        made: list[tuple[Node, list[Node]]] = []
        renamed: dict[Node, dict[str, str]] = {}
        for node in self.nodes:
            layer, last = node, node
            if node.op == "MatMul" and not node.domain:
                added = match_added_bias(self, node)
                if added is None:
                    continue
                layer, last = added
            if layer.domain or layer.op not in ("Conv", "ConvTranspose", "Gemm") or not self._leads_to_codes(last):
                continue
            x = self.producers.get(layer.inputs[0])
            source = None if x is None else self.match_dequantize(x.outputs[0])
            if source is None or not self.is_per_tensor(source):
                continue
            nodes: list[Node] = []
            scale = self._quantize_weight(layer, nodes)
            if scale is None:
                continue
            bias = "".join(layer.inputs[2:3])
            if bias in self.constants and self.constants[bias].dtype == np.float32:
                weights = self.producers.get(layer.inputs[1])
                operands = ["", source.inputs[1], "", "" if weights is None else weights.inputs[0], scale, ""]
                if not fits_int32(self, layer, self.constants[bias], operands, is_noted=bool(nodes)):
                    continue
            if nodes and not self.allows_deviation(node, "multiplies by float weights", "rounds them to int8"):
                continue
            names = {layer.inputs[1]: nodes[-1].outputs[0]} if nodes else {}
            if bias in self.constants and self.constants[bias].dtype == np.float32 and self.constants[bias].ndim == 1:
                nodes += self._quantize_bias(layer, source.inputs[1], scale)
                names[bias] = nodes[-1].outputs[0]
            elif bias and names:
                continue
            made.append((node, nodes))
            for reader in (node, last):
                renamed[reader] = names
        before = dict(made)
        result: list[Node] = []
        for node in self.nodes:
            result += [*before.get(node, ()), _rename(node, renamed.get(node, {}))]
        self.nodes = result

    def _leads_to_codes(self, node: Node) -> bool:
        """Return whether the only reader of a node is QuantizeLinear, behind Relu and Clip or not."""
        while len(node.outputs) == 1 and len(self.readers[node.outputs[0]]) == 1:
            (node,) = self.readers[node.outputs[0]]
            if node.op == "QuantizeLinear":
                return True
            if node.op not in ("Relu", "Clip"):
                return False
        return False

    def _quantize_weight(self, layer: Node, nodes: list[Node]) -> str | None:
        """Return the name of the scale of a layer's weights, or None, and add the nodes that quantize floats."""
        name = layer.inputs[1]
        source = self.producers.get(name)
        if source is not None:
            if source.op != "DequantizeLinear" or source.inputs[1] not in self.constants:
                return None
            scale = self.constants[source.inputs[1]]
            bias = self.constants.get("".join(layer.inputs[2:3]))
            if scale.size == 1 or bias is None:
                return source.inputs[1] if bias is not None else None
            expected = 1 - layer.attributes.get("transB", 0) if layer.op == "Gemm" else 0
            axis = source.attributes.get("axis", 1)
            fits = scale.shape == bias.shape and axis == expected and not source.attributes.get("block_size")
            return source.inputs[1] if fits else None
        weight = self.constants.get(name)
        if weight is None or weight.dtype != np.float32 or not weight.size:
            return None
        low, high = min(weight.min(), np.float32(0)), max(weight.max(), np.float32(0))
        scale = np.float32(1) if low == high else (high - low) / np.float32(255)
        point = np.rint(np.clip(np.float32(-128) - low / scale, np.float32(-128), np.float32(127)))
        label = f"{layer.outputs[0]}/weight"
        affine = (
            self.hold(f"{label} scale", np.asarray(scale)),
            self.hold(f"{label} zero point", np.asarray(point, np.int8)),
        )
        codes, restored = self.make_name(f"{label} codes"), self.make_name(label)
        for op, x, y in (("QuantizeLinear", name, codes), ("DequantizeLinear", codes, restored)):
            nodes.append(dataclasses.replace(layer, op=op, inputs=(x, *affine), outputs=(y,), attributes={}))
        return affine[0]

    def _quantize_bias(self, layer: Node, x_scale: str, w_scale: str) -> list[Node]:
        """Return the nodes that round a float bias to steps of the products."""
        label = f"{layer.outputs[0]}/bias"
        # As many as the weights have, so that the int32 codes have a scale for each channel or one.
        product = self.constants[x_scale].reshape(()) * self.constants[w_scale]
        scale = self.hold(f"{label} scale", product.reshape(()) if product.size == 1 else product)
        codes, restored = self.make_name(f"{label} codes"), self.make_name(label)
        inputs = (layer.inputs[2], x_scale, w_scale)
        return [
            dataclasses.replace(
                layer, op="QuantizeBias", domain="jaxquant", inputs=inputs, outputs=(codes,), attributes={}
            ),
            dataclasses.replace(
                layer, op="DequantizeLinear", inputs=(codes, scale), outputs=(restored,), attributes={"axis": 0}
            ),
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
            if len(readers) != 1 or readers[0].op != "DequantizeLinear" or self.derive_codes_dtype(node) != np.int8:
                continue
            target = readers[0].outputs[0]
            uses = len(self.readers[target]) + (target in self.graph.outputs)
            constant = all(part in self.constants for part in (*node.inputs[1:], *readers[0].inputs[1:]) if part)
            # Another reader of the codes or of the values would see the change, and ONNX Runtime leaves the pair alone.
            if uses == 1 and constant and self.have_same_affine(node, readers[0]):
                point = node.inputs[2]
                shifted = (self.constants[point].astype(np.int16) + 128).astype(np.uint8)
                points[node] = points[readers[0]] = self.hold(f"{point}/uint8", shifted)
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
            source, sink = self.match_dequantize(node.inputs[0]), self.match_quantize(node)
            if source is None or sink is None or not self.have_same_affine(source, sink):
                continue
            if _allows_codes(node, self.derive_codes_dtype(source)) and self.allows_scale(node.op, source):
                # A chain of such operators becomes a chain on codes.
                codes = source.inputs[0]
                replaced[sink.outputs[0]] = dataclasses.replace(
                    node, inputs=(codes, *node.inputs[1:]), outputs=sink.outputs
                )
        self.nodes = [replaced.get(node.outputs[0], node) for node in self.nodes]

    def _drop_pairs(self, values: Collection[str] | None = None) -> None:
        """Drop DequantizeLinear and an equal QuantizeLinear behind it, which give back the same codes.

        Only where `values` has the value between, if it is given.
        """
        renamed: dict[str, str] = {}
        for node in self.nodes:
            if node.op != "QuantizeLinear" or node.outputs[0] in self.graph.outputs:
                continue
            if values is not None and node.inputs[0] not in values:
                continue
            source = self.match_dequantize(node.inputs[0])
            constant = self.has_constants(node)
            is_same = source is not None and constant and self.have_same_affine(source, node)
            if source is not None and is_same and self.allows_scale(_PAIR, source):
                renamed[node.outputs[0]] = source.inputs[0]
        self._rename_inputs(renamed)

    def _select(self) -> None:
        """Replace operators between DequantizeLinear and QuantizeLinear by operators on codes."""
        replacements: dict[str, list[Node]] = {}
        for node in self.nodes:
            before = len(self.deviations)
            match = select_operator(self, node)
            if match is None:
                # Another rule has left the node as it is.
                self.deviations[before:] = [d for d in self.deviations[before:] if not d.is_followed]
            else:
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
                left = self.make_name(f"{result}/square")
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
            elif node.op == "DequantizeLinear" and not self.is_exported and self._feeds_sum(node):
                node = dataclasses.replace(node, attributes={**node.attributes, ROUNDED: 1})
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


def _rename(node: Node, names: Mapping[str, str]) -> Node:
    """Return a node with other names of its inputs."""
    return dataclasses.replace(node, inputs=tuple(names.get(name, name) for name in node.inputs)) if names else node


def _skip_identity(name: str, sources: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return what a value is a copy of, if its Transpose changes nothing."""
    source, perm = sources.get(name, (name, ()))
    return source if perm == tuple(range(len(perm))) else name


def _has_perm(node: Node) -> bool:
    return node.op == "Transpose" and not node.domain and "perm" in node.attributes


def _make_transpose(like: Node, x: str, perm: tuple[int, ...], y: str) -> Node:
    is_copy = perm == tuple(range(len(perm)))
    if not is_copy and _has_perm(like) and (*like.inputs, tuple(like.attributes["perm"])) == (x, perm):
        return like  # the rules have no more to do when no node changes
    op, attributes = ("Identity", {}) if is_copy else ("Transpose", {"perm": perm})
    return dataclasses.replace(like, op=op, inputs=(x,), outputs=(y,), attributes=attributes)


def _moves(node: Node) -> bool:
    """Return whether ONNX Runtime moves quantization past a node."""
    return node.op in _MOVING and not node.domain and not any(node.outputs[1:])


def _allows_codes(node: Node, dtype: np.dtype | None) -> bool:
    """Return whether an operator runs on codes of this dtype."""
    # MaxPool has kernels for codes of 8 bits only, and int32 is no dtype of codes.
    return dtype in EIGHT_BITS or (node.op != "MaxPool" and dtype is not None and dtype != jnp.int32)


# What operators on codes need of scales so that they compute what DequantizeLinear, operator, QuantizeLinear do. All
# scales are constant in the graph: one that is an input may be anything, so that patterns with one are not fused.


class Need(enum.Enum):
    """What an operator on codes needs of the scales of its operands."""

    SIGN = "positive"  # it compares codes, which are in the order of the values only with a positive scale
    CODES = "finite, not 0"  # codes go through, and quantizing their values has to give them back
    VALUES = "any"  # it computes with the values


# All operators that are fused. "DequantizeLinear" stands for a pair with an equal QuantizeLinear behind it.
NEEDS: dict[str, Need] = {
    **dict.fromkeys((*_SANDWICHED, _PAIR), Need.CODES),
    **dict.fromkeys(("MaxPool", "Softmax"), Need.SIGN),
    **dict.fromkeys(("Conv", "MatMul", "Gemm", "Add", "Mul", "Concat", "Where"), Need.VALUES),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"), Need.VALUES),
}


def allows_scale(op: str, scale: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether an operator may run on codes of a dtype with a scale, or with several."""
    need = NEEDS[op]
    if need is Need.VALUES:
        return True
    values = np.abs(scale.astype(np.float64))
    # A zero point may be at either end, so that codes are this many steps away from it.
    steps = float(2 ** (8 * dtype.itemsize) - 1)
    largest = np.finfo(scale.dtype).max if scale.dtype.kind == "f" else np.finfo(np.float32).max
    gives_back = bool(np.all((values > 0) & (values * steps <= float(largest))))
    return gives_back and (need is Need.CODES or bool(np.all(scale > 0)))


def is_clip_redundant(bounds: tuple[float, float], scale: Any, point: np.ndarray) -> bool:
    """Return whether QuantizeLinear gives the same codes with a Clip before it and without.

    QuantizeLinear is monotone, so this is so if each bound has the code of what it cuts off.
    """
    low, high = (np.float32(bound) for bound in bounds)
    if not low <= high or not np.isfinite(scale) or scale == 0:
        return False
    ends = np.asarray([low, -np.inf, high, np.inf], np.float32)
    with np.errstate(all="ignore"):
        steps = np.rint(ends / np.float32(scale))
    info = np.iinfo(point.dtype)
    codes = np.clip(steps + np.float64(point), info.min, info.max)
    return bool(codes[0] == codes[1] and codes[2] == codes[3])


def drops_clip(op: str, bounds: tuple[float, float], scale: Any, point: np.ndarray) -> bool:
    """Return whether ONNX Runtime drops a Relu or Clip before QuantizeLinear, also where that changes codes.

    It never looks at the sign of the scale, and compares bounds with an absolute tolerance.
    """
    if point.dtype not in EIGHT_BITS:
        return False
    info = np.iinfo(point.dtype)
    if op == "Relu":
        return bool(point == info.min)
    least, most = (np.float32(scale) * np.float32(int(code) - int(point)) for code in (info.min, info.max))
    close = np.finfo(np.float32).eps
    return bool(np.float32(bounds[0]) - least <= close and most - np.float32(bounds[1]) <= close)


# Which operators between DequantizeLinear and QuantizeLinear become operators on codes, and with which inputs.


_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
_MICROSOFT = "com.microsoft"
_LIMIT = 2.0**31
_POOL_ATTRIBUTES = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_UNARY: dict[str, tuple[str, tuple[str, ...]]] = {
    "AveragePool": ("QLinearAveragePool", _POOL_ATTRIBUTES),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", ()),
    "LeakyRelu": ("QLinearLeakyRelu", ("alpha",)),
    "Sigmoid": ("QLinearSigmoid", ()),
    "Softmax": ("QLinearSoftmax", ("axis",)),
}
_BINARY = {"Add": "QLinearAdd", "Mul": "QLinearMul"}
# How much the scale of a bias may differ in ONNX Runtime, in all and in proportion.
_CLOSE, _CLOSE_RATIO = 1e-6, 1e-2
# What rounding to float32 makes of equal scales, and which part of a softmax the rounding of a factor may take.
_ROUNDING, _MOST_OFF = 1e-6, 1e-2
Match = tuple[Node, list[Node]]


def select_operator(fuser: _Fuser, node: Node) -> Match | None:
    """Return the last node of a pattern that begins at `node`, and what replaces it; None without a pattern."""
    if node.domain:
        return None
    if node.op in ("Conv", "MatMul", "Gemm") and not _allows_bias(fuser, node):
        return None
    if node.op == "Conv":
        return _select_conv(fuser, node)
    if node.op in ("MatMul", "Gemm"):
        return _select_matmul(fuser, node)
    if node.op in _UNARY or node.op in _BINARY or node.op in ("Concat", "Where"):
        return _select_elementwise(fuser, node)
    return None


def _match_sources(fuser: _Fuser, names: Any) -> list[Node] | None:
    """Return the DequantizeLinear of each input, or None if one has none or not 8 bits."""
    sources = [fuser.match_dequantize(name) for name in names]
    if any(source is None or fuser.derive_codes_dtype(source) not in EIGHT_BITS for source in sources):
        return None
    return sources  # type: ignore[return-value]


def _match_result(fuser: _Fuser, node: Node, dtype: np.dtype | None) -> Node | None:
    """Return the QuantizeLinear to codes of this dtype that reads a node."""
    sink = fuser.match_quantize(node)
    if sink is None or not fuser.is_per_tensor(sink) or fuser.derive_codes_dtype(sink) != dtype:
        return None
    return sink


def _describe(fuser: _Fuser, source: Node) -> tuple[str, str, str]:
    """Return the names of codes, scale and zero point."""
    return source.inputs[0], *fuser.read_affine(source)


def _make_node(
    node: Node, op: str, domain: str, inputs: Any, output: str, attributes: dict[str, Any] | None = None
) -> Node:  # fmt: skip
    return dataclasses.replace(
        node, op=op, domain=domain, inputs=tuple(inputs), outputs=(output,), opset=1,
        attributes=dict(node.attributes) if attributes is None else attributes, label=f"{node.label}, as {op}",
    )  # fmt: skip


def _select_elementwise(fuser: _Fuser, node: Node) -> Match | None:
    """AveragePool, LeakyRelu, Sigmoid, Softmax, Add, Mul, Concat, Where: all codes have one dtype."""
    data = node.inputs[1:] if node.op == "Where" else node.inputs
    sources = _match_sources(fuser, data)
    if sources is None or not all(fuser.is_per_tensor(source) for source in sources):
        return None
    dtypes = {fuser.derive_codes_dtype(source) for source in sources}
    sink = _match_result(fuser, node, fuser.derive_codes_dtype(sources[0]))
    # ONNX Runtime's kernels take operands of one dtype.
    if len(dtypes) > 1 or sink is None or any(node.outputs[1:]):
        return None
    if not all(fuser.allows_scale(node.op, source) for source in sources):
        return None
    operands = [name for source in sources for name in _describe(fuser, source)]
    result, output = fuser.read_affine(sink), sink.outputs[0]
    if node.op in _BINARY:
        return sink, [_make_node(node, _BINARY[node.op], _MICROSOFT, [*operands, *result], output, {})]
    if node.op == "Concat":
        return sink, [_make_node(node, "QLinearConcat", _MICROSOFT, [*result, *operands], output)]
    if node.op == "Where":
        return sink, [_make_node(node, "QLinearWhere", _MICROSOFT, [node.inputs[0], *operands, *result], output, {})]
    name, kept = _UNARY[node.op]
    # QLinearAveragePool has no dilations.
    if any(n != 1 for n in node.attributes.get("dilations", ())):
        return None
    attributes = {key: node.attributes[key] for key in kept if key in node.attributes}
    if not _keeps_counts(fuser, node) or not _keeps_factor(fuser, node, sink):
        return None
    if node.op == "Softmax":
        # The meaning of the axis depends on the opset of Softmax, which QLinearSoftmax has as an attribute.
        attributes = {"axis": attributes.get("axis", -1 if node.opset >= 13 else 1), "opset": node.opset}
    if node.op == "LeakyRelu":
        attributes.setdefault("alpha", 0.01)
    return sink, [_make_node(node, name, _MICROSOFT, [*operands, *result], output, attributes)]


def _keeps_counts(fuser: _Fuser, node: Node) -> bool:
    """Return whether QLinearAveragePool divides by ONNX's number of elements, or may divide by another."""
    get = node.attributes.get
    # Windows with stride 1 do not reach beyond the padding.
    is_inside = node.op != "AveragePool" or not (get("ceil_mode") and get("count_include_pad"))
    if is_inside or all(n == 1 for n in get("strides", ())) or get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return True
    size = math.prod(node.attributes["kernel_shape"])
    model = "divides a last window that reaches beyond the padding by the number of its elements within"
    return fuser.allows_deviation(node, model, f"divides it by {size}")


def _keeps_factor(fuser: _Fuser, node: Node, sink: Node) -> bool:
    """Return whether QLinearSoftmax multiplies by about 1 / y_scale, or may multiply by the integer below."""
    if node.op != "Softmax":
        return True
    scale = fuser.constants[sink.inputs[1]].astype(np.float32).reshape(())
    with np.errstate(all="ignore"):
        exact = 1 / float(scale) if scale else np.inf
        factor = float(np.floor(np.float32(1) / scale))
    if not abs(factor - exact) > _MOST_OFF * abs(exact):
        return True
    return fuser.allows_deviation(node, f"multiplies by 1 / y_scale = {exact:.6g}", f"by {factor:.6g}")


def _select_conv(fuser: _Fuser, node: Node) -> Match | None:
    """Conv of uint8, with a bias of int32, of constant floats, or none."""
    sources = _match_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    dtype = fuser.derive_codes_dtype(sources[0])
    sink = _match_result(fuser, node, dtype)
    # On x86-64, ONNX Runtime has no integer convolution of int8 activations.
    if sink is None or dtype == _INT8 or not _has_output_scales(fuser, node, sources[1], 0):
        return None
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    bias = _select_bias(fuser, node, operands)
    if bias is None:
        return None
    inputs = [*operands, *fuser.read_affine(sink), *bias[0]]
    return sink, [*bias[1], _make_node(node, "QLinearConv", "", inputs, sink.outputs[0])]


def _select_bias(fuser: _Fuser, node: Node, operands: list[str]) -> tuple[list[str], list[Node]] | None:
    """Return the int32 bias of a Conv or Gemm as inputs, and the nodes that make it; None if it is no such bias."""
    name = node.inputs[2] if len(node.inputs) > 2 else ""
    if not name:
        return [], []
    source = fuser.producers.get(name)
    if source is not None and source.op == "DequantizeLinear":
        codes = source.inputs[0]
        maker = fuser.producers.get(codes)
        is_made = maker is not None and maker.op == "QuantizeBias"
        if not is_made and (codes not in fuser.constants or fuser.constants[codes].dtype != _INT32):
            return None
        # ONNX Runtime compares the scale of the bias with the scale of the sums for Conv only. It may have quantized
        # the bias itself, and merged pairs afterwards; then the scales differ.
        is_close = _fits_accumulator(fuser, source, operands, (_CLOSE, _CLOSE_RATIO))
        if (node.op != "Gemm" and not is_close) or not _keeps_bias(fuser, node, source, operands):
            return None
        return [codes], []
    if name not in fuser.constants or fuser.constants[name].dtype != np.float32:
        return None
    codes = fuser.make_name(f"{node.outputs[0]}/bias in steps")
    quantized = _make_node(node, "QuantizeBias", "jaxquant", [name, operands[1], operands[4]], codes, {})
    return [codes], [quantized]


def _compute_steps(fuser: _Fuser, operands: list[str]) -> np.ndarray:
    """Return the products of the scales of x and w, which are the steps of the sums."""
    x_scale, w_scale = (fuser.constants[name].astype(np.float64).reshape(-1) for name in (operands[1], operands[4]))
    return x_scale * w_scale


def _fits_accumulator(fuser: _Fuser, source: Node, operands: list[str], close: tuple[float, float]) -> bool:
    """Return whether a bias has no zero point, and its scale is about the product of the scales of x and w."""
    scale, products = fuser.constants.get(source.inputs[1]), _compute_steps(fuser, operands)
    point = fuser.constants.get("".join(source.inputs[2:3]), np.zeros(()))
    if scale is None or scale.size not in (1, products.size) or np.any(point):
        return False
    distance = np.abs(scale.reshape(-1).astype(np.float64) - products)
    return bool(np.all(distance <= close[0] + close[1] * np.abs(products)))


def _keeps_bias(fuser: _Fuser, node: Node, source: Node, operands: list[str]) -> bool:
    """Return whether a bias as int32 has its value, but for rounding, or may have another."""
    codes = _read_bias(fuser, source)
    most = float(np.max(np.abs(codes), initial=0))
    if most >= _compute_bias_limit(fuser, node, operands):
        text = f"adds a bias of {most:.6g} steps"
        return fuser.allows_deviation(node, text, "adds it as int32, where the sums overflow", can_follow=False)
    if _fits_accumulator(fuser, source, operands, (0.0, _ROUNDING)):
        return True
    scale = fuser.constants.get(source.inputs[1])
    point = fuser.constants.get("".join(source.inputs[2:3]), np.zeros(1, np.int32))
    products = _compute_steps(fuser, operands)
    sizes = (1, codes.size)
    if scale is None or not {scale.size, point.size, products.size} <= set(sizes):
        text = "adds a bias with a scale that is an input" if scale is None else "adds a bias with scales of its own"
        return fuser.allows_deviation(node, text, "takes the scales of x and w", can_follow=False)
    meant = (codes - point.reshape(-1)) * scale.reshape(-1).astype(np.float64)
    used = codes * products
    index = int(np.argmax(np.abs(used - meant)))
    if used[index] == meant[index]:
        return True
    model = f"adds bias[{index}] = {meant[index]:.6g}"
    return fuser.allows_deviation(node, model, f"adds {used[index]:.6g}, in steps of the scales of x and w")


def _read_bias(fuser: _Fuser, source: Node) -> np.ndarray:
    """Return the codes of a bias, constants or what QuantizeBias will make of constant floats."""
    codes = fuser.constants.get(source.inputs[0])
    if codes is None:
        maker = fuser.producers[source.inputs[0]]
        codes = np.rint(fuser.constants[maker.inputs[0]].astype(np.float64) / fuser.constants[source.inputs[1]])
    return codes.reshape(-1).astype(np.float64)


def _compute_bias_limit(fuser: _Fuser, node: Node, operands: list[str]) -> float:
    """Return how many steps a bias may have so that no sum with it leaves int32."""
    codes = fuser.constants.get(operands[3])
    if codes is None or not codes.ndim:
        return _LIMIT
    outputs = codes.shape[0 if node.op == "Conv" or node.attributes.get("transB", 0) else -1]
    return _LIMIT - (codes.size // max(outputs, 1)) * 255.0**2


def fits_int32(fuser: _Fuser, node: Node, bias: np.ndarray, operands: list[str], is_noted: bool = True) -> bool:
    """Return whether a float bias has few enough steps for int32; `is_noted` notes the deviation if not."""
    signed = _compute_steps(fuser, operands)
    products = np.abs(signed)
    values = np.broadcast_to(products, (bias.size,)) if products.size in (1, bias.size) else products[:0]
    with np.errstate(all="ignore"):
        steps = np.abs(bias.reshape(-1).astype(np.float64)) / values if values.size else np.zeros(1)
    if np.all(steps < _compute_bias_limit(fuser, node, operands)):
        # `quantize_bias` takes positive steps only.
        return bool(np.all(signed >= np.finfo(np.float32).tiny))
    if not is_noted:
        return False
    index = int(np.argmax(steps))
    model = f"adds bias[{index}] = {bias.reshape(-1)[index]:.6g}"
    runtime = f"adds it as int32 in steps of {values.reshape(-1)[index]:.6g}, where it or a sum overflows"
    return fuser.allows_deviation(node, model, runtime, can_follow=False)


def _allows_bias(fuser: _Fuser, node: Node) -> bool:
    """Return whether a float bias has few enough steps for int32; note that ONNX Runtime does not ask.

    It quantizes such a bias before it looks for kernels, so that also a contraction that stays in floats gets it.
    """
    sources = _match_sources(fuser, node.inputs[:2])
    last = node
    if sources is not None and node.op == "MatMul" and (added := match_added_bias(fuser, node)) is not None:
        node, last = added
    bias = fuser.constants.get("".join(node.inputs[2:3]))
    if sources is None or bias is None or bias.dtype != np.float32 or not fuser.is_per_tensor(sources[0]):
        return True
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    if _compute_steps(fuser, operands).size not in (1, bias.size):
        return False
    reader = fuser.find_reader(last)
    if reader is not None and reader.op in ("Relu", "Clip"):
        reader = fuser.find_reader(reader)
    is_noted = reader is not None and reader.op == "QuantizeLinear"
    return fits_int32(fuser, node, bias, operands, is_noted)


def _has_output_scales(fuser: _Fuser, node: Node, source: Node, axis: int | None) -> bool:
    """Return whether the scales of w are along the dimension of the outputs, or may be taken for such.

    `axis` is that dimension, or None for the last one of any number.
    """
    scale = fuser.constants[source.inputs[1]]
    if scale.size == 1:
        return True
    codes, own = fuser.constants.get(source.inputs[0]), source.attributes.get("axis", 1)
    maker = fuser.producers.get(source.inputs[0])
    if codes is None and maker is not None and maker.op == "QuantizeLinear":
        codes = fuser.constants.get(maker.inputs[0])  # floats of the same shape
    if scale.ndim != 1 or source.attributes.get("block_size", 0):
        return False
    if codes is None:  # of an unknown rank
        return own == (1 if axis is None else axis)
    expected = codes.ndim - 1 if axis is None else axis
    own = own + codes.ndim if own < 0 else own
    if own == expected:
        return True
    # ONNX Runtime refuses other sizes when it runs, and does not quantize a float bias for such weights.
    reader = fuser.find_reader(node)
    inputs = node.inputs[2:] if node.op != "MatMul" or reader is None or reader.op != "Add" else reader.inputs
    if any(name in fuser.constants for name in inputs):
        return False
    if scale.size != codes.shape[expected] or (node.op == "MatMul" and fuser.match_quantize(node) is not None):
        return False
    model = f"the scales of w are along its dimension {own}"
    return fuser.allows_deviation(node, model, f"takes them along dimension {expected}")


def _select_matmul(fuser: _Fuser, node: Node) -> Match | None:
    """MatMul and Gemm, with or without QuantizeLinear, and MatMul with Add."""
    sources = _match_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    left, right = (fuser.derive_codes_dtype(source) for source in sources)
    # ONNX Runtime has no kernel for int8 times uint8.
    if left == _INT8 and right != left:
        return None
    columns = None if node.op == "MatMul" else 0 if node.attributes.get("transB", 0) else 1
    if not _has_output_scales(fuser, node, sources[1], columns):
        return None
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    if node.op == "Gemm":
        return _select_gemm(fuser, node, node, operands, left)
    added = match_added_bias(fuser, node)
    if added is not None:
        return _select_gemm(fuser, added[0], added[1], operands, left)
    readers = fuser.readers[node.outputs[0]]
    # As with Conv: on x86-64 only Gemm takes int8 activations.
    if left == _INT8:
        return None
    sink = _match_result(fuser, node, left)
    if sink is not None:
        return sink, [_make_node(node, "QLinearMatMul", "", [*operands, *fuser.read_affine(sink)], sink.outputs[0], {})]
    # A product with several readers stays in floats if one of them quantizes it.
    if any(reader.op == "QuantizeLinear" for reader in readers) or _feeds_clip(fuser, node):
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, b, a_scale, b_scale, a_point, b_point]
    return node, [_make_node(node, "MatMulIntegerToFloat", _MICROSOFT, inputs, node.outputs[0], {})]


def _feeds_clip(fuser: _Fuser, node: Node) -> bool:
    """Return whether a float result has only a Relu or Clip behind it, with which ONNX Runtime leaves it in floats."""
    readers = fuser.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op not in ("Relu", "Clip") or node.outputs[0] in fuser.graph.outputs:
        return False
    result = readers[0].outputs[0]
    return len(fuser.readers[result]) == 1 and result not in fuser.graph.outputs


def match_added_bias(fuser: _Fuser, node: Node) -> tuple[Node, Node] | None:
    """Return MatMul and Add as one Gemm, and the Add, for constant weights and a constant for each column."""
    readers = fuser.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op != "Add" or node.outputs[0] in fuser.graph.outputs:
        return None
    (addition,) = readers
    (bias,) = [name for name in addition.inputs if name != node.outputs[0]] or [""]
    weight, stored = (_read_stored(fuser, name) for name in (node.inputs[1], bias))
    if weight is None or weight.ndim != 2 or stored is None:
        return None
    shape = stored.shape
    if not shape or shape[-1] != weight.shape[-1] or any(n != 1 for n in shape[:-1]):
        return None
    inputs = (*node.inputs[:2], bias)
    return dataclasses.replace(node, op="Gemm", inputs=inputs, outputs=addition.outputs, attributes={}), addition


def _read_stored(fuser: _Fuser, name: str) -> np.ndarray | None:
    """Return the constant that a value is, or that it is dequantized or quantized from."""
    while name not in fuser.constants:
        source = fuser.producers.get(name)
        if source is None or source.op not in ("DequantizeLinear", "QuantizeLinear", "QuantizeBias"):
            return None
        name = source.inputs[0]
    return fuser.constants[name]


def _select_gemm(fuser: _Fuser, gemm: Node, last: Node, operands: list[str], dtype: np.dtype | None) -> Match | None:
    """Gemm as QGemm, with codes or float32 as its result."""
    has_bias = len(gemm.inputs) > 2 and bool(gemm.inputs[2])
    # QGemm has no beta, and its alpha would scale the steps of the bias, too.
    if has_bias and not gemm.attributes.get("beta", 1.0) == gemm.attributes.get("alpha", 1.0) == 1:
        return None
    sink = fuser.match_quantize(last)
    has_codes = sink is not None and _match_result(fuser, last, dtype) is not None
    is_quantized = any(reader.op == "QuantizeLinear" for reader in fuser.readers[last.outputs[0]])
    if not has_codes and (is_quantized or _feeds_clip(fuser, last)):
        return None
    # ONNX Runtime quantizes a float bias only for a result in codes.
    if has_bias and not has_codes and set(gemm.inputs[2:]) & set(fuser.constants):
        return None
    bias = _select_bias(fuser, gemm, operands)
    if bias is None:
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, a_scale, a_point, b, b_scale, b_point, *(bias[0] or [""])]
    attributes = {key: gemm.attributes[key] for key in ("alpha", "transA", "transB") if key in gemm.attributes}
    end = last
    if has_codes:
        assert sink is not None
        inputs, end = [*inputs, *fuser.read_affine(sink)], sink
    return end, [*bias[1], _make_node(gemm, "QGemm", _MICROSOFT, inputs, end.outputs[0], attributes)]


# Where ONNX Runtime's fusions change the value of a model by more than rounding.


_SHOWN = 8


class FusionWarning(UserWarning):
    """The warning for a model with a value that ONNX Runtime's fusions change by more than rounding.

    `load` warns once, and names the nodes, what the model says and what ONNX Runtime computes. To silence it after you
    have read it: `warnings.simplefilter("ignore", jaxquant.onnx.FusionWarning)`.
    """


class Deviation(NamedTuple):
    """A node that ONNX Runtime with all optimizations computes otherwise than the model says, by more than rounding.

    Attributes:
        node: what errors and tables call the node.
        op: its operator.
        model: what the model says.
        runtime: what ONNX Runtime computes.
        is_followed: whether the loaded function computes what ONNX Runtime does.
    """

    node: str
    op: str
    model: str
    runtime: str
    is_followed: bool

    def __str__(self) -> str:
        end = "" if self.is_followed else " (this function computes what the model says)"
        return f"{self.node}: {self.model}; ONNX Runtime {self.runtime}{end}"


def warn_of_deviations(deviations: Sequence[Deviation], stacklevel: int) -> None:
    """Warn once, if there are any."""
    if not deviations:
        return
    shown = [f"  {deviation}" for deviation in deviations[:_SHOWN]]
    if len(deviations) > _SHOWN:
        shown.append(f"  and {len(deviations) - _SHOWN} more, in fn.deviations")
    followed = any(deviation.is_followed for deviation in deviations)
    end = ' The loaded function does the same; fusions="safe" gives the value of the model.' if followed else ""
    text = f"ONNX Runtime's optimizations change the value of this model by more than rounding.{end}"
    warnings.warn("\n".join([text, *shown]), FusionWarning, stacklevel=stacklevel + 1)
