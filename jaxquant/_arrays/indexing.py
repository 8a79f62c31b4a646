"""Indexing, reshaping and transposing of quantized arrays, which applies to codes, scales and zero points together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._core import checks, entry_point, granularity, sharding
from .parts import Packing, StoredOrder, derive_permutation, derive_transposed_order, pack_codes

if TYPE_CHECKING:
    from .quantized_array import QuantizedArray

_ITEM = "QuantizedArray.__getitem__"
_RESHAPE = "QuantizedArray.reshape"
_PER_INDEX = "QuantizedArray.per_index"
_TRANSPOSE = "QuantizedArray.transpose"


# A scale or an offset, which may be quantized itself, or a zero point.
Part = Any
_ENTRIES = ("scale", "zero_point", "offset")


def list_entries(q: QuantizedArray) -> dict[str, Part]:
    """Return the parts of an array that have entries for its codes, by name: the scale, and others that it has."""
    return {name: getattr(q, name) for name in _ENTRIES if getattr(q, name) is not None}


def _is_nested(part: Part) -> bool:
    return not isinstance(part, jax.Array)


def list_block_sizes(q: QuantizedArray) -> list[int]:
    """Return the length of the blocks of each dimension; 1 without blocks, or where parts have blocks of two lengths.

    The latter divide the dimension evenly, so that their length need not be stored.
    """
    sizes: list[set[int]] = [set() for _ in q.shape]
    for part in list_entries(q).values():
        for axis in _list_block_dims(part, q.shape):
            sizes[axis].add(_derive_run_lengths(q, part)[axis])
    return [next(iter(each)) if len(each) == 1 else 1 for each in sizes]


def expand_part(part: Part, axis: int, size: int, length: int) -> Part:
    """Return a part with one entry per index of an axis on which each entry covers `size` indices.

    The entries of a part that is quantized itself are repeated as codes, and their blocks become longer.
    """
    if not _is_nested(part):
        return granularity.expand_blocks(part, axis, size, length)
    sizes, inner = list_block_sizes(part), list_entries(part)
    runs = {name: _derive_run_lengths(part, p)[axis] for name, p in inner.items() if p.shape[axis] != 1}
    codes = granularity.expand_blocks(part.codes, axis, size, length)
    if len(set(runs.values())) > 1:  # blocks of two lengths, which may not both divide the new length
        for name, run in runs.items():
            inner[name] = granularity.expand_blocks(inner[name], axis, run * size, length)
        sizes[axis] = 1
    elif runs:
        sizes[axis] = size * next(iter(runs.values()))
    block_size = granularity.shorten_block_size(tuple(sizes))
    return part.replace(codes=codes, block_size=block_size, stored_order=None, **inner)


def _derive_run_lengths(q: QuantizedArray, part: Part) -> tuple[int, ...]:
    """Return how many indices of each dimension share an entry of a scale or zero point."""
    sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
    assert sizes is not None
    return sizes


def _list_block_dims(part: Part, shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions in which a scale or zero point has one entry per block."""
    return [a for a, (n, length) in enumerate(zip(part.shape, shape, strict=True)) if n not in (1, length)]


