"""Checkpoints: files of other programs with their own codes, and quantized arrays in safetensors and Orbax folders."""

from .._arrays.packing import pack, unpack
from .._arrays.saved_programs import deserialize_program
from .arrays import from_arrays, to_arrays
from .files import load, save
from .info import CheckpointError, Info, TensorInfo
from .orbax import load_orbax, save_orbax
from .quantize import quantize_to
from .rename import rename
from .safetensors import load_safetensors, save_safetensors

__all__ = [
    "CheckpointError",
    "Info",
    "TensorInfo",
    "deserialize_program",
    "from_arrays",
    "load",
    "load_orbax",
    "load_safetensors",
    "pack",
    "quantize_to",
    "rename",
    "save",
    "save_orbax",
    "save_safetensors",
    "to_arrays",
    "unpack",
]


def __dir__() -> list[str]:
    return __all__
