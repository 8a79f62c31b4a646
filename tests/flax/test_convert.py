"""Linen models that were trained, converted: the codes of training at every point, no floats, and every way to save."""

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
from flax import serialization
from flax.core import freeze
from jax import export
from sklearn.datasets import load_digits

import jaxquant as jq
from jaxquant import checkpoint
from jaxquant import flax as qflax
from jaxquant.flax import Learned
from jaxquant.flax import linen as qnn
from jaxquant.flax.linen.contraction import Contraction

from ..support.matrix import mark_others_full

F32 = np.float32
A = jq.QuantSpec("uint8")


def weights(dtype: str) -> jq.QuantSpec:
    return jq.QuantSpec(dtype, jq.PerAxis(-1))


# how the layers of a model are quantized
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"weight_spec": weights("int8"), "activation_spec": A},
    "int4, learned": {
        "weight_spec": weights("int4"),
        "activation_spec": A,
        "weight_range": Learned(jq.LSQ()),
        "activation_range": Learned(jq.LSQPlus()),
    },
    "int2, learned": {
        "weight_spec": weights("int2"),
        "activation_spec": A,
        "weight_range": Learned(jq.LSQ()),
        "activation_range": Learned(jq.PACT()),
    },
}


class Net(nn.Module):
    """Digits, by dense layers or by convolutions."""

    way: Any
    is_convolutional: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns logits of images [n, 8, 8, 1]."""
        way = dict(self.way)
        if self.is_convolutional:
            x = nn.relu(qnn.Conv(8, (3, 3), strides=2, **way)(x))
            x = nn.relu(qnn.Conv(16, (3, 3), feature_group_count=8, **way)(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(qnn.Dense(32, **way)(x))
        return qnn.Dense(10, **way)(x)


@functools.cache
def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images and labels to train on, and to test with."""
    data: Any = load_digits()
    x, y = data.images[..., None].astype(F32) / 16, data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1280], order[1280:]
    return (jnp.asarray(x[train]), jnp.asarray(y[train])), (jnp.asarray(x[test]), jnp.asarray(y[test]))


