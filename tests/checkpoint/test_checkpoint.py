"""Checkpoints: ONNX's packing, true sizes on disk, and every bit back, by whatever library."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pathlib
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import serialization
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from onnx import numpy_helper

import jaxquant as jq
from jaxquant import checkpoint

from ..oracles import onnx_text

F32 = np.float32
P: Any = functools.partial
NAMES = [n for n in (*onnx_text.BOUNDS, *onnx_text.FLOAT8, "float4_e2m1fn", "float8_e8m0fnu") if "16" not in n]


def codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Every bit pattern of a dtype, NaN of both signs too."""
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    if name in onnx_text.BOUNDS and not name.endswith("8"):
        low, high = onnx_text.BOUNDS[name]
        return rng.integers(low, high + 1, shape).astype(onnx_text.dtype(name))
    if name.startswith("float4"):
        return (bits & 15).view(onnx_text.dtype(name))
    return bits.view(onnx_text.dtype(name))


def same_bits(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


def same_trees(actual: Any, expected: Any) -> None:
    """Bit for bit, with what is static."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, w in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        same_bits(leaf, w)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 3, 4)], ids=str)
def test_the_bytes_are_onnx_s(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> None:
    values = codes(rng, name, shape)
    packed = checkpoint.pack(values)
    assert packed.dtype == jnp.uint8
    assert packed.ndim == 1
    assert np.asarray(packed).tobytes() == numpy_helper.from_array(values).raw_data
    same_bits(checkpoint.unpack(packed, values.dtype, shape), values)
    same_bits(jax.jit(lambda p: checkpoint.unpack(p, values.dtype, shape))(jax.jit(checkpoint.pack)(values)), values)
    tensor = onnx.TensorProto(data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype), dims=shape)
    tensor.raw_data = np.asarray(packed).tobytes()
    same_bits(numpy_helper.to_array(tensor), values)


def test_the_first_code_is_in_the_low_bits() -> None:
    np.testing.assert_array_equal(checkpoint.pack(jnp.array([1, -1, -8], jnp.int4)), [0xF1, 0x08])
    np.testing.assert_array_equal(checkpoint.pack(jnp.array([1, 2, 3, 0, 2], jnp.uint2)), [0b00111001, 0b10])
    np.testing.assert_array_equal(checkpoint.pack(jnp.array([-1, 0, -2, 1], jnp.int2)), [0b01100011])
    np.testing.assert_array_equal(checkpoint.pack(jnp.array([[-1], [127]], jnp.int8)), [255, 127])


@dataclasses.dataclass(frozen=True)
class Layer:
    """A module, as frameworks have them."""

    weight: Any
    bias: Any
    name: str = "dense"


jax.tree_util.register_dataclass(Layer, ["weight", "bias"], ["name"])

TERNARY = jq.Codebook("ternary and a tenth", (-1.0, 0.0, 0.1, 1.0))
SPECS: dict[str, jq.QuantSpec] = {
    "int8": jq.QuantSpec("int8", jq.PerAxis(0)),
    "uint4": jq.QuantSpec(jnp.uint4, jq.Blocked(1, 4), scale_dtype=jnp.bfloat16),
    "int2": jq.QuantSpec(jnp.int2, jq.Blocked(1, 4), scale_dtype=jnp.float8_e8m0fnu),
    "uint2": jq.QuantSpec(jnp.uint2, jq.PerAxis(0), zero_point_granularity=jq.PerTensor()),
    "int16": jq.QuantSpec("int16", scale_dtype=jnp.float16),
    "uint16": jq.QuantSpec("uint16"),
    "float8": jq.QuantSpec(jnp.float8_e4m3fnuz, jq.PerAxis(1)),
    "float4": jq.QuantSpec(jnp.float4_e2m1fn, jq.Blocked(1, 4), scale_dtype=jnp.float8_e8m0fnu),
    "nf4": jq.QuantSpec(jq.nf4, jq.Blocked(1, 4)),
    "table": jq.QuantSpec(TERNARY),
}


def arrays(rng: np.random.Generator) -> dict[str, jq.QuantizedArray]:
    x = rng.normal(size=(5, 7)).astype(F32)
    cases = {name: jq.quantize(x, spec) for name, spec in SPECS.items()}
    cases["bfloat16 back"] = cases["int8"].astype(jnp.bfloat16)
    cases["a scale that is NaN"] = cases["int8"].replace(scale=cases["int8"].scale.at[1, 0].set(jnp.nan))
    cases["stacked"] = jax.vmap(lambda x: jq.quantize(x, SPECS["uint4"]))(np.stack([x, -x]))
    cases["a single code"] = jq.quantize(F32(3), SPECS["table"])
    return cases


def tree_of(rng: np.random.Generator) -> Any:
    quantized = arrays(rng)
    plain = {"b": np.arange(3, dtype=F32), "h": jnp.ones((2, 2), jnp.bfloat16), "n": jnp.int32(7)}
    return {"made": quantized, "layers": [Layer(quantized["nf4"], plain["b"]), (quantized["int2"], plain)]}


def is_plain(leaf: Any) -> bool:
    return np.asarray(leaf).dtype.isbuiltin == 1


@pytest.mark.slow
def test_arrays_that_every_library_knows(rng: np.random.Generator) -> None:
    quantized = arrays(rng)
    for name, q in quantized.items():
        stored = checkpoint.to_arrays(q)
        assert all(map(is_plain, jax.tree.leaves(stored))), name
        byte_count = sum(np.asarray(a).nbytes for key, a in stored.items() if key != "quantized_array")
        assert byte_count == q.nbytes
        same_trees(checkpoint.from_arrays(stored), q)
        same_bits(checkpoint.from_arrays(jax.tree.map(np.asarray, stored)).dequantize(), q.dequantize())
        text = json.loads(np.asarray(stored["quantized_array"]).tobytes())
        assert text["format"] == "jaxquant.QuantizedArray"
        assert text["version"] == 1
        assert text["parts"]["codes"] == {"dtype": str(q.codes.dtype), "shape": list(q.shape)}
    tree = tree_of(rng)
    stored = checkpoint.to_arrays(tree)
    assert isinstance(stored["layers"][0], Layer)
    assert stored["layers"][1][1] is not None
    same_trees(checkpoint.from_arrays(stored), tree)
    assert checkpoint.to_arrays({"x": 3, "y": None}) == {"x": 3, "y": None}


@pytest.mark.slow
def test_packing_under_jit(rng: np.random.Generator) -> None:
    q = arrays(rng)["uint4"]
    stored = jax.jit(checkpoint.to_arrays)(q)
    same_trees(checkpoint.from_arrays(stored), q)
    text = np.asarray(stored["quantized_array"])
    restored = jax.jit(lambda parts: checkpoint.from_arrays({**parts, "quantized_array": text}))(
        {k: v for k, v in stored.items() if k != "quantized_array"}
    )
    same_trees(restored, q)


def test_flax_s_bytes(rng: np.random.Generator) -> None:
    """Lists and tuples come back as they were through a target, and as dicts without one."""
    tree = {"made": arrays(rng), "list": [arrays(rng)["nf4"], jnp.ones(2)]}
    stored = checkpoint.to_arrays(tree)
    data = serialization.to_bytes(stored)
    same_trees(checkpoint.from_arrays(serialization.from_bytes(stored, data)), tree)
    restored = checkpoint.from_arrays(serialization.msgpack_restore(data))
    same_trees(restored["made"], tree["made"])
    same_trees(restored["list"]["0"], tree["list"][0])


def test_numpy_s_files(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    q = arrays(rng)["uint4"]
    stored: dict[str, Any] = jax.tree.map(np.asarray, checkpoint.to_arrays(q))
    np.savez(tmp_path / "one.npz", **stored)
    with np.load(tmp_path / "one.npz") as file:
        same_trees(checkpoint.from_arrays(dict(file)), q)


@pytest.mark.slow
def test_safetensors(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "all.safetensors"
    plain = {name: codes(rng, name, (3, 5)) for name in NAMES}
    plain |= {n: rng.normal(size=(2, 3)).astype(onnx_text.dtype(n)) for n in ("float32", "float16", "bfloat16")}
    plain |= {"int32": np.array(-7, np.int32), "bool": np.array([True, False]), "empty": np.zeros((0, 3), F32)}
    plain["turned"] = np.asarray(rng.normal(size=(3, 4)), F32).T
    tree = {"made": arrays(rng), "plain": plain, "deep": {"er": {"x": jnp.arange(3)}}, "top": jnp.ones(())}
    checkpoint.save_safetensors(path, tree)
    same_trees(checkpoint.load_safetensors(path), tree)
    checkpoint.save_safetensors(str(path), {})
    assert checkpoint.load_safetensors(str(path)) == {}


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "bias"), meta_fields=("name",))
@dataclasses.dataclass
class Dense:
    weight: Any
    bias: Any
    name: str = "layer"


def make_trees(rng: np.random.Generator) -> dict[str, Any]:
    q, x = arrays(rng)["uint4"], rng.normal(size=(2, 3)).astype(F32)
    return {
        "list": [q, x, [x]],
        "tuple": (q, (x, ()), [()]),
        "lists in dicts": {"layers": [{"w": q, "b": x}, {"w": x, "b": None}], "head": (x,)},
        # The names of the tensors are the same: the structure tells them apart.
        "digits": {"0": [x, q], "1": {"0": x, "1": q}, "10": {"2": x}, "2": [x] * 11},
        "None and numbers": {"a": None, "b": [1, -2.5, True, 2**40, float("inf")], "c": (None, None), "d": 1e-323},
        "no arrays": {"a": {}, "b": [], "c": (), "d": {"e": {}}},
        "an empty list": [],
        "an empty key": {"": {"": x}, "a": [{"": q}]},
        "numpy's scalars": {"a": [np.float32(1.5), np.int8(-3)]},
    }


@pytest.mark.parametrize("name", list(make_trees(np.random.default_rng(0))))
def test_safetensors_of_all_containers(name: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    path, tree = tmp_path / "tree", make_trees(rng)[name]
    checkpoint.save_safetensors(path, tree)
    for loaded in (checkpoint.load_safetensors(path), checkpoint.load_safetensors(path, tree)):
        same_trees(loaded, tree)
        # Python numbers are still of their type, which `same_trees` does not see.
        numbers = [
            [type(leaf) for leaf in jax.tree.leaves(t) if isinstance(leaf, bool | int | float)] for t in (loaded, tree)
        ]
        assert name == "numpy's scalars" or numbers[0] == numbers[1]


def test_safetensors_of_other_nodes(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """A file does not name classes, so their fields come back as dicts unless a tree with these classes is given."""
    path, x, q = tmp_path / "tree", rng.normal(size=(2, 3)).astype(F32), arrays(rng)["nf4"]
    pair = Pair(q, [Pair(x, None), collections.OrderedDict(b=x, a=q)])
    tree = {"pair": pair, "layer": Dense(q, collections.defaultdict(list, b=x)), "frozen": FrozenDict({"z": x, "y": q})}
    checkpoint.save_safetensors(path, tree)
    plain = {
        "pair": {"first": q, "second": [{"first": x, "second": None}, {"a": q, "b": x}]},
        "layer": {"weight": q, "bias": {"b": x}},
        "frozen": {"y": q, "z": x},
    }
    same_trees(checkpoint.load_safetensors(path), plain)
    for like in (tree, jax.eval_shape(lambda: tree)):
        same_trees(checkpoint.load_safetensors(path, like), tree)
    for other, text in (
        ({**tree, "pair": pair.second}, r"like\['pair'\]: expected .*, with '0', '1' here, got 'first', 'second'"),
        ({**tree, "pair": Pair(x, pair.second)}, r"like\['pair'\]\['first'\]: expected a tree like the one"),
        ({**tree, "pair": Pair(None, pair.second)}, r"like\['pair'\]\['first'\]: expected a tree like the one"),
        ({**tree, "frozen": {"z": x[:1], "y": q}}, r"like\['frozen'\]\['z'\]: expected a tree like the one"),
        ({**tree, "frozen": {"z": [x], "y": q}}, r"like\['frozen'\]\['z'\]: expected .*, with '0' here, got ndarray"),
        ({"pair": pair}, r"like: expected .*, with 'pair' here, got "),
    ):
        with pytest.raises(ValueError, match=f"load_safetensors: {text}"):
            checkpoint.load_safetensors(path, other)


def test_nested_dicts_are_named_as_before(tmp_path: pathlib.Path) -> None:
    """Their files have no structure in the metadata, as those of earlier versions; lists add only that."""
    import safetensors

    for tree, names in (
        ({"a": {"b": B}, "q": Q}, None),
        ({"a": [B, (B, {"b": B})]}, ["a/0", "a/1/0", "a/1/1/b"]),
        ({"a": {"b/c": B}, "a/b": {"d": B}}, ["a/b/c", "a/b/d"]),  # the structure says which slash is part of a key
    ):
        checkpoint.save_safetensors(tmp_path / "file", tree)
        with safetensors.safe_open(tmp_path / "file", "np") as file:
            assert ("jaxquant.structure" in file.metadata()) == (names is not None)
            assert names is None or sorted(file.keys()) == names
        loaded = checkpoint.load_safetensors(tmp_path / "file")
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)


STRUCTURES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "expected JSON"),
    "an unknown kind": ('{"set": [null]}', "expected null, or an object with a kind of node"),
    "two kinds": ('{"list": [null], "tuple": []}', "expected null, or an object with a kind of node"),
    "a dict as a list": ('{"list": {"a": null}}', "expected null, or an object with a kind of node"),
    "a text as a number": ('{"list": [{"number": "1"}]}', "expected null, or an object with a kind of node"),
    "another name": ('{"dict": {"c": null}}', "expected names of tensors, each once, got 'c'"),
    "no name": ("null", "expected names of tensors, each once, got ''"),
    "twice": ('{"dict": {"a": null, "a": null}}', "expected JSON"),
    "a tensor left": ('{"dict": {"a": null}}', "expected a place for each tensor, got none for 'b'"),
    "too deep": ('{"list": [' * 5000 + "]}" * 5000, "expected (JSON|a structure of bounded depth)"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_damaged_structures(name: str, tmp_path: pathlib.Path) -> None:
    from safetensors import numpy as library

    text, expected = STRUCTURES[name]
    library.save_file({"a": B, "b": B}, tmp_path / "file", metadata={"jaxquant.structure": text})
    with pytest.raises(ValueError, match=rf"load_safetensors: path, the metadata 'jaxquant.structure': {expected}"):
        checkpoint.load_safetensors(tmp_path / "file")


@pytest.mark.parametrize(("name", "size"), [("int4", 1 / 2), ("nf4", 1 / 2), ("float4_e2m1fn", 1 / 2), ("int2", 1 / 4)])
def test_the_file_has_its_true_size(tmp_path: pathlib.Path, name: str, size: float) -> None:
    """Half and a quarter of a byte per code, the scale, and a header of a kilobyte."""
    spec = jq.QuantSpec(jq.nf4 if name == "nf4" else onnx_text.dtype(name), jq.PerAxis(0))
    q = jq.quantize(np.ones((512, 1024), F32), spec)
    path = tmp_path / "w.safetensors"
    checkpoint.save_safetensors(path, {"w": q})
    assert 512 * 1024 * size <= path.stat().st_size <= 512 * 1024 * size + 512 * 4 + 1500
    assert q.nbytes <= path.stat().st_size <= q.nbytes + 1500
    same_trees(checkpoint.load_safetensors(path), {"w": q})


def test_safetensors_of_others(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    from safetensors import numpy as library

    path = tmp_path / "other.safetensors"
    library.save_file({"a/b": np.ones(3, F32), "c.d": np.zeros(2, np.int64)}, path)
    same_trees(checkpoint.load_safetensors(path), {"a": {"b": np.ones(3, F32)}, "c.d": np.zeros(2, np.int64)})
    library.save_file({"a": np.ones(3, F32), "a/b": np.ones(3, F32)}, path)
    with pytest.raises(
        ValueError, match=r"load_safetensors: path: expected no tensor name to be a prefix of another.*, got 'a"
    ):
        checkpoint.load_safetensors(path)
    # What is written here is read by others: names, and bfloat16 as such.
    checkpoint.save_safetensors(path, {"x": {"y": jnp.ones(3, jnp.bfloat16), "q": arrays(rng)["int8"]}})
    tensors = library.load_file(path)
    assert sorted(tensors) == ["x/q/codes", "x/q/quantized_array", "x/q/scale", "x/y"]
    assert tensors["x/y"].dtype == jnp.bfloat16
    assert tensors["x/q/codes"].dtype == np.int8


@pytest.mark.slow
def test_orbax(rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(rng)
    path = tmp_path / "step"
    checkpoint.save_orbax(path, tree)
    restored = checkpoint.load_orbax(path)  # dicts and lists, for Orbax was told of no others
    same_trees(restored["made"], tree["made"])
    same_trees(restored["layers"][0]["weight"], tree["layers"][0].weight)
    same_trees(restored["layers"][1][0], tree["layers"][1][0])
    same_trees(checkpoint.load_orbax(path, tree), tree)
    same_trees(checkpoint.load_orbax(path, jax.eval_shape(lambda: tree)), tree)
    monkeypatch.chdir(tmp_path)
    same_trees(checkpoint.load_orbax("step", tree), tree)
    target = {**tree["made"], "uint4": tree["made"]["uint4"].replace(block_size=5)}
    with pytest.raises(ValueError, match=r"load_orbax: like: expected .*the structure that was saved"):
        checkpoint.load_orbax(path, {**tree, "made": target})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_orbax_over_eight_devices(rng: np.random.Generator, tmp_path: pathlib.Path, kind: AxisType) -> None:
    """Saved over eight devices; restored over eight, along another axis, and on one."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = rng.normal(size=(16, 24)).astype(F32)
    plain = {
        n: jq.quantize(x, jq.QuantSpec(onnx_text.dtype(n), jq.PerAxis((0, 1))))
        for n in ("int8", "uint4", "float8_e5m2")
    }

    def placed(axis: int) -> Any:
        return NamedSharding(mesh, PartitionSpec(*("d" if a == axis else None for a in range(2))))

    spread = jax.device_put(plain, placed(0))
    path = tmp_path / "step"
    checkpoint.save_orbax(path, spread)
    same_trees(checkpoint.load_orbax(path), plain)
    for axis in (0, 1):
        like = jax.tree.map(lambda v, axis=axis: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placed(axis)), plain)
        restored = checkpoint.load_orbax(path, like)
        same_trees(restored, plain)
        for leaf in jax.tree.leaves(restored):
            assert leaf.sharding == placed(axis)
    same_trees(checkpoint.load_orbax(path, plain), plain)
    same_trees(checkpoint.from_arrays(checkpoint.to_arrays(spread)), plain)


