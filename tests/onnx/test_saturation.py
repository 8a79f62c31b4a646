"""Products that saturate on some processors: they are found from the weights, and written so that none does.

The tests hold on processors with and without VNNI. Activations of at most 127 cannot saturate (127 * 256 = 32512), so
with these ONNX Runtime is an oracle on each of them; with all activations the oracle is numpy.
"""

import itertools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx
from jaxquant.onnx import saturation

LEVELS = ("disabled", "basic", "extended", "all")
MICROSOFT = "com.microsoft"
K, N = 16, 5


def make_model(nodes, inputs, outputs, constants, opset=21, functions=()):
    """Return a model; inputs and outputs are pairs of an array and an element type."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in inputs
    ]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs]
    arrays = [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
    graph = helper.make_graph(nodes, "test", infos, results, arrays)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, functions=functions)


def make_weights(rng, shape):
    """Return int8 weights with many pairs of neighbors that can saturate."""
    return rng.integers(-128, 128, shape).astype(np.int8)


def make_codes(rng, shape, most=127):
    return rng.integers(0, most + 1, shape).astype(np.uint8)


def make_product(operator, rng, **attributes):
    """Return the model of one operator with constant int8 weights, and its input."""
    w, scales = make_weights(rng, (K, N)), rng.uniform(0.01, 0.02, N).astype(np.float32)
    w[:, 0] = 100  # at least one pair can saturate
    x, kind, domain, opset = make_codes(rng, (4, K)), TensorProto.UINT8, "", attributes.pop("opset", 21)
    constants = {
        "w": w, "ws": scales, "wz": np.zeros(N, np.int8), "xs": np.float32(0.02), "xz": np.uint8(3),
        "ys": np.float32(0.3), "yz": np.uint8(7), "z": np.int8(0), "s": np.float32(0.01),
    }  # fmt: skip
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    if operator == "MatMulInteger":
        names, kind = ["x", "w", "xz"], TensorProto.INT32
    elif operator == "QGemm":
        constants["b"] = rng.integers(-500, 500, N).astype(np.int32)
        domain, names = MICROSOFT, [*names[:6], "b", *names[6:]]
        if attributes.get("transB"):
            constants["w"] = np.ascontiguousarray(w.T)
    elif operator == "QLinearConv":
        group, shape = attributes.get("group", 1), attributes.pop("shape", (6, 3, 3, 2))
        constants["w"] = make_weights(rng, shape)
        constants["w"][0] = 100
        constants["ws"] = rng.uniform(0.01, 0.02, shape[0]).astype(np.float32)
        constants["wz"] = np.zeros(shape[0], np.int8)
        x = make_codes(rng, (2, shape[1] * group, *(5 for _ in shape[2:])))
        domain = attributes.pop("domain", "")
    elif operator == "MatMulIntegerToFloat":
        domain, names, kind = MICROSOFT, ["x", "w", "xs", "ws", "xz", "wz"], TensorProto.FLOAT
    elif operator == "DynamicQuantizeMatMul":
        # The range 0 to 2, of codes with a real range that ends at 255: 127 steps at most are used.
        x = np.append(rng.uniform(0, 1, (3, K)), np.zeros((1, K)), axis=0).astype(np.float32)
        x[3, 0] = 2.0
        domain, names, kind = MICROSOFT, ["x", "w", "ws", "wz"], TensorProto.FLOAT
    node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    return make_model([node], [("x", x)], [("y", kind)], constants, opset), x


PRODUCTS = {
    "MatMulInteger": {},
    "QLinearMatMul": {"opset": 20},
    "QLinearMatMul-21": {},
    "QGemm": {},
    "QGemm-transB": {"transB": 1},
    "QLinearConv": {"pads": [1, 1, 1, 1]},
    "QLinearConv-1d": {"shape": (6, 3, 4)},
    "QLinearConv-3d": {"shape": (4, 2, 2, 2, 2)},
    "QLinearConv-groups": {"group": 2, "shape": (6, 4, 3, 3)},
    "QLinearConv-multiplier": {"group": 3, "shape": (6, 1, 2, 2)},
    "MatMulIntegerToFloat": {},
    "DynamicQuantizeMatMul": {},
}


def run(model, x, level="all"):
    from jaxquant.onnx.session import open_session

    return open_session(model, level).run(None, {"x": x})[0]


def test_a_pair_saturates_if_and_only_if_activations_take_it_out_of_int16():
    weights = np.arange(-128, 128).astype(np.int8)
    wide = weights.astype(int)
    extremes = [a * wide[:, None] + b * wide for a, b in itertools.product((0, 255), repeat=2)]
    leaves = (np.max(extremes, axis=0) > 32767) | (np.min(extremes, axis=0) < -32768)
    pairs = jnp.stack([jnp.repeat(weights, 256), jnp.tile(weights, 256)])
    count = jax.jit(jax.vmap(jq.count_saturating_pairs, in_axes=1))(pairs)
    np.testing.assert_array_equal(np.asarray(count).reshape(256, 256), leaves)
    assert leaves.sum() > 16000


def test_only_int8_codes_have_saturating_pairs(rng):
    w = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    specs = [jq.QuantSpec(dtype) for dtype in (jnp.int4, jnp.uint8, jnp.uint4, jnp.int16, jnp.float8_e4m3fn, jq.nf4)]
    specs += [jq.QuantSpec(jnp.int8, reduce_range=True), jq.QuantSpec(jnp.int8, reduce_range=True, symmetric=False)]
    for spec in specs:
        assert not jq.count_saturating_pairs(jq.quantize(10 * jnp.abs(w), spec))
        assert not jq.count_saturating_pairs(jq.quantize(-10 * jnp.abs(w), spec))
    codes = jq.quantize(jnp.abs(w) + 1, jq.QuantSpec(jnp.int8), range=(-1.0, 1.0)).codes
    assert jq.count_saturating_pairs(codes) == 28
    assert jq.count_saturating_pairs(codes, contracting_axis=1) == 24


def test_bad_weights_have_an_error_of_this_function():
    with pytest.raises(TypeError, match="count_saturating_pairs: weights: expected"):
        jq.count_saturating_pairs(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="count_saturating_pairs: contracting_axis: expected"):
        jq.count_saturating_pairs(jnp.ones((2, 2), jnp.int8), contracting_axis=2)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_found_and_moved_weights_give_its_integers(name, rng):
    model, x = make_product(name.split("-")[0], rng, **PRODUCTS[name])
    original = model.SerializeToString()
    product: Any
    (product,) = jqonnx.find_saturating_products(model)
    assert product.operator == name.split("-")[0]
    assert product.weights == "w"
    assert 0 < product.pairs <= product.all_pairs
    moved = jqonnx.convert_weights_to_uint8(model)
    assert model.SerializeToString() == original
    assert jqonnx.find_saturating_products(moved) == ()
    assert not any(tensor.name == "w" for tensor in moved.graph.initializer)
    for level in LEVELS:
        np.testing.assert_array_equal(run(moved, x, level), run(model, x, level), err_msg=level)


@pytest.mark.parametrize("level", LEVELS)
def test_sums_of_all_activations_are_exact(level, rng):
    model, _ = make_product("MatMulInteger", rng)
    w = numpy_helper.to_array(model.graph.initializer[0]).astype(np.int64)
    # Windows of two weights with a sum far from 0, so that the kernel without VNNI saturates.
    x = np.where(rng.integers(0, 2, (4, K)) == 1, 255, make_codes(rng, (4, K), 255)).astype(np.uint8)
    expected = (x.astype(np.int64) - 3) @ w
    np.testing.assert_array_equal(run(jqonnx.convert_weights_to_uint8(model), x, level), expected)
    np.testing.assert_array_equal(jqonnx.make_session(model, level=level).run(None, {"x": x})[0], expected)


def test_weights_that_share_scales_and_constants_are_moved_once(rng):
    w = make_weights(rng, (K, K))
    nodes = [
        helper.make_node("MatMulInteger", ["x", "w", "xz", "z"], ["first"]),
        helper.make_node("MatMulInteger", ["x", "w", "xz"], ["second"]),
        helper.make_node("Cast", ["w"], ["floats"], to=TensorProto.FLOAT),  # a reader that keeps the int8 weights
        helper.make_node("ReduceSum", ["floats"], ["third"], keepdims=0),
    ]
    x = make_codes(rng, (4, K))
    results = [("first", TensorProto.INT32), ("second", TensorProto.INT32), ("third", TensorProto.FLOAT)]
    model = make_model(nodes, [("x", x)], results, {"w": w, "xz": np.uint8(3), "z": np.int8(-5)})
    moved = jqonnx.convert_weights_to_uint8(model)
    assert (
        sum(tensor.data_type == TensorProto.UINT8 and len(tensor.dims) == 2 for tensor in moved.graph.initializer) == 1
    )
    session = jqonnx.make_session(moved)
    first, second, third = session.run(None, {"x": x})
    np.testing.assert_array_equal(first, (x.astype(int) - 3) @ (w.astype(int) + 5))
    np.testing.assert_array_equal(second, (x.astype(int) - 3) @ w.astype(int))
    assert third == w.astype(np.float32).sum()


def test_computed_weights_are_moved_by_nodes(rng):
    x, w = make_codes(rng, (4, K), 255), make_weights(rng, (N, K))
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("MatMulInteger", ["x", "t"], ["y"]),
    ]
    model = make_model(nodes, [("x", x), ("w", w)], [("y", TensorProto.INT32)], {})
    (product,) = jqonnx.find_saturating_products(model)
    assert product.pairs is None
    assert "computed weights" in str(product)
    for level in LEVELS:
        session = jqonnx.make_session(jqonnx.convert_weights_to_uint8(model), level=level)
        np.testing.assert_array_equal(session.run(None, {"x": x, "w": w})[0], x.astype(int) @ w.T.astype(int))


def test_nodes_that_move_weights_are_inserted_in_linear_time(rng):
    constants = {"z": np.uint8(3), "w": make_weights(rng, (K, K)), "s": np.float32(0.02)}
    x, calls = make_codes(rng, (2, K)), []
    for count in (50, 200):
        nodes = []
        for i in range(count):
            nodes += [
                helper.make_node("Transpose", ["w"], [f"w{i}"], perm=[1, 0]),
                helper.make_node("MatMulInteger", ["x" if i == 0 else f"codes{i}", f"w{i}", "z"], [f"sum{i}"]),
                helper.make_node("Cast", [f"sum{i}"], [f"float{i}"], to=TensorProto.FLOAT),
                helper.make_node("QuantizeLinear", [f"float{i}", "s", "z"], [f"codes{i + 1}"]),
            ]
        model = make_model(nodes, [("x", x)], [(f"codes{count}", TensorProto.UINT8)], constants)
        moved, called = count_calls(lambda model=model: jqonnx.convert_weights_to_uint8(model))
        calls.append(called)
        types = [node.op_type for node in moved.graph.node]
        assert types == ["Transpose", "Cast", "Add", "Cast", "MatMulInteger", "Cast", "QuantizeLinear"] * count
    assert calls[1] < 4.2 * calls[0]


def count_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a function returns, and the number of calls of functions, of Python and of C, that it takes."""
    calls = 0

    def count(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # A tool that measures coverage sets a profile, too.
    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(previous)
    return result, calls


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("scale_is_known", [False, True])
@pytest.mark.parametrize("has_point", [False, True])
def test_dequantized_weights_keep_their_values(per_column, scale_is_known, has_point, rng):
    w, scale = make_weights(rng, (K, N)), rng.uniform(0.01, 0.02, N).astype(np.float32)
    scale = scale if per_column else scale[0]
    constants = {"w": w, "xs": np.float32(0.02), "xz": np.uint8(3), "ys": np.float32(0.3), "yz": np.uint8(7)}
    constants |= {"scale" if scale_is_known else "half": scale if scale_is_known else scale / 2}
    constants |= {"wz": np.zeros_like(scale, np.int8)} if has_point else {}
    nodes = [] if scale_is_known else [helper.make_node("Add", ["half", "half"], ["scale"])]
    nodes += [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "scale", *(["wz"] if has_point else [])], ["b"], axis=1),
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["y"]),
    ]
    x = make_codes(rng, (4, K))
    model = make_model(nodes, [("x", x)], [("y", TensorProto.UINT8)], constants)
    (product,) = jqonnx.find_saturating_products(model)
    assert product.operator == "MatMul"
    moved = jqonnx.convert_weights_to_uint8(model)
    assert jqonnx.find_saturating_products(moved) == ()
    for level in LEVELS:
        np.testing.assert_array_equal(run(moved, x, level), run(model, x, level), err_msg=level)


