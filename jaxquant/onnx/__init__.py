"""ONNX models of JAX functions, with the same integers."""

from .export import export, save
from .verify import Report, verify

__all__ = ["Report", "export", "save", "verify"]
