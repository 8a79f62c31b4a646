"""`hqq`: the scale and the zero point of a weight that leave a small sum of |error|^p, found without data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantize import quantize
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, sharding
from .._core.entry_point import compile_entry_point, convert_number
from .._kernels.barriers import choose_on_cpu
from . import _grid
from ._grid import Grid, check_weight
from .search_range import Slices, keep_better, make_slices

_NAME = "ptq.hqq"
# About how many elements of a large weight are in work at a time, so that the arrays of a step fit into a cache.
_CHUNK = 2**18


def hqq(
    w: ArrayLike,
    spec: QuantSpec,
    *,
    p: float = 0.7,
    beta: float = 10.0,
    growth: float = 1.01,
    steps: int = 20,
    stored_last: int | tuple[int, ...] | None = None,
    diagnostics: bool = False,
) -> Any:
    """Quantize a weight with the scale and the zero point that leave a small sum of |error|^p, without data.

    minimize sum |w - w_q|^p over the scale and the zero point, with p < 1

    Such a sum forgives the few large errors of outliers, for the sake of small errors elsewhere. Half-quadratic
    splitting replaces it by sum |e|^p + (b / 2) * sum (w - w_q - e)^2, and each step minimizes this for one unknown
    after the other:

    - e = sign(r) * max(|r| - |r|^(p - 1) / b, 0), with r = w - w_q: the errors that are forgiven, in steps;
    - the zero point, if the spec has one: the mean of codes - (w - e) / scale, rounded to a code;
    - the scale: the least squares fit of w - e by the codes. Then b grows by the factor `growth`;
    - with an offset, both at once: the least squares fit of w - e by scale * codes + offset.

    A step is kept, for each slice of elements that share a scale, if the sum of |w - w_q|^p falls. The paper keeps the
    scale and has real zero points, which an offset is: -scale * zero point. Zero points of a `QuantizedArray` are
    codes, so that the scale moves, too. Scales and offsets that the spec quantizes are found in floats, and quantized
    at the end. Errors are in units of the first scale, which makes beta independent of the size of w.

    Args:
        w: the weight, float32, float16 or bfloat16.
        spec: Static. How to quantize, with one granularity for the scale and the zero point.
        p: Static. The exponent, in (0, 1].
        beta: Static. The first b.
        growth: Static. The factor by which b grows with each step, at least 1.
        steps: Static. The number of steps.
        stored_last: Static. The axes that the codes hold last in memory, as for `jq.quantize`.
        diagnostics: Static. Whether to return the sum of |error|^p after each step, too.

    Returns:
        A QuantizedArray with the shape and the dtype of w. With `diagnostics`, the pair of it and a float32 array of
        `steps` + 1 sums in units of the first scales, the first one for `jq.quantize`.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: a number is out of range, or `w` is known and has a NaN or an infinity.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import ptq
        >>> w = jax.random.t(jax.random.key(0), 4.0, (64, 8))  # with outliers
        >>> q, sums = ptq.hqq(w, jq.QuantSpec("uint2", jq.PerAxis(1)), diagnostics=True)
        >>> bool(sums[-1] < 0.9 * sums[0])
        True

    Source: Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models (Mobius Labs, 2023), section
    "Half-Quadratic Solver"; Geman and Reynolds, IEEE TPAMI 14, 1992, for the splitting. The paper has no arXiv id.
    """
    _grid.check_spec(_NAME, spec)
    for argument, value in (("p", p), ("beta", beta), ("growth", growth)):
        checks.check_real(_NAME, argument, value)
    checks.require(0 < p <= 1, _NAME, "p", "a number in (0, 1]", p)
    checks.require(beta > 0, _NAME, "beta", "a positive number", beta)
    checks.require(growth >= 1, _NAME, "growth", "1 or a larger number", growth)
    checks.check_integer(_NAME, "steps", steps)
    checks.require(steps > 0, _NAME, "steps", "a positive number", steps)
    checks.check_flag(_NAME, "diagnostics", diagnostics)
    w = convert_number(w)
    _grid.check_finite(_NAME, w=w)
    ends, sums = _search_range(w, spec=spec, p=float(p), beta=float(beta), growth=float(growth), steps=int(steps))
    q = quantize(w, spec, ends, stored_last=stored_last)
    return (q, sums) if diagnostics else q


@compile_entry_point(_NAME)
def _search_range(
    w: jax.Array, *, spec: QuantSpec, p: float, beta: float, growth: float, steps: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    check_weight(_NAME, w)
    slices = make_slices(_NAME, lax.stop_gradient(w), spec)
    solve = functools.partial(_solve, p=p, weights=np.asarray(beta * growth ** np.arange(steps), np.float32))
    axis, rows = _choose_chunks(slices)
    # On a mesh with explicit axes, JAX refuses to split an axis that devices share.
    if rows == slices.w.shape[axis] or sharding.is_placed(slices.w):
        return solve(slices)

    def in_chunks(w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        return _solve_in_chunks(solve, slices._replace(w=w), axis, rows)

    return choose_on_cpu(in_chunks, lambda w: solve(slices._replace(w=w)), slices.w)


def _choose_chunks(slices: Slices) -> tuple[int, int]:
    """Return the longest axis along which each index has scales of its own, and how many indices make a chunk."""
    shape = slices.w.shape
    separate = [axis for axis, length in enumerate(shape) if slices.shape[axis] == length]
    if not separate or slices.w.size <= _CHUNK:
        return 0, shape[0]
    axis = max(separate, key=lambda axis: shape[axis])
    return axis, min(shape[axis], max(1, _CHUNK * shape[axis] // slices.w.size))


def _solve_in_chunks(
    solve: Callable[[Slices], Any], slices: Slices, axis: int, rows: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Solve for some indices of an axis at a time, so that all steps find the chunk in the cache of the processor."""
    length = slices.w.shape[axis]
    count = -(-length // rows)
    # Indices of zeros have no error, and count for nothing in the sums.
    w = jnp.pad(jnp.moveaxis(slices.w, axis, 0), [(0, count * rows - length), *[(0, 0)] * (slices.w.ndim - 1)])
    shape = tuple(rows if i == axis else parts for i, parts in enumerate(slices.shape))

    def solve_chunk(chunk: jax.Array) -> Any:
        return solve(slices._replace(w=jnp.moveaxis(chunk, 0, axis), shape=shape))

    ends, sums = lax.map(solve_chunk, w.reshape(count, rows, *w.shape[1:]))

    def join(end: jax.Array) -> jax.Array:
        joined = jnp.moveaxis(end, axis + 1, 1)
        return jnp.moveaxis(joined.reshape(count * rows, *joined.shape[2:])[:length], 0, axis)

    return (join(ends[0]), join(ends[1])), sums.sum(0)


def _solve(slices: Slices, p: float, weights: np.ndarray) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Return the range of each slice, and the sum of all errors after each step."""
    low, high = slices.compute_extremes()
    unit = slices.compute_scales(low, high).scale

    def measure(low: jax.Array, high: jax.Array) -> jax.Array:
        errors = jnp.abs(slices.w - slices.round_to_range(low, high)) / slices.expand(unit)
        return slices.sum(_raise_to_power(errors, p))

    def try_step(best: tuple[jax.Array, ...], weight: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        ends = _improve(slices, best[1], best[2], unit, p, weight)
        best = keep_better(best, (measure(*ends), *ends))  # type: ignore[assignment]
        return best, jnp.sum(best[0])

    start = (measure(low, high), low, high)
    (_, low, high), sums = lax.scan(try_step, start, jnp.asarray(weights))
    return (low, high), jnp.concatenate([jnp.sum(start[0])[None], sums])


def _raise_to_power(x: jax.Array, exponent: float) -> jax.Array:
    """Return x**exponent for x >= 0, and 0 for x = 0 if the exponent is positive."""
    # XLA:CPU computes exp and log of vectors, but a power of one number after the other.
    return x if exponent == 1 else jnp.exp(np.float32(exponent) * jnp.log(x))


def _improve(
    slices: Slices, low: jax.Array, high: jax.Array, unit: jax.Array, p: float, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range of the scale and the zero point after one step."""
    spec, unit = slices.spec, slices.expand(unit)
    _, zero_point, offset = slices.compute_scales(low, high)
    grid = slices.compute_grid(low, high)
    codes = _grid.encode_values(slices.w, grid, spec)
    residual = (slices.w - _grid.decode_values(codes, grid, spec)) / unit
    size = jnp.abs(residual)
    # At 0 the power is infinite, and the shrunken error 0.
    power = _raise_to_power(jnp.where(size > 0, size, np.float32(1)), p - 1)
    forgiven = jnp.sign(residual) * jnp.maximum(size - power / weight, 0)
    target = slices.w - forgiven * unit
    if offset is not None:
        return _fit_line(slices, codes.astype(jnp.float32), target, low, high)
    # A zero point that the spec fixes may not move.
    if zero_point is not None and spec.fixed_zero_point is None:
        mean = slices.sum(codes.astype(jnp.float32) - target / grid.scale) / slices.count()
        zero_point = jnp.clip(jnp.round(mean), *(np.float32(bound) for bound in spec.bounds)).astype(jnp.int32)
    # The values of the codes in steps of the scale.
    steps = _grid.decode_values(codes, Grid(jnp.ones_like(grid.scale), None), spec)
    steps = steps if zero_point is None else steps - slices.expand(zero_point).astype(jnp.float32)
    square = slices.sum(steps * steps)
    scale = slices.sum(steps * target) / jnp.where(square > 0, square, np.float32(1))
    # `quantize` takes ranges, so that the new scale is returned as the range from which it finds that scale again.
    ends = tuple(end * scale for end in _compute_ends(spec, zero_point))
    # Codes that are all 0, or a fit with the wrong sign, say nothing about the scale.
    is_valid = (square > 0) & (scale > 0)
    return jnp.where(is_valid, ends[0], low), jnp.where(is_valid, ends[1], high)


def _fit_line(
    slices: Slices, codes: jax.Array, target: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range of the scale and the offset with the least squared error, which belong together."""
    # Codes are not negative, so that both would change little, and often, if each were found for the other.
    count = slices.count()
    means = [slices.sum(x) / count for x in (codes, target)]
    steps, values = (x - slices.expand(mean) for x, mean in zip((codes, target), means, strict=True))
    square = slices.sum(steps * steps)
    scale = slices.sum(steps * values) / jnp.where(square > 0, square, np.float32(1))
    start = means[1] - scale * means[0]
    start = jnp.minimum(start, 0) if slices.includes_zero[0] else start
    end = start + scale * np.float32(slices.spec.bounds[1])
    is_valid = (square > 0) & (scale > 0) & jnp.isfinite(start) & jnp.isfinite(end)
    return jnp.where(is_valid, start, low), jnp.where(is_valid, end, high)


def _compute_ends(spec: QuantSpec, zero_point: jax.Array | None) -> tuple[Any, Any]:
    """Return the lowest and the highest value in steps: numbers, or arrays if the zero point varies."""
    low, high = (np.float32(bound) for bound in spec.bounds)
    if spec.codebook is not None or spec.dtype in dtypes.SMALL_FLOATS:
        largest = np.float32(max(abs(low), abs(high)))
        return -largest, largest
    if zero_point is None:
        return low, high
    steps = zero_point.astype(jnp.float32)
    return low - steps, high - steps
