"""Contractions of integers with zero points: `jax.lax`'s names and argument order, with exact int32 results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ._core import checks, dtypes, entry_point, sharding
from ._core.entry_point import compile_entry_point
from ._kernels import signed_codes
from ._kernels.contraction import Role, contract_roles
from ._kernels.convolution import ConvolutionPlan, Geometry, arrange_layout

__all__ = ["conv_general_dilated", "dot_general"]


def __dir__() -> list[str]:
    return __all__


# `jax.lax.dot_general` for integers with zero points.


_DOT = "integer.dot_general"

DotDimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Shaped(Protocol):
    """An array, or a quantized array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...


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
        lhs_zero_point: the code of 0.0, in lhs's dtype: a scalar, or an array of lhs's rank; its contracted dimensions
            are 1, its other dimensions 1 or lhs's. None means 0. An int becomes an array of that dtype.
        rhs_zero_point: the same for rhs, in rhs's dtype.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes, as in `jax.lax`. It is required
            if the shardings of the operands do not determine it. Partial sums over a sharded contracted dimension are
            added in int32, so that the result is the same integer.

    Returns:
        int32, with the batch dimensions, then the free dimensions of lhs and of rhs.

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

    Source: `jax.lax.dot_general`; the arithmetic follows ONNX MatMulInteger-10.
    """
    lhs_zero_point = entry_point.convert_operand_zero_point(_DOT, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = entry_point.convert_operand_zero_point(_DOT, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.are_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
    sharding.check_out_sharding(_DOT, out_sharding)
    return _dot_general(
        lhs, rhs, lhs_zero_point, rhs_zero_point, out_sharding=out_sharding,
        dimension_numbers=checks.check_integers(_DOT, "dimension_numbers", dimension_numbers), centred=centred,
    )  # fmt: skip


@compile_entry_point(_DOT)
def _dot_general(
    lhs: jax.Array, rhs: jax.Array, lhs_zero_point: jax.Array | None, rhs_zero_point: jax.Array | None, *,
    dimension_numbers: DotDimensionNumbers, centred: tuple[bool, bool],
    out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:  # fmt: skip
    checks.check_array(_DOT, "lhs", lhs, dtypes.CONTRACTED)
    checks.check_array(_DOT, "rhs", rhs, dtypes.CONTRACTED)
    left, right = match_roles(_DOT, lhs, rhs, dimension_numbers)
    for side, x, point, role in (("lhs", lhs, lhs_zero_point, left), ("rhs", rhs, rhs_zero_point, right)):
        _check_zero_point(side, x, point, role)
    check_placement(_DOT, lhs, rhs, left, right, out_sharding)
    centers = (
        signed_codes.derive_center(lhs_zero_point, lhs.dtype, centred[0]),
        signed_codes.derive_center(rhs_zero_point, rhs.dtype, centred[1]),
    )
    lhs, rhs = signed_codes.shift_to_signed(lhs), signed_codes.shift_to_signed(rhs)
    return contract_roles(lhs, rhs, *centers, left, right, out_sharding)


def check_placement(
    function: str, lhs: jax.Array, rhs: jax.Array, left: Role, right: Role,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> None:  # fmt: skip
    """Raise ContractValueError unless out_sharding fits the result, or the operands determine its sharding."""
    rank = len(left.batch) + len(left.free) + len(right.free)
    if sharding.read_out_partition(function, out_sharding, rank) is not None:
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
    partitions = [sharding.read_partition(x) for x in (lhs, rhs)]
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


def match_roles(function: str, lhs: Shaped, rhs: Shaped, numbers: DotDimensionNumbers) -> tuple[Role, Role]:
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


def _check_zero_point(side: str, x: jax.Array, zero_point: jax.Array | None, role: Role) -> None:
    """Raise unless a zero point has its operand's dtype and does not vary along contracted dimensions."""
    if zero_point is None:
        return
    argument = f"{side}_zero_point"
    checks.check_same_dtype(_DOT, argument, zero_point, x.dtype, f"{side}'s")
    # A zero point that varies along a contracted dimension could not be factored out of the sum.
    largest = tuple(1 if a in role.contracted else n for a, n in enumerate(x.shape))
    fits = zero_point.ndim == x.ndim and all(z in (1, n) for z, n in zip(zero_point.shape, largest, strict=True))
    expected = f"a scalar, or shape {largest}, in which each dimension may be 1"
    checks.require(zero_point.ndim == 0 or fits, _DOT, argument, expected, f"shape {zero_point.shape}")


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


# The static attributes of a convolution: their checks, and their form for the kernels.


