"""Integers of 3, 5 and 6 bits: specs, quantization, training, recipes, and what refuses them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantSpec, Rule, Weight

from ..oracles import words_text

NAMES = ["int3", "uint3", "int5", "uint5", "int6", "uint6"]


def parse(name: str) -> tuple[int, bool]:
    """Return the bits of a format, and whether it is signed."""
    return int(name[-1]), not name.startswith("u")


@pytest.mark.parametrize("name", NAMES)
def test_specs(name: str) -> None:
    bits, signed = parse(name)
    spec = QuantSpec(name, PerAxis(0))
    codes = words_text.list_codes(bits, signed)
    assert str(spec.dtype) == name
    assert spec == QuantSpec(spec.dtype, PerAxis(0))
    assert hash(spec) == hash(QuantSpec(name, PerAxis(0)))
    assert spec != QuantSpec(spec.carrier, PerAxis(0))
    assert (spec.bits, spec.carrier, spec.codebook) == (bits, np.dtype("int8" if signed else "uint8"), None)
    assert spec.bounds == (codes[int(signed)], codes[-1])
    assert QuantSpec(name, narrow_range=False).bounds == (codes[0], codes[-1])
    assert spec.symmetric is signed
    assert QuantSpec(name, symmetric=True).fixed_zero_point == (0 if signed else 2 ** (bits - 1))
    assert repr(spec).startswith(f"QuantSpec({name}, PerAxis(axis=0), symmetric={signed}")


@pytest.mark.parametrize("dtype", ["int7", "uint1", "int4e", 3, ("int5",), None])
def test_unknown_formats_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"jaxquant\.QuantSpec: dtype: expected dtype .*uint5, int6 or uint6, got"):
        QuantSpec(dtype)


def test_reduced_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"QuantSpec: reduce_range: expected False"):
        QuantSpec("int5", reduce_range=True)


@pytest.mark.parametrize("name", NAMES)
def test_codes_follow_the_text(rng: np.random.Generator, name: str) -> None:
    bits, signed = parse(name)
    spec = QuantSpec(name, Blocked(-1, 8))
    x = (rng.normal(size=(5, 48)) * np.exp(rng.uniform(-3, 3, (5, 1)))).astype(np.float32)
    x[0, :8] = 0
    codes, scale, point = words_text.quantize_blocks(x, bits, signed, 8)
    # Ties, and the numbers next to them.
    steps = np.repeat(scale, 8, -1)
    ties = ((rng.integers(-3, 3, x.shape) + np.float32(0.5)) * steps).astype(np.float32)
    inside = np.abs(ties) < np.abs(x).reshape(5, 6, 8).min(-1).repeat(8, -1)
    x = np.where(inside & (rng.random(x.shape) < 0.5), np.nextafter(ties, ties * rng.choice([0, 1, 2], x.shape)), x)
    x = x.astype(np.float32)
    codes, scale, point = words_text.quantize_blocks(x, bits, signed, 8)
    for q in (jq.quantize(x, spec), jax.jit(lambda x: jq.quantize(x, spec))(x)):
        assert q.format == spec.dtype
        np.testing.assert_array_equal(q.codes, codes)
        assert q.codes.dtype == codes.dtype
        np.testing.assert_array_equal(q.scale, scale)
        np.testing.assert_array_equal(q.stored_codes, words_text.write(codes, bits))
        assert (q.zero_point is None) == (point is None)
        if point is not None:
            np.testing.assert_array_equal(np.asarray(q.zero_point), point)
        centered = codes.astype(np.int32) - (0 if point is None else np.repeat(point.astype(np.int32), 8, -1))
        np.testing.assert_array_equal(q.dequantize(), centered.astype(np.float32) * np.repeat(scale, 8, -1))


@pytest.mark.parametrize("name", NAMES)
def test_fake_quantize_rounds_as_quantize(rng: np.random.Generator, name: str) -> None:
    spec = QuantSpec(name, Blocked(-1, 8))
    x = rng.normal(size=(3, 16)).astype(np.float32)
    np.testing.assert_array_equal(jq.fake_quantize(x, spec), jq.quantize(x, spec).dequantize())
    slope = jax.grad(lambda x: jq.fake_quantize(x, spec).sum())(jnp.asarray(x))
    assert slope.shape == x.shape
    assert float(slope.mean()) > 0.5


@pytest.mark.parametrize("name", ["int5", "uint6"])
def test_errors_count_the_codes_of_the_format(name: str) -> None:
    bits, signed = parse(name)
    codes = np.array(words_text.list_codes(bits, signed))[int(signed) :]
    x = codes.astype(np.float32)
    x = np.append(x, 2 * x[-1])
    error = jq.quantization_error(x, jq.quantize(x, QuantSpec(name, narrow_range=signed), range=(x[0], x[-2])))
    assert float(error.used_codes) == len(codes) / 2**bits
    assert float(error.saturated) == pytest.approx(1 / (len(codes) + 1))


@pytest.mark.parametrize("activation", [None, "uint8"])
@pytest.mark.parametrize("name", ["int3", "uint5", "int6"])
def test_recipes_with_narrow_weights(rng: np.random.Generator, name: str, activation: str | None) -> None:
    params = {"w": rng.normal(size=(64, 24)).astype(np.float32)}
    x = rng.normal(size=(4, 64)).astype(np.float32)

    def apply(params: Any, x: Any) -> jax.Array:
        return x @ params["w"]

    weight = Weight(name, block=None if activation else 32)
    rules = [Rule(weight=weight, activation=None if activation is None else jq.Activation(activation))]
    prepared = jq.prepare(apply, params, x, rules=rules)
    q = prepared.convert(params)
    w = q.params["w"]
    assert str(w.format) == name
    y = prepared.apply(q, x)
    exact = x @ params["w"]
    assert np.abs(np.asarray(y) - exact).max() < np.abs(exact).max() * 2.0 ** (2.5 - parse(name)[0])
    if activation is None:
        np.testing.assert_allclose(y, x @ np.asarray(w.dequantize()), rtol=1e-5, atol=1e-4)
    assert name in str(prepared.coverage)


@pytest.mark.parametrize("method", [jq.ptq.gptq, jq.ptq.hqq])
@pytest.mark.parametrize("name", ["int3", "uint5"])
def test_ptq_algorithms(rng: np.random.Generator, name: str, method: Any) -> None:
    w = rng.normal(size=(32, 8)).astype(np.float32)
    spec = QuantSpec(name, Blocked(0, 16))
    moments = rng.normal(size=(64, 32)).astype(np.float32)
    q = method(w, moments.T @ moments, spec) if method is jq.ptq.gptq else method(w, spec)
    assert str(q.format) == name
    assert q.shape == w.shape
    assert np.abs(np.asarray(q.dequantize()) - w).max() < np.abs(w).max() * 2.0 ** (2 - parse(name)[0])


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("name", ["int5", "uint6"])
def test_models_have_the_codes_as_bytes(rng: np.random.Generator, name: str, block: int | None) -> None:
    params, x = {"w": rng.normal(size=(64, 24)).astype(np.float32)}, rng.normal(size=(4, 64)).astype(np.float32)
    activation = jq.Activation("uint8") if block is None else None
    rules = [Rule(weight=Weight(name, block=block), activation=activation)]
    prepared = jq.prepare(lambda params, x: x @ params["w"], params, x, rules=rules)
    q = prepared.convert(params)
    model = jq.onnx.export(lambda x: prepared.apply(q, x), [x])
    # ONNX has no integers of 3, 5 or 6 bits.
    assert {i.data_type for i in model.graph.initializer} >= {TensorProto.INT8 if name == "int5" else TensorProto.UINT8}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y: Any = session.run(None, {session.get_inputs()[0].name: x})[0]
    np.testing.assert_allclose(y, prepared.apply(q, x), rtol=1e-5, atol=1e-5)
