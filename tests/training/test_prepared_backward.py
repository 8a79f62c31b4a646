"""Backward passes of prepared functions in integers and in float8, beside numpy: `Rule(backward=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxquant as jq
from tests.oracles.cotangents import E5M2, check_product, fold_scale, quantize_cotangent
from tests.support.equality import check_equal

INT8 = jq.Int8Backward()
STATIC = jq.Static(jq.calibration.minmax)
E4M3 = jq.Weight("float8_e4m3fn", per="tensor")
# The activations of each have one zero point, which comes out of the sum over rows.
INTEGERS = {
    "static": jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("uint8", range=STATIC)),
    "rows": jq.Rule(weight=jq.Weight("int4"), activation=jq.Activation("int8", per="row")),
    "tensor": jq.Rule(weight=jq.Weight("int8", per="tensor"), activation=jq.Activation("int8")),
}
FLOATS = {
    "float8": [jq.Rule(weight=E4M3, activation=jq.Activation("float8_e4m3fn"))],
    "fp8_dynamic": jq.recipes.fp8_dynamic(),
    "mxfp8": jq.recipes.mxfp8(),
    "nvfp4": jq.recipes.nvfp4(activations="float4_e2m1fn"),
}


def set_backward(rules: Sequence[jq.Rule], backward: Any) -> list[jq.Rule]:
    return [rule if rule.activation is None else dataclasses.replace(rule, backward=backward) for rule in rules]


def prepare(function: Any, w: Any, x: Any, rules: Sequence[jq.Rule]) -> tuple[jq.Prepared, Any]:
    params = {"w": jnp.asarray(w)}
    prepared = jq.prepare(function, params, x, rules=rules, strict=True)
    return prepared, prepared.trainable(params, prepared.calibrate(params, [jnp.asarray(x)]))


def pull(prepared: jq.Prepared, tree: Any, x: Any, g: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the result, and the cotangents of x and of the weight, by one program."""

    @jax.jit
    def run(tree: Any, x: Any, g: Any) -> Any:
        y, pull_back = jax.vjp(prepared.fake_apply, tree, x)
        return y, *reversed(pull_back(g))

    y, dx, tangents = run(tree, x, g)
    check_equal(y, jax.jit(prepared.apply)(prepared.convert(tree), x))
    return y, dx, tangents.params["w"]


def draw(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]


def contract(a: jq.QuantizedArray, b: jq.QuantizedArray, subscripts: str) -> np.ndarray:
    """Return the product of what codes stand for, in float64."""
    return np.einsum(subscripts, *(np.asarray(q.dequantize(), np.float64) for q in (a, b)))


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_gradients_are_those_of_numpy(name: str, rng: np.random.Generator) -> None:
    x, w, g = draw(rng, (5, 33), (33, 7), (5, 7))
    prepared, tree = prepare(lambda p, x: x @ p["w"], w, x, [dataclasses.replace(INTEGERS[name], backward=INT8)])
    _, dx, dw = pull(prepared, tree, x, g)
    (spec,) = prepared.coverage.rows[0].activations
    lhs, rhs = jq.quantize(x, spec), prepared.convert(tree).params["w"]
    low, high = spec.bounds
    steps = np.rint(x / np.asarray(lhs.scale)) + (0 if spec.symmetric else np.asarray(lhs.zero_point, np.float64))
    inside = (steps >= low) & (steps <= high)
    q, wide = fold_scale(rhs, g, 1, 1)
    expected = np.where(inside, contract(quantize_cotangent(wide, (0,)), q, "bo,io->bi"), 0)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    q, wide = fold_scale(lhs, g, 0, 0)
    expected = contract(q, quantize_cotangent(wide, (1,)), "bi,bo->io")
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    # Beside the gradient of floats they are rounded.
    assert np.abs(np.asarray(dx) - g @ np.asarray(rhs.dequantize()).T).max() > 1e-4


