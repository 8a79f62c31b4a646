"""Weights with a permutation on a mesh with explicit axes, also split along the axis that is permuted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxquant as jq

P = PartitionSpec
SHARDINGS = {"rows": P("a", None), "columns": P(None, "b"), "both": P("a", "b")}


def place(tree: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """Return arrays with their last two axes sharded, and whole along axes that the mesh does not divide."""

    def put(part: jax.Array) -> jax.Array:
        names = (*(None,) * part.ndim, *spec)[-part.ndim :] if part.ndim > 1 else (spec[0],)
        names = [
            name if name and n % mesh.shape[name] == 0 else None for name, n in zip(names, part.shape, strict=True)
        ]
        return jax.device_put(part, NamedSharding(mesh, P(*names)))

    return jax.tree.map(put, tree)


def draw(rng: np.random.Generator, *lead: int) -> tuple[jq.QuantizedArray, np.ndarray]:
    """Return an array with a permutation for each matrix, and the numbers that it stands for."""
    w = jnp.asarray(rng.normal(size=(*lead, 64, 32)), jnp.float32)
    q = jq.quantize(w, jq.QuantSpec("uint4", jq.Blocked(-2, 16)))
    orders = np.stack([rng.permutation(64) for _ in range(int(np.prod(lead)))]).reshape(*lead, 64).astype(np.int32)
    values = np.zeros(w.shape, np.float32)
    np.put_along_axis(values, np.broadcast_to(orders[..., None], w.shape), np.asarray(q.dequantize()), -2)
    return q.replace(permutation=jnp.asarray(orders), permuted_axis=-2), values


@pytest.mark.parametrize("name", SHARDINGS)
def test_permuted_axes_may_be_sharded(name: str, rng: np.random.Generator) -> None:
    mesh, spec = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2), SHARDINGS[name]
    q, values = draw(rng)
    stack, many = draw(rng, 3)
    x = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    with jax.set_mesh(mesh):
        placed, stacked = place(q, mesh, spec), place(stack, mesh, spec)
        for call in (lambda q: q.dequantize(), jax.jit(lambda q: q.dequantize())):
            y = call(placed)
            np.testing.assert_array_equal(np.asarray(y), values)
            assert jax.typeof(y).sharding.spec == spec
            np.testing.assert_array_equal(np.asarray(call(stacked)), many)
        for call in (jq.matmul, jax.jit(jq.matmul, static_argnames="out_sharding")):
            product = np.asarray(call(x, placed, out_sharding=P(None, None)))
            wide = np.asarray(x, np.float64) @ values.astype(np.float64)
            np.testing.assert_allclose(product, wide, rtol=0, atol=3e-5)

        def total(scale: jax.Array, q: jq.QuantizedArray) -> jax.Array:
            return jnp.sum(jnp.square(q.replace(scale=scale).dequantize()))

        gradient = np.asarray(jax.jit(jax.grad(total))(placed.scale, placed))
    np.testing.assert_allclose(gradient, jax.grad(total)(q.scale, q), rtol=1e-5)
