"""Every public function refuses what it cannot take by an error of ours, which describes what the caller gave."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant._core import dtypes, entry_point, recording

from ..cases import public_calls
from ..cases.public_calls import CODES, DOT, Call, X, ones, quantized

CALLS = {call.name: call for call in public_calls.calls()}
ENDLESS = 10**400  # beyond float64
BAD: dict[str, Any] = {
    "list": [1.0],
    "text": "x",
    "object": object(),
    "dict": {"a": 1},
    "complex number": 1j,
    "int without end": ENDLESS,
    "int that cannot be printed": 10**5000,
    "array of text": np.array(["a"]),
    "array of objects": np.array([1.0, object()]),
    "array of dates": np.array(["2020-01-01"], "datetime64[D]"),
    "array of records": np.zeros(2, [("a", "f4")]),
    "raw bytes": np.void(b"ab"),
    "complex array of numpy's": np.ones((4, 6), np.complex64),
    "array of bools": np.ones((4, 6), bool),
    "shape": jax.ShapeDtypeStruct((4, 6), np.float32),
}


def refused(prefix: str, call: Callable[[], Any]) -> str:
    """Requires one of our errors that begins with the function's name and speaks of nothing traced; returns it."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    text = str(raised.value)
    assert isinstance(raised.value, AssertionError), text  # as ours are, and JAX's and numpy's are not
    assert text.startswith(f"jaxquant.{prefix}"), text
    assert re.match(r"jaxquant\.[\w.]+: [^:]+: expected ", text), text
    assert "traced" not in text.partition(", got ")[2], text
    return text


def prefix(call: Call) -> str:
    return "fake_quantize" if call.name == "Quantizer" else call.name


def masked(value: Any) -> Any:
    return np.ma.masked_array(value, np.zeros(np.shape(value), bool))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", list(CALLS))
def test_what_is_no_array_is_refused_by_name(name: str) -> None:
    call = CALLS[name]
    keys = {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 3)}
    arrays = {"complex array": jnp.ones((4, 6), jnp.complex64)}
    for argument in (*call.operands, *call.parts):
        good = call.arguments[argument]
        spoilers = {**BAD, **keys, **arrays}
        if not isinstance(good, jq.QuantizedArray):
            spoilers["masked array"] = masked(good)
        for value in spoilers.values():
            text = refused(prefix(call), lambda a=argument, v=value: call.spoiled(**{a: v}))
            assert re.sub("^(operands|inputs|range)_", r"\1[", argument) in text.replace("]", "")


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("ops.")])
def test_an_exporter_sees_the_same_errors(name: str) -> None:
    """Marked operations, whose arithmetic is not traced then, check dtypes and shapes, too."""
    call = CALLS[name]
    for argument in (*call.operands, *call.parts):
        good = call.arguments[argument]
        spoilers = [jnp.ones(np.shape(good), jnp.float16), jnp.ones((*np.shape(good), 3), np.asarray(good).dtype)]
        for value in spoilers:
            with recording.record():
                exported = error_of(lambda a=argument, v=value: jax.make_jaxpr(lambda x: call.spoiled(**{a: x}))(v))
            plain = error_of(lambda a=argument, v=value: jax.make_jaxpr(lambda x: call.spoiled(**{a: x}))(v))
            assert exported == plain, (argument, value.shape)


