"""The conversion of one parameter: to codes, or to codes and the floats that are trained."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays.quantize import quantize
from .._arrays.spec import QuantSpec
from .._core import checks
from .._training.estimators import StraightThrough
from .._training.rounding_vjp import Config, make_array
from ._learned import LearnedScale, read_learned
from ._modes import Twin, make_twin
from ._plan import LeafPlan


class Weight(NamedTuple):
    """A parameter that is to be quantized.

    Attributes:
        name: its path, for errors.
        floats: its values.
        plan: how it is quantized.
        part: the scale that was trained, or None.
    """

    name: str
    floats: Any
    plan: LeafPlan
    part: LearnedScale | None


def quantize_weight(weight: Weight) -> Any:
    """Return a parameter as codes, with a scale that was trained or the scale of its range."""
    plan = weight.plan
    with checks.prefix_errors(weight.name):
        return _quantize_weight(weight.floats, weight.part, spec=plan.spec, stored_last=plan.stored_last)


@functools.partial(jax.jit, static_argnames=("spec", "stored_last"))
def _quantize_weight(w: jax.Array, part: LearnedScale | None, spec: QuantSpec, stored_last: tuple[int, ...]) -> Any:
    if part is None:
        return quantize(w, spec, stored_last=stored_last or None)
    scale, zero_point = read_learned("Prepared.convert", part, w, spec)
    q = make_array(Config(spec), w, scale, zero_point, None)
    return q.store_last(*stored_last) if stored_last else q


def compile_quantizations(weights: Iterable[Weight]) -> None:
    """Compile the programs that quantize some weights, all at the same time: each takes about 0.1 s on one thread.

    JAX keeps the programs, so that `quantize_weight` finds them. Weights that are traced need none.
    """
    programs: dict[Any, jax.stages.Lowered] = {}
    for name, w, plan, part in weights:
        statics = {"spec": plan.spec, "stored_last": plan.stored_last}
        key = (w.shape, w.dtype, getattr(w, "sharding", None), jax.tree.structure(part), *statics.values())
        if key not in programs and not checks.is_traced(w):
            with checks.prefix_errors(name):
                programs[key] = _quantize_weight.lower(w, part, **statics)
    if len(programs) > 1:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda program: program.compile(), programs.values()))


def make_weight_twin(w: Any, plan: LeafPlan, part: LearnedScale | None, rule: Any) -> Twin:
    """Return a parameter as the floats that its codes stand for, with their gradient, and as codes."""
    twin = make_twin(plan.spec, jnp.asarray(w), part, StraightThrough() if part is None else rule)
    codes = twin.codes.store_last(*plan.stored_last) if plan.stored_last else twin.codes
    # XLA must not fuse what finds the codes with what follows the contraction, which is float: the result of a tanh
    # depends on the loop in which it is. After the barrier the codes are like those that `apply` gets as arguments.
    return Twin(twin.floats, jax.lax.optimization_barrier(codes))
