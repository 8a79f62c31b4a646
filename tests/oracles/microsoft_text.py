"""ONNX Runtime's com.microsoft operators on 8-bit codes, in numpy, without importing jaxquant.

Every operation is rounded to float32 where ONNX Runtime's kernels for x86-64 with AVX2 and FMA round it. The tests
compare these functions with ONNX Runtime itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

F = np.float32


def fuse_multiply_add(a: Any, b: Any, c: Any) -> np.ndarray:
    """Return a * b + c of float32 arrays, rounded once."""
    a, b, c = (np.asarray(v, F).astype(np.float64) for v in (a, b, c))
    product = np.atleast_1d(a * b)  # exact: twice 24 bits fit in 53
    total = product + c
    # The float64 sum is rounded to odd: then rounding it again, to float32, gives what one rounding would.
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & is_even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(F).reshape(np.broadcast_shapes(a.shape, b.shape, c.shape))


def saturate(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Return float values as codes, rounded half to even."""
    info = np.iinfo(dtype)
    return np.clip(np.rint(value), info.min, info.max).astype(dtype)


def requantize(value: np.ndarray, scale: Any, zero_point: Any) -> np.ndarray:
    """Return float32 values as codes, as QuantizeLinear does: rounded before the zero point is added."""
    steps = np.rint((value / F(scale)).astype(F)).astype(np.float64) + float(zero_point)
    return saturate(steps, np.asarray(zero_point).dtype)


def dequantize(x: np.ndarray, scale: Any, zero_point: Any) -> np.ndarray:
    return (x.astype(np.int32) - np.int32(zero_point)).astype(F) * F(scale)


def has_scalar_first(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether the first operand has one element in the innermost run over which ONNX Runtime's kernel loops."""
    shared = min(len(a), len(b))
    for i in range(1, max(shared, 1) + 1):
        left, right = (s[-i] if i <= len(s) else 1 for s in (a, b))
        if max(left, right) > 1 or i >= shared:
            return left <= 1
    raise AssertionError("the last dimension ends the loop")


def qlinear_add(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point) -> np.ndarray:
    """The kernel adds the zero points first, and uses two fused operations for each element."""
    if has_scalar_first(a.shape, b.shape):
        a, a_scale, a_zero_point, b, b_scale, b_zero_point = b, b_scale, b_zero_point, a, a_scale, a_zero_point
    left, right = F(F(a_scale) / F(c_scale)), F(F(b_scale) / F(c_scale))
    inner = fuse_multiply_add(left, F(a_zero_point), F(right * F(b_zero_point)))
    fixed = F(F(c_zero_point) - inner)
    value = fuse_multiply_add(a, left, fuse_multiply_add(b, right, fixed))
    return saturate(value, np.asarray(c_zero_point).dtype)


def qlinear_mul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point) -> np.ndarray:
    product = (a.astype(np.int32) - np.int32(a_zero_point)) * (b.astype(np.int32) - np.int32(b_zero_point))
    scale = F(F(F(a_scale) * F(b_scale)) / F(c_scale))
    return saturate(product.astype(F) * scale + F(c_zero_point), np.asarray(c_zero_point).dtype)


def qlinear_where(condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point) -> np.ndarray:
    left = requantize(dequantize(x, x_scale, x_zero_point), z_scale, z_zero_point)
    right = requantize(dequantize(y, y_scale, y_zero_point), z_scale, z_zero_point)
    return np.where(condition, left, right)


def qlinear_concat(y_scale, y_zero_point, *inputs, axis: int) -> np.ndarray:
    parts = [requantize(dequantize(*inputs[i : i + 3]), y_scale, y_zero_point) for i in range(0, len(inputs), 3)]
    return np.concatenate(parts, axis)


def qlinear_leaky_relu(x, x_scale, x_zero_point, y_scale, y_zero_point, *, alpha: float = 0.01) -> np.ndarray:
    value = dequantize(x, x_scale, x_zero_point)
    return requantize(np.where(value >= 0, value, F(alpha) * value), y_scale, y_zero_point)


