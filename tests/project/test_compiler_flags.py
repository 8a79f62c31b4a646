"""Fast math does not change the codes if it honors divisions, NaN and infinities."""

from __future__ import annotations

import numpy as np
import pytest

from .. import compiler_flags


@pytest.mark.slow
def test_fast_math_that_honors_division_nan_and_infinities_keeps_the_codes(rng: np.random.Generator) -> None:
    """XLA reads its flags once, so this runs in a new process. `docs/exactness.md` lists other flags."""
    counts = compiler_flags.measure(compiler_flags.HONEST, int(rng.integers(2**31)))
    assert counts == {"numbers": {}, "infinities": {}, "NaN": {}}
