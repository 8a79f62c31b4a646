"""ONNX ConvInteger-10."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from .._core.entry_point import compile_entry_point
from ..integer import _operands
from ..integer.conv_general_dilated import convolve_planned
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
    """y = convolution of x - x_zero_point with w - w_zero_point, in int32.

    Exact modulo 2**32: the int32 wraps around, as the ONNX text lets it. It cannot while a kernel has fewer than
    2**31 / (255 * 255) = 33025 weights. Padding counts as 0 after the zero point is subtracted. Both operands enter
    as int8; only a depthwise convolution, a sum of products element by element, widens what it has at hand.

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        w: codes, int8 or uint8, (M, C / group, *kernel), not necessarily x's dtype.
        x_zero_point: steps, a scalar in x's dtype. None is 0. An int stands for an array of it.
        w_zero_point: steps, in w's dtype: a scalar, or [M]. Likewise.
        auto_pad: Static. "NOTSET" pads by `pads`; "SAME_UPPER" and "SAME_LOWER" so that ceil(size / stride) positions
            fit, an odd one at the end or at the beginning; "VALID" not at all.
        dilations: Static. Steps between neighbours of the kernel, one for each spatial dimension; None is 1.
        group: Static. Groups of channels that do not meet.
        kernel_shape: Static. None, or w's own.
        pads: Static. Where each spatial dimension begins, then where each ends; None is 0.
        strides: Static. One for each spatial dimension; None is 1.

    Returns:
        int32, (N, M, *positions).

    Raises:
        TypeError: an operand is neither int8 nor uint8, a zero point has another dtype than its operand, or an
            attribute a wrong type.
        ValueError: shapes and attributes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[[2, 3, 4], [5, 6, 7], [8, 9, 255]]]], jnp.uint8)
        >>> jq.conv_integer(x, jnp.ones((1, 1, 2, 2), jnp.uint8), 1, pads=(0, 0, 1, 1))
        Array([[[[ 12,  16,   9],
                 [ 24, 273, 260],
                 [ 15, 262, 254]]]], dtype=int32)

    Source: ONNX ConvInteger-10. ONNX Runtime takes no w_zero_point per feature; here the text holds.
    """
    x_zero_point = _operands.convert_zero_point_number(_NAME, "x_zero_point", x_zero_point, x)
    w_zero_point = _operands.convert_zero_point_number(_NAME, "w_zero_point", w_zero_point, w)
    attributes = check_attributes(
        _NAME, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    centred = _operands.find_centred((x, w), (x_zero_point, w_zero_point))
    return _conv_integer(x, w, x_zero_point, w_zero_point, attributes=attributes, centred=centred)


@compile_entry_point(_NAME)
def _conv_integer(
    x: jax.Array, w: jax.Array, x_zero_point: jax.Array | None, w_zero_point: jax.Array | None, *,
    attributes: Attributes, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    prepared = prepare_operands(_NAME, x, w, x_zero_point, w_zero_point, attributes, centred)
    return convolve_planned(*prepared, False, lambda acc, _: acc)
