"""ONNX nodes of shifts of the bits of integers."""

from __future__ import annotations

import numpy as np

from . import values
from .elementwise import apply_operator, cast_value, choose, make_scalar, write_operator
from .graph import Graph
from .registry import Call, writes
from .values import Value


@writes("shift_left", "shift_right_logical", "shift_right_arithmetic")
def write_shift(graph: Graph, call: Call) -> Value:
    """Write a shift of bits; of signed integers by known numbers, as a multiplication or a division."""
    x, steps = call.inputs
    dtype = np.dtype(x.dtype)
    is_known = steps.is_known and dtype.kind == "i"
    if is_known and call.name == "shift_right_arithmetic":
        return _shift_right(graph, x, np.asarray(steps.array))
    bits = 8 * dtype.itemsize
    if is_known and call.name == "shift_left" and not np.any((steps.array < 0) | (steps.array >= bits)):
        power = values.make_known(np.left_shift(np.ones_like(np.asarray(steps.array)), np.asarray(steps.array)))
        return apply_operator(graph, "Mul", [x, power])
    return _shift_unsigned(graph, call.name, x, steps, bits)


def _shift_unsigned(graph: Graph, name: str, x: Value, steps: Value, bits: int) -> Value:
    """Return integers shifted by numbers that the model computes, as the unsigned integers of their bits."""
    dtype, is_left = np.dtype(x.dtype), name == "shift_left"
    if name == "shift_right_arithmetic" and dtype.kind == "u":
        # It copies the highest bit, which is a sign in an integer of the same bits.
        x, steps = (cast_value(graph, v, np.dtype(dtype.name[1:])) for v in (x, steps))
        return cast_value(graph, _shift_unsigned(graph, name, x, steps, bits), dtype)
    # ONNX Runtime shifts integers of 32 and of 64 bits, and keeps the low bits of one that is cast.
    unsigned = np.dtype(f"u{dtype.name.removeprefix('u')}")
    wide = np.dtype(np.uint64 if bits == 64 else np.uint32)

    def shift(x: Value) -> Value:
        operands = [cast_value(graph, cast_value(graph, v, unsigned), wide) for v in (x, inside)]
        moved = write_operator(graph, "BitShift", operands, wide, direction="LEFT" if is_left else "RIGHT")
        return cast_value(graph, moved, dtype)

    zero, last = make_scalar(0, dtype), make_scalar(bits - 1, dtype)
    outside = [apply_operator(graph, o, [steps, end], np.bool_) for o, end in (("Less", zero), ("Greater", last))]
    is_outside = write_operator(graph, "Or", outside, np.bool_)
    inside = choose(graph, is_outside, last, steps)
    if name != "shift_right_arithmetic":
        return choose(graph, is_outside, zero, shift(x))
    # The bits of a negative number are the opposites of those of -1 - x, and so are the ones that a shift brings in.
    is_negative, minus = apply_operator(graph, "Less", [x, zero], np.bool_), make_scalar(-1, dtype)
    size = shift(choose(graph, is_negative, apply_operator(graph, "Sub", [minus, x]), x))
    return choose(graph, is_negative, apply_operator(graph, "Sub", [minus, size]), size)


def _shift_right(graph: Graph, x: Value, steps: np.ndarray) -> Value:
    """Return signed integers shifted by known numbers, as divisions that round down: (x - mod(x, p)) / p."""
    most = 8 * steps.dtype.itemsize - 1
    # A shift by all bits or more leaves the sign, as one by all but the last does. JAX counts a negative one so, too.
    steps = np.where((steps < 0) | (steps > most), most, steps).astype(steps.dtype)
    # The dtype does not hold 2**most, so the longest shift takes two divisions.
    for part in (np.minimum(steps, most - 1), np.maximum(steps - (most - 1), 0)):
        if np.any(part):
            power = values.make_known(np.left_shift(np.ones_like(part), part))
            rest = apply_operator(graph, "Mod", [x, power])
            x = apply_operator(graph, "Div", [apply_operator(graph, "Sub", [x, rest]), power])
    return x
