"""Scales, zero points and codes for a spec in numpy, written from the docstring of `quantize`, without jaxquant."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from . import onnx_text

F32 = np.float32
TINY = np.finfo(np.float32).tiny
Sizes = tuple[int, ...]


def sizes(shape: tuple[int, ...], granularity: tuple[Any, ...]) -> Sizes:
    """Return how many indices per dimension share an entry: ("tensor",), ("axis", axes) or ("blocked", axes, size)."""
    kind, *rest = granularity
    axes = {a % len(shape) for a in rest[0]} if rest else set()
    if kind == "blocked":
        return tuple(rest[1] if a in axes else 1 for a in range(len(shape)))
    return tuple(1 if a in axes else max(n, 1) for a, n in enumerate(shape))


def entries(shape: tuple[int, ...], block_sizes: Sizes, shared: bool = True) -> tuple[int, ...]:
    """Return the shape of a scale. A dimension of length 0 has one entry if it is shared, and otherwise none."""
    return tuple(-(-n // size) if n or not shared else 1 for n, size in zip(shape, block_sizes, strict=True))


def spread(part: np.ndarray, block_sizes: Sizes, shape: tuple[int, ...]) -> np.ndarray:
    """Return a scale or zero point with each entry repeated as often as it is shared."""
    for axis, size in enumerate(block_sizes):
        part = np.repeat(part, size, axis=axis)
    return part[tuple(slice(n) for n in shape)]


def aligned(part: np.ndarray, shape: tuple[int, ...], block_size: int | Sizes | None) -> np.ndarray:
    """Return a scale or zero point of x's rank expanded to x's shape. The shapes determine the repetitions.

    A block size, or one per dimension, tells how long blocks are whose last one may be short.
    """
    for axis, n in enumerate(shape):
        if part.shape[axis] == 1:
            picked = np.zeros(n, np.int64)
        elif part.shape[axis] == n:
            picked = np.arange(n)
        else:
            size = block_size[axis] if isinstance(block_size, tuple) else block_size
            picked = np.arange(n) // (size or n // part.shape[axis])
        part = np.take(part, picked, axis=axis)
    return part


def extremes(x: np.ndarray, block_sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return (min(x, 0), max(x, 0)) of each box of `block_sizes` indices in float32, and NaN for a box with a NaN."""
    x = x.astype(F32)
    counts = tuple(-(-n // size) for n, size in zip(x.shape, block_sizes, strict=True))
    x = np.pad(x, [(0, c * s - n) for c, s, n in zip(counts, block_sizes, x.shape, strict=True)])  # 0 is in every range
    x = x.reshape([n for pair in zip(counts, block_sizes, strict=True) for n in pair])
    inner = tuple(range(1, x.ndim, 2))
    return x.min(axis=inner, initial=F32(0)), x.max(axis=inner, initial=F32(0))


@functools.cache
def _grid(name: str) -> np.ndarray:
    """Return all positive finite values of a 16-bit float dtype in ascending order, as float64."""
    with np.errstate(invalid="ignore"):  # the patterns include signaling NaN, which are removed below
        values = np.arange(2**15, dtype=np.uint16).view(onnx_text.dtype(name)).astype(np.float64)
    return np.unique(values[np.isfinite(values) & (values > 0)])


def store_scale(scale: np.ndarray, name: str, power_of_two: bool) -> np.ndarray:
    """Return the least value of a scale dtype that is at least a float32 scale, or else the largest value."""
    wide = scale.astype(np.float64)
    finite = np.isfinite(wide)
    if power_of_two or name == "float8_e8m0fnu":
        fraction, exponent = np.frexp(np.where(finite, wide, 1))
        wide = np.where(finite, np.ldexp(1.0, np.minimum(exponent - (fraction == 0.5), 127)), wide)
    if name == "float8_e8m0fnu":
        return np.where(finite, wide, np.nan).astype(F32).astype(ml_dtypes.float8_e8m0fnu)
    if name == "float32":
        return wide.astype(F32)
    grid = _grid(name)
    place = np.searchsorted(grid, np.where(finite, wide, 1))
    wide = np.where(finite, grid[np.minimum(place, len(grid) - 1)], wide)
    return wide.astype(onnx_text.dtype(name))


def bounds(name: str, narrow: bool) -> tuple[int, int]:
    """Return (qmin, qmax) of an integer dtype."""
    low, high = onnx_text.BOUNDS[name]
    return low + narrow, high


def fixed_point(name: str) -> int:
    """Return the zero point of a symmetric integer dtype."""
    return 0 if onnx_text.BOUNDS[name][0] < 0 else 2 ** (int(name[4:]) - 1)


def guarded(scale: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return 1 for a range of 0, NaN for a NaN, and a normal number for other ranges."""
    scale = np.where((low == 0) & (high == 0), F32(1), np.maximum(scale, TINY))
    return np.where(np.isnan(low) | np.isnan(high), F32(np.nan), scale).astype(F32)


def parameters(
    low: np.ndarray, high: np.ndarray, name: str, symmetric: bool, narrow: bool, scale: str = "float32",
    power_of_two: bool = False, levels: float | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """Return (scale, zero point as int64 or None) for float32 ranges that contain 0."""
    with np.errstate(all="ignore"):
        if name not in onnx_text.BOUNDS:
            largest = F32(levels or float(ml_dtypes.finfo(onnx_text.dtype(name)).max))
            return store_scale(guarded(np.maximum(-low, high) / largest, low, high), scale, power_of_two), None
        qmin, qmax = bounds(name, narrow)
        if symmetric:
            z = fixed_point(name)
            fixed_scale = guarded(np.maximum(low / F32(qmin - z), high / F32(qmax - z)), low, high)
            return store_scale(fixed_scale, scale, power_of_two), np.full(low.shape, z) if z else None
        width = high - low
        stored_scale = store_scale(guarded(width / F32(qmax - qmin), width, width), scale, power_of_two)
        return stored_scale, zero_points(low, stored_scale, (qmin, qmax))


def zero_points(low: np.ndarray, scale: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """Return round(saturate(qmin - low / scale)) in float32. NaN becomes qmax, as in ONNX Runtime."""
    with np.errstate(all="ignore"):
        start = F32(limits[0]) - low / scale.astype(F32)
        return np.where(np.isnan(start), limits[1], np.rint(np.clip(start, *limits))).astype(np.int64)


def codes(x: np.ndarray, scale: np.ndarray, point: Any, name: str, narrow: bool) -> np.ndarray:
    """Return the codes of x for a scale and a zero point of its shape."""
    value = onnx_text.quotient(x, scale.astype(F32), np.dtype(F32))
    if name in onnx_text.BOUNDS:
        steps = 0 if point is None else point.astype(np.int64)
        return onnx_text.codes(value, steps, bounds(name, narrow)).astype(np.int64).astype(onnx_text.dtype(name))
    largest = float(ml_dtypes.finfo(onnx_text.dtype(name)).max)
    if name.startswith("float4"):
        value = np.where(np.isnan(value), -0.0, value)  # float4 has no NaN
    with np.errstate(all="ignore"):
        return np.clip(value, -largest, largest).astype(F32).astype(onnx_text.dtype(name))


def values(codes: np.ndarray, scale: np.ndarray, point: np.ndarray | None, out: Any) -> np.ndarray:
    """Return (codes - point) * scale, all of one shape: an exact difference and a float32 product, rounded once."""
    steps = codes.astype(np.int64) if codes.dtype.kind in "iu" or codes.dtype.name in onnx_text.BOUNDS else codes
    steps = steps if point is None else steps - point.astype(np.int64)
    with np.errstate(all="ignore"):
        return (steps.astype(F32) * scale.astype(F32)).astype(out)


def nearest_level(value: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
    """Return the index of the nearest entry of a table: the lower one of two at equal distance, 0 for NaN."""
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(levels)])
    return (value.astype(np.float64)[..., None] > middles).sum(-1)
