"""Canaries: each fails the day XLA learns to rewrite what `_numerics` keeps apart."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxquant._kernels import affine, barriers

from ..oracles import onnx_text
from ..support import transforms
from ..support.equality import same_bits


def ulps(value: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
    """Moves float32 by whole ulps away from zero."""
    return (value.view(np.int32) + steps).astype(np.int32).view(np.float32)


@pytest.fixture
def operands(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators with full mantissas, half of the quotients beside a tie."""
    s = np.exp(rng.uniform(-20, 20, 200_000)).astype(np.float32)
    tie = ((rng.integers(-300, 300, s.shape) + 0.5) * s.astype(np.float64)).astype(np.float32)
    x = np.where(rng.random(s.shape) < 0.5, tie, (rng.normal(size=s.shape) * s).astype(np.float32))
    return x, s


def test_plain_division_is_not_exact(operands: tuple[np.ndarray, np.ndarray]) -> None:
    """If XLA stops multiplying by reciprocals, the reason for this library's quotient is gone."""
    x, _ = operands
    plain = np.asarray(jax.jit(lambda x: x / jnp.float32(0.037))(x))
    assert (plain != x / np.float32(0.037)).mean() > 0.01


@pytest.mark.slow
def test_quotient_by_a_scalar(operands: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = operands
    scale = np.float32(0.037)

    def op(x: jax.Array, s: jax.Array) -> jax.Array:
        return affine.divide(x, jnp.broadcast_to(s, x.shape))

    args = x.reshape(4, -1), np.full(4, scale)
    want = x.reshape(4, -1) / scale
    wrong = {name: transforms.mismatches(t(op, args), want) for name, t in transforms.ALL.items()}
    assert not any(wrong.values()), wrong


BROADCASTS = {
    "rows": lambda x: jnp.broadcast_to(x, (3, *x.shape)),
    "columns": lambda x: jnp.broadcast_to(x[:, None], (*x.shape, 3)),
    "both": lambda x: jnp.broadcast_to(x[None, :, None], (2, *x.shape, 3)),
    "large, rows": lambda x: jnp.broadcast_to(x, (130, *x.shape)),
    "large, columns": lambda x: jnp.broadcast_to(x[:130, None], (130, 4096)),
    "scalars": lambda x: jax.lax.map(lambda value: jnp.full((2, 3), value), x),
}


@pytest.mark.parametrize("name", list(BROADCASTS))
def test_quotients_of_broadcast_operands(name: str, operands: tuple[np.ndarray, np.ndarray]) -> None:
    """If both operands repeat their elements, XLA divides before it repeats them, and must not use the reciprocal."""
    x, s = operands
    x, s = x[:4096], s[:4096]

    @jax.jit
    def repeat_and_divide(x: jax.Array, s: jax.Array) -> jax.Array:
        wide = BROADCASTS[name](x)
        return jax.vmap(lambda s: affine.divide(wide, jnp.broadcast_to(s, wide.shape)))(s)

    @jax.jit
    def divide_repeated(x: jax.Array, s: jax.Array) -> jax.Array:
        return affine.divide(BROADCASTS[name](x), BROADCASTS[name](s))

    want = np.asarray(BROADCASTS[name](x / s))
    same_bits(divide_repeated(x, s), want)
    divisors = s[:5]
    want = np.stack([np.asarray(BROADCASTS[name](x / divisor)) for divisor in divisors])
    same_bits(repeat_and_divide(x, divisors), want)


@pytest.mark.parametrize("name", ["jit", "vmap", "known dividend", "eager"])
def test_quotients_while_constants_are_folded(name: str, operands: tuple[np.ndarray, np.ndarray]) -> None:
    """In `jax.ensure_compile_time_eval` the condition that hides the division must not become a constant."""
    x, scale = operands[0][:4096].reshape(64, 64), np.float32(0.037)

    def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            return affine.divide(x, jnp.broadcast_to(scale, x.shape))

    functions = {
        "jit": lambda: jax.jit(divide)(x, scale),
        "vmap": lambda: jax.jit(jax.vmap(divide, (0, None)))(x, scale),
        "known dividend": lambda: jax.jit(lambda scale: divide(jnp.asarray(x), scale))(scale),
        "eager": lambda: divide(jnp.asarray(x), jnp.asarray(scale)),
    }
    assert transforms.mismatches(functions[name](), x / scale) == 0


def test_quotient_of_a_quotient(operands: tuple[np.ndarray, np.ndarray]) -> None:
    """XLA reassociates (a / b) / s and a / (b / c); the operands are shielded from both sides."""
    x, s = operands
    b = np.roll(s, 1)
    actual = jax.jit(lambda x, b, s: affine.divide(x / b, s))(x, b, s)
    inner = np.asarray(jax.jit(lambda x, b: affine.divide(x, b))(x, b))
    np.testing.assert_array_equal(np.asarray(actual), inner / s)
    scale = jax.jit(lambda x, m: affine.divide(x, jnp.broadcast_to(m / jnp.float32(127), x.shape)))
    m = np.float32(3.3)
    quotient = np.asarray(jax.jit(lambda m: m / jnp.float32(127))(m))
    np.testing.assert_array_equal(np.asarray(scale(x, m)), x / quotient)


@pytest.mark.parametrize("error", range(-3, 4))
def test_correction_restores_the_quotient(operands: tuple[np.ndarray, np.ndarray], error: int) -> None:
    """Stands in for a backend whose division is a few ulp off: the residual brings back IEEE's."""
    x, s = operands
    exact = x / s
    usable = np.abs(exact) > 1e-30
    approximate = np.where(usable, ulps(exact, error), exact)
    actual = np.asarray(jax.jit(affine.correct_quotient)(approximate, x, s))
    np.testing.assert_array_equal(actual, exact)


def test_correction_around_powers_of_two(rng: np.random.Generator) -> None:
    """Quotients next to 2**k, where the distance between floats changes."""
    s = np.exp(rng.uniform(-5, 5, 100_000)).astype(np.float32)
    power = np.exp2(rng.integers(-8, 9, s.shape)).astype(np.float32)
    x = ulps(s * power, rng.integers(-3, 4, s.shape))
    exact = x / s
    approximate = ulps(exact, rng.integers(-3, 4, s.shape))
    actual = np.asarray(jax.jit(affine.correct_quotient)(approximate, x, s))
    np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize("error", range(-4, 5))
def test_near_ties_are_rounded_to_the_same_integers(error: int, rng: np.random.Generator) -> None:
    """Quotients on ties and up to 8 ulp beside them, given approximate ones that are a few ulp off."""
    count = 200_000
    s = np.exp(rng.uniform(-60, 60, count)).astype(np.float32) * rng.choice([-1, 1], count).astype(np.float32)
    # Scales with few digits have quotients that are ties exactly.
    short = rng.random(count) < 0.3
    s = np.where(short, np.exp2(rng.integers(-20, 20, count)) * rng.integers(1, 128, count), s).astype(np.float32)
    whole = np.floor(np.exp2(rng.uniform(0, 17, count))) - 1
    ties = (np.where(rng.random(count) < 0.2, 0, whole) + 0.5).astype(np.float64)
    x = ulps((ties * s).astype(np.float32), rng.integers(-8, 9, count))
    exact = x / s
    assert (exact == np.sign(exact) * ties).sum() > 1000
    approximate = ulps(exact, np.full(count, error))
    actual = np.asarray(jax.jit(affine.correct_near_ties)(approximate, x, s))
    np.testing.assert_array_equal(np.round(actual), np.round(exact))
    far = rng.normal(0, 3, count).astype(np.float32) * np.abs(s)
    quotient = far / s
    actual = np.asarray(jax.jit(affine.correct_near_ties)(ulps(quotient, np.full(count, error)), far, s))
    np.testing.assert_array_equal(np.round(actual), np.round(quotient))


@pytest.mark.parametrize("correct", [affine.correct_quotient, affine.correct_near_ties])
def test_correction_leaves_the_rest_alone(correct: Callable[..., jax.Array]) -> None:
    x = np.array([1, -1, np.inf, np.nan, 0, 1, 3e38, 1e-38], np.float32)
    s = np.array([0, 0, 2, 1, 5, np.inf, 1e-9, 3e38], np.float32)
    with np.errstate(all="ignore"):
        native = x / s
    actual = np.asarray(jax.jit(correct)(native, x, s))
    assert transforms.mismatches(actual, native) == 0


def test_the_cpu_program_divides() -> None:
    """One true division in the compiled program, and no reciprocal."""
    compiled = jax.jit(lambda x, s: affine.divide(x, jnp.broadcast_to(s, x.shape)))
    text = compiled.lower(jnp.ones(1024, jnp.float32), jnp.float32(3)).compile().as_text() or ""
    assert text.count(" divide(") == 1
    assert "f32[] divide(" not in text


def test_product_is_rounded_before_an_addition(rng: np.random.Generator) -> None:
    """A fused multiply-add would round once."""
    a, b, c = (rng.normal(size=100_000).astype(np.float32) for _ in range(3))
    plain = jax.jit(lambda a, b, c: a * b + c)(a, b, c)
    assert (np.asarray(plain) != a * b + c).any(), "XLA no longer fuses: this canary has nothing to watch"
    actual = jax.jit(lambda a, b, c: barriers.round_result(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(np.asarray(actual), a * b + c)
    loop = jax.jit(lambda a, b, c: lax.map(lambda t: barriers.round_result(t[0] * t[1]) + t[2], (a, b, c)))
    rows = tuple(v.reshape(10, -1) for v in (a, b, c))
    np.testing.assert_array_equal(np.asarray(loop(*rows)).ravel(), a * b + c)
    by_scalar = jax.jit(lambda a, c: barriers.round_result(a * jnp.float32(0.037)) + c)
    np.testing.assert_array_equal(np.asarray(by_scalar(a, c)), a * np.float32(0.037) + c)


def test_round_result_and_its_gradient_are_the_identity(rng: np.random.Generator) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38, 1e-38], np.float32)
    x = np.concatenate([special, rng.integers(0, 2**32, 100_000).astype(np.uint32).view(np.float32)])
    assert transforms.mismatches(np.asarray(jax.jit(barriers.round_result)(x)), x) == 0
    gradients = jax.grad(lambda a, b: barriers.round_result(a * b).sum(), (0, 1))(
        jnp.array([2.0, -3.0], jnp.float32), jnp.array([5.0, 0.0], jnp.float32)
    )
    np.testing.assert_array_equal(gradients, [[5, 0], [2, -3]])


def test_constants_are_added_one_after_the_other(rng: np.random.Generator) -> None:
    x = rng.uniform(-1e-3, 1e-3, 10_000).astype(np.float32)
    actual = jax.jit(lambda x: barriers.round_result(x + jnp.float32(1)) + jnp.float32(2**20))(x)
    np.testing.assert_array_equal(np.asarray(actual), (x + np.float32(1)) + np.float32(2**20))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_round_to_dtype_is_not_removed(name: str, rng: np.random.Generator) -> None:
    dtype = onnx_text.dtype(name)
    with np.errstate(invalid="ignore"):  # ARM's processors report the conversion of a signaling NaN
        every = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every) & ((every == 0) | (np.abs(every) > 1e-37))]
    x = np.concatenate([every, every * np.float32(1 + 2**-9), np.exp(rng.uniform(-16, 10, 50_000)).astype(np.float32)])
    with np.errstate(over="ignore"):
        want = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: affine.round_to_dtype(x, dtype))(x)), want)


