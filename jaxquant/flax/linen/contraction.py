"""The Linen modules that contract: each runs a row of the table of operations and holds the variables of its ranges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from ..._arrays.quantize import find_parameters
from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks
from ..._training.backward import Int8Backward
from ...checkpoint.arrays import StaticText
from .. import _converted, _layer_operand, _learned, _observed, _operations
from .._layer_operand import LayerOperand, Operands, Quantization
from .._operations import Operation
from .._run_to_codes import make_stand_in, run_lookup, run_to_codes
from ..ranges import Dynamic, Observed
from .record import NAME, Record

RANGES, SCALES, ROUNDING = "ranges", "scales", "rounding"


def promote_dtype(inputs: Any, kernel: Any, bias: Any = None, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Promote the inputs and the bias of a layer as flax's `promote_dtype` does; the kernel keeps its dtype.

    A kernel is quantized in the dtype in which it is stored, so that training and serving use the same codes. A
    converted kernel, a QuantizedArray, is returned unchanged. Pass this function to flax's own layers:
    `nn.Dense(..., promote_dtype=jq.flax.promote_dtype)`.

    Args:
        inputs: The inputs of the layer, an array or None.
        kernel: A float array, or a QuantizedArray.
        bias: An array or None.
        dtype: Static. The dtype of the computation; None derives it from the three arguments.
        inexact: Static. Whether integer arguments become floats.

    Returns:
        (inputs, kernel, bias).

    Raises:
        ValueError: dtype is not a float dtype and inexact is True.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> kernel = jq.quantize(jnp.array([[127.0, 0.5]]), jq.QuantSpec(jnp.int8))  # 0.5 is half a step
        >>> inputs, same, bias = jq.flax.promote_dtype(jnp.ones(1), kernel, jnp.zeros(2), dtype=jnp.bfloat16)
        >>> inputs.dtype, same is kernel, bias.dtype
        (dtype(bfloat16), True, dtype(bfloat16))

    Source: flax.linen.dtypes.promote_dtype.
    """
    arrays = [x for x in (inputs, bias) if x is not None]
    # A QuantizedArray has a dtype but is not an array that could be promoted.
    like_kernel = jax.numpy.zeros((), kernel.dtype)
    promoted = dtypes.canonicalize_dtype(*arrays, like_kernel, dtype=dtype, inexact=inexact)
    inputs, bias = (None if x is None else jax.numpy.asarray(x, promoted) for x in (inputs, bias))
    return inputs, kernel, bias


