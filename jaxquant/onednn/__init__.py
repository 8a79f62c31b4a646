"""oneDNN Graph's four quantization operators, with oneDNN's arithmetic.

oneDNN multiplies by the reciprocal of the scale and adds the zero point before rounding. The integers therefore differ
from those of the ONNX operators.
"""

from ._quantization import dequantize, dynamic_dequantize, dynamic_quantize, quantize

__all__ = ["dequantize", "dynamic_dequantize", "dynamic_quantize", "quantize"]


def __dir__() -> list[str]:
    return __all__
