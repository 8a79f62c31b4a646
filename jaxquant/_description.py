"""What is static in a quantized array, as text that outlives a program. Knows no arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from . import _dtypes
from ._codebook import CodeBook

Static = tuple[np.dtype | None, int | None, CodeBook | None]


def encoded(static: Static) -> str:
    """Returns a dtype, a block size and a code book as JSON."""
    dtype, block_size, book = static
    return json.dumps({
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "block_size": block_size,
        "codebook": None if book is None else {"name": book.name, "levels": book.levels},
    })  # fmt: skip


def decoded(text: str | bytes | bytearray) -> Static:
    """Returns what `encoded` was given."""
    found: dict[str, Any] = json.loads(text)
    book = found["codebook"]
    return (
        None if found["dtype"] is None else _dtypes.named(found["dtype"]),
        found["block_size"],
        None if book is None else CodeBook(book["name"], tuple(book["levels"])),
    )
