"""`hqq`: the scale and the zero point of a weight that leave a small sum of |error|^p, found without data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantize import quantize
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point, convert_number
from . import _grid, _matrix, _ranges
from ._grid import Grid
from ._ranges import Slices

_NAME = "ptq.hqq"


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

    Such a sum forgives a few large errors, those of outliers, for the sake of small errors elsewhere. Half-quadratic
    splitting replaces it by sum |e|^p + (b / 2) * sum (w - w_q - e)^2, and each step minimizes this for one unknown
    after the other:

    - e = sign(r) * max(|r| - |r|^(p - 1) / b, 0), with r = w - w_q: the errors that are forgiven, in steps;
    - the zero point, if the spec has one: the mean of codes - (w - e) / scale, rounded to a code;
    - the scale: the least squares fit of w - e by the codes. Then b grows by the factor `growth`.

    A step is kept, for each slice of elements that share a scale, if the sum of |w - w_q|^p falls. The paper keeps the
    scale and has real zero points; those of a `QuantizedArray` are codes, so that the scale moves, too. Errors are in
    units of the first scale, which makes beta independent of the size of w.

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
        `steps` + 1 sums in units of the first scales, of which the first one is that of `jq.quantize`.

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
    ends, sums = _find_range(w, spec=spec, p=float(p), beta=float(beta), growth=float(growth), steps=int(steps))
    q = quantize(w, spec, *ends, stored_last=stored_last)
    return (q, sums) if diagnostics else q


@compile_entry_point(_NAME)
def _find_range(
    w: jax.Array, *, spec: QuantSpec, p: float, beta: float, growth: float, steps: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    _matrix.check_weight(_NAME, w)
    slices = _ranges.make_slices(_NAME, lax.stop_gradient(w), spec)
    low, high = slices.find_extremes()
    unit = slices.find_grid(low, high).scale

    def measure(low: jax.Array, high: jax.Array) -> jax.Array:
        return slices.sum((jnp.abs(slices.w - slices.round_to_range(low, high)) / unit) ** np.float32(p))

    def try_step(best: tuple[jax.Array, ...], weight: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        ends = _improve(slices, best[1], best[2], unit, p, weight)
        best = _ranges.keep_better(best, (measure(*ends), *ends))  # type: ignore[assignment]
        return best, jnp.sum(best[0])

    start = (measure(low, high), low, high)
    weights = np.asarray(beta * growth ** np.arange(steps), np.float32)
    (_, low, high), sums = lax.scan(try_step, start, jnp.asarray(weights))
    return (low, high), jnp.concatenate([jnp.sum(start[0])[None], sums])


def _improve(
    slices: Slices, low: jax.Array, high: jax.Array, unit: jax.Array, p: float, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the range of the scale and the zero point after one step."""
    spec = slices.spec
    grid = slices.find_grid(low, high)
    codes = _grid.encode_values(slices.w, grid, spec)
    residual = (slices.w - _grid.decode_values(codes, grid, spec)) / unit
    size = jnp.abs(residual)
    # At 0 the power is infinite, and the shrunken error 0.
    power = jnp.where(size > 0, size, np.float32(1)) ** np.float32(p - 1)
    forgiven = jnp.sign(residual) * jnp.maximum(size - power / weight, 0)
    target = slices.w - forgiven * unit
    point = grid.zero_point
    # Counted, because the last block along an axis may be short.
    counts = slices.sum(jnp.ones_like(slices.w))
    # A zero point that the spec fixes may not move.
    if point is not None and spec.fixed_zero_point is None:
        mean = slices.sum(codes.astype(jnp.float32) - target / grid.scale) / counts
        point = slices.expand(jnp.clip(jnp.round(mean), *(np.float32(bound) for bound in spec.bounds)))
    # The values of the codes in steps of the scale.
    steps = _grid.decode_values(codes, Grid(jnp.ones_like(grid.scale), None), spec)
    steps = steps if point is None else steps - point.astype(jnp.float32)
    square = slices.sum(steps * steps)
    scale = slices.sum(steps * target) / jnp.where(square > 0, square, np.float32(1))
    # `quantize` takes ranges, so that the new scale is returned as the range from which it finds that scale again.
    least, largest = _find_ends(spec, point)
    ends = tuple(_read_slices(slices, end) * scale for end in (least, largest))
    # Codes that are all 0, or a fit with the wrong sign, say nothing about the scale.
    is_valid = (square > 0) & (scale > 0)
    return jnp.where(is_valid, ends[0], low), jnp.where(is_valid, ends[1], high)


def _find_ends(spec: QuantSpec, point: jax.Array | None) -> tuple[Any, Any]:
    """Return the lowest and the highest value in steps: numbers, or arrays if the zero point varies."""
    low, high = (np.float32(bound) for bound in spec.bounds)
    if spec.codebook is not None or spec.dtype in dtypes.SMALL_FLOATS:
        largest = np.float32(max(abs(low), abs(high)))
        return -largest, largest
    if point is None:
        return low, high
    steps = point.astype(jnp.float32)
    return low - steps, high - steps


def _read_slices(slices: Slices, value: Any) -> jax.Array:
    """Return one number for each slice, of an array in which all elements of a slice have the same."""
    if not isinstance(value, jax.Array):
        return jnp.full(slices.shape, value, jnp.float32)
    return slices.sum(value) / slices.sum(jnp.ones_like(value))
