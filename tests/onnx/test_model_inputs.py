"""The inputs of loaded models: lengths that are not fixed, inputs that must be known, and inputs made constants."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info, make_node = helper.make_tensor_value_info, helper.make_node


def make_model(nodes: Any, inputs: Any, constants: dict[str, Any], outputs: Any = None, functions: Any = ()) -> Any:
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    outputs = outputs or [info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    domains = [helper.make_opsetid("", 21), *([helper.make_opsetid("own", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, functions=list(functions))


@pytest.mark.parametrize("length", [-1, -2, "?", "n", None])
def test_a_length_that_is_not_fixed_takes_any(length: Any, rng: np.random.Generator) -> None:
    """paddle2onnx writes -1, and one name for lengths that differ."""
    inputs = [info("x", FLOAT, [length, 3, length])]
    model = make_model([make_node("Add", ["x", "w"], ["y"])], inputs, {"w": np.ones((3, 1), np.float32)})
    fn, params = jqonnx.load(model)
    assert [isinstance(n, int) for n in fn.inputs[0].shape or ()] == [False, True, False]
    for shape in ((2, 3, 5), (1, 3, 1), (0, 3, 4)):
        x = rng.normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])
    for shape in ((2, 4, 5), (2, 3), (2, 3, 5, 1)):
        with pytest.raises(ValueError, match=r"LoadedFunction: x: expected shape \(.*, 3, .*\), got shape \("):
            fn(params, np.zeros(shape, np.float32))
    jqonnx.check(model)
    exported = jqonnx.export(fn, params, [np.ones((2, 3, 5), np.float32)], batch="N")
    x = rng.normal(size=(4, 3, 5)).astype(np.float32)
    np.testing.assert_array_equal(run_runtime(exported, {"x": x})[0], x + 1)


def test_a_length_of_0_is_fixed() -> None:
    """As in ONNX Runtime, which refuses others."""
    model = make_model([make_node("Identity", ["x"], ["y"])], [info("x", FLOAT, [0, 3])], {})
    fn, params = jqonnx.load(model)
    assert fn(params, np.zeros((0, 3), np.float32)).shape == (0, 3)
    with pytest.raises(ValueError, match="expected shape"):
        fn(params, np.zeros((2, 3), np.float32))
    with pytest.raises(Exception, match="Expected: 0"):
        run_runtime(model, {"x": np.zeros((2, 3), np.float32)})


def make_detector() -> onnx.ModelProto:
    """Return a model with a branch for each rate, which take inputs of different lengths."""
    rng = np.random.default_rng(0)
    weights = {f"w{n}": rng.normal(size=(n, 2)).astype(np.float32) for n in (4, 8)}
    branches: dict[str, Any] = {}
    for key, n in (("then", 8), ("else", 4)):
        nodes = [make_node("MatMul", ["x", f"w{n}"], [f"r{n}"])]
        branches[f"{key}_branch"] = helper.make_graph(nodes, key, [], [info(f"r{n}", FLOAT, None)])
    nodes = [make_node("Equal", ["sr", "rate"], ["is_high"]), make_node("If", ["is_high"], ["y"], **branches)]
    inputs = [info("x", FLOAT, ["batch", "length"]), info("sr", INT, [])]
    return make_model(nodes, inputs, {**weights, "rate": np.int64(16000)})


def test_an_input_that_chooses_a_branch_is_named(rng: np.random.Generator) -> None:
    model, x = make_detector(), rng.normal(size=(3, 8)).astype(np.float32)
    fn, params = jqonnx.load(model)
    assert fn.static_inputs == {"sr"}
    expected = run_runtime(model, {"x": x, "sr": np.asarray(16000)})[0]
    np.testing.assert_allclose(fn(params, x, np.asarray(16000)), expected, rtol=1e-5, atol=1e-6)
    for call in (lambda: jax.jit(fn)(params, x, np.asarray(16000)), lambda: jqonnx.export(fn, [params, x, 16000])):
        with pytest.raises(jqonnx.ModelError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith("jaxquant.onnx.LoadedFunction: sr: expected a value that is known when the function is")
        assert "node 1, If: the condition must be known" in text
        assert "Load the model with constants={'sr': value}" in text
        assert "jax.jit(lambda params, x: fn(params, x=x, sr=sr))" in text


def test_inputs_are_made_constants(rng: np.random.Generator) -> None:
    model = make_detector()
    for rate, length in ((16000, 8), (8000, 4)):
        x = rng.normal(size=(3, length)).astype(np.float32)
        fn, params = jqonnx.load(model, constants={"sr": rate})
        assert [value.name for value in fn.inputs] == ["x"]
        assert not fn.static_inputs
        assert repr(fn) == "LoadedFunction(params, x) -> y"
        expected = run_runtime(model, {"x": x, "sr": np.asarray(rate)})[0]
        np.testing.assert_allclose(jax.jit(fn)(params, x), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            jax.jit(jax.vmap(fn, (None, 0)))(params, x[:, None])[:, 0], expected, rtol=1e-5, atol=1e-6
        )
        exported = jqonnx.export(fn, params, [x])
        np.testing.assert_allclose(run_runtime(exported, {"x": x})[0], expected, rtol=1e-5, atol=1e-6)


def test_constants_of_any_size_are_no_parameters(rng: np.random.Generator) -> None:
    inputs = [info("x", FLOAT, [2, 3]), info("w", FLOAT, [3, "n"])]
    model = make_model([make_node("MatMul", ["x", "w"], ["y"])], inputs, {})
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3), (3, 4)))
    fn, params = jqonnx.load(model, constants={"w": w})
    assert params == {}
    np.testing.assert_allclose(fn(params, x), x @ w, rtol=1e-5)
    fn, params = jqonnx.load(model, constants={"w": w}, trainable=True)
    np.testing.assert_allclose(fn.convert(params)[0](params, x), x @ w, rtol=1e-5)


def test_wrong_constants_are_named() -> None:
    model = make_detector()
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        ({"rate": 1}, ValueError, r"load: constants: expected names of inputs, \['sr', 'x'\], got 'rate'"),
        ({"sr": np.array([1, 2])}, ValueError, r"load: constants\['sr'\]: expected shape \(\), got shape \(2,\)"),
        ({"sr": np.float32(1)}, TypeError, r"load: constants\['sr'\]: expected dtype int64, got float32"),
        (["sr"], TypeError, "load: constants: expected a mapping of names to values, or True, got"),
        ({"sr": None}, TypeError, r"load: constants\['sr'\]: expected a known value, got None"),
        ({"sr": "high"}, TypeError, r"load: constants\['sr'\]: expected an array, got str"),
    )
    constants: Any
    for constants, error, text in cases:
        with pytest.raises(error, match=text):
            jqonnx.load(model, constants=constants)
    with pytest.raises(TypeError, match=r"constants\['sr'\]: expected a known value, got a traced array"):
        jax.jit(lambda rate: jqonnx.load(model, constants={"sr": rate})[0].inputs and rate)(3)


def make_static(op: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model in which an operator must know what it computes of the input `n`, and its inputs."""
    double = make_node("Mul", ["n", "two"], ["m"])
    x, n = np.arange(6, dtype=np.float32).reshape(1, 6), np.array([1])
    constants: dict[str, Any] = {"two": np.array([2]), "zero": np.array([0])}
    inputs = [info("x", FLOAT, [1, 6]), info("n", INT, [1])]
    scalar = make_node("Squeeze", ["m", "zero"], ["s"])
    nodes = {
        "Reshape": [make_node("Concat", ["m", "rest"], ["shape"], axis=0), make_node("Reshape", ["x", "shape"], ["y"])],
        "Expand": [make_node("Concat", ["m", "six"], ["shape"], axis=0), make_node("Expand", ["x", "shape"], ["y"])],
        "Tile": [make_node("Concat", ["m", "m"], ["times"], axis=0), make_node("Tile", ["x", "times"], ["y"])],
        "Slice": [make_node("Slice", ["x", "zero", "m", "one"], ["y"])],
        "Pad": [make_node("Concat", ["zero", "m", "m", "n"], ["p"], axis=0), make_node("Pad", ["x", "p"], ["y"])],
        "Split": [
            make_node("Concat", ["m", "four"], ["p"], axis=0), make_node("Split", ["x", "p"], ["y", "z"], axis=1),
        ],
        "TopK": [make_node("TopK", ["x", "m"], ["y", "z"])],
        "Unsqueeze": [make_node("Unsqueeze", ["x", "m"], ["y"])],
        "ReduceSum": [make_node("Sub", ["m", "one"], ["axis"]), make_node("ReduceSum", ["x", "axis"], ["y"])],
        "CumSum": [make_node("CumSum", ["x", "s"], ["y"])],
        "Trilu": [make_node("Trilu", ["x", "s"], ["y"])],
        "Range": [make_node("Range", ["none", "s", "step"], ["r"]), make_node("Cast", ["r"], ["y"], to=FLOAT)],
        "ConstantOfShape": [make_node("ConstantOfShape", ["m"], ["y"])],
        "Resize": [
            make_node("Concat", ["m", "six"], ["sizes"], axis=0), make_node("Resize", ["x", "", "", "sizes"], ["y"]),
        ],
        "OneHot": [make_node("OneHot", ["six", "m", "pair"], ["y"])],
        "HannWindow": [make_node("HannWindow", ["s"], ["y"])],
        "SequenceAt": [
            make_node("SequenceConstruct", ["x", "x", "x"], ["q"]), make_node("SequenceAt", ["q", "s"], ["y"]),
        ],
    }[op]  # fmt: skip
    constants |= {"rest": np.array([-1]), "six": np.array([6]), "one": np.array([1]), "four": np.array([4])}
    constants |= {"none": np.int64(0), "step": np.int64(1), "pair": np.array([0, 1], np.float32)}
    used = {name for node in [double, scalar, *nodes] for name in node.input}
    if op == "CumSum":
        nodes = [make_node("Sub", ["s", "step"], ["t"]), make_node("CumSum", ["x", "t"], ["y"])]
        used |= {"step"}
    body = [double, *([scalar] if any("s" in node.input for node in nodes) else []), *nodes]
    model = make_model(body, inputs, {k: v for k, v in constants.items() if k in used})
    return model, {"x": x, "n": n}


