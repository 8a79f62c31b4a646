"""The integer contraction of a single row with a matrix that holds the contracted dimension last in memory.

XLA:CPU's kernel for int8 takes as long for one row as for eight. Here the matrix is read by a loop that XLA vectorizes:
it adds up the products of each lane, which is one of 16 neighbors, by itself. A second, short loop adds up the lanes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

LANES = 16
# The largest and the smallest number of products of a lane that one loop adds up. It adds up the same number in each
# place, so this number must divide that of all products of the lane. With fewer, it would write too many sums.
_MOST_TERMS, _FEWEST_TERMS = 32, 8
# With fewer codes, the second thread costs more than it saves.
_FEWEST = 2**18


def find_terms(codes: jax.Array) -> int | None:
    """Return how many products `contract_row` adds up in one loop, or None if it does not apply, or is not faster.

    Args:
        codes: int8 [..., K]. Dimensions may be symbolic, as in `jax.export`.
    """
    is_large = isinstance(codes.size, int) and codes.size >= _FEWEST
    return count_terms(codes.shape[-1]) if is_large else None


def count_terms(depth: int) -> int | None:
    """Return how many products of a lane one loop adds up, or None if no number divides those of a row of `depth`."""
    groups, rest = divmod(depth, LANES)
    return next((n for n in range(_MOST_TERMS, _FEWEST_TERMS - 1, -1) if not rest and groups % n == 0), None)


def contract_row(row: jax.Array, codes: jax.Array, terms: int) -> jax.Array:
    """Return the contraction of a row with each row of the codes.

    Args:
        row: integers [B, K], each from -2**15 to 2**15 - 1.
        codes: int8 [B, N, K].
        terms: what `find_terms` returns.

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
