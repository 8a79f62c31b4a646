"""What the package relies on in the programs that JAX traces; the only module that knows the versions of JAX.

A program is a `jax.extend.core.Jaxpr`: a list of equations, each a primitive with operands, results and parameters.
Some primitives hold programs of their own ("bodies") in their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer, eval_jaxpr
from jax.extend import core, source_info_util

from .._core import recording

Equation = core.JaxprEqn
Program = core.Jaxpr
Variable = core.Var
Atom = core.Var | core.Literal
# Where an equation is: its index, and for each program around it the index of the outer equation and of the program in
# its parameters. JAX may trace an equation several times while a program is evaluated; the address stays the same.
Address = tuple[int, ...]

# The names of the primitives with bodies that this package enters.
SCAN, WHILE, COND, REMAT = "scan", "while", "cond", "remat2"
# A call of its body, once, with the same operands and results.
CALLS = ("jit", "closed_call", "core_call", "composite", "custom_jvp_call", "custom_vjp_call")
CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")
# Calls with a rule for `jax.vmap` or another reason to stay calls, and names in other versions of JAX.
OTHER_CALLS = ("checkpoint", "custom_vmap_call", "custom_lin", "core_closed_call", "pjit")
# What `jax.debug` calls.
DEBUG_CALLS = ("debug_callback", "debug_print", "inspect_sharding")
_CLIPS = ("max", "min", "clamp")
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")

# JAX requires it of a program, and uses it only in error messages about its arguments.
_NO_DEBUG_INFO = core.DebugInfo("eval_jaxpr", "jaxquant", None, None)


class Trace(NamedTuple):
    """A traced function.

    Attributes:
        program: the program.
        constants: the arrays that the function closed over, the values of `program.constvars`.
        result: the pytree of `jax.ShapeDtypeStruct` that it returns.
    """

    program: Program
    constants: Sequence[Any]
    result: Any


class Body(NamedTuple):
    """A program inside of an equation, with the arrays that it closes over."""

    program: Program
    constants: Sequence[Any]


class Scan(NamedTuple):
    """The layout of a scan: the first operands are constants of the loop, then come carries, then stacked operands."""

    body: Body
    constants: int
    carries: int
    length: int
    reverse: bool
    unroll: Any


class While(NamedTuple):
    """The layout of a while loop: constants of the condition, constants of the body, carries.

    `jax.vmap` makes one condition of several examples; each example keeps its carries when its loop has ended.
    """

    condition: Body
    body: Body
    condition_constants: int
    body_constants: int
    is_vectorized: bool


def trace(function: Callable[..., Any], *arguments: object) -> Trace:
    """Return the program of a function of arrays; no argument is read, only its shape and dtype."""
    with recording.analyze():
        program, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    body = open_body(program)
    return Trace(body.program, body.constants, result)


def open_body(program: Any) -> Body:
    """Return a program and its constants. Newer versions of JAX keep the constants in the program itself."""
    inner = getattr(program, "jaxpr", program)
    return Body(inner, tuple(getattr(program, "consts", ())))


def holds_tracers(body: Body) -> bool:
    """Return whether a tracer is among the arrays that a program, or one inside of it, closes over."""
    if any(isinstance(value, Tracer) for value in body.constants):
        return True
    return any(holds_tracers(inner) for equation in body.program.eqns for inner in list_bodies(equation))


def is_program(value: object) -> bool:
    """Return whether a parameter of an equation is a program."""
    return isinstance(getattr(value, "jaxpr", value), core.Jaxpr)


def is_literal(atom: object) -> bool:
    """Return whether an operand of an equation is a number in the program, and not a variable."""
    return isinstance(atom, core.Literal)


def is_unused(variable: object) -> bool:
    """Return whether a result of an equation is dropped."""
    return isinstance(variable, core.DropVar)


def read_shape(atom: Atom) -> tuple[Any, ...]:
    """Return the shape of an operand or a result; dimensions of `jax.export` may be symbols."""
    return tuple(atom.aval.shape)  # type: ignore[attr-defined]


def read_dtype(atom: Atom) -> Any:
    """Return the dtype of an operand or a result."""
    return atom.aval.dtype  # type: ignore[attr-defined]


def read_name(equation: Equation) -> str:
    """Return the name of an equation's primitive."""
    return str(equation.primitive.name)


def list_equations(program: Program) -> Iterator[Equation]:
    """Yield the equations of a program and of all programs in it."""
    for equation in program.eqns:
        yield equation
        for body in list_bodies(equation):
            yield from list_equations(body.program)


def list_bodies(equation: Equation) -> list[Body]:
    """Return all programs in the parameters of an equation, in their order."""
    return [open_body(value) for value in _list_programs(equation.params)]


