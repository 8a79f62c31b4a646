"""quantized_dot_general: its results against `dot_general` of `quantize`, its cotangents against `fake_quantize` and
against formulas written apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import Blocked, PerAxis, Quantizer, QuantSpec

from ..cases.gradient_rules import SHAPE, check_cotangents, draw_problem, spec_of
from ..cases.quantized_contractions import F32, both_ways, check_equal, quarters, rules, whole
from ..oracles import gradient_rules_text as oracle
from ..support.equality import same_bits
from ..support.matrix import mark_others_full

MATRIX = (((1,), (0,)), ((), ()))
TURNED = (((0,), (1,)), ((), ()))
BATCH = (((2,), (1,)), ((0,), (2,)))
I8, U8, I4, U4, I2 = (QuantSpec(d) for d in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.int2))
COLUMNS = QuantSpec(jnp.int8, PerAxis(1))
FORWARD: dict[str, tuple[Any, ...]] = {
    "both asymmetric": (U8, U8, MATRIX, {}),
    "signed, asymmetric": (QuantSpec(jnp.int8, symmetric=False), QuantSpec(jnp.uint8, PerAxis(1)), MATRIX, {}),
    "rows by columns": (QuantSpec(jnp.uint8, PerAxis(0)), COLUMNS, MATRIX, {}),
    "4 by 4 bits": (I4, QuantSpec(jnp.uint4, PerAxis(1)), MATRIX, {}),
    "2 bits": (U8, I2, MATRIX, {}),
    "blocks that do not divide": (QuantSpec(jnp.int8, PerAxis(0)), QuantSpec(jnp.int4, Blocked(0, 8)), MATRIX, {}),
    "blocks of both, in both dimensions": (
        *(QuantSpec(jnp.uint8, Blocked(1, 8)), QuantSpec(jnp.int8, Blocked((0, 1), 8)), MATRIX, {}),
    ),
    "transposed": (U8, QuantSpec(jnp.int8, PerAxis(0)), TURNED, {"preferred_element_type": jnp.bfloat16}),
    "weights alone": (None, QuantSpec(jq.nf4, Blocked(0, 8)), MATRIX, {"preferred_element_type": jnp.float16}),
    "weights of 16 bits": (None, QuantSpec(jnp.int16, PerAxis((0, 1))), MATRIX, {}),
    "activations alone": (QuantSpec(jnp.float8_e4m3fn, PerAxis(1)), None, MATRIX, {"precision": lax.Precision.HIGHEST}),
    "coarse scales": (
        *(QuantSpec(jnp.int8, scale_dtype=jnp.bfloat16), QuantSpec(jnp.int8, power_of_two=True), MATRIX, {}),
    ),
}  # fmt: skip


COSTLY = ("transposed", "signed, asymmetric", "blocks that do not divide")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", mark_others_full(FORWARD, set(FORWARD) - set(COSTLY)))
def test_results_are_those_of_dot_general(name: str, rng: np.random.Generator) -> None:
    """Bit for bit, in float32, bfloat16 and of unlike dtypes; differentiated or not."""
    lhs_spec, rhs_spec, numbers, rest = FORWARD[name]
    x, w = rng.normal(0.3, 2, (9, 21)).astype(F32), rng.normal(size=(21, 13)).astype(F32)
    if numbers == TURNED:
        x, w = x.T, w.T

    @jax.jit
    def ways(x: Any, w: Any) -> Any:
        call = functools.partial(jq.quantized_dot_general, dimension_numbers=numbers, **rest)
        call = functools.partial(call, lhs_spec=lhs_spec, rhs_spec=rhs_spec)
        q: Any = [v if s is None else jq.quantize(v, s) for v, s in ((x, lhs_spec), (w, rhs_spec))]
        y, pull = jax.vjp(call, x, w)
        return call(x, w), y, jq.dot_general(q[0], q[1], numbers, **rest), pull(y)

    dtypes = [(jnp.float32, jnp.float32)]
    if name in ("both asymmetric", "transposed", "weights alone"):
        dtypes += [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)]
    for left, right in dtypes:
        once, y, want, (dx, dw) = ways(jnp.asarray(x, left), jnp.asarray(w, right))
        same_bits(once, np.asarray(want))
        same_bits(y, np.asarray(want))
        assert (dx.dtype, dw.dtype) == (left, right)
        default = jnp.float32 if left != right else left
        assert y.dtype == rest.get("preferred_element_type", default)


@pytest.mark.slow
def test_a_batch_of_contractions(rng: np.random.Generator) -> None:
    x, w = rng.normal(size=(3, 5, 17)).astype(F32), rng.normal(size=(4, 17, 3)).astype(F32)
    specs = QuantSpec(jnp.uint8, PerAxis((0, 1))), QuantSpec(jnp.int8, PerAxis((0, 2)))
    actual = jq.quantized_dot_general(x, w, BATCH, lhs_spec=specs[0], rhs_spec=specs[1])
    same_bits(actual, np.asarray(jq.dot_general(jq.quantize(x, specs[0]), jq.quantize(w, specs[1]), BATCH)))
    floats = lambda x, w: lax.dot_general(jq.fake_quantize(x, specs[0]), jq.fake_quantize(w, specs[1]), BATCH)  # noqa: E731
    ours = lambda x, w: jq.quantized_dot_general(x, w, BATCH, lhs_spec=specs[0], rhs_spec=specs[1])  # noqa: E731
    g = whole(rng, actual.shape)
    for mine, his in zip(jax.vjp(ours, x, w)[1](g), jax.vjp(floats, x, w)[1](g), strict=True):
        np.testing.assert_allclose(mine, his, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", ["int8, asymmetric and narrow", "int8, all codes", "uint4", "int16", "float8_e4m3fn", "nf4"]
)
def test_cotangents_by_formula(rng: np.random.Generator, case: str) -> None:
    """Against float weights of small whole numbers, whose cotangent of x is exact in any order: each rule's mask to the
    bit, its sums to float32's rounding, as `test_gradient_rules` states it. Ends, ties and their neighbours."""
    spec = spec_of(case)
    estimators: dict[str, Any] = {"straight": jq.StraightThrough(), "lsq+": jq.LSQPlus(elements=7)}
    estimators["identity"] = jq.StraightThrough(clip=False)
    if spec.symmetric:
        estimators["lsq"] = jq.LSQ()
    numbers = (((2,), (0,)), ((), ()))

    @jax.jit
    def find_gradients(x: Any, scale: Any, point: Any, w: Any, g: Any) -> Any:
        def contract(rule: Any, x: Any, scale: Any, point: Any, w: Any) -> Any:
            quantizer = Quantizer(spec, scale, point, rule)
            return jq.quantized_dot_general(x, w, numbers, lhs_spec=quantizer, rhs_spec=None)

        return {
            n: jax.vjp(functools.partial(contract, rule), x, scale, point, w)[1](g) for n, rule in estimators.items()
        }

    for _ in range(2):
        d, w, g = draw_problem(rng, case), whole(rng, (SHAPE[2], 3), 5), whole(rng, (*SHAPE[:2], 3), 5)
        outer = (g.astype(np.float64) @ w.T).astype(F32)
        number = oracle.sharing(SHAPE, d.each)
        exact = outer.astype(np.float64)
        want = {
            "straight": oracle.straight_through(d.steps, exact),
            "identity": oracle.straight_through(d.steps, exact, clip=False),
            "lsq": oracle.lsq(d.steps, exact, number),
            "lsq+": oracle.lsq_plus(d.steps, exact, 7),
        }
        y = oracle.values(d.steps, np.dtype(F32))
        for name, (dx, ds, dz, dw) in find_gradients(d.x, d.scale, d.learned, w, g).items():
            print(name)  # which rule it was, where one fails
            check_cotangents((y, (dx, ds, dz)), want[name], d._replace(g=outer), d.learned)
            tolerance = np.einsum("abi,abj->ij", np.abs(y.astype(np.float64)), np.abs(g)) * 2.0**-20
            assert (np.abs(dw - np.einsum("abi,abj->ij", y.astype(np.float64), g)) <= tolerance).all()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [U8, QuantSpec(jnp.int8, PerAxis(0))], ids=str)
