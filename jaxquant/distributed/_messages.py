"""Floats as codes: arrays that travel whole, and flat messages of equal length to each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays.quantize import find_parameters, quantize
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.granularity import Blocked, PerTensor, PerToken
from .._training.rounding_vjp import Config, make_array


def is_quantized(node: Any) -> bool:
    """Return whether a node of a tree is a QuantizedArray, which is a leaf to the collectives."""
    return isinstance(node, QuantizedArray)


def check_spec(function: str, spec: Any, key: Any = None, argument: str = "spec") -> None:
    """Raise unless `spec` is a QuantSpec, and `key` None or a key of jax.random that such a spec can use."""
    checks.require_type(isinstance(spec, QuantSpec), function, argument, "a QuantSpec", checks.describe_value(spec))
    if key is None:
        return
    got = checks.describe_value(key)
    checks.require_type(checks.is_key(key), function, "key", "None or one key of jax.random", got)
    expected = f"None, because the codes of {spec.dtype} are not one step apart"
    checks.require(spec.dtype in dtypes.INTEGERS, function, "key", expected, "a key")
    # A rounded zero point puts an end of the range up to half a step past the last code, which would not be unbiased.
    expected = "None, because the codes of an asymmetric spec clip the ends of a range"
    checks.require(spec.symmetric, function, "key", expected, "a key")


def check_flat_spec(function: str, spec: Any, key: Any, argument: str = "spec") -> None:
    """Raise unless the spec is one for flat messages: PerTensor, or Blocked along the last axis."""
    check_spec(function, spec, key, argument)
    for attribute in ("granularity", "zero_point_granularity"):
        granularity = getattr(spec, attribute)
        is_flat = isinstance(granularity, PerTensor)
        is_flat |= isinstance(granularity, Blocked) and granularity.axis in (-1, (-1,))
        expected = "PerTensor() or Blocked(-1, size), because an array travels as one flat message to each device"
        checks.require(is_flat, function, f"{argument}.{attribute}", expected, granularity)


def read_floats(function: str, argument: str, x: Any) -> jax.Array:
    """Return an array of floats as a JAX array; raise for any other value."""
    x = jnp.asarray(x) if isinstance(x, float | np.ndarray | np.generic) else x
    checks.check_array(function, argument, x, dtypes.FLOATS)
    return x


def encode(x: jax.Array, spec: QuantSpec, key: Any) -> QuantizedArray:
    """Return x as codes, rounded to the nearest one without a key, and stochastically with one."""
    if key is None:
        return quantize(x, spec)
    scale, zero_point, _ = find_parameters("quantize", x, spec, None, None)
    return make_array(Config(spec), x, scale, zero_point, key)


def find_row_spec(spec: QuantSpec) -> QuantSpec:
    """Return the spec of a matrix of messages, one in each row: what a message shared, its row shares."""
    by_row = {
        name: PerToken() if isinstance(getattr(spec, name), PerTensor) else getattr(spec, name)
        for name in ("granularity", "zero_point_granularity")
    }
    return dataclasses.replace(spec, **by_row)


def map_leaves(operation: Callable[[Any, Any], Any], x: Any, key: Any, axis_name: Any) -> Any:
    """Return the tree of `operation(leaf, key)`, with a key for each leaf and each device, or None."""
    leaves, structure = jax.tree.flatten(x, is_leaf=is_quantized)
    keys = list_keys(key, axis_name, len(leaves))
    return structure.unflatten([operation(leaf, own) for leaf, own in zip(leaves, keys, strict=True)])


def list_keys(key: Any, axis_name: Any, count: int) -> list[Any]:
    """Return `count` keys that differ between devices, or as many times None if there is no key."""
    if key is None:
        return [None] * count
    # A user may pass one key to all devices. Equal random numbers on each would add up their errors instead of
    # averaging them.
    own = jax.random.fold_in(key, lax.axis_index(axis_name))
    return [jax.random.fold_in(own, i) for i in range(count)]


def split_messages(x: jax.Array, count: int) -> jax.Array:
    """Return the elements of x in float32, cut into `count` messages of equal length: the rows of a matrix.

    The last message is filled up with zeros, whose code is exact, and which widen no range.
    """
    flat = x.reshape(-1).astype(jnp.float32)
    # Equal lengths, because a collective moves arrays of one shape.
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def join_messages(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Return the elements of messages in the shape and the dtype of another array, without those that filled up."""
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)
