"""Flax Linen's layers with quantized weights and activations: same names, same arguments, same parameters."""

from .layers import Conv as Conv
from .layers import Dense as Dense
from .layers import DenseGeneral as DenseGeneral
from .layers import Einsum as Einsum
from .layers import Embed as Embed
