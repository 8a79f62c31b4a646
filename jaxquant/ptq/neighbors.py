"""The neighbors of a contraction: what makes the channels of its inputs, and what is added to its outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._program import jaxpr, moves
from .._program.analysis import Site
from .._program.graph import EquationNode, ProgramGraph, make_graph

if TYPE_CHECKING:
    from ..transform.session import TracedCall

# Operations besides those that keep the order of elements that commute with a positive factor for each channel.
# A pad by another number than 0 does not: the comparison of the results finds that, and drops the factors.
_HOMOGENEOUS = ("reduce_window_max", "pad", "slice")


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """The program of a call as a graph, in which the parameters are known.

    Attributes:
        call: the call that was traced.
        program: its program, with calls inlined; loops and branches are single equations.
        leaves: for the value of each parameter the index of the parameter.
    """

    call: TracedCall
    program: ProgramGraph
    leaves: dict[int, int]

    def get_value(self, leaf: int) -> int:
        """Return the value of a parameter."""
        return next(value for value, place in self.leaves.items() if place == leaf)

    def match_leaf(self, value: int, size: int | None) -> int | None:
        """Return the parameter of a size, or of any, that a value is, after moves that keep the order."""
        while value not in self.leaves:
            maker = self.program.producers.get(value)
            if maker is None or not moves.keeps_order(maker.name):
                return None
            value = maker.inputs[0]
        leaf = self.leaves[value]
        return leaf if size in (None, math.prod(self.call.parameters.arrays[leaf].shape)) else None

    def match_factor(self, value: int, size: int) -> int | None:
        """Return the parameter of a size that is a factor of a value."""
        leaf = self.match_leaf(value, size)
        if leaf is not None:
            return leaf
        maker = self.program.producers.get(value)
        while maker is not None and moves.keeps_order(maker.name):
            maker = self.program.producers.get(maker.inputs[0])
        if maker is None or maker.name != "mul":
            return None
        # Flax multiplies the scale of a normalization by the reciprocal root of the variance first, and then the
        # inputs.
        leaves = [self.match_factor(operand, size) for operand in maker.inputs]
        return next((leaf for leaf in leaves if leaf is not None), None)


def make_call_graph(call: TracedCall) -> CallGraph:
    """Return the graph of a traced call."""
    body = jaxpr.Body(call.trace.program, call.trace.constants)
    program = make_graph(body, lambda equation, _: jaxpr.read_name(equation) in (*jaxpr.CALLS, jaxpr.REMAT))
    places = range(len(call.parameters.arrays))
    return CallGraph(call, program, dict(zip(program.inputs, places, strict=False)))


def _is_zero(node: EquationNode, place: int) -> bool:
    """Return whether an operand is the number 0."""
    atom = node.equation.invars[place]
    return jaxpr.is_literal(atom) and getattr(atom.val, "size", 1) == 1 and not atom.val  # type: ignore[union-attr]


class Source(NamedTuple):
    """What makes the channels of an array, so that a factor for each channel can be put into parameters.

    Attributes:
        array: the array after the last operation that mixes channels, or None if there is no such place.
        site: the contraction with these channels as outputs, or None.
        scale: the parameter that multiplies them, or None.
        offsets: the parameters that are added to them.
        reason: why factors cannot be put into parameters, or "".
    """

    array: int | None = None
    site: Site | None = None
    scale: int | None = None
    offsets: tuple[int, ...] = ()
    reason: str = ""


def match_source(graph: CallGraph, value: int | None, *, is_alone: bool = False) -> Source:
    """Return what makes the channels of a value, its last dimension.

    Args:
        graph: the program.
        value: the value, or None if it is not known.
        is_alone: whether the value, and those between it and its source, must have no other reader.
    """
    program, offsets = graph.program, list[int]()
    size = () if value is None else program.get_shape(value)[-1:]
    while value is not None and size:
        node = program.producers.get(value)
        if node is None:
            return Source(reason="inputs of the function")
        if is_alone and program.match_single_use(value) is None:
            return Source(reason="inputs that something else reads")
        site = graph.call.analysis.sites.get(node.address)
        if site is not None and site.weight is not None:
            return Source(value, site, None, tuple(offsets))
        if program.get_shape(value)[-1:] != size:
            return Source(reason="channels that are reshaped")
        step = _step_back(graph, node, size[0])
        if isinstance(step, Source):
            array = value if step.array is None else step.array
            return step._replace(array=array, offsets=(*offsets, *step.offsets))
        if step is None:
            return Source(reason=f"inputs that {node.name} computes")
        value, offset = step
        offsets += [] if offset is None else [offset]
    return Source(reason="inputs without channels")


def _step_back(graph: CallGraph, node: EquationNode, size: int) -> Source | tuple[int, int | None] | None:
    """Return the operand that has the channels, with a parameter that was added to it; or their source.

    The source is a parameter that multiplies them, without an array; or the source of a factor, with its array.
    """
    operands = node.inputs
    if node.name == "mul":
        factors = [graph.match_factor(operand, size) for operand in operands]
        leaf = next((factor for factor in factors if factor is not None), None)
        if leaf is not None:
            return Source(scale=leaf)
        return _match_linear_factor(graph, operands)
    if node.name == "add":
        for place in range(2):
            leaf = graph.match_leaf(operands[place], size)
            if leaf is not None:
                return operands[1 - place], leaf
        return None
    if node.name == "max":
        # Only a relu: max(x, c) / s is not max(x / s, c) for any other c.
        zeros = [place for place in range(2) if _is_zero(node, place)]
        return (operands[1 - zeros[0]], None) if zeros else None
    return (operands[0], None) if moves.keeps_order(node.name) or node.name in _HOMOGENEOUS else None


def _match_linear_factor(graph: CallGraph, operands: Sequence[int]) -> Source | None:
    """Return the source of the operand of a product whose channels can take the factors of the product, or None.

    In a gated MLP, activate(x @ gate) * (x @ up), that is x @ up: parameters make it, and nothing else reads it, nor
    what lies between it and the parameters.
    """
    sources = (match_source(graph, operand, is_alone=True) for operand in operands)
    return next((source for source in sources if not source.reason), None)


def match_bias(graph: CallGraph, site: Site, dimensions: Sequence[int]) -> int | None:
    """Return the parameter that is added to the outputs of a contraction and to nothing else, or None.

    Args:
        graph: the program.
        site: the contraction.
        dimensions: the dimensions of its result that are outputs.
    """
    program, node = graph.program, graph.program.get_node(site.address)
    if node is None:
        return None
    value = start = node.outputs[0]
    # Another reader would get outputs without the shift.
    while len(uses := program.uses.get(value, [])) == 1:
        reader = uses[0][0]
        if reader.name == "add":
            other = [operand for operand in reader.inputs if operand != value]
            # A bias that something else reads, too, would shift that as well.
            if len(other) != 1 or len(program.uses[other[0]]) != 1:
                return None
            shape = [n if place in dimensions else 1 for place, n in enumerate(program.get_shape(start))]
            size = math.prod(shape)
            leaf = graph.match_leaf(other[0], size)
            if leaf is None:
                return None
            # Each element must be added to the output with its index: the indices take the same moves.
            outputs = np.broadcast_to(np.arange(size).reshape(shape), program.get_shape(start))
            source = graph.get_value(leaf)
            indices = np.arange(size).reshape(program.get_shape(source))
            sides = move_indices(graph, value, start, outputs), move_indices(graph, other[0], source, indices)
            is_same = sides[0] is not None and sides[1] is not None and sides[1].ndim == sides[0].ndim
            is_same = is_same and np.array_equal(sides[0], np.broadcast_to(sides[1], sides[0].shape))  # type: ignore[arg-type, union-attr]
            return leaf if is_same else None
        if not moves.keeps_order(reader.name):
            return None
        value = reader.outputs[0]
    return None


def match_addend(graph: CallGraph, site: Site) -> int | None:
    """Return the value of the same shape that is added to the outputs of a contraction, and known before it; or None.

    In a residual network this is what goes around the contraction. A bias may be added first.
    """
    program, node = graph.program, graph.program.get_node(site.address)
    if node is None:
        return None
    value = node.outputs[0]
    while (use := program.match_single_use(value)) is not None:
        reader, place = use
        if not moves.keeps_indices(reader.name) and reader.name != "add":
            return None
        if program.get_shape(reader.outputs[0]) != program.get_shape(value):
            return None
        other = reader.inputs[1 - place] if reader.name == "add" else None
        is_addend = other is not None and other not in program.constants and graph.match_leaf(other, None) is None
        if other is not None and is_addend and program.get_shape(other) == program.get_shape(value):
            # The equations that write it have smaller addresses if they come first.
            addresses = [address for address, _ in program.list_writers(other)]
            return other if addresses and max(addresses) < node.address else None
        value = reader.outputs[0]
    return None


def move_indices(graph: CallGraph, value: int, source: int, indices: np.ndarray) -> np.ndarray | None:
    """Return an array of indices after the moves from one value to another; None if something else reads it."""
    nodes = []
    while value != source:
        nodes.append(graph.program.producers[value])
        value = nodes[-1].inputs[0]
        if len(graph.program.uses[value]) > 1:
            return None
    # The equations themselves move the indices: no rule for each kind of reshape is needed.
    for node in reversed(nodes):
        if not moves.keeps_indices(node.name):
            (result,) = jaxpr.evaluate(node.equation, [indices])
            indices = np.asarray(result)
    return indices


def count_levels(graph: CallGraph, sites: Iterable[Site]) -> dict[str, int]:
    """Return for each contraction how many others of them its inputs depend on, one after the other."""
    names, levels, depths = {site.address: site.name for site in sites}, {}, dict[int, int]()
    for node in graph.program.nodes:
        depth = max((depths.get(operand, 0) for operand in node.inputs), default=0)
        if node.address in names:
            levels[names[node.address]] = depth
            depth += 1
        depths |= dict.fromkeys(node.outputs, depth)
    return levels


def match_input(graph: CallGraph, site: Site) -> int | None:
    """Return the value that a contraction with a parameter reads, before moves that keep the channels last.

    None for a contraction in a loop.
    """
    program, node = graph.program, graph.program.get_node(site.address)
    assert site.weight is not None
    if node is None:
        return None
    value = node.inputs[1 - site.weight]
    while (maker := program.producers.get(value)) is not None and moves.keeps_order(maker.name):
        before = maker.inputs[0]
        if before in program.constants or program.get_shape(before)[-1:] != program.get_shape(value)[-1:]:
            return value
        value = before
    return value
