"""The windows of convolutions and pools: padding, positions and counts from ONNX's attributes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...limits import ModelError
from ..interpret import Call

# Of a kernel, where each element becomes an operation.
_MOST_ELEMENTS = 4096


class Windows(NamedTuple):
    """The windows over the spatial dimensions of an array.

    Attributes:
        kernel: the length of a window in each dimension.
        strides: the distances between windows.
        dilations: the distances between the elements of a window.
        padding: the elements before and after each dimension, as the model says.
        positions: the number of windows in each dimension.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]

    def compute_reach(self) -> tuple[int, ...]:
        """Return how many elements a window spans."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def compute_full_padding(self, lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return the padding with what the last windows need beyond it."""
        full = []
        parts = zip(lengths, self.positions, self.strides, self.compute_reach(), self.padding, strict=True)
        for length, count, stride, reach, (low, high) in parts:
            full.append((low, max(high, (count - 1) * stride + reach - length - low)))
        return tuple(full)


def read_windows(call: Call, lengths: tuple[int, ...], kernel: tuple[int, ...] | None = None) -> Windows:
    """Return the windows that a node's attributes describe."""
    rank = len(lengths)
    kernel = tuple(call.get("kernel_shape")) if kernel is None else kernel
    strides, dilations = (tuple(call.get(name) or (1,) * rank) for name in ("strides", "dilations"))
    pads = tuple(call.get("pads") or (0,) * (2 * rank))
    auto_pad = call.get("auto_pad", "NOTSET")
    if not (len(kernel) == len(strides) == len(dilations) == rank and len(pads) == 2 * rank):
        raise ValueError(f"expected kernel_shape, strides, dilations and pads for {rank} spatial dimensions")
    padding, positions = [], []
    for i, (length, k, stride, dilation) in enumerate(zip(lengths, kernel, strides, dilations, strict=True)):
        reach = (k - 1) * dilation + 1
        if auto_pad.startswith("SAME"):
            count = -(-length // stride)
            total = max((count - 1) * stride + reach - length, 0)
            low = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            high = total - low
        else:
            low, high = (pads[i], pads[rank + i]) if auto_pad == "NOTSET" else (0, 0)
            free = length + low + high - reach
            count = (-(-free // stride) if call.get("ceil_mode", 0) else free // stride) + 1
            # A last window has to begin in the array or in the padding before it.
            if call.get("ceil_mode", 0) and (count - 1) * stride >= length + low:
                count -= 1
        padding.append((low, high))
        positions.append(max(count, 0))
    return Windows(kernel, strides, dilations, tuple(padding), tuple(positions))


def reduce_windows(x: Any, windows: Windows, initial: Any, combine: Any) -> Any:
    """Return the reduction of each window over the dimensions of x from 2 on."""
    ones = (1, 1)
    padding = windows.compute_full_padding(x.shape[2:])
    y = lax.reduce_window(
        x, initial, combine, (*ones, *windows.kernel), (*ones, *windows.strides), ((0, 0), (0, 0), *padding),
        window_dilation=(*ones, *windows.dilations),
    )  # fmt: skip
    # A long padding at the end may hold more windows than the operator has.
    return y[(slice(None), slice(None), *(slice(n) for n in windows.positions))]


def reduce_slices(
    call: Call, images: jax.Array, windows: Windows, initial: np.ndarray, combine: Callable[[Any, Any], jax.Array]
) -> jax.Array:
    """Return the reduction of each window of images with the channels last, one spatial dimension after the other.

    XLA:CPU reduces each window element by element. Slices of the images are combined in vectors along the channels, and
    a window of 5 by 5 elements takes 10 of them.
    """
    padding = windows.compute_full_padding(images.shape[1:-1])
    lengths = (n + sum(pair) for n, pair in zip(images.shape[1:-1], padding, strict=True))
    call.reserve([images.shape[0], *lengths, images.shape[-1]], images.dtype)
    y = jnp.pad(images, ((0, 0), *padding, (0, 0)), constant_values=initial)
    parts = zip(windows.kernel, windows.strides, windows.dilations, windows.positions, strict=True)
    for axis, (length, stride, dilation, count) in enumerate(parts, 1):
        starts = (step * dilation for step in range(length))
        ends = (count - 1) * stride + 1
        slices = [lax.slice_in_dim(y, start, start + ends, stride, axis) for start in starts]
        y = functools.reduce(combine, slices)
    return y


def list_window_elements(call: Call, x: Any, windows: Windows, filler: Any) -> list[Any]:
    """Return for each element of the kernel an array with its value in each window, in the order of the kernel."""
    padding = windows.compute_full_padding(x.shape[2:])
    call.reserve([*x.shape[:2], *(n + sum(pair) for n, pair in zip(x.shape[2:], padding, strict=True))], x.dtype)
    check_kernel(windows.kernel)
    padded = jnp.pad(x, ((0, 0), (0, 0), *padding), constant_values=filler)
    parts = []
    for offset in itertools.product(*(range(k) for k in windows.kernel)):
        cuts = []
        for i, step in enumerate(offset):
            start, stride = step * windows.dilations[i], windows.strides[i]
            cuts.append(slice(start, start + (windows.positions[i] - 1) * stride + 1, stride))
        parts.append(padded[(slice(None), slice(None), *cuts)])
    return parts


def check_kernel(kernel: tuple[int, ...]) -> None:
    """Raise if a kernel has too many elements for a program with an operation for each of them."""
    if math.prod(kernel) > _MOST_ELEMENTS:
        raise ModelError(f"expected a kernel of at most {_MOST_ELEMENTS} elements, got {kernel}")


def count_elements(call: Call, windows: Windows, lengths: tuple[int, ...], include_pad: bool) -> np.ndarray:
    """Return the number of elements in each window, with or without the padding."""
    total = np.ones((), np.float32)
    for i, length in enumerate(lengths):
        low, high = windows.padding[i]
        call.reserve([windows.positions[i], windows.kernel[i]], np.int64)
        starts = np.arange(windows.positions[i]) * windows.strides[i] - low
        places = starts[:, None] + np.arange(windows.kernel[i]) * windows.dilations[i]
        first, last = (-low, length + high) if include_pad else (0, length)
        counts = ((places >= first) & (places < last)).sum(axis=1)
        total = total[..., None] * counts.astype(np.float32)
    return total
