"""`percentile`: a calibrator for the range that holds a given percentage of the data."""

from __future__ import annotations

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import QuantSpec
from .._core import checks
from . import histogram, uint64
from .calibrator import Calibrator, Range
from .histogram import HistogramState, Settings
from .uint64 import Words

_NAME = "calibration.percentile"


def percentile(spec: QuantSpec, q: float, *, bins: int = 2048, every: int = 1) -> Calibrator:
    """Return a calibrator for the range that holds q percent of the data.

    (lo, hi) = (-p, p), with p the q-th percentile of |x|, for a symmetric spec. For any other spec, (lo, hi) are the
    percentiles (100 - q) / 2 and (100 + q) / 2 of x.

    These are numpy's percentiles with linear interpolation, found in a histogram. They are off by less than the width
    of a bin, 2 * R / bins, where R is the least power of two above max(|x|). Exact zeros are counted separately and
    have no such error. The range is clipped to the least and the largest value of the data; q = 100 gives these, as
    `minmax` does.

    One outlier makes the bins wide, so the 64 bins next to 0 are divided: with 128 to 32768 bins, a percentile p whose
    magnitude is between R / 2**16 * 64 / bins and R * 64 / bins is off by less than |p| / 32.

    The result depends neither on the order of the batches nor on how states are merged. The state has 8 bytes per bin
    and slice, and 8 KiB more, 24 KiB for each slice by default, and can count 2**64 elements. With 65536 bins none is
    divided.

    Args:
        spec: how to quantize. Only its granularity and whether it is symmetric matter here.
        q: the percentage of the data, in (0, 100].
        bins: Static. The number of bins over [-R, R): a power of two in [16, 65536].
        every: Static. Counts every n-th element of a slice, in the order of the batch, starting with the first. 1
            counts all of them. Counting takes most of the time. Choose a number that has no common divisor with the
            length of the batch's last dimension. The least and the largest value always include all elements.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec or an argument has a wrong type. `update`: the batch is not an array of a
            float dtype. Any function of the calibrator: the state comes from a different calibrator.
        ValueError: q, bins or every is out of range. `init`: an axis of the spec is out of range. `update`: the slices
            of the batch do not match the state. `finalize`: a slice has no data, a NaN, an infinity, or
            (without allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.calibration.percentile(jq.QuantSpec(jnp.int8), 90)
        >>> state = cal.init(jnp.zeros(10))
        >>> for batch in (-jnp.arange(10.0), jnp.array([100.0])):  # the outlier widens the bins, and no count is lost
        ...     state = cal.update(state, batch)
        >>> lo, hi = cal.finalize(state)
        >>> lo, hi  # numpy: 9; lo is clipped to the least value
        (Array([-9.], dtype=float32), Array([9.0625], dtype=float32))
        >>> jq.quantize(jnp.array([0.0, -9.0, 100.0]), jq.QuantSpec(jnp.int8), range=(lo, hi)).codes
        Array([   0, -126,  127], dtype=int8)

    Source: ONNX Runtime's PercentileCalibrater; the percentile calibration of Wu et al., arXiv 2004.09602, section 4.
    """
    checks.check_real(_NAME, "q", q)
    checks.require(0 < q <= 100, _NAME, "q", "a percentage in (0, 100]", q)
    symmetric = isinstance(spec, QuantSpec) and bool(spec.symmetric)
    finish = functools.partial(_finish, q=float(q), symmetric=symmetric)
    return histogram.build_histogram_calibrator(Settings(_NAME, spec, bins, every, has_fine=True), finish)


@functools.partial(jax.jit, inline=True, static_argnames=("q", "symmetric"))
def _finish(state: HistogramState, *, q: float, symmetric: bool) -> tuple[jax.Array, jax.Array, Range]:
    low, high = state.low, state.high
    if q == 100:
        return low, high, Range(low, high)
    counts, start, span = _cut_pieces(state, symmetric)
    width = histogram.compute_width(state)
    # With an exact fraction the rank stays exact beyond the 24 bits of a float32.
    share = Fraction(q) / 100

    def value(share: Fraction) -> jax.Array:
        return _compute_value(counts, start, span, share) * width

    upper = value(share if symmetric else (1 + share) / 2)
    lower = -upper if symmetric else value((1 - share) / 2)
    # The value is only accurate to a bin and may be outside the data.
    return low, high, Range(lax.clamp(low, lower, high), lax.clamp(low, upper, high))


