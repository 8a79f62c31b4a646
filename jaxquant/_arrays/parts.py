"""The children and the static attributes of a quantized array.

Their checks, their order and their packing in memory, their text, their form as JSON, and the dequantization.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._core import checks, dtypes, entry_point, granularity, recording, sharding
from .._core.dtypes import NarrowInteger
from .._kernels import affine, barriers, packed_codes, words
from .._kernels.affine import Use, dequantize_affine
from .spec import Codebook

# The logical axes, counted from the back, in the order in which the last dimensions of the stored codes hold them; None
# if the codes are stored in their logical order.
StoredOrder = tuple[int, ...] | None
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)
_WORD = np.dtype(np.uint32)
# What an error expects and gets if stored words have the layout of an earlier version, in which they hold other codes.
_LAYOUTS = (
    "words in the layout of this version",
    "words in the layout of an earlier version; unpack the array in the version that stored it, and store it again",
)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How codes are stored in uint32 words.

    The words are along the last dimension of the stored codes, and each row of codes begins with a new word.

    Attributes:
        format: the dtype of the codes, of 2 or 4 bits, or a narrow integer, such as int3.
        length: the number of codes in a row, which the number of words does not imply.
    """

    format: np.dtype | NarrowInteger
    length: int

    def __reduce__(self) -> Any:
        """Return how `pickle` and `copy` rebuild the packing, without `__setstate__`."""
        return Packing, (self.format, self.length)

    def __setstate__(self, state: object) -> None:
        """Refuse a pickle of an earlier version, whose words have another layout."""
        checks.refuse("QuantizedArray", "packing", *_LAYOUTS)

    def count_words(self) -> int:
        """Return the number of words that hold a row of codes."""
        return words.count_words(self.length, self.bits)

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return dtypes.count_packed_bits(self.format)

    @property
    def carrier(self) -> np.dtype:
        """The dtype of the codes when they are unpacked: int8 or uint8 for narrow integers."""
        return self.format.carrier if isinstance(self.format, NarrowInteger) else self.format


# The formats of codes that words can hold.
PACKED = (*(dtype for dtype in dtypes.QUANTIZED if dtypes.count_packed_bits(dtype) < 8), *dtypes.NARROW)


def derive_packing(held: object, shape: Sequence[int], order: StoredOrder) -> Packing | None:
    """Return how codes of a narrow integer are packed, or None for other codes, which are not packed by themselves.

    Args:
        held: the dtype, the narrow integer or the codebook of the codes.
        shape: their logical shape. Codes of rank 0 are not packed, because there is no dimension to pack along.
        order: their stored order.
    """
    if not isinstance(held, NarrowInteger) or not shape:
        return None
    return Packing(held, shape[derive_permutation(order, len(shape))[-1]])


class ArrayParts(NamedTuple):
    """The children of a quantized array as a pytree.

    x = (codes - zero_point) * scale + offset

    Attributes:
        codes: the codes as they are stored.
        scale: an array of floats, or a quantized array itself.
        zero_point: None, or an array in the dtype of the codes or of floats.
        offset: None, an array of floats, or a quantized array itself.
        permutation: None, or an int32 array.
    """

    # JAX also builds pytrees of objects that are not arrays.
    codes: Any
    scale: Any
    zero_point: Any = None
    offset: Any = None
    permutation: Any = None


class ArrayStatic(NamedTuple):
    """The static attributes of a quantized array; see `QuantizedArray`."""

    dtype: Any
    block_size: granularity.BlockSize = None
    codebook: Codebook | None = None
    stored_order: StoredOrder = None
    packing: Packing | None = None
    signed_scale: bool = False
    permuted_axis: int | None = None
    inverse_scale: bool = False
    arithmetic: np.dtype | None = None  # None is float32


class Nested(NamedTuple):
    """The dtype and the shape of a scale or an offset that is a quantized array, and that has been checked."""

    dtype: np.dtype
    shape: tuple[int, ...]


def check_parts(
    function: str, argument: str, parts: ArrayParts, static: ArrayStatic, *, is_awaited: bool
) -> ArrayParts:
    """Check that the children of an array fit each other, and return them as JAX arrays.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        parts: the children, with `Nested` in place of parts that are quantized themselves.
        static: the static attributes of the array.
        is_awaited: whether to wait for the elements of a scale that is on an accelerator.
    """
    if static[1:] != _PLAIN:
        _check_static(function, argument, static)
    if not all(part is None or isinstance(part, jax.Array | Nested) for part in parts):
        parts = _convert_parts(function, argument, parts)
    codes, scale, zero_point, offset, permutation = parts
    if codes is None or scale is None:  # raises
        codes, scale, zero_point, offset, permutation = _convert_parts(function, argument, parts)
    assert codes is not None
    # Pass dtypes and shapes instead of arrays: arrays are not hashable, and the cache would keep them alive.
    shape = derive_logical_shape(function, argument, codes.shape, static)
    types = tuple(None if part is None else Nested(part.dtype, part.shape) for part in parts)
    _check_types(function, argument, ArrayParts(*types), shape, static)
    if not static.signed_scale:
        # Accept NaN and infinity: `quantize` gives such a scale to data that contain one, and it shows in each result.
        name = f"{argument}.scale"
        entry_point.check_positive_scale(function, name, scale, allow_overflow=True, is_awaited=is_awaited)
    if permutation is not None:
        _check_permutation(function, f"{argument}.permutation", permutation, is_awaited=is_awaited)
    if zero_point is not None:
        held = np.dtype(codes.dtype) if static.packing is None else static.packing.carrier
        zero_point = _hold_zero_point(function, f"{argument}.zero_point", zero_point, held, static, is_awaited)
    return ArrayParts(codes, scale, zero_point, offset, permutation)


