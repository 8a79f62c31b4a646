"""`find_shardings`: how a mesh cuts the codes and the scales of a tree of parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._arrays.parts import derive_permutation
from .._arrays.quantized_array import QuantizedArray, check_form
from .._core import checks
from .._core.granularity import Aligned

_NAME = "distributed.find_shardings"


def find_shardings(tree: object, mesh: Mesh | AbstractMesh, partitions: object, *, whole_blocks: bool = False) -> Any:
    """Return the sharding of each array of a tree, with codes and scales cut as the floats that they stand for.

    The result is what `jax.device_put`, and `in_shardings` and `out_shardings` of `jax.jit`, take for the tree. Its
    partitions, `jax.tree.map(lambda sharding: sharding.spec, result)`, are what `jax.shard_map` takes.

    A scale, and a zero point, is cut along a dimension if each device then has the entries of its own codes, and no
    others. Otherwise all devices have all its entries along that dimension: where all codes share one, or where a
    block lies on several devices. Such a layout is for `jax.jit` only, because inside `jax.shard_map` a device does not
    know which of the blocks are its own: pass `whole_blocks=True` there.

    Args:
        tree: a pytree of arrays and QuantizedArrays, or of their shapes, as `jax.eval_shape` returns them: parameters,
            the state of an optimizer, a batch.
        mesh: the mesh.
        partitions: Static. For each array the PartitionSpec of its logical shape: a pytree like `tree`, or one whose
            leaves stand for all arrays of a part of it; or a function of the path of an array, such as
            "layers/0/query", and of its shape.
        whole_blocks: Static. Whether a block that lies on several devices is an error.

    Returns:
        A pytree like `tree`, with a NamedSharding for each array.

    Raises:
        TypeError: the mesh is no mesh, or a partition no PartitionSpec.
        ValueError: the structures do not fit; a PartitionSpec has more entries than the array has dimensions, or names
            an axis that the mesh does not have; or, with `whole_blocks`, a block lies on several devices.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxquant import distributed as jqd
        >>> mesh = jax.sharding.AbstractMesh((8,), ("d",))
        >>> spec = jq.QuantSpec(jnp.int4, jq.Blocked(0, 32))
        >>> params = {"up": jq.quantize(jnp.ones((64, 256)), spec), "down": jq.quantize(jnp.ones((256, 64)), spec)}
        >>> shardings = jqd.find_shardings(params, mesh, {"up": P(None, "d"), "down": P("d")})
        >>> tuple(shardings["up"].scale.spec), tuple(shardings["down"].scale.spec)
        ((None, 'd'), ('d', None))
        >>> tuple(jqd.find_shardings(params, mesh, P("d"))["up"].scale.spec)  # a block lies on four devices
        (None, None)

    Source: Shoeybi et al., arXiv 1909.08053, section 3, and Zhao et al., arXiv 2304.11277, section 3, for the layouts.
    """
    is_mesh = isinstance(mesh, Mesh | AbstractMesh)
    checks.require_type(is_mesh, _NAME, "mesh", "a jax.sharding.Mesh", checks.describe_value(mesh))
    checks.check_flag(_NAME, "whole_blocks", whole_blocks)
    cut_leaf = functools.partial(_cut_leaf, mesh, whole_blocks)
    if callable(partitions):
        return _map_arrays(tree, (), lambda path, leaf: cut_leaf(partitions(path, _derive_shape(leaf)), path, leaf))
    entries, structure = jax.tree_util.tree_flatten_with_path(partitions, is_leaf=_is_partition)
    try:
        parts = structure.flatten_up_to(tree)
    except ValueError as error:
        expected = "a pytree of PartitionSpecs like `tree`, or one with leaves that stand for parts of it"
        raise checks.ContractValueError(checks.format_message(_NAME, "partitions", expected, error)) from error
    results = []
    for (prefix, partition), part in zip(entries, parts, strict=True):
        results.append(_map_arrays(part, prefix, functools.partial(cut_leaf, partition)))
    return structure.unflatten(results)


def _map_arrays(tree: object, prefix: tuple[Any, ...], function: Callable[[str, Any], Any]) -> Any:
    """Return a tree with each array and QuantizedArray replaced by a function of its path and of itself.

    Args:
        tree: the tree.
        prefix: the keys of the tree in a larger one.
        function: the function.
    """

    def replace(keys: tuple[Any, ...], leaf: object) -> Any:
        return function(jax.tree_util.keystr((*prefix, *keys), simple=True, separator="/"), leaf)

    return jax.tree_util.tree_map_with_path(replace, tree, is_leaf=_is_quantized)


def _cut_leaf(mesh: Mesh | AbstractMesh, whole_blocks: bool, partition: Any, path: str, leaf: object) -> Any:
    """Return the sharding of an array, or a QuantizedArray of the shardings of its parts."""
    shape, name = _derive_shape(leaf), f"partitions of {path!r}" if path else "partitions"
    checks.require_type(_is_partition(partition), _NAME, name, "a PartitionSpec", checks.describe_value(partition))
    expected = f"at most {len(shape)} entries, one for each dimension of {shape}"
    checks.require(len(partition) <= len(shape), _NAME, name, expected, partition)
    axes = (*partition, *(None,) * (len(shape) - len(partition)))
    counts = [_count_devices(mesh, name, axis) for axis in axes]
    if not isinstance(leaf, QuantizedArray):
        return NamedSharding(mesh, partition)

    check_form(_NAME, f"tree at {path!r}", leaf, ("offset", "signed_scale", "block_sizes"))

    def cut_part(part: jax.Array | None) -> NamedSharding | None:
        if part is None:
            return None
        sizes = Aligned(leaf.block_size).sizes(tuple(part.shape), shape)
        checks.require(sizes is not None, _NAME, f"tree at {path!r}", "a scale that fits the codes", leaf)
        entries = []
        for axis, count, size, length, stored in zip(axes, counts, sizes or (), shape, part.shape, strict=True):
            is_whole = length % (count * size) == 0
            expected = f"whole blocks of {size} on each device"
            got = f"a dimension of {length} on {count} devices"
            checks.require(is_whole or stored == 1 or not whole_blocks, _NAME, name, expected, got)
            entries.append(axis if is_whole and stored > 1 else None)
        return NamedSharding(mesh, PartitionSpec(*entries))

    (_, scale, zero_point, offset, _), static = leaf.tree_flatten()
    # JAX places the codes as they are stored, and a partition describes the logical shape.
    order = PartitionSpec(*(axes[axis] for axis in derive_permutation(leaf.stored_order, len(shape))))
    children = (NamedSharding(mesh, order), cut_part(scale), cut_part(zero_point), cut_part(offset))
    return QuantizedArray.tree_unflatten(static, children)


def _count_devices(mesh: Mesh | AbstractMesh, name: str, entry: str | tuple[str, ...] | None) -> int:
    """Return over how many devices an entry of a PartitionSpec cuts a dimension."""
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    for axis in axes:
        checks.require(axis in mesh.shape, _NAME, name, f"axes of the mesh, {tuple(mesh.shape)}", repr(axis))
    return math.prod(mesh.shape[axis] for axis in axes)


def _derive_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf)


def _is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedArray)


def _is_partition(node: object) -> bool:
    return isinstance(node, PartitionSpec)
