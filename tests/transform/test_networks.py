"""Networks in the style of each framework: every contraction with a weight runs on integers."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxquant as jq

from ..cases.networks import FRAMEWORKS, NETWORKS, NnxCNN, make_network
from ..support.contraction_crawler import count_contractions, count_rows
from ..support.prepared import RECIPES, find_ranges, find_sqnr, same_trees

LEAST_SQNR = {
    "w8a8_dynamic": 32,
    "w8a8_static": 30,
    "onednn": 30,
    "onnx_runtime": 18,
    "activations": 25,
    "weight_only_int8": 34,
}


def _mark(name):
    framework = FRAMEWORKS.get(name.split()[0])
    is_missing = framework is not None and importlib.util.find_spec(framework) is None
    return pytest.param(name, marks=pytest.mark.skipif(is_missing, reason=f"{framework} is not installed"))


every_network = pytest.mark.parametrize("name", [_mark(name) for name in NETWORKS])


def _split(tree):
    """Return the arrays of a tree, and a function from arrays to the tree. The rest is static."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def join(arrays):
        whole = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        return jax.tree.unflatten(structure, whole)

    return [leaves[place] for place in places], join


def _prepare(name, recipe, size=4, seed=1):
    network = make_network(name)
    x = network.sample(jax.random.key(seed), size)
    return network, x, jq.prepare(network.apply, network.params, x, rules=RECIPES[recipe], strict=True)


def _jit(method, params):
    """Compile a method of a prepared function, with what is static in the parameters."""
    _, join = _split(params)
    run = jax.jit(lambda arrays, *rest: method(join(arrays), *rest))
    return lambda params, *rest: run(_split(params)[0], *rest)


@every_network
def test_every_weight_is_contracted_in_integers(name):
    network, x, prepared = _prepare(name, "w8a8_dynamic")
    arrays, join = _split(network.params)
    count = count_contractions(lambda arrays, x: network.apply(join(arrays), x), arrays, x)
    assert count_rows(prepared.coverage) == count
    assert sum(count.values()) > 0
    for row in prepared.coverage.rows:
        assert row.form == ("float" if not row.paths else "lookup" if row.operation == "take" else "integer"), row
    assert len(prepared.coverage.to_dict()) == len(prepared.coverage.rows)


def _check_values(name, recipe):
    network, x, prepared = _prepare(name, recipe, 8)
    params = network.params
    ranges = {}
    if prepared.static_ranges:
        ranges = prepared.calibrate(params, [x, network.sample(jax.random.key(2), 8)], progress=False)
    q, t = prepared.convert(params, ranges), prepared.trainable(params, ranges)
    actual = _jit(prepared.apply, q)(q, x)
    same_trees(actual, _jit(prepared.fake_apply, t)(t, x))
    expected = _jit(network.apply, params)(params, x)
    assert find_sqnr(actual, expected) > LEAST_SQNR.get(recipe, 6)


@pytest.mark.slow
@every_network
@pytest.mark.sample(1)
def test_apply_equals_fake_apply(name):
    _check_values(name, "w8a8_dynamic")


@pytest.mark.slow
@every_network
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "w8a8_dynamic"])
@pytest.mark.sample(1)
def test_apply_equals_fake_apply_with_recipes(name, recipe):
    _check_values(name, recipe)


@pytest.mark.slow
@every_network
@pytest.mark.sample(1)
def test_another_batch_size_and_vmap(name):
    network, x, prepared = _prepare(name, "w8a8_static")
    ranges = find_ranges(prepared, network.params, x)
    qparams = prepared.convert(network.params, ranges)
    samples = network.sample(jax.random.key(3), 6)
    assert [row.name for row in prepared.check(network.params, samples).rows] == [
        row.name for row in prepared.coverage.rows
    ]
    whole = jax.jit(lambda x: prepared.apply(qparams, x))(samples)
    single = jax.jit(jax.vmap(lambda x: prepared.apply(qparams, x[None])[0]))(samples)
    assert find_sqnr(single, whole) > 40


@pytest.mark.slow
@every_network
@pytest.mark.sample(1)
def test_ensemble(name):
    network, x, prepared = _prepare(name, "w8a8_dynamic")
    arrays, join = _split(network.params)
    is_float = [jnp.issubdtype(w.dtype, jnp.floating) for w in arrays]
    members = [[w * scale if moved else w for w, moved in zip(arrays, is_float, strict=True)] for scale in (1.0, 0.9)]

    def run(arrays, x):
        return prepared.apply(prepared.convert(join(arrays)), x)

    stacked = [jnp.stack(ws) for ws in zip(*members, strict=True)]
    actual = jax.jit(jax.vmap(run, (0, None)))(stacked, x)
    for place, member in enumerate(members):
        assert find_sqnr(actual[place], jax.jit(run)(member, x)) > 40


