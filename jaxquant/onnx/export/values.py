"""The values of a program that is exported: known arrays, and tensors of the ONNX graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from onnx import TensorProto, ValueInfoProto, helper

from ..._core import dtypes

Shape = tuple[Any, ...]  # an entry is an int, or a symbolic dimension of `jax.export`
CODES = dtypes.INTEGERS
# The first opset with float8.
FLOAT8_OPSET = 19
_FLOAT8 = np.dtype(jnp.float8_e4m3fn)


class Value(NamedTuple):
    """A value of the program.

    A dimension of 1 stands for any length: a broadcast array is stored before its expansion, because most ONNX
    operators broadcast.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of the tensor: see `choose_container`.
        name: the name of the tensor in the graph, or None for a known array.
        array: the array, if it is known.
        hint: a name for the array in the graph.
        narrow: the array in 16 bits, if it is known and was converted from that to float32; or None.
    """

    shape: Shape
    dtype: DTypeLike
    name: str | None = None
    array: Any = None
    hint: str | None = None
    narrow: Any = None

    @property
    def is_known(self) -> bool:
        """Whether the value is known before the model runs."""
        return self.name is None


class Spec(NamedTuple):
    """The shape and the dtype of a result, as JAX describes it."""

    shape: Shape
    dtype: DTypeLike


class UnsupportedError(Exception):
    """An equation that ONNX cannot express; the text says why."""


def make_known(array: Any, hint: str | None = None) -> Value:
    """Return the value of an array."""
    if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = np.asarray(array)
    return Value(tuple(array.shape), array.dtype, array=array, hint=hint)


def choose_container(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which the graph holds an array of a dtype: one with all of its numbers and with kernels.

    Codes of 2 and 4 bits have 8; float4 is float8_e4m3fn, and float8_e8m0fnu is float32.
    """
    dtype = np.dtype(dtype)
    if dtype in dtypes.FLOAT4:
        return _FLOAT8
    if dtype == dtypes.E8M0:
        return dtypes.FLOAT32
    if dtype in dtypes.INTEGERS and dtypes.count_bits(dtype) < 8:
        return np.dtype(np.int8 if dtypes.read_bounds(dtype)[0] < 0 else np.uint8)
    return dtype


def derive_element_type(dtype: DTypeLike) -> int:
    """Return ONNX's number of a dtype."""
    dtype = np.dtype(dtype)
    return TensorProto.BFLOAT16 if dtype == dtypes.BFLOAT16 else helper.np_dtype_to_tensor_dtype(dtype)


def describe(name: str, shape: Shape, dtype: DTypeLike) -> ValueInfoProto:
    """Return the declaration of an input or an output."""
    lengths = [int(n) if isinstance(n, int | np.integer) else str(n) for n in shape]
    return helper.make_tensor_value_info(name, derive_element_type(choose_container(dtype)), lengths)


def is_static(shape: Shape) -> bool:
    """Return whether no dimension is symbolic."""
    return all(isinstance(n, int | np.integer) for n in shape)


def shrink_array(array: np.ndarray) -> np.ndarray:
    """Return an array with length 1 in the dimensions along which its memory repeats."""
    index = tuple(
        slice(0, 1) if stride == 0 and n > 1 else slice(None)
        for stride, n in zip(array.strides, array.shape, strict=True)
    )
    return array[index]


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the shape to which shapes broadcast; dimensions may be symbolic."""
    rank = max(len(shape) for shape in shapes)
    result = []
    for places in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        others = [n for n in places if not (isinstance(n, int | np.integer) and n == 1)]
        result.append(others[0] if others else 1)
    return tuple(result)