def index_array(
    q: QuantizedArray, index: object, out_sharding: NamedSharding | PartitionSpec | None = None
) -> QuantizedArray:
    """Return the elements that an index selects, with their entries of scale and zero point; q has been checked.

    An out_sharding applies to the selected codes; the scale and the zero point are then replicated.
    """
    items = _read_items(q.shape, index)
    if (sides := _split_between_arrays(q.ndim, index)) is not None:
        # A new dimension, which is dropped again, parts arrays as an ellipsis that stands for no dimension does.
        before, behind = sides
        kept = sum(item is None or isinstance(item, slice) for item in behind)
        return index_array(index_array(q, (*before, None, *behind)), (..., 0, *[slice(None)] * kept))
    if q.permutation is not None:
        return _index_permuted(q, items, out_sharding)
    parts = list_entries(q)
    # If the blocks divide their dimension evenly, q stores no block size. The result needs one, because its last block
    # may be short.
    own, has_arrays = list_block_sizes(q), not all(item is None or isinstance(item, int | slice) for item in items)
    lengths = {size for size in own if size != 1}
    stored: list[int | None]
    block_size: Any
    is_single = len(lengths) < 2 and not isinstance(q.block_size, tuple)
    if is_single:
        block_size = q.block_size or (lengths.pop() if lengths else None)
        stored = [block_size] * q.ndim
    else:
        # Behind arrays of indices a dimension may have another place. Then only whole blocks are kept.
        stored = [None if has_arrays or size == 1 else size for size in own]
        block_size = None if has_arrays else _select_block_sizes(stored, items)
    codes, order, packing = _index_codes(q, items, out_sharding)
    replicated = None if out_sharding is None else sharding.set_partition(out_sharding, ())
    entries = {name: _index_entries(q, part, items, stored, replicated) for name, part in parts.items()}
    new = q.replace(**entries)._with_stored(codes, order, is_lazy=q._is_lazy, packing=packing)
    has_blocks = any(_list_block_dims(p, new.shape) for p in entries.values())
    return new.replace(block_size=block_size if has_blocks else q.block_size if is_single else None)


def _select_block_sizes(sizes: Sequence[int | None], items: list[Any]) -> granularity.BlockSize:
    """Return the block sizes of the dimensions that slices and new dimensions leave."""
    rest, kept = iter(sizes), []
    for item in items:
        if item is None:
            kept.append(1)
        elif (size := next(rest)) is not None and isinstance(item, slice):
            kept.append(size)
        elif isinstance(item, slice):
            kept.append(1)
    return granularity.shorten_block_size(tuple(kept))


def _index_permuted(
    q: QuantizedArray, items: list[Any], out_sharding: NamedSharding | PartitionSpec | None
) -> QuantizedArray:
    """Return the elements that an index selects of an array with a permutation."""
    assert q.permuted_axis is not None
    place, permutation = q.ndim + q.permuted_axis, q.permutation
    of_axis = [i for i, item in enumerate(items) if item is not None]
    item = items[of_axis[place]]
    is_whole = isinstance(item, slice) and item.indices(q.shape[place]) == (0, q.shape[place], 1)
    plain = q.replace(permutation=None, permuted_axis=None)
    before = [items[i] for i in of_axis[:place]]
    if permutation.ndim > 1:
        # One permutation for each index of the first axes, which must be selected together with the codes.
        count = permutation.ndim - 1
        is_simple = all(isinstance(other, int | slice) for other in items)
        expected = "ints and slices, and all of the permuted axis, because the array has several permutations"
        checks.require(is_whole and is_simple, _ITEM, "index", expected, checks.describe_value(items))
        rows = []
        for n, other in zip(permutation.shape[:count], before, strict=False):
            shared = slice(None) if isinstance(other, slice) else 0
            rows.append(shared if n == 1 else other)
        permutation = permutation[tuple(rows)]
    elif not is_whole:
        # The elements are selected by their stored positions, and are then in the order of the index.
        positions, front, behind = jnp.argsort(permutation), items[: of_axis[place]], items[of_axis[place] + 1 :]
        if isinstance(item, slice):
            # On its own, because an array of indices would be matched with other arrays among the items.
            plain = index_array(plain, (*(slice(None),) * place, positions[item]))
            return index_array(plain, (*front, slice(None), *behind), out_sharding)
        selected = positions[item if isinstance(item, int) else _wrap_negative(item, q.shape[place])]
        return index_array(plain, (*front, selected, *behind), out_sharding)
    new = index_array(plain, tuple(items), out_sharding)
    is_simple = all(other is None or isinstance(other, int | slice) for other in items)
    later = items[of_axis[place] + 1 :]
    if not is_simple:
        # Arrays of indices in front of the axis, or behind it, leave its dimension where it is counted from one end.
        arrays = [i for i, other in enumerate(items) if not (other is None or isinstance(other, int | slice))]
        is_apart = arrays[-1] < of_axis[place] or arrays[0] > of_axis[place]
        is_joined = all(not (items[i] is None or isinstance(items[i], slice)) for i in range(arrays[0], arrays[-1] + 1))
        expected = "arrays of indices on one side of the permuted axis, side by side"
        checks.require(is_apart and is_joined, _ITEM, "index", expected, checks.describe_value(items))
        if arrays[0] > of_axis[place]:
            behind = new.ndim - sum(other is None or isinstance(other, slice) for other in items[: of_axis[place]]) - 1
            return new.replace(permutation=permutation, permuted_axis=-behind - 1)
    behind = sum(other is None or isinstance(other, slice) for other in later)
    return new.replace(permutation=permutation, permuted_axis=-behind - 1)


