"""A single row against a matrix that holds the contracted dimension last in memory, summed lane by lane on a CPU.

The sums are held against numpy's, in int64 and float64. The sizes are those from which the form is used, and others.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec
from jaxquant._kernels import float_rows

from ..support.hlo import Program
from ..support.matrix import mark_others_full

# The depth, the columns, and whether the form applies: 2**18 codes or more, in groups of 16 codes.
SHAPES = {
    (512, 512): True,
    (720, 400): True,
    (1280, 205): True,
    (1040, 256): True,
    (1030, 256): False,
    (64, 4097): False,
}
BY_DEFAULT = [(720, 400), (1030, 256)]
LAST = (((1,), (1,)), ((), ()))
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form is a CPU's")


def draw(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of which a quarter are the bounds of the dtype."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    codes = rng.integers(low, high + 1, shape)
    return np.where(rng.random(shape) < 0.25, rng.choice([low, high], shape), codes).astype(dtype)


def sum_exactly(x: Any, x_point: Any, w: Any, w_point: Any) -> np.ndarray:
    """The sums over the last dimensions of x [rows, K] and w [N, K], from which the zero points are subtracted."""
    left, right = np.asarray(x, np.int64) - np.int64(x_point), np.asarray(w, np.int64) - np.asarray(w_point, np.int64)
    return (left @ right.T).astype(np.int32)


@on_cpu
@pytest.mark.parametrize(("depth", "columns"), mark_others_full(SHAPES, BY_DEFAULT), ids=str)
@pytest.mark.parametrize(("left", "right"), [("uint8", "int8"), ("int8", "uint8")])
def test_integers(left: str, right: str, depth: int, columns: int, rng: np.random.Generator) -> None:
    """Zero points at both ends, and one for each column, in each way to call it."""
    x, w = draw(rng, left, (3, depth)), draw(rng, right, (columns, depth))
    points = draw(rng, right, (columns, 1))
    for x_point in (np.iinfo(left).min, np.iinfo(left).max, 7):
        scalar = np.asarray(x_point, left)

        def contract(row: Any, w: Any, point: Any, scalar: Any = scalar) -> jax.Array:
            return jq.integer.dot_general(row[None], w, LAST, lhs_zero_point=scalar, rhs_zero_point=point)[0]

        want = sum_exactly(x, x_point, w, points)
        np.testing.assert_array_equal(contract(x[0], w, points), want[0])
        np.testing.assert_array_equal(jax.jit(contract)(x[0], w, points), want[0])
        np.testing.assert_array_equal(jax.jit(lambda row, f=contract: f(row, w, points))(x[0]), want[0])
        np.testing.assert_array_equal(lax.scan(lambda _, row, f=contract: (None, f(row, w, points)), None, x)[1], want)
        np.testing.assert_array_equal(jax.vmap(contract, (0, None, None))(x, w, points), want)
        pair = np.stack([w, w[::-1]])
        mapped = jax.jit(jax.vmap(contract, (None, 0, None)))(x[0], pair, points)
        np.testing.assert_array_equal(mapped[1], sum_exactly(x[:1], x_point, w[::-1], points)[0])
        # The same product from the other side.
        turned = jq.integer.dot_general(w, x[:1], LAST, lhs_zero_point=points, rhs_zero_point=scalar)
        np.testing.assert_array_equal(turned[:, 0], want[0])


@on_cpu
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_narrow_integers(dtype: str, rng: np.random.Generator) -> None:
    w = jq.quantize(rng.normal(size=(512, 520)).astype(np.float32), QuantSpec(dtype, PerAxis(1)), stored_last=0)
    x = jq.quantize(rng.normal(size=(1, 512)).astype(np.float32), QuantSpec("uint8"))
    np.testing.assert_array_equal(jq.matmul(x, w), jq.matmul(x, w.store_last()))


@on_cpu
@pytest.mark.parametrize(("depth", "columns"), mark_others_full(SHAPES, BY_DEFAULT), ids=str)
@pytest.mark.parametrize("name", ["int8", "uint8", "one scale"])
def test_weight_only(name: str, depth: int, columns: int, rng: np.random.Generator) -> None:
    """Within 2e-6 of the sum of magnitudes; infinities and NaN as in floats; the gradient of the dequantized matrix."""
    specs = {
        "int8": QuantSpec(jnp.int8, PerAxis(1)),
        "uint8": QuantSpec(jnp.uint8, PerAxis(1)),
        "one scale": QuantSpec(jnp.uint8, PerTensor(), symmetric=False),
    }
    w = rng.normal(size=(depth, columns)).astype(np.float32)
    q = jq.quantize(w, specs[name], stored_last=0)
    real = np.asarray(q.dequantize(), np.float64)
    x = rng.normal(size=(3, depth)).astype(np.float32) * np.float32(1e3)
    x[:, 3] = 0
    limit = 2e-6 * (np.abs(np.asarray(x, np.float64)) @ np.abs(real))
    want = np.asarray(x, np.float64) @ real

    def contract(row: Any, q: QuantizedArray) -> jax.Array:
        return jq.matmul(row[None], q)[0]

    for got in (contract(x[0], q), jax.jit(contract)(x[0], q), jax.jit(lambda row: contract(row, q))(x[0])):
        assert np.all(np.abs(got - want[0]) <= limit[0])
    for rows in (
        lax.scan(lambda _, row: (None, contract(row, q)), None, x)[1],
        jax.vmap(contract, (0, None))(x, q),
        jax.vmap(lambda row: jq.matmul(q.T, row[:, None])[:, 0])(x),
    ):
        assert np.all(np.abs(rows - want) <= limit)
    for special in (np.inf, -np.inf, np.nan):
        row = x[0].copy()
        row[3] = special
        with np.errstate(invalid="ignore"):
            expected = np.float32(special) * real[3].astype(np.float32)
        np.testing.assert_array_equal(contract(row, q), expected)
    gradient = jax.grad(lambda row: contract(row, q).sum())(x[0])
    np.testing.assert_allclose(gradient, real.sum(1), rtol=1e-4, atol=1e-4 * np.abs(real).sum(1).max())


@on_cpu
@pytest.mark.parametrize(("depth", "columns"), SHAPES, ids=str)
def test_program(depth: int, columns: int) -> None:
    """The matrix is read by a loop, not by the kernel, which takes as long for one row as for eight."""
    x, w = jax.ShapeDtypeStruct((1, depth), jnp.int8), jax.ShapeDtypeStruct((columns, depth), jnp.int8)
    program = Program(lambda x, w: jq.integer.dot_general(x, w, LAST), x, w)
    has_dot = any(
        instruction.opcode == "dot" for computation in program.computations.values() for instruction in computation
    )
    assert has_dot is not SHAPES[depth, columns]


@on_cpu
@pytest.mark.parametrize("kind", ["integers", "floats"])
def test_constant_codes(kind: str, rng: np.random.Generator) -> None:
    """XLA must not convert codes that are constants to 32 bits while it compiles."""
    if kind == "floats" and not float_rows.IS_VECTORIZED:
        pytest.skip("the form is off; so few codes are dequantized at once, and XLA does that while it compiles")
    w = jq.quantize(rng.normal(size=(1024, 512)).astype(np.float32), QuantSpec("int8", PerAxis(1)), stored_last=0)
    dtype = jnp.int8 if kind == "integers" else jnp.float32

    def contract(x: jax.Array, w: QuantizedArray) -> jax.Array:
        if kind == "floats":
            return jq.matmul(x, w)
        return jq.integer.dot_general(x, w.stored_codes, LAST)

    x = jax.ShapeDtypeStruct((1, 1024), dtype)
    text = Program(lambda x: contract(x, w), x).text
    sizes = [
        np.prod([int(n) for n in dims.split(",")], dtype=int)
        for dims in re.findall(r"= (?:f32|s32)\[([\d,]+)\]\S* constant", text)
    ]
    assert max(sizes, default=0) < w.size // 32


@on_cpu
@pytest.mark.skipif(not float_rows.IS_VECTORIZED, reason="XLA of jax 0.10 converts them before the loop")
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("kind", ["integers", "floats"])
def test_codes_that_a_loop_does_not_change(kind: str, stored_last: int | None, rng: np.random.Generator) -> None:
    """XLA must not convert them to 32 bits before the loop: it would keep four bytes for each code."""
    w = jq.quantize(
        rng.normal(size=(1024, 512)).astype(np.float32), QuantSpec("int8", PerAxis(1)), stored_last=stored_last
    )

    def contract(row: jax.Array, w: QuantizedArray) -> jax.Array:
        return jq.matmul(row if kind == "floats" else jq.quantize(row, QuantSpec("int8")), w)

    def run(x: jax.Array, w: QuantizedArray) -> jax.Array:
        return lax.scan(lambda _, row: (None, contract(row[None], w)[0]), None, x)[1]

    x = rng.normal(size=(3, 1024)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(run)(x, w), jnp.concatenate([contract(row[None], w) for row in x]), rtol=1e-6)
    # Beside the codes, sums of four or of 256 codes each.
    memory: Any = jax.jit(run).lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.size


@pytest.mark.parametrize("columns", [1, 64])
def test_a_product_of_one_term_is_rounded(columns: int, rng: np.random.Generator) -> None:
    """XLA must not merge a contraction of one term, with a constant 1, and an addition."""
    q = jq.quantize(rng.normal(size=(1, columns)).astype(np.float32), QuantSpec("int8", PerAxis(1)))
    q = q.replace(scale=jnp.asarray(rng.uniform(0.5, 1, (1, columns)), jnp.float32))
    b = rng.normal(size=(1, columns)).astype(np.float32)
    got = jax.jit(lambda q, b: jq.matmul(jnp.ones((1, 1)), q) + b)(q, b)
    np.testing.assert_array_equal(got, np.asarray(q.dequantize()) + b)


# Blocks along the contracted dimension, which is last in memory.


BLOCKS = {
    "int4": QuantSpec("int4", Blocked(0, 32)),
    "uint4, zero points": QuantSpec("uint4", Blocked(0, 32), symmetric=False),
    "nf4": QuantSpec(jq.nf4, Blocked(0, 64)),
    "int4, blocks of 8": QuantSpec("int4", Blocked(0, 8)),
    "int4, blocks of 128": QuantSpec("int4", Blocked(0, 128)),
    "int8": QuantSpec("int8", Blocked(0, 32)),
    "uint8, zero points": QuantSpec("uint8", Blocked(0, 16), symmetric=False),
    "float4": QuantSpec("float4_e2m1fn", Blocked(0, 32)),
}


@on_cpu
@pytest.mark.parametrize(("depth", "columns"), [(512, 130), (640, 96)])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_stored_last(name: str, depth: int, columns: int, rng: np.random.Generator) -> None:
    """Within 2e-6 of the sum of magnitudes, from either side; what is not finite as in floats; gradients."""
    q = jq.quantize(rng.normal(size=(depth, columns)).astype(np.float32), BLOCKS[name], stored_last=0)
    real = np.asarray(q.dequantize(), np.float64)
    x = rng.normal(size=(3, depth)).astype(np.float32)
    limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
    want = x.astype(np.float64) @ real

    def contract(row: Any, q: QuantizedArray) -> jax.Array:
        return jq.matmul(row[None], q)[0]

    def contract_turned(row: Any, q: QuantizedArray) -> jax.Array:
        return jq.matmul(q.T, row[:, None])[:, 0]

    for function in (contract, contract_turned, lambda row, q: jq.einsum("k,kn->n", row, q)):
        assert np.all(np.abs(jax.jit(function)(x[0], q) - want[0]) <= limit[0])
    assert np.all(np.abs(jax.vmap(contract, (0, None))(x, q) - want) <= limit)
    for special in (np.inf, -np.inf, np.nan, 1e-44):
        row = x[0].copy()
        row[3] = special
        if special == 1e-44:
            assert np.all(np.abs(contract(row, q) - (want[0] - np.float64(x[0, 3]) * real[3])) <= limit[0])
            continue
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(contract(row, q), np.float32(special) * real[3].astype(np.float32))
    by_x, by_scale = jax.grad(lambda row, scale: contract(row, q.replace(scale=scale)).sum(), (0, 1))(x[0], q.scale)
    np.testing.assert_allclose(by_x, real.sum(1), rtol=1e-4, atol=1e-4 * np.abs(real).sum(1).max())
    steps = np.asarray(q.replace(scale=jnp.ones_like(q.scale)).dequantize(), np.float64) * x[0][:, None]
    want_scale = steps.reshape(q.scale.shape[0], -1, columns).sum(1)
    np.testing.assert_allclose(by_scale, want_scale, rtol=1e-4, atol=1e-3)


@on_cpu
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 1e-42, 1e30])
@pytest.mark.parametrize("stored_last", [None, 0])
def test_unusual_scales_of_blocks(stored_last: int | None, scale: float, rng: np.random.Generator) -> None:
    """One block has a scale that is 0, negative, subnormal, or far from 1."""
    codes = jnp.asarray(rng.integers(-7, 8, (256, 256)), "int4")
    scales = rng.uniform(0.5, 1, (8, 256)).astype(np.float32)
    scales[3] = scale
    q = QuantizedArray(codes, scales, stored_order=(-1, -2) if stored_last == 0 else None, signed_scale=True)
    x = rng.normal(size=(1, 256)).astype(np.float32)
    real = np.asarray(codes).astype(np.float64) * np.repeat(scales.astype(np.float64), 32, 0)
    limit = 2e-6 * (np.abs(x.astype(np.float64)) @ np.abs(real))
    assert np.all(np.abs(np.asarray(jax.jit(jq.matmul)(x, q)) - x.astype(np.float64) @ real) <= limit)
    if float_rows.IS_VECTORIZED:
        # The kernels of one row read the codes, and nothing dequantizes all of them.
        program = Program(jq.matmul, x, q)
        assert program.widest() < q.size // 2
        assert not any(i.opcode == "conditional" for body in program.computations.values() for i in body)
        assert program.count_contracted() < q.size // 2


@on_cpu
@pytest.mark.skipif(not float_rows.IS_VECTORIZED, reason="the form is off")
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("name", ["int4", "uint4, zero points", "int8", "float4"])
def test_memory_of_blocks(name: str, stored_last: int | None) -> None:
    """No array of the size of the weights is made, in any branch, neither for one product nor for several."""
    w = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    q = jax.eval_shape(lambda w: jq.quantize(w, BLOCKS[name], stored_last=stored_last), w)

    def contract(x: jax.Array, weights: list[QuantizedArray]) -> jax.Array:
        for q in weights:
            x = jnp.tanh(jq.matmul(x, q))
        return x

    program = Program(contract, jax.ShapeDtypeStruct((1, 2048), jnp.float32), [q] * 8)
    # The weights of one product take 4 * w.size bytes as float32, its scales in blocks of 32 an eighth of w.size.
    assert program.memory.temp_size_in_bytes < w.size
    assert program.widest() <= w.size // 2


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("columns", [96, 93])
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize("pack", [False, True])
def test_all_float4_numbers(pack: bool, scale_dtype: str, columns: int, stored_last: int | None) -> None:
    """A row with one 1 returns the numbers themselves; an odd number of columns is not read as words."""
    depth = 512
    bits = np.arange(depth * columns, dtype=np.uint8).reshape(depth, columns) * 7 % 16
    magnitudes = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    real = np.where(bits < 8, magnitudes[bits % 8], -magnitudes[bits % 8])
    scale = jnp.asarray(2.0 ** (np.arange(16 * columns).reshape(16, columns) % 5 - 2), scale_dtype)
    order = (-1, -2) if stored_last == 0 else None
    q = QuantizedArray(jnp.asarray(real, "float4_e2m1fn"), scale, dtype=jnp.float32, stored_order=order)
    q = q.pack() if pack else q
    want = real * np.repeat(np.asarray(scale, np.float32), 32, 0)
    multiply = jax.jit(jq.matmul)
    for k in range(0, depth, 37):
        np.testing.assert_array_equal(multiply(np.eye(1, depth, k, np.float32), q)[0], want[k])


@on_cpu
@pytest.mark.parametrize("stored_last", [None, 0])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_codes_at_the_zero_point(dtype: str, pack: bool, stored_last: int | None, rng: np.random.Generator) -> None:
    """They are 0.0, not a rounded difference of two sums; all other codes are exact with a row of one 1."""
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    points = rng.integers(low, high + 1, (8, 128))
    codes = np.where(rng.random((256, 128)) < 0.5, np.repeat(points, 32, 0), rng.integers(low, high + 1, (256, 128)))
    codes[:, :64] = np.repeat(points[:, :64], 32, 0)
    order = (-1, -2) if stored_last == 0 else None
    q = QuantizedArray(
        jnp.asarray(codes, dtype), jnp.ones((8, 128), jnp.float32), jnp.asarray(points, dtype), stored_order=order
    )
    q = q.pack() if pack else q
    assert not np.any(jax.jit(jq.matmul)(rng.normal(size=(1, 256)).astype(np.float32), q)[0, :64])
    for k in range(0, 256, 17):
        got = jax.jit(jq.matmul)(np.eye(1, 256, k, np.float32), q)[0]
        np.testing.assert_array_equal(got, codes[k] - points[k // 32])


@on_cpu
@pytest.mark.parametrize("shape", [(16, 8), (24, 34), (8, 2, 5, 16), (8, 256)], ids=str)
def test_order_of_the_sum_of_a_row(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Vectors of eight, one after the other, then neighbors in pairs, then what does not fill a vector."""
    products = (rng.normal(size=shape) * 2.0 ** rng.integers(-8, 9, shape)).astype(np.float32)
    flat = products.reshape(shape[0], -1)
    full = flat.shape[1] // 8 * 8
    total, *others = np.moveaxis(flat[:, :full].reshape(shape[0], -1, 8), 1, 0)
    for vector in others:
        total = total + vector
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    want = total[:, 0]
    if full < flat.shape[1]:
        first, *others = flat[:, full:].T
        for column in others:
            first = first + column
        want = want + first
    np.testing.assert_array_equal(jax.jit(float_rows.sum_rows)(products), want)


@on_cpu
@pytest.mark.parametrize("shape", [(13, 32), (16, 5), (8, 512)], ids=str)
def test_sum_of_other_rows(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Rows that do not fill vectors, or are long."""
    products = rng.normal(size=shape).astype(np.float32)
    want = products.astype(np.float64).sum(1)
    np.testing.assert_allclose(jax.jit(float_rows.sum_rows)(products), want, atol=1e-5 * np.abs(products).sum(1).max())
