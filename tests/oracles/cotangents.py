"""The codes of cotangents in numpy: float8 with one scale, and int8 with the scales of the other operand folded in."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

import jaxquant as jq

from . import array_text

F32 = np.float32
LIMIT = 2e-6


def round_to(x: np.ndarray, dtype: Any, largest: float, amax: float | None = None) -> np.ndarray:
    """Return x as the values of its float8 codes in float64, with one scale."""
    scale = F32(np.abs(x).max() if amax is None else amax) / F32(largest)
    codes = np.clip((x / scale).astype(F32), -largest, largest).astype(dtype)
    return codes.astype(np.float64) * np.float64(scale)


E4M3 = functools.partial(round_to, dtype=ml_dtypes.float8_e4m3fn, largest=448.0)
E5M2 = functools.partial(round_to, dtype=ml_dtypes.float8_e5m2, largest=57344.0)


def check_product(y: Any, a: np.ndarray, b: np.ndarray) -> None:
    """Check that y is a @ b up to the rounding of its sums."""
    np.testing.assert_array_less(np.abs(np.asarray(y, np.float64) - a @ b), LIMIT * (np.abs(a) @ np.abs(b)) + 1e-30)


def quantize_cotangent(g: np.ndarray, scaled_axes: tuple[int, ...]) -> jq.QuantizedArray:
    """Return g as int8 with a scale for each index of some dimensions."""
    axes = tuple(a for a in range(g.ndim) if a not in scaled_axes)
    low, high = (f(g, axis=axes, keepdims=True, initial=0) for f in (np.min, np.max))
    scale, _ = array_text.parameters(low, high, "int8", symmetric=True, narrow=True)
    codes = array_text.codes(g, np.broadcast_to(scale, g.shape), None, "int8", narrow=True)
    return jq.QuantizedArray(codes, scale)


def fold_scale(q: jq.QuantizedArray, g: np.ndarray, axis: int, of_g: int) -> tuple[jq.QuantizedArray, np.ndarray]:
    """Return an operand without its scales along one dimension, and g times them."""
    if q.scale.shape[axis] == 1:
        return q, g
    scale = np.asarray(q.scale).reshape([-1 if a == of_g else 1 for a in range(g.ndim)])
    return q.replace(scale=np.ones((1,) * q.ndim, F32)), g * scale
