"""What users pass to `export`: arrays of numpy, names of arguments, functions that ONNX cannot express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import linen

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime


def test_params_of_64_bits_have_the_dtype_that_jax_has_for_them() -> None:
    def apply(params, x: jax.Array) -> jax.Array:
        return x * params["scale"] + params["shift"][None] + params["steps"].astype(jnp.float32)[None]

    x = jnp.ones((2, 3))
    params = {"scale": np.float64(2.5), "shift": np.array([0.1, 0.2, 0.3]), "steps": np.arange(3)}
    model = jqonnx.export(apply, params, [x])
    onnx.checker.check_model(model, full_check=True)
    report = jqonnx.verify(model, apply, params, [x], tolerance=0)
    assert report.is_exact, str(report)


def test_an_argument_may_be_called_output() -> None:
    for function in (lambda x, output: x + output, lambda output, output_1: [output, output_1 + output]):
        arguments = [jnp.ones(3), jnp.full(3, 2.0)]
        model = jqonnx.export(function, arguments)
        names = [info.name for info in (*model.graph.input, *model.graph.output)]
        assert len(set(names)) == len(names)
        feeds = {info.name: np.asarray(x) for info, x in zip(model.graph.input, arguments, strict=True)}
        for actual, expected in zip(run_runtime(model, feeds), jax.tree.leaves(function(*arguments)), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_an_error_tells_the_users_line() -> None:
    jax.make_jaxpr(jnp.cumprod)(jnp.ones(3))  # a body that JAX has traced before does not know its next caller
    with pytest.raises(ValueError, match=rf"cumprod \(no operator of ONNX\) at .*{Path(__file__).name}:\d+"):
        jqonnx.export(lambda x: jnp.cumprod(x), [jnp.ones(3)])


def test_a_convolution_of_integers_is_refused() -> None:
    kernel = jnp.ones((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="a convolution of integers other than jaxquant's"):
        jqonnx.export(lambda x: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME"), [jnp.ones((1, 1, 5), jnp.int32)])


def prepare(recipe: str) -> tuple[jq.Prepared, jq.QuantizedTree, jax.Array]:
    """Return a prepared function, its tree and its input."""

    def network(params, image: jax.Array, *, gain: float = 1.0) -> jax.Array:
        return jax.nn.relu(image @ params["layers"]["w"]) @ params["v"] * gain

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"layers": {"w": jax.random.normal(keys[0], (8, 16))}, "v": jax.random.normal(keys[1], (16, 4))}
    x = jax.random.normal(keys[2], (5, 8))
    prepared = jq.prepare(network, params, x, rules=getattr(jq.recipes, recipe)())
    return prepared, prepared.convert(params, prepared.calibrate(params, [x])), x


@pytest.mark.parametrize("recipe", ["w8a8_static", "w8a8_dynamic", "onnx_runtime"])
def test_a_prepared_function_is_exported_with_its_tree(recipe: str) -> None:
    prepared, q, x = prepare(recipe)
    model = jqonnx.export(prepared, q, [x], batch="N", weights="int8")
    assert [info.name for info in model.graph.input] == ["image"]  # the name in the function's own signature
    names = {array.name for array in model.graph.initializer}
    assert {"layers.w.codes", "v.codes"} <= names
    assert not any(name.startswith("params.") for name in names)
    report = jqonnx.verify(model, prepared, q, [x, x[:2]])
    assert report.is_exact, str(report)
    # The method and a function that closes over the tree are the same program.
    method = jqonnx.export(prepared.apply, q, [x], batch="N", weights="int8")
    closure = jqonnx.export(lambda image: prepared.apply(q, image), [x], batch="N", weights="int8")
    kinds = [[node.op_type for node in m.graph.node] for m in (model, method, closure)]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [info.name for info in method.graph.input] == ["image"]
    # What `load` returns is exported and compared in the same way.
    fn, params = jqonnx.load(model)
    again = jqonnx.export(fn, params, [x], batch="N", weights="int8")
    assert jqonnx.verify(again, fn, params, [x]).is_exact


@pytest.mark.parametrize("recipe", ["weight_only_int8", "w8a8_static", "w8a8_dynamic"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_adapters_are_products_of_the_model(variant: Any, recipe: str, rng: np.random.Generator) -> None:
    prepared, q, x = prepare(recipe)
    settings = jq.lora.LoRA(2, "layers*", variant=variant, dropout=0.5)
    adapted = jq.lora.adapt(prepared, q, settings, jax.random.key(0))
    moved = jax.tree.map(lambda v: v + jnp.asarray(rng.normal(0, 0.1, v.shape).astype(np.float32)), adapted.adapters)
    adapted = adapted.replace(adapters=moved, key=jax.random.key(1))
    model = jqonnx.export(prepared, adapted, [x], batch="N", weights="int8")
    assert [info.name for info in model.graph.input] == ["image"]
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in model.graph.initializer}
    assert {"layers.w.codes", "v.codes", "adapters.layers/w.b"} <= set(arrays)
    if variant == "lora":  # the weight is not the sum: no array of floats has its shape
        assert not any(array.shape == (8, 16) and array.dtype == np.float32 for array in arrays.values())
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert len(products) == (4 if recipe == "weight_only_int8" else 2)
    report = jqonnx.verify(model, prepared, adapted, [x, x[:2]])
    assert report.is_exact, str(report)


def test_wrong_numbers_of_arguments_are_named() -> None:
    prepared, q, x = prepare("w8a8_dynamic")
    model = jqonnx.export(prepared, q, [x], weights="int8")
    export: Any = jqonnx.export
    verify: Any = jqonnx.verify
    for call, text in (
        (
            lambda: export(prepared, [x]),
            r"export: arguments: expected prepared, q, inputs, with q = prepared.convert\(",
        ),
        (lambda: export(prepared, q.params, [x]), "export: q: expected a QuantizedTree"),
        (
            lambda: export(lambda x: x),
            "export: arguments: expected function, inputs or function, params, inputs, got 0",
        ),
        (lambda: export(lambda x: x, x), "export: inputs: expected a list or a tuple, got an array of"),
        (lambda: export(lambda p, x: x, [x], {}), "export: inputs: expected a list or a tuple, got"),
        (lambda: export(3, [x]), "export: function: expected a function, got 3"),
        (
            lambda: export(linen.Dense(4), [x]),
            r"export: function: expected a function, such as the module's `apply`, got a module \(Dense\)",
        ),
        (
            lambda: jax.jit(lambda q: export(prepared, q, [x]))(q),
            "export: q: expected arrays with known values.* got traced arrays",
        ),
        (lambda: verify(model, prepared, [x]), "verify: arguments: expected model, prepared, q, batches"),
        (lambda: verify(model, prepared, q, x), "verify: batches: expected a list or a tuple"),
        (lambda: verify(model, prepared.apply), "verify: arguments: expected model, function, batches or model, fun"),
    ):
        with pytest.raises(TypeError, match=rf"jaxquant\.onnx\.{text}"):
            call()


def test_a_module_with_variables_is_a_function() -> None:
    model = linen.Dense(4)
    bound = model.bind(model.init(jax.random.key(0), X))
    assert jqonnx.verify(jqonnx.export(bound, [X]), bound, [X]).is_exact


def test_a_batch_of_another_length_gets_advice() -> None:
    model = jqonnx.export(jnp.negative, [X])
    with pytest.raises(ValueError, match=r'shape \[2, 3\], as .*export\(..., batch="N"\) .*got shape \[5, 3\]'):
        jqonnx.verify(model, jnp.negative, [jnp.ones((5, 3))])
    with pytest.raises(ValueError, match=r"shape \[2, 3\], got shape \[2, 4\]"):
        jqonnx.verify(model, jnp.negative, [jnp.ones((2, 4))])


def test_a_report_says_whether_floats_are_equal(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
    model = jqonnx.export(jnp.negative, [x])
    text = str(jqonnx.verify(model, jnp.negative, [x]))
    assert text.endswith("\nAll codes are equal, and so are all floats (level all).")

    def differ(x: jax.Array) -> jax.Array:
        return jnp.float32(1 - 2**-20) * -x

    report = jqonnx.verify(model, differ, [x])
    assert report.is_exact
    assert "All codes are equal, and all floats within 1e-05" in str(report)


X = jnp.ones((2, 3))
U8, I8 = jnp.zeros((4, 5), jnp.uint8), jnp.zeros((4, 5), jnp.int8)
ONE, TWO = np.float32(0.5), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: jq.ops.qlinear_add(x, ONE, 0, I8, ONE, 0, ONE, 0), "ops.qlinear_add: .*b: expected .*dtype"),
        (lambda x: jq.ops.qlinear_add(x, ONE, 0, U8[:3], ONE, 0, ONE, 0), "ops.qlinear_add: a, b: expected shapes"),
        (lambda x: jq.ops.qlinear_mul(x, TWO, 0, U8, ONE, 0, ONE, 0), "ops.qlinear_mul: a_scale: expected"),
        (lambda x: jq.ops.qlinear_softmax(x, TWO, 0, ONE, 0), "ops.qlinear_softmax: x_scale: expected"),
        (lambda x: jq.ops.qlinear_sigmoid(x, ONE, np.int8(0), ONE, 0), "ops.qlinear_sigmoid: .*x_zero_point: expected"),
        (lambda x: jq.ops.qlinear_leaky_relu(x, ONE, 0, TWO, 0), "ops.qlinear_leaky_relu: y_scale: expected"),
        (
            lambda x: jq.ops.matmul_nbits(
                x.astype(jnp.float32), np.zeros((3, 1, 8), np.uint8), np.ones(3, np.float32), K=5, N=3, block_size=32
            ),
            r"ops.matmul_nbits: b: expected shape \(3, 1, 16\)",
        ),
    ],
)
@pytest.mark.parametrize("batch", [None, "N"])
def test_a_recorded_operator_checks_its_arguments(batch: str | None, call: Any, text: str) -> None:
    """`export` traces no arithmetic of the operators that it writes as one node, and so not the checks in it."""
    for run in (lambda: call(U8), lambda: jqonnx.export(call, [U8], batch=batch)):
        with pytest.raises((TypeError, ValueError), match=text):
            run()
