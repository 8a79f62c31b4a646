"""Indexing, reshaping and transposing codes together with the scale and the zero point that belong to them. Knows
nothing of what codes stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks, entry_point, granularity, sharding

if TYPE_CHECKING:
    from .quantized_array import QuantizedArray

_ITEM = "QuantizedArray.__getitem__"
_RESHAPE = "QuantizedArray.reshape"
_PER_INDEX = "QuantizedArray.per_index"
_TRANSPOSE = "QuantizedArray.transpose"


def _find_sizes(q: QuantizedArray, part: Any) -> tuple[int, ...]:
    sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
    assert sizes is not None
    return sizes


def _find_block_dims(part: Any, shape: tuple[int, ...]) -> list[int]:
    return [a for a, (n, length) in enumerate(zip(part.shape, shape, strict=True)) if n not in (1, length)]


def index_array(q: QuantizedArray, index: Any, out_sharding: Any = None) -> QuantizedArray:
    """Returns what an index picks of the codes, and of what belongs to them; q has passed its contract.

    An out_sharding is that of the codes; their scale and zero point are then replicated.
    """
    items = _read_items(q.shape, index)
    parts = [p for p in (q.scale, q.zero_point) if p is not None]
    found = {_find_sizes(q, p)[a] for p in parts for a in _find_block_dims(p, q.shape)}
    block_size = q.block_size or (found.pop() if len(found) == 1 else None)
    values = _index_part(q.codes, items, out_sharding)
    own = None if out_sharding is None else sharding.set_partition(out_sharding, ())
    scale, zero_point = (
        None if p is None else _pick_part(q, p, items, block_size, own) for p in (q.scale, q.zero_point)
    )
    left = any(_find_block_dims(p, values.shape) for p in (scale, zero_point) if p is not None)
    return q.replace(codes=values, scale=scale, zero_point=zero_point, block_size=block_size if left else q.block_size)


def _index_part(part: jax.Array, items: Sequence[Any], out_sharding: Any) -> jax.Array:
    return part[tuple(items)] if out_sharding is None else part.at[tuple(items)].get(out_sharding=out_sharding)


def _read_items(shape: tuple[int, ...], index: Any) -> list[Any]:
    """Returns an index as one item for each dimension, and a None for each new one."""
    items = [_read_item(item) for item in (index if isinstance(index, tuple) else (index,))]
    rest = len(shape) - sum(_count_dimensions(item) for item in items)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    checks.require(len(dots) <= 1, _ITEM, "index", "one ellipsis at most", index)
    expected = f"at most {len(shape)} dimensions, the array's"
    checks.require(rest >= 0, _ITEM, "index", expected, len(shape) - rest)
    place = dots[0] if dots else len(items)
    items = [*items[:place], *[slice(None)] * rest, *items[place + len(dots) :]]
    axis, found = 0, []
    for item in items:
        if isinstance(item, int) and not -shape[axis] <= item < shape[axis]:
            expected = f"an int in [{-shape[axis]}, {shape[axis] - 1}] for dimension {axis}"
            raise IndexError(checks.format_message(_ITEM, "index", expected, item))
        found += _replace_masks(item, shape[axis : axis + _count_dimensions(item)])
        axis += _count_dimensions(item)
    return found


def _is_mask(item: Any) -> bool:
    return isinstance(item, jax.Array | np.ndarray) and item.dtype.kind == "b"


def _count_dimensions(item: Any) -> int:
    """Returns how many of the array's dimensions an item takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _replace_masks(item: Any, shape: tuple[int, ...]) -> list[Any]:
    if not _is_mask(item):
        return [item]
    if item.shape != shape:
        expected = f"a mask of shape {shape}, that of the dimensions it is for"
        raise IndexError(checks.format_message(_ITEM, "index", expected, f"shape {item.shape}"))
    return [np.asarray(i, np.int32) for i in np.nonzero(np.asarray(item))]


def _read_item(given: Any) -> Any:
    item: Any = _convert_list(given) if isinstance(given, list) else given
    if item is None or item is Ellipsis:
        return item
    if isinstance(item, slice):
        for bound in (item.start, item.stop, item.step):
            if bound is not None:
                checks.check_integer(_ITEM, "index", bound)
        return item
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return int(item)
    return _convert_index(item)


def _convert_list(given: list[Any]) -> np.ndarray:
    """Returns a list of integers or bools as an array; one without elements as integers."""
    try:
        item = np.asarray(given or np.zeros(0, np.int32))
    except ValueError:  # numpy found rows of several lengths
        checks.require(False, _ITEM, "index", "a list whose rows are equally long", given)
        raise
    if item.dtype.kind in "Of":  # numpy has no integers for these numbers, or they are no integers
        for number in np.asarray(given, object).flat:
            if isinstance(number, int) and not np.iinfo(np.int64).min <= number <= np.iinfo(np.int64).max:
                checks.require(False, _ITEM, "index", "integers that int32 holds", number)
    return item


