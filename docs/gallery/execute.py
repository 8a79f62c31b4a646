"""Execute notebooks of the gallery, and write their pages: `python docs/gallery/execute.py [NAME...]`, all by default.

A notebook is a Python file in jupytext's percent format: Jupyter and editors open it as a notebook, and Python runs it
as a program. The page has its text, its code, what the cells print, and their pictures.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import io
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

FOLDER = pathlib.Path(__file__).parent


def list_notebooks() -> list[str]:
    """Return the names of the notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path != pathlib.Path(__file__))


def read_cells(text: str) -> list[tuple[str, str]]:
    """Return the cells of a notebook: "markdown" or "code", and the text."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        if kind.strip() == "[markdown]":
            cells.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            cells.append(("code", body.strip()))
    return cells


def execute(name: str, folder: pathlib.Path) -> None:
    """Execute a notebook, and write its page and its pictures to a folder.

    Args:
        name: the name of the notebook.
        folder: where the page is written.
    """
    path = FOLDER / f"{name}.py"
    variables: dict[str, Any] = {"__name__": "__main__"}
    parts = []
    for kind, body in read_cells(path.read_text()):
        if kind == "markdown":
            parts.append(body)
            continue
        parts.append(f"```python\n{body}\n```")
        printed = _run_cell(body, str(path), variables)
        if printed:
            parts.append(f"```text\n{printed}\n```")
        for number in plt.get_fignums():
            figure = plt.figure(number)
            picture = f"{name}-{sum(part.startswith('![') for part in parts) + 1}.png"
            figure.savefig(folder / picture, dpi=72, bbox_inches="tight", metadata={"Software": None})
            parts.append(f"![{', '.join(axes.get_title() for axes in figure.axes)}]({picture})")
            plt.close(figure)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "onnxruntime"))
    parts.append(
        f"`python docs/gallery/execute.py {name}` executed [this notebook]({name}.py) with Python "
        f"{platform.python_version()}, {versions}, on {_name_processor()}."
    )
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def _run_cell(body: str, path: str, variables: dict[str, Any]) -> str:
    """Return what a cell prints, with the value of its last expression."""
    tree = ast.parse(body)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, path, "exec"), variables)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), path, "eval"), variables)
            if value is not None:
                print(repr(value))
    return printed.getvalue().rstrip()


def _name_processor() -> str:
    """Return the name of the processor, and whether it has VNNI, as Linux tells."""
    cpu = pathlib.Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    if name is None:
        return platform.machine()
    return f"{name[1]} ({platform.machine()}, {'with' if 'vnni' in text else 'without'} VNNI)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the notebooks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(list_notebooks())}")
    for name in parser.parse_args(arguments).names or list_notebooks():
        execute(name, FOLDER)
        print(FOLDER / f"{name}.md")


if __name__ == "__main__":
    main()
