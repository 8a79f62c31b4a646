"""`jax.lax.ragged_dot` and `ragged_dot_general` of quantized arrays: rows in groups, each with a matrix of its own.

On a backend without a kernel for it, JAX multiplies all rows by the matrices of all groups and masks what does not
belong together. Here a loop goes through the rows, and multiplies a tile of rows of one group by the matrix of that
group. It does not read a matrix that no row needs, and never dequantizes all matrices at once. `dot_general` computes
the product of a tile, in the form that suits its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jax.typing import ArrayLike, DTypeLike

from .._arrays import quantized_array
from .._arrays.quantized_array import QuantizedArray
from .._core import checks, dtypes, entry_point, recording, sharding
from ..integer import DotDimensionNumbers, match_roles
from .dot import Operand, check_integer_pair, check_numbers, check_operands, check_options, contract_dimensions
from .dot_integer import DOT_FORMS, Axes

_NAME, _GENERAL = "ragged_dot", "ragged_dot_general"
# Floats are permuted in place of codes, so that two quantized operands have no permutation. Integers are checked again,
# and have fewer forms.
_FORMS = (*DOT_FORMS, "real_zero_point", "inverse_scale", "arithmetic")
_Array = QuantizedArray | jax.Array
# The largest tile. Larger ones would gain nothing: the weights of one group are dequantized or converted once for it.
_LARGEST_TILE = 256
_SMALLEST_TILE = 8
# With at most this number of rows for each group on average, a group of a single row has the form for one row.
_FEW_ROWS = 4


def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Multiply groups of rows, each by a matrix of its own, as `jax.lax.ragged_dot` does.

    out[m] = lhs[m] @ rhs[g], for the group g of row m. The first group_sizes[0] rows are group 0, the next
    group_sizes[1] rows are group 1, and so on; rows that are left over are 0. This is the product of a mixture of
    experts: the rows are tokens, sorted by their experts, and rhs holds the weights of all experts.

    Each row has the arithmetic of `dot_general` with rhs[g]: in integers if both operands are quantized, with sums that
    are exact in int32; weight-only if one of them is a float array. The work grows with the rows: a group without rows
    costs nothing, and its weights are not read. No copy of all weights in floats is made, except in a gradient with
    respect to their scales.

    Args:
        lhs: a QuantizedArray, or an array of float32, float16 or bfloat16, [M, K].
        rhs: the same, [G, K, N]; at least one of the two is a QuantizedArray. Its scales may vary along G and N, and
            from block to block along K.
        group_sizes: integers, [G], none of them negative: the number of rows of each group. They may be traced.
        precision: Static. As in `jax.lax`, for a float contraction; an integer contraction ignores it.
        preferred_element_type: Static. float32, float16 or bfloat16: the dtype of the result. By default the dtype of
            the operands, or float32 if they differ.
        group_offset: Static. None: JAX has the argument, but no implementation of it.
        out_sharding: Static. The sharding of the result on a mesh with explicit axes. The operands must be whole on
            every device; to split them, call the function inside of `jax.shard_map`.

    Returns:
        The products, [M, N].

    Raises:
        TypeError: neither operand is quantized, an operand has an unsupported dtype, or group_sizes are not integers.
        ValueError: shapes do not fit each other, a known group size is negative, an operand is sharded on a mesh with
            explicit axes, group_offset is not None, or `dot_general` cannot contract a group.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> experts = jnp.array([[[127.0, 2.0], [0.5, 1.0]], [[-1.27, 0.0], [1.0, 254.0]]])
        >>> q = jq.quantize(experts, jq.QuantSpec(jnp.int8, jq.PerAxis((0, 2))))
        >>> tokens = jnp.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        >>> jq.ragged_dot(tokens, q, jnp.array([1, 1]))  # 0.5 and 1.0 are ties; the last row has no expert
        Array([[127.      ,   3.007874],
               [ -1.27    ,   0.      ],
               [  0.      ,   0.      ]], dtype=float32)

    Source: `jax.lax.ragged_dot`; the arithmetic is `dot_general`'s.

    Cotangents: as in `dot_general`. They are computed group by group for all rows, as JAX's are.
    """
    a, b = check_operands(_NAME, lhs, rhs)
    for name, x, rank in (("lhs", a, 2), ("rhs", b, 3)):
        checks.require(x.ndim == rank, _NAME, name, f"rank {rank}", f"shape {x.shape}")
    got = f"shapes {a.shape} and {b.shape}"
    checks.require(a.shape[1] == b.shape[1], _NAME, "lhs, rhs", "[M, K] and [G, K, N] with the same K", got)
    numbers = (((1,), (1,)), ((), ()))
    options = (precision, preferred_element_type, group_offset, out_sharding)
    return _contract_groups(_NAME, a, b, group_sizes, numbers, 0, 0, *options)


