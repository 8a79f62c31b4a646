"""What is special to the matrix products: empty sizes, wrapping, one row, 1-D operands, batches, ties, vmap."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.contraction_exactness import KERNELS, MICROSOFT, PAIRS
from ..cases.contraction_inputs import integers, point
from ..oracles import contraction_text, onnx_runtime, onnx_text
from ..support import transforms
from ..support.equality import check_equal

MATRIX = (((1,), (0,)), ((), ()))


def scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.exp(rng.uniform(-4, 0, shape)).astype(np.float32)


def operands(rng: np.random.Generator, pair: tuple[str, str], a: tuple[int, ...], b: tuple[int, ...]) -> Any:
    return (integers(rng, pair[0], a), integers(rng, pair[1], b)), (point(rng, pair[0]), point(rng, pair[1]))


EMPTY = (
    ((3, 0), (0, 4)),
    ((0, 5), (5, 4)),
    ((3, 5), (5, 0)),
    ((0, 3, 5), (0, 5, 4)),
    ((0, 3, 5), (5, 4)),
    ((3, 5), (0, 5, 4)),
    ((2, 3, 0), (2, 0, 4)),
    ((0,), (0,)),
)


@pytest.mark.parametrize(("a", "b"), EMPTY, ids=str)
def test_empty(a: tuple[int, ...], b: tuple[int, ...], rng: np.random.Generator) -> None:
    codes, points = operands(rng, ("uint8", "int8"), a, b)
    check_equal(jq.matmul_integer(*codes), contraction_text.matmul_integer(*codes))
    want = contraction_text.matmul_integer(*codes, *points)
    check_equal(jax.jit(jq.matmul_integer)(*codes, *points), want)
    scales, out_point = scale(rng, 3), point(rng, "int8")
    args = (codes[0], scales[0], points[0], codes[1], scales[1], points[1], scales[2], out_point)
    check_equal(jq.qlinear_matmul(*args), contraction_text.qlinear_matmul(*args))
    args = (*codes, scales[0], scales[1], *points)
    check_equal(jq.ops.matmul_integer_to_float(*args), contraction_text.matmul_integer_to_float(*args))
    floats = (codes[0].astype(np.float32), codes[1], scales[0], points[1])
    check_equal(jq.ops.dynamic_quantize_matmul(*floats), contraction_text.dynamic_quantize_matmul(*floats))


def test_empty_with_parameters_per_row_and_column(rng: np.random.Generator) -> None:
    a, b = np.zeros((3, 0), np.int8), np.zeros((0, 4), np.uint8)
    check_equal(
        jq.matmul_integer(a, b, point(rng, "int8", (3,)), point(rng, "uint8", (4,))), np.zeros((3, 4), np.int32)
    )
    points = point(rng, "int8", (3, 1)), point(rng, "uint8", (1, 4))
    acc = jq.integer.dot_general(a, b, MATRIX, lhs_zero_point=points[0], rhs_zero_point=points[1])
    check_equal(acc, np.zeros((3, 4), np.int32))
    bias = np.arange(4, dtype=np.float32)
    check_equal(jq.ops.matmul_integer_to_float(a, b, scale(rng), scale(rng, 4), bias=bias), np.tile(bias, (3, 1)))
    check_equal(
        jq.ops.dynamic_quantize_matmul(np.zeros((3, 0), np.float32), b, scale(rng), None, bias), np.tile(bias, (3, 1))
    )


SHAPES = (
    *[((1, 7), (7, 9)), ((5, 7), (7, 1)), ((1, 7), (7, 1)), ((5, 1), (1, 9)), ((1, 1), (1, 1))],
    *[((7,), (7,)), ((7,), (7, 9)), ((5, 7), (7,)), ((7,), (2, 7, 9)), ((2, 5, 7), (7,)), ((1,), (1,))],
    *[((2, 1, 5, 7), (3, 7, 9)), ((3, 5, 7), (2, 1, 7, 9)), ((5, 7), (2, 7, 9)), ((2, 5, 7), (7, 9))],
    *[((1, 5, 7), (4, 7, 9)), ((4, 5, 7), (1, 7, 9)), ((2, 3, 5, 7), (2, 3, 7, 9)), ((2, 1, 1, 7), (1, 3, 7, 1))],
)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_the_shapes_of_numpy_matmul(a: tuple[int, ...], b: tuple[int, ...], rng: np.random.Generator) -> None:
    pair = PAIRS[SHAPES.index((a, b)) % 4]
    codes, points = operands(rng, pair, a, b)
    want = contraction_text.matmul_integer(*codes, *points)
    assert want.shape == np.matmul(np.zeros(a), np.zeros(b)).shape
    check_equal(jq.matmul_integer(*codes, *points), want)
    check_equal(jax.jit(jq.matmul_integer)(*codes, *(p.reshape(1) for p in points)), want)
    check_equal(onnx_runtime.ask("MatMulInteger", (*codes, *points), np.int32), want)
    scales, out_point = (scale(rng), scale(rng), np.float32(50)), point(rng, "uint8")
    args = (codes[0], scales[0], points[0], codes[1], scales[1], points[1], scales[2], out_point)
    check_equal(jax.jit(jq.qlinear_matmul)(*args), contraction_text.qlinear_matmul(*args))


def test_sums_wrap() -> None:
    ones, bytes_ = np.full((1, 40000), 255, np.uint8), np.full((40000, 1), 255, np.uint8)
    want = np.array([[-1693967296]], np.int32)
    check_equal(jq.matmul_integer(ones, bytes_), want)
    check_equal(jax.jit(jq.matmul_integer)(ones, bytes_), want)
    check_equal(jq.integer.dot_general(ones, bytes_, MATRIX), want)
    check_equal(jq.matmul_integer(ones[0], bytes_[:, 0]), want[0, 0])
    # The differences reach -255 and 255, and their sum wraps upwards.
    low = np.full((40000, 1), -128, np.int8)
    check_equal(jq.matmul_integer(ones, low, np.uint8(0), np.int8(127)), -want)
    least = np.full((3, 140000), -128, np.int8)
    check_equal(jq.integer.dot_general(least, least, (((1,), (1,)), ((), ()))), np.full((3, 3), -2001207296, np.int32))


def test_sums_at_the_ends_of_int32() -> None:
    """A sum of exactly 2**31 is the least int32; one less is the largest. No float32 holds either neighbour."""
    a = np.full((1, 131072), -128, np.int8)
    b = np.full((131072, 2), -128, np.int8)
    b[0, 1] = -127
    want = np.array([[-(2**31), 2**31 - 128]], np.int32)
    check_equal(jq.matmul_integer(a, b), want)
    a[0, 0], b[0] = 1, (127, -128)
    check_equal(jq.matmul_integer(a, b), contraction_text.matmul_integer(a, b))


def test_odd_sums_beyond_the_integers_of_float32(rng: np.random.Generator) -> None:
    """Sums between 2**24 and 2**31 need all their bits."""
    a, b = rng.integers(200, 256, (3, 4001)).astype(np.uint8), rng.integers(200, 256, (4001, 5)).astype(np.uint8)
    want = contraction_text.matmul_integer(a, b)
    assert (want > 2**24).all()
    check_equal(jq.matmul_integer(a, b), want)
    points = np.uint8(1), np.uint8(3)
    check_equal(jax.jit(jq.matmul_integer)(a, b, *points), contraction_text.matmul_integer(a, b, *points))


def test_a_zero_point_per_row_is_of_rows(rng: np.random.Generator) -> None:
    """With M == K, subtracting along K has the right shape and the wrong numbers."""
    a, b, points = integers(rng, "uint8", (7, 7)), integers(rng, "int8", (7, 9)), point(rng, "uint8", (7,))
    differences = np.stack([row.astype(int) - int(p) for row, p in zip(a, points, strict=True)])
    want = (differences @ b.astype(int)).astype(np.int32)
    check_equal(jq.matmul_integer(a, b, points), want)
    check_equal(jq.matmul_integer(a, b, points[:, None]), want)
    batch = np.stack([a, a[::-1]])
    want = contraction_text.matmul_integer(batch, b, points)
    check_equal(jq.matmul_integer(batch, b, points), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 65])
def test_one_row_of_any_depth(k: int, rng: np.random.Generator) -> None:
    for pair, n in zip(PAIRS, (1, 16, 17, 33), strict=True):
        codes, points = operands(rng, pair, (1, k), (k, n))
        check_equal(jax.jit(jq.matmul_integer)(*codes, *points), contraction_text.matmul_integer(*codes, *points))
        (row, column), _ = operands(rng, pair, (k,), (k,))
        check_equal(jq.matmul_integer(row, column), contraction_text.matmul_integer(row, column))


@pytest.mark.parametrize("sizes", [(1, 2048, 515), (129, 300, 257), (257, 1025, 130), (2, 4097, 3)], ids=str)
def test_sizes_beyond_a_tile(sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, k, n = sizes
    codes, points = operands(rng, PAIRS[m % 4], (m, k), (k, n))
    check_equal(jq.matmul_integer(*codes, *points), contraction_text.matmul_integer(*codes, *points))
    args: tuple[Any, ...] = (*codes, points[0], point(rng, PAIRS[m % 4][1], (n,)))
    check_equal(jax.jit(jq.matmul_integer)(*args), contraction_text.matmul_integer(*args))


@pytest.mark.parametrize("names", KERNELS, ids=" ".join)
def test_every_product_of_two_codes(names: tuple[str, str, str], rng: np.random.Generator) -> None:
    """One product a sum: all 65536 of them, under scales that make ties and neighbours of ties."""
    a, b, y = names
    rows, columns = (np.arange(256, dtype=np.uint8).view(name) for name in (a, b))
    op = jax.jit(jq.qlinear_matmul)
    for s in ((0.5, 0.25, 64.0), (1.0, 1.0, 6.0), (1.0, 0.5, 70.0), (3.0, 1.0, 254.0), (0.1, 0.7, 4.9), (1, 1, 1e-5)):
        points = point(rng, a), point(rng, b), point(rng, y)
        scales = tuple(np.float32(v) for v in s)
        args = (rows[:, None], scales[0], points[0], columns[None], scales[1], points[1], scales[2], points[2])
        actual, expected = op(*args), contraction_text.qlinear_matmul(*args)
        check_equal(actual, expected)
        check_equal(onnx_runtime.ask("QLinearMatMul", args, np.dtype(y)), expected)


def test_sixteen_bit_scales_are_widened_first() -> None:
    """300 * 300 is infinite in float16; 1 + 2**-7 squared needs more than bfloat16 has."""
    a, b = np.array([[100, 3]], np.uint8), np.array([[1], [2]], np.int8)
    for name, scales in (("float16", (300.0, 300.0, 60000.0)), ("bfloat16", (1 + 2**-7, 1 + 2**-7, 0.875))):
        s = np.array(scales, onnx_text.dtype(name))
        args = (a, s[0], np.uint8(1), b, s[1], np.int8(0), s[2], np.uint8(7))
        check_equal(jq.qlinear_matmul(*args), contraction_text.qlinear_matmul(*args))
        # The widened scales, given as float32, say the same.
        wide = (a, np.float32(s[0]), args[2], b, np.float32(s[1]), args[5], np.float32(s[2]), args[7])
        check_equal(jq.qlinear_matmul(*args), jq.qlinear_matmul(*wide))


@pytest.mark.slow
def test_float8_saturates_and_keeps_nan() -> None:
    for name in onnx_text.FLOAT8:
        kind, unit = onnx_text.dtype(name), np.float32(1)
        a = np.array([[200, 1, 0.5], [-200, 2, 1], [np.nan, 1, 1], [1, 1, 1]], np.float32).astype(kind)
        b = np.array([[224, 0.25], [1, 2], [0.5, 0.125]], np.float32).astype(kind)
        zero = np.zeros((), kind)
        for out_scale in (unit, np.float32(3), np.float32(0.001)):
            args = (a, unit, zero, b, np.float32(0.75), zero, out_scale, zero)
            want = contraction_text.qlinear_matmul(*args)
            assert np.isnan(want[2].astype(np.float32)).all()
            assert transforms.mismatches(jq.qlinear_matmul(*args), want) == 0
            assert transforms.mismatches(jax.jit(jq.qlinear_matmul)(*args), want) == 0


@pytest.mark.slow
def test_optional_arguments(rng: np.random.Generator) -> None:
    """A zero point or a bias without the others, as ONNX Runtime takes them."""
    a, b = integers(rng, "uint8", (5, 37)), integers(rng, "int8", (37, 9))
    az, bz, bias = point(rng, "uint8"), point(rng, "int8", (9,)), rng.normal(0, 1e3, 9).astype(np.float32)
    s, columns = np.float32(0.3), scale(rng, 9)
    x = rng.normal(0, 3, (5, 37)).astype(np.float32)
    for left, right, added in itertools.product((None, az), (None, bz), (None, bias)):
        args = (a, b, s, columns, left, right, added)
        want = contraction_text.matmul_integer_to_float(*args)
        check_equal(jq.ops.matmul_integer_to_float(*args), want)
        dynamic = (x, b, columns, right, added)
        expected = contraction_text.dynamic_quantize_matmul(*dynamic)
        check_equal(jq.ops.dynamic_quantize_matmul(*dynamic), expected)
        check_equal(onnx_runtime.ask("MatMulIntegerToFloat", args, np.float32, MICROSOFT), want)
        check_equal(onnx_runtime.ask("DynamicQuantizeMatMul", dynamic, np.float32, MICROSOFT), expected)


def test_ranges_that_are_special_to_the_dynamic_scale(rng: np.random.Generator) -> None:
    b, s = integers(rng, "int8", (7, 9)), scale(rng)
    positive = rng.uniform(1, 9, (5, 7)).astype(np.float32)
    op = jax.jit(jq.ops.dynamic_quantize_matmul)
    for x in (np.zeros((5, 7), np.float32), positive, -positive, np.full((5, 7), 0.1, np.float32)):
        want = contraction_text.dynamic_quantize_matmul(x, b, s)
        check_equal(op(x, b, s), want)
        check_equal(onnx_runtime.ask("DynamicQuantizeMatMul", (x, b, s), np.float32, MICROSOFT), want)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2, 6, 12])
def test_blocks_of_scales(blocks: int, rng: np.random.Generator) -> None:
    """From one block, which is a scale per column, to one for each row of b; a zero point per block or one for all."""
    a, b = integers(rng, "uint8", (2, 5, 12)), integers(rng, "int8", (12, 9))
    s, az = scale(rng, blocks, 9), point(rng, "uint8")
    for bz in (None, point(rng, "int8"), point(rng, "int8", (blocks, 9))):
        args = (a, b, np.float32(0.1), s, az, bz)
        check_equal(jax.jit(jq.ops.matmul_integer_to_float)(*args), contraction_text.matmul_integer_to_float(*args))
    if blocks == 1:
        columns = jq.ops.matmul_integer_to_float(a, b, np.float32(0.1), s[0], az)
        check_equal(jq.ops.matmul_integer_to_float(a, b, np.float32(0.1), s, az), columns)


@pytest.mark.slow
def test_vmap_over_any_of_the_arguments(rng: np.random.Generator) -> None:
    args = (integers(rng, "uint8", (3, 5, 7)), integers(rng, "int8", (3, 7, 9)))
    args = (*args, point(rng, "uint8", (3, 5)), point(rng, "int8", (3, 9)))
    for mapped in itertools.product((0, None), repeat=4):
        if not any(m == 0 for m in mapped):
            continue
        operands = [v if m == 0 else v[0] for v, m in zip(args, mapped, strict=True)]
        members = [[v[i] if m == 0 else v for v, m in zip(operands, mapped, strict=True)] for i in range(3)]
        want = np.stack([contraction_text.matmul_integer(*member) for member in members])
        check_equal(jax.jit(jax.vmap(jq.matmul_integer, in_axes=mapped))(*operands), want)


def test_vmap_over_one_scale_or_zero_point(rng: np.random.Generator) -> None:
    whole: tuple[Any, ...] = (integers(rng, "uint8", (5, 7)), np.float32(0.1), point(rng, "uint8"))
    whole = (
        *whole,
        integers(rng, "int8", (7, 9)),
        np.float32(0.2),
        point(rng, "int8"),
        np.float32(9),
        point(rng, "uint8"),
    )
    for i, v in enumerate(whole):
        name, shape = np.asarray(v).dtype.name, (4, *np.shape(v))
        batch = scale(rng, *shape) if name == "float32" else integers(rng, name, shape)
        axes = tuple(0 if i == j else None for j in range(len(whole)))
        arguments = [tuple(values if i == j else v for j, v in enumerate(whole)) for values in (*batch, batch)]
        want = np.stack([contraction_text.qlinear_matmul(*member) for member in arguments[:-1]])
        check_equal(jax.jit(jax.vmap(jq.qlinear_matmul, in_axes=axes))(*arguments[-1]), want)


def test_nested_vmap(rng: np.random.Generator) -> None:
    """a over the outer axis and b over the inner one: every pair of them."""
    a, b = integers(rng, "uint8", (3, 5, 7)), integers(rng, "int8", (2, 7, 9))
    az, bz = point(rng, "uint8", (3,)), point(rng, "int8", (2, 9))
    inner = jax.vmap(jq.matmul_integer, in_axes=(None, 0, None, 0))
    actual = jax.vmap(inner, in_axes=(0, None, 0, None))(a, b, az, bz)
    expected = [
        [contraction_text.matmul_integer(x, w, p, q) for w, q in zip(b, bz, strict=True)]
        for x, p in zip(a, az, strict=True)
    ]
    check_equal(actual, np.array(expected))
    products = jax.vmap(jax.vmap(jq.matmul_integer))(np.stack([a] * 2), np.stack([b[[0, 1, 0]]] * 2))
    check_equal(
        products[1], np.stack([contraction_text.matmul_integer(*pair) for pair in zip(a, b[[0, 1, 0]], strict=True)])
    )


@pytest.mark.parametrize("axes", [(1, 2), (2, 1), (-1, 0), (1, None), (None, -1)], ids=str)
def test_vmap_over_other_axes(axes: tuple[int | None, int | None], rng: np.random.Generator) -> None:
    a, b = integers(rng, "int8", (3, 5, 7)), integers(rng, "uint8", (3, 7, 9))
    members = [(a[i if axes[0] is not None else 0], b[i if axes[1] is not None else 0]) for i in range(3)]
    operands = [v[0] if x is None else np.moveaxis(v, 0, x) for v, x in zip((a, b), axes, strict=True)]
    want = np.stack([contraction_text.matmul_integer(*member) for member in members], axis=1)
    check_equal(jax.vmap(jq.matmul_integer, in_axes=axes, out_axes=1)(*operands), want)
    inputs_ = [jnp.asarray(g) for g in operands]
    check_equal(jax.jit(jax.vmap(jq.matmul_integer, in_axes=axes, out_axes=1))(*inputs_), want)


def random_contraction(rng: np.random.Generator) -> Any:
    """Two shapes of rank 1 to 5, the dimension numbers that go with them, and which dimensions are contracted."""
    while True:
        batch, contract, left, right = (rng.integers(1, 5, rng.integers(0, 3)).tolist() for _ in range(4))
        if 1 <= len(batch + contract + left) <= 5 and 1 <= len(batch + contract + right) <= 5:
            break
    shapes, batches, contracted = [], [], []
    for free in (left, right):
        order = rng.permutation(len(batch + contract + free)).tolist()
        sizes = [*batch, *contract, *free]
        shapes.append(tuple(sizes[o] for o in order))
        batches.append(tuple(order.index(i) for i in range(len(batch))))
        contracted.append(tuple(order.index(len(batch) + i) for i in range(len(contract))))
    return shapes, (tuple(contracted), tuple(batches))


@pytest.mark.sample(8)
@pytest.mark.parametrize("draw", range(25))
def test_dot_general_of_random_dimensions(draw: int, rng: np.random.Generator) -> None:
    (left, right), numbers = random_contraction(rng)
    names = rng.choice(["int8", "uint8", "int4", "uint4"], 2).tolist()
    codes = [integers(rng, n, s) for n, s in zip(names, (left, right), strict=True)]
    points: list[Any] = []
    for name, shape, contracted in zip(names, (left, right), numbers[0], strict=True):
        kind = rng.integers(0, 3)
        full = tuple(1 if d in contracted or rng.random() < 0.4 else size for d, size in enumerate(shape))
        points.append(None if kind == 0 else point(rng, name, () if kind == 1 else full))
    want = contraction_text.dot_general(codes[0], codes[1], numbers, points[0], points[1])

    def op(lhs: Any, rhs: Any, lhs_point: Any, rhs_point: Any) -> Any:
        return jq.integer.dot_general(lhs, rhs, numbers, lhs_zero_point=lhs_point, rhs_zero_point=rhs_point)

    check_equal(jax.jit(op)(*codes, *points), want)
