"""Contractions of integers with zero points: `jax.lax`'s names and argument order, with exact int32 results."""

from .conv_general_dilated import conv_general_dilated
from .dot_general import dot_general

__all__ = ["conv_general_dilated", "dot_general"]


def __dir__() -> list[str]:
    return __all__
