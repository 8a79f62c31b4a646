"""Where XLA must not merge, reorder or overlap operations. Knows nothing of what is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import sharding


def make_false() -> jax.Array:
    """A False that no compiler pass can see through."""
    return lax.optimization_barrier(np.zeros((), np.bool_))


@jax.custom_jvp
def round_result(result: jax.Array) -> jax.Array:
    """Returns its float32 argument, and keeps the operation that made it from merging with the one that uses it.

    XLA fuses a multiplication with an addition that follows, in the same operator or in the user's code, and jax
    0.10 adds two constants in a row as one; both round once where a runtime rounds twice. As integers the bits of
    no float but some NaN are above those of the plain NaN: this minimum does nothing, but no compiler can tell.
    """
    bits = lax.bitcast_convert_type(result, jnp.int32)
    return lax.bitcast_convert_type(lax.min(bits, np.int32(0x7FC00000)), jnp.float32)


@round_result.defjvp
def _round_result_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_result(*primals), tangents[0]


def wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    """Returns an integer array unchanged, on a CPU not before `done` is computed.

    A loop would say the same, but XLA:CPU runs element-wise work in a loop's body on one thread; and chunks that do
    not depend on each other it computes one behind the other before it uses the first, out of the cache again.
    """
    return lax.platform_dependent(value, done, cpu=_wait_for, default=sharding.vary_like)


def _wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    if done.size == 0:
        return value
    first = lax.slice(done, (0,) * done.ndim, (1,) * done.ndim).reshape(())
    bits = lax.bitcast_convert_type(first, jnp.int32)
    # Never negative, so that the minimum is 0 always; no pass of XLA knows.
    zero = jnp.minimum(bits & 0x7FFFFFFF, 0).astype(value.dtype)
    return value ^ jnp.broadcast_to(zero, value.shape)


def _pin_layout(x: jax.Array) -> jax.Array:
    return lax.optimization_barrier(x.reshape(1, *x.shape)).reshape(x.shape)


def pin_layout(x: jax.Array) -> jax.Array:
    """Returns x, in memory before anything that follows reads it, on a CPU."""
    return lax.platform_dependent(x, cpu=_pin_layout, default=lambda v: v)
