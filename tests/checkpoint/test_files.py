"""Safetensors files and folders of other programs: loaded as they are, and written with the same bytes."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy as library

import jaxquant as jq
from jaxquant import checkpoint

from ..support import equality

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32, "F32": np.float32, "F64": np.float64,
    "I64": np.int64, "U64": np.uint64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def draw_arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {}
    for i, dtype in enumerate(DTYPES.values()):
        shape = [(3, 5), (), (0, 4), (7,)][i % 4]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        high = 2 if dtype is np.bool_ else 256
        arrays[f"block.{i}.w"] = rng.integers(0, high, size).astype(np.uint8).view(dtype).reshape(shape)
    return arrays


def write_file(path: pathlib.Path, header: Any, data: bytes, *, padding: int = 0) -> None:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def describe(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header, data = {}, b""
    for name, array in arrays.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [start, len(data)]}
    return header, data


def read_folder(path: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_file_comes_back_with_the_same_bytes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Also with an order of keys, padding and metadata that no other program writes."""
    arrays = draw_arrays(rng)
    header, data = describe(arrays)
    order = rng.permutation(len(header))
    shuffled = {list(header)[i]: header[list(header)[i]] for i in order}
    write_file(tmp_path / "a.safetensors", {"__metadata__": {"b": "2", "a": "é"}, **shuffled}, data, padding=5)
    tensors, info = checkpoint.load(tmp_path / "a.safetensors")
    assert list(tensors) == list(shuffled) == list(info.tensors)
    assert info.metadata == {"safetensors": {"b": "2", "a": "é"}}
    for name, array in arrays.items():
        is_wide = array.dtype.itemsize == 8
        assert isinstance(tensors[name], np.ndarray if is_wide else jax.Array)
        assert np.asarray(tensors[name]).tobytes() == array.tobytes()
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
    checkpoint.save(tmp_path / "b.safetensors", tensors, info)
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def make_folder(path: pathlib.Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {f"layer.{i}": rng.normal(size=(4, i + 1)).astype(np.float32) for i in range(6)}
    path.mkdir()
    places = {}
    for part in range(3):
        own = {name: arrays[name] for name in list(arrays)[part::3]}
        file = f"model-0000{part + 1}-of-00003.safetensors"
        library.save_file(own, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (path / "config.json").write_text('{ "model_type" : "test" }')
    (path / "tokenizer.json").write_text("{}")
    return arrays


def test_a_folder_comes_back_with_the_same_bytes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    arrays = make_folder(tmp_path / "in", rng)
    tensors, info = checkpoint.load(tmp_path / "in")
    assert info.metadata["config.json"] == {"model_type": "test"}
    for name, array in arrays.items():
        equality.same_bits(tensors[name], array)
    checkpoint.save(tmp_path / "out", tensors, info)
    before, after = read_folder(tmp_path / "in"), read_folder(tmp_path / "out")
    before.pop("tokenizer.json")  # no part of the checkpoint's tensors
    assert after == before
    # Other numbers, one tensor more, one less, and another configuration.
    tensors["new"], tensors["layer.0"] = jnp.arange(3), tensors["layer.0"] * 2
    del tensors["layer.1"], info.tensors["layer.1"]
    info.metadata["config.json"]["model_type"] = "other"
    info.metadata["safetensors"] = {"format": "np"}
    checkpoint.save(tmp_path / "out", tensors, info)
    again, info = checkpoint.load(tmp_path / "out")
    assert (info.metadata["config.json"], info.metadata["safetensors"]) == ({"model_type": "other"}, {"format": "np"})
    assert set(again) == {*arrays, "new"} - {"layer.1"}
    for name, tensor in again.items():
        equality.same_bits(tensor, np.asarray(tensors[name]))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_package_reads_what_is_written(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    arrays = {"a": rng.normal(size=(2, 3)).astype(np.float32), "b": rng.integers(0, 9, 4).astype(np.int32)}
    info = checkpoint.Info("safetensors", {"safetensors": {"who": "me"}, "config.json": {"x": 1}})
    checkpoint.save(tmp_path / "folder", {name: jnp.asarray(array) for name, array in arrays.items()}, info)
    assert json.loads((tmp_path / "folder" / "config.json").read_text()) == {"x": 1}
    found = library.load_file(tmp_path / "folder" / "model.safetensors")
    for name, array in arrays.items():
        equality.check_equal(found[name], array)


def test_names_and_shardings(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "in", rng)
    tensors, info = checkpoint.load(tmp_path / "in", names=["layer.[12]", "layer.5"])
    assert sorted(tensors) == sorted(info.tensors) == ["layer.1", "layer.2", "layer.5"]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    tensors, _ = checkpoint.load(tmp_path / "in", sharding=sharding)
    assert all(tensor.sharding == sharding for tensor in tensors.values())
    seen = {}

    def choose(name: str, shape: tuple[int, ...]) -> Any:
        seen[name] = shape
        return sharding if name == "layer.3" else None

    tensors, _ = checkpoint.load(tmp_path / "in", sharding=choose)
    assert tensors["layer.3"].sharding == sharding
    assert seen == {name: tensor.shape for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"checkpoint.load: names: expected patterns that tensors have, got 'blk.*'"):
        checkpoint.load(tmp_path / "in", names="blk.*")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        (b"", b"", "expected JSON"),
        (b"{", b"", "expected JSON"),
        (b"[" * 100000, b"", "nested too deeply"),
        (b"[]", b"", "expected a JSON object"),
        (b'{"a": 1, "a": 1}', b"", "twice"),
        ({"a": 1}, b"", "expected an object with dtype"),
        ({"a": {**ENTRY, "dtype": "F31"}}, bytes(8), "expected a dtype of"),
        ({"a": {**ENTRY, "shape": [3]}}, bytes(8), "expected data_offsets with 12 bytes"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, bytes(8), "expected data_offsets with"),
        ({"a": {**ENTRY, "shape": [True]}}, bytes(8), "expected shape to be a list of lengths"),
        ({"a": {**ENTRY, "shape": [-2]}}, bytes(8), "expected shape to be a list of lengths"),
        ({"a": {**ENTRY, "data_offsets": [0, 9]}}, bytes(8), "expected data_offsets with 8 bytes"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8), "expected data_offsets"),
        ({"a": ENTRY}, bytes(7), "expected a file of"),
        ({"a": ENTRY}, bytes(9), "expected a file of"),
        ({"a": ENTRY, "b": ENTRY}, bytes(8), "begins at"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), "begins at"),
        ({"__metadata__": {"a": 1}}, b"", "an object of strings"),
    ],
)
def test_damaged_headers(header: Any, data: bytes, text: str, tmp_path: pathlib.Path) -> None:
    write_file(tmp_path / "a.safetensors", header, data)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path / "a.safetensors")


