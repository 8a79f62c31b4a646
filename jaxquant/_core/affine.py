"""Quantization of real numbers to codes and back, with a scale and a zero point of any granularity.

The callers have checked every argument.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import barriers, division, dtypes, rounding, small_floats
from .granularity import Granularity


def divide_by_scale(x: jax.Array, scale: jax.Array, precision: np.dtype) -> jax.Array:
    """Return x / scale, for two arrays of the same shape, rounded to the dtype `precision` but stored as float32."""
    if precision == dtypes.INT32:
        return division.divide_integers(x, scale)
    values = small_floats.scale_as_float32(scale)
    return division.divide_in_precision(x.astype(jnp.float32), values, precision)


# A jit whose trace JAX keeps: another layer with activations of the same shape is traced in a fraction of the time.
@functools.partial(jax.jit, inline=True, static_argnames=("granularity", "dtype", "precision", "saturate", "bounds"))
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
    value = divide_by_scale(x, granularity.expand(scale, x), precision)
    if dtype in dtypes.FLOAT4 and zero_point is not None:
        # The operator adds the zero point, 0, and -0 + 0 is +0. Without a zero point -0 keeps its sign.
        value = jnp.where(value == 0, np.float32(0), value)
    if dtype in dtypes.SMALL_FLOATS:
        return small_floats.encode_small_float(value, dtype, saturate)
    steps = None if zero_point is None else granularity.expand(zero_point.astype(jnp.int32), x)
    return rounding.encode_steps(value, steps, dtype, bounds)


def dequantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
) -> jax.Array:
    """Return the values of the codes x.

    y = (x - zero_point) * scale

    The product is rounded to float32 and then to `dtype`.
    """
    if x.dtype in dtypes.SMALL_FLOATS:
        steps = small_floats.decode_small_float(x)
    else:
        codes = x.astype(jnp.int32)  # the difference of two codes may need one bit more than a code
        if zero_point is not None:
            codes = codes - granularity.expand(zero_point.astype(jnp.int32), x)
        # Of few elements, the difference and the product are one fusion each.
        steps = barriers.split_small_fusion(codes).astype(jnp.float32)
    values = small_floats.scale_as_float32(scale)
    product = barriers.round_result(steps * granularity.expand(values, x))
    return rounding.round_to_dtype(product, dtype).astype(dtype)
