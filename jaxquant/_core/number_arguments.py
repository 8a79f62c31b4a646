"""Python numbers as scales and zero points, and what is known of a zero point of floats."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from . import checks, dtypes


def convert_scale_number(function: str, argument: str, value: float, x: Any) -> Any:
    """Returns a Python number as a scale of x's float dtype, float32 where x is none; it must survive that."""
    dtype = getattr(x, "dtype", None)
    with np.errstate(over="ignore"):  # what is lost is an error below
        try:
            scale = np.asarray(float(value), dtype if dtype in dtypes.FLOATS else np.float32)
        except OverflowError:  # an int beyond float64
            scale = np.asarray(np.inf, np.float32)
    expected = f"a number that {scale.dtype} can hold"
    lost = (np.isinf(scale) and abs(value) != np.inf) or (scale == 0 and value != 0)
    checks.require_type(not isinstance(value, bool), function, argument, "a number", checks.describe_value(value))
    checks.require(not lost, function, argument, expected, value)
    return scale


def convert_plain_scale(function: str, argument: str, value: Any) -> Any:
    """Returns a Python number as a float32 scale; anything else as it came."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return convert_scale_number(function, argument, value, None) if is_number else value


def convert_zero_point_number(function: str, argument: str, value: Any, dtype: Any, scale: Any) -> Any:
    """Returns an int as a zero point of scale's shape and the given dtype, which must hold it."""
    found = checks.check_dtype(function, f"the dtype of {argument}", dtype, dtypes.QUANTIZED)
    checks.check_integer(function, argument, value)
    low, high = dtypes.find_bounds(found) if found in dtypes.INTEGERS else (0, 0)
    if not low <= value <= high:
        expected = f"an int in [{low}, {high}], for {found}, the output's dtype"
        checks.require(False, function, argument, expected, value)
    return np.full(np.shape(scale), value, found)


def check_float_zero_point(function: str, argument: str, zero_point: Any) -> None:
    """Requires a known zero point of a small float dtype to be zero; a traced one cannot be looked at."""
    known = isinstance(zero_point, jax.Array | np.ndarray | np.generic) and not checks.is_traced(zero_point)
    if known and zero_point.dtype in dtypes.SMALL_FLOATS:
        zero = not np.any(np.asarray(zero_point).astype(np.float32))
        expected = f"0, the only zero point of {zero_point.dtype}"
        checks.require(zero, function, argument, expected, np.asarray(zero_point).astype(np.float32).tolist())
