"""The scales and zero points of all static ranges, found together at the beginning of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays.scale_from_range import find_scale_and_zero_point
from .._arrays.spec import QuantSpec
from .._core import dtypes, sharding
from .._core.granularity import PerTensor
from ..calibration import Range
from ._ranges import StaticRange, StaticRanges


class FoundScale(NamedTuple):
    """The scale and the zero point of a static range.

    Attributes:
        scale: one element, or one for each iteration of the scans around it.
        zero_point: of the same shape, or None for 0.
    """

    scale: jax.Array
    zero_point: jax.Array | None

    def spread(self, rank: int) -> tuple[jax.Array, jax.Array | None]:
        """Return both with one element and the given rank."""
        ones = (1,) * rank
        return self.scale.reshape(ones), None if self.zero_point is None else self.zero_point.reshape(ones)


def find_scales(ranges: StaticRanges, records: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the records of a program with `FoundScale` in place of the ranges of whole arrays.

    XLA:CPU compiles a loop for each scale and each zero point that a program finds, which takes longer than anything
    else in its first call. All ranges with the same spec are therefore concatenated, and share these loops.

    Args:
        ranges: the static ranges.
        records: the range or the learned scale of each, by name and place.
    """
    found = {name: dict(parts) for name, parts in records.items()}
    groups: dict[QuantSpec, list[tuple[str, StaticRange]]] = {}
    for name, entries in ranges.items():
        for entry in entries:
            if _has_one_scale(entry, found[name][entry.place]):
                groups.setdefault(entry.operand.spec, []).append((name, entry))
    for spec, members in groups.items():
        ends = [found[name][entry.place] for name, entry in members]
        scales = _find_together(spec, ends, [entry.lengths for _, entry in members])
        for (name, entry), scale in zip(members, scales, strict=True):
            found[name][entry.place] = scale
    return found


def _has_one_scale(entry: StaticRange, part: Any) -> bool:
    """Return whether a record is a range of a whole array, or one for each iteration of the scans around it."""
    spec = entry.operand.spec
    if not isinstance(part, Range) and type(part) is not tuple:  # a scale that is trained
        return False
    if not all(isinstance(g, PerTensor) for g in (spec.granularity, spec.zero_point_granularity)):
        return False
    ends = [jnp.asarray(end) for end in part]
    are_single = all(end.dtype in dtypes.FLOATS and end.size == math.prod(entry.lengths) for end in ends)
    return are_single and not any(sharding.is_placed(end) for end in ends)


def _find_together(spec: QuantSpec, ends: list[Any], lengths: list[tuple[int, ...]]) -> list[FoundScale]:
    flat = [jnp.ravel(end).astype(jnp.float32) for i in (0, 1) for end in (pair[i] for pair in ends)]
    low, high = lax.concatenate(flat, 0).reshape(2, -1)
    scale, zero_point = find_scale_and_zero_point(spec, low, high, low.shape, low.shape)
    # Without the barrier XLA would compute them again in each loop that uses one.
    scale, zero_point = lax.optimization_barrier((scale, zero_point))
    found, start = [], 0
    for shape in lengths:
        stop = start + math.prod(shape)
        point = None if zero_point is None else zero_point[start:stop].reshape(shape)
        found.append(FoundScale(scale[start:stop].reshape(shape), point))
        start = stop
    return found
