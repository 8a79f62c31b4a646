"""Models that protobuf cannot write in one piece: two files, which are read, checked and verified as one is."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx
from jaxquant.onnx import model_size

from ..cases.onnx_models import run_runtime


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make models of 4 kB large."""
    monkeypatch.setattr(model_size, "LARGEST_MESSAGE", 4096)


def make_function(rng: np.random.Generator) -> tuple[Any, dict[str, Any], np.ndarray]:
    params = {
        "first": jq.quantize(rng.normal(size=(64, 96)).astype(np.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(1))),
        "second": jnp.asarray(rng.normal(size=(96, 8)), jnp.float32),
    }

    def function(params: Any, x: Any) -> Any:
        return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-3.0, 3.0)), params["first"]) @ params["second"]

    return function, params, rng.normal(size=(4, 64)).astype(np.float32)


def test_two_files(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    function, params, x = make_function(rng)
    model = jqonnx.export(function, params, [x])
    path = tmp_path / "model.onnx"
    for _ in range(2):  # a second time, over the files that are there
        jqonnx.save(model, path)
        sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
        assert sizes[0] < 4096
        assert sizes[1] < 64 * 96 + 4 * 96 * 8 + 4 * 4096  # aligned to pages
    assert len(model.graph.initializer[0].raw_data) > 0, "the model keeps its arrays"
    onnxruntime.InferenceSession(path)  # it finds the second file
    (expected,) = run_runtime(onnx.load(path), {"x": x})
    loaded, arrays = jqonnx.load(path)
    # Sums of 96 products of some hundreds, in another order than that of the runtime.
    np.testing.assert_allclose(loaded(arrays, x), expected, rtol=1e-5, atol=1e-3)
    assert jqonnx.verify(path, lambda x: function(params, x), [(x,)]).is_exact


@pytest.mark.parametrize("most", [4096, 2**30])
def test_names_of_files(
    most: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """A suffix chooses no other format, and a folder that is missing is an OSError for files of each size."""
    monkeypatch.setattr(model_size, "LARGEST_MESSAGE", most)
    function, params, x = make_function(rng)
    model = jqonnx.export(function, params, [x])
    jqonnx.save(model, tmp_path / "model.json")
    jqonnx.load(tmp_path / "model.json")
    with pytest.raises(FileNotFoundError, match="none"):
        jqonnx.save(model, tmp_path / "none" / "model.onnx")


def test_a_model_in_memory(rng: np.random.Generator) -> None:
    function, params, x = make_function(rng)
    model = jqonnx.export(function, params, [x])
    assert model_size.count_bytes(model) == pytest.approx(model.ByteSize(), rel=0.1)
    jqonnx.check(model)
    loaded, arrays = jqonnx.load(model)
    np.testing.assert_allclose(loaded(arrays, x), function(params, x), rtol=1e-5, atol=1e-3)
    assert jqonnx.verify(model, lambda x: function(params, x), [(x,)]).is_exact


def test_arrays_with_a_wrong_length_are_refused(rng: np.random.Generator) -> None:
    """The checker does not see them, but the loader does."""
    function, params, x = make_function(rng)
    model = jqonnx.export(function, params, [x])
    large = next(t for t in model.graph.initializer if t.name == "second")
    large.raw_data = large.raw_data[:-4]
    with pytest.raises(jqonnx.ModelError, match="'second': expected 3072 bytes"):
        jqonnx.load(model)
    model.graph.initializer.remove(large)
    model.graph.initializer.append(onnx.TensorProto(name="second", dims=[2**40], data_type=1, raw_data=bytes(5000)))
    with pytest.raises(jqonnx.ModelError):
        jqonnx.load(model)
