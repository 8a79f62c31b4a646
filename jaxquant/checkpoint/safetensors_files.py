"""Folders of safetensors files with a config.json, or one such file: read with checks, and written with the same bytes.

`SafetensorsFormat` is the base of all formats that keep their tensors in such files. A file is a length in 8 bytes, a
JSON header with the dtype, the shape and the place of each tensor, and the bytes of the tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from .._arrays.parts import parse_json
from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from .containers import MappedFile, read_small_file, replace_file, replace_folder
from .info import CheckpointError, Info, Tensor, TensorInfo, list_some, shorten_name

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("BOOL", np.bool_), ("U8", np.uint8), ("I8", np.int8), ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E8M0", ml_dtypes.float8_e8m0fnu), ("I16", np.int16),
        ("U16", np.uint16), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16), ("I32", np.int32), ("U32", np.uint32),
        ("F32", np.float32), ("C64", np.complex64), ("F64", np.float64), ("I64", np.int64), ("U64", np.uint64),
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000  # as the package safetensors
_MOST_CONFIG_BYTES = 16 * 2**20
_MOST_TENSORS = 500_000
_MOST_FILES = 2000
_METADATA = "__metadata__"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# The configurations that say how tensors are quantized; a folder's own are read and written back.
CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Where config.json says so.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        dtype: its dtype, as numpy or ml_dtypes has it.
        shape: its shape.
        file: the name of the file that has it.
        start: its first byte in the file.
        stop: the byte after its last one.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int


class SafetensorsFiles:
    """The tensors and the configurations of a folder or of a single safetensors file, whose headers have been read.

    Attributes:
        path: the file or the folder.
        configs: the parsed configurations by the names of their files, such as "config.json".
        metadata: the metadata of all headers.
        entries: all tensors by name, in the order of the files.
        kept: by name, the bytes of the configurations, the index and the headers.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.configs: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.entries: dict[str, StoredTensor] = {}
        self.kept: dict[str, bytes] = {}
        self.path = path
        self._files: dict[str, MappedFile] = {}
        folder = path if path.is_dir() else path.parent
        for name in CONFIGS:
            if (folder / name).exists():
                self.kept[name] = read_small_file(folder / name, _MOST_CONFIG_BYTES)
                self.configs[name] = _parse_object(folder / name, self.kept[name])
        try:
            for name in self._list_files(path):
                self._read_header(folder / name)
        except BaseException:
            self.close()
            raise

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says about the quantization, or an empty dict."""
        config = self.configs.get("config.json", {})
        found = next((config[key] for key in QUANTIZATION_KEYS if key in config), None)
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a view of its file, which cannot be written to."""
        entry = self.entries[name]
        data = self._files[entry.file].view(entry.start, entry.stop)
        return data.view(entry.dtype).reshape(entry.shape)

    def _list_files(self, path: pathlib.Path) -> list[str]:
        if not path.is_dir():
            return [path.name]
        if not (path / _INDEX).exists():
            names = sorted(file.name for file in path.glob("*.safetensors"))
            if len(names) != 1:
                raise CheckpointError(
                    f"{path}: expected one *.safetensors file, or {_INDEX}, got {list_some(names) or 'none'}"
                )
            return names
        self.kept[_INDEX] = read_small_file(path / _INDEX, _MOST_HEADER_BYTES)
        index = _parse_object(path / _INDEX, self.kept[_INDEX])
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError(f"{path / _INDEX}: expected 'weight_map', an object with names of files")
        names = sorted(set(places.values()))
        for name in names:
            # A name with a folder in it would lead out of this one.
            if name != pathlib.PurePosixPath(name).name or "\\" in name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path / _INDEX}: expected names of safetensors files without folders, got {shorten_name(name)!r}"
                )
        if len(names) > _MOST_FILES:
            raise CheckpointError(f"{path / _INDEX}: expected at most {_MOST_FILES} files, got {len(names)}")
        return names

    def _read_header(self, path: pathlib.Path) -> None:
        file = self._files[path.name] = MappedFile(path)
        length = int.from_bytes(file.view(0, min(8, file.size)).tobytes(), "little")
        if file.size < 8 or length > min(file.size - 8, _MOST_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: expected a safetensors file, got {file.size} bytes with a header of {length} bytes"
            )
        text = self.kept[path.name] = file.view(8, 8 + length).tobytes()
        header = _parse_object(path, text)
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{path}: expected {_METADATA!r} to be an object of strings")
        self.metadata.update(metadata)
        if len(self.entries) + len(header) > _MOST_TENSORS:
            raise CheckpointError(f"{path}: expected at most {_MOST_TENSORS} tensors in all files, got more")
        for name, fields in header.items():
            if name in self.entries:
                raise CheckpointError(f"{path}: tensor {shorten_name(name)!r} is in {self.entries[name].file}, too")
            self.entries[name] = _read_entry(path, name, fields, 8 + length)
        self._check_places(path, 8 + length, file.size)

    def _check_places(self, path: pathlib.Path, start: int, stop: int) -> None:
        """Raise unless the tensors of a file lie behind each other and fill it."""
        own = sorted((entry.start, entry.stop, name) for name, entry in self.entries.items() if entry.file == path.name)
        for first, last, name in own:
            if first != start:
                raise CheckpointError(f"{path}: tensor {shorten_name(name)!r} begins at {first}, expected {start}")
            start = last
        if start != stop:
            raise CheckpointError(f"{path}: expected a file of {start} bytes, as its header says, got {stop}")


