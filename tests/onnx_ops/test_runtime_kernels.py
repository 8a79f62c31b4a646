"""ONNX Runtime's kernels for this processor beside the formulas: sums and divisions are the same on all of them."""

from __future__ import annotations

import numpy as np

from .. import runtime_kernels
from ..cases import microsoft_exactness
from ..support import processor

EVERYWHERE = {"QuantizeLinear", "MatMulInteger", "ConvInteger"}


def test_kernels_have_the_codes_of_the_formulas(rng: np.random.Generator) -> None:
    counts = {name: (count, wrong) for name, count, wrong in runtime_kernels.compare(int(rng.integers(2**32)))}
    assert set(counts) > EVERYWHERE
    assert all(count > 50 for count, _ in counts.values())
    # The formulas of the others follow the kernels for x86-64 with FMA.
    followed = processor.count_lanes() > 0 and microsoft_exactness.is_fused()
    assert {name for name, (_, wrong) in counts.items() if wrong and (followed or name in EVERYWHERE)} == set()
