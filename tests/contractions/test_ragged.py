"""ragged_dot of quantized arrays: integers against int64 sums, floats against float64, and against jax.lax."""

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
from ..support.quantized_arrays import wide

DEPTH, COLUMNS = 64, 24


def draw_sizes(rng: np.random.Generator, rows: int, groups: int) -> np.ndarray:
    """Return sizes of groups, some of them 0, that often leave rows over, and sometimes name more than there are."""
    chances = rng.dirichlet(np.full(groups, 0.3))
    return rng.multinomial(rng.integers(0, rows + 3), chances).astype(np.int32)


def draw_case(rng: np.random.Generator, rows: int, groups: int) -> tuple[Any, Any, Any]:
    x = rng.normal(size=(rows, DEPTH)).astype(np.float32)
    w = (rng.normal(size=(groups, DEPTH, COLUMNS)) * 2.0 ** rng.integers(-3, 4, (groups, 1, 1))).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(draw_sizes(rng, rows, groups))


def list_groups(sizes: Any, rows: int) -> np.ndarray:
    """Return the group of each row that has one."""
    return np.repeat(np.arange(len(sizes)), np.asarray(sizes))[:rows]


def multiply(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """Return the ragged product in the dtype of the operands, by a loop over the rows."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    out = np.zeros((len(lhs), rhs.shape[2]), lhs.dtype)
    for row, group in enumerate(list_groups(sizes, len(lhs))):
        out[row] = lhs[row] @ rhs[group]
    return out


def center(q: QuantizedArray) -> np.ndarray:
    codes = np.asarray(q.codes).astype(np.int64)
    if q.zero_point is None:
        return codes
    return codes - wide(np.asarray(q.zero_point), q.shape, q.block_size).astype(np.int64)


WEIGHTS: dict[str, Any] = {
    "per output": QuantSpec(jnp.int8, PerAxis((0, 2))),
    "per expert": QuantSpec(jnp.int8, PerAxis(0)),
    "per tensor, zero point": QuantSpec(jnp.uint8, PerTensor()),
    "zero points per output": QuantSpec(jnp.uint4, PerAxis((0, 2)), symmetric=False),
    "blocks": QuantSpec(jnp.int4, Blocked(1, 32)),
    "blocks, zero points": QuantSpec(jnp.uint4, Blocked(1, 16), symmetric=False),
    "codebook": QuantSpec(jq.nf4, Blocked(1, 32)),
    "float8": QuantSpec(jnp.float8_e4m3fn, PerAxis((0, 2))),
    "float4": QuantSpec(jnp.float4_e2m1fn, Blocked(1, 32), scale_dtype=jnp.float8_e8m0fnu),
}
ROWS = [(1, 3), (2, 6), (7, 3), (40, 5), (3, 1)]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.sample(4)
def test_weight_only(name: str, rows: tuple[int, int], rng: np.random.Generator) -> None:
    x, w, sizes = draw_case(rng, *rows)
    q = jq.quantize(w, WEIGHTS[name])
    q = q.store_last(1) if rng.random() < 0.5 else q
    floats, x64 = np.asarray(q.dequantize(), np.float64), np.asarray(x, np.float64)
    want, magnitudes = multiply(x64, floats, sizes), multiply(abs(x64), abs(floats), sizes)
    for y in (jq.ragged_dot(x, q, sizes), jax.jit(jq.ragged_dot)(x, q, sizes)):
        assert (abs(np.asarray(y) - want) <= 2e-6 * magnitudes).all()
    np.testing.assert_allclose(want, lax.ragged_dot(x, q.dequantize(), sizes), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name not in ("codebook", "float8", "float4")])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("tokens", [
    QuantSpec(jnp.uint8, PerAxis(0)), QuantSpec(jnp.int8), QuantSpec(jnp.int8, Blocked(1, 32)),
], ids=["per row", "per tensor", "blocks"])  # fmt: skip
@pytest.mark.sample(4)
def test_integers(name: str, rows: tuple[int, int], tokens: QuantSpec, rng: np.random.Generator) -> None:
    """Each row has the bits of dot_general with the matrix of its group, and sums that are exact in int32."""
    x, w, sizes = draw_case(rng, *rows)
    lhs, rhs = jq.quantize(x, tokens), jq.quantize(w, WEIGHTS[name])
    rhs = rhs.store_last(1) if rng.random() < 0.5 else rhs
    want = np.zeros((rows[0], COLUMNS), np.float32)
    for row, group in enumerate(list_groups(sizes, rows[0])):
        want[row] = jq.matmul(lhs[row], rhs[int(group)])
    np.testing.assert_array_equal(jq.ragged_dot(lhs, rhs, sizes), want)
    np.testing.assert_array_equal(jax.jit(jq.ragged_dot)(lhs, rhs, sizes), want)
    # With scales of 1 the results are the sums themselves; those of one block are below 2**24, and so exact.
    plain: Any = [q.replace(scale=jnp.ones(q.scale.shape, q.scale.dtype)) for q in (lhs, rhs)]
    np.testing.assert_array_equal(jq.ragged_dot(plain[0], plain[1], sizes), multiply(center(lhs), center(rhs), sizes))


def test_either_side_may_be_quantized(rng: np.random.Generator) -> None:
    x, w, sizes = draw_case(rng, 9, 3)
    lhs = jq.quantize(x, QuantSpec(jnp.int8, PerAxis(0)))
    want = multiply(lhs.dequantize(), w, sizes)
    np.testing.assert_allclose(jq.ragged_dot(lhs, w, sizes), want, rtol=1e-4, atol=1e-3)


def test_dtypes_of_results(rng: np.random.Generator) -> None:
    x, w, sizes = draw_case(rng, 9, 3)
    q, lhs = jq.quantize(w, WEIGHTS["per output"]), jq.quantize(x, QuantSpec(jnp.int8, PerAxis(0)))
    assert jq.ragged_dot(x.astype(jnp.bfloat16), q.astype(jnp.bfloat16), sizes).dtype == jnp.bfloat16
    assert jq.ragged_dot(x.astype(jnp.bfloat16), q, sizes).dtype == jnp.float32
    half = jq.ragged_dot(lhs, q, sizes, preferred_element_type=jnp.float16)
    np.testing.assert_array_equal(half, jq.ragged_dot(lhs, q, sizes).astype(jnp.float16))


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 5, 0], [5, 0, 0], [2, 0, 9], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64, np.uint32])
@pytest.mark.sample(3)
def test_group_sizes(sizes: list[int], dtype: Any, rng: np.random.Generator) -> None:
    """Groups without rows, groups beyond the last row, and rows without a group, also if these hold NaN."""
    x, w, _ = draw_case(rng, 5, 3)
    x = np.array(x)
    x[sum(sizes) :] = np.nan
    q = jq.quantize(w, WEIGHTS["blocks"])
    want = multiply(np.nan_to_num(x), q.dequantize(), sizes)
    given = np.asarray(sizes, dtype)
    np.testing.assert_allclose(jq.ragged_dot(x, q, given), want, rtol=1e-4, atol=1e-3)
    if dtype != np.int64:
        np.testing.assert_allclose(jax.jit(jq.ragged_dot)(x, q, given), want, rtol=1e-4, atol=1e-3)
    codes = q.codes.at[jnp.asarray(sizes) == 0].set(0)
    scale = jnp.where((jnp.asarray(sizes) == 0)[:, None, None], jnp.inf, q.scale)
    # A matrix that no row needs is not read.
    got = jq.ragged_dot(np.nan_to_num(x), q.replace(codes=codes, scale=scale), given)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 8, 4, 2), (5, 0, 4, 2), (5, 8, 0, 2), (5, 8, 4, 0)], ids=str)
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    rows, depth, columns, groups = shape
    q = QuantizedArray(jnp.ones((groups, depth, columns), jnp.int8), jnp.ones((1, 1, 1)))
    sizes = jnp.full(groups, rows // max(groups, 1))
    for x in (jnp.ones((rows, depth)), QuantizedArray(jnp.ones((rows, depth), jnp.int8), jnp.ones((1, 1)))):
        np.testing.assert_array_equal(jq.ragged_dot(x, q, sizes), np.zeros((rows, columns), np.float32))


@pytest.mark.parametrize("name", ["per output", "blocks, zero points", "codebook", "float8"])
@pytest.mark.parametrize("rows", [(1, 3), (9, 3)], ids=str)
@pytest.mark.sample(3)
def test_gradients_of_floats(name: str, rows: tuple[int, int], rng: np.random.Generator) -> None:
    """The cotangents are those of jax.lax.ragged_dot with the dequantized array; rows without a group have none."""
    x, w, sizes = draw_case(rng, *rows)
    q = jq.quantize(w, WEIGHTS[name])
    g = jnp.asarray(rng.normal(size=(rows[0], COLUMNS)).astype(np.float32))

    def pull(product: Any) -> Any:
        return jax.grad(lambda x, s: (product(x, q.replace(scale=s), sizes) * g).sum(), (0, 1))(x, q.scale)

    def reference(x: Any, q: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, q.dequantize(), sizes)

    for ours, theirs in zip(pull(jq.ragged_dot), pull(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(pull(jq.ragged_dot)[0][len(list_groups(sizes, rows[0])) :], 0)
    primal, tangent = jax.jvp(lambda x: jq.ragged_dot(x, q, sizes), (x,), (x,))
    np.testing.assert_allclose(primal, tangent, rtol=1e-3, atol=1e-2)


def test_gradients_of_scales(rng: np.random.Generator) -> None:
    x, w, sizes = draw_case(rng, 9, 3)
    lhs, rhs = jq.quantize(x, QuantSpec(jnp.uint8, PerAxis(0))), jq.quantize(w, WEIGHTS["per output"])

    def pull(product: Any) -> Any:
        def f(a: Any, b: Any) -> Any:
            return (product(lhs.replace(scale=a), rhs.replace(scale=b)) ** 2).sum()

        return jax.grad(f, (0, 1))(lhs.scale, rhs.scale)

    ours = pull(lambda a, b: jq.ragged_dot(a, b, sizes))
    theirs = pull(lambda a, b: lax.ragged_dot(a.dequantize(), b.dequantize(), sizes))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=np.abs(other).max() * 1e-4)


def test_vmap_and_scan(rng: np.random.Generator) -> None:
    x, w, sizes = draw_case(rng, 9, 3)
    q, lhs = jq.quantize(w, WEIGHTS["per output"]), jq.quantize(x, QuantSpec(jnp.uint8, PerAxis(0)))
    xs, counts = jnp.stack([x, -x]), jnp.stack([sizes, sizes[::-1]])
    stack = functools.partial(jax.tree.map, lambda *parts: jnp.stack(parts))
    codes, layers = stack(lhs, jq.quantize(-x, QuantSpec(jnp.uint8, PerAxis(0)))), stack(q, q)
    want = [jq.ragged_dot(*pair) for pair in ((xs[0], q, counts[0]), (xs[1], q, counts[1]))]
    np.testing.assert_allclose(jax.vmap(jq.ragged_dot, (0, None, 0))(xs, q, counts), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jax.vmap(jq.ragged_dot)(xs, layers, counts), want, rtol=1e-4, atol=1e-3)
    exact = [jq.ragged_dot(codes[0], q, sizes), jq.ragged_dot(codes[1], q, sizes)]
    np.testing.assert_array_equal(jax.vmap(jq.ragged_dot, (0, None, None))(codes, q, sizes), exact)
    scanned = lax.scan(lambda c, xs: (c, jq.ragged_dot(*xs, sizes)), None, (codes, layers))[1]
    np.testing.assert_array_equal(scanned, exact)
    gradient = jax.vmap(jax.grad(lambda x, n: (jq.ragged_dot(x, q, n) ** 2).sum()))(xs, counts)
    reference = jax.grad(lambda x: (lax.ragged_dot(x, q.dequantize(), counts[1]) ** 2).sum())(xs[1])
    np.testing.assert_allclose(gradient[1], reference, rtol=1e-3, atol=1e-1)


GENERAL: dict[str, tuple[Any, ...]] = {
    "several rows and columns": ((4, 9, DEPTH), (3, 5, DEPTH, 2), (((2,), (2,)), ((), ())), 1, 0, (3,)),
    "sizes for each index in front": ((4, 9, DEPTH), (3, DEPTH, 5), (((2,), (1,)), ((), ())), 1, 0, (4, 3)),
    "batch, groups last": ((2, 9, DEPTH), (DEPTH, 5, 2, 3), (((2,), (0,)), ((0,), (2,))), 1, 3, (3,)),
    "batch, with sizes": ((9, 2, DEPTH), (2, 3, DEPTH, 5), (((2,), (2,)), ((1,), (0,))), 0, 1, (2, 3)),
    "two contracted": ((8, 9, DEPTH), (DEPTH, 3, 8, 5), (((0, 2), (2, 0)), ((), ())), 1, 1, (3,)),
}


@pytest.mark.parametrize("name", GENERAL)
def test_general(name: str, rng: np.random.Generator) -> None:
    left, right, dots, ragged, group, shape = GENERAL[name]
    numbers = lax.RaggedDotDimensionNumbers(dots, [ragged], [group])
    x = jnp.asarray(rng.normal(size=left).astype(np.float32))
    w = jnp.asarray(rng.normal(size=right).astype(np.float32))
    contracted = dots[0][1]
    q = jq.quantize(
        w, QuantSpec(jnp.int8, PerAxis(tuple(axis for axis in range(len(right)) if axis not in contracted)))
    )
    sizes = jnp.asarray(rng.multinomial(8, np.ones(3) / 3, shape[:-1]).astype(np.int32))
    want = lax.ragged_dot_general(x, q.dequantize(), sizes, numbers)
    np.testing.assert_allclose(jq.ragged_dot_general(x, q, sizes, numbers), want, rtol=1e-4, atol=1e-3)
    lhs = jq.quantize(x, QuantSpec(jnp.int8, PerAxis(ragged)))
    want = lax.ragged_dot_general(lhs.dequantize(), q.dequantize(), sizes, numbers)
    np.testing.assert_allclose(jq.ragged_dot_general(lhs, q, sizes, numbers), want, rtol=1e-4, atol=1e-3)


def test_no_float_copy_of_the_experts() -> None:
    """The largest float array in memory is one matrix; with few tokens there is none."""
    groups, depth, columns = 16, 512, 512
    q = QuantizedArray(jnp.ones((groups, depth, columns), jnp.int8), jnp.ones((groups, 1, columns)))
    for rows in (1, 64):
        x = jnp.ones((rows, depth))
        program = Program(jq.ragged_dot, x, q, jnp.zeros(groups, jnp.int32))
        shapes = [shape for i in program.in_memory() for dtype, shape in i.results if dtype in ("f32", "bf16", "s32")]
        assert max(np.prod(shape) for shape in shapes) <= depth * columns
        lhs = jq.quantize(x, QuantSpec(jnp.int8, PerAxis(0)))
        program = Program(jq.ragged_dot, lhs, q, jnp.zeros(groups, jnp.int32))
        floats = [shape for i in program.in_memory() for dtype, shape in i.results if dtype in ("f32", "bf16")]
        assert max(np.prod(shape) for shape in floats) <= rows * max(depth, columns) + groups * columns


def test_errors() -> None:
    q = QuantizedArray(jnp.ones((2, 8, 4), jnp.int8), jnp.ones((2, 1, 1)))
    x, sizes = jnp.ones((3, 8)), jnp.array([1, 2])
    both = r"jaxquant.ragged_dot: lhs, rhs: expected "
    with pytest.raises(TypeError, match=f"{both}a QuantizedArray on at least one side"):
        jq.ragged_dot(x, q.dequantize(), sizes)
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: rhs: expected rank 3, got shape \(8, 4\)"):
        jq.ragged_dot(x, q[0], sizes)
    with pytest.raises(ValueError, match=both + r"\[M, K\] and \[G, K, N\] with the same K"):
        jq.ragged_dot(x[:, 1:], q, sizes)
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: group_sizes: expected shape \(2,\), a number for each"):
        jq.ragged_dot(x, q, jnp.array([1, 1, 1]))
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: group_sizes: expected no negative number, got -1"):
        jq.ragged_dot(x, q, jnp.array([-1, 1]))
    with pytest.raises(TypeError, match=r"jaxquant.ragged_dot: group_sizes: expected an array of integers"):
        jq.ragged_dot(x, q, jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: group_offset: expected None"):
        jq.ragged_dot(x, q, sizes, group_offset=jnp.array(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jaxquant.ragged_dot: preferred_element_type"):
        jq.ragged_dot(x, q, sizes, preferred_element_type=jnp.int32)
    with pytest.raises(TypeError, match=r"jaxquant.ragged_dot: rhs: expected values of"):
        jq.ragged_dot(jq.quantize(x, QuantSpec(jnp.int8)), jq.quantize(q.dequantize(), QuantSpec(jq.nf4)), sizes)
    codes, per_input = jq.quantize(x, QuantSpec(jnp.int8)), jq.quantize(q.dequantize(), QuantSpec(jnp.int8, PerAxis(1)))
    with pytest.raises(ValueError, match=r"ragged_dot: rhs: expected one scale along the contracted dimension 1"):
        jq.ragged_dot(codes, per_input, sizes)
    permuted = q.replace(permutation=jnp.arange(8, dtype=jnp.int32), permuted_axis=-2)
    with pytest.raises(ValueError, match=r"jaxquant.ragged_dot: rhs.permutation: expected None"):
        jq.ragged_dot(codes, permuted, sizes)
    np.testing.assert_allclose(jq.ragged_dot(x, permuted, sizes), jq.ragged_dot(x, q, sizes), rtol=1e-5, atol=1e-6)
    general = "jaxquant.ragged_dot_general: ragged_dot_dimension_numbers: expected "
    with pytest.raises(TypeError, match=f"{general}a jax.lax.RaggedDotDimensionNumbers"):
        jq.ragged_dot_general(x, q, sizes, (((1,), (1,)), ((), ())))  # type: ignore[arg-type]
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [0])
    with pytest.raises(ValueError, match=f"{general}a ragged dimension of lhs that is neither contracted"):
        jq.ragged_dot_general(x, q, sizes, numbers)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])
    with pytest.raises(ValueError, match=f"{general}one ragged dimension of lhs, and one group dimension of rhs"):
        jq.ragged_dot_general(x, q[0], sizes, numbers)


def test_symbolic_rows_and_platforms() -> None:
    q = jq.quantize(jnp.arange(64.0).reshape(2, 8, 4), QuantSpec(jnp.int8, PerAxis((0, 2))))
    sizes, x = jnp.array([2, 1]), jnp.arange(40.0).reshape(5, 8)
    (rows,) = jax.export.symbolic_shape("rows")
    like = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: jq.ragged_dot(x, q, sizes)), platforms=("cpu", "cuda", "tpu"))(like)
    np.testing.assert_allclose(exported.call(x), jq.ragged_dot(x, q, sizes), rtol=1e-5)


def test_wide_sums_are_cut() -> None:
    """40,000 products of 255 and 255 are more than an int32 holds."""
    depth = 40_000
    x = QuantizedArray(jnp.full((2, depth), 255, jnp.uint8), jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.uint8))
    q = QuantizedArray(jnp.full((1, depth, 1), 255, jnp.uint8), jnp.ones((1, 1, 1)), jnp.zeros((1, 1, 1), jnp.uint8))
    exact = np.full((2, 1), depth * 255.0 * 255)
    np.testing.assert_allclose(jq.ragged_dot(x, q, jnp.array([2])), exact, rtol=1e-6)
