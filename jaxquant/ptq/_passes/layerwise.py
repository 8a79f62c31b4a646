"""The evaluation of a program, operation by operation, that quantizes each weight where it is first contracted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._core import checks
from ..._program import jaxpr
from ..._program.interpreter import Visit
from ..._program.jaxpr import Address, Body, Equation
from ..._program.replacing import ReplacingInterpreter
from ..._program.sites import Site
from ...transform.session import InspectMode, Session, TracedCall, find_programs
from ..moments import Moments
from . import inputs, neighbors
from .collect import MOMENTS, finalize_moments, has_statistics, make_mode, make_states

_NAME = "ptq.apply"
_HIGHEST = jax.lax.Precision.HIGHEST


class Drift(NamedTuple):
    """What quantized layers have changed, in the terms of the inputs x of a later one; see `run_layers`.

    The sums are over the first half of the vectors x of each batch, and over the second half, so that what is found in
    one half can be tried on the other.

    Attributes:
        second: the sum of x x^T, [2, groups, inputs, inputs].
        inputs: that of x (z - x)^T, [2, groups, inputs, inputs], with the inputs z of the float function.
        addend: that of x (s - r)^T, [2, groups, inputs, outputs], with the array r that is added to the outputs, and s
            in the float function; None if there is no such array.
    """

    second: jax.Array
    inputs: jax.Array
    addend: jax.Array | None


# A parameter, the statistics of its inputs, and what has changed.
Quantize = Callable[[int, "tuple[inputs.Uses, Moments] | str", "Drift | None"], jax.Array]


class Each(tuple):
    """The values of one variable in all batches; if float weights are run, too, first those with these."""


class Pending(NamedTuple):
    """A parameter that is read when it is needed, because its codes are not known before.

    Attributes:
        leaf: the place of the parameter.
        moves: the equations that move its elements, each with the place of the result.
    """

    leaf: int
    moves: tuple[tuple[Any, int], ...] = ()


class LayerMode(InspectMode):
    """The float program, whose parameters are read when they are contracted."""

    updates_records = False

    def __init__(self, plan: Any, weights: dict[int, Any]) -> None:
        super().__init__(plan, lambda site: False, lambda *arguments: arguments)  # type: ignore[arg-type]
        self.weights = weights  # arrays; an `Each` if batches with float weights are run, too

    def is_parameter(self, value: Any) -> bool:
        """Return whether a value is a parameter that has not been read."""
        return isinstance(value, Pending)

    def can_join(self, parameters: Sequence[Any]) -> bool:
        """Return False: joined parameters are read as they are."""
        return False

    def move_elements(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the parameter with one more move, for each result of the equation."""
        if any(not isinstance(x, Pending) for x in operands) or len(operands) > 1:
            return evaluate_each(equation, [self.convert_to_array(x) for x in operands])
        (x,) = operands
        return [x._replace(moves=(*x.moves, (equation, place))) for place in range(len(equation.outvars))]

    def convert_to_array(self, parameter: Any) -> Any:
        """Return the array of a parameter as it is now, after its moves."""
        if not isinstance(parameter, Pending):
            return parameter
        value = self.weights[parameter.leaf]
        for equation, place in parameter.moves:
            value = evaluate_each(equation, [value])[place]
        return value


