"""The analysis of a traced program, which finds its contractions and follows its parameters through it.

Nothing is computed: the analysis walks the equations with an `Origin` in place of each array. What it finds is keyed by
the addresses of equations, because JAX may trace the same equation several times while the program is interpreted.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .._core import recording
from . import jaxpr, views
from .jaxpr import Address, Atom, Body, Equation
from .views import Constant, Data, Joined, Origin, View

# Contractions ("sites"), and their names.


_FLOATS = ("float32", "bfloat16", "float16")

# The operations that can run on codes, and the names they have in coverage and rules.
OPERATIONS = {
    "dot_general": "dot_general", "ragged_dot_general": "ragged_dot", "conv_general_dilated": "conv_general_dilated",
    "gather": "take",
}  # fmt: skip
# Those with the dimension numbers of `jax.lax.dot_general`.
PRODUCTS = ("dot_general", "ragged_dot")
# Further contractions, which stay in floats.
FLOAT_OPERATIONS = ("scaled_dot", "triangular_solve", "cholesky")


@dataclasses.dataclass(frozen=True)
class Site:
    """A contraction of a program, or a lookup of rows of a parameter.

    Attributes:
        address: where the equation is: its index, and for each program around it the index of the outer equation and
            of the program in its parameters.
        name: the name of the site: the path of the parameter and the number of its use, as "dense/kernel#1".
        operation: the name of the operation.
        equation: the equation.
        origins: what each operand is.
        layers: the addresses of the scans that give this site one part of a stacked parameter in each iteration.
        lengths: the lengths of these scans.
        scope: the name scopes around it.
        where: its file, line and function, or the call's around it if JAX's own function contracts.
        reason: why the site cannot run on codes, or "".
    """

    address: Address
    name: str
    operation: str
    equation: Any
    origins: tuple[Origin, ...]
    layers: tuple[Address, ...]
    lengths: tuple[int, ...]
    scope: str
    where: str
    reason: str = ""

    def describe(self) -> str:
        """Return the name of the site with its operation and its line of source."""
        return f"{self.name} ({self.operation} at {self.where})"

    @property
    def weight(self) -> int | None:
        """The number of the operand that is a parameter, or None."""
        # With two parameters neither is the weight: such a product depends on no activation.
        operands = [i for i, origin in enumerate(self.origins) if views.list_views(origin)]
        return operands[0] if len(operands) == 1 else None

    @property
    def views(self) -> tuple[View, ...]:
        """The views that make up the parameter operand."""
        return () if self.weight is None else views.list_views(self.origins[self.weight])

    @property
    def leaves(self) -> tuple[int, ...]:
        """The numbers of all parameters that an operand is made of, without activations."""
        leaves = [leaf for origin in self.origins for leaf in views.list_leaves(origin)]
        selected = [leaf for origin in self.origins if isinstance(origin, views.Data) for leaf in origin.leaves]
        return tuple(dict.fromkeys(leaves or selected))

    @property
    def contracted(self) -> tuple[int, ...]:
        """The dimensions of the parameter operand that the operation sums; of a lookup, those within an entry."""
        assert self.weight is not None
        shape = jaxpr.read_shape(self.equation.invars[self.weight])
        return list_contracted(self.equation, self.weight, len(shape))


def read_product_numbers(equation: Equation) -> Any:
    """Return the dimension numbers of a product of matrices, ragged or not, as `jax.lax.dot_general` has them."""
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    return equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers


def list_contracted(equation: Equation, operand: int, rank: int) -> tuple[int, ...]:
    """Return the dimensions of an operand that an operation sums over."""
    operation = OPERATIONS[jaxpr.read_name(equation)]
    if operation in PRODUCTS:
        return tuple(read_product_numbers(equation)[0][operand])
    if operation == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        kept = (numbers.lhs_spec[0], numbers.rhs_spec[0])[operand]
        return tuple(axis for axis in range(rank) if axis != kept)
    axis = match_lookup(equation)
    return tuple(other for other in range(rank) if other != axis)


def _contracts_integers(equation: Equation) -> bool:
    """Return whether both operands of a contraction are integers, such as the codes in `jaxquant.attention`."""
    return all("int" in str(jaxpr.read_dtype(variable)) for variable in equation.invars[:2])


def explain_floats(equation: Equation, origins: Sequence[Origin]) -> str:
    """Return why a contraction with these operands cannot run on codes, or "" if it can."""
    if jaxpr.read_name(equation) not in OPERATIONS:
        return f"{jaxpr.read_name(equation)} has no form on codes"
    dtypes = [str(jaxpr.read_dtype(variable)) for variable in equation.invars[:2]]
    if OPERATIONS[jaxpr.read_name(equation)] != "take" and any(dtype not in _FLOATS for dtype in dtypes):
        return INTEGERS if _contracts_integers(equation) else f"operands are {' and '.join(dtypes)}"
    if (
        OPERATIONS[jaxpr.read_name(equation)] == "conv_general_dilated"
        and len(jaxpr.read_shape(equation.invars[0])) < 3
    ):
        return "a convolution without spatial dimensions: write it as a product"
    if OPERATIONS[jaxpr.read_name(equation)] == "ragged_dot" and not _has_groups(equation):
        return "a ragged product whose ragged dimension is summed or a batch dimension"
    lost = [origin for origin in origins if isinstance(origin, views.Lost)]
    if lost:
        return lost[0].reason
    if OPERATIONS[jaxpr.read_name(equation)] == "take" and match_lookup(equation) is None:
        return "a gather of something else than whole entries along one axis"
    if sum(bool(views.list_leaves(origin)) for origin in origins) > 1:
        return "both operands are parameters"
    # It may be a table of numbers, or a weight that was not passed: rounding it as activations would be a guess.
    is_constant = any(isinstance(origin, views.Constant) for origin in origins)
    if is_constant and not any(views.list_leaves(origin) for origin in origins):
        return "an operand is an array that the function closes over: pass it in the parameters"
    selected = [origin.reason for origin in origins if isinstance(origin, views.Data) and origin.leaves]
    if selected and not any(views.list_leaves(origin) for origin in origins):
        return selected[0]
    for origin in origins:
        if isinstance(origin, views.Joined):
            operand = list(origins).index(origin)
            rank = len(jaxpr.read_shape(equation.invars[operand]))
            if origin.axis in list_contracted(equation, operand, rank):
                return "parameters are concatenated along an axis that is summed"
    return ""


def _has_groups(equation: Equation) -> bool:
    """Return whether a ragged product has a matrix for each group, JAX's first mode."""
    return len(equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions) == 1


