"""The order of an update: one array of the state after the other, so that few of them exist as floats at a time.

XLA:CPU would dequantize all arrays before it quantizes the first new one. All floats of the state would then be in
memory at once, which the codes are to avoid. An update of `optax` is one function of all arrays, so its program is cut
into parts that share no array of the state, and each part gets its codes through a barrier that waits for the codes of
the part before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend import core

# JAX requires it of a program, and uses it only in error messages about its arguments.
_NO_DEBUG_INFO = core.DebugInfo("update", "jaxquant", None, None)


def run_in_order(function: Callable[[list[Any]], Any], held: Sequence[Any]) -> Any:
    """Return the result of a function of pytrees, computed so that what depends on one of them follows another.

    Args:
        function: a function of a list of pytrees; it may close over further arrays. Results that depend on several of
            the pytrees join these in one part.
        held: the pytrees: arrays, of which at least one is traced.
    """
    counts = [len(jax.tree.leaves(tree)) for tree in held]
    owners = [place for place, count in enumerate(counts) for _ in range(count)]
    program, result = jax.make_jaxpr(function, return_shape=True)(list(held))
    body, constants = _split_constants(program)
    # Optax computes some steps of all arrays in one call.
    inline_calls = functools.partial(_run_with_inlined_calls, body, constants, [{owner} for owner in owners])
    body, constants = _split_constants(jax.make_jaxpr(inline_calls)(*jax.tree.leaves(list(held))))
    values = dict(zip((*body.constvars, *body.invars), (*constants, *jax.tree.leaves(list(held))), strict=True))
    given, waiting, token = dict(values), list(body.eqns), []
    for outputs in _find_parts(body, owners):
        chosen, waiting = _select_equations(waiting, outputs)
        if token:
            # Also what a part takes from outside, such as gradients, of which XLA would compute too much too early.
            own = [atom for atom in given if atom in chosen.free and _is_numeric(atom)]
            arrays, _ = lax.optimization_barrier(([given[atom] for atom in own], token))
            values |= given | dict(zip(own, arrays, strict=True))
        _evaluate(chosen, values)
        # The updates are not waited for: XLA may compute them where they are added to the parameters.
        codes = [atom for atom in outputs if jnp.issubdtype(atom.aval.dtype, jnp.integer)]
        token = [values[atom] for atom in codes or outputs]
    values |= given
    _evaluate(_select_equations(waiting, None)[0], values)
    results = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in body.outvars]
    return jax.tree.unflatten(jax.tree.structure(result), results)


def _split_constants(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program without its constants, and these. Newer versions of JAX keep them in the program itself."""
    return getattr(program, "jaxpr", program), tuple(getattr(program, "consts", ()))


def _run_with_inlined_calls(body: Any, constants: Sequence[Any], sources: list[set[int]], *arguments: Any) -> list[Any]:
    """Return the results of a program, with the bodies of calls that depend on several pytrees in place of the calls.

    Args:
        body: the program.
        constants: the values of its `constvars`.
        sources: the places of the pytrees that each argument depends on.
        arguments: its arguments.
    """
    values = dict(zip(body.constvars, constants, strict=True)) | dict(zip(body.invars, arguments, strict=True))
    needed: dict[Any, set[int]] = dict(zip(body.invars, sources, strict=True))

    def read_atom(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in body.eqns:
        operands = [set() if isinstance(atom, core.Literal) else needed.get(atom, set()) for atom in equation.invars]
        joined = set().union(*operands)
        if len(joined) > 1 and len(equation.outvars) > 1 and _is_plain_call(equation):
            inner, inner_constants = _split_constants(equation.params["jaxpr"])
            results = _run_with_inlined_calls(
                inner, inner_constants, operands, *(read_atom(atom) for atom in equation.invars)
            )
            values |= dict(zip(equation.outvars, results, strict=True))
        else:
            _evaluate(_select_equations([equation], None)[0], values)
        needed |= dict.fromkeys(equation.outvars, joined)
    return [read_atom(atom) for atom in body.outvars]


def _is_plain_call(equation: Any) -> bool:
    """Return whether an equation is a call by `jax.jit` that asks for no sharding."""
    shardings = [*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ())]
    is_call = equation.primitive.name in ("jit", "pjit")
    return is_call and not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _find_parts(body: Any, owners: list[int]) -> list[list[Any]]:
    """Return the results that depend on pytrees, in parts of which no two depend on the same one.

    Args:
        body: the program.
        owners: the place of the pytree of each of its arguments.
    """
    needed: dict[Any, set[int]] = {variable: {owner} for variable, owner in zip(body.invars, owners, strict=True)}
    for equation in body.eqns:
        joined = set().union(*(needed.get(atom, set()) for atom in _list_operands(equation)))
        needed |= dict.fromkeys(equation.outvars, joined)
    parts: list[tuple[set[int], list[Any]]] = []
    for atom in body.outvars:
        places, outputs = (set() if isinstance(atom, core.Literal) else needed.get(atom, set())), [atom]
        if not places:
            continue
        apart = []
        for part in parts:
            if part[0] & places:
                places, outputs = places | part[0], part[1] + outputs
            else:
                apart.append(part)
        parts = [*apart, (places, outputs)]
    return [outputs for _, outputs in sorted(parts, key=lambda part: min(part[0]))]


class _Equations(NamedTuple):
    """Some equations of a program.

    Attributes:
        equations: in the order of the program.
        free: the variables that they read and do not compute.
        results: the variables that they compute.
    """

    equations: list[Any]
    free: dict[Any, None]
    results: list[Any]


def _select_equations(equations: Sequence[Any], outputs: list[Any] | None) -> tuple[_Equations, list[Any]]:
    """Return the equations that some outputs need, or all of them for None, and the others."""
    chosen, others = list(equations), []
    if outputs is not None:
        wanted, chosen = set(outputs), []
        for equation in reversed(equations):
            is_wanted = not wanted.isdisjoint(equation.outvars)
            (chosen if is_wanted else others).append(equation)
            if is_wanted:
                wanted.update(_list_operands(equation))
        chosen.reverse()
        others.reverse()
    results = [atom for equation in chosen for atom in equation.outvars if not isinstance(atom, core.DropVar)]
    computed = set(results)
    # A dict keeps the order, which in a set would differ between runs.
    free = dict.fromkeys(atom for equation in chosen for atom in _list_operands(equation) if atom not in computed)
    return _Equations(chosen, free, results), others


def _list_operands(equation: Any) -> list[Any]:
    """Return the variables that an equation reads."""
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _is_numeric(atom: Any) -> bool:
    """Return whether a variable holds numbers. A barrier does not accept keys of `jax.random`."""
    return jnp.issubdtype(atom.aval.dtype, jnp.number)


def _evaluate(chosen: _Equations, values: dict[Any, Any]) -> None:
    """Add the results of equations to the values."""
    effects = frozenset().union(*(equation.effects for equation in chosen.equations))
    program = core.Jaxpr([], list(chosen.free), chosen.results, chosen.equations, effects, _NO_DEBUG_INFO)
    results = eval_jaxpr(program, (), *(values[atom] for atom in chosen.free))
    values |= dict(zip(chosen.results, results, strict=True))
