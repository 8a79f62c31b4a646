"""A graph with nodes that can be replaced: its constants, and who computes and who reads a value."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


class GraphEditor:
    """The main graph of a model, which is edited in place by `finish`.

    Attributes:
        model: the model.
        nodes: its nodes, in their order.
        constants: the initializers that nothing can replace, by name.
        producers: the node that computes a value.
        readers: the nodes that read a value, once for each of their inputs.
        captured: the values that subgraphs read, or the graph returns.
        defaults: the inputs with an initializer, which a caller can replace.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.nodes = list(model.graph.node)
        inputs = {info.name for info in model.graph.input}
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in inputs}
        self.defaults = inputs & {tensor.name for tensor in model.graph.initializer}
        self._arrays: dict[str, np.ndarray] = {}
        self._weights: dict[str, np.ndarray | None] = {}
        self._stored: dict[Any, str] = {}
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[NodeProto]] = collections.defaultdict(list)
        self.captured = {info.name for info in model.graph.output}
        for node in self.nodes:
            for name in node.input:
                self.readers[name].append(node)
            for subgraph in list_subgraphs(node):
                self.captured |= _list_read_names(subgraph)
        # ONNX Runtime puts a Cast behind weights of float16, which it has few kernels of.
        self._casts = {
            node.output[0]: node.input[0] for node in self.nodes
            if node.op_type == "Cast" and node.input[0] in self._tensors
            and self._tensors[node.input[0]].data_type == TensorProto.FLOAT16
            and get_attribute(node, "to") == TensorProto.FLOAT
        }  # fmt: skip
        self._names = {*inputs, *self._tensors, *self.producers, *self.captured, ""}
        self._places = {id(node): i for i, node in enumerate(self.nodes)}
        self._before: dict[int, list[NodeProto]] = collections.defaultdict(list)
        self._after: dict[int, list[NodeProto]] = collections.defaultdict(list)
        self._replaced: dict[int, list[NodeProto]] = {}

    def is_constant(self, name: str) -> bool:
        """Return whether a value is an initializer that no input can replace, or one of float16 as float32."""
        return name in self._tensors or name in self._casts

    def read_constant(self, name: str) -> np.ndarray:
        """Return the array of an initializer."""
        if name not in self._arrays:
            array = numpy_helper.to_array(self._tensors[self._casts.get(name, name)])
            self._arrays[name] = array.astype(np.float32) if name in self._casts else array
        return self._arrays[name]

    def read_weight(self, node: NodeProto, place: int) -> np.ndarray | None:
        """Return the constant input of a node if it is float32 and finite, or None."""
        return self.find_weight(node.input[place] if len(node.input) > place else "")

    def find_weight(self, name: str) -> np.ndarray | None:
        """Return a constant if it is float32 and finite, or None."""
        if name not in self._weights:
            array = self.read_constant(name) if self.is_constant(name) else None
            is_weight = array is not None and array.dtype == np.float32 and bool(np.isfinite(array).all())
            self._weights[name] = array if is_weight else None
        return self._weights[name]

    def find_only_reader(self, name: str) -> NodeProto | None:
        """Return the node that alone reads a value, which no subgraph reads and the graph does not return."""
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.captured else None

    # Edits. Nodes that are added have a place beside a node of the graph, so that the order stays right.

    def make_name(self, hint: str) -> str:
        """Return a name that nothing else has."""
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def add_constant(self, array: Any, hint: str) -> str:
        """Return the name of an initializer; equal arrays share one."""
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._stored:
            self._stored[key] = self.make_name(hint)
            self.model.graph.initializer.append(numpy_helper.from_array(array, self._stored[key]))
        return self._stored[key]

    def make_node(self, op: str, inputs: Sequence[str], hint: str, domain: str = "", **attributes: Any) -> NodeProto:
        """Return a node with one new output."""
        return helper.make_node(op, list(inputs), [self.make_name(hint)], domain=domain, **attributes)

    def put_before(self, node: NodeProto, *new: NodeProto) -> None:
        """Put nodes before a node, after others that were put there."""
        self._before[id(node)] += new

    def put_after(self, node: NodeProto, *new: NodeProto) -> None:
        """Put nodes after a node, after others that were put there."""
        self._after[id(node)] += new

    def replace(self, node: NodeProto, *new: NodeProto) -> None:
        """Put nodes in place of a node; the last one gets its output."""
        new[-1].output[0] = node.output[0]
        self._replaced[id(node)] = list(new)

    def put_first(self, name: str, *new: NodeProto) -> None:
        """Put nodes where a value is known first: after the node that computes it, or before all nodes."""
        producer = self.producers.get(name)
        if producer is None:
            self.put_before(self.nodes[0], *new)
        else:
            self.put_after(producer, *new)

    def finish(self) -> ModelProto:
        """Return the model with the new nodes, without the constants that nobody reads any more."""
        nodes: list[NodeProto] = []
        for node in self.nodes:
            nodes += [*self._before[id(node)], *self._replaced.get(id(node), [node]), *self._after[id(node)]]
        graph = self.model.graph
        del graph.node[:]
        names = {name for node in nodes for name in node.input} | self.captured
        graph.node.extend(node for node in nodes if node.output[0] not in self._casts or node.output[0] in names)
        read = {info.name for info in (*graph.input, *graph.output)}
        for node in graph.node:
            read.update(node.input)
            for subgraph in list_subgraphs(node):
                read |= _list_read_names(subgraph)
        kept = [tensor for tensor in graph.initializer if tensor.name in read]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        # The types of values that no longer exist, and of values that have another node now.
        del graph.value_info[:]
        return self.model


def get_attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return an attribute of a node."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def list_subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def _list_read_names(graph: GraphProto) -> set[str]:
    """Return all names that a subgraph reads or returns, of its own values and of others."""
    names = {info.name for info in graph.output}
    for node in graph.node:
        names.update(node.input)
        for subgraph in list_subgraphs(node):
            names |= _list_read_names(subgraph)
    return names
