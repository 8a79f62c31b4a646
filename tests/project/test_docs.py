"""The README and the documentation: sizes, navigation, links, names in the API reference, extras, and arguments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx
from tests.project import generate, module_map

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
    "jaxquant.calibration": jq.calibration,
    "jaxquant.checkpoint": jq.checkpoint,
    "jaxquant.codes": jq.codes,
    "jaxquant.distributed": jq.distributed,
    "jaxquant.lora": jq.lora,
    "jaxquant.train": jq.train,
    "jaxquant.onnx": jq.onnx,
    "jaxquant.ops": jq.ops,
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


# Another module has the same names, under which they are documented.
DOCUMENTED_ELSEWHERE = {"jaxquant.transform": jq, "jaxquant.calibration": jq, "jaxquant.ops": jq}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def list_public_names() -> set[str]:
    """Return every public function, class and constant under the name that users import."""
    names = set()
    for prefix, module in MODULES.items():
        for name in module.__all__:
            value: Any = getattr(module, name)
            if hasattr(DOCUMENTED_ELSEWHERE.get(prefix), name) or inspect.ismodule(value):
                continue
            names.add(f"{prefix}.{name}")
    return names - ALIASES


def find_directives(page: pathlib.Path) -> list[str]:
    """Return the names that a page of the API reference documents."""
    return re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)


def list_requirements(requirements: list[str]) -> list[str]:
    """Return the names of the packages that are required."""
    return [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]


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
    documented = [name for page in PAGES for name in find_directives(page)]
    assert len(documented) == len(set(documented))
    assert set(documented) == list_public_names()


def test_the_list_of_modules_is_complete() -> None:
    """A public package has no underscore, and has `__all__`."""
    found = {"jaxquant", "jaxquant.codes", "jaxquant.integer", "jaxquant.lora", "jaxquant.onednn", "jaxquant.ops"}
    found |= {"jaxquant.recipes", "jaxquant.train"}
    for module in pkgutil.walk_packages(jq.__path__, "jaxquant."):
        # The packages that load and export models have no names that users import.
        is_inner = "._" in module.name or module.name.startswith(("jaxquant.onnx.load", "jaxquant.onnx.export"))
        if module.ispkg and not is_inner and hasattr(importlib.import_module(module.name), "__all__"):
            found.add(module.name)
    assert found == set(MODULES)


def test_the_page_on_architecture_has_the_modules_and_the_layers() -> None:
    page = (DOCS / "architecture.md").read_text()
    listed = page.split("Users import the public names from")[1].split("## Layers")[0]
    assert set(re.findall(r"`([\w.]+)`", listed)) == set(MODULES)
    rows = re.findall(r"^\| \d+ \| (.+) \|$", page, re.MULTILINE)
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [set(re.findall(r"`([\w.]+)`", row)) for row in rows] == [set(layer.split(" | ")) for layer in layers]


def test_the_page_of_operators_has_those_of_the_module() -> None:
    page = generate.OPERATORS.read_text()
    assert page == generate.insert_operators(page), f"run {generate.COMMAND}"


def test_the_table_of_the_api_reference_lists_every_name_once() -> None:
    table = generate.INDEX.read_text()
    assert table == generate.insert_names(table), f"run {generate.COMMAND}"
    rows = re.findall(r"^\| \[[^]]+\]\([^)]+\), `([\w.]+)` \| (.+) \|$", table, re.MULTILINE)
    listed = [f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)]
    documented = [name for page in PAGES if page.parent.name == "api" for name in find_directives(page)]
    assert sorted(listed) == sorted(documented)


def test_the_extras_of_readme_and_quickstart_are_those_of_the_project() -> None:
    extras = set(PROJECT["optional-dependencies"])
    install = README.read_text().split("## Install")[1].split("\n## ")[0]
    named = {*re.findall(r"`(\w+)`", install), *re.findall(r"\.\[(\w+)\]", install)}
    assert named == extras
    quickstart = (DOCS / "quickstart.md").read_text().split("## Install")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", quickstart, re.MULTILINE)) == extras


@pytest.mark.parametrize("page", [README, DOCS / "quickstart.md"], ids=lambda page: page.name)
def test_the_named_requirements_are_those_of_the_project(page: pathlib.Path) -> None:
    python, packages = re.search(
        r"needs Python (\S+) or newer,\s+([\w\s,]+?)\. From a checkout", page.read_text()
    ).groups()  # type: ignore[union-attr]
    assert PROJECT["requires-python"] == f">={python}"
    assert sorted(re.split(r",\s+|\s+and\s+", packages)) == sorted(list_requirements(PROJECT["dependencies"]))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_pip_commands_name_extras_of_the_project(page: pathlib.Path) -> None:
    for extras in re.findall(r"pip install [^`\n]*?\[([\w,]+)\]", page.read_text()):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_arguments_of_flax_layers_are_in_the_table() -> None:
    page = (DOCS / "flax.md").read_text()
    count, table = re.search(r"Each layer has (\w+) additional arguments:\n\n(.*?)\n\n[A-Z]", page, re.DOTALL).groups()  # type: ignore[union-attr]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", table, re.MULTILINE))
    assert ("four", "five", "six", "seven").index(count) + 4 == len(rows)
    layers = re.search(r"^\| (`Dense`.*?) \| (`Linear`.*?) \|$", page, re.MULTILINE).groups()  # type: ignore[union-attr]
    for name in re.findall(r"`(\w+)`", layers[0]):
        own = {field.name: field.default for field in dataclasses.fields(getattr(qnn, name))}
        flaxs = {field.name for field in dataclasses.fields(getattr(nn, name))}
        assert own.keys() - flaxs == rows.keys(), name
        for argument, default in rows.items():
            if argument != "weight_spec":  # required, although a dataclass needs a default
                expected = eval(default.strip("`"), {"jq": jq})
                assert own[argument] == expected, (name, argument)
    for name in re.findall(r"`(\w+)`", layers[1]):
        signatures = [inspect.signature(c.__init__) for c in getattr(qnnx, name).__mro__ if "__init__" in vars(c)]
        ours = [s for s in signatures if "weight_spec" in s.parameters]
        flaxs = inspect.signature(getattr(nnx, name).__init__).parameters
        added = {p.name for s in ours for p in s.parameters.values() if p.kind is p.KEYWORD_ONLY} - flaxs.keys()
        assert added == {*rows, "use_running_average"}, name


@pytest.mark.parametrize("library", ["qwix", "aqtp", "torchao", "onnxruntime"])
def test_names_of_other_libraries_exist(library: str) -> None:
    """The names on the page on other libraries, in the version that the page was written for or a later one."""
    modules = {
        "qwix": {
            "qwix": "QArray QtProvider QtRule PtqProvider QuantizationRule quantize dequantize quantize_model "
            "quantize_params dot_general einsum conv_general_dilated dot ragged_dot",
            "qwix.pallas": "pallas_call", "qwix.contrib.kernels.quantized_matmul": "",
            **{f"qwix.contrib.{name}": "" for name in ("gptq", "awq", "smooth_quant", "hadamard_rot", "qep")},
            "qwix.contrib.padded_ptq": "PaddedQArray",
        },
        "aqtp": {
            "aqt.jax.v2.config": "config_v4 set_stochastic_rounding",
            "aqt.jax.v2.flax.aqt_flax": "AqtDotGeneral QuantMode FreezerMode",
            "aqt.jax.v2.calibration": "AbsMaxCalibration ConstantCalibration SnrBasedAutoCalibration",
            "aqt.jax.v2.aqt_tensor": "QTensor", "aqt.jax.v2.aqt_quantizer": "make_fake_quant",
            "aqt.jax.v2.utils": "Context",
        },
        "torchao": {
            "torchao.quantization": "quantize_ Int8WeightOnlyConfig Int8Tensor NF4Tensor MappingType PerTensor PerAxis "
            "PerRow PerToken PerGroup quantize_affine dequantize_affine compute_error",
            "torchao.quantization.pt2e": "MinMaxObserver MovingAverageMinMaxObserver HistogramObserver",
        },
        "onnxruntime": {
            "onnxruntime.quantization.calibrate": "MinMaxCalibrater PercentileCalibrater EntropyCalibrater",
            "onnxruntime.quantization.qdq_loss_debug": "", "onnxruntime.quantization": "QuantType quantize_static",
        },
    }[library]  # fmt: skip
    if importlib.util.find_spec({"aqtp": "aqt"}.get(library, library)) is None:
        pytest.skip(f"{library} is not installed")
    program = "".join(
        f"import {module}\n" + "".join(f"{module}.{name}\n" for name in names.split())
        for module, names in modules.items()
    )
    # In a new process, because these libraries warn when they are imported.
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_module_map_is_current() -> None:
    """It names every package and every module, and nothing else."""
    page = module_map.PAGE.read_text()
    assert page == module_map.insert_map(page), f"run {generate.COMMAND}"
    rows = re.findall(r"^\| `(\w+)` \| (?:\S.*) \|$", page, re.MULTILINE)
    modules = [path.stem for path in (ROOT / "jaxquant").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(rows) == sorted(modules), "a module without a docstring"


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


def test_the_methods_of_prepared_that_texts_name_exist() -> None:
    """In the docs, docstrings and messages; "before" in the tables of the changes names old ones."""
    names = {*dir(jq.Prepared), *(field.name for field in dataclasses.fields(jq.Prepared))}
    sources = [path for folder in ("jaxquant", "examples") for path in (ROOT / folder).rglob("*.py")]
    unknown = set()
    for path in (README, *PAGES, *sources):
        for line in path.read_text().splitlines():
            is_row = path.name == "changes.md" and line.startswith("| ")
            text = line.split(" | ", 1)[1] if is_row else line
            found = re.findall(r"\b[Pp]repared\.(\w+)", text)
            unknown |= {f"{path.relative_to(ROOT)}: {name}" for name in found if name not in names}
    assert not unknown
