"""Products of matrices, convolutions and pools of floats."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._core import recording
from ...._kernels import barriers
from ..channels_last import ChannelsLast
from ..float_convolution import convolve_channels_last, convolve_floats
from ..graph import SHARED_WEIGHTS, WINDOW_SUM, register
from ..interpret import Call
from ..values import canonicalize_dtype, list_ints
from .windows import count_elements, list_window_elements, read_windows, reduce_slices, reduce_windows

# The default precision would round float32 to TF32 on a GPU, and to bfloat16 on a TPU.
_HIGHEST = lax.Precision.HIGHEST
# With more weights than these, transposing them in each call takes longer than the products gain.
_MOST_SHARED = 2**17


@register("MatMul")
def multiply_matrices(call: Call, a: jax.Array, b: jax.Array) -> Any:
    """ONNX MatMul."""
    return jnp.matmul(a, b, precision=_HIGHEST)


@register("Gemm")
def multiply_general(call: Call, a: jax.Array, b: jax.Array, c: jax.Array | None = None) -> Any:
    """ONNX Gemm: alpha * a @ b + beta * c."""
    return _add_scaled(call, _multiply_scaled(call, a.T if call.get("transA", 0) else a, b), c)


@register("GemmOfSlices", domain="jaxquant")
def multiply_slices(call: Call, a: jax.Array, b: jax.Array, c: jax.Array | None = None) -> Any:
    """ONNX Gemm of each matrix of a stack, as one product of matrices; the results are outputs of their own."""
    count, rows, length = a.shape
    y = _multiply_scaled(call, a.reshape(count * rows, length), b)
    return tuple(_add_scaled(call, y.reshape(count, rows, y.shape[1]), c))


def _multiply_scaled(call: Call, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return alpha * a @ b, with b transposed if the node says so."""
    alpha, is_transposed = call.get("alpha", 1.0), call.get("transB", 0)
    if not is_transposed or recording.is_analyzing():
        y = jnp.matmul(a, b.T if is_transposed else b, precision=_HIGHEST)
    elif call.get(SHARED_WEIGHTS) and a.shape[0] == 1 and b.size <= _MOST_SHARED and jax.__version_info__ >= (0, 12):
        y = barriers.choose_on_cpu(_multiply_row, _multiply_transposed, a, b)
    else:
        y = _multiply_transposed(a, b)
    # A product by 1 would cost a pass over y if XLA did not see the constant.
    return y if alpha == 1 else (y * alpha).astype(a.dtype)


def _add_scaled(call: Call, y: jax.Array, c: jax.Array | None) -> jax.Array:
    beta = call.get("beta", 1.0)
    if c is None or beta == 0:
        return y
    return (y + (c if beta == 1 else c * beta)).astype(y.dtype)


# JAX traces an inlined function once for all products of the same shape.
@functools.partial(jax.jit, inline=True)
def _multiply_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    # XLA:CPU would write the transposed weights to memory before it multiplies them.
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=_HIGHEST)


