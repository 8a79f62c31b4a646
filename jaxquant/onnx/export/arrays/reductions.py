"""ONNX nodes of reductions, running sums and running extremes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import conversions, elementwise, values
from ..graph import ModelGraph
from ..registry import WriterCall, writes, writes_mark
from ..values import Spec, UnsupportedError, Value

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
    wide = elementwise.find_compute_dtype(x.dtype)
    if any(values.is_static((shape[axis],)) and shape[axis] == 0 for axis in axes):
        return _make_empty_result(call.name, output)
    # A reduced dimension must have all of its elements; the others may stay short.
    stored = tuple(shape[axis] if axis in axes else x.shape[axis] for axis in range(len(shape)))
    name = graph.store_full(x, stored)
    kept = tuple(n for axis, n in enumerate(stored) if axis not in axes)
    if operator in ("ReduceMax", "ReduceMin"):
        name = graph.reduce(operator, elementwise.widen_ordered(graph, name, x.dtype), axes)
        return Value(kept, values.find_container(x.dtype), elementwise.narrow_ordered(graph, name, x.dtype))
    counts = [shape[axis] for axis in axes]
    if operator == "ReduceSum" and wide == np.int32 and not conversions.fits_sum(graph, x, counts):
        # ONNX Runtime's sum of int32 saturates, and JAX's keeps the low bits, as a cast does.
        wide = np.dtype(np.int64)
    name = name if wide == values.find_container(x.dtype) else graph.cast(name, wide)
    name = graph.reduce(operator, name, axes)
    target = values.find_container(output.dtype)
    return Value(kept, target, name if wide == target else graph.cast(name, target))


def _make_empty_result(name: str, output: Spec) -> Value:
    """Return the result of a reduction of no elements, of which ONNX Runtime's are those of a wider dtype."""
    dtype = values.find_container(output.dtype)
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
    container, wide = values.find_container(x.dtype), elementwise.find_compute_dtype(x.dtype)
    name = graph.store_full(x, p["input_shapes"][0])
    name = name if wide == container else graph.cast(name, wide)
    name = graph.add("CumSum", [name, graph.add_constant(np.int64(p["axis"]))], reverse=int(p["reverse"]))
    name = name if wide == container else graph.cast(name, container)
    return Value(call.outputs[0].shape, container, name)


@writes("cummax", "cummin")
def write_cumulative_extreme(graph: ModelGraph, call: WriterCall) -> Value:
    """Write running extremes, in as many steps as the length of the axis has bits.

    Each step joins the extremes of the last 1, 2, 4, ... elements with those of as many elements before.
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
    return Value(tuple(call.outputs[0].shape), values.find_container(x.dtype), name)
