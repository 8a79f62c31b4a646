"""The form of the compiled programs on a CPU: contractions of int8, and nothing of an operand's size that is wider."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..oracles import contraction_text
from ..support.hlo import Program

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form is a CPU's")

F, U8, I8 = jnp.float32, jnp.uint8, jnp.int8
NHWC: dict[str, Any] = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
PADS = (1, 1, 1, 1)


def aval(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """An array that nothing has to fill."""
    return jax.ShapeDtypeStruct(shape, dtype)


class Form(NamedTuple):
    """An operator, its operands, and what its main contraction is."""

    op: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    opcode: str = "dot"  # "": either
    copied: int = 0  # elements of what takes an operand's place, where it is not one of `operands`


def points(a: Any, b: Any, a_point: Any, b_point: Any) -> jax.Array:
    """With the zero points behind the operands."""
    return jq.matmul_integer(a, b, a_point, b_point)


def rows_by_rows(a: Any, b: Any) -> jax.Array:
    """Both operands lie with the contracted dimension last."""
    return jq.integer.dot_general(a, b, (((1,), (1,)), ((), ())), lhs_zero_point=3, rhs_zero_point=5)


def columns_by_rows(a: Any, b: Any) -> jax.Array:
    """The contracted dimension is first in one, last in the other."""
    return jq.integer.dot_general(a, b, (((0,), (1,)), ((), ())), lhs_zero_point=3, rhs_zero_point=5)


def two_of_three(a: Any, b: Any) -> jax.Array:
    """Two contracted dimensions, named in different orders, and a batch in the middle."""
    return jq.integer.dot_general(a, b, (((3, 0), (0, 2)), ((1,), (1,))), lhs_zero_point=3)


def around(**keywords: Any) -> Callable[..., jax.Array]:
    """A convolution of NHWC."""
    return lambda x, w: jq.integer.conv_general_dilated(
        x, w, **{"window_strides": (1, 1), "padding": "SAME", "lhs_zero_point": 3, **NHWC, **keywords}
    )


# Float operands have more elements than what `barriers.split_small_fusion` splits, which writes one wide buffer.
# The contracted sizes are large and the results small: whatever is wide and larger than two results is an operand.
# XLA has its kernel for more than a few thousand products only, and no int8 at all for small convolutions.
FORMS: dict[str, Form] = {
    **{
        f"matmul_integer {np.dtype(left)} {np.dtype(right)}": Form(
            lambda a, b: jq.matmul_integer(a, b, 3, 5), (aval(left, 37, 257), aval(right, 257, 53))
        )
        for left in (U8, I8)
        for right in (U8, I8)
    },
    "no zero points": Form(jq.matmul_integer, (aval(U8, 37, 257), aval(I8, 257, 53))),
    "batched": Form(lambda a, b: jq.matmul_integer(a, b, 3, 5), (aval(U8, 3, 37, 257), aval(I8, 3, 257, 53))),
    "batched a": Form(lambda a, b: jq.matmul_integer(a, b, 3, 5), (aval(U8, 3, 17, 411), aval(I8, 411, 53))),
    "batched b": Form(lambda a, b: jq.matmul_integer(a, b, 3, 5), (aval(U8, 37, 811), aval(I8, 3, 811, 53))),
    "zero points": Form(points, (aval(U8, 37, 257), aval(I8, 257, 53), aval(U8, 37), aval(I8, 53))),
    "batched zero points": Form(
        points, (aval(U8, 3, 37, 257), aval(I8, 3, 257, 53), aval(U8, 3, 37, 1), aval(I8, 3, 1, 53))
    ),
    "vmap of a": Form(
        jax.vmap(lambda a, b: jq.matmul_integer(a, b, 3, 5), (0, None)), (aval(U8, 3, 17, 411), aval(I8, 411, 53))
    ),
    "vmap of rows": Form(
        jax.vmap(lambda a, b: jq.matmul_integer(a, b, 3, 5), (0, None)), (aval(U8, 37, 257), aval(I8, 257, 53))
    ),
    "vmap of both": Form(
        jax.vmap(lambda a, b: jq.matmul_integer(a, b, 3, 5)), (aval(U8, 3, 37, 257), aval(I8, 3, 257, 53))
    ),
    "rows by rows": Form(rows_by_rows, (aval(U8, 37, 257), aval(I8, 53, 257))),
    "columns by rows": Form(columns_by_rows, (aval(U8, 257, 37), aval(I8, 53, 257))),
    "two contracted": Form(two_of_three, (aval(U8, 13, 3, 37, 29), aval(I8, 29, 3, 13, 53))),
    "qlinear_matmul": Form(
        lambda a, b, s: jq.qlinear_matmul(a, 0.5, 3, b, s, 5, 4.0, 7),
        (aval(U8, 37, 257), aval(I8, 257, 53), aval(F, 53))
    ),
    "matmul_integer_to_float": Form(
        lambda a, b, s: jq.ops.matmul_integer_to_float(a, b, 0.5, s, 3, 5),
        (aval(U8, 37, 257), aval(I8, 257, 53), aval(F, 53))
    ),
    "to_float, blocks": Form(
        lambda a, b, s: jq.ops.matmul_integer_to_float(a, b, 0.5, s, 3, 5),
        (aval(U8, 37, 822), aval(I8, 822, 53), aval(F, 3, 53))
    ),
    "dynamic_quantize_matmul": Form(
        lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s), (aval(F, 37, 2057), aval(I8, 2057, 53), aval(F, 53))
    ),
    "dynamic, zero points": Form(
        lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s, 5), (aval(F, 37, 2057), aval(I8, 2057, 53), aval(F, 53))
    ),
    "dynamic, blocks": Form(
        lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s, 5),
        (aval(F, 37, 2055), aval(I8, 2055, 53), aval(F, 3, 53))
    ),
    "conv_integer": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5, pads=PADS),
        (aval(U8, 2, 101, 9, 11), aval(I8, 5, 101, 3, 3)), "convolution",
    ),
    "no padding": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5), (aval(U8, 2, 101, 9, 11), aval(I8, 5, 101, 3, 3)), "convolution"
    ),
    "strides": Form(
        lambda x, w: jq.conv_integer(x, w, 3, strides=(2, 2), pads=PADS),
        (aval(U8, 2, 101, 19, 21), aval(I8, 7, 101, 3, 3)), "convolution",
    ),
    "one dimension": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5, pads=(1, 1)), (aval(U8, 2, 301, 29), aval(I8, 13, 301, 3)), ""
    ),
    "three dimensions": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5, pads=(1,) * 6),
        (aval(U8, 1, 101, 5, 7, 5), aval(I8, 5, 101, 3, 3, 3)), "",
    ),
    "qlinear_conv": Form(
        lambda x, w: jq.qlinear_conv(x, 0.5, 3, w, 0.5, 5, 4.0, 7, pads=PADS),
        (aval(U8, 2, 101, 9, 11), aval(I8, 5, 101, 3, 3)), "convolution",
    ),
    "NCHW": Form(
        lambda x, w: jq.integer.conv_general_dilated(x, w, (1, 1), "SAME", lhs_zero_point=3, rhs_zero_point=5),
        (aval(U8, 2, 101, 9, 11), aval(I8, 5, 101, 3, 3)), "convolution",
    ),
    "NHWC": Form(around(), (aval(U8, 2, 9, 11, 101), aval(I8, 3, 3, 101, 5)), "convolution"),
    "NHWC, zero points": Form(
        around(rhs_zero_point=5), (aval(I8, 2, 9, 11, 101), aval(U8, 3, 3, 101, 5)), "convolution"
    ),
    "NHWC, no zero points": Form(
        around(lhs_zero_point=0), (aval(I8, 2, 9, 11, 101), aval(I8, 3, 3, 101, 5)), "convolution"
    ),
    "NHWC, no padding": Form(around(padding="VALID"), (aval(U8, 2, 9, 11, 101), aval(I8, 3, 3, 101, 5)), "convolution"),
    "NHWC, OIHW": Form(
        around(dimension_numbers=("NHWC", "OIHW", "NHWC")),
        (aval(U8, 2, 9, 11, 101), aval(I8, 5, 101, 3, 3)), "convolution"
    ),
    "NHWC to NCHW": Form(
        around(dimension_numbers=("NHWC", "HWIO", "NCHW")),
        (aval(U8, 2, 9, 11, 101), aval(I8, 3, 3, 101, 5)), "convolution"
    ),
    "HWNC": Form(
        around(dimension_numbers=("HWNC", "HWIO", "HWNC")),
        (aval(U8, 9, 11, 2, 101), aval(I8, 3, 3, 101, 5)), "convolution"
    ),
    "vmap of images": Form(
        jax.vmap(lambda x, w: jq.conv_integer(x, w, 3, 5, pads=PADS), (0, None)),
        (aval(U8, 2, 1, 101, 9, 11), aval(I8, 5, 101, 3, 3)), "convolution",
    ),
    "vmap of NHWC": Form(
        jax.vmap(around(), (0, None)), (aval(U8, 2, 1, 9, 11, 101), aval(I8, 3, 3, 101, 5)), "convolution"
    ),
    "1x1": Form(lambda x, w: jq.conv_integer(x, w, 3, 5), (aval(U8, 1, 211, 5, 5), aval(I8, 31, 211, 1, 1))),
    "1x1, NHWC": Form(around(), (aval(U8, 1, 5, 5, 211), aval(I8, 1, 1, 211, 31))),
    "1x1, padded": Form(around(padding=[(1, 1), (1, 1)]), (aval(U8, 1, 5, 5, 411), aval(I8, 1, 1, 411, 31))),
    "few channels": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5), (aval(U8, 2, 3, 39, 41), aval(I8, 5, 3, 7, 7)), copied=339_570
    ),
    "few channels, NHWC": Form(
        around(padding="VALID"), (aval(U8, 2, 39, 41, 3), aval(I8, 7, 7, 3, 5)), copied=339_570
    ),
    "groups": Form(
        lambda x, w: jq.conv_integer(x, w, 3, 5, group=3, pads=PADS), (aval(U8, 2, 51, 9, 11), aval(I8, 6, 17, 3, 3)),
        copied=2 * 51 * 9 * 99,
    ),
}  # fmt: skip


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", list(FORMS))
def test_contractions_are_of_int8(name: str) -> None:
    if name == "dynamic, blocks" and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.10 keeps the float32 quotient of a, once, for the two that read its codes")
    op, operands, opcode, copied = FORMS[name]
    program = Program(op, *operands)
    size = math.prod(jax.eval_shape(op, *operands).shape)
    assert 4 * size <= (copied or min(x.size for x in operands[:2])), "the sizes of this row tell nothing"
    contractions = program.contractions()
    for c in contractions:
        assert [dtype for dtype, _ in (*c.operands, c.result)] == ["s8", "s8", "s32"], c
    largest = max(contractions, key=lambda c: math.prod(c.result[1]) * math.prod(c.operands[0][1]))
    assert opcode in ("", largest.opcode)
    assert program.widest() <= 2 * size, program.wide_buffers()


@pytest.mark.parametrize(("channels", "features"), [(9, 9), (12, 16), (16, 16), (17, 4), (12, 24)])
def test_narrow_convolutions_are_of_int8(channels: int, features: int) -> None:
    """XLA:CPU has no int8 kernel for 16 channels or fewer into 16 features or fewer."""
    program = Program(
        lambda x, w: jq.conv_integer(x, w, 3), aval(U8, 2, channels, 31, 33), aval(I8, features, channels, 3, 3)
    )
    contractions = program.contractions()
    assert contractions
    for c in contractions:
        assert [dtype for dtype, _ in (*c.operands, c.result)] == ["s8", "s8", "s32"], c


def row(a: Any, b: Any) -> jax.Array:
    """One row."""
    return jq.matmul_integer(a, b, 3, 5)


# What may be wider than 8 bits, as a share of the weight's elements. A row keeps one sum for 16 products, or for 32 if
# the contracted dimension is the last of the weight.
NARROW: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...], float]] = {
    "row": (row, (aval(U8, 1, 2048), aval(I8, 2048, 1000)), 1 / 16),
    "vector": (row, (aval(U8, 2048), aval(U8, 2048, 1000)), 1 / 16),
    "row by rows": (rows_by_rows, (aval(U8, 1, 2048), aval(I8, 1000, 2048)), 1 / 32),
    "odd row": (row, (aval(U8, 1, 2047), aval(I8, 2047, 1001)), 1 / 16),
    "column": (row, (aval(U8, 1000, 2048), aval(U8, 2048, 1)), 1 / 32),
    "dynamic row": (
        lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s, 5),
        (aval(F, 1, 2048), aval(I8, 2048, 1000), aval(F, 1000)), 1 / 16,
    ),
    "dynamic row, blocks": (
        lambda a, b, s: jq.ops.dynamic_quantize_matmul(a, b, s),
        (aval(F, 1, 2048), aval(I8, 2048, 1000), aval(F, 8, 1000)), 1 / 16,
    ),
    "batched rows": (row, (aval(U8, 3, 1, 1024), aval(I8, 3, 1024, 500)), 1 / 16),
    **{
        f"matmul_nbits {bits} bits, {rows} rows": (
            lambda a, b, s, bits=bits: jq.ops.matmul_nbits(a, b, s, K=4096, N=2048, bits=bits),
            (aval(F, rows, 4096), aval(U8, 2048, 128, 4 * bits), aval(F, 2048, 128)), 2 / bits,
        )
        for bits in (2, 4, 8)
        for rows in (1, 64)
    },
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", list(NARROW))
def test_a_weight_is_never_widened_as_a_whole(name: str) -> None:
    op, operands, share = NARROW[name]
    program = Program(op, *operands)
    weight = max(operands, key=lambda x: x.size if x.dtype != F else 0)
    assert program.widest() <= share * weight.size, sorted(set(program.wide_buffers()), key=lambda b: -math.prod(b[1]))[
        :4
    ]


@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_depthwise_writes_its_result_and_nothing_else_wide(layout: str, kernel: int) -> None:
    if layout == "NCHW":
        shapes = (aval(U8, 2, 61, 29, 31), aval(I8, 61, 1, kernel, kernel))
        program = Program(lambda x, w: jq.conv_integer(x, w, 3, 5, group=61, auto_pad="SAME_UPPER"), *shapes)
    else:
        shapes = (aval(U8, 2, 29, 31, 61), aval(I8, kernel, kernel, 1, 61))
        program = Program(around(feature_group_count=61, rhs_zero_point=5), *shapes)
    image = shapes[0].size
    assert [math.prod(s) for _, s in program.wide_buffers() if math.prod(s) >= image // 2] == [image]
    assert all(math.prod(c.result[1]) == shapes[1].size for c in program.contractions()), "only of the kernel"


NARROW_CODES = ("s4", "u4", "s2", "u2")


def sizes_beside_narrow_codes(program: Program) -> dict[str, int]:
    """The largest array of each fusion that reads codes below 8 bits."""
    sizes = {}
    for name, body in program.computations.items():
        arrays = [array for i in body for array in i.results]
        if name != program.entry and any(dtype in NARROW_CODES for dtype, _ in arrays):
            sizes[name] = max(math.prod(shape) for _, shape in arrays)
    return sizes


DEPTHWISE: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "NHWC int4": (around(feature_group_count=61), (aval(I8, 2, 29, 31, 61), aval(jnp.int4, 3, 3, 1, 61))),
    "NHWC uint4, zero points": (
        around(feature_group_count=64, rhs_zero_point=5), (aval(U8, 2, 29, 31, 64), aval(jnp.uint4, 3, 3, 1, 64)),
    ),
    "NHWC int2, two features a channel": (
        around(feature_group_count=32), (aval(U8, 2, 29, 31, 32), aval(jnp.int2, 3, 3, 1, 64)),
    ),
    "NCHW int4": (
        around(feature_group_count=61, dimension_numbers=None), (aval(U8, 2, 61, 29, 31), aval(jnp.int4, 61, 1, 3, 3)),
    ),
    "NWC uint2": (
        around(feature_group_count=64, dimension_numbers=("NWC", "WIO", "NWC"), window_strides=(1,)),
        (aval(U8, 2, 290, 64), aval(jnp.uint2, 4, 1, 64)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(DEPTHWISE))
def test_depthwise_unpacks_its_kernel_once(name: str) -> None:
    """No fusion has codes below 8 bits and an array of the image's size: it would unpack a weight for every pixel."""
    op, operands = DEPTHWISE[name]
    program = Program(op, *operands)
    assert any(dtype in NARROW_CODES for i in program.in_memory() for dtype, _ in i.results)
    sizes = sizes_beside_narrow_codes(program)
    assert all(size <= 2 * operands[1].size for size in sizes.values()), sizes


