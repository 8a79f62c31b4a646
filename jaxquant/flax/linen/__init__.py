"""Flax Linen's layers with quantized weights and activations: same names, same arguments, same parameters."""

from .attention import MultiHeadAttention, MultiHeadDotProductAttention
from .layers import Conv, Dense, DenseGeneral, Einsum, Embed

__all__ = [
    "Conv",
    "Dense",
    "DenseGeneral",
    "Einsum",
    "Embed",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
