"""Second moments of gradients: their values, and that errors which results do not show count little with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

from ..support.equality import check_equal

F32 = np.float32
INT4 = (jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int4")))


def pool(params: Any, x: jax.Array) -> jax.Array:
    """Return the mean over tokens of a dense layer's outputs."""
    return (x @ params["dense"]).mean(1)


def sample_pooled(rng: np.random.Generator) -> tuple[Any, jax.Array]:
    """Return parameters, and texts whose tokens differ much in directions that their means do not show."""
    common, noise = rng.normal(size=(64, 1, 16)), rng.normal(size=(64, 4, 16))
    mixed = (noise * np.where(np.arange(16) < 8, 8, 0.1)) @ rng.normal(size=(16, 16))
    x = common + np.concatenate([mixed, -mixed], 1)
    return {"dense": jnp.asarray(rng.normal(size=(16, 8)), F32)}, jnp.asarray(x, F32)


@pytest.mark.slow
def test_moments_of_a_mean(rng: np.random.Generator) -> None:
    """The gradient is mean(x) r^T, of which the second moment is that of the means times the number of outputs."""
    params, x = sample_pooled(rng)
    prepared = jq.prepare(pool, params, x, rules=INT4)
    # The mean over many random vectors; one batch gives one of them.
    second = ptq.collect_gradients(prepared, params, [x] * 500, key=jax.random.key(3), progress=False)["dense"]
    means = np.asarray(x, np.float64).mean(1)
    expected = 8 * means.T @ means
    assert second.shape == (1, 16, 16)
    assert second.dtype == F32
    assert np.linalg.norm(second[0] - expected) < 0.15 * np.linalg.norm(expected)


@pytest.mark.slow
def test_results_are_nearer_to_those_of_floats(rng: np.random.Generator) -> None:
    params, x = sample_pooled(rng)
    prepared = jq.prepare(pool, params, x, rules=INT4)
    gradients = ptq.collect_gradients(prepared, params, [x] * 20, key=jax.random.key(3), progress=False)
    plain, weighted, empty = (
        ptq.apply(prepared, params, [x], ptq.GPTQ(), gradients=chosen).tree for chosen in (None, gradients, {})
    )
    errors = [
        float(jnp.sum((prepared.apply(qparams, x) - pool(params, x)) ** 2)) for qparams in (plain, weighted, empty)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] == errors[0]
    # Statistics take them, too.
    stats = ptq.collect(prepared, params, [x], progress=False)
    other = ptq.apply(prepared, params, stats, ptq.GPTQ(), gradients=gradients).tree
    check_equal(other.params["dense"].codes, weighted.params["dense"].codes)


@pytest.mark.slow
def test_each_weight_that_is_contracted(rng: np.random.Generator) -> None:
    """A grouped convolution, a transposed weight, a stack of layers, a table, and outputs that no result reads."""

    def network(params: Any, images: jax.Array) -> dict[str, jax.Array]:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            images, params["conv"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2
        )
        x = x.reshape(x.shape[0], -1) @ params["dense"].T + params["table"][jnp.arange(x.shape[0])]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
        return {"y": x, "count": images.shape[0] + jnp.int32(0), "unread": jax.lax.stop_gradient(x @ params["unread"])}

    shapes = {"conv": (3, 3, 2, 4), "dense": (6, 16), "table": (8, 6), "stack": (3, 6, 6), "unread": (6, 2)}
    params = {name: jnp.asarray(rng.normal(0, 0.5, shape), F32) for name, shape in shapes.items()}
    batches = [jnp.asarray(rng.normal(size=(8, 4, 4, 4)), F32) for _ in range(3)]
    prepared = jq.prepare(network, params, batches[0], rules=INT4)
    gradients = ptq.collect_gradients(prepared, params, iter(batches), key=jax.random.key(0), progress=False)
    assert {name: x.shape for name, x in gradients.items()} == {
        "conv": (2, 18, 18), "dense": (1, 16, 16), "stack": (3, 6, 6), "unread": (1, 6, 6),
    }  # fmt: skip
    assert not gradients["unread"].any()
    for name in ("conv", "dense", "stack"):
        assert (np.linalg.eigvalsh(np.asarray(gradients[name], np.float64)).min(1) > -1e-3).all()
        assert gradients[name].any()
    # With inputs in floats, which the codes of other weights do not change.
    stats = ptq.collect(prepared, params, batches, progress=False)
    plain, weighted = (ptq.apply(prepared, params, stats, ptq.GPTQ(), gradients=g) for g in (None, gradients))
    check_equal(plain.tree.params["unread"].codes, weighted.tree.params["unread"].codes)
    assert all(jnp.isfinite(q.dequantize()).all() for q in weighted.tree.params.values())


@pytest.mark.slow
def test_errors(rng: np.random.Generator) -> None:
    params, x = sample_pooled(rng)
    prepared = jq.prepare(pool, params, x, rules=INT4)
    apply: Any = ptq.apply
    collect: Any = ptq.collect_gradients
    key, collector = jax.random.key(0), "jaxquant.ptq.collect_gradients"
    cases: list[tuple[Any, str]] = [
        (lambda: collect(prepared, params, [], key=key), f"{collector}: batches: expected at least"),
        (
            lambda: collect(prepared, params, x, key=key),
            f"{collector}: batches: expected an iterable",
        ),
        (lambda: collect(prepared, params, [x], key=3), f"{collector}: key: expected one key of jax.random, got 3"),
        (lambda: collect(params, params, [x], key=key), f"{collector}: prepared: expected a Prep"),
        (
            lambda: collect(prepared, params, [x.at[0].set(np.nan)], key=key),
            f"dense: {collector}: batches: expected finite gradients",
        ),
        (
            lambda: apply(prepared, params, [x], ptq.GPTQ(), gradients={"other": jnp.eye(16)[None]}),
            "jaxquant.ptq.apply: gradients: expected weights that the rules quantize: dense, got other",
        ),
        (
            lambda: apply(prepared, params, [x], ptq.GPTQ(), gradients={"dense": jnp.eye(8)[None]}),
            r"dense: jaxquant.ptq.apply: gradients: expected shape \(1, 16, 16\) .*got",
        ),
        (lambda: apply(prepared, params, [x], ptq.GPTQ(), gradients=[1]), "jaxquant.ptq.apply: gradients: expected a"),
        (
            lambda: apply(prepared, params, [x], ptq.GPTQ(), gradients={"dense": jnp.full((1, 16, 16), np.nan)}),
            "dense: jaxquant.ptq.apply: gradients: expected finite numbers",
        ),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=text):
            call()
