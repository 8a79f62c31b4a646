"""Float operators between DequantizeLinear and QuantizeLinear: what ONNX Runtime fuses them to gives our codes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jaxquant as jq

from ..cases import microsoft_exactness as cases
from ..oracles import onnx_runtime

F = np.float32
LEVELS = {
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def build_model(op: str, inputs: list[tuple[Any, Any, Any]], output: tuple[Any, Any], **attributes: Any) -> Any:
    """Return a model: each input dequantized, the operator, its result quantized. The scales are constants."""
    constants, nodes, names = [], [], []
    for i, (_, scale, point) in enumerate([*inputs, (None, *output)]):
        constants += [numpy_helper.from_array(np.asarray(v), f"{n}{i}") for n, v in (("s", scale), ("z", point))]
    for i in range(len(inputs)):
        nodes.append(helper.make_node("DequantizeLinear", [f"x{i}", f"s{i}", f"z{i}"], [f"f{i}"]))
        names.append(f"f{i}")
    nodes.append(helper.make_node(op, names, ["f"], **attributes))
    last = len(inputs)
    nodes.append(helper.make_node("QuantizeLinear", ["f", f"s{last}", f"z{last}"], ["y"]))
    kind = helper.np_dtype_to_tensor_dtype(np.asarray(output[1]).dtype)
    given = [helper.make_tensor_value_info(f"x{i}", kind, x.shape) for i, (x, _, _) in enumerate(inputs)]
    graph = helper.make_graph(nodes, op, given, [helper.make_tensor_value_info("y", kind, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)


def run(model: Any, inputs: list[tuple[Any, Any, Any]], level: Any, path: pathlib.Path) -> tuple[set[str], np.ndarray]:
    """Return the operators of the optimized model and the codes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y = session.run(None, {f"x{i}": x for i, (x, _, _) in enumerate(inputs)})[0]
    return {node.op_type for node in onnx.load(path).graph.node}, np.asarray(y)


BINARY = ((3, 4, 50), (4, 50))
IMAGE = ((2, 6, 8, 9),)
CASES: dict[str, tuple[str, tuple[Any, ...], float, Callable[..., Any], dict[str, Any]]] = {
    "QLinearAdd": ("Add", BINARY, 1.0, lambda a, b, y: jq.ops.qlinear_add(*a, *b, *y), {}),
    "QLinearMul": ("Mul", BINARY, 50.0, lambda a, b, y: jq.ops.qlinear_mul(*a, *b, *y), {}),
    "QLinearConcat": (
        "Concat", ((3, 50), (2, 50)), 1.0, lambda a, b, y: jq.ops.qlinear_concat(*y, *a, *b, axis=0), {"axis": 0}
    ),
    "QLinearAveragePool": (
        "AveragePool", IMAGE, 1.0,
        lambda x, y: jq.ops.qlinear_average_pool(*x, *y, kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 2]),
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2]},
    ),
    "QLinearGlobalAveragePool": (
        "GlobalAveragePool", IMAGE, 0.2, lambda x, y: jq.ops.qlinear_global_average_pool(*x, *y), {}
    ),
    "QLinearSigmoid": ("Sigmoid", ((5, 60),), 1 / 32, lambda x, y: jq.ops.qlinear_sigmoid(*x, *y), {}),
    "QLinearLeakyRelu": (
        "LeakyRelu", ((5, 60),), 1.0, lambda x, y: jq.ops.qlinear_leaky_relu(*x, *y, alpha=0.2), {"alpha": 0.2}
    ),
    "QLinearSoftmax": ("Softmax", ((5, 60),), 0.01, lambda x, y: jq.ops.qlinear_softmax(*x, *y), {"axis": -1}),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize("node", list(CASES))
def test_fused_nodes(node: str, level: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    if not cases.is_fused():
        pytest.skip("ONNX Runtime has other kernels on this machine")
    if node == "QLinearSoftmax" and onnx_runtime.VERSION < (1, 32):
        pytest.skip("before 1.32, ONNX Runtime rounded products that jaxquant does not round")
    op, shapes, factor, call, attributes = CASES[node]
    for name in cases.BYTES:
        point = np.dtype(name).type
        inputs = [
            (cases.draw_codes(rng, name, shape), cases.draw_scale(rng), cases.draw_point(rng, name)) for shape in shapes
        ]
        output = (F(cases.draw_scale(rng) * F(factor)), point(cases.draw_point(rng, name)))
        model = build_model(op, inputs, output, **attributes)
        kernels, y = run(model, inputs, LEVELS[level], tmp_path / f"{name}.onnx")
        if node not in kernels:
            # Not every operator is fused for int8: then the floats between are another program.
            assert name == "int8", kernels
            continue
        np.testing.assert_array_equal(np.asarray(call(*inputs, output)), y, err_msg=f"{name} {kernels}")
