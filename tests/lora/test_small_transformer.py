"""Adapters on the 4-bit codes of a small transformer, beside adapters on its floats: the loss of five seeds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jaxquant as jq
from tests.cases import small_transformer as small

# A seed chooses the model, the adapters and the rows of each step. They are fixed: other seeds have another spread.
SEEDS, STEPS = range(5), 300
SETTINGS = jq.lora.LoRA(rank=8, targets="[01].*", alpha=16)


def compute_with_floats(adapters: Any, params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Return the logits of float parameters with adapters."""

    def multiply(x: jax.Array, w: jax.Array, name: str) -> jax.Array:
        if name not in adapters:
            return x @ w
        return x @ w + SETTINGS.scaling * (x @ adapters[name]["a"] @ adapters[name]["b"])

    return small.apply(params, tokens, multiply), params


def train_adapters(rules: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return held-out losses for each seed: of the model in floats, and after training adapters on codes and floats.

    A model learns a language in floats. Then adapters learn another language, in which the last token still counts as
    it did, but the one before it counts in another way.
    """
    first = small.Language.draw(np.random.default_rng(0))
    second = first._replace(before=small.Language.draw(np.random.default_rng(1)).before)
    held_out = second.sample(np.random.default_rng(2), 256)
    like = small.create_params(np.random.default_rng(0))
    prepared = jq.prepare(small.apply, like, held_out[: small.ROWS, :-1], rules=rules)

    def compute_with_codes(adapters: Any, adapted: jq.lora.AdaptedTree, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return prepared.fake_apply(adapted.replace(adapters=adapters), tokens), adapted

    learn = small.make_trainer(lambda params, state, tokens: (small.apply(params, tokens), state), STEPS, 1e-2)
    ways = [
        (small.make_trainer(compute, STEPS, 1e-2), small.make_score(compute, held_out))
        for compute in (compute_with_codes, compute_with_floats)
    ]
    losses = []
    for seed in SEEDS:
        rng = np.random.default_rng([3, seed])
        params, _ = learn(small.create_params(rng), None, first.sample(rng, STEPS, small.ROWS))
        rows, key = second.sample(rng, STEPS, small.ROWS), jax.random.key(seed)
        adapted = jq.lora.adapt(prepared, prepared.convert(params), SETTINGS, key)
        row = [ways[1][1]({}, params)]
        for (train, score), fixed in zip(ways, (adapted, params), strict=True):
            row.append(score(*train(adapted.adapters, fixed, rows)))
        losses.append(row)
    before, codes, floats = np.transpose(losses)
    return before, codes, floats


@pytest.mark.slow
def test_adapters_on_codes_end_within_the_spread_of_adapters_on_floats() -> None:
    """The mean loss is at most two standard deviations of the seeds from that of adapters on floats."""
    before, codes, floats = train_adapters(jq.recipes.weight_only_int4())
    assert (floats < before - 0.3).all()
    assert abs(codes.mean() - floats.mean()) <= 2 * floats.std(ddof=1), (codes, floats)
