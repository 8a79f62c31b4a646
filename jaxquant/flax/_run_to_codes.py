"""Layers whose result is codes, or whose bias is int32: how they train and serve."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays.quantized_array import QuantizedArray
from .._codes.arrangement import reshape
from .._codes.bias import quantize_added_bias, quantize_bias
from .._codes.carrier import FakeQuantizedArray, finish_training, read_fake, replace_value
from .._codes.elementwise import relu
from .._contractions.output import make_array, read_output
from .._core import checks, rounding
from .._core.affine import quantize_affine
from .._core.granularity import PerTensor
from .._training.backward import Backward
from .._training.quantizer import Quantizer
from ._layer_operand import LayerOperand, Quantization
from ._operand_quantizer import encode_operand, quantize_operand
from ._operations import Call, Operation, Variables, make_layer_quantizer, resolve_features, run_operation
from .ranges import Dynamic


class Relay:
    """What a layer passes to its contraction past flax's own layer, which knows only arrays of floats.

    Attributes:
        x: the inputs if they are codes, or None.
        bias: the bias, or None.
        result: the result of the contraction, once it has run.
    """

    def __init__(self, x: Any, bias: Any = None) -> None:
        self.x, self.bias = x, bias
        self.result: Any = None

    def insert_codes(self, call: Call) -> Call:
        """Return a call with the codes in place of the floats that flax's layer passed."""
        if self.x is None:
            return call
        expected = "VALID, SAME or pairs of ints, because codes are not padded by flax (jq.codes.pad pads them)"
        is_same = math.prod(self.x.shape) == math.prod(call.x.shape)
        checks.require(is_same, "flax", "padding", expected, f"shape {call.x.shape} of inputs {self.x.shape}")
        return call._replace(x=self.x if self.x.shape == call.x.shape else reshape(self.x, call.x.shape))

    def find_result(self, y: jax.Array, quantization: Quantization) -> Any:
        """Return the result of a layer, for the floats that flax's layer returned."""
        if quantization.output_spec is None and not quantization.integer_bias:
            return y  # flax has added the bias
        return self.result if self.result.shape == y.shape else reshape(self.result, y.shape)


class _Operands(NamedTuple):
    """The operands of a layer as codes, and its bias in steps of the product of their scales."""

    x: QuantizedArray
    kernel: QuantizedArray
    bias: Any


def is_codes(x: Any) -> bool:
    """Return whether inputs are codes, or floats that carry codes in training."""
    return isinstance(x, QuantizedArray | FakeQuantizedArray)


def needs_codes(quantization: Quantization, x: Any) -> bool:
    """Return whether a layer runs `run_to_codes` on these inputs."""
    return quantization.output_spec is not None or quantization.integer_bias or is_codes(x)


def make_stand_in(x: Any) -> jax.Array:
    """Return floats of the shape of x for flax's own layer, which computes nothing with them that is used."""
    if isinstance(x, FakeQuantizedArray):
        return x.values
    return jnp.zeros(x.shape, jnp.float32) if isinstance(x, QuantizedArray) else x


def run_to_codes(
    operation: Operation, variables: Variables, quantization: Quantization, backward: Backward, call: Call, bias: Any
) -> Any:
    """Return the result of an operation whose bias is int32: codes if the layer has an output spec, otherwise floats.

    In training, the result is the same with a gradient: a FakeQuantizedArray, or floats.

    Args:
        operation: a row of the table.
        variables: the layer.
        quantization: the arguments of the layer.
        backward: how to contract gradients.
        call: the operands and the static arguments; x may be codes.
        bias: the float bias, or None. Without an output spec and without `integer_bias` it is added by flax.

    Raises:
        ContractValueError: after the path of the layer: as in `run_operation`.
        ContractTypeError: after the path of the layer: as in `run_operation`, or the activations stay in floats.
    """
    with checks.prefix_errors(variables.find_place()):
        weight, activation = variables.find_operands()
        weight, output = resolve_features(weight, operation.find_output_axes(call)), quantization.find_output()
        is_float = output is None and not quantization.integer_bias
        activation = None if is_codes(call.x) else activation
        _check_operands(weight, activation, call, is_float)
        # Sums are scaled in float32; floats are then rounded once to the dtype of the layer.
        dtype = jnp.dtype(call.arguments["preferred_element_type"])
        call = call._replace(arguments={**call.arguments, "preferred_element_type": jnp.float32})
        bias = None if is_float or bias is None else jnp.asarray(bias, jnp.float32)
        if isinstance(call.kernel, QuantizedArray):
            y = _serve(operation, variables, weight, activation, output, call, bias, quantization.output_relu)
        else:
            y = _train(operation, variables, weight, activation, output, call, bias, quantization, backward)
        return y if output is not None else rounding.round_to_dtype(y, dtype).astype(dtype)


