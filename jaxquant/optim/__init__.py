"""Optimizer states in 8 bits: a wrapper of any optax transformation."""

from .codebooks import dynamic, logarithmic
from .quantize_state import LeafRow, QuantizedState, StateReport, describe_state, quantize_state

__all__ = [
    "LeafRow",
    "QuantizedState",
    "StateReport",
    "describe_state",
    "dynamic",
    "logarithmic",
    "quantize_state",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
