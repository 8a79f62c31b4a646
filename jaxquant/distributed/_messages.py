"""Floats as codes on their way between devices: messages of equal length, and the parts of arrays as they are sent."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh

from .._arrays.packing import pack, unpack
from .._arrays.parts import derive_permutation, match_dimensions, move_axes_last
from .._arrays.quantize import compute_parameters, quantize
from .._arrays.quantized_array import QuantizedArray, check_form
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.granularity import Blocked, PerTensor, PerToken
from .._training.rounding_vjp import RoundingConfig, make_array

_Move = Callable[[jax.Array], jax.Array]


# Checks of the names of mapped axes, and what JAX knows about them.


def read_axis_size(function: str, axis_name: Hashable) -> int:
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


def choose_gathered_type(axis_name: Hashable) -> str:
    """Return the argument `to` of `lax.all_gather` with which every device holds the same result.

    Under `jax.shard_map` JAX then knows that the result does not vary over the axis, as it knows of `lax.psum`.
    """
    names: Sequence[Any] = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    mesh = get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return "invarying" if all(types.get(name) == AxisType.Manual for name in names) else "varying"


def is_quantized(node: object) -> bool:
    """Return whether a node of a tree is a QuantizedArray, which is a leaf to the collectives."""
    return isinstance(node, QuantizedArray)


def check_spec(function: str, spec: Any, key: jax.Array | None = None, argument: str = "spec") -> None:
    """Raise unless `spec` is a QuantSpec, and `key` None or a key of jax.random that such a spec can use."""
    checks.require_type(isinstance(spec, QuantSpec), function, argument, "a QuantSpec", checks.describe_value(spec))
    if key is None:
        return
    got = checks.describe_value(key)
    checks.require_type(checks.is_key(key), function, "key", "None or one key of jax.random", got)
    expected = f"None, because the codes of {spec.dtype} are not one step apart"
    checks.require(dtypes.is_integer(spec.dtype), function, "key", expected, "a key")
    # A rounded zero point puts an end of the range up to half a step past the last code, which would not be unbiased.
    expected = "None, because the codes of an asymmetric spec clip the ends of a range"
    checks.require(spec.symmetric, function, "key", expected, "a key")


def check_flat_spec(function: str, spec: QuantSpec, key: jax.Array | None, argument: str = "spec") -> None:
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


def encode(x: jax.Array, spec: QuantSpec, key: jax.Array | None) -> QuantizedArray:
    """Return x as codes, rounded to the nearest one without a key, and stochastically with one."""
    if key is None:
        return quantize(x, spec)
    scale, zero_point, _ = compute_parameters("quantize", x, spec, None, None)
    return make_array(RoundingConfig(spec), x, scale, zero_point, key)


def derive_row_spec(spec: QuantSpec) -> QuantSpec:
    """Return the spec of a matrix of messages, one in each row: what a message shared, its row shares."""
    by_row = {
        name: PerToken() if isinstance(getattr(spec, name), PerTensor) else getattr(spec, name)
        for name in ("granularity", "zero_point_granularity")
    }
    return dataclasses.replace(spec, **by_row)


def map_leaves(operation: Callable[[Any, Any], Any], x: object, key: jax.Array | None, axis_name: Hashable) -> Any:
    """Return the tree of `operation(leaf, key)`, with a key for each leaf and each device, or None."""
    leaves, structure = jax.tree.flatten(x, is_leaf=is_quantized)
    keys = list_keys(key, axis_name, len(leaves))
    return structure.unflatten([operation(leaf, own) for leaf, own in zip(leaves, keys, strict=True)])


def list_keys(key: jax.Array | None, axis_name: Hashable, count: int) -> list[Any]:
    """Return `count` keys that differ between devices, or as many times None if there is no key."""
    if key is None:
        return [None] * count
    # A user may pass one key to all devices. Equal random numbers on each would add up their errors instead of
    # averaging them.
    own = jax.random.fold_in(key, lax.axis_index(axis_name))
    return [jax.random.fold_in(own, i) for i in range(count)]


def split_messages(x: jax.Array, count: int) -> jax.Array:
    """Return the elements of x in float32, cut into `count` messages of equal length: the rows of a matrix.

    The last message is filled up with zeros, which have an exact code and widen no range.
    """
    flat = x.reshape(-1).astype(jnp.float32)
    # Equal lengths, because a collective moves arrays of one shape.
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def join_messages(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Return the elements of messages in the shape and the dtype of another array, without the padding."""
    return rows.reshape(-1)[: math.prod(like.shape)].reshape(like.shape).astype(like.dtype)


