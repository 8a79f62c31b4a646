"""The table of operations: how each kind of layer trains and serves, and which axes of its kernel are output features.

A layer of Linen or NNX uses a row of the table. The layers of the two differ only in how they hold variables, which the
protocol `LayerVariables` describes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._arrays.quantized_array import QuantizedArray
from .._contractions.conv import conv_general_dilated
from .._contractions.dot import dot_general
from .._contractions.einsum import einsum
from .._contractions.take import take
from .._core import checks
from .._core.granularity import PerAxis, PerFeature, PerTensor
from .._training.backward_choices import Backward, FloatBackward
from .._training.conv_general_dilated import quantized_conv_general_dilated
from .._training.dot_general import quantized_dot_general
from .._training.einsum import quantized_einsum
from .._training.fake_quantize import Quantizer
from .._training.range_sources import Dynamic
from ._operand_ranges import Parameters, make_quantizer, quantize_operand
from ._quantization import LayerOperand, Operands, has_forms, resolve_tokens

# The arguments of `jax.lax.conv_general_dilated` after its operands, in its order.
_CONV_ARGUMENTS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"),
    *("batch_group_count", "precision", "preferred_element_type"),
)
Kernel = jax.Array | QuantizedArray
# The two operands' contracted dimensions, and their batch dimensions.
DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
Precision = jax.lax.PrecisionLike


class LayerCall(NamedTuple):
    """The arguments of one call of an operation.

    Attributes:
        x: the activations, or the indices of a lookup.
        kernel: float weights, or a QuantizedArray.
        arguments: the static arguments of the function that contracts, by name.
    """

    x: jax.Array
    kernel: Kernel
    arguments: dict[str, Any]


def _list_no_axes(_: LayerCall) -> tuple[int, ...]:
    """Return no axes, for operations that are fastest with a kernel in its logical order."""
    return ()


@dataclasses.dataclass(frozen=True)
class LayerOperation:
    """One row of the table.

    `train` and `serve` are called with x, the kernel, and the static arguments of the call by name. They are the
    functions of this package themselves where that is possible, so that few frames are between a layer and its codes.

    Attributes:
        bind: takes the arguments that flax's layer passes, and returns a LayerCall.
        list_feature_axes: takes a LayerCall, and returns the axes of its kernel that are output features, counted from
            the back, because `nn.scan` and `nnx.vmap` may stack other axes in front of them.
        train: takes a float kernel, and `lhs_spec` and `rhs_spec`, the Quantizers of x and of the kernel (None leaves
            an operand in floats), `backward` and `key`, as in `quantized_dot_general`. Returns floats.
        serve: takes a quantized kernel, and returns floats.
        contract_floats: JAX's operation on two float arrays, for kernels with offsets or quantized scales that train.
        list_stored_axes: takes a LayerCall, and returns the axes of its kernel, counted from the back, that a converted
            kernel holds last in memory: those that an integer contraction sums, in the order of the axes of x.
        quantizes_x: whether x is quantized; the indices of a lookup are not.
        list_x_axes: takes a LayerCall, and returns the axes of x that are contracted; None stands for the last one.
    """

    bind: Callable[..., LayerCall]
    list_feature_axes: Callable[[LayerCall], tuple[int, ...]]
    train: Callable[..., jax.Array]
    serve: Callable[..., jax.Array]
    contract_floats: Callable[..., jax.Array]
    list_stored_axes: Callable[[LayerCall], tuple[int, ...]] = _list_no_axes
    quantizes_x: bool = True
    list_x_axes: Callable[[LayerCall], Sequence[int]] | None = None


class LayerVariables(Protocol):
    """How a layer holds its variables: the part in which Linen and NNX differ."""

    def describe_layer(self) -> str:
        """Return the path of the layer, for errors."""
        ...

    def read_operands(self) -> Operands:
        """Return how the layer quantizes its weights and its activations."""
        ...

    def check_converted(self, weight: LayerOperand, activation: LayerOperand | None, kernel: QuantizedArray) -> None:
        """Check that the layer's variables were converted with the same operands."""
        ...

    def record_operands(
        self, weight: LayerOperand, activation: LayerOperand | None, kernel: jax.Array, stored_axes: tuple[int, ...]
    ) -> None:
        """Record the operands of a layer that trains, where the layer's variables hold them."""
        ...

    def read_range(self, operand: LayerOperand, x: jax.Array) -> Parameters:
        """Return the scale and the zero point of a static or learned range, and update the range by x."""
        ...

    def read_constants(self, operand: LayerOperand) -> Parameters:
        """Return the scale and the zero point of converted activations."""
        ...

    def make_key(self) -> jax.Array | None:
        """Return the key of a gradient that is rounded stochastically, or None."""
        ...


