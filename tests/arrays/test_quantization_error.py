"""`quantization_error` against numpy's float64, and what it says where a ratio has no value."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..support.quantized_arrays import dequantized, expanded

F32 = np.float32
# a spec, its range as a share of the largest magnitude, and the dtype of x
CASES: dict[str, tuple[jq.QuantSpec, float, Any]] = {
    "int8, narrow": (jq.QuantSpec(jnp.int8), 0.5, F32),
    "int8, wide": (jq.QuantSpec(jnp.int8, jq.PerAxis(0), narrow_range=False), 0.25, F32),
    "uint8": (jq.QuantSpec(jnp.uint8, jq.Blocked(1, 16)), 0.5, F32),
    "uint8, symmetric": (jq.QuantSpec(jnp.uint8, symmetric=True), 0.5, F32),
    "int4": (jq.QuantSpec(jnp.int4, jq.Blocked(1, 7)), 0.75, ml_dtypes.bfloat16),
    "uint2": (jq.QuantSpec(jnp.uint2, jq.PerAxis(1)), 0.5, np.float16),
    "int2, narrow": (jq.QuantSpec(jnp.int2), 0.5, F32),
    "int16": (jq.QuantSpec(jnp.int16), 0.5, F32),
    "float8_e4m3fn": (jq.QuantSpec(jnp.float8_e4m3fn), 0.5, F32),
    "float8_e5m2fnuz": (jq.QuantSpec(jnp.float8_e5m2fnuz), 0.25, F32),
    "float4_e2m1fn": (jq.QuantSpec(jnp.float4_e2m1fn, jq.Blocked(1, 16), scale_dtype=jnp.float8_e8m0fnu), 0.25, F32),
    "nf4": (jq.QuantSpec(jq.nf4, jq.PerAxis(0)), 0.5, F32),
}


def floats(values: Any) -> np.ndarray:
    return np.asarray(values, F32)


def oracle(x: np.ndarray, q: jq.QuantizedArray, spec: jq.QuantSpec) -> list[float]:
    """The five measures in float64; here the spec is known, and with it the narrow range."""
    wide, y = x.astype(np.float64), dequantized(q).astype(np.float64)
    noise, signal, size = ((v * v).sum() for v in (wide - y, wide, y))
    value = (x.astype(F32) / expanded(q.scale, q.shape, q.block_size).astype(F32)).astype(np.float64)
    low, high = spec.bounds
    if spec.codebook is None and "float" in str(spec.dtype):
        above = np.nextafter(np.asarray(high, ml_dtypes.float8_e5m2fnuz), np.asarray(0, ml_dtypes.float8_e5m2fnuz))
        step = {"float8_e4m3fn": 32, "float4_e2m1fn": 2}.get(str(spec.dtype), high - float(above))
        outside = np.abs(value) >= high + step / 2  # a tie goes to even, which is beyond
    elif spec.codebook is None:
        point = 0 if q.zero_point is None else expanded(q.zero_point, q.shape, q.block_size).astype(np.int32)
        outside = (value < low - point - 0.5) | (value > high - point + 0.5)
    else:
        outside = (value < low * (1 + 2**-22)) | (value > high * (1 + 2**-22))
    bits = {"nf4": 4}.get(str(spec.dtype)) or int(str(spec.dtype).strip("uintfloa").split("_")[0])
    codes = np.asarray(q.codes)
    codes = codes.view(np.uint8) if codes.dtype.itemsize == 1 else codes
    return [
        10 * math.log10(signal / noise), np.abs(wide - y).max(), (wide * y).sum() / math.sqrt(signal * size),
        outside.mean(), len(np.unique(codes)) / 2**bits,
    ]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(CASES))
def test_the_measures(name: str, rng: np.random.Generator) -> None:
    spec, share, dtype = CASES[name]
    x = (rng.standard_normal((24, 32)) * 4 + 1).astype(dtype)
    x[0, :3] = -3.5, 3.5, 0
    reach = float(np.abs(x).max()) * share
    q = jq.quantize(x, spec, range=(-reach, reach))
    actual = jq.quantization_error(x, q)
    assert all(v.dtype == jnp.float32 and v.shape == () for v in actual)
    expected = oracle(x, q, spec)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=2e-6, atol=1e-5)
    assert 0 < expected[3] < 1, "the largest saturates, 0 does not"


def test_under_jit_and_vmap(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 8, 6)).astype(F32)
    spec = jq.QuantSpec(jnp.uint4, jq.PerAxis(0))

    def measured(x: jax.Array) -> jq.QuantizationError:
        return jq.quantization_error(x, jq.quantize(x, spec, range=(-0.5, 1.25)))

    measures = jax.jit(jax.vmap(measured))(x)
    want = [oracle(row, jq.quantize(row, spec, range=(-0.5, 1.25)), spec) for row in x]
    np.testing.assert_allclose(np.stack(measures, axis=1), want, rtol=2e-6, atol=1e-5)


@pytest.mark.slow
def test_at_the_ends_of_the_range() -> None:
    """Half a step beyond the last code is still rounded to it; one float more is saturated. A code inside never is."""
    spec = jq.QuantSpec(jnp.int8, narrow_range=False)
    hi, lo = (np.nextafter(F32(v), F32(v * 2)) for v in (127.5, -128.5))
    for x, saturated in (([127.5, -128.5], 0), ([hi, lo], 2), ([hi, -128.5], 1), ([np.inf, -np.inf], 2), ([0.5], 0)):
        q = jq.QuantizedArray(np.clip(np.rint(floats(x)), -128, 127).astype(np.int8), np.ones(1, F32))
        assert jq.quantization_error(floats(x), q).saturated == F32(saturated) / len(x)
    narrow = jq.QuantizedArray(np.array([-127, -127, -126], np.int8), np.ones(1, F32))
    assert jq.quantization_error(floats([-128, -127.5, -129]), narrow).saturated == F32(1) / F32(3)
    x = floats([-1.0, 1.0, 1.0625, 0.3])
    for book in (jq.nf4, jq.Codebook("uneven", (-0.3, 0.0, 0.1, 0.7))):
        q = jq.quantize(x * F32(0.7), jq.QuantSpec(book))  # the largest lands on the last entry, rounded or not
        beyond = 0 if book is jq.nf4 else 1  # -1 has no entry there
        assert jq.quantization_error(x * F32(0.7), q).saturated == F32(beyond) / 4
    assert spec.bounds == (-128, 127)


@pytest.mark.slow
def test_where_a_ratio_has_no_value() -> None:
    spec = jq.QuantSpec(jnp.int8)
    exact = jq.quantization_error(floats([-127, 3, 127]), jq.quantize(floats([-127, 3, 127]), spec))
    assert (exact.sqnr_db, exact.max_abs, exact.saturated) == (np.inf, 0, 0)
    assert abs(exact.cosine - 1) < 1e-6
    for shape in ((4,), (0, 3), ()):
        nothing = np.zeros(shape, F32)
        errors = jq.quantization_error(nothing, jq.quantize(nothing, spec))
        used = 0 if 0 in shape else 1 / 256
        assert tuple(map(float, errors)) == (np.inf, 0, 1, 0, used)
    ones = jq.QuantizedArray(np.ones(4, np.int8), np.ones(1, F32))
    assert tuple(jq.quantization_error(np.zeros(4, F32), ones))[:3] == (-np.inf, 1, 0)
    zeros = ones.replace(codes=np.zeros(4, np.int8))
    assert tuple(jq.quantization_error(np.ones(4, F32), zeros))[:3] == (0, 1, 0)
    for wrong in (np.nan, np.inf, -np.inf):
        x = np.ones(5000, F32)  # XLA's own maximum loses a NaN in so many
        x[4321] = wrong
        errors = jq.quantization_error(x, ones.replace(codes=np.ones(5000, np.int8)))
        assert np.isnan([errors.sqnr_db, errors.cosine]).all()
        assert np.isnan(errors.max_abs) if np.isnan(wrong) else errors.max_abs == np.inf
        spoilt = jq.QuantizedArray(np.ones(2, np.int8), np.full(1, wrong, F32)) if wrong != -np.inf else None
        assert spoilt is None or np.isnan(jq.quantization_error(np.ones(2, F32), spoilt).sqnr_db)


def test_tiny_and_huge(rng: np.random.Generator) -> None:
    """Squares that float32 does not have."""
    x = rng.standard_normal(4096).astype(F32)
    expected = jq.quantization_error(x, jq.quantize(x, jq.QuantSpec(jnp.int16)))
    for power in (-90, 120):
        scaled = x * F32(2.0**power)
        actual = jq.quantization_error(scaled, jq.quantize(scaled, jq.QuantSpec(jnp.int16)))
        assert abs(actual.sqnr_db - expected.sqnr_db) < 1e-3
        assert (actual.cosine, actual.used_codes) == (expected.cosine, expected.used_codes)
        assert actual.max_abs == expected.max_abs * F32(2.0**power)


@pytest.mark.slow
def test_sums_of_ten_million(rng: np.random.Generator) -> None:
    """XLA adds up in a tree: a float32 sum of so many is as good as float64's."""
    x = rng.standard_normal((2500, 4001), F32)
    x *= x
    q = jq.quantize(x, jq.QuantSpec(jnp.int8))
    y = np.asarray(q.dequantize())
    signal, noise, size, product = (
        np.einsum("ij,ij->", a, b, dtype=np.float64) for a, b in ((x, x), (x - y, x - y), (y, y), (x, y))
    )
    errors = jq.quantization_error(x, q)
    ratio = 10 ** (float(errors.sqnr_db) / 10)
    assert abs(ratio / (signal / noise) - 1) < 1e-5
    assert abs(float(errors.cosine) - product / math.sqrt(signal * size)) < 1e-6


