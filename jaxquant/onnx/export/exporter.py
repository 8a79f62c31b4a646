"""The writing of a traced program as an ONNX graph."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from onnx import helper

from ..._core import dtypes, recording
from ..._program import jaxpr
from ..._program.interpreter import Visit
from ..._program.jaxpr import Equation
from . import (
    codes,
    contractions,
    conversions,
    elementwise,
    gather,
    integers,
    moves,
    packed_weights,
    program,
    quantized,
    reductions,
    small_floats,
    values,
)
from .graph import MARKS, PRIMITIVES, ModelGraph, WriterCall
from .values import Spec, UnsupportedError, Value

# The modules that fill the tables.
WRITERS = (
    *(codes, contractions, conversions, elementwise, gather, integers, moves, packed_weights, quantized, reductions),
    small_floats,
)


SCAN_CHOICES = ("auto", "unroll", "loop")
# With "auto", scans of more steps are loops. Layers of the same kind are scanned in fewer steps than a sequence.
_MOST_UNROLLED = 64
# The folders of the modules that a user did not write.
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (jax.__file__ or "", os.path.dirname(recording.__file__ or ""))
)


def locate(equations: Sequence[Any]) -> str:
    """Return the file and the line of the user, or of a framework, that the last of nested equations comes from."""
    # What JAX has traced before, such as the body of jnp.cumprod, does not know its caller; the call does.
    for equation in reversed(equations):
        traceback = equation.source_info.traceback
        for frame in () if traceback is None else traceback.frames:
            if not frame.file_name.startswith(_LIBRARIES):
                return f"{frame.file_name}:{frame.line_num}"
    return jaxpr.locate(equations[-1])


def _is_empty(spec: Spec) -> bool:
    is_plain = isinstance(spec.dtype, np.dtype)  # and no key of random numbers
    return is_plain and values.is_static(spec.shape) and 0 in spec.shape


class Exporter(program.ExportInterpreter):
    """The evaluation of a program that writes its equations into a graph.

    Attributes:
        graph: the graph.
        unsupported: what ONNX cannot express, in the order of the program, with its place in the source.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.unsupported: dict[str, None] = {}
        self._depth = 0
        self._calls: list[Any] = []

    def is_constant(self, value: Any) -> bool:
        """Return whether a value is known before the model runs."""
        return value.is_known

    def make_known(self, array: Any, source: Value | None = None) -> Value:
        """Return the value of an array, under the name that its source has in the graph if that has its dtype."""
        if source is None or source.dtype == array.dtype:
            return values.make_known(array, None if source is None else source.hint)
        is_widened = source.dtype in (dtypes.FLOAT16, dtypes.BFLOAT16) and array.dtype == dtypes.FLOAT32
        return values.make_known(array)._replace(narrow=source.array if is_widened else None)

    def read_known(self, value: Value) -> Any:
        """Return the array of a known value."""
        return value.array

    def write_equation(self, equation: Equation, operands: Sequence[Any], specs: Sequence[Spec]) -> Sequence[Any]:
        """Write an equation; one that ONNX lacks is noted, and its results are placeholders."""
        name = jaxpr.read_name(equation)
        self.graph.scope = jaxpr.read_scope(equation)
        avals = [Spec(jaxpr.read_shape(atom), jaxpr.read_dtype(atom)) for atom in equation.invars]
        try:
            if name == program.MARK:
                return self._write_mark(equation.params["mark"], operands, specs, avals)
            if specs and all(_is_empty(spec) for spec in specs):
                # ONNX Runtime's Expand does not shorten a dimension of 1 to 0.
                return [values.make_known(np.zeros(spec.shape, values.choose_container(spec.dtype))) for spec in specs]
            if not moves.has_writer(name):
                raise UnsupportedError("no operator of ONNX")
            parameters = {**equation.params, "input_shapes": [aval.shape for aval in avals]}
            parameters["input_dtypes"] = [aval.dtype for aval in avals]
            call = WriterCall(name, operands, parameters, specs)
            # An operator of its own, such as Split, makes fewer nodes than the table of moves.
            writer = PRIMITIVES.get(name) or functools.partial(moves.write_moves, equation)
            results = writer(self.graph, call)
            results = [results] if isinstance(results, Value) else results
            pairs = zip(results, specs, strict=True)
            return [conversions.keep_bits(self.graph, name, result, spec.dtype) for result, spec in pairs]
        except UnsupportedError as error:
            text = name if name != program.MARK else equation.params["mark"].name
            return self._note_unsupported(text, error, equation, specs)

    def enter_call(self, equation: Equation, operands: list[Any], visit: Visit) -> Sequence[Any]:
        """Return the results of the body, and note meanwhile who calls the equations that are written."""
        self._calls.append(equation)
        try:
            return super().enter_call(equation, operands, visit)
        finally:
            self._calls.pop()

    def _note_unsupported(self, name: str, error: Exception, equation: Any, specs: Sequence[Spec]) -> list[Value]:
        """Note what ONNX cannot express, and return placeholders of its results."""
        # The error lists everything that is not supported; with placeholders, the export goes on and finds it.
        self.unsupported[f"{name} ({error}) at {locate([*self._calls, equation])}"] = None
        return [Value(spec.shape, values.choose_container(spec.dtype), "unsupported") for spec in specs]

    def _write_mark(
        self, mark: recording.Mark, operands: Sequence[Value], specs: Sequence[Spec], avals: Sequence[Spec]
    ) -> Sequence[Any]:
        results = None
        if mark.name in MARKS:
            parameters = {**mark.bind_arguments(operands), "input_shapes": [aval.shape for aval in avals]}
            results = MARKS[mark.name](self.graph, WriterCall(mark.name, operands, parameters, specs))
        if results is None:
            results = self._expand_mark(mark, operands, avals)
        results = [results] if isinstance(results, Value) else list(results)
        if self._depth == 0:
            # Inside of the arithmetic of a mark there are no points: `verify` evaluates the mark as a whole.
            for place in program.list_points(mark):
                self.graph.points.append(self.graph.store(results[place]))
        return results

    def _expand_mark(self, mark: recording.Mark, operands: Sequence[Value], avals: Sequence[Spec]) -> Any:
        """Write the arithmetic of a mark that has no operator of its own."""
        trace = program.trace(mark.run_arithmetic, [jax.ShapeDtypeStruct(*aval) for aval in avals])
        self._depth += 1
        try:
            return self.evaluate_body(jaxpr.Body(trace.program, trace.constants), operands)
        finally:
            self._depth -= 1

    def skip_points(self, mark: recording.Mark, results: Sequence[Any]) -> None:
        """Leave out the quantize points of a mark with results that are constants of the model."""
        if self._depth == 0:
            self.graph.points += ["" for _ in program.list_points(mark)]

    def roll_scan(self, equation: Equation, operands: Sequence[Value], specs: Sequence[Spec]) -> list[Value] | None:
        """Return the results of a scan that is a loop in the graph, or None for one that is written out."""
        # `verify` does not see the scans in the arithmetic of a mark, so none of them is a loop.
        if self._depth:
            return None
        scan = jaxpr.read_scan(equation)
        try:
            is_loop = is_rolled(self.graph.scan, scan, operands)
            self.graph.rolled.append(is_loop)
            return write_scan(self, scan, operands, specs) if is_loop else None
        except UnsupportedError as error:
            return self._note_unsupported("scan", error, equation, specs)

    def slice_row(self, stacked: Value, index: int, spec: Spec) -> Value:
        """Return an entry of the first dimension."""
        if stacked.is_known:
            array = np.asarray(stacked.array)
            hint = None if stacked.hint is None else f"{stacked.hint}.{index}"
            return values.make_known(array[index], hint)
        if stacked.shape and bool(stacked.shape[0] == 1):
            # A dimension of 1 stands for a longer one with equal entries.
            index = 0
        name = self.graph.add("Gather", [self.graph.store(stacked), self.graph.add_constant(np.int64(index))], axis=0)
        return Value(tuple(stacked.shape[1:]), stacked.dtype, name)

    def stack_rows(self, rows: Sequence[Any], spec: Spec) -> Value:
        """Return entries as a stack."""
        if all(row.is_known for row in rows):
            return values.make_known(np.stack([np.asarray(row.array) for row in rows]))
        shape = tuple(spec.shape[1:])
        axis = self.graph.ints(0)
        names = [self.graph.add("Unsqueeze", [self.graph.store_full(row, shape), axis]) for row in rows]
        name = names[0] if len(names) == 1 else self.graph.add("Concat", names, axis=0)
        return Value(tuple(spec.shape), values.choose_container(spec.dtype), name)

    def select_branch(self, index: Value, branches: Sequence[Value], spec: Spec) -> Value:
        """Return the value of the branch with the given index."""
        if index.dtype == np.bool_:
            return elementwise.choose(self.graph, index, branches[1], branches[0])
        result = branches[-1]
        for place in range(len(branches) - 2, -1, -1):
            operator = "Equal" if place else "LessOrEqual"
            is_place = elementwise.apply_operator(
                self.graph, operator, [index, values.make_known(np.int32(place))], np.bool_
            )
            result = elementwise.choose(self.graph, is_place, branches[place], result)
        return result


