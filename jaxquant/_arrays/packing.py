"""ONNX's packing of 4-bit and 2-bit codes into bytes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, dtypes, sharding
from .._core.entry_point import compile_entry_point

DTYPES = tuple(d for d in (*dtypes.QUANTIZED, dtypes.E8M0) if dtypes.count_packed_bits(d) <= 8)
_PACK, _UNPACK = "checkpoint.pack", "checkpoint.unpack"


def pack(values: ArrayLike) -> jax.Array:
    """Return codes packed into bytes, as ONNX packs them.

    The codes are packed in row-major order, the first one into the lowest bits of the first byte: two 4-bit codes or
    four 2-bit codes to a byte. Unused bits of the last byte are 0. Codes of 8 bits are stored as they are.

    Args:
        values: codes of any shape: int2, uint2, int4, uint4, int8, uint8, one of the four float8 dtypes,
            float4_e2m1fn or float8_e8m0fnu.

    Returns:
        A uint8 array of rank 1.

    Raises:
        TypeError: the codes have a dtype that is not listed above.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> checkpoint.pack(jnp.array([[1, 2, -1]], jnp.int4))  # 0x21, 0x0F
        Array([33, 15], dtype=uint8)

    Source: ONNX TensorProto, "int4, int2 packing"; onnx.numpy_helper.
    """
    return _pack(values)


@compile_entry_point(_PACK)
def _pack(values: jax.Array) -> jax.Array:
    checks.check_array(_PACK, "values", values, DTYPES)
    width = dtypes.count_packed_bits(values.dtype)
    # JAX cannot infer the sharding of a flattened array, so the array is gathered first.
    flat = sharding.place_whole(values).reshape(-1)
    if width == 8:
        return lax.bitcast_convert_type(flat, jnp.uint8)
    # Only integers can be shifted: read the bits of a float4 as an integer.
    if flat.dtype in dtypes.FLOAT4:
        flat = lax.bitcast_convert_type(flat, jnp.uint4)
    # Negative codes are sign-extended in int8; the mask keeps the bits of the code.
    codes = lax.bitcast_convert_type(flat.astype(jnp.int8), jnp.uint8) & np.uint8(2**width - 1)
    count = 8 // width
    codes = jnp.pad(codes, (0, -codes.size % count)).reshape(-1, count)
    return functools.reduce(jnp.bitwise_or, [codes[:, i] << np.uint8(width * i) for i in range(count)])


def unpack(packed: ArrayLike, dtype: DTypeLike, shape: tuple[int, ...]) -> jax.Array:
    """Return the codes that `pack` packed into bytes.

    Args:
        packed: the bytes, uint8 of any shape; they are read in row-major order.
        dtype: Static. The dtype of the codes, one that `pack` accepts.
        shape: Static. The shape of the codes.

    Returns:
        An array of the given dtype and shape.

    Raises:
        TypeError: `packed` is not uint8, `dtype` is not one that `pack` accepts, or `shape` is not a tuple of ints.
        ValueError: the number of bytes does not fit the shape, or a dimension is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant import checkpoint
        >>> checkpoint.unpack(jnp.array([33, 15], jnp.uint8), jnp.int4, (1, 3))
        Array([[1, 2, -1]], dtype=int4)

    Source: ONNX TensorProto, "int4, int2 packing"; onnx.numpy_helper.
    """
    checked_dtype = checks.check_dtype(_UNPACK, "dtype", dtype, DTYPES)
    is_shape = isinstance(shape, tuple | list)
    checks.require_type(is_shape, _UNPACK, "shape", "a tuple of ints", checks.describe_value(shape))
    for length in shape:
        checks.check_integer(_UNPACK, "shape", length)
        if length < 0:
            checks.refuse(_UNPACK, "shape", "non-negative ints", shape)
    return _unpack(packed, dtype=checked_dtype, shape=tuple(map(int, shape)))


@compile_entry_point(_UNPACK)
def _unpack(packed: jax.Array, *, dtype: np.dtype, shape: tuple[int, ...]) -> jax.Array:
    size, width = math.prod(shape), dtypes.count_packed_bits(dtype)
    checks.check_array(_UNPACK, "packed", packed, (np.dtype(jnp.uint8),))
    count = -(-size * width // 8)
    if packed.size != count:
        checks.refuse(_UNPACK, "packed", f"{count} bytes for {dtype}{list(shape)}", packed.size)
    if width == 8:
        return lax.bitcast_convert_type(packed.reshape(shape), dtype)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    codes = lax.shift_right_logical(*jnp.broadcast_arrays(packed.reshape(-1, 1), shifts[None, :]))
    codes = lax.bitcast_convert_type(codes & np.uint8(2**width - 1), jnp.int8).reshape(-1)[:size].reshape(shape)
    if dtype in dtypes.FLOAT4:
        return lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype)
    # Flipping the sign bit and subtracting it extends the sign of a code to 8 bits; it is 0 for unsigned dtypes.
    sign = np.int8(0 if dtypes.read_bounds(dtype)[0] == 0 else 2 ** (width - 1))
    return ((codes ^ sign) - sign).astype(dtype)
