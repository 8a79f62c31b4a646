"""The marker `full` for the cases of a matrix that do not run by default."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_others_full(cases: Iterable[Any], by_default: Collection[Any]) -> list[Any]:
    """Return pytest parameters for all cases. Those that are not in by_default run only with the marker `full`."""
    cases = list(cases)
    unknown = [case for case in by_default if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in by_default else as_full(case) for case in cases]


def as_full(case: Any, name: str | None = None) -> Any:
    """Return a pytest parameter, for a case or a tuple of arguments, that runs only with the marker `full`."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full, id=name)
