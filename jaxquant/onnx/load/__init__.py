"""Loading of ONNX models: checks of files, graphs as functions, fusing, and the operators."""

from . import operators
from .check_file import check
from .limits import Limits
from .load import LoadedFunction, load

__all__ = ["Limits", "LoadedFunction", "check", "load", "operators"]
