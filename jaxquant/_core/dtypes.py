"""What a quantized dtype is: its bounds and its family. Knows nothing of arrays, scales or operators."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

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
E8M0 = np.dtype(jnp.float8_e8m0fnu)
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)


def find_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype that `dtype` names; TypeError where it names none."""
    if dtype is None:
        raise TypeError("None is not a dtype")
    return np.dtype(dtype)


def is_float6(dtype: np.dtype) -> bool:
    """Whether `dtype` is one of the two 6-bit floats, which jaxlib cannot carry (it compiles none on CPU)."""
    return dtype.name.startswith("float6_")


def is_known(dtype: np.dtype) -> bool:
    """Whether an operator has this dtype; numpy counts those of ml_dtypes among its void types."""
    return dtype in (*QUANTIZED, *FLOATS, E8M0, INT32)


def list_names(dtypes: tuple[np.dtype, ...]) -> str:
    """Returns the dtypes as a reader wants them in an error: 'int8, uint8 or int16'."""
    listed = [d.name for d in dtypes]
    return listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + " or " + listed[-1]


def count_bits(dtype: np.dtype) -> int:
    """Returns the bits of an integer dtype: 2, 4, 8 or 16."""
    return jnp.iinfo(dtype).bits


@functools.cache
def find_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Returns (qmin, qmax) of an integer dtype: everything that it can hold."""
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def find_narrow_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Returns (qmin, qmax) without the lowest code of a signed dtype: int8 is [-127, 127], uint8 stays [0, 255]."""
    low, high = find_bounds(dtype)
    return (-high, high) if low < 0 else (low, high)


def find_largest(dtype: np.dtype) -> float:
    """Returns the largest finite value of a small float dtype: 448 for float8_e4m3fn, 6 for float4_e2m1fn."""
    return float(jnp.finfo(dtype).max)


def find_width(dtype: np.dtype) -> int:
    """Returns the bits that an element takes where it is packed."""
    if dtype in FLOAT4:
        return 4
    return count_bits(dtype) if dtype in INTEGERS else 8 * dtype.itemsize


def find_wider(left: np.dtype, right: np.dtype) -> np.dtype:
    """Returns the dtype of two floats that meet: theirs where it is one, else float32."""
    return left if left == right else FLOAT32