def test_kernels_that_are_exact_everywhere_are_not_listed(rng):
    depthwise, _ = make_product("QLinearConv", rng, group=4, shape=(4, 1, 3, 3))
    assert jqonnx.find_saturating_products(depthwise) == ()
    constants: dict[str, Any] = {"w": make_weights(rng, (4, 3, 3, 3))}
    image = make_codes(rng, (1, 3, 5, 5))
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"])
    model = make_model([node], [("x", image)], [("y", TensorProto.INT32)], constants)
    assert jqonnx.find_saturating_products(model) == ()
    for x_dtype, w in ((np.int8, make_weights(rng, (K, N))), (np.uint8, make_codes(rng, (K, N), 255))):
        node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
        model = make_model([node], [("x", np.zeros((2, K), x_dtype))], [("y", TensorProto.INT32)], {"w": w})
        assert jqonnx.find_saturating_products(model) == ()


def test_products_in_bodies_and_functions_are_found_and_moved(rng):
    w, x = make_weights(rng, (K, K)), make_codes(rng, (3, K), 255)
    body = helper.make_graph(
        [helper.make_node("MatMulInteger", ["row", "w"], ["sums"])], "body",
        [helper.make_tensor_value_info("row", TensorProto.UINT8, [K])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, [K])],
    )  # fmt: skip
    function = helper.make_function(
        "local", "product", ["a", "b"], ["c"], [helper.make_node("MatMulInteger", ["a", "b"], ["c"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Scan", ["x"], ["y"], body=body, num_scan_inputs=1),
        helper.make_node("product", ["x", "w"], ["z"], domain="local"),
    ]
    model = make_model(
        nodes, [("x", x)], [("y", TensorProto.INT32), ("z", TensorProto.INT32)], {"w": w}, 21, [function]
    )
    found = jqonnx.find_saturating_products(model)
    assert len(found) == 2
    assert all(product.pairs for product in found)
    moved = jqonnx.convert_weights_to_uint8(model)
    assert jqonnx.find_saturating_products(moved) == ()
    for result in jqonnx.make_session(moved, level="disabled").run(None, {"x": x}):
        np.testing.assert_array_equal(result, x.astype(int) @ w.astype(int))


def test_pairs_of_a_convolution_run_over_channels_first():
    # Two channels and two positions: the kernel adds the channels of a position, not the positions of a channel.
    w = np.zeros((1, 2, 1, 2), np.int8)
    w[0, :, 0, 0] = 100
    assert saturation.count_pairs("QLinearConv", w, {}) == (1, 2)
    w = np.zeros((1, 2, 1, 2), np.int8)
    w[0, 0] = 100
    assert saturation.count_pairs("QLinearConv", w, {}) == (0, 2)


def make_layer(rng, **attributes):
    w = jq.quantize(
        jnp.asarray(rng.normal(size=(64, 8)), jnp.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(1), **attributes)
    )
    return lambda x: jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(0.0, 1.0)), w)


def test_export_warns_of_products_that_can_saturate(rng):
    x = jnp.ones((4, 64))
    with pytest.warns(
        jqonnx.SaturationWarning, match=r"jaxquant.onnx.export: .* of 256 pairs of weights.*weights=\"uint8\""
    ):
        jqonnx.export(make_layer(rng), [x])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jqonnx.export(make_layer(rng), [x], weights="int8")
        jqonnx.export(make_layer(rng, reduce_range=True), [x])
        model = jqonnx.export(make_layer(rng), [x], weights="uint8")
    assert jqonnx.find_saturating_products(model) == ()
    with pytest.raises(ValueError, match=r"onnx[.]export: weights: expected 'int8' or 'uint8'"):
        jqonnx.export(make_layer(rng), [x], weights="int4")


@pytest.mark.parametrize("form", ["operators", "qdq"])
@pytest.mark.parametrize("remedy", [{"weights": "uint8"}, {"reduce_range": True}])
def test_both_remedies_are_exact_in_a_plain_session(form, remedy, rng):
    weights = remedy.get("weights", "int8")
    layer = make_layer(rng, reduce_range="reduce_range" in remedy)
    output = jq.Quantizer(jq.QuantSpec(jnp.uint8), 0.1, 128)
    spec = jq.QuantSpec(jnp.int8, jq.PerAxis(1), reduce_range="reduce_range" in remedy)
    kernel = jq.quantize(jnp.asarray(rng.normal(size=(8, 6)), jnp.float32), spec)

    def network(x):
        return jq.matmul(jq.quantize(layer(x), jq.QuantSpec(jnp.uint8), range=(-9.0, 9.0)), kernel, output=output).codes

    x = jnp.asarray(rng.uniform(0.9, 1.1, (4, 64)), jnp.float32)
    model = jqonnx.export(network, [x], form=form, weights=weights, batch="N")
    report = jqonnx.verify(model, network, [x])
    assert report.is_exact_in_plain_session
    assert report.saturating == ()
    loaded, params = jqonnx.load(model)
    np.testing.assert_array_equal(loaded(params, x), network(x))


def test_verify_compares_with_exact_sums_and_says_what_a_plain_session_gives(rng):
    w = jnp.asarray(np.where(rng.integers(0, 2, (64, 8)), 127, 120), jnp.int8)
    layer = lambda x: jq.matmul_integer(x, w)  # noqa: E731
    x = jnp.asarray(make_codes(rng, (4, 64), 255))
    model = jqonnx.export(layer, [x], weights="int8")
    report: Any = jqonnx.verify(model, layer, [x])
    text = str(report)
    assert report.is_exact
    assert len(report.saturating) == 1
    assert 'weights="uint8"' in text
    assert report.processor_saturates == jqonnx.probe_saturation() != report.is_exact_in_plain_session
    if jqonnx.probe_saturation():
        assert report.rows[-1].saturated > 0
        assert "saturate on this processor" in text
        assert f"in a plain session 0 codes and {report.rows[-1].saturated} outputs differ" in text
    else:
        assert report.rows[-1].saturated is None
        assert "here they do not" in text


def test_the_table_of_a_loaded_model_lists_what_can_saturate(rng):
    for name in PRODUCTS:
        model, _ = make_product(name.split("-")[0], rng, **PRODUCTS[name])
        loaded, params = jqonnx.load(model)
        assert "can saturate in ONNX Runtime on x86-64 without VNNI: 1 products, y" in loaded.describe(params), name
        exact, params = jqonnx.load(jqonnx.convert_weights_to_uint8(model))
        assert "saturate" not in exact.describe(params)
    model = jqonnx.export(make_layer(rng), [jnp.ones((4, 64))], weights="int8")
    loaded, params = jqonnx.load(model)
    assert "can saturate" in loaded.describe(params)


def test_the_command_line_takes_the_dtype_of_weights(tmp_path, monkeypatch, rng):
    from jaxquant.onnx.__main__ import main

    (tmp_path / "saturating_layer.py").write_text(
        "import jax.numpy as jnp, jaxquant as jq\nw = jnp.full((4, 2), 127, jnp.int8)\n"
        "def layer(x):\n    return jq.matmul_integer(x, w)\n"
    )
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=make_codes(rng, (3, 4), 255))
    place = ["saturating_layer:layer", "model.onnx", "--inputs", "x.npz"]
    assert main(["export", *place, "--weights", "uint8"]) == 0
    assert jqonnx.find_saturating_products("model.onnx") == ()
    assert main(["verify", *place]) == 0
    assert main(["export", *place, "--weights", "int4"]) == 2


