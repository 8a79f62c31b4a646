"""Operators that select or replace elements by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...limits import ModelError
from ..graph import register
from ..interpret import Call
from ..values import (
    Tensor,
    canonicalize_dtype,
    convert_to_jax,
    is_static,
    list_indices,
    list_ints,
    make_lengths,
    namespace,
    normalize_axis,
)


def _wrap(call: Call, index: Any, length: Any) -> Any:
    """Return indices without negative ones, which count from the back; `length` is a number, or one for each column.

    A model that `export` wrote has no negative index, and would grow with each load and export.
    """
    index = convert_to_jax(index) if index.dtype == object else index
    lengths = make_lengths(np.reshape(length, -1).tolist()).reshape(np.shape(length))
    is_known = isinstance(index, np.ndarray)
    if call.run.is_exported or (is_known and lengths.dtype == object and np.all(index >= 0)):
        return index if is_known else index.astype(jnp.int32)
    if lengths.dtype == object:
        index = convert_to_jax(index).astype(jnp.int32)
        return jnp.where(index < 0, index + convert_to_jax(lengths).astype(jnp.int32), index)
    index = index if is_known else index.astype(jnp.int32)
    return namespace(index).where(index < 0, index + lengths.astype(index.dtype), index)


# Exporters write such a number for "to the end".
_BEYOND = 2**31 - 1


@register("Slice", static=(1, 2, 3, 4), folds=True)
def slice_array(call: Call, x: Tensor, *arguments: Tensor) -> Any:
    """ONNX Slice: the arguments are attributes before opset 10."""
    names = ("starts", "ends", "axes", "steps")
    given = [*arguments, *[None] * (4 - len(arguments))]
    values = [call.get(n) if value is None else value for n, value in zip(names, given, strict=True)]
    starts, ends, axes, steps = (None if value is None else list_ints(value) for value in values)
    if starts is None or ends is None:
        raise ModelError("expected starts and ends")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    cuts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = normalize_axis(axis, x.ndim)
        cuts[axis] = _make_slice(start, end, step, x.shape[axis])
    # numpy's slices take no symbolic bounds.
    bounds = [bound for cut in cuts for bound in (cut.start, cut.stop) if bound is not None]
    return (x if is_static(bounds) else convert_to_jax(x))[tuple(cuts)]


def _make_slice(start: Any, end: Any, step: int, length: Any) -> slice:
    """Return Python's slice of ONNX's bounds, which count from the back if they are negative, and are clamped."""
    if step == 0:
        raise ModelError("expected a step that is not 0")
    if not is_static((start, end, length)):
        return _make_symbolic_slice(start, end, step, length)
    low, high = (0, length) if step > 0 else (-1, length - 1)
    start, end = (min(max(n + length if n < 0 else n, low), high) for n in (start, end))
    return slice(max(start, 0), None if end < 0 else end, step)


def _make_symbolic_slice(start: Any, end: Any, step: int, length: Any) -> slice:
    """Return Python's slice of bounds that JAX clamps, without the bounds that are at or beyond an end."""
    first = step > 0 and isinstance(start, int) and start == 0
    last = end >= _BEYOND if isinstance(end, int) and step > 0 else isinstance(end, int) and end <= -_BEYOND
    return slice(None if first else start, None if last or (step > 0 and end == length) else end, step)


@register("Gather", folds=True)
def gather(call: Call, x: Tensor, indices: Tensor) -> Any:
    """ONNX Gather."""
    axis = normalize_axis(call.get("axis", 0), x.ndim)
    call.reserve((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    index = _wrap(call, indices, x.shape[axis])
    if namespace(x, index) is np:
        return np.take(x, index, axis)
    # XLA keeps an index within bounds. `export` writes one Gather again, without the nodes that would do so.
    cut = (slice(None),) * axis
    return convert_to_jax(x).at[(*cut, index)].get(mode="promise_in_bounds", wrap_negative_indices=False)


@register("GatherElements", folds=True)
def gather_elements(call: Call, x: Tensor, indices: Tensor) -> Any:
    """ONNX GatherElements."""
    axis = normalize_axis(call.get("axis", 0), x.ndim)
    xp, index = namespace(x, indices), _wrap(call, indices, x.shape[axis])
    # The other dimensions of the indices may be shorter than in x.
    cut = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))
    if xp is np:
        return np.take_along_axis(x[cut], index, axis)
    return jnp.take_along_axis(x[cut], index, axis, mode="promise_in_bounds", wrap_negative_indices=False)


@register("GatherND", folds=True)
def gather_nd(call: Call, x: Tensor, indices: Tensor) -> Any:
    """ONNX GatherND."""
    batch, count = call.get("batch_dims", 0), indices.shape[-1]
    index = _wrap(call, indices, x.shape[batch : batch + count])
    if namespace(x, index) is np:
        # Indices of the batch dimensions that broadcast against the model's indices.
        rest = indices.ndim - 1 - batch
        grids = [grid.reshape(*grid.shape, *(1,) * rest) for grid in _make_grids(x.shape[:batch])]
        return x[(*grids, *np.moveaxis(index, -1, 0))]
    x, index = convert_to_jax(x), convert_to_jax(index)
    whole = x.shape[batch + count :]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim - 1, index.ndim - 1 + len(whole))),
        collapsed_slice_dims=tuple(range(batch, batch + count)),
        start_index_map=tuple(range(batch, batch + count)),
        operand_batching_dims=tuple(range(batch)),
        start_indices_batching_dims=tuple(range(batch)),
    )
    return lax.gather(x, index, numbers, (1,) * (batch + count) + whole, mode="promise_in_bounds")


