"""Parameters that a program moves, and values that only look like the same parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxquant as jq

from ..support.contraction_crawler import count_contractions, count_rows
from ..support.prepared import RECIPES, differentiate, find_sqnr, same_trees

DYNAMIC, STATIC = RECIPES["w8a8_dynamic"], RECIPES["w8a8_static"]
IMAGES = ("NHWC", "HWIO", "NHWC")


def _sample(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0, 0.25, shape), jnp.float32)


# Loops that pass on a parameter of the same shape with its elements at other places.


def _swap_halves(params: Any, x: jax.Array) -> jax.Array:
    first, second = params["w"][:16], params["w"][16:]
    return lax.scan(lambda c, _: ((c[0] @ c[1], c[2], c[1]), None), (x, first, second), length=3)[0][0]


def _flip_in_scan(params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: ((c[0] @ c[1], c[1][::-1]), None), (x, params["w"][:16]), length=3)[0][0]


def _flip_in_while(params: Any, x: jax.Array) -> jax.Array:
    def step(state: Any) -> Any:
        left, x, w = state
        return left - 1, x @ w, jax.jit(lambda w: w[:, ::-1])(w)

    return lax.while_loop(lambda state: state[0] > 0, step, (3, x, params["w"][:16]))[1]


def test_a_loop_that_moves_a_carried_parameter_stays_in_floats(rng: np.random.Generator) -> None:
    params, x = {"w": _sample(rng, 32, 16)}, _sample(rng, 4, 16)

    def function(params: Any, x: jax.Array) -> Any:
        return [f(params, x) for f in (_swap_halves, _flip_in_scan, _flip_in_while)]

    prepared = jq.prepare(function, params, x, rules=DYNAMIC)
    rows = prepared.coverage.rows
    assert [row.name for row in rows] == ["w", "w#1", "w#2"]
    assert [row.reason.split(" at ")[0] for row in rows] == ["scan", "scan", "while"]
    got, want = jax.jit(lambda *a: (prepared.apply(prepared.convert(params), *a), function(params, *a)))(x)
    assert find_sqnr(got, want) > 100


def test_a_loop_may_pass_on_a_parameter_through_calls(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> Any:
        step = jax.jit(lambda x, w: (jnp.tanh(x @ w), checkpoint_name(w, "w")))
        return lax.scan(lambda c, _: (step(*c), None), (x, params["w"]), length=3)[0][0]

    params, x = {"w": _sample(rng, 16, 16)}, _sample(rng, 4, 16)
    assert jq.prepare(function, params, x, rules=DYNAMIC, strict=True).coverage.summary == "1 integer"


# Operations through which parameters are followed.


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=IMAGES)


def _move(params: Any, x: jax.Array, images: jax.Array) -> Any:
    w, x = lax.optimization_barrier((params["w"], x))
    first, second = params["pair"]  # unstacked
    third, fourth = (part.T for part in jnp.unstack(params["pair"], axis=1)[:2])
    joined = jnp.einsum("bi,eio->beo", x, jnp.stack([params["w"], params["pair"][0]]))
    # JAX vectorizes a convolution by a reshape that also transposes, and a cond by a select of equal parameters.
    filters = jax.vmap(lambda w: _convolve(images, w))(params["filters"])
    both = jax.vmap(_convolve)(jnp.stack([images, images]), params["filters"])
    chosen = jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r @ params["w"], lambda r: r @ params["w"].T, r))(x)
    layers = jax.tree.map(lambda *ws: jnp.stack(ws), *params["layers"])

    def apply_layer(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ layer["w"].T + layer["b"][None]), None

    scanned = lax.scan(apply_layer, x, layers)[0]
    grouped = lax.scan(lambda x, w: (x @ w, None), x, jnp.concatenate([params["pair"], params["pair"]]))[0]
    return [
        x @ checkpoint_name(w, "w"), x @ first @ second, x @ third + x @ fourth, joined, filters, both, chosen, scanned,
        grouped,
    ]  # fmt: skip


@pytest.mark.slow
def test_parameters_are_followed(fixed_rng: np.random.Generator) -> None:
    layers = [{"w": _sample(fixed_rng, 16, 16), "b": _sample(fixed_rng, 16)} for _ in range(3)]
    params = {
        "w": _sample(fixed_rng, 16, 16),
        "pair": _sample(fixed_rng, 2, 16, 16),
        "filters": _sample(fixed_rng, 2, 3, 3, 4, 8),
    }
    params, inputs = {**params, "layers": layers}, (4 * _sample(fixed_rng, 4, 16), _sample(fixed_rng, 2, 5, 5, 4))
    prepared = jq.prepare(_move, params, *inputs, rules=STATIC, strict=True)
    assert count_rows(prepared.coverage) == count_contractions(_move, params, *inputs)
    assert not prepared.coverage.floats
    assert "layers/0/w+layers/1/w+layers/2/w" in prepared.static_ranges

    @jax.jit
    def run(params: Any, *inputs: Any) -> Any:
        ranges = prepared.finalize(prepared.observe(prepared.init(), params, *inputs))
        return ranges, prepared.apply(prepared.convert(params, ranges), *inputs)

    ranges, got = run(params, *inputs)
    assert ranges["layers/0/w+layers/1/w+layers/2/w"]["0"].lo.shape == (3, 1, 1)
    fake, gradients = differentiate(
        lambda params, *xs: prepared.fake_apply(prepared.trainable(params, ranges), *xs), params, *inputs
    )
    want, float_gradients = differentiate(_move, params, *inputs)
    same_trees(got, fake)
    assert find_sqnr(got, want) > 25
    assert find_sqnr(gradients, float_gradients) > 15


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["weight_only_int4", "w4a8"])
@pytest.mark.sample(1)
def test_stacked_layers_with_other_recipes(recipe: str, rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))[0]

    params, x = [_sample(rng, 16, 16) for _ in range(3)], _sample(rng, 4, 16)
    prepared = jq.prepare(function, params, x, rules=RECIPES[recipe], strict=True)
    got = jax.jit(prepared.apply)(prepared.convert(params), x)
    same_trees(got, jax.jit(prepared.fake_apply)(params, x))


def test_weights_that_activations_select_are_named(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> jax.Array:
        w = jnp.where(x[0, 0] > 0, params["a"], params["b"])
        token = jnp.where(x[:, :1] > 0, params["b"][:1], params["a"][:1])
        return x @ w.T + token @ params["a"]

    params, x = {"a": _sample(rng, 16, 16), "b": _sample(rng, 16, 16)}, _sample(rng, 4, 16)
    prepared = jq.prepare(function, params, x, rules=DYNAMIC)
    rows = prepared.coverage.rows
    # Tokens that are selected are activations, which a weight multiplies.
    assert [(row.name, row.form) for row in rows] == [("a+b", "float"), ("a", "integer")]
    assert "selected by activations at" in rows[0].reason
    assert "test_moved_parameters.py" in rows[0].reason
    with pytest.raises(ValueError, match=r"a\+b .*selected by activations"):
        jq.prepare(function, params, x, rules=DYNAMIC, strict=True)


def test_symbolic_repetitions_of_a_parameter_can_be_exported(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> jax.Array:
        tokens = jnp.tile(params["tokens"], (x.shape[0], 1, 1)).reshape(-1, 16)
        return (tokens + x[:1]) @ params["w"]

    params, x = {"tokens": _sample(rng, 1, 2, 16), "w": _sample(rng, 16, 8)}, _sample(rng, 3, 16)
    prepared = jq.prepare(function, params, x, rules=DYNAMIC)
    qparams = prepared.convert(params)
    (batch,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    exported = jax.export.export(jax.jit(prepared.apply))(qparams, shape)
    assert exported.out_avals[0].shape == (2 * batch, 8)


# Ranges that all uses of a parameter share.

MINMAX = jq.Activation("uint8", range=jq.Static(jq.calibration.minmax))
SHARED = [jq.Rule(weight=jq.Weight("int8"), activation=MINMAX, shared=True)]


@pytest.mark.slow
def test_bodies_share_a_range(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array, *, unrolled: bool) -> jax.Array:
        def layer(x: jax.Array) -> jax.Array:
            return jnp.tanh(2 * (x @ params["w"]))

        x = layer(x)
        if unrolled:
            return layer(layer(layer(layer(x))))
        x = lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]
        x = lax.cond(x.sum() < 1e9, layer, lambda x: x, x)
        return jax.checkpoint(layer)(x)

    params, x = {"w": _sample(rng, 16, 16)}, _sample(rng, 4, 16)
    results = []
    for unrolled in (False, True):
        prepared = jq.prepare(function, params, x, rules=SHARED, strict=True, unrolled=unrolled)
        state = prepared.observe(prepared.init(), params, x, unrolled=unrolled)
        ranges = prepared.finalize(state)
        assert list(ranges) == ["w"]
        apply = jax.jit(lambda q, x, p=prepared, u=unrolled: p.apply(q, x, unrolled=u))
        results.append(apply(prepared.convert(params, ranges), x))
        assert find_sqnr(results[-1], function(params, x, unrolled=True)) > 25
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_range_is_shared_by_layers_and_by_a_use_outside_of_their_scan(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> jax.Array:
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]
        return x @ params["w"][0].T

    params, x = {"w": _sample(rng, 3, 16, 16)}, 4 * _sample(rng, 4, 16)
    prepared = jq.prepare(function, params, x, rules=SHARED, strict=True)
    ranges = prepared.finalize(prepared.observe(prepared.init(), params, x))
    np.testing.assert_array_equal(ranges["w"]["0"].hi, x.max(keepdims=True))
    got = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    same_trees(got, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x))


@pytest.mark.slow
def test_a_shared_range_has_one_rank(rng: np.random.Generator) -> None:
    def function(params: Any, x: jax.Array) -> Any:
        return x @ params["w"], x[0] @ params["w"]

    with pytest.raises(ValueError, match=r"prepare: rules: expected operands of the same rank in all uses of w"):
        jq.prepare(function, {"w": _sample(rng, 16, 16)}, _sample(rng, 4, 16), rules=SHARED)


def test_a_parameter_is_put_on_a_device_by_itself(rng: np.random.Generator) -> None:
    """Trees go to a device in one equation, whose parameters stay in floats; so do those with a sharding."""
    params, x = {"a": _sample(rng, 16, 16), "b": _sample(rng, 16, 16)}, _sample(rng, 4, 16)
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for place, several, summary in (
        (None, False, "2 integer"), (device, False, "2 integer"), (device, True, "2 float"),
        (sharding, False, "2 float"),
    ):  # fmt: skip

        def function(params: Any, x: jax.Array, place: Any = place, several: bool = several) -> jax.Array:
            pair = (params["a"], params["b"])
            a, b = jax.device_put(pair, place) if several else [jax.device_put(w, place) for w in pair]
            return jnp.tanh(x @ a) @ b.T

        prepared = jq.prepare(function, params, x, rules=DYNAMIC)
        assert prepared.coverage.summary == summary
        got = jax.jit(prepared.apply)(prepared.convert(params), x)
        assert find_sqnr(got, function(params, x)) > 25


# The output projection of an attention, and other sums over the parts of an axis that the function splits.
SPLITS = {
    "heads": ((64, 5), lambda w, x: jnp.einsum("nab,abc->nc", x.reshape(3, 4, 16), w.reshape(4, 16, 5))),
    "three parts": ((64, 4), lambda w, x: jnp.einsum("nabd,abdc->nc", x.reshape(3, 2, 2, 16), w.reshape(2, 2, 16, 4))),
    "turned": ((64, 5), lambda w, x: jnp.einsum("nba,abc->nc", x.reshape(3, 16, 4), w.reshape(4, 16, 5))),
    "outputs too": ((64, 10), lambda w, x: jnp.einsum("nab,abcd->ncd", x.reshape(3, 4, 16), w.reshape(4, 16, 2, 5))),
    "transposed": ((5, 64), lambda w, x: jnp.einsum("nab,cab->nc", x.reshape(3, 4, 16), w.reshape(5, 4, 16))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("recipe", ["w8a8_dynamic", "w4a8", "fp8_dynamic", "mxfp8", "nvfp4", "weight_only_int4"])
@pytest.mark.parametrize("name", SPLITS)
def test_an_axis_that_is_split_may_be_summed_as_a_whole(name, recipe, rng):
    shape, function = SPLITS[name]
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, (3, 64)))
    prepared = jq.prepare(function, w, x, rules=getattr(jq.recipes, recipe)())
    assert prepared.coverage.summary in ("1 integer", "1 small-float", "1 weight-only")
    y = jax.jit(prepared.apply)(prepared.convert(w), x)
    np.testing.assert_array_equal(jax.jit(prepared.fake_apply)(w, x), y)
    expected = function(w, x)
    most = 0.4 if "4" in recipe else 0.1
    assert jnp.linalg.norm(y - expected) < most * jnp.linalg.norm(expected)


@pytest.mark.parametrize("recipe", ["weight_only_int8", "w8a8_dynamic"])
@pytest.mark.parametrize("dtype", ["int8", "uint4", "int3"])
def test_given_codes_may_have_blocks_along_two_axes(dtype, recipe, rng):
    w = jnp.asarray(rng.normal(size=(2, 24, 64)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32)
    q = jq.quantize(w, jq.QuantSpec(dtype, jq.Blocked((1, 2), (4, 5)), symmetric=dtype != "uint4"))

    def function(w, x):
        return jnp.einsum("nj,aij->ani", x, w)

    prepared = jq.prepare(function, q, x, rules=getattr(jq.recipes, recipe)())
    y = jax.jit(prepared.apply)(prepared.convert(q), x)
    expected = np.einsum("nj,aij->ani", np.asarray(x, np.float64), np.asarray(q.dequantize(), np.float64))
    most = 1e-6 if prepared.coverage.summary == "1 weight-only" else 0.02
    assert np.linalg.norm(y - expected) < most * np.linalg.norm(expected)


def test_why_a_function_got_codes():
    """The error is the function's own, and a note says what it got."""
    q = jq.quantize(jnp.ones((8, 4)), jq.QuantSpec("int8", jq.PerAxis(0)))  # a scale for each index that is summed
    with pytest.raises(TypeError, match="einsum requires ndarray") as caught:
        jq.prepare(
            lambda p, x: jnp.einsum("ni,ij->nj", x, p["w"]), {"w": q}, jnp.ones((2, 8)), rules=jq.recipes.w8a8_dynamic()
        )
    assert any("The function got codes as they are: w. jaxquant passes floats" in n for n in caught.value.__notes__)
