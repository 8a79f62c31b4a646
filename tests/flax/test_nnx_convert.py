"""From a trained NNX model to its integers: no code differs, no float kernel is left, and what serves can be saved."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from jax import export
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant.flax import Learned
from jaxquant.flax import nnx as qnnx

from ..support.matrix import mark_others_full

F32 = np.float32
A = jq.QuantSpec("uint8")


def weights(dtype: str) -> jq.QuantSpec:
    return jq.QuantSpec(dtype, jq.PerAxis(-1))


LEARNED: Any = {"activation_spec": A, "weight_range": Learned(), "activation_range": Learned(jq.LSQPlus())}
WAYS: dict[str, Any] = {
    "int8": {"weight_spec": weights("int8"), "activation_spec": A},
    "int4, learned": {"weight_spec": weights("int4"), **LEARNED},
    "int4, clipped": {"weight_spec": weights("int4"), **LEARNED, "activation_range": Learned(jq.PACT())},
    "int2, learned": {"weight_spec": weights("int2"), **LEARNED, "activation_range": Learned()},
}


class Net(nnx.Module):
    """Dense layers, with convolutions before them or not. It returns what each layer was given, too."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        rngs, way = nnx.Rngs(3), [WAYS[name] for name in ways]
        self.layers = nnx.List([])
        if len(ways) == 4:
            self.layers.append(qnnx.Conv(1, 8, (3, 3), 2, **way[0], rngs=rngs))
            self.layers.append(qnnx.Conv(8, 16, (3, 3), **way[1], feature_group_count=8, rngs=rngs))
        self.layers.append(qnnx.Linear(256 if len(ways) == 4 else 64, 32, **way[-2], rngs=rngs))
        self.layers.append(qnnx.Linear(32, 10, **way[-1], rngs=rngs))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        inputs = []
        for i, layer in enumerate(self.layers):
            x = nnx.relu(x) if i else x
            x = x.reshape(len(x), -1) if isinstance(layer, qnnx.Linear) else x
            inputs.append(x)
            x = layer(x)
        return x, inputs


