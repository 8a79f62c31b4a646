"""Contractions whose results are codes: against ONNX Runtime's QGemm, QLinearMatMul and QLinearConv, and numpy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..oracles import onnx_runtime

F = np.float32
KERNELS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8"))


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], axis: int | None = None) -> jq.QuantizedArray:
    """Sample codes, with scales that are multiples of powers of two, so that products meet ties."""
    part = [1] * len(shape)
    if axis is not None:
        part[axis] = shape[axis]
    info = np.iinfo(name)
    codes = rng.integers(info.min, info.max + 1, shape).astype(name)
    point = rng.integers(info.min, info.max + 1, part).astype(name)
    scale = rng.integers(1, 9, part) * 2.0**-6 if rng.random() < 0.5 else rng.uniform(0.01, 1, part)
    return jq.QuantizedArray(codes, scale.astype(F), point)


def draw_bias(rng: np.random.Generator, count: int) -> np.ndarray:
    """Sample biases, two of them at the ends of int32, where the sum wraps around."""
    bias = rng.integers(-9000, 9000, count)
    bias[rng.permutation(count)[:2]] = (2**31 - 1, -(2**31))
    return bias.astype(np.int32)


def draw_output(rng: np.random.Generator, name: str) -> jq.Quantizer:
    info = np.iinfo(name)
    point = int(rng.integers(info.min, info.max + 1))
    return jq.Quantizer(jq.QuantSpec(name, symmetric=False), F(2.0 ** rng.integers(0, 8)), point)


def finish(acc: np.ndarray, bias: Any, factors: np.ndarray, output: jq.Quantizer | None) -> np.ndarray:
    """Return the codes or the values of a sum: int32 that wraps around, then float32, rounded after each operation."""
    values = (acc + bias).astype(np.int32).astype(F)
    if output is None:
        return values * factors
    steps = np.rint(values * (factors / F(output.scale))).astype(np.float64) + float(output.zero_point)
    info = np.iinfo(output.spec.carrier)
    return np.clip(steps, info.min, info.max).astype(output.spec.carrier)


def center(q: jq.QuantizedArray) -> np.ndarray:
    return np.asarray(q.codes).astype(np.int64) - np.asarray(q.zero_point).astype(np.int64)


def same(got: Any, want: np.ndarray, output: jq.Quantizer | None = None) -> None:
    if output is not None:
        assert got.scale.shape == (1,) * want.ndim
        assert float(got.scale.reshape(())) == float(output.scale)
        assert int(got.zero_point.reshape(())) == int(output.zero_point)
        got = got.codes
    assert np.asarray(got).dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", KERNELS, ids="-".join)
def test_matmul(names: tuple[str, str], rng: np.random.Generator) -> None:
    """The codes and the floats are QGemm's, those without a bias QLinearMatMul's."""
    a, b = draw(rng, names[0], (5, 19)), draw(rng, names[1], (19, 7), 1)
    output, bias = draw_output(rng, names[0]), draw_bias(rng, 7)
    acc, factors = center(a) @ center(b), np.asarray(a.scale) * np.asarray(b.scale)
    parts: Any = [np.asarray(p).reshape(()) if p.size == 1 else np.asarray(p).reshape(-1) if p.shape[0] == 1 else p
             for p in (a.codes, a.scale, a.zero_point, b.codes, b.scale, b.zero_point)]  # fmt: skip
    result = [F(output.scale), np.asarray(output.zero_point, names[0])]
    for each in (output, None):
        want = finish(acc, bias, factors, each)
        same(jq.matmul(a, b, bias=bias, output=each), want, each)
        feeds = [*parts, bias, *(result if each else [None, None])]
        same(onnx_runtime.ask("QGemm", feeds, names[0] if each else F, "com.microsoft"), want)
    want = finish(acc, 0, factors, output)
    same(jq.matmul(a, b, output=output), want, output)
    same(onnx_runtime.ask("QLinearMatMul", [*parts, *result], names[0]), want)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("names", KERNELS, ids="-".join)
def test_convolution(names: tuple[str, str], rng: np.random.Generator) -> None:
    """In both layouts, with groups, the codes equal QLinearConv's."""
    groups = int(rng.choice([1, 2]))
    x, w = draw(rng, names[0], (2, 6, 7, 5)), draw(rng, names[1], (8, 6 // groups, 3, 2), 0)
    output, bias = draw_output(rng, names[0]), draw_bias(rng, 8)
    x_parts: Any = [
        np.asarray(p).reshape(()) if p.size == 1 else np.asarray(p) for p in (x.codes, x.scale, x.zero_point)
    ]
    w_parts: Any = [np.asarray(w.codes), np.asarray(w.scale).reshape(-1), np.asarray(w.zero_point).reshape(-1)]
    result = [F(output.scale), np.asarray(output.zero_point, names[0])]
    operator: Any = jq.qlinear_conv
    want = np.asarray(operator(*x_parts, *w_parts, *result, bias, group=groups, pads=[1, 0, 0, 1]))
    pads = {"padding": [(1, 0), (0, 1)], "feature_group_count": groups, "bias": bias}
    same(jq.conv_general_dilated(x, w, (1, 1), output=output, **pads), want, output)
    moved = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0)
    numbers = ("NHWC", "HWIO", "NHWC")
    got = jq.conv_general_dilated(*moved, (1, 1), dimension_numbers=numbers, output=output, **pads)
    same(got, want.transpose(0, 2, 3, 1), output)
    floats = jq.conv_general_dilated(x, w, (1, 1), **pads)
    acc = jq.integer.conv_general_dilated(
        x.codes, w.codes, (1, 1), pads["padding"], feature_group_count=groups, lhs_zero_point=x_parts[2],
        rhs_zero_point=w_parts[2],
    )  # fmt: skip
    factors = (x_parts[1] * w_parts[1]).reshape(1, -1, 1, 1)
    same(floats, finish(np.asarray(acc).astype(np.int64), bias.reshape(-1, 1, 1), factors, None))
    if names in (("uint8", "int8"), ("int8", "int8")) and not np.any(w_parts[2]):
        same(onnx_runtime.ask("QLinearConv", [*x_parts, *w_parts, *result, bias], names[0], group=groups,
                              pads=[1, 0, 0, 1]), want)  # fmt: skip


def test_einsum_and_dot_general(rng: np.random.Generator) -> None:
    """The axes of the kernel in any order, a scale for each row, and a bias that broadcasts."""
    x, w = draw(rng, "uint8", (2, 3, 4, 5), 1), draw(rng, "int8", (5, 6, 4, 7), 1)
    w = jq.QuantizedArray(w.codes, w.scale, w.zero_point)
    output, bias = draw_output(rng, "int8"), draw_bias(rng, 42).reshape(7, 1, 6)
    acc = np.einsum("abcd,dkcl->blak", center(x), center(w))
    factors = np.asarray(x.scale).reshape(3, 1, 1, 1) * np.asarray(w.scale).reshape(1, 1, 1, 6)
    want = finish(acc, bias, factors, output)
    same(jq.einsum("abcd,dkcl->blak", x, w, bias=bias, output=output), want, output)
    numbers = (((2, 3), (2, 0)), ((), ()))
    got = jax.jit(lambda x, w: jq.dot_general(x, w, numbers, bias=bias[:, 0].T, output=output))(x, w)
    same(got, want.transpose(2, 0, 3, 1), output)


@pytest.mark.slow
def test_transformations(rng: np.random.Generator) -> None:
    """jit with traced and known scales, vmap and scan, for a chain of two matrix products and a sum."""
    first, second = draw(rng, "int8", (8, 8), 1), draw(rng, "int8", (8, 8))
    bias, outputs = draw_bias(rng, 8), [draw_output(rng, "uint8") for _ in range(3)]

    def run(codes: Any, scale: Any, point: Any) -> Any:
        x = jq.QuantizedArray(codes, scale, point)
        hidden = jq.codes.relu(jq.matmul(x, first, bias=bias, output=outputs[0]))
        return jq.codes.add(jq.matmul(hidden, second, output=outputs[1]), x, output=outputs[2]).codes

    xs = [draw(rng, "uint8", (4, 8)) for _ in range(3)]
    want = []
    for x in xs:
        hidden = finish(center(x) @ center(first), bias, np.asarray(x.scale) * np.asarray(first.scale), outputs[0])
        hidden = np.maximum(hidden, np.uint8(outputs[0].zero_point))
        steps = hidden.astype(np.int64) - int(outputs[0].zero_point)
        product = finish(steps @ center(second), 0, F(outputs[0].scale) * np.asarray(second.scale), outputs[1])
        point = np.uint8(outputs[1].zero_point)
        args: Any = [
            product,
            F(outputs[1].scale),
            point,
            np.asarray(x.codes),
            x.scale.reshape(()),
            x.zero_point.reshape(()),
        ]
        operator: Any = jq.ops.qlinear_add
        want.append(np.asarray(operator(*args, F(outputs[2].scale), int(outputs[2].zero_point))))
    leaves = [tuple(map(np.asarray, (x.codes, x.scale, x.zero_point))) for x in xs]
    same(run(*leaves[0]), want[0])
    same(jax.jit(lambda codes: run(codes, *leaves[0][1:]))(leaves[0][0]), want[0])
    stacked = tuple(jnp.stack([jnp.asarray(part) for part in parts]) for parts in zip(*leaves, strict=True))
    same(jax.jit(jax.vmap(run))(*stacked), np.stack(want))
    same(jax.jit(lambda s: lax.scan(lambda carry, each: (carry, run(*each)), None, s)[1])(stacked), np.stack(want))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind: AxisType, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x, w, image = draw(rng, "uint8", (16, 8)), draw(rng, "int8", (8, 8), 1), draw(rng, "uint8", (8, 5, 5, 3))
    kernel, bias, output = draw(rng, "int8", (3, 3, 3, 8), 3), draw_bias(rng, 8), draw_output(rng, "uint8")

    def compute(x: Any, image: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jq.conv_general_dilated(image, kernel, (1, 1), "SAME", None, None, numbers, bias=bias, output=output)
        return jq.matmul(x, w, bias=bias, output=output).codes, y.codes

    want = compute(x, image)
    with jax.set_mesh(mesh):
        place, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
        placed = [
            jq.QuantizedArray(
                jax.device_put(q.codes, place), *(jax.device_put(part, everywhere) for part in (q.scale, q.zero_point))
            )
            for q in (x, image)
        ]  # fmt: skip
        for got, expected in zip(jax.jit(compute)(*placed), want, strict=True):
            same(got, np.asarray(expected))


def test_no_float_tensor_between_layers(rng: np.random.Generator) -> None:
    """In the compiled program of a chain, floats are scales, and elements inside of fusions.

    Arrays of less than 2**16 elements are the exception: `barriers.split_small_fusion` cuts their fusions in two.
    """
    w, bias, output = draw(rng, "int8", (3, 3, 8, 8), 3), draw_bias(rng, 8), draw_output(rng, "uint8")

    def run(x: jq.QuantizedArray) -> jq.QuantizedArray:
        for _ in range(2):
            numbers = ("NHWC", "HWIO", "NHWC")
            y = jq.conv_general_dilated(x, w, (1, 1), "SAME", None, None, numbers, bias=bias, output=output)
            x = jq.codes.relu(y)
        return x

    x = draw(rng, "uint8", (8, 32, 32, 8))
    text = str(jax.jit(run).lower(x).compile().as_text())
    entry = text[text.index("ENTRY") :]
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in re.findall(r"f32\[([\d,]*)\]", entry)]
    assert max(sizes, default=0) <= 8


X = jq.QuantizedArray(np.ones((2, 4), np.uint8), np.ones((1, 1), F))
W = jq.QuantizedArray(np.ones((4, 3), np.int8), np.ones((1, 3), F))
BLOCKED = jq.QuantizedArray(np.ones((4, 3), np.int8), np.ones((2, 3), F))
Y = jq.Quantizer(jq.QuantSpec("uint8"), 0.5, 3)
B = np.ones(3, np.int32)
IMAGE = jq.QuantizedArray(np.ones((1, 4, 5, 5), np.uint8), np.ones((1, 1, 1, 1), F))
KERNEL = jq.QuantizedArray(np.ones((3, 4, 2, 2), np.int8), np.ones((3, 1, 1, 1), F))
NUMBERS = (((1,), (0,)), ((), ()))
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "float bias": (lambda: jq.matmul(X, W, bias=np.ones(3, F)), "matmul: bias: expected dtype int32"),
    "bias": (lambda: jq.matmul(X, W, bias=B[:2], output=Y), r"matmul: bias: expected shape \(3,\)"),
    "wide bias": (lambda: jq.dot_general(X, W, NUMBERS, bias=np.ones(4, np.int32)), "dot_general: bias: expected a"),
    "floats": (
        lambda: jq.matmul(np.ones((2, 4), F), W, output=Y), "matmul: output: expected None, because an operand is"
    ),
    "blocks": (lambda: jq.matmul(X, BLOCKED, output=Y), "matmul: lhs, rhs: expected one scale and one zero"),
    "dtype": (
        lambda: jq.matmul(X, W, bias=B, preferred_element_type=jnp.bfloat16),
        "matmul: preferred_element_type: expected float32 or None",
    ),
    "output": (lambda: jq.matmul(X, W, output=1.0), "matmul: output: expected a Quantizer"),  # type: ignore[arg-type]
    "conv": (
        lambda: jq.conv_general_dilated(IMAGE, KERNEL, (1, 1), "SAME", bias=B[:2], output=Y),
        r"conv_general_dilated: bias: expected shape \(3,\)",
    ),
    "three": (lambda: jq.einsum("ab,bc,c->ac", X, W, jnp.ones(3), output=Y), "einsum: operands: expected two"),
    "summed": (lambda: jq.einsum("ab,bc->c", X, W, output=Y), "einsum: subscripts: expected an output with"),
    "long": (lambda: jq.matmul(X, W, bias=np.ones(3, np.int64) * 2**40), "matmul: bias: expected integers that int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors(name: str) -> None:
    call, text = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant.{text}"):
        call()


def test_empty_and_vectors() -> None:
    """A sum of nothing is the bias."""
    x, w = X[:, :0], jq.QuantizedArray(np.ones((0, 3), np.int8), np.ones((1, 3), F))
    assert jq.matmul(x, w, bias=B, output=Y).codes.tolist() == [[5] * 3] * 2
    assert jq.matmul(X[:0], W, bias=B, output=Y).shape == (0, 3)
    row = jq.matmul(X[0], W, bias=B, output=Y)
    assert row.codes.tolist() == [13] * 3
    assert jq.matmul(X, W[:, 0], bias=np.int32(1), output=Y).codes.tolist() == [13] * 2


def test_quantize_bias(rng: np.random.Generator) -> None:
    scale, scales = F(0.037), rng.uniform(0.001, 1, (1, 1, 50)).astype(F)
    products = scale * scales.reshape(50)
    ties = (np.arange(50, dtype=F) - F(24.5)) * products
    bias = np.nextafter(ties, np.where(np.arange(50) % 3, np.inf, -np.inf).astype(F))
    bias[::4] = ties[::4]
    want = np.rint(bias / products).astype(np.int32)
    same(jq.codes.quantize_bias(bias, scale, scales), want)
    same(jax.jit(jq.codes.quantize_bias)(bias, scale, scales), want)
    same(jax.jit(lambda b: jq.codes.quantize_bias(b, scale, scales))(bias), want)
    huge = np.array([3e38, -3e38, np.nan, np.inf], F)
    assert jax.jit(jq.codes.quantize_bias)(huge, F(1e-3), F(1e-3)).tolist() == [2**31 - 1, -(2**31), 0, 2**31 - 1]
    with pytest.raises(ValueError, match=r"codes\.quantize_bias: bias: expected biases of at most"):
        jq.codes.quantize_bias(np.ones(2, F), 1e-6, 1e-6)
    with pytest.raises(ValueError, match=r"codes\.quantize_bias: lhs_scale, rhs_scale: expected scales with a product"):
        jq.codes.quantize_bias(np.zeros(2, F), 1e-30, 1e-30)
    with pytest.raises(ValueError, match=r"codes\.quantize_bias: rhs_scale: expected one element or 2"):
        jq.codes.quantize_bias(np.zeros(2, F), 1.0, np.ones(3, F))


def test_an_output_from_a_range() -> None:
    spec = jq.QuantSpec("uint8")
    x = np.array([-1.0, 0.3, 1.55], F)
    output = jq.Quantizer.from_range(spec, (-1.0, 1.55))
    q = jq.quantize(x, spec, range=(-1.0, 1.55))
    assert (float(output.scale), int(output.zero_point)) == (float(q.scale[0]), int(q.zero_point[0]))
    same(jq.matmul(X, W, output=output).codes, np.full((2, 3), 255, np.uint8))
