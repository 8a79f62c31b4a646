"""`quantized_dot_product_attention`: `jax.nn.dot_product_attention` of floats that the call quantizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point
from .._core.granularity import Blocked
from .._training.fake_quantize import Quantizer, read_parts, read_quantizer, split_quantizer
from .._training.rounding_vjp import RoundingConfig, compute_cotangents, make_array
from .kv_cache import INT8, check_tokens_whole
from .scores_and_values import (
    Hiding,
    RowWeights,
    add_bias,
    check_query_spec,
    compute_reciprocal,
    compute_scores,
    compute_weights,
    count_rotated,
    derive_visible,
    group_heads,
    group_queries,
    read_bias,
    read_digits,
    read_factor,
    read_mask,
    rotate_back,
    rotate_tokens,
    split_features,
    ungroup_heads,
    weigh_values,
)

_NAME = "quantized_dot_product_attention"
_SPECS = ("query_spec", "key_spec", "value_spec")
_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def quantized_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    query_spec: QuantSpec | Quantizer | None = None,
    key_spec: QuantSpec | Quantizer = INT8,
    value_spec: QuantSpec | Quantizer = INT8,
    weight_digits: int = 2,
    rotate: bool = False,
) -> jax.Array:
    """Compute `jax.nn.dot_product_attention` in integers, with a gradient.

    out = softmax(scale * quantize(query) quantize(key)^T + bias) quantize(value)

    The forward pass computes what `attention` computes of a cache: int32 scores of the codes of queries and keys, a
    softmax in float32, weights rounded to codes with a step for each row, and their int32 contraction with the codes of
    the values. The backward pass differentiates the attention of the dequantized operands, in floats. The rounding
    of the weights has the gradient of the identity; the rounding of an operand follows its estimator. The residuals
    are the operands: the scores are computed again.

    A query that sees no token gets zeros, and has no gradient. `jax.nn.dot_product_attention` returns the mean of all
    values instead, except for queries beyond `query_seq_lengths`.

    Args:
        query: the queries, float32, float16 or bfloat16 [batch, queries, heads, head_dim], or without the batch.
        key: the keys, float [batch, tokens, kv_heads, head_dim]. The number of heads is a multiple of kv_heads.
        value: the values, float, in the shape of the keys.
        bias: float, or int8, int16 or int32, of a shape that broadcasts against [batch, heads, queries, tokens], added
            to the scaled scores.
        mask: bool, of such a shape: False hides a token.
        scale: Static. What the products of queries and keys are multiplied by. None stands for 1 / sqrt(head_dim).
        is_causal: Static. Whether a query attends to no token after its own.
        query_seq_lengths: the number of queries of each row of the batch that count, int32 [batch]. The others get
            zeros.
        key_value_seq_lengths: the number of tokens of each row that count, int32 [batch]. The others are hidden.
        local_window_size: Static. The number of tokens before and after its own that a query attends to: an int, or a
            pair. None is no limit.
        implementation: Static. None, the only implementation.
        query_spec: how queries are quantized: a QuantSpec, which finds the scale from them, or a `Quantizer`. A dtype
            of 8 bits or fewer, with one scale for all features of a query and head, or one for each block of them. None
            stands for int8, with blocks where the keys have blocks.
        key_spec: the same for keys.
        value_spec: the same for values: a signed symmetric dtype.
        weight_digits: Static. The number of digits of 7 bits that a weight has: 1, 2 or 3, as in `attention`.
        rotate: Static. Whether queries and keys are multiplied by the same Hadamard matrix before they are quantized,
            as in `KVCache.create`.

    Returns:
        An array with the query's shape and dtype.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: shapes or specs do not fit; the scale is not positive; an explicit mesh axis cuts the tokens; or
            `implementation` is not None.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> k = jnp.array([[[127.0, 2.5]], [[-0.5, 300.0]]])  # 2.5 is a tie
        >>> attend = lambda q: jq.quantized_dot_product_attention(q, k, k, is_causal=True, scale=0.01)
        >>> q = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> attend(q)[:, 0].round(1)
        Array([[127. ,   2. ],
               [  6.1, 285.6]], dtype=float32)
        >>> g = jax.grad(lambda q: attend(q).sum())(q)
        >>> bool((jnp.abs(g[0]) < 1e-3).all()), bool((jnp.abs(g[1]) > 1e-3).all())  # the first query sees one token
        (True, True)

    Source: `jax.nn.dot_product_attention`; Vaswani et al., arXiv 1706.03762, section 3.2.1.

    Cotangents: of query, key, value and of learned scales and zero points, as the estimators state; of a float bias,
        the cotangent of the scores.
    """
    checks.require(implementation is None, _NAME, "implementation", "None", checks.describe_value(implementation))
    if query_spec is None:
        granularity = getattr(key_spec.spec if isinstance(key_spec, Quantizer) else key_spec, "granularity", None)
        query_spec = QuantSpec(jnp.int8, granularity) if isinstance(granularity, Blocked) else INT8
    specs = (query_spec, key_spec, value_spec)
    quantizers = tuple(_read_spec(name, spec) for name, spec in zip(_SPECS, specs, strict=True))
    _check_value_spec(quantizers[2].spec)
    checks.check_flag(_NAME, "is_causal", is_causal)
    window = _read_window(local_window_size)
    digits = read_digits(_NAME, weight_digits)
    named = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    named |= dict(zip(_LENGTHS, (query_seq_lengths, key_value_seq_lengths), strict=True))
    arrays = entry_point.convert_arrays(_NAME, {name: entry_point.unwrap_array(x) for name, x in named.items()})
    checks.check_flag(_NAME, "rotate", rotate)
    operands = _read_operands(*arrays)
    features = arrays[0].shape[-1]
    expected = f"False, because a head of {features} features has no pairs that a rotation could mix"
    checks.require(not rotate or count_rotated(features) > 1, _NAME, "rotate", expected, rotate)
    hiding = Hiding(bool(is_causal), window)
    options = (hiding, read_factor(_NAME, scale, arrays[0].shape[-1]), digits)
    return _round_and_attend(operands[:3], quantizers, *operands[3:], options=options, rotate=bool(rotate))


@functools.partial(jax.jit, inline=True, static_argnames=("options", "rotate"))
@jax.named_scope(_NAME)
def _round_and_attend(
    xs: tuple[jax.Array, jax.Array, jax.Array], quantizers: Sequence[Quantizer], bias: jax.Array | None,
    mask: jax.Array | None, query_lengths: jax.Array | None, token_lengths: jax.Array | None, *,
    options: tuple[Hiding, float, int], rotate: bool,
) -> jax.Array:  # fmt: skip
    query = xs[0]
    # Without tokens every query sees none. Without queries or features the result is empty.
    if 0 in (math.prod(query.shape), xs[1].shape[-3]):
        return jnp.zeros(query.shape, query.dtype)
    if rotate:
        xs = (rotate_back(query), rotate_tokens(xs[1]), xs[2])
    configs, rounded = [], []
    for name, spec_name, x, quantizer in zip(("query", "key", "value"), _SPECS, xs, quantizers, strict=True):
        config, (scale, zero_point, rounding_key) = split_quantizer(quantizer)
        labels = (name, f"{spec_name}.scale", f"{spec_name}.zero_point")
        parts = read_parts(_NAME, labels, x, scale, zero_point, quantizer.spec)
        configs.append(config)
        # The shape of a scale follows from x.shape, so the batch is added afterwards.
        rounded.append((*(None if part is None else _add_batch(part) for part in parts), rounding_key))
    _check_value_scale(rounded[2][1], query.shape[-1])
    heads = xs[1].shape[-2]
    mask, bias = (None if x is None else group_heads(x, heads) for x in (mask, bias))
    operands = _AttentionArrays(tuple(rounded), bias, mask, query_lengths, token_lengths)
    y: Any = _attend(_AttentionOptions(_NAME, tuple(configs), *options), operands)
    return ungroup_heads(y).astype(query.dtype).reshape(query.shape)


def _read_operands(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: jax.Array | None,
    *lengths: jax.Array | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arrays of a call, mask and bias with rank 4, after a check against each other."""
    _check_operands(query, key, value)
    sizes = _read_score_sizes(query, key)
    mask, bias = read_mask(_NAME, mask, sizes), read_bias(_NAME, bias, sizes)
    for name, x in zip(_LENGTHS, lengths, strict=True):
        if x is not None:
            checks.check_array(_NAME, name, x, (np.dtype(jnp.int32),))
            checks.check_shape(_NAME, name, x, (sizes[0],), "one for each row of the batch")
    return query, key, value, bias, mask, *lengths