def _cut_pieces(state: HistogramState, symmetric: bool) -> tuple[Words, jax.Array, jax.Array]:
    """Return the counts of adjacent intervals in ascending order, and the starts and lengths of these, in bins."""
    half = histogram.count_bins(state) // 2
    halves = (slice(None, half), slice(half, None))
    below, above = (jax.tree.map(lambda v, part=part: v[..., part], state.counts) for part in halves)
    zeros = jax.tree.map(lambda v: v[..., None], state.zeros)
    start, end = np.arange(half, dtype=np.float32), np.arange(1, half + 1, dtype=np.float32)
    if state.fine is not None:
        below, above = (_divide_bins(state.fine, side, part) for side, part in ((0, below), (1, above)))
        start, end = _list_divided_bins(half, state.fine.low.shape[-1])
    if symmetric:  # the percentile of |x|: mirror the negative bins
        above = uint64.add(above, jax.tree.map(lambda v: v[..., ::-1], below))
        parts, starts, ends = [zeros, above], [[0], start], [[0], end]
    else:
        parts, starts, ends = [below, zeros, above], [-end[::-1], [0], start], [-start[::-1], [0], end]
    # Zeros are an interval of length 0 between the negative and the positive bins.
    counts = jax.tree.map(lambda *v: lax.concatenate(v, v[0].ndim - 1), *parts)
    first, last = (np.concatenate(v, dtype=np.float32) for v in (starts, ends))
    return counts, jnp.asarray(first), jnp.asarray(last - first)


def _divide_bins(fine: Words, side: int, bins: Words) -> Words:
    """Return the counts of one side of 0 with the bins next to 0 replaced by fine bins, in the order of the bins."""
    coarse = fine.low.shape[-1]

    def arrange(octaves: jax.Array) -> jax.Array:
        # From small to large magnitudes: the octaves are stored from large to small ones.
        rising = octaves[..., side, ::-1, :]
        return rising.reshape(*rising.shape[:-2], -1)

    near = jax.tree.map(arrange, fine)
    outer = jax.tree.map(lambda v: v[..., coarse:] if side else v[..., ::-1][..., coarse:], bins)
    inner = jax.tree.map(lambda v: v[..., :coarse] if side else v[..., ::-1][..., :coarse], bins)
    # What the fine bins do not count is below all of them.
    totals = [jax.tree.map(lambda v: v[..., -1:], uint64.sum_cumulatively(v)) for v in (inner, near)]
    parts = (uint64.subtract(*totals), near, outer)
    rising = jax.tree.map(lambda *v: lax.concatenate(v, v[0].ndim - 1), *parts)
    return rising if side else jax.tree.map(lambda v: v[..., ::-1], rising)


def _list_divided_bins(half: int, coarse: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest magnitude of each bin of `_divide_bins`, in units of a bin."""
    octaves = coarse / 2.0 ** np.arange(histogram.OCTAVES, 0, -1)
    near = (octaves[:, None] * (1 + np.arange(coarse) / coarse)).reshape(-1)
    start = np.concatenate([[0], near, np.arange(coarse, half)])
    return start.astype(np.float32), np.append(start[1:], half).astype(np.float32)


def _compute_value(counts: Words, start: jax.Array, span: jax.Array, share: Fraction) -> jax.Array:
    """Return numpy's percentile, in bins, where the elements of a bin are assumed to be spread evenly over it."""
    reached = uint64.sum_cumulatively(counts)
    total = jax.tree.map(lambda v: v[..., -1], reached)
    unit = jax.tree.map(lambda v, n: jnp.full_like(v, n), total, Words(1, 0))  # type: ignore[arg-type]
    # total - 1 wraps around for a slice without data: its last rank becomes 0.
    last = jax.tree.map(lambda v: jnp.where(uint64.is_less(total, unit), 0, v), uint64.subtract(total, unit))
    rank, rest = uint64.multiply_by_share(last, share)
    # numpy interpolates between this rank and the next one, which must not exceed the last.
    next_rank = uint64.add(rank, unit)
    next_rank = jax.tree.map(lambda n, v: jnp.where(uint64.is_less(last, next_rank), v, n), next_rank, last)
    first, second = (_select_element(counts, reached, start, span, r) for r in (rank, next_rank))
    return first + rest * (second - first)


def _select_element(counts: Words, reached: Words, start: jax.Array, span: jax.Array, rank: Words) -> jax.Array:
    """Return the position of the element of a rank, in bins; the least element has the rank 0."""
    # The element is in the first interval that ends with a cumulative count above the rank.
    ranks = jax.tree.map(lambda v, like: jnp.broadcast_to(v[..., None], like.shape), rank, reached)
    is_beyond = uint64.is_less(ranks, reached)
    index = jnp.minimum(jnp.sum(~is_beyond, axis=-1, dtype=jnp.int32), is_beyond.shape[-1] - 1)

    def pick(words: Words) -> Words:
        return jax.tree.map(lambda v: jnp.take_along_axis(v, index[..., None], axis=-1)[..., 0], words)

    bin_count = pick(counts)
    position = uint64.to_float32(uint64.subtract(rank, uint64.subtract(pick(reached), bin_count)))
    # Of n elements that are spread evenly over an interval, element i is at (i + 1/2) / n of its length.
    share = (position + np.float32(0.5)) / jnp.maximum(uint64.to_float32(bin_count), np.float32(1))
    return start[index] + span[index] * share
