"""The export of functions as ONNX models."""

from .model import export

__all__ = ["export"]
