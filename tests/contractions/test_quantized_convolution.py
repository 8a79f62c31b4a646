"""`conv_general_dilated` over quantized arrays: the integers of `jax.lax`, the scales, gradients, refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..oracles.onnx_text import BOUNDS, dtype
from ..support.equality import same_bits
from ..support.quantized_arrays import dequantized, expanded

Shape = tuple[int, ...]
NHWC = ("NHWC", "HWIO", "NHWC")


def quantized(
    rng: np.random.Generator, name: str, shape: Shape, scale: Shape, point: Shape | None
) -> jq.QuantizedArray:
    """Codes over the whole range, odd zero points where there are some, scales that are no powers of two."""
    low, high = BOUNDS[name]
    values = rng.integers(low, high + 1, shape).astype(dtype(name))
    points = None if point is None else (rng.integers(low // 2, high // 2, point) * 2 + 1).astype(dtype(name))
    return jq.QuantizedArray(values, rng.uniform(0.01, 0.1, scale).astype(np.float32), points)


def plain(lhs: Any, rhs: Any, *positional: Any, **keywords: Any) -> np.ndarray:
    """What jax.lax makes of plain arrays, on a CPU: no library for GPUs convolves integers."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(lax.conv_general_dilated(jnp.asarray(lhs), jnp.asarray(rhs), *positional, **keywords))


def steps(q: jq.QuantizedArray) -> np.ndarray:
    values = np.asarray(q.codes).astype(np.int32)
    return values if q.zero_point is None else values - expanded(q.zero_point, q.shape, q.block_size).astype(np.int32)


