"""Shardings that JAX tracks in types, the argument out_sharding, and values that vary under `jax.shard_map`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

from . import checks


def is_placed(value: jax.Array) -> bool:
    """Return whether JAX tracks the sharding of `value` in its type, as it does on a mesh with explicit axes.

    If it does, the shardings of operands must agree, and JAX refuses a reshape whose sharding it cannot infer.
    """
    return AxisType.Explicit in jax.typeof(value).sharding.mesh.axis_types


def place_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return `value` with the sharding of `like` if JAX tracks it in types; otherwise return it unchanged."""
    return reshard(value, jax.typeof(like).sharding) if is_placed(like) else value


def place_whole(value: jax.Array) -> jax.Array:
    """Return `value` unsharded, whole on every device, if JAX tracks shardings in types; otherwise unchanged."""
    if not is_placed(value):
        return value
    mesh = jax.typeof(value).sharding.mesh
    return reshard(value, NamedSharding(mesh, PartitionSpec(*(None,) * value.ndim)))


def read_partition(value: jax.Array) -> tuple[Any, ...]:
    """Return the mesh axes over which the type of `value` shards each dimension; None for an unsharded dimension."""
    spec = jax.typeof(value).sharding.spec
    return (*spec, *(None,) * (value.ndim - len(spec)))  # a PartitionSpec may leave out the last dimensions


def gather_axes(value: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return `value` with the dimensions `axes` unsharded if JAX tracks shardings in types; otherwise unchanged."""
    partition = read_partition(value)
    if all(partition[a] is None for a in axes):
        return value
    mesh = jax.typeof(value).sharding.mesh
    entries = (None if dimension in axes else entry for dimension, entry in enumerate(partition))
    return reshard(value, NamedSharding(mesh, PartitionSpec(*entries)))


def split_into_runs(value: jax.Array, counts: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Return `value` with each dimension split into runs: [counts[0], sizes[0], counts[1], ...].

    With explicit mesh axes, JAX cannot infer the sharding. A dimension stays sharded where each device has whole runs.

    Args:
        value: an array of the shape counts[i] * sizes[i].
        counts: the number of runs of each dimension.
        sizes: their lengths.
    """
    shape = tuple(n for pair in zip(counts, sizes, strict=True) for n in pair)
    if not is_placed(value):
        return value.reshape(shape)
    kept = match_whole_runs(value, counts, sizes)
    value = gather_axes(value, [axis for axis, entry in enumerate(kept) if entry is None])
    spec = PartitionSpec(*(names for entry in kept for names in (entry, None)))
    return lax.reshape(value, shape, out_sharding=NamedSharding(jax.typeof(value).sharding.mesh, spec))


def match_whole_runs(like: jax.Array, counts: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return the mesh axes of each dimension of a placed array; None where a device does not have whole runs of it."""
    lengths = jax.typeof(like).sharding.mesh.shape
    kept = []
    for entry, count, size, length in zip(read_partition(like), counts, sizes, like.shape, strict=True):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        is_whole = count * size == length and count % math.prod(lengths[name] for name in names) == 0
        kept.append(entry if is_whole else None)
    return tuple(kept)


def check_out_sharding(function: str, out_sharding: object) -> None:
    """Raise unless JAX accepts a value as out_sharding.

    This check must run before the value becomes a key of the cache of compiled programs, which has to hash it.
    """
    if out_sharding is None:
        return
    is_sharding = isinstance(out_sharding, NamedSharding | PartitionSpec)
    expected = "None, a jax.sharding.NamedSharding or a PartitionSpec"
    checks.require_type(is_sharding, function, "out_sharding", expected, checks.describe_value(out_sharding))
    # A PartitionSpec names axes of the mesh in the context, so there must be one.
    if isinstance(out_sharding, PartitionSpec):
        has_mesh = not get_abstract_mesh().empty
        expected = "a NamedSharding, or a PartitionSpec under jax.set_mesh(mesh)"
        checks.require(has_mesh, function, "out_sharding", expected, out_sharding)


def read_out_partition(
    function: str, out_sharding: NamedSharding | PartitionSpec | None, rank: int
) -> tuple[Any, ...] | None:
    """Return the mesh axes of an out_sharding, one entry for each dimension of the result; raise if it does not fit."""
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    expected = f"at most {rank} entries, one for each dimension of the result, and no unreduced axes"
    holds = len(spec) <= rank and not spec.unreduced
    checks.require(holds, function, "out_sharding", expected, spec)
    return (*spec, *(None,) * (rank - len(spec)))


def set_partition(out_sharding: NamedSharding | PartitionSpec | None, partition: Sequence[Any] | None) -> Any:
    """Return an out_sharding on the same mesh with these entries, for an intermediate result."""
    if partition is None:
        return None
    spec = PartitionSpec(*partition)
    return NamedSharding(out_sharding.mesh, spec) if isinstance(out_sharding, NamedSharding) else spec


def read_placement(value: jax.Array) -> PartitionSpec:
    """Return the sharding in the type of `value`, for errors."""
    return PartitionSpec(*read_partition(value))


def describe_placement(value: jax.Array) -> str:
    """Return a text with the dtype, the shape and the sharding of an array, for errors."""
    return f"{value.dtype}{list(value.shape)} sharded as {read_placement(value)}"


def vary_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return `value` unchanged, marked as varying over the same devices as `like` under `jax.shard_map`.

    The carry of a loop must vary in its first step as it does in all later ones.
    """
    if like.size == 0 or is_placed(like):
        return value
    # A result varies if any operand does. Both branches of this select are `value`, so its condition does not matter.
    first = lax.slice(like, (0,) * like.ndim, (1,) * like.ndim).reshape(())
    return lax.select(lax.eq(first, first), value, value)
