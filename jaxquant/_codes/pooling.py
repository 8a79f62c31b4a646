"""Maxima and means of quantized arrays: codes in, codes out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._contractions.output import Affine, make_array, read_affine, read_output
from .._core import checks, dtypes, recording
from .._onnx_ops.pooling import qlinear_average_pool, qlinear_reduce_mean
from .fake_codes import Codes, FakeQuantizedArray, Output, train_codes


class CodeWindows(NamedTuple):
    """The windows of a pooling: lengths, strides and (low, high) paddings of the spatial dimensions, and their axes."""

    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    axes: tuple[int, ...]


def max_pool(
    q: Codes,
    *,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    channels_last: bool = True,
) -> Any:
    """Return the maximum of each window, as a code of q.

    Args:
        q: integer codes with one scale, which may be negative, and one zero point, (N, *spatial, C).
        window_shape: Static. The lengths of a window, one for each spatial dimension.
        strides: Static. The distances between windows; None means 1, as in flax.
        padding: Static. "SAME", "VALID", or (low, high) for each spatial dimension, less than the length of a window.
            The padding is never the maximum.
        channels_last: Static. False for the shapes (N, C, *spatial).

    Returns:
        A QuantizedArray with the scale and the zero point of q.

    Raises:
        TypeError: q is not a QuantizedArray of int8 or uint8, or an argument has a wrong type.
        ValueError: q has several scales, or the windows do not fit it.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([[[-1.0], [0.5], [1.55]]]), jq.QuantSpec(jnp.uint8))
        >>> jq.codes.max_pool(q, window_shape=(2,)).codes.tolist()
        [[[150], [255]]]

    Source: `flax.linen.max_pool`.
    """
    if isinstance(q, FakeQuantizedArray):
        windows = _read_windows("codes.max_pool", q, window_shape, strides, padding, channels_last)
        return q.replace_values(compute_maxima(q.values, windows=windows))
    q = quantized_array.check_lazy("codes.max_pool", "q", q, supports=("signed_scale",))
    affine = read_affine("codes.max_pool", "q", q)
    windows = _read_windows("codes.max_pool", q, window_shape, strides, padding, channels_last)
    if q.signed_scale:
        # Codes with all bits flipped have the reverse order, signed or not.
        flips = jnp.where(affine.scale < 0, jnp.array(-1).astype(affine.dtype), jnp.zeros((), affine.dtype))
        codes = compute_maxima(q.codes ^ flips, windows=windows) ^ flips
        return make_array(codes, affine, q.dtype).replace(signed_scale=True)
    return make_array(compute_maxima(q.codes, windows=windows), affine, q.dtype)


def average_pool(
    q: Codes,
    *,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    channels_last: bool = True,
    output: Output,
) -> Any:
    """Return the mean of each window, as ONNX Runtime's QLinearAveragePool does.

    The codes are what `qlinear_average_pool` returns.

    Args:
        q: codes of int8 or uint8 with one scale and one zero point, (N, *spatial, C).
        window_shape: Static. The lengths of a window, one for each spatial dimension.
        strides: Static. The distances between windows; None means 1, as in flax.
        padding: Static. "SAME", "VALID", or (low, high) for each spatial dimension, less than the length of a window.
        count_include_pad: Static. Whether zeros of the padding count as elements of a window, as in flax.
        channels_last: Static. False for the shapes (N, C, *spatial).
        output: how the result is quantized: a `Quantizer` with a scale and the dtype of q; or a QuantizedArray, for
            its scale and zero point.

    Returns:
        A QuantizedArray with the scale and the zero point of `output`.

    Raises:
        TypeError: q is not a QuantizedArray of int8 or uint8, or an argument has a wrong type.
        ValueError: q has several scales, the windows do not fit it, or `output` has no scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([[[-1.0], [0.5], [1.55]]]), jq.QuantSpec(jnp.uint8))  # scale 0.01
        >>> jq.codes.average_pool(q, window_shape=(2,), output=q).codes.tolist()
        [[[75], [202]]]

    Source: ONNX Runtime's com.microsoft QLinearAveragePool-1; `flax.linen.avg_pool`.
    """
    windows = functools.partial(
        _read_windows, "codes.average_pool", window_shape=window_shape, strides=strides, padding=padding,
        channels_last=channels_last,
    )  # fmt: skip
    checks.check_flag("codes.average_pool", "count_include_pad", count_include_pad)
    if isinstance(q, FakeQuantizedArray):
        compute = functools.partial(
            average_pool, window_shape=window_shape, strides=strides, padding=padding,
            count_include_pad=count_include_pad, channels_last=channels_last,
        )  # fmt: skip
        differentiate = functools.partial(_average_floats, windows=windows(q), counts_padding=count_include_pad)
        return train_codes(lambda q, y: compute(q, output=y), differentiate, (q,), output)
    q, affine, result = read_operand("codes.average_pool", q, output)
    windows = windows(q)
    lows, highs = zip(*windows.padding, strict=True)
    codes = qlinear_average_pool(
        q.codes, affine.scale, affine.zero_point, result.scale, result.zero_point, kernel_shape=windows.lengths,
        strides=windows.strides, pads=(*lows, *highs), channels_last=channels_last, count_include_pad=count_include_pad,
    )  # fmt: skip
    return make_array(codes, result, q.dtype)


def mean(q: Codes, axis: int | Sequence[int] | None = None, keepdims: bool = False, *, output: Output) -> Any:
    """Return the mean along axes, as ONNX Runtime's QLinearGlobalAveragePool and QLinearReduceMean do.

    The codes are what `qlinear_reduce_mean` returns: the sum of the codes is exact.

    Args:
        q: codes of int8 or uint8 with one scale and one zero point.
        axis: Static. The dimensions to average over; None means all.
        keepdims: Static. Whether the result keeps these dimensions, with length 1.
        output: how the result is quantized: a `Quantizer` with a scale and the dtype of q; or a QuantizedArray, for
            its scale and zero point.

    Returns:
        A QuantizedArray with the scale and the zero point of `output`.

    Raises:
        TypeError: q is not a QuantizedArray of int8 or uint8, or an argument has a wrong type.
        ValueError: q has several scales, an axis does not fit it, or `output` has no scale.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([[-1.0, 0.5, 1.55]]), jq.QuantSpec(jnp.uint8))  # scale 0.01
        >>> jq.codes.mean(q, 1, output=q).dequantize()
        Array([0.35], dtype=float32)

    Source: ONNX Runtime's com.microsoft QLinearGlobalAveragePool-1 and QLinearReduceMean-1.
    """
    checks.check_flag("codes.mean", "keepdims", keepdims)
    if isinstance(q, FakeQuantizedArray):
        # `jnp.mean` takes no list.
        axes = tuple(axis) if isinstance(axis, Sequence) else axis
        differentiate = functools.partial(jnp.mean, axis=axes, keepdims=keepdims)
        return train_codes(lambda q, y: mean(q, axis, keepdims, output=y), differentiate, (q,), output)
    q, affine, result = read_operand("codes.mean", q, output)
    axis = checks.check_integers("codes.mean", "axis", axis)
    axes = tuple(range(q.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(checks.check_axis("codes.mean", a, q.ndim) for a in axes)
    checks.require(len(set(axes)) == len(axes), "codes.mean", "axis", "different axes", axis)
    codes = qlinear_reduce_mean(
        q.codes, affine.scale, affine.zero_point, result.scale, result.zero_point, axes=axes, keepdims=keepdims
    )
    return make_array(codes, result, q.dtype)


def read_operand(function: str, q: Codes, output: Output) -> tuple[QuantizedArray, Affine, Affine]:
    """Return an operand, its scale and zero point, and the result's, after checking them."""
    q = quantized_array.check_lazy(function, "q", q)
    affine, result = read_affine(function, "q", q), read_output(function, output)
    expected = f"codes of {affine.dtype}, as q has"
    checks.require_type(affine.dtype == result.dtype, function, "output", expected, result.dtype)
    return q, affine, result


