"""Scales and zero points that are learned: their names, their initial values, and how a layer reads them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._training.estimators import LSQ, LSQPlus, read_learned_scale, read_learned_zero_point
from .._training.rounding_vjp import round_zero_point
from ._layer_operand import UNSIGNED_AT_ZERO, LayerOperand, is_unsigned_at_zero
from .ranges import Learned


def list_names(operand: LayerOperand) -> tuple[str, ...]:
    """Return the names of the variables that are learned for an operand: a scale, and perhaps a zero point."""
    scale, source = f"{operand.role}_scale", operand.source
    is_offset = isinstance(source, Learned) and isinstance(source.gradient, LSQPlus) and not operand.spec.symmetric
    return (scale, f"{operand.role}_zero_point") if is_offset else (scale,)


def find_initial(operand: LayerOperand, x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the initial values of the variables that `list_names` lists, from the first weights or activations.

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
    return tuple(part for part in parts[: len(list_names(operand))] if part is not None)


def read_learned(operand: LayerOperand, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
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


def find_code(operand: LayerOperand, zero_point: jax.Array) -> jax.Array:
    """Return a learned zero point as the integer code that the layer uses for it."""
    code = round_zero_point(operand.spec, zero_point)
    assert code is not None
    return code.astype(operand.spec.carrier)


def is_finite(value: Any) -> bool:
    """Return whether all known elements are finite; traced elements and those of other hosts are not known."""
    if checks.is_traced(value):
        return True
    parts = [shard.data for shard in value.addressable_shards] if isinstance(value, jax.Array) else [value]
    return all(bool(np.isfinite(np.asarray(part)).all()) for part in parts)