def _add_batch(part: jax.Array) -> jax.Array:
    return part if part.ndim == 4 else jnp.expand_dims(part, 0)


def _read_spec(argument: str, value: QuantSpec | Quantizer) -> Quantizer:
    """Return a Quantizer of a spec or of a Quantizer, after a check that its codes can be contracted."""
    quantizer = read_quantizer(_NAME, argument, value)
    expected = "a QuantSpec or a Quantizer"
    checks.require_type(quantizer is not None, _NAME, argument, expected, checks.describe_value(value))
    assert quantizer is not None
    check_query_spec(_NAME, argument, quantizer.spec)
    return quantizer


def _check_value_spec(spec: QuantSpec) -> None:
    """Check that the values of a spec have no zero point."""
    expected = "a signed symmetric spec"
    checks.require(spec.fixed_zero_point == 0, _NAME, "value_spec", expected, spec)


def _check_value_scale(scale: jax.Array, features: int) -> None:
    """Check that all features of a value, or the features of each block, share a scale."""
    blocks = scale.shape[3]
    expected = "a scale for all features of a token and head, such as PerToken(), or for blocks whose size divides "
    expected += f"{features}"
    fits = blocks == 1 or (blocks < features and features % blocks == 0)
    checks.require(fits, _NAME, "value_spec", expected, f"{blocks} scales")


