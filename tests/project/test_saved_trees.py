"""Trees of this library in programs that `jax.export` saves: the same tree after a round trip through bytes."""

from __future__ import annotations

import ast
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import jaxquant as jq
from jaxquant import ptq
from jaxquant._arrays.saved_programs import decode_spec, encode_spec
from jaxquant.checkpoint import arrays
from jaxquant.optim import quantize_state

F32 = np.float32
BLOCKS = jq.QuantSpec("int4", jq.Blocked(-1, 16), narrow_range=False, scale_dtype=jnp.float16)
OPTIONS = {"window": 4, "per_row": True, "rotate": True, "rotate_values": True}
# The first three are nodes of a program while it is traced, which no caller of a program holds. A LayerRecord has the
# calibrators of a layer of Linen, which are functions: docs/flax.md says that converted variables can be saved.
NOT_SAVED = {"Affine", "AdaptedParameter", "Signature", "LayerRecord"}


def apply(params: Any, x: Any) -> Any:
    return x @ params["w"]


def prepare(rng: np.random.Generator) -> tuple[jq.Prepared, Any, Any]:
    params, x = {"w": rng.normal(size=(8, 4)).astype(F32)}, rng.normal(size=(2, 8)).astype(F32)
    return jq.prepare(apply, params, x, rules=jq.recipes.w8a8_static()), params, x


def make_trainable(rng: np.random.Generator, estimator: Any = None) -> Any:
    prepared, params, x = prepare(rng)
    return prepared.trainable(params, prepared.calibrate(params, [x]), estimator=estimator)


def make_adapted(rng: np.random.Generator) -> Any:
    prepared, params, x = prepare(rng)
    lora = jq.lora.LoRA(rank=2, targets="w")
    return jq.lora.adapt(prepared, prepared.convert(params, prepared.calibrate(params, [x])), lora, jax.random.key(0))


def collect(rng: np.random.Generator) -> Any:
    prepared, params, x = prepare(rng)
    return ptq.collect(prepared, params, [x])


# By the name of the class.
TREES: dict[str, list[Callable[[np.random.Generator], Any]]] = {
    "AdaptedTree": [make_adapted],
    "AmaxHistory": [lambda rng: jq.AmaxHistory.start(3).update(rng.normal(size=4).astype(F32))],
    "FakeQuantizedArray": [
        lambda rng: jq.codes.FakeQuantizedArray(jnp.ones(3), F32(0.5), np.uint8(3), jnp.dtype("uint8")),
        lambda rng: jq.codes.FakeQuantizedArray(jnp.ones(3), F32(0.5), None, jnp.dtype("int8")),
    ],
    "FixedRanges": [lambda rng: make_trainable(rng).scales],
    "KVCache": [
        lambda rng: jq.KVCache.create((2, 4, 1, 32)),
        lambda rng: jq.KVCache.create((2, 4, 1, 32), BLOCKS, **OPTIONS),
        lambda rng: jq.KVCache.create((2, 4, 1, 32), spec_v=BLOCKS, mean_key=rng.normal(size=(2, 1, 32)).astype(F32)),
    ],
    "LearnedScales": [lambda rng: make_trainable(rng, jq.LSQPlus()).scales],
    "QuantizedArray": [lambda rng: jq.quantize(rng.normal(size=(4, 32)).astype(F32), BLOCKS)],
    "QuantizedTree": [lambda rng: make_adapted(rng).frozen],
    "Quantizer": [
        lambda rng: jq.Quantizer(jq.QuantSpec("uint8"), F32(0.1), np.uint8(7), jq.LSQPlus()),
        lambda rng: jq.Quantizer(jq.QuantSpec(jq.nf4, jq.Blocked((0, 1), (4, 8))), gradient=jq.PACT()),
        lambda rng: jq.Quantizer(jq.QuantSpec("int8"), gradient=jq.StochasticRounding(jax.random.key(1), clip=False)),
    ],
    "Statistics": [collect],
    "StaticText": [lambda rng: arrays.StaticText("a text")],
    "StochasticRounding": [lambda rng: jq.StochasticRounding(jax.random.key(1), clip=False)],
    "TrainableTree": [make_trainable],
}
CASES = [pytest.param(make, id=f"{name}-{i}") for name, made in TREES.items() for i, make in enumerate(made)]


@pytest.mark.parametrize("make", CASES)
def test_a_saved_program_takes_and_returns_a_tree(make: Any, rng: np.random.Generator) -> None:
    tree = make(rng)
    program = export.export(jax.jit(lambda tree: (tree, jax.tree.map(jnp.shape, tree))))(tree)
    found, _ = export.deserialize(program.serialize()).call(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        a, b = (jax.random.key_data(x) if is_key else x for x in (a, b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_saved_update_of_an_optimizer_takes_its_state() -> None:
    """States of optax are its own to register."""
    export.register_namedtuple_serialization(optax.TraceState, serialized_name="optax.TraceState")
    tx = quantize_state(optax.trace(0.9), min_size=1)
    params = jnp.arange(64.0)
    state = tx.init(params)
    program = export.export(jax.jit(tx.update))(params, state)
    found, expected = export.deserialize(program.serialize()).call(params, state), jax.jit(tx.update)(params, state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))


def test_all_trees_of_the_library_are_tested() -> None:
    """A class that JAX takes as a tree, and that `jax.export` does not know, cannot be passed to a saved program."""
    found = set()
    for path in pathlib.Path(jq.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {node.name for use in node.decorator_list if "tree_util.register_" in ast.unparse(use)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.tree_util.register_pytree_node":
                found.add(ast.unparse(node.args[0]))
    assert found == TREES.keys() | NOT_SAVED


SPECS = [
    jq.QuantSpec("int8"),
    jq.QuantSpec("uint8", jq.PerAxis((0, -1)), zero_point_granularity=jq.PerTensor()),
    jq.QuantSpec("uint8", reduce_range=True, symmetric=True, narrow_range=False),
    jq.QuantSpec("int3", jq.PerToken()),
    jq.QuantSpec("uint6", jq.PerFeature(), scale_dtype=jnp.bfloat16),
    jq.QuantSpec("uint4", jq.Blocked((0, 1), (4, 8)), offset=True, scale_spec=jq.QuantSpec("uint6", jq.Blocked(-1, 8))),
    jq.QuantSpec("float8_e4m3fn", jq.Blocked(-1, 32), scale_dtype=jnp.float8_e8m0fnu, scale_rule="floor"),
    jq.QuantSpec("float4_e2m1fn", jq.Blocked(-1, 16), scale_spec=jq.QuantSpec("float8_e4m3fn"), ties="toward_zero"),
    jq.QuantSpec("int8", power_of_two=True, scale_rule="nearest"),
    jq.QuantSpec(jq.nf4, jq.Blocked(-1, 64)),
    jq.QuantSpec(jq.Codebook("mine", (-0.0, 1.0, 1 / 3, -2.5))),
    BLOCKS,
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_specs_are_the_same_after_json(spec: jq.QuantSpec) -> None:
    found = decode_spec(json.loads(json.dumps(encode_spec(spec))))
    assert found == spec
    assert hash(found) == hash(spec)
    assert repr(found) == repr(spec)
