"""A traced program as one list of operations, in which the neighbors of a contraction can be found."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..transform._calls import Call
from ..transform._programs import jaxpr
from ..transform._programs.sites import Address, Site

# Operations that keep the place of each channel, if the last dimension keeps its length.
_MOVES = ("reshape", "convert_element_type", "broadcast_in_dim", "squeeze", "copy", "stop_gradient", "expand_dims")
# Operations that keep each element where it is.
_SAME = ("convert_element_type", "copy", "stop_gradient", "name")
# Of the moves, the ones that change a shape.
_RESHAPES = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims")
# Operations that commute with a positive factor for each channel.
# A pad by another number than 0 does not: the comparison of the results finds that, and drops the factors.
_HOMOGENEOUS = (*_MOVES, "reduce_window_max", "name", "pad", "slice")


class Operation(NamedTuple):
    """An operation with numbers for the arrays that it reads and writes; None for a number in the program."""

    name: str
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    equation: Any
    address: Address


@dataclasses.dataclass
class Graph:
    """The operations of a program, with its calls inlined; loops and branches are single operations.

    Attributes:
        call: the call that was traced.
        makers: the operation that writes each array.
        readers: the operations that read each array.
        leaves: the place of the parameter that an array is.
        shapes: the shape of each array.
        places: the equations that write each array, calls included, each with the place among its results.
        results: the arrays that the program returns.
    """

    call: Call
    makers: dict[int, Operation] = dataclasses.field(default_factory=dict)
    readers: dict[int, list[Operation]] = dataclasses.field(default_factory=dict)
    leaves: dict[int, int] = dataclasses.field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    places: dict[int, list[tuple[Address, int]]] = dataclasses.field(default_factory=dict)
    results: frozenset[int] = frozenset()

    def find_leaf(self, array: int | None, size: int | None) -> int | None:
        """Return the parameter of a size, or of any, that an array is, after moves that keep the order."""
        while array is not None and array not in self.leaves:
            maker = self.makers.get(array)
            if maker is None or maker.name not in _MOVES:
                return None
            array = maker.operands[0]
        if array is None:
            return None
        leaf = self.leaves[array]
        return leaf if size in (None, math.prod(self.call.parameters.arrays[leaf].shape)) else None

    def find_factor(self, array: int | None, size: int) -> int | None:
        """Return the parameter of a size that is a factor of an array."""
        leaf = self.find_leaf(array, size)
        if leaf is not None or array is None:
            return leaf
        maker = self.makers.get(array)
        while maker is not None and maker.name in _MOVES and maker.operands[0] is not None:
            maker = self.makers.get(maker.operands[0])
        if maker is None or maker.name != "mul":
            return None
        # Flax multiplies the scale of a normalization by the reciprocal root of the variance first, and then the
        # inputs.
        leaves = [self.find_factor(operand, size) for operand in maker.operands]
        return next((leaf for leaf in leaves if leaf is not None), None)

    def is_zero(self, operation: Operation, place: int) -> bool:
        """Return whether an operand is the number 0."""
        atom = operation.equation.invars[place]
        return jaxpr.is_literal(atom) and getattr(atom.val, "size", 1) == 1 and not atom.val


def make_graph(call: Call) -> Graph:
    """Return the graph of a traced call."""
    graph, numbers = Graph(call), itertools.count()
    program = call.trace.program
    known = {}
    for place, variable in enumerate(program.invars):
        known[variable] = _add_array(graph, variable, next(numbers))
        if place < len(call.parameters.arrays):
            graph.leaves[known[variable]] = place
    _inline(graph, program, known, (), lambda: next(numbers))
    graph.results = frozenset(known[atom] for atom in program.outvars if not jaxpr.is_literal(atom) and atom in known)
    return graph


def _add_array(graph: Graph, variable: Any, number: int) -> int:
    graph.shapes[number] = tuple(variable.aval.shape)
    return number


def _inline(graph: Graph, program: Any, known: dict[Any, Any], address: Address, count: Callable[[], int]) -> None:
    """Add the operations of a program; `known` has the number of each array."""
    for index, equation in enumerate(program.eqns):
        here = (*address, index)
        operands = tuple(None if jaxpr.is_literal(atom) else known.get(atom) for atom in equation.invars)
        name = jaxpr.find_name(equation)
        if name in (*jaxpr.CALLS, jaxpr.REMAT):
            body = jaxpr.read_call(equation).program
            inner = {v: n for v, n in zip(body.invars, operands, strict=True) if n is not None}
            _inline(graph, body, inner, (*here, 0), count)
            results = [None if jaxpr.is_literal(atom) else inner.get(atom) for atom in body.outvars]
            known |= {v: n for v, n in zip(equation.outvars, results, strict=True) if n is not None}
            _add_places(graph, here, results)
            continue
        results = tuple(_add_array(graph, variable, count()) for variable in equation.outvars)
        known |= zip(equation.outvars, results, strict=True)
        _add_places(graph, here, results)
        operation = Operation(name, operands, results, equation, here)
        graph.makers |= dict.fromkeys(results, operation)
        for operand in operands:
            if operand is not None:
                graph.readers.setdefault(operand, []).append(operation)


def _add_places(graph: Graph, address: Address, results: Iterable[int | None]) -> None:
    for place, number in enumerate(results):
        if number is not None:
            graph.places.setdefault(number, []).append((address, place))


class Source(NamedTuple):
    """What makes the channels of an array, so that a factor for each channel can be put into parameters.

    Attributes:
        array: the array after the last operation that mixes channels, or None if there is no such place.
        site: the contraction whose outputs the channels are, or None.
        scale: the parameter that multiplies them, or None.
        offsets: the parameters that are added to them.
        reason: why factors cannot be put into parameters, or "".
    """

    array: int | None = None
    site: Site | None = None
    scale: int | None = None
    offsets: tuple[int, ...] = ()
    reason: str = ""


def find_source(graph: Graph, array: int | None) -> Source:
    """Return what makes the channels of an array, its last dimension."""
    offsets: list[int] = []
    size = None if array is None else graph.shapes[array][-1:]
    while array is not None and size:
        operation = graph.makers.get(array)
        if operation is None:
            return Source(reason="inputs of the function")
        site = graph.call.analysis.sites.get(operation.address)
        if site is not None and site.weight is not None:
            return Source(array, site, None, tuple(offsets))
        if graph.shapes[array][-1:] != size:
            return Source(reason="channels that are reshaped")
        step = _step_back(graph, operation, size[0])
        if isinstance(step, Source):
            return step._replace(array=array, offsets=tuple(offsets))
        if step is None:
            return Source(reason=f"inputs that {operation.name} computes")
        array, offset = step
        offsets += [] if offset is None else [offset]
    return Source(reason="inputs without channels")


def _step_back(graph: Graph, operation: Operation, size: int) -> Source | tuple[int | None, int | None] | None:
    """Return the operand that has the channels, with a parameter that was added to it; or what multiplies them."""
    operands = operation.operands
    if operation.name == "mul":
        factors = [graph.find_factor(operand, size) for operand in operands]
        leaf = next((factor for factor in factors if factor is not None), None)
        return None if leaf is None else Source(scale=leaf)
    if operation.name == "add":
        for place in range(2):
            leaf = graph.find_leaf(operands[place], size)
            if leaf is not None:
                return operands[1 - place], leaf
        return None
    if operation.name == "max":
        # Only a relu: max(x, c) / s is not max(x / s, c) for any other c.
        zeros = [place for place in range(2) if graph.is_zero(operation, place)]
        return (operands[1 - zeros[0]], None) if zeros else None
    return (operands[0], None) if operation.name in _HOMOGENEOUS else None


def find_bias(graph: Graph, site: Site, dimensions: Sequence[int]) -> int | None:
    """Return the parameter that is added to the outputs of a contraction and to nothing else, or None.

    Args:
        graph: the program.
        site: the contraction.
        dimensions: the dimensions of its result that are outputs.
    """
    operation = find_operation(graph, site)
    array = None if operation is None else operation.results[0]
    start = array
    while array is not None:
        readers = graph.readers.get(array, [])
        # Another reader would get outputs without the shift.
        if len(readers) != 1:
            return None
        (reader,) = readers
        if reader.name == "add":
            other = [operand for operand in reader.operands if operand != array]
            # A bias that something else reads, too, would shift that as well.
            if len(other) != 1 or start is None or len(graph.readers.get(other[0], [])) != 1:  # type: ignore[arg-type]
                return None
            shape = [n if place in dimensions else 1 for place, n in enumerate(graph.shapes[start])]
            size = math.prod(shape)
            leaf = graph.find_leaf(other[0], size)
            if leaf is None:
                return None
            # Each element must be added to the output with its index: the indices take the same moves.
            outputs = np.broadcast_to(np.arange(size).reshape(shape), graph.shapes[start])
            source = next(number for number, place in graph.leaves.items() if place == leaf)
            indices = np.arange(size).reshape(graph.shapes[source])
            sides = move_indices(graph, array, start, outputs), move_indices(graph, other[0], source, indices)
            is_same = sides[0] is not None and sides[1] is not None and sides[1].ndim == sides[0].ndim
            is_same = is_same and np.array_equal(sides[0], np.broadcast_to(sides[1], sides[0].shape))  # type: ignore[arg-type, union-attr]
            return leaf if is_same else None
        array = reader.results[0] if reader.name in _MOVES else None
    return None


def find_addend(graph: Graph, site: Site) -> int | None:
    """Return the array of the same shape that is added to the outputs of a contraction, and known before it; or None.

    In a residual network this is what goes around the contraction. A bias may be added first.
    """
    operation = find_operation(graph, site)
    array = None if operation is None else operation.results[0]
    while array is not None and array not in graph.results:
        readers = graph.readers.get(array, [])
        if len(readers) != 1 or readers[0].name not in (*_SAME, "add"):
            return None
        (reader,) = readers
        if graph.shapes[reader.results[0]] != graph.shapes[array]:
            return None
        others = [operand for operand in reader.operands if operand not in (array, None)]
        other = others[0] if reader.name == "add" and others else None
        if other is not None and graph.shapes[other] == graph.shapes[array] and not _is_parameter(graph, other):
            assert operation is not None
            # The equations that write it have smaller addresses if they come first.
            addresses = [address for address, _ in graph.places.get(other, ())]
            return other if addresses and max(addresses) < operation.address else None
        array = reader.results[0]
    return None


def _is_parameter(graph: Graph, array: int) -> bool:
    """Return whether an array is a parameter, after moves of its elements."""
    maker: Operation | None = None
    number: int | None = array
    while number is not None and number not in graph.leaves:
        maker = graph.makers.get(number)
        if maker is None or maker.name not in _MOVES:
            return False
        number = maker.operands[0]
    return number is not None


def move_indices(graph: Graph, array: int | None, source: int, indices: np.ndarray) -> np.ndarray | None:
    """Return an array of indices after the moves from one array to another; None if something else reads it."""
    moves = []
    while array is not None and array != source:
        moves.append(graph.makers[array])
        array = moves[-1].operands[0]
        if array is not None and len(graph.readers[array]) > 1:
            return None
    # The equations themselves move the indices: no rule for each kind of reshape is needed.
    for move in reversed(moves):
        if move.name in _RESHAPES:
            (result,) = jaxpr.evaluate(move.equation, [indices])
            indices = np.asarray(result)
    return indices


def find_levels(graph: Graph, sites: Iterable[Site]) -> dict[str, int]:
    """Return for each contraction how many others of them its inputs depend on, one after the other."""
    names, levels, depths = {site.address: site.name for site in sites}, {}, dict[int, int]()
    for operation in _list_operations(graph):
        depth = max((depths.get(operand, 0) for operand in operation.operands if operand is not None), default=0)
        if operation.address in names:
            levels[names[operation.address]] = depth
            depth += 1
        depths |= dict.fromkeys(operation.results, depth)
    return levels


def find_operation(graph: Graph, site: Site) -> Operation | None:
    """Return the operation of a contraction, or None if it is in a loop."""
    return next((op for op in _list_operations(graph) if op.address == site.address), None)


def _list_operations(graph: Graph) -> Iterable[Operation]:
    # An operation with several results makes each of them, and is listed once.
    return {id(operation): operation for operation in graph.makers.values()}.values()


def find_input(graph: Graph, site: Site) -> int | None:
    """Return the array that a contraction with a parameter reads, before moves that keep the channels last."""
    operation = find_operation(graph, site)
    assert site.weight is not None
    array = None if operation is None else operation.operands[1 - site.weight]
    while array is not None:
        maker = graph.makers.get(array)
        if maker is None or maker.name not in _MOVES or not maker.operands or maker.operands[0] is None:
            return array
        if graph.shapes[maker.operands[0]][-1:] != graph.shapes[array][-1:]:
            return array
        array = maker.operands[0]
    return None
