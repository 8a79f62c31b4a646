"""An array with several uses, such as a tied table, is one initializer of an exported model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto

import jaxquant as jq
from jaxquant import onnx as jqonnx

F32 = np.float32
ROWS, FEATURES = 96, 64
TOKENS = np.array([3, 95, 0, 17, 3], np.int32)


def look_up_first(params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(params["table"][tokens]) @ params["table"].T


def multiply_first(params: Any, tokens: jax.Array) -> jax.Array:
    """The product is written before the lookup that reads the table in its own order."""
    x = jnp.ones((1, ROWS)) @ params["table"]
    scores = jnp.tanh(x / 8) @ params["table"].T
    return scores + (params["table"][tokens] * x).sum(-1, keepdims=True)


INT4 = [jq.Rule(weight=jq.Weight("int4", per="tensor"), activation=jq.Activation("uint8", per="row"))]
RULES: dict[str, Any] = {
    "floats": None,
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "weight_only_int4": jq.recipes.weight_only_int4(),
    "w8a8_dynamic": jq.recipes.w8a8_dynamic(),
    "w8a8_static": jq.recipes.w8a8_static(),
    "int4 by integers": INT4,
}


def make_params(rng: np.random.Generator) -> dict[str, jax.Array]:
    return {"table": jnp.asarray(rng.normal(size=(ROWS, FEATURES)), F32)}


def make_model(
    function: Callable[..., Any], rules: Any, params: Any, **options: Any
) -> tuple[ModelProto, Callable[..., Any], Any]:
    """Return the model of a function, the function of the parameters that it has, and these parameters."""
    if rules is None:
        return jqonnx.export(function, params, [TOKENS], **options), function, params
    prepared = jq.prepare(function, params, TOKENS, rules=rules)
    ranges = prepared.calibrate(params, [TOKENS])
    q = prepared.convert(params, ranges)
    return jqonnx.export(prepared, q, [TOKENS], **options), prepared.apply, q


def count_table_bytes(model: ModelProto) -> int:
    """Return the bytes of the initializers that are as large as the table."""
    return sum(len(x.raw_data) for x in model.graph.initializer if np.prod(x.dims) >= ROWS * FEATURES)


# The second function multiplies a constant by the table, which is weight-only, and so MatMulNBits in 4 bits: that has
# packed codes of its own.
CASES = [(name, look_up_first) for name in RULES] + [
    (name, multiply_first) for name in RULES if name != "int4 by integers"
]


@pytest.mark.parametrize(("name", "function"), CASES)
def test_a_tied_table_is_stored_once(name: str, function: Callable[..., Any], rng: np.random.Generator) -> None:
    params = make_params(rng)
    model, apply, converted = make_model(function, RULES[name], params)
    width = 4 if name == "floats" else 1
    assert count_table_bytes(model) == width * ROWS * FEATURES
    (table,) = [x for x in model.graph.initializer if np.prod(x.dims) >= ROWS * FEATURES]
    # It is the parameter, with its name and in its own order.
    assert (table.name, list(table.dims)) == ("table" if name == "floats" else "table.codes", [ROWS, FEATURES])
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, apply, converted, [(TOKENS,)], level=level, tolerance=1e-4)
        assert report.is_exact, str(report)
    loaded, arrays = jqonnx.load(model)
    np.testing.assert_allclose(loaded(arrays, TOKENS), apply(converted, TOKENS), 1e-4, 1e-3)


@pytest.mark.parametrize("form", ["operators", "qdq"])
def test_both_forms_and_an_early_opset(form: str, rng: np.random.Generator) -> None:
    rules = [
        jq.Rule(operation="take", weight=jq.Weight("int8")),
        jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("uint8", range=jq.Static(jq.calibration.minmax))),
    ]
    for opset in (13, 21):
        model, apply, converted = make_model(look_up_first, rules, make_params(rng), form=form, opset=opset)
        assert count_table_bytes(model) == ROWS * FEATURES
        report = jqonnx.verify(model, apply, converted, [(TOKENS,)], tolerance=1e-4)
        assert report.is_exact, str(report)


def test_the_runtime_computes_the_transpose_while_it_loads(rng: np.random.Generator, tmp_path: Any) -> None:
    """No Transpose of the table is left in the graph that runs."""
    for name in ("floats", "w8a8_dynamic"):
        model, _, _ = make_model(look_up_first, RULES[name], make_params(rng))
        assert [node.input[0] for node in model.graph.node if node.op_type == "Transpose"]
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(tmp_path / "model.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        optimized = ModelProto.FromString((tmp_path / "model.onnx").read_bytes())
        assert "Transpose" not in [node.op_type for node in optimized.graph.node]


def test_a_weight_of_several_steps_is_stored_once(rng: np.random.Generator) -> None:
    w = jnp.asarray(rng.normal(size=(64, 64)) / 8, F32)

    def unroll(params: Any, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(x @ params["w"]) @ params["w"].T
        return x

    x = rng.normal(size=(2, 64)).astype(F32)
    for scan in ("unroll", "loop"):

        def repeat(params: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, _: (unroll(params, x), None), x, None, length=2)[0]

        model = jqonnx.export(repeat, {"w": w}, [x], scan=scan)
        assert [list(a.dims) for a in model.graph.initializer if np.prod(a.dims) >= w.size] == [[64, 64]]
        report = jqonnx.verify(model, repeat, {"w": w}, [(x,)])
        assert report.is_exact, str(report)


def test_other_arrays_have_initializers_of_their_own(rng: np.random.Generator) -> None:
    """Parameters that are equal now may differ after training; parts of an array are not its transposes."""
    w = rng.normal(size=(32, 32)).astype(F32)
    params = {"first": jnp.asarray(w), "second": jnp.asarray(w.copy()), "square": jnp.asarray(w @ w)}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        y = x @ params["first"] @ params["second"].T
        return y @ params["square"][:, :16] @ params["square"][:16] @ params["square"][:, ::-1]

    x = rng.normal(size=(2, 32)).astype(F32)
    model = jqonnx.export(apply, params, [x])
    shapes = sorted((list(a.dims) for a in model.graph.initializer if len(a.raw_data) > 1024), key=str)
    assert shapes == [[16, 32], [32, 16], [32, 32], [32, 32], [32, 32]]
    report = jqonnx.verify(model, apply, params, [(x,)], tolerance=1e-4)
    assert report.is_exact, str(report)
