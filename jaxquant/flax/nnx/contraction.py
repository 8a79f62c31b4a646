"""The NNX modules that contract, each with a row of the table of operations, and their variables.

Here are also the functions that make such a module for flax's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from ..._arrays.parts import StoredOrder
from ..._arrays.quantized_array import QuantizedArray, check_form
from ..._arrays.spec import QuantSpec
from ..._core import checks, sharding
from ..._core.granularity import PerFeature
from ..._training.backward_choices import Backward, FloatBackward, Int8Backward
from ..._training.range_sources import Dynamic, RangeSource, Static
from ...checkpoint.arrays import StaticText
from .. import _conversion, _operand_ranges, _operations, _quantization
from .._operand_ranges import Parameters, RangeState
from .._operations import Kernel, LayerOperation
from .._quantization import LayerOperand, Operands, Quantization
from ..linen.contraction import ROUNDING
from ..linen.contraction import promote_dtype as promote_linen_dtype

_NAME = "flax.nnx"
_Operands = TypeVar("_Operands", bound=tuple[Any, ...])
OutSharding = NamedSharding | PartitionSpec


def promote_dtype(operands: _Operands, *, dtype: DTypeLike | None = None, inexact: bool = True) -> _Operands:
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


# The variables of quantized layers.


class Ranges(nnx.Variable):
    """The state of the calibrator of a layer's activations; in a converted layer, their scale or zero point."""


class Scale(nnx.Variable):
    """A learned scale or zero point. To train it, make the optimizer with `wrt=nnx.Any(nnx.Param, qnnx.Scale)`."""


class Codes(nnx.Variable):
    """A converted kernel, which is a QuantizedArray; if the kernel is partitioned, one of its arrays."""


class PartitionedCodes(nnx.Pytree):
    """A converted kernel that is partitioned: its codes and its scale are variables, each with its own sharding.

    Attributes:
        codes: a `Codes` variable with an array, the codes in their stored order.
        scale: a `Codes` variable with an array.
        zero_point: a `Codes` variable with an array, or None.
        offset: a `Codes` variable with an array, or None.
        static: Static. The attributes of the QuantizedArray that are not arrays.
    """

    def __init__(self, q: QuantizedArray, box: Callable[[jax.Array, StoredOrder], nnx.Variable]) -> None:
        check_form("convert", "a partitioned kernel", q, ("offset", "signed_scale", "block_sizes"))
        (codes, scale, zero_point, offset, _), self.static = q.tree_flatten()
        self.codes, self.scale = box(codes, q.stored_order), box(scale, None)
        # `nnx.data` marks None as a missing variable and not as a static value.
        self.zero_point = nnx.data(None if zero_point is None else box(zero_point, None))
        self.offset = nnx.data(None if offset is None else box(offset, None))

    def get_value(self) -> QuantizedArray:
        """Return the QuantizedArray."""
        zero_point, offset = (None if part is None else part[...] for part in (self.zero_point, self.offset))
        return QuantizedArray.tree_unflatten(self.static, (self.codes[...], self.scale[...], zero_point, offset, None))

    def __getitem__(self, index: object) -> QuantizedArray:
        """Return the QuantizedArray at an index; `...` returns all of it, as for a variable."""
        return self.get_value()[index]


def match_partitioning(
    kernel: nnx.Variable, shape: tuple[int, ...], depth: int, order: StoredOrder = None
) -> dict[str, Any]:
    """Return the metadata that partitions a part of a kernel like the kernel, or {} if the kernel is not partitioned.

    Args:
        kernel: a variable with perhaps an `out_sharding`.
        shape: the shape of the stored codes, of the scale or of the zero point.
        depth: the number of leading axes that stack layers.
        order: the stored order of the codes; None for the others.
    """
    out_sharding = kernel.get_metadata("out_sharding", None)
    names = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if not isinstance(names, tuple | PartitionSpec) or not len(names):
        return {}
    part_names = _conversion.match_part_names(tuple(names), shape, depth, order)
    part_sharding: Any = PartitionSpec(*part_names)
    if isinstance(out_sharding, NamedSharding):
        part_sharding = NamedSharding(out_sharding.mesh, part_sharding)
    # Do not test for tuple: PartitionSpec may be a subclass of it. A plain tuple stays a plain tuple.
    elif not isinstance(names, PartitionSpec):
        part_sharding = part_names
    metadata = {name: kernel.get_metadata(name, None) for name in ("mesh", "sharding_rules")}
    return {"out_sharding": part_sharding, **{name: value for name, value in metadata.items() if value is not None}}


