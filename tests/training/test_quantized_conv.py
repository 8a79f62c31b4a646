"""quantized_conv_general_dilated: results, cotangents in floats and in integers, strided, dilated, grouped, odd."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import FloatBackward, Int8Backward, PerAxis, Quantizer, QuantSpec

from ..cases.quantized_contractions import F32, both_ways, check_equal, faked, key, quarters, rules, whole
from ..support.equality import same_bits
from ..support.hlo import Program
from ..support.matrix import mark_others_full

I8, U8, I4, U4 = (QuantSpec(d) for d in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4))
NHWC = ("NHWC", "HWIO", "NHWC")
Shape = tuple[int, ...]
float_conv: Any = lax.conv_general_dilated
conv: Any = jq.quantized_conv_general_dilated
OTHER = lax.ConvDimensionNumbers((0, 1, 2, 3), (0, 1, 2, 3), (2, 1, 0, 3))
# lhs, rhs, window_strides, padding, the rest
CASES: dict[str, tuple[Shape, Shape, Any, Any, dict[str, Any]]] = {
    "strided, odd padding": ((2, 3, 7, 6), (4, 3, 3, 2), (2, 1), [(1, 0), (0, 2)], {}),
    "NHWC": ((2, 7, 6, 3), (3, 2, 3, 5), (1, 2), "SAME", {"dimension_numbers": NHWC}),
    "depthwise": (
        *((2, 5, 5, 4), (3, 3, 1, 8), (2, 2), "SAME"), {"dimension_numbers": NHWC, "feature_group_count": 4},
    ),
    "grouped, dilated": (
        *((3, 6, 10, 9), (9, 2, 3, 2), (3, 2), [(2, 1), (0, 3)]), {"rhs_dilation": (2, 1), "feature_group_count": 3},
    ),
    "holes in lhs": (
        *((2, 5, 3), (3, 3, 4), (2,), [(4, -1)]),
        {"lhs_dilation": (3,), "rhs_dilation": (2,), "dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
    "cropped": ((2, 3, 9), (2, 3, 3), (2,), [(-2, -1)], {}),
    "what a stride leaves over": ((2, 3, 8), (2, 3, 1), (3,), "VALID", {}),
    "wider padding than the kernel": ((2, 3, 4), (2, 3, 3), (1,), [(5, 6)], {}),
    "another layout out": ((2, 4, 3, 3), (5, 4, 1, 1), (1, 1), "VALID", {"dimension_numbers": OTHER}),
    "no positions, strided": ((2, 3, 2, 2), (4, 3, 3, 3), (2, 3), "VALID", {}),
    "no images": ((0, 3, 4), (4, 3, 3), (1,), "VALID", {}),
}  # fmt: skip


def numbers_of(name: str) -> lax.ConvDimensionNumbers:
    lhs, rhs, *_, rest = CASES[name]
    return lax.conv_dimension_numbers(lhs, rhs, rest.get("dimension_numbers"))


def on_the_grid(rng: np.random.Generator, name: str, shape: Shape) -> Any:
    """A cotangent whose int8 codes are itself: a 127 for each image and for each feature."""
    image, feature, *_ = numbers_of(name).out_spec
    g = np.moveaxis(whole(rng, shape, 126), (image, feature), (0, 1)).copy()
    if g.size:
        g[(slice(None), 0, *(0,) * (g.ndim - 2))] = 127
        g[(0, slice(None), *(0,) * (g.ndim - 2))] = -127
    return jnp.asarray(np.moveaxis(g, (0, 1), (image, feature)))


def draw(shape: Shape, axis: int, rng: np.random.Generator) -> Any:
    """A scale for each index of an axis, powers of two."""
    return np.exp2(rng.integers(-2, 1, [n if a == axis else 1 for a, n in enumerate(shape)])).astype(F32)


KINDS = [
    *((name, "asymmetric") for name in CASES),
    *((name, "images by features") for name in ("strided, odd padding", "NHWC", "depthwise", "grouped, dilated")),
    ("holes in lhs", "one scale"),
]


BY_DEFAULT = (
    *(("strided, odd padding", "images by features"), ("depthwise", "images by features")),
    *(("NHWC", "asymmetric"), ("grouped, dilated", "asymmetric"), ("no images", "asymmetric")),
    ("holes in lhs", "one scale"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "kind"), mark_others_full(KINDS, BY_DEFAULT))
def test_cotangents_are_exact(name: str, kind: str, rng: np.random.Generator) -> None:
    """In floats and in integers, on numbers that neither rounds, the bits of the float convolution."""
    left, right, strides, padding, rest = CASES[name]
    numbers = numbers_of(name)
    sides, xs = [], []
    for shape, axis, point in ((left, numbers.lhs_spec[0], 5), (right, numbers.rhs_spec[0], 11)):
        if kind == "asymmetric":
            spec, scale, zero = U4, np.full((1,) * len(shape), 0.5, F32), np.full((1,) * len(shape), point, jnp.uint4)
        else:
            alone = kind == "one scale"
            spec = I4 if alone else QuantSpec(jnp.int4, PerAxis(axis))
            scale, zero, point = np.full((1,) * len(shape), 0.5, F32) if alone else draw(shape, axis, rng), None, 0
        sides.append(Quantizer(spec, scale, zero))
        xs.append(jnp.asarray(quarters(rng, spec, scale, point, shape)))

    def call(backward: Any, *xs: Any) -> Any:
        specs = {"lhs_spec": sides[0], "rhs_spec": sides[1]}
        return conv(*xs, strides, padding, **rest, **specs, backward=backward)

    floats = lambda x, w: float_conv(sides[0](x), sides[1](w), strides, padding, **rest)  # noqa: E731
    y = jax.eval_shape(functools.partial(call, FloatBackward()), *xs)
    g = on_the_grid(rng, name, y.shape)
    # What is folded into g is taken out of it beforehand.
    image, feature, *_ = numbers.out_spec
    divisors = [np.ones((1,) * g.ndim, F32), np.ones((1,) * g.ndim, F32)]
    if kind == "images by features":
        divisors = [np.asarray(s.scale).reshape([-1 if a == dimension else 1 for a in range(g.ndim)])
              for s, dimension in ((sides[1], feature), (sides[0], image))]  # fmt: skip

    @jax.jit
    def ways(xs: Any) -> Any:
        results = []
        for way in (*(functools.partial(call, b) for b in (Int8Backward(), FloatBackward())), floats):
            y, pull = jax.vjp(way, *xs)
            results.append((y, pull(g / divisors[0])[0], pull(g / divisors[1])[1]))
        return results

    integers, theirs, want = ways(xs)
    check_equal(integers, want)
    check_equal(theirs, want)


IMAGES = QuantSpec(jnp.uint8, PerAxis(0), zero_point_granularity=jq.PerTensor())
FORWARD: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "both asymmetric": ("NHWC", U8, U8, {}),
    "images by features": ("strided, odd padding", IMAGES,
                           QuantSpec(jnp.uint8, PerAxis(0)), {}),
    "depthwise": ("depthwise", QuantSpec(jnp.int8, symmetric=False), QuantSpec(jnp.int8, PerAxis(3)), {}),
    "4 bits, float16": ("grouped, dilated", U4, I4, {"preferred_element_type": jnp.float16}),
    "2 bits": ("cropped", QuantSpec(jnp.uint2), QuantSpec(jnp.int2), {}),
    "weights alone": ("depthwise", None, QuantSpec(jnp.int16, PerAxis(3)), {}),
    "weights of a table": ("grouped, dilated", None, QuantSpec(jq.nf4, jq.Blocked(1, 3)), {}),
    "activations alone": ("holes in lhs", QuantSpec(jnp.float8_e4m3fn, PerAxis(1)), None, {}),
}  # fmt: skip


PAIRS = ("both asymmetric", "depthwise", "4 bits, float16", "weights of a table", "activations alone")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", mark_others_full(FORWARD, PAIRS))
def test_results_and_gradients(name: str, rng: np.random.Generator) -> None:
    """The bits of `conv_general_dilated` of `quantize`, and the gradients of floats, in bfloat16, too."""
    case, *specs, more = FORWARD[name]
    left, right, strides, padding, rest = CASES[case]

    @jax.jit
    def ways(x: Any, w: Any) -> Any:
        sides = {"lhs_spec": specs[0], "rhs_spec": specs[1]}
        call = lambda x, w: conv(x, w, strides, padding, **rest, **sides, **more)  # noqa: E731
        y, pull = jax.vjp(call, x, w)
        q = [v if s is None else jq.quantize(v, s) for v, s in zip((x, w), specs, strict=True)]
        dtype = more.get("preferred_element_type", jnp.float32 if x.dtype != w.dtype else x.dtype)

        def floats(*xs: Any) -> Any:
            fakes = [
                faked(None if s is None else Quantizer(s), v).astype(dtype) for s, v in zip(specs, xs, strict=True)
            ]
            return float_conv(*fakes, strides, padding, **rest)

        theirs = jax.vjp(floats, x, w)[1](y)
        codes: Any = functools.partial(jq.conv_general_dilated, window_strides=strides, padding=padding)
        return y, call(x, w), codes(*q, **rest, **more), pull(y), theirs

    x, w = rng.normal(0.3, 1, left).astype(F32), rng.normal(size=right).astype(F32)
    for dtype in (jnp.float32, jnp.bfloat16) if name in ("both asymmetric", "weights alone") else (jnp.float32,):
        y, once, expected, actual, exact = ways(jnp.asarray(x, dtype), jnp.asarray(w))
        same_bits(y, np.asarray(expected))
        same_bits(once, np.asarray(expected))
        for mine, theirs in zip(actual, exact, strict=True):
            assert mine.dtype == theirs.dtype
            tolerance = np.abs(np.asarray(theirs, F32)).max() * (1e-5 if theirs.dtype == F32 and not more else 1e-2)
            np.testing.assert_allclose(np.asarray(mine, F32), np.asarray(theirs, F32), rtol=0, atol=tolerance)


@pytest.mark.slow
def test_every_rule(rng: np.random.Generator) -> None:
    """Operands, scales of features and a learned zero point through a depthwise convolution, saturated in places."""
    left, right, strides, padding, rest = CASES["depthwise"]
    features = QuantSpec(jnp.int4, PerAxis(3))
    scales = draw(right, 3, rng)
    estimators = rules(rng)
    estimators = {name: estimators[name] for name in ("straight", "lsq", "lsq+", "pact", "stochastic")}
    points = {n: 0 if n == "pact" else 6 for n in estimators}
    xs = {n: (quarters(rng, U4, 0.5, z, left), quarters(rng, features, scales, 0, right)) for n, z in points.items()}
    floats = lambda x, w: float_conv(x, w, strides, padding, **rest)  # noqa: E731
    call = lambda x, w, a, b: conv(  # noqa: E731
        x, w, strides, padding, **rest, lhs_spec=a, rhs_spec=b
    )
    g = whole(rng, jax.eval_shape(floats, *xs["lsq"]).shape, 1)

    @jax.jit
    def ways(xs: Any) -> Any:
        results = {}
        for name, rule in estimators.items():
            point = np.zeros((1,) * 4, jnp.uint4) if name == "pact" else np.full((1,) * 4, 6, F32)
            sides = Quantizer(U4, F32(0.5), point, rule), Quantizer(features, scales, None, rule)
            results[name] = both_ways(call, floats, xs[name], sides, g)
        return results

    for name, (actual, expected) in ways(xs).items():
        print(name)
        check_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [Int8Backward(), Int8Backward(True, rhs=False)], ids=repr)
def test_error_of_integer_cotangents(backward: Int8Backward, fixed_rng: np.random.Generator) -> None:
    """Of any g, grouped and strided: half a step of g, or a whole one, for each of the products."""
    left, right, strides, padding, rest = CASES["grouped, dilated"]
    x, w = fixed_rng.normal(size=left).astype(F32), fixed_rng.normal(size=right).astype(F32)
    call = functools.partial(conv, window_strides=strides, padding=padding, lhs_spec=U8, rhs_spec=I8, **rest)
    y, floats = jax.vjp(call, x, w)
    g = fixed_rng.normal(size=y.shape).astype(F32)
    pull = jax.vjp(functools.partial(call, backward=backward, key=key(fixed_rng)), x, w)[1]
    step = np.abs(g).max() / 127 / (1 if backward.stochastic_rounding else 2)
    ones = jax.vjp(lambda *xs: float_conv(*xs, strides, padding, **rest), jnp.abs(x), jnp.abs(w))[1](jnp.ones_like(y))
    dx, dw = pull(g)
    for mine, theirs, size in zip((dx, dw), floats(g), ones, strict=True):
        assert (np.abs(mine - theirs) <= 1.05 * step * size + 1e-4).all()
    assert (dx != floats(g)[0]).any()
    assert (np.asarray(dw) == np.asarray(floats(g)[1])).all() == (not backward.rhs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 1, 48, 48), (1, 1, 460, 301)], ids=str)
def test_a_kernel_s_long_sums_do_not_wrap_around(shape: Shape) -> None:
    """More products of 255 and 127 than an int32 holds, in many images or in one; and a program that is no longer."""
    x, w = np.full(shape, 255.0, F32), np.ones((1, 1, 3, 3), F32)
    strides, padding = (2, 1), [(1, 2), (1, 2)]
    lhs = Quantizer(U8, F32(1), np.zeros((1, 1, 1, 1), np.uint8))

    def pull_back(x: Any, w: Any, g: Any) -> Any:
        call = functools.partial(conv, window_strides=strides, padding=padding)
        return jax.vjp(lambda w: call(x, w, lhs_spec=lhs, rhs_spec=I8, backward=Int8Backward()), w)[1](g)[0]

    floats = lambda w: float_conv(x, w, strides, padding)  # noqa: E731
    g = jnp.full(jax.eval_shape(floats, w).shape, 127, F32).at[..., 1::2].set(126)
    want = jax.vjp(floats, w)[1](g)[0]
    assert np.abs(want).max() > 2**31
    np.testing.assert_allclose(jax.jit(pull_back)(x, w, g), want, rtol=1e-5)


def test_a_program_does_not_grow_with_the_image() -> None:
    """Depthwise too: the kernel's positions are counted out in the gradient's program, the result's are not."""

    def equations(size: int) -> int:
        x, w = np.zeros((1, size, size, 4), F32), np.zeros((3, 3, 1, 4), F32)
        call = lambda w: conv(  # noqa: E731
            x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=4, lhs_spec=I8, rhs_spec=I8,
            backward=Int8Backward(),
        ).sum()  # fmt: skip
        return str(jax.make_jaxpr(jax.grad(call))(w)).count(" = ")

    assert equations(100) <= equations(30)  # both small enough for `barriers.split_small_fusion`