def _read_windows(
    function: str, q: Codes, window_shape: Sequence[int], strides: Sequence[int] | None, padding: Any,
    channels_last: bool,
) -> CodeWindows:  # fmt: skip
    """Return the windows of a pooling after checking that they fit the array."""
    checks.check_flag(function, "channels_last", channels_last)
    expected = "rank 3 or more: (N, *spatial, C), or (N, C, *spatial) with channels_last=False"
    checks.require(q.ndim >= 3, function, "q", expected, f"shape {q.shape}")
    axes = tuple(range(1, q.ndim - 1)) if channels_last else tuple(range(2, q.ndim))
    spatial = tuple(q.shape[axis] for axis in axes)
    lengths = _check_lengths(function, "window_shape", window_shape, len(axes))
    steps = _check_lengths(function, "strides", (1,) * len(axes) if strides is None else strides, len(axes))
    padding = checks.check_integers(function, "padding", padding)
    if isinstance(padding, str):
        checks.check_option(function, "padding", padding, ("SAME", "VALID"))
        padding = tuple((int(low), int(high)) for low, high in lax.padtype_to_pads(spatial, lengths, steps, padding))
    are_pairs = isinstance(padding, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in padding)
    holds = are_pairs and len(padding) == len(axes)
    holds = holds and all(0 <= n < k for pair, k in zip(padding, lengths, strict=True) for n in pair)
    expected = f'"SAME", "VALID", or {len(axes)} pairs of ints from 0 to less than the window'
    checks.require(holds, function, "padding", expected, padding)
    reach = [n + sum(pair) - k for n, pair, k in zip(spatial, padding, lengths, strict=True)]
    expected = f"windows no longer than q with its padding, {spatial}"
    checks.require(min(reach) >= 0, function, "window_shape", expected, lengths)
    return CodeWindows(lengths, steps, padding, axes)