def _convert_index(item: Any) -> Any:
    """Requires an array of integers, or a mask whose elements are known; returns integers as int32."""
    is_array = isinstance(item, jax.Array | np.ndarray)
    expected = "ints, slices, None, an ellipsis, or arrays of integers or bools"
    checks.require_type(is_array and item.dtype.kind in "iub", _ITEM, "index", expected, checks.describe_value(item))
    if _is_mask(item):
        expected = "a mask that is not traced, of rank 1 or more: its result's shape depends on it"
        known = not checks.is_traced(item) and item.ndim > 0
        checks.require_type(known, _ITEM, "index", expected, checks.describe_value(item))
        return item
    item = entry_point.narrow_to_int32(_ITEM, "index", item)
    if item.dtype.kind == "u" and item.dtype.itemsize > 2:  # JAX takes the upper half of uint32 for negative numbers
        item = jnp.minimum(item, item.dtype.type(np.iinfo(np.int32).max))
    elif item.dtype.itemsize > 2:
        return item
    return item.astype(np.int32)  # int8 cannot count to 200


def _pick_part(q: QuantizedArray, part: Any, items: list[Any], block_size: int | None, out_sharding: Any) -> Any:
    sizes, axis, own = _find_sizes(q, part), 0, []
    for item in items:
        if item is None:
            own.append(None)
            continue
        length, entries, size = q.shape[axis], part.shape[axis], sizes[axis]
        if entries == 1 and length != 1:
            own.append(_is_of_shared(item))
        elif entries == length:
            own.append(item)
        elif isinstance(item, slice):
            start, stop, step = item.indices(length)
            stop = max(start, stop)
            if step == 1 and start % size == 0 and ((stop - start) % size == 0 or size == block_size):
                own.append(slice(start // size, -(-stop // size)))
            else:  # it cuts through blocks
                part = expand_blocks(part, axis, size, length)
                own.append(item)
        else:
            own.append((item % length if isinstance(item, int) else _wrap_negative(item, length)) // size)
        axis += 1
    return _index_part(part, own, out_sharding)


def expand_blocks(part: jax.Array, axis: int, size: int, length: int) -> jax.Array:
    """Returns a scale or zero point with an entry per index of an axis along which it has one per `size` of them."""
    wide = jnp.repeat(part, size, axis=axis, total_repeat_length=part.shape[axis] * size)
    return jax.lax.slice_in_dim(wide, 0, length, axis=axis)


def per_index(q: QuantizedArray, axes: tuple[Any, ...]) -> QuantizedArray:
    """Returns q with an entry per index of some axes; q has passed its contract."""
    parts = {}
    for name in ("scale", "zero_point"):
        part = getattr(q, name)
        if part is not None:
            for axis in axes:
                axis = checks.check_axis(_PER_INDEX, axis, q.ndim)
                size, length = _find_sizes(q, part)[axis], q.shape[axis]
                if part.shape[axis] != length:
                    part = expand_blocks(part, axis, size, length)
            parts[name] = part
    return q.replace(**parts)


def _is_of_shared(item: Any) -> Any:
    """Returns the item that picks the one entry of a shared dimension, and keeps the rank that `item` gives."""
    if isinstance(item, slice):
        return slice(None)
    return 0 if isinstance(item, int) else np.zeros((1,) * item.ndim, np.int32)


def _wrap_negative(index: Any, length: int) -> Any:
    """Returns an index counted from the front, the nearest where there is none such, as JAX takes it."""
    counted = jnp.where(index < 0, index + index.dtype.type(length), index)
    return jnp.clip(counted, index.dtype.type(0), index.dtype.type(max(length - 1, 0)))


def transpose_array(q: QuantizedArray, axes: tuple[Any, ...]) -> QuantizedArray:
    """Returns q with its dimensions in another order; q has passed its contract."""
    given = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list | None) else axes
    order = tuple(range(q.ndim))[::-1] if not given else tuple(given)
    for axis in order:
        checks.check_integer(_TRANSPOSE, "axes", axis)
    expected = f"a permutation of {tuple(range(q.ndim))}"
    in_range = all(-q.ndim <= a < q.ndim for a in order)
    order = tuple(a % q.ndim for a in order) if in_range else order
    checks.require(sorted(order) == list(range(q.ndim)), _TRANSPOSE, "axes", expected, order)
    values, scale, zero_point = (
        None if p is None else jnp.transpose(p, order) for p in (q.codes, q.scale, q.zero_point)
    )
    return q.replace(codes=values, scale=scale, zero_point=zero_point)


def reshape_array(q: QuantizedArray, shape: tuple[Any, ...]) -> QuantizedArray:
    """Returns q in another shape; q has passed its contract."""
    new = _resolve_shape(q, shape)
    found, sizes, short = [], set(), False
    for name in ("scale", "zero_point"):
        part = getattr(q, name)
        if part is None:
            found.append(None)
            continue
        plan = _plan_reshape(part.shape, _find_sizes(q, part), q.shape, new)
        expected = "a shape that keeps together what shares an entry, or q.dequantize().reshape"
        got = f"{new} for {name} of shape {part.shape} on {q.shape}"
        checks.require(plan is not None, _RESHAPE, "shape", expected, got)
        assert plan is not None
        sizes |= {size for (entries, size), n in zip(plan, new, strict=True) if entries not in (1, n)}
        short |= any(n % size for (entries, size), n in zip(plan, new, strict=True) if entries not in (1, n))
        checks.require(len(sizes) < 2 or not short, _RESHAPE, "shape", expected, got)
        found.append(part.reshape(tuple(entries for entries, _ in plan)))
    block_size = sizes.pop() if len(sizes) == 1 else None
    return q.replace(codes=q.codes.reshape(new), scale=found[0], zero_point=found[1], block_size=block_size)


def _resolve_shape(q: QuantizedArray, shape: tuple[Any, ...]) -> tuple[int, ...]:
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    for n in given:
        checks.check_integer(_RESHAPE, "shape", n)
    new = tuple(int(n) for n in given)
    expected = f"a shape of {q.size} elements, one dimension -1 at most"
    known = math.prod(n for n in new if n != -1)
    checks.require(new.count(-1) <= 1 and min(new, default=0) >= -1, _RESHAPE, "shape", expected, new)
    if -1 in new:
        checks.require(known > 0 and q.size % known == 0, _RESHAPE, "shape", expected, new)
        new = tuple(q.size // known if n == -1 else n for n in new)
    checks.require(math.prod(new) == q.size, _RESHAPE, "shape", expected, new)
    return new


def _plan_reshape(
    entries: tuple[int, ...], sizes: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Returns the entries and the run of each new dimension, or None where there is no such scale."""
    if old == new:
        return list(zip(entries, sizes, strict=True))
    if 0 in old:
        return [(1, n) for n in new] if math.prod(entries) == 1 else None
    # Dimensions of 1 come and go.
    long = [i for i, n in enumerate(old) if n != 1]
    entries, sizes, old = (tuple(each[i] for i in long) for each in (entries, sizes, old))
    plan = _plan_long_reshape(entries, sizes, old, tuple(n for n in new if n != 1))
    if plan is None:
        return None
    rest = iter(plan)
    return [(1, 1) if n == 1 else next(rest) for n in new]


def _plan_long_reshape(
    entries: tuple[int, ...], sizes: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    plan: list[tuple[int, int]] = []
    for olds, news in _find_groups(old, new):
        lengths = [new[j] for j in news]
        if len(olds) == len(news) == 1:  # the same dimension, its last block short or not
            plan.append((entries[olds[0]], sizes[olds[0]]))
            continue
        run = _find_run([(old[i], entries[i], sizes[i]) for i in olds])
        part = None if run is None else _spread_part(run, lengths)
        if part is None:
            return None
        plan.extend(part)
    return plan


def _find_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Returns the least runs of old and new dimensions that hold the same elements."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        olds, news, left, right = [], [], 1, 1
        while not olds or left != right:
            if left <= right:
                olds, left, i = [*olds, i], left * old[i], i + 1
            else:
                news, right, j = [*news, j], right * new[j], j + 1
        groups.append((olds, news))
    return groups


def _find_run(dims: list[tuple[int, int, int]]) -> int | None:
    """Returns how many neighbours in memory share an entry, or None where it is not the same number everywhere."""
    run, inside = 1, True
    for place, (length, entries, size) in reversed(list(enumerate(dims))):
        if not inside:
            if entries != length:
                return None
        elif entries == 1:
            run *= length
        elif entries == length:
            inside = False
        else:
            if length % size and place:  # a short run in the middle
                return None
            run, inside = run * size, False
    return run


def _spread_part(run: int, lengths: list[int]) -> list[tuple[int, int]] | None:
    """Returns the entries and the run of dimensions over which neighbours share an entry, `run` of them each, but for
    the last ones, which may be fewer."""
    plan: list[tuple[int, int]] = []
    for place, length in reversed(list(enumerate(lengths))):
        if length <= run:
            if run % length:
                return None
            plan.append((1, length))
            run //= length
        elif length % run and place:
            return None
        else:
            plan.append((-(-length // run), run))
            run = 1
    return plan[::-1]
