"""ONNX Runtime's QLinearGlobalAveragePool."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core import barriers, checks, division, recording
from ..._core.entry_point import compile_entry_point
from ...integer import _requantize
from ._arguments import Encoding, check_eight_bits, convert_numbers, read_encoding

_NAME = "ops.qlinear_global_average_pool"
# How many slices are added element by element before the reduction.
_SLICES = 16
_FEWEST_SLICED = 2**12


def qlinear_global_average_pool(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    channels_last: bool = False,
) -> jax.Array:
    """Average the codes of each channel, as ONNX Runtime's QLinearGlobalAveragePool does.

    y = saturate(round_half_even(float32(sum(x - x_zero_point)) * (x_scale / (y_scale * count))) + y_zero_point),
    where count is the number of spatial positions.

    The sum is exact in int32. The integers are those of ONNX Runtime's kernel for x86-64, which refuses 2**24 positions
    or more, and a factor that is not in [2**-32, 2**8).

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        channels_last: Static. Whether the shapes are (N, *spatial, C).

    Returns:
        The codes, (N, C, 1, ...) or (N, 1, ..., C), in x's dtype.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[1, 2], [3, 2], [255, 255]]], jnp.uint8)
        >>> jq.ops.qlinear_global_average_pool(x, 1.0, 0, 1.0, 1)  # 1.5, 2.5 and 255: ties go to even, then 1 is added
        Array([[[  3],
                [  3],
                [255]]], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearGlobalAveragePool-1.
    """
    x_scale, x_zero_point, y_scale, y_zero_point = convert_numbers(
        _NAME, x, x_scale=x_scale, x_zero_point=x_zero_point, y_scale=y_scale, y_zero_point=y_zero_point
    )
    checks.check_flag(_NAME, "channels_last", channels_last)
    return _qlinear_global_average_pool(
        x, x_scale, x_zero_point, y_scale, y_zero_point, channels_last=bool(channels_last)
    )


def _find_pooled_shape(x: jax.Array, channels_last: bool, **_: Any) -> tuple[tuple[Any, ...], Any]:
    kept = (0, x.ndim - 1) if channels_last else (0, 1)
    return tuple(n if axis in kept else 1 for axis, n in enumerate(x.shape)), x.dtype


@compile_entry_point(_NAME)
@recording.mark("qlinear_global_average_pool", _find_pooled_shape)
def _qlinear_global_average_pool(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array | None, y_scale: jax.Array,
    y_zero_point: jax.Array | None, *, channels_last: bool,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_NAME, "x", x)
    x_encoding = read_encoding(_NAME, "x", x_scale, x_zero_point, dtype)
    y_encoding = read_encoding(_NAME, "y", y_scale, y_zero_point, dtype)
    checks.require(x.ndim >= 3, _NAME, "x", "an array of rank 3 or more", f"shape {x.shape}")
    first = 1 if channels_last else 2
    return average_codes(x, x_encoding, y_encoding, tuple(range(first, first + x.ndim - 2)), keepdims=True)


def average_codes(
    x: jax.Array, x_encoding: Encoding, y_encoding: Encoding, axes: tuple[int, ...], *, keepdims: bool
) -> jax.Array:
    """Return the codes of the means of x along `axes`, from sums that are exact in int32.

    y = saturate(round_half_even(float32(sum(x) - count * zero point of x) * scale) + zero point of y),
    where scale = scale of x / (scale of y * count)
    """
    count = math.prod(x.shape[axis] for axis in axes)
    acc = _sum_codes(x, axes, keepdims=keepdims) - x_encoding.steps * np.int32(count)
    # Rounded before the division, as in ONNX Runtime: x_scale / y_scale / count is another float32.
    divisor = barriers.round_result(y_encoding.scale * np.float32(count))
    scale = jnp.broadcast_to(division.divide(x_encoding.scale, divisor), acc.shape)
    steps = jnp.broadcast_to(y_encoding.steps, acc.shape)
    return _requantize.requantize_accumulator(acc, scale, steps, y_encoding.dtype)


def _sum_codes(x: jax.Array, axes: tuple[int, ...], *, keepdims: bool) -> jax.Array:
    """Return the int32 sums of codes along `axes`.

    XLA:CPU writes the operand of a large reduction to memory as int32, on one thread. A sum of slices reads bytes, on
    all threads, and leaves less to reduce.
    """
    # The size is no int if a dimension is symbolic, as in `jax.export`.
    if not axes or not isinstance(x.size, int) or x.size < _FEWEST_SLICED:
        return jnp.sum(x, axes, dtype=jnp.int32, keepdims=keepdims)
    shape = jax.eval_shape(lambda: jnp.sum(x, axes, keepdims=keepdims)).shape
    first, last = min(axes), max(axes)
    if len(axes) == last - first + 1:
        # Adjacent dimensions, such as the spatial ones, are one dimension that has more to slice.
        x, axes = x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :]), (first,)
    axis = max(axes, key=lambda i: x.shape[i])
    width = x.shape[axis] // _SLICES
    if width == 0:
        return jnp.sum(x, axes, dtype=jnp.int32).reshape(shape)
    total, rest = (
        lax.slice_in_dim(x, start, end, axis=axis).astype(jnp.int32)
        for start, end in ((0, width), (width * _SLICES, x.shape[axis]))
    )
    for i in range(1, _SLICES):
        total = total + lax.slice_in_dim(x, i * width, (i + 1) * width, axis=axis).astype(jnp.int32)
    return (jnp.sum(total, axes) + jnp.sum(rest, axes)).reshape(shape)
