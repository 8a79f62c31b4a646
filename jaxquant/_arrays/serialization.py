"""The static attributes of a quantized array as JSON, for checkpoints and exported programs.

The JSON may be damaged or come from an untrusted source. Decoding it returns valid values, or raises an error that
names the function and the argument.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._core import checks, dtypes
from .codebook import Codebook
from .parts import Static, StoredOrder, read_stored_order

_SAVED = "QuantizedArray"
# JSON allows numbers that overflow float32.
_LARGEST = float(np.finfo(np.float32).max)


def encode_static(static: Static) -> str:
    """Return a dtype, a block size, a codebook and a stored order as JSON."""
    dtype, block_size, codebook, order = static
    fields = {
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "block_size": block_size,
        "codebook": None if codebook is None else {"name": codebook.name, "levels": codebook.levels},
    }
    # The text of an array in its logical order is the same as before there were stored orders.
    return json.dumps(fields if order is None else {**fields, "stored_order": order})


def decode_saved_program(text: str | bytes | bytearray) -> Static:
    """Return the static attributes in a program that `jax.export` saved, as `encode_static` encoded them."""
    argument = "the description in a saved program"
    return decode_static(_SAVED, argument, parse_json(_SAVED, argument, text))


def parse_json(function: str, argument: str, text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; raise ContractValueError if it is invalid or an object repeats a key."""
    try:
        # A second value for a key would silently replace the first one.
        return json.loads(text, object_pairs_hook=_collect_unique)
    except (ValueError, RecursionError) as error:
        got = "JSON that is nested too deeply" if isinstance(error, RecursionError) else str(error)
        text = checks.format_message(function, argument, "JSON", got)
    raise checks.ContractValueError(text)


def _collect_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"one of the keys {', '.join(name for name, _ in pairs)} twice")
    return fields


def get_field(function: str, argument: str, fields: Any, name: str) -> Any:
    """Return a field of a JSON object; raise ContractValueError if there is no such field."""
    if not isinstance(fields, dict):
        checks.refuse(function, argument, f"an object with the key {name!r}", _shorten_json(fields))
    if name not in fields:
        got = ", ".join(map(repr, fields)) or "an empty object"
        checks.refuse(function, argument, f"an object with the key {name!r}", got)
    return fields[name]


def decode_static(function: str, argument: str, fields: Any) -> Static:
    """Return the valid dtype, block size, codebook and stored order that a JSON object describes."""
    dtype = get_field(function, argument, fields, "dtype")
    block_size = get_field(function, argument, fields, "block_size")
    # `type`, because True is an int for isinstance.
    is_size = block_size is None or (type(block_size) is int and block_size > 0)
    if not is_size:
        got = _shorten_json(block_size)
        checks.refuse(function, f"{argument}['block_size']", "null or a positive integer", got)
    return (
        None if dtype is None else decode_dtype(function, f"{argument}['dtype']", dtype, dtypes.FLOATS),
        block_size,
        _decode_codebook(function, f"{argument}['codebook']", get_field(function, argument, fields, "codebook")),
        _decode_stored_order(function, f"{argument}['stored_order']", fields.get("stored_order")),
    )


def decode_dtype(function: str, argument: str, name: Any, allowed: Sequence[np.dtype]) -> np.dtype:
    """Return the allowed dtype with this name; `np.dtype(name)` would not know the names of ml_dtypes."""
    for dtype in allowed:
        if dtype.name == name:
            return dtype
    expected = f"the name of a dtype: {dtypes.list_names(tuple(allowed))}"
    raise checks.ContractValueError(checks.format_message(function, argument, expected, _shorten_json(name)))


def decode_shape(function: str, argument: str, shape: Any) -> tuple[int, ...]:
    """Return a shape, after checking that an array can have it."""
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape)
    # Count a length of 0 as 1, so that it does not hide an overflow of the other lengths.
    if not is_shape or math.prod(max(n, 1) for n in shape) >= 2**63:
        expected = "a list of at most 64 lengths whose product fits in an int64"
        checks.refuse(function, argument, expected, _shorten_json(shape))
    return tuple(shape)


def _decode_codebook(function: str, argument: str, fields: Any) -> Codebook | None:
    """Return the valid codebook that a JSON value describes, or None for null."""
    if fields is None:
        return None
    name, levels = (get_field(function, argument, fields, field) for field in ("name", "levels"))
    if not isinstance(name, str):
        checks.refuse(function, f"{argument}['name']", "a string", _shorten_json(name))
    # The constructor of Codebook is less strict, and its errors would not name the place in the file. The types are
    # compared first, because abs of a string would raise a plain TypeError.
    is_table = isinstance(levels, list) and len(levels) in (4, 16, 256)
    is_table = is_table and all(type(level) in (int, float) and abs(level) <= _LARGEST for level in levels)
    if not is_table or any(low >= high for low, high in itertools.pairwise(levels)):
        expected = "4, 16 or 256 ascending float32 numbers"
        checks.refuse(function, f"{argument}['levels']", expected, _shorten_json(levels))
    try:
        return Codebook(name, tuple(levels))
    except checks.ContractValueError as error:  # two levels are equal in float32
        raise checks.ContractValueError(checks.format_message(function, argument, "a codebook", error)) from error


def _decode_stored_order(function: str, argument: str, order: Any) -> StoredOrder:
    """Return the valid stored order that a JSON value describes; null or a missing field means None."""
    # `type`, because True is an int for isinstance.
    is_order = order is None or (isinstance(order, list) and all(type(axis) is int for axis in order))
    if not is_order or (order and sorted(order) != list(range(-len(order), 0))):
        expected = "null, or a list of the axes -1 to -n in any order"
        checks.refuse(function, argument, expected, _shorten_json(order))
    return read_stored_order(function, order)


def _shorten_json(value: Any) -> str:
    """Return a value as JSON, shortened to 80 characters."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # an int with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
