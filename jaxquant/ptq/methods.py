"""The algorithms that `apply` can run on each weight, with their settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray, read_entries
from .._arrays.spec import QuantSpec
from .._core import checks, granularity
from . import _grid
from ._grid import Axis, MatrixLayout, make_layout
from .adaround import adaround
from .gptq import factor_groups, round_on_grid
from .hqq import hqq
from .search_range import search_range, shrink_range

_FIELDS = ("codes", "scale", "zero_point", "offset")
_RANGES = ("whole", "searched", "tried", "hqq")
# The parts of the whole range that "tried" tries. A weight of a normal distribution needs about 0.85 of it at 4 bits,
# and half of it at 2; outputs with a few large weights need less.
_PARTS = (1.0, 0.88, 0.77, 0.68, 0.6, 0.52, 0.44, 0.36)
_FACTORS = (0.25, 4.0)  # of a scale that is refitted


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Round to nearest, with the scale of a range.

    Attributes:
        range: "whole" for the range of the weight; "searched" for the range of `search_range`, weighted with the mean
            squares of the inputs where they are known; "tried" for the best of eight parts of the whole range, from 1
            to 0.36, by the squared error of each output, or "searched" if the inputs are not known; "hqq" for the
            range of `hqq`.
    """

    range: str = "tried"

    def __post_init__(self) -> None:
        """Check the range."""
        checks.check_option(type(self).__name__, "range", self.range, _RANGES)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Axis) -> QuantizedArray:
        """Return the quantized array of a weight; `hessian` is None if its inputs are not known."""
        return choose_grid(self.range, w, hessian, spec, axis)


@dataclasses.dataclass(frozen=True)
class HQQ:
    """`hqq`, which needs no data; its attributes are the arguments of the function."""

    p: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    steps: int = 20

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Axis) -> QuantizedArray:
        """Return the quantized array of a weight."""
        return hqq(w, spec, p=self.p, beta=self.beta, growth=self.growth, steps=self.steps)


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """`gptq`; its attributes are the arguments of the function, the range of the grid, as for `Nearest`, and `refits`.

    With "tried", the algorithm runs on each of the grids, and each output gets the best result. With any range, an
    output with a larger error than rounding to nearest is rounded to nearest.

    A refit gives each output the scales with the least error for the codes that it has, one or one for each block, and
    runs the algorithm again with them; the result is used where it is better. Only outputs with scales of their own can
    be refitted, not to powers of two, and not where they are quantized themselves. Offsets stay.
    """

    activation_order: bool = True
    damping: float = 0.01
    sweeps: int = 0
    range: str = "tried"
    refits: int = 0

    def __post_init__(self) -> None:
        """Check the attributes."""
        name = type(self).__name__
        checks.check_option(name, "range", self.range, _RANGES)
        checks.check_flag(name, "activation_order", self.activation_order)
        checks.check_real(name, "damping", self.damping)
        for argument in ("sweeps", "refits"):
            checks.check_integer(name, argument, getattr(self, argument))
        for argument in ("damping", "sweeps", "refits"):
            value = getattr(self, argument)
            checks.require(value >= 0, name, argument, "0 or a positive number", value)

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Axis) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        if hessian is None:
            return choose_grid(self.range, w, hessian, spec, axis)
        # `round_on_grid` checks nothing, so that the checks run once and not for each grid.
        _grid.check_finite("ptq.gptq", w=w, hessian=hessian)
        # The factorization takes most of the time, and all grids share it.
        factors = factor_groups(hessian, damping=float(self.damping), is_ordered=bool(self.activation_order))
        run_gptq = functools.partial(round_on_grid, w, hessian, factors, spec=spec, axis=axis, sweeps=self.sweeps)
        grids = list_grids(self.range, w, hessian, spec, axis)
        # Round-to-nearest is a candidate, too: a greedy algorithm may do worse where inputs are not correlated.
        best = pick_best(w, hessian, axis, (q for grid in grids for q in (run_gptq(grid), grid)))
        for _ in range(0 if spec.power_of_two else self.refits):
            refitted = refit_scale(w, best, hessian, axis)
            if refitted is None:
                break
            best = pick_best(w, hessian, axis, (best, refitted, run_gptq(refitted)))
        return best


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

    def quantize(self, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Axis) -> QuantizedArray:
        """Return the quantized array of a weight; rounded to nearest if its inputs are not known."""
        grid = choose_grid(self.range, w, hessian, spec, axis)
        if hessian is None:
            return grid
        return adaround(
            w, hessian, spec, grid, axis=axis, steps=self.steps, rate=self.rate, penalty=self.penalty,
            sweeps=self.sweeps,
        )  # fmt: skip


Method = Nearest | HQQ | GPTQ | AdaRound


