"""Networks on codes, as functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

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
    ranges, params = find_ranges(prepared, network.params, x), jax.jit(prepared.convert)(network.params)
    return lambda x: prepared.apply(params, ranges, x), x