def gather_block_quantized(
    data, indices, scales, zero_points=None, *, bits=4, block_size=128, quantize_axis=1, gather_axis=0
) -> np.ndarray:
    """The whole table is dequantized; the operator promises zeros for an index out of range."""

    def unpack(stored: np.ndarray) -> np.ndarray:
        places = [(stored >> i) & (2**bits - 1) for i in range(0, 8, bits)]
        return np.stack(places, -1).reshape(*stored.shape[:-1], -1)

    packed = data.dtype == np.uint8
    codes = (unpack(data) if packed else data).astype(np.int32)
    if zero_points is None:
        points = np.full(scales.shape, 2 ** (bits - 1) if packed else 0)
    else:
        points = (unpack(zero_points)[..., : scales.shape[-1]] if packed else zero_points).astype(np.int32)
    length = codes.shape[quantize_axis]
    spread = [np.repeat(a, block_size, quantize_axis).take(range(length), quantize_axis) for a in (scales, points)]
    with np.errstate(over="ignore", invalid="ignore"):
        values = ((codes - spread[1]).astype(F) * spread[0].astype(F)).astype(scales.dtype)
    entries = values.shape[gather_axis]
    padded = np.concatenate([values, np.zeros_like(values.take([0], gather_axis))], gather_axis)
    return padded.take(np.where((indices >= -entries) & (indices < entries), indices % entries, entries), gather_axis)


# The coefficients of the rational function that ONNX Runtime uses for the logistic function.
_ALPHA = (4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01)
_BETA = (
    6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01,
    9.93151921023180e-01,
)  # fmt: skip


