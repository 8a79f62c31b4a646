"""Calibrators: pure functions that find ranges in streams of batches without holding the data."""

from ._calibrator import Calibrator as Calibrator
from ._calibrator import Range as Range
from ._entropy import entropy as entropy
from ._extremes import absmax as absmax
from ._extremes import minmax as minmax
from ._extremes import moving_average as moving_average
from ._mse import mse as mse
from ._percentile import percentile as percentile