@functools.cache
def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images and labels to train on, and to test with."""
    data: Any = load_digits()
    x, y = data.images[..., None].astype(F32) / 16, data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1280], order[1280:]
    return (jnp.asarray(x[train]), jnp.asarray(y[train])), (jnp.asarray(x[test]), jnp.asarray(y[test]))


def train(net: Net, epochs: int) -> None:
    (x, labels), _ = digits()
    trained = nnx.Any(nnx.Param, qnnx.Scale)
    optimizer = nnx.Optimizer(net, optax.adam(4e-3), wrt=trained)

    def loss(net: Net, x: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(net(x)[0], labels).mean()

    @nnx.jit
    def step(net: Net, optimizer: Any, x: jax.Array, labels: jax.Array) -> None:
        optimizer.update(net, nnx.grad(loss, argnums=nnx.DiffState(0, trained))(net, x, labels))

    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32
        for i in range(10 * epochs):
            part = slice(i % 10 * 128, i % 10 * 128 + 128)
            step(net, optimizer, x[part], labels[part])


def coded(x: Any, scale: Any, point: Any, bounds: tuple[int, int]) -> np.ndarray:
    """Codes by numpy; the quotient rounded to float32, as the specification has it."""
    return (np.rint(np.asarray(x, F32) / np.abs(np.asarray(scale, F32))) + np.rint(np.asarray(point, F32))).clip(
        *bounds
    )


MODELS = {
    "dense": ("int8", "int8"),
    "dense, learned": ("int2, learned", "int2, learned"),
    "conv": ("int8", "int4, learned", "int4, learned", "int8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others_full(MODELS, ("dense",)))
def test_no_code_differs(name: str) -> None:
    net = Net(MODELS[name])
    (x, _), (images, labels) = digits()
    if name != "dense":
        qnnx.start(net, x[:128])
    train(net, 4)
    net.eval()
    serving = qnnx.convert(net)
    run = nnx.jit(lambda net, x: net(x))
    (y, layer_inputs), (served, inputs) = run(net, images), run(serving, images)
    np.testing.assert_array_equal(served, y)
    assert (np.argmax(y, axis=-1) == labels).mean() > 0.75, "it has learned something"
    for way, layer, converted, layer_input, serving_input in zip(
        MODELS[name], net.layers, serving.layers, layer_inputs, inputs, strict=True
    ):
        field = "conv_general_dilated" if isinstance(layer, qnnx.Conv) else "dot_general"
        training, constants = getattr(layer, field), getattr(converted, field)
        codes = coded(serving_input, constants.activation_scale[...], constants.activation_zero_point[...], (0, 255))
        if "learned" in way:
            own_point = training.activation_zero_point
            point = 0 if own_point is None else own_point[...].clip(0, 255)
            want = coded(layer_input, training.activation_scale[...], point, (0, 255))
            bound = 7 if way.startswith("int4") else 1
            kernel = coded(layer.kernel[...], training.weight_scale[...], 0, (-bound, bound))
        else:
            ends = jq.calibration.moving_average(A).finalize(training.activation_range.get_value())
            want = np.asarray(jq.quantize(layer_input, A, range=ends).codes)
            kernel = np.asarray(jq.quantize(layer.kernel[...], WAYS[way]["weight_spec"]).codes)
        assert (codes != want).sum() == 0
        assert (np.asarray(converted.kernel.get_value().codes).astype(F32) != kernel.astype(F32)).sum() == 0
        assert len(np.unique(codes)) > 10


class Mixed(nnx.Module):
    """Modules in modules, some of them in floats."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = qnnx.Embed(12, 8, weight_spec=jq.QuantSpec("int4", jq.PerAxis(0)), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.plain = nnx.Linear(8, 8, rngs=rngs)
        self.block = nnx.Dict(
            wide=qnnx.Linear(8, 16, **WAYS["int8"], rngs=rngs),
            narrow=qnnx.Linear(16, 8, **WAYS["int4, clipped"], rngs=rngs),
        )
        self.head = qnnx.Einsum("...i,ij->...j", (8, 3), weight_spec=jq.QuantSpec(jq.nf4, jq.Blocked(0, 4)), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.plain(self.norm(self.table(tokens)))
        return self.head(self.block.narrow(nnx.relu(self.block.wide(x))))


TOKENS: Any = np.arange(24, dtype=np.int32).reshape(2, 12) % 12


@functools.cache
def mixed() -> tuple[Mixed, Mixed]:
    """A model with ranges, and what serves it."""
    model = Mixed(nnx.Rngs(1))
    qnnx.start(model, TOKENS)
    nnx.jit(lambda model: model(TOKENS))(model)
    model.eval()
    return model, qnnx.convert(model)


def check_equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert [v.dtype for v in jax.tree.leaves(actual)] == [v.dtype for v in jax.tree.leaves(expected)]


@pytest.mark.slow
def test_no_float_kernel_is_left() -> None:
    model, serving = mixed()
    assert isinstance(serving, Mixed)
    assert isinstance(model.table.embedding, nnx.Param), "the model stays as it is"
    graph, codes, params, ranges = nnx.split(serving, qnnx.Codes, nnx.Param, qnnx.Ranges)
    assert {path[-1] for path, _ in nnx.to_flat_state(codes)} == {"embedding", "kernel"}
    assert all(isinstance(v.get_value(), jq.QuantizedArray) for _, v in nnx.to_flat_state(codes))
    assert max(leaf.size for leaf in jax.tree.leaves(ranges)) == 1
    for path, param in nnx.to_flat_state(params):
        assert path[0] in ("plain", "norm") or path[-1] == "bias", path
        assert param.dtype == F32
    run = nnx.jit(lambda model, x: model(x))
    y = run(serving, TOKENS)
    np.testing.assert_array_equal(y, run(model, TOKENS))
    np.testing.assert_array_equal(run(nnx.merge(graph, codes, params, ranges), TOKENS), y)
    grads = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))(serving, TOKENS)  # of what is left of nnx.Param
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def orbax(tree: Any, folder: Any) -> Any:
    checkpoint.save_orbax(folder / "step", tree)
    return checkpoint.load_orbax(folder / "step", jax.eval_shape(lambda: tree))