# lhs: dtype, shape, shape of the scale, has a zero point; rhs: the same, its zero point having the scale's shape
Side = tuple[str, Shape, Shape, bool]
CASES: dict[str, tuple[Side, Side, tuple[Any, ...], dict[str, Any]]] = {
    "NCHW": (
        ("int8", (2, 3, 7, 6), (1, 1, 1, 1), False), ("int8", (4, 3, 3, 2), (4, 1, 1, 1), False),
        ((2, 1), [(1, 0), (0, 2)]), {},
    ),
    "NHWC, asymmetric": (
        ("uint8", (2, 7, 6, 3), (1, 1, 1, 1), True), ("uint8", (3, 2, 3, 5), (1, 1, 1, 5), True),
        ((1, 2), "SAME"), {"dimension_numbers": NHWC},
    ),
    "a scale for each image": (
        ("uint8", (3, 5, 5, 2), (3, 1, 1, 1), True), ("int8", (3, 3, 2, 6), (1, 1, 1, 3), True),  # in runs of features
        ((1, 1), "SAME_LOWER"), {"dimension_numbers": NHWC},
    ),
    "depthwise": (
        ("uint8", (2, 6, 6, 8), (1, 1, 1, 1), True), ("int8", (3, 3, 1, 16), (1, 1, 1, 16), True),
        ((2, 2), "SAME"), {"dimension_numbers": NHWC, "feature_group_count": 8},
    ),
    "grouped and dilated": (
        ("int8", (2, 6, 9, 9), (2, 1, 1, 1), True), ("uint8", (4, 3, 2, 3), (1, 1, 1, 1), True),
        ((1, 1), "VALID"), {"rhs_dilation": [2, 3], "feature_group_count": 2},
    ),
    "holes in lhs": (
        ("int4", (2, 5, 3), (1, 1, 1), True), ("uint4", (2, 3, 4), (1, 1, 4), True),
        ((1,), [(2, -1)]), {"lhs_dilation": (2,), "dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
    "groups of images": (
        ("uint8", (4, 3, 5, 5), (4, 1, 1, 1), True), ("int8", (6, 3, 2, 2), (6, 1, 1, 1), True),
        ((1, 1), "VALID"), {"batch_group_count": 2},
    ),
    "3-D": (
        ("int2", (1, 4, 5, 3, 4), (1,) * 5, False), ("uint2", (2, 4, 2, 2, 3), (2, 1, 1, 1, 1), True),
        ((1, 2, 1), "VALID"), {},
    ),
    "another layout out": (
        ("int8", (2, 8, 8, 8), (1, 1, 1, 1), False), ("int8", (16, 8, 1, 1), (16, 1, 1, 1), False),
        ((1, 1), "VALID"), {"dimension_numbers": lax.ConvDimensionNumbers((0, 1, 2, 3), (0, 1, 2, 3), (2, 1, 0, 3))},
    ),
    "no positions": (
        ("int8", (2, 3, 2, 2), (1, 1, 1, 1), True), ("int8", (4, 3, 3, 3), (4, 1, 1, 1), True), ((1, 1), "VALID"), {},
    ),
    "no images": (
        ("int8", (0, 3, 4, 4), (1, 1, 1, 1), True), ("int8", (4, 3, 3, 3), (4, 1, 1, 1), True), ((1, 1), "VALID"), {},
    ),
}  # fmt: skip


def draw_pair(name: str, rng: np.random.Generator) -> tuple[jq.QuantizedArray, jq.QuantizedArray]:
    left, right = CASES[name][:2]
    lhs = quantized(rng, *left[:3], (1,) * len(left[1]) if left[3] else None)
    return lhs, quantized(rng, *right[:3], right[2] if right[3] else None)


def scales(lhs: jq.QuantizedArray, rhs: jq.QuantizedArray, name: str) -> np.ndarray:
    """float32(lhs.scale * rhs.scale) before the result is laid out: [images, features]."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, CASES[name][3].get("dimension_numbers"))
    factors = []
    for q, spec in ((lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec)):
        first = tuple(slice(None) if a == spec[0] else 0 for a in range(q.ndim))
        factors.append(expanded(q.scale, (*q.shape,), None)[first])
    groups = CASES[name][3].get("batch_group_count", 1)
    images = factors[0].reshape(groups, len(factors[0]) // groups).T
    return np.repeat(images, len(factors[1]) // groups, axis=1) * factors[1]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(CASES))
def test_two_quantized_arrays(name: str, rng: np.random.Generator) -> None:
    """The sums equal jax.lax's over int32; the scales are multiplied first, both products rounded once."""
    lhs, rhs = draw_pair(name, rng)
    _, _, positional, keywords = CASES[name]
    call = functools.partial(jq.conv_general_dilated, window_strides=positional[0], padding=positional[1], **keywords)
    acc = plain(steps(lhs), steps(rhs), *positional, **keywords)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, keywords.get("dimension_numbers"))
    acc = np.transpose(acc, numbers.out_spec)
    factors = scales(lhs, rhs, name)
    expected = acc.astype(np.float32) * factors.reshape(*factors.shape, *(1,) * (acc.ndim - 2))
    expected = np.ascontiguousarray(np.transpose(expected, np.argsort(numbers.out_spec)))
    same_bits(call(lhs, rhs), expected)
    same_bits(jax.jit(call)(lhs, rhs), expected)  # zero points unknown
    if name == "NHWC, asymmetric":
        actual = call(lhs, rhs, preferred_element_type=jnp.bfloat16)
        same_bits(actual, expected.astype(ml_dtypes.bfloat16))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["NHWC, asymmetric", "depthwise", "grouped and dilated", "holes in lhs"])
def test_zero_point_for_each_image(name: str, rng: np.random.Generator) -> None:
    """Each image is padded with its own zero point, and computed as it is alone."""
    left, _, positional, keywords = CASES[name]
    first = (left[1][0], *(1,) * (len(left[1]) - 1))
    lhs, rhs = quantized(rng, left[0], left[1], first, first), draw_pair(name, rng)[1]
    call = jax.jit(functools.partial(jq.conv_general_dilated, **keywords), static_argnums=(2, 3))
    padding = positional[1] if isinstance(positional[1], str) else tuple(positional[1])
    actual = call(lhs, rhs, positional[0], padding)
    units = [q.replace(scale=np.ones_like(q.scale)) for q in (lhs, rhs)]
    expected = plain(steps(units[0]), steps(units[1]), *positional, **keywords)
    np.testing.assert_array_equal(call(*units, positional[0], padding), expected.astype(np.float32))
    for image in range(lhs.shape[0]):
        same_bits(call(lhs[image : image + 1], rhs, positional[0], padding), np.asarray(actual)[image : image + 1])


