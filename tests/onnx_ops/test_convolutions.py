"""What is special to the convolutions: layouts, padding, groups, channel counts, sizes that leave nothing, vmap."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..cases.contraction_exactness import KERNELS, PAIRS
from ..cases.contraction_inputs import Requantized, integers, point
from ..oracles import contraction_text, onnx_runtime
from ..support.equality import check_equal

Shape = tuple[int, ...]


def check(x: Shape, w: Shape, rng: np.random.Generator, pair: tuple[str, str] = PAIRS[1], **attributes: Any) -> None:
    """ConvInteger with a zero point each: numpy, and ONNX Runtime where it takes the attributes."""
    args = (integers(rng, pair[0], x), integers(rng, pair[1], w), point(rng, pair[0]), point(rng, pair[1]))
    want = contraction_text.conv_integer(*args, **attributes)
    check_equal(jax.jit(lambda *a: jq.conv_integer(*a, **attributes))(*args), want)
    dilated = any(d != 1 for d in attributes.get("dilations", ()))
    if not (dilated and attributes.get("auto_pad", "").startswith("SAME")):
        check_equal(onnx_runtime.ask("ConvInteger", args, np.int32, **attributes), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("channels", [1, 2, 7, 8, 9, 16])
def test_channel_counts(channels: int, rng: np.random.Generator) -> None:
    pair = PAIRS[channels % 4]
    check((2, channels, 8, 7), (channels + 1, channels, 3, 3), rng, pair, pads=[1, 1, 1, 1])
    check((2, channels, 8, 7), (3, channels, 3, 2), rng, pair, strides=[2, 3])
    check((1, channels, 7, 9), (2 * channels, 1, 3, 3), rng, pair, group=channels, pads=[1, 1, 1, 1])


ATTRIBUTES: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "1x1": ((2, 5, 6, 7), (9, 5, 1, 1), {}),
    "1x1 with stride 2": ((2, 5, 7, 7), (9, 5, 1, 1), {"strides": [2, 2]}),
    "kernel_shape said": ((1, 2, 6, 5), (3, 2, 2, 3), {"kernel_shape": [2, 3]}),
    "kernel larger than the input": ((1, 3, 2, 3), (4, 3, 5, 5), {"pads": [2, 2, 2, 1]}),
    "kernel as large as the input": ((2, 3, 4, 5), (4, 3, 4, 5), {}),
    "padding larger than the kernel": ((1, 2, 3, 3), (2, 2, 2, 2), {"pads": [3, 4, 5, 3]}),
    "stride larger than the kernel": ((1, 3, 11, 12), (2, 3, 2, 2), {"strides": [4, 5]}),
    "dilated": ((1, 3, 11, 12), (2, 3, 3, 2), {"dilations": [3, 4], "pads": [1, 2, 3, 4]}),
    "SAME_UPPER, even, stride": ((1, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER, even, stride": ((1, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "SAME_UPPER, even": ((1, 3, 5, 6), (4, 3, 4, 2), {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER, even": ((1, 3, 5, 6), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER"}),
    "SAME_UPPER, stride beyond the kernel": ((1, 2, 7, 9), (3, 2, 1, 2), {"auto_pad": "SAME_UPPER", "strides": [3, 4]}),
    "SAME_LOWER, dilated": ((1, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "dilations": [2, 3]}),
    "VALID": ((1, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "VALID", "strides": [2, 3]}),
    "1-D": ((3, 4, 19), (5, 4, 4), {"strides": [3], "pads": [2, 1]}),
    "1-D SAME_LOWER": ((3, 4, 18), (5, 4, 4), {"strides": [3], "auto_pad": "SAME_LOWER"}),
    "1-D in groups": ((1, 6, 9), (8, 3, 3), {"group": 2, "dilations": [2]}),
    "3-D": ((2, 3, 5, 4, 6), (4, 3, 2, 3, 3), {"pads": [0, 1, 2, 1, 0, 1], "strides": [2, 1, 2]}),
    "3-D SAME_UPPER": ((1, 2, 5, 4, 6), (3, 2, 2, 2, 3), {"strides": [2, 1, 3], "auto_pad": "SAME_UPPER"}),
    "3-D depthwise": ((1, 4, 4, 5, 3), (4, 1, 2, 2, 2), {"group": 4}),
    "depthwise, multiplier 2": ((2, 8, 7, 7), (16, 1, 3, 3), {"group": 8, "strides": [2, 2], "pads": [1] * 4}),
    "one output": ((1, 3, 3, 3), (1, 3, 3, 3), {}),
    "an empty batch": ((0, 3, 5, 5), (2, 3, 3, 3), {}),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_attributes(name: str, rng: np.random.Generator) -> None:
    x, w, attributes = ATTRIBUTES[name]
    check(x, w, rng, PAIRS[list(ATTRIBUTES).index(name) % 4], **attributes)


def test_padding_is_the_zero_point(rng: np.random.Generator) -> None:
    """An image of zero points is nothing, and so is what surrounds it."""
    for pair in PAIRS:
        zero = point(rng, pair[0])
        x, w = np.full((1, 3, 5, 5), zero), integers(rng, pair[1], (4, 3, 3, 3))
        actual = jq.conv_integer(x, w, zero, point(rng, pair[1], (4,)), pads=[2, 3, 4, 1])
        check_equal(actual, np.zeros((1, 4, 9, 7), np.int32))


def test_sums_wrap() -> None:
    x, w = np.full((1, 40000, 1), 255, np.uint8), np.full((1, 40000, 1), 255, np.uint8)
    check_equal(jq.conv_integer(x, w), np.full((1, 1, 1), -1693967296, np.int32))
    check_equal(
        jax.jit(jq.conv_integer)(x.reshape(1, 100, 400), w.reshape(1, 100, 400)),
        np.full((1, 1, 1), -1693967296, np.int32),
    )


@pytest.mark.parametrize("names", KERNELS, ids=" ".join)
def test_a_bias_wraps_and_ties_are_even(names: tuple[str, str, str], rng: np.random.Generator) -> None:
    """A 1x1 filter over a row of biases: each sum is the bias, in steps of half a code and then at the ends."""
    ends = np.array([-(2**31), 2**31 - 1, -1, 0, 1], np.int32)
    bias = np.concatenate([np.arange(-700, 700, dtype=np.int32), ends])
    x, w = np.ones((1, 1, 2), names[0]), np.ones((len(bias), 1, 1), names[1])
    zero, out_point = np.zeros((), names[1]), point(rng, names[2])
    for s in ((1.0, 0.5, 2.0), (0.1, 0.3, 0.12), (1.0, 1.0, 6.0)):
        scales = [np.float32(v) for v in s]
        args = (x, scales[0], np.zeros((), names[0]), w, scales[1], zero, scales[2], out_point, bias)
        want = contraction_text.qlinear_conv(*args)
        check_equal(jax.jit(jq.qlinear_conv)(*args), want)
        check_equal(onnx_runtime.ask("QLinearConv", args, np.dtype(names[2])), want)


@pytest.mark.slow
def test_parameters_of_one_element(rng: np.random.Generator) -> None:
    """[1] stands for a scalar; with one output channel it is also one per channel."""
    for channels in (1, 4):
        draw = Requantized(KERNELS[0], ((2, 3, 6, 5), (channels, 3, 3, 3)), convolution={}, bias=True)
        args = tuple(v[0] for v in draw(rng))
        want = contraction_text.qlinear_conv(*args)
        single = tuple(v.reshape(1) if v.ndim == 0 else v for v in args)
        check_equal(jq.qlinear_conv(*args), want)
        check_equal(jax.jit(jq.qlinear_conv)(*single), want)
        check_equal(jq.qlinear_conv(*args[:-1]), contraction_text.qlinear_conv(*args[:-1]))


@pytest.mark.slow
def test_vmap_over_any_of_the_arguments(rng: np.random.Generator) -> None:
    args: tuple[Any, ...] = (integers(rng, "uint8", (3, 2, 3, 6, 5)), integers(rng, "int8", (3, 4, 3, 3, 2)))
    args = (*args, point(rng, "uint8", (3,)), point(rng, "int8", (3, 4)))

    def op(*operands: Any) -> Any:
        return jq.conv_integer(*operands, pads=[1, 0, 2, 1], strides=[2, 1])

    for mapped in itertools.product((0, None), repeat=4):
        if not any(m == 0 for m in mapped):
            continue
        operands = [v if m == 0 else v[0] for v, m in zip(args, mapped, strict=True)]
        members = [[v[i] if m == 0 else v for v, m in zip(operands, mapped, strict=True)] for i in range(3)]
        want = [contraction_text.conv_integer(*m, pads=[1, 0, 2, 1], strides=[2, 1]) for m in members]
        check_equal(jax.jit(jax.vmap(op, in_axes=mapped))(*operands), np.stack(want))


def test_vmap_of_groups_nested_and_over_other_axes(rng: np.random.Generator) -> None:
    x, w = integers(rng, "int8", (3, 2, 4, 7)), integers(rng, "uint8", (2, 6, 2, 3))
    points = point(rng, "int8", (3,)), point(rng, "uint8", (2, 6))

    def op(*operands: Any) -> Any:
        return jq.conv_integer(*operands, group=2, pads=[1, 1])

    expected = np.array(
        [[contraction_text.conv_integer(i, k, p, q, group=2, pads=[1, 1]) for k, q in zip(w, points[1], strict=True)]
         for i, p in zip(x, points[0], strict=True)]
    )  # fmt: skip
    inner = jax.vmap(op, in_axes=(None, 0, None, 0))
    check_equal(jax.vmap(inner, in_axes=(0, None, 0, None))(x, w, *points), expected)
    # The batch last in x, in the middle of w; the results' in the middle.
    moved = jax.vmap(op, in_axes=(-1, None, None, None), out_axes=2)
    actual = jax.jit(moved)(np.moveaxis(x, 0, -1), w[0], points[0][0], points[1][0])
    alone = [contraction_text.conv_integer(i, w[0], points[0][0], points[1][0], group=2, pads=[1, 1]) for i in x]
    check_equal(actual, np.stack(alone, axis=2))
    actual = jax.vmap(op, in_axes=(None, 2))(x[0], np.moveaxis(w, 0, 2))
    check_equal(actual, np.stack([contraction_text.conv_integer(x[0], k, group=2, pads=[1, 1]) for k in w]))


LAYOUTS = (
    ("NCW", "OIW", "NCW"),
    ("NWC", "WIO", "NWC"),
    ("NCHW", "OIHW", "NCHW"),
    ("NHWC", "HWIO", "NHWC"),
    ("CHWN", "IHWO", "CHWN"),
    ("NHWC", "OHWI", "CNHW"),
    ("WHNC", "OWIH", "HNCW"),
    ("NCDHW", "OIDHW", "NCDHW"),
    ("NDHWC", "DHWIO", "NDHWC"),
)


def random_convolution(rng: np.random.Generator, layouts: tuple[str, str, str]) -> tuple[Any, Any]:
    """(dtypes and shapes of both operands), (strides, padding, dilations of both, layouts, groups, batch groups)."""
    spatial = [c for c in layouts[1] if c not in "OI"]
    rank = len(spatial)
    groups, batch_groups = [(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)][rng.integers(5)]
    inputs, outputs = int(rng.integers(1, 5)), int(rng.integers(1, 4)) * groups * batch_groups
    batch = int(rng.integers(1, 3)) * batch_groups
    if groups > 1 and rng.random() < 0.5:
        inputs = 1  # depthwise
    sizes = dict(zip(spatial, rng.integers(3, 8, rank).tolist(), strict=True)) | {"N": batch, "C": inputs * groups}
    kernel = dict(zip(spatial, rng.integers(1, 4, rank).tolist(), strict=True)) | {"O": outputs, "I": inputs}
    strides, lhs_dilation, rhs_dilation = (
        rng.choice([1, 1, 2, 3], rank).tolist() if rng.random() < 0.6 else [1] * rank for _ in range(3)
    )
    padding = [tuple(pair) for pair in rng.integers(-1, 4, (rank, 2)).tolist()]
    for i, c in enumerate(spatial):
        padded = (sizes[c] - 1) * lhs_dilation[i] + 1 + sum(padding[i])
        if padded < (kernel[c] - 1) * rhs_dilation[i] + 1:
            padding[i] = (kernel[c] * rhs_dilation[i], 1)
    shapes = tuple(sizes[c] for c in layouts[0]), tuple(kernel[c] for c in layouts[1])
    names = rng.choice(["int8", "uint8", "int8", "uint8", "int4", "uint4"], 2).tolist()
    config = (strides, padding, lhs_dilation, rhs_dilation, layouts, groups, batch_groups)
    return list(zip(names, shapes, strict=True)), config


@pytest.mark.sample(6)
@pytest.mark.parametrize("draw", range(30))
def test_random_convolutions(draw: int, rng: np.random.Generator) -> None:
    """Against numpy; and where the zero points are scalars, jax.lax on the int32 differences."""
    operands, config = random_convolution(rng, LAYOUTS[draw % len(LAYOUTS)])
    (x, w) = (integers(rng, name, shape) for name, shape in operands)
    features = operands[1][1][config[4][1].index("O")]
    points: list[Any] = [None, None]
    if draw % 3:
        points[0] = point(rng, operands[0][0])
        points[1] = point(rng, operands[1][0], () if draw % 3 == 1 else (features,))

    def op(lhs: Any, rhs: Any, lhs_point: Any, rhs_point: Any) -> Any:
        point_keywords = {"lhs_zero_point": lhs_point, "rhs_zero_point": rhs_point}
        return jq.integer.conv_general_dilated(lhs, rhs, *config, **point_keywords)

    want = contraction_text.conv_general_dilated(x, w, *config, points=(points[0], points[1]))
    check_equal(jax.jit(op)(x, w, *points), want)
    if draw % 3 < 2:
        lhs, rhs = (jnp.asarray(contraction_text.steps(v, p), jnp.int32) for v, p in zip((x, w), points, strict=True))
        check_equal(jax.lax.conv_general_dilated(lhs, rhs, *config), want)


def test_a_kernel_that_does_not_fit_gives_an_empty_result() -> None:
    """As in jax.lax: no position, no element."""
    x, w = np.ones((2, 3, 4), np.int8), np.ones((5, 3, 6), np.int8)
    want = jax.lax.conv_general_dilated(jnp.asarray(x, jnp.int32), jnp.asarray(w, jnp.int32), (1,), [(0, 0)])
    assert want.shape == (2, 5, 0)
    check_equal(jq.integer.conv_general_dilated(x, w, (1,), [(0, 0)]), want)


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID"])
def test_padding_and_dimension_numbers_of_lax(padding: str, rng: np.random.Generator) -> None:
    """Padding by its name, no dimension numbers, jax.lax.ConvDimensionNumbers, numpy operands and jax ones."""
    x, w = integers(rng, "int8", (2, 3, 7, 8)), integers(rng, "int8", (4, 3, 2, 3))
    want = jax.lax.conv_general_dilated(jnp.asarray(x, jnp.int32), jnp.asarray(w, jnp.int32), (2, 1), padding)
    check_equal(jq.integer.conv_general_dilated(x, w, (2, 1), padding), want)
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, ("NCHW", "OIHW", "NCHW"))
    operands = jnp.asarray(x), jnp.asarray(w)
    check_equal(jq.integer.conv_general_dilated(*operands, (2, 1), padding, dimension_numbers=numbers), want)


# Layouts, shapes of both operands, groups: every form that a convolution may take, and kernels of an odd size.
FORMS: dict[str, tuple[tuple[str, str, str], Shape, Shape, int]] = {
    "depthwise": (("NHWC", "HWIO", "NHWC"), (2, 6, 7, 10), (3, 3, 1, 10), 10),
    "depthwise, two features a channel": (("NHWC", "HWIO", "NHWC"), (1, 6, 7, 5), (3, 2, 1, 10), 5),
    "depthwise, channels first": (("NCHW", "OIHW", "NCHW"), (2, 5, 6, 7), (5, 1, 3, 3), 5),
    "depthwise, one dimension": (("NWC", "WIO", "NWC"), (2, 11, 6), (4, 1, 6), 6),
    "depthwise, three dimensions": (("NDHWC", "DHWIO", "NDHWC"), (1, 3, 4, 5, 4), (2, 2, 2, 1, 4), 4),
    "depthwise, 81 positions": (("NHWC", "HWIO", "NHWC"), (1, 9, 10, 3), (9, 9, 1, 3), 3),
    "groups": (("NHWC", "HWIO", "NHWC"), (2, 5, 6, 12), (3, 3, 4, 9), 3),
    "groups, channels first": (("NCHW", "OIHW", "NCHW"), (2, 12, 5, 6), (9, 4, 1, 1), 3),
    "1x1": (("NHWC", "HWIO", "NHWC"), (2, 5, 6, 9), (1, 1, 9, 7), 1),
    "1x1, channels first": (("NCHW", "OIHW", "NCHW"), (2, 9, 5, 6), (7, 9, 1, 1), 1),
    "3x3": (("NHWC", "HWIO", "NHWC"), (2, 5, 6, 20), (3, 3, 20, 17), 1),
    "3x3, channels first": (("NCHW", "OIHW", "NCHW"), (2, 20, 5, 6), (17, 20, 3, 3), 1),
    "few channels": (("NHWC", "HWIO", "NHWC"), (1, 15, 14, 3), (7, 7, 3, 8), 1),
    "one dimension": (("NWC", "WIO", "NWC"), (2, 11, 20), (3, 20, 17), 1),
    "three dimensions": (("NDHWC", "DHWIO", "NDHWC"), (1, 3, 4, 5, 20), (2, 2, 2, 20, 17), 1),
}
# Of both operands; uint4 and uint2 hold codes that int8 holds too.
WIDTHS = (("uint8", "int4"), ("int8", "uint4"), ("uint8", "int2"), ("int4", "uint2"), ("uint4", "int8"))


def narrow_and_wide(name: str, pair: tuple[str, str], rng: np.random.Generator) -> list[tuple[Any, ...]]:
    """The operands and zero points of a form in a pair of dtypes, and the same numbers in 8 bits."""
    _, *shapes, _ = FORMS[name]
    codes = [integers(rng, dtype, shape) for dtype, shape in zip(pair, shapes, strict=True)]
    points = [np.asarray(v.reshape(-1)[-1]) for v in codes]
    narrow = tuple(jnp.asarray(v) for v in (*codes, *points))
    return [narrow, tuple(v if v.dtype == jnp.uint8 else v.astype(jnp.int8) for v in narrow)]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("offset", range(len(WIDTHS)))
def test_codes_below_8_bits_convolve_as_the_same_codes_in_8_bits(offset: int, rng: np.random.Generator) -> None:
    def convolve(name: str, x: Any, w: Any, x_point: Any, w_point: Any) -> list[jax.Array]:
        layouts, _, _, groups = FORMS[name]
        rest = {"dimension_numbers": layouts, "feature_group_count": groups}
        strides = (2,) * (x.ndim - 2) if name == "few channels" else (1,) * (x.ndim - 2)
        exact = jq.integer.conv_general_dilated(
            x, w, strides, "SAME", lhs_zero_point=x_point, rhs_zero_point=w_point, **rest
        )
        scaled = jq.conv_general_dilated(of_codes(x, x_point), of_codes(w, w_point), strides, "SAME", **rest)
        return [exact, scaled]

    names = list(FORMS)[offset :: len(WIDTHS)]
    operands = {n: narrow_and_wide(n, WIDTHS[(i + offset) % len(WIDTHS)], rng) for i, n in enumerate(names)}
    program = jax.jit(lambda pairs: {n: [convolve(n, *arguments) for arguments in pair] for n, pair in pairs.items()})
    results = program(operands)
    for name, (narrow, wide) in results.items():
        for actual, expected in zip(narrow, wide, strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=name)


def of_codes(codes: jax.Array, point: jax.Array) -> jq.QuantizedArray:
    """Codes that stand for quarters, all with one zero point."""
    shape = (1,) * codes.ndim
    return jq.QuantizedArray(codes, jnp.full(shape, 0.25, jnp.float32), point.reshape(shape))
