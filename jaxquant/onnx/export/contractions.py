"""ONNX nodes of matrix products, convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from ..._core import dtypes
from . import elementwise, packed_weights, values
from .graph import ModelGraph, WriterCall, writes
from .values import Shape, UnsupportedError, Value


class Matrix(NamedTuple):
    """An operand of a matrix product.

    Attributes:
        value: the operand.
        shape: its shape.
        batch: the dimensions that both operands share.
        free: its own dimensions.
        contracted: the dimensions that are summed.
    """

    value: Value
    shape: Shape
    batch: Sequence[int]
    free: Sequence[int]
    contracted: Sequence[int]

    def count(self, axes: Sequence[int]) -> Any:
        """Return the number of elements along some dimensions."""
        return math.prod(self.shape[axis] for axis in axes)


@writes("dot_general")
def write_dot_general(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a matrix product."""
    (contracted, batch), output = call.parameters["dimension_numbers"], call.outputs[0]
    sides = []
    for x, shape, summed, shared in zip(call.inputs, call.parameters["input_shapes"], contracted, batch, strict=True):
        free = [axis for axis in range(len(shape)) if axis not in (*summed, *shared)]
        wide = elementwise.choose_compute_dtype(output.dtype)
        sides.append(Matrix(elementwise.cast_value(graph, x, wide), shape, shared, free, summed))
    name = packed_weights.multiply_packed(graph, *sides)
    if name is None:
        name = multiply(graph, sides[0], sides[1], lambda a, b: graph.add("MatMul", [a, b]))
    dtype = values.choose_container(output.dtype)
    wide = elementwise.choose_compute_dtype(dtype)
    return Value(tuple(output.shape), dtype, name if wide == dtype else graph.cast(name, dtype))


def multiply(graph: ModelGraph, lhs: Matrix, rhs: Matrix, product: Callable[[str, str], str]) -> str:
    """Return the product of two operands, written by `product` for operands [..., M, K] and [..., K, N]."""
    result = (*(lhs.shape[a] for a in (*lhs.batch, *lhs.free)), *(rhs.shape[a] for a in rhs.free))
    # The left operand keeps its dimensions if the right one is a single matrix.
    is_plain = not lhs.batch and len(lhs.contracted) == 1 and len(lhs.free) >= 1
    b = _arrange(graph, rhs, (rhs.batch, rhs.contracted, rhs.free))
    if is_plain:
        a = graph.transpose(graph.store_full(lhs.value, lhs.shape), [*lhs.free, *lhs.contracted])
        name = product(a, b)
        return name if len(rhs.free) == 1 else graph.reshape(name, result)
    name = product(_arrange(graph, lhs, (lhs.batch, lhs.free, lhs.contracted)), b)
    shape = (*(lhs.shape[a] for a in lhs.batch), lhs.count(lhs.free), rhs.count(rhs.free))
    return name if tuple(shape) == tuple(result) else graph.reshape(name, result)


def _arrange(graph: ModelGraph, side: Matrix, groups: Sequence[Sequence[int]]) -> str:
    """Return an operand with its dimensions in the order of the groups; the last two become one dimension each."""
    batch, first, second = groups
    order = [*batch, *first, *second]
    shape = (*(side.shape[a] for a in batch), side.count(first), side.count(second))
    is_merged = len(first) != 1 or len(second) != 1
    if side.value.is_known:  # the weights are stored as the product reads them
        array = np.broadcast_to(np.asarray(side.value.array), side.shape).transpose(order)
        return graph.store(values.make_known(array.reshape(shape), side.value.hint))
    name = graph.transpose(graph.store_full(side.value, side.shape), order)
    return graph.reshape(name, shape) if is_merged else name


# Convolutions.


