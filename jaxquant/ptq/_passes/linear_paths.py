"""Paths from the outputs of one contraction to the inputs of others, through operations that keep channels linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._program import jaxpr, moves
from ..._program.graph import EquationNode
from ..._program.sites import Site
from .neighbors import CallGraph, move_indices


class Channels(NamedTuple):
    """Runs of channels in an array: `run` neighbors along a dimension.

    Attributes:
        array: the number of the array in the graph.
        dimension: the dimension.
        run: the length of the runs, which divides that of the dimension.
    """

    array: int
    dimension: int
    run: int


class Offset(NamedTuple):
    """A parameter that is added to the channels.

    Attributes:
        leaf: the place of the parameter.
        array: the number of the array that is added, in the graph.
        channels: the channels to which it is added.
    """

    leaf: int
    array: int
    channels: Channels


class Reader(NamedTuple):
    """A contraction that sums the channels.

    Attributes:
        site: the contraction.
        leaf: the place of its parameter.
        axis: the axis of the parameter that it sums, with runs of channels.
    """

    site: Site
    leaf: int
    axis: int


class Paths(NamedTuple):
    """Where the outputs of a contraction go, if that is only into other contractions and in a linear way.

    Attributes:
        leaf: the place of the parameter whose outputs the channels are.
        axis: the axis of the parameter with the channels.
        run: the length of runs of channels that stay together everywhere.
        offsets: what is added to the channels.
        readers: the contractions that sum them.
    """

    leaf: int
    axis: int
    run: int
    offsets: tuple[Offset, ...]
    readers: tuple[Reader, ...]


def follow_outputs(graph: CallGraph, site: Site) -> Paths | str:
    """Return where the outputs of a contraction go, or why they cannot be mixed there."""
    operation = graph.program.find_node(site.address)
    if operation is None or site.lengths:
        return "a contraction in a loop"
    start = _find_start(graph, site, operation)
    if isinstance(start, str):
        return start
    channels, leaf, axis = start
    offsets: list[Offset] = []
    readers: list[Reader] = []
    pending, runs = [channels], [channels.run]
    while pending:
        channels = pending.pop()
        if channels.array in graph.program.results:
            return "outputs of the function"
        for reader, _ in graph.program.uses.get(channels.array, []):
            step = _follow(graph, channels, reader)
            if isinstance(step, str):
                return step
            for item in step:
                {Channels: pending, Offset: offsets, Reader: readers}[type(item)].append(item)  # type: ignore[attr-defined]
                runs += [item.run] if isinstance(item, Channels) else []
    if not readers:
        return "nothing contracts its outputs"
    # A rotation of runs that are neighbors everywhere commutes with each reshape between the two contractions.
    lengths = [graph.call.parameters.arrays[reader.leaf].shape[reader.axis] for reader in readers]
    return Paths(leaf, axis, math.gcd(*runs, *lengths), tuple(offsets), tuple(readers))


def _find_start(graph: CallGraph, site: Site, operation: EquationNode) -> tuple[Channels, int, int] | str:
    """Return the channels of a contraction's result, and the parameter and its axis that they are."""
    assert site.weight is not None
    (result,) = operation.outputs
    shape, parameters = graph.program.find_shape(result), site.equation.params
    numbers = parameters["dimension_numbers"]
    if site.operation == "conv_general_dilated":
        if parameters["feature_group_count"] > 1 or parameters["batch_group_count"] > 1:
            return "a convolution with groups"
        dimension, weight = numbers.out_spec[1], numbers.rhs_spec[0]
    else:
        (summed, batch), count = numbers, len(numbers[1][0])
        rank = len(site.equation.invars[site.weight].aval.shape)
        free = [d for d in range(rank) if d not in (*summed[site.weight], *batch[site.weight])]
        if not free:
            return "a contraction without outputs of its own"
        # Of several axes of outputs the innermost, whose channels stay neighbors when a reshape merges them.
        weight = free[-1]
        dimension = count + len(free) - 1 if site.weight == 0 else len(shape) - 1
    axis = find_axis(graph, site, weight)
    if isinstance(axis, str):
        return axis
    leaf = site.views[0].leaf
    return Channels(result, dimension, graph.call.parameters.arrays[leaf].shape[axis]), leaf, axis


def find_axis(graph: CallGraph, site: Site, dimension: int) -> int | str:
    """Return the innermost axis of the parameter in a dimension of a contraction's operand; or why there is none."""
    if len(site.views) != 1:
        return "parameters that are joined in one array"
    (view,) = site.views
    uses = [other for other in graph.call.analysis.sites.values() if view.leaf in other.leaves]
    source = graph.find_value(view.leaf)
    if len(uses) > 1 or len(graph.program.uses.get(source, [])) > 1:
        return "a parameter with several uses"
    if any(step[0] == "rev" for step in view.history if isinstance(step, tuple)):
        return "a parameter in reverse order"
    atoms = [atom for atom in view.dimensions[dimension] if atom.size > 1]
    shape = graph.call.parameters.arrays[view.leaf].shape
    if not atoms or atoms[-1].axis is None or not atoms[-1].is_whole or atoms[-1].size != shape[atoms[-1].axis]:
        return "a part of a parameter, or a parameter whose axes are split"
    return atoms[-1].axis


