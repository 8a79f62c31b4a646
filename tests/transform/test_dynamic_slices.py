"""Dynamic slices of parameters in codes: of layers, of rows, and of the codes in a word."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq

SHAPE = (5, 24, 40)
PARTS = {"layer": (1, 24, 40), "layers": (3, 24, 40), "rows": (5, 8, 40), "columns": (5, 24, 16), "all": (2, 16, 8)}
# How the codes are stored: an axis that is stored last, and whether they are in words.
STORED = {"as they are": (None, False), "words": (None, True), "turned": (1, False), "turned words": (1, True)}
SPECS = {
    "int8": jq.QuantSpec("int8", jq.PerAxis((0, 2))),
    "int4": jq.QuantSpec("int4", jq.Blocked(1, 8)),
    "uint4": jq.QuantSpec("uint4", jq.Blocked(1, 4)),
    "int3": jq.QuantSpec("int3", jq.Blocked(1, 8)),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_part_has_the_values_of_numpy_s(spec, part, stored, rng):
    """The product with an identity has them exactly, in a loop over starts, some of which are outside of the array."""
    sizes, (last, is_packed) = PARTS[part], STORED[stored]
    q = jq.quantize(jnp.asarray(rng.normal(1, 1, SHAPE), jnp.float32), SPECS[spec])
    q = q if last is None else q.store_last(last)
    q = q.pack() if is_packed and spec != "int8" else q
    shape = np.array(SHAPE)
    starts = rng.integers(-2 * shape - 2, shape - sizes + 2, (6, 3)).astype(np.int32)
    starts[:2] = rng.integers(0, shape - sizes + 1, (2, 3))
    from_end = bool(rng.integers(2))
    identity = jnp.eye(sizes[1], dtype=jnp.float32)

    def cut(w, start):
        return lax.dynamic_slice(w, start, sizes, allow_negative_indices=from_end)

    def multiply(w, starts):
        def step(carry, start):
            return carry, jnp.einsum("ij,ajb->aib", identity, cut(w, start))

        return lax.scan(step, None, starts)[1]

    prepared = jq.prepare(multiply, q, jnp.asarray(starts), rules=jq.recipes.weight_only_int8())
    tree = prepared.convert(q)
    wide = q.dequantize()
    # numpy's, by JAX's rule: one that is negative counts from the end if the program says so, then they are clipped.
    places = np.clip(np.where((starts < 0) & from_end, starts + shape, starts), 0, shape - sizes)
    expected = [wide[tuple(map(slice, place, place + sizes))] for place in places]
    for run in (prepared.apply, jax.jit(prepared.apply)):
        np.testing.assert_array_equal(run(tree, jnp.asarray(starts)), expected)


@pytest.mark.parametrize("rules", [jq.recipes.weight_only_int8(), jq.recipes.w8a8_dynamic()], ids=["weights", "both"])
def test_a_layer_by_its_index_with_adapters(rules, rng):
    """An index counts from the end if it is negative, and is clipped, as in JAX."""
    w = {"w": jnp.asarray(rng.normal(size=(5, 8, 6)), jnp.float32)}
    x = jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)
    prepared = jq.prepare(lambda p, x, i: x @ p["w"][i], w, x, jnp.int32(0), rules=rules)
    adapted = jq.lora.adapt(prepared, prepared.convert(w), jq.lora.LoRA(rank=2, targets="w"), jax.random.key(0))
    factors = jax.tree.map(lambda part: jnp.asarray(rng.normal(size=part.shape), jnp.float32), adapted.adapters)
    apply = jax.jit(prepared.apply)
    for tree in (adapted.frozen, adapted.replace(adapters=factors)):
        layers = [apply(tree, x, jnp.int32(i)) for i in range(5)]
        assert len({y.tobytes() for y in map(np.asarray, layers)}) == 5
        for index in (-12, -7, -6, -5, -3, -1, 5, 9):
            place = np.clip(index + 5 if index < 0 else index, 0, 4)
            np.testing.assert_array_equal(apply(tree, x, jnp.int32(index)), layers[place])
