"""The interpreter of programs: JAX's results by default, the hooks, liveness, and the table of moves."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxquant as jq
from jaxquant._program import jaxpr, moves
from jaxquant._program.interpreter import Interpreter
from jaxquant._program.views import View, follow_equation, view_parameter
from jaxquant.onnx.export import exporter
from jaxquant.transform._moved_codes import move_elements

X = jnp.arange(24.0).reshape(4, 6)


@jax.custom_jvp
def _square(x: jax.Array) -> jax.Array:
    return x * x


_square.defjvp(lambda primals, tangents: (_square(*primals), 2 * primals[0] * tangents[0]))


def _run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what a program with all kinds of bodies computes."""
    x = jax.jit(jnp.sin)(x) + jax.checkpoint(jnp.cos)(x) + _square(x)
    total, rows = jax.lax.scan(lambda c, row: (c + row.sum(), 2 * row), jnp.float32(0), x)
    total = jax.lax.while_loop(lambda t: t > 1, lambda t: t / 2, total)
    return jax.lax.cond(total > 0.7, lambda r: r, lambda r: -r, rows), total + np.float32(1)


class Counting(Interpreter):
    """The interpreter, which counts the equations that it computes."""

    def __init__(self) -> None:
        self.names: collections.Counter[str] = collections.Counter()

    def compute_equation(self, equation: Any, operands: Any, visit: Any) -> Any:
        """Count an equation and return its results."""
        self.names[jaxpr.read_name(equation)] += 1
        return super().compute_equation(equation, operands, visit)


def _evaluate(interpreter: Interpreter, function: Any, *arguments: Any) -> list[Any]:
    trace = jaxpr.trace(function, *arguments)
    return interpreter.evaluate_body(jaxpr.Body(trace.program, trace.constants), arguments)


def test_the_interpreter_gives_the_results_of_jax() -> None:
    counting = Counting()
    for actual, expected in zip(_evaluate(counting, _run, X), _run(X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    # Calls are opened; loops and branches are single equations until a subclass enters them.
    assert counting.names.keys() >= {"sin", "cos", "mul", "scan", "while", "cond"}
    assert not counting.names.keys() & {*jaxpr.CALLS, jaxpr.REMAT}


@pytest.mark.parametrize("ordered", [False, True])
def test_equations_with_effects_are_live(ordered: bool) -> None:
    shown: list[Any] = []

    def function(x: jax.Array) -> jax.Array:
        jnp.cos(x)
        jax.debug.callback(lambda y: shown.append(y), x.sum(), ordered=ordered)
        return x + 1

    counting = Counting()
    _evaluate(counting, function, X)
    jax.effects_barrier()
    assert len(shown) == 1
    assert "cos" not in counting.names


def test_variables_have_last_uses() -> None:
    program = jaxpr.trace(lambda x: jnp.sin(x) + jnp.cos(x), X).program
    last = jaxpr.list_last_uses(program, jaxpr.list_live(program))
    assert {index: len(variables) for index, variables in last.items()} == {1: 1, 2: 2}


# For each primitive of the table a function that has it.
FUNCTIONS = {
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "copy": jnp.copy,
    "device_put": jax.device_put,
    "name": lambda x: checkpoint_name(x, "x"),
    "reshape": lambda x: x.reshape(24),
    "squeeze": lambda x: jnp.squeeze(x.reshape(4, 1, 6), 1),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 4, 6)),
    "transpose": lambda x: x.T,
    "rev": lambda x: x[::-1],
    "slice": lambda x: jax.lax.slice(x, (1, 0), (4, 6), (2, 1)),
    "split": lambda x: jax.lax.split(x, (1, 3), 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_moves_codes_as_it_moves_floats(name: str) -> None:
    q = jq.quantize(X, jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    trace = jaxpr.trace(FUNCTIONS[name], X)
    origins: dict[Any, Any] = {trace.program.invars[0]: view_parameter(0, X.shape, X.dtype)}
    codes: dict[Any, Any] = {trace.program.invars[0]: q}
    for equation in trace.program.eqns:
        operands = [codes[atom] for atom in equation.invars]
        followed = follow_equation(equation, [origins[atom] for atom in equation.invars])
        assert followed is not None
        origins |= zip(equation.outvars, followed, strict=True)
        codes |= zip(equation.outvars, move_elements(equation, operands), strict=True)
    assert name in {jaxpr.read_name(equation) for equation in trace.program.eqns}
    for variable, expected in zip(
        trace.program.outvars, jax.tree.leaves(FUNCTIONS[name](q.dequantize())), strict=True
    ):  # fmt: skip
        np.testing.assert_array_equal(codes[variable].dequantize(), expected)
        assert isinstance(origins[variable], View)


def test_each_row_can_be_exported() -> None:
    lacking = [name for name in moves.MOVES if not exporter.moves.has_writer(name)]
    assert not lacking
