"""The page "Which recipe?": its recipes and functions exist, and products become what its table says."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

import jaxquant as jq
from benchmarks.figures import DOCS
from jaxquant import checkpoint
from jaxquant import onnx as jqonnx

PAGE = (DOCS / "which-recipe.md").read_text()


def list_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its first two lines."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


PLACES, DTYPES = list_rows("By hardware and runtime"), list_rows("By dtype")


def make_rules(call: str) -> tuple[jq.Rule, ...]:
    """Return the rules of a cell such as `w8a8_static()`."""
    return eval(call.strip("`"), {name: getattr(jq.recipes, name) for name in jq.recipes.__all__})


def test_every_recipe_of_the_first_table_is_in_the_second() -> None:
    """Arguments that change no operator, such as reduce_range, may be missing there."""
    calls = {call for row in PLACES for call in re.findall(r"`(\w+\([^`]*\))`", row[2])}
    assert len(calls) > 8
    for call in calls:
        assert make_rules(call)
        plain = re.sub(r"reduce_range=\w+", "", call)
        assert any(row[0] == f"`{plain}`" for row in DTYPES), call


def test_every_recipe_has_a_row() -> None:
    assert {re.findall(r"\w+", row[0])[0] for row in DTYPES} == set(jq.recipes.__all__)


def test_what_is_shipped_exists() -> None:
    named = {name for row in PLACES for name in re.findall(r"`((?:jq|checkpoint)[.\w]+)`", row[3])}
    assert named == {"jq.onnx.export", "checkpoint.save"}
    for name in named:
        first, *rest = name.split(".")
        assert callable(functools.reduce(getattr, rest, {"jq": jq, "checkpoint": checkpoint}[first]))


def test_the_status_is_one_of_the_words_that_the_page_explains() -> None:
    known = r"tested|lowered|not tried|\[measured once\]|the four quantization operators are|the files are"
    for row in PLACES:
        assert len(row) == 5, row
        assert re.match(known, row[4]), row


LOWERED = [(row[0], call) for row in PLACES if row[4] == "lowered" for call in re.findall(r"`([^`]+)`", row[2])]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("place", "call"), LOWERED)
def test_programs_are_lowered_for_the_hardware(place: str, call: str) -> None:
    platform = {"JAX on a GPU": "cuda", "JAX on a TPU": "tpu"}[place]
    params, x = {"weight": np.ones((64, 16), np.float32)}, np.ones((4, 64), np.float32)
    prepared = jq.prepare(lambda params, x: x @ params["weight"], params, x, rules=make_rules(call), strict=True)
    q = prepared.convert(params)
    text = jax.jit(prepared.apply).trace(q, x).lower(lowering_platforms=(platform,)).as_text()
    assert re.search("xi4>|xi8>|xf8E4M3FN>", text)


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row[0].strip("`"))
def test_products_become_what_the_table_says(row: list[str], rng: np.random.Generator) -> None:
    call, form, operator, equal = row
    params = {"weight": rng.normal(size=(256, 16)).astype(np.float32) / 16}
    x = rng.normal(size=(4, 256)).astype(np.float32)
    prepared = jq.prepare(lambda params, x: x @ params["weight"], params, x, rules=make_rules(call), strict=True)
    assert [site.form for site in prepared.coverage.rows] == [form]
    q = prepared.convert(params, prepared.calibrate(params, [x]))

    def apply(x: jax.Array) -> jax.Array:
        return prepared.apply(q, x)

    model = jqonnx.export(apply, [x])
    contractions = {"MatMul", "MatMulInteger", "MatMulNBits", "QLinearMatMul", "QGemm", "Gemm", "DynamicQuantizeMatMul"}
    assert [node.op_type for node in model.graph.node if node.op_type in contractions] == [operator]
    report = jqonnx.verify(model, apply, [x])
    if equal == "codes":
        assert report.is_exact
    else:
        assert equal == "rounding"
        results = [result for result in report.rows if result.kind == "output"]
        assert results
        assert all(result.largest < 1e-5 for result in results)
        assert all(result.differing == 0 for result in report.rows if result.kind == "codes")