def run_lookup(
    operation: Operation, variables: Variables, quantization: Quantization, backward: Backward, call: Call
) -> Any:
    """Return rows of a table: codes if the layer has an output spec, otherwise floats.

    In training, codes are a FakeQuantizedArray.

    Args:
        operation: the lookup.
        variables: the layer.
        quantization: the arguments of the layer.
        backward: how to contract gradients.
        call: the operands.

    Raises:
        ContractValueError: after the path of the layer: as in `run_operation`.
    """
    rows, output = run_operation(operation, variables, backward, call), quantization.find_output()
    if output is None:
        return rows
    with checks.prefix_errors(variables.find_place()):
        rows = rows.astype(jnp.float32)
        rows = jax.nn.relu(rows) if quantization.output_relu else rows
        if isinstance(call.kernel, QuantizedArray):
            return _encode_result(Quantizer(output.spec, *variables.read_constants(output)), rows)
        quantizer = make_layer_quantizer(variables, output, rows)
        assert quantizer is not None
        return finish_training(rows, quantizer, _encode_result(jax.lax.stop_gradient(quantizer), rows))


def _encode_result(quantizer: Quantizer, y: jax.Array) -> QuantizedArray:
    """Return the codes of a result in floats."""
    y = jax.lax.stop_gradient(y)
    affine = read_output("flax", quantizer)
    codes = quantize_affine(y, jnp.asarray(affine.scale), affine.make_steps(), PerTensor(), affine.dtype, jnp.float32)
    return make_array(codes, affine, jnp.float32)


def _check_operands(weight: LayerOperand, activation: LayerOperand | None, call: Call, is_float: bool) -> None:
    """Check that a layer contracts codes with codes."""
    if is_float or is_codes(call.x):
        return
    expected = "a QuantSpec, or inputs that are codes, because of output_spec or integer_bias"
    checks.require_type(activation is not None, "flax", "activation_spec", expected, "None")
    assert activation is not None
    expected = "PerTensor(), because of output_spec or integer_bias"
    is_single = activation.spec.granularity == activation.spec.zero_point_granularity == PerTensor()
    checks.require(is_single, "flax", "activation_spec", expected, activation.spec.granularity)


def _serve(
    operation: Operation, variables: Variables, weight: LayerOperand, activation: LayerOperand | None,
    output: LayerOperand | None, call: Call, bias: Any, has_relu: bool,
) -> Any:  # fmt: skip
    """Return the result with a converted kernel."""
    variables.check_converted(weight, activation, call.kernel)
    x: Any = call.x.quantize() if isinstance(call.x, FakeQuantizedArray) else call.x
    if activation is not None:
        is_dynamic = isinstance(activation.source, Dynamic)
        x = quantize_operand(activation, x, None if is_dynamic else variables.read_constants(activation))
    quantizer = None if output is None else Quantizer(output.spec, *variables.read_constants(output))
    return _contract(operation, call, _Operands(x, call.kernel, bias), quantizer, has_relu)


def _contract(
    operation: Operation, call: Call, operands: _Operands, quantizer: Quantizer | None, has_relu: bool
) -> Any:
    """Return the contraction of codes, with the float bias rounded to int32."""
    call, bias = call._replace(x=operands.x, kernel=operands.kernel), operands.bias
    if bias is not None:
        bias, kernel, scale = jax.lax.stop_gradient(bias), operands.kernel, operation.arrange_scale(call)
        features = [axis for axis, n in enumerate(kernel.scale.shape) if n != 1]
        if kernel.block_size is None and math.prod(kernel.shape[axis] for axis in features) == bias.size > 1:
            bias = quantize_added_bias("flax", bias, operands.x.scale, kernel, scale, features)
        else:  # a scale for all features, whose sums are not told apart
            bias = quantize_bias(bias, operands.x.scale, scale)
    y = operation.serve(call, bias=bias, output=quantizer)
    return relu(y) if has_relu else y


def _train(
    operation: Operation, variables: Variables, weight: LayerOperand, activation: LayerOperand | None,
    output: LayerOperand | None, call: Call, bias: Any, quantization: Quantization, backward: Backward,
) -> Any:  # fmt: skip
    """Return the result with a float kernel, and a gradient."""
    stored_axes = operation.find_stored_axes(call)
    variables.record_operands(weight, activation, call.kernel, stored_axes)
    if is_codes(call.x):
        fake = read_fake(call.x)
        x, codes, x_quantizer = fake.values, fake.quantize(), fake.make_quantizer()
    else:
        x = call.x
        x_quantizer = make_layer_quantizer(variables, activation, x)
        assert x_quantizer is not None
        codes = encode_operand("activation", x_quantizer, x)
    kernel_quantizer = make_layer_quantizer(variables, weight, call.kernel)
    assert kernel_quantizer is not None
    # The gradient is that of the layer with a float epilogue. Its value is replaced by that of the integer program.
    gradients = {"backward": backward, "key": variables.make_key()}
    y = operation.train(call._replace(x=x), (x_quantizer, kernel_quantizer), gradients)
    y = y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)
    y = jax.nn.relu(y) if quantization.output_relu else y
    quantizer = make_layer_quantizer(variables, output, y)
    fixed = None if quantizer is None else jax.lax.stop_gradient(quantizer)
    kernel = encode_operand("weight", kernel_quantizer, call.kernel)
    exact = _contract(operation, call, _Operands(codes, kernel, bias), fixed, quantization.output_relu)
    if quantizer is None:
        return replace_value(y, exact)
    return finish_training(y, quantizer, exact)
