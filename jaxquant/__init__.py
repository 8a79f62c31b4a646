"""Quantization in JAX with the integers of ONNX Runtime and oneDNN, bit for bit."""

from . import integer as integer
from . import onednn as onednn
from ._conv_integer import conv_integer as conv_integer
from ._dequantize_linear import dequantize_linear as dequantize_linear
from ._dynamic_fake_quantize_linear import dynamic_fake_quantize_linear as dynamic_fake_quantize_linear
from ._dynamic_quantize_linear import DynamicQuantizeLinearOutput as DynamicQuantizeLinearOutput
from ._dynamic_quantize_linear import dynamic_quantize_linear as dynamic_quantize_linear
from ._dynamic_quantize_matmul import dynamic_quantize_matmul as dynamic_quantize_matmul
from ._fake_quantize_linear import fake_quantize_linear as fake_quantize_linear
from ._matmul_integer import matmul_integer as matmul_integer
from ._matmul_integer_to_float import matmul_integer_to_float as matmul_integer_to_float
from ._matmul_nbits import matmul_nbits as matmul_nbits
from ._qlinear_conv import qlinear_conv as qlinear_conv
from ._qlinear_matmul import qlinear_matmul as qlinear_matmul
from ._quantize_linear import quantize_linear as quantize_linear
from .onednn import dynamic_dequantize as dynamic_dequantize
