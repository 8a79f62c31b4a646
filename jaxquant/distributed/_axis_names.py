"""Checks of the names of mapped axes, and what JAX knows about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.sharding import AxisType, get_abstract_mesh

from .._core import checks


def find_axis_size(function: str, axis_name: Any) -> int:
    """Return the number of devices along a mapped axis, or along several; raise if there is no such axis."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    checks.require(len(names) > 0, function, "axis_name", "the name of an axis", "an empty tuple")
    expected = "the name of an axis of a jax.shard_map, jax.vmap or jax.pmap around the call"
    checks.check_hashable(function, "axis_name", axis_name)
    got = checks.describe_value(axis_name)
    checks.require(len(set(names)) == len(names), function, "axis_name", "the names of distinct axes", got)
    # jax.lax takes an int for a dimension of an array, not for a mapped axis.
    checks.require(not any(isinstance(name, int) for name in names), function, "axis_name", expected, got)
    size = 1
    for name in names:
        try:
            size *= int(lax.axis_size(name))
        except NameError:
            raise checks.ContractValueError(
                checks.format_message(function, "axis_name", expected, checks.describe_value(name))
            ) from None
    return size


def find_gathered_type(axis_name: Any) -> str:
    """Return the argument `to` of `lax.all_gather` with which every device holds the same result.

    Under `jax.shard_map` JAX then knows that the result does not vary over the axis, as it knows of `lax.psum`.
    """
    names: Sequence[Any] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    mesh = get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return "invarying" if all(types.get(name) == AxisType.Manual for name in names) else "varying"
