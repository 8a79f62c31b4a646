"""Calibrators: pure functions that find ranges in streams of batches without keeping the data."""

from .calibrator import Calibrator, Range
from .entropy import entropy
from .mse import mse
from .percentile import percentile
from .running import absmax, minmax, moving_average

__all__ = ["Calibrator", "Range", "absmax", "entropy", "minmax", "moving_average", "mse", "percentile"]


def __dir__() -> list[str]:
    return __all__
