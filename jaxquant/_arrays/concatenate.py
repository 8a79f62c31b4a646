"""`jax.numpy.concatenate` for quantized arrays, which keep their codes, scales and zero points."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks, granularity
from .._core.dtypes import INTEGERS, count_packed_bits
from . import indexing, quantized_array
from .parts import StoredOrder, match_dimensions, widen_zero_point
from .quantized_array import QuantizedArray

# Nothing tells whether two permutations are the same.
_NAME, _SUPPORTS = "concatenate", tuple(form for form in quantized_array.FORMS if form != "permutation")


def concatenate(arrays: Sequence[QuantizedArray], axis: int = 0) -> QuantizedArray:
    """Return quantized arrays joined along an axis, as `jaxquant.concatenate` documents it."""
    checked = check_arrays(arrays, axis)
    axis = axis % checked[0].ndim
    # An array of length 0 along the axis must not influence the block size.
    nonempty = [q for q in checked if q.shape[axis]] or checked[:1]
    if len(nonempty) == 1:
        return nonempty[0]
    # A jitted function would transpose the codes of a lazy transpose, so it gets the order in memory.
    stored = [quantized_array.check_array(_NAME, "arrays", q, supports=_SUPPORTS) for q in nonempty]
    joined = _join_arrays(_add_zero_points(stored), axis=axis)
    is_lazy = any(q._is_lazy for q in nonempty)
    return joined._with_stored(joined.stored_codes, joined.stored_order, is_lazy=is_lazy)


def check_arrays(arrays: Any, axis: int) -> list[QuantizedArray]:
    """Return arrays that can be joined along an axis, after checking them."""
    is_sequence = isinstance(arrays, list | tuple)
    checks.require_type(is_sequence, _NAME, "arrays", "a list or tuple of QuantizedArrays", type(arrays).__name__)
    checks.require(len(arrays) > 0, _NAME, "arrays", "one or more arrays", "none")
    checked = [quantized_array.check_lazy(_NAME, f"arrays[{i}]", q, supports=_SUPPORTS) for i, q in enumerate(arrays)]
    dimension = checks.check_axis(_NAME, axis, checked[0].ndim)
    for i, q in enumerate(checked[1:], 1):
        _check_match(f"arrays[{i}]", q, checked[0], dimension)
    # Integers are as wide as the codes, or wider if the codes are in words.
    points = [
        (i, q.zero_point.dtype if "real_zero_point" in quantized_array.list_forms(q) else _read_carrier(q))
        for i, q in enumerate(checked)
        if q.zero_point is not None
    ]
    for i, dtype in points:
        expected = f"{points[0][1]}, as in arrays[{points[0][0]}]"
        checks.require_type(dtype == points[0][1], _NAME, f"arrays[{i}].zero_point", expected, dtype)
    return checked


def _check_match(argument: str, q: QuantizedArray, first: QuantizedArray, axis: int) -> None:
    """Check that an array can be joined to the first one."""
    # These must match exactly, because joining must not convert codes or scales.
    properties = (
        ("codebook", q.codebook, first.codebook),
        ("codes", q.format, first.format),
        ("scale", q.scale.dtype, first.scale.dtype),
        ("dtype", q.dtype, first.dtype),
    )
    for name, got, expected in properties:
        if got != expected:
            checks.refuse_type(_NAME, f"{argument}.{name}", f"{expected}, as in arrays[0]", got)
    for name in ("signed_scale", "inverse_scale", "arithmetic"):
        got, needed = getattr(q, name), getattr(first, name)
        checks.require(got == needed, _NAME, f"{argument}.{name}", f"{needed}, as in arrays[0]", got)
    for name in ("scale", "offset"):
        part, other = getattr(q, name), getattr(first, name)
        kinds = [None if p is None else type(p) if isinstance(p, QuantizedArray) else jax.Array for p in (part, other)]
        expected = f"{checks.describe_value(other)}, as in arrays[0]"
        checks.require(kinds[0] == kinds[1], _NAME, f"{argument}.{name}", expected, checks.describe_value(part))
        if isinstance(part, QuantizedArray):
            is_same = _describe_nested(part) == _describe_nested(other)
            checks.require(is_same, _NAME, f"{argument}.{name}", expected, checks.describe_value(part))
        elif name == "offset" and part is not None:
            checks.require_type(part.dtype == other.dtype, _NAME, f"{argument}.{name}", expected, part.dtype)
    lengths = tuple(n for a, n in enumerate(q.shape) if a != axis)
    if q.ndim != first.ndim or lengths != tuple(n for a, n in enumerate(first.shape) if a != axis):
        expected = f"the shape of arrays[0], {first.shape}, except along axis {axis}"
        checks.refuse(_NAME, argument, expected, f"shape {q.shape}")


def _describe_nested(q: QuantizedArray) -> tuple[Any, ...]:
    """Return what scales or offsets that are quantized themselves must have in common to be joined."""
    zero_point = q.zero_point.dtype if "real_zero_point" in quantized_array.list_forms(q) else None
    return q.format, q.scale.dtype, q.signed_scale, q.inverse_scale, q.arithmetic, q.offset is None, zero_point


def _read_carrier(q: QuantizedArray) -> np.dtype:
    """Return the dtype of the codes, unpacked."""
    return np.dtype(q.stored_codes.dtype) if q.packing is None else q.packing.carrier


def _add_zero_points(arrays: list[QuantizedArray]) -> list[QuantizedArray]:
    """Return the arrays, all of them with a zero point if any of them has one."""
    dtype = next((q.zero_point.dtype for q in arrays if q.zero_point is not None), None)
    if dtype is None:
        return arrays

    def make_zeros(q: QuantizedArray) -> jax.Array:
        own = dtype
        if dtype in INTEGERS:  # as wide as the codes, or wider if the codes are in words
            own = _read_carrier(q) if q.packing is None else widen_zero_point(q.packing.carrier)
        return jnp.zeros((1,) * q.ndim, own)

    return [q.replace(zero_point=make_zeros(q)) if q.zero_point is None else q for q in arrays]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The scale, the zero point or the offset of an array.

    Attributes:
        entries: its elements, an array or a QuantizedArray.
        sizes: the number of indices that share an entry, for each dimension.
        lengths: the shape of the codes.
    """

    entries: Any
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    def is_shared(self, dim: int) -> bool:
        """Return whether all indices of a dimension share one entry."""
        return self.entries.shape[dim] == 1

    def cut_blocks(self, sizes: tuple[int, ...]) -> Any:
        """Return the entries repeated for blocks of the given sizes; a size of 0 keeps a dimension shared."""
        entries = self.entries
        for dim, size in enumerate(sizes):
            count = -(-self.lengths[dim] // size) if size else 1
            if entries.shape[dim] != count:
                # A shared entry is repeated for every block; a longer block is divided into several shorter ones.
                repeats = count if self.is_shared(dim) else self.sizes[dim] // size
                entries = indexing.expand_part(entries, dim, repeats, count)
        return entries


# One compiled program joins all parts, which makes an eager call several times faster.
@functools.partial(jax.jit, inline=True, static_argnames=("axis",))
def _join_arrays(arrays: list[QuantizedArray], *, axis: int) -> QuantizedArray:
    """Return two or more checked arrays joined along an axis."""
    packings = [q.packing for q in arrays]
    if not _has_rows_of_words(arrays, axis):
        joined = _join_arrays([quantized_array.unpack_checked(q) for q in arrays], axis=axis)
        packing = packings[0] if all(packings) else None
        return joined if packing is None else quantized_array.pack_checked(joined, packing.format)
    names = list(indexing.list_entries(arrays[0]))
    parts = {name: [_read_part(q, getattr(q, name)) for q in arrays] for name in names}
    codes, order = _concatenate_codes(arrays, axis)
    # The scale and the zero point may need different block sizes, but an array stores only one.
    sizes = {name: _match_block_sizes(each, axis) for name, each in parts.items()}
    length = sum(q.shape[axis] for q in arrays)
    sizes, block_size = _unify_sizes(sizes, (*arrays[0].shape[:axis], length, *arrays[0].shape[axis + 1 :]))
    joined = {
        name: _join_entries([part.cut_blocks(sizes[name]) for part in each], axis) for name, each in parts.items()
    }
    return arrays[0].replace(block_size=block_size, **joined)._with_stored(codes, order)


def _has_rows_of_words(arrays: list[QuantizedArray], axis: int) -> bool:
    """Return whether the stored codes of arrays can be joined as they are: no words, or rows of words."""
    if all(q.packing is None for q in arrays):
        return True
    order = arrays[0].stored_order
    is_same = all(q.packing is not None and q.stored_order == order for q in arrays)
    return is_same and match_dimensions(order, arrays[0].ndim)[axis] != arrays[0].ndim - 1


def cut_for_join(q: QuantizedArray, axis: int, count: int) -> QuantizedArray:
    """Return a checked array with its scale and zero point cut so that they fit after a join of equal shapes.

    Joining the codes, the scales and the zero points of `count` such arrays along the axis then gives one array, with
    the block size of the result. Devices that hold one array each can so prepare their own.
    """
    if not q.shape[axis]:
        return q
    parts = {name: _read_part(q, part) for name, part in indexing.list_entries(q).items()}
    sizes = {name: _match_block_sizes([part] * count, axis) for name, part in parts.items()}
    joined = (*q.shape[:axis], q.shape[axis] * count, *q.shape[axis + 1 :])
    sizes, block_size = _unify_sizes(sizes, joined)
    entries = {name: part.cut_blocks(sizes[name]) for name, part in parts.items()}
    return q.replace(block_size=block_size, **entries)


def _concatenate_codes(arrays: list[QuantizedArray], axis: int) -> tuple[jax.Array, StoredOrder]:
    """Return the stored codes of arrays joined along an axis, and their order: the arrays' own if all have one."""
    order = arrays[0].stored_order
    if any(q.stored_order != order for q in arrays):
        return _concatenate_parts([q.codes for q in arrays], axis), None
    dimension = match_dimensions(order, arrays[0].ndim)[axis]
    return _concatenate_parts([q.stored_codes for q in arrays], dimension), order


def _join_entries(entries: list[Any], axis: int) -> Any:
    """Return scales, zero points or offsets joined along an axis."""
    if isinstance(entries[0], QuantizedArray):
        return _join_arrays(_add_zero_points(entries), axis=axis)
    return _concatenate_parts(entries, axis)


def _concatenate_parts(parts: list[jax.Array], axis: int) -> jax.Array:
    """Return arrays joined along an axis."""
    dtype = parts[0].dtype
    # XLA:CPU aborts the process if it joins arrays of 2-bit elements.
    if count_packed_bits(dtype) > 2:
        return jnp.concatenate(parts, axis)
    return jnp.concatenate([part.astype(jnp.int8) for part in parts], axis).astype(dtype)


def _read_part(q: QuantizedArray, entries: Any) -> _Part:
    """Return a scale, zero point or offset of q with the sizes of its blocks."""
    sizes = granularity.Aligned(q.block_size).sizes(entries.shape, q.shape)
    assert sizes is not None
    return _Part(entries, sizes, q.shape)


def _match_block_sizes(parts: list[_Part], axis: int) -> tuple[int, ...]:
    """Return, for each dimension, the longest block size that divides the blocks of all parts evenly.

    It is 0 for a dimension that all parts share. Along `axis` a part begins where the previous one ends, so the block
    size must divide the lengths of all parts but the last, too.
    """
    sizes = [math.gcd(*(0 if p.is_shared(d) else p.sizes[d] for p in parts)) for d in range(len(parts[0].sizes))]
    sizes[axis] = math.gcd(sizes[axis], *(part.lengths[axis] for part in parts[:-1]))
    return tuple(sizes)


def _unify_sizes(
    sizes: dict[str, tuple[int, ...]], shape: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Return block sizes that a single array can have, and the block size that it stores.

    If a last block is short, all blocks must have the stored size.
    """
    # A size of 0, of 1 or of the whole dimension is not a block: the shape alone says how entries are shared.
    blocks = {(size, n) for each in sizes.values() for size, n in zip(each, shape, strict=True) if 1 < size < n}
    lengths = {size for size, _ in blocks}
    if len(lengths) < 2:
        return sizes, next(iter(lengths), None)
    # Without a short block the shapes tell the sizes, so no size is stored and the sizes may differ.
    if not any(n % size for size, n in blocks):
        return sizes, None
    # The common divisor divides the blocks of every dimension evenly. If it is 1, each index gets its own entry.
    size = math.gcd(*lengths)
    cut = {
        name: tuple(size if 1 < s < n else s for s, n in zip(each, shape, strict=True)) for name, each in sizes.items()
    }
    return cut, size if size > 1 else None
