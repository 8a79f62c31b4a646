"""How each operation of a program runs on codes, and with a gradient on floats that stand for codes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._contractions.conv import plan_array_convolution
from .._contractions.ragged import contract_ragged
from .._contractions.take import take
from .._core import checks, sharding
from .._kernels.weight_chunks import delay_floats
from .._program import analysis, jaxpr
from .._program.jaxpr import Equation
from .._training.backward_choices import Backward, FloatBackward
from .._training.contraction_vjp import TrainedContraction, compute_operand_cotangents
from .._training.conv_general_dilated import ConvContraction
from .._training.dot_general import DotContraction

_NAME = "prepare"


class CodedContraction(Protocol):
    """A contraction that is linear in each of its operands."""

    def contract_quantized(self, *operands: Any, epilogue: Any = None) -> Any:
        """Return the contraction of quantized and float operands.

        With the epilogue of an integer contraction, the result is codes.
        """
        ...

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the contraction of floats of one dtype."""
        ...


def make_operation(equation: Equation) -> CodedContraction:
    """Return the operation of a product of matrices, ragged or not, or of a convolution."""
    parameters, dtype = equation.params, jaxpr.read_dtype(equation.outvars[0])
    operation, out_sharding = analysis.OPERATIONS[jaxpr.read_name(equation)], parameters.get("out_sharding")
    if operation == "ragged_dot":
        return RaggedContraction(
            parameters["ragged_dot_dimension_numbers"], parameters["precision"], dtype, out_sharding
        )
    if operation == "dot_general":
        return DotContraction(_NAME, parameters["dimension_numbers"], parameters["precision"], dtype, out_sharding)
    lhs, rhs = (jax.ShapeDtypeStruct(jaxpr.read_shape(v), jaxpr.read_dtype(v)) for v in equation.invars)
    plan = plan_array_convolution(
        _NAME, lhs, rhs, parameters["window_strides"], parameters["padding"], parameters["lhs_dilation"],
        parameters["rhs_dilation"], parameters["dimension_numbers"], parameters["feature_group_count"],
        parameters["batch_group_count"],
    )  # fmt: skip
    return ConvContraction(plan, parameters["precision"], dtype)


class RaggedContraction(NamedTuple):
    """A `ragged_dot_general` with its static attributes."""

    numbers: lax.RaggedDotDimensionNumbers
    precision: Any
    preferred: Any
    out_sharding: Any

    def contract_quantized(self, *operands: Any, epilogue: None = None) -> jax.Array:
        """Return the contraction of two operands, at least one of them quantized, with the sizes of the groups."""
        assert epilogue is None
        lhs, rhs, group_sizes = operands
        (ragged,), (group,) = self.numbers.lhs_ragged_dimensions, self.numbers.rhs_group_dimensions
        return contract_ragged(
            lhs, rhs, group_sizes, function=_NAME, numbers=self.numbers.dot_dimension_numbers, ragged=ragged,
            group=group, precision=self.precision, preferred=self.preferred, out_sharding=self.out_sharding,
        )  # fmt: skip

    def contract_floats(self, *operands: jax.Array) -> jax.Array:
        """Return the contraction of floats with the sizes of the groups."""
        lhs, rhs, group_sizes = operands
        return lax.ragged_dot_general(
            lhs, rhs, group_sizes, self.numbers, precision=self.precision, out_sharding=self.out_sharding
        )


def look_up(equation: Equation, table: QuantizedArray, indices: jax.Array) -> jax.Array:
    """Return the entries of a quantized table that a gather selects."""
    return arrange_lookup(equation, indices, lambda index, axis: take(table, index, axis, mode="clip"))


def arrange_lookup(
    equation: Equation, indices: jax.Array, take_entries: Callable[[jax.Array, int], jax.Array], fill: Any = None
) -> jax.Array:
    """Return the entries that a gather selects, in its layout.

    Args:
        equation: the gather.
        indices: its second operand.
        take_entries: a function of the indices along one axis and of this axis, which returns the entries.
        fill: what an index out of range gets in place of what the gather has for it, where it has something.
    """
    numbers, mode, value = (equation.params[name] for name in ("dimension_numbers", "mode", "fill_value"))
    axis = analysis.match_lookup(equation)
    assert axis is not None
    # The last dimension holds an index for each of these axes; indices of the other axes select all entries.
    indices = lax.index_in_dim(indices, numbers.start_index_map.index(axis), indices.ndim - 1, keepdims=False)
    entries = take_entries(indices, axis)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        # Negative indices are out of range, too: where they count from the end, the program has added the length.
        is_inside = (indices >= 0) & (indices < jaxpr.read_shape(equation.invars[0])[axis])
        mask = lax.broadcast_in_dim(is_inside, entries.shape, tuple(range(axis, axis + indices.ndim)))
        outside = (np.nan if value is None else value) if fill is None else fill
        filled = jnp.asarray(outside, entries.dtype)
        entries = jnp.where(sharding.place_like(mask, entries), entries, filled)
    return _arrange_entries(entries, numbers, axis, indices.ndim)


