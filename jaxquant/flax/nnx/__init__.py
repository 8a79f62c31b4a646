"""Flax NNX's layers with quantized weights and activations: same names, same arguments, same parameters."""

from .calibrate import calibrate, calibration_view, check_calibrated
from .contraction import Codes, Ranges, Scale, promote_dtype
from .convert import convert, fold_batch_norm, start
from .layers import Conv, Einsum, Embed, Linear, LinearGeneral, conv_general_dilated, dot_general

__all__ = [
    "Codes",
    "Conv",
    "Einsum",
    "Embed",
    "Linear",
    "LinearGeneral",
    "Ranges",
    "Scale",
    "calibrate",
    "calibration_view",
    "check_calibrated",
    "conv_general_dilated",
    "convert",
    "dot_general",
    "fold_batch_norm",
    "promote_dtype",
    "start",
]


def __dir__() -> list[str]:
    return __all__
