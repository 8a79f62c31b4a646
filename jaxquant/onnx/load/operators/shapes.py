"""Operators that move elements or make new arrays from shapes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...limits import ModelError
from ...model_file import read_onnx_dtype
from ..graph import register
from ..interpret import Call
from ..values import (
    Tensor,
    broadcast_shapes,
    broadcast_to,
    canonicalize_dtype,
    is_static,
    list_ints,
    make_lengths,
    namespace,
    normalize_axis,
)


@register("Shape")
def read_shape(call: Call, x: jax.Array) -> Any:
    """ONNX Shape."""
    rank = x.ndim
    start, end = (min(max(n + rank if n < 0 else n, 0), rank) for n in (call.get("start", 0), call.get("end", rank)))
    return make_lengths(x.shape[start:end])


@register("Size")
def count_size(call: Call, x: jax.Array) -> Any:
    """ONNX Size."""
    return make_lengths([math.prod(x.shape)]).reshape(())


@register("Reshape", static=(1,), folds=True)
def reshape(call: Call, x: Tensor, shape: np.ndarray | None = None) -> Any:
    """ONNX Reshape: 0 keeps a length, -1 is what remains."""
    lengths = list(list_ints(call.get("shape") if shape is None else shape))
    if not call.get("allowzero", 0):
        lengths = [x.shape[i] if n == 0 else n for i, n in enumerate(lengths)]
    # JAX divides symbolic lengths.
    if lengths.count(-1) == 1 and is_static((*lengths, *x.shape)):
        rest = math.prod(n for n in lengths if n != -1)
        lengths[lengths.index(-1)] = x.size // rest if rest else 0
    return x.reshape(lengths)


@register("Flatten", folds=True)
def flatten(call: Call, x: Tensor) -> Any:
    """ONNX Flatten."""
    axis = call.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@register("Transpose", folds=True)
def transpose(call: Call, x: Tensor) -> Any:
    """ONNX Transpose."""
    return x.transpose(call.get("perm", tuple(range(x.ndim))[::-1]))


def _read_axes(call: Call, axes: Any) -> tuple[int, ...] | None:
    """Return the axes of an input, or of the attribute of earlier opsets."""
    value = call.get("axes") if axes is None else axes
    return None if value is None else list_ints(value)


@register("Squeeze", static=(1,), folds=True)
def squeeze(call: Call, x: Tensor, axes: np.ndarray | None = None) -> Any:
    """ONNX Squeeze."""
    values = _read_axes(call, axes)
    values = [i for i, n in enumerate(x.shape) if n == 1] if values is None else values
    return x.squeeze(tuple(normalize_axis(axis, x.ndim) for axis in values))


@register("Unsqueeze", static=(1,), folds=True)
def unsqueeze(call: Call, x: Tensor, axes: np.ndarray | None = None) -> Any:
    """ONNX Unsqueeze."""
    values = _read_axes(call, axes) or ()
    return namespace(x).expand_dims(x, tuple(normalize_axis(axis, x.ndim + len(values)) for axis in values))


def _drop_empty(parts: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """Return the parts of a Concat without parts of length 0 that differ from the others in another dimension.

    ONNX Runtime ignores them: exporters begin a list that grows in a loop with an array of some shape with a 0.
    """
    kept = next((part for part in parts if 0 not in part.shape), parts[0])

    def fits(part: Any) -> bool:
        is_alike = all(n == m for i, (n, m) in enumerate(zip(part.shape, kept.shape, strict=True)) if i != axis)
        return is_alike or part.shape[axis] != 0

    return tuple(part for part in parts if part.ndim != kept.ndim or fits(part))


@register("Concat", folds=True)
def concatenate(call: Call, *parts: Tensor) -> Any:
    """ONNX Concat."""
    axis = normalize_axis(call.get("axis", 1), parts[0].ndim)
    parts = _drop_empty(parts, axis)
    shape = (*parts[0].shape[:axis], sum(part.shape[axis] for part in parts), *parts[0].shape[axis + 1 :])
    call.reserve(shape, parts[0].dtype)
    return namespace(*parts).concatenate(parts, axis)


@register("Split", static=(1,), folds=True)
def split(call: Call, x: Tensor, split: np.ndarray | None = None) -> Any:
    """ONNX Split."""
    axis = normalize_axis(call.get("axis", 0), x.ndim)
    lengths = call.get("split") if split is None else split
    if lengths is None:
        count = len(call.node.outputs)
        # The last part is shorter if the length is not a multiple.
        step = -(-x.shape[axis] // count)
        lengths = [min(step, max(x.shape[axis] - i * step, 0)) for i in range(count)]
    lengths = list_ints(lengths)
    if sum(lengths) != x.shape[axis] or min(lengths, default=0) < 0:
        raise ModelError(f"expected parts that add up to {x.shape[axis]}, got {lengths}")
    ends = np.cumsum(lengths)[:-1]
    return tuple(namespace(x).split(x, ends, axis))


@register("Expand", static=(1,), folds=True)
def expand(call: Call, x: Tensor, shape: np.ndarray) -> Any:
    """ONNX Expand: both shapes broadcast against each other."""
    return broadcast_to(x, call.reserve(broadcast_shapes(x.shape, list_ints(shape)), x.dtype))


@register("Tile", static=(1,), folds=True)
def tile(call: Call, x: Tensor, repeats: np.ndarray) -> Any:
    """ONNX Tile."""
    counts = list_ints(repeats)
    # A few numbers in a file can ask for any amount of memory.
    call.reserve([n * k for n, k in zip(x.shape, counts, strict=True)], x.dtype)
    return namespace(x).tile(x, counts)


@register("ConstantOfShape", static=(0,))
def fill(call: Call, shape: np.ndarray) -> Any:
    """ONNX ConstantOfShape."""
    value = call.get("value")
    value = np.zeros(1, np.float32) if value is None else value
    lengths = call.reserve(list_ints(shape), value.dtype)
    # Small results are shape arithmetic; a view of one element takes no memory.
    return broadcast_to(value.reshape(()), lengths)


@register("Range", static=(0, 1, 2))
def count_up(call: Call, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Any:
    """ONNX Range."""
    if object in (start.dtype, limit.dtype, delta.dtype):  # symbolic lengths
        bounds = [list_ints(x)[0] for x in (start, limit, delta)]
        return jnp.arange(*bounds, dtype=canonicalize_dtype(np.int64))
    first, last, step = (x.reshape(()) for x in (start, limit, delta))
    dtype = first.dtype
    if dtype.kind == "f" or dtype.name == "bfloat16":
        count = math.ceil((float(last) - float(first)) / float(step))
    else:
        count = -((int(first) - int(last)) // int(step))
    (count,) = call.reserve([max(count, 0)], np.int64)
    # numpy's arange adds up rounding errors in small floats.
    wide = first.dtype if dtype.kind in "iuf" else np.float32
    values = first.astype(wide) + np.arange(count).astype(wide) * step.astype(wide)
    return values.astype(dtype)


@register("EyeLike")
def make_identity(call: Call, x: jax.Array) -> Any:
    """ONNX EyeLike."""
    number = call.get("dtype")
    dtype = x.dtype if number is None else canonicalize_dtype(read_onnx_dtype(number, "EyeLike"))
    return jnp.eye(*x.shape, k=call.get("k", 0), dtype=dtype)


@register("Trilu", static=(1,), folds=True)
def keep_triangle(call: Call, x: Tensor, k: np.ndarray | None = None) -> Any:
    """ONNX Trilu."""
    xp, diagonal = namespace(x), 0 if k is None else int(k.reshape(()))
    # Offsets beyond the matrix are all alike, and numpy refuses offsets beyond int64.
    diagonal = min(max(diagonal, -x.shape[-2] - 1), x.shape[-1] + 1)
    return (xp.triu if call.get("upper", 1) else xp.tril)(x, diagonal)


@register("DepthToSpace")
def move_depth_to_space(call: Call, x: jax.Array) -> Any:
    """ONNX DepthToSpace."""
    n, c, h, w = x.shape
    size = call.get("blocksize")
    if call.get("mode", "DCR") == "DCR":
        blocks = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // size**2, h * size, w * size)


@register("SpaceToDepth")
def move_space_to_depth(call: Call, x: jax.Array) -> Any:
    """ONNX SpaceToDepth."""
    n, c, h, w = x.shape
    size = call.get("blocksize")
    if call.get("mode", "DCR") == "CRD":
        blocks = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 1, 3, 5, 2, 4)
    else:
        blocks = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * size**2, h // size, w // size)


@register("Pad", static=(1, 3), keeps=(2,), folds=True)
def pad(
    call: Call, x: Tensor, pads: np.ndarray | None = None, value: Tensor | None = None, axes: np.ndarray | None = None
) -> Any:
    """ONNX Pad, with negative lengths that cut elements off."""
    amounts = list_ints(call.get("pads") if pads is None else pads)
    kept = range(x.ndim) if axes is None else [normalize_axis(axis, x.ndim) for axis in list_ints(axes)]
    widths = [(0, 0)] * x.ndim
    for axis, low, high in zip(kept, amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :], strict=True):
        widths[axis] = (low, high)
    cut = tuple(
        slice(max(-low, 0), n + high if high < 0 else None) for n, (low, high) in zip(x.shape, widths, strict=True)
    )
    x, widths = x[cut], [(max(low, 0), max(high, 0)) for low, high in widths]
    call.reserve([n + low + high for n, (low, high) in zip(x.shape, widths, strict=True)], x.dtype)
    mode, xp = call.get("mode", "constant"), namespace(x)
    # The other modes take no value.
    if mode != "constant":
        return xp.pad(x, widths, {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode])
    filler: Any = call.get("value", 0.0) if value is None else value.reshape(())
    if xp is np and not isinstance(filler, float | np.ndarray | np.generic):
        x, xp = jnp.asarray(x), jnp
    filler = filler if isinstance(filler, float) else filler.astype(x.dtype)
    return xp.pad(x, widths, constant_values=filler)


@register("CenterCropPad", static=(1,), folds=True)
def crop_or_pad_center(call: Call, x: Tensor, shape: np.ndarray) -> Any:
    """ONNX CenterCropPad."""
    axes = call.get("axes", tuple(range(x.ndim)))
    target = list(x.shape)
    for axis, length in zip(axes, list_ints(shape), strict=True):
        target[axis] = length
    call.reserve(target, x.dtype)
    cuts, widths = [], []
    for n, length in zip(x.shape, target, strict=True):
        start = max(n - length, 0) // 2
        cuts.append(slice(start, start + min(n, length)))
        low = max(length - n, 0) // 2
        widths.append((low, max(length - n, 0) - low))
    return namespace(x).pad(x[tuple(cuts)], widths)


@register("OneHot", static=(1,))
def encode_one_hot(call: Call, indices: jax.Array, depth: np.ndarray, values: jax.Array) -> Any:
    """ONNX OneHot: negative indices count from the back."""
    length = int(depth.reshape(()))
    axis = normalize_axis(call.get("axis", -1), indices.ndim + 1)
    call.reserve((*indices.shape, length), values.dtype)
    index = indices.astype(jnp.int32)
    index = jnp.where(index < 0, index + length, index)
    hits = jnp.expand_dims(index, axis) == jnp.arange(length).reshape(-1, *(1,) * (indices.ndim - axis))
    return jnp.where(hits, values[1], values[0])


@register("ReverseSequence")
def reverse_sequences(call: Call, x: jax.Array, lengths: jax.Array) -> Any:
    """ONNX ReverseSequence."""
    batch, time = call.get("batch_axis", 1), call.get("time_axis", 0)
    return reverse_first(x, lengths, batch=batch, time=time)


def reverse_first(x: Any, lengths: Any, *, batch: int, time: int) -> Any:
    """Return x with the first `lengths` elements of each sequence in reverse order."""
    moved = jnp.moveaxis(x, (batch, time), (0, 1))
    position = jnp.arange(moved.shape[1])[None, :]
    count = lengths.astype(jnp.int32)[:, None]
    index = jnp.where(position < count, count - 1 - position, position)
    index = index.reshape(*index.shape, *(1,) * (moved.ndim - 2))
    return jnp.moveaxis(jnp.take_along_axis(moved, index, axis=1), (0, 1), (batch, time))
