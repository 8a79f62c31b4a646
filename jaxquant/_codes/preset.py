"""The specs of the layers that ONNX Runtime fuses to integer kernels."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from .._arrays.spec import QuantSpec
from .._core.granularity import PerFeature

# Symmetric weights need no correction of the sums. ONNX Runtime has no integer convolution of int8 activations for
# x86-64, and codes with the zero point 0 for positive values make a relu part of the quantization.
RUNTIME: Mapping[str, Any] = types.MappingProxyType(
    {
        "weight_spec": QuantSpec("int8", PerFeature()),
        "activation_spec": QuantSpec("uint8"),
        "output_spec": QuantSpec("uint8"),
    }
)
