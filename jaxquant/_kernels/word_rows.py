"""The contraction of one float row with a matrix of codes in uint32 words: see `words` and `float_rows`.

The words are read as they are, and no code is written to memory. If the words hold the contracted dimension, a vector
holds the codes at one place of neighboring groups, whose scales are neighbors in memory; see `words`. If they hold the
other dimension, a vector holds the codes of one word, which are neighboring columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from . import barriers, packed_codes, words
from .contraction import Role
from .float_rows import ScaledCodes, add_terms, count_cached_rows, scale_row, sum_rows, widen
from .weight_chunks import Chunk, delay_floats

# The numbers of rows that one loop adds up, if they stay in the first-level cache, for words of low bits only and for
# others, whose loop has more operations for each row.
_TERMS, _TERMS_OF_TWO = (16,), (32, 16)
# The number of codes whose sums one loop writes to memory, which stay in the second-level caches, and the most loops:
# the program contains the operations of every loop. Codes of low bits only have fewer sums, of which a loop may write
# this many, and more loops: the sums of a large table would be written to new pages of memory in each call.
_CHUNK, _MOST_CHUNKS = 2**22, 16
_CHUNK_SUMS, _MOST_CHUNKS_OF_SUMS = 2**20, 24
# The number of words in a vector of a CPU with AVX2, and the most vectors that a loop reads for all groups of a tile.
_VECTOR, _MOST_SPANS = 8, 4
# The number of lanes that read the same shifted words. XLA fuses an operation that it must repeat up to 15 times.
_SHARED_LANES = 8


def choose_form(q: ScaledCodes, role: Role) -> Callable[..., jax.Array] | None:
    """Return the function of a row, q and role that contracts them, or None: one of the functions below.

    Every group and every block must be full, and the codes must be a matrix with one contracted dimension.
    """
    packed = q.words
    assert packed is not None
    is_matrix = len(q.shape) == 2 and not role.batch and len(role.contracted) == 1 and 0 not in q.shape
    if not is_matrix or not words.has_full_groups(packed.length) or not q.has_usual_levels():
        return None
    if any(length % math.lcm(*q.list_runs(axis)) for axis, length in enumerate(q.shape)):
        return None
    runs = q.list_runs(role.contracted[0])
    if role.contracted == (0,):
        most = count_cached_rows(4 * q.codes.shape[1])
        numbers = _TERMS if words.count_planes(packed.bits) == 1 else _TERMS_OF_TWO
        fits = (n for n in numbers if n <= most or n == numbers[-1])
        terms = next((n for n in fits if all(run % n == 0 for run in (q.shape[0], *runs))), None)
        return None if terms is None else functools.partial(contract_word_rows, terms=terms)
    lanes = words.find_shape(packed.length, packed.bits).lanes
    # A group has one entry, or one for some of its words.
    is_aligned = all(run % words.GROUP == 0 or (words.GROUP % run == 0 and run % lanes == 0) for run in runs)
    return contract_word_groups if is_aligned else None


def contract_word_rows(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return what `float_rows.contract_row` returns, for words along the dimension that is not contracted.

    Args:
        x: float32 [K].
        q: words [K, W].
        role: the role of each dimension of the codes.
        terms: the number of rows that one loop adds up, which share their entries.
    """
    packed = q.words
    assert packed is not None
    scaled, unit = scale_row(x, q)
    # The barriers keep XLA from converting an entry for each code.
    scale, offset = (_widen_in_memory(part, scaled) for part in (q.scale, q.offset))
    assert scale is not None
    depth, columns = q.shape
    groups, size = depth // terms, words.find_shape(columns, packed.bits)
    factors = scaled.reshape(groups, terms)
    # The barrier keeps XLA from reading words that are constants while it compiles.
    stored = lax.optimization_barrier(q.codes).reshape(groups, terms, -1)
    shape = (groups, size.tiles, size.groups, size.words, size.parts, size.lanes)
    part, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (4, 5))

    def take(part: jax.Array) -> jax.Array:
        """Return the entries of a scale, zero point or offset for each code of a row."""
        part = q.expand(part, role.free)
        entries = part.shape[0]
        part = part.reshape(entries, 1, *((1,) * 5 if part.shape[1] == 1 else shape[1:]))
        last = part.shape[2:]
        return jnp.broadcast_to(part, (entries, groups // entries, *last)).reshape(groups, *last)

    # The barrier keeps XLA from writing a zero point for each code to memory.
    zero_point = None if q.zero_point is None else take(lax.optimization_barrier(_prepare_zero_point(q, q.zero_point)))
    products = []
    for term in range(terms):
        planes = words.spread_lanes(words.split_words(stored[:, term], packed.bits, columns))
        weights = _read_weights(q, planes, lane, lane, part, zero_point)
        products.append(factors[:, term, None, None, None, None, None] * weights)
    total = add_terms(products, q.decode) * take(scale)
    if offset is not None:
        total = total + jnp.sum(factors, axis=1)[:, None, None, None, None, None] * take(offset)
    # Before the barrier, a reshape would make XLA find the place of each code by divisions.
    y = jnp.sum(lax.optimization_barrier(jnp.broadcast_to(total, shape)), axis=0)
    return y.reshape(columns) * unit


def contract_word_groups(x: jax.Array, q: ScaledCodes, role: Role) -> jax.Array:
    """Return what `float_rows.contract_row` returns, for words along the contracted dimension.

    Args:
        x: float32 [K].
        q: words [N, W].
        role: the role of each dimension of the codes.
    """
    packed = q.words
    assert packed is not None
    scaled, unit = scale_row(x, q)
    spans = _cut_groups(q)
    factors = words.arrange_row(scaled, packed.bits, spans)
    rows = q.shape[0]
    step = -(-rows // _count_chunks(q))
    # The barrier keeps XLA from reading words that are constants while it compiles. Where a loop over layers slices the
    # parts of one, it also keeps XLA from slicing the entries in the loop over all words, which may not be vectorized.
    q = q._replace(codes=_pin(q.codes))
    for name in ("scale", "zero_point", "offset"):
        part = getattr(q, name)
        if part is not None:
            part = q.expand(part, role.free)
            # Parts that `_contract_groups` copies need no barrier.
            is_copied = name == "zero_point" or _count_entries(q, part) > 1
            q = q._replace(**{name: part if is_copied else _pin(part)})
    chunks = [Chunk(start, min(step, rows - start)) for start in range(0, rows, step)]
    sums: list[jax.Array] = []
    for chunk in chunks:
        # Without the order, the products of all chunks would be in memory at once.
        sums.append(_contract_groups(factors, q, role, chunk, spans, sums[-1] if sums else None))
    return (sums[0] if len(sums) == 1 else jnp.concatenate(sums)) * unit


def _count_entries(q: ScaledCodes, part: jax.Array) -> int:
    """Return how many entries a group has, or 1 if several groups share one."""
    assert q.words is not None
    return max(part.shape[-1] * words.GROUP // q.words.length, 1)


def _is_summed(q: ScaledCodes) -> bool:
    """Return whether one loop adds the products of all codes of a group, and not only those of each word."""
    assert q.words is not None
    if words.count_planes(q.words.bits) > 1 or q.decode is not None:
        return False
    # With several spans it takes four times as many operations, and XLA the longer to compile them: only for tables.
    return len(_cut_groups(q)) == 1 or math.prod(q.shape) > _CHUNK


def _count_chunks(q: ScaledCodes) -> int:
    """Return the number of chunks of rows."""
    codes, most, chunk = math.prod(q.shape), _MOST_CHUNKS, _CHUNK
    if _is_summed(q):
        most, chunk = _MOST_CHUNKS_OF_SUMS, _CHUNK_SUMS * words.GROUP
    return min(-(-codes // chunk), most, q.shape[0])


def _cut_groups(q: ScaledCodes) -> list[words.Span]:
    """Return the groups of a tile that each vector holds, or one span of all groups.

    XLA:CPU computes the groups that do not fill a vector one by one. Here they share a vector with groups before them,
    which count once.
    """
    packed = q.words
    assert packed is not None
    count = words.find_shape(packed.length, packed.bits).groups
    starts = [*range(0, count - _VECTOR, _VECTOR), count - _VECTOR]
    if count % _VECTOR == 0 or count < _VECTOR or len(starts) > _MOST_SPANS:
        return [words.Span(0, count)]
    return [words.Span(start, _VECTOR, -start % _VECTOR) for start in starts]


def _contract_groups(
    factors: jax.Array, q: ScaledCodes, role: Role, chunk: Chunk, spans: Sequence[words.Span],
    predecessor: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return the contraction of a row, as `words.arrange_row` returns it, with a chunk of the rows of words.

    It is computed after `predecessor`.
    """
    if predecessor is not None:
        flat = delay_floats(factors.reshape(-1), predecessor)
        factors = lax.optimization_barrier(flat).reshape(factors.shape)
    packed = q.words
    assert packed is not None
    size = words.find_shape(packed.length, packed.bits)
    by_word = _is_summed(q)

    def cut(part: jax.Array) -> jax.Array:
        """Return the rows of the chunk, at indices that XLA knows: it would copy others."""
        is_whole = part.shape[0] == 1 or chunk.length == q.shape[0]
        return part if is_whole else lax.slice_in_dim(part, chunk.start, chunk.start + chunk.length)

    def arrange(part: jax.Array) -> jax.Array:
        """Return the entries of a chunk: [rows or 1, tiles or 1, entries of a group, 1, groups or 1]."""
        is_zero_point, each = part is q.zero_point, _count_entries(q, part)
        part = cut(part)
        rows, entries = part.shape
        if is_zero_point or each > 1:
            # A strided read in the loop over all words would not be vectorized, and a conversion would be repeated. XLA
            # vectorizes both completely in an array of one or two dimensions.
            columns = part.reshape(-1, each).T
            columns = columns if predecessor is None else delay_floats(columns, predecessor)
            columns = barriers.pin_layout(_prepare_zero_point(q, columns) if is_zero_point else columns)
            if each > 1:
                return jnp.moveaxis(columns.reshape(each, rows, size.tiles, 1, size.groups), 0, 2)
            part = columns.reshape(rows, entries)
        if entries == 1:
            return part[:, :, None, None, None]
        run = packed.length // entries
        if run > words.GROUP:
            # The barrier keeps XLA from finding the entry of each group by divisions.
            part = lax.optimization_barrier(jnp.repeat(part, run // words.GROUP, axis=1))
        return part.reshape(rows, size.tiles, 1, 1, size.groups)

    def spread(part: jax.Array) -> jax.Array:
        """Return arranged entries for each word of a group."""
        rows, tiles, each, _, groups = part.shape
        if each == 1:
            return part
        # Neighboring words of a group share an entry. If there are more entries than words, neighboring parts do.
        words_apart = min(each, size.words)
        lengths = (words_apart, size.words // words_apart, each // words_apart, size.parts * words_apart // each)
        wide = part.reshape(rows, tiles, lengths[0], 1, lengths[2], 1, groups)
        wide = jnp.broadcast_to(wide, (rows, tiles, *lengths, groups))
        return wide.reshape(rows, tiles, size.words, size.parts, groups)

    # Words that are contracted by their place in a group are cut below, rows and place at once. XLA would copy them if
    # the rows were cut here.
    stored = words.split_words(q.codes if by_word else cut(q.codes), packed.bits, packed.length)
    scale, base, offset = (None if part is None else arrange(part) for part in (q.scale, q.zero_point, q.offset))
    assert scale is not None
    # The sum of the elements that each word is multiplied with.
    sums = None if offset is None else lax.optimization_barrier(jnp.sum(factors, axis=0))[None]

    def contract(number: int, span: words.Span, index: int | None = None) -> jax.Array:
        """Return the sums of the products of each word of a span, scaled: [rows, tiles, words, parts, groups].

        Args:
            number: the number of the span.
            span: the span.
            index: the place in a group of the words to contract, or None for all words.
        """

        def choose(part: jax.Array) -> jax.Array:
            if index is None or part.shape[-3] == 1:
                return part
            return lax.slice_in_dim(part, index, index + 1, axis=-3)

        def take(part: jax.Array) -> jax.Array:
            return choose(spread(part if part.shape[-1] == 1 else span.cut(part)))

        limits = [(0, n) for n in stored[0].shape]
        if index is not None:
            limits[0], limits[2] = (chunk.start, chunk.start + chunk.length), (index, index + 1)
        limits[-1] = (span.start, span.start + span.length)
        low, *high = (_slice(plane, limits) for plane in stored)
        place = words.Span(number * span.length, span.length)
        row = place.cut(factors)
        aligned = [
            tuple(words.align_parts(plane, low.shape, packed.bits, 3, first) for plane in high)
            for first in range(0, size.lanes, _SHARED_LANES)
        ]
        steps = None if base is None else take(base)
        products = []
        for lane in range(size.lanes):
            turn, other = divmod(lane, _SHARED_LANES)
            weights = _read_weights(q, (low, *aligned[turn]), lane, other, 0, steps)
            products.append(choose(row[None, lane]) * weights)
        total = functools.reduce(jnp.add, products) if size.lanes == _SHARED_LANES else add_terms(products, q.decode)
        # An entry is converted where it is read, once for each word or group.
        total = total * widen(take(scale))
        if offset is not None:
            assert sums is not None
            total = total + choose(place.cut(sums)) * widen(take(offset))
        return total

    # If possible, the sum of the words of a group is written to memory in place of each of them.
    indices = range(size.words) if by_word else [None]
    sums_of_words = [contract(n, span, index) for n, span in enumerate(spans) for index in indices]
    total = functools.reduce(jnp.add, sums_of_words)
    # XLA:CPU would cut a loop over a dimension of length 1 for several threads, and run it on one.
    return sum_rows(total.reshape(total.shape[0], *(n for n in total.shape[1:] if n != 1)))


def _slice(plane: jax.Array, limits: Sequence[tuple[int, int]]) -> jax.Array:
    """Return a slice of a plane of words. Dimensions of length 1 broadcast, and are kept."""
    bounds = [limit if n != 1 else (0, 1) for n, limit in zip(plane.shape, limits, strict=True)]
    return lax.slice(plane, *zip(*bounds, strict=True))


def _pin(part: jax.Array) -> jax.Array:
    """Return an array that has passed a barrier as one dimension: XLA slices such layers of a stack by vectors only."""
    return lax.optimization_barrier(part.reshape(-1)).reshape(part.shape)


def _widen_in_memory(part: jax.Array | None, predecessor: jax.Array) -> jax.Array | None:
    """Return a scale or an offset as `widen` returns it, in memory, after `predecessor`."""
    if part is None or part.dtype == jnp.float32:
        return None if part is None else widen(part)
    flat = lax.optimization_barrier(widen(delay_floats(part.reshape(-1), predecessor)))
    return flat.reshape(part.shape)


def _prepare_zero_point(q: ScaledCodes, zero_point: jax.Array) -> jax.Array:
    """Return what `packed_codes.read_steps` subtracts for some zero points."""
    packed = q.words
    assert packed is not None
    return packed_codes.compute_base(zero_point, packed.bits, signed=packed.is_signed)


def _read_weights(
    q: ScaledCodes, planes: tuple[jax.Array, ...], lane: int | jax.Array, high_lane: int | jax.Array,
    part: int | jax.Array, zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return the codes of a lane minus what `_prepare_zero_point` returns, or their levels, as float32.

    The arguments are those of `words.read_lane_steps`.
    """
    packed = q.words
    assert packed is not None
    width, signed = packed.bits, packed.is_signed
    if q.decode is None and len(planes) == 2:
        base = packed_codes.compute_base(jnp.float32(0), width, signed=signed) if zero_point is None else zero_point
        return words.read_lane_steps(planes, width, lane, high_lane, part, base, signed=signed)
    if zero_point is not None:
        first_bit = lane * width
        row = planes[0] if isinstance(lane, int) else jnp.broadcast_to(planes[0], lane.shape)
        return packed_codes.read_steps(row, width, first_bit, zero_point, signed=signed)
    codes = words.read_lane(planes, width, lane, high_lane, part, signed=signed)
    return codes.astype(jnp.float32) if q.decode is None else q.decode(codes, jnp.zeros(codes.shape, jnp.int32))
