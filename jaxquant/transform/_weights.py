"""The conversion of one parameter: to codes, or to codes and the floats that are trained."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays.quantize import encode_array
from .._arrays.quantize_padded import quantize_kernel
from .._arrays.quantized_array import QuantizedArray
from .._training.estimators import StraightThrough
from .._training.rounding_vjp import RoundingConfig, make_array
from ._learned import LearnedScale, read_learned
from ._modes import Twin, make_twin
from ._plan import LeafPlan


@functools.partial(jax.jit, static_argnames="plan")
def _encode_learned(w: jax.Array, part: LearnedScale, plan: LeafPlan) -> Any:
    scale, zero_point = read_learned("Prepared.convert", part, w, plan.spec)
    return make_array(RoundingConfig(plan.spec), w, scale, zero_point, None)


def quantize_weight(w: Any, plan: LeafPlan, part: LearnedScale | None) -> Any:
    """Return a parameter as codes, with a scale that was trained or the scale of its range."""
    if part is None:
        return quantize_kernel(w, plan.spec, plan.stored_last)
    q = _encode_learned(jnp.asarray(w), part, plan)
    return q.store_last(*plan.stored_last) if plan.stored_last else q


def quantize_with_scale(w: Any, plan: LeafPlan, q: QuantizedArray, scale: jax.Array) -> QuantizedArray:
    """Return a parameter with other scales than those of its codes, and with their zero points."""
    codes = encode_array(jnp.asarray(w), scale, q.zero_point, plan.spec)
    result = QuantizedArray(codes, scale, q.zero_point, dtype=q.dtype, block_size=q.block_size, codebook=q.codebook)
    return result.store_last(*plan.stored_last) if plan.stored_last else result


def make_weight_twin(w: Any, plan: LeafPlan, part: LearnedScale | None, rule: Any) -> Twin:
    """Return a parameter as the floats that its codes stand for, with their gradient, and as codes."""
    twin = make_twin(plan.spec, jnp.asarray(w), part, StraightThrough() if part is None else rule)
    codes = twin.codes.store_last(*plan.stored_last) if plan.stored_last else twin.codes
    # XLA must not fuse what finds the codes with what follows the contraction, which is float: the result of a tanh
    # depends on the loop in which it is. After the barrier the codes are like those that `apply` gets as arguments.
    return Twin(twin.floats, jax.lax.optimization_barrier(codes))


def make_larger_twin(
    w: Any, plan: LeafPlan, part: LearnedScale | None, rule: Any, codes: QuantizedArray, scale: jax.Array
) -> Twin:
    """Return a parameter as `make_weight_twin` does, with larger scales where a bias needs them.

    Args:
        w: the parameter, in floats.
        plan: how it is quantized.
        part: the scale that is trained, or None.
        rule: the estimator of that scale.
        codes: the parameter as codes, with the scale that it has otherwise.
        scale: the larger scales; the others are those of `codes`. They have no gradient.
    """
    zero_point = None if codes.zero_point is None else codes.zero_point.astype(jnp.float32)
    if part is None:
        return make_weight_twin(w, plan, LearnedScale(scale, zero_point), StraightThrough())
    larger = jnp.where(scale > codes.scale, scale, part.scale)
    return make_weight_twin(w, plan, part._replace(scale=larger), rule)
