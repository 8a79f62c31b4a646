"""The pictures of a report. This module imports matplotlib."""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib.figure import Figure

from ._report import Report

# Of Okabe and Ito's palette, which color-blind readers can tell apart.
_COLORS = {"weight": "#0072B2", "activation": "#E69F00", "output": "#009E73"}
_RANGE_COLOR, _GRAY = "#D55E00", "#999999"
_MOST_HISTOGRAMS, _COLUMNS = 24, 4
_TOP = 120.0  # decibels: no float32 has more, and an exact result has infinitely many


def draw_report(report: Report) -> Any:
    """Return a figure: bars for the errors of each contraction, and a histogram of each weight."""
    rows = [row for row in report.rows if row.form != "float"]
    weights = list(report.histograms.items())[:_MOST_HISTOGRAMS]
    lines = math.ceil(len(weights) / _COLUMNS)
    bars = 1.2 + 0.45 * max(len(rows), 1)
    figure = Figure(figsize=(11, bars + 2.1 * lines), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[bars, max(2.1 * lines, 0.1)])
    top, bottom = parts
    _draw_bars(top.subplots(), rows)
    if weights:
        bottom.suptitle("weights, on a logarithmic scale; dashed: the range of their codes", fontsize=8)
        _draw_histograms(bottom.subplots(lines, _COLUMNS, squeeze=False).ravel(), weights)
    return figure


def _draw_bars(axes: Any, rows: list[Any]) -> None:
    """Draw the ratios of weights, activations and outputs, the first contraction at the top."""
    for offset, (name, color) in zip((-0.27, 0.0, 0.27), _COLORS.items(), strict=True):
        values = [getattr(row, f"{name}_sqnr") for row in rows]
        places = [place + offset for place, value in enumerate(values) if value is not None]
        sizes = [min(max(value, 0.0), _TOP) for value in values if value is not None]
        axes.barh(places, sizes, 0.25, color=color, label=name)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("signal over error, dB (more is better; 6 dB are one bit)")
    axes.grid(axis="x", color=_GRAY, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)


def _draw_histograms(grid: Any, weights: list[Any]) -> None:
    """Draw the distribution of each weight on a logarithmic scale, with the ends of the range of its codes."""
    for axes, (name, histogram) in zip(grid, weights, strict=False):
        axes.stairs(histogram.counts, histogram.edges, fill=True, color=_COLORS["weight"])
        for end in (histogram.low, histogram.high):
            axes.axvline(end, color=_RANGE_COLOR, linewidth=1, linestyle="--")
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=4)
        axes.set_title(name if len(name) < 32 else f"...{name[-29:]}", fontsize=7)
        axes.tick_params(labelsize=6)
    for axes in grid[len(weights) :]:
        axes.set_visible(False)


def write_svg(figure: Any) -> str:
    """Return a figure as the text of an SVG element."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    return text[text.index("<svg") :]
