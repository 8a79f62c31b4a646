"""The range with the least mean squared error."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, small_floats, uint64
from . import calibrator, histogram
from .calibrator import Calibrator, Range
from .histogram import HistogramState, Settings

_NAME = "mse"
_SHORT = np.float32(1e-3)  # of a step: a stretch too short to be integrated, in float32, by a difference
_SURE = np.float32(4)  # standard deviations


def mse(spec: QuantSpec, *, bins: int = 2048, grid: int = 100, every: int = 1) -> Calibrator:
    """(lo, hi) = t * (min(x, 0), max(x, 0)), t of 1/grid, 2/grid, ..., 1 with the least mean of (x - x_q)**2.

    For a symmetric spec the candidates are (-t * a, t * a), a = max(|x|), clipped to the least and the largest value
    seen. x_q is what `quantize` and `dequantize` make of x with the spec's dtype or code book and the scale and the
    zero point that `quantize` gives the range. The whole range, t = 1, is that of `minmax`, and is returned unless
    another one is better by more than the estimate may be off.

    The mean is estimated. Each bin of a histogram knows how many numbers it holds and the least and the largest of
    them, and the others are taken to lie evenly between the two; over that stretch the squared error is integrated in
    closed form. So it is exact for data that put one value in a bin (pixels, codes, exact zeros). For others the error
    of a number varies within its bin, of which int8 has two to eight to a step: that gives the estimate a standard
    deviation, a small share of it that falls with the root of how many there are, and four of them are what it may be
    off. With `every` it is the mean of the elements that are counted.

    The histogram does not depend on the order of the batches, nor on how states were merged. Its state holds 16 bytes
    per bin and slice, 32 KiB for each slice by default, and counts 2**64 elements. `finalize` takes time in proportion
    to `bins * grid`, for every slice.

    Args:
        spec: how to quantize. A scale and its zero point must have one granularity.
        bins: Static. Bins over [-R, R), R the least power of two above max(|x|): a power of two in [16, 65536].
        grid: Static. How many candidates, 1 or more.
        every: Static. Every how many elements of a slice, in the order of the batch, one is counted, from the first
            on. Counting is what takes time: 1 counts all. Choose a number that has no divisor with the last dimension
            of the batch in common. The extremes are those of all elements whatever it is.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec, an argument has a wrong type, or a batch has another dtype or is no array.
        ValueError: bins, grid or every is out of range, the spec's zero point has another granularity than its scale,
            a batch has slices that do not fit the state's, an axis of the spec is out of range, a state is not this
            calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or, without allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int4)
        >>> cal = jq.mse(spec)
        >>> x = jnp.concatenate([jnp.linspace(-1.0, 1.0, 1000), jnp.array([4.0])])
        >>> lo, hi = cal.finalize(cal.update(cal.init(x), x))
        >>> lo, hi  # the outlier is cut
        (Array([-1.], dtype=float32), Array([1.64], dtype=float32))
        >>> jq.quantize(jnp.array([0.11, 1.0, 4.0]), spec, range=(lo, hi)).codes
        Array([0, 4, 7], dtype=int4)

    Source: the calibration by mean squared error of NVIDIA's pytorch-quantization; Jacob et al., arXiv 1712.05877, for
    what is measured. The histogram's estimate and the candidates are this library's own.
    """
    calibrator.check_spec(_NAME, spec)
    checks.check_integer(_NAME, "grid", grid)
    checks.require(0 < grid <= 2**16, _NAME, "grid", "an int in [1, 65536]", grid)
    expected = "the granularity of the scale: each slice is judged with a scale and a zero point of its own"
    same = spec.zero_point_granularity == spec.granularity
    checks.require(same, _NAME, "spec.zero_point_granularity", expected, spec.zero_point_granularity)
    finish = functools.partial(_finish, spec=spec, grid=int(grid))
    return histogram.build_histogram_calibrator(Settings(_NAME, spec, bins, every, True), finish)


class _Stretch(NamedTuple):
    """Numbers between two ends, in bins, and how many."""

    start: jax.Array
    end: jax.Array
    count: jax.Array


@functools.partial(jax.jit, inline=True, static_argnames=("spec", "grid"))
def _finish(state: HistogramState, *, spec: QuantSpec, grid: int) -> tuple[jax.Array, jax.Array, Range]:
    low, high = state.low, state.high
    shares = jnp.asarray(np.arange(grid, 0, -1) / np.float64(grid), jnp.float32)  # the whole range first: it wins ties
    shares = shares.reshape((grid,) + (1,) * low.ndim)
    ranges = _list_candidates(spec, low, high, shares)
    parameters = functools.partial(
        scale_from_range.find_scale_and_zero_point, spec, scale_shape=low.shape, point_shape=low.shape
    )
    scales, points = jax.vmap(lambda lo, hi: parameters(low=lo, high=hi))(*ranges)
    wide = small_floats.scale_as_float32(scales)
    zero = jnp.zeros_like(wide) if points is None else points.astype(jnp.float32)
    stretches = _cut_stretches(state)
    per_width = histogram.divide_by_width(state)
    means, doubts = lax.map(lambda v: _find_error(spec, stretches, v[0] * per_width, v[1]), (wide, zero))
    # A range of denormal numbers, which XLA takes for 0, has scale 1 and an error beyond float32.
    best = jnp.argmin(jnp.where(jnp.isnan(means), np.float32(np.inf), means), axis=0)[None]
    mean, doubt = (jnp.take_along_axis(v, best, axis=0)[0] for v in (means, doubts))
    lo, hi = (jnp.take_along_axis(end, best, axis=0)[0] for end in ranges)
    whole = ~(mean + _SURE * jnp.sqrt(doubt + doubts[0]) < means[0])
    return low, high, Range(jnp.where(whole, low, lo), jnp.where(whole, high, hi))


def _list_candidates(
    spec: QuantSpec, low: jax.Array, high: jax.Array, shares: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the ends of the candidates, along a first dimension."""
    low, high = (jnp.broadcast_to(v, (shares.shape[0], *v.shape)) for v in (low, high))
    shares = jnp.broadcast_to(shares, low.shape)
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    if not spec.symmetric:
        return low * shares, high * shares
    reach = lax.max(-low, high) * shares
    return lax.max(-reach, low), lax.min(reach, high)


