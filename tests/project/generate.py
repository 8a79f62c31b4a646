"""Rewrite all files that are made from the code: `python -m tests.project.generate`.

- `docs/api/ops.md`: the operators that only ONNX Runtime has, from `jaxquant.ops`.
- `docs/api/index.md`: the names in its table, from the pages of the API reference.
- `docs/architecture.md`: the map of the modules, see `module_map`.
- `tests/project/signatures.txt`: the public interface, see `signatures`.
"""

from __future__ import annotations

import re

import jaxquant as jq
from tests.project import module_map, signatures

API = module_map.ROOT / "docs" / "api"
INDEX, OPERATORS = API / "index.md", API / "ops.md"
COMMAND = "python -m tests.project.generate"


def insert_operators(page: str) -> str:
    """Return the page of the operators with those at its end that are names of `jaxquant.ops` and not of the root."""
    heading = "## ONNX Runtime's own operators\n"
    before, found, _ = page.partition(heading)
    assert found, heading
    names = [name for name in jq.ops.__all__ if not hasattr(jq, name)]
    return before + heading + "".join(f"\n::: jaxquant.ops.{name}\n" for name in names)


def insert_names(table: str) -> str:
    """Return the table of the API reference with the names that its pages document.

    A row begins with a link to a page and the module from which its names are imported. The names are those in the
    directives of that page, such as `::: jaxquant.ops.qlinear_add`, in their order.
    """

    def complete(row: re.Match[str]) -> str:
        directives = re.findall(r"^::: (\S+)$", (API / row["page"]).read_text(), re.MULTILINE)
        names = [name.rpartition(".")[2] for name in directives if name.rpartition(".")[0] == row["module"]]
        return f"{row['start']} | {', '.join(f'`{name}`' for name in names)} |"

    pattern = r"^(?P<start>\| \[[^]]+\]\((?P<page>[\w-]+\.md)[^)]*\), `(?P<module>[\w.]+)`) \| .* \|$"
    return re.sub(pattern, complete, table, flags=re.MULTILINE)


def main() -> None:
    """Write the files."""
    OPERATORS.write_text(insert_operators(OPERATORS.read_text()))  # before the table, which reads it
    INDEX.write_text(insert_names(INDEX.read_text()))
    module_map.PAGE.write_text(module_map.insert_map(module_map.PAGE.read_text()))
    signatures.PATH.write_text(signatures.format_public())


if __name__ == "__main__":
    main()