# Scans as ONNX's Scan: the body once, as a graph of its own.


def is_rolled(choice: str, scan: Any, operands: Sequence[Value]) -> bool:
    """Return whether a scan is a loop in the model."""
    if not isinstance(scan.length, int):
        if choice == "unroll":
            raise UnsupportedError("a scan of symbolic length")
        return True
    # A scan of known operands is evaluated now, and a loop of no steps needs no node.
    if scan.length == 0 or choice == "unroll" or all(x.is_known for x in operands):
        return False
    return choice == "loop" or scan.length > _MOST_UNROLLED


def write_scan(exporter: Exporter, scan: Any, operands: Sequence[Value], outputs: Sequence[Spec]) -> list[Value]:
    """Return the results of a scan, written as a node with a body.

    Args:
        exporter: what writes the equations of the body.
        scan: the scan, as `read_scan` returns it.
        operands: the constants of the loop, the carries, the stacked operands.
        outputs: the shapes and dtypes of the results.
    """
    graph, first = exporter.graph, scan.constants + scan.carries
    specs = [Spec(jaxpr.read_shape(v), values.choose_container(jaxpr.read_dtype(v))) for v in scan.body.program.invars]
    pairs = list(zip(operands, specs, strict=True))
    carried = [graph.store_full(x, spec.shape) for x, spec in pairs[scan.constants : first]]
    stacks = [graph.store_full(x, (scan.length, *spec.shape)) for x, spec in pairs[first:]]
    if not stacks:  # the operator counts the steps by an operand
        if not isinstance(scan.length, int):
            raise UnsupportedError("a scan of symbolic length without operands to scan")
        stacks, specs = [graph.add_constant(np.zeros(scan.length, np.bool_))], [*specs, Spec((), np.dtype(np.bool_))]
    body, points = _write_body(exporter, scan, operands, specs)
    turns: dict[str, Any] = {"scan_input_directions": [1] * len(stacks)} if scan.reverse else {}
    # onnx cannot make an attribute of an empty list.
    if scan.reverse and len(outputs) > scan.carries:
        turns["scan_output_directions"] = [1] * (len(outputs) - scan.carries)
    names = graph.add("Scan", [*carried, *stacks], len(outputs), body=body, num_scan_inputs=len(stacks), **turns)
    graph.points += [[graph.nodes[-1].name, point] if point else "" for point in points]
    names = names if isinstance(names, list) else [names]
    return [
        Value(tuple(spec.shape), values.choose_container(spec.dtype), name)
        for name, spec in zip(names, outputs, strict=True)
    ]


