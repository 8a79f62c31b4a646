"""Statistics of prepared functions, and algorithms on their weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

from ..support.equality import check_equal

F32 = np.float32
INT4 = (jq.Rule(operation="take", weight=jq.Weight("int8")), jq.Rule(weight=jq.Weight("int4")))


def network(params: Any, images: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return a result with each kind of contraction: convolutions, a lookup, a scan over layers, experts."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, params["conv"], (1, 1), "SAME", dimension_numbers=numbers)
    x = jax.nn.relu(x)
    x = jax.lax.conv_general_dilated(
        x, params["depthwise"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )
    x = jax.jit(jax.nn.relu)(x).reshape(x.shape[0], -1)
    x = x @ params["dense"].T + params["table"][tokens]

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    x = jnp.einsum("bi,eio->ebo", x, params["experts"])
    return jnp.einsum("ebo,eoc->bc", jax.nn.relu(x), params["mixed"])


def sample_params(rng: np.random.Generator) -> dict[str, jax.Array]:
    shapes = {
        "conv": (3, 3, 2, 4), "depthwise": (3, 3, 1, 8), "dense": (6, 32), "table": (5, 6), "stack": (3, 6, 6),
        "experts": (2, 6, 4), "mixed": (2, 4, 3),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(0, 0.5, shape), F32) for name, shape in shapes.items()}


def sample_batches(rng: np.random.Generator, count: int) -> list[tuple[jax.Array, jax.Array]]:
    return [
        (jnp.asarray(rng.normal(size=(8, 4, 4, 2)), F32), jnp.asarray(rng.integers(0, 5, 8), jnp.int32))
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["statistics", "batches"])
def test_every_weight_is_listed(rng: np.random.Generator, kind: str) -> None:
    params, batches = sample_params(rng), sample_batches(rng, 3)
    prepared = jq.prepare(network, params, *batches[0], rules=INT4)
    stats = ptq.collect(prepared, params, batches)
    # Of the first convolution: all windows of all images, padded with zeros.
    images = np.concatenate([np.asarray(batch[0]) for batch in batches])
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [padded[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    vectors = np.stack(windows, -1).reshape(-1, 2 * 9).astype(np.float64)  # channels, then windows
    np.testing.assert_allclose(stats["conv"].second[0], vectors.T @ vectors / len(vectors), rtol=1e-4, atol=1e-5)
    assert {name: stats[name].mean.shape for name in stats} == {
        "conv": (1, 18), "depthwise": (4, 9), "dense": (1, 32), "stack": (3, 1, 6), "experts": (1, 6), "mixed": (1, 8),
    }  # fmt: skip
    expected = prepared.convert(params)
    data: Any = stats if kind == "statistics" else batches
    qparams, notes = ptq.apply(prepared, params, data, ptq.GPTQ(range="whole"))
    assert jax.tree.structure(qparams) == jax.tree.structure(expected)
    assert {note.path for note in notes} == set(params)
    rows = {note.path: note for note in notes}
    assert rows["table"].action == "Nearest for GPTQ"
    assert rows["table"].reason == "a lookup has no inputs"
    for name in set(params) - {"table"}:
        assert rows[name].action == "GPTQ", rows[name]
        assert rows[name].after <= rows[name].before * (1 + 1e-6), rows[name]  # type: ignore[operator]
        check_equal(qparams[name].scale, expected[name].scale)
    assert "table" in str(notes)
    assert np.isfinite(np.asarray(jax.jit(prepared.apply)(qparams, None, *batches[0]))).all()


@pytest.mark.slow
def test_codes_are_those_of_the_array_functions(rng: np.random.Generator) -> None:
    """Of statistics in floats: what a user computes by hand from the inputs of each layer."""
    params = {name: jnp.asarray(rng.normal(size=(12, 12)), F32) for name in ("first", "second")}
    x = jnp.asarray(rng.normal(size=(64, 12)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["first"].T) @ params["second"]

    prepared = jq.prepare(apply, params, x, rules=jq.recipes.w4a8())
    stats = ptq.collect(prepared, params, [x])
    hidden = jax.nn.relu(x @ params["first"].T)
    method = ptq.GPTQ(range="whole")
    floats = ptq.apply(prepared, params, stats, method).params
    layers = ptq.apply(prepared, params, [x[:32], x[32:]], method).params
    spec = jq.QuantSpec("int4", jq.PerAxis(0))
    first = ptq.gptq(params["first"], stats["first"].second, spec, axis=0)
    # An output that round-to-nearest serves better has its codes.
    nearest = jq.quantize(params["first"], spec)
    is_either = [(floats["first"].codes == q.codes).all(1) for q in (first, nearest)]
    assert np.logical_or(*is_either).all()
    assert np.mean(is_either[0]) > 0.5
    check_equal(layers["first"].codes, floats["first"].codes)
    assert floats["first"].stored_order == prepared.convert(params)["first"].stored_order
    # The second layer's inputs are those of the quantized first layer, if the pass goes layer by layer.
    quantized = jax.nn.relu(x @ floats["first"].dequantize().T)
    for inputs, q in ((hidden, floats["second"]), (quantized, layers["second"])):
        expected = ptq.gptq(params["second"], inputs.T @ inputs / F32(64), jq.QuantSpec("int4", jq.PerAxis(1)))
        nearest = jq.quantize(params["second"], jq.QuantSpec("int4", jq.PerAxis(1)))
        agreement = [(np.asarray(other.codes) == np.asarray(q.codes)).all(0) for other in (expected, nearest)]
        # A value near a tie may differ, because sums have another order.
        assert np.logical_or(*agreement).mean() > 0.7


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [ptq.HQQ(), ptq.Nearest("whole"), ptq.AdaRound(steps=50)], ids=str)
def test_methods(rng: np.random.Generator, method: Any) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(64, 12)) @ rng.normal(size=(12, 12)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    qparams, notes = ptq.apply(prepared, params, [x], method)
    assert notes["w"].action == type(method).__name__
    if method == ptq.Nearest("whole"):
        check_equal(qparams["w"].codes, prepared.convert(params)["w"].codes)
    if not isinstance(method, ptq.AdaRound):
        check_equal(ptq.apply(prepared, params, None, method).params["w"].codes.shape, (12, 5))


@pytest.mark.slow
def test_what_cannot_be_quantized_with_inputs_is_noted(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 8)), F32), "v": jnp.asarray(rng.normal(size=(8, 8)), F32)}
    x = jnp.asarray(rng.normal(size=(16, 12)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        left, right = jnp.split(params["w"], 2, 1)
        joined = jnp.concatenate([params["v"][:, :4], right[:8]], 1)
        return (x @ left) @ joined[:4]

    prepared = jq.prepare(apply, params, x, rules=INT4[1:])
    for data in ([x], ptq.collect(prepared, params, [x])):
        _, notes = ptq.apply(prepared, params, data, ptq.GPTQ())
        for note in notes:
            assert note.action == "Nearest for GPTQ"
            assert note.reason


def test_singular_moments_and_dead_inputs_are_noted(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(4, 12)), F32).at[:, 3].set(0)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    _, notes = ptq.apply(prepared, params, [x], ptq.GPTQ())
    assert notes["w"].reason.startswith(
        "1 inputs are always 0; 4 samples for 12 inputs: the second moments are singular"
    )


def test_errors(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(12, 5)), F32)}
    x = jnp.asarray(rng.normal(size=(4, 12)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=INT4[1:])
    stats = ptq.collect(prepared, params, [x])
    cases: list[Any] = [
        (lambda: ptq.apply(prepared, params, [], ptq.GPTQ()), "ptq.apply: data: expected at least one batch"),
        (lambda: ptq.apply(prepared, params, None, ptq.GPTQ()), "ptq.apply: data: expected batches or statistics for"),
        (lambda: ptq.apply(prepared, params, [x, x[:2]], ptq.GPTQ()), "ptq.apply: data: expected batches of one shape"),
        (lambda: ptq.apply(prepared, {"v": params["w"]}, [x], ptq.GPTQ()), "Prepared.convert: params: expected"),
        (lambda: ptq.apply(prepared, params, [x * np.nan], ptq.GPTQ()), "ptq.second_moments.finalize: state: exp"),
        (lambda: ptq.apply(prepared, params, ptq.Statistics({}, stats.uses), ptq.GPTQ()), "ptq.apply: data: exp"),
        (lambda: ptq.collect(prepared, params, []), "ptq.collect: batches: expected at least one batch, got none"),
        (lambda: ptq.collect(prepared, params, [x * np.nan]), "ptq.collect: batches: expected batches"),
        (lambda: ptq.collect(prepared, params, x), "ptq.collect: batches: expected an iterable of batches"),
        (lambda: ptq.GPTQ(range="best"), "GPTQ: range: expected 'whole' or 'searched' or 'tried' or"),
    ]  # fmt: skip
    apply: Any = ptq.apply
    cases += [
        (lambda: apply(prepared, params, [x], "gptq"), "ptq.apply: method: expected ptq.GPTQ"),
        (lambda: apply(lambda x: x, params, [x], ptq.GPTQ()), "ptq.apply: prepared: expected a Prepared"),
    ]
    for call, text in cases:
        with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.{text}"):
            call()


def test_integer_outputs_are_refused(rng: np.random.Generator) -> None:
    """Such a contraction multiplies its weights by other parameters before they become codes."""
    params, x = {"w": jnp.asarray(rng.normal(size=(8, 5)), F32)}, jnp.asarray(rng.normal(size=(4, 8)), F32)
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=jq.recipes.onnx_runtime())
    qparams = prepared.convert(params)
    calls: dict[str, Any] = {
        "ptq.apply": lambda: ptq.apply(prepared, params, [x], ptq.GPTQ()),
        "ptq.collect": lambda: ptq.collect(prepared, params, [x]),
        "ptq.equalize": lambda: ptq.equalize(prepared, params, x),
        "ptq.allocate_bits": lambda: ptq.allocate_bits(prepared, params, [x], budget=100),
        "report.compare": lambda: jq.report.compare(prepared, params, qparams, [x]),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^jaxquant.{name}: prepared: expected rules without `output`.*got.* w"):
            call()
