"""The check of the built site finds what is broken. `.ci/run` builds the site and checks it."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tests.project import site


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a site of two pages that is in order."""
    (tmp_path / "guide").mkdir()
    (tmp_path / "search").mkdir()
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="guide/style.css"><link rel="canonical" href="https://example.org/">'
        '<h1 id="top"></h1><a href="guide/#part%20one"></a><a href="#top"></a><a href="https://example.org/none"></a>'
    )
    (tmp_path / "guide" / "index.html").write_text('<a id="part one"></a><a href=".."></a><img src="../figure.svg">')
    (tmp_path / "guide" / "style.css").write_text("")
    (tmp_path / "figure.svg").write_text("")
    pages = (site.ROOT / "docs" / "api").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    index = {"docs": [{"location": f"api/#{name}", "title": "", "text": ""} for name in names]}
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_site_in_order_has_no_problems(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.main([str(folder)]) == 0
    assert capsys.readouterr().out == "2 pages: all internal links and anchors resolve\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="../missing/"></a>', "../missing/ has no page"),
        ('<a href="../#other"></a>', "../#other has no anchor"),
        ('<a href="#here"></a>', "#here has no anchor"),
        ('<a href="../.."></a>', "../.. has no page"),
        ('<img src="picture.png">', "picture.png has no page"),
        ('<script src="https://example.org/x.js"></script>', "https://example.org/x.js is loaded from the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "//example.org/x.css is loaded from the network"),
    ],
)
def test_a_broken_page_is_named(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    page = folder / "guide" / "index.html"
    page.write_text(page.read_text() + text)
    assert site.main([str(folder)]) == 1
    assert capsys.readouterr().out == f"guide/index.html: {problem}\n"


def test_a_name_that_the_search_does_not_find_is_named(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "search" / "search_index.json"
    path.write_text(path.read_text().replace("jaxquant.prepare", "jaxquant.other"))
    assert site.main([str(folder)]) == 1
    assert "the search does not find jaxquant.prepare\n" in capsys.readouterr().out
