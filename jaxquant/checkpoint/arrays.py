"""Quantized arrays in checkpoints, at their true size: packed codes and a description, for any library that saves
arrays. Orbax and safetensors are imported only where they are asked for.

Descriptions are data: nothing in a file is executed, and what does not fit the arrays beside it is a contract error.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays import quantized_array, serialization
from .._arrays.packing import pack as pack
from .._arrays.packing import unpack as unpack
from .._arrays.quantized_array import QuantizedArray
from .._arrays.static_text import StaticText
from .._core import checks, dtypes
from .stored_arrays import (
    FORMAT,
    KEY,
    PARTS,
    TEXT,
    find_stored_type,
    read_type,
    restore_part,
    restore_quantized,
    restore_text,
    store_part,
    store_text,
    write_description,
)

_AS_BITS = (*dtypes.QUANTIZED, dtypes.E8M0)  # what safetensors knows in part, by names of its own


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray | StaticText)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Mapping) and (KEY in node or set(node) == {TEXT})


def to_arrays(tree: Any) -> Any:
    """arrays = the tree with each QuantizedArray as a dict of arrays that every library can save, at their true size.

    Codes of 4 and 2 bits are packed; float8, bfloat16 and the like are their bits. A uint8 array beside them holds a
    JSON text: what they are, the block size, the code book, the dtype that comes back. What converted Flax layers say
    of their specs is a uint8 array, too, "static_text".

    Args:
        tree: a pytree: dicts, lists, modules, with QuantizedArrays among its leaves. All else is left as it is.

    Returns:
        The tree, with a dict of "codes", "scale", "zero_point" where there is one, and "quantized_array" in place
        of each QuantizedArray.

    Raises:
        TypeError, ValueError: the parts of a QuantizedArray do not fit each other.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((8, 32)), jq.QuantSpec(jnp.int4, jq.PerAxis(0), scale_dtype=jnp.bfloat16))
        >>> arrays = checkpoint.to_arrays({"w": q})
        >>> arrays["w"]["codes"].nbytes, arrays["w"]["scale"].dtype
        (128, dtype('uint16'))
        >>> jax.tree.map(lambda a, b: bool((a == b).all()), checkpoint.from_arrays(arrays), {"w": q})
        {'w': QuantizedArray(codes=True, scale=True, zero_point=None)}

    Source: ONNX TensorProto, "int4, int2 packing".
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, StaticText):
            return store_text(leaf)
        if not _is_quantized(leaf):
            return leaf
        q = quantized_array.check_array("checkpoint.to_arrays", "tree", leaf)
        parts = {name: getattr(q, name) for name in PARTS if getattr(q, name) is not None}
        return {
            **{name: store_part(part) for name, part in parts.items()},
            KEY: write_description(q),
        }

    return jax.tree.map(convert, tree, is_leaf=_is_quantized)


def from_arrays(tree: Any) -> Any:
    """tree = what `to_arrays` made these arrays of, bit for bit.

    Args:
        tree: a pytree as `to_arrays` returns it, or as a library restored it: dicts may have come of other
            containers, and arrays may be numpy's.

    Returns:
        The tree, with a QuantizedArray in place of each dict that is one.

    Raises:
        TypeError: a description is traced, and cannot be read; or what should be an array is none.
        ValueError: a description is damaged, is of a later format, or does not fit its arrays.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.array([[0.5, -7.0], [2.0, 1.0]]), jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> checkpoint.from_arrays(checkpoint.to_arrays([q]))
        [QuantizedArray(int4[2,2], scale=float32[2,1], zero_point=None, dtype=float32, nbytes=10)]

    Source: ONNX TensorProto, "int4, int2 packing".
    """
    return _restore("checkpoint.from_arrays", tree)


