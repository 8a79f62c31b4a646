"""ONNX Runtime's QLinearAveragePool, QLinearGlobalAveragePool and QLinearReduceMean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, recording, sharding
from .._core.entry_point import compile_entry_point
from .._core.granularity import PerTensor
from .._kernels import accumulator, affine, barriers
from .._kernels.affine import dequantize_affine
from .encodings import Encoding, check_eight_bits, convert_numbers, infer_one, read_encoding

# ONNX's attributes of a pooling, and the windows that follow from them and the shape of x.


_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class PoolAttributes(NamedTuple):
    """The attributes under ONNX's names, as the caller passed them."""

    auto_pad: Any
    ceil_mode: Any
    channels_last: Any
    count_include_pad: Any
    kernel_shape: Any
    pads: Any
    strides: Any


class PoolGeometry(NamedTuple):
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


def check_pool_attributes(function: str, **attributes: object) -> PoolAttributes:
    """Check that the attributes are hashable and their numbers integers, and return them as one static argument."""
    # Check before jit: its cache of compiled programs cannot tell True, 1 and 1.0 apart.
    checked = {}
    for name, value in attributes.items():
        if name in ("ceil_mode", "channels_last", "count_include_pad"):
            checks.check_flag(function, name, value)
            value = bool(value)
        elif name != "auto_pad":
            value = checks.check_integers(function, name, value)
        checks.check_hashable(function, name, value)
        checked[name] = value
    return PoolAttributes(**checked)


def derive_windows(function: str, spatial: tuple[int, ...], attributes: PoolAttributes) -> PoolGeometry:
    """Check the attributes against the spatial shape of x, and return the windows."""
    rank = len(spatial)
    kernel = _check_lengths(function, "kernel_shape", attributes.kernel_shape, rank)
    strides = (1,) * rank if attributes.strides is None else attributes.strides
    strides = _check_lengths(function, "strides", strides, rank)
    pads = _read_pads(function, spatial, kernel, strides, attributes)
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
    return PoolGeometry(kernel, strides, tuple(padding), tuple(positions), is_global, counts)


def _check_lengths(function: str, argument: str, value: Any, rank: int) -> tuple[int, ...]:
    """Return positive ints, one for each spatial dimension."""
    holds = isinstance(value, tuple) and len(value) == rank and all(isinstance(v, int | np.integer) for v in value)
    holds = holds and all(v > 0 for v in value)
    checks.require(holds, function, argument, f"{rank} positive ints, one for each spatial dimension", value)
    return tuple(int(v) for v in value)