@pytest.mark.parametrize("name", ["NHWC, asymmetric", "depthwise"])
def test_integers_are_exact(name: str, rng: np.random.Generator) -> None:
    """Scales of 1: nothing but the integers."""
    lhs, rhs = (q.replace(scale=np.ones((1,) * q.ndim, np.float32)) for q in draw_pair(name, rng))
    _, _, positional, keywords = CASES[name]
    expected = plain(steps(lhs), steps(rhs), *positional, **keywords)
    actual = jq.conv_general_dilated(lhs, rhs, *positional, **keywords)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["NCHW", "a scale for each image", "groups of images"])
@pytest.mark.parametrize("side", [0, 1])
def test_weight_only(name: str, side: int, rng: np.random.Generator) -> None:
    """One side as floats: jax.lax's convolution of the dequantized arrays, in any format and sharing of entries."""
    sides: list[Any] = list(draw_pair(name, rng))
    _, _, positional, keywords = CASES[name]
    if side:
        sides[1] = jq.quantize(dequantized(sides[1]), jq.QuantSpec(jq.nf4, jq.PerAxis((0, 1))))
    else:
        sides[0] = jq.quantize(dequantized(sides[0]), jq.QuantSpec(jnp.int16, jq.PerAxis(1)))
    tables = [dequantized(q) for q in sides]
    sides[1 - side] = tables[1 - side]
    expected = plain(*tables, *positional, **keywords)
    np.testing.assert_allclose(jq.conv_general_dilated(*sides, *positional, **keywords), expected, rtol=1e-5, atol=1e-5)
    sides[1 - side] = jnp.asarray(tables[1 - side], jnp.bfloat16)
    actual = jq.conv_general_dilated(*sides, *positional, **keywords)
    assert actual.dtype == jnp.float32
    arrays = [q.astype(jnp.bfloat16) for q in sides]
    assert jq.conv_general_dilated(*arrays, *positional, **keywords).dtype == jnp.bfloat16


def test_scales_of_other_dtypes(rng: np.random.Generator) -> None:
    """They are widened before they are multiplied; the result has the dtype that the arrays say."""
    x, w = rng.standard_normal((2, 3, 6)).astype(np.float32), rng.standard_normal((4, 3, 3)).astype(np.float32)
    lhs = jq.quantize(x, jq.QuantSpec(jnp.uint8, scale_dtype=jnp.bfloat16)).astype(jnp.float16)
    rhs = jq.quantize(w, jq.QuantSpec(jnp.int8, jq.PerAxis(0), scale_dtype=jnp.float8_e8m0fnu)).astype(jnp.float16)
    acc = plain(steps(lhs), steps(rhs), (1,), "SAME").astype(np.float32)
    factors = np.asarray(lhs.scale).astype(np.float32)[0, 0, 0] * np.asarray(rhs.scale).astype(np.float32)
    same_bits(jq.conv_general_dilated(lhs, rhs, (1,), "SAME"), (acc * factors.reshape(1, 4, 1)).astype(np.float16))
    actual = jq.conv_general_dilated(lhs.astype(jnp.float32), rhs, (1,), "SAME")
    same_bits(actual, acc * factors.reshape(1, 4, 1))


