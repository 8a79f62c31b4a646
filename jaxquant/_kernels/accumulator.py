"""What follows an integer contraction: its int32 sums become floats or codes, with the roundings of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import recording, sharding
from . import affine, barriers

# Floats.


def spread_over_product(value: jax.Array, acc: jax.Array) -> jax.Array:
    """Return an array with an element for each row or column in the shape and sharding of the product."""
    return sharding.place_like(lax.broadcast_in_dim(value, acc.shape, range(acc.ndim - value.ndim, acc.ndim)), acc)


def scale_product(acc: jax.Array, scale: jax.Array) -> jax.Array:
    """Return float32(acc) * scale, always rounded to float32 before the operation that follows."""
    return barriers.round_result(lax.mul(lax.convert_element_type(acc, jnp.float32), spread_over_product(scale, acc)))


def _batch_scaled(mapped: dict[str, bool], acc: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array | None:
    if not mapped["acc"]:
        return None
    scales = []
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if mapped[name]:
            scale = lax.expand_dims(scale, range(1, 1 + acc.ndim - scale.ndim))
        scales.append(scale)
    return scale_by_both(acc, *scales)


@recording.mark("scale", lambda acc, **_: (acc.shape, jnp.float32), _batch_scaled)
def scale_by_both(acc: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Return float32(acc) * float32(a_scale * b_scale), with scales that broadcast against each other and acc."""
    # XLA merges a product with an addition, but not with another product, so the product of the scales is not hidden.
    return scale_product(acc, _multiply_scales(a_scale, b_scale))


def multiply_scales(a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Return a_scale * b_scale, broadcast and always rounded to float32 before the operation that follows."""
    return barriers.round_result(_multiply_scales(a_scale, b_scale))


def _multiply_scales(a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    rank = max(a_scale.ndim, b_scale.ndim)
    # lax multiplies only equal shapes. jnp broadcasts, but refuses different ranks if the user has forbidden that.
    a, b = (lax.expand_dims(s, range(rank - s.ndim)) if s.ndim < rank else s for s in (a_scale, b_scale))
    shape = lax.broadcast_shapes(a.shape, b.shape)
    a, b = (s if s.shape == shape else lax.broadcast_in_dim(s, shape, range(rank)) for s in (a, b))
    return lax.mul(a, b)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return y plus a bias for each column, or y if there is no bias."""
    return y if bias is None else y + spread_over_product(bias, y)


def sum_over_blocks(contract: Callable[[Any], jax.Array], blocks: Any) -> jax.Array:
    """Return the float32 sum of `contract(block)` over all blocks, in ascending order, each sum rounded once.

    It is a loop, because a contraction of all blocks at once would keep the accumulators of all blocks in memory.

    Args:
        contract: returns the scaled product of one block, float32.
        blocks: a pytree of arrays; their first dimension counts the blocks, one or more.
    """
    first, rest = (jax.tree.map(lambda stack, run=run: stack[run], blocks) for run in (0, slice(1, None)))
    # The sum starts from the first term and not from an array of zeros, because under shard_map the carry of the loop
    # must vary over devices from the first step. Adding 0 turns -0 into 0, as a sum from 0 does.
    total = contract(first) + np.float32(0)
    if jax.tree.leaves(blocks)[0].shape[0] == 1:
        return total

    def add_block(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return barriers.round_result(total + contract(block)), None

    return lax.scan(add_block, total, rest)[0]


# Codes.


def compute_multiplier(a_scale: jax.Array, b_scale: jax.Array, y_scale: jax.Array) -> jax.Array:
    """Return float32(float32(a_scale * b_scale) / y_scale), for three scales that broadcast against each other."""
    a, b, y = (s.astype(jnp.float32) for s in (a_scale, b_scale, y_scale))
    shape = lax.broadcast_shapes(a.shape, b.shape, y.shape)
    a, b, y = (jnp.broadcast_to(s, shape) for s in (a, b, y))
    # XLA must not rewrite a * b / y: the integers depend on this order.
    return affine.divide(barriers.round_result(a * b), y)


def requantize_accumulator(acc: jax.Array, scale: jax.Array, zero_point: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return clip(round_half_even(float32(acc) * scale) + zero_point) in an 8-bit dtype.

    Args:
        acc: int32.
        scale: float32, of acc's shape.
        zero_point: int32, of acc's shape, added after rounding.
        dtype: int8 or uint8.
    """
    most = barriers.MOST_ALONE
    value = barriers.round_result(acc.astype(jnp.float32) * scale, most)
    return affine.encode_steps(value, zero_point, dtype, most=most)


@recording.mark("requantize", lambda acc, dtype, **_: (acc.shape, dtype))
def requantize_product(
    acc: jax.Array, bias: jax.Array | None, a_scale: jax.Array, b_scale: jax.Array, y_scale: jax.Array,
    y_center: jax.Array, dtype: np.dtype,
) -> jax.Array:  # fmt: skip
    """Return the codes of an int32 product, as an exporter records them.

    Args:
        acc: int32.
        bias: int32 that broadcasts against acc, or None.
        a_scale: float32, of acc's rank or a scalar.
        b_scale: float32, of acc's rank or a scalar.
        y_scale: float32, of acc's rank or a scalar.
        y_center: the int32 zero point of the result, of acc's rank or a scalar.
        dtype: int8 or uint8.
    """
    ones = (1,) * acc.ndim
    scales = (s.reshape(ones) if s.ndim == 0 else s for s in (a_scale, b_scale, y_scale))
    factor = jnp.broadcast_to(compute_multiplier(*scales), acc.shape)
    center = jnp.broadcast_to(y_center.reshape(ones) if y_center.ndim == 0 else y_center, acc.shape)
    acc = acc if bias is None else acc + jnp.broadcast_to(bias, acc.shape)
    return requantize_accumulator(acc, factor, center, dtype)


def place_part(part: jax.Array, rank: int, axis: int | None) -> jax.Array:
    """Return a scale or a bias with the rank of a product: of its last dimensions, or of the first and of `axis`."""
    if part.ndim == rank:
        return part
    if axis is None:
        return part.reshape((1,) * (rank - part.ndim) + part.shape)
    assert axis == 1
    shape = part.shape if part.ndim == 2 else (1, part.size)
    return part.reshape(*shape, *(1,) * (rank - 2))