def _read_pads(
    function: str,
    spatial: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    attributes: PoolAttributes,
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


# ONNX Runtime's QLinearAveragePool.


_QLINEAR_AVERAGE_POOL = "ops.qlinear_average_pool"
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
    x, without padding, ONNX Runtime uses another formula, as in `qlinear_global_average_pool`, and so does this
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
        _QLINEAR_AVERAGE_POOL, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    attributes = check_pool_attributes(
        _QLINEAR_AVERAGE_POOL, auto_pad=auto_pad, ceil_mode=ceil_mode, channels_last=channels_last,
        count_include_pad=count_include_pad, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _qlinear_average_pool(x, x_scale, x_zero_point, y_scale, y_zero_point, attributes=attributes)


def _infer_pooled(x: jax.Array, attributes: PoolAttributes, **arguments: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of a recorded result, after the checks of the arguments."""
    _, dtype = infer_one(_QLINEAR_AVERAGE_POOL, x, **arguments)
    _check_image(x)
    first = 1 if attributes.channels_last else 2
    axes = range(first, first + x.ndim - 2)
    positions = iter(derive_windows(_QLINEAR_AVERAGE_POOL, tuple(x.shape[axis] for axis in axes), attributes).positions)
    return tuple(next(positions) if axis in axes else n for axis, n in enumerate(x.shape)), dtype


def _check_image(x: jax.Array) -> None:
    expected = "an array (N, C, *spatial) or, with channels_last, (N, *spatial, C)"
    checks.require(x.ndim >= 3, _QLINEAR_AVERAGE_POOL, "x", expected, f"shape {x.shape}")


@compile_entry_point(_QLINEAR_AVERAGE_POOL)
@recording.mark("qlinear_average_pool", _infer_pooled)
def _qlinear_average_pool(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, attributes: PoolAttributes,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_AVERAGE_POOL, "x", x)
    x_encoding = read_encoding(_QLINEAR_AVERAGE_POOL, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_QLINEAR_AVERAGE_POOL, "y", y_scale, y_zero_point, dtype)
    _check_image(x)
    first = 1 if attributes.channels_last else 2
    axes = tuple(range(first, first + x.ndim - 2))
    windows = derive_windows(_QLINEAR_AVERAGE_POOL, tuple(x.shape[axis] for axis in axes), attributes)
    # ONNX Runtime uses its kernel of QLinearGlobalAveragePool here, which adds integers.
    if windows.is_global:
        return average_codes(x, x_encoding, y_encoding, axes, keepdims=True)
    total = _sum_windows(x, x_encoding, windows, axes)
    counts = sharding.place_like(lax.broadcast_in_dim(jnp.asarray(windows.counts), total.shape, axes), total)
    mean = affine.divide(total, counts)
    return _encode_mean(mean, y_encoding)


def _encode_mean(mean: jax.Array, encoding: Encoding) -> jax.Array:
    """Return saturate(round_half_even(mean / scale + zero point))."""
    quotient = affine.divide(mean, sharding.place_like(jnp.broadcast_to(encoding.scale, mean.shape), mean))
    # Unlike in QuantizeLinear, the sum with the zero point is rounded, and ties are decided by its parity.
    value = barriers.round_result(quotient + encoding.center.astype(jnp.float32))
    return affine.encode_steps(value, None, encoding.dtype)


def _sum_windows(x: jax.Array, encoding: Encoding, windows: PoolGeometry, axes: tuple[int, ...]) -> jax.Array:
    """Return the float32 sums of the windows of the values of x, adding one element after the other."""
    values = dequantize_affine(x, encoding.scale, encoding.center, PerTensor(), dtypes.FLOAT32)
    # ONNX Runtime leaves out the padding. Adding 0 to a sum that begins with 0 does not change it.
    padding = dict(zip(axes, windows.padding, strict=True))
    config = [(*padding.get(axis, (0, 0)), 0) for axis in range(x.ndim)]
    values = lax.pad(values, np.float32(0), config)
    spans = [(n - 1) * s + 1 for n, s in zip(windows.positions, windows.strides, strict=True)]
    strides = dict(zip(axes, windows.strides, strict=True))

    def take_element(offsets: Sequence[jax.Array | int]) -> jax.Array:
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
        return _add_in_order([take_element(offsets) for offsets in itertools.product(*map(range, windows.kernel))])

    def add_element(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + take_element(jnp.unravel_index(i, windows.kernel))

    return lax.fori_loop(1, int(np.prod(windows.kernel)), add_element, take_element((0,) * len(axes)))


def _add_in_order(parts: list[jax.Array]) -> jax.Array:
    """Return the sum of arrays from the first to the last, rounded after each addition."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# ONNX Runtime's QLinearGlobalAveragePool.


_QLINEAR_GLOBAL_AVERAGE_POOL = "ops.qlinear_global_average_pool"
# How many slices are added element by element before the reduction.
_SLICES = 16
_FEWEST_SLICED = 2**12


def qlinear_global_average_pool(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    channels_last: bool = False,
) -> jax.Array:
    """Average the codes of each channel, as ONNX Runtime's QLinearGlobalAveragePool does.

    y = saturate(round_half_even(float32(sum(x - x_zero_point)) * (x_scale / (y_scale * count))) + y_zero_point),
    where count is the number of spatial positions.

    The sum is exact in int32. The integers equal ONNX Runtime's on x86-64, where its kernel refuses 2**24 positions
    or more, and a factor that is not in [2**-32, 2**8).

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        channels_last: Static. Whether the shapes are (N, *spatial, C).

    Returns:
        The codes, (N, C, 1, ...) or (N, 1, ..., C), in x's dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[1, 2], [3, 2], [255, 255]]], jnp.uint8)
        >>> jq.ops.qlinear_global_average_pool(x, 1.0, 0, 1.0, 1)  # 1.5, 2.5 and 255: ties go to even, then 1 is added
        Array([[[  3],
                [  3],
                [255]]], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearGlobalAveragePool-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _QLINEAR_GLOBAL_AVERAGE_POOL,
        x,
        x_scale=x_scale,
        x_zero_point=x_zero_point,
        y_scale=y_scale,
        y_zero_point=y_zero_point,
    )
    checks.check_flag(_QLINEAR_GLOBAL_AVERAGE_POOL, "channels_last", channels_last)
    return _qlinear_global_average_pool(
        x, x_scale, x_zero_point, y_scale, y_zero_point, channels_last=bool(channels_last)
    )


def _infer_global(x: jax.Array, channels_last: bool, **arguments: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of a recorded result, after the checks of the arguments."""
    _, dtype = infer_one(_QLINEAR_GLOBAL_AVERAGE_POOL, x, **arguments)
    _check_rank(x)
    kept = (0, x.ndim - 1) if channels_last else (0, 1)
    return tuple(n if axis in kept else 1 for axis, n in enumerate(x.shape)), dtype


def _check_rank(x: jax.Array) -> None:
    checks.require(x.ndim >= 3, _QLINEAR_GLOBAL_AVERAGE_POOL, "x", "an array of rank 3 or more", f"shape {x.shape}")


@compile_entry_point(_QLINEAR_GLOBAL_AVERAGE_POOL)
@recording.mark("qlinear_global_average_pool", _infer_global)
def _qlinear_global_average_pool(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, channels_last: bool,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_GLOBAL_AVERAGE_POOL, "x", x)
    x_encoding = read_encoding(_QLINEAR_GLOBAL_AVERAGE_POOL, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_QLINEAR_GLOBAL_AVERAGE_POOL, "y", y_scale, y_zero_point, dtype)
    _check_rank(x)
    first = 1 if channels_last else 2
    return average_codes(x, x_encoding, y_encoding, tuple(range(first, first + x.ndim - 2)), keepdims=True)


def average_codes(
    x: jax.Array, x_encoding: Encoding, y_encoding: Encoding, axes: tuple[int, ...], *, keepdims: bool
) -> jax.Array:
    """Return the codes of the means of x along `axes`, from sums that are exact in int32.

    y = saturate(round_half_even(float32(sum(x) - count * zero point of x) * scale) + zero point of y),
    where scale = scale of x / (scale of y * count)
    """
    count = math.prod(x.shape[axis] for axis in axes)
    acc = _sum_codes(x, axes, keepdims=keepdims) - x_encoding.center * np.int32(count)
    # Rounded before the division, as in ONNX Runtime: x_scale / y_scale / count is another float32.
    divisor = barriers.round_result(y_encoding.scale * np.float32(count))
    scale = jnp.broadcast_to(affine.divide(x_encoding.scale, divisor), acc.shape)
    center = jnp.broadcast_to(y_encoding.center, acc.shape)
    return accumulator.requantize_accumulator(acc, scale, center, y_encoding.dtype)


def _sum_codes(x: jax.Array, axes: tuple[int, ...], *, keepdims: bool) -> jax.Array:
    """Return the int32 sums of codes along `axes`.

    XLA:CPU writes the operand of a large reduction to memory as int32, on one thread. A sum of slices reads bytes, on
    all threads, and leaves less to reduce.
    """
    # The size is no int if a dimension is symbolic, as in `jax.export`.
    if not axes or not isinstance(x.size, int) or x.size < _FEWEST_SLICED:
        return jnp.sum(x, axes, dtype=jnp.int32, keepdims=keepdims)
    shape = jax.eval_shape(lambda: jnp.sum(x, axes, keepdims=keepdims)).shape
    first, last = min(axes), max(axes)
    if len(axes) == last - first + 1:
        # Adjacent dimensions, such as the spatial ones, are one dimension that has more to slice.
        x, axes = x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :]), (first,)
    axis = max(axes, key=lambda i: x.shape[i])
    width = x.shape[axis] // _SLICES
    if width == 0:
        return jnp.sum(x, axes, dtype=jnp.int32).reshape(shape)
    total, rest = (
        lax.slice_in_dim(x, start, end, axis=axis).astype(jnp.int32)
        for start, end in ((0, width), (width * _SLICES, x.shape[axis]))
    )
    for i in range(1, _SLICES):
        total = total + lax.slice_in_dim(x, i * width, (i + 1) * width, axis=axis).astype(jnp.int32)
    return (jnp.sum(total, axes) + jnp.sum(rest, axes)).reshape(shape)


# ONNX Runtime's QLinearReduceMean.


_QLINEAR_REDUCE_MEAN = "ops.qlinear_reduce_mean"


def qlinear_reduce_mean(
    data: ArrayLike,
    data_scale: ArrayLike,
    data_zero_point: ArrayLike | None,
    reduced_scale: ArrayLike,
    reduced_zero_point: ArrayLike | None = None,
    *,
    axes: Sequence[int] | None = None,
    keepdims: bool = True,
) -> jax.Array:
    """Average codes along dimensions, with the inputs of ONNX Runtime's QLinearReduceMean.

    reduced = saturate(round_half_even(float32(sum(data - data_zero_point)) * (data_scale / (reduced_scale * count)))
    + reduced_zero_point), where count is the number of elements of a mean.

    ONNX Runtime defines this operator but has no kernel for CPUs. The formula is `qlinear_global_average_pool`'s,
    which gives the same integers for the spatial dimensions.

    Args:
        data: codes, int8 or uint8, of any shape.
        data_scale: value per step of data, float32, a scalar. A Python number becomes float32.
        data_zero_point: the code of 0.0, a scalar in data's dtype. None means 0. An int becomes a scalar in data's
            dtype.
        reduced_scale: value per step of the result, float32, a scalar. A Python number becomes float32.
        reduced_zero_point: the code of 0.0, a scalar in data's dtype. None means 0. An int becomes a scalar in data's
            dtype.
        axes: Static. The dimensions to average over; negative ones count from the back. None means all.
        keepdims: Static. Whether the result keeps these dimensions, with length 1.

    Returns:
        The codes of the means, in data's dtype. A mean of no elements has the lowest code.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes or axes do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> data = jnp.array([[1, 2], [3, 2], [255, 255]], jnp.uint8)
        >>> jq.ops.qlinear_reduce_mean(data, 1.0, 0, 1.0, 1, axes=[1], keepdims=False)  # 1.5, 2.5 and 255
        Array([  3,   3, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearReduceMean-1, a definition without a kernel for CPUs.
    """
    data_scale, data_zero_point, reduced_scale, reduced_zero_point = convert_numbers(
        _QLINEAR_REDUCE_MEAN, data, data_scale=data_scale, data_zero_point=data_zero_point, reduced_scale=reduced_scale,
        reduced_zero_point=reduced_zero_point,
    )  # fmt: skip
    checks.check_flag(_QLINEAR_REDUCE_MEAN, "keepdims", keepdims)
    # Check before jit: its cache of compiled programs cannot tell True, 1 and 1.0 apart.
    axes = checks.check_integers(_QLINEAR_REDUCE_MEAN, "axes", axes)
    return _qlinear_reduce_mean(
        data, data_scale, data_zero_point, reduced_scale, reduced_zero_point, axes=axes, keepdims=bool(keepdims)
    )


@compile_entry_point(_QLINEAR_REDUCE_MEAN)
def _qlinear_reduce_mean(
    data: jax.Array, data_scale: jax.Array, data_zero_point: jax.Array | None, reduced_scale: jax.Array,
    reduced_zero_point: jax.Array | None, *, axes: tuple[int, ...] | None, keepdims: bool,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_QLINEAR_REDUCE_MEAN, "data", data)
    data_encoding = read_encoding(_QLINEAR_REDUCE_MEAN, "data", data_scale, data_zero_point, dtype)
    reduced_encoding = read_encoding(_QLINEAR_REDUCE_MEAN, "reduced", reduced_scale, reduced_zero_point, dtype)
    return average_codes(data, data_encoding, reduced_encoding, _read_axes(axes, data.ndim), keepdims=keepdims)


def _read_axes(axes: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return the axes as non-negative ints; raise for one that is out of range or given twice."""
    if axes is None:
        return tuple(range(rank))
    checks.require_type(
        isinstance(axes, tuple), _QLINEAR_REDUCE_MEAN, "axes", "a sequence of ints", checks.describe_value(axes)
    )
    result = tuple(checks.check_axis(_QLINEAR_REDUCE_MEAN, axis, rank, "axes") for axis in axes)
    checks.require(len(set(result)) == len(result), _QLINEAR_REDUCE_MEAN, "axes", "different axes", axes)
    return result