def _hold_zero_point(
    function: str, argument: str, zero_point: jax.Array, held: np.dtype, static: ArrayStatic, is_awaited: bool
) -> jax.Array:
    """Return a zero point in the dtype of the codes, or in 8 bits if they are packed; raise if it is known not to fit.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        zero_point: in the dtype of the codes, in 8 bits, or a float, which is returned as it is.
        held: the dtype of the codes, unpacked.
        static: the static attributes of the array.
        is_awaited: whether to wait for the elements of an array that is on an accelerator.
    """
    if zero_point.dtype in dtypes.FLOATS or dtypes.count_packed_bits(held) >= 8:
        return zero_point
    if zero_point.dtype != held:
        known, (low, high) = entry_point.read_elements(zero_point, is_awaited=is_awaited), dtypes.read_bounds(held)
        fits = known is None or not known.size or (int(known.min()) >= low and int(known.max()) <= high)
        checks.require(fits, function, argument, f"codes of {held}, from {low} to {high}", "others")
    dtype = held if static.packing is None else widen_zero_point(held)
    return zero_point if zero_point.dtype == dtype else zero_point.astype(dtype)


_PLAIN = ArrayStatic(None)[1:]


def _check_static(function: str, argument: str, static: ArrayStatic) -> None:
    sizes = static.block_size if isinstance(static.block_size, tuple) else (static.block_size,)
    for size in sizes if static.block_size is not None else ():
        checks.check_integer(function, f"{argument}.block_size", size)
        checks.require(size > 0, function, f"{argument}.block_size", "a positive int", size)  # pyright: ignore
    book = static.codebook
    is_book = book is None or isinstance(book, Codebook)
    checks.require_type(is_book, function, f"{argument}.codebook", "a Codebook or None", book)
    packing = static.packing
    if packing is not None:
        _check_packing_types(function, f"{argument}.packing", packing)
    checks.check_flag(function, f"{argument}.signed_scale", static.signed_scale)
    checks.check_flag(function, f"{argument}.inverse_scale", static.inverse_scale)
    if static.arithmetic is not None:
        checks.check_dtype(function, f"{argument}.arithmetic", static.arithmetic, dtypes.FLOATS)
    if static.permuted_axis is not None:
        checks.check_integer(function, f"{argument}.permuted_axis", static.permuted_axis)


def _check_packing_types(function: str, argument: str, packing: object) -> None:
    if not isinstance(packing, Packing):
        checks.refuse_type(function, argument, "a Packing or None", checks.describe_value(packing))
    expected = dtypes.list_names(PACKED)
    checks.require_type(packing.format in PACKED, function, f"{argument}.format", expected, packing.format)
    checks.check_integer(function, f"{argument}.length", packing.length)
    checks.require(packing.length >= 0, function, f"{argument}.length", "a length of 0 or more", packing.length)


_NAMES = ArrayParts._fields


def _convert_parts(function: str, argument: str, parts: ArrayParts) -> ArrayParts:
    """Return numpy arrays as JAX arrays; raise an error that names the first part that is not an array."""
    given = {f"{argument}.{name}": part for name, part in zip(_NAMES, parts, strict=True)}
    for name, part in given.items():
        if isinstance(part, float):  # jnp.asarray would accept it, but it has no shape to compare
            checks.check_array(function, name, part, ())
    arrays = {name: part for name, part in given.items() if not isinstance(part, Nested)}
    given |= dict(zip(arrays, entry_point.convert_arrays(function, arrays), strict=True))
    for (name, part), field in zip(given.items(), _NAMES, strict=True):
        is_missing = part is None and field not in ("codes", "scale")
        if not is_missing and not isinstance(part, jax.Array | Nested):
            checks.check_array(function, name, part, ())
    return ArrayParts(*given.values())