def cut_codes(q: QuantizedArray, starts: Sequence[jax.Array], sizes: Sequence[int]) -> QuantizedArray:
    """Return an array with a part of its codes along each dimension, from starts that the program computes.

    The codes stay as they are stored, in words too, unless a dimension that is cut is moved by the stored order, or its
    codes share words. XLA:CPU does not fuse other ways to read words with a slice: it would read all of them.

    Args:
        q: an array whose scale, zero point and offset are those of the part already.
        starts: the first index of each dimension, as the primitive `dynamic_slice` takes it. A negative one stands for
            0, because the program itself counts from the end.
        sizes: the length of each dimension of the part.
    """
    moved = q._order or ()
    in_words = () if q.packing is None else (moved[-1] % q.ndim if moved else q.ndim - 1,)
    cut = [axis for axis, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    if any(axis >= q.ndim - len(moved) or axis in in_words for axis in cut):
        codes = lax.dynamic_slice(q.codes, starts, sizes, allow_negative_indices=False)
        return q.replace(codes=codes, stored_order=None)
    zeros = [jnp.zeros_like(start) for start in starts]
    places = [start if axis in cut else zero for axis, (start, zero) in enumerate(zip(starts, zeros, strict=True))]
    lengths = [sizes[axis] if axis in cut else n for axis, n in enumerate(q._stored.shape)]
    stored = lax.dynamic_slice(q._stored, places, lengths, allow_negative_indices=False)
    return q._with_stored(stored, q._order, is_lazy=q._is_lazy)


def _index_codes(
    q: QuantizedArray, items: list[Any], out_sharding: NamedSharding | PartitionSpec | None
) -> tuple[jax.Array, StoredOrder, Packing | None]:
    """Return the stored codes that an index selects, their order and their packing."""
    moved = q._order or ()
    start = len(items) - len(moved)
    # The words of a row are selected as a whole.
    last = moved[-1] if moved else -1
    is_whole = q.packing is None or (isinstance(items[last], slice) and items[last].indices(q.shape[last]) == (
        0, q.shape[last], 1,
    ))  # fmt: skip
    words = items if q.packing is None else [*items]
    if q.packing is not None and is_whole:
        words[last] = slice(None)
    # Slices keep all the axes that the order moves; after any other index into them the codes are in logical order.
    if moved and out_sharding is None and all(isinstance(item, slice) for item in items[start:]) and is_whole:
        return _index_part(q._stored, [*words[:start], *(words[axis] for axis in moved)], None), moved, q.packing
    if q.packing is None or (is_whole and not moved):
        stored = q.codes if q.packing is None else q._stored
        return _index_part(stored, words, out_sharding), None, q.packing
    return _pack_again(q, _index_part(q.codes, items, out_sharding))


def _pack_again(q: QuantizedArray, codes: jax.Array) -> tuple[jax.Array, None, Packing | None]:
    """Return codes in the logical order as they are stored, packed if q is; a single code is not packed."""
    if q.packing is None or not codes.ndim:
        return codes, None, None
    packing = Packing(q.packing.format, codes.shape[-1])
    return pack_codes(codes, packing), None, packing


def _index_part(part: jax.Array, items: Sequence[Any], out_sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """Return the elements of one array that an index selects."""
    return part[tuple(items)] if out_sharding is None else part.at[tuple(items)].get(out_sharding=out_sharding)


def _read_items(shape: tuple[int, ...], index: object) -> list[Any]:
    """Return an index as a list with one item for each dimension of the array and a None for each new dimension."""
    items = [_read_item(item) for item in (index if isinstance(index, tuple) else (index,))]
    rest = len(shape) - sum(_count_dimensions(item) for item in items)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    checks.require(len(dots) <= 1, _ITEM, "index", "at most one ellipsis", index)
    expected = f"at most {len(shape)} dimensions, the rank of the array"
    checks.require(rest >= 0, _ITEM, "index", expected, len(shape) - rest)
    dots_at = dots[0] if dots else len(items)
    # Replace the ellipsis, or the missing end of the index, by full slices.
    items = [*items[:dots_at], *[slice(None)] * rest, *items[dots_at + len(dots) :]]
    axis, indices = 0, []
    for item in items:
        if isinstance(item, int) and not -shape[axis] <= item < shape[axis]:
            expected = f"an int in [{-shape[axis]}, {shape[axis] - 1}] for dimension {axis}"
            raise IndexError(checks.format_message(_ITEM, "index", expected, item))
        indices += _convert_mask(item, shape[axis : axis + _count_dimensions(item)])
        axis += _count_dimensions(item)
    return indices


def _split_between_arrays(ndim: int, index: object) -> tuple[list[Any], list[Any]] | None:
    """Return the items on both sides of an ellipsis that stands for no dimension, if it parts arrays of indices.

    The dimensions of such arrays come first. As in numpy, ints beside arrays count as arrays.
    """
    items = [_read_item(item) for item in index] if isinstance(index, tuple) else []
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if not dots or sum(_count_dimensions(item) for item in items) < ndim:
        return None
    before, behind = items[: dots[0]], items[dots[0] + 1 :]
    is_parted = all(side and not (side[0] is None or isinstance(side[0], slice)) for side in (before[::-1], behind))
    return (before, behind) if is_parted and any(isinstance(i, jax.Array | np.ndarray) for i in items) else None


def _is_mask(item: object) -> bool:
    """Return whether an item is an array of bools."""
    return isinstance(item, jax.Array | np.ndarray) and item.dtype.kind == "b"


def _count_dimensions(item: Any) -> int:
    """Return how many dimensions of the array an item indexes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _convert_mask(item: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the items that replace one item: an array of indices for each dimension of a mask, or the item itself."""
    if not _is_mask(item):
        return [item]
    if item.shape != shape:
        expected = f"a mask of shape {shape}, the shape of the dimensions that it indexes"
        raise IndexError(checks.format_message(_ITEM, "index", expected, f"shape {item.shape}"))
    return [np.asarray(i, np.int32) for i in np.nonzero(np.asarray(item))]


def _read_item(index: object) -> Any:
    """Return one item of an index as an int, a slice, None, an ellipsis or an array, after checking it."""
    item: Any = _convert_list(index) if isinstance(index, list) else index
    if item is None or item is Ellipsis:
        return item
    if isinstance(item, slice):
        for bound in (item.start, item.stop, item.step):
            if bound is not None:
                checks.check_integer(_ITEM, "index", bound)
        return item
    # A bool is an int in Python, but as an index it is a mask.
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return int(item)
    return _convert_index(item)


def _convert_list(numbers: list[Any]) -> np.ndarray:
    """Return a list of integers or bools as an array; an empty list becomes an array of integers."""
    try:
        item = np.asarray(numbers or np.zeros(0, np.int32))
    except ValueError:  # numpy refuses rows of different lengths
        checks.refuse(_ITEM, "index", "a list whose rows have the same length", numbers)
        raise
    # numpy converts integers that are too large for its integer dtypes to objects or floats.
    if item.dtype.kind in "Of":
        for number in np.asarray(numbers, object).flat:
            if isinstance(number, int) and not np.iinfo(np.int64).min <= number <= np.iinfo(np.int64).max:
                checks.refuse(_ITEM, "index", "integers that int32 can hold", number)
    return item


def _convert_index(item: Any) -> Any:
    """Check that an item is an array of integers or a mask that is not traced; return integers as int32."""
    is_array = isinstance(item, jax.Array | np.ndarray)
    expected = "ints, slices, None, an ellipsis, or arrays of integers or bools"
    checks.require_type(is_array and item.dtype.kind in "iub", _ITEM, "index", expected, checks.describe_value(item))
    if _is_mask(item):
        expected = "a mask of rank 1 or more that is not traced, because the shape of the result depends on it"
        is_usable = not checks.is_traced(item) and item.ndim > 0
        checks.require_type(is_usable, _ITEM, "index", expected, checks.describe_value(item))
        return item
    item = entry_point.narrow_to_int32(_ITEM, "index", item)
    # JAX reads the upper half of uint32 as negative indices.
    if item.dtype.kind == "u" and item.dtype.itemsize > 2:
        item = jnp.minimum(item, item.dtype.type(np.iinfo(np.int32).max))
    elif item.dtype.itemsize > 2:
        return item
    return item.astype(np.int32)  # int8, for example, cannot hold a length of 200


def _index_entries(
    q: QuantizedArray, part: Part, items: list[Any], stored: Sequence[int | None],
    out_sharding: NamedSharding | PartitionSpec | None,
) -> Any:  # fmt: skip
    """Return the entries of a scale or zero point that belong to the codes an index selects."""
    sizes, axis, part_items = _derive_run_lengths(q, part), 0, []
    for item in items:
        if item is None:
            part_items.append(None)
            continue
        # An item of None adds a dimension and is handled above; every other item indexes exactly one.
        length, entries, size = q.shape[axis], part.shape[axis], sizes[axis]
        # If the dimension has one index and one entry, the item itself is applied to the entry: a slice may be empty.
        if entries == 1 and length != 1:
            part_items.append(_select_shared_entry(item))
        elif entries == length:
            part_items.append(item)
        elif isinstance(item, slice):
            start, stop, step = item.indices(length)
            stop = max(start, stop)
            # A slice of whole blocks keeps them. It may end inside the last block only if the size can be stored.
            if step == 1 and start % size == 0 and ((stop - start) % size == 0 or size == stored[axis]):
                part_items.append(slice(start // size, -(-stop // size)))
            else:  # the slice cuts through blocks
                part = expand_part(part, axis, size, length)
                part_items.append(item)
        else:
            # The entry of an index is the entry of its block. A negative index must be counted from the front before
            # it is divided by the block size.
            part_items.append((item % length if isinstance(item, int) else _wrap_negative(item, length)) // size)
        axis += 1
    if _is_nested(part):
        return index_array(part, tuple(part_items), out_sharding)
    return _index_part(part, part_items, out_sharding)


def per_index(q: QuantizedArray, axes: tuple[Any, ...]) -> QuantizedArray:
    """Return q with one entry for each index of the given axes; q has been checked."""
    parts: dict[str, Any] = list_entries(q)
    places = [checks.check_axis(_PER_INDEX, axis, q.ndim) for axis in axes]
    for name, part in parts.items():
        for axis in places:
            size, length = _derive_run_lengths(q, part)[axis], q.shape[axis]
            if part.shape[axis] != length:
                part = expand_part(part, axis, size, length)
        parts[name] = part
    # Nested parts are mapped as well.
    for name, part in parts.items():
        if _is_nested(part):
            parts[name] = per_index(part, tuple(places))
    if q.permutation is not None and places:
        place = q.ndim + q.permuted_axis  # type: ignore
        expected = f"axes in front of the permuted one, {q.permuted_axis}, because its elements are in another order"
        checks.require(max(places) < place, _PER_INDEX, "axis", expected, axes)
        count = max(max(places) + 1, q.permutation.ndim - 1)
        permutation = q.permutation.reshape(
            (*q.permutation.shape[:-1], *(1,) * (count + 1 - q.permutation.ndim), q.shape[place])
        )
        parts["permutation"] = jnp.broadcast_to(permutation, (*q.shape[:count], q.shape[place]))
    # The axes are about to be mapped, in the stored codes as in the scale, so they must not have moved.
    mapped = [axis % q.ndim for axis in axes]
    is_moved = any(axis - q.ndim in (q._order or ()) for axis in mapped)
    if isinstance(q.block_size, tuple):
        parts["block_size"] = _keep_block_sizes(q, mapped)
    new = q.replace(**parts, **({"stored_order": None} if is_moved else {}))
    # Nor can the words of an axis be mapped.
    packed = derive_permutation(new._order, q.ndim)[-1] if new.packing is not None else None
    return new.unpack() if packed in mapped else new


def _keep_block_sizes(q: QuantizedArray, mapped: Sequence[int]) -> tuple[int, ...] | int | None:
    """Return the block sizes of an array that are left when axes are about to be mapped.

    A tuple of sizes counts its axes from the back, so a mapped axis behind a block would give a size to another axis.
    One size needs no axis.
    """
    sizes = {
        axis: size
        for part in list_entries(q).values()
        for axis, (size, entries) in enumerate(zip(_derive_run_lengths(q, part), part.shape, strict=True))
        if axis not in mapped and entries not in (1, q.shape[axis])
    }
    if len(sizes) < 2:
        return next(iter(sizes.values()), None)
    expected = f"axes in front of {min(sizes)}, because there are blocks along the axes {', '.join(map(str, sizes))}"
    checks.require(all(axis < min(sizes) for axis in mapped), _PER_INDEX, "axis", expected, tuple(mapped))
    return q.block_size


def _select_shared_entry(item: Any) -> Any:
    """Return the item that selects the only entry of a shared dimension, with a result of the same rank as `item`."""
    if isinstance(item, slice):
        return slice(None)
    return 0 if isinstance(item, int) else np.zeros((1,) * item.ndim, np.int32)


def _wrap_negative(index: jax.Array, length: int) -> Any:
    """Return indices counted from the front; an index out of range becomes the nearest valid one, as in JAX."""
    from_front = jnp.where(index < 0, index + index.dtype.type(length), index)
    return jnp.clip(from_front, index.dtype.type(0), index.dtype.type(max(length - 1, 0)))


def transpose_array(q: QuantizedArray, axes: tuple[Any, ...]) -> QuantizedArray:
    """Return q with its dimensions in another order; q has been checked."""
    # numpy accepts transpose(0, 1), transpose((0, 1)), transpose(None) and transpose().
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list | None) else axes
    order = tuple(order) if order else tuple(range(q.ndim))[::-1]
    for axis in order:
        checks.check_integer(_TRANSPOSE, "axes", axis)
    expected = f"a permutation of {tuple(range(q.ndim))}"
    is_in_range = all(-q.ndim <= a < q.ndim for a in order)
    order = tuple(a % q.ndim for a in order) if is_in_range else order
    checks.require(sorted(order) == list(range(q.ndim)), _TRANSPOSE, "axes", expected, order)
    # The codes stay in memory as they are. Others see the order that the user has chosen, or else the logical one.
    # Words cannot be transposed later, because the packed axis would not be the last one.
    return view_transposed(q, order, is_lazy=(q._is_lazy or q._order is None) and q.packing is None)


def view_transposed(q: QuantizedArray, order: Sequence[int], *, is_lazy: bool = False) -> QuantizedArray:
    """Return q with its dimensions in another order and its codes as they are in memory.

    Args:
        q: an array.
        order: the dimensions of q in their new order.
        is_lazy: whether the codes seem to be in the logical order until something reads them.
    """
    new = q.replace(**transpose_entries(q, order))
    result = new._with_stored(q._stored, derive_transposed_order(q._order, order), is_lazy=is_lazy)
    object.__setattr__(result, "_is_view", q._order is None)
    return result


def transpose_entries(q: QuantizedArray, order: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of an array that a transpose changes, other than the codes."""
    changes: dict[str, Any] = {}
    for name, part in list_entries(q).items():
        changes[name] = transpose_array(part, tuple(order)) if _is_nested(part) else jnp.transpose(part, order)
    if isinstance(q.block_size, tuple):
        sizes = (*(1,) * (q.ndim - len(q.block_size)), *q.block_size)
        changes["block_size"] = granularity.shorten_block_size(tuple(sizes[axis] for axis in order))
    if q.permutation is not None:
        changes["permuted_axis"] = list(order).index(q.ndim + q.permuted_axis) - q.ndim  # type: ignore
        count = q.permutation.ndim - 1
        expected = f"an order that begins with {tuple(range(count))}, the axes of the permutations"
        checks.require(tuple(order[:count]) == tuple(range(count)), _TRANSPOSE, "axes", expected, tuple(order))
    return changes


def reshape_array(q: QuantizedArray, shape: tuple[Any, ...]) -> QuantizedArray:
    """Return q in another shape; q has been checked."""
    new = _resolve_shape(q, shape)
    reshaped: dict[str, Any] = {}
    sizes: list[set[int]] = [set() for _ in new]  # the block sizes of each dimension of the result
    is_short = False  # whether a last block of the result is shorter than the others
    expected = "a shape in which elements that share an entry stay adjacent, or q.dequantize().reshape"
    for name, part in list_entries(q).items():
        plan = _plan_reshape(part.shape, _derive_run_lengths(q, part), q.shape, new)
        got = f"{new} for a {name} of shape {part.shape} and codes of shape {q.shape}"
        checks.require(plan is not None, _RESHAPE, "shape", expected, got)
        assert plan is not None
        for of_axis, (entries, size), n in zip(sizes, plan, new, strict=True):
            if entries not in (1, n):
                of_axis.add(size)
                is_short |= n % size != 0
        # Only one block size can be stored for a dimension, so blocks of two sizes must divide it evenly.
        checks.require(max(map(len, sizes), default=0) < 2 or not is_short, _RESHAPE, "shape", expected, got)
        shape_of_part = tuple(entries for entries, _ in plan)
        reshaped[name] = reshape_array(part, (shape_of_part,)) if _is_nested(part) else part.reshape(shape_of_part)
    lengths = set().union(*sizes)
    # With blocks of two sizes that divide their dimensions no size is stored, because the shapes tell both.
    block_size: Any = lengths.pop() if len(lengths) == 1 else None
    if is_short and lengths and block_size is None:
        block_size = granularity.shorten_block_size(tuple(size.pop() if size else 1 for size in sizes))
    reshaped["permuted_axis"] = _move_permuted_axis(q, new)
    result = q.replace(block_size=block_size, **reshaped)
    moved = max(len(q._order or ()), q.packing is not None)
    # The stored order and the words remain if only the dimensions in front of them change.
    if len(new) >= moved and new[len(new) - moved :] == q.shape[q.ndim - moved :]:
        stored = q._stored.reshape((*new[: len(new) - moved], *q._stored.shape[q.ndim - moved :]))
        return result._with_stored(stored, q._order, is_lazy=q._is_lazy)
    codes, order, packing = _pack_again(q, q.codes.reshape(new))
    return result._with_stored(codes, order, packing=packing)


def can_reshape(q: QuantizedArray, part: Part, shape: tuple[int, ...]) -> bool:
    """Return whether a scale, zero point or offset of q can be reshaped with the codes: whether its runs stay runs."""
    return _plan_reshape(part.shape, _derive_run_lengths(q, part), q.shape, shape) is not None


def _move_permuted_axis(q: QuantizedArray, new: tuple[int, ...]) -> int | None:
    """Return the place of the permuted axis in another shape; raise if the axis is merged or divided."""
    axis = q.permuted_axis
    if axis is None:
        return None
    before, length, count = math.prod(q.shape[:axis]), q.shape[axis], q.permutation.ndim - 1
    # The axis has as many elements in front of it, and the same length.
    places = [place for place, n in enumerate(new) if n == length and math.prod(new[:place]) == before]
    is_kept = bool(places) and new[:count] == q.shape[:count] and (0 not in q.shape or new == q.shape)
    expected = f"a shape that keeps the permuted axis, {axis}, of length {length}"
    checks.require(is_kept, _RESHAPE, "shape", expected, new)
    return (q.ndim + axis if new == q.shape else places[-1]) - len(new)


def _resolve_shape(q: QuantizedArray, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the new shape of an array with -1 replaced, after checking that it has the right size."""
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    for n in lengths:
        checks.check_integer(_RESHAPE, "shape", n)
    new = tuple(int(n) for n in lengths)
    expected = f"a shape of {q.size} elements with at most one dimension of -1"
    known_size = math.prod(n for n in new if n != -1)
    checks.require(new.count(-1) <= 1 and min(new, default=0) >= -1, _RESHAPE, "shape", expected, new)
    # If the other lengths had a product of 0, the length for -1 would be undetermined.
    if -1 in new:
        checks.require(known_size > 0 and q.size % known_size == 0, _RESHAPE, "shape", expected, new)
        new = tuple(q.size // known_size if n == -1 else n for n in new)
    checks.require(math.prod(new) == q.size, _RESHAPE, "shape", expected, new)
    return new


def _plan_reshape(
    entries: tuple[int, ...], sizes: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Return the number of entries and the run length of each new dimension, or None if no scale has that shape.

    A run consists of the consecutive indices of a dimension that share an entry.
    """
    if old == new:
        return list(zip(entries, sizes, strict=True))
    # An array without elements uses no entry, and only a single entry fits every shape.
    if 0 in old:
        return [(1, n) for n in new] if math.prod(entries) == 1 else None
    # Dimensions of length 1 do not affect which elements share an entry: leave them out and insert the new ones later.
    long = [i for i, n in enumerate(old) if n != 1]
    entries, sizes, old = (tuple(values[i] for i in long) for values in (entries, sizes, old))
    plan = _plan_long_reshape(entries, sizes, old, tuple(n for n in new if n != 1))
    if plan is None:
        return None
    # Every new dimension of length 1 has one entry; the others take theirs, in order, from the plan.
    rest = iter(plan)
    return [(1, 1) if n == 1 else next(rest) for n in new]


def _plan_long_reshape(
    entries: tuple[int, ...], sizes: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Return what `_plan_reshape` returns, for shapes without dimensions of length 1."""
    plan: list[tuple[int, int]] = []
    for olds, news in _match_groups(old, new):
        lengths = [new[j] for j in news]
        if len(olds) == len(news) == 1:  # an unchanged dimension keeps its blocks, even with a short last one
            plan.append((entries[olds[0]], sizes[olds[0]]))
            continue
        # The elements of a group are consecutive, so the scale fits if each of its runs is consecutive, too.
        run = _count_run([(old[i], entries[i], sizes[i]) for i in olds])
        group_plan = None if run is None else _spread_run(run, lengths)
        if group_plan is None:
            return None
        plan.extend(group_plan)
    return plan


def _match_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest groups of consecutive old and new dimensions that have the same number of elements."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        olds, news, left, right = [], [], 1, 1  # left and right are the products of the lengths in the group
        while not olds or left != right:
            # Extend the side with fewer elements until both sides have the same number.
            if left <= right:
                olds, left, i = [*olds, i], left * old[i], i + 1
            else:
                news, right, j = [*news, j], right * new[j], j + 1
        groups.append((olds, news))
    return groups


def _count_run(dims: list[tuple[int, int, int]]) -> int | None:
    """Return how many consecutive elements in row-major order share an entry, or None if the number varies.

    Args:
        dims: the length, the number of entries and the run length of each dimension.
    """
    # The loop goes from the last dimension to the first; `is_inside` holds while a run includes all of the dimension.
    run, is_inside = 1, True
    for i, (length, entries, size) in reversed(list(enumerate(dims))):
        if not is_inside:
            # In all dimensions before the run, every index must have its own entry.
            if entries != length:
                return None
        elif entries == 1:
            run *= length
        elif entries == length:
            is_inside = False
        else:
            if length % size and i:  # a short run would be followed by a full one
                return None
            run, is_inside = run * size, False
    return run


def _spread_run(run: int, lengths: list[int]) -> list[tuple[int, int]] | None:
    """Return the number of entries and the run length of each dimension if `run` consecutive elements share an entry.

    The last run may be shorter. The result is None if the dimensions do not allow such runs.
    """
    plan: list[tuple[int, int]] = []
    for i, length in reversed(list(enumerate(lengths))):
        if length <= run:
            if run % length:
                return None
            plan.append((1, length))
            run //= length
        elif length % run and i:
            return None
        else:
            plan.append((-(-length // run), run))
            run = 1
    return plan[::-1]
