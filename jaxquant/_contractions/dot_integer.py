"""The contraction of two quantized arrays: integers until the scales come in, a block at a time where they must."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import indexing
from .._arrays.quantized_array import QuantizedArray
from .._core import barriers, checks, dtypes, granularity, rounding, sharding, small_floats
from ..integer import _operands, _scaling
from ..integer.dot_general import Role, contract_roles


def check_integer_array(function: str, argument: str, q: QuantizedArray) -> None:
    """Requires codes that contract as integers."""
    holds = q.codebook is None and q.codes.dtype in _operands.DTYPES
    expected = f"values of {dtypes.list_names(_operands.DTYPES)} against a quantized array, or {argument}.dequantize()"
    checks.require_type(holds, function, argument, expected, q.codebook or q.codes.dtype)


Axes = tuple[tuple[int, int], ...]  # dimensions of lhs and of rhs, in pairs


class Plan(NamedTuple):
    """How an integer contraction is cut up: `length` indices of the contracted dimensions `axes` at a time, or not;
    and the sharding of its result.
    """

    left: Role
    right: Role
    axes: tuple[int, int] | None
    length: int
    out_sharding: Any


def plan_contraction(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role, out_sharding: Any,
    caller_axes: Axes | None = None,
) -> Plan:  # fmt: skip
    """Returns how to contract two quantized arrays, or raises a contract error where integers cannot.

    Args:
        function: for errors.
        lhs: has passed its contract.
        rhs: likewise.
        left: what the dimensions of lhs are there for.
        right: likewise.
        out_sharding: of the result, or None.
        caller_axes: for errors, which dimensions are contracted of the operands that the caller gave, where they were
            reshaped on the way here.
    """
    axes, length = _find_cut(function, lhs, rhs, left, right, caller_axes)
    if axes is not None and out_sharding is None:
        for q, axis in zip((lhs, rhs), axes, strict=True):
            whole = sharding.find_partition(q.codes)[axis] is None
            expected = (
                f"the sharding of the result: blocks of {length} are cut from a sharded dimension, which is gathered"
            )
            got = sharding.describe_placement(q.codes)
            checks.require(whole, function, "out_sharding", expected, f"None, for {got}")
    return Plan(left, right, axes, length, out_sharding)


def _find_cut(
    function: str, lhs: QuantizedArray, rhs: QuantizedArray, left: Role, right: Role, caller_axes: Axes | None
) -> tuple[tuple[int, int] | None, int]:
    """Returns the contracted dimension that is cut into blocks, if one is, and their length."""
    cut: list[tuple[tuple[int, int], int]] = []
    places = []
    pairs = tuple(zip(left.contracted, right.contracted, strict=True))
    for axes, given in zip(pairs, pairs if caller_axes is None else caller_axes, strict=True):
        n = lhs.shape[axes[0]]
        runs = {run for argument, q, a, place in zip(("lhs", "rhs"), (lhs, rhs), axes, given, strict=True)
                for run in _find_runs(function, argument, q, a, place)}  # fmt: skip
        least = min(runs)
        if not all(run in (n,) or run % least == 0 for run in runs):
            expected = "blocks of both sides that end together, or a dequantized side"
            got = f"blocks of {sorted(runs)} along lhs's dimension {given[0]} and rhs's {given[1]}"
            checks.require(False, function, "lhs, rhs", expected, got)
        if least < n:
            cut.append((axes, least))
            places.append(given)
    if len(cut) > 1:
        expected = "blocks along one contracted dimension, or a dequantized side"
        checks.require(False, function, "lhs, rhs", expected, f"blocks along {places}")
    if cut:
        return cut[0]
    depth = math.prod(lhs.shape[a] for a in left.contracted)
    limit = count_exact_terms(lhs, rhs)
    if not isinstance(depth, int) or depth <= limit:
        return None, 0
    longest = max(zip(left.contracted, right.contracted, strict=True), key=lambda axes: lhs.shape[axes[0]])
    length = max(limit // (depth // lhs.shape[longest[0]]), 1)
    return longest, length


def _find_runs(function: str, argument: str, q: QuantizedArray, axis: int, given: int) -> list[int]:
    """Returns how many indices of a contracted dimension share a scale, and a zero point."""
    found = []
    for name in ("scale", "zero_point"):
        part = getattr(q, name)
        if part is None:
            continue
        sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
        assert sizes is not None
        if part.shape[axis] != 1 and sizes[axis] == 1:
            expected = (
                f"one {name} along the contracted dimension {given}, or one for each block, or {argument}.dequantize()"
            )
            checks.require(False, function, argument, expected, f"one for each of its {q.shape[axis]} indices")
        found.append(sizes[axis])
    return found


def count_exact_terms(lhs: QuantizedArray, rhs: QuantizedArray) -> int:
    """Returns how many products of two codes an int32 holds, whatever they are."""
    largest = []
    for q in (lhs, rhs):
        low, high = dtypes.find_bounds(np.dtype(q.codes.dtype))
        largest.append(max(-low, high) if q.zero_point is None else high - low)
    return (2**31 - 1) // math.prod(largest)


def contract_integers(lhs: QuantizedArray, rhs: QuantizedArray, plan: Plan, preferred: Any) -> jax.Array:
    """Returns the product of two quantized arrays in the dtype `preferred`, or in the wider of theirs."""
    dtype = preferred or dtypes.find_wider(lhs.dtype, rhs.dtype)
    if plan.axes is not None:  # JAX refuses to split a sharded dimension
        lhs, rhs = (_gather_dimension(q, axis) for q, axis in zip((lhs, rhs), plan.axes, strict=True))
    sides = [_prepare_side(q, role) for q, role in zip((lhs, rhs), plan[:2], strict=True)]
    y = _contract_whole(sides, plan.out_sharding) if plan.axes is None else _contract_in_blocks(sides, plan)
    return rounding.round_to_dtype(y, dtype).astype(dtype)


def _gather_dimension(q: QuantizedArray, axis: int) -> QuantizedArray:
    """Returns a quantized array with a dimension unsharded, where JAX tracks shardings in types."""
    if not sharding.is_placed(q.codes):
        return q
    return jax.tree.map(lambda part: sharding.gather_axes(part, (axis,)), q)


class _Side(NamedTuple):
    """One operand in the making.

    Attributes:
        role: what its dimensions are there for.
        codes: int8.
        steps: int32 zero point, a scalar or of the operand's rank, or None for 0.
        scale: float32, of the operand's rank.
        runs: how many indices of each dimension share an entry of the steps, and of the scale.
    """

    role: Role
    codes: jax.Array
    steps: Any
    scale: jax.Array
    runs: tuple[Any, Any]


def _prepare_side(q: QuantizedArray, role: Role) -> _Side:
    aligned, kept = granularity.Aligned(q.block_size), (*role.batch, *role.free)
    runs = tuple(None if p is None else aligned.sizes(p.shape, q.shape) for p in (q.zero_point, q.scale))
    point = None if q.zero_point is None else _expand_side(q, q.zero_point, kept)
    scale = small_floats.scale_as_float32(q.scale)
    centred = _operands.is_centred(q.zero_point, q.codes.dtype)
    steps = _operands.convert_steps(point, q.codes.dtype, centred)
    return _Side(role, _operands.convert_to_signed(q.codes), steps, _expand_side(q, scale, kept), (runs[0], runs[1]))


def _expand_side(q: QuantizedArray, part: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns a scale or zero point with an entry per index of the given dimensions, where it has one per block."""
    sizes = granularity.Aligned(q.block_size).sizes(part.shape, q.shape)
    assert sizes is not None
    for a in axes:
        if part.shape[a] not in (1, q.shape[a]):
            part = indexing.expand_blocks(part, a, sizes[a], q.shape[a])
    return part


