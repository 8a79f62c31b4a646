"""Loading of ONNX models: checks of files, graphs as functions, fusing, and the operators."""

from . import operators
from .function import LoadedFunction, load
from .fused_graph import Deviation, FusionWarning

__all__ = ["Deviation", "FusionWarning", "LoadedFunction", "load", "operators"]
