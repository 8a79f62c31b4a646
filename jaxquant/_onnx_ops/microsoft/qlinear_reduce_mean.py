"""ONNX Runtime's QLinearReduceMean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from ..._core import checks
from ..._core.entry_point import compile_entry_point
from ._arguments import check_eight_bits, convert_numbers, read_encoding
from .qlinear_global_average_pool import average_codes

_NAME = "ops.qlinear_reduce_mean"


def qlinear_reduce_mean(
    data: ArrayLike,
    data_scale: ArrayLike,
    data_zero_point: ArrayLike | None,
    reduced_scale: ArrayLike,
    reduced_zero_point: ArrayLike | None = None,
    *,
    axes: Sequence[int] | None = None,
    keepdims: bool = True,
) -> jax.Array:
    """Average codes along dimensions, with the inputs of ONNX Runtime's QLinearReduceMean.

    reduced = saturate(round_half_even(float32(sum(data - data_zero_point)) * (data_scale / (reduced_scale * count)))
    + reduced_zero_point), where count is the number of elements of a mean.

    ONNX Runtime defines this operator but has no kernel for CPUs. The formula is that of `qlinear_global_average_pool`,
    which gives the same integers for the spatial dimensions.

    Args:
        data: codes, int8 or uint8, of any shape.
        data_scale: value per step of data, float32, a scalar. A Python number becomes float32.
        data_zero_point: the code of 0.0, a scalar in data's dtype. None means 0. An int becomes a scalar in data's
            dtype.
        reduced_scale: value per step of the result, float32, a scalar. A Python number becomes float32.
        reduced_zero_point: the code of 0.0, a scalar in data's dtype. None means 0. An int becomes a scalar in data's
            dtype.
        axes: Static. The dimensions to average over; negative ones count from the back. None means all.
        keepdims: Static. Whether the result keeps these dimensions, with length 1.

    Returns:
        The codes of the means, in data's dtype. A mean of no elements has the lowest code.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes or axes do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> data = jnp.array([[1, 2], [3, 2], [255, 255]], jnp.uint8)
        >>> jq.ops.qlinear_reduce_mean(data, 1.0, 0, 1.0, 1, axes=[1], keepdims=False)  # 1.5, 2.5 and 255
        Array([  3,   3, 255], dtype=uint8)

    Source: ONNX Runtime's com.microsoft QLinearReduceMean-1, a definition without a kernel for CPUs.
    """
    data_scale, data_zero_point, reduced_scale, reduced_zero_point = convert_numbers(
        _NAME, data, data_scale=data_scale, data_zero_point=data_zero_point, reduced_scale=reduced_scale,
        reduced_zero_point=reduced_zero_point,
    )  # fmt: skip
    checks.check_flag(_NAME, "keepdims", keepdims)
    # Check before jit, whose cache of compiled programs cannot tell True, 1 and 1.0 apart.
    axes = checks.check_integers(_NAME, "axes", axes)
    return _qlinear_reduce_mean(
        data, data_scale, data_zero_point, reduced_scale, reduced_zero_point, axes=axes, keepdims=bool(keepdims)
    )


@compile_entry_point(_NAME)
def _qlinear_reduce_mean(
    data: jax.Array, data_scale: jax.Array, data_zero_point: jax.Array | None, reduced_scale: jax.Array,
    reduced_zero_point: jax.Array | None, *, axes: Any, keepdims: bool,
) -> jax.Array:  # fmt: skip
    dtype = check_eight_bits(_NAME, "data", data)
    data_encoding = read_encoding(_NAME, "data", data_scale, data_zero_point, dtype)
    reduced_encoding = read_encoding(_NAME, "reduced", reduced_scale, reduced_zero_point, dtype)
    return average_codes(data, data_encoding, reduced_encoding, _find_axes(axes, data.ndim), keepdims=keepdims)


def _find_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Return the axes as non-negative ints; raise for one that is out of range or given twice."""
    if axes is None:
        return tuple(range(rank))
    checks.require_type(isinstance(axes, tuple), _NAME, "axes", "a sequence of ints", checks.describe_value(axes))
    result = tuple(checks.check_axis(_NAME, axis, rank, "axes") for axis in axes)
    checks.require(len(set(result)) == len(result), _NAME, "axes", "different axes", axes)
    return result
