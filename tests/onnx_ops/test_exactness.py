"""Every case of the full check; the table of docs/measured/exactness.md is the same check, printed.

By default the first case of an operator runs under all of its transforms, or those that it names, and each other one
under one of them, in turn; the marker `full` has the rest.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from .. import conftest, exactness
from ..support.matrix import as_full


def list_parameters() -> Iterator[Any]:
    """A case with the transforms that run by default, then the same case with the other transforms."""
    runs: collections.Counter[tuple[str, ...]] = collections.Counter()
    for case in exactness.cases():
        line, operator = (case.operator, case.dtype, case.oracle), (case.operator,)
        is_first = runs[operator] == 0
        rarest = sorted(case.transforms, key=lambda name: (runs[(*line, name)], runs[(*operator, name)]))
        chosen = (case.by_default or case.transforms) if is_first else rarest[:1]
        runs.update([operator, *((*line, name) for name in chosen), *((*operator, name) for name in chosen)])
        rest = tuple(name for name in case.transforms if name not in chosen)
        yield pytest.param(dataclasses.replace(case, transforms=tuple(chosen)), id=case.id)
        if rest:
            yield as_full(dataclasses.replace(case, transforms=rest), f"{case.id}-other_transforms")


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", list(list_parameters()))
def test_no_mismatch(case: exactness.Case) -> None:
    wrong = {name: bad for name, (_, bad) in exactness.check(case, conftest.SEED).items() if bad}
    assert not wrong, f"mismatches by transform: {wrong}"
