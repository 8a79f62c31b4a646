"""Identity functions that keep XLA from merging, reordering or overlapping operations, branches by platform, and values
with the derivatives of others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from .._core import recording, sharding

# The numbers of elements between which `split_small_fusion` splits. With fewer, a fusion of some 15 operations that
# reads and writes float32 has less than 200,000 units of work, and runs on one thread in any form. With more, the first
# of two fusions reads and writes 512 KiB or more, and runs on two threads, too.
_FEWEST_SPLIT = 2**11 + 1
MOST_SPLIT = 2**16 - 1
# The largest number of elements that are split off from what computed them, or split after a contraction. With more,
# the contractions beside them run on two threads. One of the threads would fall asleep meanwhile, and waking it takes
# longer than the split saves.
MOST_ALONE = 2**13


def make_false(like: jax.Array, *, is_split: bool = False) -> jax.Array:
    """Return an array of False of another's shape, in a form that the compiler takes for different in each element.

    A `select` on it always returns the same operand, but XLA must keep the select. XLA knows of an array that repeats
    its elements, and computes with one copy of them; it must not take the result of this select for such an array.

    Args:
        like: any array; only its shape and its sharding matter. Pass one without a derivative.
        is_split: Static. Whether the select is between `split_small_fusion(like, MOST_ALONE)` and others, which takes
            fewer operations: XLA does not know whether the result of a barrier repeats its elements.
    """
    return _make_false_maker(is_split)(like)


# Cached, because JAX reuses a trace only for the same function object.
@functools.cache
def _make_false_maker(is_split: bool) -> Callable[[jax.Array], jax.Array]:
    @custom_vmap
    def make(like: jax.Array) -> jax.Array:
        axes = _list_long_axes(like)
        vary_along_all = functools.partial(_make_false, axes=axes)
        if not (is_split and _is_split(like, MOST_ALONE)):
            return vary_along_all(like)
        # Only a program for a CPU has the barrier.
        return lax.platform_dependent(like, cpu=functools.partial(_make_false, axes=axes[-1:]), default=vary_along_all)

    @make.def_vmap
    def make_for_batch(axis_size: int, in_batched: list[bool], like: jax.Array) -> tuple[jax.Array, bool]:
        # The batch counts as a dimension, because its elements may be repeated ones. The only argument is the batched
        # one.
        del axis_size, in_batched
        return make(like), True

    return make


def _list_long_axes(like: jax.Array) -> list[int]:
    return [axis for axis, length in enumerate(like.shape) if not isinstance(length, int) or length != 1]


def _make_false(like: jax.Array, axes: list[int]) -> jax.Array:
    """Return an array of False that varies along some dimensions of another array, for the compiler."""
    # The sum of the indices of an element is never negative, but the compiler does not know the number 0. A loop finds
    # the sum while it runs, without an array of its own. Dimensions that fit into memory cannot overflow int32 here.
    indices = [lax.broadcasted_iota(jnp.int32, like.shape, axis) for axis in axes]
    total = functools.reduce(lax.add, indices) if indices else lax.full(like.shape, 0, jnp.int32)
    number: Any = lax.optimization_barrier(np.int32(0))
    if isinstance(like, Tracer) and not isinstance(number, Tracer):
        # In `jax.ensure_compile_time_eval` JAX computes at once what depends on no traced array, and the compiler would
        # know the number. Not so next to a traced array.
        number, _ = lax.optimization_barrier((np.int32(0), like))
    zero = lax.broadcast_in_dim(number, like.shape, ())
    return sharding.place_like(lax.lt(total, zero), like)


def _derive_same(value: jax.Array, **_: object) -> tuple[tuple[int, ...], np.dtype]:
    return value.shape, value.dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_result(result: jax.Array, most: int = MOST_SPLIT) -> jax.Array:
    """Return a float32 array unchanged, and keep XLA from merging its last operation with the one that uses it.

    XLA contracts a multiplication and a following addition into one fused operation, whether the addition is part of
    the same operator or of the user's code. With jax 0.10 it also folds two consecutive additions of constants into
    one. Either way it rounds once where a runtime rounds twice. `most` is as in `split_small_fusion`.
    """
    return _hide_rounding(result, most)


@recording.mark("keep", _derive_same, recording.map_elements)
def _hide_rounding(value: jax.Array, most: int) -> jax.Array:
    # The bits of every float, read as a signed integer, are at most the default NaN's (0x7FC00000); only NaNs
    # with other payloads are larger. The minimum therefore changes no number and keeps every NaN a NaN. The compiler
    # does not know that, and it cannot contract float operations across an integer one. A split alone would not do:
    # jax 0.10's XLA removes the barrier before it forms the fusions.
    bits = lax.min(lax.bitcast_convert_type(value, jnp.int32), np.int32(0x7FC00000))
    return split_small_fusion(lax.bitcast_convert_type(bits, jnp.float32), most)


@round_result.defjvp
def _round_result_jvp(most: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_result(*primals, most), tangents[0]


@jax.custom_jvp
def replace_value(value: jax.Array, exact: jax.Array) -> jax.Array:
    """Return `exact`, with the derivatives of `value`."""
    # `value + stop_gradient(exact - value)` has the same derivative, but is rounded, and not equal to `exact`.
    del value
    return exact


@replace_value.defjvp
def _replace_value_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


@recording.mark("keep", _derive_same, recording.map_elements)
def split_small_fusion(value: jax.Array, most: int = MOST_SPLIT) -> jax.Array:
    """Return an array unchanged, and end a fusion of XLA:CPU with it if it has few elements.

    XLA:CPU runs a fusion on several threads if its cost analysis counts more operations than bytes of operands and
    result, and (operations + 10 * bytes) reaches 200,000; every select, clamp, conversion and bitcast of an element
    counts as an operation. With at most as many operations as bytes, a fusion needs 512 KiB of them. Waiting for
    another thread takes longer than the work on some thousand elements, so two fusions below that ratio are faster than
    one above it. For large arrays one fusion is better: it reads and writes memory once, on all threads.

    Call it in the middle of a sequence of element-wise operations. Values that a derivative passes through must not
    reach it as floats: pass their bits as integers, or call it in a function with a derivative rule of its own. With
    jax 0.10 it has no effect, because its XLA removes the barrier before it forms the fusions.

    Args:
        value: any array. Under `jax.vmap` the elements of the whole batch count.
        most: Static. The largest number of elements that count as few.
    """
    return _make_split(most)(value) if _may_become_small(value, most) else value


def _may_become_small(value: jax.Array, most: int) -> bool:
    """Return whether a value, or a batch of such values, can be in the range of sizes that are split."""
    # The size is no int if a dimension is symbolic, as in `jax.export`. It cannot be compared then.
    return isinstance(value.size, int) and 1 < value.size <= most


def _is_split(value: jax.Array, most: int) -> bool:
    return _may_become_small(value, most) and value.size >= _FEWEST_SPLIT


# Cached, because JAX reuses a trace only for the same function object.
@functools.cache
def _make_split(most: int) -> Callable[[jax.Array], jax.Array]:
    @custom_vmap
    def split(value: jax.Array) -> jax.Array:
        if not _is_split(value, most):
            return value
        return lax.platform_dependent(value, cpu=lax.optimization_barrier, default=lambda x: x)

    @split.def_vmap
    def split_batch(axis_size: int, in_batched: list[bool], value: jax.Array) -> tuple[jax.Array, bool]:
        # The rule for `jax.vmap` decides again, by the size of the batch. The only argument is the batched one.
        del axis_size, in_batched
        return split(value), True

    return split


def compute_once(values: Any) -> Any:
    """Return arrays unchanged, and make XLA:CPU compute them in loops of their own.

    It is for large arrays that XLA would compute slowly where they are read, and for small ones. XLA would merge the
    operations on a few elements, such as those that find a scale, into each loop that reads the result. That makes
    every one of these loops longer to compile, and counts against those on one thread; see `split_small_fusion`.

    Args:
        values: a pytree of arrays.
    """
    if recording.is_recording():
        return values
    return lax.platform_dependent(values, cpu=lax.optimization_barrier, default=lambda same: same)


def hide_number(value: jax.Array | np.ndarray) -> jax.Array:
    """Return a known number, an array of one element, as one that XLA does not know.

    XLA:CPU compiles equal loops once. A number that it knows is a part of each loop that reads it: the loops of layers
    that differ in nothing but the scale of their weights would be compiled one by one.
    """
    number = jnp.asarray(value)
    return number if recording.is_recording() else lax.optimization_barrier(number)


def tie_to_row(row: jax.Array, codes: jax.Array, *, is_reshaped: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return a row and the codes that it is multiplied by unchanged, and make XLA compute the row before it reads them.

    The codes then depend on the row. Otherwise XLA would convert codes that are constants while it compiles, and codes
    that a loop does not change before the loop: each step would read four bytes for a code of one. The row is computed
    once, and not for each column.

    Args:
        row: the row.
        codes: the codes.
        is_reshaped: Static. Whether the codes may be the result of a reshape. With jax 0.10 XLA copies such codes at a
            barrier, in each call, so there they are returned as they are.
    """
    if is_reshaped and jax.__version_info__ < (0, 12):
        return lax.optimization_barrier(row), codes
    return lax.optimization_barrier((row, codes))


