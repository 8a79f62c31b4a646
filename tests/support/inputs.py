"""Inputs that distinguish exact from nearly exact: ties, one ulp next to them, saturation, infinities, NaN."""

from __future__ import annotations

import numpy as np

from ..oracles import onnx_text

EXTREMES = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38, 3e9, -3e9, 2.0**31, -(2.0**31), 1e30, -1e30)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Sample positive scales of several orders of magnitude, with full mantissas."""
    return np.asarray(np.exp(rng.uniform(-6, 3, shape)), np.float64).astype(dtype)


def zero_points(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Sample zero points from the whole dtype, mostly odd ones, which distinguish "round, add" from "add, round"."""
    low, high = onnx_text.BOUNDS[name]
    codes = rng.integers(low, high + 1, shape)
    odd = np.clip(codes | 1, low, high)
    return np.where(rng.random(shape) < 0.7, odd, codes).astype(onnx_text.dtype(name))


def near_ties(
    rng: np.random.Generator, scale: np.ndarray, zero_point: np.ndarray | int, bounds: tuple[int, int], dtype: np.dtype
) -> np.ndarray:
    """Sample elements at (k + 1/2) * scale, one ulp to either side, at k * scale, or anywhere.

    The integers k cover the codes and a few numbers beyond both bounds. `scale` and `zero_point` have x's shape.
    """
    low, high = bounds
    shape = scale.shape
    wide = scale.astype(np.float64)
    k = rng.integers(low - 3, high + 3, shape) - np.asarray(zero_point).astype(np.int64)
    with np.errstate(all="ignore"):
        tie = ((k + 0.5) * wide).astype(dtype)
        side = rng.integers(-1, 2, shape)
        toward = np.where(side < 0, -np.inf, np.inf).astype(dtype)
        beside = np.where(side == 0, tie, np.nextafter(tie, toward))
        anywhere = (rng.normal(0, (high - low) / 3, shape) * wide).astype(dtype)
        kind = rng.random(shape)
        x = np.where(kind < 0.7, beside, np.where(kind < 0.8, (k * wide).astype(dtype), anywhere))
        extreme = np.asarray(EXTREMES, np.float64).astype(dtype)
    is_extreme = rng.random(shape) < 0.02
    return np.where(is_extreme, rng.choice(extreme, shape), x).astype(dtype)
