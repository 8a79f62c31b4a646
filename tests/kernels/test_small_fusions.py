"""The kernels of small programs on a CPU: each runs on one thread, and gives the integers of the large programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxquant as jq
from jaxquant._kernels import affine, barriers

from ..oracles import onnx_text
from ..support import transforms

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 12),
    reason="only a CPU has threads to share a kernel, and jax 0.10's XLA removes barriers before it forms fusions",
)

F, U8, I8 = jnp.float32, jnp.uint8, jnp.int8
N = 64
MOST = 2**16 - 1  # the largest number of elements that is split
ALONE = 2**13  # the largest number of elements that is split off from what computed them


def aval(dtype: Any, *shape: Any) -> jax.ShapeDtypeStruct:
    """An array that nothing has to fill."""
    return jax.ShapeDtypeStruct(shape, dtype)


X, SCALE, ROW = aval(F, N, N), aval(F), aval(F, N)
Operation = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def quantizations(dtype: Any) -> dict[str, Operation]:
    """Every granularity of the quantization to a dtype, and of the way back."""
    blocks = ((N, N // 32), {"axis": 1, "block_size": 32})
    shapes: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
        "per tensor": ((), {}), "axis=0": ((N,), {"axis": 0}), "axis=1": ((N,), {"axis": 1}), "blocks": blocks,
    }  # fmt: skip
    operations: dict[str, Operation] = {}
    for name, (shape, options) in shapes.items():
        parameters = aval(F, *shape), aval(dtype, *shape)
        operations[f"quantize_linear {name}"] = (
            lambda x, s, z, o=options: jq.quantize_linear(x, s, z, **o),
            (X, *parameters),
        )
        operations[f"dequantize_linear {name}"] = (
            lambda x, s, z, o=options: jq.dequantize_linear(x, s, z, **o), (aval(dtype, N, N), *parameters)
        )  # fmt: skip
    specs = (jq.QuantSpec(dtype, g) for g in (jq.PerTensor(), jq.PerAxis(1), jq.Blocked(0, 32)))
    for spec in specs:
        operations[f"quantize {spec.granularity}"] = (lambda x, spec=spec: jq.quantize(x, spec), (X,))
    return {f"{name} {np.dtype(dtype)}": operation for name, operation in operations.items()}


def gradient(function: Callable[..., jax.Array], argnums: Any) -> Callable[..., Any]:
    """The gradient of the sum."""
    return jax.grad(lambda *arguments: function(*arguments).sum(), argnums)


def fake(x: Any, scale: Any, zero_point: Any) -> jax.Array:
    """Fake quantization per tensor."""
    return jq.fake_quantize_linear(x, scale, zero_point)


def learned(x: Any, scale: Any) -> jax.Array:
    """Fake quantization with a learned scale."""
    return jq.fake_quantize(x, jq.QuantSpec(jnp.int8), scale, None, jq.LSQ())


OPERATIONS: dict[str, Operation] = {
    **{name: operation for dtype in (I8, U8, jnp.int4, jnp.int16) for name, operation in quantizations(dtype).items()},
    "float16": (jq.quantize_linear, (aval(jnp.float16, N, N), aval(jnp.float16), aval(I8))),
    "bfloat16": (jq.quantize_linear, (aval(jnp.bfloat16, N, N), aval(jnp.bfloat16), aval(I8))),
    "to float16": (jq.dequantize_linear, (aval(I8, N, N), aval(jnp.float16), aval(I8))),
    "to bfloat16": (jq.dequantize_linear, (aval(I8, N, N), aval(jnp.bfloat16), aval(I8))),
    "dynamic_quantize_linear": (jq.dynamic_quantize_linear, (X,)),
    "dynamic_quantize_linear axis=1": (lambda x: jq.dynamic_quantize_linear(x, axis=1), (X,)),
    "fake_quantize_linear": (fake, (X, SCALE, aval(I8))),
    "gradient of x": (gradient(fake, 0), (X, SCALE, aval(I8))),
    "gradient of x and scale": (gradient(fake, (0, 1)), (X, SCALE, aval(I8))),
    "LSQ": (learned, (X, SCALE)),
    "gradient of LSQ": (gradient(learned, (0, 1)), (X, SCALE)),
    "dynamic_fake_quantize_linear": (gradient(jq.dynamic_fake_quantize_linear, 0), (X,)),
    "qlinear_matmul": (
        lambda a, b, s: jq.qlinear_matmul(a, 0.5, 3, b, s, 5, 4.0, 7), (aval(U8, N, N), aval(I8, N, N), ROW)
    ),
    "matmul_integer_to_float": (
        lambda a, b, s, bias: jq.ops.matmul_integer_to_float(a, b, 0.5, s, 3, 5, bias=bias),
        (aval(U8, N, N), aval(I8, N, N), ROW, ROW),
    ),
    "dynamic_quantize_matmul": (jq.ops.dynamic_quantize_matmul, (X, aval(I8, N, N), ROW)),
    "qlinear_conv": (
        lambda x, w, s, b: jq.qlinear_conv(x, 0.5, 3, w, s, 0, 4.0, 7, b, pads=(1, 1, 1, 1)),
        (aval(U8, 1, 16, 16, 16), aval(I8, 16, 16, 3, 3), aval(F, 16), aval(jnp.int32, 16)),
    ),
    "quantize_linear of rank 4": (jq.quantize_linear, (aval(F, 4, 16, 8, 8), SCALE, aval(U8))),
    "quantize_linear after an activation": (
        lambda x, bias, s, z: jq.quantize_linear(jax.nn.relu(x + bias), s, z), (X, aval(F, 1, N), SCALE, aval(U8))
    ),
    "quantize_linear of an image after an activation": (
        lambda x, bias, s, z: jq.quantize_linear(jax.nn.relu(x + bias), s, z),
        (aval(F, 2, 8, 8, N), aval(F, 1, 1, 1, N), SCALE, aval(U8)),
    ),
    "dynamic_quantize_linear after an activation": (
        lambda x, bias: jq.dynamic_quantize_linear(jax.nn.relu(x + bias)), (aval(F, 2 * N, N), aval(F, 1, N))
    ),
    "quantize per row after an activation": (
        lambda x, bias: jq.quantize(jax.nn.relu(x + bias), jq.QuantSpec(U8, jq.PerAxis(0))),
        (aval(F, 2 * N, N), aval(F, 1, N)),
    ),
    "onednn.quantize": (jq.onednn.quantize, (X, aval(F, 1), aval(U8, 1))),
    "onednn.dequantize": (jq.onednn.dequantize, (aval(U8, N, N), aval(F, 1), aval(U8, 1))),
}  # fmt: skip


def count_divided(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the fusions of the compiled program that several threads share."""
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return text.count('"outer_dimension_partitions":["') - text.count('"outer_dimension_partitions":["1"')


