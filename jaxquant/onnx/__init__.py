"""JAX functions as ONNX models, and ONNX models as JAX functions, with the same integers.

`export` makes a model, `save` writes it, `verify` compares it with the function in ONNX Runtime. `load` reads a model,
`check` examines a file that may be damaged or hostile. This module needs the package onnx, which
`pip install "jaxquant[onnx]"` installs.
"""

from .errors import ModelError
from .export import export, save
from .load import Deviation, FusionWarning, Limits, LoadedFunction, check, load
from .verify import Report, verify

__all__ = [
    "Deviation", "FusionWarning", "Limits", "LoadedFunction", "ModelError", "Report", "check", "export", "load", "save",
    "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