def run_with_exact_option(model, feeds):
    """Return the results with the runtime's own option, which does nothing where sums do not saturate."""
    options: Any = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def test_recurrent_weights_are_found_and_moved(rng):
    inputs, hidden, steps = 6, 5, 3
    constants = {}
    for name, count in (("W", inputs), ("R", hidden)):
        constants[name] = make_weights(rng, (2, count, 4 * hidden))
        constants[f"{name}s"] = rng.uniform(0.001, 0.01, (2, 4 * hidden)).astype(np.float32)
        constants[f"{name}z"] = np.zeros((2, 4 * hidden), np.int8)
    names = ["x", "W", "R", "", "", "", "", "", "Ws", "Wz", "Rs", "Rz"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", names, ["y"], domain=MICROSOFT, hidden_size=hidden, direction="bidirectional"
    )
    x = rng.normal(size=(steps, 2, inputs)).astype(np.float32)
    model = make_model([node], [("x", x)], [("y", TensorProto.FLOAT)], constants)
    assert [product.weights for product in jqonnx.find_saturating_products(model)] == ["W", "R"]
    moved = jqonnx.convert_weights_to_uint8(model)
    assert jqonnx.find_saturating_products(moved) == ()
    (expected,) = run_with_exact_option(model, {"x": x})
    np.testing.assert_array_equal(run(moved, x), expected)


