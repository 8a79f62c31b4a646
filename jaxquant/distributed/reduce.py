"""`psum`, `pmean`, `psum_scatter`, `psum_with_error_feedback`: sums over devices of arrays that travel as codes."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._arrays.quantized_array import dequantize_checked
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._kernels import affine
from . import _messages
from ._messages import choose_gathered_type, move_array, read_axis_size


def psum(x: Any, axis_name: Hashable, *, spec: QuantSpec, key: jax.Array | None = None) -> Any:
    """Return the sum of the arrays of all devices along a mapped axis; they travel as codes and scales, in two hops.

    It is `jax.lax.psum` inside `jax.shard_map` (or under a named axis of `jax.vmap` or `jax.pmap`). Each array is
    flattened and cut into a message for each device, of equal length (filled up with zeros). Each device quantizes its
    messages and sends them (all-to-all); adds those that it gets in float32; quantizes the sum, and sends it to all
    (all-gather). With int8 and a scale for each 128 elements that takes 0.26 of the bytes of a float32 sum.

    Every device dequantizes the same codes, also of its own message, so the result has the same bits on all
    devices. It is always quantized, even on an axis of one device.

    With s_i the scale of an element on device i and s the scale of its sum, and without a key, the error is at most
    sum(s_i) / 2 + s / 2: half a step for each message of the first hop, half a step for the second, and float32's
    rounding. With a key each rounding is stochastic and the error up to twice as large, but its mean is 0, up to
    float32's rounding.

    A NaN on any device makes the scale of its message or block NaN, and the result NaN in that whole message or block,
    on every device. An infinity makes it NaN or infinite. So neither is lost.

    Gradients are as in `jax.lax.psum`, straight-through; cotangents travel in floats.

    Args:
        x: a pytree of floats: float32, float16 or bfloat16, of any shape.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How messages are quantized. The granularity is `PerTensor()`, one scale for each message, or
            `Blocked(-1, size)`, one for each run of elements of a message.
        key: a key of `jax.random` to round stochastically; it may be the same on all devices, which then still round
            differently. The spec is then symmetric. None rounds to the nearest code.

    Returns:
        A tree of sums, with the shapes and dtypes of x.

    Raises:
        TypeError: a leaf is no array of floats; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; the spec has another granularity; or there is a key, and the spec is
            asymmetric or its dtype no integer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, 127.0], [1.0, 254.0]])  # a row on each of two devices; a message has one element
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> jax.vmap(lambda row: jqd.psum(row, "d", spec=spec), axis_name="d", out_axes=None)(x)
        Array([  1.5, 381. ], dtype=float32)
        >>> x = jnp.array([[0.5, 127.0, 127.0, 127.0], [3.0, 254.0, 254.0, 254.0]])  # two; scales 1, 2, and 3
        >>> jax.vmap(lambda row: jqd.psum(row, "d", spec=spec), axis_name="d", out_axes=None)(x)  # 0 + 4 is 1.33 * 3
        Array([  3., 381., 381., 381.], dtype=float32)

    Source: Ibrahim et al. (EQuARX), arXiv 2506.17615; Wang et al. (ZeRO++), arXiv 2306.10209, section 3.3.
    """
    return _reduce("distributed.psum", x, axis_name, spec, key, is_mean=False)


def pmean(x: Any, axis_name: Hashable, *, spec: QuantSpec, key: jax.Array | None = None) -> Any:
    """Return the mean of the arrays of all devices along a mapped axis: `psum`, divided by the number of devices.

    All that is said of `psum` holds, and the error is divided as the sum is.

    Args:
        x: a pytree of floats: float32, float16 or bfloat16, of any shape.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How messages are quantized, with the granularity `PerTensor()` or `Blocked(-1, size)`.
        key: a key of `jax.random` to round stochastically, or None.

    Returns:
        A tree of means, with the shapes and dtypes of x.

    Raises:
        TypeError: a leaf is no array of floats; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; the spec has another granularity; or there is a key, and the spec is
            asymmetric or its dtype no integer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, 127.0], [1.0, 254.0]])  # a row on each of two devices; a message has one element
        >>> jax.vmap(lambda row: jqd.pmean(row, "d", spec=jq.QuantSpec(jnp.int8)), axis_name="d", out_axes=None)(x)
        Array([  0.75, 190.5 ], dtype=float32)

    Source: as of `psum`.
    """
    return _reduce("distributed.pmean", x, axis_name, spec, key, is_mean=True)


def psum_scatter(
    x: Any,
    axis_name: Hashable,
    *,
    spec: QuantSpec,
    scatter_dimension: int = 0,
    tiled: bool = False,
    key: jax.Array | None = None,
) -> Any:
    """Return the slice of the sum over devices that belongs to this device; the slices travel as codes, in one hop.

    It is `jax.lax.psum_scatter`, the first half of `psum`: each slice is one message. The sum is not quantized again,
    so the error is at most half a step of each device's scale, sum(s_i) / 2, and float32's rounding.

    Gradients are as in `jax.lax.psum_scatter`, straight-through; cotangents travel in floats.

    Args:
        x: a pytree of floats: float32, float16 or bfloat16.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How slices are quantized, with the granularity `PerTensor()` or `Blocked(-1, size)`, which counts
            the elements of a slice in row-major order.
        scatter_dimension: Static. The dimension that is cut into a slice for each device.
        tiled: Static. Whether the slices keep that dimension. Its length is then a multiple of the number of devices,
            otherwise that number.
        key: a key of `jax.random` to round stochastically, or None.

    Returns:
        A tree of slices of sums, in the dtypes of x.

    Raises:
        TypeError: a leaf is no array of floats; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; the spec has another granularity; there is a key, and the spec is
            asymmetric or its dtype no integer; or the number of devices does not divide the dimension.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, 127.0], [1.0, 254.0]])  # a row on each of two devices
        >>> jax.vmap(lambda row: jqd.psum_scatter(row, "d", spec=jq.QuantSpec(jnp.int8)), axis_name="d")(x)
        Array([  1.5, 381. ], dtype=float32)

    Source: Wang et al. (ZeRO++), arXiv 2306.10209, section 3.3.
    """
    function = "distributed.psum_scatter"
    size = read_axis_size(function, axis_name)
    _messages.check_flat_spec(function, spec, key)
    checks.check_flag(function, "tiled", tiled)
    reduction = Reduction(axis_name, size, _messages.derive_row_spec(spec))

    def scatter_leaf(leaf: ArrayLike, leaf_key: jax.Array | None) -> jax.Array:
        leaf = _messages.read_floats(function, "x", leaf)
        dimension = checks.check_axis(function, scatter_dimension, leaf.ndim, "scatter_dimension")
        length = leaf.shape[dimension]
        fits = length % size == 0 if tiled else length == size
        expected = f"a dimension of {'a multiple of ' if tiled else ''}{size}, the number of devices"
        got = f"{length}, dimension {dimension} of {leaf.shape}"
        checks.require(fits, function, "scatter_dimension", expected, got)
        return _scatter_sums(Scatter(reduction, dimension, bool(tiled)), leaf, leaf_key)

    return _messages.map_leaves(scatter_leaf, x, key, axis_name)


def _reduce(
    function: str, x: Any, axis_name: Hashable, spec: QuantSpec, key: jax.Array | None, *, is_mean: bool
) -> Any:
    size = read_axis_size(function, axis_name)
    _messages.check_flat_spec(function, spec, key)
    reduction = Reduction(axis_name, size, _messages.derive_row_spec(spec), is_mean)

    def reduce_leaf(leaf: ArrayLike, leaf_key: jax.Array | None) -> jax.Array:
        return _sum_arrays(reduction, _messages.read_floats(function, "x", leaf), leaf_key)

    return _messages.map_leaves(reduce_leaf, x, key, axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_arrays(reduction: Reduction, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the sum or the mean of x over the devices."""
    if not x.size:  # an empty array takes no bytes
        return lax.psum(x, reduction.axis_name)
    total, _ = add_messages(reduction, _messages.split_messages(x, reduction.size), key)
    rows, _ = share_sums(reduction, total, key)
    if reduction.is_mean:
        # XLA turns a division by a constant into a product with its reciprocal, which is rounded twice.
        rows = affine.divide(rows, jnp.full_like(rows, reduction.size))
    return _messages.join_messages(rows, x)


