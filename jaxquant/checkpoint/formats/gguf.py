"""GGUF files, the format of llama.cpp: `FORMAT`."""

from __future__ import annotations

import concurrent.futures
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..._arrays.parts import ArrayParts, ArrayStatic, Packing, widen_zero_point
from ..._arrays.quantized_array import QuantizedArray
from ..._core.dtypes import NarrowInteger
from ..._core.granularity import Aligned, BlockSize
from ..containers import replace_file
from ..info import CheckpointError, Info, Tensor, TensorInfo, shorten_name
from ..place import allocate
from ..words import pack_rows, unpack_rows
from . import Source
from .gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, BlockType, Parts
from .gguf_header import MAGIC, TYPES, GGUFTensor, Header, count_bytes, read_alignment, read_header, write_header

_CHUNK = 2**18  # the bytes of the file that are decoded at once: their codes stay in a processor's cache
_LONGEST_ROW = 2**26
_F32 = np.dtype(np.float32)


class _GGUFReader:
    """An open GGUF file; see `formats.Reader`."""

    def __init__(self, path: pathlib.Path, unsupported: str) -> None:
        self._path, self._keeps_bytes = path, unsupported == "keep_bytes"
        try:
            self._stream = open(path, "rb")  # noqa: SIM115 closed by `close`
        except OSError as error:
            raise CheckpointError(f"{path}: expected a file that can be read, got {error.strerror}") from error
        try:
            header = read_header(str(path), self._stream)
            self._entries = {entry.name: entry for entry in header.tensors}
            self.info = self._describe(header)
        except BaseException:
            self._stream.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _describe(self, header: Header) -> Info:
        info = Info("gguf", header.metadata)
        info.container = {"version": header.version, "has_end": header.has_end}
        for entry in header.tensors:
            is_known = entry.kind in BLOCK_TYPES or entry.kind in PLAIN_TYPES
            if not is_known and not self._keeps_bytes:
                known = ", ".join((*PLAIN_TYPES, *BLOCK_TYPES))
                raise CheckpointError(
                    f"{self._path}: tensor {shorten_name(entry.name)!r}: expected one of the types {known}, "
                    f"got {entry.kind}; unsupported='keep_bytes' returns the bytes of such tensors, and "
                    "llama-quantize --allow-requantize of llama.cpp converts them"
                )
            note = "" if is_known else "kept as bytes, because jaxquant does not decode this type"
            described = TensorInfo(entry.name, entry.kind, entry.shape, entry.nbytes, note, {"": entry.name})
            described.extras = {"start": entry.start}
            if not is_known:
                described.extras["bytes_of"] = entry.kind
            info.tensors[entry.name] = described
        return info

    def read(self, name: str) -> Tensor:
        """Return a tensor in arrays of its own."""
        entry = self._entries[name]
        if entry.kind in PLAIN_TYPES:
            return self._read_array(entry, entry.shape, PLAIN_TYPES[entry.kind][1])
        if entry.kind not in BLOCK_TYPES:
            return self._read_bytes(entry)
        try:
            return self._decode(entry, BLOCK_TYPES[entry.kind])
        except ValueError as error:
            if not self._keeps_bytes or isinstance(error, CheckpointError):
                text = f"{self._path}: tensor {shorten_name(name)!r}: expected {error}"
                raise error if isinstance(error, CheckpointError) else CheckpointError(text) from error
            described = self.info.tensors[name]
            described.note = "kept as bytes, because a QuantizedArray does not hold them"
            described.extras["bytes_of"] = entry.kind
            return self._read_bytes(entry)

    def _read_bytes(self, entry: GGUFTensor) -> np.ndarray:
        _, size, nbytes = TYPES[entry.kind]
        return self._read_array(entry, (*entry.shape[:-1], entry.shape[-1] // size * nbytes), np.dtype(np.uint8))

    def _read_array(self, entry: GGUFTensor, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = allocate(shape, dtype)
        self._read_into(array.reshape(-1).view(np.uint8), entry.start)
        return array

    def _read_into(self, out: np.ndarray, start: int) -> None:
        """Fill an array with the bytes of the file from `start` on; threads may do so at the same time."""
        view, place = out.data, 0
        while place < len(view):
            count = os.preadv(self._stream.fileno(), [view[place : place + 2**30]], start + place)
            if count <= 0:
                raise CheckpointError(f"{self._path}: expected {len(view)} bytes at {start}, but the file ends")
            place += count

    def _decode(self, entry: GGUFTensor, row: BlockType) -> QuantizedArray:
        lead, length = entry.shape[:-1], entry.shape[-1]
        if length > _LONGEST_ROW:
            raise CheckpointError(
                f"{self._path}: tensor {shorten_name(entry.name)!r}: expected rows of at most {_LONGEST_ROW} elements, "
                f"got {length}"
            )
        rows, blocks = math.prod(lead), length // row.size
        outs = allocate_parts(row, rows, length)
        step = max(1, _CHUNK // max(blocks * row.nbytes, 1))

        def decode(first: int) -> None:
            last = min(first + step, rows)
            data = np.empty((last - first) * blocks, row.fields)
            self._read_into(data.view(np.uint8), entry.start + first * blocks * row.nbytes)
            decode_rows(row, data, {name: out[first:last] for name, out in outs.items()})

        if 0 < rows <= step:  # threads would take longer to start
            decode(0)
        else:
            with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                for _ in pool.map(decode, range(0, rows, step)):
                    pass
        return build_array(row, {name: out.reshape(*lead, out.shape[-1]) for name, out in outs.items()}, length)


def allocate_parts(row: BlockType, rows: int, length: int) -> Parts:
    """Return arrays [rows, n] for the stored codes, as "codes", and for the scales of a tensor."""
    blocks = length // row.size
    is_packed = row.bits < 8
    count, dtype = (length * row.bits // 32, np.dtype(np.uint32)) if is_packed else (length, row.held)
    outs = {"codes": allocate((rows, count), dtype)}
    for name, part in row.dtypes.items():
        outs[name] = allocate((rows, blocks * (1 if "." in name else row.entries)), part)
    return outs


def decode_rows(row: BlockType, data: np.ndarray, outs: Parts) -> None:
    """Decode whole rows of blocks into arrays of these rows."""
    rows = len(outs["codes"])
    for name, part in row.read_scales(data).items():
        outs[name][:] = part.reshape(rows, -1)
    store_codes(row, row.read_codes(data).reshape(rows, -1), outs["codes"])


def store_codes(row: BlockType, codes: np.ndarray, out: np.ndarray) -> None:
    """Store the unsigned codes of a file as a quantized array has them."""
    if row.bits == 8:
        out[:] = codes.view(np.int8)
    else:
        pack_rows(codes ^ np.uint8(row.flip) if row.flip else codes, row.bits, out)


def build_array(row: BlockType, outs: Parts, length: int) -> QuantizedArray:
    """Return the array of decoded parts."""

    def read_part(name: str) -> Any:
        inner = outs.get(f"{name}.scale")
        if inner is None:
            return outs.get(name)
        return QuantizedArray.tree_unflatten(ArrayStatic(_F32, signed_scale=True), (outs[name], inner))

    scale = read_part("scale")
    if row.name == "NVFP4":
        # The format has no scale of the whole tensor; files have it as a tensor of its own.
        whole = np.ones((1,) * scale.ndim, np.float32)
        scale = QuantizedArray.tree_unflatten(ArrayStatic(_F32), (scale, whole))
    packing = Packing(row.held, length) if row.bits < 8 else None
    static = ArrayStatic(_F32, None, row.codebook, None, packing, row.name != "MXFP4")
    zero_point = None
    if row.zero_point:
        held = row.held if packing is None else widen_zero_point(packing.carrier)
        zero_point = np.full((1,) * outs["codes"].ndim, row.zero_point, held)
    return QuantizedArray.tree_unflatten(static, ArrayParts(outs["codes"], scale, zero_point, read_part("offset")))


# Writing: the form of an array tells its type.


def explain_misfit(row: BlockType, q: QuantizedArray) -> str:
    """Return what keeps a type from holding an array, or an empty text."""
    held: Any = q.packing.format if q.packing else np.dtype(q.stored_codes.dtype)
    levels = None if q.codebook is None else q.codebook.levels
    if held != row.held or levels != (None if row.codebook is None else row.codebook.levels):
        return f"codes of {q.codebook or held} instead of {row.codebook or row.held}"
    if q.permutation is not None:
        return "a permutation"
    if q.inverse_scale:
        return "an inverse scale"
    if q.arithmetic != _F32:
        return f"values that are computed in {q.arithmetic} instead of float32"
    if q.ndim == 0 or q.shape[-1] % row.size:
        return f"shape {q.shape}, whose last dimension is no multiple of {row.size}"
    points = np.asarray(0 if q.zero_point is None else q.zero_point).astype(np.float32)
    if (points != row.zero_point).any() or (q.zero_point is None and row.zero_point):
        return f"an array {'without' if q.zero_point is None else 'with'} this zero point"
    return _explain_part(row, "scale", q.scale, q) or _explain_part(row, "offset", q.offset, q)


def _explain_part(row: BlockType, name: str, part: Any, q: QuantizedArray) -> str:
    """Return what keeps a type from holding a scale or an offset."""
    dtype, inner = row.dtypes.get(name), row.dtypes.get(f"{name}.scale")
    label, size = f"{'a' if name == 'scale' else 'an'} {name}", row.size // row.entries
    if part is None or dtype is None:
        return "" if part is None and dtype is None else f"an array {'without' if part is None else 'with'} {label}"
    is_nested = inner is not None or row.name == "NVFP4"
    if isinstance(part, QuantizedArray) != is_nested:
        return f"{label} that is {'not ' if is_nested else ''}quantized"
    held = np.dtype(part.dtype)
    if is_nested:
        has_others = part.offset is not None or part.codebook is not None or part.inverse_scale
        if part.zero_point is not None or has_others:
            return f"{label} with a zero point, an offset, a codebook or an inverse scale"
        if part.arithmetic != _F32:
            return f"{label} that is computed in {part.arithmetic} instead of float32"
        held = part.packing.format.carrier if isinstance(part.format, NarrowInteger) else np.dtype(part.codes.dtype)
        sizes = Aligned(q.block_size).sizes(part.shape, q.shape) or (0,)
        if part.shape != (*q.shape[:-1], q.shape[-1] // size) or (part.size and sizes[-1] != size):
            return f"{label} of shape {part.shape} instead of one for each {size}"
        if row.name == "NVFP4":
            is_one = part.scale.size == 1 and float(np.asarray(part.scale).reshape(())) == 1
            if not is_one:
                return "a scale of the whole tensor other than 1, which GGUF has as a tensor of its own"
        elif part.scale.dtype != inner or _spread(part.scale, part.block_size, part.shape, row.entries) is None:
            return f"a nested scale of the {name} other than {inner} for each {row.size}"
    elif _spread(part, q.block_size, q.shape, size) is None:
        return f"{label} of shape {part.shape} instead of one for each {size}, or for more"
    # Scales of 4 bits, such as JAX makes them, are held in 8.
    is_same = held == dtype or (is_nested and held.name == {"i": "int4", "u": "uint4"}.get(dtype.kind))
    return "" if is_same else f"{label} in {held} instead of {dtype}"


def _spread(part: jax.Array, block_size: BlockSize, shape: tuple[int, ...], size: int) -> tuple[np.ndarray, ...] | None:
    """Return the indices of the entry of each `size` elements of an array; None if they have several entries.

    Args:
        part: the array with the entries.
        block_size: the block size that the shapes do not tell.
        shape: the shape of the array that the entries are for.
        size: the number of elements, along the last axis.
    """
    sizes: Any = Aligned(block_size).sizes(tuple(part.shape), shape)
    if sizes is None or not shape or (sizes[-1] % size and part.shape[-1] > 1):
        return None
    if 0 in shape:
        return ()
    shared = [length if count == 1 else n for n, count, length in zip(sizes, part.shape, shape, strict=True)]
    places = [np.arange(length) // max(n, 1) for length, n in zip(shape[:-1], shared[:-1], strict=True)]
    return np.ix_(*places, np.arange(shape[-1] // size) * size // max(shared[-1], 1))


class _Encoder:
    """The rows of an array as blocks of a type, which holds it."""

    def __init__(self, row: BlockType, q: QuantizedArray) -> None:
        self.row, self.rows, self.length = row, math.prod(q.shape[:-1]), q.shape[-1]
        self._is_packed = q.packing is not None and q.stored_order is None
        codes = np.asarray(q.stored_codes if self._is_packed else q.codes)
        self._codes = codes.reshape(self.rows, -1)
        self._parts: Parts = {}
        for name in ("scale", "offset"):
            part, size = getattr(q, name), row.size // row.entries
            if isinstance(part, QuantizedArray):
                self._parts[name] = self._flatten(part.codes, row.dtypes[name])
                if row.name != "NVFP4":
                    self._add(f"{name}.scale", part.scale, part.block_size, part.shape, row.entries)
            elif part is not None:
                self._add(name, part, q.block_size, q.shape, size)

    def _add(self, name: str, part: jax.Array, block_size: BlockSize, shape: tuple[int, ...], size: int) -> None:
        indices = _spread(part, block_size, shape, size)
        self._parts[name] = self._flatten(np.asarray(part)[indices], self.row.dtypes[name])

    def _flatten(self, part: jax.Array | np.ndarray, dtype: np.dtype) -> np.ndarray:
        found = np.asarray(part)
        return (found if found.dtype == dtype else found.astype(dtype)).reshape(self.rows, -1)

    def encode(self, first: int, last: int) -> np.ndarray:
        """Return the bytes of some rows; raise ValueError for scales that the type does not hold."""
        row, blocks = self.row, (last - first) * (self.length // self.row.size)
        data = np.zeros(blocks, row.fields)
        codes = self._codes[first:last]
        codes = unpack_rows(codes, row.bits) if self._is_packed else codes.view(np.uint8)
        codes = codes & np.uint8(2**row.bits - 1)
        codes = codes ^ np.uint8(row.flip) if row.flip else codes
        row.write_codes(data, codes.reshape(blocks, row.size))
        row.write_scales(data, {name: part[first:last].reshape(blocks, -1) for name, part in self._parts.items()})
        return data.view(np.uint8)

    def iterate(self) -> Iterator[np.ndarray]:
        """Yield the bytes of all rows, some rows at a time."""
        step = max(1, _CHUNK // max(self.length // self.row.size * self.row.nbytes, 1))
        for first in range(0, self.rows, step):
            yield self.encode(first, min(first + step, self.rows))


def name_type(name: str, tensor: Tensor, entry: TensorInfo | None) -> tuple[str, tuple[int, ...]]:
    """Return the type that holds a tensor, and its shape; raise CheckpointError if there is none."""
    label, shape = f"tensor {shorten_name(name)!r}", tuple(map(int, tensor.shape))
    if len(shape) > 4:
        raise CheckpointError(f"{label}: expected at most 4 dimensions, got shape {shape}")
    if isinstance(tensor, QuantizedArray):
        reasons = {kind: explain_misfit(row, tensor) for kind, row in BLOCK_TYPES.items()}
        held = [kind for kind, text in reasons.items() if not text]
        if held:
            return held[0] if entry is None or entry.stored_as not in held else entry.stored_as, shape
        # The reason of a type with the same codes says more.
        kinds: dict[str, list[str]] = {}
        for kind, text in reasons.items():
            if not text.startswith("codes of"):
                kinds.setdefault(text, []).append(kind)
        shown = [f"{', '.join(names)} cannot hold {text}" for text, names in kinds.items()]
        text = "; ".join(shown) or f"no type holds {next(iter(reasons.values())).split(' instead')[0]}"
        raise CheckpointError(f"{label}: expected an array that a GGUF type holds, got {tensor!r}: {text}")
    dtype = np.dtype(tensor.dtype)
    kind = None if entry is None else entry.extras.get("bytes_of")
    if kind is not None and dtype == np.uint8 and shape and shape[-1] % TYPES[kind][2] == 0:
        _, size, nbytes = TYPES[kind]
        return kind, (*shape[:-1], shape[-1] // nbytes * size)
    for plain, (_, held) in PLAIN_TYPES.items():
        if held == dtype:
            return plain, shape
    expected = f"a dtype that GGUF has ({', '.join(str(held) for _, held in PLAIN_TYPES.values())})"
    raise CheckpointError(f"{label}: expected {expected}, got {dtype}")


class _GGUF:
    name = "gguf"

    def recognizes(self, source: Source) -> bool:
        """Return whether a file begins as GGUF files do."""
        if not isinstance(source, pathlib.Path) or not source.is_file():
            return False
        try:
            with open(source, "rb") as stream:
                return stream.read(4) == MAGIC
        except OSError:
            return False

    def open(self, source: Source, unsupported: str) -> _GGUFReader:
        """Return the open file."""
        if not isinstance(source, pathlib.Path):
            raise CheckpointError(f"{source.path}: expected a GGUF file, got safetensors files")
        return _GGUFReader(source, unsupported)

    def save(self, path: pathlib.Path, tensors: Mapping[str, Tensor], info: Info) -> None:
        """Write a file; the arrays tell the types."""
        names = [*info.tensors, *(name for name in tensors if name not in info.tensors)]
        kinds = {name: name_type(name, tensors[name], info.tensors.get(name)) for name in names}
        save_tensors(path, kinds, tensors.__getitem__, info)


def save_tensors(
    path: pathlib.Path, kinds: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], Tensor], info: Info
) -> None:
    """Write a file, one tensor at a time.

    Args:
        path: the file.
        kinds: the type and the shape of each tensor, in the order of the header.
        read: a function that returns a tensor, of this type and shape, by its name.
        info: the metadata, and the order of the data.
    """
    known = [name for name in kinds if name in info.tensors and "start" in info.tensors[name].extras]
    order = sorted(known, key=lambda name: (info.tensors[name].extras["start"], count_bytes(*kinds[name])))
    order += [name for name in kinds if name not in set(known)]
    alignment = read_alignment(str(path), info.metadata)
    places, end = {}, 0
    for name in order:
        places[name] = end = end + -end % alignment
        end += count_bytes(*kinds[name])
    entries = [(name, *kind, places[name]) for name, kind in kinds.items()]
    header = write_header(info.container.get("version", 3), info.metadata, entries)
    with replace_file(path) as stream:
        stream.write(header)
        for name in order:
            stream.write(bytes(-stream.tell() % alignment))
            start = stream.tell()
            for chunk in _iterate_bytes(name, read(name), kinds[name][0]):
                stream.write(chunk.data)
            if stream.tell() - start != count_bytes(*kinds[name]):
                raise CheckpointError(f"tensor {shorten_name(name)!r}: expected {kinds[name]}, got another shape")
        if info.container.get("has_end", True):
            stream.write(bytes(-stream.tell() % alignment))


def _iterate_bytes(name: str, tensor: Tensor, kind: str) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor."""
    if not isinstance(tensor, QuantizedArray):
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        return
    if not tensor.size:
        return
    try:
        yield from _Encoder(BLOCK_TYPES[kind], tensor).iterate()
    except ValueError as error:
        raise CheckpointError(f"tensor {shorten_name(name)!r}: expected {error}, for {kind}") from error


FORMAT = _GGUF()
