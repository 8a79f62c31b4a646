"""Exported models in OpenVINO, where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from .openvino_codes import (
    count_differences,
    make_integer_cnn,
    make_integer_mlp,
    quantize_as_openvino,
    run_openvino,
)

pytest.importorskip("openvino")


@pytest.mark.parametrize(("zero_point", "dtype"), [(128, np.uint8), (3, np.uint8), (0, np.int8), (-5, np.int8)])
def test_its_codes_have_its_formula(zero_point: int, dtype: type, rng: np.random.Generator) -> None:
    scale = np.float32(rng.uniform(0.01, 0.1))
    x = (rng.integers(-300, 300, 5000) / 2).astype(np.float32) * scale
    arrays = [
        numpy_helper.from_array(np.asarray(scale), "s"),
        numpy_helper.from_array(np.asarray(zero_point, dtype), "z"),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs, outputs = (
        [helper.make_tensor_value_info(n, k, x.shape)] for n, k in (("x", TensorProto.FLOAT), ("y", kind))
    )
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    graph = helper.make_graph([node], "g", inputs, outputs, arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    np.testing.assert_array_equal(run_openvino(model, x)[0], quantize_as_openvino(x, scale, zero_point, dtype))


@pytest.mark.parametrize("make", [make_integer_mlp, make_integer_cnn])
def test_integer_networks_differ_by_few_codes(make, rng: np.random.Generator) -> None:
    function, x = make(rng)
    elements, differing, largest = count_differences(function, x, "qdq")
    assert differing <= elements // 10
    assert largest <= 2
