"""Loading of ONNX models: checks of files, graphs as functions, fusing, and the operators."""

from . import operators
from .check_file import check
from .function import LoadedFunction, load
from .limits import Limits

__all__ = ["Limits", "LoadedFunction", "check", "load", "operators"]
