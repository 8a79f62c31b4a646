"""Saving and loading trees of arrays and quantized arrays as safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._arrays import serialization
from .._core import checks, dtypes
from .arrays import import_library, restore_tree, to_arrays
from .stored_arrays import FORMAT, read_type, restore_part, store_part

_SAVE, _LOAD = "checkpoint.save_safetensors", "checkpoint.load_safetensors"
# safetensors has names for some of these dtypes only, so all of them are stored as bits.
_AS_BITS = (*dtypes.QUANTIZED, dtypes.E8M0)


def save_safetensors(path: str | os.PathLike[str], tree: Mapping[str, Any]) -> None:
    """Save the arrays of a tree of dicts in a safetensors file.

    The name of a tensor consists of its keys, joined by "/". QuantizedArrays are packed as by `to_arrays`.

    Args:
        path: the file to write.
        tree: nested dicts of arrays and QuantizedArrays. The keys are strings without "/".

    Returns:
        None.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        TypeError: the tree contains something other than dicts and arrays, or a key is not a string.
        ValueError: a key contains "/", a dict is empty, or the parts of a QuantizedArray do not fit each other.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((256, 256)), jq.QuantSpec(jnp.int4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "weights.safetensors")
        ...     checkpoint.save_safetensors(path, {"layer": {"w": q, "b": jnp.zeros(256, jnp.bfloat16)}})
        ...     os.path.getsize(path) // 1024, checkpoint.load_safetensors(path)["layer"]["w"].dequantize().shape
        (33, (256, 256))

    Source: the safetensors format.
    """
    library = import_library(_SAVE, "safetensors.numpy")
    tensors, bits = {}, {}
    for name, leaf in _name_arrays(to_arrays(tree)).items():
        array = np.asarray(leaf)
        if array.dtype in _AS_BITS and array.dtype.isbuiltin != 1:
            bits[name] = {"dtype": array.dtype.name, "shape": list(array.shape)}
            array = np.asarray(store_part(array))
        # safetensors writes the buffer without regard to strides.
        tensors[name] = np.asarray(array, order="C")
    library.save_file(tensors, os.fspath(path), metadata={FORMAT: json.dumps(bits)})


def _name_arrays(tree: Any) -> dict[str, Any]:
    """Return the arrays of nested dicts under their keys joined by "/"."""
    # JAX leaves out empty dicts unless they are leaves; a file could not restore them.
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: not (isinstance(node, Mapping) and node)
    )
    arrays: dict[str, Any] = {}
    for path, leaf in leaves:
        # Check the keys before the leaf, so that the error names the outermost fault.
        names = [_read_key(path[:depth], entry.key) for depth, entry in enumerate(path)]
        if isinstance(leaf, Mapping) and not leaf:
            checks.require(not path, _SAVE, _describe_place(path), "a dict that is not empty", "{}")
            continue
        if not path or not isinstance(leaf, jax.Array | np.ndarray):
            checks.require_type(False, _SAVE, _describe_place(path), "nested dicts of arrays", type(leaf).__name__)
        arrays["/".join(names)] = leaf
    return arrays


def _read_key(place: tuple[Any, ...], key: Any) -> str:
    """Check that a key of the dict at this place can be a part of a tensor's name, and return it."""
    if not isinstance(key, str):
        checks.require_type(False, _SAVE, _describe_place(place), "keys that are strings", repr(key))
    if "/" in key:
        checks.require(False, _SAVE, _describe_place(place), 'keys without "/"', repr(key))
    return key


def _describe_place(path: tuple[Any, ...]) -> str:
    return f"tree{jax.tree_util.keystr(path)}"


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tree in a safetensors file, bit for bit as it was passed to `save_safetensors`.

    Args:
        path: the file. It may have been written by another program: tensor names are split at "/".

    Returns:
        Nested dicts of numpy arrays and QuantizedArrays.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: the file is damaged or is not a safetensors file, or the arrays of a QuantizedArray do not fit its
            description.

    Example:
        >>> import os, tempfile, numpy as np
        >>> from jaxquant import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "weights.safetensors")
        ...     checkpoint.save_safetensors(path, {"layer": {"b": np.array([1.5], np.float32)}})
        ...     checkpoint.load_safetensors(path)
        {'layer': {'b': array([1.5], dtype=float32)}}

    Source: the safetensors format.
    """
    library = import_library(_LOAD, "safetensors")
    try:
        with library.safe_open(os.fspath(path), framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 the file is not a dict
    except library.SafetensorError as error:
        text = checks.format_message(_LOAD, "path", "a safetensors file", f"{os.fspath(path)!r}: {error}")
        raise checks.ContractValueError(text) from error
    place = f"path, the metadata {FORMAT!r}"
    # A file of another program has no such metadata.
    bits = serialization.parse_json(_LOAD, place, metadata.get(FORMAT, "{}"))
    if not isinstance(bits, dict) or not set(bits) <= set(arrays):
        got = ", ".join(map(repr, bits)) if isinstance(bits, dict) else type(bits).__name__
        checks.require(False, _LOAD, place, "an object whose keys are names of tensors", got)
    for name, description in bits.items():
        dtype, shape = read_type(_LOAD, f"{place}[{name!r}]", description)
        arrays[name] = np.asarray(restore_part(_LOAD, f"tree[{name!r}]", arrays[name], dtype, shape))
    return restore_tree(_LOAD, _nest_arrays(arrays))


def _nest_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays in nested dicts, with their names split at "/"."""
    tree: dict[str, Any] = {}
    expected = 'no tensor name to be a prefix of another, such as "a" of "a/b"'
    for name, array in arrays.items():
        *outer, last = name.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
            checks.require(isinstance(node, dict), _LOAD, "path", expected, repr(name))
        # Both orders occur: "a" before "a/b", and "a/b" before "a".
        checks.require(last not in node, _LOAD, "path", expected, repr(name))
        node[last] = array
    return tree
