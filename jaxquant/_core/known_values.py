"""Checks of the elements of scales and zero points, where they are known and a look at them costs little."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from . import checks, dtypes

_KNOWN = 2**16  # an array of so many elements is looked at; a longer one would cost more than it tells


def find_known(value: Any, *, is_awaited: bool = False) -> np.ndarray | None:
    """Returns the elements of an array of numbers where they are known and few; None where they are not.

    Args:
        value: anything; None for what is traced, is no array of numbers, or lies on the devices of another host.
        is_awaited: whether an accelerator is waited for. Otherwise only what is in the memory of this host is known.
    """
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer) or value.size > _KNOWN or not value.is_fully_addressable:
            return None
        if not is_awaited:
            for device in value.devices():  # a loop, because a generator costs an eager call more
                if device.platform != "cpu":
                    return None
    elif not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray) or value.size > _KNOWN:
        return None
    dtype = value.dtype  # that of a key is none of numpy's
    is_number = isinstance(dtype, np.dtype) and (dtype.kind in "iuf" or dtypes.is_known(dtype))
    return np.asarray(value) if is_number else None


def check_positive(
    function: str, argument: str, scale: Any, *, allow_overflow: bool = False, is_awaited: bool = False
) -> None:
    """Requires a scale to be positive, as far as `find_known` knows it; NaN and infinity pass only where allowed."""
    known = find_known(scale, is_awaited=is_awaited)
    if known is None:
        return
    # The usual case first: every eager call that is given a scale pays for this check.
    is_positive = known.dtype == dtypes.FLOAT32 and known.size and np.minimum.reduce(known, axis=None) > 0
    if is_positive and (allow_overflow or np.maximum.reduce(known, axis=None) < np.inf):
        return
    if known.dtype not in (*dtypes.FLOATS, dtypes.E8M0, np.float64):  # the contract of the dtype will say so
        return
    known = known.astype(np.float32, copy=False)  # what that makes of a float64 counts
    if known.size and known.min() > 0 and known.max() < np.inf:
        return
    wrong = known <= 0 if allow_overflow else ~((known > 0) & (known < np.inf))
    if wrong.any():
        expected = "positive numbers" if allow_overflow else "finite positive numbers"
        checks.require(False, function, argument, expected, f"{known[wrong].ravel()[0]}")


def check_codes(function: str, argument: str, zero_point: Any, bounds: tuple[int, int]) -> None:
    """Requires a float zero point to round to a code in `bounds`, as far as `find_known` knows it."""
    if getattr(zero_point, "dtype", None) != dtypes.FLOAT32:
        return
    known = find_known(zero_point)
    if known is None:
        return
    steps = np.rint(known)
    wrong = ~((steps >= bounds[0]) & (steps <= bounds[1]))
    if wrong.any():
        expected = f"numbers that round to a code in [{bounds[0]}, {bounds[1]}] (a traced zero point is cut to them)"
        checks.require(False, function, argument, expected, f"{known[wrong].ravel()[0]}")
