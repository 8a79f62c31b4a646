"""`Report`: the rows of a comparison, and how they are shown: as text, in a terminal, as HTML and as pictures."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .page import check_html_path, write_page

_HEADER = ("name", "operation", "form", "weight dB", "activation dB", "output dB", "saturated", "codes used", "bytes")


class SiteRow(NamedTuple):
    """The errors of one contraction or lookup.

    Attributes:
        name: its name, as in `Prepared.coverage`.
        operation: its operation.
        form: "integer", "small-float", "weight-only", "lookup" or "float".
        reason: why it stays in floats, or "".
        weight_sqnr: the ratio of its weight to the error of its weight, in decibels; None in floats.
        activation_sqnr: the ratio of its activations, or None if they stay in floats.
        output_sqnr: the ratio of its result, with inputs in floats; or None.
        weight_saturated: the fraction of the weight beyond the range of its codes, or None.
        activation_saturated: the same for its activations, or None.
        used_codes: the fraction of the codes of the weight's dtype that occur, or None.
        float_bytes: the bytes of its weight in floats.
        bytes: the bytes of its weight as it is stored.
    """

    name: str
    operation: str
    form: str
    reason: str
    weight_sqnr: float | None
    activation_sqnr: float | None
    output_sqnr: float | None
    weight_saturated: float | None
    activation_saturated: float | None
    used_codes: float | None
    float_bytes: int
    bytes: int


class Histogram(NamedTuple):
    """The distribution of a weight, or of activations.

    Attributes:
        counts: how many values are between two edges.
        edges: the edges, one more than the counts.
        low: the least value of the codes; None if the range is found at each call.
        high: the largest value of the codes, or None.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The errors of the contractions of a function.

    Attributes:
        rows: a row for each contraction and lookup, in program order.
        result_sqnr: the ratio of the function's result to its error, in decibels, with all codes; NaN if it returns no
            floats.
        histograms: the distribution of each quantized weight, by its path.
        activations: the distribution of the quantized activations of each contraction, by its name.
        weights: the bytes of each parameter of these rows, in floats and as it is stored, by its path.
    """

    rows: tuple[SiteRow, ...]
    result_sqnr: float
    histograms: Mapping[str, Histogram]
    activations: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[SiteRow]:
        """Return an iterator over the rows."""
        return iter(self.rows)

    @property
    def summary(self) -> str:
        """The ratio of the result, and the bytes of all weights of contractions, each counted once."""
        # Several rows may read one weight, so that the sums of the rows may be larger.
        before, after = (sum(sizes[kind] for sizes in self.weights.values()) for kind in (0, 1))
        return f"result: {show_decibels(self.result_sqnr)} dB; weights: {after:,} bytes, of {before:,} in floats"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows by name, for JSON."""
        return {row.name: row._asdict() for row in self.rows}

    def __str__(self) -> str:
        """Return the table as plain text."""
        lines = [_HEADER, *(_list_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
        text = ["  ".join(c.ljust(n) for c, n in zip(line, widths, strict=True)).rstrip() for line in lines]
        reasons = [f"{row.name}: {row.reason}" for row in self.rows if row.reason]
        return "\n".join([*text, *reasons, self.summary])

    def show(self) -> None:
        """Print the table: in colors if the package rich is installed, else as plain text."""
        if importlib.util.find_spec("rich") is None:
            print(self)
            return
        # rich is optional, and slow to import.
        from rich import console, table, text

        grid = table.Table(title="Errors of contractions", caption=self.summary)
        for name in _HEADER:
            grid.add_column(name, justify="left" if name in _HEADER[:3] else "right", overflow="fold")
        for row in self.rows:
            # Plain text: rich reads the brackets of a path or of a shape as styles.
            cells = [text.Text(cell) for cell in _list_cells(row)]
            grid.add_row(*cells, style="yellow" if row.form == "float" else None)
        output = console.Console()
        output.print(grid)
        for row in self.rows:
            if row.reason:
                output.print(f"{row.name}: {row.reason}", highlight=False, markup=False)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return a figure of matplotlib: the errors of each contraction, and distributions of weights and activations.

        Args:
            path: a file to write the figure to, or None.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        # The pictures read the passes of ptq, which a table does not need.
        from .pictures import draw_report

        figure = draw_report(self.rows, self.histograms, self.activations)
        if path is not None:
            figure.savefig(path)
        return figure

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file, with the pictures of `plot` if matplotlib is installed.

        Args:
            path: the file to write.

        Raises:
            ValueError: the folder of the path does not exist.
        """
        file = check_html_path(path, "report.to_html")
        # Weight-only functions have no activations to tell of.
        columns = [column for column in range(len(_HEADER)) if any(_list_cells(row)[column] for row in self.rows)]
        cells = "".join(_make_html_cell("th", column, _HEADER[column]) for column in columns)
        rows = "\n".join(_make_html_row(row, columns) for row in self.rows)
        picture = ""
        if importlib.util.find_spec("matplotlib") is not None:
            from .pictures import draw_report, write_svg

            picture = write_svg(draw_report(self.rows, self.histograms, self.activations))
        summary = f"<p>{html.escape(self.summary)}</p>"
        write_page(file, "Quantization report", summary, "Contractions", f"<tr>{cells}</tr>", rows, picture)


def _make_html_row(row: SiteRow, columns: Sequence[int]) -> str:
    """Return the cells of some columns, with the reason below the name."""
    cells = _list_cells(row)
    reason = f'<div class="reason">{html.escape(row.reason)}</div>' if row.reason else ""
    rest = "".join(_make_html_cell("td", column, cells[column]) for column in columns if column)
    return f'<tr class="{row.form}"><td>{html.escape(row.name)}{reason}</td>{rest}</tr>'


def _make_html_cell(tag: str, column: int, text: str) -> str:
    kind = ' class="number"' if column > 2 else ""
    return f"<{tag}{kind}>{html.escape(text)}</{tag}>"


def _list_cells(row: SiteRow) -> tuple[str, ...]:
    saturated = row.activation_saturated if row.activation_saturated is not None else row.weight_saturated
    return (
        row.name, row.operation, row.form, show_decibels(row.weight_sqnr), show_decibels(row.activation_sqnr),
        show_decibels(row.output_sqnr),
        show_share(saturated), show_share(row.used_codes), f"{row.bytes:,}",
    )  # fmt: skip


def show_decibels(value: float | None) -> str:
    """Return a ratio with one digit after the point, or "" for None."""
    return "" if value is None else f"{value:.1f}"


def show_share(value: float | None) -> str:
    """Return a fraction in percent, or "" for None."""
    if value is None:
        return ""
    # Two digits; a "g" format would write 100 % as 1e+02.
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"
