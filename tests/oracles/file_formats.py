"""The tensors of exchanged checkpoints in numpy: bytes and words to codes and scales, and to floats.

It is written from the descriptions of the formats, without jaxquant and without the packages that define them.
`tests/arrays/test_file_formats_packages.py` compares it with those packages that are installed.

A format has two functions: one draws the arrays of a file, with every code and with scales that are negative, zero and
subnormal where the format has them, and one decodes them. What is common to all formats is a NamedTuple, `Parts`:

    x = (codes - zero_point) * scale + offset
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
BF16, E4M3, E8M0 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
File = dict[str, np.ndarray]


class Parts(NamedTuple):
    """The numbers of a tensor.

    Attributes:
        codes: integers or small floats, of the logical shape. With a permutation: in the order of the groups.
        scale: floats of the rank of the codes, or the parts of a scale that is quantized itself.
        sizes: for each dimension, how many indices share an entry of the scale.
        bits: of a code.
        zero_point: integers aligned as the scale is, or floats (HQQ).
        offset: floats, or parts, aligned as the scale is.
        levels: what the codes are indices of.
        permutation: along `axis`, the logical index that each index of the codes holds.
        axis: the permuted axis, negative.
        divides: whether the formula divides by the scale.
    """

    codes: np.ndarray
    scale: np.ndarray | Parts
    sizes: tuple[int, ...]
    bits: int
    zero_point: np.ndarray | None = None
    offset: np.ndarray | Parts | None = None
    levels: tuple[float, ...] | None = None
    permutation: np.ndarray | None = None
    axis: int | None = None
    divides: bool = False


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of a file.

    Attributes:
        draw: from a generator, arrays as a file holds them.
        decode: from these arrays, their parts.
        dtypes: the dtypes that the producer's own code computes in.
        each_step: whether that code computes all in the dtype: it rounds the scales and after every operation.
        bits: of a weight in the file, where it is the same for all shapes; 0 otherwise.
    """

    draw: Callable[[np.random.Generator], File]
    decode: Callable[[File], Parts]
    dtypes: tuple[np.dtype, ...] = (F32,)
    each_step: bool = False
    bits: float = 0


# The formula.


