"""Quantized arrays with the codes and the scales of files have the floats of the file, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant as jq

from ..cases import file_formats as cases
from ..oracles import file_formats
from ..oracles.file_formats import BF16, E4M3, E8M0, F16, F32, FORMATS, Parts
from ..support import equality


def draw(rng: np.random.Generator, name: str) -> Parts:
    row = FORMATS[name]
    return row.decode(row.draw(rng))


def build_array(parts: Parts, name: str, dtype: np.dtype, *, signed: bool = False) -> jq.QuantizedArray:
    return cases.build_array(parts, dtype, arithmetic=dtype if FORMATS[name].each_step else F32, signed=signed)


def compute_expected(parts: Parts, name: str, dtype: np.dtype) -> np.ndarray:
    """The floats of the producer's code."""
    return file_formats.compute_values(parts, dtype, each_step=FORMATS[name].each_step)


@pytest.mark.parametrize("name", FORMATS)
def test_values(rng: np.random.Generator, name: str) -> None:
    parts = draw(rng, name)
    for dtype in FORMATS[name].dtypes:
        q = build_array(parts, name, dtype)
        equality.same_bits(q.dequantize(), compute_expected(parts, name, dtype))


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", FORMATS)
def test_products(rng: np.random.Generator, name: str) -> None:
    """A product with floats has the same numbers: of each row times 1, apart from the sign of zeros."""
    parts = draw(rng, name)
    q = build_array(parts, name, FORMATS[name].dtypes[-1]).astype(F32)
    values = np.asarray(q.dequantize())
    if q.ndim != 2 or not np.isfinite(values).all():  # 0 times infinity
        return
    equality.same_bits(np.asarray(jq.matmul(np.eye(q.shape[0], dtype=F32), q)) + 0, values + 0)


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", FORMATS)
def test_transforms(rng: np.random.Generator, name: str) -> None:
    row = FORMATS[name]
    every = [draw(rng, name) for _ in range(2)]
    dtype = row.dtypes[-1]
    # Whether a scale is signed is static, and the draws may differ in it.
    arrays = [build_array(parts, name, dtype, signed=True) for parts in every]
    expected = np.stack([compute_expected(parts, name, dtype) for parts in every])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)

    @jax.jit
    def run(first: jq.QuantizedArray, stacked: jq.QuantizedArray) -> Any:
        def step(carry: jax.Array, q: jq.QuantizedArray) -> tuple[jax.Array, jax.Array]:
            return carry + 1, q.dequantize()

        _, scanned = jax.lax.scan(step, jnp.int32(0), stacked)
        mapped = jax.vmap(lambda q: q.dequantize())(stacked)
        # An addition behind it is not merged with the last product.
        return first.dequantize(), mapped, scanned, first.dequantize().astype(F32) + np.float32(1 / 3)

    alone, mapped, scanned, after = run(arrays[0], stacked)
    equality.same_bits(alone, expected[0])
    equality.same_bits(mapped, expected)
    equality.same_bits(scanned, expected)
    equality.same_bits(after, expected[0].astype(F32) + np.float32(1 / 3))
    equality.same_bits(stacked.dequantize(), expected)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FORMATS)
def test_sharded(rng: np.random.Generator, name: str) -> None:
    dtype = FORMATS[name].dtypes[0]
    parts = draw(rng, name)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))

    def place(leaf: jax.Array) -> jax.Array:
        axis = "x" if leaf.ndim > 1 and leaf.shape[0] % 2 == 0 else None
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(axis)))

    q = jax.tree.map(place, build_array(parts, name, dtype))
    values, expected = np.asarray(jax.jit(lambda q: q.dequantize())(q)), compute_expected(parts, name, dtype)
    equality.same_bits(values, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bits(rng: np.random.Generator, name: str) -> None:
    """Within 2 % of the numbers of the file, each code in its own bits, and zero points of 3, 5 and 6 bits in 8."""
    parts = draw(rng, name)
    widths = cases.list_widths(parts)
    if 1 in widths:
        pytest.skip("one bit is held in two")
    if 7 in widths:
        pytest.skip("seven bits are held in eight")
    bits = cases.measure_bits(cases.build_array(parts))
    own = cases.count_bits(parts) / parts.codes.size
    row = FORMATS[name]
    assert abs(own - row.bits) < 0.01 * own or not row.bits
    assert bits <= 1.02 * own


def test_subnormal_scales_of_mxfp4_count_as_zero() -> None:
    """XLA:CPU takes subnormal float32 numbers for zero: here the scale 2**-127. gguf has products of up to 2**-124."""
    codes = jnp.asarray(np.arange(16, dtype=np.uint8).view(file_formats.E2M1)).reshape(1, 16)
    scale = np.zeros((1, 1), np.uint8)
    values = np.asarray(jq.QuantizedArray(codes, jnp.asarray(scale.view(E8M0))).dequantize())
    exact = np.asarray(codes).astype(np.float64) * 2.0**-127
    assert ((values == 0) | (values == exact)).all()


def test_a_code_of_each_byte() -> None:
    """The e4m3 scales of NVFP4 and the codes of fp8 as they are, with subnormal ones."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes % 128 != 127].view(E4M3).reshape(1, -1)
    for dtype in (F32, BF16, F16):
        q = jq.QuantizedArray(jnp.asarray(codes), jnp.ones((1, 1)), dtype=dtype)
        equality.same_bits(q.dequantize(), codes.astype(dtype))
