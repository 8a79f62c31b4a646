"""Models quantized by onnxruntime.quantization, loaded, against ONNX Runtime with all optimizations."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import MODELS, quantize_model, run_runtime

# Kinds of networks that hold only integers, or float operations that both round alike, between input and output.
EXACT = {*((network, kind) for network in ("mlp", "cnn") for kind in ("qdq", "int8", "operators")), ("mlp", "dynamic")}


@pytest.mark.sample(6)
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("kind", ["qdq", "int8", "operators", "dynamic", "nbits"])
@pytest.mark.parametrize("network", list(MODELS))
def test_loaded_model_equals_the_runtime(
    network: str, kind: str, per_channel: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    make, shape = MODELS[network]
    batches = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    model = quantize_model(make(rng), batches, kind, tmp_path, per_channel)
    x = rng.normal(size=shape).astype(np.float32)
    (expected,) = run_runtime(model, {"x": x})
    fn, params = jqonnx.load(model)
    actual = np.asarray(jax.jit(fn)(params, x))
    if (network, kind) in EXACT:
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, atol=0.1)
