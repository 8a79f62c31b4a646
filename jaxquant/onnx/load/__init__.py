"""Loading of ONNX models: checks of files, graphs as functions, fusing, and the operators."""

from . import operators
from .check_file import check
from .deviations import Deviation, FusionWarning
from .function import LoadedFunction, load
from .limits import Limits

__all__ = ["Deviation", "FusionWarning", "Limits", "LoadedFunction", "check", "load", "operators"]
