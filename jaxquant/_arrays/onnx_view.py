"""Conversion of QuantizedArrays to the inputs of ONNX's DequantizeLinear, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point
from .._core.entry_point import check_float_zero_point
from .._core.granularity import Aligned, Blocked, Granularity, PerAxis, PerTensor, check_matching, resolve_onnx
from . import quantized_array
from .quantized_array import QuantizedArray

_NAME, _BACK = "onnx_view", "from_onnx"


class OnnxView(NamedTuple):
    """The inputs and attributes of ONNX's DequantizeLinear by name: call `dequantize_linear(**view._asdict())`."""

    x: jax.Array
    x_scale: jax.Array
    x_zero_point: jax.Array | None
    axis: int
    block_size: int
    output_dtype: np.dtype


def onnx_view(q: QuantizedArray) -> OnnxView:
    """Return the inputs and attributes for which ONNX's DequantizeLinear returns q.dequantize().

    ONNX's scale is a scalar, 1-D along one axis, or of x's rank with blocks along one axis and an entry per index along
    the others; its zero point has the same shape. A scale that is shared in any other way, or not in the same way as
    the zero point, is repeated until it has one of these shapes.

    Args:
        q: the array to describe.

    Returns:
        x: the codes.
        x_scale: the scale in ONNX's shape.
        x_zero_point: the zero point in the same shape, or None.
        axis: ONNX's attribute; 1, ONNX's default, if it has no effect.
        block_size: ONNX's attribute; 0 without blocks.
        output_dtype: the dtype of q.dequantize().

    Raises:
        TypeError: q is not a QuantizedArray.
        ValueError: q has a codebook, which ONNX does not support.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([[-7.0, 3.5], [0.5, 14.0]]), jq.QuantSpec(jnp.int4, jq.PerAxis(0)))
        >>> view = jq.onnx_view(q)
        >>> view.x_scale, view.axis, view.block_size
        (Array([1., 2.], dtype=float32), 0, 0)
        >>> jq.dequantize_linear(**view._asdict())  # 3.5 and 0.5 are ties
        Array([[-7.,  4.],
               [ 0., 14.]], dtype=float32)

    Source: ONNX DequantizeLinear-25.
    """
    q = quantized_array.check_array(_NAME, "q", q)
    checks.require(q.codebook is None, _NAME, "q", "an array without a codebook, because ONNX has none", q.codebook)
    sizes = _match_common_sizes(q)
    # A dimension of length 0 has size 0, but it still has an entry.
    entries = tuple(-(-n // size) if size else 1 for n, size in zip(q.shape, sizes, strict=True))
    scale, zero_point = (None if p is None else _pick_entries(p, q, entries, sizes) for p in (q.scale, q.zero_point))
    assert scale is not None
    # The scale is a scalar if no axis has several entries, 1-D if one axis has an entry per index, and otherwise of x's
    # rank.
    axes = [a for a, n in enumerate(entries) if n != 1]
    if not axes:
        flat, axis, block_size = (), 1, 0
    elif len(axes) == 1 and entries[axes[0]] == q.shape[axes[0]]:
        flat, axis, block_size = (entries[axes[0]],), axes[0], 0
    else:
        flat, axis = entries, next((a for a, size in enumerate(sizes) if size > 1), 0)
        block_size = sizes[axis]
    view = (None if p is None else p.reshape(flat) for p in (scale, zero_point))
    return OnnxView(q.codes, *view, axis, block_size, q.dtype)  # type: ignore[arg-type]


def _match_common_sizes(q: QuantizedArray) -> tuple[int, ...]:
    """Return how many indices of each dimension share an entry in ONNX's form, which has blocks along one axis only."""
    aligned = Aligned(q.block_size)
    part_sizes = [aligned.sizes(p.shape, q.shape) for p in (q.scale, q.zero_point) if p is not None]
    sizes = []
    for a, n in enumerate(q.shape):
        lengths = [s[a] for s in part_sizes if s is not None]
        least = min(lengths) if n else max(lengths)
        # If the blocks of the scale and of the zero point end at different indices, each index needs its own entry.
        sizes.append(least if all(s == n or s % least == 0 for s in lengths) else 1)
    blocked = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if 1 < size < n]
    shared = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size == n and n > 1]
    divided_axes = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    if len(divided_axes) <= 1 and not blocked:
        return tuple(sizes)
    # ONNX has blocks along one axis only, and a shared axis counts as one block. Every other axis gets an entry per
    # index.
    block_axis = (blocked or shared[::-1] or [None])[0]
    return tuple(size if a == block_axis else 1 for a, size in enumerate(sizes))


