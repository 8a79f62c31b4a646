"""A hook of mkdocs: replaces a marker in a page by the map of the package, made from the modules' docstrings."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

MARKER = "<!-- module map -->"
PACKAGE = pathlib.Path(__file__).parents[2] / "jaxquant"


def read_summary(path: pathlib.Path) -> str:
    """Returns the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.sub(r"\s+", " ", docstring.split("\n\n")[0]).replace("|", "\\|")


def list_packages() -> list[pathlib.Path]:
    """Returns the folders that hold modules: the package itself first, then its packages by name."""
    return sorted({path.parent for path in PACKAGE.rglob("*.py")})


def draw_module_map() -> str:
    """Returns a section for each package, with a table of its modules."""
    sections = []
    for folder in list_packages():
        name = ".".join(folder.relative_to(PACKAGE.parent).parts)
        lines = [f"### `{name}`", "", read_summary(folder / "__init__.py"), ""]
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if modules:
            lines += ["| module | contents |", "|---|---|"]
            lines += [f"| `{path.stem}` | {read_summary(path)} |" for path in modules]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the marker. Called by mkdocs for each page."""
    return markdown.replace(MARKER, draw_module_map()) if MARKER in markdown else markdown
