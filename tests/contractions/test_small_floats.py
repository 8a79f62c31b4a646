"""Contractions of two arrays of float8 or float4: float8 within a bound of float64, float4 exactly within a block.

The error is held relative to the sum of magnitudes of each output, as for weight-only contractions.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant import Blocked, PerAxis, PerTensor, QuantizedArray, QuantSpec

F32 = np.float32
LIMIT = 2e-6
E4, E5, E2 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
MX: dict[str, Any] = {"scale_dtype": "float8_e8m0fnu", "scale_rule": "floor"}
# The specs of x [8, K] and of w [K, N].
PAIRS = {
    "per tensor": (QuantSpec(E4), QuantSpec(E4)),
    "rows and columns": (QuantSpec(E4, PerAxis(0)), QuantSpec(E4, PerAxis(1))),
    "e5m2 and e4m3": (QuantSpec(E5, PerAxis(0)), QuantSpec(E4, PerTensor())),
    "fnuz": (QuantSpec("float8_e4m3fnuz"), QuantSpec("float8_e5m2fnuz", PerAxis(1))),
    "blocks of both sides": (QuantSpec(E4, Blocked(1, 32)), QuantSpec(E4, Blocked(0, 32))),
    "squares of w": (QuantSpec(E4, Blocked(1, 64)), QuantSpec(E4, Blocked((0, 1), 64))),
    "each contracted index": (QuantSpec(E4, PerAxis(1)), QuantSpec(E4, PerAxis(0))),
    "mxfp8": (QuantSpec(E4, Blocked(1, 32), **MX), QuantSpec(E4, Blocked(0, 32), **MX)),
    "mxfp8, e5m2": (QuantSpec(E5, Blocked(1, 32), **MX), QuantSpec(E4, Blocked(0, 32), **MX)),
    "mxfp8 and mxfp4": (QuantSpec(E4, Blocked(1, 32), **MX), QuantSpec(E2, Blocked(0, 32), **MX)),
    "blocks that do not fit": (QuantSpec(E2, Blocked(1, 24)), QuantSpec(E2, Blocked(0, 32))),
    "float4, each contracted index": (QuantSpec(E2, PerAxis(1)), QuantSpec(E2, PerAxis(0))),
}
EXACT = {
    "float4": (QuantSpec(E2), QuantSpec(E2)),
    "float4, rows and columns": (QuantSpec(E2, PerAxis(0)), QuantSpec(E2, PerAxis(1))),
    "mxfp4": (QuantSpec(E2, Blocked(1, 32), **MX), QuantSpec(E2, Blocked(0, 32), **MX)),
    "mxfp4 with a column scale": (QuantSpec(E2, Blocked(1, 32), **MX), QuantSpec(E2, PerAxis(1))),
}


def decode(q: QuantizedArray) -> np.ndarray:
    """The real numbers of an array in float64."""
    return np.asarray(q.codes).astype(np.float64) * np.asarray(q.per_index(*range(q.ndim)).scale).astype(np.float64)


def find_error(y: Any, x: np.ndarray, w: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(y, np.float64) - x @ w) / np.maximum(np.abs(x) @ np.abs(w), 1e-30)))


@pytest.mark.parametrize("name", [*PAIRS, *EXACT])
@pytest.mark.parametrize("depth", [256, 100])
def test_product(name: str, depth: int, rng: np.random.Generator) -> None:
    specs = (PAIRS | EXACT)[name]
    x, w = rng.standard_normal((8, depth)).astype(F32), rng.standard_normal((depth, 40)).astype(F32)
    a, b = jq.quantize(x, specs[0]), jq.quantize(w, specs[1])
    want = decode(a), decode(b)

    @jax.jit
    def contract(a: QuantizedArray, b: QuantizedArray) -> list[jax.Array]:
        flipped = jq.dot_general(b, a, (((0,), (1,)), ((), ())))
        stored = jq.matmul(a, b.store_last(0))
        return [jq.matmul(a, b), flipped.T, stored, jq.einsum("bk,kn->bn", a, b)]

    results = contract(a, b)
    for y in results:
        assert find_error(y, *want) < LIMIT
        if name in EXACT and depth == 256:
            np.testing.assert_array_equal(y, results[0])
    assert find_error(jq.matmul(a, b), *want) < LIMIT


@pytest.mark.parametrize("name", EXACT)
def test_float4_sums_are_exact(name: str, rng: np.random.Generator) -> None:
    """With scales that are powers of two, and sums that float32 holds, the product is exact."""
    specs = [QuantSpec(E2, spec.granularity, scale_dtype="float8_e8m0fnu", scale_rule="even") for spec in EXACT[name]]
    x, w = rng.standard_normal((3, 96)).astype(F32), rng.standard_normal((96, 5)).astype(F32)
    a, b = (jq.quantize(v, spec) for v, spec in zip((x, w), specs, strict=True))
    np.testing.assert_array_equal(np.asarray(jq.matmul(a, b), np.float64), decode(a) @ decode(b))


def test_large_weights_in_pieces(rng: np.random.Generator) -> None:
    """Weights that are dequantized in chunks, in both orders, and one row."""
    w = jq.quantize(rng.standard_normal((1536, 1400)).astype(F32), QuantSpec(E4, PerAxis(1)))
    x = jq.quantize(rng.standard_normal((2, 1536)).astype(F32), QuantSpec(E4, PerAxis(0)))
    real = decode(w)
    for q in (x, x[:1]):
        assert find_error(jax.jit(jq.matmul)(q, w), decode(q), real) < LIMIT
        y = jax.jit(lambda q: jq.matmul(w.T, q.T))(q)
        assert find_error(y.T, decode(q), real) < LIMIT


def test_batches_vmap_and_scan(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((3, 4, 64)).astype(F32), rng.standard_normal((3, 64, 8)).astype(F32)
    for name in (E4, E2):
        a = jq.quantize(x, QuantSpec(name, Blocked(2, 32), **MX)).per_index(0)
        b = jq.quantize(w, QuantSpec(name, Blocked(1, 32), **MX)).per_index(0)
        want = jax.jit(jq.matmul)(a, b)
        np.testing.assert_allclose(want, decode(a) @ decode(b), rtol=0, atol=LIMIT * 100)
        np.testing.assert_allclose(jax.jit(jax.vmap(jq.matmul))(a, b), want, rtol=0, atol=1e-5)
        _, y = jax.jit(lambda a, b: lax.scan(lambda c, ab: (c, jq.matmul(*ab)), 0, (a, b)))(a, b)
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            jax.vmap(jq.matmul, in_axes=(0, None))(a, b[0]), jnp.stack([a[i] @ b[0] for i in range(3)]), atol=1e-5
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_result_is_rounded_once(dtype: str, rng: np.random.Generator) -> None:
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((4, 64), (64, 8)))
    for spec in (QuantSpec(E4), QuantSpec(E2)):
        a, b = jq.quantize(x, spec), jq.quantize(w, spec)
        y = jq.matmul(a, b)
        assert y.dtype == dtype
        wide = jq.matmul(a, b, preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(np.asarray(y, F32), np.asarray(wide.astype(dtype), F32))


def test_gradient_of_scales(rng: np.random.Generator) -> None:
    """The cotangents of both scales are those of the dequantized contraction."""
    for pair in ("rows and columns", "blocks of both sides"):
        x, w = rng.standard_normal((4, 64)).astype(F32), rng.standard_normal((64, 8)).astype(F32)
        a, b = (jq.quantize(v, spec) for v, spec in zip((x, w), PAIRS[pair], strict=True))
        g = rng.standard_normal((4, 8)).astype(F32)

        def loss(scales: Any, multiply: Any, a: Any = a, b: Any = b, g: Any = g) -> jax.Array:
            return jnp.sum(multiply(a.replace(scale=scales[0]), b.replace(scale=scales[1])) * g)

        found = jax.grad(loss)((a.scale, b.scale), jq.matmul)
        want = jax.grad(loss)((a.scale, b.scale), lambda a, b: a.dequantize() @ b.dequantize())
        for f, e in zip(found, want, strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-3)


def test_accelerators_get_their_own_forms() -> None:
    """CUDA and TPU multiply float8 as it is, and CUDA blocks of 32; no accelerator is needed to lower for it."""
    x, w = np.ones((64, 128), F32), np.ones((128, 64), F32)

    def lower(pair: Any, platform: str) -> str:
        a, b = (jq.quantize(v, spec) for v, spec in zip((x, w), pair, strict=True))
        return jax.jit(jq.matmul).trace(a, b).lower(lowering_platforms=(platform,)).as_text()

    native = re.compile(r"dot_general .*tensor<64x128xf8E4M3FN>, tensor<128x64xf8E4M3FN>\) -> tensor<64x64xf32>")
    for platform, is_native in (("cuda", True), ("tpu", True), ("cpu", False)):
        assert bool(native.search(lower(PAIRS["rows and columns"], platform))) == is_native
    for name in ("mxfp8", "mxfp8 and mxfp4", "mxfp8, e5m2"):
        for platform, is_native in (("cuda", True), ("tpu", False), ("cpu", False)):
            assert ("block_scaled_dot" in lower(PAIRS[name], platform)) == is_native
    assert "block_scaled_dot" in lower(EXACT["mxfp4"], "cuda")
    integers = re.compile(r"dot_general .*xi8>.*xi32>")
    assert integers.search(lower(EXACT["mxfp4"], "cpu"))
    assert integers.search(lower(EXACT["float4, rows and columns"], "cuda"))


def test_float_codes_have_no_integer_epilogue() -> None:
    q = jq.quantize(np.ones((4, 4), F32), QuantSpec(E4))
    for options, match in (
        ({"bias": np.zeros(4, np.int32)}, r"matmul: bias: expected None with codes of float8_e4m3fn"),
        ({"output": jq.Quantizer(QuantSpec("uint8"), 1.0, 3)}, r"matmul: output: expected None with codes of float8"),
    ):
        with pytest.raises(ValueError, match=match):
            jq.matmul(q, q, **options)  # type: ignore[arg-type]
    i = jq.quantize(np.ones((4, 4), F32), QuantSpec("int8"))
    with pytest.raises(TypeError, match=r"matmul: lhs: expected values of int8.*got float8_e4m3fn"):
        jq.matmul(q, i)


def test_empty_contraction() -> None:
    for name in (E4, E2):
        a = jq.quantize(np.zeros((3, 0), F32), QuantSpec(name, Blocked(1, 32)))
        b = jq.quantize(np.zeros((0, 5), F32), QuantSpec(name, PerAxis(1)))
        np.testing.assert_array_equal(jq.matmul(a, b), np.zeros((3, 5)))
