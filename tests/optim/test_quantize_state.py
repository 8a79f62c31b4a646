"""Wrapped optax transformations: which arrays become codes, exact steps, transforms of JAX, donation, checkpoints."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import checkpoint

from ..oracles import optimizer_text

F32 = np.float32
PARAMS = {"dense": {"bias": jnp.zeros(32), "kernel": jnp.ones((128, 32))}, "embed": jnp.ones((160, 48))}
BYTES = {"dense/kernel": 128 * 32 + 4 * 16, "embed": 160 * 48 + 4 * 30}
_quantize: Any = jq.optim.quantize_state
_transformation: Any = optax.GradientTransformation
_with_arguments: Any = optax.GradientTransformationExtraArgs


@pytest.fixture(autouse=True)
def _promote() -> Iterator[None]:
    """Optax's own arithmetic mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def list_codes(state: Any) -> dict[str, str]:
    """The codebook of each quantized array by its path without "inner/"."""
    rows = jq.optim.describe_state(state).rows
    return {row.path.removeprefix("inner/"): row.stored.split(",")[0] for row in rows if "," in row.stored}


def shapes(tx: Any, params: Any = PARAMS) -> Any:
    return jax.eval_shape(tx.init, params)


def test_adam() -> None:
    state = shapes(_quantize(optax.adam(1e-3)))
    assert list_codes(state) == {
        "0/mu/dense/kernel": "dynamic", "0/mu/embed": "dynamic",
        "0/nu/dense/kernel": "logarithmic", "0/nu/embed": "logarithmic",
    }  # fmt: skip
    report = jq.optim.describe_state(state)
    sizes = {row.path: row.nbytes for row in report.rows}
    assert sizes["inner/0/mu/dense/bias"] == 128
    assert {name: sizes[f"inner/0/nu/{name}"] for name in BYTES} == BYTES
    assert report.nbytes == sum(sizes.values()) <= 0.27 * report.float_nbytes
    assert str(report).splitlines()[-1].split() == [
        "total",
        str(report.nbytes),
        f"{report.nbytes / report.float_nbytes:.3f}",
    ]


D, L, D_BOOK = "dynamic", "logarithmic", jq.optim.dynamic


def test_extra_arguments_reach_the_transformation() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: u * factor, updates), state

    tx = _quantize(_with_arguments(lambda params: params, update))
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), factor=jnp.float32(3))
    np.testing.assert_array_equal(updates["w"], np.array([3, 3], F32))


def test_overrides_and_sizes() -> None:
    nf4 = jq.QuantSpec(jq.nf4, jq.Blocked(-1, 32))
    tx = _quantize(optax.adam(1e-3), overrides={"embed": None, "mu/.*bias": nf4, "nu": jq.optim.dynamic}, min_size=9999)
    state = shapes(tx)
    assert list_codes(state) == {"0/mu/dense/bias": "nf4", "0/nu/dense/bias": D, "0/nu/dense/kernel": D}
    assert state.inner[0].mu["dense"]["bias"].scale.shape == (1,)
    own = _transformation(lambda p: {"nu": p}, lambda u, s, p=None: (u, s))
    assert not list_codes(shapes(_quantize(own)))  # what a state that optax does not define holds is not known
    assert list_codes(shapes(_quantize(own, overrides={"nu": jq.optim.logarithmic}), {"w": jnp.ones(3)})) == {"nu/w": L}
    small = {
        "empty": jnp.zeros((0, 4)),
        "scalar": jnp.zeros(()),
        "key": jax.random.key(0),
        "half": jnp.zeros(3, jnp.bfloat16),
    }
    keep = _transformation(lambda p: p, lambda u, s, p=None: (u, s))
    tx = _quantize(keep, overrides={"": D_BOOK})
    state = tx.init(small)
    assert set(list_codes(state)) == {"half", "scalar"}
    assert state.inner["half"].dtype == jnp.bfloat16
    tx.update(small, state)
    assert "key<fry>" in str(jq.optim.describe_state(state))


def step_trace(x: np.ndarray, codes: np.ndarray, scale: np.ndarray, sizes: tuple[int, ...]) -> Any:
    """One step of momentum 0.5 in numpy."""
    book = np.asarray(jq.optim.dynamic.levels)
    trace = x + F32(0.5) * optimizer_text.dequantize(codes, scale, book, sizes)
    return trace, *optimizer_text.quantize(trace, book, sizes)


