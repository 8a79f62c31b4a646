"""Checkpoints of packed quantized arrays: as plain arrays, in safetensors files and in Orbax folders."""

from .._arrays.packing import pack, unpack
from .arrays import from_arrays, to_arrays
from .orbax import load_orbax, save_orbax
from .safetensors import load_safetensors, save_safetensors

__all__ = [
    "from_arrays",
    "load_orbax",
    "load_safetensors",
    "pack",
    "save_orbax",
    "save_safetensors",
    "to_arrays",
    "unpack",
]


def __dir__() -> list[str]:
    return __all__
