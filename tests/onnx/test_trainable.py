"""Fine-tuning of a loaded QDQ model, and its way back to integers, against ONNX Runtime on the same numbers."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import MODELS, quantize_model, run_runtime


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", pytest.param("cnn", marks=pytest.mark.full)])
def test_training_lowers_a_loss_and_is_exported_again(
    network: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    make, shape = MODELS[network]
    batches = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    model = quantize_model(make(rng), batches, "qdq", tmp_path, per_channel=True)
    x = batches[0]
    fn, params = jqonnx.load(model, trainable=True)
    assert all(value.dtype == jnp.float32 for value in params.values())
    (expected,) = run_runtime(model, {"x": x}, "none")
    np.testing.assert_allclose(jax.jit(fn)(params, x), expected, atol=0.05)

    # Untrained, the way back gives the model's integers.
    integer, codes = fn.convert(params)
    loaded, _ = jqonnx.load(model)
    assert [node.op for node in integer.graph.nodes] == [node.op for node in loaded.graph.nodes]
    np.testing.assert_array_equal(jax.jit(integer)(codes, x), run_runtime(model, {"x": x})[0])

    target = rng.normal(size=expected.shape).astype(np.float32)

    def find_loss(p: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((fn(p, x) - target) ** 2)

    # Scales are small numbers that must stay positive.
    rates = {name: 1e-4 if "scale" in name else 2e-3 for name in params}
    step = jax.jit(lambda p: jax.tree.map(lambda v, g, rate: v - rate * g, p, jax.grad(find_loss)(p), rates))
    trained = params
    for _ in range(20):
        trained = step(trained)
    before, after = (float(find_loss(p)) for p in (params, trained))
    assert after < before
    integer, codes = fn.convert(trained)
    # What was trained is what is served.
    exported = jqonnx.export(integer, codes, [x], batch="N")
    assert [value.name for value in exported.graph.input] == ["x"]
    onnx.checker.check_model(exported)
    np.testing.assert_allclose(run_runtime(exported, {"x": x})[0], jax.jit(fn)(trained, x), atol=0.15)
    for level in ("all",) if network == "mlp" else ("disabled", "basic", "extended", "all"):
        report = jqonnx.verify(exported, integer, codes, [x] if network == "mlp" else [x, x[:2]], level=level)
        assert report.is_exact, str(report)
        assert sum(row.kind == "codes" for row in report.rows) >= 2


UINT8 = jq.QuantSpec(jnp.uint8)


def make_attention_weights(rng: np.random.Generator) -> dict[str, Any]:
    """Return quantized weights whose columns are features of several heads, and two biases that are equal."""
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    return {
        "split": jq.quantize(draw(6, 2, 4), jq.QuantSpec(jnp.int8, jq.PerAxis((1, 2)))),
        "other": jq.quantize(draw(6, 2, 4), jq.QuantSpec(jnp.uint8)),  # with a zero point
        "merge": jq.quantize(draw(2, 4, 6), jq.QuantSpec(jnp.int8, jq.PerAxis(2))),
        "first": jnp.zeros(6),
        "second": jnp.zeros(6),
    }


def apply_heads(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return contractions with float results, of codes that are reshaped before and after."""
    x = x * 0.5 + params["first"][None]
    q = jq.quantize(x, UINT8, range=(-1.0, 2.0))
    split, other = (jq.einsum("bi,ihd->bhd", q, params[name]) for name in ("split", "other"))
    heads = jq.quantize(jnp.tanh(split) + other, UINT8, range=(-1.5, 2.0))
    return jq.einsum("bhd,hdo->bo", heads, params["merge"]) + params["second"][None]


