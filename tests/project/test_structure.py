"""Limits for how the package is built. `python -m tests.project.structure` prints the figures and what they count."""

from __future__ import annotations

import functools
import pathlib

import pytest

from tests.project import structure

MODULES = 283
CODE_LINES = 45_000
CLOSURE = (17, 68)  # median and 90th percentile
CLOSURE_AT_IMPORT = (17, 68)
PRIVATE_IMPORTS = 0
CYCLES = 0
REPEATED_CLASSES = 0
ANY_PARAMETERS = 819
PLATFORM_CALLS = 0
FRAMES = {
    "jq.matmul(a, q), a float": 7,
    # The example contracts a length that is padded with CUDA, in a frame of its own.
    "jq.matmul(a, q), both quantized": 8,
    "jq.quantize_linear": 7,
    "qnn.Dense": 13,
}
# Names that two functions of one way share.
REPEATED_FUNCTIONS = 0


@functools.cache
def read_source() -> structure.Source:
    return structure.Source()


@functools.cache
def measure() -> structure.Figures:
    return structure.measure(read_source())


@pytest.mark.parametrize(
    ("figure", "limit"),
    [
        ("modules", MODULES),
        ("code_lines", CODE_LINES),
        ("private_imports", PRIVATE_IMPORTS),
        ("cycles", CYCLES),
        ("repeated_classes", REPEATED_CLASSES),
        ("any_parameters", ANY_PARAMETERS),
        ("platform_calls", PLATFORM_CALLS),
    ],
)
def test_figures_are_within_their_limits(figure: str, limit: int) -> None:
    value = getattr(measure(), figure)
    assert value <= limit, "python -m tests.project.structure --list lists what is counted"


def test_modules_depend_on_few_others() -> None:
    assert all(value <= limit for value, limit in zip(measure().closure, CLOSURE, strict=True)), measure().closure
    found = measure().closure_at_import
    assert all(value <= limit for value, limit in zip(found, CLOSURE_AT_IMPORT, strict=True)), found


@functools.cache
def trace_walks() -> dict[str, structure.Walk]:
    return structure.trace_walks()


@pytest.mark.parametrize("name", FRAMES)
def test_calls_reach_their_arithmetic_in_few_frames(name: str) -> None:
    way = trace_walks()[name]
    assert len(way.frames) <= FRAMES[name], way.frames
    assert len(way.repeated) <= REPEATED_FUNCTIONS, way.repeated


def test_closures_and_cycles_are_those_of_a_small_package(tmp_path: pathlib.Path) -> None:
    """Imports of functions count, those for type checkers do not, and a package's own modules are not private to it."""
    files = {
        "__init__.py": "from ._a import f\n",
        "_a.py": "from typing import TYPE_CHECKING\nfrom .p import g\nif TYPE_CHECKING:\n    from .p._q import h\n",
        "p/__init__.py": "from ._q import g, h\n",
        "p/_q.py": "def h():\n    from .. import _a\n",
        "r.py": "from .p import _q\nfrom .p._q import g, h\n",
        "_core/__init__.py": "",
        "_core/_s.py": "",
        "t.py": "import jaxquant._core._s\nfrom ._core import _s\n",
    }
    for name, text in files.items():
        path = tmp_path / "jaxquant" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    source = structure.Source(tmp_path)
    graph = source.graph("module", "function")
    assert structure.find_closures(graph)["jaxquant"] == {"jaxquant._a", "jaxquant.p", "jaxquant.p._q"}
    assert structure.find_cycles(graph) == [["jaxquant._a", "jaxquant.p", "jaxquant.p._q"]]
    assert structure.find_cycles(source.graph("module")) == []
    private = structure.list_private_imports(source.imports)
    assert [(found.importer, found.imported, found.names) for found in private] == [
        ("jaxquant.r", "jaxquant.p._q", 1),
        ("jaxquant.r", "jaxquant.p._q", 2),
    ]
