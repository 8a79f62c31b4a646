"""Identity functions that keep XLA from merging, reordering or overlapping operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import sharding


def make_false() -> jax.Array:
    """Return False in a form that the compiler cannot replace by the constant.

    A `select` on it always returns the same operand, but XLA must keep the select.
    """
    return lax.optimization_barrier(np.zeros((), np.bool_))


@jax.custom_jvp
def round_result(result: jax.Array) -> jax.Array:
    """Return a float32 array unchanged, and keep XLA from merging its last operation with the one that uses it.

    XLA contracts a multiplication and a following addition into one fused operation, whether the addition is part of
    the same operator or of the user's code. With jax 0.10 it also folds two consecutive additions of constants into
    one. Either way it rounds once where a runtime rounds twice.
    """
    # The bits of every float, read as a signed integer, are at most those of the default NaN (0x7FC00000); only NaNs
    # with other payloads are larger. The minimum therefore changes no number and keeps every NaN a NaN. The compiler
    # does not know that, and it cannot contract float operations across an integer one.
    bits = lax.bitcast_convert_type(result, jnp.int32)
    return lax.bitcast_convert_type(lax.min(bits, np.int32(0x7FC00000)), jnp.float32)


@round_result.defjvp
def _round_result_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_result(*primals), tangents[0]


def wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    """Return an integer array unchanged, and make XLA:CPU compute `done` before it.

    This orders the chunks of a computation whose intermediate results should stay in the cache. Without the order
    XLA:CPU computes the intermediate results of all chunks before it uses the first, which has then left the cache.
    A loop would order them too, but XLA:CPU runs element-wise work in the body of a loop on one thread.
    """
    return lax.platform_dependent(value, done, cpu=_wait_for, default=sharding.vary_like)


def _wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    if done.size == 0:
        return value
    first = lax.slice(done, (0,) * done.ndim, (1,) * done.ndim).reshape(())
    bits = lax.bitcast_convert_type(first, jnp.int32)
    # Without the sign bit the integer is never negative, so the minimum is always 0 and the exclusive or changes
    # nothing. XLA cannot deduce that, and therefore has to compute `done` first.
    zero = jnp.minimum(bits & 0x7FFFFFFF, 0).astype(value.dtype)
    return value ^ jnp.broadcast_to(zero, value.shape)


def pin_layout(x: jax.Array) -> jax.Array:
    """Return an array unchanged, and make XLA:CPU write it to memory in its layout before any operation reads it."""
    return lax.platform_dependent(x, cpu=_pin_layout, default=lambda value: value)


def _pin_layout(x: jax.Array) -> jax.Array:
    # XLA folds a transpose into the operation that reads it, but not through a barrier around a reshape. The reshape
    # adds a dimension of 1: then XLA still uses its fast kernel for a preceding transpose, which it would not do
    # before a reshape that flattens.
    return lax.optimization_barrier(x.reshape(1, *x.shape)).reshape(x.shape)
