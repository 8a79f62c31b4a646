"""A hook of mkdocs that replaces a marker in a page by a map of the package, built from the modules' docstrings."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

MARKER = "<!-- module map -->"
PACKAGE = pathlib.Path(__file__).parents[2] / "jaxquant"


def read_summary(path: pathlib.Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.sub(r"\s+", " ", docstring.split("\n\n")[0]).replace("|", "\\|")


def list_packages() -> list[pathlib.Path]:
    """Return the folders that hold modules: the package itself first, then its subpackages by name."""
    return sorted({path.parent for path in PACKAGE.rglob("*.py")})


def build_module_map() -> str:
    """Return a section for each package, with a table of its modules."""
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
    """Replace the marker. Mkdocs calls this for each page."""
    return markdown.replace(MARKER, build_module_map()) if MARKER in markdown else markdown
