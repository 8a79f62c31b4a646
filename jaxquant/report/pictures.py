"""Pictures of a report, of the notes of passes of `jaxquant.ptq`, and of plans of bits."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import checks
from ..ptq.bit_plan import BitPlan, solve_plan
from ..ptq.notes import Note, Notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 40
# Of Okabe and Ito's palette, which color-blind readers can tell apart.
_COLORS = {"weight": "#0072B2", "activation": "#E69F00", "output": "#009E73"}
_RANGE_COLOR, _GRAY = "#D55E00", "#999999"
_MOST_HISTOGRAMS, _COLUMNS = 24, 4
_TOP = 120.0  # decibels: no float32 has more, and an exact result has infinitely many


def plot_notes(notes: Notes | Mapping[str, Notes], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the measure of a pass for each weight, before and after it, on a logarithmic scale.

    A measure of 0, such as after `correct_bias` with statistics, is at 0, where the scale is linear. What is NaN or
    infinite is not drawn, but named below the axis.

    Args:
        notes: the notes of a pass, or a dict of the notes of several by name: for example of `ptq.apply` with several
            algorithms, which measure the error of the outputs.
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
    return _write(_draw_notes(dict(groups)), path)


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
    check_matplotlib()
    figure = _draw_plan(list_front(plan), _list_uniform(plan), (plan.nbytes, plan.damage))
    return _write(figure, path)


def list_front(plan: BitPlan) -> list[tuple[int, float]]:
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


def _write(figure: Figure, path: str | os.PathLike[str] | None) -> Any:
    if path is not None:
        figure.savefig(path)
    return figure


def check_matplotlib() -> None:
    """Raise an error that says how to install matplotlib, unless it is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        text = 'jaxquant.report: expected the package matplotlib: pip install "jaxquant[report]", got none installed'
        raise ModuleNotFoundError(text, name="matplotlib")


def _make_figure(**options: Any) -> Any:
    """Return an empty figure of matplotlib, which is optional, and slow to import."""
    check_matplotlib()
    from matplotlib.figure import Figure

    # A figure of its own: one of pyplot would stay in memory, and might need a display.
    return Figure(**options)


