"""One integer convolution in the form that each backend runs fast. Knows int8 and int32, and two layouts.

XLA:CPU has a vector kernel for int8 convolutions in NHWC with HWIO weights. What it lacks is put otherwise: few
input channels, 1x1 kernels and groups as a contraction with patches of x; depthwise as a sum of shifted products.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .._core import barriers
from . import _layout
from ._dot_kernel import batch_all, contract_integers

# Measured on the machine of docs/speed.md: up to here patches beat the convolution kernel (3 channels 7x7/2: 0.6 ms
# against 2.9, 1 channel 5x5: 0.3 against 1.1 to 1.8; 16 channels 3x3: 0.39 against 0.31).
_FEW_CHANNELS = 8
# XLA:CPU gives its kernel no convolution of so many channels or fewer into so many features or fewer.
_NARROW = 16
_FEW_PIXELS = 16  # fewer columns than this leave a contraction per image thin: whole batches make its rows then
_UNROLLED = 64  # kernel positions spelled out in the program; beyond, a kernel is taken dimension by dimension

Steps = jax.Array | None


class Window(NamedTuple):
    """What is static in a convolution of an x that is padded already."""

    channels_last: bool
    form: str  # "products", "patches" or "direct"
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int


def find_window(x_shape: tuple[int, ...], w_shape: tuple[int, ...], window: Window, *, channels_last: bool) -> Window:
    """Returns the window with the form and the layout that suit it.

    Args:
        x_shape: the padded x's, as (batch, channels, *spatial).
        w_shape: (features, channels / groups, *kernel).
        window: strides, dilations and groups.
        channels_last: how the caller's x lies.
    """
    depth, positions = w_shape[1], math.prod(w_shape[2:])
    if depth == 1 and positions <= _UNROLLED:
        return window._replace(form="products", channels_last=channels_last)
    narrow = depth <= _FEW_CHANNELS or max(depth, w_shape[0]) <= _NARROW
    if positions == 1 or narrow or window.groups > 1:
        pixels = _find_out_shape(x_shape[2:], w_shape[2:], window)
        few = all(isinstance(p, int) for p in pixels) and math.prod(pixels) < _FEW_PIXELS
        last = window.groups == 1 and (channels_last or few)
        return window._replace(form="patches", channels_last=last)
    return window._replace(form="direct", channels_last=True)


def convolve(x: jax.Array, w: jax.Array, x_steps: Steps, w_steps: Steps, window: Window) -> jax.Array:
    """Returns the convolution of x - x_steps with w - w_steps, modulo 2**32.

    Args:
        x: int8 [N, C, *spatial], or [N, *spatial, C] if channels are last, padded with x_steps.
        w: int8 [O, C / groups, *kernel].
        x_steps: int32 [N or 1, groups or 1], or None for 0.
        w_steps: int32 [O or 1], or None for 0.
        window: Static.

    Returns:
        int32 in x's layout, with O channels.
    """
    return _make_batchable(window)(x, w, x_steps, w_steps)


@functools.cache
def _make_batchable(window: Window) -> Any:
    function = custom_vmap(functools.partial(_convolve, window=window))
    function.def_vmap(functools.partial(_convolve_under_vmap, window))
    return function


def _convolve(x: jax.Array, w: jax.Array, x_steps: Steps, w_steps: Steps, *, window: Window) -> jax.Array:
    forms = {"products": _sum_shifted_products, "patches": _extract_patches, "direct": _convolve_direct}
    # No GPU library convolves int8 into int32: elsewhere than on a CPU the patches are contracted.
    default = "products" if window.form == "products" else "patches"
    cpu, other = (functools.partial(forms[form], window=window) for form in (window.form, default))
    return lax.platform_dependent(x, w, x_steps, w_steps, cpu=cpu, default=other)


def _find_out_shape(spatial: tuple[int, ...], kernel: tuple[int, ...], window: Window) -> tuple[int, ...]:
    reach = zip(spatial, kernel, window.strides, window.dilations, strict=True)
    return tuple((s - (k - 1) * d - 1) // t + 1 for s, k, t, d in reach)


def _list_spatial(x: jax.Array, window: Window) -> tuple[int, ...]:
    """Returns the axes of x's spatial dimensions."""
    return tuple(range(1, x.ndim - 1)) if window.channels_last else tuple(range(2, x.ndim))