def run_operation(
    operation: LayerOperation, variables: LayerVariables, backward: Backward, call: LayerCall
) -> jax.Array:  # fmt: skip
    """Return the result of an operation: trained where the kernel is float, served in integers where it is converted.

    Args:
        operation: a row of the table.
        variables: the layer.
        backward: how to contract gradients.
        call: the operands and the static arguments.

    Raises:
        ContractValueError: after the path of the layer: a range is missing, or the variables do not fit its specs.
        ContractTypeError: after the path of the layer: an operand has a dtype that its specs do not fit.
    """
    x, kernel, arguments = call
    with checks.prefix_errors(variables.describe_layer()):
        weight, activation = variables.read_operands()
        # The features depend on the dimension numbers of the call, so they are not resolved at construction.
        weight = resolve_features(weight, operation.list_feature_axes(call))
        quantized = activation if operation.quantizes_x else None
        if quantized is not None and operation.list_x_axes is not None:
            quantized = resolve_tokens(quantized, x.ndim, operation.list_x_axes(call))
        if isinstance(kernel, QuantizedArray):
            variables.check_converted(weight, activation, kernel)
            if quantized is None:
                return operation.serve(x, kernel, **arguments)
            is_dynamic = isinstance(quantized.source, Dynamic)
            constants = None if is_dynamic else variables.read_constants(quantized)
            return operation.serve(quantize_operand(quantized, x, constants), kernel, **arguments)
        # A float contraction may round differently in another layout, and a converted layer must return the numbers of
        # its training. Integers are exact in every layout.
        stored_axes = () if quantized is None else operation.list_stored_axes(call)
        variables.record_operands(weight, activation, kernel, stored_axes)
        # The activations come first: calibrators and learned scales are created in this order.
        x_quantizer = _make_quantizer(variables, quantized, x)
        kernel_quantizer = _make_quantizer(variables, weight, kernel)
        if has_forms(weight):
            # The contractions that train find no offsets and quantize no scales, so the kernel is rounded before them.
            assert kernel_quantizer is not None
            expected = "FloatBackward(), because weight_spec has an offset or a scale_spec"
            checks.require(isinstance(backward, FloatBackward), "flax", "backward", expected, backward)
            kernel, kernel_quantizer = kernel_quantizer(kernel), None
            if x_quantizer is None:
                return operation.contract_floats(x, kernel, **arguments)
        quantizers = {"lhs_spec": x_quantizer, "rhs_spec": kernel_quantizer}
        key = variables.make_key() if operation.quantizes_x else None
        return operation.train(x, kernel, **arguments, **quantizers, backward=backward, key=key)


def _make_quantizer(variables: LayerVariables, operand: LayerOperand | None, x: jax.Array) -> Quantizer | None:
    """Return the Quantizer of one operand of a layer that trains, or None for floats."""
    if operand is None:
        return None
    is_dynamic = isinstance(operand.source, Dynamic)
    return make_quantizer(operand, x, None if is_dynamic else variables.read_range(operand, x))


# Output features.


def resolve_features(weight: LayerOperand, axes: Sequence[int]) -> LayerOperand:
    """Return the operand with `PerFeature()` replaced by the axes of the kernel that are output features.

    Args:
        weight: the weights.
        axes: the axes of the kernel that the contraction keeps, counted from the back.
    """
    spec = weight.spec
    if PerFeature() not in (spec.granularity, spec.zero_point_granularity):
        return weight
    # If the contraction keeps no axis of the kernel, there is one output feature.
    features = PerAxis(tuple(axes)) if axes else PerTensor()
    granularities = {
        name: features if getattr(spec, name) == PerFeature() else getattr(spec, name)
        for name in ("granularity", "zero_point_granularity")
    }
    return weight._replace(spec=dataclasses.replace(spec, **granularities))


