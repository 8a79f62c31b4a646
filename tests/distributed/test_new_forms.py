"""Offsets, nested scales, words, permutations and blocks along both axes on eight devices: the bits of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant as jq

P = PartitionSpec
SHAPE = (64, 128)
FLOAT8 = jq.QuantSpec("float8_e4m3fn")
SPECS = {
    "offset": jq.QuantSpec("uint4", jq.Blocked(0, 8), offset=True),
    "NVFP4": jq.QuantSpec("float4_e2m1fn", jq.Blocked(0, 16), scale_spec=FLOAT8),
    "Q4_K": jq.QuantSpec("uint4", jq.Blocked(0, 8), offset=True, scale_spec=jq.QuantSpec("uint6", jq.Blocked(0, 4))),
    "MXFP8": jq.QuantSpec("float8_e4m3fn", jq.Blocked(0, 32), scale_dtype="float8_e8m0fnu"),
    "squares": jq.QuantSpec("float8_e4m3fn", jq.Blocked((0, 1), 16)),
    "words": jq.QuantSpec("int3", jq.Blocked(0, 16)),
    "permutation": jq.QuantSpec("int8", jq.Blocked(0, 8)),
}


def make_array(name: str, rng: np.random.Generator, w: jax.Array) -> jq.QuantizedArray:
    q = jq.quantize(w, SPECS[name])
    if name != "permutation":
        return q
    return q.replace(permutation=jnp.asarray(rng.permutation(SHAPE[0]), jnp.int32), permuted_axis=-2)


def place(tree: Any, axis: int) -> Any:
    """Return arrays of rank 2 cut along an axis where eight devices divide it, and others on all devices."""
    mesh: Mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def put(x: jax.Array) -> jax.Array:
        is_cut = x.ndim == 2 and x.shape[axis] % 8 == 0
        names = ["d" if is_cut and i == axis else None for i in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, P(*names)))

    return jax.tree.map(put, tree)


def check_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_codes_and_values(name: str, axis: int, rng: np.random.Generator) -> None:
    w = jnp.asarray(rng.normal(0.1, 1, SHAPE), jnp.float32)
    spec = SPECS[name]
    quantize = jax.jit(lambda w: jq.quantize(w, spec))
    check_same(quantize(place(w, axis)), jq.quantize(w, spec))
    q = make_array(name, rng, w)
    placed = place(q, axis)
    assert any(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(placed))
    check_same(jax.jit(lambda q: q.dequantize())(placed), q.dequantize())
    indices = jnp.asarray(rng.integers(0, SHAPE[0], 11), jnp.int32)
    check_same(jax.jit(lambda q: jq.take(q, indices, axis=0))(placed), jq.take(q, indices, axis=0))


CALLS: dict[str, Callable[[Any, Any], jax.Array]] = {
    "rows": lambda x, q: jq.matmul(x, q),
    "one row": lambda x, q: jq.matmul(x[:1], q),
    "transposed": lambda x, q: jq.dot_general(x, q.T, (((1,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_products(name: str, axis: int, rng: np.random.Generator) -> None:
    q = make_array(name, rng, jnp.asarray(rng.normal(0.1, 1, SHAPE), jnp.float32))
    x = jnp.asarray(rng.normal(size=(8, SHAPE[0])), jnp.float32)
    values = np.asarray(q.dequantize(), np.float64)
    placed = place(q, axis)
    for call in CALLS.values():
        # Sums of floats over devices have another order.
        y = np.asarray(jax.jit(call)(place(x, 0), placed), np.float64)
        rows = np.asarray(x[: y.shape[0]], np.float64)
        assert (np.abs(y - rows @ values) <= np.abs(rows) @ np.abs(values) * 2.0**-19).all()


@pytest.mark.parametrize("name", SPECS)
def test_experts_on_devices_of_their_own(name: str, rng: np.random.Generator) -> None:
    stack = [make_array(name, rng, jnp.asarray(rng.normal(0.1, 1, SHAPE), jnp.float32)) for _ in range(8)]
    q = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)
    x, sizes = jnp.asarray(rng.normal(size=(16, SHAPE[0])), jnp.float32), jnp.asarray([3, 0, 2, 4, 1, 0, 5, 1])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    placed = jax.tree.map(lambda part: jax.device_put(part, NamedSharding(mesh, P("d"))), q)
    y = np.asarray(jax.jit(jq.ragged_dot)(x, placed, sizes), np.float64)
    values = np.stack([np.asarray(part.dequantize(), np.float64) for part in stack])[np.repeat(np.arange(8), sizes)]
    rows = np.asarray(x, np.float64)
    expected, bound = np.einsum("ik,ikn->in", rows, values), np.einsum("ik,ikn->in", np.abs(rows), np.abs(values))
    assert (np.abs(y - expected) <= bound * 2.0**-19).all()
