"""ONNX Runtime's operators on codes: all pairs of codes, the broadcasting of its loops, lengths, empties, sharding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant._onnx_ops import activations, arithmetic

from ..cases import microsoft_exactness as cases
from ..oracles import microsoft_text, onnx_runtime

F = np.float32
BYTES = ("uint8", "int8")


def list_pairs(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all 65536 pairs of codes."""
    codes = np.arange(256, dtype=np.uint8).view(name)
    return np.repeat(codes, 256), np.tile(codes, 256)


def same(got: Any, want: np.ndarray) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wrong = int((got != want).sum())
    assert wrong == 0, f"{wrong} of {want.size} codes differ"


FACTORS = (1.0, 1.0, 1.0, 2.0**-5, 2.0**-8, 2.0**-13, 2.0**-25, 8.0, 2.0**12)


@pytest.mark.parametrize("name", BYTES)
def test_add_of_all_pairs(name: str, rng: np.random.Generator) -> None:
    """Factors of all sizes: with the larger ones the fast form is exact, with the smaller ones it is not used."""
    a, b = list_pairs(name)
    op = jax.jit(jq.ops.qlinear_add)
    for factor in FACTORS:
        scales = [cases.draw_scale(rng), F(cases.draw_scale(rng) * F(factor)), cases.draw_scale(rng)]
        points = [cases.draw_point(rng, name) for _ in range(3)]
        if rng.random() < 0.3:
            points = [np.dtype(name).type(0)] * 3  # then the constant vanishes
        for left, right in ((0, 1), (1, 0)):
            arguments = (a, scales[left], points[0], b, scales[right], points[1], scales[2], points[2])
            want = microsoft_text.qlinear_add(*arguments)
            same(op(*arguments), want)
            if cases.is_fused() and max(scales[0] / scales[2], scales[1] / scales[2]) < 2.0**20:
                same(onnx_runtime.ask("QLinearAdd", arguments, name, cases.MICROSOFT), want)


@pytest.mark.parametrize("name", BYTES)
def test_mul_of_all_pairs(name: str, rng: np.random.Generator) -> None:
    a, b = list_pairs(name)
    op = jax.jit(jq.ops.qlinear_mul)
    for _ in range(10):
        scales = [cases.draw_scale(rng) for _ in range(3)]
        points = [cases.draw_point(rng, name) for _ in range(3)]
        scales[2] = F(scales[0] * scales[1] * F(rng.integers(1, 300) * 2.0 ** rng.integers(-1, 2)))
        arguments = (a, scales[0], points[0], b, scales[1], points[1], scales[2], points[2])
        want = microsoft_text.qlinear_mul(*arguments)
        same(op(*arguments), want)
        same(onnx_runtime.ask("QLinearMul", arguments, name, cases.MICROSOFT), want)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BYTES)
def test_add_with_known_scales(name: str, rng: np.random.Generator) -> None:
    """XLA must not merge the additions of constants."""
    a, b = list_pairs(name)
    for factor in (1.0, 2.0**-13):
        scales = [cases.draw_scale(rng), F(cases.draw_scale(rng) * F(factor)), cases.draw_scale(rng)]
        points = [int(cases.draw_point(rng, name)) for _ in range(3)]
        kinds = [np.dtype(name).type(p) for p in points]
        want = microsoft_text.qlinear_add(a, scales[0], kinds[0], b, scales[1], kinds[1], scales[2], kinds[2])

        def add(a, b, scales=scales, points=points):
            s = [float(scale) for scale in scales]
            return jq.ops.qlinear_add(a, s[0], points[0], b, s[1], points[1], s[2], points[2])

        same(jax.jit(add)(a, b), want)
        same(add(a, b), want)

        def add_and_use(a, b, add=add):
            y = add(a ^ a.dtype.type(1), b)
            return y, y.astype(jnp.float32) * F(0.3) + F(0.1)

        same(jax.jit(add_and_use)(a ^ a.dtype.type(1), b)[0], want)


SHAPES = (
    (),
    (1,),
    (7,),
    (1, 1),
    (3, 1),
    (1, 7),
    (3, 7),
    (2, 1, 7),
    (2, 3, 1),
    (2, 3, 7),
    (1, 1, 1, 1),
    (0,),
    (2, 0, 7),
)