def _parse_object(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    """Return a JSON object; raise CheckpointError for anything else."""
    try:
        value = parse_json("checkpoint.load", str(path), text)
    except checks.ContractValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_entry(path: pathlib.Path, name: str, fields: object, offset: int) -> StoredTensor:
    """Return a tensor of a header."""
    label = f"{path}: tensor {shorten_name(name)!r}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise CheckpointError(f"{label}: expected an object with dtype, shape and data_offsets")
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        got = shorten_name(str(fields["dtype"])[:200])
        raise CheckpointError(f"{label}: expected a dtype of {', '.join(_DTYPES)}, got {got}")
    shape, places = fields["shape"], fields["data_offsets"]
    for field, value in (("shape", shape), ("data_offsets", places)):
        # `type`, because True is an int for isinstance.
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value) or len(value) > 64:
            raise CheckpointError(f"{label}: expected {field} to be a list of lengths")
    if len(places) != 2 or places[1] - places[0] != math.prod(shape) * dtype.itemsize:
        size = math.prod(shape) * dtype.itemsize
        got = "-".join(str(n) for n in places[:3])
        raise CheckpointError(f"{label}: expected data_offsets with {size} bytes between them, got {got}")
    return StoredTensor(dtype, tuple(shape), path.name, offset + places[0], offset + places[1])


class SafetensorsReader:
    """An open checkpoint of safetensors files; see `formats.Reader`."""

    def __init__(self, kind: SafetensorsFormat, files: SafetensorsFiles) -> None:
        self._kind, self.files = kind, files
        with self._name_file():
            self.info = self._describe()

    @contextlib.contextmanager
    def _name_file(self) -> Iterator[None]:
        """Put the path in front of the errors that are raised inside the `with` block."""
        try:
            yield
        except (CheckpointError, checks.ContractTypeError, checks.ContractValueError) as error:
            if str(error).startswith(str(self.files.path)):
                raise
            raise CheckpointError(f"{self.files.path}: {error}") from error

    def _describe(self) -> Info:
        files = self.files
        info = Info(self._kind.name, {**files.configs, "safetensors": dict(files.metadata)})
        info.container = {"kept": files.kept}
        found = {entry.name: entry for entry in self._kind.list_tensors(files)}
        owners = {}
        for entry in found.values():
            for name in entry.stored.values():
                if name not in files.entries:
                    raise CheckpointError(f"tensor {shorten_name(entry.name)!r}: {shorten_name(name)!r} is missing")
                if name in owners:
                    raise CheckpointError(f"{shorten_name(name)!r} belongs to {owners[name]!r} and to {entry.name!r}")
                owners[name] = entry.name
        for name, stored in files.entries.items():
            key = owners.get(name, name)
            if key in info.tensors:
                continue
            if name not in owners and name in found:
                raise CheckpointError(f"{shorten_name(name)!r} is a tensor and the name of a quantized one")
            plain = TensorInfo(key, _NAMES[stored.dtype], stored.shape, stored={"": name})
            entry = found[key] if name in owners else plain
            entry.note = entry.note or ("" if name in owners else self._kind.explain_float(name, info))
            places = (files.entries[part] for part in entry.stored.values())
            entry.nbytes = sum(place.stop - place.start for place in places)
            info.tensors[key] = entry
        return info

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        entry = self.info.tensors[name]
        arrays = {role: self.files.read(stored) for role, stored in entry.stored.items()}
        if set(arrays) == {""}:
            return arrays[""]
        with self._name_file():
            return self._kind.read(entry, arrays, self.info)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


