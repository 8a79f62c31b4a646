"""Second moments of streams, against numpy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ptq

from ..support.equality import check_equal

F32 = np.float32


def accumulate(moments: Any, batches: Any) -> Any:
    state = moments.init(batches[0])
    for batch in batches:
        state = moments.update(state, batch)
    return state


def check_moments(actual: Any, x: np.ndarray) -> None:
    """Check all statistics of inputs [samples, ..., inputs]."""
    wide = x.astype(np.float64)
    second = np.einsum("n...i,n...j->...ij", wide, wide) / len(x)
    np.testing.assert_allclose(actual.second, second, rtol=0, atol=1e-6 * np.abs(second).max())
    np.testing.assert_allclose(actual.mean, wide.mean(0), rtol=0, atol=1e-6 * np.abs(wide).max())
    np.testing.assert_allclose(actual.magnitude, np.abs(wide).mean(0), rtol=1e-5)
    check_equal(actual.largest, np.abs(x).max(0))
    assert float(actual.count) == len(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [False, True])
def test_streams(rng: np.random.Generator, groups: bool) -> None:
    moments = ptq.second_moments(groups=groups)
    x = rng.normal(0.3, 1, (4, 8, 3, 5)).astype(F32)
    rows = x.reshape(-1, 3, 5) if groups else x.reshape(-1, 5)
    state = accumulate(moments, list(x))
    check_moments(moments.finalize(state), rows)
    merged = moments.merge(accumulate(moments, x[:1]), accumulate(moments, x[1:]))
    check_moments(moments.finalize(merged), rows)
    scanned = jax.lax.scan(lambda s, b: (moments.update(s, b), None), moments.init(x[0]), jnp.asarray(x))[0]
    check_equal(scanned.second, state.second)
    # Empty batches change nothing.
    check_equal(moments.update(state, x[0, :0]).second, state.second)


def test_many_batches_lose_no_digits(rng: np.random.Generator) -> None:
    """The sum of many batches has the error of one batch, where one float32 would lose digits with each of them."""
    moments = ptq.second_moments()
    x = jnp.asarray(rng.uniform(1, 2, (1, 2)), F32)

    @jax.jit
    def run(x: jax.Array) -> Any:
        def step(state: Any, _: None) -> Any:
            return moments.update(state, x), moments.update(state, x).second_rest[0, 0]

        return jax.lax.scan(step, moments.init(x), None, 20000)[0]

    state = run(x)
    exact = np.asarray(x[0], np.float64)
    product = np.asarray(jnp.outer(x[0], x[0]), np.float64)
    total = np.asarray(state.second, np.float64) + np.asarray(state.second_rest, np.float64)
    np.testing.assert_allclose(total, 20000 * product, rtol=1e-12)
    np.testing.assert_allclose(moments.finalize(state).second, np.outer(exact, exact), rtol=2e-7)


@pytest.mark.slow
def test_devices_are_reduced(rng: np.random.Generator) -> None:
    moments = ptq.second_moments()
    x = rng.normal(size=(16, 5)).astype(F32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def observe(x: jax.Array) -> Any:
        return moments.all_reduce(moments.update(moments.init(x), x), "data")

    state = jax.jit(jax.shard_map(observe, mesh=mesh, in_specs=split, out_specs=whole))(x)
    check_moments(moments.finalize(state), x)


@pytest.mark.slow
def test_low_precision(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(6, 4)), jnp.bfloat16)
    moments = ptq.second_moments()
    check_moments(moments.finalize(moments.update(moments.init(x), x)), np.asarray(x, F32))


def test_errors() -> None:
    moments = ptq.second_moments()
    state = moments.init(jnp.zeros((2, 3)))
    name = r"^jaxquant\.ptq\.second_moments\."
    with pytest.raises(ValueError, match=name + r"finalize: state: expected data, got none; update the state with a b"):
        moments.finalize(state)
    with pytest.raises(ValueError, match=name + r"finalize: state: expected finite numbers in all batches, got a NaN"):
        moments.finalize(moments.update(state, np.full((2, 3), np.nan, F32)))
    with pytest.raises(ValueError, match=name + r"update: batch: expected last dimensions \(3,\), as for the example "):
        moments.update(state, np.ones((2, 4), F32))
    with pytest.raises(
        TypeError, match=name + r"update: batch: expected dtype float32, float16 or bfloat16, got int32"
    ):
        moments.update(state, np.ones((2, 3), np.int32))
    with pytest.raises(
        TypeError, match=name + r"merge: b: expected a MomentsState, as ptq.second_moments.init returns"
    ):
        moments.merge(state, 3)
    with pytest.raises(ValueError, match=name + r"init: example: expected rank 1 or more, got rank 0"):
        moments.init(jnp.zeros(()))
    with pytest.raises(TypeError, match=name + r"init: example: expected an array or a jax.ShapeDtypeStruct, got int"):
        moments.init(3)
    with pytest.raises(TypeError, match=r"^jaxquant\.ptq\.second_moments: groups: expected True or False, got 'x'"):
        ptq.second_moments(groups="x")  # type: ignore[arg-type]
