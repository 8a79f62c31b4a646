"""ONNX nodes of gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core import dtypes
from . import elementwise, values
from .graph import ModelGraph, WriterCall, writes
from .values import Shape, UnsupportedError, Value


@writes("gather")
def write_gather(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a gather of entries, or of slices, of an array."""
    p = call.parameters
    numbers, sizes, mode = p["dimension_numbers"], p["slice_sizes"], lax.GatherScatterMode.from_any(p["mode"])
    x_shape, index_shape = p["input_shapes"]
    table, output = call.inputs[0], call.outputs[0]
    if table.narrow is None:
        x = graph.store_full(table, x_shape)
    else:  # The scales of blocks take as many bytes as in the program.
        x = graph.cast(graph.store_full(values.make_known(table.narrow), x_shape), np.float32)
    dtype = container = values.choose_container(output.dtype)
    if container in dtypes.FLOAT8:  # of which ONNX has no Gather, and float32 has all numbers
        x, dtype = graph.cast(x, np.float32), np.dtype(np.float32)
    axes = numbers.start_index_map
    limits = [x_shape[axis] - sizes[axis] for axis in axes]
    index, is_inside = _read_indices(graph, call.inputs[1], index_shape, limits, mode)
    if numbers.operand_batching_dims:
        name = _gather_along(graph, x, index, call)
    elif len(axes) == 1:
        name = _gather_axis(graph, x, index, x_shape, index_shape, numbers, sizes)
    else:
        name = _gather_nd(graph, x, index, x_shape, index_shape, numbers, sizes)
    result = Value(tuple(output.shape), dtype, name)
    if is_inside is not None:
        result = _fill_outside(graph, result, is_inside, numbers, p["fill_value"])
    return elementwise.cast_value(graph, result, container)


