"""The values of a graph: numpy arrays where JAX must know them, such as shapes, and JAX arrays elsewhere; tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike

from ..limits import ModelError

# A tuple of Python ints takes many times the memory of an array.
_MOST_INTS = 2**16
_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
# An array of numpy where its elements are known, of JAX elsewhere.
Tensor = jax.Array | np.ndarray


class UnknownValueError(ModelError):
    """The error for a value that is traced, but must be known when the function is traced.

    Attributes:
        names: the names of the value in the graph that is run; the interpreter replaces them by the names of the
            inputs of the graph that the value depends on. Empty for all inputs of a node.
    """

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)


class OperatorError(ModelError):
    """The error of an operator that does not run on its inputs, such as arrays of shapes that do not fit."""


def canonicalize_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Return the dtype that JAX has for a numpy dtype: 32 bits in place of 64, unless x64 is enabled."""
    dtype = np.dtype(dtype)
    return dtype if jax.config.jax_enable_x64 else np.dtype(_NARROW.get(dtype.name, dtype))  # type: ignore[attr-defined]


def convert_to_jax(value: Any) -> Any:
    """Return a numpy array as a JAX array; 64-bit integers that int32 cannot hold become its nearest number.

    Exporters write the largest int64 for "to the end".
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == object:
        lengths = [jnp.asarray(n).astype(canonicalize_dtype(np.int64)) for n in value.reshape(-1)]
        return jnp.stack(lengths).reshape(value.shape)
    return jnp.asarray(_fit_dtype(value))


def put_on_device(value: np.ndarray) -> jax.Array:
    """Return what `convert_to_jax` does for an array of numbers, outside of any trace.

    `jnp.asarray` compiles a program for each shape, which takes longer than the copy of most weights.
    """
    return jax.device_put(_fit_dtype(value))


def _fit_dtype(value: np.ndarray) -> np.ndarray:
    dtype = canonicalize_dtype(value.dtype)
    if dtype != value.dtype and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        # A plain conversion would keep the low bits: the largest int64 would become -1.
        value = np.clip(value, bounds.min, bounds.max)
    return value.astype(dtype, copy=False)


def namespace(*values: Any) -> Any:
    """Return numpy if all values are numpy arrays, and jax.numpy otherwise. None counts as both."""
    return np if all(value is None or isinstance(value, np.ndarray) for value in values) else jnp


def is_known(value: Any) -> bool:
    """Return whether the elements of a value can be read now; False for a sequence."""
    return value is None or not isinstance(value, Tracer | list)


def is_computed(value: Any) -> bool:
    """Return whether a value is known in every trace: a numpy array of numbers, or a sequence of such."""
    if isinstance(value, list):
        return all(is_computed(part) for part in value)
    return value is None or (isinstance(value, np.ndarray) and value.dtype != object)


def count_all(value: Any) -> int:
    """Return the number of elements of an array, or of all arrays of a sequence."""
    if isinstance(value, list | tuple):
        return sum(count_all(part) for part in value)
    return 0 if value is None else math.prod(value.shape)


def read_static(value: Any, what: str, name: str) -> Any:
    """Return a value that is needed now as a numpy array, and None unchanged."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tracer):
        raise UnknownValueError(f"{what} must be known when the function is traced", (name,))
    return np.asarray(value)


def normalize_axis(axis: Any, rank: int) -> int:
    """Return an axis as a non-negative int."""
    axis = int(axis)
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"expected an axis in [{-rank}, {rank - 1}], got {axis}")
    return axis % rank if rank else 0


# Lengths of arrays. Some are symbolic while the function is traced for an export with a symbolic batch. A numpy array
# of symbolic lengths has the dtype object: numpy's functions apply Python's operators to its elements.


def read_length(n: Any) -> Any:
    """Return a length as an int, or unchanged if it is symbolic."""
    return n if is_symbolic_dim(n) else int(n)


def is_static(shape: Sequence[Any]) -> bool:
    """Return whether no length is symbolic."""
    return not any(is_symbolic_dim(n) for n in shape)


def list_ints(value: Any) -> tuple[Any, ...]:
    """Return the elements of an attribute or of a known array as ints, or as symbolic lengths."""
    if np.size(value) > _MOST_INTS:
        raise ModelError(f"expected at most {_MOST_INTS} numbers for a shape or for axes, got {np.size(value)}")
    return tuple(read_length(n) for n in np.asarray(value).reshape(-1))


def make_lengths(lengths: Sequence[Any]) -> np.ndarray:
    """Return lengths as a vector of int64, or of objects if one of them is symbolic."""
    if is_static(lengths):
        return np.asarray(lengths, np.int64)
    result = np.empty(len(lengths), object)
    result[:] = lengths
    return result


def wrap_result(value: Any) -> Any:
    """Return what a function of numpy computed as an array, of int64 if no element is symbolic any more.

    numpy returns a scalar, or the element of an array of objects, in place of an array of rank 0.
    """
    if isinstance(value, np.generic):
        return np.asarray(value)
    if is_symbolic_dim(value) or isinstance(value, int):
        return make_lengths([value]).reshape(())
    if isinstance(value, np.ndarray) and value.dtype == object:
        return make_lengths(value.reshape(-1).tolist()).reshape(value.shape)
    return value


def broadcast_shapes(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape to which shapes broadcast, by numpy's rules."""
    if all(is_static(shape) for shape in shapes):
        return np.broadcast_shapes(*shapes)
    return tuple(jnp.broadcast_shapes(*(tuple(shape) for shape in shapes)))


def list_indices(n: Any) -> Any:
    """Return the indices of an axis, as a numpy array if its length is known."""
    return jnp.arange(n) if is_symbolic_dim(n) else np.arange(n)


def broadcast_to(x: Any, shape: tuple[Any, ...]) -> Any:
    """Return an array in a shape to which it broadcasts."""
    return namespace(x).broadcast_to(x, shape) if is_static(shape) else jnp.broadcast_to(convert_to_jax(x), shape)
