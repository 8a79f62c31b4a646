"""The contraction of one float row with a matrix of codes in uint32 words: see `words` and `float_rows`.

The words are read as they are, or copied as they are if they have two planes, and no code is written to memory. The
lanes of a word belong to distant codes, so a vector of words becomes, lane by lane, vectors of neighboring codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import barriers, packed_codes, words
from .contraction import Role
from .float_rows import ScaledCodes, WordLayout, add_terms, count_cached_rows, scale_row, sum_rows
from .weight_chunks import Chunk

# The number of rows that one loop adds up, if they stay in the first-level cache. With 8, XLA:CPU writes and reads as
# many sums as words.
_TERMS = (32, 16)
# The number of words of a chunk, and the most chunks: the program contains the operations of every chunk.
_CHUNK, _MOST_CHUNKS = 2**19, 16
# The number of words in a cache line. Words of two planes are read a line at a time for all of their lanes, so that
# the lines of all rows stay in the first-level cache.
_LINE = 16
# Up to this number of codes, the sums over lanes stay in the second-level caches.
_FEW = 2**22
# The number of words in a vector of a CPU with AVX2, and the most vectors that one loop adds up in each lane.
_VECTOR, _MOST_VECTORS = 8, 4


def choose_form(q: ScaledCodes, role: Role) -> Callable[..., jax.Array] | None:
    """Return the function of a row, q and role that contracts them, or None: one of the functions below.

    Every word and every block must be full, and the codes must be a matrix with one contracted dimension.
    """
    packed = q.words
    assert packed is not None
    is_matrix = len(q.shape) == 2 and not role.batch and len(role.contracted) == 1 and 0 not in q.shape
    if not is_matrix or not words.is_even(packed.length, packed.bits) or not q.has_usual_levels():
        return None
    if any(length % math.lcm(*q.list_runs(axis)) for axis, length in enumerate(q.shape)):
        return None
    runs = q.list_runs(role.contracted[0])
    if role.contracted == (0,):
        row_bytes, planes = 4 * q.codes.shape[1], 1 if words.count_parts(packed.bits) == 1 else 2
        fits = (n for n in _TERMS if n * planes <= count_cached_rows(row_bytes) or n == _TERMS[-1])
        terms = next((n for n in fits if all(run % n == 0 for run in (q.shape[0], *runs))), None)
        return None if terms is None else functools.partial(contract_word_rows, terms=terms)
    run = math.gcd(packed.length // words.count_lanes(packed.bits), *runs)
    if run % _VECTOR == 0 and q.zero_point is None and math.prod(q.shape) <= _FEW:
        return functools.partial(contract_few_words, run=run)
    run = math.gcd(_count_part(packed), *runs)
    return functools.partial(contract_word_lanes, run=run) if run % _VECTOR == 0 else None


def contract_word_rows(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return what `float_rows.contract_row` returns, for words along the dimension that is not contracted.

    Args:
        x: float32 [K].
        q: words [K, W].
        role: the role of each dimension of the codes.
        terms: the number of rows that one loop adds up, which share their entries.
    """
    scaled, unit = scale_row(x, q)
    sums: list[jax.Array] = []
    for chunk in _cut_rows(q, terms):
        piece = _take_piece(q, chunk, sums[-1] if sums else scaled)
        factors = scaled if chunk.length == q.shape[0] else chunk.take(scaled, 0)
        sums.append(_contract_rows(factors, piece, role, terms))
    return functools.reduce(jnp.add, sums) * unit


