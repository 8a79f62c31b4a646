"""Files in read-only memory, small files, and the writing of files and folders that appear when they are whole."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .info import CheckpointError


class MappedFile:
    """A file in read-only memory. Arrays are views of it.

    Attributes:
        path: the file.
        size: its bytes.
    """

    def __init__(self, path: pathlib.Path) -> None:
        try:
            self._stream = open(path, "rb")  # noqa: SIM115 closed by `close`
            self.size = os.fstat(self._stream.fileno()).st_size
            # An empty file cannot be mapped.
            self._map = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except OSError as error:
            raise CheckpointError(f"{path}: expected a file that can be read, got {error.strerror or error}") from error
        self.path = path

    def view(self, start: int, stop: int) -> np.ndarray:
        """Return bytes of the file, uint8, which cannot be written to."""
        if not 0 <= start <= stop <= self.size:
            raise CheckpointError(f"{self.path}: expected bytes {start} to {stop}, got a file of {self.size} bytes")
        return np.frombuffer(self._map, np.uint8, stop - start, start) if stop > start else np.empty(0, np.uint8)

    def close(self) -> None:
        """Close the file. Its memory stays mapped as long as there are views of it."""
        self._stream.close()


def read_small_file(path: pathlib.Path, limit: int) -> bytes:
    """Return the bytes of a file; raise CheckpointError if it has more than `limit`, or cannot be read."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a file that can be read, got {error.strerror or error}") from error
    if len(data) > limit:
        raise CheckpointError(f"{path}: expected at most {limit} bytes, got more")
    return data


def _check_place(path: pathlib.Path) -> None:
    """Raise CheckpointError unless the folder of a path is there."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: expected a path in a folder, got nothing at {path.parent}")


@contextlib.contextmanager
def replace_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which takes the place of `path` at the end, or never exists if an error is raised."""
    _check_place(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: expected the path of a file, got a folder")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner reads.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def replace_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a new folder to write files into, which are moved to the folder `path` at the end, or deleted on errors."""
    _check_place(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: expected the path of a folder, got a file")
    temporary = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        path.mkdir(exist_ok=True)
        for file in sorted(temporary.iterdir()):
            os.replace(file, path / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
