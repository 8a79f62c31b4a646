"""Int8Backward: cotangents from integer contractions, to the last bit against int64 sums in numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import Int8Backward, PerAxis, Quantizer, QuantSpec

from ..cases.quantized_contractions import F32, check_equal, key, quarters, whole
from ..oracles.cotangents import fold_scale, quantize_cotangent
from ..support.matrix import mark_others_full
from ..support.quantized_arrays import product

MATRIX = (((1,), (0,)), ((), ()))
I8, U8, U4 = (QuantSpec(d) for d in (jnp.int8, jnp.uint8, jnp.uint4))


# lhs [5, 33], rhs [33, 7]: rows and columns of their own are folded into g, each for the other's cotangent.
SPECS: dict[str, tuple[QuantSpec, QuantSpec]] = {
    "per tensor": (I8, I8),
    "both asymmetric": (U8, U4),
    "rows by columns": (QuantSpec(jnp.int8, PerAxis(0)), QuantSpec(jnp.int8, PerAxis(1))),
    "one point, many scales": (
        *(U8, QuantSpec(jnp.uint8, PerAxis(1), zero_point_granularity=jq.PerTensor())),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others_full(SPECS, ("both asymmetric", "rows by columns")))
def test_integer_and_float_cotangents(name: str, rng: np.random.Generator) -> None:
    specs = SPECS[name]
    x, w = rng.normal(size=(5, 33)).astype(F32), rng.normal(0.2, 1, (33, 7)).astype(F32)
    g = (rng.normal(size=(5, 7)) * np.exp2(rng.integers(-6, 6, (5, 1)))).astype(F32)

    @jax.jit
    def pull(x: Any, w: Any, g: Any) -> Any:
        def pull_back(lhs: bool, rhs: bool) -> Any:
            way = Int8Backward(lhs=lhs, rhs=rhs)
            call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, backward=way)
            return jax.vjp(functools.partial(call, lhs_spec=specs[0], rhs_spec=specs[1]), x, w)[1](g)

        return [pull_back(*flags) for flags in ((True, True), (True, False), (False, True), (False, False))]

    lhs, rhs = jq.quantize(x, specs[0]), jq.quantize(w, specs[1])
    q, wide = fold_scale(rhs, g, 1, 1)
    dx = product(quantize_cotangent(wide, (0,)), q, (((1,), (1,)), ((), ())))
    q, wide = fold_scale(lhs, g, 0, 0)
    dw = product(quantize_cotangent(wide, (1,)), q, (((0,), (0,)), ((), ()))).T
    inside = [np.ones(v.shape, bool) if s.symmetric else _unsaturated(v, s) for v, s in ((x, specs[0]), (w, specs[1]))]
    floats = (g @ np.asarray(rhs.dequantize()).T) * inside[0], (np.asarray(lhs.dequantize()).T @ g) * inside[1]
    both, left, right, none = pull(x, w, g)
    for grads, exact in ((both, (True, True)), (left, (True, False)), (right, (False, True)), (none, (False, False))):
        for i, (actual, integers) in enumerate(zip(grads, exact, strict=True)):
            if integers:
                np.testing.assert_array_equal(actual, (dx, dw)[i] * inside[i])
            else:
                np.testing.assert_allclose(actual, floats[i], rtol=1e-4, atol=1e-5 * np.abs(floats[i]).max())
    # Half a step of g for each product, and all of it is small beside the gradient.
    for actual, expected, other in ((both[0], floats[0], np.asarray(rhs.dequantize()).T), (both[1].T, floats[1].T, x)):
        tolerance = np.abs(g if expected.shape == x.shape else g.T).max() * np.abs(other).max() * max(other.shape)
        assert np.abs(actual - expected).max() <= tolerance / 254 * 1.1


def _unsaturated(x: np.ndarray, spec: QuantSpec) -> np.ndarray:
    q = jq.quantize(x, spec)
    low, high = spec.bounds
    codes = np.rint(x / np.asarray(q.scale)) + np.asarray(q.zero_point).astype(np.float64)
    return (codes >= low) & (codes <= high)


def test_exact_where_g_is_on_the_grid(rng: np.random.Generator) -> None:
    """A 127 in each row and in each column makes the grid of g its own: integers and floats agree to the last bit."""
    numbers = (((2,), (1,)), ((0,), (2,)))  # with a batch
    left, right = QuantSpec(jnp.int4, PerAxis((0, 1))), QuantSpec(jnp.int4, PerAxis((0, 2)))
    sides = Quantizer(left, np.full((3, 5, 1), 0.5, F32)), Quantizer(right, np.full((7, 1, 3), 0.25, F32))
    x, w = quarters(rng, left, 0.5, 0, (3, 5, 9)), quarters(rng, right, 0.25, 0, (7, 9, 3))
    g = whole(rng, (3, 5, 7), 126)
    g[:, :, 0], g[:, 0, :] = 127, -127

    def pull_back(backward: Any) -> Any:
        call = functools.partial(jq.quantized_dot_general, dimension_numbers=numbers, backward=backward)
        return jax.vjp(lambda x, w: call(x, w, lhs_spec=sides[0], rhs_spec=sides[1]), x, w)[1](g)

    check_equal(*jax.jit(lambda: (pull_back(Int8Backward()), pull_back(jq.FloatBackward())))())


@pytest.mark.slow
def test_scales_that_differ_are_folded(rng: np.random.Generator) -> None:
    """A row of tiny gradients behind a large scale counts as much as the product of the two, and no less."""
    x, w = np.eye(3, dtype=F32) * 127, np.array([[127.0, 0.127], [63.5, 0.0635], [-127.0, -0.127]], F32)
    g = np.array([[1e-3, 1.0], [1.0, 1e3], [0.0, 127.0]], F32)
    spec = QuantSpec(jnp.int8, PerAxis(1))
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=spec)
    (dx,) = jax.vjp(lambda x: call(x, w, backward=Int8Backward()), x)[1](g)
    scale = np.array([1.0, 0.001], F32)  # of the columns
    wide = g * scale
    step = np.abs(wide).max(1, keepdims=True) / F32(127)
    codes = np.rint(wide / step)
    np.testing.assert_array_equal(codes[0], [127, 127])  # without folding 1e-3 would be 0 beside 1
    columns = np.array([[127, 127], [64, 64], [-127, -127]])  # 63.5 is a tie and goes to the even 64
    np.testing.assert_allclose(dx, (codes @ columns.T) * step, rtol=1e-6)


@pytest.mark.slow
def test_long_sums_do_not_wrap_around() -> None:
    """140,000 products of 127 and 127 are more than an int32 holds."""
    n = 140_000
    x, w, g = (np.full(shape, 127.0, F32) for shape in ((n, 1), (1, 2), (n, 2)))
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=I8)
    (dw,) = jax.vjp(lambda w: call(x, w, backward=Int8Backward()), w)[1](g)
    np.testing.assert_allclose(dw, np.full((1, 2), n * 127.0 * 127), rtol=1e-6)
    (dx,) = jax.vjp(lambda x: call(x, x.T[:, :2], backward=Int8Backward()), x[:2])[1](g[:2])
    np.testing.assert_allclose(dx, np.full((2, 1), 4 * 127.0 * 127), rtol=1e-6)


@pytest.mark.parametrize("shapes", [((0, 5), (5, 3)), ((4, 0), (0, 3)), ((4, 5), (5, 0)), ((1, 1), (1, 1))], ids=str)
def test_empty_operands(shapes: Any) -> None:
    x, w = (np.ones(shape, F32) for shape in shapes)
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=U8)
    y, vjp = jax.vjp(lambda x, w: call(x, w, backward=Int8Backward()), x, w)
    dx, dw = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.ones_like(y) @ w.T, rtol=1e-6)
    np.testing.assert_allclose(dw, x.T @ np.ones_like(y), rtol=1e-6)


@pytest.mark.slow
def test_rounding_by_chance_is_unbiased(fixed_rng: np.random.Generator) -> None:
    """The mean of many draws is the gradient of floats, within six standard errors of a draw of variance 1/4 a step;
    rounding to nearest loses what is below half a step, every time."""
    count = 2**13
    x, w = np.full((3, 40), 1.0, F32), np.ones((40, 24), F32)
    g = np.full((3, 24), 0.3, F32)
    g[:, 0] = 127
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=I8)

    def pull_back(backward: Any, key: Any) -> Any:
        return jax.vjp(functools.partial(call, backward=backward, key=key), x, w)[1](g)

    keys = jax.random.split(key(fixed_rng), count)
    draws = jax.jit(lambda keys: lax.map(lambda k: pull_back(Int8Backward(stochastic_rounding=True), k), keys))(keys)
    nearest, exact = pull_back(Int8Backward(), None), pull_back(jq.FloatBackward(), None)
    # dx adds up 23 draws of steps of 1; dw 3 draws, whose steps are 0.3 / 127 but of the first column.
    tolerance = 6 * np.sqrt(23 / 4 / count)
    assert (np.abs(np.asarray(draws[0], np.float64).mean(0) - exact[0]) <= tolerance + 1e-3).all()
    assert (np.abs(nearest[0] - exact[0]) > 10 * tolerance).all()
    column = np.asarray(draws[0])[:, :, 0]
    assert (column.std(0) > 1).all()
    assert np.abs(np.corrcoef(column.T) - np.eye(3)).max() < 0.1, "rows draw apart"


@pytest.mark.slow
def test_the_two_cotangents_draw_apart(fixed_rng: np.random.Generator) -> None:
    """A symmetric problem, whose cotangents would be one another's transposes if the draws were one."""
    n = 64
    x = np.eye(n, dtype=F32)
    g = fixed_rng.normal(size=(n, n)).astype(F32)
    g = (g + g.T).astype(F32)
    np.fill_diagonal(g, 8.0)
    backward = Int8Backward(stochastic_rounding=True)
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=I8)
    dx, dw = jax.vjp(functools.partial(call, backward=backward, key=key(fixed_rng)), x, x)[1](g)
    assert (np.asarray(dx) != np.asarray(dw).T).mean() > 0.2
    assert (np.asarray(dx) != np.asarray(dw)).mean() > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves(rng: np.random.Generator, dtype: str) -> None:
    """The integers are the same as in float32; each cotangent is rounded once, to its operand's dtype."""
    x, w, g = (rng.normal(size=shape).astype(F32) for shape in ((4, 11), (11, 6), (4, 6)))
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, lhs_spec=I8, rhs_spec=I8)
    y, vjp = jax.vjp(functools.partial(call, backward=Int8Backward()), x, w)
    narrow = jnp.asarray(g, dtype)
    wide = jax.vjp(functools.partial(call, backward=Int8Backward()), x.astype(F32), w.astype(F32))[1](
        narrow.astype(F32)
    )
    assert y.dtype == x.dtype
    check_equal(vjp(narrow), tuple(d.astype(dtype) for d in wide))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "blocks": (I8, QuantSpec(jnp.int8, jq.Blocked(0, 4)), "because the scale is blocked"),
    "points of columns": (I8, QuantSpec(jnp.uint8, PerAxis(1)), "because the zero point varies along"),
    "points of rows": (QuantSpec(jnp.uint8, PerAxis(0)), I8, "because the zero point varies along"),
    "weight-only": (None, I8, r"because Int8Backward\(\) needs two quantized operands"),
    "activations alone": (I8, None, r"because Int8Backward\(\) needs two quantized operands"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    lhs, rhs, text = REFUSED[name]
    x, w = np.ones((8, 8), F32), np.ones((8, 8), F32)
    call = functools.partial(jq.quantized_dot_general, dimension_numbers=MATRIX, backward=Int8Backward())
    message = rf"jaxquant\.quantized_dot_general: backward: expected FloatBackward\(\),.*{text}.*, got Int8Backward\(\)"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x, w: call(x, w, lhs_spec=lhs, rhs_spec=rhs).sum(), (0, 1))(x, w)


