"""ONNX nodes of gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ..._core import dtypes
from . import elementwise, values
from .graph import Graph
from .registry import Call, writes
from .values import Shape, UnsupportedError, Value


@writes("gather")
def write_gather(graph: Graph, call: Call) -> Value:
    """Write a gather of entries, or of slices, of an array."""
    p = call.parameters
    numbers, sizes, mode = p["dimension_numbers"], p["slice_sizes"], lax.GatherScatterMode.from_any(p["mode"])
    x_shape, index_shape = p["input_shapes"]
    x = graph.store_full(call.inputs[0], x_shape)
    axes = numbers.start_index_map
    limits = [x_shape[axis] - sizes[axis] for axis in axes]
    index, is_inside = _read_indices(graph, call.inputs[1], index_shape, limits, mode)
    if numbers.operand_batching_dims:
        name = _gather_along(graph, x, index, call)
    elif len(axes) == 1:
        name = _gather_axis(graph, x, index, x_shape, index_shape, numbers, sizes)
    else:
        name = _gather_points(graph, x, index, x_shape, index_shape, numbers, sizes)
    output = call.outputs[0]
    result = Value(tuple(output.shape), values.find_container(output.dtype), name)
    return result if is_inside is None else _fill_outside(graph, result, is_inside, numbers, p["fill_value"])


def _read_indices(
    graph: Graph, indices: Value, shape: Shape, limits: Sequence[Any], mode: Any
) -> tuple[str, str | None]:  # fmt: skip
    """Return int64 indices within the limits, and for "fill" whether each of them was within them."""
    if indices.is_known and values.is_static(tuple(limits)):
        array = np.asarray(indices.array).astype(np.int64)
        array = np.where(array > 2**62, -1, array)
        if np.all((array >= 0) & (array <= np.asarray(limits, np.int64))):
            # Known indices that are inside need no limits in the model, and no mask.
            return graph.add_constant(np.ascontiguousarray(array)), None
    name = graph.cast(graph.store_full(indices, shape), np.int64)
    if mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return name, None
    limit = graph.add_shape(tuple(limits))
    inside = graph.add("Min", [graph.add("Max", [name, graph.ints(0)]), limit])
    if mode == lax.GatherScatterMode.CLIP:
        return inside, None
    # ReduceMin takes bools from opset 20 on only.
    equal = graph.cast(graph.add("Equal", [inside, name]), np.int32)
    return inside, graph.cast(graph.reduce("ReduceMin", equal, [len(shape) - 1]), np.bool_)


def _gather_axis(
    graph: Graph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return a gather along one axis."""
    (axis,) = numbers.start_index_map
    batch = len(index_shape) - 1
    index = graph.add("Squeeze", [index, graph.ints(batch)])
    is_collapsed = axis in numbers.collapsed_slice_dims
    others = [a for a in range(len(x_shape)) if a != axis]
    for a in others:
        if not bool(sizes[a] == x_shape[a]):
            x = graph.slice(x, [0], [sizes[a]], [a], [1])
    if not is_collapsed:  # a slice of `size` entries from each index on
        steps = graph.add_constant(np.arange(sizes[axis], dtype=np.int64))
        index = graph.add("Add", [graph.add("Unsqueeze", [index, graph.ints(batch)]), steps])
    name = graph.add("Gather", [x, index], axis=axis)
    # Gather returns the dimensions of x before the axis, those of the indices, then those of x after it.
    window = [a for a in range(len(x_shape)) if a not in numbers.collapsed_slice_dims]
    squeezed = [a for a in numbers.collapsed_slice_dims if a != axis]
    length = batch + (0 if is_collapsed else 1)
    places = {a: a if a < axis else a - 1 + length for a in others}
    if not is_collapsed:
        places[axis] = axis + batch
    if squeezed:
        gone = sorted(places[a] for a in squeezed)
        name = graph.add("Squeeze", [name, graph.ints(*gone)])
        places = {a: place - sum(g < place for g in gone) for a, place in places.items() if a not in squeezed}
    taken = {places[a] for a in window}
    rest = [i for i in range(batch + len(window)) if i not in taken]
    return graph.transpose(name, _place_window([places[a] for a in window], rest, numbers.offset_dims))


