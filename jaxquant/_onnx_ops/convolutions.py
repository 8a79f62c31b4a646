"""ONNX ConvInteger and QLinearConv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core import checks, dtypes, entry_point, granularity, recording
from .._core.entry_point import compile_entry_point, convert_float32_scale
from .._kernels import accumulator, signed_codes
from .._kernels.convolution import Geometry, convolve_planned
from ..integer import check_channel_placement, check_positive, check_window, check_zero_points

# ONNX's attributes of convolutions, and the operands and the geometry that follow from them and the shapes.


_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class ConvAttributes(NamedTuple):
    """The attributes under ONNX's names, as the caller passed them."""

    auto_pad: Any
    dilations: Any
    group: Any
    kernel_shape: Any
    pads: Any
    strides: Any


def check_attributes(function: str, **attributes: object) -> ConvAttributes:
    """Check that the attributes are hashable and their numbers integers, and return them as one static argument."""
    # Check before jit: its cache of compiled programs cannot tell True, 1 and 1.0 apart.
    for name, value in attributes.items():
        if name != "auto_pad":
            attributes[name] = checks.check_integers(function, name, value)
    checked = ConvAttributes(**attributes)
    if not checks.is_hashable(checked):
        for name, value in attributes.items():
            checks.check_hashable(function, name, value)
    return checked


def derive_geometry(function: str, x: jax.Array, w: jax.Array, attributes: ConvAttributes) -> Geometry:
    """Check the shapes of x and w and the attributes, and return the geometry of the convolution."""
    checks.require(x.ndim >= 3, function, "x", "an array (N, C, *spatial) of rank 3 or more", f"shape {x.shape}")
    checks.require(w.ndim == x.ndim, function, "w", f"an array of x's rank, {x.ndim}", f"shape {w.shape}")
    rank = x.ndim - 2
    _check_groups(function, x, w, attributes.group)
    ones = (1,) * rank
    strides = check_positive(function, "strides", ones if attributes.strides is None else attributes.strides, rank)
    dilations = ones if attributes.dilations is None else attributes.dilations
    dilations = check_positive(function, "dilations", dilations, rank)
    if attributes.kernel_shape is not None:
        kernel = check_positive(function, "kernel_shape", attributes.kernel_shape, rank)
        checks.require(kernel == w.shape[2:], function, "kernel_shape", f"{w.shape[2:]}, as in w", kernel)
    # The number of elements that a dilated kernel spans in each dimension.
    reach = tuple((k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True))
    padding = _read_padding(function, x.shape[2:], reach, strides, attributes)
    check_window(function, "w", x.shape[2:], padding, reach)
    check_channel_placement(function, ("x", "w"), (x, w), ((1,), (0, 1)))
    return Geometry(strides, padding, ones, dilations, int(attributes.group))


def prepare_operands(
    function: str, x: jax.Array, w: jax.Array, x_zero_point: jax.Array | None, w_zero_point: jax.Array | None,
    attributes: ConvAttributes, centred: tuple[bool, bool],
) -> tuple[jax.Array, jax.Array, Any, Any, Geometry]:  # fmt: skip
    """Check the operands of an integer convolution and return the signed ones, their int32 zero points, the geometry.

    These are the first arguments of `convolve_planned`.
    """
    checks.check_array(function, "x", x, dtypes.EIGHT_BITS)
    checks.check_array(function, "w", w, dtypes.EIGHT_BITS)
    geometry = derive_geometry(function, x, w, attributes)
    # Check the zero points after the rank of w: a w of rank 0 has no features to compare them with.
    check_zero_points(function, ("x", "w"), (x, w), (x_zero_point, w_zero_point), w.shape[0])
    x_center = signed_codes.derive_center(x_zero_point, x.dtype, centred[0])
    w_center = signed_codes.derive_center(w_zero_point, w.dtype, centred[1])
    return signed_codes.convert_to_signed(x), signed_codes.convert_to_signed(w), x_center, w_center, geometry


def _check_groups(function: str, x: jax.Array, w: jax.Array, group: int) -> None:
    """Check that the channels of x and the features of w divide into groups, and that the channels of w are a group."""
    checks.check_integer(function, "group", group)
    divides = group > 0 and x.shape[1] % group == 0 and w.shape[0] % group == 0
    expected = f"a divisor of x's {x.shape[1]} channels and of w's {w.shape[0]} features"
    checks.require(divides, function, "group", expected, group)
    expected = f"{x.shape[1] // group} channels, x's {x.shape[1]} in {group} groups"
    checks.require(w.shape[1] * group == x.shape[1], function, "w", expected, f"shape {w.shape}")


