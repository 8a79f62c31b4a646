"""Damaged checkpoints: every one is a contract error or loads what is there, and never anything else."""

from __future__ import annotations

import copy
import json
import pathlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant._arrays import parts

KEY = "quantized_array"
F32 = np.float32
X = np.arange(-12, 12, dtype=F32).reshape(3, 8)
QUANTIZED = {
    "int4": jq.quantize(X, jq.QuantSpec("int4", jq.Blocked(1, 3), scale_dtype=jnp.bfloat16)),
    "uint8": jq.quantize(X, jq.QuantSpec("uint8", jq.PerAxis(0))),
    "nf4": jq.quantize(X, jq.QuantSpec(jq.nf4, jq.Blocked(1, 4))),
}
STORED: dict[str, dict[str, np.ndarray]] = {
    name: {key: np.asarray(part) for key, part in checkpoint.to_arrays(q).items()} for name, q in QUANTIZED.items()
}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**400, 0.0, 1.0, -0.5, float("nan"), float("inf"), 1e300,
    "", "float33", "float32", "float64", "int4", "int8", "uint8", "__path__", "sum", "codebook", "\ud800", "x" * 500,
    [], [0], [1], [-1, 8], [3, 8], [3, -8], [3.0, 8.0], [True, True], [3, [8]], ["3", 8], [None], [2**40, 2**40],
    [0, 2**62], [0, 2**40, 2**40], [1] * 100, [3, 8] + [1] * 62, list(range(16)), [1e39] * 16, [0.1] * 4, [{}] * 16,
    {}, {"dtype": "int4"}, {"shape": [3, 8]}, {"dtype": "int4", "shape": [3, 8]}, {"codes": {}, "scale": {}},
    {"dtype": {}, "block_size": [], "codebook": {"name": [], "levels": {}}}, {"name": "nf4", "levels": "0123"},
]  # fmt: skip


def find_places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to every value in a description, but for all levels of a table beyond the third."""
    yield path
    pairs = node.items() if isinstance(node, dict) else list(enumerate(node))[:3] if isinstance(node, list) else ()
    for key, value in pairs:
        yield from find_places(value, (*path, key))


def change(document: Any, path: tuple[Any, ...], edit: Callable[[Any, Any], None]) -> Any:
    """Returns a description in which one value is edited, by its container and its key there."""
    box = [copy.deepcopy(document)]
    target: Any = box
    for key in (0, *path)[:-1]:
        target = target[key]
    edit(target, (0, *path)[-1])
    return box[0] if box else None


def describe_damage(document: Any) -> Iterator[Any]:
    """Yields a description with each value replaced by junk, deleted, or beside a name that does not belong there."""
    for path in find_places(document):
        for junk in JUNK:
            yield change(document, path, lambda box, key, junk=junk: box.__setitem__(key, junk))
        if path:
            yield change(document, path, lambda box, key: box.__delitem__(key))
        yield change(document, path, lambda box, key: box[key].update(more=1) if isinstance(box[key], dict) else None)


def write(document: Any) -> bytes:
    return json.dumps(document).encode()


def truncate(text: bytes) -> Iterator[bytes]:
    """Yields a text that ends early, is nested without end, names a thing twice, or is no text."""
    yield from (text[:n] for n in range(0, len(text), 7))
    for opening in (
        b"[",
        b'{"parts":',
        b'{"format": "jaxquant.QuantizedArray", "version": 1, "parts": ' + b'{"codes":',
    ):
        yield opening * 10_000
    yield b"[" * 10_000 + b"]" * 10_000
    yield text[:-1] + b", " + text[1:]
    yield text.replace(b'"dtype"', b'"shape"')
    yield from (b"", b"\xff\xfe\x00", b"\x80" * 9, b"NaN", b"1" * 5000, text + text, text.decode().encode("utf-16"))


def load(function: str, call: Callable[[], Any]) -> Any:
    """Returns what loads, or None where a contract error names the function. Anything else is a failure."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        failure = error
    assert str(failure).startswith(f"jaxquant.{function}: "), repr(failure)[:500]
    assert isinstance(failure, AssertionError), repr(failure)[:500]
    return None


