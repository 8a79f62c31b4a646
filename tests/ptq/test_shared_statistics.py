"""Statistics of contractions that read the same value: collected once, and equal to the statistics of each alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

FEATURES, OUTPUTS, LAYERS = 8, 6, 3
NAMES = ("q", "k", "v", "other", "twice", "twice#1", "sides", "layers/gate", "layers/up", "layers/down")


def project(params: Any, x: jax.Array) -> jax.Array:
    return jax.jit(lambda w, x: x @ w)(params, x)


def apply(params: Any, x: jax.Array, *, alike: bool = True) -> Any:
    """Return results of contractions, some of which read the same value."""
    y = jnp.tanh(x)
    key = y if alike else y + 1
    parts = [y @ params["q"], key @ params["k"], y @ params["v"], (y * 2) @ params["other"]]
    parts += [project(params["twice"], y), project(params["twice"], y - 3)]
    # The other dimension of the same value, which is as long.
    parts.append(jnp.einsum("nm,no->mo", y, params["sides"]))

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        hidden = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
        return x + hidden @ weights["down"], None

    return parts, jax.lax.scan(layer, y, params["layers"])[0]


@pytest.fixture
def case(rng: np.random.Generator) -> tuple[Any, list[np.ndarray]]:
    shapes = dict.fromkeys(("q", "k", "v", "other", "twice", "sides"), (FEATURES, OUTPUTS))
    params: Any = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    stacked = {"gate": (FEATURES, OUTPUTS), "up": (FEATURES, OUTPUTS), "down": (OUTPUTS, FEATURES)}
    params["layers"] = {n: jnp.asarray(rng.normal(0, 0.3, (LAYERS, *s)), jnp.float32) for n, s in stacked.items()}
    return params, [rng.normal(size=(FEATURES, FEATURES)).astype(np.float32) for _ in range(3)]


def list_inputs(params: Any, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the vectors that each contraction reads, in float64."""
    y = np.tanh(x.astype(np.float64))
    found = {"q": y, "k": y, "v": y, "other": 2 * y, "twice": y, "twice#1": y - 3, "sides": y.T}
    layers: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
    for index in range(LAYERS):
        gate, up, down = (np.asarray(params["layers"][name][index], np.float64) for name in layers)
        hidden = (y @ gate) / (1 + np.exp(-(y @ gate))) * (y @ up)
        for name, vectors in zip(layers, (y, y, hidden), strict=True):
            layers[name].append(vectors)
        y = y + hidden @ down
    return found | {f"layers/{name}": np.stack(parts) for name, parts in layers.items()}


def test_the_same_inputs_are_counted_once(case: Any) -> None:
    params, batches = case
    prepared = jq.prepare(apply, params, batches[0], rules=jq.recipes.weight_only_int8())
    stats = ptq.collect(prepared, params, batches, progress=False)
    assert sorted(stats) == sorted(NAMES)
    inputs = [list_inputs(params, x) for x in batches]
    for name in NAMES:
        x = np.concatenate([part[name] for part in inputs], axis=-2)
        second = np.swapaxes(x, -1, -2) @ x / x.shape[-2]
        np.testing.assert_allclose(stats[name].second[..., 0, :, :], second, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(stats[name].largest[..., 0, :], np.abs(x).max(-2), rtol=1e-5)
    shared = [{name for name in NAMES if stats[name].second is stats[first].second} for first in NAMES]
    assert shared[0] == shared[1] == shared[2] == {"q", "k", "v"}
    assert shared[7] == shared[8] == {"layers/gate", "layers/up"}
    assert all(shared[place] == {NAMES[place]} for place in (3, 4, 5, 6, 9))
    # The states of one pass: those that are shared count once, so all ten fit into what seven take.
    sizes = {name: sum(8 * x.size for x in (stats[name].second, stats[name].mean, stats[name].mean)) for name in NAMES}
    sizes |= {name: sizes[name] + 4 * stats[name].mean.size + 4 * stats[name].count.size for name in NAMES}
    total = sum(size for name, size in sizes.items() if name not in ("k", "v", "layers/up"))
    limited = ptq.collect(prepared, params, iter(batches), limit=total, progress=False)  # an iterator is read once
    jax.tree.map(np.testing.assert_array_equal, limited, stats)
    with pytest.raises(TypeError, match="batches that can be read 2 times"):
        ptq.collect(prepared, params, iter(batches), limit=total - 1, progress=False)


def test_algorithms_read_shared_statistics(case: Any) -> None:
    """The codes are the same as for a function in which each contraction reads a value of its own."""
    params, batches = case
    rules = [jq.Rule(weight=jq.Weight("int4"))]
    prepared = jq.prepare(apply, params, batches[0], rules=rules)
    together = ptq.collect(prepared, params, batches, progress=False)
    moments = {name: jax.tree.map(lambda x: x + 0, part) for name, part in together.moments.items()}
    found = [
        ptq.apply(prepared, params, stats, ptq.GPTQ(), progress=False).tree.params
        for stats in (together, ptq.Statistics(moments, together.uses))
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)
    names = {"q": [rules[0], jq.Rule(keep="float")], "k": [jq.Rule("q", keep="float"), *rules]}
    for name, own in names.items():
        alone = jq.prepare(apply, params, batches[0], rules=own)
        stats = ptq.collect(alone, params, batches, progress=False)
        np.testing.assert_array_equal(stats[name].second, together[name].second)


def test_a_call_that_shares_otherwise_is_refused(case: Any) -> None:
    params, batches = case
    prepared = jq.prepare(apply, params, batches[0], rules=jq.recipes.weight_only_int8())
    expected = r"ptq\.collect: batches: .* contractions share their inputs as in the first one, got others for k"
    with pytest.raises(ValueError, match=expected):
        ptq.collect(prepared, params, [batches[0], {"x": batches[1], "alike": False}], progress=False)
