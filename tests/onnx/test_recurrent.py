"""Recurrent layers of loaded models: beside ONNX Runtime, with one product of the whole input."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from jaxquant import onnx as jqonnx

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
