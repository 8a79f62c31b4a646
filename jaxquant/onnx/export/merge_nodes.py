"""Pairs of nodes that ONNX has one node for. Without merging them, a loaded model would be exported with more nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper

from .graph import Graph, list_reads, select_needed

_REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd")


def merge_nodes(graph: Graph, outputs: Sequence[str]) -> None:
    """Merge pairs of nodes of which the first is computed for the second alone, also in the bodies of loops.

    A reduction whose dimensions are inserted again keeps them. A slice of one entry whose dimension is removed is a
    Gather, but not in the form "qdq": ONNX Runtime moves a quantization past Slice and Squeeze, and not past Gather.

    Args:
        graph: the graph.
        outputs: the tensors that have to keep their names; so have the quantize points of the graph.
    """
    graph.nodes[:] = _merge(graph, graph.nodes, {*outputs, *_list_names(graph.points)})


def _list_names(points: Sequence[Any]) -> Iterator[str]:
    """Yield the tensors of quantize points, which have the names of their loops before them."""
    for point in points:
        if isinstance(point, str):
            yield point
        else:
            yield from _list_names(point)


def _merge(graph: Graph, nodes: Sequence[NodeProto], kept: Collection[str]) -> list[NodeProto]:
    uses = Counter(name for node in nodes for name in list_reads(node))
    produced = {name: node for node in nodes for name in node.output}
    merged = []
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _merge_body(graph, attribute.g, kept)
        first = produced.get(node.input[0]) if node.input else None
        if first is not None and uses[node.input[0]] == 1 and node.input[0] not in kept:
            node = _merge_reduction(graph, first, node) or _merge_slice(graph, first, node) or node
        merged.append(node)
    # What nothing reads any more is dropped with all other unused nodes.
    return merged


def _merge_body(graph: Graph, body: GraphProto, kept: Collection[str]) -> None:
    outputs = [output.name for output in body.output]
    nodes = select_needed(_merge(graph, body.node, {*kept, *outputs}), outputs)[0]
    del body.node[:]
    body.node.extend(nodes)


def _merge_reduction(graph: Graph, first: NodeProto, second: NodeProto) -> NodeProto | None:
    """Return a reduction that keeps its dimensions, or None."""
    if first.op_type not in _REDUCTIONS or second.op_type != "Unsqueeze":
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in first.attribute}
    axes = attributes["axes"] if "axes" in attributes else _find_constant(graph, first.input[1])
    inserted = _find_constant(graph, second.input[1])
    if attributes["keepdims"] or axes is None or inserted is None or sorted(axes) != sorted(inserted):
        return None
    attributes["keepdims"] = 1
    return helper.make_node(first.op_type, list(first.input), list(second.output), name=second.name, **attributes)


def _merge_slice(graph: Graph, first: NodeProto, second: NodeProto) -> NodeProto | None:
    """Return a Gather of one entry, or None."""
    if first.op_type != "Slice" or second.op_type != "Squeeze" or graph.form == "qdq" or len(second.input) < 2:
        return None
    parts = [_find_constant(graph, name) for name in (*first.input[1:], second.input[1])]
    if len(parts) != 5 or any(part is None or len(part) != 1 for part in parts):
        return None
    (start,), (end,), (axis,), (step,), (gone,) = parts  # type: ignore[misc]
    if axis != gone or step != 1 or start < 0 or end != start + 1:
        return None
    index = graph.add_constant(np.int64(start))
    return helper.make_node("Gather", [first.input[0], index], list(second.output), name=second.name, axis=int(axis))


def _find_constant(graph: Graph, name: str) -> list[int] | None:
    array = graph.arrays.get(name)
    return None if array is None else [int(n) for n in array.reshape(-1)]
