"""The range of one operand of a layer: how it is found, stored and read, and what is quantized with it.

A static range is the state of a calibrator, a learned one is a scale and perhaps a zero point, and a dynamic one is
computed in each call. Linen and NNX hold states and scales in variables of their own; the functions here take and
return their values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.quantize import compute_parameters, quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, sharding
from .._core.granularity import PerTensor
from .._training.estimators import LSQ, LSQPlus, StraightThrough, read_learned_scale, read_learned_zero_point
from .._training.fake_quantize import Quantizer, read_parts
from .._training.range_sources import Dynamic, Learned, Static
from .._training.rounding_vjp import RoundingConfig, make_array, round_zero_point
from ..calibration.calibrator import Calibrator, is_finite_state
from ._quantization import UNSIGNED_AT_ZERO, LayerOperand, describe_calibrator, is_unsigned_at_zero

# A scale, and a zero point or None.
Parameters = tuple[jax.Array, jax.Array | None]
_Part = TypeVar("_Part", jax.Array, jax.Array | None)


class RangeState(TypedDict):
    """A calibrator's state, a pytree of arrays that depends on the calibrator, and how many batches it has seen."""

    state: Any
    batches: jax.Array


# Static ranges: the states of calibrators.


def make_state(operand: LayerOperand, x: jax.Array) -> RangeState:
    """Return the state of a calibrator that has seen no data, and a batch count of 0."""
    assert isinstance(operand.source, Static)
    like = jax.ShapeDtypeStruct(_compute_seen_shape(operand, x.shape), x.dtype)
    return {"state": _make_calibrator(operand).init(like), "batches": jnp.zeros((), jnp.int32)}


def update_state(operand: LayerOperand, state: RangeState, x: jax.Array) -> RangeState:
    """Return the state updated by one batch; an empty batch and a frozen range leave it unchanged."""
    source = operand.source
    assert isinstance(source, Static)
    # An empty batch has no least value.
    if x.size == 0:
        return state
    shape = _compute_seen_shape(operand, x.shape)
    # With explicit sharding, JAX cannot merge dimensions that are sharded, so the array is gathered first.
    rows = x if shape == x.shape else sharding.place_whole(x).reshape(shape)
    updated = _make_calibrator(operand).update(state["state"], jax.lax.stop_gradient(rows))
    batches = state["batches"]
    if source.freeze_after is None:
        return {"state": updated, "batches": batches + 1}
    # The count may be traced, so the choice is a `where` and not an `if`.
    is_open = batches < source.freeze_after
    calibrator_state = jax.tree.map(lambda new, old: jnp.where(is_open, new, old), updated, state["state"])
    return {"state": calibrator_state, "batches": batches + is_open.astype(jnp.int32)}


def finalize_state(operand: LayerOperand, state: RangeState, shape: tuple[int, ...] | None = None) -> Parameters:
    """Return the scale and the zero point of the range in a state.

    Args:
        operand: the activations.
        state: a calibrator's state and its batch count.
        shape: the shape of the activations to align both with, or None for one entry per entry of the range.

    Returns:
        The scale, and the zero point or None.
    """
    assert isinstance(operand.source, Static)
    # Features that are always 0, as after a ReLU, have the range (0, 0), which gives scale 1.
    lo, hi = _make_calibrator(operand).finalize(state["state"], allow_zero=True)
    if shape is None:
        return _compute_parameters(lo, hi, spec=operand.spec, shape=None)
    lo, hi = (align_rank(operand, bound, len(shape)) for bound in (lo, hi))
    return _compute_parameters(lo, hi, spec=operand.spec, shape=shape)


# Outside of a trace, compiling one program takes a thirtieth of the time that compiling each operation takes.
@functools.partial(jax.jit, inline=True, static_argnames=("spec", "shape"))
def _compute_parameters(lo: jax.Array, hi: jax.Array, *, spec: QuantSpec, shape: tuple[int, ...] | None) -> Parameters:
    """Return the scale and the zero point of a range, as `finalize_state` does."""
    if shape is None:
        return scale_from_range.compute_scale_and_zero_point(spec, lo, hi, lo.shape, lo.shape)
    # Only the shape counts here, because the range is known.
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return compute_parameters("quantize", like, spec, lo, hi)[:2]


