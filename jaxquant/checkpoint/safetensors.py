"""Saving and loading trees of arrays and quantized arrays as safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._arrays.parts import parse_json
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes
from .arrays import (
    FORMAT,
    import_library,
    is_stored_apart,
    read_type,
    restore_part,
    restore_tree,
    store_part,
    to_arrays,
)

_SAVE, _LOAD = "checkpoint.save_safetensors", "checkpoint.load_safetensors"
# safetensors has names for some of these dtypes only, so all of them are stored as bits.
_AS_BITS = (*dtypes.QUANTIZED, dtypes.E8M0)
# The entry of the metadata that describes the containers. Nested dicts of arrays have none: the names tell them.
_STRUCTURE = "jaxquant.structure"
_CONTAINERS = "dicts, lists, tuples, namedtuples or other pytrees of arrays, numbers and None"


def save_safetensors(path: str | os.PathLike[str], tree: object) -> None:
    """Save the arrays of a tree in a safetensors file.

    The name of a tensor consists of the keys, indices and names of fields that lead to it, joined by "/".
    QuantizedArrays are packed as by `to_arrays`. The metadata of the file say which parts are lists, tuples, None or
    Python numbers.

    Args:
        path: the file to write.
        tree: nested dicts, lists, tuples, namedtuples and other pytrees of arrays, QuantizedArrays, None and Python
            numbers, such as a `QuantizedTree`. The keys of dicts are strings.

    Returns:
        None.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        TypeError: the tree contains something else, is an array alone, or a key is not a string.
        ValueError: two arrays would have the same name, because keys contain "/"; or the parts of a QuantizedArray do
            not fit each other.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((256, 256)), jq.QuantSpec(jnp.int4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "weights.safetensors")
        ...     checkpoint.save_safetensors(path, {"layers": [{"w": q, "b": jnp.zeros(256, jnp.bfloat16)}]})
        ...     os.path.getsize(path) // 1024, checkpoint.load_safetensors(path)["layers"][0]["w"].dequantize().shape
        (33, (256, 256))

    Source: the safetensors format.
    """
    library = import_library(_SAVE, "safetensors.numpy")
    tensors, bits, arrays = {}, {}, {}
    structure = _describe_node(to_arrays(tree), "tree", (), arrays)
    reserved = "__metadata__"  # where a header has its metadata: a file with such a tensor could not be loaded
    checks.require(reserved not in arrays, _SAVE, "tree", "names that safetensors has not reserved", repr(reserved))
    for name, leaf in arrays.items():
        array = np.asarray(leaf)
        if array.dtype in _AS_BITS and array.dtype.isbuiltin != 1:
            bits[name] = {"dtype": array.dtype.name, "shape": list(array.shape)}
            array = np.asarray(store_part(array))
        # safetensors writes the buffer without regard to strides.
        tensors[name] = np.asarray(array, order="C")
    metadata = {FORMAT: json.dumps(bits)}
    if not _is_plain(structure, is_root=True):
        metadata[_STRUCTURE] = json.dumps(structure)
    library.save_file(tensors, os.fspath(path), metadata=metadata)


# The structure of a tree, as JSON: null for an array, and an object with one key for everything else: the kind.


def _describe_node(node: object, place: str, names: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    """Return the structure of a part of a tree, and collect its arrays by their names.

    Args:
        node: the part.
        place: the Python expression for it, for errors.
        names: the parts of the names of its arrays.
        arrays: the arrays so far.
    """
    if names and isinstance(node, jax.Array | np.ndarray | np.generic):
        # {"a/b": x, "a": {"b": y}}
        name = "/".join(names)
        checks.require(name not in arrays, _SAVE, place, 'a name of its own, with the keys joined by "/"', repr(name))
        arrays[name] = node
        return None
    if names and node is None:
        return {"none": None}
    if names and isinstance(node, bool | int | float):
        return {"number": node}
    children = list_children(node)
    if children is None:
        checks.refuse_type(_SAVE, place, _CONTAINERS, type(node).__name__)
        return None
    for key, _ in children:
        # Check all keys before the leaves, so that the error names the outermost fault.
        if not isinstance(key, str):
            checks.refuse_type(_SAVE, place, "keys that are strings", repr(key))
    is_sequence = type(node) in (list, tuple)
    parts = {
        key: _describe_node(child, f"{place}[{key if is_sequence else repr(key)}]", (*names, key), arrays)
        for key, child in children
    }
    if is_sequence:
        return {type(node).__name__: list(parts.values())}
    return {"dict" if isinstance(node, Mapping) else "node": parts}


def list_children(node: object) -> list[tuple[Any, Any]] | None:
    """Return the children of a node of a pytree with their keys, or with their fields or indices as text.

    The result is None for a leaf.
    """
    if node is None or jax.tree_util.all_leaves([node]):
        return None
    if isinstance(node, dict):
        return list(node.items())  # JAX cannot sort keys of several types
    children = _flatten_once(node)[0]
    # A mapping that has no children as a pytree, such as ranges that training must not change, is stored empty.
    return list(node.items()) if isinstance(node, Mapping) and children else children


def _flatten_once(node: object) -> tuple[list[tuple[str, Any]], Any]:
    """Return the children of a node of a pytree with their names, and its structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [(read_key(path[0]), child) for path, child in pairs], structure


def read_key(key: object) -> str:
    """Return an entry of the path of a leaf as text."""
    return str(next(getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)))


