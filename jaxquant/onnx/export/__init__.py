"""The export of functions as ONNX models."""

from .model import export, save

__all__ = ["export", "save"]
