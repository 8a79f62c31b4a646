"""The rows on attention: a decode step with a quantized cache, and training, each against float32.

A decode step appends one token to a full cache, in place, and attends to all of it. The shape of a step is batch x
kv_heads x queries for each kv head x length x head_dim; that of training is batch x heads x length x head_dim. The
opponents of a step are `jax.nn.dot_product_attention` on a cache [batch, length, kv_heads, head_dim], as one writes it,
for which XLA:CPU copies the cache; and the same attention by two contractions of a float cache in the layout of
`jq.KVCache` that is written in place. The rows on parts show what dominates a step; what is missing in them of
`attention` is the softmax and the codes of the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxquant as jq

from .contest import FLOAT32, Call, Contest, Missing, Row, Table

_HEADS_FIRST = "float32, heads first"
_OPPONENTS = (FLOAT32, _HEADS_FIRST)
# The sums of floats may have any order, and a weight next to the middle of two codes may get either.
_TOLERANCE = 2e-3


def _draw(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _keep_state(step: Callable[..., Any], state: Any, *arguments: Any) -> Call:
    """Return a call of a step that donates its state, and keeps the new one for the next call."""
    compiled = jax.jit(step, donate_argnums=0)
    held = [state]

    def call() -> jax.Array:
        y, held[0] = compiled(held[0], *arguments)
        return y

    return call


def _step_with_codes(cache: jq.KVCache, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    cache = dataclasses.replace(cache, index=jnp.int32(cache.length - 1)).append(k, v)
    return jq.attention(q, cache), cache


def _step_with_floats(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    keys, values = cache
    last = jnp.int32(keys.shape[1] - 1)
    keys, values = (lax.dynamic_update_slice_in_dim(x, y, last, 1) for x, y in ((keys, k), (values, v)))
    lengths = jnp.full(q.shape[:1], last + 1)
    return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths), (keys, values)


def _step_with_heads_first(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    keys, values = cache
    last = jnp.int32(keys.shape[2] - 1)

    def write(_: Any, arrays: Any) -> Any:
        updates = (jnp.transpose(k, (0, 2, 1, 3)), jnp.transpose(v, (0, 2, 3, 1)))
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, last, axis)
            for x, y, axis in zip(arrays, updates, (2, 3), strict=True)
        )

    # Without the loop XLA:CPU copies the whole cache in each step, which `KVCache.append` avoids in this way, too.
    keys, values = lax.fori_loop(np.int32(0), lax.optimization_barrier(np.int32(1)), write, (keys, values))
    batch, heads, length, features = keys.shape
    grouped = q.reshape(batch, heads, -1, features)
    scores = jnp.einsum("bkgd,bksd->bkgs", grouped, keys) * np.float32(features**-0.5)
    visible = jnp.arange(length)[None, None, None] <= last
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bkgs,bkds->bkgd", weights, values).reshape(q.shape), (keys, values)


def _attend_in_float64(q: Any, k: Any, v: Any) -> np.ndarray:
    """Return the attention of dequantized operands [batch, tokens, heads, features]; every query sees every token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def _is_close(expected: np.ndarray, result: Any) -> np.ndarray:
    return np.abs(np.asarray(result, np.float64) - expected) <= _TOLERANCE * np.abs(expected).max()


def _decode(dtype: str, batch: int, heads: int, groups: int, length: int, features: int) -> Contest:
    tokens = [_draw(batch, length, heads, features, seed=seed) for seed in (1, 2)]
    q = _draw(batch, 1, heads * groups, features, seed=3)
    new = [x[:, -1:] for x in tokens]
    cache = _fill(dtype, batch, heads, length, features)
    fake = jq.fake_quantize(q, jq.QuantSpec("int8", jq.PerToken()))
    expected = _attend_in_float64(fake, *cache.dequantize())
    heads_first = (jnp.transpose(tokens[0], (0, 2, 1, 3)), jnp.transpose(tokens[1], (0, 2, 3, 1)))
    nbytes = cache.nbytes
    return Contest(
        _keep_state(_step_with_codes, cache, q, *new),
        {
            FLOAT32: _keep_state(_step_with_floats, tuple(tokens), q, *new),
            _HEADS_FIRST: _keep_state(_step_with_heads_first, heads_first, q, *new),
        },
        lambda: np.ones(expected.shape, np.bool_),
        nbytes,
        unlike=frozenset(_OPPONENTS),
        compared=functools.partial(_is_close, expected),
        multiply_adds=2 * batch * heads * groups * length * features,
    )


