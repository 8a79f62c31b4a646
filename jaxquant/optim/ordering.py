"""The order of an update: one array of the state after the other, so that few of them exist as floats at a time.

XLA:CPU would dequantize all arrays before it quantizes the first new one. All floats of the state would then be in
memory at once, which the codes are to avoid. An update of `optax` is one function of all arrays, so its program is cut
into parts that share no array of the state, and each part gets its codes through a barrier that waits for the codes of
the part before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    body, constants = _open(program)
    # Optax computes some steps of all arrays in one call.
    open_calls = functools.partial(_run_open, body, constants, [{owner} for owner in owners])
    body, constants = _open(jax.make_jaxpr(open_calls)(*jax.tree.leaves(list(held))))
    values = dict(zip(body.constvars, constants, strict=True))
    leaves = jax.tree.leaves(list(held))
    parts = _find_parts(body, owners)
    waiting, token = list(body.eqns), None
    for places, outputs in parts:
        own = [i for i, owner in enumerate(owners) if owner in places]
        arrays = [leaves[i] for i in own]
        if token:
            arrays, _ = lax.optimization_barrier((arrays, token))
        values |= dict(zip([body.invars[i] for i in own], arrays, strict=True))
        waiting = _evaluate(waiting, outputs, values)
        # The updates are not waited for: XLA may compute them where they are added to the parameters.
        token = [values[atom] for atom in outputs if jnp.issubdtype(atom.aval.dtype, jnp.integer)]
    _evaluate(waiting, None, values)
    results = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in body.outvars]
    return jax.tree.unflatten(jax.tree.structure(result), results)


def _open(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program without its constants, and these. Newer versions of JAX keep them in the program itself."""
    return getattr(program, "jaxpr", program), tuple(getattr(program, "consts", ()))


def _run_open(body: Any, constants: Sequence[Any], sources: list[set[int]], *arguments: Any) -> list[Any]:
    """Return the results of a program, with the bodies of calls that depend on several pytrees in place of the calls.

    Args:
        body: the program.
        constants: the values of its `constvars`.
        sources: the places of the pytrees that each argument depends on.
        arguments: its arguments.
    """
    values = dict(zip(body.constvars, constants, strict=True)) | dict(zip(body.invars, arguments, strict=True))
    needed: dict[Any, set[int]] = dict(zip(body.invars, sources, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in body.eqns:
        operands = [set() if isinstance(atom, core.Literal) else needed.get(atom, set()) for atom in equation.invars]
        joined = set().union(*operands)
        if len(joined) > 1 and len(equation.outvars) > 1 and _is_plain_call(equation):
            inner, inner_constants = _open(equation.params["jaxpr"])
            results = _run_open(inner, inner_constants, operands, *(read(atom) for atom in equation.invars))
            values |= dict(zip(equation.outvars, results, strict=True))
        else:
            _evaluate([equation], None, values)
        needed |= dict.fromkeys(equation.outvars, joined)
    return [read(atom) for atom in body.outvars]


def _is_plain_call(equation: Any) -> bool:
    """Return whether an equation is a call by `jax.jit` that asks for no sharding."""
    shardings = [*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ())]
    is_call = equation.primitive.name in ("jit", "pjit")
    return is_call and not any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def _find_parts(body: Any, owners: list[int]) -> list[tuple[set[int], list[Any]]]:
    """Return which pytrees belong together, and the results that depend on them.

    Args:
        body: the program.
        owners: the place of the pytree of each of its arguments.
    """
    needed: dict[Any, set[int]] = {variable: {owner} for variable, owner in zip(body.invars, owners, strict=True)}
    for equation in body.eqns:
        sources = [needed[atom] for atom in equation.invars if not isinstance(atom, core.Literal) and atom in needed]
        if sources:
            joined = set().union(*sources)
            needed |= dict.fromkeys(equation.outvars, joined)
    parts: list[tuple[set[int], list[Any]]] = []
    for atom in body.outvars:
        if isinstance(atom, core.Literal) or atom not in needed:
            continue
        places, outputs = set(needed[atom]), [atom]
        apart = []
        for part in parts:
            if part[0] & places:
                places, outputs = places | part[0], part[1] + outputs
            else:
                apart.append(part)
        parts = [*apart, (places, outputs)]
    # An argument that no result depends on belongs to no part; an equation that is left may still read it.
    rest = set(owners).difference(*(places for places, _ in parts))
    return [*sorted(parts, key=lambda part: min(part[0])), *([(rest, [])] if rest else [])]


def _evaluate(equations: list[Any], outputs: list[Any] | None, values: dict[Any, Any]) -> list[Any]:
    """Add the results of the equations that some outputs need, or of all, to the values; return the other equations."""
    chosen, others = equations, []
    if outputs is not None:
        wanted, chosen = set(outputs), []
        for equation in reversed(equations):
            if wanted.isdisjoint(equation.outvars):
                others.append(equation)
            else:
                chosen.append(equation)
                wanted.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
        chosen.reverse()
        others.reverse()
    results = [atom for equation in chosen for atom in equation.outvars if not isinstance(atom, core.DropVar)]
    read = {atom for equation in chosen for atom in equation.invars if not isinstance(atom, core.Literal)}
    free = [atom for atom in values if atom in read]
    effects = frozenset().union(*(equation.effects for equation in chosen))
    program = core.Jaxpr([], free, results, chosen, effects, _NO_DEBUG_INFO)
    values |= dict(zip(results, eval_jaxpr(program, (), *(values[atom] for atom in free)), strict=True))
    return others
