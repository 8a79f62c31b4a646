"""`second_moments`: the mean of x x^T of a stream of batches, and what else the algorithms read of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from .._core import checks, dtypes, entry_point, sharding

_NAME = "ptq.second_moments"
_HIGHEST = lax.Precision.HIGHEST


class Moments(NamedTuple):
    """Statistics of the inputs of a contraction, d of them; with groups, each array has a first axis for them.

    Attributes:
        second: float32 [d, d], the mean of x x^T.
        mean: float32 [d], the mean of x.
        magnitude: float32 [d], the mean of |x|.
        largest: float32 [d], the largest |x|.
        count: float32, the number of vectors x.
    """

    second: jax.Array
    mean: jax.Array
    magnitude: jax.Array
    largest: jax.Array
    count: jax.Array


class MomentsState(NamedTuple):
    """The state of `second_moments`: each sum as two float32 that together have about 48 bits.

    Attributes:
        second: [d, d], the sum of x x^T.
        second_rest: the part of that sum which `second` has no digits for.
        sums: [2, d], the sums of x and of |x|.
        sums_rest: the part of these sums which `sums` has no digits for.
        largest: [d], the largest |x|.
        count: uint32, the number of vectors, less than 2**32.
    """

    second: jax.Array
    second_rest: jax.Array
    sums: jax.Array
    sums_rest: jax.Array
    largest: jax.Array
    count: jax.Array


for _tuple in (Moments, MomentsState):
    export.register_namedtuple_serialization(_tuple, serialized_name=f"jaxquant.ptq.{_tuple.__name__}")


class Accumulator(NamedTuple):
    """Five pure functions that find statistics of a stream of batches, without keeping the data.

    A state is a pytree of arrays with fixed shapes and dtypes. All functions except `finalize` can be jitted.

    Attributes:
        init: `init(example)` returns the state that holds no data yet. `example` is a `jax.ShapeDtypeStruct`, or an
            array; only its shape matters.
        update: `update(state, batch)` returns the state after one more batch: float32, float16 or bfloat16, with the
            inputs along its last axis. Batches may differ in all other axes.
        merge: `merge(a, b)` returns the state that holds the data of both.
        finalize: `finalize(state)` returns the `Moments`. Called eagerly, it raises an error for a state without data,
            or with a NaN or an infinity. While it is traced, it cannot raise an error; these then show in the numbers.
        all_reduce: `all_reduce(state, axis_name)` merges the states of all devices along an axis of `jax.shard_map` (or
            a named axis of `jax.vmap`).
    """

    init: Callable[..., MomentsState]
    update: Callable[..., MomentsState]
    merge: Callable[..., MomentsState]
    finalize: Callable[..., Moments]
    all_reduce: Callable[..., MomentsState]


def second_moments(*, groups: bool = False) -> Accumulator:
    """Return the functions that accumulate the second moments of the inputs of a contraction.

    H = (1 / n) * sum x x^T over the n vectors x along the last axis of all batches

    The products are summed in float32 with the highest precision of the backend, the batches with two float32 numbers
    for each sum, so that the error does not grow with the number of batches. The state takes 8 bytes for each pair of
    inputs, and the result 4.

    Args:
        groups: Static. Whether the last two axes of a batch are groups and inputs, for outputs that read different
            inputs, as in grouped convolutions. The groups get second moments of their own.

    Returns:
        An `Accumulator`, with the functions of a calibrator.

    Raises:
        TypeError: groups is not True or False. `update`: the batch is not an array of a float dtype.
        ValueError: `init`: the example has too few dimensions. `update`: the batch has other inputs than the state.
            `finalize`: the state has no data, or a NaN or an infinity.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import ptq
        >>> moments = ptq.second_moments()
        >>> state = moments.init(jnp.zeros((1, 2)))
        >>> for batch in (jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([[-1.0, 1.0]])):
        ...     state = moments.update(state, batch)
        >>> moments.finalize(state).second * 3
        Array([[11.,  1.],
               [ 1.,  5.]], dtype=float32)

    Source: Frantar et al., arXiv 2210.17323, section 3 (the Hessian there is twice this matrix); Knuth, The Art of
    Computer Programming, volume 2, section 4.2.2, theorem B, for the sums of two parts.
    """
    checks.check_flag(_NAME, "groups", groups)
    axes = 2 if groups else 1

    def init(example: Any) -> MomentsState:
        has_shape = hasattr(example, "shape") and hasattr(example, "dtype")
        expected = "an array or a jax.ShapeDtypeStruct"
        checks.require_type(has_shape, f"{_NAME}.init", "example", expected, type(example).__name__)
        shape = _read_shape(f"{_NAME}.init", "example", example.shape, axes)
        state = _make_empty(shape)
        # Under jax.shard_map the carry of a loop must vary over the devices as its data do.
        return jax.tree.map(lambda x: sharding.vary_like(x, example), state) if checks.is_traced(example) else state

    def update(state: MomentsState, batch: Any) -> MomentsState:
        name = f"{_NAME}.update"
        _check_state(name, "state", state)
        batch = entry_point.unwrap_array(batch)
        (batch,) = entry_point.convert_arrays(name, {"batch": batch})
        checks.check_array(name, "batch", batch, dtypes.FLOATS)
        shape = _read_shape(name, "batch", batch.shape, axes)
        expected = f"last dimensions {tuple(state.largest.shape)}, as for the example given to init"
        checks.require(shape == state.largest.shape, name, "batch", expected, f"shape {batch.shape}")
        return _update(state, batch)

    def merge(a: MomentsState, b: MomentsState) -> MomentsState:
        _check_state(f"{_NAME}.merge", "a", a)
        _check_state(f"{_NAME}.merge", "b", b)
        checks.check_shape(f"{_NAME}.merge", "b.largest", b.largest, tuple(a.largest.shape), "the shape of a.largest")
        return _merge(a, b)

    return Accumulator(init, update, merge, _finalize, _all_reduce)


def _read_shape(function: str, argument: str, shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    expected = f"rank {axes} or more"
    checks.require(len(shape) >= axes, function, argument, expected, f"rank {len(shape)}")
    return tuple(shape[-axes:])


def _make_empty(shape: tuple[int, ...]) -> MomentsState:
    second, sums, largest = (*shape, shape[-1]), (2, *shape), shape
    sizes = (second, second, sums, sums, largest)
    # An integer counts on where a float32 would stop, at 2**24.
    return MomentsState(*[jnp.zeros(size, jnp.float32) for size in sizes], count=jnp.zeros((), jnp.uint32))


def _check_state(function: str, argument: str, state: Any) -> None:
    """Raise unless the state has the type, the shapes and the dtypes that `init` gives it."""
    name, reason = MomentsState.__name__, f"as {_NAME}.init returns it"
    is_state = isinstance(state, MomentsState)
    checks.require_type(is_state, function, argument, f"a {name}, {reason}", type(state).__name__)
    template = jax.eval_shape(lambda: _make_empty(tuple(state.largest.shape)))
    for field, part, like in zip(MomentsState._fields, state, template, strict=True):
        got, expected = (f"{x.dtype}{list(x.shape)}" for x in (part, like))
        checks.require(got == expected, function, f"{argument}.{field}", f"{expected}, {reason}", got)


@jax.jit
def _update(state: MomentsState, batch: jax.Array) -> MomentsState:
    axes = state.largest.ndim
    x = lax.stop_gradient(batch).astype(jnp.float32).reshape(-1, *state.largest.shape)
    # On a mesh with explicit axes JAX refuses a product that sums a sharded dimension.
    x = sharding.place_whole(x)
    # The groups are a batch of matrix products.
    pattern = "ni,nj->ij" if axes == 1 else "ngi,ngj->gij"
    product = jnp.einsum(pattern, x, x, precision=_HIGHEST)
    size = jnp.abs(x)
    sums = jnp.stack([jnp.sum(x, 0), jnp.sum(size, 0)])
    # By the bits, which sort as magnitudes do: a maximum of floats may lose a NaN on a CPU.
    largest = lax.bitcast_convert_type(jnp.max(_read_bits(size), 0, initial=0), jnp.float32)
    zeros = (jnp.zeros_like(product), jnp.zeros_like(sums))
    return _merge(state, MomentsState(product, zeros[0], sums, zeros[1], largest, jnp.uint32(x.shape[0])))


@jax.jit
def _merge(a: MomentsState, b: MomentsState) -> MomentsState:
    second = _add_parts(a.second, a.second_rest, b.second, b.second_rest)
    sums = _add_parts(a.sums, a.sums_rest, b.sums, b.sums_rest)
    largest = jnp.maximum(_read_bits(a.largest), _read_bits(b.largest))
    return MomentsState(*second, *sums, lax.bitcast_convert_type(largest, jnp.float32), a.count + b.count)


def _read_bits(magnitude: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(magnitude, jnp.int32)


def _add_parts(a: jax.Array, a_rest: jax.Array, b: jax.Array, b_rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum of two numbers of two parts, in two parts."""
    # What the float sum loses, exactly: no operation of this may be reordered, and XLA reorders none.
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    rest = rest + (a_rest + b_rest)
    # The first part becomes the whole sum, rounded once, so that `finalize` needs no other.
    result = total + rest
    return result, rest - (result - total)


