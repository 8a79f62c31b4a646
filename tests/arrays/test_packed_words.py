"""Codes in uint32 words: every code of every width, in rows of any length, and under transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxquant._kernels import words

from ..oracles import words_text

FORMATS = [(bits, signed) for bits in range(2, 7) for signed in (True, False)]
IDS = [f"{'' if signed else 'u'}int{bits}" for bits, signed in FORMATS]
SHAPES = [(1,), (31,), (32,), (33,), (3, 64), (2, 70), (2, 3, 257), (2, 264), (512,), (1, 640), (2, 1, 2, 20)]
SHAPES += [(0,), (3, 0), (0, 5)]

pytestmark = pytest.mark.parametrize(("bits", "signed"), FORMATS, ids=IDS)


def draw(rng: np.random.Generator, shape: tuple[int, ...], bits: int, signed: bool) -> np.ndarray:
    """Return codes of a format."""
    codes = words_text.list_codes(bits, signed)
    return rng.integers(codes.start, codes.stop, shape).astype(np.int8 if signed else np.uint8)


def check_codes(packed: Any, codes: np.ndarray, bits: int, signed: bool) -> None:
    """Check that words are those of the text, and hold the codes."""
    np.testing.assert_array_equal(np.asarray(packed), words_text.write(codes, bits))
    unpacked = words.unpack_words(packed, bits, codes.shape[-1], signed=signed)
    assert unpacked.dtype == codes.dtype
    np.testing.assert_array_equal(np.asarray(unpacked), codes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_follow_the_text(rng: np.random.Generator, bits: int, signed: bool, shape: tuple[int, ...]) -> None:
    codes = draw(rng, shape, bits, signed)
    check_codes(words.pack_words(jnp.asarray(codes), bits), codes, bits, signed)


def test_all_codes_in_all_positions(bits: int, signed: bool) -> None:
    every = np.array(words_text.list_codes(bits, signed), np.int8 if signed else np.uint8)
    codes = np.stack([np.resize(np.roll(every, shift), 96) for shift in range(len(every))])
    check_codes(words.pack_words(jnp.asarray(codes), bits), codes, bits, signed)


def test_transforms(rng: np.random.Generator, bits: int, signed: bool) -> None:
    codes = draw(rng, (4, 3, 45), bits, signed)

    def pack(x: jax.Array) -> jax.Array:
        return words.pack_words(x, bits)

    def unpack(x: jax.Array) -> jax.Array:
        return words.unpack_words(x, bits, 45, signed=signed)

    expected = words_text.write(codes, bits)
    for run in (jax.jit, jax.vmap, lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), None, x)[1]):
        np.testing.assert_array_equal(np.asarray(run(pack)(jnp.asarray(codes))), expected)
        np.testing.assert_array_equal(np.asarray(run(unpack)(jnp.asarray(expected))), codes)


def test_lanes_are_neighbors(rng: np.random.Generator, bits: int, signed: bool) -> None:
    codes = draw(rng, (2, 96), bits, signed)
    planes = words.split_words(words.pack_words(jnp.asarray(codes), bits), bits, 96)
    shape = words.find_shape(96, bits)
    arranged = codes.reshape(2, shape.tiles, shape.groups, shape.words, shape.parts, shape.lanes)
    low, *high = planes
    aligned: tuple[jax.Array, ...] = (low, *(words.align_parts(plane, low.shape, bits, axis=3) for plane in high))
    part = jnp.arange(shape.parts, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
    for lane in range(shape.lanes):
        expected = arranged[..., lane].transpose(0, 1, 3, 4, 2)
        for read in (
            words.read_lane(planes, bits, lane, lane, part, signed=signed),
            words.read_lane(aligned, bits, lane, lane, 0, signed=signed),
        ):
            assert read.dtype == jnp.int32
            np.testing.assert_array_equal(np.asarray(read), expected)
    lanes = jnp.arange(shape.lanes, dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1)
    spread = part.reshape(1, 1, 1, 1, -1, 1)
    read = words.read_lane(words.spread_lanes(planes), bits, lanes, lanes, spread, signed=signed)
    np.testing.assert_array_equal(np.asarray(read), arranged)
    row = np.arange(96, dtype=np.float32)
    arranged_row = row.reshape(arranged.shape[1:]).transpose(4, 0, 2, 3, 1)
    np.testing.assert_array_equal(words.arrange_row(jnp.asarray(row), bits), arranged_row)


@pytest.mark.parametrize("length", [256, 257, 640, 1000, 4096])
def test_words_take_the_bits_of_the_codes(bits: int, signed: bool, length: int) -> None:
    least = length * bits / 32
    # The group at the end of a row may have up to a lane of unused bits in its words of low bits, and of high bits.
    assert words.count_words(length, bits) <= (least if length % 32 == 0 else least + 3)
    assert words.has_full_groups(length) == (length % 32 == 0)


def test_high_bits_of_wider_codes_are_dropped(rng: np.random.Generator, bits: int, signed: bool) -> None:
    codes = draw(rng, (40,), bits, signed).astype(np.int32)
    wide = codes + 2**bits * rng.integers(-3, 3, 40).astype(np.int32)
    np.testing.assert_array_equal(words.pack_words(jnp.asarray(wide), bits), words_text.write(codes, bits))