@writes("conv_general_dilated")
def write_convolution(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a convolution, between transposes to ONNX's layout and back."""
    p, output = call.parameters, call.outputs[0]
    numbers = p["dimension_numbers"]
    if p["batch_group_count"] != 1:
        raise UnsupportedError("batch_group_count")
    dtype = values.choose_container(output.dtype)
    if dtype not in dtypes.FLOATS:
        raise UnsupportedError("a convolution of integers other than jaxquant's")
    wide = elementwise.choose_compute_dtype(dtype)
    names = [
        arrange_operand(graph, elementwise.cast_value(graph, x, wide), shape, spec)
        for x, shape, spec in zip(call.inputs, p["input_shapes"], (numbers.lhs_spec, numbers.rhs_spec), strict=True)
    ]
    if any(step != 1 for step in p["lhs_dilation"]):
        shape = [p["input_shapes"][0][axis] for axis in numbers.lhs_spec]
        names[0] = spread_image(graph, names[0], shape, p["lhs_dilation"])
    name = graph.add("Conv", names, **derive_attributes(p, p["feature_group_count"]))
    name = name if wide == dtype else graph.cast(name, dtype)
    name = graph.transpose(name, np.argsort(numbers.out_spec).tolist())
    return Value(tuple(output.shape), dtype, name)


def spread_image(
    graph: ModelGraph, name: str, shape: Sequence[Any], dilation: Sequence[int], fill: Sequence[str] = ()
) -> str:
    """Return an image with zeros, or another number, between its elements, as a transposed convolution reads it."""
    # Conv does not spread its input. Padding a new dimension of 1, and merging it, puts zeros after each element.
    for axis, step in enumerate(dilation, 2):
        if step == 1:
            continue
        wide = (*shape[: axis + 1], 1, *shape[axis + 1 :])
        pads = [0] * (2 * len(wide))
        pads[len(wide) + axis + 1] = step - 1
        name = graph.add("Pad", [graph.reshape(name, wide), graph.ints(*pads), *fill])
        length = shape[axis] * step
        name = graph.reshape(name, (*shape[:axis], length, *shape[axis + 1 :]))
        name = graph.slice(name, [0], [length - step + 1], [axis], [1])
        shape = [*shape[:axis], length - step + 1, *shape[axis + 1 :]]
    return name


def arrange_operand(graph: ModelGraph, x: Value, shape: Shape, spec: Sequence[int]) -> str:
    """Return an operand of a convolution in ONNX's layout; a known one is stored in it."""
    if x.is_known:
        array = np.broadcast_to(np.asarray(x.array), shape).transpose(spec)
        return graph.store(values.make_known(np.ascontiguousarray(array), x.hint))
    return graph.transpose(graph.store_full(x, shape), spec)


def derive_attributes(p: dict[str, Any], groups: int) -> dict[str, Any]:
    """Return the attributes of Conv."""
    pads = p["padding"]
    if any(pad < 0 for pair in pads for pad in pair):
        # JAX crops its input there; ONNX asks for pads of 0 or more.
        raise UnsupportedError("a convolution with negative padding")
    return {
        "strides": list(p["window_strides"]),
        "pads": [*(int(low) for low, _ in pads), *(int(high) for _, high in pads)],
        "dilations": list(p["rhs_dilation"]),
        "group": int(groups),
    }


# Pooling.


@writes("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def write_pooling(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a pooling over windows of some of the dimensions."""
    p, shape = call.parameters, call.parameters["input_shapes"][0]
    window, strides, pads = p["window_dimensions"], p["window_strides"], p["padding"]
    if any(step != 1 for step in p["base_dilation"]):
        raise UnsupportedError("a pooling with base_dilation")
    axes = [
        axis for axis, parts in enumerate(zip(window, strides, pads, strict=True)) if parts != (1, 1, (0, 0))
    ]  # fmt: skip
    others = [axis for axis in range(len(shape)) if axis not in axes]
    x = call.inputs[0]
    output = call.outputs[0]
    if not axes:
        return x
    order = [*others, *axes]
    name = graph.transpose(graph.store_full(x, shape), order)
    merged = (math.prod(shape[axis] for axis in others[:-1]), shape[others[-1]] if others else 1)
    spatial = tuple(shape[axis] for axis in axes)
    if len(others) != 2:
        # ONNX pools the dimensions from the third on, so that there have to be two others.
        name = graph.reshape(name, (*merged, *spatial))
    config = {
        "kernel_shape": [int(window[axis]) for axis in axes],
        "strides": [int(strides[axis]) for axis in axes],
        "pads": [*(int(pads[axis][0]) for axis in axes), *(int(pads[axis][1]) for axis in axes)],
        "dilations": [int(p["window_dilation"][axis]) for axis in axes],
    }
    is_mean = call.name == "reduce_window_sum" and values.choose_container(x.dtype) in dtypes.FLOATS
    if is_mean or call.name != "reduce_window_sum":
        name = _pool(graph, call.name, name, x.dtype, config)
    else:
        name = _sum_windows(graph, name, x.dtype, config)
    if len(others) != 2:
        positions = tuple(output.shape[axis] for axis in axes)
        name = graph.reshape(name, (*(shape[axis] for axis in others), *positions))
    return Value(
        tuple(output.shape), values.choose_container(output.dtype), graph.transpose(name, np.argsort(order).tolist())
    )


def _pool(graph: ModelGraph, kind: str, name: str, dtype: DTypeLike, config: dict[str, Any]) -> str:
    """Return a pooling of [N, C, *spatial]."""
    container = values.choose_container(dtype)
    is_float = container == np.float32
    if kind == "reduce_window_sum":
        if any(step != 1 for step in config["dilations"]) and graph.opset < 19:
            raise UnsupportedError("a dilated sum over windows needs opset 19")
        if graph.opset < 19:
            # AveragePool has this attribute from opset 19 on.
            config.pop("dilations")
        name = name if is_float else graph.cast(name, np.float32)
        count = math.prod(config["kernel_shape"])
        # ONNX has no sums over windows. With the padding, each mean is of the same number of elements.
        name = graph.add("AveragePool", [name], count_include_pad=1, **config)
        name = graph.add("Mul", [name, graph.add_constant(np.float32(count))])
        return name if is_float else graph.cast(name, container)
    is_direct = is_float or (container in (np.int8, np.uint8) and kind == "reduce_window_max")
    # MaxPool takes integers of 8 bits only, and Neg would overflow at the lowest. float64 holds integers of 32 bits.
    wide = np.float32 if container in (dtypes.FLOAT16, dtypes.BFLOAT16) else np.float64
    name = name if is_direct else graph.cast(name, wide)
    if kind == "reduce_window_min":
        name = graph.add("Neg", [graph.add("MaxPool", [graph.add("Neg", [name])], **config)])
    else:
        name = graph.add("MaxPool", [name], **config)
    return name if is_direct else graph.cast(name, container)


def _sum_windows(graph: ModelGraph, name: str, dtype: DTypeLike, config: dict[str, Any]) -> str:
    """Return sums over windows of [N, C, *spatial] by additions: a mean in floats would round large integers."""
    container, wide = values.choose_container(dtype), elementwise.choose_compute_dtype(dtype)
    name = name if wide == container else graph.cast(name, wide)
    count, end = len(config["kernel_shape"]), np.iinfo(np.int64).max
    if any(config["pads"]):
        pads = [0, 0, *config["pads"][:count], 0, 0, *config["pads"][count:]]
        name = graph.add("Pad", [name, graph.ints(*pads), graph.add_constant(np.zeros((), wide))])

    sizes = zip(config["kernel_shape"], config["dilations"], config["strides"], strict=True)
    for axis, (size, step, stride) in enumerate(sizes, 2):
        name = _sum_along(graph, name, axis, size, step)
        name = name if stride == 1 else graph.slice(name, [0], [end], [axis], [stride])
    return name if wide == container else graph.cast(name, container)


def _sum_along(graph: ModelGraph, name: str, axis: int, size: int, step: int) -> str:
    """Return the sums of `size` elements each along an axis, which are `step` apart, for all places of the first."""
    # Sums of 2, 4, 8, ... elements, added up as the bits of the size tell, take few nodes for a long window, too.
    power, length, result, done = name, 1, "", 0
    while True:
        if size & length:
            result = _join_sums(graph, (result, power), (done, length), axis, step) if done else power
            done += length
        if done == size:
            return result
        power, length = _join_sums(graph, (power, power), (length, length), axis, step), 2 * length


def _join_sums(graph: ModelGraph, names: tuple[str, str], lengths: tuple[int, int], axis: int, step: int) -> str:
    """Return names[0] + names[1], where names[1] holds sums of elements that follow the elements of names[0]."""
    head = graph.slice(names[0], [0], [-lengths[1] * step], [axis], [1])
    tail = graph.slice(names[1], [lengths[0] * step], [np.iinfo(np.int64).max], [axis], [1])
    return graph.add("Add", [head, tail])


@writes("reduce_window")
def write_reduce_window(graph: ModelGraph, call: WriterCall) -> Value:
    """Refuse a pooling by any function: JAX has primitives for sums and extremes."""
    raise UnsupportedError("a reduction over windows that is neither a sum nor an extreme")