def _read_indices(
    graph: ModelGraph, indices: Value, shape: Shape, limits: Sequence[Any], mode: Any
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
    graph: ModelGraph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return a gather along one axis."""
    (axis,) = numbers.start_index_map
    batch = len(index_shape) - 1
    index = _squeeze_last(graph, index, batch)
    is_collapsed = axis in numbers.collapsed_slice_dims
    others = [a for a in range(len(x_shape)) if a != axis]
    for a in others:
        if not bool(sizes[a] == x_shape[a]):
            x = graph.slice(x, [0], [sizes[a]], [a], [1])
    if not is_collapsed:  # a slice of `size` entries from each index on
        steps = graph.add_range(sizes[axis])
        index = graph.add("Add", [graph.add("Unsqueeze", [index, graph.ints(batch)]), steps])
    name = graph.add("Gather", [x, index], axis=axis)
    # Gather returns x.shape[:axis], the shape of the indices, then x.shape[axis + 1:].
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


def _squeeze_last(graph: ModelGraph, index: str, axis: int) -> str:
    """Return indices without their last dimension, of 1, which JAX has added to the indices of one axis."""
    if index in graph.arrays:
        return graph.add_constant(graph.arrays[index].squeeze(axis))
    place = graph.ints(axis)
    cast = graph.look_up_node(index)
    if cast is not None and cast.op_type == "Cast":
        inner = graph.look_up_node(cast.input[0])
        # Both nodes would stay in the model, and a pair of them would be added by each load and export.
        if inner is not None and inner.op_type == "Unsqueeze" and inner.input[1] == place:
            return graph.cast(inner.input[0], np.int64)
    return graph.add("Squeeze", [index, place])


def _place_window(window: Sequence[int], batch: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """Return the permutation that puts the dimensions of the window at `offsets`, and the others in between."""
    order, windows, batches = [], iter(window), iter(batch)
    for place in range(len(window) + len(batch)):
        order.append(next(windows) if place in offsets else next(batches))
    return order


def _gather_nd(
    graph: ModelGraph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return a gather with indices that have an entry for each of several axes."""
    axes = list(numbers.start_index_map)
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    is_whole = all(bool(sizes[axis] == x_shape[axis]) for axis in others)
    if any(axis not in numbers.collapsed_slice_dims for axis in axes) or not is_whole:
        if len(index_shape) == 1 and is_whole and values.is_static(x_shape):
            return _gather_slices(graph, x, index, numbers, sizes)
        return _gather_windows(graph, x, index, x_shape, index_shape, numbers, sizes)
    name = graph.add("GatherND", [graph.transpose(x, [*axes, *others]), index])
    batch = len(index_shape) - 1
    window = range(batch, batch + len(others))
    return graph.transpose(name, _place_window(list(window), list(range(batch)), numbers.offset_dims))


def _gather_slices(graph: ModelGraph, x: str, index: str, numbers: Any, sizes: Sequence[int]) -> str:
    """Return one slice from first indices that are computed."""
    axes = graph.ints(*numbers.start_index_map)
    end = graph.add("Add", [index, graph.ints(*(sizes[axis] for axis in numbers.start_index_map))])
    name = graph.add("Slice", [x, index, end, axes])
    gone = numbers.collapsed_slice_dims
    return graph.add("Squeeze", [name, graph.ints(*gone)]) if gone else name


def _gather_windows(
    graph: ModelGraph, x: str, index: str, x_shape: Shape, index_shape: Shape, numbers: Any, sizes: Sequence[int]
) -> str:  # fmt: skip
    """Return many slices, by the index of each of their entries."""
    batching, gone = numbers.operand_batching_dims, numbers.collapsed_slice_dims
    lengths = {axis: n for axis, n in enumerate(sizes) if axis not in (*batching, *gone)}
    windows = _Windows(numbers.start_index_map, batching, numbers.start_indices_batching_dims, lengths)
    axes, index = _spread_indices(graph, index, index_shape, x_shape, windows)
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    name = graph.add("GatherND", [graph.transpose(x, [*axes, *others]), index])
    batch = len(index_shape) - 1
    # GatherND returns the dimensions of the indices, then the windows along the indexed axes, then the other axes.
    window = [axis for axis in (*axes, *others) if axis in lengths]
    places = [batch + window.index(axis) for axis in sorted(window)]
    return graph.transpose(name, _place_window(places, list(range(batch)), numbers.offset_dims))


class _Windows(NamedTuple):
    """The slices of an array that indices point to.

    Attributes:
        named: the axes that an index has an entry of.
        batching: the axes along which each index has its own part of the array.
        index_batching: the dimensions of the indices that count these parts.
        lengths: the length of the slices, by axis; the other axes have none.
    """

    named: Sequence[int]
    batching: Sequence[int]
    index_batching: Sequence[int]
    lengths: dict[int, Any]


def _spread_indices(
    graph: ModelGraph, index: str, index_shape: Shape, x_shape: Shape, slices: _Windows
) -> tuple[list[int], str]:  # fmt: skip
    """Return the axes that need an index, and an index for each entry of slices from given first indices."""
    named, batching, index_batching, lengths = slices
    rest = [axis for axis in range(len(x_shape)) if axis not in (*named, *batching)]
    short = [axis for axis in rest if axis not in lengths or not bool(lengths[axis] == x_shape[axis])]
    axes = [*batching, *named, *short]
    batch = tuple(index_shape[:-1])
    windows = [axis for axis in axes if axis in lengths]
    if not values.is_static(tuple(lengths[axis] for axis in windows)):
        raise UnsupportedError("slices of symbolic length")
    if batching or short:
        counts = [_make_batch_indices(graph, batch, d) for d in index_batching]
        zeros = graph.store_full(values.make_known(np.zeros((1,) * (len(batch) + 1), np.int64)), (*batch, len(short)))
        index = _join_last(graph, [*counts, *([index] if named else []), *([zeros] if short else [])])
    if windows:
        steps = np.zeros((*(lengths[axis] for axis in windows), len(axes)), np.int64)
        for d, axis in enumerate(windows):
            count = np.arange(lengths[axis]).reshape(-1, *(1,) * (len(windows) - 1 - d))
            steps[..., axes.index(axis)] = count
        index = _add_steps(graph, index, len(batch), steps)
    return axes, index


def _make_batch_indices(graph: ModelGraph, batch: Shape, dimension: int) -> str:
    """Return for each place its index along a dimension of the places, in a last dimension of 1."""
    line = tuple(-1 if d == dimension else 1 for d in range(len(batch) + 1))
    length = batch[dimension]
    if values.is_static((length,)):
        known = values.make_known(np.arange(length, dtype=np.int64).reshape(line))
        return graph.store_full(known, (*batch, 1))
    count = graph.reshape(graph.add_range(length), line)
    return graph.add("Expand", [count, graph.add_shape((*batch, 1))])


def _join_last(graph: ModelGraph, parts: Sequence[str]) -> str:
    """Return tensors joined along their last dimension, as a constant if all of them are."""
    if len(parts) == 1:
        return parts[0]
    if all(part in graph.arrays for part in parts):
        return graph.add_constant(np.concatenate([graph.arrays[part] for part in parts], axis=-1))
    return graph.add("Concat", parts, axis=-1)


def _add_steps(graph: ModelGraph, index: str, batch: int, steps: np.ndarray) -> str:
    """Return the indices of all entries of windows, from their first ones."""
    places = range(batch, batch + steps.ndim - 1)
    if index in graph.arrays:
        return graph.add_constant(np.expand_dims(graph.arrays[index], tuple(places)) + steps)
    return graph.add("Add", [graph.add("Unsqueeze", [index, graph.ints(*places)]), graph.add_constant(steps)])


def _gather_along(graph: ModelGraph, x: str, index: str, call: WriterCall) -> str:
    """Return a gather with the first dimensions of the indices as its own, as in `jnp.take_along_axis`."""
    numbers = call.parameters["dimension_numbers"]
    count = len(numbers.operand_batching_dims)
    x_shape, index_shape = call.parameters["input_shapes"]
    axes = [*numbers.operand_batching_dims, *numbers.start_index_map]
    sizes = call.parameters["slice_sizes"]
    is_whole = all(bool(sizes[axis] == n) for axis, n in enumerate(x_shape) if axis not in axes)
    if any(axis not in numbers.collapsed_slice_dims for axis in numbers.start_index_map) or not is_whole:
        return _gather_windows(graph, x, index, x_shape, index_shape, numbers, sizes)
    batch = len(index_shape) - 1
    first = list(numbers.start_indices_batching_dims)
    order = [*first, *(axis for axis in range(batch) if axis not in first)]
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    operands = [graph.transpose(x, [*axes, *others]), graph.transpose(index, [*order, batch])]
    name = graph.add("GatherND", operands, batch_dims=count)
    window = list(range(batch, batch + len(others)))
    return graph.transpose(name, _place_window(window, np.argsort(order).tolist(), numbers.offset_dims))


def _fill_outside(graph: ModelGraph, result: Value, is_inside: str, numbers: Any, fill: ArrayLike | None) -> Value:
    """Return entries, with a fill value where the index was outside."""
    dtype: np.dtype = np.dtype(result.dtype)
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


# The operators of updates that do not replace elements, and the opset that each of them needs.
_REDUCTIONS = {"add": 16, "sub": 16, "mul": 16, "min": 18, "max": 18}


@writes("scatter", *(f"scatter{sign}{kind}" for kind in _REDUCTIONS for sign in "-_"))
def write_scatter(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a scatter of entries, or of slices, as one of the index of each entry."""
    p = call.parameters
    numbers = p["dimension_numbers"]
    x_shape, index_shape, update_shape = p["input_shapes"]
    kind = call.name.replace("-", "_").removeprefix("scatter").removeprefix("_")
    if not kind and p["update_jaxpr"] is not None:
        raise UnsupportedError("a scatter that applies a function to the entries, as x.at[index].apply does")
    named, batching = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims
    kept = [axis for axis in range(len(x_shape)) if axis not in (*numbers.inserted_window_dims, *batching)]
    windows = dict(zip(kept, numbers.update_window_dims, strict=True))
    lengths = {axis: update_shape[d] for axis, d in windows.items()}
    mode = lax.GatherScatterMode.from_any(p["mode"])
    limits = [x_shape[axis] - lengths.get(axis, 1) for axis in named]
    index, is_inside = _read_indices(graph, call.inputs[1], index_shape, limits, mode)
    slices = _Windows(named, batching, numbers.scatter_indices_batching_dims, lengths)
    axes, index = _spread_indices(graph, index, index_shape, x_shape, slices)
    if not axes and len(update_shape) == len(x_shape):
        return _update_whole(graph, call, kind)
    if not axes:
        raise UnsupportedError("a scatter of several updates of a whole array")
    if graph.opset < _REDUCTIONS.get(kind, 13):
        raise UnsupportedError(f"a scatter with a reduction needs opset {_REDUCTIONS[kind]}")
    others = [axis for axis in range(len(x_shape)) if axis not in axes]
    x = graph.transpose(graph.store_full(call.inputs[0], x_shape), [*axes, *others])
    batch = [d for d in range(len(update_shape)) if d not in windows.values()]
    update_order = [*batch, *(windows[axis] for axis in (*axes, *others) if axis in windows)]
    update = graph.transpose(graph.store_full(call.inputs[2], update_shape), update_order)
    container = values.choose_container(call.outputs[0].dtype)
    wide = elementwise.choose_compute_dtype(container) if kind else container
    if wide != container:
        x, update = graph.cast(x, wide), graph.cast(update, wide)
    if kind == "sub":
        # Neg takes no unsigned integers.
        kind, update = "add", graph.add("Sub", [graph.add_constant(np.zeros((), wide)), update])
    length = x_shape[axes[0]]
    if is_inside is not None:
        count = len([axis for axis in axes if axis in windows])
        x, index = _add_spare_row(graph, x, index, is_inside, length, (len(batch), count, len(axes)))
    name = graph.add("ScatterND", [x, index, update], reduction=kind or None)
    if is_inside is not None:
        name = graph.slice(name, [0], [length], [0], [1])
    name = graph.transpose(name, [int(axis) for axis in np.argsort([*axes, *others])])
    return Value(tuple(x_shape), container, name if wide == container else graph.cast(name, container))


def _update_whole(graph: ModelGraph, call: WriterCall, kind: str) -> Value:
    """Write an update of all entries at once, as in `x.at[()].add(y)`; a kind of "" replaces them."""

    def read(place: int) -> Value:
        x, shape = call.inputs[place], tuple(call.parameters["input_shapes"][place])
        return Value(shape, x.dtype, graph.store_full(x, shape))

    return elementwise.write_binary(graph, call._replace(name=kind, inputs=(read(0), read(2)))) if kind else read(2)


def _add_spare_row(
    graph: ModelGraph, x: str, index: str, is_inside: str, length: Any, ranks: tuple[int, int, int]
) -> tuple[str, str]:  # fmt: skip
    """Return an array with one more row, and the indices, where each one outside becomes this row.

    JAX drops such an update. ONNX Runtime refuses an index that is out of range. `ranks` counts the dimensions of the
    places, the dimensions of the windows, and the axes that are indexed.
    """
    batch, windows, count = ranks
    spare = graph.add("Slice", [x, graph.ints(0), graph.ints(1), graph.ints(0)])
    last = graph.ints(-1)
    first = graph.add("Slice", [index, graph.ints(0), graph.ints(1), last])
    mask = graph.add("Unsqueeze", [is_inside, graph.ints(*range(batch, batch + windows + 1))])
    first = graph.add("Where", [mask, first, graph.add_shape((length,))])
    if count > 1:
        rest = graph.add("Slice", [index, graph.ints(1), graph.ints(count), last])
        first = graph.add("Concat", [first, rest], axis=-1)
    return graph.add("Concat", [x, spare], axis=0), first
