"""Codes of 2 or 4 bits as planes: the even and the odd columns, or every fourth column, as int8 arrays.

XLA:CPU converts such codes to int8 one after the other if the result has them in the same order, but vectorizes the
conversion of every second one. A contraction of each plane therefore takes less time than one of all codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import dtypes, sharding


def count_planes(codes: jax.Array, *entries: Any) -> int:
    """Return how many planes an array has, or 1 if it is not cut into planes.

    Args:
        codes: codes of any dtype and shape.
        entries: arrays of the rank of the codes, or None: their scale and zero point.
    """
    width = dtypes.find_width(codes.dtype)
    if codes.dtype not in dtypes.INTEGERS or width >= 8 or codes.ndim == 0 or sharding.is_placed(codes):
        return 1
    count, length = 8 // width, codes.shape[-1]
    if not isinstance(length, int) or length == 0 or length % count:
        return 1
    # A block of columns would be spread over the planes.
    is_uniform = all(part is None or part.shape[-1] in (1, length) for part in entries)
    return count if is_uniform else 1


def take_plane(part: Any, place: int, count: int) -> Any:
    """Return the columns `place`, `place + count`, ... of an array; one column, or None, belongs to every plane."""
    return part if part is None or part.shape[-1] == 1 else part[..., place::count]


def take_code_plane(codes: jax.Array, place: int, count: int) -> jax.Array:
    """Return the columns `place`, `place + count`, ... of the codes as int8."""
    return codes[..., place::count].astype(jnp.int8)


def join_planes(results: list[jax.Array], axis: int) -> jax.Array:
    """Return arrays whose elements alternate along one axis as one array."""
    first = results[0].shape
    shape = (*first[:axis], first[axis] * len(results), *first[axis + 1 :])
    return jnp.stack(results, axis=axis + 1).reshape(shape)


def is_cut(operands: Sequence[jax.Array], steps: Sequence[Any], roles: Sequence[Any], side: int) -> bool:
    """Return whether a contraction of integers takes less time if one operand is cut into planes.

    Args:
        operands: lhs and rhs.
        steps: their zero points, scalars or of the operands' rank, or None.
        roles: their `Role`s.
        side: 0 for lhs, 1 for rhs.
    """
    codes, role = operands[side], roles[side]
    entries = [part for part in (steps[side],) if part is not None and part.ndim]
    if count_planes(codes, *entries) == 1 or codes.ndim - 1 in role.batch:
        return False
    sizes = [operands[1 - side].shape[axis] for axis in roles[1 - side].free]
    depths = [codes.shape[axis] for axis in role.contracted]
    # The results are joined, or added, one after the other, which takes longer than the conversion if they are large.
    return all(isinstance(n, int) for n in (*sizes, *depths)) and 2 * math.prod(sizes) <= math.prod(depths)


def contract_planes(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, *, contract: Callable[..., jax.Array],
    left: Any, right: Any, side: int,
) -> jax.Array:  # fmt: skip
    """Return the int32 contraction of two operands, of which one is cut into planes.

    Args:
        lhs: int8, or codes of 2 or 4 bits.
        rhs: the same.
        lhs_steps: int32, a scalar or of lhs's rank, or None for 0.
        rhs_steps: int32, a scalar or of rhs's rank, or None for 0.
        contract: returns the contraction of operands like these; for example those of one plane.
        left: the `Role` of each dimension of lhs.
        right: the `Role` of each dimension of rhs.
        side: 0 if lhs is cut, 1 if rhs is.
    """
    operands, steps, roles = [lhs, rhs], [lhs_steps, rhs_steps], (left, right)
    codes, role = operands[side], roles[side]
    count, last = count_planes(codes), codes.ndim - 1
    is_summed = last in role.contracted
    axis = roles[1 - side].contracted[role.contracted.index(last)] if is_summed else None
    results = []
    for place in range(count):
        plane_operands, plane_steps = list(operands), list(steps)
        plane_operands[side] = take_code_plane(codes, place, count)
        if axis is not None:
            plane_operands[1 - side] = lax.slice_in_dim(operands[1 - side], place, None, count, axis)
        elif steps[side] is not None and steps[side].ndim:
            plane_steps[side] = take_plane(steps[side], place, count)
        results.append(contract(*plane_operands, *plane_steps))
    if is_summed:
        return functools.reduce(lax.add, results)
    before = len(role.batch) + (len(left.free) if side == 1 else 0)
    return join_planes(results, before + role.free.index(last))
