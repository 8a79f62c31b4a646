"""oneDNN Graph DynamicDequantize-1."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from .._core import checks, dtypes
from .._core.entry_point import compile_entry_point
from .._core.granularity import Groups
from .._core.number_arguments import convert_plain_scale, fit_number
from . import _arithmetic

_NAME = "onednn.dynamic_dequantize"


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
            each index of `axis`; per group, an array of src's rank, whose dimensions are those of src divided by those
            of group_shape. A Python number becomes float32.
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
    arithmetic is that of oneDNN's CPU kernels. Where oneDNN refuses (groups outside the last two dimensions,
    4 bits per tensor, zero points per channel) or is wrong (negative axes), this function follows the specification.

    Cotangent of scales: the sum of g * (src - zps) over the elements that share a scale. Integers have no cotangent.
    """
    scales = convert_plain_scale(_NAME, "scales", scales)
    zps = fit_number(_NAME, "zps", zps, dtypes.INT32)
    # A static argument must be hashable, and a list is not.
    groups = tuple(group_shape) if isinstance(group_shape, Sequence | np.ndarray) else group_shape
    return _dynamic_dequantize(src, scales, zps, qtype=qtype, axis=axis, group_shape=groups)


@compile_entry_point(_NAME)
def _dynamic_dequantize(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, *,
    qtype: str, axis: int, group_shape: tuple[int, ...] | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "src", src, (*_arithmetic.EIGHT_BIT, *_arithmetic.FOUR_BIT))
    checks.check_array(_NAME, "scales", scales, dtypes.FLOATS)
    checks.check_option(_NAME, "qtype", qtype, ("per_tensor", "per_channel", "per_group"))
    if zps is not None:
        checks.check_array(_NAME, "zps", zps, (*_arithmetic.FOUR_BIT, *_arithmetic.ZERO_POINTS))
    # Groups have an array of scales in src's rank, which the shapes of the other two qtypes do not describe.
    if qtype == "per_group":
        return _arithmetic.dequantize_codes(src, scales, zps, _find_groups(src, scales, zps, group_shape))
    expected = 'None unless qtype="per_group"'
    checks.require(group_shape is None, _NAME, "group_shape", expected, group_shape)
    granularity = _arithmetic.find_granularity(_NAME, src, scales, zps, qtype, axis)
    return _arithmetic.dequantize_codes(src, scales, zps, granularity)


def _find_groups(
    src: jax.Array, scales: jax.Array, zps: jax.Array | None, group_shape: tuple[int, ...] | None
) -> Groups:
    """Return the groups of a group_shape; raise unless it divides src's shape, and scales and zps fit it."""
    if not isinstance(group_shape, tuple) or len(group_shape) != src.ndim:
        expected = f'{src.ndim} positive integers (src has shape {src.shape}, qtype="per_group")'
        checks.require(False, _NAME, "group_shape", expected, group_shape)
    sizes = tuple(group_shape or ())
    for size in sizes:
        checks.check_integer(_NAME, "group_shape", size)
    fits = all(size > 0 and length % size == 0 for length, size in zip(src.shape, sizes, strict=True))
    checks.require(fits, _NAME, "group_shape", f"entries that divide src's shape {src.shape}", sizes)
    shape = tuple(length // size for length, size in zip(src.shape, sizes, strict=True))
    reason = f"src has shape {src.shape}, group_shape={sizes}"
    _arithmetic.check_shapes(_NAME, scales, zps, shape, reason)
    return Groups(sizes)
