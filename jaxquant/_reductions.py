"""The range of an array. A NaN in it comes out, whatever the length: XLA:CPU's own minimum and maximum lose a NaN in
long arrays. Knows nothing of scales."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _granularity

# One pass over the data: an output row holds the maxima of -x, the next one those of x, over ROWS stretches of
# COLUMNS elements, which are still in the cache when they are read again.
_ROWS, _COLUMNS = 16, 512
_BLOCK = _ROWS * _COLUMNS
_ZERO = np.float32(0)


def extremes(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns (min(x, 0), max(x, 0)) over `axes`, float32; NaN where there is one. Nothing at all has (0, 0)."""
    if _granularity.is_placed(x):
        return _plain(x, axes)
    on_cpu = _blocked if len(axes) == x.ndim and x.size >= 4 * _BLOCK else functools.partial(_guarded, axes=axes)
    return lax.platform_dependent(x, cpu=on_cpu, default=functools.partial(_plain, axes=axes))


def _plain(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return _with_nan(x, axes, jnp.any(jnp.isnan(x), axis=axes))


def _with_nan(x: jax.Array, axes: tuple[int, ...], has_nan: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, high = jnp.min(x, axis=axes, initial=_ZERO), jnp.max(x, axis=axes, initial=_ZERO)
    return tuple(jnp.where(has_nan, np.float32(np.nan), v) for v in (low, high))  # type: ignore[return-value]


def _guarded(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return _with_nan(x, axes, _has_nan(x, axes))


def _has_nan(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    # XLA:CPU sums at the speed of memory and tests for NaN at a fifth of it. A finite sum has no NaN in it.
    def look(x: jax.Array) -> jax.Array:
        return jnp.any(jnp.isnan(x), axis=axes)

    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    return lax.cond(jnp.isfinite(jnp.sum(x)), lambda x: jnp.zeros(shape, jnp.bool_), look, x)


def _blocked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    flat = x.reshape(-1)
    blocks = flat.size // _BLOCK
    body = flat[: blocks * _BLOCK].reshape(blocks, _ROWS, _COLUMNS)
    shape = (blocks, 2, _COLUMNS)
    second = lax.broadcasted_iota(jnp.int32, shape, 1) == 1
    rows = [jnp.broadcast_to(body[:, i : i + 1, :], shape) for i in range(_ROWS)]
    level = [jnp.where(second, row, -row) for row in rows]
    while len(level) > 1:  # the elementwise maximum keeps NaN
        level = [lax.max(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    # The bits of floats that are not negative sort as the floats do, with NaN above infinity.
    bits = lax.bitcast_convert_type(lax.abs(jnp.maximum(level[0], _ZERO)), jnp.int32)
    minus_low, high = lax.bitcast_convert_type(jnp.max(bits, axis=(0, 2)), jnp.float32)
    if flat.size == blocks * _BLOCK:
        return -minus_low, high
    tail_low, tail_high = _plain(flat[blocks * _BLOCK :], (0,))
    return lax.min(-minus_low, tail_low), lax.max(high, tail_high)
