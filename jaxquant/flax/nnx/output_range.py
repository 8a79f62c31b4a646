"""The range of a result that no layer computes, such as the sum of two branches."""

from __future__ import annotations

from typing import Any

import jax

from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.quantizer import Quantizer
from .. import _layer_operand
from .._layer_operand import LayerOperand, Quantization
from .._operand_quantizer import make_quantizer
from ..ranges import Observed, Source
from .contraction import Contraction

_NAME = "flax.nnx.OutputRange"


class OutputRange(Contraction):
    """How the result of an operation on codes is quantized: the `output` of `jq.codes.add` and the like in a network.

    It finds the range of the result in training, as a layer with an output_spec does, and `convert` makes it constant.

    Args:
        spec: How to quantize, a QuantSpec of int8 or uint8 per tensor.
        source: `Observed()` is a static range, which `calibrate` finds; `Learned()` trains it.
        relu: Whether negative results become 0: the range begins at 0.
        use_running_average: Whether the range is only read, not updated.

    Raises:
        TypeError: At construction: an argument has a wrong type, or the spec another dtype.
        ValueError: At construction: the spec has several scales or a narrow range. At a call: the range has seen no
            data, or the state was converted with another spec.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> spec = jq.QuantSpec(jnp.uint8)
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         specs = {"weight_spec": jq.QuantSpec(jnp.int8), "activation_spec": spec, "output_spec": spec}
        ...         self.layer = qnnx.Linear(3, 2, **specs, rngs=rngs)
        ...         self.sum = qnnx.OutputRange(spec, relu=True)
        ...     def __call__(self, x):
        ...         return jq.codes.add(self.layer(x), self.layer(x), output=self.sum)
        >>> block, x = Block(nnx.Rngs(0)), jnp.array([[-1.0, 0.5, 2.0]])
        >>> qnnx.calibrate(block, [x])
        >>> qnnx.convert(block)(x)
        QuantizedArray(uint8[1,2], scale=float32[1,1], zero_point=uint8[1,1], dtype=float32, nbytes=7)
    """

    def __init__(
        self, spec: QuantSpec, source: Source = Observed(), relu: bool = False, *, use_running_average: bool = False
    ) -> None:  # fmt: skip
        is_spec = isinstance(spec, QuantSpec)
        checks.require_type(is_spec, _NAME, "spec", "a QuantSpec", checks.describe_value(spec))
        quantization = Quantization(spec, output_spec=spec, output_range=source, output_relu=relu)
        _layer_operand.check_output(_NAME, quantization)
        super().__init__("OutputRange", quantization, use_running_average, None, None, None)

    def list_operands(self) -> list[LayerOperand]:
        """Return the result."""
        output = self.quantization.find_output()
        assert output is not None
        return [output]

    @property
    def spec(self) -> QuantSpec:
        """How to quantize."""
        return self.list_operands()[0].spec

    def find_quantizer(self, y: jax.Array) -> Quantizer:
        """Return the Quantizer of a result in floats, after an update of the range by it if it is due."""
        (operand,) = self.list_operands()
        y = jax.nn.relu(y) if self.quantization.output_relu else y
        with checks.prefix_errors(self.layer):
            return make_quantizer(operand, y, self.read_range(operand, y))

    @property
    def scale(self) -> jax.Array:
        """The converted scale."""
        with checks.prefix_errors(self.layer):
            self.check_description()
            return self.read_constants(self.list_operands()[0])[0]

    @property
    def zero_point(self) -> Any:
        """The converted zero point, or None."""
        with checks.prefix_errors(self.layer):
            return self.read_constants(self.list_operands()[0])[1]
