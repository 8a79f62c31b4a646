"""The codes, the scale and the zero point of a quantized array: their checks, sizes in bytes, and dequantization."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from .._core import barriers, checks, dtypes, entry_point, granularity, known_values, rounding, small_floats
from .._core.affine import dequantize_affine
from .codebook import Codebook

Parts = tuple[jax.Array, jax.Array, jax.Array | None]
_SCALES = (*dtypes.FLOATS, dtypes.E8M0)


def check_parts(
    function: str, argument: str, parts: tuple[Any, Any, Any], static: tuple[Any, Any, Any], *, is_awaited: bool
) -> Parts:
    """Check that codes, scale and zero point fit each other, and return them as JAX arrays.

    Args:
        function: the public function that errors name.
        argument: the argument that errors name.
        parts: the codes, the scale and the zero point, which may be None.
        static: the dtype, the block size and the codebook of the array.
        is_awaited: whether to wait for the elements of a scale that is on an accelerator.
    """
    dtype, block_size, codebook = static
    if block_size is not None or codebook is not None:
        _check_static(function, argument, block_size, codebook)
    codes, scale, zero_point = parts
    is_converted = isinstance(codes, jax.Array) and isinstance(scale, jax.Array)
    if not is_converted or not (zero_point is None or isinstance(zero_point, jax.Array)):
        codes, scale, zero_point = _convert_parts(function, argument, parts)
    # Pass dtypes and shapes instead of arrays: arrays are not hashable, and the cache would keep them alive.
    point_dtype, point_shape = (None, None) if zero_point is None else (zero_point.dtype, zero_point.shape)
    _check_types(
        function, argument, codes.dtype, codes.shape, scale.dtype, scale.shape, point_dtype, point_shape, dtype,
        block_size, codebook,
    )  # fmt: skip
    # Accept NaN and infinity: `quantize` gives such a scale to data that contain one, and it shows in every result.
    known_values.check_positive(function, f"{argument}.scale", scale, allow_overflow=True, is_awaited=is_awaited)
    return codes, scale, zero_point


def _check_static(function: str, argument: str, block_size: Any, codebook: Any) -> None:
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
    function: str, argument: str, codes_dtype: Any, codes_shape: tuple[int, ...], scale_dtype: Any,
    scale_shape: tuple[int, ...], point_dtype: Any, point_shape: tuple[int, ...] | None, dtype: Any,
    block_size: int | None, codebook: Codebook | None,
) -> None:  # fmt: skip
    """Check the dtypes and the shapes of the parts; the static values other than `dtype` have been checked."""
    allowed = dtypes.QUANTIZED if codebook is None else (codebook.carrier,)
    expected = f"dtype {dtypes.list_names(tuple(allowed))}"
    checks.require_type(codes_dtype in allowed, function, f"{argument}.codes", expected, codes_dtype)
    expected = f"dtype {dtypes.list_names(_SCALES)}"
    checks.require_type(scale_dtype in _SCALES, function, f"{argument}.scale", expected, scale_dtype)
    checks.check_dtype(function, f"{argument}.dtype", dtype, dtypes.FLOATS)
    _check_aligned(function, f"{argument}.scale", scale_shape, codes_shape, block_size)
    if point_shape is None:
        return
    name = f"{argument}.zero_point"
    has_point = codes_dtype in dtypes.INTEGERS and codebook is None
    expected = f"None, because {codebook or codes_dtype} has no zero point"
    checks.require(has_point, function, name, expected, f"an array of {point_dtype}{list(point_shape)}")
    expected = f"dtype {codes_dtype}, that of the codes"
    checks.require_type(point_dtype == codes_dtype, function, name, expected, point_dtype)
    _check_aligned(function, name, point_shape, codes_shape, block_size)


def _check_aligned(
    function: str, argument: str, shape: tuple[int, ...], codes: tuple[int, ...], block_size: int | None
) -> None:
    """Check that a scale or a zero point of this shape has an entry for each of the codes."""
    if granularity.Aligned(block_size).sizes(shape, codes) is None:
        blocks = "blocks that divide it evenly" if block_size is None else f"its blocks of {block_size}"
        expected = f"the rank of the codes, {codes}, and each dimension 1, that of the codes, or the number of {blocks}"
        checks.require(False, function, argument, expected, f"shape {shape}")


def describe_part(part: Any) -> str:
    """Return the dtype and the shape of an array, as in "int8[4,6]"."""
    return f"{part.dtype}[{','.join(map(str, part.shape))}]"


def count_stored_bytes(part: Any) -> int:
    """Return the number of bytes of an array whose elements are packed without unused bits."""
    dtype = np.dtype(part.dtype)
    return -(-math.prod(part.shape) * dtypes.find_width(dtype) // 8)


@functools.partial(jax.jit, inline=True, static_argnames=("dtype", "block_size", "codebook"))
def dequantize_parts(
    codes: jax.Array, scale: jax.Array, zero_point: jax.Array | None, *, dtype: Any, block_size: Any, codebook: Any
) -> jax.Array:
    """Return (codes - zero_point) * scale in `dtype`; the parts have been checked."""
    aligned = granularity.Aligned(block_size)
    if codebook is None:
        return dequantize_affine(codes, scale, zero_point, aligned, dtype)
    wide = small_floats.scale_as_float32(scale)
    product = barriers.round_result(codebook.decode(codes) * aligned.expand(wide, codes))
    return rounding.round_to_dtype(product, dtype).astype(dtype)
