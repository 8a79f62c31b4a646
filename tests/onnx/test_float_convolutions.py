"""Convolutions of floats in loaded models: beside ONNX Runtime, in the forms that a CPU runs fast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime


def make_model(weights: np.ndarray, bias: np.ndarray, rank: int, **attributes: Any) -> ModelProto:
    """Return a model with a Conv; all lengths of x are open."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (("w", weights), ("b", bias))]
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * rank)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def draw_depthwise(rng: np.random.Generator, rank: int) -> tuple[ModelProto, np.ndarray]:
    """Return a model with a depthwise Conv of random attributes, and an input."""
    channels, kernel = int(rng.integers(2, 20)), rng.integers(1, 5, rank)
    dilations, strides = rng.integers(1, 3, rank), rng.integers(1, 4, rank)
    pads = rng.integers(0, 3, 2 * rank)
    weights, bias = rng.normal(size=(channels, 1, *kernel)), rng.normal(size=channels)
    x = rng.normal(size=(rng.integers(1, 4), channels, *(rng.integers(8, 14, rank))))
    model = make_model(
        weights.astype(np.float32), bias.astype(np.float32), rank + 2, group=channels, pads=pads.tolist(),
        strides=strides.tolist(), dilations=dilations.tolist(),
    )  # fmt: skip
    return model, x.astype(np.float32)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_depthwise_convolutions(rng: np.random.Generator, rank: int) -> None:
    """They are sums of shifted products: no convolution is compiled, which XLA:CPU would run many times slower."""
    model, x = draw_depthwise(rng, rank)
    fn, params = jqonnx.load(model)
    (want,) = run_runtime(model, {"x": x})
    for run in (fn, jax.jit(fn), lambda p, x: jax.vmap(lambda part: fn(p, part[None])[0])(x)):
        np.testing.assert_allclose(run(params, x), want, rtol=1e-5, atol=1e-5)
    scanned = jax.lax.scan(lambda carry, part: (carry, fn(params, part)), 0, jnp.stack([x, 2 * x]))[1]
    np.testing.assert_allclose(scanned[0], want, rtol=1e-5, atol=1e-5)
    text = jax.jit(fn).lower(params, x).compile().as_text()
    assert text is not None
    assert ("convolution(" in text) == (jax.default_backend() != "cpu")


def test_the_derivatives_of_depthwise_convolutions(rng: np.random.Generator) -> None:
    model, x = draw_depthwise(rng, 2)
    fn, params = jqonnx.load(model)
    node = model.graph.node[0]
    settings = {a.name: list(a.ints) for a in node.attribute if a.name != "group"}
    pads = [*zip(settings["pads"][:2], settings["pads"][2:], strict=True)]

    def convolve(params: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, params["w"], settings["strides"], pads, None, settings["dilations"], feature_group_count=x.shape[1],
            precision="highest",
        )  # fmt: skip
        return y + params["b"][None, :, None, None]

    got, want = (
        jax.grad(lambda p, x, f=f: jnp.sum(jnp.sin(f(p, x))), argnums=(0, 1))(params, x) for f in (fn, convolve)
    )
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_a_depthwise_convolution_is_quantized_and_exported(rng: np.random.Generator) -> None:
    """While a program is traced for its contractions, the convolution is one."""
    model, x = draw_depthwise(rng, 2)
    fn, params = jqonnx.load(model)
    jax.jit(fn)(params, x)  # JAX keeps this trace, which must not be used below
    prepared = jq.prepare(fn, params, x, rules=jq.recipes.w8a8_dynamic())
    assert [(row.operation, row.form) for row in prepared.coverage.rows] == [("conv_general_dilated", "integer")]
    exported = jqonnx.export(fn, params, [x])
    assert [node.op_type for node in exported.graph.node].count("Conv") == 1
    np.testing.assert_allclose(run_runtime(exported, {"x": x})[0], fn(params, x), rtol=1e-5, atol=1e-5)


def test_a_dimension_of_one_element(rng: np.random.Generator) -> None:
    """A kernel along one dimension is compiled for that dimension: XLA:CPU's kernel works along the last."""
    weights, bias = rng.normal(size=(6, 4, 3, 1)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    x = rng.normal(size=(2, 4, 9, 1)).astype(np.float32)
    model = make_model(weights, bias, 4, pads=[1, 0, 2, 0], strides=[2, 1])
    fn, params = jqonnx.load(model)
    (want,) = run_runtime(model, {"x": x})
    for run in (fn, jax.jit(fn)):
        np.testing.assert_allclose(run(params, x), want, rtol=1e-5, atol=1e-5)
    (equation,) = [e for e in jax.make_jaxpr(fn)(params, x).jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert equation.outvars[0].aval.ndim == 3  # type: ignore[attr-defined]


def test_a_window_that_does_not_fit(rng: np.random.Generator) -> None:
    weights = rng.normal(size=(3, 1, 5, 5)).astype(np.float32)
    fn, params = jqonnx.load(make_model(weights, np.zeros(3, np.float32), 4, group=3))
    assert fn(params, np.zeros((1, 3, 4, 9), np.float32)).shape == (1, 3, 0, 5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_kernel_of_one_position(rng: np.random.Generator, rank: int) -> None:
    """It is a product of matrices, of the weights as they are: no convolution, and no transposed weights."""
    features, channels = (int(n) for n in rng.integers(2, 40, 2))
    weights, bias = rng.normal(size=(features, channels, *(1,) * rank)), rng.normal(size=features)
    strides = rng.integers(1, 4, rank).tolist()
    model = make_model(weights.astype(np.float32), bias.astype(np.float32), rank + 2, strides=strides)
    fn, params = jqonnx.load(model)
    lengths = [*rng.integers(5, 12, rank).tolist()]
    for shape in ((2, channels, *lengths), (1, channels, *(1,) * rank), (1, channels, *(2,) * rank)):
        x = rng.normal(size=shape).astype(np.float32)
        (want,) = run_runtime(model, {"x": x})
        for run in (fn, jax.jit(fn), lambda p, x: jax.vmap(lambda part: fn(p, part[None])[0])(x)):
            np.testing.assert_allclose(run(params, x), want, rtol=1e-5, atol=1e-5)
        primitives = [e.primitive.name for e in jax.make_jaxpr(fn)(params, x).jaxpr.eqns]
        assert "conv_general_dilated" not in primitives
    got, want = (
        jax.grad(lambda p, x, f=f: jnp.sum(jnp.sin(f(p, x))), argnums=(0, 1))(params, x)
        for f in (
            fn,
            lambda p, x: (
                jax.lax.conv_general_dilated(x, p["w"], strides, "VALID", precision="highest")
                + p["b"].reshape(1, -1, *(1,) * rank)
            ),
        )
    )
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)
