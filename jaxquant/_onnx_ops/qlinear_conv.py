"""ONNX QLinearConv-10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core import checks, dtypes, granularity, recording
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale
from .._kernels import accumulator, signed_codes
from .._kernels.convolution import convolve_planned
from ._conv_attributes import Attributes, check_attributes, prepare_operands

_NAME = "qlinear_conv"


def qlinear_conv(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike,
    w: ArrayLike,
    w_scale: ArrayLike,
    w_zero_point: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike,
    b: ArrayLike | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> jax.Array:
    """Convolve codes and requantize the result, as ONNX's QLinearConv does.

    y = saturate(round_half_even(float32(acc + b) * (x_scale * w_scale / y_scale)) + y_zero_point),
    where acc is the result of `conv_integer`.

    acc + b wraps around as acc does. The integers are ONNX Runtime's: the scales are multiplied, then divided, in
    float32, and the product is rounded half to even before the zero point is added. onnx's reference adds the zero
    point first, which differs on ties if y_zero_point is odd.

    Args:
        x: codes, int8 or uint8, (N, C, *spatial) with one spatial dimension or more.
        x_scale: value per step of x, float32, a scalar. A Python number becomes float32.
        x_zero_point: the code of 0.0, a scalar in x's dtype. An int becomes a scalar in x's dtype.
        w: codes, int8 or uint8, (M, C / group, *kernel), not necessarily x's dtype.
        w_scale: value per step of w, float32: a scalar, or one for each feature, as [M]. A Python number becomes
            float32.
        w_zero_point: the code of 0.0, in w's dtype: a scalar, or one for each feature, as [M]. An int becomes a scalar
            in w's dtype.
        y_scale: value per step of y, float32, a scalar. A Python number becomes float32.
        y_zero_point: the code of 0.0, a scalar. Its dtype, int8 or uint8, is that of y; an int becomes a scalar in x's
            dtype.
        b: the bias, int32, [M], in steps of x_scale * w_scale. None means 0.
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
        The codes, (N, M, *positions), in y_zero_point's dtype.

    Raises:
        TypeError: an argument has a dtype that the operator does not support, or an attribute has a wrong type.
        ValueError: the shapes of the arguments and the attributes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[1, 3, 5, 255]]], jnp.uint8)
        >>> w = jnp.array([[[1]], [[-2]]], jnp.int8)
        >>> scale = jnp.array([0.5, 0.25])
        >>> jq.qlinear_conv(x, 1.0, 0, w, scale, 0, 1.0, 1, jnp.array([0, 510]))
        Array([[[  1,   3,   3, 129],
                [128, 127, 126,   1]]], dtype=uint8)

    Source: ONNX QLinearConv-10; where the text leaves the order of operations open, ONNX Runtime's CPU kernel.
    """
    scales = (("x_scale", x_scale), ("w_scale", w_scale), ("y_scale", y_scale))
    x_scale, w_scale, y_scale = (convert_plain_scale(_NAME, name, scale) for name, scale in scales)
    x_zero_point = signed_codes.convert_zero_point_number(_NAME, "x_zero_point", x_zero_point, x)
    w_zero_point = signed_codes.convert_zero_point_number(_NAME, "w_zero_point", w_zero_point, w)
    # The dtype of an int is that of x: ONNX Runtime has no kernel whose result has another dtype than x.
    y_zero_point = signed_codes.convert_zero_point_number(_NAME, "y_zero_point", y_zero_point, x)
    attributes = check_attributes(
        _NAME, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    centred = signed_codes.find_centred((x, w), (x_zero_point, w_zero_point))
    return _qlinear_conv(
        x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, b, attributes=attributes,
        centred=centred,
    )  # fmt: skip


@compile_entry_point(_NAME)
def _qlinear_conv(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array, w: jax.Array, w_scale: jax.Array,
    w_zero_point: jax.Array, y_scale: jax.Array, y_zero_point: jax.Array, b: jax.Array | None, *,
    attributes: Attributes, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    # Unlike in ConvInteger, the zero points are required inputs, so None must not be read as 0.
    for argument, point in (("x_zero_point", x_zero_point), ("w_zero_point", w_zero_point)):
        checks.require_type(point is not None, _NAME, argument, "an array", "None")
    checks.check_array(_NAME, "y_zero_point", y_zero_point, signed_codes.EIGHT_BITS)
    prepared = prepare_operands(_NAME, x, w, x_zero_point, w_zero_point, attributes, centred)
    _check_scales(w.shape[0], x_scale, w_scale, y_scale, y_zero_point, b)
    scale = accumulator.compute_multiplier(x_scale.reshape(1), w_scale.reshape(-1), y_scale.reshape(1))

    def epilogue(acc: jax.Array, axis: int) -> jax.Array:
        # An exporter needs the scales one by one, and the multiplier does not tell them.
        if recording.is_recording():
            parts = (b, w_scale.reshape(-1))
            placed = [None if p is None else accumulator.place_part(p, acc.ndim, axis) for p in parts]
            numbers = (x_scale.reshape(()), placed[1], y_scale.reshape(()), y_zero_point.astype(jnp.int32).reshape(()))
            return accumulator.requantize_product(acc, placed[0], *numbers, y_zero_point.dtype)
        along = granularity.PerAxis(axis)
        # b counts steps of the accumulator, so it is added in int32, before the scales.
        if b is not None:
            acc = acc + along.expand(b, acc)
        factors = along.expand(jnp.broadcast_to(scale, (w.shape[0],)), acc)
        zero_point = granularity.PerTensor().expand(y_zero_point.astype(jnp.int32), acc)
        return accumulator.requantize_accumulator(acc, factors, zero_point, y_zero_point.dtype)

    return convolve_planned(*prepared, False, epilogue)


def _check_scales(features: int, x_scale: Any, w_scale: Any, y_scale: Any, y_zero_point: Any, b: Any) -> None:
    """Check the scales, the zero point of y and the bias."""
    # ONNX Runtime treats an array of shape (1,) as a scalar.
    single = ((), (1,))
    for argument, value in (("x_scale", x_scale), ("w_scale", w_scale), ("y_scale", y_scale)):
        checks.check_array(_NAME, argument, value, (dtypes.FLOAT32,))
    for argument, value in (("x_scale", x_scale), ("y_scale", y_scale), ("y_zero_point", y_zero_point)):
        checks.require(value.shape in single, _NAME, argument, "a scalar", f"shape {value.shape}")
    expected = f"a scalar or shape ({features},), one for each feature"
    checks.require(w_scale.shape in (*single, (features,)), _NAME, "w_scale", expected, f"shape {w_scale.shape}")
    if b is not None:
        checks.check_same_dtype(_NAME, "b", b, dtypes.INT32, "steps of x_scale * w_scale")
        checks.check_shape(_NAME, "b", b, (features,), "one for each feature")
