"""`jax.lax.conv_general_dilated` for integers with zero points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, granularity, recording, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import barriers, convolution, signed_codes
from . import _conv_patches, _layout
from ._conv_geometry import Geometry, Plan, check_zero_points, has_positions, plan_convolution

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
    lhs_zero_point = signed_codes.convert_zero_point_number(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = signed_codes.convert_zero_point_number(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.find_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
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
    checks.check_array(_NAME, "lhs", lhs, signed_codes.DTYPES)
    checks.check_array(_NAME, "rhs", rhs, signed_codes.DTYPES)
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


def arrange_layout(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, plan: Plan,
    epilogue: Callable[[jax.Array, int], jax.Array],
) -> jax.Array:  # fmt: skip
    """Return the convolution of two operands of any layout, with an epilogue, in the output layout of the plan."""
    numbers, geometry = plan.numbers, plan.geometry
    lhs, rhs = _unpack_narrow(lhs, rhs, numbers)
    x, w = lax.transpose(lhs, numbers.lhs_spec), lax.transpose(rhs, numbers.rhs_spec)
    # Groups of images become groups of channels. The products are the same, because the features of the kernel are in
    # the order of the groups in both cases.
    if plan.batches > 1:
        x = x.reshape(plan.batches, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    is_last = lhs.ndim > 2 and numbers.lhs_spec[1] == lhs.ndim - 1
    out = tuple(int(a) for a in np.argsort(numbers.out_spec))
    if not has_positions(x, w, geometry):
        # The result is then empty, or zeros. Take its shape from jax.lax, and run no convolution.
        convolve = functools.partial(_convolve_like_lax, geometry=geometry)
        empty = jax.eval_shape(convolve, *(jax.ShapeDtypeStruct(v.shape, jnp.int32) for v in (x, w)))
        return lax.transpose(epilogue(jnp.zeros(empty.shape, jnp.int32), 1), out)
    features_last = numbers.rhs_spec[:2] == (rhs.ndim - 1, rhs.ndim - 2)
    x, w = signed_codes.convert_to_signed(x), signed_codes.convert_to_signed(w)
    return convolve_planned(x, w, lhs_steps, rhs_steps, geometry, is_last, epilogue, out, features_last=features_last)


def _unpack_narrow(lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """Return the operands, with codes of 2 or 4 bits unpacked if later operations would unpack them more than once.

    An image with channels last, and a kernel in OIHW layout with more than one position, are copied into another layout
    anyway. Unpacking them in that copy is cheaper than an additional pass.
    """
    if lhs.dtype not in signed_codes.EIGHT_BITS and numbers.lhs_spec[1] != lhs.ndim - 1:
        lhs = signed_codes.unpack_to_int8(lhs)
    is_single = all(rhs.shape[a] == 1 for a in numbers.rhs_spec[2:])
    if rhs.dtype not in signed_codes.EIGHT_BITS and (is_single or _layout.is_moving(numbers.rhs_spec, rhs.shape)):
        rhs = signed_codes.unpack_to_int8(rhs)
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
    features_last: bool = False,
) -> jax.Array:
    """Return the convolution of two int8 operands with zero points, after an epilogue, in the caller's layout.

    Args:
        x: int8 [N, C, *spatial].
        w: int8 [O, C / groups, *kernel].
        x_steps: int32 scalar, or None for 0.
        w_steps: int32 scalar or [O], or None for 0.
        geometry: Static.
        channels_last: Static. Whether x is the transpose of an array whose channels are last in memory.
        epilogue: a function of the int32 accumulator and the axis of its features. It runs before the transpose to the
            caller's layout, which costs less if the epilogue has narrowed the result.
        out: Static. The permutation from [N, O, *spatial] to the caller's layout, or None for that layout itself.
        features_last: Static. Whether w is the transpose of an array whose features are last in memory.
    """
    if recording.is_recording():
        acc = epilogue(_convolve_recorded(x, w, x_steps, w_steps, geometry), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    # Pad with the zero point, so that the padding is 0 after its subtraction.
    config = [(0, 0, 0), (0, 0, 0)]
    for (low, high), dilation in zip(geometry.padding, geometry.lhs_dilation, strict=True):
        config.append((low, high, dilation - 1))
    if any(entry != (0, 0, 0) for entry in config):
        fill = jnp.zeros((), jnp.int8) if x_steps is None else x_steps.reshape(()).astype(jnp.int8)
        x = lax.pad(x, fill, config)
    window = _conv_patches.Window(
        channels_last, "", geometry.strides, geometry.rhs_dilation, geometry.groups, features_last
    )
    if 0 in x.shape or 0 in w.shape:  # the sums have no terms
        positions = _conv_patches.find_out_shape(x.shape[2:], w.shape[2:], window)
        acc = epilogue(jnp.zeros((x.shape[0], w.shape[0], *positions), jnp.int32), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    if sharding.is_placed(x) or sharding.is_placed(w):
        acc = epilogue(_place_output(x, w, x_steps, w_steps, geometry), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    window = convolution.find_window(x.shape, w.shape, window, channels_last=channels_last)
    rank = x.ndim
    to_back = (0, *range(2, rank), 1)
    if window.channels_last:
        # If the channels are already last in memory, this undoes the caller's transpose, and only the pin remains.
        x = barriers.pin_layout(lax.transpose(x, to_back)) if channels_last else _layout.transpose_in_memory(x, to_back)
    x_steps = None if x_steps is None else x_steps.reshape(1, 1)
    w_steps = None if w_steps is None else w_steps.reshape(-1)
    acc = convolution.convolve(x, w, x_steps, w_steps, window)
    result = epilogue(acc, rank - 1 if window.channels_last else 1)
    # Combine two permutations into one: from the kernel's layout to [N, O, *spatial], and from there to the caller's.
    to_front = (0, rank - 1, *range(1, rank - 1)) if window.channels_last else tuple(range(rank))
    permutation = to_front if out is None else tuple(to_front[axis] for axis in out)
    if not _layout.is_moving(permutation, result.shape):
        return lax.transpose(result, permutation)
    return _restore_layout(result, permutation)


def _find_recorded_shape(x: jax.Array, w: jax.Array, geometry: Geometry, **_: Any) -> tuple[tuple[int, ...], Any]:
    lengths = []
    for n, kernel, stride, pads, x_step, w_step in zip(x.shape[2:], w.shape[2:], *geometry[:4], strict=True):
        padded = (n - 1) * x_step + 1 + sum(pads)
        lengths.append((padded - (kernel - 1) * w_step - 1) // stride + 1)
    return (x.shape[0], w.shape[0], *lengths), jnp.int32


def _batch_convolution(
    mapped: dict[str, bool], x: jax.Array, w: jax.Array, x_steps: Any, w_steps: Any, geometry: Geometry
) -> jax.Array | None:
    """Return the convolution of one more batch of images, or None if anything else is mapped."""
    if not mapped["x"] or sum(mapped.values()) > 1:
        return None
    y = _convolve_recorded(x.reshape(-1, *x.shape[2:]), w, x_steps, w_steps, geometry)
    return y.reshape(*x.shape[:2], *y.shape[1:])


@recording.mark("convolve", _find_recorded_shape, _batch_convolution)
def _convolve_recorded(x: jax.Array, w: jax.Array, x_steps: Any, w_steps: Any, geometry: Geometry) -> jax.Array:
    """Return the int32 convolution of codes of any dtype, with their zero points."""
    with recording.pause():
        (x, x_steps), (w, w_steps) = signed_codes.shift_recorded(x, x_steps), signed_codes.shift_recorded(w, w_steps)
        x, w = signed_codes.convert_to_signed(x), signed_codes.convert_to_signed(w)
        return convolve_planned(x, w, x_steps, w_steps, geometry, False, lambda acc, _: acc)


def _place_output(x: jax.Array, w: jax.Array, x_steps: Any, w_steps: Any, geometry: Geometry) -> jax.Array:
    """Return the convolution of operands whose shardings JAX tracks in types, computed by `jax.lax`.

    The forms in `_conv_kernel` need reshapes whose shardings JAX cannot infer.
    """
    convolve = functools.partial(
        lax.conv_general_dilated, x, window_strides=geometry.strides, padding="VALID",
        rhs_dilation=geometry.rhs_dilation, feature_group_count=geometry.groups, preferred_element_type=jnp.int32,
    )  # fmt: skip
    acc = convolve(w)
    expand = granularity.PerAxis(1).expand
    sums = jnp.sum(w, axis=tuple(range(1, w.ndim)), dtype=jnp.int32)
    if w_steps is not None:
        # The zero points of the kernel are multiplied by the sums over patches of x: a convolution with ones.
        steps = jnp.broadcast_to(w_steps.reshape(-1), sums.shape)
        sums = sums - np.int32(w[0].size) * steps
        acc = acc - convolve(jnp.ones_like(w)) * expand(steps, acc)
    if x_steps is None:
        return acc
    return acc - expand(jnp.broadcast_to(x_steps.reshape(1), sums.shape) * sums, acc)


def _restore_layout(result: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Return a result transposed to the caller's layout after it has been written to memory."""
    if result.dtype == np.dtype(jnp.uint8):  # XLA:CPU has a fast transpose for int8, not for uint8
        return lax.bitcast_convert_type(
            _restore_layout(lax.bitcast_convert_type(result, jnp.int8), permutation), jnp.uint8
        )
    return lax.transpose(barriers.pin_layout(result), tuple(permutation))


def _convolve_like_lax(x: jax.Array, w: jax.Array, geometry: Geometry) -> jax.Array:
    """Return `jax.lax`'s convolution of [N, C, *spatial] with [O, C / groups, *kernel], without zero points."""
    return lax.conv_general_dilated(
        x, w, geometry.strides, geometry.padding, geometry.lhs_dilation, geometry.rhs_dilation,
        feature_group_count=geometry.groups,
    )  # fmt: skip
