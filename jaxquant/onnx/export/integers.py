"""ONNX nodes of jaxquant's integer contractions, MatMulInteger and ConvInteger, of shifts and counts of bits."""

from __future__ import annotations

import math

import numpy as np
from jax.typing import DTypeLike

from . import contractions, values
from .contractions import Matrix
from .elementwise import apply_operator, cast_value, choose, make_scalar, write_operator
from .graph import ModelGraph, WriterCall, writes, writes_mark
from .values import Shape, UnsupportedError, Value

_UINT8, _INT32, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.float32)


def _is_zero(zero_point: Value | None) -> bool:
    return zero_point is None or (zero_point.is_known and not np.any(np.asarray(zero_point.array)))


def _count(x: Value) -> int:
    shape = values.shrink_array(np.asarray(x.array)).shape if x.is_known else x.shape
    return math.prod(shape)


@writes_mark("contract")
def write_contraction(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a matrix product of codes into int32."""
    p = call.parameters
    shapes = iter(p["input_shapes"])
    lhs_shape, rhs_shape = next(shapes), next(shapes)
    output, left, right = call.outputs[0].shape, p["left"], p["right"]
    lhs = Matrix(_to_container(graph, p["lhs"]), lhs_shape, *left)
    rhs = Matrix(_to_container(graph, p["rhs"]), rhs_shape, *right)
    zero_points = p["lhs_center"], p["rhs_center"]
    columns = _derive_zero_point_shape(zero_points[1], rhs)
    if columns is None:
        # A MatMul of int32 wraps around as MatMulInteger does, but takes many times as long.
        sides = [_subtract(graph, side, zero_point) for side, zero_point in zip((lhs, rhs), zero_points, strict=True)]
        name = contractions.multiply(graph, sides[0], sides[1], lambda a, b: graph.add("MatMul", [a, b]))
    elif _is_zero(zero_points[0]) or _count(zero_points[0]) == 1:
        name = _multiply(graph, lhs, rhs, zero_points, columns)
    else:
        name = _multiply_rows(graph, lhs, rhs, zero_points, columns)
    return Value(tuple(output), _INT32, name)


def _multiply(
    graph: ModelGraph, lhs: Matrix, rhs: Matrix, zero_points: tuple[Value | None, Value | None], columns: Shape
) -> str:  # fmt: skip
    """Return MatMulInteger with one zero point on the left, and one on the right or one for each of its columns."""
    lhs, zero_points = _match_signs(graph, lhs, rhs, zero_points)
    names = [
        ""
        if _is_zero(zero_point)
        else _store_zero_point(graph, _read_zero_point(graph, zero_point, side.value.dtype), shape)
        for zero_point, side, shape in zip(zero_points, (lhs, rhs), ((), columns), strict=True)
    ]
    # ONNX Runtime's fused kernel reads a zero point for each column where there is a scale for each column.
    while names and not names[-1]:
        names.pop()

    def multiply(a: str, b: str) -> str:
        graph.note_dtype(a, lhs.value.dtype)
        graph.note_dtype(b, rhs.value.dtype)
        return graph.add("MatMulInteger", [a, b, *names])

    return contractions.multiply(graph, lhs, rhs, multiply)


def _multiply_rows(
    graph: ModelGraph, lhs: Matrix, rhs: Matrix, zero_points: tuple[Value | None, Value | None], columns: Shape
) -> str:  # fmt: skip
    """Return the product of a left operand that has a zero point for each row.

    ONNX Runtime's MatMulInteger takes only one. So it multiplies the codes themselves, and the product of each zero
    zero_point and the sums over the columns of the right operand is subtracted, modulo 2**32, as everything here.
    """
    zero_point = zero_points[0]
    assert zero_point is not None
    if lhs.value.dtype == np.int8 and rhs.value.dtype == _UINT8:
        offset = values.make_known(np.int32(128))
        zero_point = apply_operator(graph, "Add", [cast_value(graph, zero_point, _INT32), offset])
        lhs = lhs._replace(value=_to_unsigned(graph, lhs.value, None)[0])
    product = _multiply(graph, lhs, rhs, (None, zero_points[1]), columns)
    sums = _sum_columns(graph, lhs, rhs, zero_points[1], columns)
    # The zero points in the dimensions of the result, which are 1 for the columns.
    rows = graph.transpose(graph.store(zero_point), [*lhs.batch, *lhs.free, *lhs.contracted])
    shape = (*(zero_point.shape[axis] for axis in (*lhs.batch, *lhs.free)), *(1 for _ in rhs.free))
    rows = rows if len(lhs.contracted) == len(rhs.free) else graph.reshape(rows, shape)
    return graph.add("Sub", [product, graph.add("Mul", [rows, sums])])


def _sum_columns(graph: ModelGraph, lhs: Matrix, rhs: Matrix, zero_point: Value | None, columns: Shape) -> str:
    """Return int32 sums over the right operand, less its zero points, in the dimensions of the result."""
    if rhs.value.is_known and (zero_point is None or zero_point.is_known):
        codes = np.broadcast_to(np.asarray(rhs.value.array), rhs.shape).astype(np.int32)
        array = codes if zero_point is None else codes - np.asarray(zero_point.array, np.int32)
        total = array.sum(tuple(rhs.contracted), dtype=np.int32, keepdims=True)
        total = total.transpose([*rhs.batch, *rhs.contracted, *rhs.free])
        shape = (*(rhs.shape[axis] for axis in rhs.batch), *(1 for _ in lhs.free), *(rhs.shape[a] for a in rhs.free))
        return graph.add_constant(total.reshape(shape))
    # A row of ones. With a batch, each matrix has its own.
    shape = tuple(1 if axis in lhs.free else n for axis, n in enumerate(lhs.shape))
    ones = graph.fill(values.make_known(np.ones((1,) * len(shape), np.uint8)), shape)
    return _multiply(graph, lhs._replace(value=ones, shape=shape), rhs, (None, zero_point), columns)


def _match_signs(
    graph: ModelGraph, lhs: Matrix, rhs: Matrix, zero_points: tuple[Value | None, Value | None]
) -> tuple[Matrix, tuple[Value | None, Value | None]]:
    """Return a left operand of int8 as uint8 if the right one is uint8, and the zero points.

    ONNX Runtime has no MatMulIntegerToFloat for int8 by uint8, and does not load a model in which it fuses this product
    with the scales, which it does if one of them is computed.
    """
    is_static = lhs.value.is_known and (zero_points[1] is None or zero_points[1].is_known)
    if is_static or lhs.value.dtype != np.int8 or rhs.value.dtype != _UINT8:
        return lhs, zero_points
    value, zero_point = _to_unsigned(graph, lhs.value, zero_points[0])
    return lhs._replace(value=value), (zero_point, zero_points[1])


def _to_container(graph: ModelGraph, codes: Value) -> Value:
    return cast_value(graph, codes, values.choose_container(codes.dtype))


def _read_zero_point(graph: ModelGraph, zero_point: Value | None, dtype: DTypeLike) -> Value:
    """Return a zero point of one element in the dtype of its codes."""
    if zero_point is None:
        return values.make_known(np.zeros((), dtype))
    return cast_value(graph, zero_point, dtype)


def _derive_zero_point_shape(zero_point: Value | None, rhs: Matrix) -> Shape | None:
    """Return the shape in which MatMulInteger takes a zero point: (), or one entry for each column; or None."""
    if _is_zero(zero_point) or zero_point is None or _count(zero_point) == 1:
        return ()
    varies = [axis for axis, n in enumerate(zero_point.shape) if not bool(n == 1)]
    if len(rhs.free) == 1 and varies == [rhs.free[0]]:
        return (rhs.shape[rhs.free[0]],)
    return None


def _store_zero_point(graph: ModelGraph, zero_point: Value, shape: Shape) -> str:
    """Return a zero point in a shape."""
    if zero_point.is_known:
        # A zero point that is 0 everywhere is a scalar, whatever its shape.
        array = np.asarray(zero_point.array)
        array = array.reshape(-1)[:1] if shape == () else array
        return graph.add_constant(array.reshape(shape))
    assert zero_point.name is not None
    if shape == () and zero_point.shape != ():
        scalar = graph.read_scalar_name(zero_point.name)
        return graph.reshape(zero_point.name, ()) if scalar == zero_point.name else scalar
    return zero_point.name if zero_point.shape == shape else graph.reshape(zero_point.name, shape)


def _subtract(graph: ModelGraph, side: Matrix, zero_point: Value | None) -> Matrix:
    """Return an operand as int32 with its zero points subtracted."""
    wide = cast_value(graph, side.value, np.int32)
    if not _is_zero(zero_point):
        assert zero_point is not None
        wide = graph.fill(wide, side.shape) if wide.is_known else wide
        wide = apply_operator(graph, "Sub", [wide, zero_point])
    return side._replace(value=wide)


@writes_mark("convolve")
def write_convolution(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a convolution of codes into int32."""
    p, geometry = call.parameters, call.parameters["geometry"]
    shapes = iter(p["input_shapes"])
    x_shape, w_shape = next(shapes), next(shapes)
    attributes = contractions.derive_attributes(
        {"window_strides": geometry.strides, "padding": geometry.padding, "rhs_dilation": geometry.rhs_dilation},
        geometry.groups,
    )  # fmt: skip
    x, x_center = _to_unsigned(graph, _to_container(graph, p["x"]), p["x_center"])
    w = _to_container(graph, p["w"])
    name = graph.store_full(x, x_shape)
    kernel, w_center = graph.store_full(w, w_shape), p["w_center"]
    graph.note_dtype(name, x.dtype)
    graph.note_dtype(kernel, w.dtype)
    x_zero_point = _store_zero_point(graph, x_center, ())
    if any(step != 1 for step in geometry.lhs_dilation):
        # The zero point between the elements counts as 0, like the padding of ConvInteger.
        name = contractions.spread_image(graph, name, x_shape, geometry.lhs_dilation, [x_zero_point])
    if _is_zero(w_center) or _count(w_center) == 1:
        w_zero_point = _store_zero_point(graph, _read_zero_point(graph, w_center, w.dtype), ())
        acc = graph.add("ConvInteger", [name, kernel, x_zero_point, w_zero_point], **attributes)
    else:
        # ConvInteger takes one zero point of the kernel. The others multiply the sums over windows of x.
        acc = graph.add("ConvInteger", [name, kernel, x_zero_point], **attributes)
        ones = graph.add_constant(np.ones(w_shape, np.int8))
        sums = graph.add("ConvInteger", [name, ones, x_zero_point], **attributes)
        zero_points = graph.reshape(graph.store(w_center), (1, w_shape[0], *(1,) * (len(w_shape) - 2)))
        acc = graph.add("Sub", [acc, graph.add("Mul", [sums, zero_points])])
    return Value(tuple(call.outputs[0].shape), _INT32, acc)


@writes_mark("scale")
def write_scale(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the conversion of a product to floats.

    ONNX Runtime fuses MatMulInteger, Cast and Mul if the scale of the right operand is a vector or a scalar, and its
    product with the left scale is a node, so that the left scale has to be computed.
    """
    p, shape = call.parameters, call.outputs[0].shape
    a, b = p["a_scale"], p["b_scale"]
    floats = Value(p["acc"].shape, _FLOAT32, graph.cast(graph.store(p["acc"]), np.float32))
    if a.is_known and b.is_known:
        return apply_operator(
            graph, "Mul", [floats, values.make_known(np.asarray(a.array) * np.asarray(b.array), b.hint)]
        )
    a, b = (_drop_ones(graph, scale) for scale in (a, b))
    scale = apply_operator(graph, "Mul", [a, b])
    return apply_operator(graph, "Mul", [floats, scale])._replace(shape=tuple(shape))


def _drop_ones(graph: ModelGraph, x: Value) -> Value:
    """Return a scale without the dimensions of 1 in front of its others."""
    count = next((i for i, n in enumerate(x.shape) if not bool(n == 1)), len(x.shape))
    if x.is_known:
        return values.make_known(np.asarray(x.array).reshape(x.shape[count:]), x.hint)
    if count == len(x.shape) and x.name is not None:
        return Value((), x.dtype, graph.read_scalar_name(x.name))
    return x


def _to_unsigned(graph: ModelGraph, x: Value, zero_point: Value | None) -> tuple[Value, Value]:
    """Return uint8 codes and their zero point: ONNX Runtime's ConvInteger takes no int8 images."""
    if x.dtype == _UINT8:
        return x, _read_zero_point(graph, zero_point, _UINT8)
    # Codes and zero point both move by 128, so the sums do not change.
    wide = apply_operator(graph, "Add", [cast_value(graph, x, np.int32), values.make_known(np.int32(128))])
    zero_point = values.make_known(np.int32(0)) if zero_point is None else zero_point
    if zero_point.is_known:
        zero_point = values.make_known(np.asarray(np.asarray(zero_point.array) + 128, np.uint8).reshape(()))
    else:
        zero_point = cast_value(
            graph, apply_operator(graph, "Add", [zero_point, values.make_known(np.int32(128))]), _UINT8
        )
    return cast_value(graph, wide, _UINT8), zero_point


# Shifts of bits.


@writes("shift_left", "shift_right_logical", "shift_right_arithmetic")
def write_shift(graph: ModelGraph, call: WriterCall) -> Value:
    """Write a shift of bits; of signed integers by known numbers, as a multiplication or a division."""
    x, distances = call.inputs
    dtype = np.dtype(x.dtype)
    is_known = distances.is_known and dtype.kind == "i"
    if is_known and call.name == "shift_right_arithmetic":
        return _shift_right(graph, x, np.asarray(distances.array))
    bits = 8 * dtype.itemsize
    if is_known and call.name == "shift_left" and not np.any((distances.array < 0) | (distances.array >= bits)):
        power = values.make_known(np.left_shift(np.ones_like(np.asarray(distances.array)), np.asarray(distances.array)))
        return apply_operator(graph, "Mul", [x, power])
    return _shift_unsigned(graph, call.name, x, distances, bits)


def _shift_unsigned(graph: ModelGraph, name: str, x: Value, distances: Value, bits: int) -> Value:
    """Return integers shifted by numbers that the model computes, as the unsigned integers of their bits."""
    dtype, is_left = np.dtype(x.dtype), name == "shift_left"
    if name == "shift_right_arithmetic" and dtype.kind == "u":
        # It copies the highest bit, which is a sign in an integer of the same bits.
        x, distances = (cast_value(graph, v, np.dtype(dtype.name[1:])) for v in (x, distances))
        return cast_value(graph, _shift_unsigned(graph, name, x, distances, bits), dtype)
    # ONNX Runtime shifts integers of 32 and of 64 bits, and keeps the low bits of one that is cast.
    unsigned = np.dtype(f"u{dtype.name.removeprefix('u')}")
    wide = np.dtype(np.uint64 if bits == 64 else np.uint32)

    def shift(x: Value) -> Value:
        operands = [cast_value(graph, cast_value(graph, v, unsigned), wide) for v in (x, inside)]
        moved = write_operator(graph, "BitShift", operands, wide, direction="LEFT" if is_left else "RIGHT")
        return cast_value(graph, moved, dtype)

    zero, last = make_scalar(0, dtype), make_scalar(bits - 1, dtype)
    outside = [apply_operator(graph, o, [distances, end], np.bool_) for o, end in (("Less", zero), ("Greater", last))]
    is_outside = write_operator(graph, "Or", outside, np.bool_)
    inside = choose(graph, is_outside, last, distances)
    if name != "shift_right_arithmetic":
        return choose(graph, is_outside, zero, shift(x))
    # The bits of a negative x are the inverted bits of -1 - x, and so are the bits that a shift brings in.
    is_negative, minus = apply_operator(graph, "Less", [x, zero], np.bool_), make_scalar(-1, dtype)
    size = shift(choose(graph, is_negative, apply_operator(graph, "Sub", [minus, x]), x))
    return choose(graph, is_negative, apply_operator(graph, "Sub", [minus, size]), size)


def _shift_right(graph: ModelGraph, x: Value, distances: np.ndarray) -> Value:
    """Return signed integers shifted by known numbers, as divisions that round down: (x - mod(x, p)) / p."""
    most = 8 * distances.dtype.itemsize - 1
    # A shift by all bits or more leaves the sign, as one by all but the last does. JAX counts a negative one so, too.
    distances = np.where((distances < 0) | (distances > most), most, distances).astype(distances.dtype)
    # The dtype does not hold 2**most, so the longest shift takes two divisions.
    for part in (np.minimum(distances, most - 1), np.maximum(distances - (most - 1), 0)):
        if np.any(part):
            power = values.make_known(np.left_shift(np.ones_like(part), part))
            rest = apply_operator(graph, "Mod", [x, power])
            x = apply_operator(graph, "Div", [apply_operator(graph, "Sub", [x, rest]), power])
    return x


# Counts of bits.

_COUNTS = np.array([i.bit_count() for i in range(256)], np.int32)


@writes("population_count")
def write_population_count(graph: ModelGraph, call: WriterCall) -> Value:
    """Write the number of ones among the bits of integers: of each byte a lookup in a table."""
    (x,), dtype = call.inputs, np.dtype(call.parameters["input_dtypes"][0])
    container = values.choose_container(dtype)
    if dtype != container:
        raise UnsupportedError(f"population_count of {dtype}")
    # ONNX Runtime shifts integers of 32 and of 64 bits, and keeps the low bits of one that is cast.
    wide = np.dtype(np.uint64 if dtype.itemsize == 8 else np.uint32)
    unsigned = np.dtype(f"u{dtype.name.removeprefix('u')}")
    x = cast_value(graph, cast_value(graph, x, unsigned), wide)
    table, total = graph.add_constant(_COUNTS), None
    for byte in range(dtype.itemsize):
        steps = make_scalar(8 * byte, wide)
        part = write_operator(graph, "BitShift", [x, steps], wide, direction="RIGHT") if byte else x
        index = cast_value(graph, cast_value(graph, part, _UINT8), np.int32)
        count = Value(x.shape, _INT32, graph.add("Gather", [table, graph.store(index)], axis=0))
        total = count if total is None else apply_operator(graph, "Add", [total, count])
    assert total is not None
    return cast_value(graph, total, dtype)
