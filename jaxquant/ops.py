"""All operators of ONNX and ONNX Runtime, and oneDNN's dynamic dequantization: plain arrays and explicit scales.

The operators that ONNX and oneDNN define are names of the root, too: `jaxquant.ops.quantize_linear` is
`jaxquant.quantize_linear`. Those that only ONNX Runtime defines, in its domain com.microsoft, are here alone. oneDNN's
other operators have names of their own in `jaxquant.onednn`.
"""

from ._onnx_ops.activations import qlinear_leaky_relu, qlinear_sigmoid, qlinear_softmax
from ._onnx_ops.arithmetic import qlinear_add, qlinear_mul
from ._onnx_ops.convolutions import conv_integer, qlinear_conv
from ._onnx_ops.gather_block_quantized import gather_block_quantized
from ._onnx_ops.matmul_nbits import matmul_nbits
from ._onnx_ops.matrix_products import dynamic_quantize_matmul, matmul_integer, matmul_integer_to_float, qlinear_matmul
from ._onnx_ops.pooling import qlinear_average_pool, qlinear_global_average_pool, qlinear_reduce_mean
from ._onnx_ops.quantization import (
    DynamicQuantizeLinearOutput,
    dequantize_linear,
    dynamic_quantize_linear,
    quantize_linear,
)
from ._onnx_ops.selection import qlinear_concat, qlinear_where
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
    # ONNX Runtime: a table of codes.
    "gather_block_quantized",
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
