"""Quantization in JAX that produces the same integers as ONNX Runtime and oneDNN, bit for bit.

The root has what most programs use. `jaxquant.ops` has all operators of ONNX and ONNX Runtime, `jaxquant.codes` the
operations between the contractions of an integer network, and `jaxquant.calibration` the calibrators.

`import jaxquant` imports quantized arrays, the operators of ONNX and JAX's functions over quantized arrays. All other
modules, and the names of training, attention and `jaxquant.transform`, are imported on first use.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._arrays.diagnostics import QuantizationError, count_saturating_pairs, quantization_error
from ._arrays.onnx_view import OnnxView, from_onnx, onnx_view
from ._arrays.quantize import quantize
from ._arrays.quantized_array import QuantizedArray
from ._arrays.spec import Codebook, QuantSpec, nf4
from ._contractions.conv import conv_general_dilated
from ._contractions.dot import dot_general, matmul
from ._contractions.einsum import einsum
from ._contractions.ragged import ragged_dot, ragged_dot_general
from ._contractions.take import take
from ._core.granularity import Blocked, PerAxis, PerFeature, PerTensor, PerToken
from ._onnx_ops.convolutions import conv_integer, qlinear_conv
from ._onnx_ops.matrix_products import matmul_integer, qlinear_matmul
from ._onnx_ops.quantization import (
    DynamicQuantizeLinearOutput,
    dequantize_linear,
    dynamic_quantize_linear,
    quantize_linear,
)

__all__ = [  # noqa: RUF022 as grouped
    # Operators of ONNX and oneDNN: plain arrays and an explicit scale.
    "quantize_linear",
    "dequantize_linear",
    "dynamic_quantize_linear",
    "DynamicQuantizeLinearOutput",
    "dynamic_dequantize",
    "matmul_integer",
    "qlinear_matmul",
    "conv_integer",
    "qlinear_conv",
    # Quantized arrays, and JAX's functions over them.
    "QuantizedArray",
    "QuantSpec",
    "Codebook",
    "nf4",
    "PerTensor",
    "PerAxis",
    "PerToken",
    "PerFeature",
    "Blocked",
    "quantize",
    "concatenate",
    "take",
    "matmul",
    "dot_general",
    "einsum",
    "ragged_dot",
    "ragged_dot_general",
    "conv_general_dilated",
    "onnx_view",
    "from_onnx",
    "OnnxView",
    "quantization_error",
    "QuantizationError",
    "count_saturating_pairs",
    # Where a range comes from, in layers and in rules; and a range, as a calibrator finds it.
    "Dynamic",
    "Static",
    "Learned",
    "Range",
    # Floats in, floats out, with a gradient.
    "fake_quantize",
    "fake_quantize_linear",
    "dynamic_fake_quantize_linear",
    "Quantizer",
    "StraightThrough",
    "LSQ",
    "LSQPlus",
    "PACT",
    "StochasticRounding",
    "quantized_dot_general",
    "quantized_einsum",
    "quantized_conv_general_dilated",
    "FloatBackward",
    "Int8Backward",
    "Float8Backward",
    "AmaxHistory",
    "save_codes",
    # Attention, and the keys and values of a decoder.
    "KVCache",
    "attention",
    "quantized_dot_product_attention",
    # Functions that were not written for quantization.
    "prepare",
    "Prepared",
    "QuantizedTree",
    "TrainableTree",
    "Rule",
    "Weight",
    "Activation",
    "recipes",
    # Modules.
    "calibration",
    "codes",
    "integer",
    "onednn",
    "ops",
    "transform",
]

if TYPE_CHECKING:
    from . import calibration as calibration
    from . import checkpoint as checkpoint
    from . import codes as codes
    from . import distributed as distributed
    from . import flax as flax
    from . import integer as integer
    from . import lora as lora
    from . import onednn as onednn
    from . import onnx as onnx
    from . import ops as ops
    from . import optim as optim
    from . import ptq as ptq
    from . import report as report
    from . import train as train
    from . import transform as transform
    from ._attention.attention import attention
    from ._attention.dot_product_attention import quantized_dot_product_attention
    from ._attention.kv_cache import KVCache
    from ._codes.arrangement import concatenate
    from ._training.backward_choices import Float8Backward, FloatBackward, Int8Backward
    from ._training.contraction_vjp import save_codes
    from ._training.conv_general_dilated import quantized_conv_general_dilated
    from ._training.dot_general import quantized_dot_general
    from ._training.einsum import quantized_einsum
    from ._training.estimators import LSQ, PACT, LSQPlus, StochasticRounding, StraightThrough
    from ._training.fake_quantize import AmaxHistory, Quantizer, fake_quantize
    from ._training.fake_quantize_linear import dynamic_fake_quantize_linear, fake_quantize_linear
    from ._training.range_sources import Dynamic, Learned, Static
    from .calibration import Range
    from .onednn import dynamic_dequantize
    from .transform import Activation, Prepared, QuantizedTree, Rule, TrainableTree, Weight, prepare, recipes

    __version__: str
else:  # type checkers would take every name for one that is there
    _LAZY = (
        "calibration", "checkpoint", "codes", "distributed", "flax", "integer", "lora", "onednn", "onnx", "ops",
        "optim", "ptq", "report", "train", "transform",
    )  # fmt: skip
    _NEEDED_PACKAGES = {"flax": "flax", "onnx": "onnx", "optim": "optax"}  # which jaxquant does not depend on
    _LAZY_NAMES = {
        "._attention.attention": "attention",
        "._attention.dot_product_attention": "quantized_dot_product_attention",
        "._attention.kv_cache": "KVCache",
        "._codes.arrangement": "concatenate",
        "._training.contraction_vjp": "save_codes",
        "._training.conv_general_dilated": "quantized_conv_general_dilated",
        "._training.dot_general": "quantized_dot_general",
        "._training.einsum": "quantized_einsum",
        "._training.estimators": "LSQ PACT LSQPlus StochasticRounding StraightThrough",
        "._training.fake_quantize": "AmaxHistory Quantizer fake_quantize",
        "._training.fake_quantize_linear": "dynamic_fake_quantize_linear fake_quantize_linear",
        "._training.backward_choices": "Float8Backward FloatBackward Int8Backward",
        "._training.range_sources": "Dynamic Learned Static",
        ".calibration": "Range",
        ".onednn": "dynamic_dequantize",
        ".transform": "Activation Prepared QuantizedTree Rule TrainableTree Weight prepare recipes",
    }
    _MODULE_BY_NAME = {name: module for module, names in _LAZY_NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        """Imports a module of jaxquant that is not imported with it, or a name in one (PEP 562)."""
        if name in _MODULE_BY_NAME:
            value = getattr(importlib.import_module(_MODULE_BY_NAME[name], __name__), name)
            globals()[name] = value  # the next access finds it without this function
            return value
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version(__name__)
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            package = _NEEDED_PACKAGES.get(name)
            if error.name != package:  # something else is missing, and the error names it
                raise
            text = (
                f'jaxquant.{name}: expected the package {package}: pip install "jaxquant[{name}]", got none installed'
            )
            raise ModuleNotFoundError(text, name=package) from error

    def __dir__() -> list[str]:
        """Returns the public names; those that need a package only where it is, because tools read every name."""
        missing = [name for name, package in _NEEDED_PACKAGES.items() if importlib.util.find_spec(package) is None]
        return sorted([*__all__, *(name for name in _LAZY if name not in missing)])
