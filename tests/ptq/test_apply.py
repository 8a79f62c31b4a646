"""Statistics of prepared functions, and algorithms on their weights."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.ptq.methods import refit_scale

from ..support.equality import check_equal

F32 = np.float32
INT4 = (jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int4")))


def network(params: Any, images: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return a result with each kind of contraction: convolutions, a lookup, a scan over layers, experts."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, params["conv"], (1, 1), "SAME", dimension_numbers=numbers)
    x = jax.nn.relu(x)
    x = jax.lax.conv_general_dilated(
        x, params["depthwise"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )
    x = jax.jit(jax.nn.relu)(x).reshape(x.shape[0], -1)
    x = x @ params["dense"].T + params["table"][tokens]

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    x = jnp.einsum("bi,eio->ebo", x, params["experts"])
    return jnp.einsum("ebo,eoc->bc", jax.nn.relu(x), params["mixed"])


def sample_params(rng: np.random.Generator) -> dict[str, jax.Array]:
    shapes = {
        "conv": (3, 3, 2, 4), "depthwise": (3, 3, 1, 8), "dense": (6, 32), "table": (5, 6), "stack": (3, 6, 6),
        "experts": (2, 6, 4), "mixed": (2, 4, 3),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(0, 0.5, shape), F32) for name, shape in shapes.items()}


def sample_batches(rng: np.random.Generator, count: int) -> list[tuple[jax.Array, jax.Array]]:
    return [
        (jnp.asarray(rng.normal(size=(8, 4, 4, 2)), F32), jnp.asarray(rng.integers(0, 5, 8), jnp.int32))
        for _ in range(count)
    ]


@pytest.mark.parametrize("match_floats", [False, True])
def test_reductions_of_clipped_activations(rng: np.random.Generator, match_floats: bool) -> None:
    """A prepared function writes these activations to memory before it reduces them."""

    def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(jnp.einsum("nhc,cd->nhd", x, params["first"])).mean(1)
        return jnp.clip(hidden @ params["second"], -1, 1).max(1, keepdims=True)

    params = {name: jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(32, 5, 8)), jnp.float32)
    prepared = jq.prepare(network, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
    qparams, notes = ptq.apply(prepared, params, [x[:16], x[16:]], ptq.GPTQ(), match_floats=match_floats)
    assert [note.action for note in notes] == ["GPTQ", "GPTQ"]
    assert prepared.apply(qparams, x).shape == (32, 1)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["statistics", "batches"])
def test_every_weight_is_listed(rng: np.random.Generator, kind: str) -> None:
    params, batches = sample_params(rng), sample_batches(rng, 3)
    prepared = jq.prepare(network, params, *batches[0], rules=INT4)
    stats = ptq.collect(prepared, params, batches)
    # Of the first convolution: all windows of all images, padded with zeros.
    images = np.concatenate([np.asarray(batch[0]) for batch in batches])
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [padded[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    vectors = np.stack(windows, -1).reshape(-1, 2 * 9).astype(np.float64)  # channels, then windows
    np.testing.assert_allclose(stats["conv"].second[0], vectors.T @ vectors / len(vectors), rtol=1e-4, atol=1e-5)
    assert {name: stats[name].mean.shape for name in stats} == {
        "conv": (1, 18), "depthwise": (4, 9), "dense": (1, 32), "stack": (3, 1, 6), "experts": (1, 6), "mixed": (1, 8),
    }  # fmt: skip
    expected = prepared.convert(params)
    data: Any = stats if kind == "statistics" else batches
    qparams, notes = ptq.apply(prepared, params, data, ptq.GPTQ(range="whole"))
    assert jax.tree.structure(qparams) == jax.tree.structure(expected)
    assert {note.path for note in notes} == set(params)
    rows = {note.path: note for note in notes}
    assert rows["table"].action == "Nearest for GPTQ"
    assert rows["table"].reason == "a lookup has no inputs"
    for name in set(params) - {"table"}:
        assert rows[name].action == "GPTQ", rows[name]
        assert rows[name].after <= rows[name].before * (1 + 1e-6), rows[name]  # type: ignore[operator]
        check_equal(qparams.params[name].scale, expected.params[name].scale)
    assert "table" in str(notes)
    assert np.isfinite(np.asarray(jax.jit(prepared.apply)(qparams, *batches[0]))).all()


@pytest.mark.slow
def test_codes_are_those_of_the_array_functions(rng: np.random.Generator) -> None:
    """Of statistics in floats: what a user computes by hand from the inputs of each layer."""
    params = {name: jnp.asarray(rng.normal(size=(12, 12)), F32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(64, 12)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["first"].T) @ params["second"]

    prepared = jq.prepare(apply, params, x, rules=jq.recipes.w4a8())
    stats = ptq.collect(prepared, params, [x])
    hidden = jax.nn.relu(x @ params["first"].T)
    method = ptq.GPTQ(range="whole")
    floats = ptq.apply(prepared, params, stats, method).tree
    layers = ptq.apply(prepared, params, [x[:32], x[32:]], method).tree
    spec = jq.QuantSpec("int4", jq.PerAxis(0))
    first = ptq.gptq(params["first"], stats["first"].second, spec, axis=0)
    # An output that round-to-nearest serves better has its codes.
    nearest = jq.quantize(params["first"], spec)
    is_either = [(floats.params["first"].codes == q.codes).all(1) for q in (first, nearest)]
    assert np.logical_or(*is_either).all()
    assert np.mean(is_either[0]) > 0.5
    check_equal(layers.params["first"].codes, floats.params["first"].codes)
    assert floats.params["first"].stored_order == prepared.convert(params).params["first"].stored_order
    # The second layer's inputs are those of the quantized first layer, if the pass goes layer by layer.
    quantized = jax.nn.relu(x @ floats.params["first"].dequantize().T)
    for inputs, q in ((hidden, floats.params["second"]), (quantized, layers.params["second"])):
        expected = ptq.gptq(params["second"], inputs.T @ inputs / F32(64), jq.QuantSpec("int4", jq.PerAxis(1)))
        nearest = jq.quantize(params["second"], jq.QuantSpec("int4", jq.PerAxis(1)))
        agreement = [(np.asarray(other.codes) == np.asarray(q.codes)).all(0) for other in (expected, nearest)]
        # A value near a tie may differ, because sums have another order.
        assert np.logical_or(*agreement).mean() > 0.7


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [ptq.HQQ(), ptq.Nearest("whole"), ptq.AdaRound(steps=50)], ids=str)
def test_methods(rng: np.random.Generator, method: Any) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(64, 12)) @ rng.normal(size=(12, 12)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    qparams, notes = ptq.apply(prepared, params, [x], method)
    assert notes["w"].action == type(method).__name__
    if method == ptq.Nearest("whole"):
        check_equal(qparams.params["w"].codes, prepared.convert(params).params["w"].codes)
    if not isinstance(method, ptq.AdaRound):
        check_equal(ptq.apply(prepared, params, None, method).tree.params["w"].codes.shape, (12, 5))


@pytest.mark.slow
def test_what_cannot_be_quantized_with_inputs_is_noted(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 8)), F32), "v": jnp.asarray(rng.normal(size=(8, 8)), F32)}
    x = jnp.asarray(rng.normal(size=(16, 12)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        left, right = jnp.split(params["w"], 2, 1)
        joined = jnp.concatenate([params["v"][:, :4], right[:8]], 1)
        return (x @ left) @ joined[:4]

    prepared = jq.prepare(apply, params, x, rules=INT4[1:])
    for data in ([x], ptq.collect(prepared, params, [x])):
        _, notes = ptq.apply(prepared, params, data, ptq.GPTQ())
        for note in notes:
            assert note.action == "Nearest for GPTQ"
            assert note.reason


@pytest.mark.slow
@pytest.mark.parametrize("match_floats", [False, True])
def test_what_follows_the_last_weight_is_not_run(rng: np.random.Generator, match_floats: bool) -> None:
    """The logits of a large table that stays in floats would take the most time and memory."""
    seen: list[str] = []

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(x @ params["first"])
        jax.debug.callback(lambda: seen.append("before"))
        x = x @ params["second"].T
        jax.debug.callback(lambda: seen.append("after"))
        return x @ params["table"].T

    shapes = {"first": (8, 16), "second": (6, 16), "table": (40, 6)}
    params = {name: jnp.asarray(rng.normal(0, 0.5, shape), F32) for name, shape in shapes.items()}
    batches = [jnp.asarray(rng.normal(size=(32, 8)), F32) for _ in range(3)]
    rules = (jq.Rule("table", keep="float"), *INT4)
    prepared = jq.prepare(apply, params, batches[0], rules=rules)
    notes = ptq.apply(prepared, params, batches, ptq.GPTQ(), match_floats=match_floats, progress=False).notes
    jax.effects_barrier()
    assert [note.action for note in notes] == ["GPTQ", "GPTQ"]
    assert "before" in seen
    assert "after" not in seen


@pytest.mark.parametrize("match_floats", [False, True])
def test_one_batch_at_a_time_runs_between_two_contractions(rng: np.random.Generator, match_floats: bool) -> None:
    """All batches together would hold the arrays between the contractions of all of them."""
    seen: list[tuple[str, float]] = []

    # Outside of jax.jit it returns the operands as they are, which are no arrays of JAX.
    @jax.custom_jvp
    def pass_on(x: Any, number: float) -> tuple[Any, float]:
        return x, number

    pass_on.defjvp(lambda primals, tangents: (pass_on(*primals), tuple(tangents)))

    def observe(name: str, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append((name, float(value))), x[0, 0])
        return x

    def apply(params: Any, x: jax.Array) -> jax.Array:
        y = observe("first", jnp.sin(pass_on(x, 1.0)[0] @ params["first"]))
        z = jnp.sum(y, axis=0, keepdims=True)
        # The factor does not differ between batches, and is computed between equations that do.
        x = observe("second", jnp.cos(y * jnp.cos(params["offset"]) * z))
        # A value of this part is read after the next contraction, too.
        return (x @ params["second"].T + y[:, :6]) @ params["third"]

    shapes = {"first": (8, 16), "second": (6, 16), "third": (6, 4), "offset": (1, 16)}
    params = {name: jnp.asarray(rng.normal(0, 0.5, shape), F32) for name, shape in shapes.items()}
    batches = [rng.normal(size=(32, 8)).astype(F32) for _ in range(3)]
    prepared = jq.prepare(apply, params, batches[0], rules=INT4[1:])
    seen.clear()
    found = ptq.apply(prepared, params, batches, ptq.GPTQ(), match_floats=match_floats, progress=False)
    jax.effects_barrier()
    count = len(batches) * (2 if match_floats else 1)
    assert [name for name, _ in seen[-2 * count :]] == ["first", "second"] * count
    weights = [{**params, "first": found.tree.params["first"].dequantize()}, params][: 2 if match_floats else 1]
    for number, x in enumerate(batches):
        for place, values in enumerate(reversed(weights)):
            y = np.sin(np.asarray(x, np.float64) @ np.asarray(values["first"], np.float64))
            expected = y[0, 0], np.cos(y * np.cos(np.asarray(params["offset"])) * y.sum(0))[0, 0]
            at = 2 * (number + place * len(batches))
            np.testing.assert_allclose([value for _, value in seen[-2 * count :][at : at + 2]], expected, atol=1e-4)


def test_singular_moments_and_dead_inputs_are_noted(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(4, 12)), F32).at[:, 3].set(0)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    _, notes = ptq.apply(prepared, params, [x], ptq.GPTQ())
    assert notes["w"].reason.startswith(
        "1 inputs are always 0; 4 samples for 12 inputs: the second moments are singular"
    )


def test_errors(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(4, 12)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    stats = ptq.collect(prepared, params, [x])
    cases: list[Any] = [
        (lambda: ptq.apply(prepared, params, [], ptq.GPTQ()), "ptq.apply: data: expected at least one batch"),
        (lambda: ptq.apply(prepared, params, None, ptq.GPTQ()), "ptq.apply: data: expected batches or statistics for"),
        (lambda: ptq.apply(prepared, params, [x, x[:2]], ptq.GPTQ()), "ptq.apply: data: expected batches of one shape"),
        (lambda: ptq.apply(prepared, {"v": params["w"]}, [x], ptq.GPTQ()), "ptq.apply: params: expected"),
        (lambda: ptq.apply(prepared, params, [x * np.nan], ptq.GPTQ()), "ptq.apply: state: expected finite numbers"),
        (lambda: ptq.apply(prepared, params, ptq.Statistics({}, stats.uses), ptq.GPTQ()), "ptq.apply: data: exp"),
        (lambda: ptq.collect(prepared, params, []), "ptq.collect: batches: expected at least one batch, got none"),
        (lambda: ptq.collect(prepared, params, [x * np.nan]), "ptq.collect: batches: expected batches"),
        (lambda: ptq.collect(prepared, params, x), "ptq.collect: batches: expected an iterable of batches"),
        (lambda: ptq.GPTQ(refits=-1), "GPTQ: refits: expected 0 or a positive number, got -1"),
        (lambda: ptq.GPTQ(damping=-1.0), "GPTQ: damping: expected 0 or a positive number, got -1.0"),
        (lambda: ptq.GPTQ(range="best"), "GPTQ: range: expected 'whole' or 'searched' or 'tried' or"),
    ]  # fmt: skip
    apply: Any = ptq.apply
    cases += [
        (lambda: apply(prepared, params, [x], "gptq"), "ptq.apply: method: expected ptq.GPTQ"),
        (lambda: apply(lambda x: x, params, [x], ptq.GPTQ()), "ptq.apply: prepared: expected a Prepared"),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.{text}"):
            call()


class StoppedError(Exception):
    """Raised between two weights."""


@pytest.mark.slow
def test_a_stopped_run_goes_on(rng: np.random.Generator) -> None:
    """With the state of the weights that are done, which is a dict of arrays, and the same result."""
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), F32) for name in ("first", "second", "third")}
    x = jnp.asarray(rng.normal(size=(64, 8)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"]) @ params["third"]

    prepared = jq.prepare(apply, params, x, rules=INT4[1:])
    states: list[Any] = []

    def stop(state: Any) -> None:
        states.append(state)
        if len(state) == 2:
            raise StoppedError

    method = ptq.GPTQ(range="whole")
    expected, notes = ptq.apply(prepared, params, [x], method)
    with pytest.raises(StoppedError):
        ptq.apply(prepared, params, [x], method, on_layer=stop)
    assert [sorted(state) for state in states] == [["first"], ["first", "second"]]
    # As a checkpoint has it: arrays alone.
    arrays, structure = jax.tree.flatten(states[-1])
    state = jax.tree.unflatten(structure, [np.asarray(x) for x in arrays])
    state["second"] = state["second"].replace(codes=jnp.flip(states[-1]["second"].codes, 0))
    sizes: list[int] = []
    actual, again = ptq.apply(
        prepared, params, [x], method, state=state, on_layer=lambda state: sizes.append(len(state))
    )
    assert sizes == [1, 2, 3]
    check_equal(actual.params["first"].codes, expected.params["first"].codes)
    # The codes of the state are the ones that the next layer sees, and the notes measure them.
    check_equal(actual.params["second"].codes, state["second"].codes)
    assert again["first"] == notes["first"]
    assert again["second"].after > notes["second"].after  # type: ignore[operator]
    assert (np.asarray(actual.params["third"].codes) != np.asarray(expected.params["third"].codes)).any()
    for value, text in (
        (states[-1]["first"].codes, r"int4\[8, 8\] codes at first"),
        ({"w": 1}, "weights that the rules"),
    ):
        other: Any = value if isinstance(value, dict) else {"first": value}
        with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.ptq\.apply: state: expected {text}"):
            ptq.apply(prepared, params, [x], method, state=other)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_orbax(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The state of the weights that are done, saved in one process, restored in another: the same codes."""
    orbax = pytest.importorskip("orbax.checkpoint")
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), F32) for name in ("first", "second", "third")}
    x = jnp.asarray(rng.normal(size=(64, 8)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"]) @ params["third"]

    prepared = jq.prepare(apply, params, x, rules=INT4[1:])
    method = ptq.GPTQ(range="whole")

    def save(state: Any) -> None:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / f"{len(state)}", state)
        if len(state) == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        ptq.apply(prepared, params, [x], method, on_layer=save)
    # The shapes and dtypes of the state are those of round-to-nearest.
    converted = prepared.convert(params)
    done = {name: converted.params[name] for name in ("first", "second")}
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), done)
    with orbax.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "2", template)
    expected, notes = ptq.apply(prepared, params, [x], method)
    actual, again = ptq.apply(prepared, params, [x], method, state=state)
    for name in params:
        check_equal(actual.params[name].codes, expected.params[name].codes)
        check_equal(actual.params[name].scale, expected.params[name].scale)
    assert again == notes


