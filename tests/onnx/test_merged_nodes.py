"""Nodes of exported models that stand for pairs of others, against JAX, in every generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

from jaxquant import onnx as jqonnx

from ..cases.onnx_models import run_runtime


def list_operators(nodes: Any) -> list[str]:
    """Return the operators of nodes and of their bodies."""
    found = []
    for node in nodes:
        found.append(node.op_type)
        for attribute in node.attribute:
            found += list_operators(attribute.g.node)
    return found


def check(function: Callable[..., Any], x: jax.Array, **options: Any) -> onnx.ModelProto:
    """Compare a model in ONNX Runtime, and the next two generations of it, with the function; return the first one."""
    expected = [np.asarray(y) for y in jax.tree.leaves(jax.jit(function)(x))]
    first = model = jqonnx.export(function, [x], **options)
    for _ in range(3):
        feeds = {model.graph.input[0].name: np.asarray(x)}
        for actual, y in zip(run_runtime(model, feeds), expected, strict=True):
            assert actual.shape == y.shape
            np.testing.assert_allclose(actual, y, rtol=1e-5, atol=1e-5)
        loaded, params = jqonnx.load(model)
        model = jqonnx.export(loaded, params, [x], **options)
        assert len(list_operators(model.graph.node)) <= len(list_operators(first.graph.node))
    return first


REDUCTIONS = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_keep_their_dimensions(name: str, opset: int, rng: np.random.Generator) -> None:
    reduce = REDUCTIONS[name]
    x = jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32)
    for axes in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)):
        model = check(lambda x, axes=axes: x - jnp.expand_dims(reduce(x, axes), axes), x, opset=opset)
        assert "Unsqueeze" not in list_operators(model.graph.node)
    # Other dimensions are inserted, and the reduction is a result of its own.
    model = check(lambda x: jnp.expand_dims(reduce(x, 1), 2), x, opset=opset)
    assert "Unsqueeze" in list_operators(model.graph.node)
    check(lambda x: jnp.expand_dims(reduce(x, (0, 1)), (1, 2)), x, opset=opset)
    model = check(lambda x: (lambda y: [y, jnp.expand_dims(y, 1)])(reduce(x, 1)), x, opset=opset)
    assert "Unsqueeze" in list_operators(model.graph.node)


@pytest.mark.parametrize("scan", ["loop", "unroll"])
def test_nodes_in_loops(scan: str, rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> Any:
        def step(carry: jax.Array, entry: jax.Array) -> tuple[jax.Array, Any]:
            largest = jnp.expand_dims(jnp.max(entry, 1), 1)
            return carry + largest[:, 0] + entry[:, 2], (entry - largest, entry[1])

        return lax.scan(step, jnp.zeros(4), x)

    model = check(function, jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32), scan=scan)
    operators = list_operators(model.graph.node)
    assert "Gather" in operators
    assert "Slice" not in operators


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.uint8, jnp.int32, jnp.bool_])
def test_parts_at_known_places(dtype: Any, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.integers(0, 2, (3, 4, 5)), dtype)
    model = check(lambda x: [x[:, 3], x[..., -1], x[1]], x)
    assert set(list_operators(model.graph.node)) == {"Gather"}
    check(lambda x: [x[0, 2], x[:, 1:2], x[2:3, :, 0]], x)
    # JAX moves a part that does not fit.
    places = ((-3, 2, 9), (0, 0, 0), (1, 1, 1), (5, 0, 3))
    model = check(lambda x: [lax.dynamic_slice(x, place, (2, 2, 2)) for place in places], x)
    assert set(list_operators(model.graph.node)) == {"Slice"}
    parts = [(x[:1], (5, 0, 0)), (x[1:2], (1, 0, 0)), (x[:, 1:3], (0, 9, 0)), (x[..., :2], (0, 0, 2)), (x, (1, 1, 1))]
    model = check(
        lambda x: [lax.dynamic_update_slice(x ^ x if dtype != jnp.float32 else -x, *part) for part in parts], x
    )
    assert "ScatterElements" not in list_operators(model.graph.node)
    check(lambda x: [lax.dynamic_update_slice(x, x[1:, 1:], (0, -5, 3))], x)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_numbers_in_place_of_nan_become_integers(dtype: Any) -> None:
    """Nothing guards the conversion of a number that is no NaN, and infinities saturate."""
    x = jnp.asarray([np.nan, np.inf, -np.inf, 300.4, -300.6, 2.5, -2.5, 1e10, -1e10, 0], jnp.float32)

    def function(x: jax.Array) -> list[jax.Array]:
        rounded = jnp.round(x)
        sums = [rounded + 3, x - np.float32(1), 4 - jnp.floor(x), rounded + x, rounded + np.float32(np.inf)]
        chosen = [jnp.where(jnp.isnan(x), 7, total) for total in sums] + [jnp.where(x != x, 7, x * 0)]
        return [jnp.clip(y, -100, 100).astype(dtype) for y in chosen] + [y.astype(dtype) for y in chosen]

    expected = [np.asarray(y) for y in jax.jit(function)(x)]
    model = jqonnx.export(function, [x])
    for level in ("none", "all"):
        for actual, y in zip(run_runtime(model, {"x": np.asarray(x)}, level), expected, strict=True):
            np.testing.assert_array_equal(actual, y)