# The check depends on static values only, and eager calls repeat it with the same values. A call that raises is not
# cached, so its error is raised each time.
@functools.lru_cache(maxsize=4096)
def _check_types(function: str, argument: str, types: ArrayParts, shape: tuple[int, ...], static: ArrayStatic) -> None:
    """Check the dtypes and the shapes of the parts; the static values other than `dtype` have been checked.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        types: the dtype and the shape of each child, or None.
        shape: the logical shape of the codes.
        static: the static attributes.
    """
    codes, scale, zero_point, offset, permutation = types
    codes_dtype = _check_packing(function, argument, codes, static)
    codebook, block_size = static.codebook, static.block_size
    allowed = dtypes.QUANTIZED if codebook is None else (codebook.carrier,)
    expected = f"dtype {dtypes.list_names(tuple(allowed))}"
    checks.require_type(codes_dtype in allowed, function, f"{argument}.codes", expected, codes_dtype)
    expected = f"dtype {dtypes.list_names(_SCALES)}"
    checks.require_type(scale.dtype in _SCALES, function, f"{argument}.scale", expected, scale.dtype)
    checks.check_dtype(function, f"{argument}.dtype", static.dtype, dtypes.FLOATS)
    _check_aligned(function, f"{argument}.scale", scale.shape, shape, block_size)
    has_zero_point = codes_dtype in dtypes.INTEGERS and codebook is None
    if zero_point is not None:
        name = f"{argument}.zero_point"
        expected = f"None, because {codebook or codes_dtype} has no zero point"
        checks.require(has_zero_point, function, name, expected, f"an array of {describe_part(zero_point)}")
        wide = widen_zero_point(codes_dtype) if dtypes.count_packed_bits(codes_dtype) < 8 else codes_dtype
        text = "" if wide == codes_dtype else f" {wide},"
        expected = f"dtype {codes_dtype}, the dtype of the codes,{text} or {dtypes.list_names(dtypes.FLOATS)}"
        is_known = zero_point.dtype in (codes_dtype, wide, *dtypes.FLOATS)
        checks.require_type(is_known, function, name, expected, zero_point.dtype)
        _check_aligned(function, name, zero_point.shape, shape, block_size)
    if offset is not None:
        name = f"{argument}.offset"
        expected = "None, because the array has a zero point"
        checks.require(zero_point is None, function, name, expected, f"an array of {describe_part(offset)}")
        expected = f"None, because {codes_dtype} has no offset"
        is_float = codes_dtype in dtypes.SMALL_FLOATS
        checks.require(not is_float, function, name, expected, f"an array of {describe_part(offset)}")
        expected = f"dtype {dtypes.list_names(dtypes.FLOATS)}"
        checks.require_type(offset.dtype in dtypes.FLOATS, function, name, expected, offset.dtype)
        _check_aligned(function, name, offset.shape, shape, block_size)
    axis, name = static.permuted_axis, f"{argument}.permutation"
    if axis is None or permutation is None:
        expected = "an array, because there is a permuted_axis" if axis is not None else "None without a permuted_axis"
        checks.require(axis is None and permutation is None, function, name, expected, permutation)
        return
    expected = f"an axis from -1 to -{len(shape)}"
    checks.require(-len(shape) <= axis < 0, function, f"{argument}.permuted_axis", expected, axis)
    checks.require_type(permutation.dtype == np.int32, function, name, "dtype int32", permutation.dtype)
    batch, place = permutation.shape[:-1], len(shape) + axis
    fits = permutation.shape[-1:] == (shape[axis],) and len(batch) <= place
    fits = fits and all(n in (1, length) for n, length in zip(batch, shape, strict=False))
    expected = f"shape ({shape[axis]},), or in front of it some of the dimensions {shape[:place]}"
    checks.require(fits, function, name, expected, f"shape {permutation.shape}")


def _check_packing(function: str, argument: str, codes: Nested, static: ArrayStatic) -> np.dtype:
    """Return the dtype of the codes, unpacked; raise unless words hold as many codes as they shall."""
    packing = static.packing
    if packing is None:
        return codes.dtype
    name = f"{argument}.stored_codes"
    checks.require_type(codes.dtype == _WORD, function, name, "dtype uint32, because the codes are packed", codes.dtype)
    expected = f"rows of {packing.count_words()} words, which {packing.length} codes of {packing.format} take"
    checks.require(codes.shape[-1] == packing.count_words(), function, name, expected, f"shape {codes.shape}")
    return packing.carrier


def widen_zero_point(dtype: np.dtype) -> np.dtype:
    """Return the dtype of zero points of packed codes: 8 bits, because XLA:CPU reads no narrower ones in place."""
    return np.dtype(jnp.int8 if dtypes.read_bounds(dtype)[0] < 0 else jnp.uint8)


