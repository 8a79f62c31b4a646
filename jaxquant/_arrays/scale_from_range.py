"""Finds the shapes of ranges, and the scale and the zero point for a range, under a spec."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, division, dtypes, rounding, sharding, small_floats
from .._core import granularity as granularities
from .spec import QuantSpec

_ZERO, _ONE = np.float32(0), np.float32(1)
_TINY, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def find_shapes(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes, of x's rank, of the scale and of the zero point of an x of this shape."""
    points = spec.zero_point_granularity
    assert points is not None
    return (
        granularities.find_scale_shape(function, spec.granularity, shape),
        granularities.find_scale_shape(function, points, shape),
    )


def find_finest_shape(scale: tuple[int, ...], zero_point: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the ranges that a scale and a zero point come from; None where neither is the coarser."""
    pairs = tuple(zip(scale, zero_point, strict=True))
    if not all(s == z or 1 in (s, z) for s, z in pairs):
        return None
    if not (all(s in (1, z) for s, z in pairs) or all(z in (1, s) for s, z in pairs)):
        return None
    return tuple(z if s == 1 else s for s, z in pairs)


def find_range_shape(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the ranges of an x of this shape: the scale's, or the zero point's where that is finer."""
    found = find_finest_shape(*find_shapes(function, spec, shape))
    expected = "one granularity that is the coarser of the two"
    got = f"{spec.granularity} and {spec.zero_point_granularity}"
    checks.require(found is not None, function, "spec", expected, got)
    assert found is not None
    return found


def find_block_size(spec: QuantSpec) -> int | None:
    """Returns the length of the spec's blocks, of the scale's where the zero point's differ; None without blocks."""
    sizes = _list_block_sizes(spec)
    return sizes[0] if sizes else None


def check_one_block_size(function: str, spec: QuantSpec) -> int | None:
    """Requires blocks of one length, or none, and returns it."""
    sizes = sorted(set(_list_block_sizes(spec)))
    checks.require(len(sizes) < 2, function, "spec", "blocks of one size", f"sizes {sizes}")
    return find_block_size(spec)


def find_stored_block_size(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> int | None:
    """Returns the `block_size` that an array of this shape has: None where no dimension is cut into blocks.

    A dimension no longer than a block has one entry, which says by itself that all of it shares a scale.
    """
    is_cut = any(n not in (1, m) for n, m in zip(find_range_shape(function, spec, shape), shape, strict=True))
    return check_one_block_size(function, spec) if is_cut else None


def _list_block_sizes(spec: QuantSpec) -> list[int]:
    both = (spec.granularity, spec.zero_point_granularity)
    return [granularity.size for granularity in both if isinstance(granularity, granularities.Blocked)]


def find_scale_and_zero_point(
    spec: QuantSpec, low: jax.Array, high: jax.Array, scale_shape: tuple[int, ...], point_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (scale, zero_point) for float32 ranges; every argument has passed its contract.

    A range is widened to hold 0; one that is 0 has scale 1, and so has one of subnormal numbers, which XLA:CPU treats
    as 0. Any other has a scale that is a normal float32, the least one where the formula gives less. NaN and infinite
    ranges have such scales.

    Args:
        spec: Static.
        low: the lower ends, of the finer of the two shapes.
        high: the upper ends.
        scale_shape: Static. Of the scale.
        point_shape: Static. Of the zero point.

    Returns:
        The scale in `spec.scale_dtype`, and the zero point in `spec.carrier`, or None where it is 0 by the spec.
    """
    low, high = _widen_to_zero(low, -1), _widen_to_zero(high, 1)
    fixed = spec.fixed_zero_point
    if fixed is not None:
        scale = _round_scale_up(spec, _find_symmetric_scale(spec, low, high, float(fixed)))
        return scale, None if fixed == 0 else jnp.full(point_shape, fixed, spec.carrier)
    qmin, qmax = spec.bounds
    if scale_shape == low.shape != point_shape:  # a scale has less to share than a zero point
        pooled_low, pooled_high = _pool(low, point_shape, jnp.min), _pool(high, point_shape, jnp.max)
        point = _find_zero_point(spec, pooled_low, _find_asymmetric_scale(pooled_low, pooled_high, qmax - qmin))
        # A bound other than 0 needs a step on its side of the zero point, or no scale reaches it.
        floor = (pooled_low < 0).astype(jnp.int32) + np.int32(qmin)
        ceiling = np.int32(qmax) - (pooled_high > 0).astype(jnp.int32)
        point = jnp.clip(point.astype(jnp.int32), floor, ceiling).astype(spec.carrier)
        steps = _spread_like(point.astype(jnp.float32), low)
        scale = jnp.maximum(_divide_bound(low, np.float32(qmin) - steps), _divide_bound(high, np.float32(qmax) - steps))
        return _round_scale_up(spec, _guard_scale(scale, low, high)), point
    wide = _find_asymmetric_scale(low, high, qmax - qmin)
    if scale_shape != low.shape:  # each slice has its own zero point: what they share must span the widest
        wide = _pool(jnp.where(is_empty(low, high), _ZERO, wide), scale_shape, jnp.max)
        wide = jnp.where(wide == 0, _ONE, wide)
    scale = _round_scale_up(spec, wide)
    wide = small_floats.scale_as_float32(scale)
    return scale, _find_zero_point(spec, low, _spread_like(wide, low))


def _spread_like(value: jax.Array, like: jax.Array) -> jax.Array:
    return sharding.place_like(jnp.broadcast_to(value, like.shape), like)


def _widen_to_zero(bound: jax.Array, sign: int) -> jax.Array:
    """Returns a bound moved to 0 where it is on the other side; NaN stays."""
    outside = bound * np.float32(sign) < 0
    return jnp.where(outside, _ZERO, bound)


def _pool(values: jax.Array, shape: tuple[int, ...], reduce: object) -> jax.Array:
    axes = tuple(a for a, (n, expected) in enumerate(zip(values.shape, shape, strict=True)) if n != expected)
    result = reduce(values, axis=axes, keepdims=True)  # type: ignore[operator]
    nan = jnp.any(jnp.isnan(values), axis=axes, keepdims=True)  # XLA:CPU's own reductions lose it
    return jnp.where(nan, np.float32(np.nan), result)


def _divide_by_number(x: jax.Array, by: float) -> jax.Array:
    return division.divide(x, sharding.place_like(jnp.full(x.shape, by, jnp.float32), x))


def _divide_bound(bound: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns bound / steps, and 0 for no steps: a bound of 0 needs none."""
    none = steps == 0
    return jnp.where(none, _ZERO, division.divide(bound, jnp.where(none, _ONE, steps)))


def _find_symmetric_scale(spec: QuantSpec, low: jax.Array, high: jax.Array, fixed: float) -> jax.Array:
    least, most = spec.bounds
    largest = spec.codebook.largest if spec.codebook else most - fixed
    if spec.codebook or least - fixed == -largest:
        scale = _divide_by_number(jnp.maximum(-low, high), largest)
    else:
        scale = jnp.maximum(_divide_by_number(low, least - fixed), _divide_by_number(high, largest))
    return _guard_scale(scale, low, high)


def _find_asymmetric_scale(low: jax.Array, high: jax.Array, steps: float) -> jax.Array:
    # Halves, which are exact: the whole width may be more than a float32 holds.
    half = np.float32(0.5)
    return _guard_scale(_divide_by_number(high * half - low * half, steps / 2), low, high)


def _guard_scale(scale: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns a scale that is 1 for a range of 0, a normal number for any other, and NaN for a NaN."""
    scale = jnp.where(is_empty(low, high), _ONE, jnp.maximum(scale, _TINY))
    return jnp.where(jnp.isnan(low) | jnp.isnan(high), np.float32(np.nan), scale)


def is_empty(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns where a range holds nothing but 0 and subnormal numbers.

    XLA:CPU treats those as 0 when it runs a program, but not where it folds constants; other backends may not either.
    """
    return (jnp.abs(low) < _TINY) & (jnp.abs(high) < _TINY)


def find_least_scale(dtype: np.dtype) -> np.float32:
    """Returns the least positive scale of a dtype that is a normal float32: XLA:CPU treats smaller ones as 0."""
    return np.float32(max(float(jnp.finfo(dtype).smallest_subnormal), float(_TINY)))


def _find_zero_point(spec: QuantSpec, low: jax.Array, scale: jax.Array) -> jax.Array:
    qmin, qmax = (int(b) for b in spec.bounds)
    start = np.float32(qmin) - division.divide(low, scale)
    # As ONNX Runtime's DynamicQuantizeLinear: its clamp takes a NaN to the upper bound.
    start = jnp.where(jnp.isnan(start), np.float32(qmax), start)
    return rounding.encode_steps(start, None, spec.carrier, (qmin, qmax))


def _round_scale_up(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Returns a float32 scale rounded up to what the spec's scale can be."""
    if spec.power_of_two:
        scale = _round_to_power_of_two(scale)
    if spec.scale_dtype == dtypes.E8M0:
        return _encode_e8m0(scale)
    if spec.scale_dtype == dtypes.FLOAT32:
        return scale
    # What is beyond the dtype saturates; an infinity that came stays one.
    largest = np.float32(jnp.finfo(spec.scale_dtype).max)
    scale = jnp.where(jnp.isfinite(scale), jnp.minimum(scale, largest), scale)
    nearest = rounding.round_to_dtype(scale, spec.scale_dtype)
    bits = lax.bitcast_convert_type(nearest.astype(spec.scale_dtype), jnp.uint16)
    return lax.bitcast_convert_type(bits + (nearest < scale).astype(jnp.uint16), spec.scale_dtype)


def _round_to_power_of_two(scale: jax.Array) -> jax.Array:
    """Returns the least power of two that is not below a positive normal scale."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = ((bits + np.int32(0x7FFFFF)) >> 23) << 23
    power = lax.bitcast_convert_type(jnp.minimum(up, np.int32(254 << 23)), jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)


def _encode_e8m0(power: jax.Array) -> jax.Array:
    code = (lax.bitcast_convert_type(power, jnp.int32) >> 23) & 0xFF
    code = jnp.where(jnp.isfinite(power), code, 255)  # its NaN; it has no infinity
    return lax.bitcast_convert_type(code.astype(jnp.uint8), dtypes.E8M0)
