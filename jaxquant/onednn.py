"""oneDNN Graph's four quantization operators, with oneDNN's arithmetic.

oneDNN multiplies by the reciprocal of the scale and adds the zero point before rounding. The integers therefore differ
from the ONNX operators' integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ._core import checks, dtypes, entry_point
from ._core.entry_point import compile_entry_point, convert_float32_scale, fit_number
from ._core.granularity import Granularity, Groups, PerAxis, PerTensor
from ._kernels import affine, barriers

__all__ = ["dequantize", "dynamic_dequantize", "dynamic_quantize", "quantize"]


def __dir__() -> list[str]:
    return __all__


# The arithmetic of oneDNN's kernels and the granularity of oneDNN Graph, shared by the four operators.


EIGHT_BIT = (np.dtype(jnp.uint8), np.dtype(jnp.int8))
FOUR_BIT = (np.dtype(jnp.uint4), np.dtype(jnp.int4))
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
ZERO_POINTS = (*EIGHT_BIT, dtypes.INT32)


def read_granularity(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Return the granularity of a qtype, "per_tensor" or "per_channel"; raise unless scales and zps fit it."""
    if qtype == "per_tensor":
        # oneDNN takes an array of one element only. A scalar is what JAX programs have.
        if scales.shape != ():
            checks.check_shape(function, "scales", scales, (1,), 'one element, qtype="per_tensor"')
        if zps is not None and zps.shape != ():
            checks.check_shape(function, "zps", zps, (1,), 'one element, qtype="per_tensor"')
        return PerTensor()
    dimension = checks.check_axis(function, axis, src.ndim)
    reason = f'src has shape {src.shape}, qtype="per_channel", axis={axis}'
    check_shapes(function, scales, zps, (src.shape[dimension],), reason)
    return PerAxis(dimension)


def check_shapes(function: str, scales: jax.Array, zps: jax.Array | None, shape: tuple[int, ...], reason: str) -> None:
    """Raise ContractValueError unless scales, and zps if there are any, have exactly this shape."""
    checks.check_shape(function, "scales", scales, shape, reason)
    if zps is not None:
        checks.check_shape(function, "zps", zps, shape, reason)


def check_float8_zero_point(function: str, dtype: np.dtype, zps: jax.Array | None) -> None:
    """Raise ContractValueError if codes of a float8 dtype have zero points."""
    if zps is not None:
        # oneDNN means to refuse them, too, but its check reads the dtype of src where dst has to be checked.
        expected = "None: float8 has no zero points"
        checks.require(dtype not in dtypes.FLOAT8, function, "zps", expected, "an array")


def check_quantize(
    function: str, src: jax.Array, scales: jax.Array, zps: jax.Array | None, qtype: str, axis: int
) -> Granularity:
    """Return the granularity of the arguments of a quantizing operator, after checking their dtypes and shapes."""
    checks.check_array(function, "src", src, (dtypes.FLOAT32,))
    checks.check_array(function, "scales", scales, (dtypes.FLOAT32,))
    checks.check_option(function, "qtype", qtype, ("per_tensor", "per_channel"))
    if zps is not None:
        checks.check_array(function, "zps", zps, ZERO_POINTS)
    return read_granularity(function, src, scales, zps, qtype, axis)


def quantize_by_reciprocal(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, granularity: Granularity, dtype: np.dtype
) -> jax.Array:
    """Return the codes of src, with each operation rounded to float32.

    dst = saturate(round_half_even(src * (1 / scales) + zps))
    """
    # The codes have no gradient, but without this JAX would trace the derivative of the division.
    src, scales = lax.stop_gradient((src, scales))
    # oneDNN rounds the reciprocal and multiplies; a true division gives other codes next to ties.
    inverse = affine.divide(jnp.ones_like(scales), scales)
    # oneDNN rounds this product before it adds the zero point; XLA would contract the two operations.
    value = barriers.round_result(src * granularity.expand(inverse, src))
    if dtype in dtypes.FLOAT8:
        # oneDNN does not saturate float8: e4m3 overflows to NaN, e5m2 to infinity.
        return dtypes.encode_small_float(value, dtype, saturate=False)
    if zps is not None:
        # Without this XLA would combine the zero point with the constant that encode_steps adds next, and round once.
        value = barriers.round_result(value + granularity.expand(zps.astype(jnp.float32), src))
    # The zero point is in the value already: unlike ONNX, oneDNN rounds the sum with it.
    return affine.encode_steps(value, None, dtype)


