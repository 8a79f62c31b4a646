"""Factors between layers and biases: what changes, what stays, and that the float function stays the same."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

F32 = np.float32
RULES = (jq.Rule(weight=jq.Weight("int4")),)


class Block(nn.Module):
    """A convolution with a relu and a pool, a normalization with two readers, a residual."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), name="first")(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Conv(8, (1, 1), name="second")(x)).mean((1, 2))
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.Dense(8, name="left")(h) * nn.Dense(8, name="right")(h)
        return nn.Dense(3, name="out")(x)


@pytest.fixture(scope="module")
def block() -> tuple[Any, Any, Any, Any]:
    """Return the model, parameters with channels of different sizes, a batch, and statistics."""
    sample = np.random.default_rng(0)
    x = jnp.asarray(sample.normal(size=(16, 6, 6, 2)), F32)
    model = Block()
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(
        lambda s: jnp.asarray(sample.normal(0.2, 0.5, s.shape) * np.exp(sample.normal(size=s.shape[-1])), F32), shapes
    )
    prepared = jq.prepare(model.apply, params, x, rules=RULES)
    return prepared, params, x, ptq.collect(prepared, params, [x])


def check_same_function(prepared: Any, params: Any, changed: Any, x: Any) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(changed)
    expected = np.asarray(jax.jit(prepared.function)(params, x))
    actual = np.asarray(jax.jit(prepared.function)(changed, x))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_smooth(block: Any, method: str) -> None:
    prepared, params, x, stats = block
    changed, notes = ptq.smooth(prepared, params, stats, x, method=method)
    check_same_function(prepared, params, changed, x)
    rows = {note.path.split("/")[1]: note for note in notes}
    assert rows["second"].action == "scaled, with params/first/kernel, params/first/bias"
    assert rows["left"].action == "scaled, with params/norm/scale, params/norm/bias"
    assert rows["right"].action == rows["left"].action
    assert rows["first"].reason == "inputs of the function"
    assert rows["out"].action == "unchanged"
    assert rows["out"].reason
    if method == "smoothquant":
        before, after = (np.asarray(p["params"]["first"]["kernel"]) for p in (params, changed))
        factors = before[0, 0, 0] / after[0, 0, 0]
        x_max = np.asarray(stats["params/second/kernel"].largest[0])
        w_max = np.abs(np.asarray(params["params"]["second"]["kernel"])).max((0, 1, 3))
        expected = np.sqrt(x_max / w_max)
        np.testing.assert_allclose(factors, expected / np.exp(np.log(expected).mean()), rtol=1e-3)


@pytest.mark.slow
def test_equalize(block: Any) -> None:
    prepared, params, x, _ = block
    changed, notes = ptq.equalize(prepared, params, x)
    check_same_function(prepared, params, changed, x)
    first, second = (np.asarray(changed["params"][name]["kernel"]) for name in ("first", "second"))
    np.testing.assert_allclose(np.abs(first).max((0, 1, 2)), np.abs(second).max((0, 1, 3)), rtol=1e-4)
    rows = {note.path.split("/")[1]: note for note in notes}
    assert rows["second"].action.startswith("scaled, with params/first/kernel")
    assert rows["left"].reason == "a normalization, which has no weight to equalize with"


