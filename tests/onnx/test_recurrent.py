"""Recurrent layers of loaded models: beside ONNX Runtime, with one product of the whole input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx
from jaxquant import ops
from jaxquant.onnx.load.operators.recurrent import make_state_product

from ..cases.onnx_models import run_runtime

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# The products in a step: a GRU multiplies its state by two parts of R, one before and one after the reset gate.
PRODUCTS = {"LSTM": 1, "GRU": 2, "RNN": 1}


def make_model(rng: np.random.Generator, op: str, direction: str, inputs: int, hidden: int) -> ModelProto:
    count = 2 if direction == "bidirectional" else 1
    shapes = {
        "w": (count, GATES[op] * hidden, inputs), "r": (count, GATES[op] * hidden, hidden),
        "b": (count, 2 * GATES[op] * hidden),
    }  # fmt: skip
    arrays = [
        numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name) for name, shape in shapes.items()
    ]
    node = helper.make_node(op, ["x", *shapes, "lengths"], ["y", "h"], hidden_size=hidden, direction=direction)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", inputs]),
         helper.make_tensor_value_info("lengths", TensorProto.INT32, ["N"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "h")], arrays,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def count_products(jaxpr: Any) -> int:
    """Return the number of matrix products in the scans of a program."""
    total = 0
    for equation in jaxpr.eqns:
        bodies = [part.jaxpr for part in jax.tree.leaves(list(equation.params.values())) if hasattr(part, "jaxpr")]
        if equation.primitive.name == "scan":
            total += sum(str(body).count("dot_general[") for body in bodies)
        else:
            total += sum(map(count_products, bodies))
    return total


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_the_input_is_multiplied_once(rng: np.random.Generator, op: str, direction: str) -> None:
    """The step of the scan has the products with the state, and none with the input."""
    time, batch, inputs, hidden = (int(n) for n in rng.integers(2, 9, 4))
    model = make_model(rng, op, direction, inputs, hidden)
    x = rng.normal(size=(time, batch, inputs)).astype(np.float32)
    lengths = rng.integers(1, time + 1, batch).astype(np.int32)
    fn, params = jqonnx.load(model)
    want = run_runtime(model, {"x": x, "lengths": lengths})
    for run in (fn, jax.jit(fn)):
        for result, expected in zip(run(params, x, lengths), want, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    count = 2 if direction == "bidirectional" else 1
    assert count_products(jax.make_jaxpr(fn)(params, x, lengths).jaxpr) == count * PRODUCTS[op]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_the_state_is_multiplied_by_weights_prepared_before_the_scan(
    rng: np.random.Generator, kind: type, batch: int
) -> None:
    """An LSTM on codes multiplies one row by floats, whose sums are exact, and several by codes feature by feature."""
    time, inputs = int(rng.integers(6, 12)), int(rng.integers(2, 9))
    hidden = int(rng.integers(9, 17))
    bounds = np.iinfo(kind)
    codes = {
        name: rng.integers(bounds.min, bounds.max + 1, (2, n, 4 * hidden)).astype(kind)
        for name, n in (("w", inputs), ("r", hidden))
    }
    encodings = {f"{n}_scale": rng.uniform(0.001, 0.01, 2).astype(np.float32) for n in codes}
    points = {f"{n}_point": rng.integers(bounds.min, bounds.max + 1, 2).astype(kind) for n in codes}
    names = ["x", "w", "r", "", "", "", "", "", "w_scale", "w_point", "r_scale", "r_point"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", names, ["y"], domain="com.microsoft", hidden_size=hidden, direction="bidirectional"
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in {**codes, **encodings, **points}.items()]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    x = rng.normal(size=(time, batch, inputs)).astype(np.float32)
    fn, params = jqonnx.load(model)
    (want,) = run_runtime(model, {"x": x}, threads=1)
    # Weights that are constants are multiplied in another layout.
    constant, _ = jqonnx.load(model, constants=True)
    for run in (fn, jax.jit(fn), lambda _, x: jax.jit(constant)({}, x)):
        np.testing.assert_allclose(run(params, x), want, rtol=1e-6, atol=1e-6)
    for mapped in (jax.vmap(lambda x: fn(params, x)), jax.vmap(lambda x: constant({}, x))):
        np.testing.assert_allclose(mapped(np.stack([x, -x]))[0], want, rtol=1e-6, atol=1e-6)
    short = run_runtime(model, {"x": x[:2]}, threads=1)[0]
    np.testing.assert_allclose(jax.jit(fn)(params, x[:2]), short, rtol=1e-6, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: fn(params, x).sum()))(x)
    assert gradient.shape == x.shape
    assert np.abs(gradient).max() > 0
    with_constants = jax.jit(jax.grad(lambda x: constant({}, x).sum()))(x)
    np.testing.assert_allclose(with_constants, gradient, rtol=1e-5, atol=1e-5)
    text = jax.jit(fn).lower(params, x).compile().as_text()
    assert text is not None
    if jax.default_backend() == "cpu":
        prepared = f"f32[{hidden},{4 * hidden}]" if batch == 1 else f"s8[{4 * hidden},{hidden}]"
        assert prepared in text


@pytest.mark.parametrize("hidden", [258, 512])
def test_the_largest_sums_of_floats_are_exact(hidden: int) -> None:
    """Codes at the ends of their range, with as many rows as are multiplied as floats, without and with their sums."""
    r = np.full((hidden, 4 * hidden), 127, np.int8)
    r[:, ::2] = -128
    r[::3, 1::4] = 126
    state = np.where(np.arange(hidden) % 5, 1.0, -1.0 / 255).astype(np.float32)[None]
    scale, point = np.float32(0.01), np.int8(-128)
    product = make_state_product(jnp.asarray(r), jnp.asarray(scale), jnp.asarray(point), 6, 1)
    assert product is not None
    for sign in (1, -1):
        expected = ops.dynamic_quantize_matmul(sign * state, r, scale, point)
        np.testing.assert_array_equal(jax.jit(product)(sign * state), expected)
