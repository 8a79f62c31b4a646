"""Codes of 2 to 6 bits in words, by Python integers and without jaxquant, from the text of `_kernels/words.py`."""

from __future__ import annotations

import math

import numpy as np

PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2)}


def count_words(length: int, bits: int) -> tuple[int, int]:
    """Return the numbers of words in the two planes of a row."""
    low, high = PLANES[bits]
    first = math.ceil(length / (32 // low))
    return first, math.ceil(first * (32 // low) * high / 32)


def write_row(codes: list[int], bits: int) -> list[int]:
    """Return the words of a row of codes."""
    low, high = PLANES[bits]
    first, second = count_words(len(codes), bits)
    unit = high * (32 // low)
    words = [0] * (first + second)
    for index, code in enumerate(codes):
        pattern = code % 2**bits  # two's complement
        lane, word = divmod(index, first)
        words[word] += (pattern % 2**low) << (low * lane)
        if high:
            turn, other = divmod(word, second)
            words[first + other] += (pattern >> low) << (unit * turn + high * lane)
    return words


def write(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the words of an array of codes, along its last dimension."""
    rows = codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1]).tolist()
    words = np.array([write_row(row, bits) for row in rows], np.uint32)
    return words.reshape(*codes.shape[:-1], sum(count_words(codes.shape[-1], bits)))


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