@pytest.mark.sample(19)
@on_cpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_small_programs_run_on_one_thread(name: str) -> None:
    function, arguments = OPERATIONS[name]
    assert count_divided(function, *arguments) == 0


@on_cpu
def test_a_large_program_is_one_fusion() -> None:
    for n in (MOST + 1, 2**20):
        text = jax.jit(jq.quantize_linear).lower(aval(F, n), SCALE, aval(I8)).compile().as_text() or ""
        assert text.count(" fusion(") == 1


@on_cpu
def test_vmap_counts_the_elements_of_the_batch() -> None:
    def count_fusions(batch: int, size: int) -> int:
        function = jax.vmap(jq.quantize_linear, (0, None, None))
        text = jax.jit(function).lower(aval(F, batch, size), SCALE, aval(I8)).compile().as_text() or ""
        return text.count(" fusion(")

    assert count_fusions(1000, 4096) == 1
    assert count_fusions(64, 64) == 2


def test_the_size_may_be_symbolic() -> None:
    (n,) = export.symbolic_shape("n")
    exported = export.export(jax.jit(lambda x: jq.quantize_linear(x, 0.5, output_dtype=I8)))(aval(F, n, 64))
    x = np.arange(-64 * 50, 64 * 50, dtype=np.float32).reshape(100, 64) / 4
    np.testing.assert_array_equal(exported.call(x), np.clip(np.rint(x * 2), -128, 127))


