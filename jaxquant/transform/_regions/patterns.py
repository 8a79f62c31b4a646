"""The equations that have a form on codes: how they are recognized."""

from __future__ import annotations

import math
from typing import Any

from ..._codes.pooling import CodeWindows
from ..._program.graph import EquationNode, ProgramGraph
from ..._program.moves import BARRIER, MOVES, keeps_indices
from .rounding_points import PointStep
from .statics import derive_varying, read_number


def is_move(graph: ProgramGraph, node: EquationNode) -> bool:
    """Return whether a node gives elements of its first operand, and no others but zeros."""
    if node.name not in MOVES or not MOVES[node.name].on_codes:
        return False
    if node.name == "pad":
        return read_number(graph, node.inputs[1]) == 0
    if node.name == "convert_element_type":
        return node.parameters["new_dtype"] == graph.avals[node.inputs[0]].dtype
    return node.name != "reduce_window_max" or match_windows(node.parameters) is not None


def match_windows(parameters: dict[str, Any]) -> CodeWindows | None:
    """Return the windows of a pooling with these parameters, or None if they have gaps."""
    if any(n != 1 for name in ("base_dilation", "window_dilation") for n in parameters[name]):
        return None
    parts = zip(parameters["window_dimensions"], parameters["window_strides"], parameters["padding"], strict=True)
    windows = [(axis, *part) for axis, part in enumerate(parts) if part != (1, 1, (0, 0))]
    axes, lengths, strides, padding = zip(*windows, strict=True) if windows else ((), (), (), ())
    pairs = tuple((int(low), int(high)) for low, high in padding)
    # With more padding a window would hold no element, which no pooling of codes takes.
    is_covered = all(0 <= n < length for length, pair in zip(lengths, pairs, strict=True) for n in pair)
    return CodeWindows(tuple(map(int, lengths)), tuple(map(int, strides)), pairs, axes) if is_covered else None


def match_spatial(windows: CodeWindows, rank: int) -> tuple[CodeWindows, bool] | None:
    """Return windows over all spatial dimensions, and whether the features are last; None for other windows."""
    for channels_last, axes in ((True, range(1, rank - 1)), (False, range(2, rank))):
        if rank >= 3 and set(windows.axes) <= set(axes):
            parts = {axis: part for axis, *part in zip(windows.axes, *windows[:3], strict=True)}
            lengths, strides, padding = zip(*(parts.get(axis, (1, 1, (0, 0))) for axis in axes), strict=True)
            return CodeWindows(lengths, strides, padding, tuple(axes)), channels_last
    return None


def is_unit_move(graph: ProgramGraph, node: EquationNode) -> bool:
    """Return whether a node only adds or removes dimensions of length 1."""
    if node.name not in MOVES or MOVES[node.name].keeps != "order":
        return False
    if node.name == "reshape" and node.parameters["dimensions"] is not None:
        return False
    before, after = graph.get_shape(node.inputs[0]), graph.get_shape(node.outputs[0])
    return [n for n in before if n != 1] == [n for n in after if n != 1]


def match_mean(graph: ProgramGraph, node: EquationNode) -> tuple[dict[str, Any], list[PointStep]] | None:
    """Return the static arguments of a mean that begins with this sum, and the equations up to its division."""
    value, steps = node.outputs[0], list[PointStep]()
    while (use := graph.match_single_use(value)) is not None:
        follower, place = use
        if is_unit_move(graph, follower):
            steps.append(PointStep(follower, "move", place))
        elif follower.name in ("div", "mul") and (place == 0 or follower.name == "mul"):
            attributes = _match_division(graph, node, follower, place)
            return None if attributes is None else (attributes, [*steps, PointStep(follower, "divide", place)])
        else:
            return None
        value = follower.outputs[0]
    return None


def _match_division(
    graph: ProgramGraph, node: EquationNode, division: EquationNode, place: int
) -> dict[str, Any] | None:
    """Return the static arguments of a mean, or None if a sum is not divided by the number of its terms."""
    if graph.get_shape(division.inputs[place]) != graph.get_shape(division.outputs[0]):
        return None
    shape, divisor = graph.get_shape(node.inputs[0]), division.inputs[1 - place]
    number = read_number(graph, divisor)
    if node.name == "reduce_sum":
        axes = tuple(node.parameters["axes"])
        count = math.prod(shape[axis] for axis in axes)
        return {"axis": axes} if _is_count(number, count, division.name) else None
    windows = match_windows(node.parameters)
    spatial = None if windows is None else match_spatial(windows, len(shape))
    if windows is None or spatial is None:
        return None
    counts_padding = _is_count(number, math.prod(windows.lengths), division.name)
    if not counts_padding and not (division.name == "div" and _counts_windows(graph, divisor, node)):
        return None
    (lengths, strides, padding, _), channels_last = spatial
    attributes = {"window_shape": lengths, "strides": strides, "padding": padding, "channels_last": channels_last}
    return {**attributes, "count_include_pad": counts_padding}


def _is_count(number: float | None, count: int, name: str) -> bool:
    if number is None or not count:
        return False
    # The reciprocal in float32 is within one rounding of the quotient.
    return number == count if name == "div" else abs(number * count - 1) < 2**-23


def _counts_windows(graph: ProgramGraph, divisor: int, node: EquationNode) -> bool:
    """Return whether a divisor is the number of elements in each window of a pooling, without its padding."""
    counter = graph.producers.get(divisor)
    while counter is not None and counter.name in ("broadcast_in_dim", "reshape"):
        counter = graph.producers.get(counter.inputs[0])
    if counter is None or counter.name != "reduce_window_sum" or read_number(graph, counter.inputs[0]) != 1:
        return False
    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    windows, shape = match_windows(node.parameters), graph.get_shape(node.inputs[0])
    lengths = graph.get_shape(counter.inputs[0])
    is_alike = all(counter.parameters[name] == node.parameters[name] for name in names)
    return is_alike and windows is not None and all(lengths[axis] == shape[axis] for axis in windows.axes)


def follow_labels(
    graph: ProgramGraph, node: EquationNode, place: int, labels: tuple[int | None, ...]
) -> tuple[str, tuple[int | None, ...]] | None:
    """Return the kind of a step after a contraction, and the feature dimensions of its result; None for other nodes.

    Args:
        graph: the graph.
        node: the node after the contraction and the steps so far.
        place: the place of the result so far among its operands.
        labels: its feature dimensions.
    """
    before, after = graph.get_shape(node.inputs[place]), graph.get_shape(node.outputs[0])
    # The bias that follows a stop_gradient has a gradient, and would lose it.
    is_kept = keeps_indices(node.name) and is_move(graph, node) and node.name != "stop_gradient"
    if is_kept or node.name == BARRIER:
        return "move", labels
    if node.name == "transpose":
        return "move", tuple(labels[axis] for axis in node.parameters["permutation"])
    if is_unit_move(graph, node):
        kept = iter([label for label, n in zip(labels, before, strict=True) if n != 1])
        return "move", tuple(None if n == 1 else next(kept) for n in after)
    if node.name == "neg":
        return "affine", labels
    is_affine = node.name in ("add", "sub", "mul") or (node.name == "div" and place == 0)
    if not is_affine or before != after:
        return None
    varying = derive_varying(graph, node.inputs[1 - place])
    return ("affine", labels) if all(labels[axis] is not None for axis in varying) else None
