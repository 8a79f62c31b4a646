"""The evaluation of a traced program on values of any kind."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import jaxpr
from .jaxpr import Address, Atom, Body, Equation, Program, Variable


class Visit(NamedTuple):
    """Where an interpreter is.

    Attributes:
        address: the address of the equation.
        program: the program that the equation is in.
        stores: for each operand a dict that all equations of this evaluation share which read the same variable, for
            what is computed from its value alone.
    """

    address: Address
    program: Program
    stores: Sequence[dict[Any, Any]]


class Interpreter:
    """The evaluation of a program, one equation after the other. This class evaluates it as JAX does, on arrays.

    An equation is evaluated if its results are used or if it has effects, and a value is dropped after its last use.
    Subclasses decide what a value is and what becomes of an equation, by overriding these methods:

    - `read_literal` and `read_constant` return the value of a number in a program, and of an array that it closes over.
    - `has_effect` returns whether an equation is evaluated although nothing reads its results.
    - `evaluate_equation` returns the results of an equation. By default it calls `enter` if the equation has a body
      that can be entered, and `compute_equation` if not.
    - `compute_equation` returns the results of an equation that is not entered.
    - `enter_call`, `enter_rule` (a function with a derivative rule of its own), `enter_remat`, `enter_scan`,
      `enter_while` and `enter_cond` return the results of an equation with bodies. By default the bodies of calls are
      evaluated in their place, and loops and branches are computed as single equations.

    Attributes:
        calls: the names of the primitives that are plain calls.
    """

    calls: tuple[str, ...] = jaxpr.CALLS

    def evaluate_body(self, body: Body, values: Sequence[Any], address: Address = ()) -> list[Any]:
        """Return the results of a program for the values of its operands."""
        program = body.program
        known: dict[Variable, Any] = dict(zip(program.invars, values, strict=True))
        for variable, constant in zip(program.constvars, body.constants, strict=True):
            known[variable] = self.read_constant(constant)

        def read(atom: Atom) -> Any:
            return self.read_literal(atom) if jaxpr.is_literal(atom) else known[atom]  # type: ignore[index]

        live = jaxpr.list_live(program, self.has_effect)
        last_uses = jaxpr.list_last_uses(program, live)
        # Of this evaluation alone, because a body may be evaluated more than once, with other values.
        computed: collections.defaultdict[Any, dict[Any, Any]] = collections.defaultdict(dict)
        for index in live:
            equation = program.eqns[index]
            operands = [read(atom) for atom in equation.invars]
            stores = [{} if jaxpr.is_literal(atom) else computed[atom] for atom in equation.invars]
            results = self.evaluate_equation(equation, operands, Visit((*address, index), program, stores))
            pairs = zip(equation.outvars, results, strict=True)
            known |= {variable: result for variable, result in pairs if not jaxpr.is_unused(variable)}
            # Outside of jax.jit the arrays that no later equation reads would stay in memory.
            for variable in last_uses.get(index, ()):
                del known[variable]
                computed.pop(variable, None)
        return [read(atom) for atom in program.outvars]

    # Values.

    def read_literal(self, literal: Any) -> Any:
        """Return the value of a number in a program."""
        return literal.val

    def read_constant(self, array: Any) -> Any:
        """Return the value of an array that a program closes over."""
        return array

    # Equations.

    def has_effect(self, equation: Equation) -> bool:
        """Return whether an equation is evaluated although nothing reads its results."""
        return jaxpr.has_effect(equation)

    def evaluate_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation."""
        if self.can_enter(equation):
            return self.enter(equation, operands, visit)
        return self.compute_equation(equation, operands, visit)

    def can_enter(self, equation: Equation) -> bool:
        """Return whether one of the methods below takes an equation."""
        name = jaxpr.read_name(equation)
        return name in _HOOKS or name in self.calls

    def enter(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation with bodies, by the method for its primitive."""
        return getattr(self, _HOOKS.get(jaxpr.read_name(equation), "enter_call"))(equation, operands, visit)

    def compute_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation as it stands."""
        return jaxpr.evaluate(equation, operands)

    def enter_call(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of the body, evaluated in the place of the call."""
        return self.evaluate_body(jaxpr.read_call(equation), operands, (*visit.address, 0))

    def enter_rule(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a function with a derivative rule of its own."""
        return self.enter_call(equation, operands, visit)

    def enter_remat(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a function under `jax.checkpoint`."""
        return self.enter_call(equation, operands, visit)

    def enter_scan(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a scan."""
        return self.compute_equation(equation, operands, visit)

    def enter_while(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a while loop."""
        return self.compute_equation(equation, operands, visit)

    def enter_cond(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a cond."""
        return self.compute_equation(equation, operands, visit)


_HOOKS = {
    jaxpr.SCAN: "enter_scan",
    jaxpr.WHILE: "enter_while",
    jaxpr.COND: "enter_cond",
    jaxpr.REMAT: "enter_remat",
    **dict.fromkeys(jaxpr.CUSTOM_RULES, "enter_rule"),
}
