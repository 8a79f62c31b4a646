"""The types of GGUF's tensors: blocks of bytes to codes and scales, and back, in numpy.

A tensor is rows of blocks. A block has the codes of its elements in an order that suits vector instructions, and its
scales. Here codes are uint8 in the order of the elements, in two's complement if they are signed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..._arrays.spec import Codebook
from ..._core.dtypes import NARROW_BY_NAME, NarrowInteger

_F16 = np.dtype(np.float16)
_SUPER = 256
Parts = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type whose elements are codes.

    Attributes:
        name: GGUF's name.
        number: GGUF's number.
        fields: the bytes of a block, as a numpy type with fields.
        size: the number of elements of a block.
        held: what the codes are: a dtype, a narrow integer, or the dtype of a codebook's indices.
        read_codes: from blocks [n], unsigned codes [n, size].
        write_codes: into blocks, unsigned codes.
        read_scales: from blocks, the entries [n, k] of "scale", "offset", and of the scales of these, "scale.scale" and
            "offset.scale", where they are quantized themselves.
        write_scales: into blocks, these entries; raises ValueError for entries that the type does not hold.
        entries: how many entries of "scale" a block has.
        dtypes: the dtypes of these entries.
        codebook: the table that the codes index, or None.
        zero_point: the code of 0.0 in all blocks, or 0 if the arrays have no zero point.
    """

    name: str
    number: int
    fields: np.dtype
    size: int
    held: Any
    read_codes: Callable[[np.ndarray], np.ndarray]
    write_codes: Callable[[np.ndarray, np.ndarray], None]
    read_scales: Callable[[np.ndarray], Parts]
    write_scales: Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
    entries: int
    dtypes: Mapping[str, np.dtype]
    codebook: Codebook | None = None
    zero_point: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of a block."""
        return self.fields.itemsize

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self.held.bits if isinstance(self.held, NarrowInteger) else _BITS[np.dtype(self.held).name]

    @property
    def flip(self) -> int:
        """The bit that differs between the stored unsigned code and two's complement, or 0."""
        is_signed = self.held.signed if isinstance(self.held, NarrowInteger) else str(self.held) == "int4"
        return 1 << (self.bits - 1) if is_signed else 0


_BITS = {"uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int8": 8}


# The bits of codes.


def _read_halves(data: np.ndarray) -> np.ndarray:
    """Return four bits of each element: byte j of [n, groups, half] has the elements j, low, and j + half, high."""
    out = np.empty((*data.shape[:-1], 2, data.shape[-1]), np.uint8)
    np.bitwise_and(data, 15, out=out[..., 0, :])
    np.right_shift(data, 4, out=out[..., 1, :])
    return out.reshape(data.shape[0], -1)


def _write_halves(codes: np.ndarray, half: int) -> np.ndarray:
    """Return bytes [n, size / 2]; the inverse of `_read_halves` for groups of `half` bytes."""
    pairs = codes.reshape(codes.shape[0], -1, 2, half)
    return ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)).reshape(codes.shape[0], -1)


