"""`quantize`: the codes of the ONNX operator under the scales of the text, however it is called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from onnxruntime.quantization import quant_utils

import jaxquant as jq

from ..cases.quantized_arrays import CASES, SHAPE, check_equal, check_parts, draw_inputs, spec_of
from ..oracles import array_text, onnx_runtime, onnx_text
from ..oracles.array_text import F32
from ..support import inputs

Drawn = tuple[np.ndarray, jq.QuantSpec, np.ndarray, np.ndarray | None, np.ndarray]


def compared(values: np.ndarray, spec: jq.QuantSpec) -> np.ndarray:
    """Where the operator, which has no narrow range, gives the same: not for the NaN that it makes the lowest code."""
    return np.isfinite(values.astype(F32)) if spec.narrow_range else np.ones(values.shape, bool)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(CASES))
def test_the_integers_are_those_of_the_text_and_of_the_operators(rng: np.random.Generator, case: str) -> None:
    name, granularity, options = CASES[case]
    spec = spec_of(name, granularity, **options)
    compiled = jax.jit(lambda x: jq.quantize(x, spec))
    for _ in range(3):
        x = draw_inputs(rng, spec, granularity)
        q = jq.quantize(x, spec)
        want = check_parts(q, x, spec, granularity)
        check_equal(q.dequantize(), want)
        check_parts(compiled(x), x, spec, granularity)
        view = jq.onnx_view(q)
        check_equal(jq.dequantize_linear(**view._asdict()), want)
        operator = jq.quantize_linear(
            x, view.x_scale, view.x_zero_point, axis=view.axis, block_size=view.block_size,
            output_dtype=view.x.dtype, precision=jnp.float32,
        )  # fmt: skip
        alike = compared(want, spec)
        check_equal(np.asarray(operator)[alike], np.asarray(q.codes)[alike])


@pytest.mark.parametrize(
    "case", [c for c, (name, _, options) in CASES.items() if name in onnx_text.BOUNDS and not options]
)
def test_onnx_runtime_gives_the_same_through_the_view(rng: np.random.Generator, case: str) -> None:
    name, granularity, _ = CASES[case]
    spec = spec_of(name, granularity)
    x = draw_inputs(rng, spec, granularity)
    q = jq.quantize(x, spec)
    codes, scale, point, axis, block_size, _ = jq.onnx_view(q)
    point = jnp.zeros(scale.shape, codes.dtype) if point is None else point
    attributes: dict[str, Any] = {"axis": axis, "block_size": block_size}
    feeds = {"s": np.asarray(scale), "z": np.asarray(point)}
    (want,) = onnx_runtime.run("QuantizeLinear", {"x": x, **feeds}, {"y": onnx_text.dtype(name)}, 25, **attributes)
    alike = compared(np.asarray(q.dequantize()), spec)
    check_equal(np.asarray(codes)[alike], want[alike])
    (values,) = onnx_runtime.run("DequantizeLinear", {"x": np.asarray(codes), **feeds}, {"y": F32}, 25, **attributes)
    check_equal(q.dequantize(), values)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "int8", "narrow_range": True, "symmetric": False}], ids=["uint8", "int8"]
)
@pytest.mark.parametrize("size", [0, 1, 7, 5000])
def test_per_tensor_is_dynamic_quantize_linear(rng: np.random.Generator, size: int, options: dict[str, Any]) -> None:
    name = options.get("dtype", "uint8")
    spec = jq.QuantSpec(**{"dtype": "uint8", **options})
    compiled = jax.jit(lambda x: jq.quantize(x, spec))
    for extreme in (None, np.nan, -np.inf, np.inf, 0.0, "positive", "negative"):
        x = (rng.normal(rng.normal(), 1, size) * np.exp(rng.uniform(-9, 9))).astype(F32)
        if isinstance(extreme, str):
            x = np.abs(x) if extreme == "positive" else -np.abs(x)
        elif extreme is not None and size:
            x[rng.integers(size)] = extreme
        want = jq.dynamic_quantize_linear(x, dtype=name)
        for q in (jq.quantize(x, spec), compiled(x)):
            check_equal(q.codes, want.y)
            check_equal(q.scale.reshape(()), want.y_scale)
            check_equal(q.zero_point.reshape(()), want.y_zero_point)
        text = onnx_text.dynamic_quantize_linear(x, (0, 255) if name == "uint8" else (-127, 127))
        check_equal(q.codes, text[0].astype(name))
        if name == "uint8":
            feeds = {"y": np.uint8, "y_scale": np.float32, "y_zero_point": np.uint8}
            results = onnx_runtime.run("DynamicQuantizeLinear", {"x": x}, feeds, 11)
            if size and np.isfinite(x).all():
                check_equal(q.codes, results[0])
                check_equal(q.scale.reshape(()), results[1])


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "uint16", "int4", "uint4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_onnx_runtime_s_quantizer(rng: np.random.Generator, name: str, symmetric: bool) -> None:
    """Its own scales are taken in float64, so that a scale or a zero point on a tie may differ in the last place."""
    spec = jq.QuantSpec(onnx_text.dtype(name), symmetric=symmetric, narrow_range=False)
    full = onnx_text.BOUNDS[name]
    narrow = symmetric and full[0] < 0
    spec = jq.QuantSpec(onnx_text.dtype(name), symmetric=symmetric, narrow_range=narrow)
    low, high = full[0] + narrow, full[1]
    limits = (np.array(low, onnx_text.dtype(name)), np.array(high, onnx_text.dtype(name)))
    for _ in range(40):
        ends = np.sort(rng.normal(rng.normal(), 1, 2) * np.exp(rng.uniform(-9, 9))).astype(F32)
        wide = (F32(min(ends[0], 0)), F32(max(ends[1], 0)))
        q = jq.quantize(np.zeros((), F32), spec, range=wide)
        if symmetric and full[0] == 0:  # one step more below the middle code than above: its range ends sooner
            np.testing.assert_array_equal(
                q.scale, np.maximum(wide[0] / F32(-(high + 1) // 2), wide[1] / F32(high // 2))
            )
            assert int(q.zero_point) == (high + 1) // 2
            continue
        point, scale = quant_utils.compute_scale_zp(
            np.asarray(wide[0]), np.asarray(wide[1]), *limits, symmetric=symmetric
        )
        if symmetric:
            assert q.zero_point is None
            check_equal(q.scale, scale.astype(F32))
            assert point == 0
        else:
            np.testing.assert_array_max_ulp(np.asarray(q.scale), scale.astype(F32), 1)
            exact = low - np.float64(wide[0]) / (np.float64(wide[1]) - np.float64(wide[0])) * (high - low)
            # The width, the scale, the quotient and the difference are rounded to float32.
            assert abs(int(q.zero_point) - exact) <= 0.5 + 4 * 2.0**-24 * (high - low)
            assert abs(int(q.zero_point) - int(point)) <= 1


HELD = {
    "float16": {"scale_dtype": jnp.float16},
    "bfloat16": {"scale_dtype": jnp.bfloat16},
    "float8_e8m0fnu": {"scale_dtype": jnp.float8_e8m0fnu},
    "power of two": {"power_of_two": True},
    "power of two in float16": {"power_of_two": True, "scale_dtype": jnp.float16},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["int8", "uint4", "uint8 symmetric"])
@pytest.mark.parametrize("kind", list(HELD))
def test_a_scale_is_rounded_up_and_no_further(rng: np.random.Generator, kind: str, name: str) -> None:
    """The least value of its dtype that is no less, and so no value of the range is off by more than half a step."""
    name, _, symmetric = name.partition(" ")
    options: dict[str, Any] = {"symmetric": True} if symmetric else {}
    spec = jq.QuantSpec(onnx_text.dtype(name), jq.PerAxis(0), **options, **HELD[kind])
    plain = jq.QuantSpec(onnx_text.dtype(name), jq.PerAxis(0), **options)
    steps = 255 if name != "uint4" else 15
    exponents = rng.uniform(-13 if "float16" in kind and "b" not in kind else -60, 9, 400)
    x = (rng.normal(size=(400, 8)) * np.exp(exponents)[:, None]).astype(F32)
    # Ranges whose scale is a value of the dtype, and those one float beside it.
    bounds = np.ldexp(rng.integers(1, 8, 90), rng.integers(-12, 9, 90)).astype(F32) * F32(
        steps if not symmetric else 127
    )
    bounds = np.where(
        np.arange(90) % 3 == 0, bounds, np.nextafter(bounds, np.where(np.arange(90) % 3 == 1, F32(0), F32(9e9)))
    )
    x[:90] = 0
    x[:90, 0] = bounds
    q = jq.quantize(x, spec)
    exact = np.asarray(jq.quantize(x, plain).scale)
    scale = np.asarray(q.scale)
    check_equal(scale, array_text.store_scale(exact, np.dtype(spec.scale_dtype).name, spec.power_of_two))
    assert (scale.astype(F32) >= exact).all()
    error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - x.astype(np.float64))
    # Half a step; what more there is comes of the zero point, which is rounded once, and of the float32 product.
    tolerance = 0.5 + 2.0**-23 * steps
    if spec.fixed_zero_point is None:
        wide = scale.astype(np.float64)
        start = np.minimum(x.min(axis=1, keepdims=True), 0) / wide
        point = np.asarray(q.zero_point).astype(np.int64)
        low, high = (0 - point) * wide, (steps - point) * wide
        beyond = np.maximum(np.maximum(low - x, x - high), 0) / wide
        assert beyond.max() <= tolerance, start
    assert (error / scale.astype(np.float64)).max() <= tolerance


def test_a_float16_scale_at_its_ends() -> None:
    """A larger scale is infinite where the range is traced, since the numbers would saturate unnoticed."""
    spec = jq.QuantSpec("int8", jq.PerAxis(0), scale_dtype=jnp.float16)
    x = jnp.array([[1e-30], [1e9], [65504.0 * 127], [0.0], [np.inf], [np.nan]], jnp.float32)
    actual = np.asarray(jax.jit(lambda x: jq.quantize(x, spec).scale)(x)).ravel().astype(np.float64)
    np.testing.assert_array_equal(actual, [2.0**-24, np.inf, 65504.0, 1.0, np.inf, np.nan])
    with pytest.raises(ValueError, match=r"^jaxquant.quantize: x: expected a range whose scale is at most 65504"):
        jq.quantize(x, spec)
    e8m0 = jq.quantize(x, jq.QuantSpec("int8", jq.PerAxis(0), scale_dtype=jnp.float8_e8m0fnu)).scale
    expected = [2.0**-106, 2.0**23, 2.0**16, 1.0, np.nan, np.nan]
    np.testing.assert_array_equal(np.asarray(e8m0).ravel().astype(F32), expected)


@pytest.mark.parametrize("name", ["uint8", "int4", "uint2"])
def test_one_scale_with_a_zero_point_for_each_row(rng: np.random.Generator, name: str) -> None:
    options: dict[str, Any] = {"symmetric": False, "zero_point_granularity": jq.PerAxis(0)}
    spec = jq.QuantSpec(onnx_text.dtype(name), **options)
    x = (rng.normal(size=(6, 9)) + rng.normal(0, 3, (6, 1))).astype(F32)
    q = jq.quantize(x, spec)
    assert (q.scale.shape, q.zero_point.shape) == ((1, 1), (6, 1))
    low, high = array_text.extremes(x, (1, 9))
    limits = onnx_text.BOUNDS[name]
    scale = ((high - low).max(keepdims=True) / F32(limits[1] - limits[0])).astype(F32)
    check_equal(q.scale, scale)
    check_equal(
        q.zero_point,
        array_text.zero_points(low, np.broadcast_to(scale, low.shape), limits).astype(onnx_text.dtype(name)),
    )
    error = np.abs(np.asarray(q.dequantize()) - x) / np.asarray(q.scale)
    assert error.max() <= 1 + 1e-4  # half a step of rounding, half a step of the zero point's own at the ends
    view = jq.onnx_view(q)
    check_equal(jq.dequantize_linear(**view._asdict()), q.dequantize())


@pytest.mark.parametrize("name", ["uint8", "int4", "uint2"])
def test_one_zero_point_with_a_scale_for_each_row(rng: np.random.Generator, name: str) -> None:
    """No value of the range saturates, however the rows differ."""
    spec = jq.QuantSpec(
        onnx_text.dtype(name), jq.PerAxis(0), symmetric=False, zero_point_granularity=jq.PerTensor()
    )  # fmt: skip
    low, high = onnx_text.BOUNDS[name]
    for case in ("mixed", "one small negative", "positive", "negative", "one small positive"):
        x = (rng.normal(size=(6, 9)) * np.exp(rng.uniform(-3, 3, (6, 1)))).astype(F32)
        if case != "mixed":
            x = np.abs(x) * F32(-1 if case in ("negative", "one small positive") else 1)
        if case.startswith("one"):
            x[2] *= F32(-1e-4)
        q = jq.quantize(x, spec)
        assert (q.scale.shape, q.zero_point.shape) == ((6, 1), (1, 1))
        point = int(q.zero_point[0, 0])
        assert point == low or (x < 0).any()
        assert point == high or (x > 0).any()
        scale = np.asarray(q.scale).astype(np.float64)
        assert ((low - point) * scale <= x + 1e-6 * (np.abs(x) + scale)).all()
        assert ((high - point) * scale >= x - 1e-6 * (np.abs(x) + scale)).all()
        error = np.abs(np.asarray(q.dequantize()).astype(np.float64) - x) / scale
        assert error.max() <= 0.5 + 1e-4


def test_a_given_range(rng: np.random.Generator) -> None:
    """Scalars, Python numbers, and arrays of the scale's shape or with 1 in places; values beyond it saturate."""
    spec = jq.QuantSpec("uint8", jq.PerAxis(1))
    sizes = (5, 1, 7)
    low = -np.exp(rng.normal(size=(1, 6, 1))).astype(F32)
    high = np.exp(rng.normal(size=(1, 6, 1))).astype(F32)
    scale, point = array_text.parameters(low, high, "uint8", False, False)
    assert point is not None
    wide, steps = (array_text.spread(p, sizes, SHAPE) for p in (scale, point))
    x = inputs.near_ties(rng, wide, steps, (0, 255), np.dtype(F32))  # some beyond both ends, infinities and NaN too
    want = array_text.codes(x, wide, steps, "uint8", False)
    bounds = (low, high)
    for q in (
        jq.quantize(x, spec, range=bounds),
        jax.jit(lambda x, lo, hi: jq.quantize(x, spec, range=(lo, hi)))(x, *bounds),
    ):
        check_equal(q.scale, scale)
        check_equal(q.zero_point, point.astype(np.uint8))
        check_equal(q.codes, want)
    shared = jq.quantize(x, spec, range=(low, np.full((1, 1, 1), 2.5, F32)))
    check_equal(shared.codes, jq.quantize(x, spec, range=(low, np.full((1, 6, 1), 2.5, F32))).codes)
    ends = jq.quantize(x, spec, range=(-1, 2.5))
    for lo, hi in (
        (F32(-1), F32(2.5)),
        (jnp.float16(-1), jnp.bfloat16(2.5)),
        (np.float64(-1), np.full((1, 1, 1), 2.5, F32)),
    ):
        other = jq.quantize(x, spec, range=(lo, hi))
        check_equal(other.codes, ends.codes)
        check_equal(other.scale, ends.scale)
    away = jq.quantize(x, spec, range=(1.0, 2.0))  # widened to hold 0
    check_equal(away.scale, np.full((1, 6, 1), F32(2) / F32(255)))
    check_equal(away.zero_point, np.zeros((1, 6, 1), np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(rng: np.random.Generator, dtype: str) -> None:
    for case in ("int8 axis", "uint8 tensor", "int4 blocked"):
        name, granularity, options = CASES[case]
        spec = spec_of(name, granularity, **options)
        x = draw_inputs(rng, spec, granularity, onnx_text.dtype(dtype))
        q = jq.quantize(x, spec)
        check_equal(q.dequantize(), check_parts(q, x, spec, granularity))
        check_equal(jq.dequantize_linear(**jq.onnx_view(q)._asdict()), q.dequantize())


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1), (1,)])
def test_empty_and_rank_0(shape: tuple[int, ...]) -> None:
    x = np.full(shape, -2.5, F32)
    specs = [jq.QuantSpec("int8"), jq.QuantSpec("uint4")]
    specs += [jq.QuantSpec("uint8", g) for g in (jq.PerAxis(-1), jq.Blocked(0, 2)) if shape]
    for spec in specs:
        for q in (jq.quantize(x, spec), jax.jit(lambda x, spec=spec: jq.quantize(x, spec))(x)):
            assert q.shape == shape
            assert q.scale.ndim == len(shape)
            np.testing.assert_allclose(q.dequantize(), x, rtol=1e-6)
            view = jq.onnx_view(q)
            check_equal(jq.dequantize_linear(**view._asdict()), q.dequantize())
    assert jq.quantize(-2.5, jq.QuantSpec("int8")).dequantize().shape == ()
    ones = jq.quantize(np.zeros((0, 3), F32), jq.QuantSpec("int8", jq.PerAxis(1))).scale
    check_equal(ones, np.ones((1, 3), F32))


