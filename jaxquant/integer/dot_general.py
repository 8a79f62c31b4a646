"""`jax.lax.dot_general` for integers with zero points."""

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

from .._core import checks, dtypes, granularity, recording, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import matrix_product, signed_codes
from . import _layout, _planes

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
    """Contract two integer arrays with zero points, exactly, into int32.

    out = sum over the contracted dimensions of (lhs - lhs_zero_point) (rhs - rhs_zero_point), modulo 2**32

    An int32 overflow wraps around, as in ONNX. It cannot occur if fewer than 2**31 / (255 * 255) = 33025 elements are
    contracted. For all dtypes, dimension numbers and batchings the contraction runs as int8 by int8 to int32. The
    operands are never widened to more than 8 bits.

    Args:
        lhs: codes of any shape: int8, uint8, int4, uint4, int2 or uint2.
        rhs: codes of any of these dtypes, which need not be lhs's.
        dimension_numbers: Static. ((lhs contracted, rhs contracted), (lhs batch, rhs batch)), as in `jax.lax`.
        lhs_zero_point: the code of 0.0, in lhs's dtype: a scalar, or an array of lhs's rank whose contracted dimensions
            are 1 and whose other dimensions are 1 or lhs's. None means 0. An int becomes an array of that dtype.
        rhs_zero_point: the same for rhs, in rhs's dtype.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `jax.lax`. It is required
            if the shardings of the operands do not determine it. Partial sums over a sharded contracted dimension are
            added in int32, so that the result is the same integer.

    Returns:
        int32, with the batch dimensions, then the free dimensions of lhs, then those of rhs.

    Raises:
        TypeError: an operand or a zero point has a dtype not listed above, or a static argument has a wrong type.
        ValueError: the dimension numbers, the shape of a zero point or an out_sharding do not fit the operands; or
            out_sharding is None and the operands do not determine the sharding.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> lhs = jnp.array([[0, 255, 128]], jnp.uint8)
        >>> rhs = jnp.array([[-128, 127, 3], [5, -7, 9]], jnp.int8)  # a transposed weight
        >>> jq.integer.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), lhs_zero_point=128)
        Array([[32513, -1529]], dtype=int32)

    Source: `jax.lax.dot_general`; the arithmetic is that of ONNX MatMulInteger-10.
    """
    lhs_zero_point = signed_codes.convert_zero_point_number(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = signed_codes.convert_zero_point_number(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.find_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
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
    checks.check_array(_NAME, "lhs", lhs, signed_codes.DTYPES)
    checks.check_array(_NAME, "rhs", rhs, signed_codes.DTYPES)
    left, right = find_roles(_NAME, lhs, rhs, dimension_numbers)
    for side, x, point, role in (("lhs", lhs, lhs_zero_point, left), ("rhs", rhs, rhs_zero_point, right)):
        _check_zero_point(side, x, point, role)
    check_placement(_NAME, lhs, rhs, left, right, out_sharding)
    steps = (
        signed_codes.convert_steps(lhs_zero_point, lhs.dtype, centred[0]),
        signed_codes.convert_steps(rhs_zero_point, rhs.dtype, centred[1]),
    )
    lhs, rhs = signed_codes.shift_to_signed(lhs), signed_codes.shift_to_signed(rhs)
    return contract_roles(lhs, rhs, *steps, left, right, out_sharding)


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


def check_placement(function: str, lhs: jax.Array, rhs: jax.Array, left: Role, right: Role, out_sharding: Any) -> None:
    """Raise ContractValueError unless out_sharding fits the result, or the operands determine its sharding."""
    rank = len(left.batch) + len(left.free) + len(right.free)
    if sharding.find_out_partition(function, out_sharding, rank) is not None:
        return
    if not (sharding.is_placed(lhs) or sharding.is_placed(rhs)) or determines_sharding(lhs, rhs, left, right):
        return
    operands = f"lhs {sharding.describe_placement(lhs)} and rhs {sharding.describe_placement(rhs)}"
    result = f"the {rank} dimensions of the result, whose sharding is not determined by {operands}"
    expected = f"a NamedSharding or PartitionSpec for {result}"
    checks.require(False, function, "out_sharding", expected, None)


def determines_sharding(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> bool:
    """Return whether JAX can infer the sharding of a contraction from its operands.

    It can if no contracted dimension is sharded in both operands, batch dimensions are sharded in the same way, and no
    mesh axis would occur twice in the result.
    """
    partitions = [sharding.find_partition(x) for x in (lhs, rhs)]
    batches, frees = [], []
    for partition, role in zip(partitions, (left, right), strict=True):
        batches.append([partition[axis] for axis in role.batch])
        frees += [partition[axis] for axis in role.free]
    pairs = zip(left.contracted, right.contracted, strict=True)
    has_sharded_pair = any(partitions[0][a] is not None and partitions[1][b] is not None for a, b in pairs)
    mesh_axes: list[Any] = []
    for entry in (*batches[0], *frees):  # an entry is None, the name of a mesh axis, or a tuple of names
        if entry is not None:
            mesh_axes += entry if isinstance(entry, tuple) else (entry,)
    return not has_sharded_pair and batches[0] == batches[1] and len(set(mesh_axes)) == len(mesh_axes)


def contract_roles(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role, out_sharding: Any = None
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
    contract_planes = functools.partial(_planes.contract_planes, contract=contract_plane, left=left, right=right)
    for side in (1, 0):
        if _planes.is_cut((lhs, rhs), (lhs_steps, rhs_steps), (left, right), side):
            on_cpu = functools.partial(contract_planes, side=side)
            return lax.platform_dependent(lhs, rhs, lhs_steps, rhs_steps, cpu=on_cpu, default=contract)
    return contract(lhs, rhs, lhs_steps, rhs_steps)


def _batch_contraction(
    mapped: dict[str, bool], lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role
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
    lambda lhs, rhs, left, right, **_: (_find_result_shape(lhs, rhs, left, right), jnp.int32),
    _batch_contraction,
)
def _contract_recorded(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role
) -> jax.Array:
    """Return the int32 contraction of codes of any dtype, with their zero points."""
    with recording.pause():
        lhs, lhs_steps = signed_codes.shift_recorded(lhs, lhs_steps)
        rhs, rhs_steps = signed_codes.shift_recorded(rhs, rhs_steps)
        return contract_roles(lhs, rhs, lhs_steps, rhs_steps, left, right)


def _contract_signed(
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, *, left: Role, right: Role,
    is_unpacked: bool = False,
) -> jax.Array:  # fmt: skip
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
    is_last = not _layout.is_moving(contracted_last, rhs.shape)
    transposed = is_last and _layout.is_moving(contracted_first, rhs.shape)
    batch, depth = _count_elements(lhs, left.batch), _count_elements(lhs, left.contracted)
    a = _layout.transpose_in_memory(lhs, (*left.batch, *left.free, *left.contracted)).reshape(batch, rows, depth)
    b = _layout.transpose_in_memory(rhs, contracted_last if transposed else contracted_first)
    b = b.reshape((batch, columns, depth) if transposed else (batch, depth, columns))
    a_steps, b_steps = _reshape_steps(lhs_steps, lhs, left), _reshape_steps(rhs_steps, rhs, right)
    acc = matrix_product.contract_integers(a, b, a_steps, b_steps, transposed=transposed, is_unpacked=is_unpacked)
    return acc.reshape(_find_result_shape(lhs, rhs, left, right))


def _count_elements(x: jax.Array, axes: Sequence[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _find_result_shape(lhs: jax.Array, rhs: jax.Array, left: Role, right: Role) -> tuple[int, ...]:
    lhs_dimensions = (lhs.shape[axis] for axis in (*left.batch, *left.free))
    return (*lhs_dimensions, *(rhs.shape[axis] for axis in right.free))


def _reshape_steps(steps: Any, x: jax.Array, role: Role) -> Any:
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
    lhs: jax.Array, rhs: jax.Array, lhs_steps: Any, rhs_steps: Any, left: Role, right: Role, out_sharding: Any
) -> jax.Array:
    """Return the contraction of operands whose shardings JAX tracks in types, computed by `jax.lax`.

    The form in `_dot_kernel` needs reshapes whose shardings JAX cannot infer.
    """
    # Without a reshape each dimension keeps its sharding. The zero points are corrected as in `_dot_kernel`.
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


def find_roles(function: str, lhs: Any, rhs: Any, numbers: Any) -> tuple[Role, Role]:
    """Return the role of each dimension of both operands; raise ContractValueError for wrong dimension numbers."""
    try:
        (contracted_l, contracted_r), (batch_l, batch_r) = numbers
        groups = [tuple(axes) for axes in (contracted_l, contracted_r, batch_l, batch_r)]
    except (TypeError, ValueError):
        groups = []
    # A wrong structure and an axis of a wrong type share one error, which shows the expected form.
    groups = groups if all(isinstance(axis, int | np.integer) for axes in groups for axis in axes) else []
    expected = "((lhs contracted, rhs contracted), (lhs batch, rhs batch)), sequences of ints"
    checks.require(len(groups) == 4, function, "dimension_numbers", expected, numbers)
    roles = []
    for side, x, contracted, batch in (("lhs", lhs, groups[0], groups[2]), ("rhs", rhs, groups[1], groups[3])):
        axes = (*contracted, *batch)
        are_distinct = len(set(axes)) == len(axes) and all(0 <= axis < x.ndim for axis in axes)
        expected = f"distinct dimensions of {side}, in [0, {x.ndim})"
        checks.require(are_distinct, function, "dimension_numbers", expected, numbers)
        roles.append(Role(batch, tuple(axis for axis in range(x.ndim) if axis not in axes), contracted))
    for name in ("batch", "contracted"):
        sizes = []
        for x, role in zip((lhs, rhs), roles, strict=True):
            sizes.append(tuple(x.shape[axis] for axis in getattr(role, name)))
        got = f"{sizes[0]} in lhs, {sizes[1]} in rhs"
        checks.require(sizes[0] == sizes[1], function, "dimension_numbers", f"equal {name} sizes", got)
    return roles[0], roles[1]


def _check_zero_point(side: str, x: jax.Array, zero_point: Any, role: Role) -> None:
    """Raise unless a zero point has its operand's dtype and does not vary along contracted dimensions."""
    if zero_point is None:
        return
    argument = f"{side}_zero_point"
    checks.check_same_dtype(_NAME, argument, zero_point, x.dtype, f"{side}'s")
    # A zero point that varies along a contracted dimension could not be factored out of the sum.
    largest = tuple(1 if a in role.contracted else n for a, n in enumerate(x.shape))
    fits = zero_point.ndim == x.ndim and all(z in (1, n) for z, n in zip(zero_point.shape, largest, strict=True))
    expected = f"a scalar, or shape {largest}, in which each dimension may be 1"
    checks.require(zero_point.ndim == 0 or fits, _NAME, argument, expected, f"shape {zero_point.shape}")
