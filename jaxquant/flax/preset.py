"""The specs of the layers that ONNX Runtime fuses to integer kernels."""

from __future__ import annotations

from typing import TypedDict

from .._arrays.spec import QuantSpec
from .._core.granularity import PerFeature


class LayerSpecs(TypedDict):
    """The arguments of a layer that say how it quantizes."""

    weight_spec: QuantSpec
    activation_spec: QuantSpec
    output_spec: QuantSpec


# Symmetric weights need no correction of the sums. ONNX Runtime has no integer convolution of int8 activations for
# x86-64, and codes with the zero point 0 for positive values make a relu part of the quantization. Weights of 7 bits
# have exact sums also on x86-64 without VNNI.
RUNTIME: LayerSpecs = {
    "weight_spec": QuantSpec("int8", PerFeature(), reduce_range=True),
    "activation_spec": QuantSpec("uint8"),
    "output_spec": QuantSpec("uint8"),
}
"""The arguments of layers that ONNX Runtime fuses to integer kernels on x86-64.

The weights are int8 of 7 bits with one scale for each output feature, symmetric. The activations and the results are
uint8, asymmetric. With an `output_spec`, a layer's bias is int32. Use it as `qnn.Conv(64, (3, 3), **jq.flax.RUNTIME)`.
"""
