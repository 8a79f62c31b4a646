"""The integer contraction of any dimensions, as products of matrices that each backend runs fast.

An operand's dimensions have roles: batch, free, contracted. The free dimensions are merged into rows and columns, and
the contracted ones into one, after a transpose in memory where they are not neighbors already: XLA:CPU would fold a
transpose into the contraction, which would then lose its vector kernel. Of rhs the kernel takes [K, N] and [N, K], so
weights that are stored either way are read as they are.

Codes of 2 or 4 bits are contracted in planes, every second or fourth column after the other, if the other operand has
few rows: then the conversion takes longer than the contraction, and XLA:CPU vectorizes only the conversion of a plane.

Arrays with explicit shardings are contracted by `jax.lax` as they are, because JAX cannot infer the shardings of the
reshapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from .._core import dtypes, granularity, recording, sharding
from . import barriers, packed_codes, signed_codes

# Products of matrices, [B, M, K] by [B, K, N], in the form that each backend runs fast.
#
# XLA:CPU has a vector kernel for int8 by int8 to int32, if lhs has two rows or more and both operands have one of the
# layouts used here. Similar contractions (uint8, a single row, the contracted dimension elsewhere) run as scalar loops
# that are 10 to 300 times slower.
#
# Subtracting the zero points s and t first would widen the operands beyond int8. Instead, with K the number of terms:
#
# sum (a - s) (b - t) = sum a b - t sum a - s (sum b - K t)
#
# The identity is exact, because every term is computed modulo 2**32.


# The product of a single row and a matrix is a sum of scaled rows. One loop reads rows in several segments of the
# matrix, and several neighboring rows in each segment. With 16 rows the vector registers of a CPU are in use; with more
# they would spill to memory. Rows of a multiple of 4096 bytes are all stored in the same lines of a first-level cache,
# which holds 8 of them or 12.
_SEGMENTS, _NEIGHBORS = 4, 4
_SEGMENTS_OF_PAGES, _NEIGHBORS_OF_PAGES = 2, 4
_PAGE = 4096
# A single row that `contract_row_by_lanes` does not take is padded to two rows, or to four if rhs has as many elements.
_FOUR_ROWS = 2**22
# From this number of rows of lhs on, no row of ones is appended to it.
_MANY_ROWS = 2**10
# The number of rows that the kernel multiplies with rhs to sum its columns: it needs several rows.
_ROWS = 8
# Up to this number of elements, such rows are a constant of the program.
_LARGEST_CONSTANT = 2**15
# Of depths that are multiples of the first number, XLA's products of int8 were right with CUDA; other depths are
# increased to a multiple of the second one, which the tensor cores contract at once.
_DEPTH_UNIT, _PADDED_UNIT = 4, 32

LANES = 16
# The largest and the smallest number of products of a lane that one loop adds up. It adds up the same number in each
# segment, so this number must divide the number of all products of the lane. With fewer, it would write too many sums.
_MOST_TERMS, _FEWEST_TERMS = 32, 8
# Twice as many lanes, whose sums still stay in registers, need half as many terms. With jax 0.10 they are slower.
_WIDE_LANES, _MOST_WIDE_TERMS = 32, 16
_HAS_WIDE_LANES = jax.__version_info__ >= (0, 12)
# With fewer codes, the second thread costs more than it saves.
_FEWEST_FOR_LANES = 2**18

# The int32 code of 0.0 in an operand that has been shifted to int8; None for 0.
Center = jax.Array | None


def contract_integers(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *, transposed: bool,
    is_unpacked: bool = False,
) -> jax.Array:  # fmt: skip
    """Return the batched contraction of two int8 operands with zero points.

    out = sum over k of (lhs - lhs_center) (rhs - rhs_center), modulo 2**32

    Args:
        lhs: int8 [B, M, K].
        rhs: int8 [B, K, N], or [B, N, K] if `transposed`.
        lhs_center: int32 [B or 1, M or 1], each from -128 to 127, or None for 0.
        rhs_center: int32 [B or 1, N or 1], each from -128 to 127, or None for 0.
        transposed: Static. Whether the contracted dimension of rhs is its last.
        is_unpacked: Static. Whether an operand is the result of a conversion from 2 or 4 bits, which is slow in a loop
            of its reader.

    Returns:
        int32 [B, M, N].
    """
    return make_contraction(transposed, is_unpacked)(lhs, rhs, lhs_center, rhs_center)


def _contract_on_platform(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *, transposed: bool, is_unpacked: bool
) -> jax.Array:
    columns, depth = rhs.shape[1] if transposed else rhs.shape[2], lhs.shape[2]
    is_aligned = isinstance(depth, int) and depth % _DEPTH_UNIT == 0
    multiply, padded = (functools.partial(f, transposed=transposed) for f in (_multiply, _multiply_padded))
    if lhs_center is None and rhs_center is None and 1 not in (lhs.shape[1], columns):
        # The same program for every backend, apart from the length.
        return multiply(lhs, rhs) if is_aligned else lax.platform_dependent(lhs, rhs, cuda=padded, default=multiply)
    cpu = functools.partial(_contract_on_cpu, transposed=transposed, is_unpacked=is_unpacked)
    plain = functools.partial(_contract_plain, transposed=transposed)
    cuda = plain if is_aligned else functools.partial(plain, multiply=padded)
    return lax.platform_dependent(lhs, rhs, lhs_center, rhs_center, cpu=cpu, cuda=cuda, default=plain)


def _contract_on_cpu(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *, transposed: bool, is_unpacked: bool
) -> jax.Array:
    batch, rows, depth = lhs.shape
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    if columns == 1:  # the transposed product has a single row
        row = _contract_row_last(rhs.reshape(batch, 1, depth), lhs, rhs_center, lhs_center, is_unpacked=is_unpacked)
        return row.reshape(batch, rows, 1)
    if rows == 1:
        if not transposed:
            return _sum_products(lhs, rhs, lhs_center, rhs_center)
        return _contract_row_last(lhs, rhs, lhs_center, rhs_center, is_unpacked=is_unpacked)
    ones = make_ones(batch, depth)
    row_sums = column_sums = None
    # The sums over k of rhs are a contraction of rhs with ones. If rhs is the larger operand, a row of ones is appended
    # to lhs, so that one contraction gives them too and reads rhs only once. If lhs is the larger one, the copy that
    # appends the row would cost more than a second contraction. With the row, both contractions below use the longer
    # lhs: if one of them used the original, XLA would run the operation that produces lhs, for example a quantization,
    # twice. With many rows a second contraction takes a hundredth of the first, and XLA compiles the operation that
    # produces lhs once for all contractions. Symbolic sizes cannot be compared, so the row is not appended for them.
    appends_ones = lhs_center is not None and all(isinstance(n, int) for n in (rows, columns))
    appends_ones = appends_ones and rows < min(columns, _MANY_ROWS)
    if appends_ones:
        lhs = lax.concatenate([lhs, jnp.ones((batch, 1, depth), jnp.int8)], 1)
    acc = _multiply(lhs, rhs, transposed)
    if appends_ones:
        acc, column_sums = (lax.slice_in_dim(acc, *ends, axis=1) for ends in ((0, rows), (rows, rows + 1)))
    elif lhs_center is not None:
        column_sums = lax.slice_in_dim(_multiply(ones, rhs, transposed), 0, 1, axis=1)
    if rhs_center is not None:
        row_sums = lax.slice(_multiply(lhs, ones, True), (0, 0, 0), (batch, rows, 1))
    return _correct_product(acc, row_sums, column_sums, lhs_center, rhs_center, depth)


def _contract_row_last(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *, is_unpacked: bool
) -> jax.Array:
    """Return the contraction of a single row, [B, 1, K] by [B, N, K]."""
    batch, _, depth = lhs.shape
    cut = None if is_unpacked else choose_row_cut(rhs)
    if cut is not None:
        row = lhs.astype(jnp.int32)[:, 0]
        row = row if lhs_center is None else row - jnp.broadcast_to(lhs_center, row.shape)
        acc = contract_row_by_lanes(row, rhs, *cut)
        return _subtract_row_center(acc, row, rhs_center)[:, None]
    # The kernel needs several rows. One of the rows added here consists of ones, so that the same contraction also
    # gives the sums over k of rhs. Two rows are enough, but with four it reads a large rhs faster.
    elements = rhs.shape[1] * depth
    is_small = isinstance(elements, int) and elements < _FOUR_ROWS
    padding = [jnp.ones((batch, 1, depth), jnp.int8), jnp.zeros((batch, 0 if is_small else 2, depth), jnp.int8)]
    acc = _multiply(lax.concatenate([lhs, *padding], 1), rhs, True)
    row_sums = None if rhs_center is None else jnp.sum(lhs, axis=2, keepdims=True, dtype=jnp.int32)
    return _correct_product(acc[:, :1], row_sums, acc[:, 1:2], lhs_center, rhs_center, depth)


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


def _multiply_padded(lhs: jax.Array, rhs: jax.Array, transposed: bool) -> jax.Array:
    """Return the batched contraction without zero points, of operands that zeros make longer.

    With CUDA, XLA returned wrong products of int8 whose depth is no multiple of 4, often twice the right ones: in 94 of
    136 cases with depths from 2 to 257, on an H200 with jaxlib 0.11.2. The barrier keeps XLA from removing the zeros.
    """
    missing = -lhs.shape[2] % _PADDED_UNIT
    padded = []
    for x, axis in ((lhs, 2), (rhs, 2 if transposed else 1)):
        edges = [(0, missing if a == axis else 0, 0) for a in range(3)]
        padded.append(lax.optimization_barrier(lax.pad(x, np.int8(0), edges)))
    return _multiply(padded[0], padded[1], transposed)


def _correct_product(
    acc: jax.Array, row_sums: jax.Array | None, column_sums: jax.Array | None, lhs_center: Center, rhs_center: Center,
    depth: int,
) -> jax.Array:  # fmt: skip
    """Return the accumulator after subtracting the contributions of the zero points.

    Args:
        acc: int32 [B, M, N], the contraction without zero points.
        row_sums: int32 [B, M, 1], the sums over k of lhs; needed for rhs_center.
        column_sums: int32 [B, 1, N], the sums over k of rhs; needed for lhs_center.
        lhs_center: int32 [B or 1, M or 1], or None for 0.
        rhs_center: int32 [B or 1, N or 1], or None for 0.
        depth: K.
    """
    if rhs_center is not None:
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(rhs_center, (1,)), row_sums), acc.shape))
    if lhs_center is not None:
        assert column_sums is not None
        if rhs_center is not None:
            centred = _multiply_int32(
                lax.expand_dims(rhs_center, (1,)), jnp.asarray(depth, jnp.int32)[None, None, None]
            )
            column_sums = jnp.broadcast_to(column_sums, (*column_sums.shape[:2], acc.shape[2])) - centred
        acc = lax.sub(acc, _spread_sums(_multiply_int32(lax.expand_dims(lhs_center, (2,)), column_sums), acc.shape))
    return acc


def _multiply_int32(left: jax.Array, right: Any) -> jax.Array:
    """Return the product of two int32 arrays of one rank, broadcast against each other."""
    shape = lax.broadcast_shapes(left.shape, right.shape)
    return lax.mul(_spread_sums(left, shape), _spread_sums(right, shape))


def _spread_sums(value: jax.Array, shape: Sequence[Any]) -> jax.Array:
    """Return an array broadcast along its dimensions of 1; `jnp.broadcast_to` is slower to trace."""
    return value if value.shape == shape else lax.broadcast_in_dim(value, shape, range(len(shape)))


def _sum_products(lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center) -> jax.Array:
    """Return the contraction of a single row, [B, 1, K] by [B, K, N], as a sum of scaled rows of rhs.

    The kernel does not accept a single row in this layout, but XLA vectorizes element-wise work on the rows of rhs.
    """
    batch, depth, columns = rhs.shape
    row = lhs.astype(jnp.int32)[:, 0]
    if lhs_center is not None:
        row = row - jnp.broadcast_to(lhs_center, row.shape)
    row, rhs = barriers.tie_to_row(row, rhs, is_reshaped=True)
    # The matrix is cut into `segments` parts of the same length. One loop adds up the next rows of all parts; the sum
    # over its results follows. The rows that are left over are added one by one.
    is_aligned = isinstance(columns, int) and columns % _PAGE == 0
    segments, neighbors = (_SEGMENTS_OF_PAGES, _NEIGHBORS_OF_PAGES) if is_aligned else (_SEGMENTS, _NEIGHBORS)
    length = depth // (segments * neighbors)
    head = length * segments * neighbors
    acc = jnp.zeros((batch, columns), jnp.int32)
    if length:
        left = row[:, :head].reshape(batch, segments, length, neighbors)
        right = rhs[:, :head].reshape(batch, segments, length, neighbors, columns)
        positions = itertools.product(range(segments), range(neighbors))
        terms = [_scale_rows(left[:, i, :, j], right[:, i, :, j]) for i, j in positions]
        # The barrier keeps XLA from fusing this reduction with the loop of products.
        acc = jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, terms)), axis=1, dtype=jnp.int32)
    for k in range(head, depth):
        acc = acc + _scale_rows(row[:, k], rhs[:, k])
    return _subtract_row_center(acc, row, rhs_center)[:, None]


def _subtract_row_center(acc: jax.Array, row: jax.Array, rhs_center: Center) -> jax.Array:
    """Return the int32 products [B, N] of a row, [B, K], after subtracting the contributions of rhs's zero points."""
    if rhs_center is None:
        return acc
    sums = jnp.sum(row, axis=1, keepdims=True, dtype=jnp.int32)
    return acc - jnp.broadcast_to(_multiply_int32(rhs_center, sums), acc.shape)


