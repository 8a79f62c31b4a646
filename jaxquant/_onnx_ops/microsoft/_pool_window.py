"""ONNX's attributes of a pooling, and the windows that follow from them and the shape of x."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..._core import checks

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class Attributes(NamedTuple):
    """The attributes under ONNX's names, as the caller passed them."""

    auto_pad: Any
    ceil_mode: Any
    channels_last: Any
    count_include_pad: Any
    kernel_shape: Any
    pads: Any
    strides: Any


class Windows(NamedTuple):
    """The windows of a pooling.

    Attributes:
        kernel: the lengths of a window.
        strides: the distances between windows.
        padding: (low, high) for each spatial dimension, so that all windows lie in the padded array.
        positions: the numbers of windows.
        is_global: whether the only window is all of x, without padding.
        counts: how many elements each window has, float32, of the shape `positions`.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    is_global: bool
    counts: np.ndarray


def check_pool_attributes(function: str, **attributes: Any) -> Attributes:
    """Check that the attributes are hashable and their numbers integers, and return them as one static argument."""
    # Check before jit, whose cache of compiled programs cannot tell True, 1 and 1.0 apart.
    checked = {}
    for name, value in attributes.items():
        if name in ("ceil_mode", "channels_last", "count_include_pad"):
            checks.check_flag(function, name, value)
            value = bool(value)
        elif name != "auto_pad":
            value = checks.check_integers(function, name, value)
        checks.check_hashable(function, name, value)
        checked[name] = value
    return Attributes(**checked)


def find_windows(function: str, spatial: tuple[int, ...], attributes: Attributes) -> Windows:
    """Check the attributes against the spatial shape of x, and return the windows."""
    rank = len(spatial)
    kernel = _check_lengths(function, "kernel_shape", attributes.kernel_shape, rank)
    strides = (1,) * rank if attributes.strides is None else attributes.strides
    strides = _check_lengths(function, "strides", strides, rank)
    pads = _find_pads(function, spatial, kernel, strides, attributes)
    padding, positions, counts = [], [], np.ones((), np.float32)
    for size, length, stride, (low, high) in zip(spatial, kernel, strides, pads, strict=True):
        reach = size + low + high - length
        expected = f"windows no longer than x with its padding, {size + low + high}"
        checks.require(reach >= 0, function, "kernel_shape", expected, kernel)
        number = (-(-reach // stride) if attributes.ceil_mode else reach // stride) + 1
        # A window that ceil_mode adds must not begin in the padding at the end.
        if attributes.ceil_mode and (number - 1) * stride >= size + low:
            number -= 1
        starts = np.arange(number) * stride - low
        ends = np.minimum(starts + length, size)
        valid = length if attributes.count_include_pad else ends - np.maximum(starts, 0)
        counts = counts[..., None] * np.broadcast_to(np.asarray(valid, np.float32), (number,))
        positions.append(number)
        # The end is what the windows read: ceil_mode can exceed the padding that was asked for, strides can fall short.
        padding.append((low, max((number - 1) * stride + length - size - low, 0)))
    is_global = kernel == spatial and not any(low or high for low, high in pads)
    return Windows(kernel, strides, tuple(padding), tuple(positions), is_global, counts)


def _check_lengths(function: str, argument: str, value: Any, rank: int) -> tuple[int, ...]:
    """Return positive ints, one for each spatial dimension."""
    holds = isinstance(value, tuple) and len(value) == rank and all(isinstance(v, int | np.integer) for v in value)
    holds = holds and all(v > 0 for v in value)
    checks.require(holds, function, argument, f"{rank} positive ints, one for each spatial dimension", value)
    return tuple(int(v) for v in value)


def _find_pads(
    function: str, spatial: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], attributes: Attributes
) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial dimension, after checking auto_pad and pads."""
    rank = len(spatial)
    checks.check_option(function, "auto_pad", attributes.auto_pad, _AUTO_PADS)
    # ONNX lists the beginnings of all dimensions before their ends.
    pads = (0,) * (2 * rank) if attributes.pads is None else attributes.pads
    holds = isinstance(pads, tuple) and len(pads) == 2 * rank and all(isinstance(p, int | np.integer) for p in pads)
    # ONNX Runtime refuses longer padding: a window could then have no element of x.
    holds = holds and all(0 <= pad < length for pad, length in zip(pads, kernel * 2, strict=True))
    expected = f"{2 * rank} ints from 0 to less than kernel_shape, for the beginnings of the dimensions, then the ends"
    checks.require(holds, function, "pads", expected, pads)
    if attributes.auto_pad == "NOTSET":
        return [(int(pads[i]), int(pads[rank + i])) for i in range(rank)]
    expected = f"None or zeros together with auto_pad={attributes.auto_pad!r}"
    checks.require(not any(pads), function, "pads", expected, attributes.pads)
    if attributes.auto_pad == "VALID":
        return [(0, 0)] * rank
    result = []
    for size, length, stride in zip(spatial, kernel, strides, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + length - size, 0)
        halves = (total // 2, total - total // 2)  # an odd element goes to the end, or to the beginning for SAME_LOWER
        result.append(halves if attributes.auto_pad == "SAME_UPPER" else halves[::-1])
    return result
