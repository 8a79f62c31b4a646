"""`Calibrator` and `Range`, and the checks of specs, batches and states that all calibrators share.

Layers and rules take a `Factory`, a function from a spec to a calibrator.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from .._arrays import scale_from_range
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes, entry_point, sharding

_NAN, _INFINITE, _NOTHING, _ZEROS = 1, 2, 3, 4
_FAULTS = {
    _NAN: ("a NaN", "leave out the batches that contain one, or correct the code that computes them"),
    _INFINITE: ("an infinity", "leave out the batches that contain one, or correct the code that computes them"),
    _NOTHING: ("no data", "update the state with a batch first"),
    _ZEROS: ("only zeros", "allow_zero=True gives such slices the range (0, 0), for which quantize uses scale 1"),
}


class Range(NamedTuple):
    """The ends of a range for each slice of elements that share it, as `quantize` takes them in `range`.

    Attributes:
        lo: the lower ends, float32, of x's rank, in the units of x.
        hi: the upper ends, of the same dtype, shape and units.
    """

    lo: jax.Array
    hi: jax.Array


export.register_namedtuple_serialization(Range, serialized_name="jaxquant.Range")


class Calibrator(NamedTuple):
    """Five pure functions that find a range from a stream of batches, without keeping the data.

    A state is a pytree of arrays with fixed shapes and dtypes. It can be carried through `lax.scan`, mapped by
    `jax.vmap`, and saved. All functions except `finalize` can be jitted. A batch is float32, float16 or bfloat16;
    batches may differ in the lengths of the dimensions along which elements share a range.

    Attributes:
        init: `init(example)` returns the state that holds no data yet. `example` is a `jax.ShapeDtypeStruct`, or an
            array; only its shape matters.
        update: `update(state, batch)` returns the state after one more batch.
        merge: `merge(a, b)` returns the state that holds the data of both.
        finalize: `finalize(state, allow_zero=False)` returns the `Range`. Call it eagerly: it then raises an error if a
            slice has no data, a NaN, an infinity, or only zeros; `allow_zero=True` gives slices of zeros the range (0,
            0). While it is traced, it cannot raise an error; it then gives such slices the range (NaN, NaN).
        all_reduce: `all_reduce(state, axis_name)` merges the states of all devices along an axis of `jax.shard_map`
            (or a named axis of `jax.vmap`). Each device gets the state that holds all the data.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> cal = jq.calibration.minmax(jq.QuantSpec(jnp.uint8))
        >>> batches = jnp.array([[0.5, -1.0], [2.5, 0.0]])
        >>> step = lambda state, batch: (cal.update(state, batch), None)
        >>> state, _ = jax.lax.scan(step, cal.init(batches[0]), batches)
        >>> cal.finalize(state)
        Range(lo=Array([-1.], dtype=float32), hi=Array([2.5], dtype=float32))
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    merge: Callable[..., Any]
    finalize: Callable[..., Range]
    all_reduce: Callable[..., Any]


class SliceState(Protocol):
    """What all states have: the least and the largest element so far of each slice, float32."""

    @property
    def low(self) -> jax.Array:
        """The least elements."""
        ...

    @property
    def high(self) -> jax.Array:
        """The largest elements."""
        ...


class Parts(NamedTuple):
    """What differs between calibrators; the functions get checked arguments.

    Attributes:
        function: the name of the calibrator's factory, for errors.
        spec: how to quantize.
        make_empty: `make_empty(shape)` returns the state without data for ranges of this shape.
        update: `update(state, batch)` returns the next state.
        merge: `merge(a, b)` merges two states.
        reduce: `reduce(state, axis_name)` merges the states along a mapped axis.
        finish: `finish(state)` returns the least and the largest value of each slice, and the range.
    """

    function: str
    spec: QuantSpec
    make_empty: Callable[[tuple[int, ...]], Any]
    update: Callable[[Any, jax.Array], Any]
    merge: Callable[[Any, Any], Any]
    reduce: Callable[[Any, Any], Any]
    finish: Callable[[Any], tuple[jax.Array, jax.Array, Range]]