def test_too_many_tensors(tmp_path: pathlib.Path) -> None:
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(b'"%d":%s' % (i, entry) for i in range(1_000_000)) + b"}"
    write_file(tmp_path / "a.safetensors", text, b"")
    with pytest.raises(checkpoint.CheckpointError, match="at most 500000 tensors"):
        checkpoint.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..", "a.bin", ""])
def test_an_index_stays_in_its_folder(name: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "in", rng)
    library.save_file({"a": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(checkpoint.CheckpointError, match="expected names of safetensors files without folders"):
        checkpoint.load(tmp_path / "in")


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "b.safetensors"}}]
)
def test_damaged_indices(index: Any, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "in", rng)
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(tmp_path / "in")


def test_files_that_are_no_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "empty.safetensors", "folder", "missing"):
        with pytest.raises(checkpoint.CheckpointError, match=name):
            checkpoint.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"checkpoint\.load: format: expected"):
        checkpoint.load(tmp_path / "a.txt", format="pickle")
    with pytest.raises(TypeError, match=r"checkpoint\.load: path: expected"):
        checkpoint.load(3)  # pyright: ignore


def test_an_unknown_quantization_is_refused_unless_the_format_is_named(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    make_folder(tmp_path / "in", rng)
    (tmp_path / "in" / "config.json").write_text('{"quantization_config": {"quant_method": "mystery"}}')
    with pytest.raises(checkpoint.CheckpointError, match="got none of them for the quant_method 'mystery'"):
        checkpoint.load(tmp_path / "in")
    assert len(checkpoint.load(tmp_path / "in", format="safetensors")[0]) == 6


def test_a_folder_with_files_of_another_checkpoint_is_refused(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """`load` would read them by the index, in place of the file that was saved."""
    make_folder(tmp_path / "in", rng)
    before = read_folder(tmp_path / "in")
    with pytest.raises(checkpoint.CheckpointError, match="expected a folder without other safetensors files"):
        checkpoint.save(tmp_path / "in", {"w": jnp.ones(3)}, checkpoint.Info("safetensors"))
    assert read_folder(tmp_path / "in") == before
    checkpoint.save(tmp_path / "in", *checkpoint.load(tmp_path / "in"))
    assert read_folder(tmp_path / "in") == before


def test_what_cannot_be_saved(tmp_path: pathlib.Path) -> None:
    info = checkpoint.Info("safetensors")
    q = jq.quantize(jnp.ones((4, 4)), jq.QuantSpec("int8"))
    path = tmp_path / "a.safetensors"
    with pytest.raises(checkpoint.CheckpointError, match="tensor 'w': expected a tensor of the loaded checkpoint"):
        checkpoint.save(path, {"w": q}, info)
    with pytest.raises(checkpoint.CheckpointError, match="expected a dtype of BOOL"):
        checkpoint.save(path, {"w": jnp.ones(3, jnp.int4)}, info)
    with pytest.raises(TypeError, match=r"checkpoint.save: tensors\['w'\]: expected an array"):
        checkpoint.save(path, {"w": [1.0]}, info)  # pyright: ignore
    with pytest.raises(checkpoint.CheckpointError, match="got none for lost"):
        checkpoint.save(
            path, {}, checkpoint.Info("safetensors", tensors={"lost": checkpoint.TensorInfo("lost", "F32", ())})
        )
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tensors = {"w": jnp.ones(3)}
    for kind, name, text in (
        ("safetensors", "none/model", "expected a path in a folder, got nothing at"),
        ("gguf", "none/a.gguf", "expected a path in a folder, got nothing at"),
        ("safetensors", "file", "expected the path of a folder, got a file"),
        ("gguf", ".", "expected the path of a file, got a folder"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(tmp_path / name, tensors, checkpoint.Info(kind))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_shardings_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a.safetensors", {"w": jnp.ones(3)}, checkpoint.Info("safetensors"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec, text in ((("x", None), "at most 1 entries for 'w'"), (("x",), r"divides 'w' of shape \(3,\)")):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        with pytest.raises(ValueError, match=rf"checkpoint\.load: sharding: expected .*{text}"):
            checkpoint.load(tmp_path / "a.safetensors", sharding=sharding)


def test_patterns_that_are_no_patterns(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path / "a.safetensors", {"w": jnp.ones(3)}, checkpoint.Info("safetensors"))
    with pytest.raises(TypeError, match=r"checkpoint\.load: names: expected a pattern or several patterns, got int"):
        checkpoint.load(tmp_path / "a.safetensors", names=5)  # pyright: ignore
    with pytest.raises(TypeError, match=r"checkpoint\.quantize_to: keep: expected patterns of paths"):
        checkpoint.quantize_to({"w": jnp.ones((2, 32))}, "q4_0", keep=5)  # pyright: ignore


def test_rename_fills_a_model(rng: np.random.Generator) -> None:
    tensors = {
        f"blk.{i}.{kind}.weight": jnp.asarray(rng.normal(size=(4, 2))) for i in range(2) for kind in ("up", "down")
    }
    tensors["norm"] = jnp.ones(3)
    rules = {
        "blk.{i}.up.weight": "layers/{i}/up",
        "blk.{i}.{x}.weight": ("layers/{i}/{x}", lambda w: w.T),
        "norm": "norm",
    }
    tree = checkpoint.rename(tensors, rules)
    equality.same_bits(tree["layers"]["1"]["up"], np.asarray(tensors["blk.1.up.weight"]))
    equality.same_bits(tree["layers"]["0"]["down"], np.asarray(tensors["blk.0.down.weight"]).T)
    layer = {"up": jax.ShapeDtypeStruct((4, 2), jnp.float32), "down": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    like = {"layers": [layer, layer], "norm": jax.ShapeDtypeStruct((3,), jnp.float32)}
    filled = checkpoint.rename(tensors, rules, like=like)
    assert jax.tree.structure(filled) == jax.tree.structure(like)
    equality.same_bits(filled["layers"][1]["down"], np.asarray(tensors["blk.1.down.weight"]).T)


def test_rename_lists_what_is_left_on_both_sides() -> None:
    tensors, like = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"x": jnp.ones(2), "y": jnp.ones(2)}
    with pytest.raises(checkpoint.CheckpointError, match="no rule for the tensors b; no tensor for the leaves y"):
        checkpoint.rename(tensors, {"a": "x"}, like=like)
    with pytest.raises(checkpoint.CheckpointError, match=r"tensors z \(a path without a leaf\)"):
        checkpoint.rename(tensors, {"a": "x", "b": "z"}, like=like)
    with pytest.raises(checkpoint.CheckpointError, match="'x': expected one tensor"):
        checkpoint.rename(tensors, {"{n}": "x"})
    with pytest.raises(checkpoint.CheckpointError, match="prefix"):
        checkpoint.rename(tensors, {"a": "x", "b": "x/y"})
    with pytest.raises(checkpoint.CheckpointError, match=r"'x': expected shape \(3,\), got \(2,\)"):
        checkpoint.rename({"a": jnp.ones(2)}, {"a": "x"}, like={"x": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"rules\['a'\]: expected fields of the pattern"):
        checkpoint.rename(tensors, {"a": "x/{i}"})
    with pytest.raises(TypeError, match=r"rules\['a'\]: expected a path"):
        checkpoint.rename(tensors, {"a": 3})  # pyright: ignore
    assert checkpoint.rename(tensors, {"a": "x", "{n}": None}) == {"x": tensors["a"]}


@pytest.mark.parametrize(
    ("metadata", "tensor", "text"),
    [
        ({}, "__metadata__", "'__metadata__': expected a name that safetensors has not reserved"),
        ({"safetensors": {"a": 1}}, "a", "expected a dict of strings, got {'a': 1}"),
        ({"safetensors": ["a"]}, "a", "expected a dict of strings, got ['a']"),
        ({"config.json": {"a": np.float32(1)}}, "a", "info.metadata['config.json']: expected values that JSON has"),
    ],
)
def test_what_load_could_not_read_is_not_saved(
    tmp_path: pathlib.Path, metadata: dict[str, Any], tensor: str, text: str
) -> None:
    path = tmp_path / "model"
    checkpoint.save(path, {"a": np.ones(2, np.float32)}, checkpoint.Info("safetensors"))
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(path, {tensor: np.zeros(2, np.float32)}, checkpoint.Info("safetensors", metadata))
    assert text in str(error.value)
    # The old file is still there.
    np.testing.assert_array_equal(checkpoint.load(path)[0]["a"], np.ones(2))


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_random_keys_are_no_arrays_of_a_file(tmp_path: pathlib.Path, format: str) -> None:
    with pytest.raises(TypeError, match=r"checkpoint.save: tensors\['a'\]: expected an array"):
        checkpoint.save(tmp_path / f"model.{format}", {"a": jax.random.key(0)}, checkpoint.Info(format))
