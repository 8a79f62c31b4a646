"""The codes, the scale, the zero point and the static attributes of a quantized array.

Their checks, their stored order, their text, their form as JSON, and the dequantization.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._core import checks, dtypes, entry_point, granularity
from .._kernels import affine, barriers
from .._kernels.affine import Use, dequantize_affine
from .spec import Codebook

Parts = tuple[jax.Array, jax.Array, jax.Array | None]
# The logical axes, counted from the back, in the order in which the last dimensions of the stored codes hold them; None
# if the codes are stored in their logical order.
StoredOrder = tuple[int, ...] | None
Static = tuple[Any, int | None, Codebook | None, StoredOrder]
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


def check_parts(
    function: str, argument: str, parts: tuple[Any, Any, Any], static: Static, *, is_awaited: bool
) -> Parts:
    """Check that stored codes, scale and zero point fit each other, and return them as JAX arrays.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        parts: the stored codes, the scale and the zero point, which may be None.
        static: the dtype, the block size, the codebook and the stored order of the array.
        is_awaited: whether to wait for the elements of a scale that is on an accelerator.
    """
    dtype, block_size, codebook, order = static
    if block_size is not None or codebook is not None:
        _check_static(function, argument, block_size, codebook)
    codes, scale, zero_point = parts
    is_converted = isinstance(codes, jax.Array) and isinstance(scale, jax.Array)
    if not is_converted or not (zero_point is None or isinstance(zero_point, jax.Array)):
        codes, scale, zero_point = _convert_parts(function, argument, parts)
    # Pass dtypes and shapes instead of arrays: arrays are not hashable, and the cache would keep them alive.
    zero_point_dtype, zero_point_shape = (None, None) if zero_point is None else (zero_point.dtype, zero_point.shape)
    shape = codes.shape if order is None else derive_logical_shape(function, argument, codes.shape, order)
    _check_types(
        function, argument, codes.dtype, shape, scale.dtype, scale.shape, zero_point_dtype, zero_point_shape, dtype,
        block_size, codebook,
    )  # fmt: skip
    # Accept NaN and infinity: `quantize` gives such a scale to data that contain one, and it shows in every result.
    entry_point.check_positive_scale(function, f"{argument}.scale", scale, allow_overflow=True, is_awaited=is_awaited)
    return codes, scale, zero_point


def _check_static(function: str, argument: str, block_size: Any, codebook: object) -> None:
    if block_size is not None:
        checks.check_integer(function, f"{argument}.block_size", block_size)
        checks.require(block_size > 0, function, f"{argument}.block_size", "a positive int", block_size)
    is_book = codebook is None or isinstance(codebook, Codebook)
    checks.require_type(is_book, function, f"{argument}.codebook", "a Codebook or None", codebook)


def _convert_parts(function: str, argument: str, parts: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return numpy arrays as JAX arrays; raise an error that names the first part that is not an array."""
    names = (f"{argument}.codes", f"{argument}.scale", f"{argument}.zero_point")
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, float):  # jnp.asarray would accept it, but it has no shape to compare
            checks.check_array(function, name, part, ())
    codes, scale, zero_point = entry_point.convert_arrays(function, dict(zip(names, parts, strict=True)))
    for name, part in zip(names, (codes, scale, zero_point), strict=True):
        is_missing = part is None and name == names[2]
        if not is_missing and not isinstance(part, jax.Array):
            checks.check_array(function, name, part, ())
    return codes, scale, zero_point