def check(loaded: Any, name: str) -> None:
    """What a damaged description loads is whole, and has the codes that are stored."""
    if isinstance(loaded, jq.QuantizedArray):
        assert loaded.shape == X.shape
        assert loaded.codes.dtype.itemsize == 1
        assert repr(loaded).startswith("QuantizedArray(")
        jax.eval_shape(lambda q: q.dequantize(), loaded)
        np.testing.assert_array_equal(
            checkpoint.pack(loaded.codes) if name != "uint8" else loaded.codes, STORED[name]["codes"]
        )


@pytest.mark.parametrize("name", STORED)
def test_descriptions(name: str) -> None:
    text = STORED[name][KEY].tobytes()
    document = json.loads(text)
    loaded = 0
    for damaged in (*map(write, describe_damage(document)), *truncate(text)):
        tree = {"w": {**STORED[name], KEY: np.frombuffer(damaged, np.uint8)}}
        result = load("checkpoint.from_arrays", lambda tree=tree: checkpoint.from_arrays(tree)["w"])
        check(result, name)
        loaded += result is not None
    assert loaded, "some changes are none"


def test_descriptions_in_saved_programs() -> None:
    static = {"dtype": "float32", "block_size": 4, "codebook": {"name": "nf4", "levels": list(jq.nf4.levels)}}
    text = write(static)
    assert parts.decode_saved_program(text) == parts.ArrayStatic(np.dtype(F32), 4, jq.nf4)
    for damaged in (*map(write, describe_damage(static)), *truncate(text)):
        load("QuantizedArray", lambda damaged=damaged: parts.decode_saved_program(damaged))
    q = QUANTIZED["uint8"]
    saved = bytes(export.export(jax.jit(lambda q: q))(q).serialize())
    assert saved.count(b'"dtype": "float32"')
    with pytest.raises(ValueError, match=r"jaxquant\.QuantizedArray: the description.*\['dtype'\]: expected .*float33"):
        export.deserialize(bytearray(saved.replace(b'"float32"', b'"float33"')))


ARRAYS: list[Any] = [
    None, "int4", 3, 1.5, b"", [1, 2], (), {}, {"a": np.ones(3)}, np.float32(1), np.ones(12), np.ones((3, 9), np.uint8),
    np.ones(11, np.uint8), np.ones(0, np.uint8), np.ones((3, 1), F32), np.zeros((3, 1), F32), np.full((3, 1), -1, F32),
    np.ones((3, 3), np.uint16), np.array(["a"]), np.array([None]), np.array(1), np.ones((3, 8), ">u2"),
    np.array([1 + 2j]), np.ones((3, 8, 1), np.uint8), np.ones((3, 1), np.float64),
]  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_arrays(name: str) -> None:
    """Arrays that are missing, are others, or are none."""
    for key in STORED[name]:
        remaining = {k: v for k, v in STORED[name].items() if k != key}
        for replacement in (*ARRAYS, *(a[..., :-1] for a in [STORED[name][key]]), STORED[name][key].tobytes()):
            for tree in ({**remaining, key: replacement}, {**remaining, key: replacement, "more": 1}):
                check(load("checkpoint.from_arrays", lambda tree=tree: checkpoint.from_arrays([tree])[0]), name)
        check(load("checkpoint.from_arrays", lambda tree=remaining: checkpoint.from_arrays(tree)), name)
    for key in (1, None, ("a", 1)):
        load("checkpoint.from_arrays", lambda key=key: checkpoint.from_arrays([{**STORED[name], key: 1}]))


def test_errors_name_the_place() -> None:
    document = json.loads(STORED["int4"][KEY].tobytes())
    document["parts"]["scale"]["dtype"] = "float33"
    tree = {"layers": [{"w": {**STORED["int4"], KEY: np.frombuffer(write(document), np.uint8)}}]}
    place = r"tree\['layers'\]\[0\]\['w'\]"
    text = rf"checkpoint\.from_arrays: {place}\['{KEY}'\]\['parts'\]\['scale'\]\['dtype'\]: expected the name of a dtype.*33"
    with pytest.raises(ValueError, match=text):
        checkpoint.from_arrays(tree)
    tree = {"layers": [{"w": {**STORED["int4"], "codes": STORED["int4"]["codes"][:-1]}}]}
    with pytest.raises(ValueError, match=rf"{place}\['codes'\]: expected uint8\[12\], as described.*, got uint8\[11\]"):
        checkpoint.from_arrays(tree)
    tree = {"layers": [{"w": {**STORED["uint8"], "scale": np.zeros((3, 1), F32)}}]}
    with pytest.raises(ValueError, match=rf"{place}\.scale: expected positive numbers, got 0\.0"):
        checkpoint.from_arrays(tree)


