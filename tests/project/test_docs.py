"""The README and the documentation: sizes, navigation, links, and the names in the API reference."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import jaxquant as jq
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
MODULES = {
    "jaxquant": jq,
    "jaxquant.recipes": jq.recipes,
    "jaxquant.transform": jq.transform,
    "jaxquant.onednn": jq.onednn,
    "jaxquant.integer": jq.integer,
    "jaxquant.checkpoint": jq.checkpoint,
    "jaxquant.distributed": jq.distributed,
    "jaxquant.onnx": jq.onnx,
    "jaxquant.optim": jq.optim,
    "jaxquant.ptq": jq.ptq,
    "jaxquant.report": jq.report,
    "jaxquant.flax": jq.flax,
    "jaxquant.flax.linen": qnn,
    "jaxquant.flax.nnx": qnnx,
}
ALIASES = {"jaxquant.dynamic_dequantize"}  # documented as jaxquant.onednn.dynamic_dequantize


def remove_code(text: str) -> str:
    """Return the text without fenced blocks and without code in backticks."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def list_anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as mkdocs and GitHub make them of plain headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def list_public_names() -> set[str]:
    """Return every public function, class and constant under the name that users import."""
    names = set()
    for prefix, module in MODULES.items():
        for name in getattr(module, "__all__", dir(module)):
            value: Any = getattr(module, name)
            hidden = name.startswith("_") or isinstance(value, bool) or inspect.ismodule(value)
            if prefix == "jaxquant.transform" and hasattr(jq, name):
                continue  # documented as jaxquant.<name>
            if not hidden and getattr(value, "__module__", "jaxquant").startswith("jaxquant"):
                names.add(f"{prefix}.{name}")
    return names - ALIASES


def test_readme_is_short() -> None:
    assert 120 <= len(README.read_text().splitlines()) <= 180


def test_readme_begins_with_the_main_job() -> None:
    language, block = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[0]
    assert language == "pycon"
    for call in ("jq.prepare", "prepared.coverage", "prepared.calibrate", "prepared.convert", "prepared.apply"):
        assert call in block


@pytest.mark.parametrize("command", ["python examples/quickstart.py", "pytest"])
def test_readme_has_the_two_commands(command: str) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert any(command in block for block in blocks)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == sorted(
        str(page.relative_to(DOCS)) for page in PAGES
    )


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", remove_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert page == README or file.is_relative_to(DOCS), f"{target} is not on the site"
        if anchor:
            assert anchor in list_anchors(file.read_text()), target


def test_every_public_name_is_in_the_api_reference() -> None:
    documented = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == list_public_names()


def test_the_module_map_has_every_module() -> None:
    spec: Any = importlib.util.spec_from_file_location("module_map", DOCS / "_hooks" / "module_map.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.on_page_markdown((DOCS / "architecture.md").read_text())
    assert hook.MARKER not in page
    rows = re.findall(r"^\| `(\w+)` \| (?:\S.*) \|$", page, re.MULTILINE)
    modules = [path.stem for path in (ROOT / "jaxquant").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(rows) == sorted(modules)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("page", "package"),
    [("plain-jax.md", "equinox"), ("frameworks/equinox.md", "equinox"), ("frameworks/haiku.md", "haiku")],
)
def test_blocks_with_optional_packages_run(page: str, package: str) -> None:
    """Blocks without a prompt are not doctests. They run in a new process, because they import optional packages."""
    pytest.importorskip(package)
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    process = subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(blocks)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
