"""Float operators of loaded models against ONNX Runtime: the same bits, derivatives, and the same operators again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime
from ..oracles import float_kernels_text
from ..support import processor


def make_model(nodes: list[Any], shape: tuple[Any, ...], constants: dict[str, Any] | None = None) -> onnx.ModelProto:
    """Return a model from x to what its nodes return."""
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    outputs = [helper.make_empty_tensor_value_info(name) for node in nodes for name in node.output if name[0] == "y"]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [x], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


node = helper.make_node
NODES = [
    node("Softmax", ["x"], ["y0"], axis=-1),
    node("Softmax", ["x"], ["y1"], axis=1),
    node("Tanh", ["x"], ["y2"]),
    node("Sigmoid", ["x"], ["y3"]),
    node("ReduceSum", ["x", "last"], ["y4"]),
    node("ReduceMean", ["x", "last"], ["y5"], keepdims=0),
    node("Mul", ["x", "x"], ["square"]),
    node("ReduceMean", ["square", "two"], ["y6"]),
]
AXES = {"last": np.array([-1]), "two": np.array([-1, 1])}


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", [16, 20, 48, 64, 76, 96, 128, 200, 512])
def test_sums_and_approximations_have_the_bits_of_the_runtime(length: int, rng: np.random.Generator) -> None:
    """Softmax adds in the order of AVX-512 on every processor, also where ONNX Runtime has another."""
    shape = (3, 32, length)
    x = (rng.normal(size=shape) * rng.choice([1e-3, 1, 6], shape)).astype(np.float32)
    model = make_model(NODES, shape, AXES)
    fn, params = jqonnx.load(model)
    expected = run_runtime(model, {"x": x}, "none")
    lanes = processor.count_lanes()
    for i, axis in ((0, -1), (1, 1)):  # the outputs of Softmax
        wide, own = (
            np.moveaxis(float_kernels_text.softmax(np.moveaxis(x, axis, -1), n), -1, axis) for n in (16, lanes or 16)
        )
        if lanes:
            np.testing.assert_array_equal(expected[i], own)
        expected[i] = wide
    for run in (jax.jit(fn), fn):
        for actual, y in zip(run(params, x), expected, strict=True):
            np.testing.assert_array_equal(actual, y)


ANGLES = [node(op, ["x"], [f"y{i}"]) for i, op in enumerate(("Exp", "Sin", "Cos"))]


@pytest.mark.parametrize("scale", [0.01, 1, 20, 4000])
def test_exponentials_and_angles_have_the_bits_of_the_runtime(scale: float, rng: np.random.Generator) -> None:
    x = (rng.normal(size=4096) * scale).astype(np.float32)
    x[:8] = 0.0, -0.0, np.pi / 4, -np.pi / 2, np.inf, -np.inf, np.nan, 88.7
    model = make_model(ANGLES, ("n",))
    fn, params = jqonnx.load(model)
    exponentials, *others = run_runtime(model, {"x": x}, "none")
    # XLA:CPU has no floats below the normal ones.
    exponentials = np.where(exponentials < np.finfo(np.float32).tiny, 0, exponentials)
    mapped = jax.jit(jax.vmap(fn, (None, 0)))(params, x.reshape(4, -1))
    for results in (jax.jit(fn)(params, x), fn(params, x), [y.reshape(-1) for y in mapped]):
        for actual, y in zip(results, (exponentials, *others), strict=True):
            np.testing.assert_array_equal(actual, y)


def test_angles_that_are_no_packets_are_nearly_equal(rng: np.random.Generator) -> None:
    x = (rng.normal(size=7) * 100).astype(np.float32)
    model = make_model(ANGLES[1:], ("n",))
    fn, params = jqonnx.load(model)
    for actual, y in zip(jax.jit(fn)(params, x), run_runtime(model, {"x": x}, "none"), strict=True):
        np.testing.assert_allclose(actual, y, atol=1e-6)


def test_derivatives_of_exponentials_and_angles(rng: np.random.Generator) -> None:
    fn, params = jqonnx.load(make_model(ANGLES, ("n",)))
    x = rng.normal(size=8).astype(np.float32)
    for i, slope in enumerate((np.exp, np.cos, lambda x: -np.sin(x))):
        found = jax.jit(jax.grad(lambda x, i=i: jnp.sum(fn(params, x)[i])))(x)
        np.testing.assert_allclose(found, slope(x), rtol=1e-5)


@pytest.mark.slow
def test_a_mean_square_norm_has_the_bits_of_the_runtime(rng: np.random.Generator) -> None:
    """XLA would contract the products with the sums, and replace the division by the root."""
    nodes = [
        node("Pow", ["x", "power"], ["square"]),
        node("ReduceMean", ["square", "last"], ["mean"]),
        node("Add", ["mean", "epsilon"], ["positive"]),
        node("Sqrt", ["positive"], ["root"]),
        node("Div", ["x", "root"], ["normal"]),
        node("Mul", ["normal", "scale"], ["scaled"]),
        node("Add", ["scaled", "x"], ["y"]),
    ]
    constants = {
        "power": np.float32(2),
        "epsilon": np.float32(1e-6),
        "last": AXES["last"],
        "scale": rng.normal(size=64).astype(np.float32),
    }
    x = rng.normal(size=(40, 64)).astype(np.float32)
    model = make_model(nodes, ("n", 64), constants)
    fn, params = jqonnx.load(model)
    np.testing.assert_array_equal(jax.jit(fn)(params, x), run_runtime(model, {"x": x}, "none")[0])


@pytest.mark.slow
def test_derivatives_and_maps(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32)
    fn, params = jqonnx.load(make_model(NODES, ("n", 4, 16), AXES))

    def compute(x: jax.Array) -> list[jax.Array]:
        square = x * x
        sums = [x.sum(-1, keepdims=True), x.mean(-1), square.mean((-1, 1), keepdims=True)]
        return [jax.nn.softmax(x), jax.nn.softmax(x, 1), jnp.tanh(x), jax.nn.sigmoid(x), *sums]

    weights = [jnp.asarray(rng.normal(size=y.shape), jnp.float32) for y in compute(x)]

    def weigh(results: Any) -> Any:
        return sum(jnp.sum(y * w) for y, w in zip(results, weights, strict=True))

    actual, expected = (jax.jit(jax.grad(lambda x, f=f: weigh(f(x))))(x) for f in (lambda x: fn(params, x), compute))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    mapped = jax.jit(jax.vmap(lambda row: fn(params, row[None])))(x)
    for y, result in zip(mapped, jax.jit(fn)(params, x), strict=True):
        np.testing.assert_allclose(y[:, 0], result if result.shape == y[:, 0].shape else result[:, 0], atol=1e-6)


def test_angles_are_exported_again() -> None:
    fn, params = jqonnx.load(make_model(ANGLES, ("n",)))
    model = jqonnx.export(fn, params, [np.zeros(8, np.float32)])
    assert [node.op_type for node in model.graph.node] == ["Exp", "Sin", "Cos"]


def test_the_operators_are_exported_again(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 4, 16)).astype(np.float32)
    fn, params = jqonnx.load(make_model(NODES, ("n", 4, 16), AXES))
    model = jqonnx.export(fn, params, [x], batch="N")
    operators = [node.op_type for node in model.graph.node]
    counts = {name: operators.count(name) for name in ("Softmax", "Tanh", "Sigmoid", "ReduceSum", "Exp")}
    assert counts == {"Softmax": 2, "Tanh": 1, "Sigmoid": 1, "ReduceSum": 3, "Exp": 0}
    for y, expected in zip(run_runtime(model, {"x": x}, "none"), jax.jit(fn)(params, x), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-7)
