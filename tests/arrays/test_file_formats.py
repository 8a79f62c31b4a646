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

EXACT = [
    name for name in FORMATS if "HQQ" not in name and name not in ("Gemma multiplier", "NVFP4 of compressed-tensors")
]


def draw(rng: np.random.Generator, name: str) -> Parts:
    row = FORMATS[name]
    return row.decode(row.draw(rng))


def compute_expected(parts: Parts, dtype: np.dtype) -> np.ndarray:
    """The floats with one rounding to the dtype."""
    return file_formats.compute_values(parts, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_values(rng: np.random.Generator, name: str) -> None:
    """Bit for bit, where the formula is the one of the array; elsewhere within the roundings that differ."""
    row = FORMATS[name]
    parts = draw(rng, name)
    for dtype in row.dtypes:
        q = cases.build_array(parts, dtype)
        expected = file_formats.compute_values(parts, dtype, each_step=row.each_step)
        values = q.dequantize()
        if cases.is_exact(name, parts, dtype):
            equality.same_bits(values, expected)
            continue
        difference = np.abs(np.asarray(values).astype(np.float64) - expected.astype(np.float64))
        assert (difference <= cases.bound_difference(parts, dtype)).all()
        if parts.offset is not None:  # and bit for bit where only the last rounding is to the dtype
            equality.same_bits(values, file_formats.compute_values(parts, dtype))


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", EXACT)
def test_transforms(rng: np.random.Generator, name: str) -> None:
    row = FORMATS[name]
    every = [draw(rng, name) for _ in range(2)]
    dtype = row.dtypes[-1]
    # Whether a scale is signed is static, and the draws may differ in it.
    arrays = [cases.build_array(parts, dtype, signed=True) for parts in every]
    expected = np.stack([compute_expected(parts, dtype) for parts in every])
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
@pytest.mark.parametrize("name", EXACT)
def test_sharded(rng: np.random.Generator, name: str) -> None:
    dtype = FORMATS[name].dtypes[0]
    parts = draw(rng, name)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))

    def place(leaf: jax.Array) -> jax.Array:
        axis = "x" if leaf.ndim > 1 and leaf.shape[0] % 2 == 0 else None
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(axis)))

    q = jax.tree.map(place, cases.build_array(parts, dtype))
    values, expected = np.asarray(jax.jit(lambda q: q.dequantize())(q)), compute_expected(parts, dtype)
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
    if "HQQ" in name:  # the offset in float32, in place of a zero point in 16 bits
        own += 32 * np.asarray(parts.scale).size * 2 / parts.codes.size
        assert bits <= own
        return
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
