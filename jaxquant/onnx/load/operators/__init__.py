"""The operators that can be loaded, by family; importing this package fills the table."""

from . import (
    activations,
    attention,
    control_flow,
    elementwise,
    indexing,
    microsoft,
    neural,
    normalization,
    quantized,
    recurrent,
    reductions,
    resampling,
    shapes,
    signal,
)

__all__ = [
    "activations",
    "attention",
    "control_flow",
    "elementwise",
    "indexing",
    "microsoft",
    "neural",
    "normalization",
    "quantized",
    "recurrent",
    "reductions",
    "resampling",
    "shapes",
    "signal",
]
