"""What a calibrator is, and what every one of them asks of a spec, a batch and a state. Knows no statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, sharding

_NAN, _INFINITE, _NOTHING, _ZEROS = 1, 2, 3, 4
_FAULTS = {
    _NAN: ("a NaN", "leave such batches out, or mend what makes them"),
    _INFINITE: ("an infinity", "leave such batches out, or mend what makes them"),
    _NOTHING: ("no data", "update the state with a batch first"),
    _ZEROS: ("only zeros", "allow_zero=True takes them for the range (0, 0), which quantize gives scale 1"),
}


class Range(NamedTuple):
    """Two ends in the unit of the data, float32, of x's rank: what `quantize` takes as `lo` and `hi`."""

    lo: jax.Array
    hi: jax.Array


export.register_namedtuple_serialization(Range, serialized_name="jaxquant.Range")


class Calibrator(NamedTuple):
    """Five pure functions that find a range in a stream of batches without keeping the data.

    A state is a pytree of arrays of fixed shapes and dtypes: carry it through `lax.scan`, map it by `jax.vmap`, save
    it. All but `finalize` can be jitted. A batch is float32, float16 or bfloat16; batches may differ in the dimensions
    that share a range.

    Attributes:
        init: `init(example)` returns the state of nothing seen. `example` is an array, whose values do not count, or
            a `jax.ShapeDtypeStruct`.
        update: `update(state, batch)` returns the state with one batch more.
        merge: `merge(a, b)` returns the state that has seen what both have.
        finalize: `finalize(state, allow_zero=False)` returns the `Range`. It is meant to be called eagerly, where it
            raises for a slice that saw nothing, a NaN, an infinity, or only zeros; `allow_zero=True` gives the last of
            them the range (0, 0). Under a trace it cannot raise: such slices have the range (NaN, NaN).
        all_reduce: `all_reduce(state, axis_name)` merges the states of all devices along an axis of `jax.shard_map`
            (or of `jax.vmap` with a name): every device gets the state of one that saw all the data.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    merge: Callable[..., Any]
    finalize: Callable[..., Range]
    all_reduce: Callable[..., Any]


class Parts(NamedTuple):
    """What makes one calibrator another. Their arguments have passed their contracts.

    Attributes:
        function: the name of its factory, for errors.
        spec: how to quantize.
        nothing: from the shape of the ranges to the state of nothing seen.
        step: from a state and a batch to a state.
        together: from two states to one.
        across: from a state and the name of an axis to a state.
        finish: from a state to the least and the largest value of each slice, and its range.
    """

    function: str
    spec: QuantSpec
    nothing: Callable[[tuple[int, ...]], Any]
    step: Callable[[Any, jax.Array], Any]
    together: Callable[[Any, Any], Any]
    across: Callable[[Any, Any], Any]
    finish: Callable[[Any], tuple[jax.Array, jax.Array, Range]]


def build_calibrator(parts: Parts) -> Calibrator:
    """Returns the calibrator of these parts, with the contracts that all of them share."""
    return Calibrator(*(functools.partial(f, parts) for f in (_init, _update, _merge, _finalize, _all_reduce)))


def check_spec(function: str, spec: Any) -> None:
    """Requires a QuantSpec."""
    checks.require_type(isinstance(spec, QuantSpec), function, "spec", "a QuantSpec", checks.describe_value(spec))


def _init(parts: Parts, example: Any) -> Any:
    name = f"{parts.function}.init"
    if isinstance(example, int | float):
        example = np.float32(example)
    has_shape = hasattr(example, "shape") and hasattr(example, "dtype")
    expected = "an array or a jax.ShapeDtypeStruct"
    checks.require_type(has_shape, name, "example", expected, type(example).__name__)
    state = parts.nothing(scale_from_range.find_range_shape(name, parts.spec, tuple(example.shape)))
    if checks.is_traced(example):  # a loop under jax.shard_map takes no carry that does not vary as its data do
        state = jax.tree.map(lambda part: sharding.vary_like(part, example), state)
    return state


def _update(parts: Parts, state: Any, batch: Any) -> Any:
    name = f"{parts.function}.update"
    _check_state(parts, name, "state", state)
    batch = _read_batch(name, "batch", batch)
    shape = scale_from_range.find_range_shape(name, parts.spec, batch.shape)
    expected = f"a batch whose ranges have shape {tuple(state.low.shape)}, as the example of init had"
    got = f"ranges of shape {shape}, of a batch of shape {batch.shape}"
    checks.require(shape == tuple(state.low.shape), name, "batch", expected, got)
    return parts.step(state, batch)


def _read_batch(function: str, argument: str, value: Any) -> jax.Array:
    """Requires a batch of floats and returns it as JAX's."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()  # a flax.nnx.Param, for one
    value = entry_point.convert_number(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64:
        value = value.astype(np.float32)  # as JAX takes it
    (value,) = entry_point.convert_arrays(function, {argument: value})
    checks.check_array(function, argument, value, dtypes.FLOATS)
    return lax.stop_gradient(value)


def _merge(parts: Parts, a: Any, b: Any) -> Any:
    name = f"{parts.function}.merge"
    _check_state(parts, name, "a", a)
    _check_state(parts, name, "b", b)
    expected = f"shape {tuple(a.low.shape)}, as that of a"
    checks.require(a.low.shape == b.low.shape, name, "b.low", expected, f"shape {tuple(b.low.shape)}")
    return parts.together(a, b)


def _finalize(parts: Parts, state: Any, allow_zero: bool = False) -> Range:
    name = f"{parts.function}.finalize"
    _check_state(parts, name, "state", state)
    checks.check_flag(name, "allow_zero", allow_zero)
    return _conclude(name, *parts.finish(state), bool(allow_zero))


def _all_reduce(parts: Parts, state: Any, axis_name: Any) -> Any:
    _check_state(parts, f"{parts.function}.all_reduce", "state", state)
    return parts.across(state, axis_name)


@functools.lru_cache(maxsize=256)
def _make_template(nothing: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(lambda: nothing(shape))


def _check_state(parts: Parts, function: str, argument: str, state: Any) -> None:
    """Requires a state as `init` makes it."""
    expected = _make_template(parts.nothing, tuple(getattr(getattr(state, "low", None), "shape", ())))
    name, reason = type(expected).__name__, f"as {parts.function}.init makes it"
    is_one = type(state) is type(expected)
    checks.require_type(is_one, function, argument, f"a {name}, {reason}", type(state).__name__)
    for field in expected._fields:
        got, want = (jax.tree.leaves(getattr(s, field)) for s in (state, expected))
        described = [", ".join(f"{v.dtype}{list(v.shape)}" for v in leaves) or "None" for leaves in (got, want)]
        text = f"{described[1]}, {reason}"
        checks.require(described[0] == described[1], function, f"{argument}.{field}", text, described[0])


def _find_faults(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns what is wrong with each slice of which these are the extremes: 0 for nothing."""
    none = low > high
    infinite = (jnp.isinf(low) | jnp.isinf(high)) & ~none
    # By their bits: a denormal number is 0 to XLA:CPU.
    zero = (_clear_sign(low) | _clear_sign(high)) == 0
    found = jnp.where(zero, _ZEROS, jnp.where(none, _NOTHING, jnp.where(infinite, _INFINITE, 0)))
    return jnp.where(jnp.isnan(low) | jnp.isnan(high), _NAN, found)


def _clear_sign(value: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(value, jnp.int32) & np.int32(0x7FFFFFFF)


def _conclude(function: str, low: jax.Array, high: jax.Array, found: Range, allow_zero: bool) -> Range:
    """Returns the ranges that were found, or raises for slices that have none; low > high says nothing was seen."""
    fault = _find_faults(low, high)
    if allow_zero:
        zero = fault == _ZEROS
        found = Range(*(jnp.where(zero, np.float32(0), v) for v in found))
        fault = jnp.where(zero, 0, fault)
    if not checks.is_traced(fault) and (fault.is_fully_addressable or fault.is_fully_replicated):
        _raise_faults(function, np.asarray(fault))
        return found
    return Range(*(jnp.where(fault == 0, v, np.float32(np.nan)) for v in found))


def _raise_faults(function: str, fault: np.ndarray) -> None:
    for code, (what, remedy) in _FAULTS.items():
        slices = np.argwhere(fault == code)
        if len(slices):
            first = tuple(int(i) for i in slices[0])
            got = f"{what} in {len(slices)} of {fault.size} slices, first in {first}; {remedy}"
            checks.require(False, function, "state", "finite numbers in every slice, not all of them 0", got)
