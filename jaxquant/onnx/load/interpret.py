"""The execution of a graph: one node after the other, on numpy arrays where the inputs are known, else on JAX's."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from ..._core import recording
from ..._kernels import barriers
from ..limits import Limits, ModelError, check_memory, count_array_bytes
from .channels_last import ChannelsLast, read_images, run_operator
from .graph import Graph, Node, Operator, look_up_operator
from .values import (
    OperatorError,
    Tensor,
    UnknownValueError,
    convert_to_jax,
    count_all,
    is_computed,
    is_known,
    read_length,
    read_static,
    wrap_result,
)

# Operators with codes that `export` and `verify` list.
_QUANTIZING = ("QuantizeLinear", "DynamicQuantizeLinear")
# Operators with numbers that a compiled program need not know.
_SCALING = ("Add", "Mul", "RoundedMul")
# What an operator raises that reads a traced value.
_UNREADABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
# Shapes, and all that is computed of them, have no more elements. Larger arrays are data: they are left to the compiled
# program, as far as numpy does not compute them.
_MOST_KNOWN = 2**16


@dataclasses.dataclass(eq=False)
class Run:
    """One execution of a graph.

    Attributes:
        limits: what the execution may take.
        is_exported: whether the model was exported by this library; its float operators are then JAX's.
        live: the bytes of the values that are alive.
        count: how many nodes have run; a loop that is written out counts once for each iteration.
        cut: the nodes that have windows beyond the padding.
    """

    limits: Limits
    is_exported: bool = False
    cut: set[str] = dataclasses.field(default_factory=set)
    live: int = 0
    count: int = 0

    def run_graph(self, graph: Graph, values: Mapping[str, Any]) -> list[Any]:
        """Return the outputs of a graph; `values` has its inputs and all that it reads from outside."""
        values = {**graph.constants, **values}
        ends, before, known = list_last_uses(graph), self.live, set[str]()
        for index, node in enumerate(graph.nodes):
            self.count += 1
            if self.count > self.limits.nodes:
                raise ModelError(f"{node.label}: loops are written out to more than Limits.nodes = {self.limits.nodes}")
            try:
                outputs = self._run_node(node, values)
            except UnknownValueError as error:
                error.names = _list_unknown_sources(graph.nodes[:index], error.names, known)
                raise
            # A node may leave out trailing outputs.
            for name, value in zip(node.outputs, outputs, strict=False):
                if name:
                    values[name] = value
                    self.live += _measure(value)
                    known.update((name,) if is_computed(value) else ())
            check_memory(self.limits, self.live, f"{node.label}: what is alive after it")
            for name in ends[node]:
                self.live -= _measure(values.pop(name, None))
        missing = [name for name in graph.outputs if name not in values]
        if missing:
            raise ModelError(f"expected the outputs {missing} to be the results of nodes")
        # The outputs of a subgraph are counted as outputs of the node that runs it.
        self.live = before
        return [read_images(values[name]) for name in graph.outputs]

    def _run_node(self, node: Node, values: Mapping[str, Any]) -> Sequence[Any]:
        inputs: list[Any] = []
        try:
            # An empty name stands for an optional input that is left out.
            inputs = [values[name] if name else None for name in node.inputs]
            if node.body is not None:
                # A call may leave out trailing inputs of a function.
                inputs = [*map(read_images, inputs)]
                padded = [*inputs, *[None] * (len(node.body.inputs) - len(inputs))]
                return self.run_graph(node.body, dict(zip(node.body.inputs, padded, strict=True)))
            operator = look_up_operator(node)
            assert operator is not None
            call = Call(node, self, values)
            # Overflows and divisions by 0 have results in ONNX, and tell nothing about the model.
            with np.errstate(all="ignore"):
                outputs = _compute_known(operator, call, inputs) if _is_small(operator, call, inputs) else None
                if outputs is None:
                    inputs = _hide_number(call, inputs)
                    outputs = run_operator(call, operator, inputs)
                if outputs is None:
                    inputs = [*map(read_images, inputs)]
                    outputs = operator.function(call, *prepare_inputs(operator, node, inputs))
        except _UNREADABLE as error:
            text = f"{node.label}: an input must be known when the function is traced"
            raise UnknownValueError(text, _list_unknown(node, (), values)) from error
        except UnknownValueError as error:
            named = UnknownValueError(_add_label(node, error), _list_unknown(node, error.names, values))
            raise named from error.__cause__
        except ModelError as error:
            raise type(error)(_add_label(node, error)) from error.__cause__
        except Exception as error:
            # A model may be wrong far before the node that fails: its inputs' shapes show where.
            given = zip(node.inputs, inputs, strict=False)
            shapes = ", ".join(f"{name!r} {np.shape(value)}" for name, value in given if name)
            text = f"{type(error).__name__}: {str(error)[:500]}; its inputs are {shapes[:500] or 'none'}"
            raise OperatorError(f"{node.label}: {text}") from error
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [wrap_result(value) for value in outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What an operator knows of the node that it is called for.

    Attributes:
        node: the node.
        run: the execution.
        values: the values so far, which subgraphs read.
    """

    node: Node
    run: Run
    values: Mapping[str, Any]

    @property
    def opset(self) -> int:
        """The version of the operator's domain."""
        return self.node.opset

    def has_runtime_floats(self, x: Tensor) -> TypeGuard[jax.Array]:
        """Return whether an operator on an array that JAX holds has the bits of ONNX Runtime's."""
        return not self.run.is_exported and not isinstance(x, np.ndarray) and x.dtype == np.float32

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.node.attributes.get(name, default)

    @property
    def has_second_output(self) -> bool:
        """Whether the graph names the second output."""
        return len(self.node.outputs) > 1 and bool(self.node.outputs[1])

    def reserve(self, shape: Sequence[Any], dtype: DTypeLike) -> tuple[Any, ...]:
        """Return a shape as ints; raise if an array of this shape takes more than the limits allow."""
        shape = tuple(read_length(n) for n in shape)
        if any(isinstance(n, int) and n < 0 for n in shape):
            raise ModelError(f"expected lengths of 0 or more, got {shape}")
        # Before the array exists: a few bytes of a file can ask for any amount of memory.
        check_memory(self.run.limits, self.run.live + count_array_bytes(shape, dtype), f"an array of {shape}")
        return shape

    def run_subgraph(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a subgraph of this node."""
        values = {**self.values, **dict(zip(graph.inputs, inputs, strict=True))}
        return self.run.run_graph(graph, values)


def _hide_number(call: Call, inputs: list[Any]) -> list[Any]:
    """Return the inputs of a node; a known number that a traced array is multiplied by, or that is added, is hidden.

    Exporters write so the scale of a layer's weights, and what a network has learned to scale its activations by: the
    layers differ in nothing else.
    """
    if call.node.op not in _SCALING or call.run.is_exported or recording.is_recording() or recording.is_analyzing():
        return inputs
    arrays = [x.array if isinstance(x, ChannelsLast) else x for x in inputs]
    if not any(isinstance(x, Tracer) for x in arrays):
        return inputs
    return [
        barriers.hide_number(x) if isinstance(x, np.ndarray) and x.size == 1 and x.dtype == np.float32 else x
        for x in inputs
    ]


def prepare_inputs(operator: Operator, node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs as an operator takes them: all numpy arrays, or JAX arrays and what it needs to know as numpy."""
    free = [i for i in range(len(inputs)) if i not in operator.static and i not in operator.keeps]
    folds = operator.passes or (operator.folds and all(_is_numpy(inputs[i]) for i in free))
    prepared = list(inputs)
    for i, value in enumerate(inputs):
        if i in operator.static:
            prepared[i] = read_static(value, f"input {i}, {node.inputs[i]!r},", node.inputs[i])
        elif i in operator.keeps:
            prepared[i] = np.asarray(value) if is_known(value) and value is not None else value
        elif not folds:
            prepared[i] = _map_sequence(convert_to_jax, value)
    return prepared


def _is_numpy(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numpy(part) for part in value)
    return value is None or isinstance(value, np.ndarray)


def _map_sequence(function: Any, value: Any) -> Any:
    """Return a function of an array, or of each array of a sequence."""
    return [_map_sequence(function, part) for part in value] if isinstance(value, list) else function(value)


def _is_small(operator: Operator, call: Call, inputs: Sequence[Any]) -> bool:
    """Return whether all inputs of an operator are known, and few enough numbers to compute with them now."""
    # A quantization is recorded whether its input is known or not: it may be unknown for another batch.
    if recording.is_recording() and call.node.op in _QUANTIZING:
        return False
    # What hands its inputs on leaves them known itself.
    if operator.passes or not all(map(is_computed, inputs)):
        return False
    return count_all(list(inputs)) <= _MOST_KNOWN and all(is_computed(call.values[n]) for n in call.node.list_reads())


def _compute_known(operator: Operator, call: Call, inputs: Sequence[Any]) -> Any:
    """Return the results of known inputs as numpy arrays, whatever trace is in progress; None if they are large.

    Integers have 64 bits, as in ONNX.
    """
    if operator.folds:
        outputs = operator.function(call, *prepare_inputs(operator, call.node, inputs))
        if is_computed(list(outputs) if isinstance(outputs, tuple) else wrap_result(outputs)):
            return outputs
    # An exporter would record its marks, which only a trace can hold.
    with recording.pause(), jax.enable_x64(True):
        if not operator.folds:
            # As shapes first: a few numbers may ask for a large array.
            shapes = jax.eval_shape(lambda: operator.function(call, *prepare_inputs(operator, call.node, inputs)))
            if count_all(jax.tree.leaves(shapes)) > _MOST_KNOWN:
                return None
        with jax.ensure_compile_time_eval():
            outputs = operator.function(call, *prepare_inputs(operator, call.node, inputs))
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, outputs)


