"""Integer contractions in numpy, written from their definitions with int64 sums, without importing jaxquant or jax.

Sums are wrapped to int32 at the end. 2 * 255 * 255 * K is far below 2**63, so int64 sums are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from . import onnx_text

Pairs = Sequence[tuple[int, int]]


def wrap(total: np.ndarray) -> np.ndarray:
    """Return int64 numbers modulo 2**32 as int32."""
    return (np.asarray(total, np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def steps(x: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
    """Return x - zero_point in int64. The zero point broadcasts unchanged."""
    wide = np.asarray(x).astype(np.int64)
    return wide if zero_point is None else wide - np.asarray(zero_point).astype(np.int64)


def single(value: Any) -> np.ndarray:
    """Return a scale of any float dtype as float32."""
    return np.asarray(value).astype(np.float32)


def per_row(value: Any) -> np.ndarray:
    """Return a scalar, [1], [M] or [..., M, 1] parameter in a shape that broadcasts with [..., M, anything]."""
    value = np.asarray(value)
    if value.ndim == 1:
        return value.reshape(()) if value.size == 1 else value[:, None]
    return value


def per_column(value: Any) -> np.ndarray:
    """Return a scalar, [1], [N] or [..., 1, N] parameter in a shape that broadcasts with [..., anything, N]."""
    value = np.asarray(value)
    return value.reshape(()) if value.ndim == 1 and value.size == 1 else value


def _rows(x: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
    return steps(x, None if zero_point is None else per_row(zero_point))


def _columns(x: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
    return steps(x, None if zero_point is None else per_column(zero_point))


def matmul_integer(a, b, a_zero_point=None, b_zero_point=None) -> np.ndarray:
    """Compute ONNX MatMulInteger."""
    return wrap(np.matmul(_rows(a, a_zero_point), _columns(b, b_zero_point)))


def requantize(total: np.ndarray, multiplier: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """Return clip(rint(float32(total) * multiplier) + zero_point), where the product is rounded to float32 first."""
    product = total.astype(np.float32) * np.asarray(multiplier, np.float32)
    name = zero_point.dtype.name
    return onnx_text.codes(product, zero_point.astype(np.int64), onnx_text.BOUNDS[name]).astype(np.int64).astype(name)


def matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return operands with at least two dimensions, and the axes to remove from the result."""
    gone = (*((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ()))
    return a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b, gone


def qlinear_matmul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point) -> np.ndarray:
    """Compute ONNX QLinearMatMul for integers and for float8, whose zero points are 0."""
    a, b, gone = matrices(a, b)
    multiplier = per_row(single(a_scale)) * per_column(single(b_scale)) / per_row(single(y_scale))
    if y_zero_point.dtype.name in onnx_text.FLOAT8:
        total = np.matmul(a.astype(np.float32), b.astype(np.float32))
        return saturated(total * multiplier, y_zero_point.dtype).squeeze(gone)
    total = matmul_integer(a, b, a_zero_point, b_zero_point)
    return requantize(total, multiplier, per_row(y_zero_point)).squeeze(gone)


def saturated(value: np.ndarray, target: np.dtype) -> np.ndarray:
    """Convert float32 to float8 with saturation."""
    largest = np.float32(ml_dtypes.finfo(target).max)
    return np.clip(value, -largest, largest).astype(target)


def matmul_integer_to_float(a, b, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None) -> np.ndarray:
    """Compute com.microsoft MatMulIntegerToFloat. A b_scale of [blocks, N] has a row for each block of b's rows."""
    a, b, gone = matrices(a, b)
    scale = np.asarray(b_scale)
    blocks = scale.shape[0] if scale.ndim == 2 else 1
    depth = b.shape[-2] // blocks
    point = None if b_zero_point is None else np.asarray(b_zero_point)
    out = None
    for i in range(blocks):
        part = slice(i * depth, (i + 1) * depth)
        own_scale = scale[i] if scale.ndim == 2 else per_column(scale)
        own_point = point[i] if point is not None and point.ndim == 2 else point
        total = matmul_integer(a[..., part], b[..., part, :], a_zero_point, own_point)
        product = total.astype(np.float32) * (per_row(a_scale) * own_scale)
        out = product if out is None else out + product
    assert out is not None
    return (out if bias is None else out + bias).squeeze(gone)