def ragged_dot_general(
    lhs: Operand,
    rhs: Operand,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Contract groups of one dimension, each with an array of its own, as `jax.lax.ragged_dot_general` does.

    The ragged dimension of lhs is cut into groups. Group g is contracted with rhs at index g of its group
    dimension. `ragged_dot` says what is computed. Of JAX's three modes this is the first, in which the result keeps the
    ragged dimension: [b..., m..., k...] by [g, b..., k..., n...] is [b..., m..., n...].

    Args:
        lhs: a QuantizedArray, or an array of float32, float16 or bfloat16.
        rhs: the same; at least one of the two is a QuantizedArray.
        group_sizes: integers, [G], or with the batch dimensions and the free dimensions of lhs in front of the ragged
            one before it: the number of indices of each group. They may be traced.
        ragged_dot_dimension_numbers: Static. A `jax.lax.RaggedDotDimensionNumbers`: the numbers of a `dot_general`, the
            ragged dimension of lhs and the group dimension of rhs.
        precision: Static. As in `ragged_dot`.
        preferred_element_type: Static. As in `ragged_dot`.
        group_offset: Static. None, as in `ragged_dot`.
        out_sharding: Static. As in `ragged_dot`.

    Returns:
        The result, with the batch dimensions first, then the free dimensions of lhs and of rhs.

    Raises:
        TypeError: as in `ragged_dot`, or the numbers are no `RaggedDotDimensionNumbers`.
        ValueError: as in `ragged_dot`; or the ragged dimension is contracted or a batch dimension.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> q = jq.quantize(jnp.array([[[127.0, 0.5]], [[1.27, 1.0]]]), jq.QuantSpec(jnp.int8, jq.PerAxis(0)))
        >>> numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
        >>> jq.ragged_dot_general(jnp.array([[1.0, 2.0], [2.0, 1.0]]), q, jnp.array([1, 1]), numbers)  # 0.5 is a tie
        Array([[127.  ],
               [  3.54]], dtype=float32)

    Source: `jax.lax.ragged_dot_general`, mode 1; the arithmetic is `dot_general`'s.

    Cotangents: as in `ragged_dot`.
    """
    a, b = check_operands(_GENERAL, lhs, rhs)
    numbers, ragged, group = _read_numbers(_GENERAL, a, b, ragged_dot_dimension_numbers)
    options = (precision, preferred_element_type, group_offset, out_sharding)
    return _contract_groups(_GENERAL, a, b, group_sizes, numbers, ragged, group, *options)


def _read_numbers(function: str, lhs: _Array, rhs: _Array, numbers: Any) -> tuple[DotDimensionNumbers, int, int]:
    """Return the dimension numbers of the contraction, the ragged dimension and the group dimension."""
    name = "ragged_dot_dimension_numbers"
    is_known = isinstance(numbers, lax.RaggedDotDimensionNumbers)
    expected = "a jax.lax.RaggedDotDimensionNumbers"
    checks.require_type(is_known, function, name, expected, checks.describe_value(numbers))
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    expected = "one ragged dimension of lhs, and one group dimension of rhs"
    checks.require(len(ragged) == len(group) == 1, function, name, expected, numbers)
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    expected = "a ragged dimension of lhs that is neither contracted nor a batch dimension"
    is_free = 0 <= ragged[0] < lhs.ndim and ragged[0] not in (*contracted, *batch)
    checks.require(is_free, function, name, expected, numbers)
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    expected = "a group dimension of rhs that is neither contracted nor a batch dimension"
    is_free = 0 <= group[0] < rhs.ndim and group[0] not in (*contracted, *batch)
    checks.require(is_free, function, name, expected, numbers)
    return check_numbers(function, numbers.dot_dimension_numbers), int(ragged[0]), int(group[0])


def _contract_groups(
    function: str, lhs: _Array, rhs: _Array, group_sizes: ArrayLike, numbers: DotDimensionNumbers, ragged: int,
    group: int, precision: lax.PrecisionLike, preferred: DTypeLike | None, group_offset: object,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:  # fmt: skip
    """Return the ragged contraction of checked operands, after the checks of everything else."""
    expected = "None, because JAX has no implementation of it"
    checks.require(group_offset is None, function, "group_offset", expected, checks.describe_value(group_offset))
    sharding.check_out_sharding(function, out_sharding)
    preferred = check_options(function, precision, preferred)
    sizes = _read_sizes(function, group_sizes)
    return contract_ragged(
        lhs, rhs, sizes, function=function, numbers=numbers, ragged=ragged, group=group, precision=precision,
        preferred=preferred, out_sharding=out_sharding,
    )  # fmt: skip


def _read_sizes(function: str, sizes: Any) -> jax.Array:
    """Return group sizes as an array of integers; raise for a known one that is negative."""
    sizes = entry_point.narrow_to_int32(function, "group_sizes", entry_point.unwrap_array(sizes))
    (sizes,) = entry_point.convert_arrays(function, {"group_sizes": sizes})
    is_integer = isinstance(sizes, jax.Array) and jnp.issubdtype(sizes.dtype, jnp.integer)
    expected = "an array of integers"
    checks.require_type(is_integer, function, "group_sizes", expected, checks.describe_value(sizes))
    known = entry_point.read_elements(sizes)
    if known is not None:
        checks.require(known.min(initial=0) >= 0, function, "group_sizes", "no negative number", known.min(initial=0))
    return sizes


# The operands have been checked, and a QuantizedArray is a pytree.
@functools.partial(
    jax.jit, static_argnames=("function", "numbers", "ragged", "group", "precision", "preferred", "out_sharding")
)
def contract_ragged(
    lhs: _Array, rhs: _Array, group_sizes: jax.Array, *, function: str, numbers: Any, ragged: int, group: int,
    precision: Any, preferred: Any, out_sharding: Any,
) -> jax.Array:  # fmt: skip
    """Return the ragged contraction of checked operands, with errors that name `function`."""
    # JAX's rule for `jax.vmap` writes numpy's integers into the numbers.
    numbers, ragged, group = jax.tree.map(int, (numbers, ragged, group))
    left, right = match_roles(function, lhs, rhs, numbers)
    before = [axis for axis in left.free if axis < ragged]
    prefix = (*left.batch, *before)
    shape = (*(lhs.shape[axis] for axis in prefix), rhs.shape[group])
    is_single = group_sizes.ndim == 1 and group_sizes.shape[0] == rhs.shape[group]
    expected = f"shape {shape[-1:]}" if len(shape) == 1 else f"shape {shape[-1:]} or {shape}"
    expected += ", a number for each group of rhs"
    fits = is_single or group_sizes.shape == shape
    checks.require(fits, function, "group_sizes", expected, f"shape {group_sizes.shape}")
    _check_placement(function, lhs, rhs)
    check_integer_pair(function, lhs, rhs)
    is_weight_only = not all(isinstance(x, QuantizedArray) for x in (lhs, rhs))
    supported = (*_FORMS, "permutation") if is_weight_only else _FORMS
    for argument, q in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(q, QuantizedArray):
            quantized_array.check_form(function, argument, q, supported)
    caller_axes = tuple(zip(left.contracted, right.contracted, strict=True))
    rhs, right_axes = _move_first(rhs, group)
    # The batch dimensions, then the free ones of lhs.
    order = [*left.batch, *left.free]
    groups = ((left.contracted, right_axes(right.contracted)), (left.batch, right_axes(right.batch)))
    dtype = np.dtype(preferred or dtypes.choose_wider(lhs.dtype, rhs.dtype))
    product = _RaggedProduct(function, groups, ragged, order.index(ragged), precision, dtype, caller_axes)
    sizes = group_sizes.astype(jnp.int32)
    contract = functools.partial(_contract_rows, product)
    y = contract(lhs, rhs, sizes) if is_single else _map_prefix(product, lhs, rhs, sizes, prefix)
    return y if out_sharding is None else reshard(y, out_sharding)


def _check_placement(function: str, lhs: _Array, rhs: _Array) -> None:
    """Raise if an operand is sharded on a mesh with explicit axes: the loop cuts it where its groups end."""
    for argument, x in (("lhs", lhs), ("rhs", rhs)):
        for part in jax.tree.leaves(x):
            expected = "an array that is whole on every device (jax.sharding.reshard), or a call inside jax.shard_map"
            is_whole = not sharding.is_placed(part) or not any(sharding.read_partition(part))
            checks.require(is_whole, function, argument, expected, sharding.describe_placement(part))


def _move_first(rhs: _Array, group: int) -> tuple[_Array, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """Return rhs with the group dimension first, and a function from its dimensions to a single group's."""

    def drop(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis - (axis > group) for axis in axes)

    if group == 0:
        return rhs, drop
    order = (group, *(axis for axis in range(rhs.ndim) if axis != group))
    moved = rhs.transpose(*order)
    if isinstance(moved, QuantizedArray):
        moved = quantized_array.check_array(_GENERAL, "rhs", moved, supports=quantized_array.FORMS)
    return moved, drop


class _RaggedProduct(NamedTuple):
    """The static arguments of a ragged contraction, with the group dimension of rhs first.

    Attributes:
        function: the name of the public function, for errors.
        numbers: the dimension numbers of lhs with one group of rhs.
        ragged: the dimension of lhs that is cut into groups.
        axis: the same dimension of the result.
        precision: as in `jax.lax.dot_general`.
        dtype: the dtype of the result.
        caller_axes: the contracted dimensions of the caller's arrays, for errors.
    """

    function: str
    numbers: DotDimensionNumbers
    ragged: int
    axis: int
    precision: Any
    dtype: np.dtype
    caller_axes: Axes

    def contract(self, lhs: _Array, rhs: _Array) -> jax.Array:
        """Return the contraction of some rows with one group of rhs."""
        return contract_dimensions(
            lhs, rhs, None, function=self.function, numbers=self.numbers, precision=self.precision,
            preferred=self.dtype, out_sharding=None, caller_axes=self.caller_axes,
        )  # fmt: skip

    def derive_shape(self, lhs: _Array, rhs: _Array) -> tuple[Any, ...]:
        """Return the shape of the result."""
        (contracted, right_contracted), (batch, right_batch) = self.numbers
        free = (axis for axis in range(lhs.ndim) if axis not in (*contracted, *batch))
        other = (axis for axis in range(rhs.ndim - 1) if axis not in (*right_contracted, *right_batch))
        left = (lhs.shape[axis] for axis in (*batch, *free))
        return (*left, *(rhs.shape[axis + 1] for axis in other))


def _map_prefix(
    product: _RaggedProduct, lhs: _Array, rhs: _Array, sizes: jax.Array, prefix: tuple[int, ...]
) -> jax.Array:  # fmt: skip
    """Return the contraction with group sizes of their own at each index of some dimensions of lhs."""
    if not prefix:
        return _contract_rows(product, lhs, rhs, sizes)
    axis, (contracted, batch) = prefix[0], product.numbers
    # The dimensions of the prefix come first in the result, in their order, and so do the recursion's.
    place = batch[0].index(axis) if axis in batch[0] else None
    other = None if place is None else batch[1][place]

    def drop(axes: Sequence[int], dropped: int | None) -> tuple[int, ...]:
        return tuple(a - (dropped is not None and a > dropped) for a in axes if a != dropped)

    numbers = (
        (drop(contracted[0], axis), drop(contracted[1], other)), (drop(batch[0], axis), drop(batch[1], other)),
    )  # fmt: skip
    inner = product._replace(numbers=numbers, ragged=product.ragged - (product.ragged > axis), axis=product.axis - 1)
    lhs = lhs.per_index(axis) if isinstance(lhs, QuantizedArray) else lhs
    place = None if other is None else other + 1
    rhs = rhs.per_index(place) if isinstance(rhs, QuantizedArray) and place is not None else rhs
    contract = functools.partial(_map_prefix, inner, prefix=drop(prefix[1:], axis))
    return jax.vmap(contract, (axis, place, 0))(lhs, rhs, sizes)


# The contraction and its derivative.


def _contract_rows(product: _RaggedProduct, lhs: _Array, rhs: _Array, sizes: jax.Array) -> jax.Array:
    """Return the contraction of all rows."""
    shape = product.derive_shape(lhs, rhs)
    if any(isinstance(n, int) and n == 0 for n in (*shape, rhs.shape[0])):
        return jnp.zeros(shape, product.dtype)
    # Every part of an operand then has an entry for each group, or for each row, and can be cut with the codes.
    lhs = lhs.per_index(product.ragged) if isinstance(lhs, QuantizedArray) else lhs
    rhs = rhs.per_index(0) if isinstance(rhs, QuantizedArray) else rhs
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    if recording.is_recording():
        return _sum_over_groups(product, lhs, rhs, ends)
    leaves, structure = jax.tree.flatten((lhs, rhs))
    return _contract_leaves(product, structure, (*leaves, ends))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _contract_leaves(product: _RaggedProduct, structure: Any, leaves: tuple[jax.Array, ...]) -> jax.Array:
    """Return the contraction of the arrays of both operands and the ends of the groups."""
    # In a loop over tiles, each example of a batch would wait for the one with the most tiles.
    return _make_loop(product, structure)(*leaves)


@functools.partial(_contract_leaves.defjvp, symbolic_zeros=True)
def _contract_leaves_jvp(
    product: _RaggedProduct, structure: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    (leaves,), (directions,) = primals, tangents
    # Only what has a tangent is differentiated: a gradient with respect to lhs must not compute the scales' gradients.
    numbers = [
        number
        for number, tangent in enumerate(directions)
        if not isinstance(tangent, SymbolicZero | None) and tangent.dtype != jax.dtypes.float0
    ]

    def contract(*variables: jax.Array) -> jax.Array:
        values = list(leaves)
        for number, variable in zip(numbers, variables, strict=True):
            values[number] = variable
        *arrays, ends = values
        lhs, rhs = jax.tree.unflatten(structure, arrays)
        return _sum_over_groups(product, lhs, rhs, ends)

    _, tangent = jax.jvp(contract, [leaves[n] for n in numbers], [directions[n] for n in numbers])
    return _contract_leaves(product, structure, leaves), tangent


def _sum_over_groups(product: _RaggedProduct, lhs: _Array, rhs: _Array, ends: jax.Array) -> jax.Array:
    """Return the contraction as a sum over the groups of the products of all rows: what is differentiated."""
    rows = jnp.arange(lhs.shape[product.ragged], dtype=jnp.int32)

    # Nothing of a group is kept for the backward pass, neither its dequantized weights nor its products.
    @jax.checkpoint
    def contract_group(lhs: _Array, part: _Array, mask: jax.Array) -> jax.Array:
        if not isinstance(lhs, QuantizedArray):
            # Rows of other groups may hold NaN, which would reach the gradients of these weights.
            lhs = jnp.where(_spread_mask(mask, lhs.shape, product.ragged), lhs, jnp.zeros((), lhs.dtype))
        y = product.contract(lhs, part)
        return jnp.where(_spread_mask(mask, y.shape, product.axis), y, jnp.zeros((), y.dtype))

    def add_group(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
        part, start, end = group
        return total + contract_group(lhs, part, (rows >= start) & (rows < end)), None

    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    total = jnp.zeros(product.derive_shape(lhs, rhs), product.dtype)
    if recording.is_recording():  # an exported model has no loop that cuts the weights
        for group in range(rhs.shape[0]):
            total, _ = add_group(total, (jax.tree.map(lambda x, g=group: x[g], rhs), starts[group], ends[group]))
        return total
    total = _vary_like_all(total, (lhs, rhs, ends))
    return lax.scan(add_group, total, (rhs, starts, ends))[0]


def _spread_mask(mask: jax.Array, shape: tuple[Any, ...], axis: int) -> jax.Array:
    """Return a mask of rows in the shape of an array that has the rows along an axis."""
    return lax.broadcast_in_dim(mask, shape, (axis,))


def _vary_like_all(value: jax.Array, operands: Any) -> jax.Array:
    """Return a value marked as varying over the devices over which any operand varies, for the carry of a loop."""
    return functools.reduce(sharding.vary_like, jax.tree.leaves(operands), value)


# The loop.


# Created once for each configuration, because JAX reuses a trace only for the same function object.
@functools.lru_cache(maxsize=1024)
def _make_loop(product: _RaggedProduct, structure: Any) -> Any:
    def contract(*leaves: jax.Array) -> jax.Array:
        *arrays, ends = leaves
        lhs, rhs = jax.tree.unflatten(structure, arrays)
        return _loop_over_tiles(product, lhs, rhs, ends)

    return sequential_vmap(contract)


def _loop_over_tiles(product: _RaggedProduct, lhs: _Array, rhs: _Array, ends: jax.Array) -> jax.Array:
    """Return the contraction, of a tile of rows of one group after the other."""
    count, groups, axis = lhs.shape[product.ragged], rhs.shape[0], product.axis
    shape = product.derive_shape(lhs, rhs)
    ends = jnp.minimum(ends, count)

    def contract_tile(start: jax.Array, group: jax.Array, length: int) -> jax.Array:
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, group, 0, keepdims=False), rhs)
        rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, length, product.ragged), lhs)
        return product.contract(rows, part)

    def find_group(row: jax.Array) -> jax.Array:
        return jnp.sum(ends <= row, dtype=jnp.int32)

    if isinstance(count, int) and count == 1:
        group = find_group(jnp.zeros((), jnp.int32))
        y = contract_tile(jnp.zeros((), jnp.int32), jnp.minimum(group, groups - 1), 1)
        return jnp.where(group < groups, y, jnp.zeros((), y.dtype))
    tile, has_single = _choose_tile(count, groups)

    def add_tile(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, y = state
        group = find_group(row)
        end = jnp.minimum(row + tile, ends[group])
        # The last tile begins earlier, so that it does not reach beyond the last row.
        start = jnp.minimum(row, count - tile)

        def contract_many() -> jax.Array:
            return contract_tile(start, group, tile)

        def contract_single() -> jax.Array:
            wide = (*shape[:axis], tile, *shape[axis + 1 :])
            return jnp.broadcast_to(contract_tile(row, group, 1), wide)

        part = lax.cond(end - row == 1, contract_single, contract_many) if has_single else contract_many()
        rows = start + jnp.arange(tile, dtype=jnp.int32)
        mask = _spread_mask((rows >= row) & (rows < end), part.shape, axis)
        part = jnp.where(mask, part, lax.dynamic_slice_in_dim(y, start, tile, axis))
        return end, lax.dynamic_update_slice_in_dim(y, part, start, axis)

    zeros = _vary_like_all(jnp.zeros(shape, product.dtype), (lhs, rhs, ends))
    first = sharding.vary_like(jnp.zeros((), jnp.int32), ends)
    return lax.while_loop(lambda state: state[0] < ends[-1], add_tile, (first, zeros))[1]


def _choose_tile(count: Any, groups: int) -> tuple[Any, bool]:
    """Return the number of rows in a tile, and whether a single row has a form of its own."""
    # A symbolic number of rows cannot be compared, so one tile has all of them.
    if not isinstance(count, int):
        return count, False
    # Twice the average, so that most groups are one tile, which reads the weights once.
    wanted = max(_SMALLEST_TILE, min(_LARGEST_TILE, 2 * -(-count // groups)))
    tile = min(count, 1 << (wanted - 1).bit_length())
    return tile, count <= _FEW_ROWS * groups