STATIC = (
    *("Reshape", "Expand", "Tile", "Slice", "Pad", "Split", "TopK", "Unsqueeze", "ReduceSum", "CumSum", "Trilu"),
    *("Range", "ConstantOfShape", "Resize", "OneHot", "HannWindow", "SequenceAt"),
)


@pytest.mark.parametrize("op", STATIC)
def test_every_operator_names_the_input_that_it_must_know(op: str) -> None:
    model, feeds = make_static(op)
    fn, params = jqonnx.load(model)
    with pytest.raises(jqonnx.ModelError, match=rf"LoadedFunction: n: expected a value.*, {op}: .*must be known"):
        jax.jit(fn)(params, *feeds.values())
    expected = run_runtime(model, feeds)[0]
    fn, params = jqonnx.load(model, constants={"n": feeds.pop("n")})
    np.testing.assert_allclose(jax.jit(fn)(params, **feeds), expected, rtol=1e-5)


def test_inputs_are_named_through_subgraphs_and_functions(rng: np.random.Generator) -> None:
    """A shape that is computed in a function is used in a loop in a branch."""
    function = helper.make_function(
        "own", "f", ["v"], ["w"], [make_node("Mul", ["v", "v"], ["p"]), make_node("Add", ["p", "v"], ["w"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    body = helper.make_graph(
        [make_node("Identity", ["c"], ["d"]), make_node("Expand", ["x", "target"], ["e"]),
         make_node("ReduceMax", ["e"], ["m"], keepdims=0), make_node("Add", ["v", "m"], ["w"])],
        "b", [info("i", INT, []), info("c", BOOL, []), info("v", FLOAT, [])],
        [info("d", BOOL, []), info("w", FLOAT, [])],
    )  # fmt: skip
    branches: dict[str, Any] = {
        "then_branch": helper.make_graph([make_node("Loop", ["trips", "", "zero"], ["a"], body=body)], "t", [],
                                         [info("a", FLOAT, [])]),
        "else_branch": helper.make_graph([make_node("Identity", ["zero"], ["b"])], "e", [], [info("b", FLOAT, [])]),
    }  # fmt: skip
    nodes = [make_node("f", ["n"], ["target"], domain="own"), make_node("If", ["flag"], ["y"], **branches)]
    inputs = [info("x", FLOAT, [1]), info("n", INT, [1]), info("flag", BOOL, []), info("unused", INT, [1])]
    nodes.append(make_node("Identity", ["unused"], ["z"]))
    outputs = [info("y", FLOAT, None), info("z", INT, None)]
    constants = {"trips": np.int64(2), "zero": np.float32(0)}
    model = make_model(nodes, inputs, constants, outputs, [function])
    fn, params = jqonnx.load(model)
    assert fn.static_inputs == {"n", "flag"}
    feeds = {"x": np.array([3], np.float32), "n": np.array([2]), "flag": np.asarray(True), "unused": np.array([1])}
    expected = run_runtime(model, feeds)[0]
    np.testing.assert_array_equal(fn(params, **feeds)[0], expected)
    with pytest.raises(jqonnx.ModelError, match="LoadedFunction: n: expected a value"):
        jax.jit(fn)(params, *feeds.values())
    n = feeds.pop("n")
    # The flag need not be known: both branches run.
    np.testing.assert_array_equal(jax.jit(lambda p, v: fn(p, **v, n=n))(params, feeds)[0], expected)


def test_a_shape_of_data_names_the_data() -> None:
    model = make_model([make_node("NonZero", ["x"], ["y"])], [info("x", FLOAT, [4])], {}, [info("y", INT, None)])
    fn, params = jqonnx.load(model)
    with pytest.raises(jqonnx.ModelError, match=r"LoadedFunction: x: expected a value.*, NonZero: "):
        jax.jit(fn)(params, np.ones(4, np.float32))
    assert fn(params, np.array([0, 1, 0, 2], np.float32)).tolist() == [[1, 3]]


@pytest.mark.parametrize("kept", [(), ("w",)])
def test_weights_as_constants(rng: np.random.Generator, kept: tuple[str, ...]) -> None:
    """The program has the weights in it, and no parameters but those that are asked for."""
    weights = {"w": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}
    nodes = [make_node("MatMul", ["x", "w"], ["h"]), make_node("Add", ["h", "b"], ["y"])]
    model = make_model(nodes, [info("x", FLOAT, ["n", 3])], weights)
    fn, params = jqonnx.load(model, constants=True, parameters=kept)
    assert set(params) == set(kept)
    x = rng.normal(size=(2, 3)).astype(np.float32)
    (want,) = run_runtime(model, {"x": x})
    for run in (fn, jax.jit(fn)):
        np.testing.assert_allclose(run(params, x), want, rtol=1e-5, atol=1e-5)
    text = jax.jit(fn).lower(params, x).compile().as_text() or ""
    entry = next(line for line in text.splitlines() if "ENTRY" in line)
    assert entry.count("f32[3,4]") == len(kept)
    assert "f32[4]" not in entry.split("->")[0]
    assert fn.describe(params) == jqonnx.load(model)[0].describe(jqonnx.load(model)[1])
    exported = jqonnx.export(fn, params, [x])
    np.testing.assert_allclose(run_runtime(exported, {"x": x})[0], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="params: expected the entries that load returned, got unknown"):
        fn({**params, "b": weights["b"]}, x)
    with pytest.raises(ValueError, match="load: constants: expected a mapping if trainable=True, got True"):
        jqonnx.load(model, constants=True, trainable=True)