def test_blocks_of_features_with_a_short_one(rng: np.random.Generator) -> None:
    w = rng.standard_normal((7, 2, 3)).astype(np.float32)
    rhs = jq.quantize(w, jq.QuantSpec(jnp.uint8)).astype(jnp.float32)
    scale, point = rng.uniform(0.1, 0.2, (3, 1, 1)).astype(np.float32), rng.integers(0, 256, (3, 1, 1)).astype(np.uint8)
    rhs = rhs.replace(scale=scale, zero_point=point, block_size=3)
    lhs = quantized(rng, "int8", (2, 2, 9), (1, 1, 1), (1, 1, 1))
    acc = plain(steps(lhs), steps(rhs), (1,), "VALID").astype(np.float32)
    factors = lhs.scale[0, 0, 0] * scale[np.arange(7) // 3, 0, 0]
    same_bits(jq.conv_general_dilated(lhs, rhs, (1,), "VALID"), acc * factors.reshape(1, 7, 1))


@pytest.mark.slow
def test_under_vmap_and_sharded(rng: np.random.Generator) -> None:
    lhs, rhs = draw_pair("depthwise", rng)
    _, _, positional, keywords = CASES["depthwise"]
    call = functools.partial(jq.conv_general_dilated, window_strides=positional[0], padding=positional[1], **keywords)
    stack = [draw_pair("depthwise", rng)[0].replace(scale=lhs.scale) for _ in range(3)]
    want = [np.asarray(call(q, rhs)) for q in stack]
    batched = jax.tree.map(lambda *parts: jnp.stack(parts), *stack)
    same_bits(jax.vmap(call, in_axes=(0, None))(batched, rhs), np.stack(want))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        place = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("d",), (), (), (), ()))
        parts = (stack[0].codes, stack[0].scale, stack[0].zero_point, rhs, rhs)
        values, scale, point, kernel, _ = (jax.device_put(p, s) for p, s in zip(parts, place, strict=True))
        same_bits(jax.jit(call)(jq.QuantizedArray(values, scale, point), kernel), want[0])


def test_cotangents_of_both_scales(rng: np.random.Generator) -> None:
    """dscale = sum of g * acc * the other scale, over what shares it."""
    lhs, rhs = draw_pair("groups of images", rng)
    _, _, positional, keywords = CASES["groups of images"]

    def convolve(lhs_scale: Any, rhs_scale: Any) -> jax.Array:
        sides = (lhs.replace(scale=lhs_scale), rhs.replace(scale=rhs_scale))
        return jq.conv_general_dilated(*sides, *positional, **keywords)

    y, pull = jax.vjp(convolve, jnp.asarray(lhs.scale), jnp.asarray(rhs.scale))
    g = rng.standard_normal(y.shape).astype(np.float32)
    cotangents = pull(jnp.asarray(g))
    acc = plain(steps(lhs), steps(rhs), *positional, **keywords).astype(np.float64)
    sums = (g * acc).sum(axis=(2, 3))  # [2 images of a group, 6 features, 3 of each group]
    of_images, of_features = np.float64(lhs.scale).reshape(2, 2), np.float64(rhs.scale).reshape(2, 3)
    sums = sums.reshape(2, 2, 3)  # image in its group, group, feature in its group
    d_images = np.einsum("igf,gf->gi", sums, of_features).reshape(lhs.scale.shape)
    d_features = np.einsum("igf,gi->gf", sums, of_images).reshape(rhs.scale.shape)
    size = np.abs(sums).max()
    np.testing.assert_allclose(cotangents[0], d_images, rtol=1e-5, atol=1e-6 * size)
    np.testing.assert_allclose(cotangents[1], d_features, rtol=1e-5, atol=1e-6 * size)


