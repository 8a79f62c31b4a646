"""Fusing of DequantizeLinear, operator, QuantizeLinear into operators on codes, by ONNX Runtime's rules."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._core.dtypes import EIGHT_BITS
from .fuse_operators import fits_int32, match_added_bias, select_operator
from .fused_graph import MOVING, PAIR, SANDWICHED, Deviation, FusedGraph
from .graph import ROUNDED, SHARED_WEIGHTS, WINDOW_SUM, Graph, Node, list_small_powers, select_live

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
    *("Tile", "Neg", "Where", "Concat"),
)
# Operators that ONNX Runtime moves a Transpose past.
_ELEMENTWISE = (
    *("Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Elu", "Neg", "Abs", "Cast"),
    *("Add", "Sub", "Mul", "Div", "Max", "Min"),
)
# How often ONNX Runtime applies the rules of its first level.
_MOST_STEPS = 10
# With at least as many products by the same weights, it pays to bring the weights into another form.
_MANY_READERS = 8


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


class _Fuser(FusedGraph):
    """The rules, which replace nodes of a graph."""

    def __init__(self, graph: Graph, is_exported: bool, fusions: str, deviations: list[Deviation]) -> None:
        super().__init__(graph, fusions, deviations)
        self.is_exported = is_exported
        self.sums = _SUMS if is_exported else (*_SUMS, *_INNER_SUMS)
        self.powers = list_small_powers(graph)

    def apply_rules(self) -> Graph:
        """Apply all rules, in ONNX Runtime's order."""
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
        else:
            self._join_products()
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
            self.index()

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
            scale, zero_point = (np.asarray(self.constants[name]).reshape(()) for name in self.read_affine(sink))
            if bounds is None:
                continue
            # The bounds may be wider than the values of the codes: QuantizeLinear saturates first.
            if is_clip_redundant(bounds, scale, zero_point):
                renamed[node.outputs[0]] = node.inputs[0]
            elif drops_clip(node.op, bounds, scale, zero_point):
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
        self.index()
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
        return is_constant and self.is_per_tensor(node) and self.allows_scale(PAIR, node)

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
        self.index()
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
            if node.op not in SANDWICHED or node.domain or any(node.outputs[1:]):
                continue
            source, sink = self.match_dequantize(node.inputs[0]), self.match_quantize(node)
            if source is None or sink is None or not self.have_same_affine(source, sink):
                continue
            dtype = self.derive_codes_dtype(source)
            # MaxPool has kernels for codes of 8 bits only, and int32 is no dtype of codes.
            has_kernel = dtype in EIGHT_BITS or (node.op != "MaxPool" and dtype is not None and dtype != jnp.int32)
            if has_kernel and self.allows_scale(node.op, source):
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
            if source is not None and is_same and self.allows_scale(PAIR, source):
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

    def _join_products(self) -> None:
        """Compute the products of slices of one array by the same weights at once.

        An exporter that writes a loop over time out multiplies the input at each time: a matrix of many weights, which
        is then read from memory, and compiled, once for each time. Products that depend on each other stay, with a mark
        that tells how to multiply.
        """
        groups: dict[Any, list[tuple[Node, Node, int]]] = collections.defaultdict(list)
        for node in self.nodes:
            slices = self.producers.get(node.inputs[0]) if node.op == "Gemm" and not node.domain else None
            if slices is None or node.attributes.get("transA") or not self.has_constants(node):
                continue
            index = self._read_index(slices)
            if index is not None:
                key = (slices.inputs[0], node.inputs[1:], tuple(sorted(node.attributes.items())))
                groups[key].append((node, slices, index))
        replacements: dict[Node, list[Node]] = {}
        for group in groups.values():
            if len(group) > 1:
                replacements.update((node, []) for node, _, _ in group)
                replacements[group[0][0]] = self._join(group)
        self.nodes = [new for node in self.nodes for new in replacements.get(node, [node])]
        counts = collections.Counter(node.inputs[1] for node in self.nodes if node.op == "Gemm" and not node.domain)
        for index, node in enumerate(self.nodes):
            if node.op == "Gemm" and not node.domain and counts[node.inputs[1]] >= _MANY_READERS:
                self.nodes[index] = dataclasses.replace(node, attributes={**node.attributes, SHARED_WEIGHTS: 1})
        self.index()

    def _read_index(self, node: Node) -> int | None:
        """Return the index of a Gather that takes one slice along the first axis."""
        if node.op != "Gather" or node.domain or node.attributes.get("axis", 0) != 0:
            return None
        index = self.constants.get(node.inputs[1])
        return None if index is None or index.ndim else int(index)

    def _join(self, group: Sequence[tuple[Node, Node, int]]) -> list[Node]:
        """Return the nodes that compute Gemm of all slices of a group."""
        (node, slices, _), *_ = group
        indices = self.hold(f"{node.outputs[0]}/indices", np.array([index for _, _, index in group]))
        rows = self.make_name(f"{node.outputs[0]}/slices")
        outputs = tuple(other.outputs[0] for other, _, _ in group)
        return [
            dataclasses.replace(slices, inputs=(slices.inputs[0], indices), outputs=(rows,)),
            dataclasses.replace(
                node, op="GemmOfSlices", domain="jaxquant", inputs=(rows, *node.inputs[1:]), outputs=outputs
            ),
        ]

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
        self.index()

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
    return node.op in MOVING and not node.domain and not any(node.outputs[1:])


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
