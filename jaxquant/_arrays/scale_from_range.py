"""The shapes of ranges, and the scale and zero point that a spec determines for a range."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from .._core import barriers, checks, division, dtypes, min_max, recording, rounding, sharding, small_floats
from .._core import granularity as granularities
from .spec import QuantSpec

_ZERO, _ONE = np.float32(0), np.float32(1)
_TINY, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max
_TINY_BITS, _INFINITY_BITS = _TINY.view(np.int32), np.float32(np.inf).view(np.int32)


def find_shapes(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the scale and of the zero point of an x of this shape; both have x's rank."""
    point_granularity = spec.zero_point_granularity
    assert point_granularity is not None
    return (
        granularities.find_scale_shape(function, spec.granularity, shape),
        granularities.find_scale_shape(function, point_granularity, shape),
    )


def find_finest_shape(scale: tuple[int, ...], zero_point: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the finer of the shapes of a scale and a zero point, which is that of their ranges, or None.

    The result is None if neither shape is finer in all dimensions.
    """
    # In each dimension the two lengths must be equal, or one of them must be 1.
    pairs = tuple(zip(scale, zero_point, strict=True))
    if not all(s == z or 1 in (s, z) for s, z in pairs):
        return None
    if not (all(s in (1, z) for s, z in pairs) or all(z in (1, s) for s, z in pairs)):
        return None
    return tuple(z if s == 1 else s for s, z in pairs)


def find_range_shape(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the ranges of an x of this shape: that of the scale or the zero point, whichever is finer."""
    range_shape = find_finest_shape(*find_shapes(function, spec, shape))
    if range_shape is None:
        expected = "granularities of scale and zero point of which one is at least as fine as the other"
        got = f"{spec.granularity} and {spec.zero_point_granularity}"
        checks.require(False, function, "spec", expected, got)
    assert range_shape is not None
    return range_shape


def find_block_size(spec: QuantSpec) -> int | None:
    """Return the block size of the scale, or else of the zero point; None if neither has blocks."""
    sizes = _list_block_sizes(spec)
    return sizes[0] if sizes else None


def check_one_block_size(function: str, spec: QuantSpec) -> int | None:
    """Check that all blocks of the spec have the same size, and return it; None without blocks."""
    sizes = sorted(set(_list_block_sizes(spec)))
    checks.require(len(sizes) < 2, function, "spec", "blocks of the same size", f"sizes {sizes}")
    return find_block_size(spec)


def find_stored_block_size(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> int | None:
    """Return the `block_size` that an array of this shape stores: None if no dimension is divided into blocks.

    A dimension that is not longer than a block has a single entry, which already shows that all of it shares a scale.
    """
    pairs = zip(find_range_shape(function, spec, shape), shape, strict=True)
    has_blocks = any(entries not in (1, length) for entries, length in pairs)
    return check_one_block_size(function, spec) if has_blocks else None


def _list_block_sizes(spec: QuantSpec) -> list[int]:
    """Return the block sizes of those of the scale and the zero point that have blocks, the scale first."""
    pair = (spec.granularity, spec.zero_point_granularity)
    return [granularity.size for granularity in pair if isinstance(granularity, granularities.Blocked)]


def find_scale_and_zero_point(
    spec: QuantSpec, low: jax.Array, high: jax.Array, scale_shape: tuple[int, ...], point_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point of float32 ranges; the arguments have been checked.

    A range is widened to include 0. A range that holds only 0 and subnormal numbers, which XLA:CPU treats as 0, gives
    scale 1. The scale of any other range is at least the least normal float32. A range with a NaN or an infinity gives
    a scale of NaN or infinity.

    Args:
        spec: Static. The spec of the scale and the zero point.
        low: the lower ends, in the finer of the two shapes.
        high: the upper ends, in the same shape.
        scale_shape: Static. The shape of the scale.
        point_shape: Static. The shape of the zero point.

    Returns:
        The scale in `spec.scale_dtype`, and the zero point in `spec.carrier`, or None if the spec fixes it to 0.
    """
    return barriers.compute_once(_find_scale_and_zero_point(spec, low, high, scale_shape, point_shape))


def _find_scale_and_zero_point(
    spec: QuantSpec, low: jax.Array, high: jax.Array, scale_shape: tuple[int, ...], point_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    # A code must represent 0 exactly, so that padding and ReLU stay exact.
    low, high = _widen_to_zero(low, -1), _widen_to_zero(high, 1)
    if spec.fixed_zero_point is not None:
        scale = _round_scale_up(spec, _find_symmetric_scale(spec, low, high, float(spec.fixed_zero_point)))
        return scale, _fill_zero_point(spec, point_shape, low)
    # From here on the zero point depends on the range.
    qmin, qmax = spec.bounds
    if scale_shape == low.shape != point_shape:  # several scales share a zero point
        pooled_low, pooled_high = _pool(low, point_shape, jnp.min), _pool(high, point_shape, jnp.max)
        # The zero point is that of the union of the ranges. Each scale must then reach both ends of its own range.
        point = _find_zero_point(spec, pooled_low, _find_asymmetric_scale(pooled_low, pooled_high, qmax - qmin))
        # If an end is not 0, there must be a code on its side of the zero point, or no scale would reach it.
        least = (pooled_low < 0).astype(jnp.int32) + np.int32(qmin)
        largest = np.int32(qmax) - (pooled_high > 0).astype(jnp.int32)
        point = jnp.clip(point.astype(jnp.int32), least, largest).astype(spec.carrier)
        steps = _spread_like(point.astype(jnp.float32), low)
        scale = jnp.maximum(_divide_bound(low, np.float32(qmin) - steps), _divide_bound(high, np.float32(qmax) - steps))
        return _round_scale_up(spec, _guard_scale(scale, low, high)), point
    wide = _find_asymmetric_scale(low, high, qmax - qmin)
    if scale_shape != low.shape:  # several zero points share a scale, which must span the widest range
        # The scale 1 of an empty range must not count in the maximum over the other ranges.
        wide = _pool(jnp.where(is_empty(low, high), _ZERO, wide), scale_shape, jnp.max)
        wide = jnp.where(wide == 0, _ONE, wide)
    # The zero point must be computed with the rounded scale that is stored.
    scale = _round_scale_up(spec, wide)
    wide = small_floats.scale_as_float32(scale)
    return scale, _find_zero_point(spec, low, _spread_like(wide, low))


def find_own_scale_and_zero_point(
    spec: QuantSpec, x: jax.Array, shape: tuple[int, ...], block_size: int | None, scale_shape: tuple[int, ...],
    point_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the scale and the zero point of the ranges of x; the arguments have been checked.

    The result is that of `find_scale_and_zero_point` for `min_max.find_extremes`.

    Args:
        spec: Static. The spec of the scale and the zero point.
        x: float32, float16 or bfloat16.
        shape: Static. The shape of the ranges, the finer of the two shapes.
        block_size: Static. The length of a block, or None.
        scale_shape: Static. The shape of the scale.
        point_shape: Static. The shape of the zero point.
    """
    # An exporter has operators for the extremes, and none for bits.
    is_symmetric = has_equal_reach(spec)
    is_pair = spec.fixed_zero_point is None and point_shape == shape
    if scale_shape != shape or not (is_symmetric or is_pair) or recording.is_recording():
        low, high = min_max.find_extremes(x, shape, block_size)
        return find_scale_and_zero_point(spec, low, high, scale_shape, point_shape)
    # The comparisons are made on the bits of the larger magnitude: with floats they take more operations. XLA compiles
    # these loops, without dimensions of 1, once for all arrays with as many ranges, whatever their rank.
    if is_symmetric:
        bits = min_max.find_magnitudes(x, shape, block_size)
        largest = lax.bitcast_convert_type(bits, jnp.float32)
        scale = _guard_scale_by_bits(_divide_by_number(largest, _find_reach(spec)), bits)
        scale = barriers.compute_once(_round_scale_up(spec, scale)).reshape(shape)
        return scale, _fill_zero_point(spec, point_shape, scale)
    low, high, bits = min_max.find_signed_extremes(x, shape, block_size)
    qmin, qmax = spec.bounds
    half = np.float32(0.5)
    scale = _divide_by_number(lax.sub(lax.mul(high, half), lax.mul(low, half)), (qmax - qmin) / 2)
    scale = _round_scale_up(spec, _guard_scale_by_bits(scale, bits))
    point = _find_zero_point(spec, low, small_floats.scale_as_float32(scale))
    scale, point = barriers.compute_once((scale, point))
    return scale.reshape(shape), point.reshape(shape)


def has_equal_reach(spec: QuantSpec) -> bool:
    """Return whether the codes of a spec with a fixed zero point reach equally far on both sides of it."""
    fixed = spec.fixed_zero_point
    return fixed is not None and (spec.codebook is not None or spec.bounds[0] - fixed == -_find_reach(spec))


def _find_reach(spec: QuantSpec) -> float:
    """Return the largest value that a spec with a fixed zero point represents, for a scale of 1."""
    return spec.codebook.largest if spec.codebook else spec.bounds[1] - float(spec.fixed_zero_point or 0)


def _fill_zero_point(spec: QuantSpec, point_shape: tuple[int, ...], like: jax.Array) -> jax.Array | None:
    """Return the fixed zero point of a spec, or None if it is 0."""
    fixed = spec.fixed_zero_point
    assert fixed is not None
    if fixed == 0:
        return None
    point = jnp.full(point_shape, fixed, spec.carrier)
    # Under shard_map, a barrier over both would make a constant vary on one platform only, which JAX refuses.
    is_mapped = AxisType.Manual in jax.typeof(like).sharding.mesh.axis_types
    return sharding.vary_like(point, like) if is_mapped else point


def _spread_like(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return a value broadcast to the shape and the sharding of another array."""
    return sharding.place_like(jnp.broadcast_to(value, like.shape), like)


def _widen_to_zero(bound: jax.Array, sign: int) -> jax.Array:
    """Return one end of a range, replaced by 0 if the range would not include 0; NaN stays NaN."""
    excludes_zero = lax.lt(lax.mul(bound, np.float32(sign)), _ZERO)
    return lax.select(excludes_zero, lax.full_like(bound, 0), bound)


def _pool(values: jax.Array, shape: tuple[int, ...], reduce: object) -> jax.Array:
    """Return values reduced to a coarser shape; a NaN among them gives a NaN."""
    axes = tuple(a for a, (n, length) in enumerate(zip(values.shape, shape, strict=True)) if n != length)
    result = reduce(values, axis=axes, keepdims=True)  # type: ignore[operator]
    # XLA:CPU's minimum and maximum may lose a NaN.
    has_nan = jnp.any(jnp.isnan(values), axis=axes, keepdims=True)
    return jnp.where(has_nan, np.float32(np.nan), result)


def _divide_by_number(x: jax.Array, divisor: float) -> jax.Array:
    """Return x / divisor, rounded correctly."""
    return division.divide(x, lax.full_like(x, divisor))


def _divide_bound(bound: jax.Array, steps: jax.Array) -> jax.Array:
    """Return bound / steps, or 0 if there are no steps, because the bound is then 0."""
    is_zero = steps == 0
    return jnp.where(is_zero, _ZERO, division.divide(bound, jnp.where(is_zero, _ONE, steps)))


def _find_symmetric_scale(spec: QuantSpec, low: jax.Array, high: jax.Array, fixed: float) -> jax.Array:
    """Return the scale of a spec whose zero point is fixed."""
    reach = _find_reach(spec)
    # One division suffices if the codes reach equally far on both sides of the zero point.
    if has_equal_reach(spec):
        scale = _divide_by_number(lax.max(lax.neg(low), high), reach)
    else:
        scale = lax.max(_divide_by_number(low, spec.bounds[0] - fixed), _divide_by_number(high, reach))
    return _guard_scale(scale, low, high)


def _find_asymmetric_scale(low: jax.Array, high: jax.Array, steps: float) -> jax.Array:
    """Return the scale at which the given number of steps spans the range."""
    # The difference of the ends may overflow float32, so it is computed from their halves, which are exact.
    half = np.float32(0.5)
    return _guard_scale(_divide_by_number(lax.sub(lax.mul(high, half), lax.mul(low, half)), steps / 2), low, high)


def _guard_scale(scale: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the scale, replaced by 1 for an empty range and by NaN for a range with a NaN, and raised if subnormal."""
    scale = lax.select(is_empty(low, high), lax.full_like(scale, 1), lax.max(scale, _TINY))
    has_nan = lax.bitwise_or(lax.ne(low, low), lax.ne(high, high))
    return lax.select(has_nan, lax.full_like(scale, np.nan), scale)


def _guard_scale_by_bits(scale: jax.Array, bits: jax.Array) -> jax.Array:
    """Return the same as `_guard_scale`, for the bits of the largest magnitude in each range."""
    scale = lax.select(lax.lt(bits, _TINY_BITS), lax.full_like(scale, 1), lax.max(scale, _TINY))
    return lax.select(lax.gt(bits, _INFINITY_BITS), lax.full_like(scale, np.nan), scale)


def is_empty(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return a mask of the ranges that include only 0 and subnormal numbers.

    XLA:CPU treats subnormal numbers as 0 in a running program but not in constant folding. Other backends may differ.
    """
    return lax.bitwise_and(lax.lt(lax.abs(low), _TINY), lax.lt(lax.abs(high), _TINY))


def find_least_scale(dtype: np.dtype) -> np.float32:
    """Return the least positive scale of a dtype that is a normal float32, because XLA:CPU treats smaller ones as 0."""
    return np.float32(max(float(jnp.finfo(dtype).smallest_subnormal), float(_TINY)))


def _find_zero_point(spec: QuantSpec, low: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the code of 0.0 for ranges whose lower end is `low`."""
    qmin, qmax = (int(b) for b in spec.bounds)
    start = lax.sub(np.float32(qmin), division.divide(low, scale))
    # A NaN becomes the upper bound, as in the clamp of ONNX Runtime's DynamicQuantizeLinear.
    start = lax.select(lax.ne(start, start), lax.full_like(start, qmax), start)
    return rounding.encode_steps(start, None, spec.carrier, (qmin, qmax))


def _round_scale_up(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Return a float32 scale rounded up to a scale that the spec allows, in its dtype."""
    if spec.power_of_two:
        scale = _round_to_power_of_two(scale)
    if spec.scale_dtype == dtypes.E8M0:
        return _encode_e8m0(scale)
    if spec.scale_dtype == dtypes.FLOAT32:
        return scale
    # A finite scale too large for the dtype saturates, but an infinity stays one.
    largest = np.float32(jnp.finfo(spec.scale_dtype).max)
    scale = jnp.where(jnp.isfinite(scale), jnp.minimum(scale, largest), scale)
    # If the nearest number is less than the scale, adding 1 to its bits gives the next larger one.
    nearest = rounding.round_to_dtype(scale, spec.scale_dtype)
    bits = lax.bitcast_convert_type(nearest.astype(spec.scale_dtype), jnp.uint16)
    return lax.bitcast_convert_type(bits + (nearest < scale).astype(jnp.uint16), spec.scale_dtype)


def _round_to_power_of_two(scale: jax.Array) -> jax.Array:
    """Return the least power of two that is not less than a positive normal scale."""
    # Adding all mantissa bits carries into the exponent unless the mantissa is 0.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    rounded_up = ((bits + np.int32(0x7FFFFF)) >> 23) << 23
    power = lax.bitcast_convert_type(jnp.minimum(rounded_up, np.int32(254 << 23)), jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)


def _encode_e8m0(power: jax.Array) -> jax.Array:
    """Return float32 powers of two as float8_e8m0fnu, whose code is the exponent of a float32."""
    code = (lax.bitcast_convert_type(power, jnp.int32) >> 23) & 0xFF
    # 255 is the NaN of float8_e8m0fnu, which has no infinity.
    code = jnp.where(jnp.isfinite(power), code, 255)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), dtypes.E8M0)