@pytest.mark.slow
@every_network
@pytest.mark.sample(1)
def test_export_with_symbolic_batch(name):
    network, x, prepared = _prepare(name, "w8a8_dynamic")
    arrays, join = _split(network.params)
    (size,) = jax.export.symbolic_shape("batch")

    def run(arrays, x):
        return prepared.apply(prepared.convert(join(arrays)), x)

    described = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in arrays]
    symbolic = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(run))(described, symbolic)
    samples = network.sample(jax.random.key(5), 6)
    assert find_sqnr(exported.call(arrays, samples), jax.jit(run)(arrays, samples)) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain mlp", "plain decoder", "linen encoder", "linen cnn"])
@pytest.mark.sample(1)
def test_sharded_parameters(name):
    network, x, prepared = _prepare(name, "w8a8_dynamic")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    want = jax.jit(prepared.apply)(prepared.convert(network.params), x)

    def place(w):
        axis = next((axis for axis, n in reversed(list(enumerate(w.shape))) if n % 2 == 0), None)
        return jax.device_put(
            w, NamedSharding(mesh, P(*("d" if dimension == axis else None for dimension in range(w.ndim))))
        )

    qparams = prepared.convert(jax.tree.map(place, network.params))
    weights = [q for q in jax.tree.leaves(qparams, is_leaf=_is_quantized) if _is_quantized(q)]
    assert weights
    assert all(len(q.codes.sharding.device_set) == 2 for q in weights)
    assert any("d" in q.codes.sharding.spec for q in weights)
    assert find_sqnr(jax.jit(prepared.apply)(qparams, x), want) > 60


def _is_quantized(x):
    return isinstance(x, jq.QuantizedArray)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain mlp", "linen cnn", "linen lstm", "linen decoder", "plain decoder"])
@pytest.mark.sample(1)
def test_trained_scales_keep_the_bits(name):
    network, x, prepared = _prepare(name, "w8a8_static")
    params = network.params
    t = start = prepared.trainable(params, find_ranges(prepared, params, x), estimator=jq.LSQPlus())

    @jax.jit
    def step(t):
        gradients = jax.grad(lambda t: jnp.mean((prepared.fake_apply(t, x) - 1) ** 2))(t)
        return jax.tree.map(lambda w, g: w - 0.01 * g, t, gradients)

    for _ in range(3):
        t = step(t)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), t.scales, start.scales)
    assert any(jax.tree.leaves(moved))
    same_trees(jax.jit(prepared.apply)(prepared.convert(t), x), jax.jit(prepared.fake_apply)(t, x))


def _cast(tree):
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16) if jnp.issubdtype(w.dtype, jnp.floating) else w, tree)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["plain mlp", "linen separable cnn"])
@pytest.mark.sample(1)
def test_bfloat16(name, recipe):
    network = make_network(name)
    params, x = _cast((network.params, network.sample(jax.random.key(1), 4)))
    prepared = jq.prepare(network.apply, params, x, rules=RECIPES[recipe], strict=True)
    ranges = find_ranges(prepared, params, x)
    actual = jax.jit(prepared.apply)(prepared.convert(params, ranges), x)
    same_trees(actual, jax.jit(prepared.fake_apply)(prepared.trainable(params, ranges), x))
    expected = jax.jit(network.apply)(network.params, x.astype(jnp.float32))
    # Codes of 4 bits; floats of 8 bits with 3 bits of mantissa; and integers of 8 bits.
    least = 6 if "4" in recipe or recipe in ("gguf", "gptq") else 15 if "fp8" in recipe else 20
    assert find_sqnr(np.asarray(actual, np.float32), expected) > least


@pytest.mark.slow
def test_nnx_module_is_split_and_merged():
    from flax import nnx

    network, x, prepared = _prepare("nnx cnn", "w8a8_dynamic")
    model = NnxCNN(nnx.Rngs(0))
    nnx.update(model, network.params)
    whole = jq.prepare(lambda model, x: model(x), model, x, rules=RECIPES["w8a8_dynamic"], strict=True)
    assert [row.name for row in whole.coverage.rows] == [row.name for row in prepared.coverage.rows]
    converted = whole.convert(model)
    assert isinstance(converted.params, NnxCNN)
    want = prepared.convert(network.params)
    same_trees(jax.jit(lambda x: whole.apply(converted, x))(x), jax.jit(lambda x: prepared.apply(want, x))(x))
