"""The words of packed arrays in numpy, for files that are decoded row by row; the layout is `_kernels/words.py`'s."""

from __future__ import annotations

import numpy as np

_U8 = np.dtype(np.uint8)
# Of each number of bits: the bits of a code in the first plane and in the second one.
_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2)}


def pack_rows(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Write codes in words.

    Args:
        codes: uint8 [rows, n], whose lowest `bits` bits count; n is a multiple of 32.
        bits: 2 to 6.
        out: uint32 [rows, n * bits / 32].
    """
    low, high = _PLANES[bits]
    lanes = codes.reshape(len(codes), 32 // low, codes.shape[-1] * low // 32)
    first = lanes.shape[-1]
    _join(lanes & np.uint8(2**low - 1), low, out[:, :first])
    if high:
        units = np.zeros((len(codes), first), np.uint16 if high * lanes.shape[1] == 16 else np.uint8)
        _join((lanes >> low) & np.uint8(2**high - 1), high, units)
        count = 4 // units.itemsize
        _join(units.reshape(len(codes), count, first // count), 8 * units.itemsize, out[:, first:])


def _join(lanes: np.ndarray, width: int, out: np.ndarray) -> None:
    """Write lanes [rows, lanes, n] of `width` bits next to each other into unsigned integers [rows, n]."""
    out[:] = lanes[:, 0]
    for i in range(1, lanes.shape[1]):
        out |= lanes[:, i].astype(out.dtype) << out.dtype.type(width * i)


def unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes that `pack_rows` wrote, uint8 [rows, n], with zeros in the other bits."""
    low, high = _PLANES[bits]
    first = words.shape[-1] * low // bits
    codes = _split(words[:, :first], low, 32 // low)
    if high:
        lanes = 32 // low
        unit = np.dtype(f"u{high * lanes // 8}")
        units = _split(words[:, first:], 8 * unit.itemsize, 4 // unit.itemsize, unit).reshape(len(words), first)
        codes |= _split(units, high, lanes) << np.uint8(low)
    return codes.reshape(len(words), first * 32 // low)


def _split(words: np.ndarray, width: int, lanes: int, dtype: np.dtype = _U8) -> np.ndarray:
    """Return `width` bits of each lane of unsigned integers [rows, n]: [rows, lanes, n]."""
    out = np.empty((len(words), lanes, words.shape[-1]), dtype)
    for i in range(lanes):
        out[:, i] = (words >> words.dtype.type(width * i)) & words.dtype.type(2**width - 1)
    return out
