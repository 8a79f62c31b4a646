"""Batches with different static arguments: each has its own program, or an error says which contractions differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32
RULES = [jq.Rule(weight=jq.Weight("int4"))]


def network(params: Any, x: jax.Array, power: int, has_head: bool = True) -> jax.Array:
    """Compute a power that is an int, and so static, of the activations, and contract it if a flag says so."""
    h = jax.nn.relu(x @ params["first"] + params["offset"]) ** power
    return h @ params["head"] + params["bias"] if has_head else h


def sample(rng: np.random.Generator) -> tuple[dict[str, jax.Array], list[Any]]:
    shapes = {"first": (8, 12), "offset": (1, 12), "head": (12, 4), "bias": (1, 4)}
    params = {name: jnp.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}
    return params, [(jnp.asarray(rng.normal(size=(24, 8)) + 1, F32), power) for power in (1, 2)]


@pytest.mark.slow
def test_each_batch_has_its_own_program(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, *batches[0], rules=RULES)
    qparams = prepared.convert(params)
    results = [network(params, *batch) for batch in batches]
    totals = [sum(float(jnp.sum(y**2)) for y in results)]
    # Statistics.
    hidden = [jax.nn.relu(x @ params["first"] + params["offset"]) ** power for x, power in batches]
    stats = ptq.collect(prepared, params, batches, progress=False)
    np.testing.assert_allclose(stats["head"].mean[0], jnp.concatenate(hidden).mean(0), rtol=1e-5)
    # Biases: the means over both batches are right.
    corrected, _ = ptq.correct_bias(prepared, params, qparams, batches)
    actual = [prepared.apply(corrected, *batch) for batch in batches]
    size = float(jnp.abs(jnp.concatenate(results)).max())
    np.testing.assert_allclose(jnp.concatenate(actual).mean(0) - jnp.concatenate(results).mean(0), 0, atol=1e-4 * size)
    # The damage of a weight.
    plan = ptq.allocate_bits(prepared, params, batches, budget=10**6, dtypes=("int4",))
    q = ptq.Nearest("searched").quantize(params["head"], None, jq.QuantSpec("int4", jq.PerAxis(1)), -1)
    changed = [network({**params, "head": q.dequantize()}, *batch) for batch in batches]
    damage = sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(changed, results, strict=True)) / totals[0]
    np.testing.assert_allclose(plan.table["head"]["int4"][1], damage, rtol=1e-3)
    # The error of the result.
    report = jq.report.compare(prepared, params, qparams, batches)
    coded = [prepared.apply(qparams, *batch) for batch in batches]
    noise = sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(coded, results, strict=True))
    np.testing.assert_allclose(report.result_sqnr, 10 * np.log10(totals[0] / noise), atol=0.02)
    # The error that is minimized: the mean of both batches.
    notes: Any = ptq.tune(prepared, params, qparams, batches, rounds=1, progress=False).notes
    parts = [float(jnp.sum((x - y) ** 2) / jnp.sum(y**2)) for x, y in zip(coded, results, strict=True)]
    np.testing.assert_allclose(notes["head"].before, np.mean(parts), rtol=1e-3)


@pytest.mark.slow
def test_static_ranges(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, *batches[0], rules=jq.recipes.w8a8_static())
    ranges = prepared.calibrate(params, batches, progress=False)
    most = max(float((jax.nn.relu(x @ params["first"] + params["offset"]) ** power).max()) for x, power in batches)
    np.testing.assert_allclose(ranges["head"]["0"][1].squeeze(), most, rtol=1e-5)


@pytest.mark.slow
def test_programs_with_other_contractions(rng: np.random.Generator) -> None:
    params, ((x, _), _) = sample(rng)
    prepared = jq.prepare(network, params, x, 1, rules=RULES)
    qparams = prepared.convert(params)
    long, short = (x, 1), (x, 1, False)
    part = jq.prepare(network, params, *short, rules=RULES)
    cases: list[Any] = [
        (lambda: ptq.collect(prepared, params, [short, long]), r"ptq\.collect: batches: .* first one, got also head"),
        (lambda: ptq.correct_bias(prepared, params, qparams, [long, short]), r"ptq\.correct_bias: data: .* at head"),
        (lambda: ptq.correct_bias(prepared, params, qparams, [short, long]), r"ptq\.correct_bias: data: .* at head"),
        (lambda: ptq.apply(prepared, params, [long, short], ptq.GPTQ()), r"ptq\.apply: data: .* static arguments"),
        (
            lambda: ptq.allocate_bits(prepared, params, [short], budget=10**6),
            r"ptq\.allocate_bits: batches: .* none for head",
        ),
        (
            lambda: jq.report.compare(part, params, part.convert(params), [long]),
            r"report\.compare: args: expected arguments at which head is quantized",
        ),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=rf"^jaxquant\.{text}"):
            call()
    # The first batch does not reach the head, whose row has the errors of the second one.
    report = jq.report.compare(prepared, params, qparams, [short, long])
    assert [row.output_sqnr is not None for row in report] == [True, True]
    plan = ptq.allocate_bits(prepared, params, [short, long], budget=10**6, dtypes=("int8",))
    converted = jq.prepare(network, params, *long, rules=plan.rules).convert(params).params
    assert {str(converted[name].codes.dtype) for name in ("first", "head")} == {"int8"}
    _, notes = ptq.correct_bias(prepared, params, qparams, [short])
    assert notes["head"].reason == "the batches do not reach its contraction"


def test_constants_of_programs(rng: np.random.Generator) -> None:
    """Two programs may have the same text and other constants."""
    params, ((x, _), _) = sample(rng)
    tables = [jnp.asarray(rng.normal(size=(24, 8)), F32) for _ in range(2)]

    def apply(params: Any, x: jax.Array, task: int) -> jax.Array:
        return (x + tables[task]) @ params["first"]

    prepared = jq.prepare(apply, params, x, 0, rules=RULES)
    expected = r"^jaxquant\.ptq\.apply: data: expected batches of one shape, dtype and static arguments, .* 2 kinds"
    with pytest.raises(ValueError, match=expected):
        ptq.apply(prepared, params, [(x, 0), (x, 1)], ptq.Nearest())


def test_equal_values_of_other_types(rng: np.random.Generator) -> None:
    """True equals 1, and is another argument."""
    params, ((x, _), _) = sample(rng)

    def apply(params: Any, x: jax.Array, mode: Any) -> jax.Array:
        return (x if mode is True else 2 * x) @ params["first"]

    prepared = jq.prepare(apply, params, x, True, rules=jq.recipes.w8a8_static())
    ranges = prepared.calibrate(params, [(x, True), (x, 1)], progress=False)
    np.testing.assert_allclose(ranges["first"]["0"][1].squeeze(), 2 * x.max(), rtol=1e-6)


def test_results_without_numbers(rng: np.random.Generator) -> None:
    params, batches = sample(rng)
    prepared = jq.prepare(network, params, *batches[0], rules=RULES)
    spoiled = [batches[0], (batches[1][0].at[1, 2].set(np.nan), 1)]
    with pytest.raises(
        ValueError, match=r"allocate_bits: batches: .* NaN or an infinity in the results of batches\[1\]"
    ):
        ptq.allocate_bits(prepared, params, spoiled, budget=10**6)
    with pytest.raises(ValueError, match=r"compare: batches: .* numbers, got a NaN in the results of batches\[1\]"):
        jq.report.compare(prepared, params, prepared.convert(params), spoiled)
