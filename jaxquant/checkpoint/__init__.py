"""Quantized arrays in checkpoints, at their true size: packed codes and a description, for any library that saves
arrays. Orbax and safetensors are imported only where they are asked for."""

from .arrays import from_arrays, load_orbax, load_safetensors, pack, save_orbax, save_safetensors, to_arrays, unpack

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
