"""Blocks of codes as docs/optimizer-states.md describes them, in numpy with float64 distances."""

from __future__ import annotations

import itertools

import numpy as np

TINY = np.finfo(np.float32).tiny


def encode(levels: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The index of the level nearest to each float32 value, the lower one at a tie; subnormals are 0, NaN gives 0."""
    value = np.where(np.abs(value) < TINY, 0, value).astype(np.float64)
    clipped = np.clip(np.nan_to_num(value, nan=levels[0]), levels[0], levels[-1])
    distance = np.abs(clipped[..., None] - np.asarray(levels, np.float64))
    return distance.argmin(-1)  # the first of equal ones


def quantize(x: np.ndarray, levels: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The codes and the scales of float32 x in blocks of the given sizes; the levels reach to 1."""
    shape = tuple(-(-n // size) for n, size in zip(x.shape, sizes, strict=True))
    scale, codes = np.ones(shape, np.float32), np.zeros(x.shape, np.uint8)
    for place in itertools.product(*map(range, shape)):
        block = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))
        part = np.where(np.abs(x[block]) < TINY, np.float32(0), x[block])
        largest = np.float32(np.nan) if np.isnan(part).any() else np.abs(part).max()
        scale[place] = 1 if largest == 0 else largest
        with np.errstate(invalid="ignore"):
            code = encode(levels, (part / scale[place]).astype(np.float32))
        # A second moment that is not 0 does not become 0.
        codes[block] = np.where((code == 0) & (part > 0), 1, code) if levels[0] == 0 else code
    return codes, scale


def dequantize(codes: np.ndarray, scale: np.ndarray, levels: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """The float32 numbers of codes."""
    wide = scale
    for axis, size in enumerate(sizes):
        wide = np.repeat(wide, size, axis=axis)
    with np.errstate(invalid="ignore"):  # 0 * inf
        return np.asarray(levels, np.float32)[codes] * wide[tuple(slice(n) for n in codes.shape)]