@functools.partial(jax.jit, inline=True)
def _multiply_row(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of one row by transposed weights that other products read, too.

    XLA:CPU compiles a product of its own for each product of a row, which takes several times as long as for a
    convolution, for which it calls a library. That needs the weights transposed, which is done once for all products.
    """
    numbers = ("NHWC", "OIHW", "NHWC")
    y = lax.conv_general_dilated(
        a[:, None, None], b[:, :, None, None], (1, 1), "VALID", dimension_numbers=numbers, precision=_HIGHEST
    )
    return y[:, 0, 0]


@register("Einsum")
def sum_products(call: Call, *operands: jax.Array) -> Any:
    """ONNX Einsum."""
    return jnp.einsum(call.get("equation").replace(" ", ""), *operands, precision=_HIGHEST)


def _spatial_numbers(rank: int) -> lax.ConvDimensionNumbers:
    """Return the layout (N, C, *spatial) and (M, C, *kernel)."""
    order = tuple(range(rank))
    return lax.ConvDimensionNumbers(order, order, order)


@register("Conv")
def convolve_images(
    call: Call, x: jax.Array | ChannelsLast, w: jax.Array, b: jax.Array | None = None
) -> jax.Array | ChannelsLast:
    """ONNX Conv."""
    if not isinstance(x, ChannelsLast):
        return convolve(call, x, w, b)
    y = convolve_channels_last(x.array, w, *_read_convolution(call, x.shape, w))
    return ChannelsLast(y if b is None else y + b.reshape(1, 1, 1, -1))


def convolve(call: Call, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    """Return the result of ONNX Conv in its layout."""
    y = convolve_floats(x, w, *_read_convolution(call, x.shape, w))
    return y if b is None else y + b.reshape(1, -1, *(1,) * (x.ndim - 2))


def _read_convolution(call: Call, shape: tuple[int, ...], w: jax.Array) -> tuple[Any, Any, Any, int]:
    """Return the strides, the padding, the dilations and the groups of a Conv."""
    windows = read_windows(call, shape[2:], w.shape[2:])
    return windows.strides, windows.padding, windows.dilations, call.get("group", 1)


@register("ConvTranspose")
def convolve_transposed(call: Call, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> Any:
    """ONNX ConvTranspose: a convolution of x with its elements a stride apart, by the flipped kernel."""
    rank, group = x.ndim - 2, call.get("group", 1)
    strides, dilations = (tuple(call.get(name) or (1,) * rank) for name in ("strides", "dilations"))
    extra = tuple(call.get("output_padding") or (0,) * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    pads = _compute_transposed_pads(call, x.shape[2:], reach, strides, extra)
    # The kernel is stored as (C, M / group, *kernel). A convolution wants (M, C / group, *kernel), flipped.
    channels, features = w.shape[0], w.shape[1]
    kernel = w.reshape(group, channels // group, features, *w.shape[2:]).swapaxes(1, 2)
    kernel = kernel.reshape(group * features, channels // group, *w.shape[2:])
    kernel = jnp.flip(kernel, tuple(range(2, w.ndim)))
    # Full padding by the kernel, less what the operator's pads cut off; output_padding adds at the end only.
    padding = [(r - 1 - low, r - 1 - high + e) for r, (low, high), e in zip(reach, pads, extra, strict=True)]
    y = lax.conv_general_dilated(
        x, kernel, (1,) * rank, padding, strides, dilations, _spatial_numbers(x.ndim), group, precision=_HIGHEST
    )
    return y if b is None else y + b.reshape(1, -1, *(1,) * rank)


def _compute_transposed_pads(call: Call, lengths: Any, reach: Any, strides: Any, extra: Any) -> list[tuple[int, int]]:
    """Return how much a transposed convolution cuts off at the beginning and the end of each dimension."""
    rank = len(lengths)
    shape, auto_pad = call.get("output_shape"), call.get("auto_pad", "NOTSET")
    if shape is None and not auto_pad.startswith("SAME"):
        pads = call.get("pads") or (0,) * (2 * rank)
        return [(pads[i], pads[rank + i]) if auto_pad == "NOTSET" else (0, 0) for i in range(rank)]
    target = [n * s for n, s in zip(lengths, strides, strict=True)] if shape is None else list(shape)[-rank:]
    result = []
    for n, s, e, r, length in zip(lengths, strides, extra, reach, target, strict=True):
        total = s * (n - 1) + e + r - length
        total = max(total, 0) if shape is None else total  # a short kernel does not reach the whole of the target
        small = total // 2
        result.append((small, total - small) if auto_pad == "SAME_UPPER" else (total - small, small))
    return result


@register("MaxPool")
def pool_largest(call: Call, x: jax.Array | ChannelsLast) -> Any:
    """ONNX MaxPool, with the positions of the maxima if the graph reads them."""
    windows = read_windows(call, x.shape[2:])
    least = np.asarray(np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf, x.dtype)
    if isinstance(x, ChannelsLast):
        if 0 not in windows.positions:
            return ChannelsLast(reduce_slices(call, x.array, windows, least, jnp.maximum))
        x = x.read()
    if not call.has_second_output:
        return reduce_windows(x, windows, least, lax.max)
    lengths = x.shape[2:]
    places = np.arange(math.prod(lengths), dtype=np.int32)
    places = places.reshape(lengths[::-1]).T if call.get("storage_order", 0) else places.reshape(lengths)
    index = jnp.asarray(np.broadcast_to(places, (1, 1, *lengths)))
    values, positions = (list_window_elements(call, v, windows, w) for v, w in ((x, least), (index, -1)))
    best, best_index = values[0], jnp.broadcast_to(positions[0], values[0].shape)
    # In the order of the kernel, so that the first one of equal elements counts.
    for value, position in zip(values[1:], positions[1:], strict=True):
        # The padding has the index -1, and loses against an element that is as small.
        is_better = (value > best) | ((best_index < 0) & (position >= 0))
        best, best_index = jnp.where(is_better, value, best), jnp.where(is_better, position, best_index)
    planes = np.arange(math.prod(x.shape[:2]), dtype=np.int32).reshape(*x.shape[:2], *(1,) * len(lengths))
    return best, (best_index + planes * np.int32(math.prod(lengths))).astype(canonicalize_dtype(np.int64))


@register("AveragePool")
def pool_average(call: Call, x: jax.Array) -> Any:
    """ONNX AveragePool."""
    windows = read_windows(call, x.shape[2:])
    total = reduce_windows(x, windows, np.zeros((), x.dtype), lax.add)
    if call.get(WINDOW_SUM):
        return total
    counts = count_elements(call, windows, x.shape[2:], bool(call.get("count_include_pad", 0)))
    return (total / counts.astype(x.dtype)).astype(x.dtype)


@register("LpPool")
def pool_norm(call: Call, x: jax.Array) -> Any:
    """ONNX LpPool."""
    p = call.get("p", 2)
    total = reduce_windows(jnp.abs(x) ** p, read_windows(call, x.shape[2:]), np.zeros((), x.dtype), lax.add)
    return total ** (1 / p)


@register("GlobalAveragePool")
def pool_global_average(call: Call, x: jax.Array) -> Any:
    """ONNX GlobalAveragePool."""
    return jnp.mean(x, tuple(range(2, x.ndim)), keepdims=True)


@register("GlobalMaxPool")
def pool_global_largest(call: Call, x: jax.Array) -> Any:
    """ONNX GlobalMaxPool."""
    return jnp.max(x, tuple(range(2, x.ndim)), keepdims=True)


@register("GlobalLpPool")
def pool_global_norm(call: Call, x: jax.Array) -> Any:
    """ONNX GlobalLpPool."""
    p = call.get("p", 2)
    return jnp.sum(jnp.abs(x) ** p, tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)


@register("MaxUnpool", static=(2,))
def unpool(call: Call, x: jax.Array, indices: jax.Array, shape: np.ndarray | None = None) -> Any:
    """ONNX MaxUnpool: the inverse of MaxPool, zeros elsewhere."""
    rank = x.ndim - 2
    strides, pads = tuple(call.get("strides") or (1,) * rank), tuple(call.get("pads") or (0,) * (2 * rank))
    kernel = call.get("kernel_shape")
    lengths = [(n - 1) * strides[i] - pads[i] - pads[rank + i] + kernel[i] for i, n in enumerate(x.shape[2:])]
    target = (*x.shape[:2], *lengths) if shape is None else list_ints(shape)
    call.reserve(target, x.dtype)
    index = indices.astype(jnp.int32).reshape(-1)
    if shape is not None:
        # The indices count the elements of the array that the pool saw; with a larger output only its corner is used.
        position = jnp.unravel_index(index, (*x.shape[:2], *lengths))
        return jnp.zeros(target, x.dtype).at[position].set(x.reshape(-1))
    return jnp.zeros(math.prod(target), x.dtype).at[index].set(x.reshape(-1)).reshape(target)