def evaluate_each(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of an equation: for each batch, if an operand differs between them."""
    count = next((len(x) for x in arrays if isinstance(x, Each)), None)
    if count is None:
        return jaxpr.evaluate(equation, arrays)
    results = [jaxpr.evaluate(equation, _select(arrays, index)) for index in range(count)]
    return [Each(parts) for parts in zip(*results, strict=True)]


class LayerInterpreter(ReplacingInterpreter):
    """The evaluation of one program on all batches at once, outside of `jax.jit`."""

    mode: LayerMode

    def __init__(self, call: TracedCall, mode: LayerMode, quantize: Quantize, floats: int) -> None:
        super().__init__(call.analysis, mode, {})
        self.call = call
        self.quantize = quantize
        self.floats = floats  # the number of batches with float weights, which are the first ones
        self.quantized: set[int] = set()
        # The arrays that are added to the outputs of a contraction, by the name of it, and where they are written.
        self.addends: dict[str, Any] = {}
        self.writers: dict[Address, list[tuple[int, str]]] = {}
        self.waiting: set[str] = set()
        if floats:
            self._find_addends()

    def _find_addends(self) -> None:
        graph = neighbors.make_call_graph(self.call)
        for site in self.analysis.sites.values():
            if has_statistics(self.call.plan, site):
                array = neighbors.find_addend(graph, site)
                for address, place in () if array is None else graph.program.list_writers(array):
                    self.writers.setdefault(address, []).append((place, site.name))
                    self.waiting.add(site.name)

    def evaluate_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation, and keep those that are added to the outputs of a contraction."""
        results = self._run_equation(equation, operands, visit)
        places = self.writers.get(visit.address, ())
        self.addends |= {name: results[place] for place, name in places if name in self.waiting}
        return results

    def _run_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        address = visit.address
        site = self.analysis.sites.get(address)
        if site is not None and has_statistics(self.call.plan, site):
            with checks.prefix_errors(site.describe()):
                self._visit(site, operands)
            return self._run_each(equation, operands)
        is_moved = address in self.analysis.followed and self.can_move(equation, operands)
        is_call = jaxpr.find_name(equation) in (*jaxpr.CALLS, jaxpr.REMAT) and address in self.analysis.entered
        # A dynamic slice that starts elsewhere in each batch gives each batch other elements of the parameter.
        if is_moved and not any(isinstance(x, Each) for x in operands):
            return self.mode.move_elements(equation, operands)
        # Inside of a call parameters are still pending, and are quantized where they are contracted.
        if is_call:
            return super().evaluate_equation(equation, operands, visit)
        if any(has_statistics(self.call.plan, site) for site in self.analysis.list_below(address)):
            self._visit_loop(equation, operands, visit)
        return self._run_each(equation, operands)

    def run_inner(self, body: Body, values: Sequence[Any], address: Address, records: Any) -> tuple[Any, Any]:
        """Return the results of a body, in which parameters stay pending."""
        return self.evaluate_body(body, values, address), {}

    def _run_each(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation: for each batch, if an operand differs between them."""
        return evaluate_each(equation, self.read_arrays(operands))

    def _visit(self, site: Site, operands: Sequence[Any]) -> None:
        """Quantize the parameter of a contraction, if this is its first one."""
        self.waiting.discard(site.name)
        addend = self.addends.pop(site.name, None)
        if all(view.leaf in self.quantized for view in site.views):
            return
        x = inputs.find_operand(site, operands)
        batches = x if isinstance(x, Each) else (x,)
        vectors = [inputs.read_vectors(site, batch) for batch in batches]
        floats = self.floats if isinstance(x, Each) else 0
        state = MOMENTS.init(vectors[0])
        for batch in vectors[floats:]:
            state = MOMENTS.update(state, batch)
        with checks.name_errors("ptq.apply"):
            moments, drift = MOMENTS.finalize(state), None
        if floats:
            outputs = [inputs.read_outputs(site, part) for part in addend] if isinstance(addend, Each) else None
            changes = [
                None if arrays is None else _sum_changes(vectors, arrays, floats) for arrays in (vectors, outputs)
            ]
            second = sum(_sum_halves(x, x) for x in vectors[floats:])
            drift = Drift(second, *changes)  # type: ignore[arg-type]
        self._quantize_views(site, moments, drift)

    def _visit_loop(self, equation: Equation, operands: Sequence[Any], visit: Visit) -> None:
        """Quantize the parameters that are contracted in a loop or a branch, with the inputs of float weights."""
        address, program = visit.address, visit.program
        # A loop is one operation here. Its weights are quantized before any iteration runs with codes, so that no layer
        # in it sees the errors of earlier ones.
        sites = [site for site in self.analysis.list_below(address) if has_statistics(self.call.plan, site)]
        states = make_states(self.call, {site.name for site in sites})
        arrays = self.read_arrays(operands)
        count = next((len(x) for x in arrays if isinstance(x, Each)), 1)

        @jax.jit
        def update_states(states: Any, values: Any) -> Any:
            inner = ReplacingInterpreter(self.analysis, make_mode(self.call.plan, states), states)
            inner.evaluate_equation(equation, list(values), Visit(address, program, [{} for _ in values]))
            return inner.records

        for index in range(self.floats if count > 1 else 0, count):
            states = update_states(states, _select(arrays, index))
        for site in sites:
            self._quantize_views(site, finalize_moments("ptq.apply", site.name, states[site.name]), None)

    def _quantize_views(self, site: Site, moments: Moments, drift: Drift | None) -> None:
        for view in site.views:
            if view.leaf in self.quantized:
                continue
            shape = self.call.parameters.arrays[view.leaf].shape
            use = inputs.describe_use(site, view, shape)
            found = inputs.combine_uses([use], {site.name: moments}, shape)
            ordered = None if drift is None or use.reason else _order_drift(use, drift, shape)
            w, values = self.mode.weights[view.leaf], self.quantize(view.leaf, found, ordered)
            is_same = not self.floats
            self.mode.weights[view.leaf] = values if is_same else Each([w] * self.floats + [values] * self.floats)
            self.quantized.add(view.leaf)


def _sum_changes(vectors: Sequence[jax.Array], arrays: Sequence[jax.Array], floats: int) -> Any:
    """Return the sums of x (s - r)^T over all batches, with inputs x and arrays r; those of floats, s, come first."""
    return sum(
        _sum_halves(x, expected, array)
        for x, array, expected in zip(vectors[floats:], arrays[floats:], arrays[:floats], strict=True)
    )


@jax.jit
def _sum_halves(x: jax.Array, y: jax.Array, other: jax.Array | None = None) -> jax.Array:
    """Return the sums of x (y - other)^T over both halves of some vectors [number, groups, length], for each group."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if other is not None:
        y = y - other.astype(jnp.float32)
    # Vectors of one example are neighbors, and much alike: most examples are in one half alone.
    parts = [(values[: len(x) // 2], values[len(x) // 2 :]) for values in (x, y)]
    return jnp.stack([jnp.einsum("ngi,ngj->gij", *pair, precision=_HIGHEST) for pair in zip(*parts, strict=True)])


def _order_drift(use: inputs.Uses, drift: Drift, shape: Sequence[int]) -> Drift:
    """Return what has changed, with the inputs in the order of the parameter's axes."""
    addend = drift.addend
    if addend is not None:
        addend = jnp.swapaxes(inputs.order_inputs(use, jnp.swapaxes(addend, 2, 3), shape, 1), 2, 3)
    second, changed = (inputs.order_inputs(use, x, shape, 2) for x in (drift.second, drift.inputs))
    return Drift(second, changed, addend)


def _select(values: Sequence[Any], index: int) -> list[Any]:
    """Return the values of one batch."""
    return [x[index] if isinstance(x, Each) else x for x in values]


def run_layers(
    session: Session, batches: Sequence[tuple[Any, Any]], arguments: Any, quantize: Quantize,
    has_floats: bool = False,
) -> None:  # fmt: skip
    """Evaluate a program on all batches, and call `quantize` for each parameter at its first contraction.

    Args:
        session: the prepared function and its parameters.
        batches: the positional and the keyword arguments of each call; all calls have the same program.
        arguments: keyword arguments of every call.
        quantize: a function of the place of a parameter, of the statistics of its inputs, and of a `Drift`, or None. It
            returns the floats with which to go on.
        has_floats: whether to evaluate the program with float weights, too, beside the quantized ones.
    """
    calls = [session.trace(args, {**kwargs, **arguments}) for args, kwargs in batches]
    # The constants of two programs may differ, too, and are not part of their text.
    count = len(find_programs([call.arguments for call in calls]))
    expected = "batches of one shape, dtype and static arguments, because they go through one program together"
    checks.require(count == 1, _NAME, "data", expected, f"{count} kinds of batches")
    first = calls[0]
    places = range(len(first.parameters.arrays))
    mode = LayerMode(first.plan, dict(enumerate(first.parameters.arrays)))
    pending = [Pending(leaf) if leaf in session.leaves else first.parameters.arrays[leaf] for leaf in places]
    operands = [call.list_operands(pending) for call in calls]
    # The parameters come first, and are the same in all calls.
    values = [
        parts[0] if isinstance(parts[0], Pending) or index < len(pending) else Each(parts * (2 if has_floats else 1))
        for index, parts in enumerate(zip(*operands, strict=True))
    ]
    body = jaxpr.Body(first.trace.program, first.trace.constants)
    LayerInterpreter(first, mode, quantize, len(calls) if has_floats else 0).evaluate_body(body, values)