def expand(part: np.ndarray, sizes: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Return a part with each entry repeated for the elements that share it; the last block may be shorter."""
    for axis, size in enumerate(sizes):
        part = np.repeat(part, min(size, shape[axis]), axis=axis)
    return part[tuple(slice(n) for n in shape)]


def compute_values(parts: Parts, dtype: np.dtype = F32, *, each_step: bool = False) -> np.ndarray:
    """Return the floats. The product and the sum are rounded to float32, and the result to `dtype`.

    With `each_step`, the scale, the zero point and the offset are rounded to `dtype`, and each operation. float32 has
    more than twice the bits of the 16-bit floats and two more, so that rounding twice is the same as rounding once.
    """

    def finish(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(F32) if each_step else x

    def widen(part: np.ndarray | Parts) -> np.ndarray:
        part = compute_values(part) if isinstance(part, Parts) else part
        return expand(finish(part.astype(F32)), parts.sizes, parts.codes.shape)

    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.asarray(parts.levels, F32)[parts.codes] if parts.levels is not None else parts.codes.astype(F32)
        steps = steps if parts.zero_point is None else finish(steps - widen(parts.zero_point))
        scale = widen(parts.scale)
        x = finish(steps / scale if parts.divides else steps * scale)
        x = x if parts.offset is None else finish(x + widen(parts.offset))
        x = x.astype(dtype)
    if parts.permutation is None or parts.axis is None:
        return x
    return np.take(x, np.argsort(parts.permutation), axis=parts.axis)


# Bits.


def unpack(data: np.ndarray, bits: int, length: int | None = None) -> np.ndarray:
    """Return the codes of a dense stream of bits along the last axis, least significant bit first, uint8."""
    stream = np.unpackbits(data.copy(order="C").view(np.uint8), axis=-1, bitorder="little")
    count = stream.shape[-1] // bits if length is None else length
    groups = stream[..., : count * bits].reshape(*stream.shape[:-1], count, bits)
    return (groups << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def pack(codes: np.ndarray, bits: int, word: Any = np.uint32) -> np.ndarray:
    """Return codes as a dense stream of bits in words; the inverse of `unpack`."""
    stream = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1)
    width = 8 * np.dtype(word).itemsize
    stream = np.pad(stream, [(0, 0)] * (codes.ndim - 1) + [(0, -stream.shape[-1] % width)])
    return np.packbits(stream, axis=-1, bitorder="little").copy(order="C").view(word)


def nibbles(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and the high four bits of bytes."""
    return data & 15, data >> 4


def draw_codes(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return codes in which each code occurs, uint8."""
    codes = rng.integers(0, 2**bits, shape)
    every = np.arange(min(2**bits, codes.size))
    codes.reshape(-1)[rng.permutation(codes.size)[: every.size]] = every
    return codes.astype(np.uint8)


def draw_scales(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype = F16, *, signed: bool = True
) -> np.ndarray:
    """Return scales of all magnitudes: positive ones, and for `signed` also negative ones and zeros of both signs.

    Among those of float16 are subnormal numbers. Of float32 and bfloat16 there are none: XLA:CPU takes them for zero.
    """
    scale = np.exp(rng.uniform(-12, 5, shape))
    if dtype == F16:
        scale = np.where(rng.random(shape) < 0.1, 2.0**-24 * rng.integers(1, 1024, shape), scale)
    if signed:
        scale = scale * rng.choice([-1, 1], shape)
        scale = np.where(rng.random(shape) < 0.1, rng.choice([-0.0, 0.0], shape), scale)
    return scale.astype(dtype)


# GGUF: rows of blocks of bytes, with float16 numbers in little endian. (rows, bytes of a row)


_ROWS = (3, 5)
_SUPER = 256


def _read_halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2").astype(F16)


def _blocks(data: np.ndarray, size: int) -> np.ndarray:
    """Return the bytes of each block: (rows, blocks, size)."""
    return data.reshape(data.shape[0], -1, size)


def _rows(part: np.ndarray) -> np.ndarray:
    """Return the numbers of the blocks of a row behind each other."""
    return part.reshape(part.shape[0], -1)


def _split_halves(data: np.ndarray) -> np.ndarray:
    """Return four bits of each element: byte j of a block has element j and, high, element j + half."""
    return np.concatenate(nibbles(data), axis=-1)


def draw_blocks(rng: np.random.Generator, size: int, halves: tuple[int, ...], count: int) -> File:
    """Return random bytes, in which the 16-bit words that start at `halves` in a block are scales."""
    data = rng.integers(0, 256, (_ROWS[0], count, size)).astype(np.uint8)
    for start in halves:
        scale = draw_scales(rng, data.shape[:2], F16)
        data[..., start : start + 2] = scale[..., None].view(np.uint8)
    return {"data": data.reshape(_ROWS[0], -1)}


def decode_q4_0(file: File) -> Parts:
    """x = (q - 8) d."""
    block = _blocks(file["data"], 18)
    codes = _split_halves(block[..., 2:]).astype(np.int8) - 8
    return Parts(_rows(codes), _rows(_read_halves(block[..., :2])), (1, 32), 4)


def decode_q4_1(file: File) -> Parts:
    """x = q d + m."""
    block = _blocks(file["data"], 20)
    scale, offset = (_rows(_read_halves(block[..., i : i + 2])) for i in (0, 2))
    return Parts(_rows(_split_halves(block[..., 4:])), scale, (1, 32), 4, offset=offset)


def decode_q5_0(file: File) -> Parts:
    """x = (q - 16) d. Bit j of 32 is the fifth bit of element j."""
    block = _blocks(file["data"], 22)
    codes = _split_halves(block[..., 6:]) + 16 * unpack(block[..., 2:6], 1)
    return Parts(_rows(codes.astype(np.int8) - 16), _rows(_read_halves(block[..., :2])), (1, 32), 5)


def decode_q5_1(file: File) -> Parts:
    """x = q d + m."""
    block = _blocks(file["data"], 24)
    scale, offset = (_rows(_read_halves(block[..., i : i + 2])) for i in (0, 2))
    codes = _split_halves(block[..., 8:]) + 16 * unpack(block[..., 4:8], 1)
    return Parts(_rows(codes), scale, (1, 32), 5, offset=offset)


def decode_q8_0(file: File) -> Parts:
    """x = q d."""
    block = _blocks(file["data"], 34)
    return Parts(_rows(block[..., 2:].view(np.int8)), _rows(_read_halves(block[..., :2])), (1, 32), 8)


def _pairs_of_bits(data: np.ndarray) -> np.ndarray:
    """Return the two bits of each element of a super-block, of 64 bytes.

    Each half of it has 32 bytes; bits 2k and 2k + 1 of byte i are those of element 32 k + i of the half.
    """
    halves = data.reshape(*data.shape[:-1], 2, 1, 32)
    pairs = (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    return pairs.reshape(*data.shape[:-1], _SUPER)


def _planes(data: np.ndarray) -> np.ndarray:
    """Return a bit of each element: bit k of byte i, of 32, is that of element 32 k + i."""
    bits = (data[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return bits.reshape(*data.shape[:-1], _SUPER)


def _six_bits(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and the eight minima, of 6 bits each, in 12 bytes."""
    first, second, third = (data[..., i : i + 4] for i in (0, 4, 8))
    low, high = nibbles(third)
    scales = np.concatenate([first & 63, low | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, high | (second >> 6) << 4], axis=-1)
    return scales, minima


def _nested(codes: np.ndarray, scale: np.ndarray, bits: int) -> Parts:
    """Return the parts of a scale whose codes have one float16 for each super-block."""
    return Parts(_rows(codes), _rows(scale), (1, codes.shape[-1]), bits)


def decode_q2_k(file: File) -> Parts:
    """x = (d sc) q - (dmin m), sc and m of 4 bits for each 16."""
    block = _blocks(file["data"], 84)
    sc, m = nibbles(block[..., :16])
    d, dmin = (_read_halves(block[..., i : i + 2]) for i in (80, 82))
    codes = _pairs_of_bits(block[..., 16:80])
    return Parts(_rows(codes), _nested(sc, d, 4), (1, 16), 2, offset=_nested(m, -dmin, 4))


def decode_q3_k(file: File) -> Parts:
    """x = d sc q, sc of 6 bits for each 16, less 32; q is less by 4 where the bit of the mask is not set."""
    block = _blocks(file["data"], 110)
    packed = block[..., 96:108]
    low = np.concatenate(nibbles(packed[..., :8]), axis=-1)
    high = np.concatenate([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    sc = (low | high << 4).astype(np.int8) - 32
    codes = _pairs_of_bits(block[..., 32:96]).astype(np.int8) - 4 * (1 - _planes(block[..., :32]).astype(np.int8))
    return Parts(_rows(codes), _nested(sc, _read_halves(block[..., 108:]), 6), (1, 16), 3)


def _four_bits_k(data: np.ndarray) -> np.ndarray:
    """Return the low four bits of each element: those of each 64 are in 32 bytes, the first 32 low."""
    groups = data.reshape(*data.shape[:-1], 4, 32)
    return np.stack(nibbles(groups), axis=-2).reshape(*data.shape[:-1], _SUPER)


def decode_q4_k(file: File) -> Parts:
    """x = (d sc) q - (dmin m), sc and m of 6 bits for each 32."""
    block = _blocks(file["data"], 144)
    d, dmin = (_read_halves(block[..., i : i + 2]) for i in (0, 2))
    sc, m = _six_bits(block[..., 4:16])
    codes = _four_bits_k(block[..., 16:])
    return Parts(_rows(codes), _nested(sc, d, 6), (1, 32), 4, offset=_nested(m, -dmin, 6))


def decode_q5_k(file: File) -> Parts:
    """As Q4_K, with a fifth bit."""
    block = _blocks(file["data"], 176)
    d, dmin = (_read_halves(block[..., i : i + 2]) for i in (0, 2))
    sc, m = _six_bits(block[..., 4:16])
    codes = _four_bits_k(block[..., 48:]) + 16 * _planes(block[..., 16:48])
    return Parts(_rows(codes), _nested(sc, d, 6), (1, 32), 5, offset=_nested(m, -dmin, 6))


def decode_q6_k(file: File) -> Parts:
    """x = d sc (q - 32), sc int8 for each 16. Each half has 64 bytes of low bits and 32 of high ones."""
    block = _blocks(file["data"], 210)
    low, high = nibbles(block[..., :128].reshape(*block.shape[:-1], 2, 64))
    codes = np.concatenate([low, high], axis=-1).reshape(*block.shape[:-1], _SUPER)
    codes = codes + 16 * _pairs_of_bits(block[..., 128:192])
    sc = np.ascontiguousarray(block[..., 192:208]).view(np.int8)
    return Parts(_rows(codes.astype(np.int8) - 32), _nested(sc, _read_halves(block[..., 208:]), 8), (1, 16), 6)


IQ4_NL_LEVELS = (-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_iq4_nl(file: File) -> Parts:
    """x = d table[q]."""
    block = _blocks(file["data"], 18)
    codes = _split_halves(block[..., 2:])
    return Parts(_rows(codes), _rows(_read_halves(block[..., :2])), (1, 32), 4, levels=IQ4_NL_LEVELS)


def decode_iq4_xs(file: File) -> Parts:
    """x = d sc table[q], sc of 6 bits for each 32, less 32."""
    block = _blocks(file["data"], 136)
    low = np.stack(nibbles(block[..., 4:8]), axis=-1).reshape(*block.shape[:-1], 8)
    sc = (low | unpack(block[..., 2:4], 2) << 4).astype(np.int8) - 32
    codes = _rows(_split_halves(block[..., 8:].reshape(*block.shape[:-1], 8, 16)))
    return Parts(codes, _nested(sc, _read_halves(block[..., :2]), 6), (1, 32), 4, levels=IQ4_NL_LEVELS)


def decode_tq2_0(file: File) -> Parts:
    """x = (q - 1) d."""
    block = _blocks(file["data"], 66)
    codes, scale = _rows(_pairs_of_bits(block[..., :64])), _rows(_read_halves(block[..., 64:]))
    return Parts(codes, scale, (1, 256), 2, zero_point=np.ones(scale.shape, np.uint8))


def draw_gguf_mxfp4(rng: np.random.Generator) -> File:
    """Return bytes with scales from 2**-124 to 2**125: a product is then no subnormal and no infinite float32."""
    data = rng.integers(0, 256, (_ROWS[0], _ROWS[1], 17)).astype(np.uint8)
    data[..., 0] = np.maximum(data[..., 0] % 253, 3)
    return {"data": data.reshape(_ROWS[0], -1)}


def decode_gguf_mxfp4(file: File) -> Parts:
    """x = 2**(e - 127) e2m1[q]."""
    block = _blocks(file["data"], 17)
    return Parts(_rows(_split_halves(block[..., 1:])).view(E2M1), _rows(block[..., :1]).view(E8M0), (1, 32), 4)


def draw_gguf_nvfp4(rng: np.random.Generator) -> File:
    """Return bytes with scales that have no sign; 127 is not used."""
    data = rng.integers(0, 256, (_ROWS[0], _ROWS[1], 36)).astype(np.uint8)
    data[..., :4] %= 127
    return {"data": data.reshape(_ROWS[0], -1)}


def decode_gguf_nvfp4(file: File) -> Parts:
    """x = ue4m3 e2m1[q] for each 16, in blocks of 64. A scale of the whole tensor is a tensor of its own."""
    block = _blocks(file["data"], 36)
    codes = _split_halves(block[..., 4:].reshape(*block.shape[:-1], 4, 8))
    whole = np.ones((1, 1), F32)
    count = block.shape[1] * 4
    scale = Parts(_rows(block[..., :4]).view(E4M3), whole, (block.shape[0], count), 8)
    return Parts(_rows(codes).view(E2M1), scale, (1, 16), 4)


def _gguf(decode: Callable[[File], Parts], size: int, halves: tuple[int, ...], elements: int) -> Format:
    count = _ROWS[1] if elements == 32 else 2
    return Format(
        functools.partial(draw_blocks, size=size, halves=halves, count=count), decode, bits=8 * size / elements
    )


GGUF: dict[str, Format] = {
    "Q4_0": _gguf(decode_q4_0, 18, (0,), 32),
    "Q4_1": _gguf(decode_q4_1, 20, (0, 2), 32),
    "Q5_0": _gguf(decode_q5_0, 22, (0,), 32),
    "Q5_1": _gguf(decode_q5_1, 24, (0, 2), 32),
    "Q8_0": _gguf(decode_q8_0, 34, (0,), 32),
    "Q2_K": _gguf(decode_q2_k, 84, (80, 82), 256),
    "Q3_K": _gguf(decode_q3_k, 110, (108,), 256),
    "Q4_K": _gguf(decode_q4_k, 144, (0, 2), 256),
    "Q5_K": _gguf(decode_q5_k, 176, (0, 2), 256),
    "Q6_K": _gguf(decode_q6_k, 210, (208,), 256),
    "IQ4_NL": _gguf(decode_iq4_nl, 18, (0,), 32),
    "IQ4_XS": _gguf(decode_iq4_xs, 136, (0,), 256),
    "TQ2_0": _gguf(decode_tq2_0, 66, (64,), 256),
    "MXFP4": Format(draw_gguf_mxfp4, decode_gguf_mxfp4, bits=4.25),
    "NVFP4": Format(draw_gguf_nvfp4, decode_gguf_nvfp4, bits=4.5),
}


# GPTQ: (in, out). x = s[g_idx] (q - z[g_idx]).


def draw_gptq(
    rng: np.random.Generator, bits: int, *, in_features: int = 96, group: int = 32, act_order: bool = False,
    version: int = 1,
) -> File:  # fmt: skip
    """Return words with `qzeros` of z - 1 (version 1, where 0 wraps around) or of z (version 2)."""
    out_features = 32
    groups = -(-in_features // group)
    codes = draw_codes(rng, (in_features, out_features), bits)
    zeros = draw_codes(rng, (groups, out_features), bits)
    stored = (zeros.astype(np.int32) - (version == 1)) % 2**bits
    g_idx = np.arange(in_features) // group
    return {
        "qweight": pack(codes.T, bits).T.view(np.int32),
        "qzeros": pack(stored, bits).view(np.int32),
        "scales": draw_scales(rng, (groups, out_features), F16),
        "g_idx": (rng.permutation(g_idx) if act_order else g_idx).astype(np.int32),
    }


def decode_gptq(file: File, bits: int, version: int = 1, *, wraps: bool = True) -> Parts:
    """With `desc_act` the inputs of a group are anywhere; they are put next to each other, in their order.

    Of version 1, some kernels wrap z = 2**bits to 0, and some do not. Then the zero points are floats here.
    """
    g_idx, scales = file["g_idx"], file["scales"]
    codes = unpack(np.ascontiguousarray(file["qweight"].T).view(np.uint32), bits, len(g_idx)).T
    zeros = unpack(file["qzeros"].view(np.uint32), bits, scales.shape[1])
    zeros = zeros.astype(np.int32) + (version == 1)
    zeros = (zeros % 2**bits).astype(np.uint8) if wraps else zeros.astype(F16)
    group = int(np.bincount(g_idx).max())
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    is_moved = bool((np.diff(g_idx) < 0).any())
    parts = Parts(codes, scales, (group, 1), bits, zeros)
    return parts._replace(codes=codes[order], permutation=order, axis=-2) if is_moved else parts


# AWQ: (in, out), packed along the output, (q - z) s.


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def draw_awq(rng: np.random.Generator) -> File:
    """Return words of eight nibbles; nibble i is that of column [0, 2, 4, 6, 1, 3, 5, 7][i]."""
    codes, zeros = draw_codes(rng, (96, 32), 4), draw_codes(rng, (3, 32), 4)

    def shuffle(x: np.ndarray) -> np.ndarray:
        return pack(x.reshape(len(x), -1, 8)[..., _AWQ_ORDER].reshape(len(x), -1), 4).view(np.int32)

    return {"qweight": shuffle(codes), "qzeros": shuffle(zeros), "scales": draw_scales(rng, (3, 32), F16)}


def decode_awq(file: File) -> Parts:
    """x = (q - z) s."""

    def restore(words: np.ndarray) -> np.ndarray:
        eights = unpack(words.view(np.uint32), 4).reshape(len(words), -1, 8)
        return eights[..., np.argsort(_AWQ_ORDER)].reshape(len(words), -1)

    return Parts(restore(file["qweight"]), file["scales"], (32, 1), 4, restore(file["qzeros"]))


# compressed-tensors: (out, in).


def draw_packed(
    rng: np.random.Generator, bits: int, *, dtype: np.dtype = F32, in_features: int = 96, symmetric: bool = True
) -> File:
    """Return words of q + 2**(bits - 1), and zero points in the same way along the first axis."""
    shape, groups = (6, in_features), -(-in_features // 32)
    file = {
        "weight_packed": pack(draw_codes(rng, shape, bits), bits).view(np.int32),
        "weight_shape": np.array(shape),
        "weight_scale": draw_scales(rng, (6, groups), dtype),
    }
    if not symmetric:
        zeros = draw_codes(rng, (6, groups), bits)
        file["weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, bits).T).view(np.int32)
    return file


def decode_packed(file: File, bits: int) -> Parts:
    """x = (q - z) s."""
    rows, columns = (int(n) for n in file["weight_shape"])
    middle = 2 ** (bits - 1)
    codes = (unpack(file["weight_packed"].view(np.uint32), bits, columns).astype(np.int16) - middle).astype(np.int8)
    zeros = None
    if "weight_zero_point" in file:
        words = np.ascontiguousarray(file["weight_zero_point"].T).view(np.uint32)
        zeros = (unpack(words, bits, rows).T.astype(np.int16) - middle).astype(np.int8)
    return Parts(codes, file["weight_scale"], (1, 32), bits, zeros)


def draw_int8(rng: np.random.Generator) -> File:
    """Return int8 codes with a scale for each row."""
    return {
        "weight": draw_codes(rng, (6, 96), 8).view(np.int8),
        "weight_scale": draw_scales(rng, (6, 1), BF16, signed=False),
    }


def draw_fp8_blocks(rng: np.random.Generator, dtype: np.dtype = F32) -> File:
    """Return e4m3 codes with a scale for each 128 x 128; the last blocks are shorter. NaN is no code here."""
    codes = rng.integers(0, 255, (300, 200)).astype(np.uint8)
    codes = np.where(codes % 128 == 127, 0, codes).astype(np.uint8)
    return {"weight": codes.view(E4M3), "weight_scale": draw_scales(rng, (3, 2), dtype, signed=False)}


def decode_plain(file: File, sizes: tuple[int, int]) -> Parts:
    """x = q s."""
    return Parts(file["weight"], file["weight_scale"], sizes, 8)


def draw_nvfp4(rng: np.random.Generator) -> File:
    """Return e2m1 codes, low nibble first, with an e4m3 scale for each 16 and a float32 for all.

    The same arrays stand for the two conventions, of which one multiplies by the global scale and one divides.
    """
    scale = rng.integers(0, 127, (6, 4)).astype(np.uint8).view(E4M3)
    return {
        "weight_packed": pack(draw_codes(rng, (6, 64), 4), 4, np.uint8),
        "weight_scale": scale,
        "weight_global_scale": draw_scales(rng, (1,), F32, signed=False),
    }


def decode_nvfp4(file: File, *, divides: bool) -> Parts:
    """x = q (s * global), or x = q (s / global)."""
    codes, scale = unpack(file["weight_packed"], 4).view(E2M1), file["weight_scale"]
    whole = file["weight_global_scale"].reshape(1, 1)
    return Parts(codes, Parts(scale, whole, scale.shape, 8, divides=divides), (1, 16), 4)


def draw_mxfp4(rng: np.random.Generator) -> File:
    """Return the blocks and the scales of gpt-oss: (experts, rows, in / 32, 16), low nibble first."""
    return {
        "blocks": rng.integers(0, 256, (2, 4, 3, 16)).astype(np.uint8),
        "scales": rng.integers(10, 240, (2, 4, 3)).astype(np.uint8),
    }


def decode_mxfp4(file: File) -> Parts:
    """x = 2**(e - 127) e2m1[q]; x[:, ::2] are the gate's rows."""
    codes = unpack(file["blocks"], 4)
    codes = codes.reshape(*codes.shape[:2], -1)
    return Parts(codes.view(E2M1), file["scales"].view(E8M0), (1, 1, 32), 4)


# bitsandbytes: over the flattened tensor, high nibble first.


NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Sign and magnitude. Both codes of zero are 0.0 in the table of a file; some of the package's kernels return -0.0. Each
# number is rounded to float32, and so is the quotient.
_FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
FP4_LEVELS = tuple(float(np.float32(value) / np.float32(12)) for value in _FP4_TWELFTHS)


@functools.cache
def list_dynamic_levels() -> tuple[float, ...]:
    """Return the 256 levels of the second quantization: seven decades, in each the means of equal intervals.

    torch's linspace counts from both ends in float32, and rounds the product and the sum once.
    """
    levels = [0.0, 1.0]
    start, end = np.float32(0.1), np.float32(1)
    for decade in range(7):
        count = 2**decade
        step, index = float((end - start) / np.float32(count)), np.arange(count + 1)
        ends = np.where(index < (count + 1) // 2, start + step * index, end - step * (count - index)).astype(F32)
        means = (ends[:-1] + ends[1:]) / np.float32(2)
        scaled = [float(np.float32(10 ** (decade - 6)) * mean) for mean in means]
        levels += scaled + [-level for level in scaled]
    return tuple(sorted(levels))


def draw_bitsandbytes(rng: np.random.Generator, *, shape: tuple[int, int] = (8, 64), double: bool = False) -> File:
    """Return bytes; the quantized scales have nested blocks of 256."""
    count = -(-math.prod(shape) // 64)
    file = {"weight": pack(draw_codes(rng, (math.prod(shape),), 4).reshape(-1, 2)[:, ::-1].reshape(-1), 4, np.uint8)}
    file["shape"] = np.array(shape)
    if not double:
        return {**file, "absmax": np.abs(draw_scales(rng, (count,), F32))}
    return {
        **file,
        "absmax": draw_codes(rng, (count,), 8),
        "nested_absmax": draw_scales(rng, (-(-count // 256),), F32, signed=False),
        "nested_quant_map": np.asarray(list_dynamic_levels(), F32),
        "nested_offset": draw_scales(rng, (1,), F32, signed=False),
    }


def decode_bitsandbytes(file: File, levels: tuple[float, ...]) -> Parts:
    """x = table[q] absmax, absmax = map[a8] nested_absmax + offset.

    Blocks run over the flattened tensor. They are blocks of the tensor if 64 divides its rows, and the nested ones if
    256 scales are whole rows, or a row is whole nested blocks. Otherwise all parts have one dimension.
    """
    rows, columns = (int(n) for n in file["shape"])
    codes = unpack(file["weight"].reshape(-1), 4).reshape(-1, 2)[:, ::-1].reshape(-1)[: rows * columns]
    per_row = columns // 64
    is_flat = columns % 64 > 0 or ("nested_absmax" in file and 256 % per_row > 0 and per_row % 256 > 0)
    shape = (rows * columns,) if is_flat else (rows, columns)
    scale_shape = (-1,) if is_flat else (rows, per_row)
    sizes = (64,) if is_flat else (1, 64)
    scale: np.ndarray | Parts = file["absmax"].reshape(scale_shape)
    if "nested_absmax" in file:
        nested: tuple[int, ...] = (256,)
        if not is_flat:
            nested = (256 // per_row, per_row) if per_row <= 256 else (1, 256)
        nested_shape = (-1,) if is_flat else (-(-rows // nested[0]), -(-per_row // nested[-1]))
        offset = file["nested_offset"].reshape((1,) * len(sizes))
        scale = Parts(
            scale, file["nested_absmax"].reshape(nested_shape), nested, 8,
            offset=np.broadcast_to(offset, file["nested_absmax"].reshape(nested_shape).shape),
            levels=tuple(float(level) for level in file["nested_quant_map"]),
        )  # fmt: skip
    return Parts(codes.reshape(shape), scale, sizes, 4, levels=levels)


# MLX: (out, in), words of a dense stream, x = q s + b, rounded after the product and after the sum.


def draw_mlx(rng: np.random.Generator, bits: int, dtype: np.dtype = F32, group: int = 64) -> File:
    """Return words and float scales and biases."""
    shape = (4, 3 * group)
    scales = (rng.normal(size=(4, 3)) * np.exp(rng.uniform(-6, 2, (4, 3)))).astype(dtype)
    biases = (rng.normal(size=(4, 3)) * np.exp(rng.uniform(-2, 2, (4, 3)))).astype(dtype)
    scales[0, 0], biases[0, 1] = 0, 0
    return {"weight": pack(draw_codes(rng, shape, bits), bits), "scales": scales, "biases": biases}


def decode_mlx(file: File, bits: int) -> Parts:
    """x = q s + b."""
    group = file["weight"].shape[1] * 32 // bits // file["scales"].shape[1]
    return Parts(unpack(file["weight"], bits), file["scales"], (1, group), bits, offset=file["biases"])


def draw_mlx_floats(rng: np.random.Generator, mode: str) -> File:
    """Return words of small floats: mxfp4 and mxfp8 have e8m0 scales for each 32, nvfp4 e4m3 for each 16."""
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    codes = draw_codes(rng, (4, 96), bits)
    codes = np.where(codes % 128 == 127, 0, codes).astype(np.uint8) if bits == 8 else codes
    scales = rng.integers(0, 127, (4, 96 // group)) if mode == "nvfp4" else rng.integers(20, 230, (4, 96 // group))
    return {"weight": pack(codes, bits), "scales": scales.astype(np.uint8)}


def decode_mlx_floats(file: File, mode: str) -> Parts:
    """x = q s."""
    bits = 8 if mode == "mxfp8" else 4
    codes = unpack(file["weight"], bits).view(E4M3 if mode == "mxfp8" else E2M1)
    if mode == "nvfp4":
        scales = file["scales"].view(E4M3)
        scale: np.ndarray | Parts = Parts(scales, np.ones((1, 1), F32), scales.shape, 8)
        return Parts(codes, scale, (1, 16), bits)
    return Parts(codes, file["scales"].view(E8M0), (1, 32), bits)


# torchao: x = (q - 8) s + z, with a float z.


def draw_tinygemm(rng: np.random.Generator, dtype: np.dtype = BF16) -> File:
    """Return `Int4Tensor`: qdata (N, K / 2), low nibble first, two's complement; scale and zero point (K / g, N)."""
    return {
        "qdata": pack(draw_codes(rng, (6, 96), 4), 4, np.uint8),
        "scale": draw_scales(rng, (3, 6), dtype, signed=False),
        "zero_point": draw_scales(rng, (3, 6), dtype),
    }


def decode_tinygemm(file: File) -> Parts:
    """x = q s + z; the unsigned code of the tinygemm layout is q + 8."""
    codes = ((unpack(file["qdata"], 4) ^ 8).astype(np.int8) - 8).astype(np.int8)
    return Parts(
        codes, np.ascontiguousarray(file["scale"].T), (1, 32), 4, offset=np.ascontiguousarray(file["zero_point"].T)
    )


# HQQ: x = (q - z) s with a float z, rounded after both.


def draw_hqq(rng: np.random.Generator, bits: int, *, axis: int = 1, dtype: np.dtype = F16, group: int = 32) -> File:
    """Return codes split along the first axis: the first of n parts is in the highest bits."""
    rows, columns = 64, 96
    shape = (rows * columns // group, group) if axis == 1 else (group, rows * columns // group)
    codes = draw_codes(rng, shape, bits)
    scale_shape = (shape[0], 1) if axis == 1 else (1, shape[1])
    if bits == 3:
        codes = np.pad(codes, [(0, -shape[0] % 10), (0, 0)])
        runs = codes.reshape(10, -1, shape[1]).astype(np.int32)
        packed = (runs << np.arange(27, -1, -3, dtype=np.int32)[:, None, None]).sum(axis=0, dtype=np.int32)
    else:
        runs = codes.reshape(8 // bits, -1, shape[1])
        shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)[:, None, None]
        packed = (runs << shifts).sum(axis=0, dtype=np.uint8)
    return {
        "W_q": packed,
        "scale": draw_scales(rng, scale_shape, dtype, signed=False),
        "zero": rng.uniform(-1, 2**bits, scale_shape).astype(dtype),
        "shape": np.array([rows, columns]),
    }


def decode_hqq(file: File, bits: int, *, axis: int = 1) -> Parts:
    """With axis=0 the rows of a group lie rows / group apart, and are put next to each other."""
    rows, columns = (int(n) for n in file["shape"])
    packed = file["W_q"]
    shifts = np.arange(27, -1, -3) if bits == 3 else np.arange(8 - bits, -1, -bits)
    codes = np.concatenate([(packed >> shift.astype(packed.dtype)) & (2**bits - 1) for shift in shifts])
    codes = codes.astype(np.uint8).reshape(-1, packed.shape[1])
    if axis == 1:
        group = packed.shape[1]
        codes = codes.reshape(-1)[: rows * columns].reshape(rows, columns)
        scale, zero = (file[name].reshape(rows, -1) for name in ("scale", "zero"))
        return Parts(codes, scale, (1, group), bits, zero)
    group = rows * columns // packed.shape[1]
    runs = rows // group
    scale, zero = (file[name].reshape(runs, columns) for name in ("scale", "zero"))
    order = np.arange(rows).reshape(group, runs).T.reshape(-1).astype(np.int32)
    codes = codes[:group].reshape(rows, columns)[order]
    return Parts(codes, scale, (group, 1), bits, zero, permutation=order, axis=-2)


# Gemma's JAX checkpoints: x = q / s.


def draw_multiplier(rng: np.random.Generator) -> File:
    """Return int8 codes and a multiplier for each column."""
    return {
        "weight": draw_codes(rng, (32, 24), 8).view(np.int8),
        "scale": draw_scales(rng, (1, 24), F32, signed=False),
    }


def decode_multiplier(file: File) -> Parts:
    """x = q / s."""
    return Parts(file["weight"], file["scale"], (32, 1), 8, divides=True)


def list_formats() -> dict[str, Format]:
    """Return all formats by name."""
    part = functools.partial
    formats = {f"GGUF {name}": row for name, row in GGUF.items()}
    half = (F32, F16)
    for bits in (2, 3, 4, 8):
        for version in (1, 2):
            formats[f"GPTQ {bits} bits, version {version}"] = Format(
                part(draw_gptq, bits=bits, version=version), part(decode_gptq, bits=bits, version=version), half
            )
    formats |= {
        "GPTQ desc_act": Format(part(draw_gptq, bits=4, act_order=True), part(decode_gptq, bits=4), half),
        "GPTQ with a rest": Format(part(draw_gptq, bits=4, in_features=80), part(decode_gptq, bits=4), half),
        "GPTQ desc_act with a rest": Format(
            part(draw_gptq, bits=8, in_features=80, act_order=True), part(decode_gptq, bits=8), half
        ),
        "GPTQ zero points of 16": Format(part(draw_gptq, bits=4), part(decode_gptq, bits=4, wraps=False), half),
        "AWQ": Format(draw_awq, decode_awq, half),
    }
    for bits in (2, 3, 4, 5, 6, 7, 8):
        dtype = (F32, BF16, F16)[bits % 3]
        formats[f"compressed-tensors {bits} bits"] = Format(
            part(draw_packed, bits=bits, dtype=dtype, symmetric=bits % 2 == 0, in_features=480 - bits),
            part(decode_packed, bits=bits), (dtype,),
        )  # fmt: skip
    formats |= {
        "compressed-tensors int8": Format(draw_int8, part(decode_plain, sizes=(1, 96)), (BF16, F32)),
        "fp8 in blocks": Format(draw_fp8_blocks, part(decode_plain, sizes=(128, 128)), (F32, BF16)),
        "fp8 in blocks, bfloat16 scales": Format(
            part(draw_fp8_blocks, dtype=BF16), part(decode_plain, sizes=(128, 128)), (BF16,)
        ),
        "NVFP4 of ModelOpt": Format(draw_nvfp4, part(decode_nvfp4, divides=False), (F32, BF16)),
        "NVFP4 of compressed-tensors": Format(draw_nvfp4, part(decode_nvfp4, divides=True), (F32, BF16)),
        "MXFP4": Format(draw_mxfp4, decode_mxfp4, (F32, BF16)),
    }
    all_dtypes = (F32, F16, BF16)
    for name, levels in (("nf4", NF4_LEVELS), ("fp4", FP4_LEVELS)):
        for shape in ((8, 64), (40, 1024), (5, 50), (3, 64 * 5)):
            for double in (False, True):
                text = f"bitsandbytes {name} {shape[0]} x {shape[1]}{', double' if double else ''}"
                draw = part(draw_bitsandbytes, shape=shape, double=double)
                formats[text] = Format(draw, part(decode_bitsandbytes, levels=levels), all_dtypes)
    for bits in (2, 3, 4, 5, 6, 8):
        for dtype in all_dtypes:
            draw = part(draw_mlx, bits=bits, dtype=dtype, group=(32, 64, 128)[bits % 3])
            formats[f"MLX {bits} bits, {dtype.name}"] = Format(
                draw, part(decode_mlx, bits=bits), (dtype,), each_step=True
            )
    for mode in ("mxfp4", "mxfp8", "nvfp4"):
        draw, decode = part(draw_mlx_floats, mode=mode), part(decode_mlx_floats, mode=mode)
        formats[f"MLX {mode}"] = Format(draw, decode, all_dtypes, each_step=True)
    for dtype in (BF16, F32):
        formats[f"torchao Int4Tensor, {dtype.name}"] = Format(
            part(draw_tinygemm, dtype=dtype), decode_tinygemm, (F32, dtype), each_step=True
        )
    for bits in (1, 2, 3, 4, 8):
        for axis in (0, 1):
            for dtype in all_dtypes[bits % 2 :: 2]:
                formats[f"HQQ {bits} bits, axis {axis}, {dtype.name}"] = Format(
                    part(draw_hqq, bits=bits, axis=axis, dtype=dtype), part(decode_hqq, bits=bits, axis=axis), (dtype,),
                    each_step=True,
                )  # fmt: skip
    formats["Gemma multiplier"] = Format(draw_multiplier, decode_multiplier)
    return formats


FORMATS = list_formats()