# The check depends on static values only, and eager calls repeat it with the same values. A call that raises is not
# cached, so its error is raised each time.
@functools.lru_cache(maxsize=4096)
def _check_types(
    function: str, argument: str, codes_dtype: np.dtype, codes_shape: tuple[int, ...], scale_dtype: np.dtype,
    scale_shape: tuple[int, ...], zero_point_dtype: np.dtype | None, zero_point_shape: tuple[int, ...] | None,
    dtype: np.dtype, block_size: int | None, codebook: Codebook | None,
) -> None:  # fmt: skip
    """Check the dtypes and the shapes of the parts; the static values other than `dtype` have been checked."""
    allowed = dtypes.QUANTIZED if codebook is None else (codebook.carrier,)
    expected = f"dtype {dtypes.list_names(tuple(allowed))}"
    checks.require_type(codes_dtype in allowed, function, f"{argument}.codes", expected, codes_dtype)
    expected = f"dtype {dtypes.list_names(_SCALES)}"
    checks.require_type(scale_dtype in _SCALES, function, f"{argument}.scale", expected, scale_dtype)
    checks.check_dtype(function, f"{argument}.dtype", dtype, dtypes.FLOATS)
    _check_aligned(function, f"{argument}.scale", scale_shape, codes_shape, block_size)
    if zero_point_shape is None:
        return
    name = f"{argument}.zero_point"
    has_zero_point = codes_dtype in dtypes.INTEGERS and codebook is None
    expected = f"None, because {codebook or codes_dtype} has no zero point"
    checks.require(has_zero_point, function, name, expected, f"an array of {zero_point_dtype}{list(zero_point_shape)}")
    expected = f"dtype {codes_dtype}, that of the codes"
    checks.require_type(zero_point_dtype == codes_dtype, function, name, expected, zero_point_dtype)
    _check_aligned(function, name, zero_point_shape, codes_shape, block_size)


def _check_aligned(
    function: str, argument: str, shape: tuple[int, ...], codes: tuple[int, ...], block_size: int | None
) -> None:
    """Check that a scale or a zero point of this shape has an entry for each of the codes."""
    if granularity.Aligned(block_size).sizes(shape, codes) is None:
        blocks = "blocks that divide it evenly" if block_size is None else f"its blocks of {block_size}"
        expected = f"the rank of the codes, {codes}, and each dimension 1, that of the codes, or the number of {blocks}"
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


def derive_logical_shape(function: str, argument: str, shape: tuple[int, ...], order: StoredOrder) -> tuple[int, ...]:
    """Return the logical shape of stored codes; raise if they have lost a dimension of the order."""
    moved = order or ()
    expected = (
        f"rank {len(moved)} or more for stored_order={order} (before jax.vmap or jax.lax.scan maps one of these axes, "
        "call q.store_last(), which returns the logical order)"
    )
    checks.require(len(shape) >= len(moved), function, f"{argument}.stored_codes", expected, f"shape {shape}")
    return tuple(shape[dimension] for dimension in match_dimensions(order, len(shape)))


def store_codes(codes: Any, order: StoredOrder) -> Any:
    """Return codes with their dimensions in the stored order, and an object that is not an array unchanged."""
    if order is None or not hasattr(codes, "ndim"):
        return codes
    derive_logical_shape("QuantizedArray", "self", tuple(codes.shape), order)  # raises if the rank is too low
    return _transpose_any(codes, derive_permutation(order, codes.ndim))


def restore_codes(stored: Any, order: StoredOrder) -> Any:
    """Return stored codes with their dimensions in the logical order; the inverse of `store_codes`."""
    if order is None or not hasattr(stored, "ndim"):
        return stored
    derive_logical_shape("QuantizedArray", "self", tuple(stored.shape), order)
    return _transpose_any(stored, match_dimensions(order, stored.ndim))


def _transpose_any(codes: Any, axes: tuple[int, ...]) -> Any:
    """Return an array of numpy, of JAX, or a `jax.ShapeDtypeStruct` with its dimensions in another order."""
    if isinstance(codes, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: lax.transpose(x, axes), codes)
    return codes.transpose(axes)


# Text, sizes and dequantization.


def describe_array(codes: Any, scale: Any, zero_point: Any, static: Static) -> str:
    """Return the dtypes and shapes of an array, without numbers; the children themselves if they are not arrays."""
    dtype, block_size, codebook, order = static
    stored = "" if order is None else f", stored_order={order}"
    # JAX prints trees of shapes, strings or None in errors, so repr must not fail on them.
    has_shapes = hasattr(codes, "dtype") and hasattr(scale, "dtype")
    has_shapes = has_shapes and (zero_point is None or hasattr(zero_point, "dtype"))
    if not has_shapes or len(codes.shape) < len(order or ()):
        name = "codes" if order is None else "stored_codes"
        return f"QuantizedArray({name}={codes!r}, scale={scale!r}, zero_point={zero_point!r}{stored})"
    shape = derive_logical_shape("QuantizedArray", "self", codes.shape, order)
    name = codes.dtype if codebook is None else codebook.name
    described = "None" if zero_point is None else describe_part(zero_point)
    blocks = f", block_size={block_size}" if block_size else ""
    text = f"{name}[{','.join(map(str, shape))}], scale={describe_part(scale)}, zero_point={described}{blocks}{stored}"
    return f"QuantizedArray({text}, dtype={dtype}, nbytes={count_all_bytes(codes, scale, zero_point)})"


