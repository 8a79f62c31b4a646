"""Activations with a scale for each block of a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F32 = np.float32


def multiply(params: dict[str, Any], x: jax.Array) -> jax.Array:
    return x @ params["w"]


def sample(rng: np.random.Generator, inputs: int = 96) -> tuple[dict[str, Any], np.ndarray]:
    return {"w": rng.standard_normal((inputs, 5)).astype(F32)}, rng.standard_normal((3, 4, inputs)).astype(F32)


def quantize_blocks(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return symmetric int8 codes, and the scale of each block of the last axis: its largest magnitude over 127."""
    count = -(-x.shape[-1] // size)
    padded = np.zeros((*x.shape[:-1], count * size), F32)
    padded[..., : x.shape[-1]] = x
    blocks = padded.reshape(*x.shape[:-1], count, size)
    scale = (np.abs(blocks).max(-1) / F32(127)).astype(F32)
    return np.rint(blocks / scale[..., None]), scale


@pytest.mark.parametrize(
    ("weight", "inputs", "size"),
    [
        (jq.Weight("int8"), 96, 32),
        (jq.Weight("int8"), 80, 32),
        (jq.Weight("int8"), 96, 200),
        (jq.Weight("int8", per="tensor"), 96, 40),
        (jq.Weight("int4", block=32), 96, 32),
        (jq.Weight("int4", block=32), 80, 64),
        (jq.Weight("int4", block=64), 96, 32),
    ],
)
def test_each_block_of_a_row_has_a_scale(weight: Any, inputs: int, size: int, rng: np.random.Generator) -> None:
    params, x = sample(rng, inputs)
    rules = [jq.Rule(weight=weight, activation=jq.Activation("int8", block=size))]
    prepared = jq.prepare(multiply, params, x, rules=rules, strict=True)
    (row,) = prepared.coverage.rows
    assert row.activations[0].granularity == jq.Blocked(2, size)
    q = prepared.convert(params)
    codes, scale = quantize_blocks(x, size)
    w = np.zeros((codes.shape[-2] * size, 5))
    w[:inputs] = np.asarray(q.params["w"].dequantize(), np.float64)
    values = (codes * scale[..., None].astype(np.float64)).reshape(3, 4, -1)
    expected = values @ w
    bound = 1e-5 * (np.abs(values) @ np.abs(w)).max()
    y = prepared.apply(q, x)
    np.testing.assert_allclose(y, expected, rtol=0, atol=bound)
    for same in (
        jax.jit(prepared.apply)(q, x),
        jax.vmap(lambda x: prepared.apply(q, x))(x),
        jax.lax.map(lambda x: prepared.apply(q, x), x),
        jax.jit(prepared.fake_apply)(params, x),
    ):
        np.testing.assert_array_equal(y, same)


def test_the_sums_are_integers(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    rules = [jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("uint8", block=32))]
    prepared = jq.prepare(multiply, params, x, rules=rules)
    text = str(jax.make_jaxpr(prepared.apply)(prepared.convert(params), x))
    assert "preferred_element_type=int32" in text
    assert "preferred_element_type=float32" not in text


def test_an_outlier_costs_one_block_its_resolution(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    x[..., 0] = 1000
    errors = []
    for activation in (jq.Activation("int8", per="row"), jq.Activation("int8", block=32)):
        prepared = jq.prepare(multiply, params, x, rules=[jq.Rule(weight=jq.Weight("int8"), activation=activation)])
        q = prepared.convert(params)
        exact = np.asarray(x, np.float64) @ np.asarray(q.params["w"].dequantize(), np.float64)
        errors.append(np.abs(prepared.apply(q, x) - exact).mean())
    assert errors[1] < 0.9 * errors[0]


def test_the_gradient_is_that_of_the_products(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    rules = [jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("int8", block=32))]
    prepared = jq.prepare(multiply, params, x, rules=rules)
    gradient = jax.grad(lambda params: prepared.fake_apply(params, x).sum())(params)["w"]
    codes, scale = quantize_blocks(x, 32)
    expected = (codes * scale[..., None].astype(np.float64)).reshape(12, 96).sum(0)
    np.testing.assert_allclose(gradient, np.broadcast_to(expected[:, None], (96, 5)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"block": 0}, r"Activation: block: expected a positive int or None, got 0"),
        ({"block": 2.0}, r"Activation: block: expected an int"),
        ({"block": 32, "per": "image"}, r'Activation: per: expected "tensor" or "row" with a block'),
        ({"block": 32, "range": jq.Static(jq.calibration.minmax)}, r"Activation: range: expected Dynamic\(\) with a b"),
    ],
)
def test_a_wrong_block_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        jq.Activation("int8", **arguments)


def test_what_has_no_form_for_blocks_is_refused_by_prepare(rng: np.random.Generator) -> None:
    def convolve(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME")

    activation = jq.Activation("int8", block=32)
    params = {"k": jnp.ones((4, 3, 3, 3))}
    rules = [jq.Rule(weight=jq.Weight("int8"), activation=activation)]
    with pytest.raises(ValueError, match=r"prepare: rules: expected Activations without blocks for convolutions.*k"):
        jq.prepare(convolve, params, jnp.ones((1, 3, 8, 8)), rules=rules)
    floats, x = sample(rng)
    rules = [jq.Rule(weight=jq.Weight("int4", block=64), activation=jq.Activation("int8", block=40))]
    with pytest.raises(ValueError, match=r"jaxquant\.prepare: .*expected blocks of both sides that end at the same"):
        jq.prepare(multiply, floats, x, rules=rules)
    static = jq.Activation("uint8", range=jq.Static(jq.calibration.minmax))
    with pytest.raises(
        ValueError, match=r"Rule: weight, activation: expected a Weight without blocks and an Activation"
    ):
        jq.Rule(weight=jq.Weight("int8"), activation=activation, output=static)