@recording.mark("keep", _derive_same)
def wait_for(value: jax.Array, predecessor: jax.Array) -> jax.Array:
    """Return an integer array unchanged, and make XLA:CPU compute `predecessor` before it.

    This orders the chunks of a computation, so that intermediate results stay in the cache. Without the order
    XLA:CPU computes the intermediate results of all chunks before it uses the first, which has then left the cache.
    A loop would order them too, but XLA:CPU runs a loop that calls no library on one thread.
    """
    return lax.platform_dependent(value, predecessor, cpu=_wait_for, default=sharding.vary_like)


def _wait_for(value: jax.Array, predecessor: jax.Array) -> jax.Array:
    if predecessor.size == 0:
        return value
    first = lax.slice(predecessor, (0,) * predecessor.ndim, (1,) * predecessor.ndim).reshape(())
    bits = lax.bitcast_convert_type(first if first.dtype.itemsize == 4 else first.astype(jnp.float32), jnp.int32)
    # Without the sign bit the integer is never negative, so the minimum is always 0 and the exclusive or changes
    # nothing. XLA cannot deduce that, and therefore has to compute `predecessor` first.
    zero = jnp.minimum(bits & 0x7FFFFFFF, 0).astype(value.dtype)
    return value ^ jnp.broadcast_to(zero, value.shape)


