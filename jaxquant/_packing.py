"""Codes of 4 and 2 bits in bytes, as ONNX packs them. Knows codes; knows nothing of what they stand for."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _contracts, _dtypes, _granularity

DTYPES = tuple(d for d in (*_dtypes.QUANTIZED, _dtypes.E8M0) if _dtypes.width(d) <= 8)
_PACK, _UNPACK = "checkpoint.pack", "checkpoint.unpack"


def pack(values: ArrayLike) -> jax.Array:
    """packed = the codes one after the other, the first in the lowest bits of its byte, zeros to the end of the last.

    ONNX's packing of 4 bits, two to a byte, and of 2 bits, four to a byte, over the array laid flat. Codes of 8 bits
    are their bytes.

    Args:
        values: codes of any shape: int2, uint2, int4, uint4, int8, uint8, one of the four float8, float4_e2m1fn or
            float8_e8m0fnu.

    Returns:
        uint8, of rank 1.

    Raises:
        TypeError: values are of another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> checkpoint.pack(jnp.array([[1, 2, -1]], jnp.int4))  # 0x21, 0x0F
        Array([33, 15], dtype=uint8)

    Source: ONNX TensorProto, "int4, int2 packing"; onnx.numpy_helper.
    """
    return _enter_pack(values)


@jax.jit
def _pack(values: jax.Array) -> jax.Array:
    (values,) = _contracts.arrays(values)
    _contracts.array(_PACK, "values", values, DTYPES)
    width = _dtypes.width(values.dtype)
    flat = _granularity.whole(values).reshape(-1)
    if width == 8:
        return lax.bitcast_convert_type(flat, jnp.uint8)
    if flat.dtype in _dtypes.FLOAT4:
        flat = lax.bitcast_convert_type(flat, jnp.uint4)
    codes = lax.bitcast_convert_type(flat.astype(jnp.int8), jnp.uint8) & np.uint8(2**width - 1)
    count = 8 // width
    codes = jnp.pad(codes, (0, -codes.size % count)).reshape(-1, count)
    return functools.reduce(jnp.bitwise_or, [codes[:, i] << np.uint8(width * i) for i in range(count)])


_enter_pack = _contracts.entrance(_PACK, _pack, ("values",))


def unpack(packed: ArrayLike, dtype: DTypeLike, shape: tuple[int, ...]) -> jax.Array:
    """values = what `pack` made these bytes of.

    Args:
        packed: uint8, of any shape; read flat.
        dtype: Static. That of the values, one that `pack` takes.
        shape: Static. That of the values.

    Returns:
        The values.

    Raises:
        TypeError: packed is not uint8, or dtype none that is packed.
        ValueError: the bytes are not as many as the values take.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> checkpoint.unpack(jnp.array([33, 15], jnp.uint8), jnp.int4, (1, 3))
        Array([[1, 2, -1]], dtype=int4)

    Source: ONNX TensorProto, "int4, int2 packing"; onnx.numpy_helper.
    """
    found = _contracts.dtype(_UNPACK, "dtype", dtype, DTYPES)
    is_shape = isinstance(shape, tuple | list)
    _contracts.require_type(is_shape, _UNPACK, "shape", "a tuple of ints", _contracts.described(shape))
    for length in shape:
        _contracts.integer(_UNPACK, "shape", length)
        if length < 0:
            _contracts.require(False, _UNPACK, "shape", "ints that are not negative", shape)
    return _enter_unpack(packed, dtype=found, shape=tuple(map(int, shape)))


@functools.partial(jax.jit, static_argnames=("dtype", "shape"))
def _unpack(packed: jax.Array, *, dtype: np.dtype, shape: tuple[int, ...]) -> jax.Array:
    (packed,) = _contracts.arrays(packed)
    size, width = math.prod(shape), _dtypes.width(dtype)
    _contracts.array(_UNPACK, "packed", packed, (np.dtype(jnp.uint8),))
    count = -(-size * width // 8)
    if packed.size != count:
        _contracts.require(False, _UNPACK, "packed", f"{count} bytes, for {dtype}{list(shape)}", packed.size)
    if width == 8:
        return lax.bitcast_convert_type(packed.reshape(shape), dtype)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes = lax.shift_right_logical(*jnp.broadcast_arrays(packed.reshape(-1, 1), shifts[None, :]))
    codes = lax.bitcast_convert_type(codes & np.uint8(2**width - 1), jnp.int8).reshape(-1)[:size].reshape(shape)
    if dtype in _dtypes.FLOAT4:
        return lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype)
    sign = np.int8(0 if _dtypes.bounds(dtype)[0] == 0 else 2 ** (width - 1))
    return ((codes ^ sign) - sign).astype(dtype)


_enter_unpack = _contracts.entrance(_UNPACK, _unpack, ("packed",))
