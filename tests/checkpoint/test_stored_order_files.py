"""Arrays with a stored order in files: their codes are saved as they are in memory, and older files still load."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import QuantSpec, checkpoint

KEY = "quantized_array"


def make_tree(rng: np.random.Generator) -> dict[str, jq.QuantizedArray]:
    x = rng.normal(size=(2, 7, 5)).astype(np.float32)
    q = jq.quantize(x, QuantSpec("int8", jq.PerAxis(2)), stored_last=1)
    packed = jq.quantize(x, QuantSpec("uint4", jq.Blocked(1, 3)), stored_last=(1, 0))
    return {"int8": q, "uint4": packed, "nf4": jq.quantize(x, QuantSpec(jq.nf4, jq.Blocked(1, 3)), stored_last=1)}


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
def test_round_trips(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    tree = make_tree(rng)
    arrays = checkpoint.to_arrays(tree)
    assert arrays["int8"]["codes"].shape == (2, 5, 7)
    assert_same(checkpoint.from_arrays(arrays), tree)
    checkpoint.save_safetensors(tmp_path / "file", tree)
    assert_same(checkpoint.load_safetensors(tmp_path / "file"), tree)
    checkpoint.save_orbax(tmp_path / "folder", tree)
    assert_same(checkpoint.load_orbax(tmp_path / "folder"), tree)
    assert_same(checkpoint.load_orbax(tmp_path / "folder", jax.eval_shape(lambda: tree)), tree)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    halves, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("d",), ()))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)
    like["int8"] = like["int8"].replace(scale=jax.ShapeDtypeStruct((1, 1, 5), jnp.float32, sharding=whole))
    children, structure = jax.tree.flatten(like["int8"])
    codes = jax.ShapeDtypeStruct((2, 5, 7), jnp.int8, sharding=halves)
    like["int8"] = jax.tree.unflatten(structure, [codes, *children[1:]])
    placed = checkpoint.load_orbax(tmp_path / "folder", like)
    assert_same(placed, tree)
    assert placed["int8"].stored_codes.sharding == halves


def describe(arrays: dict[str, Any]) -> dict[str, Any]:
    return json.loads(np.asarray(arrays[KEY]).tobytes())


def write(arrays: dict[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    return {**arrays, KEY: np.frombuffer(json.dumps(description).encode(), np.uint8)}


@pytest.mark.slow
def test_versions(rng: np.random.Generator) -> None:
    """A reader of version 1 would ignore a stored order, so only arrays that have one are written as version 2."""
    for q in make_tree(rng).values():
        text, plain = describe(checkpoint.to_arrays(q)), describe(checkpoint.to_arrays(q.store_last()))
        assert (text["version"], tuple(text["static"]["stored_order"])) == (2, q.stored_order)
        assert plain["version"] == 1
        assert set(plain["static"]) == {"dtype", "block_size", "codebook"}
        old = write(checkpoint.to_arrays(q.store_last()), plain)
        assert_same(checkpoint.from_arrays(old), q.store_last())


@pytest.mark.parametrize("order", [1, "T", [-1], [-1, -3], [-1.0, -2.0], [True, -2], [-1, -1], [0, 1], [-4, -2, -1]])
def test_damaged_orders(order: Any) -> None:
    arrays = checkpoint.to_arrays(jq.quantize(jnp.ones((3, 4)), QuantSpec("int8"), stored_last=0))
    text = describe(arrays)
    text["static"]["stored_order"] = order
    if order == [-1]:  # a longer form of None
        assert checkpoint.from_arrays(write(arrays, text)).shape == (4, 3)
        return
    with pytest.raises(ValueError, match=r"^jaxquant\.checkpoint\.from_arrays: tree.*stored_"):
        checkpoint.from_arrays(write(arrays, text))


@pytest.mark.slow
def test_a_folder_in_the_logical_order(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Orbax's folders from before there were stored orders, loaded for arrays that have one."""
    tree = {
        "layers": [make_tree(rng), {"plain": jnp.ones(3)}],
        "other": jq.quantize(jnp.ones((2, 3)), QuantSpec("int8")),
    }
    checkpoint.save_orbax(tmp_path / "old", jax.tree.map(in_logical_order, tree, is_leaf=is_array))
    assert_same(checkpoint.load_orbax(tmp_path / "old", jax.eval_shape(lambda: tree)), tree)
    assert_same(checkpoint.load_orbax(tmp_path / "old", tree), tree)
    checkpoint.save_orbax(
        tmp_path / "mixed", {"a": tree["layers"][0]["int8"], "b": tree["layers"][0]["int8"].store_last()}
    )
    like = {"a": tree["layers"][0]["int8"], "b": tree["layers"][0]["int8"]}
    assert_same(checkpoint.load_orbax(tmp_path / "mixed", like), like)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jq.QuantizedArray)


def in_logical_order(leaf: Any) -> Any:
    return leaf.store_last() if is_array(leaf) else leaf
