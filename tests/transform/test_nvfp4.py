"""NVFP4 weights and activations: float8 scales of blocks, times one float32 that a call or calibration finds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import microscaling_text as text

F32 = np.float32
FLOAT4 = "float4_e2m1fn"
INNER = jq.QuantSpec("float8_e4m3fn")
RULES = ("modelopt", "compressed_tensors")


def multiply(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def draw(rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    params = {"w": jnp.asarray(rng.normal(0, 0.3, (64, 10)), F32)}
    return params, (rng.normal(size=(6, 64)) * np.exp2(rng.integers(-4, 5, (6, 1)))).astype(F32)


def dequantize(x: np.ndarray, rule: str, reached: float | None = None) -> np.ndarray:
    """Return the float64 numbers of the codes of the oracle."""
    codes, scale, shared, _ = text.quantize_nvfp4(x, rule, reached=reached)
    levels = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factor = (scale.view(ml_dtypes.float8_e4m3fn).astype(F32) * F32(shared)).astype(F32)
    return levels * np.repeat(factor, 16, -1)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_both_sides_have_the_codes_of_the_oracle(rule: Any, is_static: bool, rng: np.random.Generator) -> None:
    params, x = draw(rng)
    calibrator = jq.calibration.minmax if is_static else None
    rules = jq.recipes.nvfp4(scale_rule=rule, activations=FLOAT4, calibrator=calibrator)
    prepared = jq.prepare(multiply, params, x, rules=rules, strict=True)
    (row,) = prepared.coverage.rows
    assert (row.form, row.activations[0].granularity) == ("small-float", jq.Blocked(1, 16))
    # Calibration on half of the largest number: the largest blocks saturate.
    reached = float(np.abs(x).max() / 2)
    ranges = prepared.calibrate(params, [x / 2]) if is_static else {}
    q = prepared.convert(params, ranges)
    a = dequantize(x, rule, reached if is_static else None)
    b = dequantize(np.asarray(params["w"]).T.copy(), rule).T
    expected, bound = a @ b, 1e-6 * (np.abs(a) @ np.abs(b)).max()
    y = prepared.apply(q, x)
    np.testing.assert_allclose(y, expected, rtol=0, atol=bound)
    np.testing.assert_array_equal(y, jax.jit(prepared.apply)(q, x))
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x))
    if is_static:
        # With a static range no row depends on the others.
        for mapped in (
            jax.vmap(lambda row: prepared.apply(q, row[None])[0])(x),
            jax.lax.map(lambda row: prepared.apply(q, row[None])[0], x),
        ):
            np.testing.assert_allclose(mapped, expected, rtol=0, atol=bound)


def test_a_loop_over_layers_has_a_range_for_each(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(0, 0.3, (3, 32, 32)), F32)}
    x = rng.normal(size=(4, 32)).astype(F32)

    def loop(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) * 3, None), x, params["w"])[0]

    rules = jq.recipes.nvfp4(activations=FLOAT4, calibrator=jq.calibration.minmax)
    prepared = jq.prepare(loop, params, x, rules=rules, strict=True)
    ranges = prepared.calibrate(params, [x])
    (entry,) = jax.tree.leaves(ranges["w"], is_leaf=lambda part: hasattr(part, "lo"))
    assert entry.lo.shape[0] == 3
    q = prepared.convert(params, ranges)
    h = x
    for layer in range(3):
        reached = float(np.maximum(np.abs(entry.lo[layer]), np.abs(entry.hi[layer])).max())
        a = dequantize(np.asarray(h), "modelopt", reached)
        # One float32 for all layers.
        b = dequantize(np.asarray(params["w"]).transpose(0, 2, 1).copy(), "modelopt")[layer].T
        h = np.asarray(jnp.tanh(jnp.asarray(a @ b, F32)) * 3)
    y = prepared.apply(q, x)
    error, size = np.abs(np.asarray(y) - h), np.abs(h).max()
    # A sum in another order may move a code in a later layer.
    assert np.median(error) < 1e-5 * size
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x))


def test_gradients_stop_where_activations_saturate(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    rules = jq.recipes.nvfp4(activations=FLOAT4, calibrator=jq.calibration.minmax)
    prepared = jq.prepare(multiply, params, x, rules=rules)
    reached = float(np.abs(x).max() / 2)
    trainable = prepared.trainable(params, prepared.calibrate(params, [x / 2]))
    gradient = jax.grad(lambda x: jnp.sum(prepared.fake_apply(trainable, x)))(jnp.asarray(x))
    weights = dequantize(np.asarray(params["w"]).T.copy(), "modelopt").T.sum(1)
    np.testing.assert_allclose(gradient, np.where(np.abs(x) <= reached, weights, 0), rtol=1e-5, atol=1e-5)
    assert (np.abs(x) > reached).any()
    gradient = jax.grad(lambda p: jnp.sum(prepared.fake_apply(p, x)))(trainable)
    expected = np.broadcast_to(dequantize(x, "modelopt", reached).sum(0)[:, None], (64, 10))
    np.testing.assert_allclose(jax.tree.leaves(gradient)[0], expected, rtol=1e-4, atol=1e-3)


def test_reports_count_what_saturates(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    x = np.abs(x)
    for is_static in (True, False):
        calibrator = jq.calibration.minmax if is_static else None
        rules = jq.recipes.nvfp4(activations=FLOAT4, calibrator=calibrator)
        prepared = jq.prepare(multiply, params, x, rules=rules)
        q = prepared.convert(params, prepared.calibrate(params, [x / 4]) if is_static else {})
        (row,) = jq.report.compare(prepared, params, q, [x])
        values = dequantize(x, "modelopt", float(np.abs(x).max() / 4) if is_static else None)
        wide = x.astype(np.float64)
        expected = 10 * np.log10(np.sum(wide**2) / np.sum((wide - values) ** 2))
        assert row.activation_sqnr is not None
        assert row.activation_saturated is not None
        np.testing.assert_allclose(row.activation_sqnr, expected, rtol=1e-3)
        if is_static:
            # A block whose scale is the largest, and a number more than half a step above 6 of it.
            beyond = np.mean(wide > 7 / 6 * np.abs(x).max() / 4)
            np.testing.assert_allclose(row.activation_saturated, beyond, atol=2 / x.size)
            assert beyond > 0


def test_bad_arguments(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    with pytest.raises(ValueError, match=r"jaxquant\.recipes\.nvfp4: activations: expected 'float4_e2m1fn'"):
        jq.recipes.nvfp4(activations="int8")
    with pytest.raises(ValueError, match=r"jaxquant\.recipes\.nvfp4: calibrator: expected None without activations"):
        jq.recipes.nvfp4(calibrator=jq.calibration.minmax)
    # The int8 scales of blocks have no float32 that a static range could give.
    for options in ({}, {"scale_spec": jq.QuantSpec("uint8")}):
        with pytest.raises(ValueError, match=r"jaxquant\.Activation: range: expected Dynamic\(\) with a block"):
            jq.Activation(FLOAT4, block=16, range=jq.Static(jq.calibration.minmax), options=options)
    # One array of integers and one of NVFP4 codes have no common form.
    mixed = jq.Rule(
        weight=jq.Weight(FLOAT4, block=16, options={"scale_spec": INNER}), activation=jq.Activation("int8", per="row")
    )
    with pytest.raises((TypeError, ValueError), match="float4_e2m1fn"):
        jq.prepare(multiply, params, x, rules=[mixed])
    prepared = jq.prepare(multiply, params, x, rules=jq.recipes.nvfp4())
    for estimator in (jq.LSQ(), jq.LSQPlus()):
        with pytest.raises(ValueError, match=r"w: jaxquant\.Prepared\.trainable: estimator: .* no estimator trains"):
            prepared.trainable(params, estimator=estimator)
    offsets = [jq.Rule(weight=jq.Weight("uint4", block=16, options={"offset": True}))]
    with pytest.raises(ValueError, match=r"w: jaxquant\.Prepared\.trainable: estimator: .* no estimator trains"):
        jq.prepare(multiply, params, x, rules=offsets).trainable(params, estimator=jq.LSQPlus())
