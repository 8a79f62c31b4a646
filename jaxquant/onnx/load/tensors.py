"""TensorProto to numpy, after checking that the data has as many elements as the dims say."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..._core import dtypes
from ..errors import ModelError

_MOST_DIMENSIONS = 32


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
    width = dtypes.find_width(dtype) if is_packed else 8 * dtype.itemsize
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
