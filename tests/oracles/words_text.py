"""Codes of 2 to 6 bits in words, by Python integers and without jaxquant, from the text of `_kernels/words.py`."""

from __future__ import annotations

import math

import numpy as np

PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2)}


def count_words(length: int, bits: int) -> int:
    """Return the number of words of a row."""
    low, high = PLANES[bits]
    rest = length % 32
    return length // 32 * bits + math.ceil(rest * low / 32) + math.ceil(rest * high / 32)


def write_group(codes: list[int], bits: int) -> list[int]:
    """Return the words of a group of up to 32 codes: as many as a code has bits."""
    low, high = PLANES[bits]
    words = [0] * bits
    for index, code in enumerate(codes):
        pattern = code % 2**bits  # two's complement
        word, lane = divmod(index, 32 // low)
        words[word] += (pattern % 2**low) << (low * lane)
        if high:
            word, lane = divmod(index, 32 // high)
            words[low + word] += (pattern >> low) << (high * lane)
    return words


def write_row(codes: list[int], bits: int) -> list[int]:
    """Return the words of a row of codes."""
    low, high = PLANES[bits]
    full = len(codes) // 32
    groups = [write_group(codes[32 * i : 32 * i + 32], bits) for i in range(full)]
    tile = next(n for n in (16, 8, max(full, 1)) if full % n == 0)
    words = [groups[first + i][word] for first in range(0, full, tile) for word in range(bits) for i in range(tile)]
    rest, last = len(codes) % 32, write_group(codes[32 * full :], bits)
    return words + last[: math.ceil(rest * low / 32)] + last[low : low + math.ceil(rest * high / 32)]


def write(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the words of an array of codes, along its last dimension."""
    rows = codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1]).tolist()
    words = np.array([write_row(row, bits) for row in rows], np.uint32)
    return words.reshape(*codes.shape[:-1], count_words(codes.shape[-1], bits))


def list_codes(bits: int, signed: bool) -> range:
    """Return all codes of a format."""
    return range(-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else range(2**bits)


def quantize_blocks(
    x: np.ndarray, bits: int, signed: bool, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the codes, scales and zero points of blocks of the last axis, by the docstring of `quantize`, in float32.

    Signed formats are symmetric without their lowest code, and unsigned ones are asymmetric.
    """
    one = np.float32
    cut = x.reshape(*x.shape[:-1], -1, block)
    low, high = cut.min(-1, keepdims=True, initial=one(0)), cut.max(-1, keepdims=True, initial=one(0))
    most = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    width = np.maximum(-low, high) if signed else high - low
    scale = np.where(width == 0, one(1), width / one(most))
    steps = np.rint(cut / scale)
    if signed:
        return np.clip(steps, -most, most).astype(np.int8).reshape(x.shape), scale[..., 0], None
    point = np.rint(np.clip(-low / scale, one(0), one(most)))
    return (
        np.clip(steps + point, 0, most).astype(np.uint8).reshape(x.shape),
        scale[..., 0],
        point[..., 0].astype(np.uint8),
    )
