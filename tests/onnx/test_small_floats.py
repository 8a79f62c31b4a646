"""Float8, float4 and blocks of narrow integers in exported models, in two runtimes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime

RECIPES = {
    "weight_only_fp8": jq.recipes.weight_only_fp8(),
    "fp8_dynamic": jq.recipes.fp8_dynamic(),
    "mxfp8": jq.recipes.mxfp8(),
    "mxfp8, floor": jq.recipes.mxfp8(scale_rule="floor"),
    "mxfp4": jq.recipes.mxfp4(),
    "mxfp4, float4 activations": jq.recipes.mxfp4(activations="float4_e2m1fn"),
    "nvfp4": jq.recipes.nvfp4(),
    "nvfp4, compressed-tensors": jq.recipes.nvfp4(scale_rule="compressed_tensors"),
    "weight_only_int4": jq.recipes.weight_only_int4(),
}
WITH_CODES = ("fp8_dynamic", "mxfp8", "mxfp8, floor", "mxfp4, float4 activations")
TABLES = ("weight_only_fp8", "fp8_dynamic", "mxfp8", "mxfp4", "nvfp4")
RULES = ("rceil", "floor", "ceil", "even", "nearest", "compressed_tensors")
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)


def network(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["hidden"]) @ params["out"]


def make_network(rng: np.random.Generator) -> tuple[Any, jax.Array]:
    shapes = {"hidden": (64, 96), "out": (96, 24)}
    params = {name: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(0, 1, (5, 64)), jnp.float32)


def run(model: onnx.ModelProto, x: Any) -> list[np.ndarray]:
    return run_runtime(model, {model.graph.input[0].name: np.asarray(x)})


def read_initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


@pytest.mark.sample(3)
@pytest.mark.parametrize("opset", [19, 21, 25])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_in_onnx_runtime(name: str, opset: int, rng: np.random.Generator) -> None:
    params, x = make_network(rng)
    prepared = jq.prepare(network, params, x, rules=RECIPES[name], strict=True)
    q = prepared.convert(params)
    model = jqonnx.export(prepared, q, [x], batch="N", opset=opset)
    onnx.checker.check_model(model, full_check=True)
    for level in ("disabled", "all"):
        report = jqonnx.verify(model, prepared, q, [x, x[:2]], level=level, tolerance=1e-5)
        assert report.is_exact, str(report)
        assert any(row.kind == "codes" for row in report.rows) == (name in WITH_CODES)
    loaded, parameters = jqonnx.load(model)
    np.testing.assert_allclose(loaded(parameters, x), prepared.apply(q, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("form", ["operators", "qdq"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_looked_up(name: str, form: Any, mode: str, rng: np.random.Generator) -> None:
    params = {"table": jnp.asarray(rng.normal(0, 1, (64, 32)), jnp.float32)}
    rows = np.array([[3, 63, int(rng.integers(64))]], np.int32)
    prepared = jq.prepare(
        lambda p, t: jq.take(p["table"], t, mode=mode), params, rows, rules=RECIPES[name], strict=True
    )
    q = prepared.convert(params)
    model = jqonnx.export(prepared, q, [rows], form=form)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(run(model, rows)[0], prepared.apply(q, rows))
    np.testing.assert_array_equal(run(model, rows)[0][0], np.asarray(q.params["table"].dequantize())[rows[0]])
    if name != "nvfp4":  # a byte for each code, and a scale for each row or block of 32
        assert model.ByteSize() < 64 * 32 * 1.2 + 2500


@pytest.mark.parametrize("name", ["weight_only_fp8", "mxfp4", "nvfp4"])
def test_qdq_has_the_types_of_the_weights(name: str, rng: np.random.Generator) -> None:
    """Other runtimes read float4, float8 and float8_e8m0fnu: the reference evaluator gives the bits of `dequantize`."""
    w = jnp.asarray(rng.normal(0, 0.3, (64, 24)), jnp.float32)
    spec = {
        "weight_only_fp8": jq.QuantSpec("float8_e4m3fn", jq.PerAxis(1)),
        "mxfp4": jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 32), scale_dtype="float8_e8m0fnu"),
        "nvfp4": jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 16), scale_spec=jq.QuantSpec("float8_e4m3fn")),
    }[name]
    q = jq.quantize(w, spec)
    identity = jnp.eye(64, dtype=jnp.float32)
    model = jqonnx.export(lambda p, x: jq.matmul(x, p["w"]), {"w": q}, [identity], opset=25, form="qdq")
    onnx.checker.check_model(model, full_check=True)
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("DequantizeLinear") == (2 if name == "nvfp4" else 1)
    (values,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: np.asarray(identity)})
    np.testing.assert_array_equal(values, q.dequantize())
    tensors = read_initializers(model)
    codes = tensors["w.codes"]
    expected = TensorProto.FLOAT8E4M3FN if name == "weight_only_fp8" else TensorProto.FLOAT4E2M1
    assert codes.data_type == expected
    np.testing.assert_array_equal(numpy_helper.to_array(codes).astype(np.float32), q.codes.astype(jnp.float32))
    if name == "mxfp4":
        assert tensors["w.scale"].data_type == TensorProto.FLOAT8E8M0
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensors["w.scale"]).view(np.uint8), np.asarray(q.scale).view(np.uint8)
        )
    # The file has 4 bits for each code.
    assert model.ByteSize() < 64 * 24 * q.codes.dtype.itemsize * (1 if name == "weight_only_fp8" else 0.75) + 1200
    loaded, parameters = jqonnx.load(model)
    np.testing.assert_array_equal(loaded(parameters, identity), q.dequantize())


def test_an_early_opset_holds_blocks_in_wider_types(rng: np.random.Generator) -> None:
    """In the form "qdq", too: opset 21 has no float4, and opset 23 no float8_e8m0fnu."""
    w = jnp.asarray(rng.normal(0, 0.3, (64, 24)), jnp.float32)
    q = jq.quantize(w, jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 32), scale_dtype="float8_e8m0fnu"))
    x = jnp.eye(64, dtype=jnp.float32)
    for opset in (19, 21, 23):
        model = jqonnx.export(lambda p, x: jq.matmul(x, p["w"]), {"w": q}, [x], opset=opset, form="qdq")
        assert read_initializers(model)["w.codes"].data_type == TensorProto.FLOAT8E4M3FN
        np.testing.assert_array_equal(run(model, x)[0], q.dequantize())


def list_float4_neighbors() -> np.ndarray:
    """Return all numbers of float4, all ties, and the float32 numbers beside them, with both signs."""
    levels = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    points = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2, [7, 1e30, np.inf, 1e-30]]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    near = near[np.abs(near) >= np.finfo(np.float32).tiny]
    return np.concatenate([near, -near, [0.0, -0.0, np.nan]]).astype(np.float32)


@pytest.mark.parametrize("ties", ["even", "toward_zero"])
def test_float4_codes_of_ties(ties: Any) -> None:
    x = list_float4_neighbors()
    spec = jq.QuantSpec("float4_e2m1fn", ties=ties)

    def encode(x: jax.Array) -> jax.Array:
        return jq.quantize(x, spec, range=(-6.0, 6.0)).codes

    model = jqonnx.export(encode, [jnp.asarray(x)], opset=19)
    assert jqonnx.verify(model, encode, [jnp.asarray(x)]).is_exact
    function, params = jqonnx.load(model)
    loaded = np.asarray(function(params, jnp.asarray(x))).astype(np.float32)
    finite = np.nan_to_num(x, nan=-0.0)
    expected = finite.astype(FLOAT4).astype(np.float32)
    if ties == "toward_zero":
        levels = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
        size = np.minimum(np.abs(finite.astype(np.float64)), 6)
        nearest = levels[np.argmin(np.abs(size[:, None] - levels), axis=1)]  # the first, and so the smaller, of two
        expected = np.copysign(nearest, finite).astype(np.float32)
    np.testing.assert_array_equal(loaded, expected)
    np.testing.assert_array_equal(np.signbit(loaded), np.signbit(expected))


@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize("rule", RULES)
def test_powers_of_two_at_their_bounds(rule: Any, scale_dtype: Any) -> None:
    """ONNX has no bits of floats, so that the model finds exponents by a logarithm and by comparisons."""
    spec = jq.QuantSpec("float4_e2m1fn", jq.PerAxis(0), scale_rule=rule, power_of_two=True, scale_dtype=scale_dtype)
    digits = np.asarray([1, 1.25, np.sqrt(2), 1.5, 1.75, 1.875, 2], np.float32)
    powers = np.exp2(np.arange(-120, 125, 7)).astype(np.float32)
    points = np.outer(powers, digits).ravel()
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    amax = np.concatenate([points, points * 6, [np.finfo(np.float32).tiny * 2, np.finfo(np.float32).max]])
    amax = amax[np.isfinite(amax)].astype(np.float32)
    x = jnp.asarray(np.stack([amax, -amax / 2], 1))

    def find(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jq.quantize(x, spec)
        return q.scale, q.codes

    model = jqonnx.export(find, [x], opset=21)
    for level in ("disabled", "all"):
        assert jqonnx.verify(model, find, [x], level=level).is_exact
    scale, _ = run(model, x)
    mantissa, exponent = np.frexp(amax.astype(np.float64))  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    if rule == "floor":
        expected = exponent - 1 - 2
    elif rule == "ceil":
        expected = exponent - (mantissa == 0.5) - 2
    else:
        return
    np.testing.assert_array_equal(np.log2(scale.astype(np.float64)).ravel(), np.clip(expected, -126, 125))


def test_infinities_reach_the_scale() -> None:
    spec = jq.QuantSpec("float8_e4m3fn", jq.PerAxis(0), scale_dtype="float8_e8m0fnu")
    x = jnp.asarray([[1.0, -np.inf], [np.inf, 2.0], [0.0, 0.0], [3.0, -4.0]], jnp.float32)

    def find(x: jax.Array) -> jax.Array:
        return jq.quantize(x, spec).scale

    (scale,) = run(jqonnx.export(find, [x]), x)
    np.testing.assert_array_equal(scale, find(x).astype(jnp.float32))


NARROW = {
    **{name: jq.QuantSpec(name, jq.Blocked(0, 16)) for name in ("int3", "uint3", "int5", "uint5", "int6", "uint6")},
    "zero points of 8 bits": jq.QuantSpec("uint8", jq.Blocked(0, 16), symmetric=False),
    "zero points of 2 bits": jq.QuantSpec("uint2", jq.Blocked(0, 16), symmetric=False),
    "offset": jq.QuantSpec("uint4", jq.Blocked(0, 16), offset=True),
    "Q4_K": jq.QuantSpec("uint4", jq.Blocked(0, 16), offset=True, scale_spec=jq.QuantSpec("uint6", jq.Blocked(0, 4))),
    "a short block": jq.QuantSpec("int8", jq.Blocked(0, 24)),
    "blocks along both axes": jq.QuantSpec("float8_e4m3fn", jq.Blocked((0, 1), 32)),
}


@pytest.mark.parametrize("name", NARROW)
def test_blocks_take_a_byte_for_each_code(name: str, rng: np.random.Generator) -> None:
    """Scales, zero points and offsets of blocks are not repeated in the file."""
    q = jq.quantize(jnp.asarray(rng.normal(0.1, 0.3, (128, 96)), jnp.float32), NARROW[name])
    identity = jnp.eye(128, dtype=jnp.float32)

    def function(params: Any, x: jax.Array) -> jax.Array:
        return jq.matmul(x, params["w"])

    model = jqonnx.export(function, {"w": q}, [identity])
    onnx.checker.check_model(model, full_check=True)
    assert model.ByteSize() < 128 * 96 + 2 * 4 * 8 * 96 + 5000
    for level in ("disabled", "all"):
        assert jqonnx.verify(model, function, {"w": q}, [identity], level=level, tolerance=1e-6).is_exact
    (values,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: np.asarray(identity)})
    np.testing.assert_array_equal(values, q.dequantize())
    loaded, parameters = jqonnx.load(model)
    np.testing.assert_array_equal(loaded(parameters, identity), q.dequantize())


def test_errors_name_the_parameter_and_say_what_to_do(rng: np.random.Generator) -> None:
    params, x = make_network(rng)
    for recipe in (jq.recipes.weight_only_fp8(), jq.recipes.mxfp4(), jq.recipes.nvfp4()):
        prepared = jq.prepare(network, params, x, rules=recipe)
        with pytest.raises(ValueError, match=r"codes of hidden.*\.codes need opset 19 or later, got opset 17"):
            jqonnx.export(prepared, prepared.convert(params), [x], opset=17)
    with pytest.raises(ValueError, match=r"float32 as float4_e2m1fn, .* use jq\.quantize"):
        jqonnx.export(lambda x: x.astype(jnp.float4_e2m1fn), [x])


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_16_bits_are_rounded_up(dtype: str, opset: int, rng: np.random.Generator) -> None:
    """Scales that are found in each call: on numbers of 16 bits, one unit of float32 beside them, and at both ends."""
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    bits = np.concatenate([rng.integers(1, 0x7BFF, 300), np.arange(1, 40), [0x3FF, 0x400, 0x7BFE, 0x7BFF]])
    exact = bits.astype(np.uint16).view(narrow).astype(np.float32)
    scales = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))])
    scales = np.concatenate([scales, np.exp(rng.uniform(-20, 12, 500)), [7e4, 1e30, 2.6e36, np.nan]]).astype(np.float32)
    x = jnp.asarray(scales[:, None] * np.asarray([127, -3, 0.5, 0], np.float32))
    wide, spec = (jq.QuantSpec("int8", jq.PerToken(), scale_dtype=name) for name in ("float32", dtype))

    def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jq.quantize(x, spec)
        return q.codes, q.scale.astype(jnp.float32)

    model = jqonnx.export(quantize, [x], opset=opset)
    needed = np.asarray(jq.quantize(x, wide).scale)
    with np.errstate(over="ignore"):
        nearest = np.minimum(needed, np.float32(ml_dtypes.finfo(narrow).max) if dtype == "bfloat16" else np.inf)
        nearest = np.where(np.isnan(needed), needed, nearest).astype(narrow)
        above = np.nextafter(nearest, np.asarray(np.inf, narrow)).astype(np.float32)
    expected = np.where(nearest.astype(np.float32) < needed, above, nearest.astype(np.float32))
    for level in ("none", "all"):
        codes, scale = run_runtime(model, {model.graph.input[0].name: np.asarray(x)}, level)
        np.testing.assert_array_equal(scale, expected)
        np.testing.assert_array_equal(scale, jax.jit(quantize)(x)[1])
        is_normal = np.abs(x) >= np.finfo(np.float32).tiny  # XLA takes smaller numbers for 0
        np.testing.assert_array_equal(codes[is_normal], np.asarray(jax.jit(quantize)(x)[0])[is_normal])


def test_a_missing_kernel_is_no_damage(rng: np.random.Generator) -> None:
    q = jq.quantize(jnp.asarray(rng.normal(0, 0.3, (64, 24)), jnp.float32), jq.QuantSpec("float4_e2m1fn"))
    x = jnp.eye(64, dtype=jnp.float32)

    def function(params: Any, x: jax.Array) -> jax.Array:
        return jq.matmul(x, params["w"])

    model = jqonnx.export(function, {"w": q}, [x], opset=25, form="qdq")
    with pytest.raises(jqonnx.ModelError, match=r"^ONNX Runtime cannot load the model: .*DequantizeLinear"):
        jqonnx.verify(model, function, {"w": q}, [x])
