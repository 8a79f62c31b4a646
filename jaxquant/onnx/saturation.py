"""Products with sums that ONNX Runtime saturates on some processors: find them, and write them exactly.

On x86-64 processors without VNNI, ONNX Runtime's kernels of uint8 activations by int8 weights add two neighboring
products in int16, with saturation. Its other kernels are exact there: uint8 by uint8, int8 by int8, ConvInteger of
uint8 images by int8 weights, and depthwise QLinearConv. So a product is made exact by storing its weights as uint8,
moved by 128 with their zero point.

The runtime has a session option for this, `session.x64quantprecision`. It does nothing at the levels "disabled" and
"basic", for weights that are computed, and for QLinearMatMul-21, and it leaves products of int8 activations without a
kernel. So the model itself is changed here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from .._core import checks, dtypes
from .limits import Limits
from .model_file import read_checked_model

_T = TypeVar("_T")
_INT8, _UINT8 = TensorProto.INT8, TensorProto.UINT8
_MICROSOFT = "com.microsoft"


class SaturationWarning(UserWarning):
    """An exported model gives other integers in ONNX Runtime on x86-64 processors without VNNI."""


@dataclasses.dataclass(frozen=True)
class SaturatingProduct:
    """A product with sums that can saturate on x86-64 processors without VNNI.

    Attributes:
        node: the name of the node; of a node without a name, the name of its first result.
        operator: the operator.
        weights: the name of the tensor of int8 weights.
        pairs: the number of pairs of weights with products that can leave int16, or None if the weights are computed:
            only a run could tell.
        all_pairs: the number of pairs of weights that the kernel adds, or None.
    """

    node: str
    operator: str
    weights: str
    pairs: int | None
    all_pairs: int | None

    def __str__(self) -> str:
        """Return the node, its weights, and how many pairs can saturate."""
        count = "computed weights" if self.pairs is None else f"{self.pairs:,} of {self.all_pairs:,} pairs of weights"
        return f"{self.node} ({self.operator}, {self.weights}): {count}"


@dataclasses.dataclass(frozen=True)
class Operands:
    """The positions of the inputs of an operator that multiplies 8-bit codes.

    Attributes:
        activations: the activations, or None if the operator quantizes them itself, to uint8.
        weights: the weights.
        weight_zero_point: the zero point of the weights, or None for an operator on floats.
    """

    activations: int | None
    weights: int
    weight_zero_point: int | None


# Operators that move elements of their first input.
_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
# ConvInteger's kernel has the weights on the left: uint8 weights by int8 images saturate, the other way round is exact.
PRODUCTS: Mapping[tuple[str, str], tuple[Operands, ...]] = {
    ("", "MatMulInteger"): (Operands(0, 1, 3),),
    ("", "ConvInteger"): (Operands(1, 0, 2),),
    ("", "QLinearMatMul"): (Operands(0, 3, 5),),
    ("", "QLinearConv"): (Operands(0, 3, 5),),
    (_MICROSOFT, "QLinearConv"): (Operands(0, 3, 5),),
    (_MICROSOFT, "QGemm"): (Operands(0, 3, 5),),
    (_MICROSOFT, "MatMulIntegerToFloat"): (Operands(0, 1, 5),),
    (_MICROSOFT, "DynamicQuantizeMatMul"): (Operands(None, 1, 3),),
    (_MICROSOFT, "DynamicQuantizeLSTM"): (Operands(None, 1, 9), Operands(None, 2, 11)),
    (_MICROSOFT, "QAttention"): (Operands(0, 1, 7),),
    # Between DequantizeLinear and QuantizeLinear the runtime replaces these by the operators above.
    ("", "MatMul"): (Operands(0, 1, None),),
    ("", "Gemm"): (Operands(0, 1, None),),
    ("", "Conv"): (Operands(0, 1, None),),
}


def count_pairs(operator: str, codes: np.ndarray, attributes: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many pairs of weights can leave int16 with two codes of uint8, and how many pairs are added.

    Args:
        operator: a name of `PRODUCTS`.
        codes: int8 weights.
        attributes: the attributes of the node.
    """
    if operator in ("QLinearConv", "Conv"):
        if codes.shape[1] == 1 and int(attributes.get("group", 1)) == codes.shape[0]:
            return 0, 0  # depthwise, which has an exact kernel
        # The kernel's rows run over the positions of the window, with the channels innermost.
        rows = np.moveaxis(codes, 1, -1).reshape(codes.shape[0], -1)
    elif codes.ndim < 2:
        rows = codes.reshape(1, -1)
    else:
        rows = codes if operator in ("QGemm", "Gemm") and attributes.get("transB", 0) else np.swapaxes(codes, -1, -2)
    even = rows.shape[-1] // 2 * 2  # the last one of an odd number stands alone
    sums = np.add(rows[..., 0:even:2], rows[..., 1:even:2], dtype=np.int16)
    return int(np.count_nonzero(np.abs(sums) > dtypes.LARGEST_PAIR)), sums.size


