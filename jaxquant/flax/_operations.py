"""The table of operations: how each kind of layer trains and serves, and which axes of its kernel are output features.

A layer of Linen or NNX uses a row of the table. The layers of the two differ only in how they hold variables, which the
protocol `Variables` describes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .._arrays.quantized_array import QuantizedArray
from .._contractions.conv import conv_general_dilated
from .._contractions.dot import dot_general
from .._contractions.einsum import einsum
from .._contractions.take import take
from .._core import checks
from .._core.granularity import PerAxis, PerFeature, PerTensor
from .._training.backward import Backward
from .._training.conv_general_dilated import quantized_conv_general_dilated
from .._training.dot_general import quantized_dot_general
from .._training.einsum import quantized_einsum
from .._training.quantizer import Quantizer
from ._layer_operand import LayerOperand, Operands, resolve_tokens
from ._operand_quantizer import Parameters, make_quantizer, quantize_operand
from .ranges import Dynamic

# The arguments of `jax.lax.conv_general_dilated` after its operands, in its order.
_CONV_ARGUMENTS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"),
    *("batch_group_count", "precision", "preferred_element_type"),
)
Quantizers = tuple[Quantizer | None, Quantizer | None]


class Call(NamedTuple):
    """The arguments of one call of an operation.

    Attributes:
        x: the activations, or the indices of a lookup.
        kernel: float weights, or a QuantizedArray.
        arguments: the static arguments, by name.
    """

    x: Any
    kernel: Any
    arguments: dict[str, Any]


def _keep_order(_: Call) -> tuple[int, ...]:
    """Return no axes, for operations that are fastest with a kernel in its logical order."""
    return ()


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        bind: takes the arguments that flax's layer passes, and returns a Call.
        find_output_axes: takes a Call, and returns the axes of its kernel that are output features, counted from the
            back, because `nn.scan` and `nnx.vmap` may stack other axes in front of them.
        train: takes a Call with float operands, their Quantizers (None leaves an operand in floats), and the backward
            rule and its key as keyword arguments. Returns floats.
        serve: takes a Call with a quantized kernel, and returns floats.
        find_stored_axes: takes a Call, and returns the axes of its kernel, counted from the back, that a converted
            kernel holds last in memory: those that an integer contraction sums, in the order of the axes of x.
        quantizes_x: whether x is quantized; the indices of a lookup are not.
        find_x_axes: takes a Call, and returns the axes of x that are contracted; None stands for the last one.
    """

    bind: Callable[..., Call]
    find_output_axes: Callable[[Call], tuple[int, ...]]
    train: Callable[[Call, Quantizers, dict[str, Any]], jax.Array]
    serve: Callable[[Call], jax.Array]
    find_stored_axes: Callable[[Call], tuple[int, ...]] = _keep_order
    quantizes_x: bool = True
    find_x_axes: Callable[[Call], Sequence[int]] | None = None


class Variables(Protocol):
    """How a layer holds its variables: the part in which Linen and NNX differ."""

    def find_place(self) -> str:
        """Return the path of the layer, for errors."""
        ...

    def find_operands(self) -> Operands:
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
        """Return the scale and the zero point of an observed or learned range, and update the range by x."""
        ...

    def read_constants(self, operand: LayerOperand) -> Parameters:
        """Return the scale and the zero point of converted activations."""
        ...

    def make_key(self) -> jax.Array | None:
        """Return the key of a gradient that is rounded stochastically, or None."""
        ...


def run_operation(operation: Operation, variables: Variables, backward: Backward, call: Call) -> jax.Array:
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
    with checks.prefix_errors(variables.find_place()):
        weight, activation = variables.find_operands()
        # The features depend on the dimension numbers of the call, so they are not resolved at construction.
        weight = resolve_features(weight, operation.find_output_axes(call))
        quantized = activation if operation.quantizes_x else None
        if quantized is not None and operation.find_x_axes is not None:
            quantized = resolve_tokens(quantized, call.x.ndim, operation.find_x_axes(call))
        if isinstance(call.kernel, QuantizedArray):
            variables.check_converted(weight, activation, call.kernel)
            if quantized is not None:
                is_dynamic = isinstance(quantized.source, Dynamic)
                constants = None if is_dynamic else variables.read_constants(quantized)
                call = call._replace(x=quantize_operand(quantized, call.x, constants))
            return operation.serve(call)
        # A float contraction may round differently in another layout, and a converted layer must return the numbers of
        # its training. Integers are exact in every layout.
        stored_axes = () if quantized is None else operation.find_stored_axes(call)
        variables.record_operands(weight, activation, call.kernel, stored_axes)
        # The activations come first: calibrators and learned scales are created in this order.
        x_quantizer = make_layer_quantizer(variables, quantized, call.x)
        quantizers = (x_quantizer, make_layer_quantizer(variables, weight, call.kernel))
        key = variables.make_key() if operation.quantizes_x else None
        return operation.train(call, quantizers, {"backward": backward, "key": key})