def _check_lengths(function: str, argument: str, value: Any, rank: int) -> tuple[int, ...]:
    """Return positive ints, one for each spatial dimension."""
    value = checks.check_integers(function, argument, value)
    holds = isinstance(value, tuple) and len(value) == rank and all(isinstance(v, int) and v > 0 for v in value)
    checks.require(holds, function, argument, f"{rank} positive ints, one for each spatial dimension", value)
    return value


@functools.partial(jax.jit, inline=True, static_argnames=("windows",))
def compute_maxima(codes: jax.Array, *, windows: CodeWindows) -> jax.Array:
    """Return the maximum of each window of codes or floats.

    One dimension after the other: a window of k * l elements takes k + l maxima. XLA:CPU vectorizes a maximum of
    slices, but not a reduction over windows of bytes.
    """
    is_float = jnp.issubdtype(codes.dtype, jnp.floating)
    # A zero point in the padding could be larger than all codes of a window.
    lowest = np.asarray(-np.inf if is_float else dtypes.read_bounds(np.dtype(codes.dtype))[0], codes.dtype)
    if recording.is_recording() and codes.dtype in dtypes.EIGHT_BITS:  # exporters write it as MaxPool
        sizes, steps, pads = _spread_windows(windows, codes.ndim)
        return lax.reduce_window(codes, lowest, lax.max, sizes, steps, pads)
    pads = dict(zip(windows.axes, windows.padding, strict=True))
    codes = lax.pad(codes, lowest, [(*pads.get(axis, (0, 0)), 0) for axis in range(codes.ndim)])
    for axis, length, stride in zip(windows.axes, windows.lengths, windows.strides, strict=True):
        count = (codes.shape[axis] - length) // stride + 1
        span = (count - 1) * stride + 1
        parts = [lax.slice_in_dim(codes, start, start + span, stride, axis) for start in range(length)]
        codes = functools.reduce(jnp.maximum, parts)
    return codes


def _spread_windows(windows: CodeWindows, rank: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return the lengths, the strides and the paddings of windows for all dimensions."""
    sizes, steps, pads = ([1] * rank, [1] * rank, [(0, 0)] * rank)
    for axis, length, stride, pair in zip(windows.axes, windows.lengths, windows.strides, windows.padding, strict=True):
        sizes[axis], steps[axis], pads[axis] = length, stride, pair
    return sizes, steps, pads


def _average_floats(x: jax.Array, *, windows: CodeWindows, counts_padding: bool) -> jax.Array:
    """Return the mean of each window of floats, with the derivative of the mean of codes."""

    def sum_windows(values: jax.Array) -> jax.Array:
        sizes, steps, pads = _spread_windows(windows, x.ndim)
        # A sum of windows has a derivative in JAX, while the kernel on codes has none.
        return lax.reduce_window(values, np.float32(0), lax.add, sizes, steps, pads)

    total = sum_windows(x)
    return total / (np.float32(np.prod(windows.lengths)) if counts_padding else sum_windows(jnp.ones_like(x)))
