"""Algorithms on stacked, sharded and bfloat16 weights, and exported models: the same codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import ptq

from ..support.equality import check_equal

F32 = np.float32
SPEC = jq.QuantSpec("int4", jq.PerAxis(1))
RULES = (jq.Rule(weight=jq.Weight("int4")),)


def dense(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["first"]) @ params["second"]


def sample(rng: np.random.Generator) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return weights of one shape, so that an algorithm compiles once, and inputs."""
    params = {name: jnp.asarray(rng.normal(size=(16, 16)), F32) for name in ("first", "second")}
    return params, jnp.asarray(rng.normal(size=(64, 16)) @ rng.normal(size=(16, 16)), F32)


def sample_layers(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Return the weights and the second moments of three layers."""
    xs = rng.normal(size=(3, 48, 12)) @ rng.normal(size=(3, 12, 12))
    return jnp.asarray(rng.normal(size=(3, 12, 8)), F32), jnp.asarray(np.einsum("lni,lnj->lij", xs, xs) / 48, F32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["hqq", "smoothquant"])
def test_stacked_layers(rng: np.random.Generator, name: str) -> None:
    """Mapped over layers, each layer is as on its own."""
    ws, hessians = sample_layers(rng)
    function: Any = {
        "hqq": lambda w, h: ptq.hqq(w, SPEC).codes,
        "smoothquant": lambda w, h: ptq.smoothquant(w, jnp.sqrt(jnp.diagonal(h))),
    }[name]
    check_equal(jax.vmap(function)(ws, hessians), jnp.stack(list(map(function, ws, hessians))))


@pytest.mark.full
def test_stacked_layers_with_learned_roundings(rng: np.random.Generator) -> None:
    ws, hessians = sample_layers(rng)
    # Sums of a batch of matrices may have another order, which a learned choice at a tie tells.
    mapped = jax.vmap(lambda w, h: ptq.adaround(w, h, SPEC, steps=50))(ws, hessians)
    for place, (w, hessian) in enumerate(zip(ws, hessians, strict=True)):
        q = ptq.adaround(w, hessian, SPEC, steps=50)
        assert np.mean(np.asarray(q.codes) == np.asarray(mapped.codes[place])) > 0.8
        errors = [
            w - values for values in (q.dequantize(), jax.tree.map(lambda x, at=place: x[at], mapped).dequantize())
        ]
        costs = [float(jnp.sum(e * (hessian @ e))) for e in errors]
        assert 0.8 < costs[0] / costs[1] < 1.25


@pytest.mark.slow
def test_sharded_parameters_have_the_same_codes(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    prepared = jq.prepare(dense, params, x, rules=RULES)
    stats = ptq.collect(prepared, params, [x])
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    placed = {name: jax.device_put(w, sharding) for name, w in params.items()}
    method = ptq.GPTQ(range="whole")
    expected, _ = ptq.apply(prepared, params, stats, method)
    actual, _ = ptq.apply(prepared, placed, stats, method)
    for name in params:
        check_equal(actual.params[name].codes, expected.params[name].codes)
    # Batches over the devices: the same statistics, but for the order of sums.
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    others = ptq.collect(prepared, placed, [jax.device_put(x, rows)])
    for name in stats:
        np.testing.assert_allclose(others[name].second, stats[name].second, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_parameters(rng: np.random.Generator) -> None:
    params, x = sample(rng)
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda w: w.astype(F32), low)
    calls = [(jq.prepare(dense, p, y, rules=RULES), p, y) for p, y in ((low, x.astype(jnp.bfloat16)), (wide, x))]
    stats = ptq.collect(calls[1][0], wide, [x])
    for method in (ptq.GPTQ(range="whole"), ptq.HQQ()):
        results = [ptq.apply(prepared, p, stats, method).tree.params for prepared, p, _ in calls]
        for name, w in wide.items():
            assert results[0][name].dtype == jnp.bfloat16
            check_equal(results[0][name].scale, results[1][name].scale)
            # The two programs round differently. At a tie GPTQ then chooses another code, and makes up for its error.
            assert np.mean(np.asarray(results[0][name].codes) == np.asarray(results[1][name].codes)) > 0.9
            scale = results[1][name].scale
            errors = [w - result[name].codes.astype(F32) * scale for result in results]
            costs = [float(jnp.sum(e * (stats[name].second[0] @ e))) for e in errors]
            assert 0.95 < costs[0] / costs[1] < 1.05
    prepared, p, y = calls[0]
    # Layer by layer, the activations are those of bfloat16.
    qparams, notes = ptq.apply(prepared, p, [y], ptq.GPTQ())
    assert all(note.after <= note.before for note in notes)  # type: ignore[operator]
    assert prepared.apply(qparams, y).dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_exported_models_have_the_same_codes(rng: np.random.Generator, weight: str) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    params, x = sample(rng)
    rules = jq.recipes.w8a8_static() if weight == "int8" else RULES
    prepared = jq.prepare(dense, params, x, rules=rules)
    ranges = prepared.calibrate(params, [x], progress=False) if prepared.static_ranges else None
    qparams, _ = ptq.apply(prepared, params, [x], ptq.GPTQ(range="whole"), ranges=ranges)
    assert (
        np.asarray(qparams.params["first"].codes) != np.asarray(prepared.convert(params, ranges).params["first"].codes)
    ).any()

    model = jq.onnx.export(prepared, qparams, [x])
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in model.graph.initializer}
    for name in params:
        codes = arrays[f"{name}.codes" if weight == "int8" else f"{name}.codes.packed"]
        if weight == "int4":  # MatMulNBits has rows of the transposed codes, two in a byte, and a zero point of 8
            assert codes.dtype == np.uint8
            codes = (np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).T).astype(np.int8) - 8
        check_equal(codes, np.asarray(qparams.params[name].codes).astype(np.int8))
    # Sums of floats may have another order in the runtime.
    report = jq.onnx.verify(model, prepared, qparams, [x], tolerance=1e-5 if weight == "int8" else 1e-4)
    assert report.is_exact, str(report)
