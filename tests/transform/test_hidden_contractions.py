"""Contractions in equations that are not entered are listed; inlined calls keep their shardings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant as jq

from ..support.contraction_crawler import count_contractions, count_rows
from ..support.prepared import RECIPES, find_sqnr, same_trees

W = np.random.default_rng(0).normal(0, 0.25, (16, 16)).astype(np.float32)
PARAMS, X = {"w": jnp.asarray(W + W.T)}, jnp.ones((4, 16))


def _make_mesh(count, axis_type=jax.sharding.AxisType.Auto):
    return jax.make_mesh((count,), ("d",), devices=jax.devices()[:count], axis_types=(axis_type,))


def _in_shard_map(params, x):
    mesh = _make_mesh(2)
    return jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(params["w"], x)


def _in_linear_solve(params, x):
    w = params["w"]
    return lax.custom_linear_solve(lambda v: w @ v, x[0], lambda matvec, b: matvec(b) + w.T @ b, symmetric=True)


@jax.custom_batching.custom_vmap
def _multiply(w, x):
    return x @ w


@_multiply.def_vmap
def _multiply_batch(axis_size, in_batched, w, x):
    return 2 * (x @ w), True  # another result, so that the rule can be told from the function


def _in_custom_vmap(params, x):
    return _multiply(params["w"], x)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (_in_shard_map, "shard_map"),
        (_in_linear_solve, "custom_linear_solve"),
        (_in_custom_vmap, "custom_vmap_call, which is not entered, to keep its rule for vmap"),
    ],
)
def test_contractions_that_are_not_entered_are_rows(function, primitive):
    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"])
    assert count_rows(prepared.coverage) == count_contractions(function, PARAMS, X)
    rows = prepared.coverage.rows
    assert rows
    assert all(f"inside of {primitive}" in row.reason and "which is not entered" in row.reason for row in rows)
    assert all("w" in row.paths for row in rows)
    with pytest.raises(ValueError, match=f"inside of {primitive}"):
        jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"], strict=True)
    actual = jax.jit(prepared.apply)(prepared.convert(PARAMS), X)
    np.testing.assert_allclose(actual, jax.jit(function)(PARAMS, X), rtol=1e-5, atol=1e-5)


def _attend_to_cache(params, x, cache):
    q = (x @ params["w"]).reshape(2, -1, 2, 8)
    return jq.attention(q, cache.append(q, q)).reshape(x.shape) @ params["w"].T


@pytest.mark.parametrize("length", [8, 4096])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_products_of_attention_are_integers(dtype, length):
    spec = jq.QuantSpec(dtype, jq.PerToken())
    cache = jq.KVCache.create((2, length, 2, 8), spec, spec)
    x = jnp.ones((2, 3, 16))
    prepared = jq.prepare(_attend_to_cache, PARAMS, x, cache, rules=RECIPES["w8a8_dynamic"], strict=True)
    products = [row for row in prepared.coverage if row.name.startswith("dot_general@attention")]
    assert len(products) >= 2
    assert {(row.form, row.reason, row.is_replaced) for row in products} == {("integer", "integers already", False)}
    assert prepared.coverage.summary == f"{len(products) + 2} integer"
    assert not prepared.coverage.floats
    # A report measures what got codes, and these had them.
    report = jq.report.compare(prepared, PARAMS, prepared.convert(PARAMS), [(x, cache)])
    assert all((row.output_sqnr is None) == row.name.startswith("dot_general") for row in report.rows)


def test_products_of_integers_stay_as_they_are():
    def multiply(params, x, codes):
        return x @ params["w"], codes @ codes.T

    codes = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    prepared = jq.prepare(multiply, PARAMS, X, codes, rules=RECIPES["w8a8_dynamic"], strict=True)
    rows = [(row.form, row.reason, row.weight is None, row.activations) for row in prepared.coverage]
    assert rows[1] == ("integer", "integers already", True, ())
    np.testing.assert_array_equal(prepared.apply(prepared.convert(PARAMS), X, codes)[1], codes @ codes.T)


@pytest.mark.parametrize("spec", [jq.QuantSpec("int8", jq.PerAxis(1)), jq.QuantSpec("int4", jq.Blocked(0, 32))])
@pytest.mark.parametrize(("size", "rows"), [(32, 4), (2048, 32), (2048, 1)])
def test_a_product_of_floats_and_codes_is_one_row(spec, size, rows, rng):
    codes = jq.quantize(jnp.asarray(rng.normal(size=(size, 16)), jnp.float32), spec)
    x = jnp.asarray(rng.normal(size=(rows, size)), jnp.float32)

    def multiply(params, x, codes):
        return jq.matmul(x, codes) @ params["w"]

    # Whether the codes are an argument, or closed over.
    for function, arguments in ((multiply, (x, codes)), (lambda params, x: multiply(params, x, codes), (x,))):
        prepared = jq.prepare(function, PARAMS, *arguments, rules=RECIPES["w8a8_dynamic"], strict=True)
        product, layer = prepared.coverage.rows
        assert product.name == "dot_general@jaxquant.weight_only"
        assert product.shapes == ((rows, size), (size, 16))
        assert (product.form, product.reason, product.is_wanted) == ("weight-only", "codes already", False)
        assert (layer.name, layer.form) == ("w", "integer")
        actual = jax.jit(prepared.apply)(prepared.convert(PARAMS), *arguments)
        assert find_sqnr(actual, jax.jit(function)(PARAMS, *arguments)) > 30


def test_a_product_with_a_parameter_that_the_function_quantizes_is_one_row():
    spec = jq.QuantSpec("int8", jq.PerAxis(1))
    prepared = jq.prepare(
        lambda params, x: jq.matmul(x, jq.quantize(params["w"], spec)), PARAMS, X, rules=RECIPES["w8a8_dynamic"],
        strict=True,
    )  # fmt: skip
    assert [(row.name, row.form, row.reason) for row in prepared.coverage] == [("w", "weight-only", "codes already")]


def test_rules_for_vmap():
    """Outside of the prepared function, the rule is used; inside of it, its contractions run on codes."""
    prepared = jq.prepare(_in_custom_vmap, PARAMS, X, rules=RECIPES["w8a8_dynamic"])
    xs = jnp.stack([X, 2 * X])
    actual = jax.vmap(lambda x: prepared.apply(prepared.convert(PARAMS), x))(xs)
    np.testing.assert_allclose(actual, 2 * xs @ PARAMS["w"], rtol=1e-5, atol=1e-5)
    inside = jq.prepare(
        lambda params, xs: jax.vmap(lambda x: _in_custom_vmap(params, x))(xs), PARAMS, xs,
        rules=RECIPES["w8a8_dynamic"], strict=True,
    )  # fmt: skip
    assert inside.coverage.summary == "1 integer"


def test_a_composite_is_entered():
    def multiply(w, x, *, axis):
        return jax.nn.relu(lax.dot_general(x, w, (((1,), (axis,)), ((), ()))))

    def function(params, x):
        y = lax.composite(multiply, "test.multiply")(params["w"], x, axis=0)
        return lax.composite(lax.neg, "test.negate")(y)

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"], strict=True)
    assert prepared.coverage.summary == "1 integer"
    plain = jq.prepare(
        lambda params, x: lax.neg(multiply(params["w"], x, axis=0)), PARAMS, X, rules=RECIPES["w8a8_dynamic"]
    )
    converted = prepared.convert(PARAMS)
    actual = jax.jit(prepared.apply)(converted, X)
    same_trees(actual, jax.jit(plain.apply)(converted, X))
    same_trees(actual, jax.jit(prepared.fake_apply)(PARAMS, X))
    # A composite without a contraction stays one.
    assert str(jax.make_jaxpr(prepared.apply)(converted, X)).count("test.negate") == 1


def test_branches_of_other_platforms_are_not_compiled():
    """`jax.lax.switch` in place of `platform_dependent` would compile the kernel, which XLA:CPU cannot."""

    def run_kernel(w, x):
        def kernel(w_ref, x_ref, y_ref):
            y_ref[...] = x_ref[...] @ w_ref[...]

        return pallas.pallas_call(kernel, jax.ShapeDtypeStruct((4, 16), jnp.float32))(w, x)

    def function(params, x):
        return lax.platform_dependent(params["w"], x, cpu=lambda w, x: x @ w, default=run_kernel)

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_static"])
    assert [row.form for row in prepared.coverage.rows] == ["integer", "float"]
    ranges = prepared.calibrate(PARAMS, [X])
    actual = jax.jit(prepared.apply)(prepared.convert(PARAMS, ranges), X)
    same_trees(actual, jax.jit(prepared.fake_apply)(prepared.trainable(PARAMS, ranges), X))
    assert find_sqnr(actual, X @ PARAMS["w"]) > 25


@pytest.mark.slow
def test_an_inlined_jit_keeps_its_shardings():
    mesh = _make_mesh(2)
    split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    inner = jax.jit(lambda w, x: x @ w, in_shardings=(whole, split), out_shardings=split)

    def function(params, x):
        return inner(params["w"], x)

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"], strict=True)
    actual = jax.jit(prepared.apply)(prepared.convert(PARAMS), X)
    assert actual.sharding.is_equivalent_to(split, 2)
    same_trees(actual, jax.jit(prepared.fake_apply)(PARAMS, X))
    gradient = jax.jit(jax.grad(lambda params: prepared.fake_apply(params, X).sum()))(PARAMS)["w"]
    assert np.isfinite(gradient).all()


def test_vmap_of_an_inlined_jit_with_shardings():
    split = NamedSharding(_make_mesh(2), P("d"))
    inner = jax.jit(lambda x: jax.nn.relu(x @ W), in_shardings=split)

    def function(params, x):
        return inner(x @ params["w"])

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"])
    qparams = prepared.convert(PARAMS)
    actual = jax.jit(jax.vmap(lambda x: prepared.apply(qparams, x)))(jnp.stack([X, 2 * X]))
    assert actual.shape == (2, 4, 16)


def test_parameters_of_integers_are_named():
    params = {"codes": jnp.ones((16, 8), jnp.int8), "w": jnp.ones((16, 16))}

    def function(params, x):
        return x @ params["w"] @ params["codes"].astype(jnp.float32)

    prepared = jq.prepare(function, params, X, rules=RECIPES["w8a8_dynamic"])
    (row,) = prepared.coverage.floats
    assert row.paths == ("codes",)
    assert row.reason == "codes has dtype int8"


def test_lookups_of_jax_functions_have_the_place_of_their_call():
    prepared = jq.prepare(
        lambda params, ids: jnp.take(params["w"], ids, axis=0), PARAMS, jnp.array([1]), rules=RECIPES["w8a8_dynamic"]
    )
    assert "test_hidden_contractions.py:" in prepared.coverage.rows[0].where


def test_unused_contractions_have_names_of_their_own():
    def function(params, x):
        _ = x @ params["w"]
        _ = x @ params["w"].T
        return x @ params["w"]

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"])
    assert [row.name for row in prepared.coverage.rows] == ["w (unused)", "w (unused)#1", "w"]


@pytest.mark.slow
def test_callbacks_run_once():
    calls = []

    def function(params, x):
        jax.debug.callback(lambda y: calls.append(y), x.sum())
        return x @ params["w"]

    prepared = jq.prepare(function, PARAMS, X, rules=RECIPES["w8a8_dynamic"])
    assert not calls
    jax.block_until_ready(jax.jit(prepared.apply)(prepared.convert(PARAMS), X))
    jax.effects_barrier()
    assert len(calls) == 1