def _contract_rows(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return the contraction of a scaled row with the words of a chunk, [columns]."""
    packed = q.words
    assert packed is not None
    depth, columns = q.shape
    groups, lanes = depth // terms, words.count_lanes(packed.bits)
    factors, stored = x.reshape(groups, terms), q.codes.reshape(groups, terms, -1)

    parts, length = words.count_parts(packed.bits), _count_part(packed)
    size = length if words.count_planes(packed.bits) == 1 else math.gcd(length, _LINE)
    shape = (groups, parts, length // size, lanes, size)
    lane, number = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (3, 1))

    def split(term: int) -> tuple[jax.Array, ...]:
        # The row of each group comes first: XLA would copy planes that are cut out of the whole matrix.
        planes = words.split_words(stored[:, term], packed.bits, columns)
        return tuple(plane.reshape(groups, -1, length // size, 1, size) for plane in planes)

    def take(part: jax.Array) -> jax.Array:
        """Return the entries of a scale, zero point or offset in the order of parts, words, lanes and words."""
        part = q.expand(part, role.free)
        entries = part.shape[0]
        if part.shape[1] == 1:
            part = part.reshape(entries, 1, 1, 1, 1)
        else:
            part = part.reshape(entries, lanes, *shape[1:3], size).transpose(0, 2, 3, 1, 4)
        last = part.shape[1:]
        return jnp.broadcast_to(part[:, None], (entries, groups // entries, *last)).reshape(groups, *last)

    # The barrier keeps XLA from writing a zero point for each code to memory.
    zero_point = None if q.zero_point is None else take(lax.optimization_barrier(_prepare_zero_point(q)))
    products = []
    for term in range(terms):
        weights = _read_weights(q, split(term), lane, number, zero_point)
        products.append(factors[:, term, None, None, None, None] * weights)
    total = add_terms(products, q.decode) * take(q.scale)
    if q.offset is not None:
        sums = jnp.sum(factors, axis=1)[:, None, None, None, None]
        total = total + sums * take(q.offset)
    # Before the barrier, a reshape would make XLA find the lane and the word of each code by divisions.
    y = jnp.sum(lax.optimization_barrier(jnp.broadcast_to(total, shape)), axis=0)
    return y.transpose(2, 0, 1, 3).reshape(columns)


def contract_word_lanes(x: jax.Array, q: ScaledCodes, role: Role, run: int) -> jax.Array:
    """Return what `float_rows.contract_row` returns, for words along the contracted dimension.

    Args:
        x: float32 [K].
        q: words [N, W].
        role: the role of each dimension of the codes.
        run: how many neighboring words share their entries, in each lane.
    """
    scaled, unit = scale_row(x, q)
    sums: list[jax.Array] = []
    for chunk in _cut_rows(q, 1):
        piece = _take_piece(q, chunk, sums[-1] if sums else scaled)
        sums.append(_contract_lanes(scaled, piece, role, run))
    return jnp.concatenate(sums) * unit


def _contract_lanes(x: jax.Array, q: ScaledCodes, role: Role, run: int) -> jax.Array:
    """Return the contraction of a scaled row with the words of a chunk, [rows of words]."""
    packed = q.words
    assert packed is not None
    depth = packed.length
    lanes, parts, cut = words.count_lanes(packed.bits), words.count_parts(packed.bits), _count_part(packed) // run
    vectors = next(n for n in range(_MOST_VECTORS, 0, -1) if run % (n * _VECTOR) == 0)
    # The words that one loop adds up: those of `vectors` vectors, in all lanes. A run may be several of these.
    steps = run // (vectors * _VECTOR)
    shape = (parts, cut * steps, vectors, _VECTOR)
    factors = lax.optimization_barrier(x.reshape(lanes, *shape))

    def take(part: jax.Array) -> jax.Array:
        """Return the entries of each loop: [rows or 1, lanes or 1, parts or 1, loops or 1, 1]."""
        part = q.expand(part, role.free)
        if part.shape[1] == 1:
            return part[:, :, None, None, None]
        repeats = depth // part.shape[1] // (run // steps)
        if repeats > 1:
            part = lax.optimization_barrier(jnp.repeat(part, repeats, axis=1))
        return part.reshape(part.shape[0], lanes, parts, cut * steps, 1)

    def get(part: jax.Array, lane: int) -> jax.Array:
        return part[:, lane if part.shape[1] > 1 else 0]

    scale = take(q.scale)
    zero_point = None if q.zero_point is None else take(_prepare_zero_point(q))
    planes = []
    for vector in range(vectors):
        low, *high = words.split_vectors(q.codes, packed.bits, depth, _VECTOR, vector, vectors)
        planes.append((low, *(words.align_parts(plane, low.shape, packed.bits, axis=1) for plane in high)))
    sums = []
    for lane in range(lanes):
        point = None if zero_point is None else get(zero_point, lane)
        products = []
        for vector in range(vectors):
            weights = _read_weights(q, planes[vector], lane, 0, point)
            products.append(factors[None, lane, :, :, vector] * weights)
        sums.append(functools.reduce(jnp.add, products) * get(scale, lane))
    y = sum_rows(functools.reduce(jnp.add, sums))
    return y if q.offset is None else y + _contract_offset(x, q, role)


def contract_few_words(x: jax.Array, q: ScaledCodes, role: Role, run: int) -> jax.Array:
    """Return what `contract_word_lanes` returns, in fewer operations, for codes without a zero point.

    The loop over words adds up only lanes, and writes a sum for each word of the first plane. The units of the second
    plane are copied in the order of these words, so that a row may have any number of words.

    Args:
        x: float32 [K].
        q: words [N, W].
        role: the role of each dimension of the codes.
        run: how many neighboring words of the first plane share their entries, in each lane.
    """
    packed = q.words
    assert packed is not None
    scaled, unit = scale_row(x, q)
    lanes = words.count_lanes(packed.bits)
    steps = packed.length // lanes // run
    # The barriers keep XLA from arranging the row for each row of words, and from reading words that are constants.
    factors = lax.optimization_barrier(scaled.reshape(lanes, steps, run))
    planes = words.split_units(lax.optimization_barrier(q.codes), packed.bits, packed.length, scaled)
    planes = tuple(plane.reshape(-1, steps, run) for plane in planes)
    scale = q.expand(q.scale, role.free)
    scale = jnp.broadcast_to(scale[:, :, None], (*scale.shape, lanes * steps // scale.shape[1]))
    scale = scale.reshape(-1, lanes, steps)
    products = [
        factors[None, lane] * _read_weights(q, planes, lane, 0, None) * scale[:, lane, :, None] for lane in range(lanes)
    ]
    y = sum_rows(functools.reduce(jnp.add, products).reshape(-1, steps * run))
    return (y if q.offset is None else y + _contract_offset(scaled, q, role)) * unit


def _contract_offset(x: jax.Array, q: ScaledCodes, role: Role) -> jax.Array:
    """Return the contraction of a scaled row with the offsets of rows of words."""
    assert q.offset is not None
    offset = q.expand(q.offset, role.free)
    sums = lax.optimization_barrier(jnp.sum(x.reshape(offset.shape[1], -1), axis=1))
    return lax.dot(offset, sums, precision=lax.Precision.HIGHEST)


def _cut_rows(q: ScaledCodes, terms: int) -> list[Chunk]:
    """Return chunks of rows of words, which begin where loops of `terms` rows and blocks do.

    Words of two planes are cut. XLA:CPU copies a chunk, in the order of memory, to the second-level cache. Without the
    copy the loop over codes would read both planes of each row from memory, and wait at the beginning of each.
    """
    packed, length = q.words, q.shape[0]
    assert packed is not None
    if words.count_planes(packed.bits) == 1:
        return [Chunk(0, length)]
    step = math.lcm(terms, *(run for run in q.list_runs(0) if run != length))
    count = min(-(-q.codes.size // _CHUNK), _MOST_CHUNKS, length // step)
    rows = -(-length // (step * count)) * step
    return [Chunk(start, min(rows, length - start)) for start in range(0, length, rows)]


def _take_piece(q: ScaledCodes, chunk: Chunk, done: jax.Array) -> ScaledCodes:
    """Return a chunk of rows of words, copied after `done` if there are several."""
    # The barrier keeps XLA from reading codes that are constants while it compiles.
    codes = lax.optimization_barrier(q.codes)
    if chunk.length == q.shape[0]:
        return q._replace(codes=codes)
    runs = iter(q.list_runs(0))

    def take(part: jax.Array | None) -> Any:
        if part is None:
            return None
        run = next(runs)
        return part if run == q.shape[0] else chunk.take(part, 0, run)

    scale, zero_point, offset = (take(part) for part in (q.scale, q.zero_point, q.offset))
    codes = lax.optimization_barrier(barriers.wait_for(chunk.take(codes, 0), done))
    return q._replace(codes=codes, scale=scale, zero_point=zero_point, offset=offset)


def _prepare_zero_point(q: ScaledCodes) -> jax.Array:
    """Return what `packed_codes.read_steps` subtracts for the zero point."""
    packed = q.words
    assert packed is not None
    assert q.zero_point is not None
    return packed_codes.compute_base(q.zero_point, packed.bits, signed=packed.is_signed)


def _read_weights(
    q: ScaledCodes, planes: tuple[jax.Array, ...], lane: int | jax.Array, part: int | jax.Array,
    zero_point: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return the codes of a lane minus what `_prepare_zero_point` returns, or their levels, as float32."""
    packed = q.words
    assert packed is not None
    width, signed = packed.bits, packed.is_signed
    if q.decode is None and len(planes) == 2:
        base = packed_codes.compute_base(jnp.float32(0), width, signed=signed) if zero_point is None else zero_point
        return words.read_lane_steps(planes, width, lane, part, base, signed=signed)
    if zero_point is not None:
        first_bit = lane * width if isinstance(lane, int) else lane * np.int32(width)
        row = planes[0] if isinstance(lane, int) else jnp.broadcast_to(planes[0], lane.shape)
        return packed_codes.read_steps(row, width, first_bit, zero_point, signed=signed)
    codes = words.read_lane(planes, width, lane, signed=signed)
    return codes.astype(jnp.float32) if q.decode is None else q.decode(codes, jnp.zeros(codes.shape, jnp.int32))


def _count_part(packed: WordLayout) -> int:
    """Return the number of words of the first plane that have their bits in the same place of the second one."""
    return packed.length // words.count_lanes(packed.bits) // words.count_parts(packed.bits)