def _contract_whole(sides: Sequence[_Side], out_sharding: Any) -> jax.Array:
    """Returns the float32 product of two sides without blocks along what is contracted."""
    lhs, rhs = sides
    acc = contract_roles(lhs.codes, rhs.codes, lhs.steps, rhs.steps, lhs.role, rhs.role, out_sharding)
    frees = len(lhs.role.free), len(rhs.role.free)
    scales = (_spread_outward(lhs.scale, lhs.role, 0, frees[1]), _spread_outward(rhs.scale, rhs.role, frees[0], 0))
    if sharding.is_placed(acc):  # the scales of rows and of columns may be sharded differently
        scales = (_scaling.spread_over_product(scales[0], acc), _scaling.spread_over_product(scales[1], acc))
    return _scaling.scale_product(acc, _scaling.multiply_scales(*scales))


def _spread_outward(scale: jax.Array, role: Role, before: int, behind: int) -> jax.Array:
    """Returns an operand's scale of the result's rank, its dimensions where the result has them."""
    order = (*role.batch, *role.free, *role.contracted)
    turned = lax.transpose(scale, order) if order != tuple(range(scale.ndim)) else scale
    kept = turned.shape[: len(role.batch) + len(role.free)]
    batch = len(role.batch)
    return lax.reshape(turned, (*kept[:batch], *(1,) * before, *kept[batch:], *(1,) * behind))