def list_broadcasts() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the pairs of shapes that broadcast against each other."""
    pairs = []
    for left, right in itertools.product(SHAPES, repeat=2):
        try:
            np.broadcast_shapes(left, right)
        except ValueError:
            continue
        pairs.append((left, right))
    return pairs


@pytest.mark.parametrize("function", ["qlinear_add", "qlinear_mul"])
def test_broadcasting(function: str, rng: np.random.Generator) -> None:
    """The order of the operands in the formula depends on the shapes; scales next to ties show which it is."""
    text = getattr(microsoft_text, function)
    node = "QLinear" + function[-3:].title()
    pairs = list_broadcasts()
    # Each pair of shapes is a session of ONNX Runtime and a program of ours, so only some of them run.
    for i, place in enumerate(rng.permutation(len(pairs))[:24]):
        left, right = pairs[place]
        name = BYTES[i % 2]
        scales = [cases.draw_scale(rng) for _ in range(3)]
        points = [cases.draw_point(rng, name) for _ in range(3)]
        a, b = cases.draw_codes(rng, name, left), cases.draw_codes(rng, name, right)
        arguments = (a, scales[0], points[0], b, scales[1], points[1], scales[2], points[2])
        want = text(*arguments)
        if cases.is_fused():
            same(onnx_runtime.ask(node, arguments, name, cases.MICROSOFT), want)
        if i < 4:
            same(getattr(jq.ops, function)(*arguments), want)


@pytest.mark.parametrize("node", ["QLinearAdd", "QLinearMul"])
def test_the_text_holds_for_all_lengths(node: str, rng: np.random.Generator) -> None:
    """ONNX Runtime's kernels compute whole vectors and the elements after them alike."""
    if not cases.is_fused():
        pytest.skip("ONNX Runtime has other kernels on this machine")
    text = getattr(microsoft_text, f"qlinear_{node[-3:].lower()}")
    for length in range(1, 71):
        name = BYTES[length % 2]
        scales = [cases.draw_scale(rng) for _ in range(3)]
        points = [cases.draw_point(rng, name) for _ in range(3)]
        a, b = cases.draw_codes(rng, name, (length,)), cases.draw_codes(rng, name, (length,))
        arguments = (a, scales[0], points[0], b, scales[1], points[1], scales[2], points[2])
        same(onnx_runtime.ask(node, arguments, name, cases.MICROSOFT), text(*arguments))


def round_fraction(value: Fraction) -> np.float32:
    """Return the nearest float32, half to even, of a fraction in the range of normal floats."""
    if value == 0:
        return F(0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 25
    while magnitude / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    units = round(value / Fraction(2) ** exponent)  # Python rounds half to even
    return F(float(units) * 2.0**exponent)


def test_multiply_add_is_rounded_once(rng: np.random.Generator) -> None:
    """Sums that cancel, sums next to halves of the last bit, and sums of numbers of different sizes."""
    a = rng.integers(2**23, 2**24, 4000).astype(F) * F(2.0) ** rng.integers(-30, -20, 4000).astype(F)
    b = rng.integers(1, 256, 4000).astype(F) * np.where(rng.random(4000) < 0.5, F(1), F(1 + 2**-23)).astype(F)
    near = (-(a.astype(np.float64) * b)).astype(F) * (1 + rng.integers(-2, 3, 4000) * 2.0**-23).astype(F)
    far = (rng.normal(size=4000) * 2.0 ** rng.integers(-40, 10, 4000)).astype(F)
    c = np.where(rng.random(4000) < 0.5, near, far)
    want = np.array([round_fraction(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
                     for x, y, z in zip(a, b, c, strict=True)])  # fmt: skip
    np.testing.assert_array_equal(microsoft_text.fuse_multiply_add(a, b, c), want)

    @jax.jit
    def compute(a: jax.Array, b_too: jax.Array, c_too: jax.Array) -> tuple[jax.Array, jax.Array]:
        known = arithmetic.multiply_add(a, jnp.asarray(b), jnp.asarray(c))
        return arithmetic.multiply_add(a, b_too, c_too), known

    for got in compute(*map(jnp.asarray, (a, b, c))):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_exponentials(rng: np.random.Generator) -> None:
    """A few of a million entries may differ from numpy's float64 by the last bit."""
    for length in (1, 7, 1000):
        scales = (10 ** rng.uniform(-4, 1, 500)).astype(F)
        table = jax.jit(jax.vmap(lambda scale, length=length: activations.list_exponentials(scale, length)))
        got, want = np.asarray(table(scales)), np.stack([microsoft_text.exponentials(length, s) for s in scales])
        is_normal = want >= np.finfo(F).tiny * 2
        off = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32))[is_normal]
        assert off.max() <= 1
        assert off.sum() <= 5
        assert (got[~is_normal] <= np.finfo(F).tiny * 2).all()


