"""A tiny character decoder, trained here: its greedy text with an int8 cache is that with a float cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxquant as jq

TEXT = "a cache of int8 codes holds the same story as a cache of floats; a quarter of the bytes tell it. "
STEPS = 256
HEADS, FEATURES, LAYERS = 2, 16, 2
WIDTH = HEADS * FEATURES
SYMBOLS = sorted(set(TEXT))
CODES = np.array([SYMBOLS.index(c) for c in TEXT * 4], np.int32)
# After "a cache of" either "int8" or "floats" may follow, so the prompt contains the letter that decides.
PROMPT = 12
LENGTH = PROMPT + STEPS


def make_params() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 4 * LAYERS))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5  # noqa: E731
    embedding = jax.random.normal(next(keys), (len(SYMBOLS), WIDTH)) * 0.3
    layers = [
        {"qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH), "up": draw(WIDTH, 64), "down": draw(64, WIDTH)}
        for _ in range(LAYERS)
    ]
    return {"embedding": embedding, "layers": layers}


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def embed_positions(positions: jax.Array) -> jax.Array:
    angles = positions[:, None].astype(jnp.float32) * (10.0 ** -jnp.linspace(0, 3, WIDTH // 2))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[None]


def decode(params: Any, tokens: jax.Array, positions: jax.Array, caches: Any, attend: Any) -> tuple[jax.Array, Any]:
    """Return the logits of tokens [batch, tokens], and the caches of all layers after them."""
    x = params["embedding"][tokens] + embed_positions(positions)
    new = []
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = (normalize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, FEATURES)
        y, cache = attend(*(qkv[:, :, i] for i in range(3)), cache)
        new.append(cache)
        x = x + y.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.relu(normalize(x) @ layer["up"]) @ layer["down"]
    return normalize(x) @ params["embedding"].T, new


def attend_without_cache(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache


def attend_to_floats(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    keys, values, index = cache
    keys, values = (jax.lax.dynamic_update_slice_in_dim(x, y, index, 1) for x, y in ((keys, k), (values, v)))
    places, queries = jnp.arange(LENGTH)[None], index + jnp.arange(q.shape[1])[:, None]
    y = jax.nn.dot_product_attention(q, keys, values, mask=(places <= queries)[None, None])
    return y, (keys, values, index + q.shape[1])


def attend_to_codes(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    cache = cache.append(k, v)
    return jq.attention(q, cache), cache


def train() -> Any:
    windows = np.stack([CODES[i : i + LENGTH + 1] for i in range(0, 90, 23)])
    optimizer = optax.adam(3e-3)

    def find_loss(params: Any) -> jax.Array:
        positions = jnp.arange(LENGTH)
        logits, _ = decode(params, jnp.asarray(windows[:, :-1]), positions, [None] * LAYERS, attend_without_cache)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])[:, 4:].mean()

    @jax.jit
    def run(params: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            params, moments = state
            loss, gradients = jax.value_and_grad(find_loss)(params)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), loss

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), length=250)
        return params, losses[-1]

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        return run(make_params())


def write(params: Any, caches: Any, attend: Any) -> str:
    """Return the greedy text after a prompt."""

    @jax.jit
    def run(params: Any, caches: Any) -> jax.Array:
        logits, caches = decode(params, jnp.asarray(CODES[None, :PROMPT]), jnp.arange(PROMPT), caches, attend)

        def step(state: Any, position: jax.Array) -> Any:
            token, caches = state
            logits, caches = decode(params, token[:, None], position[None], caches, attend)
            return (jnp.argmax(logits[:, -1], -1).astype(jnp.int32), caches), token[0]

        first = jnp.argmax(logits[:, -1], -1).astype(jnp.int32)
        _, tokens = jax.lax.scan(step, (first, caches), PROMPT + jnp.arange(STEPS))
        return tokens

    return "".join(SYMBOLS[i] for i in np.asarray(run(params, caches)))


@pytest.mark.slow
def test_greedy_text_is_that_of_a_float_cache() -> None:
    params, loss = train()
    assert loss < 0.2, "the decoder has not learned its text"
    empty = jnp.zeros((1, LENGTH, HEADS, FEATURES))
    floats = [(empty, empty, jnp.int32(0))] * LAYERS
    codes = [jq.KVCache.create((1, LENGTH, HEADS, FEATURES))] * LAYERS
    expected = write(params, floats, attend_to_floats)
    assert len(expected) == STEPS
    assert len(set(expected)) > 10
    assert write(params, codes, attend_to_codes) == expected
