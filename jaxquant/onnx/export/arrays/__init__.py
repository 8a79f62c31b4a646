"""ONNX nodes of primitives that arrange elements, by family; importing this package fills the table."""

from . import gather, order, reductions, shapes, slices
from .moves import has_writer, write_moves

__all__ = ["gather", "has_writer", "order", "reductions", "shapes", "slices", "write_moves"]
