"""ONNX Runtime's QLinearAveragePool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core import barriers, checks, division, dtypes, recording, rounding, sharding
from ..._core.affine import dequantize_affine
from ..._core.entry_point import compile_entry_point
from ..._core.granularity import PerTensor
from ._arguments import Encoding, check_eight_bits, convert_numbers, read_encoding
from ._pool_window import Attributes, Windows, check_pool_attributes, find_windows
from .qlinear_global_average_pool import average_codes

_NAME = "ops.qlinear_average_pool"
# Up to this many elements of a window, the sum is written out; a longer one is a loop, which compiles in less time.
_MOST_UNROLLED = 64


def qlinear_average_pool(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: bool = False,
    channels_last: bool = False,
    count_include_pad: bool = False,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> jax.Array:
    """Average windows of codes, as ONNX Runtime's QLinearAveragePool does.

    y = saturate(round_half_even(sum of the window of ((x - x_zero_point) * x_scale) / count / y_scale + y_zero_point)).

    The integers are ONNX Runtime's: every operation is rounded to float32, the elements of a window are added one by
    one in their order in memory, and the zero point is added before the rounding to an integer. If one window is all of
    x, without padding, ONNX Runtime uses another formula, that of `qlinear_global_average_pool`, and so does this
    function.

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        kernel_shape: Static. The lengths of a window, one for each spatial dimension.
        auto_pad: Static. "NOTSET" pads by `pads`. "SAME_UPPER" and "SAME_LOWER" pad so that the output has ceil(size /
            stride) positions; if the padding is odd, the extra element is at the end or at the beginning, respectively.
            "VALID" does not pad.
        ceil_mode: Static. Whether a last window that only begins in x or in the padding before it counts, too.
        channels_last: Static. Whether the shapes are (N, *spatial, C).
        count_include_pad: Static. Whether count is the size of the window, padding included, and not the number of its
            elements in x.
        pads: Static. How many elements are added at the beginning of each spatial dimension, then how many at the end
            of each; None means 0.
        strides: Static. The distances between windows, one for each spatial dimension; None means 1.

    Returns:
        The codes, (N, C, *positions) or (N, *positions, C), in x's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support, or an attribute has a wrong type.
        ValueError: the shapes of the arguments and the attributes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[0, 1, 2, 3, 255, 255]]], jnp.uint8)
        >>> jq.ops.qlinear_average_pool(x, 1.0, 0, 1.0, 1, kernel_shape=[2], strides=[2])  # 0.5, 2.5, 255, then 1 more
        Array([[[  2,   4, 255]]], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearAveragePool-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _NAME, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    attributes = check_pool_attributes(
        _NAME, auto_pad=auto_pad, ceil_mode=ceil_mode, channels_last=channels_last,
        count_include_pad=count_include_pad, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _qlinear_average_pool(x, x_scale, x_zero_point, y_scale, y_zero_point, attributes=attributes)


def _find_pooled_shape(x: jax.Array, attributes: Attributes, **_: Any) -> tuple[tuple[int, ...], Any]:
    first = 1 if attributes.channels_last else 2
    axes = range(first, first + x.ndim - 2)
    positions = iter(find_windows(_NAME, tuple(x.shape[axis] for axis in axes), attributes).positions)
    return tuple(next(positions) if axis in axes else n for axis, n in enumerate(x.shape)), x.dtype


@compile_entry_point(_NAME)
@recording.mark("qlinear_average_pool", _find_pooled_shape)
def _qlinear_average_pool(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, attributes: Attributes,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_NAME, "x", x)
    x_encoding = read_encoding(_NAME, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)
    expected = "an array (N, C, *spatial) or, with channels_last, (N, *spatial, C)"
    checks.require(x.ndim >= 3, _NAME, "x", expected, f"shape {x.shape}")
    first = 1 if attributes.channels_last else 2
    axes = tuple(range(first, first + x.ndim - 2))
    windows = find_windows(_NAME, tuple(x.shape[axis] for axis in axes), attributes)
    # ONNX Runtime uses its kernel of QLinearGlobalAveragePool here, whose sums are integers.
    if windows.is_global:
        return average_codes(x, x_encoding, y_encoding, axes, keepdims=True)
    total = _sum_windows(x, x_encoding, windows, axes)
    counts = sharding.place_like(lax.broadcast_in_dim(jnp.asarray(windows.counts), total.shape, axes), total)
    mean = division.divide(total, counts)
    return _encode_mean(mean, y_encoding)


def _encode_mean(mean: jax.Array, encoding: Encoding) -> jax.Array:
    """Return saturate(round_half_even(mean / scale + zero point))."""
    quotient = division.divide(mean, sharding.place_like(jnp.broadcast_to(encoding.scale, mean.shape), mean))
    # Unlike in QuantizeLinear, the sum with the zero point is rounded, and ties are decided by its parity.
    value = barriers.round_result(quotient + encoding.steps.astype(jnp.float32))
    return rounding.encode_steps(value, None, encoding.dtype)


def _sum_windows(x: jax.Array, encoding: Encoding, windows: Windows, axes: tuple[int, ...]) -> jax.Array:
    """Return the float32 sums of the windows of the values of x, whose elements are added one by one."""
    values = dequantize_affine(x, encoding.scale, encoding.steps, PerTensor(), dtypes.FLOAT32)
    # ONNX Runtime leaves out the padding. Adding 0 to a sum that begins with 0 does not change it.
    padding = dict(zip(axes, windows.padding, strict=True))
    config = [(*padding.get(axis, (0, 0)), 0) for axis in range(x.ndim)]
    values = lax.pad(values, np.float32(0), config)
    spans = [(n - 1) * s + 1 for n, s in zip(windows.positions, windows.strides, strict=True)]
    strides = dict(zip(axes, windows.strides, strict=True))

    def find_element(offsets: Sequence[jax.Array | int]) -> jax.Array:
        """Return one element of each window."""
        part = values
        for axis, offset, span in zip(axes, offsets, spans, strict=True):
            if isinstance(offset, int):
                part = lax.slice_in_dim(part, offset, offset + span, strides[axis], axis)
            else:
                part = lax.dynamic_slice_in_dim(part, offset, span, axis)
                part = lax.slice_in_dim(part, 0, span, strides[axis], axis)
        return part

    if windows.counts.size == 0 or np.prod(windows.kernel) <= _MOST_UNROLLED:
        return _add_in_order([find_element(place) for place in itertools.product(*map(range, windows.kernel))])

    def add_element(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + find_element(jnp.unravel_index(i, windows.kernel))

    return lax.fori_loop(1, int(np.prod(windows.kernel)), add_element, find_element((0,) * len(axes)))


def _add_in_order(parts: list[jax.Array]) -> jax.Array:
    """Return the sum of arrays from the first to the last, rounded after each addition."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
