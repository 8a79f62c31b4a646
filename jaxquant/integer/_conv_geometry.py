"""The static attributes of a convolution: their checks, and their form for the kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._core import checks, sharding
from .._kernels.convolution import ConvolutionPlan, Geometry


def plan_convolution(
    function: str, lhs: Any, rhs: Any, strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    numbers: Any, features: Any, batches: Any,
) -> ConvolutionPlan:  # fmt: skip
    """Return the checked attributes of a convolution; raise ContractValueError or ContractTypeError for a wrong one.

    All numbers of the arguments other than `numbers` are ints: `checks.check_integers` has seen them.
    """
    options = (strides, padding, lhs_dilation, rhs_dilation, numbers, features, batches)
    # As keys of a cache, axes that are 1.0 and 1 would be the same.
    is_text = numbers is None or (type(numbers) is tuple and all(type(part) is str for part in numbers))
    find_plan = _derive_plan if is_text and checks.is_hashable(options) else _derive_plan.__wrapped__
    plan = find_plan(function, tuple(lhs.shape), tuple(rhs.shape), *options)
    axes = (plan.numbers.lhs_spec[1:2], plan.numbers.rhs_spec[:2])
    check_placement(function, ("lhs", "rhs"), (lhs, rhs), axes)
    return plan


# Eager calls repeat these checks with the same static values. A call that raises is not cached.
@functools.lru_cache(maxsize=1024)
def _derive_plan(
    function: str, lhs: tuple[int, ...], rhs: tuple[int, ...], strides: Any, padding: Any, lhs_dilation: Any,
    rhs_dilation: Any, numbers: Any, features: Any, batches: Any,
) -> ConvolutionPlan:  # fmt: skip
    """Return the checked attributes of a convolution of arrays of two shapes."""
    numbers = _check_dimension_numbers(function, lhs, rhs, numbers)
    x = tuple(lhs[axis] for axis in numbers.lhs_spec)  # (batch, channels, *spatial)
    w = tuple(rhs[axis] for axis in numbers.rhs_spec)  # (features, channels / groups, *kernel)
    _check_groups(function, x, w, features, batches)
    geometry = _derive_geometry(function, x, w, strides, padding, lhs_dilation, rhs_dilation)
    return ConvolutionPlan(numbers, geometry._replace(groups=features * batches), features, batches)


def check_placement(function: str, names: Sequence[str], operands: Sequence[Any], axes: Sequence[Any]) -> None:
    """Raise ContractValueError if the channels or the features have an explicit sharding.

    JAX infers the sharding of a convolution from the sharding of its images alone.
    """
    for name, operand, features in zip(names, operands, axes, strict=True):
        x = getattr(operand, "codes", operand)  # the codes of a quantized array
        partition = sharding.find_partition(x)
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


def _check_groups(function: str, x: tuple[int, ...], w: tuple[int, ...], features: Any, batches: Any) -> None:
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
    function: str, x: tuple[int, ...], w: tuple[int, ...], strides: Any, padding: Any, lhs_dilation: Any,
    rhs_dilation: Any,
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


def check_window(function: str, argument: str, spatial: Any, padding: Any, reach: Any) -> None:
    """Raise ContractValueError unless the kernel fits into the padded x along every spatial dimension."""
    for size, (low, high), span in zip(spatial, padding, reach, strict=True):
        if span <= 0 or size + low + high < span:
            got = f"{size} with padding ({low}, {high})"
            checks.refuse(function, argument, f"a kernel that spans {span} to fit into the padded x", got)


def check_zero_points(function: str, names: tuple[str, str], operands: Any, zero_points: Any, features: int) -> None:
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
