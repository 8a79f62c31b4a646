"""The oracle itself: models with exact integer products on every processor, beside numpy and ONNX Runtime's own option.

The session option `session.x64quantprecision` = "1" makes products with constant weights exact at the level "all",
but for the cases that `tests.oracles.exact_products` lists.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ..cases.onnx_models import MODELS, quantize_model
from ..oracles import contraction_text
from ..oracles.exact_products import MICROSOFT, make_exact
from ..oracles.onnx_runtime import LEVELS
from ..support import processor

F = np.float32
make_node = helper.make_node
# For each operator: its inputs in order. "x" is the input of the model, and names with a "w" are the weights.
LEFT, RIGHT, RESULT = ["x", "scale", "zero"], ["w", "w_scale", "w_zero"], ["y_scale", "y_zero"]
CODES = [*LEFT, *RIGHT, *RESULT]
SCALES = {"scale": F(0.01), "w_scale": F(0.02), "y_scale": F(2)}
LSTM = ["x", "w", "r_w", *[""] * 5, "scales", "zeros", "scales", "r_zeros"]
NODES: dict[str, Any] = {
    "MatMulInteger": make_node("MatMulInteger", ["x", "w", "zero", "w_zero"], ["y"]),
    "MatMulInteger without zero points": make_node("MatMulInteger", ["x", "w"], ["y"]),
    "QLinearMatMul": make_node("QLinearMatMul", CODES, ["y"]),
    "QLinearConv": make_node("QLinearConv", CODES, ["y"]),
    "QLinearConv in groups": make_node("QLinearConv", CODES, ["y"], group=2),
    "QGemm": make_node("QGemm", [*LEFT, *RIGHT, "", *RESULT], ["y"], domain=MICROSOFT),
    "MatMulIntegerToFloat": make_node(
        "MatMulIntegerToFloat", ["x", "w", "scale", "w_scale", "zero", "w_zero"], ["y"], domain=MICROSOFT
    ),
    "DynamicQuantizeMatMul": make_node("DynamicQuantizeMatMul", ["x", "w", "w_scale"], ["y"], domain=MICROSOFT),
    "DynamicQuantizeLSTM": make_node("DynamicQuantizeLSTM", LSTM, ["y"], domain=MICROSOFT, hidden_size=8),
    "QAttention": make_node(
        "QAttention", ["x", "w", "bias", "scale", "w_scale", "", "zero", "w_zero"], ["y"],
        domain=MICROSOFT, num_heads=2,
    ),
}  # fmt: skip
NUMPY = {
    "MatMulInteger": lambda c: contraction_text.matmul_integer(c["x"], c["w"], c["zero"], c["w_zero"]),
    "MatMulInteger without zero points": lambda c: contraction_text.matmul_integer(c["x"], c["w"]),
    "QLinearMatMul": lambda c: contraction_text.qlinear_matmul(*(c[name] for name in CODES)),
    "QLinearConv": lambda c: contraction_text.qlinear_conv(*(c[name] for name in CODES)),
    "QLinearConv in groups": lambda c: contraction_text.qlinear_conv(*(c[name] for name in CODES), group=2),
    "MatMulIntegerToFloat": lambda c: contraction_text.matmul_integer_to_float(
        *(c[name] for name in ("x", "w", "scale", "w_scale", "zero", "w_zero"))
    ),
    "DynamicQuantizeMatMul": lambda c: contraction_text.dynamic_quantize_matmul(c["x"], c["w"], c["w_scale"]),
}  # fmt: skip


def draw(name: str, rng: np.random.Generator, left: Any = np.uint8) -> dict[str, Any]:
    """Return the inputs of an operator, of large codes, so that most sums of pairs are beyond 16 bits."""
    shapes = {
        "QLinearConv": ((1, 5, 6, 7), (4, 5, 3, 2)),  # an odd number of channels: pairs reach over positions
        "QLinearConv in groups": ((1, 6, 6, 7), (4, 3, 3, 2)),
        "DynamicQuantizeLSTM": ((3, 2, 12), (1, 12, 32)),
        "QAttention": ((2, 3, 16), (16, 48)),
    }
    x, w = shapes.get(name, ((5, 33), (33, 7)))
    low, high = (200, 256) if left == np.uint8 else (72, 128)

    def weights(shape: tuple[int, ...]) -> np.ndarray:
        return rng.choice([-1, 1], shape) * rng.integers(90, 128, shape)

    inputs = {
        "x": rng.integers(low, high, x).astype(left),
        "w": weights(w).astype(np.int8),
        "r_w": weights((1, 8, 32)).astype(np.int8),
        "zero": left(low),
        "w_zero": np.int8(0),
        "y_zero": left(low - 72),
        "bias": np.zeros(48, F),
        "scales": np.array([0.002], F),
        "zeros": np.array([0], np.int8),
        "r_zeros": np.array([0], np.int8),  # the option cannot load an LSTM with one for both
        **SCALES,
    }
    if name.startswith("Dynamic"):
        inputs["x"] = (inputs["x"] - F(228)) / F(28)
    used = {n for n in NODES[name].input if n}
    return {n: np.asarray(a) for n, a in inputs.items() if n in used}


def make_model(node: Any, inputs: dict[str, Any], feeds: tuple[str, ...], opset: int = 21) -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(inputs[n].dtype), inputs[n].shape)
        for n in feeds
    ]
    constants = [numpy_helper.from_array(np.asarray(a), n) for n, a in inputs.items() if n not in feeds]
    graph = helper.make_graph([node], "g", given, [helper.make_empty_tensor_value_info("y")], constants)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def run(model: onnx.ModelProto, feeds: dict[str, Any], level: str = "all", precision: str = "0") -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", precision)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("name", list(NODES))
def test_operators(name: str, rng: np.random.Generator) -> None:
    """With constant weights, and with weights that are inputs, at every level, numpy gives the model's result."""
    inputs = draw(name, rng)
    # The session option leaves QLinearMatMul of opset 21 as it is.
    expected = run(make_model(NODES[name], inputs, ("x",), 20), {"x": inputs["x"]}, precision="1")
    if name in NUMPY:
        np.testing.assert_array_equal(NUMPY[name](inputs), expected)
    weights = tuple(n for n in ("w", "r_w") if n in inputs)
    for feeds in (("x",), ("x", *weights)):
        model = make_model(NODES[name], inputs, feeds)
        exact = make_exact(model)
        assert exact != model
        for level in LEVELS:
            y = run(exact, {n: inputs[n] for n in feeds}, level)
            np.testing.assert_array_equal(y, expected, err_msg=f"{feeds} {level}")
    saturated = run(make_model(NODES[name], inputs, ("x",), 20), {"x": inputs["x"]})
    assert (saturated != expected).any() == processor.saturates()