def _sum_shifted_products(x: jax.Array, w: jax.Array, x_steps: Steps, w_steps: Steps, *, window: Window) -> jax.Array:
    """Depthwise: sum over kernel positions of shifted x times one weight a channel, element-wise, in int32.

    XLA:CPU runs a grouped convolution of one channel a group 20 to 50 times slower. The sums need int32: the products
    of two int8 fill 16 bits.
    """
    axes, features, channels = _list_spatial(x, window), w.shape[0], window.groups
    out = _find_out_shape(tuple(x.shape[a] for a in axes), w.shape[2:], window)
    steps = lax.platform_dependent(w, w_steps, cpu=_center_kernel_by_contraction, default=_center_kernel)
    multiplier = features // channels
    acc: Any = None
    for position in itertools.product(*(range(k) for k in w.shape[2:])):
        seen = _slice_position(x, axes, position, window, out).astype(jnp.int32)
        seen = _repeat_channels(seen, 1 if not window.channels_last else x.ndim - 1, multiplier)
        term = seen * _align_features(steps[position], seen.shape, window)
        acc = term if acc is None else acc + term
    assert acc is not None
    if x_steps is None:
        return acc
    sums = jnp.sum(steps, axis=tuple(range(steps.ndim - 1)), dtype=jnp.int32)
    return acc - _find_correction(x_steps, sums, acc.shape, window)


def _center_kernel(w: jax.Array, w_steps: Steps) -> jax.Array:
    """Returns int8 [O, 1, *kernel] less its zero points, as int32 [*kernel, O]."""
    steps = jnp.moveaxis(w[:, 0], 0, -1).astype(jnp.int32)
    return steps if w_steps is None else steps - jnp.broadcast_to(w_steps, steps.shape)