# The parts of quantized arrays as they travel between devices: as integers of their own width, or packed in bytes.


def _move_part(part: jax.Array, move: _Move, rows: int) -> jax.Array:
    """Return an array after a collective has moved its bytes.

    Args:
        part: codes, scales or zero points.
        move: the collective. It may add dimensions in front, or change their lengths.
        rows: Static. The number of leading dimensions that the collective addresses. The others are one message.
    """
    width = dtypes.count_packed_bits(part.dtype)
    if width < 8:
        return _move_packed(part, move, rows)
    # XLA:CPU would convert bfloat16 to float32 before it travels, and some backends do not support float8.
    return _move_bits(move, part) if width < 32 and part.dtype not in dtypes.INTEGERS else move(part)


def move_plain(x: jax.Array, move: _Move) -> jax.Array:
    """Return an array that is not quantized after a collective has moved it; integers of less than 8 bits as bytes."""
    # All-gathers of 2-bit integers corrupt the memory of XLA:CPU.
    is_narrow = x.dtype in dtypes.INTEGERS and dtypes.count_bits(x.dtype) < 8
    return move(x.astype(jnp.int8)).astype(x.dtype) if is_narrow else move(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(move: _Move, part: jax.Array) -> jax.Array:
    """Return floats of 8 or 16 bits after a collective has moved them as integers."""
    unsigned = jnp.dtype(f"uint{dtypes.count_packed_bits(part.dtype)}")
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(part, unsigned)), part.dtype)


@_move_bits.defjvp
def _move_bits_jvp(move: _Move, primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    # A bitcast has no derivative. The collective is linear, and moves the tangents as floats.
    return _move_bits(move, *primals), move(tangents[0])


def _move_packed(part: jax.Array, move: _Move, rows: int) -> jax.Array:
    """Return codes of less than 8 bits after a collective has moved them, packed as ONNX packs them."""
    leading, shape = part.shape[:rows], part.shape[rows:]
    # Each message by itself: otherwise one byte could hold codes for two devices.
    messages = jax.vmap(pack)(part.reshape(math.prod(leading), *shape))
    moved = move(messages.reshape(*leading, messages.shape[-1]))
    rows_moved = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    codes = jax.vmap(lambda row: unpack(row, part.dtype, shape))(rows_moved)
    return codes.reshape(*moved.shape[:-1], *shape)


def move_array(q: QuantizedArray, move: _Move, rows: int = 0) -> QuantizedArray:
    """Return a quantized array after a collective has moved each of its parts; see `_move_part`.

    The codes are moved in their stored order. A dimension that the collective adds in front is one of each part, as
    after `jax.vmap`.
    """
    return jax.tree.map(lambda part: _move_part(part, move, rows), q)


def join_stack(stack: QuantizedArray, axis: int, *, is_tiled: bool) -> QuantizedArray:
    """Return the arrays that are stacked along the first dimension of each part as one array.

    Args:
        stack: arrays of one shape. If they are joined along an existing dimension, their scales fit such an array: see
            `cut_for_join`.
        axis: Static. The dimension of the result along which they are joined, not negative.
        is_tiled: Static. Whether they are joined along an existing dimension; otherwise the dimension is new.
    """
    check_form("distributed", "x", stack)
    (stored, scale, zero_point, *_), static = stack.tree_flatten()
    order, rank = stack.stored_order, scale.ndim - 1
    if is_tiled:
        stored_axis, moved = match_dimensions(order, rank)[axis], order
        if stored.shape[1 + stored_axis] == 0:  # all of these arrays are empty, and one of them is the result
            return jax.tree.map(lambda part: part[0], stack)
        stored = _merge_first(stored, stored_axis)
    elif order is None:
        moved, stored = None, jnp.moveaxis(stored, 0, axis)
    else:  # the new dimension stays in front of the stored ones
        later = tuple(a + (a >= axis) for a in derive_permutation(order, rank))
        moved = move_axes_last("distributed", "axis", later, rank + 1)
    place_part: Callable[[Any], Any] = (
        (lambda part: _merge_first(part, axis)) if is_tiled else (lambda part: jnp.moveaxis(part, 0, axis))
    )
    scale, zero_point = (None if part is None else place_part(part) for part in (scale, zero_point))
    # Not the constructor: it would take codes in their logical order.
    return QuantizedArray.tree_unflatten(static._replace(stored_order=moved), (stored, scale, zero_point))


def _merge_first(part: jax.Array, axis: int) -> jax.Array:
    """Return the slices along the first dimension joined along another one, which is counted without the first."""
    moved = jnp.moveaxis(part, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
