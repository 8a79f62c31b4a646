"""The integer contraction of any dimensions, as products of matrices that each backend runs fast.

An operand's dimensions have roles: batch, free, contracted. The free dimensions are merged into rows and columns, and
the contracted ones into one, after a transpose in memory where they are not neighbors already: XLA:CPU would fold a
transpose into the contraction, which would then lose its vector kernel. Of rhs the kernel takes [K, N] and [N, K], so
weights that are stored either way are read as they are.

Codes of 2 or 4 bits are contracted in planes, every second or fourth column after the other, if the other operand has
few rows: then the conversion takes longer than the contraction, and XLA:CPU vectorizes only the conversion of a plane.

Arrays with explicit shardings are contracted by `jax.lax` as they are, because JAX cannot infer the shardings of the
reshapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._core import dtypes, granularity, recording, sharding
from . import barriers, matrix_product, packed_codes, signed_codes


class Role(NamedTuple):
    """The dimensions of an operand, by what a contraction does with them.

    Attributes:
        batch: the dimensions that both operands share and that are kept.
        free: the dimensions of this operand alone, which are kept.
        contracted: the dimensions that are summed over.
    """

    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]


def contract_roles(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_steps: jax.Array | None,
    rhs_steps: jax.Array | None,
    left: Role,
    right: Role,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Return the int32 contraction of two operands with zero points.

    Args:
        lhs: int8, or codes of 2 or 4 bits.
        rhs: the same.
        lhs_steps: int32, a scalar or of lhs's rank, or None for 0.
        rhs_steps: int32, a scalar or of rhs's rank, or None for 0.
        left: the dimensions of lhs.
        right: the dimensions of rhs.
        out_sharding: the sharding of the result, or None.
    """
    if recording.is_recording():
        return _contract_recorded(lhs, rhs, lhs_steps, rhs_steps, left, right)
    if out_sharding is not None or sharding.is_placed(lhs) or sharding.is_placed(rhs):
        lhs, rhs = signed_codes.convert_to_signed(lhs), signed_codes.convert_to_signed(rhs)
        return _place_output(lhs, rhs, lhs_steps, rhs_steps, left, right, out_sharding)
    contract = functools.partial(_contract_signed, left=left, right=right)
    contract_plane = functools.partial(contract, is_unpacked=True)
    contract_planes = functools.partial(packed_codes.contract_planes, contract=contract_plane, left=left, right=right)
    for side in (1, 0):
        if packed_codes.is_faster_in_planes((lhs, rhs), (lhs_steps, rhs_steps), (left, right), side):
            on_cpu = functools.partial(contract_planes, side=side)
            return lax.platform_dependent(lhs, rhs, lhs_steps, rhs_steps, cpu=on_cpu, default=contract)
    return contract(lhs, rhs, lhs_steps, rhs_steps)


def _batch_contraction(
    mapped: dict[str, bool],
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_steps: jax.Array | None,
    rhs_steps: jax.Array | None,
    left: Role,
    right: Role,
) -> jax.Array:
    """Return the contraction with one more dimension, its first; mapped operands have it as their first dimension."""
    sides = []
    for x, steps, role, names in (
        (lhs, lhs_steps, left, ("lhs", "lhs_steps")), (rhs, rhs_steps, right, ("rhs", "rhs_steps"))
    ):  # fmt: skip
        is_mapped = mapped[names[0]]
        if steps is not None and mapped[names[1]]:
            if not is_mapped:
                x, is_mapped = jnp.broadcast_to(x, (steps.shape[0], *x.shape)), True
            steps = steps.reshape(-1, *(steps.shape[1:] if steps.ndim > 1 else (1,) * (x.ndim - 1)))
        elif steps is not None and steps.ndim and is_mapped:
            steps = steps[None]
        shifted = Role(*(tuple(axis + 1 for axis in axes) for axes in role)) if is_mapped else role
        sides.append((x, steps, shifted, is_mapped))
    (lhs, lhs_steps, left, in_lhs), (rhs, rhs_steps, right, in_rhs) = sides
    if in_lhs and in_rhs:
        left, right = (role._replace(batch=(0, *role.batch)) for role in (left, right))
        return contract_roles(lhs, rhs, lhs_steps, rhs_steps, left, right)
    left = left._replace(free=(0, *left.free)) if in_lhs else left
    right = right._replace(free=(0, *right.free)) if in_rhs else right
    y = contract_roles(lhs, rhs, lhs_steps, rhs_steps, left, right)
    return jnp.moveaxis(y, len(left.batch) + (0 if in_lhs else len(left.free)), 0)