def plan_convolution(
    function: str, lhs: Any, rhs: Any, strides: Sequence[int], padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None, rhs_dilation: Sequence[int] | None, numbers: Any, features: int, batches: int,
) -> ConvolutionPlan:  # fmt: skip
    """Return the checked attributes of a convolution; raise ContractValueError or ContractTypeError for a wrong one.

    All numbers of the arguments other than `numbers` are ints: `checks.check_integers` has seen them.
    """
    options = (strides, padding, lhs_dilation, rhs_dilation, numbers, features, batches)
    # As keys of a cache, axes that are 1.0 and 1 would be the same.
    is_text = numbers is None or (type(numbers) is tuple and all(type(part) is str for part in numbers))
    derive = _derive_plan if is_text and checks.is_hashable(options) else _derive_plan.__wrapped__
    plan = derive(function, tuple(lhs.shape), tuple(rhs.shape), *options)
    axes = (plan.numbers.lhs_spec[1:2], plan.numbers.rhs_spec[:2])
    check_channel_placement(function, ("lhs", "rhs"), (lhs, rhs), axes)
    return plan


# Eager calls repeat these checks with the same static values. A call that raises is not cached.
@functools.lru_cache(maxsize=1024)
def _derive_plan(
    function: str, lhs: tuple[int, ...], rhs: tuple[int, ...], strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]], lhs_dilation: Sequence[int] | None, rhs_dilation: Sequence[int] | None,
    numbers: Any, features: int, batches: int,
) -> ConvolutionPlan:  # fmt: skip
    """Return the checked attributes of a convolution of arrays of two shapes."""
    numbers = _check_dimension_numbers(function, lhs, rhs, numbers)
    x = tuple(lhs[axis] for axis in numbers.lhs_spec)  # (batch, channels, *spatial)
    w = tuple(rhs[axis] for axis in numbers.rhs_spec)  # (features, channels / groups, *kernel)
    _check_groups(function, x, w, features, batches)
    geometry = _derive_geometry(function, x, w, strides, padding, lhs_dilation, rhs_dilation)
    return ConvolutionPlan(numbers, geometry._replace(groups=features * batches), features, batches)


def check_channel_placement(function: str, names: Sequence[str], operands: Sequence[Any], axes: Sequence[Any]) -> None:
    """Raise ContractValueError if the channels or the features have an explicit sharding.

    JAX infers the sharding of a convolution from the sharding of its images alone.
    """
    for name, operand, features in zip(names, operands, axes, strict=True):
        x = getattr(operand, "codes", operand)  # the codes of a quantized array
        partition = sharding.read_partition(x)
        if all(partition[axis] is None for axis in features):
            continue
        expected = "channels and features that are not sharded (jax.sharding.reshard gathers them)"
        checks.refuse(function, name, expected, sharding.describe_placement(x))


def _check_dimension_numbers(function: str, lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: Any) -> Any:
    checks.require(len(lhs) >= 3, function, "lhs", "an array of rank 3 or more", f"shape {lhs}")
    checks.require(len(rhs) == len(lhs), function, "rhs", f"an array of lhs's rank, {len(lhs)}", f"shape {rhs}")
    rank = range(len(lhs))
    if isinstance(numbers, lax.ConvDimensionNumbers):
        # Compare as text, because the entries may have any type, and 1.0 is not an axis although it equals 1.
        holds = all(sorted(map(str, spec)) == sorted(map(str, rank)) for spec in numbers)
        expected = f"three permutations of {tuple(rank)}"
        checks.require(holds, function, "dimension_numbers", expected, repr(numbers))
        return lax.ConvDimensionNumbers(*(tuple(int(axis) for axis in spec) for spec in numbers))
    # jax.lax parses all other forms. The text of its error is quoted in ours.
    try:
        return lax.conv_dimension_numbers(lhs, rhs, numbers)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        expected = f"numbers for rank {len(lhs)} ({error})"
        text = checks.format_message(function, "dimension_numbers", expected, repr(numbers))
        raise checks.ContractValueError(text) from error


def _check_groups(function: str, x: tuple[int, ...], w: tuple[int, ...], features: int, batches: int) -> None:
    for argument, count, expected, size in (
        ("feature_group_count", features, "a divisor of lhs's channels", x[1]),
        ("feature_group_count", features, "a divisor of the features", w[0]),
        ("batch_group_count", batches, "a divisor of lhs's batch", x[0]),
        ("batch_group_count", batches, "a divisor of the features", w[0]),
    ):
        checks.check_integer(function, argument, count)
        checks.require(count > 0 and size % count == 0, function, argument, f"{expected}, {size}", count)
    has_one_kind = features == 1 or batches == 1
    checks.require(has_one_kind, function, "batch_group_count", "1 unless feature_group_count is 1", batches)
    expected = f"{x[1] // features} channels (lhs has {x[1]} in {features} groups)"
    checks.require(w[1] * features == x[1], function, "rhs", expected, w[1])


