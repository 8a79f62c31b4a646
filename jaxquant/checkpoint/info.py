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


@dataclasses.dataclass(repr=False)
class Info:
    """What a checkpoint has beside its tensors. `print` shows how many tensors of each kind, `format_table` each one.

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

    def __repr__(self) -> str:
        """Return one line: the format, the architecture, and the numbers of tensors and of bytes."""
        count, total, _ = self._measure()
        architecture = self._read_architecture()
        names = "".join(f", {shorten_name(name)!r}" for name in ([architecture] if architecture else []))
        kinds = ", ".join(f"{len(entries)} {kind}" for kind, entries in self._group().items())
        return f"Info({self.format!r}{names}, {count}, {total:,} bytes{': ' if kinds else ''}{kinds})"

    def __str__(self) -> str:
        """Return the format, the architecture, the numbers of tensors and of bytes, of each kind, and the notes."""
        rows = [("stored as", "tensors", "bits per weight", "bytes")]
        for kind, entries in self._group().items():
            total, size = (sum(n) for n in zip(*((x.nbytes, math.prod(x.shape)) for x in entries), strict=True))
            rows.append((kind, str(len(entries)), _format_bits(8 * total / size if size else 0), f"{total:,}"))
        architecture = self._read_architecture()
        names = f", {shorten_name(architecture)}" if architecture else ""
        return "\n".join(
            [f"{self.format}{names}: {self._summarize()}", *_align(rows if rows[1:] else []), *self._list_notes()]
        )

    def format_table(self) -> str:
        """Return a table with a row for each tensor, and the notes below it.

        Example:
            >>> from jaxquant.checkpoint import Info, TensorInfo
            >>> up, norm = TensorInfo("up", "Q8_0", (4, 32), 136), TensorInfo("norm", "F32", (32,), 128)
            >>> info = Info("gguf", tensors={"up": up, "norm": norm})
            >>> print(info.format_table())
            tensor  stored as  bits per weight  shape
            up      Q8_0       8.5              4 x 32
            norm    F32        32               32
            gguf: 2 tensors, 264 bytes, 13.200 bits per weight
            >>> print(info)
            gguf: 2 tensors, 264 bytes, 13.200 bits per weight
            stored as  tensors  bits per weight  bytes
            Q8_0       1        8.5              136
            F32        1        32               128
            >>> info
            Info('gguf', 2 tensors, 264 bytes: 1 Q8_0, 1 F32)
        """
        rows = [("tensor", "stored as", "bits per weight", "shape")]
        for entry in self.tensors.values():
            bits = _format_bits(entry.bits_per_weight)
            rows.append((shorten_name(entry.name), entry.stored_as, bits, " x ".join(map(str, entry.shape))))
        return "\n".join([*_align(rows), f"{self.format}: {self._summarize()}", *self._list_notes()])

    def _group(self) -> dict[str, list[TensorInfo]]:
        """Return the tensors of each kind, the kinds with the most bytes first."""
        kinds: dict[str, list[TensorInfo]] = {}
        for entry in self.tensors.values():
            kinds.setdefault(entry.stored_as, []).append(entry)
        return dict(sorted(kinds.items(), key=lambda item: -sum(entry.nbytes for entry in item[1])))

    def _measure(self) -> tuple[str, int, int]:
        """Return the number of tensors as text, the bytes, and the elements."""
        total = sum(entry.nbytes for entry in self.tensors.values())
        size = sum(math.prod(entry.shape) for entry in self.tensors.values())
        return f"{len(self.tensors)} tensor{'' if len(self.tensors) == 1 else 's'}", total, size

    def _summarize(self) -> str:
        count, total, size = self._measure()
        bits = f", {8 * total / size:.3f} bits per weight" if size else ""
        return f"{count}, {total:,} bytes{bits}"

    def _read_architecture(self) -> str:
        """Return what the metadata name as the architecture, or an empty text. They are not trusted."""
        name = self.metadata.get("general.architecture")
        config = self.metadata.get("config.json")
        if name is None and isinstance(config, dict):
            name = config.get("model_type")
        return name if isinstance(name, str) else ""

    def _list_notes(self) -> list[str]:
        notes: dict[str, list[str]] = {}
        for entry in self.tensors.values():
            if entry.note:
                notes.setdefault(entry.note, []).append(shorten_name(entry.name))
        return [f"{note}: {list_some(names)}" for note, names in notes.items()]


def _format_bits(bits: float) -> str:
    return f"{bits:.3f}".rstrip("0").rstrip(".")


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shorten_name(name: str) -> str:
    """Return a name from a file for a message: at most 100 characters, and a sign for each that cannot be printed."""
    text = name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name[:101])
    return text if len(text) <= 100 else f"{text[:97]}..."


def list_some(names: list[str], count: int = 8) -> str:
    """Return names for a message: all of them, or the first ones and the number of the others."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