def has_data(batches: jax.Array | None) -> bool:
    """Return whether every range has seen a batch. A traced count passes, because its value is unknown."""
    if batches is None:
        return False
    return checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())


def check_state(function: str, operand: LayerOperand, state: RangeState | None, remedy: str) -> None:
    """Raise ContractValueError unless a state has seen data, all of it finite."""
    expected = f"a range: {remedy}"
    checks.require(has_data(None if state is None else state["batches"]), function, operand.role, expected, "no data")
    assert state is not None
    is_finite = is_finite_state(state["state"])
    holds = checks.is_traced(is_finite) or bool(is_finite)
    checks.require(holds, function, operand.role, expected, "a range of batches with a NaN or an infinity")


def calibrate_batch(operand: LayerOperand, x: jax.Array) -> Parameters:
    """Return the scale and the zero point of the range that the operand's calibrator finds in x alone."""
    # The gradient passes through the rounding but not through the range.
    x = jax.lax.stop_gradient(x)
    calibrator = _make_calibrator(operand)
    lo, hi = calibrator.finalize(calibrator.update(calibrator.init(x), x), allow_zero=True)
    return compute_parameters("quantize", x, operand.spec, lo, hi)[:2]


def align_rank(operand: LayerOperand, part: _Part, rank: int) -> _Part:
    """Return a scale or zero point per feature in the given rank, features last; any other one unchanged."""
    if part is None or is_per_tensor(operand) or part.ndim == rank or part.size != part.shape[-1]:
        return part
    return part.reshape(*(1,) * (rank - 1), part.size)


def is_per_tensor(operand: LayerOperand) -> bool:
    """Return whether an operand has one scale and one zero point."""
    return operand.spec.granularity == operand.spec.zero_point_granularity == PerTensor()


