"""Float models of public packages, quantized by jaxquant and by ONNX Runtime's own quantizer, with the same data.

    python -m tests.onnx.real_files FILE... [--batches 12]

A file is a model, a wheel, or another zip or tar archive with models in it. `pip download --no-deps nudenet ddddocr`
gets some. Images are pages of drawn text; other inputs are random numbers. Prints for each model its
size, and for each quantizer the size and the time of a call as parts of the float model's, and the ratio of signal to
noise of the outputs on batches that the quantizer has not seen. Times are processor times of ONNX Runtime with one
thread; the sessions take turns. The last column is of the model that jaxquant quantized: the codes that differ between
JAX and ONNX Runtime with exact sums, of the codes behind all QuantizeLinear.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import pathlib
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import version_converter
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process

from jaxquant import onnx as jqonnx
from jaxquant.onnx.quantization.data import ModelInput, list_inputs
from jaxquant.onnx.quantization.ranges import add_outputs, make_quiet_options
from jaxquant.onnx.quantization.report import Error

# The lengths that models leave open, by a part of the file's name and the rank of the input.
_LENGTHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "det_infer": ((1, 3, 320, 320),), "rec_infer": ((1, 3, 48, 320),), "cls_infer": ((1, 3, 48, 192),),
    "320n": ((1, 3, 320, 320),), "common": ((1, 1, 64, 160),), "captcha": ((1, 3, 60, 160),),
    "melspectrogram": ((1, 16000),), "silero": ((1, 512), (2, 1, 128)),
}  # fmt: skip
_OPEN = 32
_QUANTIZED = ("QLinearConv", "ConvInteger", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeLSTM", "DequantizeLinear")
_WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "0123456789",
    "INTEGER",
    "Codes",
    "scale",
]


def list_models(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each model of a file or an archive."""
    if path.suffix == ".onnx":
        yield path.name, path.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".onnx"):
                    yield pathlib.PurePath(name).name, archive.read(name)
    else:
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member) if member.name.endswith(".onnx") else None
                if file is not None:
                    yield pathlib.PurePath(member.name).name, file.read()


