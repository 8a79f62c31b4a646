"""The arrays of a loaded tensor on devices."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._arrays import quantized_array
from .._arrays.parts import derive_permutation
from .._arrays.quantized_array import QuantizedArray
from .._core import checks
from .._core.granularity import Aligned
from .info import CheckpointError, Tensor, shorten_name


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array without contents that `jax.device_put` takes over on a CPU instead of copying it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)  # XLA:CPU takes over what begins at a multiple of 64
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def place_tensor(function: str, name: str, tensor: Tensor, sharding: Sharding | None) -> Tensor:
    """Return a tensor with JAX arrays, checked, on the devices of a sharding or on the default device.

    Arrays of 64 bits stay numpy arrays where JAX has only 32 bits.

    Args:
        function: the public function that errors name.
        name: the name of the tensor.
        tensor: the tensor. Arrays that cannot be written to are views of a file, and are copied.
        sharding: the sharding of the logical shape.
    """
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > tensor.ndim:
        expected = f"at most {tensor.ndim} entries for {shorten_name(name)!r}"
        checks.refuse(function, "sharding", expected, sharding.spec)
    if sharding is not None:
        try:
            sharding.shard_shape(tuple(tensor.shape))
        except ValueError as error:
            expected = f"one that divides {shorten_name(name)!r} of shape {tuple(tensor.shape)}"
            checks.refuse(function, "sharding", expected, error)
    if not isinstance(tensor, QuantizedArray):
        return _place_array(tensor, sharding)
    placed = _place_quantized(name, tensor, sharding)
    try:
        return quantized_array.check_array(function, name, placed, supports=quantized_array.FORMS)
    except (checks.ContractTypeError, checks.ContractValueError) as error:
        raise CheckpointError(f"tensor {shorten_name(name)!r}: {error}") from error


def _place_array(array: jax.Array | np.ndarray, sharding: Sharding | None) -> jax.Array | np.ndarray:
    if isinstance(array, np.ndarray):
        is_view = not array.flags.writeable
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            return array.copy() if is_view else array
        # A view of a file would change with the file.
        return jax.device_put(array, sharding, may_alias=not is_view)
    return array if sharding is None else jax.device_put(array, sharding)


def _place_quantized(name: str, q: QuantizedArray, sharding: Sharding | None) -> QuantizedArray:
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda part: _place_array(part, sharding), q)
    axes = (*sharding.spec, *(None,) * (q.ndim - len(sharding.spec)))
    stored = [axes[axis] for axis in derive_permutation(q.stored_order, q.ndim)]
    if q.packing is not None and stored[-1] is not None:
        raise CheckpointError(
            f"tensor {shorten_name(name)!r}: expected a sharding that leaves its last axis whole, because its codes "
            f"are packed along it, got {sharding.spec}"
        )
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    parts, static = q.tree_flatten()
    cut = functools.partial(_place_part, q, axes, sharding)
    codes = _place_array(parts.codes, NamedSharding(sharding.mesh, PartitionSpec(*stored)))
    permutation = None if parts.permutation is None else _place_array(parts.permutation, whole)
    children = parts._replace(codes=codes, permutation=permutation)
    children = children._replace(**{field: cut(getattr(parts, field)) for field in ("scale", "zero_point", "offset")})
    return QuantizedArray.tree_unflatten(static, children)


def _place_part(
    q: QuantizedArray, axes: tuple[object, ...], sharding: NamedSharding, part: Tensor | None
) -> Tensor | None:
    """Return a scale, a zero point or an offset, cut along the axes where each device has its own codes' entries."""
    if part is None:
        return None
    shape = tuple(part.shape)
    sizes = Aligned(q.block_size).sizes(shape, q.shape) or (1,) * q.ndim
    entries = []
    for axis, size, length, count in zip(axes, sizes, q.shape, shape, strict=True):
        names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        devices = math.prod(sharding.mesh.shape[name] for name in names)
        entries.append(axis if count > 1 and length % (devices * size) == 0 else None)
    spec = PartitionSpec(*entries)
    if isinstance(part, QuantizedArray):
        inner, static = part.tree_flatten()
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        codes = _place_array(inner.codes, NamedSharding(sharding.mesh, spec) if part.packing is None else whole)
        rest = jax.tree.map(lambda array: _place_array(array, whole), inner._replace(codes=None))
        return QuantizedArray.tree_unflatten(static, rest._replace(codes=codes))
    return _place_array(part, NamedSharding(sharding.mesh, spec))
