"""ONNX's attributes of convolutions, and the operands and the geometry that follow from them and the shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._core import checks
from .._kernels import signed_codes
from .._kernels.convolution import Geometry
from ..integer._conv_geometry import check_placement, check_positive, check_window, check_zero_points

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class Attributes(NamedTuple):
    """The attributes under ONNX's names, as the caller passed them."""

    auto_pad: Any
    dilations: Any
    group: Any
    kernel_shape: Any
    pads: Any
    strides: Any


def check_attributes(function: str, **attributes: Any) -> Attributes:
    """Check that the attributes are hashable and their numbers integers, and return them as one static argument."""
    # Check before jit, whose cache of compiled programs cannot tell True, 1 and 1.0 apart.
    for name, value in attributes.items():
        if name != "auto_pad":
            attributes[name] = checks.check_integers(function, name, value)
    checked = Attributes(**attributes)
    if not checks.is_hashable(checked):
        for name, value in attributes.items():
            checks.check_hashable(function, name, value)
    return checked


def find_geometry(function: str, x: jax.Array, w: jax.Array, attributes: Attributes) -> Geometry:
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
    padding = _find_padding(function, x.shape[2:], reach, strides, attributes)
    check_window(function, "w", x.shape[2:], padding, reach)
    check_placement(function, ("x", "w"), (x, w), ((1,), (0, 1)))
    return Geometry(strides, padding, ones, dilations, int(attributes.group))


def prepare_operands(
    function: str, x: jax.Array, w: jax.Array, x_zero_point: Any, w_zero_point: Any, attributes: Attributes,
    centred: tuple[bool, bool],
) -> tuple[jax.Array, jax.Array, Any, Any, Geometry]:  # fmt: skip
    """Check the operands of an integer convolution and return the signed ones, their int32 zero points, the geometry.

    These are the first arguments of `convolve_planned`.
    """
    checks.check_array(function, "x", x, signed_codes.EIGHT_BITS)
    checks.check_array(function, "w", w, signed_codes.EIGHT_BITS)
    geometry = find_geometry(function, x, w, attributes)
    # Check the zero points after the rank of w: a w of rank 0 has no features to compare them with.
    check_zero_points(function, ("x", "w"), (x, w), (x_zero_point, w_zero_point), w.shape[0])
    x_steps = signed_codes.convert_steps(x_zero_point, x.dtype, centred[0])
    w_steps = signed_codes.convert_steps(w_zero_point, w.dtype, centred[1])
    return signed_codes.convert_to_signed(x), signed_codes.convert_to_signed(w), x_steps, w_steps, geometry


def _check_groups(function: str, x: jax.Array, w: jax.Array, group: Any) -> None:
    """Check that the channels of x and the features of w divide into groups, and that the channels of w are a group."""
    checks.check_integer(function, "group", group)
    divides = group > 0 and x.shape[1] % group == 0 and w.shape[0] % group == 0
    expected = f"a divisor of x's {x.shape[1]} channels and of w's {w.shape[0]} features"
    checks.require(divides, function, "group", expected, group)
    expected = f"{x.shape[1] // group} channels, x's {x.shape[1]} in {group} groups"
    checks.require(w.shape[1] * group == x.shape[1], function, "w", expected, f"shape {w.shape}")


def _find_padding(
    function: str, spatial: tuple[int, ...], reach: tuple[int, ...], strides: tuple[int, ...], attributes: Attributes
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
    return tuple(_find_same_padding(size, k, stride, lower=is_lower) for size, k, stride in sizes)


def _find_same_padding(size: int, reach: int, stride: int, *, lower: bool) -> tuple[int, int]:
    """Return the padding for ceil(size / stride) positions; an odd element goes to the end, or the start if `lower`."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    small, large = total // 2, total - total // 2
    return (large, small) if lower else (small, large)