def error_of(call: Callable[[], Any]) -> str | None:
    """Return the text of the error of a call, or None."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.dtypes])
def test_what_is_no_dtype_is_refused_by_name(name: str) -> None:
    call = CALLS[name]
    for argument in call.dtypes:
        for value in ("nonsense", object(), [1], {"a": 1}, 3):
            start = "QuantizedArray" if name.startswith("QuantizedArray") else prefix(call)
            text = refused(start, lambda a=argument, v=value: call.spoiled(**{a: v}))
            assert re.search(f"{argument}: expected (dtype|a static, hashable value)", text)


WITH_PRECISION = ("matmul", "dot_general", "einsum", "conv_general_dilated", "quantized_dot_general",
                  "quantized_einsum", "quantized_conv_general_dilated")  # fmt: skip


@pytest.mark.parametrize("name", WITH_PRECISION)
def test_what_is_no_precision_is_refused_between_integers_too(name: str) -> None:
    call = CALLS[name]
    for value in ("nonsense", 3, object(), jnp.float32, ("highest", "nonsense"), ("highest",), ["highest"] * 2):
        refused(f"{name}: precision", lambda v=value: call.spoiled(precision=v))
    highest = jax.lax.Precision.HIGHEST
    good: list[Any] = [None, highest, "highest", "tensorfloat32", (highest, highest), ("default", "high")]
    if "conv" in name:
        refused(f"{name}: precision", lambda: call.spoiled(precision=jax.lax.DotAlgorithmPreset.F32_F32_F32))
    else:
        good += [jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"]
    for value in good:
        jax.eval_shape(lambda v=value: call.spoiled(precision=v))


def test_every_public_function_is_here() -> None:
    """All that takes arrays, but for layers, attention, lists, trees and files, whose tests are their own."""
    elsewhere = {"save_codes", "concatenate", "prepare"}
    elsewhere |= {"attention", "quantized_dot_product_attention", "count_saturating_pairs"}
    known = {name.partition(".")[0] for name in CALLS} | elsewhere
    functions = {n for n in jq.__all__ if callable(f := getattr(jq, n)) and not isinstance(f, type)}
    assert functions - {"dynamic_dequantize", "nf4"} <= known
    for module in (jq.onednn, jq.integer, jq.ops, jq.codes):
        for n in module.__all__:
            own = f"{module.__name__.partition('.')[2]}.{n}"
            assert isinstance(getattr(module, n), type) or own in CALLS or n in jq.__all__


def test_a_mask_is_refused_by_a_compiled_program_too() -> None:
    """JAX looks at the type of an argument when it compiles, and takes a masked array for its data afterwards."""
    x = np.ones(3, np.float32)
    jq.quantize_linear(x, 0.5)
    assert "a masked array of float32[3]" in refused("quantize_linear: x", lambda: jq.quantize_linear(masked(x), 0.5))


FLOATS = [np.ones(shape, np.float32) for shape in ((4,), (4, 6), (6, 5), (2, 4, 6), (2, 4, 7, 9), (6, 4, 3, 3))]
ROW, WIDE, TALL, STACK, IMAGES, KERNEL = FLOATS


@pytest.mark.parametrize(
    ("name", "call", "shapes"),
    [
        ("matmul", lambda: jq.matmul(ROW, ROW), ("[4]", "[4]")),
        ("matmul", lambda: jq.matmul(STACK, TALL), ("[2, 4, 6]", "[6, 5]")),
        ("dot_general", lambda: jq.dot_general(WIDE, TALL, DOT), ("[4, 6]", "[6, 5]")),
        ("einsum", lambda: jq.einsum("...i,...i->...", ROW, ROW), ("[4]", "[4]")),
        ("einsum", lambda: jq.einsum("i,i,i", ROW, ROW, ROW), ("[4]", "[4]")),
        ("conv_general_dilated", lambda: jq.conv_general_dilated(IMAGES, KERNEL, (1, 1), "VALID"),
         ("[2, 4, 7, 9]", "[6, 4, 3, 3]")),
    ],
)  # fmt: skip
def test_float_operands_are_described_as_they_were_given(name: str, call: Any, shapes: tuple[str, str]) -> None:
    text = refused(name, call)
    got = text.partition(", got ")[2]
    assert re.findall(r"an array of float32(\[[\d, ]*\])", got)[:2] == list(shapes), got


def per_index(*shape: int, axis: int) -> jq.QuantizedArray:
    scale = np.full([n if a == axis else 1 for a, n in enumerate(shape)], 0.5, np.float32)
    return jq.QuantizedArray(np.ones(shape, np.int8), scale)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jq.matmul(per_index(4, 6, axis=1), quantized(np.int8, 2, 6, 5)), "lhs: .*contracted dimension 1,"),
        (lambda: jq.matmul(quantized(np.int8, 4, 6), per_index(1, 6, 5, axis=1)), "rhs: .*contracted dimension 1,"),
        (lambda: jq.matmul(per_index(6, axis=0), quantized(np.int8, 2, 6, 5)), "lhs: .*contracted dimension 0,"),
        (lambda: jq.einsum("...ij,...jk->...ik", quantized(np.int8, 2, 4, 6), per_index(1, 6, 5, axis=1)),
         "rhs: .*contracted dimension 1,"),
        (lambda: jq.matmul(quantized(np.int8, 4, 6), per_index(2, 1, 5, axis=2)), "rhs: .*6 rows.*(2, 1, 5)"),
    ],
)  # fmt: skip
def test_dimensions_are_those_of_the_operands_as_they_were_given(call: Any, words: str) -> None:
    text = refused("", call)
    assert re.search(words, text), text


SPEC = jq.QuantSpec(jnp.int8)
UINT4 = jq.QuantSpec(jnp.uint4)
TAKES_SCALE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fake_quantize": ("fake_quantize: scale", lambda s: jq.fake_quantize(X, SPEC, s)),
    "Quantizer": ("fake_quantize: scale", lambda s: jq.Quantizer(SPEC, s)(X)),
    "fake_quantize_linear": ("fake_quantize_linear: scale", lambda s: jq.fake_quantize_linear(X, s)),
    "quantized_dot_general": (
        "quantized_dot_general: lhs_spec.scale",
        lambda s: jq.quantized_dot_general(X, TALL, DOT, lhs_spec=jq.Quantizer(SPEC, s), rhs_spec=None),
    ),
    "quantized_einsum": (
        r"quantized_einsum: specs[1].scale",
        lambda s: jq.quantized_einsum("ij,jk", X, TALL, specs=(SPEC, jq.Quantizer(SPEC, s))),
    ),
    "quantized_conv_general_dilated": (
        "quantized_conv_general_dilated: rhs_spec.scale",
        lambda s: jq.quantized_conv_general_dilated(
            IMAGES, KERNEL, (1, 1), "VALID", lhs_spec=None, rhs_spec=jq.Quantizer(SPEC, s)
        ),
    ),
    "from_onnx": ("from_onnx: x_scale", lambda s: jq.from_onnx(CODES, s)),
}


@pytest.mark.parametrize("name", list(TAKES_SCALE))
def test_a_known_scale_is_finite_and_positive(name: str) -> None:
    start, call = TAKES_SCALE[name]
    numbers = (0.0, -0.5, float("nan"), float("inf"))
    kinds: list[Any] = [float, np.float32, jnp.float32, np.float16, jnp.bfloat16]
    scales: list[Any] = [kind(n) for n in numbers for kind in kinds]
    scales += [0, -1, jnp.float8_e8m0fnu(np.nan)] if name != "fake_quantize_linear" else [0, -1]
    for scale in scales:
        text = refused(f"{start}: expected finite positive numbers", lambda s=scale: call(s))
        assert re.search(r"got (0|-0.5|-1|nan|inf)", text)
    jax.eval_shape(call, jnp.float32(0))  # traced, it cannot be looked at


def test_one_bad_scale_among_good_ones_is_found() -> None:
    scale = np.full((4, 1), 0.5, np.float32)
    scale[2] = -0.25
    text = refused("fake_quantize: scale", lambda: jq.fake_quantize(X, SPEC, jnp.asarray(scale)))
    assert text.endswith("got -0.25")
    x = np.ones((1, entry_point._MOST_ELEMENTS + 1), np.float32)
    jax.eval_shape(lambda: jq.fake_quantize_linear(x, 0 * x[0]))  # too long to be looked at


def test_arrays_of_quantize_keep_what_it_documents() -> None:
    """A NaN in the data is a scale of NaN, which shows in every result; 0 and less no data give."""
    for scale, fits in ((np.nan, True), (np.inf, True), (0.0, False), (-1.0, False)):
        q = jq.QuantizedArray(CODES, np.full((1, 1), scale, np.float32))
        if fits:
            jax.eval_shape(lambda q=q: q.dequantize())
        else:
            refused("QuantizedArray.dequantize: self.scale: expected positive numbers", q.dequantize)


def test_the_operators_compute_with_any_scale() -> None:
    """As ONNX Runtime does: a quotient of infinity or NaN saturates."""
    x = jnp.array([-1.0, 0.0, 1.0])
    got = [jq.quantize_linear(x, np.float32(s), np.int8(0)).tolist() for s in (0, -1, np.nan, np.inf)]
    assert got == [[-128, -128, 127], [1, 0, -1], [-128] * 3, [0] * 3]
    for s in (0.0, -1.0, np.nan):
        y = jq.dequantize_linear(jnp.array([-1, 0, 1], jnp.int8), np.float32(s))
        np.testing.assert_array_equal(y, np.array([-1, 0, 1], np.float32) * np.float32(s))


TAKES_POINT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fake_quantize": ("fake_quantize: zero_point", lambda z: jq.fake_quantize(X, UINT4, 0.5, z)),
    "Quantizer": ("fake_quantize: zero_point", lambda z: jq.Quantizer(UINT4, 0.5, z)(X)),
    "fake_quantize_linear": (
        "fake_quantize_linear: zero_point",
        lambda z: jq.fake_quantize_linear(X, 0.5, z, dtype=jnp.uint4),
    ),
    "quantized_dot_general": (
        "quantized_dot_general: lhs_spec.zero_point",
        lambda z: jq.quantized_dot_general(X, TALL, DOT, lhs_spec=jq.Quantizer(UINT4, 0.5, z), rhs_spec=SPEC),
    ),
}


@pytest.mark.parametrize("name", list(TAKES_POINT))
def test_a_known_float_zero_point_rounds_to_a_code(name: str) -> None:
    start, call = TAKES_POINT[name]
    for point in (-3.0, -0.51, 15.5, 99.0, float("nan"), float("inf")):
        for kind in (float, np.float32, jnp.float32):
            wanted = rf"{start}: expected numbers that round to a code in \[0, 15\]"
            assert re.search(wanted, refused(start, lambda p=point, k=kind: call(k(p))))
    for point in (-0.5, 15.49, 0.0):  # halves go to even
        jax.eval_shape(lambda p=point: call(p))
    jax.eval_shape(call, jnp.float32(99))  # traced, it is cut


NUMBERS = (-(2**40), -129, -9, -3, 4, 8, 16, 200, 256, ENDLESS)
WITH_POINTS = ("matmul_integer", "ops.matmul_integer_to_float", "qlinear_matmul", "ops.dynamic_quantize_matmul",
               "conv_integer", "qlinear_conv", "integer.dot_general", "integer.conv_general_dilated")  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "int16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("name", WITH_POINTS)
def test_zero_points_of_any_operand_work_or_are_refused_by_name(name: str, dtype: str) -> None:
    """Ints, numpy's ints, arrays of the operand's dtype and of others, in range and out of it."""
    call, kind = CALLS[name], np.dtype(getattr(jnp, dtype))
    narrow = name.startswith("integer.") and kind in dtypes.CONTRACTED
    low, high = (int(b) for b in (jnp.iinfo(kind).min, jnp.iinfo(kind).max)) if narrow else (0, -1)
    operands = [a for a in call.operands if f"{a}_zero_point" in call.parts]
    codes = {a: np.ones(np.shape(call.arguments[a]), kind) for a in operands}
    for operand in operands:
        for number in NUMBERS:
            points: list[Any] = [number]
            if abs(number) < 2**31:
                points += [np.int64(number), np.array([number], np.int32), jnp.array([number, number])]
            for point in points:
                given = {**codes, f"{operand}_zero_point": point}
                good = {f"{o}_zero_point": np.zeros((), kind) for o in operands if o != operand}
                if point is number and low <= number <= high:
                    jax.eval_shape(lambda g=given, z=good: call.spoiled(**{**g, **z}))
                else:
                    refused(name, lambda g=given: call.spoiled(**g))


PACKED = np.ones(12, np.uint8)
SHAPES: list[Any] = [
    *((4, 6.0), ("a",), None, 24, (4, -6), (4, True), ((4, 6),), np.array([4, 6]), "46", {4, 6}),
    *((jnp.int32(4), 6), (None,)),
]


@pytest.mark.parametrize(
    ("start", "call"),
    [
        *(
            ("checkpoint.unpack: shape", lambda s=shape: checkpoint.unpack(PACKED, jnp.int4, s))
            for shape in SHAPES
        ),
        ("checkpoint.unpack: packed", lambda: checkpoint.unpack(PACKED, jnp.int4, (4, 7))),
        ("checkpoint.unpack: packed", lambda: checkpoint.unpack(PACKED, jnp.int4, (2**70,))),
        ("fake_quantize: gradient.key", lambda: jq.fake_quantize(X, SPEC, gradient=jq.StochasticRounding("key"))),
        ("fake_quantize: gradient.key", lambda: jq.fake_quantize(X, SPEC, gradient=jq.StochasticRounding(None))),
        ("fake_quantize: gradient.key", lambda: jq.fake_quantize(X, SPEC, gradient=jq.StochasticRounding(3))),
        ("fake_quantize: gradient.key",
         lambda: jq.fake_quantize(X, SPEC, gradient=jq.StochasticRounding(jax.random.split(jax.random.key(0))))),
        ("quantized_dot_general: lhs_spec.gradient.key", lambda: jq.quantized_dot_general(
            X, TALL, DOT, lhs_spec=jq.Quantizer(SPEC, gradient=jq.StochasticRounding("key")), rhs_spec=None)),
        ("quantized_dot_general: lhs_spec.scale", lambda: jq.quantized_dot_general(
            X, TALL, DOT, lhs_spec=jq.Quantizer(SPEC, "s"), rhs_spec=None)),
        ("quantized_dot_general: lhs_spec.scale", lambda: jq.quantized_dot_general(
            X, TALL, DOT, lhs_spec=jq.Quantizer(SPEC, masked(ones(np.float32, 1, 1))), rhs_spec=None)),
        ("fake_quantize: scale", lambda: jq.Quantizer(SPEC, "s")(X)),
        ("fake_quantize: zero_point", lambda: jq.Quantizer(UINT4, 0.5, "z")(X)),
        ("quantized_dot_general: key", lambda: CALLS["quantized_dot_general"].spoiled(key="key")),
        ("fake_quantize: scale", lambda: jq.fake_quantize(X, SPEC, jax.random.PRNGKey(0))),
        ("quantize: range", lambda: jq.quantize(X, SPEC, range=(jax.random.PRNGKey(0), 1.0))),
        ("quantize_linear: x", lambda: jq.quantize_linear(ENDLESS, 0.5)),
        ("quantize_linear: x", lambda: jq.quantize_linear(np.int64(2**40), 0.5)),
        ("QuantizedArray.dequantize: self.codes", lambda: jq.QuantizedArray(masked(CODES), X[:1, :1]).dequantize()),
        ("QuantSpec: dtype", lambda: jq.QuantSpec("nonsense")),
        ("QuantSpec: scale_dtype", lambda: jq.QuantSpec("int8", scale_dtype="nonsense")),
        ("QuantizedArray.astype: dtype", lambda: quantized(np.int8, 2).astype("nonsense")),
    ],
)  # fmt: skip
def test_other_bad_arguments_are_refused_by_name(start: str, call: Callable[[], Any]) -> None:
    refused(start, call)


def test_both_kinds_of_keys_are_taken() -> None:
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.array([0, 1], np.uint32)):
        jax.eval_shape(lambda key=key: jq.fake_quantize(X, SPEC, gradient=jq.StochasticRounding(key)))


def test_fake_quantize_linear_has_the_dtype_of_the_pair() -> None:
    """The zero point's, or uint8, as `quantize_linear` has it."""
    x = jnp.array([-300.0, -1.25, 0.75, 300.0])
    for point in (None, 3, np.int8(-3), np.uint8(3), np.int8(3).astype(jnp.int4)):
        pair = jq.dequantize_linear(jq.quantize_linear(x, 0.5, point), 0.5, point)
        np.testing.assert_array_equal(jq.fake_quantize_linear(x, 0.5, point), pair)
    np.testing.assert_array_equal(jq.fake_quantize_linear(x, 0.5, 3.0), jq.fake_quantize_linear(x, 0.5, 3))
    refused("fake_quantize_linear: the dtype of zero_point", lambda: jq.fake_quantize_linear(x, 0.5, 3, dtype="none"))
    refused("fake_quantize_linear: zero_point", lambda: jq.fake_quantize_linear(x, 0.5, -1))


def test_no_text_is_made_for_a_good_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> str:
        raise RuntimeError("a text was made")

    for kind in (jq.QuantSpec, jq.QuantizedArray, jq.StraightThrough, jq.LSQ):
        monkeypatch.setattr(kind, "__repr__", refuse)
    jax.eval_shape(lambda: jq.quantize(X, SPEC).dequantize())
    jax.eval_shape(lambda: jq.fake_quantize(X, SPEC, 0.5, gradient=jq.LSQ()))
    for name in WITH_PRECISION:
        jax.eval_shape(lambda name=name: CALLS[name].spoiled())