def test_xla_computes_the_sums_of_constant_weights() -> None:
    """With constant weights the convolution is the only contraction that is left to run."""
    weights = jnp.asarray(np.random.default_rng(0).integers(-128, 128, (64, 64, 3, 3), np.int8))

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jq.qlinear_conv(x, 0.5, U8(7), w, 0.25, I8(0), 1.0, U8(3), pads=PADS)

    x = aval(U8, 1, 64, 28, 28)
    constant = Program(lambda x: convolve(x, weights), x).contractions()
    assert [c.opcode for c in constant] == ["convolution"]
    assert sorted(c.opcode for c in Program(convolve, x, weights).contractions()) == ["convolution", "dot"]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of jax 0.10 takes barriers away before it fuses")
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_1x1_kernel_is_unpacked_before_it_is_transposed_or_repeated(layout: str) -> None:
    if layout == "NCHW":
        op, operands = around(dimension_numbers=None), (aval(I8, 8, 128, 7, 7), aval(jnp.int4, 256, 128, 1, 1))
    else:
        op, operands = around(), (aval(I8, 1, 7, 7, 128), aval(jnp.int4, 1, 1, 128, 256))
    program = Program(op, *operands)
    for name, size in sizes_beside_narrow_codes(program).items():
        assert size == operands[1].size
        assert not {"transpose", "copy"} & {i.opcode for i in program.computations[name]}, name


