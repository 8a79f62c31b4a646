"""The range of an array. A NaN in it comes out, whatever the length: XLA:CPU's own minimum and maximum lose a NaN in
long arrays. Knows nothing of scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import sharding

_ZERO = np.float32(0)
_NOTHING = np.int32(0)  # the key of 0
_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)


def find_min_max(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns (min(x, 0), max(x, 0)) over `axes`, float32; NaN where there is one. Nothing at all has (0, 0)."""
    if x.size == 0 or sharding.is_placed(x):
        return _reduce_plain(x, axes)
    last = tuple(range(x.ndim - len(axes), x.ndim))
    on_cpu = functools.partial(_find_at_once if axes == last else _reduce_guarded, axes=axes)
    return lax.platform_dependent(x, cpu=on_cpu, default=functools.partial(_reduce_plain, axes=axes))


def _find_at_once(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    # One reduction of both, over int32 that sort as the floats do: XLA:CPU reads x once, with vectors, and whatever
    # makes x is computed in the same loop. Of floats, of one end alone, or over leading axes it makes scalar loops, ten
    # to thirty times slower.
    keys = encode_order(x)
    low, high = lax.reduce((keys, keys), (_NOTHING, _NOTHING), merge_min_max, axes)
    # Of a single element XLA forgets where it started.
    return find_ends(lax.min(low, _NOTHING), lax.max(high, _NOTHING))


def encode_order(x: jax.Array) -> jax.Array:
    """Returns int32 that sort as the floats do, with -NaN below all numbers and NaN above."""
    return _flip_negative(lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.int32))


def decode_order(keys: jax.Array) -> jax.Array:
    """Returns the float32 that sort as these int32 do."""
    return lax.bitcast_convert_type(_flip_negative(keys), jnp.float32)


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Returns the bits of floats as int32 that sort as those do, and such int32 as the bits."""
    below = lax.shift_right_arithmetic(bits, np.int32(31))
    return lax.bitwise_xor(bits, lax.bitwise_and(below, _MAGNITUDE))


def merge_min_max(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the lesser of two first and the larger of two second keys: one reduction finds both ends."""
    return lax.min(a[0], b[0]), lax.max(a[1], b[1])


def find_ends(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the floats of the least and the largest keys, NaN where a NaN is among them."""
    has_nan = lax.bitwise_or(lax.lt(low, ~_INFINITY), lax.gt(high, _INFINITY))
    low, high = decode_order(low), decode_order(high)
    return jnp.where(has_nan, np.float32(np.nan), low), jnp.where(has_nan, np.float32(np.nan), high)


def _reduce_plain(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return _restore_nan(x, axes, jnp.any(jnp.isnan(x), axis=axes))


def _restore_nan(x: jax.Array, axes: tuple[int, ...], has_nan: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, high = jnp.min(x, axis=axes, initial=_ZERO), jnp.max(x, axis=axes, initial=_ZERO)
    return jnp.where(has_nan, np.float32(np.nan), low), jnp.where(has_nan, np.float32(np.nan), high)


def _reduce_guarded(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    # XLA:CPU sums at the speed of memory and tests for NaN at a fifth of it. A finite sum has no NaN in it, the
    # first elements no more than the rest.
    first = tuple(0 if a in axes else slice(None) for a in range(x.ndim))
    has_nan = lax.cond(
        jnp.isfinite(jnp.sum(x)),
        lambda x: jnp.isnan(x[first]),
        lambda x: jnp.any(jnp.isnan(x), axis=axes),
        x,
    )
    return _restore_nan(x, axes, has_nan)