@pytest.mark.slow
def test_arguments() -> None:
    x = np.ones((2, 2), F32)

    def call(a: Any = x, **rest: Any) -> Any:
        return jq.quantized_dot_general(a, x, MATRIX, lhs_spec=I8, rhs_spec=I8, **rest)

    stochastic = Int8Backward(stochastic_rounding=True)
    with pytest.raises(TypeError, match=r"jaxquant\.Int8Backward: lhs: expected True or False, got 'no'"):
        Int8Backward(lhs="no")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"jaxquant\.Int8Backward: stochastic_rounding: expected True or False, got None"
    ):
        Int8Backward(None)  # type: ignore[arg-type]
    wrong: Any
    for wrong in ("int8", Int8Backward, [1], None):
        with pytest.raises(TypeError, match=r"backward: expected FloatBackward\(\), .* or Float8Backward\(\), got"):
            call(backward=wrong)
    np.testing.assert_array_equal(call(backward=stochastic), call())  # only the gradient needs a key
    for grad in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(
            ValueError,
            match=r"quantized_dot_general: key: expected a key, because .* rounds stochastically .*, got None",
        ):
            grad(lambda a: call(a, backward=stochastic).sum())(x)
    two = jax.random.split(jax.random.key(0), 2)
    for wrong in (5, "a", np.zeros(3, F32), two, jax.random.key_data(two)):
        for backward in (stochastic, jq.FloatBackward()):
            with pytest.raises(TypeError, match=r"key: expected None or one key of jax\.random, got"):
                call(backward=backward, key=wrong)
