"""Pictures of what the passes of `jaxquant.ptq` did: before and after each algorithm, and plans of bits."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core import checks
from ..ptq import BitPlan, Note, Notes
from ..ptq.allocate import solve_plan
from ._report import import_plot

_POINTS = 40


def plot_notes(notes: Notes | Mapping[str, Notes], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the measure of a pass for each weight, before and after it, on a logarithmic scale.

    A measure of 0, such as that of `correct_bias` with statistics, is at 0, where the scale is linear. What is NaN or
    infinite is not drawn, but named below the axis.

    Args:
        notes: the notes of a pass, or those of several by a name for each: for example of `ptq.apply` with several
            algorithms, whose measure is the error of the outputs.
        path: a file to write the figure to, or None.

    Returns:
        A figure of matplotlib.

    Raises:
        TypeError: notes has a wrong type.
        ValueError: no note has a finite measure before and after.
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> import jaxquant as jq
        >>> from jaxquant import ptq
        >>> notes = ptq.Notes((ptq.Note("kernel", "GPTQ", "", 0.5, 0.1),), "the mean squared error of the outputs")
        >>> figure = jq.report.plot_notes({"GPTQ": notes})
        >>> figure.axes[0].get_xlabel()
        'the mean squared error of the outputs'

    Source: Cleveland and McGill, Journal of the American Statistical Association 79 (1984), for dots on a line.
    """
    name = "report.plot_notes"
    groups = {"the pass": notes} if isinstance(notes, Notes) else notes
    is_notes = isinstance(groups, Mapping) and all(isinstance(rows, Notes) for rows in groups.values())
    checks.require_type(is_notes, name, "notes", "a ptq.Notes, or a dict of them", checks.describe_value(notes))
    has_measure = any(is_measured(note) for rows in groups.values() for note in rows)
    checks.require(has_measure, name, "notes", "a row with a measure before and after, both finite", "none")
    return _write(import_plot().draw_notes(dict(groups)), path)


def is_measured(note: Note) -> bool:
    """Return whether a note has finite measures before and after the algorithm."""
    return all(value is not None and math.isfinite(value) for value in (note.before, note.after))


def plot_plan(plan: BitPlan, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the damage of the best plans against their bytes, and the chosen one.

    Args:
        plan: a plan of `ptq.allocate_bits`.
        path: a file to write the figure to, or None.

    Returns:
        A figure of matplotlib.

    Raises:
        TypeError: plan has a wrong type.
        ModuleNotFoundError: matplotlib or scipy is not installed.

    Example:
        >>> import jaxquant as jq
        >>> from jaxquant import ptq
        >>> table = {"kernel": {"int2": (50, 0.3), "int4": (100, 0.02), "int8": (200, 0.0001)}}  # as allocate_bits does
        >>> figure = jq.report.plot_plan(ptq.BitPlan({"kernel": "int4"}, 100, 0.02, table, ()))
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['the best plans', 'one dtype for all', 'the chosen plan']

    Source: Hubara et al., arXiv 2006.10518, section 3.4, for the plans.
    """
    is_plan = isinstance(plan, BitPlan)
    checks.require_type(is_plan, "report.plot_plan", "plan", "a ptq.BitPlan", type(plan).__name__)
    figure = import_plot().draw_plan(find_front(plan), _list_uniform(plan), (plan.nbytes, plan.damage))
    return _write(figure, path)


def find_front(plan: BitPlan) -> list[tuple[int, float]]:
    """Return the bytes and the damage of the best plans for some budgets from the least to the most bytes."""
    names = list(next(iter(plan.table.values())))
    sizes, damages = (
        np.array([[row[name][k] for name in names] for row in plan.table.values()], float) for k in (0, 1)
    )
    # The axis of the bytes is logarithmic.
    budgets = np.geomspace(sizes.min(1).sum(), sizes.max(1).sum(), _POINTS)
    budgets[[0, -1]] = sizes.min(1).sum(), sizes.max(1).sum()  # not rounded, or no plan may meet them
    rows = np.arange(len(sizes))
    choices = dict.fromkeys(solve_plan(sizes, damages, float(budget), None) for budget in budgets)
    points = {(int(sizes[rows, choice].sum()), float(damages[rows, choice].sum())) for choice in map(list, choices)}
    return sorted(points)


def _list_uniform(plan: BitPlan) -> dict[str, tuple[int, float]]:
    """Return the bytes and the damage of the plans with one dtype for all weights."""
    names = list(next(iter(plan.table.values())))
    totals = {name: [row[name] for row in plan.table.values()] for name in names}
    return {name: (sum(n for n, _ in row), sum(damage for _, damage in row)) for name, row in totals.items()}


def _write(figure: Any, path: Any) -> Any:
    if path is not None:
        figure.savefig(path)
    return figure
