"""Batch normalization becomes part of the weights wherever its statistics are among the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq

from ..support.prepared import find_ranges, find_sqnr

RULES = jq.recipes.onnx_runtime()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3), use_bias=False)(x)))
        return nn.Dense(4)(x.mean((1, 2)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("params", "statistics"), meta_fields=())
@dataclasses.dataclass
class TrainState:
    params: Any
    statistics: Any


X = jax.ShapeDtypeStruct((2, 6, 6, 3), np.float32)


def make_linen() -> Any:
    return jax.eval_shape(Linen().init, jax.random.key(0), X)


def run_linen(params: Any, statistics: Any, x: jax.Array) -> jax.Array:
    return Linen().apply({"params": params, "batch_stats": statistics}, x)  # type: ignore[return-value]


def prepare_dict() -> tuple[Any, Any]:
    return Linen().apply, make_linen()


def prepare_tuple() -> tuple[Any, Any]:
    variables = make_linen()
    return lambda trees, x: run_linen(trees[0], trees[1], x), (variables["params"], variables["batch_stats"])


def prepare_dataclass() -> tuple[Any, Any]:
    variables = make_linen()
    state = TrainState(variables["params"], variables["batch_stats"])
    return lambda state, x: run_linen(state.params, state.statistics, x), state


def prepare_nnx() -> tuple[Any, Any]:
    graph, *states = nnx.split(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), nnx.Param, ...)
    return lambda states, x: nnx.merge(graph, *states)(x), tuple(states)


def prepare_equinox() -> tuple[Any, Any]:
    eqx: Any = pytest.importorskip("equinox")

    def make(key: Any) -> Any:
        norm = eqx.nn.BatchNorm(8, "batch", mode="batch", inference=True)
        return eqx.nn.Conv2d(3, 8, 3, padding=1, key=key), norm, eqx.nn.Linear(8, 4, key=key)

    def run_one(tree: Any, x: jax.Array) -> jax.Array:
        (conv, norm, out), state = tree
        return out(jax.nn.relu(norm(conv(x), state)[0]).mean((1, 2)))

    def run(tree: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(run_one, tree), axis_name="batch")(x.transpose(0, 3, 1, 2))

    return run, eqx.filter_eval_shape(eqx.nn.make_with_state(make), jax.random.key(0))


def prepare_haiku() -> tuple[Any, Any]:
    hk: Any = pytest.importorskip("haiku")

    def run(x: jax.Array, train: bool = False) -> jax.Array:
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), is_training=train)
        return hk.Linear(4)(jax.nn.relu(x).mean((1, 2)))

    network = hk.without_apply_rng(hk.transform_with_state(run))
    return lambda trees, x: network.apply(*trees, x)[0], jax.eval_shape(
        lambda key, x: network.init(key, x, True), jax.random.key(0), X
    )


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dict": prepare_dict,
    "tuple": prepare_tuple,
    "dataclass": prepare_dataclass,
    "nnx": prepare_nnx,
    "equinox": prepare_equinox,
    "haiku": prepare_haiku,
}


@pytest.mark.parametrize("name", list(FORMS))
def test_statistics_in_a_tree_are_folded(name: str) -> None:
    """Nothing is computed, so these are cheap."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        function, params = FORMS[name]()
        prepared = jq.prepare(function, params, X, rules=RULES, strict=True)
    assert prepared.coverage.outputs == "2 of 2 contractions give codes; in codes: mean", str(prepared.coverage)
    assert sum(plan.fold is not None for plan in prepared.leaves.values()) == 1


@pytest.mark.slow
def test_folded_statistics_of_a_tuple(rng: np.random.Generator) -> None:
    function, shapes = prepare_tuple()
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.5, 1.5, x.shape), np.float32), shapes)
    x = jnp.asarray(rng.normal(size=X.shape), np.float32)
    prepared = jq.prepare(function, params, x, rules=RULES)
    ranges = find_ranges(prepared, params, x)
    y = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    assert find_sqnr(y, jax.jit(function)(params, x)) > 20
    np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x), y)


def test_statistics_in_another_argument_are_named() -> None:
    variables = make_linen()
    trees = variables["params"], variables["batch_stats"]
    row = jq.prepare(run_linen, *trees, X, rules=RULES).coverage.rows[0]
    assert row.output is None
    assert row.output_reason.startswith("sub at ")
    assert row.output_reason.endswith("among the parameters)"), row.output_reason
    # Those of the batch itself are no argument.
    train = nn.BatchNorm(use_running_average=False)
    params = {"kernel": jnp.ones((8, 8)), "norm": jax.eval_shape(train.init, jax.random.key(0), jnp.ones((4, 8)))}

    def run(params: Any, x: jax.Array) -> Any:
        return train.apply(params["norm"], x @ params["kernel"], mutable=["batch_stats"])[0]

    row = jq.prepare(run, params, jnp.ones((4, 8)), rules=RULES).coverage.rows[0]
    assert row.output_reason.endswith("reads it as floats"), row.output_reason
