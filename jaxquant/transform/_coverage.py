"""The report of what becomes of each contraction of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._arrays.spec import QuantSpec
from .._core import checks
from ._plan import Plan, SitePlan, describe_site
from ._programs.analysis import Analysis
from ._programs.sites import Site


class Row(NamedTuple):
    """What becomes of one contraction, or of one lookup of a parameter.

    Attributes:
        name: the path of its parameter and the number of its use, as "dense/kernel#1"; without a parameter the name of
            the operation and its name scope.
        paths: the paths of its parameters.
        operation: "dot_general", "conv_general_dilated", "take", or the name of another primitive that contracts.
        shapes: the shapes of its operands.
        form: "integer" (codes times codes), "weight-only" (floats times codes), "lookup" (entries of codes) or "float".
        weight: the spec of its parameter, or None.
        activations: the specs of its activations; empty if they stay in floats.
        reason: why it stays in floats, or "".
        where: its file, line and function.
        scope: the name scopes around it.
        is_wanted: whether a rule asked for codes.
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


@dataclasses.dataclass(frozen=True)
class Coverage:
    """A row for each contraction of a program, in program order; `print` shows a table, and iteration yields the rows.

    Attributes:
        rows: the rows.
    """

    rows: tuple[Row, ...]

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
    def summary(self) -> str:
        """The number of contractions in each form, as text."""
        counts = ((form, sum(row.form == form for row in self.rows)) for form in _FORMS)
        return ", ".join(f"{count} {form}" for form, count in counts if count) or "no contractions"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the rows by name, with specs as text, for JSON."""
        return {row.name: _to_dict(row) for row in self.rows}

    def __str__(self) -> str:
        """Return the table."""
        lines = [_HEADER, *(_list_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, self.summary])


_FORMS = ("integer", "weight-only", "lookup", "float")
_HEADER = ("name", "operation", "shapes", "form", "weight", "activations", "where", "reason")


def make_coverage(analysis: Analysis, plan: Plan, names: Sequence[str]) -> Coverage:
    """Return the report of a planned program."""
    return Coverage(tuple(_make_row(site, plan.sites[site.name], names) for site in analysis.sites.values()))


def _make_row(site: Site, plan: SitePlan, names: Sequence[str]) -> Row:
    view = describe_site(site, names)
    return Row(
        view.name, view.paths, view.operation, view.shapes, _name_form(site, plan), plan.weight,
        tuple(operand.spec for operand in plan.activations), plan.reason, view.where, view.scope, plan.is_wanted,
    )  # fmt: skip


def _name_form(site: Site, plan: SitePlan) -> str:
    if not plan.is_replaced:
        return "float"
    if site.operation == "take":
        return "lookup"
    return "integer" if plan.activations else "weight-only"


def _list_cells(row: Row) -> tuple[str, ...]:
    shapes = " and ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes)
    activations = ", ".join(_shorten_spec(spec) for spec in row.activations)
    weight = "" if row.weight is None else _shorten_spec(row.weight)
    return (row.name, row.operation, shapes, row.form, weight, activations, _shorten_place(row.where), row.reason)


def _shorten_spec(spec: QuantSpec) -> str:
    kind, arguments = repr(spec.granularity).rstrip(")").split("(", 1)
    values = "".join(character for character in arguments if character.isdigit() or character in ", ")
    return f"{spec.dtype} {kind}({values.strip(', ')})"


def _shorten_place(where: str) -> str:
    """Return the last folder and file of a place, with its line."""
    path, _, _ = where.partition(" (")
    file, _, position = path.partition(":")
    return ":".join(["/".join(file.split("/")[-2:]), *position.split(":")[:1]]) if file else ""


def _to_dict(row: Row) -> dict[str, Any]:
    fields = row._asdict()
    specs = {"weight": None if row.weight is None else repr(row.weight), "activations": [*map(repr, row.activations)]}
    return {**fields, **specs, "paths": list(row.paths), "shapes": [list(shape) for shape in row.shapes]}


def check_strict(function: str, coverage: Coverage) -> None:
    """Raise ContractValueError if a contraction that a rule wants on codes stays in floats."""
    missing = [f"{row.name} ({row.operation} at {row.where}): {row.reason}" for row in coverage.floats if row.is_wanted]
    expected = 'codes for each contraction that a rule matches (strict=True); Rule(path, keep="float") excludes one'
    checks.require(not missing, function, "rules", expected, "floats for " + "; ".join(missing))
