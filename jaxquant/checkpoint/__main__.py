"""Checkpoints from a shell: print, convert and quantize them, one tensor at a time.

    python -m jaxquant.checkpoint inspect model.gguf
    python -m jaxquant.checkpoint convert model.gguf model.safetensors --dequantize
    python -m jaxquant.checkpoint quantize model.gguf small.gguf --to q4_0 --keep "*norm*"

The names of tensors stay as they are. `quantize` writes GGUF files.
"""

from __future__ import annotations

import argparse
import fnmatch
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._arrays.quantized_array import QuantizedArray
from .._core.command_line import CommandParser, run_command
from ..calibration.loop import Bar
from . import formats
from .files import open_checkpoint
from .formats.gguf import name_type, save_tensors
from .formats.gguf_blocks import BLOCK_TYPES, PLAIN_TYPES
from .formats.gguf_header import TYPES
from .info import CheckpointError, Info, Tensor, shorten_name
from .place import place_tensor
from .quantize import QUANTIZERS, quantize_array
from .safetensors_files import CONFIGS, QUANTIZATION_KEYS

_NAME = "checkpoint"
# What llama.cpp calls a file by the type of most of its matrices: the metadata "general.file_type".
_FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16", "F64")


class _Tensors(Mapping[str, Tensor]):
    """The tensors of an open checkpoint, each read when it is asked for."""

    def __init__(self, reader: formats.Reader, dequantize: bool, bar: Bar) -> None:
        self._reader, self._dequantize, self._bar = reader, dequantize, bar

    def __getitem__(self, name: str) -> Tensor:
        self._bar.count_step()
        tensor = place_tensor(_NAME, name, self._reader.read(name), None)
        return tensor.dequantize() if self._dequantize and isinstance(tensor, QuantizedArray) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.info.tensors)

    def __len__(self) -> int:
        return len(self._reader.info.tensors)


def inspect_checkpoint(arguments: argparse.Namespace) -> None:
    """Print the metadata and the tensors of a checkpoint."""
    reader = open_checkpoint(_NAME, arguments.input, arguments.format, "keep_bytes")
    try:
        for key, value in reader.info.metadata.items():
            shown = f"{len(value)} elements" if isinstance(value, np.ndarray | list | tuple) else str(value)
            print(f"{shorten_name(key)}: {shorten_name(shown)}")
        print(reader.info.format_table())
    finally:
        reader.close()


def convert_checkpoint(arguments: argparse.Namespace) -> None:
    """Write a checkpoint in the format of the output's name."""
    reader = open_checkpoint(_NAME, arguments.input, arguments.format)
    bar = Bar("converting", 2 * len(reader.info.tensors), None)
    try:
        output, source = pathlib.Path(arguments.output), reader.info
        name = "gguf" if output.suffix == ".gguf" else "safetensors"
        name = source.format if name == "safetensors" and source.format != "gguf" and not arguments.dequantize else name
        info = source
        if name != source.format:
            info = Info(name)
            if source.format == "gguf" or name == "gguf":
                print(f"the metadata of {source.format} are left out, because {name} has others")
            else:
                info.metadata = _remove_quantization(source.metadata)
        if name == "safetensors":
            _check_configurations(output)
        formats.find_format(name).save(output, _Tensors(reader, arguments.dequantize, bar), info)
        print(f"{output}: {len(source.tensors)} tensors as {name}")
    finally:
        bar.stop()
        reader.close()


def _check_configurations(output: pathlib.Path) -> None:
    """Raise CheckpointError if configurations that are there already would say that floats are quantized."""
    folder = output.parent if output.suffix == ".safetensors" else output
    for path in (folder / name for name in CONFIGS):
        text = path.read_text() if path.exists() else ""
        if text and (path.name != "config.json" or any(f'"{key}"' in text for key in QUANTIZATION_KEYS)):
            expected = f"a folder without the configuration of a quantization, got {path.name}"
            raise CheckpointError(
                f"{output}: expected {expected}, which would be read as the configuration of the floats"
            )