TRANSFORMED = ("int8 axis", "uint8 tensor", "int4 blocked", "uint4 e8m0", "uint16 axes", "float8_e4m3fn")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", TRANSFORMED)
def test_under_vmap_and_scan(rng: np.random.Generator, case: str) -> None:
    name, granularity, options = CASES[case]
    spec = spec_of(name, granularity, **options)
    x = np.stack([draw_inputs(rng, spec, granularity) for _ in range(3)])
    loop = [jq.quantize(row, spec) for row in x]
    expected = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *loop)
    mapped = jax.vmap(lambda x: jq.quantize(x, spec))(x)
    scanned = jax.jit(lambda x: lax.scan(lambda carry, row: (carry, jq.quantize(row, spec)), None, x)[1])(x)
    values = np.stack([np.asarray(q.dequantize()) for q in loop])
    for actual in (mapped, scanned):
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for leaf, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            check_equal(leaf, w)
        check_equal(actual.dequantize(), values)  # the stack as one array
        check_equal(jax.vmap(lambda q: q.dequantize())(actual), values)
        check_equal(jax.jit(lambda q: lax.scan(lambda c, q: (c, q.dequantize()), None, q)[1])(actual), values)


def test_no_gradient_flows(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4)).astype(F32)
    spec = jq.QuantSpec("uint8", jq.PerAxis(0))
    loss = lambda *a: jq.quantize(a[0], spec, range=a[1:] or None).dequantize().sum()  # noqa: E731
    for gradient in (jax.grad(loss)(x), *jax.grad(loss, argnums=(0, 1, 2))(x, jnp.float32(-1), jnp.float32(1))):
        assert not np.asarray(gradient).any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("granularity", ["tensor", "axes", "blocked"])
