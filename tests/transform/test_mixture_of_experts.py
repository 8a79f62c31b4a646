"""A language model with a mixture of experts, trained here, serves with quantized experts."""

from __future__ import annotations

import functools
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq

from ..conftest import SEED

EXPERTS, CHOSEN, WIDTH, HIDDEN, HEADS, LENGTH, BATCH, STEPS = 8, 2, 64, 96, 4, 64, 16, 160
Params = dict[str, Any]


_FOUR_BITS = (
    jq.Rule(operation="ragged_dot", weight=jq.Weight("uint4", block=32, options={"symmetric": False})),
    *jq.recipes.weight_only_int8(),
)


def read_text() -> tuple[np.ndarray, int]:
    """Return the characters of Python's language reference as numbers, and how many different ones there are."""
    text = "".join(topics[name] for name in sorted(topics)[:40])
    symbols, numbers = np.unique(np.frombuffer(text.encode("ascii", "replace"), np.uint8), return_inverse=True)
    return numbers.astype(np.int32), len(symbols)


def create_params(rng: np.random.Generator, symbols: int) -> Params:
    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    weights = {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    experts = {"up": draw(EXPERTS, WIDTH, HIDDEN), "down": draw(EXPERTS, HIDDEN, WIDTH)}
    rest = {"table": draw(symbols, WIDTH), "head": draw(WIDTH, symbols), "router": draw(WIDTH, EXPERTS)}
    return weights | experts | rest | {"places": draw(LENGTH, WIDTH)}


def normalize(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mix_experts(params: Params, x: jax.Array) -> jax.Array:
    """Return, for tokens [n, width], the weighted sum of what the two likeliest experts make of each."""
    chances, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), CHOSEN)
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=EXPERTS)
    rows = jnp.repeat(x, CHOSEN, axis=0)[order]
    hidden = jax.nn.gelu(lax.ragged_dot(rows, params["up"], sizes))
    made = lax.ragged_dot(hidden, params["down"], sizes)
    made = jnp.zeros_like(made).at[order].set(made).reshape(-1, CHOSEN, WIDTH)
    return jnp.einsum("tcw,tc->tw", made, chances / chances.sum(-1, keepdims=True))


def predict(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the logits of what follows each token, [batch, length, symbols]."""
    x = params["table"][tokens] + params["places"][None]
    y = normalize(x)
    q, k, v = ((y @ params[name]).reshape(*tokens.shape, HEADS, -1) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params["o"]
    x = x + mix_experts(params, normalize(x).reshape(-1, WIDTH)).reshape(x.shape)
    return normalize(x) @ params["head"]


def compute_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


@functools.cache
def train(seed: int) -> tuple[Params, np.ndarray, float]:
    """Return a trained model, rows of text that it has not seen, and its loss before training."""
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(seed)
    text, symbols = read_text()
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    rows = rng.permutation(rows)
    held_out, seen = rows[:64], rows[64:]
    params, optimizer = create_params(rng, symbols), optax.adam(4e-3)

    @jax.jit
    def step(params: Params, state: Any, batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: compute_loss(predict(p, batch[:, :-1]), batch[:, 1:]))(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # for optax
        for _ in range(STEPS):
            params, state, loss = step(params, state, seen[rng.choice(len(seen), BATCH)])
            losses.append(float(loss))
    return params, held_out, losses[0]


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        (jq.recipes.weight_only_int8(), "weight-only"),
        (_FOUR_BITS, "weight-only"),
        (jq.recipes.w8a8_dynamic(), "integer"),
    ],
    ids=["weight_only_int8", "4-bit experts", "w8a8_dynamic"],
)
def test_loss_with_quantized_experts(recipe: Any, form: str) -> None:
    params, rows, first = train(SEED)
    tokens, targets = jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])
    want = float(compute_loss(jax.jit(predict)(params, tokens), targets))
    assert want < first - 1.2  # it has learned
    prepared = jq.prepare(predict, params, tokens, rules=recipe)
    experts = [row for row in prepared.coverage if row.operation == "ragged_dot"]
    assert [row.form for row in experts] == [form] * 2
    q = prepared.convert(params)
    assert all(isinstance(q.params[name], jq.QuantizedArray) for name in ("up", "down"))
    loss = float(compute_loss(jax.jit(prepared.apply)(q, tokens), targets))
    assert abs(loss - want) < 0.01
    # The codes of other experts in their place are worse by more than that.
    others = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), q.params["up"])
    spoiled = jq.QuantizedTree({**q.params, "up": others}, q.ranges)
    assert float(compute_loss(jax.jit(prepared.apply)(spoiled, tokens), targets)) > want + 0.05
