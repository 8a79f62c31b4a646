"""The calibrators that need no histogram: minmax, absmax, moving_average."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .. import _contracts, _numerics, _ranges, _reductions
from .._spec import QuantSpec
from . import _calibrator, _slices
from ._calibrator import Calibrator, Parts, Range


class ExtremesState(NamedTuple):
    """The least and the largest value of each slice so far, float32; (inf, -inf) for none, NaN where one came."""

    low: jax.Array
    high: jax.Array


class AverageState(NamedTuple):
    """The averaged least and largest value of each slice, float32, and the number of batches, int32."""

    low: jax.Array
    high: jax.Array
    batches: jax.Array


for _state in (ExtremesState, AverageState):
    export.register_namedtuple_serialization(_state, serialized_name=f"jaxquant.{_state.__name__}")


def minmax(spec: QuantSpec) -> Calibrator:
    """(lo, hi) = (min(x), max(x)) over everything seen.

    Exactly numpy's, a NaN included, which makes `finalize` raise. The range is what was seen: it need not hold 0,
    `quantize` widens it. A batch is read once.

    The state is two float32 per slice.

    Args:
        spec: how to quantize; of it only the granularity matters here.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec, or a batch has another dtype or is no array.
        ValueError: a batch has slices that do not fit the state's, an axis of the spec is out of range, a state is not
            this calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or, without allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.minmax(jq.QuantSpec(jnp.uint8, jq.PerAxis(1)))
        >>> state = cal.init(jnp.zeros((2, 2)))
        >>> for batch in (jnp.array([[-0.5, 1.0], [2.05, 3.0]]), jnp.array([[0.0, 0.0]])):
        ...     state = cal.update(state, batch)
        >>> cal.finalize(state)
        Range(lo=Array([[-0.5,  0. ]], dtype=float32), hi=Array([[2.05, 3.  ]], dtype=float32))
        >>> jq.quantize(jnp.array([[-9.0, 1.5], [9.0, 9.0]]), jq.QuantSpec(jnp.uint8, jq.PerAxis(1)),
        ...             *cal.finalize(state)).values
        Array([[  0, 128],
               [255, 255]], dtype=uint8)

    Source: ONNX Runtime's MinMaxCalibrater; torch's MinMaxObserver and PerChannelMinMaxObserver.
    """
    return _running("minmax", spec, _finish_minmax)


def absmax(spec: QuantSpec) -> Calibrator:
    """(lo, hi) = (-a, a), a = max(|x|) over everything seen.

    Exactly numpy's, a NaN included, which makes `finalize` raise. For a spec that is not symmetric the range is
    symmetric all the same. A batch is read once.

    The state is that of `minmax`, two float32 per slice.

    Args:
        spec: how to quantize; of it only the granularity matters here.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec, or a batch has another dtype or is no array.
        ValueError: a batch has slices that do not fit the state's, an axis of the spec is out of range, a state is not
            this calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or, without allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.absmax(jq.QuantSpec(jnp.int8))
        >>> lo, hi = cal.finalize(cal.update(cal.init(jnp.zeros(3)), jnp.array([0.5, -1.27, 1.0])))
        >>> lo, hi
        (Array([-1.27], dtype=float32), Array([1.27], dtype=float32))
        >>> jq.quantize(jnp.array([0.005, -1.27, 2.0]), jq.QuantSpec(jnp.int8), lo, hi).values
        Array([   0, -127,  127], dtype=int8)

    Source: the max calibration of NVIDIA's TensorRT, Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    return _running("absmax", spec, _finish_absmax)


def moving_average(spec: QuantSpec, decay: float = 0.99) -> Calibrator:
    """(lo, hi) = (m, M): m = m + (1 - decay) * (min(batch) - m), M likewise of max(batch).

    The first batch starts both; a batch without elements does not count. float32, every operation rounded once.

    An average over time has an order by nature: other than with the other calibrators the result depends on the order
    of the batches, and `merge` and `all_reduce`, where there is none, take the mean of the averages, weighted by the
    numbers of batches.

    The state is two float32 and an int32 per slice.

    Args:
        spec: how to quantize; of it only the granularity matters here.
        decay: how much of the average stays when a batch comes, in [0, 1). 0 keeps the last batch only.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec, decay is no number, or a batch has another dtype or is no array.
        ValueError: decay is out of range, a batch has slices that do not fit the state's, an axis of the spec is out of
            range, a state is not this calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or, without
            allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.moving_average(jq.QuantSpec(jnp.uint8), decay=0.75)
        >>> state = cal.update(cal.init(jnp.zeros(2)), jnp.array([0.0, 1.0]))
        >>> lo, hi = cal.finalize(cal.update(state, jnp.array([-2.0, 2.0])))
        >>> lo, hi
        (Array([-0.5], dtype=float32), Array([1.25], dtype=float32))

    Source: torch's MovingAverageMinMaxObserver, with averaging_constant = 1 - decay.
    """
    _contracts.real("moving_average", "decay", decay)
    _contracts.require(0 <= decay < 1, "moving_average", "decay", "a number in [0, 1)", decay)
    _calibrator.spec_of("moving_average", spec)
    step = functools.partial(_averaged, block=_ranges.block_size(spec), share=1 - float(decay))
    parts = Parts("moving_average", spec, _no_average, step, _average_of_both, _average_across, _finish_average)
    return _calibrator.built(parts)


