"""GGUF files as the package gguf writes them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from ..oracles import file_formats


def write_gguf(
    path: pathlib.Path, tensors: Mapping[str, tuple[str, np.ndarray]], add: Callable[[Any], None] | None = None
) -> None:
    """Write a file with the package: for each tensor its type and its bytes, of shape (..., bytes of a row)."""
    writer = gguf.GGUFWriter(path, "test")
    if add is not None:
        add(writer)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw_data(rng: np.random.Generator, kind: str, lead: tuple[int, ...] = (3,)) -> np.ndarray:
    """Return the bytes of a tensor, (*lead, bytes of a row)."""
    rows = int(np.prod(lead))
    data = [file_formats.GGUF[kind].draw(rng)["data"] for _ in range(rows // 3 + 1)]
    return np.concatenate(data)[:rows].reshape(*lead, data[0].shape[-1])


def add_metadata(writer: Any) -> None:
    kind = gguf.GGUFValueType
    for name, value in (
        ("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -1), ("uint32", 2**32 - 1), ("int32", -1),
        ("uint64", 2**64 - 1), ("int64", -(2**63)), ("float32", 0.1), ("float64", 0.1), ("bool", True),
    ):  # fmt: skip
        getattr(writer, f"add_{name}")(f"a.{name}", value)
    writer.add_float32("a.nan", float("nan"))
    writer.add_string("a.string", "Grüße\n\0")
    for name, values, element in (
        ("strings", ["", "a", "▁the", "\0", "x" * 3000], kind.STRING), ("bools", [True, False], kind.BOOL),
        ("int32s", [1, -2], kind.INT32), ("floats", [0.5, 1e-40, -0.0], kind.FLOAT32), ("bytes", [0, 255], kind.UINT8),
        ("doubles", [0.1], kind.FLOAT64), ("longs", [2**63], kind.UINT64),
    ):  # fmt: skip
        writer.add_key_value(f"a.{name}", values, kind.ARRAY, sub_type=element)
