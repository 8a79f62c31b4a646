"""`mse`: a calibrator for the range with the least mean squared error."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from . import calibrator, histogram, uint64
from .calibrator import Calibrator, Range
from .histogram import HistogramState, Settings

_NAME = "calibration.mse"
_SHORT = np.float32(1e-3)  # in steps; a shorter interval is not integrated, because float32 differences would cancel
_CERTAINTY = np.float32(4)  # the standard deviations by which a range must be better than the whole range


def mse(spec: QuantSpec, *, bins: int = 2048, grid: int = 100, every: int = 1) -> Calibrator:
    """Return a calibrator for the range with the least mean squared quantization error.

    (lo, hi) = t * (min(x, 0), max(x, 0)), where t in {1/grid, 2/grid, ..., 1} has the least mean of (x - x_q)**2

    x_q is x after `quantize` and `dequantize` with the spec's dtype or codebook, and with the scale and the zero point
    that `quantize` gives the candidate range. For a symmetric spec the candidates are (-t * a, t * a), a = max(|x|),
    clipped to the least and the largest value of the data. The whole range, t = 1, equals `minmax`'s. It is returned
    unless another one is better by more than the uncertainty of the estimate.

    The mean is an estimate from a histogram. Each bin stores the number of its elements, and the least and the largest
    of them. The other elements are assumed to be spread evenly between these two, and the squared error is integrated
    over this interval in closed form. The estimate is therefore exact for data with one value in a bin (pixels, codes,
    exact zeros). For other data, the error varies within a bin (with int8, a step has only two to eight bins). So the
    estimate has a standard deviation: a small fraction of the estimate, which falls with the square root of the number
    of elements. The uncertainty is four standard deviations. With `every`, the mean is over the counted elements.

    The result depends neither on the order of the batches nor on how states are merged. The state has 16 bytes per bin
    and slice, 32 KiB for each slice by default, and can count 2**64 elements. The time of `finalize` grows with
    `bins * grid`, for each slice.

    Args:
        spec: how to quantize. The scale and the zero point must have the same granularity.
        bins: Static. The number of bins over [-R, R), where R is the least power of two above max(|x|): a power of two
            in [16, 65536].
        grid: Static. The number of candidates, from 1 to 65536.
        every: Static. Counts every n-th element of a slice, in the order of the batch, starting with the first. 1
            counts all of them. Counting takes most of the time. Choose a number that has no common divisor with the
            length of the batch's last dimension. The least and the largest value always include all elements.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec or an argument has a wrong type. `update`: the batch is not an array of a
            float dtype. Any function of the calibrator: the state comes from a different calibrator.
        ValueError: bins, grid or every is out of range, or the zero point of the spec does not have the granularity of
            the scale. `init`: an axis of the spec is out of range. `update`: the slices of the batch do not match those
            of the state. `finalize`: a slice has no data, a NaN, an infinity, or (without allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int4)
        >>> cal = jq.calibration.mse(spec)
        >>> x = jnp.concatenate([jnp.linspace(-1.0, 1.0, 1000), jnp.array([4.0])])
        >>> lo, hi = cal.finalize(cal.update(cal.init(x), x))
        >>> lo, hi  # the outlier is cut
        (Array([-1.], dtype=float32), Array([1.64], dtype=float32))
        >>> jq.quantize(jnp.array([0.11, 1.0, 4.0]), spec, range=(lo, hi)).codes
        Array([0, 4, 7], dtype=int4)

    Source: the calibration by mean squared error of NVIDIA's pytorch-quantization; Jacob et al., arXiv 1712.05877, for
    the error. The estimate from a histogram and the candidates are specific to this library.
    """
    calibrator.check_spec(_NAME, spec)
    calibrator.refuse_forms(_NAME, spec)
    checks.check_integer(_NAME, "grid", grid)
    checks.require(0 < grid <= 2**16, _NAME, "grid", "an int in [1, 65536]", grid)
    expected = "the granularity of the scale, because each slice is measured with one scale and one zero point"
    is_shared = spec.zero_point_granularity == spec.granularity
    checks.require(is_shared, _NAME, "spec.zero_point_granularity", expected, spec.zero_point_granularity)
    finish = functools.partial(_finish, spec=spec, grid=int(grid))
    return histogram.build_histogram_calibrator(Settings(_NAME, spec, bins, every, True), finish)


class _Intervals(NamedTuple):
    """Intervals of numbers: their ends in units of a bin, and the number of elements in each."""

    start: jax.Array
    end: jax.Array
    count: jax.Array


@functools.partial(jax.jit, inline=True, static_argnames=("spec", "grid"))
def _finish(state: HistogramState, *, spec: QuantSpec, grid: int) -> tuple[jax.Array, jax.Array, Range]:
    low, high = state.low, state.high
    # The whole range is the first candidate, so that argmin prefers it to equally good ones.
    shares = jnp.asarray(np.arange(grid, 0, -1) / np.float64(grid), jnp.float32)
    shares = shares.reshape((grid,) + (1,) * low.ndim)
    ranges = _list_candidates(spec, low, high, shares)
    parameters = functools.partial(
        scale_from_range.compute_scale_and_zero_point, spec, scale_shape=low.shape, zero_point_shape=low.shape
    )
    scales, zero_points = jax.vmap(lambda lo, hi: parameters(low=lo, high=hi))(*ranges)
    wide = dtypes.scale_as_float32(scales)
    zero = jnp.zeros_like(wide) if zero_points is None else zero_points.astype(jnp.float32)
    intervals = _list_intervals(state)
    per_width = histogram.divide_by_width(state)
    # `lax.map` measures one candidate at a time, because the arrays of all candidates would take too much memory.
    means, variances = lax.map(lambda v: _compute_error(spec, intervals, v[0] * per_width, v[1]), (wide, zero))
    # XLA treats a range of subnormal numbers as 0. Its scale is then 1, and its error in bins overflows to NaN.
    best = jnp.argmin(jnp.where(jnp.isnan(means), np.float32(np.inf), means), axis=0)[None]
    mean, variance = (jnp.take_along_axis(v, best, axis=0)[0] for v in (means, variances))
    lo, hi = (jnp.take_along_axis(end, best, axis=0)[0] for end in ranges)
    # Negated, so that a NaN keeps the whole range.
    keeps_whole = ~(mean + _CERTAINTY * jnp.sqrt(variance + variances[0]) < means[0])
    return low, high, Range(jnp.where(keeps_whole, low, lo), jnp.where(keeps_whole, high, hi))


def _list_candidates(
    spec: QuantSpec, low: jax.Array, high: jax.Array, shares: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the ends of the candidate ranges, along a new first dimension."""
    low, high = (jnp.broadcast_to(v, (shares.shape[0], *v.shape)) for v in (low, high))
    shares = jnp.broadcast_to(shares, low.shape)
    low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    if not spec.symmetric:
        return low * shares, high * shares
    reach = lax.max(-low, high) * shares
    return lax.max(-reach, low), lax.min(reach, high)


