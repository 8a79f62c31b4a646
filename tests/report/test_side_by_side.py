"""Several reports on one page."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq


def make_report(ratios: dict[str, float | None], count: int = 10) -> jq.report.Report:
    rows = tuple(
        jq.report.SiteRow(name, "dot_general", "integer", "", 30.0, None, ratio, 0.0, None, 0.5, 400, count)
        for name, ratio in ratios.items()
    )
    return jq.report.Report(rows, 12.0, {}, weights={"w": (400, count)})


def list_table(page: str) -> list[list[str]]:
    """Return the texts of the cells of each row of the page's table."""
    table = page[page.index("<table>") : page.index("</table>") + len("</table>")]
    rows = xml.etree.ElementTree.fromstring(table).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_gains_and_missing_contractions(tmp_path: pathlib.Path) -> None:
    infinite = float("inf")
    reports = {
        "before": make_report({"a<b": 20.0, "b": 30.0, "c": 40.0, "d": None}),
        "after": make_report({"a<b": 24.5, "b": 29.0, "d": None, "e": infinite}, 5),
    }
    jq.report.write_side_by_side(reports, tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert list_table(page) == [
        ["name", "before", "after"],
        2 * ["form", "weight dB", "output dB", "saturated", "bytes"],  # no activations in either
        ["a<b", "integer", "30.0", "20.0", "0 %", "10", "integer", "30.0", "24.5 (+4.5)", "0 %", "5"],
        ["b", "integer", "30.0", "30.0", "0 %", "10", "integer", "30.0", "29.0 (-1.0)", "0 %", "5"],
        ["c", "integer", "30.0", "40.0", "0 %", "10", *5 * [""]],
        ["d", "integer", "30.0", "", "0 %", "10", "integer", "30.0", "", "0 %", "5"],
        ["e", *5 * [""], "integer", "30.0", "inf", "0 %", "5"],
    ]
    assert '<th colspan="5" scope="colgroup">before</th>' in page
    assert "<li>before: result: 12.0 dB; weights: 10 bytes, of 400 in floats</li>" in page
    assert "<li>after: result: 12.0 dB; weights: 5 bytes, of 400 in floats</li>" in page


def test_a_large_page_loads_nothing_and_is_small(tmp_path: pathlib.Path) -> None:
    names = [f"layers/{layer}/{name}" for layer in range(40) for name in ("q", "k", "v", "o", "up", "down")]
    reports = {str(index): make_report(dict.fromkeys(names, 20.0 + index)) for index in range(8)}
    jq.report.write_side_by_side(reports, tmp_path / "many.html")
    page = (tmp_path / "many.html").read_text()
    assert len(page) < 2_000_000
    assert '<meta name="viewport" content="width=device-width' in page
    assert '<div class="table" tabindex="0"' in page
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", page)
    pytest.importorskip("matplotlib")
    assert page.count("<svg") == 1


def test_reports_of_two_recipes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The gains in the table are the differences of what `compare` measures."""
    params = {name: jnp.asarray(rng.normal(size=(16, 16)), jnp.float32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    reports = {}
    for name, rules in {"w4a8": jq.recipes.w4a8(), "w8a8": jq.recipes.w8a8_dynamic()}.items():
        prepared = jq.prepare(lambda p, x: jax.nn.relu(x @ p["first"]) @ p["second"], params, x, rules=rules)
        reports[name] = jq.report.compare(prepared, params, prepared.convert(params), [x])
    jq.report.write_side_by_side(reports, tmp_path / "both.html")
    table = list_table((tmp_path / "both.html").read_text())
    for row, before, after in zip(table[2:], *reports.values(), strict=True):
        assert row[0] == before.name == after.name
        assert row[10] == f"{after.output_sqnr:.1f} ({after.output_sqnr - before.output_sqnr:+.1f})"
        assert after.output_sqnr > before.output_sqnr


def test_errors(tmp_path: pathlib.Path) -> None:
    report = make_report({"a": 1.0})
    both = {"a": report, "b": report}
    cases: list[Any] = [
        ([report], tmp_path / "x.html", "reports: expected a dict of reports, got list"),
        ({"a": report, "b": 3}, tmp_path / "x.html", r"reports\['b'\]: expected a report of compare, got int"),
        ({"a": report}, tmp_path / "x.html", "reports: expected at least two reports, got 1"),
        (both, tmp_path / "none" / "x.html", "path: expected a folder that exists, got .*none"),
    ]
    for reports, path, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"^jaxquant\.report\.write_side_by_side: {text}"):
            jq.report.write_side_by_side(reports, path)
    assert not list(tmp_path.iterdir())