# The modules.


class NnxContraction(nnx.Module):
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
        converted_specs: a text of the specs with which the layer was converted, or None.
        quantization: Static. The arguments of the layer.

    Raises:
        TypeError: At construction: an argument has a wrong type.
        ValueError: At construction: a spec contradicts the source of its range, or a variable's shape is unknown.
    """

    operation: ClassVar[LayerOperation]

    def __init__(
        self, layer: str, quantization: Quantization, use_running_average: bool, rngs: nnx.Rngs | nnx.RngStream | None,
        kernel: nnx.Variable | None, kernel_shape: Sequence[int] | None, features: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        with checks.prefix_errors(layer):
            checks.check_flag(_NAME, "use_running_average", use_running_average)
            weight, activation = _quantization.check_layer(_NAME, quantization)
            if features is not None:
                weight = _operations.resolve_features(weight, features)
            self.layer, self.operands = layer, (weight, activation)
            self.backward, self.quantization = quantization.backward, quantization
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
            self.converted_specs: Any = nnx.data(None)
            for operand in self.list_operands():
                if not isinstance(operand.source, Dynamic):
                    self._make_variables(operand, kernel)

    def __call__(self, *operands: Any, out_sharding: OutSharding | None = None, **arguments: Any) -> jax.Array:
        """Return the contraction, from the arguments of the function of JAX that this module replaces."""
        call = self.operation.bind(*operands, **arguments)
        y = _operations.run_operation(self.operation, self, self.backward, call)
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
        return StaticText("; ".join(map(_quantization.describe_converted, self.operands)))

    def list_operands(self) -> list[LayerOperand]:
        """Return the weights, and the activations if they are quantized."""
        return [operand for operand in self.operands if operand is not None]

    def describe_layer(self) -> str:
        """Return the name of the layer, for errors."""
        return self.layer

    def read_operands(self) -> Operands:
        """Return how the weights and the activations are quantized."""
        return self.operands

    def make_key(self) -> jax.Array | None:
        """Return a key from this module's stream, or None where nothing is rounded stochastically."""
        # An evaluation does not advance the stream: a traced function may hold the model as a constant.
        return None if self.rngs is None or self.use_running_average else self.rngs()

    def check_converted(self, weight: LayerOperand, activation: LayerOperand | None, kernel: QuantizedArray) -> None:
        """Check that the state of this layer was converted with its specs and sources of ranges."""
        # Variables written by another program may lack the description; their arrays are checked below.
        text = self.describe_specs().text
        converted = text if self.converted_specs is None else self.converted_specs.get_value().text
        expected = f"the weight_spec and activation_spec that the state was converted with: {converted}"
        checks.require(converted == text, _NAME, "specs", expected, text)
        _conversion.check_kernel(weight, kernel)

    def record_operands(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> None:
        """Do nothing, because `convert` can read the operands from the NNX module itself."""

    def read_range(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return the scale and the zero point of a static or learned range, after an update by x if it is due."""
        return self._read_static(operand, x) if isinstance(operand.source, Static) else self._learn(operand, x)

    def read_constants(self, operand: LayerOperand) -> Parameters:
        """Return the scale and the zero point that `convert` stored for the activations."""
        scale, zero_point = (getattr(self, f"{operand.role}_{name}") for name in ("scale", "zero_point"))
        expected = "its scale, which jaxquant.flax.nnx.convert makes of a range"
        checks.require(isinstance(scale, Ranges), _NAME, operand.role, expected, "none")
        return scale[...], None if zero_point is None else zero_point[...]

    def _fork_stream(self, rngs: nnx.Rngs | nnx.RngStream | None) -> Any:
        """Return a stream of keys of this module, or None where nothing is rounded stochastically."""
        if not isinstance(self.backward, Int8Backward) or not self.backward.stochastic_rounding:
            return None
        if isinstance(rngs, nnx.RngStream):
            return rngs.fork()
        expected = f'rngs with a stream "{ROUNDING}", which Int8Backward(stochastic_rounding=True) samples from'
        checks.require_type(isinstance(rngs, nnx.Rngs), _NAME, "rngs", expected, type(rngs).__name__)
        assert isinstance(rngs, nnx.Rngs)
        has_stream = ROUNDING in rngs or "default" in rngs
        checks.require(has_stream, _NAME, "rngs", expected, "neither that stream nor a default one")
        return rngs[ROUNDING].fork()

    def _make_variables(self, operand: LayerOperand, kernel: nnx.Variable | None) -> None:
        """Make the variables of a static or learned range."""
        shape, dtype = self._check_shape(operand), np.dtype(np.float32)
        if isinstance(operand.source, Static):
            # One range for the whole array has the same state for every shape.
            like = jax.ShapeDtypeStruct((1, 1), dtype)
            state = _operand_ranges.make_state(operand, like)  # type: ignore[arg-type]
            setattr(self, f"{operand.role}_range", Ranges(state["state"]))
            setattr(self, f"{operand.role}_batches", Ranges(state["batches"]))
            return
        if operand.role == "weight" and self.kernel_shape is not None and kernel is not None:
            dtype = kernel[...].dtype
        like = jax.ShapeDtypeStruct(shape, dtype)
        # Only the shapes are needed here; `start` finds the values.
        parts = jax.eval_shape(lambda x: _operand_ranges.compute_initial(operand, x), like)
        for name, part in zip(_operand_ranges.list_learned_names(operand), parts, strict=True):
            # NaN shows in every result until `start` sets the scale.
            value = jnp.full(part.shape, np.float32(np.nan))
            metadata = {}
            if kernel is not None and operand.role == "weight":
                metadata = match_partitioning(kernel, part.shape, 0)
            setattr(self, name, Scale(value, **metadata))

    def _check_shape(self, operand: LayerOperand) -> tuple[int, ...]:
        """Return a shape of x that gives the range of an operand its shape, and check that it is known."""
        is_single = _operand_ranges.is_per_tensor(operand)
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

    def _read_static(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return the scale and the zero point of a static range, updated by x unless it is only read."""
        state = self.read_state(operand.role)
        if self.calibrating or not self.use_running_average:
            # A range for the whole array does not depend on the rank of x, so its variables have a fixed shape.
            state = _operand_ranges.update_state(operand, state, _flatten_rows(sharding.place_whole(x)))
            getattr(self, f"{operand.role}_range").set_value(state["state"])
            getattr(self, f"{operand.role}_batches").set_value(state["batches"])
        expected = "a range: call jaxquant.flax.nnx.calibrate(model, batches), or the model after model.train()"
        checks.require(_operand_ranges.has_data(state["batches"]), _NAME, operand.role, expected, "no data")
        return _operand_ranges.finalize_state(operand, state, x.shape)

    def read_state(self, role: str) -> RangeState:
        """Return the state of a calibrator and the number of its batches."""
        return {"state": getattr(self, f"{role}_range").get_value(), "batches": getattr(self, f"{role}_batches")[...]}

    def _learn(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return a learned scale and zero point; under `start`, set them from x first."""
        variables = [getattr(self, name) for name in _operand_ranges.list_learned_names(operand)]
        if self.is_starting:
            # The variables keep the shapes with which they were made, whatever the rank of x.
            for variable, start in zip(variables, _operand_ranges.compute_initial(operand, x), strict=True):
                shape = variable[...].shape
                expected = f"scales of shape {shape} (is kernel_shape the shape of the kernel?)"
                has_size = start.size == variable[...].size
                checks.require(has_size, _NAME, operand.role, expected, f"shape {start.shape}")
                variable.set_value(start.astype(jnp.float32).reshape(shape))
        parts = tuple(variable[...] for variable in variables)
        expected = "finite numbers: jaxquant.flax.nnx.start(model, batch) starts it"
        is_finite = all(map(_operand_ranges.is_finite, parts))
        checks.require(is_finite, _NAME, f"{operand.role}_scale", expected, "NaN or an infinity")
        return _operand_ranges.read_learned(operand, parts)


def _flatten_rows(x: jax.Array) -> jax.Array:
    """Return x as a matrix of its rows."""
    # A matrix and not a vector: for a vector XLA:CPU would compute a multi-index from each flat index in the loop that
    # produces x.
    last = x.shape[-1] if x.ndim else 1
    return x.reshape(-1, last) if last else x.reshape(0, 0)


class NnxDotGeneral(NnxContraction):
    """`jax.lax.dot_general(activations, weights, ...)` in integers."""

    operation = _operations.DOT_GENERAL


class NnxConvGeneralDilated(NnxContraction):
    """`jax.lax.conv_general_dilated(activations, weights, ...)` in integers."""

    operation = _operations.CONV_GENERAL_DILATED


class NnxEinsum(NnxContraction):
    """`jax.numpy.einsum(subscripts, activations, weights)` in integers."""

    operation = _operations.EINSUM


class NnxTable(NnxContraction):
    """The two operations of an `Embed` on its table, lookups and products with queries, which share one range."""

    operation = _operations.LOOKUP

    def contract_rows(self, query: jax.Array, table: Kernel, out_sharding: OutSharding | None = None) -> jax.Array:
        """Return the products of queries with all rows."""
        call = _operations.ATTEND.bind(query, table)
        y = _operations.run_operation(_operations.ATTEND, self, self.backward, call)
        return y if out_sharding is None else reshard(y, out_sharding)


# What flax's own layers take to contract in integers.


def dot_general(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: RangeSource = Dynamic(),
    activation_range: RangeSource = Dynamic(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> NnxDotGeneral:
    """Return a module that any flax NNX layer with a `dot_general` argument can contract with.

    layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nnx.Linear(..., dot_general=this)

    The layer also needs `promote_dtype=qnnx.promote_dtype`: flax's own `promote_dtype` does not accept a converted
    kernel, and in bfloat16 it rounds the kernel before it is quantized.

    Args:
        weight_spec: How to quantize the kernel, the right operand.
        activation_spec: How to quantize the left operand; None leaves it in floats.
        rngs: Random keys for `Int8Backward(stochastic_rounding=True)`, which samples from the stream "rounding" in
            training mode. Otherwise None.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the left operand's range: `Dynamic()`, `Static(...)` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read, not updated; `model.train()` and `model.eval()` set
            it.
        kernel_shape: Static. The shape of the kernel, needed only if it has several scales and they are learned.

    Returns:
        A module with variables, for one layer. Layers that share it share their ranges.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range, or kernel_shape is needed and missing.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> dot_general = qnnx.dot_general(jq.QuantSpec(jnp.int8, jq.PerFeature()))
        >>> layer = nnx.Linear(3, 2, dot_general=dot_general, promote_dtype=qnnx.promote_dtype, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((1, 3))
        >>> bool((qnnx.convert(layer)(x) == layer(x)).all())
        True

    Source: flax.nnx.Linear, `dot_general`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    return NnxDotGeneral("flax.nnx.dot_general", quantization, use_running_average, rngs, None, kernel_shape)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    rngs: nnx.Rngs | None = None,
    *,
    weight_range: RangeSource = Dynamic(),
    activation_range: RangeSource = Dynamic(),
    backward: Backward = FloatBackward(),
    use_running_average: bool = False,
    kernel_shape: Sequence[int] | None = None,
) -> NnxConvGeneralDilated:
    """Return a module that flax's NNX convolutions can convolve with.

    layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, where
    layer = nnx.Conv(..., conv_general_dilated=this)

    The layer also needs `promote_dtype=qnnx.promote_dtype`, for the reasons that `dot_general` gives.

    Args:
        weight_spec: How to quantize the kernel.
        activation_spec: How to quantize the images; None leaves them in floats.
        rngs: Random keys for `Int8Backward(stochastic_rounding=True)`. Otherwise None.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the images' range: `Dynamic()`, `Static(...)` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.
        use_running_average: Static. Whether ranges are only read, not updated; `model.train()` and `model.eval()` set
            it.
        kernel_shape: Static. The shape of the kernel, needed only if it has several scales and they are learned.

    Returns:
        A module with variables, for one layer. Layers that share it share their ranges.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range, or kernel_shape is needed and missing.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from flax import nnx
        >>> from jaxquant.flax import nnx as qnnx
        >>> specs = jq.QuantSpec(jnp.int8, jq.PerFeature()), jq.QuantSpec(jnp.uint8)
        >>> conv = qnnx.conv_general_dilated(*specs, activation_range=jq.Static(jq.calibration.minmax))
        >>> given = {"conv_general_dilated": conv, "promote_dtype": qnnx.promote_dtype}
        >>> layer = nnx.Conv(1, 2, (3,), **given, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 4, 1))).shape, int(conv.activation_batches[...])
        ((1, 4, 2), 1)

    Source: flax.nnx.Conv, `conv_general_dilated`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    return NnxConvGeneralDilated(
        "flax.nnx.conv_general_dilated", quantization, use_running_average, rngs, None, kernel_shape
    )
