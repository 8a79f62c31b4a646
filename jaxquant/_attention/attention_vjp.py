"""The differentiation rule of attention whose queries, keys and values are quantized.

The forward pass contracts integers. The backward pass computes the scores and the weights again, so that it keeps
nothing of the size of the scores, and differentiates the attention of the dequantized operands in floats. It takes the
rounding of the weights for the identity, and passes the cotangent of each operand through the estimator of its
rounding.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.quantized_array import QuantizedArray, dequantize_checked
from .._core import small_floats
from .._training.rounding_vjp import Config, find_cotangents, make_array
from .scores import add_bias, find_scores, group_queries
from .visibility import Hiding, find_visible
from .weigh_values import Weights, find_reciprocal, find_weights, weigh_values


class Statics(NamedTuple):
    """The static part of a call.

    Attributes:
        function: the name of the public function, for errors.
        configs: how queries, keys and values are rounded.
        hiding: causality and the window.
        factor: what the scores are multiplied by.
        digits: the number of digits of a weight.
    """

    function: str
    configs: tuple[Config, Config, Config]
    hiding: Hiding
    factor: float
    digits: int


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        rounded: for queries [batch, queries, heads, features], and for keys and values [batch, tokens, kv heads,
            features]: x, its scale, its zero point or None, and the key of a stochastic rounding or None.
        bias: float [batch, kv heads, groups, queries, tokens], whose dimensions may be 1, or None.
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
def attend(statics: Statics, operands: Operands) -> jax.Array:
    """Return the attention, float32 [batch, kv heads, groups, queries, features]; all arguments are checked."""
    _, _, values, weights = _weigh(statics, operands)
    codes = lax.transpose(values.codes, (0, 1, 3, 2))
    return weigh_values(weights, codes, codes.shape[2], statics.digits)


def _attend_fwd(statics: Statics, operands: Operands) -> tuple[jax.Array, Operands]:
    return attend(statics, operands), operands


def _attend_bwd(statics: Statics, operands: Operands, g: jax.Array) -> tuple[Operands]:
    operands, g = _wait_for_cotangent(operands, g)
    q, k, v, weights = _weigh(statics, operands)
    queries, keys, values = (dequantize_checked(x).astype(jnp.float32) for x in (q, k, v))
    reciprocal = find_reciprocal(weights.total)
    # A hidden token, or one whose weight underflows, gets no gradient and gives none, even if it or the row has a NaN.
    has_weight = weights.exponentials != 0
    # The weights that were contracted: the codes without the scales of the values' tokens. A NaN has the code 0.
    is_used = has_weight & ((weights.codes != 0) | jnp.isnan(weights.total))
    rounded = weights.codes.astype(jnp.float32) * (weights.step * reciprocal)
    rounded = _keep_where(is_used, rounded / _read_token_scale(v))
    d_values = jnp.einsum("bkgts,bkgtd->bksd", rounded, g)
    d_weights = _keep_where(has_weight, jnp.einsum("bkgtd,bksd->bkgts", g, values))
    softmax = weights.exponentials * reciprocal
    mean = jnp.sum(rounded * d_weights, axis=-1, keepdims=True)
    d_scores = _keep_where(has_weight, softmax * (d_weights - mean))
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
    rounded_cotangents = tuple((*find_cotangents(config, *parts, d), None) for config, parts, d in sides)
    d_bias = None if operands.bias is None else _sum_to_shape(d_scores, operands.bias)
    return (Operands(rounded_cotangents, d_bias, None, None, None),)


attend.defvjp(_attend_fwd, _attend_bwd)


def _keep_where(condition: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(condition, values, jnp.zeros((), jnp.float32))


def _wait_for_cotangent(operands: Operands, g: jax.Array) -> tuple[Operands, jax.Array]:
    """Return the operands and the cotangent, and make everything that is computed from them wait for the cotangent.

    If one program contains both passes, XLA would otherwise share the weights between them and keep them in memory.
    """
    # A barrier does not accept keys, so they stay outside.
    arrays = [parts[:3] for parts in operands.rounded]
    (arrays, rest), g = lax.optimization_barrier(((arrays, tuple(operands[1:])), g))
    rounded = tuple((*parts, old[3]) for parts, old in zip(arrays, operands.rounded, strict=True))
    return Operands(rounded, *rest), g


def _weigh(statics: Statics, operands: Operands) -> tuple[QuantizedArray, QuantizedArray, QuantizedArray, Weights]:
    """Return the queries with the factor of the scores, the keys and the values, by head, and the weights."""
    q, k, v = (make_array(config, *parts) for config, parts in zip(statics.configs, operands.rounded, strict=True))
    queries = group_queries(q, k.shape[2], statics.factor)
    keys, values = (_move_heads(x) for x in (k, v))
    scores = add_bias(find_scores(statics.function, queries, keys), operands.bias)
    arrays = (operands.mask, operands.query_lengths, operands.token_lengths)
    visible = find_visible(statics.hiding, q.shape[1], k.shape[1], *arrays)
    return queries, keys, values, find_weights(scores, _read_token_scale(values), visible, statics.digits)


def _move_heads(q: QuantizedArray) -> QuantizedArray:
    """Return [batch, tokens, heads, features] as [batch, heads, tokens, features]."""
    codes, scale, point = (
        None if x is None else lax.transpose(x, (0, 2, 1, 3)) for x in (q.codes, q.scale, q.zero_point)
    )
    return QuantizedArray(codes, scale, point, dtype=q.dtype, block_size=q.block_size)


def _read_token_scale(values: QuantizedArray) -> jax.Array:
    """Return the scales of values by head, float32 [batch, heads, 1, 1, tokens], whose dimensions may be 1."""
    scale = small_floats.scale_as_float32(values.scale)
    return lax.expand_dims(lax.squeeze(scale, (3,)), (2, 3))


def _sum_to_shape(values: jax.Array, like: jax.Array) -> jax.Array:
    """Return the sum of a cotangent over the dimensions along which an array was broadcast, in the array's dtype."""
    axes = tuple(a for a, (n, m) in enumerate(zip(like.shape, values.shape, strict=True)) if n != m)
    return jnp.sum(values, axis=axes, keepdims=True).astype(like.dtype)
