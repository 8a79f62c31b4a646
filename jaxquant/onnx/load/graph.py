"""A model's graph in Python: nodes with attributes as values, constants as numpy arrays, function calls as bodies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx

from ..limits import Limits, ModelError, check_memory
from ..model_file import list_opsets, read_function_key, read_onnx_dtype, read_tensor

_KIND = onnx.AttributeProto


# The documentation of a division that XLA must not replace by a product with the reciprocal. `export` writes it, and a
# node has it as an attribute.
ROUNDED_ONCE = "jaxquant.rounded_once"
# The attribute of a DequantizeLinear with a product that is rounded before a sum reads it.
ROUNDED = "jaxquant.rounded"
# The attribute of a mean over windows that stands for their sum.
WINDOW_SUM = "jaxquant.window_sum"
# The attribute of a Gemm with weights that many others read, too.
SHARED_WEIGHTS = "jaxquant.shared_weights"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A node of a graph.

    Attributes:
        op: the operator's name.
        domain: the operator's domain, "" for ONNX's own.
        inputs: the names of the inputs; "" for one that is left out.
        outputs: the names of the outputs; "" for one that nobody reads.
        attributes: the values of the attributes; a subgraph is a Graph.
        opset: the version of the domain.
        label: what errors and tables call the node.
        body: the graph of the function that the node calls, or None for an operator.
    """

    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    label: str
    body: Graph | None = None

    def list_reads(self) -> Iterator[str]:
        """Yield the names that the node reads, also inside its subgraphs."""
        yield from (name for name in self.inputs if name)
        for value in self.attributes.values():
            if isinstance(value, Graph):
                yield from value.list_captures()


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a model declares of an input or an output.

    Attributes:
        dtype: its dtype in ONNX.
        shape: its lengths; a name or None for one that is not fixed; None for an unknown rank.
    """

    dtype: np.dtype
    shape: tuple[int | str | None, ...] | None


def read_declaration(value: onnx.ValueInfoProto) -> Declaration:
    """Return what a model declares of a value. A negative length stands for any, as in ONNX Runtime."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return Declaration(np.dtype(np.float32), None)
    dtype = read_onnx_dtype(kind.elem_type, f"input {value.name!r}")
    if not kind.HasField("shape"):
        return Declaration(dtype, None)
    lengths = [
        (d.dim_value if d.dim_value >= 0 else None) if d.HasField("dim_value") else (d.dim_param or None)
        for d in kind.shape.dim
    ]
    return Declaration(dtype, tuple(lengths))


def _read_outputs(graph: onnx.GraphProto) -> dict[str, Declaration]:
    """Return what a graph declares of its outputs, as far as they are arrays of numbers."""
    found = {}
    for value in graph.output:
        with contextlib.suppress(ModelError):  # no type, or strings
            if value.type.HasField("tensor_type"):
                found[value.name] = read_declaration(value)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A graph, a subgraph or the body of a function.

    Attributes:
        inputs: the names of the inputs that are no initializers.
        outputs: the names of the outputs.
        constants: the initializers, and the results of Constant nodes.
        literals: which of the constants are no parameters if they have one element: the results of Constant nodes, and
            other scalars.
        nodes: the nodes in an order in which they can run, without nodes that no output needs.
        declared: what is declared of the outputs.
        bound: which of the constants are inputs of the model that the user has given a value.
        requested: which of the constants are parameters because the user has asked for them.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, np.ndarray]
    literals: frozenset[str]
    nodes: tuple[Node, ...]
    declared: Mapping[str, Declaration] = dataclasses.field(default_factory=dict)
    bound: frozenset[str] = frozenset()
    requested: frozenset[str] = frozenset()

    def list_captures(self) -> Iterator[str]:
        """Yield the names that the graph reads from the graphs around it."""
        own = {*self.inputs, *self.constants, *(name for node in self.nodes for name in node.outputs)}
        yield from (name for node in self.nodes for name in node.list_reads() if name not in own)
        yield from (name for name in self.outputs if name not in own)


