"""Post-training quantization with calibration data: arrays, and passes over prepared functions."""

from ._passes.allocate import BitPlan, allocate_bits
from ._passes.apply import apply
from ._passes.collect import Statistics, collect
from ._passes.correct_bias import correct_bias
from ._passes.gradients import collect_gradients
from ._passes.notes import Note, Notes, Outcome
from ._passes.rotate import rotate
from ._passes.scaling import equalize, smooth
from ._passes.tune import tune
from .adaround import adaround
from .gptq import Diagnostics, gptq
from .hqq import hqq
from .input_scales import awq, smoothquant
from .methods import GPTQ, HQQ, AdaRound, Nearest
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
