"""The evaluation of a traced program one equation after the other, with its calls, loops and branches opened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._core import recording
from ...transform import QuantizedTree
from ...transform._programs import jaxpr as programs
from . import values
from .values import Spec

MARK = "jaxquant_mark"
# Equations that call a program once.
_CALLS = (*programs.CALLS, "remat2", "checkpoint", "custom_vmap_call", "custom_lin", "core_closed_call", "pjit")
# Up to this many codes are dequantized while the model is built.
_TABLE = 256


class Trace(NamedTuple):
    """A function, traced with marks.

    Attributes:
        program: the program of its flat arguments.
        constants: the arrays that it closes over.
        result: the pytree of its results.
    """

    program: Any
    constants: Sequence[Any]
    result: Any


class Backend(Protocol):
    """What is done with the equations of a program."""

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is known before the program runs."""
        ...

    def make_known(self, array: Any, source: Any = None) -> Any:
        """Return an array as a value, whose name is that of its source."""
        ...

    def read_known(self, value: Any) -> Any:
        """Return a known value as an array."""
        ...

    def evaluate_equation(self, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any]:
        """Return the results of an equation, not all of whose operands are known."""
        ...

    def enter_call(self, equation: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the program that an equation calls is evaluated."""
        ...

    def skip_points(self, mark: recording.Mark, results: Sequence[Any]) -> None:
        """Count the quantize points of a mark whose results are known."""
        ...

    def roll_scan(self, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any] | None:
        """Return the results of a scan that is kept as a loop, or None for one that is written out."""
        ...

    def slice_row(self, stacked: Any, index: int, spec: Spec) -> Any:
        """Return an entry of the first dimension of a value of the given shape and dtype."""
        ...

    def stack_rows(self, rows: Sequence[Any], spec: Spec) -> Any:
        """Return values of the given shape and dtype as the entries of a new first dimension."""
        ...

    def select(self, index: Any, branches: Sequence[Any], spec: Spec) -> Any:
        """Return the value of the branch with the given index."""
        ...


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> Trace:
    """Return the program of a function of arrays, in which the operations of jaxquant are marks."""
    with recording.record():
        return Trace(*programs.trace(function, *arguments))


class Traced(NamedTuple):
    """A function of parameters and inputs, traced.

    Attributes:
        trace: the program; its first arguments are the arrays of the parameters.
        arrays: these arrays.
        names: their paths in the parameters.
    """

    trace: Trace
    arrays: list[Any]
    names: list[str]


def trace_call(function: Callable[..., Any], params: tuple[Any, ...], structure: Any, specs: Sequence[Any]) -> Traced:
    """Return the program of a function of the leaves of its inputs, and of parameters, if it has any."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    places = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, jax.Array | np.ndarray)]
    arrays = [_canonicalize(paths[i][1]) for i in places]

    def flat(*inputs: Any) -> Any:
        # Leaves that are no arrays, such as Python numbers, stay what they are, and may decide about shapes.
        leaves = [leaf for _, leaf in paths]
        for place, array in zip(places, inputs, strict=False):
            leaves[place] = array
        return function(*jax.tree.unflatten(tree, leaves), *jax.tree.unflatten(structure, inputs[len(places) :]))

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    # A `QuantizedTree` has the parameters below a name of its own.
    start = 2 if params and isinstance(params[0], QuantizedTree) else 1
    names = [_name_path(paths[i][0], start) for i in places]
    return Traced(trace(flat, [*shapes, *specs]), arrays, names)


def _name_path(path: Sequence[Any], start: int) -> str:
    keys = [read_key(key) for key in path]
    is_range = start == 2 and keys[1] != "params"
    return ".".join(keys[1:] if is_range else keys[start:])


def _canonicalize(array: Any) -> Any:
    """Return an array of numpy with the dtype that JAX has for it: 32 bits in place of 64, unless x64 is enabled."""
    if isinstance(array, jax.Array):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def read_key(key: Any) -> str:
    """Return an entry of the path of a leaf as a word."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def run_program(backend: Backend, program: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a program; constants and arguments are values."""
    bound: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*constants, *arguments), strict=True))

    def read_atom(atom: Any) -> Any:
        if programs.is_literal(atom):
            return backend.make_known(np.asarray(atom.val, atom.aval.dtype))
        return bound[atom]

    for equation in _find_live(program):
        operands = [read_atom(atom) for atom in equation.invars]
        for variable, result in zip(equation.outvars, _run_equation(backend, equation, operands), strict=True):
            if not programs.is_unused(variable):
                bound[variable] = result
    return [read_atom(atom) for atom in program.outvars]


def _find_live(program: Any) -> list[Any]:
    """Return the equations on which a result depends, in their order."""
    needed = {atom for atom in program.outvars if not programs.is_literal(atom)}
    live = []
    for equation in reversed(program.eqns):
        if needed.intersection(v for v in equation.outvars if not programs.is_unused(v)):
            live.append(equation)
            needed.update(atom for atom in equation.invars if not programs.is_literal(atom))
    return live[::-1]