def _place_window(window: Sequence[int], batch: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """Return the permutation that puts the dimensions of the window at `offsets`, and the others in between."""
    order, windows, batches = [], iter(window), iter(batch)
    for place in range(len(window) + len(batch)):
        order.append(next(windows) if place in offsets else next(batches))
    return order


def _gather_points(
    graph: Graph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return a gather whose indices have an entry for each of several axes."""
    axes = list(numbers.start_index_map)
    if any(axis not in numbers.collapsed_slice_dims for axis in axes):
        if len(index_shape) == 1 and not values.is_static(x_shape):
            raise UnsupportedError("a gather of slices along several axes")
        return _gather_slices(graph, x, index, x_shape, index_shape, numbers, sizes)
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    if not all(bool(sizes[axis] == x_shape[axis]) for axis in others):
        raise UnsupportedError("a gather of slices along several axes")
    name = graph.add("GatherND", [graph.transpose(x, [*axes, *others]), index])
    batch = len(index_shape) - 1
    window = range(batch, batch + len(others))
    return graph.transpose(name, _place_window(list(window), list(range(batch)), numbers.offset_dims))


def _gather_slices(
    graph: Graph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return one slice whose first indices are computed."""
    if len(index_shape) != 1:
        raise UnsupportedError("a gather of many slices along several axes")
    axes = graph.ints(*numbers.start_index_map)
    end = graph.add("Add", [index, graph.ints(*(sizes[axis] for axis in numbers.start_index_map))])
    name = graph.add("Slice", [x, index, end, axes])
    gone = numbers.collapsed_slice_dims
    return graph.add("Squeeze", [name, graph.ints(*gone)]) if gone else name


def _gather_along(graph: Graph, x: str, index: str, call: Call) -> str:
    """Return a gather whose first dimensions belong to those of the indices, as in `jnp.take_along_axis`."""
    numbers = call.parameters["dimension_numbers"]
    count = len(numbers.operand_batching_dims)
    x_shape, index_shape = call.parameters["input_shapes"]
    axes = [*numbers.operand_batching_dims, *numbers.start_index_map]
    if any(axis not in numbers.collapsed_slice_dims for axis in numbers.start_index_map):
        raise UnsupportedError("a batched gather of slices")
    batch = len(index_shape) - 1
    first = list(numbers.start_indices_batching_dims)
    order = [*first, *(axis for axis in range(batch) if axis not in first)]
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    operands = [graph.transpose(x, [*axes, *others]), graph.transpose(index, [*order, batch])]
    name = graph.add("GatherND", operands, batch_dims=count)
    window = list(range(batch, batch + len(others)))
    return graph.transpose(name, _place_window(window, np.argsort(order).tolist(), numbers.offset_dims))


def _fill_outside(graph: Graph, result: Value, is_inside: str, numbers: Any, fill: Any) -> Value:
    """Return entries, with a fill value where the index was outside."""
    dtype = np.dtype(result.dtype)
    if fill is None:
        if dtype.kind == "f" or dtype in (dtypes.BFLOAT16, *dtypes.SMALL_FLOATS):
            fill = np.nan
        else:
            fill = True if dtype.kind == "b" else (np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max)
    axes = [axis for axis in range(len(result.shape)) if axis in numbers.offset_dims]
    mask = graph.add("Unsqueeze", [is_inside, graph.ints(*axes)]) if axes else is_inside
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(result.shape))
    condition = Value(shape, np.dtype(np.bool_), mask)
    return elementwise.choose(graph, condition, result, values.make_known(np.asarray(fill, dtype)))


@writes("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter_min", "scatter_max")
def write_scatter(graph: Graph, call: Call) -> Value:
    """Write a scatter of entries along the first axes that the indices count."""
    p = call.parameters
    numbers = p["dimension_numbers"]
    x_shape, index_shape, update_shape = p["input_shapes"]
    axes = list(numbers.scatter_dims_to_operand_dims)
    batch = len(index_shape) - 1
    windows = list(numbers.update_window_dims)
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    is_plain = sorted(numbers.inserted_window_dims) == sorted(axes) and not numbers.operand_batching_dims
    if not is_plain or not all(
        bool(update_shape[w] == x_shape[axis]) for w, axis in zip(windows, others, strict=False)
    ):
        raise UnsupportedError("a scatter of slices")
    kind = call.name.replace("-", "_").removeprefix("scatter").removeprefix("_")
    # The opset in which ScatterND got each reduction.
    least = {"": 13, "add": 16, "mul": 16}.get(kind, 18)
    if graph.opset < least:
        raise UnsupportedError(f"a scatter with a reduction by {kind!r} needs opset {least}")
    mode = lax.GatherScatterMode.from_any(p["mode"])
    limits = [x_shape[axis] - 1 for axis in axes]
    index, is_inside = _read_indices(graph, call.inputs[1], index_shape, limits, mode)
    if is_inside is not None:
        # JAX drops such updates; ScatterND has no way to, and the runtime raises.
        raise UnsupportedError('a scatter whose indices may be out of range: use mode="promise_in_bounds" or "clip"')
    x = graph.transpose(graph.store_full(call.inputs[0], x_shape), [*axes, *others])
    update_order = [*(a for a in range(batch + len(windows)) if a not in windows), *windows]
    update = graph.transpose(graph.store_full(call.inputs[2], update_shape), update_order)
    name = graph.add("ScatterND", [x, index, update], reduction=kind or None)
    inverse = np.argsort([*axes, *others])
    return Value(tuple(x_shape), values.find_container(call.outputs[0].dtype), graph.transpose(name, list(inverse)))
