"""What is static in a quantized array, as text that outlives a program. Knows no arrays.

Text may have been damaged, or come from someone else: whatever it holds, reading it gives a value or a contract error.
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

Static = tuple[np.dtype | None, int | None, Codebook | None]
_SAVED = "QuantizedArray"
_LARGEST = float(np.finfo(np.float32).max)


def encode_static(static: Static) -> str:
    """Returns a dtype, a block size and a code book as JSON."""
    dtype, block_size, book = static
    return json.dumps({
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "block_size": block_size,
        "codebook": None if book is None else {"name": book.name, "levels": book.levels},
    })  # fmt: skip


def decode_saved_program(text: str | bytes | bytearray) -> Static:
    """Returns what `encoded` was given, from the bytes of a program that `jax.export` saved."""
    argument = "the description in a saved program"
    return decode_static(_SAVED, argument, parse_json(_SAVED, argument, text))


def parse_json(function: str, argument: str, text: str | bytes | bytearray) -> Any:
    """Returns what a JSON text says; a name that is given twice is an error."""
    try:
        return json.loads(text, object_pairs_hook=_collect_unique)
    except (ValueError, RecursionError) as error:
        got = "one that is nested too deeply" if isinstance(error, RecursionError) else str(error)
        text = checks.format_message(function, argument, "a JSON text", got)
    raise checks.ContractValueError(text)


def _collect_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one of the names {', '.join(name for name, _ in pairs)} twice")
    return found


def get_field(function: str, argument: str, found: Any, name: str) -> Any:
    """Returns a field of a JSON object, which has to have it."""
    if not isinstance(found, dict) or name not in found:
        got = ", ".join(map(repr, found)) or "an empty one" if isinstance(found, dict) else _describe(found)
        checks.require(False, function, argument, f"an object with the name {name!r}", got)
    return found[name]


def decode_static(function: str, argument: str, found: Any) -> Static:
    """Returns a dtype, a block size and a code book that are known to be valid."""
    dtype = get_field(function, argument, found, "dtype")
    block_size = get_field(function, argument, found, "block_size")
    is_size = block_size is None or (type(block_size) is int and block_size > 0)
    if not is_size:
        got = _describe(block_size)
        checks.require(False, function, f"{argument}['block_size']", "null or a positive integer", got)
    return (
        None if dtype is None else decode_dtype(function, f"{argument}['dtype']", dtype, dtypes.FLOATS),
        block_size,
        _decode_book(function, f"{argument}['codebook']", get_field(function, argument, found, "codebook")),
    )


def decode_dtype(function: str, argument: str, name: Any, allowed: Sequence[np.dtype]) -> np.dtype:
    """Returns the one of the allowed dtypes that has this name, those of ml_dtypes included."""
    for dtype in allowed:
        if dtype.name == name:
            return dtype
    expected = f"the name of a dtype: {dtypes.list_names(tuple(allowed))}"
    raise checks.ContractValueError(checks.format_message(function, argument, expected, _describe(name)))


def decode_shape(function: str, argument: str, shape: Any) -> tuple[int, ...]:
    """Returns a shape that an array can have."""
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or math.prod(max(n, 1) for n in shape) >= 2**63:
        expected = "a list of at most 64 lengths whose product an int64 holds"
        checks.require(False, function, argument, expected, _describe(shape))
    return tuple(shape)


def _decode_book(function: str, argument: str, found: Any) -> Codebook | None:
    if found is None:
        return None
    name, levels = (get_field(function, argument, found, field) for field in ("name", "levels"))
    if not isinstance(name, str):
        checks.require(False, function, f"{argument}['name']", "a string", _describe(name))
    # A Codebook asks for less: it takes a list of numbers that float32 rounds.
    is_table = isinstance(levels, list) and len(levels) in (4, 16, 256)
    is_table = is_table and all(type(level) in (int, float) and abs(level) <= _LARGEST for level in levels)
    if not is_table or any(low >= high for low, high in itertools.pairwise(levels)):
        expected = "4, 16 or 256 ascending numbers of float32"
        checks.require(False, function, f"{argument}['levels']", expected, _describe(levels))
    try:
        return Codebook(name, tuple(levels))
    except checks.ContractValueError as error:  # two levels are one number of float32
        raise checks.ContractValueError(checks.format_message(function, argument, "a code book", error)) from error


def _describe(value: Any) -> str:
    """Returns a value that was read from a text, cut where it is long."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # an int of more digits than Python writes
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
