"""The calibrators without a histogram: `minmax`, `absmax` and `moving_average`."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, sharding
from .._kernels import affine, barriers, min_max
from . import calibrator
from .calibrator import Calibrator, Parts, Range


class ExtremesState(NamedTuple):
    """The least and the largest value of each slice so far, float32; (inf, -inf) without data, NaN after a NaN."""

    low: jax.Array
    high: jax.Array


class AverageState(NamedTuple):
    """The averages of the least and of the largest value of each slice, and the sum of the weights; all float32.

    A batch that n other batches followed has the weight (1 - decay) * decay**n.
    """

    low: jax.Array
    high: jax.Array
    weight: jax.Array


for _state in (ExtremesState, AverageState):
    export.register_namedtuple_serialization(_state, serialized_name=f"jaxquant.{_state.__name__}")


def minmax(spec: QuantSpec) -> Calibrator:
    """Return a calibrator for the smallest range that holds all the data.

    (lo, hi) = (min(x), max(x)) over all batches

    The values are exactly those of numpy. A NaN in the data makes the range NaN and makes `finalize` raise an error.
    The range may lie on one side of 0; `quantize` then widens it to include 0. Each batch is read once. The state is
    two float32 numbers per slice.

    Args:
        spec: how to quantize. Only its granularity matters here.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec. `update`: the batch is not an array of a float dtype. Any function of the
            calibrator: the state comes from a different calibrator.
        ValueError: `init`: an axis of the spec is out of range. `update`: the slices of the batch do not match those of
            the state. `finalize`: a slice has no data, a NaN, an infinity, or (without allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.calibration.minmax(jq.QuantSpec(jnp.uint8, jq.PerAxis(1)))
        >>> state = cal.init(jnp.zeros((2, 2)))
        >>> for batch in (jnp.array([[-0.5, 1.0], [2.05, 3.0]]), jnp.array([[0.0, 0.0]])):
        ...     state = cal.update(state, batch)
        >>> cal.finalize(state)
        Range(lo=Array([[-0.5,  0. ]], dtype=float32), hi=Array([[2.05, 3.  ]], dtype=float32))
        >>> jq.quantize(jnp.array([[-9.0, 1.5], [9.0, 9.0]]), jq.QuantSpec(jnp.uint8, jq.PerAxis(1)),
        ...             range=cal.finalize(state)).codes
        Array([[  0, 128],
               [255, 255]], dtype=uint8)

    Source: ONNX Runtime's MinMaxCalibrater; torch's MinMaxObserver and PerChannelMinMaxObserver.
    """
    return _build("calibration.minmax", spec, _finish_minmax)


def absmax(spec: QuantSpec) -> Calibrator:
    """Return a calibrator for the smallest symmetric range that holds all the data.

    (lo, hi) = (-a, a), with a = max(|x|) over all batches

    The values are exactly those of numpy. A NaN in the data makes the range NaN and makes `finalize` raise an error.
    The range is symmetric even if the spec is not. Each batch is read once. The state is that of `minmax`: two float32
    numbers per slice.

    Args:
        spec: how to quantize. Only its granularity matters here.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec. `update`: the batch is not an array of a float dtype. Any function of the
            calibrator: the state comes from a different calibrator.
        ValueError: `init`: an axis of the spec is out of range. `update`: the slices of the batch do not match those of
            the state. `finalize`: a slice has no data, a NaN, an infinity, or (without allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.calibration.absmax(jq.QuantSpec(jnp.int8))
        >>> lo, hi = cal.finalize(cal.update(cal.init(jnp.zeros(3)), jnp.array([0.5, -1.27, 1.0])))
        >>> lo, hi
        (Array([-1.27], dtype=float32), Array([1.27], dtype=float32))
        >>> jq.quantize(jnp.array([0.005, -1.27, 2.0]), jq.QuantSpec(jnp.int8), range=(lo, hi)).codes
        Array([   0, -127,  127], dtype=int8)

    Source: the max calibration of NVIDIA's TensorRT, Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    return _build("calibration.absmax", spec, _finish_absmax)


def moving_average(spec: QuantSpec, decay: float = 0.99) -> Calibrator:
    """Return a calibrator for the moving averages of the extremes of the batches, min(batch) and max(batch).

    (lo, hi) = (m, M): each batch updates w = decay * w + (1 - decay) and m = m + (1 - decay) / w * (min(batch) - m),
    starting from w = 0; M is the same average of max(batch).

    Dividing by w, the sum of the weights so far, removes the bias toward the initial value, as in Adam. The first of n
    batches has decay**(n - 1) times the weight of the last one, and up to about 1 / (1 - decay) batches are averaged
    almost evenly. This matters where each time step of a recurrent layer is a batch and the first ones are small. A
    batch without elements does not count. The arithmetic is float32, with each operation rounded once.

    Unlike with the other calibrators, the result depends on the order of the batches. `merge` and `all_reduce` assume
    no order between the states: each batch keeps the weight it has in its state, and the sums of the weights are added.
    The state is three float32 numbers per slice.

    Args:
        spec: how to quantize. Only its granularity matters here.
        decay: the weight of a batch relative to the next one, in [0, 1). 0 uses the last batch only.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is not a QuantSpec, or decay is not a number. `update`: the batch is not an array of a float
            dtype. Any function of the calibrator: the state comes from a different calibrator.
        ValueError: decay is out of range. `init`: an axis of the spec is out of range. `update`: the slices of the
            batch do not match those of the state. `finalize`: a slice has no data, a NaN, an infinity, or (without
            allow_zero) only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.calibration.moving_average(jq.QuantSpec(jnp.uint8), decay=0.5)
        >>> state = cal.update(cal.init(jnp.zeros(2)), jnp.array([0.0, 1.0]))
        >>> cal.finalize(cal.update(state, jnp.array([-3.0, 4.0])))  # the weights are 1 / 3 and 2 / 3
        Range(lo=Array([-2.], dtype=float32), hi=Array([3.], dtype=float32))

    Source: the average of torch's MovingAverageMinMaxObserver, with averaging_constant = 1 - decay; it starts at
    the first batch; Kingma and Ba, arXiv 1412.6980, section 3, for the division.
    """
    checks.check_real("calibration.moving_average", "decay", decay)
    checks.require(0 <= decay < 1, "calibration.moving_average", "decay", "a number in [0, 1)", decay)
    calibrator.check_spec("calibration.moving_average", spec)
    step = functools.partial(_update_average, block=scale_from_range.derive_block_size(spec), decay=float(decay))
    parts = Parts(
        "calibration.moving_average",
        spec,
        _make_empty_average,
        step,
        _merge_averages,
        _reduce_averages,
        _finish_average,
    )
    return calibrator.build_calibrator(parts)


def _build(function: str, spec: QuantSpec, finish: Any) -> Calibrator:
    calibrator.check_spec(function, spec)
    step = functools.partial(_extend, block=scale_from_range.derive_block_size(spec))
    parts = Parts(function, spec, make_empty, step, _merge_extremes_jitted, reduce_extremes, finish)
    return calibrator.build_calibrator(parts)


# Running extremes.


def make_empty(shape: tuple[int, ...]) -> ExtremesState:
    """Return the extremes of no data."""
    return ExtremesState(jnp.full(shape, np.float32(np.inf)), jnp.full(shape, np.float32(-np.inf)))


def compute_batch_extremes(batch: jax.Array, shape: tuple[int, ...], block: int | None) -> ExtremesState:
    """Return the extremes of one batch, replicated on every device as a state is."""
    low, high = min_max.compute_extremes(batch, shape, block)
    return ExtremesState(sharding.place_whole(low), sharding.place_whole(high))


@functools.partial(jax.jit, inline=True, static_argnames=("block",))
def _extend(state: ExtremesState, batch: jax.Array, *, block: int | None) -> ExtremesState:
    return merge_extremes(state, compute_batch_extremes(batch, state.low.shape, block))


def merge_extremes(a: Any, b: Any) -> ExtremesState:
    """Return the extremes of the data of two states, NaN for a slice that has a NaN in one of them."""
    # The integer keys keep NaN, subnormal numbers and the sign of 0, which a float minimum would not.
    low = lax.min(*(affine.encode_order(state.low) for state in (a, b)))
    high = lax.max(*(affine.encode_order(state.high) for state in (a, b)))
    return ExtremesState(*min_max.decode_ends(low, high))


# A jitted copy for `Calibrator.merge`. The other callers of `merge_extremes` are themselves jitted.
_merge_extremes_jitted = functools.partial(jax.jit, inline=True)(merge_extremes)


def reduce_extremes(state: Any, axis_name: Hashable) -> ExtremesState:
    """Return the extremes over a mapped axis, NaN for a slice that has a NaN in any state."""
    low = lax.pmin(affine.encode_order(state.low), axis_name)
    high = lax.pmax(affine.encode_order(state.high), axis_name)
    return ExtremesState(*min_max.decode_ends(low, high))


@functools.partial(jax.jit, inline=True)
def _finish_minmax(state: ExtremesState) -> tuple[jax.Array, jax.Array, Range]:
    return state.low, state.high, Range(state.low, state.high)


@functools.partial(jax.jit, inline=True)
def _finish_absmax(state: ExtremesState) -> tuple[jax.Array, jax.Array, Range]:
    # The magnitudes are compared by their bits, because XLA:CPU's maximum of floats may lose a NaN and treats subnormal
    # numbers as 0. The sign bit, -2**31, is cleared before and set afterwards for the lower end.
    magnitudes = (lax.bitcast_convert_type(v, jnp.int32) & np.int32(2**31 - 1) for v in (state.low, state.high))
    largest = lax.max(*magnitudes)
    ends = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (largest | np.int32(-(2**31)), largest))
    return state.low, state.high, Range(*ends)


# Averages.


def _make_empty_average(shape: tuple[int, ...]) -> AverageState:
    return AverageState(*(jnp.zeros(shape, jnp.float32) for _ in AverageState._fields))


@functools.partial(jax.jit, inline=True, static_argnames=("block", "decay"))
def _update_average(state: AverageState, batch: jax.Array, *, block: int | None, decay: float) -> AverageState:
    if batch.size == 0:
        return state
    new = compute_batch_extremes(batch, state.low.shape, block)
    # Each product is rounded before the sum, so that the result does not depend on whether a backend fuses the two.
    share = np.float32(1 - decay)
    weight = barriers.round_result(np.float32(decay) * state.weight) + share
    rate = affine.divide(jnp.full_like(weight, share), weight)

    def move_average(old: jax.Array, extreme: jax.Array) -> jax.Array:
        step = barriers.round_result(rate * (extreme - old))
        # The difference of two finite numbers may overflow.
        overflows = jnp.isinf(step) & jnp.isfinite(extreme) & jnp.isfinite(old)
        step = jnp.where(overflows, barriers.round_result(rate * extreme) - barriers.round_result(rate * old), step)
        # An infinity must stay one, so that `finalize` reports it: the step from it is inf - inf, a NaN.
        moved = jnp.where(jnp.isinf(old), old, old + step)
        # The extremes of the first batch are kept bit for bit, including the sign of 0 and subnormal numbers.
        return jnp.where(state.weight == 0, extreme, moved)

    low, high = (move_average(old, extreme) for old, extreme in zip(state[:2], new, strict=True))
    return AverageState(low, high, weight)


@functools.partial(jax.jit, inline=True)
def _merge_averages(a: AverageState, b: AverageState) -> AverageState:
    weight = a.weight + b.weight
    shares = [_compute_share(state.weight, weight) for state in (a, b)]

    def average(first: jax.Array, second: jax.Array) -> jax.Array:
        # As in `_update_average`, no product may fuse with the sum.
        return barriers.round_result(first * shares[0]) + barriers.round_result(second * shares[1])

    return AverageState(average(a.low, b.low), average(a.high, b.high), weight)


def _compute_share(weight: jax.Array, total: jax.Array) -> jax.Array:
    """Return weight / total, or 0 for a slice without data."""
    return affine.divide(weight, jnp.where(total == 0, np.float32(1), total))


def _reduce_averages(state: AverageState, axis_name: Hashable) -> AverageState:
    weight = lax.psum(state.weight, axis_name)
    share = _compute_share(state.weight, weight)
    low, high = (lax.psum(v * share, axis_name) for v in state[:2])
    return AverageState(low, high, weight)


@functools.partial(jax.jit, inline=True)
def _finish_average(state: AverageState) -> tuple[jax.Array, jax.Array, Range]:
    # The averages start at 0; low > high tells `finalize` that a slice has no data.
    has_no_data = state.weight == 0
    low = jnp.where(has_no_data, np.float32(np.inf), state.low)
    return low, jnp.where(has_no_data, np.float32(-np.inf), state.high), Range(state.low, state.high)
