"""The static ranges of a prepared function: the states of their calibrators, by name and place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from .._program.analysis import Analysis
from .._program.views import Constant
from ..calibration.calibrator import Calibrator, describe_factory
from ._plan import OperandPlan, ProgramPlan
from ._regions.rounding_points import OUTPUT, RoundingPoint


class StaticRange(NamedTuple):
    """An activation whose range calibration finds.

    Attributes:
        operand: how it is quantized.
        shape: its shape.
        lengths: the lengths of the scans around it that stack parameters; each iteration has a range of its own.
        is_constant: whether it depends neither on parameters nor on arguments, such as an initial state of zeros.
        label: the name of what reads or computes it, for errors; of a contraction with its place in the source.
    """

    operand: OperandPlan
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    is_constant: bool
    label: str

    @property
    def place(self) -> str:
        """The key of this activation: its place among the operands of its contraction."""
        return str(self.operand.place)

    @property
    def calibrator(self) -> Calibrator:
        """The calibrator that finds the range."""
        return self.operand.make_calibrator()


StaticRanges = Mapping[str, tuple[StaticRange, ...]]


def list_ranges(analysis: Analysis, plan: ProgramPlan) -> dict[str, tuple[StaticRange, ...]]:
    """Return the static ranges of a program by name."""
    ranges: dict[str, tuple[StaticRange, ...]] = {}
    for site in analysis.sites.values():
        planned = plan.sites[site.name]
        arrivals = plan.regions.arrivals.get(site.name, ())
        entries = []
        for operand in planned.activations:
            if operand.calibrator is not None and operand.place not in arrivals:
                shape = tuple(site.equation.invars[int(operand.place)].aval.shape)
                is_constant = isinstance(site.origins[int(operand.place)], Constant)
                lengths = site.lengths if planned.layers else ()
                entries.append(StaticRange(operand, shape, lengths, is_constant, site.describe()))
        point = plan.regions.get_point(site)
        if point is not None:
            entries.append(_make_output(plan, point))
        if entries:
            # Of the contractions that share a record, some may get codes, or give floats.
            merged = {entry.place: entry for entry in (*entries, *ranges.get(planned.record, ()))}
            ranges[planned.record] = tuple(merged[place] for place in sorted(merged))
    for point in plan.regions.points:
        if point.site is None:
            ranges[point.name] = (_make_output(plan, point),)
    return ranges


def _make_output(plan: ProgramPlan, point: RoundingPoint) -> StaticRange:
    """Return the range of a result."""
    assert plan.regions.graph is not None
    operand = OperandPlan(OUTPUT, *point.output)
    label = point.name if point.site is None else point.site.describe()
    return StaticRange(operand, plan.regions.graph.get_shape(point.value), (), False, label)


def make_states(ranges: StaticRanges) -> dict[str, dict[str, Any]]:
    """Return the states of all calibrators, without data."""

    def make_state(entry: StaticRange) -> Any:
        state = entry.calibrator.init(jax.ShapeDtypeStruct(entry.shape, jnp.float32))
        # The scan that updates these states takes one part of them in each iteration.
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*entry.lengths, *x.shape)), state)

    return {name: {entry.place: make_state(entry) for entry in entries} for name, entries in ranges.items()}


def map_states(
    function: str, ranges: StaticRanges, call: Callable[..., Any], *trees: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what a function returns for each calibrator and its parts of some trees.

    Args:
        function: the name of the public function, for errors.
        ranges: the static ranges.
        call: a function of a static range and of one part of each tree.
        trees: trees such as `make_states` returns.
    """
    for tree in trees:
        check_tree(function, ranges, tree)
    results: dict[str, dict[str, Any]] = {}
    for name, entries in ranges.items():
        results[name] = {}
        for entry in entries:
            parts = [tree[name][entry.place] for tree in trees]
            with checks.prefix_errors(entry.label), checks.name_errors(function):
                results[name][entry.place] = _map_layers(functools.partial(call, entry), parts, entry.lengths)
    return results


def _map_layers(call: Callable[..., Any], parts: Sequence[Any], lengths: tuple[int, ...]) -> Any:
    """Return what a function returns for each iteration of some scans, stacked."""
    if not lengths:
        return call(*parts)
    # Not vectorized, so that a calibrator can check the values of each layer.
    layers = []
    for index in np.ndindex(*lengths):
        layers.append(call(*(jax.tree.map(lambda x, at=index: x[at], part) for part in parts)))
    return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*lengths, *xs[0].shape), *layers)


def check_tree(function: str, ranges: StaticRanges, tree: Any) -> None:
    """Raise unless a tree has an entry for each static range, and no other."""
    expected = "a dict as init returns it"
    checks.require_type(isinstance(tree, Mapping), function, "state", expected, checks.describe_value(tree))
    missing, unknown = sorted(set(ranges) - set(tree)), sorted(set(tree) - set(ranges))
    expected = f"states of the {len(ranges)} static ranges of this prepared function"
    got = "; ".join(
        f"{text} {', '.join(names[:4])}" for text, names in (("without", missing), ("with", unknown)) if names
    )
    checks.require(not missing and not unknown, function, "state", expected, got)


def describe(ranges: StaticRanges) -> str:
    """Return a description of all static ranges, equal in every process."""
    return "\n".join(
        f"{name} {entry.place} {entry.operand.spec} {describe_factory(entry.operand.calibrator)} {entry.lengths}"
        for name, entries in ranges.items()
        for entry in entries
    )