@pytest.mark.slow
def test_transforms(rng: np.random.Generator) -> None:
    """vmap of gradients, a batch over eight devices: what a loop and what one device gives; codes are what is kept."""
    left, right, strides, padding = (8, 6, 6, 4), (3, 3, 4, 5), (2, 1), "SAME"
    rest: dict[str, Any] = {"dimension_numbers": NHWC}
    features = Quantizer(QuantSpec(jnp.int4, PerAxis(3)), np.full((1, 1, 1, 5), 0.5, F32))

    def pull_back(x: Any, w: Any, scale: Any, g: Any) -> Any:
        lhs = Quantizer(U4, scale, np.full((1,) * 4, 3, jnp.uint4), jq.LSQ(elements=9))
        call = functools.partial(conv, window_strides=strides, padding=padding, **rest)
        y, pull = jax.vjp(lambda x, w, s: call(x, w, lhs_spec=lhs, rhs_spec=features), x, w, scale)
        return y, pull(g)[:2]

    x, w = quarters(rng, U4, 0.5, 3, (3, *left)), quarters(rng, I4, 0.5, 0, (3, *right))
    g = whole(rng, (3, 8, 3, 6, 5), 1)
    scale = F32(0.5)
    members = [pull_back(x[i], w[i], scale, g[i]) for i in range(3)]
    check_equal(
        jax.jit(jax.vmap(pull_back, in_axes=(0, 0, None, 0)))(x, w, scale, g),
        jax.tree.map(lambda *v: jnp.stack(v), *members),
    )
    place = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))
    check_equal(jax.jit(pull_back)(jax.device_put(x[0], place), w[0], scale, jax.device_put(g[0], place)), members[0])
    call = lambda x, w: conv(  # noqa: E731
        x, w, strides, padding, **rest, lhs_spec=Quantizer(U8, F32(0.02), np.full((1,) * 4, 99, np.uint8)), rhs_spec=I8
    )
    residuals = jax.tree.leaves(jax.jit(lambda x, w: jax.vjp(call, x, w)[1])(x[0], w[0]))
    assert sum(v.nbytes for v in residuals) <= 0.3 * x[0].nbytes + 0.26 * w[0].nbytes
    assert [c.opcode for c in Program(call, x[0], w[0]).contractions() if c.result[0] == "s32"]


