"""The execution of a graph: one node after the other, on numpy arrays where the inputs are known, else on JAX's."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..errors import ModelError
from .graph import Graph, Node
from .limits import Limits, check_memory, count_bytes
from .registry import Operator, find_operator
from .values import convert_to_jax, is_known, read_length, read_static, wrap_result


@dataclasses.dataclass(eq=False)
class Run:
    """One execution of a graph.

    Attributes:
        limits: what the execution may take.
        is_exported: whether the model was exported by this library; its float operators are then JAX's.
        live: the bytes of the values that are alive.
        count: how many nodes have run, those of a loop that is written out once for each iteration.
    """

    limits: Limits
    is_exported: bool = False
    live: int = 0
    count: int = 0

    def run_graph(self, graph: Graph, values: Mapping[str, Any]) -> list[Any]:
        """Return the outputs of a graph; `values` has its inputs and all that it reads from outside."""
        values = {**graph.constants, **values}
        ends, before = find_last_uses(graph), self.live
        for node in graph.nodes:
            self.count += 1
            if self.count > self.limits.nodes:
                raise ModelError(f"{node.label}: loops are written out to more than Limits.nodes = {self.limits.nodes}")
            outputs = self._run_node(node, values)
            # A node may leave out trailing outputs.
            for name, value in zip(node.outputs, outputs, strict=False):
                if name:
                    values[name] = value
                    self.live += _measure(value)
            check_memory(self.limits, self.live, f"{node.label}: what is alive after it")
            for name in ends[node]:
                self.live -= _measure(values.pop(name, None))
        missing = [name for name in graph.outputs if name not in values]
        if missing:
            raise ModelError(f"expected the outputs {missing} to be the results of nodes")
        # The outputs of a subgraph are counted as those of the node that runs it.
        self.live = before
        return [values[name] for name in graph.outputs]

    def _run_node(self, node: Node, values: Mapping[str, Any]) -> Sequence[Any]:
        inputs: list[Any] = []
        try:
            # An empty name stands for an optional input that is left out.
            inputs = [values[name] if name else None for name in node.inputs]
            if node.body is not None:
                # A call may leave out trailing inputs of a function.
                padded = [*inputs, *[None] * (len(node.body.inputs) - len(inputs))]
                return self.run_graph(node.body, dict(zip(node.body.inputs, padded, strict=True)))
            operator = find_operator(node)
            assert operator is not None
            call = Call(node, self, values)
            # Overflows and divisions by 0 have results in ONNX, and tell nothing about the model.
            with np.errstate(all="ignore"):
                outputs = operator.function(call, *prepare_inputs(operator, node, inputs))
        except ModelError as error:
            # The innermost node is named already; those around it would only add their labels.
            text = str(error)
            raise (error if text.startswith("node ") else type(error)(f"{node.label}: {text}")) from error.__cause__
        except Exception as error:
            # A model may be wrong far before the node that fails: its inputs' shapes show where.
            given = zip(node.inputs, inputs, strict=False)
            shapes = ", ".join(f"{name!r} {np.shape(value)}" for name, value in given if name)
            text = f"{type(error).__name__}: {str(error)[:500]}; its inputs are {shapes[:500] or 'none'}"
            raise ModelError(f"{node.label}: {text}") from error
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

    def has_runtime_floats(self, x: Any) -> bool:
        """Return whether an operator on an array that JAX holds has the bits of ONNX Runtime's."""
        return not self.run.is_exported and not isinstance(x, np.ndarray) and x.dtype == np.float32

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.node.attributes.get(name, default)

    def has_output(self, index: int) -> bool:
        """Return whether the graph names an output."""
        return len(self.node.outputs) > index and bool(self.node.outputs[index])

    def reserve(self, shape: Sequence[Any], dtype: Any) -> tuple[Any, ...]:
        """Return a shape as ints; raise if an array of this shape takes more than the limits allow."""
        shape = tuple(read_length(n) for n in shape)
        if any(isinstance(n, int) and n < 0 for n in shape):
            raise ModelError(f"expected lengths of 0 or more, got {shape}")
        # Before the array exists: a few bytes of a file can ask for any amount of memory.
        check_memory(self.run.limits, self.run.live + count_bytes(shape, dtype), f"an array of {shape}")
        return shape

    def run_subgraph(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a subgraph of this node."""
        values = {**self.values, **dict(zip(graph.inputs, inputs, strict=True))}
        return self.run.run_graph(graph, values)


def prepare_inputs(operator: Operator, node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs as an operator takes them: all numpy arrays, or JAX arrays and what it needs to know as numpy."""
    free = [i for i in range(len(inputs)) if i not in operator.static and i not in operator.keeps]
    folds = operator.folds and all(inputs[i] is None or isinstance(inputs[i], np.ndarray) for i in free)
    prepared = list(inputs)
    for i, value in enumerate(inputs):
        if i in operator.static:
            prepared[i] = read_static(value, f"input {i}, {node.inputs[i]!r},")
        elif i in operator.keeps:
            prepared[i] = np.asarray(value) if is_known(value) and value is not None else value
        elif not folds:
            prepared[i] = convert_to_jax(value)
    return prepared


def find_static_names(graph: Graph, with_kept: bool = True) -> set[str]:
    """Return the names of values that some operator needs to know when the function is traced, and of their sources.

    `with_kept` adds those that operators take as numpy arrays if they are known.
    """
    needed: set[str] = set()
    # Backwards, so that all readers of a node's results come before the node.
    for node in reversed(graph.nodes):
        operator = find_operator(node)
        subgraphs = [value for value in node.attributes.values() if isinstance(value, Graph)]
        for subgraph in [*subgraphs, *([node.body] if node.body is not None else [])]:
            inner = find_static_names(subgraph, with_kept)
            needed |= inner & set(subgraph.list_captures())
            if node.body is not None:
                needed |= {name for name, own in zip(node.inputs, subgraph.inputs, strict=False) if own in inner}
        if operator is None:
            continue
        if operator.folds and not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
        positions = (*operator.static, *operator.keeps) if with_kept else operator.static
        needed.update(node.inputs[i] for i in positions if i < len(node.inputs))
    return needed - {""}


def find_last_uses(graph: Graph) -> dict[Node, list[str]]:
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
    if value is None or not isinstance(value, np.ndarray | jax.Array):
        return 0
    return count_bytes(value.shape, value.dtype)