def _is_plain(structure: dict[str, Any] | None, is_root: bool = False) -> bool:
    """Return whether the names of the tensors tell a structure: nested dicts of arrays, none of them empty."""
    if structure is None:
        return True
    (kind, parts) = next(iter(structure.items()))
    has_children = kind == "dict" and (bool(parts) or is_root)
    return has_children and not any("/" in key for key in parts) and all(map(_is_plain, parts.values()))


def load_safetensors(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Return the tree in a safetensors file, bit for bit as it was passed to `save_safetensors`.

    Args:
        path: the file. It may have been written by another program: tensor names are split at "/".
        like: a pytree like the saved one, of arrays, of `jax.ShapeDtypeStruct` or of anything else. The result has its
            containers. With None, namedtuples and other nodes that a file cannot name come back as dicts of their
            fields.

    Returns:
        Dicts, lists and tuples of numpy arrays, QuantizedArrays, None and Python numbers; or a tree like `like`.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: the file is damaged or is not a safetensors file, the arrays of a QuantizedArray do not fit its
            description, or the file holds another tree than `like`.

    Example:
        >>> import os, tempfile, numpy as np
        >>> from jaxquant import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "weights.safetensors")
        ...     checkpoint.save_safetensors(path, {"layers": [{"b": np.array([1.5], np.float32)}, None]})
        ...     checkpoint.load_safetensors(path)
        {'layers': [{'b': array([1.5], dtype=float32)}, None]}

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
    bits = parse_json(_LOAD, place, metadata.get(FORMAT, "{}"))
    if not isinstance(bits, dict) or not set(bits) <= set(arrays):
        got = ", ".join(map(repr, bits)) if isinstance(bits, dict) else type(bits).__name__
        checks.refuse(_LOAD, place, "an object with names of tensors as keys", got)
    for name, description in bits.items():
        dtype, shape = read_type(_LOAD, f"{place}[{name!r}]", description)
        arrays[name] = np.asarray(restore_part(_LOAD, f"tree[{name!r}]", arrays[name], dtype, shape))
    tree = _nest_arrays(arrays) if _STRUCTURE not in metadata else _read_structure(metadata[_STRUCTURE], arrays)
    restored = restore_tree(_LOAD, tree)
    return restored if like is None else _fill_containers(like, restored, "like")


def _read_structure(text: str, arrays: dict[str, Any]) -> Any:
    """Return arrays in the containers that the metadata describe."""
    place, left = f"path, the metadata {_STRUCTURE!r}", dict(arrays)
    try:
        tree = _build_node(place, parse_json(_LOAD, place, text), (), left)
    except RecursionError:
        checks.refuse(_LOAD, place, "a structure of bounded depth", "one that is nested too deeply")
        raise
    checks.require(not left, _LOAD, place, "a place for each tensor", f"none for {', '.join(map(repr, left))}")
    return tree


def _build_node(place: str, structure: Any, names: tuple[str, ...], left: dict[str, Any]) -> Any:
    """Return the part of a tree that a structure describes, with its arrays, which are taken from `left`."""
    if structure is None:
        name = "/".join(names)
        checks.require(name in left, _LOAD, place, "names of tensors, each once", repr(name))
        return left.pop(name)
    kind, parts = next(iter(structure.items())) if isinstance(structure, dict) and len(structure) == 1 else ("", None)
    if kind == "none" and parts is None:
        return None
    if kind == "number" and isinstance(parts, bool | int | float):
        return parts
    if kind in ("list", "tuple") and isinstance(parts, list):
        children = [_build_node(place, part, (*names, str(i)), left) for i, part in enumerate(parts)]
        return children if kind == "list" else tuple(children)
    is_dict = kind in ("dict", "node") and isinstance(parts, dict)
    expected = "null, or an object with a kind of node (dict, node, list, tuple, number, none)"
    checks.require(is_dict, _LOAD, place, expected, f"something else for {'/'.join(names)!r}")
    assert isinstance(parts, dict)
    return {key: _build_node(place, part, (*names, key), left) for key, part in parts.items()}


def _fill_containers(like: Any, tree: Any, place: str) -> Any:
    """Return a loaded tree in the containers of another one."""
    expected = "a tree like the one that was saved"
    if is_stored_apart(like) or list_children(like) is None:
        kinds = [(x is None, isinstance(x, QuantizedArray), isinstance(x, dict | list | tuple)) for x in (like, tree)]
        is_same = kinds[0] == kinds[1]
        if is_same and hasattr(like, "shape") and hasattr(tree, "shape"):
            is_same = (tuple(like.shape), like.dtype) == (tuple(tree.shape), tree.dtype)
        got = f"{checks.describe_value(tree)} for {checks.describe_value(like)}"
        checks.require(is_same, _LOAD, place, expected, got)
        return tree
    pairs, structure = _flatten_once(like)
    saved = {str(i): part for i, part in enumerate(tree)} if isinstance(tree, list | tuple) else tree
    names = [str(key) for key, _ in pairs]
    got = ", ".join(map(repr, saved)) if isinstance(saved, dict) else type(tree).__name__
    is_same = isinstance(saved, dict) and sorted(saved) == sorted(names)
    expected = f"{expected}, with {', '.join(map(repr, names)) or 'nothing'} here"
    checks.require(is_same, _LOAD, place, expected, got or "nothing")
    parts = [_fill_containers(child, saved[str(key)], f"{place}[{key!r}]") for key, child in pairs]
    return jax.tree_util.tree_unflatten(structure, parts)


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
