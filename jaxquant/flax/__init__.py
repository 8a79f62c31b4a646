"""Flax layers that train, convert and serve. It needs flax, the extra `flax`; `nnx` is imported when it is first used.

The functions here are for Linen modules; `nnx` has its own.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import linen
from ._fold_batch_norm import fold_batch_norm
from .linen.calibrate import calibrate, check_calibrated
from .linen.contraction import promote_dtype
from .linen.convert import convert
from .linen.hooks import conv_general_dilated, dot_general
from .ranges import Dynamic, Learned, Observed

__all__ = [
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
else:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """Imports `nnx` (PEP 562)."""
        if name != "nnx":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f".{name}", __name__)

    def __dir__() -> list[str]:
        """Returns the public names, with `nnx`."""
        return sorted([*__all__, "nnx"])
