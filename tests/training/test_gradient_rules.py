"""Every cotangent of every gradient rule against an oracle written apart, at ties, at the ends and beside them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.gradient_rules import BOOKS, CASES, SHAPE, check_cotangents, check_sum, draw_problem, pull, spec_of
from ..cases.quantized_arrays import GRANULARITIES
from ..oracles import array_text, onnx_text
from ..oracles import gradient_rules_text as rules
from ..oracles.array_text import F32


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", list(CASES))
def test_every_cotangent(rng: np.random.Generator, case: str) -> None:
    spec = spec_of(case)
    estimators: dict[str, Any] = {
        "straight": jq.StraightThrough(),
        "identity": jq.StraightThrough(clip=False),
        "lsq": jq.LSQ(),
        "lsq+": jq.LSQPlus(),
    }
    if spec.symmetric and case != "uneven":
        estimators["pact"] = jq.PACT()

    @jax.jit
    def find_gradients(x: Any, scale: Any, point: Any, learned: Any, g: Any) -> Any:
        cotangents = {
            name: pull(spec, rule, x, scale, learned, g) for name, rule in estimators.items() if name != "pact"
        }
        cotangents["integer"] = pull(spec, estimators["straight"], x, scale, point, g)
        if "pact" in estimators:
            cotangents["pact"] = pull(spec, estimators["pact"], x, scale, point, g)
        return cotangents

    for _ in range(4):
        d = draw_problem(rng, case)
        p, g, number = d.steps, d.g.astype(np.float64), rules.sharing(SHAPE, d.each)
        assert p.inside.flat[0]
        assert not p.inside.flat[1]
        actual = find_gradients(d.x, d.scale, d.point, d.learned, d.g)
        expected = {
            "straight": rules.straight_through(p, g),
            "integer": rules.straight_through(p, g),
            "identity": rules.straight_through(p, g, clip=False),
            "lsq": rules.lsq(p, g, number),
            "lsq+": rules.lsq_plus(p, g, number),
            "pact": rules.pact(p, g),
        }
        for name, cotangents in actual.items():
            print(name)  # which rule it was, where one fails
            check_cotangents(cotangents, expected[name], d, d.point if name in ("integer", "pact") else d.learned)


# scale 0.5, zero point 3, codes 0 to 15: u in [-3, 12]. x; then dx and ds of StraightThrough, and of LSQ without its
# gradient scale; then dz of StraightThrough and of LSQPlus without its gradient scale.
TINY = 2.0**-22
BY_HAND = [
    (-2.0, 0, -3, 0, -3, -0.5, -0.5),
    (-1.75, 0, -3, 0, -3, -0.5, -0.5),  # u = -3.5 is a tie and goes to -4, out
    (-1.75 + TINY / 2, 1, 0.5 - TINY, 0, -3, 0, -0.5),  # u beside it goes to -3, in; the number itself is out
    (-1.5, 1, 0, 0, -3, 0, -0.5),  # the end itself: in by its code, out by LSQ's strict bound
    (-1.5 + TINY / 2, 1, -TINY, 1, -TINY, 0, 0),
    (-0.25, 1, 0.5, 1, 0.5, 0, 0),  # a tie goes to the even number, before the odd zero point is added
    (0.25, 1, -0.5, 1, -0.5, 0, 0),
    (0.75, 1, 0.5, 1, 0.5, 0, 0),
    (6.0 - 2 * TINY, 1, 4 * TINY, 1, 4 * TINY, 0, 0),
    (6.0, 1, 0, 0, 12, 0, -0.5),
    (6.25, 1, -0.5, 0, 12, 0, -0.5),  # u = 12.5 goes to 12
    (6.25 + 2 * TINY, 0, 12, 0, 12, -0.5, -0.5),
    (100.0, 0, 12, 0, 12, -0.5, -0.5),
    (np.inf, 0, 12, 0, 12, -0.5, -0.5),
    (-np.inf, 0, -3, 0, -3, -0.5, -0.5),
]


@pytest.mark.slow
def test_vectors_by_hand() -> None:
    spec = jq.QuantSpec(jnp.uint4)

    def rule(gradient: Any, argnum: int) -> Any:
        call = lambda x, s, z: jq.fake_quantize(x, spec, s, z, gradient=gradient)  # noqa: E731
        return jax.vmap(jax.grad(call, argnum), in_axes=(0, None, None))

    x = jnp.array([row[0] for row in BY_HAND], jnp.float32)
    arguments = (x, jnp.float32(0.5), jnp.float32(3))
    straight, lsq, plus = jq.StraightThrough(), jq.LSQ(elements=3), jq.LSQPlus(elements=15)  # sqrt(3 * 12), sqrt(15**2)
    np.testing.assert_array_equal(rule(straight, 0)(*arguments), [row[1] for row in BY_HAND])
    np.testing.assert_allclose(rule(straight, 1)(*arguments), [row[2] for row in BY_HAND], rtol=1e-6)
    np.testing.assert_array_equal(rule(lsq, 0)(*arguments), [row[3] for row in BY_HAND])
    np.testing.assert_allclose(rule(lsq, 1)(*arguments) * 6, [row[4] for row in BY_HAND], rtol=1e-6)
    np.testing.assert_array_equal(rule(straight, 2)(*arguments), [row[5] for row in BY_HAND])
    np.testing.assert_array_equal(rule(lsq, 2)(*arguments), np.zeros(len(BY_HAND)))
    np.testing.assert_array_equal(rule(plus, 0)(*arguments), [row[3] for row in BY_HAND])
    np.testing.assert_allclose(rule(plus, 1)(*arguments) * 15, [row[4] for row in BY_HAND], rtol=1e-6)
    np.testing.assert_allclose(rule(plus, 2)(*arguments) * 15, [row[6] for row in BY_HAND], rtol=1e-6)


@pytest.mark.slow
def test_pact_by_hand() -> None:
    """alpha = 15 * 0.5 = 7.5, at its ends and beside them; the cotangent of the scale is 15 times alpha's."""
    x = np.array([-1.0, -1e-30, 0.0, 1e-30, 7.25, np.nextafter(F32(7.5), F32(0)), 7.5, 7.75, np.inf], F32)
    fake = lambda x, s: jq.fake_quantize(x, jq.QuantSpec(jnp.uint4), s, 0, gradient=jq.PACT())  # noqa: E731
    dx, ds = jax.vmap(jax.grad(fake, (0, 1)), in_axes=(0, None))(x, jnp.float32(0.5))
    np.testing.assert_array_equal(dx, [0, 0, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(ds, [0, 0, 0, 0, 0, 0, 15, 15, 15])
    end = F32(3.5)
    upper = np.array([1e-30, 3.25, np.nextafter(end, F32(0)), end, 3.75, np.inf], F32)
    xs = np.concatenate([-upper, upper])
    signed = lambda x, s: jq.fake_quantize(x, jq.QuantSpec(jnp.int4), s, gradient=jq.PACT())  # noqa: E731
    dx, ds = jax.vmap(jax.grad(signed, (0, 1)), in_axes=(0, None))(xs, jnp.float32(0.5))
    np.testing.assert_array_equal(dx, [1, 1, 1, 0, 0, 0] * 2)
    np.testing.assert_array_equal(ds, [0, 0, 0, -7, -7, -7, 0, 0, 0, 7, 7, 7])


@pytest.mark.parametrize("gradient", [jq.StraightThrough(), jq.LSQ(), jq.LSQPlus()], ids=repr)
def test_a_nan_has_no_gradient(gradient: Any) -> None:
    """Of x: its code is the lowest, out of range. And it does not spoil what the others send to the scale."""
    x = jnp.array([np.nan, 1.0, -np.nan, 0.3], jnp.float32)
    y, (dx, ds, _) = pull(jq.QuantSpec(jnp.int8), gradient, x, jnp.float32(0.5), None, jnp.array([1.0, 2, 3, 4]))
    np.testing.assert_array_equal(y, [-63.5, 1, -63.5, 0.5])
    np.testing.assert_array_equal(dx, [0, 2, 0, 4])
    assert np.isfinite(ds)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["uint4", "int8", "float8_e4m3fn"])
def test_halves(rng: np.random.Generator, case: str, dtype: str) -> None:
    """x, the scale, or both in half precision: sums are float32's, and each cotangent has its argument's dtype."""
    spec, kind = spec_of(case), onnx_text.dtype(dtype)
    d = draw_problem(rng, case)
    sizes = d.each
    # A range that float16 holds; still at ties and at ends, to the precision of the halves.
    scale = np.full(d.scale.shape, 2.0**-6, F32).astype(kind)
    x = (d.x / array_text.spread(d.scale, sizes, SHAPE) * F32(2.0**-6)).astype(kind)
    wide = array_text.spread(scale, sizes, SHAPE)
    steps = None if d.point is None else array_text.spread(d.point.astype(np.int64), sizes, SHAPE)
    p = rules.steps(x, wide, steps, CASES[case][0], bool(spec.narrow_range))
    g = d.g.astype(kind)
    for gradient, want in (
        (jq.StraightThrough(), rules.straight_through(p, g.astype(np.float64))),
        (jq.LSQPlus(), rules.lsq_plus(p, g.astype(np.float64), rules.sharing(SHAPE, sizes))),
    ):
        for step in (scale, scale.astype(F32)):
            y, (dx, ds, dz) = jax.jit(functools.partial(pull, spec, gradient))(x, step, d.learned, g)
            assert (y.dtype, dx.dtype, ds.dtype) == (kind, kind, step.dtype)
            np.testing.assert_array_equal(y, rules.values(p, kind))
            np.testing.assert_array_equal(np.asarray(dx, F32), want[0].astype(F32))
            tolerance = rules.collected(np.abs(want[1]), sizes) * 2.0**-20
            total = rules.collected(want[1], sizes)
            if step.dtype == kind:
                tolerance += np.abs(total) * 2.0 ** -(11 if dtype == "float16" else 8) + 2.0**-24
            assert (np.abs(np.asarray(ds, np.float64) - total) <= tolerance).all()
            if d.learned is not None:
                check_sum(dz, want[2], sizes, d.learned)


RULES = [jq.StraightThrough(), jq.StraightThrough(clip=False), jq.LSQ(), jq.LSQPlus(), jq.PACT()]
OF_ORACLE = [
    rules.straight_through,
    functools.partial(rules.straight_through, clip=False),
    functools.partial(rules.lsq, elements=1),
    functools.partial(rules.lsq_plus, elements=1),
    rules.pact,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ["int8", "uint8, symmetric", "int8, asymmetric", "float8_e4m3fn", "nf4"])
def test_a_scale_that_x_gave_is_a_constant(rng: np.random.Generator, case: str) -> None:
    """x gets its mask and nothing through the scale or the zero point: the extremes are no exception."""
    name, granularity, _ = CASES[case]
    spec = spec_of(case)
    x, g = rng.normal(0.5, 2, (2, *SHAPE)).astype(F32)
    q = jq.quantize(x, spec)
    sizes = array_text.sizes(SHAPE, GRANULARITIES[granularity][1])
    wide, point = (
        None if p is None else array_text.spread(np.asarray(p), sizes, SHAPE) for p in (q.scale, q.zero_point)
    )
    assert wide is not None
    levels = BOOKS[name].levels if name in BOOKS else None
    p = rules.steps(x, wide, None if point is None else point.astype(np.int64), name, bool(spec.narrow_range), levels)
    pairs = [(r, o) for r, o in zip(RULES, OF_ORACLE, strict=True) if q.zero_point is None or r != jq.PACT()]
    gradients = jax.jit(
        lambda x, g: [jax.vjp(lambda x, r=r: jq.fake_quantize(x, spec, gradient=r), x)[1](g)[0] for r, _ in pairs]
    )(x, g)
    for dx, (_, of_oracle) in zip(gradients, pairs, strict=True):
        np.testing.assert_array_equal(dx, of_oracle(p, g)[0].astype(F32))
    assert np.array_equal(gradients[0], g) == (p.inside.all()), "the default rule lets all pass that rounds in range"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [jq.StraightThrough(), jq.LSQPlus()], ids=repr)
