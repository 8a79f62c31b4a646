"""Quantized arrays in programs that are saved: the same numbers after a round trip through bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxquant as jq
from jaxquant import Blocked, PerAxis, QuantizedArray, QuantSpec


def test_an_array_goes_in_and_out(rng: np.random.Generator) -> None:
    """The static attributes are saved too, including user-defined codebooks."""
    book = jq.Codebook("mine", tuple(i**3 for i in range(-8, 8)))  # jax.export saves no 2-bit arrays
    w = rng.normal(size=(8, 100)).astype(np.float32)
    q = jq.quantize(w, QuantSpec(book, Blocked(1, 64)))
    program = export.export(jax.jit(lambda q: q.astype(jnp.bfloat16)))(q)
    restored = export.deserialize(program.serialize()).call(q)
    assert isinstance(restored, QuantizedArray)
    assert (restored.dtype, restored.block_size, restored.codebook) == (jnp.bfloat16, 64, book)
    np.testing.assert_array_equal(restored.dequantize(), q.dequantize().astype(jnp.bfloat16))


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "asymmetric": lambda x, w: jq.matmul(jq.quantize(x, QuantSpec(jnp.uint8)), w),
    "a scale per row": lambda x, w: jq.matmul(jq.quantize(x, QuantSpec(jnp.int8, PerAxis(0))), w),
    "weight-only": jq.matmul,
    "sliced blocks": lambda x, w: jq.quantize(x, QuantSpec(jnp.int4, Blocked(1, 32)))[:, :70].dequantize(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batch_of_any_size(name: str, rng: np.random.Generator) -> None:
    """One saved program for every number of rows."""
    (rows,) = export.symbolic_shape("rows")
    w = jq.quantize(rng.normal(size=(100, 8)).astype(np.float32), QuantSpec(jnp.int8, PerAxis(1)))
    program = export.export(jax.jit(PROGRAMS[name]))(jax.ShapeDtypeStruct((rows, 100), jnp.float32), w)
    restored = export.deserialize(program.serialize())
    for n in (1, 5):
        x = rng.normal(size=(n, 100)).astype(np.float32)
        expected = PROGRAMS[name](x, w)
        tolerance = 1e-5 if name == "weight-only" else 0  # the order of float sums is XLA's
        np.testing.assert_allclose(restored.call(x, w), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_backends_lower(platform: str) -> None:
    """Both sides quantized, weight-only, blocks: programs for backends that are not here."""
    w = jq.quantize(jnp.ones((100, 8)), QuantSpec(jnp.int8, Blocked(0, 32)))
    x = jax.ShapeDtypeStruct((5, 100), jnp.float32)
    for name in ("asymmetric", "weight-only"):
        assert export.export(jax.jit(PROGRAMS[name]), platforms=[platform])(x, w).serialize()
