"""The batched integer contraction [B, M, K] by [B, K, N], in the form that each backend runs fast.

XLA:CPU has a vector kernel for int8 by int8 to int32, if lhs has two rows or more and both operands have one of the
layouts used here. Similar contractions (uint8, a single row, the contracted dimension elsewhere) run as scalar loops
that are 10 to 300 times slower.

Subtracting the zero points s and t first would widen the operands beyond int8. Instead, with K the number of terms:

sum (a - s) (b - t) = sum a b - t sum a - s (sum b - K t)

The identity is exact, because every term is computed modulo 2**32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

# The product of a single row and a matrix is a sum of scaled rows. One loop reads rows at several places of the
# matrix, and several neighboring rows at each place. With 16 rows the vector registers of a CPU are in use; with more
# they would spill to memory. Rows of a multiple of 4096 bytes are all stored in the same lines of a first-level cache,
# which holds 8 of them or 12.
_PLACES, _NEIGHBORS = 4, 4
_PLACES_OF_PAGES, _NEIGHBORS_OF_PAGES = 2, 4
_PAGE = 4096
# A single row that `contract_row_by_lanes` does not take is padded to two rows, or to four if rhs has as many elements.
_FOUR_ROWS = 2**22
# From this number of rows of lhs on, no row of ones is appended to it.
_MANY_ROWS = 2**10
# The number of rows that the kernel multiplies with rhs to sum its columns: it needs several rows.
_ROWS = 8
# Up to this number of elements, such rows are a constant of the program.
_LARGEST_CONSTANT = 2**15

LANES = 16
# The largest and the smallest number of products of a lane that one loop adds up. It adds up the same number in each
# place, so this number must divide that of all products of the lane. With fewer, it would write too many sums.
_MOST_TERMS, _FEWEST_TERMS = 32, 8
# With fewer codes, the second thread costs more than it saves.
_FEWEST_FOR_LANES = 2**18

Steps = jax.Array | None


def contract_integers(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool, is_unpacked: bool = False
) -> jax.Array:
    """Return the batched contraction of two int8 operands with zero points.

    out = sum over k of (lhs - lhs_steps) (rhs - rhs_steps), modulo 2**32

    Args:
        lhs: int8 [B, M, K].
        rhs: int8 [B, K, N], or [B, N, K] if `transposed`.
        lhs_steps: int32 [B or 1, M or 1], each from -128 to 127, or None for 0.
        rhs_steps: int32 [B or 1, N or 1], each from -128 to 127, or None for 0.
        transposed: Static. Whether the contracted dimension of rhs is its last.
        is_unpacked: Static. Whether an operand is the result of a conversion from 2 or 4 bits, which is slow in a loop
            of its reader.

    Returns:
        int32 [B, M, N].
    """
    return make_contraction(transposed, is_unpacked)(lhs, rhs, lhs_steps, rhs_steps)


def _contract_on_platform(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool, is_unpacked: bool
) -> jax.Array:
    operands = (lhs, rhs, lhs_steps, rhs_steps)
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    if lhs_steps is None and rhs_steps is None and 1 not in (lhs.shape[1], columns):
        return _multiply(lhs, rhs, transposed)  # the same program for every backend
    cpu = functools.partial(_contract_on_cpu, transposed=transposed, is_unpacked=is_unpacked)
    return lax.platform_dependent(*operands, cpu=cpu, default=functools.partial(_contract_plain, transposed=transposed))


def _contract_on_cpu(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool, is_unpacked: bool
) -> jax.Array:
    batch, rows, depth = lhs.shape
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    if columns == 1:  # the transposed product has a single row
        row = _contract_row_last(rhs.reshape(batch, 1, depth), lhs, rhs_steps, lhs_steps, is_unpacked=is_unpacked)
        return row.reshape(batch, rows, 1)
    if rows == 1:
        if not transposed:
            return _sum_products(lhs, rhs, lhs_steps, rhs_steps)
        return _contract_row_last(lhs, rhs, lhs_steps, rhs_steps, is_unpacked=is_unpacked)
    ones = make_ones(batch, depth)
    row_sums = column_sums = None
    # The sums over k of rhs are a contraction of rhs with ones. If rhs is the larger operand, a row of ones is appended
    # to lhs, so that one contraction gives them too and reads rhs only once. If lhs is the larger one, the copy that
    # appends the row would cost more than a second contraction. With the row, both contractions below use the longer
    # lhs: if one of them used the original, XLA would run the operation that produces lhs, for example a quantization,
    # twice. With many rows a second contraction takes a hundredth of the first, and XLA compiles the operation that
    # produces lhs once for all contractions. Symbolic sizes cannot be compared, so the row is not appended for them.
    appends_ones = lhs_steps is not None and all(isinstance(n, int) for n in (rows, columns))
    appends_ones = appends_ones and rows < min(columns, _MANY_ROWS)
    if appends_ones:
        lhs = lax.concatenate([lhs, jnp.ones((batch, 1, depth), jnp.int8)], 1)
    acc = _multiply(lhs, rhs, transposed)
    if appends_ones:
        acc, column_sums = (lax.slice_in_dim(acc, *ends, axis=1) for ends in ((0, rows), (rows, rows + 1)))
    elif lhs_steps is not None:
        column_sums = lax.slice_in_dim(_multiply(ones, rhs, transposed), 0, 1, axis=1)
    if rhs_steps is not None:
        row_sums = lax.slice(_multiply(lhs, ones, True), (0, 0, 0), (batch, rows, 1))
    return _correct_product(acc, row_sums, column_sums, lhs_steps, rhs_steps, depth)


def _contract_row_last(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, is_unpacked: bool
) -> jax.Array:
    """Return the contraction of a single row, [B, 1, K] by [B, N, K]."""
    batch, _, depth = lhs.shape
    terms = None if is_unpacked else choose_row_terms(rhs)
    if terms is not None:
        row = lhs.astype(jnp.int32)[:, 0]
        row = row if lhs_steps is None else row - jnp.broadcast_to(lhs_steps, row.shape)
        acc = contract_row_by_lanes(row, rhs, terms)
        return _subtract_row_steps(acc, row, rhs_steps)[:, None]
    # The kernel needs several rows. One of the rows added here consists of ones, so that the same contraction also
    # gives the sums over k of rhs. Two rows are enough, but with four it reads a large rhs faster.
    elements = rhs.shape[1] * depth
    is_small = isinstance(elements, int) and elements < _FOUR_ROWS
    padding = [jnp.ones((batch, 1, depth), jnp.int8), jnp.zeros((batch, 0 if is_small else 2, depth), jnp.int8)]
    acc = _multiply(lax.concatenate([lhs, *padding], 1), rhs, True)
    row_sums = None if rhs_steps is None else jnp.sum(lhs, axis=2, keepdims=True, dtype=jnp.int32)
    return _correct_product(acc[:, :1], row_sums, acc[:, 1:2], lhs_steps, rhs_steps, depth)


def make_ones(batch: int, depth: int) -> jax.Array:
    """Return int8 [batch, 8, depth] with ones in row 0 of each batch, to sum the columns of another operand."""
    size = batch * _ROWS * depth
    if not isinstance(size, int) or size > _LARGEST_CONSTANT:
        return jnp.ones((batch, _ROWS, depth), jnp.int8)
    # XLA replaces a constant of equal elements by a broadcast, which is a loop to compile and to run. The other rows
    # are therefore zeros.
    rows = np.zeros((batch, _ROWS, depth), np.int8)
    rows[:, 0] = 1
    return jnp.asarray(rows)


def _multiply(lhs: jax.Array, rhs: jax.Array, transposed: bool) -> jax.Array:
    """Return the batched contraction without zero points."""
    # Drop a batch dimension of 1, so that XLA sees a plain product of matrices.
    last = 2 if transposed else 1
    if lhs.shape[0] == 1:
        dimensions: Any = (((1,), (last - 1,)), ((), ()))
        acc = lax.dot_general(lax.squeeze(lhs, (0,)), lax.squeeze(rhs, (0,)), dimensions, None, jnp.int32)
        return lax.expand_dims(acc, (0,))
    return lax.dot_general(lhs, rhs, (((2,), (last,)), ((0,), (0,))), preferred_element_type=jnp.int32)


def _correct_product(
    acc: jax.Array, row_sums: Steps, column_sums: Steps, lhs_steps: Steps, rhs_steps: Steps, depth: int
) -> jax.Array:
    """Return the accumulator after subtracting the contributions of the zero points.

    Args:
        acc: int32 [B, M, N], the contraction without zero points.
        row_sums: int32 [B, M, 1], the sums over k of lhs; needed for rhs_steps.
        column_sums: int32 [B, 1, N], the sums over k of rhs; needed for lhs_steps.
        lhs_steps: int32 [B or 1, M or 1], or None for 0.
        rhs_steps: int32 [B or 1, N or 1], or None for 0.
        depth: K.
    """
    if rhs_steps is not None:
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(rhs_steps, (1,)), row_sums), acc.shape))
    if lhs_steps is not None:
        assert column_sums is not None
        if rhs_steps is not None:
            centred = _multiply_int32(lax.expand_dims(rhs_steps, (1,)), jnp.asarray(depth, jnp.int32)[None, None, None])
            column_sums = jnp.broadcast_to(column_sums, (*column_sums.shape[:2], acc.shape[2])) - centred
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(lhs_steps, (2,)), column_sums), acc.shape))
    return acc


def _multiply_int32(left: jax.Array, right: Any) -> jax.Array:
    """Return the product of two int32 arrays of one rank, broadcast against each other."""
    shape = lax.broadcast_shapes(left.shape, right.shape)
    return lax.mul(_spread_sums(left, shape), _spread_sums(right, shape))


def _spread_sums(value: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """Return an array broadcast along its dimensions of 1; `jnp.broadcast_to` is slower to trace."""
    return value if value.shape == shape else lax.broadcast_in_dim(value, shape, range(len(shape)))


def _sum_products(lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps) -> jax.Array:
    """Return the contraction of a single row, [B, 1, K] by [B, K, N], as a sum of scaled rows of rhs.

    The kernel does not accept a single row in this layout, but XLA vectorizes element-wise work on the rows of rhs.
    """
    batch, depth, columns = rhs.shape
    row = lhs.astype(jnp.int32)[:, 0]
    if lhs_steps is not None:
        row = row - jnp.broadcast_to(lhs_steps, row.shape)
    # The matrix is cut into `places` parts of the same length. One loop adds up the next rows of all parts; the sum
    # over its results follows. The rows that are left over are added one by one.
    is_aligned = isinstance(columns, int) and columns % _PAGE == 0
    places, neighbors = (_PLACES_OF_PAGES, _NEIGHBORS_OF_PAGES) if is_aligned else (_PLACES, _NEIGHBORS)
    length = depth // (places * neighbors)
    head = length * places * neighbors
    acc = jnp.zeros((batch, columns), jnp.int32)
    if length:
        left = row[:, :head].reshape(batch, places, length, neighbors)
        right = rhs[:, :head].reshape(batch, places, length, neighbors, columns)
        positions = itertools.product(range(places), range(neighbors))
        terms = [_scale_rows(left[:, i, :, j], right[:, i, :, j]) for i, j in positions]
        # The barrier keeps XLA from fusing this reduction with the loop of products.
        acc = jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, terms)), axis=1, dtype=jnp.int32)
    for k in range(head, depth):
        acc = acc + _scale_rows(row[:, k], rhs[:, k])
    return _subtract_row_steps(acc, row, rhs_steps)[:, None]


def _subtract_row_steps(acc: jax.Array, row: jax.Array, rhs_steps: Steps) -> jax.Array:
    """Return the int32 products [B, N] of a row, [B, K], after subtracting the contributions of rhs's zero points."""
    if rhs_steps is None:
        return acc
    sums = jnp.sum(row, axis=1, keepdims=True, dtype=jnp.int32)
    return acc - jnp.broadcast_to(_multiply_int32(rhs_steps, sums), acc.shape)


