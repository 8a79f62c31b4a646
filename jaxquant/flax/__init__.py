"""Quantized Flax layers, and the functions that calibrate and convert Linen modules; `nnx` has those for NNX models.

This module needs the package flax, which `pip install "jaxquant[flax]"` installs. `nnx` is imported when it is first
used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import linen
from ._fold_batch_norm import fold_batch_norm
from .linen.calibrate import calibrate, check_calibrated
from .linen.contraction import promote_dtype
from .linen.convert import convert
from .linen.hooks import conv_general_dilated, dot_general
from .preset import RUNTIME
from .ranges import Dynamic, Learned, Observed

__all__ = [
    "RUNTIME",
    "Dynamic",
    "Learned",
    "Observed",
    "calibrate",
    "check_calibrated",
    "conv_general_dilated",
    "convert",
    "dot_general",
    "fold_batch_norm",
    "linen",
    "promote_dtype",
]

if TYPE_CHECKING:
    from . import nnx as nnx
else:  # hidden from type checkers, which would otherwise accept every attribute

    def __getattr__(name: str) -> Any:
        """Import `nnx` when it is first used (PEP 562)."""
        if name != "nnx":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", __name__)

    def __dir__() -> list[str]:
        """Return the public names, with `nnx`."""
        return sorted([*__all__, "nnx"])
