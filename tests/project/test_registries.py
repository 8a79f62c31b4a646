"""What is listed by hand lists everything: operators and recipes in the shared cases, files in CONTRIBUTING.md."""

from __future__ import annotations

import pathlib
import re

import pytest

import jaxquant as jq
from jaxquant.onnx.export import exporter

from .. import exactness
from ..cases import public_calls
from ..support import prepared

ROOT = pathlib.Path(__file__).parents[2]
OPERATORS = [name for name in jq.ops.__all__ if name != "DynamicQuantizeLinearOutput"]
# oneDNN itself is the oracle of the first, in tests/onednn; the second returns floats, which agree up to rounding.
WITHOUT_EXACTNESS = {"dynamic_dequantize", "matmul_nbits"}
# Marks with their names in a table, in `jaxquant/onnx/load/float_kernels.py`.
LOOPED_MARKS = {"tanh", "logistic", "exp_of_runtime", "sin_of_runtime", "cos_of_runtime"}
# Folders from which a path in the text may begin, besides the root.
STARTS = ("", "jaxquant", "tests", "docs")


def test_every_operator_is_compared_with_an_oracle() -> None:
    compared = {case.operator for case in exactness.cases()}
    assert set(OPERATORS) - WITHOUT_EXACTNESS <= compared


def test_every_operator_is_called_with_bad_arguments() -> None:
    called = {call.name.rpartition(".")[2] for call in public_calls.calls()}
    assert set(OPERATORS) <= called


def test_every_mark_has_a_writer() -> None:
    """A mark without one would be written as its arithmetic, and a writer under another name would never be called."""
    source = "\n".join(path.read_text() for path in (ROOT / "jaxquant").rglob("*.py"))
    assert set(exporter.MARKS) - LOOPED_MARKS == set(re.findall(r"\bmark\(\s*\"(\w+)\"", source))


def test_every_recipe_is_applied_to_the_shared_programs() -> None:
    # Weights of nvfp4 cannot be trained, which the shared programs are: tests/arrays/test_nested_scales.py has its own.
    assert set(jq.recipes.__all__) - {"nvfp4"} <= set(prepared.RECIPES)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_named_files_exist(page: str) -> None:
    """A path in backticks exists; NAME stands for a new name."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|yml|txt))`", text)
    missing = [path for path in paths if not any((ROOT / start / path).exists() for start in STARTS)]
    assert all("NAME" in path and (ROOT / path).parent.is_dir() for path in missing), missing
    assert paths


def test_the_tests_that_the_integration_runs_exist() -> None:
    """Some of its stages run a list of tests; a test that was moved must not stop them."""
    paths = re.findall(r"(?<=[\s(])tests/[\w/]+(?:\.py)?(?=[\s)])", (ROOT / ".ci" / "run").read_text())
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