@pytest.mark.slow
def test_steps_against_numpy(rng: np.random.Generator) -> None:
    """Five steps of momentum, whose float operations are exact: eager, jit with donation, scan and vmap."""
    tx = _quantize(optax.trace(0.5), min_size=1)
    gradients = rng.normal(size=(5, 2, 40, 24)).astype(F32)
    gradients[:, :, :16, :16] = 0
    gradients[3, :, 20, 3] = F32(1e-41)
    start = jnp.zeros((40, 24))

    def run(gradients: jax.Array) -> Any:
        return lax.scan(lambda state, g: tx.update(g, state)[::-1], tx.init(start), gradients)

    final, updates = jax.jit(jax.vmap(run, in_axes=1))(gradients)
    for replica in range(2):
        codes, scale = np.full((40, 24), 127, np.uint8), np.ones((3, 2), F32)
        eager, donated = tx.init(start), tx.init(start)
        donating = jax.jit(tx.update, donate_argnums=1)
        for step in range(5):
            g = gradients[step, replica]
            trace, codes, scale = step_trace(g, codes, scale, (16, 16))
            np.testing.assert_array_equal(updates[replica, step], trace)
            if replica == 0:
                update, donated = donating(g, donated)
                np.testing.assert_array_equal(update, trace)
            if replica == 0 and step < 2:
                update, eager = tx.update(jnp.asarray(g), eager)
                np.testing.assert_array_equal(update, trace)
                np.testing.assert_array_equal(eager.inner.trace.codes, codes)
        np.testing.assert_array_equal(final.inner.trace.codes[replica], codes)
        np.testing.assert_array_equal(final.inner.trace.scale[replica], scale)
        if replica == 0:
            np.testing.assert_array_equal(donated.inner.trace.codes, codes)


def test_the_state_is_updated_in_place() -> None:
    tx = _quantize(optax.adamw(1e-3))
    state = shapes(tx)
    compiled = jax.jit(tx.update, donate_argnums=1).lower(PARAMS, state, PARAMS).compile()
    memory: Any = compiled.memory_analysis()
    codes = sum(row.nbytes for row in jq.optim.describe_state(state).rows)
    assert memory.alias_size_in_bytes >= codes
    text = compiled.as_text() or ""
    header = text[: text.index("\n\n")]
    aliases = {int(place) for place in re.findall(r"\{(\d+)\}: \(\d+,", header)}
    outputs = jax.tree.leaves((PARAMS, state))
    assert {place for place, leaf in enumerate(outputs) if leaf.dtype == jnp.uint8} <= aliases


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_shows(value: float) -> None:
    tx = _quantize(optax.adam(1e-3))
    update = jax.jit(tx.update)
    bad = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(value), PARAMS)
    updates, state = update(bad, tx.init(PARAMS), PARAMS)
    for _ in range(2):
        for leaf in jax.tree.leaves(updates):
            assert not np.isfinite(np.asarray(leaf)[(0,) * leaf.ndim])
        assert np.isfinite(np.asarray(updates["embed"])[16:, 16:]).all()  # other blocks
        updates, state = update(PARAMS, state, PARAMS)


@pytest.mark.slow
def test_small_second_moments_stay_positive() -> None:
    """Where the gradients of a block differ by twelve orders of magnitude, no update is larger than Adam's."""
    gradient = {"w": jnp.full((64, 64), 1e-9).at[::16, ::16].set(1e3)}
    for spec in (jq.optim.logarithmic, jq.Codebook("linear", tuple(i / 255 for i in range(256)))):
        tx = _quantize(optax.scale_by_adam(eps=1e-30), second_spec=spec)
        state = tx.init(gradient)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(gradient, state)
            assert float(jnp.max(jnp.abs(updates["w"]))) <= 1.05