def make_layer_quantizer(variables: Variables, operand: LayerOperand | None, x: jax.Array) -> Quantizer | None:
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


def find_kept_axes(rank: int, contracted: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a kernel that a contraction keeps, counted from the back."""
    summed = {axis % rank for axis in contracted}
    return tuple(axis - rank for axis in range(rank) if axis not in summed)


def find_kept_in_einsum(subscripts: str, rank: int) -> tuple[int, ...]:
    """Return the axes of the second operand of "x,kernel->y" that y keeps, counted from the back.

    Args:
        subscripts: the subscripts of two operands, with an explicit output.
        rank: the rank of the second operand.
    """
    _, labels, result = _split_terms(subscripts, rank)
    return tuple(axis - rank for axis, label in enumerate(labels) if label in result)


def find_summed_in_einsum(subscripts: str, rank: int) -> tuple[int, ...]:
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
    lhs: jax.Array, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None
) -> Call:  # fmt: skip
    """Return the call of a dot_general, whose result has the dtype of the activations unless another is given."""
    dtype = preferred_element_type or lhs.dtype
    numbers = {"dimension_numbers": dimension_numbers}
    return Call(lhs, rhs, {**numbers, "precision": precision, "preferred_element_type": dtype})


def _bind_attend(query: jax.Array, table: Any) -> Call:
    """Return the dot_general of queries with the rows of a table."""
    return _bind_dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))


def _find_dot_general_axes(call: Call) -> tuple[int, ...]:
    """Return the axes of the right operand that a dot_general keeps."""
    (_, contracted), _ = call.arguments["dimension_numbers"]
    return find_kept_axes(call.kernel.ndim, contracted)


def _find_summed_axes(call: Call) -> tuple[int, ...]:
    """Return the axes of the right operand that a dot_general sums, in the order of the left operand."""
    contracted, _ = call.arguments["dimension_numbers"]
    return tuple(axis - call.kernel.ndim for _, axis in sorted(zip(*contracted, strict=True)))


def _train_dot_general(call: Call, quantizers: Quantizers, gradients: dict[str, Any]) -> jax.Array:
    """Return the dot_general of the quantized operands, with a gradient."""
    lhs_spec, rhs_spec = quantizers
    specs = {"lhs_spec": lhs_spec, "rhs_spec": rhs_spec}
    return quantized_dot_general(call.x, call.kernel, **call.arguments, **specs, **gradients)


def _serve_dot_general(call: Call) -> jax.Array:
    """Return the dot_general with a converted kernel."""
    return dot_general(call.x, call.kernel, **call.arguments)


# conv_general_dilated.


def _bind_conv_general_dilated(lhs: jax.Array, rhs: Any, *positional: Any, **arguments: Any) -> Call:
    """Return the call of a convolution, whose result has the dtype of the images unless another is given."""
    arguments = {**dict(zip(_CONV_ARGUMENTS, positional, strict=False)), **arguments}
    return Call(lhs, rhs, {**arguments, "preferred_element_type": arguments.get("preferred_element_type") or lhs.dtype})


def _find_conv_general_dilated_axes(call: Call) -> tuple[int, ...]:
    """Return the axis of a convolution's kernel that holds output features."""
    shapes = (call.x.shape, call.kernel.shape)
    # The rank decides what None and the layout strings mean.
    numbers = jax.lax.conv_dimension_numbers(*shapes, call.arguments.get("dimension_numbers"))
    return (numbers.rhs_spec[0] - call.kernel.ndim,)


def _train_conv_general_dilated(call: Call, quantizers: Quantizers, gradients: dict[str, Any]) -> jax.Array:
    """Return the convolution of the quantized operands, with a gradient."""
    lhs_spec, rhs_spec = quantizers
    specs = {"lhs_spec": lhs_spec, "rhs_spec": rhs_spec}
    return quantized_conv_general_dilated(call.x, call.kernel, **call.arguments, **specs, **gradients)


def _serve_conv_general_dilated(call: Call) -> jax.Array:
    """Return the convolution with a converted kernel."""
    return conv_general_dilated(call.x, call.kernel, **call.arguments)


# einsum.


def _bind_einsum(
    subscripts: str, lhs: jax.Array, rhs: Any, precision: Any = None, preferred_element_type: Any = None
) -> Call:  # fmt: skip
    """Return the call of an einsum, whose result has the dtype of the activations unless another is given."""
    dtype = preferred_element_type or lhs.dtype
    return Call(lhs, rhs, {"subscripts": subscripts, "precision": precision, "preferred_element_type": dtype})


def _find_einsum_axes(call: Call) -> tuple[int, ...]:
    """Return the axes of the second operand that an einsum keeps."""
    return find_kept_in_einsum(call.arguments["subscripts"], call.kernel.ndim)


def _find_einsum_summed_axes(call: Call) -> tuple[int, ...]:
    """Return the axes of the second operand that an einsum contracts, in the order of the first operand."""
    return find_summed_in_einsum(call.arguments["subscripts"], call.kernel.ndim)


def _split_subscripts(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments of an einsum, and the arguments without the subscripts."""
    static = dict(call.arguments)
    return (static.pop("subscripts"), call.x, call.kernel), static


def _train_einsum(call: Call, quantizers: Quantizers, gradients: dict[str, Any]) -> jax.Array:
    """Return the einsum of the quantized operands, with a gradient."""
    positional, static = _split_subscripts(call)
    return quantized_einsum(*positional, specs=quantizers, **static, **gradients)


def _serve_einsum(call: Call) -> jax.Array:
    """Return the einsum with a converted kernel."""
    positional, static = _split_subscripts(call)
    return einsum(*positional, **static)


# Rows of a table.


def _bind_lookup(table: Any, indices: jax.Array) -> Call:
    """Return the lookup of rows of a table."""
    return Call(indices, table, {})


def _find_lookup_axes(call: Call) -> tuple[int, ...]:
    """Return the rows as the output features: `attend` has an output for each row, and both share one range."""
    return find_kept_axes(call.kernel.ndim, (call.kernel.ndim - 1,))


def _train_lookup(call: Call, quantizers: Quantizers, gradients: dict[str, Any]) -> jax.Array:
    """Return rows of the quantized table, NaN for an index beyond it."""
    quantizer = quantizers[1]
    assert quantizer is not None
    return jnp.take(quantizer(call.kernel), call.x, axis=0)


def _serve_lookup(call: Call) -> jax.Array:
    """Return rows of a converted table, NaN for an index beyond it."""
    # `jnp.take`, which trains, fills with NaN by default.
    return take(call.kernel, call.x, axis=0, mode="fill")


# The table.

DOT_GENERAL = Operation(
    _bind_dot_general, _find_dot_general_axes, _train_dot_general, _serve_dot_general, _find_summed_axes,
    find_x_axes=lambda call: call.arguments["dimension_numbers"][0][0],
)  # fmt: skip
# The rows of a table are contiguous for lookups, and so its last axis, which `attend` contracts, is already the last.
ATTEND = Operation(_bind_attend, _find_dot_general_axes, _train_dot_general, _serve_dot_general)
CONV_GENERAL_DILATED = Operation(
    _bind_conv_general_dilated, _find_conv_general_dilated_axes, _train_conv_general_dilated,
    _serve_conv_general_dilated,
)  # fmt: skip
EINSUM = Operation(
    _bind_einsum, _find_einsum_axes, _train_einsum, _serve_einsum, _find_einsum_summed_axes
)  # fmt: skip
LOOKUP = Operation(_bind_lookup, _find_lookup_axes, _train_lookup, _serve_lookup, quantizes_x=False)
TABLE_FEATURES = find_kept_axes(2, (1,))  # of `ATTEND` and `LOOKUP`
