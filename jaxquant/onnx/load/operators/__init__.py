"""The operators that can be loaded, by family; importing this package fills the table."""

from . import (
    activations,
    elementwise,
    indexing,
    microsoft,
    neural,
    normalization,
    quantized,
    reductions,
    registry,
    shapes,
)

__all__ = [
    "activations",
    "elementwise",
    "indexing",
    "microsoft",
    "neural",
    "normalization",
    "quantized",
    "reductions",
    "registry",
    "shapes",
]