def test_every_rule_on_both_sides(fixed_rng: np.random.Generator, spec: QuantSpec) -> None:
    """The codes give back what `fake_quantize` of each side gives: operands, scales, zero points; the same draws."""
    entries = (1, 1) if spec == U8 else (9, 1)
    scale = np.exp2(fixed_rng.integers(-2, 1, entries)).astype(F32)
    point = None if spec.symmetric else int(spec.bounds[1]) // 2 - 3
    columns = QuantSpec(jnp.int4, PerAxis(1))
    scales = np.exp2(fixed_rng.integers(-2, 1, (1, 7))).astype(F32)
    w = quarters(fixed_rng, columns, scales, 0, (13, 7))
    g = whole(fixed_rng, (9, 7))
    learned = None if point is None else np.full((1, 1), point, F32)
    estimators = rules(fixed_rng)
    xs = {n: quarters(fixed_rng, spec, scale, 0 if n == "pact" else point or 0, (9, 13)) for n in estimators}

    @jax.jit
    def ways(xs: Any, w: Any) -> Any:
        call = lambda x, w, a, b: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=a, rhs_spec=b)  # noqa: E731
        results = {}
        for name, rule in estimators.items():
            zero = None if learned is None else np.zeros((1, 1), spec.carrier) if name == "pact" else learned
            sides = Quantizer(spec, scale, zero, rule), Quantizer(columns, scales, None, rule)
            results[name] = both_ways(call, lambda a, b: a @ b, (xs[name], w), sides, g)
        return results

    dx = {}
    for name, (actual, expected) in ways(xs, w).items():
        print(name)
        check_equal(actual, expected)
        dx[name] = np.asarray(actual[1][0][0])
    steps = np.clip(np.rint(w / scales), -7, 7)
    np.testing.assert_array_equal(dx["identity"], g @ (steps * scales).T)
    assert (dx["straight"] != dx["identity"]).any(), "nothing was masked"


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float16")], ids=str)
def test_halves_and_unlike_dtypes(rng: np.random.Generator, dtypes: tuple[str, str]) -> None:
    """Coming back it is computed in the dtype of the result, and each cotangent has its operand's."""
    sides = Quantizer(I4, F32(0.5)), Quantizer(QuantSpec(jnp.int4, PerAxis(1)), np.full((1, 7), 0.25, F32))
    xs = [
        jnp.asarray(quarters(rng, I4, q.scale, 0, shape), d)
        for q, shape, d in zip(sides, ((5, 13), (13, 7)), dtypes, strict=True)
    ]
    wide = xs[0].dtype if xs[0].dtype == xs[1].dtype else jnp.float32

    def floats(a: Any, b: Any) -> Any:
        return a.astype(wide) @ b.astype(wide)

    call = lambda x, w, a, b: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=a, rhs_spec=b)  # noqa: E731
    actual, expected = jax.jit(lambda xs: both_ways(call, floats, xs, sides, whole(rng, (5, 7))))(xs)
    check_equal(actual, expected)
    preferred = lambda x, w, a, b: jq.quantized_dot_general(  # noqa: E731
        x, w, MATRIX, lhs_spec=a, rhs_spec=b, preferred_element_type=jnp.float32
    )
    wide = jnp.float32
    actual, expected = jax.jit(lambda xs: both_ways(preferred, floats, xs, sides, whole(rng, (5, 7))))(xs)
    check_equal(actual, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (1, 1), (7, 1), (1, 7), (3, 3), (2, 8), (5, 17), (31, 2)], ids=str)