class SafetensorsFormat:
    """The base of the formats in safetensors files.

    A format overrides `recognizes_config`, `list_tensors`, `read` and `write`, and `describe` if arrays that JAX made
    can be saved in it.

    Attributes:
        name: the name of the format.
        needs_config: whether files are recognized by a configuration only.
    """

    name, needs_config = "", False

    def recognizes_config(self, files: SafetensorsFiles) -> bool:
        """Return whether the configurations, or the metadata of the headers, name this format."""
        raise NotImplementedError

    def list_tensors(self, files: SafetensorsFiles) -> Iterable[TensorInfo]:
        """Yield the quantized tensors, each with its shape and with the names of the file's tensors by their role.

        What no tensor names is loaded as it is stored. Raise CheckpointError for what the format cannot hold.
        """
        raise NotImplementedError

    def read(self, entry: TensorInfo, arrays: Mapping[str, np.ndarray], info: Info) -> QuantizedArray:
        """Return a quantized tensor.

        Args:
            entry: its description. What `write` needs beside codes and scales is put into `entry.extras`.
            arrays: the file's tensors by role, which cannot be written to.
            info: the description of the checkpoint.
        """
        raise NotImplementedError

    def write(self, tensor: QuantizedArray, entry: TensorInfo, info: Info) -> Mapping[str, np.ndarray]:
        """Return the file's tensors by role, with the bytes that `read` was given."""
        raise NotImplementedError

    def describe(self, name: str, tensor: QuantizedArray, info: Info) -> TensorInfo:
        """Return the description of a tensor that `info` does not have, such as one that JAX made."""
        expected = f"a tensor of the loaded checkpoint, or floats, for format {self.name!r}"
        raise CheckpointError(f"tensor {shorten_name(name)!r}: expected {expected}, got {tensor!r}")

    def explain_float(self, name: str, info: Info) -> str:
        """Return why a tensor is stored as it is, or an empty text if there is nothing to say."""
        return ""

    # The rest is the same for all formats.

    def recognizes(self, source: SafetensorsFiles | pathlib.Path) -> bool:
        """Return whether safetensors files have the format."""
        return isinstance(source, SafetensorsFiles) and self.recognizes_config(source)

    def open(self, source: SafetensorsFiles | pathlib.Path, unsupported: str) -> SafetensorsReader:
        """Return the open checkpoint."""
        if not isinstance(source, SafetensorsFiles):
            raise CheckpointError(f"{source}: expected safetensors files for format {self.name!r}")
        return SafetensorsReader(self, source)

    def save(self, path: pathlib.Path, tensors: Mapping[str, Tensor], info: Info) -> None:
        """Write a file if the path ends in .safetensors, else a folder."""
        kept: dict[str, bytes] = info.container.get("kept", {})
        headers = {name: text for name, text in kept.items() if name.endswith(".safetensors")} or {_SINGLE: b"{}"}
        places = {name: file for file, text in headers.items() for name in _parse_object(pathlib.Path(file), text)}
        default = next(iter(headers))
        files: dict[str, dict[str, str]] = {file: {} for file in headers}  # of each file's tensors, the tensor here
        entries = {}
        for name, tensor in tensors.items():
            entry = entries[name] = info.tensors.get(name) or self._describe_new(name, tensor, info)
            # Its parts may lie in several files.
            for part in entry.stored.values():
                files[places.get(part, default)][part] = name
        is_file = path.suffix == ".safetensors"
        if is_file and len(files) > 1:
            raise CheckpointError(f"{path}: expected a folder, because there are {len(files)} files")
        configs = [name for name in info.metadata if name in CONFIGS]
        is_quantized = any(set(entry.stored) != {""} for entry in entries.values())
        if is_file and self.needs_config and is_quantized and not all((path.parent / n).exists() for n in configs):
            raise CheckpointError(f"{path}: expected a folder, because {list_some(configs)} belongs to the tensors")
        writer = _Writer(self, tensors, entries, info)
        if is_file:
            with replace_file(path) as stream:
                writer.write(stream, headers[default], files[default])
            return
        others = {file.name for file in path.glob("*.safetensors")} | ({_INDEX} if (path / _INDEX).exists() else set())
        others -= {*files, *(kept.keys() & {_INDEX})}
        if others:  # `load` would read them
            expected = "a folder without other safetensors files and without an index of them"
            raise CheckpointError(f"{path}: expected {expected}, got {list_some(sorted(others))}")
        with replace_folder(path) as folder:
            for file, parts in files.items():
                with open(folder / file, "wb") as stream:
                    writer.write(stream, headers[file], parts)
            for name, text in self._write_configs(info, kept, files).items():
                if name not in headers:
                    (folder / name).write_bytes(text)

    def _write_configs(
        self, info: Info, kept: Mapping[str, bytes], files: Mapping[str, Mapping[str, str]]
    ) -> dict[str, bytes]:
        """Return the configurations and the index by the names of their files: as they were, if they still hold."""
        values = {name: value for name, value in info.metadata.items() if name in CONFIGS}
        if _INDEX in kept:
            index = _parse_object(pathlib.Path(_INDEX), kept[_INDEX])
            places = {part: file for file, parts in files.items() for part in parts}
            if places != index["weight_map"]:
                index.pop("metadata", None)  # the size of all tensors, which has changed
            values[_INDEX] = index | {"weight_map": places}
        texts = {}
        for name, value in values.items():
            is_same = name in kept and _parse_object(pathlib.Path(name), kept[name]) == value
            try:
                texts[name] = kept[name] if is_same else json.dumps(value, indent=2).encode()
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"info.metadata[{name!r}]: expected values that JSON has: {error}") from error
        return texts

    def _describe_new(self, name: str, tensor: Tensor, info: Info) -> TensorInfo:
        if isinstance(tensor, QuantizedArray):
            return self.describe(name, tensor, info)
        return TensorInfo(name, "", tuple(tensor.shape), stored={"": name})


