"""Inputs that no algorithm can use: errors and notes that name the layer."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32


def network(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["first"]) @ params["second"] + y @ params["third"]


def sample(rng: np.random.Generator, count: int = 48) -> tuple[dict[str, jax.Array], list[tuple[jax.Array, jax.Array]]]:
    params = {name: jnp.asarray(rng.normal(size=(8, 8)), F32) for name in ("first", "second", "third")}
    return params, [tuple(jnp.asarray(rng.normal(size=(count, 8)), F32) for _ in range(2))]  # type: ignore[list-item]


def prepare(params: Any, batch: Any, dtype: Any = "int4") -> jq.Prepared:
    return jq.prepare(network, params, *batch, rules=[jq.Rule(weight=jq.Weight(dtype))])


@pytest.mark.slow
def test_a_nan_in_a_batch_names_the_layer(rng: np.random.Generator) -> None:
    """The third weight reads another input, which has the NaN."""
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    x, y = batches[0]
    spoiled = [(x, y.at[3, 2].set(np.nan))]
    calls: list[Any] = [
        lambda: ptq.apply(prepared, params, spoiled, ptq.GPTQ()),
        lambda: ptq.apply(prepared, params, spoiled, ptq.Nearest(), match_floats=True),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"third.*expected finite numbers in all batches, got a NaN or an infinity"
        ):
            call()
    with pytest.raises(ValueError, match=r"^jaxquant\.ptq\.collect: batches: .* at third in batch 0"):
        ptq.collect(prepared, params, spoiled)


@pytest.mark.slow
def test_a_nan_in_a_weight_names_it(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0])
    spoiled = {**params, "second": params["second"].at[0, 0].set(np.inf)}
    for method in (ptq.Nearest(), ptq.GPTQ()):
        with pytest.raises(ValueError, match=r"second: jaxquant\.ptq\.apply: w: expected finite numbers"):
            ptq.apply(prepared, spoiled, None if method == ptq.Nearest() else batches, method)


def test_a_spec_without_such_codes_names_the_weight(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = prepare(params, batches[0], jq.nf4)
    with pytest.raises(
        ValueError, match=r"first: jaxquant\.ptq\.adaround: spec: expected codes of an integer dtype, got n"
    ):
        ptq.apply(prepared, params, batches, ptq.AdaRound(steps=1))


def test_converted_parameters_of_another_function(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    params["second"] = jnp.asarray(rng.normal(size=(8, 6)), F32)
    params["third"] = jnp.asarray(rng.normal(size=(8, 6)), F32)
    prepared = prepare(params, batches[0])
    qparams = prepared.convert(params)
    names = {"jaxquant.ptq.tune": ptq.tune, "jaxquant.ptq.correct_bias": ptq.correct_bias}
    cases = [
        (
            {"first": qparams.params["first"]},
            "the arrays of the parameters that prepare saw, got without second, third",
        ),
        ({**qparams.params, "fourth": jnp.ones(2)}, "the arrays of the parameters that prepare saw, got with fourth"),
        (
            {**qparams.params, "second": qparams.params["first"]},
            r"the shape \(8, 6\) at second, as in prepare, got \(8, 8\)",
        ),
    ]
    for name, function in {**names, "jaxquant.report.compare": jq.report.compare}.items():
        for wrong, text in cases:
            with pytest.raises(ValueError, match=rf"^{re.escape(name)}: q.params: expected {text}"):
                function(prepared, params, qparams.replace(params=wrong), batches)


@pytest.mark.slow
def test_too_little_data_and_dead_channels_are_noted(rng: np.random.Generator) -> None:
    """Of each layer on its own: the first has a dead channel, the third all, and both too few samples."""
    params, batches = sample(rng, 5)
    x, y = batches[0]
    prepared = prepare(params, batches[0])
    qparams, notes = ptq.apply(prepared, params, [(x.at[:, 1].set(0), 0 * y)], ptq.GPTQ(range="whole"))
    singular = "5 samples for 8 inputs: the second moments are singular, and damped"
    assert notes["first"].reason == f"1 inputs are always 0; {singular}"
    assert notes["third"].reason == f"8 inputs are always 0; {singular}"
    # Without data the weight is rounded to nearest.
    assert (
        np.asarray(qparams.params["third"].codes) == np.asarray(prepared.convert(params).params["third"].codes)
    ).all()
    assert np.isfinite(np.asarray(prepared.apply(qparams, x, y))).all()


def test_errors_of_a_sample_that_is_matched_are_not_negative(fixed_rng: np.random.Generator) -> None:
    """The errors of several inputs cancel each other but for rounding."""
    for _ in range(4):
        params, batches = sample(fixed_rng, 1)
        notes = ptq.apply(prepare(params, batches[0]), params, batches, ptq.GPTQ(sweeps=1, refits=1)).notes
        errors = [note.after for note in notes if note.after is not None]
        assert len(errors) == len(notes)
        assert min(errors) >= 0


@pytest.mark.slow
def test_a_budget_that_no_plan_meets(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    # The first weight takes the most bytes: as many codes as the second one, and more scales.
    params |= {
        "first": jnp.asarray(rng.normal(size=(8, 24)), F32),
        "second": jnp.asarray(rng.normal(size=(24, 8)), F32),
    }
    prepared = prepare(params, batches[0])
    name = r"^jaxquant\.ptq\.allocate_bits: "
    with pytest.raises(ValueError, match=name + r"budget: expected at least \d+, .*\(most of it first: \d+\), got 10"):
        ptq.allocate_bits(prepared, params, batches, budget=10)
    with pytest.raises(ValueError, match=name + r"most_damage: expected at least \S+, .*\(most of it \w+: \S+\), got"):
        ptq.allocate_bits(prepared, params, batches, most_damage=1e-9, dtypes=("int2", "int4"))