def _add_label(node: Node, error: ModelError) -> str:
    """Return the text of an error with the label of the innermost node only, without its outer nodes'."""
    text = str(error)
    return text if text.startswith("node ") else f"{node.label}: {text}"


def _list_unknown(node: Node, names: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of unknown values around a node that has met one; `names` are the names that it gave.

    What a subgraph calls its inputs has no name around the node. The values of all of the node's inputs may be in them.
    """
    inputs = [name for name in node.inputs if name]
    named = [name for name in names if name in values]
    wanted = named if named and len(named) == len(names) else [*named, *inputs]
    return tuple(name for name in dict.fromkeys(wanted) if not is_computed(values[name]))


def _list_unknown_sources(nodes: Sequence[Node], names: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return what values depend on, as far as it is unknown: the names that no node of the graph computes."""
    producers = {name: node for node in nodes for name in node.outputs if name}
    pending, seen, found = list(names), set(names), []
    while pending:
        name = pending.pop(0)
        if name in known:
            continue
        if name not in producers:
            found.append(name)
            continue
        new = [read for read in dict.fromkeys(producers[name].list_reads()) if read not in seen]
        seen.update(new)
        pending += new
    return tuple(found)


def list_static_names(graph: Graph, with_kept: bool = True) -> set[str]:
    """Return the names of values that some operator needs to know when the function is traced, and of their sources.

    `with_kept` adds the values that operators take as numpy arrays if they are known.
    """
    sources = _Sources(with_kept)
    values = sources.visit(graph, {})
    found, pending = set(sources.needed), list(sources.needed)
    while pending:
        new = sources.edges[pending.pop()] - found
        found |= new
        pending += new
    return {name for name, value in values.items() if value in found and name}


# A value of a graph or of a subgraph: the number of the graph and the name of the value in it.
_Value = tuple[int, str]


class _Sources:
    """What values are computed of, in a graph and its subgraphs, as far as operators compute with numpy.

    Attributes:
        with_kept: whether the values that operators take as numpy arrays if they are known are needed, too.
        edges: for each value the values that it is computed from.
        needed: the values that an operator needs to know.
    """

    def __init__(self, with_kept: bool) -> None:
        self.with_kept = with_kept
        self.edges: dict[_Value, set[_Value]] = collections.defaultdict(set)
        self.needed: set[_Value] = set()
        self._count = 0

    def visit(self, graph: Graph, outer: Mapping[str, _Value]) -> Mapping[str, _Value]:
        """Collect the values of a graph, and return them by name; `outer` has the values around it."""
        scope, self._count = self._count, self._count + 1
        own = {*graph.inputs, *graph.constants, *(name for node in graph.nodes for name in node.outputs)}
        values = collections.ChainMap({name: (scope, name) for name in own}, dict(outer))
        for node in graph.nodes:
            operator = look_up_operator(node)
            inputs, outputs = ([values.get(n) if n else None for n in names] for names in (node.inputs, node.outputs))
            if node.body is not None:
                inner = self.visit(node.body, {})
                self._connect(outputs, [inner.get(name) for name in node.body.outputs])
                self._connect([inner[name] for name in node.body.inputs], inputs)
            for subgraph in (value for value in node.attributes.values() if isinstance(value, Graph)):
                inner = self.visit(subgraph, values)
                results = [inner.get(name) for name in subgraph.outputs]
                # A Loop carries states: outputs from 1 on become inputs from 2 on, and are the node's outputs.
                is_loop = node.op == "Loop" and not node.domain
                self._connect(outputs, results[is_loop:])
                if is_loop:
                    own = [inner[name] for name in subgraph.inputs]
                    self._connect(own, inputs)
                    self._connect(own[2:], results[1:])
            if operator is None:
                continue
            positions = (*operator.static, *operator.keeps) if self.with_kept else operator.static
            self.needed.update(value for i in positions if i < len(inputs) and (value := inputs[i]) is not None)
            # Other operators compute with data: what they return is known only if all of it is constant.
            for output in outputs if operator.folds else ():
                self._connect([output] * len(inputs), inputs)
        return values

    def _connect(self, values: _Values, sources: _Values) -> None:
        """Note that each value is computed of the source at its position, and perhaps of others."""
        for value, source in zip(values, sources, strict=False):
            if value is not None and source is not None:
                self.edges[value].add(source)


_Values = Sequence[_Value | None]


def list_last_uses(graph: Graph) -> dict[Node, list[str]]:
    """Return for each node the names of results that nobody reads after it."""
    ends: dict[Node, list[str]] = collections.defaultdict(list)
    last: dict[str, Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.list_reads(), node))
        last.update(dict.fromkeys((name for name in node.outputs if name), node))
    own = {name for node in graph.nodes for name in node.outputs} - set(graph.outputs)
    for name, node in last.items():
        if name in own:
            ends[node].append(name)
    return ends


def _measure(value: Any) -> int:
    """Return the bytes of an array, and 0 for None."""
    if isinstance(value, list):
        return sum(_measure(part) for part in value)
    if value is None or not isinstance(value, np.ndarray | jax.Array | ChannelsLast):
        return 0
    return count_array_bytes(value.shape, value.dtype)
