"""Arrangement of a batch for a histogram: three dimensions, the middle one of which counts the slices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._kernels.min_max import find_slice_sizes


def is_padded(x: Any, shape: tuple[int, ...], block: int | None) -> bool:
    """Return whether `arrange_slices` has to pad a short block."""
    return any(s * e != n for s, e, n in zip(find_slice_sizes(x, shape, block), shape, x.shape, strict=True))


def arrange_slices(x: jax.Array, shape: tuple[int, ...], block: int | None, fill: Any) -> jax.Array:
    """Return x in three dimensions, (before, slices, after): slice i is x[:, i, :], in the order of x.

    x is transposed only if its kept dimensions are not adjacent. Short blocks are padded with `fill`.
    """
    # Each dimension is split into a kept one, with an index for each range, and a reduced one within the range.
    lengths: list[int] = []
    kept_flags: list[bool] = []
    padding = []
    for size, entries, n in zip(find_slice_sizes(x, shape, block), shape, x.shape, strict=True):
        padding.append((0, size * entries - n, 0))
        lengths += [entries, size]
        kept_flags += [True, False]
    if any(high for _, high, _ in padding):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    # Dimensions of length 1 would only separate kept dimensions that are in fact adjacent.
    dimensions = [(n, is_kept) for n, is_kept in zip(lengths, kept_flags, strict=True) if n != 1]
    x = x.reshape([n for n, _ in dimensions])
    flags = [is_kept for _, is_kept in dimensions]
    first = flags.index(True) if any(flags) else 0
    last = len(flags) - flags[::-1].index(True) if any(flags) else 0
    if not all(flags[first:last]):
        order = sorted(range(len(flags)), key=lambda a: not flags[a])
        x, first, last = x.transpose(order), 0, sum(flags)
    before, slices, after = (math.prod(x.shape[i:j]) for i, j in ((0, first), (first, last), (last, x.ndim)))
    return x.reshape(before, slices, after)