def dequantize_codes(src: jax.Array, scales: jax.Array, zps: jax.Array | None, granularity: Granularity) -> jax.Array:
    """Return the values of the codes src in the dtype of scales, with each operation rounded to float32.

    dst = (src - zps) * scales
    """
    is_float = src.dtype in FLOAT8
    steps = dtypes.decode_small_float(src) if is_float else src.astype(jnp.float32)
    if zps is not None:
        # Subtract in float32, as oneDNN does: a large int32 zero point is rounded before the subtraction.
        steps = steps - granularity.expand(zps.astype(jnp.float32), src)
    if not is_float:
        # Of few elements, the difference and the product are one fusion each. Integers have no derivative.
        steps = barriers.split_small_fusion(steps)
    # In float32 also for scales of 16 bits, and rounded to their dtype once, as oneDNN's kernels do.
    product = barriers.round_result(steps * granularity.expand(scales.astype(jnp.float32), src))
    return affine.round_to_dtype(product, scales.dtype).astype(scales.dtype)


# oneDNN Graph Quantize-1.


_QUANTIZE = "onednn.quantize"


def quantize(
    src: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
    dtype: DTypeLike = jnp.uint8,
) -> jax.Array:
    """Quantize values as oneDNN Graph's Quantize does.

    dst = saturate(round_half_even(src * (1 / scales) + zps))

    oneDNN multiplies by the reciprocal and adds the zero point before rounding. Ties and near-ties are therefore
    rounded differently than in ONNX's QuantizeLinear. Infinities saturate; NaN becomes the lowest code. float8 does not
    saturate: float8_e4m3fn overflows to NaN, float8_e5m2 to infinity. The result has no gradient.

    Args:
        src: values, float32, of any shape; a Python number becomes float32.
        scales: value per step, float32: per tensor, a scalar or one element; per channel, one for each index of `axis`.
            A Python number becomes float32.
        zps: in steps, with as many elements as scales: int8, uint8 or int32; an int becomes int32, and None means 0.
            They may be outside the range of dst. Must be None for float8.
        qtype: Static. "per_tensor" or "per_channel".
        axis: Static. The channel axis; a negative one counts from the back. It is ignored per tensor.
        dtype: Static. uint8, int8, float8_e4m3fn or float8_e5m2.

    Returns:
        The codes, in `dtype` and in src's shape.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: qtype is unknown, axis is out of range, the number of scales or zps is wrong, or zps are given for a
            float8 dtype.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([-2.5, -0.5, 0.5, 1.5, 300.0])
        >>> jq.onednn.quantize(x, 1.0, 1)  # quantize_linear gives [0, 1, 1, 3, 255]
        Array([  0,   0,   2,   2, 255], dtype=uint8)

    Source: oneDNN Graph Quantize-1; the arithmetic follows oneDNN's CPU kernels.
    """
    scales = convert_float32_scale(_QUANTIZE, "scales", scales)
    zps = fit_number(_QUANTIZE, "zps", zps, dtypes.INT32)
    return _quantize(entry_point.convert_number(src), scales, zps, qtype=qtype, axis=axis, dtype=dtype)


@compile_entry_point(_QUANTIZE)
def _quantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int, dtype: DTypeLike
) -> jax.Array:
    dtype = checks.check_dtype(_QUANTIZE, "dtype", dtype, (*EIGHT_BIT, *FLOAT8))
    check_float8_zero_point(_QUANTIZE, dtype, zps)
    granularity = check_quantize(_QUANTIZE, src, scales, zps, qtype, axis)
    return quantize_by_reciprocal(src, scales, zps, granularity, dtype)


# oneDNN Graph Dequantize-1.


_DEQUANTIZE = "onednn.dequantize"


def dequantize(
    src: ArrayLike, scales: ArrayLike, zps: ArrayLike | None = None, *, qtype: str = "per_tensor", axis: int = 1
) -> jax.Array:
    """Dequantize codes as oneDNN Graph's Dequantize does.

    dst = (src - zps) * scales

    The difference and the product are each rounded to float32, even if an addition follows. An int32 zero point is
    rounded to float32 before the subtraction; ONNX's DequantizeLinear subtracts in integers.

    Args:
        src: codes of any shape: uint8, int8, float8_e4m3fn or float8_e5m2.
        scales: value per step, float32: per tensor, a scalar or one element; per channel, one for each index of `axis`.
            A Python number becomes float32.
        zps: in steps, with as many elements as scales: int8, uint8 or int32; an int becomes int32, and None means 0.
            Must be None for float8.
        qtype: Static. "per_tensor" or "per_channel".
        axis: Static. The channel axis; a negative one counts from the back. It is ignored per tensor.

    Returns:
        The values, float32, in src's shape.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: qtype is unknown, axis is out of range, the number of scales or zps is wrong, or zps are given for a
            float8 src.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> jq.onednn.dequantize(jnp.array([0, 10, 255], jnp.uint8), 0.5, 10)
        Array([ -5. ,   0. , 122.5], dtype=float32)

    Source: oneDNN Graph Dequantize-1; the arithmetic follows oneDNN's CPU kernels.

    Cotangent of scales: the sum of g * (src - zps) over the elements that share a scale. Of a float8 src: g * scales.
    Integers have no cotangent.
    """
    scales = convert_float32_scale(_DEQUANTIZE, "scales", scales)
    zps = fit_number(_DEQUANTIZE, "zps", zps, dtypes.INT32)
    return _dequantize(src, scales, zps, qtype=qtype, axis=axis)