def draw_report(rows: Sequence[Any], weights: Mapping[str, Any], activations: Mapping[str, Any]) -> Any:
    """Return a figure: bars for the errors of each contraction, and histograms of weights and activations.

    Args:
        rows: the `SiteRow`s of a report.
        weights: the `Histogram`s of weights, by name.
        activations: the same of activations.
    """
    rows = [row for row in rows if row.form != "float"]
    groups = [
        ("weights, on a logarithmic scale; dashed: the range of their codes", "weight", weights),
        (
            "activations, on a logarithmic scale; dashed: the range of their codes, if it is static; "
            "the tail beyond it is saturated",
            "activation", activations,
        ),
    ]  # fmt: skip
    shown = [(text, kind, list(items.items())[:_MOST_HISTOGRAMS]) for text, kind, items in groups if items]
    bars = 1.2 + 0.45 * max(len(rows), 1)
    heights = [bars, *(0.3 + 2.1 * math.ceil(len(items) / _COLUMNS) for _, _, items in shown)]
    figure = _make_figure(figsize=(11, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    _draw_bars(parts[0, 0].subplots(), rows)
    for (text, kind, items), part in zip(shown, parts[1:, 0], strict=True):
        total = {"weight": len(weights), "activation": len(activations)}[kind]
        part.suptitle(f"{text}; the first {len(items)} of {total}" if total > len(items) else text, fontsize=8)
        lines = math.ceil(len(items) / _COLUMNS)
        _draw_histograms(part.subplots(lines, _COLUMNS, squeeze=False).ravel(), items, _COLORS[kind])
    return figure


def draw_errors(errors: Mapping[str, float]) -> Any:
    """Return a figure with a bar for each ratio of signal to error in decibels, by name, the first at the top."""
    figure = _make_figure(figsize=(11, 1 + 0.22 * max(len(errors), 1)), layout="constrained")
    axes = figure.subplots()
    _draw_ratios(axes, list(errors.values()), 0.0, height=0.7, color=_COLORS["output"])
    _label_bars(axes, list(errors))
    return figure


def _draw_bars(axes: Axes, rows: list[Any]) -> None:
    """Draw the ratios of weights, activations and outputs, the first contraction at the top."""
    for offset, (name, color) in zip((-0.27, 0.0, 0.27), _COLORS.items(), strict=True):
        values = [getattr(row, f"{name}_sqnr") for row in rows]
        if any(value is not None for value in values):
            _draw_ratios(axes, values, offset, height=0.25, color=color, label=name)
    _label_bars(axes, [row.name for row in rows])
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)


def _draw_ratios(
    axes: Axes, values: Sequence[float | None], offset: float, height: float, color: str, label: str | None = None
) -> None:
    """Draw a bar for each ratio but None, at its place in the sequence and a little below."""
    places = [place + offset for place, value in enumerate(values) if value is not None]
    ratios = [value for value in values if value is not None]
    # A NaN has no bar, and neither has an error that is as large as the signal.
    sizes = [0.0 if math.isnan(value) else min(max(value, 0.0), _TOP) for value in ratios]
    axes.barh(places, sizes, height, color=color, label=label)
    for place, size, value in zip(places, sizes, ratios, strict=True):
        if size != value:
            text = "no error" if value == math.inf else f"{value:.1f}"
            axes.annotate(text, (size, place), textcoords="offset points", xytext=(3, -2.5), fontsize=6)


def _label_bars(axes: Axes, names: Sequence[str]) -> None:
    """Label the bars and the axis of ratios, with the first bar at the top."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_xlabel("signal over error, dB (more is better; 6 dB are one bit)")
    axes.grid(axis="x", color=_GRAY, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_histograms(grid: Sequence[Axes], items: list[Any], color: str) -> None:
    """Draw distributions on a logarithmic scale, with the ends of the range of the codes and what is beyond it."""
    names = _shorten_names([name for name, _ in items])
    for axes, name, (_, histogram) in zip(grid, names, items, strict=False):
        axes.stairs(histogram.counts, histogram.edges, fill=True, color=color)
        ends = (histogram.low, histogram.high)
        for end, sign in zip(ends, (-1, 1), strict=True):
            if end is None:
                continue
            axes.axvline(end, color=_RANGE_COLOR, linewidth=1, linestyle="--")
            limits = (histogram.edges[0], histogram.edges[-1])
            if sign * (limits[(sign + 1) // 2] - end) > 0:
                axes.axvspan(*sorted((end, limits[(sign + 1) // 2])), color=_RANGE_COLOR, alpha=0.15, linewidth=0)
        # A logarithmic scale has no place for bins without elements.
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(name, fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in grid[len(items) :]:
        axes.set_visible(False)


def _shorten_names(names: list[str]) -> list[str]:
    """Return names without the parts that all of them begin or end with, and without the middle of what is long."""
    separators = re.compile(r"[./]")
    starts = [name[: match.end()] for name in names[:1] for match in separators.finditer(name)]
    start = max((part for part in starts if all(name.startswith(part) for name in names)), key=len, default="")
    names = [name[len(start) :] for name in names]
    ends = [name[match.start() :] for name in names[:1] for match in separators.finditer(name)]
    end = max((part for part in ends if all(name.endswith(part) for name in names)), key=len, default="")
    names = [name[: len(name) - len(end)] for name in names] if len(names) > 1 else names
    return [name if len(name) < 38 else f"{name[:17]}...{name[-17:]}" for name in names]


def _draw_plan(front: list[tuple[int, float]], uniform: dict[str, tuple[int, float]], chosen: tuple[int, float]) -> Any:
    """Return a figure of damage against bytes: the best plans, the plans with one dtype, and the chosen plan."""
    figure = _make_figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(*zip(*front, strict=True), color=_COLORS["weight"], marker=".", drawstyle="steps-post",
              label="the best plans")  # fmt: skip
    for index, (name, (size, damage)) in enumerate(uniform.items()):
        label = "one dtype for all" if not index else None
        axes.plot(size, damage, color=_COLORS["activation"], marker="s", linestyle="none", label=label, clip_on=False)
        axes.annotate(name, (size, damage), textcoords="offset points", xytext=(7, 4), fontsize=9)
    axes.plot(*chosen, color=_RANGE_COLOR, marker="*", markersize=16, linestyle="none", label="the chosen plan",
              clip_on=False)  # fmt: skip
    axes.set_xscale("log")
    # A plan in floats has no damage.
    _set_scale(axes, "y", [damage for _, damage in (*front, *uniform.values(), chosen)])
    axes.set_xlabel("bytes of all weights")
    axes.set_ylabel("damage: squared error of the results,\nrelative to their squares")
    _label_axes(axes)
    return figure


def _draw_notes(notes: dict[str, Any]) -> Any:
    """Return a figure: for each weight the measure before and after each algorithm, joined by a line."""
    measured = {name: [note for note in rows if is_measured(note)] for name, rows in notes.items()}
    paths = list(dict.fromkeys(note.path for rows in measured.values() for note in rows))
    figure = _make_figure(figsize=(8, 1.4 + 0.22 * len(paths) * max(len(notes), 1)), layout="constrained")
    axes: Any = figure.subplots()
    styles = itertools.cycle(zip((*_COLORS.values(), "#CC79A7", "#56B4E9", _RANGE_COLOR), "os^Dv>", strict=True))
    # There may be more algorithms than colors.
    for index, ((name, rows), (color, marker)) in enumerate(zip(measured.items(), styles, strict=False)):
        offset = 0.7 * ((index + 0.5) / len(notes) - 0.5)
        for note in rows:
            height = paths.index(note.path) + offset
            axes.plot([note.before, note.after], [height, height], color=_GRAY, linewidth=1, zorder=1)
            # Without a clip, because a marker at 0 is on the edge.
            options = {"marker": marker, "markersize": 6, "clip_on": False}
            axes.plot(note.before, height, color="white", markeredgecolor=color, **options)
            axes.plot(note.after, height, color=color, **options)
        axes.plot([], [], marker=marker, color=color, linestyle="none", label=f"after {name}")
    axes.plot([], [], marker="o", color="white", markeredgecolor=_GRAY, linestyle="none", label="before")
    axes.set_yticks(range(len(paths)), _shorten_names(paths), fontsize=8)
    axes.invert_yaxis()
    _set_scale(axes, "x", [value for rows in measured.values() for note in rows for value in (note.before, note.after)])
    texts = sorted({rows.measure for rows in notes.values()})
    hidden = [
        f"{note.path} ({name}: {note.before:.4g}, {note.after:.4g})"
        for name, rows in notes.items()
        for note in rows
        if note.before is not None and note.after is not None and not is_measured(note)
    ]
    texts += [f"not finite, and not drawn: {', '.join(hidden)}"] if hidden else []
    axes.set_xlabel("\n".join(texts), fontsize=9)
    _label_axes(axes)
    return figure


def draw_side_by_side(names: Sequence[str], ratios: Mapping[str, Sequence[float]]) -> Any:
    """Return a figure: for each contraction the ratio of its output in each report, joined by a line.

    Args:
        names: the names of the contractions.
        ratios: for each report the ratio of each contraction in decibels; NaN where it has none.
    """
    figure = _make_figure(figsize=(9, 1.4 + 0.3 * max(len(names), 1)), layout="constrained")
    axes: Any = figure.subplots()
    # What has no error is at the edge of the axis.
    values = np.clip(np.array(list(ratios.values()), np.float64), 0.0, _TOP)
    for height, row in enumerate(values.T):
        axes.plot(row[~np.isnan(row)], [height] * int((~np.isnan(row)).sum()), color=_GRAY, linewidth=1, zorder=1)
    styles = itertools.cycle(zip((*_COLORS.values(), "#CC79A7", "#56B4E9", _RANGE_COLOR), "os^Dv>", strict=True))
    for (label, row), (color, marker) in zip(zip(ratios, values, strict=True), styles, strict=False):
        axes.plot(row, range(len(names)), marker=marker, color=color, linestyle="none", clip_on=False, label=label)
    axes.set_yticks(range(len(names)), _shorten_names(list(names)), fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_xlabel("output: signal over error, dB (more is better; 6 dB are one bit; 0 and less at 0)", fontsize=9)
    _label_axes(axes)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)
    return figure


def _set_scale(axes: Axes, name: str, values: list[float]) -> None:
    """Make an axis logarithmic; with zeros among the values, linear from 0 to the least positive one."""
    positive = [value for value in values if value > 0]
    set_scale, set_limits = (getattr(axes, f"set_{name}{what}") for what in ("scale", "lim"))
    if min(values) > 0:
        set_scale("log")
        return
    set_scale("symlog", linthresh=10.0 ** math.floor(math.log10(min(positive))) if positive else 1.0)
    set_limits(min(values))


def _label_axes(axes: Axes) -> None:
    axes.grid(color=_GRAY, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def write_svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG element."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    # An element inside of HTML has no XML declaration in front.
    return text[text.index("<svg") :]
