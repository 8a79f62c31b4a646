"""`jax.lax.conv_general_dilated` for integers with zero points."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, scale_arguments
from .._core.entry_point import compile_entry_point
from .._kernels import signed_codes
from .._kernels.convolution import arrange_layout
from ._conv_geometry import check_zero_points, plan_convolution

_NAME = "integer.conv_general_dilated"


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    lhs_zero_point: ArrayLike | None = None,
    rhs_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Convolve two integer arrays with zero points, exactly, into int32.

    out = convolution of lhs - lhs_zero_point with rhs - rhs_zero_point, modulo 2**32

    An int32 overflow wraps around, as in ONNX. Padding, and the gaps that `lhs_dilation` makes, count as 0 after the
    zero point is subtracted. A convolution of any layout, grouping and batching runs as an int8 convolution or
    contraction. The operands are never widened to more than 8 bits, except in a depthwise convolution, whose products
    are summed element by element in int32.

    Args:
        lhs: codes of rank 3 or more: int8, uint8, int4, uint4, int2 or uint2.
        rhs: the kernel, of any of these dtypes, which need not be lhs's.
        window_strides: Static. One stride for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; a negative number
            crops.
        lhs_dilation: Static. The distance between neighboring elements of lhs, for each spatial dimension; None means
            1.
        rhs_dilation: Static. The distance between neighboring elements of the kernel, likewise; None means 1.
        dimension_numbers: Static. As in `jax.lax`; None means (NCHW, OIHW, NCHW), with as many spatial dimensions as
            lhs has.
        feature_group_count: Static. The number of groups of channels; each output feature reads one group.
        batch_group_count: Static. The number of groups of images; each has its own output features.
        lhs_zero_point: the code of 0.0, a scalar in lhs's dtype. None means 0. An int becomes an array of that dtype.
        rhs_zero_point: the code of 0.0, in rhs's dtype: a scalar, or one for each output feature. None means 0. An int
            becomes an array of that dtype.

    Returns:
        int32, in the layout that the dimension numbers specify.

    Raises:
        TypeError: an operand or a zero point has a dtype not listed above, or a static argument has a wrong type.
        ValueError: shapes, windows, groups or dimension numbers do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[0, 128, 255]]], jnp.uint8)
        >>> kernel = jnp.array([[[1, 2, 3]]], jnp.int8)
        >>> jq.integer.conv_general_dilated(x, kernel, (1,), [(1, 1)], lhs_zero_point=128)
        Array([[[-256,  253,  254]]], dtype=int32)

    Source: `jax.lax.conv_general_dilated`; the arithmetic is that of ONNX ConvInteger-10.
    """
    lhs_zero_point = scale_arguments.convert_operand_zero_point(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = scale_arguments.convert_operand_zero_point(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.are_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
    ints = functools.partial(checks.check_integers, _NAME)
    return _conv_general_dilated(
        lhs, rhs, lhs_zero_point, rhs_zero_point,
        window_strides=ints("window_strides", window_strides), padding=ints("padding", padding),
        lhs_dilation=ints("lhs_dilation", lhs_dilation), rhs_dilation=ints("rhs_dilation", rhs_dilation),
        dimension_numbers=_freeze_dimension_numbers(dimension_numbers),
        feature_group_count=ints("feature_group_count", feature_group_count),
        batch_group_count=ints("batch_group_count", batch_group_count), centred=centred,
    )  # fmt: skip


def _freeze_dimension_numbers(numbers: Any) -> Any:
    """Return dimension numbers with their lists as tuples, so that they are hashable."""
    if not isinstance(numbers, list | tuple):  # ConvDimensionNumbers is a tuple
        return numbers
    specs = tuple(tuple(spec) if isinstance(spec, list) else spec for spec in numbers)
    return lax.ConvDimensionNumbers(*specs) if isinstance(numbers, lax.ConvDimensionNumbers) else specs


@compile_entry_point(_NAME)
def _conv_general_dilated(
    lhs: jax.Array, rhs: jax.Array, lhs_zero_point: jax.Array | None, rhs_zero_point: jax.Array | None, *,
    window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, dimension_numbers: Any,
    feature_group_count: int, batch_group_count: int, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "lhs", lhs, dtypes.CONTRACTED)
    checks.check_array(_NAME, "rhs", rhs, dtypes.CONTRACTED)
    plan = plan_convolution(
        _NAME, lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count,
    )  # fmt: skip
    features = rhs.shape[plan.numbers.rhs_spec[0]]
    check_zero_points(_NAME, ("lhs", "rhs"), (lhs, rhs), (lhs_zero_point, rhs_zero_point), features)
    steps = (
        signed_codes.convert_steps(lhs_zero_point, lhs.dtype, centred[0]),
        signed_codes.convert_steps(rhs_zero_point, rhs.dtype, centred[1]),
    )
    return arrange_layout(lhs, rhs, *steps, plan, lambda acc, _: acc)