@compile_entry_point(_DEQUANTIZE)
def _dequantize(src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int) -> jax.Array:
    checks.check_array(_DEQUANTIZE, "src", src, (*EIGHT_BIT, *FLOAT8))
    checks.check_array(_DEQUANTIZE, "scales", scales, (dtypes.FLOAT32,))
    checks.check_option(_DEQUANTIZE, "qtype", qtype, ("per_tensor", "per_channel"))
    if zps is not None:
        checks.check_array(_DEQUANTIZE, "zps", zps, ZERO_POINTS)
    check_float8_zero_point(_DEQUANTIZE, src.dtype, zps)
    granularity = read_granularity(_DEQUANTIZE, src, scales, zps, qtype, axis)
    return dequantize_codes(src, scales, zps, granularity)


# oneDNN Graph DynamicQuantize-1.


_DYNAMIC_QUANTIZE = "onednn.dynamic_quantize"


def dynamic_quantize(
    src: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
    dtype: DTypeLike = jnp.uint8,
) -> jax.Array:
    """Quantize values as oneDNN Graph's DynamicQuantize does.

    dst = saturate(round_half_even(src * (1 / scales) + zps))

    "Dynamic" means that scales and zps are inputs of oneDNN's operator and not attributes. The operator does not
    compute them from src, as ONNX's DynamicQuantizeLinear does. With a zero scale, positive values become the highest
    code and all others the lowest. The result has no gradient.

    Args:
        src: values, float32, of any shape; a Python number becomes float32.
        scales: value per step, float32: per tensor, a scalar or one element; per channel, one for each index of `axis`.
            A Python number becomes float32.
        zps: in steps, with as many elements as scales: int8, uint8 or int32; an int becomes int32, and None means 0.
            They may be outside the range of dst.
        qtype: Static. "per_tensor" or "per_channel".
        axis: Static. The channel axis; a negative one counts from the back. It is ignored per tensor.
        dtype: Static. uint8 or int8.

    Returns:
        The codes, in `dtype` and in src's shape.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: qtype is unknown, axis is out of range, or the number of scales or zps is wrong.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> src, zps = jnp.array([[-1.0, 0.0], [1.0, 100.0]]), jnp.array([10, -200])
        >>> jq.onednn.dynamic_quantize(src, jnp.array([0.4, 0.2]), zps, qtype="per_channel")  # -2.5 + 10 ties to 8
        Array([[  8,   0],
               [ 12, 255]], dtype=uint8)

    Source: oneDNN Graph DynamicQuantize-1; the arithmetic follows oneDNN's CPU kernels. oneDNN itself refuses
    zero points per channel and is wrong for negative axes; there this function follows the specification.
    """
    scales = convert_float32_scale(_DYNAMIC_QUANTIZE, "scales", scales)
    zps = fit_number(_DYNAMIC_QUANTIZE, "zps", zps, dtypes.INT32)
    return _dynamic_quantize(entry_point.convert_number(src), scales, zps, qtype=qtype, axis=axis, dtype=dtype)


@compile_entry_point(_DYNAMIC_QUANTIZE)
def _dynamic_quantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int, dtype: DTypeLike
) -> jax.Array:
    dtype = checks.check_dtype(_DYNAMIC_QUANTIZE, "dtype", dtype, EIGHT_BIT)
    granularity = check_quantize(_DYNAMIC_QUANTIZE, src, scales, zps, qtype, axis)
    return quantize_by_reciprocal(src, scales, zps, granularity, dtype)


# oneDNN Graph DynamicDequantize-1.


_DYNAMIC_DEQUANTIZE = "onednn.dynamic_dequantize"


