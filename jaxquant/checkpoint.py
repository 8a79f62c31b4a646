"""Quantized arrays in checkpoints, at their true size: packed codes and a description, for any library that saves
arrays. Imported by hand, `from jaxquant import checkpoint`; Orbax and safetensors only where they are asked for."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from . import _array, _contracts, _description, _dtypes
from ._array import QuantizedArray
from ._packing import pack as pack
from ._packing import unpack as unpack
from ._static_text import StaticText

_AS_BITS = (*_dtypes.QUANTIZED, _dtypes.E8M0)  # what safetensors knows in part, by names of its own
_KEY = "quantized_array"  # the description lies beside the parts, under this name
_TEXT = "static_text"
_FORMAT, _VERSION = "jaxquant.QuantizedArray", 1
_PARTS = ("values", "scale", "zero_point")


def _stored(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape that an array is stored in: one that every library knows."""
    if _dtypes.width(dtype) < 8:
        return np.dtype(jnp.uint8), (-(-math.prod(shape) * _dtypes.width(dtype) // 8),)
    if dtype.isbuiltin == 1:
        return dtype, shape
    return np.dtype(f"u{dtype.itemsize}"), shape


def _to_stored(part: Any) -> Any:
    part = jnp.asarray(part)
    dtype, _ = _stored(part.dtype, part.shape)
    if _dtypes.width(part.dtype) < 8:
        return pack(part)
    return part if dtype == part.dtype else lax.bitcast_convert_type(part, dtype)


def _from_stored(stored: Any, dtype: np.dtype, shape: tuple[int, ...]) -> jax.Array:
    if _dtypes.width(dtype) < 8:
        return unpack(stored, dtype, shape)
    stored = jnp.asarray(stored)
    wanted = _stored(dtype, shape)
    got = (stored.dtype, stored.shape)
    _contracts.require(got == wanted, "checkpoint.from_arrays", "tree", f"{wanted[0]}{list(shape)}, as described", got)
    return stored if dtype == stored.dtype else lax.bitcast_convert_type(stored, dtype)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray | StaticText)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Mapping) and (_KEY in node or set(node) == {_TEXT})


