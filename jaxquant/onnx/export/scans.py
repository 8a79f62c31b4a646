"""Scans as ONNX's Scan: the body once, as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import helper

from . import program, values
from .values import Spec, UnsupportedError, Value

if TYPE_CHECKING:
    from .exporter import Exporter

CHOICES = ("auto", "unroll", "loop")
# With "auto", scans of more steps are loops. Layers of the same kind are scanned in fewer steps than a sequence.
_MOST_UNROLLED = 64


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
    specs = [Spec(tuple(v.aval.shape), values.find_container(v.aval.dtype)) for v in scan.body.program.invars]
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
        Value(tuple(spec.shape), values.find_container(spec.dtype), name)
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
    constants = [exporter.make_known(constant) for constant in scan.body.constants]
    arguments = [*operands[: scan.constants], *inputs[:count]]
    results = program.run_program(exporter, scan.body.program, constants, arguments)
    types = [Spec(tuple(v.aval.shape), values.find_container(v.aval.dtype)) for v in scan.body.program.outvars]
    # An output has to be the result of a node of the body, which nothing else is.
    names = [graph.add("Identity", [graph.store_full(x, spec.shape)]) for x, spec in zip(results, types, strict=True)]
    nodes, points = graph.close_body(outer, names)
    before = [values.describe(graph.store(x), x.shape, x.dtype) for x in inputs]
    after = [values.describe(name, spec.shape, spec.dtype) for name, spec in zip(names, types, strict=True)]
    return helper.make_graph(nodes, graph.make_name("body"), before, after), points
