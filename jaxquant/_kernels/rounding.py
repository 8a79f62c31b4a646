"""Rounding to codes and to narrower float dtypes, in forms whose result no optimization of XLA changes.

The functions use `lax` even where `jnp` would be easier to read: every operator calls them, and JAX has to trace a jnp
function again for every shape. `tests/core/test_numerics.py` fails if a new version of XLA breaks one of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import dtypes, recording, small_floats
from . import barriers, packed_codes

# The floats between 2**23 and 2**24 are exactly the integers. Adding 1.5 * 2**23 to a value |v| < 2**22 therefore
# rounds v half to even, and leaves the integer in the low bits of the sum. The bits of positive floats, read as
# integers, sort as the floats do, so clamping the bits saturates the code. XLA:CPU runs this addition and integer clamp
# several times faster than round, clip and convert. _NAN_WRAP is added to the bits, modulo 2**32, before the clamp: it
# moves every quiet NaN, of either sign, below the codes and keeps +infinity above them. The 2**16 in it is a margin:
# then this also holds if a zero point of 16 bits is added to the bits.
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = int(_MAGIC.view(np.int32))
_NAN_WRAP = 0x80000000 - 0x7FC00000 + 2**16


@recording.mark("round_to_dtype", lambda value, dtype: (value.shape, jnp.float32), recording.map_elements)
def round_to_dtype(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return float32 values rounded half to even to a float dtype, but stored as float32.

    `value.astype(dtype).astype(float32)` does not round reliably, because XLA removes a pair of conversions.
    """
    # float32 values need no function with a derivative rule, which would take longer to trace than an operation.
    return _round_to_half(value, dtype) if dtype in (dtypes.BFLOAT16, dtypes.FLOAT16) else value


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_to_half(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return float32 values rounded to bfloat16 or float16, stored as float32."""
    if dtype == dtypes.BFLOAT16:
        return lax.reduce_precision(barriers.split_small_fusion(value), 8, 7)
    value = barriers.split_small_fusion(value)
    # reduce_precision flushes the subnormals of float16, the multiples of 2**-24 below 2**-14, to zero.
    small = lax.round(value * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
    small = barriers.split_small_fusion(small)
    return jnp.where(jnp.abs(value) < np.float32(2**-14), small, lax.reduce_precision(value, 5, 10))


@_round_to_half.defjvp
def _round_to_half_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # The derivative of rounding is 0 almost everywhere. Here rounding only changes the precision, so the tangent passes
    # unchanged, as it does through `astype`.
    return _round_to_half(*primals, dtype), tangents[0]


@recording.mark("encode", lambda value, dtype, **_: (value.shape, dtype), recording.map_elements)
def encode_steps(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None = None,
    most: int = barriers.MOST_SPLIT,
) -> jax.Array:  # fmt: skip
    """Return the codes of quotients in an integer dtype of 2 to 16 bits.

    code = clip(round_half_even(value) + zero_point, qmin, qmax)

    Args:
        value: float32. Infinities saturate; NaN becomes qmin.
        zero_point: int32 of value's shape, within the bounds, or None for 0.
        dtype: the integer dtype.
        bounds: (qmin, qmax); the default is the bounds of the dtype.
        most: Static. The largest number of elements that are encoded in two fusions; see `split_small_fusion`.
    """
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    zero = np.int32(_MAGIC_BITS + _NAN_WRAP)  # the bits that represent code 0; the low 16 are zeros
    code = lax.bitcast_convert_type(lax.add(value, _MAGIC), jnp.int32)
    # The sum of the zero point and the constant has the zero point's own shape in the compiled program, so each element
    # takes one addition with a zero point, too.
    code = lax.add(code, np.int32(_NAN_WRAP) if zero_point is None else lax.add(zero_point, np.int32(_NAN_WRAP)))
    # If there are few elements, the quotient and these additions are one fusion, and what follows is another one.
    code = barriers.split_small_fusion(code, most)
    # No subtraction of `zero` is needed: the narrowing conversion at the end drops all but the low bits.
    code = lax.clamp(zero + np.int32(low), code, zero + np.int32(high))
    if dtypes.count_bits(dtype) < 8:
        # XLA:CPU does not vectorize a loop that packs codes of less than a byte. The barrier puts the packing into a
        # loop of its own, so that the rounding keeps its vector instructions.
        code = lax.optimization_barrier(lax.convert_element_type(code, jnp.int8))
        return packed_codes.narrow_codes(code, dtype)
    return lax.convert_element_type(code, dtype)


def mark_in_range(
    value: jax.Array, zero_point: jax.Array | None, dtype: np.dtype, bounds: tuple[int, int] | None
) -> jax.Array:
    """Return a mask of the quotients that round to a code of `dtype` without saturation; False for NaN."""
    if dtype in dtypes.SMALL_FLOATS:
        return ~(small_floats.mark_overflow(value, dtype) | jnp.isnan(value))
    low, high = dtypes.find_bounds(dtype) if bounds is None else bounds
    # The division before this, and the comparisons after it, are one fusion each if there are few elements.
    code = barriers.split_small_fusion(lax.round(value, lax.RoundingMethod.TO_NEAREST_EVEN))
    if zero_point is not None:
        code = code + zero_point.astype(jnp.float32)
    return (code >= low) & (code <= high)
