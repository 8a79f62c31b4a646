"""`all_gather`, `all_to_all` and `ppermute`: what is moved between devices travels as codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import indexing
from .._arrays.concatenate import cut_for_join
from .._arrays.quantized_array import QuantizedArray, check_lazy, dequantize_checked
from .._arrays.scale_from_range import derive_shapes
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, granularity, sharding
from . import _messages
from ._messages import join_stack, move_array, move_plain, read_axis_size
from .reduce import Reduction, Scatter, scatter_sums


class Transfer(NamedTuple):
    """The static part of a collective that moves elements and adds none.

    Attributes:
        spec: how floats are quantized before they travel.
        move_codes: `move_codes(q)` returns the quantized array that arrives.
        move_floats: the same collective of `jax.lax`, which moves tangents and cotangents.
    """

    spec: QuantSpec
    move_codes: Callable[[QuantizedArray], QuantizedArray]
    move_floats: Callable[[jax.Array], jax.Array]


def all_gather(
    x: Any,
    axis_name: Hashable,
    *,
    spec: QuantSpec | None = None,
    axis: int = 0,
    tiled: bool = False,
    backward_spec: QuantSpec | None = None,
) -> Any:
    """Return the arrays of all devices along a mapped axis, which travel as codes and scales.

    It is `jax.lax.all_gather` inside `jax.shard_map` (or under a named axis of `jax.vmap` or `jax.pmap`). What goes in
    comes out: a QuantizedArray arrives as one, bit for bit, with the scales of all devices, and is not dequantized on
    the way. An array of floats is quantized as `quantize(x, spec)` does, travels, and is dequantized in its own dtype
    where it arrives, the device's own part included. Arrays of integers and bools travel as they are, integers of less
    than 8 bits as bytes.

    Codes of 4 and 2 bits are packed into bytes. A NaN or an infinity makes its scale NaN or infinite, so that it is
    seen wherever the array arrives.

    Gradients are those of `jax.lax.all_gather`, straight-through: the cotangents of all devices are added, and each
    device gets the slice of its x. They travel in floats or, with a `backward_spec`, as codes, as in `psum_scatter`.
    The codes of a QuantizedArray have no gradient; its scale has.

    Args:
        x: a pytree of QuantizedArrays, floats (float32, float16 or bfloat16), integers and bools.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        spec: Static. How floats are quantized; any granularity. None if there are no floats.
        axis: Static. The dimension of the result that holds the devices, or, if tiled, the existing dimension along
            which the arrays are joined.
        tiled: Static. Whether to join the arrays along an existing dimension.
        backward_spec: Static. How the cotangents of floats are quantized, as by `psum_scatter`. None sends floats, and
            is needed for derivatives in forward mode.

    Returns:
        A tree like x. Each shape is that of `jax.lax.all_gather`.

    Raises:
        TypeError: a leaf is no array, or has an unsupported dtype; `spec` is no QuantSpec.
        ValueError: there is no such mapped axis; there are floats and no spec; or `axis` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, -127.0], [3.0, 254.0]])  # a row on each of two devices
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> y = jax.vmap(lambda row: jqd.all_gather(row, "d", spec=spec), axis_name="d", out_axes=None)(x)
        >>> y  # scales 1 and 2, and two ties
        Array([[   0., -127.],
               [   4.,  254.]], dtype=float32)

    Source: jax.lax.all_gather; Wang et al. (ZeRO++), arXiv 2306.10209, section 3.1.
    """
    function = "distributed.all_gather"
    size = read_axis_size(function, axis_name)
    checks.check_flag(function, "tiled", tiled)
    if spec is not None:
        _messages.check_spec(function, spec)
    if backward_spec is not None:
        _messages.check_flat_spec(function, backward_spec, None, "backward_spec")

    def gather_leaf(leaf: Any) -> Any:
        leaf = _read_leaf(function, leaf, spec)
        place = checks.check_axis(function, axis, leaf.ndim + (not tiled))
        move = functools.partial(lax.all_gather, axis_name=axis_name, axis=place, tiled=bool(tiled))
        if not _moves_codes(leaf):
            return move_plain(leaf, move)
        gather = functools.partial(gather_codes, axis_name=axis_name, size=size, axis=place, is_tiled=bool(tiled))
        if backward_spec is None or _messages.is_quantized(leaf):
            return _transfer(leaf, None, spec, gather, move)
        # The transpose of a gather adds the cotangents of all devices, and gives each its slice.
        scatter = Scatter(Reduction(axis_name, size, _messages.derive_row_spec(backward_spec)), place, bool(tiled))
        assert spec is not None  # _read_leaf has checked it
        # The cotangents of a device are its own. If x is the same on all devices, JAX adds them.
        leaf = sharding.vary_like(leaf, lax.axis_index(axis_name))
        return _gather_floats((Transfer(spec, gather, move), scatter), leaf)

    return jax.tree.map(gather_leaf, x, is_leaf=_messages.is_quantized)


def gather_codes(q: QuantizedArray, *, axis_name: Hashable, size: int, axis: int, is_tiled: bool) -> QuantizedArray:
    """Return the arrays of all devices as one; the arguments have been checked."""
    if is_tiled:
        q = cut_for_join(q, axis, size)
    return join_stack(move_array(q, lambda part: lax.all_gather(part, axis_name)), axis, is_tiled=is_tiled)


def all_to_all(
    x: Any,
    axis_name: Hashable,
    split_axis: int,
    concat_axis: int,
    *,
    spec: QuantSpec | None = None,
    tiled: bool = False,
    key: jax.Array | None = None,
) -> Any:
    """Send each device its slice of x, and return the slices that arrive; they travel as codes and scales.

    It is `jax.lax.all_to_all`. What goes in comes out, as in `all_gather`: a QuantizedArray arrives bit for bit, and
    floats are quantized as `quantize(x, spec)` does and dequantized where they arrive. A stored order of the codes is
    given up. Gradients are those of `jax.lax.all_to_all`, straight-through.

    Args:
        x: a pytree of QuantizedArrays, floats (float32, float16 or bfloat16), integers and bools.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        split_axis: Static. The dimension that is cut into a slice for each device.
        concat_axis: Static. The dimension of the result along which the slices are stacked or, if tiled, joined.
        spec: Static. How floats are quantized; any granularity. None if there are no floats.
        tiled: Static. Whether the slices keep `split_axis`, and are joined along an existing dimension.
        key: a key of `jax.random` to round floats stochastically, differently on each device; None rounds to nearest.

    Returns:
        A tree like x. Each shape is that of `jax.lax.all_to_all`.

    Raises:
        TypeError: a leaf is no array, or has an unsupported dtype; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; there are floats and no spec; an axis is out of range; the length of
            `split_axis` is not a multiple of the number of devices (that number, unless it is tiled); or there is a
            key, and the spec is asymmetric or its dtype no integer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, -127.0], [3.0, 254.0]])  # a row on each of two devices
        >>> spec = jq.QuantSpec(jnp.int8)
        >>> jax.vmap(lambda row: jqd.all_to_all(row, "d", 0, 0, spec=spec), axis_name="d")(x)
        Array([[   0.,    4.],
               [-127.,  254.]], dtype=float32)

    Source: jax.lax.all_to_all; Wang et al. (ZeRO++), arXiv 2306.10209, section 3.3.
    """
    function = "distributed.all_to_all"
    size = read_axis_size(function, axis_name)
    checks.check_flag(function, "tiled", tiled)
    if spec is not None:
        _messages.check_spec(function, spec, key)

    def exchange_leaf(leaf: Any, leaf_key: jax.Array | None) -> Any:
        leaf = _read_leaf(function, leaf, spec)
        split = checks.check_axis(function, split_axis, leaf.ndim, "split_axis")
        concat = checks.check_axis(function, concat_axis, leaf.ndim, "concat_axis")
        length = leaf.shape[split]
        fits = length % size == 0 if tiled else length == size
        expected = f"a dimension of {'a multiple of ' if tiled else ''}{size}, the number of devices"
        checks.require(fits, function, "split_axis", expected, f"{length}, dimension {split} of {leaf.shape}")
        move = functools.partial(
            lax.all_to_all, axis_name=axis_name, split_axis=split, concat_axis=concat, tiled=bool(tiled)
        )
        if not _moves_codes(leaf):
            return move_plain(leaf, move)
        exchange = functools.partial(
            _exchange_codes, axis_name=axis_name, size=size, split=split, concat=concat, is_tiled=bool(tiled)
        )
        return _transfer(leaf, leaf_key, spec, exchange, move)

    return _messages.map_leaves(exchange_leaf, x, key, axis_name)


def _exchange_codes(
    q: QuantizedArray, *, axis_name: Hashable, size: int, split: int, concat: int, is_tiled: bool
) -> QuantizedArray:
    """Return the slices that arrive, joined; the arguments have been checked."""
    stack = _split_array(q.store_last(), split, size)
    if is_tiled:
        stack = jax.vmap(lambda part: cut_for_join(part, concat, size))(stack)
    else:
        stack = jax.tree.map(lambda part: jnp.squeeze(part, split + 1), stack)
    # With jax 0.10, XLA:CPU fails if it shares the slices of two exchanges that lay them out differently.
    stack = lax.optimization_barrier(stack)
    moved = move_array(stack, lambda part: lax.all_to_all(part, axis_name, 0, 0, tiled=True), rows=1)
    return join_stack(moved, concat, is_tiled=is_tiled)


def _split_array(q: QuantizedArray, axis: int, count: int) -> QuantizedArray:
    """Return `count` slices of equal length along an axis, stacked along a new first dimension of each part."""
    length = q.shape[axis] // count
    for part in (q.scale, q.zero_point):
        if part is not None and part.shape[axis] not in (1, q.shape[axis]):
            sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
            assert sizes is not None
            if length % sizes[axis]:  # a slice cuts through a block
                q = indexing.per_index(q, (axis,))
                break

    def split_part(part: jax.Array) -> jax.Array:
        # An entry for the whole axis goes to every device.
        if part.shape[axis] == 1 != q.shape[axis]:
            return jnp.broadcast_to(part[None], (count, *part.shape))
        pieces = part.reshape(*part.shape[:axis], count, part.shape[axis] // count, *part.shape[axis + 1 :])
        return jnp.moveaxis(pieces, axis, 0)

    return jax.tree.map(split_part, q)


def ppermute(
    x: Any,
    axis_name: Hashable,
    perm: Sequence[tuple[int, int]],
    *,
    spec: QuantSpec | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Send x from one device to another, for each pair of a permutation; it travels as codes and scales.

    It is `jax.lax.ppermute`. What goes in comes out, as in `all_gather`: a QuantizedArray arrives bit for bit, and
    floats are quantized as `quantize(x, spec)` does and dequantized where they arrive. A device to which none sends
    gets zeros; of an array with a codebook, the level nearest to 0. Gradients are those of `jax.lax.ppermute`,
    straight-through.

    Args:
        x: a pytree of QuantizedArrays, floats (float32, float16 or bfloat16), integers and bools.
        axis_name: Static. The name of the mapped axis, or a tuple of names.
        perm: Static. Pairs of the indices of a sender and its receiver. No index occurs twice on the same side.
            Under `jax.vmap`, JAX needs a pair for each index.
        spec: Static. How floats are quantized; any granularity. None if there are no floats.
        key: a key of `jax.random` to round floats stochastically, differently on each device; None rounds to nearest.

    Returns:
        A tree like x.

    Raises:
        TypeError: a leaf is no array, or has an unsupported dtype; `spec` is no QuantSpec, or `key` no key.
        ValueError: there is no such mapped axis; there are floats and no spec; `perm` is no permutation; or there is
            a key, and the spec is asymmetric or its dtype no integer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> from jaxquant import distributed as jqd
        >>> x = jnp.array([[0.5, -127.0], [3.0, 254.0]])  # a row on each of two devices
        >>> q = jax.vmap(lambda row: jq.quantize(row, jq.QuantSpec(jnp.int8)))(x)
        >>> jax.vmap(lambda row: jqd.ppermute(row, "d", [(0, 1), (1, 0)]), axis_name="d")(q).dequantize()
        Array([[   4.,  254.],
               [   0., -127.]], dtype=float32)

    Source: jax.lax.ppermute.
    """
    function = "distributed.ppermute"
    size = read_axis_size(function, axis_name)
    if spec is not None:
        _messages.check_spec(function, spec, key)
    pairs = _check_permutation(function, perm, size)
    move = functools.partial(lax.ppermute, axis_name=axis_name, perm=pairs)

    def permute_codes(q: QuantizedArray) -> QuantizedArray:
        received = move_array(q, move)
        return received if len(pairs) == size else _fill_unsent(received, axis_name, [pair[1] for pair in pairs])

    def permute_leaf(leaf: Any, leaf_key: jax.Array | None) -> Any:
        leaf = _read_leaf(function, leaf, spec)
        return _transfer(leaf, leaf_key, spec, permute_codes, move) if _moves_codes(leaf) else move_plain(leaf, move)

    return _messages.map_leaves(permute_leaf, x, key, axis_name)


