"""The operators that can be loaded, by family; importing this package fills the table."""

from . import (  # noqa: F401 as each fills the table
    activations,
    attention,
    control_flow,
    detection,
    elementwise,
    indexing,
    microsoft,
    microsoft_attention,
    neural,
    normalization,
    quantized,
    recurrent,
    reductions,
    resampling,
    shapes,
    signal,
)