@pytest.mark.sample(9)
@pytest.mark.parametrize("size", [1, 2**11, 2**11 + 1, ALONE, ALONE + 1, MOST, MOST + 1])
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int4"])
def test_codes_on_both_sides_of_the_limits(name: str, size: int, rng: np.random.Generator) -> None:
    dtype, (low, high) = onnx_text.dtype(name), onnx_text.BOUNDS[name]
    point, scale = int(rng.integers(low, high + 1)), np.float32(rng.uniform(0.01, 1))
    ties = (rng.integers(low - 2, high + 2, size) - point + 0.5).astype(np.float32) * scale
    x = np.where(rng.random(size) < 0.5, ties, np.nextafter(ties, np.float32(np.inf)))
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0], np.float32)
    x[: special.size] = special[:size]
    with np.errstate(over="ignore"):
        want = onnx_text.codes((x / scale).astype(np.float64), point, (low, high))
    zero_point = np.array(point, dtype)
    np.testing.assert_array_equal(np.asarray(jq.quantize_linear(x, scale, zero_point)).astype(np.int64), want)
    fake_quantized = jq.fake_quantize_linear(x, scale, zero_point)
    np.testing.assert_array_equal(fake_quantized, (want - point).astype(np.float32) * scale)


@pytest.mark.parametrize("axes", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("scales", ["scalar", "axis=2", "axis=0"])
def test_quotients_of_repeated_elements(axes: tuple[int, ...], scales: str, rng: np.random.Generator) -> None:
    """XLA must not multiply by the reciprocal of a scale, though x, the scale or both repeat their elements."""
    shape, axis = (16, 16, 16), None if scales == "scalar" else int(scales[-1])
    halves = rng.integers(-2, 3, [1 if i in axes else n for i, n in enumerate(shape)]).astype(np.float32) + 0.5

    @jax.jit
    def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jq.quantize_linear(jnp.broadcast_to(x, shape), scale, axis=1 if axis is None else axis, output_dtype=I8)

    for scale in rng.uniform(0.01, 1, 50).astype(np.float32):
        ties = halves * scale  # for most scales the reciprocal gives another side of some tie
        wide = scale if axis is None else np.full(16, scale)
        want = np.rint(np.broadcast_to(ties, shape) / scale)
        np.testing.assert_array_equal(quantize(ties, wide), want)


@pytest.mark.parametrize("transform", ["eager", "jit", "vmap_batched", "scan"])
def test_rounding_is_the_same_in_every_transform(transform: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 3000)).astype(np.float32) * 50
    z = rng.integers(-128, 128, x.shape).astype(np.int32)
    want = np.clip(np.rint(x) + z, -128, 127)
    codes = transforms.ALL[transform](lambda x, z: affine.encode_steps(x, z, np.dtype(np.int8)), (x, z))
    np.testing.assert_array_equal(codes, want)


def test_extreme_zero_points_and_nan() -> None:
    """The sum of the bits of any float and a zero point of 16 bits does not wrap past a bound."""
    exponents = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([exponents, exponents + 1, exponents + 0xFFFF]).view(np.float32)
    for dtype in (np.int16, np.uint16):
        low, high = (int(b) for b in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        for point in (low, high):
            codes = affine.encode_steps(jnp.asarray(x), jnp.full(x.shape, point, jnp.int32), np.dtype(dtype))
            with np.errstate(invalid="ignore"):  # signaling NaNs
                want = onnx_text.codes(x.astype(np.float64), point, (low, high))
            np.testing.assert_array_equal(np.asarray(codes).astype(np.int64), want)


@pytest.mark.slow
def test_a_small_product_is_rounded_before_an_addition(rng: np.random.Generator) -> None:
    for size in (1, 1000, 4096, MOST + 1):
        a, b, c = (rng.normal(size=size).astype(np.float32) for _ in range(3))
        rounded = jax.jit(lambda a, b, c: barriers.round_result(a * b) + c)(a, b, c)
        np.testing.assert_array_equal(rounded, a * b + c)
    slopes = jax.jit(jax.grad(lambda a, b: barriers.round_result(a * b).sum(), (0, 1)))(jnp.ones(4096), jnp.zeros(4096))
    np.testing.assert_array_equal(slopes[1], np.ones(4096))
    second = jax.hessian(lambda t: (barriers.round_result(jnp.full(4096, t) ** 2)).sum())(jnp.float32(3))
    assert second == 2 * 4096
