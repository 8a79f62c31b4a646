"""The codes are numpy's under fast math too, as long as it honours divisions, NaN and infinities."""

from __future__ import annotations

import numpy as np

from .. import compiler_flags


def test_fast_math_that_honours_division_nan_and_infinities_keeps_the_codes(rng: np.random.Generator) -> None:
    """In a process of its own, for XLA reads its flags once; what other flags do is in `docs/exactness.md`."""
    found = compiler_flags.measure(compiler_flags.HONEST, int(rng.integers(2**31)))
    assert found == {"numbers": {}, "infinities": {}, "NaN": {}}
