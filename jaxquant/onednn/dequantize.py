"""oneDNN Graph Dequantize-1."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale, fit_number
from . import _arithmetic

_NAME = "onednn.dequantize"


def dequantize(
    src: ArrayLike,
    scales: ArrayLike,
    zps: ArrayLike | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
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

    Source: oneDNN Graph Dequantize-1; the arithmetic is that of oneDNN's CPU kernels.

    Cotangent of scales: the sum of g * (src - zps) over the elements that share a scale. Of a float8 src: g * scales.
    Integers have no cotangent.
    """
    scales = convert_plain_scale(_NAME, "scales", scales)
    zps = fit_number(_NAME, "zps", zps, dtypes.INT32)
    return _dequantize(src, scales, zps, qtype=qtype, axis=axis)


@compile_entry_point(_NAME)
def _dequantize(src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int) -> jax.Array:
    checks.check_array(_NAME, "src", src, (*_arithmetic.EIGHT_BIT, *_arithmetic.FLOAT8))
    checks.check_array(_NAME, "scales", scales, (dtypes.FLOAT32,))
    checks.check_option(_NAME, "qtype", qtype, ("per_tensor", "per_channel"))
    if zps is not None:
        checks.check_array(_NAME, "zps", zps, _arithmetic.ZERO_POINTS)
    _arithmetic.check_float8_zero_point(_NAME, src.dtype, zps)
    granularity = _arithmetic.find_granularity(_NAME, src, scales, zps, qtype, axis)
    return _arithmetic.dequantize_codes(src, scales, zps, granularity)
