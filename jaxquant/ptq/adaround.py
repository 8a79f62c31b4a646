"""`adaround`: for each weight the choice between rounding down and rounding up, learned together."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks
from .._core.entry_point import compile_entry_point, convert_number
from . import _grid
from ._grid import Axis, Grid, read_hessian
from .gptq import descend, factor_groups, map_groups, quantize_group

_NAME = "ptq.adaround"
_HIGHEST = lax.Precision.HIGHEST
# The ends of the paper's stretched sigmoid, which reaches 0 and 1.
_LOW, _HIGH = np.float32(-0.1), np.float32(1.1)
_WARM_UP = 0.2  # the part of the steps without the penalty
_STEEPEST, _FLATTEST = 20.0, 2.0  # the exponent of the penalty falls from the first to the second
_DECAY = (np.float32(0.9), np.float32(0.999))  # Adam's
_DAMPING = 0.01  # as the default of `gptq`


class _Adam(NamedTuple):
    """The variable of each weight, and its moving averages."""

    variable: jax.Array
    mean: jax.Array
    square: jax.Array


def adaround(
    w: ArrayLike,
    hessian: ArrayLike,
    spec: QuantSpec,
    grid: QuantizedArray | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    steps: int = 300,
    rate: float = 0.05,
    penalty: float = 1.0,
    sweeps: int = 2,
    stored_last: int | tuple[int, ...] | None = None,
) -> QuantizedArray:
    """Quantize a weight with a learned choice, for each of its elements, between rounding down and rounding up.

    minimize trace(E^T H E) + penalty * sum (1 - |2 h(V) - 1|^b) over V, with E = w - scale * (floor(w / scale) + h(V))

    h(V) = clip(1.2 * sigmoid(V) - 0.1, 0, 1) starts at the fraction of w / scale. The exponent b falls from 20 to 2, so
    that the penalty drives each h(V) to 0 or 1. The paper samples batches of inputs; here the second moments H hold all
    of them, and the result needs no random key. Adam minimizes. The errors of an output are in units of
    mean(diag(H) * scale^2), which makes rate and penalty independent of the sizes of w and of the inputs.

    After the last step, each element in turn gets the better of its two codes, for `sweeps` rounds. The same rounds
    also start from the codes of round-to-nearest and of `gptq`, and each output gets the best result, because each of
    these stops where no single code can be improved, which need not be the minimum. No output has a larger error than
    with round-to-nearest.

    Args:
        w: the weight, float32, float16 or bfloat16, of any shape.
        hessian: the second moments of the inputs of each output, as for `gptq`.
        spec: Static. How to quantize: an integer dtype, with any granularity.
        grid: an array with the same shape and dtype of codes, for its scale and its zero point or offset, which may be
            quantized themselves. None finds them in the range of w.
        axis: Static. The axis or axes of w that the contraction keeps: the output features.
        steps: Static. The number of steps of Adam. Each takes a product of H with a matrix of w's size.
        rate: Static. The learning rate.
        penalty: Static. The weight of the penalty.
        sweeps: Static. The number of rounds at the end.
        stored_last: Static. The axes that the codes hold last in memory, as for `jq.quantize`.

    Returns:
        A QuantizedArray with the shape and the dtype of w. Each of its codes is one of the two around w, or the bound
        that is nearest to w. Under `jax.jit`, a NaN in `w` or `hessian` makes the scale NaN.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: the spec has no integers; the shapes do not fit each other; a number is out of range; or `w` or
            `hessian` is known and has a NaN or an infinity.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> w = jnp.array([[7.0], [0.4], [0.4], [0.4]])
        >>> hessian = jnp.ones((4, 4)) + 0.1 * jnp.eye(4)  # the inputs are nearly equal, and 3 * 0.4 is nearly 1
        >>> spec = jq.QuantSpec("int4", jq.PerAxis(1))
        >>> jq.quantize(w, spec).codes.tolist(), ptq.adaround(w, hessian, spec).codes.astype(int).sum().item()
        ([[7], [0], [0], [0]], 8)

    Source: Nagel et al., arXiv 2004.10568, section 3.2, equations 20 to 24.
    """
    _grid.check_integer_spec(_NAME, spec)
    for argument, count in (("steps", steps), ("sweeps", sweeps)):
        checks.check_integer(_NAME, argument, count)
        checks.require(count >= 0, _NAME, argument, "0 or a positive number", count)
    for argument, value in (("rate", rate), ("penalty", penalty)):
        checks.check_real(_NAME, argument, value)
        checks.require(value >= 0, _NAME, argument, "0 or a positive number", value)
    w, hessian = convert_number(w), convert_number(hessian)
    _grid.check_finite(_NAME, w=w, hessian=hessian)
    return _adaround(
        w, hessian, grid, spec=spec, axis=checks.check_integers(_NAME, "axis", axis), steps=int(steps),
        rate=float(rate), penalty=float(penalty), sweeps=int(sweeps),
        stored_last=None if stored_last is None else checks.check_integers(_NAME, "stored_last", stored_last),
    )  # fmt: skip


@compile_entry_point(_NAME)
def _adaround(
    w: jax.Array, hessian: jax.Array, grid: QuantizedArray | None, *, spec: QuantSpec, axis: Axis, steps: int,
    rate: float, penalty: float, sweeps: int, stored_last: Axis | None,
) -> QuantizedArray:  # fmt: skip
    hessian, layout = read_hessian(_NAME, w, hessian, axis)
    _grid.check_grid(_NAME, grid, w, spec)
    w, hessian, grid = lax.stop_gradient((w, hessian, grid))
    scales = _grid.compute_scales(_NAME, w, spec, _grid.read_grid(_NAME, grid))
    wide = _grid.subtract_offset(w, scales)
    each = _grid.expand_scales(scales, wide, layout)
    learn = functools.partial(_learn_group, spec=spec, steps=steps, rate=rate, penalty=penalty, sweeps=sweeps)
    codes = map_groups(learn, layout.arrange(wide), hessian, each)
    is_valid = jnp.isfinite(hessian).all() & jnp.isfinite(wide).all()
    scales = _grid.spoil_scales(scales, is_valid)
    return _grid.build_array(_NAME, codes, layout, scales, spec, w.dtype, stored_last)


def _learn_group(
    w: jax.Array, hessian: jax.Array, grid: Grid, *, spec: QuantSpec, steps: int, rate: float, penalty: float,
    sweeps: int,
) -> jax.Array:  # fmt: skip
    """Return the codes of a matrix [inputs, outputs]."""
    bounds = tuple(np.float32(bound) for bound in spec.bounds)
    zero_point = jnp.zeros_like(w) if grid.zero_point is None else grid.zero_point.astype(jnp.float32)
    # A plain division will do: if the quotient of an exact code is rounded to the wrong side, that code is still one of
    # the two candidates.
    # With a scale of 0, which signed scales may be, all codes have the same value.
    position = w / jnp.where(grid.scale == 0, 1, grid.scale) + zero_point
    low = jnp.floor(position)
    # A code beyond the bounds has no choice.
    lowest, highest = jnp.clip(low, *bounds), jnp.clip(low + 1, *bounds)
    squares = jnp.sum(jnp.diagonal(hessian)[:, None] * grid.scale**2, 0, keepdims=True)
    # A matrix with zeros only has no gradient.
    unit = jnp.where(squares > 0, squares / np.float32(w.shape[0]), 1)

    def relax(variable: jax.Array) -> jax.Array:
        return jnp.clip(jax.nn.sigmoid(variable) * (_HIGH - _LOW) + _LOW, 0, 1)

    def measure(variable: jax.Array, exponent: jax.Array, weight: jax.Array) -> jax.Array:
        share = relax(variable)
        errors = w - grid.scale * (jnp.clip(low + share, *bounds) - zero_point)
        # The magnitude has no derivative of a power at 0.
        distance = jnp.maximum(jnp.abs(2 * share - 1), np.float32(1e-6))
        return jnp.sum(_compute_costs(errors, hessian) / unit) + weight * jnp.sum(1 - distance**exponent)

    def move_downhill(state: _Adam, plan: tuple[jax.Array, ...]) -> tuple[_Adam, None]:
        index, exponent, weight = plan
        slope = jax.grad(measure)(state.variable, exponent, weight)
        mean = _DECAY[0] * state.mean + (1 - _DECAY[0]) * slope
        square = _DECAY[1] * state.square + (1 - _DECAY[1]) * slope**2
        move = mean / (1 - _DECAY[0] ** index) / (jnp.sqrt(square / (1 - _DECAY[1] ** index)) + np.float32(1e-8))
        return _Adam(state.variable - np.float32(rate) * move, mean, square), None

    # Just inside of the ends: beyond them the clip lets no gradient pass, and the choice could not be revised.
    share = jnp.clip(position - low, 1e-3, 1 - 1e-3)
    variable = -jnp.log((_HIGH - _LOW) / (share - _LOW) - 1)
    zeros = jnp.zeros_like(w)
    state, _ = lax.scan(move_downhill, _Adam(variable, zeros, zeros), _plan_steps(steps, penalty))  # type: ignore[arg-type]
    # The penalty may have left shares between 0 and 1, for example with few steps.
    learned = jnp.where(relax(state.variable) >= np.float32(0.5), highest, lowest)
    return _refine_codes(w, learned, (lowest, highest), hessian, grid, spec, sweeps)


def _refine_codes(
    w: jax.Array, learned: jax.Array, bounds: tuple[jax.Array, jax.Array], hessian: jax.Array, grid: Grid,
    spec: QuantSpec, sweeps: int,
) -> jax.Array:  # fmt: skip
    """Return the best of the codes within bounds that coordinate descent finds from three starts, for each output."""
    nearest = _grid.encode_values(w, grid, spec)
    limits = (bounds[0].astype(nearest.dtype), bounds[1].astype(nearest.dtype))
    # Coordinate descent stops where no single code can be improved, and which of many such places depends on the start.
    factors = jax.tree.map(lambda x: x[0], factor_groups(hessian[None], damping=_DAMPING, is_ordered=True))
    with_feedback = quantize_group(w, hessian, grid, factors, spec=spec, sweeps=0)[0]
    starts = (learned.astype(nearest.dtype), nearest, with_feedback)
    # `gptq` rounds values into which it has moved errors, so that its codes may not be among the two candidates.
    descents = [descend(w, jnp.clip(x, *limits), hessian, grid, spec, sweeps, limits) for x in starts]
    best, least = nearest, _compute_costs(w - _grid.decode_values(nearest, grid, spec), hessian)
    for other in descents:
        cost = _compute_costs(w - _grid.decode_values(other, grid, spec), hessian)
        best, least = jnp.where(cost < least, other, best), jnp.minimum(cost, least)
    return best


def _compute_costs(errors: jax.Array, hessian: jax.Array) -> jax.Array:
    """Return the error of each output."""
    return jnp.sum(errors * jnp.matmul(hessian, errors, precision=_HIGHEST), 0, keepdims=True)


def _plan_steps(steps: int, penalty: float) -> tuple[np.ndarray, ...]:
    """Return the number of each step, the exponent of its penalty and the weight of it."""
    index = np.arange(steps)
    begin = int(_WARM_UP * steps)
    progress = np.clip((index - begin) / max(steps - begin, 1), 0, 1)
    exponent = _FLATTEST + (_STEEPEST - _FLATTEST) * (1 + np.cos(np.pi * progress)) / 2
    weight = np.where(index < begin, 0, penalty)
    return tuple(np.asarray(x, np.float32) for x in (index + 1, exponent, weight))