def is_listed_lookup(equation: Equation, origins: Sequence[Origin]) -> bool:
    """Return whether an equation looks up entries of parameters, so that coverage lists it."""
    if jaxpr.read_name(equation) != "gather" or not views.list_leaves(origins[0]):
        return False
    if views.list_views(origins[0]) and match_lookup(equation) is not None:
        return True
    # Other gathers stay in floats. With constant indices they are a step in the computation of another parameter.
    is_float = str(jaxpr.read_dtype(equation.invars[0])) in _FLOATS
    return is_float and any(isinstance(origin, views.Data) for origin in origins[1:])


def match_lookup(equation: Equation) -> int | None:
    """Return the axis along which a gather takes whole entries, as `jnp.take` does, or None if it is another gather."""
    # Any other gather has no equivalent in `take`, which copies entries along one axis.
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, axes = jaxpr.read_shape(equation.invars[0]), tuple(numbers.start_index_map)
    if numbers.operand_batching_dims:
        return None
    if len(axes) > 1:
        # JAX vectorizes a dynamic slice with an index for each axis. That of an axis which is taken whole is clamped.
        if equation.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        axes = tuple(axis for axis in axes if sizes[axis] != shape[axis])
    if len(axes) != 1 or tuple(numbers.collapsed_slice_dims) not in ((), axes):
        return None
    (axis,) = axes
    entry = tuple(1 if other == axis else n for other, n in enumerate(shape))
    return axis if tuple(sizes) == entry else None


# The walk over the equations.


@dataclasses.dataclass
class _Findings:
    """What one walk over a program found.

    Attributes:
        sites: the contractions, in program order, not yet numbered.
        followed: the addresses of the equations that move the elements of parameters.
        invariant: for each loop, the numbers of the carries that hold the same parameter in every iteration.
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
        invariant: for each loop, the numbers of the carries that hold the same parameter in every iteration.
        entered: the addresses of the equations with a site that can run on codes in a body, and of these bodies;
            and the addresses of the equations that return a parameter.
    """

    sites: dict[Address, Site]
    followed: frozenset[Address]
    invariant: dict[Address, frozenset[int]]
    entered: frozenset[Address]

    def list_below(self, address: Address) -> list[Site]:
        """Return the sites inside of an equation or of a body."""
        return [site for at, site in self.sites.items() if at[: len(address)] == address]


