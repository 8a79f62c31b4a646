"""What is the same: in every element, or in every bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def same_bits(got: Any, want: np.ndarray) -> None:
    """Equal in dtype, in shape and in every bit; NaN is equal to NaN."""
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    unsigned = np.dtype(f"uint{8 * want.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


def same(got: Any, want: Any) -> None:
    """Equal in every element, in shape and in dtype."""
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), strict=True)