def draw_page(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return an image with words on it, [height, width, 3] from -1 to 1."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("RGB", (width, height), tuple(rng.integers(120, 256, 3).tolist()))
    pen, y = ImageDraw.Draw(page), 0
    while y < height:
        size = int(rng.integers(12, max(13, min(40, height))))
        text = " ".join(rng.choice(_WORDS, 1 + width // (6 * size)))
        ink = tuple(rng.integers(0, 110, 3).tolist())
        pen.text((int(rng.integers(0, size)), y), text, fill=ink, font=ImageFont.load_default(size))
        y += size + int(rng.integers(2, size))
    return np.asarray(page, np.float32) / 127.5 - 1


def make_input(rng: np.random.Generator, x: ModelInput, name: str) -> np.ndarray:
    """Return a random array for an input of a model."""
    declared = x.shape or []
    known = [shape for part, shapes in _LENGTHS.items() if part in name for shape in shapes]
    given = next((shape for shape in known if len(shape) == len(declared)), None)
    lengths = [n or (given[i] if given else 1 if i == 0 else _OPEN) for i, n in enumerate(declared)]
    if not declared and x.dtype.kind == "i":
        return np.asarray(16000, x.dtype)  # the sampling rate of voice models
    if x.dtype.kind == "f":
        return rng.normal(size=lengths).astype(x.dtype)
    if x.dtype.kind == "b" or "mask" in x.name:
        return np.ones(lengths, x.dtype)
    return rng.integers(0, 2 if "type" in x.name else 20, lengths, x.dtype)


def make_batch(rng: np.random.Generator, inputs: list[ModelInput], name: str) -> dict[str, np.ndarray]:
    """Return inputs of a model: pages for images, random numbers for others."""
    batch = {x.name: make_input(rng, x, name) for x in inputs}
    for key, value in batch.items():
        if value.ndim == 4 and value.shape[1] in (1, 3):
            page = np.moveaxis(draw_page(rng, *value.shape[2:]), -1, 0)[: value.shape[1]]
            batch[key] = np.broadcast_to(page, value.shape).astype(value.dtype)
    return batch


def draw_pages() -> list[dict[str, np.ndarray]]:
    """Return the twelve batches of RapidOCR's text detector in the table, for `--data` of another command."""
    rng = np.random.default_rng(0)
    image = ModelInput(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, 3, 320, 320)))
    return [make_batch(rng, [image], "") for _ in range(12)]


class Reader(quantization.CalibrationDataReader):
    """Batches as ONNX Runtime's quantizer takes them."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> Any:
        """Return the next batch, or None."""
        return next(self._batches, None)


def quantize_by_runtime(model: onnx.ModelProto, batches: list[dict[str, np.ndarray]], **options: Any) -> bytes:
    """Return what ONNX Runtime's quantizer makes of a model, after its own preparation."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}.onnx" for name in ("float", "prepared", "quantized")]
        onnx.save(model, paths[0])
        quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
        quantization.quantize_static(paths[1], paths[2], Reader(batches), **options)
        return pathlib.Path(paths[2]).read_bytes()


def open_session(data: bytes) -> onnxruntime.InferenceSession:
    """Return a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(data, options)


def measure_times(sessions: list[onnxruntime.InferenceSession], batch: dict[str, np.ndarray]) -> list[float]:
    """Return the least processor time of a call of each session, in turns."""
    times: list[list[float]] = [[] for _ in sessions]
    for turn in range(12):
        for session, spans in zip(sessions, times, strict=True):
            start = time.process_time()
            session.run(None, batch)
            if turn:
                spans.append(time.process_time() - start)
    return [min(spans) for spans in times]


def count_differing_codes(model: onnx.ModelProto, batch: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return how many codes differ between JAX and ONNX Runtime with exact sums, and of how many."""
    names = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    watched = add_outputs(model, names)
    fn, params = jqonnx.load(watched)
    known = {key: value for key, value in batch.items() if key in fn.static_inputs}
    rest = {key: value for key, value in batch.items() if key not in known}
    outputs = dict(zip(fn.outputs, jax.jit(functools.partial(fn, **known))(params, **rest), strict=True))
    expected = jqonnx.make_session(watched, options=make_quiet_options(1)).run(names, batch)
    jax.clear_caches()
    pairs = [(np.asarray(outputs[name]), np.asarray(codes)) for name, codes in zip(names, expected, strict=True)]
    return sum(int((x != y).sum()) for x, y in pairs), sum(y.size for _, y in pairs)


def compare(name: str, data: bytes, count: int, dump: pathlib.Path | None) -> str:
    """Return the row of a model."""
    model = onnx.load(io.BytesIO(data))
    if any(node.op_type in _QUANTIZED for node in model.graph.node):
        return f"| {name} | has codes already |"
    rng = np.random.default_rng(0)
    inputs = list_inputs(model)
    batches = [make_batch(rng, inputs, name) for _ in range(count)]
    seen, others = batches[: -(count // 4)], batches[-(count // 4) :]
    report = jqonnx.quantize(data, data=batches)
    results = {"jaxquant": report.model.SerializeToString()}
    if dump is not None:
        (dump / f"{pathlib.PurePath(name).stem}.int8.onnx").write_bytes(results["jaxquant"])
    versions = [entry.version for entry in model.opset_import if not entry.domain]
    upgraded = version_converter.convert_version(model, 13) if max(versions) < 13 else model
    settings: dict[str, dict[str, Any]] = {
        "default": {}, "per channel": {"per_channel": True, "activation_type": quantization.QuantType.QUInt8},
    }  # fmt: skip
    failures = {}
    for label, options in settings.items():
        try:
            results[label] = quantize_by_runtime(upgraded, seen, **options)
            open_session(results[label])
        except Exception as error:  # whatever a quantizer raises on a file that it cannot take
            failures[label] = type(error).__name__
            results.pop(label, None)
    sessions = {label: open_session(part) for label, part in {"float": data, **results}.items()}
    times = dict(zip(sessions, measure_times([*sessions.values()], others[0]), strict=True))
    cells = [name, f"{len(data) / 1e6:.1f} MB", f"{1e3 * times['float']:.1f} ms"]
    for label in ("jaxquant", *settings):
        if label in failures:
            cells.append(failures[label])
            continue
        error = Error()
        for batch in others:
            for x, y in zip(sessions["float"].run(None, batch), sessions[label].run(None, batch), strict=True):
                if np.asarray(x).dtype.kind == "f":
                    error.add(x, y)
        size, part = len(results[label]) / len(data), times[label] / times["float"]
        cells.append(f"{size:.2f}, {part:.2f}, {error.read():.1f} dB")
    cells.append("{:,} of {:,}".format(*count_differing_codes(report.model, others[0])))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--dump", type=pathlib.Path, help="a folder for the quantized models")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print("| model | size | time | jaxquant | ONNX Runtime, default | ONNX Runtime, uint8, per channel | codes |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for path in arguments.files:
        for name, data in list_models(path):
            try:
                print(compare(name, data, arguments.batches, arguments.dump), flush=True)
            except Exception as error:  # the other files still have rows
                print(f"| {name} | {type(error).__name__}: {str(error)[:150]} |", flush=True)


if __name__ == "__main__":
    main()