EMPTY: dict[str, Callable[[np.ndarray], Any]] = {
    "add": lambda x: jq.ops.qlinear_add(x, 0.5, 0, x, 0.5, 0, 1.0, 0),
    "sigmoid": lambda x: jq.ops.qlinear_sigmoid(x, 0.5, 0, 1 / 256, 0),
    "leaky_relu": lambda x: jq.ops.qlinear_leaky_relu(x, 0.5, 0, 0.5, 0),
    "softmax": lambda x: jq.ops.qlinear_softmax(x, 0.5, 0, 1 / 256, 0),
    "average_pool": lambda x: jq.ops.qlinear_average_pool(x, 0.5, 0, 1.0, 0, kernel_shape=[2], pads=[1, 0]),
    "global_average_pool": lambda x: jq.ops.qlinear_global_average_pool(x, 0.5, 0, 1.0, 0),
    "concat": lambda x: jq.ops.qlinear_concat(0.5, 0, x, 0.5, 1, x, 0.25, 0, axis=0),
    "where": lambda x: jq.ops.qlinear_where(np.ones((), bool), x, 0.5, 0, x, 0.5, 1, 1.0, 0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(EMPTY))
def test_empty(name: str) -> None:
    shape = (0, 3, 5)
    y = EMPTY[name](np.zeros(shape, np.uint8))
    assert y.dtype == jnp.uint8
    assert y.shape == {"global_average_pool": (0, 3, 1)}.get(name, shape)


def test_long_windows_are_added_in_order(rng: np.random.Generator) -> None:
    """A window of more than 64 elements is a loop."""
    x = cases.draw_codes(rng, "uint8", (2, 3, 17, 14))
    arguments = (x, F(0.37), np.uint8(3), F(0.11), np.uint8(9))
    attributes = {"kernel_shape": (9, 8), "strides": (3, 2), "pads": (1, 0, 2, 3), "count_include_pad": 0}
    want = microsoft_text.qlinear_average_pool(*arguments, **attributes)
    same(jq.ops.qlinear_average_pool(*arguments, **attributes), want)
    same(onnx_runtime.ask("QLinearAveragePool", arguments, np.uint8, cases.MICROSOFT, **attributes), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (1,), (0, 1, 2), ()])
def test_means_of_many_codes(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    """Many codes are added in slices, and those that are left over."""
    x = cases.draw_codes(rng, "int8", (9, 83, 75))
    arguments = (x, F(0.37), np.int8(-3), F(0.02), np.int8(9))
    for keepdims in (True, False):
        want = microsoft_text.qlinear_reduce_mean(*arguments, axes=axes, keepdims=keepdims)
        same(jq.ops.qlinear_reduce_mean(*arguments, axes=axes, keepdims=keepdims), want)


def run_softmax(arguments: tuple[Any, ...], name: str) -> np.ndarray:
    """Return the codes of ONNX Runtime, after a check that they follow the formula of its version."""
    found = onnx_runtime.ask("QLinearSoftmax", arguments, name, cases.MICROSOFT, axis=-1, opset=13)
    if onnx_runtime.VERSION < (1, 32):
        same(found, microsoft_text.qlinear_softmax(*arguments, rounds_products=True))
        return microsoft_text.qlinear_softmax(*arguments)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BYTES)
def test_softmax_saturates(name: str) -> None:
    """Where steps are finer than 1 / 256, codes saturate and do not wrap around."""
    low, high = np.iinfo(name).min, np.iinfo(name).max
    x = np.array([[7], [-128]], np.int8).view(name)
    for y_scale in (1 / 256, 1 / 300, 1e-5, 1e-37):
        assert jq.ops.qlinear_softmax(x, 0.1, 0, y_scale, low).tolist() == [[high], [high]]
    pair = jq.ops.qlinear_softmax(np.full(2, 7, np.uint8), 0.1, 0, 1 / 300)
    assert pair.tolist() == [150, 150]
    assert jq.ops.qlinear_softmax(np.array([[0, 100]], np.int8), 5.0, 0, 1 / 512, -128).tolist() == [[-128, 127]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 300), (17, 23), (33, 36), (5, 511), (4, 513)])
def test_softmax_of_any_size(shape: tuple[int, int], name: str, rng: np.random.Generator) -> None:
    """Rows that fill no tile, and codes that fill no word and no step of the loop, are added, too."""
    x, dtype = cases.draw_codes(rng, name, shape), np.dtype(name).type
    # Products that float32 cannot hold overflow in ONNX Runtime 1.31 with fewer than floor(1 / y_scale) / 148 elements.
    y_scale = F(1 / 256) if shape[1] < 8 else F(1 / 1000)
    arguments = (x, F(0.02), dtype(3), y_scale, dtype(28))
    want = microsoft_text.qlinear_softmax(*arguments)
    same(jq.ops.qlinear_softmax(*arguments), want)
    same(run_softmax(arguments, name), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BYTES)
