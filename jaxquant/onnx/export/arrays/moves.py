"""ONNX nodes of primitives that move elements, by the table of these primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...._core import dtypes
from ...._program import jaxpr
from ...._program.jaxpr import Equation
from ...._program.moves import MOVES, Elements
from .. import values
from ..graph import ModelGraph
from ..registry import PRIMITIVES, WriterCall
from ..values import Shape, UnsupportedError, Value
from .slices import equals, find_known_starts, join_starts


class MovedTensor(Elements):
    """A tensor of the graph whose elements are moved by nodes.

    Attributes:
        graph: the graph.
        value: the tensor, whose dimensions of 1 may stand for longer ones.
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
        return MovedTensor(self.graph, Value(tuple(shape), values.find_container(self.value.dtype), name), shape)

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
        return MovedTensor(self.graph, Value(stored, values.find_container(x.dtype), name), shape)

    def cut_dynamically(self, starts: Sequence[Value], shape: Shape) -> MovedTensor:
        """Write a Slice whose starts are computed, and moved to where the slice fits."""
        graph, x, sizes = self.graph, self.value, shape
        axes = [axis for axis, (n, size) in enumerate(zip(self.shape, sizes, strict=True)) if not equals(n, size)]
        name = graph.store_full(x, self.shape)
        if axes:
            begins, limits = [starts[axis] for axis in axes], [self.shape[a] - sizes[a] for a in axes]
            known = find_known_starts(begins, limits)
            if known is not None:
                ends = [n + sizes[axis] for n, axis in zip(known, axes, strict=True)]
                name = graph.slice(name, known, ends, axes, [1] * len(axes))
            else:
                begin = join_starts(graph, begins, limits)
                end = graph.add("Add", [begin, graph.add_shape(tuple(sizes[axis] for axis in axes))])
                name = graph.add("Slice", [name, begin, end, graph.ints(*axes)])
        return MovedTensor(graph, Value(tuple(shape), values.find_container(x.dtype), name), shape)


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
