"""The operators in numpy, written from the specification texts, without importing jaxquant or jax."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BOUNDS = {
    "int2": (-2, 1),
    "uint2": (0, 3),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
}
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a name, including those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def expand(values: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """Return ONNX's scalar, 1-D or blocked parameter as an array of x's shape."""
    values = np.asarray(values)
    if block:
        picked = np.arange(shape[axis]) // block
        return np.take(values, picked, axis=axis)
    if values.size == 1:
        return np.broadcast_to(values.reshape(()), shape)
    return np.broadcast_to(values.reshape([-1 if a == axis % len(shape) else 1 for a in range(len(shape))]), shape)


def quotient(x: np.ndarray, scale: np.ndarray, precision: np.dtype) -> np.ndarray:
    """Return x / scale, computed in the given precision, as float64, which represents every result exactly."""
    with np.errstate(all="ignore"):
        wide = x.astype(precision).astype(np.float64) / scale.astype(precision).astype(np.float64)
        # A float64 quotient of two float32 numbers rounds to the same float32 as the exact quotient (53 >= 2 * 24 + 2).
        return wide.astype(np.float32).astype(precision).astype(np.float64)


def codes(value: np.ndarray, zero_point: np.ndarray | int, bounds: tuple[int, int]) -> np.ndarray:
    """Return saturate(round_half_even(value) + zero_point). NaN becomes the lowest code."""
    low, high = bounds
    with np.errstate(all="ignore"):
        result = np.clip(np.rint(value) + zero_point, low, high)
    return np.where(np.isnan(value), low, result)


def quantize_linear(x, scale, zero_point, name, *, axis=1, block=0, precision=None, saturate=True) -> np.ndarray:
    """Compute ONNX QuantizeLinear to the dtype `name`."""
    wide = expand(scale, x.shape, axis, block)
    if x.dtype == np.int32 and scale.dtype == np.int32:
        with np.errstate(all="ignore"):  # the float64 quotient of two int32 rounds to the nearest integer
            value = x.astype(np.float64) / wide.astype(np.float64)
    else:
        value = quotient(x, wide, np.dtype(precision or scale.dtype))
    if name in BOUNDS:
        steps = 0 if zero_point is None else expand(zero_point, x.shape, axis, block).astype(np.int64)
        return codes(value, steps, BOUNDS[name]).astype(np.int64).astype(dtype(name))
    target = dtype(name)
    if saturate:
        largest = float(ml_dtypes.finfo(target).max)
        value = np.clip(value, -largest, largest)
    with np.errstate(all="ignore"):
        return value.astype(np.float32).astype(target)


def dequantize_linear(x, scale, zero_point, *, axis=1, block=0, out=None) -> np.ndarray:
    """Compute ONNX DequantizeLinear: an exact difference, a float32 product and a cast."""
    out = scale.dtype if out is None else out
    if x.dtype.kind in "iu" or x.dtype.name in BOUNDS:
        steps = x.astype(np.int64)
        if zero_point is not None:
            steps = steps - expand(zero_point, x.shape, axis, block).astype(np.int64)
    else:
        steps = x
    with np.errstate(all="ignore"):
        product = steps.astype(np.float32) * expand(scale, x.shape, axis, block).astype(np.float32)
        return product.astype(out)


def dynamic_quantize_linear(x: np.ndarray, bounds: tuple[int, int] = (0, 255)):
    """Compute ONNX DynamicQuantizeLinear in ONNX Runtime's order of float32 operations; int64 codes and zero point."""
    low, high = bounds
    with np.errstate(all="ignore"):
        least = np.minimum(np.float32(0), x.min(initial=np.float32(0)))
        most = np.maximum(np.float32(0), x.max(initial=np.float32(0)))
        scale = np.float32(1) if most == least else np.float32((most - least) / np.float32(high - low))
        start = np.float32(low) - np.float32(least / scale)
        point = high if np.isnan(start) else int(np.rint(np.clip(start, low, high)))
        return codes(np.asarray(x / scale, np.float32), point, bounds).astype(np.int64), scale, point


def onednn_quantize(x, scale, zps, name, *, axis=None) -> np.ndarray:
    """Compute oneDNN's Quantize: a float32 reciprocal, product and sum, each rounded, then rounded half to even."""
    where = {"axis": 0, "block": 0} if axis is None else {"axis": axis, "block": 0}
    with np.errstate(all="ignore"):
        value = x * expand(np.float32(1) / scale, x.shape, **where)
        if zps is not None:
            value = value + expand(zps, x.shape, **where).astype(np.float32)
    return codes(value, 0, BOUNDS[name]).astype(np.int64).astype(dtype(name))


def onednn_dequantize(x, scale, zps, wide) -> np.ndarray:
    """Compute oneDNN's Dequantize. `wide` expands a parameter to x's shape."""
    with np.errstate(all="ignore"):
        steps = x.astype(np.float32)
        if zps is not None:
            steps = steps - wide(zps).astype(np.float32)
        return (steps * wide(scale).astype(np.float32)).astype(scale.dtype)


def groups(values: np.ndarray, group_shape: tuple[int, ...]) -> np.ndarray:
    """Return a per_group parameter expanded to the source's shape."""
    for dim, size in enumerate(group_shape):
        values = np.repeat(values, size, axis=dim)
    return values


def fake_quantize_gradients(x, scale, zero_point, g, bounds, *, axis=1, block=0):
    """Return (dx, dscale, dzero_point) of the consistent straight-through rule for each element in float64.

    zero_point are whole numbers; dscale and dzero_point are not yet summed.
    """
    low, high = bounds
    s = expand(scale, x.shape, axis, block)
    z = expand(zero_point, x.shape, axis, block).astype(np.float64)
    u = quotient(x, s, np.dtype(scale.dtype))
    r = np.rint(u)
    inside = (low <= r + z) & (r + z <= high)
    g = g.astype(np.float64)
    clipped = np.where(np.isnan(u), low, np.clip(r + z, low, high))
    dscale = g * np.where(inside, r - np.where(inside, u, 0), clipped - z)
    return g * inside, dscale, g * ~inside * -s.astype(np.float64)


def collapse(values: np.ndarray, like: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """Sum an array of x's shape to the shape of its scale."""
    if block:
        starts = np.arange(0, values.shape[axis], block)
        return np.add.reduceat(values, starts, axis=axis)
    if like in ((), (1,)):
        return values.sum().reshape(like)
    return values.sum(axis=tuple(a for a in range(values.ndim) if a != axis % values.ndim))