@pytest.mark.slow
def test_checkpoints(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Orbax and plain arrays: restored bit for bit, and the next update is the same."""
    tx = _quantize(optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam()), overrides={"mu": None})
    gradients = {"w": jnp.asarray(rng.normal(size=(96, 48)), jnp.float32)}
    update = jax.jit(tx.update)
    _, state = update(gradients, tx.init(gradients), gradients)
    checkpoint.save_orbax(tmp_path / "step", state)
    arrays = checkpoint.from_arrays(jax.tree.map(np.asarray, checkpoint.to_arrays(state)))
    expected = update(gradients, state, gradients)
    for restored in (checkpoint.load_orbax(tmp_path / "step", shapes(tx, gradients)), arrays):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        jax.tree.map(np.testing.assert_array_equal, update(gradients, restored, gradients), expected)


def split_parameters(wrap: Any) -> Any:
    """A transformation for each group of parameters, each with a state of its own."""
    schedule = optax.linear_schedule(1e-2, 1e-3, 6)
    parts: Any = {"fast": wrap(optax.adamw(schedule)), "slow": wrap(optax.sgd(schedule, momentum=0.9))}
    return optax.multi_transform(parts, {"dense": "fast", "embed": "slow"})


WRAPPERS: dict[str, Any] = {
    "around multi_transform": lambda: _quantize(split_parameters(lambda tx: tx), seed=3),
    "inside of multi_transform": lambda: split_parameters(functools.partial(_quantize, seed=3)),
    "around MultiSteps": lambda: _quantize(optax.MultiSteps(optax.adamw(1e-3), 3), seed=3),
    "inside of MultiSteps": lambda: optax.MultiSteps(_quantize(optax.adamw(1e-3), seed=3), 3),
    "around both": lambda: _quantize(optax.MultiSteps(split_parameters(lambda tx: tx), 3), seed=3),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_training_that_is_resumed_ends_with_the_same_bits(
    name: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """A checkpoint of Orbax after four of seven steps, in the middle of a sum of gradients."""
    tx = WRAPPERS[name]()
    gradients = [jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), F32), PARAMS) for _ in range(7)]

    @jax.jit
    def step(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    states = [(PARAMS, tx.init(PARAMS))]
    for gradient in gradients:
        states.append(step(*states[-1], gradient))
    assert "dynamic" in str(jq.optim.describe_state(states[-1][1]))
    checkpoint.save_orbax(tmp_path / "state", states[4])
    restored = checkpoint.load_orbax(tmp_path / "state", jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS))))
    assert jax.tree.structure(restored) == jax.tree.structure(states[4])
    for gradient in gradients[4:]:
        restored = step(*restored, gradient)
    jax.tree.map(np.testing.assert_array_equal, restored, states[-1])


@pytest.mark.slow
def test_stochastic_rounding_depends_on_seed_and_step() -> None:
    gradients = {"w": jax.random.normal(jax.random.key(1), (64, 64))}

    def run(seed: int | None) -> Any:
        tx = _quantize(optax.trace(0.9), seed=seed)
        states = [tx.init(gradients)]
        for _ in range(2):
            states.append(
                jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, gradients) if states[1:] else gradients, states[-1])[1]
            )
        return [np.asarray(state.inner.trace["w"].codes) for state in states]

    assert _quantize(optax.trace(0.9), seed=1).init(gradients).step == 0
    first, same, other, nearest = run(1), run(1), run(2), run(None)
    np.testing.assert_array_equal(first, same)
    assert (first[1] != other[1]).any()
    assert (first[1] != nearest[1]).any()
    assert np.abs(first[1].astype(int) - nearest[1]).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((3,), {}, TypeError, "tx: expected an optax transformation, with init and update, got 3"),
        ((optax.sgd(1.0), "int8"), {}, TypeError, "spec: expected a Codebook, or a QuantSpec of one"),
        ((optax.sgd(1.0), jq.QuantSpec("int8")), {}, ValueError, "spec: expected a Codebook, or a QuantSpec of one"),
        (
            (optax.sgd(1.0), jq.Codebook("a", (1.0, 2.0, 3.0, 4.0))), {}, ValueError,
            "spec: expected a codebook with the level 0, got a",
        ),
        (
            (optax.sgd(1.0), jq.Codebook("a", (1.0, 0.0, 3.0, 4.0))), {}, ValueError,
            "spec: expected a codebook with ascending levels, got a",
        ),
        (
            (optax.sgd(1.0),), {"second_spec": jq.QuantSpec(jq.nf4, power_of_two=True)}, ValueError,
            "second_spec: expected power_of_two=False",
        ),
        ((optax.sgd(1.0),), {"overrides": {"(": None}}, ValueError, "expected a regular expression"),
        ((optax.sgd(1.0),), {"overrides": [1]}, TypeError, "overrides: expected a dict"),
        ((optax.sgd(1.0),), {"min_size": 0}, ValueError, "min_size: expected a positive int, got 0"),
        ((optax.sgd(1.0),), {"seed": 0.5}, TypeError, "seed: expected an int"),
    ],
)  # fmt: skip
def test_errors(arguments: Any, keywords: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"jaxquant.optim.quantize_state: .*{re.escape(text)}|{re.escape(text)}"):
        _quantize(*arguments, **keywords)


def test_errors_of_init_and_update() -> None:
    tx = _quantize(optax.trace(0.9), jq.QuantSpec(jq.optim.dynamic, jq.Blocked(1, 8)), min_size=1)
    with pytest.raises(ValueError, match=r"trace/w: .*optim.quantize_state: axis: expected an integer in \[-1, 0\]"):
        tx.init({"w": jnp.ones(8)})
    with pytest.raises(TypeError, match=r"update: state: expected the state that init returned, .*, got TraceState"):
        tx.update({"w": jnp.ones(8)}, optax.trace(0.9).init({"w": jnp.ones(8)}))
    changing = _transformation(lambda p: p, lambda u, s, p=None: (u, (s, s)))
    tx = _quantize(changing)
    with pytest.raises(ValueError, match="keeps the structure"):
        tx.update({}, tx.init({"w": jnp.ones(8)}))


@pytest.mark.slow
def test_training_ends_like_with_float_states() -> None:
    """A small version of `python -m benchmarks.optim`: 40 steps of logistic regression with a hidden layer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 64)).astype(F32)
    labels = jnp.asarray((x @ rng.normal(size=(64, 10))).argmax(1), jnp.int32)
    params = {"a": jnp.asarray(rng.normal(size=(64, 128)) / 8, jnp.float32), "b": jnp.zeros((128, 10))}

    def loss(params: Any) -> jax.Array:
        logits = jax.nn.relu(x @ params["a"]) @ params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, static_argnums=0)
    def train(tx: Any) -> jax.Array:
        def step(carry: Any, _: Any) -> Any:
            updates, state = tx.update(jax.grad(loss)(carry[0]), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return loss(lax.scan(step, (params, tx.init(params)), None, 40)[0][0])

    exact = float(train(optax.adamw(3e-3)))
    assert float(train(_quantize(optax.adamw(3e-3), min_size=1024))) <= 1.1 * exact
