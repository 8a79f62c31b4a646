"""The shapes of ranges, and the scale and zero point that a spec determines for a range."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from .._core import checks, dtypes, recording, sharding
from .._core import granularity as granularities
from .._kernels import affine, barriers, min_max
from . import scale_rules
from .spec import QuantSpec

_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
_TINY = np.finfo(np.float32).tiny
_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN
_TINY_BITS, _INFINITY_BITS = _TINY.view(np.int32), _INFINITY.view(np.int32)


def derive_shapes(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the scale and of the zero point of an x of this shape; both have x's rank.

    Every function that finds scales for a spec asks for them. So specs that only `quantize` supports are refused here.
    """
    checks.require(not spec.offset, function, "spec.offset", "False, because only jq.quantize finds offsets", True)
    expected = "None, because only jq.quantize quantizes scales"
    checks.require(spec.scale_spec is None, function, "spec.scale_spec", expected, spec.scale_spec)
    zero_point_granularity = spec.zero_point_granularity
    assert zero_point_granularity is not None
    return (
        granularities.derive_scale_shape(function, spec.granularity, shape),
        granularities.derive_scale_shape(function, zero_point_granularity, shape),
    )


def choose_finest_shape(scale: tuple[int, ...], zero_point: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the finer of the shapes of a scale and a zero point, which their ranges have, too, or None.

    The result is None if neither shape is finer in all dimensions.
    """
    # In each dimension the two lengths must be equal, or one of them must be 1.
    pairs = tuple(zip(scale, zero_point, strict=True))
    if not all(s == z or 1 in (s, z) for s, z in pairs):
        return None
    if not (all(s in (1, z) for s, z in pairs) or all(z in (1, s) for s, z in pairs)):
        return None
    return tuple(z if s == 1 else s for s, z in pairs)


def derive_range_shape(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the ranges of an x of this shape: the finer of scale.shape and zero_point.shape."""
    range_shape = choose_finest_shape(*derive_shapes(function, spec, shape))
    if range_shape is None:
        expected = "granularities of scale and zero point, one of them at least as fine as the other"
        got = f"{spec.granularity} and {spec.zero_point_granularity}"
        checks.refuse(function, "spec", expected, got)
    assert range_shape is not None
    return range_shape


def derive_block_size(spec: QuantSpec) -> int | None:
    """Return the block size of the scale, or else of the zero point; None if neither has blocks."""
    pair = (spec.granularity, spec.zero_point_granularity)
    sizes = [granularity.size for granularity in pair if isinstance(granularity, granularities.Blocked)]
    for size in sizes:
        if isinstance(size, tuple):
            expected = "blocks with the same size along each axis, because only jq.quantize takes others"
            checks.refuse("QuantSpec", "granularity", expected, size)
    return next((size for size in sizes if isinstance(size, int)), None)


def check_block_sizes(function: str, spec: QuantSpec, rank: int) -> granularities.BlockSize:
    """Return the block size of the scale and the zero point, or the sizes along the last axes if they differ.

    Raise unless the scale and the zero point have the same, as far as they have blocks.
    """
    blocks = [g for g in (spec.granularity, spec.zero_point_granularity) if isinstance(g, granularities.Blocked)]
    sizes = {granularity.size for granularity in blocks}
    if not any(isinstance(size, tuple) for size in sizes):
        got = f"sizes {sorted(size for size in sizes if isinstance(size, int))}"
        checks.require(len(sizes) < 2, function, "spec", "blocks of the same size", got)
        return derive_block_size(spec)
    kept = {granularity.list_sizes(rank) for granularity in blocks}
    checks.require(len(kept) == 1, function, "spec", "blocks of the same size", f"sizes {sorted(kept)}")
    return granularities.shorten_block_size(kept.pop())


def derive_stored_block_size(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> granularities.BlockSize:
    """Return the `block_size` that an array of this shape stores: None if no dimension is divided into blocks.

    A dimension that is not longer than a block has a single entry, which already shows that all of it shares a scale.
    """
    entries = derive_range_shape(function, spec, shape)
    is_cut = [count not in (1, length) for count, length in zip(entries, shape, strict=True)]
    size = check_block_sizes(function, spec, len(shape)) if any(is_cut) else None
    if not isinstance(size, tuple):
        return size
    full = (1,) * (len(shape) - len(size)) + size
    return granularities.shorten_block_size(tuple(n if cut else 1 for n, cut in zip(full, is_cut, strict=True)))


def compute_scale_and_zero_point(
    spec: QuantSpec, low: jax.Array, high: jax.Array, scale_shape: tuple[int, ...], zero_point_shape: tuple[int, ...],
    dtype: np.dtype = dtypes.FLOAT32,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the scale and the zero point of float32 ranges; the arguments have been checked.

    A range is widened to include 0. A range that holds only 0 and subnormal numbers, which XLA:CPU treats as 0, gives
    scale 1. The scale of any other range is at least the least normal float32. A range with a NaN or an infinity gives
    a scale of NaN or infinity, and so does a range that needs a larger scale than `spec.scale_dtype` has.

    If a code would stand for a number that `dtype` cannot hold, the scale is the largest for which none does, and the
    ends of the range saturate. A scale that is a power of two may be almost twice as large as the range needs: it is
    reduced only if an end of the range would become infinite.

    Args:
        spec: Static. The spec of the scale and the zero point.
        low: the lower ends, in the finer of the two shapes.
        high: the upper ends, in the same shape.
        scale_shape: Static. The shape of the scale.
        zero_point_shape: Static. The shape of the zero point.
        dtype: Static. The dtype of the dequantized values: float32, float16 or bfloat16.

    Returns:
        The scale in `spec.scale_dtype`, and the zero point in `spec.carrier`, or None if the spec fixes it to 0.
    """
    return barriers.compute_once(_compute_from_ranges(spec, low, high, scale_shape, zero_point_shape, dtype))


def _compute_from_ranges(
    spec: QuantSpec, low: jax.Array, high: jax.Array, scale_shape: tuple[int, ...], zero_point_shape: tuple[int, ...],
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    # A code must represent 0 exactly, so that padding and ReLU stay exact.
    low, high = _widen_to_zero(low, -1), _widen_to_zero(high, 1)
    if spec.fixed_zero_point is not None:
        scale = _round_scale_up(spec, _compute_symmetric_scale(spec, low, high, float(spec.fixed_zero_point), dtype))
        return scale, _fill_zero_point(spec, zero_point_shape, low)
    # From here on the zero point depends on the range.
    qmin, qmax = spec.bounds
    if scale_shape == low.shape != zero_point_shape:  # several scales share a zero point
        pooled_low, pooled_high = _pool(low, zero_point_shape, jnp.min), _pool(high, zero_point_shape, jnp.max)
        # The zero point belongs to the union of the ranges. Each scale must then reach both ends of its own range.
        zero_point = _compute_zero_point(
            spec, pooled_low, _compute_asymmetric_scale(pooled_low, pooled_high, qmax - qmin)
        )
        # If an end is not 0, there must be a code on its side of the zero point, or no scale would reach it.
        least = (pooled_low < 0).astype(jnp.int32) + np.int32(qmin)
        largest = np.int32(qmax) - (pooled_high > 0).astype(jnp.int32)
        zero_point = jnp.clip(zero_point.astype(jnp.int32), least, largest).astype(spec.carrier)
        steps = _spread_like(zero_point.astype(jnp.float32), low)
        scale = jnp.maximum(_divide_bound(low, np.float32(qmin) - steps), _divide_bound(high, np.float32(qmax) - steps))
        scale = _round_scale_up(spec, _guard_scale(scale, low, high))
        scale, _ = _keep_finite(spec, scale, _spread_like(zero_point, low), low, high, None, dtype)
        return scale, zero_point
    own = wide = _compute_asymmetric_scale(low, high, qmax - qmin)
    if scale_shape != low.shape:  # several zero points share a scale, which must span the widest range
        # The scale 1 of an empty range must not count in the maximum over the other ranges.
        wide = _pool(jnp.where(is_empty(low, high), _ZERO, wide), scale_shape, jnp.max)
        wide = jnp.where(wide == 0, _ONE, wide)
    # The zero point must be computed with the rounded scale that is stored.
    scale = _round_scale_up(spec, wide)
    zero_point = _compute_zero_point(spec, low, _spread_like(dtypes.scale_as_float32(scale), low))
    return _keep_finite(spec, scale, zero_point, low, high, own, dtype)


def compute_own_scale_and_zero_point(
    spec: QuantSpec, x: jax.Array, shape: tuple[int, ...], block_size: granularities.BlockSize,
    scale_shape: tuple[int, ...], zero_point_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return the scale and the zero point of the ranges of x; the arguments have been checked.

    The result equals `compute_scale_and_zero_point` for `min_max.compute_extremes` and the dtype of x.

    Args:
        spec: Static. The spec of the scale and the zero point.
        x: float32, float16 or bfloat16.
        shape: Static. The shape of the ranges, the finer of the two shapes.
        block_size: Static. The length of a block, one for each of the last dimensions, or None.
        scale_shape: Static. The shape of the scale.
        zero_point_shape: Static. The shape of the zero point.
    """
    # An exporter has operators for the extremes, and none for bits.
    is_symmetric = has_equal_reach(spec)
    is_pair = spec.fixed_zero_point is None and zero_point_shape == shape
    if scale_shape != shape or not (is_symmetric or is_pair) or recording.is_recording():
        low, high = min_max.compute_extremes(x, shape, block_size)
        return compute_scale_and_zero_point(spec, low, high, scale_shape, zero_point_shape, x.dtype)
    # The comparisons are made on the bits of the larger magnitude: with floats they take more operations. XLA compiles
    # these loops, without dimensions of 1, once for all arrays with as many ranges, whatever their rank.
    if is_symmetric:
        bits = min_max.compute_magnitudes(x, shape, block_size)
        largest = lax.bitcast_convert_type(bits, jnp.float32)
        scale = _divide_by_number(largest, _compute_reach(spec))
        scale = _guard_scale_by_bits(_choose_scale(spec, scale, largest, (largest, largest), x.dtype), bits)
        scale = barriers.compute_once(_round_scale_up(spec, scale)).reshape(shape)
        return scale, _fill_zero_point(spec, zero_point_shape, scale)
    low, high, bits = min_max.compute_signed_extremes(x, shape, block_size)
    qmin, qmax = spec.bounds
    half = np.float32(0.5)
    scale = _divide_by_number(lax.sub(lax.mul(high, half), lax.mul(low, half)), (qmax - qmin) / 2)
    own = _guard_scale_by_bits(scale, bits)
    scale = _round_scale_up(spec, own)
    zero_point = _compute_zero_point(spec, low, dtypes.scale_as_float32(scale))
    parts = _keep_finite(spec, scale, zero_point, low, high, own, x.dtype)
    scale, zero_point = barriers.compute_once(parts)
    return scale.reshape(shape), zero_point.reshape(shape)


# Ranges that begin at an offset.


def compute_offset(spec: QuantSpec, low: jax.Array) -> jax.Array:
    """Return the offsets of float32 ranges: their lower ends, in the dtype of the scale.

    Without elements, a range has the offset 0. A range with offsets in unsigned codes begins at 0 or below.
    """
    low = lax.select(lax.eq(low, _INFINITY), lax.full_like(low, 0), low)
    if spec.scale_spec is not None:
        return _widen_to_zero(low, -1) if spec.scale_spec.fixed_zero_point is None else low
    dtype = dtypes.FLOAT32 if spec.scale_dtype == dtypes.E8M0 else spec.scale_dtype
    if dtype == dtypes.BFLOAT16:  # its largest number is less than float32's
        largest = np.float32(jnp.finfo(dtype).max)
        low = lax.select(lax.lt(lax.abs(low), _INFINITY), lax.clamp(-largest, low, largest), low)
    return affine.round_to_dtype(low, dtype).astype(dtype)


def choose_factor(offset: jax.Array) -> jax.Array:
    """Return 1/2 where the difference of a number from a float32 offset may overflow, and 1 elsewhere."""
    return jnp.where(lax.ge(lax.abs(offset), np.float32(2.0**125)), np.float32(0.5), _ONE)


def compute_scale_above(
    spec: QuantSpec, offset: jax.Array, high: jax.Array, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the scale with which codes from 0 reach from an offset to the upper end, and a mask of empty ranges.

    Args:
        spec: Static. A spec with offsets.
        offset: the offsets as they are stored, in float32.
        high: the upper ends, float32.
        dtype: Static. The dtype of the dequantized values, which must be finite for a finite range.
    """
    factor, steps = choose_factor(offset), float(spec.bounds[1])
    span = lax.sub(lax.mul(high, factor), lax.mul(offset, factor))
    # An offset that was rounded up may be above all of its range.
    span = lax.select(lax.lt(span, _ZERO), lax.full_like(span, 0), span)
    own = lax.div(_divide_by_number(span, steps), factor)
    # A product of a scale and a code must not overflow float32, though its sum with the offset would not.
    most = np.float32(_compute_largest_product(dtypes.FLOAT32) / np.float32(steps))
    own = lax.select(lax.lt(high, _INFINITY), lax.min(own, most), own)
    own = _guard_scale(own, lax.full_like(span, 0), span)
    scale = _round_scale_up(spec, own)
    top = lax.add(barriers.round_result(lax.mul(dtypes.scale_as_float32(scale), np.float32(steps))), offset)
    overflows = lax.bitwise_and(lax.ge(top, _compute_least_overflow(dtype)), lax.lt(high, _INFINITY))
    overflows = lax.bitwise_and(overflows, lax.lt(own, _INFINITY))
    lower = _encode_scale(spec, _round_down(spec, lax.mul(own, np.float32(1 - 2.0**-22))))
    return jnp.where(overflows, lower, scale), lax.lt(span, _TINY)


# Scales and offsets that are quantized themselves.


def limit_entry_scale(spec: QuantSpec, scale: jax.Array, reach: float, dtype: np.dtype) -> jax.Array:
    """Return a scale of scales or of offsets, limited so that no value becomes infinite.

    Args:
        spec: Static. How the scales or the offsets are quantized.
        scale: in `spec.scale_dtype`. A scale that is not finite stays so.
        reach: Static. The largest number that an entry is multiplied with: 1 for an offset.
        dtype: Static. The dtype of the dequantized values.
    """
    wide, most = dtypes.scale_as_float32(scale), _compute_largest_scale(spec, dtype, reach)
    is_above = lax.bitwise_and(lax.gt(wide, most), lax.lt(wide, _INFINITY))
    return jnp.where(is_above, _encode_scale(spec, lax.full_like(wide, most)), scale)


def compute_largest_difference(spec: QuantSpec, scale: jax.Array, offset: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the difference from an offset of the largest code whose value is finite in the dtype.

    Args:
        spec: Static. A spec with offsets.
        scale: the scales as they are stored, in float32.
        offset: the offsets, of the same shape.
        dtype: Static. The dtype of the dequantized values.
    """
    largest = float(_compute_largest_product(dtype))
    if dtype != dtypes.FLOAT32:  # the errors of a quotient and a product in float32
        largest = float(_compute_least_overflow(dtype)) * (1 - 2.0**-20)
    qmax = np.float32(spec.bounds[1])
    steps = lax.floor(affine.divide(lax.sub(np.float32(largest), offset), scale))
    # The scale and the offset of a range that is not finite make the quotient a NaN.
    steps = jnp.where(jnp.isnan(steps), qmax, lax.clamp(_ZERO, steps, qmax))
    return barriers.round_result(lax.mul(steps, scale))


def has_equal_reach(spec: QuantSpec) -> bool:
    """Return whether the codes of a spec with a fixed zero point reach equally far on both sides of it."""
    fixed = spec.fixed_zero_point
    return fixed is not None and (spec.codebook is not None or spec.bounds[0] - fixed == -_compute_reach(spec))


def compute_largest_magnitude(spec: QuantSpec) -> float:
    """Return the largest magnitude that a spec with a fixed zero point represents, for a scale of 1."""
    reach = _compute_reach(spec)
    return reach if has_equal_reach(spec) else max(reach, float(spec.fixed_zero_point or 0) - spec.bounds[0])


def _compute_reach(spec: QuantSpec) -> float:
    """Return the largest value that a spec with a fixed zero point represents, for a scale of 1."""
    return spec.codebook.largest if spec.codebook else spec.bounds[1] - float(spec.fixed_zero_point or 0)


def _fill_zero_point(spec: QuantSpec, zero_point_shape: tuple[int, ...], like: jax.Array) -> jax.Array | None:
    """Return the fixed zero point of a spec, or None if it is 0."""
    fixed = spec.fixed_zero_point
    assert fixed is not None
    if fixed == 0:
        return None
    zero_point = jnp.full(zero_point_shape, fixed, spec.carrier)
    # Under shard_map, a barrier over both would make a constant vary on one platform only, which JAX refuses.
    is_mapped = AxisType.Manual in jax.typeof(like).sharding.mesh.axis_types
    return sharding.vary_like(zero_point, like) if is_mapped else zero_point


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
    return affine.divide(x, lax.full_like(x, divisor))


def _divide_bound(bound: jax.Array, steps: jax.Array) -> jax.Array:
    """Return bound / steps, or 0 if there are no steps, because the bound is then 0."""
    is_zero = steps == 0
    return jnp.where(is_zero, _ZERO, affine.divide(bound, jnp.where(is_zero, _ONE, steps)))


def _compute_symmetric_scale(
    spec: QuantSpec, low: jax.Array, high: jax.Array, fixed: float, dtype: np.dtype
) -> jax.Array:
    """Return the scale of a spec with a fixed zero point."""
    reach, largest = _compute_reach(spec), lax.max(lax.neg(low), high)
    # One division suffices if the codes reach equally far on both sides of the zero point.
    if has_equal_reach(spec):
        scale = _divide_by_number(largest, reach)
    else:
        scale = lax.max(_divide_by_number(low, spec.bounds[0] - fixed), _divide_by_number(high, reach))
    ends = (largest, largest) if has_equal_reach(spec) else (lax.neg(low), high)
    return _guard_scale(_choose_scale(spec, scale, largest, ends, dtype), low, high)


def _choose_scale(
    spec: QuantSpec, scale: jax.Array, largest: jax.Array, ends: tuple[jax.Array, jax.Array], dtype: np.dtype
) -> jax.Array:
    """Return the float32 scale of a spec with a fixed zero point, before it is guarded and rounded to its dtype.

    Args:
        spec: Static. A spec with a fixed zero point.
        scale: the scale at which the ends of the range have the outermost codes.
        largest: the larger magnitude of the ends.
        ends: the magnitudes of the lower and of the upper end.
        dtype: Static. The dtype of the dequantized values.
    """
    if spec.scale_rule is None:
        return _limit_scale(spec, scale, *ends, dtype)
    return scale_rules.compute_power(spec.scale_rule, largest, scale, spec.dtype, dtype)


# Scales with which no code stands for an infinity.


def _limit_scale(spec: QuantSpec, scale: jax.Array, below: jax.Array, above: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the float32 scale of a spec with a fixed zero point, limited so that no value becomes infinite.

    Args:
        spec: Static. A spec with a fixed zero point.
        scale: the scale, before it is rounded up to the scale's dtype.
        below: the magnitude of the lower end of each range.
        above: the distance of the upper end. An infinite end keeps its scale.
        dtype: Static. The dtype of the dequantized values.
    """
    is_finite = lax.bitwise_and(lax.lt(below, _INFINITY), lax.lt(above, _INFINITY))
    if not spec.power_of_two:
        return lax.select(is_finite, lax.min(scale, _compute_largest_scale(spec, dtype)), scale)
    # The scale may be almost twice as large as the range needs, so that not every code is used.
    ends = zip((below, above), _compute_first_overflows(spec, dtype), strict=True)
    overflows = functools.reduce(lax.bitwise_or, [lax.ge(end, first) for end, first in ends])
    overflows = lax.bitwise_and(overflows, is_finite)
    return lax.select(overflows, lax.full_like(scale, _compute_largest_scale(spec, dtype)), scale)


def _keep_finite(
    spec: QuantSpec, scale: jax.Array, zero_point: jax.Array, low: jax.Array, high: jax.Array, own: jax.Array | None,
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the scale and the zero point, both changed where a value of the range would become infinite.

    The end that is farther from 0 then has the largest finite value of its side.

    Args:
        spec: Static. A spec with zero points that depend on the ranges.
        scale: in `spec.scale_dtype`; several ranges may share an entry.
        zero_point: the zero points, in the shape of the ranges.
        low: the lower ends of the ranges, at most 0.
        high: the upper ends, at least 0.
        own: the scale that each range needs, before it is rounded; None if the zero points must stay as they are.
        dtype: Static. The dtype of the dequantized values.
    """
    is_shared, is_power = scale.shape != low.shape, spec.power_of_two
    step = _spread_like(dtypes.scale_as_float32(scale), low)
    down, up = _count_steps(spec, zero_point)
    used, largest = lax.max(down, up), lax.max(lax.neg(low), high)
    if is_shared or is_power:  # not every code is used
        ends = ((lax.neg(low), down), (high, up))
        below, above = (lax.min(lax.round(affine.divide(e, step), _TO_EVEN), n) for e, n in ends)
        used = lax.max(below, above)
    # A scale that is too large for its dtype is infinite already, and stays so.
    is_finite = lax.bitwise_and(lax.lt(largest, _INFINITY), lax.lt(step, _INFINITY))
    overflows = lax.bitwise_and(lax.ge(lax.mul(used, step), _compute_least_overflow(dtype)), is_finite)
    moved, most = zero_point, used
    if own is not None and (is_power or (spec.scale_dtype != dtypes.FLOAT32 and not is_shared)):
        # With the zero point of a scale that was rounded up, one end would have too few codes.
        moved = _compute_zero_point(spec, low, own)
    if is_power:
        most = lax.max(*_count_steps(spec, moved))
        # The zero point of a range that is narrower than another one with its scale may be one step away.
        most = lax.add(most, _ONE) if is_shared else most
    elif is_shared and spec.scale_dtype == dtypes.FLOAT32:  # a smaller scale may take one more step
        most = lax.min(lax.max(down, up), lax.add(used, _ONE))
    elif is_shared:  # rounding the smaller scale may take many more
        most = lax.max(down, up)
    elif moved is not zero_point:
        most = lax.max(*_count_steps(spec, moved))
    limit = affine.divide(lax.full_like(most, _compute_largest_product(dtype)), lax.max(most, _ONE))
    limit = _round_down(spec, limit)
    if is_shared:
        # Only ranges that reach this far can overflow with a smaller scale, too.
        is_far = lax.ge(largest, np.float32(_compute_largest_product(dtype) / 2))
        limit = _pool(jnp.where(is_far, limit, _INFINITY), scale.shape, jnp.min)
        overflows = _pool(overflows.astype(jnp.float32), scale.shape, jnp.max) > 0
    result = jnp.where(overflows, _encode_scale(spec, limit), scale)
    if moved is zero_point or own is None:
        return result, zero_point
    if is_shared:
        overflows, limit = _spread_like(overflows, low), _spread_like(limit, low)
        moved = _compute_zero_point(spec, low, lax.max(limit, own))
    return result, jnp.where(overflows, moved, zero_point)


def _count_steps(spec: QuantSpec, zero_point: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of codes below and above zero points, float32."""
    steps = zero_point.astype(jnp.int32).astype(jnp.float32)
    qmin, qmax = (np.float32(bound) for bound in spec.bounds)
    return lax.sub(steps, qmin), lax.sub(qmax, steps)


def _compute_largest_product(dtype: np.dtype) -> np.float32:
    """Return a float32 that is finite in the dtype, even after the errors of a quotient and a product."""
    # Only float32 has no margin between its largest number and the numbers that round to infinity.
    return np.float32(float(jnp.finfo(dtype).max) * (1 - 2.0**-22 if dtype == dtypes.FLOAT32 else 1))


def _compute_least_overflow(dtype: np.dtype) -> np.float32:
    """Return the least float32 that rounds to infinity in the dtype."""
    info = jnp.finfo(dtype)
    # Halfway between the largest number and the next power of two, which counts as even.
    return _INFINITY if dtype == dtypes.FLOAT32 else np.float32(float(info.max) + 2.0 ** (info.maxexp - info.nmant - 2))


@functools.cache
def _compute_largest_scale(spec: QuantSpec, dtype: np.dtype, factor: float = 1) -> np.float32:
    """Return the largest scale, for a fixed zero point, at which every code times a factor is finite in the dtype.

    Codes that begin at 0 count as codes with the zero point 0.
    """
    most = compute_largest_magnitude(spec) * factor
    largest = float(np.finfo(np.float32).max)
    start = np.float32(min(float(_compute_largest_product(dtype)) * (1 + 2.0**-20) / most, largest))
    unit = 1 << _count_dropped_bits(spec)
    bits = int(start.view(np.int32)) // unit * unit
    with np.errstate(over="ignore"):
        while np.float32(float(np.int32(bits).view(np.float32)) * most) >= _compute_least_overflow(dtype):
            bits -= unit
    return np.int32(bits).view(np.float32)


@functools.cache
def _compute_first_overflows(spec: QuantSpec, dtype: np.dtype) -> tuple[np.float32, np.float32]:
    """Return the least magnitudes of a lower and of an upper end that become infinite with powers of two as scales.

    The spec has a fixed zero point. The largest scale is the power of two for the largest number of the dtype.
    """
    below, above = (_compute_first_overflow(levels, tie_up, dtype) for levels, tie_up in _list_sides(spec))
    if has_equal_reach(spec):  # the ends are not told apart
        below = above = min(below, above)
    return below, above


def _compute_first_overflow(levels: np.ndarray, ties_up: np.ndarray, dtype: np.dtype) -> np.float32:
    """Return the least end that becomes infinite, for the values of the codes on its side of 0, in ascending order."""
    reach = levels[-1]
    least = float(_compute_least_overflow(dtype))
    least = 2.0**128 - 2.0**103 if np.isinf(least) else least  # the float64 that float32 rounds to infinity
    # 2**127 is the largest power of two in float32.
    exponent = min(int(np.ceil(np.log2(float(jnp.finfo(dtype).max) / reach))), 127)
    scale = 2.0**exponent
    (beyond,) = np.nonzero(levels * scale >= least)
    if not beyond.size or not beyond[0]:
        return _INFINITY
    first = int(beyond[0])
    middle = (levels[first - 1] + levels[first]) / 2 * scale
    with np.errstate(over="ignore"):  # no float32 reaches the middle
        result = np.float32(middle)
    result = result if ties_up[first - 1] else np.nextafter(result, _INFINITY)
    # A range up to here has a smaller scale.
    return max(result, np.nextafter(np.float32(reach * scale / 2), _INFINITY))


def _list_sides(spec: QuantSpec) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the magnitudes of the codes below and above 0, and whether a tie with the next one takes the next one."""
    fixed = spec.fixed_zero_point
    assert fixed is not None
    if spec.codebook is not None:
        levels = np.asarray(spec.codebook.ascending, np.float64)
        below, above = np.append(0, -levels[levels < 0][::-1]), np.append(0, levels[levels > 0])
        # A tie takes the lower level.
        return [(below, np.ones(below.size, bool)), (above, np.zeros(above.size, bool))]
    if spec.dtype in dtypes.SMALL_FLOATS:
        codes = np.arange(2 ** (dtypes.count_packed_bits(spec.dtype) - 1), dtype=np.uint8)
        levels = codes.view(spec.dtype).astype(np.float64)
        levels = levels[np.isfinite(levels)]
        return [(levels, np.arange(levels.size) % 2 == 1)] * 2
    counts = (int(fixed - spec.bounds[0]), int(spec.bounds[1] - fixed))
    return [(np.arange(n + 1, dtype=np.float64), np.arange(n + 1) % 2 == 1) for n in counts]


def _count_dropped_bits(spec: QuantSpec) -> int:
    """Return how many of the last bits of a float32 a scale of the spec does not have."""
    return 23 if spec.power_of_two else {dtypes.FLOAT16: 13, dtypes.BFLOAT16: 16}.get(spec.scale_dtype, 0)


def _round_down(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Return a large float32 scale rounded down to one that the spec allows."""
    dropped = _count_dropped_bits(spec)
    if not dropped:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type(bits & np.int32(-(1 << dropped)), jnp.float32)


def _encode_scale(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Return a float32 scale that the spec allows in its dtype."""
    return _encode_e8m0(scale) if spec.scale_dtype == dtypes.E8M0 else scale.astype(spec.scale_dtype)


def _compute_asymmetric_scale(low: jax.Array, high: jax.Array, steps: float) -> jax.Array:
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


def read_least_scale(dtype: np.dtype) -> np.float32:
    """Return the least positive scale of a dtype that is a normal float32, because XLA:CPU treats smaller ones as 0."""
    return np.float32(max(float(jnp.finfo(dtype).smallest_subnormal), float(_TINY)))


def _compute_zero_point(spec: QuantSpec, low: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the code of 0.0 for ranges with the lower end `low`."""
    qmin, qmax = (int(b) for b in spec.bounds)
    start = lax.sub(np.float32(qmin), affine.divide(low, scale))
    # A NaN becomes the upper bound, as in the clamp of ONNX Runtime's DynamicQuantizeLinear.
    start = lax.select(lax.ne(start, start), lax.full_like(start, qmax), start)
    return affine.encode_steps(start, None, spec.carrier, (qmin, qmax))


def _round_scale_up(spec: QuantSpec, scale: jax.Array) -> jax.Array:
    """Return a float32 scale rounded up to a scale that the spec allows, in its dtype."""
    if spec.power_of_two:
        scale = _round_to_power_of_two(scale)
    if spec.scale_dtype == dtypes.E8M0:
        return _encode_e8m0(scale)
    if spec.scale_dtype == dtypes.FLOAT32:
        return scale
    if spec.scale_dtype == dtypes.BFLOAT16:  # its largest number is less than float32's
        largest = np.float32(jnp.finfo(dtypes.BFLOAT16).max)
        scale = lax.select(lax.lt(scale, _INFINITY), lax.min(scale, largest), scale)
    return _round_up_to_half(scale, spec.scale_dtype)


@recording.mark("round_up_to_half", lambda scale, dtype: (scale.shape, dtype), recording.map_elements)
def _round_up_to_half(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return positive float32 scales as the least numbers of float16 or bfloat16 that are not less."""
    # If the nearest number is less than the scale, adding 1 to its bits gives the next larger one: infinity after the
    # largest number. A scale beyond float16 becomes infinite, since the largest number would saturate unnoticed.
    nearest = affine.round_to_dtype(scale, dtype)
    bits = lax.bitcast_convert_type(nearest.astype(dtype), jnp.uint16)
    return lax.bitcast_convert_type(bits + (nearest < scale).astype(jnp.uint16), dtype)


@recording.mark("round_to_power_of_two", lambda scale: (scale.shape, jnp.float32), recording.map_elements)
def _round_to_power_of_two(scale: jax.Array) -> jax.Array:
    """Return the least power of two that is not less than a positive normal scale."""
    # Adding all mantissa bits carries into the exponent unless the mantissa is 0.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    rounded_up = ((bits + np.int32(0x7FFFFF)) >> 23) << 23
    power = lax.bitcast_convert_type(jnp.minimum(rounded_up, np.int32(254 << 23)), jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)


@recording.mark("encode_e8m0", lambda power: (power.shape, dtypes.E8M0), recording.map_elements)
def _encode_e8m0(power: jax.Array) -> jax.Array:
    """Return float32 powers of two as float8_e8m0fnu. Its code is the exponent field of a float32."""
    code = (lax.bitcast_convert_type(power, jnp.int32) >> 23) & 0xFF
    # 255 is the NaN of float8_e8m0fnu, which has no infinity.
    code = jnp.where(jnp.isfinite(power), code, 255)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), dtypes.E8M0)
