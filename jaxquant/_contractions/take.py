"""`jax.numpy.take` of a float or a quantized array: only the selected entries are dequantized."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .._arrays import indexing, quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, entry_point, sharding
from .._core.entry_point import compile_entry_point
from .dot import check_operand

_NAME = "take"
_MODES = ("fill", "clip", "wrap")


def take(
    q: QuantizedArray | ArrayLike,
    indices: ArrayLike,
    axis: int = 0,
    *,
    mode: str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Take entries of an array along an axis; of a quantized array, dequantize only these entries.

    y = q.dequantize() at `indices` along `axis`, or q itself for an array of floats: a function that looks rows up by
    `jq.take` runs on the float and on the quantized parameters.

    The result has the bits of the same entries of `q.dequantize()`. The codes are gathered as they are stored, together
    with their entries of the scale and the zero point, so that no float array of the table's size is created.

    Args:
        q: the table, a QuantizedArray of rank 1 or more, with any dtype of the codes and any granularity; or an array
            of float32, float16 or bfloat16.
        indices: integers of any shape; negative ones count from the end. An int is one index.
        axis: Static. The dimension that is indexed; a negative one counts from the back. The default is 0, the rows of
            an embedding; `jax.numpy.take` flattens its array by default, which is not possible for codes with blocks.
        mode: Static. What an index out of range returns. "fill", or None: NaN for each of its entries. "clip": the
            entries at the nearest index; every negative index becomes 0. "wrap": the entries at the index modulo the
            length. These are the modes of `jax.numpy.take`.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `x.at[indices].get`;
            required if `axis` of the table or the indices are sharded.

    Returns:
        The entries in q.dtype, with the dimensions of `indices` in place of `axis`.

    Raises:
        TypeError: q is neither a QuantizedArray nor an array of floats, indices are not integers, or axis is no int.
        ValueError: axis is out of range, mode is unknown, entries are taken from an axis of length 0, or an
            out_sharding does not fit the result or is missing.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> table = jnp.array([[-3.5, 0.25], [7.0, 0.5], [1.5, -28.0]])  # scales 0.5, 1 and 4; 0.25, 0.5, 1.5 are ties
        >>> q = jq.quantize(table, jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> jq.take(q, jnp.array([2, 0, -1, 3]))
        Array([[  0. , -28. ],
               [ -3.5,   0. ],
               [  0. , -28. ],
               [  nan,   nan]], dtype=float32)

    Source: `jax.numpy.take`.

    Cotangent of q.scale: as in `dequantize_linear`, summed over the entries taken. Of an array of floats: g of each
    entry, summed over the indices that take it. Integers have no cotangent.
    """
    table: Any = check_operand(_NAME, "q", q)
    axis = checks.check_axis(_NAME, axis, table.ndim)
    mode = "fill" if mode is None else mode
    checks.check_option(_NAME, "mode", mode, _MODES)
    sharding.check_out_sharding(_NAME, out_sharding)
    if not isinstance(table, QuantizedArray):
        return _take_floats(table, _read_index(indices), axis=axis, mode=mode, out_sharding=out_sharding)
    return _take(table, _read_index(indices), axis=axis, mode=mode, out_sharding=out_sharding)


def _read_index(indices: object) -> Any:
    """Return an int or a numpy integer as int32, which must be able to hold it, and any other value unchanged."""
    if isinstance(indices, int) and not isinstance(indices, bool):
        bounds = np.iinfo(np.int32)
        checks.require(bounds.min <= indices <= bounds.max, _NAME, "indices", "an int that int32 can hold", indices)
        return np.asarray(indices, np.int32)
    return entry_point.narrow_to_int32(_NAME, "indices", indices) if isinstance(indices, np.integer) else indices


