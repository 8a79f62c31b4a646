"""ONNX ConvInteger-10."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from .._core.entry_point import compile_entry_point
from .._kernels import signed_codes
from .._kernels.convolution import convolve_planned
from ._conv_attributes import Attributes, check_attributes, prepare_operands

_NAME = "conv_integer"


def conv_integer(
    x: ArrayLike,
    w: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    w_zero_point: ArrayLike | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> jax.Array:
    """Convolve 8-bit codes in int32, as ONNX's ConvInteger does.

    y = convolution of x - x_zero_point with w - w_zero_point.

    The result is exact modulo 2**32: an int32 that overflows wraps around, as the ONNX text permits. It cannot overflow
    while the kernel has fewer than 2**31 / (255 * 255) = 33025 weights for each output. Padding counts as 0 after the
    zero point is subtracted. Both operands are convolved as int8; only a depthwise convolution, which is a sum of
    elementwise products, widens them.

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        w: codes, int8 or uint8, (M, C / group, *kernel), not necessarily x's dtype.
        x_zero_point: the code of 0.0, a scalar in x's dtype. None means 0. An int becomes a scalar in x's dtype.
        w_zero_point: the code of 0.0, in w's dtype: a scalar, or one for each feature, as [M]. None means 0. An int
            becomes a scalar in w's dtype.
        auto_pad: Static. "NOTSET" pads by `pads`. "SAME_UPPER" and "SAME_LOWER" pad so that the output has ceil(size /
            stride) positions; if the padding is odd, the extra element is at the end or at the beginning, respectively.
            "VALID" does not pad.
        dilations: Static. The step between neighboring elements of the kernel, one for each spatial dimension; None
            means 1.
        group: Static. The number of groups of channels that are convolved separately.
        kernel_shape: Static. The spatial shape of w. None takes it from w.
        pads: Static. How many elements are added at the beginning of each spatial dimension, then how many at the end
            of each; None means 0.
        strides: Static. One stride for each spatial dimension; None means 1.

    Returns:
        int32, (N, M, *positions).

    Raises:
        TypeError: an operand is neither int8 nor uint8, a zero point does not have its operand's dtype, or an
            attribute has a wrong type.
        ValueError: the shapes of the arguments and the attributes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[[2, 3, 4], [5, 6, 7], [8, 9, 255]]]], jnp.uint8)
        >>> jq.conv_integer(x, jnp.ones((1, 1, 2, 2), jnp.uint8), 1, pads=(0, 0, 1, 1))
        Array([[[[ 12,  16,   9],
                 [ 24, 273, 260],
                 [ 15, 262, 254]]]], dtype=int32)

    Source: ONNX ConvInteger-10. ONNX Runtime accepts no w_zero_point per feature; this function follows the text.
    """
    x_zero_point = signed_codes.convert_zero_point_number(_NAME, "x_zero_point", x_zero_point, x)
    w_zero_point = signed_codes.convert_zero_point_number(_NAME, "w_zero_point", w_zero_point, w)
    attributes = check_attributes(
        _NAME, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    # Before jit, in which the values of zero points are unknown: a centered one needs no correction of the sums.
    centred = signed_codes.find_centred((x, w), (x_zero_point, w_zero_point))
    return _conv_integer(x, w, x_zero_point, w_zero_point, attributes=attributes, centred=centred)


@compile_entry_point(_NAME)
def _conv_integer(
    x: jax.Array, w: jax.Array, x_zero_point: jax.Array | None, w_zero_point: jax.Array | None, *,
    attributes: Attributes, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    prepared = prepare_operands(_NAME, x, w, x_zero_point, w_zero_point, attributes, centred)
    # The accumulator is the result, so the epilogue returns it unchanged.
    return convolve_planned(*prepared, False, lambda acc, _: acc)
