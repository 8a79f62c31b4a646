"""The evaluation of a traced program in which a mode replaces contractions.

The loops and branches of the program are traced again by JAX's own functions, on Python functions that evaluate their
bodies. So vectorization, differentiation and sharding are JAX's, and no equation with a body is built by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks
from .._kernels import barriers
from .._kernels.barriers import run_branch
from . import jaxpr, moves
from .analysis import Analysis, Site
from .interpreter import Interpreter, Visit
from .jaxpr import Address, Body, Equation

# A value for each site, or for several that share one, by name: the state of a calibrator, or a scale.
Records = dict[str, Any]
# For each operand, what a mode has computed of its value, for other contractions of the value.
Stores = Sequence[dict[Any, Any]]


class Mode(Protocol):
    """What becomes of contractions and of parameters."""

    # Whether contractions change the records.
    updates_records: bool

    def replaces(self, site: Site) -> bool:
        """Return whether a contraction is replaced."""
        ...

    def contract(self, site: Site, operands: Sequence[Any], records: Records, stores: Stores) -> tuple[Any, Records]:
        """Return the result of a contraction, and the records of its site."""
        ...

    def locate_record(self, site: Site) -> tuple[str, tuple[Address, ...]]:
        """Return the name of a site's record, and the addresses of the scans with an entry for each iteration."""
        ...

    def is_parameter(self, value: object) -> bool:
        """Return whether a value is a parameter in a form that is not an array."""
        ...

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return whether parameters can be concatenated in this form."""
        ...

    def move_elements(self, equation: Equation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation that only moves the elements of parameters."""
        ...

    def convert_to_array(self, parameter: object) -> jax.Array:
        """Return a parameter, or codes between contractions, as an array of floats."""
        ...

    def choose_action(self, address: Address) -> Any:
        """Return what becomes of an equation between contractions that runs on codes, or None."""
        ...

    def run_action(self, action: Any, operands: Sequence[Any], records: Records) -> tuple[list[Any], Records]:
        """Return the results of such an equation, and the records."""
        ...

    def is_codes(self, value: object) -> bool:
        """Return whether a value is codes between contractions."""
        ...

    def prepare_stacked(self, parameter: object) -> Any:
        """Return a parameter in a form that scan can slice."""
        ...

    def call_with_rule(self, equation: Equation, operands: list[Any], run: Callable[..., Any], records: Records) -> Any:
        """Return the results of a function that has a derivative rule of its own and contains contractions."""
        ...

    def call_with_remat(
        self, equation: Equation, operands: list[Any], run: Callable[..., Any], records: Records
    ) -> Any:
        """Return the results of a function under `jax.checkpoint`."""
        ...


