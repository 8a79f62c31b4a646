"""`jax.lax.dot_general` for integers with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .._core import checks, dtypes, scale_arguments, sharding
from .._core.entry_point import compile_entry_point
from .._kernels import signed_codes
from .._kernels.contraction import Role, contract_roles

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
    lhs_zero_point = scale_arguments.convert_operand_zero_point(_NAME, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = scale_arguments.convert_operand_zero_point(_NAME, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.are_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
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
    checks.check_array(_NAME, "lhs", lhs, dtypes.CONTRACTED)
    checks.check_array(_NAME, "rhs", rhs, dtypes.CONTRACTED)
    left, right = match_roles(_NAME, lhs, rhs, dimension_numbers)
    for side, x, point, role in (("lhs", lhs, lhs_zero_point, left), ("rhs", rhs, rhs_zero_point, right)):
        _check_zero_point(side, x, point, role)
    check_placement(_NAME, lhs, rhs, left, right, out_sharding)
    steps = (
        signed_codes.convert_steps(lhs_zero_point, lhs.dtype, centred[0]),
        signed_codes.convert_steps(rhs_zero_point, rhs.dtype, centred[1]),
    )
    lhs, rhs = signed_codes.shift_to_signed(lhs), signed_codes.shift_to_signed(rhs)
    return contract_roles(lhs, rhs, *steps, left, right, out_sharding)


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
    checks.refuse(function, "out_sharding", expected, None)


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


def match_roles(function: str, lhs: Any, rhs: Any, numbers: Any) -> tuple[Role, Role]:
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


class MatrixShapes(NamedTuple):
    """The shapes of two operands as stacks of matrices, and the shape that numpy.matmul returns.

    Attributes:
        a: the shape of the left operand; a vector is a matrix of one row.
        b: the shape of the right operand; a vector is a matrix of one column.
        out: the shape of the result, in which the row or column of a vector is dropped.
        function: the name of the public function, for errors.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    function: str

    @property
    def product(self) -> tuple[int, ...]:
        """The shape of the product before the row or column of a vector is dropped."""
        return (*lax.broadcast_shapes(self.a[:-2], self.b[:-2]), self.a[-2], self.b[-1])


def match_matrices(function: str, a: jax.Array, b: jax.Array, names: tuple[str, str] = ("a", "b")) -> MatrixShapes:
    """Return the shapes of a product; raise ContractValueError unless numpy.matmul accepts the operands."""
    shape_a, shape_b = a.shape, b.shape
    for name, shape in zip(names, (shape_a, shape_b), strict=True):
        checks.require(len(shape) > 0, function, name, "an array of rank 1 or more", "rank 0")
    # As in numpy, a vector on the left is a row and a vector on the right is a column.
    wide_a = shape_a if len(shape_a) > 1 else (1, *shape_a)
    wide_b = shape_b if len(shape_b) > 1 else (*shape_b, 1)
    if wide_a[-1] != wide_b[-2]:
        expected = f"{wide_a[-1]} rows, as many as {names[0]} has columns"
        checks.refuse(function, names[1], expected, f"shapes {shape_a} and {shape_b}")
    try:
        batch = lax.broadcast_shapes(wide_a[:-2], wide_b[:-2]) if len(wide_a) + len(wide_b) > 4 else ()
    except ValueError:
        expected = f"batch dimensions that broadcast against {names[0]}'s"
        checks.refuse(function, names[1], expected, f"shapes {shape_a} and {shape_b}")
    rows = (wide_a[-2],) if len(shape_a) > 1 else ()
    columns = (wide_b[-1],) if len(shape_b) > 1 else ()
    return MatrixShapes(wide_a, wide_b, (*batch, *rows, *columns), function)
