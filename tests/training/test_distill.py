"""Distillation: its loss beside numpy, its steps beside a loop, the tree that it keeps, and files to go on from."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxquant as jq
from jaxquant import checkpoint, ptq
from tests.support.equality import check_equal

Q4_0 = jq.recipes.gguf("Q4_0")
FEATURES, CLASSES, ROWS = 64, 6, 24


@pytest.fixture(autouse=True)
def allow_promotion() -> Iterator[None]:
    """Let optax raise float32 to powers of int32, as in a user's program."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def network(params: Any, x: jax.Array, scale: Any = 1.0) -> jax.Array:
    return scale * (jax.nn.relu(x @ params["up"].T + params["bias"][None]) @ params["down"].T)


def sample(rng: np.random.Generator) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    shapes = {"up": (32, FEATURES), "bias": (32,), "down": (CLASSES, 32)}
    params = {name: jnp.asarray(rng.normal(0, 0.3, shape).astype(np.float32)) for name, shape in shapes.items()}
    return params, [jnp.asarray(rng.normal(0, 1, (ROWS, FEATURES)).astype(np.float32)) for _ in range(4)]


def compute_divergence(target: Any, outputs: Any, temperature: float) -> float:
    """Return the divergence in float64."""
    probabilities = []
    for x in (target, outputs):
        shifted = np.asarray(x, np.float64) / temperature
        powers = np.exp(shifted - shifted.max(-1, keepdims=True))
        probabilities.append(powers / powers.sum(-1, keepdims=True))
    expected, found = probabilities
    return float((expected * np.log(expected / found)).sum(-1).mean() * temperature**2)


