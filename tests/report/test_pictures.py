"""Pictures of the passes of jaxquant.ptq."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.report._pictures import find_front

pytest.importorskip("matplotlib")
DTYPES = ("int2", "int4", "int8", "float")
SIZES = (100, 200, 400, 1600)


def make_plan(rng: np.random.Generator) -> ptq.BitPlan:
    table: Any = {
        name: dict(
            zip(DTYPES, zip(SIZES, [*np.sort(rng.uniform(1e-6, 1, 3))[::-1].tolist(), 0.0], strict=True), strict=True)
        )
        for name in "abc"
    }
    choices = dict(zip("abc", ("int2", "int4", "int8"), strict=True))
    chosen = [table[name][dtype] for name, dtype in choices.items()]
    return ptq.BitPlan(choices, sum(n for n, _ in chosen), sum(damage for _, damage in chosen), table, ())


def test_plan(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("scipy")
    plan = make_plan(rng)
    front = find_front(plan)
    sizes, damages = np.array(front).T
    assert (np.diff(sizes) > 0).all()
    assert (np.diff(damages) <= 0).all()
    assert front[0][0] == 300
    assert front[-1] == (4800, 0.0)
    figure = jq.report.plot_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["the best plans", "one dtype for all", "the chosen plan"]


def test_notes(tmp_path: pathlib.Path) -> None:
    rows = (ptq.Note("first", "GPTQ", "", 0.5, 0.1), ptq.Note("table", "Nearest for GPTQ", "a lookup has no inputs"))
    notes = ptq.Notes(rows, "the mean squared error of the outputs")
    figure = jq.report.plot_notes({"GPTQ": notes, "AdaRound": notes}, tmp_path / "notes.png")
    assert (tmp_path / "notes.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["first"]
    assert axes.get_xlabel() == notes.measure
    jq.report.plot_notes(notes)
    # More algorithms than there are colors.
    legend = jq.report.plot_notes({str(index): notes for index in range(8)}).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [*(f"after {index}" for index in range(8)), "before"]


def test_errors() -> None:
    cases: list[Any] = [
        (lambda: jq.report.plot_notes(ptq.Notes(())), "plot_notes: notes: expected a row with a measure before and"),
        (lambda: jq.report.plot_notes([1]), "plot_notes: notes: expected a ptq.Notes, or a dict of them"),  # type: ignore[arg-type]
        (lambda: jq.report.plot_plan(3), "plot_plan: plan: expected a ptq.BitPlan, got int"),  # type: ignore[arg-type]
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.report\.{text}"):
            call()
