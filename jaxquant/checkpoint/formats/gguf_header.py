"""The header of a GGUF file: its metadata, and the type, the shape and the place of each tensor; read with checks.

A file is a header, zeros up to a multiple of the alignment, and the tensors, each followed by zeros up to the next
multiple. All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from ..info import CheckpointError, shorten_name
from .gguf_blocks import BLOCK_TYPES, OTHER_TYPES, PLAIN_TYPES

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_CODES = {dtype: code for code, dtype in _NUMBERS.items()}
# What an untrusted file may take at most. A tokenizer of 262,144 tokens has 8 MB in three arrays.
_MOST_HEADER_BYTES = 2**29
_MOST_STRINGS = 2**23
_MOST_KEYS = 2**16
_MOST_TENSORS = 500_000
_MOST_DIMENSIONS = 4  # as ggml
_MOST_NESTED = 3
# The number and, of a block, the elements and the bytes of each type.
TYPES: dict[str, tuple[int, int, int]] = {
    **{name: (number, 1, dtype.itemsize) for name, (number, dtype) in PLAIN_TYPES.items()},
    **{row.name: (row.number, row.size, row.nbytes) for row in BLOCK_TYPES.values()},
    **OTHER_TYPES,
}
# The architectures that llama.cpp knows: gguf.MODEL_ARCH_NAMES of the package gguf 0.19.
ARCHITECTURES = frozenset({
    "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "bert", "bitnet", "bloom",
    "chameleon", "chatglm", "clip", "codeshell", "cogvlm", "cohere2", "command-r", "dbrx", "deci", "deepseek",
    "deepseek2", "deepseek2-ocr", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "exaone-moe",
    "exaone4", "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n", "gemma4", "glm-dsa",
    "glm4", "glm4moe", "gpt-oss", "gpt2", "gptj", "gptneox", "granite", "granitehybrid", "granitemoe", "grok",
    "grovemoe", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2", "jais", "jais2", "jamba", "jina-bert-v2",
    "jina-bert-v3", "kimi-linear", "lfm2", "lfm2moe", "llada", "llada-moe", "llama", "llama-embed", "llama4",
    "maincoder", "mamba", "mamba2", "mimo2", "minicpm", "minicpm3", "minimax-m2", "mistral3", "mistral4", "modern-bert",
    "mpt", "nemotron", "nemotron_h", "nemotron_h_moe", "neo-bert", "nomic-bert", "nomic-bert-moe", "olmo", "olmo2",
    "olmoe", "openelm", "orion", "paddleocr", "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3",
    "plm", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl",
    "qwen3vlmoe", "refact", "rnd1", "rwkv6", "rwkv6qwen2", "rwkv7", "seed_oss", "smallthinker", "smollm3", "stablelm",
    "starcoder", "starcoder2", "step35", "t5", "t5encoder", "wavtokenizer-dec", "xverse",
})  # fmt: skip
_TYPE_NAMES = {number: name for name, (number, _, _) in TYPES.items()}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: its name.
        kind: its type, a key of `TYPES`.
        shape: its shape in numpy's order, the last dimension next to each other.
        start: its first byte in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return count_bytes(self.kind, self.shape)


def count_bytes(kind: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    _, size, nbytes = TYPES[kind]
    return math.prod(shape) // size * nbytes


@dataclasses.dataclass
class Header:
    """The header of a GGUF file.

    Attributes:
        version: 2 or 3.
        metadata: the values by key. Numbers are numpy scalars and arrays of numpy's dtypes, strings are str, bool is
            bool, an array of strings a list, and an array of arrays a tuple.
        tensors: the tensors, in the order of the header.
        alignment: the multiple at which tensors begin.
        has_end: whether zeros follow the last tensor, up to a multiple of the alignment.
    """

    version: int
    metadata: dict[str, Any]
    tensors: list[GGUFTensor]
    alignment: int
    has_end: bool = True


class _HeaderParser:
    """The bytes of a file from its beginning on; every read is checked."""

    def __init__(self, path: str, stream: BinaryIO, size: int) -> None:
        self.path, self.size, self.place = path, size, 0
        self._stream, self._limit = stream, min(size, _MOST_HEADER_BYTES)
        self._strings = 0
        self._buffer, self._start = b"", 0  # of the file from `_start` on

    def fail(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}, at byte {self.place}")

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        stop = self.place + count
        if stop > self._limit:
            what = "the file ends" if self._limit == self.size else f"{self._limit} bytes are the most"
            raise self.fail(f"expected {count} bytes more in the header, but {what}")
        if stop > self._start + len(self._buffer):
            self._stream.seek(self.place)
            self._buffer, self._start = self._stream.read(max(count, 2**20)), self.place
            if len(self._buffer) < count:
                raise self.fail(f"expected {count} bytes more, but the file ends")
        begin = self.place - self._start
        self.place = stop
        return memoryview(self._buffer)[begin : begin + count]

    def number(self, code: int) -> Any:
        dtype = _NUMBERS[code]
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0]

    def count(self, what: str, most: int) -> int:
        """Return a number of 64 bits, which is at most `most`."""
        found = int.from_bytes(self.take(8), "little")
        if found > most:
            raise self.fail(f"expected at most {most} {what}, got {found}")
        return found

    def integer(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def string(self) -> str:
        return bytes(self.take(self.count("bytes of a string", self._limit))).decode("utf-8", "surrogateescape")

    def value(self, code: int, depth: int = 0) -> Any:
        if code in _NUMBERS:
            return self.number(code)
        if code == _BOOL:
            return self._read_bools(1)[0].item()
        if code == _STRING:
            return self.string()
        if code == _ARRAY and depth < _MOST_NESTED:
            return self._read_array(depth)
        raise self.fail(f"expected a value of a type from 0 to 12, with at most {_MOST_NESTED} arrays, got {code}")

    def _read_bools(self, count: int) -> np.ndarray:
        found = np.frombuffer(self.take(count), np.uint8)
        if found.size and found.max() > 1:
            raise self.fail(f"expected 0 or 1 for a bool, got {found.max()}")
        return found.astype(np.bool_)

    def _read_array(self, depth: int) -> Any:
        code, count = self.integer(), self.count("elements", self._limit)
        if code in _NUMBERS:
            dtype = _NUMBERS[code]
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()
        if code == _BOOL:
            return self._read_bools(count)
        self._strings += count
        if self._strings > _MOST_STRINGS:
            raise self.fail(f"expected at most {_MOST_STRINGS} strings and arrays, got more")
        if code == _STRING:
            return self._read_strings(count)
        return tuple(self.value(code, depth + 1) for _ in range(count))

    def _read_strings(self, count: int) -> list[str]:
        # As `string`, in one loop over the buffer: a tokenizer has hundreds of thousands.
        found, unpack = [], struct.Struct("<Q").unpack_from
        data, place = self._buffer, self.place - self._start
        for _ in range(count):
            begin = place + 8
            length = unpack(data, place)[0] if begin <= len(data) else -1
            if length < 0 or begin + length > len(data) or self._start + begin + length > self._limit:
                self.place = place + self._start
                found.append(self.string())
                data, place = self._buffer, self.place - self._start
                continue
            place = begin + length
            found.append(data[begin:place].decode("utf-8", "surrogateescape"))
        self.place = place + self._start
        return found


def read_header(path: str, stream: BinaryIO) -> Header:
    """Return the header of a GGUF file; raise CheckpointError if it is damaged, or if its tensors do not fill it."""
    size = os.fstat(stream.fileno()).st_size
    parser = _HeaderParser(path, stream, size)
    if size < 24 or bytes(parser.take(4)) != MAGIC:
        raise CheckpointError(f"{path}: expected a GGUF file, got another one")
    version = parser.integer()
    if version not in _VERSIONS:
        is_big = version and version & 0xFFFF == 0
        got = "a big-endian file" if is_big else f"version {version}"
        raise CheckpointError(f"{path}: expected a little-endian GGUF file of version 2 or 3, got {got}")
    tensor_count = parser.count("tensors", _MOST_TENSORS)
    metadata: dict[str, Any] = {}
    for _ in range(parser.count("keys", _MOST_KEYS)):
        key = parser.string()
        if key in metadata:
            raise parser.fail(f"expected each key once, got {shorten_name(key)!r} twice")
        metadata[key] = parser.value(parser.integer())
    alignment = read_alignment(path, metadata)
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = parser.string()
        if name in entries:
            raise parser.fail(f"expected each tensor once, got {shorten_name(name)!r} twice")
        entries[name] = _read_entry(parser, name)
    start = parser.place + -parser.place % alignment
    tensors = [GGUFTensor(name, kind, shape, start + place) for name, (kind, shape, place) in entries.items()]
    end = _check_places(path, tensors, start, alignment, size)
    return Header(version, metadata, tensors, alignment, size > end or not end % alignment)


def read_alignment(path: str, metadata: Mapping[str, Any]) -> int:
    """Return the alignment that the metadata name."""
    found = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    is_integer = isinstance(found, int | np.integer) and not isinstance(found, bool)
    if not is_integer or not 1 <= found <= 2**20 or found & (found - 1):
        raise CheckpointError(f"{path}: expected {_ALIGNMENT} to be a power of two up to 2**20, got {found!s:.50}")
    return int(found)


def _read_entry(parser: _HeaderParser, name: str) -> tuple[str, tuple[int, ...], int]:
    """Return the type, the shape and the place of a tensor in the data."""
    label = f"tensor {shorten_name(name)!r}"
    rank = parser.integer()
    if rank > _MOST_DIMENSIONS:
        raise parser.fail(f"{label}: expected at most {_MOST_DIMENSIONS} dimensions, got {rank}")
    shape = tuple(parser.count("elements of a tensor", 2**62) for _ in range(rank))[::-1]
    number = parser.integer()
    if number not in _TYPE_NAMES:
        raise parser.fail(f"{label}: expected one of the types {', '.join(TYPES)}, got number {number}")
    kind = _TYPE_NAMES[number]
    size = TYPES[kind][1]
    if size > 1 and (not shape or shape[-1] % size):
        raise parser.fail(f"{label}: expected rows of a multiple of {size} elements for {kind}, got shape {shape}")
    # A length of 0 does not make the other lengths possible.
    if count_bytes(kind, shape) > parser.size or math.prod(max(n, 1) for n in shape) >= 2**48:
        got = f"a file of {parser.size} bytes"
        raise parser.fail(f"{label}: expected {count_bytes(kind, shape)} bytes for {kind} of shape {shape}, got {got}")
    return kind, shape, parser.count("bytes before a tensor", parser.size)


def _check_places(path: str, tensors: Sequence[GGUFTensor], start: int, alignment: int, size: int) -> int:
    """Return the end of the last tensor; raise unless the tensors lie behind each other and fill the file."""
    end = start
    for entry in sorted(tensors, key=lambda entry: (entry.start, entry.nbytes)):
        expected = end + -end % alignment
        if entry.start != expected:
            what = "overlaps another one or has a gap before it: it begins"
            raise CheckpointError(
                f"{path}: tensor {shorten_name(entry.name)!r} {what} at byte {entry.start}, expected {expected}"
            )
        end = entry.start + entry.nbytes
    # A file without tensors may end with its header.
    if not (end <= size <= end + -end % alignment or not tensors):
        raise CheckpointError(f"{path}: expected a file of {end} bytes, as its header says, got {size}")
    return end


def write_header(
    version: int, metadata: Mapping[str, Any], tensors: Sequence[tuple[str, str, tuple[int, ...], int]]
) -> bytes:
    """Return a header.

    Args:
        version: 2 or 3.
        metadata: values as `Header` has them. Ints and floats of Python have 32 bits, or an int 64 if it needs them.
        tensors: names, types, shapes and places in the data.
    """
    parts = [MAGIC, struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_write_string(key), *_write_value(key, value)]
    for name, kind, shape, place in tensors:
        parts += [_write_string(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])]
        parts.append(struct.pack("<IQ", TYPES[kind][0], place))
    return b"".join(parts)


def _write_string(text: str) -> bytes:
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"expected names and texts that UTF-8 has, got {shorten_name(text)!r}") from error
    return struct.pack("<Q", len(data)) + data


def _write_value(key: str, value: object) -> list[bytes]:
    """Return the type of a value and its bytes."""
    code, data = _encode_value(key, value)
    return [struct.pack("<I", code), data]


def _encode_value(key: str, value: Any, depth: int = 0) -> tuple[int, bytes]:
    if isinstance(value, bool | np.bool_):
        return _BOOL, bytes([bool(value)])
    if isinstance(value, str):
        return _STRING, _write_string(value)
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        value = _convert_number(key, value)
    if isinstance(value, np.generic) and value.dtype in _CODES:
        return _CODES[value.dtype], value.tobytes()
    if isinstance(value, list | tuple | np.ndarray) and depth < _MOST_NESTED:
        return _ARRAY, _encode_array(key, value, depth)
    expected = "a str, a bool, a number, or a list or an array of one dimension of these"
    got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    raise CheckpointError(f"metadata {shorten_name(key)!r}: expected {expected}, got {got}")


def _encode_array(key: str, value: list[Any] | tuple[Any, ...] | np.ndarray, depth: int) -> bytes:
    """Return the type of the elements of an array, their number and their bytes."""
    if isinstance(value, list) and value and not isinstance(value[0], str):
        numbers = [_convert_number(key, x) if type(x) in (int, float) else x for x in value]
        is_bool = all(isinstance(x, bool) for x in value)
        is_plain = is_bool or all(isinstance(x, np.generic) for x in numbers)
        found: Any = np.array(numbers) if is_plain else None
        if found is not None and all(type(x) is int for x in value):
            found = _convert_integers(key, value)
        elif found is not None and any(
            isinstance(x, int | np.integer) and x != int(y) for x, y in zip(value, found, strict=True)
        ):
            raise CheckpointError(
                f"metadata {shorten_name(key)!r}: expected numbers that one type holds, got {found.dtype}"
            )
        value = tuple(value) if found is None else found
    if isinstance(value, np.ndarray) and value.ndim == 1 and (value.dtype in _CODES or value.dtype == np.bool_):
        code = _BOOL if value.dtype == np.bool_ else _CODES[value.dtype]
        return struct.pack("<IQ", code, len(value)) + value.tobytes()
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return struct.pack("<IQ", _STRING, len(value)) + b"".join(map(_write_string, value))
    if isinstance(value, tuple):
        items = [_encode_value(key, item, depth + 1) for item in value]
        if len({code for code, _ in items}) <= 1:
            code = items[0][0] if items else _ARRAY
            return struct.pack("<IQ", code, len(items)) + b"".join(data for _, data in items)
    expected = "an array of one dimension, of numbers of one type or of strings"
    raise CheckpointError(f"metadata {shorten_name(key)!r}: expected {expected}, got {type(value).__name__}")


def _convert_integers(key: str, values: list[int]) -> np.ndarray:
    """Return ints in the narrowest type that holds all; int32 before uint32, as other writers have it."""
    for dtype in (np.int32, np.uint32, np.uint64, np.int64):
        if np.iinfo(dtype).min <= min(values) and max(values) <= np.iinfo(dtype).max:
            return np.array(values, dtype)
    expected = "integers that int64 or uint64 holds"
    raise CheckpointError(f"metadata {shorten_name(key)!r}: expected {expected}, got {min(values)} and {max(values)}")


def _convert_number(key: str, value: float) -> np.generic:
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            number = np.float32(value)
        if np.isinf(number) and not np.isinf(value):
            expected = "a float that float32 holds, or a numpy.float64"
            raise CheckpointError(f"metadata {shorten_name(key)!r}: expected {expected}, got {value}")
        return number
    for dtype in (np.uint32, np.int32, np.uint64, np.int64):
        if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return dtype(value)
    raise CheckpointError(f"metadata {shorten_name(key)!r}: expected an integer of 64 bits, got a larger one")
