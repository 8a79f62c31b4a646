"""Ranges so small that their scale would be subnormal, or 0: no scale is 0, and what is dequantized is finite."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import PerAxis, PerTensor, QuantSpec

from ..oracles import array_text

F32 = np.float32
TINY = np.finfo(F32).tiny
# The last one is of subnormal numbers alone. 3.0e-36 / 255 is the first scale of uint8 that is normal.
SIZES = (1e-30, 3.1e-36, 2.9e-36, 1e-36, 1e-37, 2e-38, 1.2e-38, 1e-38, 1e-40)
SCALES = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
DTYPES = (("int8", True), ("int8", False), ("uint8", True), ("uint8", False), ("int2", True), ("float8_e4m3fn", True))


def rows_of(sizes: tuple[float, ...], shares: tuple[float, ...]) -> np.ndarray:
    """A row for each size, whose elements are these shares of it."""
    return (np.asarray(sizes)[:, None] * np.asarray(shares)).astype(F32)


BOTH, POSITIVE = (-1.0, -0.4, 0.0, 0.3, 0.7), (0.0, 0.1, 0.3, 0.7, 1.0)


def flushed(x: np.ndarray) -> np.ndarray:
    """What XLA:CPU takes x for."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def check_array(q: Any, x: np.ndarray, spec: QuantSpec) -> None:
    """The scale and the zero point of numpy, and values within half a step of x."""
    low, high = (np.asarray(f(flushed(x), 0).reshape(-1, 1)) for f in (least_of, most_of))
    name, text = str(spec.scale_dtype), str(spec.dtype)
    symmetric, narrow = bool(spec.symmetric), bool(spec.narrow_range)
    scale, point = array_text.parameters(low, high, text, symmetric, narrow, name, spec.power_of_two)
    actual = np.asarray(q.scale).astype(F32)
    np.testing.assert_array_equal(actual, scale.astype(F32))
    assert (actual >= TINY).all()
    assert (actual[np.abs(x).max(1) < TINY] == 1).all()
    assert (actual[np.abs(x).max(1) >= TINY] < 1e-6).all()
    if point is not None:
        np.testing.assert_array_equal(np.asarray(q.zero_point).astype(int), np.broadcast_to(point, q.zero_point.shape))
    values = np.asarray(q.dequantize())
    assert np.isfinite(values).all()
    if text != "float8_e4m3fn":  # an end may lie half a step beyond the codes, where the zero point was rounded
        assert (np.abs(values - x) <= np.where(actual == 1, TINY, 1.01 * actual)).all()


def least_of(x: np.ndarray, bound: int) -> np.ndarray:
    return np.minimum(x.min(1), F32(bound))


def most_of(x: np.ndarray, bound: int) -> np.ndarray:
    return np.maximum(x.max(1), F32(bound))


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale_dtype", SCALES)
def test_quantize_gives_no_scale_of_zero(scale_dtype: str) -> None:
    """Every spec in one program, with a row for each size; vmap has a range for each; and some eagerly."""
    rows = {shares: rows_of(SIZES, shares) for shares in (BOTH, POSITIVE)}
    specs = [QuantSpec(d, PerAxis(0), symmetric=s, scale_dtype=scale_dtype) for d, s in DTYPES]
    whole = {spec: QuantSpec(spec.dtype, symmetric=spec.symmetric, scale_dtype=scale_dtype) for spec in specs}

    @jax.jit
    def all_of_them(x: jax.Array) -> Any:
        row_arrays = [jax.vmap(functools.partial(jq.quantize, spec=whole[spec]))(x) for spec in specs]
        ends = [(jnp.minimum(x.min(1, keepdims=True), 0), jnp.maximum(x.max(1, keepdims=True), 0)) for _ in specs]
        ranged_arrays = [jq.quantize(x, spec, range=range_) for spec, range_ in zip(specs, ends, strict=True)]
        return [jq.quantize(x, spec) for spec in specs], row_arrays, ranged_arrays

    for x in rows.values():
        arrays, row_arrays, ranged_arrays = all_of_them(x)
        for spec, q, rows_apart, ranged in zip(specs, arrays, row_arrays, ranged_arrays, strict=True):
            check_array(q, x, spec)
            check_array(ranged, x, spec)
            np.testing.assert_array_equal(np.asarray(rows_apart.codes), np.asarray(q.codes))
            np.testing.assert_array_equal(np.asarray(rows_apart.scale).ravel(), np.asarray(q.scale).ravel())
    for spec in (specs[0], specs[3]):
        check_array(jq.quantize(rows[BOTH], spec), rows[BOTH], spec)
        # What XLA computes when it compiles keeps subnormal numbers, and the rule is the same.
        fixed = jax.jit(lambda spec=spec: jq.quantize(jnp.asarray(rows[BOTH]), spec).scale)()
        np.testing.assert_array_equal(np.asarray(fixed), np.asarray(jq.quantize(rows[BOTH], spec).scale))


def test_scales_and_zero_points_shared_in_other_ways() -> None:
    x = rows_of(SIZES[3:], BOTH)
    for scale, point in ((PerAxis(0), PerTensor()), (PerTensor(), PerAxis(0))):
        spec = QuantSpec("uint8", scale, zero_point_granularity=point)
        q = jq.quantize(x, spec)
        assert (np.asarray(q.scale) >= TINY).all()
        assert np.isfinite(np.asarray(q.dequantize())).all()


