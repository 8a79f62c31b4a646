"""Exported models that are loaded again: the same bits, also after a second export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.exported_networks import NETWORKS, RECIPES, convert_network
from ..cases.onnx_models import run_runtime
from ..support.equality import same_bits

# Its sum over the experts is one contraction of floats in JAX and another in the model.
SUMS_OF_FLOATS = ("linen experts",)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_export_gives_the_bits_of_the_function(name: str) -> None:
    function, x = convert_network(name, "static")
    want = jax.jit(function)(x)
    exported = jqonnx.export(function, [x])
    loaded, params = jqonnx.load(exported)
    for _ in range(2):
        result = jax.jit(loaded)(params, x)
        if name in SUMS_OF_FLOATS:
            np.testing.assert_allclose(result, want, rtol=0, atol=1e-6)
        else:
            same_bits(result, want)
        exported = jqonnx.export(loaded, params, [x])
        loaded, params = jqonnx.load(exported)


def check_bits(function, x: jax.Array) -> None:
    """Compare a function with its export, loaded, and with the export of that, loaded."""
    want, current = jax.tree.leaves(jax.jit(function)(x)), jqonnx.export(function, [x])
    for _ in range(2):
        loaded, params = jqonnx.load(current)
        for result, expected in zip(jax.tree.leaves(jax.jit(loaded)(params, x)), want, strict=True):
            same_bits(result, expected)
        current = jqonnx.export(loaded, params, [x])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8, jnp.uint8])
def test_scales_of_dynamic_ranges_are_rounded_once(rng: np.random.Generator, dtype: Any) -> None:
    """XLA divides by a constant, such as 255, by a product with its reciprocal; jaxquant divides."""

    def function(x: jax.Array) -> list[jax.Array]:
        q = jq.quantize(x, jq.QuantSpec(dtype, jq.PerAxis(0)))
        return [q.codes.astype(jnp.int32), q.scale]

    check_bits(function, jnp.asarray(rng.normal(0, 1, (500, 16)), jnp.float32))


@pytest.mark.slow
def test_sums_over_windows_are_no_means_times_their_number(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        windows = ((1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        total = jax.lax.reduce_window(x, np.float32(0), jax.lax.add, *windows)
        return [
            total,
            total / 9,
            jax.lax.reduce_window(x, np.float32(0), jax.lax.add, (1, 5, 3, 1), (1, 2, 1, 1), "VALID"),
        ]

    check_bits(function, jnp.asarray(rng.normal(0, 1, (2, 9, 8, 3)), jnp.float32))


@pytest.mark.slow
def test_another_batch_size_of_a_loaded_export() -> None:
    function, x = convert_network("linen mlp", "static")
    loaded, params = jqonnx.load(jqonnx.export(function, [x], batch="N"))
    same_bits(jax.jit(loaded)(params, x[:2]), jax.jit(function)(x[:2]))


def list_nodes(model: onnx.ModelProto) -> list[str]:
    return [f"{node.domain}.{node.op_type}" for node in model.graph.node]


def list_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of the constants of a model."""
    return sum(numpy_helper.to_array(part).nbytes for part in model.graph.initializer)


