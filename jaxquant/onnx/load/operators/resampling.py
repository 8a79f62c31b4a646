"""Resize, Upsample, GridSample and AffineGrid."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._kernels.barriers import round_result
from ..graph import register
from ..interpret import Call
from ..values import list_ints, normalize_axis
from .windows import check_kernel

_HIGHEST = lax.Precision.HIGHEST
_MOST_DENSE = 2**20


@register("Upsample", static=(1,))
def upsample(call: Call, x: jax.Array, scales: np.ndarray | None = None) -> Any:
    """ONNX Upsample, the operator before Resize."""
    factors = np.asarray(call.get("scales") if scales is None else scales, np.float64)
    lengths = [int(np.floor(n * s)) for n, s in zip(x.shape, factors, strict=True)]
    call.reserve(lengths, x.dtype)
    for axis, (length, factor) in enumerate(zip(lengths, factors, strict=True)):
        x = _resample(call, x, axis, length, float(factor), None, "asymmetric", "floor")
    return x


@register("Resize", static=(1, 2, 3))
def resize(
    call: Call, x: jax.Array, roi: np.ndarray | None = None, scales: Any = None, sizes: np.ndarray | None = None
) -> Any:
    """ONNX Resize."""
    if call.opset < 11:
        # Opset 10 has no roi, and the scales in its place.
        roi, scales = None, roi
    axes = call.get("axes")
    axes = tuple(range(x.ndim)) if axes is None else tuple(normalize_axis(axis, x.ndim) for axis in axes)
    old = [x.shape[axis] for axis in axes]
    if sizes is not None and sizes.size:
        lengths, factors = _compute_lengths(call, old, list_ints(sizes))
    else:
        factors = [float(s) for s in scales]
        lengths = [int(np.floor(n * s)) for n, s in zip(old, factors, strict=True)]
    target = list(x.shape)
    for axis, length in zip(axes, lengths, strict=True):
        target[axis] = length
    call.reserve(target, x.dtype)
    # Opset 10 has no attributes for these two.
    mode = "asymmetric" if call.opset < 11 else call.get("coordinate_transformation_mode", "half_pixel")
    nearest = "floor" if call.opset < 11 else call.get("nearest_mode", "round_prefer_floor")
    # The nearest elements are copied: float32 would not hold integers above 2**24.
    if _is_bilinear(call, x, mode, target):
        known = dict(zip(axes, factors, strict=True))
        return _interpolate(x, mode, target[-2:], [known.get(x.ndim + i, 1.0) for i in (-2, -1)])
    is_weighted = x.dtype.kind in "iu" and call.get("mode", "nearest") != "nearest"
    y, is_outside = x.astype(jnp.float32) if is_weighted else x, []
    for i, axis in enumerate(axes):
        region = None if roi is None or not roi.size else (float(roi[i]), float(roi[len(axes) + i]))
        position = _list_positions(mode, x.shape[axis], lengths[i], factors[i], region)
        is_outside.append((axis, (position < 0) | (position > x.shape[axis] - 1)))
        y = _resample(call, y, axis, lengths[i], factors[i], region, mode, nearest)
    if mode == "tf_crop_and_resize":
        for axis, outside in is_outside:
            shape = [1] * x.ndim
            shape[axis] = len(outside)
            y = jnp.where(outside.reshape(shape), np.asarray(call.get("extrapolation_value", 0.0), y.dtype), y)
    return y if y.dtype == x.dtype else jnp.rint(y).astype(x.dtype)


def _is_bilinear(call: Call, x: Any, mode: str, target: list[int]) -> bool:
    """Return whether ONNX Runtime resizes the last two dimensions by the four nearest elements."""
    has_kernel = x.dtype in (np.dtype(np.int8), np.dtype(np.uint8)) or call.has_runtime_floats(x)
    is_plain = call.get("mode", "nearest") == "linear" and not call.get("antialias", 0) and mode != "tf_crop_and_resize"
    is_matrix = x.ndim == 2 or (x.ndim == 4 and tuple(target[:2]) == x.shape[:2])
    return bool(has_kernel and is_plain and is_matrix and not call.run.is_exported)


def _interpolate(x: Any, mode: str, lengths: list[int], factors: list[float]) -> Any:
    """Return x with other lengths of the last two dimensions, with the roundings of ONNX Runtime: codes are cut off."""
    neighbors = []
    for old, new, factor in zip(x.shape[-2:], lengths, factors, strict=True):
        position = np.clip(_list_positions(mode, old, new, factor, None).astype(np.float32), 0, old - 1)
        first = position.astype(np.int64)
        second = np.minimum(first + 1, old - 1)
        # At the end both are the same element, and count half.
        after, before = (np.where(first == second, np.float32(0.5), np.abs(position - i)) for i in (first, second))
        neighbors.append(((first, before.astype(np.float32)), (second, after.astype(np.float32))))
    total: Any = None
    for row, row_weight in neighbors[0]:
        line = jnp.take(x, row, axis=-2)
        for column, column_weight in neighbors[1]:
            weight = (column_weight * row_weight[:, None]).reshape((1,) * (x.ndim - 2) + tuple(lengths))
            part = round_result(jnp.take(line, column, axis=-1).astype(jnp.float32) * weight)
            total = part if total is None else total + part
    return total if x.dtype == np.float32 else jnp.trunc(total).astype(x.dtype)


def _compute_lengths(call: Call, old: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Return the new lengths and the factors for the input `sizes`."""
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    factors = [size / n for size, n in zip(sizes, old, strict=True)]
    if policy == "stretch":
        return list(sizes), factors
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [int(np.floor(factor * n + 0.5)) for n in old], [factor] * len(old)


