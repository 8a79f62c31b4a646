"""Codebooks, whose codes are indices into a table of values: nf4 and user-defined tables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, sharding
from .._core.min_max import encode_order

# With these lengths every code of the dtype has an entry.
_CARRIERS = {4: np.dtype(jnp.uint2), 16: np.dtype(jnp.uint4), 256: np.dtype(jnp.uint8)}
_COMPARED = 16  # up to this length a comparison with each midpoint is faster than two lookups
_MOST_BUCKETS = 2**16


@dataclasses.dataclass(frozen=True)
class Codebook:
    """A table of values in ascending order; the codes of a quantized array are indices into it.

    A value is rounded to the nearest entry, and to the lower one if it is halfway between two. NaN becomes the first
    entry.

    Attributes:
        name: the name that `repr` prints for an array or a spec with this codebook.
        levels: 4, 16 or 256 numbers in ascending order; their codes are uint2, uint4 or uint8, respectively. They are
            rounded to float32.

    Raises:
        TypeError: `name` is not a string, or `levels` is not a sequence of numbers.
        ValueError: there are not 4, 16 or 256 levels, or they are not finite or not ascending in float32.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> ternary = jq.Codebook("ternary", (-1.0, 0.0, 0.5, 1.0))
        >>> q = jq.quantize(jnp.array([-2.0, 0.5, 0.6, 9.0]), jq.QuantSpec(ternary), range=(-2.0, 2.0))  # 0.5 is a tie
        >>> q.codes, q.dequantize()
        (Array([0, 1, 2, 3], dtype=uint2), Array([-2.,  0.,  1.,  2.], dtype=float32))
    """

    name: str
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the levels and round them to float32."""
        checks.require_type(isinstance(self.name, str), "Codebook", "name", "a string", repr(self.name))
        is_array = isinstance(self.levels, np.ndarray) and self.levels.ndim == 1
        is_sequence = is_array or isinstance(self.levels, list | tuple)
        expected = "a sequence of numbers"
        checks.require_type(is_sequence, "Codebook", "levels", expected, checks.describe_value(self.levels))
        for level in self.levels:
            checks.check_real("Codebook", "levels", level)
        # Round first: two levels that differ only in float64 are not ascending in float32.
        levels = tuple(float(np.float32(level)) for level in self.levels)
        checks.require(len(levels) in _CARRIERS, "Codebook", "levels", "4, 16 or 256 numbers", len(levels))
        is_ascending = all(a < b for a, b in itertools.pairwise(levels))
        checks.require(is_ascending, "Codebook", "levels", "ascending numbers", self.levels)
        object.__setattr__(self, "levels", levels)

    def __repr__(self) -> str:
        """Return the name, because a table may have 256 numbers."""
        return self.name

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes."""
        return _CARRIERS[len(self.levels)]

    @property
    def largest(self) -> float:
        """The largest magnitude of the levels."""
        return max(abs(level) for level in self.levels)

    def encode(self, value: jax.Array) -> jax.Array:
        """Return the code of the nearest level for each float32 value."""
        buckets = _build_buckets(self.levels) if len(self.levels) > _COMPARED else None
        if buckets is not None:
            return _encode_by_lookup(value, buckets).astype(self.carrier)
        # A code is the number of midpoints below the value.
        code = jnp.zeros(value.shape, jnp.int32)
        for middle in _find_midpoints(self.levels):
            code = code + (value > middle).astype(jnp.int32)
        return code.astype(self.carrier)

    def decode(self, codes: jax.Array, first_bit: int | jax.Array = 0) -> jax.Array:
        """Return the float32 level of each code.

        Args:
            codes: integers of any dtype.
            first_bit: the place of a code's lowest bit, an int, or an int32 array of the shape of `codes`, which are
                then uint32. Only codes of up to 4 bits may have other bits beside them.
        """
        if len(self.levels) > 16:
            return _look_up(np.asarray(self.levels, np.float32), codes)
        # XLA:CPU vectorizes a tree of selections by one bit of the code after another, but not a table lookup.
        is_fixed = isinstance(first_bit, int)
        index = codes.astype(jnp.uint8 if is_fixed else jnp.int32)
        entries: list[jax.Array | np.float32] = [np.float32(level) for level in self.levels]
        for bit in range(int(math.log2(len(self.levels)))):
            mask: Any = np.uint8(1 << (first_bit + bit)) if is_fixed else lax.shift_left(np.int32(1), first_bit + bit)
            is_set = (index & mask) != 0
            entries = [jnp.where(is_set, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return jnp.asarray(entries[0])


def _find_midpoints(levels: tuple[float, ...]) -> list[np.float32]:
    """Return the largest float32 numbers that are as near to each level, or nearer, as to the next one."""
    midpoints = []
    for low, high in itertools.pairwise(levels):
        middle = np.float32((low + high) / 2)
        # If float32 rounds the midpoint up, the result is already nearer to `high`: compare with the float below.
        if float(middle) > (low + high) / 2:
            middle = np.nextafter(middle, np.float32(-np.inf))
        midpoints.append(middle)
    return midpoints


class _Buckets(NamedTuple):
    """A table from the first bits of a float to its code, give or take the one midpoint with the same first bits.

    Attributes:
        shift: how many of the last bits the floats of a bucket may differ in.
        start: the first bits, as an order key, of the first bucket.
        codes: for each bucket, the number of midpoints in the buckets before it, uint8.
        midpoints: the order keys of the midpoints, and one more that is above all numbers.
    """

    shift: int
    start: int
    codes: np.ndarray
    midpoints: np.ndarray


@functools.lru_cache(maxsize=64)
def _build_buckets(levels: tuple[float, ...]) -> _Buckets | None:
    """Return the buckets of a codebook of 256 levels, or None if two midpoints are too close for a small table."""
    middle = np.asarray(_find_midpoints(levels), np.float32)
    middle[np.abs(middle) < np.finfo(np.float32).tiny] = 0  # as the values are flushed
    bits = middle.view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    if (np.diff(keys) <= 0).any():  # subnormal levels
        return None
    for shift in range(23, 7, -1):
        first = keys >> shift
        if (np.diff(first) > 0).all():
            start, count = int(first[0]), int(first[-1] - first[0]) + 2
            if count > _MOST_BUCKETS:
                return None
            codes = np.searchsorted(first, np.arange(start, start + count)).astype(np.uint8)
            return _Buckets(shift, start, codes, np.append(keys, 2**31 - 1).astype(np.int32))
    return None


def _encode_by_lookup(value: jax.Array, buckets: _Buckets) -> jax.Array:
    """Return the number of midpoints below each float32 value, int32; 0 for NaN."""
    # Subnormal numbers count as 0, as they do in comparisons of floats on XLA:CPU.
    value = jnp.where(jnp.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)
    key = encode_order(value)
    place = lax.shift_right_arithmetic(key, np.int32(buckets.shift)) - np.int32(buckets.start)
    place = jnp.clip(place, 0, len(buckets.codes) - 1)
    code = _look_up(buckets.codes, place.astype(jnp.uint32))
    code = code.astype(jnp.int32) + (key > _look_up(buckets.midpoints, code)).astype(jnp.int32)
    return jnp.where(jnp.isnan(value), 0, code)


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """Return the entries of a table at unsigned indices, which are in its bounds."""
    place: dict[str, Any] = {"out_sharding": jax.typeof(index).sharding} if sharding.is_placed(index) else {}
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds", **place)


Format = np.dtype | Codebook

nf4 = Codebook(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""4-bit NormalFloat: Dettmers et al., arXiv 2305.14314, appendix E."""


def find_carrier(dtype: Format) -> np.dtype:
    """Return the dtype of the codes: a dtype itself, or the dtype of the indices into a codebook."""
    return dtype.carrier if isinstance(dtype, Codebook) else dtype