def _center_kernel_by_contraction(w: jax.Array, w_steps: Steps) -> jax.Array:
    """The same as a contraction with the identity, and a column of -1 for the zero points, which fit into int8 too.

    XLA:CPU fuses anything else with the products, whatever the barriers, and then unpacks, converts, centers and
    transposes the weights anew for every pixel: 10 times slower with codes of 4 bits, 3 times with a 7x7 kernel.
    """
    features, positions = w.shape[0], math.prod(w.shape[2:])
    rows, selection = w.reshape(features, positions), np.eye(positions, dtype=np.int8)
    if w_steps is not None:
        points = jnp.broadcast_to(w_steps.astype(jnp.int8), (features,))
        rows = lax.concatenate([rows, points[:, None]], 1)
        selection = np.concatenate([selection, np.full((positions, 1), -1, np.int8)], 1)
    steps = lax.dot_general(jnp.asarray(selection), rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return steps.reshape(*w.shape[2:], features)


def _repeat_channels(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Returns x with every entry of the axis repeated in place."""
    if times == 1:
        return x
    wide = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    places = tuple(a if a <= axis else a + 1 for a in range(x.ndim))
    return lax.broadcast_in_dim(x, wide, places).reshape(*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])


def _align_features(value: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    axis = len(shape) - 1 if window.channels_last else 1
    return lax.broadcast_in_dim(value, shape, (axis,))


def _find_correction(x_steps: jax.Array, sums: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    """Returns x_steps times the sums over each feature's kernel, in the accumulator's shape."""
    axis = len(shape) - 1 if window.channels_last else 1
    features, images = shape[axis], x_steps.shape[0]
    per_group = jnp.broadcast_to(x_steps, (images, window.groups))
    per_feature = _repeat_channels(per_group, 1, features // window.groups)
    product = per_feature * jnp.broadcast_to(sums, per_feature.shape)
    if images == 1:
        return lax.broadcast_in_dim(product[0], shape, (axis,))
    return lax.broadcast_in_dim(product, shape, (0, axis))


def _extract_patches(x: jax.Array, w: jax.Array, x_steps: Steps, w_steps: Steps, *, window: Window) -> jax.Array:
    """A contraction of the weights with the patches of x, without a transpose in either layout."""
    features, depth, *kernel = w.shape
    length = depth * math.prod(kernel)
    positions_first = (0, *range(2, w.ndim), 1)
    weights = _layout.transpose_in_memory(w, positions_first).reshape(features, length)
    seen, out = _gather_patches(x, tuple(kernel), window)
    images, groups = x.shape[0], window.groups
    if window.channels_last:
        assert groups == 1
        rows = lax.optimization_barrier(seen).reshape(1, -1, length)
        row_steps = x_steps
        if x_steps is not None:
            row_steps = (
                x_steps.reshape(1, -1) if x_steps.shape[0] == 1 else _repeat_channels(x_steps.T, 1, math.prod(out))
            )
        column_steps = None if w_steps is None else w_steps.reshape(1, -1)
        acc = contract_integers(rows, weights[None], row_steps, column_steps, transposed=True)
        return acc.reshape(images, *out, features)
    batch = images * groups
    columns = lax.optimization_barrier(seen.reshape(batch, length, math.prod(out)))
    each = lax.broadcast_in_dim(
        weights.reshape(groups, -1, length), (images, groups, features // groups, length), (1, 2, 3)
    )
    left = lax.optimization_barrier(each.reshape(batch, -1, length))
    left_steps = w_steps if w_steps is None else _group_steps(w_steps, images, groups)
    right_steps = None
    if x_steps is not None:
        single = x_steps.size == 1
        right_steps = x_steps if single else jnp.broadcast_to(x_steps, (images, groups)).reshape(batch, 1)
    acc = contract_integers(left, columns, left_steps, right_steps, transposed=False)
    return acc.reshape(images, features, *out)


def _group_steps(w_steps: jax.Array, images: int, groups: int) -> jax.Array:
    if w_steps.size == 1:
        return w_steps.reshape(1, 1)
    grouped = w_steps.reshape(groups, -1)
    return lax.broadcast_in_dim(grouped, (images, *grouped.shape), (1, 2)).reshape(images * groups, -1)


def _gather_patches(x: jax.Array, kernel: tuple[int, ...], window: Window) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns the patches, [N, *out, kernel, C] or [N, groups, kernel, C / groups, *out], and the output's shape."""
    axes = _list_spatial(x, window)
    out = _find_out_shape(tuple(x.shape[a] for a in axes), kernel, window)
    if not window.channels_last:
        spatial = x.shape[2:]
        x = x.reshape(x.shape[0], window.groups, -1, *spatial)
        axes = tuple(a + 1 for a in axes)
    place = x.ndim - 1 if window.channels_last else 2
    gather = _gather_at_once if math.prod(kernel) <= _UNROLLED else _gather_by_dimension
    return gather(x, axes, kernel, window, out, place), out


def _gather_at_once(x: jax.Array, axes: Any, kernel: Any, window: Window, out: Any, place: int) -> jax.Array:
    seen = [_slice_position(x, axes, p, window, out) for p in itertools.product(*(range(k) for k in kernel))]
    if len(seen) == 1:
        return jnp.expand_dims(seen[0], place)
    return jnp.stack(seen, axis=place)


def _gather_by_dimension(x: jax.Array, axes: Any, kernel: Any, window: Window, out: Any, place: int) -> jax.Array:
    """The same with as many slices as the kernel's sizes add up to, not multiply to; one more copy a dimension."""
    for i in reversed(range(len(kernel))):
        seen = [_slice_position(x, (axes[i],), (p,), window, out, i) for p in range(kernel[i])]
        x = jnp.stack(seen, axis=place)
        if i < len(kernel) - 1:  # positions found before vary faster than the new ones
            x = lax.collapse(x, place, place + 2)
        else:
            axes = tuple(a if a < place else a + 1 for a in axes)
        x = lax.optimization_barrier(x)
    return x


def _slice_position(x: jax.Array, axes: Any, position: Any, window: Window, out: Any, start: int = 0) -> jax.Array:
    first, strides, limits = [0] * x.ndim, [1] * x.ndim, list(x.shape)
    for i, (axis, p) in enumerate(zip(axes, position, strict=True), start):
        first[axis], strides[axis] = p * window.dilations[i], window.strides[i]
        limits[axis] = first[axis] + (out[i] - 1) * window.strides[i] + 1
    return lax.slice(x, first, limits, strides)


def _convolve_direct(x: jax.Array, w: jax.Array, x_steps: Steps, w_steps: Steps, *, window: Window) -> jax.Array:
    """XLA's own convolution; the sums that zero points need come from the same kernel, with weights of ones."""
    flat, filters, planar = _make_planar(x, w, window)
    acc = _convolve_planes(flat, filters, planar)
    length = math.prod(w.shape[1:])
    # A contraction with ones: XLA:CPU adds up so many int8 four times slower.
    ones = jnp.ones((1, 8, length), jnp.int8)
    sums = contract_integers(w.reshape(1, -1, length), ones, None, None, transposed=True)[0, :, 0]
    if w_steps is not None:
        wide = jnp.broadcast_to(w_steps, sums.shape)
        sums = sums - np.int32(length) * wide
        each = (8 if filters.shape[1] > _NARROW else _NARROW + 8) if window.groups == 1 else 1
        ones = jnp.ones((window.groups * each, *filters.shape[1:]), jnp.int8)
        patch_sums = lax.slice_in_dim(_convolve_planes(flat, ones, planar), 0, None, each, 3)
        repeated = _repeat_channels(patch_sums, 3, acc.shape[3] // window.groups)
        acc = acc - repeated * _align_features(wide, acc.shape, planar)
    out = _find_out_shape(tuple(x.shape[a] for a in _list_spatial(x, window)), w.shape[2:], window)
    acc = acc.reshape(x.shape[0], *out, acc.shape[3])
    return acc if x_steps is None else acc - _find_correction(x_steps, sums, acc.shape, window)


def _make_planar(x: jax.Array, w: jax.Array, window: Window) -> tuple[jax.Array, jax.Array, Window]:
    """Returns a convolution of any rank as one over planes, which is what the kernel takes.

    One spatial dimension gets another of 1; of three or more, the leading ones become images and channels.
    """
    assert window.channels_last
    rank = x.ndim - 2
    if rank == 1:
        planar = window._replace(strides=(1, *window.strides), dilations=(1, *window.dilations))
        return x[:, None], w[:, :, None], planar
    planar = window._replace(strides=window.strides[-2:], dilations=window.dilations[-2:])
    if rank == 2:
        return x, w, planar
    axes, kernel = _list_spatial(x, window)[: rank - 2], w.shape[2:rank]
    out = _find_out_shape(x.shape[1 : rank - 1], kernel, window._replace(
        strides=window.strides[: rank - 2], dilations=window.dilations[: rank - 2]
    ))  # fmt: skip
    grouped = x.reshape(*x.shape[:-1], window.groups, x.shape[-1] // window.groups)
    seen = [_slice_position(grouped, axes, p, window, out) for p in itertools.product(*(range(k) for k in kernel))]
    wide = jnp.stack(seen, axis=-2)  # [N, *out, H, W, groups, positions, channels / groups]
    flat = wide.reshape(x.shape[0] * math.prod(out), *x.shape[rank - 1 : rank + 1], x.shape[-1] * len(seen))
    filters = jnp.moveaxis(w, 1, rank - 1).reshape(w.shape[0], w.shape[1] * len(seen), *w.shape[rank:])
    return barriers.pin_layout(flat), filters, planar


def _convolve_planes(x: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    return lax.conv_general_dilated(
        x, _layout.transpose_in_memory(w, (2, 3, 1, 0)), window.strides, "VALID", rhs_dilation=window.dilations,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=window.groups,
        preferred_element_type=jnp.int32,
    )  # fmt: skip


def _convolve_under_vmap(window: Window, size: int, batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
    """Makes more images of a batch of x, and more groups of a batch of weights: never one convolution a time."""
    if not batched[1] and not batched[3]:
        return _fold_into_images(window, size, batched, *operands), True
    x, w, x_steps, w_steps = batch_all(size, batched, operands)
    channel = x.ndim - 1 if window.channels_last else 2
    groups = jnp.moveaxis(x, 0, channel - 1)
    merged = groups.reshape(*groups.shape[: channel - 1], -1, *groups.shape[channel + 1 :])
    if x_steps is not None:
        wide = jnp.broadcast_to(x_steps, (*x_steps.shape[:2], window.groups))
        x_steps = jnp.swapaxes(wide, 0, 1).reshape(wide.shape[1], -1)
    if w_steps is not None:
        w_steps = jnp.broadcast_to(w_steps, (size, w.shape[1])).reshape(-1)
    wider = window._replace(groups=window.groups * size)
    filters = w.reshape(-1, *w.shape[2:])
    spatial = merged.shape[1:-1] if window.channels_last else merged.shape[2:]
    wider = find_window((merged.shape[0], 0, *spatial), filters.shape, wider, channels_last=window.channels_last)
    turned = _swap_between(merged, window.channels_last, wider.channels_last)
    acc = convolve(turned, filters, x_steps, w_steps, wider)
    acc = _swap_between(acc, wider.channels_last, window.channels_last)
    split = acc.reshape(*acc.shape[: channel - 1], size, -1, *acc.shape[channel:])
    return jnp.moveaxis(split, channel - 1, 0), True


def _fold_into_images(window: Window, size: int, batched: Any, x: Any, w: Any, x_steps: Any, w_steps: Any) -> jax.Array:
    x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
    if batched[2]:
        wide = jnp.broadcast_to(x_steps, (size, x.shape[1], x_steps.shape[2]))
        x_steps = wide.reshape(-1, x_steps.shape[2])
    elif x_steps is not None and x_steps.shape[0] > 1:
        x_steps = jnp.tile(x_steps, (size, 1))
    acc = convolve(x.reshape(-1, *x.shape[2:]), w, x_steps, w_steps, window)
    return acc.reshape(size, -1, *acc.shape[1:])


def _swap_between(x: jax.Array, is_last: bool, wanted_last: bool) -> jax.Array:
    """Returns x in the other layout where the two differ."""
    if is_last == wanted_last:
        return x
    middle = tuple(range(1, x.ndim - 1))
    return _layout.transpose_in_memory(x, (0, *range(2, x.ndim), 1) if wanted_last else (0, x.ndim - 1, *middle))
