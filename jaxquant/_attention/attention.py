"""`attention`: queries that attend to a quantized cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantize import quantize
from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point
from .._kernels.barriers import choose_on_cpu, round_result
from .kv_cache import KEY_AXES, VALUE_AXES, KVCache, check_tokens_whole, count_blocks, is_packed, unpack_codes
from .scores_and_values import (
    RowWeights,
    add_bias,
    check_query_spec,
    compute_scores,
    compute_weights,
    contract_digits,
    derive_visible_in_cache,
    group_heads,
    group_queries,
    merge_masks,
    read_bias,
    read_digits,
    read_factor,
    read_mask,
    rotate_back,
    ungroup_heads,
    weigh_values,
)

_NAME = "attention"
# The bytes of the int8 codes of a chunk: a part of the second-level cache of a core.
_CHUNK = 2**19
# The fewest tokens of a chunk: the slices of values along the tokens should consist of whole lines of the cache.
_FEWEST = 256


def attention(
    q: ArrayLike,
    cache: KVCache,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    spec: QuantSpec | None = None,
    scale: float | None = None,
    weight_digits: int = 2,
    query_digits: int = 1,
) -> jax.Array:
    """Attend with queries to the tokens of a cache, contracting integers.

    out = softmax(scale * quantize(q) keys^T + bias) values

    Append the keys and values of the queries' own tokens first. The queries belong to the newest tokens: a query
    attends to its own token and to the earlier ones, in a cache with a window to the newest of these.

    The codes of queries and keys are contracted into int32 and then scaled. The softmax is computed in float32. Its
    weights are multiplied by the scales of the values' tokens and rounded to codes, with a step for each row; these are
    contracted with the codes of the values into int32.

    The codes have no gradient, as in `quantize`: train with `quantized_dot_product_attention`.

    Args:
        q: the queries, float32, float16 or bfloat16 [batch, queries, heads, head_dim]. The number of heads is a
            multiple of the cache's: consecutive heads share one of the cache.
        cache: the cache, which holds the tokens of the queries.
        mask: bool, of a shape that broadcasts against [batch, heads, queries, cache.length]: False hides a slot of the
            cache. `cache.positions` has the positions of the tokens in the slots.
        bias: float, or int8, int16 or int32, of such a shape, added to the scores after their scaling.
        query_positions: the positions of the queries, int32 [batch, queries] or [1, queries]. None stands for the
            newest ones, in order. Pass them for rows of different lengths, or for a query with a token that is not the
            newest. A ring has only the newest tokens: an older query sees what is left of its window.
        spec: Static. How the queries are quantized: a dtype of 8 bits or fewer, with one scale for all features of a
            query and head, or one for each block of them. Blocks of queries and of keys must end at the same features,
            or one of the longer ones must consist of whole shorter ones. None stands for int8 with the granularity of
            the keys.
        scale: Static. What the products of queries and keys are multiplied by. None stands for 1 / sqrt(head_dim).
        weight_digits: Static. The number of digits of 7 bits that a weight has: 1, 2 or 3. With 1, weights below 1/254
            of the largest one of a row become 0. With 2, those below 1/32766.
        query_digits: Static. The number of codes of each feature of a query: 1 or 2. The second code holds what the
            rounding to the first one leaves, in steps that are 254 times as fine for int8. The contraction with the
            keys then has twice as many rows. 2 needs a symmetric spec with a signed dtype.

    Returns:
        An array with q's shape and dtype. A query that sees no token gets zeros. A row of the batch gets NaN if its
        cache has overflowed, and so does a query that sees a token with a NaN.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: shapes do not fit each other; the spec, the scale or the number of digits is not supported; an
            explicit mesh axis cuts the tokens of the cache; or there are more queries than the ring of a cache with a
            window has complete windows for.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> k = jnp.array([[[[127.0, 2.5]], [[-0.5, 300.0]]]])  # 2.5 is a tie
        >>> cache = jq.KVCache.create((1, 4, 1, 2)).append(k, k)
        >>> jq.attention(jnp.array([[[[1.0, 0.0]], [[0.0, 1.0]]]]), cache)[0, :, 0].round(2)
        Array([[127.,   2.],
               [  0., 300.]], dtype=float32)

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.1; Ainslie et al., arXiv 2305.13245, for the shared heads.
    """
    checks.require_type(isinstance(cache, KVCache), _NAME, "cache", "a KVCache", checks.describe_value(cache))
    cache._check_is_layer(_NAME)
    spec = QuantSpec(jnp.int8, cache.spec_k.granularity) if spec is None else spec
    check_query_spec(_NAME, "spec", spec)
    digits = read_digits(_NAME, weight_digits)
    checks.check_integer(_NAME, "query_digits", query_digits)
    # A zero point would be added twice.
    most = 2 if spec.fixed_zero_point == 0 else 1
    expected = f"1{' or 2' if most == 2 else ', because the spec of the queries has a zero point'}"
    checks.require(1 <= query_digits <= most, _NAME, "query_digits", expected, query_digits)
    names = ("q", "mask", "bias", "query_positions")
    values = [entry_point.unwrap_array(x) for x in (q, mask, bias, query_positions)]
    arrays = entry_point.convert_arrays(_NAME, dict(zip(names, values, strict=True)))
    _check_queries(arrays[0], cache)
    factor = read_factor(_NAME, scale, cache.head_dim)
    return _attend(*_read_shapes(cache, *arrays), spec=spec, factor=factor, digits=digits, query_digits=query_digits)


@functools.partial(jax.jit, inline=True, static_argnames=("spec", "factor", "digits", "query_digits"))
@jax.named_scope(_NAME)  # names its products in the coverage of a prepared function
def _attend(
    q: jax.Array, cache: KVCache, mask: jax.Array | None, bias: jax.Array | None, query_positions: jax.Array | None, *,
    spec: QuantSpec, factor: float, digits: int, query_digits: int,
) -> jax.Array:  # fmt: skip
    queries, heads = q.shape[1], cache.shape[2]
    # Without tokens every query sees none. Without queries or features the result is empty.
    if 0 in (math.prod(q.shape), cache.length):
        return jnp.zeros(q.shape, q.dtype)
    dtype = q.dtype
    if cache.smoothing is not None:
        q = q.astype(jnp.float32) * jnp.repeat(cache.smoothing, q.shape[2] // heads, axis=1)[:, None]
    if cache.rotate:
        q = rotate_back(q)
    codes = [group_queries(x, heads, factor) for x in _quantize_queries(q, spec, query_digits)]
    mask, bias = (None if x is None else group_heads(x, heads) for x in (mask, bias))
    if query_positions is None:
        # The queries' own tokens are in the cache already. A position may be negative: that query sees no token.
        newest = jnp.reshape(cache.index, (-1, 1)) - np.int32(queries)
        query_positions = newest + jnp.arange(queries, dtype=jnp.int32)[None]
    visible = derive_visible_in_cache(cache.positions, query_positions, cache.window)
    scores = add_bias(_add_scores(_score_cache(_NAME, _stack_codes(codes), cache), query_digits), bias)
    value_scale = dtypes.scale_as_float32(cache.value_scale).reshape(q.shape[0], heads, -1, 1, 1, cache.length)
    weights = compute_weights(scores, value_scale, merge_masks([mask, visible]), digits)
    y = _weigh_cache(weights, cache, digits)
    # A compiled program cannot raise an error, and a wrong result would go unnoticed.
    y = jnp.where(jnp.reshape(cache.overflowed, (-1, 1, 1, 1, 1)), np.float32(np.nan), y)
    y = ungroup_heads(y)
    return (rotate_back(y) if cache.rotate_values else y).astype(dtype)


def _quantize_queries(q: jax.Array, spec: QuantSpec, digits: int) -> list[QuantizedArray]:
    """Return queries as the sum of one or two arrays of codes."""
    if digits == 1:
        return [quantize(q, spec)]
    # A product may not be merged with the difference, neither the caller's nor the product of codes and scale.
    q = round_result(q.astype(jnp.float32))
    first = quantize(q, spec)
    rest = q - round_result(dequantize_checked(first))
    half = dtypes.scale_as_float32(first.scale) * np.float32(0.5)
    return [first, quantize(rest, spec, (-half, half))]


def _stack_codes(codes: list[QuantizedArray]) -> QuantizedArray:
    """Return the results of `group_queries` as further groups of one array, so that the keys are read once."""
    if len(codes) == 1:
        return codes[0]
    scales = [jnp.broadcast_to(x.scale, (*x.shape[:-1], x.scale.shape[-1])) for x in codes]
    stacked = lax.concatenate([x.codes for x in codes], 2)
    return QuantizedArray(stacked, lax.concatenate(scales, 2), dtype=codes[0].dtype, block_size=codes[0].block_size)


def _add_scores(scores: jax.Array, digits: int) -> jax.Array:
    """Return the sum of the scores of both codes of each query."""
    if digits == 1:
        return scores
    first, rest = jnp.split(round_result(scores), 2, axis=2)
    return round_result(first + rest)


def _check_queries(q: jax.Array, cache: KVCache) -> None:
    """Check the queries against the cache."""
    checks.check_array(_NAME, "q", q, dtypes.FLOATS)
    batch, length, heads, features = cache.shape
    fits = q.ndim == 4 and (q.shape[0], q.shape[3]) == (batch, features)
    fits = fits and (q.shape[2] % heads == 0 if heads else q.shape[2] == 0)
    expected = f"shape ({batch}, queries, a multiple of {heads}, {features}), because of the cache"
    checks.require(fits, _NAME, "q", expected, f"shape {q.shape}")
    check_tokens_whole(_NAME, "cache", cache.key_scale, 2)
    if cache.window is not None:
        # The oldest query needs `window` tokens, and the later tokens took the slots of as many older ones.
        most = length - cache.window + 1
        expected = f"at most {most} queries, because a ring of {length} holds the windows of {cache.window} of so many"
        checks.require(q.shape[1] <= most, _NAME, "q", expected, q.shape[1])


def _read_shapes(
    cache: KVCache, q: jax.Array, mask: jax.Array | None, bias: jax.Array | None, query_positions: jax.Array | None
) -> tuple[Any, ...]:
    """Return the arguments of `_attend`, mask and bias with rank 4, after a check of the shapes."""
    sizes = (q.shape[0], q.shape[2], q.shape[1], cache.length)
    mask, bias = read_mask(_NAME, mask, sizes), read_bias(_NAME, bias, sizes)
    if query_positions is not None:
        checks.check_array(_NAME, "query_positions", query_positions, (np.dtype(jnp.int32),))
        fits = query_positions.ndim == 2 and query_positions.shape[0] in (1, q.shape[0])
        fits = fits and query_positions.shape[1] == q.shape[1]
        expected = f"shape ({q.shape[0]} or 1, {q.shape[1]})"
        checks.require(fits, _NAME, "query_positions", expected, f"shape {query_positions.shape}")
    return q, cache, mask, bias, query_positions


# The two contractions with a cache: of its keys with queries, and of its values with the weights of rows.
#
# Codes of 8 bits are contracted as they are stored. Codes of 4 bits are unpacked to int8 first. Those of a whole cache
# would be twice as large as the cache, and would be written and read again in each step. On the CPU they are therefore
# unpacked in a loop over chunks of tokens, and a chunk is contracted while it is in the processor's cache.


def _score_cache(function: str, q: QuantizedArray, cache: KVCache) -> jax.Array:
    """Return the scores of queries and the keys of a cache, as `compute_scores` does."""
    tokens = _count_tokens(cache, cache.spec_k)
    score = functools.partial(_score_keys, function, spec=cache.spec_k, head_dim=cache.head_dim)
    if tokens is None:
        return score(q, cache.keys, cache.key_scale)
    in_chunks = functools.partial(_score_chunks, score, tokens=tokens)
    return choose_on_cpu(in_chunks, score, q, cache.keys, cache.key_scale)


def _weigh_cache(weights: RowWeights, cache: KVCache, digits: int) -> jax.Array:
    """Return the values of a cache weighted by each row, as `weigh_values` does."""
    tokens = _count_tokens(cache, cache.spec_v)
    features = cache.head_dim // count_blocks(cache.spec_v, cache.head_dim)
    contract = functools.partial(_contract_values, spec=cache.spec_v, head_dim=cache.head_dim)
    if tokens is None:
        return weigh_values(weights, cache.values, features, digits, contract)
    in_chunks = functools.partial(_contract_chunks, contract, tokens=tokens)
    contract_on_platform = functools.partial(choose_on_cpu, in_chunks, contract)
    return weigh_values(weights, cache.values, features, digits, contract_on_platform)


def _count_tokens(cache: KVCache, spec: QuantSpec) -> int | None:
    """Return the number of tokens of a chunk, or None if the cache is contracted in one piece."""
    batch, length, heads, features = cache.shape
    # Sizes of jax.export that are not known cannot be compared.
    if not is_packed(spec) or not all(isinstance(n, int) for n in cache.shape):
        return None
    tokens = max(_CHUNK // (batch * heads * features * _FEWEST), 1) * _FEWEST
    return None if tokens >= length else tokens


def _score_keys(
    function: str, q: QuantizedArray, keys: jax.Array, scale: jax.Array, *, spec: QuantSpec, head_dim: int
) -> jax.Array:
    codes = unpack_codes(keys, spec, KEY_AXES[0], head_dim)
    keys_by_block = QuantizedArray(codes, scale[..., None], dtype=jnp.float32)
    return compute_scores(function, q, keys_by_block, count_blocks(spec, head_dim))


def _score_chunks(
    score: Callable[..., jax.Array], q: QuantizedArray, keys: jax.Array, scale: jax.Array, *, tokens: int
) -> jax.Array:
    """Return the scores of keys [batch, heads, tokens, ...], computed for a number of tokens at a time."""
    length = scale.shape[2]

    def score_from(start: ArrayLike, size: int) -> jax.Array:
        return score(q, *(lax.dynamic_slice_in_dim(x, start, size, 2) for x in (keys, scale)))

    def step(index: jax.Array, scores: jax.Array) -> jax.Array:
        start = index * np.int32(tokens)
        return lax.dynamic_update_slice_in_dim(scores, score_from(start, tokens), start, 4)

    count, rest = divmod(length, tokens)
    scores = lax.fori_loop(np.int32(0), np.int32(count), step, jnp.zeros((*q.shape[:-1], length), jnp.float32))
    if rest == 0:
        return scores
    start = np.int32(count * tokens)
    return lax.dynamic_update_slice_in_dim(scores, score_from(start, rest), start, 4)


def _contract_values(rows: jax.Array, values: jax.Array, *, spec: QuantSpec, head_dim: int) -> jax.Array:
    return contract_digits(rows, unpack_codes(values, spec, VALUE_AXES[0], head_dim))


def _contract_chunks(
    contract: Callable[..., jax.Array], rows: jax.Array, values: jax.Array, *, tokens: int
) -> jax.Array:
    """Return the int32 contraction of rows and values along their last axis, for a number of tokens at a time."""

    def contract_from(start: ArrayLike, size: int) -> jax.Array:
        return contract(*(lax.dynamic_slice_in_dim(x, start, size, 3) for x in (rows, values)))

    count, rest = divmod(rows.shape[3], tokens)
    acc = contract_from(np.int32(count * tokens), rest) if rest else None
    if count == 0:
        assert acc is not None
        return acc

    def step(index: jax.Array, acc: jax.Array) -> jax.Array:
        return acc + contract_from(index * np.int32(tokens), tokens)

    if acc is None:
        acc = jnp.zeros(jax.eval_shape(contract, rows, values).shape, jnp.int32)
    return lax.fori_loop(np.int32(0), np.int32(count), step, acc)
