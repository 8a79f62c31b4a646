"""`python -m jaxquant.checkpoint`: what it prints and writes, and errors in one line."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import gguf
import numpy as np
import pytest

from jaxquant import checkpoint
from jaxquant.checkpoint.__main__ import main

from ..cases.family_files import FAMILIES
from ..cases.gguf_files import draw_data, write_gguf
from ..support import equality


def make_model(rng: np.random.Generator, path: pathlib.Path) -> dict[str, np.ndarray]:
    arrays = {
        "blk.0.up.weight": rng.normal(size=(6, 64)).astype(np.float32),
        "blk.0.norm.weight": rng.normal(size=(2, 64)).astype(np.float32),
        "half": rng.normal(size=(3, 32)).astype(np.float16),
        "bias": rng.normal(size=7).astype(np.float32),
    }
    kinds = {name: ("F16" if array.dtype == np.float16 else "F32", array) for name, array in arrays.items()}
    write_gguf(path, kinds, lambda writer: writer.add_uint32("general.file_type", 0))
    return arrays


def test_quantize(rng: np.random.Generator, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = make_model(rng, tmp_path / "a.gguf")
    command = ["quantize", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--to", "Q4_0", "--keep", "*norm*"]
    assert main(command) == 0
    output = capsys.readouterr().out
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        is_kept = "norm" in name or name == "bias"
        expected = array if is_kept else gguf.quantize(array.astype(np.float32), gguf.GGMLQuantizationType.Q4_0)
        equality.check_equal(found[name].data, expected)
        line = next(line for line in output.splitlines() if line.startswith(name))
        assert ("dB" in line) == (not is_kept)
        if not is_kept:
            values = gguf.dequantize(expected, gguf.GGMLQuantizationType.Q4_0).astype(np.float64)
            x = array.astype(np.float64)
            assert float(line.split()[-2]) == pytest.approx(
                10 * np.log10((x**2).sum() / ((x - values) ** 2).sum()), abs=0.06
            )
    assert "2 of 4 tensors as Q4_0" in output


def test_quantize_a_folder(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    x = rng.normal(size=(4, 256)).astype(np.float32)
    checkpoint.save(tmp_path / "in", {"w": x, "n": x[0]}, checkpoint.Info("safetensors", {"config.json": {"a": 1}}))
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "b.gguf"), "--to", "q6_k"]) == 0
    tensors, info = checkpoint.load(tmp_path / "b.gguf")
    assert info.tensors["w"].stored_as == "Q6_K"
    equality.same_bits(tensors["n"], x[0])


def test_quantized_matrices_stay_unless_requantized(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    data = draw_data(rng, "Q4_K")
    write_gguf(tmp_path / "a.gguf", {"w": ("Q4_K", data)})
    command = ["quantize", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--to", "q8_0"]
    assert main(command) == 0
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert main([*command, "--requantize"]) == 0
    (tensor,) = gguf.GGUFReader(tmp_path / "b.gguf").tensors
    values = gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_K)
    equality.check_equal(tensor.data, gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0))


def test_convert(rng: np.random.Generator, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = draw_data(rng, "Q5_0")
    write_gguf(tmp_path / "a.gguf", {"w": ("Q5_0", data), "n": ("F32", np.ones(3, np.float32))})
    assert main(["convert", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")]) == 0
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert main(["convert", str(tmp_path / "a.gguf"), str(tmp_path / "c.safetensors"), "--dequantize"]) == 0
    assert "the metadata of gguf are left out" in capsys.readouterr().out
    tensors, _ = checkpoint.load(tmp_path / "c.safetensors")
    equality.same_bits(tensors["w"], gguf.dequantize(data, gguf.GGMLQuantizationType.Q5_0))
    assert main(["convert", str(tmp_path / "c.safetensors"), str(tmp_path / "d.gguf")]) == 0
    equality.same_bits(checkpoint.load(tmp_path / "d.gguf")[0]["w"], np.asarray(tensors["w"]))


@pytest.mark.parametrize("name", ["GPTQ desc_act", "ModelOpt NVFP4", "MLX 4 bits, float16", "torchao int8"])
def test_floats_of_a_folder_are_no_longer_quantized(
    name: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    family = FAMILIES[name]
    tensors, parts = family.make(rng)
    family.write(tmp_path / "in", tensors)
    before = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--dequantize"]) == 0
    expected = {k: v for k, v in family.configs["config.json"].items() if not k.startswith("quantization")}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    loaded, info = checkpoint.load(tmp_path / "out")
    assert info.format == "safetensors"
    assert info.metadata["safetensors"] == {k: v for k, v in (family.metadata or {}).items() if k == "format"}
    equality.same_bits(loaded[family.weight], family.compute_values(parts))
    for output in (tmp_path / "in", tmp_path / "in" / "floats.safetensors"):
        assert main(["convert", str(tmp_path / "in"), str(output), "--dequantize"]) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()} == before


def test_inspect(rng: np.random.Generator, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(rng, tmp_path / "a.gguf")
    assert main(["inspect", str(tmp_path / "a.gguf")]) == 0
    output = capsys.readouterr().out
    assert "general.file_type: 0" in output
    assert output.endswith(f"{checkpoint.load(tmp_path / 'a.gguf')[1].format_table()}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "error: the following arguments are required: command"),
        (["inspect", "missing.gguf"], "missing.gguf: expected a file or a folder"),
        (["inspect", "bad.gguf"], "bad.gguf: expected"),
        (["quantize", "a.gguf", "b.gguf"], "required: --to"),
        (["quantize", "a.gguf", "b.gguf", "--to", "q3"], "invalid choice: 'q3'"),
        (["quantize", "a.gguf", "b.bin", "--to", "q4_0"], "b.bin: expected a name that ends in .gguf"),
        (["quantize", "a.gguf", "b.gguf", "--to", "q4_k"], "expected rows of a multiple of 256"),
        (["quantize", "nan.gguf", "b.gguf", "--to", "q4_0"], "'w': expected finite numbers"),
        (["quantize", "a.gguf", "no/b.gguf", "--to", "q4_0"], "expected a path in a folder, got nothing at no"),
        (["convert", "q.gguf", "b.safetensors"], "'w': expected a tensor of the loaded checkpoint"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], text: str, rng: np.random.Generator, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make_model(rng, tmp_path / "a.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    write_gguf(tmp_path / "nan.gguf", {"w": ("F32", np.full((2, 32), np.nan, np.float32))})
    write_gguf(tmp_path / "q.gguf", {"w": ("Q4_0", draw_data(rng, "Q4_0"))})
    before = sorted(path.name for path in tmp_path.iterdir())
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_module_runs(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make_model(rng, tmp_path / "a.gguf")
    command = [sys.executable, "-m", "jaxquant.checkpoint", "inspect", str(tmp_path / "a.gguf")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.dumps("blk.0.up.weight")[1:-1] in result.stdout
