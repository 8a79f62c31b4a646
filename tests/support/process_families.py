"""What two processes of four devices compute in tests/distributed/test_families.py, and one process with eight devices.

    python -m tests.support.process_families INDEX PORT FOLDER

Each of the two processes runs `main`. The first one writes the results to FOLDER/families.npz.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import distributed as jqd

from ..cases import operator_families

P = PartitionSpec
# The processes inherit the environment of the tests, and with it their seed.
SEED = int(os.environ.get("JAXQUANT_SEED", "0"))
INT8 = jq.QuantSpec(jnp.int8, jq.Blocked(-1, 128))
CALIBRATORS = {
    "minmax": jq.calibration.minmax(jq.QuantSpec(jnp.uint8, jq.PerAxis(1))),
    "absmax": jq.calibration.absmax(jq.QuantSpec(jnp.int8)),
    "percentile": jq.calibration.percentile(jq.QuantSpec(jnp.uint8), 99.0),
    "mse": jq.calibration.mse(jq.QuantSpec(jnp.uint8)),
    "entropy": jq.calibration.entropy(jq.QuantSpec(jnp.int8)),
    "float moving_average": jq.calibration.moving_average(jq.QuantSpec(jnp.uint8)),
}
WITHOUT_CONTRACTIONS = ("microsoft", "onednn", "codes")
RECIPES = {
    "static": jq.recipes.w8a8_static(),
    "percentile": jq.recipes.w8a8_static(lambda spec: jq.calibration.percentile(spec, 99.9)),
    "codes": jq.recipes.onnx_runtime(),
    "dynamic": jq.recipes.w8a8_dynamic(),
    "weights": jq.recipes.weight_only_int4(),
}


def make_inputs() -> dict[str, np.ndarray]:
    """Return inputs of all families that the eight devices divide, the same in every process."""
    return operator_families.draw_inputs(np.random.default_rng([SEED, 11]), operator_families.EVEN)


def run_families(place: Any, replicated: Any) -> dict[str, np.ndarray]:
    """Return the results of all families.

    Args:
        place: `place(value, dimension)` returns an input that is cut along a dimension.
        replicated: the sharding of all results, or None.
    """
    results = {}
    for family, run in operator_families.FAMILIES.items():
        # Where there are contractions, their operands are cut along contracted dimensions.
        cuts = operator_families.CUTS["rows" if family in WITHOUT_CONTRACTIONS else "contracted"]
        data = {name: place(value, cuts[name]) for name, value in make_inputs().items()}
        arrays = jax.jit(lambda data, run=run: operator_families.list_arrays(run(data)), out_shardings=replicated)(data)
        results |= {f"{name}|{family}": np.asarray(value) for name, value in arrays.items()}
    return results


# Calibrated functions.


def apply(params: Any, x: jax.Array) -> jax.Array:
    """Return the outputs of a network of two layers with biases and a residual connection."""
    h = jax.nn.relu(x @ params["first"] + params["bias"].reshape(1, -1))
    return (h + x) @ params["second"]


def make_params() -> dict[str, np.ndarray]:
    """Return the weights of the network."""
    rng = np.random.default_rng([SEED, 12])
    shapes = {"first": (32, 32), "bias": (32,), "second": (32, 16)}
    return {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def calibrate(observe: Any) -> dict[str, Any]:
    """Return the ranges of all calibrators, and converted networks by all recipes, with their results.

    Args:
        observe: `observe(all_reduce, update)` returns the state that has seen the rows of all devices, replicated.
    """
    results: dict[str, Any] = {}
    for name, calibrator in CALIBRATORS.items():
        state = observe(calibrator.all_reduce, lambda x, c=calibrator: c.update(c.init(x), x))
        for end, value in calibrator.finalize(state)._asdict().items():
            results[f"{name} {end}"] = value
    params, x = make_params(), make_inputs()["x"]
    for name, rules in RECIPES.items():
        prepared = jq.prepare(apply, params, x[:2], rules=rules)
        state = observe(prepared.all_reduce, lambda x, p=prepared: p.observe(p.init(), params, x))
        ranges = jax.tree.map(np.asarray, prepared.finalize(state))
        converted = jax.jit(prepared.convert)(params, ranges)
        results[f"recipe {name}"] = operator_families.list_arrays(converted.params)
        # One row after the other is quantized and contracted in the same way on any device.
        start = "float recipe" if name == "weights" else "recipe"
        results[f"{start} {name}, results"] = jax.jit(prepared.apply)(converted, x)
    return flatten(results)


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def calibrate_alone() -> dict[str, np.ndarray]:
    """Return the results of `calibrate` on one device."""
    x = make_inputs()["x"]

    def observe(all_reduce: Any, update: Any) -> Any:
        parts = jnp.asarray(x.reshape(8, -1, x.shape[1]))
        return jax.jit(jax.vmap(lambda part: all_reduce(update(part), "d"), axis_name="d", out_axes=None))(parts)

    return calibrate(observe)


# Programs of all devices.


def run_collectives(x: jax.Array) -> dict[str, Any]:
    """Return what each collective returns on one device, and gradients."""
    q = jq.quantize(x, jq.QuantSpec(jnp.int4, jq.Blocked(1, 8), scale_dtype=jnp.bfloat16))
    table = jq.quantize(x, jq.QuantSpec(jq.nf4, jq.Blocked(1, 8)))
    small = jq.quantize(x, jq.QuantSpec(jnp.float8_e4m3fn, jq.PerAxis(0), scale_dtype=jnp.float8_e8m0fnu))
    pairs = [(i, (i + 3) % 8) for i in range(7)]
    wide = jnp.concatenate([x] * 4, axis=0)
    key = jax.random.key(4)
    total, residual = jqd.psum_with_error_feedback(x, jnp.zeros_like(x), "d", spec=INT8)

    def find_loss(x: jax.Array) -> jax.Array:
        whole = jqd.all_gather(x, "d", spec=INT8, tiled=True, backward_spec=INT8)
        return jnp.sum(whole**2) + jnp.sum(jqd.all_to_all(wide * x[0, 0], "d", 0, 0, spec=INT8, tiled=True))

    return {
        "psum": jqd.psum({"x": x, "half": x.astype(jnp.bfloat16)}, "d", spec=INT8),
        "pmean": jqd.pmean(x, "d", spec=INT8, key=key),
        "psum_scatter": jqd.psum_scatter(wide, "d", spec=INT8, tiled=True),
        "all_gather": [jqd.all_gather(each, "d", tiled=True) for each in (q, table, small)],
        "all_gather of floats": jqd.all_gather(x.astype(jnp.bfloat16), "d", spec=INT8),
        "all_to_all": [jqd.all_to_all(jq.concatenate([q] * 4), "d", 0, 1, tiled=True)],
        "all_to_all of floats": jqd.all_to_all(wide, "d", 0, 0, spec=INT8, tiled=True, key=key),
        "ppermute": [jqd.ppermute(each, "d", pairs) for each in (q, table, small)],
        "feedback": (total, residual),
        "same": jqd.compare_devices({"x": x}, "d"),
        "same sums": jqd.compare_devices(total, "d"),
        "gradient": jax.grad(find_loss)(x),
    }


def train(params: Any, x: jax.Array, y: jax.Array) -> dict[str, Any]:
    """Return the loss, the weights and their codes after two steps, in which each device has its own rows.

    Contractions are in integers, forward and backward, gradients travel as codes, and the state of Adam is 8 bits.
    """
    spec, channels = operator_families.TOKENS, jq.QuantSpec(jnp.int8, jq.PerAxis(1))

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return jq.quantized_einsum("ij,jk->ik", x, w, specs=(spec, channels), backward=jq.Int8Backward())

    def find_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.relu(dense(x, params["first"]) + params["bias"].reshape(1, -1))
        return jnp.mean((dense(h, params["second"]) - y) ** 2)

    tx: Any = jq.optim.quantize_state(optax.adam(1e-2), min_size=16)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        state = tx.init(params)
        losses = []
        for _ in range(2):
            varying = jax.tree.map(lambda w: lax.pcast(w, "d", to="varying"), params)
            loss, grads = jax.value_and_grad(find_loss)(varying, x, y)
            updates, state = tx.update(jqd.pmean(grads, "d", spec=INT8), state, params)
            params = optax.apply_updates(params, updates)
            losses.append(lax.pmean(loss, "d"))
    codes = jax.tree.map(lambda w: jq.quantize(w, jq.QuantSpec(jnp.int8)), params)
    return {"float losses": losses, "weights": params, "codes": codes, "same": jqd.compare_devices(params, "d")}


def run_programs(mesh: Mesh, spread: Any) -> dict[str, np.ndarray]:
    """Return the results of `run_collectives` and of `train` on eight devices.

    Args:
        mesh: all devices.
        spread: `spread(value, dimension)` returns a global array, cut along a dimension, or whole for None.
    """
    replicated = NamedSharding(mesh, P())
    data = make_inputs()

    def on_device(x: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], operator_families.list_arrays(run_collectives(x)))

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    results = {"collectives": jax.jit(mapped, out_shardings=replicated)(spread(data["x"], 0))}
    step = jax.shard_map(train, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P())
    params = {name: spread(value, None) for name, value in make_params().items()}
    trained = jax.jit(lambda *a: operator_families.list_arrays(step(*a)), out_shardings=replicated)
    y = data["w"].reshape(-1, 16)[: len(data["x"])]
    return flatten(results) | flatten(trained(params, spread(data["x"], 0), spread(y, 0)))


def run_on(mesh: Mesh) -> dict[str, np.ndarray]:
    """Return the results of everything on the devices of a mesh, which may belong to several processes."""
    replicated = NamedSharding(mesh, P())

    def spread(value: np.ndarray, dimension: int | None) -> jax.Array:
        names = ["d" if i == dimension else None for i in range(value.ndim)]
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P(*names)), lambda index: value[index])

    def observe(all_reduce: Any, update: Any) -> Any:
        mapped = jax.shard_map(
            lambda x: all_reduce(update(x), "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
        )
        return jax.jit(mapped)(spread(make_inputs()["x"], 0))

    return run_programs(mesh, spread) | calibrate(observe) | run_families(spread, replicated)


def main(index: int, port: int, folder: pathlib.Path) -> None:
    """Compute everything as one of two processes."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, initialization_timeout=120)
    results: dict[str, Any] = run_on(Mesh(np.array(jax.devices()), ("d",)))
    if index == 0:
        np.savez(folder / "families.npz", **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
