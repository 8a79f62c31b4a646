"""The places of a program where a result is rounded to codes, and what belongs to each of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..._arrays.spec import QuantSpec
from ..._program.analysis import Address, Site
from ..._program.graph import EquationNode, ProgramGraph
from ...calibration.calibrator import Factory

# The key of the range of a result among the ranges of a contraction.
OUTPUT = "output"


class OutputPlan(NamedTuple):
    """How a result is quantized.

    Attributes:
        spec: the spec.
        calibrator: the function that makes the calibrator of its range.
    """

    spec: QuantSpec
    calibrator: Factory


class PointStep(NamedTuple):
    """An equation between an operation and the codes of its result.

    Attributes:
        node: the equation.
        kind: "affine" (the sum or product with a parameter of each feature), "move", "clip", or "divide" (the sum of
            a mean).
        place: the place of the result among its operands.
        labels: for each dimension of the result, which feature dimension of the contraction it is, or None.
    """

    node: EquationNode
    kind: str
    place: int
    labels: tuple[int | None, ...] = ()


@dataclasses.dataclass(eq=False)
class RoundingPoint:
    """An operation and the equations up to where its result is rounded to codes.

    Attributes:
        operation: the name of the operation.
        node: its equation.
        output: how the result is quantized.
        site: the contraction, or None.
        features: the dimensions of the result of a contraction whose indices have parameters of their own.
        steps: the equations after it.
        attributes: the static arguments of the function of `jaxquant.codes` for an operation that is no contraction.
        value: the value that is rounded.
        name: the name of its range.
        source: where the activations of a contraction are rounded, or None if it rounds them itself.
    """

    operation: str
    node: EquationNode
    output: OutputPlan
    site: Site | None = None
    features: tuple[int, ...] = ()
    steps: list[PointStep] = dataclasses.field(default_factory=list)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    value: int = -1
    name: str = ""
    source: RoundingPoint | None = None

    def locate_range(self) -> tuple[str, str]:
        """Return the name and the place of the range of the activations of a contraction."""
        assert self.site is not None
        assert self.site.weight is not None
        return (self.name, str(1 - self.site.weight)) if self.source is None else (self.source.name, OUTPUT)

    def needs_fold(self) -> bool:
        """Return whether the weights are multiplied."""
        return any(step.kind == "affine" and is_product(step) for step in self.steps)


def is_product(step: PointStep) -> bool:
    """Return whether an affine step multiplies."""
    return step.node.name in ("mul", "div", "neg") or (step.node.name == "sub" and step.place == 1)


class Action(NamedTuple):
    """What becomes of an equation.

    Attributes:
        kind: "start" for the operation of a point, "pass" for a later equation of it, "move" for an equation that takes
            codes and returns codes with the same scale, "hidden": only the next operation reads the result.
        node: the equation.
        point: the point, or None.
        is_end: whether the result is rounded here.
    """

    kind: str
    node: EquationNode
    point: RoundingPoint | None
    is_end: bool

    def describe_action(self) -> str:
        """Return the name and the place of the contraction to which it belongs, or its own."""
        site = None if self.point is None else self.point.site
        return self.node.describe_node() if site is None else site.describe()


@dataclasses.dataclass(frozen=True, eq=False)
class Regions:
    """The parts of a program that stay in codes.

    Attributes:
        graph: the program, or None if no rule asks for codes.
        actions: what becomes of each equation in them.
        points: where results are rounded, in program order.
        arrivals: for contractions by name, the places of the operands that are codes already.
        reasons: for contractions by name, why the result is floats although a rule asks for codes.
        entered: the addresses of the calls around these equations, and of their bodies.
        inputs: for each parameter that stays in floats, by its place, the value in the graph.
    """

    graph: ProgramGraph | None = None
    actions: dict[Address, Action] = dataclasses.field(default_factory=dict)
    points: tuple[RoundingPoint, ...] = ()
    arrivals: dict[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    entered: frozenset[Address] = frozenset()
    inputs: dict[int, int] = dataclasses.field(default_factory=dict)

    def get_point(self, site: Site) -> RoundingPoint | None:
        """Return the point of a contraction, or None if its result is floats."""
        action = self.actions.get(site.address)
        return None if action is None or action.kind != "start" else action.point
