"""A small transformer, and a language of random transitions that it learns in a few hundred steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, ROWS = 16, 64, 2, 2, 16, 32
Params = dict[str, Any]
Multiply = Callable[[jax.Array, jax.Array, str], jax.Array]
# A function from what is trained, a state, and tokens to logits and the next state.
Predict = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


class Language(NamedTuple):
    """A source of tokens of which each depends on the two before it.

    Attributes:
        last: the logits of the next token for each last token [vocabulary, vocabulary].
        before: the logits that the token before the last one adds.
    """

    last: np.ndarray
    before: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Language:
        return cls(*(rng.normal(0, 1.5, (VOCABULARY, VOCABULARY)) for _ in range(2)))

    def sample(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Return rows of tokens, int32 [*shape, LENGTH + 1]."""
        tokens = np.zeros((*shape, LENGTH + 1), np.int32)
        tokens[..., :2] = rng.integers(0, VOCABULARY, (*shape, 2))
        for place in range(2, LENGTH + 1):
            logits = self.last[tokens[..., place - 1]] + self.before[tokens[..., place - 2]]
            # The largest of the logits plus Gumbel noise is a sample of their softmax.
            tokens[..., place] = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        return tokens


def create_params(rng: np.random.Generator) -> Params:
    """Return float32 parameters; a matrix has the shape [inputs, outputs]."""
    shapes = {"table": (VOCABULARY, WIDTH), "places": (LENGTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.qkv": (WIDTH, 3 * WIDTH), f"{layer}.out": (WIDTH, WIDTH)}
        shapes |= {f"{layer}.up": (WIDTH, 4 * WIDTH), f"{layer}.down": (4 * WIDTH, WIDTH)}
    scales = {name: 0.5 if name in ("table", "places") else shape[0] ** -0.5 for name, shape in shapes.items()}
    return {name: jnp.asarray(rng.normal(0, scales[name], s).astype(np.float32)) for name, s in shapes.items()}


def apply(params: Params, tokens: jax.Array, multiply: Multiply = lambda x, w, name: x @ w) -> jax.Array:
    """Return the logits of the tokens that follow, [rows, LENGTH, vocabulary].

    Args:
        params: the parameters.
        tokens: int32 [rows, LENGTH].
        multiply: the product of activations with a matrix, of which it gets the name.
    """

    def normalize(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)

    x = params["table"][tokens] + params["places"][None]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in range(LAYERS):
        y = multiply(normalize(x), params[f"{layer}.qkv"], f"{layer}.qkv")
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(y, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None]).reshape(x.shape)
        x = x + multiply(y, params[f"{layer}.out"], f"{layer}.out")
        y = jax.nn.relu(multiply(normalize(x), params[f"{layer}.up"], f"{layer}.up"))
        x = x + multiply(y, params[f"{layer}.down"], f"{layer}.down")
    return multiply(normalize(x), params["head"], "head")


def compute_entropy(logits: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the cross entropy of the tokens after the first two, which are random."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), rows[:, 1:])
    return losses[:, 1:].mean()


def make_trainer(predict: Predict, steps: int, rate: float) -> Callable[[Any, Any, np.ndarray], Any]:
    """Return a compiled function that trains with Adam, and returns what was trained, and the last state.

    It takes what is trained, the first state, and the rows of all steps [steps, rows, LENGTH + 1].

    Args:
        predict: the function.
        steps: the number of steps.
        rate: the first rate, which falls to 0.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def compute_loss(trained: Any, state: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
        logits, state = predict(trained, state, rows[:, :-1])
        return compute_entropy(logits, rows), state

    def step(carry: Any, rows: jax.Array) -> tuple[Any, None]:
        trained, moments, state = carry
        gradient, state = jax.grad(compute_loss, has_aux=True)(trained, state, rows)
        # Optimizers of optax mix dtypes, which the tests' JAX refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(gradient, moments)
            return (optax.apply_updates(trained, updates), moments, state), None

    @jax.jit
    def train(trained: Any, state: Any, rows: jax.Array) -> Any:
        trained, _, state = jax.lax.scan(step, (trained, optimizer.init(trained), state), rows)[0]
        return trained, state

    return train


def make_score(predict: Predict, rows: np.ndarray) -> Callable[[Any, Any], float]:
    """Return a function from what was trained and a state to the loss on held-out rows."""
    fixed = jnp.asarray(rows)
    score = jax.jit(lambda trained, state: compute_entropy(predict(trained, state, fixed[:, :-1])[0], fixed))
    return lambda trained, state: float(score(trained, state))
