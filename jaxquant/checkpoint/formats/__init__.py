"""The formats of checkpoints: what a format has to say, and the table of the known formats.

A format is a module of this package with an object `FORMAT`, and a row in `MODULES`. It is imported when a file is to
be recognized, or when it is named.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from ..info import Info, Tensor
from ..safetensors_files import SafetensorsFiles

# What there is to read: safetensors files whose headers have been read, or the path of any other file.
Source = SafetensorsFiles | pathlib.Path

# The name of each format, and the module of this package that has it.
MODULES: dict[str, str] = {
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8_blocks",
    "gguf": "gguf",
    "gptq": "gptq",
    "mlx": "mlx",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "safetensors": "plain",
    "torchao": "torchao",
}


class Reader(Protocol):
    """An open checkpoint. Nothing but its description has been read.

    Attributes:
        info: the description of the file and of all its tensors.
    """

    info: Info

    def read(self, name: str) -> Tensor:
        """Return a tensor, with numpy or JAX arrays as parts; set what writing it needs in `info`."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class Format(Protocol):
    """A format of checkpoints.

    Attributes:
        name: its name, as `load(format=...)` takes it.
    """

    name: str

    def recognizes(self, source: Source) -> bool:
        """Return whether a file, or a folder, has the format, without an error for any other one."""
        ...

    def open(self, source: Source, unsupported: str) -> Reader:
        """Return the open checkpoint; raise CheckpointError if it is damaged or has another format."""
        ...

    def save(self, path: pathlib.Path, tensors: Mapping[str, Tensor], info: Info) -> None:
        """Write a checkpoint; raise CheckpointError if the format does not hold the tensors."""
        ...


def find_format(name: str) -> Format:
    """Return the format with a name of `MODULES`."""
    return importlib.import_module(f".{MODULES[name]}", __name__).FORMAT


def iterate_formats() -> Iterable[Format]:
    """Yield all formats."""
    return map(find_format, MODULES)