def test_softmax_rounds_once(name: str, rng: np.random.Generator) -> None:
    """Equal codes give quotients k / n, many of which are ties that the rounded sum decides."""
    dtype = np.dtype(name).type
    for length in (2, 8, 12, 24, 40, 128, 600):
        for factor in rng.integers(1, 700, 6):
            few = rng.choice(cases.draw_codes(rng, name, (3,)), length)
            x = np.stack([np.full(length, few[0]), few, rng.choice(few[:2], length)])
            y_scale = F(1 / (int(factor) * length % 1500 / 2 + 0.3))
            arguments = (x, F(10.0 ** rng.uniform(-3, 0)), dtype(3), y_scale, cases.draw_point(rng, name))
            want = microsoft_text.qlinear_softmax(*arguments)
            same(jq.ops.qlinear_softmax(*arguments), want)
            if onnx_runtime.VERSION >= (1, 32):
                same(run_softmax(arguments, name), want)


def test_softmax_of_any_scale(rng: np.random.Generator) -> None:
    """Factors of any magnitude and sign, and a negative scale of x, which makes the smallest code the largest value."""
    x = cases.draw_codes(rng, "uint8", (7, 9))
    for y_scale in (0.6, 2.0, 1e-3, 1e-20, 1e-37, -1 / 300):
        for x_scale in (1e-30, 1e-3, 0.3, 1e30):
            arguments = (x, F(x_scale), np.uint8(3), F(y_scale), np.uint8(28))
            want = microsoft_text.qlinear_softmax(*arguments)
            same(jq.ops.qlinear_softmax(*arguments), want)
            same(jq.ops.qlinear_softmax(~x, -F(x_scale), *arguments[2:]), want)


def test_copies_need_the_same_scale(rng: np.random.Generator) -> None:
    """Codes with the scale and zero point of the result do not change, whatever the scale."""
    x = cases.draw_codes(rng, "int8", (50,))
    for scale in (F(0.1), F(3e38), F(2.0**-120)):
        same(jq.ops.qlinear_concat(scale, -3, x, scale, -3, axis=0), x)
        same(onnx_runtime.ask("QLinearConcat", (scale, np.int8(-3), x, scale, np.int8(-3)), np.int8, cases.MICROSOFT,
                              axis=0), x)  # fmt: skip


SHARDED: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "qlinear_add": lambda a, b: jq.ops.qlinear_add(a, 0.5, 3, b, 0.3, 5, 0.7, 1),
    "qlinear_add, one scale small": lambda a, b: jq.ops.qlinear_add(a, 0.5, 3, b, 1e-5, 5, 0.7, 1),
    "qlinear_mul": lambda a, b: jq.ops.qlinear_mul(a, 0.5, 3, b, 0.3, 5, 0.7, 1),
    "qlinear_concat": lambda a, b: jq.ops.qlinear_concat(0.4, 3, a, 0.5, 3, b, 0.3, 5, axis=1),
    "qlinear_sigmoid": lambda a, b: jq.ops.qlinear_sigmoid(a, 0.05, 128, 1 / 256, 0),
    "qlinear_softmax": lambda a, b: jq.ops.qlinear_softmax(a, 0.05, 128, 1 / 256, 0),
    "qlinear_reduce_mean": lambda a, b: jq.ops.qlinear_reduce_mean(a, 0.05, 128, 0.1, 0, axes=[1]),
    "qlinear_average_pool": lambda a, b: jq.ops.qlinear_average_pool(a[:, None], 0.05, 8, 0.1, 0, kernel_shape=[3]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", list(SHARDED))
def test_sharded(name: str, kind: AxisType, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    a, b = (cases.draw_codes(rng, "uint8", (16, 40)) for _ in range(2))
    want = np.asarray(SHARDED[name](jnp.asarray(a), jnp.asarray(b)))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in (a, b)]
        same(jax.jit(SHARDED[name])(*placed), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(SHARDED))
def test_under_shard_map(name: str, rng: np.random.Generator) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    a, b = (cases.draw_codes(rng, "uint8", (16, 40)) for _ in range(2))
    part = PartitionSpec("x")
    mapped = jax.shard_map(SHARDED[name], mesh=mesh, in_specs=(part, part), out_specs=part)
    same(jax.jit(mapped)(a, b), np.asarray(SHARDED[name](jnp.asarray(a), jnp.asarray(b))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(SHARDED))
def test_export_with_a_symbolic_dimension(name: str, rng: np.random.Generator) -> None:
    (length,) = jax.export.symbolic_shape("n")
    kind = jax.ShapeDtypeStruct((length, 40), np.uint8)
    exported = jax.export.export(jax.jit(SHARDED[name]))(kind, kind)
    a, b = (cases.draw_codes(rng, "uint8", (5, 40)) for _ in range(2))
    same(exported.call(a, b), np.asarray(SHARDED[name](jnp.asarray(a), jnp.asarray(b))))
