"""A language model with a mixture of 8 experts, trained in the test and served with quantized experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxquant as jq
from jaxquant import ptq

EXPERTS, CHOSEN, VOCABULARY, FEATURES, HIDDEN, TOKENS = 8, 2, 64, 32, 64, 16
SHAPES = {
    "table": (VOCABULARY, FEATURES), "previous": (FEATURES, FEATURES), "router": (FEATURES, EXPERTS),
    "gate": (EXPERTS, FEATURES, HIDDEN), "up": (EXPERTS, FEATURES, HIDDEN), "down": (EXPERTS, HIDDEN, FEATURES),
}  # fmt: skip
MOST = 0.01  # the nats that quantized experts may cost
Tree = dict[str, Any]


def apply(params: Tree, tokens: jax.Array) -> jax.Array:
    """Return logits: each token is mixed with the one before it, and goes through two of the experts."""
    x = jq.take(params["table"], tokens, mode="clip")
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    x = (x + before @ params["previous"]).reshape(-1, FEATURES)
    scores, experts = lax.top_k(x @ params["router"], CHOSEN)
    # A row for each choice of a token, in the order of the experts.
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    rows = x[order // CHOSEN]
    hidden = jax.nn.silu(lax.ragged_dot(rows, params["gate"], sizes)) * lax.ragged_dot(rows, params["up"], sizes)
    found = lax.ragged_dot(hidden, params["down"], sizes)
    found = jnp.zeros_like(found).at[order].set(found).reshape(-1, CHOSEN, FEATURES)
    x = x + (found * jax.nn.softmax(scores)[..., None]).sum(1)
    return (x @ params["table"].T).reshape(*tokens.shape, VOCABULARY)


def compute_logits(params: Tree, tokens: np.ndarray) -> np.ndarray:
    """Return the same in numpy in float64, token by token and expert by expert."""
    w = {name: np.asarray(x, np.float64) for name, x in params.items()}
    logits = np.empty((*tokens.shape, VOCABULARY))
    for row, column in np.ndindex(*tokens.shape):
        x = w["table"][tokens[row, column]].copy()
        if column:
            x += w["table"][tokens[row, column - 1]] @ w["previous"]
        scores = x @ w["router"]
        best = np.argsort(-scores)[:CHOSEN]
        parts = np.exp(scores[best] - scores[best].max())
        result = x.copy()
        for expert, part in zip(best, parts / parts.sum(), strict=True):
            gate, up = x @ w["gate"][expert], x @ w["up"][expert]
            result += part * ((gate / (1 + np.exp(-gate)) * up) @ w["down"][expert])
        logits[row, column] = w["table"] @ result
    return logits


def measure_loss(function: Any, params: Any, tokens: jax.Array) -> jax.Array:
    labels = optax.softmax_cross_entropy_with_integer_labels
    return labels(function(params, tokens)[:, :-1], tokens[:, 1:]).mean()


def draw_texts(rng: np.random.Generator, count: int) -> jax.Array:
    """Return texts in which a token mostly follows from the two before it."""
    texts = rng.integers(0, VOCABULARY, (count, TOKENS))
    for place in range(2, TOKENS):
        a, b = texts[:, place - 1], texts[:, place - 2]
        texts[:, place] = np.where(
            rng.random(count) < 0.85, (5 * a + 3 * b * (a % 3) + 7) % VOCABULARY, texts[:, place]
        )
    return jnp.asarray(texts, jnp.int32)


def train(rng: np.random.Generator, texts: jax.Array, steps: int) -> Tree:
    params = {name: jnp.asarray(rng.normal(0, 0.18, shape), jnp.float32) for name, shape in SHAPES.items()}
    optimizer = optax.adam(1e-2)

    @jax.jit
    def run(params: Tree, batches: jax.Array) -> Tree:
        def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
            gradient = jax.grad(lambda params: measure_loss(apply, params, batch))(carry[0])
            updates, state = optimizer.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]

    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        return run(params, texts[rng.integers(0, len(texts), (steps, 32))])


def test_quantized_experts_cost_little(rng: np.random.Generator) -> None:
    texts = draw_texts(rng, 3200)
    held_out, texts = texts[:256], texts[256:]
    params = train(rng, texts, 200)
    loss = float(measure_loss(apply, params, held_out))
    # Trained, and by its experts: without them it knows little.
    assert loss < 2.3
    assert float(measure_loss(apply, {**params, "down": 0 * params["down"]}, held_out)) > loss + 0.3
    np.testing.assert_allclose(apply(params, held_out[:4]), compute_logits(params, np.asarray(held_out[:4])), atol=1e-3)
    # The router chooses, and a choice that is near may change with its codes.
    router, int8 = jq.Rule("router", keep="float"), jq.recipes.weight_only_int8()
    int4 = jq.Weight("int4", block=16, options={"symmetric": False})
    for rules, form, dtype in (
        ((router, *int8), "weight-only", "int8"),
        ((router, *jq.recipes.w8a8_dynamic()), "integer", "int8"),
        ((router, jq.Rule(operation="ragged_dot", weight=int4), *int8), "weight-only", "int4"),
    ):
        prepared = jq.prepare(apply, params, held_out, rules=rules)
        experts = [row for row in prepared.coverage if row.operation == "ragged_dot"]
        assert [(row.name, row.form, row.weight and str(row.weight.dtype)) for row in experts] == [
            (name, form, dtype) for name in ("gate", "up", "down")
        ]
        q = prepared.convert(params)
        if dtype == "int4":
            q = ptq.apply(prepared, params, None, ptq.Nearest("searched"), progress=False).tree
        run = jax.jit(prepared.apply)
        cost = float(measure_loss(run, q, held_out)) - loss
        assert 0 < abs(cost) < MOST, (dtype, form, cost)
        if form == "weight-only":
            floats = {n: x.dequantize() if isinstance(x, jq.QuantizedArray) else x for n, x in q.params.items()}
            expected = compute_logits(floats, np.asarray(held_out[:4]))
            np.testing.assert_allclose(run(q, held_out[:4]), expected, atol=1e-3)
