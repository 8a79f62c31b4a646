"""Networks of all kinds with all options of onnxruntime.quantization, loaded, against ONNX Runtime."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import Builder, list_optimized_operators, run_runtime
from ..cases.quantized_networks import NETWORKS, Options, draw_network, draw_options, is_exact, quantize_network
from ..support import processor

_MOST_DRAWS = 10


def _quantize(
    kind: str, rng: np.random.Generator, folder: pathlib.Path
) -> tuple[onnx.ModelProto, Options, np.ndarray, np.ndarray]:
    """Return a quantized network, its options, an input, and ONNX Runtime's result."""
    for _ in range(_MOST_DRAWS):
        model, shape = draw_network(kind, rng)
        options = draw_options(rng, not processor.saturates())
        batches = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
        x = rng.normal(size=shape).astype(np.float32)
        # The quantizer fails on some networks, and the runtime refuses some of its models.
        try:
            quantized = quantize_network(model, batches, options, folder)
            (expected,) = run_runtime(quantized, {"x": x}, threads=1)
        except Exception:
            continue
        return quantized, options, x, expected
    raise AssertionError(f"ONNX Runtime ran none of {_MOST_DRAWS} networks of the kind {kind}")


@pytest.mark.filterwarnings("ignore")  # the quantizer's
@pytest.mark.sample(6)
@pytest.mark.parametrize("draw", range(8))
@pytest.mark.parametrize("kind", NETWORKS)
def test_quantized_network_equals_the_runtime(
    kind: str, draw: int, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    model, options, x, expected = _quantize(kind, rng, tmp_path)
    fn, params = jqonnx.load(model)
    actual = np.asarray(jax.jit(fn)(params, x))
    if is_exact(kind, options):
        np.testing.assert_array_equal(actual, expected, err_msg=str(options))
    else:
        # A sum of floats in another order may change a code, and a code what follows.
        tolerance = 0.01 * np.max(np.abs(expected))
        difference = np.abs(actual - expected)
        assert np.mean(difference > tolerance) <= 0.01, options
        assert np.max(difference) <= 3 * tolerance, options
        assert np.median(difference) <= 0.1 * tolerance, options


# In these networks a Transpose moves past the same value several times, and past a pair in front of a MaxPool.
@pytest.mark.filterwarnings("ignore")  # the quantizer's
@pytest.mark.parametrize("seed", [2, 4, 11, 19])
def test_transposes_move_past_one_value_again(seed: int, tmp_path: pathlib.Path) -> None:
    model, options, x, expected = _quantize("nhwc-residual", np.random.default_rng(seed), tmp_path)
    fn, params = jqonnx.load(model)
    # Where the runtime adds floats in another order, a code of 16 bits differs.
    tolerance = 0 if is_exact("nhwc-residual", options) else 1e-3 * np.max(np.abs(expected))
    np.testing.assert_allclose(jax.jit(fn)(params, x), expected, rtol=0, atol=tolerance)


# What `load` appends to the names of values.
_SUFFIXES = ("codes", "moved", "before", "untransposed", "uint8", "weight", "bias", "square", "bias in steps")


@pytest.mark.filterwarnings("ignore")  # the quantizer's
@pytest.mark.parametrize("kind", ["nhwc", "nhwc-residual", "gemm"])
def test_names_of_a_model_do_not_matter(kind: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    model, *_, x, _ = _quantize(kind, rng, tmp_path)
    fn, params = jqonnx.load(model)
    expected = np.asarray(fn(params, x))
    kept = {"", *(value.name for value in (*model.graph.input, *model.graph.output))}
    names = sorted({name for node in model.graph.node for name in (*node.input, *node.output)} - kept)
    taken = ["v"]
    for name in taken:
        taken += [f"{name}/{suffix}" for suffix in _SUFFIXES if len(taken) < len(names)]
    renamed = dict(zip(names, rng.permutation(taken[: len(names)]).tolist(), strict=True))
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [renamed.get(name, name) for name in values]
    for initializer in model.graph.initializer:
        initializer.name = renamed.get(initializer.name, initializer.name)
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(fn(params, x), expected)


def _between_codes(b: Builder, op: str, inputs: list[str], dtype: str, after: str, **attributes: Any) -> str:
    """Add an operator between DequantizeLinear and QuantizeLinear, and perhaps another one behind it."""
    x_affine = b.hold(0.01), b.hold(3, dtype)
    x = b.add("DequantizeLinear", b.add("QuantizeLinear", "x", *x_affine), *x_affine)
    y = b.add(op, x, *inputs, **attributes)
    y = b.add(after, y) if after else y
    y_affine = b.hold(0.05), b.hold(3, dtype)
    return b.add("DequantizeLinear", b.add("QuantizeLinear", y, *y_affine), *y_affine)


@pytest.mark.filterwarnings("ignore:ONNX Runtime's optimizations change the value:UserWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("after", ["", "Relu", "Tanh"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm", "transB", "MatMul"])
def test_float_weights_between_codes_are_quantized(
    op: str, has_bias: bool, dtype: str, after: str, rng: np.random.Generator
) -> None:
    b = Builder(rng)
    shapes = {"Conv": (3, 2, 3, 3), "ConvTranspose": (2, 3, 3, 3), "transB": (3, 6)}
    bias = [b.draw(3)] if has_bias else []
    weights = [b.draw(*shapes.get(op, (6, 3))), *([] if op == "MatMul" else bias)]
    attributes = {"transB": 1} if op == "transB" else {}
    if op == "MatMul" and has_bias:
        affine, y_affine = (b.hold(0.01), b.hold(3, dtype)), (b.hold(0.05), b.hold(3, dtype))
        y = b.add("DequantizeLinear", b.add("QuantizeLinear", "x", *affine), *affine)
        y = b.add("Add", b.add("MatMul", y, *weights), *bias)
        y = b.add(after, y) if after else y
        y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *y_affine), *y_affine)
    else:
        y = _between_codes(b, "Gemm" if op == "transB" else op, weights, dtype, after, **attributes)
    shape = (1, 2, 5, 5) if op.startswith("Conv") else (4, 6)
    model = b.build(shape, y)
    # Codes up to 127: their products with int8 do not saturate on any processor.
    x = rng.uniform(-0.05, 1.2, size=shape).astype(np.float32)
    (expected,) = run_runtime(model, {"x": x})
    fn, params = jqonnx.load(model)
    # With 16 bits the product is one of floats, added in another order.
    steps = 1.01 if dtype == "uint16" else 0
    np.testing.assert_allclose(fn(params, x), expected, rtol=0, atol=0.05 * steps)