def test_eight_devices_give_the_same(rng: np.random.Generator, granularity: str, kind: AxisType) -> None:
    x = rng.normal(size=(8, 16, 24)).astype(F32)
    spec = spec_of("uint8", granularity)
    expected = jq.quantize(x, spec)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    for axis in (0, 2):
        place = NamedSharding(mesh, PartitionSpec(*("d" if a == axis else None for a in range(3))))
        actual = jax.jit(lambda x: jq.quantize(x, spec))(jax.device_put(x, place))
        assert len(actual.codes.sharding.device_set) == 8
        for leaf, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            check_equal(leaf, w)
        check_equal(actual.dequantize(), expected.dequantize())


@pytest.mark.parametrize("granularity", [jq.PerTensor(), jq.PerAxis(0), jq.PerAxis(1), jq.Blocked(-1, 32)], ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4"])
def test_a_gibibyte_takes_no_second_one(name: str, granularity: jq.PerTensor | jq.PerAxis | jq.Blocked) -> None:
    """What the program holds at once, by XLA's own account: x, the result, and its working memory."""
    spec = jq.QuantSpec(onnx_text.dtype(name), granularity)
    x = jax.ShapeDtypeStruct((16384, 16384), jnp.float32)
    memory = jax.jit(lambda x: jq.quantize(x, spec)).lower(x).compile().memory_analysis()
    assert memory is not None
    total_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert 2**30 < total_bytes < 1.6 * 2**30
    q = jax.eval_shape(lambda x: jq.quantize(x, spec), x)
    analysis = jax.jit(lambda q: q.dequantize()).lower(q).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2**20


def test_a_range_wider_than_a_float32() -> None:
    """Its ends are float32, its width is none; the scale is."""
    x = np.array([-2e38, 0, 2e38, 3e38], np.float32)
    for q in (jq.quantize(x, jq.QuantSpec(jnp.uint8)), jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-2e38, 3e38))):
        values = np.asarray(q.dequantize(), np.float64)
        assert np.abs(values - x.astype(np.float64)).max() <= 0.5001 * 5e38 / 255


