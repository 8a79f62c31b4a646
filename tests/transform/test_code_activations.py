"""Activation functions between contractions, in the forms in which users write them: on codes, and why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxquant as jq

from ..support.prepared import find_ranges, find_sqnr

F = np.float32
RULES = jq.recipes.onnx_runtime()


@jax.custom_jvp
def double_slope(x: Any) -> Any:
    """A relu6 whose derivative is 2 everywhere."""
    return jnp.clip(x, 0, 6)


@double_slope.defjvp
def _double_slope_jvp(primals: Any, tangents: Any) -> Any:
    return double_slope(*primals), 2 * tangents[0]


@jax.custom_vjp
def saturate(x: Any, low: Any, high: Any) -> Any:
    """A clip between arguments that passes all gradients."""
    return jnp.minimum(jnp.maximum(x, low), high)


saturate.defvjp(lambda x, low, high: (saturate(x, low, high), None), lambda _, g: (g, None, None))


def clip(low: float, high: float) -> Callable[[Any], Any]:
    return lambda x: np.clip(x, low, high)


relu, relu6, hard_tanh = clip(0, np.inf), clip(0, 6), clip(-1, 1)
# The functions that clip, each with the same function of numpy.
CLIPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nn.relu": (jax.nn.relu, relu),
    "nn.relu6": (jax.nn.relu6, relu6),
    "nn.hard_tanh": (jax.nn.hard_tanh, hard_tanh),
    "maximum": (lambda x: jnp.maximum(0.0, x), relu),
    "clip": (lambda x: jnp.clip(x, -0.5, 2), clip(-0.5, 2)),
    "clamp": (lambda x: lax.clamp(F(-0.5), x, F(2)), clip(-0.5, 2)),
    "where greater": (lambda x: jnp.where(x > 0, x, 0), relu),
    "where less": (lambda x: jnp.where(x < 0, 0, x), relu),
    "where mirrored": (lambda x: jnp.where(lax.le(jnp.zeros_like(x), x), x, jnp.zeros_like(x)), relu),
    "where of where": (lambda x: jnp.where(x >= 2, 2, jnp.where(x > -0.5, x, -0.5)), clip(-0.5, 2)),
    "where of maximum": (lambda x: jnp.where(x > 2, 2, jnp.maximum(x, 0)), clip(0, 2)),
    "in a jit": (jax.jit(lambda x: jnp.where(x > 0, x, 0.0)), relu),
    "custom_jvp": (double_slope, relu6),
    "custom_vjp": (lambda x: saturate(x, -0.5, 2.0), clip(-0.5, 2)),
}
LEAKS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "nn.leaky_relu": (jax.nn.leaky_relu, 0.01),
    "where": (lambda x: jnp.where(x < 0, x * 0.25, x), 0.25),
    "negative": (lambda x: jnp.where(x > 0, x, -0.5 * x), -0.5),
    "maximum": (lambda x: jnp.maximum(x, 0.125 * x), 0.125),
}
OTHERS: dict[str, str] = {"nn.sigmoid": "sigmoid", "nn.silu": "sigmoid, multiply"}


def make_network(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda p, x: function(x @ p["a"] + p["c"]) @ p["b"]


def draw(rng: np.random.Generator) -> tuple[Any, jax.Array]:
    params = {name: jnp.asarray(rng.normal(0, 1, (8, 8)), F) for name in "ab"}
    params["c"] = jnp.asarray(rng.normal(0, 1, (1, 8)), F)
    return params, jnp.asarray(rng.normal(0, 1, (16, 8)), F)


@pytest.mark.parametrize("name", [f"clip {name}" for name in CLIPS] + [f"leak {name}" for name in LEAKS] + list(OTHERS))
def test_forms_that_are_recognized(name: str, rng: np.random.Generator) -> None:
    """Nothing is computed, so these are cheap."""
    kind, _, form = name.partition(" ")
    functions = {"clip": CLIPS, "leak": LEAKS}.get(kind, {})
    function = functions[form][0] if functions else getattr(jax.nn, name.removeprefix("nn."))
    operations = {"clip": "", "leak": "; in codes: leaky_relu"}.get(kind, f"; in codes: {OTHERS.get(name)}")
    coverage = jq.prepare(make_network(function), *draw(rng), rules=RULES).coverage
    assert coverage.outputs == "2 of 2 contractions give codes" + operations, str(coverage)


@pytest.mark.slow
def test_clips_have_the_codes_of_numpy(rng: np.random.Generator) -> None:
    """Before a contraction is rounded, and of a result that is read in floats, too; all in one program."""
    params, x = draw(rng)

    def apply(p: Any, x: Any) -> Any:
        y = x @ p["a"] + p["c"]
        return y, {name: function(y) for name, (function, _) in CLIPS.items()}, [
            function(x @ p["a"] + p["c"]) for function, _ in CLIPS.values()
        ]  # fmt: skip

    prepared = jq.prepare(apply, params, x, rules=[jq.Rule("a", shared=True, **_get_specs()), *RULES])
    assert not prepared.coverage.floats
    ranges = find_ranges(prepared, params, x)
    y, read, folded = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x),
        (y, read, folded),
    )
    spec = jq.QuantSpec("uint8")
    output = jq.Quantizer.from_range(spec, jax.tree.map(jnp.ravel, ranges["a"]["output"]))
    # The codes of y between those of the bounds.
    scale, point = np.asarray(output.scale), np.asarray(output.zero_point)
    codes = np.rint(np.asarray(y) / scale) + point
    for (name, (_, want)), alone in zip(CLIPS.items(), folded, strict=True):
        ends = [np.clip(np.rint(F(want(F(end))) / scale) + point, 0, 255) for end in (-1e30, 1e30)]
        expected = (np.clip(codes, *ends) - point).astype(F) * scale
        np.testing.assert_array_equal(read[name], expected, err_msg=name)
        np.testing.assert_array_equal(alone, expected, err_msg=name)


def _get_specs() -> dict[str, Any]:
    return {name: getattr(RULES[-1], name) for name in ("weight", "activation", "output")}


@pytest.mark.slow
def test_leaks_and_sigmoids_have_the_codes_of_the_operators(rng: np.random.Generator) -> None:
    params, x = draw(rng)

    def apply(p: Any, x: Any) -> Any:
        y = x @ p["a"] + p["c"]
        return y, [function(y) for function, _ in LEAKS.values()], jax.nn.sigmoid(y), jax.nn.silu(y)

    prepared = jq.prepare(apply, params, x, rules=RULES)
    ranges = find_ranges(prepared, params, x)
    results = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x), results
    )
    y, leaks, logistic, silu = results
    spec = jq.QuantSpec("uint8")

    def find(name: str) -> tuple[jax.Array, jax.Array]:
        quantizer = jq.Quantizer.from_range(spec, jax.tree.map(jnp.ravel, ranges[name]["output"]))
        return quantizer.scale.reshape(()), quantizer.zero_point.reshape(())

    def encode(values: Any, name: str) -> jax.Array:
        return jq.quantize_linear(values, *find(name))

    def decode(codes: Any, name: str) -> jax.Array:
        return jq.dequantize_linear(codes, *find(name))

    codes = encode(y, "a")
    for place, (value, (_, slope)) in enumerate(zip(leaks, LEAKS.values(), strict=True)):
        name = f"leaky_relu#{place}" if place else "leaky_relu"
        want = jq.ops.qlinear_leaky_relu(codes, *find("a"), *find(name), alpha=slope)
        np.testing.assert_array_equal(value, decode(want, name))
    want = jq.ops.qlinear_sigmoid(codes, *find("a"), *find("sigmoid"))
    np.testing.assert_array_equal(logistic, decode(want, "sigmoid"))
    second = jq.ops.qlinear_sigmoid(codes, *find("a"), *find("sigmoid#1"))
    want = jq.ops.qlinear_mul(codes, *find("a"), second, *find("sigmoid#1"), *find("multiply"))
    np.testing.assert_array_equal(silu, decode(want, "multiply"))


@pytest.mark.slow
def test_training_keeps_the_derivative_rules_of_clips(rng: np.random.Generator) -> None:
    params, x = draw(rng)

    def apply(p: Any, x: Any) -> Any:
        y = x @ p["a"] + p["c"]
        first, second = double_slope(x @ p["b"] + p["c"]), saturate(y, -0.5, 2.0)
        return first, second, second + y

    prepared = jq.prepare(apply, params, x, rules=RULES)
    assert prepared.coverage.outputs == "2 of 2 contractions give codes; in codes: clip, add"
    # Wider than the values, so that all of them have a gradient.
    ranges = jax.tree.map(lambda end: 1.5 * end, find_ranges(prepared, params, x))
    weights = [jnp.asarray(rng.normal(size=(16, 8)), F) for _ in range(3)]

    def find_loss(params: Any, part: int) -> jax.Array:
        return (prepared.fake_apply(prepared.trainable(params, ranges), x)[part] * weights[part]).sum()

    gradients = jax.jit(lambda p: [jax.grad(find_loss)(p, part)["c"] for part in range(3)])(params)
    for gradient, weight, slope in zip(gradients, weights, (2, 1, 2), strict=True):
        # All of the gradient passes, also where the function clips.
        want = slope * weight.sum(0, keepdims=True)
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-4)


FLOATS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nn.hard_sigmoid": (jax.nn.hard_sigmoid, "clip"),
    "tanh": (jnp.tanh, "tanh at .* reads it as floats"),
    "nn.gelu": (jax.nn.gelu, "integer_pow at .* reads it as floats"),
    "softplus": (lambda x: jnp.logaddexp(x, 0.0), "custom_jvp_call at .* reads it as floats"),
    "another bound": (lambda x: jnp.where(x > 0.5, x, 0.0), "gt at .* reads it as floats"),
    "another value": (lambda x: jnp.where(x > 0, x * 2 + 1, 0.0), "gt at .* reads it as floats"),
    "empty": (lambda x: jnp.where(x > 0, 0.0, jnp.maximum(x, 1)), "gt at .* reads it as floats"),
}


@pytest.mark.parametrize("name", list(FLOATS))
def test_other_functions_are_floats(name: str, rng: np.random.Generator) -> None:
    function, reason = FLOATS[name]
    params, x = draw(rng)
    row = jq.prepare(make_network(function), params, x, rules=RULES).coverage.rows[0]
    if reason != "clip":
        assert re.match(reason, row.output_reason), row.output_reason


def mark_and_wait(p: Any, x: Any) -> Any:
    """Identities between a contraction and its bias, its relu and its codes, and between codes."""
    y = checkpoint_name(x @ p["a"], "product") + p["c"]
    y = jax.nn.relu(lax.optimization_barrier(y))
    y, weights, z = lax.optimization_barrier((checkpoint_name(y, "features"), p["b"], jnp.sin(x)))
    return lax.stop_gradient(y + jnp.copy(y)) @ weights, z


@pytest.mark.slow
def test_codes_pass_through_identities(rng: np.random.Generator) -> None:
    params, x = draw(rng)
    prepared = jq.prepare(mark_and_wait, params, x, rules=RULES)
    coverage = prepared.coverage
    assert coverage.outputs.startswith("2 of 2 contractions give codes"), str(coverage)
    names = [operation.operation for operation in coverage.operations]
    assert {"checkpoint_name", "optimization_barrier", "add"} <= set(names)
    plain = jq.prepare(
        lambda p, x: ((y := jax.nn.relu(x @ p["a"] + p["c"])) + y) @ p["b"], params, x, rules=RULES
    )  # fmt: skip
    ranges = find_ranges(prepared, params, x)
    converted = prepared.convert(params, ranges)
    y, z = jax.jit(prepared.apply)(converted, x)
    np.testing.assert_array_equal(y, jax.jit(plain.apply)(converted, x))
    assert find_sqnr(z, jnp.sin(x)) > 100
    trained = jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x)
    jax.tree.map(np.testing.assert_array_equal, trained, (y, z))
    gradient = jax.jit(jax.grad(lambda p: prepared.fake_apply(prepared.trainable(p, ranges), x)[0].sum()))(params)
    assert not np.any(gradient["a"])
    assert np.any(gradient["b"])