def _write_body(
    exporter: Exporter, scan: Any, operands: Sequence[Value], specs: Sequence[Spec]
) -> tuple[Any, list[Any]]:  # fmt: skip
    """Return the graph of one step, and its quantize points."""
    graph = exporter.graph
    outer = graph.open_body()
    inputs = [
        Value(tuple(spec.shape), spec.dtype, graph.make_name("state" if i < scan.carries else "entry"))
        for i, spec in enumerate(specs[scan.constants :])
    ]
    count = len(scan.body.program.invars) - scan.constants
    results = exporter.evaluate_body(scan.body, [*operands[: scan.constants], *inputs[:count]])
    types = [Spec(jaxpr.read_shape(v), values.choose_container(jaxpr.read_dtype(v))) for v in scan.body.program.outvars]
    # An output has to be the result of a node of the body, which nothing else is.
    names = [graph.add("Identity", [graph.store_full(x, spec.shape)]) for x, spec in zip(results, types, strict=True)]
    nodes, points = graph.close_body(outer, names)
    before = [values.describe(graph.store(x), x.shape, x.dtype) for x in inputs]
    after = [values.describe(name, spec.shape, spec.dtype) for name, spec in zip(names, types, strict=True)]
    return helper.make_graph(nodes, graph.make_name("body"), before, after), points