@pytest.mark.parametrize("name", ["QLinearMatMul", "QLinearConv", "QGemm"])
def test_int8_left_factors_stay(name: str, rng: np.random.Generator) -> None:
    """ONNX Runtime has no kernel for int8 by uint8, and its kernel for int8 by int8 is exact."""
    inputs = draw(name, rng, np.int8)
    model = make_model(NODES[name], inputs, ("x",))
    exact = make_exact(model)
    assert list(exact.graph.node) == list(model.graph.node)
    assert list(exact.graph.initializer) == list(model.graph.initializer)


def test_floats_between_quantization_and_a_product(rng: np.random.Generator) -> None:
    """DequantizeLinear, a Transpose and MatMul become one product of codes; the weights also serve an int8 factor."""
    x, w = rng.integers(200, 256, (5, 33)).astype(np.uint8), rng.integers(90, 128, (7, 33)).astype(np.int8)
    nodes = [
        make_node("DequantizeLinear", ["x", "scale"], ["floats"]),
        make_node("DequantizeLinear", ["w", "w_scale"], ["weights"]),
        make_node("Transpose", ["weights"], ["turned"], perm=[1, 0]),
        make_node("MatMul", ["floats", "turned"], ["product"]),
        make_node("QuantizeLinear", ["product", "y_scale", "y_zero"], ["y"]),
        make_node("MatMul", ["weights", "turned"], ["square"]),
        make_node("QuantizeLinear", ["square", "y_scale", "w_zero"], ["z"]),
    ]
    constants = {**SCALES, "w": w, "w_zero": np.int8(0), "y_zero": np.uint8(3)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_empty_tensor_value_info(name) for name in "yz"],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    zeros = (np.uint8(0), np.int8(0))
    expected = contraction_text.qlinear_matmul(
        x, SCALES["scale"], zeros[0], w.T, SCALES["w_scale"], zeros[1], SCALES["y_scale"], np.uint8(3)
    )
    for level in ("extended", "all"):
        np.testing.assert_array_equal(run(make_exact(model), {"x": x}, level), expected)


def test_convolutions_by_unsigned_weights(rng: np.random.Generator) -> None:
    """The left factor of ConvInteger is the weights: of uint8, by int8 codes, with padding of their zero point."""
    x, w = rng.integers(90, 128, (1, 5, 6, 7)).astype(np.int8), rng.integers(200, 256, (4, 5, 3, 2)).astype(np.uint8)
    node = make_node("ConvInteger", ["x", "w", "zero", "w_zero"], ["y"], pads=[1, 1, 1, 1])
    model = make_model(node, {"x": x, "w": w, "zero": np.int8(-7), "w_zero": np.uint8(9)}, ("x",))
    expected = contraction_text.conv_integer(x, w, np.int8(-7), np.uint8(9), pads=[1, 1, 1, 1])
    for level in LEVELS:
        np.testing.assert_array_equal(run(make_exact(model), {"x": x}, level), expected)
    assert (run(model, {"x": x}) != expected).any() == processor.saturates()


@pytest.mark.slow
def test_a_product_in_the_body_of_a_loop(rng: np.random.Generator) -> None:
    """The weights are constants of the graph around it."""
    inputs = draw("MatMulInteger", rng)
    infos = [helper.make_tensor_value_info(n, kind, []) for n, kind in (("i", 7), ("more", 9))]
    nodes = [NODES["MatMulInteger"], make_node("Identity", ["more"], ["again"])]
    outputs = [helper.make_tensor_value_info("again", TensorProto.BOOL, []), helper.make_empty_tensor_value_info("y")]
    body = helper.make_graph(nodes, "body", infos, outputs)
    model = make_model(make_node("Loop", ["count", ""], ["y"], body=body), {**inputs, "count": np.array(2)}, ("x",))
    for level in LEVELS:
        y = run(make_exact(model), {"x": inputs["x"]}, level)
        np.testing.assert_array_equal(y, np.stack([NUMPY["MatMulInteger"](inputs)] * 2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["qdq", "operators", "dynamic"])
@pytest.mark.parametrize("network", list(MODELS))
def test_networks(network: str, kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Whole models, as onnxruntime quantizes them, beside ONNX Runtime's option."""
    make, shape = MODELS[network]
    batches = [rng.normal(size=shape).astype(F) for _ in range(3)]
    model = quantize_model(make(rng), batches, kind, tmp_path, per_channel=bool(rng.integers(2)))
    exact = make_exact(model)
    assert exact != model
    # The option leaves QLinearMatMul of opset 21 as it is.
    next(entry for entry in model.opset_import if not entry.domain).version = 20
    expected = run(model, {"x": batches[0]}, precision="1")
    np.testing.assert_array_equal(run(exact, {"x": batches[0]}), expected)
