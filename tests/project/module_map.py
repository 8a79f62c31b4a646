"""The map of the modules in docs/architecture.md, made from their docstrings.

`python -m tests.project.module_map` rewrites the text between the two markers of that page.
"""

from __future__ import annotations

import ast
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "jaxquant"
PAGE = ROOT / "docs" / "architecture.md"
COMMAND = "python -m tests.project.module_map"
BEGIN = f"<!-- Begin of the module map, written by `{COMMAND}`. -->"
END = "<!-- End of the module map. -->"


def read_summary(path: pathlib.Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.sub(r"\s+", " ", docstring.split("\n\n")[0]).replace("|", "\\|")


def list_layers() -> list[str]:
    """Return the packages directly below jaxquant, from the lowest layer of import-linter to the highest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [package for layer in reversed(layers) for package in layer.split(" | ")]


def list_packages() -> list[pathlib.Path]:
    """Return the folders that hold modules: the package itself, then those below it by their layers."""
    layers = list_layers()
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}

    def find_place(folder: pathlib.Path) -> tuple[int, pathlib.Path]:
        top = f"jaxquant.{folder.relative_to(PACKAGE).parts[0]}"
        return (layers.index(top) if top in layers else len(layers)), folder

    return [PACKAGE, *sorted(folders, key=find_place)]


def build_map() -> str:
    """Return a section for each package, with a table of its modules."""
    sections = []
    for folder in list_packages():
        name = ".".join(folder.relative_to(ROOT).parts)
        lines = [f"### `{name}`", "", read_summary(folder / "__init__.py"), ""]
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if modules:
            lines += ["| module | contents |", "|---|---|"]
            lines += [f"| `{path.stem}` | {read_summary(path)} |" for path in modules]
        sections.append("\n".join(lines).rstrip("\n"))
    return "\n\n".join(sections)


def insert_map(page: str) -> str:
    """Return the page with the present map between its markers."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{build_map()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(insert_map(PAGE.read_text()))
    print(f"wrote {PAGE}")
