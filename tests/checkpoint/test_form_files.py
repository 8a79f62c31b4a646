"""Arrays with offsets, nested scales, signed scales, permutations, block sizes and packed codes in files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import checkpoint

from ..cases.array_forms import NAMES, check_values, make_array
from ..support import equality

KEY = "quantized_array"
F32 = np.float32


def make_tree(rng: np.random.Generator) -> dict[str, Any]:
    """Return an array of each form, and two with packed codes."""
    tree = {name: jax.tree.map(jnp.asarray, make_array(name, rng)[0]) for name in NAMES}
    x = rng.normal(size=(6, 22)).astype(F32)
    offset = jq.QuantSpec("uint5", jq.Blocked(1, 8), offset=True, scale_dtype="float16")
    return tree | {
        "packed": jq.quantize(x, offset),
        "boxes": jq.quantize(x, jq.QuantSpec("int6", jq.Blocked((0, 1), (4, 5)))),
    }


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: equality.same_bits(a, np.asarray(b)), actual, expected)


def test_files(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """The arrays of a file equal the saved ones, bit for bit, and have the same values."""
    tree = make_tree(rng)
    values = jax.tree.map(lambda q: q.dequantize(), tree, is_leaf=lambda q: isinstance(q, jq.QuantizedArray))
    checkpoint.save_safetensors(tmp_path / "file", tree)
    checkpoint.save_orbax(tmp_path / "folder", tree)
    like = jax.eval_shape(lambda: tree)
    for loaded in (
        checkpoint.load_safetensors(tmp_path / "file"),
        checkpoint.load_orbax(tmp_path / "folder"),
        checkpoint.load_orbax(tmp_path / "folder", like),
    ):
        assert_same(loaded, tree)
        for name, q in loaded.items():
            check_values(q.dequantize(), np.asarray(values[name]))
            assert q.nbytes == tree[name].nbytes


# Damage. A case changes the arrays and the description, and has what the error says.

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def drop(name: str, *, described: bool) -> Change:
    def change(arrays: dict[str, Any], description: dict[str, Any]) -> None:
        del arrays[name]
        if described:
            del description["parts"][name]

    return change


def cut(name: str) -> Change:
    """Take the last index of the last dimension from an array and from its description."""

    def change(arrays: dict[str, Any], description: dict[str, Any]) -> None:
        arrays[name] = arrays[name][..., :-1]
        description["parts"][name]["shape"][-1] -= 1

    return change


def put(name: str, array: Any, dtype: str | None = None) -> Change:
    def change(arrays: dict[str, Any], description: dict[str, Any]) -> None:
        arrays[name] = np.asarray(array)
        description["parts"][name] = {"dtype": dtype or arrays[name].dtype.name, "shape": list(arrays[name].shape)}

    return change


def set_static(name: str, value: Any, part: str | None = None) -> Change:
    def change(_: dict[str, Any], description: dict[str, Any]) -> None:
        (description["nested"][part] if part else description["static"])[name] = value

    return change


def move(old: str, new: str) -> Change:
    """Rename an array, in the file and in the description."""

    def change(arrays: dict[str, Any], description: dict[str, Any]) -> None:
        arrays[new], description["parts"][new] = arrays.pop(old), description["parts"].pop(old)

    return change


def nest(value: Any) -> Change:
    def change(_: dict[str, Any], description: dict[str, Any]) -> None:
        description["nested"] = value

    return change


ONES = np.ones((6, 1), F32)
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "no offset": ("offset", drop("offset", described=False), "expected the arrays"),
    "no nested offset": ("nested offset", drop("offset.codes", described=True), r"\['parts'\]: expected .*offset\.c"),
    "no nested scale": ("nested scale", drop("scale.scale", described=True), r"\['parts'\]: expected .*scale\.scale"),
    "no permutation": ("permutation", drop("permutation", described=True), "permutation: expected an array"),
    "no permuted axis": ("permutation", set_static("permuted_axis", None), "permutation: expected None"),
    "positive axis": ("permutation", set_static("permuted_axis", 1), r"\['permuted_axis'\]: expected null or a neg"),
    "axis out of range": ("permutation", set_static("permuted_axis", -9), "permuted_axis: expected an axis"),
    "repeated index": ("permutation", put("permutation", np.zeros(22, np.int32)), "permutation: expected each"),
    "short permutation": ("permutation", cut("permutation"), "permutation: expected shape"),
    "short offset": ("offset", cut("offset"), "offset: expected the rank of the codes"),
    "short nested codes": ("nested offset", cut("offset.codes"), "offset: expected the rank of the codes"),
    "integer offset": ("offset", put("offset", np.ones((6, 1), np.int32)), "offset: expected dtype"),
    "zero point too": ("offset", put("zero_point", np.ones((6, 1), np.uint8)), "offset: expected None"),
    "dtype of a zero point": ("nested scale", put("scale.zero_point", np.ones((6, 1), np.uint8), "int8"), "expected"),
    "wrong nesting": ("nested scale", nest({"codes": {}}), r"\['nested'\]: expected an object with the keys"),
    "nesting of nothing": ("nested scale", nest({}), r"\['parts'\]: expected"),
    "nesting of a list": ("nested scale", nest([]), r"\['nested'\]: expected an object"),
    "nesting of text": ("nested scale", nest({"scale": "uint8"}), r"\['nested'\]\['scale'\]: expected an object"),
    "two levels": ("nested scale", move("scale.scale", "scale.scale.scale"), r"\['parts'\]: expected"),
    "nested permutation": ("nested scale", set_static("permuted_axis", -1, "scale"), "permutation: expected an array"),
    "nested block size": ("nested scale", set_static("block_size", 2, "scale"), "scale: expected the rank"),
    "flag": ("signed", set_static("signed_scale", 1), r"\['signed_scale'\]: expected true or"),
    "inverse flag": ("inverse scale", set_static("inverse_scale", "yes"), r"\['inverse_scale'\]: expected true or"),
    "arithmetic": ("bfloat16", set_static("arithmetic", "int8"), r"\['arithmetic'\]: expected the name of a dtype"),
    "nested flag": ("inverse nested scale", set_static("inverse_scale", 1, "scale"), r"\['inverse_scale'\]: expected"),
    "real zero point": ("real zero point", cut("zero_point"), "zero_point: expected the rank of the codes"),
    "sign": ("signed", set_static("signed_scale", False), "scale: expected positive"),
    "block sizes": ("block sizes", set_static("block_size", [4, 0]), r"\['block_size'\]: expected null, a positive"),
    "other block sizes": ("block sizes", set_static("block_size", [5, 4]), "scale: expected the rank"),
    "words too short": ("packed", cut("codes"), "stored_codes: expected rows of 4 words"),
    "length": ("packed", set_static("words", {"format": "uint5", "length": 99}), "stored_codes: expected rows of"),
    "format": ("packed", set_static("words", {"format": "uint7", "length": 22}), r"\['format'\]: expected the name"),
    "no packing": ("packed", set_static("words", None), "codes: expected dtype"),
    "earlier words": (
        "packed", set_static("packing", {"format": "uint5", "length": 22}), r"\['packing'\]: expected words in the la"
    ),
    "packing of bytes": ("offset", set_static("words", {"format": "uint5", "length": 22}), "dtype uint32, because"),
    "words as bytes": ("packed", put("codes", np.zeros((6, 16), np.uint8)), "stored_codes: expected dtype uint32"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrays(rng: np.random.Generator, damage: str) -> None:
    name, change, text = DAMAGES[damage]
    arrays = {key: np.asarray(part) for key, part in checkpoint.to_arrays(make_tree(rng)[name]).items()}
    description = json.loads(arrays[KEY].tobytes())
    change(arrays, description)
    arrays[KEY] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    with pytest.raises((TypeError, ValueError), match=rf"jaxquant\.checkpoint\.from_arrays: tree.*{text}"):
        checkpoint.from_arrays({"w": arrays})
