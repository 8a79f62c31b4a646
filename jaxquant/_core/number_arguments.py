"""Conversion of Python numbers that are given as scales and zero points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import checks, dtypes

# Every float dtype here holds magnitudes in this range, so an ordinary scale needs no other check.
_SMALLEST, _LARGEST = 2.0**-14, 2.0**15
# A tuple, because isinstance with a union that is built in each call is measurably slower.
_NUMBERS = (int, float)


def fit_number(function: str, argument: str, value: Any, dtype: np.dtype) -> Any:
    """Return a Python number as an array of `dtype`, which must hold it; return anything else unchanged.

    A float dtype holds 0, infinities, NaN, and every number that it does not round to 0 or to an infinity. An integer
    dtype holds the ints in its range. A float8 or float4 dtype holds only 0, because there the number is a zero point.
    """
    if not isinstance(value, _NUMBERS):
        return value
    if dtype in dtypes.FLOATS:
        return _round_to_float(function, argument, value, dtype)
    checks.check_integer(function, argument, value)
    if dtype in dtypes.SMALL_FLOATS:
        if value != 0:
            checks.require(False, function, argument, f"0, the only zero point of {dtype}", value)
    else:
        low, high = dtypes.find_bounds(dtype)
        if not low <= value <= high:
            checks.require(False, function, argument, f"an int in [{low}, {high}], the range of {dtype}", value)
    return np.asarray(value, dtype)


def _round_to_float(function: str, argument: str, value: float, dtype: np.dtype) -> np.ndarray:
    """Return a number as an array of a float dtype; raise if it overflows or becomes 0."""
    if isinstance(value, bool):
        checks.require_type(False, function, argument, "a number", checks.describe_value(value))
    if _SMALLEST <= abs(value) <= _LARGEST:
        return np.asarray(value, dtype)
    try:
        with np.errstate(over="ignore"):  # an overflow is an error below, without numpy's warning
            result = np.asarray(float(value), dtype)
    except OverflowError:  # an int beyond float64
        result = np.asarray(np.inf, dtype)
    rounded = float(result)
    overflows = math.isinf(rounded) and abs(value) != math.inf
    if overflows or (rounded == 0 and value != 0):
        checks.require(False, function, argument, f"a number that {dtype} can hold", value)
    return result


def convert_scale_number(function: str, argument: str, value: Any, x: Any) -> Any:
    """Return a Python number as a scale of x's float dtype, or of float32; return anything else unchanged."""
    dtype: Any = getattr(x, "dtype", None)
    return fit_number(function, argument, value, dtype if dtype in dtypes.FLOATS else dtypes.FLOAT32)


def convert_plain_scale(function: str, argument: str, value: Any) -> Any:
    """Return a Python number as a float32 scale; return anything else unchanged."""
    return fit_number(function, argument, value, dtypes.FLOAT32)


def convert_zero_point_number(function: str, argument: str, value: Any, dtype: Any, scale: Any) -> Any:
    """Return an int as a zero point of scale's shape and the given dtype, which must hold it."""
    dtype = checks.check_dtype(function, f"the dtype of {argument}", dtype, dtypes.QUANTIZED)
    checks.check_integer(function, argument, value)
    zero_point, shape = fit_number(function, argument, int(value), dtype), np.shape(scale)
    return zero_point if shape == () else np.full(shape, zero_point)
