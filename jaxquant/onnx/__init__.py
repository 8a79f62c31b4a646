"""ONNX models as JAX functions: `load` reads a model, `check` examines a file that may be damaged or hostile.

This module needs the package onnx, which `pip install "jaxquant[onnx]"` installs.
"""

from .errors import ModelError
from .load import Limits, LoadedFunction, check, load

__all__ = ["Limits", "LoadedFunction", "ModelError", "check", "load"]


def __dir__() -> list[str]:
    return __all__