def _remove_quantization(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the files of a model say, without its quantization."""
    header, config = metadata.get("safetensors", {}), metadata.get("config.json")
    kept: dict[str, Any] = {"safetensors": {key: text for key, text in header.items() if key == "format"}}
    if config is not None:
        kept["config.json"] = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    return kept


def quantize_checkpoint(arguments: argparse.Namespace) -> None:
    """Write a GGUF file with the matrices of a checkpoint in another type, and print their errors."""
    output, type = pathlib.Path(arguments.output), arguments.to.upper()
    if output.suffix != ".gguf":
        raise CheckpointError(f"{output}: expected a name that ends in .gguf")
    reader = open_checkpoint(_NAME, arguments.input, arguments.format)
    bar = Bar("quantizing", len(reader.info.tensors), None)
    rows = [("tensor", "from", "to", "bits per weight", "SQNR")]
    try:
        info = reader.info if reader.info.format == "gguf" else Info("gguf")
        tensors = _Tensors(reader, False, bar)
        kinds, is_changed = {}, {}
        for name, entry in reader.info.tensors.items():
            is_matrix = len(entry.shape) > 1 and (entry.stored_as in _FLOATS or arguments.requantize)
            is_matrix = is_matrix and entry.stored_as not in ("I8", "I16", "I32", "I64")
            is_kept = any(fnmatch.fnmatch(name, pattern) for pattern in arguments.keep)
            is_changed[name] = is_matrix and not is_kept
            if is_changed[name]:
                kinds[name] = (type, entry.shape)
                length, size = list(entry.shape)[-1], BLOCK_TYPES[type].size
                if length % size:
                    expected = f"rows of a multiple of {size} elements for {type}, or its name in --keep"
                    raise CheckpointError(
                        f"tensor {shorten_name(name)!r}: expected {expected}, got shape {entry.shape}"
                    )
            elif entry.stored_as in PLAIN_TYPES or reader.info.format == "gguf":
                kinds[name] = (entry.stored_as, entry.shape)
            else:
                kinds[name] = name_type(name, tensors[name], None)
        if any(is_changed.values()):
            info.metadata |= {
                "general.quantization_version": np.uint32(2), "general.file_type": np.uint32(_FILE_TYPES[type])
            }  # fmt: skip

        def read(name: str) -> Tensor:
            tensor, entry, error = tensors[name], reader.info.tensors[name], ""
            if is_changed[name]:
                x = tensor.dequantize() if isinstance(tensor, QuantizedArray) else jnp.asarray(tensor, jnp.float32)
                tensor = quantize_array(name, x, type)
                error = _measure_error(np.asarray(x), np.asarray(tensor.dequantize()))
            _, size, nbytes = TYPES[kinds[name][0]]
            rows.append((shorten_name(name), entry.stored_as, kinds[name][0], f"{8 * nbytes / size:g}", error))
            return tensor

        save_tensors(output, kinds, read, info)
    finally:
        bar.stop()
        reader.close()
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    count = sum(is_changed.values())
    before = sum(entry.nbytes for entry in reader.info.tensors.values())
    print(f"{output}: {count} of {len(kinds)} tensors as {type}, {output.stat().st_size:,} bytes, before {before:,}")


def _measure_error(x: np.ndarray, values: np.ndarray) -> str:
    """Return the ratio of signal to noise."""
    signal, noise = (float(np.square(part, dtype=np.float64).sum()) for part in (x, x - values))
    return f"{10 * np.log10(signal / noise):.1f} dB" if noise and signal else "exact"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog="python -m jaxquant.checkpoint", description="Print, convert and quantize checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")
    known = tuple(formats.MODULES)

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("input", help="a GGUF file, a safetensors file, or a folder with a config.json")
        command.add_argument("--format", choices=known, help="the format of the input; by default it is recognized")
        command.set_defaults(function=function)
        return command

    add("inspect", inspect_checkpoint, "print the metadata and the tensors of a checkpoint")
    convert = add(
        "convert", convert_checkpoint, "write a checkpoint in another format, with the same codes or as floats"
    )
    convert.add_argument("output", help="a name that ends in .gguf or .safetensors, or a folder")
    text = "write quantized tensors as floats, in the dtype of their values"
    convert.add_argument("--dequantize", action="store_true", help=text)
    quantize = add("quantize", quantize_checkpoint, "quantize the matrices of a checkpoint, and write a GGUF file")
    quantize.add_argument("output", help="a name that ends in .gguf")
    choices = [name.lower() for name in QUANTIZERS]
    quantize.add_argument("--to", required=True, type=str.lower, choices=choices, help="the type of the matrices")
    quantize.add_argument("--keep", action="append", default=[], help="a pattern of names that stay; may be repeated")
    text = "quantize matrices that are quantized already, from their values"
    quantize.add_argument("--requantize", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 2 after an error in the arguments or the files."""
    return run_command(make_parser(), argv, (CheckpointError,))


if __name__ == "__main__":
    sys.exit(main())
