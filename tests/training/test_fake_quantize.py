"""`fake_quantize` going forward: the bits of `quantize` and `dequantize`, and of numpy, however it is called."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..cases import gradient_rules, quantized_arrays
from ..cases.quantized_arrays import GRANULARITIES, SHAPE, check_equal
from ..oracles import array_text, onnx_text
from ..oracles import gradient_rules_text as rules
from ..oracles.array_text import F32
from ..support import inputs, transforms
from ..support.matrix import mark_others_full


def differentiated(spec: jq.QuantSpec, rule: Any, *args: Any) -> Any:
    """y as a forward pass under differentiation computes it."""
    return jax.vjp(lambda *a: jq.fake_quantize(a[0], spec, *a[1:], gradient=rule), *args)[0]


# Another granularity, range or scale dtype of a dtype that is there; under `full`.
MORE = (
    *("int8 blocked", "int8 blocked both", "uint8 tensor", "uint8 symmetric", "uint8 power of two", "uint4 e8m0"),
    *("int2 ternary", "uint16 float16"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", mark_others_full(quantized_arrays.CASES, set(quantized_arrays.CASES) - set(MORE)))
def test_a_scale_that_is_found(rng: np.random.Generator, case: str) -> None:
    """Ties and one float beside them, infinities, NaN, slices of zeros; eagerly, under jit and under grad."""
    name, granularity, options = quantized_arrays.CASES[case]
    spec = quantized_arrays.spec_of(name, granularity, **options)
    compiled = jax.jit(lambda x: (jq.fake_quantize(x, spec), differentiated(spec, jq.LSQPlus(), x)))
    for i in range(3):
        x = quantized_arrays.draw_inputs(rng, spec, granularity)
        q = jq.quantize(x, spec)
        expected = quantized_arrays.check_parts(q, x, spec, granularity)
        check_equal(q.dequantize(), expected)
        for actual in (*compiled(x), *([jq.fake_quantize(x, spec)] if i == 0 and granularity.startswith("a") else [])):
            check_equal(actual, expected)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", list(gradient_rules.CASES))
def test_a_scale_that_is_given(rng: np.random.Generator, case: str) -> None:
    """Ends, ties and one float beside them, infinities and NaN; a zero point as an integer and as a float."""
    name = gradient_rules.CASES[case][0]
    spec = gradient_rules.spec_of(case)
    levels = gradient_rules.BOOKS[name].levels if name in gradient_rules.BOOKS else None
    compiled = jax.jit(
        lambda x, s, *points: [
            f(x, s, z)
            for z in points
            for f in (
                lambda x, s, z: jq.fake_quantize(x, spec, s, z),
                functools.partial(differentiated, spec, jq.StraightThrough()),
            )
        ]
    )
    for _ in range(3):
        d = gradient_rules.draw_problem(rng, case)
        x = np.where(rng.random(SHAPE) < 0.05, rng.choice(inputs.EXTREMES, SHAPE), d.x).astype(F32)
        wide = array_text.spread(d.scale, d.each, SHAPE)
        point = d.steps.point if d.steps.point.any() else None
        with np.errstate(over="ignore"):
            expected = rules.values(rules.steps(x, wide, point, name, bool(spec.narrow_range), levels), np.dtype(F32))
        for actual in (*compiled(x, d.scale, d.point, d.learned), jq.fake_quantize(x, spec, d.scale, d.learned)):
            check_equal(actual, expected)


HALF_DTYPES = ("float16", "bfloat16")
HALVES = [(case, dtype) for case in ("uint4", "int8", "uint16", "float8_e4m3fn", "nf4") for dtype in HALF_DTYPES]
SOME_HALVES = [("uint4", "float16"), ("int8", "bfloat16"), ("nf4", "bfloat16"), ("float8_e4m3fn", "float16")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "dtype"), mark_others_full(HALVES, SOME_HALVES))
def test_halves(rng: np.random.Generator, case: str, dtype: str) -> None:
    """Divided and multiplied in float32, rounded once to the dtype of x, whatever the dtype of the scale."""
    name = gradient_rules.CASES[case][0]
    spec, kind = gradient_rules.spec_of(case), onnx_text.dtype(dtype)
    levels = gradient_rules.BOOKS[name].levels if name in gradient_rules.BOOKS else None
    d = gradient_rules.draw_problem(rng, case)
    scale = np.exp(rng.uniform(-5, -3, d.scale.shape)).astype(F32)
    wide = array_text.spread(scale, d.each, SHAPE)
    x = (d.steps.u * wide).astype(kind)
    point = d.steps.point if d.steps.point.any() else None
    narrow_scale = scale.astype(kind)
    for s, wide_scale in ((scale, wide), (narrow_scale, array_text.spread(narrow_scale, d.each, SHAPE))):
        expected = rules.values(rules.steps(x, wide_scale, point, name, bool(spec.narrow_range), levels), kind)
        for actual in (jq.fake_quantize(x, spec, s, d.point), differentiated(spec, jq.LSQ(), x, s, d.learned)):
            check_equal(actual, expected)
    check_equal(jq.fake_quantize(x, spec), jq.quantize(x, spec).dequantize())
    mixed = jq.fake_quantize(x.astype(F32), spec, narrow_scale, d.point)
    check_equal(np.asarray(mixed).astype(kind), expected)


OF_TRANSFORMS = [("uint4", t) for t in transforms.ALL] + [
    ("float8_e4m3fn", t) for t in ("scan", "fused", "vmap_batched")
]


@pytest.mark.parametrize(("case", "transform"), OF_TRANSFORMS)
def test_under_transforms(rng: np.random.Generator, case: str, transform: str) -> None:
    spec = gradient_rules.spec_of(case)
    name = gradient_rules.CASES[case][0]
    problems = [gradient_rules.draw_problem(rng, case) for _ in range(4)]
    points = [d.point for d in problems]
    args = [np.stack([d.x for d in problems]), np.stack([d.scale for d in problems])]
    args += [np.stack([z for z in points if z is not None])] if points[0] is not None else []

    def call(*a: Any) -> jax.Array:
        return jq.fake_quantize(a[0], spec, *a[1:])

    expected = []
    for d in problems:
        problem = problems[0] if transforms.is_shared(transform) else d
        wide = array_text.spread(problem.scale, d.each, SHAPE)
        point = problem.steps.point if problem.steps.point.any() else None
        expected.append(rules.values(rules.steps(d.x, wide, point, name, bool(spec.narrow_range)), np.dtype(F32)))
    actual = transforms.ALL[transform](call, tuple(args))
    assert transforms.mismatches(actual, np.stack(expected)) == 0


@pytest.mark.slow
def test_ways_to_write_a_scale(rng: np.random.Generator) -> None:
    """A number, a scalar, one element, 1 in places of the shape, an int for a zero point, numpy and JAX."""
    x = rng.normal(size=SHAPE).astype(F32)
    spec = jq.QuantSpec(jnp.uint4, jq.Blocked(2, 3))
    scales = np.full((5, 6, 3), 0.25, F32)
    expected = rules.values(rules.steps(x, np.full(SHAPE, F32(0.25)), np.full(SHAPE, 7), "uint4"), np.dtype(F32))
    part = rng.uniform(0.1, 0.4, (1, 6, 1)).astype(F32)
    of_part = rules.steps(x, np.broadcast_to(part, SHAPE), np.full(SHAPE, 7), "uint4")
    points = (7, np.uint8(7).astype(spec.carrier), np.full((1,), 7, spec.carrier), np.full((5, 6, 3), 7, spec.carrier),
              jnp.full((1, 6, 1), 7.5 - 2.0**-20), 7.25, np.int64(7))  # fmt: skip
    for point in points:
        for scale in (0.25, F32(0.25), jnp.float32(0.25), np.full(1, 0.25, F32), scales, jnp.bfloat16(0.25)):
            check_equal(jq.fake_quantize(x, spec, scale, point), expected)
        check_equal(jq.fake_quantize(x, spec, part, point), rules.values(of_part, np.dtype(F32)))
    check_equal(jq.fake_quantize(x, spec, 0.25, 7.5), jq.fake_quantize(x, spec, 0.25, 8))  # half to even
    traced = jax.jit(lambda point: jq.fake_quantize(x, spec, 0.25, point))  # which cannot be looked at, and is cut
    check_equal(traced(F32(-3)), jq.fake_quantize(x, spec, 0.25, 0))
    check_equal(traced(F32(99)), jq.fake_quantize(x, spec, 0.25, 15))
    symmetric = jq.QuantSpec(jnp.uint8, symmetric=True)  # its fixed zero point, 128, and its lowest code, 1
    steps = rules.steps(x * F32(99), np.full(SHAPE, F32(0.25)), np.full(SHAPE, 128), "uint8", narrow=True)
    for actual in (jq.fake_quantize(x * F32(99), symmetric, 0.25), jq.fake_quantize(x * F32(99), symmetric, 0.25, 128)):
        check_equal(actual, rules.values(steps, np.dtype(F32)))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_empty_and_rank_0(shape: tuple[int, ...]) -> None:
    x = np.full(shape, -2.3, F32)
    specs = [jq.QuantSpec("uint4"), jq.QuantSpec(jq.nf4), jq.QuantSpec("float8_e5m2")]
    specs += [jq.QuantSpec("uint8", g) for g in (jq.PerAxis(-1), jq.Blocked(0, 2)) if shape]
    for spec in specs:
        q = jq.quantize(x, spec)
        check_equal(jq.fake_quantize(x, spec), q.dequantize())
        for rule in (jq.StraightThrough(), jq.LSQPlus()):
            y, vjp = jax.vjp(
                lambda x, s, z, r=rule, spec=spec: jq.fake_quantize(x, spec, s, z, r), x, q.scale, q.zero_point
            )
            check_equal(y, q.dequantize())
            dx, ds, _ = vjp(jnp.ones(shape))
            assert (dx.shape, ds.shape) == (shape, q.scale.shape)
            assert np.isfinite(ds).all()
            if x.size == 0:
                assert not np.asarray(ds).any()
    assert jq.fake_quantize(-2.3, jq.QuantSpec("int8"), 0.5).shape == ()
    assert float(jq.fake_quantize(-2.3, jq.QuantSpec("int8"), 0.5)) == -2.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("granularity", ["tensor", "blocked"])
def test_eight_devices_give_the_same(rng: np.random.Generator, granularity: str, kind: AxisType) -> None:
    """The bits of y and dx, and the sums but for their order."""
    spec = jq.QuantSpec(jnp.uint8, GRANULARITIES[granularity][0])
    x, g = rng.normal(size=(2, 8, 16, 24)).astype(F32)
    q = jq.quantize(x, spec)
    point = np.asarray(q.zero_point, F32) + F32(0.3)

    @jax.jit
    def find_gradients(x: Any, scale: Any, point: Any, g: Any) -> Any:
        y, vjp = jax.vjp(lambda *a: jq.fake_quantize(a[0], spec, *a[1:], gradient=jq.LSQPlus()), x, scale, point)
        return y, jq.fake_quantize(x, spec), *vjp(g)

    single = find_gradients(x, q.scale, point, g)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    for axis in (0, 2):
        place = NamedSharding(mesh, PartitionSpec(*("d" if a == axis else None for a in range(3))))
        actual = find_gradients(jax.device_put(x, place), q.scale, point, jax.device_put(g, place))
        assert len(actual[0].sharding.device_set) == 8
        for have, expected in zip(actual[:3], single[:3], strict=True):
            check_equal(have, expected)
        for have, expected in zip(actual[3:], single[3:], strict=True):
            np.testing.assert_allclose(have, expected, rtol=1e-5, atol=1e-5)


INT8, UINT4, BLOCKS = jq.QuantSpec(jnp.int8), jq.QuantSpec(jnp.uint4), jq.QuantSpec(jnp.int4, jq.Blocked(1, 4))
X = np.ones((3, 10), F32)
ONE = np.ones((), F32)
BAD: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "x of int32": ((X.astype(np.int32), INT8), TypeError, "x: expected dtype float32, .*, got int32"),
    "x a list": (([1.0], INT8), TypeError, "x: expected an array, got list"),
    "no spec": ((X, jnp.int8), TypeError, "spec: expected a QuantSpec, got"),
    "an axis too many": (
        (X, jq.QuantSpec(jnp.int8, jq.PerAxis(2))),
        ValueError,
        r"axis: expected .*\[-2, 1\].*, got 2",
    ),
    "a scale of int8": ((X, INT8, ONE.astype(np.int8)), TypeError, "scale: expected dtype float32, .*, got int8"),
    "a scale a list": ((X, INT8, [1.0]), TypeError, "scale: expected an array, got list"),
    "a scale per row": ((X, INT8, X[:, :1]), ValueError, r"scale: expected .*\(1, 1\).*, got shape \(3, 1\)"),
    "a scale of rank 1": ((X, BLOCKS, X[0, :3]), ValueError, r"scale: expected .*\(3, 3\).*, got shape \(3,\)"),
    "a block too many": ((X, BLOCKS, X[:, :4]), ValueError, r"scale: expected .*\(3, 3\).*, got shape \(3, 4\)"),
    "a scale for each": ((X, BLOCKS, X), ValueError, r"scale: expected .*\(3, 3\).*, got shape \(3, 10\)"),
    "a point alone": ((X, INT8, None, 0), ValueError, "zero_point: expected None, because scale is None, got"),
    "no point": ((X, UINT4, 0.5), ValueError, "zero_point: expected .*, got None"),
    "a point of int32": ((X, UINT4, 0.5, np.zeros(1, np.int32)), TypeError, "zero_point: expected dtype .*, got int32"),
    "a point of uint8": ((X, UINT4, 0.5, np.zeros(1, np.uint8)), TypeError, "zero_point: expected dtype .*, got uint8"),
    "a point of float16": ((X, UINT4, 0.5, np.zeros(1, np.float16)), TypeError, "zero_point: expected .*, got float16"),
    "a point beyond": ((X, UINT4, 0.5, 16), ValueError, r"zero_point: expected .*\[0, 15\].*, got 16"),
    "a point below narrow": ((X, INT8, 0.5, -128), ValueError, r"zero_point: expected .*\[-127, 127\].*, got -128"),
    "a point per row": ((X, UINT4, 0.5, X[:, :1]), ValueError, r"zero_point: expected .*, got shape \(3, 1\)"),
    "a point of a float8": ((X, jq.QuantSpec("float8_e5m2"), 0.5, F32(0)), ValueError, "zero_point: expected None"),
    "a point of a book": ((X, jq.QuantSpec(jq.nf4), 0.5, F32(0)), ValueError, "zero_point: expected None.*nf4"),
    "a bool for a point": ((X, UINT4, 0.5, True), TypeError, "zero_point: expected .*, got .*(True|bool)"),
    "a rule's class": ((X, INT8, 0.5, None, jq.LSQ), TypeError, "gradient: expected .*LSQ.*, got"),
    "a rule's name": ((X, INT8, 0.5, None, "lsq"), TypeError, "gradient: expected .*, got 'lsq'"),
    "PACT's point": ((X, UINT4, 0.5, 3, jq.PACT()), ValueError, "zero_point: expected .*0.*, got"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refusals(name: str) -> None:
    args, error, text = BAD[name]
    with pytest.raises(error, match=rf"jaxquant\.(fake_quantize|PACT): {text}"):
        jq.fake_quantize(*args)
    if all(a is None or isinstance(a, np.ndarray) for a in args[2:4]) and isinstance(args[0], np.ndarray):
        traced = jax.jit(lambda x, s, z: jq.fake_quantize(x, args[1], s, z, *args[4:]))
        with pytest.raises(error, match=text):
            jax.eval_shape(traced, args[0], *(*args[2:4], None, None)[:2])


@pytest.mark.parametrize("rule", [jq.LSQ, jq.LSQPlus], ids=["LSQ", "LSQPlus"])
def test_refusals_of_the_rules(rule: Any) -> None:
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=rf"jaxquant\.{rule.__name__}: elements: expected .*, got .*{wrong}"):
            rule(elements=wrong)
    with pytest.raises(TypeError, match=r"jaxquant\.StraightThrough: clip: expected True or False, got"):
        jq.StraightThrough(clip="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"jaxquant\.{rule.__name__}\.initial: x: expected dtype"):
        rule().initial(np.ones(3, np.int32), INT8)
    with pytest.raises(TypeError, match=rf"jaxquant\.{rule.__name__}\.initial: spec: expected a QuantSpec"):
        rule().initial(X, "int8")


@pytest.mark.slow
def test_rules_are_static_values() -> None:
    """Equal rules are equal, hashable, and pass as static arguments; another `elements` is another program."""
    assert jq.LSQ(elements=3) == jq.LSQ(3) != jq.LSQ()
    assert len({jq.StraightThrough(), jq.StraightThrough(True), jq.LSQ(), jq.LSQPlus(), jq.PACT(), jq.PACT()}) == 4
    call = jax.jit(lambda s, rule: jq.fake_quantize(X, INT8, s, gradient=rule).sum(), static_argnums=1)
    few, many = (jax.grad(call)(jnp.float32(0.3), jq.LSQ(n)) for n in (1, 100))
    np.testing.assert_allclose(few, 10 * many, rtol=1e-6)


FORMS = {
    "offset": jq.QuantSpec("uint4", jq.Blocked(-1, 16), offset=True),
    "NVFP4": jq.QuantSpec("float4_e2m1fn", jq.Blocked(-1, 16), scale_spec=jq.QuantSpec("float8_e4m3fn")),
    "Q4_K": jq.QuantSpec("uint4", jq.Blocked(-1, 8), offset=True, scale_spec=jq.QuantSpec("uint6", jq.Blocked(-1, 4))),
    "3 bits": jq.QuantSpec("uint3", jq.PerAxis(0), offset=True),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_offsets_and_nested_scales(name: str, dtype: Any, rng: np.random.Generator) -> None:
    spec, x = FORMS[name], jnp.asarray(rng.normal(0.5, 1, (4, 32)), jnp.float32).at[0, :3].set(0).astype(dtype)
    expected = jq.quantize(x, spec).dequantize()
    rows = jax.vmap(lambda row: jq.quantize(row[None], spec).dequantize()[0])(x)

    def fake(x: jax.Array) -> jax.Array:
        return jq.fake_quantize(x, spec)

    for got, want in (
        (fake(x), expected),
        (jax.jit(fake)(x), expected),
        (jq.Quantizer(spec)(x), expected),
        (jax.lax.map(lambda row: fake(row[None])[0], x), rows),
        (jax.vmap(lambda row: fake(row[None])[0])(x), rows),
    ):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    g = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    value, pull = jax.vjp(fake, x)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(pull(g)[0], g)
    _, tangent = jax.jvp(fake, (x,), (g,))
    np.testing.assert_array_equal(tangent, g)


def test_offsets_and_nested_scales_are_found_from_x() -> None:
    x = jnp.ones((4, 32))
    for spec in FORMS.values():
        with pytest.raises(ValueError, match=r"jaxquant\.fake_quantize: scale: expected None, because the spec has an"):
            jq.fake_quantize(x, spec, 0.5)
        for rule in (jq.LSQ(), jq.LSQPlus()):
            with pytest.raises(ValueError, match=r"jaxquant\.fake_quantize: gradient: "):
                jq.fake_quantize(x, spec, gradient=rule)


def test_axes_that_x_does_not_have_are_named() -> None:
    for spec in FORMS.values():
        with pytest.raises(ValueError, match=r"jaxquant\.fake_quantize: "):
            jq.fake_quantize(jnp.float32(1), spec)