# At one bound with the zero point at the other: every sign of the products, the largest magnitudes.
EXTREMES = [("uint8", 255, 0), ("uint8", 0, 255), ("int8", -128, 127), ("int8", 127, -128)]
PAIRS = pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 2), (2, 2), (3, 2)])


def extreme(side: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes that are all at one bound, and a zero point at the other."""
    name, code, point = EXTREMES[side]
    return np.full(shape, code, name), np.asarray(point, name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", [(9,), (3, 3), (7, 7), (9, 9), (65,)], ids=str)
@PAIRS
def test_depthwise_sums_at_the_bounds(left: int, right: int, kernel: tuple[int, ...]) -> None:
    """9 products of 255 * 255 are 17 times what 16 bits hold; 81 and 65 positions are more than are spelled out."""
    x, x_point = extreme(left, 1, 3, *(k + 1 for k in kernel))
    w, w_point = extreme(right, 3, 1, *kernel)
    for zero_points in ((None, None), (x_point, w_point)):
        want = contraction_text.conv_integer(x, w, *zero_points, group=3)
        np.testing.assert_array_equal(jq.conv_integer(x, w, *zero_points, group=3), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [1, 15, 16, 17, 33, 255, 4097, 33024, 66_049])
@PAIRS
def test_single_rows_at_the_bounds(left: int, right: int, depth: int) -> None:
    """Sixteen products to a sum and a rest; 33024 of the largest just fit into int32, 66049 wrap around it."""
    a, a_point = extreme(left, 1, depth)
    b, b_point = extreme(right, depth, 5)
    for zero_points in ((None, None), (a_point, b_point)):
        want = contraction_text.matmul_integer(a, b, *zero_points)
        np.testing.assert_array_equal(jq.matmul_integer(a, b, *zero_points), want)
        np.testing.assert_array_equal(jq.matmul_integer(a[0], b, *zero_points), want[0])
        np.testing.assert_array_equal(jq.matmul_integer(b.T, a.T, *zero_points[::-1]), want.T)
        np.testing.assert_array_equal(jq.matmul_integer(np.repeat(a, 2, 0), b, *zero_points), np.repeat(want, 2, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("channels", [4, 64])
@PAIRS
def test_convolutions_at_the_bounds(left: int, right: int, channels: int) -> None:
    """Padding takes the zero point's place, whatever that is."""
    x, x_point = extreme(left, 1, channels, 6, 5)
    w, w_point = extreme(right, 7, channels, 3, 3)
    for zero_points in ((None, None), (x_point, w_point)):
        want = contraction_text.conv_integer(x, w, *zero_points, pads=PADS)
        np.testing.assert_array_equal(jq.conv_integer(x, w, *zero_points, pads=PADS), want)
        points: Any = {} if zero_points[0] is None else {"lhs_zero_point": x_point, "rhs_zero_point": w_point}
        last = jq.integer.conv_general_dilated(
            x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), (1, 1), [(1, 1), (1, 1)], **NHWC, **points
        )
        np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), want)