def choose_grid(name: str, w: jax.Array, hessian: jax.Array | None, spec: QuantSpec, axis: Axis) -> QuantizedArray:
    """Return a weight rounded to nearest with the scale of a range of this name."""
    if name == "hqq":
        return hqq(w, spec)
    # A range cannot be tried for elements that share a scale but not a zero point, or the other way round.
    if name == "whole" or spec.zero_point_granularity != spec.granularity:
        return quantize(w, spec)
    if name == "tried" and hessian is not None:
        return pick_best(w, hessian, axis, list_grids(name, w, hessian, spec, axis))
    importance = None
    if hessian is not None:
        layout = make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
        squares = jnp.diagonal(hessian, axis1=1, axis2=2)[:, :, None]
        outputs = w.size // layout.inputs // layout.groups
        # An input without data must not make its weights free of cost: only they may share the scale.
        squares = jnp.maximum(squares, 1e-6 * jnp.maximum(jnp.max(squares), jnp.finfo(jnp.float32).tiny))
        importance = layout.restore(jnp.repeat(squares, outputs, 2))
    return quantize(w, spec, range=search_range(w, spec, importance))


def list_grids(name: str, w: jax.Array, hessian: jax.Array, spec: QuantSpec, axis: Axis) -> list[QuantizedArray]:
    """Return a weight rounded to nearest with the scale of each range of this name."""
    if name != "tried" or spec.zero_point_granularity != spec.granularity:
        return [choose_grid(name, w, hessian, spec, axis)]
    # With one candidate this is the whole range of each slice, in the shape of the scale.
    lo, hi = search_range(w, spec, least=1.0, steps=1)
    return [quantize(w, spec, range=shrink_range(spec, lo, hi, part)) for part in _PARTS]


def pick_best(w: jax.Array, hessian: jax.Array, axis: Axis, candidates: Iterable[QuantizedArray]) -> QuantizedArray:
    """Return the quantized array with the least error, for each output that has a scale of its own.

    Args:
        w: the weight.
        hessian: [groups, inputs, inputs].
        axis: the axes that are kept.
        candidates: arrays with the same spec.
    """
    layout = make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    best, least = None, None
    for q in candidates:
        costs = measure_outputs(w, q, hessian, axis)
        if best is None or least is None:
            best, least = q, costs
            continue
        # Outputs that share a scale have the candidate that is the best for all of them.
        is_own = has_own_scales(layout, q)
        is_better = costs < least if is_own else jnp.broadcast_to(jnp.sum(costs) < jnp.sum(least), costs.shape)
        best, least = _choose_outputs(layout, is_better, q, best), jnp.where(is_better, costs, least)
    assert best is not None
    return best


def refit_scale(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Axis) -> QuantizedArray | None:
    """Return a quantized array with the scales that have the least error for its codes.

    The values of a block are proportional to its scale, so that the factors f of the scales of an output solve a system
    of linear equations: A f = b, with A_ij = v_i^T H v_j, b_i = v_i^T H w and the values v_i of a block, 0 elsewhere.
    None if several outputs share a scale, or if the scale is quantized itself. An offset stays, and w is the weight
    without it.
    """
    layout = make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    # The factors of scales that are quantized themselves would have to be codes.
    if isinstance(q.scale, QuantizedArray) or not has_own_scales(layout, q):
        return None
    return q.replace(scale=_refit_scale(w, q, hessian, axis))


