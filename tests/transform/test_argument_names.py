"""The arguments of the user's function may have the names of the methods' own parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..support.equality import check_equal


def apply(weights: Any, x: Any, *, self: Any, params: Any, ranges: Any, scales: Any, state: Any, function: Any) -> Any:
    y = jax.nn.relu(x @ weights["a"] + self) * params["factor"]
    return (y - ranges) @ weights["b"] * scales + state if function else y


@pytest.mark.slow
def test_keyword_arguments_with_the_names_of_own_parameters(rng: np.random.Generator) -> None:
    weights = {name: jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for name in "ab"}
    x = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    numbers = {"self": 0.5, "ranges": 0.25, "scales": 2.0, "state": jnp.ones((4, 8))}
    named = {**numbers, "params": {"factor": 0.5}, "function": True}
    prepared = jq.prepare(apply, weights, x, rules=jq.recipes.w8a8_static(), **named)
    assert prepared.check(weights, x, **named).summary == "2 integer"
    ranges = prepared.finalize(prepared.observe(prepared.init(), weights, x, **named))
    # `calibrate` has arguments named state, checkpoint and progress; the function gets its own from the batches.
    rest = {name: value for name, value in named.items() if name != "state"}
    jax.tree.map(check_equal, prepared.calibrate(weights, [{"x": x, "state": named["state"]}], **rest), ranges)
    y = prepared.apply(prepared.convert(weights, ranges), x, **named)
    check_equal(prepared.fake_apply(prepared.trainable(weights, ranges), x, **named), y)
    expected = apply(weights, x, **named)
    # In 150 draws the error was at most 0.023 of the largest value.
    np.testing.assert_allclose(y, expected, atol=0.05 * np.abs(expected).max())
