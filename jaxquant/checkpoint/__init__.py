"""Quantized arrays in checkpoints, at their true size: packed codes and a description, for any library that saves
arrays. Orbax and safetensors are imported only where they are asked for."""

from .arrays import from_arrays as from_arrays
from .arrays import load_orbax as load_orbax
from .arrays import load_safetensors as load_safetensors
from .arrays import pack as pack
from .arrays import save_orbax as save_orbax
from .arrays import save_safetensors as save_safetensors
from .arrays import to_arrays as to_arrays
from .arrays import unpack as unpack
