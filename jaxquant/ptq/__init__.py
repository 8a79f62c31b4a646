"""Post-training quantization with calibration data: arrays, and passes over prepared functions."""

from .adaround import adaround
from .allocate import allocate_bits
from .apply import apply
from .bit_plan import BitPlan
from .collect import Statistics, collect
from .correct_bias import correct_bias
from .gptq import Diagnostics, gptq
from .hqq import hqq
from .methods import GPTQ, HQQ, AdaRound, Nearest
from .moments import Accumulator, Moments, MomentsState, second_moments
from .notes import Note, Notes, Outcome
from .rotate import rotate
from .scaling import awq, equalize, smooth, smoothquant
from .search_range import search_range
from .tune import collect_gradients, tune

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
    # Passes over prepared functions.
    "collect",
    "Statistics",
    "collect_gradients",
    "apply",
    "GPTQ",
    "AdaRound",
    "HQQ",
    "Nearest",
    "smooth",
    "equalize",
    "rotate",
    "correct_bias",
    "tune",
    "allocate_bits",
    "BitPlan",
    "Outcome",
    "Notes",
    "Note",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
