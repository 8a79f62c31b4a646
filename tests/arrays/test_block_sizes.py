"""`quantize` with blocks of other sizes along each axis: each box is quantized as an array of its own."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq

from ..support import equality

F32 = np.float32
SHAPE, SIZES = (10, 22), (4, 5)  # both last blocks are short
SPECS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "uint8": {"dtype": "uint8"},
    "uint4 symmetric": {"dtype": "uint4", "symmetric": True},
    "int5": {"dtype": "int5"},
    "uint6 with offsets": {"dtype": "uint6", "offset": True},
    "nf4": {"dtype": jq.nf4},
    "float8": {"dtype": "float8_e4m3fn"},
    "float16 scales": {"dtype": "int8", "scale_dtype": "float16"},
    "powers of two": {"dtype": "int8", "scale_dtype": "float8_e8m0fnu"},
}


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.normal(size=shape) * np.exp(rng.uniform(-4, 4, shape))).astype(F32)


def list_boxes(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[slice, ...]]:
    runs = [[slice(i, i + size) for i in range(0, n, size)] for n, size in zip(shape, sizes, strict=True)]
    return list(itertools.product(*runs))


def check_boxes(q: jq.QuantizedArray, x: np.ndarray, spec: jq.QuantSpec, sizes: tuple[int, ...]) -> None:
    values = np.asarray(q.dequantize())
    for box in list_boxes(x.shape, sizes):
        alone = jq.quantize(x[box], spec)
        np.testing.assert_array_equal(np.asarray(q.codes[box]).astype(F32), np.asarray(alone.codes).astype(F32))
        equality.same_bits(values[box], np.asarray(alone.dequantize()))


@pytest.mark.parametrize("name", SPECS)
def test_boxes(rng: np.random.Generator, name: str) -> None:
    spec = jq.QuantSpec(granularity=jq.Blocked((0, 1), SIZES), **SPECS[name])
    each = jq.QuantSpec(**SPECS[name])
    x = draw(rng, SHAPE)
    q = jq.quantize(x, spec)
    assert q.block_size == SIZES
    assert q.scale.shape == (3, 5)
    check_boxes(q, x, each, SIZES)
    compiled = jax.jit(lambda x: jq.quantize(x, spec))(x)
    jax.tree.map(equality.same_bits, compiled, jax.tree.map(np.asarray, q))
    stack = np.stack([x, draw(rng, SHAPE)])
    mapped = jax.vmap(lambda x: jq.quantize(x, spec))(stack)
    for i in range(2):
        check_boxes(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), stack[i], each, SIZES)
    a = rng.normal(size=(3, 10)).astype(F32)
    exact = a.astype(np.float64) @ np.asarray(q.dequantize(), np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(np.asarray(q.dequantize(), np.float64)) * 2.0**-20
    for y in (jq.matmul(a, q), jax.jit(jq.matmul)(a, q), jq.einsum("ij,jk->ik", a, q)):
        assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()
    equality.same_bits(jq.take(q, jnp.array([9, 3]), axis=0), np.asarray(q.dequantize())[[9, 3]])


@pytest.mark.parametrize(
    ("axes", "sizes", "boxes", "stored"),
    [
        ((-2, -1), (4, 5), (1, 4, 5), (4, 5)),
        ((0, 2), (2, 5), (2, 1, 5), (2, 1, 5)),
        ((2, 0), (5, 2), (2, 1, 5), (2, 1, 5)),
        ((0, 1), (2, 5), (2, 5, 1), (2, 5, 1)),
        ((1, 2), (1, 5), (1, 1, 5), 5),  # blocks of one are no blocks
        ((1, 2), (100, 5), (1, 100, 5), 5),  # nor is a block that is longer than the dimension
    ],
)
def test_ranks(rng: np.random.Generator, axes: Any, sizes: Any, boxes: tuple[int, ...], stored: Any) -> None:
    x = draw(rng, (3, 10, 22))
    q = jq.quantize(x, jq.QuantSpec("int8", jq.Blocked(axes, sizes)))
    assert q.block_size == stored
    check_boxes(q, x, jq.QuantSpec("int8"), boxes)


def test_ranges(rng: np.random.Generator) -> None:
    """Given ranges in the shape of the scale, with one zero point for all."""
    spec = jq.QuantSpec("uint8", jq.Blocked((0, 1), SIZES), zero_point_granularity=jq.PerTensor())
    x = draw(rng, SHAPE)
    high = rng.uniform(1, 2, (3, 5)).astype(F32)
    q = jq.quantize(x, spec, range=(-high, high))
    for i, box in enumerate(list_boxes(SHAPE, SIZES)):
        end = high.reshape(-1)[i]
        codes = jq.quantize_linear(x[box], q.scale.reshape(-1)[i], q.zero_point.reshape(()), precision=jnp.float32)
        np.testing.assert_array_equal(q.codes[box], codes)
        assert q.scale.reshape(-1)[i] * 255 >= 2 * end * (1 - 2.0**-20)


def test_refusals() -> None:
    """Blocks of the zero point that do not fit the scale's blocks, and what computes scales otherwise."""
    spec = jq.QuantSpec("int8", jq.Blocked((0, 1), SIZES))
    x = jnp.ones(SHAPE)
    other = jq.QuantSpec("uint8", jq.Blocked((0, 1), SIZES), zero_point_granularity=jq.Blocked((0, 1), (5, 4)))
    with pytest.raises(ValueError, match=r"jaxquant\.quantize: spec: expected"):
        jq.quantize(x, other)
    with pytest.raises(ValueError, match=r"the same size along each axis, because only jq\.quantize"):
        jq.fake_quantize(x, spec)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_keeps_the_blocks_of_the_other_axis(rng: np.random.Generator, axis: int) -> None:
    """A tuple of sizes counts its axes from the back, so it would give a size to another axis."""
    shape, sizes = (6, 22), (4, 5)
    q = jq.quantize(draw(rng, shape), jq.QuantSpec("int8", jq.Blocked((0, 1), sizes)))
    rows = q.per_index(axis)
    assert rows.block_size == sizes[1 - axis]
    equality.same_bits(rows.dequantize(), np.asarray(q.dequantize()))
    mapped = jax.jit(jax.vmap(lambda r: r.dequantize(), in_axes=axis, out_axes=axis))(rows)
    equality.same_bits(mapped, np.asarray(q.dequantize()))


def test_vmap_of_an_axis_behind_blocks_is_refused(rng: np.random.Generator) -> None:
    q = jq.quantize(draw(rng, (6, 10, 3)), jq.QuantSpec("int8", jq.Blocked((0, 1, 2), (4, 3, 1))))
    assert q.per_index(0).block_size == 3
    with pytest.raises(ValueError, match=r"per_index: axis: expected axes in front of 0, because there are blocks"):
        q.per_index(2)
