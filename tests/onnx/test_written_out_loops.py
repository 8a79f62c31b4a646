"""Models in which an exporter has written a loop over time out: their products, beside ONNX Runtime."""

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

STEPS, ROWS, FEATURES, HIDDEN = 10, 1, 6, 7


def make_network(rng: np.random.Generator, rows: int = ROWS, is_transposed: bool = True) -> tuple[ModelProto, Any]:
    """Return an RNN of which each step is nodes of its own, from the last time to the first, and an input."""
    shapes = {"w": (FEATURES, HIDDEN), "r": (HIDDEN, HIDDEN), "b": (HIDDEN,), "h0": (rows, HIDDEN)}
    if is_transposed:
        shapes.update({name: shapes[name][::-1] for name in "wr"})
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["w"] = arrays["w"] / 4
    nodes, hidden, transposed = [], "h0", int(is_transposed)
    times = [*range(STEPS - 1, 1, -1), -STEPS + 1, 0]
    for step, time in enumerate(times):
        arrays[f"t{step}"] = np.asarray(time)
        nodes += [
            helper.make_node("Gather", ["x", f"t{step}"], [f"x{step}"], axis=0),
            helper.make_node("Gemm", [f"x{step}", "w", "b"], [f"i{step}"], alpha=0.5, beta=2.0, transB=transposed),
            helper.make_node("Gemm", [hidden, "r"], [f"r{step}"], transB=transposed),
            helper.make_node("Add", [f"i{step}", f"r{step}"], [f"s{step}"]),
            helper.make_node("Tanh", [f"s{step}"], [f"h{step + 1}"]),
        ]
        hidden = f"h{step + 1}"
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [STEPS, rows, FEATURES])
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (hidden, "i3")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], infos, tensors), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    return model, rng.normal(size=(STEPS, rows, FEATURES)).astype(np.float32)


def check(outputs: Any, expected: Any) -> None:
    for y, z in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_written_out_loop(rows: int, is_transposed: bool, rng: np.random.Generator) -> None:
    """The products of the input at all times are one, and the results are ONNX Runtime's."""
    model, x = make_network(rng, rows, is_transposed)
    fn, params = jqonnx.load(model)
    operators = [node.op for node in fn.graph.nodes]
    assert operators.count("GemmOfSlices") == 1
    assert operators.count("Gemm") == STEPS
    assert operators.count("Gather") == 1
    expected = run_runtime(model, {"x": x})
    check(jax.jit(fn)(params, x), expected)
    mapped = jax.jit(jax.vmap(fn, (None, 0)))(params, jnp.stack([0 * x, x]))
    check([y[1] for y in mapped], expected)
    constant, none = jqonnx.load(model, constants=True)
    check(jax.jit(constant)(none, x), expected)


def test_derivatives(rng: np.random.Generator) -> None:
    """They are those of the graph that `export` writes."""
    model, x = make_network(rng)
    fn, params = jqonnx.load(model)
    exported, arrays = jqonnx.load(jqonnx.export(fn, params, [x]))
    got, want = (
        jax.grad(lambda x, f=f, p=p: jnp.sum(jnp.sin(f(p, x)[0])))(x) for f, p in ((fn, params), (exported, arrays))
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_products_are_quantized(rng: np.random.Generator) -> None:
    model, x = make_network(rng)
    fn, params = jqonnx.load(model)
    jax.jit(fn)(params, x)  # JAX keeps this trace, which must not be used below
    prepared = jq.prepare(fn, params, x, rules=jq.recipes.w8a8_dynamic())
    # The first state is a parameter, as its weights are.
    assert [row.form for row in prepared.coverage.rows] == ["integer", "float", *["integer"] * (STEPS - 1)]


def test_an_index_that_is_an_input_stays(rng: np.random.Generator) -> None:
    """Only slices at known times are multiplied at once."""
    model, x = make_network(rng)
    (times,) = [i for i, tensor in enumerate(model.graph.initializer) if tensor.name == "t4"]
    del model.graph.initializer[times]
    model.graph.input.append(helper.make_tensor_value_info("t4", TensorProto.INT64, []))
    fn, params = jqonnx.load(model)
    assert [node.op for node in fn.graph.nodes].count("Gemm") == STEPS + 1
    feeds = {"x": x, "t4": np.asarray(2)}
    check(jax.jit(fn)(params, x, np.asarray(2)), run_runtime(model, feeds))