def test_weights_of_attention_are_found_and_moved(rng):
    size = 8
    constants = {
        "w": make_weights(rng, (size, 3 * size)), "b": rng.normal(size=3 * size).astype(np.float32),
        "xs": np.float32(0.01), "ws": np.float32(0.01), "xz": np.uint8(120), "wz": np.int8(0),
    }  # fmt: skip
    node = helper.make_node(
        "QAttention", ["x", "w", "b", "xs", "ws", "", "xz", "wz"], ["y"], domain=MICROSOFT, num_heads=2
    )
    x = make_codes(rng, (2, 3, size), 255)
    model = make_model([node], [("x", x)], [("y", TensorProto.FLOAT)], constants)
    (product,) = jqonnx.find_saturating_products(model)
    assert product.weights == "w"
    (expected,) = run_with_exact_option(model, {"x": x})
    np.testing.assert_array_equal(run(jqonnx.convert_weights_to_uint8(model), x), expected)


def test_int8_activations_are_exact_in_a_plain_session(rng):
    w = jq.quantize(jnp.asarray(rng.normal(size=(64, 8)), jnp.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))

    def layer(x):
        return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.int8), range=(-1.0, 1.0)), w)

    x = jnp.asarray(rng.uniform(0.5, 1.5, (4, 64)), jnp.float32)
    model = jqonnx.export(layer, [x])
    report = jqonnx.verify(model, layer, [x])
    assert report.saturating == ()
    assert report.is_exact_in_plain_session


