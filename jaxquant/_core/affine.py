"""From real numbers to codes and back, for a scale and a zero point of any granularity.

Every argument has been checked by the caller.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import barriers, division, dtypes, rounding, small_floats
from .granularity import Granularity


def divide_by_scale(x: jax.Array, scale: jax.Array, carrier: np.dtype) -> jax.Array:
    """Returns x / scale, of one shape, in the precision `carrier`, as float32."""
    if carrier == dtypes.INT32:
        return division.divide_integers(x, scale)
    values = small_floats.scale_as_float32(scale)
    return division.divide_in_precision(x.astype(jnp.float32), values, carrier)


def quantize_affine(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    granularity: Granularity,
    dtype: np.dtype,
    carrier: np.dtype,
    saturate: bool = True,
    bounds: tuple[int, int] | None = None,
) -> jax.Array:
    """Returns the codes of x; every argument has passed its contract."""
    value = divide_by_scale(x, granularity.expand(scale, x), carrier)
    if dtype in dtypes.FLOAT4 and zero_point is not None:
        value = jnp.where(value == 0, np.float32(0), value)  # float4 adds its zero point, 0: -0 + 0 is +0
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
    """Returns the values of the codes x; every argument has passed its contract."""
    if x.dtype in dtypes.SMALL_FLOATS:
        steps = small_floats.decode_small_float(x)
    else:
        codes = x.astype(jnp.int32)
        if zero_point is not None:
            codes = codes - granularity.expand(zero_point.astype(jnp.int32), x)
        steps = codes.astype(jnp.float32)
    values = small_floats.scale_as_float32(scale)
    product = barriers.round_result(steps * granularity.expand(values, x))
    return rounding.round_to_dtype(product, dtype).astype(dtype)
