"""Batches for calibration: from files, folders and functions, as a model's inputs take them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from ..._core import checks
from ..limits import ModelError
from ..model_file import read_onnx_dtype
from .ranges import Batch

_NAME = "onnx.quantize"
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# What a length that the model leaves open is in random data, and the rows of a batch from a longer array.
_OPEN_LENGTH = 16
_ROWS = 8


class ModelInput:
    """An input of a model: its name, its dtype, and its lengths, None for an open one.

    Args:
        info: the declaration in the model.
    """

    def __init__(self, info: Any) -> None:
        kind = info.type.tensor_type
        self.name = str(info.name)
        self.dtype = read_onnx_dtype(kind.elem_type, f"input {info.name!r}")
        lengths = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in kind.shape.dim]
        self.shape: list[int | None] | None = lengths if kind.HasField("shape") else None

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array has the declared shape."""
        if self.shape is None:
            return True
        pairs = zip(self.shape, shape, strict=False)
        return len(shape) == len(self.shape) and all(n is None or n == m for n, m in pairs)

    def describe(self) -> str:
        """Return the dtype and the shape, with "?" for an open length."""
        if self.shape is None:
            return f"{self.dtype} of any shape"
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"


def list_inputs(model: ModelProto) -> list[ModelInput]:
    """Return the inputs of a model that have no default."""
    defaults = {tensor.name for tensor in model.graph.initializer}
    return [ModelInput(info) for info in model.graph.input if info.name not in defaults]


def check_batches(inputs: Sequence[ModelInput], data: Any) -> list[Batch]:
    """Return batches by the names of inputs; raise unless each fits the model and is finite.

    Args:
        inputs: the inputs of the model.
        data: an iterable of mappings by name, tuples in the order of the inputs, or arrays.
    """
    is_single = isinstance(data, Mapping | str | bytes | np.ndarray) or not isinstance(data, Iterable)
    checks.require_type(not is_single, _NAME, "data", "an iterable of batches, such as [x]", type(data).__name__)
    batches = [_check_batch(inputs, batch, f"data[{i}]") for i, batch in enumerate(data)]
    checks.require(bool(batches), _NAME, "data", "at least one batch", "none")
    return batches


def _check_batch(inputs: Sequence[ModelInput], batch: Any, label: str) -> Batch:
    names = [x.name for x in inputs]
    if not isinstance(batch, Mapping):
        arrays = batch if isinstance(batch, tuple | list) else (batch,)
        checks.require(len(arrays) == len(names), _NAME, label, f"{len(names)} arrays, {names}", f"{len(arrays)}")
        batch = dict(zip(names, arrays, strict=True))
    missing, unknown = sorted(set(names) - set(batch)), sorted(set(batch) - set(names))
    got = ", ".join(f"{what} {part}" for what, part in (("without", missing), ("with", unknown)) if part)
    checks.require(not got, _NAME, label, f"arrays for the inputs {names}", got)
    result = {x.name: _check_array(x, batch[x.name], f"{label}[{x.name!r}]") for x in inputs}
    is_empty = bool(result) and not any(array.size for array in result.values())
    checks.require(not is_empty, _NAME, label, "an array with elements", "none")
    return result