def _scale_rows(factors: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(factors, rows.shape, tuple(range(factors.ndim))) * rows.astype(jnp.int32)


def _contract_plain(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Steps, rhs_steps: Steps, *, transposed: bool
) -> jax.Array:
    axis = 2 if transposed else 1
    row_sums = None if rhs_steps is None else lax.expand_dims(_sum_axis(lhs, 2), (2,))
    column_sums = None if lhs_steps is None else lax.expand_dims(_sum_axis(rhs, axis), (1,))
    acc = _multiply(lhs, rhs, transposed)
    return _correct_product(acc, row_sums, column_sums, lhs_steps, rhs_steps, lhs.shape[2])


def _sum_axis(x: jax.Array, axis: int) -> jax.Array:
    """Return the int32 sum of int8 along an axis; `jnp.sum` and indexing are slower to trace."""
    return lax.reduce(lax.convert_element_type(x, jnp.int32), np.int32(0), lax.add, (axis,))


def _contract_under_vmap(
    transposed: bool, is_unpacked: bool, size: int, batched: Sequence[bool], *operands: Any
) -> tuple[jax.Array, bool]:
    """Return the contraction of operands under vmap, as one larger contraction.

    If only lhs has the mapped axis, the axis becomes more rows. Otherwise it becomes a larger batch.
    """
    contract = functools.partial(contract_integers, transposed=transposed, is_unpacked=is_unpacked)
    lhs, rhs, lhs_steps, rhs_steps = batch_all(size, batched, operands)
    _, batch, rows, depth = lhs.shape
    if not batched[1] and not batched[3]:
        longer = jnp.swapaxes(lhs, 0, 1).reshape(batch, size * rows, depth)
        if lhs_steps is not None:
            wide = jnp.broadcast_to(lhs_steps, (*lhs_steps.shape[:2], rows))
            lhs_steps = jnp.swapaxes(wide, 0, 1).reshape(-1, size * rows)
        acc = contract(longer, operands[1], lhs_steps, operands[3])
        return jnp.swapaxes(acc.reshape(batch, size, rows, -1), 0, 1), True
    lhs_steps, rhs_steps = (
        s if s is None else jnp.broadcast_to(s, (size, batch, s.shape[2])).reshape(size * batch, s.shape[2])
        for s in (lhs_steps, rhs_steps)
    )
    folded_lhs, folded_rhs = (x.reshape(size * batch, *x.shape[2:]) for x in (lhs, rhs))
    acc = contract(folded_lhs, folded_rhs, lhs_steps, rhs_steps)
    return acc.reshape(size, batch, *acc.shape[1:]), True


def batch_all(size: int, batched: Sequence[bool], operands: tuple[Any, ...]) -> Any:
    """Return the operands of a vmap with the mapped axis in front of each; None stays None."""
    pairs = zip(operands, batched, strict=True)
    return tuple(x if x is None or is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in pairs)


# Created once for each pair of arguments, because JAX reuses a trace only for the same function object.
@functools.cache
def make_contraction(transposed: bool, is_unpacked: bool) -> Callable[[jax.Array, jax.Array, Steps, Steps], jax.Array]:
    """Return `contract_integers` with its static arguments."""
    function = custom_vmap(functools.partial(_contract_on_platform, transposed=transposed, is_unpacked=is_unpacked))
    function.def_vmap(functools.partial(_contract_under_vmap, transposed, is_unpacked))
    return function


# A single row, lane by lane.


def choose_row_terms(codes: jax.Array) -> int | None:
    """Return how many products `contract_row_by_lanes` adds up in one loop; None if it is not faster, or impossible.

    Args:
        codes: int8 [..., K]. Dimensions may be symbolic, as in `jax.export`.
    """
    is_large = isinstance(codes.size, int) and codes.size >= _FEWEST_FOR_LANES
    return choose_lane_terms(codes.shape[-1]) if is_large else None


def choose_lane_terms(depth: int) -> int | None:
    """Return how many products of a lane one loop adds up, or None if no number divides the products of `depth`."""
    groups, rest = divmod(depth, LANES)
    return next((n for n in range(_MOST_TERMS, _FEWEST_TERMS - 1, -1) if not rest and groups % n == 0), None)


def contract_row_by_lanes(row: jax.Array, codes: jax.Array, terms: int) -> jax.Array:
    """Return the contraction of a row with each row of the codes.

    Args:
        row: integers [B, K], each from -2**15 to 2**15 - 1.
        codes: int8 [B, N, K].
        terms: what `choose_row_terms` returns.

    Returns:
        int32 [B, N], modulo 2**32.
    """
    batch, columns, depth = codes.shape
    cut = (depth // (terms * LANES), terms, LANES)
    codes = codes.reshape(batch, columns, *cut)
    # As int16 a long row stays in the first-level cache, where the loop reads it for each column. The barrier keeps XLA
    # from computing it again for each column.
    factors = lax.optimization_barrier(row.astype(jnp.int16)).reshape(batch, 1, *cut)
    products = [factors[:, :, :, i].astype(jnp.int32) * codes[:, :, :, i].astype(jnp.int32) for i in range(terms)]
    # The barrier keeps XLA from fusing this reduction with the loop of products.
    return jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, products)), axis=(2, 3), dtype=jnp.int32)
