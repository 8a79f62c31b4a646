"""The forms in which programs write a clip or a leaky relu, and what they compute.

A clip is an equation (`max`, `min`, `clamp`), a selection by comparisons such as `jnp.where(x > 0, x, 0)`, or a
function with a derivative rule of its own, such as `jax.nn.relu`, which clips its operand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._program import jaxpr
from ..._program.graph import EquationNode, ProgramGraph, make_graph
from .statics import read_number

Bounds = tuple[float | None, float | None]
_CLIPS = ("max", "min", "clamp")
# Each comparison of a value with a number, and whether it is true of large values.
_COMPARISONS = {"gt": True, "ge": True, "lt": False, "le": False}
_MIRRORED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


class Clip(NamedTuple):
    """A value clipped by numbers.

    Attributes:
        value: the value.
        low: the lower bound, or None.
        high: the upper bound, or None.
        hidden: the nodes of a selection besides the one that gives the result, such as comparisons.
    """

    value: int
    low: float | None
    high: float | None
    hidden: tuple[EquationNode, ...] = ()


class Leak(NamedTuple):
    """A value with its negative side multiplied by a number: max(x, 0) + slope * min(x, 0).

    Attributes:
        value: the value.
        slope: the number, of float32.
        hidden: the nodes besides the one that gives the result.
    """

    value: int
    slope: float
    hidden: tuple[EquationNode, ...]


def match_clip(graph: ProgramGraph, node: EquationNode) -> Clip | None:
    """Return what a node clips, or None if it gives something else."""
    if node.name in jaxpr.CUSTOM_RULES:
        return _match_inner_clip(graph, node)
    hidden: list[EquationNode] = []
    if node.name in _CLIPS:
        places = [1] if node.name == "clamp" else [0, 1]
        values = [node.inputs[place] for place in places if read_number(graph, node.inputs[place]) is None]
        value = values[0] if len(values) == 1 else None
    else:
        value = _match_compared(graph, node)
    if value is None:
        return None
    bounds = _match_bounds(graph, node.outputs[0], value, hidden)
    if bounds is None or bounds == (None, None):
        return None
    inner = tuple({n.address: n for n in hidden if n is not node}.values())
    return Clip(value, *bounds, inner) if _are_private(graph, node, inner) else None


def match_leak(graph: ProgramGraph, node: EquationNode) -> Leak | None:
    """Return which value goes through a leaky relu with a node as its end, or None."""
    value = _match_compared(graph, node)
    if value is not None:
        comparison = _read_comparison(graph, graph.producers[node.inputs[0]])
        if comparison is None or comparison[2] != 0 or len(node.inputs) != 3:
            return None
        negative, positive = node.inputs[1:] if comparison[1] else node.inputs[:0:-1]
        hidden = [graph.producers[node.inputs[0]]]
    elif node.name == "max" and len(set(node.inputs)) == 2:
        # max(x, slope * x) with a slope between 0 and 1.
        products = [v for v in node.inputs if _match_slope(graph, v, sum(node.inputs) - v) is not None]
        if len(products) != 1:
            return None
        (negative,), hidden = products, list[EquationNode]()
        value = positive = sum(node.inputs) - negative
    else:
        return None
    slope = _match_slope(graph, negative, value)
    if positive != value or slope is None or (node.name == "max" and not 0 <= slope <= 1):
        return None
    inner = (*hidden, graph.producers[negative])
    return Leak(value, slope, inner) if _are_private(graph, node, inner) else None


def call_rule(graph: ProgramGraph, node: EquationNode, value: Any) -> Any:
    """Return the result of a function with a derivative rule of its own that clips a value."""
    clip = match_clip(graph, node)
    assert clip is not None
    operands = [
        value if v == clip.value else np.full(graph.get_shape(v), read_number(graph, v), graph.avals[v].dtype)
        for v in node.inputs
    ]
    return jaxpr.evaluate(node.equation, operands)[0]


def _match_inner_clip(graph: ProgramGraph, node: EquationNode) -> Clip | None:
    """Return what a function with a derivative rule clips."""
    numbers = [read_number(graph, value) for value in node.inputs]
    if numbers.count(None) != 1 or len(node.outputs) != 1:
        return None
    place = numbers.index(None)
    # The body of `jax.nn.relu6` and others holds further calls, such as a call of a jitted `jnp.minimum`.
    inner = make_graph(jaxpr.read_call(node.equation), lambda equation, _: jaxpr.read_name(equation) in jaxpr.CALLS)
    for value, number in zip(inner.inputs, numbers, strict=True):
        if number is not None:
            inner.constants[value] = np.float32(number)
    bounds = _match_bounds(inner, inner.results[0], inner.inputs[place], [])
    return None if bounds is None or bounds == (None, None) else Clip(node.inputs[place], *bounds)


def _are_private(graph: ProgramGraph, node: EquationNode, hidden: Sequence[EquationNode]) -> bool:
    """Return whether nothing but a node and hidden ones reads the results of hidden ones."""
    members = {node.address, *(n.address for n in hidden)}
    outputs = [value for n in hidden for value in n.outputs]
    # A comparison that something else reads needs floats, which are not computed where codes are clipped.
    readers = {user.address for value in outputs for user, _ in graph.uses.get(value, [])}
    return readers <= members and not set(outputs) & set(graph.results)


def _match_compared(graph: ProgramGraph, node: EquationNode) -> int | None:
    """Return the value that decides a selection by its comparison with a number."""
    if node.name != "select_n" or len(node.inputs) != 3:
        return None
    comparison = graph.producers.get(node.inputs[0])
    numbers = None if comparison is None else _read_comparison(graph, comparison)
    return None if numbers is None else numbers[0]


def _read_comparison(graph: ProgramGraph, node: EquationNode) -> tuple[int, bool, float] | None:
    """Return which value is compared with which number, and whether the comparison is true of large values."""
    if node.name not in _COMPARISONS:
        return None
    numbers = [read_number(graph, value) for value in node.inputs]
    if numbers.count(None) != 1:
        return None
    place = numbers.index(None)
    name = node.name if place == 0 else _MIRRORED[node.name]
    number = numbers[1 - place]
    assert number is not None
    return node.inputs[place], _COMPARISONS[name], number


def _match_bounds(graph: ProgramGraph, result: int, value: int, visited: list[EquationNode]) -> Bounds | None:
    """Return the numbers between which a result is a clipped value; None for other results.

    The nodes on the way are added to `visited`.
    """
    if result == value:
        return None, None
    node = graph.producers.get(result)
    if node is None:
        return None
    visited.append(node)
    if node.name == "clamp":
        numbers = [read_number(graph, node.inputs[place]) for place in (0, 2)]
        bounds = _match_bounds(graph, node.inputs[1], value, visited)
        return None if None in numbers else _tighten(_tighten(bounds, numbers[0], True), numbers[1], False)
    if node.name in ("max", "min"):
        numbers = [read_number(graph, v) for v in node.inputs]
        if numbers.count(None) != 1:
            return None
        place = numbers.index(None)
        bounds = _match_bounds(graph, node.inputs[place], value, visited)
        return _tighten(bounds, numbers[1 - place], node.name == "max")
    if node.name == "select_n" and len(node.inputs) == 3:
        return _match_selected(graph, node, value, visited)
    return None


def _match_selected(graph: ProgramGraph, node: EquationNode, value: int, visited: list[EquationNode]) -> Bounds | None:
    """Return the bounds of a selection between a number and a clipped value, where the value is equal to the number."""
    comparison = graph.producers.get(node.inputs[0])
    compared = None if comparison is None else _read_comparison(graph, comparison)
    if compared is None or comparison is None or compared[0] != value:
        return None
    visited.append(comparison)
    # The first case is for a comparison that is false.
    small, large = node.inputs[1:] if compared[1] else node.inputs[:0:-1]
    for end, other, is_low in ((small, large, True), (large, small, False)):
        # Any other number would make a step, which no clip has.
        if read_number(graph, end) == compared[2]:
            return _tighten(_match_bounds(graph, other, value, visited), compared[2], is_low)
    return None


def _tighten(bounds: Bounds | None, number: float | None, is_low: bool) -> Bounds | None:
    """Return bounds with another one, which must be between them: max(min(x, 1), 2) would be a number."""
    if bounds is None or number is None or math.isnan(number):
        return None
    low, high = bounds
    if (low is not None and number < low) or (high is not None and number > high):
        return None
    return (number, high) if is_low else (low, number)


def _match_slope(graph: ProgramGraph, result: int, value: int) -> float | None:
    """Return the number by which a value is multiplied, or None for other results."""
    node = graph.producers.get(result)
    if node is None or node.name != "mul" or value not in node.inputs:
        return None
    return read_number(graph, node.inputs[1 - node.inputs.index(value)])
