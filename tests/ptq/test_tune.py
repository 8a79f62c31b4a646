"""Learned scales, float parameters and codes: less error of the results."""

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
RULES = (jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int2", block=8)))


def network(params: Any, ids: jax.Array) -> dict[str, jax.Array]:
    """Return a result of each kind of parameter: a table, weights, biases, a normalization, an integer."""
    x = jax.nn.standardize(params["table"][ids]) * params["scale"][None]
    x = jax.nn.relu(x @ params["first"] + params["bias"][None])
    return {"y": x @ params["second"], "count": params["count"] + ids.sum()}


def sample(rng: np.random.Generator) -> tuple[dict[str, Any], list[jax.Array]]:
    shapes = {"table": (16, 8), "first": (8, 16), "second": (16, 4)}
    params: dict[str, Any] = {name: jnp.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}
    params |= {"scale": jnp.full(8, 0.5), "bias": jnp.zeros(16), "count": jnp.int32(3)}
    return params, [jnp.asarray(rng.integers(0, 16, 32), jnp.int32) for _ in range(3)]


def measure(prepared: jq.Prepared, params: Any, qparams: Any, batches: Any) -> float:
    """Return the error of the results, as a part of their squares, in float64."""
    errors = []
    for batch in batches:
        y, expected = (np.asarray(x["y"], np.float64) for x in (prepared.apply(qparams, batch), network(params, batch)))
        errors.append(np.sum((y - expected) ** 2) / np.sum(expected**2))
    return float(np.mean(errors))


@pytest.mark.slow
def test_results_are_nearer_to_those_of_floats(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, batches[0], rules=RULES)
    qparams = prepared.convert(params)
    tuned, notes = ptq.tune(prepared, params, qparams, batches, rounds=60, rate=3e-3)
    assert jax.tree.structure(tuned) == jax.tree.structure(qparams)
    before, after = (measure(prepared, params, q, batches) for q in (qparams, tuned))
    assert after < 0.9 * before
    assert [notes["first"].before, notes["first"].after] == pytest.approx([before, after], rel=1e-3)
    for name in ("table", "first", "second"):
        check_equal(tuned.params[name].codes, qparams.params[name].codes)
        assert (np.asarray(tuned.params[name].scale) > 0).all()
    # Each scale of a weight has its own variable; a table keeps its scales, and integers are no parameters.
    assert (np.asarray(tuned.params["first"].scale) != np.asarray(qparams.params["first"].scale)).mean() > 0.5
    check_equal(tuned.params["table"].scale, qparams.params["table"].scale)
    assert notes["table"].reason.startswith("a lookup")
    assert {note.path for note in notes} == {"table", "first", "second", "scale", "bias"}
    for name in ("scale", "bias"):
        assert notes[name].action == "tuned"
        assert (np.asarray(tuned.params[name]) != np.asarray(params[name])).any()
    check_equal(tuned.params["count"], params["count"])


@pytest.mark.slow
def test_held_out_batches_choose_the_round(rng: np.random.Generator) -> None:
    """Two rows of the table say little about the others, so that many large steps fit nothing else."""
    params, (batch, held_out, _) = sample(rng)
    prepared = jq.prepare(network, params, batch, rules=RULES)
    qparams = prepared.convert(params)
    last, best = (
        ptq.tune(prepared, params, qparams, [batch[:2]], held_out=others, rounds=40, rate=0.1)
        for others in (None, [held_out])
    )
    before, *after = (measure(prepared, params, q, [held_out]) for q in (qparams, last.tree, best.tree))
    assert after[1] < after[0]
    assert after[1] < (1 + 1e-6) * before
    note = best.notes["first"]
    if note.action == "tuned":
        assert [note.before, note.after] == pytest.approx([before, after[1]], rel=1e-3)
    else:
        assert after[1] == before


@pytest.mark.slow
def test_steps_that_do_not_help_are_dropped(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, batches[0], rules=RULES)
    qparams = prepared.convert(params)
    tuned, notes = ptq.tune(prepared, params, qparams, batches, rounds=1, rate=10.0)
    for x, y in zip(jax.tree.leaves(tuned), jax.tree.leaves(qparams), strict=True):
        check_equal(x, y)
    assert notes["first"].reason == "the error of the results would not become smaller"


def test_the_error_is_that_of_rounded_scales(rng: np.random.Generator) -> None:
    """With codes of 8 bits, rounding a scale to bfloat16 changes more than rounding the weights."""
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), F32)}
    x = jnp.asarray(rng.normal(size=(64, 8)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    rule = jq.Rule(weight=jq.Weight("int8", options={"scale_dtype": "bfloat16"}))
    prepared = jq.prepare(apply, params, x, rules=[rule])
    qparams = prepared.convert(params)
    tuned, notes = ptq.tune(prepared, params, qparams, [x], rounds=40)
    before, after = (
        float(
            np.sum((np.asarray(x @ q.params["w"].dequantize()) - x @ params["w"]) ** 2) / np.sum((x @ params["w"]) ** 2)
        )
        for q in (qparams, tuned)
    )
    assert notes["w"].after in (None, pytest.approx(after, rel=1e-2))
    assert (notes["w"].action == "tuned") == (after < before)


def test_scales_stay_positive(rng: np.random.Generator) -> None:
    """The codes of the first block stand for 0, and its scales are the least numbers of float16."""
    params = {"w": jnp.asarray(rng.normal(size=(16, 4)), F32).at[:8].set(0)}
    x = jnp.asarray(rng.normal(size=(32, 16)), F32).at[:, :8].multiply(1e4)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["w"]

    rule = jq.Rule(weight=jq.Weight("int4", block=8, options={"scale_dtype": "float16"}))
    prepared = jq.prepare(apply, params, x, rules=[rule])
    qparams = prepared.convert({"w": params["w"].at[:8].set(4e-7)})
    tuned, notes = ptq.tune(prepared, params, qparams, [x], rounds=100, rate=0.03)
    assert notes["w"].action == "tuned"
    assert (np.asarray(tuned.params["w"].scale) > 0).all()
    assert np.isfinite(np.asarray(prepared.apply(tuned, x))).all()


def count_changes(x: jq.QuantizedArray, y: jq.QuantizedArray) -> int:
    return int((np.asarray(x.codes, np.int32) != np.asarray(y.codes, np.int32)).sum())


def test_codes_are_learned(fixed_rng: np.random.Generator) -> None:
    params, batches = sample(fixed_rng)
    held_out = [jnp.asarray(fixed_rng.integers(0, 16, 64), jnp.int32)]
    prepared = jq.prepare(network, params, batches[0], rules=RULES)
    qparams = prepared.convert(params)
    scales, codes = (
        ptq.tune(prepared, params, qparams, batches, held_out=held_out, rounds=40, rate=3e-3, codes=x, code_rate=0.05)
        for x in (False, True)
    )
    before, *after = (measure(prepared, params, q, held_out) for q in (qparams, scales.tree, codes.tree))
    assert after[1] < 0.8 * after[0] < 0.8 * before
    for name in ("first", "second"):
        tuned, count = codes.tree.params[name], count_changes(codes.tree.params[name], qparams.params[name])
        assert count > 0
        assert codes.notes[name].action == f"tuned, {count} of {tuned.size} codes changed"
        assert [codes.notes[name].before, codes.notes[name].after] == pytest.approx([before, after[1]], rel=1e-4)
        assert scales.notes[name].action == "tuned"
        check_equal(scales.tree.params[name].codes, qparams.params[name].codes)
        assert (np.asarray(tuned.scale) != np.asarray(qparams.params[name].scale)).any()
    # Of a table a batch reads few rows.
    check_equal(codes.tree.params["table"].codes, qparams.params["table"].codes)
    assert codes.notes["table"].reason.startswith("a lookup")


# A weight for each kind of codes. Those of "bent" are the levels of a codebook whose steps differ much.
BENT = jq.Codebook("bent", (-1.0, 0.0, 0.125, 1.0))
KINDS: dict[str, tuple[jq.Weight, Any]] = {
    "narrow": (jq.Weight("int4"), F32),
    "whole": (jq.Weight("int2", per="tensor", options={"narrow_range": False}), F32),
    "point": (jq.Weight("uint4", block=4, options={"symmetric": False}), F32),
    "short": (jq.Weight("int2", block=3, options={"scale_dtype": "float16"}), F32),
    "nf4": (jq.Weight(jq.nf4, block=4), F32),
    "bent": (jq.Weight(BENT), F32),
    "half": (jq.Weight("int8", options={"scale_dtype": "bfloat16"}), jnp.bfloat16),
    "power": (jq.Weight("int4", options={"power_of_two": True}), F32),
    "float": (jq.Weight("float8_e4m3fn"), F32),
}
KERNEL = jq.Rule(operation="conv_general_dilated", weight=jq.Weight("int2"))
SHAPES: dict[str, Any] = {**{name: ((8, 6), x) for name, (_, x) in KINDS.items()}, "kernel": ((2, 2, 1, 3), F32)}
KIND_RULES = (KERNEL, *(jq.Rule(name, weight=weight) for name, (weight, _) in KINDS.items()))


def contract_kinds(params: Any, x: jax.Array) -> jax.Array:
    results = [(x.astype(params[name].dtype) @ params[name]).astype(F32) for name in KINDS]
    image = x.reshape(-1, 4, 2, 1)
    names = ("NHWC", "HWIO", "NHWC")
    kernel = jax.lax.conv_general_dilated(image, params["kernel"], (1, 1), "VALID", dimension_numbers=names)
    return jnp.concatenate([*results, kernel.reshape(len(x), -1)], 1)


@pytest.fixture(scope="module")
def prepared_kinds() -> jq.Prepared:
    params = {name: jnp.zeros(*shape) for name, shape in SHAPES.items()}
    return jq.prepare(contract_kinds, params, jnp.zeros((16, 8)), rules=KIND_RULES)


def test_learned_codes_are_those_of_the_spec(rng: np.random.Generator, prepared_kinds: jq.Prepared) -> None:
    """The codes of other weights are a start from which all kinds come nearer to the results of floats."""
    params, others = (
        {name: jnp.asarray(rng.normal(size=shape), dtype) for name, (shape, dtype) in SHAPES.items()} for _ in range(2)
    )
    x = jnp.asarray(rng.normal(size=(16, 8)), F32)
    qparams = prepared_kinds.convert(others)
    qparams.params["bent"] = qparams.params["bent"].store_last(0)
    tuned, notes = ptq.tune(prepared_kinds, params, qparams, [x], held_out=[x], rounds=20, codes=True, code_rate=0.5)
    assert jax.tree.structure(tuned) == jax.tree.structure(qparams)
    specs = {prepared_kinds.names[leaf]: plan.spec for leaf, plan in prepared_kinds.leaves.items()}
    floats = {name: q.dequantize() for name, q in tuned.params.items()}
    y, expected = (np.asarray(contract_kinds(p, x), np.float64) for p in (floats, params))
    # Compiled, bfloat16 results may not be rounded, which is less than another code would change.
    assert notes["nf4"].after == pytest.approx(np.sum((y - expected) ** 2) / np.sum(expected**2), rel=5e-4)
    for name, q in tuned.params.items():
        start = qparams.params[name]
        assert (q.dtype, q.codes.dtype, q.scale.dtype) == (start.dtype, start.codes.dtype, start.scale.dtype)
        assert [x.shape for x in jax.tree.leaves(q)] == [x.shape for x in jax.tree.leaves(start)]
        if start.zero_point is not None:
            check_equal(q.zero_point, start.zero_point)
        if name == "float":
            check_equal(q.codes, start.codes)
            continue
        count = count_changes(q, start)
        assert count > 0
        assert notes[name].action == f"tuned, {count} of {q.size} codes changed"
        if specs[name].codebook is None:
            low, high = specs[name].bounds
            assert low <= np.asarray(q.codes, np.int32).min() <= np.asarray(q.codes, np.int32).max() <= high
    check_equal(tuned.params["power"].scale, qparams.params["power"].scale)
    assert notes["power"].reason == "scales that are powers of two"
    assert (notes["float"].action, notes["float"].reason) == ("tuned", "codes of floats, which are not evenly spaced")


def test_parameters_without_a_gradient_are_noted(rng: np.random.Generator) -> None:
    params = {name: jnp.asarray(rng.normal(size=(8, 4)), F32) for name in ("w", "idle", "stopped")}
    params["bias"] = jnp.zeros(4)
    x = jnp.asarray(rng.normal(size=(16, 8)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        stopped = jax.lax.stop_gradient(x @ params["stopped"])
        return x @ params["w"] + stopped + 0 * (x @ params["idle"] + params["bias"][None])

    prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
    qparams = prepared.convert(params)
    for codes in (False, True):
        tuned, notes = ptq.tune(prepared, params, qparams, [x], codes=codes)
        assert notes["w"].action.startswith("tuned")
        for name in ("idle", "stopped", "bias"):
            assert notes[name].action == "unchanged"
            assert notes[name].reason == "the results do not depend on it, or have no gradient for it"
            for y, z in zip(jax.tree.leaves(tuned.params[name]), jax.tree.leaves(qparams.params[name]), strict=True):
                check_equal(y, z)


def test_random_keys_and_numbers_are_no_floats_to_learn(rng: np.random.Generator) -> None:
    """An NNX module with dropout has keys among its parameters, for example."""
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), F32), "key": jax.random.key(0), "factor": 0.5}
    x = jnp.asarray(rng.normal(size=(16, 8)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return params["factor"] * x @ params["w"] + jax.random.normal(params["key"], (1, 4))

    prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
    tuned, notes = ptq.tune(prepared, params, prepared.convert(params), [x], codes=True)
    assert [note.path for note in notes] == ["w"]
    check_equal(jax.random.key_data(tuned.params["key"]), jax.random.key_data(params["key"]))


@pytest.mark.slow
def test_errors(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, batches[0], rules=RULES)
    qparams = prepared.convert(params)
    tune: Any = ptq.tune
    cases: list[tuple[Any, str]] = [
        (lambda: tune(prepared, params, qparams, []), "batches: expected at least one batch, got none"),
        (
            lambda: tune(prepared, params, qparams, batches, held_out=[]),
            "held_out: expected at least one batch, got none",
        ),
        (
            lambda: tune(prepared, params, qparams, batches, held_out=batches[0]),
            "held_out: expected an iterable of batches",
        ),
        (lambda: tune(prepared, params, qparams, batches, held_out=[None]), r"held_out\[0\]: expected an array"),
        (
            lambda: tune(prepared, params, qparams, batches, held_out=[batches[0][:0]]),
            r"held_out\[0\]: expected a batch with results, got results without elements",
        ),
        (lambda: tune(prepared, params, params, batches), "q: expected a QuantizedTree, .* got a dict"),
        (lambda: tune(prepared, params, qparams, batches, rounds=0), "rounds: expected a positive number, got 0"),
        (lambda: tune(prepared, params, qparams, batches, rate=-1), "rate: expected a positive number, got -1"),
        (
            lambda: tune(prepared, params, qparams, batches, codes=True, code_rate=0),
            "code_rate: expected a positive number, got 0",
        ),
        (lambda: tune(prepared, params, qparams, batches, codes="yes"), "codes: expected"),
        (lambda: tune(prepared, params, qparams, batches, code_rate="fast"), "code_rate: expected"),
        (lambda: tune(params, params, qparams, batches), "prepared: expected a Prepared"),
        (
            lambda: tune(prepared, {**params, "scale": params["scale"] * np.nan}, qparams, batches),
            r"batches: expected batches with finite results, got a NaN or an infinity in the results of batches\[0\]",
        ),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.ptq\.tune: {text}"):
            call()
