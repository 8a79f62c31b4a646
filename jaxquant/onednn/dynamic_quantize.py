"""oneDNN Graph DynamicQuantize-1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, entry_point
from .._core.entry_point import compile_entry_point
from .._core.number_arguments import convert_plain_scale, fit_number
from . import _arithmetic

_NAME = "onednn.dynamic_quantize"


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

    Source: oneDNN Graph DynamicQuantize-1; the arithmetic is that of oneDNN's CPU kernels. oneDNN itself refuses
    zero points per channel and is wrong for negative axes; there this function follows the specification.
    """
    scales = convert_plain_scale(_NAME, "scales", scales)
    zps = fit_number(_NAME, "zps", zps, dtypes.INT32)
    return _dynamic_quantize(entry_point.convert_number(src), scales, zps, qtype=qtype, axis=axis, dtype=dtype)


@compile_entry_point(_NAME)
def _dynamic_quantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *, qtype: str, axis: int, dtype: Any
) -> jax.Array:
    dtype = checks.check_dtype(_NAME, "dtype", dtype, _arithmetic.EIGHT_BIT)
    granularity = _arithmetic.check_quantize(_NAME, src, scales, zps, qtype, axis)
    return _arithmetic.quantize_by_reciprocal(src, scales, zps, granularity, dtype)