def safetensors(tree: Any, folder: Any) -> Any:
    checkpoint.save_safetensors(folder / "weights.safetensors", tree)
    return checkpoint.load_safetensors(folder / "weights.safetensors")


SAVED: dict[str, Callable[[Any, Any], Any]] = {
    "orbax": orbax,
    "safetensors": safetensors,
    "bytes": lambda tree, _: serialization.from_bytes(jax.tree.map(jnp.zeros_like, tree), serialization.to_bytes(tree)),
    "pickle": lambda tree, _: pickle.loads(pickle.dumps(tree)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SAVED))
def test_what_serves_is_saved(tmp_path: Any, name: str) -> None:
    _, serving = mixed()
    expected = nnx.to_pure_dict(nnx.state(serving))
    restored = SAVED[name](expected, tmp_path)
    check_equal(restored, expected)
    empty = nnx.eval_shape(lambda: qnnx.convert(Mixed(nnx.Rngs(0))))
    state = nnx.state(empty)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(empty, state)
    np.testing.assert_array_equal(empty(TOKENS), serving(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["orbax", "pickle"])
def test_what_trains_is_saved(tmp_path: Any, name: str) -> None:
    model, serving = mixed()
    expected = nnx.to_pure_dict(nnx.state(model))
    restored = Mixed(nnx.Rngs(5))
    state = nnx.state(restored)
    nnx.replace_by_pure_dict(state, SAVED[name](expected, tmp_path))
    nnx.update(restored, state)
    check_equal(nnx.to_pure_dict(nnx.state(qnnx.convert(restored))), nnx.to_pure_dict(nnx.state(serving)))


def test_the_serving_function_is_exported() -> None:
    graph, state = nnx.split(mixed()[1])
    weights = nnx.to_pure_dict(state)

    def run(weights: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        filled = nnx.state(model)
        nnx.replace_by_pure_dict(filled, weights)
        return nnx.merge(graph, filled)(tokens)

    run = jax.jit(run)
    text = export.export(run)(weights, TOKENS).serialize()
    np.testing.assert_array_equal(export.deserialize(text).call(weights, TOKENS), run(weights, TOKENS))


@pytest.mark.slow
def test_layers_that_share_a_kernel_share_its_codes(rng: np.random.Generator) -> None:
    way = WAYS["int8"]
    first, second = (qnnx.Linear(6, 6, **way, rngs=nnx.Rngs(i)) for i in range(2))
    second.kernel = first.kernel
    net = nnx.Sequential(first, second, first)
    x = jnp.asarray(rng.normal(size=(6, 6)), F32)
    net(x)
    net.eval()
    serving = qnnx.convert(net)
    assert serving.layers[0].kernel is serving.layers[1].kernel
    assert serving.layers[0] is serving.layers[2]
    np.testing.assert_array_equal(serving(x), net(x))
    check_equal(qnnx.convert(first).kernel.get_value(), serving.layers[0].kernel.get_value())


@pytest.mark.slow
def test_a_folded_normalisation(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(4, 6, 6, 3)), F32)
    streams = nnx.Rngs(0)
    for layer in (
        nnx.Conv(3, 5, (3, 3), use_bias=False, rngs=streams),
        qnnx.Conv(3, 5, (3, 3), **WAYS["int8"], bias_init=nnx.initializers.normal(), rngs=streams),
    ):
        norm = nnx.BatchNorm(5, epsilon=1e-3, use_running_average=True, rngs=streams)
        for variable in (norm.mean, norm.var, norm.scale, norm.bias):
            variable[...] = jnp.asarray(rng.uniform(0.5, 2, 5), F32)  # type: ignore[index,union-attr]
        plain = nnx.Conv(3, 5, (3, 3), use_bias=layer.use_bias, rngs=streams)
        nnx.update(plain, nnx.state(layer, nnx.Param))
        want = norm(plain(x))
        folded = qnnx.fold_batch_norm(layer, norm)
        assert type(folded) is type(layer)
        check_equal(nnx.state(layer, nnx.Param), nnx.state(plain, nnx.Param))
        tolerance = 1e-5 if type(layer) is nnx.Conv else 0.05 * np.abs(want).max()
        np.testing.assert_allclose(folded(x), want, rtol=1e-5, atol=tolerance)
        if isinstance(folded, qnnx.Conv):
            np.testing.assert_array_equal(qnnx.convert(folded)(x), (folded.eval() or folded)(x))
    with pytest.raises(ValueError, match=r"fold_batch_norm: layer: expected a layer with a float kernel"):
        qnnx.fold_batch_norm(qnnx.convert(qnnx.Linear(2, 5, weight_spec=weights("int8"), rngs=streams)), norm)
    with pytest.raises(ValueError, match=r"norm.axis: expected -1, the axis of the features, got 1"):
        qnnx.fold_batch_norm(layer, nnx.BatchNorm(5, axis=1, rngs=streams))
    with pytest.raises(ValueError, match=r"stats\[\"mean\"\]: expected shape \(5,\)"):
        qnnx.fold_batch_norm(layer, nnx.BatchNorm(4, rngs=streams))
    with pytest.raises(TypeError, match=r"norm: expected a BatchNorm, got LayerNorm"):
        qnnx.fold_batch_norm(layer, nnx.LayerNorm(5, rngs=streams))  # type: ignore[arg-type]


@pytest.mark.slow
def test_refusals(rng: np.random.Generator) -> None:
    model = Mixed(nnx.Rngs(0))
    place = r"block/wide: jaxquant.flax.nnx.convert: activation: expected a range.*, got no data"
    qnnx.start(model, TOKENS)
    with pytest.raises(ValueError, match=place):
        qnnx.convert(model)
    model(TOKENS)
    narrow = model.block.narrow
    weight_scale = narrow.dot_general.weight_scale[...]
    narrow.dot_general.weight_scale[...] = jnp.full_like(weight_scale, jnp.nan)
    with pytest.raises(
        ValueError, match=r"block/narrow: .*weight_scale: expected finite numbers: .*start\(model, batch\) starts it"
    ):
        qnnx.convert(model)
    narrow.dot_general.weight_scale[...] = weight_scale
    narrow.kernel.set_value(jnp.ones((15, 8)))  # a checkpoint of other shapes
    with pytest.raises(ValueError, match=r"block/narrow: .*kernel: expected shape \(16, 8\).*, got shape \(15, 8\)"):
        qnnx.convert(model)
    serving = mixed()[1]
    with pytest.raises(
        ValueError, match=r"block/narrow: .*model: expected a model with float kernels, got one that is"
    ):
        qnnx.convert(serving)
    with pytest.raises(ValueError, match=r"^block/wide: jaxquant.dot_general: .*"):
        serving.block.wide(jnp.ones((2, 7)))
    with pytest.raises(ValueError, match=r"flax.nnx.convert: model: expected a model with quantized layers, got none"):
        qnnx.convert(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(
        TypeError, match=r"model: expected a flax.nnx.Module \(jaxquant.flax has this function for Linen\), got Dense"
    ):
        qnnx.convert(nn.Dense(3))  # type: ignore[type-var]
    dot = qnnx.dot_general(weights("int8"))
    layer = nnx.Linear(2, 3, dot_general=dot, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Linear: .*expected promote_dtype=jaxquant.flax.nnx.promote_dtype"):
        qnnx.convert(layer)
    with pytest.raises(ValueError, match=r'layers/1: .*expected a layer with a "kernel" around this module'):
        qnnx.convert(nnx.Sequential(layer, qnnx.dot_general(weights("int8"))))
    alone: Any = qnnx.Linear(2, 3, **WAYS["int8"], rngs=nnx.Rngs(0))
    alone.kernel = nnx.data(qnnx.Codes(jq.quantize(alone.kernel[...], weights("int8"))))
    with pytest.raises(
        ValueError, match=r"Linear\(2, 3\): .*activation: expected its scale, which jaxquant.flax.nnx.convert"
    ):
        alone(jnp.ones((2, 2)))
