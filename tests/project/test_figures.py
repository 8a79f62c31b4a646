"""The figures of the README show the measured tables and what ONNX Runtime computes, and are those that are stored."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from benchmarks import figures

NAMES = ("models.svg", "near-tie.svg")


def quantize_in_onnx_runtime(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the codes of ONNX Runtime's QuantizeLinear."""
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["y"])
    scalars = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [float(scale)]),
        helper.make_tensor("zero_point", TensorProto.INT8, [], [0]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT8, x.shape)]
    graph = helper.make_graph([node], "graph", inputs, outputs, scalars)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


def test_the_near_ties_are_those_of_onnx_runtime() -> None:
    ties = figures.compute_near_ties()
    codes = quantize_in_onnx_runtime(ties.x, ties.scale)
    np.testing.assert_array_equal(ties.exact, codes)
    np.testing.assert_array_equal(np.rint(ties.quotients), ties.plain)
    assert (ties.plain != codes).sum() == 30


def test_the_bars_are_the_numbers_of_the_tables() -> None:
    """The tables are read again here, by a search in their text."""
    text = (figures.DOCS / "measured" / "language-model.md").read_text()
    floats, codes = (
        re.search(rf"^\| {name} \| (\S+) \| \S+ \| (.*?) \| \d+ \| \d+ \| (\d+) \|", text, re.MULTILINE)
        for name in ("floats of the file's codes", "8 bits: w8a8_dynamic")
    )
    assert floats is not None
    assert codes is not None
    models = figures.read_models()
    row = next(row for rows in models.values() for row in rows if row.label == "w8a8_dynamic")
    assert row.size == float(codes[1]) / float(floats[1])
    assert row.time == float(codes[3]) / float(floats[3])
    assert codes[2].startswith(row.error.removesuffix(" nats"))
    text = (figures.DOCS / "onnx-quantize.md").read_text()
    for label, column in (("jaxquant", 1), ("ONNX Runtime's quantizer", 2)):
        row = next(row for row in models["RapidOCR, detection, in ONNX Runtime"] if row.label == label)
        found = re.search(r"^\| rapidocr, detection \| [^|]+ \| [^|]+ \| (.+?) \| (.+?) \|", text, re.MULTILINE)
        assert found is not None
        assert found[column] == f"{row.size:.2f}, {row.time:.2f}, {row.error}"


def test_a_missing_row_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"measured/recipes.md has 0 rows named 'int3', not one"):
        figures.read_cells("measured/recipes.md", "int3")


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_figure_is_current(name: str) -> None:
    assert (figures.FOLDER / name).read_text() == figures.draw_all()[name], "run python -m benchmarks.figures"


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_svg_with_a_title_and_without_links(name: str) -> None:
    text = (figures.FOLDER / name).read_text()
    root = ElementTree.fromstring(text)
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert "href" not in text
    assert "prefers-color-scheme: dark" in text
