"""The bytes of a model, read and decoded; external data only from files in the model's folder."""

from __future__ import annotations

import os
import pathlib
import stat

import onnx

from ..errors import ModelError
from .limits import Limits
from .values import count_elements, count_stored_bytes, find_tensor_dtype

Source = str | os.PathLike[str] | bytes | onnx.ModelProto


def read_model(source: Source, limits: Limits) -> onnx.ModelProto:
    """Return the model of a file, of bytes, or a copy of a ModelProto, with its external data in it."""
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        model = _decode(bytes(source))
    elif isinstance(source, str | os.PathLike):
        model = _decode(_read_range(pathlib.Path(source), 0, None, limits.file_bytes))
    else:
        raise TypeError(f"jaxquant.onnx.load: model: expected a path, bytes or ModelProto, got {type(source).__name__}")
    if not model.HasField("graph"):
        raise ModelError("expected a model with a graph, got none: the file is empty or is no ONNX model")
    return model


def load_external_data(model: onnx.ModelProto, folder: pathlib.Path | None, limits: Limits) -> None:
    """Replace external data by the bytes of the files, which must be in `folder`."""
    # The limit is for all tensors together: many of them may name the same bytes.
    remaining = limits.file_bytes
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        if folder is None:
            raise ModelError(f"tensor {tensor.name!r} has external data, but the model was not loaded from a path")
        data = _read_tensor(tensor, folder, remaining)
        remaining -= len(data)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data


def find_folder(source: Source) -> pathlib.Path | None:
    """Return the folder of a model's file, or None for a model that is no file."""
    return pathlib.Path(source).resolve().parent if isinstance(source, str | os.PathLike) else None


def _decode(data: bytes) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(data)
    except Exception as error:  # DecodeError, UnicodeDecodeError, and whatever another protobuf raises
        raise ModelError(f"the bytes are not an ONNX model: {type(error).__name__}: {error}") from error


def _read_tensor(tensor: onnx.TensorProto, folder: pathlib.Path, remaining: int) -> bytes:
    """Return the bytes of a tensor with external data, after checking where they are and how many they are."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = f"the external data of tensor {tensor.name!r}"
    location = entries.get("location", "")
    path = pathlib.PurePosixPath(location)
    # Backslashes, and the colons after a drive and before a stream, are parts of paths on Windows.
    unsafe = not location or path.is_absolute() or "\\" in location or ":" in location or "\0" in location
    if unsafe or any(part in ("..", ".") for part in location.split("/")):
        raise ModelError(f"{name}: expected a relative path inside the model's folder, got {location!r}")
    target = folder / path
    # A symbolic link anywhere in the path would lead out of the folder.
    if os.path.realpath(target) != os.path.join(os.path.realpath(folder), *path.parts):
        raise ModelError(f"{name}: expected a file inside the model's folder, got {location!r}, which is a link")
    offset, length = (_read_number(name, key, entries.get(key)) for key in ("offset", "length"))
    expected = count_stored_bytes(count_elements(tensor), find_tensor_dtype(tensor))
    # The model contradicts itself, and nothing tells which of the two numbers is wrong.
    if length is not None and length != expected:
        raise ModelError(f"{name}: expected length {expected}, that of its dims and data type, got {length}")
    if expected > remaining:
        raise ModelError(f"{name} takes {expected} bytes; Limits.file_bytes leaves {remaining}")
    try:
        return _read_range(target, offset or 0, expected, remaining)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def _read_number(name: str, key: str, text: str | None) -> int | None:
    if text is None:
        return None
    # int() also takes signs, spaces, underscores and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(f"{name}: expected a number as {key}, got {text[:40]!r}")
    return int(text)


def _read_range(path: pathlib.Path, offset: int, length: int | None, most: int) -> bytes:
    """Return `length` bytes of a regular file from `offset` on, or all of it; never more than `most`."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error
    # Of the open file: another one may get its name in the meantime.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # `open` raises an error that names the number of a folder, and leaves it open
        raise ModelError(f"expected a regular file, got {str(path)!r}")
    with open(descriptor, "rb") as file:
        # A second name of a file may be one outside the folder. The model itself is the caller's choice.
        if length is not None and status.st_nlink > 1:
            raise ModelError(f"expected a file without hard links, got {str(path)!r}")
        size = status.st_size - offset if length is None else length
        if offset + size > status.st_size or size < 0:
            raise ModelError(f"expected bytes {offset} to {offset + size}, got a file of {status.st_size} bytes")
        if size > most:
            raise ModelError(f"the file has {size} bytes, more than Limits.file_bytes allows: {most}")
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise ModelError(f"expected {size} bytes, got {len(data)}: the file became shorter")
    return data