def _make_grids(lengths: Any) -> list[Any]:
    """Return for each dimension its indices, in a shape that broadcasts against the others."""
    rank = len(lengths)
    return [list_indices(n).reshape(*(1,) * i, -1, *(1,) * (rank - 1 - i)) for i, n in enumerate(lengths)]


_REDUCTIONS = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}
_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "none": lax.scatter,
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}
# ONNX has no index out of range. XLA drops such an update without being asked to, and the promise lets `export` write
# one ScatterND again, without a row for what is dropped.
_MODE = "promise_in_bounds"


_UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _update_known(call: Call, x: Tensor, index: tuple[Any, ...], updates: Tensor) -> np.ndarray:
    """Return a copy of x with elements replaced, or combined with updates, by numpy."""
    y, reduction = np.array(x), call.get("reduction", "none")
    if reduction == "none":
        y = y.astype(np.result_type(x, updates), copy=False)  # one of them may be symbolic lengths
        y[index] = updates
    else:
        _UFUNCS[reduction].at(y, index, updates)
    return y


@register("ScatterElements", "Scatter", folds=True)
def scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Any:
    """ONNX ScatterElements."""
    axis = normalize_axis(call.get("axis", 0), x.ndim)
    grids = _make_grids(indices.shape)
    index = tuple(_wrap(call, indices, x.shape[axis]) if i == axis else grid for i, grid in enumerate(grids))
    if namespace(x, indices, updates) is np:
        return _update_known(call, x, index, updates)
    update = getattr(convert_to_jax(x).at[index], _REDUCTIONS[call.get("reduction", "none")])
    return update(updates, mode=_MODE, wrap_negative_indices=False)


@register("ScatterND", folds=True)
def scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Any:
    """ONNX ScatterND."""
    count = indices.shape[-1]
    index = _wrap(call, indices, x.shape[:count])
    if namespace(x, index, updates) is np:
        return _update_known(call, x, tuple(np.moveaxis(index, -1, 0)), updates)
    x, index, updates = (convert_to_jax(value) for value in (x, index, updates))
    windows = tuple(range(index.ndim - 1, updates.ndim))
    numbers = lax.ScatterDimensionNumbers(windows, tuple(range(count)), tuple(range(count)))
    return _SCATTERS[call.get("reduction", "none")](x, index, updates, numbers, mode=_MODE)


@register("TensorScatter")
def scatter_into_cache(call: Call, past: jax.Array, update: jax.Array, starts: jax.Array | None = None) -> Any:
    """ONNX TensorScatter: write rows into a cache, from an index of each batch on."""
    axis = normalize_axis(call.get("axis", -2), past.ndim)
    batch, length = past.shape[0], update.shape[axis]
    start = jnp.zeros(batch, jnp.int32) if starts is None else starts.astype(jnp.int32)
    index = start[:, None] + jnp.arange(length)[None, :]
    if call.get("mode", "linear") == "circular":
        index = index % past.shape[axis]
    moved, rows = jnp.moveaxis(past, axis, 1), jnp.moveaxis(update, axis, 1)
    return jnp.moveaxis(moved.at[jnp.arange(batch)[:, None], index].set(rows), 1, axis)


@register("Compress", static=(1,), folds=True)
def compress(call: Call, x: Tensor, condition: np.ndarray) -> Any:
    """ONNX Compress with a known condition."""
    (index,) = np.nonzero(condition)
    axis = call.get("axis")
    if axis is None:
        return x.reshape(-1)[index]
    return namespace(x).take(x, index, axis)


@register("NonZero", static=(0,))
def list_nonzero(call: Call, x: np.ndarray) -> Any:
    """ONNX NonZero of a known array."""
    return np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((0, int(bool(x))), np.int64)


@register("TopK", static=(1,))
def select_largest(call: Call, x: jax.Array, k: np.ndarray | None = None) -> Any:
    """ONNX TopK: of equal elements the one with the lower index comes first."""
    axis, index_dtype = normalize_axis(call.get("axis", -1), x.ndim), canonicalize_dtype(np.int64)
    count = int(call.get("k") if k is None else np.asarray(k).reshape(-1)[0])
    if not 0 <= count <= x.shape[axis]:
        raise ModelError(f"expected k in [0, {x.shape[axis]}], got {count}")
    if call.get("largest", 1):
        # lax.top_k puts 0 before -0, which are equal in ONNX.
        rows = jnp.moveaxis(x if x.dtype.kind in "iu" else jnp.where(x == 0, jnp.zeros_like(x), x), axis, -1)
        values, index = (jnp.moveaxis(part, -1, axis) for part in lax.top_k(rows, count))
        return values, index.astype(index_dtype)
    # Two arrays that are sorted by the first of them: `export` writes this as one TopK.
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    values, index = lax.sort((x, places), dimension=axis, is_stable=True)
    values, index = (lax.slice_in_dim(part, 0, count, axis=axis) for part in (values, index))
    return values, index.astype(index_dtype)


@register("Unique", static=(0,))
def select_unique(call: Call, x: np.ndarray) -> Any:
    """ONNX Unique of a known array."""
    axis = call.get("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call.get("sorted", 1):
        order = np.argsort(first)
        rank = np.argsort(order)
        values = np.take(values, order, 0 if axis is None else axis)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)
