"""ONNX nodes of primitives that arrange elements, by family; importing this package fills the table."""

from . import gather, order, reductions, shapes, slices

__all__ = ["gather", "order", "reductions", "shapes", "slices"]
