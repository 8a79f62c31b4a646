"""Pictures of the passes of jaxquant.ptq."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq
from jaxquant.report.pictures import list_front

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
    front = list_front(plan)
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


def test_zeros_are_drawn_and_what_is_not_finite_is_named() -> None:
    rows = [("a", 0.5, 0.0), ("b", 0.0, 0.0), ("c", 3e-5, 1e-6), ("d", 1.0, float("nan"))]
    notes = ptq.Notes(tuple(ptq.Note(path, "corrected", "", *values) for path, *values in rows), "the mean error")
    axes = jq.report.plot_notes({"statistics": notes}).axes[0]
    drawn = [float(x) for line in axes.get_lines() if line.get_marker() == "o" for x in line.get_xdata()]
    assert sorted(drawn) == [0.0, 0.0, 0.0, 1e-6, 3e-5, 0.5]
    # Zeros have a place, and the least positive measure is right of it.
    places = axes.transData.transform([(x, 0.0) for x in (0.0, 1e-6, 3e-5, 0.5)])[:, 0]
    assert np.isfinite(places).all()
    assert (np.diff(places) > 10).all()
    assert axes.get_xlabel() == "the mean error\nnot finite, and not drawn: d (statistics: 1, nan)"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    # Nothing but zeros.
    zeros = ptq.Notes((ptq.Note("a", "corrected", "", 0.0, 0.0),))
    jq.report.plot_notes(zeros).draw_without_rendering()


def test_a_plan_without_damage_is_drawn(rng: np.random.Generator) -> None:
    plan = make_plan(rng)
    exact = dataclasses.replace(plan, choices=dict.fromkeys("abc", "float"), nbytes=4800, damage=0.0)
    axes = jq.report.plot_plan(exact).axes[0]
    best, *uniform, star = (line for line in axes.get_lines() if len(line.get_xdata()))
    assert (4800, 0.0) in list(zip(best.get_xdata(), best.get_ydata(), strict=True))
    assert [text.get_text() for text in axes.texts] == list(DTYPES)
    assert len(uniform) == len(DTYPES)
    assert np.isfinite(axes.transData.transform([(4800, 0.0)])).all()
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (4800, 0.0)


def test_ratios_beyond_the_axis_are_named() -> None:
    values = [40.0, float("inf"), -3.0, float("nan"), 0.0]
    rows = tuple(
        jq.report.SiteRow(f"row{index}", "dot_general", "integer", "", value, None, value, 0.0, 0.0, 0.0, 1, 1)
        for index, value in enumerate(values)
    )
    axes = jq.report.Report(rows, 1.0, {}).plot().axes[0]
    assert [text.get_text() for text in axes.texts] == 2 * ["no error", "-3.0", "nan"]


def test_errors() -> None:
    cases: list[Any] = [
        (lambda: jq.report.plot_notes(ptq.Notes(())), "plot_notes: notes: expected a row with a measure before and"),
        (
            lambda: jq.report.plot_notes(ptq.Notes((ptq.Note("a", "", "", float("inf"), 1.0),))),
            "plot_notes: notes: expected a row with a measure before and after, both finite, got none",
        ),
        (lambda: jq.report.plot_notes([1]), "plot_notes: notes: expected a ptq.Notes, or a dict of them"),  # type: ignore[arg-type]
        (lambda: jq.report.plot_plan(3), "plot_plan: plan: expected a ptq.BitPlan, got int"),  # type: ignore[arg-type]
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.report\.{text}"):
            call()