def _evaluate(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    value = np.full(x.shape, F(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = fuse_multiply_add(value, x, np.full(x.shape, F(coefficient)))
    return value


def logistic(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, F(-18), F(18))
    square = x * x
    quotient = (x * _evaluate(_ALPHA, square)) / _evaluate(_BETA, square)
    return np.maximum(F(0), quotient + F(0.5))


def qlinear_sigmoid(x, x_scale, x_zero_point, y_scale, y_zero_point) -> np.ndarray:
    return requantize(logistic(dequantize(x, x_scale, x_zero_point)), y_scale, y_zero_point)


def exponentials(length: int, scale: Any) -> np.ndarray:
    """Return float32 numbers proportional to exp(-scale * 255), ..., exp(0), as large as their sum allows."""
    shift = float(F(math.log(F(np.finfo(F).max) / F(length)))) - 5
    return np.exp((np.arange(256) - 255 + max(0.0, shift) / float(F(scale))) * float(F(scale))).astype(F)


def qlinear_softmax(
    x, x_scale, x_zero_point, y_scale, y_zero_point, *, axis: int = -1, opset: int = 13, rounds_products: bool = False
) -> np.ndarray:
    """The sum is that of a loop over the elements; ONNX Runtime 1.31 rounds the products to float32, 1.32 does not."""
    if x.size == 0:
        return x
    axis %= x.ndim
    rows = x.reshape(math.prod(x.shape[:axis]), -1) if opset < 13 else np.moveaxis(x, axis, -1)
    shape, rows = rows.shape, rows.reshape(-1, rows.shape[-1]).astype(np.int64)
    values = exponentials(rows.shape[1], x_scale)[rows + 255 - rows.max(1, keepdims=True)]
    total = np.zeros(len(rows), F)
    for column in values.T:
        total = total + column
    factor = np.floor(F(1) / F(y_scale))
    if rounds_products:
        steps = np.rint(values * factor / total[:, None])
    else:
        # Products of 48 bits are exact in float64, and a quotient of them has no tie but exact ones.
        steps = np.rint(values.astype(np.float64) * np.float64(factor) / total[:, None])
    y = saturate(steps + float(y_zero_point), np.asarray(y_zero_point).dtype).reshape(shape)
    return y.reshape(x.shape) if opset < 13 else np.moveaxis(y, -1, axis)


def mean_codes(total: np.ndarray, count: int, x_scale, x_zero_point, y_scale, y_zero_point) -> np.ndarray:
    """Return the codes of means, from sums of codes: one multiplication, and a zero point added after rounding."""
    scale = F(F(x_scale) / F(F(y_scale) * F(count)))
    steps = np.rint((total - np.int32(x_zero_point) * count).astype(F) * scale)
    return saturate(steps.astype(np.float64) + float(y_zero_point), np.asarray(y_zero_point).dtype)


def qlinear_global_average_pool(
    x, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last: bool = False
) -> np.ndarray:
    axes = tuple(range(1, x.ndim - 1) if channels_last else range(2, x.ndim))
    return qlinear_reduce_mean(x, x_scale, x_zero_point, y_scale, y_zero_point, axes=axes)


def qlinear_reduce_mean(x, x_scale, x_zero_point, y_scale, y_zero_point, *, axes=None, keepdims: bool = True):
    axes = tuple(range(x.ndim)) if axes is None else tuple(a % x.ndim for a in axes)
    count = math.prod(x.shape[i] for i in axes)
    total = x.astype(np.int32).sum(axes, keepdims=keepdims, dtype=np.int32)
    return mean_codes(total, count, x_scale, x_zero_point, y_scale, y_zero_point)


def find_pads(
    spatial, kernel, strides, auto_pad: str, pads, ceil_mode: bool
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the padding of each spatial dimension, and the number of positions."""
    rank = len(spatial)
    result, sizes = [], []
    for i, (size, k, stride) in enumerate(zip(spatial, kernel, strides, strict=True)):
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            total = max((-(-size // stride) - 1) * stride + k - size, 0)
            small, large = total // 2, total - total // 2
            pair = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
        else:
            pair = (0, 0) if auto_pad == "VALID" or pads is None else (pads[i], pads[rank + i])
        reach = size + sum(pair) - k
        positions = (-(-reach // stride) if ceil_mode else reach // stride) + 1
        if ceil_mode and (positions - 1) * stride >= size + pair[0]:
            positions -= 1  # no window begins in the padding at the end
        result.append(pair)
        sizes.append(positions)
    return result, sizes


def qlinear_average_pool(
    x, x_scale, x_zero_point, y_scale, y_zero_point, *, kernel_shape: Sequence[int], auto_pad="NOTSET", ceil_mode=False,
    channels_last=False, count_include_pad=False, pads=None, strides=None,
) -> np.ndarray:  # fmt: skip
    """The float32 values of a window are added one by one, and the mean is divided again by the scale of y."""
    if channels_last:
        x = np.moveaxis(x, -1, 1)
    strides = (1,) * len(kernel_shape) if strides is None else strides
    padding, sizes = find_pads(x.shape[2:], kernel_shape, strides, auto_pad, pads, ceil_mode)
    if tuple(kernel_shape) == x.shape[2:] and not any(map(any, padding)):
        y = qlinear_global_average_pool(x, x_scale, x_zero_point, y_scale, y_zero_point)
        return np.moveaxis(y, 1, -1) if channels_last else y
    values = dequantize(x, x_scale, x_zero_point)
    y = np.zeros((*x.shape[:2], *sizes), np.asarray(y_zero_point).dtype)
    for place in np.ndindex(*sizes):
        starts = [p * s - before for p, s, (before, _) in zip(place, strides, padding, strict=True)]
        spans = [range(max(b, 0), min(b + k, n)) for b, k, n in zip(starts, kernel_shape, x.shape[2:], strict=True)]
        total = np.zeros(x.shape[:2], F)
        for element in itertools.product(*spans):
            total = total + values[(..., *element)]
        count = math.prod(kernel_shape) if count_include_pad else math.prod(map(len, spans))
        with np.errstate(invalid="ignore"):
            mean = total / F(count)
        y[(..., *place)] = saturate(mean / F(y_scale) + F(y_zero_point), y.dtype)
    return np.moveaxis(y, 1, -1) if channels_last else y