def test_load_says_that_float_weights_are_rounded_and_can_keep_them(rng: np.random.Generator) -> None:
    b = Builder(rng)
    model = b.build((4, 6), _between_codes(b, "Gemm", [b.draw(6, 3), b.draw(3)], "uint8", "Relu"))
    x = rng.uniform(-0.05, 1.2, size=(4, 6)).astype(np.float32)
    with pytest.warns(jqonnx.FusionWarning, match="multiplies by float weights; ONNX Runtime rounds them to int8"):
        jqonnx.load(model)
    fn, params = jqonnx.load(model, fusions="safe")
    np.testing.assert_allclose(fn(params, x), run_runtime(model, {"x": x}, "none")[0], rtol=0, atol=0.05 * 1.01)


# With a Transpose between pairs of int8, the runtime makes a node that it refuses.
@pytest.mark.parametrize(("between", "dtype"), [("", "uint8"), ("", "int8"), ("Transpose", "uint8")])
@pytest.mark.parametrize("count", [2, 3])
def test_pairs_of_other_scales_are_merged(
    count: int, between: str, dtype: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    b = Builder(rng)
    y = b.add("Transpose", "x", perm=[0, 3, 1, 2]) if between else "x"
    low = np.iinfo(dtype).min
    for i in range(count):
        affine = b.hold(rng.uniform(0.01, 0.02)), b.hold(low + rng.integers(60, 200), dtype)
        y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)
        if between and i < count - 1:
            y = b.add("Transpose", y, perm=[0, 2, 3, 1] if i % 2 == 0 else [0, 3, 1, 2])
    if between and count % 2 == 0:
        y = b.add("Transpose", y, perm=[0, 3, 1, 2])
    model = b.build([2, 4, 5, 3], b.add("Neg", y))
    x = rng.normal(size=(2, 4, 5, 3)).astype(np.float32)
    (expected,) = run_runtime(model, {"x": x})
    if not between:
        assert list_optimized_operators(model, tmp_path).count("QuantizeLinear") == 1
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(fn(params, x), expected)


def _draw_chain(b: Builder) -> str:
    """Add pairs of three scales, transpositions and other operators in a row; about every other Transpose is undone."""
    rng = b.rng
    affines = [(b.hold(rng.uniform(0.01, 0.03)), b.hold(point, np.uint8)) for point in (*rng.integers(0, 256, 2), 0)]

    def pair(y: str) -> str:
        affine = affines[int(rng.integers(0, 3))]
        return b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)

    perms: list[list[int]] = []
    shape, y = [1, 3, 4, 4], "x"
    others = ["Reshape", "MaxPool", "Relu", "Clip", "Sigmoid", "Conv"]
    for op in rng.choice(["pair"] * 4 + ["Transpose"] * 3 + others, int(rng.integers(4, 10))):
        if op == "pair":
            y = pair(y)
        elif op == "Transpose":
            is_undone = bool(perms) and rng.random() < 0.6
            perm = [0, *(axis % 3 + 1 for axis in perms.pop()[1:])] if is_undone else [0, 2, 3, 1]
            perms += [] if is_undone else [perm]
            y, shape = b.add("Transpose", y, perm=perm), [shape[axis] for axis in perm]
        elif op == "Reshape":
            shape = [1, shape[1], shape[3], shape[2]]
            y = b.add("Reshape", y, b.hold(shape, np.int64))
        elif op == "MaxPool":
            y = b.add("MaxPool", y, kernel_shape=[2, 2], pads=[1, 1, 0, 0])
        elif op == "Clip":
            y = b.add("Clip", y, b.hold(0), b.hold(rng.uniform(1, 9)))
        elif op == "Conv":
            codes = b.hold(rng.integers(-60, 60, (shape[1], shape[1], 1, 1)), np.int8)
            weight = b.add("DequantizeLinear", codes, b.hold(0.01), b.hold(0, np.int8))
            y = pair(b.add("Conv", pair(y), weight, *([b.draw(shape[1])] if rng.random() < 0.5 else [])))
        else:
            y = pair(b.add(op, pair(y)))
    return b.add("Neg", pair(y))


