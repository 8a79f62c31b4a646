"""`jax.lax.conv_general_dilated` over integers with zero points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import barriers, checks, granularity, sharding
from .._core.entry_point import compile_entry_point
from . import _conv_kernel, _layout, _operands
from ._conv_geometry import Geometry, Plan, check_fit, check_zero_points, plan_convolution

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
    """out = convolution of lhs - lhs_zero_point with rhs - rhs_zero_point, in int32.

    Exact modulo 2**32, as ONNX has it. Padding, and the holes of `lhs_dilation`, count as 0 after the zero point is
    subtracted. Any layout, grouping and batching runs as an int8 convolution or contraction; the operands are never
    widened to more than 8 bits, except depthwise ones, whose products are summed element by element in int32.

    Args:
        lhs: int8, uint8, int4, uint4, int2 or uint2, of rank 3 or more.
        rhs: the kernel, any of the same dtypes, not necessarily lhs's.
        window_strides: Static. One for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; negative crops.
        lhs_dilation: Static. Steps between neighbours of lhs; None is 1.
        rhs_dilation: Static. Steps between neighbours of the kernel; None is 1.
        dimension_numbers: Static. As `jax.lax` has it; None is NCHW, OIHW, NCHW and their like.
        feature_group_count: Static. Groups of channels that do not meet.
        batch_group_count: Static. Groups of images, each with its own features.
        lhs_zero_point: steps, a scalar in lhs's dtype. None is 0. An int stands for an array of it.
        rhs_zero_point: steps, in rhs's dtype: a scalar, or one for each output feature. Likewise.

    Returns:
        int32, in the layout that the dimension numbers give it.

    Raises:
        TypeError: an operand or a zero point has another dtype.
        ValueError: shapes, windows, groups or dimension numbers do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[0, 128, 255]]], jnp.uint8)
        >>> kernel = jnp.array([[[1, 2, 3]]], jnp.int8)
        >>> jq.integer.conv_general_dilated(x, kernel, (1,), [(1, 1)], lhs_zero_point=128)
        Array([[[-256,  253,  254]]], dtype=int32)

    Source: `jax.lax.conv_general_dilated`; the arithmetic is ONNX ConvInteger-10's.
    """
    lhs_zero_point = _operands.convert_zero_point_number(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = _operands.convert_zero_point_number(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = _operands.find_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
    ints = functools.partial(checks.check_integers, _NAME)
    return _conv_general_dilated(
        lhs, rhs, lhs_zero_point, rhs_zero_point,
        window_strides=ints("window_strides", window_strides), padding=ints("padding", padding),
        lhs_dilation=ints("lhs_dilation", lhs_dilation), rhs_dilation=ints("rhs_dilation", rhs_dilation),
        dimension_numbers=_check_static(dimension_numbers),
        feature_group_count=ints("feature_group_count", feature_group_count),
        batch_group_count=ints("batch_group_count", batch_group_count), centred=centred,
    )  # fmt: skip


def _check_static(given: Any) -> Any:
    """Returns dimension numbers hashable: three strings, or three permutations."""
    if isinstance(given, lax.ConvDimensionNumbers):
        return lax.ConvDimensionNumbers(*(tuple(g) if isinstance(g, list) else g for g in given))
    if isinstance(given, list | tuple):
        return tuple(tuple(g) if isinstance(g, list) else g for g in given)
    return given


@compile_entry_point(_NAME)
def _conv_general_dilated(
    lhs: jax.Array, rhs: jax.Array, lhs_zero_point: jax.Array | None, rhs_zero_point: jax.Array | None, *,
    window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any, dimension_numbers: Any,
    feature_group_count: int, batch_group_count: int, centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "lhs", lhs, _operands.DTYPES)
    checks.check_array(_NAME, "rhs", rhs, _operands.DTYPES)
    plan = plan_convolution(
        _NAME, lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count,
    )  # fmt: skip
    features = rhs.shape[plan.numbers.rhs_spec[0]]
    check_zero_points(_NAME, ("lhs", "rhs"), (lhs, rhs), (lhs_zero_point, rhs_zero_point), features)
    steps = (
        _operands.convert_steps(lhs_zero_point, lhs.dtype, centred[0]),
        _operands.convert_steps(rhs_zero_point, rhs.dtype, centred[1]),
    )
    return arrange_layout(lhs, rhs, *steps, plan, lambda acc, _: acc)


def arrange_layout(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, plan: Plan,
    epilogue: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:  # fmt: skip
    """Returns the convolution of two operands of any layout, as `convolution` does, in the layout of the plan."""
    numbers, geometry = plan.numbers, plan.geometry
    lhs, rhs = _unpack_narrow(lhs, rhs, numbers)
    x, w = lax.transpose(lhs, numbers.lhs_spec), lax.transpose(rhs, numbers.rhs_spec)
    if plan.batches > 1:  # the groups of images become groups of channels
        x = x.reshape(plan.batches, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    last = lhs.ndim > 2 and numbers.lhs_spec[1] == lhs.ndim - 1
    out = tuple(int(a) for a in np.argsort(numbers.out_spec))
    if not check_fit(x, w, geometry):  # jax.lax's answer where no position of the kernel fits: no positions
        like = functools.partial(_convolve_like_lax, geometry=geometry)
        empty = jax.eval_shape(like, *(jax.ShapeDtypeStruct(v.shape, jnp.int32) for v in (x, w)))
        return lax.transpose(epilogue(jnp.zeros(empty.shape, jnp.int32), 1), out)
    return convolve_planned(
        _operands.convert_to_signed(x),
        _operands.convert_to_signed(w),
        lhs_steps,
        rhs_steps,
        geometry,
        last,
        epilogue,
        out,
    )


def _unpack_narrow(lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """Returns the operands with codes below 8 bits unpacked where what follows would unpack them more than once.

    An image whose channels lie last, and a kernel of more than one position that lies as OIHW, are transposed or laid
    out once, which unpacks them on the way for less than a pass of its own.
    """
    is_last = numbers.lhs_spec[1] == lhs.ndim - 1
    if lhs.dtype not in _operands.EIGHT_BITS and not is_last:
        lhs = _operands.unpack_to_int8(lhs)
    is_single = all(rhs.shape[a] == 1 for a in numbers.rhs_spec[2:])
    if rhs.dtype not in _operands.EIGHT_BITS and (is_single or _layout.is_moving(numbers.rhs_spec, rhs.shape)):
        rhs = _operands.unpack_to_int8(rhs)
    return lhs, rhs


def convolve_planned(
    x: jax.Array,
    w: jax.Array,
    x_steps: jax.Array | None,
    w_steps: jax.Array | None,
    geometry: Geometry,
    channels_last: bool,
    epilogue: Callable[[jax.Array, int], jax.Array],
    out: Sequence[int] | None = None,
) -> jax.Array:
    """Returns the int32 convolution of int8 [N, C, *spatial] with int8 [O, C / groups, *kernel], an epilogue behind.

    Args:
        x: int8.
        w: int8.
        x_steps: int32 scalar, or None for 0.
        w_steps: int32 scalar or [O], or None for 0.
        geometry: Static.
        channels_last: Static. Whether x is a view of an array whose channels lie last.
        epilogue: takes the accumulator and the axis of its features, before it is laid out for the caller: what
            makes it smaller makes the transpose cheaper.
        out: Static. The permutation that takes [N, O, *spatial] to the caller's layout.
    """
    config = [
        (0, 0, 0),
        (0, 0, 0),
        *((*p, d - 1) for p, d in zip(geometry.padding, geometry.lhs_dilation, strict=True)),
    ]
    if any(c != (0, 0, 0) for c in config):
        fill = jnp.zeros((), jnp.int8) if x_steps is None else x_steps.reshape(()).astype(jnp.int8)
        x = lax.pad(x, fill, config)
    if 0 in x.shape or 0 in w.shape:  # nothing to add up
        reach = zip(x.shape[2:], w.shape[2:], geometry.strides, geometry.rhs_dilation, strict=True)
        positions = tuple((n - (k - 1) * d - 1) // t + 1 for n, k, t, d in reach)
        acc = epilogue(jnp.zeros((x.shape[0], w.shape[0], *positions), jnp.int32), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    if sharding.is_placed(x) or sharding.is_placed(w):
        acc = epilogue(_place_output(x, w, x_steps, w_steps, geometry), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    window = _conv_kernel.Window(channels_last, "", geometry.strides, geometry.rhs_dilation, geometry.groups)
    window = _conv_kernel.find_window(x.shape, w.shape, window, channels_last=channels_last)
    rank = x.ndim
    last = (0, *range(2, rank), 1)
    if window.channels_last:
        x = barriers.pin_layout(lax.transpose(x, last)) if channels_last else _layout.transpose_in_memory(x, last)
    a = None if x_steps is None else x_steps.reshape(1, 1)
    b = None if w_steps is None else w_steps.reshape(-1)
    acc = _conv_kernel.convolve(x, w, a, b, window)
    result = epilogue(acc, rank - 1 if window.channels_last else 1)
    first = (0, rank - 1, *range(1, rank - 1)) if window.channels_last else tuple(range(rank))
    permutation = first if out is None else tuple(first[axis] for axis in out)
    if not _layout.is_moving(permutation, result.shape):
        return lax.transpose(result, permutation)
    return _restore_layout(result, permutation)


def _place_output(x: jax.Array, w: jax.Array, x_steps: Any, w_steps: Any, geometry: Geometry) -> jax.Array:
    """Returns the convolution where JAX tracks shardings in types and refuses reshapes: XLA's own, as it comes."""
    convolve = functools.partial(
        lax.conv_general_dilated, x, window_strides=geometry.strides, padding="VALID",
        rhs_dilation=geometry.rhs_dilation, feature_group_count=geometry.groups, preferred_element_type=jnp.int32,
    )  # fmt: skip
    acc = convolve(w)
    expand = granularity.PerAxis(1).expand
    sums = jnp.sum(w, axis=tuple(range(1, w.ndim)), dtype=jnp.int32)
    if w_steps is not None:
        steps = jnp.broadcast_to(w_steps.reshape(-1), sums.shape)
        sums = sums - np.int32(w[0].size) * steps
        acc = acc - convolve(jnp.ones_like(w)) * expand(steps, acc)
    if x_steps is None:
        return acc
    return acc - expand(jnp.broadcast_to(x_steps.reshape(1), sums.shape) * sums, acc)


def _restore_layout(result: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Returns a result transposed once it is in memory, by the fast kernel, which for bytes is int8's alone."""
    if result.dtype == np.dtype(jnp.uint8):
        return lax.bitcast_convert_type(
            _restore_layout(lax.bitcast_convert_type(result, jnp.int8), permutation), jnp.uint8
        )
    return lax.transpose(barriers.pin_layout(result), tuple(permutation))


def _convolve_like_lax(x: jax.Array, w: jax.Array, geometry: Geometry) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, geometry.strides, geometry.padding, geometry.lhs_dilation, geometry.rhs_dilation,
        feature_group_count=geometry.groups,
    )  # fmt: skip