class RangeModule(nn.Module):
    """The base class of the modules that hold ranges in their variables."""

    @nn.nowrap
    def read_range(self, operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point of an observed or learned range.

        An observed range is updated by x while its collection is mutable. A learned one starts from x if it is missing.
        """
        if isinstance(operand.source, Observed):
            return self._observe_range(operand, x)
        names = _learned.list_names(operand)
        if not all(self.has_variable(SCALES, name) for name in names):
            self._require_mutable(SCALES, operand)
            for name, start in zip(names, _learned.find_initial(operand, x), strict=True):
                self.variable(SCALES, name, self._box_scale, operand, start)
        parts = [meta.unbox(self.get_variable(SCALES, name)) for name in names]
        return _learned.read_learned(operand, tuple(parts))

    @nn.nowrap
    def read_constants(self, operand: LayerOperand) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point that `convert` stored for the activations."""
        stored = self._read(RANGES, operand.role)
        expected = 'its range in the collection "ranges", which jq.flax.convert stores there'
        is_converted = isinstance(stored, Mapping) and "scale" in stored
        checks.require(is_converted, "flax", operand.role, expected, "none")
        assert stored is not None
        return stored["scale"], stored.get("zero_point")

    @nn.nowrap
    def _observe_range(self, operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point of an observed range, updated by x where the collection is mutable."""
        is_mutable = self.is_mutable_collection(RANGES)
        if not self.has_variable(RANGES, operand.role):
            self._require_mutable(RANGES, operand)
        state = self.variable(RANGES, operand.role, _observed.make_state, operand, x)
        is_state = isinstance(state.value, Mapping) and "state" in state.value
        expected = "the state of a calibrator, which init makes for a float kernel"
        checks.require(is_state, "flax", operand.role, expected, "the constants of a converted one")
        # `init` does not count as a batch: its x is quantized with its own range.
        if self.is_initializing():
            return find_parameters("quantize", x, operand.spec, None, None)[:2]
        if is_mutable:
            state.value = _observed.update_state(operand, state.value, x)
        expected = f'a range: call apply(..., mutable=["{RANGES}"]) with data, and use the "{RANGES}" that it returns'
        checks.require(_observed.has_data(state.value["batches"]), "flax", operand.role, expected, "no data")
        return _observed.finalize_state(operand, state.value, x.shape)

    @nn.nowrap
    def _require_mutable(self, collection: str, operand: LayerOperand) -> None:
        """Raise ContractValueError unless a missing variable can be created in a collection."""
        expected = (
            f'it in the collection "{collection}", or apply(..., mutable=["{collection}"]) with data to start it '
            f"(nn.scan and nn.vmap need the collection in variable_axes)"
        )
        checks.require(self.is_mutable_collection(collection), "flax", operand.role, expected, "neither")

    @nn.nowrap
    def _box_scale(self, operand: LayerOperand, start: jax.Array) -> Any:
        """Return a learned scale as it is stored."""
        del operand
        return start

    @nn.nowrap
    def _read(self, collection: str, name: str) -> Any:
        """Return the value of a variable, or None if it is missing."""
        return self.get_variable(collection, name) if self.has_variable(collection, name) else None


class Contraction(RangeModule):
    """The base class of the modules that contract.

    Attributes:
        quantization: how the operands are quantized.
        kernel_name: the name of the weights in "params", in the module around this one.
        operation: the row of the table that a subclass runs.
    """

    quantization: Quantization
    kernel_name: str = "kernel"
    operation: ClassVar[Operation]

    @nn.compact
    def __call__(self, *operands: Any, **arguments: Any) -> jax.Array:
        """Return the contraction, from the arguments of the function of JAX that this module replaces."""
        return self.run(self.operation, *operands, **arguments)

    @nn.nowrap
    def run(self, operation: Operation, *operands: Any, **arguments: Any) -> jax.Array:
        """Return the result of an operation on this module's variables."""
        # The methods of this class are marked `nn.nowrap`, so that flax adds no name scope for each of them.
        call = operation.bind(*operands, **arguments)
        backward, relay = self.quantization.backward, getattr(self.parent, "_relay", None)
        if relay is None:
            return _operations.run_operation(operation, self, backward, call)
        call = relay.insert_codes(call)
        relay.result = run_to_codes(operation, self, self.quantization, backward, call, relay.bias)
        return make_stand_in(relay.result).astype(call.arguments["preferred_element_type"])

    @nn.nowrap
    def find_place(self) -> str:
        """Return the path of the layer around this module, for errors."""
        return "/".join(self.path[:-1]) or type(self.parent if isinstance(self.parent, nn.Module) else self).__name__

    @nn.nowrap
    def find_operands(self) -> Operands:
        """Return how the weights and the activations are quantized."""
        return _layer_operand.check_layer("flax", self.quantization)

    @nn.nowrap
    def make_key(self) -> jax.Array | None:
        """Return a key from the rng "rounding", or None where nothing is rounded stochastically."""
        # `init` computes no gradient, so it needs no rng.
        backward = self.quantization.backward
        if not isinstance(backward, Int8Backward) or not backward.stochastic_rounding or self.is_initializing():
            return None
        # flax falls back to the rng "params".
        has_key = self.has_rng(ROUNDING) or self.has_rng("params")
        return self.make_rng(ROUNDING) if has_key else None

    @nn.nowrap
    def check_converted(self, weight: LayerOperand, activation: LayerOperand | None, kernel: QuantizedArray) -> None:
        """Check that the variables were converted with this layer's specs and sources of ranges."""
        operands = (
            (weight, "weight_spec"),
            (activation, "activation_spec"),
            (self.quantization.find_output(), "output_spec"),
        )
        for operand, argument in operands:
            text = _layer_operand.describe_converted(operand)
            # `convert` wrote these descriptions; `record_operands` does this for float variables.
            stored = self._read(RANGES, argument)
            converted = stored.text if isinstance(stored, StaticText) else text
            expected = f"what the variables were converted with: {converted}"
            checks.require(converted == text, "flax", argument, expected, text)
        _converted.check_kernel(weight, kernel)
        # Variables written by another program may lack the descriptions. Then only their arrays can be compared.
        is_stored = self.has_variable(RANGES, "activation")
        is_static = activation is not None and not isinstance(activation.source, Dynamic)
        expected = "a spec with activation_range=Observed() or Learned(), because the variables hold a static range"
        got = "None" if activation is None else "Dynamic()"
        checks.require(is_static or not is_stored, "flax", "activation_spec", expected, got)

    @nn.nowrap
    def record_operands(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> None:
        """Record how this layer quantizes in its variables, or check that they record the same."""
        stored = meta.unbox(self._read_weights())
        expected = "promote_dtype=jq.flax.promote_dtype in the layer, because flax's own rounds a kernel before it is "
        expected += "quantized"
        # If the kernel has another dtype than its parameter, it has been rounded before it reached this module.
        is_same = stored is None or stored.dtype == kernel.dtype
        got = f"{kernel.dtype} of {getattr(stored, 'dtype', None)}"
        checks.require_type(is_same, "flax", "kernel", expected, got)
        if self.is_mutable_collection(RANGES):
            self.put_variable(RANGES, NAME, self._make_record(weight, activation, kernel, stored_axes))
            return
        # Variables of an older call may hold ranges of another spec, which would give wrong codes without an error.
        record = self._read(RANGES, NAME)
        for operand, role in (
            (weight, "weight"),
            (activation, "activation"),
            (self.quantization.find_output(), "output"),
        ):
            recorded = getattr(record, role, operand)
            if _layer_operand.is_alike(operand, recorded):
                continue
            # The repr of a spec is slow, so the text is built only for the error.
            expected = f'what the variables were made with (a call with mutable=["{RANGES}"] updates them): {recorded}'
            checks.require(False, "flax", f"{role}_spec", expected, operand)

    @nn.nowrap
    def _make_record(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> Record:
        """Return the record from which `convert` finds this layer."""
        parent = self.parent
        is_ready = getattr(parent, "promote_dtype", promote_dtype) is promote_dtype
        # Attention layers of flax pass no promote_dtype on: the error of `convert` names them.
        outer = getattr(parent, "parent", None)
        attention = type(outer).__name__ if isinstance(outer, nn.MultiHeadDotProductAttention) else None
        # flax compares the shape of a parameter with that of its stored codes. The layers of this package permit a
        # stored order; flax's own layers do not.
        stored_axes = stored_axes if getattr(parent, "permits_stored_order", False) else ()
        shape = tuple(kernel.shape)
        names = (self.kernel_name, shape, kernel.dtype, is_ready, attention, stored_axes)
        return Record(weight, activation, *names, self.quantization.find_output())

    @nn.nowrap
    def _box_scale(self, operand: LayerOperand, start: jax.Array) -> Any:
        """Return a learned scale, partitioned like its weights if they are partitioned."""
        box = self._read_weights()
        names = getattr(box, "names", None)
        if operand.role != "weight" or not isinstance(box, meta.AxisMetadata) or names is None:
            return start
        part_names = _converted.find_part_names(names, start.shape)
        return dataclasses.replace(box, value=start, names=part_names)  # type: ignore[call-arg]

    @nn.nowrap
    def _read_weights(self) -> Any:
        """Return the weights in "params" with their partitioning, or None if they are elsewhere."""
        parent = self.parent
        is_stored = isinstance(parent, nn.Module) and parent.has_variable("params", self.kernel_name)
        return parent.get_variable("params", self.kernel_name) if is_stored else None  # type: ignore[union-attr]


# The names of these classes are in the paths of users' variables: "DotGeneral_0", for example.


class DotGeneral(Contraction):
    """`jax.lax.dot_general(activations, weights, ...)` in integers."""

    operation = _operations.DOT_GENERAL


class ConvGeneralDilated(Contraction):
    """`jax.lax.conv_general_dilated(activations, weights, ...)` in integers."""

    operation = _operations.CONV_GENERAL_DILATED


class Product(Contraction):
    """`jax.numpy.einsum(subscripts, activations, weights)` in integers."""

    operation = _operations.EINSUM


class Table(Contraction):
    """The two operations of an `Embed` on its table, which share one range."""

    @nn.compact
    def __call__(self, operation: Operation, *operands: Any) -> Any:
        """Return rows of the table, or the products of queries with all rows."""
        if operation is not _operations.LOOKUP:
            return self.run(operation, *operands)
        call = operation.bind(*operands)
        return run_lookup(operation, self, self.quantization, self.quantization.backward, call)


@dataclasses.dataclass(frozen=True)
class Injected:
    """A function that flax's layers take as `dot_general`, or that makes the module for `dot_general_cls`.

    It is no module, but makes one in each layer that calls it, so that many layers can be given the same one. Two of
    them are equal if their arguments are.
    """

    module: type[Contraction]
    quantization: Quantization

    def __call__(self, *operands: Any, **arguments: Any) -> Any:
        """Return the contraction of the operands; without operands, the module that contracts."""
        module = self.module(self.quantization)
        expected = "a call by a Linen layer (for NNX: jaxquant.flax.nnx.dot_general, conv_general_dilated)"
        checks.require(module.scope is not None or not operands, "flax", self.module.__name__, expected, "no layer")
        # `dot_general_cls` is called without operands, `dot_general` with them.
        return module(*operands, **arguments) if operands else module