def _arrange_entries(entries: jax.Array, numbers: Any, axis: int, count: int) -> jax.Array:
    """Return the result of `take` with `count` dimensions of indices, in the layout of a gather."""
    if not numbers.collapsed_slice_dims:
        entries = lax.expand_dims(entries, (axis + count,))
    batch = iter(range(axis, axis + count))
    others = iter([*range(axis), *range(axis + count, entries.ndim)])
    order = [next(others) if place in numbers.offset_dims else next(batch) for place in range(entries.ndim)]
    return entries if order == sorted(order) else lax.transpose(entries, order)


# The twin of a contraction of codes, for training.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def contract_with_gradient(
    operation: Any, backward: Backward, floats: Sequence[Any], codes: Sequence[Any]
) -> jax.Array:
    """Return the contraction of codes, with the gradient of the contraction of the floats that they stand for.

    Args:
        operation: Static. The operation; it is hashable.
        backward: Static. How the gradients are contracted.
        floats: the operands as floats.
        codes: the same operands, each quantized or in floats.
    """
    return operation.contract_quantized(*codes)


def _contract_with_gradient_fwd(
    operation: Any, backward: Backward, floats: Sequence[Any], codes: Sequence[Any]
) -> tuple[jax.Array, Any]:
    # The codes are smaller than the floats, which they determine.
    return operation.contract_quantized(*codes), codes