def _list_positions(mode: str, old: int, new: int, factor: float, region: tuple[float, float] | None) -> np.ndarray:
    """Return for each index of the result its position in the input.

    They are computed in float32, as in ONNX Runtime: the rounding decides which of two elements is the nearest.
    """
    return _compute_positions(mode, old, new, np.float32(factor), region).astype(np.float64)


def _compute_positions(mode: str, old: int, new: int, factor: Any, region: tuple[float, float] | None) -> np.ndarray:
    y, width = np.arange(new, dtype=np.float32), factor * old
    if mode == "align_corners":
        return np.zeros(new) if width == 1 else y * (old - 1) / (width - 1)
    if mode == "asymmetric":
        return y / factor
    if mode == "tf_crop_and_resize":
        start, end = region or (0.0, 1.0)
        if width == 1:
            return np.full(new, (end - start) * (old - 1) / 2) + start * (old - 1)
        return y * (end - start) * (old - 1) / (width - 1) + start * (old - 1)
    if mode == "pytorch_half_pixel" and width == 1:
        return np.full(new, -0.5)
    offset = old / 2 * (1 - new / width) if mode == "half_pixel_symmetric" else 0.0
    return offset + (y + 0.5) / factor - 0.5


def _resample(
    call: Call, x: Any, axis: int, length: int, factor: float, region: Any, mode: str, nearest: str
) -> Any:  # fmt: skip
    """Return x with another length of an axis, by weights of neighboring elements."""
    old = x.shape[axis]
    if length == old and factor == 1 and region is None:
        return x
    position = _list_positions(mode, old, length, factor, region)
    kind = call.get("mode", "nearest")
    if kind == "nearest":
        return jnp.take(x, np.clip(_round_position(position, nearest), 0, old - 1), axis=axis)
    floor = np.floor(position)
    # A position on an element counts as the right end of the interval before it.
    ratio = np.where(position == floor, 1.0, position - floor)
    base = np.where(position == floor, floor - 1, floor).astype(np.int64)
    reach = min(factor, 1.0) if call.get("antialias", 0) else 1.0
    alpha = call.get("cubic_coeff_a", -0.75)
    half = 1 if kind == "linear" else 2
    first = int(np.floor(-half / reach)) + 1
    call.reserve([length, 2 - 2 * first], np.float64)
    offsets = np.arange(first, 2 - first)
    distance = np.abs((offsets[None, :] - ratio[:, None]) * reach)
    weights = np.clip(1 - distance, 0, 1) if kind == "linear" else _compute_cubic_weights(distance, alpha)
    index = base[:, None] + offsets[None, :]
    if call.get("exclude_outside", 0):
        weights = np.where((index >= 0) & (index < old), weights, 0)
    if call.get("exclude_outside", 0) or reach != 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    if length * old > _MOST_DENSE:
        check_kernel((len(offsets),))
        shape = [1] * x.ndim
        shape[axis] = length
        parts = zip(np.clip(index, 0, old - 1).T, weights.astype(np.float32).T, strict=True)
        return sum(jnp.take(x, i, axis=axis) * w.reshape(shape).astype(x.dtype) for i, w in parts)
    # A product with a matrix is faster than a gather of strided elements, as long as the matrix is small.
    matrix = np.zeros((length, old))
    np.add.at(matrix, (np.arange(length)[:, None], np.clip(index, 0, old - 1)), weights)
    moved = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), axes=((axis,), (1,)), precision=_HIGHEST)
    return jnp.moveaxis(moved, -1, axis)