@dataclasses.dataclass(frozen=True)
class _Nesting:
    """Where a walk is.

    Attributes:
        address: the address of the body.
        layers: the scans around it that stack parameters.
        lengths: their lengths.
        scope: the name scopes around it.
        where: the line of source of the call around it.
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
    _walk(Body(trace.program, trace.constants), origins, _Nesting(), findings)
    sites = _name_sites(findings.sites, names)
    # Other bodies are evaluated as they stand, also in equations that cannot be entered.
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
INTEGERS = "integers already"
CODES = "codes already"
_ADVICE = {
    "shard_map": ": prepare the function inside, and call shard_map on its apply",
    # With codes inside, `jax.vmap` of the result would not use the rule, and no rule of ours has seen its contractions.
    "custom_vmap_call": ", to keep its rule for vmap: call jax.vmap inside of the function, or leave the rule out",
}


def _walk(body: Body, origins: Sequence[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    """Return the origins of the results of a program, and add what it contains to the findings."""
    program = body.program
    known: dict[Any, Origin] = dict(zip(program.constvars, [Constant()] * len(program.constvars), strict=True))
    known |= zip(program.invars, origins, strict=True)
    live = set(jaxpr.list_live(program))

    def read(atom: Atom) -> Origin:
        return Constant() if jaxpr.is_literal(atom) else known[atom]

    for index, equation in enumerate(program.eqns):
        here = dataclasses.replace(around, address=(*around.address, index))
        if index not in live:
            here = dataclasses.replace(here, reason=UNUSED)
        results = _walk_equation(equation, [read(atom) for atom in equation.invars], here, findings)
        known |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in program.outvars]


def _walk_equation(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    name = jaxpr.read_name(equation)
    if name in _BODIES:
        results = _BODIES[name](equation, origins, around, findings)
        if any(views.list_views(result) for result in results):
            findings.passing.add(around.address)
        return results
    moved = views.follow_equation(equation, origins)
    where = jaxpr.locate(equation) or around.where
    if moved is not None:
        if any(views.list_views(origin) for origin in moved):
            findings.followed.add(around.address)
        return [views.locate_selection(origin, where) for origin in moved]
    if name in (*OPERATIONS, *FLOAT_OPERATIONS) and name != "gather":
        # The sizes of the groups of a ragged product are not an operand that could be quantized.
        origins = views.resolve_selections(origins[:2] if name == "ragged_dot_general" else origins)
        _add_site(equation, origins, around, findings)
    elif is_listed_lookup(equation, origins):
        _add_site(equation, origins[:1], around, findings)
    else:
        _add_hidden_sites(equation, origins, around, findings)
    # The result does not consist of elements of parameters any more, also if activations selected these.
    if name in OPERATIONS and any(isinstance(origin, Data) for origin in origins):
        return [Data()] * len(equation.outvars)
    result = views.combine(origins, f"computed by {name} at {where}")
    return [result] * len(equation.outvars)


def _add_site(equation: Equation, origins: Sequence[Origin], around: _Nesting, findings: _Findings) -> None:
    operation = OPERATIONS.get(jaxpr.read_name(equation), jaxpr.read_name(equation))
    reason = around.reason or explain_floats(equation, origins)
    scope = _join_scopes(around, equation)
    # Whatever keeps the equation from running on codes keeps nothing from integers, or from the codes of `jq.matmul`.
    if reason != UNUSED and operation != "take" and _contracts_integers(equation):
        reason = INTEGERS
    elif reason != UNUSED and _is_weight_only(scope):
        reason = CODES
    stem = f"{operation}@{scope}" if scope else operation
    where = jaxpr.locate(equation) or around.where
    layers, lengths = around.layers, around.lengths
    findings.sites.append(
        Site(around.address, stem, operation, equation, tuple(origins), layers, lengths, scope, where, reason)
    )


def _add_hidden_sites(equation: Equation, origins: Sequence[Origin], around: _Nesting, findings: _Findings) -> None:
    """Add the contractions inside an equation that is not entered; all of them stay in floats."""
    name = jaxpr.read_name(equation)
    reason = around.reason or f"inside of {name}, which is not entered{_ADVICE.get(name, '')}"
    leaves = tuple(sorted({leaf for origin in origins for leaf in views.list_leaves(origin)}))
    hidden = dataclasses.replace(around, reason=reason)
    for number, body in enumerate(jaxpr.list_bodies(equation)):
        origins = [views.Lost(leaves, reason) if leaves else Data()] * len(body.program.invars)
        _walk(body, origins, _enter(equation, hidden, number), findings)


# Equations with bodies.


def _walk_call(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    return _walk(jaxpr.read_call(equation), origins, _enter(equation, around, 0), findings)


def _walk_boundary(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    """Walk a call that is not inlined if it contains a contraction; it then returns arrays only."""
    count = len(findings.sites)
    results = _walk_call(equation, origins, around, findings)
    # Without a contraction the body is evaluated in its place, so that a parameter which it returns stays one.
    if len(findings.sites) == count:
        return results
    reason = f"{jaxpr.read_name(equation)} at {jaxpr.locate(equation)}"
    return [views.combine([result], reason) if views.list_views(result) else result for result in results]


def _enter(equation: Equation, around: _Nesting, number: int) -> _Nesting:
    scope = _join_scopes(around, equation)
    where = jaxpr.locate(equation) or around.where
    return dataclasses.replace(around, address=(*around.address, number), scope=scope, where=where)


def _join_scopes(around: _Nesting, equation: Equation) -> str:
    return "/".join(part for part in (around.scope, jaxpr.read_scope(equation)) if part)


def _is_weight_only(scope: str) -> bool:
    """Return whether a name scope is of a product of floats and codes that the function computes itself."""
    return scope.rpartition("/")[2] == recording.WEIGHT_ONLY


def _walk_cond(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    results = []
    branches = list(enumerate(jaxpr.read_branches(equation)))
    # Each branch has the same product, for one platform; the last one, for any platform, has no chunks.
    if _is_weight_only(_join_scopes(around, equation)):
        branches = branches[-1:]
    for number, body in branches:
        # The first operand is the index of the branch.
        results.append(_walk(body, origins[1:], _enter(equation, around, number), findings))
    reason = f"cond at {jaxpr.locate(equation)}"
    # Which branch runs is not known here, so that a parameter which one of them returns cannot be followed.
    return [views.combine(list(found), reason) for found in zip(*results, strict=True)]


def _walk_scan(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    scan = jaxpr.read_scan(equation)
    first_stacked = scan.constants + scan.carries
    constants, carries = origins[: scan.constants], origins[scan.constants : first_stacked]
    parts = [views.take_layer(x) if isinstance(x, View | Joined) else x for x in origins[first_stacked:]]
    inner = _enter(equation, around, 0)
    # Only a scan over stacked parameters has layers; one over time runs the same layer in each iteration.
    if any(views.list_views(part) for part in parts):
        inner = dataclasses.replace(
            inner, layers=(*inner.layers, around.address), lengths=(*inner.lengths, scan.length)
        )

    def walk_body(assumed: list[Origin], trial: _Findings) -> list[Origin]:
        return _walk(scan.body, [*constants, *assumed, *parts], inner, trial)

    assumed, results = _compute_fixpoint(equation, carries, walk_body, around, findings)
    stacked = [views.combine([origin], _describe_loop(equation)) for origin in results[scan.carries :]]
    return [*assumed, *stacked]


def _walk_while(equation: Equation, origins: list[Origin], around: _Nesting, findings: _Findings) -> list[Origin]:
    loop = jaxpr.read_while(equation)
    first, second = loop.condition_constants, loop.condition_constants + loop.body_constants

    # A condition returns nothing but a bool, so a range observed in it could not be kept.
    condition = _enter(equation, around, 0)
    condition = dataclasses.replace(condition, reason=around.reason or "in the condition of a loop")

    def walk_bodies(assumed: list[Origin], trial: _Findings) -> list[Origin]:
        _walk(loop.condition, [*origins[:first], *assumed], condition, trial)
        return _walk(loop.body, [*origins[first:second], *assumed], _enter(equation, around, 1), trial)

    return _compute_fixpoint(equation, origins[second:], walk_bodies, around, findings)[0]


def _compute_fixpoint(
    equation: Equation, carries: list[Origin], walk: Callable[..., Any], around: _Nesting, findings: _Findings
) -> tuple[list[Origin], list[Origin]]:
    """Return origins of the carries of a loop that hold in every iteration, and origins of the results of its body."""
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
    invariant = frozenset(number for number, origin in enumerate(assumed) if views.list_views(origin))
    findings.invariant[around.address] = invariant
    return assumed, results


def _merge(equation: Equation, before: Origin, after: Origin) -> Origin:
    """Return the origin of a carry that is one thing before an iteration and another thing after it."""
    return before if before == after else views.combine([before, after], _describe_loop(equation))


def _describe_loop(equation: Equation) -> str:
    return f"{jaxpr.read_name(equation)} at {jaxpr.locate(equation)}"


_BODIES = {
    jaxpr.SCAN: _walk_scan,
    jaxpr.WHILE: _walk_while,
    jaxpr.COND: _walk_cond,
    jaxpr.REMAT: _walk_boundary,
    **dict.fromkeys(jaxpr.CALLS, _walk_call),
    **dict.fromkeys(jaxpr.CUSTOM_RULES, _walk_boundary),
}