def test_masks_of_any_size(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    """Bits in bytes, the last ones not full, or nothing at all."""
    quantizer = Quantizer(U4, F32(0.5), 5)
    x, w, g = quarters(rng, U4, 0.5, 5, shape), whole(rng, (shape[1], 3)), whole(rng, (shape[0], 3))
    call = lambda x: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=quantizer, rhs_spec=U8)  # noqa: E731
    y, pull = jax.vjp(call, jnp.asarray(x))
    same_bits(y, np.asarray(jq.dot_general(_codes(x), jq.quantize(w, U8), MATRIX)))
    steps = np.rint(x * 2) + 5
    inside = (steps >= 0) & (steps <= 15)
    weights = np.asarray(jq.quantize(w, U8).dequantize(), np.float64)
    (dx,) = pull(g)
    # Three products of at most 4, rounded, of rounded weights: 3 * 2**-21, and twice 2**-21 of the sums.
    np.testing.assert_allclose(dx, (g @ weights.T) * inside, rtol=0, atol=5 * 2.0**-21)
    assert not np.asarray(dx)[~inside].any()


def _codes(x: np.ndarray) -> jq.QuantizedArray:
    """x as uint4 under the scale 0.5 and the zero point 5."""
    codes = np.clip(np.rint(x * 2) + 5, 0, 15).astype(jnp.uint4)
    return jq.QuantizedArray(jnp.asarray(codes), np.full((1, 1), 0.5, F32), jnp.full((1, 1), 5, jnp.uint4))