X, W = np.ones((2, 3, 4, 4), F32), np.ones((6, 3, 2, 2), F32)
REFUSALS: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (X, W, {"lhs_spec": None, "rhs_spec": None}, TypeError, "lhs_spec, rhs_spec: expected a QuantSpec or a Quantizer"),
    (X, W, {"rhs_spec": "int8"}, TypeError, "rhs_spec: expected a QuantSpec, a Quantizer or None, got 'int8'"),
    (X, W, {"rhs_spec": Quantizer(U8, 0.5)}, ValueError, r"rhs_spec\.zero_point: expected a zero point"),
    (X, W, {"lhs_spec": Quantizer(I8, X)}, ValueError, r"lhs_spec\.scale: expected one element, or shape \(1, 1, 1, 1\)"),
    (X, W, {"lhs_spec": QuantSpec(jnp.int8, PerAxis(1))}, ValueError, r"lhs\.scale: expected one scale, or one for"),
    (X, W, {"rhs_spec": QuantSpec(jnp.int4, jq.Blocked(1, 2))}, ValueError, r"rhs\.scale: expected .* output feature"),
    (X, W, {"rhs_spec": QuantSpec(jnp.int16)}, TypeError, "rhs: expected values of int8.*, got int16"),
    (X, W, {"rhs_spec": QuantSpec(jnp.int8, PerAxis(4))}, ValueError, r"axis: expected an integer in \[-4, 3\]"),
    ("x", W, {}, TypeError, "lhs: expected an array, got str"),
    (X, W.astype(np.int8), {}, TypeError, "rhs: expected dtype float32.*, got int8"),
    (X, W[:, :2], {}, ValueError, "rhs: expected 3 channels"),
    (X, W, {"window_strides": (1,)}, ValueError, "window_strides: expected 2 positive ints"),
    (X, W, {"padding": "VALUD"}, ValueError, "padding: expected 'SAME' or"),
    (X, W, {"rhs_dilation": (1.0, 1)}, TypeError, "rhs_dilation: expected an int, got 1.0"),
    (X, W, {"feature_group_count": 2}, ValueError, "feature_group_count: expected a divisor of lhs's channels, 3, got 2"),
    (X, W, {"preferred_element_type": jnp.int8}, TypeError, "preferred_element_type: expected dtype float32"),
    (X, W, {"precision": {}}, TypeError, "precision: expected a static, hashable value"),
    (X, W, {"backward": [1]}, TypeError, r"backward: expected FloatBackward\(\), .* or Float8Backward\(\), got \[1\]"),
    (X, W, {"backward": Int8Backward(), "lhs_spec": None}, ValueError, "backward: expected .* two quantized operands"),
    (X, W, {"backward": Int8Backward(), "batch_group_count": 2}, ValueError, "backward: .* because batch_group_count is not 1"),
    (X, W, {"backward": Int8Backward(), "rhs_spec": QuantSpec(jnp.uint8, PerAxis(0))}, ValueError, "backward: .* zero"),
    (X, W, {"backward": Int8Backward(True)}, ValueError, "key: expected a key, because Int8Backward"),
    (X, W, {"key": 3}, TypeError, r"key: expected None or one key of jax\.random, got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("lhs", "rhs", "rest", "error", "text"), REFUSALS)
def test_refusals(lhs: Any, rhs: Any, rest: Any, error: type[Exception], text: str) -> None:
    defaults = {"window_strides": (1, 1), "padding": "VALID", "lhs_spec": I8, "rhs_spec": I8}
    call = functools.partial(conv, **{**defaults, **rest})

    def differentiate() -> Any:
        y, pull = jax.vjp(call, lhs, rhs) if isinstance(lhs, np.ndarray) else (call(lhs, rhs), None)
        return pull and pull(y)

    with pytest.raises(error, match=rf"jaxquant\.quantized_conv_general_dilated: {text}") as raised:
        differentiate()
    assert isinstance(raised.value, AssertionError)


@pytest.mark.slow
def test_groups_of_images_come_back_in_floats(rng: np.random.Generator) -> None:
    """Each group of images with its own features."""
    x, w = rng.normal(size=(4, 3, 5, 5)).astype(F32), rng.normal(size=(6, 3, 2, 2)).astype(F32)
    call = lambda x, w: conv(  # noqa: E731
        x, w, (1, 1), "VALID", batch_group_count=2, lhs_spec=U8, rhs_spec=QuantSpec(jnp.int8, PerAxis(0))
    )
    fake = lambda x, w: (jq.fake_quantize(x, U8), jq.fake_quantize(w, QuantSpec(jnp.int8, PerAxis(0))))  # noqa: E731
    floats = lambda x, w: float_conv(*fake(x, w), (1, 1), "VALID", batch_group_count=2)  # noqa: E731
    y, pull = jax.vjp(call, x, w)
    for mine, theirs in zip(pull(y), jax.vjp(floats, x, w)[1](y), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)