def to_arrays(tree: Any) -> Any:
    """arrays = the tree with each QuantizedArray as a dict of arrays that every library can save, at their true size.

    Codes of 4 and 2 bits are packed; float8, bfloat16 and the like are their bits. A uint8 array beside them holds a
    JSON text: what they are, the block size, the code book, the dtype that comes back. What converted Flax layers say
    of their specs is a uint8 array, too, "static_text".

    Args:
        tree: a pytree: dicts, lists, modules, with QuantizedArrays among its leaves. All else is left as it is.

    Returns:
        The tree, with a dict of "values", "scale", "zero_point" where there is one, and "quantized_array" in place
        of each QuantizedArray.

    Raises:
        TypeError, ValueError: the parts of a QuantizedArray do not fit each other.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.ones((8, 32)), jq.QuantSpec(jnp.int4, jq.PerAxis(0), scale_dtype=jnp.bfloat16))
        >>> arrays = checkpoint.to_arrays({"w": q})
        >>> arrays["w"]["values"].nbytes, arrays["w"]["scale"].dtype
        (128, dtype('uint16'))
        >>> jax.tree.map(lambda a, b: bool((a == b).all()), checkpoint.from_arrays(arrays), {"w": q})
        {'w': QuantizedArray(values=True, scale=True, zero_point=None)}

    Source: ONNX TensorProto, "int4, int2 packing".
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, StaticText):
            return _encode_text(leaf)
        if not _is_quantized(leaf):
            return leaf
        q = _array.contract("checkpoint.to_arrays", "tree", leaf)
        parts = {name: getattr(q, name) for name in _PARTS if getattr(q, name) is not None}
        return {**{name: _to_stored(part) for name, part in parts.items()}, _KEY: _text(q)}

    return jax.tree.map(convert, tree, is_leaf=_is_quantized)


def _text(q: QuantizedArray) -> np.ndarray:
    """Returns what the parts of a QuantizedArray are, as the bytes of a JSON text."""
    parts = {
        name: {"dtype": np.dtype(part.dtype).name, "shape": list(part.shape)}
        for name in _PARTS
        if (part := getattr(q, name)) is not None
    }
    static = json.loads(_description.encoded((q.dtype, q.block_size, q.codebook)))
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "parts": parts, "static": static})
    return np.frombuffer(text.encode(), np.uint8)


def from_arrays(tree: Any) -> Any:
    """tree = what `to_arrays` made these arrays of, bit for bit.

    Args:
        tree: a pytree as `to_arrays` returns it, or as a library restored it: dicts may have come of other
            containers, and arrays may be numpy's.

    Returns:
        The tree, with a QuantizedArray in place of each dict that is one.

    Raises:
        TypeError: a description is traced, and cannot be read.
        ValueError: a description is none, is of a later format, or does not fit its arrays.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.array([[0.5, -7.0], [2.0, 1.0]]), jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> checkpoint.from_arrays(checkpoint.to_arrays([q]))
        [QuantizedArray(int4[2,2], scale=float32[2,1], zero_point=None, dtype=float32, nbytes=10)]

    Source: ONNX TensorProto, "int4, int2 packing".
    """
    return jax.tree.map(lambda node: _restored(node) if _is_packed(node) else node, tree, is_leaf=_is_packed)


def _restored(node: Mapping[str, Any]) -> QuantizedArray | StaticText:
    if _TEXT in node:
        return StaticText(_read_text(node[_TEXT]))
    found = _described(node[_KEY])
    parts = found["parts"]
    wanted = f"the arrays {', '.join((*parts, _KEY))}"
    _contracts.require(set(node) == {*parts, _KEY}, "checkpoint.from_arrays", "tree", wanted, ", ".join(map(str, node)))
    arrays = {
        name: _from_stored(node[name], _dtypes.named(part["dtype"]), tuple(part["shape"]))
        for name, part in parts.items()
    }
    dtype, block_size, book = _description.decoded(json.dumps(found["static"]))
    q = QuantizedArray(**arrays, dtype=dtype, block_size=block_size, codebook=book)
    return _array.contract("checkpoint.from_arrays", "tree", q)


def _encode_text(node: StaticText) -> dict[str, np.ndarray]:
    return {_TEXT: np.frombuffer(node.text.encode(), np.uint8)}


def _read_text(array: Any) -> str:
    name, argument = "checkpoint.from_arrays", f"tree[...]['{_TEXT}']"
    is_known = isinstance(array, jax.Array | np.ndarray) and not _contracts.is_traced(array)
    wanted = "an array of uint8 that is not traced"
    _contracts.require_type(is_known and array.dtype == np.uint8, name, argument, wanted, _contracts.described(array))
    try:
        return np.asarray(array).tobytes().decode()
    except UnicodeDecodeError:
        raise _contracts.ContractValueError(_contracts.message(name, argument, "UTF-8", "other bytes")) from None


def _described(text: Any) -> dict[str, Any]:
    name, argument = "checkpoint.from_arrays", f"tree[...]['{_KEY}']"
    is_known = isinstance(text, jax.Array | np.ndarray) and not _contracts.is_traced(text)
    wanted = "an array of uint8 that is not traced"
    _contracts.require_type(is_known and text.dtype == np.uint8, name, argument, wanted, _contracts.described(text))
    try:
        found = json.loads(np.asarray(text).tobytes())
    except ValueError:
        found = None
    is_ours = isinstance(found, dict) and found.get("format") == _FORMAT
    _contracts.require(is_ours, name, argument, "a description of a QuantizedArray", "another text")
    assert found is not None
    version = found.get("version")
    wanted = f"version {_VERSION}, the newest that is known here"
    _contracts.require(version == _VERSION, name, argument, wanted, f"version {version}")
    return found


def _library(function: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = _contracts.message(function, "path", f"{module}: pip install 'jaxquant[checkpoint]'", "none installed")
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
    library = _library(name, "safetensors.numpy")
    tensors, bits = {}, {}
    for key, leaf in _flat(name, to_arrays(tree), ()):
        array = np.asarray(leaf)
        if array.dtype in _AS_BITS and array.dtype.isbuiltin != 1:
            bits[key] = {"dtype": array.dtype.name, "shape": list(array.shape)}
            array = np.asarray(_to_stored(array))
        tensors[key] = np.asarray(array, order="C")
    library.save_file(tensors, os.fspath(path), metadata={_FORMAT: json.dumps(bits)})


def _flat(function: str, tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    place = "tree" + "".join(f"[{key!r}]" for key in keys)
    if not isinstance(tree, Mapping):
        is_array = isinstance(tree, jax.Array | np.ndarray) and bool(keys)
        _contracts.require_type(is_array, function, place, "dicts of arrays", type(tree).__name__)
        yield "/".join(keys), tree
        return
    _contracts.require(bool(tree) or not keys, function, place, "a dict with something in it", "{}")
    for key, value in tree.items():
        _contracts.require_type(isinstance(key, str), function, place, "keys that are strings", repr(key))
        _contracts.require("/" not in key, function, place, 'keys without "/"', repr(key))
        yield from _flat(function, value, (*keys, key))


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """tree = what `save_safetensors` wrote to a file, bit for bit.

    Args:
        path: the file. One that another program wrote will do: its names are taken apart at "/".

    Returns:
        Dicts in dicts of arrays: numpy's, and QuantizedArrays.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        ValueError: a QuantizedArray's arrays do not fit its description.

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
    library = _library("checkpoint.load_safetensors", "safetensors")
    tree: dict[str, Any] = {}
    wanted = "names of which none goes on where another ends"
    with library.safe_open(os.fspath(path), framework="np") as file:
        bits = json.loads((file.metadata() or {}).get(_FORMAT, "{}"))
        for key in file.keys():  # noqa: SIM118 it is no dict
            array = file.get_tensor(key)
            if key in bits:
                array = np.asarray(_from_stored(array, _dtypes.named(bits[key]["dtype"]), tuple(bits[key]["shape"])))
            *outer, last = key.split("/")
            node = tree
            for name in outer:
                node = node.setdefault(name, {})
                _contracts.require(isinstance(node, dict), "checkpoint.load_safetensors", "path", wanted, repr(key))
            node[last] = array
    return from_arrays(tree)


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
    library = _library("checkpoint.save_orbax", "orbax.checkpoint")
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
        ValueError: `like` is not what was saved.

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
    library = _library("checkpoint.load_orbax", "orbax.checkpoint")
    with library.StandardCheckpointer() as checkpointer:
        if like is None:
            return from_arrays(checkpointer.restore(os.path.abspath(path)))
        target = jax.tree.map(lambda leaf: _target(leaf) if _is_quantized(leaf) else leaf, like, is_leaf=_is_quantized)
        tree = from_arrays(checkpointer.restore(os.path.abspath(path), target))
    wanted, got = jax.tree.structure(like), jax.tree.structure(tree)
    _contracts.require(wanted == got, "checkpoint.load_orbax", "like", f"{got}, as it was saved", wanted)
    return jax.tree.map(_placed, tree, like)


def _target(q: QuantizedArray | StaticText) -> dict[str, Any]:
    """Returns what Orbax restores a QuantizedArray's arrays into: placed as its parts are where they are not packed."""
    if isinstance(q, StaticText):
        return _encode_text(q)
    target: dict[str, Any] = {_KEY: _text(q)}
    for name in _PARTS:
        if (part := getattr(q, name)) is None:
            continue
        dtype, shape = _stored(np.dtype(part.dtype), part.shape)
        place = getattr(part, "sharding", None)
        if isinstance(place, NamedSharding) and shape != part.shape:
            place = NamedSharding(place.mesh, PartitionSpec())
        target[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    return target


def _placed(array: Any, like: Any) -> Any:
    place = getattr(like, "sharding", None)
    return array if place is None else jax.device_put(array, place)
