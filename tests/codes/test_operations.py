"""Operations on quantized arrays that return codes: against ONNX Runtime, under transformations, and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

from ..cases import microsoft_exactness as cases
from ..oracles import microsoft_text, onnx_runtime
from ..support import hlo

F = np.float32
BYTES = ("uint8", "int8")


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> jq.QuantizedArray:
    ones = (1,) * len(shape)
    scale, point = cases.draw_scale(rng), cases.draw_point(rng, name)
    return jq.QuantizedArray(cases.draw_codes(rng, name, shape), scale.reshape(ones), point.reshape(ones))


def draw_output(rng: np.random.Generator, name: str, factor: float = 1.0) -> jq.Quantizer:
    spec = jq.QuantSpec(name, symmetric=False)
    return jq.Quantizer(spec, F(cases.draw_scale(rng) * F(factor)), np.asarray(cases.draw_point(rng, name)))


def parts(q: Any) -> tuple[Any, Any, Any]:
    """Return codes, scale and zero point as an operator takes them."""
    return np.asarray(q.codes), np.asarray(q.scale).reshape(()), np.asarray(q.zero_point).reshape(())


def ask(node: str, *arguments: Any, **attributes: Any) -> np.ndarray:
    domain = cases.MICROSOFT if node.startswith("QLinear") else ""
    codes = [a for a in arguments if a.dtype.itemsize == 1]
    return onnx_runtime.ask(node, arguments, codes[0].dtype, domain, **attributes)


def same(q: jq.QuantizedArray, codes: np.ndarray, like: Any) -> None:
    """Require these codes, with the scale and the zero point of `like`."""
    np.testing.assert_array_equal(np.asarray(q.codes), codes)
    assert q.codes.dtype == codes.dtype
    for name in ("scale", "zero_point"):
        part, expected = getattr(q, name), np.asarray(getattr(like, name))
        assert part.shape == (1,) * codes.ndim
        np.testing.assert_array_equal(np.asarray(part).reshape(()), expected.reshape(()))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BYTES)
def test_against_onnx_runtime(name: str, rng: np.random.Generator) -> None:
    if not cases.is_fused():
        pytest.skip("ONNX Runtime has other kernels on this machine")
    a, b, image = draw(rng, name, (3, 40)), draw(rng, name, (2, 3, 40)), draw(rng, name, (2, 9, 8, 5))
    y, z = draw_output(rng, name), draw_output(rng, name, 100)
    ys = (np.asarray(y.scale), np.asarray(y.zero_point))
    same(jq.codes.add(a, b, output=y), ask("QLinearAdd", *parts(a), *parts(b), *ys), y)
    same(jq.codes.multiply(a, b, output=z), ask("QLinearMul", *parts(a), *parts(b), z.scale, z.zero_point), z)
    same(jq.concatenate([a, a[:1]], output=y), ask("QLinearConcat", *ys, *parts(a), *parts(a[:1]), axis=0), y)
    like = jq.concatenate([image, image], axis=-1, output=image)
    same(like, np.concatenate([image.codes, image.codes], -1), image)
    got = jq.codes.average_pool(
        image, window_shape=(3, 2), strides=(2, 1), padding=((1, 0), (0, 1)), count_include_pad=False, output=y
    )
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}
    same(got, ask("QLinearAveragePool", *parts(image), *ys, channels_last=1, **attributes), y)
    got = jq.codes.mean(image, (1, 2), output=y)
    same(got, ask("QLinearGlobalAveragePool", *parts(image), *ys, channels_last=1)[:, 0, 0], y)
    first = jq.codes.transpose(image, (0, 3, 1, 2))
    for padding, auto in (("SAME", "SAME_UPPER"), ("VALID", "VALID")):
        want = ask("MaxPool", np.asarray(first.codes), kernel_shape=[3, 2], strides=[2, 2], auto_pad=auto)
        same(
            jq.codes.max_pool(first, window_shape=(3, 2), strides=(2, 2), padding=padding, channels_last=False),
            want,
            image,
        )
        same(
            jq.codes.max_pool(image, window_shape=(3, 2), strides=(2, 2), padding=padding),
            want.transpose(0, 2, 3, 1),
            image,
        )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["uint8", "int8", "int4"])
def test_codes_that_move(name: str, rng: np.random.Generator) -> None:
    """relu, pad, reshape and transpose commute with dequantization, for several zero points, too."""
    spec = jq.QuantSpec(name, jq.PerAxis(1), symmetric=False)
    q = jq.quantize(rng.normal(size=(4, 6, 3)).astype(F), spec)
    x = np.asarray(q.dequantize())
    np.testing.assert_array_equal(jq.codes.relu(q).dequantize(), np.maximum(x, 0))
    np.testing.assert_array_equal(
        jq.codes.pad(q, ((1, 2), (0, 0), (3, 0))).dequantize(), np.pad(x, ((1, 2), (0, 0), (3, 0)))
    )
    np.testing.assert_array_equal(jq.codes.transpose(q).dequantize(), x.T)
    np.testing.assert_array_equal(jq.codes.reshape(q, (2, 2, 6, -1)).dequantize(), x.reshape(2, 2, 6, 3))
    single = jq.quantize(x, jq.QuantSpec(name))
    np.testing.assert_array_equal(jq.codes.pad(single, 2).dequantize(), np.pad(np.asarray(single.dequantize()), 2))
    np.testing.assert_array_equal(jq.codes.relu(single).dequantize(), np.maximum(np.asarray(single.dequantize()), 0))
    assert jq.codes.pad(q, 0) is q


def test_a_relu_at_the_lowest_code_changes_nothing() -> None:
    q = jq.quantize(jnp.array([0.0, 2.0]), jq.QuantSpec(jnp.uint8))
    assert jq.codes.relu(q) is q
    assert jax.jit(jq.codes.relu)(q).codes.tolist() == q.codes.tolist()


def chain(a: jq.QuantizedArray, b: jq.QuantizedArray, y: jq.Quantizer) -> jq.QuantizedArray:
    """Return the result of all operations on two images (N, H, W, C)."""
    total = jq.codes.relu(jq.codes.add(a, jq.codes.multiply(a, b, output=a), output=y))
    pooled = jq.concatenate(
        [jq.codes.max_pool(total, window_shape=(2, 2)), jq.codes.average_pool(a, window_shape=(2, 2), output=b)],
        axis=-1,
        output=y,
    )
    flat = jq.codes.reshape(jq.codes.pad(pooled, ((0, 0), (0, 0), (1, 0), (0, 0))), (pooled.shape[0], -1))
    wide = jq.concatenate([jq.codes.mean(flat, 1, True, output=b), jq.codes.transpose(flat).T], axis=1, output=a)
    return jq.codes.mean(wide, 1, True, output=y)


def run_text(a: Any, b: Any, y: Any) -> np.ndarray:
    """Return the codes of `chain`, computed in numpy."""
    first, second, last = parts(a), parts(b), (np.asarray(y.scale), np.asarray(y.zero_point))
    text = microsoft_text
    total = text.qlinear_add(*first, text.qlinear_mul(*first, *second, *first[1:]), *first[1:], *last)
    total = np.maximum(total, last[1])
    h, w = (n - 1 for n in total.shape[1:3])
    largest = np.maximum.reduce([total[:, i : i + h, j : j + w] for i in (0, 1) for j in (0, 1)])
    means = text.qlinear_average_pool(*first, *second[1:], kernel_shape=(2, 2), channels_last=True)
    pooled = text.qlinear_concat(*last, largest, *last, means, *second[1:], axis=-1)
    padded = np.pad(pooled, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=last[1])
    flat = padded.reshape(len(padded), -1)
    mean = text.qlinear_reduce_mean(flat, *last, *second[1:], axes=(1,))
    wide = text.qlinear_concat(*first[1:], mean, *second[1:], flat, *last, axis=1)
    return text.qlinear_reduce_mean(wide, *first[1:], *last, axes=(1,))


@pytest.mark.slow
def test_transformations(rng: np.random.Generator) -> None:
    """Eager, jit with traced and with known scales, vmap over codes and over everything, and scan."""
    name = BYTES[int(rng.integers(2))]
    arrays = [(draw(rng, name, (2, 3, 4, 3)), draw(rng, name, (2, 3, 4, 3)), draw_output(rng, name)) for _ in range(3)]
    want = np.stack([run_text(*each) for each in arrays])
    np.testing.assert_array_equal(chain(*arrays[0]).codes, want[0])
    known = jax.jit(lambda codes: chain(arrays[0][0].replace(codes=codes), *arrays[0][1:]))
    np.testing.assert_array_equal(known(arrays[0][0].codes).codes, want[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *arrays)
    np.testing.assert_array_equal(jax.jit(jax.vmap(chain))(*stacked).codes, want)
    scanned = jax.jit(lambda s: lax.scan(lambda carry, each: (carry, chain(*each).codes), None, s)[1])
    np.testing.assert_array_equal(scanned(stacked), want)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(kind: AxisType, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    a, b = (draw(rng, "uint8", (16, 4, 4, 3)) for _ in range(2))
    y = draw_output(rng, "uint8")

    def compute(a: jq.QuantizedArray, b: jq.QuantizedArray) -> jq.QuantizedArray:
        total = jq.codes.relu(jq.codes.add(a, b, output=y))
        pooled = jq.concatenate(
            [jq.codes.max_pool(total, window_shape=(2, 2)), jq.codes.average_pool(a, window_shape=(2, 2), output=b)],
            3,
            output=y,
        )
        return jq.codes.mean(pooled, (1, 2), output=a)

    want = np.asarray(compute(a, b).codes)
    with jax.set_mesh(mesh):
        place, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
        placed = [
            jq.QuantizedArray(*(jax.device_put(part, place if i == 0 else everywhere)
                                for i, part in enumerate((q.codes, q.scale, q.zero_point))))
            for q in (a, b)
        ]  # fmt: skip
        np.testing.assert_array_equal(jax.jit(compute)(*placed).codes, want)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda q, y: jq.codes.add(q, q[::-1], output=y),
    "multiply": lambda q, y: jq.codes.multiply(q, q[::-1], output=y),
    "concatenate": lambda q, y: jq.concatenate([q, jq.codes.add(q, q, output=y)], -1, output=y),
    "mean": lambda q, y: jq.codes.mean(q, (1, 2), output=y),
    "average_pool": lambda q, y: jq.codes.average_pool(q, window_shape=(2, 2), output=y),
    "max_pool": lambda q, _: jq.codes.max_pool(jq.codes.relu(q), window_shape=(2, 2)),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_float_is_larger_than_a_scale(name: str, rng: np.random.Generator) -> None:
    """Sums and tables have floats only inside of fusions, not in memory; means have one float for each result."""
    q, y = draw(rng, "uint8", (16, 32, 32, 8)), draw_output(rng, "uint8")
    program = hlo.Program(OPERATIONS[name], q, y)
    floats = [shape for dtype, shape in program.wide_buffers() if dtype == "f32"]
    results = program.computations[program.entry][-1].results[0][1] if name in ("mean", "average_pool") else ()
    assert max((math.prod(shape) for shape in floats), default=0) <= math.prod(results)


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 12),
    reason="the loops are those of a CPU, and jax 0.10's XLA removes barriers before it forms fusions",
)
def test_a_sum_reads_the_codes_of_a_layer_once(rng: np.random.Generator) -> None:
    """Without a barrier, XLA requantizes the sums of the layer in two loops, one for each form of the addition."""
    q, y = draw(rng, "uint8", (1024, 128)), draw_output(rng, "uint8")
    w = jq.QuantizedArray(cases.draw_codes(rng, "int8", (128, 128)), np.full((1, 128), 0.01, F))
    program = hlo.Program(lambda q, w, y: jq.codes.add(jq.matmul(q, w, output=y), q, output=y), q, w, y)
    inside = [i for i in program.in_memory() if i.opcode == "fusion"]
    sums = [i.name for i in program.in_memory() if ("s32", (1024, 128)) in i.results]
    assert len(sums) == 1, program.text
    assert len([i for i in inside if f"%{sums[0]}," in i.rest or f"%{sums[0]})" in i.rest]) == 1, program.text


Q8 = jq.QuantizedArray(np.ones((2, 4), np.uint8), np.ones((1, 1), F))
IMAGE = jq.QuantizedArray(np.ones((1, 4, 4, 2), np.uint8), np.ones((1, 1, 1, 1), F))
S8 = Q8.replace(codes=np.ones((2, 4), np.int8))
WIDE = Q8.replace(scale=np.ones((1, 4), F))
U8 = jq.QuantSpec("uint8")
Y = jq.Quantizer(U8, 0.5, 3)
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "float": (lambda: jq.codes.add(np.ones(2, F), Q8, output=Y), "add: a: expected a QuantizedArray"),  # type: ignore[arg-type]
    "dtypes": (lambda: jq.codes.add(Q8, S8, output=Y), "add: b: expected codes of uint8, as a has, got int8"),
    "scales": (lambda: jq.codes.add(Q8, WIDE, output=Y), r"add: b.scale: expected one scale, .*, got shape \(1, 4\)"),
    "shapes": (
        lambda: jq.codes.multiply(Q8, Q8[:, :3], output=Y),
        r"multiply: a, b: expected shapes .*, got \(2, 4\) and \(2, 3\)",
    ),
    "narrow integers": (
        lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(jq.QuantSpec("uint5"), 0.1, 3)),
        "add: output.spec: expected a spec of int8 or uint8",
    ),
    "offset": (
        lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(jq.QuantSpec("uint8", offset=True), 0.1, 3)),
        "add: output.spec: expected offset=False",
    ),
    "packed narrow integers": (
        lambda: jq.codes.add(Q8, Q8, output=jq.quantize(np.ones((2, 4), F), jq.QuantSpec("uint5"))),
        "add: output: expected codes of int8 or uint8, .*, got uint5",
    ),
    "reduced range": (
        lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(jq.QuantSpec("uint8", reduce_range=True), 0.1, 3)),
        "add: output.spec: expected reduce_range=False",
    ),
    "signed scale": (
        lambda: jq.codes.multiply(Q8.replace(signed_scale=True), Q8, output=Y),
        "multiply: a.signed_scale: expected False",
    ),
    "spec": (lambda: jq.codes.add(Q8, Q8, output=U8), "add: output: expected a Quantizer with a scale"),  # type: ignore[arg-type]
    "no scale": (lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(U8)), "add: output.scale: expected a scale"),
    "no point": (lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(U8, 0.5)), "add: output.zero_point: expected a zero"),
    "negative": (lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(U8, -1.0, 3)), "add: output.scale: expected finite"),
    "narrow": (
        lambda: jq.codes.add(S8, S8, output=jq.Quantizer(jq.QuantSpec("int8"), 0.5)),
        "add: output.spec: expected narrow_range=False",
    ),
    "int4": (
        lambda: jq.codes.add(S8, S8, output=jq.Quantizer(jq.QuantSpec("int4", symmetric=False), 0.5, 0)),
        "add: output.spec: expected a spec of int8 or uint8",
    ),
    "axis": (
        lambda: jq.codes.add(Q8, Q8, output=jq.Quantizer(jq.QuantSpec("uint8", jq.PerAxis(0)), np.ones((2, 1), F), 3)),
        r"add: output.spec: expected PerTensor\(\)",
    ),
    "other dtype": (lambda: jq.codes.mean(S8, output=Y), "mean: output: expected codes of int8, as q has, got uint8"),
    "mean": (lambda: jq.codes.mean(Q8, (0, -2), output=Y), "mean: axis: expected different axes"),
    "concatenate": (lambda: jq.concatenate([Q8, WIDE], output=Y), r"concatenate: arrays\[1\].scale: expected one"),
    "relu": (lambda: jq.codes.relu(jq.quantize(jnp.ones(3), jq.QuantSpec(jq.nf4))), "relu: q: expected codes of"),
    "rank": (lambda: jq.codes.max_pool(Q8, window_shape=(2,)), "max_pool: q: expected rank 3 or more"),
    "window": (lambda: jq.codes.max_pool(IMAGE, window_shape=(2,)), "max_pool: window_shape: expected 2 positive ints"),
    "long": (lambda: jq.codes.max_pool(IMAGE, window_shape=(2, 5)), "max_pool: window_shape: expected windows no long"),
    "strides": (
        lambda: jq.codes.max_pool(IMAGE, window_shape=(2, 2), strides=(0, 1)),
        "max_pool: strides: expected 2 positive ints",
    ),
    "padding": (
        lambda: jq.codes.average_pool(IMAGE, window_shape=(2, 2), padding="FULL", output=Y),
        "average_pool: padding: expected 'SAME'",
    ),
    "pads": (
        lambda: jq.codes.max_pool(IMAGE, window_shape=(2, 2), padding=((2, 0), (0, 0))),
        "max_pool: padding: expected .* pairs",
    ),
    "pad": (lambda: jq.codes.pad(WIDE, 1), "pad: q: expected one scale and one zero point along dimension 1"),
    "crop": (lambda: jq.codes.pad(Q8, -1), "pad: pad_width: expected an int, a pair, or 2 pairs"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors(name: str) -> None:
    call, text = ERRORS[name]
    prefix = "" if name == "concatenate" else "codes."  # the root has concatenate
    with pytest.raises((TypeError, ValueError), match=rf"^jaxquant.{prefix}{text}"):
        call()


@pytest.mark.slow
def test_empty() -> None:
    q = jq.QuantizedArray(np.zeros((0, 4, 4, 2), np.uint8), np.ones((1, 1, 1, 1), F))
    assert jq.codes.add(q, q, output=Y).shape == q.shape
    assert jq.codes.max_pool(q, window_shape=(2, 2)).shape == (0, 3, 3, 2)
    assert jq.concatenate([q, q], axis=0, output=Y).shape == q.shape
    assert jq.codes.pad(q, ((0, 1), (0, 0), (0, 0), (0, 0))).codes.tolist() == np.zeros((1, 4, 4, 2)).tolist()
    scalar = jq.QuantizedArray(np.uint8(3), F(0.5))
    assert jq.codes.add(scalar, scalar, output=Y).codes.tolist() == 9
    assert jq.codes.mean(scalar, output=Y).codes.tolist() == 6
