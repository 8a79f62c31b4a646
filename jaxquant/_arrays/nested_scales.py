"""Scales that are quantized themselves, as in NVFP4: a float8 scale for each block, times one float32 for all.

The orders in which producers divide and round differ, so that their scales and codes differ by a step here and there:

- ModelOpt: g = amax / (6 * 448), scale = float8(block_amax / (6 * g)), x / (scale * g);
- compressed-tensors: r = (1 / amax) * (6 * 448), scale = float8(r * (block_amax / 6)), x / (scale / r).

An array of this package holds g, or r as an inverse scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes
from .._kernels import affine, barriers
from .quantized_array import QuantizedArray
from .spec import QuantSpec

_TINY = np.finfo(np.float32).tiny
# compressed-tensors' scale of a block whose scale rounds to 0.
_EPSILON = np.float32(0.125)


def compute_nested_scale(
    spec: QuantSpec, low: jax.Array, high: jax.Array, reached: jax.Array | None = None
) -> tuple[QuantizedArray, jax.Array]:
    """Return the quantized scale of float32 ranges, and the float32 values by which elements are divided.

    Args:
        spec: Static. A spec with a `scale_spec`.
        low: the lower ends of the ranges.
        high: the upper ends.
        reached: the largest magnitude that the scales must reach, float32 of length 1 in each dimension. Ranges beyond
            it saturate. None takes the largest magnitude of the ranges.

    Returns:
        The scale, in the shape of the ranges, and its values. They are positive, unless a range has a NaN or an
        infinity: then all are NaN or infinite.
    """
    inner = spec.scale_spec
    assert inner is not None
    reach, most = np.float32(spec.bounds[1]), np.float32(inner.bounds[1])
    amax = lax.max(lax.abs(low), lax.abs(high))
    amax = jnp.where(jnp.isnan(low) | jnp.isnan(high), np.float32(np.nan), amax)
    amax = jnp.where(amax < _TINY, np.float32(0), amax)  # XLA:CPU treats subnormal numbers as 0
    largest = reached
    if largest is None:
        largest = jnp.max(amax, keepdims=True, initial=0)
        largest = jnp.where(jnp.any(jnp.isnan(amax), keepdims=True), np.float32(np.nan), largest)
    product = np.float32(reach * most)  # exact for float4 times float8
    if spec.scale_rule == "compressed_tensors":
        magnitude = jnp.maximum(largest, _TINY)
        inverse = barriers.round_result(_divide(np.float32(1), magnitude) * product)
        # The reciprocal of a larger number is subnormal.
        inverse = jnp.where(largest > np.float32(2.0**126), _divide(product, magnitude), inverse)
        # Where it overflows, compressed-tensors takes 1; so is it here where quotients by it may be subnormal.
        inverse = jnp.where(inverse <= np.float32(2.0**126), inverse, np.float32(1))
        quotient = barriers.round_result(inverse * _divide(amax, reach))
        codes = _encode(quotient, inner.dtype)
        scale = dtypes.decode_small_float(codes)
        scale = jnp.where(scale == 0, _EPSILON, scale)
        values = affine.divide(scale, jnp.broadcast_to(inverse, scale.shape))
        codes, shared = _encode(scale, inner.dtype), inverse
    else:
        shared = _divide(largest, product)
        shared = jnp.where(shared < _TINY, np.float32(1), shared)
        divisor = barriers.round_result(shared * reach)
        quotient = affine.divide(amax, jnp.broadcast_to(divisor, amax.shape))
        quotient = jnp.where(quotient == 0, np.float32(1), quotient)
        least = np.float32(jnp.finfo(inner.dtype).smallest_subnormal)
        codes = _encode(jnp.maximum(quotient, least), inner.dtype)
        values = barriers.round_result(dtypes.decode_small_float(codes) * shared)
    # A slice with a NaN or an infinity shows it in every value, whatever float8 made of it. The quotient by an infinite
    # scale would be 0.
    divides = spec.scale_rule == "compressed_tensors"
    shared = jnp.where(jnp.isfinite(largest), shared, np.float32(np.nan) if divides else largest)
    values = jnp.where(jnp.isfinite(largest), values, largest)
    return QuantizedArray(codes, shared, dtype=jnp.float32, inverse_scale=divides), values


def _divide(x: jax.Array | np.float32, divisor: jax.Array | np.float32) -> jax.Array:
    """Return x / divisor, rounded correctly; one of the two may be a number."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(divisor))
    return affine.divide(*(jnp.broadcast_to(jnp.asarray(v, jnp.float32), shape) for v in (x, divisor)))


def _encode(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return positive float32 values as float8, half to even, saturating."""
    return dtypes.encode_small_float(value, dtype, True)
