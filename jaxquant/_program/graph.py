"""The equations of a program and of the calls in it as one graph, in which each value has a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import AbstractValue

from . import jaxpr
from .jaxpr import Address, Body, Equation


@dataclasses.dataclass(frozen=True, eq=False)
class EquationNode:
    """An equation at one address of the program.

    Attributes:
        address: where it is.
        equation: the equation.
        inputs: the values of its operands.
        outputs: the values of its results.
        scope: the name scopes around it.
        where: its file, line and function, or the call's around it if JAX's own function computes it.
    """

    address: Address
    equation: Equation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str
    where: str

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return jaxpr.read_name(self.equation)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the equation."""
        return self.equation.params

    def describe_node(self) -> str:
        """Return its name and its line of source."""
        return f"{self.name} at {self.where}"


@dataclasses.dataclass(eq=False)
class ProgramGraph:
    """A program with its calls inlined.

    Attributes:
        nodes: the equations that are used, in program order.
        avals: the shape and the dtype of each value.
        constants: the values that are numbers in the program or arrays that it closes over.
        inputs: the values of the operands of the program.
        results: the values of its results.
        calls: the equations that were inlined.
        producers: the node that computes each value, other than inputs and constants.
        uses: for each value, the nodes that read it, with the place of the operand.
        by_address: the nodes by their addresses.
        varying: the dimensions along which values vary, as far as they were looked up.
    """

    nodes: list[EquationNode] = dataclasses.field(default_factory=list)
    avals: list[Any] = dataclasses.field(default_factory=list)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    inputs: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)
    calls: list[EquationNode] = dataclasses.field(default_factory=list)
    producers: dict[int, EquationNode] = dataclasses.field(default_factory=dict)
    uses: dict[int, list[tuple[EquationNode, int]]] = dataclasses.field(default_factory=dict)
    by_address: dict[Address, EquationNode] = dataclasses.field(default_factory=dict)
    varying: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)

    def add_value(self, aval: AbstractValue) -> int:
        """Return the number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def get_shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of a value."""
        return tuple(self.avals[value].shape)

    def match_single_use(self, value: int) -> tuple[EquationNode, int] | None:
        """Return the only node that reads a value, with the place of the operand; None if there are others."""
        uses = self.uses.get(value, [])
        return uses[0] if len(uses) == 1 and value not in self.results else None

    def get_node(self, address: Address) -> EquationNode | None:
        """Return the node at an address; None for an equation that is unused, or in a loop or a branch."""
        return self.by_address.get(address)

    def list_writers(self, value: int) -> list[tuple[Address, int]]:
        """Return the equations that give a value, calls included, each with its number among their results."""
        return [
            (node.address, number)
            for node in (*self.nodes, *self.calls)
            for number, output in enumerate(node.outputs)
            if output == value
        ]

    def depends_on(self, values: Sequence[int]) -> set[int]:
        """Return the values that depend on some values, which are among them."""
        dependent = set(values)
        for node in self.nodes:
            if not dependent.isdisjoint(node.inputs):
                dependent.update(node.outputs)
        return dependent


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """Where a body is: its address, the name scopes around it, and the line of source of the call around it."""

    address: Address = ()
    scope: str = ""
    where: str = ""


def make_graph(body: Body, is_inlined: Callable[[Equation, Address], bool]) -> ProgramGraph:
    """Return the graph of a program.

    Args:
        body: the program.
        is_inlined: a function of an equation and its address, which returns whether the body of a call is inlined.
    """
    graph = ProgramGraph()
    graph.inputs = [graph.add_value(variable.aval) for variable in body.program.invars]
    graph.results = _add_body(graph, body, graph.inputs, _Surroundings(), is_inlined)
    for node in graph.nodes:
        graph.by_address[node.address] = node
        graph.producers |= dict.fromkeys(node.outputs, node)
        for operand, value in enumerate(node.inputs):
            graph.uses.setdefault(value, []).append((node, operand))
    return graph


def _add_body(
    graph: ProgramGraph, body: Body, inputs: Sequence[int], around: _Surroundings,
    is_inlined: Callable[[Equation, Address], bool],
) -> list[int]:  # fmt: skip
    """Add the equations of a body, and return the values of its results."""
    program, values = body.program, dict[Any, int]()
    for variable, constant in zip(program.constvars, body.constants, strict=True):
        values[variable] = graph.add_value(variable.aval)
        graph.constants[values[variable]] = constant
    values |= zip(program.invars, inputs, strict=True)

    def read(atom: Any) -> int:
        if not jaxpr.is_literal(atom):
            return values[atom]
        value = graph.add_value(atom.aval)
        graph.constants[value] = atom.val
        return value

    for index in jaxpr.list_live(program):
        equation, address = program.eqns[index], (*around.address, index)
        operands = tuple(read(atom) for atom in equation.invars)
        scope = "/".join(part for part in (around.scope, jaxpr.read_scope(equation)) if part)
        where = jaxpr.locate(equation) or around.where
        if is_inlined(equation, address):
            inner = _Surroundings((*address, 0), scope, where)
            results = _add_body(graph, jaxpr.read_call(equation), operands, inner, is_inlined)
            graph.calls.append(EquationNode(address, equation, operands, tuple(results), scope, where))
        else:
            results = [graph.add_value(variable.aval) for variable in equation.outvars]
            graph.nodes.append(EquationNode(address, equation, operands, tuple(results), scope, where))
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in program.outvars]
