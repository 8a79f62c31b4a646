"""Scans that are ONNX's Scan in the model: the same codes in each step, at each level of ONNX Runtime."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..support.equality import same_bits

UINT8, INT8 = jq.QuantSpec(jnp.uint8), jq.QuantSpec(jnp.int8, jq.PerAxis(1))


def make_recurrence(rng: np.random.Generator, reverse: bool):
    """Return a recurrence on codes whose carries are floats, codes and a count, with a quantized product in a step."""
    w, u = (jq.quantize(jnp.asarray(rng.normal(0, 0.3, (6, 6)), jnp.float32), INT8) for _ in "wu")

    def step(carry: Any, x: jax.Array) -> tuple[Any, Any]:
        h, codes, count = carry
        total = jq.matmul(jq.quantize(x, UINT8, range=(-2.0, 2.0)), w) + jq.matmul(
            jq.quantize(h, UINT8, range=(-1.0, 1.0)), u
        )
        h = jnp.clip(total, -1, 1)
        after = jq.quantize(h, jq.QuantSpec(jnp.int8), range=(-1.0, 1.0)).codes
        return (h, after, count + jnp.int32(1)), (h, codes, count)

    def run(x: jax.Array) -> Any:
        first = jnp.zeros((x.shape[1], 6), jnp.float32), jnp.zeros((x.shape[1], 6), jnp.int8), jnp.int32(0)
        return jax.lax.scan(step, first, x, reverse=reverse)

    return run, jnp.asarray(rng.normal(0, 1, (5, 2, 6)), jnp.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_quantized_recurrence(rng: np.random.Generator, reverse: bool) -> None:
    function, x = make_recurrence(rng, reverse)
    model = jqonnx.export(function, [x], scan="loop")
    onnx.checker.check_model(model, full_check=True)
    (loop,) = [node for node in model.graph.node if node.op_type == "Scan"]
    assert {"QuantizeLinear", "MatMulInteger"} <= {node.op_type for node in loop.attribute[0].g.node}
    report = jqonnx.verify(model, function, [x], level="disabled" if reverse else "all", tolerance=0)
    assert report.is_exact, str(report)
    # All steps are compared, in one row for each quantize point.
    assert [row.elements for row in report.rows if row.kind == "codes"] == [5 * 2 * 6] * 3
    loaded, params = jqonnx.load(model)
    for result, want in zip(jax.jit(loaded)(params, x), jax.tree.leaves(jax.jit(function)(x)), strict=True):
        same_bits(result, np.asarray(want))
    again = jqonnx.export(loaded, params, [x], scan="loop")
    assert [node.op_type for node in again.graph.node].count("Scan") == 1


def test_the_choice() -> None:
    def count(x: jax.Array) -> Any:
        return jax.lax.scan(lambda total, row: (total + row, total), jnp.zeros(3), x)

    for length, scan, is_loop in ((64, "auto", False), (65, "auto", True), (65, "unroll", False), (2, "loop", True)):
        model = jqonnx.export(count, [jnp.ones((length, 3))], scan=scan)
        operators = {node.op_type for node in model.graph.node}
        assert ("Scan" in operators) == is_loop
        stored = {entry.key: entry.value for entry in model.metadata_props}
        assert json.loads(stored["jaxquant.scans"]) == [is_loop]
    with pytest.raises(ValueError, match="scan: expected"):
        jqonnx.export(count, [jnp.ones((2, 3))], scan="Scan")
    # With a symbolic length it is a loop, and another length runs.
    model = jqonnx.export(count, [jnp.ones((3, 3))], batch="T")
    assert jqonnx.verify(model, count, [jnp.ones((3, 3)), jnp.ones((5, 3))], tolerance=0).is_exact
    with pytest.raises(ValueError, match="a scan of symbolic length"):
        jqonnx.export(count, [jnp.ones((3, 3))], batch="T", scan="unroll")


@pytest.mark.full
def test_nested_scans_without_operands(rng: np.random.Generator) -> None:
    w = jq.quantize(jnp.asarray(rng.normal(0, 0.3, (4, 4)), jnp.float32), INT8)

    def advance(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.clip(jq.matmul(jq.quantize(x, UINT8, range=(-1.0, 1.0)), w), -1, 1), None

    def run(x: jax.Array) -> jax.Array:
        def outer(x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jax.lax.scan(advance, x + row, None, length=3)[0]
            return x, x

        return jax.lax.scan(outer, x, jnp.arange(2.0))[1]

    x = jnp.asarray(rng.normal(0, 1, (3, 4)), jnp.float32)
    model = jqonnx.export(run, [x], scan="loop", batch="N")
    report = jqonnx.verify(model, run, [x, x[:2]], tolerance=0)
    assert report.is_exact, str(report)
    assert [row.elements for row in report.rows if row.kind == "codes"] == [2 * 3 * (3 + 2) * 4]