def _cut_stretches(state: HistogramState) -> _Stretch:
    """Returns what each bin holds, exact zeros last."""
    assert state.least is not None
    assert state.most is not None
    half = histogram.find_bins(state) // 2
    per_width = histogram.divide_by_width(state)[..., None]
    near, far = (lax.bitcast_convert_type(v, jnp.float32) * per_width for v in (state.least, state.most))
    below = lax.broadcasted_iota(jnp.int32, near.shape, near.ndim - 1) < half
    count = uint64.to_float32(state.counts)
    some = count > 0
    ends = (jnp.where(below, -far, near), jnp.where(below, -near, far))
    start, end = (jnp.where(some, v, np.float32(0)) for v in ends)
    zeros = uint64.to_float32(state.zeros)[..., None]
    nothing = jnp.zeros_like(zeros)
    last = (nothing, nothing, zeros)
    return _Stretch(*(lax.concatenate(v, zeros.ndim - 1) for v in zip((start, end, count), last, strict=True)))


def _find_error(
    spec: QuantSpec, stretches: _Stretch, scale: jax.Array, point: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean squared error of each slice, in squared bins, and the variance of that estimate."""
    scale, point = scale[..., None], point[..., None]
    start, end = stretches.start / scale, stretches.end / scale
    (rest_a, sum_a), (rest_b, sum_b) = (_round_to_levels(spec, steps, point) for steps in (start, end))
    # The integral of (u - q(u))**2 is rest**3 / 3, and per code that was passed its gap**3 / 12. A difference of cubes
    # by its factors, that large ones do not cancel.
    square = rest_a * rest_a + rest_a * rest_b + rest_b * rest_b
    same, length = sum_a == sum_b, end - start
    passed = (sum_b - sum_a) + (rest_b - rest_a) * square / 3
    ends = (rest_a * rest_a + rest_b * rest_b) / 2
    mean = jnp.where(length < _SHORT, ends, passed / jnp.maximum(length, _SHORT))
    mean = jnp.maximum(jnp.where(same, square / 3, mean), 0)
    # Both ends are there; only what lies between them is guessed.
    known = jnp.minimum(stretches.count, 2)
    between = stretches.count - known
    total = jnp.maximum(jnp.sum(stretches.count, axis=-1), np.float32(1))
    # The variance of one of them: that of a square whose root is spread over the length, or over many steps.
    variance = jnp.minimum(length * length / 3, np.float32(1.25) * mean) * mean
    doubt = jnp.sum(variance * between, axis=-1) / total / total
    unit = scale[..., 0] * scale[..., 0]
    return jnp.sum(mean * between + ends * known, axis=-1) / total * unit, doubt * unit * unit


def _round_to_levels(spec: QuantSpec, steps: jax.Array, point: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what is left of steps after they take the nearest code, and the sum of gap**3 / 12 from 0 to there."""
    if spec.dtype in dtypes.INTEGERS:
        least, most = (np.float32(bound) for bound in spec.bounds)
        code = lax.clamp(
            jnp.broadcast_to(least - point, steps.shape),
            lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN),
            jnp.broadcast_to(most - point, steps.shape),
        )
        return steps - code, code / 12
    levels = _list_levels(spec)
    middles = (levels[:-1] + levels[1:]) / 2
    sums = np.concatenate([[0.0], np.cumsum(np.diff(levels) ** 3 / 12)])
    sums -= sums[np.argmin(np.abs(levels))]  # small where levels are close together, so that differences are exact
    index = jnp.searchsorted(jnp.asarray(middles, jnp.float32), steps, method="scan_unrolled")
    return steps - jnp.asarray(levels, jnp.float32)[index], jnp.asarray(sums, jnp.float32)[index]


def _list_levels(spec: QuantSpec) -> np.ndarray:
    """Returns the values of the codes, ascending, float64."""
    if spec.codebook is not None:
        return np.asarray(spec.codebook.levels)
    every = np.arange(2 ** dtypes.find_width(spec.dtype), dtype=np.uint8).view(spec.dtype).astype(np.float64)
    return np.unique(every[np.isfinite(every)])