def _derive_geometry(
    function: str, x: tuple[int, ...], w: tuple[int, ...], strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]], lhs_dilation: Sequence[int] | None, rhs_dilation: Sequence[int] | None,
) -> Geometry:  # fmt: skip
    """Return the checked numbers of a convolution of x, (N, C, *spatial), with w, (O, C / groups, *kernel)."""
    rank = len(x) - 2
    ones = (1,) * rank
    strides = check_positive(function, "window_strides", strides, rank)
    lhs_dilation = check_positive(function, "lhs_dilation", ones if lhs_dilation is None else lhs_dilation, rank)
    rhs_dilation = check_positive(function, "rhs_dilation", ones if rhs_dilation is None else rhs_dilation, rank)
    if isinstance(padding, str):
        checks.check_option(function, "padding", padding.upper(), ("SAME", "SAME_LOWER", "VALID"))
        # "SAME" depends on the sizes after dilation, which inserts holes between the elements.
        dilated = tuple((size - 1) * step + 1 if size else 0 for size, step in zip(x[2:], lhs_dilation, strict=True))
        reach = tuple((size - 1) * step + 1 for size, step in zip(w[2:], rhs_dilation, strict=True))
        padding = tuple(lax.padtype_to_pads(dilated, reach, strides, padding.upper()))
    pairs = padding if isinstance(padding, tuple) else ()
    holds = len(pairs) == rank and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    checks.require(holds, function, "padding", f"a name, or {rank} pairs of ints", padding)
    for pad in itertools.chain.from_iterable(pairs):
        checks.check_integer(function, "padding", pad)
    pairs = tuple((int(low), int(high)) for low, high in pairs)
    return Geometry(strides, pairs, lhs_dilation, rhs_dilation)


def check_positive(function: str, argument: str, values: Any, rank: int) -> tuple[int, ...]:
    """Return one positive integer for each spatial dimension; raise for anything else."""
    is_sequence = isinstance(values, tuple | list | np.ndarray)
    expected = f"{rank} positive ints, one for each spatial dimension"
    checks.require(is_sequence and len(values) == rank, function, argument, expected, values)
    for value in values:
        checks.check_integer(function, argument, value)
        checks.require(value > 0, function, argument, expected, values)
    return tuple(int(value) for value in values)


def check_window(
    function: str, argument: str, spatial: tuple[int, ...], padding: Sequence[tuple[int, int]], reach: tuple[int, ...]
) -> None:
    """Raise ContractValueError unless the kernel fits into the padded x along every spatial dimension."""
    for size, (low, high), span in zip(spatial, padding, reach, strict=True):
        if span <= 0 or size + low + high < span:
            got = f"{size} with padding ({low}, {high})"
            checks.refuse(function, argument, f"a kernel that spans {span} to fit into the padded x", got)


def check_zero_points(
    function: str, names: tuple[str, str], operands: Sequence[jax.Array], zero_points: Sequence[jax.Array | None],
    features: int,
) -> None:  # fmt: skip
    """Raise unless each zero point has its operand's dtype and a shape that fits.

    The zero point of x is a scalar. The kernel's is a scalar or has one element for each output feature.
    """
    # Shape (1,) is a scalar too, as in ONNX Runtime.
    scalar = ((), (1,))
    shapes = (scalar, (*scalar, (features,)))
    texts = ("a scalar", f"a scalar or shape ({features},), one for each feature")
    for name, x, zero_point, allowed, expected in zip(names, operands, zero_points, shapes, texts, strict=True):
        if zero_point is not None:
            argument = f"{name}_zero_point"
            checks.check_same_dtype(function, argument, zero_point, x.dtype, f"{name}'s")
            checks.require(zero_point.shape in allowed, function, argument, expected, f"shape {zero_point.shape}")


# `jax.lax.conv_general_dilated` for integers with zero points.


