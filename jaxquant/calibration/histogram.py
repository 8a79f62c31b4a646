"""A histogram that grows with the data, and depends neither on the order of the batches nor on how states are merged.

The width of a bin is w = 2**exponent / (bins / 2). For j >= 0, bin j of a slice holds the numbers in [j * w, (j + 1) *
w); for j < 0, it holds those in (j * w, (j + 1) * w]. When a larger number arrives, the exponent grows, and for each
step bin j is added to bin j >> 1. No count is lost or estimated, and each count ends in the bin in which it would be if
the larger number had arrived first.

One outlier makes the bins wide: most of the other numbers may then be in the bins next to 0. A state may therefore also
count the numbers of the `COARSE` bins next to 0 in finer bins: for each of `OCTAVES` octaves below these bins,
`COARSE` bins of equal width, so that the width is at most 1 / COARSE of the numbers. When the exponent grows by 1,
the bins COARSE to 2 * COARSE - 1 before the step are exactly the fine bins of the new first octave, and the last octave
is dropped. What was said of bins above holds for fine bins, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, sharding
from .._kernels import min_max
from .._kernels.barriers import choose_on_cpu
from .._kernels.min_max import derive_slice_sizes
from . import running, uint64
from .calibrator import Calibrator, Parts, Range, build_calibrator, check_spec
from .uint64 import Words

COARSE = 32  # or a quarter of the bins, if that is less
OCTAVES = 16
_MOST_BINS = 2**15  # with more bins, the sums over bins and fine bins would have too many terms
_LEAST = -100  # the least exponent: the reciprocal of a bin's width must be a float32
_SPARE = 16  # extra slots after the bins of a table: the first half counts zeros, the last one elements to ignore
_CHUNK = 2**14  # as many indices fit in the cache
_MAX_SLOTS = 2**31  # the index of a slot is an int32
_NO_LEAST = np.int32(2**31 - 1)  # the least magnitude in an empty bin: it is above the bits of every float
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 except its sign


class HistogramState(NamedTuple):
    """Counts in equal bins over [-2**exponent, 2**exponent), with the least exponent that includes all the data.

    If a slice contains a NaN or an infinity, `low` or `high` shows it, and the counts of the slice are meaningless.

    Attributes:
        low: the least value of each slice, float32.
        high: the largest value of each slice, float32.
        seen: the number of elements of each slice, two uint32 words.
        zeros: the number of counted zeros, which are in no bin. XLA:CPU treats subnormal numbers as zeros.
        exponent: the exponent of each slice, int32.
        counts: the counts of the bins, in an additional last dimension, two uint32 words.
        least: the bits of the least magnitude in each bin, int32; None if the calibrator does not need them.
        most: the bits of the largest magnitude in each bin, int32, or None.
        fine: the counts of the fine bins, two uint32 words, or None: in additional last dimensions the negative and the
            positive numbers, the octaves, from large to small numbers, and the bins of an octave, in ascending order of
            the magnitudes.
    """

    low: jax.Array
    high: jax.Array
    seen: Words
    zeros: Words
    exponent: jax.Array
    counts: Words
    least: jax.Array | None
    most: jax.Array | None
    fine: Words | None


for _state in (HistogramState, Words):
    export.register_namedtuple_serialization(_state, serialized_name=f"jaxquant.{_state.__name__}")


class Settings(NamedTuple):
    """The arguments that all calibrators with a histogram share.

    Attributes:
        function: the name of the factory.
        spec: how to quantize.
        bins: the number of bins, a power of two.
        every: counts every n-th element of a slice.
        has_ends: whether each bin stores its least and its largest magnitude.
        has_fine: whether the bins next to 0 are divided into fine bins.
    """

    function: str
    spec: QuantSpec
    bins: int
    every: int
    has_ends: bool = False
    has_fine: bool = False

    @property
    def coarse(self) -> int:
        """The number of bins on each side of 0 that are divided; 0 without fine bins."""
        return min(COARSE, self.bins // 4) if self.has_fine and self.bins <= _MOST_BINS else 0

    @property
    def fine(self) -> int:
        """The number of fine bins."""
        return 2 * OCTAVES * self.coarse


def build_histogram_calibrator(
    settings: Settings, finish: Callable[[HistogramState], tuple[jax.Array, jax.Array, Range]]
) -> Calibrator:
    """Return the calibrator with the range `finish(state)`, after the checks that all histograms share."""
    function = settings.function
    check_spec(function, settings.spec)
    for argument in ("bins", "every"):
        checks.check_integer(function, argument, getattr(settings, argument))
    bins, every = int(settings.bins), int(settings.every)
    is_power = 16 <= bins <= uint64.TERMS and bins & (bins - 1) == 0
    checks.require(is_power, function, "bins", f"a power of two in [16, {uint64.TERMS}]", bins)
    checks.require(every > 0, function, "every", "a positive int", every)
    settings = settings._replace(bins=bins, every=every)
    make_empty = functools.partial(_make_empty, settings)
    update = functools.partial(_update, settings=settings)
    return build_calibrator(Parts(function, settings.spec, make_empty, update, _merge_states, _reduce_states, finish))


def count_bins(state: HistogramState) -> int:
    """Return the number of bins."""
    return state.counts.low.shape[-1]


def compute_width(state: HistogramState) -> jax.Array:
    """Return the width of a bin, float32, a power of two."""
    return _compute_power(state.exponent - (count_bins(state) // 2).bit_length() + 1)


def divide_by_width(state: HistogramState) -> jax.Array:
    """Return the exact reciprocal of a bin's width."""
    return _compute_power((count_bins(state) // 2).bit_length() - 1 - state.exponent)


def _compute_power(exponent: jax.Array) -> jax.Array:
    # The bits of a power of two are its biased exponent: this is exact, unlike exp2.
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _make_empty(settings: Settings, shape: tuple[int, ...]) -> HistogramState:
    slots = math.prod(shape) * (settings.bins + _SPARE + settings.fine)
    expected = f"fewer than {_MAX_SLOTS} bins in total"
    checks.require(slots < _MAX_SLOTS, settings.function, "spec", expected, f"{math.prod(shape)} slices")
    full = (*shape, settings.bins)
    ends = (jnp.full(full, _NO_LEAST), jnp.zeros(full, jnp.int32)) if settings.has_ends else (None, None)
    zeros = uint64.make_zeros(shape)
    fine = uint64.make_zeros((*shape, 2, OCTAVES, settings.coarse)) if settings.fine else None
    return HistogramState(
        *running.make_empty(shape),
        zeros,
        zeros,
        jnp.full(shape, np.int32(_LEAST)),
        uint64.make_zeros(full),
        *ends,
        fine,
    )


# Growing the range.


def _grow_to(state: HistogramState, exponent: jax.Array) -> HistogramState:
    """Return the state with a larger or equal exponent."""
    # A slice with empty bins needs no steps.
    empty = (state.low > state.high) | ((state.low == 0) & (state.high == 0))
    steps = jnp.where(empty, 0, exponent - state.exponent)
    # After this many steps all counts are in the two bins next to 0, and more steps would change nothing.
    steps = jnp.minimum(steps, count_bins(state).bit_length() + (0 if state.fine is None else OCTAVES))
    whole = (state.counts, state.least, state.most, state.fine)
    parts = jax.tree.map(lambda part: sharding.vary_like(part, steps), whole)

    def halve(carry: Any) -> Any:
        left, parts = carry

        # The slices need different numbers of steps: slices that are done keep their bins.
        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(lax.expand_dims(left > 0, range(left.ndim, new.ndim)), new, old)

        counts, least, most, fine = parts
        grown = (*_halve_bins(counts, least, most), None if fine is None else _shift_octaves(counts, fine))
        return left - 1, jax.tree.map(choose, grown, parts)

    _, (counts, least, most, fine) = lax.while_loop(lambda carry: jnp.any(carry[0] > 0), halve, (steps, parts))
    return state._replace(exponent=exponent, counts=counts, least=least, most=most, fine=fine)


def _shift_octaves(counts: Words, fine: Words) -> Words:
    """Return the fine bins for an exponent that is larger by 1; `counts` are those before the step."""
    coarse, half = fine.low.shape[-1], counts.low.shape[-1] // 2

    def shift(bins: jax.Array, octaves: jax.Array) -> jax.Array:
        # Bin -1 - j on the negative side has the magnitudes of bin j.
        sides = (bins[..., half - 2 * coarse : half - coarse][..., ::-1], bins[..., half + coarse : half + 2 * coarse])
        first = jnp.stack(sides, axis=-2)[..., None, :]
        return jnp.concatenate([first, octaves[..., :-1, :]], axis=-2)

    return jax.tree.map(shift, counts, fine)


def _halve_bins(counts: Words, least: jax.Array | None, most: jax.Array | None) -> Any:
    """Return the bins with adjacent ones combined, in the middle of as many bins as before."""
    even, odd = (Words(*halves) for halves in zip(*map(_split_pairs, counts), strict=True))
    return (
        Words(*(_pad_bins(word, 0) for word in uint64.add(even, odd))),
        None if least is None else _pad_bins(lax.min(*_split_pairs(least)), _NO_LEAST),
        None if most is None else _pad_bins(lax.max(*_split_pairs(most)), 0),
    )


def _split_pairs(bins: jax.Array) -> tuple[jax.Array, jax.Array]:
    pairs = bins.reshape(*bins.shape[:-1], -1, 2)
    return pairs[..., 0], pairs[..., 1]


def _pad_bins(half: jax.Array, fill: ArrayLike) -> jax.Array:
    side = half.shape[-1] // 2
    return lax.pad(half, jnp.asarray(fill, half.dtype), [(0, 0, 0)] * (half.ndim - 1) + [(side, side, 0)])


# Counting a batch.


@functools.partial(jax.jit, inline=True, static_argnames=("settings",))
def _update(state: HistogramState, batch: jax.Array, *, settings: Settings) -> HistogramState:
    if batch.size == 0:
        return state
    # The counts of one batch are int32.
    expected = "fewer than 2**31 elements"
    checks.require(batch.size < 2**31, f"{settings.function}.update", "batch", expected, f"shape {batch.shape}")
    shape, block = state.low.shape, scale_from_range.derive_block_size(settings.spec)
    new = running.compute_batch_extremes(batch, shape, block)
    state = _grow_to(state, jnp.maximum(state.exponent, _compute_exponent(*new)))
    tables = _count_in_bins(batch, divide_by_width(state), settings)
    counts, spare = tables[0][..., : settings.bins], tables[0][..., settings.bins :]
    zeros = jnp.sum(spare[..., : _SPARE // 2], axis=-1, dtype=jnp.int32)
    fine = None
    if state.fine is not None:
        octaves = spare[..., _SPARE:].reshape(state.fine.low.shape)
        counts = counts + _sum_octaves(octaves, settings.bins)
        fine = uint64.add(state.fine, uint64.convert_uint32(octaves))
    ends = [table[..., : settings.bins] for table in tables[1:]] or [None, None]
    # The numbers of elements are known statically; a short block has fewer.
    members = min_max.count_members(batch, shape, block).astype(np.int32)
    return HistogramState(
        *running.merge_extremes(state, new),
        uint64.add(state.seen, uint64.convert_uint32(jnp.asarray(members))),
        uint64.add(state.zeros, uint64.convert_uint32(zeros)),
        state.exponent,
        uint64.add(state.counts, uint64.convert_uint32(counts)),
        _combine_ends(lax.min, state.least, ends[0]),
        _combine_ends(lax.max, state.most, ends[1]),
        fine,
    )


def _sum_octaves(octaves: jax.Array, bins: int) -> jax.Array:
    """Return the counts of fine bins, int32, as counts of bins."""
    coarse, half = octaves.shape[-1], bins // 2
    # Octave i has the magnitudes of bins coarse / 2**(i + 1) to coarse / 2**i - 1; bin 0 has those after the last bin.
    parts, rest = [], octaves
    for index in range(coarse.bit_length() - 1):
        octave = octaves[..., index, :]
        runs = octave.reshape(*octave.shape[:-1], -1, 2 ** (index + 1))
        parts.append(jnp.sum(runs, axis=-1, dtype=jnp.int32))
        rest = octaves[..., index + 1 :, :]
    parts.append(jnp.sum(rest, axis=(-1, -2), dtype=jnp.int32)[..., None])
    sides = jnp.concatenate(parts[::-1], axis=-1)
    near = jnp.concatenate([sides[..., 0, ::-1], sides[..., 1, :]], axis=-1)
    return jnp.pad(near, [(0, 0)] * (near.ndim - 1) + [(half - coarse, half - coarse)])


def _combine_ends(
    combine: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array | None, b: jax.Array | None
) -> jax.Array | None:
    return None if a is None or b is None else combine(a, b)


def _compute_exponent(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the least e with |x| < 2**e; a NaN or an infinity gives the least possible exponent, and grows nothing."""
    bits = lax.bitcast_convert_type(lax.max(lax.abs(low), lax.abs(high)), jnp.int32) & _MAGNITUDE
    return jnp.maximum(jnp.where(bits < 0x7F800000, (bits >> 23) - 126, _LEAST), _LEAST)


def _count_in_bins(batch: jax.Array, per_width: jax.Array, settings: Settings) -> list[jax.Array]:
    """Return the tables of counts and, if needed, of the least and the largest magnitudes.

    A table has the shape of the ranges and a last dimension of the bins, then the extra slots.
    """
    shape, block = per_width.shape, scale_from_range.derive_block_size(settings.spec)
    is_padded = _is_padded(batch, shape, block)
    x = _sample(_arrange_slices(sharding.place_whole(batch), shape, block, np.nan), settings.every)
    entries = x.shape[1]
    per_width = per_width.reshape(entries)
    slots = settings.bins + _SPARE + settings.fine

    def fill(x: jax.Array, per_width: jax.Array, chunk: tuple[int, ...]) -> tuple[jax.Array, ...]:
        empty = [0, _NO_LEAST, 0] if settings.has_ends else [0]
        tables = tuple(jnp.full(entries * slots, np.int32(v)) for v in empty)
        tables = tuple(sharding.vary_like(table, per_width) for table in tables)
        counts = [-(-n // size) for n, size in zip(x.shape, chunk, strict=True)]
        slot = lax.broadcasted_iota(jnp.int32, chunk, 1) * slots
        # Adjacent zeros are counted in different slots, because adding to a slot that was just written has to wait.
        zero = slot + settings.bins + (lax.broadcasted_iota(jnp.int32, chunk, 2) & (_SPARE // 2 - 1))
        if math.prod(counts) > 1:  # keep both in memory, because computing them again would double the time of a step
            slot, zero = lax.optimization_barrier((slot, zero))

        def step(i: jax.Array, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i = lax.convert_element_type(i, jnp.int32)  # under JAX_ENABLE_X64 the loop index is an int64
            chunk_index = (i // counts[2] % counts[0], i // (counts[2] * counts[0]), i % counts[2])
            index, magnitude = _compute_indices(x, per_width, settings, is_padded, slot, zero, chunk_index)
            return _scatter_counts(tables, index, magnitude)

        return lax.fori_loop(0, math.prod(counts), step, tables)

    # On a CPU the elements are scattered in chunks: their indices fit in the cache. One scatter of all would be slow.
    # Other backends scatter all elements at once.
    in_chunks, at_once = (functools.partial(fill, chunk=chunk) for chunk in (_count_chunk(x.shape), x.shape))
    tables = choose_on_cpu(in_chunks, at_once, x, per_width)
    return [table.reshape(*shape, slots) for table in tables]


def _sample(x: jax.Array, every: int) -> jax.Array:
    """Return every n-th element of each slice, starting with the first."""
    before, slices, after = x.shape
    if after == 1 and before > 1:
        x = x[::every]
        # Slices that are columns become rows, because XLA:CPU loops slowly over short rows.
        return x.transpose(1, 0, 2).reshape(1, slices, x.shape[0])
    if every > 1 and before > 1:
        x = x.transpose(1, 0, 2).reshape(1, slices, before * after)
    return x[:, :, ::every]


def _count_chunk(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of indices of each dimension that form a chunk."""
    before, slices, after = shape
    last = _choose_chunk_size(after, _CHUNK)
    middle = _choose_chunk_size(slices, max(1, _CHUNK // last))
    return _choose_chunk_size(before, max(1, _CHUNK // (last * middle))), middle, last


def _choose_chunk_size(length: int, most: int) -> int:
    """Return the largest divisor of a length that is at most `most`, or `most` itself if it is much smaller."""
    if length <= most:
        return max(1, length)
    return next((n for n in range(most, most // 4, -1) if length % n == 0), max(1, most))


def _compute_indices(
    x: jax.Array,
    per_width: jax.Array,
    settings: Settings,
    is_padded: bool,
    slot: jax.Array,
    zero: jax.Array,
    chunk_index: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Return the slots of the elements of a chunk, and the bits of their magnitudes."""
    bins = settings.bins
    chunk, half, ignored = slot.shape, bins // 2, bins + _SPARE - 1
    # The last chunk along a dimension may not be whole: it then starts earlier and overlaps the one before it.
    regular = tuple(p * size for p, size in zip(chunk_index, chunk, strict=True))
    start = tuple(lax.min(w, np.int32(n - size)) for w, n, size in zip(regular, x.shape, chunk, strict=True))
    value = lax.dynamic_slice(x, start, chunk).astype(jnp.float32)
    scale = lax.dynamic_slice(per_width, (start[1],), (chunk[1],))
    bits = lax.bitcast_convert_type(value, jnp.int32)
    scaled = lax.abs(value) * lax.broadcast_in_dim(scale, chunk, (1,))
    size = jnp.clip(scaled.astype(jnp.int32), 0, half - 1)  # the scatter requires valid indices, even for a NaN
    # bits >> 31 is -1 for a negative number, and size ^ -1 is -1 - size: the bin on the other side of 0.
    index = (size ^ (bits >> 31)) + half + slot
    if settings.coarse:
        fine = _compute_fine_indices(scaled, settings.coarse)
        first = slot + (bins + _SPARE) + (bits < 0).astype(jnp.int32) * np.int32(-settings.fine // 2)
        first = first + np.int32(settings.fine // 2)
        index = jnp.where((size < settings.coarse) & (fine >= 0), first + fine, index)
    index = jnp.where(value == 0, zero, index)
    if is_padded:  # the padding is NaN
        index = jnp.where(jnp.isnan(value), slot + ignored, index)
    for axis, (n, step) in enumerate(zip(x.shape, chunk, strict=True)):
        if n % step:  # elements in the overlap have already been counted
            position = lax.broadcasted_iota(jnp.int32, chunk, axis) + start[axis]
            index = jnp.where(position < regular[axis], slot + ignored, index)
    slots = bins + _SPARE + settings.fine
    return (index + start[1] * slots).reshape(-1), (bits & _MAGNITUDE).reshape(-1)


def _compute_fine_indices(scaled: jax.Array, coarse: int) -> jax.Array:
    """Return the fine bins of magnitudes below `coarse`, in units of a bin; a negative number for smaller ones.

    The bins of an octave are its floats without their last bits.
    """
    digits = coarse.bit_length() - 1
    key = lax.bitcast_convert_type(scaled, jnp.int32) >> (23 - digits)
    octave = np.int32(127 + digits - 1) - (key >> digits)
    index = octave * coarse + (key & np.int32(coarse - 1))
    return jnp.where((octave >= 0) & (octave < OCTAVES), index, -1)


def _scatter_counts(tables: tuple[jax.Array, ...], index: jax.Array, magnitude: jax.Array) -> tuple[jax.Array, ...]:
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    inside = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    updates = (jnp.ones_like(magnitude), magnitude, magnitude)
    operations = (lax.scatter_add, lax.scatter_min, lax.scatter_max)
    # Without ends there is only the table of counts, and zip drops the other two updates.
    return tuple(
        scatter(table, index[:, None], update, numbers, mode=inside)
        for table, update, scatter in zip(tables, updates, operations, strict=False)
    )


# Merging states.


@functools.partial(jax.jit, inline=True)
def _merge_states(a: HistogramState, b: HistogramState) -> HistogramState:
    exponent = jnp.maximum(a.exponent, b.exponent)
    low_high = running.merge_extremes(a, b)
    a, b = _grow_to(a, exponent), _grow_to(b, exponent)
    return HistogramState(
        *low_high,
        uint64.add(a.seen, b.seen),
        uint64.add(a.zeros, b.zeros),
        exponent,
        uint64.add(a.counts, b.counts),
        _combine_ends(lax.min, a.least, b.least),
        _combine_ends(lax.max, a.most, b.most),
        None if a.fine is None or b.fine is None else uint64.add(a.fine, b.fine),
    )


def _reduce_states(state: HistogramState, axis_name: Hashable) -> HistogramState:
    exponent = lax.pmax(state.exponent, axis_name)
    low, high = running.reduce_extremes(state, axis_name)
    state = _grow_to(state, exponent)
    return HistogramState(
        low,
        high,
        uint64.sum_over_devices(state.seen, axis_name),
        uint64.sum_over_devices(state.zeros, axis_name),
        exponent,
        uint64.sum_over_devices(state.counts, axis_name),
        None if state.least is None else lax.pmin(state.least, axis_name),
        None if state.most is None else lax.pmax(state.most, axis_name),
        None if state.fine is None else uint64.sum_over_devices(state.fine, axis_name),
    )


# Arrangement of a batch for a histogram: [outer, slices, inner].


def _is_padded(x: jax.Array, shape: tuple[int, ...], block: int | None) -> bool:
    """Return whether `_arrange_slices` has to pad a short block."""
    return any(s * e != n for s, e, n in zip(derive_slice_sizes(x, shape, block), shape, x.shape, strict=True))


def _arrange_slices(x: jax.Array, shape: tuple[int, ...], block: int | None, fill: ArrayLike) -> jax.Array:
    """Return x in three dimensions, (before, slices, after): slice i is x[:, i, :], in the order of x.

    x is transposed only if its kept dimensions are not adjacent. Short blocks are padded with `fill`.
    """
    # Each dimension is split into a kept one, with an index for each range, and a reduced one within the range.
    lengths: list[int] = []
    kept_flags: list[bool] = []
    padding = []
    for size, entries, n in zip(derive_slice_sizes(x, shape, block), shape, x.shape, strict=True):
        padding.append((0, size * entries - n, 0))
        lengths += [entries, size]
        kept_flags += [True, False]
    if any(high for _, high, _ in padding):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    # Dimensions of length 1 would only separate kept dimensions that are in fact adjacent.
    dimensions = [(n, is_kept) for n, is_kept in zip(lengths, kept_flags, strict=True) if n != 1]
    x = x.reshape([n for n, _ in dimensions])
    flags = [is_kept for _, is_kept in dimensions]
    first = flags.index(True) if any(flags) else 0
    last = len(flags) - flags[::-1].index(True) if any(flags) else 0
    if not all(flags[first:last]):
        order = sorted(range(len(flags)), key=lambda a: not flags[a])
        x, first, last = x.transpose(order), 0, sum(flags)
    before, slices, after = (math.prod(x.shape[i:j]) for i, j in ((0, first), (first, last), (last, x.ndim)))
    return x.reshape(before, slices, after)
