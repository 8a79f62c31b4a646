"""The evaluation of a traced program one equation after the other, with its calls, loops and branches opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._core import dtypes, recording
from ..._program import jaxpr, moves
from ..._program.interpreter import Interpreter, Visit
from ..._program.jaxpr import Equation
from . import values
from .values import Spec

MARK = "jaxquant_mark"
# Up to this many codes are dequantized while the model is built.
_TABLE = 256


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> jaxpr.Trace:
    """Return the program of a function of arrays, in which the operations of jaxquant are marks."""
    with recording.record():
        return jaxpr.trace(function, *arguments)


class ExportInterpreter(Interpreter):
    """The evaluation of a program with its calls, loops and branches opened, and with what is known folded.

    Scans of a known length are written out, and of branches the results are selected. A subclass says what a value is,
    by the methods that raise `NotImplementedError` here.
    """

    calls = (*jaxpr.CALLS, *jaxpr.OTHER_CALLS)

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is known before the program runs."""
        raise NotImplementedError

    def make_known(self, array: Any, source: Any = None) -> Any:
        """Return an array as a value with the name of its source."""
        raise NotImplementedError

    def read_known(self, value: Any) -> Any:
        """Return a known value as an array."""
        raise NotImplementedError

    def write_equation(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any]:
        """Return the results of an equation with operands that are not all known."""
        raise NotImplementedError

    def skip_points(self, mark: recording.Mark, results: Sequence[Any]) -> None:
        """Count the quantize points of a mark with known results."""
        raise NotImplementedError

    def roll_scan(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any] | None:
        """Return the results of a scan that is kept as a loop, or None for one that is written out."""
        raise NotImplementedError

    def slice_row(self, stacked: Any, index: int, spec: Spec) -> Any:
        """Return an entry of the first dimension of a value of the given shape and dtype."""
        raise NotImplementedError

    def stack_rows(self, rows: Sequence[Any], spec: Spec) -> Any:
        """Return values of the given shape and dtype as the entries of a new first dimension."""
        raise NotImplementedError

    def select_branch(self, index: Any, branches: Sequence[Any], spec: Spec) -> Any:
        """Return the value of the branch with the given index."""
        raise NotImplementedError

    def has_effect(self, equation: Equation) -> bool:
        """Return whether a model without an equation would do less: not for what `jax.debug` shows."""
        # Nor is anything computed for its sake, which ONNX might not be able to express.
        if not equation.effects or jaxpr.read_name(equation) in jaxpr.DEBUG_CALLS:
            return False
        bodies = jaxpr.list_bodies(equation)
        return not bodies or any(self.has_effect(inner) for body in bodies for inner in body.program.eqns)

    def read_literal(self, literal: Any) -> Any:
        """Return a number in the program as a known value of its dtype."""
        return self.make_known(np.asarray(literal.val, literal.aval.dtype))

    def read_constant(self, array: Any) -> Any:
        """Return an array that the program closes over as a known value."""
        return self.make_known(array)

    def evaluate_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation: folded if its operands are known, opened if it has bodies, or written."""
        name = jaxpr.read_name(equation)
        if name == "platform_index":
            # The branch without a platform has none of the forms that only suit XLA on a CPU.
            platforms = equation.params["platforms"]
            branch = next((i for i, names in enumerate(platforms) if names is None), len(platforms) - 1)
            return [self.make_known(np.int32(branch))]
        if all(self.is_constant(x) for x in operands) and self._is_foldable(equation):
            return _fold(self, equation, operands)
        return super().evaluate_equation(equation, operands, visit)

    def compute_equation(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of an equation that is not opened."""
        return self.write_equation(equation, operands, _read_specs(equation))

    def _is_foldable(self, equation: Equation) -> bool:
        # The bodies of other equations are folded one equation at a time.
        is_opened = self.can_enter(equation) and jaxpr.read_name(equation) != jaxpr.WHILE
        return not is_opened and _is_foldable(equation, _read_specs(equation))

    def enter_scan(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of a scan: of a loop, or of one step after the other."""
        specs = _read_specs(equation)
        results = self.roll_scan(equation, operands, specs)
        return self._unroll_scan(equation, operands, specs) if results is None else results

    def _unroll_scan(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> list[Any]:
        """Return the results of a scan of known length, one step after the other."""
        scan = jaxpr.read_scan(equation)
        constants, first = operands[: scan.constants], scan.constants + scan.carries
        carries, stacks = list(operands[scan.constants : first]), operands[first:]
        if not isinstance(scan.length, int):
            raise values.UnsupportedError("a scan of symbolic length")
        row_specs = [Spec(jaxpr.read_shape(v), jaxpr.read_dtype(v)) for v in scan.body.program.invars[first:]]
        rows: list[Any] = [None] * scan.length
        order = range(scan.length)[::-1] if scan.reverse else range(scan.length)
        for i in order:
            entries = [self.slice_row(stack, i, spec) for stack, spec in zip(stacks, row_specs, strict=True)]
            results = self.evaluate_body(scan.body, [*constants, *carries, *entries])
            carries, rows[i] = results[: scan.carries], results[scan.carries :]
        out_specs = specs[scan.carries :]
        if scan.length == 0:
            # No step tells what is stacked, so the declared types do.
            return [*carries, *(self.make_known(np.zeros(spec.shape, spec.dtype)) for spec in out_specs)]
        columns = zip(zip(*rows, strict=True), out_specs, strict=True)
        return [*carries, *(self.stack_rows(column, spec) for column, spec in columns)]

    def enter_cond(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of the branch that a known index selects, or a selection of the results of all."""
        branches = jaxpr.read_branches(equation)
        index, arguments = operands[0], operands[1:]
        if self.is_constant(index):
            # lax.cond and lax.switch clamp their index.
            place = min(max(int(np.asarray(self.read_known(index))), 0), len(branches) - 1)
            return self.evaluate_body(branches[place], arguments)
        results = [self.evaluate_body(body, arguments) for body in branches]
        pairs = zip(zip(*results, strict=True), _read_specs(equation), strict=True)
        return [self.select_branch(index, column, spec) for column, spec in pairs]


def _read_specs(equation: Equation) -> list[Spec]:
    return [Spec(jaxpr.read_shape(v), jaxpr.read_dtype(v)) for v in equation.outvars]


# Known values.


def _is_foldable(equation: Equation, specs: Sequence[Spec]) -> bool:
    name = jaxpr.read_name(equation)
    # Without operands everything is known, but a symbolic dimension is known only when the model runs.
    if name == "dim_as_value" or equation.effects or not all(values.is_static(spec.shape) for spec in specs):
        return False
    # Weights stay codes: the model dequantizes them. A table of the values of all codes is a small vector.
    shape, is_small = specs[0].shape, math.prod(specs[0].shape) <= _TABLE
    if name == "convert_element_type" and jaxpr.read_dtype(equation.invars[0]) in values.CODES:
        # A short vector is more likely to hold zero points.
        is_float = jnp.issubdtype(specs[0].dtype, jnp.floating)
        return not is_float or (is_small and len([n for n in shape if n != 1]) < 2)
    if name == MARK and equation.params["mark"].name in ("dequantize", "scale_levels"):
        return is_small and len(shape) < 2
    if name == "gather" and jnp.issubdtype(specs[0].dtype, jnp.floating):
        # The scales of blocks stay as few as they are: the model repeats them.
        return math.prod(shape) <= math.prod(jaxpr.read_shape(equation.invars[0]))
    return True


def _fold(interpreter: ExportInterpreter, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    name, parameters, arrays = jaxpr.read_name(equation), equation.params, [interpreter.read_known(x) for x in operands]
    if name == MARK:
        results = parameters["mark"].evaluate(*arrays)
        interpreter.skip_points(parameters["mark"], results)
    elif name == "broadcast_in_dim":  # a view: the graph holds one copy of what repeats
        view = _broadcast(arrays[0], parameters["shape"], parameters["broadcast_dimensions"])
        return [interpreter.make_known(view, operands[0])]
    elif (moved := _move_known(equation, arrays)) is not None:
        # A barrier has a result for each operand, and other primitives read the elements of the first one.
        return [interpreter.make_known(array, operand) for array, operand in zip(moved, operands, strict=False)]
    else:
        with recording.pause(), jax.ensure_compile_time_eval():
            results = jaxpr.evaluate(equation, [jnp.asarray(array) for array in arrays])
    source = operands[0] if name == "convert_element_type" else None
    return [None if result is None else interpreter.make_known(result, source) for result in results]


def _broadcast(array: Any, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
    if not isinstance(array, np.ndarray):
        return jax.lax.broadcast_in_dim(array, shape, dimensions)
    index = [1] * len(shape)
    for axis, n in zip(dimensions, array.shape, strict=True):
        index[axis] = n
    return np.broadcast_to(array.reshape(index), shape)


class KnownElements(moves.Elements):
    """A known array, followed through moves that copy nothing: the graph holds one copy of what they share."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def keep(self) -> KnownElements:
        """Return the array."""
        return self

    def transpose(self, order: Sequence[int]) -> KnownElements:
        """Return the array with its dimensions in another order."""
        return KnownElements(self.array.transpose(order))

    def reshape(self, shape: Sequence[int]) -> KnownElements:
        """Return the array in another shape."""
        return KnownElements(self.array.reshape(shape))

    def squeeze(self, axes: Sequence[int], shape: Sequence[int]) -> KnownElements:
        """Return the array without some dimensions."""
        return KnownElements(self.array.reshape(shape))


def _move_known(equation: Equation, arrays: Sequence[Any]) -> list[np.ndarray] | None:
    """Return the results of an equation that moves elements as views of its operands, or None if it copies them."""
    name = jaxpr.read_name(equation)
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return None
    if name == moves.BARRIER:
        return list(arrays)
    row = moves.MOVES.get(name)
    if row is None or row.move is None:
        return None
    results = row.move(equation, KnownElements(arrays[0]), *arrays[1:])
    return None if any(result is None for result in results) else [result.array for result in results]


class Tap(ExportInterpreter):
    """The evaluation of a program on arrays, which keeps the codes of all quantize points in their order.

    Attributes:
        codes: the codes so far; for a point in a loop, the codes of all steps.
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

    def write_equation(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any]:
        """Return the results of an equation as JAX computes them."""
        if jaxpr.read_name(equation) != MARK:
            return jaxpr.evaluate(equation, [jnp.asarray(x) for x in operands])
        mark = equation.params["mark"]
        results = mark.run_arithmetic(*(jnp.asarray(x) for x in operands))
        self.codes += [results[i] for i in list_points(mark)]
        return results

    def skip_points(self, mark: recording.Mark, results: Sequence[Any]) -> None:
        """Keep known codes, which a model traced with other shapes may compute."""
        self.codes += [jnp.asarray(results[i]) for i in list_points(mark)]

    def roll_scan(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> list[Any] | None:
        """Return the results of `jax.lax.scan` for a loop of the model."""
        is_rolled = self.place < len(self.rolled) and self.rolled[self.place]
        self.place += 1
        if not is_rolled:
            return None
        scan = jaxpr.read_scan(equation)
        place, first = self.place, scan.constants + scan.carries
        program = scan.body.program

        def advance(carries: Any, entries: Any) -> Any:
            inner = Tap(self.rolled, place)  # JAX may trace the body twice
            arguments = [*operands[: scan.constants], *carries, *entries]
            results = inner.evaluate_body(scan.body, arguments)
            self.place = inner.place
            results = [jnp.asarray(x, jaxpr.read_dtype(v)) for x, v in zip(results, program.outvars, strict=True)]
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

    def select_branch(self, index: Any, branches: Sequence[Any], spec: Spec) -> Any:
        """Return the value of the branch with the given index."""
        choice = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
        result = jnp.asarray(branches[0])
        for place, value in enumerate(branches[1:], 1):
            result = jnp.where(choice == place, value, result)
        return result


def list_points(mark: recording.Mark) -> list[int]:
    """Return the places of the codes among the results of a mark: what a verification compares."""
    # Two of these return the codes of another mark; a dynamic zero point shows in the codes that it shifts.
    if mark.name in ("keep", "dynamic_range", "name_output"):
        return []
    return [i for i, (_, dtype) in enumerate(mark.results) if dtype in (*values.CODES, *dtypes.SMALL_FLOATS)]
