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


def find_scores(function: str, q: QuantizedArray, k: QuantizedArray, bias: Any) -> jax.Array:
    """Return the scores, float32 [batch, kv heads, groups, queries, tokens].

    Args:
        function: the name of the public function, for errors.
        q: the result of `group_queries`.
        k: keys [batch, kv heads, tokens, features].
        bias: an array that is added to the scores and broadcasts against them, or None.
    """
    scores = contract_operands(function, "bkgtd,bksd->bkgts", (q, k), None, dtypes.FLOAT32)
    return scores if bias is None else scores + bias.astype(jnp.float32)
