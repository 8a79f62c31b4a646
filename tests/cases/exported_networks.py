"""Networks on codes, as functions of their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq

from ..support.prepared import find_ranges
from . import networks

RECIPES = {
    "float": None,
    "static": jq.recipes.w8a8_static(),
    "dynamic": jq.recipes.w8a8_dynamic(),
    "int4": jq.recipes.w4a8(),
    "weight_only_int8": jq.recipes.weight_only_int8(),
    "weight_only_int4": jq.recipes.weight_only_int4(block=4),
}
NETWORKS = [name for name in networks.NETWORKS if name.split()[0] not in networks.FRAMEWORKS]


def convert_network(name: str, recipe: str) -> tuple[Callable[[Any], Any], Any]:
    """Return a network on codes as a function of its inputs, and a batch."""
    network = networks.make_network(name)
    x = network.sample(jax.random.key(2), 3)
    if RECIPES[recipe] is None:
        return lambda x: network.apply(network.params, x), x
    prepared = jq.prepare(network.apply, network.params, x, rules=RECIPES[recipe])
    q = jax.jit(prepared.convert)(network.params, find_ranges(prepared, network.params, x))
    return lambda x: prepared.apply(q, x), x


def make_integer_mlp(rng: np.random.Generator, *widths: int) -> Callable[[jax.Array], jax.Array]:
    """Return layers on codes, with int32 biases, as a function of float inputs of width widths[0]."""
    spec, shapes = jq.QuantSpec(jnp.int8, jq.PerAxis(1)), list(itertools.pairwise(widths))
    weights = [jq.quantize(jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32), spec) for shape in shapes]
    biases = [jnp.asarray(rng.integers(-900, 900, shape[1]), jnp.int32) for shape in shapes]
    codes = jq.QuantSpec(jnp.uint8)

    def apply(x: jax.Array) -> jax.Array:
        q = jq.quantize(x, codes, range=(-2.0, 2.0))
        for w, bias in zip(weights, biases, strict=True):
            q = jq.matmul(q, w, bias=bias, output=jq.Quantizer(codes, 0.04, 0))
        return q.codes

    return apply