def list_weights(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    """Return the dtypes and the elements of the constants of two dimensions or more: of weights and their scales."""
    arrays = [numpy_helper.to_array(part) for part in model.graph.initializer]
    return sorted((str(x.dtype), x.tobytes()) for x in arrays if sum(n > 1 for n in x.shape) > 1)


# One node differs: bools are compared by other operators.
NEARLY_EQUAL = (("linen decoder", "float"),)
# A loaded model quantizes images before it takes the largest elements of their windows, so it transposes codes only.
SHORTER = (("linen cnn", "static"), ("nnx cnn", "static"))


def test_scales_of_16_bits_keep_their_bytes() -> None:
    """Those of blocks, which a loaded model repeats for the codes of a block."""
    function, x = convert_network("plain mlp", "weight_only_int4")
    first = jqonnx.export(function, [x])
    loaded, params = jqonnx.load(first)
    scales = [[dtype for dtype, _ in list_weights(model)] for model in (first, jqonnx.export(loaded, params, [x]))]
    assert scales[0] == scales[1]
    assert scales[0].count("float16") == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_quantized_before_export(dtype: Any, rng: np.random.Generator) -> None:
    w = jnp.asarray(rng.normal(0, 1, (32, 64)), dtype)
    q = jq.quantize(w.astype(jnp.float32), jq.QuantSpec("int4", jq.Blocked(0, 16)))
    x = jnp.asarray(rng.normal(0, 1, (3, 32)), jnp.float32)

    def run(x: jax.Array) -> jax.Array:
        return jq.matmul(x, jq.quantize(w.astype(jnp.float32), jq.QuantSpec("int4", jq.Blocked(0, 16))))

    models = [jqonnx.export(function, [x]) for function in (run, lambda x: jq.matmul(x, q))]
    assert list_nodes(models[0]) == list_nodes(models[1]) == ["com.microsoft.MatMulNBits"]
    # What only JAX can compute is computed before the export.
    model = jqonnx.export(lambda x: x @ jax.lax.erf_inv(w.astype(jnp.float32) / 8), [x])
    assert list_nodes(model) == [".MatMul"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_model_is_exported_in_the_same_form(name: str, recipe: str) -> None:
    """No generation adds nodes, and weights stay codes."""
    function, x = convert_network(name, recipe)
    models = [jqonnx.export(function, [x])]
    for _ in range(2):
        loaded, params = jqonnx.load(models[-1])
        models.append(jqonnx.export(loaded, params, [x]))
    first, second, third = (sorted(list_nodes(model)) for model in models)
    assert second == third
    if (name, recipe) in NEARLY_EQUAL:
        assert len(second) <= len(first) + 1
    elif (name, recipe) in SHORTER:
        assert len(second) < len(first)
    else:
        assert first == second
    # Loading and exporting computes nothing with weights, nor with the scales of their blocks.
    weights = [list_weights(model) for model in models]
    assert weights[0] == weights[1] == weights[2]
    # What differs are scalars that the first model shares.
    sizes = [list_bytes(model) for model in models]
    assert max(sizes) <= 1.02 * min(sizes) + 512


SYMBOLIC = ("linen mlp", "linen cnn", "linen lstm", "linen encoder", "linen decoder", "linen mixer", "plain decoder")


@pytest.mark.parametrize("name", [SYMBOLIC[0], *(pytest.param(x, marks=pytest.mark.full) for x in SYMBOLIC[1:])])
def test_a_symbolic_batch_stays_symbolic(name: str) -> None:
    function, x = convert_network(name, "static")
    first = jqonnx.export(function, [x], batch="N")
    models, current = [first], first
    for _ in range(2):
        loaded, params = jqonnx.load(current)
        current = jqonnx.export(loaded, params, [x], batch="N")
        models.append(current)
    lengths = [m.graph.output[0].type.tensor_type.shape.dim[0].dim_param for m in models]
    assert lengths == ["N"] * 3
    assert sorted(list_nodes(models[1])) == sorted(list_nodes(models[2]))
    onnx.checker.check_model(current, full_check=True)
    # A batch size that no trace has seen, in ONNX Runtime and in JAX.
    loaded, params = jqonnx.load(current)
    report = jqonnx.verify(current, lambda x: loaded(params, x), [x[:2]])
    assert all(row.largest <= (1e-5 if row.kind == "output" else 0) for row in report.rows), str(report)
    served = run_runtime(current, {current.graph.input[0].name: np.asarray(x[:2])})[0]
    np.testing.assert_allclose(served, jax.jit(function)(x[:2]), rtol=0, atol=1e-5)


def test_shape_arithmetic_stays_symbolic() -> None:
    """Every operator that other exporters write between Shape and Reshape, Expand, Slice or Range."""

    def number(*values: int) -> str:
        name = f"n{len(arrays)}"
        arrays.append(numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    arrays: list[Any] = []
    nodes: list[Any] = []

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"t{len(nodes)}"], **attributes))
        return f"t{len(nodes) - 1}"

    shape = add("Shape", "x")
    batch = add("Gather", shape, number(0))
    double = add("Mul", batch, number(2))
    half = add("Div", add("Cast", double, to=TensorProto.INT64), number(2))
    rest = add("ReduceProd", add("Slice", shape, number(1), number(2**31 - 1)), keepdims=1)
    flat = add("Reshape", "x", add("Concat", half, rest, axis=0))
    wanted = add("Where", add("Equal", add("Concat", batch, number(-1), axis=0), number(-1)), rest, number(12))
    target = add("Concat", add("Max", batch, number(1)), add("Gather", wanted, number(1)), axis=0)
    ones = add("Expand", add("ConstantOfShape", number(1)), target)
    scalar = add("Squeeze", batch, number(0))
    zero, one = (add("Squeeze", number(n), number(0)) for n in (0, 1))
    count = add("Unsqueeze", add("Cast", add("Range", zero, scalar, one), to=TensorProto.FLOAT), number(1))
    part = add("Slice", flat, add("Sub", batch, number(1)), batch, number(0))
    total = add("Add", add("Add", add("Add", flat, ones), count), part)
    inputs, outputs = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", ["N", 3, 4]), (total, None))
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs, arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    fn, params = jqonnx.load(model)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    exported = jqonnx.export(fn, params, [x], batch="N", input_names=["x"])
    for rows in (x, np.concatenate([x, x, x]), x[:1]):
        (want,) = run_runtime(model, {"x": rows})
        np.testing.assert_array_equal(run_runtime(exported, {"x": rows})[0], want)
        np.testing.assert_array_equal(fn(params, rows), want)


