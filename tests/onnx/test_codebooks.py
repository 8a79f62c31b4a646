"""Weights of codebooks, and with offsets, in exported models: the file keeps their codes, and looks up the levels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import jaxquant as jq
from jaxquant import Blocked, QuantSpec
from jaxquant import onnx as jqonnx

FOUR = jq.Codebook("four", (-1, 0.25, 0.5, 1))
EIGHT = jq.Codebook("eight", (-1, -0.5, -0.2, 0, 0.1, 0.3, 0.6, 1))
MANY = jq.Codebook("many", tuple(np.linspace(-1, 1, 256) ** 3))
SCALES = QuantSpec("uint6", Blocked(0, 2), scale_dtype="float16")
SPECS = {
    "nf4": QuantSpec(jq.nf4, Blocked(0, 16)),
    "nf4 of columns": QuantSpec(jq.nf4, jq.PerAxis(1), scale_dtype="bfloat16"),
    "nf4 with quantized scales": QuantSpec(jq.nf4, Blocked(0, 16), scale_spec=QuantSpec("int8", Blocked(0, 2))),
    "4 levels": QuantSpec(FOUR, Blocked(0, 16)),
    "8 levels": QuantSpec(EIGHT, Blocked(0, 16), scale_dtype="float16"),
    "256 levels": QuantSpec(MANY),
    "offset": QuantSpec("uint4", Blocked(0, 16), offset=True, scale_dtype="float16"),
    "offset with quantized scales": QuantSpec("uint4", Blocked(0, 16), offset=True, scale_spec=SCALES),
}


@pytest.mark.parametrize("opset", [None, 19])
@pytest.mark.parametrize("name", SPECS)
def test_the_file_holds_the_codes(name: str, opset: int | None, rng: np.random.Generator) -> None:
    q = jq.quantize(jnp.asarray(rng.normal(size=(64, 24)), jnp.float32), SPECS[name])

    def function(x: jax.Array) -> jax.Array:
        return jq.matmul(x, q)

    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32)
    model = jqonnx.export(function, [x], **({} if opset is None else {"opset": opset}))
    onnx.checker.check_model(model)
    tensors = [t for t in model.graph.initializer if tuple(t.dims) == (64, 24)]
    assert len(tensors) == 1
    codes = numpy_helper.to_array(tensors[0])
    np.testing.assert_array_equal(codes.astype(np.uint8), np.asarray(q.codes).astype(np.uint8))
    if q.codebook is not None:
        has_half_bytes = opset is None and q.codes.dtype == ml_dtypes.uint4
        assert tensors[0].data_type == (TensorProto.UINT4 if has_half_bytes else TensorProto.UINT8)
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, function, [x], level=level, tolerance=1e-5)
        assert report.is_exact, str(report)
    loaded, params = jqonnx.load(model)
    np.testing.assert_allclose(loaded(params, x), np.asarray(x) @ np.asarray(q.dequantize()), rtol=0, atol=2e-5)