_CONVOLVE = "integer.conv_general_dilated"


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    lhs_zero_point: ArrayLike | None = None,
    rhs_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """Convolve two integer arrays with zero points, exactly, into int32.

    out = convolution of lhs - lhs_zero_point with rhs - rhs_zero_point, modulo 2**32

    An int32 overflow wraps around, as in ONNX. Padding, and the gaps that `lhs_dilation` makes, count as 0 after the
    zero point is subtracted. A convolution of any layout, grouping and batching runs as an int8 convolution or
    contraction. The operands are never widened to more than 8 bits, except in a depthwise convolution, where products
    are summed element by element in int32.

    Args:
        lhs: codes of rank 3 or more: int8, uint8, int4, uint4, int2 or uint2.
        rhs: the kernel, of any of these dtypes, which need not be lhs's.
        window_strides: Static. One stride for each spatial dimension.
        padding: Static. "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial dimension; a negative number
            crops.
        lhs_dilation: Static. The distance between neighboring elements of lhs, for each spatial dimension; None means
            1.
        rhs_dilation: Static. The distance between neighboring elements of the kernel, likewise; None means 1.
        dimension_numbers: Static. As in `jax.lax`; None means (NCHW, OIHW, NCHW), with as many spatial dimensions as
            lhs has.
        feature_group_count: Static. The number of groups of channels; each output feature reads one group.
        batch_group_count: Static. The number of groups of images; each has its own output features.
        lhs_zero_point: the code of 0.0, a scalar in lhs's dtype. None means 0. An int becomes an array of that dtype.
        rhs_zero_point: the code of 0.0, in rhs's dtype: a scalar, or one for each output feature. None means 0. An int
            becomes an array of that dtype.

    Returns:
        int32, in the layout that the dimension numbers specify.

    Raises:
        TypeError: an operand or a zero point has a dtype not listed above, or a static argument has a wrong type.
        ValueError: shapes, windows, groups or dimension numbers do not fit each other.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> x = jnp.array([[[0, 128, 255]]], jnp.uint8)
        >>> kernel = jnp.array([[[1, 2, 3]]], jnp.int8)
        >>> jq.integer.conv_general_dilated(x, kernel, (1,), [(1, 1)], lhs_zero_point=128)
        Array([[[-256,  253,  254]]], dtype=int32)

    Source: `jax.lax.conv_general_dilated`; the arithmetic follows ONNX ConvInteger-10.
    """
    lhs_zero_point = entry_point.convert_operand_zero_point(_CONVOLVE, "lhs_zero_point", lhs_zero_point, lhs)
    rhs_zero_point = entry_point.convert_operand_zero_point(_CONVOLVE, "rhs_zero_point", rhs_zero_point, rhs)
    centred = signed_codes.are_centred((lhs, rhs), (lhs_zero_point, rhs_zero_point))
    ints = functools.partial(checks.check_integers, _CONVOLVE)
    return _conv_general_dilated(
        lhs, rhs, lhs_zero_point, rhs_zero_point,
        window_strides=ints("window_strides", window_strides), padding=ints("padding", padding),
        lhs_dilation=ints("lhs_dilation", lhs_dilation), rhs_dilation=ints("rhs_dilation", rhs_dilation),
        dimension_numbers=_freeze_dimension_numbers(dimension_numbers),
        feature_group_count=ints("feature_group_count", feature_group_count),
        batch_group_count=ints("batch_group_count", batch_group_count), centred=centred,
    )  # fmt: skip


def _freeze_dimension_numbers(numbers: object) -> Any:
    """Return dimension numbers with their lists as tuples, so that they are hashable."""
    if not isinstance(numbers, list | tuple):  # ConvDimensionNumbers is a tuple
        return numbers
    specs = tuple(tuple(spec) if isinstance(spec, list) else spec for spec in numbers)
    return lax.ConvDimensionNumbers(*specs) if isinstance(numbers, lax.ConvDimensionNumbers) else specs


@compile_entry_point(_CONVOLVE)
def _conv_general_dilated(
    lhs: jax.Array, rhs: jax.Array, lhs_zero_point: jax.Array | None, rhs_zero_point: jax.Array | None, *,
    window_strides: Sequence[int], padding: str | Sequence[tuple[int, int]], lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None, dimension_numbers: Any, feature_group_count: int, batch_group_count: int,
    centred: tuple[bool, bool],
) -> jax.Array:  # fmt: skip
    checks.check_array(_CONVOLVE, "lhs", lhs, dtypes.CONTRACTED)
    checks.check_array(_CONVOLVE, "rhs", rhs, dtypes.CONTRACTED)
    plan = plan_convolution(
        _CONVOLVE, lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
        feature_group_count, batch_group_count,
    )  # fmt: skip
    features = rhs.shape[plan.numbers.rhs_spec[0]]
    check_zero_points(_CONVOLVE, ("lhs", "rhs"), (lhs, rhs), (lhs_zero_point, rhs_zero_point), features)
    centers = (
        signed_codes.derive_center(lhs_zero_point, lhs.dtype, centred[0]),
        signed_codes.derive_center(rhs_zero_point, rhs.dtype, centred[1]),
    )
    return arrange_layout(lhs, rhs, *centers, plan, lambda acc, _: acc)
