"""Codes and scales of blocks against numpy: near-ties, zeros, subnormals, infinities, NaN, ragged blocks."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from jaxquant._core.granularity import Aligned
from jaxquant.optim import codebooks
from jaxquant.optim.quantize_state import choose_blocks, complete_spec, quantize_leaf, quantize_like

from ..oracles import optimizer_text

F32 = np.float32
BOOKS = (jq.optim.dynamic, jq.optim.logarithmic)
NARROW = jq.Codebook("narrow", (*tuple(1 + i * 2.0 ** (-23) for i in range(255)), 2.0))  # too close for a table
SHAPES = ((40, 33), (300,), (3, 5, 70))


def sample_near_ties(rng: np.random.Generator, levels: Any, count: int) -> np.ndarray:
    """Midpoints of levels, the floats beside them, levels, and numbers of all magnitudes."""
    levels = np.asarray(levels, np.float64)
    middle = rng.choice((levels[1:] + levels[:-1]) / 2, count).astype(F32)
    moved = np.nextafter(middle, rng.choice([F32(-9), F32(9)], count))
    spread = (rng.normal(size=count) * 10.0 ** rng.uniform(-12, 0.2, count)).astype(F32)
    kind = rng.integers(0, 4, count)
    return np.choose(kind, [middle, moved, rng.choice(levels, count).astype(F32), spread])


def test_the_levels() -> None:
    signed, unsigned = (np.asarray(book.levels) for book in BOOKS)
    assert len(signed) == len(unsigned) == 256
    np.testing.assert_array_equal(signed[:127], -signed[129:][::-1])
    assert (signed[0], signed[127], signed[128], signed[-1]) == (-1, 0, 2**-14, 1)
    for i in range(6):
        assert np.count_nonzero((signed >= 4.0 ** -(i + 1)) & (signed < 4.0**-i)) == 64 >> i
    assert (unsigned[0], unsigned[-1], unsigned[1]) == (0, 1, 1.25 * 2**-32)
    ratios = unsigned[2:] / unsigned[1:-1]
    assert ratios.min() >= 16 / 15
    assert ratios.max() <= 9 / 8


SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 3e38], F32)


@pytest.mark.slow
def test_the_nearest_level(rng: np.random.Generator) -> None:
    """Of tables and of the levels of optimizers; eager, jit, vmap and scan."""
    random = jq.Codebook("random", tuple(np.sort(rng.uniform(-3, 3, 256)).astype(F32).tolist()))
    for book in (*BOOKS, random):
        x = np.concatenate([sample_near_ties(rng, book.levels, 1991), SPECIAL]).reshape(20, 100)
        expected = optimizer_text.encode(np.asarray(book.levels), x)
        encode = functools.partial(codebooks.round_to_levels, book)

        def run_all(x: jax.Array, encode: Any = encode, book: Any = book) -> Any:
            return encode(x), jax.vmap(encode)(x), lax.map(encode, x), book.encode(x)

        for codes in (*jax.jit(run_all)(x), encode(jnp.asarray(x))):
            np.testing.assert_array_equal(codes, expected)
        codes = jnp.asarray(expected.astype(np.uint8))
        for values in jax.jit(lambda codes, book=book: (book.decode(codes), codebooks.read_levels(book, codes)))(codes):
            np.testing.assert_array_equal(values, np.array(book.levels, F32)[expected])


@pytest.mark.slow
def test_levels_too_close_for_a_table(rng: np.random.Generator) -> None:
    x = np.concatenate([(1 + rng.integers(0, 300, 991) * 2.0**-23).astype(F32), SPECIAL])
    np.testing.assert_array_equal(jax.jit(NARROW.encode)(x), optimizer_text.encode(np.asarray(NARROW.levels), x))


def make_leaf(rng: np.random.Generator, shape: tuple[int, ...], book: jq.Codebook) -> np.ndarray:
    """Near-ties times a power of two, with a block of zeros, one of subnormals, one of -0 and one of tiny numbers."""
    x = sample_near_ties(rng, book.levels, math.prod(shape)).reshape(shape)
    x = np.clip(x, -1, 1) * F32(2.0 ** rng.integers(-20, 20))
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 4)] = 0
    flat[rng.integers(0, flat.size, 8)] = np.array([1e-40, -1e-40, 2e-38, -0.0, 1e-30, -1e-30, 1e-44, 3e-38], F32)
    x[..., -1:] = 0
    return x


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_against_numpy(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """One program for each way of calling; the codebook differs between the ways, and so do the numbers."""
    for book in BOOKS:
        spec = complete_spec(book, shape)
        x = np.stack([make_leaf(rng, shape, book) for _ in range(3)])
        x[2].reshape(-1)[:4] = np.array([np.inf, 1, -np.inf, 0], F32)
        x[1].reshape(-1)[5] = F32(np.nan)
        quantize = functools.partial(quantize_leaf, key=None, function="test", spec=spec)
        mapped = jax.jit(jax.vmap(quantize) if book is BOOKS[0] else functools.partial(lax.map, quantize))(x)
        for place in range(3):
            q = jax.tree.map(lambda leaf, i=place: leaf[i], mapped)
            sizes = Aligned(q.block_size).sizes(q.scale.shape, shape)
            assert sizes is not None
            assert math.prod(sizes) <= 256
            codes, scale = optimizer_text.quantize(x[place], np.asarray(book.levels), sizes)
            np.testing.assert_array_equal(q.scale, scale)
            alone = quantize(jnp.asarray(x[place]))
            again = quantize_like(jnp.asarray(x[place]), None, alone)
            for other in (alone, again):
                np.testing.assert_array_equal(q.codes, other.codes)
                np.testing.assert_array_equal(q.scale, other.scale)
            wide = optimizer_text.dequantize(np.zeros(shape, np.uint8), scale, np.ones(256), sizes)
            known = np.isfinite(wide)
            np.testing.assert_array_equal(np.asarray(q.codes)[known], codes[known])
            assert not np.isfinite(np.asarray(q.dequantize())[~known]).any()
            expected = optimizer_text.dequantize(codes, scale, np.asarray(book.levels), sizes)
            np.testing.assert_array_equal(np.asarray(q.dequantize())[known], expected[known])


def test_codes_are_those_of_quantize_except_beside_zero(rng: np.random.Generator) -> None:
    x = rng.normal(size=(64, 48)).astype(F32)
    for book in BOOKS:
        spec = complete_spec(book, x.shape)
        plain = jq.quantize(np.abs(x) if book is jq.optim.logarithmic else x, spec)
        leaf = jnp.abs(x) if book is jq.optim.logarithmic else jnp.asarray(x)
        q = quantize_leaf(leaf, None, function="test", spec=spec)
        expected = np.asarray(plain.codes)
        np.testing.assert_array_equal(q.codes, np.maximum(expected, 1) if book is jq.optim.logarithmic else expected)
        np.testing.assert_array_equal(q.scale, plain.scale)


@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((4096, 768), (16, 16), 256 * 48),
        ((50257, 768), (16, 16), 3142 * 48),
        ((1000, 512), (16, 16), 63 * 32),
        ((4096,), (256,), 16),
        ((512, 10), (16, 10), 32),
        ((4096, 3), (64, 3), 64),
        ((1, 4096), (1, 256), 16),
        ((3, 3, 64, 64), (16, 16), 9 * 16),
        ((512, 8, 64), None, 64 * 8 * 4),
        ((), (), 1),
    ],
    ids=str,
)
def test_the_choice_of_blocks(shape: tuple[int, ...], block: tuple[int, ...] | None, scales: int) -> None:
    q = jax.eval_shape(
        functools.partial(quantize_leaf, key=None, function="test", spec=complete_spec(BOOKS[0], shape)),
        jax.ShapeDtypeStruct(shape, F32),
    )
    sizes = Aligned(q.block_size).sizes(q.scale.shape, shape)
    assert sizes is not None
    assert math.prod(sizes) <= 256
    assert q.scale.size <= scales
    if block is not None:
        assert sizes[len(sizes) - len(block) :] == block


def test_large_arrays_take_little_more_than_a_byte() -> None:
    """Of any shape with 4096 elements or more, with lengths of 1 to 200: at most 0.27 of float32."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 200, rng.integers(1, 5)))
        if math.prod(shape) < 4096:
            continue
        blocked = choose_blocks(shape)
        assert not isinstance(blocked, jq.PerTensor)
        assert isinstance(blocked.size, int)
        axes = (blocked.axis,) if isinstance(blocked.axis, int) else blocked.axis
        cut = {axis % len(shape) for axis in axes}
        scales = math.prod(-(-n // blocked.size) if a in cut else n for a, n in enumerate(shape))
        assert 1 + 4 * scales / math.prod(shape) <= 4 * 0.28, (shape, blocked)


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased(fixed_rng: np.random.Generator) -> None:
    """Each number becomes one of its two neighbors, and the mean over the keys is the number itself."""
    x = jnp.asarray(fixed_rng.normal(size=(16, 16)), jnp.float32)
    for book in BOOKS:
        leaf = jnp.abs(x) if book is jq.optim.logarithmic else x
        spec = complete_spec(book, x.shape)
        draw = functools.partial(quantize_leaf, function="test", spec=spec)
        keys = jax.random.split(jax.random.key(3), 400)
        values = np.asarray(jax.vmap(lambda key, draw=draw, leaf=leaf: draw(leaf, key).dequantize())(keys), np.float64)
        error = values.mean(0) - np.asarray(leaf, np.float64)
        spread = values.std(0) / 20 + 1e-6 * float(jnp.max(leaf))
        assert (np.abs(error) < 6 * spread).all()
        assert max(len(np.unique(values[:, i, j])) for i in range(16) for j in range(16)) == 2
