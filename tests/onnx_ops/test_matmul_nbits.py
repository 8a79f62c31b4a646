"""MatMulNBits beside float64 numpy and ONNX Runtime: its float sums have no order, so nothing here is bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq

from ..cases.contraction_exactness import MICROSOFT
from ..oracles import contraction_text, onnx_runtime, onnx_text
from ..support.hlo import Program

SIZES = ((64, 32), (70, 32), (50, 16), (130, 64), (33, 128), (16, 16))


def near(got: Any, want: np.ndarray, dtype: Any = np.float32) -> None:
    """Within 1e-5 of the largest magnitude, and half an ulp of the result's dtype."""
    got = np.asarray(got)
    assert got.dtype == np.dtype(dtype)
    assert got.shape == want.shape
    bound = 1e-5 if got.dtype == np.float32 else 1e-5 + float(ml_dtypes.finfo(got.dtype).eps) / 2
    wide = want.astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), wide, rtol=0, atol=bound * np.abs(wide).max(initial=0))


def draw(
    rng: np.random.Generator, K: int, bits: int, block: int, *, M: int = 5, N: int = 9, dtype: str = "float32"
) -> tuple[np.ndarray, ...]:
    """(a, b, scales, zero_points, bias)."""
    kind, blocks = onnx_text.dtype(dtype), -(-K // block)
    a, bias = rng.normal(0, 1, (M, K)).astype(kind), rng.normal(0, 1, N).astype(kind)
    b = rng.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8)
    points = rng.integers(0, 256, (N, -(-blocks * bits // 8))).astype(np.uint8)
    return a, b, rng.uniform(0.01, 0.1, (N, blocks)).astype(kind), points, bias


def attributes(b: np.ndarray, K: int, bits: int, block: int) -> dict[str, int]:
    return {"K": K, "N": b.shape[0], "bits": bits, "block_size": block}


def asked(a, b, scales, points, bias, **static: int) -> np.ndarray:
    """ONNX Runtime's answer; between the zero points and the bias it has an order of the rows."""
    return onnx_runtime.ask("MatMulNBits", (a, b, scales, points, None, bias), a.dtype, MICROSOFT, **static)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "block"), SIZES)
def test_beside_onnx_runtime(k: int, block: int, bits: int, rng: np.random.Generator) -> None:
    a, b, scales, points, bias = draw(rng, k, bits, block)
    static = attributes(b, k, bits, block)
    for given in ((None, None), (points, None), (None, bias), (points, bias)):
        got = jax.jit(lambda *args: jq.ops.matmul_nbits(*args, **static))(a, b, scales, *given)
        near(got, contraction_text.matmul_nbits(a, b, scales, *given, **static))
        near(got, asked(a, b, scales, *given, **static))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sixteen_bit_floats(bits: int, dtype: str, rng: np.random.Generator) -> None:
    args = draw(rng, 70, bits, 32, dtype=dtype)
    static = attributes(args[1], 70, bits, 32)
    got = jax.jit(lambda *a: jq.ops.matmul_nbits(*a, **static))(*args)
    near(got, contraction_text.matmul_nbits(*args, **static), args[0].dtype)


def test_defaults_are_four_bits_in_blocks_of_32(rng: np.random.Generator) -> None:
    a, b, scales, _, _ = draw(rng, 64, 4, 32)
    near(jq.ops.matmul_nbits(a, b, scales, K=64, N=9), contraction_text.matmul_nbits(a, b, scales, K=64, N=9))


def test_low_bits_come_first() -> None:
    """The identity reads the weights: 0x21 is 1 and then 2, less the default zero point."""
    for bits, codes in ((2, [1, 0, 2, 0]), (4, [1, 2]), (8, [0x21])):
        b = np.zeros((1, 1, 16 * bits // 8), np.uint8)
        b[0, 0, 0] = 0x21
        one, scale = np.eye(16, dtype=np.float32), np.ones((1, 1), np.float32)
        got = jq.ops.matmul_nbits(one, b, scale, K=16, N=1, bits=bits, block_size=16)
        want = np.zeros((16, 1), np.float32)
        want[: 8 // bits, 0] = codes
        np.testing.assert_array_equal(got, want - 2 ** (bits - 1))


def test_zero_points_are_packed_by_row() -> None:
    """Three blocks of 4 bits take two bytes a row, and the last half byte is nothing."""
    K, block = 48, 16
    b, scales = np.zeros((2, 3, 8), np.uint8), np.ones((2, 3), np.float32)
    points = np.array([[0x21, 0xF3], [0x65, 0xF7]], np.uint8)
    a = np.kron(np.eye(3), np.eye(1, block)).astype(np.float32)
    got = jq.ops.matmul_nbits(a, b, scales, points, K=K, N=2, bits=4, block_size=block)
    np.testing.assert_array_equal(got, -np.array([[1, 5], [2, 6], [3, 7]], np.float32))


def test_what_fills_the_last_block_is_not_read(rng: np.random.Generator) -> None:
    a, b, scales, points, bias = draw(rng, 33, 4, 32)
    static = attributes(b, 33, 4, 32)
    other = b.copy()
    other[:, 1, 1:] ^= 0xFF
    other[:, 1, 0] ^= 0xF0
    got, want = (jq.ops.matmul_nbits(a, codes, scales, points, bias, **static) for codes in (other, b))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(33,), (1, 33), (2, 3, 33), (0, 33), (2, 0, 33)], ids=str)
def test_shapes_of_a(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    _, b, scales, points, bias = draw(rng, 33, 4, 16)
    static = attributes(b, 33, 4, 16)
    a = rng.normal(0, 1, shape).astype(np.float32)
    want = contraction_text.matmul_nbits(a, b, scales, points, bias, **static)
    near(jq.ops.matmul_nbits(a, b, scales, points, bias, **static), want)


def test_vmap(rng: np.random.Generator) -> None:
    """Over a alone, over the weights alone, over all, and over another axis of a."""
    drawn = [draw(rng, 50, 4, 16) for _ in range(3)]
    args = [np.stack(parts) for parts in zip(*drawn, strict=True)]
    static = attributes(drawn[0][1], 50, 4, 16)

    def op(*given: Any) -> Any:
        return jq.ops.matmul_nbits(*given, **static)

    for mapped in ((0,) * 5, (0, *(None,) * 4), (None, *(0,) * 4), (None, None, 0, None, None), (None, 0, 0, 0, None)):
        given = [v if m == 0 else v[0] for v, m in zip(args, mapped, strict=True)]
        members = [[v[i] if m == 0 else v for v, m in zip(given, mapped, strict=True)] for i in range(3)]
        want = np.stack([contraction_text.matmul_nbits(*member, **static) for member in members])
        near(jax.jit(jax.vmap(op, in_axes=mapped))(*given), want)
    got = jax.vmap(op, in_axes=(1, *(None,) * 4), out_axes=1)(np.moveaxis(args[0], 0, 1), *drawn[0][1:])
    near(got, np.stack([contraction_text.matmul_nbits(a, *drawn[0][1:], **static) for a in args[0]], axis=1))


def sum_magnitudes(a: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.abs(a.astype(np.float64)) @ np.abs(weights.astype(np.float64)).T


# Groups of lanes that 8, 7, 6, 5 or 4 divide, blocks of several groups, a short last block, and 11 groups.
ROW_SIZES = ((256, 32), (224, 32), (95, 16), (80, 16), (512, 128), (1020, 512), (176, 16))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "block"), ROW_SIZES)
def test_a_single_row(k: int, block: int, bits: int, rng: np.random.Generator) -> None:
    """In the form of its own, within 2e-6 of the sum of magnitudes, and mapped: one row, and several."""
    a, b, scales, points, _ = draw(rng, k, bits, block, M=6)
    static = attributes(b, k, bits, block)
    float_points = rng.normal(2 ** (bits - 1), 1, scales.shape).astype(np.float32)

    def contract(points: Any, a: Any, b: Any, scales: Any) -> tuple[jax.Array, jax.Array]:
        def op(x: Any) -> jax.Array:
            return jq.ops.matmul_nbits(x, b, scales, points, **static)

        return op(a[:1]), jax.vmap(op)(a)

    choices = (None, points, float_points)
    results = jax.jit(lambda *args: [contract(p, *args) for p in choices])(a, b, scales)
    for (row, rows), given in zip(results, choices, strict=True):
        weights = contraction_text.nbits_weights(b, scales, given, **static)
        exact, bound = a.astype(np.float64) @ weights.T, 2e-6 * sum_magnitudes(a, weights)
        assert np.all(np.abs(row - exact[:1]) <= bound[:1])
        assert np.all(np.abs(rows - exact) <= bound)


def test_unusual_numbers_in_a_single_row(rng: np.random.Generator) -> None:
    """Infinities, NaN, and products of a code and an element that exceed float32 unless the scale comes first."""
    a, b, scales, _, _ = draw(rng, 256, 4, 32, M=1)
    static = attributes(b, 256, 4, 32)
    contract = jax.jit(functools.partial(jq.ops.matmul_nbits, **static))
    b[:, 0, 0], scales[2, 1] = 0x88, np.inf  # 0 and 0, and an infinite scale
    b[2, 1] = 0x19
    for element, want in ((np.inf, "nan"), (np.nan, "nan"), (1.0, "finite")):
        a[0, :2] = element
        got = np.asarray(contract(a, b, scales))[0]
        others = np.delete(got, 2)
        assert np.isnan(others).all() if want == "nan" else np.isfinite(others).all()
        assert not np.isfinite(got[2])
    a, b, scales, _, _ = draw(rng, 256, 4, 32, M=1)
    a, scales = a * np.float32(1e37), scales * np.float32(1e-30)
    weights = contraction_text.nbits_weights(b, scales, None, **static)
    exact = a.astype(np.float64) @ weights.T
    assert np.all(np.abs(contract(a, b, scales) - exact) <= 2e-6 * sum_magnitudes(a, weights))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form is a CPU's")
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA does not vectorize the form")
def test_rows_under_vmap_become_one_contraction(rng: np.random.Generator) -> None:
    _, b, scales, _, _ = draw(rng, 256, 4, 32)
    static = attributes(b, 256, 4, 32)
    for rows, contractions in ((1, 0), (16, 2)):
        x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        program = Program(jax.vmap(lambda row: jq.ops.matmul_nbits(row, b, scales, **static)), x)
        assert len(list(program.contractions())) == contractions


@pytest.mark.slow
def test_gradient_of_a_is_the_weights(rng: np.random.Generator) -> None:
    a, b, scales, points, bias = draw(rng, 50, 4, 16)
    static = attributes(b, 50, 4, 16)
    g = rng.normal(0, 1, (5, 9)).astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jq.ops.matmul_nbits(x, b, scales, points, bias, **static) * g)

    weights = contraction_text.nbits_weights(b, scales, points, **static)
    near(jax.grad(loss)(jnp.asarray(a)), g.astype(np.float64) @ weights)