def test_no_gradient(rng: np.random.Generator) -> None:
    x = rng.standard_normal(8).astype(F32)
    q = jq.quantize(x, jq.QuantSpec(jnp.int8))
    dx, dscale = jax.grad(lambda x, s: jq.quantization_error(x, q.replace(scale=s)).sqnr_db, argnums=(0, 1))(x, q.scale)
    assert not np.any(dx)
    assert not np.any(dscale)


Q = jq.quantize(np.ones((3, 4), F32), jq.QuantSpec(jnp.int8))
REFUSALS = [
    (np.ones((3, 4), F32), np.ones((3, 4), F32), TypeError, "q: expected a QuantizedArray"),
    (np.ones((3, 4), np.int8), Q, TypeError, "x: expected dtype float32, float16 or bfloat16, got int8"),
    (np.ones((3, 4), F32).tolist(), Q, TypeError, "x: expected an array, got list"),
    (Q, Q, TypeError, "x: expected an array, got QuantizedArray"),
    (np.ones((4, 3), F32), Q, ValueError, r"x: expected shape \(3, 4\) \(the shape of q\), got shape \(4, 3\)"),
    (1.0, Q, ValueError, r"x: expected shape \(3, 4\) \(the shape of q\), got shape \(\)"),
    (np.ones(4, F32), Q.replace(scale=np.ones((2, 1), F32)), ValueError, "q.scale: expected the rank of the codes"),
]


@pytest.mark.parametrize(("x", "q", "error", "text"), REFUSALS)
def test_refusals(x: Any, q: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"jaxquant.quantization_error: {text}") as raised:
        jq.quantization_error(x, q)
    assert isinstance(raised.value, AssertionError)
