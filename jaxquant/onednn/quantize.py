"""oneDNN Graph Quantize-1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale, fit_number
from . import _arithmetic

_NAME = "onednn.quantize"


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

    Source: oneDNN Graph Quantize-1; the arithmetic is that of oneDNN's CPU kernels.
    """
    scales = convert_plain_scale(_NAME, "scales", scales)
    zps = fit_number(_NAME, "zps", zps, dtypes.INT32)
    return _quantize(entry_point.convert_number(src), scales, zps, qtype=qtype, axis=axis, dtype=dtype)


@compile_entry_point(_NAME)
def _quantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int, dtype: Any
) -> jax.Array:
    dtype = checks.check_dtype(_NAME, "dtype", dtype, (*_arithmetic.EIGHT_BIT, *_arithmetic.FLOAT8))
    _arithmetic.check_float8_zero_point(_NAME, dtype, zps)
    granularity = _arithmetic.check_quantize(_NAME, src, scales, zps, qtype, axis)
    return _arithmetic.quantize_by_reciprocal(src, scales, zps, granularity, dtype)
