"""ONNX nodes of primitives that pad an array or replace a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import values
from ..graph import ModelGraph
from ..registry import WriterCall, writes
from ..values import Shape, UnsupportedError, Value


def equals(a: Any, b: Any) -> bool:
    """Return whether two lengths, which may be symbolic, are known to be equal."""
    return bool(a == b)


@writes("pad")
def write_pad(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a padding; a negative one is a slice."""
    x, fill = call.inputs
    config, shape = call.parameters["padding_config"], call.parameters["input_shapes"][0]
    name = graph.store_full(x, shape)
    for axis, (_, _, interior) in enumerate(config):
        if interior:
            name = _spread(graph, name, shape, axis, interior, fill)
            shape = (*shape[:axis], (shape[axis] - 1) * (interior + 1) + 1, *shape[axis + 1 :])
    lows, highs = ([max(int(entry[i]), 0) for entry in config] for i in (0, 1))
    if any(lows) or any(highs):
        name = graph.add("Pad", [name, graph.ints(*lows, *highs), graph.store(fill)])
    cropped = [axis for axis, entry in enumerate(config) if min(entry[:2]) < 0]
    if cropped:
        starts = [max(-int(config[axis][0]), 0) for axis in cropped]
        limits = [int(config[axis][1]) if config[axis][1] < 0 else 2**31 for axis in cropped]
        name = graph.slice(name, starts, limits, cropped, [1] * len(cropped))
    return Value(call.outputs[0].shape, values.find_container(x.dtype), name)


def _spread(graph: ModelGraph, name: str, shape: Shape, axis: int, interior: int, fill: Value) -> str:
    """Return a tensor with `interior` fill values between the neighbors along an axis."""
    wide = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    pads = [0] * (2 * len(wide))
    pads[len(wide) + axis + 1] = interior
    name = graph.add("Pad", [graph.reshape(name, wide), graph.ints(*pads), graph.store(fill)])
    length = shape[axis] * (interior + 1)
    name = graph.reshape(name, (*shape[:axis], length, *shape[axis + 1 :]))
    return graph.slice(name, [0], [length - interior], [axis], [1])


def find_known_starts(starts: Sequence[Value], limits: Sequence[Any]) -> list[int] | None:
    """Return first indices between 0 and the limits, or None if one of them is computed by the model."""
    if not values.is_static(tuple(limits)) or not all(start.is_known for start in starts):
        return None
    return [min(max(int(np.asarray(x.array)), 0), int(limit)) for x, limit in zip(starts, limits, strict=True)]


def join_starts(graph: ModelGraph, starts: Sequence[Value], limits: Sequence[Any]) -> str:
    """Return a vector of int64 of first indices between 0 and the limits."""
    known = find_known_starts(starts, limits)
    if known is not None:
        return graph.ints(*known)
    parts = [graph.reshape(graph.cast(graph.store(start), np.int64), (1,)) for start in starts]
    begin = parts[0] if len(parts) == 1 else graph.add("Concat", parts, axis=0)
    # JAX moves a slice that does not fit; Slice would cut it off.
    begin = graph.add("Max", [begin, graph.ints(*(0 for _ in parts))])
    return graph.add("Min", [begin, graph.add_shape(tuple(limits))])


@writes("dynamic_update_slice")
def write_dynamic_update_slice(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a replacement of a slice, by the index of each of its elements along each dimension."""
    x, update, *starts = call.inputs
    shape, sizes = call.parameters["input_shapes"][:2]
    axes = [axis for axis, (n, size) in enumerate(zip(shape, sizes, strict=True)) if not equals(n, size)]
    names = graph.store_full(x, shape), graph.store_full(update, sizes)
    if not axes:
        return Value(tuple(sizes), values.find_container(x.dtype), names[1])
    if not values.is_static(tuple(sizes[axis] for axis in axes)):
        raise UnsupportedError("an update of symbolic length")
    if len(axes) > 1:
        name = _update_block(graph, names, axes, shape, sizes, [starts[axis] for axis in axes])
        return Value(tuple(shape), values.find_container(x.dtype), name)
    axis = axes[0]
    known = find_known_starts([starts[axis]], [shape[axis] - sizes[axis]])
    if known is not None:
        name = _replace_part(graph, x, names, axis, (known[0], known[0] + int(sizes[axis]), int(shape[axis])))
        return Value(tuple(shape), values.find_container(x.dtype), name)
    begin = join_starts(graph, [starts[axis]], [shape[axis] - sizes[axis]])
    # ONNX's operators that replace elements want the index of each of them.
    offsets = graph.ints(*range(sizes[axis]))
    line = graph.reshape(graph.add("Add", [begin, offsets]), tuple(-1 if a == axis else 1 for a in range(len(shape))))
    index = graph.add("Expand", [line, graph.add_shape(tuple(sizes))])
    return Value(
        tuple(shape),
        values.find_container(x.dtype),
        graph.add("ScatterElements", [names[0], index, names[1]], axis=axis),
    )


def _replace_part(graph: ModelGraph, x: Value, names: Sequence[str], axis: int, bounds: tuple[int, int, int]) -> str:
    """Return an array with its entries from start to end along an axis, of a length, replaced by those of another."""
    start, end, length = bounds

    def cut(first: int, last: int) -> list[str]:
        if first == last:
            return []
        if names[0] in graph.arrays and x.hint is None:  # `load` would fold the Slice
            cuts = (*[slice(None)] * axis, slice(first, last))
            return [graph.add_constant(graph.arrays[names[0]][cuts])]
        return [graph.slice(names[0], [first], [last], [axis], [1])]

    parts = [*cut(0, start), names[1], *cut(end, length)]
    return parts[0] if len(parts) == 1 else graph.add("Concat", parts, axis=axis)


def _update_block(
    graph: ModelGraph, names: Sequence[str], axes: Sequence[int], shape: Shape, sizes: Shape, starts: Sequence[Value]
) -> str:  # fmt: skip
    """Return an array with a block replaced that is shorter than the array along several axes."""
    order = [*axes, *(axis for axis in range(len(shape)) if axis not in axes)]
    begin = join_starts(graph, starts, [shape[axis] - sizes[axis] for axis in axes])
    steps = np.moveaxis(np.indices([sizes[axis] for axis in axes]), 0, -1).astype(np.int64)
    index = graph.add("Add", [begin, graph.add_constant(steps)])
    x, update = (graph.transpose(name, order) for name in names)
    return graph.transpose(graph.add("ScatterND", [x, index, update]), [int(axis) for axis in np.argsort(order)])
