"""The dtypes that jaxquant supports: their families, their bounds and their sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

# The order of these tuples is the order in which errors list the dtypes.
INTEGERS: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.int2, jnp.uint2, jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)
)
FLOAT8: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.float8_e5m2fnuz)
)
FLOAT4: tuple[np.dtype, ...] = (np.dtype(jnp.float4_e2m1fn),)
SMALL_FLOATS = FLOAT8 + FLOAT4
QUANTIZED = INTEGERS + SMALL_FLOATS

FLOAT32 = np.dtype(jnp.float32)
FLOAT16 = np.dtype(jnp.float16)
BFLOAT16 = np.dtype(jnp.bfloat16)
INT32 = np.dtype(jnp.int32)
# It holds powers of two only, so it is a dtype of scales and not of codes.
E8M0 = np.dtype(jnp.float8_e8m0fnu)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
# The dtypes of codes that are contracted in integers, and those for which runtimes have kernels.
CONTRACTED: tuple[np.dtype, ...] = tuple(
    np.dtype(d) for d in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4, jnp.int2, jnp.uint2)
)
EIGHT_BITS = CONTRACTED[:2]
# The largest sum of two weights of int8 that no two codes of uint8 carry out of int16.
LARGEST_PAIR = 128


def find_dtype(dtype: Any) -> np.dtype:
    """Return the numpy dtype that `dtype` names; raise TypeError if it does not name one."""
    if dtype is None:
        raise TypeError("None is not a dtype")  # numpy would read None as float64
    return np.dtype(dtype)


def is_float6(dtype: np.dtype) -> bool:
    """Return whether `dtype` is one of the two 6-bit floats, which jaxlib cannot compile on a CPU."""
    return dtype.name.startswith("float6_")


def is_known(dtype: np.dtype) -> bool:
    """Return whether some operator accepts this dtype; numpy's `kind` cannot tell, because ml_dtypes are void to it."""
    return dtype in (*QUANTIZED, *FLOATS, E8M0, INT32)


def list_names(dtypes: tuple[np.dtype, ...]) -> str:
    """Return the names of dtypes as a list for an error message: 'int8, uint8 or int16'."""
    names = [dtype.name for dtype in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def count_bits(dtype: np.dtype) -> int:
    """Return the number of bits of an integer dtype: 2, 4, 8, 16 or 32."""
    return jnp.iinfo(dtype).bits


@functools.cache
def find_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Return (qmin, qmax) of an integer dtype: its lowest and its highest value."""
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def find_narrow_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Return (qmin, qmax) without the lowest code of a signed dtype: (-127, 127) for int8, (0, 255) for uint8."""
    low, high = find_bounds(dtype)
    return (-high, high) if low < 0 else (low, high)


def find_reduced_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Return (qmin, qmax) of the codes of 7 bits in int8 or uint8, those of `reduce_range` in ONNX Runtime's quantizer.

    Two products of a uint8 code with such a code of int8 add up to 255 * 128 = 32640 at most, which int16 holds.
    """
    return (-64, 64) if find_bounds(dtype)[0] < 0 else (0, 127)


def find_largest(dtype: np.dtype) -> float:
    """Return the largest finite value of a small float dtype: 448 for float8_e4m3fn, 6 for float4_e2m1fn."""
    return float(jnp.finfo(dtype).max)


def find_width(dtype: np.dtype) -> int:
    """Return the number of bits of a packed element."""
    if dtype in FLOAT4:
        return 4
    return count_bits(dtype) if dtype in INTEGERS else 8 * dtype.itemsize


def find_wider(left: np.dtype, right: np.dtype) -> np.dtype:
    """Return the dtype of the result of two float operands: their common dtype, or float32 if they differ."""
    return left if left == right else FLOAT32
