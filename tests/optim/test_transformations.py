"""Optax's transformations and wrappers with their state in codes, run: against float states and numpy's codes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxquant as jq
from jaxquant._core.granularity import Aligned
from jaxquant.optim.quantize_state import _MOMENTS, _SECOND_MOMENTS

from ..oracles import optimizer_text

F32 = np.float32
PARAMS = {"dense": {"bias": jnp.zeros(32), "kernel": jnp.ones((128, 32))}, "embed": jnp.ones((160, 48))}
D, L = "dynamic", "logarithmic"
MASK = {"dense": True, "embed": False}
_quantize: Any = jq.optim.quantize_state
_contrib: Any = optax.contrib
Wrap = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _promote() -> Iterator[None]:
    """Optax's own arithmetic mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_partition(a: Any, b: Any) -> Any:
    return optax.partition({"a": a, "b": b}, {"dense": "a", "embed": "b"})


def inject(wrap: Wrap) -> Any:
    return optax.inject_hyperparams(lambda learning_rate: wrap(optax.adam(learning_rate)))(
        learning_rate=optax.linear_schedule(1.0, 0.0, 9)
    )


def repeat(wrap: Wrap) -> Any:
    return optax.MultiSteps(wrap(optax.adam(1e-3)), 2).gradient_transformation()


# Each is built with a function around the part whose state becomes codes. Then the codebooks in the state.
TRANSFORMATIONS: dict[str, tuple[Callable[[Wrap], Any], set[str]]] = {
    "sgd": (lambda wrap: wrap(optax.sgd(0.1, momentum=0.9)), {D}),
    "lion": (lambda wrap: wrap(optax.lion(1e-3)), {D}),
    "amsgrad": (lambda wrap: wrap(optax.amsgrad(1e-3)), {D, L}),
    "rmsprop": (lambda wrap: wrap(optax.rmsprop(1e-3, centered=True)), {D, L}),
    "adafactor": (lambda wrap: wrap(optax.adafactor(1e-3, min_dim_size_to_factor=512)), {L}),
    "adadelta": (lambda wrap: wrap(optax.adadelta(1e-3)), {L}),
    "adagrad": (lambda wrap: wrap(optax.adagrad(1e-3)), set()),
    "schedule free": (lambda wrap: wrap(_contrib.schedule_free_adamw(1e-3)), {L}),
    "schedule free sgd": (lambda wrap: wrap(_contrib.schedule_free(optax.sgd(0.1), 0.1)), set()),
    "muon": (lambda wrap: wrap(_contrib.muon(1e-3)), {D}),
    "chain": (
        lambda wrap: wrap(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 9)))
        ),
        {D, L},
    ),
    "chain around": (
        lambda wrap: optax.chain(
            optax.clip_by_global_norm(1.0), wrap(optax.scale_by_adam()),
            optax.scale_by_learning_rate(optax.cosine_decay_schedule(1e-3, 9)),
        ),
        {D, L},
    ),
    "masked": (lambda wrap: wrap(optax.masked(optax.adam(1e-3), MASK)), {D, L}),
    "mask around": (lambda wrap: optax.masked(wrap(optax.adam(1e-3)), MASK), {D, L}),
    "partition": (lambda wrap: wrap(make_partition(optax.adam(1e-3), optax.sgd(0.1))), {D, L}),
    "partition around": (lambda wrap: make_partition(wrap(optax.adam(1e-3)), wrap(optax.sgd(0.1, 0.9))), {D, L}),
    "multi steps": (lambda wrap: wrap(optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()), {D, L}),
    "multi steps around": (repeat, {D, L}),
    "hyperparams": (
        lambda wrap: wrap(optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 9))),
        {D, L},
    ),
    "hyperparams around": (inject, {D, L}),
    "apply if finite": (lambda wrap: optax.apply_if_finite(wrap(optax.adam(1e-3)), 3), {D, L}),
}  # fmt: skip


def is_wrapped(node: Any) -> bool:
    return isinstance(node, jq.optim.QuantizedState)


def is_quantized(node: Any) -> bool:
    return isinstance(node, jq.QuantizedArray)


def unwrap(state: Any) -> Any:
    """Return a state in the structure of the plain transformation's, with QuantizedArrays as leaves."""
    return jax.tree.map(lambda node: node.inner if is_wrapped(node) else node, state, is_leaf=is_wrapped)


def read_sizes(q: jq.QuantizedArray) -> tuple[int, ...]:
    sizes = Aligned(q.block_size).sizes(q.scale.shape, q.shape)
    assert sizes is not None
    return sizes


