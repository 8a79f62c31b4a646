"""Post-training quantization with calibration data: arrays, and passes over prepared functions."""

from .adaround import adaround
from .gptq import Diagnostics, gptq
from .hqq import hqq
from .input_scales import awq, smoothquant
from .moments import Accumulator, Moments, MomentsState, second_moments
from .search_range import search_range

__all__ = [  # noqa: RUF022 as grouped
    # Arrays.
    "gptq",
    "hqq",
    "adaround",
    "search_range",
    "awq",
    "smoothquant",
    "second_moments",
    "Accumulator",
    "Diagnostics",
    "Moments",
    "MomentsState",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