def test_the_largest_elements_are_exported_again(rng: np.random.Generator) -> None:
    x = np.round(rng.normal(size=(3, 8)), 1).astype(np.float32)
    exported = jqonnx.export(lambda x: jax.lax.top_k(x, 3), [x], batch="N")
    loaded, params = jqonnx.load(exported)
    again = jqonnx.export(loaded, params, [x], batch="N")
    assert [node.op_type for node in again.graph.node].count("TopK") == 1
    for actual, expected in zip(run_runtime(again, {"x": x[:2]}), jax.lax.top_k(x[:2], 3), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_codes_stay_clipped(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 6)).astype(np.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        codes = jq.quantize(x, jq.QuantSpec(jnp.int8), range=(-3.0, 3.0)).codes
        limited = [
            jnp.maximum(codes, 3),
            jnp.minimum(codes, jnp.int8(3)),
            jnp.clip(codes, 5, -5),
            jnp.clip(codes, -5, 5),
        ]
        rows = jnp.arange(-3, 3, dtype=jnp.int8)[None]
        return [*limited, jnp.maximum(codes, rows), jnp.minimum(jnp.maximum(codes, 3), rows), codes]

    model = jqonnx.export(function, [x])
    assert jqonnx.verify(model, function, [x, 9 * x]).is_exact
    loaded, params = jqonnx.load(model)
    again = jqonnx.export(loaded, params, [x])
    counts = [[node.op_type for node in m.graph.node].count("Clip") for m in (model, again)]
    assert counts == [6, 6]
    assert jqonnx.verify(again, loaded, params, [x, 9 * x]).is_exact
    for y, z in zip(loaded(params, x), function(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(y, z)


def test_reshapes_of_a_dynamic_scale_do_not_pile_up(rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 6)).astype(np.float32)
    model = jqonnx.export(lambda x: jq.quantize(x, jq.QuantSpec(jnp.int8)).codes, [x])
    for _ in range(2):
        loaded, params = jqonnx.load(model)
        again = jqonnx.export(loaded, params, [x])
        assert jqonnx.verify(again, loaded, params, [x]).is_exact
        assert [node.op_type for node in again.graph.node].count("Reshape") == 1
        model = again