def _merge_metadata(kept: Mapping[str, bytes]) -> dict[str, str]:
    """Return the metadata of all headers."""
    merged: dict[str, str] = {}
    for name, text in kept.items():
        if name.endswith(".safetensors"):
            merged.update(_parse_object(pathlib.Path(name), text).get(_METADATA, {}))
    return merged


def is_safetensors(path: pathlib.Path) -> bool:
    """Return whether a path is a safetensors file by its name, or a folder with such files."""
    if path.is_dir():
        return (path / _INDEX).exists() or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors"


class _Writer:
    """The files of a checkpoint while they are written: each tensor is converted when its first part is written."""

    def __init__(
        self, kind: SafetensorsFormat, tensors: Mapping[str, Tensor], entries: Mapping[str, TensorInfo], info: Info
    ) -> None:
        self._kind, self._tensors, self._entries, self._info = kind, tensors, entries, info
        self._parts: dict[str, np.ndarray] = {}  # of the last tensor, by their names in the file
        self._last = ""

    def _convert(self, part: str, name: str) -> np.ndarray:
        if name != self._last:
            tensor, entry = self._tensors[name], self._entries[name]
            if not isinstance(tensor, QuantizedArray):
                if set(entry.stored) != {""}:
                    expected = f"a QuantizedArray, because it is stored as {entry.stored_as}"
                    raise CheckpointError(f"tensor {shorten_name(name)!r}: expected {expected}, got an array")
                self._parts = {entry.stored[""]: np.asarray(tensor)}
            else:
                roles = self._kind.write(tensor, entry, self._info)
                self._parts = {entry.stored[role]: np.asarray(array) for role, array in roles.items()}
            self._last = name
        if part not in self._parts:
            raise CheckpointError(f"tensor {shorten_name(name)!r}: {self._kind.name} does not write {part!r}")
        return self._parts[part]

    def write(self, stream: BinaryIO, header: bytes, parts: Mapping[str, str]) -> None:
        """Write a file: with its old header if this fits, and else with a new one.

        Args:
            stream: the file.
            header: the old header.
            parts: for each of the file's tensors, the name of the tensor that it belongs to.
        """
        old = _parse_object(pathlib.Path(_SINGLE), header)
        metadata, is_same = old.pop(_METADATA, None), True
        kept = self._info.container.get("kept", {})
        if _merge_metadata(kept) != self._info.metadata.get("safetensors", {}):
            metadata, is_same = self._info.metadata.get("safetensors"), False
            if not isinstance(metadata, dict | None) or not all(
                isinstance(text, str) for pair in (metadata or {}).items() for text in pair
            ):
                raise CheckpointError(f"info.metadata['safetensors']: expected a dict of strings, got {metadata!r}")
        # In the order of the bytes, which may differ from the header's.
        order = sorted((name for name in old if name in parts), key=lambda name: old[name]["data_offsets"])
        order += [name for name in parts if name not in old]
        if _METADATA in parts:  # a header has its metadata under this name, so that `load` would not find the tensor
            raise CheckpointError(f"tensor {_METADATA!r}: expected a name that safetensors has not reserved")
        # The data are written first: the header needs their shapes, and converting all tensors twice takes long.
        with tempfile.TemporaryFile() as body:
            fields: dict[str, dict[str, Any]] = {}
            start = 0
            for part in order:
                array = self._convert(part, parts[part])
                if array.dtype not in _NAMES:
                    got = f"{array.dtype} for {shorten_name(part)!r}"
                    raise CheckpointError(f"expected a dtype of {', '.join(_NAMES.values())}, got {got}")
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                body.write(data.data)
                fields[part] = {
                    "dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, start + data.size]
                }  # fmt: skip
                start += data.size
            if fields != old or not is_same:
                new: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
                header = json.dumps(new | fields, separators=(",", ":")).encode()
                header += b" " * (-len(header) % 8)
            stream.write(len(header).to_bytes(8, "little"))
            stream.write(header)
            body.seek(0)
            shutil.copyfileobj(body, stream, 2**24)