def dynamic_reference(x: np.ndarray, low_code: int, high_code: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ONNX Runtime's order of operations, with a normal scale wherever there is a range."""
    x = flushed(x)
    low, high = least_of(x, 0)[:, None], most_of(x, 0)[:, None]
    width = high - low
    scale = np.where(width == 0, F32(1), np.maximum(width / F32(high_code - low_code), TINY)).astype(F32)
    point = np.rint(np.clip(F32(low_code) - low / scale, low_code, high_code))
    return np.clip(np.rint(x / scale) + point, low_code, high_code).astype(int), scale[:, 0], point[:, 0].astype(int)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bounds"), [("uint8", (0, 255)), ("int8", (-127, 127))])
def test_dynamic_quantize_linear_gives_no_scale_of_zero(dtype: str, bounds: tuple[int, int]) -> None:
    """Scales below 2**-126 are 2**-126, alone, per row, under vmap, and where XLA knows x when it compiles."""
    by_row = jax.jit(functools.partial(jq.dynamic_quantize_linear, dtype=dtype, axis=0))
    mapped = jax.jit(jax.vmap(functools.partial(jq.dynamic_quantize_linear, dtype=dtype)))
    for shares in (BOTH, POSITIVE):
        x = rows_of(SIZES, shares)
        expected = dynamic_reference(x, *bounds)
        fixed = jax.jit(lambda x=x: jq.dynamic_quantize_linear(jnp.asarray(x), dtype=dtype, axis=0))
        singles = [jq.dynamic_quantize_linear(row, dtype=dtype) for row in x]
        alone = [np.stack([np.asarray(part[i]) for part in singles]) for i in range(3)]
        for actual in (by_row(x), mapped(x), alone):
            for part, text in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(part), text)
        np.testing.assert_array_equal(np.asarray(fixed().y_scale), expected[1])


@pytest.mark.slow
def test_callers_of_dynamic_ranges() -> None:
    """Fake quantization, its gradient, and the dense layer, of rows whose range is below 3e-36."""
    for shares, size in itertools.product((BOTH, POSITIVE), (2e-36, 2e-38)):
        x = rows_of((size,), shares)
        fake = jq.dynamic_fake_quantize_linear(x)
        assert (np.abs(np.asarray(fake) - x) <= 1.01 * TINY).all()
        slope = jax.grad(lambda x: jq.dynamic_fake_quantize_linear(x).sum())(jnp.asarray(x))
        np.testing.assert_array_equal(slope, np.ones_like(x))
        y = jq.ops.dynamic_quantize_matmul(x, np.eye(5, dtype=np.int8), F32(1e10))
        np.testing.assert_allclose(y, flushed(np.asarray(fake)) * F32(1e10), rtol=1e-6)


@pytest.mark.slow
def test_learned_scales_start_above_zero() -> None:
    """1 for no range, and a normal number for one whose scale would be none."""
    spec, unsigned = QuantSpec("int8", PerAxis(0)), QuantSpec("uint8", PerAxis(0))
    for rule, rule_spec in ((jq.LSQ(), spec), (jq.LSQPlus(), spec), (jq.LSQPlus(), unsigned), (jq.PACT(), unsigned)):
        scale = np.asarray(rule.initial(jnp.asarray(rows_of((1e-30, 1.1e-37, 0.0), POSITIVE)), rule_spec)[0]).ravel()
        assert TINY <= scale[0] < 1e-30, (rule, rule_spec)
        assert TINY <= scale[1] < 2e-37, (rule, rule_spec)
        assert scale[2] == 1, (rule, rule_spec)


@pytest.mark.slow
def test_a_learned_scale_that_float16_rounds_to_zero() -> None:
    """It is the least number of float16, which a product with codes survives."""
    flax = pytest.importorskip("jaxquant.flax")
    linen = pytest.importorskip("jaxquant.flax.linen")
    layer = linen.Dense(2, weight_spec=QuantSpec("int8", scale_dtype="float16"), weight_range=flax.Learned())
    x = jnp.ones((1, 3))
    variables = layer.init(jax.random.key(0), x)
    kernel = jnp.array([[1.0, -1.0], [1.0, 0.0], [0.5, 0.0]])
    small = jax.tree.map(lambda scale: jnp.full_like(scale, 1e-9), variables["scales"])
    y = layer.apply({"params": {**variables["params"], "kernel": kernel}, "scales": small}, x)
    np.testing.assert_array_equal(y, np.array([[3 * 127, -127]], F32) * F32(2**-24))


@pytest.mark.slow
def test_scales_of_repeated_ranges(rng: np.random.Generator) -> None:
    """XLA finds one scale and repeats it; the quotient must not become a product with the reciprocal."""
    spec, x = QuantSpec("uint8"), jnp.ones((2, 3))
    ends = rng.uniform([-4, 0.1], [-0.1, 4], (64, 2)).astype(F32)

    @jax.jit
    def find_scales(ends: jax.Array) -> jax.Array:
        def find_scale(lo: jax.Array, hi: jax.Array) -> jax.Array:
            wide = (jnp.broadcast_to(end, (5,)) for end in (lo, hi))
            return jax.vmap(lambda lo, hi: jq.quantize(x, spec, range=(lo, hi)).scale.reshape(()))(*wide)

        return jax.lax.map(lambda pair: find_scale(*pair), ends)

    want = (ends[:, 1] - ends[:, 0]) / F32(255)
    np.testing.assert_array_equal(find_scales(ends), np.repeat(want[:, None], 5, 1))