def _restore(function: str, tree: Any) -> Any:
    """Returns what `from_arrays` does, with errors that name another function."""

    def convert(path: tuple[Any, ...], node: Any) -> Any:
        if not _is_packed(node):
            return node
        restore = restore_quantized if KEY in node else restore_text
        return restore(function, f"tree{jax.tree_util.keystr(path)}", node)

    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=_is_packed)


def _import_library(function: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = checks.format_message(
            function, "path", f"{module}: pip install 'jaxquant[checkpoint]'", "none installed"
        )
        raise ModuleNotFoundError(text) from error


def save_safetensors(path: str | os.PathLike[str], tree: Mapping[str, Any]) -> None:
    """file = the arrays of the tree under their keys joined by "/", packed as `to_arrays` packs them.

    Args:
        path: the file to write.
        tree: dicts in dicts of arrays and QuantizedArrays; the keys are strings without "/".

    Returns:
        None.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        TypeError: there is something other than dicts and arrays.
        ValueError: a key has a "/" in it, a dict is empty, or parts do not fit each other.

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
    name = "checkpoint.save_safetensors"
    library = _import_library(name, "safetensors.numpy")
    tensors, bits = {}, {}
    for key, leaf in _flatten(name, to_arrays(tree), ()):
        array = np.asarray(leaf)
        if array.dtype in _AS_BITS and array.dtype.isbuiltin != 1:
            bits[key] = {"dtype": array.dtype.name, "shape": list(array.shape)}
            array = np.asarray(store_part(array))
        tensors[key] = np.asarray(array, order="C")
    library.save_file(tensors, os.fspath(path), metadata={FORMAT: json.dumps(bits)})


def _flatten(function: str, tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    place = "tree" + "".join(f"[{key!r}]" for key in keys)
    if not isinstance(tree, Mapping):
        is_array = isinstance(tree, jax.Array | np.ndarray) and bool(keys)
        checks.require_type(is_array, function, place, "dicts of arrays", type(tree).__name__)
        yield "/".join(keys), tree
        return
    checks.require(bool(tree) or not keys, function, place, "a dict with something in it", "{}")
    for key, value in tree.items():
        checks.require_type(isinstance(key, str), function, place, "keys that are strings", repr(key))
        checks.require("/" not in key, function, place, 'keys without "/"', repr(key))
        yield from _flatten(function, value, (*keys, key))


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """tree = what `save_safetensors` wrote to a file, bit for bit.

    Args:
        path: the file. One that another program wrote will do: its names are taken apart at "/".

    Returns:
        Dicts in dicts of arrays: numpy's, and QuantizedArrays.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: it is no safetensors file, or is damaged; or a QuantizedArray's arrays do not fit its description.

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
    function = "checkpoint.load_safetensors"
    library = _import_library(function, "safetensors")
    try:
        with library.safe_open(os.fspath(path), framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 it is no dict
    except library.SafetensorError as error:
        text = checks.format_message(function, "path", "a safetensors file", f"{os.fspath(path)!r}: {error}")
        raise checks.ContractValueError(text) from error
    place = f"path, the metadata {FORMAT!r}"
    bits = serialization.parse_json(function, place, metadata.get(FORMAT, "{}"))
    is_table = isinstance(bits, dict) and set(bits) <= set(arrays)
    if not is_table:
        got = ", ".join(map(repr, bits)) if isinstance(bits, dict) else type(bits).__name__
        checks.require(False, function, place, "an object whose names are those of tensors", got)
    for key, described in bits.items():
        dtype, shape = read_type(function, f"{place}[{key!r}]", described)
        arrays[key] = np.asarray(restore_part(function, f"tree[{key!r}]", arrays[key], dtype, shape))
    return _restore(function, _nest(function, arrays))


def _nest(function: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays in dicts in dicts, by their names taken apart at "/"."""
    tree: dict[str, Any] = {}
    expected = 'no tensor name that is a prefix of another, as "a" is of "a/b"'
    for key, array in arrays.items():
        *outer, last = key.split("/")
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
            checks.require(isinstance(node, dict), function, "path", expected, repr(key))
        checks.require(last not in node, function, "path", expected, repr(key))
        node[last] = array
    return tree


def save_orbax(path: str | os.PathLike[str], tree: Any) -> None:
    """folder = the arrays of the tree as Orbax saves them, QuantizedArrays packed as `to_arrays` packs them.

    Args:
        path: the folder to make; there must be none yet.
        tree: a pytree of arrays and QuantizedArrays, sharded or not. Orbax saves no array without elements.

    Returns:
        None, when it is written.

    Raises:
        ModuleNotFoundError: orbax-checkpoint is not installed.
        ValueError: parts do not fit each other; or Orbax refuses.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((4, 6)), jq.QuantSpec(jq.nf4, jq.Blocked(1, 4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save_orbax(os.path.join(folder, "step"), {"w": q})
        ...     checkpoint.load_orbax(os.path.join(folder, "step"))["w"]
        QuantizedArray(nf4[4,6], scale=float32[4,2], zero_point=None, block_size=4, dtype=float32, nbytes=44)

    Source: orbax.checkpoint.StandardCheckpointer.
    """
    library = _import_library("checkpoint.save_orbax", "orbax.checkpoint")
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(path), to_arrays(tree))
        checkpointer.wait_until_finished()


def load_orbax(path: str | os.PathLike[str], like: Any = None) -> Any:
    """tree = what `save_orbax` wrote to a folder, bit for bit.

    Args:
        path: the folder.
        like: a pytree like the one that was saved, of arrays or of `jax.ShapeDtypeStruct`, as `jax.eval_shape` makes
            them: its containers come back, and its shardings. None brings dicts and lists, placed as they were saved.

    Returns:
        The tree.

    Raises:
        ModuleNotFoundError: orbax-checkpoint is not installed.
        ValueError: `like` is not what was saved; or a description is damaged, or does not fit its arrays.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((4, 6)), jq.QuantSpec(jnp.int4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save_orbax(os.path.join(folder, "step"), (q,))
        ...     checkpoint.load_orbax(os.path.join(folder, "step"), jax.eval_shape(lambda: (q,)))
        (QuantizedArray(int4[4,6], scale=float32[1,1], zero_point=None, dtype=float32, nbytes=16),)

    Source: orbax.checkpoint.StandardCheckpointer.
    """
    library = _import_library("checkpoint.load_orbax", "orbax.checkpoint")
    with library.StandardCheckpointer() as checkpointer:
        if like is None:
            return _restore("checkpoint.load_orbax", checkpointer.restore(os.path.abspath(path)))
        target = jax.tree.map(
            lambda leaf: _make_target(leaf) if _is_quantized(leaf) else leaf, like, is_leaf=_is_quantized
        )
        tree = _restore("checkpoint.load_orbax", checkpointer.restore(os.path.abspath(path), target))
    expected, got = jax.tree.structure(like), jax.tree.structure(tree)
    checks.require(expected == got, "checkpoint.load_orbax", "like", f"{got}, as it was saved", expected)
    return jax.tree.map(_place_like, tree, like)


def _make_target(q: QuantizedArray | StaticText) -> dict[str, Any]:
    """Returns what Orbax restores a QuantizedArray's arrays into: placed as its parts are where they are not packed."""
    if isinstance(q, StaticText):
        return store_text(q)
    target: dict[str, Any] = {KEY: write_description(q)}
    for name in PARTS:
        if (part := getattr(q, name)) is None:
            continue
        dtype, shape = find_stored_type(np.dtype(part.dtype), part.shape)
        place = getattr(part, "sharding", None)
        if isinstance(place, NamedSharding) and shape != part.shape:
            place = NamedSharding(place.mesh, PartitionSpec())
        target[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    return target


def _place_like(array: Any, like: Any) -> Any:
    place = getattr(like, "sharding", None)
    return array if place is None else jax.device_put(array, place)