def test_convolutions_of_int8_images_by_uint8_weights_are_found_and_moved(rng):
    w, x = make_codes(rng, (4, 3, 3, 3), 255), make_weights(rng, (1, 3, 5, 5))
    node = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"])
    points = {"xz": np.int8(-3), "wz": np.uint8(7)}
    model = make_model([node], [("x", x)], [("y", TensorProto.INT32)], {"w": w, **points})
    (product,) = jqonnx.find_saturating_products(model)
    assert (product.weights, product.pairs) == ("x", None)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(int) + 3, (3, 3), (2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, w.astype(int) - 7)
    for level in LEVELS:
        np.testing.assert_array_equal(run(jqonnx.convert_weights_to_uint8(model), x, level), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_quantized_activations_of_both_signs_are_exact_once_weights_are_moved(dtype, rng):
    """ONNX Runtime turns int8 activations of a pair into uint8, and then saturates."""
    w = make_weights(rng, (K, N))
    w[:, 0] = 100
    point = dtype(-128 if dtype == np.int8 else 0)
    constants = {
        "w": w, "ws": np.float32(0.01), "wz": np.int8(0), "xs": np.float32(1), "xz": point, "ys": np.float32(8),
        "yz": dtype(0),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "ys", "yz"], ["y"]),
    ]
    x = rng.integers(0, 256, (8, K)).astype(np.float32)
    model = make_model(nodes, [("x", x)], [("y", TensorProto.FLOAT)], constants)
    (product,) = jqonnx.find_saturating_products(model)
    assert product.pairs is not None
    moved = jqonnx.convert_weights_to_uint8(model)
    info = np.iinfo(dtype)
    exact = np.clip(np.rint((x.astype(int) @ w.astype(int)) * 0.01 / 8), info.min, info.max) * 8
    for level in LEVELS:
        # Ties may be rounded either way by the float products of the first levels.
        np.testing.assert_allclose(np.asarray(run(moved, x, level)), exact, atol=8.01)
        assert (run(moved, x, level) == exact).mean() > 0.9