def _follow(graph: CallGraph, channels: Channels, operation: EquationNode) -> list[Any] | str:
    """Return where channels are in the result of an operation, and what it adds to them or contracts them with."""
    array, dimension, run = channels
    if len(operation.outputs) != 1 or operation.inputs.count(array) != 1:
        return f"{operation.name} reads its outputs"
    place, (result,) = operation.inputs.index(array), operation.outputs
    shape, parameters = graph.program.find_shape(result), operation.equation.params
    if moves.keeps_place(operation.name):
        return [Channels(result, dimension, run)]
    if operation.name == "transpose":
        return [Channels(result, parameters["permutation"].index(dimension), run)]
    if operation.name == "broadcast_in_dim":
        return [Channels(result, parameters["broadcast_dimensions"][dimension], run)]
    if operation.name == "reduce_sum" and dimension not in parameters["axes"]:
        return [Channels(result, dimension - sum(axis < dimension for axis in parameters["axes"]), run)]
    if moves.keeps_order(operation.name):
        return _align(graph.program.find_shape(array), channels, result, shape)
    if operation.name in ("mul", "div") and (place == 0 or operation.name == "mul"):
        if _is_constant(graph, operation, 1 - place, dimension):
            return [Channels(result, dimension, run)]
        return f"{operation.name} multiplies its outputs by different numbers"
    if operation.name == "add":
        return _add_offset(graph, operation, channels, place)
    if operation.name in ("dot_general", "conv_general_dilated"):
        return _contract(graph, channels, operation, place)
    return f"{operation.name} reads its outputs"


def _align(before: Sequence[int], channels: Channels, result: int, after: Sequence[int]) -> list[Any] | str:
    """Return the dimension of a reshaped array whose elements have the distance that those of the channels have."""
    distance = math.prod(before[channels.dimension + 1 :])
    for dimension, size in enumerate(after):
        if size > 1 and math.prod(after[dimension + 1 :]) == distance:
            return [Channels(result, dimension, math.gcd(channels.run, size))]
    return "a reshape splits its outputs"


def _is_constant(graph: CallGraph, operation: EquationNode, place: int, dimension: int) -> bool:
    """Return whether an operand has the same number at all indices of a dimension."""
    atom = operation.equation.invars[place]
    lengths = jaxpr.read_shape(atom)
    if jaxpr.is_literal(atom) or math.prod(lengths) == 1 or lengths[dimension] == 1:
        return True
    array = operation.inputs[place]
    maker = graph.program.producers.get(array)
    if maker is None or maker.name != "broadcast_in_dim":
        return False
    axes, shape = maker.equation.params["broadcast_dimensions"], jaxpr.read_shape(maker.equation.invars[0])
    return dimension not in axes or shape[axes.index(dimension)] == 1


def _add_offset(graph: CallGraph, operation: EquationNode, channels: Channels, place: int) -> list[Any] | str:
    """Return the channels of a sum of them and a parameter."""
    array = operation.inputs[1 - place]
    leaf = graph.find_leaf(array, None)
    if leaf is None:
        return "add reads its outputs"
    (result,) = operation.outputs
    return [Channels(result, *channels[1:]), Offset(leaf, array, channels)]


def list_runs(graph: CallGraph, offset: Offset, run: int) -> np.ndarray | None:
    """Return the places of the elements of a parameter that are added to each run of channels, [runs, run].

    None if they are not all of its elements, each in one run, or if something else reads the parameter.
    """
    source = graph.find_value(offset.leaf)
    shape = graph.program.find_shape(source)
    indices = move_indices(graph, offset.array, source, np.arange(math.prod(shape)).reshape(shape))
    if indices is None or len(graph.program.uses[offset.array]) > 1:
        return None
    indices = np.broadcast_to(indices, graph.program.find_shape(offset.channels.array))
    # What is added is broadcast, so that each run occurs once for every other index of the array.
    rows = np.unique(np.moveaxis(indices, offset.channels.dimension, -1).reshape(-1, run), axis=0)
    return rows if np.array_equal(np.sort(rows.ravel()), np.arange(math.prod(shape))) else None


def _contract(graph: CallGraph, channels: Channels, operation: EquationNode, place: int) -> list[Any] | str:
    """Return the channels of a contraction that does not sum them, or the contraction as a reader."""
    site = graph.call.analysis.sites.get(operation.address)
    numbers = operation.equation.params["dimension_numbers"]
    if operation.name == "conv_general_dilated":
        is_channel = site is not None and site.weight == 1 and place == 0 and channels.dimension == numbers.lhs_spec[1]
        if not is_channel or operation.equation.params["feature_group_count"] > 1:
            return "a convolution of other dimensions, or with groups"
        return _read_with(graph, site, numbers.rhs_spec[1])
    (summed, batch), count = numbers, len(numbers[1][0])
    if channels.dimension in batch[place]:
        return "a product of matrices for each of its outputs"
    if channels.dimension in summed[place]:
        if site is None or site.weight != 1 - place:
            return "a product with other activations sums its outputs"
        return _read_with(graph, site, summed[1 - place][summed[place].index(channels.dimension)])
    rank = len(graph.program.find_shape(channels.array))
    free = [d for d in range(rank) if d not in (*summed[place], *batch[place])]
    others = len(jaxpr.read_shape(operation.equation.invars[0])) - len(summed[0]) - count if place == 1 else 0
    (result,) = operation.outputs
    return [Channels(result, count + others + free.index(channels.dimension), channels.run)]


def _read_with(graph: CallGraph, site: Site | None, dimension: int) -> list[Any] | str:
    assert site is not None
    axis = find_axis(graph, site, dimension)
    if isinstance(axis, str):
        return f"{site.name}: {axis}"
    return [Reader(site, site.views[0].leaf, axis)]
