"""ONNX Runtime's GatherBlockQuantized: entries of a table of 2, 4 or 8 bits in blocks, as floats."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core import checks, dtypes, recording
from .._core.entry_point import compile_entry_point
from .._core.granularity import Blocked, PerAxis
from .._kernels import affine

_NAME = "ops.gather_block_quantized"
_UINT8, _INT4, _UINT4 = (np.dtype(dtype) for dtype in (jnp.uint8, jnp.int4, jnp.uint4))
_INDICES = (np.dtype(np.int32), np.dtype(np.int64))


def gather_block_quantized(
    data: ArrayLike,
    indices: ArrayLike,
    scales: ArrayLike,
    zero_points: ArrayLike | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    quantize_axis: int = 1,
    gather_axis: int = 0,
) -> jax.Array:
    """Look up entries of a quantized table and dequantize them, as ONNX Runtime's GatherBlockQuantized does.

    y = take((data - zero_points) * scales, indices, gather_axis), where a block of `block_size` codes along
    `quantize_axis` shares a scale and a zero point. Only the entries that are looked up are dequantized.

    The product is rounded to float32 and then to the dtype of `scales`. An index out of range gives zeros.

    Args:
        data: the codes: int4 or uint4 of any rank; or uint8 of rank 2 or more, whose bytes hold 8 / bits codes along
            the last dimension, the first code in the lowest bits.
        indices: int32 or int64, of any shape; a negative one counts from the end.
        scales: value per step, float32, float16 or bfloat16, in the shape of the codes with ceil(length / block_size)
            in place of the length of `quantize_axis`.
        zero_points: the codes of 0.0, in the dtype of `data` and the shape of `scales`; uint8 zero points are packed
            along the last dimension as `data` is. None means 0, and 2**(bits - 1) for uint8.
        bits: Static. The width of a code of uint8: 2, 4 or 8. It is 4 for the other dtypes.
        block_size: Static. How many codes share a scale: a power of two, 16 or more.
        quantize_axis: Static. The dimension that is cut into blocks; the last one for uint8.
        gather_axis: Static. The dimension along which entries are looked up; 0 for uint8.

    Returns:
        The shape of the codes with the shape of `indices` in place of `gather_axis`, in the dtype of `scales`.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: shapes, axes, bits and block_size do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> table = jnp.full((3, 8), 0x1F, jnp.uint8).at[2].set(0x97)  # 15, 1, 15, 1, ...; the zero point is 8
        >>> scales = jnp.array([[1.0], [0.5], [2.0]])
        >>> jq.ops.gather_block_quantized(table, jnp.array([1, -1]), scales, block_size=16)[:, :3]
        Array([[ 3.5, -3.5,  3.5],
               [-2. ,  2. , -2. ]], dtype=float32)

    Source: ONNX Runtime's com.microsoft GatherBlockQuantized-1, for tables of integers.
    """
    statics = {"bits": bits, "block_size": block_size, "quantize_axis": quantize_axis, "gather_axis": gather_axis}
    # Check before jit, whose cache of compiled programs cannot tell True, 1 and 1.0 apart.
    for name, value in statics.items():
        checks.check_integer(_NAME, name, value)
    return _gather_block_quantized(data, indices, scales, zero_points, **statics)


class _Table(NamedTuple):
    """The layout of a table: how many codes a byte holds, and its axes, which are not negative."""

    count: int
    block_size: int
    quantize_axis: int
    gather_axis: int


def _infer_result(
    data: jax.Array, indices: jax.Array, scales: jax.Array, bits: int, gather_axis: int, **_: object
) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the dtype of the result."""
    count = 8 // bits if data.dtype == _UINT8 else 1
    shape = (*data.shape[:-1], data.shape[-1] * count)
    return (*shape[:gather_axis], *indices.shape, *shape[gather_axis + 1 :]), scales.dtype


def _batch_lookups(
    mapped: dict[str, bool], data: jax.Array, indices: jax.Array, gather_axis: int, **rest: object
) -> jax.Array | None:
    # An exporter writes the same operator for mapped indices. Mapped tables would be several operators.
    if any(mapped[name] for name in mapped if name != "indices"):
        return None
    y = _look_up(data, indices, gather_axis=gather_axis, **rest)
    return jnp.moveaxis(y, gather_axis, 0)


@compile_entry_point(_NAME)
def _gather_block_quantized(
    data: jax.Array, indices: jax.Array, scales: jax.Array, zero_points: jax.Array | None, *,
    bits: int, block_size: int, quantize_axis: int, gather_axis: int,
) -> jax.Array:  # fmt: skip
    table = _check_table(data, bits, block_size, quantize_axis, gather_axis)
    checks.check_array(_NAME, "indices", indices, _INDICES)
    _check_scales(table, data, scales, zero_points)
    axes = {"quantize_axis": table.quantize_axis, "gather_axis": table.gather_axis}
    return _look_up(data, indices, scales, zero_points, bits=int(bits), block_size=int(block_size), **axes)


