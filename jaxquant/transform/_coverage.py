"""The report of what becomes of each contraction of a program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._arrays import diagnostics
from .._arrays.spec import QuantSpec
from .._core import checks, dtypes
from .._program import jaxpr
from .._program.analysis import CODES, INTEGERS, Analysis, Site
from ._plan import ProgramPlan, SitePlan, describe_site
from ._regions.rounding_points import Regions


class Row(NamedTuple):
    """What becomes of one contraction, or of one lookup of a parameter.

    Attributes:
        name: the path of its parameter and the number of its use, as "dense/kernel#1"; without a parameter the name of
            the operation and its name scope.
        paths: the paths of its parameters.
        operation: "dot_general", "ragged_dot", "conv_general_dilated", "take", or the name of another primitive that
            contracts.
        shapes: the shapes of its operands.
        form: "integer" (codes times codes), "small-float" (the same in float8 or float4), "weight-only" (floats times
            codes), "lookup" (entries of codes) or "float". A product that the function computes from codes already is
            "integer", such as one of `jaxquant.attention`, or "weight-only", as of `jaxquant.matmul`, without a spec.
        weight: the spec of its parameter, or None.
        activations: the specs of its activations; empty if they stay in floats.
        reason: why it stays as it is; or why its weight is quantized otherwise than its rule says: the parameter has
            another use, for which a rule names a finer one; or "".
        where: its file, line and function.
        scope: the name scopes around it.
        is_wanted: whether a rule asked for codes.
        output: the spec of its result, or None if the result is floats.
        output_reason: why the result is floats, if a rule asks for codes, or "".
    """

    name: str
    paths: tuple[str, ...]
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    form: str
    weight: QuantSpec | None
    activations: tuple[QuantSpec, ...]
    reason: str
    where: str
    scope: str
    is_wanted: bool
    output: QuantSpec | None = None
    output_reason: str = ""

    @property
    def is_replaced(self) -> bool:
        """Whether it computes with other arrays than the function: with codes of its weight or of its activations."""
        return self.weight is not None or bool(self.activations)

    @property
    def can_saturate(self) -> bool:
        """Whether sums of such codes can saturate in an exported model, in ONNX Runtime on x86-64 without VNNI.

        The specs tell whether the codes can be large enough; `jq.count_saturating_pairs` tells whether the codes
        of given weights are. The kernel of a convolution whose result is floats, ConvInteger, is exact.
        """
        if self.form != "integer" or (self.operation == "conv_general_dilated" and self.output is None):
            return False
        specs = [*self.activations, *([] if self.weight is None else [self.weight])]
        return any(diagnostics.can_saturate(a, b) for a in specs for b in specs)


class Operation(NamedTuple):
    """An operation between contractions that takes codes and returns codes.

    Attributes:
        name: the name of its range, such as "add#1"; for an operation without one, `operation`.
        operation: "add", "multiply", "concatenate", "average_pool", "mean", "leaky_relu" or "sigmoid"; or an operation
            that keeps the scale of its operand: "max_pool", "clip", "reshape" or another primitive.
        shape: the shape of its result.
        output: the spec of its result, or None if it keeps the scale.
        where: its file, line and function.
        scope: the name scopes around it.
    """

    name: str
    operation: str
    shape: tuple[int, ...]
    output: QuantSpec | None
    where: str
    scope: str


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A row for each contraction of a program, in program order; `print` shows a table, and iteration yields the rows.

    Attributes:
        rows: the rows.
        operations: the operations between contractions that stay in codes, in program order.
    """

    rows: tuple[Row, ...]
    operations: tuple[Operation, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        """Return an iterator over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def floats(self) -> tuple[Row, ...]:
        """The contractions that stay in floats."""
        return tuple(row for row in self.rows if row.form == "float")

    @property
    def saturating(self) -> tuple[Row, ...]:
        """The contractions whose sums can saturate in ONNX Runtime on x86-64 processors without VNNI."""
        return tuple(row for row in self.rows if row.can_saturate)

    @property
    def summary(self) -> str:
        """The number of contractions in each form, as text."""
        counts = ((form, sum(row.form == form for row in self.rows)) for form in _FORMS)
        return ", ".join(f"{count} {form}" for form, count in counts if count) or "no contractions"

    @property
    def outputs(self) -> str:
        """How many of the contractions that a rule asks to return codes do so, and what stays in codes, as text."""
        wanted = [row for row in self.rows if row.output is not None or row.output_reason]
        count = sum(row.output is not None for row in wanted)
        names = collections.Counter(operation.operation for operation in self.operations)
        operations = ", ".join(name if n == 1 else f"{name} ({n})" for name, n in names.items())
        text = f"{count} of {len(wanted)} contractions give codes"
        return f"{text}; in codes: {operations}" if operations else text

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the rows by name, with specs as text, for JSON."""
        return {row.name: _to_dict(row) for row in self.rows}

    def __str__(self) -> str:
        """Return the table."""
        lines = [_HEADER, *(_list_cells(row) for row in self.rows)]
        has_outputs = any(row.output is not None or row.output_reason for row in self.rows)
        if has_outputs:
            outputs = [_describe_output(row) for row in self.rows]
            lines = [(*line[:6], output, *line[6:]) for line, output in zip(lines, ["output", *outputs], strict=True)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        text += [self.summary, *([self.outputs] if has_outputs else [])]
        if self.saturating:
            count, where = len(self.saturating), "in ONNX Runtime on x86-64 without VNNI"
            text.append(f"{count} can saturate {where}; reduce_range=True avoids it")
        return "\n".join(text)


_FORMS = ("integer", "small-float", "weight-only", "lookup", "float")
_HEADER = ("name", "operation", "shapes", "form", "weight", "activations", "where", "reason")


def make_coverage(analysis: Analysis, plan: ProgramPlan, names: Sequence[str]) -> Coverage:
    """Return the report of a planned program."""
    rows = tuple(_make_row(site, plan.sites[site.name], names, plan.regions) for site in analysis.sites.values())
    return Coverage(rows, tuple(_list_operations(plan.regions)))


def _make_row(site: Site, plan: SitePlan, names: Sequence[str], regions: Regions) -> Row:
    view, point = describe_site(site, names), regions.get_point(site)
    return Row(
        view.name, view.paths, view.operation, view.shapes, _name_form(site, plan), plan.weight,
        tuple(x.spec if x.wide is None else x.wide for x in plan.activations),
        plan.reason, view.where, view.scope, plan.is_wanted,
        None if point is None else point.output.spec, regions.reasons.get(site.name, "") if point is None else "",
    )  # fmt: skip


# The names under which users know primitives.
_CLIPS = ("max", "min", "clamp", "select_n", *jaxpr.CUSTOM_RULES)
_MOVES = {
    "reduce_window_max": "max_pool", "reduce_max": "max", "name": "checkpoint_name", **dict.fromkeys(_CLIPS, "clip")
}  # fmt: skip


def _list_operations(regions: Regions) -> Iterator[Operation]:
    """Yield the operations that stay in codes, without the parts of contractions and of other operations."""
    for action in regions.actions.values():
        node, point = action.node, action.point
        shape = jaxpr.read_shape(node.equation.outvars[0])
        if action.kind == "move":
            name = _MOVES.get(node.name, node.name)
            yield Operation(name, name, shape, None, node.where, node.scope)
        elif action.kind == "start" and point is not None and point.site is None:
            yield Operation(point.name, point.operation, shape, point.output.spec, node.where, node.scope)


def _name_form(site: Site, plan: SitePlan) -> str:
    if not plan.is_replaced:
        return {INTEGERS: "integer", CODES: "weight-only"}.get(site.reason, "float")
    if site.operation == "take":
        return "lookup"
    if not plan.activations:
        return "weight-only"
    return "small-float" if any(x.spec.dtype in dtypes.SMALL_FLOATS for x in plan.activations) else "integer"


def _list_cells(row: Row) -> tuple[str, ...]:
    shapes = " and ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes)
    activations = ", ".join(_shorten_spec(spec) for spec in row.activations)
    weight = "" if row.weight is None else _shorten_spec(row.weight)
    return (row.name, row.operation, shapes, row.form, weight, activations, _shorten_location(row.where), row.reason)


def _describe_output(row: Row) -> str:
    if row.output is not None:
        return f"{row.output.dtype}"
    return f"float: {row.output_reason}" if row.output_reason else "float"


def _shorten_spec(spec: QuantSpec) -> str:
    kind, arguments = repr(spec.granularity).rstrip(")").split("(", 1)
    values = "".join(character for character in arguments if character.isdigit() or character in ", ")
    return f"{spec.dtype} {kind}({values.strip(', ')})"


def _shorten_location(where: str) -> str:
    """Return the last folder and file of a place, with its line."""
    path, _, _ = where.partition(" (")
    file, _, position = path.partition(":")
    return ":".join(["/".join(file.split("/")[-2:]), *position.split(":")[:1]]) if file else ""


def _to_dict(row: Row) -> dict[str, Any]:
    fields = row._asdict()
    specs = {"activations": [*map(repr, row.activations)]}
    specs |= {name: None if fields[name] is None else repr(fields[name]) for name in ("weight", "output")}
    # `jax.export` has sizes that are symbols, which JSON has not.
    shapes = [[n if isinstance(n, int) else str(n) for n in shape] for shape in row.shapes]
    return {**fields, **specs, "paths": list(row.paths), "shapes": shapes, "can_saturate": row.can_saturate}


def check_strict(function: str, coverage: Coverage) -> None:
    """Raise ContractValueError if a contraction that a rule wants on codes stays in floats."""
    missing = [f"{row.name} ({row.operation} at {row.where}): {row.reason}" for row in coverage.floats if row.is_wanted]
    expected = 'codes for each contraction that a rule matches (strict=True); Rule(path, keep="float") excludes one'
    checks.require(not missing, function, "rules", expected, "floats for " + "; ".join(missing))
