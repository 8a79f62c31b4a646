"""Mixtures of experts that are written with jax.lax.ragged_dot: rules, coverage, training, PTQ and ONNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import PerAxis, QuantSpec, ptq

from ..support.prepared import find_sqnr

EXPERTS, TOKENS = 4, 10
Tree = dict[str, jax.Array]


def apply_experts(params: Tree, x: jax.Array, expert: jax.Array) -> jax.Array:
    """Return the output of the expert of each token, in the order of the tokens."""
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.relu(lax.ragged_dot(x[order], params["up"], sizes))
    y = lax.ragged_dot(hidden, params["down"], sizes)
    return jnp.zeros_like(y).at[order].set(y)


@pytest.fixture
def case(rng: np.random.Generator) -> tuple[Tree, jax.Array, jax.Array]:
    shapes = {"up": (EXPERTS, 32, 64), "down": (EXPERTS, 64, 16)}
    params = {name: jnp.asarray(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(TOKENS, 32)).astype(np.float32))
    return params, x, jnp.asarray(rng.integers(0, EXPERTS, TOKENS).astype(np.int32))


RECIPES: dict[str, tuple[Any, str, str, float]] = {
    "weight_only_int8": (jq.recipes.weight_only_int8(), "weight-only", "int8", 35),
    "weight_only_int4": (jq.recipes.weight_only_int4(32), "weight-only", "int4", 14),
    "w8a8_dynamic": (jq.recipes.w8a8_dynamic(), "integer", "int8", 30),
    "w8a8_static": (jq.recipes.w8a8_static(), "integer", "int8", 30),
    "w4a8": (jq.recipes.w4a8(), "integer", "int4", 10),
    "onnx_runtime": (jq.recipes.onnx_runtime(), "integer", "int8", 25),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, case: Any) -> None:
    params, *inputs = case
    rules, form, dtype, least = RECIPES[name]
    prepared = jq.prepare(apply_experts, params, *inputs, rules=rules, strict=True)
    assert [(row.operation, row.form) for row in prepared.coverage] == [("ragged_dot", form)] * 2
    assert all(str(row.weight and row.weight.dtype) == dtype for row in prepared.coverage)
    ranges = prepared.calibrate(params, [tuple(inputs)])
    q = prepared.convert(params, ranges)
    # One scale for each output feature of each expert, or for each block of its inputs.
    blocks = 2 if name == "weight_only_int4" else 1
    assert q.params["down"].scale.shape == (EXPERTS, blocks, 16)
    y = jax.jit(prepared.apply)(q, *inputs)
    assert find_sqnr(y, apply_experts(params, *inputs)) > least
    np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), *inputs), y)


def test_rows_are_quantized_one_by_one(case: Any) -> None:
    """Per-row activations: the codes and sums of a token are those that it has alone."""
    params, x, expert = case
    prepared = jq.prepare(apply_experts, params, x, expert, rules=jq.recipes.w8a8_dynamic())
    y = prepared.apply(prepared.convert(params), x, expert)
    spec, kernel = QuantSpec(jnp.uint8, PerAxis(0)), QuantSpec(jnp.int8, PerAxis(1))
    for token in range(TOKENS):
        value = x[token : token + 1]
        for name, last in (("up", False), ("down", True)):
            value = jq.matmul(jq.quantize(value, spec), jq.quantize(params[name][expert[token]], kernel))
            value = value if last else jax.nn.relu(value)
        np.testing.assert_array_equal(y[token], value[0])


def test_rules_select_the_operation(case: Any) -> None:
    params, *inputs = case
    weight = jq.Weight("int8", per="tensor")
    rules = [jq.Rule("down", keep="float"), jq.Rule(operation="ragged_dot", weight=weight)]
    prepared = jq.prepare(apply_experts, params, *inputs, rules=rules)
    assert [(row.form, row.reason) for row in prepared.coverage] == [
        ("weight-only", ""), ("float", "a rule keeps it in floats"),
    ]  # fmt: skip
    assert prepared.convert(params).params["up"].scale.shape == (1, 1, 1)
    only_dots = jq.prepare(apply_experts, params, *inputs, rules=[jq.Rule(operation="dot_general", weight=weight)])
    assert not only_dots.leaves


def test_a_summed_ragged_dimension_stays_in_floats(case: Any) -> None:
    _, x, expert = case
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def apply(params: Tree, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(x, params["w"], sizes, numbers)

    weights, sizes = {"w": jnp.ones((TOKENS, 3))}, jnp.bincount(expert, length=EXPERTS)
    prepared = jq.prepare(apply, weights, x, sizes, rules=jq.recipes.w8a8_dynamic())
    reasons = [row.reason for row in prepared.coverage.floats]
    assert reasons == ["a ragged product whose ragged dimension is summed or a batch dimension"]
    np.testing.assert_array_equal(prepared.apply(prepared.convert(weights), x, sizes), apply(weights, x, sizes))


def test_gradients_are_those_of_the_values_of_the_codes(case: Any) -> None:
    params, *inputs = case
    prepared = jq.prepare(apply_experts, params, *inputs, rules=jq.recipes.weight_only_int8())
    values = jax.tree.map(
        lambda q: q.dequantize(), prepared.convert(params).params, is_leaf=lambda q: isinstance(q, jq.QuantizedArray)
    )
    ours = jax.grad(lambda params: (prepared.fake_apply(params, *inputs) ** 2).sum())(params)
    theirs = jax.grad(lambda params: (apply_experts(params, *inputs) ** 2).sum())(values)
    for name in params:
        # Where a weight saturates, its gradient is 0: none does with a range of its own.
        largest = np.abs(theirs[name]).max()
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4 * largest)


def test_stacked_layers_in_a_scan(case: Any) -> None:
    params, x, expert = case
    square = {"w": jnp.stack([params["up"][:, :, :32], -params["up"][:, :, 32:]])}

    def apply(params: Tree, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (lax.ragged_dot(x, w, sizes) / 8, None), x, params["w"])[0]

    sizes = jnp.bincount(expert, length=EXPERTS)
    prepared = jq.prepare(apply, square, x, sizes, rules=jq.recipes.w8a8_dynamic())
    q = prepared.convert(square)
    assert q.params["w"].scale.shape == (2, EXPERTS, 1, 32)
    assert find_sqnr(jax.jit(prepared.apply)(q, x, sizes), apply(square, x, sizes)) > 30


def test_vmap_over_experts_and_inputs(case: Any) -> None:
    """jax.vmap of the float function gives one equation, with sizes of their own for each example."""
    params, x, _ = case
    stacked = {"up": jnp.stack([params["up"], -params["up"]])}

    def apply(params: Tree, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vmap(lax.ragged_dot)(x, params["up"], sizes)

    xs, sizes = jnp.stack([x, -x]), jnp.array([[3, 0, 5, 1], [0, 2, 2, 6]])
    prepared = jq.prepare(apply, stacked, xs, sizes, rules=jq.recipes.weight_only_int8())
    assert [(row.operation, row.form) for row in prepared.coverage] == [("ragged_dot", "weight-only")]
    q = prepared.convert(stacked)
    assert q.params["up"].scale.shape == (2, EXPERTS, 1, 64)
    assert find_sqnr(prepared.apply(q, xs, sizes), apply(stacked, xs, sizes)) > 35


def test_algorithms_round_to_nearest_and_say_why(case: Any) -> None:
    params, *inputs = case
    prepared = jq.prepare(apply_experts, params, *inputs, rules=jq.recipes.weight_only_int4(32))
    stats = ptq.collect(prepared, params, [tuple(inputs)])
    assert set(stats) == {"up", "down"}
    outcome = ptq.apply(prepared, params, [tuple(inputs)], ptq.GPTQ())
    for name in params:
        assert find_sqnr(outcome.tree.params[name].dequantize(), params[name]) > 15
    assert all("ragged product" in note.reason for note in outcome.notes)
    assert all("ragged product" in note.reason for note in ptq.rotate(prepared, params, tuple(inputs)).notes)


@pytest.mark.parametrize("recipe", ["weight_only_int8", "w8a8_dynamic"])
@pytest.mark.sample(1)
def test_exported_models_have_the_same_numbers(recipe: str, case: Any) -> None:
    pytest.importorskip("onnxruntime")
    params, x, _ = case
    sizes = jnp.array([3, 0, 4, 2])

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, params["up"], sizes)

    options = {"reduce_range": True} if recipe == "w8a8_dynamic" else {}
    rules = getattr(jq.recipes, recipe)(**options)
    prepared = jq.prepare(apply, params, x, rules=rules)
    q = prepared.convert(params)
    model = jq.onnx.export(prepared, q, [x])
    (y,) = jq.onnx.make_session(model).run(None, {model.graph.input[0].name: np.asarray(x)})
    np.testing.assert_allclose(np.asarray(y), prepared.apply(q, x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="ragged_dot_general"):
        jq.onnx.export(lambda x: apply(params, x), [x])
