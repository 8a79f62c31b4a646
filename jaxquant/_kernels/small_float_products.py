"""Products of float8 codes, and of blocks of small floats with a scale for each, on the backends that have them.

CUDA and TPU multiply float8_e4m3fn and float8_e5m2 as they are: the product of two codes is exact in float32, and only
the order and the width of the sums differ from sums of float32 products. With CUDA, `jax.nn.scaled_matmul` takes
blocks of 32 codes with a float8_e8m0fnu scale (MXFP8, MXFP4), and of 16 float4 codes with a float8_e4m3fn scale
(NVFP4). cuDNN runs it on processors that have such products, and XLA multiplies the scales out on others. `jax.export`
for CUDA needs a `DisabledSafetyCheck` for this call, as its error says. All other backends, and all other dtypes, take
the form of the caller, which decodes the codes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from .._core import dtypes
from .contraction import Role

_NATIVE = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_BLOCKED = (*_NATIVE, *dtypes.FLOAT4)
# The blocks for which there are kernels, by the dtype of their scales: MX formats, and NVFP4.
_BLOCKS = {dtypes.E8M0: 32, np.dtype(jnp.float8_e4m3fn): 16}


def contract_codes(
    lhs: jax.Array, rhs: jax.Array, left: Role, right: Role, precision: lax.PrecisionLike,
    out_sharding: NamedSharding | PartitionSpec | None, contract_decoded: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:  # fmt: skip
    """Return the float32 contraction of two arrays of small floats.

    Args:
        lhs: codes of a small float dtype.
        rhs: the same.
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        precision: as in `jax.lax.dot_general`.
        out_sharding: the sharding of the result, or None.
        contract_decoded: the contraction of the same codes for all other backends.
    """
    if lhs.dtype not in _NATIVE or rhs.dtype not in _NATIVE:
        return contract_decoded(lhs, rhs)
    dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
    native = functools.partial(
        lax.dot_general, dimension_numbers=dimensions, precision=precision, preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )  # fmt: skip
    return lax.platform_dependent(lhs, rhs, cuda=native, tpu=native, default=contract_decoded)


def contract_blocks(
    lhs: tuple[jax.Array, jax.Array], rhs: tuple[jax.Array, jax.Array], left: Role, right: Role,
    factor: jax.Array | None, contract_decoded: Callable[[], jax.Array],
) -> jax.Array:  # fmt: skip
    """Return the float32 contraction of two arrays of codes with a scale for each block along one dimension.

    Args:
        lhs: codes, and their scale with an entry for each block and for each index of the others; see `has_kernel`.
        rhs: the same.
        left: the role of each dimension of lhs; one is contracted.
        right: the role of each dimension of rhs.
        factor: float32, a scalar by which the result is multiplied, or None.
        contract_decoded: the whole contraction for all other backends.
    """

    def multiply_blocks(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
        stacks = [
            _stack_matrices(part, role) for part, role in ((a, left), (b, right), (a_scale, left), (b_scale, right))
        ]
        y = _multiply_stacks(*stacks)
        kept = [a.shape[axis] for axis in (*left.batch, *left.free)] + [b.shape[axis] for axis in right.free]
        y = y.reshape(kept)
        return y if factor is None else y * factor

    return lax.platform_dependent(*lhs, *rhs, cuda=multiply_blocks, default=lambda *_: contract_decoded())


@custom_vmap
def _multiply_stacks(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Return the products of stacks of matrices, [batch, rows, contracted], as [batch, rows, rows of b]."""
    return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)


# jax 0.10 maps the primitive only if all of its operands are mapped.
@_multiply_stacks.def_vmap
def _multiply_mapped(size: int, batched: Sequence[bool], *stacks: jax.Array) -> tuple[jax.Array, bool]:
    whole = [
        stack if is_mapped else jnp.broadcast_to(stack, (size, *stack.shape))
        for stack, is_mapped in zip(stacks, batched, strict=True)
    ]
    y = _multiply_stacks(*(stack.reshape(-1, *stack.shape[2:]) for stack in whole))
    return y.reshape(size, -1, *y.shape[1:]), True


def has_kernel(codes: jax.Array, scale: jax.Array, role: Role) -> bool:
    """Return whether an array has the form that `contract_blocks` takes."""
    block = _BLOCKS.get(scale.dtype)
    is_known = codes.dtype in (_BLOCKED if scale.dtype == dtypes.E8M0 else dtypes.FLOAT4)
    if block is None or not is_known or len(role.contracted) != 1:
        return False
    (axis,) = role.contracted
    lengths = [codes.shape[a] // block if a == axis else codes.shape[a] for a in range(codes.ndim)]
    return codes.shape[axis] % block == 0 and 0 not in codes.shape and tuple(lengths) == scale.shape


def _stack_matrices(part: jax.Array, role: Role) -> jax.Array:
    """Return an array as [batch, free, contracted]."""
    rows, depth = (math.prod(part.shape[axis] for axis in axes) for axes in (role.free, role.contracted))
    return lax.transpose(part, (*role.batch, *role.free, *role.contracted)).reshape(-1, rows, depth)
