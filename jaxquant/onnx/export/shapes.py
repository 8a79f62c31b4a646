"""ONNX nodes of primitives that arrange elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._core import dtypes
from . import conversions, elementwise, values
from .graph import Graph
from .registry import Call, writes, writes_mark
from .values import Shape, Spec, UnsupportedError, Value


@writes("broadcast_in_dim")
def write_broadcast(graph: Graph, call: Call) -> Value:
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
def write_reshape(graph: Graph, call: Call) -> Value:
    """Write a reshape."""
    x, shape = call.inputs[0], call.outputs[0].shape
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    return Value(tuple(shape), values.find_container(x.dtype), graph.reshape(name, shape))


def _is_one(n: Any) -> bool:
    return values.is_static((n,)) and n == 1


@writes("transpose")
def write_transpose(graph: Graph, call: Call) -> Value:
    """Write a transpose."""
    (x,), permutation = call.inputs, call.parameters["permutation"]
    shape = tuple(x.shape[axis] for axis in permutation)
    return Value(shape, x.dtype, graph.transpose(graph.store(x), permutation))


@writes("squeeze")
def write_squeeze(graph: Graph, call: Call) -> Value:
    """Write a squeeze."""
    (x,) = call.inputs
    axes = [axis % len(x.shape) for axis in call.parameters["dimensions"]]
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    if not axes:
        return x
    return Value(shape, x.dtype, graph.add("Squeeze", [graph.store(x), graph.ints(*axes)]))


@writes("expand_dims")
def write_expand_dims(graph: Graph, call: Call) -> Value:
    """Write dimensions of 1."""
    (x,) = call.inputs
    axes = [int(axis) for axis in call.parameters["dimensions"]]
    return Value(call.outputs[0].shape, x.dtype, graph.add("Unsqueeze", [graph.store(x), graph.ints(*axes)]))


@writes("concatenate")
def write_concatenate(graph: Graph, call: Call) -> Value:
    """Write a concatenation."""
    axis, output = call.parameters["dimension"], call.outputs[0]
    names = []
    for x, shape in zip(call.inputs, call.parameters["input_shapes"], strict=True):
        names.append(graph.store_full(x, shape))
    return Value(output.shape, values.find_container(output.dtype), graph.add("Concat", names, axis=axis))


@writes("slice")
def write_slice(graph: Graph, call: Call) -> Value:
    """Write a slice."""
    x, p = call.inputs[0], call.parameters
    steps = p["strides"] or (1,) * len(x.shape)
    lengths = call.parameters["input_shapes"][0]
    axes = []
    for axis, (start, limit, step) in enumerate(zip(p["start_indices"], p["limit_indices"], steps, strict=True)):
        is_whole = _equals(start, 0) and _equals(limit, lengths[axis]) and step == 1
        if not is_whole and (not _is_one(x.shape[axis]) or _equals(call.outputs[0].shape[axis], 0)):
            axes.append(axis)
    # A dimension of 1 that stands for a longer one stays as it is, unless nothing is left of it.
    shape = tuple(
        1 if _is_one(x.shape[axis]) and axis not in axes else n for axis, n in enumerate(call.outputs[0].shape)
    )
    if not axes:
        return x._replace(shape=shape)
    starts, limits = ([p[key][axis] for axis in axes] for key in ("start_indices", "limit_indices"))
    name = graph.slice(graph.store(x), starts, limits, axes, [int(steps[axis]) for axis in axes])
    return Value(shape, values.find_container(x.dtype), name)


def _equals(a: Any, b: Any) -> bool:
    return bool(a == b)


@writes("rev")
def write_reverse(graph: Graph, call: Call) -> Value:
    """Write a slice with negative steps."""
    (x,) = call.inputs
    axes = [axis for axis in call.parameters["dimensions"] if not _is_one(x.shape[axis])]
    if not axes:
        return x
    # The end is not included and a negative one counts from the back: only one before all elements keeps the first.
    ends = [graph.ints(*(number for _ in axes)) for number in (-1, -(2**31))]
    steps = graph.ints(*(-1 for _ in axes))
    return Value(x.shape, x.dtype, graph.add("Slice", [graph.store(x), *ends, graph.ints(*axes), steps]))


@writes("pad")
def write_pad(graph: Graph, call: Call) -> Value:
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


def _spread(graph: Graph, name: str, shape: Shape, axis: int, interior: int, fill: Value) -> str:
    """Return a tensor with `interior` fill values between the neighbors along an axis."""
    wide = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    pads = [0] * (2 * len(wide))
    pads[len(wide) + axis + 1] = interior
    name = graph.add("Pad", [graph.reshape(name, wide), graph.ints(*pads), graph.store(fill)])
    length = shape[axis] * (interior + 1)
    name = graph.reshape(name, (*shape[:axis], length, *shape[axis + 1 :]))
    return graph.slice(name, [0], [length - interior], [axis], [1])


@writes("iota")
def write_iota(graph: Graph, call: Call) -> Value:
    """Write a range along a symbolic dimension."""
    (output,), axis = call.outputs, call.parameters["dimension"]
    limit = graph.add("Squeeze", [graph.add_shape((output.shape[axis],)), graph.ints(0)])
    zero, one = (graph.add_constant(np.int64(n)) for n in (0, 1))
    name = graph.cast(graph.add("Range", [zero, limit, one]), output.dtype)
    shape = tuple(n if a == axis else 1 for a, n in enumerate(output.shape))
    return Value(shape, np.dtype(output.dtype), graph.reshape(name, shape) if len(shape) > 1 else name)


@writes("split", "unstack")
def write_split(graph: Graph, call: Call) -> list[Value]:
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
def write_stack(graph: Graph, call: Call) -> Value:
    """Write arrays as the entries of a new dimension."""
    axis, output = call.parameters["axis"], call.outputs[0]
    place = graph.ints(axis)
    names = [
        graph.add("Unsqueeze", [graph.store_full(x, shape), place])
        for x, shape in zip(call.inputs, call.parameters["input_shapes"], strict=True)
    ]
    return Value(tuple(output.shape), values.find_container(output.dtype), graph.add("Concat", names, axis=axis))


@writes("tile")
def write_tile(graph: Graph, call: Call) -> Value:
    """Write repetitions of a whole array."""
    (x,) = call.inputs
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    # ONNX Runtime has no kernel of Tile for bfloat16.
    wide = np.dtype(np.float32) if x.dtype == dtypes.BFLOAT16 else x.dtype
    name = name if wide == x.dtype else graph.cast(name, wide)
    name = graph.add("Tile", [name, graph.ints(*call.parameters["reps"])])
    return Value(call.outputs[0].shape, x.dtype, name if wide == x.dtype else graph.cast(name, x.dtype))


@writes("dynamic_slice")
def write_dynamic_slice(graph: Graph, call: Call) -> Value:
    """Write a slice whose starts are computed, and kept where the slice fits."""
    x, *starts = call.inputs
    shape, sizes = call.parameters["input_shapes"][0], call.parameters["slice_sizes"]
    axes = [axis for axis, (n, size) in enumerate(zip(shape, sizes, strict=True)) if not _equals(n, size)]
    name = graph.store_full(x, shape)
    if axes:
        begins, limits = [starts[axis] for axis in axes], [shape[a] - sizes[a] for a in axes]
        known = _find_known_starts(begins, limits)
        if known is not None:
            ends = [n + sizes[axis] for n, axis in zip(known, axes, strict=True)]
            name = graph.slice(name, known, ends, axes, [1] * len(axes))
        else:
            begin = _join_starts(graph, begins, limits)
            end = graph.add("Add", [begin, graph.add_shape(tuple(sizes[axis] for axis in axes))])
            name = graph.add("Slice", [name, begin, end, graph.ints(*axes)])
    return Value(call.outputs[0].shape, values.find_container(x.dtype), name)


def _find_known_starts(starts: Sequence[Value], limits: Sequence[Any]) -> list[int] | None:
    """Return first indices between 0 and the limits, or None if one of them is computed by the model."""
    if not values.is_static(tuple(limits)) or not all(start.is_known for start in starts):
        return None
    return [min(max(int(np.asarray(x.array)), 0), int(limit)) for x, limit in zip(starts, limits, strict=True)]


def _join_starts(graph: Graph, starts: Sequence[Value], limits: Sequence[Any]) -> str:
    """Return a vector of int64 of first indices between 0 and the limits."""
    known = _find_known_starts(starts, limits)
    if known is not None:
        return graph.ints(*known)
    parts = [graph.reshape(graph.cast(graph.store(start), np.int64), (1,)) for start in starts]
    begin = parts[0] if len(parts) == 1 else graph.add("Concat", parts, axis=0)
    # JAX moves a slice that does not fit; Slice would cut it off.
    begin = graph.add("Max", [begin, graph.ints(*(0 for _ in parts))])
    return graph.add("Min", [begin, graph.add_shape(tuple(limits))])


@writes("dynamic_update_slice")
def write_dynamic_update_slice(graph: Graph, call: Call) -> Value:
    """Write a replacement of a slice, by the index of each of its elements along each dimension."""
    x, update, *starts = call.inputs
    shape, sizes = call.parameters["input_shapes"][:2]
    axes = [axis for axis, (n, size) in enumerate(zip(shape, sizes, strict=True)) if not _equals(n, size)]
    names = graph.store_full(x, shape), graph.store_full(update, sizes)
    if not axes:
        return Value(tuple(sizes), values.find_container(x.dtype), names[1])
    if not values.is_static(tuple(sizes[axis] for axis in axes)):
        raise UnsupportedError("an update of symbolic length")
    if len(axes) > 1:
        name = _update_block(graph, names, axes, shape, sizes, [starts[axis] for axis in axes])
        return Value(tuple(shape), values.find_container(x.dtype), name)
    axis = axes[0]
    known = _find_known_starts([starts[axis]], [shape[axis] - sizes[axis]])
    if known is not None:
        name = _replace_part(graph, x, names, axis, (known[0], known[0] + int(sizes[axis]), int(shape[axis])))
        return Value(tuple(shape), values.find_container(x.dtype), name)
    begin = _join_starts(graph, [starts[axis]], [shape[axis] - sizes[axis]])
    # ONNX's operators that replace elements want the index of each of them.
    offsets = graph.ints(*range(sizes[axis]))
    line = graph.reshape(graph.add("Add", [begin, offsets]), tuple(-1 if a == axis else 1 for a in range(len(shape))))
    index = graph.add("Expand", [line, graph.add_shape(tuple(sizes))])
    return Value(
        tuple(shape),
        values.find_container(x.dtype),
        graph.add("ScatterElements", [names[0], index, names[1]], axis=axis),
    )


def _replace_part(graph: Graph, x: Value, names: Sequence[str], axis: int, bounds: tuple[int, int, int]) -> str:
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
    graph: Graph, names: Sequence[str], axes: Sequence[int], shape: Shape, sizes: Shape, starts: Sequence[Value]
) -> str:  # fmt: skip
    """Return an array with a block replaced that is shorter than the array along several axes."""
    order = [*axes, *(axis for axis in range(len(shape)) if axis not in axes)]
    begin = _join_starts(graph, starts, [shape[axis] - sizes[axis] for axis in axes])
    steps = np.moveaxis(np.indices([sizes[axis] for axis in axes]), 0, -1).astype(np.int64)
    index = graph.add("Add", [begin, graph.add_constant(steps)])
    x, update = (graph.transpose(name, order) for name in names)
    return graph.transpose(graph.add("ScatterND", [x, index, update]), [int(axis) for axis in np.argsort(order)])


@writes("cumsum")
def write_cumulative_sum(graph: Graph, call: Call) -> Value:
    """Write running sums."""
    (x,), p = call.inputs, call.parameters
    # CumSum has no integers of 8 and 16 bits. Sums in a wider dtype have the same low bits.
    container, wide = values.find_container(x.dtype), elementwise.find_compute_dtype(x.dtype)
    name = graph.store_full(x, p["input_shapes"][0])
    name = name if wide == container else graph.cast(name, wide)
    name = graph.add("CumSum", [name, graph.add_constant(np.int64(p["axis"]))], reverse=int(p["reverse"]))
    name = name if wide == container else graph.cast(name, container)
    return Value(call.outputs[0].shape, container, name)


@writes("top_k")
def write_top_k(graph: Graph, call: Call) -> list[Value]:
    """Write the largest elements and their indices."""
    (x,), spec = call.inputs, call.outputs[0]
    axis = call.parameters.get("axis", len(spec.shape) - 1)
    name = graph.store_full(x, call.parameters["input_shapes"][0])
    ordered, index = _order(graph, name, x.dtype, spec.shape[axis], axis, largest=1)
    return [Value(spec.shape, x.dtype, ordered), Value(spec.shape, np.dtype(np.int32), graph.cast(index, np.int32))]


def _order(graph: Graph, name: str, dtype: Any, count: Any, axis: int, largest: int) -> list[str]:
    """Return the largest or the smallest elements in their order, and their indices."""
    name = elementwise.widen_ordered(graph, name, dtype)
    ordered, index = graph.add("TopK", [name, graph.add_shape((count,))], 2, axis=axis, largest=largest)
    return [elementwise.narrow_ordered(graph, ordered, dtype), index]


@writes("sort")
def write_sort(graph: Graph, call: Call) -> list[Value]:
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
def write_arg_extreme(graph: Graph, call: Call) -> Value:
    """Write the index of an extreme."""
    p, operator = call.parameters, {"argmax": "ArgMax", "argmin": "ArgMin"}[call.name]
    name = graph.store_full(call.inputs[0], p["input_shapes"][0])
    name = elementwise.widen_ordered(graph, name, call.inputs[0].dtype)
    index = graph.add(operator, [name], axis=p["axes"][0], keepdims=0)
    return Value(call.outputs[0].shape, np.dtype(p["index_dtype"]), graph.cast(index, p["index_dtype"]))


_REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}


@writes(*_REDUCTIONS, "reduce_and", "reduce_or")
def write_reduction(graph: Graph, call: Call) -> Value:
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
def write_sum(graph: Graph, call: Call) -> Value:
    """Write a sum along the last dimension, in the runtime's order."""
    shape, (output,), graph.floats = call.parameters["input_shapes"][0], call.outputs, "runtime"
    name = graph.reduce("ReduceSum", graph.store_full(call.inputs[0], shape), [len(shape) - 1])
    return Value(tuple(output.shape), np.dtype(output.dtype), name)


@writes("dim_as_value")
def write_dimension(graph: Graph, call: Call) -> Value:
    """Write a symbolic dimension as a number."""
    name = graph.add("Squeeze", [graph.add_dimension(call.parameters["dim"]), graph.ints(0)])
    return Value((), np.dtype(call.outputs[0].dtype), graph.cast(name, call.outputs[0].dtype))
