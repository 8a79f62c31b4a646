"""What the benchmarks count: mismatches against exact sums, and the deviation of ONNX Runtime apart from them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import contractions, inputs, integer_networks, onnxruntime_models
from benchmarks.contest import FLOAT32, JAXQUANT, ONNX_RUNTIME, Contest

CONVOLUTION = contractions._Conv(8, 16, 3)
BUILDERS = {
    "matmul_integer": lambda: contractions._matmul_integer((8, 64, 16), "uint8", "int8"),
    "matmul_integer of uint8": lambda: contractions._matmul_integer((8, 64, 16), "uint8", "uint8"),
    "matmul_integer of int8": lambda: contractions._matmul_integer((2, 8, 64, 16), "int8", "int8"),
    "dynamic_quantize_matmul": lambda: contractions._dynamic_dense((8, 64, 16)),
    "qlinear_conv": lambda: contractions._qlinear_conv((1, 8, 9, 9), CONVOLUTION),
    "mlp": lambda: integer_networks._compare(integer_networks._mlp, (2, 64)),
    "separable": lambda: integer_networks._compare(integer_networks._separable, (1, 8, 8, 3)),
}


def saturate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product of uint8 by int8 as x86-64 without VNNI adds it: two neighbors along K within int16."""
    pairs = np.einsum("mpk,pkn->mpn", a.reshape(len(a), -1, 2).astype(np.int64), b.reshape(-1, 2, b.shape[1]))
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(1).astype(np.int32)


def test_multiplies_exactly(rng: np.random.Generator) -> None:
    for a_dtype, b_dtype in (("uint8", "int8"), ("int8", "uint8"), ("int8", "int8"), ("uint8", "uint8")):
        a, b = inputs.codes((2, 5, 96), a_dtype), inputs.codes((2, 96, 7), b_dtype, seed=5)
        points = (rng.integers(*inputs.bounds(a_dtype)), rng.integers(*inputs.bounds(b_dtype)))
        expected = np.matmul(a.astype(np.int64) - points[0], b.astype(np.int64) - points[1])
        np.testing.assert_array_equal(inputs.multiply_exactly(a, b, *points), expected)


def test_runtime_is_charged_with_its_own_deviation(rng: np.random.Generator) -> None:
    a, b = rng.integers(200, 256, (4, 64), np.uint8), rng.integers(100, 128, (64, 8), np.int8)
    exact = a.astype(np.int32) @ b.astype(np.int32)
    wrong = saturate(a, b)
    calls: dict[str, Any] = {JAXQUANT: lambda: exact, ONNX_RUNTIME: lambda: [wrong], FLOAT32: lambda: 0 * exact}
    contest = Contest(calls[JAXQUANT], calls, lambda: inputs.multiply_exactly(a, b), 0, judges_runtime=True)
    assert program._compare(contest, calls) == {JAXQUANT: 0, ONNX_RUNTIME: 32, FLOAT32: 32}
    medians = {kind: {"median_ms": 1.0} for kind in program._KINDS}
    record: dict[str, Any] = {
        "name": "product", "shape": "4x64x8", "timings": dict.fromkeys(calls, medians), "missing": {},
        "mismatches": program._compare(contest, calls), "runtime_is_expected": False,
    }  # fmt: skip
    opponents = (ONNX_RUNTIME, FLOAT32)
    cells = dict(zip(program._head(opponents, ""), program._cells(record, opponents, ""), strict=True))
    assert cells["mismatches jaxquant / float32 JAX"] == "0 / 32"
    assert cells["mismatches ONNX Runtime"] == "32"


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BUILDERS)
def test_expected_results_are_exact_on_every_processor(name: str) -> None:
    """jaxquant's sums are exact, and ONNX Runtime's are where its products do not saturate."""
    with jax.numpy_rank_promotion("allow"):  # as the benchmarks run
        contest = BUILDERS[name]()
        calls: dict[str, Any] = {JAXQUANT: contest.jaxquant, ONNX_RUNTIME: contest.opponents[ONNX_RUNTIME]}
        counts = program._compare(contest, calls)
    assert counts[JAXQUANT] == 0
    saturates = onnxruntime_models.products_saturate()
    if not saturates or name.endswith(("of uint8", "of int8")):
        assert counts[ONNX_RUNTIME] == 0
    elif name == "matmul_integer":
        assert counts[ONNX_RUNTIME] != 0