@pytest.mark.parametrize("activate", [jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_factors_go_through_gated_products(activate: Any, rng: np.random.Generator) -> None:
    """Those of the last weight go into the linear factor of the product, in either order, and never into the gate."""
    shapes = {"gate": (6, 8), "up": (6, 8), "bias": (8,), "down": (8, 5)}
    params = {name: jnp.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}
    params["down"] *= jnp.exp(jnp.asarray(rng.normal(size=(8, 1)), F32))
    x = jnp.asarray(rng.normal(size=(32, 6)), F32)

    def apply(params: Any, x: jax.Array, is_swapped: bool) -> jax.Array:
        gate, up = activate(x @ params["gate"]), 0.5 * (x @ params["up"] + params["bias"][None])
        return (up * gate if is_swapped else gate * up) @ params["down"]

    for is_swapped in (False, True):
        prepared = jq.prepare(functools.partial(apply, is_swapped=is_swapped), params, x, rules=RULES)
        stats = ptq.collect(prepared, params, [x], progress=False)
        hidden = np.asarray(activate(x @ params["gate"])) * np.asarray(0.5 * (x @ params["up"] + params["bias"][None]))
        expected = np.sqrt(np.abs(hidden).max(0) / np.abs(params["down"]).max(1))
        for changed, notes in (
            ptq.smooth(prepared, params, stats, x),
            ptq.smooth(prepared, params, stats, x, method="awq"),
            ptq.equalize(prepared, params, x),
        ):
            check_same_function(prepared, params, changed, x)
            assert notes["down"].action == "scaled, with up, bias"
            np.testing.assert_array_equal(changed["gate"], params["gate"])
            factors = np.asarray(changed["down"] / params["down"])[:, 0]
            np.testing.assert_allclose(changed["up"] * factors[None], params["up"], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(changed["bias"] * factors, params["bias"], rtol=1e-5, atol=1e-6)
        changed, _ = ptq.smooth(prepared, params, stats, x)
        factors = np.asarray(changed["down"] / params["down"])[:, 0]
        np.testing.assert_allclose(factors, expected / np.exp(np.log(expected).mean()), rtol=1e-3)


def test_both_factors_of_a_square_stay(rng: np.random.Generator) -> None:
    """A factor for each channel does not go through (x @ w)**2, nor through a product with itself."""
    params = {name: jnp.asarray(rng.normal(size=(4, 4)), F32) for name in ("w", "v")}
    x = jnp.asarray(rng.normal(size=(8, 4)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["w"]
        return (h * h) @ params["v"]

    prepared = jq.prepare(apply, params, x, rules=RULES)
    changed, notes = ptq.equalize(prepared, params, x)
    assert notes["v"].reason == "inputs that mul computes"
    np.testing.assert_array_equal(changed["w"], params["w"])


def test_a_factor_of_a_gated_product_has_no_other_reader(rng: np.random.Generator) -> None:
    """A small change of the results, which their comparison takes for rounding, is a change."""
    shapes = {"gate": (6, 8), "up": (6, 8), "bias": (8,), "down": (8, 5)}
    params = {name: jnp.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}
    params["down"] *= jnp.exp(jnp.asarray(rng.normal(size=(8, 1)), F32))
    x = jnp.asarray(rng.normal(size=(32, 6)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        up = x @ params["up"]
        hidden = jax.nn.silu(x @ params["gate"]) * (up + params["bias"][None])
        return hidden @ params["down"] + 1e-6 * jnp.tanh(up).sum()

    prepared = jq.prepare(apply, params, x, rules=RULES)
    changed, notes = ptq.equalize(prepared, params, x)
    assert notes["down"].reason == "inputs that mul computes"
    np.testing.assert_array_equal(changed["up"], params["up"])


def test_factors_go_through_many_products(rng: np.random.Generator) -> None:
    """The search takes no time that doubles with each product."""
    params = {name: jnp.asarray(rng.normal(size=(4, 4)), F32) for name in ("gate", "up", "down")}
    x = jnp.asarray(rng.normal(size=(8, 4)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        up, gate = x @ params["up"], jax.nn.sigmoid(x @ params["gate"])
        for i in range(40):
            up = up * (1 + gate / (2 + i))
        return up @ params["down"]

    prepared = jq.prepare(apply, params, x, rules=RULES)
    changed, notes = ptq.equalize(prepared, params, x)
    assert notes["down"].action == "scaled, with up"
    check_same_function(prepared, params, changed, x)


def test_factors_that_would_change_the_function_are_dropped(rng: np.random.Generator) -> None:
    params = {"w": jnp.asarray(rng.normal(size=(4, 4)), F32), "v": jnp.asarray(rng.normal(size=(4, 4)) * 9, F32)}
    x = jnp.asarray(rng.normal(size=(8, 4)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["w"]
        return h + h @ params["v"]

    prepared = jq.prepare(apply, params, x, rules=RULES)
    changed, notes = ptq.equalize(prepared, params, x)
    assert notes["v"].reason.startswith("the factors would change the function")
    np.testing.assert_array_equal(changed["w"], params["w"])


@pytest.mark.slow
def test_correct_bias(block: Any) -> None:
    prepared, params, x, stats = block
    qparams = prepared.convert(params)
    corrected, notes = ptq.correct_bias(prepared, params, qparams, stats, batch=x)
    assert all(note.action.startswith("corrected in") for note in notes), str(notes)
    # The mean of the first layer's outputs is that of floats.
    patches = jax.lax.conv_general_dilated_patches(
        x, (3, 3), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    kernels = [np.asarray(p, np.float64) for p in (
        params["params"]["first"]["kernel"], qparams.params["params"]["first"]["kernel"].dequantize(),
    )]  # fmt: skip
    mean = np.asarray(patches, np.float64).mean((0, 1, 2))
    shift = mean @ (kernels[0] - kernels[1]).transpose(2, 0, 1, 3).reshape(18, 8)
    change = np.asarray(corrected.params["params"]["first"]["bias"]) - np.asarray(params["params"]["first"]["bias"])
    np.testing.assert_allclose(change, shift, rtol=1e-3, atol=1e-5)
    prepared.apply(corrected, x)


def dense(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ params["first"].T + params["bias"][None])
    return h @ params["second"] + params["offset"]


@pytest.mark.parametrize("recipe", ["int4", "static"])
@pytest.mark.sample(1)
def test_measured_biases(rng: np.random.Generator, recipe: str) -> None:
    shapes = {"first": (12, 10), "bias": (12,), "second": (12, 5), "offset": (1, 5)}
    params = {name: jnp.asarray(rng.normal(0.2, 0.5, shape), F32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(0.5, 1, (48, 10)), F32)
    rules = RULES if recipe == "int4" else jq.recipes.w8a8_static()
    prepared = jq.prepare(dense, params, x, rules=rules)
    ranges = prepared.calibrate(params, [x[:24]], progress=False) if recipe == "static" else None
    qparams = prepared.convert(params, ranges)
    corrected, notes = ptq.correct_bias(prepared, params, qparams, [x[:16], x[16:]])
    assert [note.action for note in notes] == ["corrected in bias", "corrected in offset"]
    assert all(note.after < 1e-5 < note.before for note in notes)  # type: ignore[operator]
    # With codes of weights and activations, the mean of each result is that of floats.
    expected, before, after = (
        np.asarray(y, np.float64).mean(0)
        for y in (dense(params, x), prepared.apply(qparams, x), prepared.apply(corrected, x))
    )
    np.testing.assert_allclose(after, expected, rtol=0, atol=2e-6 * np.abs(dense(params, x)).max())
    assert np.abs(before - expected).max() > 100 * np.abs(after - expected).max()
    if recipe == "int4":
        w, q = ({name: np.asarray(v, np.float64) for name, v in p.items()} for p in (
            params,
            {name: v.dequantize() if isinstance(v, jq.QuantizedArray) else v for name, v in qparams.params.items()},
        ))  # fmt: skip
        shift = (np.asarray(x, np.float64) @ (w["first"] - q["first"]).T).mean(0)
        np.testing.assert_allclose(corrected.params["bias"] - params["bias"], shift, rtol=0, atol=1e-5)
        # The second one sees what comes from the corrected first one.
        h, h_q = (
            np.maximum(np.asarray(x, np.float64) @ p["first"].T + p["bias"] + s, 0) for p, s in ((w, 0), (q, shift))
        )
        shift = (h @ w["second"] - h_q @ q["second"]).mean(0, keepdims=True)
        np.testing.assert_allclose(corrected.params["offset"] - params["offset"], shift, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_measured_biases_of_many_layers(rng: np.random.Generator) -> None:
    """The biases of an oracle that corrects one layer after the other, although a pass corrects all of them."""
    size, depth = 16, 8
    params = {f"w{n}": jnp.asarray(rng.normal(size=(size, size)) / size**0.5, F32) for n in range(depth)}
    params |= {f"b{n}": jnp.asarray(rng.normal(0, 0.3, (1, size)), F32) for n in range(depth)}
    x = jnp.asarray(rng.normal(0.5, 1, (64, size)), F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for n in range(depth):
            x = x + jnp.tanh(x @ params[f"w{n}"] + params[f"b{n}"])
        return x

    prepared = jq.prepare(apply, params, x[:32], rules=RULES)
    qparams = prepared.convert(params)
    corrected, notes = ptq.correct_bias(prepared, params, qparams, [x[:32], x[32:]])
    z = y = np.asarray(x, np.float64)
    for n in range(depth):
        w, q, b = (
            np.asarray(v, np.float64) for v in (params[f"w{n}"], qparams.params[f"w{n}"].dequantize(), params[f"b{n}"])
        )
        outputs, codes = z @ w + b, y @ q + b
        shift = (outputs - codes).mean(0, keepdims=True)
        np.testing.assert_allclose(
            corrected.params[f"b{n}"] - params[f"b{n}"], shift, rtol=0, atol=0.01 * np.abs(shift).max()
        )
        z, y = z + np.tanh(outputs), y + np.tanh(codes + shift)
    assert all(note.after <= 1e-3 * note.before for note in notes)  # type: ignore[operator]


@pytest.mark.slow
def test_biases_that_belong_to_something_else_stay(rng: np.random.Generator) -> None:
    """One along the rows, in an array of the same length; one that two contractions share; and one of a reshape."""
    params = {name: jnp.asarray(rng.normal(size=(4, 4)), F32) for name in ("rows", "left", "right", "turned", "split")}
    params |= {name: jnp.asarray(rng.normal(size=4), F32) for name in ("a", "b", "c", "d")}
    x = jnp.asarray(rng.normal(1, 1, (4, 4)), F32)

    def apply(params: Any, x: jax.Array) -> Any:
        rows = x @ params["rows"] + params["a"][:, None]
        shared = (x @ params["left"] + params["b"][None]) * (x @ params["right"] + params["b"][None])
        turned = (x @ params["turned"]).reshape(2, 8)[:, :4] + params["c"][None]
        return rows, shared, turned, (x @ params["split"]).reshape(4, 2, 2) + params["d"].reshape(1, 2, 2)

    prepared = jq.prepare(apply, params, x, rules=RULES)
    qparams, stats = prepared.convert(params), ptq.collect(prepared, params, [x])
    analytic = ptq.correct_bias(prepared, params, qparams, stats, batch=x)
    measured = ptq.correct_bias(prepared, params, qparams, [x])
    for corrected, notes in (analytic, measured):
        for name in ("rows", "left", "right", "turned"):
            assert notes[name].reason == "its contraction has no bias of its own", name
        for name in "abc":
            np.testing.assert_array_equal(corrected.params[name], params[name])
        assert notes["split"].action == "corrected in d"
    np.testing.assert_allclose(analytic.tree.params["d"], measured.tree.params["d"], rtol=0, atol=1e-5)


def test_errors(block: Any) -> None:
    prepared, params, x, stats = block
    with pytest.raises(ValueError, match=r"jaxquant\.ptq\.smooth: method: expected 'smoothquant' or 'awq', got 'x'"):
        ptq.smooth(prepared, params, stats, x, method="x")
    with pytest.raises(TypeError, match=r"jaxquant\.ptq\.smooth: stats: expected a ptq.Statistics, got dict"):
        ptq.smooth(prepared, params, {}, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant\.ptq\.correct_bias: q: expected a QuantizedTree"):
        ptq.correct_bias(prepared, params, params, stats, batch=x)
    with pytest.raises(ValueError, match=r"jaxquant\.ptq\.correct_bias: batch: expected a batch with statistics, and"):
        ptq.correct_bias(prepared, params, prepared.convert(params), stats)
    with pytest.raises(TypeError, match=r"jaxquant\.ptq\.equalize: prepared: expected a Prepared, got int"):
        ptq.equalize(3, params, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [ptq.equalize, ptq.rotate])
def test_functions_without_floats_are_refused(function: Any) -> None:
    """Integers tell too little of what a factor changes."""
    params, x = {"w": jnp.eye(4), "v": jnp.eye(4)}, jnp.ones((2, 4))
    prepared = jq.prepare(lambda p, x: jnp.argmax(x @ p["w"] @ p["v"], -1), params, x, rules=RULES)
    with pytest.raises(ValueError, match=r"^jaxquant\.ptq\.\w+: prepared: expected a function that returns floats"):
        function(prepared, params, x)


@pytest.mark.slow
def test_codes_that_the_function_reads(rng: np.random.Generator) -> None:
    """A quantized array among the parameters is the function's own, and no pass changes it."""
    own = jq.quantize(jnp.asarray(rng.normal(size=(4, 4)), F32), jq.QuantSpec("int8", jq.PerAxis(1)))
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), F32), "b": jnp.zeros(4), "own": own}
    x = jnp.asarray(rng.normal(size=(32, 8)) + 1, F32)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jq.matmul(jax.nn.relu(x @ params["w"] + params["b"][None]), params["own"])

    prepared = jq.prepare(apply, params, x, rules=[jq.Rule(weight=jq.Weight("int4"))])
    qparams = prepared.convert(params)
    corrected, notes = ptq.correct_bias(prepared, params, qparams, [x])
    assert notes["w"].action == "corrected in b"
    tuned, notes = ptq.tune(prepared, params, corrected, [x], rounds=10, progress=False)
    assert notes["own"].reason == "codes that the function itself reads"
    assert notes["w"].action == "tuned"
    for changed in (corrected, tuned):
        jax.tree.map(np.testing.assert_array_equal, changed.params["own"], own)