def decode(leaf: Any) -> Any:
    """Return the numbers of a leaf, by numpy; a copy, because the state is donated afterwards."""
    if not is_quantized(leaf):
        return np.array(leaf)
    levels = np.asarray(leaf.codebook.levels)
    return optimizer_text.dequantize(np.array(leaf.codes), np.array(leaf.scale), levels, read_sizes(leaf))


def check_leaf(leaf: Any, expected: Any) -> None:
    """Compare a leaf of a new state with the leaf of floats. The two programs may differ in a last bit of a float."""
    if not is_quantized(leaf):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-7)
        return
    codes, scale = optimizer_text.quantize(np.asarray(expected), np.asarray(leaf.codebook.levels), read_sizes(leaf))
    np.testing.assert_allclose(leaf.scale, scale, rtol=1e-6)
    difference = np.abs(np.asarray(leaf.codes).astype(int) - codes)
    assert difference.max() <= 1
    assert np.mean(difference != 0) < 0.01


def sample_gradients(rng: np.random.Generator) -> Any:
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), PARAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_updates_and_states(name: str, rng: np.random.Generator) -> None:
    """Four steps with a donated state: each is the plain update from the decoded state, whose result is encoded."""
    build, books = TRANSFORMATIONS[name]
    plain, tx = build(lambda inner: inner), build(_quantize)
    step, exact_step = jax.jit(tx.update, donate_argnums=1), jax.jit(plain.update)
    state = tx.init(PARAMS)
    rows = jq.optim.describe_state(state).rows
    assert {row.stored.split(",")[0] for row in rows if "," in row.stored} == books
    for _ in range(4):
        gradients = sample_gradients(rng)
        floats = jax.tree.map(decode, unwrap(state), is_leaf=is_quantized)
        expected, exact = exact_step(gradients, floats, PARAMS)
        structure = jax.tree.structure(state)
        updates, state = step(gradients, state, PARAMS)
        assert jax.tree.structure(state) == structure
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), updates, expected)
        jax.tree.map(check_leaf, unwrap(state), exact, is_leaf=is_quantized)


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_shapes_and_dtypes(name: str) -> None:
    """The update keeps the structure, the shapes and the dtypes of the state, also where optax wraps the wrapper."""
    build, books = TRANSFORMATIONS[name]
    tx = build(_quantize)
    state = jax.eval_shape(tx.init, PARAMS)
    rows = jq.optim.describe_state(state).rows
    assert {row.stored.split(",")[0] for row in rows if "," in row.stored} == books
    updates, new = jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    types = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (new, state, updates, PARAMS)]
    assert types[0] == types[1]
    assert types[2] == types[3]


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped(rng: np.random.Generator) -> None:
    """`optax.apply_if_finite` around the wrapper: the state keeps its bits, and the next step is that without it."""
    tx: Any = optax.apply_if_finite(_quantize(optax.adam(1e-3)), 3)
    update = jax.jit(tx.update)
    first, second = sample_gradients(rng), sample_gradients(rng)
    _, state = update(first, tx.init(PARAMS), PARAMS)
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(np.nan), second)
    updates, skipped = update(bad, state, PARAMS)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, skipped.inner_state, state.inner_state)
    (resumed, _), (expected, _) = update(second, skipped, PARAMS), update(second, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)


@pytest.mark.slow
def test_steps_without_a_change_keep_the_bits(rng: np.random.Generator) -> None:
    """`optax.MultiSteps` inside of the wrapper: the codes of the moments are quantized again, and stay as they are."""
    tx: Any = _quantize(optax.MultiSteps(optax.adam(1e-3), 3))
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = update(sample_gradients(rng), state, PARAMS)
    for _ in range(2):
        _, new = update(sample_gradients(rng), state, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, new.inner.inner_opt_state, state.inner.inner_opt_state)
        state = new


def test_the_states_of_optax_are_known() -> None:
    """A state or a field that optax renames would silently stay in floats."""
    states = {}
    for module in (optax, optax.contrib, optax.transforms):
        states |= {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    unnamed = (
        optax.scale_by_rms(bias_correction=True), optax.scale_by_stddev(bias_correction=True),
        optax.scale_by_optimistic_gradient(),
    )  # fmt: skip
    for tx in unnamed:
        state = tx.init({"w": jnp.ones(2)})
        states[type(state).__name__] = type(state)
    for table in (_MOMENTS, _SECOND_MOMENTS):
        for name, fields in table.items():
            assert set(fields) <= set(states[name]._fields), name
