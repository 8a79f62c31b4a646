"""What of a model is a parameter: weights are, scalars and shapes are not, unless they are asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import quantize_model, run_runtime
from ..support.equality import same_bits

FLOAT = TensorProto.FLOAT
info, make_node = helper.make_tensor_value_info, helper.make_node


def make_model(nodes: Any, constants: dict[str, Any], shape: Any = ("n", 8)) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [info("x", FLOAT, shape)], [info("y", FLOAT, None)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# For each activation: nodes from h to a, and its scalars.
ACTIVATIONS: dict[str, tuple[list[Any], dict[str, float]]] = {
    "clip": ([make_node("Clip", ["h", "low", "high"], ["a"])], {"low": 0, "high": 6}),
    "max": ([make_node("Max", ["h", "low"], ["a"])], {"low": -0.4}),
    "max and min": ([make_node("Max", ["h", "low"], ["m"]), make_node("Min", ["m", "high"], ["a"])],
                    {"low": -1, "high": 1}),
    "prelu": ([make_node("PRelu", ["h", "slope"], ["a"])], {"slope": 0.1}),
}  # fmt: skip


def make_network(activation: str, shape: tuple[int, ...], rng: np.random.Generator) -> onnx.ModelProto:
    """Return two layers with an activation that has scalars of a shape of ones."""
    nodes, scalars = ACTIVATIONS[activation]
    constants: dict[str, Any] = {name: np.full(shape, value, np.float32) for name, value in scalars.items()}
    for name, lengths in (("w", (8, 16)), ("b", (16,)), ("v", (16, 4))):
        constants[name] = (0.3 * rng.normal(size=lengths)).astype(np.float32)
    layers = make_node("Gemm", ["x", "w", "b"], ["h"]), make_node("MatMul", ["a", "v"], ["y"])
    return make_model([layers[0], *nodes, layers[1]], constants)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scalars_are_constants_and_a_recipe_sees_the_clip(
    activation: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    if activation == "clip" and shape:
        return  # ONNX wants scalars there
    model, x = make_network(activation, shape, rng), rng.normal(0, 2, (32, 8)).astype(np.float32)
    fn, params = jqonnx.load(model)
    assert sorted(params) == ["b", "v", "w"]
    np.testing.assert_allclose(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0], atol=1e-5)
    prepared = jq.prepare(fn, params, x, rules=jq.recipes.onnx_runtime())
    assert str(prepared.coverage.outputs).startswith("2 of 2 contractions give codes")
    ranges = prepared.calibrate(params, [x])
    served = jax.jit(prepared.apply)(jax.jit(prepared.convert)(params, ranges), x)
    assert np.abs(served - fn(params, x)).max() < 0.3


def test_scalars_that_are_asked_for_are_parameters(fixed_rng: np.random.Generator) -> None:
    model, x = make_network("clip", (), fixed_rng), fixed_rng.normal(0, 2, (32, 8)).astype(np.float32)
    fn, params = jqonnx.load(model, parameters=["high"])
    assert sorted(params) == ["b", "high", "v", "w"]
    slopes = jax.grad(lambda p: jnp.sum(fn(p, x)))(params)
    assert slopes["high"] != 0
    # Constants by default, but parameters of earlier versions still count.
    fn, bare = jqonnx.load(model)
    same_bits(fn({**bare, "high": jnp.float32(0.5)}, x), fn({**bare, "high": np.float32(0.5)}, x))
    assert np.any(np.asarray(fn({**bare, "high": jnp.float32(0.5)}, x)) != np.asarray(fn(bare, x)))


def test_wrong_names_of_parameters_are_named(rng: np.random.Generator) -> None:
    model = make_network("clip", (), rng)
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 16]), "shape"))
    model.graph.node.insert(1, make_node("Reshape", ["h", "shape"], ["h2"]))
    model.graph.node[2].input[0] = "h2"
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (["top"], ValueError, "load: parameters: expected names of constants of the graph, got 'top'"),
        (["shape"], TypeError, "load: parameters: expected names of floats or codes, got 'shape', of int64"),
        ("high", TypeError, "load: parameters: expected a collection of names, got"),
    )
    for names, error, text in cases:
        with pytest.raises(error, match=text):
            jqonnx.load(model, parameters=names)


def test_a_scale_of_activations_is_no_parameter() -> None:
    nodes = [make_node("QuantizeLinear", ["x", "scale"], ["q"]), make_node("DequantizeLinear", ["q", "scale"], ["y"])]
    model = make_model(nodes, {"scale": np.float32(0.1)})
    with pytest.raises(ValueError, match="expected names of constants that no operator needs to know"):
        jqonnx.load(model, parameters=["scale"])


# For each layer: nodes from x to y, constants, and which of them are weights.
LAYERS: dict[str, tuple[list[Any], dict[str, Any], list[str]]] = {
    "gemm": ([make_node("Gemm", ["x", "w", "b"], ["y"])], {"w": (8, 1), "b": (1,)}, ["b", "w"]),
    "matmul, add": (
        [make_node("MatMul", ["x", "w"], ["h"]), make_node("Add", ["h", "b"], ["y"])],
        {"w": (8, 1), "b": (1,)}, ["b", "w"],
    ),
    # The sum of a scalar and of several features.
    "matmul, shift": (
        [make_node("MatMul", ["x", "w"], ["h"]), make_node("Add", ["b", "h"], ["y"])],
        {"w": (8, 4), "b": (1,)}, ["w"],
    ),
    "matmul of one": (
        [make_node("Slice", ["x", "zero", "one", "one"], ["h"]), make_node("MatMul", ["h", "w"], ["y"])],
        {"w": (1, 1), "zero": [0], "one": [1]}, ["w"],
    ),
    "conv": (
        [make_node("Unsqueeze", ["x", "one"], ["h"]), make_node("Conv", ["h", "w", "b"], ["y"])],
        {"w": (1, 1, 1), "b": (1,), "one": [1]}, ["b", "w"],
    ),
    "conv, add": (
        [make_node("Unsqueeze", ["x", "one"], ["h"]), make_node("Conv", ["h", "w"], ["c"]),
         make_node("Reshape", ["b", "shape"], ["d"]), make_node("Add", ["c", "d"], ["y"])],
        {"w": (1, 1, 3), "b": (1,), "one": [1], "shape": [1, 1, 1]}, ["b", "w"],
    ),
    "normalization": (
        [make_node("Unsqueeze", ["x", "one"], ["h"]), make_node("InstanceNormalization", ["h", "s", "b"], ["y"])],
        {"s": (1,), "b": (1,), "one": [1]}, ["b", "s"],
    ),
    "formula": (
        [make_node("Mul", ["x", "s"], ["h"]), make_node("Add", ["h", "b"], ["i"]), make_node("Div", ["i", "t"], ["y"])],
        {"s": (1,), "b": (1, 1), "t": ()}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_one_element_are_parameters(name: str, rng: np.random.Generator) -> None:
    nodes, constants, weights = LAYERS[name]
    arrays = {
        key: np.array(value) if isinstance(value, list) else np.asarray(rng.uniform(0.5, 1, value), np.float32)
        for key, value in constants.items()
    }
    model, x = make_model(nodes, arrays), rng.normal(size=(3, 8)).astype(np.float32)
    fn, params = jqonnx.load(model)
    assert sorted(params) == weights
    np.testing.assert_allclose(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_a_quantized_layer_of_one_feature_keeps_its_parameters(rng: np.random.Generator, tmp_path: Any) -> None:
    """Also the parameters that training changes, and their way back to codes."""
    arrays = {"w": rng.normal(size=(8, 1)).astype(np.float32), "b": np.array([0.3], np.float32)}
    model = make_model([make_node("Gemm", ["x", "w", "b"], ["y"])], arrays)
    batches = [rng.normal(size=(4, 8)).astype(np.float32) for _ in range(2)]
    model = quantize_model(model, batches, "qdq", tmp_path)
    fn, params = jqonnx.load(model)
    assert len(params) == 2
    expected = run_runtime(model, {"x": batches[0]})[0]
    np.testing.assert_array_equal(jax.jit(fn)(params, batches[0]), expected)
    trainable, floats = jqonnx.load(model, trainable=True)
    assert set(params) <= set(floats)
    again, codes = trainable.convert(floats)
    np.testing.assert_array_equal(jax.jit(again)(codes, batches[0]), expected)


def test_scalar_parameters_of_an_exported_function_stay_parameters(rng: np.random.Generator) -> None:
    """The user has passed them as parameters; the numbers of formulas are none."""

    def function(params: Any, x: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.maximum(x @ params["w"] * params["temperature"], -1.5), params["top"]) * 0.25

    params = {
        "w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32),
        "temperature": jnp.float32(2),
        "top": jnp.ones((1, 1)),
    }
    x = rng.normal(size=(3, 8)).astype(np.float32)
    exported = jqonnx.export(function, params, [x])
    for _ in range(2):
        fn, loaded = jqonnx.load(exported)
        assert sorted(loaded) == ["temperature", "top", "w"]
        same_bits(jax.jit(fn)(loaded, x), jax.jit(function)(params, x))
        exported = jqonnx.export(fn, loaded, [x])


def test_a_model_of_scalars_is_exported_and_loaded_again(rng: np.random.Generator) -> None:
    for activation in ACTIVATIONS:
        model, x = make_network(activation, (), rng), rng.normal(0, 2, (4, 8)).astype(np.float32)
        fn, params = jqonnx.load(model)
        expected = jax.jit(fn)(params, x)
        for _ in range(2):
            exported = jqonnx.export(fn, params, [x])
            fn, params = jqonnx.load(exported)
            assert sorted(params) == ["b", "v", "w"]
            same_bits(jax.jit(fn)(params, x), expected)


def test_wrong_parameters() -> None:
    model = make_model([make_node("Clip", ["x", "low", "high"], ["y"])], {"low": np.float32(0), "high": np.float32(3)})
    fn, params = jqonnx.load(model, parameters=["high"])
    x = np.full((1, 8), 2, np.float32)
    np.testing.assert_array_equal(fn({"high": 1.0}, x), np.ones((1, 8)))  # a number of Python is an array
    for wrong, text in (({}, r"missing \['high'\]"), ({**params, "top": 1.0}, r"unknown \['top'\]")):
        with pytest.raises(ValueError, match=rf"onnx\.LoadedFunction: params: expected the entries .*, got {text}"):
            fn(wrong, x)
    with pytest.raises(TypeError, match=r"onnx\.LoadedFunction: params: expected a mapping"):
        fn(1.0, x)  # type: ignore[arg-type]


def test_loading_compiles_nothing(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """A program for each shape of a weight would take longer to compile than the rest of loading."""
    constants = {f"w{n}": rng.normal(size=(n, n + 1)).astype(np.float32) for n in (8, 9, 10)}
    nodes = [make_node("MatMul", [x, w], [y]) for x, w, y in (("x", "w8", "a"), ("a", "w9", "b"), ("b", "w10", "y"))]
    model = make_model(nodes, constants)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        fn, params = jqonnx.load(model)
        assert "Compiling" not in caplog.text
        jax.jit(fn)(params, np.zeros((3, 8), np.float32))
        assert "Compiling" in caplog.text
