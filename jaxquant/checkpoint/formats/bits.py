"""Codes of 1 to 8 bits in bytes and words, in numpy: the dense streams of bits that most formats of files have.

The first code is in the lowest bits of a stream; a code may cross the bytes and the words.
"""

from __future__ import annotations

import numpy as np


def unpack_bits(data: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return the codes of a stream along the last axis, uint8 of shape (..., length).

    Args:
        data: integers of any size, (..., n), whose bytes in memory are the stream.
        bits: the bits of a code, 1 to 8.
        length: the number of codes; the stream must have as many.
    """
    # A last dimension of one element counts as contiguous to numpy, whatever its stride.
    is_dense = data.flags.c_contiguous and (data.ndim == 0 or data.strides[-1] == data.itemsize)
    stream = (data if is_dense else data.copy(order="C")).view(np.uint8)
    lead = stream.shape[:-1]
    if bits == 8:
        return stream[..., :length].copy()
    mask = np.uint8(2**bits - 1)
    if 8 % bits == 0:
        codes = np.empty((*stream.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            np.bitwise_and(stream >> np.uint8(bits * i), mask, out=codes[..., i])
        return codes.reshape(*lead, -1)[..., :length]
    # Eight codes take `bits` bytes, which fit in a word of 64 bits.
    groups = -(-length // 8)
    padded = np.zeros((*lead, groups, 8), np.uint8)
    whole = np.zeros((*lead, groups * bits), np.uint8)
    count = min(groups * bits, stream.shape[-1])
    whole[..., :count] = stream[..., :count]
    padded[..., :bits] = whole.reshape(*lead, groups, bits)
    words = padded.view("<u8")[..., 0]
    codes = np.empty((*lead, groups, 8), np.uint8)
    for i in range(8):
        codes[..., i] = (words >> np.uint64(bits * i)).astype(np.uint8) & mask
    return codes.reshape(*lead, groups * 8)[..., :length]


def pack_bits(codes: np.ndarray, bits: int, dtype: np.dtype | type) -> np.ndarray:
    """Return codes as a stream along the last axis; the inverse of `unpack_bits`.

    Args:
        codes: uint8, (..., length), each of which `bits` hold.
        bits: the bits of a code, 1 to 8.
        dtype: the dtype of the integers of the result. The unused bits of the last one are 0.
    """
    lead, length = codes.shape[:-1], codes.shape[-1]
    size = np.dtype(dtype).itemsize
    count = -(-length * bits // (8 * size)) * size
    stream = np.zeros((*lead, count), np.uint8)
    if 8 % bits == 0:
        each = 8 // bits
        padded = np.zeros((*lead, count * each), np.uint8)
        padded[..., :length] = codes
        padded = padded.reshape(*lead, count, each)
        for i in range(each):
            stream |= padded[..., i] << np.uint8(bits * i)
        return stream.view(dtype)
    groups = -(-length // 8)
    padded = np.zeros((*lead, groups * 8), np.uint8)
    padded[..., :length] = codes
    padded = padded.reshape(*lead, groups, 8)
    words = np.zeros((*lead, groups), "<u8")
    for i in range(8):
        words |= padded[..., i].astype(np.uint64) << np.uint64(bits * i)
    data = np.ascontiguousarray(words[..., None].view(np.uint8)[..., :bits]).reshape(*lead, groups * bits)
    used = min(count, groups * bits)
    stream[..., :used] = data[..., :used]
    return stream.view(dtype)


def swap_nibbles(data: np.ndarray) -> np.ndarray:
    """Return bytes with their high and their low four bits exchanged."""
    return (data << np.uint8(4)) | (data >> np.uint8(4))


def unpack_rows(words: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return the codes of streams along the last axis but one, uint8 of shape (..., length, columns).

    Args:
        words: uint32 or int32, (..., n, columns).
        bits: the bits of a code, 1 to 8.
        length: the number of codes in a column.
    """
    words = words.view(np.uint32)
    if 32 % bits:
        columns = unpack_bits(np.ascontiguousarray(np.swapaxes(words, -1, -2)), bits, length)
        return np.ascontiguousarray(np.swapaxes(columns, -1, -2))
    codes = np.empty((*words.shape[:-1], 32 // bits, words.shape[-1]), np.uint8)
    for i in range(32 // bits):
        codes[..., i, :] = (words >> np.uint32(bits * i)) & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-2], -1, words.shape[-1])[..., :length, :]


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes as streams along the last axis but one, in int32; the inverse of `unpack_rows`."""
    words = pack_bits(np.ascontiguousarray(np.swapaxes(codes, -1, -2)), bits, np.int32)
    return np.ascontiguousarray(np.swapaxes(words, -1, -2))
