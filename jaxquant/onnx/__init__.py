"""JAX functions as ONNX models, and ONNX models as JAX functions, with the same integers.

`export` makes a model, `save` writes it, `verify` compares it with the function in ONNX Runtime. `load` reads a model,
`check` examines a file that may be damaged or hostile, `quantize` makes an integer model of a float one.
`find_saturating_products` tells whether a model gives the same integers on every processor, and `make_session` opens
one that does. This module needs the package onnx, which `pip install "jaxquant[onnx]"` installs.
"""

from .export import export
from .limits import Limits, ModelError
from .load import Deviation, FusionWarning, LoadedFunction, load
from .model_file import check, save
from .quantization.recipes import quantize
from .quantization.report import NodeRow, QuantizationReport
from .saturation import SaturatingProduct, SaturationWarning, convert_weights_to_uint8, find_saturating_products
from .session import make_session, probe_saturation
from .verify import VerificationReport, verify

__all__ = [
    "Deviation",
    "FusionWarning",
    "Limits",
    "LoadedFunction",
    "ModelError",
    "NodeRow",
    "QuantizationReport",
    "SaturatingProduct",
    "SaturationWarning",
    "VerificationReport",
    "check",
    "convert_weights_to_uint8",
    "export",
    "find_saturating_products",
    "load",
    "make_session",
    "probe_saturation",
    "quantize",
    "save",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
