"""Quantization in JAX with the integers of ONNX Runtime and oneDNN, bit for bit.

`jaxquant.flax` and `jaxquant.checkpoint` are imported when they are first used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import integer as integer
from . import onednn as onednn
from ._arrays.codebook import CodeBook as CodeBook
from ._arrays.codebook import nf4 as nf4
from ._arrays.concatenate import concatenate as concatenate
from ._arrays.error_metrics import QuantizationError as QuantizationError
from ._arrays.error_metrics import quantization_error as quantization_error
from ._arrays.onnx_view import OnnxView as OnnxView
from ._arrays.onnx_view import from_onnx as from_onnx
from ._arrays.onnx_view import onnx_view as onnx_view
from ._arrays.quantize import quantize as quantize
from ._arrays.quantized_array import QuantizedArray as QuantizedArray
from ._arrays.spec import QuantSpec as QuantSpec
from ._contractions.conv import conv_general_dilated as conv_general_dilated
from ._contractions.dot import dot_general as dot_general
from ._contractions.dot import matmul as matmul
from ._contractions.einsum import einsum as einsum
from ._contractions.take import take as take
from ._core.granularity import Blocked as Blocked
from ._core.granularity import PerAxis as PerAxis
from ._core.granularity import PerFeature as PerFeature
from ._core.granularity import PerTensor as PerTensor
from ._core.granularity import PerToken as PerToken
from ._onnx_ops.conv_integer import conv_integer as conv_integer
from ._onnx_ops.dequantize_linear import dequantize_linear as dequantize_linear
from ._onnx_ops.dynamic_quantize_linear import DynamicQuantizeLinearOutput as DynamicQuantizeLinearOutput
from ._onnx_ops.dynamic_quantize_linear import dynamic_quantize_linear as dynamic_quantize_linear
from ._onnx_ops.dynamic_quantize_matmul import dynamic_quantize_matmul as dynamic_quantize_matmul
from ._onnx_ops.matmul_integer import matmul_integer as matmul_integer
from ._onnx_ops.matmul_integer_to_float import matmul_integer_to_float as matmul_integer_to_float
from ._onnx_ops.matmul_nbits import matmul_nbits as matmul_nbits
from ._onnx_ops.qlinear_conv import qlinear_conv as qlinear_conv
from ._onnx_ops.qlinear_matmul import qlinear_matmul as qlinear_matmul
from ._onnx_ops.quantize_linear import quantize_linear as quantize_linear
from ._training.backward import FloatBackward as FloatBackward
from ._training.backward import Int8Backward as Int8Backward
from ._training.contraction_vjp import save_codes as save_codes
from ._training.conv_general_dilated import quantized_conv_general_dilated as quantized_conv_general_dilated
from ._training.dot_general import quantized_dot_general as quantized_dot_general
from ._training.dynamic_fake_quantize_linear import dynamic_fake_quantize_linear as dynamic_fake_quantize_linear
from ._training.einsum import quantized_einsum as quantized_einsum
from ._training.estimators import LSQ as LSQ
from ._training.estimators import PACT as PACT
from ._training.estimators import LSQPlus as LSQPlus
from ._training.estimators import StochasticRounding as StochasticRounding
from ._training.estimators import StraightThrough as StraightThrough
from ._training.fake_quantize import fake_quantize as fake_quantize
from ._training.fake_quantize_linear import fake_quantize_linear as fake_quantize_linear
from ._training.quantizer import Quantizer as Quantizer
from .calibration import Calibrator as Calibrator
from .calibration import Range as Range
from .calibration import absmax as absmax
from .calibration import entropy as entropy
from .calibration import minmax as minmax
from .calibration import moving_average as moving_average
from .calibration import mse as mse
from .calibration import percentile as percentile
from .onednn import dynamic_dequantize as dynamic_dequantize

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import flax as flax
else:  # type checkers would take every name for one that is there
    _LAZY = ("checkpoint", "flax")  # of these, flax needs a package that jaxquant does not depend on

    def __getattr__(name: str) -> Any:
        """Imports a module of jaxquant that is not imported with it (PEP 562)."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != name:  # something else is missing, and the error names it
                raise
            text = f'jaxquant.{name}: expected the package {name}: pip install "jaxquant[{name}]", got none installed'
            raise ModuleNotFoundError(text, name=name) from error

    def __dir__() -> list[str]:
        """Returns the public names, with flax only where it can be imported: tools take the value of every name."""
        available = [name for name in _LAZY if name != "flax" or importlib.util.find_spec(name) is not None]
        return sorted({*globals(), *available})