def find_saturating_products(model: ModelProto | str | os.PathLike[str]) -> tuple[SaturatingProduct, ...]:
    """Return the products of a model that can saturate in ONNX Runtime on x86-64 processors without VNNI.

    The weights alone are examined; nothing is run. A product is listed if its activations are uint8, its weights int8,
    and two neighboring weights w_0 and w_1 have the same sign and |w_0 + w_1| > 128, so that there are activations for
    which a_0 w_0 + a_1 w_1 is outside of int16. Whether the activations of a given input reach that, `verify` tells.

    Args:
        model: an `onnx.ModelProto`, or the name of a file.

    Returns:
        One entry for each such product, in the order of the nodes. Empty if the model gives the same integers on every
        processor.

    Raises:
        TypeError: model is neither an `onnx.ModelProto` nor the name of a file.
        ModelError: the file is damaged or unsafe.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> def export_layer(w):
        ...     layer = lambda x: jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55)), w)
        ...     return jq.onnx.export(layer, [jnp.zeros((4, 2))], weights="int8")
        >>> w = jnp.array([[0.5, -1.0], [0.52, 0.25]])
        >>> model = export_layer(jq.quantize(w, jq.QuantSpec(jnp.int8)))
        >>> [(found.operator, found.pairs, found.all_pairs) for found in jq.onnx.find_saturating_products(model)]
        [('MatMulInteger', 1, 2)]
        >>> jq.onnx.find_saturating_products(export_layer(jq.quantize(w, jq.QuantSpec(jnp.int8, reduce_range=True))))
        ()

    Source: ONNX Runtime 1.32, measured on x86-64 with AVX2; "Quantize ONNX models", "When and why do I need to try
    U8U8?".
    """
    return list_saturating_products(read_model("onnx.find_saturating_products", model))


def list_saturating_products(model: ModelProto) -> tuple[SaturatingProduct, ...]:
    """Return what `find_saturating_products` returns, for a model that was checked or that `export` wrote."""
    return tuple(use.product for scope in _walk(_inline(model)) for use in scope.list_products())


