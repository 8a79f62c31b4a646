"""Which tokens a query attends to: masks of arrays, lengths, causality and windows."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Hiding(NamedTuple):
    """The static part of what hides tokens in `quantized_dot_product_attention`.

    Attributes:
        is_causal: whether a query attends to no later token.
        window: the number of tokens before and after a query that it attends to, or None.
    """

    is_causal: bool
    window: tuple[int, int] | None


def group_heads(value: jax.Array, heads: int) -> jax.Array:
    """Return a mask or bias [batch, query heads, queries, tokens] as [batch, kv heads, groups, queries, tokens].

    Args:
        value: an array of rank 4, whose dimensions may be 1.
        heads: Static. The number of heads of the keys and values.
    """
    batch, query_heads, queries, tokens = value.shape
    groups = (1, 1) if query_heads == 1 else (heads, query_heads // heads)
    return value.reshape(batch, *groups, queries, tokens)


def merge_masks(masks: list[Any]) -> Any:
    """Return the conjunction of masks, which broadcast against each other; None if there is none."""
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(operator.and_, present) if present else None


def find_visible(
    hiding: Hiding, queries: int, tokens: int, mask: Any, query_lengths: Any, token_lengths: Any
) -> jax.Array | None:  # fmt: skip
    """Return which tokens a query attends to, of a shape that broadcasts against [batch, 1, 1, queries, tokens].

    Args:
        hiding: Static. Causality and the window.
        queries: Static. The number of queries.
        tokens: Static. The number of keys.
        mask: bool of rank 5, or None.
        query_lengths: int32 [batch], or None.
        token_lengths: int32 [batch], or None.
    """
    query = jnp.arange(queries, dtype=jnp.int32)[None, None, None, :, None]
    token = jnp.arange(tokens, dtype=jnp.int32)[None, None, None, None, :]
    masks = [mask]
    if hiding.is_causal:
        masks.append(token <= query)
    if hiding.window is not None:
        # A longer window is no limit, and a sum with it must not overflow int32.
        before, after = (np.int32(min(n, 2**30)) for n in hiding.window)
        masks.append((query <= token + before) & (query >= token - after))
    for place, lengths in ((query, query_lengths), (token, token_lengths)):
        if lengths is not None:
            masks.append(place < lengths.reshape(-1, 1, 1, 1, 1))
    return merge_masks(masks)


def find_visible_in_cache(positions: jax.Array, query_positions: jax.Array, window: int | None) -> jax.Array:
    """Return which places of a cache queries attend to: bool [batch or 1, 1, 1, queries, places].

    Args:
        positions: the position of the token in each place, -1 for none: int32 [batch or 1, places].
        query_positions: int32 [batch or 1, queries].
        window: Static. The number of tokens that a query attends to, or None for all.
    """
    # Positions, not places, are compared: in a ring the order of the places is not that of the tokens.
    place = positions[:, None, None, None, :]
    query = query_positions[:, None, None, :, None]
    visible = (place >= 0) & (place <= query)
    return visible if window is None else visible & (place > query - np.int32(window))
