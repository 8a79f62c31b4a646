"""The extremes of slices against numpy: NaN, infinities, zeros of both signs, denormals, short blocks, no data."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant._kernels import min_max

F32 = np.float32
SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40)
# Shapes of x and of its ranges, and a block size: each layout that a reduction of its own computes.
CASES = {
    "the whole": ((40, 33), (1, 1), None),
    "rows": ((40, 33), (40, 1), None),
    "columns": ((70, 33), (1, 33), None),
    "long columns": ((2500, 3), (1, 3), None),
    "a middle dimension": ((3, 5, 40), (1, 5, 1), None),
    "the last dimension of four": ((2, 5, 7, 6), (1, 1, 1, 6), None),
    "the first and the last of three": ((4, 30, 6), (4, 1, 6), None),
    "the second and the last of four": ((3, 5, 30, 6), (1, 5, 1, 6), None),
    "every element": ((4, 5), (4, 5), None),
    "dimensions of 1": ((9, 1, 5, 1), (1, 1, 5, 1), None),
    "blocks of rows": ((64, 6), (8, 6), 8),
    "blocks of columns": ((6, 64), (6, 8), 8),
    "short blocks of rows": ((70, 6), (9, 6), 8),
    "short blocks of columns": ((6, 70), (6, 9), 8),
    "blocks of both": ((20, 21), (3, 3), 8),
    "equal blocks of no stated size": ((6, 12), (1, 4), None),
    "one element": ((1,), (1,), None),
    "no rows": ((0, 3), (1, 3), None),
    "no columns": ((3, 0), (3, 1), None),
}


def split_slices(x: np.ndarray, shape: tuple[int, ...], block: int | None) -> dict[tuple[int, ...], np.ndarray]:
    sizes = [n if m == 1 else (1 if m == n else block or n // m) for n, m in zip(x.shape, shape, strict=True)]
    slices = {}
    for index in np.ndindex(*shape):
        box = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        slices[index] = x[box].ravel()
    return slices


def order(x: np.ndarray) -> np.ndarray:
    """Return integers that sort as the floats do, with -0 below 0, which no comparison of floats can tell apart."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits - 1, bits)


def expect(x: np.ndarray, shape: tuple[int, ...], block: int | None) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.full(shape, np.inf, F32), np.full(shape, -np.inf, F32)
    for index, members in split_slices(x, shape, block).items():
        if np.isnan(members).any():
            low[index] = high[index] = np.nan
        elif members.size:
            low[index], high[index] = members[order(members).argmin()], members[order(members).argmax()]
    return low, high


def spoil(shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(F32)
    for special in SPECIAL if x.size > 1 else ():
        x.reshape(-1)[rng.integers(x.size, size=max(1, x.size // 100))] = special
    return x


def assert_same_bits(result: jax.Array, expected: np.ndarray) -> None:
    actual = np.asarray(result)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[is_number].view(np.int32), expected[is_number].view(np.int32))


@pytest.mark.parametrize("name", CASES)
def test_extremes_have_the_bits_of_numpys(name: str) -> None:
    shape, ranges, block = CASES[name]
    functions = (min_max.compute_extremes, min_max.compute_signed_extremes, min_max.compute_magnitudes)
    find = jax.jit(lambda x: [function(x, ranges, block) for function in functions])
    for seed in range(3):
        x = spoil(shape, seed)
        ends, signed, magnitudes = find(x)
        for actual, expected in zip(ends, expect(x, ranges, block), strict=True):
            assert_same_bits(actual, expected)
        check_signed_extremes(signed, *expect(x, ranges, block))
        check_magnitudes(magnitudes, *expect(x, ranges, block))


def check_magnitudes(bits: jax.Array, low: np.ndarray, high: np.ndarray) -> None:
    """Check the bits of the largest magnitude of each slice; a slice without elements has 0."""
    assert bits.shape == tuple(n for n in low.shape if n != 1)
    actual, has_nan = np.asarray(bits).reshape(low.shape), np.isnan(low)
    assert (actual[has_nan] > F32(np.inf).view(np.int32)).all()
    expected = np.where(low > high, F32(0), np.maximum(np.abs(low), np.abs(high)))
    np.testing.assert_array_equal(actual[~has_nan], expected.view(np.int32)[~has_nan])


def check_signed_extremes(signed: tuple[jax.Array, ...], low: np.ndarray, high: np.ndarray) -> None:
    """Check the extremes of each slice and of -0 and 0, and the bits of the larger magnitude."""
    kept = tuple(n for n in low.shape if n != 1)
    low, high, bits = low.reshape(kept), high.reshape(kept), np.asarray(signed[2])
    assert all(part.shape == kept for part in signed)
    is_number = ~np.isnan(low)
    assert (bits[~is_number] > F32(np.inf).view(np.int32)).all()
    least = np.where(order(low) < -1, low, F32(-0.0))[is_number]
    most = np.where(order(high) > 0, high, F32(0))[is_number]
    for actual, expected in zip(signed, (least, most), strict=False):
        np.testing.assert_array_equal(np.asarray(actual)[is_number].view(np.int32), expected.view(np.int32))
    magnitudes = np.maximum(np.abs(least).view(np.int32), most.view(np.int32))
    np.testing.assert_array_equal(bits[is_number], magnitudes)


@pytest.mark.parametrize("special", SPECIAL)
def test_one_special_value_among_many(special: float) -> None:
    for shape, ranges in (((3000,), (1,)), ((300, 8), (1, 8)), ((8, 300), (8, 1))):
        x = np.full(shape, np.float32(special))
        x.reshape(-1)[: math.prod(shape) // 2] = 0.0
        for actual, expected in zip(jax.jit(min_max.compute_extremes, static_argnums=(1, 2))(x, ranges, None),
                             expect(x, ranges, None), strict=True):  # fmt: skip
            assert_same_bits(actual, expected)


def test_min_max_includes_zero() -> None:
    x = jnp.array([[1.0, -2.0, -0.0], [3.0, -4.0, -1e-40]])
    low, high = min_max.compute_min_max(x, (0,))
    np.testing.assert_array_equal(np.asarray(low).view(np.int32), np.array([0, -4, -1e-40], F32).view(np.int32))
    np.testing.assert_array_equal(np.asarray(high).view(np.int32), np.array([3, 0, 0], F32).view(np.int32))
    assert [float(end) for end in min_max.compute_min_max(jnp.zeros((0, 2)), (0, 1))] == [0.0, 0.0]


def test_members_of_short_blocks() -> None:
    counts = min_max.count_members(np.zeros((5, 7)), (1, 3), 3)
    np.testing.assert_array_equal(counts, [[15, 15, 5]])
