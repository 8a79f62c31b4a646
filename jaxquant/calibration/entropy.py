"""The range that loses the least information, as TensorRT has it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, uint64
from .._core.uint64 import Words
from . import calibrator, histogram
from .calibrator import Calibrator, Range
from .histogram import HistogramState, Settings

_NAME = "entropy"
_MOST = 2**13
_EPSILON = np.float32(1e-4)  # of one count: what an empty bin is given


def entropy(spec: QuantSpec, *, bins: int = 2048, every: int = 1) -> Calibrator:
    """(lo, hi) = (-t, t) with the least KL(P || Q), clipped to the least and the largest value seen.

    P are the counts of the bins within a candidate range, those beyond it added to its first and its last bin. Q is
    what is left of them by `levels` codes: the bins within the range, without those beyond, are cut into `levels` runs
    of equal length, bin k of n falling to run k * levels // n, and each run's counts are spread evenly over those of
    its bins that are not empty in P. Empty bins of P and Q then get 1e-4 counts each, taken from the others in
    proportion, both are divided by their sums, and KL(P || Q) = sum(P * log(P / Q)).

    A symmetric spec looks at |x|: the candidates are the first n = levels, levels + 1, ... bins, and `levels` is the
    number of magnitudes, 128 for int8. Another spec looks at x: the candidates reach n = levels / 2, ... bins to
    either side of 0, but no farther than there are data, and `levels` is the number of codes, 256 for uint8. Of equal
    candidates the smallest is taken. Exact zeros are left out: a code stands for them in every range.

    ONNX Runtime differs in what follows: it counts zeros, spreads over empty bins too, gives the bins that `levels`
    does not divide to the last run, and has 128 levels over bins to both sides of 0.

    The histogram does not depend on the order of the batches, nor on how states were merged. Its state holds 8 bytes
    per bin and slice, 16 KiB for each slice by default, and counts 2**64 elements. `finalize` takes time in proportion
    to the square of `bins`, for every slice.

    Args:
        spec: how to quantize: integers of 8 bits or fewer.
        bins: Static. Bins over [-R, R), R the least power of two above max(|x|): a power of two up to 8192, at least
            4 for each level.
        every: Static. Every how many elements of a slice, in the order of the batch, one is counted, from the first
            on. Counting is what takes time: 1 counts all. Choose a number that has no divisor with the last dimension
            of the batch in common. The extremes are those of all elements whatever it is.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec or has another dtype, an argument has a wrong type, or a batch has another dtype
            or is no array.
        ValueError: bins or every is out of range, a batch has slices that do not fit the state's, an axis of the spec
            is out of range, a state is not this calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or,
            without allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> spec = jq.QuantSpec(jnp.int4)
        >>> cal = jq.entropy(spec)
        >>> x = jnp.sinh(jnp.linspace(-8.0, 8.0, 4001))  # most are small, the largest 1490
        >>> lo, hi = cal.finalize(cal.update(cal.init(x), x))
        >>> bool(hi < x.max()), bool(lo == -hi)
        (True, True)
        >>> jq.quantize(jnp.array([0.0, 1.0, -1e9]) * hi, spec, range=(lo, hi)).codes
        Array([0, 7, -7], dtype=int4)

    Source: Migacz, 8-bit Inference with TensorRT, GTC 2017; ONNX Runtime's EntropyCalibrater.
    """
    calibrator.check_spec(_NAME, spec)
    narrow = [d for d in dtypes.INTEGERS if dtypes.count_bits(d) <= 8]
    checks.require_type(spec.dtype in narrow, _NAME, "spec.dtype", dtypes.list_names(tuple(narrow)), spec.dtype)
    symmetric, (least, most) = bool(spec.symmetric), spec.bounds
    levels = 2 ** (dtypes.count_bits(spec.dtype) - 1) if symmetric else int(most - least) + 1
    checks.check_integer(_NAME, "bins", bins)
    enough = 4 * levels <= bins <= _MOST
    checks.require(enough, _NAME, "bins", f"a power of two in [{4 * levels}, {_MOST}], for {levels} levels", bins)
    finish = functools.partial(_finish, levels=levels, symmetric=symmetric)
    return histogram.build_histogram_calibrator(Settings(_NAME, spec, bins, every), finish)


class _Bins(NamedTuple):
    """The counts of one slice along a line, before each bin and in all, and the first and the last bin of a range."""

    counts: jax.Array
    before: Words
    filled: jax.Array
    first: jax.Array
    last: jax.Array


@functools.partial(jax.jit, inline=True, static_argnames=("levels", "symmetric"))
def _finish(state: HistogramState, *, levels: int, symmetric: bool) -> tuple[jax.Array, jax.Array, Range]:
    half = histogram.find_bins(state) // 2
    sides = jnp.arange(levels if symmetric else max(1, levels // 2), half + 1, dtype=jnp.int32)

    def best(counts: Words) -> jax.Array:
        bins = _fold_bins(counts) if symmetric else _sign_bins(counts)

        def divergence(side: jax.Array) -> jax.Array:
            centre = 0 if symmetric else half
            start = jnp.maximum(centre - side, bins.first)
            end = jnp.minimum(centre + side, bins.last + 1)
            found = _find_divergence(bins, start, end, levels)
            return jnp.where((end - start >= levels) | (side == half), found, np.float32(np.inf))

        return sides[jnp.argmin(lax.map(divergence, sides))]

    # Slice by slice: the bins of one stay in the cache, those of all do not.
    found = lax.map(best, jax.tree.map(lambda v: v.reshape(-1, v.shape[-1]), state.counts))
    low, high = state.low, state.high
    reach = found.reshape(low.shape).astype(jnp.float32) * histogram.find_width(state)
    return low, high, Range(lax.clamp(low, -reach, high), lax.clamp(low, reach, high))


def _fold_bins(counts: Words) -> _Bins:
    below, above = (Words(*(half.reshape(2, -1)[i] for half in counts)) for i in (0, 1))
    bins = _sum_bins(uint64.add(above, Words(*(half[::-1] for half in below))))
    return bins._replace(first=jnp.zeros_like(bins.first))


def _sign_bins(counts: Words) -> _Bins:
    half = counts.low.size // 2
    bins = _sum_bins(counts)
    return bins._replace(first=jnp.minimum(bins.first, half), last=jnp.maximum(bins.last, half - 1))  # it holds 0


def _sum_bins(counts: Words) -> _Bins:
    filled = (counts.low | counts.high) != 0
    before = Words(*(_drop_zero(half) for half in uint64.sum_cumulatively(counts)))
    return _Bins(
        uint64.to_float32(counts),
        before,
        _drop_zero(jnp.cumsum(filled, dtype=jnp.int32)),
        jnp.argmax(filled).astype(jnp.int32),
        np.int32(filled.size - 1) - jnp.argmax(filled[::-1]).astype(jnp.int32),
    )


def _drop_zero(values: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(values[:1]), values])


def _find_divergence(bins: _Bins, start: jax.Array, end: jax.Array, levels: int) -> jax.Array:
    """Returns KL(P || Q) of the bins from `start` to before `end`."""
    size = bins.counts.size
    n = jnp.maximum(end - start, 1)
    left, right = _sum_between(bins, jnp.zeros_like(start), start), _sum_between(bins, end, jnp.full_like(end, size))
    offset = lax.iota(jnp.int32, size) - start
    inside = (offset >= 0) & (offset < n)
    p = jnp.where(inside, bins.counts, np.float32(0))
    p = p + jnp.where(offset == 0, left, np.float32(0)) + jnp.where(offset == n - 1, right, np.float32(0))

    edges = start + (lax.iota(jnp.int32, levels + 1) * n + (levels - 1)) // levels
    lower, upper = edges[:-1], edges[1:]
    held = _sum_between(bins, lower, upper)
    filled = bins.filled[upper] - bins.filled[lower]
    for edge, beyond in ((start, left), (end - 1, right)):  # a bin that is empty but for what lies beyond
        was_empty = (bins.counts[jnp.minimum(edge, size - 1)] == 0) & (beyond > 0)
        filled = filled + (was_empty & (lower <= edge) & (edge < upper)).astype(jnp.int32)
    even = held / jnp.maximum(filled, 1).astype(jnp.float32)
    # offset * levels // n: the floats are right for so few bins, and XLA has vectors for them.
    part = (offset * levels).astype(jnp.float32) + np.float32(0.5)
    run = jnp.clip((part / n.astype(jnp.float32)).astype(jnp.int32), 0, levels - 1)
    q = jnp.where(p > 0, even[run], np.float32(0))

    p, q = _smooth(p, inside), _smooth(q, inside)
    # sum(P * (R - 1 - log(R))), R = Q / P, for both sum to 1: no term is negative, so none cancels.
    ratio = jnp.where(inside, q / jnp.where(inside, p, np.float32(1)), np.float32(1))
    terms = p * (ratio - 1 - jnp.log(ratio))
    return jnp.where(jnp.sum(held) > 0, jnp.sum(terms), np.float32(np.inf))


def _sum_between(bins: _Bins, start: jax.Array, end: jax.Array) -> jax.Array:
    """Returns how many there are from the bin `start` to before `end`: exact until the last, a float32."""
    first, last = (Words(*(half[index] for half in bins.before)) for index in (start, end))
    return uint64.to_float32(uint64.subtract(last, first))


def _smooth(counts: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns the counts with something in each bin, divided by their sum."""
    empty = inside & (counts == 0)
    total = jnp.maximum(jnp.sum(counts), np.float32(1))
    empties = jnp.sum(empty, dtype=jnp.int32).astype(jnp.float32)
    given = jnp.minimum(_EPSILON * empties, total / 2)
    each = given / jnp.maximum(empties, np.float32(1))
    return jnp.where(empty, each, counts * (1 - given / total)) / total
