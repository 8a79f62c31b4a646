"""Inputs that are hard to quantize correctly, and results in numpy for operators that ONNX Runtime does not have."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_POOL = 2**20 + 7  # sampled once and repeated, which is fast; not a multiple of the length of any row


def bounds(dtype: Any) -> tuple[int, int]:
    """Return the lowest and the highest code of an integer dtype."""
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def parameters(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 scales that are not powers of two, and zero points that are not 0."""
    low, high = bounds(dtype)
    rng = np.random.default_rng(1)
    middle, reach = (low + high) // 2, (high - low) // 4
    zero_point = middle + rng.integers(2, reach + 2, shape)
    return np.asarray(rng.uniform(0.011, 0.093, shape), np.float32), np.asarray(zero_point).astype(dtype)


def along(parameter: np.ndarray, axis: int | None) -> np.ndarray:
    """Return a scale or zero point along an axis of a matrix in a shape that broadcasts, unchanged without an axis."""
    return parameter if axis is None else np.expand_dims(parameter, 1 - axis)


def near_ties(shape: tuple[int, ...], scale: np.ndarray, dtype: Any) -> np.ndarray:
    """Return float32 values; half of them are ties or one ulp away from a tie.

    They exceed both bounds of the dtype for every zero point. A few are infinite or NaN.
    """
    low, high = bounds(dtype)
    span = high - low
    rng = np.random.default_rng(2)
    steps = rng.integers(-span, span, _POOL) + np.where(rng.random(_POOL) < 0.5, 0.5, rng.random(_POOL))
    x = np.resize(steps.astype(np.float32), shape) * scale
    x = (x.view(np.int32) + np.resize(rng.integers(-1, 2, _POOL, np.int32), shape)).view(np.float32)
    for start, special in ((5, np.inf), (300, -np.inf), (700, np.nan)):
        x.reshape(-1)[start::997] = special
    return x


def finite(shape: tuple[int, ...]) -> np.ndarray:
    """Return normally distributed float32 values with a positive mean."""
    pool = np.random.default_rng(3).normal(0.3, 1.0, _POOL)
    return np.resize(pool.astype(np.float32), shape)


def codes(shape: tuple[int, ...], dtype: Any, seed: int = 4) -> np.ndarray:
    """Return codes from the whole range of a dtype. Use different seeds for two operands."""
    low, high = bounds(dtype)
    pool = np.random.default_rng(seed).integers(low, high + 1, _POOL, np.int16)
    return np.resize(pool, shape).astype(dtype)


def multiply_exactly(a: np.ndarray, b: np.ndarray, a_zero_point: Any = 0, b_zero_point: Any = 0) -> np.ndarray:
    """Return the matrix product of codes as int32, from float64: its sums are integers below 2**53, and exact."""
    return ((a.astype(np.float64) - a_zero_point) @ (b.astype(np.float64) - b_zero_point)).astype(np.int32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes that bytes hold along the last axis, the low half first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def encoded(steps: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 steps clipped to the codes of a dtype, NaN as the lowest code, and a mask of those in range."""
    low, high = bounds(dtype)
    inside = (steps >= low) & (steps <= high)  # False for NaN
    return np.where(np.isnan(steps), low, np.clip(steps, low, high)).astype(dtype), inside


def decoded(q: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """Return the float32 values of codes. The difference and the product are rounded once each."""
    return (q.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32)
