"""Trees of this library in programs that `jax.export` saves: the same tree after a round trip through bytes."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
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
from jaxquant._arrays import saved_programs
from jaxquant._arrays.saved_programs import decode_spec, encode_spec
from jaxquant.checkpoint import arrays
from jaxquant.optim import quantize_state

F32 = np.float32
BLOCKS = jq.QuantSpec("int4", jq.Blocked(-1, 16), narrow_range=False, scale_dtype=jnp.float16)
OPTIONS = {"window": 4, "per_row": True, "rotate": True, "rotate_values": True}
# The first three are nodes of a program while it is traced, which no caller of a program holds. A LayerRecord has the
# calibrators of a layer of Linen, which are functions: docs/flax.md says that converted variables can be saved.
NOT_SAVED = {"Affine", "AdaptedParameter", "Signature", "LayerRecord"}
# Named tuples with other things than arrays, or of functions that no program calls.
NO_TREES = {
    *("Accumulator", "Collective", "Deviation", "Distilled", "Histogram", "Merged", "Note", "OnnxView", "Outcome"),
    "SiteRow",
}
PACKAGES = (jq, jq.codes, jq.distributed, jq.lora, jq.onednn, jq.onnx, jq.ops, jq.optim, ptq, jq.report, jq.train)


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
    program = export.export(jax.jit(lambda tree: tree))(tree)
    found = export.deserialize(program.serialize()).call(tree)
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


# Runs in a new process, which imports nothing but jaxquant before it reads the program.
READ = """
import pathlib, sys
import jaxquant as jq
program = jq.checkpoint.deserialize_program(pathlib.Path(sys.argv[1]).read_bytes())
print(len(program.in_avals))
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", CASES)
def test_another_process_reads_a_saved_program(make: Any, tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    tree = make(rng)
    path = tmp_path / "program"
    path.write_bytes(export.export(jax.jit(lambda tree: tree))(tree).serialize())
    result = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == len(jax.tree.leaves(tree))


# Runs in a new process, because all names must be registered while somebody watches.
LIST = """
import importlib, inspect, pkgutil
from jax import export
names = []
for function in ("register_pytree_node_serialization", "register_namedtuple_serialization"):
    register = getattr(export, function)
    def watch(kind, *, serialized_name, register=register, **options):
        module = next(call.frame for call in inspect.stack() if call.function == "<module>")
        names.append(f"{serialized_name} {module.f_globals['__name__']}")
        return register(kind, serialized_name=serialized_name, **options)
    setattr(export, function, watch)
import jaxquant
for module in pkgutil.walk_packages(jaxquant.__path__, "jaxquant."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("\\n".join(names))
"""


def test_modules_that_register_trees_are_known() -> None:
    """`deserialize_program` imports modules by a table, which must have all names."""
    result = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = dict(line.split() for line in result.stdout.splitlines())
    assert found.pop("jaxquant.QuantizedArray") == "jaxquant._arrays.quantized_array"
    assert found == saved_programs.MODULES


def test_results_are_registered() -> None:
    """The named tuples of arrays that public functions return."""
    public = {
        id(value): value for package in PACKAGES for value in map(functools.partial(getattr, package), package.__all__)
    }
    kinds = [kind for kind in public.values() if isinstance(kind, type) and issubclass(kind, tuple)]
    names = {name.rpartition(".")[2] for name in saved_programs.MODULES}
    assert {kind.__name__ for kind in kinds} <= names | NO_TREES


def test_numbers_of_numpy_are_saved() -> None:
    number: Any = np.int64(5)
    flag: Any = np.bool_(True)
    spec = jq.QuantSpec("uint4", jq.Blocked(-1, number), offset=flag)
    for tree in (
        jq.Quantizer(spec),
        jq.Quantizer(jq.QuantSpec("uint8"), gradient=jq.LSQ(number)),
        jq.StochasticRounding(jax.random.key(0), flag),
        dataclasses.replace(jq.KVCache.create((1, 4, 1, 8)), window=number),
        jq.codes.FakeQuantizedArray(jnp.ones(3), F32(0.5), None, jnp.int8),  # type: ignore[arg-type]
    ):
        saved = export.export(jax.jit(lambda tree: tree))(tree).serialize()
        found = export.deserialize(saved).call(tree)
        assert jax.tree.structure(found) == jax.tree.structure(jax.tree.map(lambda x: x, tree))


def test_another_version_of_a_cache_is_refused() -> None:
    cache = jq.KVCache.create((1, 4, 1, 8))
    saved = bytes(export.export(jax.jit(lambda tree: tree))(cache).serialize())
    assert saved.count(b"rotate_values") >= 1
    with pytest.raises(
        ValueError, match=r"KVCache: the description in a saved program: expected .*rotate_values.*, got"
    ):
        export.deserialize(bytearray(saved.replace(b"rotate_values", b"another_thing")))


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(TypeError, match=r"checkpoint.deserialize_program: data: expected bytes, got"):
        jq.checkpoint.deserialize_program("program.bin")  # type: ignore[arg-type]


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
