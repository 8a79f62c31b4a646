"""The contraction of one float row with a matrix of codes in uint32 words: see `words` and `float_rows`.

The words are read as they are, and no code is written to memory. The lanes of a word belong to distant codes, so a
vector of words becomes, lane by lane, vectors of neighboring codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import packed_codes, words
from .contraction import Role
from .float_rows import ScaledCodes, WordLayout, add_terms, finish, scale_row

# The number of rows that one loop adds up, if they stay in the first-level cache. With 8, XLA:CPU writes and reads as
# many sums as words.
_TERMS = (32, 16)
# A loop reads one vector of each of its rows, and the rest of a cache line later. Rows whose distance in memory is a
# multiple of _PAGE bytes share one set of the first-level cache, which holds _WAYS lines at least.
_PAGE, _WAYS = 2**12, 8
# The number of words in a vector of a CPU with AVX2, and the most vectors that one loop adds up in each lane.
_VECTOR, _MOST_VECTORS = 8, 4


def choose_form(q: ScaledCodes, role: Role) -> Callable[..., tuple[jax.Array, jax.Array]] | None:
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
        fits = (n for n in _TERMS if n * planes <= _count_cached_rows(row_bytes) or n == _TERMS[-1])
        terms = next((n for n in fits if all(run % n == 0 for run in (q.shape[0], *runs))), None)
        return None if terms is None else functools.partial(contract_word_rows, terms=terms)
    run = math.gcd(_count_part(packed), *runs)
    return functools.partial(contract_word_lanes, run=run) if run % _VECTOR == 0 else None


def contract_word_rows(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> tuple[jax.Array, jax.Array]:
    """Return what `float_rows.contract_row` returns, for words along the dimension that is not contracted.

    Args:
        x: float32 [K].
        q: words [K, W].
        role: the role of each dimension of the codes.
        terms: the number of rows that one loop adds up, which share their entries.
    """
    packed = q.words
    assert packed is not None
    scaled, unit = scale_row(x)
    depth, columns = q.shape
    groups, lanes = depth // terms, words.count_lanes(packed.bits)
    factors = scaled.reshape(groups, terms)
    # The barrier keeps XLA from reading codes that are constants while it compiles.
    stored = lax.optimization_barrier(q.codes).reshape(groups, terms, -1)

    def split(term: int) -> tuple[jax.Array, ...]:
        # The row of each group comes first: XLA would copy planes that are cut out of the whole matrix.
        return tuple(plane[:, None] for plane in words.split_words(stored[:, term], packed.bits, columns))

    shape = (groups, lanes, words.count_parts(packed.bits), _count_part(packed))
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def take(part: jax.Array) -> jax.Array:
        """Return the entries of a scale, zero point or offset in the order of lanes, parts and words."""
        part = q.expand(part, role.free)
        entries, last = part.shape[0], (1, 1, 1) if part.shape[1] == 1 else shape[1:]
        each = jnp.broadcast_to(part.reshape(entries, 1, *last), (entries, groups // entries, *last))
        return each.reshape(groups, *last)

    # The barrier keeps XLA from writing a zero point for each code to memory.
    zero_point = None if q.zero_point is None else take(lax.optimization_barrier(_prepare_zero_point(q)))
    products = []
    for term in range(terms):
        weights = _read_weights(q, split(term), lane, zero_point)
        products.append(factors[:, term, None, None, None] * weights)
    total = add_terms(products, q.decode) * take(q.scale)
    if q.offset is not None:
        sums = jnp.sum(factors, axis=1)[:, None, None, None]
        total = total + sums * take(q.offset)
    # Before the barrier, a reshape would make XLA find the lane and the word of each code by divisions.
    y = jnp.sum(lax.optimization_barrier(jnp.broadcast_to(total, shape)), axis=0)
    return finish(y.reshape(columns), unit)


def contract_word_lanes(x: jax.Array, q: ScaledCodes, role: Role, run: int) -> tuple[jax.Array, jax.Array]:
    """Return what `float_rows.contract_row` returns, for words along the contracted dimension.

    Args:
        x: float32 [K].
        q: words [N, W].
        role: the role of each dimension of the codes.
        run: how many neighboring words share their entries, in each lane.
    """
    packed = q.words
    assert packed is not None
    scaled, unit = scale_row(x)
    depth = packed.length
    lanes, parts, cut = words.count_lanes(packed.bits), words.count_parts(packed.bits), _count_part(packed) // run
    vectors = next(n for n in range(_MOST_VECTORS, 0, -1) if run % (n * _VECTOR) == 0)
    # The words that one loop adds up: those of `vectors` vectors, in all lanes. A run may be several of these.
    steps = run // (vectors * _VECTOR)
    shape = (parts, cut * steps, vectors, _VECTOR)
    factors = lax.optimization_barrier(scaled.reshape(lanes, *shape))
    # The barrier keeps XLA from reading codes that are constants while it compiles.
    stored = lax.optimization_barrier(q.codes)
    planes = [words.split_vectors(stored, packed.bits, depth, _VECTOR, vector, vectors) for vector in range(vectors)]

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
    sums = []
    for lane in range(lanes):
        point = None if zero_point is None else get(zero_point, lane)
        products = []
        for vector in range(vectors):
            weights = _read_weights(q, planes[vector], lane, point, part_axis=-3)
            products.append(factors[None, lane, :, :, vector] * weights)
        sums.append(functools.reduce(jnp.add, products) * get(scale, lane))
    # The barrier keeps XLA from fusing this sum with the loop of products.
    y = jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, sums)), axis=(1, 2, 3))
    if q.offset is not None:
        offset = q.expand(q.offset, role.free)
        sums = lax.optimization_barrier(jnp.sum(scaled.reshape(offset.shape[1], -1), axis=1))
        y = y + jnp.sum(offset * sums[None], axis=1)
    return finish(y, unit)


def _prepare_zero_point(q: ScaledCodes) -> jax.Array:
    """Return the zero point as int32, or for words of one plane what `packed_codes.read_steps` subtracts for it."""
    packed = q.words
    assert packed is not None
    assert q.zero_point is not None
    if packed.bits in (2, 4):
        return packed_codes.compute_base(q.zero_point, packed.bits, signed=packed.is_signed)
    return q.zero_point.astype(jnp.int32)


def _read_weights(
    q: ScaledCodes, planes: tuple[jax.Array, ...], lane: int | jax.Array, zero_point: jax.Array | None,
    part_axis: int = -2,
) -> jax.Array:  # fmt: skip
    """Return the codes of a lane minus what `_prepare_zero_point` returns, or their levels, as float32."""
    packed = q.words
    assert packed is not None
    if zero_point is not None and len(planes) == 1:
        width, signed = packed.bits, packed.is_signed
        first_bit = lane * width if isinstance(lane, int) else lane * np.int32(width)
        row = planes[0] if isinstance(lane, int) else jnp.broadcast_to(planes[0], lane.shape)
        return packed_codes.read_steps(row, width, first_bit, zero_point, signed=signed)
    codes = words.read_lane(planes, packed.bits, lane, signed=packed.is_signed, part_axis=part_axis)
    if q.decode is not None:
        return q.decode(codes, jnp.zeros(codes.shape, jnp.int32))
    return (codes if zero_point is None else codes - zero_point).astype(jnp.float32)


def _count_part(packed: WordLayout) -> int:
    """Return the number of words of the first plane that have their bits in the same place of the second one."""
    return packed.length // words.count_lanes(packed.bits) // words.count_parts(packed.bits)


def _count_cached_rows(row_bytes: int) -> int:
    """Return of how many neighboring rows of a matrix the first-level cache holds a line at the same place."""
    return _WAYS * _PAGE // math.gcd(row_bytes, _PAGE)
