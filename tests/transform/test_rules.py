"""Rules and recipes: what matches, which rule wins, and which specs the parameters and activations get."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

F32 = np.float32
PARAMS = {
    "embed": jnp.linspace(-1, 1, 40, dtype=F32).reshape(10, 4),
    "layers": [{"kernel": jnp.linspace(-1, 1, 32, dtype=F32).reshape(4, 8)}, {"kernel": jnp.ones((8, 4))}],
    "conv": jnp.linspace(-1, 1, 3 * 4 * 6, dtype=F32).reshape(3, 4, 6),
}
TOKENS = jnp.array([[1, 2, 3, 4, 5]])
DENSE, CONV, TABLE = ("layers/0/kernel", "layers/1/kernel"), "conv", "embed"


def apply(params: Any, tokens: jax.Array) -> jax.Array:
    """Return a network with a lookup, two dots, the product of two activations, and a convolution."""
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = jax.nn.relu(x @ layer["kernel"])
    x = jnp.einsum("bij,bkj->bik", x, x) @ x
    return jax.lax.conv_general_dilated(x, params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def find_forms(rules: Any) -> dict[str, str]:
    return {row.name: row.form for row in jq.prepare(apply, PARAMS, TOKENS, rules=rules).coverage.rows}


W, A = jq.Weight("int8"), jq.Activation("int8")
ALL_FLOAT = dict.fromkeys([TABLE, *DENSE, CONV], "float")


@pytest.mark.parametrize(
    ("rule", "matched"),
    [
        (jq.Rule("layers/*", weight=W, activation=A), DENSE),
        (jq.Rule("layers/?/kernel", weight=W, activation=A), DENSE),
        (jq.Rule("*/1/*", weight=W, activation=A), DENSE[1:]),
        (jq.Rule(re.compile(r"\d/kernel$"), weight=W, activation=A), DENSE),
        (jq.Rule(re.compile("0"), weight=W, activation=A), DENSE[:1]),
        (jq.Rule(operation="conv_general_dilated", weight=W, activation=A), (CONV,)),
        (jq.Rule(where=lambda site: site.shapes[1] == (8, 4), weight=W, activation=A), DENSE[1:]),
        (jq.Rule(where=lambda site: "test_rules.py" in site.where, weight=W, activation=A), (TABLE, *DENSE, CONV)),
        (jq.Rule(where=lambda site: site.operation == "take", weight=W, activation=A), (TABLE,)),
    ],
)  # fmt: skip
def test_rule_matches(rule: jq.Rule, matched: tuple[str, ...]) -> None:
    forms = find_forms([rule])
    expected = {name: "lookup" if name == TABLE else "integer" for name in matched}
    assert {name: form for name, form in forms.items() if not name.startswith("dot_general")} == ALL_FLOAT | expected
    # The products of activations are not matched by rules for weights.
    assert {form for name, form in forms.items() if name.startswith("dot_general")} == {"float"}


def test_first_rule_wins() -> None:
    rules = [
        jq.Rule("layers/0/*", keep="float"), jq.Rule("layers/*", weight=jq.Weight("int4"), activation=A),
        jq.Rule(weight=W),
    ]  # fmt: skip
    forms = find_forms(rules)
    assert [forms[name] for name in DENSE] == ["float", "integer"]
    assert forms[CONV] == "weight-only"
    assert forms[TABLE] == "lookup"
    row = next(row for row in jq.prepare(apply, PARAMS, TOKENS, rules=rules).coverage.rows if row.name == DENSE[1])
    assert row.weight is not None
    assert row.weight.dtype == jnp.int4
    assert "a rule keeps it in floats" in {
        row.reason for row in jq.prepare(apply, PARAMS, TOKENS, rules=rules).coverage.floats
    }


@pytest.mark.slow
def test_activations_times_activations() -> None:
    rules = [jq.Rule(operands="activations", activation=jq.Activation("int8", per="row")), *jq.recipes.w8a8_dynamic()]
    prepared = jq.prepare(apply, PARAMS, TOKENS, rules=rules, strict=True)
    assert not prepared.coverage.floats
    both = [row for row in prepared.coverage.rows if row.name.startswith("dot_general")]
    assert [len(row.activations) for row in both] == [2, 2]
    y = jax.jit(prepared.apply)(prepared.convert(PARAMS), TOKENS)
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(PARAMS, TOKENS))
    reference = apply(PARAMS, TOKENS)
    assert np.abs(np.asarray(y - reference)).max() < 0.03 * np.abs(np.asarray(reference)).max()


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_coverage_has_the_granularity_of_the_rule_for_any_number_of_tokens(tokens: int) -> None:
    prepared = jq.prepare(apply, PARAMS, TOKENS[:, :tokens], rules=jq.recipes.w8a8_dynamic())
    row = next(row for row in prepared.coverage if row.name == DENSE[0])
    assert [spec.granularity for spec in row.activations] == [jq.PerAxis((0, 1))]
    assert "uint8 PerAxis(0, 1)" in str(prepared.coverage)
    static = jq.prepare(apply, PARAMS, TOKENS[:, :tokens], rules=jq.recipes.w8a8_static())
    row = next(row for row in static.coverage if row.name == DENSE[0])
    assert [spec.granularity for spec in row.activations] == [jq.PerTensor()]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("points", [{}, {"zero_point_granularity": jq.PerTensor()}], ids=str)
def test_the_coverage_has_the_zero_points_of_the_rule_for_any_number_of_tokens(tokens: int, points: Any) -> None:
    activation = jq.Activation("uint8", per="row", options=points)
    rules = [jq.Rule(weight=jq.Weight("int8"), activation=activation)]
    (row,) = jq.prepare(lambda w, x: x @ w, jnp.ones((8, 4)), jnp.ones((tokens, 8)), rules=rules).coverage
    (spec,) = row.activations
    assert spec == jq.QuantSpec("uint8", jq.PerAxis((0,)), **points)


DYNAMIC = {
    "fp8_dynamic": jq.recipes.fp8_dynamic(),
    "int8": [jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("int8"))],
    "int8 of a tensor": [jq.Rule(weight=jq.Weight("int8"), activation=jq.Activation("int8", per="tensor"))],
    "uint8": jq.recipes.w8a8_dynamic(),
    "mxfp8": jq.recipes.mxfp8(),
    "nvfp4": jq.recipes.nvfp4(),
}


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_a_single_token_has_the_result_that_it_has_among_others(recipe: str) -> None:
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))

    def multiply(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    one, many = (jq.prepare(multiply, w, rows, rules=DYNAMIC[recipe], strict=True) for rows in (x[:1], x[:5]))
    assert [row.activations for row in one.coverage] == [row.activations for row in many.coverage]
    assert all(spec.zero_point_granularity == spec.granularity for row in one.coverage for spec in row.activations)
    y = jax.jit(many.apply)(many.convert(w), jnp.tile(x[:1], (5, 1)))[:1]
    # Only sums of floats may be added in another order.
    tolerance = 0 if "int8" in recipe else 1e-5
    np.testing.assert_allclose(jax.jit(one.apply)(one.convert(w), x[:1]), y, rtol=0, atol=tolerance)


def test_an_unknown_recipe_names_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"jaxquant\.recipes: expected one of .*w8a8_dynamic, .*got 'w8a8'"):
        _ = jq.recipes.w8a8  # type: ignore[attr-defined]
    assert not hasattr(jq.recipes, "w8a8")


SPECS = {
    "weight_only_int8": ("int8 PerAxis(axis=1)", ""),
    "weight_only_int4": ("int4 Blocked(axis=0, size=16)", ""),
    "w8a8_dynamic": ("int8 PerAxis(axis=1)", "PerAxis(axis=(0, 1))"),
    "w8a8_static": ("int8 PerAxis(axis=1)", "uint8 PerTensor()"),
    "w4a8": ("int4 PerAxis(axis=1)", "PerAxis(axis=(0, 1))"),
    "weight_only_fp8": ("float8_e4m3fn PerAxis(axis=1)", ""),
    "fp8_dynamic": ("float8_e4m3fn PerAxis(axis=1)", "float8_e4m3fn PerAxis(axis=(0, 1))"),
    "gguf": ("int4 Blocked(axis=0, size=32)", ""),
    "gptq": ("uint4 Blocked(axis=0, size=128)", ""),
    "mxfp8": ("float8_e4m3fn Blocked(axis=0, size=32)", "float8_e4m3fn Blocked(axis=2, size=32)"),
    "nvfp4": ("float4_e2m1fn Blocked(axis=0, size=16)", ""),
    "mxfp4": ("float4_e2m1fn Blocked(axis=0, size=32)", ""),
    "onednn": ("int8 PerAxis(axis=1)", "uint8 PerTensor()"),
    "onnx_runtime": ("int8 PerAxis(axis=1)", "uint8 PerTensor()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPECS))
def test_recipe(name: str) -> None:
    rules = getattr(jq.recipes, name)()
    prepared = jq.prepare(apply, PARAMS, TOKENS, rules=rules, strict=True)
    row = next(row for row in prepared.coverage.rows if row.name == DENSE[0])
    weight, activation = SPECS[name]
    assert row.weight is not None
    assert f"{row.weight.dtype} {row.weight.granularity!r}" == weight
    (text,) = [f"{spec.dtype} {spec.granularity!r}" for spec in row.activations] or [""]
    assert text.endswith(activation)
    assert bool(text) == bool(activation)
    ranges = prepared.calibrate(PARAMS, [TOKENS])
    y = jax.jit(prepared.apply)(prepared.convert(PARAMS, ranges), TOKENS)
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(prepared.trainable(PARAMS, ranges), TOKENS))


def test_int4_weights_have_zero_points(rng: np.random.Generator) -> None:
    """The codes of a block end at its least and its largest weight, also where all of its weights are on one side of 0."""
    w = jnp.asarray(rng.uniform(0.2, 1, (64, 8)) * np.where(np.arange(64) < 32, 1, -1)[:, None], jnp.float32)
    x = jnp.ones((2, 64))
    prepared = jq.prepare(lambda w, x: x @ w, w, x, rules=jq.recipes.weight_only_int4(), strict=True)
    q = prepared.convert(w).params
    assert (q.codes.dtype, q.block_size, q.scale.dtype) == (jnp.int4, 16, jnp.float16)
    np.testing.assert_array_equal(q.zero_point.astype(jnp.int8), np.repeat([[-8], [-8], [7], [7]], 8, 1))
    # A scale that reaches from 0 to 1 in 15 steps, half of one of the 7 steps that a symmetric code has.
    assert float(jnp.max(jnp.abs(q.dequantize() - w))) <= 0.5 / 15 * 1.001
    assert float(jnp.max(q.scale)) <= 1.001 / 15


def test_recipes_are_all_tested() -> None:
    assert sorted(SPECS) == sorted(jq.recipes.__all__)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (jq.Weight("int8", per="tensor"), jq.QuantSpec("int8")),
        (jq.Weight("uint8"), jq.QuantSpec("uint8", jq.PerAxis(1))),
        (jq.Weight("int4", block=2), jq.QuantSpec("int4", jq.Blocked(0, 2))),
        (jq.Weight(jq.nf4), jq.QuantSpec(jq.nf4, jq.PerAxis(1))),
        (jq.Weight("int8", options={"scale_dtype": "bfloat16"}), jq.QuantSpec("int8", jq.PerAxis(1), scale_dtype="bfloat16")),
    ],
)  # fmt: skip
def test_weight_spec(weight: jq.Weight, expected: jq.QuantSpec) -> None:
    prepared = jq.prepare(apply, PARAMS, TOKENS, rules=[jq.Rule(DENSE[0], weight=weight)], strict=True)
    assert [row.weight for row in prepared.coverage.rows if row.name == DENSE[0]] == [expected]
    q = prepared.convert(PARAMS).params["layers"][0]["kernel"]
    reference = jq.quantize(PARAMS["layers"][0]["kernel"], expected)
    np.testing.assert_array_equal(q.codes, reference.codes)
    np.testing.assert_array_equal(q.scale, reference.scale)


def test_uses_share_one_scale_for_what_any_of_them_sums() -> None:
    def twice(params: Any, x: jax.Array) -> jax.Array:
        return (x @ params["w"]) @ params["w"].T

    params = {"w": jnp.linspace(-1, 1, 12, dtype=F32).reshape(3, 4)}
    prepared = jq.prepare(twice, params, jnp.ones((2, 3)), rules=jq.recipes.w8a8_dynamic(), strict=True)
    assert [row.name for row in prepared.coverage.rows] == ["w", "w#1"]
    assert prepared.coverage.rows[0].weight == jq.QuantSpec("int8")


def test_a_use_that_stays_in_floats_has_the_values_of_codes() -> None:
    def tied(params: Any, ids: jax.Array) -> jax.Array:
        return params["table"][ids] @ params["table"].T

    params, ids = {"table": jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(4, 3)}, jnp.arange(2)
    rules = (jq.Rule(operation="dot_general", keep="float"), *jq.recipes.w8a8_dynamic())
    prepared = jq.prepare(tied, params, ids, rules=rules, strict=True)
    (row,) = prepared.coverage.floats
    assert (
        row.reason == "a rule keeps it in floats; with the values of codes, because another use of table is quantized"
    )
    kept = jq.prepare(tied, params, ids, rules=[jq.Rule("table", keep="float")])
    assert {row.reason for row in kept.coverage.floats} == {"a rule keeps it in floats"}


@pytest.mark.slow
def test_shared_range_serves_any_number_of_uses() -> None:
    def unroll(params: Any, xs: jax.Array) -> jax.Array:
        h = jnp.zeros((xs.shape[1], 4))
        for x in xs:
            h = jnp.tanh(x + h @ params["w"])
        return h

    params, rng = {"w": jnp.linspace(-1, 1, 16, dtype=F32).reshape(4, 4)}, np.random.default_rng(1)
    xs = jnp.asarray(rng.normal(size=(6, 2, 4)).astype(F32))
    rule = jq.Rule(weight=W, activation=jq.Activation("int8", range=jq.Static(jq.calibration.absmax)), shared=True)
    prepared = jq.prepare(unroll, params, xs[:3], rules=[rule], strict=True)
    ranges = prepared.calibrate(params, [xs[:3]])
    assert list(ranges) == ["w"]
    y = jax.jit(prepared.apply)(prepared.convert(params, ranges), xs)
    np.testing.assert_array_equal(y, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), xs))
    apart = jq.prepare(unroll, params, xs[:3], rules=[dataclasses.replace(rule, shared=False)])
    ranges = apart.calibrate(params, [xs[:3]])
    assert list(ranges) == ["w", "w#1", "w#2"]
    with pytest.raises(ValueError, match=r"Rule\(shared=True\).* got no range for w#3, w#4, w#5$"):
        apart.apply(apart.convert(params, ranges), xs)


# Errors.

UNTYPED: Any = jq  # a type checker would refuse these arguments, too


def raise_static() -> jq.Activation:
    return jq.Activation("int8", per="row", range=jq.Static(jq.calibration.minmax))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: UNTYPED.Weight("int8", per="row"), ValueError, r"Weight: per: expected 'output' or 'tensor', got 'row'"),
        (lambda: UNTYPED.Weight("int8", block=0), ValueError, r"Weight: block: expected a positive int or None, got 0"),
        (lambda: UNTYPED.Weight("int8", block=2.5), TypeError, r"Weight: block: expected an int"),
        (lambda: UNTYPED.Weight("int7"), TypeError, r"jaxquant\.Weight: dtype: expected"),
        (lambda: UNTYPED.Activation("int7"), TypeError, r"jaxquant\.Activation: dtype: expected"),
        (lambda: UNTYPED.Weight("int8", options=[1]), TypeError, r"jaxquant\.Weight: options: expected a dict"),
        (lambda: UNTYPED.Weight("int8", options=1), TypeError, r"jaxquant\.Weight: options: expected a dict"),
        (lambda: UNTYPED.Weight("int8", options={"axis": 1}), ValueError, r"Weight: options: expected 'narrow_range' or .* got 'axis'"),
        (lambda: UNTYPED.Activation("int8", per="token"), ValueError, r"Activation: per: expected 'tensor' or 'row' or 'image'"),
        (raise_static, ValueError, r'Activation: per: expected "tensor", because a static range'),
        (lambda: UNTYPED.Activation("int8", range="minmax"), TypeError, r"range: expected Dynamic\(\), or Static\(calibrator\) .*, got 'minmax'"),
        (lambda: UNTYPED.Activation("int8", range=jq.calibration.minmax), TypeError, r"range: expected Dynamic\(\), or Static\(calibrator\)"),
        (lambda: UNTYPED.Activation("int8", range=None), TypeError, r"range: expected Dynamic\(\), .*, got None"),
        (lambda: UNTYPED.Activation("int8", range=jq.Learned()), TypeError, r"range: .*\(Prepared.trainable with an estimator trains"),
        (lambda: UNTYPED.Activation("int8", range=jq.Dynamic(jq.calibration.mse)), ValueError, r"range: expected no freeze_after"),
        (lambda: UNTYPED.Activation("int8", range=jq.Static(jq.calibration.minmax, freeze_after=2)), ValueError, r"range: expected no freeze_after"),
        (lambda: UNTYPED.Activation("int8", range=UNTYPED.Static(jq.calibration.percentile)), TypeError, r"functools.partial\(percentile, q=...\)"),
        (lambda: UNTYPED.Rule(3, weight=W), TypeError, r"Rule: path: expected a pattern, a compiled regular expression or None"),
        (lambda: UNTYPED.Rule(), ValueError, r"Rule: weight: expected a Weight, or keep="),
        (lambda: UNTYPED.Rule(weight="int8"), TypeError, r"Rule: weight: expected a Weight or None"),
        (lambda: UNTYPED.Rule(weight=W, keep="float"), ValueError, r"Rule: weight, activation: expected None"),
        (lambda: UNTYPED.Rule(keep="int"), ValueError, r"Rule: keep: expected 'float'"),
        (lambda: UNTYPED.Rule(weight=W, operation="matmul"), ValueError, r"Rule: operation: expected 'dot_general'"),
        (lambda: UNTYPED.Rule(weight=W, operands="both"), ValueError, r"Rule: operands: expected"),
        (lambda: UNTYPED.Rule(weight=W, operands="activations"), ValueError, r"expected an activation and no weight"),
        (lambda: UNTYPED.Rule(weight=W, where="dot"), TypeError, r"Rule: where: expected a function or None"),
        (lambda: UNTYPED.Rule(weight=W, shared="yes"), TypeError, r"Rule: shared: expected True or False"),
        (lambda: UNTYPED.Rule(weight=W, backward="int8"), TypeError, r"Rule: backward: expected FloatBackward\(\), Int8Backward\(\) or"),
        (lambda: UNTYPED.Rule(weight=W, backward=jq.Int8Backward()), ValueError, r"Rule: backward: .* needs two quantized operands"),
        (lambda: UNTYPED.Rule(keep="float", backward=jq.Int8Backward()), ValueError, r"Rule: backward: .* needs two quantized operands"),
        (lambda: UNTYPED.Rule(weight=W, activation=A, backward=jq.Float8Backward()), ValueError, r"Rule: backward: .* needs operands in float8 or float4"),
        (lambda: UNTYPED.Rule(weight=jq.Weight("int8", block=4), activation=A, backward=jq.Int8Backward()), ValueError, r"Rule: backward: expected FloatBackward\(\) with blocks"),
        (lambda: UNTYPED.Rule(weight=W, activation=A, backward=jq.Int8Backward(stochastic_rounding=True)), ValueError, r"Rule: backward: expected Int8Backward\(\) without stochastic_rounding"),
    ],
)  # fmt: skip
def test_rule_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_partials_with_equal_arguments_are_equal() -> None:
    first, second = (
        jq.Activation("int8", range=jq.Static(functools.partial(jq.calibration.percentile, q=99.9))) for _ in range(2)
    )
    assert first == second
