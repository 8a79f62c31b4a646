"""`entropy`: a calibrator for the range that loses the least information, as in TensorRT."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from . import calibrator, histogram, uint64
from .calibrator import Calibrator, Range
from .histogram import HistogramState, Settings
from .uint64 import Words

_NAME = "calibration.entropy"
_MAX_BINS = 2**13  # the time of `finalize` grows with the square of the number of bins
_EPSILON = np.float32(1e-4)  # the count that an empty bin gets


def entropy(spec: QuantSpec, *, bins: int = 2048, every: int = 1) -> Calibrator:
    """Return a calibrator for the range with codes that lose the least information (KL divergence).

    (lo, hi) = (-t, t) with the least KL(P || Q), clipped to the least and the largest value of the data

    P holds the counts of the bins in a candidate range; the counts of the bins outside are added to its first and its
    last bin. Q is what `levels` codes keep of P: the bins in the range, without the counts from outside, are divided
    into `levels` runs of equal length (bin k of n belongs to run k * levels // n), and the counts of a run are spread
    evenly over its bins that are not empty in P. Then each empty bin of P and of Q gets 1e-4 counts, taken
    from the other bins in proportion, P and Q are divided by their sums, and KL(P || Q) = sum(P * log(P / Q)).

    For a symmetric spec the histogram counts |x|: the candidates are the first n = levels, levels + 1, ... bins,
    and `levels` is the number of magnitudes, 128 for int8. For any other spec it counts x: the candidates extend
    n = levels / 2, ... bins to each side of 0, but not beyond the data, and `levels` is the number of codes, 256 for
    uint8. Of equally good candidates the smallest is taken. Exact zeros are left out, because every range has a code
    for them.

    ONNX Runtime differs in four details: it counts zeros, it spreads counts over empty bins too, it adds the bins that
    remain after a division by `levels` to the last run, and it uses 128 levels for bins on both sides of 0.

    The result depends neither on the order of the batches nor on how states are merged. The state has 8 bytes per bin
    and slice, 16 KiB for each slice by default, and can count 2**64 elements. The time of `finalize` grows with the
    square of `bins`, for each slice.

    Args:
        spec: how to quantize: an integer dtype of at most 8 bits.
        bins: Static. The number of bins over [-R, R), where R is the least power of two above max(|x|): a power of two
            up to 8192, with at least 4 bins for each level.
        every: Static. Counts every n-th element of a slice, in the order of the batch, starting with the first. 1
            counts all of them. Counting takes most of the time. Choose a number that has no common divisor with the
            length of the batch's last dimension. The least and the largest value always include all elements.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec of an integer dtype of at most 8 bits, or an argument has a wrong type.
            `update`: the batch is not an array of a float dtype. Any function of the calibrator: the state comes from a
            different calibrator.
        ValueError: bins or every is out of range. `init`: an axis of the spec is out of range. `update`: the slices of
            the batch do not match the state. `finalize`: a slice has no data, a NaN, an infinity, or (without
            allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int4)
        >>> cal = jq.calibration.entropy(spec)
        >>> x = jnp.sinh(jnp.linspace(-8.0, 8.0, 4001))  # most values are small, the largest is 1490
        >>> lo, hi = cal.finalize(cal.update(cal.init(x), x))
        >>> bool(hi < x.max()), bool(lo == -hi)
        (True, True)
        >>> jq.quantize(jnp.array([0.0, 1.0, -1e9]) * hi, spec, range=(lo, hi)).codes
        Array([0, 7, -7], dtype=int4)

    Source: Migacz, 8-bit Inference with TensorRT, GTC 2017; ONNX Runtime's EntropyCalibrater.
    """
    calibrator.check_spec(_NAME, spec)
    calibrator.refuse_forms(_NAME, spec)
    allowed = (*(d for d in dtypes.INTEGERS if dtypes.count_bits(d) <= 8), *dtypes.NARROW)
    checks.require_type(spec.dtype in allowed, _NAME, "spec.dtype", dtypes.list_names(allowed), spec.dtype)
    symmetric, (least, most) = bool(spec.symmetric), spec.bounds
    # A symmetric spec is measured on |x|, so only the codes of one sign count.
    levels = 2 ** (spec.bits - 1) if symmetric else int(most - least) + 1
    checks.check_integer(_NAME, "bins", bins)
    expected = f"a power of two in [{4 * levels}, {_MAX_BINS}], because there are {levels} levels"
    checks.require(4 * levels <= bins <= _MAX_BINS, _NAME, "bins", expected, bins)
    finish = functools.partial(_finish, levels=levels, symmetric=symmetric)
    return histogram.build_histogram_calibrator(Settings(_NAME, spec, bins, every), finish)


class _Bins(NamedTuple):
    """The histogram of one slice.

    Attributes:
        counts: the count of each bin, float32.
        before: the exact sum of the counts before each bin, and before the end.
        filled: the number of non-empty bins before each bin, and before the end.
        first: the first non-empty bin.
        last: the last non-empty bin.
    """

    counts: jax.Array
    before: Words
    filled: jax.Array
    first: jax.Array
    last: jax.Array


@functools.partial(jax.jit, inline=True, static_argnames=("levels", "symmetric"))
def _finish(state: HistogramState, *, levels: int, symmetric: bool) -> tuple[jax.Array, jax.Array, Range]:
    half = histogram.count_bins(state) // 2
    candidates = jnp.arange(levels if symmetric else max(1, levels // 2), half + 1, dtype=jnp.int32)

    def choose_best_side(counts: Words) -> jax.Array:
        bins = _fold_bins(counts) if symmetric else _sign_bins(counts)

        def measure_side(side: jax.Array) -> jax.Array:
            # For |x| the first bin starts at 0, for x the middle one does.
            origin = 0 if symmetric else half
            start = jnp.maximum(origin - side, bins.first)
            end = jnp.minimum(origin + side, bins.last + 1)
            divergence = _compute_divergence(bins, start, end, levels)
            # A range with fewer bins than levels loses nothing and would always win. The whole range stays a candidate.
            return jnp.where((end - start >= levels) | (side == half), divergence, np.float32(np.inf))

        return candidates[jnp.argmin(lax.map(measure_side, candidates))]

    # Work slice by slice: the bins of one slice stay in the cache, the bins of all slices would not.
    sides = lax.map(choose_best_side, jax.tree.map(lambda v: v.reshape(-1, v.shape[-1]), state.counts))
    low, high = state.low, state.high
    # The width of a bin is a power of two, so the product is exact.
    reach = sides.reshape(low.shape).astype(jnp.float32) * histogram.compute_width(state)
    return low, high, Range(lax.clamp(low, -reach, high), lax.clamp(low, reach, high))


def _fold_bins(counts: Words) -> _Bins:
    """Return the bins of |x|, from the counts of the bins of x."""
    below, above = (Words(*(half.reshape(2, -1)[i] for half in counts)) for i in (0, 1))
    bins = _sum_bins(uint64.add(above, Words(*(half[::-1] for half in below))))
    return bins._replace(first=jnp.zeros_like(bins.first))


def _sign_bins(counts: Words) -> _Bins:
    """Return the bins of x, with data that extends to 0 at least, because every range includes 0."""
    half = counts.low.size // 2
    bins = _sum_bins(counts)
    return bins._replace(first=jnp.minimum(bins.first, half), last=jnp.maximum(bins.last, half - 1))


def _sum_bins(counts: Words) -> _Bins:
    filled = (counts.low | counts.high) != 0
    before = Words(*(_prepend_zero(half) for half in uint64.sum_cumulatively(counts)))
    return _Bins(
        uint64.to_float32(counts),
        before,
        _prepend_zero(jnp.cumsum(filled, dtype=jnp.int32)),
        jnp.argmax(filled).astype(jnp.int32),
        np.int32(filled.size - 1) - jnp.argmax(filled[::-1]).astype(jnp.int32),
    )


def _prepend_zero(values: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(values[:1]), values])


def _compute_divergence(bins: _Bins, start: jax.Array, end: jax.Array, levels: int) -> jax.Array:
    """Return KL(P || Q) of the bins from `start` to `end` - 1."""
    # P: the counts in the range. The counts outside are added to the first and the last bin.
    size = bins.counts.size
    n = jnp.maximum(end - start, 1)
    left, right = _sum_between(bins, jnp.zeros_like(start), start), _sum_between(bins, end, jnp.full_like(end, size))
    offset = lax.iota(jnp.int32, size) - start
    inside = (offset >= 0) & (offset < n)
    p = jnp.where(inside, bins.counts, np.float32(0))
    p = p + jnp.where(offset == 0, left, np.float32(0)) + jnp.where(offset == n - 1, right, np.float32(0))

    # Q: the counts of each run of bins, spread evenly over the bins that are not empty in P.
    edges = start + (lax.iota(jnp.int32, levels + 1) * n + (levels - 1)) // levels
    lower, upper = edges[:-1], edges[1:]
    run_counts = _sum_between(bins, lower, upper)
    filled = bins.filled[upper] - bins.filled[lower]
    for edge, beyond in ((start, left), (end - 1, right)):
        # A bin that has only counts from outside the range is not empty in P, but `bins.filled` does not include it.
        was_empty = (bins.counts[jnp.minimum(edge, size - 1)] == 0) & (beyond > 0)
        filled = filled + (was_empty & (lower <= edge) & (edge < upper)).astype(jnp.int32)
    even = run_counts / jnp.maximum(filled, 1).astype(jnp.float32)
    # This is offset * levels // n. Float arithmetic gives the same integers for so few bins, and XLA vectorizes it.
    part = (offset * levels).astype(jnp.float32) + np.float32(0.5)
    run = jnp.clip((part / n.astype(jnp.float32)).astype(jnp.int32), 0, levels - 1)
    q = jnp.where(p > 0, even[run], np.float32(0))

    p, q = _smooth(p, inside), _smooth(q, inside)
    # Because P and Q both sum to 1, KL = sum(P * (R - 1 - log(R))) with R = Q / P. No term of this sum is negative, so
    # nothing cancels.
    ratio = jnp.where(inside, q / jnp.where(inside, p, np.float32(1)), np.float32(1))
    terms = p * (ratio - 1 - jnp.log(ratio))
    return jnp.where(jnp.sum(run_counts) > 0, jnp.sum(terms), np.float32(np.inf))


def _sum_between(bins: _Bins, start: jax.Array, end: jax.Array) -> jax.Array:
    """Return the number of elements in the bins from `start` to `end` - 1, as a float32 computed from exact sums."""
    first, last = (Words(*(half[index] for half in bins.before)) for index in (start, end))
    return uint64.to_float32(uint64.subtract(last, first))


def _smooth(counts: jax.Array, inside: jax.Array) -> jax.Array:
    """Return the counts divided by their sum, after each empty bin has been given a small count."""
    empty = inside & (counts == 0)
    total = jnp.maximum(jnp.sum(counts), np.float32(1))
    empties = jnp.sum(empty, dtype=jnp.int32).astype(jnp.float32)
    added = jnp.minimum(_EPSILON * empties, total / 2)  # at most half of the counts, if there are few elements
    share = added / jnp.maximum(empties, np.float32(1))
    return jnp.where(empty, share, counts * (1 - added / total)) / total