def dynamic_dequantize(
    src: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
    group_shape: Sequence[int] | None = None,
) -> jax.Array:
    """Dequantize codes as oneDNN Graph's DynamicDequantize does.

    dst = (src - zps) * scales

    The difference and the product are each rounded to float32, and the product is then rounded to the dtype of scales,
    even if an addition follows.

    Args:
        src: codes of any shape: uint8, int8, uint4 or int4.
        scales: value per step, float32, float16 or bfloat16: per tensor, a scalar or one element; per channel, one for
            each index of `axis`; per group, an array of src's rank, with dimensions `src.shape[i] / group_shape[i]`.
            A Python number becomes float32.
        zps: in steps, of scales' shape: uint4, int4, uint8, int8 or int32; an int becomes int32, and None means 0.
        qtype: Static. "per_tensor", "per_channel" or "per_group".
        axis: Static. The channel axis; a negative one counts from the back. It is ignored unless per channel.
        group_shape: Static. For "per_group", how many elements along each dimension of src share a scale. Any dimension
            may be grouped. Each entry must divide its dimension.

    Returns:
        The values, in src's shape and the dtype of scales.

    Raises:
        TypeError: an argument has a dtype or type that the operator does not support.
        ValueError: qtype is unknown, axis is out of range, or scales or zps have a wrong number or shape; or
            group_shape is missing, is not allowed with this qtype, has a wrong length, or does not divide src's shape.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> src = jnp.array([[-8, -1, 0, 7]], jnp.int4)
        >>> scales = jnp.array([[0.5, 2.0]], jnp.float16)
        >>> jq.dynamic_dequantize(src, scales, jnp.array([[1, -8]], jnp.int4), qtype="per_group", group_shape=(1, 2))
        Array([[-4.5, -1. , 16. , 30. ]], dtype=float16)

    Source: oneDNN Graph DynamicDequantize-1, with the groups and 4-bit types of oneDNN 3.7 and later; the
    arithmetic follows oneDNN's CPU kernels. Where oneDNN refuses (groups outside the last two dimensions,
    4 bits per tensor, zero points per channel) or is wrong (negative axes), this function follows the specification.

    Cotangent of scales: the sum of g * (src - zps) over the elements that share a scale. Integers have no cotangent.
    """
    scales = convert_float32_scale(_DYNAMIC_DEQUANTIZE, "scales", scales)
    zps = fit_number(_DYNAMIC_DEQUANTIZE, "zps", zps, dtypes.INT32)
    # A static argument must be hashable, and a list is not.
    groups = tuple(group_shape) if isinstance(group_shape, Sequence | np.ndarray) else group_shape
    return _dynamic_dequantize(src, scales, zps, qtype=qtype, axis=axis, group_shape=groups)


@compile_entry_point(_DYNAMIC_DEQUANTIZE)
def _dynamic_dequantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *,
    qtype: str, axis: int, group_shape: tuple[int, ...] | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_DYNAMIC_DEQUANTIZE, "src", src, (*EIGHT_BIT, *FOUR_BIT))
    checks.check_array(_DYNAMIC_DEQUANTIZE, "scales", scales, dtypes.FLOATS)
    checks.check_option(_DYNAMIC_DEQUANTIZE, "qtype", qtype, ("per_tensor", "per_channel", "per_group"))
    if zps is not None:
        checks.check_array(_DYNAMIC_DEQUANTIZE, "zps", zps, (*FOUR_BIT, *ZERO_POINTS))
    # Groups have an array of scales in src's rank, which the shapes of the other two qtypes do not describe.
    if qtype == "per_group":
        return dequantize_codes(src, scales, zps, _read_groups(src, scales, zps, group_shape))
    expected = 'None unless qtype="per_group"'
    checks.require(group_shape is None, _DYNAMIC_DEQUANTIZE, "group_shape", expected, group_shape)
    granularity = read_granularity(_DYNAMIC_DEQUANTIZE, src, scales, zps, qtype, axis)
    return dequantize_codes(src, scales, zps, granularity)


def _read_groups(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, group_shape: tuple[int, ...] | None
) -> Groups:
    """Return the groups of a group_shape; raise unless it divides src's shape, and scales and zps fit it."""
    if not isinstance(group_shape, tuple) or len(group_shape) != src.ndim:
        expected = f'{src.ndim} positive integers (src has shape {src.shape}, qtype="per_group")'
        checks.refuse(_DYNAMIC_DEQUANTIZE, "group_shape", expected, group_shape)
    sizes = tuple(group_shape or ())
    for size in sizes:
        checks.check_integer(_DYNAMIC_DEQUANTIZE, "group_shape", size)
    fits = all(size > 0 and length % size == 0 for length, size in zip(src.shape, sizes, strict=True))
    checks.require(fits, _DYNAMIC_DEQUANTIZE, "group_shape", f"entries that divide src's shape {src.shape}", sizes)
    shape = tuple(length // size for length, size in zip(src.shape, sizes, strict=True))
    reason = f"src has shape {src.shape}, group_shape={sizes}"
    check_shapes(_DYNAMIC_DEQUANTIZE, scales, zps, shape, reason)
    return Groups(sizes)