def dynamic_quantize_matmul(a, b, b_scale, b_zero_point=None, bias=None) -> np.ndarray:
    """Compute com.microsoft DynamicQuantizeMatMul, with one scale and one uint8 zero point for all of a."""
    codes, scale, point = onnx_text.dynamic_quantize_linear(a)
    quantized, point = codes.astype(np.uint8), np.uint8(point)
    return matmul_integer_to_float(quantized, b, np.float32(scale), b_scale, np.asarray(point), b_zero_point, bias)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes in the bytes of the last axis, the low bits first."""
    shifts = np.arange(0, 8, bits)
    codes = (packed[..., None].astype(np.int64) >> shifts) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def nbits_weights(b, scales, zero_points, K: int, N: int, bits: int, block_size: int) -> np.ndarray:
    """Return the float64 weights [N, K] of com.microsoft MatMulNBits."""
    blocks = -(-K // block_size)
    codes = unpack(b, bits).reshape(N, blocks, block_size)
    points = np.full((N, blocks), 2 ** (bits - 1), np.int64)
    if zero_points is not None:
        is_packed = zero_points.dtype == np.uint8
        points = unpack(zero_points.reshape(N, -1), bits)[:, :blocks] if is_packed else zero_points.reshape(N, blocks)
    wide = (codes - points[..., None]) * scales.reshape(N, blocks, 1).astype(np.float64)
    return wide.reshape(N, -1)[:, :K]


def matmul_nbits(a, b, scales, zero_points=None, bias=None, *, K, N, bits=4, block_size=32) -> np.ndarray:
    """Compute com.microsoft MatMulNBits in float64."""
    weights = nbits_weights(b, scales, zero_points, K, N, bits, block_size)
    out = a.astype(np.float64) @ weights.T
    return out if bias is None else out + bias.astype(np.float64)


def dot_general(lhs, rhs, dimension_numbers, lhs_zero_point=None, rhs_zero_point=None) -> np.ndarray:
    """Compute jax.lax.dot_general of the differences: batch dimensions, then free ones of lhs, then those of rhs."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

    def ordered(
        x: np.ndarray, batch: Sequence[int], contract: Sequence[int]
    ) -> tuple[np.ndarray, list[int], list[int]]:
        free = [d for d in range(x.ndim) if d not in (*batch, *contract)]
        moved = x.transpose(*batch, *free, *contract)
        batches, inner = ([x.shape[d] for d in dims] for dims in (batch, free))
        rows, depth = int(np.prod(inner)), int(np.prod([x.shape[d] for d in contract]))
        return moved.reshape(*batches, rows, depth), batches, inner

    left, batches, left_free = ordered(steps(lhs, lhs_zero_point), lhs_batch, lhs_contract)
    right, _, right_free = ordered(steps(rhs, rhs_zero_point), rhs_batch, rhs_contract)
    total = np.matmul(left, np.swapaxes(right, -1, -2))
    return wrap(total.reshape([*batches, *left_free, *right_free]))


def _spread(x: np.ndarray, dilation: Sequence[int]) -> np.ndarray:
    """Insert zeros between the elements of the spatial dimensions."""
    sizes = [(s - 1) * d + 1 if s else 0 for s, d in zip(x.shape[2:], dilation, strict=True)]
    out = np.zeros((*x.shape[:2], *sizes), x.dtype)
    out[(..., *(slice(None, None, d) for d in dilation))] = x
    return out


def _padded(x: np.ndarray, padding: Pairs) -> np.ndarray:
    """Pad the spatial dimensions with zeros. A negative padding removes elements."""
    grown = np.pad(x, [(0, 0), (0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in padding)])
    cuts = (slice(max(-lo, 0), s - max(-hi, 0)) for (lo, hi), s in zip(padding, grown.shape[2:], strict=True))
    return grown[(..., *cuts)]


