"""`load` and `save`: checkpoints as other programs write them, with their own codes."""

from __future__ import annotations

import fnmatch
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from . import formats
from .info import CheckpointError, Info, Tensor, list_some, shorten_name
from .place import place_tensor
from .safetensors_files import SafetensorsFiles, is_safetensors

_LOAD, _SAVE = "checkpoint.load", "checkpoint.save"
UNSUPPORTED = ("raise", "keep_bytes")


def load(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    names: str | Sequence[str] | None = None,
    sharding: Sharding | Callable[[str, tuple[int, ...]], Sharding | None] | None = None,
    unsupported: str = "raise",
) -> tuple[dict[str, Any], Info]:
    """Return the tensors of a checkpoint that another program wrote, with the codes and the scales of the file.

    Nothing is dequantized. The file is not trusted: whatever is wrong with it raises CheckpointError, and what is read
    lies in the file, or in the folder.

    Args:
        path: a GGUF file, a safetensors file, or a folder with safetensors files and a config.json.
        format: the name of the format, such as "gguf", or None to recognize it.
        names: patterns of the tensors to load, such as "blk.0.*"; None loads all.
        sharding: where to put the tensors: a sharding of logical shapes for all, or a function of a tensor's name and
            shape. By default the default device.
        unsupported: what becomes of tensors in a type that jaxquant does not decode: "raise", or "keep_bytes", which
            returns them as uint8 of shape (..., bytes of a row) with a note in the info.

    Returns:
        A dict of QuantizedArrays and arrays by name, in the order of the file, and the `Info`. Tensors that are not
        quantized have the dtype of the file; 64 bits that JAX does not have come as numpy arrays.

    Raises:
        CheckpointError: the file is damaged, unsafe or not supported.
        TypeError: an argument has a wrong type.
        ValueError: the format is unknown, or no tensor has one of the names.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, numpy as np
        >>> from jaxquant import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.safetensors")
        ...     checkpoint.save(path, {"norm": jnp.ones(4)}, checkpoint.Info("safetensors"))
        ...     tensors, info = checkpoint.load(path)
        >>> tensors["norm"], info.format
        (Array([1., 1., 1., 1.], dtype=float32), 'safetensors')

    Source: the formats named in docs/checkpoint-files.md and docs/checkpoint-families.md.
    """
    reader = open_checkpoint(_LOAD, path, format, unsupported)
    try:
        selected = _select_names(reader.info, names)
        reader.info.tensors = {name: reader.info.tensors[name] for name in selected}
        tensors = {}
        for name in selected:
            place = sharding
            if callable(sharding) and not isinstance(sharding, Sharding):
                place = sharding(name, reader.info.tensors[name].shape)
            is_sharding = place is None or isinstance(place, Sharding)
            checks.require_type(is_sharding, _LOAD, "sharding", "a jax.sharding.Sharding", type(place).__name__)
            tensors[name] = place_tensor(_LOAD, name, reader.read(name), place)  # pyright: ignore[reportArgumentType]
    finally:
        reader.close()
    return tensors, reader.info


def open_checkpoint(
    function: str, path: str | os.PathLike[str], format: str | None, unsupported: str = "raise"
) -> formats.Reader:
    """Return an open checkpoint; only its description has been read."""
    is_path = isinstance(path, str | os.PathLike)
    checks.require_type(is_path, function, "path", "the path of a file or a folder", type(path).__name__)
    checks.check_option(function, "unsupported", unsupported, UNSUPPORTED)
    if format is not None:
        checks.check_option(function, "format", format, tuple(formats.MODULES))
    place = pathlib.Path(path)
    if not place.exists():
        raise CheckpointError(f"{place}: expected a file or a folder, got nothing there")
    source = SafetensorsFiles(place) if is_safetensors(place) else place
    try:
        kind = _recognize(place, source) if format is None else formats.find_format(format)
        return kind.open(source, unsupported)
    except BaseException:
        if isinstance(source, SafetensorsFiles):
            source.close()
        raise


