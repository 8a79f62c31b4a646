"""What has to wait for what, where XLA would do everything at once. Knows nothing of what is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from . import granularity


def wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    """Returns an integer array unchanged, on a CPU not before `done` is computed.

    A loop would say the same, but XLA:CPU runs element-wise work in a loop's body on one thread; and chunks that do
    not depend on each other it computes one behind the other before it uses the first, out of the cache again.
    """
    return lax.platform_dependent(value, done, cpu=_wait_for, default=granularity.vary_like)


def _wait_for(value: jax.Array, done: jax.Array) -> jax.Array:
    if done.size == 0:
        return value
    first = lax.slice(done, (0,) * done.ndim, (1,) * done.ndim).reshape(())
    bits = lax.bitcast_convert_type(first, jnp.int32)
    # Never negative, so that the minimum is 0 always; no pass of XLA knows.
    zero = jnp.minimum(bits & 0x7FFFFFFF, 0).astype(value.dtype)
    return value ^ jnp.broadcast_to(zero, value.shape)
