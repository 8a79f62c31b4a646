"""A batch as the slices that share a range, and the least and the largest value of each. Knows nothing of states.

Floats are compared by their bits, as integers: XLA:CPU's own minima and maxima lose a NaN in long arrays, and a sum of
denormal numbers is 0 to it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, dtypes, entry_point, granularity, min_max, sharding

_FIRST, _LAST = np.int32(-(2**31)), np.int32(2**31 - 1)
_FOLDED = 2**14  # elements that stay in the cache


def find_sizes(x: Any, shape: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """Returns how many indices of each dimension share a range."""
    found = granularity.Aligned(block).sizes(shape, x.shape)
    assert found is not None
    return found


def count_members(x: Any, shape: tuple[int, ...], block: int | None) -> np.ndarray:
    """Returns how many elements each slice has, int64; the last blocks may be short."""
    counts = np.ones(shape, np.int64)
    for axis, (size, n) in enumerate(zip(find_sizes(x, shape, block), x.shape, strict=True)):
        run = np.minimum(size, n - size * np.arange(shape[axis], dtype=np.int64))
        counts *= run.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return counts


def is_padded(x: Any, shape: tuple[int, ...], block: int | None) -> bool:
    """Whether a block is short."""
    return any(s * e != n for s, e, n in zip(find_sizes(x, shape, block), shape, x.shape, strict=True))


def arrange_slices(x: jax.Array, shape: tuple[int, ...], block: int | None, fill: Any) -> jax.Array:
    """Returns x as (before, slices, after): a slice is what lies before and after its index, in the order of x.

    Nothing is moved where the kept dimensions are neighbours. Short blocks are filled up with `fill`.
    """
    lengths: list[int] = []
    kept: list[bool] = []
    extra = []
    for size, entries, n in zip(find_sizes(x, shape, block), shape, x.shape, strict=True):
        extra.append((0, size * entries - n, 0))
        lengths += [entries, size]
        kept += [True, False]
    if any(high for _, high, _ in extra):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), extra)
    there = [(n, k) for n, k in zip(lengths, kept, strict=True) if n != 1]
    x = x.reshape([n for n, _ in there])
    keeps = [k for _, k in there]
    first = keeps.index(True) if any(keeps) else 0
    last = len(keeps) - keeps[::-1].index(True) if any(keeps) else 0
    if not all(keeps[first:last]):
        order = [a for a, k in enumerate(keeps) if k] + [a for a, k in enumerate(keeps) if not k]
        x, first, last = x.transpose(order), 0, sum(keeps)
    before, slices, after = (math.prod(x.shape[i:j]) for i, j in ((0, first), (first, last), (last, x.ndim)))
    return x.reshape(before, slices, after)


def find_slice_extremes(x: jax.Array, shape: tuple[int, ...], block: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns the least and the largest value of each slice, float32 of the given shape, exactly.

    A slice with a NaN has two; one without elements has (inf, -inf).
    """
    if x.size == 0:
        return jnp.full(shape, np.float32(np.inf)), jnp.full(shape, np.float32(-np.inf))
    x = sharding.place_whole(x)  # what follows cuts across it
    if is_padded(x, shape, block):
        keys = min_max.encode_order(x)
        parts = (arrange_slices(keys, shape, block, _LAST), arrange_slices(keys, shape, block, _FIRST))
    elif math.prod(shape) == 1:
        # As it lies: of a flat x XLA:CPU takes each index apart again in the loop that makes x, 20 times slower.
        low, high = lax.reduce(
            tuple(_find_slice_ends((x,))), (_LAST, _FIRST), min_max.merge_min_max, tuple(range(x.ndim))
        )
        low, high = min_max.find_ends(low, high)
        return low.reshape(shape), high.reshape(shape)
    else:
        parts = (arrange_slices(x, shape, block, 0),)
    columns = parts[0].shape[0] > 1 and parts[0].shape[2] == 1
    low, high = lax.platform_dependent(*parts, cpu=_fold_slices if columns else _reduce_slices, default=_reduce_slices)
    low, high = min_max.find_ends(low, high)
    return low.reshape(shape), high.reshape(shape)


def _find_slice_ends(parts: Any) -> list[jax.Array]:
    """Returns the keys to take the least of, and those to take the largest of: one array for both, or one each."""
    return [part if part.dtype == np.int32 else min_max.encode_order(part) for part in (parts[0], parts[-1])]


def _reduce_slices(*parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    # One reduction of both: XLA reads the batch once. Of one alone, on integers, it makes a loop without vectors.
    low, high = lax.reduce(tuple(_find_slice_ends(parts)), (_LAST, _FIRST), min_max.merge_min_max, (0, 2))
    return low, high


def _fold_slices(*parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same where a slice is a column, which XLA:CPU would reduce element by element."""
    rows, columns, _ = parts[0].shape
    wide = math.gcd(rows, 2 ** max(0, (1024 // columns).bit_length() - 1))  # rows are laid side by side until long
    rows = rows // wide
    flat = [part.reshape(rows, wide * columns) for part in parts]
    some = max(1, min(rows, _FOLDED // (wide * columns)))

    def step(i: Any, found: Any) -> tuple[jax.Array, jax.Array]:
        return min_max.merge_min_max(
            found, _find_slice_ends([lax.dynamic_slice_in_dim(part, i * some, some) for part in flat])
        )

    first = tuple(_find_slice_ends([part[:some] for part in flat]))
    found = lax.fori_loop(1, -(-rows // some), step, first)  # the last step overlaps; no harm
    low, high = (v.reshape(some * wide, columns) for v in found)
    return jnp.min(low, axis=0), jnp.max(high, axis=0)


def check_floats(function: str, argument: str, value: Any) -> jax.Array:
    """Requires a batch of floats and returns it as JAX's."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()  # a flax.nnx.Param, for one
    value = entry_point.convert_number(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64:
        value = value.astype(np.float32)  # as JAX takes it
    (value,) = entry_point.convert_arrays(function, {argument: value})
    checks.check_array(function, argument, value, dtypes.FLOATS)
    return lax.stop_gradient(value)
