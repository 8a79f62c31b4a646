"""`jax.numpy.concatenate` of quantized arrays: the codes stay as they are, and each keeps its scale and zero point."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._core import checks, granularity
from .._core.dtypes import find_width
from . import indexing, quantized_array
from .quantized_array import QuantizedArray

_NAME = "concatenate"


def concatenate(arrays: Sequence[QuantizedArray], axis: int = 0) -> QuantizedArray:
    """q = the arrays joined along `axis`: their codes, each under the scale and the zero point that it had.

    q.dequantize() is `jax.numpy.concatenate` of what the arrays dequantize to, bit for bit. Along `axis` an array
    counts as blocks: those that it has, or one as long as itself where it shares an entry, or blocks of 1. The result
    has the longest blocks into which all of these can be cut, from its start on, and an entry for each.

    `jax.tree.map(lambda *parts: jnp.concatenate(parts), *arrays)` leaves scales that are read as blocks of one length,
    and gives wrong numbers where the arrays are not equally long, or end in a short block. Along a new axis, with
    `jnp.stack`, joining leaf by leaf is right.

    Args:
        arrays: one or more, of one shape but for `axis`, and of one dtype of the codes, of the scale and of what
            `dequantize` returns; all under the same code book or under none. No zero point counts as zeros, where
            another array has one.
        axis: Static. The dimension along which they are joined, negative from the back.

    Returns:
        A QuantizedArray.

    Raises:
        TypeError: arrays is no list or tuple of QuantizedArrays, axis is no int, or dtypes or code books differ.
        ValueError: there are no arrays, axis is out of range, or shapes do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> query = jq.quantize(jnp.array([[-63.5, 0.25], [0.75, 2.0]]), jq.QuantSpec(jnp.int8))  # scale 0.5, two ties
        >>> key = jq.quantize(jnp.array([[254.0], [-3.0]]), jq.QuantSpec(jnp.int8))  # scale 2, a tie
        >>> q = jq.concatenate([query, key], axis=1)
        >>> q.scale, q.dequantize()
        (Array([[0.5, 2. ]], dtype=float32), Array([[-63.5,   0. , 254. ],
               [  1. ,   2. ,  -4. ]], dtype=float32))

    Source: `jax.numpy.concatenate`.
    """
    is_sequence = isinstance(arrays, list | tuple)
    checks.require_type(is_sequence, _NAME, "arrays", "a list or tuple of QuantizedArrays", type(arrays).__name__)
    checks.require(len(arrays) > 0, _NAME, "arrays", "one array or more", "none")
    checked = [quantized_array.check_array(_NAME, f"arrays[{i}]", q) for i, q in enumerate(arrays)]
    axis = checks.check_axis(_NAME, axis, checked[0].ndim)
    for i, q in enumerate(checked[1:], 1):
        _check_match(f"arrays[{i}]", q, checked[0], axis)
    # What has no elements along the axis has no say in the blocks.
    joined = [q for q in checked if q.shape[axis]] or checked[:1]
    return joined[0] if len(joined) == 1 else _join(_with_zero_points(joined), axis)


def _check_match(argument: str, q: QuantizedArray, first: QuantizedArray, axis: int) -> None:
    """Requires an array that can be joined to the first one."""
    dtypes = (
        ("codes", q.codes.dtype, first.codes.dtype),
        ("scale", q.scale.dtype, first.scale.dtype),
        ("dtype", q.dtype, first.dtype),
        ("codebook", q.codebook, first.codebook),
    )
    for name, got, expected in dtypes:
        if got != expected:
            checks.require_type(False, _NAME, f"{argument}.{name}", f"{expected}, that of arrays[0]", got)
    lengths = tuple(n for a, n in enumerate(q.shape) if a != axis)
    if q.ndim != first.ndim or lengths != tuple(n for a, n in enumerate(first.shape) if a != axis):
        expected = f"the shape of arrays[0], {first.shape}, but for axis {axis}"
        checks.require(False, _NAME, argument, expected, f"shape {q.shape}")


def _with_zero_points(arrays: list[QuantizedArray]) -> list[QuantizedArray]:
    """Returns the arrays with a zero point of 0 where another one has any."""
    if all(q.zero_point is None for q in arrays):
        return arrays
    return [
        q.replace(zero_point=jnp.zeros((1,) * q.ndim, q.codes.dtype)) if q.zero_point is None else q for q in arrays
    ]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The scale of an array, or its zero point.

    Attributes:
        entries: the numbers.
        sizes: how many indices of each dimension share an entry.
        lengths: the shape of the codes.
    """

    entries: jax.Array
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    def is_shared(self, dim: int) -> bool:
        """Whether a dimension has a single entry."""
        return self.entries.shape[dim] == 1

    def cut(self, sizes: tuple[int, ...]) -> jax.Array:
        """Returns the entries for shorter blocks, 0 for a dimension that stays shared."""
        entries = self.entries
        for dim, size in enumerate(sizes):
            count = -(-self.lengths[dim] // size) if size else 1
            if entries.shape[dim] != count:
                repeats = count if self.is_shared(dim) else self.sizes[dim] // size
                entries = indexing.expand_blocks(entries, dim, repeats, count)
        return entries


def _join(arrays: list[QuantizedArray], axis: int) -> QuantizedArray:
    names = [name for name in ("scale", "zero_point") if getattr(arrays[0], name) is not None]
    parts = {name: [_read_part(q, getattr(q, name)) for q in arrays] for name in names}
    values = _concatenate([q.codes for q in arrays], axis)
    sizes = {name: _find_sizes(each, axis) for name, each in parts.items()}
    sizes, block_size = _reconcile(sizes, values.shape)
    joined = {name: _concatenate([part.cut(sizes[name]) for part in each], axis) for name, each in parts.items()}
    return arrays[0].replace(codes=values, block_size=block_size, **joined)


def _concatenate(parts: list[jax.Array], axis: int) -> jax.Array:
    """Returns the parts joined; codes of 2 bits by way of int8, for XLA:CPU ends the process where it joins them."""
    dtype = parts[0].dtype
    if find_width(dtype) > 2:
        return jnp.concatenate(parts, axis)
    return jnp.concatenate([part.astype(jnp.int8) for part in parts], axis).astype(dtype)


def _read_part(q: QuantizedArray, entries: jax.Array) -> _Part:
    sizes = granularity.Aligned(q.block_size).sizes(entries.shape, q.shape)
    assert sizes is not None
    return _Part(entries, sizes, q.shape)


def _find_sizes(parts: list[_Part], axis: int) -> tuple[int, ...]:
    """Returns the longest blocks of each dimension into which the blocks of all parts can be cut; 0 where all of
    them share an entry. Along `axis` the blocks of one part begin where the one before it ends.
    """
    sizes = [math.gcd(*(0 if p.is_shared(d) else p.sizes[d] for p in parts)) for d in range(len(parts[0].sizes))]
    sizes[axis] = math.gcd(sizes[axis], *(part.lengths[axis] for part in parts[:-1]))
    return tuple(sizes)


def _reconcile(
    sizes: dict[str, tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Returns block sizes that one array can have, and the one that it stores: where a last block is short, all blocks
    have to be of that size.
    """
    blocks = {(size, n) for each in sizes.values() for size, n in zip(each, shape, strict=True) if 1 < size < n}
    lengths = {size for size, _ in blocks}
    if len(lengths) < 2:
        return sizes, next(iter(lengths), None)
    if not any(n % size for size, n in blocks):
        return sizes, None
    size = math.gcd(*lengths)
    cut = {
        name: tuple(size if 1 < s < n else s for s, n in zip(each, shape, strict=True)) for name, each in sizes.items()
    }
    return cut, size if size > 1 else None
