"""What two processes of four devices do in tests/distributed/test_processes.py, and one process with one device.

It has a few operators only, because compiling them in three processes takes long; process_families.py has the others.

    python -m tests.support.process_scenario INDEX COUNT PORT FOLDER

Each of the processes runs `main`. The first one writes the results to FOLDER/results.npz.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant import distributed as jqd

P = PartitionSpec
WEIGHTS = jq.QuantSpec(jnp.int4, jq.Blocked(0, 8))
TOKENS = jq.QuantSpec(jnp.int8, jq.PerToken())
GRADIENTS = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 128))
RATE = 0.1
# The processes inherit the environment of the tests, and with it their seed.
SEED = int(os.environ.get("JAXQUANT_SEED", "0"))


def make_data() -> dict[str, np.ndarray]:
    """Return inputs that are the same in every process: eight batches, one for each device."""
    rng = np.random.default_rng([SEED, 5])
    shapes = {"x": (8, 4, 16), "y": (8, 4, 8), "first": (16, 16), "second": (16, 8)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_cache(x: jax.Array) -> jq.KVCache:
    """Return a cache of the keys and values of a decoder, a row of the batch for each device."""
    keys = x.reshape(*x.shape[:2], 2, -1)
    return jq.KVCache.create((x.shape[0], 6, 2, keys.shape[-1])).append(keys, -keys)


def attend(x: jax.Array, cache: jq.KVCache) -> jax.Array:
    """Return the attention of queries over the cache."""
    return jq.attention(x.reshape(*x.shape[:2], 2, -1), cache)


def apply(params: Any, x: jax.Array) -> jax.Array:
    """Return the outputs of a network of two layers."""
    return jax.nn.relu(x @ params["first"]) @ params["second"]


def find_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error of the network with fake-quantized weights."""
    params = {name: jq.fake_quantize(w, WEIGHTS) for name, w in params.items()}
    return jnp.mean((apply(params, x) - y) ** 2)


def compute_integers(x: jax.Array, w: jax.Array) -> dict[str, Any]:
    """Return codes, and the integers of contractions and operators."""
    qx, qw = jq.quantize(x, TOKENS), jq.quantize(w, WEIGHTS)
    whole = jq.dynamic_quantize_linear(x)
    codes = jq.quantize_linear(x, np.float32(0.037), np.uint8(3))
    channels = jq.quantize(w, jq.QuantSpec(jnp.int8, jq.PerAxis(1)))
    images, kernel = codes.reshape(8, 4, 4, 4), channels.codes.reshape(8, 4, 2, 4)
    return {
        "x codes": qx.codes,
        "x scale": qx.scale,
        "w codes": qw.codes.astype(jnp.int8),
        "w scale": qw.scale,
        "dynamic": whole.y,
        "dynamic scale": whole.y_scale,
        "conv_integer": jq.conv_integer(images, kernel, np.uint8(3), pads=(1, 1, 1, 1)),
        "accumulator": jq.integer.dot_general(qx.codes, channels.codes, (((1,), (0,)), ((), ()))),
        "product": jq.matmul(qx, channels),
        "added": jq.ops.qlinear_add(codes, 0.037, np.uint8(3), codes, 0.02, np.uint8(9), 0.05, np.uint8(1)),
    }


def calibrate(data: Any, observe: Any) -> dict[str, Any]:
    """Return ranges of a calibrator and of a prepared network, and the codes of its converted weights.

    Args:
        data: the inputs.
        observe: `observe(calibrator or prepared, update)` returns the state that has seen the batches of all devices.
    """
    params = {name: data[name] for name in ("first", "second")}
    results: dict[str, Any] = {}
    minmax = jq.calibration.minmax(jq.QuantSpec(jnp.uint8))
    state = observe(minmax.all_reduce, lambda x: minmax.update(minmax.init(x), x))
    results |= minmax.finalize(state)._asdict()
    prepared = jq.prepare(apply, params, data["x"][0], rules=jq.recipes.w8a8_static())
    state = observe(prepared.all_reduce, lambda x: prepared.observe(prepared.init(), params, x))
    ranges = jax.tree.map(np.asarray, prepared.finalize(state))  # of all devices: now of this one
    converted = jax.jit(prepared.convert)(params, ranges)
    for name, q in converted.params.items():
        results |= {f"{name} codes": q.codes, f"{name} scale": q.scale}
    results["converted"] = jax.jit(prepared.apply)(converted, data["x"][0])
    return results


def run_alone() -> dict[str, np.ndarray]:
    """Return the results of one process on one device."""
    data = make_data()
    params = {name: jnp.asarray(data[name]) for name in ("first", "second")}
    integers = jax.jit(compute_integers)(data["x"].reshape(32, 16), data["first"])

    def observe(_: Any, update: Any) -> Any:
        return jax.jit(update)(data["x"].reshape(32, 16))

    loss, grads = jax.jit(jax.value_and_grad(find_loss))(params, data["x"].reshape(32, 16), data["y"].reshape(32, 8))
    updated = jax.tree.map(lambda w, g: w - RATE * g, params, grads)
    results = {**integers, **calibrate(data, observe), "loss": loss, "exact": updated, "quantized": updated}
    results["attention"] = jax.jit(lambda x: attend(x, make_cache(x)))(data["x"])
    return flatten(results)


