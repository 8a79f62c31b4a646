"""What the attention layers of Linen and NNX share: their options, and attention with several batch dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._arrays.spec import QuantSpec
from .._attention.attention import attention
from .._attention.dot_product_attention import quantized_dot_product_attention
from .._attention.kv_cache import KVCache
from .._core import checks


class AttentionOptions(NamedTuple):
    """How a layer quantizes the operands of its attention.

    Attributes:
        query_spec: how queries are quantized; None for int8 with the granularity of the keys.
        key_spec: how keys are quantized, also in a cache.
        value_spec: how values are quantized, also in a cache.
        weight_digits: the number of digits of the weights.
        rotate: whether queries and keys are rotated, also in a cache.
    """

    query_spec: QuantSpec | None
    key_spec: QuantSpec
    value_spec: QuantSpec
    weight_digits: int
    rotate: bool


def check_options(layer: str, fixed: Mapping[str, tuple[object, object]]) -> None:
    """Raise ContractValueError if an argument of flax's layer is set that this layer cannot take.

    Args:
        layer: the name of the layer, for errors.
        fixed: for each argument its value and the only one that is supported.
    """
    for name, (value, only) in fixed.items():
        expected = f"{only!r}, because the attention contracts integers"
        checks.require(value is only or value == only, layer, name, expected, checks.describe_value(value))


def check_no_dropout(layer: str, rate: float, deterministic: bool | None) -> None:
    """Raise ContractValueError if the weights are to be dropped, which integer weights do not support."""
    expected = "0.0 in training, because the weights are contracted as integers (deterministic=True ignores the rate)"
    checks.require(rate == 0.0 or bool(deterministic), layer, "dropout_rate", expected, rate)


def attend_to_tokens(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None,
    is_causal: bool = False,
) -> jax.Array:  # fmt: skip
    """Return the attention of arrays [batch..., tokens, heads, features].

    Args:
        options: how operands are quantized.
        query: the queries.
        key: the keys.
        value: the values.
        mask: an array that broadcasts against [batch..., heads, queries, tokens], where 0 hides a token, or None.
        is_causal: whether a query attends to no later token.
    """
    batch = query.shape[:-3]
    operands = (_merge_batch(x) for x in (query, key, value))
    y = quantized_dot_product_attention(
        *operands, mask=_merge_mask(mask, batch), is_causal=is_causal, query_spec=options.query_spec,
        key_spec=options.key_spec, value_spec=options.value_spec, weight_digits=options.weight_digits,
        rotate=options.rotate,
    )  # fmt: skip
    return y.reshape(query.shape)


def attend_to_cache(
    options: AttentionOptions, cache: KVCache, query: jax.Array, key: jax.Array, value: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """Return the attention to a cache after the tokens were appended to it, and the cache; the shapes are as above."""
    batch = query.shape[:-3]
    cache = cache.append(_merge_batch(key), _merge_batch(value))
    y = attention(
        _merge_batch(query), cache, mask=_merge_mask(mask, batch), spec=options.query_spec,
        weight_digits=options.weight_digits,
    )  # fmt: skip
    return y.reshape(query.shape), cache


def make_cache(options: AttentionOptions, shape: tuple[int, ...], window: int | None = None) -> KVCache:
    """Return an empty cache for keys [batch..., length, kv_heads, head_dim] of a shape; with a window it is a ring."""
    sizes: Any = (math.prod(shape[:-3]), *shape[-3:])
    return KVCache.create(sizes, options.key_spec, options.value_spec, window=window, rotate=options.rotate)


def _merge_batch(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _merge_mask(mask: jax.Array | None, batch: tuple[int, ...]) -> Any:
    """Return a mask as bool with at most one batch dimension."""
    if mask is None:
        return None
    mask = jnp.asarray(mask).astype(jnp.bool_)
    if mask.ndim <= 3:
        return mask
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return jnp.broadcast_to(mask, (*batch, *mask.shape[-3:])).reshape(math.prod(batch), *mask.shape[-3:])
