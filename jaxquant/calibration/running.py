"""The calibrators that need no histogram: minmax, absmax, moving_average."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import barriers, checks, division, min_max, sharding
from . import calibrator
from .calibrator import Calibrator, Parts, Range


class ExtremesState(NamedTuple):
    """The least and the largest value of each slice so far, float32; (inf, -inf) for none, NaN where one came."""

    low: jax.Array
    high: jax.Array


class AverageState(NamedTuple):
    """The averaged least and largest value of each slice, and the sum of their batches' weights; all float32.

    A batch that n others followed has the weight (1 - decay) * decay**n.
    """

    low: jax.Array
    high: jax.Array
    weight: jax.Array


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
        ...             range=cal.finalize(state)).codes
        Array([[  0, 128],
               [255, 255]], dtype=uint8)

    Source: ONNX Runtime's MinMaxCalibrater; torch's MinMaxObserver and PerChannelMinMaxObserver.
    """
    return _build("minmax", spec, _finish_minmax)


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
        >>> jq.quantize(jnp.array([0.005, -1.27, 2.0]), jq.QuantSpec(jnp.int8), range=(lo, hi)).codes
        Array([   0, -127,  127], dtype=int8)

    Source: the max calibration of NVIDIA's TensorRT, Migacz, 8-bit Inference with TensorRT, GTC 2017.
    """
    return _build("absmax", spec, _finish_absmax)


def moving_average(spec: QuantSpec, decay: float = 0.99) -> Calibrator:
    """(lo, hi) = (m, M), the means of min(batch) and of max(batch), where a batch counts decay times the next one.

    w = decay * w + (1 - decay) and m = m + (1 - decay) / w * (min(batch) - m), from w = 0; M likewise of max(batch).
    Dividing by w, the sum of the weights so far, removes the bias toward the start, as Adam does: the first of n
    batches counts decay**(n - 1) times the last, and up to about 1 / (1 - decay) of them are averaged nearly evenly.
    This matters where each time step of a recurrent layer is a batch, the first of them small. A batch without
    elements does not count. float32, every operation rounded once.

    The result depends on the order of the batches, unlike that of the other calibrators. `merge` and `all_reduce`
    have no order between the states: each batch keeps the weight that it has in its own state, and the weights are
    added.

    The state is three float32 per slice.

    Args:
        spec: how to quantize; of it only the granularity matters here.
        decay: the weight of a batch relative to that of the next one, in [0, 1). 0 keeps the last batch only.

    Returns:
        A `Calibrator`.

    Raises:
        TypeError: spec is no QuantSpec, decay is no number, or a batch has another dtype or is no array.
        ValueError: decay is out of range, a batch has slices that do not fit the state's, an axis of the spec is out of
            range, a state is not this calibrator's; `finalize`: a slice saw nothing, a NaN, an infinity or, without
            allow_zero, only zeros.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.moving_average(jq.QuantSpec(jnp.uint8), decay=0.5)
        >>> state = cal.update(cal.init(jnp.zeros(2)), jnp.array([0.0, 1.0]))
        >>> cal.finalize(cal.update(state, jnp.array([-3.0, 4.0])))  # the weights are 1 / 3 and 2 / 3
        Range(lo=Array([-2.], dtype=float32), hi=Array([3.], dtype=float32))

    Source: the average of torch's MovingAverageMinMaxObserver, with averaging_constant = 1 - decay, which starts at
    the first batch; Kingma and Ba, arXiv 1412.6980, section 3, for the division.
    """
    checks.check_real("moving_average", "decay", decay)
    checks.require(0 <= decay < 1, "moving_average", "decay", "a number in [0, 1)", decay)
    calibrator.check_spec("moving_average", spec)
    step = functools.partial(_update_average, block=scale_from_range.find_block_size(spec), decay=float(decay))
    parts = Parts("moving_average", spec, _make_empty_average, step, _merge_averages, _reduce_averages, _finish_average)
    return calibrator.build_calibrator(parts)


def _build(function: str, spec: QuantSpec, finish: Any) -> Calibrator:
    calibrator.check_spec(function, spec)
    step = functools.partial(_extend, block=scale_from_range.find_block_size(spec))
    return calibrator.build_calibrator(Parts(function, spec, make_empty, step, _together, reduce_extremes, finish))


# Running extremes.


def make_empty(shape: tuple[int, ...]) -> ExtremesState:
    """Returns the extremes of nothing."""
    return ExtremesState(jnp.full(shape, np.float32(np.inf)), jnp.full(shape, np.float32(-np.inf)))


def find_batch_extremes(batch: jax.Array, shape: tuple[int, ...], block: int | None) -> ExtremesState:
    """Return the extremes of one batch, whole on every device as a state is."""
    low, high = min_max.find_extremes(batch, shape, block)
    return ExtremesState(sharding.place_whole(low), sharding.place_whole(high))


@functools.partial(jax.jit, inline=True, static_argnames=("block",))
def _extend(state: ExtremesState, batch: jax.Array, *, block: int | None) -> ExtremesState:
    return merge_extremes(state, find_batch_extremes(batch, state.low.shape, block))


def merge_extremes(a: Any, b: Any) -> ExtremesState:
    """Returns the extremes of both, NaN where one of them is."""
    low = lax.min(*(min_max.encode_order(state.low) for state in (a, b)))
    high = lax.max(*(min_max.encode_order(state.high) for state in (a, b)))
    return ExtremesState(*min_max.decode_ends(low, high))


_together = functools.partial(jax.jit, inline=True)(merge_extremes)


def reduce_extremes(state: Any, axis_name: Any) -> ExtremesState:
    """Returns the extremes over a mapped axis, NaN where there is one."""
    low = lax.pmin(min_max.encode_order(state.low), axis_name)
    high = lax.pmax(min_max.encode_order(state.high), axis_name)
    return ExtremesState(*min_max.decode_ends(low, high))


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


def _make_empty_average(shape: tuple[int, ...]) -> AverageState:
    return AverageState(*(jnp.zeros(shape, jnp.float32) for _ in AverageState._fields))


@functools.partial(jax.jit, inline=True, static_argnames=("block", "decay"))
def _update_average(state: AverageState, batch: jax.Array, *, block: int | None, decay: float) -> AverageState:
    if batch.size == 0:
        return state
    new = find_batch_extremes(batch, state.low.shape, block)
    share = np.float32(1 - decay)
    weight = barriers.round_result(np.float32(decay) * state.weight) + share
    rate = division.divide(jnp.full_like(weight, share), weight)

    def moved(old: jax.Array, found: jax.Array) -> jax.Array:
        step = barriers.round_result(rate * (found - old))
        later = jnp.where(jnp.isinf(old), old, old + step)  # an infinity stays one
        return jnp.where(state.weight == 0, found, later)  # the first batch as it is, also -0 and denormal numbers

    low, high = (moved(old, found) for old, found in zip(state[:2], new, strict=True))
    return AverageState(low, high, weight)


@functools.partial(jax.jit, inline=True)
def _merge_averages(a: AverageState, b: AverageState) -> AverageState:
    weight = a.weight + b.weight
    shares = [_find_share(state.weight, weight) for state in (a, b)]

    def mean(of_a: jax.Array, of_b: jax.Array) -> jax.Array:
        parts = (barriers.round_result(v * w) for v, w in zip((of_a, of_b), shares, strict=True))
        return functools.reduce(lax.add, parts)

    return AverageState(mean(a.low, b.low), mean(a.high, b.high), weight)


def _find_share(weight: jax.Array, total: jax.Array) -> jax.Array:
    """Returns weight / total, and 0 where nothing was seen."""
    return division.divide(weight, jnp.where(total == 0, np.float32(1), total))


def _reduce_averages(state: AverageState, axis_name: Any) -> AverageState:
    weight = lax.psum(state.weight, axis_name)
    share = _find_share(state.weight, weight)
    low, high = (lax.psum(v * share, axis_name) for v in state[:2])
    return AverageState(low, high, weight)


@functools.partial(jax.jit, inline=True)
def _finish_average(state: AverageState) -> tuple[jax.Array, jax.Array, Range]:
    none = state.weight == 0
    low = jnp.where(none, np.float32(np.inf), state.low)
    return low, jnp.where(none, np.float32(-np.inf), state.high), Range(state.low, state.high)
