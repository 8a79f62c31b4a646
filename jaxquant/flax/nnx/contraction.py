"""The NNX modules that contract: each runs a row of the table of operations and holds the variables of its ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import reshard

from ..._arrays.quantized_array import QuantizedArray
from ..._core import checks, sharding
from ..._core.granularity import PerFeature
from ..._training.backward import Int8Backward
from ...checkpoint.arrays import StaticText
from .. import _converted, _layer_operand, _learned, _observed, _operations
from .._layer_operand import LayerOperand, Operands, Quantization
from .._operations import Operation
from .._run_to_codes import is_codes, make_stand_in, run_lookup, run_to_codes
from ..linen.contraction import ROUNDING
from ..linen.contraction import promote_dtype as promote_linen_dtype
from ..ranges import Dynamic, Observed
from .variables import Ranges, Scale, find_partitioning

_NAME = "flax.nnx"
_Operands = TypeVar("_Operands", bound=tuple[Any, ...])


def promote_dtype(operands: _Operands, *, dtype: Any = None, inexact: bool = True) -> _Operands:
    """Promote the inputs and the bias of a layer as flax's `promote_dtype` does; the kernel keeps its dtype.

    This is `jq.flax.promote_dtype` for the layers of NNX, which pass a tuple.

    Args:
        operands: (inputs, kernel, bias). The kernel is a float array or a QuantizedArray; the bias may be None.
        dtype: Static. The dtype of the computation; None derives it from the three operands.
        inexact: Static. Whether integer operands become floats.

    Returns:
        (inputs, kernel, bias).

    Raises:
        ValueError: operands is not a tuple of three, or dtype is not a float dtype and inexact is True.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant.flax import nnx as qnnx
        >>> kernel = jq.quantize(jnp.array([[127.0, 0.5]]), jq.QuantSpec(jnp.int8))  # 0.5 is half a step
        >>> inputs, same, bias = qnnx.promote_dtype((jnp.ones(1), kernel, None), dtype=jnp.bfloat16)
        >>> inputs.dtype, same is kernel, bias
        (dtype(bfloat16), True, None)

    Source: flax.nnx.nn.dtypes.promote_dtype.
    """
    is_triple = isinstance(operands, tuple) and len(operands) == 3
    expected = "a tuple of inputs, kernel and bias"
    checks.require(is_triple, f"{_NAME}.promote_dtype", "operands", expected, type(operands).__name__)
    inputs, kernel, bias = operands
    return promote_linen_dtype(inputs, kernel, bias, dtype=dtype, inexact=inexact)  # type: ignore[return-value]


class Contraction(nnx.Module):
    """The base class of the modules that contract. Its variables have their shapes from the start, for any inputs.

    Attributes:
        operation: the row of the table that a subclass runs.
        layer: the name of the layer in errors.
        operands: Static. How the weights, and the activations or None, are quantized.
        backward: Static. How gradients are contracted.
        kernel_shape: Static. The shape of the weights, or None if it is unknown.
        use_running_average: Static. Whether ranges are only read, as in BatchNorm: `model.train()` and `model.eval()`
            set it.
        calibrating: Static. Whether ranges are updated whatever `use_running_average` says: `calibration_view` sets it.
        is_starting: Static. Whether learned scales are set from the operands of the call: `start` sets it.
        rngs: the stream of keys for gradients that are rounded stochastically, or None.
        activation_range: the calibrator's state, or None.
        activation_batches: the number of batches that the calibrator has seen, or None.
        weight_scale: the learned scale of the weights, or None.
        weight_zero_point: the learned zero point of the weights, or None.
        activation_scale: the scale of the activations if it is learned or converted, or None.
        activation_zero_point: the zero point of the activations if it is learned or converted, or None.
        output_range: the state of the calibrator of the result, or None.
        output_batches: the number of batches that it has seen, or None.
        output_scale: the scale of the result if it is learned or converted, or None.
        output_zero_point: the zero point of the result if it is learned or converted, or None.
        converted_specs: a text of the specs with which the layer was converted, or None.
        quantization: Static. The arguments of the layer.

    Raises:
        TypeError: At construction: an argument has a wrong type.
        ValueError: At construction: a spec contradicts the source of its range, or a variable's shape is unknown.
    """

    operation: ClassVar[Operation]

    def __init__(
        self, layer: str, quantization: Quantization, use_running_average: bool, rngs: Any,
        kernel: nnx.Variable | None, kernel_shape: Sequence[int] | None, features: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        with checks.prefix_errors(layer):
            checks.check_flag(_NAME, "use_running_average", use_running_average)
            weight, activation = _layer_operand.check_layer(_NAME, quantization)
            if features is not None:
                weight = _operations.resolve_features(weight, features)
            self.layer, self.operands = layer, (weight, activation)
            self.backward, self.quantization = quantization.backward, quantization
            self._relay: Any = None
            self.kernel_shape = None if kernel_shape is None else tuple(kernel_shape)
            self.use_running_average, self.is_starting = bool(use_running_average), False
            self.calibrating = False
            self.rngs: Any = nnx.data(self._fork_stream(rngs))
            # All attributes exist from the start, so that each layer has the same structure. `nnx.data` lets None
            # become a variable later.
            self.activation_range: Any = nnx.data(None)
            self.activation_batches: Any = nnx.data(None)
            self.weight_scale: Any = nnx.data(None)
            self.weight_zero_point: Any = nnx.data(None)
            self.activation_scale: Any = nnx.data(None)
            self.activation_zero_point: Any = nnx.data(None)
            self.output_range: Any = nnx.data(None)
            self.output_batches: Any = nnx.data(None)
            self.output_scale: Any = nnx.data(None)
            self.output_zero_point: Any = nnx.data(None)
            self.converted_specs: Any = nnx.data(None)
            for operand in self.list_operands():
                if not isinstance(operand.source, Dynamic):
                    self._make_variables(operand, kernel)

    def __call__(self, *operands: Any, out_sharding: Any = None, **arguments: Any) -> jax.Array:
        """Return the contraction, from the arguments of the function of JAX that this module replaces."""
        return self.run(self.operation, *operands, out_sharding=out_sharding, **arguments)

    def run(self, operation: Operation, *operands: Any, out_sharding: Any = None, **arguments: Any) -> jax.Array:
        """Return the result of an operation on this module's variables, with the sharding that is given."""
        call = operation.bind(*operands, **arguments)
        relay = self._relay
        if relay is not None:
            result = run_to_codes(
                operation, self, self.quantization, self.backward, relay.insert_codes(call), relay.bias
            )
            relay.result = result
            return make_stand_in(result).astype(call.arguments["preferred_element_type"])
        if operation is _operations.LOOKUP:
            y = run_lookup(operation, self, self.quantization, self.backward, call)
            return y if is_codes(y) or out_sharding is None else reshard(y, out_sharding)
        y = _operations.run_operation(operation, self, self.backward, call)
        # Not every operation takes an out_sharding, so the result is resharded.
        return y if out_sharding is None else reshard(y, out_sharding)

    def set_view(self, use_running_average: bool | None = None, calibrating: bool | None = None) -> None:
        """Set the mode; `nnx.view` calls this method of every module.

        Args:
            use_running_average: whether ranges are only read.
            calibrating: whether ranges are updated anyway.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
        if calibrating is not None:
            self.calibrating = calibrating

    def describe_specs(self) -> StaticText:
        """Return a description of what must not change once the layer is converted."""
        output = self.quantization.find_output()
        operands = (*self.operands, *(() if output is None else (output,)))
        return StaticText("; ".join(map(_layer_operand.describe_converted, operands)))

    def list_operands(self) -> list[LayerOperand]:
        """Return the weights, the activations and the result, as far as they are quantized."""
        return [o for o in (*self.operands, self.quantization.find_output()) if o is not None]

    def find_place(self) -> str:
        """Return the name of the layer, for errors."""
        return self.layer

    def find_operands(self) -> Operands:
        """Return how the weights and the activations are quantized."""
        return self.operands

    def make_key(self) -> jax.Array | None:
        """Return a key from this module's stream, or None where nothing is rounded stochastically."""
        # An evaluation does not advance the stream: a traced function may hold the model as a constant.
        return None if self.rngs is None or self.use_running_average else self.rngs()

    def check_converted(self, weight: LayerOperand, activation: LayerOperand | None, kernel: QuantizedArray) -> None:
        """Check that the state of this layer was converted with its specs and sources of ranges."""
        self.check_description()
        _converted.check_kernel(weight, kernel)

    def check_description(self) -> None:
        """Check that the description of the specs with which the state was converted is that of this layer."""
        # Variables written by another program may lack the description; their arrays are checked below.
        text = self.describe_specs().text
        converted = text if self.converted_specs is None else self.converted_specs.get_value().text
        expected = f"the weight_spec and activation_spec that the state was converted with: {converted}"
        checks.require(converted == text, _NAME, "specs", expected, text)

    def record_operands(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> None:
        """Do nothing, because `convert` can read the operands from the NNX module itself."""

    def read_range(self, operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point of an observed or learned range, after an update by x if it is due."""
        return self._observe_range(operand, x) if isinstance(operand.source, Observed) else self._learn(operand, x)

    def read_constants(self, operand: LayerOperand) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point that `convert` stored for the activations, or for the result."""
        scale, zero_point = (getattr(self, f"{operand.role}_{name}") for name in ("scale", "zero_point"))
        expected = "its scale, which jaxquant.flax.nnx.convert makes of a range"
        checks.require(isinstance(scale, Ranges), _NAME, operand.role, expected, "none")
        return scale[...], None if zero_point is None else zero_point[...]

    def _fork_stream(self, rngs: Any) -> Any:
        """Return a stream of keys of this module, or None where nothing is rounded stochastically."""
        if not isinstance(self.backward, Int8Backward) or not self.backward.stochastic_rounding:
            return None
        if isinstance(rngs, nnx.RngStream):
            return rngs.fork()
        expected = f'rngs with a stream "{ROUNDING}", which Int8Backward(stochastic_rounding=True) samples from'
        checks.require_type(isinstance(rngs, nnx.Rngs), _NAME, "rngs", expected, type(rngs).__name__)
        has_stream = ROUNDING in rngs or "default" in rngs
        checks.require(has_stream, _NAME, "rngs", expected, "neither that stream nor a default one")
        return rngs[ROUNDING].fork()

    def _make_variables(self, operand: LayerOperand, kernel: nnx.Variable | None) -> None:
        """Make the variables of an observed or learned range."""
        shape, dtype = self._find_shape(operand), np.dtype(np.float32)
        if isinstance(operand.source, Observed):
            # One range for the whole array has the same state for every shape.
            like = jax.ShapeDtypeStruct((1, 1), dtype)
            state = _observed.make_state(operand, like)  # type: ignore[arg-type]
            setattr(self, f"{operand.role}_range", Ranges(state["state"]))
            setattr(self, f"{operand.role}_batches", Ranges(state["batches"]))
            return
        if operand.role == "weight" and self.kernel_shape is not None and kernel is not None:
            dtype = kernel[...].dtype
        like = jax.ShapeDtypeStruct(shape, dtype)
        # Only the shapes are needed here; `start` finds the values.
        parts = jax.eval_shape(lambda x: _learned.find_initial(operand, x), like)
        for name, part in zip(_learned.list_names(operand), parts, strict=True):
            # NaN shows in every result until `start` sets the scale.
            value = jnp.full(part.shape, np.float32(np.nan))
            metadata = {}
            if kernel is not None and operand.role == "weight":
                metadata = find_partitioning(kernel, part.shape, 0)
            setattr(self, name, Scale(value, **metadata))

    def _find_shape(self, operand: LayerOperand) -> tuple[int, ...]:
        """Return a shape whose range has the shape of an operand's range, and check that it is known."""
        is_single = _observed.is_per_tensor(operand)
        if operand.role != "weight":
            expected = "PerTensor(), or activation_range=Dynamic(): an NNX variable has one shape for all inputs"
            checks.require(is_single, _NAME, operand.argument, expected, operand.spec)
            return (1,)
        if self.kernel_shape is None:
            expected = "the shape of the kernel, because its scales are learned"
            checks.require(is_single, _NAME, "kernel_shape", expected, "None")
            return (1,)
        expected = "PerAxis(...): this layer does not know yet which axes of its kernel are output features"
        checks.require(PerFeature() != operand.spec.granularity, _NAME, operand.argument, expected, operand.spec)
        return self.kernel_shape

    def _observe_range(self, operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return the scale and the zero point of an observed range, updated by x unless it is only read."""
        state = self.read_state(operand.role)
        if self.calibrating or not self.use_running_average:
            # A range for the whole array does not depend on the rank of x, so its variables have a fixed shape.
            state = _observed.update_state(operand, state, _flatten_rows(sharding.place_whole(x)))
            getattr(self, f"{operand.role}_range").set_value(state["state"])
            getattr(self, f"{operand.role}_batches").set_value(state["batches"])
        expected = "a range: call jaxquant.flax.nnx.calibrate(model, batches), or the model after model.train()"
        checks.require(_observed.has_data(state["batches"]), _NAME, operand.role, expected, "no data")
        return _observed.finalize_state(operand, state, x.shape)

    def read_state(self, role: str) -> dict[str, Any]:
        """Return the state of a calibrator and the number of its batches."""
        return {"state": getattr(self, f"{role}_range").get_value(), "batches": getattr(self, f"{role}_batches")[...]}

    def _learn(self, operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
        """Return a learned scale and zero point; under `start`, set them from x first."""
        variables = [getattr(self, name) for name in _learned.list_names(operand)]
        if self.is_starting:
            # The variables keep the shapes with which they were made, whatever the rank of x.
            for variable, start in zip(variables, _learned.find_initial(operand, x), strict=True):
                shape = variable[...].shape
                expected = f"scales of shape {shape} (is kernel_shape the shape of the kernel?)"
                has_size = start.size == variable[...].size
                checks.require(has_size, _NAME, operand.role, expected, f"shape {start.shape}")
                variable.set_value(start.astype(jnp.float32).reshape(shape))
        parts = tuple(variable[...] for variable in variables)
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        is_finite = all(map(_learned.is_finite, parts))
        checks.require(is_finite, _NAME, f"{operand.role}_scale", expected, "NaN or an infinity")
        return _learned.read_learned(operand, parts)


def _flatten_rows(x: jax.Array) -> jax.Array:
    """Return x as a matrix of its rows."""
    # A matrix and not a vector: for a vector XLA:CPU would compute a multi-index from each flat index in the loop that
    # produces x.
    last = x.shape[-1] if x.ndim else 1
    return x.reshape(-1, last) if last else x.reshape(0, 0)


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
    """The two operations of an `Embed` on its table, `LOOKUP` and `ATTEND`, which share one range."""

    operation = _operations.LOOKUP
