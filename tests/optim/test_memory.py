"""The memory of an update: few of the state's arrays exist as floats at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxquant as jq
from jaxquant.optim.quantize_state import run_in_order

COUNT, SIDE = 6, 256
PARAMS = {f"layer{i}": jnp.full((SIDE, SIDE), 1.0) for i in range(COUNT)}
_quantize: Any = jq.optim.quantize_state
_contrib: Any = optax.contrib


@pytest.fixture(autouse=True)
def _promote() -> Iterator[None]:
    """Optax's own arithmetic mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# How many arrays of floats are needed at a time: the moments of a parameter.
ORDERED: dict[str, tuple[Any, int]] = {
    "adamw": (_quantize(optax.adamw(optax.cosine_decay_schedule(1e-3, 9))), 2),
    "clipped": (_quantize(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))), 2),
    "lion": (_quantize(optax.lion(1e-3)), 2),
    "hyperparams": (optax.inject_hyperparams(lambda learning_rate: _quantize(optax.adam(learning_rate)))(1e-3), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ORDERED))
def test_moments_of_one_parameter_at_a_time(name: str) -> None:
    if jax.__version_info__ < (0, 11):
        pytest.skip("the XLA of jax 0.10 removes the barriers that order the update")
    tx, most = ORDERED[name]
    state = jax.eval_shape(tx.init, PARAMS)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, PARAMS).compile()
    memory: Any = compiled.memory_analysis()
    floats = 4 * SIDE * SIDE
    # The scales and the norms are small.
    assert memory.temp_size_in_bytes < (most + 1) * floats


def test_parts_share_no_array() -> None:
    """Results that depend on the same arrays, also results of calls, are computed together; others later, or never."""

    def run(xs: list[jax.Array]) -> Any:
        a, b, c, d = xs
        joined = jax.jit(lambda *both: [jnp.sin(x) for x in both])(a, b)
        return {"a": joined[0] + 1, "b": joined[1], "cd": c * d, "constant": 2.0, "input": d}

    def spy(xs: list[jax.Array]) -> Any:
        return run_in_order(run, xs)

    xs = [jnp.full(3, float(i)) for i in range(4)]
    text = str(jax.make_jaxpr(spy)(xs))
    assert text.count("optimization_barrier") == 2  # a, then b, then c and d
    mine, expected = jax.jit(spy)(xs), run(xs)
    assert list(mine) == list(expected)
    jax.tree.map(np.testing.assert_array_equal, mine, expected)


@pytest.mark.slow
def test_the_order_changes_no_bit(rng: np.random.Generator) -> None:
    """The update outside of `jax.jit` is not ordered; it has the codes of the compiled one."""
    tx = _quantize(optax.trace(0.5), min_size=1)
    gradients = [{f"w{i}": jnp.asarray(rng.normal(size=(20, 33)), jnp.float32) for i in range(3)} for _ in range(2)]
    mine = theirs = tx.init(gradients[0])
    for gradient in gradients:
        expected, theirs = tx.update(gradient, theirs)
        updates, mine = jax.jit(tx.update)(gradient, mine)
        jax.tree.map(np.testing.assert_array_equal, (updates, mine), (expected, theirs))


@pytest.mark.slow
def test_an_array_that_no_result_needs() -> None:
    """The state of a transformation that forgets one of its arrays."""
    make: Any = optax.GradientTransformation
    tx = _quantize(
        make(lambda p: p, lambda u, s, p=None: (u, {**s, "b": jnp.zeros(3)})), overrides={"": jq.optim.dynamic}
    )
    params = {"a": jnp.arange(3.0), "b": jnp.arange(3.0)}
    state = tx.init(params)
    assert isinstance(state.inner["b"], jq.QuantizedArray)
    _, new = jax.jit(tx.update)(params, state)
    np.testing.assert_array_equal(new.inner["b"].dequantize(), np.zeros(3))
    np.testing.assert_array_equal(new.inner["a"].codes, state.inner["a"].codes)
