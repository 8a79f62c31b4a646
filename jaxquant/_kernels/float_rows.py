"""The contraction of few float rows with a matrix of codes, without dequantizing the matrix in memory.

Digits: a CPU contracts int8 several times faster than float32, and reads a quarter of the bytes. A float32 row is
therefore written as a sum of int8 rows, x = factor * sum over i of digits[i] * 2**(24 - 8 i), and each of them is
contracted with the codes exactly. A row has 47 bits, counted from its largest magnitude: 23 more than a float32 number.

Scaled rows: a single row is contracted as a sum of scaled rows of the matrix. If the matrix holds the contracted
dimension last in memory, it is a sum over neighbors instead, lane by lane. XLA:CPU reads the codes once, and vectorizes
the conversion and the sum. The XLA of jax 0.10 does not vectorize it; there the other forms of a weight-only
contraction are faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, granularity
from . import barriers, contraction, packed_codes
from .contraction import LANES, Role, contract_roles, spread_outward
from .weight_chunks import Chunk

# Digits.


_DIGITS = 6
# The largest number of products that int32 holds: a digit is at most 2**7 and a code minus its zero point below 2**8.
LIMIT = (2**31 - 1) // (2**7 * (2**8 - 1))
# See `has_moderate_scales`.
_LEAST_SCALE = 2.0**-60
# A row is scaled by a power of two so that its largest magnitude lies just below this, which four digits hold.
_LARGEST = 127 * 2**24


def contract_digits(
    x: jax.Array, codes: jax.Array, center: jax.Array | None, scale: jax.Array, x_role: Role, role: Role
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 contraction of a float array with scaled codes, x on the left, and whether it is exact enough.

    The sum over digits and codes is exact. The result is rounded about as often as there are digits, and does not
    depend on an order of summation. It is not exact enough if a row contains an infinity, a NaN, or numbers too small
    for the digits of their row; nor if `has_moderate_scales` of the scales is False, which the caller asks.

    Args:
        x: float32.
        codes: int8, or codes of 2 or 4 bits.
        center: their int32 zero point, a scalar or of the rank of the codes, or None for 0.
        scale: float32, of the rank of the codes. Like the zero point it does not vary along contracted dimensions.
        x_role: the role of each dimension of x; there are no batch dimensions.
        role: the role of each dimension of the codes.
    """
    digits, unit, is_exact = _split_digits(x, x_role.contracted)
    free, contracted = (tuple(a + 1 for a in axes) for axes in (x_role.free, x_role.contracted))
    acc = contract_roles(digits, codes, None, center, Role((), (0, *free), contracted), role)
    unit = lax.transpose(unit, (*x_role.free, *x_role.contracted)).reshape(
        *(x.shape[a] for a in x_role.free), *(1 for _ in role.free)
    )
    scale = spread_outward(scale, role, len(x_role.free), 0)
    # The sum of the digits is below 2**56, so its product with a moderate scale is a normal number.
    return (_add_digits(acc) * scale) * unit, is_exact


def has_moderate_scales(scale: jax.Array) -> jax.Array:
    """Return whether all scales lie between 2**-60 and 2**60, which excludes NaN and infinity.

    With such scales no intermediate product overflows, or becomes a subnormal number, which XLA:CPU treats as 0.
    """
    return compute_least_scale(scale) > 0


def compute_least_scale(scale: jax.Array) -> jax.Array:
    """Return the least of the scales, a float32 scalar, or 0 if not all lie between 2**-60 and 2**60."""
    wide = dtypes.scale_as_float32(scale)
    is_moderate = (wide >= np.float32(_LEAST_SCALE)) & (wide <= np.float32(1 / _LEAST_SCALE))
    # XLA:CPU reduces floats in one call of a library, but booleans, as in `jnp.all`, in several loops.
    return jnp.min(jnp.where(is_moderate, wide, np.float32(0)))


