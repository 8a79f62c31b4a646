"""The values of a program that depend on parameters and constants only: where they vary, and what they are.

They are computed apart from the program, in the same way wherever they are needed: an operation that the compiler could
round in another way from one program to the next is replaced by one that is rounded once. So the codes of a kernel that
is multiplied by such values, and biases in steps, are the same when they are converted, trained and served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core import checks
from ..._kernels import affine, barriers
from ..._kernels.barriers import replace_value
from ..._program import jaxpr, moves
from ..._program.graph import EquationNode, ProgramGraph

# Operations in which each element of the result depends only on the same element of the operands.
_ELEMENTWISE = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "max", "min", "rsqrt", "sqrt", "square", "integer_pow", "exp", "abs"),
        *("pow", "log", "tanh", "logistic"),
    }
)


def read_number(graph: ProgramGraph, value: int) -> float | None:
    """Return the number that all elements of a value are, if the program says it."""
    if value in graph.constants:
        constant = graph.constants[value]
        is_number = np.size(constant) == 1 and not checks.is_traced(constant)
        return float(np.asarray(constant).reshape(())) if is_number else None
    node = graph.producers.get(value)
    if node is not None and moves.keeps_order(node.name):
        return read_number(graph, node.inputs[0])
    return None


def derive_varying(graph: ProgramGraph, value: int) -> frozenset[int]:
    """Return the dimensions of a value along which its elements may differ."""
    if value not in graph.varying:
        graph.varying[value] = _derive_varying(graph, value)
    return graph.varying[value]


def _derive_varying(graph: ProgramGraph, value: int) -> frozenset[int]:
    shape, node = graph.get_shape(value), graph.producers.get(value)
    wide = frozenset(axis for axis, length in enumerate(shape) if length != 1)
    if read_number(graph, value) is not None:
        return frozenset()
    if node is None:
        return wide
    if node.name == "broadcast_in_dim":
        places = node.parameters["broadcast_dimensions"]
        return frozenset(places[axis] for axis in derive_varying(graph, node.inputs[0])) & wide
    if node.name in _ELEMENTWISE or moves.keeps_indices(node.name):
        return frozenset().union(*(derive_varying(graph, operand) for operand in node.inputs)) & wide
    return wide


class StaticValues:
    """The values of a graph that depend on parameters and constants only, with their derivatives.

    Args:
        graph: the graph.
        inputs: the arrays of inputs of the graph: parameters.
    """

    def __init__(self, graph: ProgramGraph, inputs: Mapping[int, Any]) -> None:
        self.graph = graph
        self._known: dict[int, Any] = dict(inputs)

    def read_value(self, value: int) -> jax.Array:
        """Return a value."""
        if value in self.graph.constants:
            return jnp.asarray(self.graph.constants[value], self.graph.avals[value].dtype)
        if value not in self._known:
            node = self.graph.producers[value]
            operands = [self.read_value(operand) for operand in node.inputs]
            results = [_round_once(node, operands)] if _is_rounded(node) else jaxpr.evaluate(node.equation, operands)
            self._known |= zip(node.outputs, results, strict=True)
        return self._known[value]

    def read_entries(self, value: int) -> jax.Array:
        """Return a value with length 1 along the dimensions that repeat the same elements."""
        graph, node = self.graph, self.graph.producers.get(value)
        shape, varying = graph.get_shape(value), derive_varying(graph, value)
        if node is not None and node.name == "broadcast_in_dim":
            # The small array, and not an index of a large one.
            entries, places = self.read_entries(node.inputs[0]), node.parameters["broadcast_dimensions"]
            lengths = dict(zip(places, entries.shape, strict=True))
            return lax.broadcast_in_dim(entries, [lengths.get(axis, 1) for axis in range(len(shape))], places)
        x = self.read_value(value)
        return lax.slice(x, (0,) * x.ndim, [n if axis in varying else min(n, 1) for axis, n in enumerate(shape)])


def _is_rounded(node: EquationNode) -> bool:
    is_float = str(jaxpr.read_dtype(node.equation.outvars[0])) == "float32"
    return is_float and node.name in ("add", "sub", "mul", "div", "rsqrt", "square")


def _round_once(node: EquationNode, operands: list[Any]) -> jax.Array:
    """Return the result of an operation, correctly rounded."""
    shape = jaxpr.read_shape(node.equation.outvars[0])
    wide = [_broadcast(jnp.asarray(x), shape) for x in operands]
    if node.name == "rsqrt":
        exact = _divide_exactly(jnp.ones(shape, jnp.float32), lax.sqrt(wide[0]))
        return replace_value(lax.rsqrt(wide[0]), exact)
    return combine(node.name, *(wide * 2 if node.name == "square" else wide))


def combine(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the sum, difference, product ("mul", "square") or quotient of arrays of one shape, rounded once."""
    if name == "div":
        return replace_value(lax.div(x, y), _divide_exactly(x, y))
    operation = {"add": lax.add, "sub": lax.sub}.get(name, lax.mul)
    return barriers.round_result(operation(x, y))


def _divide_exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    return affine.divide(lax.stop_gradient(x), lax.stop_gradient(y))


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if x.shape == shape:
        return x
    return lax.broadcast_in_dim(x, shape, range(len(shape)) if x.ndim else ())