def _running(function: str, spec: QuantSpec, finish: Any) -> Calibrator:
    _calibrator.spec_of(function, spec)
    step = functools.partial(_extended, block=_ranges.block_size(spec))
    return _calibrator.built(Parts(function, spec, nothing, step, _together, across, finish))


# Running extremes.


def nothing(shape: tuple[int, ...]) -> ExtremesState:
    """Returns the extremes of nothing."""
    return ExtremesState(jnp.full(shape, np.float32(np.inf)), jnp.full(shape, np.float32(-np.inf)))


@functools.partial(jax.jit, inline=True, static_argnames=("block",))
def _extended(state: ExtremesState, batch: jax.Array, *, block: int | None) -> ExtremesState:
    return together(state, ExtremesState(*_slices.extremes(batch, state.low.shape, block)))


def together(a: Any, b: Any) -> ExtremesState:
    """Returns the extremes of both, NaN where one of them is."""
    low = lax.min(*(_reductions.keys_of(state.low) for state in (a, b)))
    high = lax.max(*(_reductions.keys_of(state.high) for state in (a, b)))
    return _extremes(low, high, jnp.isnan(a.low) | jnp.isnan(b.low))


def _extremes(low: jax.Array, high: jax.Array, has_nan: jax.Array) -> ExtremesState:
    return ExtremesState(*(jnp.where(has_nan, np.float32(np.nan), _reductions.floats_of(keys)) for keys in (low, high)))


_together = functools.partial(jax.jit, inline=True)(together)


def across(state: Any, axis_name: Any) -> ExtremesState:
    """Returns the extremes over a mapped axis, NaN where there is one."""
    has_nan = lax.pmax(jnp.isnan(state.low).astype(jnp.int32), axis_name) > 0
    low = lax.pmin(_reductions.keys_of(state.low), axis_name)
    return _extremes(low, lax.pmax(_reductions.keys_of(state.high), axis_name), has_nan)


@functools.partial(jax.jit, inline=True)
def _finish_minmax(state: ExtremesState) -> tuple[jax.Array, jax.Array, Range]:
    return state.low, state.high, Range(state.low, state.high)


@functools.partial(jax.jit, inline=True)
def _finish_absmax(state: ExtremesState) -> tuple[jax.Array, jax.Array, Range]:
    sizes = (lax.bitcast_convert_type(v, jnp.int32) & np.int32(2**31 - 1) for v in (state.low, state.high))
    size = lax.max(*sizes)
    ends = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (size | np.int32(-(2**31)), size))
    return state.low, state.high, Range(*ends)


# Averages.


def _no_average(shape: tuple[int, ...]) -> AverageState:
    return AverageState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))


@functools.partial(jax.jit, inline=True, static_argnames=("block", "share"))
def _averaged(state: AverageState, batch: jax.Array, *, block: int | None, share: float) -> AverageState:
    if batch.size == 0:
        return state
    new = _slices.extremes(batch, state.low.shape, block)

    def moved(old: jax.Array, found: jax.Array) -> jax.Array:
        step = _numerics.rounded(np.float32(share) * (found - old))
        later = jnp.where(jnp.isinf(old), old, old + step)  # an infinity stays one
        return jnp.where(state.batches == 0, found, later)

    low, high = (moved(old, found) for old, found in zip(state[:2], new, strict=True))
    return AverageState(low, high, state.batches + 1)


@functools.partial(jax.jit, inline=True)
def _average_of_both(a: AverageState, b: AverageState) -> AverageState:
    batches = a.batches + b.batches
    weights = [_weight(state.batches, batches) for state in (a, b)]

    def mean(of_a: jax.Array, of_b: jax.Array) -> jax.Array:
        parts = (_numerics.rounded(v * w) for v, w in zip((of_a, of_b), weights, strict=True))
        return functools.reduce(lax.add, parts)

    return AverageState(mean(a.low, b.low), mean(a.high, b.high), batches)


def _weight(batches: jax.Array, of_all: jax.Array) -> jax.Array:
    return batches.astype(jnp.float32) / jnp.maximum(of_all, 1).astype(jnp.float32)


def _average_across(state: AverageState, axis_name: Any) -> AverageState:
    batches = lax.psum(state.batches, axis_name)
    weight = _weight(state.batches, batches)
    low, high = (lax.psum(v * weight, axis_name) for v in state[:2])
    return AverageState(low, high, batches)


@functools.partial(jax.jit, inline=True)
def _finish_average(state: AverageState) -> tuple[jax.Array, jax.Array, Range]:
    none = state.batches == 0
    low = jnp.where(none, np.float32(np.inf), state.low)
    return low, jnp.where(none, np.float32(-np.inf), state.high), Range(state.low, state.high)
