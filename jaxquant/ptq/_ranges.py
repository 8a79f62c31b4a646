"""Ranges of a weight that are tried: the error that each of them leaves in each slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, granularity, small_floats
from .._kernels import affine, min_max
from . import _grid
from ._grid import Grid


class Slices(NamedTuple):
    """A weight, and how its elements share scales.

    Attributes:
        w: the weight in float32.
        spec: how to quantize it.
        shape: the shape of the scale, and of the zero point.
    """

    w: jax.Array
    spec: QuantSpec
    shape: tuple[int, ...]

    @property
    def block_size(self) -> int | None:
        """The block size, or None."""
        return scale_from_range.find_block_size(self.spec)

    def expand(self, part: jax.Array) -> jax.Array:
        """Return numbers of the slices for each element."""
        return granularity.Aligned(self.block_size).expand(part, self.w)

    def sum(self, values: jax.Array) -> jax.Array:
        """Return the sum of numbers of the elements in each slice."""
        return affine.sum_to_scale(granularity.Aligned(self.block_size), values, jnp.zeros(self.shape))

    def find_extremes(self) -> tuple[jax.Array, jax.Array]:
        """Return the least and the largest element of each slice, widened to include 0."""
        low, high = min_max.find_extremes(self.w, self.shape, self.block_size)
        # As `jq.quantize` widens ranges, so that 0 is a code.
        return jnp.minimum(low, 0), jnp.maximum(high, 0)

    def count(self) -> np.ndarray:
        """Return the number of elements in each slice. The last block along an axis may be short."""
        counts = np.ones((), np.float32)
        for length, parts in zip(self.w.shape, self.shape, strict=True):
            size = self.block_size if self.block_size and 1 < parts < length else -(-length // parts)
            counts = counts[..., None] * np.minimum(size, length - size * np.arange(parts)).astype(np.float32)
        return counts

    def find_scales(self, low: jax.Array, high: jax.Array) -> Grid:
        """Return the scale, float32, and the zero point, int32 or None, of each slice, for a range of each slice."""
        scale, point = scale_from_range.find_scale_and_zero_point(self.spec, low, high, self.shape, self.shape)
        return Grid(small_floats.scale_as_float32(scale), None if point is None else point.astype(jnp.int32))

    def find_grid(self, low: jax.Array, high: jax.Array) -> Grid:
        """Return the scale and the zero point of each element, for a range of each slice."""
        scale, point = self.find_scales(low, high)
        return Grid(self.expand(scale), None if point is None else self.expand(point))

    def round_to_range(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Return the values of the codes, for a range of each slice."""
        grid = self.find_grid(low, high)
        return _grid.decode_values(_grid.encode_values(self.w, grid, self.spec), grid, self.spec)


def make_slices(function: str, w: jax.Array, spec: QuantSpec) -> Slices:
    """Return the slices of a weight; raise if the zero point has another granularity than the scale."""
    scale, point = scale_from_range.find_shapes(function, spec, w.shape)
    # A range that is tried gives both a scale and a zero point, so that both belong to the same elements.
    expected = "the same granularity for the scale and the zero point"
    got = f"{spec.granularity} and {spec.zero_point_granularity}"
    checks.require(scale == point, function, "spec", expected, got)
    return Slices(w.astype(jnp.float32), spec, scale)


def keep_better(best: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return, for each slice, the tuple of which the first entry, an error, is smaller."""
    # False if an error is NaN: a range whose error is unknown never replaces another one.
    is_better = other[0] < best[0]
    return tuple(jnp.where(is_better, new, old) for old, new in zip(best, other, strict=True))
