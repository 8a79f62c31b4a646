"""What `prepare` and the functions of a prepared function refuse, and that the text names the contraction."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxquant as jq
from jaxquant.calibration import Range
from jaxquant.transform import LearnedScales

X = jnp.ones((2, 4))
PARAMS = {"w": jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(4, 3), "v": jnp.ones((3, 3))}
RULES = jq.recipes.w8a8_static()
PLACE = r"\(dot_general at .*test_prepare_errors\.py:\d+.*\)"
ONE = jnp.ones((1, 1))
NO_ENDS: Any = (None, None)
NO_RANGE = Range(*NO_ENDS)
UNTYPED: Any = jq  # a type checker would refuse some arguments, too


def apply(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] @ params["v"]


def low_rank(params: Any, x: jax.Array) -> jax.Array:
    return x @ (params["w"] + params["a"] @ params["b"])


LOW_RANK = {"w": jnp.ones((4, 3)), "a": jnp.ones((4, 1)), "b": jnp.ones((1, 3))}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: UNTYPED.prepare("f", PARAMS, X, rules=RULES), TypeError, r"prepare: function: expected a function"),
        (lambda: UNTYPED.prepare(linen.Dense(3), PARAMS, X, rules=RULES), TypeError, r"function, such as the module's `apply`, got a module \(Dense\)"),
        (lambda: UNTYPED.prepare(apply, PARAMS, X, rules=RULES[0]), TypeError, r"prepare: rules: expected a sequence of Rules"),
        (lambda: UNTYPED.prepare(apply, PARAMS, X, rules=["int8"]), TypeError, r"prepare: rules: expected a sequence of Rules"),
        (lambda: UNTYPED.prepare(apply, PARAMS, X, rules=RULES, strict="yes"), TypeError, r"prepare: strict: expected True"),
        (lambda: jq.prepare(lambda p, x: x, {"n": 3}, X, rules=RULES), TypeError, r"params: expected a pytree with arrays of float32"),
        (
            lambda: jq.prepare(apply, PARAMS, X, rules=[jq.Rule("*/kernel", keep="float")]), ValueError,
            r"prepare: rules: expected paths that match a contraction, got '\*/kernel', which matches none of v, w$",
        ),
        (
            lambda: jq.prepare(apply, PARAMS, X, rules=[*RULES, jq.Rule("w", keep="float")]), ValueError,
            r"prepare: rules: expected each rule before those that match .*, got 'w' after rules that match w$",
        ),
        (
            lambda: jq.prepare(low_rank, LOW_RANK, X, rules=RULES, strict=True), ValueError,
            r"rules: expected codes .* got floats for .*a\+b\+w \(dot_general at .*test_prepare_errors\.py",
        ),
        (
            lambda: jq.prepare(lambda p, x: x @ p["w"] if x.sum() > 0 else x, PARAMS, X, rules=RULES),
            jax.errors.TracerBoolConversionError, r"shape bool|traced",
        ),
        (
            lambda: jq.prepare(
                apply, {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4))}, X,
                rules=[jq.Rule(weight=jq.Weight(jq.nf4), activation=jq.Activation("int8"))],
            ),
            (TypeError, ValueError), r"^w \(dot_general at .*test_prepare_errors\.py",
        ),
    ],
)  # fmt: skip
def test_prepare_refuses(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_untraceable_function_gets_advice() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jq.prepare(lambda p, x: x @ p["w"] if x.sum() > 0 else x, PARAMS, X, rules=RULES)
    assert any("jaxquant traces the function" in note for note in caught.value.__notes__)


def test_arrays_that_numpy_reads_get_advice() -> None:
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        jq.prepare(lambda p, x: x @ p["w"] * np.asarray(x).sum(), PARAMS, X, rules=RULES)
    assert any("jaxquant traces the function" in note for note in caught.value.__notes__)


def test_dtypes_of_parameters_that_cannot_be_quantized_are_named() -> None:
    with pytest.raises(TypeError, match=r"params: expected .* of float32, bfloat16 or float16, got w of float64"):
        jq.prepare(lambda p, x: x @ p["w"], {"w": np.ones((4, 3))}, X, rules=RULES)


PREPARED: Any = jq.prepare(apply, PARAMS, X, rules=RULES)
RANGES = PREPARED.calibrate(PARAMS, [X])
CONVERTED = PREPARED.convert(PARAMS, RANGES)
CODES = CONVERTED.params
TRAINABLE = PREPARED.trainable(PARAMS, RANGES, estimator=jq.LSQ())
SCALES: Any = TRAINABLE.scales
MIXED_SCALES = LearnedScales({"u": SCALES.weights["w"], "v": SCALES.weights["v"]}, SCALES.activations, SCALES.estimator)
MIXED = TRAINABLE.replace(scales=MIXED_SCALES)
WITHOUT_WEIGHTS = LearnedScales({}, SCALES.activations, SCALES.estimator)
DYNAMIC = jq.prepare(apply, PARAMS, X, rules=jq.recipes.w8a8_dynamic())
FOUR_BITS = jq.prepare(apply, PARAMS, X, rules=jq.recipes.w4a8())
WEIGHT_ONLY = jq.prepare(apply, PARAMS, X, rules=jq.recipes.weight_only_int8())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: PREPARED.apply(PARAMS, X), TypeError, r"apply: q: expected a QuantizedTree, as Prepared.convert\(params, ranges\) .*, got a dict"),
        (lambda: PREPARED.apply(CODES, RANGES, X), TypeError, r"apply: q: expected a QuantizedTree"),
        (lambda: PREPARED.apply({"params": CODES, "ranges": RANGES}, X), TypeError, r"apply: q: .* or QuantizedTree\(\*\*tree\) of a loaded tree"),
        (lambda: PREPARED.apply(TRAINABLE, X), TypeError, r"apply: q: expected .*, got a TrainableTree, as for fake_apply"),
        (lambda: PREPARED.apply(CONVERTED, RANGES, X), ValueError, r"apply: args: expected .* q holds the ranges, .*: prepared.apply\(q, x\), got ranges"),
        (lambda: PREPARED.apply(CONVERTED, SCALES, X), ValueError, r"apply: args: expected .* q holds the ranges"),
        (lambda: PREPARED.apply(CONVERTED.replace(params=PARAMS), X), ValueError, r"apply: q.params: expected a quantized array at w.*got floats"),
        (lambda: PREPARED.apply(CONVERTED.replace(params=FOUR_BITS.convert(PARAMS).params), X), ValueError, r"apply: q.params: .* got int4 codes for"),
        (lambda: PREPARED.apply(jq.QuantizedTree(CODES), X), ValueError, r"q.ranges: expected a range for each of the 2 .* got none for v, w"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges={"w": RANGES["w"]}), X), ValueError, r"got none for v$"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges={**RANGES, "v": X}), X), TypeError, r"apply: q.ranges: expected {'0': Range\(lo, hi\)} of float arrays at v"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges=X), X), TypeError, r"apply: q.ranges: expected ranges as Prepared.calibrate returns them"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges=PREPARED.init()), X), TypeError, r"apply: q.ranges: expected {'0': Range\(lo, hi\)} of float arrays at w"),
        (lambda: PREPARED.apply(CONVERTED.replace(params={**CODES, "u": X}), X), ValueError, r"apply: params: expected .* got with u$"),
        (lambda: PREPARED.apply(CONVERTED.replace(params={"w": CODES["w"]}), X), ValueError, r"apply: params: expected .* got without v$"),
        (lambda: PREPARED.apply(CONVERTED.replace(params={**CODES, "v": CODES["w"]}), X), ValueError, r"apply: params: expected the shape \(3, 3\) at v"),
        (lambda: PREPARED.fake_apply(CONVERTED, X), TypeError, r"fake_apply: t: expected .*, got a QuantizedTree, as for apply"),
        (lambda: DYNAMIC.fake_apply(DYNAMIC.convert(PARAMS), X), TypeError, r"fake_apply: t: expected parameters in floats, got a QuantizedTree"),
        (lambda: PREPARED.fake_apply(PARAMS, X), TypeError, r"fake_apply: t: expected prepared.trainable\(params, ranges\), because the ranges of w, v are"),
        (lambda: PREPARED.fake_apply(PARAMS, RANGES, X), TypeError, r"fake_apply: t: expected prepared.trainable\(params, ranges\)"),
        (lambda: PREPARED.fake_apply(TRAINABLE, RANGES, X), ValueError, r"fake_apply: args: expected .* t holds the ranges"),
        (lambda: PREPARED.fake_apply(TRAINABLE.replace(params=CODES), X), ValueError, r"fake_apply: params: expected floats at w"),
        (lambda: PREPARED.fake_apply(TRAINABLE.replace(scales=RANGES), X), TypeError, r"fake_apply: t.scales: expected the scales of the tree"),
        (lambda: PREPARED.fake_apply(MIXED, X), ValueError, r"fake_apply: t.scales: expected .*, got others at u, w$"),
        (lambda: PREPARED.convert(PARAMS), ValueError, r"convert: ranges: expected a range for each of the 2 .*, as Prepared.calibrate returns them, got none for v, w"),
        (lambda: DYNAMIC.convert(PARAMS, RANGES), ValueError, r"convert: ranges: expected None, because no activation has a static range, got ranges of w, v"),
        (lambda: PREPARED.convert(CONVERTED, RANGES), TypeError, r"convert: params: expected the parameters .* in floats, got a QuantizedTree"),
        (lambda: PREPARED.convert(CONVERTED), TypeError, r"convert: params: expected the parameters .* got a QuantizedTree"),
        (lambda: PREPARED.convert(RANGES, PARAMS), ValueError, r"convert: params: expected the arrays of the parameters that prepare saw, got"),
        (lambda: PREPARED.trainable(TRAINABLE), TypeError, r"trainable: params: expected .* such as t.params, got a TrainableTree"),
        (lambda: PREPARED.convert(PARAMS, {**RANGES, "v": {"0": NO_RANGE}}), TypeError, r"convert: ranges: expected {'0': Range\(lo, hi\)} of float arrays at v"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges={**RANGES, "v": {"0": NO_RANGE}}), X), TypeError, r"apply: q.ranges: .* of float arrays at v"),
        (lambda: PREPARED.convert(PARAMS, {**RANGES, "v": {"0": Range(ONE, -ONE)}}), ValueError, r"convert: ranges: expected Range\(lo, hi\) with lo at most hi at v"),
        (lambda: PREPARED.trainable(PARAMS, {**RANGES, "v": {"0": Range(ONE * jnp.nan, ONE)}}), ValueError, r"trainable: ranges: expected finite numbers at v"),
        (lambda: PREPARED.fake_apply(TRAINABLE.replace(scales={"weights": {}}), X), TypeError, r"t.scales: .* load a saved tree with like=, got a dict$"),
        (lambda: PREPARED.convert(PARAMS, SCALES), TypeError, r"convert: ranges: expected ranges as .*, got a LearnedScales$"),
        (lambda: PREPARED.convert(CODES, RANGES), ValueError, r"convert: params: expected floats at w, got a quantized array"),
        (lambda: PREPARED.convert({"w": X}, RANGES), ValueError, r"convert: params: expected .*, got without v$"),
        (lambda: PREPARED.convert(PARAMS, {**RANGES, "u": RANGES["v"]}), ValueError, r"convert: ranges: expected ranges of this prepared .*, got others at u$"),
        (lambda: PREPARED.trainable(PARAMS, {**RANGES, "u": RANGES["v"]}), ValueError, r"trainable: ranges: .* got others at u$"),
        (lambda: PREPARED.apply(CONVERTED.replace(ranges={**RANGES, "u": RANGES["v"]}), X), ValueError, r"apply: q.ranges: .* got others at u$"),
        (lambda: PREPARED.convert(PARAMS, {**RANGES, "v": {**RANGES["v"], "1": RANGES["v"]["0"]}}), ValueError, r"convert: ranges: .* got others at v/1$"),
        (lambda: DYNAMIC.apply(CONVERTED, X), ValueError, r"apply: q.ranges: expected .*, in which no other activation is static, got others at v, w$"),
        (lambda: DYNAMIC.fake_apply(PREPARED.trainable(PARAMS, RANGES), X), ValueError, r"fake_apply: t.scales: .* got others at v, w$"),
        (lambda: WEIGHT_ONLY.fake_apply(TRAINABLE, X), ValueError, r"fake_apply: t.scales: .* got others at v, w$"),
        (lambda: WEIGHT_ONLY.convert(TRAINABLE), ValueError, r"convert: t.scales: .* got others at v, w$"),
        (lambda: PREPARED.convert(TRAINABLE.replace(scales=WITHOUT_WEIGHTS)), ValueError, r"convert: t.scales: .* weights .*, got others at v, w$"),
        (lambda: PREPARED.convert(PARAMS, "ranges"), TypeError, r"convert: ranges: expected ranges as Prepared.calibrate returns them"),
        (lambda: PREPARED.convert(TRAINABLE, RANGES), ValueError, r"convert: ranges: expected None with a TrainableTree, .*, got a dict"),
        (lambda: PREPARED.convert(MIXED), ValueError, r"convert: t.scales: expected .*, got others at u, w$"),
        (lambda: PREPARED.convert({**PARAMS, "w": X[None]}, RANGES), ValueError, r"convert: params: expected the shape \(4, 3\) at w"),
        (lambda: jax.jit(lambda p: PREPARED.convert(p, RANGES, delete=True))(PARAMS), ValueError, r"delete: expected False inside of jax.jit"),
        (lambda: PREPARED.convert(PARAMS, RANGES, delete="yes"), TypeError, r"convert: delete: expected True or False"),
        (lambda: PREPARED.check({**PARAMS, "w": X[None]}, X), ValueError, r"check: params: expected the shape \(4, 3\) at w"),
        (lambda: PREPARED.check(TRAINABLE, X), TypeError, r"check: params: expected .* in floats, such as t.params, got a TrainableTree"),
        (lambda: PREPARED.calibrate(TRAINABLE, [X]), TypeError, r"calibrate: params: expected .* such as t.params"),
        (lambda: PREPARED.observe(PREPARED.init(), CODES, X), ValueError, r"observe: params: expected floats at w"),
        (lambda: PREPARED.observe({}, PARAMS, X), ValueError, r"observe: state: expected states of the 2 .* got without v, w"),
        (lambda: PREPARED.merge(PREPARED.init(), {}), ValueError, r"merge: state: .* got without v, w"),
        (lambda: PREPARED.finalize(PREPARED.init()), ValueError, rf"^w {PLACE}: jaxquant.Prepared.finalize: .* got no data"),
        (lambda: PREPARED.calibrate(PARAMS, [jnp.zeros((2, 4))]), ValueError, rf"^w {PLACE}: jaxquant.Prepared.calibrate: .* only zeros"),
        (lambda: PREPARED.trainable(PARAMS), ValueError, r"trainable: ranges: expected a range for each"),
        (lambda: PREPARED.trainable(PARAMS, RANGES, estimator=jq.StraightThrough()), TypeError, r"trainable: estimator: expected LSQ"),
        (lambda: PREPARED.trainable(CODES, RANGES), ValueError, r"trainable: params: expected floats at w"),
        (lambda: PREPARED.check({"w": PARAMS["w"]}, X), ValueError, r"check: params: expected .*, got without v$"),
        (lambda: PREPARED.calibrate(PARAMS, X), TypeError, r"calibrate: batches: expected an iterable of batches"),
    ],
)  # fmt: skip
def test_prepared_refuses(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_errors_of_a_contraction_name_it() -> None:
    """An error inside of a rewritten contraction says which contraction it is, and where it is in the source."""
    ranges = {**RANGES, "v": {"0": (np.ones((3, 3), np.float32), np.ones((3, 3), np.float32))}}
    with pytest.raises(ValueError, match=rf"^v {PLACE}: jaxquant\."):
        PREPARED.apply(CONVERTED.replace(ranges=ranges), X)


@pytest.mark.parametrize(
    "call", [lambda: DYNAMIC.apply(DYNAMIC.convert(PARAMS), None, X), lambda: DYNAMIC.fake_apply(PARAMS, {}, X)]
)
def test_an_argument_for_ranges_gets_advice(call: Any) -> None:
    """There is none: the tree holds the ranges. The function itself complains about the number of its arguments."""
    with pytest.raises(TypeError) as caught:
        call()
    assert any(
        re.search(r"Prepared\.\w+: [qt] holds the ranges, .* here (None|\{\}) is in front", note)
        for note in caught.value.__notes__
    )


def test_a_branch_never_taken_has_no_range() -> None:
    def choose(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, lambda: x @ params["w"], lambda: -x @ (params["w"] * 1.0) @ params["v"])

    prepared = jq.prepare(choose, PARAMS, X, rules=RULES)
    with pytest.raises(ValueError, match=rf"^v {PLACE}: jaxquant.Prepared.calibrate: .* got no data"):
        prepared.calibrate(PARAMS, [X])


def test_strict_holds_for_later_calls() -> None:
    def grow(params: Any, x: jax.Array, *, scaled: bool = False) -> jax.Array:
        return x @ (params["w"] * 2 if scaled else params["w"])

    prepared = jq.prepare(grow, {"w": PARAMS["w"]}, X, rules=jq.recipes.w8a8_dynamic(), strict=True)
    with pytest.raises(ValueError, match=r"apply: rules: expected codes for each contraction .* mul at"):
        prepared.apply(prepared.convert({"w": PARAMS["w"]}), X, scaled=True)


@pytest.mark.slow
def test_arguments_that_need_other_specs_are_refused() -> None:
    def turn(params: Any, x: jax.Array, *, turned: bool = False) -> jax.Array:
        return x @ (params["v"].T if turned else params["v"])

    params = {"v": PARAMS["v"]}
    prepared = jq.prepare(turn, params, jnp.ones((2, 3)), rules=jq.recipes.w8a8_dynamic())
    with pytest.raises(
        ValueError, match=r"args: expected arguments at which v is quantized as at the arguments of prepare"
    ):
        prepared.apply(prepared.convert(params), jnp.ones((2, 3)), turned=True)


@pytest.mark.parametrize("options", [{"offset": True}, {"scale_spec": jq.QuantSpec("uint8")}], ids=["offset", "nested"])
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_forms_that_integers_do_not_take_are_refused_early(options: dict[str, Any], per: str) -> None:
    """What cannot be contracted as codes is refused where it is prepared, and not where it is applied."""
    dtype = "uint4" if "offset" in options else "int4"
    w, x = jnp.linspace(-1, 1, 48).reshape(16, 3), jnp.ones((2, 16))
    rule = jq.Rule(weight=jq.Weight(dtype, options=options), activation=jq.Activation("int8", per=per))
    try:
        prepared = jq.prepare(lambda w, x: x @ w, w, x, rules=[rule])
    except ValueError as error:
        assert re.search(r"^params \(dot_general .*\): jaxquant\.prepare: rhs\.(offset|scale): expected ", str(error))  # noqa: PT017
    else:
        assert np.isfinite(prepared.apply(prepared.convert(w), x)).all()
