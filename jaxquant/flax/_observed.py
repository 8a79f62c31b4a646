"""The state of the calibrators that find static ranges, and ranges that a calibrator finds in one batch."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import scale_from_range
from .._arrays.quantize import find_parameters
from .._arrays.spec import QuantSpec
from .._core import checks, sharding
from .._core.granularity import PerTensor
from ..calibration import Calibrator
from ..calibration.calibrator import is_finite_state
from ._layer_operand import LayerOperand, describe_calibrator
from .ranges import Learned, Observed


def make_state(operand: LayerOperand, x: jax.Array) -> dict[str, Any]:
    """Return the state of a calibrator that has seen no data, and a batch count of 0."""
    assert isinstance(operand.source, Observed)
    like = jax.ShapeDtypeStruct(_find_observed_shape(operand, x.shape), x.dtype)
    return {"state": _make_calibrator(operand).init(like), "batches": jnp.zeros((), jnp.int32)}


def update_state(operand: LayerOperand, state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    """Return the state updated by one batch; an empty batch and a frozen range leave it unchanged."""
    source = operand.source
    assert isinstance(source, Observed)
    # An empty batch has no least value.
    if x.size == 0:
        return state
    shape = _find_observed_shape(operand, x.shape)
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


def finalize_state(
    operand: LayerOperand, state: dict[str, Any], shape: tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of the range in a state.

    Args:
        operand: the activations.
        state: a calibrator's state and its batch count.
        shape: the shape of the activations to align both with, or None for one entry per entry of the range.

    Returns:
        The scale, and the zero point or None.
    """
    assert isinstance(operand.source, Observed)
    # Features that are always 0, as after a ReLU, have the range (0, 0), which gives scale 1.
    lo, hi = _make_calibrator(operand).finalize(state["state"], allow_zero=True)
    if shape is None:
        return _find_parameters(lo, hi, spec=operand.spec, shape=None)
    lo, hi = (align_rank(operand, bound, len(shape)) for bound in (lo, hi))
    return _find_parameters(lo, hi, spec=operand.spec, shape=shape)


# Outside of a trace, compiling one program takes a thirtieth of the time that compiling each operation takes.
@functools.partial(jax.jit, inline=True, static_argnames=("spec", "shape"))
def _find_parameters(
    lo: jax.Array, hi: jax.Array, *, spec: QuantSpec, shape: tuple[int, ...] | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of a range, as `finalize_state` does."""
    if shape is None:
        return scale_from_range.compute_scale_and_zero_point(spec, lo, hi, lo.shape, lo.shape)
    # Only the shape counts here, because the range is known.
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return find_parameters("quantize", like, spec, lo, hi)[:2]


def has_data(batches: jax.Array | None) -> bool:
    """Return whether every range has seen a batch. A traced count passes, because its value is unknown."""
    if batches is None:
        return False
    return checks.is_traced(batches) or bool((np.asarray(batches) > 0).all())


def check_observed(function: str, operand: LayerOperand, state: dict[str, Any] | None, remedy: str) -> None:
    """Raise ContractValueError unless a state has seen data, all of it finite."""
    expected = f"a range: {remedy}"
    checks.require(has_data(None if state is None else state["batches"]), function, operand.role, expected, "no data")
    assert state is not None
    is_finite = is_finite_state(state["state"])
    holds = checks.is_traced(is_finite) or bool(is_finite)
    checks.require(holds, function, operand.role, expected, "a range of batches with a NaN or an infinity")


def calibrate_batch(operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, Any]:
    """Return the scale and the zero point of the range that the operand's calibrator finds in x alone."""
    # The gradient passes through the rounding but not through the range.
    x = jax.lax.stop_gradient(x)
    calibrator = _make_calibrator(operand)
    lo, hi = calibrator.finalize(calibrator.update(calibrator.init(x), x), allow_zero=True)
    return find_parameters("quantize", x, operand.spec, lo, hi)[:2]


def align_rank(operand: LayerOperand, part: Any, rank: int) -> Any:
    """Return a scale or zero point per feature in the given rank, features last; any other one unchanged."""
    if part is None or is_per_tensor(operand) or part.ndim == rank or part.size != part.shape[-1]:
        return part
    return part.reshape(*(1,) * (rank - 1), part.size)


def is_per_tensor(operand: LayerOperand) -> bool:
    """Return whether an operand has one scale and one zero point."""
    return operand.spec.granularity == operand.spec.zero_point_granularity == PerTensor()


def _find_observed_shape(operand: LayerOperand, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a calibrator sees activations: rows of features, so that every rank has one state."""
    if is_per_tensor(operand) or len(shape) == 0:
        return shape
    return (math.prod(shape[:-1]), shape[-1])


def _make_calibrator(operand: LayerOperand) -> Calibrator:
    """Return the calibrator of an operand, and check that its factory returned one.

    The constructors of `Observed` and `Dynamic` have checked that the factory takes a spec alone.
    """
    assert not isinstance(operand.source, Learned)
    factory = operand.source.calibrator
    assert factory is not None
    calibrator = factory(operand.spec)
    if not isinstance(calibrator, Calibrator):
        got = f"{describe_calibrator(operand)}, which returns {type(calibrator).__name__}"
        expected = "a function from a spec to a calibrator"
        checks.refuse_type(type(operand.source).__name__, "calibrator", expected, got)
    return calibrator
