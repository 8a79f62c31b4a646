"""dot_general and matmul over quantized arrays, against numpy: int64 sums, float32 products rounded one by one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec

from ..support.hlo import Program
from ..support.quantized_arrays import product, wide


def draw_operand(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: tuple[int, ...], **rest: Any
) -> QuantizedArray:
    """Codes over all of the dtype, extremes often, with scales and (unless `point` is None) odd zero points."""
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    codes = rng.integers(low, high + 1, shape)
    codes = np.where(rng.random(shape) < 0.2, rng.choice([low, high], shape), codes).astype(dtype)
    point_shape = rest.pop("point", scale)
    point = None if point_shape is None else jnp.asarray((rng.integers(low, high + 1, point_shape) | 1).astype(dtype))
    steps = rng.uniform(0.001, 2, scale).astype(np.float32)
    return QuantizedArray(jnp.asarray(codes), jnp.asarray(steps), point, **rest)


MATRIX = (((1,), (0,)), ((), ()))
U8, I8, I4, U4, I2 = jnp.uint8, jnp.int8, jnp.int4, jnp.uint4, jnp.int2
CASES: dict[str, tuple[Any, ...]] = {
    "per tensor, asymmetric": ((5, 33), U8, (1, 1), {}, (33, 7), U8, (1, 1), {}, MATRIX, None),
    "rows by columns": ((5, 33), U8, (5, 1), {}, (33, 7), I8, (1, 7), {}, MATRIX, None),
    "symmetric": ((5, 33), I8, (1, 1), {"point": None}, (33, 7), I8, (1, 7), {"point": None}, MATRIX, None),
    "4 by 2 bits": ((5, 33), I4, (1, 1), {}, (33, 7), I2, (1, 7), {}, MATRIX, None),
    "one row, 4 bits": ((1, 40), U8, (1, 1), {}, (40, 9), U4, (1, 9), {}, MATRIX, None),
    "point per row, one scale": ((5, 33), U8, (1, 1), {"point": (5, 1)}, (33, 7), U8, (1, 7), {"point": (1, 1)}, MATRIX, None),
    "blocks of rhs": ((5, 96), U8, (5, 1), {}, (96, 7), I8, (3, 7), {}, MATRIX, 32),
    "short last block": ((5, 100), U8, (1, 1), {}, (100, 7), U4, (4, 7), {"block_size": 32}, MATRIX, 32),
    "blocks of both": ((5, 96), U8, (5, 6), {}, (96, 7), I8, (3, 7), {}, MATRIX, 16),
    "blocks of points alone": ((5, 96), U8, (5, 1), {"point": (5, 3)}, (96, 7), I8, (1, 7), {"point": None}, MATRIX, 32),
    "blocks in both dimensions": ((5, 100), I8, (1, 1), {}, (100, 70), U8, (4, 3), {"block_size": 32}, MATRIX, 32),
    "one block, short": ((5, 20), U8, (1, 1), {}, (20, 3), I8, (1, 3), {"block_size": 32}, MATRIX, None),
    "batch, transposed": ((2, 9, 4), U8, (2, 1, 4), {}, (7, 2, 9), I8, (7, 2, 1), {}, (((1,), (2,)), ((0,), (1,))), None),
    "two contracted": ((3, 5, 2, 4), U8, (1, 1, 2, 1), {}, (4, 6, 5), I8, (1, 6, 1), {}, (((3, 1), (0, 2)), ((), ())), None),
    "blocks, batch, two contracted": (
        *((2, 64, 3, 5), U8, (2, 4, 1, 5), {}, (3, 2, 64, 6), I8, (1, 2, 2, 6), {}),
        *((((1, 2), (2, 0)), ((0,), (1,))), 16),
    ),
    "nothing free": ((50,), U8, (1,), {}, (50,), I8, (1,), {}, (((0,), (0,)), ((), ())), None),
    "outer": ((3,), U8, (3,), {}, (4,), I8, (4,), {}, (((), ()), ((), ())), None),
    "empty": ((0, 5), U8, (1, 1), {}, (5, 3), I8, (1, 3), {}, MATRIX, None),
}  # fmt: skip


def case(rng: np.random.Generator, name: str) -> tuple[QuantizedArray, QuantizedArray, Any, int | None]:
    left, l_dtype, l_scale, l_rest, right, r_dtype, r_scale, r_rest, numbers, length = CASES[name]
    lhs = draw_operand(rng, left, l_dtype, l_scale, **l_rest)
    return lhs, draw_operand(rng, right, r_dtype, r_scale, **r_rest), numbers, length


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_integers_then_scales(name: str, rng: np.random.Generator) -> None:
    lhs, rhs, numbers, length = case(rng, name)
    expected = product(lhs, rhs, numbers, length) if name != "outer" else None
    if expected is None:
        left, right = (np.asarray(q.codes).astype(int) - np.asarray(q.zero_point).astype(int) for q in (lhs, rhs))
        scale = np.multiply.outer(np.asarray(lhs.scale), np.asarray(rhs.scale))
        expected = np.multiply.outer(left, right).astype(np.float32) * scale
    dot = functools.partial(jq.dot_general, dimension_numbers=numbers)
    np.testing.assert_array_equal(dot(lhs, rhs), expected)
    np.testing.assert_array_equal(jax.jit(dot)(lhs, rhs), expected)
    np.testing.assert_array_equal(jax.jit(lambda: dot(lhs, rhs))(), expected)  # everything constant


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows by columns", "short last block", "batch, transposed"])
def test_transforms(name: str, rng: np.random.Generator) -> None:
    """vmap over both, over one, and scan give what a loop gives."""
    numbers, length = CASES[name][-2:]
    pairs = [case(rng, name)[:2] for _ in range(3)]
    dot = functools.partial(jq.dot_general, dimension_numbers=numbers)
    left, right = (jax.tree.map(lambda *parts: jnp.stack(parts), *(pair[i] for pair in pairs)) for i in (0, 1))
    expected = np.stack([product(*pair, numbers, length) for pair in pairs])
    np.testing.assert_array_equal(jax.vmap(dot)(left, right), expected)
    np.testing.assert_array_equal(lax.scan(lambda c, xs: (c, dot(*xs)), None, (left, right))[1], expected)
    shared = np.stack([product(pair[0], pairs[0][1], numbers, length) for pair in pairs])
    np.testing.assert_array_equal(jax.jit(jax.vmap(dot, in_axes=(0, None)))(left, pairs[0][1]), shared)
    shared = np.stack([product(pairs[0][0], pair[1], numbers, length) for pair in pairs])
    np.testing.assert_array_equal(jax.vmap(dot, in_axes=(None, 0))(pairs[0][0], right), shared)


@pytest.mark.slow
def test_a_long_contraction_does_not_wrap_around() -> None:
    """40,000 products of 255 and 255 are more than an int32 holds; plain integers return a negative number."""
    depth = 40_000
    codes, point = jnp.full((2, depth), 255, U8), jnp.zeros((1, 1), U8)
    q = QuantizedArray(codes, jnp.ones((1, 1)), point)
    wrapped = jq.integer.dot_general(codes, codes, (((1,), (1,)), ((), ())))
    assert int(wrapped[0, 0]) < 0
    np.testing.assert_allclose(jq.matmul(q, q.T), np.full((2, 2), depth * 255.0 * 255), rtol=1e-6)
    low = QuantizedArray(jnp.full((2, 140_000), -128, I8), jnp.ones((1, 1)))
    np.testing.assert_allclose(jq.matmul(low, low.T), np.full((2, 2), 140_000 * 128.0 * 128), rtol=1e-6)


SHAPES = [
    *(((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)), ((4, 5), (2, 5, 3)), ((2, 4, 5), (1, 5, 3))),
    *(((2, 1, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (2, 3, 5, 6)), ((5,), (2, 5, 3)), ((1, 4, 5), (1, 1, 5, 3)), ((3, 4, 5), (5,))),
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_matmul_has_numpy_s_shapes(shapes: Any, rng: np.random.Generator) -> None:
    sides = [draw_operand(rng, shape, dtype, (1,) * len(shape)) for shape, dtype in zip(shapes, (U8, I8), strict=True)]
    exact = []
    for q in sides:
        exact.append(np.asarray(q.codes).astype(np.int64) - np.asarray(q.zero_point).astype(np.int64))
    scale = np.float32(sides[0].scale.reshape(()) * sides[1].scale.reshape(()))
    expected = np.matmul(*exact).astype(np.float32) * scale
    np.testing.assert_array_equal(jq.matmul(*sides), expected)
    np.testing.assert_array_equal(sides[0] @ sides[1], expected)
    floats = [np.asarray(q.dequantize()) for q in sides]
    for mixed in ((sides[0], floats[1]), (floats[0], sides[1]), (jnp.asarray(floats[0]), sides[1])):
        np.testing.assert_allclose(jq.matmul(*mixed), np.matmul(*floats), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jnp.asarray(floats[0]) @ sides[1], np.matmul(*floats), rtol=1e-4, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", [
    QuantSpec(jnp.int8, PerAxis(1)), QuantSpec(jnp.uint4, Blocked(0, 32)), QuantSpec(jnp.float8_e4m3fn, PerAxis(1)),
    QuantSpec(jq.nf4, Blocked(0, 64)), QuantSpec(jnp.int16), QuantSpec(jnp.float4_e2m1fn, Blocked(0, 32), scale_dtype=jnp.float8_e8m0fnu),
], ids=str)  # fmt: skip
def test_weight_only(spec: QuantSpec, rng: np.random.Generator) -> None:
    """A float side meets every format, from the left and from the right, with its gradients."""
    x, w = rng.normal(size=(6, 200)).astype(np.float32), rng.normal(size=(200, 30)).astype(np.float32)
    q = jq.quantize(w, spec)
    real = np.asarray(q.dequantize(), np.float64)
    np.testing.assert_allclose(jq.matmul(x, q), x @ real, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jq.dot_general(q, x, (((0,), (1,)), ((), ()))), real.T @ x.T, rtol=1e-4, atol=1e-4)
    g = rng.normal(size=(6, 30)).astype(np.float32)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(jq.matmul(x, q) * g))(x), g @ real.T, rtol=1e-3, atol=1e-3)
    if spec.scale_dtype == jnp.float32:
        gradient = jax.grad(lambda s: jnp.sum(jq.matmul(x, q.replace(scale=s)) * g))(q.scale)
        terms = (x.astype(np.float64).T @ g) * (real / wide(np.asarray(q.scale, np.float64), q.shape, q.block_size))
        for axis, (n, entries) in enumerate(zip(q.shape, q.scale.shape, strict=True)):
            size = n if entries == 1 else 1 if entries == n else getattr(spec.granularity, "size", n)
            terms = np.add.reduceat(terms, np.arange(0, n, size), axis=axis)
        np.testing.assert_allclose(gradient, terms, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_large_weights_are_dequantized_in_pieces(rng: np.random.Generator) -> None:
    """The same result, the same gradient, and no float copy of the weights in memory."""
    k, n = 1000, 4500
    x, w = rng.normal(size=(3, k)).astype(np.float32), rng.normal(size=(k, n)).astype(np.float32)
    for spec in (QuantSpec(jnp.int8, PerAxis(1)), QuantSpec(jnp.int8, Blocked((0, 1), 32))):
        q = jq.quantize(w, spec)
        real = np.asarray(q.dequantize())
        np.testing.assert_allclose(jax.jit(jq.matmul)(x, q), x @ real, rtol=1e-3, atol=1e-3)
        grad = jax.jit(jax.grad(lambda x, q=q: jnp.sum(jq.matmul(x, q))))(x)
        np.testing.assert_allclose(grad, np.broadcast_to(real.sum(1), x.shape), rtol=1e-3, atol=1e-2)
    if jax.default_backend() == "cpu":
        assert Program(jq.matmul, x, q).widest() < k * n * 0.6
        turned = Program(lambda x, q: jq.dot_general(q, x, (((0,), (1,)), ((), ()))), x, q)
        assert turned.widest() < k * n * 0.6


@pytest.mark.parametrize("name", ["rows by columns", "short last block"])
def test_gradients_of_scales(name: str, rng: np.random.Generator) -> None:
    lhs, rhs, numbers, _ = case(rng, name)
    g = rng.normal(size=(5, 7)).astype(np.float32)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jq.dot_general(lhs.replace(scale=a), rhs.replace(scale=b), numbers) * g)

    da, db = jax.jit(jax.grad(loss, argnums=(0, 1)))(lhs.scale, rhs.scale)
    codes = []
    for q in (lhs, rhs):
        point = wide(np.asarray(q.zero_point).astype(np.float64), q.shape, q.block_size)
        codes.append(
            (
                np.asarray(q.codes).astype(np.float64) - point,
                wide(np.asarray(q.scale, np.float64), q.shape, q.block_size),
            )
        )
    (a, sa), (b, sb) = codes
    each_a, each_b = (g @ (b * sb).T) * a, ((a * sa).T @ g) * b
    for gradient, terms, q in ((da, each_a, lhs), (db, each_b, rhs)):
        for axis, (n, entries) in enumerate(zip(q.shape, q.scale.shape, strict=True)):
            size = n if entries == 1 else 1 if entries == n else q.block_size
            terms = np.add.reduceat(terms, np.arange(0, n, size), axis=axis)
        np.testing.assert_allclose(gradient, terms, rtol=1e-3, atol=1e-2)


def test_dtypes(rng: np.random.Generator) -> None:
    x, w = (jq.quantize(rng.normal(size=(4, 4)).astype(jnp.bfloat16), QuantSpec(jnp.int8)) for _ in range(2))
    assert jq.matmul(x, w).dtype == jnp.bfloat16
    exact = jq.matmul(x, w, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(jq.matmul(x, w), np.asarray(exact).astype(jnp.bfloat16))
    assert jq.matmul(x.dequantize(), w).dtype == jnp.bfloat16
    assert jq.matmul(x.dequantize(), w, preferred_element_type=jnp.float16).dtype == jnp.float16


def test_weight_only_sums_in_float32() -> None:
    """Of 16-bit operands too: float16 would overflow, bfloat16 lose its digits."""
    x, w = jnp.full((2, 256), 100, jnp.float16), jnp.full((256, 3), 300, jnp.float16)
    y = jq.matmul(x, jq.quantize(w, QuantSpec(jnp.int8)), preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y, np.full((2, 3), 256 * 100 * 300.0), rtol=1e-3)
    y = jq.einsum("ab,bc->a", x, jq.quantize(w, QuantSpec(jnp.int8)), preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y, np.full(2, 3 * 256 * 100 * 300.0), rtol=1e-3)


@pytest.mark.slow
def test_forward_mode(rng: np.random.Generator) -> None:
    """Small weight-only contractions and integer ones can be differentiated either way, and twice."""
    x = rng.normal(size=(2, 8)).astype(np.float32)
    q = jq.quantize(rng.normal(size=(8, 4)).astype(np.float32), QuantSpec(jnp.int8, PerAxis(1)))
    _, tangent = jax.jvp(lambda x: jq.matmul(x, q), (x,), (x,))
    np.testing.assert_allclose(tangent, jq.matmul(x, q), rtol=1e-5)
    hessian = jax.hessian(lambda s: jnp.sum(jq.matmul(x, q.replace(scale=s)) ** 2))(q.scale)
    assert np.isfinite(np.asarray(hessian)).all()


def test_numpy_on_the_left(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 8)).astype(np.float32)
    q = jq.quantize(rng.normal(size=(8, 4)).astype(np.float32), QuantSpec(jnp.int8))
    np.testing.assert_array_equal(x @ q, jq.matmul(x, q))
    with pytest.raises(TypeError, match=r"QuantizedArray: self: expected q\.dequantize\(\) for numpy's add"):
        np.add(x, q)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form is a CPU's")
@pytest.mark.parametrize(
    "spec",
    [QuantSpec(jnp.int8, PerAxis(1)), QuantSpec(jnp.uint8, PerAxis(1)), QuantSpec(jnp.int8, Blocked(0, 128))],
    ids=str,
)
def test_the_program_stays_int8(spec: QuantSpec) -> None:
    """Contractions of int8 into int32, and nothing wider than 8 bits as large as an operand."""
    if isinstance(spec.granularity, Blocked) and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10's XLA keeps the quotient of x, for the first block and for the loop over the others")

    def program(x: jax.Array, w: QuantizedArray) -> jax.Array:
        return jq.matmul(jq.quantize(x, QuantSpec(jnp.uint8), range=(-1.0, 1.0)), w)

    # x has more elements than what `barriers.split_small_fusion` splits, which writes one wide buffer.
    x, w = jax.ShapeDtypeStruct((37, 2048), jnp.float32), jax.ShapeDtypeStruct((2048, 53), jnp.float32)
    shapes = x, jax.eval_shape(lambda w: jq.quantize(w, spec), w)
    compiled = Program(program, *shapes)
    kinds = {(left[0], right[0], c.result[0]) for c in compiled.contractions() for left, right in [c.operands]}
    assert kinds == {("s8", "s8", "s32")}
    assert compiled.widest() < 37 * 2048 // 2


Q, F = QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((1, 1))), jnp.ones((6, 4))
ROWS: list[tuple[str, Any, Any, Any, type[Exception], str]] = [
    ("no array", Q, [1.0], MATRIX, TypeError, "rhs: expected an array, got list"),
    ("two floats", F, F, MATRIX, TypeError, "lhs, rhs: expected a QuantizedArray on at least one side"),
    ("int side", Q, jnp.ones((6, 4), I8), MATRIX, TypeError, "rhs: expected dtype float32, float16 or bfloat16, got int8"),
    ("sizes", Q, Q, MATRIX, ValueError, "dimension_numbers: expected equal contracted sizes"),
    ("numbers", Q, F, 3, ValueError, "dimension_numbers: expected"),
    ("bool", Q, F, (((True,), (0,)), ((), ())), TypeError, "dimension_numbers: expected an int, got True"),
    ("int16", Q, QuantizedArray(jnp.ones((6, 4), jnp.int16), jnp.ones((1, 1))), MATRIX, TypeError,
     r"rhs: expected values of int8, .* or rhs\.dequantize\(\), got int16"),
    ("code book", Q, QuantizedArray(jnp.ones((6, 4), U4), jnp.ones((1, 1)), codebook=jq.nf4), MATRIX, TypeError,
     r"rhs: .*or rhs\.dequantize\(\), got nf4"),
    ("scale per contracted index", Q, QuantizedArray(jnp.ones((6, 4), I8), jnp.ones((6, 1))), MATRIX, ValueError,
     r"rhs: expected one scale along the contracted dimension 0, .*rhs\.dequantize\(\), got one for each of its 6"),
    ("point per contracted index", Q, QuantizedArray(jnp.ones((6, 4), I8), jnp.ones((1, 1)), jnp.ones((6, 1), I8)), MATRIX,
     ValueError, "rhs: expected one zero_point along"),
    ("blocks apart", QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((4, 2))), QuantizedArray(jnp.ones((6, 4), I8), jnp.ones((3, 4))),
     MATRIX, ValueError, r"lhs, rhs: expected blocks of both sides that end at the same indices.*got blocks of \[2, 3\]"),
    ("blocks twice", QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((2, 2))), QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((1, 1))),
     (((0, 1), (0, 1)), ((), ())), ValueError, "lhs, rhs: expected blocks along one contracted dimension"),
    ("scale shape", QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((5, 1))), F, MATRIX, ValueError, r"lhs\.scale: expected the rank"),
    ("scale zero", QuantizedArray(jnp.ones((4, 6), I8), jnp.zeros((1, 1))), F, MATRIX, ValueError, r"lhs\.scale: expected positive"),
    ("scale int", QuantizedArray(jnp.ones((4, 6), I8), jnp.ones((1, 1), jnp.int32)), F, MATRIX, TypeError, r"lhs\.scale: expected dtype"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bad_input_is_named(row: Any) -> None:
    _, lhs, rhs, numbers, error, text = row
    with pytest.raises(error, match=rf"jaxquant\.dot_general: {text}"):
        jq.dot_general(lhs, rhs, numbers)


@pytest.mark.slow
def test_bad_input_of_matmul_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"jaxquant\.matmul: rhs: expected 6 rows, as many as lhs has columns, got shapes \(4, 6\)"
    ):
        jq.matmul(Q, Q)
    with pytest.raises(TypeError, match=r"jaxquant\.matmul: preferred_element_type: expected dtype float32"):
        jq.matmul(Q, F, preferred_element_type=jnp.int32)
    with pytest.raises(ValueError, match=r"jaxquant\.matmul: rhs: expected an array of rank 1 or more, got rank 0"):
        jq.matmul(Q, jnp.float32(1))


@pytest.mark.slow
def test_granularities_reach_the_contraction(rng: np.random.Generator) -> None:
    """From specs to the product, under PerTensor, PerAxis and Blocked on both sides: near the float64 product."""
    x, w = rng.normal(size=(8, 130)).astype(np.float32), rng.normal(size=(130, 9)).astype(np.float32)
    for left in (PerTensor(), PerAxis(0), Blocked(-1, 64)):
        for right in (PerTensor(), PerAxis(1), Blocked(0, 32)):
            q, r = jq.quantize(x, QuantSpec(jnp.uint8, left)), jq.quantize(w, QuantSpec(jnp.int8, right))
            exact = np.asarray(q.dequantize(), np.float64) @ np.asarray(r.dequantize(), np.float64)
            np.testing.assert_allclose(q @ r, exact, rtol=1e-4, atol=1e-4)
