"""Loaded functions under JAX's transformations, their parameters, their inputs, the command line, and operators of
ONNX Runtime."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx
from jaxquant.onnx.__main__ import main

from ..cases.onnx_models import Builder, make_mlp, make_single, quantize_model, run_runtime
from ..oracles import float_kernels_text
from ..support import processor
from ..support.hlo import Program


@pytest.fixture
def mlp(rng: np.random.Generator, tmp_path: pathlib.Path) -> onnx.ModelProto:
    batches = [rng.normal(size=(8, 16)).astype(np.float32) for _ in range(3)]
    return quantize_model(make_mlp(rng), batches, "qdq", tmp_path, per_channel=True)


@pytest.mark.slow
def test_jit_vmap_and_keywords_give_the_same_bits(mlp: onnx.ModelProto, rng: np.random.Generator) -> None:
    fn, params = jqonnx.load(mlp)
    x = rng.normal(size=(3, 8, 16)).astype(np.float32)
    expected = np.stack([run_runtime(mlp, {"x": part})[0] for part in x])
    mapped = jax.jit(jax.vmap(fn, (None, 0)))(params, x)
    np.testing.assert_array_equal(mapped, expected)
    np.testing.assert_array_equal(jax.jit(lambda p, v: fn(p, x=v))(params, x[0]), expected[0])
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(fn(params, x[1]), expected[1])


def test_params_hold_weights_as_quantized_arrays(mlp: onnx.ModelProto) -> None:
    _, params = jqonnx.load(mlp)
    weights = [value for value in params.values() if isinstance(value, jq.QuantizedArray)]
    assert sorted(w.shape for w in weights) == [(1, 32), (16, 32), (32, 5), (32, 32)] or len(weights) == 4
    assert all(value.dtype == jnp.int32 for value in params.values() if not isinstance(value, jq.QuantizedArray))


def test_float_parameters_have_gradients(rng: np.random.Generator) -> None:
    model = make_mlp(rng)
    fn, params = jqonnx.load(model)
    x = rng.normal(size=(8, 16)).astype(np.float32)
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(fn(p, x) ** 2)))(params)
    step = jax.tree.map(lambda p, g: p - 1e-4 * g, params, gradients)
    loss = jax.jit(lambda p: jnp.sum(fn(p, x) ** 2))
    assert loss(step) < loss(params)
    assert all(np.any(np.asarray(g)) for g in gradients.values())


def test_wrong_inputs_are_named(rng: np.random.Generator) -> None:
    fn, params = jqonnx.load(make_mlp(rng))
    x = np.zeros((8, 16), np.float32)
    calls = (
        (lambda: fn(params), ValueError, "inputs: expected each of"),
        (lambda: fn(params, x, x), ValueError, "inputs: expected at most 1"),
        (lambda: fn(params, x, x=x), ValueError, "inputs: expected each of"),
        (lambda: fn(params, x[0]), ValueError, r"x: expected shape \('n', 16\), got shape \(16,\)"),
        (lambda: fn(params, x[:, :5]), ValueError, "x: expected shape"),
        (lambda: fn(params, x.astype(np.int32)), TypeError, "x: expected dtype float32, got int32"),
    )
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


def test_a_shape_that_is_an_input_must_be_known() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "g", [x, shape], [y])
    fn, params = jqonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    values, target = np.ones((2, 3), np.float32), np.array([6])
    assert fn.static_inputs == {"shape"}
    assert fn(params, values, target).shape == (6,)
    assert jax.jit(lambda v: fn(params, v, target))(values).shape == (6,)
    with pytest.raises(jqonnx.ModelError, match="'shape', must be known"):
        jax.jit(fn)(params, values, target)


def test_resize_copies_large_integers() -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.INT32, shape) for n, shape in (("x", [1, 2]), ("y", None)))
    scales = numpy_helper.from_array(np.array([1, 2], np.float32), "scales")
    graph = helper.make_graph([helper.make_node("Resize", ["x", "", "scales"], ["y"])], "g", [x], [y], [scales])
    fn, params = jqonnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    values = np.array([[2**24 + 1, 2**31 - 1]], np.int32)
    np.testing.assert_array_equal(fn(params, values), values.repeat(2, axis=1))


def make_loop(count: int | None) -> onnx.ModelProto:
    """Return a model that scales x, and adds to an integer, again and again; without a count it is an input."""
    info = helper.make_tensor_value_info
    states = [info("v", TensorProto.FLOAT, [4]), info("n", TensorProto.INT32, [])]
    inner = [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), *states]
    nodes = [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Mul", ["v", "s"], ["w"])]
    nodes.append(helper.make_node("Add", ["n", "one"], ["o"]))
    results = [info("d", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [4]), info("o", TensorProto.INT32, [])]
    body = helper.make_graph(nodes, "b", inner, results)
    loop = helper.make_node("Loop", ["m", "", "x", "one"], ["y", "k"], body=body)
    constants = {"s": np.asarray(1.01, np.float32), "one": np.asarray(1, np.int32)}
    inputs = [info("x", TensorProto.FLOAT, [4])]
    if count is None:
        inputs.append(info("m", TensorProto.INT64, []))
    else:
        constants["m"] = np.asarray(count)
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [info("y", TensorProto.FLOAT, [4]), info("k", TensorProto.INT32, [])]
    graph = helper.make_graph([loop], "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("is_known", [True, False])
def test_loop(count: int, is_known: bool, rng: np.random.Generator) -> None:
    """A loop is written out, is jax.lax.scan, or is jax.lax.while_loop, by what is known of its trip count."""
    model = make_loop(count if is_known else None)
    fn, params = jqonnx.load(model)
    x = rng.normal(size=4).astype(np.float32)
    feeds = {"x": x} if is_known else {"x": x, "m": np.asarray(count)}
    results = jax.jit(lambda p, v: fn(p, **v))(params, feeds)
    for actual, expected in zip(results, run_runtime(model, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_loop_that_the_limit_cuts_short_has_no_numbers(rng: np.random.Generator) -> None:
    model, x = make_loop(None), rng.normal(size=4).astype(np.float32)
    fn, params = jqonnx.load(model, limits=jqonnx.Limits(iterations=5))
    run = jax.jit(lambda m: fn(params, x, m))
    for actual, expected in zip(run(np.asarray(5)), run_runtime(model, {"x": x, "m": np.asarray(5)}), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    y, k = run(np.asarray(6))
    assert np.isnan(y).all()
    assert k == np.iinfo(np.int32).min


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("lengths", [None, (5, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_dynamic_quantize_lstm_has_the_bits_of_the_runtime(
    direction: str, lengths: tuple[int, int] | None, dtype: str, rng: np.random.Generator
) -> None:
    count, size, hidden = 2 if direction == "bidirectional" else 1, 6, 8
    x = rng.normal(size=(5, 2, size)).astype(np.float32)
    # The last elements have the largest range; in the runtime they do not count behind the longest sequence.
    x[-1] *= 3
    # Products of 7-bit weights do not saturate on any processor. Scales and zero points are a matrix's.
    bound, point = 64, 128 if dtype == "uint8" else 0
    constants = {
        "w": (rng.integers(-bound, bound, (count, size, 4 * hidden)) + point).astype(dtype),
        "r": (rng.integers(-bound, bound, (count, hidden, 4 * hidden)) + point).astype(dtype),
        "b": rng.normal(size=(count, 8 * hidden)).astype(np.float32),
        "lengths": None if lengths is None else np.array(lengths, np.int32),
        "h": rng.normal(size=(count, 2, hidden)).astype(np.float32),
        "c": rng.normal(size=(count, 2, hidden)).astype(np.float32),
        "p": rng.normal(size=(count, 3 * hidden)).astype(np.float32),
        "ws": rng.uniform(0.004, 0.008, count).astype(np.float32),
        "wz": np.full(count, point, dtype),
        "rs": rng.uniform(0.004, 0.008, count).astype(np.float32),
        "rz": np.full(count, point, dtype),
    }
    model = make_single("DynamicQuantizeLSTM", {"x": x}, constants, outputs=3, direction=direction, hidden_size=hidden)
    # With several threads the runtime divides the batch, and each part has a range of its own.
    expected = run_runtime(model, {"x": x}, threads=1)
    for constants_too in (None, True):
        fn, params = jqonnx.load(model, constants=constants_too)
        for actual, value in zip(jax.jit(fn)(params, x), expected, strict=True):
            np.testing.assert_array_equal(actual, value)


@pytest.mark.parametrize("between", ["Unsqueeze", "Transpose", "Neg", "Softmax"])
def test_product_is_rounded_before_a_sum_behind_it(between: str, rng: np.random.Generator) -> None:
    b = Builder(rng)
    y = b.add("Mul", "x", b.draw(32))
    if between == "Unsqueeze":
        y = b.add("Unsqueeze", y, b.hold([1], np.int64))
    elif between == "Transpose":
        y = b.add("Transpose", y, perm=[1, 0])
    else:
        y = b.add(between, y)
    y = y if between == "Softmax" else b.add("Add", y, b.hold(rng.normal(size=())))
    model = b.build([16, 32], y)
    x = rng.normal(size=(16, 32)).astype(np.float32)
    fn, params = jqonnx.load(model)
    if between == "Softmax" and processor.count_lanes() != 16:  # the runtime adds in another order here
        (factor,) = model.graph.initializer
        expected = float_kernels_text.softmax(x * numpy_helper.to_array(factor), 16)
    else:
        expected = run_runtime(model, {"x": x})[0]
    np.testing.assert_array_equal(jax.jit(fn)(params, x), expected)


def test_error_has_the_shapes_of_the_inputs(rng: np.random.Generator) -> None:
    b = Builder(rng)
    fn, params = jqonnx.load(b.build(["n"], b.add("Transpose", "x", perm=[0, 2, 3, 1])))
    with pytest.raises(jqonnx.ModelError, match=r"node 0, Transpose 'Transpose0': (.|\n)*; its inputs are 'x' \(36,\)"):
        fn(params, np.zeros(36, np.float32))


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("op", "shapes", "attributes"),
    [
        ("FusedMatMul", [(5, 4), (5, 6)], {"transA": 1, "alpha": 0.5}),
        ("BiasGelu", [(5, 4), (4,)], {}),
        ("Gelu", [(5, 4)], {}),
        ("FastGelu", [(5, 4), (4,)], {}),
        ("QuickGelu", [(5, 4)], {}),
        ("SkipLayerNormalization", [(2, 5, 4), (2, 5, 4), (4,), (4,), (4,)], {}),
        ("SkipSimplifiedLayerNormalization", [(2, 5, 4), (2, 5, 4), (4,)], {}),
        ("FusedConv", [(1, 2, 5, 5), (3, 2, 3, 3), (3,)], {"activation": "Relu"}),
        ("FusedGemm", [(5, 4), (4, 3), (3,)], {"activation": "LeakyRelu", "activation_alpha": 0.2}),
    ],
)
def test_fused_float_operator(op: str, shapes: Any, attributes: Any, rng: np.random.Generator) -> None:
    feeds = {f"x{i}": _draw(rng, *shape) for i, shape in enumerate(shapes)}
    model = make_single(op, feeds, **attributes)
    fn, params = jqonnx.load(model)
    actual = jax.jit(fn)(params, *feeds.values())
    np.testing.assert_allclose(actual, run_runtime(model, feeds)[0], atol=1e-4, rtol=1e-3)


def test_command_line(mlp: onnx.ModelProto, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, x = tmp_path / "model.onnx", np.ones((8, 16), np.float32)
    onnx.save(mlp, path)
    assert main(["inspect", str(path)]) == 0
    table = capsys.readouterr().out
    assert "QGemm" in table
    assert "integer: 4 nodes" in table
    np.savez(tmp_path / "x.npz", x=x)
    assert main(["run", str(path), "--inputs", str(tmp_path / "x.npz"), "--outputs", str(tmp_path / "y.npz")]) == 0
    assert "float32[8, 5]" in capsys.readouterr().out
    with np.load(tmp_path / "y.npz") as file:
        (y,) = file.values()
    np.testing.assert_array_equal(y, run_runtime(mlp, {"x": x})[0])
    path.write_bytes(b"")
    assert main(["inspect", str(path)]) == 2
    assert "no ONNX model" in capsys.readouterr().err


def test_all_unknown_operators_are_listed_at_once() -> None:
    info = helper.make_tensor_value_info
    inner = helper.make_graph([helper.make_node("Inner", [], ["z"], domain="own")], "b", [], [info("z", 1, None)])
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["a"]),
        helper.make_node("Outer", ["a"], ["b"], domain="own"),
        helper.make_node("If", ["b"], ["y"], then_branch=inner, else_branch=inner),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, [2])], [info("y", 1, None)])
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    with pytest.raises(jqonnx.ModelError, match=r"not supported: StringNormalizer, own\.Inner, own\.Outer$"):
        jqonnx.load(model)


def make_powers(names: list[str], exponents: dict[str, Any], literals: dict[str, Any]) -> onnx.ModelProto:
    """Return a model of x ** n + x for each exponent, an initializer or the result of a Constant."""
    nodes = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(v)) for n, v in literals.items()]
    for name in names:
        nodes += [
            helper.make_node("Pow", ["x", name], [f"t_{name}"]),
            helper.make_node("Add", [f"t_{name}", "x"], [f"y_{name}"]),
        ]
    tensors = [numpy_helper.from_array(v, n) for n, v in exponents.items()]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", *(f"y_{n}" for n in names))]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_small_powers_are_the_products_of_the_runtime(rng: np.random.Generator) -> None:
    exponents = {"two": np.float32(2), "three": np.array([3], np.float32), "other": np.float32(1.5)}
    literals = {"literal": np.asarray(3, np.int64)}
    model = make_powers([*exponents, *literals], {n: np.asarray(v) for n, v in exponents.items()}, literals)
    assert jqonnx.load(model)[1] == {}
    fn, params = jqonnx.load(model, parameters=["other"])
    assert sorted(params) == ["other"]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-30, -1.5]
    x = np.concatenate([np.abs(rng.normal(0, 3, 4000)), special]).astype(np.float32)
    expected = run_runtime(model, {"x": x})
    for run in (fn, jax.jit(fn)):
        results = run(params, x)
        for i in (0, 1, 3):
            np.testing.assert_array_equal(results[i], expected[i])
        np.testing.assert_allclose(results[2], expected[2], rtol=1e-6)
    slope = jax.grad(lambda v: fn(params, v[None])[1].sum())(np.float32(2))
    assert slope == 13


def test_the_names_of_inputs_stay_in_an_export() -> None:
    model = make_powers(["two"], {"two": np.asarray(2, np.float32)}, {})
    model.graph.input[0].name = "tokens.1"
    for node in model.graph.node:
        node.input[:] = ["tokens.1" if name == "x" else name for name in node.input]
    fn, params = jqonnx.load(model)
    x = jnp.ones(3)
    named = (jqonnx.export(fn, params, [x]), jqonnx.export(fn, [params, x]))
    assert [value.name for value in named[0].graph.input] == ["tokens.1"]
    assert named[1].graph.input[-1].name == "tokens.1"


def test_documented_number_of_operators() -> None:
    from jaxquant.onnx.load.graph import OPERATORS

    assert len({key for key in OPERATORS if key[0] != "jaxquant"}) >= 160


def test_loops_do_not_hold_the_numbers_of_a_layer(rng: np.random.Generator) -> None:
    """XLA:CPU compiles equal loops once: those of two layers are equal if no number of a layer is a part of them."""
    b, y, numbers = Builder(rng), "x", []
    for layer in range(2):
        # XLA writes these in as many decimals as Python.
        scale, factor, offset = (int(n) / 64 for n in rng.choice(np.arange(65, 128, 2), 3, replace=False))
        point = 91 + layer
        numbers += [*map(str, (scale, factor, offset)), str(point)]
        codes, x_scale, x_point = b.add("DynamicQuantizeLinear", y, outputs=3)
        weights = b.hold(rng.integers(-128, 128, (64, 64)), np.int8)
        acc = b.add("MatMulInteger", codes, weights, x_point, b.hold(point, np.int8))
        product = b.add("Mul", b.add("Cast", acc, to=TensorProto.FLOAT), b.add("Mul", x_scale, b.hold(scale)))
        y = b.add("Relu", b.add("Add", b.add("Mul", product, b.hold(factor)), b.hold(offset)))
    model = b.build([16, 64], y)
    x = rng.normal(size=(16, 64)).astype(np.float32)
    fn, params = jqonnx.load(model, constants=True)
    np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])
    np.testing.assert_array_equal(jax.vmap(lambda x: fn(params, x))(x[None])[0], jax.jit(fn)(params, x))
    program = Program(lambda x: fn(params, x), x)
    loops = [i for name, body in program.computations.items() if name != program.entry for i in body]
    held = {i.rest.split(")")[0] for i in loops if i.opcode == "constant"}
    # With jax 0.10, XLA removes the barriers before it forms the loops.
    if jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 12):
        assert not held & set(numbers)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 3, 24), (1, 1, 24), (24,)])
@pytest.mark.parametrize("points", ["none", "one", "columns"])
def test_products_with_known_codes_are_the_runtimes(
    points: str, shape: tuple[int, ...], dtype: type, rng: np.random.Generator
) -> None:
    b = Builder(rng)
    codes, _, x_point = b.add("DynamicQuantizeLinear", "x", outputs=3)
    bounds = np.iinfo(dtype)
    weights = b.hold(rng.integers(bounds.min, bounds.max + 1, (24, 10)), dtype)
    drawn = rng.integers(bounds.min, bounds.max + 1, () if points == "one" else 10)
    extra = () if points == "none" else (x_point, b.hold(drawn, dtype))
    model = b.build(list(shape), b.add("Cast", b.add("MatMulInteger", codes, weights, *extra), to=TensorProto.FLOAT))
    x = rng.normal(size=shape).astype(np.float32)
    for constants in (None, True):
        fn, params = jqonnx.load(model, constants=constants)
        np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0])