@pytest.mark.parametrize("largest", [64, 127])
def test_transposed_weights_are_read_through_the_transpose(largest, rng):
    w = np.clip(make_weights(rng, (N, K)), -largest, largest).astype(np.int8)
    w[0] = min(largest, 100)
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMulInteger", ["x", "t"], ["y"]),
    ]
    x = make_codes(rng, (4, K), 255)
    model = make_model(nodes, [("x", x)], [("y", TensorProto.INT32)], {"w": w})
    direct = make_model(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])], [("x", x)], [("y", TensorProto.INT32)],
        {"w": np.ascontiguousarray(w.T)},
    )  # fmt: skip
    found, expected = (jqonnx.find_saturating_products(m) for m in (model, direct))
    assert [p.pairs for p in found] == [p.pairs for p in expected]
    assert bool(found) == (largest == 127)
    np.testing.assert_array_equal(run(jqonnx.convert_weights_to_uint8(model), x), x.astype(int) @ w.T.astype(int))


@pytest.mark.parametrize("ir_version", [3, 10])
def test_weights_that_are_a_default_of_an_input_stay_an_input(ir_version, rng):
    """From version 4 of the format on a caller may pass others, and before it all constants are inputs."""
    w, x = np.full((K, N), 5, np.int8), make_codes(rng, (4, K), 255)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    model = make_model([node], [("x", x), ("w", w)], [("y", TensorProto.INT32)], {"w": w}, 13)
    model.ir_version = ir_version
    found = jqonnx.find_saturating_products(model)
    if ir_version == 3:
        assert found == ()
        return
    assert [product.pairs for product in found] == [None]
    others = make_weights(rng, (K, N))
    session = jqonnx.make_session(jqonnx.convert_weights_to_uint8(model))
    for weights in (w, others):
        np.testing.assert_array_equal(session.run(None, {"x": x, "w": weights})[0], x.astype(int) @ weights.astype(int))
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x.astype(int) @ w.astype(int))