def _read_padding(
    function: str,
    spatial: tuple[int, ...],
    reach: tuple[int, ...],
    strides: tuple[int, ...],
    attributes: ConvAttributes,
) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after each spatial dimension, after checking auto_pad and pads."""
    rank = len(spatial)
    checks.check_option(function, "auto_pad", attributes.auto_pad, _AUTO_PADS)
    # ONNX lists the beginnings of all dimensions before their ends.
    pads = (0,) * (2 * rank) if attributes.pads is None else attributes.pads
    holds = isinstance(pads, tuple) and len(pads) == 2 * rank
    expected = f"{2 * rank} ints of 0 or more, for the beginning of each spatial dimension, then for the end of each"
    checks.require(holds, function, "pads", expected, pads)
    for pad in pads:
        checks.check_integer(function, "pads", pad)
    checks.require(all(pad >= 0 for pad in pads), function, "pads", expected, pads)
    if attributes.auto_pad == "NOTSET":
        return tuple((int(pads[i]), int(pads[rank + i])) for i in range(rank))
    # The ONNX specification excludes pads together with auto_pad, but zeros change nothing and are accepted.
    expected = f"None or zeros together with auto_pad={attributes.auto_pad!r}"
    checks.require(not any(pads), function, "pads", expected, attributes.pads)
    if attributes.auto_pad == "VALID":
        return ((0, 0),) * rank
    is_lower = attributes.auto_pad == "SAME_LOWER"
    sizes = zip(spatial, reach, strides, strict=True)
    return tuple(_compute_same_padding(size, k, stride, lower=is_lower) for size, k, stride in sizes)


def _compute_same_padding(size: int, reach: int, stride: int, *, lower: bool) -> tuple[int, int]:
    """Return the padding for ceil(size / stride) positions; an odd element goes to the end, or the start if `lower`."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    small, large = total // 2, total - total // 2
    return (large, small) if lower else (small, large)


# ONNX ConvInteger-10.


_CONV_INTEGER = "conv_integer"


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
    x_zero_point = entry_point.convert_operand_zero_point(_CONV_INTEGER, "x_zero_point", x_zero_point, x)
    w_zero_point = entry_point.convert_operand_zero_point(_CONV_INTEGER, "w_zero_point", w_zero_point, w)
    attributes = check_attributes(
        _CONV_INTEGER, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    # Before jit, in which the values of zero points are unknown: a centered one needs no correction of the sums.
    centred = signed_codes.are_centred((x, w), (x_zero_point, w_zero_point))
    return _conv_integer(x, w, x_zero_point, w_zero_point, attributes=attributes, centred=centred)


@compile_entry_point(_CONV_INTEGER)
def _conv_integer(
    x: jax.Array, w: jax.Array, x_zero_point: jax.Array | None, w_zero_point: jax.Array | None, *,
    attributes: ConvAttributes, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    prepared = prepare_operands(_CONV_INTEGER, x, w, x_zero_point, w_zero_point, attributes, centred)
    # The accumulator is the result, so the epilogue returns it unchanged.
    return convolve_planned(*prepared, False, lambda acc, _: acc)


# ONNX QLinearConv-10.


_QLINEAR_CONV = "qlinear_conv"


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
        y_zero_point: the code of 0.0, a scalar. Its dtype, int8 or uint8, is y's; an int becomes a scalar in x's
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
    x_scale, w_scale, y_scale = (convert_float32_scale(_QLINEAR_CONV, name, scale) for name, scale in scales)
    x_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_CONV, "x_zero_point", x_zero_point, x)
    w_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_CONV, "w_zero_point", w_zero_point, w)
    # An int gets the dtype of x: ONNX Runtime has no kernel with a result of another dtype.
    y_zero_point = entry_point.convert_operand_zero_point(_QLINEAR_CONV, "y_zero_point", y_zero_point, x)
    attributes = check_attributes(
        _QLINEAR_CONV, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
        strides=strides,
    )  # fmt: skip
    centred = signed_codes.are_centred((x, w), (x_zero_point, w_zero_point))
    return _qlinear_conv(
        x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, b, attributes=attributes,
        centred=centred,
    )  # fmt: skip


@compile_entry_point(_QLINEAR_CONV)
def _qlinear_conv(
    x: jax.Array, x_scale: jax.Array, x_zero_point: jax.Array, w: jax.Array, w_scale: jax.Array,
    w_zero_point: jax.Array, y_scale: jax.Array, y_zero_point: jax.Array, b: jax.Array | None, *,
    attributes: ConvAttributes, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    # Unlike in ConvInteger, the zero points are required inputs, so None must not be read as 0.
    for argument, point in (("x_zero_point", x_zero_point), ("w_zero_point", w_zero_point)):
        checks.require_type(point is not None, _QLINEAR_CONV, argument, "an array", "None")
    checks.check_array(_QLINEAR_CONV, "y_zero_point", y_zero_point, dtypes.EIGHT_BITS)
    prepared = prepare_operands(_QLINEAR_CONV, x, w, x_zero_point, w_zero_point, attributes, centred)
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


def _check_scales(
    features: int, x_scale: Any, w_scale: Any, y_scale: Any, y_zero_point: Any, b: Any,
) -> None:  # fmt: skip
    """Check the scales, the zero point of y and the bias."""
    # ONNX Runtime treats an array of shape (1,) as a scalar.
    single = ((), (1,))
    for argument, value in (("x_scale", x_scale), ("w_scale", w_scale), ("y_scale", y_scale)):
        checks.check_array(_QLINEAR_CONV, argument, value, (dtypes.FLOAT32,))
    for argument, value in (("x_scale", x_scale), ("y_scale", y_scale), ("y_zero_point", y_zero_point)):
        checks.require(value.shape in single, _QLINEAR_CONV, argument, "a scalar", f"shape {value.shape}")
    expected = f"a scalar or shape ({features},), one for each feature"
    checks.require(
        w_scale.shape in (*single, (features,)), _QLINEAR_CONV, "w_scale", expected, f"shape {w_scale.shape}"
    )
    if b is not None:
        checks.check_same_dtype(_QLINEAR_CONV, "b", b, dtypes.INT32, "steps of x_scale * w_scale")
        checks.check_shape(_QLINEAR_CONV, "b", b, (features,), "one for each feature")