def wait_for_batch(value: jax.Array, predecessor: jax.Array) -> jax.Array:
    """Return what `wait_for` does, and under `jax.vmap` an array that is not mapped unless `value` is.

    Call it with a predecessor without a derivative.
    """
    return _wait_for_batch(value, predecessor)


@custom_vmap
def _wait_for_batch(value: jax.Array, predecessor: jax.Array) -> jax.Array:
    return wait_for(value, predecessor)


@_wait_for_batch.def_vmap
def _wait_for_mapped(
    axis_size: int, in_batched: list[bool], value: jax.Array, predecessor: jax.Array
) -> tuple[jax.Array, bool]:
    if in_batched[0]:
        return jax.vmap(_wait_for_batch, in_axes=(0, 0 if in_batched[1] else None))(value, predecessor), True
    return (value if axis_size == 0 else _wait_for_batch(value, predecessor[0])), False


@recording.mark("keep", _derive_same, recording.map_elements)
def pin_layout(value: jax.Array) -> jax.Array:
    """Return an array unchanged, and make XLA:CPU write it to memory in its layout before any operation reads it."""
    return lax.platform_dependent(value, cpu=_pin_layout, default=lambda x: x)


def _pin_layout(x: jax.Array) -> jax.Array:
    # XLA folds a transpose into the operation that reads it, but not through a barrier around a reshape. The reshape
    # adds a dimension of 1: then XLA still uses its fast kernel for a preceding transpose, which it would not do
    # before a reshape that flattens.
    return lax.optimization_barrier(x.reshape(1, *x.shape)).reshape(x.shape)


def is_moving(permutation: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a transpose moves elements in memory; the position of a dimension of 1 does not matter."""
    axes = [axis for axis in permutation if shape[axis] != 1]
    return axes != sorted(axes)


def transpose_in_memory(x: jax.Array, permutation: Sequence[int]) -> jax.Array:
    """Return x transposed, and make XLA:CPU write it to memory in that layout before another operation reads it.

    XLA:CPU would fold the transpose into the dimension numbers of the contraction that follows. The contraction would
    then not have the form that its fast kernel accepts, and that costs more than the transpose.
    """
    # A transpose that moves nothing is a reshape, which is free.
    if not is_moving(permutation, x.shape):
        return lax.reshape(x, tuple(x.shape[axis] for axis in permutation))
    return pin_layout(lax.transpose(x, tuple(permutation)))


# Branches by the platform that a program is compiled for. These are for callers outside of `_kernels`.


def choose_on_cpu(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any], *operands: Any) -> Any:
    """Return `on_cpu(*operands)` in a program for a CPU, and `elsewhere(*operands)` in any other.

    Both return the same values. Use it where one form of a computation suits the caches and the threads of a CPU, and
    another one suits processors that run all of it at once. The choice is made when the program is lowered, so that a
    program that is exported for several platforms holds all of them.
    """
    return lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def run_branch(
    platforms: Sequence[Sequence[str] | None], branches: Sequence[Callable[..., Any]], *operands: Any
) -> Any:
    """Return the result of the branch for the platform; None among the platforms marks the branch for all others.

    This repeats a `jax.lax.platform_dependent` of a traced program. Only the branch of the platform is compiled: a
    kernel of another one would raise an error.
    """
    named: Mapping[str, Callable[..., Any]] = {
        name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ()
    }
    default = next((branch for names, branch in zip(platforms, branches, strict=True) if names is None), None)
    return lax.platform_dependent(*operands, default=default, **named)
