"""Inputs that are hard to quantize rightly, and the answers in numpy where ONNX Runtime has no such operator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_POOL = 2**20 + 7  # drawn once and repeated: not a multiple of any row, and fast to make


def bounds(dtype: Any) -> tuple[int, int]:
    """Returns the lowest and the highest code of an integer dtype."""
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def parameters(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 scales of `shape`, none a power of two, and zero points other than 0."""
    low, high = bounds(dtype)
    rng = np.random.default_rng(1)
    middle, reach = (low + high) // 2, (high - low) // 4
    zero_point = middle + rng.integers(2, reach + 2, shape)
    return np.asarray(rng.uniform(0.011, 0.093, shape), np.float32), np.asarray(zero_point).astype(dtype)


def along(parameter: np.ndarray, axis: int | None) -> np.ndarray:
    """Returns a parameter per index of a matrix' axis so that it broadcasts; without an axis, as it is."""
    return parameter if axis is None else np.expand_dims(parameter, 1 - axis)


def near_ties(shape: tuple[int, ...], scale: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns float32 values of which half lie on a tie of their scale or one ulp beside it.

    They reach past both ends of the dtype whatever the zero point; a few are infinite or NaN.
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
    """Returns float32 values of no particular kind, more of them above zero than below."""
    pool = np.random.default_rng(3).normal(0.3, 1.0, _POOL)
    return np.resize(pool.astype(np.float32), shape)


def codes(shape: tuple[int, ...], dtype: Any, seed: int = 4) -> np.ndarray:
    """Returns codes from the whole range of a dtype; two operands want two seeds."""
    low, high = bounds(dtype)
    pool = np.random.default_rng(seed).integers(low, high + 1, _POOL, np.int16)
    return np.resize(pool, shape).astype(dtype)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the 4-bit codes of bytes along the last axis, low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def encoded(steps: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 steps cut to a dtype's codes, NaN to the lowest, and where nothing was cut."""
    low, high = bounds(dtype)
    inside = (steps >= low) & (steps <= high)  # False for NaN
    return np.where(np.isnan(steps), low, np.clip(steps, low, high)).astype(dtype), inside


def decoded(q: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """Returns the float32 values of codes, difference and product each rounded once."""
    return (q.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32)