# Channels, features and groups.
LONG: dict[str, tuple[int, int, int]] = {"one channel": (1, 5, 1), "depthwise": (3, 3, 3), "groups": (4, 6, 2)}


@pytest.mark.parametrize("name", list(LONG))
def test_the_program_of_a_convolution_hardly_grows_with_its_window(name: str, rng: np.random.Generator) -> None:
    """Eight times the window takes less than twice the operations; with one for each position, compiling took minutes.

    The sums are those of numpy.
    """
    channels, features, groups = LONG[name]

    def make_operands(window: int, extra: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.integers(0, 256, (2, channels, window + extra)).astype(U8)
        return x, rng.integers(-128, 128, (features, channels // groups, window)).astype(I8)

    def count_operations(window: int) -> int:
        convolve = jax.jit(lambda x, w: jq.conv_integer(x, w, U8(7), strides=[3], group=groups))
        return convolve.lower(*make_operands(window, 100)).as_text().count(" = ")

    assert count_operations(1024) < 2 * count_operations(128)

    window, stride, dilation = int(rng.integers(65, 140)), int(rng.integers(1, 9)), int(rng.integers(1, 3))
    x, w = make_operands(window, (window - 1) * (dilation - 1) + int(rng.integers(0, 30)))
    ends = tuple(int(n) for n in rng.integers(0, 4, 2))
    attributes: dict[str, Any] = {"strides": [stride], "dilations": [dilation], "pads": [*ends], "group": groups}
    centered = np.pad(x.astype(np.int64) - 7, ((0, 0), (0, 0), ends))
    count = (centered.shape[2] - (window - 1) * dilation - 1) // stride + 1
    positions = np.arange(count)[:, None] * stride + np.arange(window) * dilation
    patches = centered[:, :, positions].reshape(2, groups, channels // groups, count, window)
    kernels = w.astype(np.int64).reshape(groups, features // groups, channels // groups, window)
    want = np.einsum("ngctk,gfck->ngft", patches, kernels).reshape(2, features, count)
    convolve = functools.partial(jq.conv_integer, x_zero_point=U8(7), **attributes)
    np.testing.assert_array_equal(jax.jit(convolve)(x, w), want)
    mapped = jax.jit(jax.vmap(convolve, (0, None)))(np.stack([x, x[::-1]]), w)
    np.testing.assert_array_equal(mapped, np.stack([want, want[::-1]]))