def _read_window(size: Any) -> tuple[int, int] | None:
    """Return the number of tokens before and after a query that it attends to, or None."""
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    checks.require(len(pair) == 2, _NAME, "local_window_size", "an int or a pair of ints", size)
    for n in pair:
        checks.check_integer(_NAME, "local_window_size", n)
        checks.require(n >= 0, _NAME, "local_window_size", "0 or more tokens", size)
    return int(pair[0]), int(pair[1])


def _check_operands(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Check the dtypes and shapes of queries, keys and values against each other."""
    for argument, x in (("query", query), ("key", key), ("value", value)):
        checks.check_array(_NAME, argument, x, dtypes.FLOATS)
    expected = "rank 4, (batch, queries, heads, head_dim), or rank 3"
    checks.require(query.ndim in (3, 4), _NAME, "query", expected, f"shape {query.shape}")
    *batch, _, heads, features = query.shape
    fits = key.ndim == query.ndim and [*key.shape[:-3], key.shape[-1]] == [*batch, features]
    fits = fits and (heads % key.shape[-2] == 0 if key.shape[-2] else heads == 0)
    expected = f"shape ({', '.join(map(str, batch))}{', ' if batch else ''}tokens, a divisor of {heads}, {features})"
    checks.require(fits, _NAME, "key", expected, f"shape {key.shape}")
    checks.check_shape(_NAME, "value", value, key.shape, "the shape of key")
    for argument, x in (("key", key), ("value", value)):
        check_tokens_whole(_NAME, argument, x, x.ndim - 3)


def _read_score_sizes(query: jax.Array, key: jax.Array) -> tuple[int, int, int, int]:
    """Return (batch, heads, queries, tokens)."""
    batch = query.shape[0] if query.ndim == 4 else 1
    return batch, query.shape[-2], query.shape[-3], key.shape[-3]


# The differentiation rule of attention with quantized queries, keys and values.
#
# The forward pass contracts integers. The backward pass computes the scores and the weights again, so that it keeps
# nothing of the size of the scores, and differentiates the attention of the dequantized operands in floats. It takes
# the rounding of the weights for the identity, and passes the cotangent of each operand through the estimator of its
# rounding.


class _AttentionOptions(NamedTuple):
    """The static part of a call.

    Attributes:
        function: the name of the public function, for errors.
        configs: how queries, keys and values are rounded.
        hiding: causality and the window.
        factor: what the scores are multiplied by.
        digits: the number of digits of a weight.
    """

    function: str
    configs: tuple[RoundingConfig, RoundingConfig, RoundingConfig]
    hiding: Hiding
    factor: float
    digits: int


class _AttentionArrays(NamedTuple):
    """The arrays of a call.

    Attributes:
        rounded: for queries [batch, queries, heads, features], and for keys and values [batch, tokens, kv heads,
            features]: x, its scale, its zero point or None, and the key of a stochastic rounding or None.
        bias: float [batch, kv heads, groups, queries, tokens]; any dimension may be 1. Or None.
        mask: bool of such a shape, or None.
        query_lengths: int32 [batch], or None.
        token_lengths: int32 [batch], or None.
    """

    rounded: tuple[tuple[Any, Any, Any, Any], ...]
    bias: Any
    mask: Any
    query_lengths: Any
    token_lengths: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(statics: _AttentionOptions, operands: _AttentionArrays) -> jax.Array:
    """Return the attention, float32 [batch, kv heads, groups, queries, features]; all arguments are checked."""
    _, _, values, weights = _weigh(statics, operands)
    values, _ = split_features(values)
    codes = lax.transpose(values.codes, (0, 1, 3, 2))
    return weigh_values(weights, codes, codes.shape[2], statics.digits)


def _attend_fwd(statics: _AttentionOptions, operands: _AttentionArrays) -> tuple[jax.Array, _AttentionArrays]:
    return _attend(statics, operands), operands


def _attend_bwd(statics: _AttentionOptions, operands: _AttentionArrays, g: jax.Array) -> tuple[_AttentionArrays]:
    operands, g = _wait_for_cotangent(operands, g)
    q, k, v, weights = _weigh(statics, operands)
    queries, keys, values = (dequantize_checked(x).astype(jnp.float32) for x in (q, k, v))
    reciprocal = compute_reciprocal(weights.total)
    # A hidden token, or one with an underflowing weight, gets no gradient and gives none, even with a NaN in it.
    has_weight = weights.exponentials != 0
    has_weights, total = (lax.expand_dims(x, (2,)) for x in (has_weight, weights.total))
    # The weights that were contracted: the codes without the scales of the values' tokens. A NaN has the code 0.
    is_used = lax.expand_dims(has_weight, (2,)) & (
        (weights.codes != 0) | jnp.isnan(lax.expand_dims(weights.total, (2,)))
    )
    rounded = weights.codes.astype(jnp.float32) * (weights.step * compute_reciprocal(total))
    rounded = _keep_where(is_used, rounded / _read_token_scale(v))
    # The features of values with a scale for each block are cut into blocks, which have their own weights.
    blocks = rounded.shape[2]
    g, cut = (x.reshape(*x.shape[:-1], blocks, x.shape[-1] // blocks) for x in (g, values))
    d_values = jnp.einsum("bkngts,bkgtne->bksne", rounded, g).reshape(values.shape)
    d_rounded = _keep_where(has_weights, jnp.einsum("bkgtne,bksne->bkngts", g, cut))
    softmax = weights.exponentials * reciprocal
    mean = jnp.sum(jnp.sum(rounded * d_rounded, axis=-1, keepdims=True), axis=2)
    d_scores = _keep_where(has_weight, softmax * (jnp.sum(d_rounded, axis=2) - mean))
    # A row that sees a NaN has a NaN in `d_scores`. For the other rows its product with 0 must be 0.
    queries, keys = (_keep_where(jnp.isfinite(x), x) for x in (queries, keys))
    # `queries` includes the factor of the scores.
    d_queries = jnp.einsum("bkgts,bksd->bkgtd", d_scores, keys) * jnp.float32(statics.factor)
    d_keys = jnp.einsum("bkgts,bkgtd->bksd", d_scores, queries)
    batch, heads, groups, count, features = d_queries.shape
    cotangents = (
        lax.transpose(d_queries.reshape(batch, heads * groups, count, features), (0, 2, 1, 3)),
        *(lax.transpose(d, (0, 2, 1, 3)) for d in (d_keys, d_values)),
    )
    sides = zip(statics.configs, operands.rounded, cotangents, strict=True)
    rounded_cotangents = tuple((*compute_cotangents(config, *parts, d), None) for config, parts, d in sides)
    d_bias = None if operands.bias is None else _sum_to_shape(d_scores, operands.bias)
    return (_AttentionArrays(rounded_cotangents, d_bias, None, None, None),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _keep_where(condition: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(condition, values, jnp.zeros((), jnp.float32))


def _wait_for_cotangent(operands: _AttentionArrays, g: jax.Array) -> tuple[_AttentionArrays, jax.Array]:
    """Return the operands and the cotangent, and make everything that is computed from them wait for the cotangent.

    If one program contains both passes, XLA would otherwise share the weights between them and keep them in memory.
    """
    # A barrier does not accept keys, so they stay outside.
    arrays = [parts[:3] for parts in operands.rounded]
    (arrays, rest), g = lax.optimization_barrier(((arrays, tuple(operands[1:])), g))
    rounded = tuple((*parts, old[3]) for parts, old in zip(arrays, operands.rounded, strict=True))
    return _AttentionArrays(rounded, *rest), g


def _weigh(
    statics: _AttentionOptions, operands: _AttentionArrays
) -> tuple[QuantizedArray, QuantizedArray, QuantizedArray, RowWeights]:
    """Return the queries with the factor of the scores, the keys and the values, by head, and the weights."""
    q, k, v = (make_array(config, *parts) for config, parts in zip(statics.configs, operands.rounded, strict=True))
    queries = group_queries(q, k.shape[2], statics.factor)
    keys, values = (_move_heads(x) for x in (k, v))
    scores = add_bias(compute_scores(statics.function, queries, *split_features(keys)), operands.bias)
    arrays = (operands.mask, operands.query_lengths, operands.token_lengths)
    visible = derive_visible(statics.hiding, q.shape[1], k.shape[1], *arrays)
    return queries, keys, values, compute_weights(scores, _read_token_scale(values), visible, statics.digits)


def _move_heads(q: QuantizedArray) -> QuantizedArray:
    """Return [batch, tokens, heads, features] as [batch, heads, tokens, features]."""
    codes, scale, zero_point = (
        None if x is None else lax.transpose(x, (0, 2, 1, 3)) for x in (q.codes, q.scale, q.zero_point)
    )
    return QuantizedArray(codes, scale, zero_point, dtype=q.dtype, block_size=q.block_size)


def _read_token_scale(values: QuantizedArray) -> jax.Array:
    """Return the scales of values by head, float32 [batch, heads, blocks, 1, 1, tokens]; dimensions may be 1."""
    scale = dtypes.scale_as_float32(values.scale)
    return lax.expand_dims(jnp.swapaxes(scale, 2, 3), (3, 4))


def _sum_to_shape(values: jax.Array, like: jax.Array) -> jax.Array:
    """Return the sum of a cotangent over the dimensions along which an array was broadcast, in the array's dtype."""
    axes = tuple(a for a, (n, m) in enumerate(zip(like.shape, values.shape, strict=True)) if n != m)
    return jnp.sum(values, axis=axes, keepdims=True).astype(like.dtype)
