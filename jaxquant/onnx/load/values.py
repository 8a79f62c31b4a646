"""The values of a graph: numpy arrays where JAX must know them, such as shapes, and JAX arrays elsewhere; tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.core import Tracer
from jax.export import is_symbolic_dim
from onnx import helper, numpy_helper

from ..._core import dtypes
from ..errors import ModelError

# A tuple of Python ints takes many times the memory of an array.
_MOST_INTS = 2**16
_MOST_DIMENSIONS = 32
_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


class UnknownValueError(ModelError):
    """The error for a value that is traced, but must be known when the function is traced.

    Attributes:
        names: the names of the value in the graph that is run; the interpreter replaces them by those of the inputs of
            the graph that the value depends on. Empty for all inputs of a node.
    """

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)


class OperatorError(ModelError):
    """The error of an operator that does not run on its inputs, such as arrays of shapes that do not fit."""


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
    if value.dtype == object:
        return convert_lengths(value)
    dtype = canonicalize_dtype(value.dtype)
    if dtype != value.dtype and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        # A plain conversion would keep the low bits: the largest int64 would become -1.
        value = np.clip(value, bounds.min, bounds.max)
    return jnp.asarray(value.astype(dtype, copy=False))


def namespace(*values: Any) -> Any:
    """Return numpy if all values are numpy arrays, and jax.numpy otherwise. None counts as both."""
    return np if all(value is None or isinstance(value, np.ndarray) for value in values) else jnp


def is_known(value: Any) -> bool:
    """Return whether the elements of a value can be read now; those of a sequence are not asked."""
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
    """Return a value whose elements are needed now as a numpy array, and None unchanged."""
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


def convert_lengths(lengths: np.ndarray) -> Any:
    """Return an array of symbolic lengths as a JAX array."""
    parts = [jnp.asarray(n).astype(canonicalize_dtype(np.int64)) for n in lengths.reshape(-1)]
    return jnp.stack(parts).reshape(lengths.shape)


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


# TensorProto to numpy, after checking that the data has as many elements as the dims say.


def find_tensor_dtype(tensor: onnx.TensorProto) -> np.dtype:
    """Return the numpy dtype of a tensor; raise ModelError for an unknown one, and for strings."""
    return find_onnx_dtype(tensor.data_type, f"tensor {tensor.name!r}")


def find_onnx_dtype(number: int, what: str) -> np.dtype:
    """Return the numpy dtype of a data type's number in ONNX."""
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, ValueError, TypeError, AttributeError):
        dtype = np.dtype(object)
    if dtype.kind in "OSU":
        raise ModelError(f"{what}: expected numbers, got the data type {number} of ONNX")
    return dtype


def count_elements(tensor: onnx.TensorProto) -> int:
    """Return the number of elements that the dims of a tensor declare."""
    if len(tensor.dims) > _MOST_DIMENSIONS or any(n < 0 for n in tensor.dims):
        raise ModelError(f"tensor {tensor.name!r}: expected at most 32 dims of 0 or more, got {list(tensor.dims)[:40]}")
    # Python's ints do not overflow: dims such as 2**62 would wrap around in int64.
    return math.prod(tensor.dims)


def count_stored_bytes(count: int, dtype: np.dtype) -> int:
    """Return the bytes of `count` elements in raw data, where elements of 2 and 4 bits are packed."""
    is_packed = dtype in dtypes.INTEGERS or dtype in dtypes.SMALL_FLOATS
    width = dtypes.count_packed_bits(dtype) if is_packed else 8 * dtype.itemsize
    return -(-count * width // 8)


def read_tensor(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the array of a tensor."""
    dtype, count = find_tensor_dtype(tensor), count_elements(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ModelError(f"tensor {tensor.name!r}: external data is supported in initializers and attributes only")
    # numpy would report only that a shape does not fit, without the name of the tensor.
    if tensor.HasField("raw_data"):
        expected, stored = count_stored_bytes(count, dtype), len(tensor.raw_data)
        if stored != expected:
            text = f"expected {expected} bytes for {list(tensor.dims)} of {dtype}, got {stored}"
            raise ModelError(f"tensor {tensor.name!r}: {text}")
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise ModelError(f"tensor {tensor.name!r}: {error}") from error
    if array.size != count or array.dtype.kind in "OSU":
        raise ModelError(f"tensor {tensor.name!r}: expected {count} numbers, got {array.size} of {array.dtype}")
    return array
