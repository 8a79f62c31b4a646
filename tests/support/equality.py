"""Checks of equality, by element or by bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def same_bits(got: Any, want: np.ndarray) -> None:
    """Check that dtype, shape and all bits are equal. All NaN are equal."""
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    unsigned = np.dtype(f"uint{8 * want.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


def same(got: Any, want: Any) -> None:
    """Check that dtype, shape and all elements are equal."""
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), strict=True)