def describe_part(part: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Return the dtype and the shape of an array, as in "int8[4,6]"."""
    return f"{part.dtype}[{','.join(map(str, part.shape))}]"


def count_stored_bytes(part: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the number of bytes of an array if its elements are packed without unused bits."""
    dtype = np.dtype(part.dtype)
    return -(-math.prod(part.shape) * dtypes.count_packed_bits(dtype) // 8)


def read_dtype(function: str, dtype: DTypeLike) -> np.dtype:
    """Return the dtype that `dtype` names; the functions that take the array check whether it is allowed."""
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        return checks.check_dtype(function, "dtype", dtype, dtypes.FLOATS)  # raises, and lists the allowed dtypes


def count_all_bytes(codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> int:
    """Return the number of bytes of the parts of an array; None has none."""
    return sum(count_stored_bytes(part) for part in (codes, scale, zero_point) if part is not None)


@functools.partial(jax.jit, inline=True, static_argnames=("dtype", "block_size", "codebook", "order", "use"))
def dequantize_parts(
    codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *, dtype: np.dtype, block_size: int | None,
    codebook: Codebook | None, order: StoredOrder, use: Use = "any",
) -> jax.Array:  # fmt: skip
    """Return (codes - zero_point) * scale in `dtype`, of the logical shape; the parts have been checked.

    `use` is as in `affine.dequantize_affine`.
    """
    aligned = granularity.Aligned(block_size)
    codes = restore_codes(codes, order)
    if codebook is None:
        return dequantize_affine(codes, scale, zero_point, aligned, dtype, use)
    wide = dtypes.scale_as_float32(scale)
    product = codebook.decode(codes) * aligned.expand(wide, codes)
    product = product if use == "operand" else barriers.round_result(product)
    return affine.round_to_dtype(product, dtype).astype(dtype)


# The static attributes of a quantized array as JSON, for checkpoints and exported programs.
#
# The JSON may be damaged or come from an untrusted source. Decoding it returns valid values, or raises an error that
# names the function and the argument.


_SAVED = "QuantizedArray"
# JSON allows numbers that overflow float32.
_LARGEST = float(np.finfo(np.float32).max)


def encode_static(static: Static) -> str:
    """Return a dtype, a block size, a codebook and a stored order as JSON."""
    dtype, block_size, codebook, order = static
    fields = {
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "block_size": block_size,
        "codebook": None if codebook is None else {"name": codebook.name, "levels": codebook.levels},
    }
    # The text of an array in its logical order is the same as before there were stored orders.
    return json.dumps(fields if order is None else {**fields, "stored_order": order})


def decode_saved_program(text: str | bytes | bytearray) -> Static:
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


def decode_static(function: str, argument: str, fields: Any) -> Static:
    """Return the valid dtype, block size, codebook and stored order that a JSON object describes."""
    dtype = get_field(function, argument, fields, "dtype")
    block_size = get_field(function, argument, fields, "block_size")
    # `type`, because True is an int for isinstance.
    is_size = block_size is None or (type(block_size) is int and block_size > 0)
    if not is_size:
        got = _shorten_json(block_size)
        checks.refuse(function, f"{argument}['block_size']", "null or a positive integer", got)
    return (
        None if dtype is None else decode_dtype(function, f"{argument}['dtype']", dtype, dtypes.FLOATS),
        block_size,
        _decode_codebook(function, f"{argument}['codebook']", get_field(function, argument, fields, "codebook")),
        _decode_stored_order(function, f"{argument}['stored_order']", fields.get("stored_order")),
    )


def decode_dtype(function: str, argument: str, name: object, allowed: Sequence[np.dtype]) -> np.dtype:
    """Return the allowed dtype with this name; `np.dtype(name)` would not know the names of ml_dtypes."""
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
