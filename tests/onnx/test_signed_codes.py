"""Codes of int8 in exported models, where ONNX Runtime's kernels and JAX's lookups treat uint8 differently."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

INT8, UINT8 = jq.QuantSpec(jnp.int8, narrow_range=False), jq.QuantSpec(jnp.uint8)


def check(function, *batches: jax.Array, batch: str | None = None, tolerance: float = 0) -> None:
    """Compare a function with its model in ONNX Runtime, and bit for bit with what `load` makes of the model."""
    model = jqonnx.export(function, [batches[0]], batch=batch)
    for level in ("disabled", "basic", "extended", "all"):
        report = jqonnx.verify(model, function, batches, level=level, tolerance=tolerance)
        assert report.is_exact, f"{level}\n{report}"
    loaded, params = jqonnx.load(model)
    for x in batches:
        expected, actual = jax.tree.leaves(jax.jit(function)(x)), jax.tree.leaves(jax.jit(loaded)(params, x))
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_codes_without_a_zero_point(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        q = jq.quantize(x, INT8, range=(-2.0, 2.0))
        assert q.zero_point is None
        out = jq.quantize(jnp.zeros((1,)), INT8, range=(-3.0, 3.0))
        return [
            jq.codes.add(q, q, output=out).codes,
            jq.codes.multiply(q, q, output=out).codes,
            jq.codes.average_pool(q, window_shape=(2, 2), output=out).codes,
            jq.codes.max_pool(q, window_shape=(2, 2)).codes,
            jq.codes.mean(q, (1, 2), output=out).codes,
            jq.ops.qlinear_softmax(q.codes, q.scale.reshape(()), None, np.float32(1 / 256), None, axis=-1),
        ]

    check(function, jnp.asarray(rng.normal(0, 1, (2, 4, 4, 3)), jnp.float32))


@pytest.mark.slow
def test_lookups_of_negative_codes(rng: np.random.Generator) -> None:
    """A loaded model relies on indices that are not negative, so the exporter reads the codes as uint8."""

    def function(x: jax.Array) -> list[jax.Array]:
        q, wide = jq.quantize(x, INT8, range=(-2.0, 2.0)), jq.quantize(2 * x, INT8, range=(-4.0, 4.0))
        codes, scale = q.codes, q.scale.reshape(())
        return [
            jq.concatenate([q, wide], 1, output=jq.Quantizer(INT8, 0.03, 4)).codes,
            jq.ops.qlinear_sigmoid(codes, scale, None, np.float32(1 / 256), np.int8(-128)),
            jq.ops.qlinear_leaky_relu(codes, scale, None, np.float32(0.02), np.int8(3), alpha=0.1),
            jq.ops.qlinear_where(x > 0, codes, scale, None, codes, np.float32(0.03), None, np.float32(0.02), None),
        ]

    check(function, jnp.asarray(rng.normal(0, 1, (4, 6)), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_int8_on_the_left_of_uint8_with_a_dynamic_range(rng: np.random.Generator, kind: str) -> None:
    """ONNX Runtime fuses the product to an operator without a kernel for these dtypes."""
    w = jq.quantize(jnp.asarray(rng.normal(0, 0.3, (5, 8)), jnp.float32), jq.QuantSpec(jnp.int8, jq.PerAxis(0)))

    def function(x: jax.Array) -> jax.Array:
        left = w if kind == "weights" else jq.quantize(x.T, jq.QuantSpec(jnp.int8))
        return jq.matmul(left, jq.quantize(x, UINT8))

    # The fused operator multiplies two computed scales in another order.
    check(function, jnp.asarray(rng.normal(0, 1, (8, 3)), jnp.float32), tolerance=1e-6)


@pytest.mark.slow
def test_a_scale_for_each_row_of_a_symbolic_batch(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> list[jax.Array]:
        specs = (jq.QuantSpec(jnp.int8, jq.PerAxis(0)), jq.QuantSpec(jnp.int8, jq.Blocked(1, 4)))
        return [jq.quantize(x, spec).codes for spec in specs]

    x = jnp.asarray(rng.normal(0, 1, (3, 8)), jnp.float32)
    check(function, x, x[:1], jnp.concatenate([x, -x]), batch="N")
