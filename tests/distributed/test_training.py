"""Data-parallel training with gradients that travel as codes reaches the loss of gradients that travel as floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import distributed as jqd

P = PartitionSpec
INT8 = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 128))
INT4 = jq.QuantSpec(jnp.int4, jq.Blocked(-1, 32))
STEPS, RATE, SEEDS = 60, 0.5, 5


def find_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    logits = jax.nn.relu(x @ params["first"]) @ params["second"]
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * y, axis=-1))


def average_floats(grads: Any, residual: Any, key: jax.Array) -> Any:
    return lax.pmean(grads, "d"), residual


def average_codes(grads: Any, residual: Any, key: jax.Array) -> Any:
    return jqd.pmean(grads, "d", spec=INT8), residual


def average_stochastically(grads: Any, residual: Any, key: jax.Array) -> Any:
    return jqd.pmean(grads, "d", spec=INT8, key=key), residual


def average_with_feedback(grads: Any, residual: Any, key: jax.Array) -> Any:
    total, residual = jqd.psum_with_error_feedback(grads, residual, "d", spec=INT4)
    return jax.tree.map(lambda g: g / np.float32(8), total), residual


def train(average: Callable[..., Any], seeds: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the loss on all data after training from each seed; each device has its part of the data."""

    def run(seed: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), 2)
        params = {
            "first": jax.random.normal(keys[0], (64, 32)) / np.float32(8),
            "second": jax.random.normal(keys[1], (32, 10)) / np.float32(6),
        }
        params = jax.tree.map(lambda w: lax.pcast(w, "d", to="varying"), params)

        def step(state: Any, i: jax.Array) -> Any:
            params, residual = state
            key = jax.random.fold_in(jax.random.key(seed), i)
            picked = jax.random.choice(jax.random.fold_in(key, lax.axis_index("d")), x.shape[0], (32,))
            grads, residual = average(jax.grad(find_loss)(params, x[picked], y[picked]), residual, key)
            return (jax.tree.map(lambda w, g: w - np.float32(RATE) * g, params, grads), residual), None

        residual = jax.tree.map(jnp.zeros_like, params)
        (params, _), _ = lax.scan(step, (params, residual), jnp.arange(STEPS))
        return lax.pmean(find_loss(params, x, y), "d")

    return jax.vmap(run)(seeds)


def run_devices(average: Callable[..., Any]) -> np.ndarray:
    """Return the losses of all seeds on eight devices."""
    x, labels = load_digits(return_X_y=True)
    x, y = (x[:1792] / 16).astype(np.float32), np.eye(10, dtype=np.float32)[labels[:1792]]
    mapped = jax.shard_map(
        lambda seeds, x, y: train(average, seeds, x, y),
        mesh=Mesh(np.array(jax.devices()[:8]), ("d",)),
        in_specs=(P(), P("d"), P("d")),
        out_specs=P(),
    )
    return np.asarray(jax.jit(mapped)(jnp.arange(SEEDS), x, y))


@pytest.fixture(scope="module")
def floats() -> np.ndarray:
    return run_devices(average_floats)


@pytest.mark.slow
@pytest.mark.parametrize("average", [average_codes, average_stochastically, average_with_feedback])
def test_quantized_gradients_reach_the_loss_of_floats(average: Callable[..., Any], floats: np.ndarray) -> None:
    codes, spread = run_devices(average), floats.max() - floats.min()
    assert floats.max() < 0.5, "expected a network that learns"
    assert abs(codes.mean() - floats.mean()) <= spread
    assert codes.max() <= floats.max() + spread