def trained(module: Any, epochs: int) -> dict[str, Any]:
    """Variables after some epochs of Adam, ranges observed on the way."""
    (x, labels), _ = digits()
    optimizer = optax.adam(4e-3)

    def loss(learned: Any, rest: Any, x: Any, labels: Any) -> Any:
        logits, new_ranges = module.apply({**learned, **rest}, x, mutable=["ranges"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new_ranges

    @jax.jit
    def step(carry: Any, batch: Any) -> Any:
        learned, rest, state = carry
        grads, new_ranges = jax.grad(loss, has_aux=True)(learned, rest, *batch)
        updates, state = optimizer.update(grads, state, learned)
        return optax.apply_updates(learned, updates), {**rest, **new_ranges}, state

    variables = jax.jit(module.init)(jax.random.key(3), x[:128])
    learned = {name: variables[name] for name in ("params", "scales") if name in variables}
    rest = {name: value for name, value in variables.items() if name not in learned}
    batches = [(x[i : i + 128], labels[i : i + 128]) for i in range(0, len(x), 128)]
    with jax.numpy_dtype_promotion("standard"):  # optax counts its steps in int32
        carry = (learned, rest, optimizer.init(learned))
        # A loop of calls and not a scan, in which XLA:CPU takes 20 times as long for the gradients.
        for batch in epochs * batches:
            carry = step(carry, batch)
    learned, rest, _ = carry
    return {**learned, **rest}


def captured(module: Any, variables: Any, x: Any) -> tuple[Any, dict[str, Any]]:
    """The result, and what every contraction was given to quantize."""
    inputs: dict[str, Any] = {}

    def keep(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Contraction) and context.method_name == "__call__":
            inputs["/".join(context.module.path)] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(keep):
        y = module.apply(variables, x)
    return y, inputs


def find_subtree(tree: Any, path: str) -> Any:
    return functools.reduce(lambda node, name: node[name], path.split("/"), tree)


def activation_codes(variables: Any, path: str, x: Any) -> np.ndarray:
    """The codes of training, from its variables and by the public functions."""
    scales = variables.get("scales")
    if scales is None:
        state = find_subtree(variables["ranges"], path)["activation"]["state"]
        return np.asarray(jq.quantize(x, A, range=jq.calibration.moving_average(A).finalize(state)).codes)
    parameters = find_subtree(scales, path)
    scale = np.abs(np.asarray(parameters["activation_scale"], F32))
    point = np.rint(np.asarray(parameters.get("activation_zero_point", 0.0), np.float64)).clip(0, 255)
    return (np.rint(np.asarray(x, F32) / scale) + point).clip(0, 255)


MODELS = [("int8", False), ("int2, learned", False), ("int8", True), ("int4, learned", True)]


BY_DEFAULT = [("int2, learned", False), ("int8", True)]
NAMES = ["dense", "dense, learned", "conv", "conv, learned"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_convolutional"), mark_others_full(MODELS, BY_DEFAULT), ids=NAMES)
def test_no_code_differs(name: str, is_convolutional: bool) -> None:
    module = Net(tuple(WAYS[name].items()), is_convolutional)
    variables = trained(module, 4)
    _, (x, labels) = digits()
    serving = qflax.convert(module, variables)
    run = jax.jit(functools.partial(captured, module))
    (y, layer_inputs), (served, inputs) = run(variables, x), run(serving, x)
    np.testing.assert_array_equal(served, y)
    assert (np.argmax(y, axis=-1) == labels).mean() > 0.75, "it has learned something"
    assert len(layer_inputs) == 2 + 2 * is_convolutional
    for path, layer_input in layer_inputs.items():
        np.testing.assert_array_equal(inputs[path], layer_input)
        constants = find_subtree(serving["ranges"], path)["activation"]
        step, point = (np.asarray(constants[k], F32) for k in ("scale", "zero_point"))
        codes = (np.rint(np.asarray(inputs[path], F32) / step) + point).clip(0, 255)  # divided in float32, as codes are
        assert (codes != activation_codes(variables, path, layer_input)).sum() == 0
        outer = path.rpartition("/")[0]
        kernel, q = find_subtree(variables["params"], outer)["kernel"], find_subtree(serving["params"], outer)["kernel"]
        if "scales" in variables:
            scale = np.abs(np.asarray(find_subtree(variables["scales"], path)["weight_scale"], F32))
            bound = 7 if name.startswith("int4") else 1
            want = np.rint(np.asarray(kernel, F32) / scale).clip(-bound, bound)
        else:
            want = np.asarray(jq.quantize(kernel, WAYS[name]["weight_spec"]).codes)
        assert (np.asarray(q.codes).astype(np.float64) != want).sum() == 0
        assert len(np.unique(codes)) > 10


class Mixed(nn.Module):
    """Submodules in submodules, some of them in floats."""

    def setup(self) -> None:
        """Makes the parts."""
        self.table = qnn.Embed(12, 8, weight_spec=jq.QuantSpec("int4", jq.PerAxis(0)))
        self.norm = nn.LayerNorm()
        parts = (qnn.Dense(16, **WAYS["int8"]), nn.relu, nn.Dense(8), qnn.Dense(8, **WAYS["int4, learned"]))
        self.block = nn.Sequential(parts)
        self.head = qnn.Einsum((8, 3), "...i,ij->...j", weight_spec=jq.QuantSpec(jq.nf4, jq.Blocked(0, 4)))

    def __call__(self, tokens: Any) -> Any:
        """Returns [n, m, 3]."""
        return self.head(self.block(self.norm(self.table(tokens))))


@functools.cache
def mixed() -> tuple[Any, Any, Any, Any]:
    """(module, its variables, these converted, tokens)."""
    module, tokens = Mixed(), jnp.arange(12).reshape(3, 4)
    variables = jax.jit(module.init)(jax.random.key(0), tokens)
    _, updates = jax.jit(functools.partial(module.apply, mutable=["ranges"]))(variables, tokens)
    variables = {**variables, **updates}
    return module, variables, qflax.convert(module, variables), tokens


@pytest.mark.slow
def test_no_float_kernel_is_left() -> None:
    module, variables, serving, tokens = mixed()
    quantized = [q for q in jax.tree.leaves(serving, is_leaf=lambda v: isinstance(v, jq.QuantizedArray))
                 if isinstance(q, jq.QuantizedArray)]  # fmt: skip
    dtypes = {(str(q.codebook and q.codebook.name), str(q.codes.dtype), q.shape) for q in quantized}
    assert dtypes == {("None", "int4", (12, 8)), ("None", "int8", (8, 16)), ("None", "int4", (8, 8)),
                      ("nf4", "uint4", (8, 3))}  # fmt: skip
    floats = [v.shape for v in jax.tree.leaves(serving) if v.dtype == F32 and v.ndim == 2 and 1 not in v.shape]
    assert sorted(floats) == [(2, 3), (16, 8)], "the scales of blocks, and the layer that is float"
    assert set(serving) == {"params", "ranges"}
    np.testing.assert_array_equal(serving["params"]["block"]["layers_2"]["kernel"],
                                  variables["params"]["block"]["layers_2"]["kernel"])  # fmt: skip
    run = jax.jit(module.apply)
    np.testing.assert_array_equal(run(serving, tokens), run(variables, tokens))
    run_frozen = run(freeze(serving), tokens)
    np.testing.assert_array_equal(run_frozen, run(serving, tokens))
    jitted = jax.jit(functools.partial(qflax.convert, module))(freeze(variables))
    check_equal(jitted, serving)
    with pytest.raises(ValueError, match=r"jaxquant\.flax\.convert: variables: .*, got variables .* already converted"):
        qflax.convert(module, serving)


def check_equal(actual: Any, expected: Any) -> None:
    """The same tree of the same bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert [v.dtype for v in jax.tree.leaves(actual)] == [v.dtype for v in jax.tree.leaves(expected)]


def orbax(tree: Any, folder: Any) -> Any:
    checkpoint.save_orbax(folder / "step", tree)
    return checkpoint.load_orbax(folder / "step", jax.eval_shape(lambda: tree))


def safetensors(tree: Any, folder: Any) -> Any:
    checkpoint.save_safetensors(folder / "weights.safetensors", tree)
    return checkpoint.load_safetensors(folder / "weights.safetensors")


def standard(tree: Any, folder: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "plain", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "plain", jax.eval_shape(lambda: tree))


def blank(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


SERVING: dict[str, Callable[[Any, Any], Any]] = {
    "orbax": orbax,
    "safetensors": safetensors,
    "bytes": lambda tree, _: serialization.from_bytes(blank(tree), serialization.to_bytes(tree)),
    "state": lambda tree, _: serialization.from_state_dict(blank(tree), serialization.to_state_dict(tree)),
    "pickle": lambda tree, _: pickle.loads(pickle.dumps(tree)),
}
TRAINING = {"standard": standard, **{name: SERVING[name] for name in ("bytes", "state", "pickle")}}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SERVING))
def test_what_serves_is_saved(tmp_path: Any, name: str) -> None:
    module, _, serving, tokens = mixed()
    restored = SERVING[name](serving, tmp_path)
    check_equal(restored, serving)
    run = jax.jit(module.apply)
    np.testing.assert_array_equal(run(restored, tokens), run(serving, tokens))


@pytest.mark.parametrize("name", list(TRAINING))
def test_what_trains_is_saved(tmp_path: Any, name: str) -> None:
    module, variables, serving, _ = mixed()
    restored = TRAINING[name](variables, tmp_path)
    check_equal(restored, variables)
    check_equal(qflax.convert(module, restored), serving)  # what a layer says of itself is still there


def test_the_serving_function_is_exported() -> None:
    module, _, serving, tokens = mixed()
    run = jax.jit(module.apply)
    text = export.export(run)(serving, tokens).serialize()
    np.testing.assert_array_equal(export.deserialize(text).call(serving, tokens), run(serving, tokens))


class Normalized(nn.Module):
    """A convolution and its normalisation; or, folded, the first alone."""

    way: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns features."""
        if self.way is not None:
            return qnn.Conv(5, (3, 3), name="conv", **dict(self.way))(x)
        x = nn.Conv(5, (3, 3), use_bias=False, name="conv")(x)
        return nn.BatchNorm(use_running_average=True, name="norm", epsilon=1e-3)(x)


@pytest.mark.slow
def test_a_folded_normalisation(fixed_rng: np.random.Generator) -> None:
    x = jnp.asarray(fixed_rng.normal(size=(4, 6, 6, 3)), F32)
    variables = jax.jit(Normalized().init)(jax.random.key(0), x)
    params, stats = jax.tree.map(lambda v: jnp.asarray(fixed_rng.uniform(0.5, 2, v.shape), F32),
                                 (variables["params"]["norm"], variables["batch_stats"]["norm"]))  # fmt: skip
    layer = variables["params"]["conv"]
    folded = qflax.fold_batch_norm(layer, params, stats, epsilon=1e-3)
    expected: Any = Normalized().apply({"params": {"conv": layer, "norm": params}, "batch_stats": {"norm": stats}}, x)
    actual: Any = nn.Conv(5, (3, 3)).apply({"params": folded}, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    module: Any = Normalized(tuple(WAYS["int8"].items()))
    trainable = {"params": {"conv": folded}}
    y, updates = jax.jit(functools.partial(module.apply, mutable=["ranges"]))(trainable, x)
    assert np.abs(y - expected).max() < 0.05 * np.abs(expected).max()
    grads = jax.grad(lambda p: (module.apply({**p, **updates}, x) ** 2).sum())(trainable)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    np.testing.assert_array_equal(module.apply(qflax.convert(module, {**trainable, **updates}), x), y)
