"""The parts of quantized arrays as they travel between devices: as integers of their own width, or packed in bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.packing import pack, unpack
from .._arrays.parts import find_permutation, find_places, move_axes_last
from .._arrays.quantized_array import QuantizedArray
from .._core import dtypes

Move = Callable[[jax.Array], jax.Array]


def move_part(part: jax.Array, move: Move, rows: int) -> jax.Array:
    """Return an array after a collective has moved its bytes.

    Args:
        part: codes, scales or zero points.
        move: the collective. It may add dimensions in front, or change their lengths.
        rows: Static. The number of leading dimensions that the collective addresses. The others are one message.
    """
    width = dtypes.find_width(part.dtype)
    if width < 8:
        return _move_packed(part, move, rows)
    # XLA:CPU would convert bfloat16 to float32 before it travels, and some backends do not support float8.
    return _move_bits(move, part) if width < 32 and part.dtype not in dtypes.INTEGERS else move(part)


def move_plain(x: jax.Array, move: Move) -> jax.Array:
    """Return an array that is not quantized after a collective has moved it; integers of less than 8 bits as bytes."""
    # All-gathers of 2-bit integers corrupt the memory of XLA:CPU.
    return move(x.astype(jnp.int8)).astype(x.dtype) if is_narrow(x.dtype) else move(x)


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is one of integers of less than 8 bits."""
    return dtype in dtypes.INTEGERS and dtypes.count_bits(dtype) < 8


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(move: Move, part: jax.Array) -> jax.Array:
    """Return floats of 8 or 16 bits after a collective has moved them as integers."""
    unsigned = jnp.dtype(f"uint{dtypes.find_width(part.dtype)}")
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(part, unsigned)), part.dtype)


@_move_bits.defjvp
def _move_bits_jvp(move: Move, primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    # A bitcast has no derivative. The collective is linear, and moves the tangents as floats.
    return _move_bits(move, *primals), move(tangents[0])


def _move_packed(part: jax.Array, move: Move, rows: int) -> jax.Array:
    """Return codes of less than 8 bits after a collective has moved them, packed as ONNX packs them."""
    leading, shape = part.shape[:rows], part.shape[rows:]
    # Each message by itself: otherwise one byte could hold codes for two devices.
    messages = jax.vmap(pack)(part.reshape(math.prod(leading), *shape))
    moved = move(messages.reshape(*leading, messages.shape[-1]))
    rows_moved = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
    codes = jax.vmap(lambda row: unpack(row, part.dtype, shape))(rows_moved)
    return codes.reshape(*moved.shape[:-1], *shape)


def move_array(q: QuantizedArray, move: Move, rows: int = 0) -> QuantizedArray:
    """Return a quantized array after a collective has moved each of its parts; see `move_part`.

    The codes are moved in their stored order. A dimension that the collective adds in front is one of each part, as
    after `jax.vmap`.
    """
    return jax.tree.map(lambda part: move_part(part, move, rows), q)


def join_stack(stack: QuantizedArray, axis: int, *, is_tiled: bool) -> QuantizedArray:
    """Return the arrays that are stacked along the first dimension of each part as one array.

    Args:
        stack: arrays of one shape. If they are joined along an existing dimension, their scales fit such an array: see
            `cut_for_join`.
        axis: Static. The dimension of the result along which they are joined, not negative.
        is_tiled: Static. Whether they are joined along an existing dimension; otherwise the dimension is new.
    """
    stored, scale, zero_point = stack.tree_flatten()[0]
    order, rank = stack.stored_order, scale.ndim - 1
    if is_tiled:
        place, moved = find_places(order, rank)[axis], order
        if stored.shape[1 + place] == 0:  # all of these arrays are empty, and one of them is the result
            return jax.tree.map(lambda part: part[0], stack)
        stored = _merge_first(stored, place)
    elif order is None:
        moved, stored = None, jnp.moveaxis(stored, 0, axis)
    else:  # the new dimension stays in front of the stored ones
        later = tuple(a + (a >= axis) for a in find_permutation(order, rank))
        moved = move_axes_last("distributed", "axis", later, rank + 1)
    place_part: Callable[[Any], Any] = (
        (lambda part: _merge_first(part, axis)) if is_tiled else (lambda part: jnp.moveaxis(part, 0, axis))
    )
    scale, zero_point = (None if part is None else place_part(part) for part in (scale, zero_point))
    # Not the constructor: it would take codes in their logical order.
    static = (stack.dtype, stack.block_size, stack.codebook, moved)
    return QuantizedArray.tree_unflatten(static, (stored, scale, zero_point))


def _merge_first(part: jax.Array, axis: int) -> jax.Array:
    """Return the slices along the first dimension joined along another one, which is counted without the first."""
    moved = jnp.moveaxis(part, 0, axis)
    return moved.reshape(*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :])