@pytest.mark.parametrize("case", ["uint4", "int8, asymmetric and narrow", "float8_e4m3fn"])
def test_transforms_of_the_gradient(rng: np.random.Generator, case: str, rule: Any) -> None:
    """vmap of grad with a scale for each and with one for all, scan of grad, a checkpoint: what a loop gives."""
    spec = spec_of(case)
    problems = [draw_problem(rng, case) for _ in range(3)]
    learned = [d.learned for d in problems]
    x, scale, g = (np.stack([getattr(d, name) for d in problems]) for name in ("x", "scale", "g"))
    point = None if learned[0] is None else np.stack([z for z in learned if z is not None])

    def loss(x: Any, scale: Any, point: Any, g: Any) -> Any:
        return (jq.fake_quantize(x, spec, scale, point, gradient=rule) * g).sum()

    argnums = (0, 1) if point is None else (0, 1, 2)
    grad = jax.grad(loss, argnums)
    compiled = jax.jit(grad)
    first = None if point is None else point[0]

    def check_rows(actual: Any, parts: Any) -> None:
        for i, part in enumerate(parts):
            np.testing.assert_array_equal(actual[0][i], part[0])
            for have, expected in zip(actual[1:], part[1:], strict=True):
                tolerance = 2.0**-18 * float(np.abs(np.asarray(expected)).max() + np.abs(g[i]).max() * SHAPE[-1])
                np.testing.assert_allclose(have[i], expected, rtol=1e-5, atol=tolerance)

    rows = [compiled(x[i], scale[i], None if point is None else point[i], g[i]) for i in range(3)]
    check_rows(jax.jit(jax.vmap(grad))(x, scale, point, g), rows)
    checkpointed = jax.grad(jax.checkpoint(loss), argnums)  # type: ignore[arg-type]
    check_rows(
        jax.jit(lambda a: jax.lax.scan(lambda c, row: (c, checkpointed(*row)), None, a)[1])((x, scale, point, g)), rows
    )
    shared = [compiled(x[i], scale[0], first, g[i]) for i in range(3)]
    check_rows(jax.jit(jax.vmap(grad, in_axes=(0, None, None, 0)))(x, scale[0], first, g), shared)
    # One scale for the whole batch inside of the differentiation: its cotangent is the sum.
    total = jax.grad(lambda s: jax.vmap(loss, in_axes=(0, None, None, 0))(x, s, first, g).sum())(scale[0])
    np.testing.assert_allclose(total, sum(np.asarray(part[1], np.float64) for part in shared), rtol=1e-4, atol=1e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["int8", "int8, all codes", "uint8, symmetric", "int2", "float8_e4m3fn", "nf4"])