@pytest.mark.slow
def test_an_exported_model_is_trained_and_exported_again(rng: np.random.Generator) -> None:
    """The products of codes that `export` writes have gradients, and return to the same operators."""
    weights, x = make_attention_weights(rng), jnp.asarray(rng.normal(0, 1, (5, 6)), jnp.float32)
    model = jqonnx.export(apply_heads, weights, [x], batch="N")
    served = jax.jit(lambda x: apply_heads(weights, x))(x)
    fn, params = jqonnx.load(model, trainable=True)
    names = {"first", "second", *(f"{n}.{part}" for n in ("split", "other", "merge") for part in ("codes", "scale"))}
    # Besides, there are the scales of the activations, but not the 0.5 of the formula.
    others = set(params) - names
    assert names <= set(params)
    assert len(others) == 2
    assert fn.scales == {*others, *(name for name in names if name.endswith("scale"))}
    np.testing.assert_allclose(jax.jit(fn)(params, x), served, atol=1e-5)
    integer, codes = fn.convert(params)
    np.testing.assert_array_equal(jax.jit(integer)(codes, x), served)
    assert "MatMulInteger" in {node.op for node in integer.graph.nodes}

    target = jnp.asarray(rng.normal(0, 1, served.shape), jnp.float32)
    find_loss = jax.jit(lambda p: jnp.mean((fn(p, x) - target) ** 2))
    rates = {name: 1e-5 if name in fn.scales else 1e-2 for name in params}
    step = jax.jit(lambda p: jax.tree.map(lambda v, g, rate: v - rate * g, p, jax.grad(find_loss)(p), rates))
    trained = params
    for _ in range(20):
        trained = step(trained)
    assert find_loss(trained) < find_loss(params)
    # Each parameter has a gradient of its own, also one that was equal to another.
    assert all(bool(jnp.any(trained[name] != params[name])) for name in params)
    assert bool(jnp.any(trained["first"] != trained["second"]))
    integer, codes = fn.convert(trained)
    np.testing.assert_allclose(jax.jit(integer)(codes, x), jax.jit(fn)(trained, x), atol=1e-5)
    again = jqonnx.export(integer, codes, [x], batch="N")
    assert [node.op_type for node in again.graph.node] == [node.op_type for node in model.graph.node]
    for level in ("disabled", "all"):
        report = jqonnx.verify(again, integer, codes, [x, x[:2]], level=level)
        assert report.is_exact, str(report)
    np.testing.assert_allclose(run_runtime(again, {"x": np.asarray(x)})[0], jax.jit(fn)(trained, x), atol=1e-5)


@pytest.mark.parametrize("zero_point", [0, 13])
def test_an_integer_network_with_float_results_is_trained(zero_point: int, rng: np.random.Generator) -> None:
    """The last codes are dequantized by Cast, Sub and Mul, which have their gradients, too."""
    weights = [jq.quantize(rng.normal(0, 0.3, (6, 6)).astype(np.float32), jq.QuantSpec(jnp.int8)) for _ in range(2)]
    output = jq.Quantizer(UINT8, 0.05, zero_point)

    def network(x: jax.Array) -> jax.Array:
        q = jq.matmul(jq.quantize(x, UINT8, range=(-3.0, 2.5)), weights[0], output=output)
        return jq.matmul(q, weights[1], output=output).dequantize()

    x = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)
    model = jqonnx.export(network, [x], batch="N", form="qdq")
    fn, params = jqonnx.load(model, trainable=True)
    gradients = jax.grad(lambda p: jnp.sum((fn(p, x) - 0.3) ** 2))(params)
    # The scale of weights that are multiples of it has none, but for rounding.
    slopes = [gradient for gradient in gradients.values() if gradient.ndim == 2]
    assert len(slopes) == 2
    assert all(bool(jnp.any(jnp.abs(slope) > 1e-3)) for slope in slopes)
    integer, codes = fn.convert(params)
    np.testing.assert_array_equal(jax.jit(integer)(codes, x), network(x))
    integer, codes = fn.convert({name: value * 1.01 for name, value in params.items()})
    again = jqonnx.export(integer, codes, [x], batch="N", form="qdq")
    assert [node.op_type for node in again.graph.node] == [node.op_type for node in model.graph.node]
    assert jqonnx.verify(again, integer, codes, [x]).is_exact


