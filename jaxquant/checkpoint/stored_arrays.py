"""The stored form of a quantized array: plain arrays and a JSON description of them.

A description is data and is never executed. If it does not fit its arrays, an error names the argument.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import quantized_array, serialization
from .._arrays.packing import pack, unpack
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes
from .static_text import StaticText

_DTYPES = (*dtypes.QUANTIZED, *dtypes.FLOATS, dtypes.E8M0)  # the dtypes of the parts
KEY = "quantized_array"  # the key of the description, next to those of the parts
# Version 2 may have a stored order, which the readers of version 1 would ignore. Other arrays are still written as 1.
FORMAT, _VERSION = "jaxquant.QuantizedArray", 2
TEXT = "static_text"  # the key of a stored StaticText
PARTS = ("codes", "scale", "zero_point")


def find_stored_type(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape in which an array is stored; every library supports the dtype."""
    if dtypes.find_width(dtype) < 8:
        return np.dtype(jnp.uint8), (-(-math.prod(shape) * dtypes.find_width(dtype) // 8),)
    # 1 marks numpy's own dtypes, which every library knows; those of ml_dtypes have 2.
    if dtype.isbuiltin == 1:
        return dtype, shape
    return np.dtype(f"u{dtype.itemsize}"), shape


def store_part(part: Any) -> Any:
    """Return an array in its stored form: codes of less than 8 bits are packed, other special dtypes become bits."""
    part = jnp.asarray(part)
    dtype, _ = find_stored_type(part.dtype, part.shape)
    if dtypes.find_width(part.dtype) < 8:
        return pack(part)
    return part if dtype == part.dtype else lax.bitcast_convert_type(part, dtype)


def restore_part(function: str, argument: str, stored: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """Return the array that `store_part` stored; the bytes of packed codes may have any shape."""
    is_array = isinstance(stored, jax.Array | np.ndarray | np.generic)
    checks.require_type(is_array, function, argument, "an array", type(stored).__name__)
    is_packed = dtypes.find_width(dtype) < 8
    expected, lengths = find_stored_type(dtype, shape)
    # Some libraries restore bytes in another shape, which does not matter for packed codes.
    fits = stored.dtype == expected and (stored.size == lengths[0] if is_packed else stored.shape == lengths)
    if not fits:
        description = f"{expected.name}{list(lengths)}, as described"
        description += "" if expected == dtype else f" for {dtype.name}{list(shape)}"
        checks.require(False, function, argument, description, f"{stored.dtype}{list(stored.shape)}")
    if is_packed:
        return unpack(stored, dtype, shape)
    stored = jnp.asarray(stored)
    return stored if dtype == stored.dtype else lax.bitcast_convert_type(stored, dtype)


def list_parts(q: QuantizedArray) -> dict[str, Any]:
    """Return the arrays of a QuantizedArray by name, with the codes in their stored order."""
    children, _ = q.tree_flatten()
    # A missing zero point is left out, because None is not an array that a library can save.
    return {name: part for name, part in zip(PARTS, children, strict=True) if part is not None}


def write_description(q: QuantizedArray) -> np.ndarray:
    """Return the description of a QuantizedArray as the bytes of its JSON."""
    parts = {}
    for name, part in list_parts(q).items():
        parts[name] = {"dtype": np.dtype(part.dtype).name, "shape": list(part.shape)}
    # `encode_static` returns text; parse it so that the description is one JSON object.
    static = json.loads(serialization.encode_static(q.tree_flatten()[1]))
    version = 1 if q.stored_order is None else 2
    text = json.dumps({"format": FORMAT, "version": version, "parts": parts, "static": static})
    return np.frombuffer(text.encode(), np.uint8)


def restore_quantized(function: str, argument: str, node: Mapping[str, Any]) -> QuantizedArray:
    """Return the QuantizedArray that was stored as a dict of arrays and a description."""
    place = f"{argument}['{KEY}']"
    description = _read_description(function, place, node[KEY])
    parts = serialization.get_field(function, place, description, "parts")
    required = ("codes", "scale")
    if not isinstance(parts, dict) or not set(required) <= set(parts) <= set(PARTS):
        got = ", ".join(map(repr, parts)) if isinstance(parts, dict) else type(parts).__name__
        checks.require(False, function, f"{place}['parts']", "codes, scale and optionally zero_point", got)
    # A missing or unknown array means that the description belongs to another array.
    if set(node) != {*parts, KEY}:
        expected = f"the arrays {', '.join((*parts, KEY))}"
        checks.require(False, function, argument, expected, ", ".join(map(str, node)))
    arrays: dict[str, Any] = {}
    for name, part in parts.items():
        dtype, shape = read_type(function, f"{place}['parts']['{name}']", part)
        arrays[name] = restore_part(function, f"{argument}['{name}']", node[name], dtype, shape)
    static = serialization.get_field(function, place, description, "static")
    dtype, block_size, codebook, order = serialization.decode_static(function, f"{place}['static']", static)
    q = QuantizedArray(**arrays, dtype=dtype, block_size=block_size, codebook=codebook)
    q = q._with_stored(arrays["codes"], order)
    return quantized_array.check_array(function, argument, q, is_awaited=True)


def store_text(node: StaticText) -> dict[str, np.ndarray]:
    """Return a text as a dict with a uint8 array, which every library can save."""
    return {TEXT: np.frombuffer(node.text.encode(), np.uint8)}


def restore_text(function: str, argument: str, node: Mapping[str, Any]) -> StaticText:
    """Return the text that `store_text` stored."""
    place, stored = f"{argument}['{TEXT}']", node[TEXT]
    # A traced array has no bytes that could be decoded.
    is_known = isinstance(stored, jax.Array | np.ndarray) and not checks.is_traced(stored)
    is_known = is_known and stored.dtype == np.uint8
    expected = "an array of uint8 that is not traced"
    checks.require_type(is_known, function, place, expected, checks.describe_value(stored))
    try:
        return StaticText(np.asarray(stored).tobytes().decode())
    except UnicodeDecodeError:
        raise checks.ContractValueError(checks.format_message(function, place, "UTF-8", "other bytes")) from None


def read_type(function: str, argument: str, description: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape in the description of an array."""
    name, shape = (serialization.get_field(function, argument, description, field) for field in ("dtype", "shape"))
    dtype = serialization.decode_dtype(function, f"{argument}['dtype']", name, _DTYPES)
    return dtype, serialization.decode_shape(function, f"{argument}['shape']", shape)


def _read_description(function: str, argument: str, text: Any) -> dict[str, Any]:
    """Return the JSON object in the bytes of a description, after checking its format and version."""
    is_known = isinstance(text, jax.Array | np.ndarray) and not checks.is_traced(text)
    expected = "an array of uint8 that is not traced"
    checks.require_type(is_known and text.dtype == np.uint8, function, argument, expected, checks.describe_value(text))
    description = serialization.parse_json(function, argument, np.asarray(text).tobytes())
    is_ours = isinstance(description, dict) and description.get("format") == FORMAT
    checks.require(is_ours, function, argument, "a description of a QuantizedArray", "another text")
    # A later format may store parts that this version does not know.
    version = description.get("version")
    is_supported = type(version) is int and 1 <= version <= _VERSION  # True == 1 in Python, too
    expected = f"version 1 to {_VERSION}, the newest that this jaxquant can read"
    checks.require(is_supported, function, argument, expected, f"version {checks.describe_value(version)}")
    return description