@functools.partial(jax.jit, static_argnames=("axis",))
def _refit_scale(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Axis) -> jax.Array:
    layout = make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    blocks = [q.scale.shape[a] for a in layout.summed]
    order = _list_block_inputs(layout, q)

    def cut(x: jax.Array) -> jax.Array:
        """Return [groups, inputs, outputs] as [blocks, groups, inputs of a block, outputs]."""
        padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        return jnp.moveaxis(padded[:, order], 1, 0)

    wide = w.astype(jnp.float32)
    if q.offset is not None:
        offset = granularity.Aligned(q.block_size).expand(read_entries(q.offset).astype(jnp.float32), wide)
        q, wide = q.replace(offset=None), wide - offset
    values, target = (layout.arrange(x.astype(jnp.float32)) for x in (q.dequantize(), wide))
    parts = cut(values)

    def multiply(rows: jax.Array) -> jax.Array:
        """Return v_i^T x of each block, for x [groups, inputs, outputs]."""
        return jnp.sum(parts * cut(rows), 2)

    def compute_column(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        columns, part = block
        return multiply(jnp.matmul(columns, part, precision=jax.lax.Precision.HIGHEST))

    # One block at a time: all products H v_i together take as many times the memory of the weight as there are blocks.
    columns = jnp.swapaxes(cut(jnp.swapaxes(hessian, 1, 2)), 2, 3)
    matrix = jnp.moveaxis(jax.lax.map(compute_column, (columns, parts)), (0, 1), (3, 2))
    product = multiply(jnp.matmul(hessian, target, precision=jax.lax.Precision.HIGHEST))
    factors = _solve_factors(matrix, jnp.moveaxis(product, 0, 2))
    # [groups, outputs, blocks], in the shape of the scale.
    shape = (*(w.shape[a] for a in layout.kept), *blocks)
    wide = factors.reshape(shape).transpose(np.argsort((*layout.kept, *layout.summed)))
    return (q.scale.astype(jnp.float32) * wide).astype(q.scale.dtype)


def _list_block_inputs(layout: MatrixLayout, q: QuantizedArray) -> np.ndarray:
    """Return the inputs of each block, [blocks, longest block]; an input after the last one fills shorter blocks."""
    sizes = granularity.Aligned(q.block_size).sizes(q.scale.shape, layout.shape)
    assert sizes is not None
    blocks, count = np.zeros((), np.int64), 1
    for a in layout.summed:
        blocks = blocks[..., None] * q.scale.shape[a] + np.arange(layout.shape[a]) // max(sizes[a], 1)
        count *= q.scale.shape[a]
    counts = np.bincount(blocks.ravel(), minlength=count)
    order = np.full((len(counts), counts.max(initial=0)), layout.inputs)
    order[np.arange(order.shape[1]) < counts[:, None]] = np.argsort(blocks.ravel(), kind="stable")
    return order


def _solve_factors(matrix: jax.Array, product: jax.Array) -> jax.Array:
    """Return the factors f with A f = b, near 1 where the values determine none; [groups, outputs, blocks]."""
    diagonal = jnp.diagonal(matrix, axis1=2, axis2=3)
    # A block of zeros has no factor. The damping pulls the factors to 1, and not to 0.
    floor = 1e-4 * diagonal + jnp.where(diagonal > 0, 0, 1)
    damped = matrix + floor[..., None] * jnp.eye(matrix.shape[-1])[None, None]
    change = jnp.linalg.solve(damped, (product - jnp.sum(matrix, 3))[..., None])[..., 0]
    factors = jnp.where(jnp.isfinite(change), 1 + change, 1)
    return jnp.clip(factors, *_FACTORS)  # a scale stays positive


def _choose_outputs(layout: MatrixLayout, mask: jax.Array, q: QuantizedArray, other: QuantizedArray) -> QuantizedArray:
    """Return the outputs of one array where the mask [groups, outputs] is True, and another array's elsewhere."""
    wide, outputs = _spread_outputs(layout, mask)

    def choose(x: Any, y: Any, chosen: jax.Array) -> Any:
        if x is None:
            return None
        if isinstance(x, QuantizedArray):
            return x.replace(**{name: choose(getattr(x, name), getattr(y, name), chosen) for name in _FIELDS})
        # A scale that several outputs share is taken as a whole; the mask is then the same for all of them.
        fits = all(a in (1, b) for a, b in zip(chosen.shape, x.shape, strict=True))
        chosen = chosen if fits else chosen.ravel()[0].reshape((1,) * x.ndim)
        return jnp.where(jnp.broadcast_to(chosen, x.shape), x, y)

    chosen = {name: choose(getattr(q, name), getattr(other, name), outputs) for name in _FIELDS[1:]}
    return q.replace(codes=choose(q.codes, other.codes, wide), **chosen)


def has_own_scales(layout: MatrixLayout, q: QuantizedArray) -> bool:
    """Return whether no two outputs share a scale, nor the scale of their scales."""
    parts = [q.scale, *(part.scale for part in (q.scale, q.offset) if isinstance(part, QuantizedArray))]
    return all(part.shape[a] == layout.shape[a] for part in parts for a in layout.kept)


def _spread_outputs(layout: MatrixLayout, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return values [groups, outputs] for each element of the weight, and with length 1 along the summed axes."""
    wide = layout.restore(jnp.repeat(values[:, None], layout.inputs, 1))
    return wide, wide[tuple(slice(None) if a in layout.kept else slice(0, 1) for a in range(wide.ndim))]


@functools.partial(jax.jit, static_argnames=("axis",))
def measure_outputs(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Axis) -> jax.Array:
    """Return the mean squared error of each output, [groups, outputs]: the diagonal of E^T H E."""
    layout = make_layout("ptq.apply", w.shape, axis, hessian.shape[0])
    errors = layout.arrange(w.astype(jnp.float32) - q.dequantize().astype(jnp.float32))
    squares = jnp.sum(errors * jnp.matmul(hessian, errors, precision=jax.lax.Precision.HIGHEST), 1)
    # Rounding can leave less than 0 of an error of 0.
    return jnp.maximum(squares, 0)


def measure_error(w: jax.Array, q: QuantizedArray, hessian: jax.Array, axis: Axis) -> jax.Array:
    """Return trace(E^T H E), the mean squared error of the outputs."""
    return jnp.sum(measure_outputs(w, q, hessian, axis))


def check_method(function: str, method: object) -> None:
    """Raise unless a method is one of this module's."""
    expected = "ptq.GPTQ(), ptq.AdaRound(), ptq.HQQ() or ptq.Nearest()"
    checks.require_type(isinstance(method, Method), function, "method", expected, checks.describe_value(method))