def make_products(between: list[Any], rows: int, **constants: Any) -> onnx.ModelProto:
    """Return a product, its codes, `between` from "codes" to "moved", and a product by the first weights again."""
    arrays: dict[str, Any] = {
        "w": np.arange(-32, 32, dtype=np.int8).reshape(8, 8),
        "w_scale": np.float32(0.01), "scale": np.float32(0.03), "point": np.uint8(99), **constants,
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["first"]),
        helper.make_node("MatMul", ["x", "first"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "scale", "point"], ["codes"]),
        *between,
        helper.make_node("DequantizeLinear", ["moved", "scale", "point"], ["floats"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["second"]),
        helper.make_node("MatMul", ["floats", "second"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [n_rows, 8]) for n, n_rows in (("x", 4), ("y", rows))
    )
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "products", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_gradients_pass_codes_that_are_moved(rng: np.random.Generator) -> None:
    """The weights are dequantized twice, too."""
    pooled = [
        helper.make_node("Reshape", ["codes", "shape"], ["rows"]),
        helper.make_node("MaxPool", ["rows"], ["pooled"], kernel_shape=[2], strides=[1], pads=[0, 1]),
        helper.make_node("Squeeze", ["pooled", "axis"], ["moved"]),
    ]
    model = make_products(pooled, 4, shape=np.array([4, 1, 8]), axis=np.array([1]))
    x = rng.normal(size=(4, 8)).astype(np.float32)
    fn, params = jqonnx.load(model, trainable=True)
    assert {name: value.dtype for name, value in params.items()} == dict.fromkeys(
        ("w", "w_scale", "scale"), jnp.float32
    )
    gradients = jax.grad(lambda p: jnp.sum(fn(p, x) ** 2))(params)
    # The scale of weights that are multiples of it has none, but for rounding.
    assert all(bool(jnp.any(gradients[name])) for name in ("w", "scale"))
    np.testing.assert_allclose(jax.jit(fn)(params, x), run_runtime(model, {"x": x}, "none")[0], atol=1e-5)
    integer, codes = fn.convert({name: value * 1.01 for name, value in params.items()})
    assert codes["w"].dtype == jnp.int8
    np.testing.assert_allclose(
        jax.jit(integer)(codes, x), jax.jit(fn)({name: value * 1.01 for name, value in params.items()}, x), atol=1e-5
    )


def test_codes_without_gradients_are_refused(rng: np.random.Generator) -> None:
    doubled = [helper.make_node("Concat", ["codes", "codes"], ["moved"], axis=0)]
    jqonnx.load(make_products(doubled, 8))
    with pytest.raises(jqonnx.ModelError, match="Concat of the codes of QuantizeLinear"):
        jqonnx.load(make_products(doubled, 8), trainable=True)

    w = jq.quantize(jnp.eye(3), jq.QuantSpec(jnp.int8))

    def loop(x: jax.Array) -> jax.Array:
        step = lambda carry, row: (carry, jq.matmul(jq.quantize(row[None], UINT8, range=(-1.0, 1.0)), w))  # noqa: E731
        return jax.lax.scan(step, 0, x)[1]

    with pytest.raises(jqonnx.ModelError, match="'MatMulInteger'"):
        jqonnx.load(jqonnx.export(loop, [jnp.ones((4, 3))], scan="loop"), trainable=True)


def test_damaged_metadata_is_an_error(rng: np.random.Generator) -> None:
    model = jqonnx.export(lambda x: x * 0.5, [jnp.ones(3)])
    assert not jqonnx.load(model)[1]
    entry = next(entry for entry in model.metadata_props if entry.key == "jaxquant.formula_constants")
    for text in ("{", "[1]", '"constant"'):
        entry.value = text
        with pytest.raises(jqonnx.ModelError, match="metadata of the model is damaged"):
            jqonnx.load(model)


def test_other_forms_are_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make, shape = MODELS["mlp"]
    batches = [rng.normal(size=shape).astype(np.float32)]
    model = quantize_model(make(rng), batches, "operators", tmp_path)
    with pytest.raises(jqonnx.ModelError, match="these operators have no derivative"):
        jqonnx.load(model, trainable=True)
    fn, params = jqonnx.load(model)
    with pytest.raises(ValueError, match="trainable=True"):
        fn.convert(params)
