"""The int8 convolution with channels first or last, in the form that each backend runs fast.

XLA:CPU has a vector kernel for int8 convolutions in NHWC with HWIO weights. Where it is slow, another form is used:
with few input channels, 1x1 kernels or groups, a contraction of the weights with patches of x ("patches"); for a
depthwise convolution, a sum of shifted products ("products"). The kernel needs OIHW weights transposed; with few pixels
that takes longer than gathering the patches, which are then contracted with the weights as they are ("rows"). All
others run in the kernel ("direct").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .._core import dtypes, granularity, recording, sharding
from . import barriers, signed_codes
from .contraction import batch_all, contract_integers, make_ones

# A depthwise convolution slices x at most this many times, once for each element of the kernel.
MOST_SLICES = 64
# With at most this many input channels, a contraction with patches is faster than the convolution kernel.
_FEW_CHANNELS = 8
# XLA:CPU does not use its kernel if neither the channels nor the features are more than this.
_NARROW = 16
# With fewer output pixels than this, the matrix of one image is too narrow. The pixels of all images then become the
# rows of one matrix.
_FEW_PIXELS = 16
# With at least this many features to an output pixel, transposing the weights takes longer than gathering the patches.
# With 49 pixels, 3x3 weights of 256 x 256 and 512 x 512 take 0.56 and 0.46 of the kernel's time, and 0.8 to 0.9 as
# constants, which XLA transposes when it compiles. With 196 pixels, 256 x 256 take 0.9, and 1.1 as constants.
_MANY_FEATURES = 4

Center = jax.Array | None


class Geometry(NamedTuple):
    """The static numbers of a convolution.

    Attributes:
        strides: one for each spatial dimension.
        padding: (low, high) for each spatial dimension; a negative number crops.
        lhs_dilation: the distance between neighboring elements of lhs, for each spatial dimension.
        rhs_dilation: the distance between neighboring elements of the kernel, for each spatial dimension.
        groups: the number of groups of channels.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int = 1


class ConvolutionPlan(NamedTuple):
    """The checked static attributes of `jax.lax.conv_general_dilated`.

    Attributes:
        numbers: which dimension of each array is the batch, which one the features, and which ones are spatial.
        geometry: the numbers of the convolution, in which groups of images count as groups of channels.
        features: the feature_group_count.
        batches: the batch_group_count.
    """

    numbers: lax.ConvDimensionNumbers
    geometry: Geometry
    features: int
    batches: int


class Window(NamedTuple):
    """The static attributes of a convolution of an x that is already padded.

    Attributes:
        channels_last: whether the channels are the last dimension of x, and not its second.
        form: "products", "patches", "rows" or "direct".
        strides: one for each spatial dimension.
        dilations: the distance between neighboring elements of the kernel, for each spatial dimension.
        groups: the number of groups of channels.
        features_last: whether the caller's kernel has its features last in memory, after its channels, as HWIO has.
    """

    channels_last: bool
    form: str
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    features_last: bool = False


