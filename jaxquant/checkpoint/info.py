"""What a checkpoint says beside its tensors: `Info`, `TensorInfo`, and the error for what cannot be read or written."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from .._arrays.quantized_array import QuantizedArray

Tensor = QuantizedArray | jax.Array | np.ndarray


class CheckpointError(ValueError):
    """The error for a checkpoint that is damaged, unsafe or not supported, or that cannot hold what shall be saved.

    Whatever is wrong with a file, `load` raises this error, with a text that says what it is.
    """


@dataclasses.dataclass
class TensorInfo:
    """How a file stores one tensor.

    Attributes:
        name: the name of the tensor, which is its key among the loaded tensors.
        stored_as: the format of the tensor, such as "Q4_K", "GPTQ, 4 bits" or "BF16".
        shape: the logical shape.
        nbytes: the bytes that it takes in the file.
        note: why a tensor is not quantized, or is kept as bytes; empty if there is nothing to say.
        stored: the names of the file's tensors that make up this one, by their role, such as {"qweight":
            "model.q_proj.qweight"}. A tensor that is stored as it is has the role "".
        extras: what the format needs, beside the codes and the scales, to write the same bytes.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    nbytes: int = 0
    note: str = ""
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """The bits that the file takes for one element, scales included; 0 for an empty tensor."""
        size = math.prod(self.shape)
        return 8 * self.nbytes / size if size else 0.0


@dataclasses.dataclass
class Info:
    """What a checkpoint has beside its tensors. `print` shows it as a table.

    Attributes:
        format: the name of the format, such as "gguf" or "gptq".
        metadata: what the file says about the model. Of GGUF: its keys and values. Of safetensors: the parsed
            "config.json" and other configurations by the names of their files, and the headers' metadata under
            "safetensors".
        tensors: how each tensor is stored, in the order of the file.
        container: what the file needs to be written with the same bytes, such as its order and its padding.
    """

    format: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, TensorInfo] = dataclasses.field(default_factory=dict)
    container: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Return a table with a row for each tensor, and the notes below it."""
        rows = [("tensor", "stored as", "bits per weight", "shape")]
        for entry in self.tensors.values():
            bits = f"{entry.bits_per_weight:.3f}".rstrip("0").rstrip(".")
            rows.append((shorten_name(entry.name), entry.stored_as, bits, " x ".join(map(str, entry.shape))))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        total = sum(entry.nbytes for entry in self.tensors.values())
        size = sum(math.prod(entry.shape) for entry in self.tensors.values())
        bits = f", {8 * total / size:.3f} bits per weight" if size else ""
        lines.append(f"{self.format}: {len(self.tensors)} tensors, {total:,} bytes{bits}")
        notes: dict[str, list[str]] = {}
        for entry in self.tensors.values():
            if entry.note:
                notes.setdefault(entry.note, []).append(shorten_name(entry.name))
        lines.extend(f"{note}: {list_some(names)}" for note, names in notes.items())
        return "\n".join(lines)


def shorten_name(name: str) -> str:
    """Return a name from a file for a message: at most 100 characters, and a sign for each that cannot be printed."""
    text = name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name[:101])
    return text if len(text) <= 100 else f"{text[:97]}..."


def list_some(names: list[str], count: int = 8) -> str:
    """Return names for a message: all of them, or the first ones and the number of the others."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