def test_integer_quotient_is_exact(rng: np.random.Generator) -> None:
    edge = np.array([-(2**31), -(2**31) + 1, -3, -2, -1, 0, 1, 2, 3, 2**31 - 1])
    x, s = np.meshgrid(edge, edge)
    x = np.concatenate([x.ravel(), rng.integers(-(2**31), 2**31, 50_000), rng.integers(-999, 999, 50_000)])
    s = np.concatenate([s.ravel(), rng.integers(-(2**20), 2**20, 50_000), rng.integers(-20, 20, 50_000)])
    actual = np.asarray(jax.jit(affine.divide_integers)(x.astype(np.int32), s.astype(np.int32)))
    with np.errstate(all="ignore"):
        expected = np.rint(x.astype(np.float64) / s)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[finite], np.clip(expected[finite], -(2**20), 2**20))
    np.testing.assert_array_equal(actual[~finite], expected[~finite])


@pytest.mark.parametrize("name", list(onnx_text.BOUNDS))
def test_encode_at_every_tie(name: str) -> None:
    low, high = onnx_text.BOUNDS[name]
    for point in {low, high, 0, (low + high) // 2 | 1}:
        k = np.arange(low - 2, high + 2) - point
        middle = (k + 0.5).astype(np.float32)
        below, above = (np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf))
        x = np.concatenate([middle, below, above, np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)])
        z = jnp.full(x.shape, point, jnp.int32)
        actual = jax.jit(lambda x, z: affine.encode_steps(x, z, onnx_text.dtype(name)))(x, z)
        expected = onnx_text.codes(x.astype(np.float64), point, (low, high))
        np.testing.assert_array_equal(np.asarray(actual).astype(np.int64), expected)