def _read_pairs(data: np.ndarray) -> np.ndarray:
    """Return two bits of each element of a super-block: bits 2k of byte i, of 32, have the element 32 k + i."""
    halves = data.reshape(data.shape[0], -1, 1, 32)
    return ((halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(data.shape[0], -1)


def _write_pairs(codes: np.ndarray) -> np.ndarray:
    quarters = (codes & 3).reshape(codes.shape[0], -1, 4, 32)
    quarters = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(quarters, axis=2).reshape(codes.shape[0], -1)


def _read_planes(data: np.ndarray) -> np.ndarray:
    """Return a bit of each element of a super-block: bit k of byte i, of 32, has the element 32 k + i."""
    bits = (data[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return bits.reshape(data.shape[0], _SUPER)


def _write_planes(bits: np.ndarray) -> np.ndarray:
    planes = bits.reshape(bits.shape[0], 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(planes, axis=1)


def _read_fifth(data: np.ndarray) -> np.ndarray:
    """Return 16 for each element whose bit of 32 is set."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def _read_simple(block: np.ndarray) -> np.ndarray:
    return _read_halves(block["qs"][:, None])


def _write_simple(block: np.ndarray, codes: np.ndarray) -> None:
    block["qs"] = _write_halves(codes, 16)


def _read_five(block: np.ndarray) -> np.ndarray:
    return _read_simple(block) | _read_fifth(block["qh"])


def _write_five(block: np.ndarray, codes: np.ndarray) -> None:
    _write_simple(block, codes)
    block["qh"] = np.packbits(codes >> 4, axis=-1, bitorder="little")


def _read_bytes(block: np.ndarray) -> np.ndarray:
    return block["qs"]


def _write_bytes(block: np.ndarray, codes: np.ndarray) -> None:
    block["qs"] = codes


def _read_q2(block: np.ndarray) -> np.ndarray:
    return _read_pairs(block["qs"])


def _write_q2(block: np.ndarray, codes: np.ndarray) -> None:
    block["qs"] = _write_pairs(codes)


# Of TQ1_0: the number of bytes, and of digits of base 3 in each, of which the first one is the highest.
_TERNARY = ((32, 5), (16, 5), (4, 4))
_POWERS = np.array([[1], [3], [9], [27], [81]], np.uint8)


def _read_ternary(block: np.ndarray) -> np.ndarray:
    """Return the digits: the k-th is what an 8-bit fraction times 3**k overflows by when it is tripled once more."""
    data, parts, start = np.concatenate([block["qs"], block["qh"]], axis=-1), [], 0
    for count, digits in _TERNARY:
        fractions = data[:, None, start : start + count] * _POWERS[:digits]
        parts.append((fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1))
        start += count
    codes = np.concatenate(parts, axis=-1)
    if not np.array_equal(_pack_ternary(codes), data):
        raise ValueError("bytes that the digits of TQ1_0 are written as, got others")
    return codes


def _pack_ternary(codes: np.ndarray) -> np.ndarray:
    parts, start = [], 0
    for count, digits in _TERNARY:
        groups = codes[:, start : start + count * digits].reshape(len(codes), digits, count)
        number = (groups * _POWERS[4 - np.arange(digits)]).sum(axis=1, dtype=np.uint16)
        parts.append(((number * np.uint32(256) + 242) // 243).astype(np.uint8))
        start += count * digits
    return np.concatenate(parts, axis=-1)


def _write_ternary(block: np.ndarray, codes: np.ndarray) -> None:
    _check_range("codes of TQ1_0", codes, 0, 2)
    data = _pack_ternary(codes)
    block["qs"], block["qh"] = data[:, :48], data[:, 48:]


def _read_q3(block: np.ndarray) -> np.ndarray:
    return _read_pairs(block["qs"]) | (_read_planes(block["hmask"]) << 2)


def _write_q3(block: np.ndarray, codes: np.ndarray) -> None:
    block["qs"] = _write_pairs(codes)
    block["hmask"] = _write_planes(codes >> 2)


def _read_q4(block: np.ndarray) -> np.ndarray:
    return _read_halves(block["qs"].reshape(-1, 4, 32))


def _write_q4(block: np.ndarray, codes: np.ndarray) -> None:
    block["qs"] = _write_halves(codes, 32)


def _read_q5(block: np.ndarray) -> np.ndarray:
    return _read_q4(block) | (_read_planes(block["qh"]) << 4)


def _write_q5(block: np.ndarray, codes: np.ndarray) -> None:
    _write_q4(block, codes)
    block["qh"] = _write_planes(codes >> 4)


def _read_q6(block: np.ndarray) -> np.ndarray:
    return _read_halves(block["ql"].reshape(-1, 2, 64)) | (_read_pairs(block["qh"]) << 4)


def _write_q6(block: np.ndarray, codes: np.ndarray) -> None:
    block["ql"] = _write_halves(codes, 64)
    block["qh"] = _write_pairs(codes >> 4)


def _read_groups(groups: int, half: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda block: _read_halves(block["qs"].reshape(-1, groups, half))


def _write_groups(half: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def write(block: np.ndarray, codes: np.ndarray) -> None:
        block["qs"] = _write_halves(codes, half)

    return write


# The scales.


def _column(part: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(part)[:, None]


def _negate(half: np.ndarray) -> np.ndarray:
    """Return float16 numbers with the other sign, NaN included."""
    return (np.ascontiguousarray(half).view(np.uint16) ^ np.uint16(0x8000)).view(_F16)


def _check_range(name: str, codes: np.ndarray, low: int, high: int) -> None:
    if codes.size and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(f"{name} from {low} to {high}, got {int(codes.min())} to {int(codes.max())}")


def _read_d(block: np.ndarray) -> Parts:
    return {"scale": _column(block["d"])}


def _write_d(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    block["d"] = parts["scale"][:, 0]


def _read_dm(block: np.ndarray) -> Parts:
    return {"scale": _column(block["d"]), "offset": _column(block["m"])}


def _write_dm(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    block["d"], block["m"] = parts["scale"][:, 0], parts["offset"][:, 0]


def _read_six(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and the eight minima, of 6 bits each, in 12 bytes."""
    first, second, third = (data[:, i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _read_six_d(block: np.ndarray) -> Parts:
    scales, minima = _read_six(block["scales"])
    minimum = _column(_negate(block["dmin"]))
    return {"scale": scales, "scale.scale": _column(block["d"]), "offset": minima, "offset.scale": minimum}


def _write_six_d(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    sc, m = parts["scale"], parts["offset"]
    _check_range("scales", sc, 0, 63)
    _check_range("offsets", m, 0, 63)
    block["d"], block["dmin"] = parts["scale.scale"][:, 0], _negate(parts["offset.scale"][:, 0])
    block["scales"][:, 0:4] = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    block["scales"][:, 4:8] = m[:, :4] | (m[:, 4:] >> 4 << 6)
    block["scales"][:, 8:12] = (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)


def _read_four_d(block: np.ndarray) -> Parts:
    scales, minimum = block["scales"], _column(_negate(block["dmin"]))
    return {"scale": scales & 15, "scale.scale": _column(block["d"]), "offset": scales >> 4, "offset.scale": minimum}


def _write_four_d(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    _check_range("scales", parts["scale"], 0, 15)
    _check_range("offsets", parts["offset"], 0, 15)
    block["d"], block["dmin"] = parts["scale.scale"][:, 0], _negate(parts["offset.scale"][:, 0])
    block["scales"] = parts["scale"] | (parts["offset"] << 4)


def _read_q3_scales(block: np.ndarray) -> Parts:
    data = block["scales"]
    low = np.concatenate([data[:, :8] & 15, data[:, :8] >> 4], axis=-1)
    high = np.concatenate([(data[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return {"scale": (low | (high << 4)).astype(np.int8) - np.int8(32), "scale.scale": _column(block["d"])}


def _write_q3_scales(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    _check_range("scales", parts["scale"], -32, 31)
    sc = (parts["scale"] + np.int8(32)).astype(np.uint8)
    block["d"] = parts["scale.scale"][:, 0]
    block["scales"][:, :8] = (sc[:, :8] & 15) | ((sc[:, 8:] & 15) << 4)
    high = (sc >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    block["scales"][:, 8:] = np.bitwise_or.reduce(high, axis=1)


def _read_q6_scales(block: np.ndarray) -> Parts:
    return {"scale": block["scales"], "scale.scale": _column(block["d"])}


def _write_q6_scales(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    block["d"], block["scales"] = parts["scale.scale"][:, 0], parts["scale"]


def _read_xs_scales(block: np.ndarray) -> Parts:
    low = np.stack([block["low"] & 15, block["low"] >> 4], axis=-1).reshape(-1, 8)
    high = (block["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    return {"scale": (low | (high << 4)).astype(np.int8) - np.int8(32), "scale.scale": _column(block["d"])}


def _write_xs_scales(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    _check_range("scales", parts["scale"], -32, 31)
    sc = (parts["scale"] + np.int8(32)).astype(np.uint8)
    block["d"] = parts["scale.scale"][:, 0]
    block["low"] = (sc[:, ::2] & 15) | ((sc[:, 1::2] & 15) << 4)
    high = (sc >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    block["high"] = np.bitwise_or.reduce(high, axis=1)


_E8M0, _E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)


def _read_e8m0(block: np.ndarray) -> Parts:
    return {"scale": _column(block["e"]).view(_E8M0)}


def _write_e8m0(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    block["e"] = parts["scale"].view(np.uint8)[:, 0]


def _read_e4m3(block: np.ndarray) -> Parts:
    _check_range("scales of NVFP4, which have no sign and no NaN: bytes", block["d"], 0, 126)
    return {"scale": np.ascontiguousarray(block["d"]).view(_E4M3)}


def _write_e4m3(block: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
    scale = parts["scale"].view(np.uint8)
    _check_range("scales of NVFP4, which have no sign and no NaN: bytes", scale, 0, 126)
    block["d"] = scale


# The table.


_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
_ONE: Mapping[str, np.dtype] = {"scale": _F16}
_TWO: Mapping[str, np.dtype] = {"scale": _F16, "offset": _F16}
_INT: Mapping[str, np.dtype] = {"scale": np.dtype(np.int8), "scale.scale": _F16}
_UNSIGNED: Mapping[str, np.dtype] = {
    "scale": np.dtype(np.uint8), "scale.scale": _F16, "offset": np.dtype(np.uint8), "offset.scale": _F16
}  # fmt: skip
IQ4_NL = Codebook(
    "iq4_nl", (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
)
_INT4, _UINT4, _UINT2 = np.dtype(jnp.int4), np.dtype(jnp.uint4), np.dtype(jnp.uint2)
_E2M1, _INT8 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(np.int8)
_NARROW = NARROW_BY_NAME


def _fields(*fields: tuple[Any, ...]) -> np.dtype:
    return np.dtype(list(fields))


BLOCK_TYPES: dict[str, BlockType] = {
    row.name: row
    for row in (
        BlockType(
            "Q4_0", 2, _fields(_D, ("qs", "u1", 16)), 32, _INT4, _read_simple, _write_simple, _read_d, _write_d, 1, _ONE
        ),
        BlockType(
            "Q4_1", 3, _fields(_D, _M, ("qs", "u1", 16)), 32, _UINT4, _read_simple, _write_simple, _read_dm, _write_dm,
            1, _TWO,
        ),
        BlockType(
            "Q5_0", 6, _fields(_D, ("qh", "u1", 4), ("qs", "u1", 16)), 32, _NARROW["int5"], _read_five, _write_five,
            _read_d, _write_d, 1, _ONE,
        ),
        BlockType(
            "Q5_1", 7, _fields(_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)), 32, _NARROW["uint5"], _read_five,
            _write_five, _read_dm, _write_dm, 1, _TWO,
        ),
        BlockType(
            "Q8_0", 8, _fields(_D, ("qs", "u1", 32)), 32, _INT8, _read_bytes, _write_bytes, _read_d, _write_d, 1, _ONE
        ),
        BlockType(
            "Q2_K", 10, _fields(("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN), 256, _UINT2, _read_q2, _write_q2,
            _read_four_d, _write_four_d, 16, _UNSIGNED,
        ),
        BlockType(
            "Q3_K", 11, _fields(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D), 256, _NARROW["int3"],
            _read_q3, _write_q3, _read_q3_scales, _write_q3_scales, 16, _INT,
        ),
        BlockType(
            "Q4_K", 12, _fields(_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128)), 256, _UINT4, _read_q4, _write_q4,
            _read_six_d, _write_six_d, 8, _UNSIGNED,
        ),
        BlockType(
            "Q5_K", 13, _fields(_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)), 256,
            _NARROW["uint5"], _read_q5, _write_q5, _read_six_d, _write_six_d, 8, _UNSIGNED,
        ),
        BlockType(
            "Q6_K", 14, _fields(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D), 256, _NARROW["int6"],
            _read_q6, _write_q6, _read_q6_scales, _write_q6_scales, 16, _INT,
        ),
        BlockType(
            "IQ4_NL", 20, _fields(_D, ("qs", "u1", 16)), 32, _UINT4, _read_simple, _write_simple, _read_d, _write_d, 1,
            _ONE, IQ4_NL,
        ),
        BlockType(
            "IQ4_XS", 23, _fields(_D, ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", 128)), 256, _UINT4,
            _read_groups(8, 16), _write_groups(16), _read_xs_scales, _write_xs_scales, 8, _INT, IQ4_NL,
        ),
        BlockType(
            "TQ2_0", 35, _fields(("qs", "u1", 64), _D), 256, _UINT2, _read_q2, _write_q2, _read_d, _write_d, 1, _ONE,
            zero_point=1,
        ),
        BlockType(
            "TQ1_0", 34, _fields(("qs", "u1", 48), ("qh", "u1", 4), _D), 256, _UINT2, _read_ternary, _write_ternary,
            _read_d, _write_d, 1, _ONE, zero_point=1,
        ),
        BlockType(
            "MXFP4", 39, _fields(("e", "u1"), ("qs", "u1", 16)), 32, _E2M1, _read_simple, _write_simple, _read_e8m0,
            _write_e8m0, 1, {"scale": _E8M0},
        ),
        BlockType(
            "NVFP4", 40, _fields(("d", "u1", 4), ("qs", "u1", 32)), 64, _E2M1, _read_groups(4, 8), _write_groups(8),
            _read_e4m3, _write_e4m3, 4, {"scale": _E4M3},
        ),
    )
}  # fmt: skip

# The types whose elements are numbers, with their dtypes.
PLAIN_TYPES: dict[str, tuple[int, np.dtype]] = {
    name: (number, np.dtype(dtype))
    for name, number, dtype in (
        ("F32", 0, np.float32), ("F16", 1, np.float16), ("BF16", 30, ml_dtypes.bfloat16), ("F64", 28, np.float64),
        ("I8", 24, np.int8), ("I16", 25, np.int16), ("I32", 26, np.int32), ("I64", 27, np.int64),
    )
}  # fmt: skip

# Types that are not decoded: the number, the elements and the bytes of a block.
OTHER_TYPES: dict[str, tuple[int, int, int]] = {
    "Q8_1": (9, 32, 40), "Q8_K": (15, 256, 292), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ1_M": (29, 256, 56), "Q1_0": (41, 128, 18),
}  # fmt: skip