def convolve(x, w, strides, padding: Pairs, x_dilation, w_dilation, groups: int = 1) -> np.ndarray:
    """Return the int64 correlation of x [N, C, ...] with w [O, C / groups, ...], added up by kernel position."""
    x = _padded(_spread(x, x_dilation), padding)
    window = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], w_dilation, strict=True)]
    sizes = [max((s - k) // t + 1, 0) for s, k, t in zip(x.shape[2:], window, strides, strict=True)]
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    kernels = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    out = np.zeros((x.shape[0], groups, kernels.shape[1], *sizes), np.int64)
    for position in itertools.product(*map(range, w.shape[2:])):
        spans = zip(position, w_dilation, strides, sizes, strict=True)
        cut = tuple(slice(p * d, p * d + (n - 1) * t + 1 if n else p * d, t) for p, d, t, n in spans)
        out += np.einsum("ngc...,goc->ngo...", grouped[(..., *cut)], kernels[(..., *position)])
    return out.reshape(x.shape[0], w.shape[0], *sizes)


def onnx_padding(auto_pad: str, pads, sizes, kernel, strides, dilations) -> list[tuple[int, int]]:
    """Return the padding that ONNX's auto_pad and pads define, as (before, after) for each spatial dimension."""
    if auto_pad == "VALID" or (auto_pad == "NOTSET" and pads is None):
        return [(0, 0)] * len(sizes)
    if auto_pad == "NOTSET":
        return list(zip(pads[: len(sizes)], pads[len(sizes) :], strict=True))
    found = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        window = (k - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
        small, large = total // 2, total - total // 2
        found.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return found


def conv_integer(x, w, x_zero_point=None, w_zero_point=None, **attributes: Any) -> np.ndarray:
    """Compute ONNX ConvInteger for any number of spatial dimensions."""
    rank = x.ndim - 2
    ones = [1] * rank
    strides, dilations = (list(attributes.get(name) or ones) for name in ("strides", "dilations"))
    kernel, pads = w.shape[2:], attributes.get("pads")
    padding = onnx_padding(attributes.get("auto_pad", "NOTSET"), pads, x.shape[2:], kernel, strides, dilations)
    point = None
    if w_zero_point is not None:
        point = np.asarray(w_zero_point).reshape(-1, *[1] * (w.ndim - 1))
    x_point = None if x_zero_point is None else np.asarray(x_zero_point).reshape(())
    groups = attributes.get("group", 1)
    return wrap(convolve(steps(x, x_point), steps(w, point), strides, padding, ones, dilations, groups))


def qlinear_conv(
    x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, b=None, **attributes: Any
) -> np.ndarray:
    """Compute ONNX QLinearConv. The bias is added to the sum modulo 2**32."""
    total = conv_integer(x, w, x_zero_point, w_zero_point, **attributes)
    channels = (-1, *[1] * (x.ndim - 2))
    if b is not None:
        total = wrap(total.astype(np.int64) + b.astype(np.int64).reshape(channels))
    multiplier = single(x_scale).reshape(()) * single(w_scale).reshape(channels) / single(y_scale).reshape(())
    return requantize(total, multiplier, np.asarray(y_zero_point).reshape(()))


def conv_general_dilated(
    lhs, rhs, strides, padding, lhs_dilation, rhs_dilation, layouts, groups=1, batch_groups=1, points=(None, None)
) -> np.ndarray:
    """Compute jax.lax.conv_general_dilated of the differences, with `layouts` such as ("NHWC", "HWIO", "NHWC")."""
    lhs_spec, rhs_spec, out_spec = layouts
    spatial = [c for c in rhs_spec if c not in "OI"]  # the order of strides, padding and dilations
    x = steps(lhs, points[0]).transpose([lhs_spec.index(c) for c in ("N", "C", *spatial)])
    w = np.asarray(rhs).astype(np.int64).transpose([rhs_spec.index(c) for c in ("O", "I", *spatial)])
    if points[1] is not None:
        w = steps(w, np.asarray(points[1]).reshape(-1, *[1] * (w.ndim - 1)))
    parts = zip(np.split(x, batch_groups), np.split(w, batch_groups), strict=True)
    found = [convolve(one, own, strides, padding, lhs_dilation, rhs_dilation, groups) for one, own in parts]
    total = np.concatenate(found, axis=1)
    return wrap(total.transpose([("N", "C", *spatial).index(c) for c in out_spec]))
