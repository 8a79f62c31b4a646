"""Rules for the source that no tool checks: names, comments, what `dir` lists, a light import.

`test_signatures.py` has those for the public functions, `test_structure.py` those for how the package is built.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

import jaxquant as jq
from tests.project import signatures
from tests.project.structure import count_code_lines, find_comment_lines, find_docstring_lines

PACKAGE = pathlib.Path(jq.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]
PACKAGES = signatures.list_packages()


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_module_is_named_after_its_subject(path: pathlib.Path) -> None:
    assert not re.search(r"utils|helpers|common|cfg", path.name)


def test_comments_explain_the_code() -> None:
    """Comments say why, in at least 0.05 lines for each line of code."""
    comments = code = 0
    for path in FILES:
        text = path.read_text()
        comments += len(find_comment_lines(text))
        code += count_code_lines(text, parse(path))
    density = comments / code
    assert density >= 0.05, (
        f"expected 0.05 comment lines for each line of code, got {comments} / {code} = {density:.3f}"
    )


def list_prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; of Python code, `floor`, a function, is removed."""
    text = path.read_text()
    prose = find_docstring_lines(parse(path)) | find_comment_lines(text) if path.suffix == ".py" else None
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line if prose is None or number in prose else re.sub(r"\b[Ff]loor\b", "", line)


def test_no_metaphors_of_buildings() -> None:
    words = re.compile(r"\b(houses?|rooms?|doors?|upstairs|downstairs)\b|\bfloors?\b(?![(\"`])", re.IGNORECASE)
    folders = [ROOT / name for name in ("jaxquant", "tests", "docs", "examples", "benchmarks")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    found = []
    for path in sorted({*paths, ROOT / "README.md"} - {pathlib.Path(__file__)}):
        if not words.search(path.read_text()):
            continue  # to find the docstrings takes longer
        for number, line in list_prose(path):
            found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in words.finditer(line)]
    assert not found, f"expected the field's words, got metaphors of buildings: {found}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_custom_vjp_triples(path: pathlib.Path) -> None:
    """`f`, `_f_fwd`, `_f_bwd` and then `f.defvjp(_f_fwd, _f_bwd)`."""
    text = path.read_text()
    for name in re.findall(r"custom_vjp.*\)\ndef (\w+)\(", text):
        bare = name.lstrip("_")
        assert re.search(rf"{name}.defvjp\(_{bare}_fwd, _{bare}_bwd(, symbolic_zeros=True)?\)", text)


def test_no_test_imports_another() -> None:
    """Shared code is in tests/support, tests/oracles or tests/cases."""
    found = []
    for path in TEST_FILES:
        for node in ast.walk(parse(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = [part for name in (*names, module or "") for part in name.split(".")]
            found += [f"{path.name} imports {part}" for part in parts if part.startswith("test_")]
    assert not found


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_lists_the_public_names(name: str) -> None:
    package = PACKAGES[name]
    assert len(package.__all__) == len(set(package.__all__)), "a name is listed twice"
    for public in package.__all__:
        assert getattr(package, public) is not None
    if hasattr(package, "__path__"):  # a module without other modules in it lists all that it imports
        assert set(package.__all__) <= set(dir(package))
        # Modules that are imported when they are first used.
        assert all(
            isinstance(getattr(package, more), types.ModuleType) for more in {*dir(package)} - {*package.__all__}
        )


@pytest.mark.slow
def test_import_is_light() -> None:
    """Importing jaxquant imports no framework. The program prints the time that docs/quickstart.md states."""
    program = (
        "import sys, time, jax, jax.numpy, chex; t = time.process_time(); import jaxquant;"
        "print(time.process_time() - t, [m for m in ('flax', 'onnx', 'onnxruntime', 'torch', 'optax', 'haiku',"
        " 'orbax', 'safetensors') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    _, frameworks = run.stdout.strip().split(" ", 1)
    assert frameworks == "[]"