def _run_equation(backend: Backend, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    name = programs.find_name(equation)
    if name == "platform_index":
        return [backend.make_known(np.int32(_find_default_platform(equation)))]
    specs = [Spec(tuple(v.aval.shape), v.aval.dtype) for v in equation.outvars]
    if all(backend.is_constant(x) for x in operands) and _is_foldable(name, equation, specs):
        return _fold(backend, name, equation, operands)
    if name in _CALLS:
        body = _read_call(equation)
        with backend.enter_call(equation):
            return run_program(backend, body.program, [backend.make_known(c) for c in body.constants], operands)
    if name == programs.SCAN:
        results = backend.roll_scan(equation, operands, specs)
        return _unroll_scan(backend, equation, operands, specs) if results is None else results
    if name == programs.COND:
        return _run_branches(backend, equation, operands, specs)
    return backend.evaluate_equation(equation, operands, specs)


def _read_call(equation: Any) -> Any:
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    return next(programs.open_body(equation.params[name]) for name in names if name in equation.params)


def _find_default_platform(equation: Any) -> int:
    """Return the index of the branch without a platform: it has none of the forms that only suit XLA on a CPU."""
    platforms = equation.params["platforms"]
    return next((i for i, names in enumerate(platforms) if names is None), len(platforms) - 1)


# Known values.


def _is_foldable(name: str, equation: Any, specs: Sequence[Spec]) -> bool:
    # Without operands everything is known, but a symbolic dimension is known only when the model runs.
    if name == "dim_as_value" or equation.effects or not all(values.is_static(spec.shape) for spec in specs):
        return False
    if name in _CALLS or name in (programs.SCAN, programs.COND):
        return False  # their bodies are folded one equation at a time
    # Weights stay codes: the model dequantizes them. A table of the values of all codes is a small vector.
    shape, is_small = specs[0].shape, math.prod(specs[0].shape) <= _TABLE
    if name == "convert_element_type" and equation.invars[0].aval.dtype in values.CODES:
        # A short vector is more likely to hold zero points.
        is_float = jnp.issubdtype(specs[0].dtype, jnp.floating)
        return not is_float or (is_small and len([n for n in shape if n != 1]) < 2)
    if name == MARK and equation.params["mark"].name == "dequantize":
        return is_small and len(shape) < 2
    return True


def _fold(backend: Backend, name: str, equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    parameters, arrays = equation.params, [backend.read_known(x) for x in operands]
    if name == MARK:
        results = parameters["mark"].evaluate(*arrays)
        backend.skip_points(parameters["mark"], results)
    elif name == "broadcast_in_dim":  # a view: the graph holds one copy of what repeats
        view = _broadcast(arrays[0], parameters["shape"], parameters["broadcast_dimensions"])
        return [backend.make_known(view, operands[0])]
    elif name in _VIEWS and all(isinstance(array, np.ndarray) for array in arrays):
        return [backend.make_known(_VIEWS[name](arrays[0], parameters), operands[0])]
    else:
        with recording.pause(), jax.ensure_compile_time_eval():
            results = programs.evaluate(equation, [jnp.asarray(array) for array in arrays])
    return [None if result is None else backend.make_known(result) for result in results]


def _broadcast(array: Any, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
    if not isinstance(array, np.ndarray):
        return jax.lax.broadcast_in_dim(array, shape, dimensions)
    index = [1] * len(shape)
    for axis, n in zip(dimensions, array.shape, strict=True):
        index[axis] = n
    return np.broadcast_to(array.reshape(index), shape)


_VIEWS: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "reshape": lambda array, p: array.reshape(p["new_sizes"]),
    "transpose": lambda array, p: array.transpose(p["permutation"]),
    "squeeze": lambda array, p: array.squeeze(tuple(p["dimensions"])),
    "stop_gradient": lambda array, p: array,
    "copy": lambda array, p: array,
    "optimization_barrier": lambda array, p: array,
}


# Loops and branches.


def _unroll_scan(backend: Backend, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]) -> list[Any]:
    """Return the results of a scan of known length, one step after the other."""
    scan = programs.read_scan(equation)
    constants, first = operands[: scan.constants], scan.constants + scan.carries
    carries, stacks = list(operands[scan.constants : first]), operands[first:]
    if not isinstance(scan.length, int):
        raise values.UnsupportedError("a scan of symbolic length")
    body_constants = [backend.make_known(c) for c in scan.body.constants]
    program = scan.body.program
    row_specs = [Spec(tuple(v.aval.shape), v.aval.dtype) for v in (*program.invars[first:],)]
    rows: list[Any] = [None] * scan.length
    order = range(scan.length)[::-1] if scan.reverse else range(scan.length)
    for i in order:
        entries = [backend.slice_row(stack, i, spec) for stack, spec in zip(stacks, row_specs, strict=True)]
        results = run_program(backend, program, body_constants, [*constants, *carries, *entries])
        carries, rows[i] = results[: scan.carries], results[scan.carries :]
    out_specs = specs[scan.carries :]
    if scan.length == 0:
        # No step tells what is stacked, so the declared types do.
        empty = [backend.make_known(np.zeros(spec.shape, spec.dtype)) for spec in out_specs]
        return [*carries, *empty]
    return [
        *carries,
        *(backend.stack_rows(column, spec) for column, spec in zip(zip(*rows, strict=True), out_specs, strict=True)),
    ]


def _run_branches(
    backend: Backend, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]
) -> Sequence[Any]:  # fmt: skip
    """Return the results of the branch that a known index selects, or a selection of the results of all branches."""
    branches = programs.read_branches(equation)
    index, arguments = operands[0], operands[1:]

    def run_branch(body: Any) -> list[Any]:
        return run_program(backend, body.program, [backend.make_known(c) for c in body.constants], arguments)

    if backend.is_constant(index):
        # lax.cond and lax.switch clamp their index.
        place = min(max(int(np.asarray(backend.read_known(index))), 0), len(branches) - 1)
        return run_branch(branches[place])
    results = [run_branch(body) for body in branches]
    return [backend.select(index, column, spec) for column, spec in zip(zip(*results, strict=True), specs, strict=True)]