def test_initial_parameters(rng: np.random.Generator, case: str) -> None:
    name, granularity, _ = CASES[case]
    spec = spec_of(case)
    x = jnp.asarray(rng.normal(0.3, 2, SHAPE), jnp.float32)
    sizes = array_text.sizes(SHAPE, GRANULARITIES[granularity][1])
    number = rules.collected(np.ones(SHAPE), sizes)
    fixed = spec.fixed_zero_point or 0
    wide = np.asarray(x, np.float64)

    def mean(values: np.ndarray) -> np.ndarray:
        return rules.collected(values, sizes) / number

    scale, point = jq.LSQ().initial(x, spec)
    np.testing.assert_allclose(scale, 2 * mean(np.abs(wide)) / np.sqrt(spec.bounds[1] - fixed), rtol=1e-6)
    assert (point is None) == (fixed == 0)
    if point is not None:
        np.testing.assert_array_equal(point, np.full(scale.shape, fixed, spec.carrier))
    if name in onnx_text.BOUNDS:
        deviation = np.sqrt(np.maximum(mean(wide * wide) - mean(wide) ** 2, 0))
        reach = np.maximum(np.abs(mean(wide) - 3 * deviation), np.abs(mean(wide) + 3 * deviation))
        bits = int(name.strip("uint"))
        start = jq.LSQPlus().initial(x, spec)[0]
        np.testing.assert_allclose(start, reach / 2 ** (bits - 1), rtol=1e-3 if granularity == "blocked" else 1e-5)
    np.testing.assert_array_equal(jq.LSQ().initial(jnp.zeros_like(x), spec)[0], np.ones(scale.shape))
    y = jq.fake_quantize(x, spec, scale, point, gradient=jq.LSQ())  # the shapes fit
    assert np.isfinite(y).all()


@pytest.mark.slow
def test_initial_parameters_with_an_offset(fixed_rng: np.random.Generator) -> None:
    """The range of least squared error: better than the whole range, and the same that `mse` finds."""
    spec = spec_of("uint4")
    x = jnp.asarray(fixed_rng.laplace(0.5, 1, (5, 64, 8)), jnp.float32)
    scale, point = jq.LSQPlus().initial(x, spec)
    assert point is not None
    assert (scale.dtype, point.dtype) == (jnp.float32, jnp.float32)
    calibrator = jq.calibration.mse(spec)
    want = jq.quantize(x, spec, range=calibrator.finalize(calibrator.update(calibrator.init(x), x)))
    np.testing.assert_array_equal(scale, want.scale)
    np.testing.assert_array_equal(point, np.asarray(want.zero_point, F32))
    y = jq.fake_quantize(x, spec, scale, point, gradient=jq.LSQPlus())
    np.testing.assert_array_equal(y, want.dequantize())
    assert np.square(y - x).sum() <= np.square(jq.fake_quantize(x, spec) - x).sum()
