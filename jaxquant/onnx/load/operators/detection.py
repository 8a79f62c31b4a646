"""Operators of object detection: suppression of boxes, pools of regions, and deformable convolutions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph import register
from ..interpret import Call
from ..values import UnknownValueError, is_known, namespace
from .windows import check_kernel, read_windows

_HIGHEST = lax.Precision.HIGHEST


@register("NonMaxSuppression", static=(0, 1, 2, 3, 4))
def suppress_boxes(call: Call, boxes: np.ndarray, scores: np.ndarray, *inputs: np.ndarray | None) -> Any:
    """ONNX NonMaxSuppression of known boxes: how many are left depends on their numbers."""
    most, overlap, least = (None if x is None else x.reshape(()) for x in (*inputs, *[None] * (3 - len(inputs))))
    corners = boxes.astype(np.float32).reshape(*boxes.shape[:2], 2, 2)
    if call.get("center_point_box", 0):
        center, half = corners[..., 0, :], corners[..., 1, :] / 2
        corners = np.stack([center - half, center + half], axis=-2)
    low, high = corners.min(-2), corners.max(-2)
    areas = np.prod(high - low, axis=-1)
    found = []
    for batch, kind in np.ndindex(*scores.shape[:2]):
        values = scores[batch, kind]
        # Of equal scores the first box is taken first.
        pending = np.argsort(-values, kind="stable")
        pending = pending if least is None else pending[values[pending] > least]
        for _ in range(0 if most is None else int(most)):
            if not pending.size:
                break
            best, pending = pending[0], pending[1:]
            found.append((batch, kind, best))
            a, b = ([x[batch, i] for x in (low, high, areas)] for i in (best, pending))
            shared = np.prod(np.maximum(np.minimum(a[1], b[1]) - np.maximum(a[0], b[0]), 0), axis=-1)
            union = a[2] + b[2] - shared
            ratio = np.divide(shared, union, out=np.zeros_like(shared), where=(shared > 0) & (union > 0))
            pending = pending[ratio <= (0 if overlap is None else overlap)]
    return np.array(found, np.int64).reshape(-1, 3)


@register("RoiAlign", keeps=(1,))
def pool_regions(call: Call, x: jax.Array, regions: Any, batches: jax.Array) -> Any:
    """ONNX RoiAlign. Without a sampling ratio the regions must be known: their sizes decide how many points count."""
    default = "half_pixel" if call.opset >= 16 else "output_half_pixel"
    is_half = call.get("coordinate_transformation_mode", default) == "half_pixel"
    ratio = call.get("sampling_ratio", 0)
    if not ratio and not is_known(regions):
        text = "RoiAlign with sampling_ratio = 0 needs regions that are known when the function is traced"
        raise UnknownValueError(text, call.node.inputs[1:2])
    regions = regions * np.asarray(call.get("spatial_scale", 1.0), x.dtype) - np.asarray(is_half / 2, x.dtype)
    sides = []
    for axis, name in ((1, "output_height"), (0, "output_width")):
        start, length = regions[:, axis], regions[:, axis + 2] - regions[:, axis]
        length = length if is_half else namespace(length).maximum(length, 1)
        bins = call.get(name, 1)
        counts = np.full(len(regions), ratio) if ratio else np.maximum(np.ceil(np.asarray(length) / bins), 0)
        points = int(counts.max(initial=0))
        call.reserve((len(regions), bins, points, x.shape[3 - axis]), x.dtype)
        # The points of a bin in the middle of its equal parts: [region, bin, point].
        parts = (np.arange(points) + 0.5) / np.maximum(counts, 1)[:, None, None]
        steps = jnp.asarray(np.arange(bins)[:, None] + parts, x.dtype)
        position = start[:, None, None] + steps * (length / bins)[:, None, None]
        sides.append((_find_neighbors(position, x.shape[3 - axis]), counts))
    chosen = x[batches.astype(jnp.int32)]
    if call.get("mode", "avg") == "avg":
        matrices = []
        for ((index, weight), counts), n in zip(sides, x.shape[2:], strict=True):
            is_counted = np.arange(weight.shape[2]) < counts[:, None, None]
            weight = jnp.where(is_counted[..., None], weight, 0)
            spread = jnp.where(index[..., None] == np.arange(n), weight[..., None], 0).sum((2, 3))
            matrices.append(spread / np.maximum(counts, 1)[:, None, None].astype(x.dtype))
        return jnp.einsum("rcyx,riy,rjx->rcij", chosen, *matrices, precision=_HIGHEST)
    # The largest of the weighted neighbors of all points, as in ONNX's text: [region, channel, bins, points and sides].
    (rows, row_counts), (columns, column_counts) = sides
    shapes = [side[0].shape[1:] for side in (rows, columns)]
    call.reserve((*chosen.shape[:2], *(math.prod(shape) for shape in shapes)), x.dtype)
    take = jax.vmap(lambda image, y, x: image[:, y.reshape(-1)[:, None], x.reshape(-1)])
    factors = [weight.reshape(len(weight), -1) for _, weight in (rows, columns)]
    weighted = take(chosen, rows[0], columns[0]) * (factors[0][:, :, None] * factors[1][:, None])[:, None]
    counted = [np.arange(shape[1]) < n[:, None] for shape, n in zip(shapes, (row_counts, column_counts), strict=True)]
    is_counted = (
        counted[0][:, None, None, :, None, None, None, None] & counted[1][:, None, None, None, None, None, :, None]
    )
    parts = jnp.where(is_counted, weighted.reshape(*chosen.shape[:2], *shapes[0], *shapes[1]), -jnp.inf)
    most = parts.max((3, 4, 6, 7), initial=-jnp.inf)
    return jnp.where(jnp.isneginf(most), 0, most).astype(x.dtype)


def _find_neighbors(position: Any, length: int) -> tuple[Any, Any]:
    """Return the two elements beside each position on a line, and their weights, which are 0 far outside."""
    is_inside = (position >= -1) & (position <= length)
    position = jnp.clip(position, 0, length - 1)
    base = jnp.floor(position)
    ratio = position - base
    weights = jnp.stack([1 - ratio, ratio], axis=-1)
    index = jnp.stack([base, jnp.minimum(base + 1, length - 1)], axis=-1).astype(jnp.int32)
    return index, jnp.where(is_inside[..., None], weights, 0)


@register("DeformConv")
def convolve_deformed(
    call: Call, x: jax.Array, w: jax.Array, offset: jax.Array, bias: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Any:  # fmt: skip
    """ONNX DeformConv of images: each element of a window is read beside its place, between four neighbors."""
    windows = read_windows(call, x.shape[2:], w.shape[2:])
    check_kernel(windows.kernel)
    groups, offset_groups = call.get("group", 1), call.get("offset_group", 1)
    batch, count = x.shape[0], w[0, 0].size
    # The positions that are read: [batch * offset groups, element of the window, dimension, window].
    moved = offset.reshape(batch * offset_groups, count, 2, -1)
    call.reserve((*moved.shape[:2], x.shape[1] // offset_groups, moved.shape[3]), x.dtype)
    places = []
    for axis, shape in enumerate(((-1, 1), (1, -1))):
        start = np.arange(windows.positions[axis]) * windows.strides[axis] - windows.padding[axis][0]
        step = np.arange(windows.kernel[axis]) * windows.dilations[axis]
        grid = np.broadcast_to(step.reshape(shape), windows.kernel).reshape(-1, 1)
        places.append(grid + np.broadcast_to(start.reshape(shape), windows.positions).reshape(1, -1))
    flat = x.reshape(batch * offset_groups, x.shape[1] // offset_groups, -1)
    total: Any = 0
    position = moved + np.stack(places, axis=1).astype(x.dtype)
    base = jnp.floor(position)
    for corner in itertools.product((0, 1), repeat=2):
        index = base + np.array(corner, x.dtype)[:, None]
        weight = jnp.prod(1 - jnp.abs(position - index), axis=2)
        lengths = np.array(x.shape[2:])[:, None]
        weight = jnp.where(jnp.all((index >= 0) & (index < lengths), axis=2), weight, 0)
        inside = jnp.clip(index, 0, lengths - 1).astype(jnp.int32)
        at = (inside[:, :, 0] * x.shape[3] + inside[:, :, 1]).reshape(flat.shape[0], 1, -1)
        values = jnp.take_along_axis(flat, at, axis=2).reshape(*flat.shape[:2], count, -1)
        total = total + values * weight[:, None]
    if mask is not None:
        total = total * mask.reshape(batch * offset_groups, 1, count, -1)
    columns = total.reshape(batch, groups, -1, moved.shape[3])
    y = jnp.einsum("goi,bgin->bgon", w.reshape(groups, w.shape[0] // groups, -1), columns, precision=_HIGHEST)
    y = y.reshape(batch, w.shape[0], *windows.positions)
    return y if bias is None else y + bias[:, None, None]
