"""Quantization in JAX with the integers of ONNX Runtime and oneDNN, bit for bit."""

from . import onednn as onednn
from ._dequantize_linear import dequantize_linear as dequantize_linear
from ._dynamic_fake_quantize_linear import dynamic_fake_quantize_linear as dynamic_fake_quantize_linear
from ._dynamic_quantize_linear import DynamicQuantizeLinearOutput as DynamicQuantizeLinearOutput
from ._dynamic_quantize_linear import dynamic_quantize_linear as dynamic_quantize_linear
from ._fake_quantize_linear import fake_quantize_linear as fake_quantize_linear
from ._quantize_linear import quantize_linear as quantize_linear
from .onednn import dynamic_dequantize as dynamic_dequantize
