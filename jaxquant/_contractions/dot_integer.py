"""The contraction of two quantized arrays: exact in int32, then scaled, as a whole or block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._arrays.quantized_array import QuantizedArray, check_form, read_entries
from .._core import checks, dtypes, granularity, recording, sharding
from .._kernels import accumulator, affine, barriers, signed_codes, words
from .._kernels.accumulator import sum_over_blocks
from .._kernels.contraction import Role, contract_roles, spread_outward
from .._kernels.integer_rows import PackedOperand, contract_row_of_integers
from .output import Epilogue

# The forms that a dot product of integers supports. A permutation is none of them: the other operand would have to be
# permuted, and its blocks with it.
DOT_FORMS = ("offset", "nested", "signed_scale", "block_sizes", "packing")
# From this number of entries on, scales that are quantized themselves wait for the other operand of a contraction.
_MANY_ENTRIES = 2**12


def has_nested(q: QuantizedArray) -> bool:
    """Return whether the scale or the offset of an array is quantized itself."""
    return any(isinstance(part, QuantizedArray) for part in (q.scale, q.offset))


def read_nested(q: QuantizedArray, operand: jax.Array | None = None) -> QuantizedArray:
    """Return an array with float32 entries in place of a scale or an offset that is quantized itself.

    Args:
        q: the array.
        operand: an array that many entries wait for. Otherwise XLA:CPU computes those of all weights of a program
            first, and keeps them in memory.
    """

    def read(part: QuantizedArray) -> jax.Array:
        stored = part._stored
        count = math.prod(part.shape)
        waits = isinstance(count, int) and count >= _MANY_ENTRIES and jnp.issubdtype(stored.dtype, jnp.integer)
        if operand is None or not waits or sharding.is_placed(stored) or sharding.is_placed(operand):
            return read_entries(part)
        delayed = barriers.wait_for_batch(stored, lax.stop_gradient(operand))
        return read_entries(part._with_stored(delayed, part.stored_order))

    parts = {name: getattr(q, name) for name in ("scale", "offset")}
    floats = {name: read(part) for name, part in parts.items() if isinstance(part, QuantizedArray)}
    return q.replace(**floats) if floats else q


def check_integer_array(function: str, argument: str, q: QuantizedArray, supports: Sequence[str] = ()) -> None:
    """Check that the codes of a quantized array can be contracted as integers, and that its form is supported."""
    check_form(function, argument, q, supports)
    dtype = q.stored_codes.dtype if q.packing is None else q.packing.carrier
    if q.codebook is None and dtype in dtypes.CONTRACTED:
        return
    expected = f"values of {dtypes.list_names(dtypes.CONTRACTED)} against a quantized array, or {argument}.dequantize()"
    checks.refuse_type(function, argument, expected, q.codebook or dtype)


# What may vary from block to block of a contracted dimension.
_PARTS = ("scale", "zero_point", "offset")
# Pairs of a dimension of lhs and a dimension of rhs.
Axes = tuple[tuple[int, int], ...]


class IntegerPlan(NamedTuple):
    """How an integer contraction is cut into blocks, and the sharding of its result.

    Attributes:
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        axes: the contracted dimension of lhs and of rhs that is cut, or None for a single contraction.
        length: the number of indices in a block.
        out_sharding: the sharding of the result, or None.
    """

    left: Role
    right: Role
    axes: tuple[int, int] | None
    length: int
    out_sharding: Any


def plan_contraction(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role,
    out_sharding: NamedSharding | PartitionSpec | None, caller_axes: Axes | None = None,
) -> IntegerPlan:  # fmt: skip
    """Return how to contract two quantized arrays; raise ContractValueError if integers cannot do it.

    Args:
        function: the name of the public function, for errors.
        lhs: a checked array.
        rhs: a checked array.
        left: the role of each dimension of lhs.
        right: the role of each dimension of rhs.
        out_sharding: the sharding of the result, or None.
        caller_axes: the contracted dimensions of the caller's arrays, for errors, if the arrays were reshaped.
    """
    axes, length = _choose_cut(function, lhs, rhs, left, right, caller_axes)
    if axes is not None and out_sharding is None:
        for q, axis in zip((lhs, rhs), axes, strict=True):
            if sharding.read_partition(q.codes)[axis] is not None:
                expected = (
                    f"the sharding of the result, because blocks of {length} are cut from a sharded dimension, "
                    "which is gathered"
                )
                got = f"None, for {sharding.describe_placement(q.codes)}"
                checks.refuse(function, "out_sharding", expected, got)
    return IntegerPlan(left, right, axes, length, out_sharding)


def _choose_cut(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role, caller_axes: Axes | None
) -> tuple[tuple[int, int] | None, int]:
    """Return the contracted dimension that is cut into blocks, if there is one, and the length of its blocks."""
    cuts: list[tuple[tuple[int, int], int]] = []
    caller_cuts = []
    pairs = tuple(zip(left.contracted, right.contracted, strict=True))
    for axes, named_axes in zip(pairs, pairs if caller_axes is None else caller_axes, strict=True):
        n = lhs.shape[axes[0]]
        runs = {
            *_read_runs(function, "lhs", lhs, axes[0], named_axes[0]),
            *_read_runs(function, "rhs", rhs, axes[1], named_axes[1]),
        }
        shortest = min(runs)
        # The contraction is cut into the shortest blocks. Each longer block must consist of whole ones, so that a block
        # has one scale on each side.
        if not all(run == n or run % shortest == 0 for run in runs):
            expected = "blocks of both sides that end at the same indices, or a dequantized side"
            got = f"blocks of {sorted(runs)} along lhs's dimension {named_axes[0]} and rhs's {named_axes[1]}"
            checks.refuse(function, "lhs, rhs", expected, got)
        if shortest < n:
            cuts.append((axes, shortest))
            caller_cuts.append(named_axes)
    if len(cuts) > 1:
        expected = "blocks along one contracted dimension, or a dequantized side"
        checks.refuse(function, "lhs, rhs", expected, f"blocks along {caller_cuts}")
    if cuts:
        return cuts[0]
    depth = math.prod(lhs.shape[a] for a in left.contracted)
    limit = count_exact_terms(lhs, rhs)
    # A symbolic depth of jax.export cannot be compared; assume that it fits.
    if not isinstance(depth, int) or depth <= limit:
        return None, 0
    longest = max(pairs, key=lambda axes: lhs.shape[axes[0]])
    length = max(limit // (depth // lhs.shape[longest[0]]), 1)
    return longest, length


def fill_empty_entries(q: QuantizedArray, role: Role) -> QuantizedArray:
    """Return q with one entry of each part along contracted dimensions of length 0, which have no blocks."""
    empty = [axis for axis in role.contracted if q.shape[axis] == 0]
    filled = {}
    for name in _PARTS:
        part = getattr(q, name)
        if part is not None and any(part.shape[axis] == 0 for axis in empty):
            shape = tuple(1 if axis in empty else n for axis, n in enumerate(part.shape))
            filled[name] = jnp.ones(shape, part.dtype)
    return q.replace(**filled) if filled else q


def _read_runs(function: str, argument: str, q: QuantizedArray, axis: int, named_axis: int) -> list[int]:
    """Return how many indices of a contracted dimension share a scale, a zero point and an offset.

    Args:
        function: the name of the public function, for errors.
        argument: the name of the operand, for errors.
        q: the operand.
        axis: one of its contracted dimensions.
        named_axis: the same dimension in the caller's array, for errors.
    """
    runs = []
    for name in _PARTS:
        part = getattr(q, name)
        if part is None:
            continue
        sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
        assert sizes is not None
        if part.shape[axis] != 1 and sizes[axis] == 1:
            expected = (
                f"one {name} along the contracted dimension {named_axis}, or one for each block, or "
                f"{argument}.dequantize()"
            )
            checks.refuse(function, argument, expected, f"one for each of its {q.shape[axis]} indices")
        runs.append(sizes[axis])
    return runs


def count_exact_terms(lhs: QuantizedArray, rhs: QuantizedArray) -> int:
    """Return how many products of two codes, with their zero points subtracted, int32 can hold in the worst case."""
    largest = []
    for q in (lhs, rhs):
        low, high = dtypes.read_bounds(np.dtype(q.codes.dtype))
        largest.append(max(-low, high) if q.zero_point is None else high - low)
    return (2**31 - 1) // math.prod(largest)


# For each of two operands the words that hold its codes, or None.
PackedOperands = tuple[PackedOperand | None, PackedOperand | None]


def multiply_codes(
    lhs: QuantizedArray, rhs: QuantizedArray, plan: IntegerPlan, preferred: np.dtype | None,
    packed: PackedOperands = (None, None),
) -> jax.Array:  # fmt: skip
    """Return the product of two quantized arrays in the dtype `preferred`, or in the wider of their dtypes."""
    dtype = preferred or dtypes.choose_wider(lhs.dtype, rhs.dtype)
    # A sharded dimension is gathered, because JAX refuses to split it into blocks.
    if plan.axes is not None:
        lhs, rhs = (_gather_dimension(q, axis) for q, axis in zip((lhs, rhs), plan.axes, strict=True))
    sides = _prepare_sides(lhs, rhs, plan, packed)
    if plan.axes is None:
        acc = _contract_words(sides, plan, packed)
        acc = contract_roles(*_list_operands(sides), plan.out_sharding) if acc is None else acc
        y = _scale_sums(acc, sides)
    else:
        y = _contract_in_blocks(sides, plan)
    return affine.round_to_dtype(y, dtype).astype(dtype)


def multiply_to_codes(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, plan: IntegerPlan, preferred: np.dtype | None,
    epilogue: Epilogue, packed: PackedOperands = (None, None),
) -> Any:  # fmt: skip
    """Return the product of two quantized arrays with a bias of integers, as floats or as a QuantizedArray."""
    got = f"blocks of {plan.length} indices along lhs's dimension {plan.axes and plan.axes[0]}"
    expected = "one scale and one zero point along the contracted dimensions, and sums that int32 can hold, because of "
    expected += "the bias" if epilogue.output is None else "the output"
    checks.require(plan.axes is None, function, "lhs, rhs", expected, got)
    for argument, q in (("lhs", lhs), ("rhs", rhs)):
        reason = "bias" if epilogue.output is None else "output"
        expected = f"None, because of the {reason}: the sums of an array with an offset have no common scale"
        checks.require(q.offset is None, function, f"{argument}.offset", expected, repr(q))
    sides = _prepare_sides(lhs, rhs, plan, packed)
    acc = _contract_words(sides, plan, packed)
    acc = contract_roles(*_list_operands(sides), plan.out_sharding) if acc is None else acc
    bias = epilogue.bias
    if bias is not None:
        fits = bias.ndim <= acc.ndim
        fits = fits and all(n in (1, m) for n, m in zip(bias.shape[::-1], acc.shape[::-1], strict=False))
        expected = f"a shape that broadcasts against the result, {acc.shape}"
        checks.require(fits, function, "bias", expected, f"shape {bias.shape}")
    y = epilogue.finish(acc, *_spread_scales(sides), lambda part: accumulator.spread_over_product(part, acc))
    return epilogue.wrap(y, preferred or dtypes.choose_wider(lhs.dtype, rhs.dtype))


def _gather_dimension(q: QuantizedArray, axis: int) -> QuantizedArray:
    """Return a quantized array with one dimension unsharded, if JAX tracks shardings in types."""
    if not sharding.is_placed(q.codes):
        return q
    return jax.tree.map(lambda part: sharding.gather_axes(part, (axis,)), q)


class _Side(NamedTuple):
    """One operand, in the form that the kernels take.

    Attributes:
        role: the role of each dimension.
        codes: int8, or codes of 2 or 4 bits.
        center: the int32 zero point, a scalar or of the operand's rank, or None for 0.
        scale: float32, of the operand's rank.
        runs: for the center, the scale and the offset, how many indices of each dimension share an entry.
        offset: float32, of the operand's rank, or None.
    """

    role: Role
    codes: jax.Array
    center: Any
    scale: jax.Array
    runs: tuple[Any, Any, Any]
    offset: jax.Array | None = None


def prepare_side(q: QuantizedArray, role: Role) -> _Side:
    """Return an operand with an entry of its scale, zero point and offset for each index of the kept dimensions."""
    aligned, kept = granularity.Aligned(q.block_size), (*role.batch, *role.free)
    parts = (q.zero_point, q.scale, q.offset)
    runs = tuple(None if part is None else aligned.sizes(part.shape, q.shape) for part in parts)
    zero_point = None if q.zero_point is None else granularity.expand_along(q.zero_point, q.shape, q.block_size, kept)
    scale = dtypes.scale_as_float32(q.scale)
    centred = signed_codes.is_centred(q.zero_point, q.codes.dtype)
    center = signed_codes.derive_center(zero_point, q.codes.dtype, centred)
    offset = q.offset
    if offset is not None:
        offset = granularity.expand_along(dtypes.scale_as_float32(offset), q.shape, q.block_size, kept)
    return _Side(
        role,
        signed_codes.shift_to_signed(q.codes),
        center,
        granularity.expand_along(scale, q.shape, q.block_size, kept),
        (runs[0], runs[1], runs[2]),
        offset,
    )


def _prepare_sides(lhs: QuantizedArray, rhs: QuantizedArray, plan: IntegerPlan, packed: PackedOperands) -> list[_Side]:
    """Return both operands; those that are packed with their codes as int8."""
    sides = [prepare_side(q, role) for q, role in zip((lhs, rhs), plan[:2], strict=True)]
    return [_widen_packed(side, q) for side, q in zip(sides, packed, strict=True)]


def _widen_packed(side: _Side, packed: PackedOperand | None) -> _Side:
    """Return a side with codes that are read from words as int8; XLA:CPU would pack them as 4 bits once more."""
    if packed is None or side.codes.dtype in dtypes.EIGHT_BITS or recording.is_recording():
        return side
    codes = words.unpack_words(packed.words, *packed.layout[:2], signed=packed.layout.is_signed)
    return side._replace(codes=codes.astype(jnp.int8))


def _contract_words(sides: Sequence[_Side], plan: IntegerPlan, packed: PackedOperands) -> jax.Array | None:
    """Return the int32 contraction of a row with words, or None for other operands."""
    if packed == (None, None) or plan.out_sharding is not None or recording.is_recording():
        return None
    return contract_row_of_integers(*_list_operands(sides), packed)


def _list_operands(sides: Sequence[_Side]) -> tuple[jax.Array, jax.Array, Any, Any, Role, Role]:
    """Return the arguments of `contract_roles` for two sides."""
    lhs, rhs = sides
    return lhs.codes, rhs.codes, lhs.center, rhs.center, lhs.role, rhs.role


def _scale_sums(acc: jax.Array, sides: Sequence[_Side]) -> jax.Array:
    """Return the float32 product of two sides from its int32 sums, which belong to one scale and offset of each."""
    scales = _spread_scales(sides)
    # The scales of rows and of columns may be sharded differently, and JAX would refuse to multiply them.
    if sharding.is_placed(acc):
        scales = (accumulator.spread_over_product(scales[0], acc), accumulator.spread_over_product(scales[1], acc))
    y = accumulator.scale_by_both(acc, *scales)
    lhs, rhs = sides
    if lhs.offset is None and rhs.offset is None:
        return y
    # With the values s a + p of lhs and t b + q of rhs, the sum of their products is s t (sum a b) + u q + p t (sum b),
    # where u = s (sum a) + K p is the sum of the values of lhs.
    left, right = (0, len(rhs.role.free)), (len(lhs.role.free), 0)
    if rhs.offset is not None:
        sums = _scale_code_sums(lhs)
        if lhs.offset is not None:
            depth = jnp.asarray(_count_terms(lhs), jnp.float32)
            sums = barriers.round_result(sums + _spread_over(barriers.round_result(lhs.offset * depth), sums))
        y = _add_product(y, spread_outward(sums, lhs.role, *left), spread_outward(rhs.offset, rhs.role, *right))
    if lhs.offset is not None:
        sums = _scale_code_sums(rhs)
        y = _add_product(y, spread_outward(lhs.offset, lhs.role, *left), spread_outward(sums, rhs.role, *right))
    return y


def _scale_code_sums(side: _Side) -> jax.Array:
    """Return the sums over the contracted dimensions of (codes - zero point), exact in int32, times the scale."""
    codes = signed_codes.convert_to_signed(side.codes)
    sums = jnp.sum(codes, axis=side.role.contracted, keepdims=True, dtype=jnp.int32)
    if side.center is not None:
        sums = sums - _spread_over(side.center * jnp.asarray(_count_terms(side), jnp.int32), sums)
    return barriers.round_result(sums.astype(jnp.float32) * _spread_over(side.scale, sums))


def _count_terms(side: _Side) -> Any:
    """Return the number of contracted elements; it may be symbolic."""
    return math.prod(side.codes.shape[axis] for axis in side.role.contracted)


def _spread_over(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return a scalar, or an array of the rank of another, in its shape and sharding."""
    return sharding.place_like(jnp.broadcast_to(value, like.shape), like)