class Tap:
    """A backend that computes the program, and keeps the codes of all quantize points in their order.

    Attributes:
        codes: the codes so far; of a point in a loop, those of all steps.
        rolled: for each scan of the program whether it is a loop in the model.
        place: the number of scans so far.
    """

    def __init__(self, rolled: Sequence[bool] = (), place: int = 0) -> None:
        self.codes: list[Any] = []
        self.rolled, self.place = rolled, place

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is not traced."""
        return not isinstance(value, Tracer)

    def make_known(self, array: Any, source: Any = None) -> Any:
        """Return an array as it is."""
        return array

    def read_known(self, value: Any) -> Any:
        """Return an array as `numpy` holds it, if it can."""
        return values.make_known(value).array

    def evaluate_equation(self, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any]:
        """Return the results of an equation as JAX computes them."""
        if programs.find_name(equation) != MARK:
            return programs.evaluate(equation, [jnp.asarray(x) for x in operands])
        mark = equation.params["mark"]
        results = mark.run_arithmetic(*(jnp.asarray(x) for x in operands))
        self.codes += [results[i] for i in find_points(mark)]
        return results

    def enter_call(self, equation: Any) -> contextlib.AbstractContextManager[None]:
        """Do nothing: what is computed does not depend on who calls."""
        return contextlib.nullcontext()

    def skip_points(self, mark: recording.Mark, results: Sequence[Any]) -> None:
        """Keep known codes, which a model traced with other shapes may compute."""
        self.codes += [jnp.asarray(results[i]) for i in find_points(mark)]

    def roll_scan(self, equation: Any, operands: Sequence[Any], specs: Sequence[Spec]) -> list[Any] | None:
        """Return the results of `jax.lax.scan` for a loop of the model."""
        is_rolled = self.place < len(self.rolled) and self.rolled[self.place]
        self.place += 1
        if not is_rolled:
            return None
        scan = programs.read_scan(equation)
        place, first = self.place, scan.constants + scan.carries
        program = scan.body.program

        def advance(carries: Any, entries: Any) -> Any:
            inner = Tap(self.rolled, place)  # JAX may trace the body twice
            arguments = [*operands[: scan.constants], *carries, *entries]
            results = run_program(inner, program, scan.body.constants, arguments)
            self.place = inner.place
            results = [jnp.asarray(x, v.aval.dtype) for x, v in zip(results, program.outvars, strict=True)]
            return results[: scan.carries], (results[scan.carries :], [jnp.asarray(x) for x in inner.codes])

        carries = [
            jnp.broadcast_to(jnp.asarray(x, spec.dtype), spec.shape)
            for x, spec in zip(operands[scan.constants : first], specs[: scan.carries], strict=True)
        ]
        stacks = [jnp.asarray(x) for x in operands[first:]]
        last, (rows, codes) = jax.lax.scan(advance, carries, stacks, scan.length, scan.reverse)
        self.codes += codes
        return [*last, *rows]

    def slice_row(self, stacked: Any, index: int, spec: Spec) -> Any:
        """Return an entry of the first dimension."""
        return stacked[index]

    def stack_rows(self, rows: Sequence[Any], spec: Spec) -> Any:
        """Return entries as a stack."""
        return jnp.stack([jnp.asarray(row) for row in rows])

    def select(self, index: Any, branches: Sequence[Any], spec: Spec) -> Any:
        """Return the value of the branch with the given index."""
        choice = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
        result = jnp.asarray(branches[0])
        for place, value in enumerate(branches[1:], 1):
            result = jnp.where(choice == place, value, result)
        return result


def find_points(mark: recording.Mark) -> list[int]:
    """Return the places of the codes among the results of a mark: what a verification compares."""
    # Two of these return the codes of another mark; a dynamic zero point shows in the codes that it shifts.
    if mark.name in ("keep", "dynamic_range", "name_output"):
        return []
    return [i for i, (_, dtype) in enumerate(mark.results) if dtype in values.CODES]
