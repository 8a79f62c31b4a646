"""Preparation of the operands of a contraction: codes of any dtype as int8, with zero points shifted accordingly.

The fast kernels contract int8 by int8. A uint8 operand is therefore shifted by 128, and so is its zero point, which
leaves their difference unchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core import checks, dtypes, recording, sharding
from . import barriers

_UINT8 = np.dtype(jnp.uint8)


def convert_to_signed(x: jax.Array) -> jax.Array:
    """Return x as int8: subtract 128 from a uint8, and widen narrower dtypes."""
    # An exporter records a contraction with the codes and the zero points as they are.
    if recording.is_recording():
        return x
    return shift_to_signed(x).astype(jnp.int8)


def shift_to_signed(x: jax.Array) -> jax.Array:
    """Return x with 128 subtracted from a uint8, as int8; codes of another dtype are returned unchanged."""
    if x.dtype != _UINT8 or recording.is_recording():
        return x
    # Flipping the top bit and reading the result as signed subtracts 128, without widening the bytes.
    return lax.bitcast_convert_type(x ^ np.uint8(128), jnp.int8)


def unpack_to_int8(codes: jax.Array) -> jax.Array:
    """Return codes of 2 or 4 bits as int8, and make XLA:CPU write them to memory before another operation reads them.

    Use this for operands that are read more than once, or in an order that differs from that in memory. XLA:CPU would
    fuse the conversion with each operation that reads its result. Each would unpack a code every time it reads it, and
    would lose its vector instructions or the fast kernel of a transpose.
    """
    unpacked = codes.astype(jnp.int8)
    return unpacked if sharding.is_placed(codes) else barriers.pin_layout(unpacked)


def read_offset(dtype: Any) -> int:
    """Return the number that `convert_to_signed` subtracts from codes of this dtype."""
    return 128 if dtype == _UINT8 else 0


def is_centred(zero_point: object, dtype: np.dtype | None) -> bool:
    """Return whether the zero point is known to be 0 after the shift to int8, so that it needs no correction."""
    if dtype not in dtypes.CONTRACTED:  # not an array, or a dtype that a later check rejects
        return False
    if zero_point is None:
        return read_offset(dtype) == 0
    if getattr(zero_point, "dtype", None) != dtype:
        return False  # a later check rejects the zero point
    if checks.is_traced(zero_point) or (isinstance(zero_point, jax.Array) and not zero_point.is_fully_addressable):
        return False
    # numpy holds each code in one byte. Each eager call pays for this, and a comparison of arrays takes longer.
    values = np.asarray(zero_point)
    return values.tobytes() == bytes((read_offset(dtype),)) * values.size


def derive_center(zero_point: jax.Array | None, dtype: np.dtype, centred: bool) -> jax.Array | None:
    """Return the int32 zero point of the operand shifted to int8, or None if it is known to be 0."""
    if recording.is_recording():
        return None if zero_point is None else zero_point.astype(jnp.int32)
    if centred:
        return None
    if zero_point is None:
        return jnp.full((), -read_offset(dtype), jnp.int32)
    return zero_point.astype(jnp.int32) - np.int32(read_offset(dtype))


def shift_recorded(x: jax.Array, center: jax.Array | None) -> tuple[jax.Array, Any]:
    """Return the codes of a recorded contraction, and their int32 zero point or None, in the form of the kernels."""
    shifted = derive_center(center, np.dtype(x.dtype), is_centred(None, x.dtype) and center is None)
    return shift_to_signed(x), shifted


def are_centred(operands: tuple[Any, Any], zero_points: tuple[Any, Any]) -> tuple[bool, bool]:
    """Return for each of two operands whether its zero point is known to be 0 after the shift to int8."""
    (left, right), (left_point, right_point) = operands, zero_points
    return is_centred(left_point, getattr(left, "dtype", None)), is_centred(right_point, getattr(right, "dtype", None))