def _contract_with_gradient_bwd(
    operation: Any, backward: Backward, codes: Sequence[Any], g: jax.Array
) -> tuple[Any, Any]:
    # The barrier makes XLA dequantize again in the backward pass, and keep no floats for it.
    codes, g = lax.optimization_barrier((codes, g))
    if not isinstance(backward, FloatBackward):
        found = compute_operand_cotangents(TrainedContraction(_NAME, operation, (), backward), codes, g, None)
        return tuple(d.astype(x.dtype) for d, x in zip(found, codes, strict=True)), None
    operands = [dequantize_checked(x) if isinstance(x, QuantizedArray) else x for x in codes]
    # The sizes of the groups of a ragged product are integers, and have no gradient.
    places = [place for place, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def contract(*arrays: jax.Array) -> jax.Array:
        values = dict(zip(places, arrays, strict=True))
        return operation.contract_floats(*(values.get(place, x) for place, x in enumerate(operands)))

    _, pull = jax.vjp(contract, *(operands[place].astype(g.dtype) for place in places))
    cotangents = dict(zip(places, pull(g), strict=True))
    return tuple(
        cotangents[place].astype(x.dtype) if place in places else None for place, x in enumerate(operands)
    ), None


contract_with_gradient.defvjp(_contract_with_gradient_fwd, _contract_with_gradient_bwd)


# A product of floats with codes that have no gradient: the backward pass dequantizes one part of the codes at a time.

# From this number of codes on, they are dequantized again, a part at a time. The number of codes in a part, so that
# most weights of a decoder have one, and the largest number of parts: the program has the operations of each, and takes
# longer to compile with more of them.
_LARGE, _PART, _MOST_PARTS = 2**18, 2**21, 8


def multiply_frozen(operation: Any, operands: Sequence[Any], side: int) -> jax.Array:
    """Return a product of floats with codes, in whose gradient only some of the codes are floats at a time.

    Args:
        operation: the `DotContraction`.
        operands: the floats and the codes.
        side: the place of the codes.
    """
    x, q = operands[1 - side], operands[side]
    contracted, batch = operation.numbers[0][side], operation.numbers[1][side]
    free = [axis for axis in range(q.ndim) if axis not in (*contracted, *batch)]
    # Within a block codes cannot be parted.
    whole = [axis for axis in free if q.scale.shape[axis] in (1, q.shape[axis])]
    if q.size <= _LARGE or not whole or q.permutation is not None or operation.out_sharding is not None:
        return operation.contract_quantized(*operands)
    axis = max(whole, key=lambda axis: q.shape[axis])
    start = len(batch) if side == 0 else x.ndim - len(contracted)
    config = _FrozenProduct(operation, side, axis, start + free.index(axis), x.shape, x.dtype)
    return _multiply_frozen(config, x, q)


class _FrozenProduct(NamedTuple):
    """A product of floats with codes: the place of the codes, and where they are parted.

    Attributes:
        operation: the product.
        side: the place of the codes.
        axis: the axis of the codes that is cut.
        dimension: the same axis in the result.
        shape: the shape of the floats.
        dtype: their dtype.
    """

    operation: Any
    side: int
    axis: int
    dimension: int
    shape: tuple[int, ...]
    dtype: Any

    def multiply(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self.operation.contract_floats(*((x, w) if self.side else (w, x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_frozen(config: _FrozenProduct, x: jax.Array, q: QuantizedArray) -> jax.Array:
    return config.operation.contract_quantized(*((x, q) if config.side else (q, x)))


def _multiply_frozen_fwd(config: _FrozenProduct, x: jax.Array, q: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    return _multiply_frozen(config, x, q), q


def _multiply_frozen_bwd(config: _FrozenProduct, q: QuantizedArray, g: jax.Array) -> tuple[jax.Array, None]:
    like, length = jax.ShapeDtypeStruct(config.shape, g.dtype), q.shape[config.axis]
    width = -(-length // min(-(-q.size // _PART), _MOST_PARTS))
    total: Any = None
    for first in range(0, length, width):
        bounds = (slice(first, first + width) if axis == config.axis else slice(None) for axis in range(q.ndim))
        part = q[tuple(bounds)]
        # Otherwise XLA:CPU dequantizes all parts before it multiplies the first one.
        part = part.replace(scale=delay_floats(part.scale, g if total is None else total))
        pull = jax.linear_transpose(functools.partial(config.multiply, w=_dequantize_in_memory(part, g.dtype)), like)
        (product,) = pull(lax.slice_in_dim(g, first, min(first + width, length), axis=config.dimension))
        total = product if total is None else total + product
    return total.astype(config.dtype), None


_multiply_frozen.defvjp(_multiply_frozen_fwd, _multiply_frozen_bwd)


def _dequantize_in_memory(q: QuantizedArray, dtype: np.dtype) -> jax.Array:
    """Return the floats of q, which are in memory in the order of the codes.

    XLA:CPU contracts along any dimension, but it takes five times as long to write floats in another order.
    """
    last = q.stored_order or ()
    order = (*range(q.ndim - len(last)), *(q.ndim + axis for axis in last))
    stored = lax.optimization_barrier(q.transpose(order).dequantize().astype(dtype))
    return lax.transpose(stored, [order.index(axis) for axis in range(q.ndim)])


@jax.custom_jvp
def refuse_gradient(x: jax.Array) -> jax.Array:
    """Return x, and raise if it is differentiated: rounding would make the gradient 0 without a word."""
    return x


@refuse_gradient.defjvp
def _refuse_gradient_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    expected = "no gradient through the codes of activations (fake_apply has one)"
    checks.refuse_type("Prepared.apply", "args", expected, "a call of jax.grad, jax.jvp or jax.vjp")
    return primals[0], tangents[0]


def call_with_rule(equation: Equation, operands: Sequence[Any], run: Any, records: Any) -> tuple[list[Any], Any]:
    """Return the results of `run`, with the derivative of an equation that has a derivative rule of its own.

    Args:
        equation: a call of a function with a derivative rule.
        operands: its operands; a parameter is a `Twin`, or codes that stay as they are.
        run: a function of the operands and the records, which returns the results and the records.
        records: what `run` reads. It gets no cotangent.
    """

    @jax.custom_vjp
    def call(floats: list[Any], values: Any, records: Any) -> list[Any]:
        return run(values, records)[0]

    def call_fwd(floats: list[Any], values: Any, records: Any) -> tuple[list[Any], Any]:
        # The equation as it stands calls the rule of the user, which is lost where its body is evaluated in its place.
        _, pull = jax.vjp(lambda *arrays: jaxpr.evaluate(equation, arrays), *floats)
        return run(values, records)[0], pull

    def call_bwd(pull: Any, cotangents: list[Any]) -> tuple[Any, Any, Any]:
        return list(pull(cotangents)), None, None

    call.defvjp(call_fwd, call_bwd)
    floats = [
        value.dequantize() if hasattr(value, "dequantize") else getattr(value, "floats", value) for value in operands
    ]
    return call(floats, lax.stop_gradient(operands), lax.stop_gradient(records)), records