def _check_array(declared: ModelInput, value: Any, label: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        checks.refuse(_NAME, label, declared.describe(), str(error))
    kinds = "fiub" if declared.dtype.kind == "f" else "iub"
    fits = declared.fits(array.shape) and array.dtype.kind in kinds
    checks.require(fits, _NAME, label, declared.describe(), f"{array.dtype}{list(array.shape)}")
    with np.errstate(over="ignore"):  # what float32 does not hold becomes an infinity
        result = np.ascontiguousarray(array.astype(declared.dtype))
    is_finite = declared.dtype.kind != "f" or bool(np.all(np.isfinite(result)))
    checks.require(is_finite, _NAME, label, f"finite numbers of {declared.dtype}", "a NaN or an infinity")
    if declared.dtype.kind in "iu" and array.size:
        ends, limits = (int(array.min()), int(array.max())), np.iinfo(declared.dtype)
        holds = limits.min <= ends[0] and ends[1] <= limits.max
        checks.require(holds, _NAME, label, f"numbers that {declared.dtype} holds", f"{ends[0]} to {ends[1]}")
    return result


def make_random(inputs: Sequence[ModelInput], count: int) -> list[Batch]:
    """Return batches of random numbers: normal floats, integers 0 and 1."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(count):
        shapes = [[_OPEN_LENGTH if n is None else n for n in x.shape or []] for x in inputs]
        for shape, x in zip(shapes, inputs, strict=True):
            if x.shape and x.shape[0] is None:
                shape[0] = 1
        draws = [
            rng.normal(size=shape) if x.dtype.kind == "f" else rng.integers(0, 2, shape)
            for shape, x in zip(shapes, inputs, strict=True)
        ]
        batches.append({x.name: np.asarray(draw, x.dtype) for x, draw in zip(inputs, draws, strict=True)})
    return batches


def split_arrays(inputs: Sequence[ModelInput], arrays: Mapping[str, np.ndarray], label: str) -> list[Batch]:
    """Return arrays of many examples as batches.

    An array has the shape of its input, with any number of examples along the first dimension. It is cut into batches
    of the declared first length, or of 8 if the model leaves that open. An array of one batch is in all of them.
    """
    names = [x.name for x in inputs]
    missing, unknown = sorted(set(names) - set(arrays)), sorted(set(arrays) - set(names))
    got = ", ".join(f"{what} {part}" for what, part in (("without", missing), ("with", unknown)) if part)
    if got:
        raise ModelError(f"{label}: expected arrays for the inputs {names}, got a file {got}")
    pieces = {x.name: _cut(x, arrays[x.name], label) for x in inputs}
    count = max(map(len, pieces.values()), default=1)
    for name, parts in pieces.items():
        if len(parts) not in (1, count):
            raise ModelError(f"{label}: {name}: expected {count} batches, as another input has, got {len(parts)}")
    return [{name: parts[i % len(parts)] for name, parts in pieces.items()} for i in range(count)]


def _cut(declared: ModelInput, array: np.ndarray, label: str) -> list[np.ndarray]:
    """Return an array as batches along its first dimension."""
    if array.ndim == 0:
        return [array]
    size = (declared.shape or [None])[0] or _ROWS
    is_whole = declared.shape is None or not declared.shape or declared.shape[0] is None or len(array) % size == 0
    if not (len(array) and is_whole and declared.fits(array[:size].shape)):
        expected = f"{declared.describe()}, or such arrays joined along the first dimension"
        raise ModelError(f"{label}: {declared.name}: expected {expected}, got {array.dtype}{list(array.shape)}")
    return [array[i : i + size] for i in range(0, len(array), size)]


def read_images(
    inputs: Sequence[ModelInput], folder: pathlib.Path, mean: Sequence[float], std: Sequence[float]
) -> list[Batch]:
    """Return the images of a folder as batches of one, in the size and the layout of the model's only input.

    A channel is (value / 255 - mean) / std. A length that the model leaves open is the image's own, rounded down to a
    multiple of 32.
    """
    if len(inputs) != 1 or inputs[0].shape is None or len(inputs[0].shape) != 4:
        raise ModelError(f"{folder}: expected a model with one input of 4 dimensions for images")
    try:
        from PIL import Image
    except ImportError as error:
        raise ModelError(f"{folder}: expected the package Pillow, which reads images") from error
    (declared,) = inputs
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)
    if not paths:
        raise ModelError(f"{folder}: expected images ({', '.join(_IMAGES)}), got none")
    assert declared.shape is not None
    last = declared.shape[3] in (1, 3)
    channels, (height, width) = declared.shape[3 if last else 1], declared.shape[1:3] if last else declared.shape[2:]
    if channels not in (1, 3):
        raise ModelError(f"{folder}: expected an input with 1 or 3 channels, got {declared.describe()}")
    for option, numbers in (("--mean", mean), ("--std", std)):
        if len(numbers) not in (1, channels):
            raise ModelError(f"{option}: expected a number, or {channels}, one for each channel, got {len(numbers)}")
    if not np.all(np.isfinite([*mean, *std])) or not np.all(std):
        raise ModelError(f"--mean, --std: expected finite numbers, and no --std of 0, got {mean} and {std}")
    batches = []
    for path in paths:
        try:
            with Image.open(path) as file:
                image = file.convert("L" if channels == 1 else "RGB")
        # SyntaxError is what Pillow raises for a damaged PNG file.
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ModelError(f"{path}: expected an image: {error}") from error
        size = (width or max(image.width // 32 * 32, 32), height or max(image.height // 32 * 32, 32))
        pixels = np.asarray(image.resize(size), np.float32).reshape(size[1], size[0], channels) / 255
        pixels = (pixels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
        pixels = pixels if last else np.moveaxis(pixels, -1, 0)
        batches.append({declared.name: pixels[None].astype(declared.dtype)})
    return batches
