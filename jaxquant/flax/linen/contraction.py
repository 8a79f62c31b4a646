"""The Linen modules that contract: each runs a row of the table of operations and holds the variables of its ranges.

Here are also the record that a module leaves in its variables for `convert`, and the functions that put such a module
into flax's own layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax import serialization, traverse_util
from flax.core import FrozenDict, meta
from flax.linen import dtypes
from jax.typing import DTypeLike

from ..._arrays.quantize import compute_parameters
from ..._arrays.quantized_array import QuantizedArray
from ..._arrays.spec import QuantSpec
from ..._core import checks
from ..._training.backward_choices import Backward, FloatBackward, Int8Backward
from ..._training.range_sources import Dynamic, RangeSource, Static
from ...checkpoint.arrays import StaticText
from .. import _conversion, _operand_ranges, _operations, _quantization
from .._operand_ranges import Parameters
from .._operations import LayerOperation
from .._quantization import LayerOperand, Operands, Quantization, check_layer

# The collections, the rng, and the name of the record in the collection "ranges".
RANGES, SCALES, ROUNDING, RECORD = "ranges", "scales", "rounding", "layer"
_Kernel = TypeVar("_Kernel", jax.Array, QuantizedArray)


def promote_dtype(
    inputs: jax.Array | None, kernel: _Kernel, bias: jax.Array | None = None, *, dtype: DTypeLike | None = None,
    inexact: bool = True,
) -> tuple[Any, _Kernel, Any]:  # fmt: skip
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


# What a layer leaves in its variables, from which `convert` finds it without running the module.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """How a layer quantizes: an entry of the collection "ranges" that holds no arrays.

    Attributes:
        weight: how the weights are quantized.
        activation: how the activations are quantized, or None.
        kernel: the name of the weights in "params", next to the submodule that holds this record.
        shape: the shape of the weights, without the axes of `nn.scan` and `nn.vmap`.
        dtype: the dtype of the weights.
        is_ready: whether the layer around the submodule takes converted weights.
        attention: the class name of flax's attention layer that made the layer, or None.
        stored_axes: the axes of the weights, counted from the back, that converted ones hold last in memory.
    """

    weight: LayerOperand
    activation: LayerOperand | None
    kernel: str
    shape: tuple[int, ...]
    dtype: Any
    is_ready: bool
    attention: str | None = None
    stored_axes: tuple[int, ...] = ()


VariablePath = tuple[str, ...]
# A learned scale or zero point, in a box if its kernel is partitioned.
LearnedPart = jax.Array | meta.AxisMetadata


def list_layers(ranges: object) -> dict[VariablePath, Mapping[str, Any]]:
    """Return the variables of each quantized layer in the collection "ranges", by path. Each has a LayerRecord."""
    if not isinstance(ranges, dict | FrozenDict):
        return {}
    # Only the modules above a layer are flattened; the entries of the layer stay together.
    nodes: dict[VariablePath, Any] = traverse_util.flatten_dict(ranges, is_leaf=lambda _, node: _has_record(node))
    return {path: node for path, node in nodes.items() if _has_record(node)}


def _has_record(node: object) -> bool:
    """Return whether a node of the collection "ranges" belongs to a quantized layer."""
    return isinstance(node, Mapping) and isinstance(node.get(RECORD), LayerRecord)


def list_scales(scales: object) -> dict[VariablePath, LearnedPart]:
    """Return the variables in the collection "scales", by path and name."""
    flat: dict[VariablePath, Any] = traverse_util.flatten_dict(scales) if isinstance(scales, dict | FrozenDict) else {}
    return flat


def join_path(path: VariablePath) -> str:
    """Return the path of the layer around a submodule with a record, for errors."""
    return "/".join(path[:-1]) or path[-1]


def _get_array_state(q: QuantizedArray) -> dict[str, Any]:
    """Return the arrays of a QuantizedArray as a state dict."""
    parts = q.tree_flatten()[0]._asdict()
    state = {name: serialization.to_state_dict(part) for name, part in parts.items() if part is not None}
    # A state dict has no static attributes. Without the order, codes could be restored in another one.
    return state if q.stored_order is None else {**state, "stored_order": np.asarray(q.stored_order, np.int8)}


def _restore_array(q: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    """Return a QuantizedArray with the arrays of a state dict."""
    children, static = q.tree_flatten()
    restored = []
    for name, part in children._asdict().items():
        restored.append(None if part is None else serialization.from_state_dict(part, state[name], name=name))
    # States that were saved before there were stored orders have none: their codes are in the logical order.
    saved = state.get("stored_order")
    order = None if saved is None else tuple(int(axis) for axis in saved)
    new = QuantizedArray.tree_unflatten(static._replace(stored_order=order), tuple(restored))
    return new if order == q.stored_order else new.replace(stored_order=q.stored_order)


# flax.serialization knows nested dicts of arrays; every other type must be registered.
serialization.register_serialization_state(QuantizedArray, _get_array_state, _restore_array)
serialization.register_serialization_state(LayerRecord, lambda _: {}, lambda record, _: record)
serialization.register_serialization_state(
    StaticText, lambda node: {"text": node.text}, lambda node, state: StaticText(state.get("text", node.text))
)


# The modules.


class LinenContraction(nn.Module):
    """The base class of the modules that contract.

    Attributes:
        quantization: how the operands are quantized.
        kernel_name: the name of the weights in "params", in the module around this one.
        operation: the row of the table that a subclass runs.
    """

    quantization: Quantization
    kernel_name: str = "kernel"
    operation: ClassVar[LayerOperation]

    # The methods below are marked `nn.nowrap`, so that flax adds no name scope for each of them.
    @nn.compact
    def __call__(self, *operands: Any, **arguments: Any) -> jax.Array:
        """Return the contraction, from the arguments of the function of JAX that this module replaces."""
        call = self.operation.bind(*operands, **arguments)
        return _operations.run_operation(self.operation, self, self.quantization.backward, call)

    @nn.nowrap
    def read_range(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return the scale and the zero point of a static or learned range.

        An static range is updated by x while its collection is mutable. A learned one starts from x if it is missing.
        """
        if isinstance(operand.source, Static):
            return self._read_static(operand, x)
        names = _operand_ranges.list_learned_names(operand)
        if not all(self.has_variable(SCALES, name) for name in names):
            self._require_mutable(SCALES, operand)
            for name, start in zip(names, _operand_ranges.compute_initial(operand, x), strict=True):
                self.variable(SCALES, name, self._box_scale, operand, start)
        parts = [meta.unbox(self.get_variable(SCALES, name)) for name in names]
        return _operand_ranges.read_learned(operand, tuple(parts))

    @nn.nowrap
    def read_constants(self, operand: LayerOperand) -> Parameters:
        """Return the scale and the zero point that `convert` stored for the activations."""
        stored = self._read(RANGES, operand.role)
        expected = 'its range in the collection "ranges", which jq.flax.convert stores there'
        is_converted = isinstance(stored, Mapping) and "scale" in stored
        checks.require(is_converted, "flax", operand.role, expected, "none")
        assert stored is not None
        return stored["scale"], stored.get("zero_point")

    @nn.nowrap
    def _read_static(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return the scale and the zero point of a static range, updated by x where the collection is mutable."""
        is_mutable = self.is_mutable_collection(RANGES)
        if not self.has_variable(RANGES, operand.role):
            self._require_mutable(RANGES, operand)
        state = self.variable(RANGES, operand.role, _operand_ranges.make_state, operand, x)
        is_state = isinstance(state.value, Mapping) and "state" in state.value
        expected = "the state of a calibrator, which init makes for a float kernel"
        checks.require(is_state, "flax", operand.role, expected, "the constants of a converted one")
        # `init` does not count as a batch: its x is quantized with its own range.
        if self.is_initializing():
            return compute_parameters("quantize", x, operand.spec, None, None)[:2]
        if is_mutable:
            state.value = _operand_ranges.update_state(operand, state.value, x)
        expected = f'a range: call apply(..., mutable=["{RANGES}"]) with data, and use the "{RANGES}" that it returns'
        checks.require(_operand_ranges.has_data(state.value["batches"]), "flax", operand.role, expected, "no data")
        return _operand_ranges.finalize_state(operand, state.value, x.shape)

    @nn.nowrap
    def _require_mutable(self, collection: str, operand: LayerOperand) -> None:
        """Raise ContractValueError unless a missing variable can be created in a collection."""
        expected = (
            f'it in the collection "{collection}", or apply(..., mutable=["{collection}"]) with data to start it '
            f"(nn.scan and nn.vmap need the collection in variable_axes)"
        )
        checks.require(self.is_mutable_collection(collection), "flax", operand.role, expected, "neither")

    @nn.nowrap
    def _read(self, collection: str, name: str) -> Any:
        """Return the value of a variable, or None if it is missing."""
        return self.get_variable(collection, name) if self.has_variable(collection, name) else None

    @nn.nowrap
    def describe_layer(self) -> str:
        """Return the path of the layer around this module, for errors."""
        return "/".join(self.path[:-1]) or type(self.parent if isinstance(self.parent, nn.Module) else self).__name__

    @nn.nowrap
    def read_operands(self) -> Operands:
        """Return how the weights and the activations are quantized."""
        return check_layer("flax", self.quantization)

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
        for operand, argument in ((weight, "weight_spec"), (activation, "activation_spec")):
            text = _quantization.describe_converted(operand)
            # `convert` wrote these descriptions; `record_operands` does this for float variables.
            stored = self._read(RANGES, argument)
            converted = stored.text if isinstance(stored, StaticText) else text
            expected = f"what the variables were converted with: {converted}"
            checks.require(converted == text, "flax", argument, expected, text)
        _conversion.check_kernel(weight, kernel)
        # Variables written by another program may lack the descriptions. Then only their arrays can be compared.
        is_stored = self.has_variable(RANGES, "activation")
        is_static = activation is not None and not isinstance(activation.source, Dynamic)
        expected = "a spec with activation_range=Static(...) or Learned(), because the variables hold a static range"
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
            self.put_variable(RANGES, RECORD, self._make_record(weight, activation, kernel, stored_axes))
            return
        # Variables of an older call may hold ranges of another spec, which would give wrong codes without an error.
        record = self._read(RANGES, RECORD)
        for operand, role in ((weight, "weight"), (activation, "activation")):
            recorded = getattr(record, role, operand)
            if _quantization.is_alike(operand, recorded):
                continue
            # The repr of a spec is slow, so the text is built only for the error.
            expected = f'what the variables were made with (a call with mutable=["{RANGES}"] updates them): {recorded}'
            checks.refuse("flax", f"{role}_spec", expected, operand)

    @nn.nowrap
    def _make_record(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> LayerRecord:
        """Return the record from which `convert` finds this layer."""
        parent = self.parent
        is_ready = getattr(parent, "promote_dtype", promote_dtype) is promote_dtype
        # Attention layers of flax pass no promote_dtype on: the error of `convert` names them.
        outer = getattr(parent, "parent", None)
        attention = type(outer).__name__ if isinstance(outer, nn.MultiHeadDotProductAttention) else None
        # flax compares the shapes of a parameter and of its stored codes. The layers of this package permit a
        # stored order; flax's own layers do not.
        stored_axes = stored_axes if getattr(parent, "permits_stored_order", False) else ()
        shape = tuple(kernel.shape)
        names = (self.kernel_name, shape, kernel.dtype, is_ready, attention, stored_axes)
        return LayerRecord(weight, activation, *names)

    @nn.nowrap
    def _box_scale(self, operand: LayerOperand, start: jax.Array) -> Any:
        """Return a learned scale, partitioned like its weights if they are partitioned."""
        box = self._read_weights()
        names = getattr(box, "names", None)
        if operand.role != "weight" or not isinstance(box, meta.AxisMetadata) or names is None:
            return start
        part_names = _conversion.match_part_names(names, start.shape)
        return dataclasses.replace(box, value=start, names=part_names)  # type: ignore[call-arg]

    @nn.nowrap
    def _read_weights(self) -> Any:
        """Return the weights in "params" with their partitioning, or None if they are elsewhere."""
        parent = self.parent
        is_stored = isinstance(parent, nn.Module) and parent.has_variable("params", self.kernel_name)
        return parent.get_variable("params", self.kernel_name) if is_stored else None  # type: ignore[union-attr]


# The names of these classes are in the paths of users' variables: "DotGeneral_0", for example.


class DotGeneral(LinenContraction):
    """`jax.lax.dot_general(activations, weights, ...)` in integers."""

    operation = _operations.DOT_GENERAL


class ConvGeneralDilated(LinenContraction):
    """`jax.lax.conv_general_dilated(activations, weights, ...)` in integers."""

    operation = _operations.CONV_GENERAL_DILATED


class EinsumProduct(LinenContraction):
    """`jax.numpy.einsum(subscripts, activations, weights)` in integers."""

    operation = _operations.EINSUM


class Table(LinenContraction):
    """The two operations of an `Embed` on its table, which share one range."""

    @nn.compact
    def __call__(self, operation: LayerOperation, *operands: Any) -> jax.Array:
        """Return rows of the table, or the products of queries with all rows."""
        return _operations.run_operation(operation, self, self.quantization.backward, operation.bind(*operands))


@dataclasses.dataclass(frozen=True)
class LinenHook:
    """A function that flax's layers take as `dot_general`, or that makes the module for `dot_general_cls`.

    It is no module, but makes one in each layer that calls it, so that many layers can be given the same one. Two of
    them are equal if their arguments are.
    """

    module: type[LinenContraction]
    quantization: Quantization

    def __call__(self, *operands: Any, **arguments: Any) -> Any:
        """Return the contraction of the operands; without operands, the module that contracts."""
        module = self.module(self.quantization)
        expected = "a call by a Linen layer (for NNX: jaxquant.flax.nnx.dot_general, conv_general_dilated)"
        checks.require(module.scope is not None or not operands, "flax", self.module.__name__, expected, "no layer")
        # `dot_general_cls` is called without operands, `dot_general` with them.
        return module(*operands, **arguments) if operands else module


# What flax's own layers take to contract in integers.


def dot_general(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    *,
    weight_range: RangeSource = Dynamic(),
    activation_range: RangeSource = Dynamic(),
    backward: Backward = FloatBackward(),
) -> LinenHook:
    """Return a function that any flax Linen layer with a `dot_general` attribute can contract with.

    layer(x) = quantized_dot_general(x, kernel, ...) + bias, where layer = nn.Dense(..., dot_general=this)

    The layer also needs `promote_dtype=jq.flax.promote_dtype`: flax's own `promote_dtype` does not accept a converted
    kernel, and in bfloat16 it rounds the kernel before it is quantized. `nn.MultiHeadDotProductAttention` does not pass
    `promote_dtype` to its layers: with this function it can be trained, but not converted.

    Args:
        weight_spec: How to quantize the kernel, the right operand.
        activation_spec: How to quantize the left operand; None leaves it in floats.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the left operand's range: `Dynamic()`, `Static(...)` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers. In each layer it makes a module, and the ranges of that module are in the
        variables of the layer.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> from flax import linen as nn
        >>> dot_general = jq.flax.dot_general(jq.QuantSpec(jnp.int8, jq.PerAxis(-1)))
        >>> layer = nn.Dense(2, dot_general=dot_general, promote_dtype=jq.flax.promote_dtype)
        >>> x = jnp.ones((1, 3))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> serving = jq.flax.convert(layer, variables)
        >>> bool((layer.apply(serving, x) == layer.apply(variables, x)).all())
        True

    Source: flax.linen.Dense, `dot_general`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    check_layer("flax.dot_general", quantization)
    return LinenHook(DotGeneral, quantization)


def conv_general_dilated(
    weight_spec: QuantSpec,
    activation_spec: QuantSpec | None = None,
    *,
    weight_range: RangeSource = Dynamic(),
    activation_range: RangeSource = Dynamic(),
    backward: Backward = FloatBackward(),
) -> LinenHook:
    """Return a function that flax's Linen convolutions can convolve with.

    layer(x) = quantized_conv_general_dilated(x, kernel, ...) + bias, where
    layer = nn.Conv(..., conv_general_dilated=this)

    The layer also needs `promote_dtype=jq.flax.promote_dtype`, for the reasons that `dot_general` gives.

    Args:
        weight_spec: How to quantize the kernel.
        activation_spec: How to quantize the images; None leaves them in floats.
        weight_range: Static. The source of the kernel's range: `Dynamic()` or `Learned()`.
        activation_range: Static. The source of the images' range: `Dynamic()`, `Static(...)` or `Learned()`.
        backward: Static. How to contract gradients: `jq.FloatBackward()` or `jq.Int8Backward()`.

    Returns:
        A function for any number of layers.

    Raises:
        TypeError: An argument has a wrong type, or a spec has a dtype that cannot be contracted in integers.
        ValueError: A spec is not supported with the source of its range.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq, jaxquant.flax
        >>> from flax import linen as nn
        >>> specs = jq.QuantSpec(jnp.int8, jq.PerAxis(-1)), jq.QuantSpec(jnp.uint8)
        >>> conv = jq.flax.conv_general_dilated(*specs, activation_range=jq.Static(jq.calibration.minmax))
        >>> layer = nn.Conv(2, (3,), conv_general_dilated=conv, promote_dtype=jq.flax.promote_dtype)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 4, 1)))
        >>> layer.apply(variables, jnp.ones((1, 4, 1)), mutable=["ranges"])[0].shape
        (1, 4, 2)

    Source: flax.linen.Conv, `conv_general_dilated`.
    """
    quantization = Quantization(weight_spec, activation_spec, weight_range, activation_range, backward)
    check_layer("flax.conv_general_dilated", quantization)
    return LinenHook(ConvGeneralDilated, quantization)
