"""oneDNN Graph's four quantization operators, with oneDNN's arithmetic: a reciprocal multiply, the zero point added
before rounding. The integers differ from those of the ONNX operators."""

from .dequantize import dequantize as dequantize
from .dynamic_dequantize import dynamic_dequantize as dynamic_dequantize
from .dynamic_quantize import dynamic_quantize as dynamic_quantize
from .quantize import quantize as quantize