@pytest.mark.filterwarnings("ignore:ONNX Runtime's optimizations change the value:UserWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("draw", range(40))
def test_chains_of_pairs_and_transpositions(draw: int, fixed_rng: np.random.Generator) -> None:
    """ONNX Runtime's order decides: what it quantizes, merges and moves first, and that it drops Relu and Clip last.

    Of other draws about one in a hundred differs by a code.
    """
    rng = fixed_rng
    b = Builder(rng)
    model = b.build([1, 3, 4, 4], _draw_chain(b))
    x = (1.5 * rng.normal(size=(1, 3, 4, 4))).astype(np.float32)
    (expected,) = run_runtime(model, {"x": x}, threads=1)
    fn, params = jqonnx.load(model)
    # A float of the range that pairs share may differ in its last bits, a code would by 0.003 and more.
    np.testing.assert_allclose(fn(params, x), expected, rtol=0, atol=1e-5)


def test_relu_between_pairs_keeps_them_apart(rng: np.random.Generator) -> None:
    b = Builder(rng)
    pairs = [(b.hold(0.02), b.hold(100, np.uint8)), (b.hold(0.013), b.hold(0, np.uint8))]
    y = "x"
    for affine in pairs:
        y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)
        y = b.add("Relu", y) if affine is pairs[0] else y
    model = b.build([40], y)
    x = rng.normal(size=40).astype(np.float32)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(fn(params, x), run_runtime(model, {"x": x})[0])
    assert [node.op for node in fn.graph.nodes] == ["QuantizeLinear", "DequantizeLinear"] * 2


@pytest.mark.parametrize(("op", "gain"), [("Conv", 1.005), ("Gemm", 1.3)])
def test_bias_in_steps_of_a_scale_that_changes(op: str, gain: float, rng: np.random.Generator) -> None:
    """ONNX Runtime quantizes a bias before it merges the pairs that transpositions kept apart."""
    b = Builder(rng)
    is_conv = op == "Conv"
    away, back = ([0, 2, 3, 1], [0, 3, 1, 2]) if is_conv else ([1, 0], [1, 0])
    y = b.add("Neg", "x")
    for scale, perm in ((0.01, away), (0.01 * gain, back)):
        affine = b.hold(scale), b.hold(128, np.uint8)
        y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)
        if perm is away:
            y = b.add("Relu", b.add("Transpose", y, perm=perm))
            y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)
            y = b.add("Transpose", y, perm=back)
    codes = b.hold(rng.integers(-60, 60, (3, 3, 1, 1) if is_conv else (3, 3)), np.int8)
    weight = b.add("DequantizeLinear", codes, b.hold(0.01), b.hold(0, np.int8))
    affine = b.hold(0.02), b.hold(128, np.uint8)
    y = b.add(op, y, weight, b.hold([1.5, -1.0, 1.2]))
    y = b.add("DequantizeLinear", b.add("QuantizeLinear", y, *affine), *affine)
    shape = (1, 3, 4, 4) if is_conv else (4, 3)
    model = b.build(shape, y)
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    with pytest.warns(jqonnx.FusionWarning, match=r"adds bias\[0\]"):
        fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(fn(params, x), run_runtime(model, {"x": x})[0])
    safe, params = jqonnx.load(model, fusions="safe")
    assert safe.deviations == ()


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 1.3, 1.7), (1, 1, 0.6, 3), (1, 1, 1, 2), (2.5, 1)], ids=str)
@pytest.mark.parametrize("mode", ["asymmetric", "half_pixel", "pytorch_half_pixel"])
def test_bilinear_resize_has_the_bits_of_the_runtime(
    mode: str, scales: tuple[float, ...], dtype: str, rng: np.random.Generator
) -> None:
    shape = (2, 3, 5, 6)[-len(scales) :]
    x = (
        100 * rng.normal(size=shape)
        if dtype == "float32"
        else rng.integers(0, 256, shape) + min(np.iinfo(dtype).min, 0)
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode=mode)
    constant = numpy_helper.from_array(np.asarray(scales, np.float32), "scales")
    values = [helper.make_tensor_value_info(name, kind, None) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    (expected,) = run_runtime(model, {"x": x.astype(dtype)})
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(jax.jit(fn)(params, x.astype(dtype)), expected)


@pytest.mark.parametrize("op", ["HardSigmoid", "HardSwish"])
def test_hard_activation_has_the_bits_of_the_runtime(op: str, rng: np.random.Generator) -> None:
    b = Builder(rng)
    model = b.build((64, 64), b.add(op, "x"))
    x = (4 * rng.normal(size=(64, 64))).astype(np.float32)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])