def _list_programs(value: object) -> Iterator[Any]:
    if is_program(value):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _list_programs(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _list_programs(entry)


def has_effect(equation: Equation) -> bool:
    """Return whether an equation does something besides computing its results."""
    return bool(equation.effects)


def list_live(program: Program, is_needed: Callable[[Equation], bool] = has_effect) -> list[int]:
    """Return the indices of the equations with a result that is used, in program order.

    Args:
        program: the program.
        is_needed: whether an equation is among them although nothing reads its results: one that has an effect.
    """
    # JAX removes dead equations when it compiles, and has no public function that tells which ones they are.
    needed = {atom for atom in program.outvars if not is_literal(atom)}
    live = []
    for index in reversed(range(len(program.eqns))):
        equation = program.eqns[index]
        if any(variable in needed for variable in equation.outvars) or is_needed(equation):
            live.append(index)
            needed |= {atom for atom in equation.invars if not is_literal(atom)}
    return live[::-1]


def list_last_uses(program: Program, live: Sequence[int]) -> dict[int, list[Variable]]:
    """Return for each of some equations the variables that no later one reads, and that the program does not return."""
    readers = {atom: index for index in live for atom in program.eqns[index].invars if not is_literal(atom)}
    kept = {atom for atom in program.outvars if not is_literal(atom)}
    uses: dict[int, list[Variable]] = {}
    for atom, index in readers.items():
        if atom not in kept:
            uses.setdefault(index, []).append(atom)  # type: ignore[arg-type]
    return uses


def read_call(equation: Equation) -> Body:
    """Return the body of an equation of `CALLS`, of `OTHER_CALLS` or of `REMAT`."""
    # The primitives do not agree on the name of the parameter.
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    return next(open_body(equation.params[name]) for name in names if name in equation.params)


def is_clipped(program: Program, atom: Atom) -> bool:
    """Return whether an operand is the result of a maximum, minimum or clamp, such as a relu, inside a call or not."""
    if is_literal(atom):
        return False
    for equation in program.eqns:
        if atom in equation.outvars:
            name = read_name(equation)
            if name not in CALLS:
                return name in _CLIPS
            inner = read_call(equation).program
            return is_clipped(inner, inner.outvars[equation.outvars.index(atom)])
    return False


def read_shardings(equation: Equation) -> tuple[list[Any], list[Any]]:
    """Return the shardings that a call asks for its operands and its results; None where it asks for none."""
    counts = {"in_shardings": len(equation.invars), "out_shardings": len(equation.outvars)}
    before, after = (_read_shardings(equation.params.get(name, ()), count) for name, count in counts.items())
    return before, after


def _read_shardings(shardings: Sequence[Any], count: int) -> list[Any]:
    # Others are marks of a private class for "unspecified".
    concrete = [sharding if isinstance(sharding, jax.sharding.Sharding) else None for sharding in shardings]
    return concrete or [None] * count


def read_branches(equation: Equation) -> list[Body]:
    """Return the branches of a cond."""
    return [open_body(branch) for branch in equation.params["branches"]]


def read_platforms(equation: Equation) -> Any:
    """Return the names of the platforms of each branch of a cond, None for the default; or None if an index chooses."""
    return equation.params.get("branches_platforms")


def read_scan(equation: Equation) -> Scan:
    """Return the layout of a scan, found from shapes: versions of JAX describe it in different parameters."""
    body = open_body(equation.params["jaxpr"])
    # A stacked operand has one more dimension than the body sees.
    count = sum(_is_alike(*pair) for pair in zip(equation.invars, body.program.invars, strict=True))
    carries = sum(_is_alike(*pair) for pair in zip(equation.outvars, body.program.outvars, strict=True))
    parameters = equation.params
    return Scan(body, count - carries, carries, parameters["length"], parameters["reverse"], parameters["unroll"])


def _is_alike(outer: Atom, inner: Atom) -> bool:
    return len(read_shape(outer)) == len(read_shape(inner))


def read_while(equation: Equation) -> While:
    """Return the layout of a while loop."""
    parameters = equation.params
    condition = open_body(parameters["cond_jaxpr"])
    return While(
        condition, open_body(parameters["body_jaxpr"]), parameters["cond_nconsts"], parameters["body_nconsts"],
        bool(read_shape(condition.program.outvars[0])),
    )  # fmt: skip


def evaluate(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation as it stands, with its name scope, its derivative rules and its effects.

    A result that the program drops is None.
    """
    values: dict[core.Var, Any] = {
        atom: operand
        for atom, operand in zip(equation.invars, operands, strict=True)
        if not isinstance(atom, core.Literal)
    }
    # A program cannot return a variable that stands for a dropped result.
    outvars = [variable for variable in equation.outvars if not is_unused(variable)]
    program = core.Jaxpr([], list(values), outvars, [equation], equation.effects, _NO_DEBUG_INFO)
    results = iter(eval_jaxpr(program, (), *values.values()))
    return [None if is_unused(variable) else next(results) for variable in equation.outvars]


def locate(equation: Equation) -> str:
    """Return the file, the line and the function that an equation comes from."""
    return str(source_info_util.summarize(equation.source_info))


def read_scope(equation: Equation) -> str:
    """Return the name scopes around an equation, as `module/layer`."""
    return str(equation.source_info.name_stack)