def flatten(results: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(results)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def spread(mesh: Mesh, value: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Return a global array, of which this process gets its own part."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def train(mesh: Mesh, data: Any, *, is_quantized: bool) -> Any:
    """Return the loss and the weights after a step in which each device has its own batch."""
    params = {name: spread(mesh, data[name], P()) for name in ("first", "second")}

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        varying = jax.tree.map(lambda w: jax.lax.pcast(w, "d", to="varying"), params)
        loss, grads = jax.value_and_grad(find_loss)(varying, x[0], y[0])
        grads = jqd.pmean(grads, "d", spec=GRADIENTS) if is_quantized else jax.lax.pmean(grads, "d")
        return jax.lax.pmean(loss, "d"), jax.tree.map(lambda w, g: w - RATE * g, params, grads)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P())
    return jax.jit(mapped)(params, spread(mesh, data["x"], P("d")), spread(mesh, data["y"], P("d")))


def find_disagreements(index: int, mesh: Mesh) -> list[str]:
    """Return the messages of the errors for specs, ranges, structures and codebooks that differ between processes."""
    levels = (-1.0, 0.0, 0.25 * (index + 1), 1.0)  # both books have the same name
    other = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 64 * (index + 1)))
    trees = (
        {"spec": GRADIENTS, "other": other},
        {"range": jq.Range(jnp.float32(-1 - index), jnp.float32(1))},
        [0] * index,
        jq.quantize(np.ones((4, 4), np.float32), jq.QuantSpec(jq.Codebook("ternary", levels))),
    )
    messages = []
    for tree in trees:
        try:
            jqd.check_processes(tree, "settings")
        except ValueError as error:
            messages.append(str(error))
    same = spread(mesh, np.ones((8, 4), np.float32), P("d"))
    # Nothing is raised for what is the same, although functions have other addresses in each process.
    rules = {"calibrator": jq.calibration.minmax(GRADIENTS), "rules": jq.recipes.w8a8_static(), "function": lambda x: x}
    jqd.check_processes({"spec": GRADIENTS, "sharded": same, **rules}, "settings")
    return messages


def make_observe(mesh: Mesh, x: np.ndarray) -> Any:
    """Return `observe(all_reduce, update)`, which returns the state that has seen the batches of all devices."""

    def observe(all_reduce: Any, update: Any) -> Any:
        mapped = jax.shard_map(
            lambda x: all_reduce(update(x[0]), "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)(spread(mesh, x, P("d")))

    return observe


def find_fault(mesh: Mesh, x: np.ndarray) -> str:
    """Return the message of the error for a range of all devices, one of which, in the second process, has a NaN."""
    minmax, x = jq.calibration.minmax(jq.QuantSpec(jnp.uint8)), x.copy()
    x[5, 1, 2] = np.nan
    state = make_observe(mesh, x)(minmax.all_reduce, lambda x: minmax.update(minmax.init(x), x))
    try:
        minmax.finalize(state)
    except ValueError as error:
        return str(error)
    return "no error"


def kill_when(folder: pathlib.Path) -> None:
    """Kill this process as soon as the folder of a checkpoint appears, under whatever name."""
    while not list(folder.glob("torn*")):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def main(index: int, count: int, port: int, folder: pathlib.Path) -> None:
    """Run the scenario as one of several processes."""
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index, initialization_timeout=60)
    data, mesh = make_data(), Mesh(np.array(jax.devices()), ("d",))
    messages = find_disagreements(index, mesh)
    sharded = spread(mesh, data["x"].reshape(32, 16), P("d"))
    w = spread(mesh, data["first"], P(None, "d"))
    replicated = NamedSharding(mesh, P())
    integers = jax.jit(compute_integers, out_shardings=replicated)(sharded, w)

    results = {**integers, **calibrate(data, make_observe(mesh, data["x"]))}
    messages.append(find_fault(mesh, data["x"]))
    results["loss"], results["exact"] = train(mesh, data, is_quantized=False)
    results["quantized"] = train(mesh, data, is_quantized=True)[1]
    # Weights that are spread over all devices, as codes; each process saves its own part.
    q = jax.jit(lambda w: jq.quantize(w, WEIGHTS))(w)
    batch = spread(mesh, data["x"], P("d"))
    cache = jax.jit(make_cache)(batch)
    results["attention"] = jax.jit(attend, out_shardings=replicated)(batch, cache)
    tree = {"q": q, "x": sharded, "cache": cache}
    like = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=part.sharding), tree)
    checkpoint.save_orbax(folder / "many", tree)
    restored = checkpoint.load_orbax(folder / "alone", like)
    assert restored["x"].sharding == sharded.sharding
    results["restored"] = jax.jit(
        lambda t: (t["q"].codes.astype(jnp.int8), t["q"].scale, t["x"], t["cache"]), out_shardings=replicated
    )(restored)
    if index == 0:
        arrays: dict[str, Any] = {"messages": np.array(messages), **flatten(results)}
        np.savez(folder / "results.npz", **arrays)
    else:
        (folder / "messages.txt").write_text("\n".join(messages))
    multihost_utils.sync_global_devices("the results are written")
    if index == 1:
        threading.Thread(target=kill_when, args=(folder,), daemon=True).start()
    checkpoint.save_orbax(folder / "torn", tree)
    if index == 1:  # the checkpoint was complete before the thread ran
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
