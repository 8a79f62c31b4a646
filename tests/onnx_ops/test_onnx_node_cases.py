"""onnx's own single-node tests of the operators, through an adapter that reads the model's one node."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.loader import load_node_model_tests

import jaxquant as jq

from ..support import transforms

FUNCTIONS = {
    "QuantizeLinear": jq.quantize_linear,
    "DequantizeLinear": jq.dequantize_linear,
    "DynamicQuantizeLinear": jq.dynamic_quantize_linear,
    "MatMulInteger": jq.matmul_integer,
    "QLinearMatMul": jq.qlinear_matmul,
    "ConvInteger": jq.conv_integer,
    "QLinearConv": jq.qlinear_conv,
}
COUNTS = {
    "QuantizeLinear": 13,
    "DequantizeLinear": 14,
    "DynamicQuantizeLinear": 3,
    "MatMulInteger": 1,
    "QLinearMatMul": 8,
    "ConvInteger": 2,
    "QLinearConv": 1,
}
DTYPES = ("output_dtype", "precision")


@functools.cache  # on first use, not when pytest collects: onnx computes all of its expected results here
def load_cases() -> dict[str, list[Any]]:
    """By op_type, every test whose model is one node of these; the `_expanded` function bodies are other operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own casts, as it computes what it expects
        every = load_node_model_tests()
    cases: dict[str, list[Any]] = {op: [] for op in COUNTS}
    for case in every:
        nodes = [] if case.model is None else case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in cases:
            cases[nodes[0].op_type].append(case)
    return cases


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes as keywords; ONNX's dtype numbers become dtypes, 0 means not given."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for name in DTYPES:
        if values.get(name):
            values[name] = helper.tensor_dtype_to_np_dtype(values[name])
        else:
            values.pop(name, None)
    return values


def operator(node: onnx.NodeProto) -> Any:
    """The jaxquant function of a node, its attributes bound."""
    return functools.partial(FUNCTIONS[node.op_type], **attributes(node))


def array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


@pytest.mark.parametrize("op_type", list(COUNTS))
def test_number_of_cases(op_type: str) -> None:
    assert len(load_cases()[op_type]) == COUNTS[op_type]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("op_type", "index"), [(op, index) for op, count in COUNTS.items() for index in range(count)])
def test_node(op_type: str, index: int, jitted: bool) -> None:
    case = load_cases()[op_type][index]
    op = operator(case.model.graph.node[0])
    for inputs, outputs in case.data_sets:
        actual = jax.tree.leaves((jax.jit(op) if jitted else op)(*map(array, inputs)))
        for g, w in zip(actual, map(array, outputs), strict=True):
            assert g.dtype == w.dtype, case.name
            assert transforms.mismatches(np.asarray(g), w) == 0, case.name
