"""Ranges up to the largest number of a dtype: no finite number becomes infinite, and no scale saturates unnoticed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantSpec, ptq

F32 = np.float32
FLOATS = ("float32", "float16", "bfloat16")
# The ends of ranges, as shares of the largest number. The first ones are those of masks.
SHARES = (
    (-1.0, 0.0), (-1.0, 1.0), (0.0, 1.0), (-1.0, 1e-3), (-0.999, 0.999), (-0.5, 1.0), (-1.0, 0.3), (-0.8, 0.8),
    (-0.51, 0.49), (-0.996, 0.6), (-0.99, 0.995),
)  # fmt: skip
DTYPES = ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16")
TABLE = jq.Codebook("table", tuple(np.linspace(-100, 90, 16)))
FLOAT_CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", jq.nf4, TABLE)


def rows_of(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """A row for each range, in float64, with both of its ends and numbers between them."""
    rows = np.array([np.r_[low, high, rng.uniform(low, high, 6)] for low, high in SHARES])
    largest = float(jnp.finfo(dtype).max)
    return np.clip(rows * largest, -largest, largest)


def list_specs(dtype: Any, scale_dtype: str) -> list[QuantSpec]:
    powers = (True,) if scale_dtype == "float8_e8m0fnu" else (False, True)
    if dtype not in DTYPES:
        return [QuantSpec(dtype, PerAxis(0), scale_dtype=scale_dtype, power_of_two=p) for p in powers]
    flags = ((True, True), (True, False), (False, False))
    return [
        QuantSpec(dtype, PerAxis(0), symmetric=s, narrow_range=n, scale_dtype=scale_dtype, power_of_two=p)
        for s, n in flags for p in powers
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT_CODES], ids=str)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_no_finite_number_becomes_infinite(dtype: Any, scale_dtype: str, rng: np.random.Generator) -> None:
    check_ranges(dtype, scale_dtype, FLOATS, rng)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float4_e2m1fn"])
def test_no_float16_becomes_infinite_with_float16_scales(dtype: str, rng: np.random.Generator) -> None:
    check_ranges(dtype, "float16", ("float16",), rng)


def check_ranges(dtype: Any, scale_dtype: str, floats: tuple[str, ...], rng: np.random.Generator) -> None:
    specs = list_specs(dtype, scale_dtype)

    @jax.jit
    def run(x: jax.Array) -> Any:
        low, high = (jnp.minimum(x.min(1, keepdims=True), 0), jnp.maximum(x.max(1, keepdims=True), 0))
        return [(jq.quantize(x, s), jq.quantize(x, s, range=(low, high)), jq.fake_quantize(x, s)) for s in specs]

    for name in floats:
        values = rows_of(rng, name)
        x = jnp.asarray(values, name)
        assert np.isfinite(np.asarray(x, np.float64)).all()
        for spec, (q, ranged, fake) in zip(specs, run(x), strict=True):
            y = np.asarray(q.dequantize(), np.float64)
            assert np.isfinite(y).all(), (spec, name)
            np.testing.assert_array_equal(np.asarray(fake, np.float64), y)
            np.testing.assert_array_equal(np.asarray(ranged.codes), np.asarray(q.codes))
            np.testing.assert_array_equal(np.asarray(ranged.scale, np.float64), np.asarray(q.scale, np.float64))
            # What is lost at the ends. Rounding a 16-bit scale down takes 2**-8 of the range.
            lost = np.abs(y - np.asarray(x, np.float64)).max(1)
            if spec.power_of_two:
                bits = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4}.get(str(spec.dtype), 8)
                share = 0.51 + 2.0**-bits
                allowed = np.full(len(y), share * float(jnp.finfo(name).max))
            elif spec.dtype in {s.dtype for s in map(QuantSpec, DTYPES)}:
                allowed = 1.01 * np.asarray(q.scale, np.float64).ravel() + (scale_dtype != "float32") * 2.0**-6 * (
                    values.max(1) - values.min(1)
                )
            else:
                allowed = np.full(len(y), 0.26 * float(jnp.finfo(name).max))
            assert (lost <= allowed * (1 + 1e-6)).all(), (spec, name, lost / allowed)


NESTED_CODES = (
    ("uint4", True, "uint6"), ("uint2", True, "int6"), ("int4", False, "uint6"), ("int3", False, "int2"),
    ("float8_e4m3fn", False, "uint4"), (TABLE, False, "int8"),
)  # fmt: skip


@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16", "float8_e8m0fnu"])
def test_no_finite_number_becomes_infinite_with_quantized_scales(scale_dtype: str, rng: np.random.Generator) -> None:
    specs = [
        QuantSpec(d, Blocked(-1, 4), offset=o, scale_spec=QuantSpec(inner, granularity, scale_dtype=scale_dtype))
        for d, o, inner in NESTED_CODES for granularity in (PerTensor(), Blocked(-1, 2))
    ]  # fmt: skip

    @jax.jit
    def run(x: jax.Array) -> Any:
        return [(q.dequantize(), q.scale.dequantize()) for q in (jq.quantize(x, s) for s in specs)]

    # Offsets of the first two are near the largest number, and scales that are much smaller than those of other blocks.
    ends = rng.uniform(0.97, 1, (4, 8)) * rng.choice([-1, 1], (4, 1))
    for name in ("float16",) if scale_dtype == "float16" else FLOATS:
        largest = float(jnp.finfo(name).max)
        values = np.clip(
            np.concatenate([ends * largest, rows_of(rng, name), rows_of(rng, name)[:, ::-1]]), -largest, largest
        )
        x = jnp.asarray(values, name)
        assert np.isfinite(np.asarray(x, np.float64)).all()
        for spec, (y, scale) in zip(specs, run(x), strict=True):
            assert np.isfinite(np.asarray(y, np.float64)).all(), (spec, name)
            assert (np.asarray(scale) > 0).all(), (spec, name)


@pytest.mark.parametrize("inner", ["uint6", "int6"])
@pytest.mark.parametrize("offset", [True, False])
def test_a_scale_of_scales_beyond_float16(inner: str, offset: bool) -> None:
    """Values of 1e8 were NaN without an error."""
    scale_spec = QuantSpec(inner, Blocked(-1, 2), scale_dtype="float16")
    spec = QuantSpec("uint4" if offset else "int4", Blocked(-1, 4), offset=offset, scale_spec=scale_spec)
    x = np.ones((2, 16), F32)
    x[1, 3], x[1, 7] = -1e8, 1e9
    scales = "scale of the (scales|offsets)"
    for name, call in (("quantize", jq.quantize), ("fake_quantize", jq.fake_quantize)):
        with pytest.raises(
            ValueError, match=rf"^jaxquant\.{name}: x: expected a range whose {scales} is at most 65504"
        ):
            call(x, spec)
    with pytest.raises(ValueError, match=rf"^jaxquant\.quantize: range: expected a range whose {scales} is at most"):
        jq.quantize(x, spec, range=(-1e9, 1e9))
    for y in (jax.jit(lambda x: jq.quantize(x, spec).dequantize())(x), jax.jit(lambda x: jq.fake_quantize(x, spec))(x)):
        # Two blocks share a scale of scales.
        np.testing.assert_array_equal(np.isfinite(np.asarray(y)), np.arange(32).reshape(2, 16) // 8 != 2)
    x[1, 7] = np.inf
    assert not np.isfinite(np.asarray(jq.quantize(x[1:, 4:8], spec).dequantize())).any()


def test_an_offset_beyond_float16() -> None:
    """The scale of this range is small; the values were infinite without an error."""
    spec = QuantSpec("uint4", PerAxis(0), offset=True, scale_dtype="float16")
    x = np.array([[1, 2, 3], [1e6, 1e6 + 50, 1e6 + 75]], F32)
    with pytest.raises(ValueError, match=r"x: expected a range whose offset is at most 65504, .* the offset 1e\+06$"):
        jq.quantize(x, spec)
    y = np.asarray(jax.jit(lambda x: jq.quantize(x, spec).dequantize())(x))
    np.testing.assert_array_equal(np.isfinite(y), [[True] * 3, [False] * 3])
    # The largest number of bfloat16 is less than that of float32.
    least = np.finfo(F32).min
    wide = np.array([[least, least * F32(0.9)]], F32)
    q = jq.quantize(wide, QuantSpec("uint4", offset=True, scale_dtype="bfloat16"))
    np.testing.assert_allclose(q.dequantize(), wide, rtol=0.01)
    assert np.asarray(q.offset, F32) == float(jnp.finfo("bfloat16").min)


@pytest.mark.parametrize("dtype", FLOATS)
def test_eager_calls_and_gradients(dtype: str) -> None:
    least = float(jnp.finfo(dtype).min)
    x = jnp.asarray([least, -1.0, 0.0, 3.0], dtype)
    for spec in (QuantSpec("uint16"), QuantSpec("int16"), QuantSpec("uint8"), QuantSpec("uint4", Blocked(-1, 2))):
        assert np.isfinite(np.asarray(jq.quantize(x, spec).dequantize(), F32)).all()
        grad = jax.grad(lambda x, s=spec: jq.fake_quantize(x, s).astype(jnp.float32).sum())(x)
        assert np.isfinite(np.asarray(grad, F32)).all()
        assert np.asarray(grad, F32)[1:].all()


def test_scales_and_zero_points_shared_in_other_ways(rng: np.random.Generator) -> None:
    pairs = ((PerAxis(0), PerTensor()), (PerTensor(), PerAxis(0)))
    for scale_dtype, power in (("float32", False), ("bfloat16", False), ("float32", True)):
        specs = [
            QuantSpec(d, s, zero_point_granularity=p, scale_dtype=scale_dtype, power_of_two=power)
            for s, p in pairs for d in ("uint2", "uint8", "uint16")
        ]  # fmt: skip
        run = jax.jit(lambda x, specs=specs: [jq.quantize(x, s).dequantize() for s in specs])
        for rows in (slice(None), [1, 2], [4], [0, 7], [9]):
            x = jnp.asarray(rows_of(rng, "float32")[rows], jnp.float32)
            for spec, y in zip(specs, run(x), strict=True):
                assert np.isfinite(np.asarray(y)).all(), (spec, rows)


def test_an_infinity_still_shows() -> None:
    x = jnp.array([[np.inf, 1.0], [np.nan, 1.0], [-np.inf, 2.0], [3.0, -4.0]])
    for dtype in ("int8", "uint8", "uint16", "float8_e4m3fn", jq.nf4):
        for power in (False, True):
            scale = np.asarray(jq.quantize(x, QuantSpec(dtype, PerAxis(0), power_of_two=power)).scale).ravel()
            np.testing.assert_array_equal(np.isfinite(scale), [False, False, False, True])
            np.testing.assert_array_equal(np.isnan(scale), [False, True, False, False])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float4_e2m1fn", jq.nf4], ids=str)
def test_a_scale_beyond_float16(dtype: Any) -> None:
    """Values of 1e20 were 393024 with float4 codes."""
    spec = QuantSpec(dtype, PerAxis(0), scale_dtype="float16")
    x = np.array([[1.0, -2.0, 0.5], [1e20, -1e20, 3.0]], F32)
    for name, call in (("quantize", jq.quantize), ("fake_quantize", jq.fake_quantize)):
        with pytest.raises(ValueError, match=rf"^jaxquant\.{name}: x: expected a range whose scale is at most 65504"):
            call(x, spec)
    with pytest.raises(ValueError, match=r"^jaxquant\.quantize: range: expected a range whose scale is at most 65504"):
        jq.quantize(x, spec, range=(-1e20, 1e20))
    for y in (jax.jit(lambda x: jq.quantize(x, spec).dequantize())(x), jax.jit(lambda x: jq.fake_quantize(x, spec))(x)):
        assert np.isfinite(np.asarray(y)[0]).all()
        assert not np.isfinite(np.asarray(y)[1]).any()
    # An infinity in the data is no error, as with other scales.
    assert np.isinf(np.asarray(jq.quantize(jnp.array([[np.inf, 1.0]]), spec).scale)).all()
    # The largest scale that float16 has.
    edge = jnp.array([[65504.0 * 6, 0.0]])
    assert np.asarray(jq.quantize(edge, QuantSpec("float4_e2m1fn", PerAxis(0), scale_dtype="float16")).scale) == 65504


@pytest.mark.parametrize("rule", [jq.LSQ(), jq.LSQPlus(), jq.PACT()], ids=lambda r: type(r).__name__)
def test_initial_scales_of_large_values_are_finite(rule: Any, rng: np.random.Generator) -> None:
    """Sums and squares overflow, while the scale does not."""
    x = (np.clip(rng.standard_normal((4, 64)), -3, 3) * np.array([[1.0], [1e20], [1e25], [5e37]])).astype(F32)
    x[3, 0] = np.finfo(F32).max
    spec = QuantSpec("int8", PerAxis(0))
    for initial in (rule.initial, jax.jit(rule.initial, static_argnums=1)):
        scale = np.asarray(initial(x, spec)[0], np.float64).ravel()
        wide = x.astype(np.float64)
        assert np.isfinite(scale).all()
        if isinstance(rule, jq.LSQ):
            expected = 2 * np.abs(wide).mean(1) / np.sqrt(127)
        elif isinstance(rule, jq.PACT):
            expected = np.abs(wide).max(1) / 127
        else:
            expected = np.max([np.abs(wide.mean(1) + k * wide.std(1)) for k in (-3, 3)], 0) / 128
        np.testing.assert_allclose(scale, expected, rtol=1e-5)


def test_optimizer_states_and_caches_of_large_values_are_finite() -> None:
    largest = np.finfo(F32).max
    x = jnp.asarray(np.linspace(-1, 1, 512) * float(largest), jnp.float32)
    from jaxquant.optim.quantize_state import quantize_leaf

    for codebook in (jq.nf4, TABLE):
        spec = QuantSpec(codebook, Blocked(-1, 64), scale_dtype="bfloat16")
        q = quantize_leaf(x, None, function="optim.quantize_state", spec=spec)
        assert np.isfinite(np.asarray(q.dequantize())).all()


@pytest.mark.parametrize(
    "factory", [jq.calibration.minmax, jq.calibration.absmax, jq.calibration.moving_average, jq.calibration.mse]
)
def test_calibrators_of_large_values_give_finite_ranges(factory: Any) -> None:
    largest = np.finfo(F32).max
    spec = QuantSpec("uint16")
    calibrator = factory(spec)
    state = calibrator.init(jnp.zeros(4))
    for sign in (1, -1, 1):
        batch = np.array([-largest, 0.5 * largest, 1.0, largest / 3], F32) * sign
        state = calibrator.update(state, batch)
    lo, hi = calibrator.finalize(state)
    assert np.isfinite(lo).all()
    assert np.isfinite(hi).all()
    y = np.asarray(jq.quantize(batch, spec, range=(lo, hi)).dequantize())
    assert np.isfinite(y).all()


def test_moments_of_large_activations_are_not_said_to_be_infinite() -> None:
    """The squares of 1e19 fit, their sum does not; an infinity and a NaN are still called so."""
    params = {"w": jnp.ones((4, 2))}
    prepared = jq.prepare(lambda p, x: x @ p["w"], params, jnp.ones((8, 4)), rules=jq.recipes.weight_only_int8())
    too_large = r"^jaxquant\.ptq\.collect: batches: expected batches with activations that float32 can square and sum"
    for size, text in (
        (1e19, too_large),
        (3e38, too_large),
        (np.inf, r"^jaxquant\.ptq\.collect: batches: .* a NaN or an infinity"),
        (np.nan, r"^jaxquant\.ptq\.collect: batches: .* a NaN or an infinity"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            ptq.collect(prepared, params, [jnp.ones((8, 4)), jnp.full((8, 4), size, jnp.float32)])
    moments = ptq.second_moments()
    state = moments.update(moments.init(jnp.zeros((1, 4))), jnp.full((8, 4), 1e19))
    with pytest.raises(ValueError, match=r"state: expected numbers with products .* got magnitudes of up to 1e\+19"):
        moments.finalize(state)
