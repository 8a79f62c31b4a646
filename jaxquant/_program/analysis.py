"""The analysis of a traced program, which finds its contractions and follows its parameters through it.

Nothing is computed: the analysis walks the equations with an `Origin` in place of each array. What it finds is keyed by
the addresses of equations, because JAX may trace the same equation several times while the program is interpreted.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from . import jaxpr, sites, views
from .jaxpr import Body, Equation
from .sites import Address, Site
from .views import Constant, Data, Joined, Origin, View


@dataclasses.dataclass
class _Findings:
    """What one walk over a program found.

    Attributes:
        sites: the contractions, in program order, not yet numbered.
        followed: the addresses of the equations that move the elements of parameters.
        invariant: for each loop, the places of the carries that hold the same parameter in every iteration.
        passing: the addresses of the equations with bodies that return a parameter.
    """

    sites: list[Site] = dataclasses.field(default_factory=list)
    followed: set[Address] = dataclasses.field(default_factory=set)
    invariant: dict[Address, frozenset[int]] = dataclasses.field(default_factory=dict)
    passing: set[Address] = dataclasses.field(default_factory=set)

    def add(self, other: _Findings) -> None:
        """Add what a walk over a body found."""
        self.sites += other.sites
        self.followed |= other.followed
        self.invariant |= other.invariant
        self.passing |= other.passing


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What is known about a program.

    Attributes:
        sites: the contractions by address, in program order.
        followed: the addresses of the equations that move the elements of parameters.
        invariant: for each loop, the places of the carries that hold the same parameter in every iteration.
        entered: the addresses of the equations whose bodies contain a site that can run on codes, and of these bodies;
            and of those that return a parameter.
    """

    sites: dict[Address, Site]
    followed: frozenset[Address]
    invariant: dict[Address, frozenset[int]]
    entered: frozenset[Address]

    def list_below(self, address: Address) -> list[Site]:
        """Return the sites inside of an equation or of a body."""
        return [site for place, site in self.sites.items() if place[: len(address)] == address]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a walk is.

    Attributes:
        address: the address of the body.
        layers: the scans around it that stack parameters.
        lengths: their lengths.
        scope: the name scopes around it.
        where: the place in the source of the call around it.
        reason: why no contraction here can run on codes, or "".
    """

    address: Address = ()
    layers: tuple[Address, ...] = ()
    lengths: tuple[int, ...] = ()
    scope: str = ""
    where: str = ""
    reason: str = ""


def analyze_program(trace: jaxpr.Trace, origins: Sequence[Origin], names: Sequence[str]) -> Analysis:
    """Return the analysis of a traced function.

    Args:
        trace: the traced function.
        origins: the origins of the operands of the program.
        names: the path of each parameter.
    """
    findings = _Findings()
    _walk(Body(trace.program, trace.constants), origins, _Place(), findings)
    sites = _name_sites(findings.sites, names)
    # Other bodies are evaluated as they stand, also those of equations that cannot be entered.
    entered = {site.address[:length] for site in sites if not site.reason for length in range(len(site.address))}
    entered |= findings.passing
    return Analysis(
        {site.address: site for site in sites}, frozenset(findings.followed), findings.invariant, frozenset(entered)
    )


def _name_sites(sites: Sequence[Site], names: Sequence[str]) -> list[Site]:
    """Return the sites with their names: the parameters, and the number of the use of these parameters."""
    # Without a parameter, the name scope is what a user recognizes.
    stems = ["+".join(names[leaf] for leaf in site.leaves) or site.name for site in sites]
    # An unused result does not count, so that the other names do not depend on it.
    stems = [f"{stem} (unused)" if site.reason == UNUSED else stem for stem, site in zip(stems, sites, strict=True)]
    counts: collections.Counter[str] = collections.Counter()
    taken, named = set(stems), []
    for stem, site in zip(stems, sites, strict=True):
        name = stem
        if counts[stem]:
            # The path of a parameter may be the name of a further use of another one.
            numbered = (f"{stem}#{number}" for number in itertools.count(counts[stem]))
            name = next(name for name in numbered if name not in taken)
            taken.add(name)
        counts[stem] += 1
        named.append(dataclasses.replace(site, name=name))
    return named


UNUSED = "nothing uses its result"
_ADVICE = {
    "shard_map": ": prepare the function inside, and call shard_map on its apply",
    # With codes inside, `jax.vmap` of the result would not use the rule, whose contractions no rule of ours has seen.
    "custom_vmap_call": ", to keep its rule for vmap: call jax.vmap inside of the function, or leave the rule out",
}


def _walk(body: Body, origins: Sequence[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    """Return the origins of the results of a program, and add what it contains to the findings."""
    program = body.program
    known: dict[Any, Origin] = dict(zip(program.constvars, [Constant()] * len(program.constvars), strict=True))
    known |= zip(program.invars, origins, strict=True)
    live = set(jaxpr.list_live(program))

    def read(atom: Any) -> Origin:
        return Constant() if jaxpr.is_literal(atom) else known[atom]

    for index, equation in enumerate(program.eqns):
        here = dataclasses.replace(place, address=(*place.address, index))
        if index not in live:
            here = dataclasses.replace(here, reason=UNUSED)
        results = _walk_equation(equation, [read(atom) for atom in equation.invars], here, findings)
        known |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in program.outvars]


def _walk_equation(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    name = jaxpr.find_name(equation)
    if name in _BODIES:
        results = _BODIES[name](equation, origins, place, findings)
        if any(views.list_views(result) for result in results):
            findings.passing.add(place.address)
        return results
    moved = views.follow_equation(equation, origins)
    where = jaxpr.locate(equation) or place.where
    if moved is not None:
        if any(views.list_views(origin) for origin in moved):
            findings.followed.add(place.address)
        return [views.locate_selection(origin, where) for origin in moved]
    if name in ("dot_general", "conv_general_dilated", *sites.FLOAT_OPERATIONS):
        origins = views.resolve_selections(origins)
        _add_site(equation, origins, place, findings)
    elif sites.is_listed_lookup(equation, origins):
        _add_site(equation, origins[:1], place, findings)
    else:
        _add_hidden_sites(equation, origins, place, findings)
    # The result does not consist of elements of parameters any more, also if activations selected these.
    if name in sites.OPERATIONS and any(isinstance(origin, Data) for origin in origins):
        return [Data()] * len(equation.outvars)
    result = views.combine(origins, f"computed by {name} at {where}")
    return [result] * len(equation.outvars)


def _add_site(equation: Equation, origins: Sequence[Origin], place: _Place, findings: _Findings) -> None:
    operation = sites.OPERATIONS.get(jaxpr.find_name(equation), jaxpr.find_name(equation))
    reason = place.reason or sites.find_float_reason(equation, origins)
    scope = "/".join(part for part in (place.scope, jaxpr.find_scope(equation)) if part)
    stem = f"{operation}@{scope}" if scope else operation
    where = jaxpr.locate(equation) or place.where
    layers, lengths = place.layers, place.lengths
    findings.sites.append(
        Site(place.address, stem, operation, equation, tuple(origins), layers, lengths, scope, where, reason)
    )


def _add_hidden_sites(equation: Equation, origins: Sequence[Origin], place: _Place, findings: _Findings) -> None:
    """Add the contractions inside an equation whose bodies are not entered; all of them stay in floats."""
    name = jaxpr.find_name(equation)
    reason = place.reason or f"inside of {name}, which is not entered{_ADVICE.get(name, '')}"
    leaves = tuple(sorted({leaf for origin in origins for leaf in views.list_leaves(origin)}))
    hidden = dataclasses.replace(place, reason=reason)
    for number, body in enumerate(jaxpr.find_bodies(equation)):
        inner = dataclasses.replace(hidden, address=(*hidden.address, number))
        _walk(body, [views.Lost(leaves, reason) if leaves else Data()] * len(body.program.invars), inner, findings)


# Equations with bodies.


def _walk_call(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    return _walk(jaxpr.read_call(equation), origins, _enter(equation, place, 0), findings)


def _walk_boundary(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    """Walk a call that is not inlined if it contains a contraction; it then returns arrays only."""
    count = len(findings.sites)
    results = _walk_call(equation, origins, place, findings)
    # Without a contraction the body is evaluated in its place, so that a parameter which it returns stays one.
    if len(findings.sites) == count:
        return results
    reason = f"{jaxpr.find_name(equation)} at {jaxpr.locate(equation)}"
    return [views.combine([result], reason) if views.list_views(result) else result for result in results]


def _enter(equation: Equation, place: _Place, number: int) -> _Place:
    scope = "/".join(part for part in (place.scope, jaxpr.find_scope(equation)) if part)
    where = jaxpr.locate(equation) or place.where
    return dataclasses.replace(place, address=(*place.address, number), scope=scope, where=where)


def _walk_cond(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    results = []
    for number, body in enumerate(jaxpr.read_branches(equation)):
        # The first operand is the index of the branch.
        results.append(_walk(body, origins[1:], _enter(equation, place, number), findings))
    reason = f"cond at {jaxpr.locate(equation)}"
    # Which branch runs is not known here, so that a parameter which one of them returns cannot be followed.
    return [views.combine(branches, reason) for branches in zip(*results, strict=True)]


def _walk_scan(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    scan = jaxpr.read_scan(equation)
    first_stacked = scan.constants + scan.carries
    constants, carries = origins[: scan.constants], origins[scan.constants : first_stacked]
    parts = [views.take_layer(x) if isinstance(x, View | Joined) else x for x in origins[first_stacked:]]
    inner = _enter(equation, place, 0)
    # Only a scan over stacked parameters has layers; one over time runs the same layer in each iteration.
    if any(views.list_views(part) for part in parts):
        inner = dataclasses.replace(inner, layers=(*inner.layers, place.address), lengths=(*inner.lengths, scan.length))

    def walk_body(assumed: list[Origin], trial: _Findings) -> list[Origin]:
        return _walk(scan.body, [*constants, *assumed, *parts], inner, trial)

    assumed, results = _find_fixpoint(equation, carries, walk_body, place, findings)
    stacked = [views.combine([origin], _describe_loop(equation)) for origin in results[scan.carries :]]
    return [*assumed, *stacked]


def _walk_while(equation: Equation, origins: list[Origin], place: _Place, findings: _Findings) -> list[Origin]:
    loop = jaxpr.read_while(equation)
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants

    # A condition returns nothing but a bool, so a range observed in it could not be kept.
    condition = _enter(equation, place, 0)
    condition = dataclasses.replace(condition, reason=place.reason or "in the condition of a loop")

    def walk_bodies(assumed: list[Origin], trial: _Findings) -> list[Origin]:
        _walk(loop.condition, [*origins[:first], *assumed], condition, trial)
        return _walk(loop.body, [*origins[first:second], *assumed], _enter(equation, place, 1), trial)

    return _find_fixpoint(equation, origins[second:], walk_bodies, place, findings)[0]


def _find_fixpoint(
    equation: Equation, carries: list[Origin], walk: Any, place: _Place, findings: _Findings
) -> tuple[list[Origin], list[Origin]]:
    """Return origins of the carries of a loop that hold in every iteration, and those of the results of its body."""
    assumed = list(carries)
    while True:
        # What earlier rounds found rests on origins that do not hold. Each round knows less of some carry, and none
        # knows more, so that the rounds end.
        trial = _Findings()
        results = walk(assumed, trial)
        merged = [_merge(equation, *pair) for pair in zip(assumed, results[: len(assumed)], strict=True)]
        if merged == assumed:
            break
        assumed = merged
    findings.add(trial)
    # A parameter that every iteration passes on unchanged need not be carried.
    invariant = frozenset(place for place, origin in enumerate(assumed) if views.list_views(origin))
    findings.invariant[place.address] = invariant
    return assumed, results


def _merge(equation: Equation, before: Origin, after: Origin) -> Origin:
    """Return the origin of a carry that is one thing before an iteration and another thing after it."""
    return before if before == after else views.combine([before, after], _describe_loop(equation))


def _describe_loop(equation: Equation) -> str:
    return f"{jaxpr.find_name(equation)} at {jaxpr.locate(equation)}"


_BODIES = {
    jaxpr.SCAN: _walk_scan,
    jaxpr.WHILE: _walk_while,
    jaxpr.COND: _walk_cond,
    jaxpr.REMAT: _walk_boundary,
    **dict.fromkeys(jaxpr.CALLS, _walk_call),
    **dict.fromkeys(jaxpr.CUSTOM_RULES, _walk_boundary),
}
