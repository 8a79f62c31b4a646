"""ONNX nodes of reductions, running sums and extremes, and sorts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from . import conversions, elementwise, values
from .graph import ModelGraph, WriterCall, writes, writes_mark
from .values import Spec, UnsupportedError, Value

_REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}


@writes(*_REDUCTIONS, "reduce_and", "reduce_or")
def write_reduction(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a reduction; of bools, of their integers."""
    x, axes = call.inputs[0], [int(axis) for axis in call.parameters["axes"]]
    output = call.outputs[0]
    if not axes:
        return x
    shape = call.parameters["input_shapes"][0]
    operator = _REDUCTIONS.get(call.name) or {"reduce_and": "ReduceMin", "reduce_or": "ReduceMax"}[call.name]
    # ReduceMin and ReduceMax take bools from opset 20 on only.
    wide = elementwise.choose_compute_dtype(x.dtype)
    if any(values.is_static((shape[axis],)) and shape[axis] == 0 for axis in axes):
        return _make_empty_result(call.name, output)
    # A reduced dimension must have all of its elements; the others may stay short.
    stored = tuple(shape[axis] if axis in axes else x.shape[axis] for axis in range(len(shape)))
    name = graph.store_full(x, stored)
    kept = tuple(n for axis, n in enumerate(stored) if axis not in axes)
    if operator in ("ReduceMax", "ReduceMin"):
        name = graph.reduce(operator, elementwise.widen_ordered(graph, name, x.dtype), axes)
        return Value(kept, values.choose_container(x.dtype), elementwise.narrow_ordered(graph, name, x.dtype))
    counts = [shape[axis] for axis in axes]
    if operator == "ReduceSum" and wide == np.int32 and not conversions.fits_sum(graph, x, counts):
        # ONNX Runtime's sum of int32 saturates, and JAX's keeps the low bits, as a cast does.
        wide = np.dtype(np.int64)
    name = name if wide == values.choose_container(x.dtype) else graph.cast(name, wide)
    name = graph.reduce(operator, name, axes)
    target = values.choose_container(output.dtype)
    return Value(kept, target, name if wide == target else graph.cast(name, target))


def _make_empty_result(name: str, output: Spec) -> Value:
    """Return the result of a reduction of no elements; ONNX Runtime would give the limits of a wider dtype."""
    dtype = values.choose_container(output.dtype)
    numbers: dict[str, Any] = {"reduce_sum": 0, "reduce_or": 0, "reduce_and": 1, "reduce_prod": 1}
    if name in ("reduce_max", "reduce_min"):
        info = jnp.iinfo(output.dtype) if dtype.kind in "iu" else None
        low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
        low, high = (False, True) if dtype == np.bool_ else (low, high)
        numbers = {"reduce_max": low, "reduce_min": high}
    return values.make_known(np.full((1,) * len(output.shape), numbers[name], dtype))


@writes_mark("sum_last")
def write_sum(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a sum along the last dimension, in the runtime's order."""
    shape, (output,), graph.floats = call.parameters["input_shapes"][0], call.outputs, "runtime"
    name = graph.reduce("ReduceSum", graph.store_full(call.inputs[0], shape), [len(shape) - 1])
    return Value(tuple(output.shape), np.dtype(output.dtype), name)


@writes("cumsum")
def write_cumulative_sum(graph: ModelGraph, call: WriterCall) -> Value:
    """Write running sums."""
    (x,), p = call.inputs, call.parameters
    # CumSum has no integers of 8 and 16 bits. Sums in a wider dtype have the same low bits.
    container, wide = values.choose_container(x.dtype), elementwise.choose_compute_dtype(x.dtype)
    name = graph.store_full(x, p["input_shapes"][0])
    name = name if wide == container else graph.cast(name, wide)
    name = graph.add("CumSum", [name, graph.add_constant(np.int64(p["axis"]))], reverse=int(p["reverse"]))
    name = name if wide == container else graph.cast(name, container)
    return Value(call.outputs[0].shape, container, name)


@writes("cummax", "cummin")
def write_cumulative_extreme(graph: ModelGraph, call: WriterCall) -> Value:
    """Write running extremes, in as many steps as the length of the axis has bits.

    Each step joins the extremes of the last 1, 2, 4, ... elements with the extremes of as many elements before.
    """
    (x,), p = call.inputs, call.parameters
    shape, axis = p["input_shapes"][0], int(p["axis"])
    if not values.is_static((shape[axis],)):
        raise UnsupportedError("the number of steps depends on the length of the axis, which is symbolic")
    operator, length = {"cummax": "Max", "cummin": "Min"}[call.name], int(shape[axis])
    name = elementwise.widen_ordered(graph, graph.store_full(x, shape), x.dtype)
    span = 1
    while span < length:
        first, last = (graph.slice(name, [a], [b], [axis], [1]) for a, b in ((0, length - span), (span, length)))
        edge = (length - span, length) if p["reverse"] else (0, span)
        parts = [graph.slice(name, [edge[0]], [edge[1]], [axis], [1]), graph.add(operator, [first, last])]
        name = graph.add("Concat", parts[::-1] if p["reverse"] else parts, axis=axis)
        span *= 2
    name = elementwise.narrow_ordered(graph, name, x.dtype)
    return Value(tuple(call.outputs[0].shape), values.choose_container(x.dtype), name)


# Orders of elements.


@writes("top_k")
def write_top_k(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write the largest elements and their indices."""
    (x,), spec = call.inputs, call.outputs[0]
    axis = call.parameters.get("axis", len(spec.shape) - 1)
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    ordered, index = _order(graph, name, x.dtype, spec.shape[axis], axis, largest=1)
    return [Value(spec.shape, x.dtype, ordered), Value(spec.shape, np.dtype(np.int32), graph.cast(index, np.int32))]


def _order(graph: ModelGraph, name: str, dtype: DTypeLike, count: Any, axis: int, largest: int) -> list[str]:
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
    """Return whether an array holds the index of each element along an axis, as the operand of an argsort does."""
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
