"""The values of a graph: numpy arrays where JAX must know them, such as shapes, and JAX arrays elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import ModelError

# A tuple of Python ints takes many times the memory of an array.
_MOST_INTS = 2**16
_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


class UnknownValueError(ModelError):
    """The error for a value that is traced, but must be known when the function is traced."""


def canonicalize_dtype(dtype: Any) -> np.dtype:
    """Return the dtype that JAX has for a numpy dtype: 32 bits in place of 64, unless x64 is enabled."""
    dtype = np.dtype(dtype)
    return dtype if jax.config.jax_enable_x64 else np.dtype(_NARROW.get(dtype.name, dtype))  # type: ignore[attr-defined]


def convert_to_jax(value: Any) -> Any:
    """Return a numpy array as a JAX array; 64-bit integers that int32 cannot hold become its nearest number.

    Exporters write the largest int64 for "to the end".
    """
    if not isinstance(value, np.ndarray):
        return value
    dtype = canonicalize_dtype(value.dtype)
    if dtype != value.dtype and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        value = np.clip(value, bounds.min, bounds.max)
    return jnp.asarray(value.astype(dtype, copy=False))


def namespace(*values: Any) -> Any:
    """Return numpy if all values are numpy arrays, and jax.numpy otherwise. None counts as both."""
    return np if all(value is None or isinstance(value, np.ndarray) for value in values) else jnp


def is_known(value: Any) -> bool:
    """Return whether the elements of a value can be read now."""
    return value is None or isinstance(value, np.ndarray) or not isinstance(value, Tracer)


def read_static(value: Any, what: str) -> Any:
    """Return a value whose elements are needed now as a numpy array, and None unchanged."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tracer):
        raise UnknownValueError(
            f"{what} must be known when the function is traced: pass it as a numpy array, outside of jit"
        )
    return np.asarray(value)


def list_ints(value: Any) -> tuple[int, ...]:
    """Return the elements of an attribute or of a known array as ints."""
    if np.size(value) > _MOST_INTS:
        raise ModelError(f"expected at most {_MOST_INTS} numbers for a shape or for axes, got {np.size(value)}")
    return tuple(int(n) for n in np.asarray(value).reshape(-1))


def normalize_axis(axis: Any, rank: int) -> int:
    """Return an axis as a non-negative int."""
    axis = int(axis)
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"expected an axis in [{-rank}, {rank - 1}], got {axis}")
    return axis % rank if rank else 0
