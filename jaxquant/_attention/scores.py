"""The scores of queries and keys, contracted as integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._contractions.einsum import contract_operands
from .._core import dtypes, small_floats
from .._kernels.barriers import pin_layout

# XLA:CPU contracts an operand of many rows with up to so many columns in up to half of the time that the transposed
# product takes.
FEW_ROWS = 32


def group_queries(q: QuantizedArray, heads: int, factor: float) -> QuantizedArray:
    """Return queries [batch, queries, query heads, features] as [batch, kv heads, groups, queries, features].

    Args:
        q: the queries.
        heads: Static. The number of heads of the keys.
        factor: Static. What the scores are multiplied by; it becomes a part of the scale, which is then float32.
    """

    def regroup(part: jax.Array) -> jax.Array:
        batch, queries, query_heads, features = part.shape
        # A scale or zero point that all heads share stays a single one, and broadcasts.
        groups = (1, 1) if query_heads == 1 != q.shape[2] else (heads, query_heads // heads)
        return lax.transpose(part, (0, 2, 1, 3)).reshape(batch, *groups, queries, features)

    # Scaling the few scales is cheaper than scaling the scores.
    scale = small_floats.scale_as_float32(q.scale) * np.float32(factor)
    point = None if q.zero_point is None else regroup(q.zero_point)
    return QuantizedArray(regroup(q.codes), regroup(scale), point, dtype=jnp.float32, block_size=q.block_size)


def find_scores(function: str, q: QuantizedArray, k: QuantizedArray) -> jax.Array:
    """Return the scores, float32 [batch, kv heads, groups, queries, tokens].

    Args:
        function: the name of the public function, for errors.
        q: the result of `group_queries`.
        k: keys [batch, kv heads, tokens, features].
    """
    rows = q.shape[2] * q.shape[3]
    if not _has_few_rows(rows, q, k):
        return contract_operands(function, "bkgtd,bksd->bkgts", (q, k), None, dtypes.FLOAT32)
    # A single column would miss the kernel: add one of zeros.
    wide = _pad_queries(q) if rows == 1 else q
    scores = contract_operands(function, "bksd,bkgtd->bkgts", (k, wide), None, dtypes.FLOAT32)
    scores = lax.slice_in_dim(scores, 0, q.shape[3], axis=3)
    # The softmax reads the scores several times, and XLA:CPU would transpose the product of the codes in each of these
    # loops. The scores of a single query are read in order anyway.
    return scores if rows == 1 else pin_layout(scores)


def _has_few_rows(rows: Any, q: QuantizedArray, k: QuantizedArray) -> bool:
    """Return whether the contraction reads the keys faster as its left operand."""
    # The sums of the keys, which zero points need, are cheaper with the keys on the right. So are blocks of features.
    is_plain = all(x.zero_point is None and x.scale.shape[-1] == 1 for x in (q, k))
    return is_plain and isinstance(rows, int) and rows <= FEW_ROWS


def _pad_queries(q: QuantizedArray) -> QuantizedArray:
    """Return queries with a further one of zeros."""
    codes, scale = (
        lax.pad(x, jnp.zeros((), x.dtype), [(0, int(axis == 3 and x.shape[3] == q.shape[3]), 0) for axis in range(5)])
        for x in (q.codes, q.scale)
    )
    return QuantizedArray(codes, scale, dtype=q.dtype, block_size=q.block_size)


def add_bias(scores: jax.Array, bias: Any) -> jax.Array:
    """Return scores plus an array that broadcasts against them, or the scores for None."""
    return scores if bias is None else scores + bias.astype(jnp.float32)
