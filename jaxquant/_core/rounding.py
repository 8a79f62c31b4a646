"""Round to codes and to narrower float dtypes, exactly where XLA's own rewriting would change a result.

Written in `lax` where `jnp` would read better: every operator calls these functions, and JAX traces each jnp function
again for every shape. `tests/core/test_numerics.py` fails when a new XLA breaks one of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dtypes, small_floats

# Adding 1.5 * 2**23 to |v| < 2**22 leaves round-half-even(v) in the low bits of the sum. The bits of a float32 sort as
# the float does, so a clamp of the bits saturates: XLA:CPU runs this two to six times faster than round, clip and
# convert. _NAN_WRAP takes every quiet NaN, of either sign, below the codes and keeps +infinity above them.
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = int(_MAGIC.view(np.int32))
_NAN_WRAP = 0x80000000 - 0x7FC00000


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_dtype(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds float32 values to those of float16 or bfloat16, half to even, and returns them as float32.

    `value.astype(dtype)` alone will not do: XLA drops a conversion that is undone right after.
    """
    if dtype == dtypes.BFLOAT16:
        return lax.reduce_precision(value, 8, 7)
    if dtype == dtypes.FLOAT16:
        # reduce_precision flushes what float16 keeps as subnormals: the multiples of 2**-24 below 2**-14.
        small = lax.round(value * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
        return jnp.where(jnp.abs(value) < np.float32(2**-14), small, lax.reduce_precision(value, 5, 10))
    return value


@round_to_dtype.defjvp
def _round_to_dtype_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_to_dtype(*primals, dtype), tangents[0]  # straight through: a rounding is flat nearly everywhere


def encode_steps(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None = None
) -> jax.Array:
    """Returns clip(round_half_even(value) + zero_point, qmin, qmax) as an integer dtype of 2 to 16 bits.

    Args:
        value: float32. Infinities saturate; NaN becomes qmin.
        zero_point: int32 of value's shape, within the bounds, or None for 0.
        dtype: the integer dtype.
        bounds: (qmin, qmax), by default all that the dtype holds.
    """
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    zero = np.int32(_MAGIC_BITS + _NAN_WRAP)  # the code 0; its low 16 bits are zeros
    code = lax.bitcast_convert_type(lax.add(value, _MAGIC), jnp.int32)
    code = lax.add(code, np.int32(_NAN_WRAP))
    if zero_point is None:
        code = lax.clamp(zero + np.int32(low), code, zero + np.int32(high))
    else:
        least, most = (lax.sub(zero + np.int32(end), zero_point) for end in (low, high))
        code = lax.add(lax.clamp(least, code, most), zero_point)
    if dtypes.count_bits(dtype) < 8:
        # Packing nibbles ends XLA:CPU's vector loop: 51 ms for 4096 x 4096 in one loop, 5 ms in two (jax 0.12;
        # on 0.10 the packing alone takes 40).
        code = lax.optimization_barrier(lax.convert_element_type(code, jnp.int8))
    return lax.convert_element_type(code, dtype)


def find_in_range(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None
) -> jax.Array:
    """Returns where rounding alone, without saturation, lands on a code of `dtype`. False for NaN."""
    if dtype in dtypes.SMALL_FLOATS:
        return ~(small_floats.find_overflow(value, dtype) | jnp.isnan(value))
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    code = lax.round(value, lax.RoundingMethod.TO_NEAREST_EVEN)
    if zero_point is not None:
        code = code + zero_point.astype(jnp.float32)
    return (code >= low) & (code <= high)