def convert_model(model: onnx.ModelProto, limits: Limits) -> Graph:
    """Return the main graph of a checked model."""
    functions = {read_function_key(function): function for function in model.functions}
    return _Converter(functions, list_opsets(model.opset_import), {}, _Reader(limits)).convert_graph(model.graph)


def select_live(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes that the outputs need."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if not needed.isdisjoint(name for name in node.outputs if name):
            kept.append(node)
            needed.update(node.list_reads())
    return tuple(reversed(kept))


def list_readers(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Return the nodes that read each value, once for each use; none for other names."""
    readers: dict[str, list[Node]] = collections.defaultdict(list)
    for node in nodes:
        for name in node.list_reads():
            readers[name].append(node)
    return readers


def list_small_powers(graph: Graph) -> dict[str, int]:
    """Return the scalar constants that are exponents 2 or 3 of Pow, and have no other use as an initializer."""
    powers: dict[str, int] = {}
    others = set(graph.outputs)
    for node in graph.nodes:
        is_power = node.op == "Pow" and not node.domain
        others.update(name for name in node.list_reads() if not (is_power and name == node.inputs[1]))
        exponent = graph.constants.get(node.inputs[1]) if is_power else None
        if exponent is not None and exponent.size == 1 and exponent.ndim <= 1 and exponent.item() in (2, 3):
            powers[node.inputs[1]] = int(exponent.item())
    powers = {name: n for name, n in powers.items() if name not in graph.requested}
    return {name: n for name, n in powers.items() if name in graph.literals or name not in others}


class _Reader:
    """The arrays of tensors, counted: a function makes the arrays of its body anew for each call."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._total = limits, 0

    def read_constant(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Return the array of a tensor; raise if all together take more memory than the limits allow."""
        array = read_tensor(tensor)
        self._total += array.nbytes
        check_memory(self._limits, self._total, "the set of all constants")
        return array


@dataclasses.dataclass(frozen=True)
class _Converter:
    """The conversion of the nodes of one scope: the model, or one call of a function.

    Attributes:
        functions: the functions of the model.
        opsets: the versions of the domains in this scope.
        arguments: the attributes of the call, for references to them.
        reader: what reads tensors.
    """

    functions: Mapping[tuple[str, str, str], onnx.FunctionProto]
    opsets: Mapping[str, int]
    arguments: Mapping[str, Any]
    reader: _Reader

    def convert_graph(self, graph: onnx.GraphProto) -> Graph:
        if graph.sparse_initializer:
            raise ModelError("sparse initializers are not supported")
        constants = {tensor.name: self.reader.read_constant(tensor) for tensor in graph.initializer}
        # Old models list their initializers among the inputs.
        inputs = tuple(value.name for value in graph.input if value.name not in constants)
        collected = self._collect(inputs, tuple(value.name for value in graph.output), constants, graph.node)
        return dataclasses.replace(collected, declared=_read_outputs(graph))

    def _collect(self, inputs: Any, outputs: Any, constants: dict[str, np.ndarray], protos: Any) -> Graph:
        nodes, literals = [], set()
        for index, proto in enumerate(protos):
            node = self._convert_node(proto, index)
            if node.op == "Constant" and not node.domain:
                constants[node.outputs[0]] = _read_constant(node)
                literals.add(node.outputs[0])
            else:
                nodes.append(node)
        live = select_live(nodes, outputs)
        read = {*outputs, *(name for node in live for name in node.list_reads())}
        constants = {name: array for name, array in constants.items() if name in read}
        return Graph(tuple(inputs), tuple(outputs), constants, frozenset(literals & read), live)

    def _convert_node(self, proto: onnx.NodeProto, index: int) -> Node:
        key = read_function_key(proto)
        label = f"node {index}, {proto.op_type}" + (f" {proto.name!r}" if proto.name else "")
        attributes: dict[str, Any] = {ROUNDED_ONCE: 1} if proto.doc_string == ROUNDED_ONCE else {}
        for attribute in proto.attribute:
            name = attribute.ref_attr_name
            if name:
                # An argument that neither the call nor a default gives leaves the attribute out.
                if name in self.arguments:
                    attributes[attribute.name] = self.arguments[name]
            else:
                attributes[attribute.name] = self._convert_attribute(attribute, label)
        body = None
        if key in self.functions:
            body = self._convert_call(self.functions[key], attributes)
        domain, version = key[0], self.opsets.get(key[0], 1)
        return Node(proto.op_type, domain, tuple(proto.input), tuple(proto.output), attributes, version, label, body)

    def _convert_call(self, function: onnx.FunctionProto, arguments: Mapping[str, Any]) -> Graph:
        """Return the body of a function with the attributes of a call in it."""
        converter = _Converter(self.functions, list_opsets(function.opset_import), {}, self.reader)
        defaults = {a.name: converter._convert_attribute(a, function.name) for a in function.attribute_proto}
        converter = dataclasses.replace(converter, arguments={**defaults, **arguments})
        return converter._collect(tuple(function.input), tuple(function.output), {}, function.node)

    def _convert_attribute(self, attribute: onnx.AttributeProto, label: str) -> Any:
        kind = attribute.type
        if kind == _KIND.TENSOR:
            # No supported operator reads strings.
            return None if attribute.t.data_type == onnx.TensorProto.STRING else self.reader.read_constant(attribute.t)
        if kind == _KIND.GRAPH:
            return self.convert_graph(attribute.g)
        if kind in (_KIND.FLOAT, _KIND.INT):
            return attribute.f if kind == _KIND.FLOAT else attribute.i
        if kind in (_KIND.FLOATS, _KIND.INTS):
            return tuple(attribute.floats if kind == _KIND.FLOATS else attribute.ints)
        if kind == _KIND.STRING:
            # Bytes that are no UTF-8 make an unknown word, which the operator refuses with its own message.
            return attribute.s.decode(errors="replace")
        if kind == _KIND.STRINGS:
            return tuple(text.decode(errors="replace") for text in attribute.strings)
        if kind == _KIND.TYPE_PROTO:
            return attribute.tp
        raise ModelError(f"{label}: attribute {attribute.name!r} has a kind that is not supported: {kind}")


def _read_constant(node: Node) -> np.ndarray:
    """Return the result of a Constant node."""
    dtypes = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name, value in node.attributes.items():
        if name == "value" and value is not None:
            return value
        if name in dtypes:
            return np.asarray(value, dtypes[name])
    raise ModelError(f"{node.label}: expected a tensor or numbers as its value, got {sorted(node.attributes)}")


# The table of operators: what is registered under a name and a domain, and how its inputs are passed.


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Operator(NamedTuple):
    """An operator.

    Attributes:
        function: the implementation; its first argument is the Call, the others are the inputs.
        static: the inputs that it needs as numpy arrays.
        keeps: the inputs that it takes as numpy arrays if they are known, and as JAX arrays if not.
        folds: whether it computes with numpy if all other inputs are numpy arrays.
        passes: whether it takes all other inputs as they are, because it hands them on to a subgraph or in a sequence.
    """

    function: Callable[..., Any]
    static: tuple[int, ...]
    keeps: tuple[int, ...]
    folds: bool
    passes: bool


OPERATORS: dict[tuple[str, str], Operator] = {}


def register(
    *names: str,
    domain: str = "",
    static: tuple[int, ...] = (),
    keeps: tuple[int, ...] = (),
    folds: bool = False,
    passes: bool = False,
) -> Callable[[_Function], _Function]:
    """Return a decorator that puts an implementation into the table under each of the names."""

    def decorate(function: _Function) -> _Function:
        for name in names:
            OPERATORS[domain, name] = Operator(function, static, keeps, folds, passes)
        return function

    return decorate


def look_up_operator(node: Node) -> Operator | None:
    """Return the operator of a node, or None for an unknown one and for the call of a function."""
    return None if node.body is not None else OPERATORS.get((node.domain, node.op))