@recording.mark(
    "contract",
    lambda lhs, rhs, left, right, **_: (_derive_result_shape(lhs, rhs, left, right), jnp.int32),
    _batch_contraction,
)
def _contract_recorded(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: jax.Array | None, rhs_steps: jax.Array | None, left: Role, right: Role
) -> jax.Array:
    """Return the int32 contraction of codes of any dtype, with their zero points."""
    with recording.pause():
        lhs, lhs_steps = signed_codes.shift_recorded(lhs, lhs_steps)
        rhs, rhs_steps = signed_codes.shift_recorded(rhs, rhs_steps)
        return contract_roles(lhs, rhs, lhs_steps, rhs_steps, left, right)


def _contract_signed(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_steps: jax.Array | None,
    rhs_steps: jax.Array | None,
    *,
    left: Role,
    right: Role,
    is_unpacked: bool = False,
) -> jax.Array:
    """Return the int32 contraction of two operands, which are converted to int8.

    `is_unpacked` says that an operand of int8 is the result of a conversion from 2 or 4 bits.
    """
    rows, columns = _count_elements(lhs, left.free), _count_elements(rhs, right.free)
    # A loop contracts a single row with a matrix. The barriers keep XLA from converting a matrix that is a constant
    # while it compiles.
    if not is_unpacked:
        lhs = lax.optimization_barrier(lhs) if columns == 1 else lhs
        rhs = lax.optimization_barrier(rhs) if rows == 1 else rhs
        is_unpacked = any(dtypes.find_width(x.dtype) < 8 for x in (lhs, rhs))
    lhs, rhs = signed_codes.convert_to_signed(lhs), signed_codes.convert_to_signed(rhs)
    # If the contracted dimensions are in the order in which lhs has them, lhs often needs no transpose.
    order = sorted(range(len(left.contracted)), key=lambda i: left.contracted[i])
    left, right = (role._replace(contracted=tuple(role.contracted[i] for i in order)) for role in (left, right))
    # The kernel takes rhs in two layouts: if rhs has one of them, use it, so that rhs needs no transpose.
    contracted_last = (*right.batch, *right.free, *right.contracted)
    contracted_first = (*right.batch, *right.contracted, *right.free)
    is_last = not barriers.is_moving(contracted_last, rhs.shape)
    transposed = is_last and barriers.is_moving(contracted_first, rhs.shape)
    batch, depth = _count_elements(lhs, left.batch), _count_elements(lhs, left.contracted)
    a = barriers.transpose_in_memory(lhs, (*left.batch, *left.free, *left.contracted)).reshape(batch, rows, depth)
    b = barriers.transpose_in_memory(rhs, contracted_last if transposed else contracted_first)
    b = b.reshape((batch, columns, depth) if transposed else (batch, depth, columns))
    a_steps, b_steps = _reshape_steps(lhs_steps, lhs, left), _reshape_steps(rhs_steps, rhs, right)
    contract = matrix_product.make_contraction(transposed, is_unpacked)
    acc = contract(a, b, a_steps, b_steps)
    return acc.reshape(_derive_result_shape(lhs, rhs, left, right))


