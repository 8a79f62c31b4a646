"""Quantizing with real offsets in place of zero points, and with scales that are quantized themselves.

The oracles are the formulas of `jq.quantize` in numpy, in float32.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec

F32 = np.float32
GRANULARITIES = {"tensor": PerTensor(), "rows": PerAxis(0), "blocks": Blocked(-1, 8), "boxes": Blocked((0, 1), 4)}


def pool(x: np.ndarray, shape: tuple[int, ...], size: int, reduce: Any) -> np.ndarray:
    """Return the results of a reduction over the elements of each block; a dimension of 1 is reduced as a whole."""
    result = np.empty(shape, F32)
    for index in np.ndindex(shape):
        cut = [
            slice(None) if n == 1 else slice(i, i + 1) if n == length else slice(i * size, (i + 1) * size)
            for i, n, length in zip(index, shape, x.shape, strict=True)
        ]
        result[index] = reduce(x[tuple(cut)])
    return result


def spread(part: Any, shape: tuple[int, ...], size: int) -> np.ndarray:
    part = np.asarray(part, F32)
    for axis, length in enumerate(shape):
        if part.shape[axis] not in (1, length):
            part = np.repeat(part, size, axis)[(*(slice(None),) * axis, slice(length))]
    return np.broadcast_to(part, shape)


def check_codes(x: np.ndarray, q: QuantizedArray, scale: np.ndarray, offset: np.ndarray, size: int, qmax: int) -> None:
    """Check the codes and the values for the scales and the offsets that were found."""
    wide_scale, wide_offset = (spread(part, x.shape, size) for part in (scale, offset))
    codes = np.clip(np.rint((x - wide_offset) / wide_scale), 0, qmax)
    np.testing.assert_array_equal(np.asarray(q.codes.astype(jnp.int32)), codes)
    np.testing.assert_array_equal(q.dequantize(), codes.astype(F32) * wide_scale + wide_offset)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ["uint2", "uint4", "uint8"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16"])
def test_offsets(granularity: str, dtype: str, scale_dtype: str, rng: np.random.Generator) -> None:
    spec = QuantSpec(dtype, GRANULARITIES[granularity], offset=True, scale_dtype=scale_dtype)
    x = (rng.normal(size=(5, 22)) + rng.choice((-3.0, 0, 3.0))).astype(F32)
    size = 4 if granularity == "boxes" else 8
    q = jq.quantize(x, spec)
    assert q.zero_point is None
    assert q.scale.dtype == q.offset.dtype == scale_dtype
    assert q.scale.shape == q.offset.shape
    qmax = int(jnp.iinfo(dtype).max)
    low, high = (pool(x, q.scale.shape, size, reduce) for reduce in (np.min, np.max))
    offset = low.astype(scale_dtype).astype(F32)
    scale = np.asarray(q.scale, F32)
    np.testing.assert_array_equal(np.asarray(q.offset, F32), offset)
    own = (high - offset) / F32(qmax)
    assert (scale >= own).all(), "the upper end does not saturate"
    if scale_dtype == "float32":
        np.testing.assert_array_equal(scale, own)
    else:
        assert (np.nextafter(np.asarray(q.scale), np.asarray(0, scale_dtype)).astype(F32) < own).all()
    check_codes(x, q, scale, offset, size, qmax)
    for other in (jax.jit(jq.quantize, static_argnums=1)(x, spec), jq.quantize(x, spec, stored_last=0)):
        np.testing.assert_array_equal(np.asarray(other.dequantize()), np.asarray(q.dequantize()))
    if granularity == "tensor":
        ends = jq.quantize(x, spec, range=(float(x.min()), float(x.max())))
        np.testing.assert_array_equal(np.asarray(ends.dequantize()), np.asarray(q.dequantize()))


def test_odd_ranges() -> None:
    """Equal elements are exact; zeros, NaN, infinities, the largest numbers and empty arrays."""
    largest = np.finfo(F32).max
    x = np.array([[2.5] * 4, [0] * 4, [np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-largest, 0, largest, 1]], F32)
    q = jq.quantize(x, QuantSpec("uint4", PerAxis(0), offset=True))
    y = np.asarray(q.dequantize())
    np.testing.assert_array_equal(y[:2], x[:2])
    np.testing.assert_array_equal(np.asarray(q.scale)[:2], 1)
    assert np.isnan(y[2]).all()
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(y[4]).all()
    assert y[4, 0] == -largest
    assert jq.quantize(jnp.zeros((0, 3)), QuantSpec("uint4", offset=True)).dequantize().shape == (0, 3)
    assert jq.quantize(jnp.float32(3), QuantSpec("uint4", offset=True)).dequantize() == 3
    half = jq.quantize(jnp.array([65504.0, 0.0, 65000.0], jnp.float16),
                       QuantSpec("uint4", offset=True, scale_dtype="float16"))  # fmt: skip
    assert np.isfinite(np.asarray(half.dequantize())).all()


NESTED = {
    "K-quant": QuantSpec("uint4", Blocked(-1, 4), offset=True,
                         scale_spec=QuantSpec("uint8", Blocked(-1, 3), scale_dtype="float16")),
    "signed sub-scales": QuantSpec("uint4", Blocked(-1, 4), offset=True, scale_spec=QuantSpec("int8", PerAxis(0))),
    "powers of two": QuantSpec("uint4", Blocked(-1, 4), offset=True,
                               scale_spec=QuantSpec("uint8", PerAxis(0), scale_dtype="float8_e8m0fnu")),
    "NVFP4": QuantSpec("float4_e2m1fn", Blocked(-1, 4), scale_spec=QuantSpec("float8_e4m3fn")),
    "symmetric": QuantSpec("int4", Blocked(-1, 4), scale_spec=QuantSpec("uint4", PerAxis(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_quantized_scales(name: str, rng: np.random.Generator) -> None:
    spec = NESTED[name]
    inner = spec.scale_spec
    assert inner is not None
    x = (rng.normal(size=(6, 22)) * 2.0 ** rng.integers(-3, 4, (6, 1))).astype(F32)
    x[2, 4:8] = 0  # a block without a scale of its own
    q = jq.quantize(x, spec)
    assert q.scale.codes.dtype == inner.carrier
    assert q.scale.scale.dtype == inner.scale_dtype
    assert (q.scale.dequantize() > 0).all()
    expected = jq.quantize(x, QuantSpec(spec.dtype, spec.granularity, offset=spec.offset))
    error, plain = (np.abs(np.asarray(a.dequantize()) - x) for a in (q, expected))
    assert error.mean() < 1.6 * plain.mean() + 1e-3
    scale = np.asarray(q.scale.dequantize())
    if spec.offset:
        offset = np.asarray(q.offset.dequantize())
        low = pool(x, offset.shape, 4, np.min)
        low = np.minimum(low, 0) if inner.fixed_zero_point is None else low
        step = np.abs(spread(np.asarray(q.offset.scale, F32), low.shape, 3))
        assert (np.abs(offset - low) <= 0.5001 * step).all()
        check_codes(x, q, scale, offset, 4, 15)
    else:
        wide = spread(scale, x.shape, 4)
        code = q.codes.astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(code) * wide)
    if name == "NVFP4":
        np.testing.assert_array_equal(np.asarray(q.scale.scale), np.abs(x).max() / F32(6 * 448))
    jitted = jax.jit(jq.quantize, static_argnums=1)(x, spec)
    assert jax.tree.structure(jitted) == jax.tree.structure(q)
    for a, b in zip(jax.tree.leaves(jitted), jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(F32), np.asarray(b).astype(F32))


REFUSALS = {
    "signed": (lambda: QuantSpec("int4", offset=True), "offset: expected False, because only unsigned integers"),
    "codebook": (lambda: QuantSpec(jq.nf4, offset=True), "offset: expected False, because only unsigned integers"),
    "symmetric": (lambda: QuantSpec("uint4", offset=True, symmetric=True), "symmetric: expected False"),
    "flag": (lambda: QuantSpec("uint4", offset=cast(Any, "yes")), "offset: expected"),
    "two levels": (lambda: QuantSpec("int4", scale_spec=NESTED["NVFP4"]), "scale_spec: expected a spec without"),
    "scale of a codebook": (lambda: QuantSpec("int4", scale_spec=QuantSpec(jq.nf4)), "scale_spec: expected a spec of"),
    "zero points": (lambda: QuantSpec("uint4", scale_spec=QuantSpec("uint4")), "scale_spec: expected None, because"),
    "zero points of scales": (lambda: QuantSpec("int4", scale_spec=QuantSpec("int4", symmetric=False)),
                              "scale_spec: expected a symmetric spec"),
    "offset of scales": (lambda: QuantSpec("int4", scale_spec=QuantSpec("uint8", offset=True)),
                         "scale_spec: expected a spec without an offset"),
    "no spec": (lambda: QuantSpec("int4", scale_spec="int8"), "scale_spec: expected a QuantSpec"),  # type: ignore
    "scale dtype": (lambda: QuantSpec("int4", scale_dtype="float16", scale_spec=QuantSpec("uint4")),
                    "scale_dtype: expected float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, text = REFUSALS[name]
    with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.QuantSpec: {text}"):
        call()
