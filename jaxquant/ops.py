"""All operators of ONNX and ONNX Runtime, and oneDNN's dynamic dequantization: plain arrays and explicit scales.

The operators that ONNX and oneDNN define are names of the root, too: `jaxquant.ops.quantize_linear` is
`jaxquant.quantize_linear`. Those that only ONNX Runtime defines, in its domain com.microsoft, are here alone. oneDNN's
other operators have names of their own in `jaxquant.onednn`.
"""

from ._onnx_ops.conv_integer import conv_integer
from ._onnx_ops.dequantize_linear import dequantize_linear
from ._onnx_ops.dynamic_quantize_linear import DynamicQuantizeLinearOutput, dynamic_quantize_linear
from ._onnx_ops.dynamic_quantize_matmul import dynamic_quantize_matmul
from ._onnx_ops.matmul_integer import matmul_integer
from ._onnx_ops.matmul_integer_to_float import matmul_integer_to_float
from ._onnx_ops.matmul_nbits import matmul_nbits
from ._onnx_ops.microsoft.qlinear_add import qlinear_add
from ._onnx_ops.microsoft.qlinear_average_pool import qlinear_average_pool
from ._onnx_ops.microsoft.qlinear_concat import qlinear_concat
from ._onnx_ops.microsoft.qlinear_global_average_pool import qlinear_global_average_pool
from ._onnx_ops.microsoft.qlinear_leaky_relu import qlinear_leaky_relu
from ._onnx_ops.microsoft.qlinear_mul import qlinear_mul
from ._onnx_ops.microsoft.qlinear_reduce_mean import qlinear_reduce_mean
from ._onnx_ops.microsoft.qlinear_sigmoid import qlinear_sigmoid
from ._onnx_ops.microsoft.qlinear_softmax import qlinear_softmax
from ._onnx_ops.microsoft.qlinear_where import qlinear_where
from ._onnx_ops.qlinear_conv import qlinear_conv
from ._onnx_ops.qlinear_matmul import qlinear_matmul
from ._onnx_ops.quantize_linear import quantize_linear
from .onednn import dynamic_dequantize

__all__ = [  # noqa: RUF022 as grouped
    # ONNX and oneDNN.
    "quantize_linear",
    "dequantize_linear",
    "dynamic_quantize_linear",
    "DynamicQuantizeLinearOutput",
    "dynamic_dequantize",
    "matmul_integer",
    "qlinear_matmul",
    "conv_integer",
    "qlinear_conv",
    # ONNX Runtime: contractions of quantized matrices.
    "dynamic_quantize_matmul",
    "matmul_integer_to_float",
    "matmul_nbits",
    # ONNX Runtime: codes in, codes out.
    "qlinear_add",
    "qlinear_mul",
    "qlinear_average_pool",
    "qlinear_global_average_pool",
    "qlinear_reduce_mean",
    "qlinear_concat",
    "qlinear_where",
    "qlinear_sigmoid",
    "qlinear_leaky_relu",
    "qlinear_softmax",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