def convert_weights_to_uint8(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """Return a model with the same integers in ONNX Runtime on every processor.

    The int8 weights of each product that `find_saturating_products` lists become uint8: 128 is added to the codes and
    to their zero points, so each product of uint8 activations with these weights is the same integer as before. Weights
    that are computed are moved by nodes. The kernels for uint8 weights are slower than those for int8.

    Args:
        model: an `onnx.ModelProto`, which stays as it is, or the name of a file.

    Returns:
        An `onnx.ModelProto` in which nodes replace the calls of functions.

    Raises:
        TypeError: model is neither an `onnx.ModelProto` nor the name of a file.
        ModelError: the file is damaged or unsafe.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> w = jq.quantize(jnp.array([[0.5, -1.0], [0.49, -0.25]]), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
        >>> layer = lambda x: jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55)), w)
        >>> model = jq.onnx.export(layer, [jnp.zeros((4, 2))], weights="int8")
        >>> len(jq.onnx.find_saturating_products(model))
        1
        >>> exact = jq.onnx.convert_weights_to_uint8(model)
        >>> jq.onnx.find_saturating_products(exact)
        ()

    Source: ONNX Runtime 1.32, session option `session.x64quantprecision`, which does the same in some cases.
    """
    return write_unsigned_weights(read_model("onnx.convert_weights_to_uint8", model))


def write_unsigned_weights(model: ModelProto) -> ModelProto:
    """Return what `convert_weights_to_uint8` returns, for a model that was checked or that `export` wrote."""
    copy = ModelProto()
    copy.CopyFrom(_inline(model))
    scopes = list(_walk(copy))
    mover = _Mover(copy.graph, {name: 0 for scope in scopes for name in scope.list_names()}, {})
    for scope in scopes:
        for use in list(scope.list_products()):
            mover.move_weights(scope, use)
    for scope in reversed(scopes):  # the graphs inside first, which become copies with their nodes
        scope.write_inserted()
    mover.drop_unused({name for scope in scopes for name in scope.list_reads()})
    return copy


def read_model(function: str, model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """Return a model, read from a file if it is the name of one."""
    if isinstance(model, ModelProto):
        return model
    expected = "an onnx.ModelProto or the name of a file"
    checks.require_type(isinstance(model, str | os.PathLike), function, "model", expected, checks.describe_value(model))
    return read_checked_model(os.fspath(model), Limits())  # the runtime must not see a file that was not checked


def _inline(model: ModelProto) -> ModelProto:
    """Return a model without calls of functions: they would hide nodes."""
    return inliner.inline_local_functions(model) if model.functions else model


class _Use(NamedTuple):
    """A product of uint8 codes by int8 weights.

    Attributes:
        product: what is reported.
        node: the node that reads the codes of the weights: the product itself, or their DequantizeLinear.
        weights: the position of the codes.
        zero_point: the position of their zero point.
    """

    product: SaturatingProduct
    node: NodeProto
    weights: int
    zero_point: int


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A graph, and the tensors that it sees: its own and its outer graphs'.

    Attributes:
        graph: the GraphProto.
        parent: the graph around it, or None.
        types: the element types of tensors, where they are known.
        constants: the TensorProto of each constant.
        producers: the node that computes each tensor.
        inserted: the nodes that `write_inserted` puts before others, by the first results of these.
    """

    graph: GraphProto
    parent: _Scope | None
    types: MutableMapping[str, int]
    constants: MutableMapping[str, TensorProto]
    producers: MutableMapping[str, NodeProto]
    inserted: dict[str, list[NodeProto]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def own(self) -> frozenset[str]:
        """The first result of each node of the graph."""
        return frozenset(node.output[0] for node in self.graph.node)

    def insert_before(self, node: NodeProto, steps: list[NodeProto]) -> None:
        """Let `write_inserted` insert nodes before a node of this graph, or of one around it."""
        scope: _Scope | None = self
        while scope is not None and node.output[0] not in scope.own:
            scope = scope.parent
        if scope is not None:
            scope.inserted.setdefault(node.output[0], []).extend(steps)

    def write_inserted(self) -> None:
        """Write the graph's nodes anew, once: an insertion into the list of a large graph takes long."""
        if self.inserted:
            nodes = [new for node in self.graph.node for new in (*self.inserted.get(node.output[0], ()), node)]
            del self.graph.node[:]
            self.graph.node.extend(nodes)

    def list_names(self) -> Iterator[str]:
        """Yield the names of the tensors and nodes of the graph."""
        yield from (info.name for info in (*self.graph.input, *self.graph.initializer))
        for node in self.graph.node:
            yield from (node.name, *node.input, *node.output)

    def list_reads(self) -> Iterator[str]:
        """Yield the names of the tensors that the nodes of the graph, or its results, read."""
        yield from (info.name for info in self.graph.output)
        for node in self.graph.node:
            yield from node.input

    def list_products(self) -> Iterator[_Use]:
        """Yield the products that can saturate."""
        for node in self.graph.node:
            domain = "" if node.domain == "ai.onnx" else node.domain
            for operands in PRODUCTS.get((domain, node.op_type), ()):
                match = self._match_weights(node, operands)
                if match is None:
                    continue
                holder, weights, zero_point, moves = match
                pairs = self._count_pairs(node, holder.input[weights], moves)
                if pairs[0] != 0:
                    name = holder.input[weights]
                    product = SaturatingProduct(node.name or node.output[0], node.op_type, name, *pairs)
                    yield _Use(product, holder, weights, zero_point)

    def _count_pairs(self, node: NodeProto, name: str, moves: list[NodeProto]) -> tuple[int | None, int | None]:
        """Return what `count_pairs` does for weights that `moves` rearrange; None for weights that are computed."""
        moves = [*moves]
        while name not in self.constants:
            move = self.producers.get(name)
            if move is None or move.op_type not in _MOVES:
                return None, None
            moves.append(move)
            name = move.input[0]
        codes = numpy_helper.to_array(self.constants[name])
        if 2 * int(np.abs(codes.astype(np.int16)).max(initial=0)) <= dtypes.LARGEST_PAIR:
            return 0, 0  # whatever the arrangement is
        for move in reversed(moves):
            if move.op_type == "Transpose":
                codes = codes.transpose(_read_attributes(move).get("perm"))
            elif move.op_type != "Identity":
                return None, None
        return (
            (None, None) if node.op_type == "ConvInteger" else count_pairs(node.op_type, codes, _read_attributes(node))
        )

    def _match_weights(self, node: NodeProto, operands: Operands) -> tuple[NodeProto, int, int, list[NodeProto]] | None:
        """Return where int8 weights beside uint8 activations are read, or None.

        The results are the node that reads the codes, the positions of codes and zero point, and the nodes that move
        the weights between it and the product.
        """
        weights = _get_input(node, operands.weights)
        if operands.weight_zero_point is None:  # an operator on floats, which the runtime fuses
            sides = [self._match_dequantize(name) for name in (_get_input(node, 0), weights)]
            if sides[0] is None or sides[1] is None:
                return None
            (activations, moved), (holder, moves) = sides[0], sides[1]
            is_pair = self._is_unsigned(activations, moved) and self.types.get(holder.input[0]) == _INT8
            return (holder, 0, 2, moves) if is_pair else None
        kind = _UINT8 if operands.activations is None else self.types.get(_get_input(node, operands.activations))
        is_pair = kind == _UINT8 and self.types.get(weights) == _INT8
        return (node, operands.weights, operands.weight_zero_point, []) if is_pair else None

    def _match_dequantize(self, name: str) -> tuple[NodeProto, list[NodeProto]] | None:
        """Return the DequantizeLinear that computes a tensor, and the nodes that move its elements after it."""
        moves: list[NodeProto] = []
        while (node := self.producers.get(name)) is not None:
            if node.op_type == "DequantizeLinear":
                return node, moves
            if node.op_type not in _MOVES:
                break
            moves.insert(0, node)
            name = node.input[0]
        return None

    def _is_unsigned(self, dequantize: NodeProto, moves: list[NodeProto]) -> bool:
        """Return whether activations may be uint8 in the runtime.

        It turns pairs of QuantizeLinear and DequantizeLinear with int8 into pairs with uint8, and inserts such pairs
        behind operators that move elements.
        """
        kind, source = self.types.get(dequantize.input[0]), self.producers.get(dequantize.input[0])
        is_pair = bool(moves) or (source is not None and source.op_type == "QuantizeLinear")
        return kind == _UINT8 or (kind == _INT8 and is_pair)


@dataclasses.dataclass(frozen=True)
class _Mover:
    """What moves int8 weights by 128.

    Attributes:
        root: the main graph, which gets the new constants.
        names: the names that are taken, and how often each was asked for again.
        moved: the old and new names of constants. Their keys are the objects' identities, since the branches of an If
            may give one name to different constants; the scopes keep these objects alive.
    """

    root: GraphProto
    names: dict[str, int]
    moved: dict[int, tuple[str, str]]

    def move_weights(self, scope: _Scope, use: _Use) -> None:
        """Add 128 to the int8 weights of a product and to their zero point, which become uint8."""
        node = use.node
        if scope.types.get(node.input[use.weights]) != _INT8:
            return  # moved already, for another product that reads the same DequantizeLinear
        while len(node.input) <= use.zero_point:
            node.input.append("")
        node.input[use.weights] = self._move(scope, node, node.input[use.weights])
        zero_point = node.input[use.zero_point]
        node.input[use.zero_point] = (
            self._move(scope, node, zero_point) if zero_point else self._make_zero_point(scope, node)
        )

    def _move(self, scope: _Scope, node: NodeProto, name: str) -> str:
        """Return the name of an int8 tensor as uint8, moved by 128."""
        if name in scope.constants:
            constant = scope.constants[name]
            if id(constant) not in self.moved:
                codes = numpy_helper.to_array(constant)
                moved = self._add_constant(f"{name}.uint8", codes.view(np.uint8) ^ np.uint8(128))
                self.moved[id(constant)] = (name, moved)
            return self.moved[id(constant)][1]
        # The runtime computes these nodes once if the weights follow from constants.
        offset = self._add_constant("offset_128", np.asarray(128, np.int32))
        wide, total, moved = (self._make_name(f"{name}.{part}") for part in ("int32", "moved", "uint8"))
        steps = [
            helper.make_node("Cast", [name], [wide], to=TensorProto.INT32),
            helper.make_node("Add", [wide, offset], [total]),
            helper.make_node("Cast", [total], [moved], to=_UINT8),
        ]
        scope.insert_before(node, steps)
        return moved

    def _make_zero_point(self, scope: _Scope, node: NodeProto) -> str:
        """Return the name of a zero point of 128; in a DequantizeLinear it has the shape of the scale."""
        if node.op_type != "DequantizeLinear":
            return self._add_constant("zero_point_128", np.asarray(128, np.uint8))
        scale = node.input[1]
        if scale in scope.constants:
            return self._add_constant("zero_point_128", np.full(scope.constants[scale].dims, 128, np.uint8))
        shape, zero_point = self._make_name(f"{scale}.shape"), self._make_name("zero_point_128")
        value = numpy_helper.from_array(np.full(1, 128, np.uint8))
        steps = [
            helper.make_node("Shape", [scale], [shape]),
            helper.make_node("ConstantOfShape", [shape], [zero_point], value=value),
        ]
        scope.insert_before(node, steps)
        return zero_point

    def _add_constant(self, hint: str, array: np.ndarray) -> str:
        name = self._make_name(hint)
        self.root.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _make_name(self, hint: str) -> str:
        name = hint
        while name in self.names:
            self.names[hint] += 1
            name = f"{hint}_{self.names[hint]}"
        self.names[name] = 0
        return name

    def drop_unused(self, reads: set[str]) -> None:
        """Remove the int8 constants that nothing reads any more."""
        dropped = {name for name, _ in self.moved.values()} - reads
        for field in (self.root.initializer, self.root.input):  # old models list constants among the inputs, too
            for i in reversed(range(len(field))):
                if field[i].name in dropped:
                    del field[i]


def _walk(model: ModelProto) -> Iterator[_Scope]:
    """Yield the main graph and all graphs inside it, each before those inside."""
    pending: list[tuple[GraphProto, _Scope | None]] = [(model.graph, None)]
    while pending:
        graph, parent = pending.pop(0)
        scope = _read_scope(graph, parent)
        if parent is None and model.ir_version >= 4:
            # An initializer that is also an input is a default: a caller may pass other weights.
            for info in graph.input:
                scope.constants.pop(info.name, None)
        yield scope
        pending += [(inner, scope) for node in graph.node for inner in _list_graphs(node)]


def _read_scope(graph: GraphProto, parent: _Scope | None) -> _Scope:
    if parent is None:
        scope = _Scope(graph, parent, {}, {}, {})
    else:
        scope = _Scope(graph, parent, _extend(parent.types), _extend(parent.constants), _extend(parent.producers))
    scope.constants.update({tensor.name: tensor for tensor in graph.initializer})
    kinds = {x.name: x.type.tensor_type.elem_type for x in (*graph.input, *graph.value_info, *graph.output)}
    scope.types.update({name: kind for name, kind in kinds.items() if kind})
    scope.types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    for node in graph.node:
        scope.producers.update(dict.fromkeys(node.output, node))
        if node.op_type == "Constant" and (value := _read_attributes(node).get("value")) is not None:
            scope.constants[node.output[0]] = value
        for name, kind in zip(node.output, _derive_types(node, scope.types), strict=False):
            scope.types.setdefault(name, kind)
    return scope


def _extend(outer: MutableMapping[str, _T]) -> MutableMapping[str, _T]:
    """Return an empty mapping with `outer` behind it: a copy for each of thousands of subgraphs would take long."""
    return ChainMap({}, *(outer.maps if isinstance(outer, ChainMap) else (outer,)))


# The position of the input that has the type of the first result; elsewhere it is the first input.
TYPE_SOURCES = {"QLinearConv": 7, "QLinearMatMul": 7, "QGemm": 8, "QLinearConcat": 1, "QLinearWhere": 1, "Where": 1}
# Operators that read codes and return floats.
FLOAT_RESULTS = (
    "DequantizeLinear",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "QAttention",
    "GatherBlockQuantized",
)


def _derive_types(node: NodeProto, types: Mapping[str, int]) -> list[int]:
    """Return the element types of the results of a node, as far as products of codes need them; 0 is unknown."""
    operator, attributes = node.op_type, _read_attributes(node)
    if operator == "DynamicQuantizeLinear":
        return [_UINT8, TensorProto.FLOAT, _UINT8]
    if operator in FLOAT_RESULTS:
        return [TensorProto.FLOAT]
    if operator in ("MatMulInteger", "ConvInteger"):
        return [TensorProto.INT32]
    if operator in ("Cast", "Constant", "ConstantOfShape"):
        value = attributes.get("value")
        return [attributes.get("to", 0) if value is None else value.data_type]
    if operator == "QuantizeLinear":
        zero_point = _get_input(node, 2)
        return [types.get(zero_point, 0) if zero_point else attributes.get("output_dtype", 0) or _UINT8]
    graphs = list(_list_graphs(node))
    if graphs:  # If, Loop and Scan give the results of their graphs; a Loop's graph returns its condition first
        results = graphs[0].output[1 if operator == "Loop" else 0 :]
        return [info.type.tensor_type.elem_type for info in results]
    kind = types.get(_get_input(node, TYPE_SOURCES.get(operator, 0)), 0)
    return [kind] * len(node.output)


def _list_graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _read_attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _get_input(node: NodeProto, position: int) -> str:
    return node.input[position] if len(node.input) > position else ""