def test_one_element_is_a_range_for_every_rank(rng: np.random.Generator) -> None:
    """Calibrated on batches of one rank, used on another."""
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    spec = jq.QuantSpec(jnp.uint8)
    result = jq.quantize(x, spec, range=(np.full((1, 1), -2, np.float32), np.full((1, 1), 2, np.float32)))
    np.testing.assert_array_equal(result.codes, jq.quantize(x, spec, range=(-2.0, 2.0)).codes)
    assert result.scale.shape == (1, 1, 1)


@pytest.mark.slow
def test_a_range_is_a_pair() -> None:
    x, spec = jnp.array([-1.0, 0.3, 2.0]), jq.QuantSpec(jnp.uint8)
    pairs: Any = ((-1.0, 1.55), [-1.0, 1.55], jq.Range(jnp.float32(-1), jnp.float32(1.55)))
    same_parts = [jq.quantize(x, spec, range=(-1.0, 1.55)), *(jq.quantize(x, spec, range=ends) for ends in pairs)]
    for q in same_parts[1:]:
        for part, other in zip(jax.tree.leaves(q), jax.tree.leaves(same_parts[0]), strict=True):
            np.testing.assert_array_equal(part, other)
    for ends, error, text in (
        (1.0, TypeError, r"quantize: range: expected a pair \(lo, hi\), .*, got 1\.0"),
        ((1.0,), TypeError, r"range: expected a pair"),
        ((-1.0, None), TypeError, r"range: expected a pair \(lo, hi\)"),
        ((2.0, 1.0), ValueError, r"range: expected a pair \(lo, hi\) with lo at most hi, got more"),
    ):
        with pytest.raises(error, match=text):
            jq.quantize(x, spec, ends)  # type: ignore[arg-type]