def _list_intervals(state: HistogramState) -> _Intervals:
    """Return the interval of the elements in each bin, with the exact zeros as the last interval."""
    assert state.least is not None
    assert state.most is not None
    half = histogram.count_bins(state) // 2
    per_width = histogram.divide_by_width(state)[..., None]
    low, high = (lax.bitcast_convert_type(v, jnp.float32) * per_width for v in (state.least, state.most))
    below = lax.broadcasted_iota(jnp.int32, low.shape, low.ndim - 1) < half
    count = uint64.to_float32(state.counts)
    has_elements = count > 0
    ends = (jnp.where(below, -high, low), jnp.where(below, -low, high))
    # The magnitudes of an empty bin are placeholders; 0 keeps them from overflowing.
    start, end = (jnp.where(has_elements, v, np.float32(0)) for v in ends)
    zero_count = uint64.to_float32(state.zeros)[..., None]
    origin = jnp.zeros_like(zero_count)
    last = (origin, origin, zero_count)
    return _Intervals(*(lax.concatenate(v, zero_count.ndim - 1) for v in zip((start, end, count), last, strict=True)))


def _compute_error(
    spec: QuantSpec, intervals: _Intervals, scale: jax.Array, zero_point: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the mean squared error of each slice, in squared bins, and the variance of that estimate."""
    scale, zero_point = scale[..., None], zero_point[..., None]
    start, end = intervals.start / scale, intervals.end / scale
    (rest_a, sum_a), (rest_b, sum_b) = (_round_to_levels(spec, steps, zero_point) for steps in (start, end))
    # In steps u, with the nearest code q(u), the integral of (u - q(u))**2 from 0 is rest**3 / 3 with rest = u - q(u),
    # plus gap**3 / 12 for each gap between two codes on the way. The difference of two cubes is computed from its
    # factors, so that large cubes do not cancel.
    square = rest_a * rest_a + rest_a * rest_b + rest_b * rest_b
    is_single, length = sum_a == sum_b, end - start
    integral = (sum_b - sum_a) + (rest_b - rest_a) * square / 3
    ends = (rest_a * rest_a + rest_b * rest_b) / 2
    mean = jnp.where(length < _SHORT, ends, integral / jnp.maximum(length, _SHORT))
    # In an interval with a single nearest code the length cancels, so even a short one is integrated exactly.
    mean = jnp.maximum(jnp.where(is_single, square / 3, mean), 0)
    # The two ends of an interval are elements of the data; only the elements between them are estimated.
    end_count = jnp.minimum(intervals.count, 2)
    inner_count = intervals.count - end_count
    total = jnp.maximum(jnp.sum(intervals.count, axis=-1), np.float32(1))
    # The variance of the squared error of one such element is the smaller of two estimates: for an interval much
    # shorter than a step, and for one that spans many steps.
    variance = jnp.minimum(length * length / 3, np.float32(1.25) * mean) * mean
    variance_of_mean = jnp.sum(variance * inner_count, axis=-1) / total / total
    unit = scale[..., 0] * scale[..., 0]
    return jnp.sum(mean * inner_count + ends * end_count, axis=-1) / total * unit, variance_of_mean * unit * unit


def _round_to_levels(spec: QuantSpec, steps: jax.Array, zero_point: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rounding error of steps, and the sum of gap**3 / 12 over the codes from 0 to the nearest one."""
    if dtypes.is_integer(spec.dtype):
        least, most = (np.float32(bound) for bound in spec.bounds)
        code = lax.clamp(
            jnp.broadcast_to(least - zero_point, steps.shape),
            lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN),
            jnp.broadcast_to(most - zero_point, steps.shape),
        )
        return steps - code, code / 12
    levels = _list_levels(spec)
    middles = (levels[:-1] + levels[1:]) / 2
    sums = np.concatenate([[0.0], np.cumsum(np.diff(levels) ** 3 / 12)])
    sums -= sums[np.argmin(np.abs(levels))]  # counted from 0, so that float32 is accurate where the levels are dense
    index = jnp.searchsorted(jnp.asarray(middles, jnp.float32), steps, method="scan_unrolled")
    return steps - jnp.asarray(levels, jnp.float32)[index], jnp.asarray(sums, jnp.float32)[index]


def _list_levels(spec: QuantSpec) -> np.ndarray:
    """Return the values of the codes in ascending order, float64."""
    if spec.codebook is not None:
        return np.asarray(spec.codebook.ascending)
    values = np.arange(2 ** dtypes.count_packed_bits(spec.dtype), dtype=np.uint8).view(spec.dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])  # one value for +0 and -0