def arrange_layout(
    lhs: jax.Array, rhs: jax.Array, lhs_center: jax.Array | None, rhs_center: jax.Array | None, plan: ConvolutionPlan,
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
    return convolve_planned(x, w, lhs_center, rhs_center, geometry, is_last, epilogue, out, features_last=features_last)


def _unpack_narrow(lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """Return the operands, with codes of 2 or 4 bits unpacked if later operations would unpack them more than once.

    An image with channels last, and a kernel in OIHW layout with more than one position, are copied into another layout
    anyway. Unpacking them in that copy is cheaper than an additional pass.
    """
    if lhs.dtype not in dtypes.EIGHT_BITS and numbers.lhs_spec[1] != lhs.ndim - 1:
        lhs = signed_codes.unpack_to_int8(lhs)
    is_single = all(rhs.shape[a] == 1 for a in numbers.rhs_spec[2:])
    if rhs.dtype not in dtypes.EIGHT_BITS and (is_single or barriers.is_moving(numbers.rhs_spec, rhs.shape)):
        rhs = signed_codes.unpack_to_int8(rhs)
    return lhs, rhs


def convolve_planned(
    x: jax.Array,
    w: jax.Array,
    x_center: jax.Array | None,
    w_center: jax.Array | None,
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
        x_center: int32 scalar, or None for 0.
        w_center: int32 scalar or [O], or None for 0.
        geometry: Static.
        channels_last: Static. Whether x is the transpose of an array with its channels last in memory.
        epilogue: a function of the int32 accumulator and the axis of its features. It runs before the transpose to the
            caller's layout, which costs less if the epilogue has narrowed the result.
        out: Static. The permutation from [N, O, *spatial] to the caller's layout, or None for that layout itself.
        features_last: Static. Whether w is the transpose of an array with its features last in memory.
    """
    if recording.is_recording():
        acc = epilogue(_convolve_recorded(x, w, x_center, w_center, geometry), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    # Pad with the zero point, so that the padding is 0 after its subtraction.
    config = [(0, 0, 0), (0, 0, 0)]
    for (low, high), dilation in zip(geometry.padding, geometry.lhs_dilation, strict=True):
        config.append((low, high, dilation - 1))
    if any(entry != (0, 0, 0) for entry in config):
        fill = jnp.zeros((), jnp.int8) if x_center is None else x_center.reshape(()).astype(jnp.int8)
        x = lax.pad(x, fill, config)
    window = Window(channels_last, "", geometry.strides, geometry.rhs_dilation, geometry.groups, features_last)
    if 0 in x.shape or 0 in w.shape:  # the sums have no terms
        positions = derive_out_shape(x.shape[2:], w.shape[2:], window)
        acc = epilogue(jnp.zeros((x.shape[0], w.shape[0], *positions), jnp.int32), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    if sharding.is_placed(x) or sharding.is_placed(w):
        acc = epilogue(_place_output(x, w, x_center, w_center, geometry), 1)
        return acc if out is None else lax.transpose(acc, tuple(out))
    window = choose_window(x.shape, w.shape, window, channels_last=channels_last)
    rank = x.ndim
    to_back = (0, *range(2, rank), 1)
    if window.channels_last:
        # If the channels are already last in memory, this undoes the caller's transpose, and only the pin remains.
        x = (
            barriers.pin_layout(lax.transpose(x, to_back))
            if channels_last
            else barriers.transpose_in_memory(x, to_back)
        )
    x_center = None if x_center is None else x_center.reshape(1, 1)
    w_center = None if w_center is None else w_center.reshape(-1)
    acc = convolve(x, w, x_center, w_center, window)
    result = epilogue(acc, rank - 1 if window.channels_last else 1)
    # Combine two permutations into one: from the kernel's layout to [N, O, *spatial], and from there to the caller's.
    to_front = (0, rank - 1, *range(1, rank - 1)) if window.channels_last else tuple(range(rank))
    permutation = to_front if out is None else tuple(to_front[axis] for axis in out)
    if not barriers.is_moving(permutation, result.shape):
        return lax.transpose(result, permutation)
    return _restore_layout(result, permutation)


def _derive_recorded_shape(x: jax.Array, w: jax.Array, geometry: Geometry, **_: object) -> tuple[tuple[int, ...], Any]:
    lengths = []
    for n, kernel, stride, pads, x_step, w_step in zip(x.shape[2:], w.shape[2:], *geometry[:4], strict=True):
        padded = (n - 1) * x_step + 1 + sum(pads)
        lengths.append((padded - (kernel - 1) * w_step - 1) // stride + 1)
    return (x.shape[0], w.shape[0], *lengths), jnp.int32


def _batch_convolution(
    mapped: dict[str, bool], x: jax.Array, w: jax.Array, x_center: jax.Array | None, w_center: jax.Array | None,
    geometry: Geometry,
) -> jax.Array | None:  # fmt: skip
    """Return the convolution of one more batch of images, or None if anything else is mapped."""
    if not mapped["x"] or sum(mapped.values()) > 1:
        return None
    y = _convolve_recorded(x.reshape(-1, *x.shape[2:]), w, x_center, w_center, geometry)
    return y.reshape(*x.shape[:2], *y.shape[1:])


@recording.mark("convolve", _derive_recorded_shape, _batch_convolution)
def _convolve_recorded(
    x: jax.Array, w: jax.Array, x_center: jax.Array | None, w_center: jax.Array | None, geometry: Geometry
) -> jax.Array:
    """Return the int32 convolution of codes of any dtype, with their zero points."""
    with recording.pause():
        (x, x_center), (w, w_center) = (
            signed_codes.shift_recorded(x, x_center),
            signed_codes.shift_recorded(w, w_center),
        )
        x, w = signed_codes.convert_to_signed(x), signed_codes.convert_to_signed(w)
        return convolve_planned(x, w, x_center, w_center, geometry, False, lambda acc, _: acc)


def _place_output(
    x: jax.Array, w: jax.Array, x_center: jax.Array | None, w_center: jax.Array | None, geometry: Geometry
) -> jax.Array:
    """Return the convolution of operands with shardings in their types, computed by `jax.lax`.

    JAX cannot infer the shardings of the reshapes in the forms below.
    """
    convolve = functools.partial(
        lax.conv_general_dilated, x, window_strides=geometry.strides, padding="VALID",
        rhs_dilation=geometry.rhs_dilation, feature_group_count=geometry.groups, preferred_element_type=jnp.int32,
    )  # fmt: skip
    acc = convolve(w)
    expand = granularity.PerAxis(1).expand
    sums = jnp.sum(w, axis=tuple(range(1, w.ndim)), dtype=jnp.int32)
    if w_center is not None:
        # The zero points of the kernel are multiplied by the sums over patches of x: a convolution with ones.
        center = jnp.broadcast_to(w_center.reshape(-1), sums.shape)
        sums = sums - np.int32(w[0].size) * center
        acc = acc - convolve(jnp.ones_like(w)) * expand(center, acc)
    if x_center is None:
        return acc
    return acc - expand(jnp.broadcast_to(x_center.reshape(1), sums.shape) * sums, acc)


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


def has_positions(x: jax.Array, w: jax.Array, geometry: Geometry) -> bool:
    """Return whether the kernel fits into the padded input at one position or more."""
    dimensions = zip(
        x.shape[2:], w.shape[2:], geometry.padding, geometry.lhs_dilation, geometry.rhs_dilation, strict=True
    )
    for size, kernel, pads, lhs_step, rhs_step in dimensions:
        padded = (size - 1) * lhs_step + 1 + sum(pads)
        if kernel == 0 or padded < (kernel - 1) * rhs_step + 1:
            return False
    return True


# Forms.


def choose_window(x_shape: tuple[int, ...], w_shape: tuple[int, ...], window: Window, *, channels_last: bool) -> Window:
    """Return the window with the fastest form and layout.

    Args:
        x_shape: the shape of the padded x, as (batch, channels, *spatial).
        w_shape: (features, channels / groups, *kernel).
        window: strides, dilations and groups.
        channels_last: whether the channels of the caller's x are last in memory.
    """
    depth, positions = w_shape[1], math.prod(w_shape[2:])
    if depth == 1 and positions <= MOST_SLICES:
        return window._replace(form="products", channels_last=channels_last)
    narrow = depth <= _FEW_CHANNELS or max(depth, w_shape[0]) <= _NARROW
    if positions == 1 or narrow or window.groups > 1:
        pixels = derive_out_shape(x_shape[2:], w_shape[2:], window)
        # A symbolic size is assumed to be large.
        has_few_pixels = all(isinstance(size, int) for size in pixels) and math.prod(pixels) < _FEW_PIXELS
        is_last = window.groups == 1 and (channels_last or has_few_pixels)
        return window._replace(form="patches", channels_last=is_last)
    sizes = (x_shape[0], *derive_out_shape(x_shape[2:], w_shape[2:], window))
    has_few_pixels = all(isinstance(n, int) for n in sizes) and _MANY_FEATURES * math.prod(sizes) <= w_shape[0]
    if has_few_pixels and not (channels_last or window.features_last):
        return window._replace(form="rows", channels_last=False)
    return window._replace(form="direct", channels_last=True)


def convolve(x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, window: Window) -> jax.Array:
    """Return the convolution of x - x_center with w - w_center, modulo 2**32.

    Args:
        x: int8 [N, C, *spatial], or [N, *spatial, C] if channels are last; padded with x_center.
        w: int8 [O, C / groups, *kernel].
        x_center: int32 [N or 1, groups or 1], or None for 0.
        w_center: int32 [O or 1], or None for 0.
        window: Static.

    Returns:
        int32 in x's layout, with O channels.
    """
    return _make_batchable(window)(x, w, x_center, w_center)


# Cached by the window, because JAX reuses a trace only for the same function object.
@functools.cache
def _make_batchable(window: Window) -> Any:
    function = custom_vmap(functools.partial(_convolve, window=window))
    function.def_vmap(functools.partial(_convolve_under_vmap, window))
    return function


def _convolve(x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, *, window: Window) -> jax.Array:
    forms = {
        "products": _sum_shifted_products, "patches": _extract_patches, "rows": _contract_rows,
        "direct": _convolve_direct,
    }  # fmt: skip
    # No GPU library convolves int8 into int32. Every backend other than a CPU therefore contracts patches.
    if window.form != "direct":  # one form for every backend
        return forms[window.form](x, w, x_center, w_center, window=window)
    cpu, default = (functools.partial(forms[form], window=window) for form in ("direct", "patches"))
    return lax.platform_dependent(x, w, x_center, w_center, cpu=cpu, default=default)


def _sum_shifted_products(
    x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, *, window: Window
) -> jax.Array:
    """Return a depthwise convolution as the sum of products of shifted x with one weight per channel.

    XLA:CPU runs a grouped convolution with one channel per group many times slower. The products are int32, because a
    product of two int8 needs up to 16 bits, which would leave no bits for the sum.
    """
    axes, features, channels = list_spatial(x, window), w.shape[0], window.groups
    out = derive_out_shape(tuple(x.shape[a] for a in axes), w.shape[2:], window)
    steps = lax.platform_dependent(w, w_center, cpu=_center_kernel_by_contraction, default=_center_kernel)
    multiplier = features // channels
    acc: Any = None
    for position in itertools.product(*(range(k) for k in w.shape[2:])):
        shifted = slice_position(x, axes, position, window, out).astype(jnp.int32)
        shifted = _repeat_channels(shifted, 1 if not window.channels_last else x.ndim - 1, multiplier)
        term = shifted * _align_features(steps[position], shifted.shape, window)
        acc = term if acc is None else acc + term
    assert acc is not None
    if x_center is None:
        return acc
    sums = jnp.sum(steps, axis=tuple(range(steps.ndim - 1)), dtype=jnp.int32)
    return acc - _compute_correction(x_center, sums, acc.shape, window)


def _center_kernel(w: jax.Array, w_center: Center) -> jax.Array:
    """Return int8 [O, 1, *kernel] minus its zero points, as int32 [*kernel, O]."""
    steps = jnp.moveaxis(w[:, 0], 0, -1).astype(jnp.int32)
    return steps if w_center is None else steps - jnp.broadcast_to(w_center, steps.shape)


def _center_kernel_by_contraction(w: jax.Array, w_center: Center) -> jax.Array:
    """Return the same as `_center_kernel`, computed by a contraction.

    XLA:CPU fuses element-wise work on the weights with the products, whatever barriers are between them. It then
    unpacks, converts, centers and transposes the weights again for every pixel. It does not fuse a contraction.
    """
    # A contraction with the identity transposes and converts the weights. To subtract the zero points, which int8 holds
    # too, they are appended to the rows of weights, and a column of -1 to the identity.
    features, positions = w.shape[0], math.prod(w.shape[2:])
    rows, selection = w.reshape(features, positions), np.eye(positions, dtype=np.int8)
    if w_center is not None:
        points = jnp.broadcast_to(w_center.astype(jnp.int8), (features,))
        rows = lax.concatenate([rows, points[:, None]], 1)
        selection = np.concatenate([selection, np.full((positions, 1), -1, np.int8)], 1)
    steps = lax.dot_general(jnp.asarray(selection), rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return steps.reshape(*w.shape[2:], features)


def _repeat_channels(x: jax.Array, axis: int, times: int) -> jax.Array:
    """Return x with each entry of the axis repeated in place, as `jnp.repeat` does."""
    if times == 1:
        return x
    wide = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    dimensions = tuple(a if a <= axis else a + 1 for a in range(x.ndim))
    return lax.broadcast_in_dim(x, wide, dimensions).reshape(
        *x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :]
    )


def _align_features(value: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    """Return an array of one element per feature in the accumulator's shape."""
    axis = len(shape) - 1 if window.channels_last else 1
    return lax.broadcast_in_dim(value, shape, (axis,))


def _compute_correction(x_center: jax.Array, sums: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    """Return x_center times the sum over each feature's kernel, in the accumulator's shape."""
    axis = len(shape) - 1 if window.channels_last else 1
    features, images = shape[axis], x_center.shape[0]
    per_group = jnp.broadcast_to(x_center, (images, window.groups))
    per_feature = _repeat_channels(per_group, 1, features // window.groups)
    product = per_feature * jnp.broadcast_to(sums, per_feature.shape)
    if images == 1:
        return lax.broadcast_in_dim(product[0], shape, (axis,))
    return lax.broadcast_in_dim(product, shape, (0, axis))


def _extract_patches(x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, *, window: Window) -> jax.Array:
    """Return the convolution as a contraction of the weights with the patches of x.

    With channels last the patches are the rows of the left operand, with channels first the columns of the right one.
    The result then has x's layout without a transpose.
    """
    features, depth, *kernel = w.shape
    length = depth * math.prod(kernel)
    patches, out = gather_patches(x, tuple(kernel), window)
    images, groups = x.shape[0], window.groups
    # The patches have the positions of the kernel before the channels.
    positions = tuple(range(2, w.ndim))
    if window.channels_last:
        assert groups == 1
        # The contraction takes the weights in either order. With features last in memory this transpose moves nothing.
        is_last = window.features_last
        order, shape = ((*positions, 1, 0), (length, features)) if is_last else ((0, *positions, 1), (features, length))
        weights = barriers.transpose_in_memory(w, order).reshape(1, *shape)
        # The barriers here and below keep XLA from fusing the gathering into the contraction.
        rows = lax.optimization_barrier(patches).reshape(1, -1, length)
        centers = _spread_centers(x_center, w_center, math.prod(out))
        acc = contract_integers(rows, weights, *centers, transposed=not is_last)
        return acc.reshape(images, *out, features)
    weights = barriers.transpose_in_memory(w, (0, *positions, 1)).reshape(features, length)
    batch = images * groups
    columns = lax.optimization_barrier(patches.reshape(batch, length, math.prod(out)))
    repeated = lax.broadcast_in_dim(
        weights.reshape(groups, -1, length), (images, groups, features // groups, length), (1, 2, 3)
    )
    left = lax.optimization_barrier(repeated.reshape(batch, -1, length))
    left_center = w_center if w_center is None else _group_centers(w_center, images, groups)
    right_center = None
    if x_center is not None:
        right_center = (
            x_center if x_center.size == 1 else jnp.broadcast_to(x_center, (images, groups)).reshape(batch, 1)
        )
    acc = contract_integers(left, columns, left_center, right_center, transposed=False)
    return acc.reshape(images, features, *out)


def _contract_rows(x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, *, window: Window) -> jax.Array:
    """Return the convolution as a contraction of the patches of x, as rows, with the weights in their own order."""
    images, features, length = x.shape[0], w.shape[0], math.prod(w.shape[1:])
    patches, out = gather_patches(x, w.shape[2:], window)
    # XLA:CPU has a fast kernel for a transpose that is not fused with anything. The pins separate both transposes.
    columns = barriers.pin_layout(patches.reshape(images, length, -1))
    rows = barriers.transpose_in_memory(columns, (0, 2, 1)).reshape(1, -1, length)
    centers = _spread_centers(x_center, w_center, math.prod(out))
    acc = contract_integers(rows, w.reshape(1, features, length), *centers, transposed=True)
    acc = barriers.pin_layout(acc.reshape(images, -1, features))
    return barriers.transpose_in_memory(acc, (0, 2, 1)).reshape(images, features, *out)


def _spread_centers(x_center: Center, w_center: Center, pixels: int) -> tuple[Center, Center]:
    """Return the zero points of patches as rows, [1, 1 or rows], and of features as columns, [1, 1 or O]."""
    if x_center is not None:
        x_center = x_center.reshape(1, -1) if x_center.shape[0] == 1 else _repeat_channels(x_center.T, 1, pixels)
    return x_center, None if w_center is None else w_center.reshape(1, -1)


def _group_centers(w_center: jax.Array, images: int, groups: int) -> jax.Array:
    """Return the kernel's zero points as [images * groups, features / groups], or [1, 1] if there is only one."""
    if w_center.size == 1:
        return w_center.reshape(1, 1)
    grouped = w_center.reshape(groups, -1)
    return lax.broadcast_in_dim(grouped, (images, *grouped.shape), (1, 2)).reshape(images * groups, -1)


def _convolve_direct(x: jax.Array, w: jax.Array, x_center: Center, w_center: Center, *, window: Window) -> jax.Array:
    """Return the convolution by XLA's kernel, corrected for the zero points.

    The zero points of the kernel are multiplied by the sums over patches of x, which are convolutions of x with ones.
    """
    flat, filters, planar = _make_planar(x, w, window)
    acc = _convolve_planes(flat, filters, planar)
    features, length = w.shape[0], math.prod(w.shape[1:])
    if w_center is not None:
        w_center = jnp.broadcast_to(w_center, (features,))
        # One feature of ones per group is enough, but XLA:CPU does not use its kernel for so few. More of them cost
        # less than leaving the kernel; only the first of each group is used.
        copies = (8 if filters.shape[1] > _NARROW else _NARROW + 8) if window.groups == 1 else 1
        ones = jnp.ones((window.groups * copies, *filters.shape[1:]), jnp.int8)
        patch_sums = lax.slice_in_dim(_convolve_planes(flat, ones, planar), 0, None, copies, 3)
        repeated = _repeat_channels(patch_sums, 3, acc.shape[3] // window.groups)
        acc = acc - repeated * _align_features(w_center, acc.shape, planar)
    out = derive_out_shape(tuple(x.shape[a] for a in list_spatial(x, window)), w.shape[2:], window)
    acc = acc.reshape(x.shape[0], *out, features)
    if x_center is None:
        return acc
    # The sums over each kernel are a contraction with ones, which XLA:CPU runs faster than a reduction of int8. It
    # reads the weights in the caller's order; there is no barrier around them, so that XLA computes the sums of
    # constant weights when it compiles. Weights with features last in memory are read as the convolution reads them.
    if window.features_last:
        kernels = barriers.transpose_in_memory(filters, (2, 3, 1, 0)).reshape(1, length, features)
    else:
        kernels = w.reshape(1, features, length)
    ones = make_ones(1, length)
    sums = contract_integers(ones, kernels, None, None, transposed=not window.features_last)[0, 0]
    sums = sums if w_center is None else sums - np.int32(length) * w_center
    return acc - _compute_correction(x_center, sums, acc.shape, window)


def _make_planar(x: jax.Array, w: jax.Array, window: Window) -> tuple[jax.Array, jax.Array, Window]:
    """Return the operands of an equivalent convolution over two spatial dimensions, which the kernel requires.

    With one spatial dimension, another of length 1 is added. With three or more, all but the last two are removed:
    their output positions become images, and their kernel positions become channels.
    """
    assert window.channels_last
    rank = x.ndim - 2
    if rank == 1:
        planar = window._replace(strides=(1, *window.strides), dilations=(1, *window.dilations))
        return x[:, None], w[:, :, None], planar
    planar = window._replace(strides=window.strides[-2:], dilations=window.dilations[-2:])
    if rank == 2:
        return x, w, planar
    axes, kernel = list_spatial(x, window)[: rank - 2], w.shape[2:rank]
    out = derive_out_shape(x.shape[1 : rank - 1], kernel, window._replace(
        strides=window.strides[: rank - 2], dilations=window.dilations[: rank - 2]
    ))  # fmt: skip
    grouped = x.reshape(*x.shape[:-1], window.groups, x.shape[-1] // window.groups)
    positions = itertools.product(*(range(width) for width in kernel))
    slices = [slice_position(grouped, axes, position, window, out) for position in positions]
    wide = jnp.stack(slices, axis=-2)  # [N, *out, H, W, groups, positions, channels / groups]
    flat = wide.reshape(x.shape[0] * math.prod(out), *x.shape[rank - 1 : rank + 1], x.shape[-1] * len(slices))
    filters = jnp.moveaxis(w, 1, rank - 1).reshape(w.shape[0], w.shape[1] * len(slices), *w.shape[rank:])
    return barriers.pin_layout(flat), filters, planar


def _convolve_planes(x: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    return lax.conv_general_dilated(
        x, barriers.transpose_in_memory(w, (2, 3, 1, 0)), window.strides, "VALID", rhs_dilation=window.dilations,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=window.groups,
        preferred_element_type=jnp.int32,
    )  # fmt: skip


def _convolve_under_vmap(
    window: Window, size: int, batched: Sequence[bool], *operands: jax.Array | None
) -> tuple[jax.Array, bool]:
    """Return the convolution of operands under vmap, as one larger convolution.

    If only x has the mapped axis, the axis becomes more images. Otherwise it becomes more groups of channels.
    """
    if not batched[1] and not batched[3]:
        return _fold_into_images(window, size, batched, *operands), True
    x, w, x_center, w_center = batch_all(size, batched, operands)
    channel = x.ndim - 1 if window.channels_last else 2
    groups = jnp.moveaxis(x, 0, channel - 1)
    merged = groups.reshape(*groups.shape[: channel - 1], -1, *groups.shape[channel + 1 :])
    if x_center is not None:
        wide = jnp.broadcast_to(x_center, (*x_center.shape[:2], window.groups))
        x_center = jnp.swapaxes(wide, 0, 1).reshape(wide.shape[1], -1)
    if w_center is not None:
        w_center = jnp.broadcast_to(w_center, (size, w.shape[1])).reshape(-1)
    wider = window._replace(groups=window.groups * size)
    filters = w.reshape(-1, *w.shape[2:])
    spatial = merged.shape[1:-1] if window.channels_last else merged.shape[2:]
    wider = choose_window((merged.shape[0], 0, *spatial), filters.shape, wider, channels_last=window.channels_last)
    # With more groups another form may be the fastest, which may have another layout.
    arranged = _swap_between(merged, window.channels_last, wider.channels_last)
    acc = convolve(arranged, filters, x_center, w_center, wider)
    acc = _swap_between(acc, wider.channels_last, window.channels_last)
    split = acc.reshape(*acc.shape[: channel - 1], size, -1, *acc.shape[channel:])
    return jnp.moveaxis(split, channel - 1, 0), True


def _fold_into_images(
    window: Window, size: int, batched: Sequence[bool], x: Any, w: Any, x_center: Any, w_center: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return the convolution under vmap with the mapped axis as more images."""
    x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
    if batched[2]:
        wide = jnp.broadcast_to(x_center, (size, x.shape[1], x_center.shape[2]))
        x_center = wide.reshape(-1, x_center.shape[2])
    elif x_center is not None and x_center.shape[0] > 1:
        x_center = jnp.tile(x_center, (size, 1))
    acc = convolve(x.reshape(-1, *x.shape[2:]), w, x_center, w_center, window)
    return acc.reshape(size, -1, *acc.shape[1:])


def _swap_between(x: jax.Array, from_last: bool, to_last: bool) -> jax.Array:
    """Return x with its channels moved to the other end if the two layouts differ."""
    if from_last == to_last:
        return x
    to_front = (0, x.ndim - 1, *range(1, x.ndim - 1))
    to_back = (0, *range(2, x.ndim), 1)
    return barriers.transpose_in_memory(x, to_back if to_last else to_front)


# Patches.


def derive_out_shape(spatial: tuple[int, ...], kernel: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """Return the number of positions of the kernel along each spatial dimension of a padded x."""
    dimensions = zip(spatial, kernel, window.strides, window.dilations, strict=True)
    return tuple((size - (width - 1) * step - 1) // stride + 1 for size, width, stride, step in dimensions)


def list_spatial(x: jax.Array, window: Window) -> tuple[int, ...]:
    """Return the axes of x's spatial dimensions."""
    return tuple(range(1, x.ndim - 1)) if window.channels_last else tuple(range(2, x.ndim))


def slice_position(
    x: jax.Array, axes: Sequence[int], position: Sequence[int], window: Window, out: Sequence[int], start: int = 0
) -> jax.Array:
    """Return, for every output position, the element of x that one element of the kernel is multiplied with.

    Args:
        x: the padded array.
        axes: the spatial axes of x to slice.
        position: the position of the element in the kernel, along these axes.
        window: the strides and dilations of all spatial dimensions.
        out: the lengths of all spatial dimensions of the output.
        start: the first spatial dimension in `axes`.
    """
    first, strides, limits = [0] * x.ndim, [1] * x.ndim, list(x.shape)
    for i, (axis, p) in enumerate(zip(axes, position, strict=True), start):
        first[axis], strides[axis] = p * window.dilations[i], window.strides[i]
        limits[axis] = first[axis] + (out[i] - 1) * window.strides[i] + 1
    return lax.slice(x, first, limits, strides)


def gather_patches(x: jax.Array, kernel: tuple[int, ...], window: Window) -> tuple[jax.Array, tuple[int, ...]]:
    """Return the patches of x and the spatial shape of the output.

    The patches are [N, *out, positions, C] with channels last, else [N, groups, positions, C / groups, *out]; in the
    form "rows", [N, groups, C / groups, positions, *out].
    """
    axes = list_spatial(x, window)
    out = derive_out_shape(tuple(x.shape[a] for a in axes), kernel, window)
    if not window.channels_last:
        spatial = x.shape[2:]
        x = x.reshape(x.shape[0], window.groups, -1, *spatial)
        axes = tuple(a + 1 for a in axes)
    axis = x.ndim - 1 if window.channels_last else 3 if window.form == "rows" else 2
    # One dimension of the kernel after the other: the number of slices is then the sum of the kernel's lengths instead
    # of their product. XLA:CPU fuses a stack of few slices into one loop, and compiles a loop for each slice of a large
    # stack. The additional copies take less time than the larger number of slices.
    is_first = True
    for i in reversed(range(len(kernel))):
        size, step, stride = kernel[i], window.dilations[i], window.strides[i]
        # A long dimension is cut into parts of `short` positions, so that the number of slices grows with its root. The
        # slices of the positions in a part, at every element, come before those of the parts, at every output position.
        short = 1 << size.bit_length() // 2 if size > MOST_SLICES else 1
        parts = -(-size // short)
        if short > 1:
            span = (parts * short - 1) * step + (out[i] - 1) * stride + 1
            x = lax.pad(x, jnp.zeros((), x.dtype), [
                (0, (parts * short - size) * step if a == axes[i] else 0, 0) for a in range(x.ndim)
            ])  # fmt: skip
            x = _stack_positions(x, axes[i], axis, short, step, 1, span - (short - 1) * step, is_first)
            axes, is_first = _shift_axes(axes, axis, is_first), False
        x = _stack_positions(x, axes[i], axis, parts, short * step, stride, out[i], is_first)
        axes, is_first = _shift_axes(axes, axis, is_first), False
        if parts * short > size:  # the positions of the last part beyond the kernel
            x = lax.slice_in_dim(x, 0, x.shape[axis] // (parts * short) * size, axis=axis)
    return x, out


def _shift_axes(axes: tuple[int, ...], axis: int, is_first: bool) -> tuple[int, ...]:
    """Return axes after the first axis of positions has been inserted; later ones are merged with it."""
    return tuple(a if a < axis or not is_first else a + 1 for a in axes)


def _stack_positions(
    x: jax.Array, sliced: int, axis: int, count: int, step: int, stride: int, length: int, is_first: bool
) -> jax.Array:
    """Return slices of an axis that begin `step` after each other, stacked along `axis`.

    Unless they are the first, they are merged with the positions that are there, which vary faster.
    """
    slices = []
    for start in range(0, count * step, step):
        first, limits, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
        first[sliced], limits[sliced], strides[sliced] = start, start + (length - 1) * stride + 1, stride
        slices.append(lax.slice(x, first, limits, strides))
    x = jnp.stack(slices, axis=axis) if count > 1 else lax.expand_dims(slices[0], (axis,))
    x = x if is_first else lax.collapse(x, axis, axis + 2)
    # Without a barrier XLA fuses the stacks and computes all slices again.
    return lax.optimization_barrier(x) if count > 1 else x
