"""ONNX nodes of primitives that order elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import elementwise
from ..graph import ModelGraph
from ..registry import WriterCall, writes
from ..values import Value


@writes("top_k")
def write_top_k(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write the largest elements and their indices."""
    (x,), spec = call.inputs, call.outputs[0]
    axis = call.parameters.get("axis", len(spec.shape) - 1)
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    ordered, index = _order(graph, name, x.dtype, spec.shape[axis], axis, largest=1)
    return [Value(spec.shape, x.dtype, ordered), Value(spec.shape, np.dtype(np.int32), graph.cast(index, np.int32))]


def _order(graph: ModelGraph, name: str, dtype: Any, count: Any, axis: int, largest: int) -> list[str]:
    """Return the largest or the smallest elements in their order, and their indices."""
    name = elementwise.widen_ordered(graph, name, dtype)
    ordered, index = graph.add("TopK", [name, graph.add_shape((count,))], 2, axis=axis, largest=largest)
    return [elementwise.narrow_ordered(graph, ordered, dtype), index]


@writes("sort")
def write_sort(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write a sort by one key or more, with the other arrays in the same order."""
    p = call.parameters
    shape, axis, keys = call.outputs[0].shape, p["dimension"], p["num_keys"]
    names = [graph.store_full(x, shape) for x in call.inputs]
    # TopK is stable: an order by the last key, which is then ordered by the one before it, is one by both.
    order, ordered = "", ""
    for name, x in reversed([*zip(names[:keys], call.inputs, strict=False)]):
        key = graph.add("GatherElements", [name, order], axis=axis) if order else name
        ordered, index = _order(graph, key, x.dtype, shape[axis], axis, largest=0)
        order = graph.add("GatherElements", [order, index], axis=axis) if order else index
    results = [Value(shape, call.inputs[0].dtype, ordered)]
    for name, x in zip(names[1:], call.inputs[1:], strict=True):
        if _counts_along(x, axis):
            results.append(Value(shape, x.dtype, graph.cast(order, x.dtype)))
            continue
        results.append(Value(shape, x.dtype, graph.add("GatherElements", [name, order], axis=axis)))
    return results


def _counts_along(x: Value, axis: int) -> bool:
    """Return whether an array holds the index of each element along an axis, as that of an argsort does."""
    if not x.is_known or np.dtype(x.dtype).kind not in "iu":
        return False
    array = np.asarray(x.array)
    count = np.arange(array.shape[axis]).reshape(*(-1 if a == axis else 1 for a in range(array.ndim)))
    return bool(np.all(array == count))


@writes("argmax", "argmin")
def write_arg_extreme(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the index of an extreme."""
    p, operator = call.parameters, {"argmax": "ArgMax", "argmin": "ArgMin"}[call.name]
    name = graph.store_full(call.inputs[0], p["input_shapes"][0])
    name = elementwise.widen_ordered(graph, name, call.inputs[0].dtype)
    index = graph.add(operator, [name], axis=p["axes"][0], keepdims=0)
    return Value(call.outputs[0].shape, np.dtype(p["index_dtype"]), graph.cast(index, p["index_dtype"]))