@_sum_arrays.defjvp
def _sum_arrays_jvp(reduction: Reduction, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # JAX transposes the sum of the tangents, so the cotangents obey its own rules under `jax.shard_map`.
    add = lax.pmean if reduction.is_mean else lax.psum
    return _sum_arrays(reduction, *primals), add(tangents[0], reduction.axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scatter_sums(scatter: Scatter, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the slice of the sum of x over the devices that belongs to this device, differentiable."""
    return scatter_sums(scatter, x, key)


@_scatter_sums.defjvp
def _scatter_sums_jvp(scatter: Scatter, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    axis_name, dimension, tiled = scatter.reduction.axis_name, scatter.dimension, scatter.tiled
    tangent = lax.psum_scatter(tangents[0], axis_name, scatter_dimension=dimension, tiled=tiled)
    return _scatter_sums(scatter, *primals), tangent


# The two hops of a quantized sum: each device adds the messages that it gets, and shares the sum with all.


class Reduction(NamedTuple):
    """The static part of a sum over devices.

    Attributes:
        axis_name: the mapped axis or axes.
        size: the number of devices along them.
        spec: how the messages are quantized; `derive_row_spec` has adapted it.
        is_mean: whether the sum is divided by the number of devices.
    """

    axis_name: Hashable
    size: int
    spec: QuantSpec
    is_mean: bool = False


class Scatter(NamedTuple):
    """The static part of a `psum_scatter`.

    Attributes:
        reduction: the sum.
        dimension: the dimension that is cut into slices.
        tiled: whether the slices keep that dimension.
    """

    reduction: Reduction
    dimension: int
    tiled: bool


def add_messages(reduction: Reduction, rows: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the messages that all devices send to this one, and the errors of the messages that it sends.

    Args:
        reduction: Static. The sum.
        rows: float32, a message for each device.
        key: a key of this device, or None.

    Returns:
        The sum, float32, of the shape of a row; and the values that the codes of `rows` represent.
    """
    # Slices are exchanged before they are added: messages with different scales cannot be added as codes on their way.
    q = _messages.encode(rows, reduction.spec, _derive_key(key, 0))
    received = move_array(q, lambda part: lax.all_to_all(part, reduction.axis_name, 0, 0, tiled=True), rows=1)
    return jnp.sum(dequantize_checked(received), axis=0), dequantize_checked(q)


def share_sums(reduction: Reduction, total: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the sums of all devices, one in each row, and the values of the codes of this device's own.

    Args:
        reduction: Static. The sum.
        total: float32, of the shape of a message.
        key: a key of this device, or None.
    """
    # The own sum is read from its codes as well, or the devices would not hold the same bits.
    q = _messages.encode(total[None], reduction.spec, _derive_key(key, 1))
    to = choose_gathered_type(reduction.axis_name)
    gathered = move_array(q, lambda part: lax.all_gather(part, reduction.axis_name, tiled=True, to=to), rows=1)
    return dequantize_checked(gathered), dequantize_checked(q)[0]


def scatter_sums(scatter: Scatter, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return the slice of the sum of x over the devices that belongs to this device; it has no derivative."""
    size, d = scatter.reduction.size, scatter.dimension
    # One row for each device: the slices along the dimension, flattened.
    pieces = jnp.moveaxis(x.reshape(*x.shape[:d], size, x.shape[d] // size, *x.shape[d + 1 :]), d, 0)
    total, _ = add_messages(scatter.reduction, pieces.reshape(size, -1).astype(jnp.float32), key)
    part = total.reshape(pieces.shape[1:]).astype(x.dtype)
    return part if scatter.tiled else jnp.squeeze(part, d)


def _derive_key(key: jax.Array | None, hop: int) -> Any:
    # With one key for both hops, the sum would be rounded by the random numbers of its own terms.
    return None if key is None else jax.random.fold_in(key, hop)


# A sum that keeps what its roundings leave out.


def psum_with_error_feedback(
    x: Any, residual: Any, axis_name: Hashable, *, spec: QuantSpec, key: jax.Array | None = None
) -> tuple[Any, Any]:
    """Return `psum(x + residual)`, and what its roundings have left out: the residual of the next call.

    Each device keeps the errors of its own messages and of the sum that it quantized. With e the errors that the
    devices return, y + sum(e) = sum(x + residual), up to float32's rounding. Over many steps the sum of all y therefore
    differs from the sum of all x by the residuals of the last step only.

    Start with zeros. Where an error is NaN or infinite its residual is 0, so a step with a NaN does not spoil those
    that follow.

    The gradient of y is as in `jax.lax.psum`. The residual that is returned has none.

    Args:
        x: a pytree of floats: float32, float16 or bfloat16, of any shape.
        residual: a tree of float32 arrays of the same shapes, the device's own.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How messages are quantized, with the granularity `PerTensor()` or `Blocked(-1, size)`.
        key: a key of `jax.random` to round stochastically, or None.

    Returns:
        The tree of sums, with the shapes and dtypes of x, the same on all devices; and the residuals, float32.

    Raises:
        TypeError: a leaf is no array of floats, or a residual is not float32; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; the spec has another granularity; there is a key, and the spec is
            asymmetric or its dtype no integer; or a residual has another shape than x.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, 127.0, 127.0, 127.0], [3.0, 254.0, 254.0, 254.0]])  # a row on each of two devices
        >>> add = lambda x, r: jqd.psum_with_error_feedback(x, r, "d", spec=jq.QuantSpec(jnp.int8))
        >>> y, residual = jax.vmap(add, axis_name="d", out_axes=(None, 0))(x, jnp.zeros_like(x))
        >>> y, residual  # 3.5 is 3 and a rest of 0.5; the first device also keeps the rest of the sum, 4 - 3
        (Array([  3., 381., 381., 381.], dtype=float32), Array([[ 1.5,  0. ,  0. ,  0. ],
               [-1. ,  0. ,  0. ,  0. ]], dtype=float32))

    Source: Seide et al., Interspeech 2014, section 3.2; Karimireddy et al., arXiv 1901.09847, algorithm 2.
    """
    function = "distributed.psum_with_error_feedback"
    size = read_axis_size(function, axis_name)
    _messages.check_flat_spec(function, spec, key)
    reduction = Reduction(axis_name, size, _messages.derive_row_spec(spec))
    leaves, structure = jax.tree.flatten(x)
    residuals, got = jax.tree.flatten(residual)
    checks.require(got == structure, function, "residual", f"{structure}, the structure of x", got)
    sums, errors = [], []
    keys = _messages.list_keys(key, axis_name, len(leaves))
    for leaf, left, own_key in zip(leaves, residuals, keys, strict=True):
        leaf, left = _messages.read_floats(function, "x", leaf), _messages.read_floats(function, "residual", left)
        # In bfloat16 a residual would lose the very digits that it is there to keep.
        checks.check_same_dtype(function, "residual", left, dtypes.FLOAT32, "whatever the dtype of x")
        checks.check_shape(function, "residual", left, leaf.shape, "the shape of x")
        total, error = _sum_with_error(reduction, leaf, left, own_key)
        sums.append(total)
        errors.append(error)
    return structure.unflatten(sums), structure.unflatten(errors)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_with_error(
    reduction: Reduction, x: jax.Array, residual: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of x + residual over the devices, and the new residual."""
    if not x.size:
        return lax.psum(x, reduction.axis_name), residual
    rows = _messages.split_messages(x.astype(jnp.float32) + residual, reduction.size)
    total, sent = add_messages(reduction, rows, key)
    shared, own = share_sums(reduction, total, key)
    # The error of a sum goes to the device that quantized it, into the message that was meant for itself.
    index = lax.axis_index(reduction.axis_name)
    is_own = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == index
    errors = rows - sent + jnp.where(is_own, (total - own)[None], np.float32(0))
    # A NaN would stay in the residual, and in all sums from then on.
    errors = jnp.where(jnp.isfinite(errors), errors, np.float32(0))
    return _messages.join_messages(shared, x), _messages.join_messages(errors, residual)


@_sum_with_error.defjvp
def _sum_with_error_jvp(reduction: Reduction, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    dx, dresidual, _ = tangents
    y, error = _sum_with_error(reduction, *primals)
    # The residual is a correction, and constant to the derivative.
    return (y, error), (lax.psum(dx + dresidual.astype(dx.dtype), reduction.axis_name), jnp.zeros_like(error))