@pytest.mark.slow
def test_orbax_itself_saves_the_arrays(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    tree = {"made": arrays(rng)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", checkpoint.to_arrays(tree))
        checkpointer.wait_until_finished()
        same_trees(checkpoint.from_arrays(checkpointer.restore(tmp_path / "step")), tree)


@pytest.mark.parametrize("name", ["safetensors", "orbax"])
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    module = "orbax.checkpoint" if name == "orbax" else "safetensors"
    for verb, call in (
        ("save", lambda: getattr(checkpoint, f"save_{name}")(tmp_path / "x", {})),
        ("load", lambda: getattr(checkpoint, f"load_{name}")(tmp_path / "x")),
    ):
        text = rf"jaxquant\.checkpoint\.{verb}_{name}: .*{module}.*pip install 'jaxquant\[checkpoint\]'"
        with pytest.raises(ModuleNotFoundError, match=text):
            call()
    assert not os.listdir(tmp_path)


def drop_key(key: str) -> dict[str, Any]:
    return {k: v for k, v in STORED.items() if k != key}


def described(**changes: Any) -> np.ndarray:
    text = json.loads(np.asarray(STORED["quantized_array"]).tobytes())
    return np.frombuffer(json.dumps({**text, **changes}).encode(), np.uint8)


Q: Any = jq.QuantizedArray(jnp.ones((3, 5), jnp.int4), jnp.ones((3, 1)))
STORED = checkpoint.to_arrays(Q)
FROM, SAVE = checkpoint.from_arrays, P(checkpoint.save_safetensors, "nowhere")
B = np.ones(8, np.uint8)
ROWS: list[tuple[str, Any, type[Exception], str]] = [
    ("float32", P(checkpoint.pack, np.ones(3, F32)), TypeError, r"pack: values: expected dtype int2.*, got float32"),
    ("int16", P(checkpoint.pack, np.ones(3, np.int16)), TypeError, r"pack: values: expected dtype int2.*, got int16"),
    ("list", P(checkpoint.pack, [1, 2]), TypeError, r"pack: values: expected an array, got list"),
    ("bytes", P(checkpoint.unpack, B.view(np.int8),
     "int4", (16,)), TypeError, r"unpack: packed: expected dtype uint8, got int8"),
    ("too few", P(checkpoint.unpack, B, jnp.int4, (17,)), ValueError,
     r"unpack: packed: expected 9 bytes for int4\[17\], got 8"),
    ("too many", P(checkpoint.unpack, B, jnp.int2, (28,)), ValueError,
     r"unpack: packed: expected 7 bytes for int2\[28\], got 8"),
    ("dtype", P(checkpoint.unpack, B, "int16", (4,)), TypeError, r"unpack: dtype: expected dtype int2.*, got int16"),
    ("shape int", P(checkpoint.unpack, B, "int8", 8), TypeError, r"unpack: shape: expected a tuple of ints, got 8"),
    ("shape float", P(checkpoint.unpack, B, "int8", (8.0,)), TypeError, r"unpack: shape: expected an int, got 8.0"),
    ("shape negative", P(checkpoint.unpack, B,
     "int8", (-8,)), ValueError, r"unpack: shape: expected non-negative ints"),
    ("bad parts", P(checkpoint.to_arrays, {"w": Q.replace(scale=Q.scale * 0)}), ValueError,
     r"to_arrays: tree.scale: expected positive numbers"),
    ("no text", P(FROM, {**STORED,
     "quantized_array": B}), ValueError, r"from_arrays: tree\['quantized_array'\]: expected JSON, got Expecting"),
    ("another text", P(FROM, {**STORED,
     "quantized_array": described(format="x")}), ValueError, r"expected a description of a"),
    ("a later format", P(FROM, {**STORED,
     "quantized_array": described(version=4)}), ValueError, r"expected version 1.*, got ver"),
    ("floats for text", P(FROM, {**STORED,
     "quantized_array": np.ones(3)}), TypeError, r"expected an array of uint8.*, got an arr"),
    ("a traced text", P(jax.jit(FROM), STORED), TypeError,
     r"expected an array of uint8 that is not traced, got a traced"),
    ("a part missing", lambda: FROM(drop_key("scale")), ValueError,
     r"from_arrays: tree: expected the arrays codes, scale, quan"),
    ("a part more", P(FROM, {**STORED,
     "more": B}), ValueError, r"from_arrays: tree: expected the arrays codes.*, got .*more"),
    ("too few codes", P(FROM, {**STORED, "codes": B[:7]}), ValueError,
     r"from_arrays: tree\['codes'\]: expected uint8\[8\], as described for int4\[3, 5\], got uint8\[7\]"),
    ("a scale of 64 bits", P(FROM, {**STORED,
     "scale": np.ones((4, 1), F32)}), ValueError,
     r"from_arrays: tree\['scale'\]: expected float32\[3, 1\], as described, got float32\[4, 1\]"),
    ("a string", P(SAVE, {"a": [B, {"b": "x"}]}), TypeError,
     r"save_safetensors: tree\['a'\]\[1\]\['b'\]: expected dicts, lists, .* of arrays, numbers and None, got str"),
    ("an array alone", P(SAVE, B), TypeError, r"save_safetensors: tree: expected dicts, lists, .*, got ndarray"),
    ("a number alone", P(SAVE, 1.0), TypeError, r"save_safetensors: tree: expected dicts, lists, .*, got float"),
    ("a mapping that is not a pytree", P(SAVE, types.MappingProxyType({"a": B})), TypeError,
     r"save_safetensors: tree: expected dicts, lists, .*, got mappingproxy"),
    ("two arrays with one name", P(SAVE, {"a": {"b": B}, "a/b": B}), ValueError,
     r"save_safetensors: tree\['a/b'\]: expected a name of its own, with the keys joined by \"/\", got 'a/b'"),
    ("a number for a key", P(SAVE, {"a": {3: B}}), TypeError,
     r"save_safetensors: tree\['a'\]: expected keys that are strings"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace(" ", "_") for row in ROWS])
def test_refusals(row: tuple[str, Any, type[Exception], str]) -> None:
    _, call, error, text = row
    with pytest.raises(error, match=rf"jaxquant\.checkpoint\..*{text}"):
        call()
    assert not os.path.exists("nowhere")


def test_a_name_that_safetensors_reserves_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tree.safetensors"
    with pytest.raises(ValueError, match=r"save_safetensors: tree: expected names that safetensors has not reserved"):
        checkpoint.save_safetensors(path, {"__metadata__": np.ones(2)})
    assert not path.exists()


def test_a_large_checkpoint_prints_few_lines():
    info = checkpoint.Info("gguf", {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 10_000})
    for layer in range(120):
        info.tensors[f"blk.{layer}.w"] = checkpoint.TensorInfo(f"blk.{layer}.w", "Q4_0", (32, 32), 576)
        note = "" if layer else "kept"
        info.tensors[f"blk.{layer}.n"] = checkpoint.TensorInfo(f"blk.{layer}.n", "F32", (32,), 128, note)
    assert repr(info) == "Info('gguf', 'llama', 240 tensors, 84,480 bytes: 120 Q4_0, 120 F32)"
    assert str(info).splitlines() == [
        "gguf, llama: 240 tensors, 84,480 bytes, 5.333 bits per weight",
        "stored as  tensors  bits per weight  bytes",
        "Q4_0       120      4.5              69,120",
        "F32        120      32               15,360",
        "kept: blk.0.n",
    ]
    assert len(info.format_table().splitlines()) == 243
    assert repr(checkpoint.Info("mlx")) == "Info('mlx', 0 tensors, 0 bytes)"
    assert str(checkpoint.Info("mlx", {"config.json": {"model_type": "a\nb"}})) == "mlx, a\ufffdb: 0 tensors, 0 bytes"
    assert repr(checkpoint.Info("gguf", {"general.architecture": 3})) == "Info('gguf', 0 tensors, 0 bytes)"
