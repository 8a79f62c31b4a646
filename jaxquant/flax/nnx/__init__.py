"""Flax NNX's layers with quantized weights and activations, and the functions that calibrate and convert models."""

from .attention import MultiHeadAttention
from .calibrate import calibrate, calibration_view, check_calibrated
from .contraction import Codes, Ranges, Scale, conv_general_dilated, dot_general, promote_dtype
from .convert import convert, fold_batch_norm, start
from .layers import Conv, Einsum, Embed, Linear, LinearGeneral

__all__ = [
    "Codes",
    "Conv",
    "Einsum",
    "Embed",
    "Linear",
    "LinearGeneral",
    "MultiHeadAttention",
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
    """Return the public names."""
    return __all__
