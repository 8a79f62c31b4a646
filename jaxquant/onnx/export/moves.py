"""ONNX nodes of primitives that move, join, pad or replace elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._core import dtypes
from ..._program import jaxpr
from ..._program.jaxpr import Equation
from ..._program.moves import MOVES, Elements
from . import values
from .graph import PRIMITIVES, ModelGraph, WriterCall, writes
from .values import Shape, UnsupportedError, Value


class MovedTensor(Elements):
    """A tensor of the graph with elements that nodes move.

    Attributes:
        graph: the graph.
        value: the tensor; its dimensions of 1 may stand for longer ones.
        shape: its shape in the program.
    """

    def __init__(self, graph: ModelGraph, value: Value, shape: Shape) -> None:
        self.graph, self.value, self.shape = graph, value, shape

    def keep(self) -> MovedTensor:
        """Return the tensor."""
        return self

    def transpose(self, order: Sequence[int]) -> MovedTensor:
        """Write a Transpose."""
        x, shape = self.value, tuple(self.value.shape[axis] for axis in order)
        moved = Value(shape, x.dtype, self.graph.transpose(self.graph.store(x), order))
        return MovedTensor(self.graph, moved, tuple(self.shape[axis] for axis in order))

    def reshape(self, shape: Shape) -> MovedTensor:
        """Write a Reshape."""
        name = self.graph.reshape(self.graph.store_full(self.value, self.shape), shape)
        return MovedTensor(self.graph, Value(tuple(shape), values.choose_container(self.value.dtype), name), shape)

    def squeeze(self, axes: Sequence[int], shape: Shape) -> MovedTensor:
        """Write a Squeeze."""
        x = self.value
        axes = [axis % len(x.shape) for axis in axes]
        if axes:
            kept = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
            x = Value(kept, x.dtype, self.graph.add("Squeeze", [self.graph.store(x), self.graph.ints(*axes)]))
        return MovedTensor(self.graph, x, shape)

    def broadcast(self, places: Sequence[int], shape: Shape) -> MovedTensor:
        """Write a reshape to the rank of the result; whoever needs all elements expands it."""
        graph, x = self.graph, self.value
        stored: list[Any] = [1] * len(shape)
        for axis, n in zip(places, x.shape, strict=True):
            stored[axis] = n
        if x.is_known:  # the result has a symbolic dimension
            return MovedTensor(graph, values.make_known(np.asarray(x.array).reshape(stored), x.hint), shape)
        name = graph.store(x)
        if tuple(stored) != tuple(x.shape):
            # Dimensions of 1 that are inserted need no length of any other dimension.
            inserted = [axis for axis in range(len(stored)) if axis not in places]
            if list(places) == sorted(places):
                name = graph.add("Unsqueeze", [name, graph.ints(*inserted)]) if inserted else name
            else:
                name = graph.reshape(name, tuple(stored))
        return MovedTensor(graph, Value(tuple(stored), x.dtype, name), shape)

    def tile(self, repeats: Sequence[int], shape: Shape) -> MovedTensor:
        """Write a Tile."""
        graph, x = self.graph, self.value
        name = graph.store_full(x, self.shape)
        # ONNX Runtime has no kernel of Tile for bfloat16.
        wide = np.dtype(np.float32) if x.dtype == dtypes.BFLOAT16 else x.dtype
        name = name if wide == x.dtype else graph.cast(name, wide)
        name = graph.add("Tile", [name, graph.ints(*repeats)])
        return MovedTensor(graph, Value(shape, x.dtype, name if wide == x.dtype else graph.cast(name, x.dtype)), shape)

    def reverse(self, axes: Sequence[int]) -> MovedTensor:
        """Write a Slice with negative steps."""
        graph, x = self.graph, self.value
        axes = [axis for axis in axes if not _is_one(x.shape[axis])]
        if not axes:
            return self
        # The end is not included and a negative one counts from the back: only one before all elements keeps the first.
        ends = [graph.ints(*(number for _ in axes)) for number in (-1, -(2**31))]
        steps = graph.ints(*(-1 for _ in axes))
        name = graph.add("Slice", [graph.store(x), *ends, graph.ints(*axes), steps])
        return MovedTensor(graph, Value(x.shape, x.dtype, name), self.shape)

    def cut(self, starts: Shape, limits: Shape, strides: Sequence[int], shape: Shape) -> MovedTensor:
        """Write a Slice."""
        x, axes = self.value, []
        for axis, (start, limit, step) in enumerate(zip(starts, limits, strides, strict=True)):
            is_whole = equals(start, 0) and equals(limit, self.shape[axis]) and step == 1
            if not is_whole and (not _is_one(x.shape[axis]) or equals(shape[axis], 0)):
                axes.append(axis)
        # A dimension of 1 that stands for a longer one stays as it is, unless nothing is left of it.
        stored = tuple(1 if _is_one(x.shape[axis]) and axis not in axes else n for axis, n in enumerate(shape))
        if not axes:
            return MovedTensor(self.graph, x._replace(shape=stored), shape)
        firsts, ends = ([part[axis] for axis in axes] for part in (starts, limits))
        name = self.graph.slice(self.graph.store(x), firsts, ends, axes, [int(strides[axis]) for axis in axes])
        return MovedTensor(self.graph, Value(stored, values.choose_container(x.dtype), name), shape)

    def cut_dynamically(self, starts: Sequence[Value], shape: Shape) -> MovedTensor:
        """Write a Slice from starts that are computed, and moved to where the slice fits."""
        graph, x, sizes = self.graph, self.value, shape
        axes = [axis for axis, (n, size) in enumerate(zip(self.shape, sizes, strict=True)) if not equals(n, size)]
        name = graph.store_full(x, self.shape)
        if axes:
            begins, limits = [starts[axis] for axis in axes], [self.shape[a] - sizes[a] for a in axes]
            known = read_known_starts(begins, limits)
            if known is not None:
                ends = [n + sizes[axis] for n, axis in zip(known, axes, strict=True)]
                name = graph.slice(name, known, ends, axes, [1] * len(axes))
            else:
                begin = join_starts(graph, begins, limits)
                end = graph.add("Add", [begin, graph.add_shape(tuple(sizes[axis] for axis in axes))])
                name = graph.add("Slice", [name, begin, end, graph.ints(*axes)])
        return MovedTensor(graph, Value(tuple(shape), values.choose_container(x.dtype), name), shape)


def _is_one(n: Any) -> bool:
    return values.is_static((n,)) and n == 1


def has_writer(name: str) -> bool:
    """Return whether a primitive can be written: by a writer of its own, or by its row in the table of moves."""
    return name in PRIMITIVES or (name in MOVES and MOVES[name].move is not None)


def write_moves(equation: Equation, graph: ModelGraph, call: WriterCall) -> list[Value]:
    """Write an equation that moves elements, in the way that the table says."""
    move = MOVES[call.name].move
    assert move is not None
    moved = move(equation, MovedTensor(graph, call.inputs[0], jaxpr.read_shape(equation.invars[0])), *call.inputs[1:])
    if any(part is None for part in moved):
        raise UnsupportedError("no operator of ONNX")
    return [part.value for part in moved]


# Paddings, and replacements of a part.


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
    return Value(call.outputs[0].shape, values.choose_container(x.dtype), name)


def _spread(graph: ModelGraph, name: str, shape: Shape, axis: int, interior: int, fill: Value) -> str:
    """Return a tensor with `interior` fill values between the neighbors along an axis."""
    wide = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    pads = [0] * (2 * len(wide))
    pads[len(wide) + axis + 1] = interior
    name = graph.add("Pad", [graph.reshape(name, wide), graph.ints(*pads), graph.store(fill)])
    length = shape[axis] * (interior + 1)
    name = graph.reshape(name, (*shape[:axis], length, *shape[axis + 1 :]))
    return graph.slice(name, [0], [length - interior], [axis], [1])


def read_known_starts(starts: Sequence[Value], limits: Sequence[Any]) -> list[int] | None:
    """Return first indices between 0 and the limits, or None if one of them is computed by the model."""
    if not values.is_static(tuple(limits)) or not all(start.is_known for start in starts):
        return None
    return [min(max(int(np.asarray(x.array)), 0), int(limit)) for x, limit in zip(starts, limits, strict=True)]


def join_starts(graph: ModelGraph, starts: Sequence[Value], limits: Sequence[Any]) -> str:
    """Return a vector of int64 of first indices between 0 and the limits."""
    known = read_known_starts(starts, limits)
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
        return Value(tuple(sizes), values.choose_container(x.dtype), names[1])
    if not values.is_static(tuple(sizes[axis] for axis in axes)):
        raise UnsupportedError("an update of symbolic length")
    if len(axes) > 1:
        name = _update_block(graph, names, axes, shape, sizes, [starts[axis] for axis in axes])
        return Value(tuple(shape), values.choose_container(x.dtype), name)
    axis = axes[0]
    known = read_known_starts([starts[axis]], [shape[axis] - sizes[axis]])
    if known is not None:
        name = _replace_part(graph, x, names, axis, (known[0], known[0] + int(sizes[axis]), int(shape[axis])))
        return Value(tuple(shape), values.choose_container(x.dtype), name)
    begin = join_starts(graph, [starts[axis]], [shape[axis] - sizes[axis]])
    # ONNX's operators that replace elements want the index of each of them.
    offsets = graph.ints(*range(sizes[axis]))
    line = graph.reshape(graph.add("Add", [begin, offsets]), tuple(-1 if a == axis else 1 for a in range(len(shape))))
    index = graph.add("Expand", [line, graph.add_shape(tuple(sizes))])
    return Value(
        tuple(shape),
        values.choose_container(x.dtype),
        graph.add("ScatterElements", [names[0], index, names[1]], axis=axis),
    )


def _replace_part(graph: ModelGraph, x: Value, names: Sequence[str], axis: int, bounds: tuple[int, int, int]) -> str:
    """Return x with x[start:end] along `axis` replaced by y; `bounds` are start, end and length."""
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


# Joining and splitting.


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
    return Value(output.shape, values.choose_container(output.dtype), graph.add("Concat", names, axis=axis))


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
    return Value(tuple(output.shape), values.choose_container(output.dtype), graph.add("Concat", names, axis=axis))


@writes("dim_as_value")
def write_dimension(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a symbolic dimension as a number."""
    name = graph.add("Squeeze", [graph.add_dimension(call.parameters["dim"]), graph.ints(0)])
    return Value((), np.dtype(call.outputs[0].dtype), graph.cast(name, call.outputs[0].dtype))
