"""Convolutions of floats in the forms that XLA:CPU runs fast."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core import recording
from ..._kernels import barriers, convolution

# The product of a row by at most these weights takes less time than its compilation.
_FEW_WEIGHTS = 2**14
_Pairs = tuple[tuple[int, int], ...]


def convolve_floats(
    x: jax.Array, w: jax.Array, strides: tuple[int, ...], padding: _Pairs, dilations: tuple[int, ...], groups: int
) -> jax.Array:
    """Return the convolution of x [N, C, *spatial] with w [O, C / groups, *kernel].

    While a program is traced to find its contractions, it is one equation.
    """
    if recording.is_analyzing() or not all(isinstance(n, int) for n in (*x.shape, *w.shape)):
        return _convolve(x, w, strides, padding, dilations, groups)
    y = convolve_channels_last(jnp.moveaxis(x, 1, -1), w, strides, padding, dilations, groups)
    return jnp.moveaxis(y, -1, 1)


def convolve_channels_last(
    x: jax.Array, w: jax.Array, strides: tuple[int, ...], padding: _Pairs, dilations: tuple[int, ...], groups: int
) -> jax.Array:
    """Return the convolution of x [N, *spatial, C] with w [O, C / groups, *kernel], [N, *spatial, O]."""
    config = {"strides": strides, "padding": padding, "dilations": dilations, "groups": groups}
    default = functools.partial(_convolve, channels_last=True, **config)
    window = convolution.Window(True, "products", strides, dilations, groups)
    if _is_depthwise(x, w, padding, window):
        return barriers.choose_on_cpu(functools.partial(_sum_products, padding=padding, window=window), default, x, w)
    if groups == 1 and math.prod(w.shape[2:]) == 1 and w.size and not any(map(any, padding)):
        return _multiply_channels(x, w, strides)
    if x.ndim == 4 and x.shape[2] == w.shape[3] == 1 and not any(padding[1]):
        # XLA:CPU's kernel works along the last dimension: with one element in it, it takes twice the time.
        y = _convolve(x[:, :, 0], w[..., 0], strides[:1], padding[:1], dilations[:1], groups, channels_last=True)
        return y[:, :, None]
    return default(x, w)


def _multiply_channels(x: jax.Array, w: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """Return the convolution with a kernel of one position, as a product of matrices.

    XLA:CPU makes a product of the convolution, too, but of transposed weights, which a kernel of their own writes to
    memory in each call, and which takes as long to compile as the product.
    """
    if math.prod(strides) > 1:
        x = x[(slice(None), *(slice(None, None, stride) for stride in strides), slice(None))]
    rows, weights = x.reshape(-1, x.shape[-1]), w.reshape(w.shape[:2])
    is_row = rows.shape[0] == 1 and w.size <= _FEW_WEIGHTS and jax.__version_info__ >= (0, 12)
    y = barriers.choose_on_cpu(_multiply_row, _multiply, rows, weights) if is_row else _multiply(rows, weights)
    return y.reshape(*x.shape[:-1], y.shape[1])


# JAX traces an inlined function once for all products of the same shape.
@functools.partial(jax.jit, inline=True)
def _multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


@functools.partial(jax.jit, inline=True)
def _multiply_row(row: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the product of a row by few weights, as that of two rows.

    XLA:CPU calls a library for it, and compiles a product of its own for a single row.
    """
    return _multiply(jnp.pad(row, ((0, 1), (0, 0))), weights)[:1]


def _convolve(
    x: jax.Array, w: jax.Array, strides: tuple[int, ...], padding: _Pairs, dilations: tuple[int, ...], groups: int,
    channels_last: bool = False,
) -> jax.Array:  # fmt: skip
    order = tuple(range(x.ndim))
    images = (0, x.ndim - 1, *range(1, x.ndim - 1)) if channels_last else order
    # The default precision would round float32 to TF32 on a GPU, and to bfloat16 on a TPU.
    return lax.conv_general_dilated(
        x, w, strides, padding, None, dilations, lax.ConvDimensionNumbers(images, order, images), groups,
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip


def _is_depthwise(x: jax.Array, w: jax.Array, padding: _Pairs, window: convolution.Window) -> bool:
    """Return whether each channel has its own kernel, which is small and fits at one position or more."""
    padded = tuple(n + sum(pair) for n, pair in zip(x.shape[1:-1], padding, strict=True))
    has_positions = all(n > 0 for n in (x.size, w.size, *convolution.derive_out_shape(padded, w.shape[2:], window)))
    is_small = math.prod(w.shape[2:]) <= convolution.MOST_SLICES
    return w.shape[:2] == (x.shape[-1], 1) and 1 < window.groups == x.shape[-1] and has_positions and is_small


# JAX traces an inlined function once for all convolutions of the same shape. Each has an operation for each tap.
@functools.partial(jax.jit, static_argnames=("padding", "window"), inline=True)
def _sum_products(x: jax.Array, w: jax.Array, *, padding: _Pairs, window: convolution.Window) -> jax.Array:
    """Return a depthwise convolution as the sum of shifted products.

    XLA:CPU runs a grouped convolution of floats up to 100 times slower.
    """
    axes = tuple(range(1, x.ndim - 1))
    config = [(0, 0, 0), *((*pair, 0) for pair in padding), (0, 0, 0)]
    # Without the barriers, the loop over the products would look for the padding and for the transposed weights in each
    # of them, and write its results in the order of their reader, which takes longer than a pass over them.
    wide = lax.optimization_barrier(lax.pad(x, jnp.zeros((), x.dtype), config))
    weights = barriers.transpose_in_memory(w[:, 0], (*axes, 0))
    out = convolution.derive_out_shape(wide.shape[1:-1], w.shape[2:], window)
    total: Any = None
    for position in itertools.product(*map(range, w.shape[2:])):
        shifted = convolution.slice_position(wide, axes, position, window, out)
        # jax.numpy's operators take several times as long to trace.
        term = lax.mul(shifted, lax.broadcast_in_dim(weights[position], shifted.shape, (x.ndim - 1,)))
        total = term if total is None else lax.add(total, term)
    return lax.optimization_barrier(total)
