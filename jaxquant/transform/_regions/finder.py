"""The search for the parts of a program that can stay in codes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..._core import dtypes
from ..._program import jaxpr, moves
from ..._program.analysis import Analysis, Site
from ..._program.graph import EquationNode, ProgramGraph, make_graph
from ..._program.jaxpr import Equation
from ..._program.replacing import is_inlined
from . import clips, patterns
from .folding import match_feature_axes
from .rounding_points import Action, OutputPlan, PointStep, Regions, RoundingPoint, is_product


@dataclasses.dataclass
class _Value:
    """What is known about a value that is, or can be, codes.

    Attributes:
        point: where it is rounded.
        stage: "affine" or "clip" while the point may take further equations, "codes" once it is rounded.
        labels: the feature dimensions of a contraction.
    """

    point: RoundingPoint
    stage: str
    labels: tuple[int | None, ...] = ()


class Finder:
    """One search.

    Args:
        graph: the program.
        analysis: what is known about it.
        sites: the plans of its contractions by name.
        quantized: the places of the parameters that become codes.
        parameters: for each parameter by its place, the value in the graph.
    """

    def __init__(
        self, graph: ProgramGraph, analysis: Analysis, sites: Mapping[str, Any], quantized: Sequence[int],
        parameters: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.graph, self.analysis, self.sites = graph, analysis, sites
        self.moving = graph.depends_on([v for v in graph.inputs if v not in parameters.values()])
        self.coded = graph.depends_on([parameters[place] for place in quantized])
        self.computed = graph.depends_on(
            [v for node in graph.nodes if node.address in analysis.sites for v in node.outputs]
        )
        self.parameters, self.quantized = parameters, quantized
        self.values: dict[int, _Value] = {}
        self.actions: dict[Any, Action] = {}
        self.arrivals: dict[str, frozenset[int]] = {}
        self.reasons: dict[str, str] = {}
        self.absorbed: set[int] = set()
        # Of a selection by comparisons: the value that it clips or multiplies, and the other nodes of it.
        self.selections: dict[Any, tuple[int, tuple[EquationNode, ...]]] = {}

    def search(self) -> Regions:
        """Return the parts of the program that stay in codes."""
        for node in self.graph.nodes:
            is_moving = any(value in self.moving for value in node.inputs)
            if is_moving and node.outputs[0] not in self.absorbed and not self._extend(node):
                self._visit(node)
        useful = self._list_useful()
        points = self._keep_useful(useful)
        self._explain(useful)
        # A call may return an operand that is codes as it is, without an equation inside that takes codes.
        calls = [(*call.address, 0) for call in self.graph.calls if not self.values.keys().isdisjoint(call.outputs)]
        addresses = [*calls, *(action.node.address for action in self.actions.values())]
        entered = {address[:n] for address in addresses for n in range(len(address))}
        inputs = {place: value for place, value in self.parameters.items() if place not in self.quantized}
        return Regions(self.graph, self.actions, points, self.arrivals, self.reasons, frozenset(entered), inputs)

    # Forward: what could be codes.

    def _extend(self, node: EquationNode) -> bool:
        """Add a node to the point of its operand, if it can be part of it."""
        clip = clips.match_clip(self.graph, node)
        if clip is not None:
            return self._extend_by_clip(node, clip)
        places = [place for place, value in enumerate(node.inputs) if value in self.moving]
        value = self.values.get(node.inputs[places[0]])
        # After a clip no factor can become part of the weights any more, and no sum part of the bias.
        if value is None or value.stage != "affine" or len(places) != 1 or len(node.outputs) != 1:
            return False
        place = places[0]
        # Another reader needs the codes as they are before this equation.
        if self.graph.match_single_use(node.inputs[place]) != (node, place):
            return False
        followed = patterns.follow_labels(self.graph, node, place, value.labels)
        if followed is None:
            return False
        step = PointStep(node, followed[0], place, value.labels)
        if step.kind == "affine" and not self._can_fold(value.point, step):
            return False
        self._add_step(node, step, _Value(value.point, "affine", followed[1]))
        return True

    def _extend_by_clip(self, node: EquationNode, clip: clips.Clip) -> bool:
        """Add a clip to the point of its operand, or give codes with the scale of codes that others read, too."""
        value = self.values.get(clip.value)
        if value is None:
            return False
        members = {node.address, *(inner.address for inner in clip.hidden)}
        readers = {user.address for user, _ in self.graph.uses[clip.value]}
        self.selections[node.address] = clip.value, clip.hidden
        if value.stage == "codes" or not readers <= members or clip.value in self.graph.results:
            self._add_move(node, node.outputs, value.point)
        else:
            self._add_step(node, PointStep(node, "clip", -1), _Value(value.point, "clip"))
        return True

    def _add_move(self, node: EquationNode, outputs: Sequence[int], point: RoundingPoint) -> None:
        self.actions[node.address] = Action("move", node, None, False)
        self.values |= {output: _Value(point, "codes") for output in outputs}

    def _add_step(self, node: EquationNode, step: PointStep, value: _Value) -> None:
        value.point.steps.append(step)
        value.point.value = node.outputs[0]
        self.values[node.outputs[0]] = value
        self.actions[node.address] = Action("pass", node, value.point, False)

    def _can_fold(self, point: RoundingPoint, step: PointStep) -> bool:
        others = [value for place, value in enumerate(step.node.inputs) if place != step.place]
        # What is computed from a quantized parameter has no floats when the function is served.
        if any(value in self.coded for value in others):
            return False
        if not is_product(step) or point.needs_fold():
            return True
        reason = explain_fold_obstacle(self.graph, point, self.parameters)
        if reason:
            assert point.site is not None
            self.reasons[point.site.name] = f"{step.node.describe_node()} multiplies it, and {reason}"
        return not reason

    def _visit(self, node: EquationNode) -> None:
        site = self.analysis.sites.get(node.address)
        if site is not None:
            self._visit_site(node, site)
            return
        places = [place for place, value in enumerate(node.inputs) if value in self.moving]
        values = [self.values.get(node.inputs[place]) for place in places]
        if node.name == moves.BARRIER:
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    self._add_move(node, [node.outputs[place]], value.point)
            return
        leak = clips.match_leak(self.graph, node)
        if leak is not None and leak.value in self.values:
            output = self.values[leak.value].point.output
            self.selections[node.address] = leak.value, leak.hidden
            self._start(RoundingPoint("leaky_relu", node, output, attributes={"slope": leak.slope}), "clip")
            return
        known = [value for value in values if value is not None]
        if len(known) != len(places):
            return
        if len(known) == len(node.inputs) and self._combine(node, known):
            return
        if places == [0] and patterns.is_move(self.graph, node):
            self._add_move(node, node.outputs, known[0].point)

    def _combine(self, node: EquationNode, known: Sequence[_Value]) -> bool:
        """Start a point at an operation on codes, and return whether there is such an operation."""
        output = known[0].point.output
        # ONNX Runtime's operators have one dtype for all operands.
        if node.name in _COMBINED and len({value.point.output.spec.carrier for value in known}) == 1:
            attributes = {"axis": node.parameters["dimension"]} if node.name == "concatenate" else {}
            self._start(RoundingPoint(_COMBINED[node.name], node, output, attributes=attributes), "clip")
        elif node.name == "logistic":
            self._start(RoundingPoint("sigmoid", node, output), "clip")
        elif node.name in ("reduce_sum", "reduce_window_sum"):
            self._visit_sum(node, output)
        else:
            return False
        return True

    def _visit_sum(self, node: EquationNode, output: OutputPlan) -> None:
        mean = patterns.match_mean(self.graph, node)
        if mean is None:
            return
        name = "mean" if node.name == "reduce_sum" else "average_pool"
        point = RoundingPoint(name, node, output, attributes=mean[0])
        self._start(point, "clip")
        for step in mean[1]:
            self.absorbed.add(step.node.outputs[0])
            self._add_step(step.node, step, _Value(point, "clip"))

    def _start(self, point: RoundingPoint, stage: str, labels: tuple[int | None, ...] = ()) -> None:
        point.value = point.node.outputs[0]
        self.values[point.value] = _Value(point, stage, labels)
        self.actions[point.node.address] = Action("start", point.node, point, False)

    def _visit_site(self, node: EquationNode, site: Site) -> None:
        plan = self.sites[site.name]
        places = {operand.place for operand in plan.activations}
        arrivals = frozenset(place for place in places if node.inputs[place] in self.values)
        if plan.is_replaced and arrivals:
            self.arrivals[site.name] = arrivals
        if plan.output is None:
            return
        reason = explain_site_obstacle(site, plan)
        if reason:
            self.reasons[site.name] = reason
            return
        features = list_features(site)
        rank = len(self.graph.get_shape(node.outputs[0]))
        labels = tuple(features.index(axis) if axis in features else None for axis in range(rank))
        arrived = [self.values[node.inputs[place]].point for place in arrivals]
        point = RoundingPoint(site.operation, node, plan.output, site, features, source=arrived[0] if arrived else None)
        self._start(point, "affine", labels)

    # Backward: what is read as codes.

    def _list_useful(self) -> set[int]:
        """Return the values that a contraction of codes or the caller reads, or from which such a value is made."""
        # What only floats read is not rounded: that would lose digits, and save nothing.
        useful = {value for value in self.graph.results if value in self.values}
        for node in reversed(self.graph.nodes):
            site = self.analysis.sites.get(node.address)
            if site is not None:
                useful |= {node.inputs[place] for place in self.arrivals.get(site.name, ())}
            elif node.address in self.actions and not useful.isdisjoint(node.outputs):
                useful |= {value for value in self._list_sources(node, useful) if value in self.values}
        return useful

    def _list_sources(self, node: EquationNode, useful: set[int]) -> Collection[int]:
        """Return the values from which the useful results of a node are made."""
        if node.address in self.selections:
            return (self.selections[node.address][0],)
        if node.name == moves.BARRIER:
            return [v for v, output in zip(node.inputs, node.outputs, strict=True) if output in useful]
        return node.inputs

    def _keep_useful(self, useful: set[int]) -> tuple[RoundingPoint, ...]:
        """Keep the actions with useful results, and return their points with names."""
        kept = {}
        points = list[RoundingPoint]()
        names = {plan.record for plan in self.sites.values()}
        for action in self.actions.values():
            node, point = action.node, action.point
            if useful.isdisjoint(node.outputs):
                continue
            kept[node.address] = action._replace(is_end=point is not None and point.value == node.outputs[0])
            for hidden in self._list_hidden(node):
                kept[hidden.address] = Action("hidden", hidden, None, False)
            if action.kind == "start" and point is not None:
                points.append(point)
                if point.site is not None:
                    point.name = self.sites[point.site.name].record
                    continue
                stem = f"{point.operation}@{node.scope}" if node.scope else point.operation
                numbered = (f"{stem}#{number}" if number else stem for number in itertools.count())
                point.name = next(name for name in numbered if name not in names)
                names.add(point.name)
        self.actions = kept
        return tuple(points)

    # The report.

    def _explain(self, useful: set[int]) -> None:
        """Find why the results of contractions are floats although a rule asks for codes."""
        nodes = {node.address: node for node in self.graph.nodes}
        for site in self.analysis.sites.values():
            plan = self.sites[site.name]
            if plan.output is None or site.address in self.actions or site.name in self.reasons:
                continue
            node = nodes.get(site.address)
            # Only calls are inlined.
            self.reasons[site.name] = _IN_BODY if node is None else self._explain_value(node.outputs[0])

    def _explain_value(self, value: int) -> str:
        """Return which operation reads a value as floats."""
        ends = {inner.address: node for node in self.graph.nodes for inner in self._list_hidden(node)}
        for user, place in self.graph.uses.get(value, []):
            node = ends.get(user.address, user)
            inner = [self._explain_value(output) for output in node.outputs if output in self.values]
            if inner and node.address not in self.analysis.sites:
                return inner[0]
            if self._has_argument(node, place, value):
                return f"{node.describe_node()} has an argument as another operand{_ADVICE}"
            if node.name in _COMBINED and any(v not in self.values for v in node.inputs):
                other = "a parameter" if any(v not in self.moving for v in node.inputs) else "floats"
                return f"{node.describe_node()} has {other} as another operand"
            return f"{node.describe_node()} reads it as floats"
        return "nothing reads it"

    def _list_hidden(self, node: EquationNode) -> tuple[EquationNode, ...]:
        return self.selections.get(node.address, (0, ()))[1]

    def _has_argument(self, node: EquationNode, place: int, value: int) -> bool:
        """Return whether an operand would be a bias, a factor or a statistic if it were among the parameters."""
        known = self.values.get(value)
        if known is None or known.stage != "affine" or len(node.inputs) != 2:
            return False
        if node.inputs[1 - place] not in self.moving - self.computed:
            return False
        return patterns.follow_labels(self.graph, node, place, known.labels) is not None


_ADVICE = " (statistics and biases must be among the parameters)"
_COMBINED = {"add": "add", "mul": "multiply", "concatenate": "concatenate"}
_IN_BODY = "it is in a loop, a branch, a checkpoint or a function with its own derivative, whose results are floats"


def list_features(site: Site) -> tuple[int, ...]:
    """Return the dimensions of the result of a contraction along which its weights vary, in the order of the result."""
    numbers = site.equation.params["dimension_numbers"]
    if site.operation == "conv_general_dilated":
        return (numbers.out_spec[1],)
    (contracted, batch), weight = numbers, site.weight
    assert weight is not None
    ranks = [len(jaxpr.read_shape(variable)) for variable in site.equation.invars[:2]]
    frees = [ranks[side] - len(contracted[side]) - len(batch[side]) for side in (0, 1)]
    start = len(batch[0]) + (frees[0] if weight == 1 else 0)
    return (*range(len(batch[0])), *range(start, start + frees[weight]))


def explain_site_obstacle(site: Site, plan: Any) -> str:
    """Return why the result of a planned contraction cannot be rounded to codes, or ""."""
    if not plan.is_replaced:
        return plan.reason
    variables = (*site.equation.invars[:2], site.equation.outvars[0])
    kinds = {str(jaxpr.read_dtype(variable)) for variable in variables}
    if kinds != {str(dtypes.FLOAT32)}:
        return f"its dtypes are {', '.join(sorted(kinds))}, and integer kernels scale in float32"
    if site.operation == "ragged_dot":
        return "the product of groups of rows returns floats"
    if site.weight is None:
        return "it has no parameter"
    shape = jaxpr.read_shape(site.equation.invars[site.weight])
    if site.operation == "conv_general_dilated":
        if site.weight != 1:
            return "the parameter is convolved with the activations as its kernel"
        if site.equation.params["batch_group_count"] != 1:
            return "it has groups of images"
    # A uint8 code is at most 255 away from its zero point, and a symmetric int8 code 128 from 0.
    terms = math.prod(shape[axis] for axis in site.contracted)
    limit = (2**31 - 1) // (255 * (128 if plan.weight.symmetric else 255))
    return "" if terms <= limit else f"it sums {terms} products of codes, and int32 holds {limit}"


def explain_fold_obstacle(graph: ProgramGraph, point: RoundingPoint, parameters: Mapping[int, int]) -> str:
    """Return why weights cannot be multiplied by an array of their features, or ""."""
    site = point.site
    assert site is not None
    assert site.weight is not None
    if match_feature_axes(point) is None:
        return "its weights are not a whole parameter"
    value = point.node.inputs[site.weight]
    while value not in parameters.values():
        if graph.match_single_use(value) is None:
            return "its weights have another use"
        node = graph.producers.get(value)
        if node is None:
            return "its weights are not a whole parameter"
        if node.name == moves.BARRIER:
            value = node.inputs[node.outputs.index(value)]
            continue
        # The other parts of a parameter that is unstacked or split would be multiplied, too.
        if sum(output in graph.uses or output in graph.results for output in node.outputs) > 1:
            return "its weights are a part of a parameter"
        value = node.inputs[0]
    return "" if graph.match_single_use(value) is not None else "its weights have another use"


def find_regions(
    trace: jaxpr.Trace, analysis: Analysis, sites: Mapping[str, Any], quantized: Sequence[int],
    parameters: Mapping[int, int],
) -> Regions:  # fmt: skip
    """Return the parts of a program that stay in codes; none if no rule asks for codes.

    Args:
        trace: the program.
        analysis: what is known about it.
        sites: the plans of its contractions by name.
        quantized: the places of the parameters that become codes.
        parameters: for each parameter by its place, the place of its operand of the program.
    """
    if not any(plan.output is not None for plan in sites.values()):
        return Regions()

    def is_entered(equation: Equation, address: Any) -> bool:
        # Functions with a derivative rule of their own keep it: they clip, or they run on floats.
        return jaxpr.read_name(equation) not in jaxpr.CUSTOM_RULES and is_inlined(analysis, equation, address)

    graph = make_graph(jaxpr.Body(trace.program, trace.constants), is_entered)
    values = {place: graph.inputs[operand] for place, operand in parameters.items()}
    return Finder(graph, analysis, sites, quantized, values).search()
