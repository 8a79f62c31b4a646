"""Quantized arrays as plain arrays and a JSON description, which any library can save, and back.

A description is data and is never executed. If it does not fit its arrays, an error names the argument.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from .._arrays import quantized_array
from .._arrays.packing import pack, unpack
from .._arrays.parts import ArrayParts, decode_dtype, decode_shape, decode_static, encode_static, get_field, parse_json
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes

# The dtypes of the parts; packed codes are uint32, and permutations int32.
_DTYPES = (*dtypes.QUANTIZED, *dtypes.FLOATS, dtypes.E8M0, np.dtype(np.uint32), np.dtype(np.int32))
KEY = "quantized_array"  # the key of the description, next to the keys of the parts
# Version 2 may have a stored order, and version 3 what `FORMS` lists, which earlier readers would ignore or refuse.
# Arrays are written in the earliest version that describes them.
FORMAT, _VERSION = "jaxquant.QuantizedArray", 3
_TEXT = "static_text"  # the key of a stored StaticText
_PARTS = ArrayParts._fields
_NESTED = ("scale", "offset")  # the parts that may be quantized themselves


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StaticText:
    """A node of a pytree without leaves, which describes the other arrays of the tree.

    Unlike an array, the text is known under tracing: trees with different texts have different structures.

    Attributes:
        text: the description.
    """

    text: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """Return no arrays, and the text as the static part."""
        return (), self.text

    @classmethod
    def tree_unflatten(cls, text: str, _: object) -> StaticText:
        """Return the node that was flattened."""
        return cls(text)


# This lets `jax.export` save a program that takes converted variables.
export.register_pytree_node_serialization(
    StaticText,
    serialized_name="jaxquant.StaticText",
    serialize_auxdata=lambda text: text.encode(),
    deserialize_auxdata=lambda data: bytes(data).decode(),
)


# The stored form of a quantized array: plain arrays and a JSON description of them.


def derive_stored_type(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape in which an array is stored; every library supports the dtype."""
    if dtypes.count_packed_bits(dtype) < 8:
        return np.dtype(jnp.uint8), (-(-math.prod(shape) * dtypes.count_packed_bits(dtype) // 8),)
    # 1 marks numpy's own dtypes, which every library knows; the dtypes of ml_dtypes have 2.
    if dtype.isbuiltin == 1:
        return dtype, shape
    return np.dtype(f"u{dtype.itemsize}"), shape


def store_part(part: ArrayLike) -> Any:
    """Return an array in its stored form: codes of less than 8 bits are packed, other special dtypes become bits."""
    part = jnp.asarray(part)
    dtype, _ = derive_stored_type(part.dtype, part.shape)
    if dtypes.count_packed_bits(part.dtype) < 8:
        return pack(part)
    return part if dtype == part.dtype else lax.bitcast_convert_type(part, dtype)


def restore_part(
    function: str, argument: str, stored: jax.Array | np.ndarray, dtype: np.dtype, shape: tuple[int, ...]
) -> Any:
    """Return the array that `store_part` stored; the bytes of packed codes may have any shape."""
    is_array = isinstance(stored, jax.Array | np.ndarray | np.generic)
    checks.require_type(is_array, function, argument, "an array", type(stored).__name__)
    is_packed = dtypes.count_packed_bits(dtype) < 8
    expected, lengths = derive_stored_type(dtype, shape)
    # Some libraries restore bytes in another shape, which does not matter for packed codes.
    fits = stored.dtype == expected and (stored.size == lengths[0] if is_packed else stored.shape == lengths)
    if not fits:
        description = f"{expected.name}{list(lengths)}, as described"
        description += "" if expected == dtype else f" for {dtype.name}{list(shape)}"
        checks.refuse(function, argument, description, f"{stored.dtype}{list(stored.shape)}")
    if is_packed:
        return unpack(stored, dtype, shape)
    stored = jnp.asarray(stored)
    return stored if dtype == stored.dtype else lax.bitcast_convert_type(stored, dtype)


def list_parts(q: QuantizedArray) -> dict[str, Any]:
    """Return the arrays of a QuantizedArray by name, with the codes as they are stored.

    The parts of a scale that is quantized itself are "scale.codes", "scale.scale" and so on.
    """
    children, _ = q.tree_flatten()
    arrays = {}
    for name, part in children._asdict().items():
        if isinstance(part, QuantizedArray):
            arrays |= {f"{name}.{inner}": array for inner, array in list_parts(part).items()}
        # A missing part is left out, because None is not an array that a library can save.
        elif part is not None:
            arrays[name] = part
    return arrays


def write_description(q: QuantizedArray) -> np.ndarray:
    """Return the description of a QuantizedArray as the bytes of its JSON."""
    parts = {}
    for name, part in list_parts(q).items():
        parts[name] = {"dtype": np.dtype(part.dtype).name, "shape": list(part.shape)}
    # `encode_static` returns text; parse it so that the description is one JSON object.
    static = json.loads(encode_static(q.tree_flatten()[1]))
    version = 3 if quantized_array.list_forms(q) else 1 if q.stored_order is None else 2
    fields = {"format": FORMAT, "version": version, "parts": parts, "static": static}
    nested = {name: getattr(q, name) for name in _NESTED if isinstance(getattr(q, name), QuantizedArray)}
    if nested:
        fields["nested"] = {name: json.loads(encode_static(part.tree_flatten()[1])) for name, part in nested.items()}
    text = json.dumps(fields)
    return np.frombuffer(text.encode(), np.uint8)


def _restore_quantized(function: str, argument: str, node: Mapping[str, Any]) -> QuantizedArray:
    """Return the QuantizedArray that was stored as a dict of arrays and a description."""
    label = f"{argument}['{KEY}']"
    description = _read_description(function, label, node[KEY])
    parts = get_field(function, label, description, "parts")
    nested = description.get("nested", {})
    if not isinstance(nested, dict) or not set(nested) <= set(_NESTED):
        checks.refuse(function, f"{label}['nested']", "an object with the keys scale or offset", type(nested).__name__)
    required = {"codes", "scale"}
    known = set(_PARTS)
    for name in nested:
        known = known - {name} | {f"{name}.{inner}" for inner in _PARTS}
        required = required - {name} | {f"{name}.codes", f"{name}.scale"}
    if not isinstance(parts, dict) or not required <= set(parts) <= known:
        got = ", ".join(map(repr, parts)) if isinstance(parts, dict) else type(parts).__name__
        optional = ", ".join(sorted(known - required))
        checks.refuse(function, f"{label}['parts']", f"{', '.join(sorted(required))} and optionally {optional}", got)
    # A missing or unknown array means that the description belongs to another array.
    if set(node) != {*parts, KEY}:
        expected = f"the arrays {', '.join((*parts, KEY))}"
        checks.refuse(function, argument, expected, ", ".join(map(str, node)))
    arrays: dict[str, Any] = {}
    for name, part in parts.items():
        dtype, shape = read_type(function, f"{label}['parts']['{name}']", part)
        arrays[name] = restore_part(function, f"{argument}['{name}']", node[name], dtype, shape)
    for name, fields in nested.items():
        inner = ArrayParts(*(arrays.pop(f"{name}.{field}", None) for field in _PARTS))
        static = decode_static(function, f"{label}['nested']['{name}']", fields)
        arrays[name] = QuantizedArray.tree_unflatten(static, inner)
    static = decode_static(function, f"{label}['static']", get_field(function, label, description, "static"))
    q = QuantizedArray.tree_unflatten(static, ArrayParts(**arrays))
    if static.dtype is None:
        q = q.replace(dtype=None)
    return quantized_array.check_array(function, argument, q, supports=quantized_array.FORMS, is_awaited=True)


def store_text(node: StaticText) -> dict[str, np.ndarray]:
    """Return a text as a dict with a uint8 array, which every library can save."""
    return {_TEXT: np.frombuffer(node.text.encode(), np.uint8)}


def _restore_text(function: str, argument: str, node: Mapping[str, Any]) -> StaticText:
    """Return the text that `store_text` stored."""
    label, stored = f"{argument}['{_TEXT}']", node[_TEXT]
    # A traced array has no bytes that could be decoded.
    is_known = isinstance(stored, jax.Array | np.ndarray) and not checks.is_traced(stored)
    is_known = is_known and stored.dtype == np.uint8
    expected = "an array of uint8 that is not traced"
    checks.require_type(is_known, function, label, expected, checks.describe_value(stored))
    try:
        return StaticText(np.asarray(stored).tobytes().decode())
    except UnicodeDecodeError:
        raise checks.ContractValueError(checks.format_message(function, label, "UTF-8", "other bytes")) from None


def read_type(function: str, argument: str, description: object) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape in the description of an array."""
    name, shape = (get_field(function, argument, description, field) for field in ("dtype", "shape"))
    dtype = decode_dtype(function, f"{argument}['dtype']", name, _DTYPES)
    return dtype, decode_shape(function, f"{argument}['shape']", shape)


def _read_description(function: str, argument: str, text: jax.Array | np.ndarray) -> dict[str, Any]:
    """Return the JSON object in the bytes of a description, after checking its format and version."""
    is_known = isinstance(text, jax.Array | np.ndarray) and not checks.is_traced(text)
    expected = "an array of uint8 that is not traced"
    checks.require_type(is_known and text.dtype == np.uint8, function, argument, expected, checks.describe_value(text))
    description = parse_json(function, argument, np.asarray(text).tobytes())
    is_ours = isinstance(description, dict) and description.get("format") == FORMAT
    checks.require(is_ours, function, argument, "a description of a QuantizedArray", "another text")
    # A later format may store parts that this version does not know.
    version = description.get("version")
    is_supported = type(version) is int and 1 <= version <= _VERSION  # True == 1 in Python, too
    expected = f"version 1 to {_VERSION}, the newest that this jaxquant can read"
    checks.require(is_supported, function, argument, expected, f"version {checks.describe_value(version)}")
    return description


def to_arrays(tree: object) -> Any:
    """Return the tree with each QuantizedArray replaced with a dict of plain arrays that any library can save.

    The arrays take as many bytes as the quantized array. Codes of 4 and 2 bits are packed; float8, bfloat16 and similar
    dtypes are stored as their bits. A uint8 array next to them holds a JSON text with the dtypes and shapes, the block
    size, the codebook and the dtype that `dequantize` returns. The description of the specs that converted Flax layers
    carry becomes a dict with one uint8 array, "static_text".

    Args:
        tree: a pytree, such as dicts, lists or modules, with QuantizedArrays among its leaves. All other leaves stay
            as they are.

    Returns:
        The tree, with a dict in place of each QuantizedArray. Its keys are "codes", "scale", "zero_point" if there is
        one, and "quantized_array", the description.

    Raises:
        TypeError: a part of a QuantizedArray is not an array or has an unsupported dtype.
        ValueError: the parts of a QuantizedArray do not fit each other.

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

    def store_leaf(leaf: object) -> Any:
        if isinstance(leaf, StaticText):
            return store_text(leaf)
        if not isinstance(leaf, QuantizedArray):
            return leaf
        q = quantized_array.check_lazy("checkpoint.to_arrays", "tree", leaf, supports=quantized_array.FORMS)
        return {**{name: store_part(part) for name, part in list_parts(q).items()}, KEY: write_description(q)}

    return jax.tree.map(store_leaf, tree, is_leaf=is_stored_apart)


def from_arrays(tree: object) -> Any:
    """Return the tree that `to_arrays` was given, bit for bit.

    Args:
        tree: a pytree as `to_arrays` returns it, or as another library restored it: its containers may have become
            dicts, and its arrays may be numpy arrays.

    Returns:
        The tree, with a QuantizedArray in place of each dict that describes one.

    Raises:
        TypeError: the description of an array is traced, so that it cannot be read, or a part is not an array.
        ValueError: a description is damaged, has a later format than this version can read, or does not fit its arrays.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import checkpoint
        >>> q = jq.quantize(jnp.array([[0.5, -7.0], [2.0, 1.0]]), jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> checkpoint.from_arrays(checkpoint.to_arrays([q]))
        [QuantizedArray(int4[2,2], scale=float32[2,1], zero_point=None, dtype=float32, nbytes=10)]

    Source: ONNX TensorProto, "int4, int2 packing".
    """
    return restore_tree("checkpoint.from_arrays", tree)


def restore_tree(function: str, tree: object) -> Any:
    """Return what `from_arrays` returns, with errors that name another function."""

    def restore_node(path: tuple[Any, ...], node: Any) -> Any:
        if not _is_stored(node):
            return node
        restore = _restore_quantized if KEY in node else _restore_text
        return restore(function, f"tree{jax.tree_util.keystr(path)}", node)

    return jax.tree_util.tree_map_with_path(restore_node, tree, is_leaf=_is_stored)


# Used as `is_leaf`: JAX would otherwise descend into the arrays of a QuantizedArray.
def is_stored_apart(node: object) -> bool:
    """Return whether `to_arrays` converts a node of a tree."""
    return isinstance(node, QuantizedArray | StaticText)


def _is_stored(node: object) -> bool:
    """Return whether `from_arrays` converts a node of a tree."""
    # A dict of the caller may have a key "static_text" among others; a stored text has only this key.
    return isinstance(node, Mapping) and (KEY in node or set(node) == {_TEXT})


def import_library(function: str, module: str) -> Any:
    """Return an optional library, imported only now that it is needed.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        expected = f"{module} to be installed (pip install 'jaxquant[checkpoint]')"
        text = checks.format_message(function, "path", expected, str(error))
        raise ModuleNotFoundError(text) from error
