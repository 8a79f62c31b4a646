"""`jax.lax.dot_general` over integers with zero points."""

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
from jax.typing import ArrayLike

from .._core import checks, granularity, sharding
from .._core.entry_point import compile_entry_point
from . import _dot_kernel, _layout, _operands

_NAME = "integer.dot_general"

DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DotDimensionNumbers,
    *,
    lhs_zero_point: ArrayLike | None = None,
    rhs_zero_point: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """out = sum over the contracted dimensions of (lhs - lhs_zero_point) (rhs - rhs_zero_point), in int32.

    Exact modulo 2**32: the int32 wraps around, as ONNX has it. It cannot while the contracted dimensions hold fewer
    than 2**31 / (255 * 255) = 33025 elements. Whatever the dtypes, the dimension numbers and the batching, the
    contraction is one of int8 by int8 to int32; the operands are never widened to more than 8 bits.

    Args:
        lhs: int8, uint8, int4, uint4, int2 or uint2, of any shape.
        rhs: any of the same dtypes, not necessarily lhs's.
        dimension_numbers: Static. ((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as `jax.lax` has it.
        lhs_zero_point: steps, in lhs's dtype: a scalar, or an array of lhs's rank whose dimensions are 1 along the
            contracted ones and 1 or lhs's elsewhere. None is 0. An int stands for an array of it.
        rhs_zero_point: steps, in rhs's dtype, likewise.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `jax.lax`; required where
            the shardings of the operands do not determine it. Partial sums of a sharded contracted dimension are added
            up in int32, so the integers stay the same.

    Returns:
        int32; the batch dimensions, then lhs's free ones, then rhs's.

    Raises:
        TypeError: an operand or a zero point has another dtype.
        ValueError: dimension numbers, a zero point's shape or an out_sharding do not fit the operands; or there is no
            out_sharding, and the operands do not determine it.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> lhs = jnp.array([[0, 255, 128]], jnp.uint8)
        >>> rhs = jnp.array([[-128, 127, 3], [5, -7, 9]], jnp.int8)  # a transposed weight
        >>> jq.integer.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), lhs_zero_point=128)
        Array([[32513, -1529]], dtype=int32)

    Source: `jax.lax.dot_general`; the arithmetic is ONNX MatMulInteger-10's.
    """
    lhs_zero_point = _operands.convert_zero_point_number(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = _operands.convert_zero_point_number(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = _operands.find_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
    sharding.check_out_sharding(_NAME, out_sharding)
    return _dot_general(
        lhs, rhs, lhs_zero_point, rhs_zero_point, out_sharding=out_sharding,
        dimension_numbers=checks.check_integers(_NAME, "dimension_numbers", dimension_numbers), centred=centred,
    )  # fmt: skip


@compile_entry_point(_NAME)
def _dot_general(
    lhs: jax.Array, rhs: jax.Array, lhs_zero_point: jax.Array | None, rhs_zero_point: jax.Array | None, *,
    dimension_numbers: Any, centred: tuple[bool, bool], out_sharding: Any,
) -> jax.Array:  # fmt: skip
    checks.check_array(_NAME, "lhs", lhs, _operands.DTYPES)
    checks.check_array(_NAME, "rhs", rhs, _operands.DTYPES)
    left, right = find_roles(_NAME, lhs, rhs, dimension_numbers)
    for side, x, point, role in (("lhs", lhs, lhs_zero_point, left), ("rhs", rhs, rhs_zero_point, right)):
        _check_zero_point(side, x, point, role)
    check_placement(_NAME, lhs, rhs, left, right, out_sharding)
    steps = (
        _operands.convert_steps(lhs_zero_point, lhs.dtype, centred[0]),
        _operands.convert_steps(rhs_zero_point, rhs.dtype, centred[1]),
    )
    return contract_roles(
        _operands.convert_to_signed(lhs), _operands.convert_to_signed(rhs), *steps, left, right, out_sharding
    )


class Role(NamedTuple):
    """What each dimension of an operand is there for."""

    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]


def check_placement(function: str, lhs: jax.Array, rhs: jax.Array, left: Role, right: Role, out_sharding: Any) -> None:
    """Requires an out_sharding that fits the result, or operands whose shardings determine it."""
    rank = len(left.batch) + len(left.free) + len(right.free)
    if sharding.find_out_partition(function, out_sharding, rank) is not None:
        return
    if not (sharding.is_placed(lhs) or sharding.is_placed(rhs)) or determines_sharding(lhs, rhs, left, right):
        return
    operands = f"lhs {sharding.describe_placement(lhs)} and rhs {sharding.describe_placement(rhs)}"
    expected = f"a NamedSharding or PartitionSpec for the {rank} dimensions of the result, not determined by {operands}"
    checks.require(False, function, "out_sharding", expected, None)


def determines_sharding(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> bool:
    """Whether JAX infers the sharding of a contraction: no contracted dimension is sharded on both sides, batch
    dimensions are sharded alike, and no mesh axis occurs twice in the result.
    """
    places = [sharding.find_partition(x) for x in (lhs, rhs)]
    batches = [[place[a] for a in role.batch] for place, role in zip(places, (left, right), strict=True)]
    pairs = zip(left.contracted, right.contracted, strict=True)
    contracted = any(places[0][a] is not None and places[1][b] is not None for a, b in pairs)
    kept = [*batches[0], *(place[a] for place, role in zip(places, (left, right), strict=True) for a in role.free)]
    axes = [axis for entry in kept if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    return not contracted and batches[0] == batches[1] and len(set(axes)) == len(axes)


def contract_roles(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role, out_sharding: Any = None
) -> jax.Array:
    """Returns the int32 contraction of two int8 operands; steps are int32 scalars, of the operand's rank, or None."""
    if out_sharding is not None or sharding.is_placed(lhs) or sharding.is_placed(rhs):
        return _place_output(lhs, rhs, lhs_steps, rhs_steps, left, right, out_sharding)
    order = sorted(range(len(left.contracted)), key=lambda i: left.contracted[i])
    left, right = (r._replace(contracted=tuple(r.contracted[i] for i in order)) for r in (left, right))
    turned = (*right.batch, *right.free, *right.contracted)
    straight = (*right.batch, *right.contracted, *right.free)
    transposed = not _layout.is_moving(turned, rhs.shape) and _layout.is_moving(straight, rhs.shape)
    batch, rows, depth = (_count_elements(lhs, axes) for axes in left)
    columns = _count_elements(rhs, right.free)
    a = _layout.transpose_in_memory(lhs, (*left.batch, *left.free, *left.contracted)).reshape(batch, rows, depth)
    b = _layout.transpose_in_memory(rhs, turned if transposed else straight)
    b = b.reshape((batch, columns, depth) if transposed else (batch, depth, columns))
    a_steps, b_steps = _reshape_steps(lhs_steps, lhs, left), _reshape_steps(rhs_steps, rhs, right)
    acc = _dot_kernel.contract_integers(a, b, a_steps, b_steps, transposed=transposed)
    return acc.reshape(_find_result_shape(lhs, rhs, left, right))


def _count_elements(x: jax.Array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _find_result_shape(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> tuple[int, ...]:
    axes = ((lhs, left.batch), (lhs, left.free), (rhs, right.free))
    return tuple(x.shape[a] for x, group in axes for a in group)


def _reshape_steps(steps: Any, x: jax.Array, role: Role) -> Any:
    """Returns steps as [batch or 1, free or 1], or None."""
    if steps is None:
        return None
    if steps.size == 1:
        return steps.reshape(1, 1)
    turned = lax.transpose(steps, (*role.batch, *role.free, *role.contracted))
    sizes = []
    for axes in (role.batch, role.free):
        varies = any(steps.shape[a] != 1 for a in axes)
        sizes.append([x.shape[a] if varies else 1 for a in axes])
    wide = jnp.broadcast_to(turned, (*sizes[0], *sizes[1], *(1 for _ in role.contracted)))
    return wide.reshape(math.prod(sizes[0]), math.prod(sizes[1]))


def _place_output(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role, out_sharding: Any
) -> jax.Array:
    """Returns the contraction where JAX tracks shardings in types and refuses reshapes: the dimensions stay."""
    dimensions = ((left.contracted, right.contracted), (left.batch, right.batch))
    acc = lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.int32, out_sharding=out_sharding)
    batch, frees = len(left.batch), len(left.free)
    wide = []
    for x, steps, role, start in ((lhs, lhs_steps, left, batch), (rhs, rhs_steps, right, batch + frees)):
        places = (*range(batch), *range(start, start + len(role.free)))
        outward = functools.partial(_move_outward, role=role, places=places, like=acc)
        sums = jnp.sum(x, axis=role.contracted, keepdims=True, dtype=jnp.int32)
        wide.append((None if steps is None else outward(steps, x), outward(sums, x)))
    (s, row_sums), (t, column_sums) = wide
    if t is not None:
        acc, column_sums = acc - t * row_sums, column_sums - np.int32(_count_elements(lhs, left.contracted)) * t
    return acc if s is None else acc - s * column_sums


def _move_outward(value: jax.Array, x: jax.Array, *, role: Role, places: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Returns what varies along an operand's batch and free dimensions in the result's shape and placement."""
    if value.ndim == 0:
        return granularity.PerTensor().expand(value, like)
    kept = lax.transpose(value, (*role.batch, *role.free, *role.contracted))
    kept = lax.squeeze(kept, tuple(range(len(places), value.ndim)))
    full = jnp.broadcast_to(kept, tuple(x.shape[a] for a in (*role.batch, *role.free)))
    return sharding.place_like(lax.broadcast_in_dim(full, like.shape, places), like)


def find_roles(function: str, lhs: Any, rhs: Any, numbers: Any) -> tuple[Role, Role]:
    """Holds dimension numbers to their contract and returns what the dimensions of each operand are there for."""
    try:
        (contracted_l, contracted_r), (batch_l, batch_r) = numbers
        groups = [tuple(g) for g in (contracted_l, contracted_r, batch_l, batch_r)]
    except (TypeError, ValueError):
        groups = []
    groups = groups if all(isinstance(a, int | np.integer) for g in groups for a in g) else []
    expected = "((lhs contracted, rhs contracted), (lhs batch, rhs batch)), sequences of ints"
    checks.require(len(groups) == 4, function, "dimension_numbers", expected, numbers)
    roles = []
    for side, x, contracted, batch in (("lhs", lhs, groups[0], groups[2]), ("rhs", rhs, groups[1], groups[3])):
        named = (*contracted, *batch)
        distinct = len(set(named)) == len(named) and all(0 <= a < x.ndim for a in named)
        expected = f"different dimensions of {side}, in [0, {x.ndim})"
        checks.require(distinct, function, "dimension_numbers", expected, numbers)
        roles.append(Role(batch, tuple(a for a in range(x.ndim) if a not in named), contracted))
    for name in ("batch", "contracted"):
        sizes = [tuple(x.shape[a] for a in getattr(r, name)) for x, r in zip((lhs, rhs), roles, strict=True)]
        got = f"{sizes[0]} in lhs, {sizes[1]} in rhs"
        checks.require(sizes[0] == sizes[1], function, "dimension_numbers", f"equal {name} sizes", got)
    return roles[0], roles[1]


def _check_zero_point(side: str, x: jax.Array, zero_point: Any, role: Role) -> None:
    if zero_point is None:
        return
    argument = f"{side}_zero_point"
    checks.check_same_dtype(_NAME, argument, zero_point, x.dtype, f"{side}'s")
    largest = tuple(1 if a in role.contracted else n for a, n in enumerate(x.shape))
    fits = zero_point.ndim == x.ndim and all(z in (1, n) for z, n in zip(zero_point.shape, largest, strict=True))
    expected = f"a scalar, or shape {largest} or 1 in places of it"
    checks.require(zero_point.ndim == 0 or fits, _NAME, argument, expected, f"shape {zero_point.shape}")
