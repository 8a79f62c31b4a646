"""Checks of equality, by element or by bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def same_bits(actual: Any, expected: np.ndarray) -> None:
    """Check that dtype, shape and all bits are equal. All NaN are equal."""
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    unsigned = np.dtype(f"uint{8 * expected.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(unsigned)[~nan], expected.view(unsigned)[~nan])


def check_equal(actual: Any, expected: Any) -> None:
    """Check that dtype, shape and all elements are equal."""
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), strict=True)
