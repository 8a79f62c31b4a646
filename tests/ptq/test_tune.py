"""Learned scales and float parameters: less error of the results, with the same codes."""

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
        y, expected = (
            np.asarray(x["y"], np.float64) for x in (prepared.apply(qparams, None, batch), network(params, batch))
        )
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
        check_equal(tuned[name].codes, qparams[name].codes)
        assert (np.asarray(tuned[name].scale) > 0).all()
    # Each scale of a weight has its own variable; a table keeps its scales, and integers are no parameters.
    assert (np.asarray(tuned["first"].scale) != np.asarray(qparams["first"].scale)).mean() > 0.5
    check_equal(tuned["table"].scale, qparams["table"].scale)
    assert notes["table"].reason.startswith("a lookup")
    assert {note.path for note in notes} == {"table", "first", "second", "scale", "bias"}
    for name in ("scale", "bias"):
        assert notes[name].action == "tuned"
        assert (np.asarray(tuned[name]) != np.asarray(params[name])).any()
    check_equal(tuned["count"], params["count"])


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
    before, *after = (measure(prepared, params, q, [held_out]) for q in (qparams, last.params, best.params))
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
        (lambda: tune(prepared, params, params, batches), "qparams: expected a quantized array at first, got"),
        (lambda: tune(prepared, params, qparams, batches, rounds=0), "rounds: expected a positive number, got 0"),
        (lambda: tune(prepared, params, qparams, batches, rate=-1), "rate: expected a positive number, got -1"),
        (lambda: tune(params, params, qparams, batches), "prepared: expected a Prepared"),
        (
            lambda: tune(prepared, {**params, "scale": params["scale"] * np.nan}, qparams, batches),
            r"batches: expected batches with finite results, got a NaN or an infinity in those of batches\[0\]",
        ),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.ptq\.tune: {text}"):
            call()
