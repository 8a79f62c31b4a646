"""Where arrays lie: shardings that JAX tracks in types, out_sharding, and what varies under `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

from . import checks


def is_placed(value: jax.Array) -> bool:
    """Whether JAX tracks the sharding of `value` in its type, where operands must agree and reshapes are refused."""
    return AxisType.Explicit in jax.typeof(value).sharding.mesh.axis_types


def place_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `value` sharded as `like`, where JAX tracks shardings in types."""
    return reshard(value, jax.typeof(like).sharding) if is_placed(like) else value


def place_whole(value: jax.Array) -> jax.Array:
    """Returns `value` whole on every device, where JAX tracks shardings in types, for what lies nowhere special."""
    if not is_placed(value):
        return value
    mesh = jax.typeof(value).sharding.mesh
    return reshard(value, NamedSharding(mesh, PartitionSpec(*(None,) * value.ndim)))


def find_partition(value: jax.Array) -> tuple[Any, ...]:
    """Returns the mesh axes that each dimension of `value` is sharded over, by its type; None for no axis."""
    spec = jax.typeof(value).sharding.spec
    return (*spec, *(None,) * (value.ndim - len(spec)))


def gather_axes(value: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns `value` with some of its dimensions unsharded, where JAX tracks shardings in types."""
    partition = find_partition(value)
    if all(partition[a] is None for a in axes):
        return value
    mesh = jax.typeof(value).sharding.mesh
    places = (None if a in axes else place for a, place in enumerate(partition))
    return reshard(value, NamedSharding(mesh, PartitionSpec(*places)))


def check_out_sharding(function: str, out_sharding: Any) -> None:
    """Requires a value that JAX accepts as out_sharding, before a cache of compiled programs sees it."""
    if out_sharding is None:
        return
    known = isinstance(out_sharding, NamedSharding | PartitionSpec)
    expected = "None, a jax.sharding.NamedSharding or a PartitionSpec"
    checks.require_type(known, function, "out_sharding", expected, checks.describe_value(out_sharding))
    if isinstance(out_sharding, PartitionSpec):
        has_mesh = not get_abstract_mesh().empty
        expected = "a NamedSharding, or a PartitionSpec under jax.set_mesh(mesh)"
        checks.require(has_mesh, function, "out_sharding", expected, out_sharding)


def find_out_partition(function: str, out_sharding: Any, rank: int) -> tuple[Any, ...] | None:
    """Returns the mesh axes of an out_sharding, one entry for each dimension of the result."""
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    expected = f"at most {rank} entries, one for each dimension of the result, and no unreduced axes"
    holds = len(spec) <= rank and not spec.unreduced
    checks.require(holds, function, "out_sharding", expected, spec)
    return (*spec, *(None,) * (rank - len(spec)))


def set_partition(out_sharding: Any, partition: Sequence[Any] | None) -> Any:
    """Returns an out_sharding on the same mesh with other entries, for an intermediate result."""
    if partition is None:
        return None
    spec = PartitionSpec(*partition)
    return NamedSharding(out_sharding.mesh, spec) if isinstance(out_sharding, NamedSharding) else spec


def find_placement(value: jax.Array) -> PartitionSpec:
    """Returns the sharding that the type of `value` states, for errors."""
    return PartitionSpec(*find_partition(value))


def describe_placement(value: jax.Array) -> str:
    """Returns the dtype, the shape and the sharding of an array, for errors."""
    return f"{value.dtype}{list(value.shape)} sharded as {find_placement(value)}"


def vary_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `value`, which under `jax.shard_map` then varies where `like` does, as a loop's carry has to."""
    if like.size == 0 or is_placed(like):
        return value
    first = lax.slice(like, (0,) * like.ndim, (1,) * like.ndim).reshape(())
    return lax.select(lax.eq(first, first), value, value)
