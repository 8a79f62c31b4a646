"""A page of HTML that loads nothing: a summary, a table that scrolls, and a picture."""

from __future__ import annotations

import os
import pathlib

from .._core import checks

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
body { background: #fff; } .table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; border-bottom: 2px solid #888; }
th, td { padding: .25rem .6rem; } td { border-bottom: 1px solid #8884; font-variant-numeric: tabular-nums; }
tr.float td { background: #f5f0e6; } .number { text-align: right; } .reason { color: #666; font-size: 13px; }
td { white-space: nowrap; } .reason, td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
svg { max-width: 100%; height: auto; background: #fff; }
@media (prefers-color-scheme: dark) {
body { color: #ddd; background: #1b1d22; } tr.float td { background: #3a3326; } .reason { color: #aaa; } }
"""


def check_html_path(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Return the path of a page that a public function, given by name, shall write."""
    file = pathlib.Path(path)
    checks.require(file.parent.is_dir(), name, "path", "a folder that exists", str(file.parent))
    return file


def write_page(file: pathlib.Path, title: str, summary: str, label: str, header: str, rows: str, picture: str) -> None:
    """Write a page of HTML, which loads nothing: a summary, a table, and a picture.

    Args:
        file: the file to write.
        title: the title of the page.
        summary: HTML above the table.
        label: what the rows of the table are, for screen readers.
        header: the rows of the table's head.
        rows: the rows of its body.
        picture: an SVG element, or "".
    """
    file.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{summary}\n"
        # Focusable, so that arrow keys scroll a table that is wider than the screen.
        f'<div class="table" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead>{header}</thead><tbody>\n{rows}\n</tbody></table></div>\n{picture}</body></html>\n",
        encoding="utf-8",
    )