def _append(dtype: str, batch: int, heads: int, groups: int, length: int, features: int) -> Contest:
    """A part of a step: a token is appended."""
    del groups
    cache = _fill(dtype, batch, heads, length, features)
    new = [_draw(batch, 1, heads, features, seed=seed) for seed in (1, 2)]

    def step(cache: jq.KVCache, k: jax.Array, v: jax.Array) -> Any:
        cache = dataclasses.replace(cache, index=jnp.int32(length - 1)).append(k, v)
        return cache.index, cache

    return _make_part(_keep_state(step, cache, *new), Missing("not measured"), cache.nbytes // length)


def _attend(dtype: str, batch: int, heads: int, groups: int, length: int, features: int) -> Contest:
    """A part of a step: a query attends."""
    cache = _fill(dtype, batch, heads, length, features)
    q = _draw(batch, 1, heads * groups, features, seed=3)
    return _make_part(functools.partial(jax.jit(jq.attention), q, cache), Missing("not measured"), cache.nbytes)


def _score(dtype: str, batch: int, heads: int, groups: int, length: int, features: int) -> Contest:
    """A part of attention: the contraction of the keys' codes with the queries' codes."""
    keys = _fill(dtype, batch, heads, length, features).quantized_keys
    q = _draw(batch, heads, groups, features, seed=3)
    codes = jq.quantize(q, jq.QuantSpec("int8", jq.PerToken()))
    contract = functools.partial(jax.jit(lambda q, k: jq.einsum("bkgd,bksd->bkgs", q, k)), codes, keys)
    floats = functools.partial(jax.jit(lambda q, k: jnp.einsum("bkgd,bksd->bkgs", q, k)), q, keys.dequantize())
    return _make_part(contract, floats, keys.nbytes)


def _weigh(dtype: str, batch: int, heads: int, groups: int, length: int, features: int) -> Contest:
    """A part of attention: the contraction of the codes of the values with the two digits of each weight."""
    values = _fill(dtype, batch, heads, length, features).quantized_values
    digits = jnp.asarray(np.random.default_rng(4).integers(0, 128, (batch, heads, 2 * groups, length)), jnp.int8)
    weights = digits[:, :, :groups].astype(jnp.float32)
    numbers = (((3,), (3,)), ((0, 1), (0, 1)))
    contract = functools.partial(jax.jit(lambda w, v: jq.integer.dot_general(w, v, numbers)), digits, values.codes)
    floats = functools.partial(jax.jit(lambda w, v: jnp.einsum("bkgs,bkds->bkgd", w, v)), weights, values.dequantize())
    return _make_part(contract, floats, values.nbytes)


def _fill(dtype: str, batch: int, heads: int, length: int, features: int) -> jq.KVCache:
    """Return a cache that is full."""
    spec = jq.QuantSpec(dtype, jq.PerToken())
    tokens = [_draw(batch, length, heads, features, seed=seed) for seed in (1, 2)]
    return jax.jit(jq.KVCache.append)(jq.KVCache.create((batch, length, heads, features), spec, spec), *tokens)


def _make_part(call: Call, floats: Call | Missing, nbytes: int) -> Contest:
    opponents = {FLOAT32: Missing("not measured"), _HEADS_FIRST: floats}
    return Contest(call, opponents, Missing("a part"), nbytes, unlike=frozenset(_OPPONENTS))


def _train(batch: int, heads: int, length: int, features: int) -> Contest:
    xs = [_draw(batch, length, heads, features, seed=seed) for seed in (1, 2, 3)]

    def differentiate(attend: Callable[..., Any]) -> Any:
        return jax.jit(jax.value_and_grad(lambda xs: (attend(*xs, is_causal=True) ** 2).sum()))

    mine, floats = (differentiate(f) for f in (jq.quantized_dot_product_attention, jax.nn.dot_product_attention))
    return Contest(
        functools.partial(mine, xs),
        {FLOAT32: functools.partial(floats, xs), _HEADS_FIRST: Missing("not measured")},
        Missing("gradients of floats"),
        sum(x.nbytes for x in xs),
        unlike=frozenset(_OPPONENTS),
        multiply_adds=7 * batch * heads * length * length * features,
    )


_SHAPES = (
    *((1, 8, 1, length, 128) for length in (512, 2048, 4096, 16384)),
    *((1, 8, 4, length, 128) for length in (512, 4096, 16384)),
    *((8, 8, 1, length, 64) for length in (512, 4096)),
)
_PART_SHAPES = tuple((1, 8, 1, length, 128) for length in (512, 4096, 16384))
TABLE = Table(
    "Attention",
    _OPPONENTS,
    [
        *(
            Row(f"decode step, {dtype}", s, functools.partial(_decode, dtype, *s))
            for dtype in ("int8", "int4")
            for s in _SHAPES
        ),
        *(
            Row(f"part of a decode step, {dtype}: {name}", s, functools.partial(part, dtype, *s))
            for dtype, parts in (
                ("int8", {"append": _append, "attention": _attend, "keys": _score, "values": _weigh}),
                ("int4", {"append": _append, "attention": _attend}),
            )
            for name, part in parts.items()
            for s in _PART_SHAPES
        ),
        *(
            Row("attention and its gradient", s, functools.partial(_train, *s))
            for s in ((2, 8, 256, 64), (1, 8, 1024, 64))
        ),
    ],
    throughput="GB/s",
)
