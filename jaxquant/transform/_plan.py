"""The plan: how each contraction of a program runs, and how each parameter is quantized."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._arrays.parts import PACKED
from .._arrays.quantized_array import QuantizedArray
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._core.dtypes import CONTRACTED as INTEGER_DTYPES
from .._core.granularity import Blocked, PerAxis, PerTensor
from .._program import jaxpr, views
from .._program.analysis import CODES, INTEGERS, PRODUCTS, UNUSED, Address, Analysis, Site, list_contracted
from .._training.backward_choices import Backward, FloatBackward
from ..calibration.calibrator import Calibrator, Factory
from ._adapter_axes import AdapterAxes, match_adapter_axes
from ._regions.finder import find_regions
from ._regions.folding import Fold, match_feature_axes
from ._regions.rounding_points import OutputPlan, Regions
from .rules import Activation, Rule, SiteView, Weight

_NAME = "prepare"


class OperandPlan(NamedTuple):
    """How activations are quantized.

    Attributes:
        place: the place among the operands of the contraction, or "output" for a result.
        spec: the spec.
        calibrator: the function that makes the calibrator of a static range, or None for a dynamic range.
        wide: the spec for any number of tokens, or None if it is the same. For a single token, `spec` has `PerTensor`.
    """

    place: int | str
    spec: QuantSpec
    calibrator: Factory | None
    wide: QuantSpec | None = None

    def make_calibrator(self) -> Calibrator:
        """Return the calibrator of the static range. With float8 scales of blocks it finds the range of all blocks."""
        assert self.calibrator is not None
        spec = self.spec
        if spec.scale_spec is not None:
            spec = QuantSpec(spec.dtype, PerTensor())
        return self.calibrator(spec)


class SitePlan(NamedTuple):
    """How a contraction runs.

    Attributes:
        is_replaced: whether it runs on codes.
        weight: the spec of its parameter, or None.
        activations: how its activations are quantized; empty if they stay in floats.
        record: the name of its static range.
        layers: the addresses of the scans with a static range for each iteration.
        reason: why it stays in floats, or why its weight is quantized otherwise than its rule says, or "".
        is_wanted: whether a rule asked for codes.
        output: how its result is quantized, if a rule asks for it and nothing that follows it prevents it.
        backward: how its gradients are contracted.
    """

    is_replaced: bool
    weight: QuantSpec | None
    activations: tuple[OperandPlan, ...]
    record: str
    layers: tuple[Address, ...]
    reason: str
    is_wanted: bool
    output: OutputPlan | None = None
    backward: Backward = FloatBackward()


class LeafPlan(NamedTuple):
    """How a parameter is quantized.

    Attributes:
        spec: the spec, on the axes of the parameter.
        stored_last: the axes that the codes hold last in memory.
        shape: the shape of the parameter.
        fold: how the parameter is multiplied before it is quantized, or None.
        weight: the Weight of the rule that the spec comes from.
        conflict: the Weights that the rules of its uses name, as text, if they differ; or that the parameter had codes
            already; or "".
        adapter: the axes of the factors of an adapter, or why the parameter can have none.
        is_packed: whether codes of less than a byte are held in words, of which a loop on a CPU takes layers.
    """

    spec: QuantSpec
    stored_last: tuple[int, ...]
    shape: tuple[int, ...]
    fold: Fold | None = None
    weight: Weight | None = None
    conflict: str = ""
    adapter: AdapterAxes | str = ""
    is_packed: bool = False

    def multiply(self, w: Any, arrays: Sequence[Any]) -> Any:
        """Return the parameter as it is quantized: multiplied by what follows its contraction, if anything does."""
        return w if self.fold is None else self.fold.multiply(w, arrays)

    def store(self, q: QuantizedArray) -> QuantizedArray:
        """Return the codes of the parameter as they are held in memory."""
        q = q.store_last(*self.stored_last) if self.stored_last else q
        return q.pack() if self.is_packed else q


class ProgramPlan(NamedTuple):
    """The plans of all contractions by name, of the parameters that are quantized by their place, and of results."""

    sites: dict[str, SitePlan]
    leaves: dict[int, LeafPlan]
    unmatched: tuple[Rule, ...]
    regions: Regions = Regions()


def describe_site(site: Site, names: Sequence[str]) -> SiteView:
    """Return what a rule can look at."""
    variables = site.equation.invars[:2]
    return SiteView(
        site.name,
        tuple(names[leaf] for leaf in site.leaves),
        site.operation,
        tuple(jaxpr.read_shape(variable) for variable in variables),
        tuple(str(jaxpr.read_dtype(variable)) for variable in variables),
        site.scope,
        site.where,
    )


def make_plan(
    analysis: Analysis, rules: Sequence[Rule], names: Sequence[str], shapes: Sequence[Any],
    given: Mapping[int, QuantSpec],
) -> ProgramPlan:  # fmt: skip
    """Return the plan for a program.

    Args:
        analysis: what is known about the program.
        rules: the rules; the first one that matches applies.
        names: the path of each parameter.
        shapes: the shape of each parameter.
        given: the specs of the parameters that have codes already, by their place.

    Raises:
        ContractValueError: two rules give one parameter different Weights, and no Weight fits all of its uses.
    """
    chosen: dict[str, Rule | None] = {}
    for site in analysis.sites.values():
        view = describe_site(site, names)
        chosen[site.name] = next((rule for rule in rules if rule.matches(view)), None)
    wanted = [site for site in analysis.sites.values() if _is_replaceable(site, chosen[site.name])]
    leaves = _plan_leaves(wanted, chosen, names, shapes, given)
    records = _name_ranges(analysis.sites.values(), chosen, names)
    sites = {
        site.name: _plan_site(site, chosen[site.name], leaves, names, *records[site.name], given)
        for site in analysis.sites.values()
    }
    used = {id(rule) for rule in chosen.values()}
    return ProgramPlan(sites, leaves, tuple(rule for rule in rules if rule.path is not None and id(rule) not in used))


def _is_replaceable(site: Site, rule: Rule | None) -> bool:
    return rule is not None and rule.keep is None and not site.reason


def _plan_leaves(
    sites: Sequence[Site], chosen: dict[str, Rule | None], names: Sequence[str], shapes: Sequence[Any],
    given: Mapping[int, QuantSpec],
) -> dict[int, LeafPlan]:  # fmt: skip
    """Return how each parameter is quantized, so that all of its uses can contract it."""
    uses: dict[int, list[Site]] = {}
    contracted: dict[int, set[int]] = {}
    orders: dict[int, list[tuple[int, ...]]] = {}
    # If Weights are equal, a contraction's comes before a lookup's.
    for site in sorted(sites, key=lambda site: site.operation == "take"):
        rule = chosen[site.name]
        assert rule is not None
        for view in site.views:
            uses.setdefault(view.leaf, []).append(site)
            # The union over all uses, because a scale that varies along a summed axis cannot be taken out of the sum.
            contracted.setdefault(view.leaf, set()).update(view.list_axes(site.contracted))
            orders.setdefault(view.leaf, []).append(_choose_stored_axes(site, view, rule))
    plans = {}
    for leaf, places in uses.items():
        if leaf in given:
            text = f"{names[leaf]} keeps its codes"
            adapter = match_adapter_axes(places, leaf, shapes[leaf])
            plans[leaf] = LeafPlan(given[leaf], (), tuple(shapes[leaf]), conflict=text, adapter=adapter)
            continue
        rules = [chosen[site.name] for site in places]
        pairs = [(site, rule) for site, rule in zip(places, rules, strict=True) if rule is not None]
        weight, conflict = _choose_weight(pairs, names[leaf], contracted[leaf], shapes[leaf])
        spec = _make_weight_spec(weight, contracted[leaf], shapes[leaf])
        (order, *others) = set(orders[leaf])
        # Uses that read different axes fastest leave the codes in the order of the parameter.
        stored_last = () if others else order
        adapter = match_adapter_axes(places, leaf, shapes[leaf])
        is_packed = np.dtype(spec.carrier) in PACKED and _is_cut_by_loops(places, leaf, len(shapes[leaf]))
        plans[leaf] = LeafPlan(
            spec, stored_last, tuple(shapes[leaf]), weight=weight, conflict=conflict, adapter=adapter,
            is_packed=is_packed,
        )  # fmt: skip
    return plans


def _is_cut_by_loops(sites: Sequence[Site], leaf: int, rank: int) -> bool:
    """Return whether all that reads a parameter are products on a CPU with a layer of it, whose index a loop computes.

    XLA:CPU cannot take a slice of codes of less than a byte at an index that is not known. It converts those of all
    layers to int8 before the loop, and in each iteration those of the layer back, one after the other.
    """
    if jax.default_backend() != "cpu" or any(site.operation not in PRODUCTS for site in sites):
        return False
    read = [view for site in sites for view in site.views if view.leaf == leaf]
    return all(view.is_cut_at_unknown_index and _has_last_axes(view, rank) for view in read)


def _has_last_axes(view: views.View, rank: int) -> bool:
    """Return whether a view has all elements along the last axes of a parameter, and one index of at least one axis."""
    atoms = [atom for dimension in view.dimensions for atom in dimension]
    axes = sorted(atom.axis for atom in atoms if atom.axis is not None and atom.is_whole)
    return axes == list(range(rank - len(atoms), rank)) and len(view.dimensions) == len(atoms) < rank


def _choose_weight(
    uses: Sequence[tuple[Site, Rule]], name: str, contracted: set[int], shape: Sequence[int]
) -> tuple[Weight, str]:
    """Return the finest of the Weights of a parameter's uses, and what they are, as text, if they differ.

    A Weight is finer if its codes have more bits, or as many bits and more scales.
    """
    named: dict[QuantSpec, tuple[Weight, str]] = {}
    for site, rule in uses:
        assert rule.weight is not None
        named.setdefault(_make_weight_spec(rule.weight, contracted, shape), (rule.weight, site.name))
    if len(named) == 1:
        return next(iter(named.values()))[0], ""
    text = "; ".join(f"{_describe_weight(weight)} for {site}" for weight, site in named.values())
    usable = {
        spec: weight
        for spec, (weight, _) in named.items()
        if all(_takes_weight(site, rule, weight) for site, rule in uses)
    }
    expected = f"one Weight for all uses of {name}, or one that each of them can take"
    checks.require(bool(usable), _NAME, "rules", expected, text)
    finest = usable[max(usable, key=lambda spec: (spec.bits, _count_scales(spec, shape)))]
    which = "the finest that rules name" if len(usable) == len(named) else "the finest that all of them can take"
    return finest, f"all uses of {name} have {_describe_weight(finest)}, {which} ({text})"


def _takes_weight(site: Site, rule: Rule, weight: Weight) -> bool:
    """Return whether a use can take a Weight that the rule of another use names."""
    if weight == rule.weight or site.operation == "take":
        return True
    if rule.activation is not None and not _can_contract(rule.activation, QuantSpec(weight.dtype), site):
        return False
    # Convolutions have no form for blocks; a result in codes has one scale.
    return weight.block is None or (site.operation in PRODUCTS and rule.output is None)


def _can_contract(activation: Activation, weight: QuantSpec, site: Site) -> bool:
    """Return whether a contraction of codes takes activations and weights of these dtypes."""
    if QuantSpec(activation.dtype).dtype in dtypes.SMALL_FLOATS:
        return weight.dtype in dtypes.SMALL_FLOATS and site.operation == "dot_general"
    return weight.codebook is None and weight.carrier in INTEGER_DTYPES


def _count_scales(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Return how many scales an array of a shape has."""
    granularity = spec.granularity
    if isinstance(granularity, PerAxis):
        kept = granularity.axis if isinstance(granularity.axis, tuple) else (granularity.axis,)
        return math.prod(shape[axis] for axis in kept)
    if isinstance(granularity, Blocked):
        axes, sizes = (v if isinstance(v, tuple) else (v,) for v in (granularity.axis, granularity.size))
        blocks = dict(zip(axes, sizes, strict=True))
        return math.prod(-(-n // blocks.get(place, 1)) for place, n in enumerate(shape))
    return 1


def _describe_weight(weight: Weight) -> str:
    """Return a Weight as text, without what is the default."""
    text = f"{QuantSpec(weight.dtype).dtype}"
    if weight.per == "tensor":
        text += " with one scale"
    elif weight.block is not None:
        text += f" in blocks of {weight.block}"
    if weight.scale_block is not None:
        text += f", with scales in blocks of {weight.scale_block}"
    return f"{text}, {', '.join(f'{key}={value}' for key, value in weight.options)}" if weight.options else text


def _choose_stored_axes(site: Site, view: views.View, rule: Rule) -> tuple[int, ...]:
    """Return the axes of a parameter that a use reads fastest if they are last in memory."""
    # Float contractions and convolutions have kernels for the logical order.
    if site.operation not in PRODUCTS or rule.activation is None:
        return ()
    # Axes that the program has merged cannot be moved apart from each other.
    is_whole = all(len(dimension) <= 1 for dimension in view.dimensions)
    axes = [atom.axis for place in site.contracted for atom in view.dimensions[place] if atom.axis is not None]
    # Once, also if the program has split the axis.
    return tuple(dict.fromkeys(axes)) if is_whole else ()


def _make_weight_spec(weight: Weight, contracted: set[int], shape: Sequence[int]) -> QuantSpec:
    """Return the spec of a parameter whose axes in `contracted` are summed over."""
    options = dict(weight.options)
    kept = tuple(axis for axis in range(len(shape)) if axis not in contracted)
    if weight.per == "tensor":
        return QuantSpec(weight.dtype, PerTensor(), **options)
    if weight.block is not None and contracted:
        # The longest axis that is summed has the most blocks.
        axis = max(sorted(contracted), key=lambda axis: shape[axis])
        if weight.scale_block is not None:
            blocks = Blocked(axis, weight.scale_block)
            options["scale_spec"] = dataclasses.replace(
                options["scale_spec"], granularity=blocks, zero_point_granularity=None
            )
        return QuantSpec(weight.dtype, Blocked(axis, weight.block), **options)
    # A scale for each element would save nothing, and one along no axis is one for the whole tensor.
    is_split = bool(kept) and bool(contracted)
    return QuantSpec(weight.dtype, PerAxis(kept) if is_split else PerTensor(), **options)


def _name_ranges(
    sites: Collection[Site], chosen: dict[str, Rule | None], names: Sequence[str]
) -> dict[str, tuple[str, tuple[Address, ...]]]:
    """Return the name of each site's static range, and the scans with a range for each iteration."""
    records: dict[str, str] = {}
    sharing: dict[str, list[Site]] = {}
    for site in sites:
        rule = chosen[site.name]
        is_shared = rule is not None and rule.shared and site.leaves
        records[site.name] = "+".join(names[leaf] for leaf in site.leaves) if is_shared else site.name
        if _is_replaceable(site, rule):
            sharing.setdefault(records[site.name], []).append(site)
    for record, users in sharing.items():
        # Ranges have the rank of the activations.
        ranks = {
            tuple(len(jaxpr.read_shape(v)) for v in site.equation.invars[:2])
            for site in users
            if site.operation != "take"
        }
        expected = f"operands of the same rank in all uses of {record}, because a rule has shared=True"
        got = ", ".join(site.describe() for site in users)
        checks.require(len(ranks) < 2, _NAME, "rules", expected, got)
    # Uses in other loops than the first one have no iterations in common with it.
    layered = {record for record, users in sharing.items() if len({site.lengths for site in users}) == 1}
    return {site.name: (records[site.name], site.layers if records[site.name] in layered else ()) for site in sites}


def _plan_site(
    site: Site, rule: Rule | None, leaves: dict[int, LeafPlan], names: Sequence[str], record: str,
    layers: tuple[Address, ...], given: Mapping[int, QuantSpec],
) -> SitePlan:  # fmt: skip
    is_kept = rule is None or rule.keep is not None
    if rule is None or is_kept or site.reason:
        reason = (site.reason or _explain_float(site, rule)) + _explain_values(site, leaves, names)
        # Unused results and products of codes lose nothing by staying as they are: `strict` does not list them.
        is_wanted = not is_kept and site.reason not in (UNUSED, INTEGERS, CODES)
        return SitePlan(False, None, (), record, layers, reason, is_wanted)
    weight = leaves[site.views[0].leaf].spec if site.views else None
    activations = []
    if rule.activation is not None and site.operation != "take":
        for place in range(2):
            if place != site.weight:
                spec, wide = _make_activation_spec(site, place, rule.activation)
                activations.append(OperandPlan(place, spec, rule.activation.calibrator, wide))
    expected = "FloatBackward() for ragged products, such as with operation= in a Rule before"
    is_known = site.operation != "ragged_dot" or isinstance(rule.backward, FloatBackward)
    checks.require(is_known, _NAME, "rules", expected, f"{rule.backward} for {site.name}")
    output = None
    # A result in codes has the factors of what follows it in the weights, which given codes cannot take.
    is_free = not any(view.leaf in given for view in site.views)
    if rule.output is not None and rule.output.calibrator is not None and site.operation != "take" and is_free:
        output = OutputPlan(rule.output.make_spec(), rule.output.calibrator)
    conflicts = dict.fromkeys(leaves[view.leaf].conflict for view in site.views if leaves[view.leaf].conflict)
    reason = "; ".join(conflicts)
    return SitePlan(True, weight, tuple(activations), record, layers, reason, True, output, rule.backward)


def can_contract_given(site: Site, rule: Rule | None, leaf: int, spec: QuantSpec) -> bool:
    """Return whether a rule can have a contraction run on the codes that a parameter had already."""
    if rule is None or rule.keep is not None or site.reason:
        return False
    if site.operation == "take":
        return True
    if rule.activation is not None and not _can_contract(rule.activation, spec, site):
        return False
    summed = {axis for view in site.views if view.leaf == leaf for axis in view.list_axes(site.contracted)}
    granularity = spec.granularity
    if isinstance(granularity, Blocked):
        return site.operation in PRODUCTS and granularity.axis in summed
    # A scale that varies along an axis that is summed cannot be taken out of the sum.
    return not (isinstance(granularity, PerAxis) and summed.intersection(np.atleast_1d(granularity.axis).tolist()))


def plan_regions(
    plan: ProgramPlan, trace: jaxpr.Trace, analysis: Analysis, inputs: Mapping[int, int]
) -> ProgramPlan:  # fmt: skip
    """Return a plan with what stays in codes between contractions.

    Args:
        plan: the plan of the contractions.
        trace: the program.
        analysis: what is known about it.
        inputs: for each parameter that is one array, by its place, the place of its operand of the program.
    """
    regions = find_regions(trace, analysis, plan.sites, tuple(plan.leaves), inputs)
    leaves = dict(plan.leaves)
    for point in regions.points:
        axes = match_feature_axes(point) if point.needs_fold() else None
        if axes is not None and point.site is not None:
            (leaf,) = point.site.leaves
            leaves[leaf] = leaves[leaf]._replace(fold=Fold(regions, point, axes))
    return plan._replace(leaves=leaves, regions=regions)


def _explain_float(site: Site, rule: Rule | None) -> str:
    """Return why a contraction that could run on codes stays in floats."""
    if rule is not None:
        return "a rule keeps it in floats"
    return "no rule matches it" if site.leaves else "a product of activations, which no rule matches"


def _explain_values(site: Site, leaves: Mapping[int, LeafPlan], names: Sequence[str]) -> str:
    """Return that a contraction in floats has the values of codes, if other uses of its parameters are quantized."""
    # A parameter is stored once, so a rule for one of its uses does not keep its values.
    quantized = ", ".join(names[leaf] for leaf in site.leaves if leaf in leaves)
    is_read = bool(quantized) and site.reason != UNUSED
    return f"; with the values of codes, because another use of {quantized} is quantized" if is_read else ""


def _make_activation_spec(site: Site, place: int, activation: Activation) -> tuple[QuantSpec, QuantSpec | None]:
    """Return the spec of one operand of a contraction, and the one for any number of tokens if it is another."""
    shape = jaxpr.read_shape(site.equation.invars[place])
    summed = list_contracted(site.equation, place, len(shape))
    kept = tuple(axis for axis in range(len(shape)) if axis not in summed)
    # Groups of images are contracted with different features, so they share one zero point.
    is_image = site.operation == "conv_general_dilated" and site.equation.params["batch_group_count"] == 1
    if activation.per == "image" and not is_image:
        kept = ()
    if activation.block is not None and summed:
        expected = 'Activations without blocks for convolutions, such as in a Rule(operation="dot_general", ...)'
        is_product = site.operation != "conv_general_dilated"
        checks.require(is_product, _NAME, "rules", expected, f"block={activation.block} for {site.name}")
        # As for a weight, the longest axis that is summed has the blocks.
        axis = max(sorted(summed), key=lambda axis: shape[axis])
        blocks = Blocked(axis, activation.block)
        return QuantSpec(activation.dtype, blocks, **dict(activation.options)), None
    granularity = PerTensor() if activation.per == "tensor" or not kept else PerAxis(kept)
    is_single = granularity == PerTensor() or math.prod(shape[axis] for axis in kept) == 1
    wide = QuantSpec(activation.dtype, granularity, **dict(activation.options))
    if granularity == PerTensor() or not is_single:
        return wide, None
    return QuantSpec(activation.dtype, PerTensor(), **dict(activation.options)), wide