def _add_product(y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return y + a * b, both rounded to float32, for factors that broadcast against y."""
    product = accumulator.spread_over_product(a, y) * accumulator.spread_over_product(b, y)
    return barriers.round_result(y + barriers.round_result(product))


def _spread_scales(sides: Sequence[_Side]) -> tuple[jax.Array, jax.Array]:
    """Return the scales of two sides with the rank of their product."""
    lhs, rhs = sides
    frees = len(lhs.role.free), len(rhs.role.free)
    return spread_outward(lhs.scale, lhs.role, 0, frees[1]), spread_outward(rhs.scale, rhs.role, frees[0], 0)


def _contract_in_blocks(sides: Sequence[_Side], plan: IntegerPlan) -> jax.Array:
    """Return the float32 sum of the products of the blocks of a contracted dimension."""
    assert plan.axes is not None
    sides = [side._replace(codes=signed_codes.convert_to_signed(side.codes)) for side in sides]
    depth = sides[0].codes.shape[plan.axes[0]]
    full_blocks, tail = divmod(depth, plan.length)
    y = None
    if full_blocks:
        stacks = [_stack_blocks(side, axis, depth, plan.length) for side, axis in zip(sides, plan.axes, strict=True)]

        def contract_block(blocks: Sequence[jax.Array]) -> jax.Array:
            pairs = zip(sides, blocks, strict=True)
            block_sides = [side._replace(codes=b[0], center=b[1], scale=b[2], offset=b[3]) for side, b in pairs]
            return _scale_sums(contract_roles(*_list_operands(block_sides), plan.out_sharding), block_sides)

        y = sum_over_blocks(contract_block, stacks)
    if tail:
        tails = [_take_tail(side, axis, depth, plan.length) for side, axis in zip(sides, plan.axes, strict=True)]
        last = _scale_sums(contract_roles(*_list_operands(tails), plan.out_sharding), tails)
        # The last product is rounded before this addition, and the sum before whatever follows.
        y = last if y is None else barriers.round_result(y + last)
    assert y is not None
    return y


def _stack_blocks(side: _Side, axis: int, depth: int, length: int) -> tuple[Any, Any, Any, Any]:
    """Return the codes, center, scale and offset of a side with its complete blocks as a new first dimension."""
    whole = depth // length
    values = lax.slice_in_dim(side.codes, 0, whole * length, axis=axis)
    shape = (*values.shape[:axis], whole, length, *values.shape[axis + 1 :])
    order = (axis, *(a for a in range(len(shape)) if a != axis))
    # The codes must be in memory before they are cut. Otherwise XLA would repeat the operation that computes them, for
    # example a quantization, for each block.
    values = barriers.pin_layout(lax.transpose(values.reshape(shape), order))
    starts = np.arange(whole) * length
    stacks = []
    for part, runs in zip((side.center, side.scale, side.offset), side.runs, strict=True):
        if part is not None and part.ndim:
            entries = jnp.moveaxis(_pick_entries(part, axis, starts, runs), axis, 0)
            part = jnp.expand_dims(entries, axis + 1)
        elif part is not None:
            part = jnp.broadcast_to(part, (whole,))
        stacks.append(part)
    return values, stacks[0], stacks[1], stacks[2]


def _take_tail(side: _Side, axis: int, depth: int, length: int) -> _Side:
    """Return the last, shorter block of a side."""
    start = depth - depth % length
    values = lax.slice_in_dim(side.codes, start, depth, axis=axis)
    center, scale, offset = (
        part if part is None or part.ndim == 0 else _pick_entries(part, axis, np.array([start]), runs)
        for part, runs in zip((side.center, side.scale, side.offset), side.runs, strict=True)
    )
    return side._replace(codes=values, center=center, scale=scale, offset=offset)


def _pick_entries(part: jax.Array, axis: int, starts: np.ndarray, runs: tuple[int, ...] | None) -> jax.Array:
    """Return the entries of a scale or a center that apply to the blocks with these first indices."""
    n = part.shape[axis]
    if n == 1:
        return jnp.broadcast_to(part, (*part.shape[:axis], len(starts), *part.shape[axis + 1 :]))
    assert runs is not None
    index = starts // runs[axis]
    # The usual case, one entry for each block in order, needs no gather.
    if np.array_equal(index, np.arange(len(starts))):
        return lax.slice_in_dim(part, 0, len(starts), axis=axis)
    return jnp.take(part, index, axis=axis)