def narrow_zero_point(zero_point: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a zero point of packed codes in the dtype that the codes have unpacked, or as it is if it is a float."""
    return zero_point.astype(dtype) if zero_point.dtype in dtypes.INTEGERS else zero_point


def _check_permutation(function: str, argument: str, permutation: object, *, is_awaited: bool) -> None:
    """Raise if a known permutation does not hold each index once."""
    known = entry_point.read_elements(permutation, is_awaited=is_awaited)
    if known is None:
        return
    is_permutation = bool((np.sort(known, axis=-1) == np.arange(known.shape[-1])).all())
    expected = f"each of the indices 0 to {known.shape[-1] - 1} once"
    checks.require(is_permutation, function, argument, expected, "others")


def _check_aligned(
    function: str, argument: str, shape: tuple[int, ...], codes: tuple[int, ...], block_size: granularity.BlockSize
) -> None:
    """Check that a scale, a zero point or an offset of this shape has an entry for each of the codes."""
    if granularity.Aligned(block_size).sizes(shape, codes) is None:
        blocks = "blocks that divide it evenly" if block_size is None else f"its blocks of {block_size}"
        expected = f"the rank of the codes, {codes}, and each dimension 1, the codes' length, or the number of {blocks}"
        checks.refuse(function, argument, expected, f"shape {shape}")


# The order in which the codes are stored.


def read_stored_order(function: str, order: Any) -> StoredOrder:
    """Return a stored order in its shortest form; raise unless it is None or orders the last axes."""
    if order is None:
        return None
    expected = "None, or the axes -1 to -n in any order"
    is_sequence = isinstance(order, tuple | list)
    checks.require_type(is_sequence, function, "stored_order", expected, checks.describe_value(order))
    for axis in order:
        checks.check_integer(function, "stored_order", axis)
    axes = tuple(int(axis) for axis in order)
    is_order = sorted(axes) == list(range(-len(axes), 0))
    checks.require(is_order, function, "stored_order", expected, axes)
    return _shorten_order(axes)


def _shorten_order(axes: Sequence[int]) -> StoredOrder:
    """Return a stored order without the first axes that have not moved, so that equal orders compare equal."""
    start = 0
    while start < len(axes) and axes[start] == start - len(axes):
        start += 1
    return tuple(axes[start:]) or None


def move_axes_last(function: str, argument: str, axes: Any, rank: int) -> StoredOrder:
    """Return the stored order of codes of a rank that holds the given axes last and keeps the order of the others.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        axes: an int or several, counted from the front or from the back.
        rank: the rank of the codes.
    """
    checked = [checks.check_axis(function, axis, rank, argument) for axis in axes]
    checks.require(len(set(checked)) == len(checked), function, argument, "distinct axes", tuple(axes))
    order = [*(axis for axis in range(rank) if axis not in checked), *checked]
    return _shorten_order([axis - rank for axis in order])


def derive_permutation(order: StoredOrder, rank: int) -> tuple[int, ...]:
    """Return the logical axis that each dimension of the stored codes holds."""
    moved = order or ()
    return (*range(rank - len(moved)), *(axis + rank for axis in moved))


def match_dimensions(order: StoredOrder, rank: int) -> tuple[int, ...]:
    """Return the dimension of the stored codes that holds each logical axis."""
    permutation = derive_permutation(order, rank)
    return tuple(permutation.index(axis) for axis in range(rank))


def derive_transposed_order(order: StoredOrder, axes: Sequence[int]) -> StoredOrder:
    """Return the stored order with which stored codes represent their array with its axes transposed."""
    rank = len(axes)
    return _shorten_order([tuple(axes).index(axis) - rank for axis in derive_permutation(order, rank)])


def derive_logical_shape(function: str, argument: str, shape: tuple[int, ...], static: ArrayStatic) -> tuple[int, ...]:
    """Return the logical shape of stored codes; raise if they have lost a dimension of the order or of the packing."""
    order, packing = static.stored_order, static.packing
    if order is None and packing is None:
        return shape
    moved = max(len(order or ()), 1)
    reason = f"stored_order={order}" if order else f"packing={packing}"
    expected = (
        f"rank {moved} or more for {reason} (before jax.vmap or jax.lax.scan maps one of these axes, "
        "call q.store_last(), which returns the logical order)"
    )
    checks.require(len(shape) >= moved, function, f"{argument}.stored_codes", expected, f"shape {shape}")
    if packing is not None:
        shape = (*shape[:-1], packing.length)
    return tuple(shape[dimension] for dimension in match_dimensions(order, len(shape)))


def store_codes(codes: Any, order: StoredOrder, packing: Packing | None = None) -> Any:
    """Return codes as they are stored, and an object that is not an array unchanged."""
    if not hasattr(codes, "ndim") or (order is None and packing is None):
        return codes
    static = ArrayStatic(None, stored_order=order)
    derive_logical_shape("QuantizedArray", "self", tuple(codes.shape), static)  # raises if the rank is too low
    stored = codes if order is None else _transpose_any(codes, derive_permutation(order, codes.ndim))
    return stored if packing is None else pack_codes(stored, packing)


def restore_codes(stored: Any, order: StoredOrder, packing: Packing | None = None) -> Any:
    """Return stored codes unpacked and in the logical order; the inverse of `store_codes`."""
    if not hasattr(stored, "ndim") or (order is None and packing is None):
        return stored
    static = ArrayStatic(None, stored_order=order, packing=packing)
    derive_logical_shape("QuantizedArray", "self", tuple(stored.shape), static)
    codes = stored if packing is None else unpack_codes(stored, packing)
    return codes if order is None else _transpose_any(codes, match_dimensions(order, codes.ndim))


def pack_codes(codes: Any, packing: Packing) -> Any:
    """Return the words that hold codes along their last dimension; of an array, or of a `jax.ShapeDtypeStruct`."""
    _check_packing_types("QuantizedArray", "packing", packing)
    expected = f"{packing.length} codes along the stored dimension that comes last"
    checks.require(codes.shape[-1] == packing.length, "QuantizedArray", "packing", expected, f"shape {codes.shape}")
    expected = f"dtype {packing.carrier}, which holds {packing.format}"
    checks.require_type(codes.dtype == packing.carrier, "QuantizedArray", "codes", expected, codes.dtype)
    if isinstance(codes, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(_pack, packing=packing), codes)
    return _pack(jnp.asarray(codes), packing=packing)


def unpack_codes(stored: Any, packing: Packing) -> Any:
    """Return the codes that words hold along their last dimension."""
    if isinstance(stored, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(_unpack, packing=packing), stored)
    return _unpack(jnp.asarray(stored), packing=packing)


@functools.partial(jax.jit, inline=True, static_argnames="packing")
def _pack(codes: jax.Array, *, packing: Packing) -> jax.Array:
    if codes.dtype in dtypes.FLOAT4:
        codes = lax.bitcast_convert_type(codes, jnp.uint4)
    # A device must have all codes of a row, because the codes of a word are not neighbors.
    codes = sharding.gather_axes(codes, (codes.ndim - 1,))
    wide = jnp.int8 if dtypes.is_integer(codes.dtype) and dtypes.read_bounds(codes.dtype)[0] < 0 else jnp.uint8
    return words.pack_words(codes.astype(wide), packing.bits)


@functools.partial(jax.jit, inline=True, static_argnames="packing")
def _unpack(stored: jax.Array, *, packing: Packing) -> jax.Array:
    held, stored = packing.format, sharding.gather_axes(stored, (stored.ndim - 1,))
    if isinstance(held, NarrowInteger):
        return words.unpack_words(stored, packing.bits, packing.length, signed=held.signed)
    is_float = held in dtypes.FLOAT4
    # The bits are the same in int8, which `narrow_codes` takes.
    codes = words.unpack_words(stored, packing.bits, packing.length, signed=not is_float)
    narrow = packed_codes.narrow_codes(codes.astype(jnp.int8), np.dtype(jnp.uint4) if is_float else held)
    return lax.bitcast_convert_type(narrow, held) if is_float else narrow


def _transpose_any(codes: Any, axes: tuple[int, ...]) -> Any:
    """Return an array of numpy, of JAX, or a `jax.ShapeDtypeStruct` with its dimensions in another order."""
    if isinstance(codes, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: lax.transpose(x, axes), codes)
    return codes.transpose(axes)


# Text, sizes and dequantization.


def describe_array(parts: ArrayParts, static: ArrayStatic, children: ArrayParts) -> str:
    """Return the dtypes and shapes of an array, without numbers; the children themselves if they are not arrays.

    Args:
        parts: the children, with `Nested` in place of parts that are quantized themselves.
        static: the static attributes.
        children: the children, whose bytes are counted.
    """
    codes, scale, zero_point, offset, permutation = parts
    order = static.stored_order
    stored = "" if order is None else f", stored_order={order}"
    # JAX prints trees of shapes, strings or None in errors, so repr must not fail on them.
    has_shapes = hasattr(codes, "dtype") and hasattr(scale, "dtype")
    has_shapes = has_shapes and all(part is None or hasattr(part, "dtype") for part in parts)
    least_rank = max(len(order or ()), static.packing is not None)
    if not has_shapes or len(codes.shape) < least_rank:
        name = "codes" if order is None and static.packing is None else "stored_codes"
        more = {"offset": offset, "permutation": permutation}
        rest = "".join(f", {field}={part!r}" for field, part in more.items() if part is not None)
        return f"QuantizedArray({name}={codes!r}, scale={scale!r}, zero_point={zero_point!r}{rest}{stored})"
    shape = derive_logical_shape("QuantizedArray", "self", codes.shape, static)
    name = static.codebook.name if static.codebook else static.packing.format if static.packing else codes.dtype
    described = "None" if zero_point is None else describe_part(zero_point)
    blocks = f", block_size={static.block_size}" if static.block_size else ""
    text = f"{name}[{','.join(map(str, shape))}], scale={describe_part(scale)}, zero_point={described}{blocks}{stored}"
    if offset is not None:
        text += f", offset={describe_part(offset)}"
    if permutation is not None:
        text += f", permutation={describe_part(permutation)}, permuted_axis={static.permuted_axis}"
    text += ", packed" if static.packing else ""
    text += ", signed_scale=True" if static.signed_scale else ""
    text += ", inverse_scale=True" if static.inverse_scale else ""
    text += f", arithmetic={static.arithmetic}" if static.arithmetic else ""
    return f"QuantizedArray({text}, dtype={static.dtype}, nbytes={count_all_bytes(children)})"


def describe_part(part: jax.Array | jax.ShapeDtypeStruct | Nested) -> str:
    """Return the dtype and the shape of an array, as in "int8[4,6]"."""
    return f"{part.dtype}[{','.join(map(str, part.shape))}]"


def count_stored_bytes(part: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the number of bytes of an array if its elements are packed without unused bits."""
    dtype = np.dtype(part.dtype)
    return -(-math.prod(part.shape) * dtypes.count_packed_bits(dtype) // 8)


def read_dtype(function: str, argument: str, dtype: DTypeLike) -> np.dtype:
    """Return the dtype that an argument names; the functions that take the array check whether it is allowed."""
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        return checks.check_dtype(function, argument, dtype, dtypes.FLOATS)  # raises, and lists the allowed dtypes


def count_all_bytes(parts: ArrayParts) -> int:
    """Return the number of bytes of all arrays among the parts."""
    return sum(count_stored_bytes(leaf) for leaf in jax.tree.leaves(parts))


@functools.partial(jax.jit, inline=True, static_argnames=("static", "use"))
def dequantize_parts(parts: ArrayParts, *, static: ArrayStatic, use: Use = "any") -> jax.Array:
    """Return (codes - zero_point) * scale + offset in `static.dtype`, of the logical shape, for checked parts.

    Each operation is rounded to float32, or to the dtype of `static.arithmetic`, and the result to the dtype. `use` is
    as in `affine.dequantize_affine`.

    Args:
        parts: the children, with arrays of floats in place of a scale and an offset that are quantized themselves.
        static: ArrayStatic. The attributes of the array.
        use: ArrayStatic. What reads the values.
    """
    stored, scale, zero_point, offset, permutation = parts
    aligned, dtype = granularity.Aligned(static.block_size), static.dtype
    codes = restore_codes(stored, static.stored_order, static.packing)
    # The product that an offset is added to must be rounded before, whatever reads the sum.
    use_of_product, product_dtype = (use, dtype) if offset is None else ("any", dtypes.FLOAT32)
    arithmetic = static.arithmetic or dtypes.FLOAT32

    def expand(part: jax.Array) -> jax.Array:
        return aligned.expand(affine.round_to_dtype(dtypes.scale_as_float32(part), arithmetic), codes)

    def finish(result: jax.Array, use: Use) -> jax.Array:
        return affine.round_to_dtype(result if use == "operand" else barriers.round_result(result), arithmetic)

    is_real = zero_point is not None and zero_point.dtype in dtypes.FLOATS
    is_plain = not (is_real or static.inverse_scale or static.arithmetic)
    if static.codebook is None and is_plain:
        values = dequantize_affine(codes, scale, zero_point, aligned, product_dtype, use_of_product)
    else:
        if static.codebook is not None and is_plain:
            product = _scale_levels(codes, scale, static.codebook, aligned)
        else:
            if static.codebook is not None:
                steps = static.codebook.decode(codes)
            else:
                steps = affine.decode_steps(codes, None if is_real else zero_point, aligned)
            steps = affine.round_to_dtype(steps, arithmetic)
            if zero_point is not None and is_real:
                steps = finish(steps - expand(zero_point), "any")
            wide = expand(scale)
            product = affine.divide_steps(steps, wide) if static.inverse_scale else steps * wide
        product = finish(product, use_of_product)
        values = affine.round_to_dtype(product, product_dtype).astype(product_dtype)
    if offset is not None:
        total = values + expand(offset) if static.arithmetic else _add_offset(values, offset, aligned)
        total = finish(total, use)
        values = affine.round_to_dtype(total, dtype).astype(dtype)
    if permutation is None:
        return values
    assert static.permuted_axis is not None
    return restore_permuted(values, permutation, static.permuted_axis)


@recording.mark("scale_levels", lambda codes, **_: (codes.shape, jnp.float32))
def _scale_levels(
    codes: jax.Array, scale: jax.Array, codebook: Codebook, aligned: granularity.Aligned
) -> jax.Array:  # fmt: skip
    """Return the levels of codes times their scales, float32."""
    return codebook.decode(codes) * aligned.expand(dtypes.scale_as_float32(scale), codes)


@recording.mark("add_offset", lambda values, **_: (values.shape, jnp.float32))
def _add_offset(values: jax.Array, offset: jax.Array, aligned: granularity.Aligned) -> jax.Array:
    """Return float32 values plus an offset of any granularity."""
    return values + aligned.expand(dtypes.scale_as_float32(offset), values)


def restore_permuted(values: jax.Array, permutation: jax.Array, axis: int) -> jax.Array:
    """Return values with those at the index j of an axis moved to the index permutation[j].

    Args:
        values: an array.
        permutation: int32, [K], or [..., K] with some of the first dimensions of the values.
        axis: ArrayStatic. The permuted axis, negative.
    """
    permutation = sharding.gather_axes(permutation, (permutation.ndim - 1,))  # JAX does not sort along a sharded axis
    return _gather_values(values, jnp.argsort(permutation, axis=-1), axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gather_values(values: jax.Array, positions: jax.Array, axis: int) -> jax.Array:
    # Where the axis is split over devices, XLA adds what each of them finds: as floats, -0.0 + 0.0 would be 0.0.
    bits = lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}")
    return lax.bitcast_convert_type(_gather_along(bits, positions, axis), values.dtype)


@_gather_values.defjvp
def _gather_tangents(axis: int, primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    values, positions = primals
    return _gather_values(values, positions, axis), _gather_along(tangents[0], positions, axis)


def _gather_along(values: jax.Array, positions: jax.Array, axis: int) -> jax.Array:
    # With explicit mesh axes, JAX does not gather along an axis that is sharded. The result is sharded as it was.
    whole = sharding.gather_axes(values, (values.ndim + axis,))
    return sharding.place_like(_gather_whole(whole, positions, axis), values)


def _gather_whole(values: jax.Array, positions: jax.Array, axis: int) -> jax.Array:
    if positions.ndim == 1:
        return jnp.take(values, positions, axis, mode="clip")
    between = values.ndim + axis - (positions.ndim - 1)
    shape = (*positions.shape[:-1], *(1,) * between, positions.shape[-1], *(1,) * (-axis - 1))
    return jnp.take_along_axis(values, positions.reshape(shape), axis)


# The static attributes of a quantized array as JSON, for checkpoints and exported programs.
#
# The JSON may be damaged or come from an untrusted source. Decoding it returns valid values, or raises an error that
# names the function and the argument.


_SAVED = "QuantizedArray"
# JSON allows numbers that overflow float32.
_LARGEST = float(np.finfo(np.float32).max)


def encode_static(static: ArrayStatic) -> str:
    """Return the static attributes as JSON."""
    dtype, block_size, codebook, order, packing, signed_scale, permuted_axis, inverse_scale, arithmetic = static
    fields = {
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "block_size": block_size,
        "codebook": None if codebook is None else {"name": codebook.name, "levels": codebook.levels},
    }
    # The text of an array without one of these is the same as before they existed.
    later: dict[str, Any] = {
        "stored_order": order,
        # Another layout of words takes another name, so that a reader of one layout refuses words in the other.
        "words": None if packing is None else {"format": packing.format.name, "length": packing.length},
        "signed_scale": signed_scale or None,
        "permuted_axis": permuted_axis,
        "inverse_scale": inverse_scale or None,
        "arithmetic": None if arithmetic is None else np.dtype(arithmetic).name,
    }
    return json.dumps(fields | {name: value for name, value in later.items() if value is not None})


def decode_saved_program(text: str | bytes | bytearray) -> ArrayStatic:
    """Return the static attributes in a program that `jax.export` saved, as `encode_static` encoded them."""
    argument = "the description in a saved program"
    return decode_static(_SAVED, argument, parse_json(_SAVED, argument, text))


def parse_json(function: str, argument: str, text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text; raise ContractValueError if it is invalid or an object repeats a key."""
    try:
        # A second value for a key would silently replace the first one.
        return json.loads(text, object_pairs_hook=_collect_unique)
    except (ValueError, RecursionError) as error:
        got = "JSON that is nested too deeply" if isinstance(error, RecursionError) else str(error)
        text = checks.format_message(function, argument, "JSON", got)
    raise checks.ContractValueError(text)


def _collect_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"one of the keys {', '.join(name for name, _ in pairs)} twice")
    return fields


def get_field(function: str, argument: str, fields: object, name: str) -> Any:
    """Return a field of a JSON object; raise ContractValueError if there is no such field."""
    if not isinstance(fields, dict):
        checks.refuse(function, argument, f"an object with the key {name!r}", _shorten_json(fields))
    if name not in fields:
        got = ", ".join(map(repr, fields)) or "an empty object"
        checks.refuse(function, argument, f"an object with the key {name!r}", got)
    return fields[name]


def decode_static(function: str, argument: str, fields: Any) -> ArrayStatic:
    """Return the valid static attributes that a JSON object describes."""
    dtype = get_field(function, argument, fields, "dtype")
    block_size = get_field(function, argument, fields, "block_size")
    sizes = block_size if isinstance(block_size, list) and block_size else [block_size]
    # `type`, because True is an int for isinstance.
    is_size = block_size is None or all(type(size) is int and size > 0 for size in sizes)
    if not is_size:
        got = _shorten_json(block_size)
        expected = "null, a positive integer, or a list of them"
        checks.refuse(function, f"{argument}['block_size']", expected, got)
    axis, flags = fields.get("permuted_axis"), {n: fields.get(n, False) for n in ("signed_scale", "inverse_scale")}
    for name, flag in flags.items():
        if type(flag) is not bool:
            checks.refuse(function, f"{argument}['{name}']", "true or false", _shorten_json(flag))
    arithmetic = fields.get("arithmetic")
    if fields.get("packing") is not None:
        checks.refuse(function, f"{argument}['packing']", *_LAYOUTS)
    if arithmetic is not None:
        arithmetic = decode_dtype(function, f"{argument}['arithmetic']", arithmetic, dtypes.FLOATS)
    if axis is not None and not (type(axis) is int and axis < 0):
        checks.refuse(function, f"{argument}['permuted_axis']", "null or a negative integer", _shorten_json(axis))
    return ArrayStatic(
        None if dtype is None else decode_dtype(function, f"{argument}['dtype']", dtype, dtypes.FLOATS),
        granularity.shorten_block_size(tuple(block_size) if isinstance(block_size, list) else block_size),
        _decode_codebook(function, f"{argument}['codebook']", get_field(function, argument, fields, "codebook")),
        _decode_stored_order(function, f"{argument}['stored_order']", fields.get("stored_order")),
        _decode_packing(function, f"{argument}['words']", fields.get("words")),
        flags["signed_scale"],
        axis,
        flags["inverse_scale"],
        None if arithmetic == dtypes.FLOAT32 else arithmetic,
    )


def _decode_packing(function: str, argument: str, fields: object) -> Packing | None:
    """Return the valid packing that a JSON value describes, or None for null."""
    if fields is None:
        return None
    name, length = (get_field(function, argument, fields, field) for field in ("format", "length"))
    if not (type(length) is int and 0 <= length < 2**31):
        checks.refuse(function, f"{argument}['length']", "a length", _shorten_json(length))
    return Packing(decode_dtype(function, f"{argument}['format']", name, PACKED), length)


def decode_dtype(function: str, argument: str, name: object, allowed: Sequence[Any]) -> Any:
    """Return the allowed dtype, or narrow integer, with this name; `np.dtype` does not know the names of ml_dtypes."""
    for dtype in allowed:
        if dtype.name == name:
            return dtype
    expected = f"the name of a dtype: {dtypes.list_names(tuple(allowed))}"
    raise checks.ContractValueError(checks.format_message(function, argument, expected, _shorten_json(name)))


def decode_shape(function: str, argument: str, shape: Any) -> tuple[int, ...]:
    """Return a shape, after checking that an array can have it."""
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(type(n) is int and n >= 0 for n in shape)
    # Count a length of 0 as 1, so that it does not hide an overflow of the other lengths.
    if not is_shape or math.prod(max(n, 1) for n in shape) >= 2**63:
        expected = "a list of at most 64 lengths whose product fits in an int64"
        checks.refuse(function, argument, expected, _shorten_json(shape))
    return tuple(shape)


def _decode_codebook(function: str, argument: str, fields: object) -> Codebook | None:
    """Return the valid codebook that a JSON value describes, or None for null."""
    if fields is None:
        return None
    name, levels = (get_field(function, argument, fields, field) for field in ("name", "levels"))
    if not isinstance(name, str):
        checks.refuse(function, f"{argument}['name']", "a string", _shorten_json(name))
    # The constructor of Codebook is less strict, and its errors would not name the key in the file. The types are
    # compared first, because abs of a string would raise a plain TypeError.
    is_table = isinstance(levels, list) and len(levels) in (4, 8, 16, 256)
    is_table = is_table and all(type(level) in (int, float) and abs(level) <= _LARGEST for level in levels)
    if not is_table:
        expected = "4, 8, 16 or 256 float32 numbers"
        checks.refuse(function, f"{argument}['levels']", expected, _shorten_json(levels))
    try:
        return Codebook(name, tuple(levels))
    except checks.ContractValueError as error:  # all levels are equal in float32
        raise checks.ContractValueError(checks.format_message(function, argument, "a codebook", error)) from error


def _decode_stored_order(function: str, argument: str, order: Any) -> StoredOrder:
    """Return the valid stored order that a JSON value describes; null or a missing field means None."""
    # `type`, because True is an int for isinstance.
    is_order = order is None or (isinstance(order, list) and all(type(axis) is int for axis in order))
    if not is_order or (order and sorted(order) != list(range(-len(order), 0))):
        expected = "null, or a list of the axes -1 to -n in any order"
        checks.refuse(function, argument, expected, _shorten_json(order))
    return read_stored_order(function, order)


def _shorten_json(value: object) -> str:
    """Return a value as JSON, shortened to 80 characters."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # an int with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
