"""Biases that int32 cannot hold together with the products: larger scales, or an error, and no wrong sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant._codes.bias import compute_largest_sums

F32 = np.float32
RULES = jq.recipes.onnx_runtime()


def dense(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["w"] + p["b"][None]) @ p["v"]


def left(p: Any, x: Any) -> Any:
    """The weights on the left: their features are the first axis."""
    return p["v"].T @ jax.nn.relu(p["w"].T @ x.T + p["b"][:, None])


def normalized(p: Any, x: Any) -> Any:
    """A batch normalization whose factor is tiny for a dead channel."""
    y = (x @ p["w"] - p["m"][None]) * (p["g"] / jnp.sqrt(p["s"]))[None] + p["b"][None]
    return jax.nn.relu(y) @ p["v"]


def convolution(p: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(
        x.reshape(8, 4, 4, 1), p["k"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + p["b"][None, None, None]).reshape(8, -1)


def sample(rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """Parameters whose second channel is dead, with a bias of 5."""
    w = rng.standard_normal((16, 4)).astype(F32)
    w[:, 1] *= F32(1e-9)
    k = rng.standard_normal((3, 3, 1, 4)).astype(F32)
    k[..., 1] *= F32(1e-9)
    p = {
        "w": w, "b": np.array([0.1, 5, 0.2, -0.3], F32), "v": np.eye(4, dtype=F32), "k": k,
        "m": np.zeros(4, F32), "g": np.ones(4, F32), "s": np.ones(4, F32),
    }  # fmt: skip
    return p, np.abs(rng.standard_normal((8, 16))).astype(F32)


def convert_without_bias(prepared: Any, p: Any, ranges: Any) -> jq.QuantizedTree:
    """Return the codes that the weights have if no bias needs a larger scale."""
    q = prepared.convert({**p, "b": np.zeros(4, F32)}, ranges)
    return q.replace(params={**q.params, "b": p["b"]})


@pytest.mark.parametrize("function", [dense, left, normalized, convolution])
def test_a_dead_channel_gets_a_larger_scale(function: Any, rng: np.random.Generator) -> None:
    """The result of a dead channel is its bias; the codes of the other channels are those without the bias."""
    p, x = sample(rng)
    if function is normalized:
        p["w"][:, 1] *= F32(1e9)
        p["g"][1] = 1e-9
    prepared = jq.prepare(function, p, x, rules=RULES)
    ranges = prepared.calibrate(p, [x])
    converted, without = prepared.convert(p, ranges), convert_without_bias(prepared, p, ranges)
    expected = np.asarray(function(p, x), np.float64)
    for apply in (prepared.apply, jax.jit(prepared.apply)):
        y = np.asarray(apply(converted, x), np.float64)
        assert np.abs(y - expected).max() <= 0.05 * np.abs(expected).max()
    # Traced, a bias saturated although int32 held it.
    np.testing.assert_array_equal(
        np.asarray(prepared.apply(converted, x)), np.asarray(jax.jit(prepared.apply)(converted, x))
    )
    name = "k" if function is convolution else "w"
    scales, old = (np.asarray(tree.params[name].scale).ravel() for tree in (converted, without))
    assert (scales == old).tolist() == [True, False, True, True]
    same = np.asarray(converted.params[name].codes == without.params[name].codes).reshape(-1, 4)
    assert same[:, [0, 2, 3]].all()
    # ONNX's int32 holds the bias and every sum: exact integers.
    codes = np.abs(np.asarray(converted.params[name].codes, np.int64)).reshape(-1, 4).sum(0)
    x_range = np.asarray(ranges[name]["x"].hi if "x" in ranges[name] else next(iter(ranges[name].values())).hi)
    steps = np.abs(p["b"].astype(np.float64)) / (float(x_range.ravel()[0]) / 255 * scales.astype(np.float64))
    assert (steps + 255 * codes <= 2**31 - 1).all()
    # What fits is not enlarged beyond that.
    assert steps[1] > 2**30
    with pytest.raises(ValueError, match=r"jaxquant\.Prepared\.apply: bias: expected biases of at most 2\*\*31 steps"):
        prepared.apply(without, x)


def test_a_bias_that_fits_only_alone(rng: np.random.Generator) -> None:
    """It wrapped around: the result was 0 for a positive number."""
    p, x = sample(rng)
    p["w"][:, 1] = np.abs(rng.standard_normal(16))
    # The scales of the activations and of the channel, of 7 bits, give the bias 2**31 - 1000 steps.
    step = float(F32(x.max()) / F32(255)) * float(F32(np.abs(p["w"][:, 1]).max()) / F32(64))
    p["b"][1] = (2**31 - 1000) * step
    p["v"] = np.diag([1, 1 / p["b"][1], 1, 1]).astype(F32)
    prepared = jq.prepare(dense, p, x, rules=RULES)
    ranges = prepared.calibrate(p, [x])
    without = convert_without_bias(prepared, p, ranges)
    with pytest.raises(ValueError, match=r"jaxquant\.Prepared\.apply: bias: expected a bias that fits .* together"):
        prepared.apply(without, x)
    converted = prepared.convert(p, ranges)
    ratio = np.asarray(converted.params["w"].scale / without.params["w"].scale).ravel()
    assert ratio[1] > 1
    assert ratio[1] < 1.01
    codes = np.asarray(converted.params["w"].codes, np.int64)[:, 1]
    steps = float(p["b"][1]) / (step * float(ratio[1]))
    assert steps + 255 * np.abs(codes).sum() <= 2**31 - 1
    # Traced, the bias saturates instead of wrapping around: the sum stays positive.
    for tree in (converted, without):
        y = np.asarray(jax.jit(prepared.apply)(tree, x), np.float64)[:, 1]
        assert (y > 0.9).all()


def test_parameters_are_deleted_after_their_scales_were_enlarged(rng: np.random.Generator) -> None:
    p, x = sample(rng)
    arrays = jax.tree.map(jnp.array, p)
    prepared = jq.prepare(dense, arrays, x, rules=RULES)
    ranges = prepared.calibrate(arrays, [x])
    kept = prepared.convert(arrays, ranges)
    deleted = prepared.convert(arrays, ranges, delete=True)
    assert arrays["w"].is_deleted()
    np.testing.assert_array_equal(np.asarray(kept.params["w"].codes), np.asarray(deleted.params["w"].codes))
    traced = jax.jit(lambda p: prepared.convert(p, ranges))(jax.tree.map(jnp.array, p))
    np.testing.assert_array_equal(np.asarray(kept.params["w"].codes), np.asarray(traced.params["w"].codes))


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("function", [dense, left, normalized, convolution])
def test_training_has_the_larger_scales(function: Any, is_learned: bool, fixed_rng: np.random.Generator) -> None:
    """`fake_apply` kept the tiny scale: its bias saturated at 0.01 for 5, and eagerly it raised an error."""
    p, x = sample(fixed_rng)  # for some samples every other channel is negative before relu
    prepared = jq.prepare(function, p, x, rules=RULES)
    ranges = prepared.calibrate(p, [x])
    t = prepared.trainable(p, ranges, estimator=jq.LSQ() if is_learned else None)
    converted = prepared.convert(t)
    expected = np.asarray(jax.jit(prepared.apply)(converted, x))
    assert np.abs(expected - np.asarray(function(p, x), np.float64)).max() < 1
    for fake_apply in (prepared.fake_apply, jax.jit(prepared.fake_apply)):
        np.testing.assert_array_equal(np.asarray(fake_apply(t, x)), expected)
    gradients = jax.jit(jax.grad(lambda t: prepared.fake_apply(t, x).sum()))(t).params
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    name = "k" if function is convolution else "w"
    assert np.abs(np.asarray(gradients[name]).reshape(-1, 4)[:, [0, 2, 3]]).max() > 0
    assert float(gradients["b"][1]) > 0


def test_the_sums_of_long_features_do_not_overflow() -> None:
    """255 times the sum of 70,000 codes exceeds int32; the product became negative, and no bias too large."""
    q = jq.quantize(np.ones((70_000, 1), F32), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    np.testing.assert_allclose(float(compute_largest_sums(q, [1])[0]), 70_000 * 127 * 255, rtol=1e-6)
