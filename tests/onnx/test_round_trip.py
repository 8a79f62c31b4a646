"""Exported models that are loaded again: the same bits, also after a second export."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxquant import onnx as jqonnx

from ..cases.exported_networks import NETWORKS, convert_network
from ..support.equality import same_bits

# Its sum over the experts is one contraction of floats in JAX and another in the model.
SUMS_OF_FLOATS = ("linen experts",)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_loaded_export_gives_the_bits_of_the_function(name: str) -> None:
    function, x = convert_network(name, "static")
    want = jax.jit(function)(x)
    exported = jqonnx.export(function, [x])
    loaded, params = jqonnx.load(exported)
    for _ in range(2):
        result = jax.jit(loaded)(params, x)
        if name in SUMS_OF_FLOATS:
            np.testing.assert_allclose(result, want, rtol=0, atol=1e-6)
        else:
            same_bits(result, want)
        exported = jqonnx.export(loaded, [x], params=params)
        loaded, params = jqonnx.load(exported)


def test_another_batch_size_of_a_loaded_export() -> None:
    function, x = convert_network("linen mlp", "static")
    loaded, params = jqonnx.load(jqonnx.export(function, [x], batch="N"))
    same_bits(jax.jit(loaded)(params, x[:2]), jax.jit(function)(x[:2]))