def _split_digits(x: jax.Array, contracted: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the digits of x, the unit of each row, and whether the digits are exact enough.

    Returns:
        int8 [6, ...] with the shape of x behind; float32, of length 1 along the contracted dimensions; a bool.
    """
    largest = jnp.max(jnp.abs(x), axis=contracted, keepdims=True)
    factor, unit = compute_powers(largest, 30)
    scaled = x * factor
    # Both parts are exact: a difference to the nearest integer, and a difference to 1 of numbers close to it.
    whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = scaled - whole
    # Two digits from -128 to 127 hold -32896 to 32639, in units of 2**-16. A larger rest becomes negative.
    carries = rest >= np.float32(32639.5 / 2**16)
    whole, rest = whole + carries.astype(jnp.float32), rest - carries.astype(jnp.float32)
    size = jnp.abs(scaled)
    # The unit of the last digit is 2**-16, so a number of 4 or more has a relative error of at most 2**-19.
    is_fine = (size <= np.float32(_LARGEST)) & ((size >= 4) | (x == 0))
    is_exact = jnp.min(is_fine.astype(jnp.float32)) > 0
    # Adding 0x80 to each byte turns bytes from 0 to 255 into digits from -128 to 127, with the carries between them.
    high = lax.convert_element_type(whole, jnp.int32) + np.int32(0x80808080 - 2**32)
    low = lax.convert_element_type(lax.round(rest * np.float32(2**16)), jnp.int32) + np.int32(0x8080)
    # The barrier keeps XLA from computing both for each of the digits.
    high, low = lax.optimization_barrier((high, low))
    shifted = [lax.shift_right_logical(high, np.int32(shift)) for shift in (24, 16, 8)]
    shifted += [high, lax.shift_right_logical(low, np.int32(8)), low]
    digits = jnp.stack([lax.convert_element_type(part, jnp.int8) for part in shifted])
    return digits ^ np.int8(-128), unit, is_exact


def compute_powers(largest: jax.Array, exponent: int) -> tuple[jax.Array, jax.Array]:
    """Return the power of two that scales a magnitude to just below 127 / 64 * 2**exponent, and its reciprocal.

    Both are normal float32. A magnitude that is too small, too large or not finite is scaled as far as that allows.

    Args:
        largest: float32, not negative.
        exponent: from 0 to 30.
    """
    # This is the biased exponent of the magnitude, plus 1 if its mantissa is at least 127 / 64.
    bits = lax.bitcast_convert_type(largest, jnp.int32) + np.int32(0x20000)
    biased = lax.clamp(np.int32(exponent + 1), lax.shift_right_logical(bits, np.int32(23)), np.int32(253))
    return _make_power(np.int32(254 + exponent) - biased), _make_power(biased - np.int32(exponent))


def _make_power(biased_exponent: jax.Array) -> jax.Array:
    """Return the powers of two with these biased exponents, which are normal float32."""
    return lax.bitcast_convert_type(lax.shift_left(biased_exponent, np.int32(23)), jnp.float32)


def _add_digits(acc: jax.Array) -> jax.Array:
    """Return the sum of the contractions of the digits, weighted by their powers of two, as float32."""
    terms = lax.convert_element_type(acc, jnp.float32)
    # The smallest terms come first, so that their sum is rounded at their own magnitude.
    y = terms[_DIGITS - 1] * np.float32(2.0 ** (24 - 8 * (_DIGITS - 1)))
    for i in reversed(range(_DIGITS - 1)):
        y = y + terms[i] * np.float32(2.0 ** (24 - 8 * i))
    return y


# Scaled rows.


# The number of rows that one loop adds up: enough to use the vector registers of a CPU, without spilling them.
_TERMS = (32, 16, 8)
# From this number of codes on, or if they are decoded by selections, loops of fewer rows are faster. With fewer codes
# they are not: XLA:CPU then waits for a second thread.
_MANY_TERMS, _MANY = (16, 8), 2**18
# The number of rows or groups whose products are one array, which is cut again to add them: XLA takes the longer to
# compile the more operations a program has. XLA fuses an operation that it must repeat up to 15 times.
_SLICES = 8
# The least number of rows in a loop over words of codes. LLVM unrolls the codes of a word if the loop has fewer
# operations, and then does not vectorize it, which takes four times as long with 8 rows.
_WORD_TERMS = 16
# A loop reads one vector of each of its rows, and the rest of a cache line later. Rows whose distance in memory is a
# multiple of _PAGE bytes share one set of the first-level cache, which holds _WAYS lines at least.
_PAGE, _WAYS = 2**12, 8
# The numbers of codes that are handled together, of less than 8 bits and of 8 bits, and the largest number of chunks,
# which is limited because the program contains the operations of every chunk. XLA:CPU copies codes of less than 8 bits
# to read them as words; the copy of a chunk stays in the second-level caches, and so do the sums of a chunk. Codes of
# 8 bits are read where they are, but chunks of them would be copied.
_CHUNK, _BYTE_CHUNK, _MOST_CHUNKS = 2**22, 2**26, 16
# More codes of 8 bits than these are contracted in a loop, a few MB in each turn, which are read in several places at
# the same time. A processor loads memory before it is read only in the same page of 4 KB, and waits at the beginning of
# each page: this way it waits for several at once.
_LOOP, _STREAMS = 2**22, 4
# A row with a magnitude above _LARGE is divided by _POWER. Then the sum of its products with codes, or with levels of a
# codebook of at most _LARGEST_LEVEL, does not overflow before it is scaled, in rows of up to 2**20 elements. A row with
# no magnitude above 1 / _LARGE is multiplied by _POWER, so that the products of its sums and scales are not subnormal.
_LARGE, _POWER, _LARGEST_LEVEL = 2.0**88, 2.0**40, 2.0**20
# The codes that one vector of `contract_blocks` holds: eight words of eight codes, or 16 bytes.
_WORD_SPAN, _BYTE_SPAN = 64, LANES
# The numbers of vectors that one loop of it adds up. LLVM does not vectorize a loop of one vector of steps; with more
# vectors of levels, it moves what it has computed to memory and back.
_WORD_VECTORS, _LEVEL_VECTORS, _BYTE_VECTORS = (2, 3, 4, 5, 1), (1, 2, 3), tuple(range(32, 1, -1))
# The lanes of a vector in `sum_rows`, and the most vectors of a row that it adds up one by one.
_SUM_LANES, _MOST_SUMMED = 8, 32
# Whether XLA:CPU vectorizes the loop. Measured with jax 0.10 (it does not) and 0.12.
IS_VECTORIZED = jax.__version_info__ >= (0, 12)


class WordLayout(NamedTuple):
    """How codes are packed in uint32 words.

    Attributes:
        bits: the number of bits of a code.
        length: the number of codes in a row.
        is_signed: whether the codes are in two's complement.
    """

    bits: int
    length: int
    is_signed: bool


class ScaledCodes(NamedTuple):
    """A matrix of codes, in the form that a row is contracted with.

    Attributes:
        codes: integers, of rank 2 or more, with static dimensions.
        scale: float32, as `widen` returns it, or in any dtype for words and if `is_looped`; of the rank of the codes,
            and each dimension is `shape[i]`, 1, or the number of blocks.
        zero_point: integers of 8 bits, of a shape that a scale may have; or None for 0.
        offset: like the scale, of a shape that a scale may have, which is added to the scaled codes;
            or None for 0.
        block_size: Static. The number of indices in a block, or None if all blocks are equally long.
        decode: Static. A function from codes, and the position of a code's lowest bit, to the float32 levels of a
            codebook, or to four times float4 numbers; or None if the codes are steps.
        levels: Static. The levels of the codebook, or none.
        words: Static. How the codes are packed along the last dimension, or None if they are not.
    """

    codes: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    offset: jax.Array | None = None
    block_size: int | None = None
    decode: Callable[..., jax.Array] | None = None
    levels: tuple[float, ...] = ()
    words: WordLayout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the codes, also if they are packed."""
        shape = self.codes.shape
        return shape if self.words is None else (*shape[:-1], self.words.length)

    def expand(self, part: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Return a scale, zero point or offset with an entry for each index of some axes on which it varies."""
        return granularity.expand_along(part, self.shape, self.block_size, axes)

    def list_runs(self, axis: int) -> list[int]:
        """Return how many indices of an axis share an entry, for the scale, the zero point and the offset."""
        runs = []
        for part in (self.scale, self.zero_point, self.offset):
            if part is not None:
                sizes = granularity.Aligned(self.block_size).sizes(part.shape, self.shape)
                assert sizes is not None
                runs.append(sizes[axis])
        return runs

    def widen_entries(self) -> ScaledCodes:
        """Return the same with the scale and the offset as `widen` returns them."""
        if not is_looped(self.codes):
            return self
        return self._replace(scale=widen(self.scale), offset=None if self.offset is None else widen(self.offset))

    def has_usual_levels(self) -> bool:
        """Return whether products with the levels of the codebook neither overflow nor underflow."""
        return all(level == 0 or 1 / _LARGEST_LEVEL <= abs(level) <= _LARGEST_LEVEL for level in self.levels)


def widen(part: jax.Array) -> jax.Array:
    """Return a scale or an offset as float32, with NaN in place of infinities.

    An infinite scale makes a NaN of each code 0. The sum of several codes, which the functions below scale, is not 0.
    """
    wide = dtypes.scale_as_float32(part)
    # Of finite numbers this product is a zero, and of infinities NaN.
    return wide + wide * np.float32(0)


def choose_form(q: ScaledCodes, role: Role) -> Callable[..., jax.Array] | None:
    """Return the function of a row, q and role that contracts them, or None: one of the functions below."""
    for choose, contract in (
        (choose_terms, contract_row), (choose_groups, contract_lanes), (choose_vectors, contract_blocks)
    ):  # fmt: skip
        terms = choose(q, role)
        if terms is not None:
            return functools.partial(contract, terms=terms)
    return None


def choose_terms(q: ScaledCodes, role: Role) -> int | None:
    """Return how many rows one loop adds up, or None if the contraction does not have this form.

    The rows of a loop must share their entries of scale and zero point, and all blocks must have the same length.
    """
    depth, is_integer = q.codes.shape[0], q.codes.dtype in dtypes.INTEGERS or packed_codes.count_per_byte(q.codes) == 2
    if role.contracted != (0,) or role.batch or not is_integer:
        return None
    runs = [depth, *q.list_runs(0)]
    if any(depth % run for run in runs) or not q.has_usual_levels():
        return None
    terms = _MANY_TERMS if q.decode is not None or q.codes.size >= _MANY else _TERMS
    if q.codes.dtype in dtypes.EIGHT_BITS:
        most = count_cached_rows(q.codes.size // depth)
        terms = tuple(n for n in terms if n <= most or n == terms[-1])
    return next((n for n in terms if all(run % n == 0 for run in runs)), None)


def count_cached_rows(row_bytes: int) -> int:
    """Return of how many neighboring rows of a matrix the first-level cache holds a line at the same place."""
    return _WAYS * _PAGE // math.gcd(row_bytes, _PAGE)


def contract_row(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return the float32 contraction of a row with the first dimension of scaled codes.

    As in XLA's float contraction, subnormal numbers count as 0: elements, and their products and sums before they are
    scaled. So do elements below 2**-86 of a row that has one above 2**88. Infinities and NaN reach the results that
    they reach in floats, as what they are there, with two exceptions, in which the result may be another one of NaN and
    the infinities: infinite scales and offsets, and rows with several infinities if there is an offset.

    Args:
        x: float32 [K].
        q: codes [K, ...].
        role: the role of each dimension of the codes.
        terms: what `choose_terms` returns.

    Returns:
        float32 [...].
    """
    depth, kept = q.codes.shape[0], q.codes.shape[1:]
    scaled, unit = scale_row(x, q)
    scaled, codes = barriers.tie_to_row(scaled, q.codes)
    q = q._replace(codes=codes)
    rows = _choose_piece(q, terms)
    if rows:
        return _contract_pieces(scaled, _take_rows(q, role, Chunk(0, depth)), terms, rows).reshape(kept) * unit
    q = q.widen_entries()
    parts: list[jax.Array] = []
    for chunk in _cut_rows(q, terms):
        piece = _take_rows(q, role, chunk)
        factors = scaled if chunk.length == depth else chunk.take(scaled, 0)
        parts.append(_contract_rows(factors, *piece, parts[-1] if parts else scaled, q.decode, terms))
    return functools.reduce(jnp.add, parts).T.reshape(kept) * unit


def _choose_piece(q: ScaledCodes, terms: int) -> int:
    """Return how many rows each turn of a loop contracts, or 0 if all rows, or chunks of them, are contracted at once.

    Only codes of 8 bits are contracted in a loop, where they are: the sums of the groups of a large matrix would be
    written to new pages of memory in each call, and a chunk of it would be copied.
    """
    depth = q.codes.shape[0]
    if q.codes.dtype not in dtypes.EIGHT_BITS or q.codes.size <= _LOOP:
        return 0
    step = math.lcm(terms, *(run for run in q.list_runs(0) if run != depth))
    most = _CHUNK * depth // q.codes.size
    return next((rows for rows in range(most // step * step, most // 8, -step) if depth % rows == 0), 0)


def _contract_pieces(x: jax.Array, parts: tuple[jax.Array, jax.Array, Any, Any], terms: int, rows: int) -> jax.Array:
    """Return the contraction of a scaled row with codes of 8 bits, [K, columns], some rows at a time: [columns].

    Args:
        x: float32 [K].
        parts: the codes, scale, zero point and offset, as `_take_rows` returns them.
        terms: the number of rows that one loop adds up.
        rows: the number of rows in each turn: it divides K, and is a multiple of the length of a block.
    """
    codes, *entries = parts
    (depth, columns), groups = codes.shape, rows // terms
    stored, factors = codes.reshape(depth // terms, terms, columns), x.reshape(depth // terms, terms)

    def add_piece(number: jax.Array, y: jax.Array) -> jax.Array:
        def select(part: jax.Array | None) -> Any:
            """Return the entries of the piece for each group, scales and offsets as float32."""
            if part is None:
                return None
            count = part.shape[0] * rows // depth
            part = part if part.shape[0] == 1 else lax.dynamic_slice_in_dim(part, number * count, count)
            return _spread_entries(part if part.dtype in dtypes.INTEGERS else widen(part), groups)

        def decode(term: int) -> jax.Array:
            # XLA fuses a slice with the loop that reads it if nothing else does.
            row = lax.dynamic_slice(stored, (number * groups, term, 0), (groups, 1, columns)).reshape(groups, columns)
            steps = row.astype(jnp.int32)
            return (steps if zero_point is None else steps - zero_point.astype(jnp.int32)).astype(jnp.float32)

        scale, zero_point, offset = map(select, entries)
        piece = lax.dynamic_slice_in_dim(factors, number * groups, groups)
        total = add_terms([piece[:, i, None] * decode(i) for i in range(terms)], None) * scale
        if offset is not None:
            total = total + offset * jnp.sum(piece, axis=1, keepdims=True)
        return y + _sum_groups(total)

    return lax.fori_loop(0, depth // rows, add_piece, jnp.zeros(columns, jnp.float32))


def choose_groups(q: ScaledCodes, role: Role) -> int | None:
    """Return how many groups of lanes one loop of `contract_lanes` adds up, or None if it does not apply.

    The codes must be integers of 8 bits, of which only the last dimension is contracted, with one scale and one zero
    point along it. `contract_blocks` contracts many of them in a loop.
    """
    is_last = role.contracted == (q.codes.ndim - 1,) and not role.batch
    if not is_last or q.decode is not None or q.codes.dtype not in dtypes.EIGHT_BITS:
        return None
    if is_looped(q.codes) and choose_vectors(q, role) is not None:
        return None
    if q.offset is not None or any(run != q.codes.shape[-1] for run in q.list_runs(-1)):
        return None
    return contraction.choose_lane_terms(q.codes.shape[-1])


def contract_lanes(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return the same as `contract_row`, for codes with the contracted dimension last.

    Args:
        x: float32 [K].
        q: codes [..., K].
        role: the role of each dimension of the codes.
        terms: what `choose_groups` returns.
    """
    q = q.widen_entries()
    scaled, unit = scale_row(x, q)
    lanes, shape = LANES, q.codes.shape
    groups = shape[-1] // (terms * lanes)
    scaled, codes = barriers.tie_to_row(scaled, q.codes)
    factors, codes = scaled.reshape(groups, terms, lanes), codes.reshape(-1, groups, terms, lanes)

    def take(part: jax.Array) -> jax.Array:
        return jnp.broadcast_to(q.expand(part, role.free), (*shape[:-1], 1)).reshape(-1, 1, 1)

    zero_point = None if q.zero_point is None else take(q.zero_point.astype(jnp.int32))
    products: list[jax.Array] = []
    for start in range(0, terms, _SLICES):
        steps = codes[:, :, start : start + _SLICES].astype(jnp.int32)
        steps = steps if zero_point is None else steps - zero_point[..., None]
        several = factors[None, :, start : start + _SLICES] * steps.astype(jnp.float32)
        products += [lax.index_in_dim(several, i, 2, keepdims=False) for i in range(several.shape[2])]
    y = sum_rows(functools.reduce(jnp.add, products))
    return (y * take(q.scale).reshape(-1)).reshape(shape[:-1]) * unit


def choose_vectors(q: ScaledCodes, role: Role) -> int | None:
    """Return how many vectors of codes one loop of `contract_blocks` adds up, or None if it does not apply.

    The codes must be integers or indices of 4 bits, or integers of 8 bits, of which only the last dimension is
    contracted, and blocks must begin where vectors do, or a vector must hold whole blocks.
    """
    depth, bits = q.codes.shape[-1], dtypes.count_packed_bits(q.codes.dtype)
    is_last = role.contracted == (q.codes.ndim - 1,) and not role.batch
    if not is_last or not q.has_usual_levels():
        return None
    if bits == 4:
        if packed_codes.count_per_byte(q.codes) != 2:
            return None
        span, choices = _WORD_SPAN, _WORD_VECTORS if q.decode is None else _LEVEL_VECTORS
    elif q.decode is None and q.codes.dtype in dtypes.EIGHT_BITS:
        span, choices = _BYTE_SPAN, _BYTE_VECTORS
    else:
        return None
    runs = q.list_runs(-1)
    # A word belongs to one block. In vectors of bytes all codes do.
    least = 8 if bits == 4 else span
    if depth % span or any(depth % run or (run % span and span % run) or run % least for run in runs):
        return None
    fits = [n for n in choices if depth % (n * span) == 0]
    return next((n for n in fits if all(run % (n * span) == 0 or (n * span) % run == 0 for run in runs)), None)


def contract_blocks(x: jax.Array, q: ScaledCodes, role: Role, terms: int) -> jax.Array:
    """Return the same as `contract_row`, for codes with the contracted dimension last and scaled in blocks.

    Args:
        x: float32 [K].
        q: codes [..., K].
        role: the role of each dimension of the codes.
        terms: what `choose_vectors` returns.
    """
    scaled, unit = scale_row(x, q)
    scaled, codes = barriers.tie_to_row(scaled, q.codes)
    shape, depth = q.codes.shape, q.codes.shape[-1]
    codes = codes.reshape(-1, depth)
    is_packed = dtypes.count_packed_bits(q.codes.dtype) == 4
    # The element of a lane comes from one position of each word: [positions, groups, terms, lanes].
    lanes, count = (_WORD_SPAN // 8, 8) if is_packed else (_BYTE_SPAN, 1)
    arranged = scaled.reshape(depth // (terms * lanes * count), terms, lanes, count)
    factors = barriers.pin_layout(lax.transpose(arranged, (3, 0, 1, 2)))
    # The barrier keeps XLA from adding them for each column.
    sums = lax.optimization_barrier(jnp.sum(factors, axis=0))

    def take(part: jax.Array | None) -> jax.Array | None:
        if part is None:
            return None
        expanded = q.expand(part, role.free)
        return jnp.broadcast_to(expanded, (*shape[:-1], expanded.shape[-1])).reshape(codes.shape[0], -1)

    scale = take(q.scale)
    assert scale is not None
    entries = (scale, take(q.zero_point), take(q.offset))
    if is_looped(q.codes):
        count = _choose_loop_rows(*codes.shape)

        def contract(start: jax.Array) -> jax.Array:
            return _contract_vectors(factors, codes, *entries, sums, scaled, q.decode, start, count)

        return lax.map(contract, jnp.arange(0, codes.shape[0], count)).reshape(shape[:-1]) * unit
    # The loops over levels write twice as many sums, which stay in memory beside the copy of a chunk.
    size = _CHUNK // (1 if q.decode is None else 2) if is_packed else q.codes.size
    pieces = min(-(-q.codes.size // size), _MOST_CHUNKS, codes.shape[0])
    length = -(-codes.shape[0] // pieces)
    parts: list[jax.Array] = []
    for start in range(0, codes.shape[0], length):
        chunk = Chunk(start, min(length, codes.shape[0] - start))
        is_whole = chunk.length == codes.shape[0]
        # XLA:CPU cuts codes of less than a byte fast only at indices that it knows.
        piece = lax.slice_in_dim(codes, start, start + chunk.length)
        scale, zero_point, offset = (e if e is None or is_whole else chunk.take(e, 0) for e in entries)
        assert scale is not None
        done = parts[-1] if parts else scaled
        parts.append(_contract_vectors(factors, piece, scale, zero_point, offset, sums, done, q.decode))
    return jnp.concatenate(parts).reshape(shape[:-1]) * unit


def is_looped(codes: jax.Array) -> bool:
    """Return whether `contract_blocks` contracts these codes in a loop, if it is their form.

    The sums and the scales of all rows of a large matrix would be written to memory, and to new pages in each call.
    """
    is_large = codes.dtype in dtypes.EIGHT_BITS and codes.size > _LOOP
    return is_large and _choose_loop_rows(codes.size // codes.shape[-1], codes.shape[-1]) > 0


def _choose_loop_rows(count: int, depth: int) -> int:
    """Return how many rows of codes each turn of the loop contracts: the most that stay in the cache, 0 if few do."""
    most = _CHUNK // depth
    return next((n for n in range(most, most // 8, -1) if count % n == 0), 0)


# A jit, so that JAX keeps the trace: matrices of the same shape have the same operations.
@functools.partial(jax.jit, inline=True, static_argnames=("decode_levels", "length"))
def _contract_vectors(
    factors: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, offset: jax.Array | None,
    sums: jax.Array, done: jax.Array, decode_levels: Callable[..., jax.Array] | None, start: jax.Array | None = None,
    length: int = 0,
) -> jax.Array:  # fmt: skip
    """Return the contraction of the columns of a chunk, computed after `done`: [columns].

    Args:
        factors: float32 [positions, groups, vectors, lanes].
        codes: [columns, K].
        scale: [columns, entries].
        zero_point: [columns, entries], or None.
        offset: [columns, entries], or None.
        sums: the sums of the factors over positions, [groups, vectors, lanes].
        done: an array to wait for: without it XLA:CPU would read all words of a program before the first product.
        decode_levels: as `ScaledCodes.decode`.
        start: the number of the first column to contract, or None for all columns. If there is one, the codes have 8
            bits, and the scales and offsets any dtype.
        length: Static. The number of columns from `start` on.
    """
    count, groups, terms, lanes = factors.shape
    columns, span, dtype = codes.shape[0], lanes * count, np.dtype(codes.dtype)
    is_signed = decode_levels is None and dtypes.read_bounds(dtype)[0] < 0
    stored = codes
    if count > 1:
        stored = packed_codes.read_words(codes)
        # The barrier keeps XLA from reading words code by code in the loop.
        stored = lax.optimization_barrier(barriers.wait_for(stored, done))
    stored = stored.reshape(columns, groups, terms, lanes)
    streams = next(n for n in (_STREAMS, 2, 1) if length % n == 0)
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2)

    def select(part: jax.Array, index: int | None = None) -> jax.Array:
        """Return the columns to contract, at an index of the third dimension if there is one."""
        if start is None:
            return part if index is None else lax.index_in_dim(part, index, 2, keepdims=False)
        starts, sizes = [start, *(0 for _ in part.shape[1:])], [length, *part.shape[1:]]
        if index is not None:
            starts[2], sizes[2] = index, 1
        # XLA fuses a slice with the loop that reads it once. It would copy the columns if each vector cut them again.
        selected = lax.dynamic_slice(part, starts, sizes)
        selected = selected if index is None else selected.reshape(*sizes[:2], *sizes[3:])
        # One column of each stream in turn.
        several = selected.reshape(streams, length // streams, *selected.shape[1:])
        return jnp.swapaxes(several, 0, 1).reshape(selected.shape)

    def take(part: jax.Array, vector: int) -> jax.Array:
        """Return the entries of a vector: [columns, groups, lanes or 1]."""
        run = terms * groups * span // part.shape[1]
        if run >= terms * span:  # one entry for several groups
            each = select(part)[:, :, None]
            each = jnp.broadcast_to(each, (*each.shape[:2], groups // part.shape[1]))
            return each.reshape(each.shape[0], groups)[:, :, None]
        each = part.reshape(columns, groups, -1)
        first, several = vector * span // run, max(span // run, 1)
        entries = [select(each, first + i)[:, :, None] for i in range(several)]
        value = entries[0]
        for i in range(1, several):
            value = jnp.where(lane < i * (lanes // several), value, entries[i])
        return value

    def take_float(part: jax.Array, vector: int) -> jax.Array:
        return take(part, vector) if start is None else widen(take(part, vector))

    def contract(vector: int) -> jax.Array:
        """Return the sum over positions of the products of a vector, before they are scaled."""
        # A slice is converted, not the whole, which XLA:CPU would write to memory.
        part = select(stored, vector)
        part = lax.bitcast_convert_type(part, jnp.int32) if count > 1 else part.astype(jnp.int32)
        point = None if zero_point is None else take(zero_point, vector)
        if point is not None and count > 1:
            point = packed_codes.compute_base(point, 4, signed=is_signed)
        products = []
        for position in range(count):
            if decode_levels is not None:
                weights = decode_levels(part, jnp.full(part.shape, 4 * position, jnp.int32))
            elif count == 1:
                weights = (part if point is None else part - point.astype(jnp.int32)).astype(jnp.float32)
            elif point is None:
                weights = packed_codes.read_nibble(part, dtype, 4 * position).astype(jnp.float32)
            else:
                weights = packed_codes.read_steps(part, 4, 4 * position, point, signed=is_signed)
            products.append(factors[position][None, :, vector] * weights)
        return functools.reduce(jnp.add, products)

    # Neighboring vectors with the same scale are added first.
    shared = min(max(groups * terms // scale.shape[1], 1), terms)
    totals = []
    for vector in range(0, terms, shared):
        total = functools.reduce(jnp.add, map(contract, range(vector, vector + shared)))
        totals.append(total * take_float(scale, vector))
    if offset is not None:
        totals += [sums[None, :, vector] * take_float(offset, vector) for vector in range(terms)]
    total = functools.reduce(jnp.add, totals)
    # XLA:CPU runs a loop that calls no library, as it does for this sum, on one thread.
    if start is None:
        return sum_rows(total)
    y = jnp.sum(lax.optimization_barrier(total), axis=(1, 2))
    return y.reshape(length // streams, streams).T.reshape(length)


def scale_row(x: jax.Array, q: ScaledCodes) -> tuple[jax.Array, jax.Array]:
    """Return a row whose sums of products with codes do not overflow, and the unit that its results are multiplied by.

    For float4 codes, of which `packed_codes.read_float4` returns four times the numbers, the row is divided by 4.
    """
    magnitude = jnp.abs(x)
    largest = jnp.max(magnitude)
    is_large, is_small = largest > np.float32(_LARGE), largest < np.float32(1 / _LARGE)

    def choose(if_large: float, if_small: float, otherwise: float) -> jax.Array:
        rest = lax.select(is_small, np.float32(if_small), np.float32(otherwise))
        return lax.select(is_large, np.float32(if_large), rest)

    quarter = 0.25 if q.decode is packed_codes.read_float4 else 1
    scaled = x * choose(quarter / _POWER, quarter * _POWER, quarter)
    unit = choose(_POWER, 1 / _POWER, 1)
    if q.offset is not None:
        # The sum of an infinite multiple of a code and one of an offset would be NaN if they differ in sign. With its
        # sign in place of the infinity, and zeros for finite numbers, the sign of the sum is the result's.
        is_infinite = magnitude == np.float32(np.inf)
        signs = lax.select(is_infinite, jnp.sign(scaled), scaled * np.float32(0))
        has_infinity = largest == np.float32(np.inf)
        scaled = lax.select(jnp.broadcast_to(has_infinity, x.shape), signs, scaled)
        unit = lax.select(has_infinity, np.float32(np.inf), unit)
    # The barrier keeps XLA from scaling the row again for each column.
    return lax.optimization_barrier(scaled), unit


def _cut_rows(q: ScaledCodes, terms: int) -> list[Chunk]:
    """Return chunks of rows so small that their bytes and their sums of `terms` rows stay in the cache of a CPU.

    They also keep these arrays below the size from which malloc maps new pages in each call.
    """
    depth = q.codes.shape[0]
    most = _BYTE_CHUNK if q.codes.dtype in dtypes.EIGHT_BITS else _CHUNK
    step = math.lcm(terms, *(run for run in q.list_runs(0) if run != depth))
    count = min(-(-q.codes.size // most), _MOST_CHUNKS, depth // step)
    length = -(-depth // (step * count)) * step
    return [Chunk(start, min(length, depth - start)) for start in range(0, depth, length)]


def _take_rows(q: ScaledCodes, role: Role, chunk: Chunk) -> tuple[jax.Array, jax.Array, Any, Any]:
    """Return the codes of a chunk, [K, columns], their scale, zero point and offset, [entries, 1 or columns]."""
    columns = math.prod(q.codes.shape[1:])

    def take(part: jax.Array) -> jax.Array:
        expanded = q.expand(part, role.free)
        if any(n != 1 for n in expanded.shape[1:]):
            expanded = jnp.broadcast_to(expanded, (expanded.shape[0], *q.codes.shape[1:]))
        flat = expanded.reshape(expanded.shape[0], -1)
        is_whole = flat.shape[0] == 1 or chunk.length == q.codes.shape[0]
        return flat if is_whole else chunk.take(flat, 0, q.codes.shape[0] // flat.shape[0])

    # XLA:CPU cuts codes of less than a byte fast only at indices that it knows.
    codes = lax.slice_in_dim(q.codes.reshape(-1, columns), chunk.start, chunk.start + chunk.length)
    zero_point = None if q.zero_point is None else take(q.zero_point)
    return codes, take(q.scale), zero_point, None if q.offset is None else take(q.offset)


# A jit, so that JAX keeps the trace: chunks of the same length have the same operations.
@functools.partial(jax.jit, inline=True, static_argnames=("decode_levels", "terms"))
def _contract_rows(
    x: jax.Array, codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, offset: jax.Array | None,
    done: jax.Array, decode_levels: Callable[..., jax.Array] | None, terms: int,
) -> jax.Array:  # fmt: skip
    """Return the contraction of the rows of a chunk, computed after `done`: [planes, columns / planes]."""
    groups, count, dtype = codes.shape[0] // terms, packed_codes.count_per_byte(codes), np.dtype(codes.dtype)
    words = packed_codes.read_words(codes) if terms >= _WORD_TERMS else None
    words = None if words is None else lax.bitcast_convert_type(words, jnp.int32)
    stored = packed_codes.read_bytes(codes) if words is None else words
    if stored is not codes:  # a copy, which is made when it is needed
        # The barrier keeps the copy in two dimensions: XLA:CPU copies a slice in three dimensions code by code.
        stored = lax.optimization_barrier(barriers.wait_for(stored, done))
    factors, rows = x.reshape(groups, terms), stored.reshape(groups, terms, -1)
    scale = _spread_entries(scale, groups)
    zero_point = None if zero_point is None else _spread_entries(zero_point, groups)
    offset = None if offset is None else _spread_entries(offset, groups) * jnp.sum(factors, axis=1, keepdims=True)
    if words is not None:
        return _contract_words(factors, rows, scale, zero_point, offset, dtype, decode_levels)
    sums = []
    for position in range(count):
        plane_zero_point = None if zero_point is None else _take_plane(zero_point, position, count)

        def decode(
            part: jax.Array, position: int = position, zero_point: jax.Array | None = plane_zero_point
        ) -> jax.Array:
            if decode_levels is not None:
                return decode_levels(part, position * 8 // count)
            if zero_point is not None and count > 1:
                width, signed = 8 // count, dtypes.read_bounds(dtype)[0] < 0
                base = packed_codes.compute_base(zero_point, width, signed=signed)
                return packed_codes.read_steps(part, width, position * width, base, signed=signed)
            steps = packed_codes.read_plane(part, dtype, position, count)
            return (steps if zero_point is None else steps - zero_point.astype(jnp.int32)).astype(jnp.float32)

        products: list[jax.Array] = []
        if zero_point is not None:
            # XLA would write the zero points of each group of rows to memory if several arrays of products read them.
            products = [factors[:, i, None] * decode(rows[:, i]) for i in range(terms)]
        else:
            for start in range(0, terms, _SLICES):
                several = factors[:, start : start + _SLICES, None] * decode(rows[:, start : start + _SLICES])
                products += [lax.index_in_dim(several, i, 1, keepdims=False) for i in range(several.shape[1])]
        total = add_terms(products, decode_levels) * _take_plane(scale, position, count)
        sums.append(_sum_groups(total if offset is None else total + _take_plane(offset, position, count)))
    return jnp.stack(sums)


def _contract_words(
    factors: jax.Array,
    rows: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    offset: jax.Array | None,
    dtype: np.dtype,
    decode_levels: Callable[..., jax.Array] | None,
) -> jax.Array:
    """Return the contraction of rows of 4-bit codes, read as uint32 words: [1, columns].

    The codes of a word are the last dimension of the loop, so that a vector holds neighboring columns: XLA:CPU reads a
    word for all of its codes at once, and each code only once.

    Args:
        factors: float32 [groups, terms].
        rows: the bits of the words, int32 [groups, terms, words].
        scale: float32 [groups, columns or 1].
        zero_point: [groups, columns or 1], or None.
        offset: the offset times the sum of the factors, float32 [groups, columns or 1], or None.
        dtype: the dtype of the codes.
        decode_levels: as `ScaledCodes.decode`.
    """
    groups, terms, words = rows.shape
    shape = (groups, words, 8)

    def spread(part: jax.Array) -> jax.Array:
        return part[:, None] if part.shape[1] == 1 else part.reshape(shape)

    first_bit = lax.broadcasted_iota(jnp.int32, shape, 2) * np.int32(4)
    is_signed = decode_levels is None and dtypes.read_bounds(dtype)[0] < 0
    base = None if zero_point is None else packed_codes.compute_base(spread(zero_point), 4, signed=is_signed)
    products = []
    for i in range(terms):
        row, factor = (lax.index_in_dim(part, i, 1, keepdims=False) for part in (rows, factors))
        row = lax.broadcast_in_dim(row, shape, (0, 1))
        if decode_levels is not None:
            weights = decode_levels(row, first_bit)
        elif base is None:
            weights = packed_codes.read_lane(row, dtype, first_bit).astype(jnp.float32)
        else:
            weights = packed_codes.read_steps(row, 4, first_bit, base, signed=is_signed)
        products.append(lax.broadcast_in_dim(factor, shape, (0,)) * weights)
    total = add_terms(products, decode_levels) * spread(scale)
    total = total if offset is None else total + spread(offset)
    return _sum_groups(total.reshape(groups, -1))[None]


def add_terms(products: Sequence[jax.Array], decode_levels: Callable[..., jax.Array] | None) -> jax.Array:
    """Return the sum of the products of a loop.

    Products with steps are added up as two sums, because a processor adds to one while the other waits. Decoding levels
    takes longer than adding, and needs the registers.
    """
    if decode_levels is not None:
        return functools.reduce(jnp.add, products)
    even, odd = (functools.reduce(jnp.add, products[start::2]) for start in (0, 1))
    return even + odd


def sum_rows(products: jax.Array) -> jax.Array:
    """Return the sums over all dimensions but the first: float32 [rows].

    The vectors of a row are added first, and then the lanes of their sum, in pairs of neighbors: in the order of
    XLA:CPU's product with a vector of ones. XLA:CPU compiles each of its products with a vector anew, but equal loops
    once, and its reductions take longer than both.
    """
    # The barrier keeps XLA from fusing this sum with the loop of products.
    flat = lax.optimization_barrier(products).reshape(products.shape[0], -1)
    rows, columns = flat.shape
    count = columns // _SUM_LANES
    if rows % _SUM_LANES or not 0 < count <= _MOST_SUMMED:
        return lax.dot(flat, jnp.ones(columns, jnp.float32), precision=lax.Precision.HIGHEST)

    def cut(array: jax.Array, start: int, length: int = 1) -> jax.Array:
        # In two dimensions: XLA would move a reshape behind each sum, in as many turns of its passes.
        return lax.slice_in_dim(array, start, start + length, axis=1)

    total = functools.reduce(jnp.add, [cut(flat, i * _SUM_LANES, _SUM_LANES) for i in range(count)])
    if count > 1:
        # LLVM vectorizes the sum of eight neighbors if they are an array of their own.
        total = lax.optimization_barrier(total)
    sums = [cut(total, lane) for lane in range(_SUM_LANES)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    rest = [cut(flat, i) for i in range(count * _SUM_LANES, columns)]
    y = sums[0] + functools.reduce(jnp.add, rest) if rest else sums[0]
    # The barrier keeps XLA from computing the sums again in each loop that reads them. As a part of another reduction
    # they would change its order.
    return lax.optimization_barrier(y.reshape(rows))


def _sum_groups(products: jax.Array) -> jax.Array:
    """Return the sum over the first dimension. The barrier keeps XLA from fusing it with the loop of products."""
    return jnp.sum(lax.optimization_barrier(products), axis=0)


def _spread_entries(part: jax.Array, groups: int) -> jax.Array:
    """Return a scale or zero point of [entries, columns] as [groups, columns], an entry for each group of rows."""
    entries, columns = part.shape
    return jnp.broadcast_to(part[:, None], (entries, groups // entries, columns)).reshape(groups, columns)


def _take_plane(part: jax.Array, position: int, count: int) -> jax.Array:
    """Return the columns of a scale or zero point that belong to one position of the codes in their bytes."""
    return part if part.shape[1] == 1 else part[:, position::count]
