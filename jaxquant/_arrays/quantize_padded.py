"""Quantization of kernels of many shapes by few compiled programs, for the conversion of networks.

A program quantizes kernels that are padded to its shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._core import checks, dtypes
from .._core.granularity import PerAxis, PerTensor
from . import parts, scale_from_range
from .quantize import quantize
from .quantized_array import QuantizedArray
from .spec import QuantSpec

# Compiling a program takes some 100 ms, quantizing a kernel of this many elements a tenth of that.
_MOST_ELEMENTS = 2**22
_LEAST_LENGTH = 64


def quantize_kernel(kernel: Any, spec: QuantSpec, stored_axes: Sequence[int]) -> QuantizedArray:
    """Return `quantize(kernel, spec)`, bit for bit, with a compiled program that kernels of other shapes share.

    The codes hold the `stored_axes` last in memory.

    A kernel on one CPU with one scale for each index of its last axes, or one in total, is padded with zeros to a
    matrix whose sides are powers of two. Every range is widened to include 0, so the zeros change no scale. The
    programs of a network are compiled one after another, and a network has many shapes of kernels.
    """
    table = _find_table(kernel, spec)
    if table is None:
        return quantize(kernel, spec, stored_last=tuple(stored_axes) or None)
    rows, columns = table
    values = np.asarray(kernel)
    padded = np.zeros([max(_LEAST_LENGTH, 2 ** (n - 1).bit_length()) for n in table], values.dtype)
    padded[:rows, :columns] = values.reshape(table)
    scale_shape, point_shape = scale_from_range.find_shapes("quantize", spec, values.shape)
    granularity = PerTensor() if math.prod(scale_shape) == 1 else PerAxis(1)
    flat_spec = dataclasses.replace(spec, granularity=granularity, zero_point_granularity=None)
    # The padding is removed by numpy, because JAX would compile a program for each shape to do it.
    q = quantize(padded, flat_spec)

    order = parts.move_axes_last("quantize", "stored_last", stored_axes, values.ndim)

    def trim(part: jax.Array, row_count: int, shape: tuple[int, ...], order: parts.StoredOrder = None) -> jax.Array:
        host = np.asarray(part)[:row_count, : columns if part.shape[1] > 1 else 1].reshape(shape)
        return jax.device_put(np.array(parts.store_codes(host, order), order="C"))

    zero_point = None if q.zero_point is None else trim(q.zero_point, 1, point_shape)
    stored, scale = trim(q.codes, rows, values.shape, order), trim(q.scale, 1, scale_shape)
    return QuantizedArray.tree_unflatten((q.dtype, None, q.codebook, order), (stored, scale, zero_point))


def _find_table(kernel: Any, spec: QuantSpec) -> tuple[int, int] | None:
    """Return the rows and the columns of a kernel that `quantize_kernel` can pad; None for any other kernel."""
    granularity = spec.granularity
    if spec.zero_point_granularity != granularity or not isinstance(granularity, PerTensor | PerAxis):
        return None
    if not _is_on_cpu(kernel) or kernel.dtype not in dtypes.FLOATS or kernel.size == 0 or kernel.ndim == 0:
        return None
    shape = tuple(kernel.shape)
    scale_shape = scale_from_range.find_shapes("quantize", spec, shape)[0]
    shared = len(shape) - 1
    if math.prod(scale_shape) > 1:
        shared = next(axis for axis, entries in enumerate(scale_shape) if entries > 1)
        if scale_shape[shared:] != shape[shared:]:
            return None
    rows, columns = math.prod(shape[:shared]), math.prod(shape[shared:])
    return (rows, columns) if rows * columns <= _MOST_ELEMENTS else None


def _is_on_cpu(kernel: Any) -> bool:
    """Return whether a kernel is in the memory of a CPU that is the default device, where the result is made."""
    if not isinstance(kernel, jax.Array | np.ndarray) or checks.is_traced(kernel):
        return False
    default = jax.device_put(np.float32(0)).sharding
    is_here = isinstance(kernel, np.ndarray) or kernel.sharding == default
    return is_here and all(device.platform == "cpu" for device in default.device_set)
