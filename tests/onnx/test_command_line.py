"""`python -m jaxquant.onnx export`, `verify`, `run` and `inspect`, one after the other."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import onnx as jqonnx
from jaxquant.onnx.__main__ import main

SOURCE = """
import jax.numpy as jnp, jaxquant as jq
W = jq.quantize(jnp.array([[0.5, -1.0], [2.0, 0.25]]), jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
def layer(x):
    return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.55)), W)
def other(x):
    return jq.matmul(jq.quantize(x, jq.QuantSpec(jnp.uint8), range=(-1.0, 1.56)), W)
"""


def test_commands(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("layers_of_a_test.py").write_text(SOURCE)
    np.savez("x.npz", x=np.array([[0.495, 0.015], [-2.0, 3.0]], np.float32))  # two ties, and values that saturate
    inputs = ["--inputs", "x.npz"]
    assert main(["export", "layers_of_a_test:layer", "model.onnx", *inputs, "--batch", "N"]) == 0
    assert "4 nodes" in capsys.readouterr().out
    assert main(["verify", "layers_of_a_test:layer", "model.onnx", *inputs]) == 0
    assert "All codes are equal" in capsys.readouterr().out
    assert main(["verify", "layers_of_a_test:other", "model.onnx", *inputs]) == 1
    assert "error: the model and the function differ" in capsys.readouterr().err
    assert main(["run", "model.onnx", *inputs]) == 0
    assert "output: float32[2, 2]" in capsys.readouterr().out
    assert main(["inspect", "model.onnx"]) == 0
    assert "MatMulInteger" in capsys.readouterr().out
    for place, text in (
        ("layer", "expected package.module:name"), ("layers_of_a_test:none", "can be imported"),
        ("layers_of_a_test:__name__", "expected a function, got 'layers_of_a_test:__name__', of type str"),
    ):  # fmt: skip
        assert main(["export", place, "model.onnx", *inputs]) == 2
        assert text in capsys.readouterr().err
    assert main(["export", "layers_of_a_test:layer", "model.onnx", *inputs, "--opset", "9"]) == 2
    assert "opset: expected a number from 13 to 25, got 9" in capsys.readouterr().err


def test_a_prepared_function(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("prepared_of_a_test.py").write_text(
        "import jax.numpy as jnp, jaxquant as jq\n"
        "params, x = {'w': jnp.eye(3)}, jnp.ones((2, 3))\n"
        "prepared = jq.prepare(lambda params, x: x @ params['w'], params, x, rules=jq.recipes.w8a8_dynamic())\n"
        "q = prepared.convert(params)\n"
    )
    np.savez("x.npz", x=np.ones((2, 3), np.float32))
    rest = ["model.onnx", "--inputs", "x.npz"]
    for command in ("export", "verify"):
        assert main([command, "prepared_of_a_test:prepared", *rest, "--params", "prepared_of_a_test:q"]) == 0
    for params, text in (
        ([], "missing a required argument"),
        (["--params", "prepared_of_a_test:none"], "--params: expected a name that can be imported"),
        (["--params", "prepared_of_a_test:params"], "q: expected a QuantizedTree"),
    ):
        assert main(["export", "prepared_of_a_test:prepared", *rest, *params]) == 2
        assert text in capsys.readouterr().err


def test_files_and_shapes_that_do_not_fit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("other_layers_of_a_test.py").write_text(SOURCE)
    place = "other_layers_of_a_test:layer"
    np.savez("x.npz", x=np.ones((2, 2), np.float32))
    np.savez("wide.npz", x=np.ones((2, 5), np.float32))
    np.savez("named.npz", y=np.ones((2, 2), np.float32))
    np.save("x.npy", np.ones((2, 2), np.float32))
    pathlib.Path("text.npz").write_text("no array")
    pathlib.Path("empty.npz").write_bytes(b"")
    pathlib.Path("cut.npz").write_bytes(pathlib.Path("x.npz").read_bytes()[:100])
    assert main(["export", place, "model.onnx", "--inputs", "x.npz"]) == 0
    pathlib.Path("cut.onnx").write_bytes(pathlib.Path("model.onnx").read_bytes()[:100])
    capsys.readouterr()
    commands = (
        *((["run", "model.onnx", "--inputs", name], "savez") for name in ("x.npy", "text.npz", "empty.npz", "cut.npz")),
        (["run", "model.onnx", "--inputs", "none.npz"], "none.npz"),
        (["run", "model.onnx", "--inputs", "named.npz"], r"expected each of ['x'] once, got ['y']"),
        (["run", "model.onnx", "--inputs", "wide.npz"], "x: expected shape (2, 2), got shape (2, 5)"),
        (["verify", place, "model.onnx", "--inputs", "wide.npz"], "expected x of shape [2, 2], got shape [2, 5]"),
        (["verify", place, "none.onnx", "--inputs", "x.npz"], "none.onnx"),
        (["export", place, "none/model.onnx", "--inputs", "x.npz"], "none/model.onnx"),
        *(([name, "cut.onnx", *rest], "cut.onnx") for name, rest in (("inspect", []), ("run", ["--inputs", "x.npz"]))),
        (["inspect", "x.npz"], "x.npz"),
    )
    for arguments, text in commands:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: "), arguments
        assert text in error, (arguments, error)


def test_arrays_and_names_that_numpy_does_not_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("arrays_of_a_test.py").write_text("def layer(x):\n    return x, x.astype('bfloat16')\n")
    np.savez("x.npz", x=np.array([0.5, 3.0], np.float32))
    np.savez("two.npz", x=np.ones(2, np.float32), y=np.ones(2, np.float32))
    np.savez("text.npz", x=np.array(["one"]))
    np.savez("bfloat16.npz", x=np.ones(2, jnp.bfloat16))
    model = jqonnx.export(lambda x: (x, x.astype(jnp.bfloat16)), [np.ones(2)], output_names=["file", "narrow"])
    jqonnx.save(model, "model.onnx")
    assert main(["run", "model.onnx", "--inputs", "x.npz", "--outputs", "y"]) == 0
    with np.load("y.npz") as outputs:
        assert [*outputs] == ["file", "narrow"]
        np.testing.assert_array_equal(outputs["narrow"], np.array([0.5, 3.0], np.float32), strict=True)
    place = "arrays_of_a_test:layer"
    capsys.readouterr()
    commands = (
        *(
            (["run", "model.onnx", "--inputs", name], "arrays of numbers, got x")
            for name in ("text.npz", "bfloat16.npz")
        ),
        *(([name, place, "model.onnx", "--inputs", "two.npz"], "too many positional") for name in ("export", "verify")),
        (["export", ".arrays_of_a_test:layer", "model.onnx", "--inputs", "x.npz"], "expected package.module:name"),
        (["inspect", "."], "expected a regular file, got '.'"),
    )
    for arguments, text in commands:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: "), arguments
        assert text in error, (arguments, error)


def test_a_pipe_that_is_closed_early(tmp_path: pathlib.Path) -> None:
    jqonnx.save(jqonnx.export(lambda x: x + 1, [np.ones(2)]), tmp_path / "model.onnx")
    command = [sys.executable, "-m", "jaxquant.onnx", "inspect", str(tmp_path / "model.onnx")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