def _pick_entries(part: Any, q: QuantizedArray, entries: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return a scale or zero point with these numbers of entries, each taken from the first index of its block."""
    part_sizes = Aligned(q.block_size).sizes(part.shape, q.shape)
    assert part_sizes is not None
    for a, (count, size) in enumerate(zip(entries, sizes, strict=True)):
        if part.shape[a] == count:
            continue
        # A shared entry is broadcast, which is cheaper than the gather below.
        if part.shape[a] == 1:
            shape = (*part.shape[:a], count, *part.shape[a + 1 :])
            part = jnp.broadcast_to(part, shape)
        else:
            part = jnp.take(part, np.arange(count) * size // part_sizes[a], axis=a)
    return part


def from_onnx(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DTypeLike | None = None,
) -> QuantizedArray:
    """Return the QuantizedArray that represents the inputs of ONNX's DequantizeLinear.

    Its dequantize() returns what `dequantize_linear` returns for the same arguments, bit for bit.

    Args:
        x: codes of any shape: int2, uint2, int4, uint4, int8, uint8, int16, uint16, one of the four float8 dtypes or
            float4_e2m1fn.
        x_scale: the real value of one step, float32, float16, bfloat16 or float8_e8m0fnu. In ONNX's shape: a scalar,
            1-D with the length of x's `axis`, or, with `block_size`, x's shape with ceil(length / block_size) in
            place of the axis.
        x_zero_point: the code of 0.0, in steps, with x_scale's shape and x's dtype. None means 0.
        axis: Static. The axis that is kept; a negative one counts from the back. Ignored if the scale is per tensor.
        block_size: Static. The number of elements along `axis` that share a scale; the last block may be shorter. 0
            means no blocks.
        output_dtype: Static. The dtype of q.dequantize(): float32, float16 or bfloat16. By default x_scale's dtype,
            or float32 for float8_e8m0fnu.

    Returns:
        A QuantizedArray with x's codes, and with a scale and a zero point of x's rank.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        ValueError: shapes, `axis` or `block_size` do not fit each other; a float x has a zero point; or a scale that
            is known (not traced) is 0, negative, NaN or infinite. (The operator `dequantize_linear` accepts such
            scales.)

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> codes = jnp.array([[0, 128, 255], [3, 4, 5]], jnp.uint8)
        >>> q = jq.from_onnx(codes, jnp.array([0.5, 2.0]), jnp.array([128, 3], jnp.uint8), axis=0)
        >>> q
        QuantizedArray(uint8[2,3], scale=float32[2,1], zero_point=uint8[2,1], dtype=float32, nbytes=16)
        >>> q.dequantize()
        Array([[-64. ,   0. ,  63.5],
               [  0. ,   2. ,   4. ]], dtype=float32)

    Source: ONNX DequantizeLinear-25.
    """
    # Convert before the checks, so that an error describes the array as JAX reads it.
    arguments = {"x": x, "x_scale": entry_point.convert_number(x_scale), "x_zero_point": x_zero_point}
    codes, scale, zero_point = entry_point.convert_arrays(_BACK, arguments)
    checks.check_array(_BACK, "x", codes, dtypes.QUANTIZED)
    checks.check_array(_BACK, "x_scale", scale, (*dtypes.FLOATS, dtypes.E8M0))
    entry_point.check_positive_scale(_BACK, "x_scale", scale, is_awaited=True)
    granularity = resolve_onnx(_BACK, "x_scale", scale, codes.shape, axis, block_size)
    if output_dtype is not None:
        output_dtype = checks.check_dtype(_BACK, "output_dtype", output_dtype, dtypes.FLOATS)
    if zero_point is not None:
        check_float_zero_point(_BACK, "x_zero_point", zero_point)
        checks.check_same_dtype(_BACK, "x_zero_point", zero_point, codes.dtype, "the dtype of x")
        check_matching(_BACK, "x_zero_point", zero_point, scale, "x_scale")
    # ONNX allows a zero point of zeros for float codes; a QuantizedArray of floats has none.
    if codes.dtype in dtypes.SMALL_FLOATS:
        zero_point = None
    scale, zero_point = (None if p is None else _expand_rank(p, codes, granularity) for p in (scale, zero_point))
    stored_size = granularity.size if isinstance(granularity, Blocked) else None
    return QuantizedArray(codes, scale, zero_point, dtype=output_dtype, block_size=stored_size)


def _expand_rank(part: jax.Array, x: jax.Array, granularity: Granularity) -> Any:
    """Return a scale or zero point in ONNX's shape with the rank of x."""
    if isinstance(granularity, PerTensor):
        return part.reshape((1,) * x.ndim)
    if isinstance(granularity, PerAxis):
        return lax.expand_dims(part, [a for a in range(x.ndim) if a != granularity.axis])
    return part
