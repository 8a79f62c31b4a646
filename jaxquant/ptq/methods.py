"""The algorithms that `apply` can run on each weight, with their settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from . import _matrix
from .adaround import adaround
from .gptq import gptq
from .hqq import hqq
from .search_range import search_range

_RANGES = ("whole", "searched", "tried", "hqq")
# The parts of the whole range that "tried" tries.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Round to nearest, with the scale of a range.

    Attributes:
        range: "whole" for the range of the weight; "searched" for that of `search_range`, weighted with the mean
            squares of the inputs where they are known; "tried" for the best of six parts of the whole range, from 1 to
            0.5, by the squared error of each output, or "searched" if the inputs are not known; "hqq" for that of
            `hqq`.
    """

    range: str = "tried"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; `hessian` is None if its inputs are not known."""
        return find_grid(self.range, w, hessian, spec, axis)


@dataclasses.dataclass(frozen=True)
class HQQ:
    """`hqq`, which needs no data; its attributes are the arguments of the function."""

    p: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    steps: int = 20

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight."""
        return hqq(w, spec, p=self.p, beta=self.beta, growth=self.growth, steps=self.steps)


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """`gptq`; its attributes are the arguments of the function, and the range of the grid, as for `Nearest`.

    With "tried", the algorithm runs on each of the grids, and each output gets the best result. With any range, an
    output whose error is larger than that of round-to-nearest is rounded to nearest.
    """

    activation_order: bool = True
    damping: float = 0.01
    sweeps: int = 0
    range: str = "tried"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        if hessian is None:
            return find_grid(self.range, w, hessian, spec, axis)
        run_gptq = functools.partial(
            gptq, w, hessian, spec, axis=axis, activation_order=self.activation_order, damping=self.damping,
            sweeps=self.sweeps,
        )  # fmt: skip
        grids = list_grids(self.range, w, hessian, spec, axis)
        # Round-to-nearest is a candidate, too: a greedy algorithm may do worse where inputs are not correlated.
        return pick_best(w, hessian, axis, (q for grid in grids for q in (run_gptq(grid), grid)))


@dataclasses.dataclass(frozen=True)
class AdaRound:
    """`adaround`; its attributes are the arguments of the function, and the range of the grid, as for `Nearest`.

    With "tried", the grid is the one on which round-to-nearest has the least error.
    """

    steps: int = 300
    rate: float = 0.05
    penalty: float = 1.0
    sweeps: int = 2
    range: str = "tried"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        grid = find_grid(self.range, w, hessian, spec, axis)
        if hessian is None:
            return grid
        return adaround(
            w, hessian, spec, grid, axis=axis, steps=self.steps, rate=self.rate, penalty=self.penalty,
            sweeps=self.sweeps,
        )  # fmt: skip


Method = Nearest | HQQ | GPTQ | AdaRound


def find_grid(name: str, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Any) -> QuantizedArray:
    """Return a weight rounded to nearest with the scale of a range of this name."""
    if name == "hqq":
        return hqq(w, spec)
    if name == "whole" or spec.zero_point_granularity != spec.granularity:
        return quantize(w, spec)
    if name == "tried" and hessian is not None:
        return pick_best(w, hessian, axis, list_grids(name, w, hessian, spec, axis))
    importance = None
    if hessian is not None:
        layout = _matrix.make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
        squares = jnp.diagonal(hessian, axis1=1, axis2=2)[:, :, None]
        outputs = w.size // layout.inputs // layout.groups
        # An input without data must not make its weights free of cost: only they may share the scale.
        squares = jnp.maximum(squares, 1e-6 * jnp.maximum(jnp.max(squares), jnp.finfo(jnp.float32).tiny))
        importance = layout.restore(jnp.repeat(squares, outputs, 2))
    return quantize(w, spec, range=search_range(w, spec, importance))


def list_grids(name: str, w: jax.Array, hessian: jax.Array, spec: QuantSpec, axis: Any) -> list[QuantizedArray]:
    """Return a weight rounded to nearest with the scale of each range of this name."""
    if name != "tried" or spec.zero_point_granularity != spec.granularity:
        return [find_grid(name, w, hessian, spec, axis)]
    lo, hi = search_range(w, spec, least=1.0, steps=1)
    return [quantize(w, spec, range=(lo * part, hi * part)) for part in _PARTS]


def pick_best(w: jax.Array, hessian: jax.Array, axis: Any, candidates: Iterable[QuantizedArray]) -> QuantizedArray:
    """Return the quantized array with the least error, for each output that has a scale of its own.

    Args:
        w: the weight.
        hessian: [groups, inputs, inputs].
        axis: the axes that are kept.
        candidates: arrays with the same spec.
    """
    layout = _matrix.make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    best, least = None, None
    for q in candidates:
        costs = measure_outputs(w, q, hessian, axis)
        if best is None or least is None:
            best, least = q, costs
            continue
        # Outputs that share a scale have the candidate that is the best for all of them.
        is_own = all(q.scale.shape[a] == w.shape[a] for a in layout.kept)
        is_better = costs < least if is_own else jnp.broadcast_to(jnp.sum(costs) < jnp.sum(least), costs.shape)
        best, least = _choose_outputs(layout, is_better, q, best), jnp.where(is_better, costs, least)
    assert best is not None
    return best


def _choose_outputs(
    layout: _matrix.Layout, mask: jax.Array, q: QuantizedArray, other: QuantizedArray
) -> QuantizedArray:
    """Return the outputs of one array where the mask [groups, outputs] is True, and those of another one elsewhere."""
    wide = layout.restore(jnp.repeat(mask[:, None], layout.inputs, 1))
    # The same for all inputs, so that one of them tells which scales to take.
    outputs = wide[tuple(slice(None) if a in layout.kept else slice(0, 1) for a in range(wide.ndim))]

    def choose(x: jax.Array, y: jax.Array, chosen: jax.Array) -> jax.Array:
        fits = all(a in (1, b) for a, b in zip(chosen.shape, x.shape, strict=True))
        chosen = chosen if fits else chosen.ravel()[0].reshape((1,) * x.ndim)
        return jnp.where(jnp.broadcast_to(chosen, x.shape), x, y)

    point = None if q.zero_point is None else choose(q.zero_point, other.zero_point, outputs)
    return q.replace(
        codes=choose(q.codes, other.codes, wide), scale=choose(q.scale, other.scale, outputs), zero_point=point
    )


@functools.partial(jax.jit, static_argnames=("axis",))
def measure_outputs(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Any) -> jax.Array:
    """Return the mean squared error of each output, [groups, outputs]: the diagonal of E^T H E."""
    layout = _matrix.make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    errors = layout.arrange(w.astype(jnp.float32) - q.dequantize().astype(jnp.float32))
    return jnp.sum(errors * jnp.matmul(hessian, errors, precision=jax.lax.Precision.HIGHEST), 1)


def measure_error(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Any) -> jax.Array:
    """Return trace(E^T H E), the mean squared error of the outputs."""
    return jnp.sum(measure_outputs(w, q, hessian, axis))


def check_method(function: str, method: Any) -> None:
    """Raise unless a method is one of this module's."""
    expected = "ptq.GPTQ(), ptq.AdaRound(), ptq.HQQ() or ptq.Nearest()"
    checks.require_type(isinstance(method, Method), function, "method", expected, checks.describe_value(method))
