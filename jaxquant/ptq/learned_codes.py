"""Codes that are learned: a change of each value in steps, rounded in the forward pass, with its gradient unrounded."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.quantize import encode_array
from .._arrays.quantized_array import QuantizedArray
from .._arrays.scale_from_range import find_shapes
from .._arrays.spec import QuantSpec
from .._core import dtypes, granularity, small_floats
from .._training.estimators import StraightThrough
from .._training.fake_quantize import fake_quantize


def find_obstacle(q: QuantizedArray, spec: QuantSpec) -> str:
    """Return why the codes of an array cannot be learned, or ""."""
    if spec.dtype in dtypes.SMALL_FLOATS:
        return "codes of floats, whose steps differ"
    shape = find_shapes("ptq.tune", spec, q.shape)[1]
    has_point = not spec.symmetric or bool(spec.fixed_zero_point)
    fits = q.codebook == spec.codebook and q.codes.dtype == spec.carrier and (q.zero_point is not None) == has_point
    fits = fits and (q.zero_point is None or all(n in (1, m) for n, m in zip(q.zero_point.shape, shape, strict=True)))
    return "" if fits else "codes of another spec than that of the rules"


def move_change(
    q: QuantizedArray, spec: QuantSpec, change: jax.Array, slope: jax.Array, curvature: jax.Array, rate: Any
) -> jax.Array:
    """Return the changes after a step towards the minimum of each code alone, within the bounds of the spec.

    A code is at the minimum where slope + curvature * (change - rounded change) = 0. The next code is better if this is
    nearer to it than to the present one.
    """
    start, unit = _decode_steps(q), _find_unit(spec)
    steps = start + unit * change
    rest = (steps - _round_steps(q, spec, steps)) / unit
    least = np.float32(1e-3) * jnp.mean(curvature) + np.finfo(np.float32).tiny
    change = change - rate * jnp.clip(slope / (curvature + least) + rest, -1, 1)
    low, high = (np.float32(bound) for bound in spec.bounds)
    point = np.float32(0)
    if q.zero_point is not None:
        point = granularity.Aligned(q.block_size).expand(q.zero_point.astype(jnp.float32), start)
    return jnp.clip(change, (low - point - start) / unit, (high - point - start) / unit)


def dequantize_change(q: QuantizedArray, spec: QuantSpec, change: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the floats of the array whose codes have changed, with the gradient of codes that are not rounded.

    Args:
        q: the array with the codes of the start.
        spec: Static. The spec of the codes.
        change: the change of each value, in steps, float32.
        scale: the scale, which may have changed, too.
    """
    steps = _decode_steps(q) + _find_unit(spec) * change
    rounded = _round_steps(q, spec, steps)
    scale = small_floats.scale_as_float32(scale).reshape(scale.shape or (1,) * q.ndim)
    return (rounded * granularity.Aligned(q.block_size).expand(scale, rounded)).astype(q.dtype)


@functools.partial(jax.jit, static_argnames="spec")
def change_codes(q: QuantizedArray, spec: QuantSpec, change: jax.Array) -> tuple[QuantizedArray, jax.Array]:
    """Return the array with the codes that `dequantize_change` has rounded to, and how many of them have changed."""
    steps = _decode_steps(q) + _find_unit(spec) * change
    codes = encode_array(steps, jnp.ones((1,) * q.ndim), q.zero_point, spec)
    count = jnp.sum(codes.astype(jnp.int32) != q.codes.astype(jnp.int32))
    return q.replace(codes=codes), count


def _round_steps(q: QuantizedArray, spec: QuantSpec, steps: jax.Array) -> jax.Array:
    """Return the steps of the nearest codes, with the gradient of steps that are not rounded."""
    # `move_change` keeps them within the bounds, so that no gradient has to be 0.
    return fake_quantize(steps, spec, 1.0, q.zero_point, StraightThrough(clip=False))


def _decode_steps(q: QuantizedArray) -> jax.Array:
    """Return the values in steps, float32: codes without the zero point, or the levels of a codebook."""
    return q.replace(scale=jnp.ones((1,) * q.ndim), dtype=np.float32).dequantize()


def _find_unit(spec: QuantSpec) -> Any:
    """Return the length of a step: of a codebook, the mean distance of its levels."""
    if spec.codebook is None:
        return np.float32(1)
    levels = spec.codebook.levels
    return np.float32((levels[-1] - levels[0]) / (len(levels) - 1))