# Below the checks: while an exporter records, nothing inside is traced.
@recording.mark("gather_block_quantized", _infer_result, _batch_lookups)
def _look_up(
    data: jax.Array, indices: jax.Array, scales: jax.Array, zero_points: jax.Array | None, *,
    bits: int, block_size: int, quantize_axis: int, gather_axis: int,
) -> jax.Array:  # fmt: skip
    axis, length, count = gather_axis, data.shape[gather_axis], 8 // bits if data.dtype == _UINT8 else 1
    places = jnp.where(indices < 0, indices + length, indices)
    # Where the table is cut into blocks along the axis of the lookup, each entry has the scale of its block.
    is_cut = gather_axis == quantize_axis
    blocks = places // block_size if is_cut else places
    codes = _unpack(jnp.take(data, places, axis, mode="clip"), count)
    steps = jnp.take(scales, blocks, axis, mode="clip")
    if zero_points is None:
        points = jnp.full_like(steps, 2 ** (bits - 1) if data.dtype == _UINT8 else 0, jnp.int32)
    else:
        points = _unpack(jnp.take(zero_points, blocks, axis, mode="clip"), count)
        points = lax.slice_in_dim(points, 0, steps.shape[-1], axis=-1) if count > 1 else points
    if is_cut:
        granularity: Blocked | PerAxis = PerAxis(tuple(range(codes.ndim)))
    else:
        shift = indices.ndim - 1 if quantize_axis > axis else 0
        granularity = Blocked(quantize_axis + shift, block_size)
    y = affine.dequantize_affine(codes, steps, points, granularity, scales.dtype)
    is_inside = ((places >= 0) & (places < length)).reshape(*places.shape, *(1,) * (data.ndim - axis - 1))
    return jnp.where(jnp.broadcast_to(is_inside, y.shape), y, jnp.zeros_like(y))


def _unpack(stored: jax.Array, count: int) -> jax.Array:
    """Return the codes of bytes that hold `count` codes each along the last dimension."""
    if count == 1:
        return stored
    bits = 8 // count
    shifts = lax.broadcasted_iota(np.uint8, (*stored.shape, count), stored.ndim) * np.uint8(bits)
    codes = (jnp.broadcast_to(stored[..., None], shifts.shape) >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*stored.shape[:-1], stored.shape[-1] * count)


def _check_table(data: jax.Array, bits: int, block_size: int, quantize_axis: int, gather_axis: int) -> _Table:
    """Check the codes and the attributes, and return the layout that they describe."""
    checks.check_array(_NAME, "data", data, (_INT4, _UINT4, _UINT8))
    widths = (2, 4, 8) if data.dtype == _UINT8 else (4,)
    expected = f"{'2, 4 or 8' if len(widths) > 1 else '4'}, because data is {data.dtype}"
    checks.require(bits in widths, _NAME, "bits", expected, bits)
    # A power of two has a single bit set.
    is_power = block_size >= 16 and block_size & (block_size - 1) == 0
    checks.require(is_power, _NAME, "block_size", "a power of two, 16 or more", block_size)
    cut = checks.check_axis(_NAME, quantize_axis, data.ndim, "quantize_axis")
    axis = checks.check_axis(_NAME, gather_axis, data.ndim, "gather_axis")
    if data.dtype == _UINT8:
        checks.require(data.ndim > 1, _NAME, "data", "rank 2 or more, because data is uint8", f"shape {data.shape}")
        expected = "the last axis, because data is uint8"
        checks.require(cut == data.ndim - 1, _NAME, "quantize_axis", expected, quantize_axis)
        checks.require(axis == 0, _NAME, "gather_axis", "0, because data is uint8", gather_axis)
    expected = f"entries along axis {axis}, the gather_axis"
    checks.require(data.shape[axis] != 0, _NAME, "data", expected, f"shape {data.shape}")
    return _Table(8 // bits if data.dtype == _UINT8 else 1, block_size, cut, axis)


def _check_scales(table: _Table, data: jax.Array, scales: jax.Array, zero_points: jax.Array | None) -> None:
    """Check the dtypes and the shapes of the scales and the zero points."""
    checks.check_array(_NAME, "scales", scales, dtypes.FLOATS)
    lengths = [*data.shape[:-1], data.shape[-1] * table.count]
    lengths[table.quantize_axis] = -(-lengths[table.quantize_axis] // table.block_size)
    reason = f"the shape of the codes, with one entry for {table.block_size} codes along axis {table.quantize_axis}"
    checks.check_shape(_NAME, "scales", scales, tuple(lengths), reason)
    if zero_points is not None:
        checks.check_array(_NAME, "zero_points", zero_points, (data.dtype,))
        lengths[-1] = -(-lengths[-1] // table.count)
        reason = "the shape of the scales" + (f", {table.count} in a byte" if table.count > 1 else "")
        checks.check_shape(_NAME, "zero_points", zero_points, tuple(lengths), reason)
