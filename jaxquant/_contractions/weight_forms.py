"""Products of floats with weights that have a permutation, or blocks along several axes, not dequantized as a whole.

sum_j x[perm[j]] * w[j] is the product with the permuted weights: the floats are permuted in place of the codes. If an
axis of the result is permuted, the result is. A scale with blocks along several axes gets an entry for each index of
all of them but one. It then is an array with ordinary blocks, and still has a fraction of the weights' size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays.parts import restore_permuted
from .._arrays.quantized_array import QuantizedArray
from .._core import granularity, sharding
from .._kernels.contraction import Role

_Array = QuantizedArray | jax.Array


def simplify_weights(
    lhs: _Array, rhs: _Array, left: Role, right: Role
) -> tuple[_Array, _Array, Callable[[jax.Array], jax.Array]]:  # fmt: skip
    """Return the operands of a weight-only contraction in forms that its kernels read, and what completes the product.

    Args:
        lhs: an array, or a QuantizedArray without scales that are quantized themselves.
        rhs: the other of the two.
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
    """
    quantized = 0 if isinstance(lhs, QuantizedArray) else 1
    q: Any = (lhs, rhs)[quantized]
    x: Any = (lhs, rhs)[1 - quantized]
    role, x_role = (left, right) if quantized == 0 else (right, left)
    # The sharding of what is gathered would have to be chosen.
    if sharding.is_placed(x) or sharding.is_placed(q.stored_codes):
        return lhs, rhs, _keep
    q, x, finish = _move_permutation(q, x, role, x_role, quantized)
    q = _spread_blocks(q, role)
    return (q, x, finish) if quantized == 0 else (x, q, finish)


def _keep(y: jax.Array) -> jax.Array:
    return y


def _move_permutation(
    q: QuantizedArray, x: jax.Array, role: Role, x_role: Role, quantized: int
) -> tuple[QuantizedArray, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return codes without their permutation, the floats that fit them, and a function that permutes the product."""
    # Several permutations belong to dimensions that may be anywhere in the other operand.
    if q.permutation is None or q.permuted_axis is None or q.permutation.ndim > 1:
        return q, x, _keep
    axis, permutation = q.ndim + q.permuted_axis, q.permutation
    plain = q.replace(permutation=None, permuted_axis=None)
    if axis in role.contracted:
        place = x_role.contracted[role.contracted.index(axis)]
        return plain, jnp.take(x, permutation, place, mode="clip"), _keep
    if axis not in role.free:
        return q, x, _keep
    # The product has the batch dimensions, then the free dimensions of lhs and of rhs.
    before = len(role.batch) + (0 if quantized == 0 else len(x_role.free)) + role.free.index(axis)
    rank = len(role.batch) + len(role.free) + len(x_role.free)
    return plain, x, lambda y: restore_permuted(y, permutation, before - rank)


def _spread_blocks(q: QuantizedArray, role: Role) -> QuantizedArray:
    """Return an array with blocks along one axis only, which is contracted if one of the axes is."""
    if not isinstance(q.block_size, tuple):
        return q
    parts = {name: getattr(q, name) for name in ("scale", "zero_point", "offset") if getattr(q, name) is not None}
    blocked = [
        axis for axis in range(q.ndim) if any(part.shape[axis] not in (1, q.shape[axis]) for part in parts.values())
    ]
    if not blocked:
        return q.replace(block_size=None)
    kept = next((axis for axis in blocked if axis in role.contracted), blocked[-1])
    sizes = (1,) * (q.ndim - len(q.block_size)) + q.block_size
    others = [axis for axis in blocked if axis != kept]
    spread = {name: granularity.expand_along(part, q.shape, q.block_size, others) for name, part in parts.items()}
    return q.replace(**spread, block_size=sizes[kept])
