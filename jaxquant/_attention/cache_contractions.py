"""The two contractions with a cache: of its keys with queries, and of its values with the weights of rows.

Codes of 8 bits are contracted as they are stored. Codes of 4 bits are unpacked to int8 first. Those of a whole cache
would be twice as large as the cache, and would be written and read again in each step. On the CPU they are therefore
unpacked in a loop over chunks of tokens, and a chunk is contracted while it is in the processor's cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._kernels.platforms import choose_on_cpu
from . import cache_layout
from .cache_layout import KEY_AXES, VALUE_AXES
from .kv_cache import KVCache
from .scores import find_scores
from .weigh_values import Weights, contract_digits, weigh_values

# The bytes of the int8 codes of a chunk: a part of the second-level cache of a core.
_CHUNK = 2**19
# The fewest tokens of a chunk: the slices of values along the tokens should consist of whole lines of the cache.
_FEWEST = 256


def score_cache(function: str, q: QuantizedArray, cache: KVCache) -> jax.Array:
    """Return the scores of queries and the keys of a cache, as `find_scores` does."""
    tokens = _count_tokens(cache, cache.spec_k)
    if tokens is None:
        return find_scores(function, q, cache.quantized_keys)
    score = functools.partial(_score_keys, function, spec=cache.spec_k, features=cache.head_dim)
    in_chunks = functools.partial(_score_chunks, score, tokens=tokens)
    return choose_on_cpu(in_chunks, score, q, cache.keys, cache.key_scale)


def weigh_cache(weights: Weights, cache: KVCache, digits: int) -> jax.Array:
    """Return the values of a cache weighted by each row, as `weigh_values` does."""
    tokens = _count_tokens(cache, cache.spec_v)
    if tokens is None:
        return weigh_values(weights, cache.quantized_values.codes, cache.head_dim, digits)
    contract = functools.partial(_contract_values, spec=cache.spec_v, features=cache.head_dim)
    in_chunks = functools.partial(_contract_chunks, contract, tokens=tokens)
    contract_on_platform = functools.partial(choose_on_cpu, in_chunks, contract)
    return weigh_values(weights, cache.values, cache.head_dim, digits, contract_on_platform)


def _count_tokens(cache: KVCache, spec: QuantSpec) -> int | None:
    """Return the number of tokens of a chunk, or None if the cache is contracted in one piece."""
    batch, length, heads, features = cache.shape
    # Sizes of jax.export that are not known cannot be compared.
    if not cache_layout.is_packed(spec) or not all(isinstance(n, int) for n in cache.shape):
        return None
    tokens = max(_CHUNK // (batch * heads * features * _FEWEST), 1) * _FEWEST
    return None if tokens >= length else tokens


def _score_keys(
    function: str, q: QuantizedArray, keys: jax.Array, scale: jax.Array, *, spec: QuantSpec, features: int
) -> jax.Array:
    codes = cache_layout.unpack_codes(keys, spec, KEY_AXES[0], features)
    return find_scores(function, q, QuantizedArray(codes, scale[..., None], dtype=jnp.float32))


def _score_chunks(score: Any, q: QuantizedArray, keys: jax.Array, scale: jax.Array, *, tokens: int) -> jax.Array:
    """Return the scores of keys [batch, heads, tokens, ...], computed for a number of tokens at a time."""
    length = scale.shape[2]

    def score_from(start: Any, size: int) -> jax.Array:
        return score(q, *(lax.dynamic_slice_in_dim(x, start, size, 2) for x in (keys, scale)))

    def step(place: jax.Array, scores: jax.Array) -> jax.Array:
        start = place * np.int32(tokens)
        return lax.dynamic_update_slice_in_dim(scores, score_from(start, tokens), start, 4)

    count, rest = divmod(length, tokens)
    scores = lax.fori_loop(np.int32(0), np.int32(count), step, jnp.zeros((*q.shape[:-1], length), jnp.float32))
    if rest == 0:
        return scores
    start = np.int32(count * tokens)
    return lax.dynamic_update_slice_in_dim(scores, score_from(start, rest), start, 4)


def _contract_values(rows: jax.Array, values: jax.Array, *, spec: QuantSpec, features: int) -> jax.Array:
    return contract_digits(rows, cache_layout.unpack_codes(values, spec, VALUE_AXES[0], features))


def _contract_chunks(contract: Any, rows: jax.Array, values: jax.Array, *, tokens: int) -> jax.Array:
    """Return the int32 contraction of rows and values along their last axis, for a number of tokens at a time."""

    def contract_from(start: Any, size: int) -> jax.Array:
        return contract(*(lax.dynamic_slice_in_dim(x, start, size, 3) for x in (rows, values)))

    count, rest = divmod(rows.shape[3], tokens)
    acc = contract_from(np.int32(count * tokens), rest) if rest else None
    if count == 0:
        assert acc is not None
        return acc

    def step(place: jax.Array, acc: jax.Array) -> jax.Array:
        return acc + contract_from(place * np.int32(tokens), tokens)

    if acc is None:
        acc = jnp.zeros(jax.eval_shape(contract, rows, values).shape, jnp.int32)
    return lax.fori_loop(np.int32(0), np.int32(count), step, acc)