def test_results_in_codes_have_integer_gradients(rng: np.random.Generator) -> None:
    """A result that is rounded to codes passes gradients to the contraction where it does not saturate."""
    x, w, g = draw(rng, (5, 33), (33, 7), (5, 7))
    output = jq.Activation("uint8", range=STATIC)
    weight = jq.Weight("int8", options={"narrow_range": False})
    rule = jq.Rule(weight=weight, activation=output, output=output, backward=INT8)
    prepared, tree = prepare(lambda p, x: x @ p["w"], w, x, [rule])
    y, dx, _ = pull(prepared, tree, x, g)
    row, rhs = prepared.coverage.rows[0], prepared.convert(tree).params["w"]
    assert row.output is not None
    lhs, found = jq.quantize(x, row.activations[0]), np.unique(np.asarray(y))
    # Codes at the ends of the range may have saturated.
    passes = (y > found[0]) & (y < found[-1])
    inside = (lhs.codes > 0) & (lhs.codes < 255)
    q, wide = fold_scale(rhs, g, 1, 1)
    expected = contract(quantize_cotangent(wide, (0,)), q, "bo,io->bi")
    rows = np.asarray(passes.all(1))  # each row of g has a scale of its own
    assert rows.any()
    np.testing.assert_allclose(np.where(inside, dx, 0)[rows], np.where(inside, expected, 0)[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FLOATS)
def test_float8_gradients_are_those_of_numpy(name: str, rng: np.random.Generator) -> None:
    x, w, g = draw(rng, (16, 64), (64, 32), (16, 32))
    rules = set_backward(FLOATS[name], jq.Float8Backward())
    prepared, tree = prepare(lambda p, x: x @ p["w"], w, x, rules)
    _, dx, dw = pull(prepared, tree, x, g)
    (spec,) = prepared.coverage.rows[0].activations
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (jq.quantize(x, spec), prepared.convert(tree).params["w"]))
    check_product(dx, E5M2(g), b.T)
    check_product(dw, a.T, E5M2(g))


