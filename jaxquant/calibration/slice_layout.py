"""Arranges a batch so that the elements which share a range are in two of three dimensions: for histograms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.min_max import find_slice_sizes


def is_padded(x: Any, shape: tuple[int, ...], block: int | None) -> bool:
    """Return whether a block is short."""
    return any(s * e != n for s, e, n in zip(find_slice_sizes(x, shape, block), shape, x.shape, strict=True))


def arrange_slices(x: jax.Array, shape: tuple[int, ...], block: int | None, fill: Any) -> jax.Array:
    """Return x in three dimensions, (before, slices, after): slice i is x[:, i, :], in the order of x.

    Nothing is transposed if the kept dimensions are adjacent. Short blocks are padded with `fill`.
    """
    # Each dimension is split into a kept one, the entries of the ranges, and a reduced one, the members of an entry.
    lengths: list[int] = []
    kept: list[bool] = []
    padding = []
    for size, entries, n in zip(find_slice_sizes(x, shape, block), shape, x.shape, strict=True):
        padding.append((0, size * entries - n, 0))
        lengths += [entries, size]
        kept += [True, False]
    if any(high for _, high, _ in padding):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    dimensions = [(n, k) for n, k in zip(lengths, kept, strict=True) if n != 1]
    x = x.reshape([n for n, _ in dimensions])
    keeps = [k for _, k in dimensions]
    first = keeps.index(True) if any(keeps) else 0
    last = len(keeps) - keeps[::-1].index(True) if any(keeps) else 0
    if not all(keeps[first:last]):
        order = [a for a, k in enumerate(keeps) if k] + [a for a, k in enumerate(keeps) if not k]
        x, first, last = x.transpose(order), 0, sum(keeps)
    before, slices, after = (math.prod(x.shape[i:j]) for i, j in ((0, first), (first, last), (last, x.ndim)))
    return x.reshape(before, slices, after)
