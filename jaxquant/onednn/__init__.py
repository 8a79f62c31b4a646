"""oneDNN Graph's four quantization operators, with oneDNN's arithmetic: a reciprocal multiply, the zero point added
before rounding. The integers differ from those of the ONNX operators."""

from ._dequantize import dequantize as dequantize
from ._dynamic_dequantize import dynamic_dequantize as dynamic_dequantize
from ._dynamic_quantize import dynamic_quantize as dynamic_quantize
from ._quantize import quantize as quantize