def prepare(params: Any, x: Any, rules: Any = Q4_0) -> jq.Prepared:
    return jq.prepare(network, params, x, rules=rules)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_losses_are_those_of_numpy_for_the_codes(temperature: float, rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    result = jq.train.distill(
        prepared, params, batches[:1], optax.sgd(0.0), temperature=temperature, steps=3, held_out=batches[2:]
    )
    q = prepared.convert(params)
    expected = [
        compute_divergence(network(params, x), prepared.apply(q, x), temperature) for x in (batches[0], *batches[2:])
    ]
    np.testing.assert_allclose(result.losses, expected[:1] * 3, rtol=1e-4)
    np.testing.assert_allclose(list(result.held_out.values()), [np.mean(expected[1:])] * 2, rtol=1e-4)
    assert list(result.held_out) == [0, 3]


def test_labels_have_their_weight(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    labels = jnp.asarray(rng.integers(0, CLASSES, ROWS))
    prepared = jq.prepare(lambda params, x, labels: network(params, x), params, batches[0], labels, rules=Q4_0)

    def cross_entropy(outputs: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        assert x.shape == (ROWS, FEATURES)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    result = jq.train.distill(
        prepared, params, [(batches[0], labels)], optax.sgd(0.0), label_loss=cross_entropy, label_weight=0.25
    )
    y = np.asarray(prepared.apply(prepared.convert(params), batches[0], labels), np.float64)
    entropy = (np.log(np.exp(y).sum(-1)) - y[np.arange(ROWS), np.asarray(labels)]).mean()
    expected = 0.75 * compute_divergence(network(params, batches[0]), y, 1.0) + 0.25 * entropy
    np.testing.assert_allclose(result.losses, [expected], rtol=1e-4)


@pytest.mark.parametrize("estimator", [None, jq.LSQ()])
def test_steps_are_those_of_a_loop_over_fake_apply(estimator: Any, rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared, optimizer = prepare(params, batches[0]), optax.adam(1e-3)
    start: Any = prepared.trainable(params, estimator=estimator)
    tree = start

    def compute_loss(t: Any, x: jax.Array) -> jax.Array:
        target, found = (jax.nn.log_softmax(y) for y in (network(params, x), prepared.fake_apply(t, x)))
        return (jnp.exp(target) * (target - found)).sum(-1).mean()

    state, losses = optimizer.init(tree), []
    step = jax.jit(jax.value_and_grad(compute_loss))
    for x in (*batches, batches[0]):
        loss, gradient = step(tree, x)
        updates, state = optimizer.update(gradient, state, tree)
        tree = optax.apply_updates(tree, updates)
        losses.append(float(loss))
    result = jq.train.distill(prepared, params, batches, optimizer, start=start, steps=5)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert jax.tree.structure(result.tree) == jax.tree.structure(start)
    for found, expected in zip(jax.tree.leaves(result.tree), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5)
    # The trees of the user still exist, and have not changed.
    assert bool((start.params["up"] == params["up"]).all())


def test_the_tree_with_the_least_held_out_loss_is_returned(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    # Steps in one direction, whatever the gradient, make the network worse.
    worse = optax.stateless(lambda updates, variables: jax.tree.map(lambda x: 0 * x + 0.2, updates))
    result = jq.train.distill(prepared, params, batches[:3], worse, steps=6, held_out=[batches[3]], evaluate_every=2)
    assert list(result.held_out) == [0, 2, 4, 6]
    assert min(result.held_out.values()) == result.held_out[0]
    jax.tree.map(check_equal, result.tree.params, params)
    last = jq.train.distill(prepared, params, batches[:3], worse, steps=6)
    np.testing.assert_array_equal(last.losses, result.losses)
    assert not last.held_out
    assert bool((last.tree.params["up"] != params["up"]).any())
    expected = jq.train.distill(prepared, params, batches[:3], optax.adam(1e-3), steps=4)
    found = jq.train.distill(
        prepared, params, batches[:3], optax.adam(1e-3), steps=9, held_out=batches[3:], evaluate_every=4
    )
    best = min(found.held_out, key=found.held_out.__getitem__)
    if best == 4:
        jax.tree.map(check_equal, found.tree.params, expected.tree.params)


def test_a_schedule_keeps_the_bits_of_arrays(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared, seen = prepare(params, batches[0]), []
    start: Any = prepared.trainable(params, estimator=jq.LSQ())

    def step(gradient: Any, variables: Any) -> Any:
        seen.append(sorted(variables))
        return {path: jnp.full_like(g, 0.01) for path, g in gradient.items()}

    schedule = {"params/bias": range(0), "scales/*": range(1, 3), "*down": range(2, 99)}
    for steps, moved in ((1, (1, 0, 0)), (2, (2, 0, 1)), (3, (3, 1, 2)), (5, (5, 3, 2))):
        tree = jq.train.distill(
            prepared, params, batches, optax.stateless(step), start=start, steps=steps, schedule=schedule
        ).tree
        check_equal(tree.params["bias"], params["bias"])
        assert seen[-1] == ["params/down", "params/up", "scales/weights/down/scale", "scales/weights/up/scale"]
        parts = (tree.params["up"], tree.params["down"], tree.scales.weights["up"].scale)
        before = (start.params["up"], start.params["down"], start.scales.weights["up"].scale)
        for part, was, count in zip(parts, before, moved, strict=True):
            expected = was
            for _ in range(count):
                expected = expected + np.float32(0.01)
            check_equal(part, expected)


def test_an_interrupted_training_goes_on(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(rng)
    prepared, path = prepare(params, batches[0]), tmp_path / "training.safetensors"
    start = prepared.trainable(params, estimator=jq.LSQ())
    options: dict[str, Any] = {"start": start, "held_out": batches[3:], "evaluate_every": 3}
    optimizer = optax.adam(1e-3)
    expected = jq.train.distill(prepared, params, batches[:3], optimizer, steps=8, **options)

    def stream(count: int) -> Iterator[Any]:
        for number in range(8):
            if number == count:
                raise KeyboardInterrupt
            yield batches[number % 3]

    for count in (1, 4, 4, 7):
        with pytest.raises(KeyboardInterrupt):
            jq.train.distill(prepared, params, stream(count), optimizer, steps=8, checkpoint=path, **options)
    for _ in range(2):  # the second time nothing is left to do
        found = jq.train.distill(prepared, params, batches[:3], optimizer, steps=8, checkpoint=path, **options)
        np.testing.assert_array_equal(found.losses, expected.losses)
        assert found.held_out == expected.held_out
        jax.tree.map(check_equal, jax.tree.leaves(found.tree), jax.tree.leaves(expected.tree))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_an_interrupted_evaluation_is_made_up_for(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(rng)
    prepared, path, calls = prepare(params, batches[0]), tmp_path / "training.safetensors", []

    def teach(x: jax.Array) -> jax.Array:
        calls.append(x)
        if len(calls) == interrupted:
            raise KeyboardInterrupt
        return network(params, x)

    def train(**options: Any) -> jq.train.Distilled:
        return jq.train.distill(
            prepared, params, batches[:3], optax.adam(1e-3), teacher=teach, steps=5, held_out=batches[3:],
            evaluate_every=2, **options,
        )  # fmt: skip

    interrupted = 0
    expected = train()
    interrupted = len(calls) + 4  # an evaluation, two steps, and the second evaluation
    with pytest.raises(KeyboardInterrupt):
        train(checkpoint=path)
    found = train(checkpoint=path)
    assert found.held_out == expected.held_out
    assert list(found.held_out) == [0, 2, 4, 5]
    jax.tree.map(check_equal, jax.tree.leaves(found.tree), jax.tree.leaves(expected.tree))


def test_each_step_drops_other_inputs(rng: np.random.Generator) -> None:
    """An adapted tree with a key: nothing is dropped in evaluations, or by the returned tree."""
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    settings = jq.lora.LoRA(4, dropout=0.5)
    start = jq.lora.adapt(prepared, prepared.convert(params), settings, jax.random.key(0))
    factors = jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32), start.adapters)
    start = start.replace(adapters=factors)

    def train(key: Any) -> jq.train.Distilled:
        tree = start.replace(key=key)
        return jq.train.distill(
            prepared, params, batches[:1], optax.sgd(0.0), start=tree, steps=3, held_out=batches[:1]
        )

    tree, losses, held_out = train(jax.random.key(1))
    assert len(set(losses.tolist())) == 3
    assert tree.key is None
    plain = train(None)
    assert held_out == plain.held_out
    assert held_out[3] == plain.losses[0]
    np.testing.assert_array_equal(losses, train(jax.random.key(1)).losses)
    assert not np.isin(train(jax.random.key(2)).losses, losses).any()
    with pytest.raises(TypeError, match=r"train\.distill: start: expected a key of jax\.random as start\.key, got 3"):
        train(3)


def test_a_file_of_another_training_is_refused(fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(fixed_rng)
    prepared, path = prepare(params, batches[0]), tmp_path / "training.safetensors"

    def run(**options: Any) -> None:
        jq.train.distill(prepared, params, batches, **{"optimizer": optax.sgd(0.1), "checkpoint": path, **options})

    def refuse(text: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=rf"train\.distill: checkpoint: expected {text}"):
            run(**options)

    run()
    other = prepared.trainable({**params, "up": params["up"] + 1})
    refuse(r"a file of this training at .*, got a file of training with other arrays, rules or settings", start=other)
    refuse("a file of this training at .* delete it .*, got .* arrays in state", optimizer=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"held_out: expected None, .* no held-out batches, got batches, and"):
        run(held_out=batches)
    refuse("a file of this training .*, got .*other arrays, rules or settings", temperature=2.0)
    refuse("a file of this training .*, got .*other arrays, rules or settings", schedule={"*up": range(2)})
    teacher = {**params, "down": params["down"] + 1}
    with pytest.raises(ValueError, match="got a file of training with other arrays, rules or settings"):
        jq.train.distill(prepared, teacher, batches, optax.sgd(0.1), start=prepared.trainable(params), checkpoint=path)
    finer = prepare(params, batches[0], jq.recipes.gguf("Q8_0"))
    with pytest.raises(ValueError, match="got a file of training with other arrays, rules or settings"):
        jq.train.distill(finer, params, batches, optax.sgd(0.1), checkpoint=path)
    with pytest.raises(ValueError, match=r"train\.distill: steps: expected the 4 steps of the file .*, got 3"):
        run(steps=3)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refuse("a file of this training .*, got a damaged file")
    path.write_bytes(data[: len(data) // 2])
    refuse("a file of this training .*, got .*expected a safetensors file")
    checkpoint.save_safetensors(path, {"a": np.ones(3)})
    refuse("a file of this training .*, got another file")
    refuse("a folder that exists", checkpoint=tmp_path / "none" / "a")


def test_several_processes_write_no_file(
    fixed_rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = r"train\.distill: checkpoint: expected None, in a program of several processes, got .*a"
    with pytest.raises(ValueError, match=text):
        jq.train.distill(prepared, params, batches, optax.sgd(0.1), checkpoint=tmp_path / "a")
    assert len(jq.train.distill(prepared, params, batches, optax.sgd(0.1)).losses) == 4


def test_adapters_go_on_only_with_their_codes(fixed_rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0], jq.recipes.weight_only_int4(block=32))
    first, second = (
        jq.lora.adapt(prepared, prepared.convert(p), jq.lora.LoRA(2), jax.random.key(0))
        for p in (params, jax.tree.map(lambda x: 2 * x, params))
    )
    path = tmp_path / "training.safetensors"
    jq.train.distill(prepared, params, batches, optax.sgd(0.1), start=first, checkpoint=path)
    with pytest.raises(ValueError, match="got a file of training with other arrays, rules or settings"):
        jq.train.distill(prepared, params, batches, optax.sgd(0.1), start=second, checkpoint=path)


def test_states_that_hold_the_variables_or_random_keys(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(rng)
    prepared, path = prepare(params, batches[0]), tmp_path / "training.safetensors"

    def update(gradient: Any, state: Any, variables: Any) -> Any:
        # The state begins with the variables themselves, as that of optax.contrib.prodigy.
        key, origin = state
        key, part = jax.random.split(key)
        noise = 0.01 * jax.random.normal(part)
        updates = jax.tree.map(lambda g, x, y: noise - 0.1 * g + 0.1 * (y - x), gradient, variables, origin)
        return updates, (key, origin)

    make: Any = optax.GradientTransformation
    optimizer = make(lambda variables: (jax.random.key(3), variables), update)
    expected = jq.train.distill(prepared, params, batches, optimizer, steps=4)
    jq.train.distill(prepared, params, batches, optimizer, steps=2, checkpoint=path)
    found = jq.train.distill(prepared, params, batches, optimizer, steps=4, checkpoint=path)
    np.testing.assert_array_equal(found.losses, expected.losses)
    jax.tree.map(check_equal, found.tree.params, expected.tree.params)


def test_arrays_go_on_where_they_were(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    params, batches = sample(rng)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("rows",), ()))
    params = {name: jax.device_put(x, rows if name == "up" else whole) for name, x in params.items()}
    batches = [jax.device_put(x, rows) for x in batches]
    prepared, path = prepare(params, batches[0]), tmp_path / "training.safetensors"
    expected = jq.train.distill(prepared, params, batches, optax.adam(1e-3), steps=4)
    jq.train.distill(prepared, params, batches, optax.adam(1e-3), steps=2, checkpoint=path)
    found = jq.train.distill(prepared, params, batches, optax.adam(1e-3), steps=4, checkpoint=path)
    assert found.tree.params["up"].sharding.is_equivalent_to(expected.tree.params["up"].sharding, 2)
    np.testing.assert_array_equal(found.losses, expected.losses)
    jax.tree.map(check_equal, found.tree.params, expected.tree.params)


OPTIMIZERS = {
    "plateau": lambda: optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)),
    "polyak": lambda: optax.polyak_sgd(1e-2),
    "momo": lambda: optax.contrib.momo(1e-2),
    "line search": lambda: optax.lbfgs(memory_size=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_get_the_loss(name: str, rng: np.random.Generator) -> None:
    """The steps are those of a loop that passes the loss, its gradient and its function.

    The two programs round differently. A code next to a tie may therefore flip, which moves a loss by some thousandths.
    """
    params, batches = sample(rng)
    prepared, optimizer = prepare(params, batches[0]), OPTIMIZERS[name]()
    tree: Any = prepared.trainable(params)
    variables = {f"params/{path}": x for path, x in tree.params.items()}

    @jax.jit
    def step(variables: Any, state: Any, x: jax.Array) -> Any:
        def compute_loss(variables: Any) -> jax.Array:
            moved = tree.replace(params={path: variables[f"params/{path}"] for path in params})
            target, found = (jax.nn.log_softmax(y) for y in (network(params, x), prepared.fake_apply(moved, x)))
            return (jnp.exp(target) * (target - found)).sum(-1).mean()

        value, grad = jax.value_and_grad(compute_loss)(variables)
        updates, state = optimizer.update(grad, state, variables, value=value, grad=grad, value_fn=compute_loss)
        return optax.apply_updates(variables, updates), state, value

    state, losses = optimizer.init(variables), []
    for number in range(6):
        variables, state, value = step(variables, state, batches[number % 4])
        losses.append(float(value))
    result = jq.train.distill(prepared, params, batches, optimizer, steps=6)
    np.testing.assert_allclose(result.losses, losses, rtol=2e-2)
    for path in params:
        np.testing.assert_allclose(result.tree.params[path], variables[f"params/{path}"], rtol=1e-2, atol=1e-3)


def test_an_iterator_is_read_no_further_than_the_steps(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    stream = iter(batches)
    jq.train.distill(prepare(params, batches[0]), params, stream, optax.sgd(0.1), steps=2)
    assert next(stream) is batches[2]


def test_functions_that_return_something_else(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0])
    for loss, got in ((lambda y, x: y[:, 0], r"float32\[24\]"), (lambda y, x: None, "None")):
        text = rf"train\.distill: label_loss: expected a function that returns one float, .*, got .*{got}"
        with pytest.raises(TypeError, match=text):
            jq.train.distill(prepared, params, batches, optax.sgd(0.1), label_loss=loss)
    stateless: Any = optax.stateless
    for updates, got in (({"a": 1.0}, "'a'"), (None, "None")):
        text = rf"train\.distill: optimizer: expected updates of the form .*'params/up': \(32, 64\).*, got .*{got}"
        optimizer = stateless(lambda gradient, variables, updates=updates: updates)
        with pytest.raises(TypeError, match=text):
            jq.train.distill(prepared, params, batches, optimizer)


def test_a_loss_that_is_not_finite_stops(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0])
    bad = [*batches[:2], batches[2].at[0, 0].set(jnp.nan)]
    with pytest.raises(ValueError, match=r"batches: expected batches with a finite loss, got a loss of nan in step 2"):
        jq.train.distill(prepared, params, bad, optax.sgd(0.1))
    # The loss is finite, and its gradient is not.
    with pytest.raises(
        ValueError, match=r"optimizer: expected finite updates, got a NaN .* after step 0, counted from 0"
    ):
        jq.train.distill(
            prepared, params, batches[:1], optax.sgd(0.1), label_loss=lambda y, x: jnp.sqrt(jnp.abs(0 * y).sum())
        )
    with pytest.raises(ValueError, match=r"held_out: expected batches with a finite loss, got nan"):
        jq.train.distill(prepared, params, batches, optax.sgd(0.1), held_out=bad)


def test_adapters_are_trained_alone(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0], jq.recipes.weight_only_int4(block=32))
    q = prepared.convert(params)
    start = jq.lora.adapt(prepared, q, jq.lora.LoRA(4), jax.random.key(0))
    result = jq.train.distill(prepared, params, batches, optax.adam(3e-3), start=start, steps=40, held_out=batches)
    assert result.held_out[40] < result.held_out[0]
    jax.tree.map(check_equal, jax.tree.leaves(result.tree.frozen), jax.tree.leaves(q))


def test_static_ranges_other_teachers_and_named_arguments(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0], jq.recipes.w8a8_static())
    ranges = prepared.calibrate(params, batches)
    with pytest.raises(ValueError, match=r"train\.distill: ranges: expected a range for each"):
        jq.train.distill(prepared, params, batches, optax.sgd(0.1))
    calls = []

    def teach(x: jax.Array, scale: float) -> jax.Array:
        calls.append(scale)
        return jnp.tile(jnp.arange(CLASSES, dtype=jnp.float32), (len(x), 1))

    start = prepared.trainable(params, ranges, estimator=jq.LSQ())
    named = [{"x": x, "scale": 2.0} for x in batches]
    result = jq.train.distill(prepared, params, named, optax.adam(1e-2), start=start, teacher=teach, steps=60)
    assert calls == [2.0] * 60
    assert result.losses[-1] < result.losses[0] / 2
    expected = network(params, batches[0], 2.0)
    y = prepared.apply(prepared.convert(start), batches[0], scale=2.0)
    target = teach(batches[0], 2.0)
    assert abs(y - expected).max() < 0.3 * abs(expected).max()
    np.testing.assert_allclose(result.losses[0], compute_divergence(target, y, 1.0), rtol=1e-3)
    checked = jq.train.distill(
        prepared, params, batches[:1], optax.sgd(0.0), start=start, teacher=lambda x: target, scale=2.0
    )
    np.testing.assert_allclose(checked.losses[0], result.losses[0], rtol=1e-5)


def test_bad_arguments_are_refused(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0])

    def refuse(error: Any, text: str, **changes: Any) -> None:
        options = {"prepared": prepared, "params": params, "batches": batches, "optimizer": optax.sgd(0.1), **changes}
        with pytest.raises(error, match=rf"jaxquant\.train\.distill: {text}"):
            jq.train.distill(**options)

    refuse(TypeError, "prepared: expected a Prepared", prepared=network)
    refuse(ValueError, "params: expected the arrays of the parameters", params={"up": params["up"]})
    refuse(TypeError, "batches: expected an iterable of batches", batches=batches[0])
    refuse(TypeError, "optimizer: expected a transformation of optax", optimizer=0.1)
    refuse(TypeError, "start: expected a tree of Prepared.trainable or lora.adapt", start=prepared.convert(params))
    refuse(TypeError, "teacher: expected a function or None", teacher=params)
    refuse(ValueError, r"teacher: expected logits of shape \(24, 6\)", teacher=lambda x: x)
    refuse(TypeError, "teacher: expected one array of float logits", teacher=lambda x: (x, x))
    refuse(ValueError, "temperature: expected a positive number, got 0", temperature=0)
    label_loss = lambda outputs, x: outputs.sum()  # noqa: E731
    refuse(ValueError, "label_weight: expected a number from 0 to 1", label_weight=1.5, label_loss=label_loss)
    refuse(ValueError, "label_weight: expected None, as there is no label_loss, got 0.5", label_weight=0.5)
    make: Any = optax.GradientTransformationExtraArgs
    needs_more = make(lambda x: (), lambda gradient, state, variables, *, hessian, **extra: (gradient, state))
    refuse(TypeError, r"optimizer: expected one whose update .* the error: .*hessian", optimizer=needs_more)
    refuse(TypeError, "schedule: expected a mapping from patterns to ranges", schedule={"*": 3})
    refuse(ValueError, r"schedule: expected patterns for params/bias, .*, got 'bias'", schedule={"bias": range(3)})
    refuse(ValueError, "schedule: expected steps in which an array changes, got none", schedule={"*": range(0)})
    refuse(ValueError, "steps: expected a positive number", steps=0)
    refuse(ValueError, "evaluate_every: expected a positive number", evaluate_every=0)
    refuse(ValueError, "batches: expected at least one batch, got 0", batches=[])
    refuse(ValueError, "batches: expected 9 batches, or a list, .*, got 4", batches=iter(batches), steps=9)
    refuse(ValueError, "held_out: expected at least one batch", held_out=[])
    refuse(TypeError, "progress: expected True or False", progress="yes")


# Trees that begin with given codes.

FORMATS: dict[str, tuple[Any, Any, Any]] = {
    "Q4_0": (Q4_0, jq.LSQ(), ptq.GPTQ()),
    "Q5_0": (jq.recipes.gguf("Q5_0"), jq.LSQPlus(), ptq.Nearest("searched")),
    "gptq": (jq.recipes.gptq(4, 32), jq.LSQ(), ptq.GPTQ()),
    "asymmetric": (jq.recipes.gptq(3, 32, symmetric=False), jq.LSQPlus(), ptq.GPTQ()),
    "int8": (jq.recipes.weight_only_int8(), jq.LSQ(), ptq.GPTQ(sweeps=1)),
    "fp8": (jq.recipes.weight_only_fp8(), jq.LSQ(), ptq.GPTQ()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_training_begins_with_given_codes(name: str, rng: np.random.Generator) -> None:
    rules, estimator, method = FORMATS[name]
    params, batches = sample(rng)
    prepared = prepare(params, batches[0], rules)
    q = ptq.apply(prepared, params, ptq.collect(prepared, params, batches), method).tree
    start = prepared.trainable(params, estimator=estimator, start=q)
    found = prepared.convert(start)
    for path in ("up", "down"):
        for part in ("codes", "scale", "zero_point"):
            a, b = getattr(found.params[path], part), getattr(q.params[path], part)
            assert (a is None) == (b is None)
            if a is not None:  # a fixed zero point may have one element
                check_equal(jnp.broadcast_to(a, b.shape), b)
        w = np.asarray(start.params[path])
        is_kept = w == np.asarray(params[path])
        check_equal(w[~is_kept], np.asarray(q.params[path].dequantize())[~is_kept])
    check_equal(jax.jit(prepared.fake_apply)(start, batches[0]), jax.jit(prepared.apply)(q, batches[0]))


def test_training_begins_with_the_codes_of_a_file(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Q4_0 may have negative scales, so that arrays of a file say that theirs may be, though these are not."""
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    q = ptq.apply(prepared, params, ptq.collect(prepared, params, batches), ptq.GPTQ()).tree
    checkpoint.save(tmp_path / "a.gguf", q.params, checkpoint.Info("gguf"))
    loaded, _ = checkpoint.load(tmp_path / "a.gguf")
    assert loaded["up"].signed_scale
    start = prepared.trainable(params, estimator=jq.LSQ(), start=jq.QuantizedTree(loaded))
    expected = prepared.trainable(params, estimator=jq.LSQ(), start=q)
    jax.tree.map(check_equal, jax.tree.leaves(start), jax.tree.leaves(expected))


def test_codes_that_training_cannot_begin_with_are_refused(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    prepared = prepare(params, batches[0])
    q = prepared.convert(params)

    def refuse(error: Any, text: str, **options: Any) -> None:
        with pytest.raises(error, match=rf"^(up: |down: |)jaxquant\.Prepared\.trainable: {text}"):
            prepared.trainable(params, **{"estimator": jq.LSQ(), "start": q, **options})

    refuse(ValueError, "start: expected None, unless the estimator trains the scales of weights", estimator=None)
    refuse(ValueError, "start: expected None, unless the estimator trains the scales", estimator=jq.PACT())
    refuse(TypeError, "start: expected a QuantizedTree", start=params)
    other = prepare(params, batches[0], jq.recipes.weight_only_int8()).convert(params)
    refuse(ValueError, r"start: expected an array of int4 of shape \(.*\) with float16 scales, got", start=other)
    options = {"narrow_range": False}
    static = jq.Activation("int8", range=jq.Static(jq.calibration.absmax), options=options)
    codes = prepare(params, batches[0], [jq.Rule(weight=jq.Weight("int8"), activation=static, output=static)])
    ranges = codes.calibrate(params, batches)
    tree = jax.tree.map(
        lambda x: x.replace(signed_scale=True) if isinstance(x, jq.QuantizedArray) else x,
        codes.convert(params, ranges).params, is_leaf=lambda x: isinstance(x, jq.QuantizedArray),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"start: expected .* float32 scales that are positive, because results are"):
        codes.trainable(params, ranges, estimator=jq.LSQ(), start=jq.QuantizedTree(tree, ranges))


# Scales with signs, as llama.cpp's Q4_0 and Q5_0 have them.

BOUNDS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15)}


def prepare_transposed(w: jax.Array, x: jax.Array, kind: str) -> jq.Prepared:
    return jq.prepare(lambda params, x: x @ params["w"].T, {"w": w}, x, rules=jq.recipes.gguf(kind))


@pytest.mark.parametrize("kind", BOUNDS)
def test_signed_scales_are_trained_with_their_signs(
    kind: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """The file at the start and the one after training have the codes and the floats of the package gguf."""
    w, x = (jnp.asarray(rng.normal(0, 1, shape).astype(np.float32)) for shape in ((8, 128), (ROWS, 128)))
    type_of_codes, path = getattr(gguf.GGMLQuantizationType, kind), tmp_path / "a.gguf"
    data = gguf.quantize(np.asarray(w), type_of_codes)

    def save(tree: Any) -> Any:
        checkpoint.save(path, prepared.convert(tree).params, checkpoint.Info("gguf", {"general.architecture": "llama"}))
        (tensor,) = gguf.GGUFReader(path).tensors
        assert tensor.tensor_type == type_of_codes
        return tensor.data

    prepared = prepare_transposed(w, x, kind)
    checkpoint.save(path, checkpoint.quantize_to({"w": w}, kind.lower())[0], checkpoint.Info("gguf"))
    loaded, _ = checkpoint.load(path)
    start = prepared.trainable({"w": w}, estimator=jq.LSQ(), start=jq.QuantizedTree(loaded))
    check_equal(save(start), data)
    scales = np.asarray(start.scales.weights["w"].scale)  # type: ignore[union-attr]
    assert (scales < 0).any()
    assert (scales > 0).any()
    trained = jq.train.distill(prepared, {"w": w}, [x], optax.adam(1e-3), start=start, steps=4).tree
    floats = gguf.dequantize(save(trained), type_of_codes)
    check_equal(prepared.fake_apply(trained, jnp.eye(128)), floats.T)
    check_equal(jax.jit(prepared.apply)(prepared.convert(trained), x), jax.jit(prepared.fake_apply)(trained, x))
    moved = np.asarray(trained.scales.weights["w"].scale)
    np.testing.assert_array_equal(np.sign(moved), np.sign(scales))
    assert (moved != scales).mean() > 0.9


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("kind", BOUNDS)
def test_signed_scales_have_the_gradient_of_their_formula(kind: str, size: float, rng: np.random.Generator) -> None:
    """In float32, although the scales themselves are float16, which would round small gradients to 0."""
    w, g = (rng.normal(0, 1, (8, 128)).astype(np.float32) for _ in range(2))
    g *= np.float32(size)
    prepared = prepare_transposed(jnp.asarray(w), jnp.eye(128), kind)
    q, _ = checkpoint.quantize_to({"w": w}, kind.lower())
    start = prepared.trainable({"w": jnp.asarray(w)}, estimator=jq.LSQ(), start=jq.QuantizedTree(q))
    loss = lambda tree: (prepared.fake_apply(tree, jnp.eye(128)).T * g).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(start)
    w, (low, high) = np.asarray(start.params["w"], np.float64), BOUNDS[kind]
    scale = np.repeat(np.asarray(start.scales.weights["w"].scale, np.float64), 32, 1)  # type: ignore[union-attr]
    u = w / scale
    inside = (u > low) & (u < high)
    slope = np.where(inside, np.rint(u) - u, np.clip(u, low, high))
    expected = (g * slope).reshape(8, 4, 32).sum(-1) / np.sqrt(32 * high)
    np.testing.assert_allclose(gradient.scales.weights["w"].scale, expected, rtol=1e-5, atol=1e-5 * size)
    np.testing.assert_allclose(gradient.params["w"], np.where(inside, g, 0), rtol=1e-6)


def test_signed_scales_cross_zero(rng: np.random.Generator) -> None:
    """On both sides of 0 the codes stand for what the formula says, and at 0 for almost nothing."""
    w, eye = jnp.asarray(rng.normal(0, 1, (8, 128)).astype(np.float32)), jnp.eye(128)
    prepared = prepare_transposed(w, eye, "Q4_0")
    q, _ = checkpoint.quantize_to({"w": w}, "q4_0")
    start = prepared.trainable({"w": w}, estimator=jq.LSQ(), start=jq.QuantizedTree(q))
    w = start.params["w"]  # not `w` where llama.cpp's code next to a tie is not the nearest
    for value in (-0.25, -1e-3, -1e-30, -0.0, 0.0, 1e-30, 1e-3, 0.25):
        scales = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), start.scales)
        tree = start.replace(scales=scales)
        found = prepared.convert(tree).params["w"]
        least = np.float16(6e-8)
        scale = np.float16(value) if abs(value) > least else (-least if value < 0 else least)
        check_equal(found.scale, np.full((8, 4), scale, np.float16))
        codes = np.clip(np.rint(np.asarray(w) / np.float32(scale)), -8, 7)
        check_equal(found.codes.astype(jnp.float32), codes)
        check_equal(prepared.fake_apply(tree, eye).T, codes * np.float32(scale))


# What a file holds is what was trained.


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_training_computes_with_what_a_gguf_file_holds(
    kind: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    w = jnp.asarray(rng.normal(0, 0.3, (8, 512)).astype(np.float32))
    x = jnp.asarray(rng.normal(0, 1, (ROWS, 512)).astype(np.float32))
    prepared = jq.prepare(lambda params, x: x @ params["w"].T, {"w": w}, x, rules=jq.recipes.gguf(kind))
    result = jq.train.distill(prepared, {"w": w}, [x], optax.adam(1e-3), steps=3)
    trees = [result.tree]
    if kind in ("Q4_0", "Q5_0", "Q8_0"):  # the scales of the other types are not trained
        start = prepared.trainable({"w": w}, estimator=jq.LSQ())
        trees.append(jq.train.distill(prepared, {"w": w}, [x], optax.adam(1e-3), start=start, steps=3).tree)
    for tree in trees:
        path, q = tmp_path / "trained.gguf", prepared.convert(tree)
        checkpoint.save(path, q.params, checkpoint.Info("gguf", {"general.architecture": "llama"}))
        (tensor,) = gguf.GGUFReader(path).tensors
        assert tensor.tensor_type.name == kind
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        check_equal(prepared.fake_apply(tree, jnp.eye(512)), expected.T)
        check_equal(checkpoint.load(path)[0]["w"].dequantize(), expected)
        check_equal(jax.jit(prepared.fake_apply)(tree, x), jax.jit(prepared.apply)(q, x))
