"""States of sharded parameters: sharded alike, without communication, with the codes of one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

COLLECTIVE = re.compile(r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)")


@pytest.fixture(autouse=True)
def _promote() -> Iterator[None]:
    """Optax's own arithmetic mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shards_need_no_communication(kind: AxisType, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = {
        "both": PartitionSpec("data", "model"),
        "columns": PartitionSpec(None, ("data", "model")),
        "vector": PartitionSpec(("data", "model")),
    }
    shapes = {"both": (128, 96), "columns": (48, 128), "vector": (4096,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    tx: Any = jq.optim.quantize_state(optax.scale_by_adam())
    update, expected_state = jax.jit(tx.update), tx.init(params)
    by_path = lambda path, _: specs.get(path.split("/")[-1], PartitionSpec())  # noqa: E731
    state = jax.device_put(expected_state, jqd.find_shardings(expected_state, mesh, by_path))
    compiled = update.lower(placed, state).compile()
    assert not COLLECTIVE.findall(compiled.as_text() or "")
    expected, result = update(params, expected_state), compiled(placed, state)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    for moments in (result[1].inner.mu, result[1].inner.nu):
        for name, q in moments.items():
            assert q.codes.sharding.is_equivalent_to(placed[name].sharding, q.ndim), name
            assert q.scale.sharding.shard_shape(q.scale.shape) != q.scale.shape, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_explicit_axes_that_cut_blocks(seed: int | None, rng: np.random.Generator) -> None:
    """Blocks that lie on several devices, short blocks and stochastic rounding give the codes of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    shapes = {"rows": (24, 33), "columns": (20, 64), "vector": (104,)}
    specs = {"rows": PartitionSpec("data"), "columns": PartitionSpec(None, "data"), "vector": PartitionSpec("data")}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    tx: Any = jq.optim.quantize_state(optax.trace(0.5), min_size=1, seed=seed)
    expected, expected_state = jax.jit(tx.update)(params, tx.init(params))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
        updates, state = jax.jit(tx.update)(placed, tx.init(placed))
        for name, q in state.inner.trace.items():
            assert q.codes.sharding.is_equivalent_to(placed[name].sharding, q.ndim), name
        jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, expected_state))


@pytest.mark.slow
def test_under_shard_map(rng: np.random.Generator) -> None:
    """Each device updates its part of the state, which may be smaller than `min_size`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = {"w": jnp.asarray(rng.normal(size=(256, 32)), jnp.float32)}
    tx: Any = jq.optim.quantize_state(optax.scale_by_adam())
    state = tx.init(gradient)
    placement = jax.tree.map(lambda leaf: PartitionSpec("data") if leaf.ndim else PartitionSpec(), state)
    spread = {"w": PartitionSpec("data")}
    run = jax.shard_map(tx.update, mesh=mesh, in_specs=(spread, placement), out_specs=(spread, placement))
    result, expected = jax.jit(run)(gradient, state), jax.jit(tx.update)(gradient, state)
    jax.tree.map(np.testing.assert_array_equal, result[1].inner.nu, expected[1].inner.nu)
    jax.tree.map(np.testing.assert_array_equal, result[1].inner.mu, expected[1].inner.mu)


def test_parts_of_blocks_are_refused_under_shard_map() -> None:
    """Of a matrix of 64 rows each device has 8, half of a block: the error says so, before and in the update."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = {"w": jnp.ones((64, 64))}
    tx: Any = jq.optim.quantize_state(optax.scale_by_adam(), min_size=1)
    state = jax.eval_shape(tx.init, gradient)

    def choose(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec("data") if shape else PartitionSpec()

    with pytest.raises(ValueError, match=r"partitions of 'inner/mu/w': expected whole blocks of 16 on each device"):
        jqd.find_shardings(state, mesh, choose, whole_blocks=True)
    placement = jax.tree.map(lambda sharding: sharding.spec, jqd.find_shardings(state, mesh, choose))
    spread = {"w": PartitionSpec("data")}
    run = jax.shard_map(tx.update, mesh=mesh, in_specs=(spread, placement), out_specs=(spread, placement))
    with pytest.raises(ValueError, match=r"quantize_state\.update: state\.scale: .* of 16, got shape.*whole blocks"):
        jax.eval_shape(run, gradient, state)