def _compute_seen_shape(operand: LayerOperand, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a calibrator sees activations: rows of features, so that every rank has one state."""
    if is_per_tensor(operand) or len(shape) == 0:
        return shape
    return (math.prod(shape[:-1]), shape[-1])


def _make_calibrator(operand: LayerOperand) -> Calibrator:
    """Return the calibrator of an operand, and check that its factory returned one.

    The constructors of `Static` and `Dynamic` have checked that the factory takes a spec alone.
    """
    assert not isinstance(operand.source, Learned)
    factory = operand.source.calibrator
    assert factory is not None
    calibrator = factory(operand.spec)
    if not isinstance(calibrator, Calibrator):
        got = f"{describe_calibrator(operand)}, which returns {type(calibrator).__name__}"
        expected = "a function from a spec to a calibrator"
        checks.require_type(False, type(operand.source).__name__, "calibrator", expected, got)
    return calibrator


# Learned scales and zero points.


def list_learned_names(operand: LayerOperand) -> tuple[str, ...]:
    """Return the names of the variables that are learned for an operand: a scale, and perhaps a zero point."""
    scale, source = f"{operand.role}_scale", operand.source
    is_offset = isinstance(source, Learned) and isinstance(source.gradient, LSQPlus) and not operand.spec.symmetric
    return (scale, f"{operand.role}_zero_point") if is_offset else (scale,)


def compute_initial(operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the initial values of the variables in `list_learned_names`, from the first weights or activations.

    Raises:
        ContractValueError: x has negative values that unsigned codes with the zero point 0 would lose.
    """
    assert isinstance(operand.source, Learned)
    gradient = operand.source.gradient
    parts = gradient.initial(x, operand.spec)
    is_known = not any(map(checks.is_traced, (x, parts[0]))) and getattr(x, "is_fully_addressable", True)
    # PACT clips negative values on purpose. The docstring of `Learned` says what happens to traced values.
    if is_unsigned_at_zero(operand) and is_known and isinstance(gradient, LSQ):
        least = float(np.asarray(x, np.float32).min(initial=0))
        if least < -float(np.asarray(parts[0]).max(initial=0)) / 2:
            expected = f"values that are not negative, symmetric=True, or Learned(LSQPlus()): {UNSIGNED_AT_ZERO}"
            checks.require(False, "flax", operand.role, expected, f"{least:.3g} among them")
    # `initial` may also return a zero point that is not learned.
    return tuple(part for part in parts[: len(list_learned_names(operand))] if part is not None)


def read_learned(operand: LayerOperand, parts: tuple[jax.Array, ...]) -> Parameters:
    """Return the scale and the zero point that a layer quantizes with, from the variables that are learned."""
    spec = operand.spec
    scale = read_learned_scale(spec, parts[0])
    if len(parts) == 2:
        return scale, read_learned_zero_point(spec, parts[1])
    if spec.symmetric:
        return scale, None
    # The zero point gets the shape of the scale, so that nn.scan can slice both in the same way.
    has_scale_shape = spec.zero_point_granularity == spec.granularity
    return scale, jnp.zeros(scale.shape if has_scale_shape else (1,) * scale.ndim, spec.carrier)


def round_learned_zero_point(operand: LayerOperand, zero_point: jax.Array) -> jax.Array:
    """Return a learned zero point as the integer code that the layer uses for it."""
    code = round_zero_point(operand.spec, zero_point)
    assert code is not None
    return code.astype(operand.spec.carrier)


def is_finite(value: ArrayLike) -> bool:
    """Return whether all known elements are finite; traced elements and elements on other hosts are not known."""
    if checks.is_traced(value):
        return True
    parts = [shard.data for shard in value.addressable_shards] if isinstance(value, jax.Array) else [value]
    return all(bool(np.isfinite(np.asarray(part)).all()) for part in parts)


# What is quantized with a range.


def make_quantizer(operand: LayerOperand, x: jax.Array, parameters: Parameters | None) -> Quantizer:
    """Return the Quantizer of x.

    Args:
        operand: how to quantize x.
        x: the weights or the activations.
        parameters: the scale, and the zero point or None; None where the range is found in x.

    Returns:
        A Quantizer; its scale is None where it is the default range of x.
    """
    spec, gradient = operand.spec, operand.source.gradient
    if parameters is None:
        assert isinstance(operand.source, Dynamic)
        if operand.source.calibrator is None:
            return Quantizer(spec, gradient=gradient)
        return Quantizer(spec, *calibrate_batch(operand, x), gradient)
    scale, zero_point = parameters
    if operand.role != "weight":
        scale, zero_point = align_rank(operand, scale, x.ndim), align_rank(operand, zero_point, x.ndim)
        # LSQ divides its gradient by the number of elements of one example, whatever the batch size.
        if isinstance(gradient, LSQ | LSQPlus) and gradient.elements is None:
            gradient = dataclasses.replace(gradient, elements=_count_elements(x.shape, scale.shape))
    return Quantizer(spec, scale, zero_point, gradient)


def _count_elements(shape: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Return how many elements of one example share an entry of a scale, from the shapes of x and of the scale."""
    # The first axis is the batch, unless x is a single vector.
    example = shape[1:] if len(shape) > 1 else shape
    entries = scale[-len(example) :] if len(scale) == len(shape) and example else (1,) * len(example)
    return max(math.prod(n // max(e, 1) for n, e in zip(example, entries, strict=True)), 1)


def quantize_operand(
    operand: LayerOperand, x: jax.Array, parameters: Parameters | None, stored_axes: Sequence[int] = ()
) -> QuantizedArray:
    """Return x with the codes that a contraction computes from `make_quantizer` of the same arguments.

    The codes hold the `stored_axes` last in memory.
    """
    if parameters is None and isinstance(operand.source, Dynamic) and operand.source.calibrator is None:
        return quantize(x, operand.spec, stored_last=stored_axes or None)
    q = _encode_operand(operand.role, make_quantizer(operand, x, parameters), x)
    return q.store_last(*stored_axes) if stored_axes else q


def _encode_operand(role: str, quantizer: Quantizer, x: jax.Array) -> QuantizedArray:
    """Return the codes that a contraction computes from x and a Quantizer; they have no gradient."""
    spec = quantizer.spec
    if quantizer.scale is None:
        return quantize(x, spec)
    # `check_servable` rejects a scale that cannot be served.
    labels = (role, f"{role}.scale", f"{role}.zero_point")
    x, scale, zero_point = read_parts("quantize", labels, x, quantizer.scale, quantizer.zero_point, spec)
    return jax.lax.stop_gradient(make_array(RoundingConfig(spec, StraightThrough()), x, scale, zero_point, None))