def _contract_in_blocks(sides: Sequence[_Side], plan: Plan) -> jax.Array:
    """Returns the sum over blocks of a contracted dimension: one integer contraction each, in a loop.

    Side by side their accumulators would lie in memory at once.
    """
    assert plan.axes is not None
    depth = sides[0].codes.shape[plan.axes[0]]
    whole, rest = divmod(depth, plan.length)
    y = None
    if whole:
        stacks = [_stack_blocks(side, axis, depth, plan.length) for side, axis in zip(sides, plan.axes, strict=True)]

        def block(parts: Any) -> jax.Array:
            pairs = zip(sides, parts, strict=True)
            return _contract_whole(
                [s._replace(codes=p[0], steps=p[1], scale=p[2]) for s, p in pairs], plan.out_sharding
            )

        # Not from plain zeros: under shard_map the sum varies over devices from its first term on.
        first, others = (
            [tuple(None if v is None else v[run] for v in stack) for stack in stacks] for run in (0, slice(1, None))
        )
        y = block(first) + np.float32(0)
        if whole > 1:
            y = lax.scan(lambda y, parts: (barriers.round_result(y + block(parts)), None), y, others)[0]
    if rest:
        tails = [_take_tail(side, axis, depth, plan.length) for side, axis in zip(sides, plan.axes, strict=True)]
        last = _contract_whole(tails, plan.out_sharding)
        y = last if y is None else barriers.round_result(y + last)
    assert y is not None
    return y


def _stack_blocks(side: _Side, axis: int, depth: int, length: int) -> tuple[Any, Any, Any]:
    """Returns a side's arrays with its whole blocks as a new first dimension."""
    whole = depth // length
    values = lax.slice_in_dim(side.codes, 0, whole * length, axis=axis)
    shape = (*values.shape[:axis], whole, length, *values.shape[axis + 1 :])
    order = (axis, *(a for a in range(len(shape)) if a != axis))
    # In memory before it is cut up, or what makes it, a quantization perhaps, would be computed for each piece.
    values = barriers.pin_layout(lax.transpose(values.reshape(shape), order))
    starts = np.arange(whole) * length
    parts = []
    for part, runs in zip((side.steps, side.scale), side.runs, strict=True):
        if part is not None and part.ndim:
            entries = jnp.moveaxis(_pick_entries(part, axis, starts, runs), axis, 0)
            part = jnp.expand_dims(entries, axis + 1)
        elif part is not None:
            part = jnp.broadcast_to(part, (whole,))
        parts.append(part)
    return values, parts[0], parts[1]


def _take_tail(side: _Side, axis: int, depth: int, length: int) -> _Side:
    """Returns a side's last block, the short one."""
    start = depth - depth % length
    values = lax.slice_in_dim(side.codes, start, depth, axis=axis)
    steps, scale = (
        part if part is None or part.ndim == 0 else _pick_entries(part, axis, np.array([start]), runs)
        for part, runs in zip((side.steps, side.scale), side.runs, strict=True)
    )
    return side._replace(codes=values, steps=steps, scale=scale)


def _pick_entries(part: jax.Array, axis: int, starts: np.ndarray, runs: tuple[int, ...] | None) -> jax.Array:
    """Returns the entries of a scale or of steps that hold where blocks start."""
    n = part.shape[axis]
    if n == 1:
        return jnp.broadcast_to(part, (*part.shape[:axis], len(starts), *part.shape[axis + 1 :]))
    assert runs is not None
    index = starts // runs[axis]
    if np.array_equal(index, np.arange(len(starts))):
        return lax.slice_in_dim(part, 0, len(starts), axis=axis)
    return jnp.take(part, index, axis=axis)