def test_a_convolution_has_the_gradient_of_its_matrix(rng: np.random.Generator) -> None:
    """A window of the whole image is a product of matrices."""
    x, w, g = draw(rng, (4, 3, 3, 8), (3, 3, 8, 6), (4, 1, 1, 6))
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolve(p: Any, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, p["w"], (1, 1), "VALID", dimension_numbers=numbers)

    rules = [dataclasses.replace(INTEGERS["static"], backward=INT8)]
    _, dx, dw = pull(*prepare(convolve, w, x, rules), x, g)
    flat = prepare(lambda p, x: x @ p["w"], w.reshape(72, 6), x.reshape(4, 72), rules)
    _, expected_dx, expected_dw = pull(*flat, x.reshape(4, 72), g.reshape(4, 6))
    np.testing.assert_allclose(dx.reshape(4, 72), expected_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw.reshape(72, 6), expected_dw, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backward", [INT8, jq.Float8Backward()])
def test_loops_and_vmap_agree(backward: Any, rng: np.random.Generator) -> None:
    x, w = draw(rng, (4, 5, 16), (3, 16, 16))
    rule = INTEGERS["rows"] if backward is INT8 else FLOATS["float8"][0]

    def scan(p: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]

    def unroll(p: Any, x: jax.Array) -> jax.Array:
        for layer in range(3):
            x = jnp.tanh(x @ p["w"][layer])
        return x

    found = []
    for function in (scan, unroll):
        prepared, tree = prepare(function, w, x[0], [dataclasses.replace(rule, backward=backward)])
        differentiate = jax.grad(lambda x, t, p=prepared: jnp.sum(p.fake_apply(t, x) ** 2))
        found.append(jax.jit(jax.vmap(differentiate, (0, None)))(jnp.asarray(x), tree))
        found.append(jnp.stack([jax.jit(differentiate)(jnp.asarray(row), tree) for row in x]))
    for other in found[1:]:
        # A float that is computed in another order may be rounded to another code.
        np.testing.assert_allclose(other, found[0], atol=0.02 * np.abs(found[0]).max())
        assert np.mean(np.abs(other - found[0]) > 1e-5 * np.abs(found[0]).max()) < 0.1


def test_adapters_have_the_gradient_through_integers(rng: np.random.Generator) -> None:
    """The codes stay as they are; the factors b are 0, so that x has the gradient of the codes alone."""
    x, w, g = draw(rng, (5, 33), (33, 7), (5, 7))
    prepared, tree = prepare(lambda p, x: x @ p["w"], w, x, [dataclasses.replace(INTEGERS["rows"], backward=INT8)])
    q = prepared.convert(tree)
    adapted = jq.lora.adapt(prepared, q, jq.lora.LoRA(2), jax.random.key(0))
    y, pull_back = jax.vjp(jax.jit(lambda x: prepared.fake_apply(adapted, x)), x)
    check_equal(y, jax.jit(prepared.apply)(q, x))
    codes, wide = fold_scale(q.params["w"], g, 1, 1)
    expected = contract(quantize_cotangent(wide, (0,)), codes, "bo,io->bi")
    np.testing.assert_allclose(pull_back(g)[0], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("backward", "count"), [(jq.FloatBackward(), 1), (jq.Int8Backward(lhs=False), 2), (INT8, 3)])
def test_the_program_contracts_integers(backward: Any, count: int, fixed_rng: np.random.Generator) -> None:
    x, w, g = draw(fixed_rng, (64, 128), (128, 64), (64, 64))
    prepared, tree = prepare(
        lambda p, x: x @ p["w"], w, x, [dataclasses.replace(INTEGERS["tensor"], backward=backward)]
    )

    @jax.jit
    def run(tree: Any, x: Any, g: Any) -> Any:
        y, pull_back = jax.vjp(prepared.fake_apply, tree, x)
        return y, pull_back(g)

    program = run.lower(tree, x, g).as_text()
    lines = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert sum("i32>" in line.rpartition("->")[2] for line in lines) == count
    assert sum("f32>" in line.rpartition("->")[2] for line in lines) == 3 - count


def test_distillation_learns_with_integer_gradients(rng: np.random.Generator) -> None:
    x, w, change = draw(rng, (256, 16), (16, 8), (16, 8))
    rules = set_backward([INTEGERS["tensor"]], INT8)
    prepared, tree = prepare(lambda p, x: x @ p["w"], w + change / 2, x, rules)
    with jax.numpy_dtype_promotion("standard"):
        found = jq.train.distill(
            prepared, {"w": jnp.asarray(w)}, [x[:192]], optax.adam(2e-2), start=tree, steps=40, held_out=[x[192:]],
            evaluate_every=10,
        )  # fmt: skip
    assert min(found.held_out.values()) < 0.5 * found.held_out[0]


def test_what_cannot_be_contracted_so_is_refused(fixed_rng: np.random.Generator) -> None:
    x, w, g = draw(fixed_rng, (6, 8), (3, 8, 16), (6, 16))
    rules = set_backward([INTEGERS["rows"]], INT8)
    ragged = lambda p, x: lax.ragged_dot(x, p["w"], jnp.array([2, 0, 4], jnp.int32))  # noqa: E731
    with pytest.raises(ValueError, match=r"prepare: rules: expected FloatBackward\(\) for ragged products, .* for w"):
        jq.prepare(ragged, {"w": jnp.asarray(w)}, x, rules=rules)
    # A zero point for each row cannot be taken out of the sum over rows.
    points = jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("uint8", per="row"), backward=INT8)
    prepared, tree = prepare(lambda p, x: x @ p["w"], w[0], x, [points])
    with pytest.raises(ValueError, match=r"backward: expected FloatBackward\(\), because the zero point varies along"):
        pull(prepared, tree, x, g)