def _count_elements(x: jax.Array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _derive_result_shape(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> tuple[int, ...]:
    lhs_dimensions = (lhs.shape[axis] for axis in (*left.batch, *left.free))
    return (*lhs_dimensions, *(rhs.shape[axis] for axis in right.free))


def _reshape_steps(steps: jax.Array | None, x: jax.Array, role: Role) -> Any:
    """Return zero points as [batch or 1, free or 1], or None."""
    if steps is None:
        return None
    if steps.size == 1:
        return steps.reshape(1, 1)
    arranged = lax.transpose(steps, (*role.batch, *role.free, *role.contracted))
    # Each group of dimensions becomes one, of length 1 if the zero points do not vary along it.
    sizes = []
    for axes in (role.batch, role.free):
        varies = any(steps.shape[a] != 1 for a in axes)
        sizes.append([x.shape[a] if varies else 1 for a in axes])
    wide = jnp.broadcast_to(arranged, (*sizes[0], *sizes[1], *(1 for _ in role.contracted)))
    return wide.reshape(math.prod(sizes[0]), math.prod(sizes[1]))


def _place_output(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_steps: jax.Array | None,
    rhs_steps: jax.Array | None,
    left: Role,
    right: Role,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:
    """Return the contraction of operands with shardings in their types, computed by `jax.lax`.

    JAX cannot infer the shardings of the reshapes in `matrix_product`.
    """
    # Without a reshape each dimension keeps its sharding. The zero points are corrected as in `matrix_product`.
    dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
    acc = lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.int32, out_sharding=out_sharding)
    batch, frees = len(left.batch), len(left.free)
    expanded = []  # for each operand its zero points and its sums, in the result's shape
    for x, steps, role, start in ((lhs, lhs_steps, left, batch), (rhs, rhs_steps, right, batch + frees)):
        places = (*range(batch), *range(start, start + len(role.free)))
        outward = functools.partial(_move_outward, role=role, places=places, like=acc)
        sums = jnp.sum(x, axis=role.contracted, keepdims=True, dtype=jnp.int32)
        expanded.append((None if steps is None else outward(steps, x), outward(sums, x)))
    (lhs_points, row_sums), (rhs_points, column_sums) = expanded
    if rhs_points is not None:
        acc = acc - rhs_points * row_sums
        column_sums = column_sums - np.int32(_count_elements(lhs, left.contracted)) * rhs_points
    return acc if lhs_points is None else acc - lhs_points * column_sums


def _move_outward(value: jax.Array, x: jax.Array, *, role: Role, places: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Return an array that varies along an operand's batch and free dimensions in the result's shape and sharding."""
    if value.ndim == 0:
        return granularity.PerTensor().expand(value, like)
    # Move the batch and free dimensions to the front, and drop the contracted ones, which have length 1, from the end.
    outer = lax.transpose(value, (*role.batch, *role.free, *role.contracted))
    outer = lax.squeeze(outer, tuple(range(len(places), value.ndim)))
    full = jnp.broadcast_to(outer, tuple(x.shape[a] for a in (*role.batch, *role.free)))
    return sharding.place_like(lax.broadcast_in_dim(full, like.shape, places), like)


def spread_outward(scale: jax.Array, role: Role, before: int, after: int) -> jax.Array:
    """Return an operand's scale with the rank of the product.

    Args:
        scale: an array of the operand's rank, of length 1 along the contracted dimensions.
        role: the role of each dimension of the operand.
        before: the number of free dimensions of the other operand that come before this operand's in the product.
        after: the number of those that come after them.
    """
    order = (*role.batch, *role.free, *role.contracted)
    transposed = lax.transpose(scale, order) if order != tuple(range(scale.ndim)) else scale
    kept = transposed.shape[: len(role.batch) + len(role.free)]
    batch = len(role.batch)
    return lax.reshape(transposed, (*kept[:batch], *(1,) * before, *kept[batch:], *(1,) * after))
