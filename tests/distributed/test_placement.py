"""`find_shardings`: codes, scales and zero points on a mesh, against what each device needs for its own codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

P = PartitionSpec
MESH = AbstractMesh((4, 2), ("data", "model"))
INT8, UINT8 = jq.QuantSpec(jnp.int8), jq.QuantSpec(jnp.uint8)

# A shape, a spec, how the array is cut, and how its scale is cut.
SCALES: list[tuple[tuple[int, ...], jq.QuantSpec, PartitionSpec, PartitionSpec]] = [
    ((16, 8), INT8, P("data", "model"), P(None, None)),
    ((16, 8), jq.QuantSpec(jnp.int8, jq.PerAxis(1)), P("data", "model"), P(None, "model")),
    ((16, 8), jq.QuantSpec(jnp.uint8, jq.PerAxis(0)), P(("data", "model")), P(("data", "model"), None)),
    ((16, 8), jq.QuantSpec(jnp.int4, jq.Blocked(0, 4)), P("data", "model"), P("data", "model")),
    # A block of 8 rows is on two of four devices, but within one of two.
    ((16, 8), jq.QuantSpec(jnp.int4, jq.Blocked(0, 8)), P("data", "model"), P(None, "model")),
    ((16, 8), jq.QuantSpec(jnp.int4, jq.Blocked(0, 8)), P("model", "data"), P("model", "data")),
    # The last of three blocks is short.
    ((20, 8), jq.QuantSpec(jnp.int8, jq.Blocked(0, 8)), P("model"), P(None, None)),
    # Two blocks: each of two devices would have one, but not the block of all its rows.
    ((12, 8), jq.QuantSpec(jnp.int8, jq.Blocked(0, 8)), P("model"), P(None, None)),
    ((48, 8), jq.QuantSpec(jnp.int8, jq.Blocked((0, 1), 4)), P("data", "model"), P("data", "model")),
    ((3, 16, 8), jq.QuantSpec(jq.nf4, jq.Blocked(2, 4)), P(None, "data", "model"), P(None, "data", "model")),
    ((8,), jq.QuantSpec(jnp.int8, jq.Blocked(0, 2)), P("data"), P("data")),
    ((), INT8, P(), P()),
]


@pytest.mark.parametrize(("shape", "spec", "partition", "expected"), SCALES)
def test_scales_go_where_their_codes_are(
    shape: tuple[int, ...], spec: jq.QuantSpec, partition: PartitionSpec, expected: PartitionSpec
) -> None:
    q = jax.eval_shape(lambda: jq.quantize(jnp.zeros(shape), spec))
    cut: Any = jqd.find_shardings(q, MESH, partition)
    assert jax.tree.structure(cut) == jax.tree.structure(q)
    assert cut.scale == NamedSharding(MESH, expected)
    assert q.zero_point is None or cut.zero_point == cut.scale
    padded = (*partition, *(None,) * (len(shape) - len(partition)))
    assert tuple(cut.stored_codes.spec) == padded
    if any(a != b and n > 1 for a, b, n in zip(padded, expected, q.scale.shape, strict=True)):
        with pytest.raises(ValueError, match=r"find_shardings: partitions: expected whole blocks of \d+ on each"):
            jqd.find_shardings(q, MESH, partition, whole_blocks=True)
    else:
        assert jax.tree.leaves(jqd.find_shardings(q, MESH, partition, whole_blocks=True)) == jax.tree.leaves(cut)
        # The part of each device is an array of its own.
        local = jax.tree.map(lambda part, s: jax.ShapeDtypeStruct(s.shard_shape(part.shape), part.dtype), q, cut)
        part: Any = jax.eval_shape(jq.QuantizedArray.dequantize, local)
        assert part.shape == cut.stored_codes.shard_shape(shape)


def test_stored_orders_trees_and_functions() -> None:
    """A partition is given for the logical shape; a tree of partitions, or a function, may give many."""
    q = jax.eval_shape(lambda: jq.quantize(jnp.zeros((16, 8)), jq.QuantSpec(jnp.int8, jq.PerAxis(1)), stored_last=0))
    tree = {"layers": [{"w": q, "gain": jnp.ones(8)}], "count": 3}
    cut: Any = jqd.find_shardings(q, MESH, P("data", "model"))
    assert cut.stored_codes.spec == P("model", "data")
    assert cut.scale.spec == P(None, "model")
    by_tree: Any = jqd.find_shardings(tree, MESH, {"layers": P("data"), "count": P()})
    assert by_tree["layers"][0]["w"].stored_codes.spec == P(None, "data")
    assert by_tree["layers"][0]["gain"].spec == P("data")
    seen = {}

    def choose(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        seen[path] = shape
        return P("data") if path.endswith("/w") else P()

    by_path: Any = jqd.find_shardings(tree, MESH, choose)
    assert seen == {"layers/0/w": (16, 8), "layers/0/gain": (8,), "count": ()}
    assert jax.tree.structure(by_path) == jax.tree.structure(tree)
    assert by_path["layers"][0]["w"].stored_codes.spec == P(None, "data")
    # A tree of partitions may reach into an array, as a cache's does.
    cache: Any = jq.KVCache.create((8, 4, 2, 16))
    placed: Any = jqd.find_shardings(cache, MESH, cache.partition_specs("data", "model"))
    assert (placed.keys.spec, placed.index.spec) == (P("data", "model"), P())


@pytest.mark.slow
def test_arrays_are_placed_and_restored_bits_stay(rng: np.random.Generator) -> None:
    """`jax.device_put`, `jax.jit` and `jax.shard_map` take the shardings; the values equal one device's."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    floats = {
        "a": (rng.normal(size=(16, 8)), jq.QuantSpec(jnp.int4, jq.Blocked(0, 4)), P("data", "model")),
        "b": (rng.normal(size=(16, 8)), jq.QuantSpec(jnp.uint8, jq.PerAxis(1)), P(None, "model")),
        "c": (rng.normal(size=(8, 16)), jq.QuantSpec(jq.nf4, jq.Blocked(1, 8)), P("data", "model")),
    }

    def quantize(xs: Any) -> Any:
        return {name: jq.quantize(x, floats[name][1]) for name, x in xs.items()}

    xs = {name: x.astype(np.float32) for name, (x, _, _) in floats.items()}
    expected = jax.jit(quantize)(xs)
    partitions = {name: partition for name, (_, _, partition) in floats.items()}
    shardings = jqd.find_shardings(expected, mesh, partitions, whole_blocks=True)
    made = jax.jit(quantize, out_shardings=shardings)(xs)
    for tree in (jax.device_put(expected, shardings), made):
        jax.tree.map(np.testing.assert_array_equal, tree, expected)
        for part, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            assert part.sharding.is_equivalent_to(sharding, part.ndim)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    dequantize = jax.shard_map(
        lambda tree: {name: q.dequantize() for name, q in tree.items()}, mesh=mesh, in_specs=(specs,),
        out_specs=partitions,
    )  # fmt: skip
    values = jax.jit(dequantize)(made)
    jax.tree.map(np.testing.assert_array_equal, values, {name: q.dequantize() for name, q in expected.items()})


@pytest.mark.parametrize(
    ("partitions", "text"),
    [
        (P("e"), r"partitions of 'w': expected axes of the mesh, \('data', 'model'\), got 'e'"),
        (P(None, None, "data"), r"partitions of 'w': expected at most 2 entries, .* of \(16, 8\)"),
        ({"w": "data"}, r"partitions of 'w': expected a PartitionSpec, got"),
        ({"v": P()}, r"partitions: expected a pytree of PartitionSpecs like `tree`"),
        (lambda path, shape: None, r"partitions of 'w': expected a PartitionSpec"),
    ],
)
def test_errors(partitions: Any, text: str) -> None:
    tree = {"w": jq.quantize(jnp.ones((16, 8)), INT8)}
    with pytest.raises((ValueError, TypeError), match=rf"jaxquant\.distributed\.find_shardings: {text}"):
        jqd.find_shardings(tree, MESH, partitions)


def test_a_mesh_is_needed() -> None:
    mesh: Any = {"d": 8}
    with pytest.raises(TypeError, match=r"find_shardings: mesh: expected a jax.sharding.Mesh"):
        jqd.find_shardings({}, mesh, P())
