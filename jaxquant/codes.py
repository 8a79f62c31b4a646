"""Operations between the contractions of an integer network: codes in, codes out.

They take and return `QuantizedArray`s of 8 bits, or in training `FakeQuantizedArray`s. `output=` says how a result is
quantized where it has a scale of its own. The contractions with `output=` (`jaxquant.matmul`, `dot_general`, `einsum`
and `conv_general_dilated`) and `jaxquant.concatenate`, which joins arrays of any dtype, are names of the root.
"""

from ._codes.arrangement import pad, reshape, transpose
from ._codes.bias import quantize_bias
from ._codes.elementwise import add, multiply, relu
from ._codes.fake_codes import FakeQuantizedArray
from ._codes.pooling import average_pool, max_pool, mean

__all__ = [
    "FakeQuantizedArray",
    "add",
    "average_pool",
    "max_pool",
    "mean",
    "multiply",
    "pad",
    "quantize_bias",
    "relu",
    "reshape",
    "transpose",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