@compile_entry_point(_NAME)
def _take_floats(
    q: jax.Array, indices: jax.Array, *, axis: int, mode: str, out_sharding: NamedSharding | PartitionSpec | None
) -> jax.Array:
    length = _check_index(q, indices, axis)
    _check_placement(q, q, indices, axis, out_sharding)
    if out_sharding is None:
        return jnp.take(q, indices, axis, mode=mode)
    index, is_inside = _normalize_index(indices, length, mode)
    return _fill_outside(q.at[(*(slice(None),) * axis, index)].get(out_sharding=out_sharding), is_inside, axis)


@compile_entry_point(_NAME)
def _take(
    q: QuantizedArray, indices: jax.Array, *, axis: int, mode: str, out_sharding: NamedSharding | PartitionSpec | None
) -> jax.Array:
    length = _check_index(q, indices, axis)
    index, is_inside = _normalize_index(indices, length, mode)
    _check_placement(q, q.codes, indices, axis, out_sharding)
    # Index first, then dequantize: only the selected entries become floats.
    entries = quantized_array.dequantize_checked(indexing.index_array(q, (*(slice(None),) * axis, index), out_sharding))
    return _fill_outside(entries, is_inside, axis)


def _check_index(q: Any, indices: Any, axis: int) -> int:
    """Check that indices are integers, and that there are entries to take; return how many."""
    is_array = isinstance(indices, jax.Array) and jnp.issubdtype(indices.dtype, jnp.integer)
    checks.require_type(is_array, _NAME, "indices", "an array of integers", getattr(indices, "dtype", "None"))
    length = q.shape[axis]
    expected = f"an axis of positive length, because q has shape {q.shape}"
    checks.require(length > 0 or indices.size == 0, _NAME, "axis", expected, axis)
    return length


def _fill_outside(entries: jax.Array, is_inside: jax.Array | None, axis: int) -> jax.Array:
    """Return the entries with NaN for the indices that are out of range."""
    # With "clip" and "wrap" no index is out of range.
    if is_inside is None:
        return entries
    mask = lax.broadcast_in_dim(is_inside, entries.shape, tuple(range(axis, axis + is_inside.ndim)))
    return jnp.where(sharding.place_like(mask, entries), entries, jnp.asarray(np.nan, entries.dtype))


def _check_placement(
    q: Any, table: jax.Array, indices: jax.Array, axis: int, out_sharding: NamedSharding | PartitionSpec | None,
) -> None:  # fmt: skip
    """Check that an out_sharding fits the result, or that the shardings of the table and of indices determine one.

    Args:
        q: the array.
        table: its codes, or the array itself.
        indices: the indices.
        axis: the axis that is indexed.
        out_sharding: the sharding of the result, or None.
    """
    rank = q.ndim - 1 + indices.ndim
    if sharding.read_out_partition(_NAME, out_sharding, rank) is not None:
        return
    if sharding.read_partition(table)[axis] is None and not any(sharding.read_partition(indices)):
        return
    operands = f"q {sharding.describe_placement(table)} and indices {sharding.describe_placement(indices)}"
    expected = f"a NamedSharding or PartitionSpec for the {rank} dimensions of the result, not determined by {operands}"
    checks.refuse(_NAME, "out_sharding", expected, None)


def _normalize_index(indices: jax.Array, length: int, mode: str) -> tuple[jax.Array, jax.Array | None]:
    """Return indices in [0, length) and, for "fill", a mask of the indices that were in range."""
    # A narrow dtype could wrap around when the length is added to a negative index.
    wide = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    last = wide.dtype.type(max(length - 1, 0))
    if mode == "wrap":
        return jnp.mod(wide, wide.dtype.type(max(length, 1))), None
    if mode == "fill":
        wide = jnp.where(wide < 0, wide + wide.dtype.type(length), wide)
    # An index in range is unchanged by the clip, which is how "fill" recognizes it.
    clipped = jnp.clip(wide, wide.dtype.type(0), last)
    return clipped, (clipped == wide) if mode == "fill" else None
