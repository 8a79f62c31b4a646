"""ONNX nodes of primitives that change the shape of arrays, join them or take them apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...._core import dtypes
from .. import values
from ..graph import ModelGraph
from ..registry import WriterCall, writes
from ..values import Value


@writes("broadcast_in_dim")
def write_broadcast(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a reshape to the rank of the result; whoever needs all elements expands it."""
    (x, *_), (output,) = call.inputs, call.outputs
    places = call.parameters["broadcast_dimensions"]
    shape: list[Any] = [1] * len(output.shape)
    for axis, n in zip(places, x.shape, strict=True):
        shape[axis] = n
    if x.is_known:  # the result has a symbolic dimension
        return values.make_known(np.asarray(x.array).reshape(shape), x.hint)
    name = graph.store(x)
    if tuple(shape) != tuple(x.shape):
        # Dimensions of 1 that are inserted need no length of any other dimension.
        inserted = [axis for axis in range(len(shape)) if axis not in places]
        if list(places) == sorted(places):
            name = graph.add("Unsqueeze", [name, graph.ints(*inserted)]) if inserted else name
        else:
            name = graph.reshape(name, tuple(shape))
    return Value(tuple(shape), x.dtype, name)


@writes("reshape")
def write_reshape(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a reshape."""
    x, shape = call.inputs[0], call.outputs[0].shape
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    return Value(tuple(shape), values.find_container(x.dtype), graph.reshape(name, shape))


@writes("transpose")
def write_transpose(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a transpose."""
    (x,), permutation = call.inputs, call.parameters["permutation"]
    shape = tuple(x.shape[axis] for axis in permutation)
    return Value(shape, x.dtype, graph.transpose(graph.store(x), permutation))


@writes("squeeze")
def write_squeeze(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a squeeze."""
    (x,) = call.inputs
    axes = [axis % len(x.shape) for axis in call.parameters["dimensions"]]
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    if not axes:
        return x
    return Value(shape, x.dtype, graph.add("Squeeze", [graph.store(x), graph.ints(*axes)]))


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


@writes("tile")
def write_tile(graph: ModelGraph, call: WriterCall) -> Value:
    """Write repetitions of a whole array."""
    (x,) = call.inputs
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    # ONNX Runtime has no kernel of Tile for bfloat16.
    wide = np.dtype(np.float32) if x.dtype == dtypes.BFLOAT16 else x.dtype
    name = name if wide == x.dtype else graph.cast(name, wide)
    name = graph.add("Tile", [name, graph.ints(*call.parameters["reps"])])
    return Value(call.outputs[0].shape, x.dtype, name if wide == x.dtype else graph.cast(name, x.dtype))


@writes("dim_as_value")
def write_dimension(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a symbolic dimension as a number."""
    name = graph.add("Squeeze", [graph.add_dimension(call.parameters["dim"]), graph.ints(0)])
    return Value((), np.dtype(call.outputs[0].dtype), graph.cast(name, call.outputs[0].dtype))