def find_corrections(groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return what least squares in float64 add to the weights of some groups, of inputs and what outputs lack.

    The damping is the one with the least error on vectors that the least squares have not seen, halves of two batches.
    """

    def solve(x: np.ndarray, y: np.ndarray, damping: float) -> np.ndarray:
        hessian = x.T @ x
        return np.linalg.solve(hessian + damping * np.trace(hessian) / len(hessian) * np.eye(len(hessian)), x.T @ y)

    quarter = len(groups[0][0]) // 4
    is_first = np.arange(4 * quarter) // quarter % 2 == 0
    errors = {}
    for damping in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        errors[damping] = 0.0
        for x, y in groups:
            for half in (is_first, ~is_first):
                shift = solve(x[half], y[half], damping)
                errors[damping] += np.sum((y[~half] - x[~half] @ shift) ** 2) - np.sum(y[~half] ** 2)
    best = min(errors, key=errors.__getitem__)
    assert errors[best] < 0
    return [solve(x, y, best) for x, y in groups]


@pytest.mark.parametrize("dtype", ["int8", "uint4"])
def test_parts_of_a_large_weight_are_quantized_alone(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The codes are those of the whole weight, and no more outputs than fit are in the temporaries at a time."""
    module = importlib.import_module("jaxquant.ptq.apply")
    outputs, most = 90, 16 * 32
    params = {name: jnp.asarray(rng.normal(size=(outputs, 16)), F32) for name in ("first", "second")}
    params["first"] = params["first"][:16]
    x = jnp.asarray(rng.normal(size=(64, 16)) @ rng.normal(size=(16, 16)), F32)
    added = jnp.asarray(rng.normal(size=(16, outputs)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        y = x @ params["first"].T
        return y @ added + jax.nn.relu(y) @ params["second"].T

    rules = [jq.Rule(weight=jq.Weight(dtype, block=8, options={"symmetric": False}))]
    prepared = jq.prepare(apply, params, x[:32], rules=rules)
    batches, methods = [x[:32], x[32:]], [ptq.GPTQ(sweeps=1, refits=1), _RecordingNearest("tried")]
    whole = [ptq.apply(prepared, params, batches, method, match_floats=True) for method in methods]
    monkeypatch.setattr(module, "_MOST_ELEMENTS", most)
    _RecordingNearest.sizes.clear()
    for method, expected in zip(methods, whole, strict=True):
        found = ptq.apply(prepared, params, batches, method, match_floats=True)
        jax.tree.map(check_equal, found.tree.params, expected.tree.params)
        for row, other in zip(found.notes, expected.notes, strict=True):
            assert (row.before, row.after) == pytest.approx((other.before, other.after), rel=1e-4)
    assert sum(_RecordingNearest.sizes) == 16 * (16 + outputs)
    assert max(_RecordingNearest.sizes) <= most
    # A run that goes on has the codes already.
    state = {"second": whole[0].tree.params["second"]}
    again = ptq.apply(prepared, params, batches, methods[0], match_floats=True, state=state)
    jax.tree.map(check_equal, again.tree.params, whole[0].tree.params)


@dataclasses.dataclass(frozen=True)
class _RecordingNearest(ptq.Nearest):
    """`ptq.Nearest`, which records how large the weights are that it gets."""

    sizes: ClassVar[list[int]] = []

    def quantize(self, w: jax.Array, *arguments: Any) -> jq.QuantizedArray:
        self.sizes.append(w.size)
        return super().quantize(w, *arguments)


def test_outputs_that_share_a_scale_stay_together(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("jaxquant.ptq.apply"), "_MOST_ELEMENTS", 64)
    params, x = {"w": jnp.asarray(rng.normal(size=(8, 24)), F32)}, jnp.asarray(rng.normal(size=(16, 8)), F32)
    prepared = jq.prepare(
        lambda params, x: x @ params["w"], params, x, rules=[jq.Rule(weight=jq.Weight("int4", per="tensor"))]
    )
    _RecordingNearest.sizes.clear()
    ptq.apply(prepared, params, [x], _RecordingNearest("tried"))
    assert _RecordingNearest.sizes == [8 * 24]


@pytest.mark.slow
def test_layers_that_match_floats(rng: np.random.Generator) -> None:
    """The codes of the weight that least squares in float64 find, and results nearer to those of floats."""
    params = {name: jnp.asarray(rng.normal(size=(12, 12)), F32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(256, 12)) @ rng.normal(size=(12, 12)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["first"].T) @ params["second"]

    rules = (jq.Rule(path="second", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int2")))
    prepared = jq.prepare(apply, params, x, rules=rules)
    batches, method = [x[:128], x[128:]], ptq.Nearest("whole")
    actual, notes = ptq.apply(prepared, params, batches, method, match_floats=True)
    plain = ptq.apply(prepared, params, batches, method).tree
    # The first layer has the inputs of floats.
    check_equal(actual.params["first"].codes, plain.params["first"].codes)
    rows = np.asarray(x, np.float64)
    z = np.maximum(rows @ np.asarray(params["first"], np.float64).T, 0)
    y = np.maximum(rows @ np.asarray(plain.params["first"].dequantize(), np.float64).T, 0)
    w = np.asarray(params["second"], np.float64)
    (correction,) = find_corrections([(y, (z - y) @ w)])
    target = w + correction
    np.testing.assert_allclose(
        actual.params["second"].dequantize(), target, atol=float(actual.params["second"].scale.max()) * 0.51
    )
    errors = [np.sum((y @ np.asarray(q.params["second"].dequantize()) - z @ w) ** 2) for q in (plain, actual)]
    assert errors[1] < errors[0]
    assert notes["second"].after < notes["second"].before  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"^jaxquant\.ptq\.apply: data: expected batches, with match_floats=True, got No"
    ):
        ptq.apply(prepared, params, None, method, match_floats=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "jitted", "grouped convolution", "returned, too"])
def test_layers_that_match_floats_after_a_sum(rng: np.random.Generator, kind: str) -> None:
    """A layer makes up for what has changed in the array that is added to its outputs: least squares in float64.

    It does not if the outputs alone are results, too.
    """
    groups = 2 if kind == "grouped convolution" else 1
    size = 12 // groups
    params = {"first": jnp.asarray(rng.normal(size=(12, 12)), F32), "bias": jnp.asarray(rng.normal(size=12), F32)}
    params["second"] = jnp.asarray(rng.normal(size=(size, 12)), F32)
    x = jnp.asarray(rng.normal(size=(256, 12)) @ rng.normal(size=(12, 12)), F32)
    run_first = jax.jit(jnp.matmul) if kind == "jitted" else jnp.matmul

    def apply(params: Any, x: jax.Array) -> Any:
        y = run_first(x, params["first"])
        h = jax.nn.relu(y)
        if groups == 1:
            z = h @ params["second"] + params["bias"][None]
            return (y + z, z) if kind == "returned, too" else y + z
        numbers = ("NHWC", "HWIO", "NHWC")
        images, before = (values.reshape(len(h) // 4, 2, 2, 12) for values in (h, y))
        result = jax.lax.conv_general_dilated(
            images, params["second"][None, None], (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
        )
        return before + result

    rules = (jq.Rule(path="second", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int2")))
    prepared = jq.prepare(apply, params, x[:128], rules=rules)
    batches, method = [x[:128], x[128:]], ptq.Nearest("whole")
    actual = ptq.apply(prepared, params, batches, method, match_floats=True).tree
    rows = np.asarray(x, np.float64)
    expected, changed = (
        rows @ np.asarray(w, np.float64) for w in (params["first"], actual.params["first"].dequantize())
    )
    second = np.asarray(params["second"], np.float64)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    weights: list[tuple[np.ndarray, slice]] = []
    for group in range(groups):
        part, outputs = slice(group * size, (group + 1) * size), slice(group * 12 // groups, (group + 1) * 12 // groups)
        z, y = (np.maximum(values[:, part], 0) for values in (expected, changed))
        w = second[:, outputs]
        addend = 0 if kind == "returned, too" else (expected - changed)[:, outputs]
        parts.append((y, (z - y) @ w + addend))
        weights.append((w, outputs))
    for (w, outputs), correction in zip(weights, find_corrections(parts), strict=True):
        q = actual.params["second"].dequantize()[:, outputs]
        step = float(actual.params["second"].scale.max())
        np.testing.assert_allclose(q, w + correction, atol=step * 0.51)


@pytest.mark.slow
def test_noise_is_not_matched(fixed_rng: np.random.Generator) -> None:
    """With fewer vectors than inputs, what least squares would fit is noise: other inputs do not get worse."""
    errors: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(8):
        params = {name: jnp.asarray(fixed_rng.normal(size=(24, 24)), F32) for name in ("first", "second")}
        x, others = (jnp.asarray(fixed_rng.normal(size=(size, 24)), F32) for size in (20, 512))

        def apply(params: Any, x: jax.Array) -> jax.Array:
            return jax.nn.relu(x @ params["first"]) @ params["second"]

        rules = (jq.Rule(path="second", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int4")))
        prepared = jq.prepare(apply, params, x, rules=rules)
        expected = apply(params, others)
        for match in errors:
            qparams = ptq.apply(prepared, params, [x], ptq.Nearest("whole"), match_floats=match).tree
            y = jax.jit(prepared.apply)(qparams, others)
            errors[match].append(float(jnp.sum((y - expected) ** 2)))
    assert sum(errors[True]) < 1.05 * sum(errors[False])


@pytest.mark.slow
def test_refits_never_raise_the_error(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(16, 8)), F32)}
    x = jnp.asarray(rng.normal(size=(64, 16)) @ rng.normal(size=(16, 16)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=[jq.Rule(weight=jq.Weight("int2"))])
    runs = [ptq.apply(prepared, params, [x], ptq.GPTQ(range="whole", refits=refits)) for refits in (0, 1, 3)]
    errors = [float(jnp.sum((x @ (params["w"] - q.params["w"].dequantize())) ** 2)) for q, _ in runs]
    assert errors[0] > errors[1] * (1 - 1e-5)
    assert errors[1] > errors[2] * (1 - 1e-5)
    assert errors[0] > errors[2] * 1.02
    # A scale that several outputs share stays.
    rules = [jq.Rule(weight=jq.Weight("int2", per="tensor"))]
    shared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=rules)
    one, other = (ptq.apply(shared, params, [x], ptq.GPTQ(range="whole", refits=n)).tree.params for n in (0, 1))
    check_equal(one["w"].scale, other["w"].scale)


@pytest.mark.parametrize(
    ("shape", "axis", "granularity"),
    [
        ((8, 16), 0, jq.PerAxis(0)), ((8, 16), 0, jq.Blocked(1, 4)), ((3, 8, 4), 2, jq.Blocked(1, 4)),
        ((8, 14), 0, jq.Blocked(1, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_refitted_scales_have_the_least_error(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int, granularity: Any
) -> None:
    """The factors of least squares in float64, for one scale of an output and for several, and with an offset."""
    w = jnp.asarray(rng.normal(size=shape), F32)
    count = w.size // shape[axis]
    x = rng.normal(size=(4 * count, count))
    hessian = jnp.asarray(x.T @ x, F32)[None]
    q = jq.quantize(w, jq.QuantSpec("int4", granularity))
    refitted = refit_scale(w, q, hessian, axis)
    assert refitted is not None
    # With an offset, the codes and the scale are those of what is left of the weight without it.
    offset = jnp.asarray(rng.normal(size=q.scale.shape), F32)
    wide = jnp.repeat(offset, 4, 1)[:, : shape[1]] if q.scale.shape[1] > 1 else offset
    moved = refit_scale(w + wide, q.replace(offset=offset), hessian, axis)
    assert moved is not None
    np.testing.assert_allclose(moved.scale, refitted.scale, rtol=1e-3)

    def list_outputs(array: Any) -> np.ndarray:
        """Return an array with one row for each output; blocks are repeated."""
        array = np.asarray(array, np.float64)
        for a, length in enumerate(shape):
            array = np.repeat(array, -(-length // array.shape[a]), a).take(np.arange(length), a)
        return np.moveaxis(array, axis, 0).reshape(shape[axis], -1)

    blocks = list_outputs(np.arange(q.scale.size).reshape(q.scale.shape))
    targets, values, actual = (list_outputs(array) for array in (w, q.dequantize(), refitted.scale / q.scale))
    for block, target, value, factors in zip(blocks, targets, values, actual, strict=True):
        names, place = np.unique(block, return_inverse=True)
        parts = x @ (value[:, None] * (place[:, None] == np.arange(len(names))))
        expected = np.linalg.lstsq(parts, x @ target, rcond=None)[0]
        np.testing.assert_allclose(factors, expected[place], rtol=1e-3)


@pytest.mark.slow
def test_a_limit_of_bytes(rng: np.random.Generator) -> None:
    """Further passes over the batches accumulate the same statistics."""
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), F32) for name in ("first", "second", "third")}
    batches = [jnp.asarray(rng.normal(size=(16, 8)), F32) for _ in range(2)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"]) @ params["third"]

    prepared = jq.prepare(apply, params, batches[0], rules=INT4[1:])
    expected = ptq.collect(prepared, params, batches)
    size = 8 * 8 * 8 + 2 * 2 * 8 * 4 + 8 * 4 + 4  # two parts of second moments and of sums, the largest, the count
    stats = ptq.collect(prepared, params, batches, limit=2 * size)
    assert list(stats) == list(expected)
    assert stats.uses == expected.uses
    for name in stats:
        for actual, value in zip(stats[name], expected[name], strict=True):
            np.testing.assert_allclose(actual, value, rtol=1e-6)
    with pytest.raises(ValueError, match=rf"jaxquant\.ptq\.collect: limit: expected at least {size} bytes, for first"):
        ptq.collect(prepared, params, batches, limit=size - 1)
    with pytest.raises(TypeError, match=r"jaxquant\.ptq\.collect: batches: expected batches that can be read 3 times"):
        ptq.collect(prepared, params, iter(batches), limit=size)


def test_states_are_in_memory_once(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    """While a batch is read, there is one state for each contraction; a file needs the last one that is finite, too."""
    size = 56  # no other array has this shape
    params = {"w": jnp.asarray(rng.normal(size=(size, 3)), F32)}
    batch = jnp.asarray(rng.normal(size=(4, size)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, batch, rules=INT4[1:])
    counts: list[int] = []

    class Batches:
        def __iter__(self) -> Iterator[jax.Array]:
            for _ in range(4):
                counts.append(sum(x.shape == (1, size, size) for x in jax.live_arrays()))
                yield batch

    stats = ptq.collect(prepared, params, Batches())
    assert max(counts[-2:]) == 2  # the two parts of a sum
    kept = ptq.collect(prepared, params, Batches(), checkpoint=tmp_path / "state")
    np.testing.assert_array_equal(kept["w"].second, stats["w"].second)


def test_integer_outputs_are_refused(rng: np.random.Generator) -> None:
    """Such a contraction multiplies its weights by other parameters before they become codes."""
    params, x = {"w": jnp.asarray(rng.normal(size=(8, 5)), F32)}, jnp.asarray(rng.normal(size=(4, 8)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=jq.recipes.onnx_runtime())
    qparams = prepared.convert(params, prepared.calibrate(params, [x]))
    calls: dict[str, Any] = {
        "ptq.apply": lambda: ptq.apply(prepared, params, [x], ptq.GPTQ()),
        "ptq.collect": lambda: ptq.collect(prepared, params, [x]),
        "ptq.equalize": lambda: ptq.equalize(prepared, params, x),
        "ptq.allocate_bits": lambda: ptq.allocate_bits(prepared, params, [x], budget=100),
        "report.compare": lambda: jq.report.compare(prepared, params, qparams, [x]),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^jaxquant.{name}: prepared: expected rules without `output`.*got.* w"):
            call()
