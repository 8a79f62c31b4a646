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
    starts = rng.integers(-1, np.array(SHAPE) - sizes + 2, (4, 3)).astype(np.int32)
    identity = jnp.eye(sizes[1], dtype=jnp.float32)

    def multiply(w, starts):
        def step(carry, start):
            return carry, jnp.einsum("ij,ajb->aib", identity, lax.dynamic_slice(w, start, sizes))

        return lax.scan(step, None, starts)[1]

    prepared = jq.prepare(multiply, q, jnp.asarray(starts), rules=jq.recipes.weight_only_int8())
    tree = prepared.convert(q)
    wide = q.dequantize()
    expected = [lax.dynamic_slice(wide, start, sizes) for start in starts]
    for run in (prepared.apply, jax.jit(prepared.apply)):
        np.testing.assert_array_equal(run(tree, jnp.asarray(starts)), expected)
