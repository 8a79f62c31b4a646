"""ONNX's convolution attributes, and what they come to for shapes that are known. Knows no operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._core import checks
from ..integer import _operands
from ..integer._conv_geometry import Geometry, check_placement, check_positive, check_window, check_zero_points

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class Attributes(NamedTuple):
    """The attributes under ONNX's names, as they were given."""

    auto_pad: Any
    dilations: Any
    group: Any
    kernel_shape: Any
    pads: Any
    strides: Any


def check_attributes(function: str, **attributes: Any) -> Attributes:
    """Return the attributes as one static argument. Require hashable values, and integers where there are numbers."""
    checked = {n: v if n == "auto_pad" else checks.check_integers(function, n, v) for n, v in attributes.items()}
    for name, value in checked.items():
        checks.check_hashable(function, name, value)
    return Attributes(**checked)


def find_geometry(function: str, x: jax.Array, w: jax.Array, given: Attributes) -> Geometry:
    """Holds x, w and the attributes to their contracts and returns the numbers of the convolution."""
    checks.require(x.ndim >= 3, function, "x", "an array (N, C, *spatial) of rank 3 or more", f"shape {x.shape}")
    checks.require(w.ndim == x.ndim, function, "w", f"an array of x's rank, {x.ndim}", f"shape {w.shape}")
    rank = x.ndim - 2
    _check_groups(function, x, w, given.group)
    ones = (1,) * rank
    strides = check_positive(function, "strides", ones if given.strides is None else given.strides, rank)
    dilations = check_positive(function, "dilations", ones if given.dilations is None else given.dilations, rank)
    if given.kernel_shape is not None:
        kernel = check_positive(function, "kernel_shape", given.kernel_shape, rank)
        checks.require(kernel == w.shape[2:], function, "kernel_shape", f"{w.shape[2:]}, as w has it", kernel)
    reach = tuple((k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True))
    padding = _find_padding(function, x.shape[2:], reach, strides, given)
    check_window(function, "w", x.shape[2:], padding, reach)
    check_placement(function, ("x", "w"), (x, w), ((1,), (0, 1)))
    return Geometry(strides, padding, ones, dilations, int(given.group))


def prepare_operands(
    function: str, x: jax.Array, w: jax.Array, x_zero_point: Any, w_zero_point: Any, attributes: Attributes,
    centred: tuple[bool, bool],
) -> tuple[jax.Array, jax.Array, Any, Any, Geometry]:  # fmt: skip
    """Check the operands of an integer convolution and return the signed ones, their int32 zero points, the geometry.

    These are the first arguments of `convolve_planned`.
    """
    checks.check_array(function, "x", x, _operands.EIGHT_BITS)
    checks.check_array(function, "w", w, _operands.EIGHT_BITS)
    geometry = find_geometry(function, x, w, attributes)
    check_zero_points(function, ("x", "w"), (x, w), (x_zero_point, w_zero_point), w.shape[0])
    x_steps = _operands.convert_steps(x_zero_point, x.dtype, centred[0])
    w_steps = _operands.convert_steps(w_zero_point, w.dtype, centred[1])
    return _operands.convert_to_signed(x), _operands.convert_to_signed(w), x_steps, w_steps, geometry


def _check_groups(function: str, x: jax.Array, w: jax.Array, group: Any) -> None:
    checks.check_integer(function, "group", group)
    divides = group > 0 and x.shape[1] % group == 0 and w.shape[0] % group == 0
    expected = f"a divisor of x's {x.shape[1]} channels and of w's {w.shape[0]} features"
    checks.require(divides, function, "group", expected, group)
    expected = f"{x.shape[1] // group} channels, x's {x.shape[1]} in {group} groups"
    checks.require(w.shape[1] * group == x.shape[1], function, "w", expected, f"shape {w.shape}")


def _find_padding(
    function: str, spatial: tuple[int, ...], reach: tuple[int, ...], strides: tuple[int, ...], given: Attributes
) -> tuple[tuple[int, int], ...]:
    rank = len(spatial)
    checks.check_option(function, "auto_pad", given.auto_pad, _AUTO_PADS)
    pads = (0,) * (2 * rank) if given.pads is None else given.pads
    holds = isinstance(pads, tuple) and len(pads) == 2 * rank
    expected = f"{2 * rank} ints of 0 or more: where each spatial dimension begins, then where each ends"
    checks.require(holds, function, "pads", expected, pads)
    for pad in pads:
        checks.check_integer(function, "pads", pad)
    checks.require(all(pad >= 0 for pad in pads), function, "pads", expected, pads)
    if given.auto_pad == "NOTSET":
        return tuple((int(pads[i]), int(pads[rank + i])) for i in range(rank))
    expected = f"None or zeros beside auto_pad={given.auto_pad!r}"
    checks.require(not any(pads), function, "pads", expected, given.pads)
    if given.auto_pad == "VALID":
        return ((0, 0),) * rank
    return tuple(
        _find_same_padding(*n, lower=given.auto_pad == "SAME_LOWER") for n in zip(spatial, reach, strides, strict=True)
    )


def _find_same_padding(size: int, reach: int, stride: int, *, lower: bool) -> tuple[int, int]:
    """Returns the padding that gives ceil(size / stride) positions; the odd one goes last, or first if `lower`."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    less, more = total // 2, total - total // 2
    return (more, less) if lower else (less, more)