def build_calibrator(parts: Parts) -> Calibrator:
    """Return the calibrator with these parts and the checks that all calibrators share."""
    return Calibrator(*(functools.partial(f, parts) for f in (_init, _update, _merge, _finalize, _all_reduce)))


def check_spec(function: str, spec: object) -> None:
    """Raise ContractTypeError unless spec is a QuantSpec."""
    checks.require_type(isinstance(spec, QuantSpec), function, "spec", "a QuantSpec", checks.describe_value(spec))


def refuse_forms(function: str, spec: QuantSpec) -> None:
    """Raise if a spec has an offset or a scale_spec, because a calibrator measures codes with a zero point only."""
    reason = "because it measures the errors of codes with a zero point; minmax, moving_average and percentile do not"
    checks.require(not spec.offset, function, "spec.offset", f"False, {reason}", True)
    checks.require(spec.scale_spec is None, function, "spec.scale_spec", f"None, {reason}", spec.scale_spec)


def _derive_shape(function: str, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the ranges of a batch, which an offset and quantized scales do not change."""
    plain = dataclasses.replace(spec, offset=False, scale_spec=None, scale_rule=None)
    return scale_from_range.derive_range_shape(function, plain, shape)


def _init(parts: Parts, example: Any) -> Any:
    name = f"{parts.function}.init"
    if isinstance(example, int | float):
        example = np.float32(example)
    has_shape = hasattr(example, "shape") and hasattr(example, "dtype")
    expected = "an array or a jax.ShapeDtypeStruct"
    checks.require_type(has_shape, name, "example", expected, type(example).__name__)
    state = parts.make_empty(_derive_shape(name, parts.spec, tuple(example.shape)))
    if checks.is_traced(example):  # under jax.shard_map the carry of a loop must vary over the devices as its data do
        state = jax.tree.map(lambda part: sharding.vary_like(part, example), state)
    return state


def _update(parts: Parts, state: SliceState, batch: ArrayLike) -> Any:
    name = f"{parts.function}.update"
    _check_state(parts, name, "state", state)
    batch = _read_batch(name, "batch", batch)
    shape = _derive_shape(name, parts.spec, batch.shape)
    if shape != tuple(state.low.shape):
        expected = f"a batch with ranges of shape {tuple(state.low.shape)}, as for the example given to init"
        got = f"ranges of shape {shape} for a batch of shape {batch.shape}"
        checks.refuse(name, "batch", expected, got)
    return parts.update(state, batch)


def _read_batch(function: str, argument: str, value: Any) -> jax.Array:
    """Check that a batch holds floats and return it as a JAX array without a gradient."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()  # for example a flax.nnx.Param
    value = entry_point.convert_number(value)
    # numpy's float64 is converted as JAX converts it by default. A JAX array of float64 fails the check below.
    if isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64:
        value = value.astype(np.float32)
    (value,) = entry_point.convert_arrays(function, {argument: value})
    checks.check_array(function, argument, value, dtypes.FLOATS)
    return lax.stop_gradient(value)


def _merge(parts: Parts, a: SliceState, b: SliceState) -> Any:
    name = f"{parts.function}.merge"
    _check_state(parts, name, "a", a)
    _check_state(parts, name, "b", b)
    if a.low.shape != b.low.shape:
        expected = f"shape {tuple(a.low.shape)}, the shape of a.low"
        checks.refuse(name, "b.low", expected, f"shape {tuple(b.low.shape)}")
    return parts.merge(a, b)


def _finalize(parts: Parts, state: SliceState, allow_zero: bool = False) -> Range:
    name = f"{parts.function}.finalize"
    _check_state(parts, name, "state", state)
    checks.check_flag(name, "allow_zero", allow_zero)
    return _check_slices(name, *parts.finish(state), bool(allow_zero))


def _all_reduce(parts: Parts, state: SliceState, axis_name: Hashable) -> Any:
    _check_state(parts, f"{parts.function}.all_reduce", "state", state)
    return parts.reduce(state, axis_name)


@functools.lru_cache(maxsize=256)
def _make_template(make_empty: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(lambda: make_empty(shape))


def _check_state(parts: Parts, function: str, argument: str, state: object) -> None:
    """Raise unless the state has the type, the shapes and the dtypes that `init` gives it."""
    # The template is cached, because eval_shape traces the function that makes a state.
    template = _make_template(parts.make_empty, tuple(getattr(getattr(state, "low", None), "shape", ())))
    name, reason = type(template).__name__, f"as {parts.function}.init returns it"
    is_same = type(state) is type(template)
    checks.require_type(is_same, function, argument, f"a {name}, {reason}", type(state).__name__)
    for field in template._fields:
        leaves = (jax.tree.leaves(getattr(s, field)) for s in (state, template))
        got, expected = (", ".join(f"{v.dtype}{list(v.shape)}" for v in arrays) or "None" for arrays in leaves)
        checks.require(got == expected, function, f"{argument}.{field}", f"{expected}, {reason}", got)


@functools.partial(jax.jit, inline=True)
def _encode_faults(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the code of the fault of each slice, or 0 if it has none; low > high marks a slice without data."""
    has_no_data = low > high
    infinite = (jnp.isinf(low) | jnp.isinf(high)) & ~has_no_data
    # The bits are compared, because XLA:CPU treats subnormal numbers as 0.
    zero = (_clear_sign(low) | _clear_sign(high)) == 0
    fault = jnp.where(zero, _ZEROS, jnp.where(has_no_data, _NOTHING, jnp.where(infinite, _INFINITE, 0)))
    return jnp.where(jnp.isnan(low) | jnp.isnan(high), _NAN, fault)


@functools.partial(jax.jit, inline=True)
def _allow_zeros(low: jax.Array, high: jax.Array, ranges: Range) -> tuple[jax.Array, Range]:
    """Return the code of the fault of each slice, 0 for a slice of zeros, and the ranges with 0 for such a slice."""
    fault = _encode_faults(low, high)
    zero = fault == _ZEROS
    return jnp.where(zero, 0, fault), Range(*(jnp.where(zero, np.float32(0), end) for end in ranges))


def _clear_sign(value: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(value, jnp.int32) & np.int32(0x7FFFFFFF)


def _check_slices(function: str, low: jax.Array, high: jax.Array, ranges: Range, allow_zero: bool) -> Range:
    """Return the ranges after a check of each slice: a fault raises if known, and becomes NaN under a trace."""
    fault, ranges = _allow_zeros(low, high, ranges) if allow_zero else (_encode_faults(low, high), ranges)
    # If some devices belong to other hosts, the faults can be read here only if every device holds all of them.
    if not checks.is_traced(fault) and (fault.is_fully_addressable or fault.is_fully_replicated):
        _raise_faults(function, np.asarray(fault))
        return ranges
    return Range(*(jnp.where(fault == 0, end, np.float32(np.nan)) for end in ranges))


def _raise_faults(function: str, fault: np.ndarray) -> None:
    """Raise for the first kind of fault that a slice has, and name the first slice that has it."""
    for code, (description, remedy) in _FAULTS.items():
        slices = np.argwhere(fault == code)
        if len(slices):
            first = tuple(int(i) for i in slices[0])
            got = f"{description} in {len(slices)} of {fault.size} slices, first in {first}; {remedy}"
            checks.refuse(function, "state", "finite numbers in every slice, not all of them 0", got)


def is_finite_state(tree: Any) -> jax.Array:
    """Return whether no calibrator's state in a tree has seen a NaN or an infinity."""
    states = [node for node in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(node)]
    bad = []
    for state in states:
        # A slice without data has the range (inf, -inf), which is not an error here.
        bad.append(jnp.any(jnp.isnan(state.low) | (state.low == -jnp.inf)))
        bad.append(jnp.any(jnp.isnan(state.high) | (state.high == jnp.inf)))
    return jnp.logical_not(jnp.any(jnp.asarray(bad, bool)))


def _is_state(node: object) -> bool:
    """Return whether a node of a tree is a calibrator's state."""
    return isinstance(node, tuple) and hasattr(node, "low") and hasattr(node, "high")


# Factories: the functions from a spec to a calibrator that layers and rules take.

Factory = Callable[[QuantSpec], Calibrator]
_FACTORY = "a function from a spec to a calibrator, such as jq.calibration.moving_average"


@dataclasses.dataclass(frozen=True)
class Partial:
    """A `functools.partial` that equals another one with equal arguments.

    Layers and rules are static and may be constructed in every trace. With `functools.partial`, which compares by
    identity, equal ones would be different.
    """

    function: Callable[..., Calibrator]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, spec: QuantSpec) -> Calibrator:
        """Return the calibrator of a spec."""
        return self.function(*self.arguments, spec, **dict(self.keywords))


def check_factory(name: str, calibrator: Callable[..., Calibrator] | None, alternative: str = "") -> Any:
    """Check that a calibrator is a function of a spec, and return it in a form that compares by its arguments.

    Args:
        name: the name of the class, for errors.
        calibrator: the argument.
        alternative: " or None" where None is allowed.
    """
    if not callable(calibrator) and not (alternative and calibrator is None):
        checks.refuse_type(name, "calibrator", f"{_FACTORY}{alternative}", _describe_rejected(calibrator))
    fault = None if calibrator is None else _read_unexpected_argument(calibrator)
    # Compare with None, because "" is a fault, too: it means that the function takes no spec.
    if fault is not None:
        inner = calibrator.func if isinstance(calibrator, functools.partial) else calibrator
        function = getattr(inner, "__name__", "the function")
        expected, got = f"{_FACTORY}{alternative}", f"{function}, which does not take a spec"
        if fault:
            expected += f", or functools.partial({function}, {fault}=...)"
            got = f"{function}, which needs {fault}= besides a spec"
        checks.refuse_type(name, "calibrator", expected, got)
    if not isinstance(calibrator, functools.partial):
        return calibrator
    # Sort the keywords, so that the order in which they were passed does not make two partials different.
    return Partial(calibrator.func, calibrator.args, tuple(sorted(calibrator.keywords.items())))


def _describe_rejected(calibrator: object) -> str:
    """Return a description of a value that is not a function, with what to pass instead."""
    if isinstance(calibrator, Calibrator):
        return "a Calibrator, which has a spec already: pass the function that made it, which is called with the spec"
    if isinstance(calibrator, str):
        return f"the string {calibrator!r}: pass the function jq.calibration.{calibrator}"
    return str(checks.describe_value(calibrator))


def _read_unexpected_argument(factory: Callable[..., Any]) -> str | None:
    """Return the first argument that a function needs besides a spec, "" if it takes no spec, or None if it fits."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    # The first positional parameter receives the spec.
    further_parameters = [*positional[1:], *(p for p in required if p.kind is p.KEYWORD_ONLY)]
    if further_parameters:
        return further_parameters[0].name
    try:
        # Optional parameters are fine, as long as one positional argument is accepted.
        signature.bind(None)
    except TypeError:
        return ""
    return None


def describe_factory(factory: object) -> str:
    """Return the name of a calibrator's factory, with the arguments that are bound to it; "" for None."""
    if factory is None:
        return ""
    if isinstance(factory, Partial):
        inner = [describe_factory(factory.function), *map(_describe_argument, factory.arguments)]
        named = (f"{name}={_describe_argument(value)}" for name, value in factory.keywords)
        return f"partial({', '.join([*inner, *named])})"
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))


def _describe_argument(value: object) -> str:
    """Return a description of an argument of a partial; a function by its name, because its repr has an address."""
    return describe_factory(value) if callable(value) else repr(value)