def _recognize(path: pathlib.Path, source: formats.Source) -> formats.Format:
    """Return the format of a checkpoint."""
    found = [kind for kind in formats.iterate_formats() if kind.recognizes(source)]
    if len(found) != 1:
        names = " and ".join(kind.name for kind in found) or "none of them"
        known = ", ".join(formats.MODULES)
        method = source.quantization.get("quant_method") if isinstance(source, SafetensorsFiles) else None
        method = "" if method is None else f" for the quant_method {shorten_name(repr(method)[:100])}"
        raise CheckpointError(f"{path}: expected a checkpoint of one of the formats {known}, got {names}{method}")
    return found[0]


def _select_names(info: Info, patterns: str | Sequence[str] | None) -> list[str]:
    if patterns is None:
        return list(info.tensors)
    is_iterable = isinstance(patterns, Iterable)
    checks.require_type(is_iterable, _LOAD, "names", "a pattern or several patterns", type(patterns).__name__)
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    selected: dict[str, None] = {}
    for pattern in given:
        checks.require_type(isinstance(pattern, str), _LOAD, "names", "patterns of names", type(pattern).__name__)
        matches = fnmatch.filter(info.tensors, pattern)
        got = f"{pattern!r}, which is none of {list_some([shorten_name(name) for name in info.tensors])}"
        checks.require(bool(matches), _LOAD, "names", "patterns that tensors have", got)
        selected |= dict.fromkeys(matches)
    return [name for name in info.tensors if name in selected]


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], info: Info) -> None:
    """Write a checkpoint in the format of `info`, with the codes and the scales of the tensors.

    What `load` returned is written with the same bytes: of each tensor, and of all metadata. The file, or each file of
    a folder, appears when it is whole.

    Args:
        path: the file, or the folder for formats that are folders. Files of the same names are replaced.
            A folder with other safetensors files is refused, because `load` would read them.
        tensors: QuantizedArrays and arrays by name. Their dtypes are written as they are.
        info: what `load` returned, or an `Info` with the name of a format and with metadata. Each of its tensors is
            among `tensors`. Tensors that it does not list are written behind the others.

    Returns:
        None.

    Raises:
        CheckpointError: the format does not hold a tensor, or a tensor of `info` is missing.
        TypeError: a tensor is not an array.
        ValueError: the parts of a QuantizedArray do not fit each other.

    Example:
        >>> import os, tempfile, jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.safetensors")
        ...     checkpoint.save(path, {"a": jnp.ones(2, jnp.bfloat16)}, checkpoint.Info("safetensors"))
        ...     checkpoint.load(path)[1]
        Info('safetensors', 1 tensor, 4 bytes: 1 BF16)

    Source: the formats named in docs/checkpoint-files.md and docs/checkpoint-families.md.
    """
    is_path = isinstance(path, str | os.PathLike)
    checks.require_type(is_path, _SAVE, "path", "the path of a file or a folder", type(path).__name__)
    checks.require_type(isinstance(info, Info), _SAVE, "info", "an Info", type(info).__name__)
    is_dict = isinstance(tensors, Mapping)
    checks.require_type(is_dict, _SAVE, "tensors", "a dict of arrays by name", type(tensors).__name__)
    checks.check_option(_SAVE, "info.format", info.format, tuple(formats.MODULES))
    checked = {}
    for name, tensor in tensors.items():
        place = f"tensors[{name!r}]"
        checks.require_type(isinstance(name, str), _SAVE, "tensors", "names that are strings", repr(name))
        if isinstance(tensor, QuantizedArray):
            checked[name] = quantized_array.check_array(_SAVE, place, tensor, supports=quantized_array.FORMS)
            continue
        is_array = isinstance(tensor, jax.Array | np.ndarray) and not checks.is_traced(tensor)
        is_array = is_array and not jnp.issubdtype(tensor.dtype, jax.dtypes.extended)  # keys of jax.random
        expected = "an array or a QuantizedArray that is not traced"
        checks.require_type(is_array, _SAVE, place, expected, checks.describe_value(tensor))
        checked[name] = tensor
    missing = [shorten_name(name) for name in info.tensors if name not in checked]
    if missing:
        expected = "all tensors of info, or an info from whose `tensors` the others have been removed"
        raise CheckpointError(f"{path}: expected {expected}, got none for {list_some(missing)}")
    formats.find_format(info.format).save(pathlib.Path(path), checked, info)