def _compute_cubic_weights(distance: np.ndarray, a: float) -> np.ndarray:
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _round_position(position: np.ndarray, mode: str) -> np.ndarray:
    rounded = {
        "round_prefer_floor": np.ceil(position - 0.5),
        "round_prefer_ceil": np.floor(position + 0.5),
        "floor": np.floor(position),
        "ceil": np.ceil(position),
    }[mode]
    return rounded.astype(np.int64)


@register("AffineGrid", static=(1,))
def make_affine_grid(call: Call, theta: jax.Array, size: np.ndarray) -> Any:
    """ONNX AffineGrid."""
    lengths = list_ints(size)[2:]
    call.reserve((*lengths, len(lengths) + 1), np.float32)
    if call.get("align_corners", 0):
        lines = [np.linspace(-1, 1, n) if n > 1 else np.zeros(1) for n in lengths]
    else:
        lines = [(2 * np.arange(n) + 1) / n - 1 for n in lengths]
    grids = np.meshgrid(*lines, indexing="ij")
    points = np.stack([*grids[::-1], np.ones(lengths)], axis=-1).reshape(-1, len(lengths) + 1)
    grid = jnp.einsum("nij,pj->npi", theta, jnp.asarray(points, theta.dtype), precision=_HIGHEST)
    return grid.reshape(theta.shape[0], *lengths, len(lengths))


@register("GridSample")
def sample_grid(call: Call, x: jax.Array, grid: jax.Array) -> Any:
    """ONNX GridSample."""
    lengths, is_aligned = x.shape[2:], bool(call.get("align_corners", 0))
    check_kernel((4,) * len(lengths))
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call.get("mode", "linear"), call.get("mode", "linear"))
    padding = call.get("padding_mode", "zeros")
    terms = []  # for each spatial dimension: indices and weights of the neighbors
    for i, n in enumerate(lengths):
        value = grid[..., len(lengths) - 1 - i]
        position = (value + 1) / 2 * (n - 1) if is_aligned else ((value + 1) * n - 1) / 2
        low, high = (0.0, n - 1.0) if is_aligned else (-0.5, n - 0.5)
        position = jnp.rint(position) if mode == "nearest" else position
        # With "border", the neighbors are clamped, not the position between them.
        if padding == "reflection":
            position = _reflect(position, low, high)
        base = jnp.floor(position)
        ratio = position - base
        if mode == "nearest":
            neighbors = [(position, jnp.ones_like(position))]
        elif mode == "linear":
            neighbors = [(base, 1 - ratio), (base + 1, ratio)]
        else:
            neighbors = [(base + o, _weigh_cubic(jnp.abs(ratio - o))) for o in (-1, 0, 1, 2)]
        terms.append([_place_neighbor(index, weight, n, padding, low, high) for index, weight in neighbors])
    total: Any = 0
    batch = np.arange(x.shape[0]).reshape(-1, *(1,) * len(lengths))
    for combination in itertools.product(*terms):
        weight: Any = 1
        for _, part in combination:
            weight = weight * part
        values = jnp.moveaxis(x, 1, -1)[(batch, *(index for index, _ in combination))]
        total = total + values * weight[..., None].astype(x.dtype)
    return jnp.moveaxis(total, -1, 1)


def _reflect(position: Any, low: float, high: float) -> Any:
    """Return positions mirrored at both ends until they are inside."""
    span = high - low
    if span == 0:
        return jnp.full_like(position, low)
    folded = jnp.mod(position - low, 2 * span)
    inside = (position >= low) & (position <= high)
    return jnp.where(inside, position, low + jnp.where(folded > span, 2 * span - folded, folded))


def _weigh_cubic(distance: Any) -> Any:
    a = -0.75
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return jnp.where(distance <= 1, near, far)


def _place_neighbor(index: Any, weight: Any, n: int, padding: str, low: float, high: float) -> tuple[Any, Any]:
    """Return an index inside the array, and its weight, which is 0 for one in a padding of zeros."""
    if padding == "zeros":
        weight = jnp.where((index >= 0) & (index < n), weight, 0)
    elif padding == "reflection":
        index = jnp.trunc(_reflect(index, low, high))
    return jnp.clip(index, 0, n - 1).astype(jnp.int32), weight