def compute_status(state: MomentsState) -> jax.Array:
    """Return 1 for finite moments, 0 for data with a NaN or an infinity, and -1 for finite data that overflow."""
    is_finite = jnp.isfinite(state.second).all() & jnp.isfinite(state.sums).all()
    return jnp.where(is_finite, 1, jnp.where(jnp.isfinite(state.largest).all(), -1, 0))


def _finalize(state: MomentsState) -> Moments:
    name = f"{_NAME}.finalize"
    _check_state(name, "state", state)
    if not checks.is_traced(state.count):
        checks.require(int(state.count) > 0, name, "state", "data", "none; update the state with a batch first")
        status = int(compute_status(state))
        checks.require(status != 0, name, "state", "finite numbers in all batches", "a NaN or an infinity")
        expected = "numbers with products that add up to less than the largest float32, 3.4e38"
        largest = float(state.largest.max(initial=0))
        checks.require(status > 0, name, "state", expected, f"magnitudes of up to {largest:.3g}")
    return _divide(state)


@jax.jit
def _divide(state: MomentsState) -> Moments:
    count = state.count.astype(jnp.float32)
    mean, magnitude = state.sums / count
    return Moments(state.second / count, mean, magnitude, state.largest, count)


def _all_reduce(state: MomentsState, axis_name: Hashable) -> MomentsState:
    _check_state(f"{_NAME}.all_reduce", "state", state)
    # Between devices the sums are rounded to float32, but only once for all batches.
    parts = MomentsState(*(lax.psum(part, axis_name) for part in state))
    return parts._replace(largest=lax.pmax(state.largest, axis_name))