def write_safetensors(path: pathlib.Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_safetensors(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    """The header, its metadata, the descriptions and the data, each damaged."""
    path = tmp_path / "x.safetensors"
    checkpoint.save_safetensors(path, {"a": {"w": QUANTIZED["int4"], "b": np.ones(3, jnp.int4)}})
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header, data = whole[8 : 8 + size], whole[8 + size :]

    def load_file() -> Any:
        return load("checkpoint.load_safetensors", lambda: checkpoint.load_safetensors(path))

    assert isinstance(load_file()["a"]["w"], jq.QuantizedArray)
    for n in (0, 3, 8, 20, size, size + 8, size + 9, len(whole) - 1):
        path.write_bytes(whole[:n])
        assert load_file() is None
    fields = json.loads(header)
    for damaged in (*list(map(write, describe_damage(fields)))[::11], *list(truncate(header))[::5]):
        write_safetensors(path, damaged, data)
        load_file()
    bits = json.loads(fields["__metadata__"]["jaxquant.QuantizedArray"])
    assert bits
    for damaged in (*map(write, describe_damage(bits)), *truncate(write(bits))):
        fields["__metadata__"]["jaxquant.QuantizedArray"] = damaged.decode(errors="replace")
        write_safetensors(path, write(fields), data)
        load_file()
    for place in rng.integers(8, len(whole), 200):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        load_file()
    with pytest.raises(FileNotFoundError):
        checkpoint.load_safetensors(tmp_path / "none")


def test_safetensors_names(tmp_path: pathlib.Path) -> None:
    from safetensors import numpy as library

    path = tmp_path / "x.safetensors"
    for names in (("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")):
        library.save_file({name: np.ones(n + 1, F32) for n, name in enumerate(names)}, path)
        with pytest.raises(
            ValueError, match="load_safetensors: path: expected no tensor name to be a prefix of another"
        ):
            checkpoint.load_safetensors(path)
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_safetensors(path, b'{"a":' + entry + b',"a":' + entry + b"}", b"x")
    load("checkpoint.load_safetensors", lambda: checkpoint.load_safetensors(path))


def test_orbax(tmp_path: pathlib.Path) -> None:
    import orbax.checkpoint as ocp

    document = json.loads(STORED["int4"][KEY].tobytes())
    document["static"]["dtype"] = "float33"
    damage: dict[str, dict[str, Any]] = {
        "description": {**STORED["int4"], KEY: np.frombuffer(write(document), np.uint8)},
        "bytes": {**STORED["int4"], "codes": STORED["int4"]["codes"][:-1]},
        "part": {k: v for k, v in STORED["int4"].items() if k != "scale"},
    }
    for name, tree in damage.items():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"w": tree})
            checkpointer.wait_until_finished()
        assert load("checkpoint.load_orbax", lambda name=name: checkpoint.load_orbax(tmp_path / name)) is None


def test_damaged_texts() -> None:
    """What converted layers say of their specs, as another program might have written it."""
    junk = ("text", 3, None, np.zeros(3, np.float32), np.array([0xFF, 0xFE], np.uint8), [np.zeros(2, np.uint8)])
    for value in junk:
        with pytest.raises((TypeError, ValueError), match=r"^jaxquant\.checkpoint\.from_arrays: tree\['a'\]\['static_"):
            checkpoint.from_arrays({"a": {"static_text": value}})
    tree = {"a": {"static_text": np.zeros(2, np.uint8), "b": np.ones(1)}}  # a tree that only has such a name
    assert checkpoint.from_arrays(tree)["a"]["b"] is tree["a"]["b"]
