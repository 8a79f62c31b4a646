"""The contraction of one float row with a matrix of codes in uint32 words: see `words` and `float_rows`.

The words are read as they are, and no code is written to memory. The lanes of a word belong to distant codes, so a
vector of words becomes, lane by lane, vectors of neighboring codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from . import words
from .contraction import Role
from .float_rows import ScaledCodes, WordLayout, finish, scale_row

# The number of rows that one loop adds up. With 8, XLA:CPU writes and reads as many sums as words.
_TERMS = (32, 16)
# The least number of words that share the scale of a lane: a vector of a CPU with AVX2.
_RUN = 8


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
        terms = next((n for n in _TERMS if all(run % n == 0 for run in (q.shape[0], *runs))), None)
        return None if terms is None else functools.partial(contract_word_rows, terms=terms)
    run = math.gcd(_count_part(packed), *runs)
    return functools.partial(contract_word_lanes, run=run) if run % _RUN == 0 else None


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
        each = jnp.broadcast_to(part[:, None], (part.shape[0], groups // part.shape[0], part.shape[1]))
        last = (1, 1, 1) if part.shape[1] == 1 else shape[1:]
        return each.reshape(groups, *last)

    zero_point = None if q.zero_point is None else take(q.zero_point.astype(jnp.int32))
    products = []
    for term in range(terms):
        weights = _read_weights(q, split(term), lane, zero_point)
        products.append(factors[:, term, None, None, None] * weights)
    total = functools.reduce(jnp.add, products) * take(q.scale)
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
    factors = lax.optimization_barrier(scaled.reshape(lanes, parts, cut, run))
    # The barrier keeps XLA from reading codes that are constants while it compiles.
    planes = words.split_words(lax.optimization_barrier(q.codes), packed.bits, depth)

    def take(part: jax.Array) -> jax.Array:
        """Return the entries of each run: [rows or 1, lanes or 1, parts or 1, runs or 1, 1]."""
        part = q.expand(part, role.free)
        if part.shape[1] == 1:
            return part[:, :, None, None, None]
        repeats = depth // part.shape[1] // run
        if repeats > 1:
            part = lax.optimization_barrier(jnp.repeat(part, repeats, axis=1))
        return part.reshape(part.shape[0], lanes, parts, cut, 1)

    def get(part: jax.Array, lane: int) -> jax.Array:
        return part[:, lane if part.shape[1] > 1 else 0]

    scale = take(q.scale)
    zero_point = None if q.zero_point is None else take(q.zero_point)
    total = None
    for lane in range(lanes):
        point = None if zero_point is None else get(zero_point, lane).astype(jnp.int32)
        weights = _read_weights(q, planes, lane, point, cut=(cut, run))
        product = factors[None, lane] * weights * get(scale, lane)
        total = product if total is None else total + product
    assert total is not None
    # The barrier keeps XLA from fusing this sum with the loop of products.
    y = jnp.sum(lax.optimization_barrier(total), axis=(1, 2, 3))
    if q.offset is not None:
        offset = q.expand(q.offset, role.free)
        sums = lax.optimization_barrier(jnp.sum(scaled.reshape(offset.shape[1], -1), axis=1))
        y = y + jnp.sum(offset * sums[None], axis=1)
    return finish(y, unit)


def _read_weights(
    q: ScaledCodes, planes: Sequence[jax.Array], lane: int | jax.Array, zero_point: jax.Array | None,
    cut: tuple[int, int] | None = None,
) -> jax.Array:  # fmt: skip
    """Return the codes of a lane minus the zero point, or their levels, as float32.

    With a cut, the last dimension is cut into two of these lengths, as the zero point is.
    """
    packed = q.words
    assert packed is not None
    codes = words.read_lane(tuple(planes), packed.bits, lane, signed=packed.is_signed)
    if cut is not None:
        codes = codes.reshape(*codes.shape[:-1], *cut)
    if q.decode is not None:
        return q.decode(codes, jnp.zeros(codes.shape, jnp.int32))
    return (codes if zero_point is None else codes - zero_point).astype(jnp.float32)


def _count_part(packed: WordLayout) -> int:
    """Return the number of words of the first plane that have their bits in the same place of the second one."""
    return packed.length // words.count_lanes(packed.bits) // words.count_parts(packed.bits)