@pytest.mark.slow
def test_ranks_0_and_1(rng: np.random.Generator) -> None:
    """Python numbers, vectors of a size that no byte divides, and an outer product."""
    scalar = (((), ()), ((), ()))
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=scalar, rhs_spec=None)
    clipped = functools.partial(call, lhs_spec=Quantizer(I8, 0.5))
    assert float(clipped(1.25, 3.0)) == 3.0  # 2.5 steps are a tie
    assert [float(v) for v in jax.grad(clipped, (0, 1))(63.9, 3.0)] == [0.0, 63.5]  # 127.8 steps
    assert [float(v) for v in jax.grad(clipped, (0, 1))(63.7, 3.0)] == [3.0, 63.5]
    for n in (1, 9):
        a, b = quarters(rng, I4, 0.25, 0, (n,)), quarters(rng, I4, 0.5, 0, (n,))
        sides = Quantizer(I4, F32(0.25)), Quantizer(I4, F32(0.5), gradient=jq.LSQ())
        inner = lambda x, w, a, b: jq.quantized_dot_general(x, w, (((0,), (0,)), ((), ())), lhs_spec=a, rhs_spec=b)  # noqa: E731
        outer = lambda x, w, a, b: jq.quantized_dot_general(x, w, scalar, lhs_spec=a, rhs_spec=b)  # noqa: E731
        check_equal(*jax.jit(lambda a, b, s=sides, f=inner: both_ways(f, jnp.dot, (a, b), s, 3.0))(a, b))
        g = whole(rng, (n, n))
        check_equal(*jax.jit(lambda a, b, s=sides, g=g, f=outer: both_ways(f, jnp.outer, (a, b), s, g))(a, b))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", [
    QuantSpec(jnp.int2, power_of_two=True), QuantSpec(jnp.uint8, PerAxis(1)),
    QuantSpec(jnp.uint8, symmetric=True, narrow_range=False),
    QuantSpec(jnp.int8), QuantSpec(jnp.float4_e2m1fn, Blocked(1, 4)),
], ids=str)  # fmt: skip
def test_what_a_scale_of_its_own_lets_saturate(rng: np.random.Generator, spec: QuantSpec) -> None:
    """A scale that is a power of two can be too small for a range: then the ends are masked, as in `fake_quantize`."""
    x = rng.normal(size=(6, 10)).astype(F32)
    x[0, :3] = [3e38, -2.2e38, 1e9] if spec.dtype == jnp.int2 else [4e7, 1e7, -3e7]
    w = np.eye(10, dtype=F32)
    actual = jax.grad(lambda x: jq.quantized_dot_general(x, w, MATRIX, lhs_spec=spec, rhs_spec=None).sum())(x)
    expected = jax.grad(lambda x: jq.fake_quantize(x, spec).sum())(x)
    np.testing.assert_array_equal(actual, expected)
    assert bool(actual[0, 0]) != spec.power_of_two


@pytest.mark.slow
def test_one_weight_twice(rng: np.random.Generator) -> None:
    """As both operands of one contraction, and in two of them; a batch as long as the layer is wide.

    With 2 bits and 64 elements LSQ's factor is 1 / 8: three shares of one scale add up exactly, in any order.
    """
    w = jnp.asarray(quarters(rng, I2, 0.5, 0, (8, 8)))
    quantizer = Quantizer(I2, F32(0.5), gradient=jq.LSQ())
    x = quarters(rng, I2, 0.5, 0, (8, 8))
    g = whole(rng, (8, 8), 1)

    def twice(dot: Any, w: Any, scale: Any) -> Any:
        q = Quantizer(I2, scale, gradient=jq.LSQ())
        return dot(w, w, q, q) + dot(x, w, quantizer, q)

    ours = functools.partial(twice, lambda a, b, p, q: jq.quantized_dot_general(a, b, MATRIX, lhs_spec=p, rhs_spec=q))
    floats = functools.partial(twice, lambda a, b, p, q: p(a) @ q(b))
    actual, expected = [jax.vjp(f, w, F32(0.5))[1](g) for f in (ours, floats)]
    check_equal(actual, expected)
