"""ONNX nodes of primitives that join arrays, take them apart or count along them."""

from __future__ import annotations

import numpy as np

from .. import values
from ..graph import ModelGraph
from ..registry import WriterCall, writes
from ..values import Value


@writes("expand_dims")
def write_expand_dims(graph: ModelGraph, call: WriterCall) -> Value:
    """Write dimensions of 1."""
    (x,) = call.inputs
    axes = [int(axis) for axis in call.parameters["dimensions"]]
    return Value(call.outputs[0].shape, x.dtype, graph.add("Unsqueeze", [graph.store(x), graph.ints(*axes)]))


@writes("concatenate")
def write_concatenate(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a concatenation."""
    axis, output = call.parameters["dimension"], call.outputs[0]
    names = []
    for x, shape in zip(call.inputs, call.parameters["input_shapes"], strict=True):
        names.append(graph.store_full(x, shape))
    return Value(output.shape, values.find_container(output.dtype), graph.add("Concat", names, axis=axis))


@writes("iota")
def write_iota(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a range along a symbolic dimension."""
    (output,), axis = call.outputs, call.parameters["dimension"]
    name = graph.cast(graph.add_range(output.shape[axis]), output.dtype)
    shape = tuple(n if a == axis else 1 for a, n in enumerate(output.shape))
    return Value(shape, np.dtype(output.dtype), graph.reshape(name, shape) if len(shape) > 1 else name)


@writes("split", "unstack")
def write_split(graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write a split."""
    x, axis = call.inputs[0], call.parameters["axis"]
    is_stack = call.name == "unstack"
    sizes = [1] * len(call.outputs) if is_stack else [int(n) for n in call.parameters["sizes"]]
    full = graph.store_full(x, call.parameters["input_shapes"][0])
    names = [full]
    if len(sizes) > 1:
        names = graph.add("Split", [full, graph.ints(*sizes)], len(sizes), axis=axis)
    if is_stack:
        names = [graph.add("Squeeze", [name, graph.ints(axis)]) for name in names]
    return [Value(spec.shape, x.dtype, name) for name, spec in zip(names, call.outputs, strict=True)]


@writes("stack")
def write_stack(graph: ModelGraph, call: WriterCall) -> Value:
    """Write arrays as the entries of a new dimension."""
    axis, output = call.parameters["axis"], call.outputs[0]
    place = graph.ints(axis)
    names = [
        graph.add("Unsqueeze", [graph.store_full(x, shape), place])
        for x, shape in zip(call.inputs, call.parameters["input_shapes"], strict=True)
    ]
    return Value(tuple(output.shape), values.find_container(output.dtype), graph.add("Concat", names, axis=axis))


@writes("dim_as_value")
def write_dimension(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a symbolic dimension as a number."""
    name = graph.add("Squeeze", [graph.add_dimension(call.parameters["dim"]), graph.ints(0)])
    return Value((), np.dtype(call.outputs[0].dtype), graph.cast(name, call.outputs[0].dtype))