def _fill_unsent(q: QuantizedArray, axis_name: Hashable, receivers: list[int]) -> QuantizedArray:
    """Return what a device has received, or an array of zeros on a device to which none has sent."""
    is_sent = jnp.isin(lax.axis_index(axis_name), np.array(receivers, np.int32))
    scale, codes = q.scale, q.codes
    if scale.dtype != dtypes.E8M0:  # zeros have arrived, but no scale may be 0; as bits of E8M0 they are 2**-127
        scale = jnp.where(is_sent, scale, np.ones((), scale.dtype))
    if q.codebook is None:  # code 0 minus zero point 0 is 0
        return q.replace(scale=scale)
    zero = q.codebook.encode(jnp.zeros((), jnp.float32))
    return q.replace(codes=jnp.where(is_sent, codes, zero), scale=scale)


def _check_permutation(function: str, perm: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of a permutation; raise if they are none."""
    expected = "pairs (sender, receiver)"
    is_pairs = isinstance(perm, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in perm)
    checks.require_type(is_pairs, function, "perm", expected, checks.describe_value(perm))
    pairs = checks.check_integers(function, "perm", perm)
    senders, receivers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    is_distinct = len(set(senders)) == len(set(receivers)) == len(pairs)
    expected += f" of distinct indices in [0, {size - 1}]"
    checks.require(is_distinct and {*senders, *receivers} <= set(range(size)), function, "perm", expected, perm)
    return pairs


# What the three share.


def _read_leaf(function: str, leaf: Any, spec: QuantSpec | None) -> Any:
    """Return a leaf as a checked QuantizedArray or as a JAX array; raise if it holds floats and there is no spec."""
    if _messages.is_quantized(leaf):
        return check_lazy(function, "x", leaf)
    leaf = jnp.asarray(leaf) if isinstance(leaf, bool | int | float | np.ndarray | np.generic) else leaf
    checks.require_type(isinstance(leaf, jax.Array), function, "x", "arrays", checks.describe_value(leaf))
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype not in dtypes.SMALL_FLOATS:
        checks.check_array(function, "x", leaf, dtypes.FLOATS)
        expected = f"a QuantSpec for floats (jax.lax.{function.split('.')[1]} moves them as they are)"
        checks.require(spec is not None, function, "spec", expected, "None")
        assert spec is not None
        derive_shapes(f"{function}: spec", spec, leaf.shape)  # raises unless the array has the axes of the spec
    return leaf


def _moves_codes(leaf: Any) -> bool:
    """Return whether a leaf is moved as a QuantizedArray; other integers are moved as they are."""
    return _messages.is_quantized(leaf) or leaf.dtype in dtypes.FLOATS


def _transfer(leaf: Any, key: jax.Array | None, spec: Any, move_codes: Any, move_floats: Any) -> Any:
    """Return what arrives of a QuantizedArray, or of floats."""
    if _messages.is_quantized(leaf):
        return move_codes(leaf)
    return _move_floats(Transfer(spec, move_codes, move_floats), leaf, key)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_floats(transfer: Transfer, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Return floats that have travelled as codes."""
    return dequantize_checked(transfer.move_codes(_messages.encode(x, transfer.spec, key)))


@_move_floats.defjvp
def _move_floats_jvp(transfer: Transfer, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # JAX transposes the collective of the tangents, so the cotangents obey its own rules under `jax.shard_map`.
    return _move_floats(transfer, *primals), transfer.move_floats(tangents[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_floats(transfers: tuple[Transfer, Scatter], x: jax.Array) -> jax.Array:
    """Return the arrays of all devices; their cotangents travel as codes, too."""
    return _move_floats(transfers[0], x, None)


def _gather_floats_fwd(transfers: tuple[Transfer, Scatter], x: jax.Array) -> tuple[jax.Array, None]:
    return _gather_floats(transfers, x), None


def _gather_floats_bwd(transfers: tuple[Transfer, Scatter], _: None, g: jax.Array) -> tuple[jax.Array]:
    return (scatter_sums(transfers[1], g, None),)


_gather_floats.defvjp(_gather_floats_fwd, _gather_floats_bwd)
