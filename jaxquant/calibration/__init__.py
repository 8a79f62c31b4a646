"""Calibrators: pure functions that find ranges in streams of batches without holding the data."""

from .calibrator import Calibrator as Calibrator
from .calibrator import Range as Range
from .entropy import entropy as entropy
from .mse import mse as mse
from .percentile import percentile as percentile
from .running import absmax as absmax
from .running import minmax as minmax
from .running import moving_average as moving_average
