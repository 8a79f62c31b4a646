"""What a pass did with each parameter, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


class Note(NamedTuple):
    """What a pass did with a parameter.

    Attributes:
        path: the path of the parameter.
        action: what was done, or "unchanged".
        reason: why, if the pass could not do what it does elsewhere; or "".
        before: a measure before the pass, or None: the squared error of the outputs with round-to-nearest, for example.
        after: the same measure after it, or None.
    """

    path: str
    action: str
    reason: str = ""
    before: float | None = None
    after: float | None = None


@dataclasses.dataclass(frozen=True)
class Notes:
    """A row for each parameter that a pass looked at, in the order of the program; `print` shows a table.

    Attributes:
        rows: the rows.
        measure: what `before` and `after` are.
    """

    rows: tuple[Note, ...]
    measure: str = ""

    def __iter__(self) -> Iterator[Note]:
        """Return an iterator over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, path: str) -> Note:
        """Return the row of a parameter."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def __str__(self) -> str:
        """Return the table."""
        header = ("path", "action", "before", "after", "reason")
        lines = [header, *((r.path, r.action, _show(r.before), _show(r.after), r.reason) for r in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        text = ["  ".join(c.ljust(n) for c, n in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*text, *([f"before, after: {self.measure}"] if self.measure else [])])


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class Outcome(NamedTuple):
    """The result of a pass.

    Attributes:
        tree: a `QuantizedTree` for `Prepared.apply`; from passes that change floats, the parameters.
        notes: what the pass did with each parameter, and what it left and why.
    """

    tree: Any
    notes: Notes
