"""Scales and zero points that are trained with the parameters of a prepared function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantize import compute_parameters
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._training.estimators import LSQ, PACT, Estimator, LSQPlus, read_learned_scale, read_learned_zero_point
from .._training.fake_quantize import read_parts
from ..calibration.calibrator import Range
from ._plan import LeafPlan
from ._ranges import StaticRange, StaticRanges

_NAME = "Prepared.trainable"
ScaleEstimator = LSQ | LSQPlus | PACT


class LearnedScale(NamedTuple):
    """A scale that is trained.

    Attributes:
        scale: float32; its magnitude is used.
        zero_point: float32; it is rounded where it is used. None for the zero point that the spec fixes.
    """

    scale: Any
    zero_point: Any


class SignedScale(LearnedScale):
    """A scale that is trained with its sign, because it began as a scale of codes that may have negative ones."""

    __slots__ = ()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights", "activations"], meta_fields=["estimator"])
@dataclasses.dataclass(frozen=True)
class LearnedScales:
    """The scales of a prepared function, to be trained with its parameters: a pytree of float32 arrays.

    Attributes:
        weights: the scale of each parameter that is quantized, by its path.
        activations: the scale of each static range, by its name and the place of the operand.
        estimator: Static. The gradient rule.
    """

    weights: dict[str, LearnedScale]
    activations: dict[str, dict[str, LearnedScale]]
    estimator: Estimator


def make_scales(
    parameters: Mapping[str, tuple[Any, LeafPlan]], entries: StaticRanges, ranges: Mapping[str, Any], estimator: Any
) -> LearnedScales:
    """Return the initial scales: for parameters as the estimator finds them, for activations from the ranges.

    Args:
        parameters: each parameter that is quantized, with its plan, by its path.
        entries: the static ranges of the function.
        ranges: what calibration found for them.
        estimator: the gradient rule.
    """
    is_estimator = isinstance(estimator, ScaleEstimator)
    expected = "LSQ(), LSQPlus() or PACT()"
    checks.require_type(is_estimator, _NAME, "estimator", expected, checks.describe_value(estimator))
    weights = {}
    # PACT is for activations. The scales of the weights are found at each step, as without learned scales.
    if not isinstance(estimator, PACT):
        for name, (w, plan) in parameters.items():
            with checks.prefix_errors(name):
                weights[name] = _start_weight(w, plan.spec, estimator)
    activations: dict[str, dict[str, LearnedScale]] = {}
    for name, static in entries.items():
        with checks.prefix_errors(name):
            activations[name] = {e.place: _start_activation(e, ranges[name][e.place], estimator) for e in static}
    return LearnedScales(weights, activations, estimator)


def _start_weight(w: Any, spec: QuantSpec, estimator: LSQ | LSQPlus) -> LearnedScale:
    _check_spec(spec, estimator)
    expected = "LSQPlus(), because LSQ() keeps the zero point of an asymmetric spec at 0"
    checks.require(bool(spec.symmetric) or isinstance(estimator, LSQPlus), _NAME, "estimator", expected, estimator)
    scale, zero_point = estimator.initial(jnp.asarray(w), spec)
    return LearnedScale(scale, None if spec.symmetric else zero_point)


def _start_activation(entry: StaticRange, ends: Any, estimator: ScaleEstimator) -> LearnedScale:
    spec = entry.operand.spec
    _check_spec(spec, estimator)
    is_learned = not spec.symmetric and not isinstance(estimator, PACT)
    if isinstance(estimator, PACT) and not spec.symmetric and not checks.is_traced(ends[0]):
        least = float(np.min(np.asarray(ends[0])))
        expected = "LSQ() or LSQPlus(), because PACT() has unsigned codes for values of at least 0"
        checks.require(least >= 0, _NAME, "estimator", expected, f"PACT() for a range that begins at {least:.3g}")

    def find(lo: jax.Array, hi: jax.Array) -> LearnedScale:
        like = jax.ShapeDtypeStruct(entry.shape, jnp.float32)
        scale, zero_point, _ = compute_parameters(_NAME, like, spec, lo, hi)
        wide = None if zero_point is None or not is_learned else zero_point.astype(jnp.float32)
        return LearnedScale(scale.astype(jnp.float32), wide)

    # Each iteration of a scan over layers has a range of its own.
    for _ in entry.lengths:
        find = jax.vmap(find)
    return find(*ends)


def _check_spec(spec: QuantSpec, estimator: ScaleEstimator) -> None:
    """Raise unless an estimator can train the scale of a spec."""
    has_forms = spec.offset or spec.scale_spec is not None
    expected = f"None with {spec}, because no estimator trains an offset, or a scale that is quantized itself"
    checks.require(not has_forms, _NAME, "estimator", expected, estimator)
    expected = "a spec with scale_dtype float32, bfloat16 or float16, because a power of two has no gradient"
    checks.require(spec.scale_dtype in dtypes.FLOATS, _NAME, "estimator", expected, spec.scale_dtype)


def read_learned(function: str, part: LearnedScale, x: Any, spec: QuantSpec) -> tuple[jax.Array, Any]:
    """Return the scale and the zero point of x, computed from what is learned."""
    scale = read_learned_scale(spec, part.scale, is_signed=isinstance(part, SignedScale))
    zero_point = part.zero_point
    if zero_point is not None:
        zero_point = read_learned_zero_point(spec, zero_point)
    # PACT learns no zero point, because its codes begin at 0.
    elif not spec.symmetric:
        zero_point = jnp.zeros((1,) * scale.ndim, spec.carrier)
    return read_parts(function, ("x", "scale", "zero_point"), x, scale, zero_point, spec)[1:]


def read_part(function: str, argument: str, name: str, record: Any, entry: StaticRange) -> Any:
    """Return the range or the learned scale of an activation."""
    part = record.get(entry.place) if isinstance(record, Mapping) else None
    if isinstance(part, LearnedScale):
        return part
    # A checkpoint that was loaded without a target has a dict for a named tuple.
    if isinstance(part, Mapping) and set(part) == {"lo", "hi"}:
        part = Range(part["lo"], part["hi"])
    if isinstance(part, Mapping) and set(part) == {"scale", "zero_point"}:
        return LearnedScale(part["scale"], part["zero_point"])
    expected = f"{{{entry.place!r}: Range(lo, hi)}} of float arrays at {name}"
    # The state of a calibrator is a named tuple, too.
    ends = part if (isinstance(part, Range) or type(part) is tuple) and len(part) == 2 else (None,)
    # A missing end would make the range a dynamic one.
    holds = all(checks.has_dtype(end, dtypes.FLOATS) for end in ends)
    checks.require_type(holds, function, argument, expected, checks.describe_value(record))
    return part
