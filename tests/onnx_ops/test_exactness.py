"""Every case of the full check; the README's table is the same check, printed."""

import pytest

from .. import conftest, exactness


@pytest.mark.parametrize("case", exactness.cases(), ids=lambda case: case.id)
def test_no_mismatch(case: exactness.Case) -> None:
    wrong = {name: bad for name, (_, bad) in exactness.check(case, conftest.SEED).items() if bad}
    assert not wrong, f"mismatches by transform: {wrong}"