def test_cotangents_of_weight_only(rng: np.random.Generator) -> None:
    """Those of a convolution with the dequantized kernel; the scale's through (values - zero_point)."""
    x = rng.standard_normal((2, 6, 5, 3)).astype(np.float32)
    rhs = quantized(rng, "uint8", (3, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    call = functools.partial(jq.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
    y, pull = jax.vjp(lambda x, s: call(x, rhs.replace(scale=s)), jnp.asarray(x), jnp.asarray(rhs.scale))
    g = rng.standard_normal(y.shape).astype(np.float32)
    floats = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
    _, reference = jax.vjp(floats, jnp.asarray(x), jnp.asarray(dequantized(rhs)))
    dx, dw = reference(jnp.asarray(g))
    got_x, got_scale = pull(jnp.asarray(g))
    np.testing.assert_allclose(got_x, dx, rtol=1e-4, atol=1e-3)
    want = (np.asarray(dw, np.float64) * steps(rhs)).sum(axis=(0, 1), keepdims=True)
    np.testing.assert_allclose(got_scale, want, rtol=1e-4, atol=1e-2)


X = jq.QuantizedArray(np.ones((2, 3, 4, 4), np.int8), np.ones((1, 1, 1, 1), np.float32))
W = jq.QuantizedArray(np.ones((6, 3, 2, 2), np.int8), np.ones((6, 1, 1, 1), np.float32))
FLOATS = np.ones((2, 3, 4, 4), np.float32)


def parts(q: jq.QuantizedArray, name: str, shape: Shape) -> jq.QuantizedArray:
    return q.replace(**{name: np.ones(shape, np.float32 if name == "scale" else q.codes.dtype)})


def long(terms: int) -> tuple[jq.QuantizedArray, jq.QuantizedArray]:
    """The two sides of a sum of so many products: 255 * 255 each, and as much below 0."""
    scale, shape = np.ones((1, 1, 1), np.float32), (1, terms, 1)
    q = jq.QuantizedArray(np.full(shape, 255, np.uint8), scale, np.zeros((1, 1, 1), np.uint8))
    return q, q.replace(codes=np.zeros(shape, np.uint8), zero_point=np.full((1, 1, 1), 255, np.uint8))


I16 = X.replace(codes=np.ones(X.shape, np.int16))
NF4 = jq.quantize(np.ones(W.shape, np.float32), jq.QuantSpec(jq.nf4))
FLOAT8 = jq.quantize(np.ones(W.shape, np.float32), jq.QuantSpec("float8_e5m2"))
IN_LHS, IN_RHS = r"or lhs\.dequantize\(\), got", r"or rhs\.dequantize\(\), got"
REFUSALS: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (FLOATS, FLOATS, {}, TypeError, "lhs, rhs: expected a QuantizedArray on at least one side"),
    (X, W.codes.tolist(), {}, TypeError, "rhs: expected an array, got list"),
    (np.ones(X.shape, np.int8), W, {}, TypeError, "lhs: expected dtype float32, float16 or bfloat16, got int8"),
    (I16, W, {}, TypeError, f"lhs: expected .*{IN_LHS} int16"),
    (X, NF4, {}, TypeError, f"rhs: expected .*{IN_RHS} nf4"),
    (X, FLOAT8, {}, TypeError, f"rhs: expected .*{IN_RHS} float8_e5m2"),
    (parts(X, "scale", (1, 3, 1, 1)), W, {}, ValueError, rf"lhs\.scale: .* for each image, {IN_LHS}"),
    (parts(X, "scale", (1, 1, 4, 4)), W, {}, ValueError, r"lhs\.scale: .*, got shape \(1, 1, 4, 4\)"),
    (parts(X, "zero_point", (1, 3, 1, 1)), W, {}, ValueError, rf"lhs\.zero_point: expected one .* for each image, {IN_LHS}"),
    (
        parts(X, "zero_point", (2, 1, 1, 1)), parts(W, "zero_point", (1, 1, 1, 1)), {"batch_group_count": 2}, ValueError,
        rf"lhs\.zero_point: expected one zero_point, {IN_LHS}",
    ),
    (X, parts(W, "scale", (6, 3, 1, 1)), {}, ValueError, rf"rhs\.scale: expected .* each output feature, {IN_RHS}"),
    (X, parts(W, "zero_point", (1, 1, 2, 2)), {}, ValueError, rf"rhs\.zero_point: .*{IN_RHS} shape"),
    (X, parts(W, "scale", (5, 1, 1, 1)), {}, ValueError, r"rhs\.scale: expected the rank of the codes"),
    (*long(33026), {"window_strides": (1,)}, ValueError, "rhs: expected a sum of at most 33025 products of two codes.*, got 33026"),
    (X, W, {"window_strides": (1,)}, ValueError, "window_strides: expected 2 positive ints"),
    (X[0, 0], W[0, 0], {}, ValueError, "lhs: expected an array of rank 3 or more"),
    (X, W[0], {}, ValueError, "rhs: expected an array of lhs's rank, 4"),
    (X, W[:, :2], {}, ValueError, "rhs: expected 3 channels"),
    (X, W, {"window_strides": (1, 0)}, ValueError, "window_strides: expected 2 positive ints"),
    (X, W, {"padding": "VALUD"}, ValueError, "padding: expected 'SAME' or"),
    (X, W, {"padding": [(0, 0)]}, ValueError, "padding: expected a name, or 2 pairs"),
    (X, W, {"rhs_dilation": (1.0, 1)}, TypeError, "rhs_dilation: expected an int, got 1.0"),
    (X, W, {"lhs_dilation": (0, 1)}, ValueError, "lhs_dilation: expected 2 positive ints"),
    (X, W, {"dimension_numbers": ("NCHW", "OIHW", "NCXX")}, ValueError, "dimension_numbers: expected numbers for rank 4"),
    (X, W, {"feature_group_count": 2}, ValueError, "feature_group_count: expected a divisor of lhs's channels, 3, got 2"),
    (X, W, {"batch_group_count": 3}, ValueError, "batch_group_count: expected a divisor of lhs's batch, 2, got 3"),
    (FLOATS, W, {"padding": 3}, ValueError, "padding: expected a name, or 2 pairs"),
    (X, W, {"preferred_element_type": jnp.int32}, TypeError, "preferred_element_type: expected dtype float32"),
]  # fmt: skip


@pytest.mark.parametrize(("lhs", "rhs", "keywords", "error", "text"), REFUSALS)
def test_refusals(lhs: Any, rhs: Any, keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    call = functools.partial(jq.conv_general_dilated, **{"window_strides": (1, 1), "padding": "VALID", **keywords})
    with pytest.raises(error, match=f"jaxquant.conv_general_dilated: {text}") as raised:
        call(lhs, rhs)
    assert isinstance(raised.value, AssertionError)


@pytest.mark.slow
def test_the_longest_sum_is_exact() -> None:
    """33025 products of 255 * 255, just what int32 holds."""
    above, below = long(33025)
    want = np.float32(33025 * 255 * 255)
    assert jq.conv_general_dilated(above, above, (1,), "VALID")[0, 0, 0] == want
    assert jq.conv_general_dilated(above, below, (1,), "VALID")[0, 0, 0] == -want


def test_equal_keys_do_not_share_a_plan() -> None:
    """A plan is kept for its arguments. True and 1.0 equal 1, and are refused after a call with 1, too."""
    x = jq.quantize(jnp.ones((1, 4, 4, 2)), jq.QuantSpec(jnp.uint8))
    w = jq.quantize(jnp.ones((3, 3, 2, 2)), jq.QuantSpec(jnp.int8))
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
    convolve = functools.partial(jq.conv_general_dilated, x, w)
    for order in (numbers, ("NHWC", "HWIO", "NHWC")):
        convolve((1, 1), "SAME", dimension_numbers=order, feature_group_count=1)
        with pytest.raises(TypeError, match="window_strides: expected an int, got True"):
            convolve((True, 1), "SAME", dimension_numbers=order)
        with pytest.raises(TypeError, match=r"feature_group_count: expected an int, got 1\.0"):
            convolve((1, 1), "SAME", dimension_numbers=order, feature_group_count=1.0)  # type: ignore[arg-type]
    wrong = numbers._replace(out_spec=tuple(float(axis) for axis in numbers.out_spec))
    with pytest.raises(ValueError, match="dimension_numbers: expected three permutations"):
        convolve((1, 1), "SAME", dimension_numbers=wrong)
