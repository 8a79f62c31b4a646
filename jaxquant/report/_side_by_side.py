"""`write_side_by_side`: several reports on one function, such as before and after an algorithm, as one HTML file."""

from __future__ import annotations

import html
import importlib.util
import math
import os
from collections.abc import Mapping

from .._core import checks
from ._report import Report, SiteRow, show_decibels, show_share
from .page import check_html_path, write_page

_COLUMNS = ("form", "weight dB", "activation dB", "output dB", "saturated", "bytes")


def write_side_by_side(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Write reports on one function beside each other, as one HTML file that loads nothing.

    A row has what each report says of a contraction, and in parentheses how many decibels the ratio of its output has
    gained since the first report. A contraction that a report does not have is empty there. With matplotlib, a picture
    joins the ratios of each contraction by a line.

    Args:
        reports: two or more reports by name, such as {"to nearest": report, "GPTQ": other}.
        path: the file to write.

    Returns:
        None.

    Raises:
        TypeError: reports is no dict of reports.
        ValueError: there are fewer than two reports, or the folder of the path does not exist.

    Example:
        >>> import pathlib, tempfile
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> params, x = {"w": jnp.arange(32.0).reshape(8, 4)}, jnp.ones((2, 8))
        >>> reports = {}
        >>> for name, rules in {"4 bits": jq.recipes.w4a8(), "8 bits": jq.recipes.w8a8_dynamic()}.items():
        ...     prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=rules)
        ...     reports[name] = jq.report.compare(prepared, params, prepared.convert(params), [x])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "both.html"
        ...     jq.report.write_side_by_side(reports, path)
        ...     "<th colspan" in path.read_text()
        True

    Source: Tufte, Envisioning Information (1990), chapter 4, for small multiples with one scale.
    """
    name = "report.write_side_by_side"
    checks.require_type(isinstance(reports, Mapping), name, "reports", "a dict of reports", type(reports).__name__)
    for label, report in reports.items():
        found = type(report).__name__
        checks.require_type(isinstance(report, Report), name, f"reports[{label!r}]", "a report of compare", found)
    checks.require(len(reports) > 1, name, "reports", "at least two reports", str(len(reports)))
    file = check_html_path(path, name)
    tables = {label: {row.name: row for row in report} for label, report in reports.items()}
    first = next(iter(tables.values()))
    names = list(dict.fromkeys(row for table in tables.values() for row in table))
    cells = {row: [_list_cells(table.get(row), first.get(row)) for table in tables.values()] for row in names}
    # Weight-only functions have no activations to tell of.
    columns = [i for i in range(len(_COLUMNS)) if any(part[i] for parts in cells.values() for part in parts)]
    groups = "".join(f'<th colspan="{len(columns)}" scope="colgroup">{html.escape(label)}</th>' for label in tables)
    heads = "".join(f"<th>{_COLUMNS[i]}</th>" for i in columns) * len(tables)
    rows = [
        f"<tr><td>{html.escape(row)}</td>{''.join(_make_cell(part[i], i) for part in parts for i in columns)}</tr>"
        for row, parts in cells.items()
    ]
    items = (f"<li>{html.escape(f'{label}: {report.summary}')}</li>" for label, report in reports.items())
    picture = ""
    if importlib.util.find_spec("matplotlib") is not None:
        from .pictures import draw_side_by_side, write_svg

        ratios = {label: [_find_ratio(table.get(row)) for row in names] for label, table in tables.items()}
        picture = write_svg(draw_side_by_side(names, ratios))
    header = f'<tr><th rowspan="2">name</th>{groups}</tr><tr>{heads}</tr>'
    summary = f"<ul>{''.join(items)}</ul>"
    write_page(file, "Quantization reports", summary, "Contractions", header, "\n".join(rows), picture)


def _find_ratio(row: SiteRow | None) -> float:
    """Return the ratio of a contraction's output, or NaN if there is none."""
    return math.nan if row is None or row.output_sqnr is None else row.output_sqnr


def _list_cells(row: SiteRow | None, first: SiteRow | None) -> tuple[str, ...]:
    """Return the cells of a row, with what the ratio of its output has gained since the first report."""
    if row is None:
        return ("",) * len(_COLUMNS)
    gain = 0.0 if row is first else _find_ratio(row) - _find_ratio(first)
    change = f" ({gain:+.1f})" if row is not first and math.isfinite(gain) else ""
    saturated = row.activation_saturated if row.activation_saturated is not None else row.weight_saturated
    return (
        row.form, show_decibels(row.weight_sqnr), show_decibels(row.activation_sqnr),
        show_decibels(row.output_sqnr) + change, show_share(saturated), f"{row.bytes:,}",
    )  # fmt: skip


def _make_cell(text: str, column: int) -> str:
    kind = ' class="number"' if column else ""
    return f"<td{kind}>{html.escape(text)}</td>"
