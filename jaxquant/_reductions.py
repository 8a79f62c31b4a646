"""The range of an array. A NaN in it comes out, whatever the length: XLA:CPU's own minimum and maximum lose a NaN in
long arrays. Knows nothing of scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _granularity

# One pass over the data: an output row holds the maxima of -x, the next one those of x, over ROWS stretches of up
# to COLUMNS elements, which are still in the cache when they are read again.
_ROWS, _COLUMNS = 16, 1024
_WORTH = 2**15
_ZERO = np.float32(0)


def extremes(x: jax.Array, axes: tuple[int, ...], contiguous: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns (min(x, 0), max(x, 0)) over `axes`, float32; NaN where there is one. Nothing at all has (0, 0).

    `contiguous` says that x is an array in memory, in the order of its axes, and no value on its way through a
    program: only then is it read in one pass.
    """
    if x.size == 0 or _granularity.is_placed(x):
        return _plain(x, axes)
    columns = _columns(x.size) if contiguous and len(axes) == x.ndim else 0
    on_cpu = functools.partial(_blocked, columns=columns) if columns else functools.partial(_guarded, axes=axes)
    return lax.platform_dependent(x, cpu=on_cpu, default=functools.partial(_plain, axes=axes))


def magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns max(|x|) over `axes`, float32; NaN where there is one. Nothing at all has 0."""
    plain = functools.partial(_magnitude, axes=axes, has_nan=_any_nan)
    if x.size == 0 or _granularity.is_placed(x):
        return plain(x)
    return lax.platform_dependent(
        x, cpu=functools.partial(_magnitude, axes=axes, has_nan=_any_nan_guarded), default=plain
    )


def _magnitude(x: jax.Array, axes: tuple[int, ...], has_nan: Any) -> jax.Array:
    return jnp.where(has_nan(x, axes), np.float32(np.nan), jnp.max(lax.abs(x), axis=axes, initial=_ZERO))


def _columns(size: int) -> int:
    """Returns the length of a stretch: the largest divisor of size / ROWS that is worth it, or 0."""
    if size < _WORTH or size % _ROWS:
        return 0
    return next((n for n in range(_COLUMNS, 127, -1) if size // _ROWS % n == 0), 0)


def _plain(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return _with_nan(x, axes, _any_nan(x, axes))


def _any_nan(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.any(jnp.isnan(x), axis=axes)


def _with_nan(x: jax.Array, axes: tuple[int, ...], has_nan: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, high = jnp.min(x, axis=axes, initial=_ZERO), jnp.max(x, axis=axes, initial=_ZERO)
    return jnp.where(has_nan, np.float32(np.nan), low), jnp.where(has_nan, np.float32(np.nan), high)


def _guarded(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return _with_nan(x, axes, _any_nan_guarded(x, axes))


def _any_nan_guarded(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    # XLA:CPU sums at the speed of memory and tests for NaN at a fifth of it. A finite sum has no NaN in it, the
    # first elements no more than the rest.
    first = tuple(0 if a in axes else slice(None) for a in range(x.ndim))
    return lax.cond(
        jnp.isfinite(jnp.sum(x)),
        lambda x: jnp.isnan(x[first]),
        lambda x: _any_nan(x, axes),
        x,
    )


def _blocked(x: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    blocks = x.size // (_ROWS * columns)
    body = x.reshape(blocks, _ROWS, columns)
    shape = (blocks, 2, columns)
    second = lax.broadcasted_iota(jnp.int32, shape, 1) == 1
    rows = [jnp.broadcast_to(body[:, i : i + 1, :], shape) for i in range(_ROWS)]
    level = [jnp.where(second, row, -row) for row in rows]
    while len(level) > 1:  # the elementwise maximum keeps NaN
        level = [lax.max(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    # The bits of floats that are not negative sort as the floats do, with NaN above infinity.
    bits = lax.bitcast_convert_type(lax.abs(jnp.maximum(level[0], _ZERO)), jnp.int32)
    minus_low, high = lax.bitcast_convert_type(jnp.max(bits, axis=(0, 2)), jnp.float32)
    return -minus_low, high
