"""reduce_range: codes of 7 bits in specs, quantization, training and measures, and in the rules of `prepare`."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime.quantization.quant_utils as quantizer
import pytest

import jaxquant as jq
from jaxquant import ptq

INT8 = jq.QuantSpec(jnp.int8, jq.PerAxis(1), reduce_range=True)


def test_the_ranges_are_those_of_onnx_runtimes_quantizer():
    for dtype, kind in ((jnp.int8, 3), (jnp.uint8, 2)):
        for symmetric in (False, True) if dtype == jnp.int8 else (False,):
            low, high = quantizer.get_qmin_qmax_for_qType(kind, reduce_range=True, symmetric=symmetric)
            spec = jq.QuantSpec(dtype, symmetric=symmetric, reduce_range=True)
            assert spec.bounds == (int(low), int(high))


def test_a_symmetric_uint8_is_centered_at_64():
    spec = jq.QuantSpec(jnp.uint8, symmetric=True, reduce_range=True)
    assert (spec.bounds, spec.fixed_zero_point) == ((1, 127), 64)
    q = jq.quantize(jnp.array([-2.0, 0.0, 2.0]), spec)
    np.testing.assert_array_equal(q.codes, [1, 64, 127])


def test_only_codes_of_8_bits_have_a_reduced_range():
    for dtype in (jnp.int4, jnp.int16, jnp.float8_e4m3fn, jq.nf4):
        with pytest.raises(ValueError, match="QuantSpec: reduce_range: expected False, because only codes of 8 bits"):
            jq.QuantSpec(dtype, reduce_range=True)
    with pytest.raises(TypeError, match="QuantSpec: reduce_range: expected True or False"):
        jq.QuantSpec(jnp.int8, reduce_range="yes")  # type: ignore[arg-type]


def test_the_repr_and_equality_tell_the_range():
    assert repr(INT8).endswith("reduce_range=True)")
    assert jq.QuantSpec(jnp.int8, jq.PerAxis(1)) != INT8
    assert hash(INT8) == hash(jq.QuantSpec("int8", jq.PerAxis(1), reduce_range=True))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes_are_those_of_the_formula(dtype, symmetric, rng):
    spec = jq.QuantSpec(dtype, symmetric=symmetric, reduce_range=True)
    low, high = spec.bounds
    x = np.append(rng.normal(0, 3, 500), [np.inf, -np.inf]).astype(np.float32)
    lo, hi = np.float32(-2.5), np.float32(3.25)
    codes = {}
    for name, call in {"eager": jq.quantize, "jit": jax.jit(jq.quantize, static_argnums=1)}.items():
        q = call(jnp.asarray(x), spec, (lo, hi))
        point = 0 if q.zero_point is None else q.zero_point.item()
        exact = np.clip(np.rint(x / np.asarray(q.scale)), low - point, high - point) + point
        np.testing.assert_array_equal(np.asarray(q.codes, np.int64), exact)
        assert np.ravel(q.codes).min() == low
        assert np.ravel(q.codes).max() == high
        codes[name] = np.asarray(q.codes)
    np.testing.assert_array_equal(codes["eager"], codes["jit"])


def test_training_computes_the_same_values(rng):
    w = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    np.testing.assert_array_equal(jq.fake_quantize(w, INT8), jq.quantize(w, INT8).dequantize())
    gradient = jax.grad(lambda w: jq.fake_quantize(w, INT8).sum())(w)
    np.testing.assert_array_equal(gradient, np.ones_like(w))


def test_saturated_elements_are_counted_at_the_ends_of_the_reduced_range():
    x = jnp.array([-9.0, -1.0, 0.5, 1.0, 7.0])
    q = jq.quantize(x, jq.QuantSpec(jnp.int8, reduce_range=True), range=(-1.0, 1.0))
    assert float(jq.quantization_error(x, q).saturated) == pytest.approx(0.4)
    q = jq.quantize(x, jq.QuantSpec(jnp.uint8, reduce_range=True), range=(-1.0, 1.0))
    assert float(jq.quantization_error(x, q).saturated) == pytest.approx(0.4)


def make_network(rng):
    params = {"first": rng.normal(size=(16, 8)), "second": rng.normal(size=(8, 4))}
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
    return (
        (lambda p, x: jax.nn.relu(x @ p["first"]) @ p["second"]),
        params,
        jnp.asarray(rng.normal(size=(5, 16)), jnp.float32),
    )


RECIPES = {
    "static": jq.recipes.w8a8_static,
    "dynamic": jq.recipes.w8a8_dynamic,
    "onnx_runtime": jq.recipes.onnx_runtime,
}


@pytest.mark.parametrize(("name", "reduce_range"), [*itertools.product(RECIPES, [True, False])])
def test_recipes_make_weights_that_cannot_saturate_and_the_coverage_says_so(name, reduce_range, rng):
    function, params, x = make_network(rng)
    prepared = jq.prepare(function, params, x, rules=RECIPES[name](reduce_range=reduce_range))
    rows = prepared.coverage.saturating
    assert len(rows) == (0 if reduce_range else 2)
    assert ("can saturate in ONNX Runtime on x86-64 without VNNI" in str(prepared.coverage)) != reduce_range
    assert {row["can_saturate"] for row in prepared.coverage.to_dict().values()} == {not reduce_range}
    ranges = prepared.calibrate(params, [x]) if prepared.static_ranges else {}
    converted = prepared.convert(params, ranges)
    counts = [int(jq.count_saturating_pairs(q)) for q in converted.params.values()]
    assert (sum(counts) == 0) == reduce_range


def test_the_recipe_for_onnx_runtime_cannot_saturate_by_default(rng):
    function, params, x = make_network(rng)
    assert not jq.prepare(function, params, x, rules=jq.recipes.onnx_runtime()).coverage.saturating


def test_products_of_other_dtypes_cannot_saturate(rng):
    function, params, x = make_network(rng)
    for rules in (
        jq.recipes.weight_only_int8(),
        jq.recipes.w4a8(),
        (jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("int8")),),
    ):
        assert not jq.prepare(function, params, x, rules=rules).coverage.saturating


def test_bits_are_allocated_to_weights_of_a_reduced_range(rng):
    function, params, x = make_network(rng)
    prepared = jq.prepare(function, params, x, rules=jq.recipes.w8a8_static(reduce_range=True))
    plan = ptq.allocate_bits(prepared, params, [x], dtypes=("int8", "int4"), most_damage=0.02)
    assert set(plan.choices.values()) <= {"int8", "int4", "float"}
    coverage = jq.prepare(function, params, x, rules=plan.rules).coverage
    for row in coverage:
        weight: Any = row.weight
        assert weight.reduce_range == (weight.dtype == jnp.int8)


def test_saturated_elements_of_symmetric_unsigned_codes_are_counted_on_both_sides():
    """Their lowest code is 1, and only elements above the range were counted."""
    x = jnp.array([-3.0, -1.0, 0.0, 0.5, 1.0, 3.0])
    q = jq.quantize(x, jq.QuantSpec(jnp.uint8, symmetric=True, reduce_range=True), range=(-1.0, 1.0))
    assert (int(q.codes.min()), int(q.codes.max())) == (1, 127)
    assert float(jq.quantization_error(x, q).saturated) == np.float32(2 / 6)


def test_entropy_has_the_levels_of_the_reduced_range():
    """A symmetric range of 7 bits was chosen for the 128 levels of 8 bits."""
    with pytest.raises(ValueError, match=r"entropy: bins: .* because there are 64 levels"):
        jq.calibration.entropy(jq.QuantSpec(jnp.int8, reduce_range=True), bins=128)
