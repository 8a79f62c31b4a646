"""Conversion of an int32 product to floats, by scales of its rows and columns, and the addition of a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .._core import recording, sharding
from .._kernels import barriers


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