def list_kept_axes(rank: int, contracted: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a kernel that a contraction keeps, counted from the back."""
    summed = {axis % rank for axis in contracted}
    return tuple(axis - rank for axis in range(rank) if axis not in summed)


def match_kept_axes(subscripts: str, rank: int) -> tuple[int, ...]:
    """Return the axes of the second operand of "x,kernel->y" that y keeps, counted from the back.

    Args:
        subscripts: the subscripts of two operands, with an explicit output.
        rank: the rank of the second operand.
    """
    _, labels, result = _split_terms(subscripts, rank)
    return tuple(axis - rank for axis, label in enumerate(labels) if label in result)


def match_summed_axes(subscripts: str, rank: int) -> tuple[int, ...]:
    """Return the axes of the second operand of "x,kernel->y" that x has and y lacks, in the order of x."""
    x, labels, result = _split_terms(subscripts, rank)
    return tuple(labels.index(label) - rank for label in x.replace(".", "") if label in labels and label not in result)


def _split_terms(subscripts: str, rank: int) -> tuple[str, list[str], str]:
    """Return the term of x, the label of each axis of the kernel, and the term of y."""
    operands, _, result = subscripts.replace(" ", "").partition("->")
    x, kernel = operands.split(",")
    before, dots, after = kernel.partition("...")
    # An ellipsis represents the axes without a letter.
    hidden = ["..."] * (rank - len(before) - len(after)) if dots else []
    return x, [*before, *hidden, *after], result


# dot_general, and the products of queries with the rows of a table.


def _bind_dot_general(
    lhs: jax.Array, rhs: Kernel, dimension_numbers: DotDimensionNumbers, precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
) -> LayerCall:  # fmt: skip
    """Return the call of a dot_general; the result has the dtype of the activations unless another is given."""
    dtype = preferred_element_type or lhs.dtype
    numbers = {"dimension_numbers": dimension_numbers}
    return LayerCall(lhs, rhs, {**numbers, "precision": precision, "preferred_element_type": dtype})


def _bind_attend(query: jax.Array, table: Kernel) -> LayerCall:
    """Return the dot_general of queries with the rows of a table."""
    return _bind_dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))


def _list_dot_general_features(call: LayerCall) -> tuple[int, ...]:
    """Return the axes of the right operand that a dot_general keeps."""
    (_, contracted), _ = call.arguments["dimension_numbers"]
    return list_kept_axes(call.kernel.ndim, contracted)


def _list_dot_general_summed(call: LayerCall) -> tuple[int, ...]:
    """Return the axes of the right operand that a dot_general sums, in the order of the left operand."""
    contracted, _ = call.arguments["dimension_numbers"]
    return tuple(axis - call.kernel.ndim for _, axis in sorted(zip(*contracted, strict=True)))


# conv_general_dilated.


def _bind_conv_general_dilated(lhs: jax.Array, rhs: Kernel, *positional: Any, **arguments: Any) -> LayerCall:
    """Return the call of a convolution; the result has the dtype of the images unless another is given."""
    arguments = {**dict(zip(_CONV_ARGUMENTS, positional, strict=False)), **arguments}
    dtype = arguments.get("preferred_element_type") or lhs.dtype
    return LayerCall(lhs, rhs, {**arguments, "preferred_element_type": dtype})


def _list_convolution_features(call: LayerCall) -> tuple[int, ...]:
    """Return the axis of a convolution's kernel that holds output features."""
    shapes = (call.x.shape, call.kernel.shape)
    # The rank decides what None and the layout strings mean.
    numbers = jax.lax.conv_dimension_numbers(*shapes, call.arguments.get("dimension_numbers"))
    return (numbers.rhs_spec[0] - call.kernel.ndim,)


# einsum.


def _bind_einsum(
    subscripts: str, lhs: jax.Array, rhs: Kernel, precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
) -> LayerCall:  # fmt: skip
    """Return the call of an einsum; the result has the dtype of the activations unless another is given."""
    dtype = preferred_element_type or lhs.dtype
    return LayerCall(lhs, rhs, {"subscripts": subscripts, "precision": precision, "preferred_element_type": dtype})


def _list_einsum_features(call: LayerCall) -> tuple[int, ...]:
    """Return the axes of the second operand that an einsum keeps."""
    return match_kept_axes(call.arguments["subscripts"], call.kernel.ndim)


def _list_einsum_summed(call: LayerCall) -> tuple[int, ...]:
    """Return the axes of the second operand that an einsum contracts, in the order of the first operand."""
    return match_summed_axes(call.arguments["subscripts"], call.kernel.ndim)


def _train_einsum(
    x: jax.Array, kernel: jax.Array, *, subscripts: str, lhs_spec: Quantizer | None, rhs_spec: Quantizer | None,
    **arguments: Any,
) -> jax.Array:  # fmt: skip
    """Return the einsum of the quantized operands, with a gradient."""
    return quantized_einsum(subscripts, x, kernel, specs=(lhs_spec, rhs_spec), **arguments)


def _contract_float_einsum(x: jax.Array, kernel: jax.Array, *, subscripts: str, **arguments: Any) -> jax.Array:
    """Return the einsum of two float arrays."""
    return jnp.einsum(subscripts, x, kernel, **arguments)


def _serve_einsum(x: jax.Array | QuantizedArray, kernel: QuantizedArray, *, subscripts: str, **arguments: Any) -> Any:
    """Return the einsum with a converted kernel."""
    return einsum(subscripts, x, kernel, **arguments)


# Rows of a table.


def _bind_lookup(table: Kernel, indices: jax.Array) -> LayerCall:
    """Return the lookup of rows of a table."""
    return LayerCall(indices, table, {})


def _list_lookup_features(call: LayerCall) -> tuple[int, ...]:
    """Return the rows as the output features: `attend` has an output for each row, and both share one range."""
    return list_kept_axes(call.kernel.ndim, (call.kernel.ndim - 1,))


def _train_lookup(
    indices: jax.Array, table: jax.Array, *, lhs_spec: None, rhs_spec: Quantizer, backward: Backward, key: None
) -> jax.Array:
    """Return rows of the quantized table, NaN for an index beyond it."""
    del lhs_spec, backward, key  # a lookup quantizes no activations, and its gradient is a sum
    return _look_up_floats(indices, rhs_spec(table))


def _look_up_floats(indices: jax.Array, table: jax.Array) -> jax.Array:
    """Return rows of a float table, NaN for an index beyond it."""
    return jnp.take(table, indices, axis=0)


def _serve_lookup(indices: jax.Array, table: QuantizedArray) -> Any:
    """Return rows of a converted table, NaN for an index beyond it."""
    # `jnp.take`, which trains, fills with NaN by default.
    return take(table, indices, axis=0, mode="fill")


# The table.

DOT_GENERAL = LayerOperation(
    _bind_dot_general, _list_dot_general_features, quantized_dot_general, dot_general, jax.lax.dot_general,
    _list_dot_general_summed,
    list_x_axes=lambda call: call.arguments["dimension_numbers"][0][0],
)  # fmt: skip
# The rows of a table are contiguous for lookups, and so its last axis, which `attend` contracts, is already the last.
ATTEND = LayerOperation(
    _bind_attend, _list_dot_general_features, quantized_dot_general, dot_general, jax.lax.dot_general
)
CONV_GENERAL_DILATED = LayerOperation(
    _bind_conv_general_dilated,
    _list_convolution_features,
    quantized_conv_general_dilated,
    conv_general_dilated,
    jax.lax.conv_general_dilated,
)
EINSUM = LayerOperation(
    _bind_einsum, _list_einsum_features, _train_einsum, _serve_einsum, _contract_float_einsum, _list_einsum_summed
)
LOOKUP = LayerOperation(
    _bind_lookup, _list_lookup_features, _train_lookup, _serve_lookup, _look_up_floats, quantizes_x=False
)
TABLE_FEATURES = list_kept_axes(2, (1,))  # of `ATTEND` and `LOOKUP`