class ReplacingInterpreter(Interpreter):
    """The evaluation of a program in which a mode replaces contractions.

    Besides the methods of `Interpreter`, a subclass may override `run_inner`, which evaluates the body of a loop or a
    branch.

    Attributes:
        analysis: what is known about the program.
        mode: what replaces its contractions.
        records: the records of the sites of the body that is being evaluated.
    """

    def __init__(self, analysis: Analysis, mode: Mode, records: Records) -> None:
        self.analysis = analysis
        self.mode = mode
        self.records = dict(records)

    def evaluate_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation: what the mode makes of it, or what JAX computes on arrays."""
        address = visit.address
        if jaxpr.read_name(equation) in jaxpr.REDUCTIONS and jaxpr.is_clipped(visit.program, equation.invars[0]):
            # XLA:CPU would fuse the clip with the reduction, and write an array of equal elements for its bound.
            x = operands[0]
            operands = [x if self.mode.is_parameter(x) or self.mode.is_codes(x) else barriers.compute_once(x)]
        site = self.analysis.sites.get(address)
        if site is not None and self.mode.replaces(site):
            scope = jaxpr.read_scope(equation) or site.operation
            # A parameter next to the weight is activations: the entry that an index selects.
            operands = [
                self.mode.convert_to_array(x) if operand != site.weight and self.mode.is_parameter(x) else x
                for operand, x in enumerate(operands)
            ]
            # A new operation does not have the name scope of the equation it replaces, by which profilers find it.
            with _name_scope(scope), checks.prefix_errors(site.describe()):
                result, self.records = self.mode.contract(site, operands, self.records, visit.stores)
            return [result]
        action = self.mode.choose_action(address)
        if action is not None:
            scope = jaxpr.read_scope(equation)
            with _name_scope(scope), checks.prefix_errors(action.describe_action()):
                results, self.records = self.mode.run_action(action, operands, self.records)
            return results
        if address in self.analysis.followed and self.can_move(equation, operands):
            with checks.prefix_errors(f"{jaxpr.read_name(equation)} at {jaxpr.locate(equation)}"):
                return self.mode.move_elements(equation, operands)
        if self.can_enter(equation) and address in self.analysis.entered:
            if not is_inlined(self.analysis, equation, address):
                operands = [self._read_codes(value) for value in operands]
            with _name_scope(jaxpr.read_scope(equation)):
                return self.enter(equation, operands, visit)
        return self.compute_equation(equation, self.read_arrays(operands), visit)

    def can_move(self, equation: Equation, operands: Sequence[Any]) -> bool:
        """Return whether the elements of parameters can be moved in their form."""
        are_parameters = [self.mode.is_parameter(value) for value in operands]
        if moves.match_join(equation) is not None:
            return all(are_parameters) and self.mode.can_join(operands)
        takes_several = jaxpr.read_name(equation) in (moves.BARRIER, moves.SELECTION)
        return any(are_parameters) if takes_several else are_parameters[0]

    def _read_array(self, value: object) -> Any:
        return self.mode.convert_to_array(value) if self.mode.is_parameter(value) else self._read_codes(value)

    def _read_codes(self, value: object) -> Any:
        return self.mode.convert_to_array(value) if self.mode.is_codes(value) else value

    def read_arrays(self, values: Sequence[Any]) -> list[Any]:
        """Return values as arrays."""
        return [self._read_array(value) for value in values]

    def _split_records(self, address: Address) -> tuple[Records, Records]:
        """Return the records of the sites in an equation: those with an entry per iteration, and the others."""
        stacked, shared = {}, {}
        for site in self.analysis.list_below(address):
            name, layers = self.mode.locate_record(site)
            if name in self.records:
                (stacked if address in layers else shared)[name] = self.records[name]
        return stacked, shared

    def run_inner(self, body: Body, values: Sequence[Any], address: Address, records: Records) -> tuple[Any, Records]:
        """Return the results of a body as arrays, and the records of its sites."""
        inner = ReplacingInterpreter(self.analysis, self.mode, records)
        results = inner.read_arrays(inner.evaluate_body(body, values, address))
        return results, inner.records

    # Equations with bodies.

    def enter_call(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of the body, evaluated in the place of the call, with the shardings of the call."""
        # A call that is inlined would lose the shardings that its `jax.jit` was given.
        before, after = jaxpr.read_shardings(equation)
        results = self.evaluate_body(
            jaxpr.read_call(equation), self._place_arrays(operands, before), (*visit.address, 0)
        )
        return self._place_arrays(results, after)

    def _place_arrays(self, values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """Return values, with the shardings that an inlined `jax.jit` asks for on arrays."""
        # The codes of a parameter keep the placement that the user chose for them; the codes of a result follow them.
        return [
            value if sharding is None or self.mode.is_parameter(value) or self.mode.is_codes(value)
            else lax.with_sharding_constraint(value, sharding)
            for value, sharding in zip(values, shardings, strict=True)
        ]  # fmt: skip

    def enter_rule(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a function with a derivative rule of its own, as the mode calls it."""
        return self._call_through(self.mode.call_with_rule, equation, operands, visit.address)

    def enter_remat(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a function under `jax.checkpoint`, as the mode calls it."""
        return self._call_through(self.mode.call_with_remat, equation, operands, visit.address)

    def _call_through(self, call: Any, equation: Equation, operands: list[Any], address: Address) -> list[Any]:
        body = jaxpr.read_call(equation)
        if not self.analysis.list_below(address):
            # It only moves the elements of a parameter, which it returns.
            return self.evaluate_body(body, operands, (*address, 0))
        records = {name: record for part in self._split_records(address) for name, record in part.items()}

        def run(values: Sequence[Any], inner: Records) -> tuple[Any, Records]:
            return self.run_inner(body, values, (*address, 0), inner)

        results, updated = call(equation, operands, run, records)
        self.records |= updated
        return results

    def enter_cond(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of `jax.lax.switch` on the branches."""
        (index, *values), address = operands, visit.address
        records = {name: record for part in self._split_records(address) for name, record in part.items()}

        def make_branch(number: int, body: Body) -> Callable[..., Any]:
            return lambda inner: self.run_inner(body, values, (*address, number), inner)

        branches = [make_branch(*item) for item in enumerate(jaxpr.read_branches(equation))]
        # Each branch returns the records of all, because branches must return trees of one structure.
        platforms = jaxpr.read_platforms(equation)
        if platforms is None:
            results, updated = lax.switch(index, branches, records)
        else:
            results, updated = run_branch(platforms, branches, records)
        if self.mode.updates_records:
            self.records |= updated
        return results

    def enter_scan(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of `jax.lax.scan` on the body."""
        scan, address = jaxpr.read_scan(equation), visit.address
        first = scan.constants + scan.carries
        constants, carries, stacked = operands[: scan.constants], operands[scan.constants : first], operands[first:]
        invariant = self.analysis.invariant.get(address, frozenset())
        # A parameter that no iteration changes is a constant of the loop, in its own form: a carry would have to be
        # floats.
        carried = [self._read_array(x) for carry, x in enumerate(carries) if carry not in invariant]
        parts = [self.mode.prepare_stacked(x) if self.mode.is_parameter(x) else x for x in stacked]
        layered, shared = self._split_records(address)
        updates = self.mode.updates_records

        def step(carry: Any, slices: Any) -> Any:
            (moving, common), (layer, records) = carry, slices
            values = _merge_carries(carries, moving, invariant)
            results, inner = self.run_inner(
                scan.body, [*constants, *values, *layer], (*address, 0), {**shared, **common, **records}
            )
            kept = [x for carry, x in enumerate(results[: scan.carries]) if carry not in invariant]
            outputs = results[scan.carries :], {name: inner[name] for name in records} if updates else {}
            return (kept, {name: inner[name] for name in common}), outputs

        # Records that do not change are constants of the loop.
        start = (carried, shared if updates else {})
        (moved, common), (outputs, records) = lax.scan(
            step, start, (parts, layered), scan.length, reverse=scan.reverse, unroll=scan.unroll
        )
        self.records |= {**common, **records}
        return [*_merge_carries(carries, moved, invariant), *outputs]

    def enter_while(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of `jax.lax.while_loop` on both bodies."""
        loop, address = jaxpr.read_while(equation), visit.address
        first, second = loop.condition_constants, loop.condition_constants + loop.body_constants
        carries = operands[second:]
        invariant = self.analysis.invariant.get(address, frozenset())
        carried = [self._read_array(x) for carry, x in enumerate(carries) if carry not in invariant]
        _, shared = self._split_records(address)
        updates = self.mode.updates_records

        def check(moving: Any) -> Any:
            values = _merge_carries(carries, moving, invariant)
            # No contraction in a condition is replaced, so that it needs no records.
            results, _ = self.run_inner(loop.condition, [*operands[:first], *values], (*address, 0), {})
            return results[0]

        def step(state: Any) -> Any:
            moving, common = state
            values = _merge_carries(carries, moving, invariant)
            results, inner = self.run_inner(
                loop.body, [*operands[first:second], *values], (*address, 1), {**shared, **common}
            )
            kept = [x for carry, x in enumerate(results) if carry not in invariant]
            if loop.is_vectorized:
                going = check(moving)
                kept = [_select_examples(going, *pair) for pair in zip(kept, moving, strict=True)]
            return kept, {name: inner[name] for name in common}

        def check_any(state: Any) -> Any:
            going = check(state[0])
            return jnp.any(going) if loop.is_vectorized else going

        moved, common = lax.while_loop(check_any, step, (carried, shared if updates else {}))
        self.records |= common
        return _merge_carries(carries, moved, invariant)


def _select_examples(going: jax.Array, new: Any, old: Any) -> Any:
    """Return new[i] if the loop of example i goes on, and old[i] if it has ended."""
    return lax.select(lax.broadcast_in_dim(going, new.shape, tuple(range(going.ndim))), new, old)


def is_inlined(analysis: Analysis, equation: Equation, address: Address) -> bool:
    """Return whether an equation with a body is evaluated as if the body stood in its place."""
    name = jaxpr.read_name(equation)
    # A function with a derivative rule keeps it around contractions.
    return name in jaxpr.CALLS and not (name in jaxpr.CUSTOM_RULES and analysis.list_below(address))


def _name_scope(scope: str) -> Any:
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def _merge_carries(carries: Sequence[Any], moving: Sequence[Any], invariant: frozenset[int]) -> list[Any]:
    """Return the carries of a loop that hold a parameter, as they are outside of it, and the other carries."""
    rest = iter(moving)
    return [x if carry in invariant else next(rest) for carry, x in enumerate(carries)]
