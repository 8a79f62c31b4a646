"""The patches of the input of a convolution: the elements under the kernel at each of its positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# A depthwise convolution slices x at most this many times, once for each element of the kernel.
MOST_SLICES = 64


class Window(NamedTuple):
    """The static attributes of a convolution whose x is already padded.

    Attributes:
        channels_last: whether the channels are the last dimension of x, and not its second.
        form: "products", "patches", "rows" or "direct".
        strides: one for each spatial dimension.
        dilations: the distance between neighboring elements of the kernel, for each spatial dimension.
        groups: the number of groups of channels.
        features_last: whether the caller's kernel has its features last in memory, after its channels, as HWIO has.
    """

    channels_last: bool
    form: str
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    features_last: bool = False


def find_out_shape(spatial: tuple[int, ...], kernel: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """Return the number of positions of the kernel along each spatial dimension of a padded x."""
    dimensions = zip(spatial, kernel, window.strides, window.dilations, strict=True)
    return tuple((size - (width - 1) * step - 1) // stride + 1 for size, width, stride, step in dimensions)


def list_spatial(x: jax.Array, window: Window) -> tuple[int, ...]:
    """Return the axes of x's spatial dimensions."""
    return tuple(range(1, x.ndim - 1)) if window.channels_last else tuple(range(2, x.ndim))


def slice_position(x: jax.Array, axes: Any, position: Any, window: Window, out: Any, start: int = 0) -> jax.Array:
    """Return, for every output position, the element of x that one element of the kernel is multiplied with.

    Args:
        x: the padded array.
        axes: the spatial axes of x to slice.
        position: the position of the element in the kernel, along these axes.
        window: the strides and dilations of all spatial dimensions.
        out: the lengths of all spatial dimensions of the output.
        start: the first spatial dimension in `axes`.
    """
    first, strides, limits = [0] * x.ndim, [1] * x.ndim, list(x.shape)
    for i, (axis, p) in enumerate(zip(axes, position, strict=True), start):
        first[axis], strides[axis] = p * window.dilations[i], window.strides[i]
        limits[axis] = first[axis] + (out[i] - 1) * window.strides[i] + 1
    return lax.slice(x, first, limits, strides)


def gather_patches(x: jax.Array, kernel: tuple[int, ...], window: Window) -> tuple[jax.Array, tuple[int, ...]]:
    """Return the patches of x and the spatial shape of the output.

    The patches are [N, *out, positions, C] with channels last, else [N, groups, positions, C / groups, *out]; in the
    form "rows", [N, groups, C / groups, positions, *out].
    """
    axes = list_spatial(x, window)
    out = find_out_shape(tuple(x.shape[a] for a in axes), kernel, window)
    if not window.channels_last:
        spatial = x.shape[2:]
        x = x.reshape(x.shape[0], window.groups, -1, *spatial)
        axes = tuple(a + 1 for a in axes)
    place = x.ndim - 1 if window.channels_last else 3 if window.form == "rows" else 2
    # One dimension of the kernel after the other: the number of slices is then the sum of the kernel's lengths instead
    # of their product. XLA:CPU fuses a stack of few slices into one loop, and compiles a loop for each slice of a large
    # stack. The additional copies take less time than the larger number of slices.
    for i in reversed(range(len(kernel))):
        slices = [slice_position(x, (axes[i],), (p,), window, out, i) for p in range(kernel[i])]
        x = jnp.stack(slices, axis=place) if len(slices) > 1 else lax.expand_dims(slices[0], (place,))
        if i < len(kernel) - 1:  # merge with the kernel positions of the later dimensions, which vary faster
            x = lax.collapse(x, place, place + 2)
        else:
            axes = tuple(a if a < place else a + 1 for a in axes)
        # Without a barrier XLA fuses the stacks and computes all slices again.
        x = lax.optimization_barrier(x) if len(slices) > 1 else x
    return x, out
