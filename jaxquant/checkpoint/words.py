"""The words of packed arrays in numpy, for files that are decoded row by row; the layout is `_kernels/words.py`'s."""

from __future__ import annotations

import numpy as np

from .._kernels.words import find_shape

_U64 = np.dtype("<u8")


def pack_rows(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Write codes in words.

    Args:
        codes: uint8 [rows, n], whose lowest `bits` bits count; n is a multiple of 32.
        bits: 2 to 6.
        out: uint32 [rows, n * bits / 32].
    """
    size = find_shape(codes.shape[-1], bits)
    low = size.words * size.parts
    high = bits - low
    tiles = out.reshape(len(codes), size.tiles, bits, size.groups)  # a view, because rows are contiguous
    eights = np.ascontiguousarray(codes).view(_U64).reshape(len(codes), size.tiles, size.groups, low, size.lanes // 8)
    tiles[:, :, :low] = np.moveaxis(_join(_narrow(eights, low), 8 * low), -1, -2)
    if high:
        units = _join(_narrow(eights >> np.uint64(low), high), 8 * high)
        units = units.reshape(*units.shape[:-1], size.words, size.parts)
        tiles[:, :, low:] = np.moveaxis(_join(units, high * size.lanes), -1, -2)


def unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes that `pack_rows` wrote, uint8 [rows, n], with zeros in the other bits."""
    length = words.shape[-1] * 32 // bits
    size = find_shape(length, bits)
    low = size.words * size.parts
    high = bits - low
    tiles = np.moveaxis(words.reshape(len(words), size.tiles, bits, size.groups), -2, -1)
    eights = _widen(_split(tiles[..., :low].astype(_U64), 8 * low, size.lanes // 8), low)
    if high:
        units = _split(tiles[..., low:].astype(_U64), high * size.lanes, size.parts)
        units = units.reshape(*units.shape[:-2], low)
        eights |= _widen(_split(units, 8 * high, size.lanes // 8), high) << np.uint64(low)
    return eights.reshape(len(words), length // 8).view(np.uint8)


def _narrow(eights: np.ndarray, width: int) -> np.ndarray:
    """Return the lowest `width` bits of each of the eight bytes of uint64 next to each other."""
    eights = eights & _mask(width, 8)
    for size in (8, 16, 32):
        eights |= eights >> np.uint64(size - width)
        width *= 2
        eights &= _mask(width, 2 * size)
    return eights


def _widen(narrow: np.ndarray, width: int) -> np.ndarray:
    """Return the uint64 of which `_narrow` returns `narrow`, with zeros in the other bits."""
    for size in (32, 16, 8):
        bits = width * size // 8
        narrow = (narrow | (narrow << np.uint64(size - bits))) & _mask(bits, size)
    return narrow


def _mask(width: int, size: int) -> np.uint64:
    """Return the lowest `width` bits of every `size` bits."""
    return np.uint64(sum((2**width - 1) << first for first in range(0, 64, size)))


def _join(parts: np.ndarray, width: int) -> np.ndarray:
    """Return `width` bits of each element of the last dimension next to each other, without that dimension."""
    joined = parts[..., 0].copy()
    for i in range(1, parts.shape[-1]):
        joined |= parts[..., i] << np.uint64(width * i)
    return joined


def _split(joined: np.ndarray, width: int, count: int) -> np.ndarray:
    """Return what `_join` joined, with a last dimension of `count` elements."""
    parts = np.empty((*joined.shape, count), _U64)
    for i in range(count):
        parts[..., i] = (joined >> np.uint64(width * i)) & _mask(width, 64)
    return parts
