"""Quantization of real numbers to codes and back, with a scale and a zero point of any granularity.

The callers have checked every argument.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, recording, small_floats
from .._core.granularity import Aligned, Blocked, Granularity, Groups, PerAxis, PerTensor
from . import barriers, division, rounding

# What reads dequantized values: any operation, or only a contraction of two terms or more.
Use = Literal["any", "operand"]


def divide_by_scale(x: jax.Array, scale: jax.Array, precision: np.dtype) -> jax.Array:
    """Return x / scale, for two arrays of the same shape, rounded to the dtype `precision` but stored as float32."""
    if precision == dtypes.INT32:
        return division.divide_integers(x, scale)
    values = small_floats.scale_as_float32(scale)
    return division.divide_in_precision(x.astype(jnp.float32), values, precision)


def _match_batched_scale(
    mapped: dict[str, bool], x: jax.Array, scale: Any, zero_point: Any, granularity: Granularity
) -> tuple[Any, Any, Granularity] | None:
    """Return the scale, the zero point and the granularity of an x with one more dimension, its first; or None."""
    if not mapped["x"] or mapped["scale"] != mapped.get("zero_point", mapped["scale"]):
        return None
    if mapped["scale"]:
        is_scalar = isinstance(granularity, PerTensor) and scale.ndim == 1
        return (scale, zero_point, PerAxis(0)) if is_scalar else None
    if isinstance(granularity, PerTensor):
        return scale, zero_point, granularity
    if isinstance(granularity, PerAxis):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        return scale, zero_point, PerAxis(tuple(axis + 1 for axis in axes))
    if isinstance(granularity, Blocked):
        axes = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        sizes = (granularity.size if axis in axes else 1 for axis in range(x.ndim - 1))
        granularity = Groups((x.shape[0], *sizes))
    elif isinstance(granularity, Groups):
        granularity = Groups((x.shape[0], *granularity.sizes))
    assert isinstance(granularity, Groups | Aligned)
    return scale[None], None if zero_point is None else zero_point[None], granularity


def _batch_quantize(mapped: Any, x: Any, scale: Any, zero_point: Any, granularity: Any, **statics: Any) -> Any:
    parts = _match_batched_scale(mapped, x, scale, zero_point, granularity)
    return None if parts is None else quantize_affine(x, *parts, **statics)


def _batch_dequantize(mapped: Any, x: Any, scale: Any, zero_point: Any, granularity: Any, **statics: Any) -> Any:
    parts = _match_batched_scale(mapped, x, scale, zero_point, granularity)
    return None if parts is None else dequantize_affine(x, *parts, **statics)


# A jit whose trace JAX keeps: another layer with activations of the same shape is traced in a fraction of the time.
@recording.mark("quantize", lambda x, dtype, **_: (x.shape, dtype), _batch_quantize)
@functools.partial(jax.jit, static_argnames=("granularity", "dtype", "precision", "saturate", "bounds"))
def quantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
    precision: np.dtype,
    saturate: bool = True,
    bounds: tuple[int, int] | None = None,
) -> jax.Array:
    """Return the codes of x.

    code = saturate(round_half_even(x / scale) + zero_point)

    Args:
        x: values, of any float dtype or int32.
        scale: the value of one step, in the shape that `granularity` expands.
        zero_point: the code of 0, in the scale's shape; None means 0. It must be 0 for a small float dtype.
        granularity: which elements of x share a scale.
        dtype: the dtype of the codes.
        precision: the dtype to which the quotient is rounded; with int32, integers are divided exactly.
        saturate: whether an overflow of a float8 dtype becomes its largest finite value.
        bounds: (qmin, qmax); the default is the bounds of the dtype.
    """
    wide_scale = granularity.expand(scale, x)
    if precision == dtypes.INT32:
        value = division.divide_integers(x, wide_scale)
    else:
        operands = (x.astype(jnp.float32), small_floats.scale_as_float32(wide_scale))
        operands = (rounding.round_to_dtype(value, precision) for value in operands)
        quotient = division.divide(*operands, for_codes=dtype not in dtypes.SMALL_FLOATS)
        value = rounding.round_to_dtype(quotient, precision)
    if dtype in dtypes.FLOAT4 and zero_point is not None:
        # The operator adds the zero point, 0, and -0 + 0 is +0. Without a zero point -0 keeps its sign.
        value = jnp.where(value == 0, np.float32(0), value)
    if dtype in dtypes.SMALL_FLOATS:
        return small_floats.encode_small_float(value, dtype, saturate)
    steps = None if zero_point is None else granularity.expand(zero_point.astype(jnp.int32), x)
    return rounding.encode_steps(value, steps, dtype, bounds)


@recording.mark("dequantize", lambda x, dtype, **_: (x.shape, dtype), _batch_dequantize)
def dequantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
    use: Use = "any",
) -> jax.Array:
    """Return the values of the codes x.

    y = (x - zero_point) * scale

    The product is rounded to float32 and then to `dtype`. With the use "operand", the values are only an operand of a
    contraction of two terms or more, which multiplies them: then no addition follows that XLA could merge with the
    product. It could with a contraction of one term, if the other operand is a constant 1.
    """
    if x.dtype in dtypes.SMALL_FLOATS:
        steps = small_floats.decode_small_float(x)
    else:
        codes = x.astype(jnp.int32)  # the difference of two codes may need one bit more than a code
        if zero_point is not None:
            codes = codes - granularity.expand(zero_point.astype(jnp.int32), x)
        # Of few elements, the difference and the product are one fusion each.
        codes = codes if use == "operand" else barriers.split_small_fusion(codes)
        steps = codes.astype(jnp.float32)
    values = small_floats.scale_as_float32(scale)
    product = steps * granularity.expand(values, x)
    product = product if use == "operand" else barriers.round_result(product)
    return rounding.round_to_dtype(product, dtype).astype(dtype)


def sum_to_scale(granularity: Granularity, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the sum of the elements that share a scale, in the scale's shape and sharding.

    This is the transpose of `expand`.
    """
    # XLA:CPU sums an array in memory several times faster than one that it computes in the same loop.
    values = lax.platform_dependent(values, cpu=lax.optimization_barrier, default=lambda array: array)
    # The product with ones matters under shard_map: it varies over the devices as x does, even if the scale does not,
    # so its transpose sums over the devices too.
    ones = jnp.ones_like(values)
    _, transpose = jax.vjp(lambda s: granularity.expand(s, values) * ones, scale.astype(values.dtype))
    return transpose(values)[0]