def _scale_rows(factors: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(factors, rows.shape, tuple(range(factors.ndim))) * rows.astype(jnp.int32)


def _contract_plain(
    lhs: jax.Array, rhs: jax.Array, lhs_center: Center, rhs_center: Center, *, transposed: bool,
    multiply: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    axis = 2 if transposed else 1
    row_sums = None if rhs_center is None else lax.expand_dims(_sum_axis(lhs, 2), (2,))
    column_sums = None if lhs_center is None else lax.expand_dims(_sum_axis(rhs, axis), (1,))
    acc = _multiply(lhs, rhs, transposed) if multiply is None else multiply(lhs, rhs)
    return _correct_product(acc, row_sums, column_sums, lhs_center, rhs_center, lhs.shape[2])


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
    lhs, rhs, lhs_center, rhs_center = batch_all(size, batched, operands)
    _, batch, rows, depth = lhs.shape
    if not batched[1] and not batched[3]:
        longer = jnp.swapaxes(lhs, 0, 1).reshape(batch, size * rows, depth)
        if lhs_center is not None:
            wide = jnp.broadcast_to(lhs_center, (*lhs_center.shape[:2], rows))
            lhs_center = jnp.swapaxes(wide, 0, 1).reshape(-1, size * rows)
        acc = contract(longer, operands[1], lhs_center, operands[3])
        return jnp.swapaxes(acc.reshape(batch, size, rows, -1), 0, 1), True
    lhs_center, rhs_center = (
        s if s is None else jnp.broadcast_to(s, (size, batch, s.shape[2])).reshape(size * batch, s.shape[2])
        for s in (lhs_center, rhs_center)
    )
    folded_lhs, folded_rhs = (x.reshape(size * batch, *x.shape[2:]) for x in (lhs, rhs))
    acc = contract(folded_lhs, folded_rhs, lhs_center, rhs_center)
    return acc.reshape(size, batch, *acc.shape[1:]), True


def batch_all(size: int, batched: Sequence[bool], operands: tuple[Any, ...]) -> Any:
    """Return the operands of a vmap with the mapped axis in front of each; None stays None."""
    pairs = zip(operands, batched, strict=True)
    return tuple(x if x is None or is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in pairs)


# Created once for each pair of arguments, because JAX reuses a trace only for the same function object.
@functools.cache
def make_contraction(
    transposed: bool, is_unpacked: bool
) -> Callable[[jax.Array, jax.Array, Center, Center], jax.Array]:
    """Return `contract_integers` with its static arguments."""
    function = custom_vmap(functools.partial(_contract_on_platform, transposed=transposed, is_unpacked=is_unpacked))
    function.def_vmap(functools.partial(_contract_under_vmap, transposed, is_unpacked))
    return function


# A single row, lane by lane.


def choose_row_cut(codes: jax.Array) -> tuple[int, int] | None:
    """Return how many products `contract_row_by_lanes` adds up in one loop, and how many lanes it has.

    None if it is not faster, or impossible.

    Args:
        codes: int8 [..., K]. Dimensions may be symbolic, as in `jax.export`.
    """
    if not isinstance(codes.size, int) or codes.size < _FEWEST_FOR_LANES:
        return None
    depth = codes.shape[-1]
    terms = choose_lane_terms(depth, _WIDE_LANES, _MOST_WIDE_TERMS) if _HAS_WIDE_LANES else None
    if terms is not None:
        return terms, _WIDE_LANES
    terms = choose_lane_terms(depth)
    return None if terms is None else (terms, LANES)


def choose_lane_terms(depth: int, lanes: int = LANES, most: int = _MOST_TERMS) -> int | None:
    """Return how many products of a lane one loop adds up, or None if no number divides the products of `depth`."""
    groups, rest = divmod(depth, lanes)
    return next((n for n in range(most, _FEWEST_TERMS - 1, -1) if not rest and groups % n == 0), None)


def contract_row_by_lanes(row: jax.Array, codes: jax.Array, terms: int, lanes: int) -> jax.Array:
    """Return the contraction of a row with each row of the codes.

    Args:
        row: integers [B, K], each from -2**15 to 2**15 - 1.
        codes: int8 [B, N, K].
        terms: how many products of a lane one loop adds up, as `choose_row_cut` returns it.
        lanes: the number of lanes, from the same function.

    Returns:
        int32 [B, N], modulo 2**32.
    """
    row, codes = barriers.tie_to_row(row.astype(jnp.int16), codes, is_reshaped=True)
    batch, columns, depth = codes.shape
    cut = (depth // (terms * lanes), terms, lanes)
    codes = codes.reshape(batch, columns, *cut)
    # As int16 a long row stays in the first-level cache, where the loop reads it for each column.
    factors = row.reshape(batch, 1, *cut)
    products = [factors[:, :, :, i].astype(jnp.int32) * codes[:, :, :, i].astype(jnp.int32) for i in range(terms)]
    # One loop computes the products of a column and their sum: written to memory, the sums of all lanes take half as
    # long again. The barrier keeps XLA from computing the sum again for each of its readers.
    return lax.optimization_barrier(jnp.sum(functools.reduce(jnp.add, products), axis=(2, 3), dtype=jnp.int32))


# Contractions of any dimensions.


class Role(NamedTuple):
    """The dimensions of an operand, by what a contraction does with them.

    Attributes:
        batch: the dimensions that both operands share and that are kept.
        free: the dimensions of this operand alone, which are kept.
        contracted: the dimensions that are summed over.
    """

    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]


def contract_roles(
    lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None, rhs_center: jax.Array | None, left: Role,
    right: Role, out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:  # fmt: skip
    """Return the int32 contraction of two operands with zero points.

    Args:
        lhs: int8, or codes of 2 or 4 bits.
        rhs: the same.
        lhs_center: int32, a scalar or of lhs's rank, or None for 0.
        rhs_center: int32, a scalar or of rhs's rank, or None for 0.
        left: the dimensions of lhs.
        right: the dimensions of rhs.
        out_sharding: the sharding of the result, or None.
    """
    if recording.is_recording():
        return _contract_recorded(lhs, rhs, lhs_center, rhs_center, left, right)
    if out_sharding is not None or sharding.is_placed(lhs) or sharding.is_placed(rhs):
        lhs, rhs = signed_codes.convert_to_signed(lhs), signed_codes.convert_to_signed(rhs)
        return _place_output(lhs, rhs, lhs_center, rhs_center, left, right, out_sharding)
    contract = functools.partial(_contract_signed, left=left, right=right)
    contract_plane = functools.partial(contract, is_unpacked=True)
    contract_planes = functools.partial(packed_codes.contract_planes, contract=contract_plane, left=left, right=right)
    for side in (1, 0):
        if packed_codes.is_faster_in_planes((lhs, rhs), (lhs_center, rhs_center), (left, right), side):
            on_cpu = functools.partial(contract_planes, side=side)
            return lax.platform_dependent(lhs, rhs, lhs_center, rhs_center, cpu=on_cpu, default=contract)
    return contract(lhs, rhs, lhs_center, rhs_center)


def _batch_contraction(
    mapped: dict[str, bool], lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None,
    rhs_center: jax.Array | None, left: Role, right: Role,
) -> jax.Array:  # fmt: skip
    """Return the contraction with one more dimension, its first; mapped operands have it as their first dimension."""
    sides = []
    for x, center, role, names in (
        (lhs, lhs_center, left, ("lhs", "lhs_center")), (rhs, rhs_center, right, ("rhs", "rhs_center"))
    ):  # fmt: skip
        is_mapped = mapped[names[0]]
        if center is not None and mapped[names[1]]:
            if not is_mapped:
                x, is_mapped = jnp.broadcast_to(x, (center.shape[0], *x.shape)), True
            center = center.reshape(-1, *(center.shape[1:] if center.ndim > 1 else (1,) * (x.ndim - 1)))
        elif center is not None and center.ndim and is_mapped:
            center = center[None]
        shifted = Role(*(tuple(axis + 1 for axis in axes) for axes in role)) if is_mapped else role
        sides.append((x, center, shifted, is_mapped))
    (lhs, lhs_center, left, in_lhs), (rhs, rhs_center, right, in_rhs) = sides
    if in_lhs and in_rhs:
        left, right = (role._replace(batch=(0, *role.batch)) for role in (left, right))
        return contract_roles(lhs, rhs, lhs_center, rhs_center, left, right)
    left = left._replace(free=(0, *left.free)) if in_lhs else left
    right = right._replace(free=(0, *right.free)) if in_rhs else right
    y = contract_roles(lhs, rhs, lhs_center, rhs_center, left, right)
    return jnp.moveaxis(y, len(left.batch) + (0 if in_lhs else len(left.free)), 0)


@recording.mark(
    "contract",
    lambda lhs, rhs, left, right, **_: (_derive_result_shape(lhs, rhs, left, right), jnp.int32),
    _batch_contraction,
)
def _contract_recorded(
    lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None, rhs_center: jax.Array | None, left: Role, right: Role
) -> jax.Array:
    """Return the int32 contraction of codes of any dtype, with their zero points."""
    with recording.pause():
        lhs, lhs_center = signed_codes.shift_recorded(lhs, lhs_center)
        rhs, rhs_center = signed_codes.shift_recorded(rhs, rhs_center)
        return contract_roles(lhs, rhs, lhs_center, rhs_center, left, right)


def _contract_signed(
    lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None, rhs_center: jax.Array | None, *, left: Role,
    right: Role, is_unpacked: bool = False,
) -> jax.Array:  # fmt: skip
    """Return the int32 contraction of two operands, which are converted to int8.

    `is_unpacked` says that an operand of int8 is the result of a conversion from 2 or 4 bits.
    """
    rows, columns = _count_elements(lhs, left.free), _count_elements(rhs, right.free)
    # A loop contracts a single row with a matrix. The barriers keep XLA from converting a matrix that is a constant
    # while it compiles.
    if not is_unpacked:
        lhs = lax.optimization_barrier(lhs) if columns == 1 else lhs
        rhs = lax.optimization_barrier(rhs) if rows == 1 else rhs
        is_unpacked = any(dtypes.count_packed_bits(x.dtype) < 8 for x in (lhs, rhs))
    lhs, rhs = signed_codes.convert_to_signed(lhs), signed_codes.convert_to_signed(rhs)
    # If the contracted dimensions are in the order in which lhs has them, lhs often needs no transpose.
    order = sorted(range(len(left.contracted)), key=lambda i: left.contracted[i])
    left, right = (role._replace(contracted=tuple(role.contracted[i] for i in order)) for role in (left, right))
    # The kernel takes rhs in two layouts: if rhs has one of them, use it, so that rhs needs no transpose.
    contracted_last = (*right.batch, *right.free, *right.contracted)
    contracted_first = (*right.batch, *right.contracted, *right.free)
    is_last = not barriers.is_moving(contracted_last, rhs.shape)
    transposed = is_last and barriers.is_moving(contracted_first, rhs.shape)
    batch, depth = _count_elements(lhs, left.batch), _count_elements(lhs, left.contracted)
    a = barriers.transpose_in_memory(lhs, (*left.batch, *left.free, *left.contracted)).reshape(batch, rows, depth)
    b = barriers.transpose_in_memory(rhs, contracted_last if transposed else contracted_first)
    b = b.reshape((batch, columns, depth) if transposed else (batch, depth, columns))
    a_center, b_center = _reshape_center(lhs_center, lhs, left), _reshape_center(rhs_center, rhs, right)
    contract = make_contraction(transposed, is_unpacked)
    acc = contract(a, b, a_center, b_center)
    return acc.reshape(_derive_result_shape(lhs, rhs, left, right))


def _count_elements(x: jax.Array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _derive_result_shape(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> tuple[int, ...]:
    lhs_dimensions = (lhs.shape[axis] for axis in (*left.batch, *left.free))
    return (*lhs_dimensions, *(rhs.shape[axis] for axis in right.free))


def _reshape_center(center: jax.Array | None, x: jax.Array, role: Role) -> Any:
    """Return zero points as [batch or 1, free or 1], or None."""
    if center is None:
        return None
    if center.size == 1:
        return center.reshape(1, 1)
    arranged = lax.transpose(center, (*role.batch, *role.free, *role.contracted))
    # Each group of dimensions becomes one, of length 1 if the zero points do not vary along it.
    sizes = []
    for axes in (role.batch, role.free):
        varies = any(center.shape[a] != 1 for a in axes)
        sizes.append([x.shape[a] if varies else 1 for a in axes])
    wide = jnp.broadcast_to(arranged, (*sizes[0], *sizes[1], *(1 for _ in role.contracted)))
    return wide.reshape(math.prod(sizes[0]), math.prod(sizes[1]))


def _place_output(
    lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None, rhs_center: jax.Array | None, left: Role,
    right: Role, out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:  # fmt: skip
    """Return the contraction of operands with shardings in their types, computed by `jax.lax`.

    JAX cannot infer the shardings of the reshapes in the other form.
    """
    # Without a reshape each dimension keeps its sharding. The zero points are corrected as in the other form.
    dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
    acc = lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.int32, out_sharding=out_sharding)
    batch, frees = len(left.batch), len(left.free)
    expanded = []  # for each operand its zero points and its sums, in the result's shape
    for x, center, role, start in ((lhs, lhs_center, left, batch), (rhs, rhs_center, right, batch + frees)):
        dimensions = (*range(batch), *range(start, start + len(role.free)))
        outward = functools.partial(_move_outward, role=role, dimensions=dimensions, like=acc)
        sums = jnp.sum(x, axis=role.contracted, keepdims=True, dtype=jnp.int32)
        expanded.append((None if center is None else outward(center, x), outward(sums, x)))
    (lhs_points, row_sums), (rhs_points, column_sums) = expanded
    if rhs_points is not None:
        acc = acc - rhs_points * row_sums
        column_sums = column_sums - np.int32(_count_elements(lhs, left.contracted)) * rhs_points
    return acc if lhs_points is None else acc - lhs_points * column_sums


def _move_outward(
    value: jax.Array, x: jax.Array, *, role: Role, dimensions: tuple[int, ...], like: jax.Array
) -> jax.Array:
    """Return an array that varies along an operand's batch and free dimensions in the result's shape and sharding."""
    if value.ndim == 0:
        return granularity.PerTensor().expand(value, like)
    # Move the batch and free dimensions to the front, and drop the contracted ones, which have length 1, from the end.
    outer = lax.transpose(value, (*role.batch, *role.free, *role.contracted))
    outer = lax.squeeze(outer, tuple(range(len(dimensions), value.ndim)))
    full = jnp.broadcast_to(outer, tuple(x.shape[a] for a in (*role.batch, *role.free)))
    return sharding.place_like(lax.broadcast_in_dim(full, like.shape, dimensions), like)


def spread_outward(scale: jax.Array, role: Role, before: int, after: int) -> jax.Array:
    """Return an operand's scale with the rank of the product.

    Args:
        scale: an array of the operand's rank, of length 1 along the contracted dimensions.
        role: the role of each dimension of the operand.
        before: the number of free dimensions of the other operand that come before this operand's in the product.
        after: the number that come after them.
    """
    order = (*role.batch, *role.free, *role.contracted)
    transposed = lax.transpose(scale, order) if order != tuple(range(scale.ndim)) else scale
    kept = transposed.shape[: len(role.batch) + len(role.free)]
    batch = len(role.batch)
    return lax.reshape(transposed, (*kept[:batch], *(1,) * before, *kept[batch:], *(1,) * after))
