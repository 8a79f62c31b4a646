"""Which part of a matrix of cases runs by default; the rest has the marker `full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_others_full(cases: Iterable[Any], by_default: Collection[Any]) -> list[Any]:
    """Returns pytest parameters for all cases; those that are not in by_default run under the marker `full` only."""
    cases = list(cases)
    unknown = [case for case in by_default if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in by_default else as_full(case) for case in cases]


def as_full(case: Any, name: str | None = None) -> Any:
    """Returns the pytest parameter for a case, or a tuple of several arguments, that runs under `full` only."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full, id=name)
