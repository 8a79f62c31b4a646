"""The static numbers of a convolution, read from what the caller gave, and the checks of them. Computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .._core import checks, sharding


class Geometry(NamedTuple):
    """The static numbers of a convolution, one for each spatial dimension."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int = 1


class Plan(NamedTuple):
    """What is static in a convolution of `jax.lax`'s: which dimension is which, what slides how, what does not meet."""

    numbers: lax.ConvDimensionNumbers
    geometry: Geometry
    features: int
    batches: int


def plan_convolution(
    function: str, lhs: Any, rhs: Any, strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
    numbers: Any, features: Any, batches: Any,
) -> Plan:  # fmt: skip
    """Holds the attributes of a convolution to their contracts, and returns them as a program wants them."""
    found = _check_dimension_numbers(function, lhs, rhs, numbers)
    x, w = (tuple(v.shape[a] for a in spec) for v, spec in ((lhs, found.lhs_spec), (rhs, found.rhs_spec)))
    _check_groups(function, x, w, features, batches)
    geometry = _find_geometry(function, x, w, strides, padding, lhs_dilation, rhs_dilation)
    check_placement(function, ("lhs", "rhs"), (lhs, rhs), (found.lhs_spec[1:2], found.rhs_spec[:2]))
    return Plan(found, geometry._replace(groups=features * batches), features, batches)


def check_placement(function: str, names: Sequence[str], operands: Sequence[Any], axes: Sequence[Any]) -> None:
    """Requires channels and features without explicit shardings: JAX infers the sharding of a convolution from its
    images alone.
    """
    for name, operand, own in zip(names, operands, axes, strict=True):
        x = getattr(operand, "codes", operand)  # the codes of a quantized array
        partition = sharding.find_partition(x)
        if all(partition[a] is None for a in own):
            continue
        expected = "channels and features that are not sharded (see jax.sharding.reshard)"
        checks.require(False, function, name, expected, sharding.describe_placement(x))


def _check_dimension_numbers(function: str, lhs: Any, rhs: Any, given: Any) -> Any:
    checks.require(lhs.ndim >= 3, function, "lhs", "an array of rank 3 or more", f"shape {lhs.shape}")
    checks.require(rhs.ndim == lhs.ndim, function, "rhs", f"an array of lhs's rank, {lhs.ndim}", f"shape {rhs.shape}")
    rank = range(lhs.ndim)
    if isinstance(given, lax.ConvDimensionNumbers):
        holds = all(sorted(map(str, g)) == sorted(map(str, rank)) for g in given)
        expected = f"three permutations of {tuple(rank)}"
        checks.require(holds, function, "dimension_numbers", expected, repr(given))
        return lax.ConvDimensionNumbers(*(tuple(int(a) for a in g) for g in given))
    try:
        return lax.conv_dimension_numbers(lhs.shape, rhs.shape, given)
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        text = checks.format_message(
            function, "dimension_numbers", f"numbers for rank {lhs.ndim} ({error})", repr(given)
        )
        raise checks.ContractValueError(text) from error


def _check_groups(function: str, x: tuple[int, ...], w: tuple[int, ...], features: Any, batches: Any) -> None:
    for argument, count, expected, n in (
        ("feature_group_count", features, "a divisor of lhs's channels", x[1]),
        ("feature_group_count", features, "a divisor of the features", w[0]),
        ("batch_group_count", batches, "a divisor of lhs's batch", x[0]),
        ("batch_group_count", batches, "a divisor of the features", w[0]),
    ):
        checks.check_integer(function, argument, count)
        checks.require(count > 0 and n % count == 0, function, argument, f"{expected}, {n}", count)
    both = features == 1 or batches == 1
    checks.require(both, function, "batch_group_count", "1 where feature_group_count is not", batches)
    expected = f"{x[1] // features} channels, lhs's {x[1]} in {features} groups"
    checks.require(w[1] * features == x[1], function, "rhs", expected, w[1])


def _find_geometry(
    function: str, x: tuple[int, ...], w: tuple[int, ...], strides: Any, padding: Any, lhs_dilation: Any,
    rhs_dilation: Any,
) -> Geometry:  # fmt: skip
    rank = len(x) - 2
    ones = (1,) * rank
    strides = check_positive(function, "window_strides", strides, rank)
    lhs_dilation = check_positive(function, "lhs_dilation", ones if lhs_dilation is None else lhs_dilation, rank)
    rhs_dilation = check_positive(function, "rhs_dilation", ones if rhs_dilation is None else rhs_dilation, rank)
    holed = tuple((s - 1) * d + 1 if s else 0 for s, d in zip(x[2:], lhs_dilation, strict=True))
    reach = tuple((k - 1) * d + 1 for k, d in zip(w[2:], rhs_dilation, strict=True))
    if isinstance(padding, str):
        checks.check_option(function, "padding", padding.upper(), ("SAME", "SAME_LOWER", "VALID"))
        padding = tuple(lax.padtype_to_pads(holed, reach, strides, padding.upper()))
    pairs = padding if isinstance(padding, tuple) else ()
    holds = len(pairs) == rank and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
    checks.require(holds, function, "padding", f"a name, or {rank} pairs of ints", padding)
    for pad in itertools.chain.from_iterable(pairs):
        checks.check_integer(function, "padding", pad)
    pairs = tuple((int(low), int(high)) for low, high in pairs)
    return Geometry(strides, pairs, lhs_dilation, rhs_dilation)


def check_fit(x: jax.Array, w: jax.Array, geometry: Geometry) -> bool:
    """Return whether the kernel fits at one position of the padded input at least."""
    spans = zip(x.shape[2:], w.shape[2:], geometry.padding, geometry.lhs_dilation, geometry.rhs_dilation, strict=True)
    return all(k > 0 and (n - 1) * t + 1 + sum(p) >= (k - 1) * d + 1 for n, k, p, t, d in spans)


def check_positive(function: str, argument: str, values: Any, rank: int) -> tuple[int, ...]:
    """Requires one positive integer for each spatial dimension and returns them."""
    is_sequence = isinstance(values, tuple | list | np.ndarray)
    expected = f"{rank} positive ints, one for each spatial dimension"
    checks.require(is_sequence and len(values) == rank, function, argument, expected, values)
    for value in values:
        checks.check_integer(function, argument, value)
        checks.require(value > 0, function, argument, expected, values)
    return tuple(int(v) for v in values)


def check_window(function: str, argument: str, spatial: Any, padding: Any, reach: Any) -> None:
    """Requires every kernel to fit into what it slides over."""
    for size, (low, high), k in zip(spatial, padding, reach, strict=True):
        fits = size + low + high >= k and k > 0
        got = f"{size} with padding ({low}, {high})"
        checks.require(fits, function, argument, f"a kernel that spans {k} to fit into the padded x", got)


def check_zero_points(function: str, names: tuple[str, str], operands: Any, zero_points: Any, features: int) -> None:
    """Requires zero points in their operands' dtypes: one for x, one or one for each feature for the kernel."""
    for name, x, zero_point, shapes in zip(
        names, operands, zero_points, (((), (1,)), ((), (1,), (features,))), strict=True
    ):
        if zero_point is not None:
            argument = f"{name}_zero_point"
            checks.check_same_dtype(function, argument, zero_point, x.dtype, f"{name}'s")
            expected = "a scalar" if len(shapes) == 2 else f"a scalar or shape ({features},), one for each feature"
            checks.require(zero_point.shape in shapes, function, argument, expected, f"shape {zero_point.shape}")
