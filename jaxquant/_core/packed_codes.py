"""Conversion between codes of 2 or 4 bits and bytes, in forms that XLA:CPU vectorizes.

Current jaxlib stores several such codes in a byte on a CPU. XLA's own conversion to or from int8 handles one code after
the other. The functions here read or write whole bytes by `lax.bitcast_convert_type`, and shift.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dtypes, sharding


def count_planes(codes: jax.Array) -> int:
    """Return how many codes a byte holds if whole bytes can be read along the last dimension, or 1."""
    width = dtypes.find_width(np.dtype(codes.dtype))
    if width >= 8 or codes.dtype not in dtypes.INTEGERS or not codes.ndim or sharding.is_placed(codes):
        return 1
    length = codes.shape[-1]
    return 8 // width if isinstance(length, int) and length and length % (8 // width) == 0 else 1


def read_bytes(codes: jax.Array) -> jax.Array:
    """Return the bytes of the codes, uint8 with a shorter last dimension, or the codes if `count_planes` is 1."""
    count = count_planes(codes)
    if count == 1:
        return codes
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count), jnp.uint8)


def read_plane(stored: jax.Array, dtype: np.dtype, place: int, count: int) -> jax.Array:
    """Return the codes of one place in their bytes, as int32.

    Args:
        stored: what `read_bytes` returns, or a part of it.
        dtype: the dtype of the codes.
        place: the place in a byte; the codes `place`, `place + count`, ... of the last dimension are returned.
        count: what `count_planes` returns.
    """
    wide = stored.astype(jnp.int32)
    if count == 1:
        return wide
    width = 8 // count
    if dtypes.find_bounds(dtype)[0] == 0:
        return lax.shift_right_logical(wide, np.int32(place * width)) & np.int32(2**width - 1)
    # A shift to the left and back extends the sign.
    raised = lax.shift_left(wide, np.int32(32 - (place + 1) * width))
    return lax.shift_right_arithmetic(raised, np.int32(32 - width))
