"""Bit allocation against all plans, and the rules that it returns."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.ptq.bit_plan import solve_plan

pytest.importorskip("scipy")
F32 = np.float32


def test_solver_against_all_plans(rng: np.random.Generator) -> None:
    """Of 6 weights with 4 candidates: the best of all 4096 plans, for budgets and for damages."""
    plans = np.array(list(itertools.product(range(4), repeat=6)))
    for _ in range(5):
        sizes = np.sort(rng.integers(10, 5000, (6, 4)), 1).astype(float)
        damages = -np.sort(-np.exp(rng.normal(-6, 4, (6, 4))), 1)
        totals = [table[np.arange(6), plans].sum(1) for table in (sizes, damages)]
        for share in (0.1, 0.5, 0.9):
            limits = [float(table.min() + share * (table.max() - table.min())) for table in totals]
            choice = np.array(solve_plan(sizes, damages, limits[0], None))
            size, damage = (table[np.arange(6), choice].sum() for table in (sizes, damages))
            assert size <= limits[0]
            np.testing.assert_allclose(damage, totals[1][totals[0] <= limits[0]].min(), rtol=1e-5)
            limit = float(np.quantile(totals[1], share))
            choice = np.array(solve_plan(sizes, damages, None, limit))
            size, damage = (table[np.arange(6), choice].sum() for table in (sizes, damages))
            assert damage <= limit * (1 + 1e-6)
            assert size <= totals[0][totals[1] <= limit].min() * (1 + 1e-9)


def apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["first"]) @ params["second"]


def sample(rng: np.random.Generator) -> tuple[Any, jax.Array]:
    params = {
        "first": jnp.asarray(rng.normal(size=(16, 24)), F32),
        "second": jnp.asarray(rng.normal(size=(24, 8)), F32),
    }
    return params, jnp.asarray(rng.normal(size=(32, 16)), F32)


@pytest.mark.slow
def test_plans_of_a_function(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    prepared = jq.prepare(apply, params, x, rules=jq.recipes.w8a8_dynamic())
    plan = ptq.allocate_bits(prepared, params, [x[:16], x[16:]], budget=500, dtypes=("int2", "int4", "int8", "float"))
    assert plan.nbytes <= 500
    # A measured damage: one weight rounded, all others in floats.
    q = jq.quantize(params["first"], jq.QuantSpec("int4", jq.PerAxis(1)), range=ptq.search_range(
        params["first"], jq.QuantSpec("int4", jq.PerAxis(1))))  # fmt: skip
    y, expected = apply({**params, "first": q.dequantize()}, x), apply(params, x)
    np.testing.assert_allclose(
        plan.table["first"]["int4"][1], jnp.sum((y - expected) ** 2) / jnp.sum(expected**2), rtol=1e-3
    )
    assert plan.table["first"]["int4"][0] == q.nbytes
    assert plan.table["second"]["float"] == (24 * 8 * 4, 0.0)
    again = jq.prepare(apply, params, x, rules=plan.rules)
    converted = again.convert(params).params
    for name, dtype in plan.choices.items():
        actual = converted[name]
        assert (str(actual.codes.dtype) if isinstance(actual, jq.QuantizedArray) else "float") == dtype
    floats = ptq.allocate_bits(prepared, params, [x], most_damage=0.0)
    assert set(floats.choices.values()) == {"float"}
    assert "bytes, damage" in str(plan)


@pytest.mark.slow
def test_rules_that_look_at_contractions(rng: np.random.Generator) -> None:
    """A function of a rule gets the same view of a contraction as in `prepare`, dtypes included."""
    params, x = sample(rng)
    rules = [jq.Rule(where=lambda site: site.dtypes == ("float32", "float32"), weight=jq.Weight("int8"))]
    prepared = jq.prepare(apply, params, x, rules=rules)
    plan = ptq.allocate_bits(prepared, params, [x], budget=10**6, dtypes=("int4",))
    again = jq.prepare(apply, params, x, rules=plan.rules)
    assert {row.name: str(row.weight and row.weight.dtype) for row in again.coverage} == plan.choices


@pytest.mark.slow
def test_errors(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    prepared = jq.prepare(apply, params, x, rules=jq.recipes.weight_only_int8())
    name = r"jaxquant\.ptq\.allocate_bits: "
    with pytest.raises(
        ValueError, match=name + "budget: expected at least 272, what the candidates with the least tak"
    ):
        ptq.allocate_bits(prepared, params, [x], budget=100)
    with pytest.raises(ValueError, match=name + "budget: expected either budget or most_damage, got none"):
        ptq.allocate_bits(prepared, params, [x])
    with pytest.raises(TypeError, match=name + "prepared: expected a Prepared, got int"):
        ptq.allocate_bits(3, params, [x], budget=1)  # type: ignore[arg-type]
    classify = jq.prepare(lambda p, x: apply(p, x).argmax(-1), params, x, rules=jq.recipes.weight_only_int8())
    with pytest.raises(ValueError, match=name + "prepared: expected a function that returns floats, got none"):
        ptq.allocate_bits(classify, params, [x], budget=10**6)
    allocate: Any = ptq.allocate_bits
    cases: list[tuple[Any, str]] = [
        (lambda: allocate(prepared, params, [x], budget="1k"), "budget: expected a static Python number, got '1k'"),
        (lambda: allocate(prepared, params, [x], most_damage=np.nan), "most_damage: expected a finite number"),
        (
            lambda: allocate(prepared, params, [x], budget=500, dtypes="int4"),
            "dtypes: expected several dtypes, such as",
        ),
        (lambda: allocate(prepared, params, [], budget=500), "batches: expected at least one batch, got none"),
        (lambda: allocate(prepared, params, [x[:0]], budget=500), "batches: expected batches with results, got"),
        (
            lambda: allocate(jq.prepare(apply, params, x, rules=[]), params, [x], budget=500),
            "prepared: expected a function with weights that its rules quantize, got none",
        ),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=f"^{name}{text}"):
            call()
