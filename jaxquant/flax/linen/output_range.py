"""The range of a result that no layer computes, such as the sum of two branches."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.quantizer import Quantizer
from .. import _layer_operand
from .._layer_operand import LayerOperand
from .._operand_quantizer import make_quantizer
from ..ranges import Observed, Source
from .contraction import RANGES, RangeModule
from .record import NAME, Record

_NAME = "flax.linen.OutputRange"


class OutputRange(RangeModule):
    """How the result of an operation on codes is quantized: the `output` of `jq.codes.add` and the like in a network.

    It finds the range of the result in training, as a layer with an output_spec does, and `jq.flax.convert` makes it
    constant.

    Attributes:
        spec: How to quantize, a QuantSpec of int8 or uint8 per tensor.
        source: `Observed()` (the default) is a static range, which `jq.flax.calibrate` finds; `Learned()` trains it.
        relu: Whether negative results become 0: the range begins at 0.

    Raises:
        TypeError: At construction: an argument has a wrong type, or the spec another dtype.
        ValueError: At construction: the spec has several scales or a narrow range. At a call: the range has seen no
            data, or the variables were made with another spec.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from flax import linen as nn
        >>> from jaxquant.flax import linen as qnn
        >>> spec = jq.QuantSpec(jnp.uint8)
        >>> class Block(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         layer = qnn.Dense(2, weight_spec=jq.QuantSpec(jnp.int8), activation_spec=spec, output_spec=spec)
        ...         return jq.codes.add(layer(x), layer(x), output=qnn.OutputRange(spec, relu=True))
        >>> x = jnp.array([[-1.0, 0.5, 2.0]])
        >>> variables = jq.flax.calibrate(Block(), Block().init(jax.random.key(0), x), [x])
        >>> Block().apply(jq.flax.convert(Block(), variables), x)
        QuantizedArray(uint8[1,2], scale=float32[1,1], zero_point=uint8[1,1], dtype=float32, nbytes=7)
    """

    spec: QuantSpec
    source: Source = Observed()
    relu: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        arguments = {"output_spec": self.spec, "output_range": self.source, "output_relu": self.relu}
        is_spec = isinstance(self.spec, QuantSpec)
        checks.require_type(is_spec, _NAME, "spec", "a QuantSpec", checks.describe_value(self.spec))
        _layer_operand.check_output(_NAME, _layer_operand.Quantization(self.spec, **arguments))

    @nn.nowrap
    def make_operand(self) -> LayerOperand:
        """Return how the result is quantized."""
        return LayerOperand(self.spec, self.source, "output")

    @nn.compact
    def find_quantizer(self, y: jax.Array) -> Quantizer:
        """Return the Quantizer of a result in floats, and update the range by it where its collection is mutable."""
        operand, y = self.make_operand(), jax.nn.relu(y) if self.relu else y
        with checks.prefix_errors("/".join(self.path) or type(self).__name__):
            if self.is_mutable_collection(RANGES):
                self.put_variable(RANGES, NAME, Record(None, None, "", (), None, True, output=operand))
            recorded = getattr(self._read(RANGES, NAME), "output", operand)
            is_same = _layer_operand.is_alike(operand, recorded)
            checks.require(is_same, _NAME, "spec", f"what the variables were made with: {recorded}", operand)
            return make_quantizer(operand, y, self.read_range(operand, y))

    @property
    def scale(self) -> jax.Array:
        """The converted scale."""
        with checks.prefix_errors("/".join(self.path) or type(self).__name__):
            stored = self._read(RANGES, "output_spec")
            text = _layer_operand.describe_converted(self.make_operand())
            converted = getattr(stored, "text", text)
            checks.require(
                text == converted, _NAME, "spec", f"what the variables were converted with: {converted}", text
            )
            return self.read_constants(self.make_operand())[0]

    @property
    def zero_point(self) -> Any:
        """The converted zero point, or None."""
        return self.read_constants(self.make_operand())[1]
