"""The float8 and float4 conversions against ml_dtypes, every code and every half way."""

import jax
import numpy as np
import pytest

from jaxquant._core import dtypes

from ..oracles import onnx_text
from ..support import transforms

NAMES = (*onnx_text.FLOAT8, "float4_e2m1fn")


def every(name: str) -> np.ndarray:
    return np.arange(16 if name.startswith("float4") else 256, dtype=np.uint8).view(onnx_text.dtype(name))


@pytest.mark.parametrize("name", (*NAMES, "float8_e8m0fnu"))
def test_decode_every_code(name: str) -> None:
    codes = every(name)
    assert transforms.mismatches(np.asarray(jax.jit(dtypes.decode_small_float)(codes)), codes.astype(np.float32)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_encode_every_code_and_every_half_way(name: str, rng: np.random.Generator) -> None:
    values = np.unique(every(name).astype(np.float64))
    values = values[np.isfinite(values)]
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    sides = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    random = (rng.normal(size=100_000) * np.exp(rng.uniform(-12, 12, 100_000))).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-30], np.float32)
    x = np.concatenate([values.astype(np.float32), middle, *sides, random, special])
    with np.errstate(all="ignore"):
        expected = x.astype(onnx_text.dtype(name))
    actual = jax.jit(lambda x: dtypes.encode_small_float(x, onnx_text.dtype(name), saturate=False))(x)
    assert transforms.mismatches(np.asarray(actual), expected) == 0
