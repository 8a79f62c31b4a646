"""Linen layers under the transformations of JAX and flax: trained, converted and served the same under each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Dynamic, Learned
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn

from ..support.matrix import mark_others_full

AVERAGE = jq.Static(jq.calibration.moving_average)
F32, BF16 = np.float32, jnp.bfloat16
W = jq.QuantSpec("int8", jq.PerAxis(-1))
A = jq.QuantSpec("uint8")
STATIC: dict[str, Any] = {"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE}
LEARNED: dict[str, Any] = {**STATIC, "weight_range": Learned(), "activation_range": Learned(jq.LSQPlus())}
OWN: Any = {"params": 0, "ranges": 0, "scales": 0}


def observe_batch(module: Any, x: Any, seed: int = 0) -> dict[str, Any]:
    """Variables of a module that has seen one batch."""

    @jax.jit
    def run(key: Any, x: Any) -> Any:
        variables = module.init(key, x)
        return {**variables, **module.apply(variables, x, mutable=["ranges"])[1]}

    return run(jax.random.key(seed), x)


def serves_what_it_trained(module: Any, variables: Any, x: Any) -> Any:
    """The serving variables, which give what training gives."""
    run, serving = jax.jit(module.apply), qflax.convert(module, variables)
    np.testing.assert_array_equal(run(serving, x), run(variables, x))
    return serving


class Block(nn.Module):
    """A layer as wide as what it is called on."""

    way: Any
    width: int = 8

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns x and the layer of it."""
        return x + nn.relu(qnn.Dense(self.width, name="layer", **dict(self.way))(x))


class Deep(nn.Module):
    """Blocks under nn.scan, or one after another."""

    way: Any
    depth: int = 3
    is_scanned: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns what the last block does."""
        if not self.is_scanned:
            for i in range(self.depth):
                x = Block(self.way, name=f"block{i}")(x)
            return x
        scan = nn.scan(lambda block, x, _: (block(x), None), variable_axes=OWN, split_rngs={"params": True},
                       length=self.depth, metadata_params={nn.PARTITION_NAME: None})  # fmt: skip
        return scan(Block(self.way, name="blocks"), x, None)[0]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [STATIC, LEARNED], ids=["observed", "learned"])
def test_layers_under_scan(rng: np.random.Generator, way: Any) -> None:
    way = tuple(way.items())
    x = jnp.asarray(rng.normal(size=(8, 8)), F32)
    module, unrolled = Deep(way), Deep(way, is_scanned=False)
    variables = observe_batch(module, x)
    serving = serves_what_it_trained(module, variables, x)
    kernel = serving["params"]["blocks"]["layer"]["kernel"]
    assert (kernel.codes.shape, kernel.scale.shape) == ((3, 8, 8), (3, 1, 8))
    parts = {
        name: {f"block{i}": jax.tree.map(lambda v, i=i: v[i], tree["blocks"]) for i in range(3)}
        for name, tree in variables.items()
    }
    y = jax.jit(module.apply)(variables, x)
    np.testing.assert_array_equal(jax.jit(unrolled.apply)(parts, x), y)
    np.testing.assert_array_equal(jax.jit(unrolled.apply)(qflax.convert(unrolled, parts), x), y)
    trained = {name: variables[name] for name in ("params", "scales") if name in variables}

    def loss(module: Any, learned: Any, rest: Any) -> Any:
        return (module.apply({**rest, **learned}, x) ** 2).sum()

    grads = jax.jit(jax.grad(functools.partial(loss, module)))(trained, variables)
    apart = jax.jit(jax.grad(functools.partial(loss, unrolled)))({name: parts[name] for name in trained}, parts)
    for name, tree in grads.items():
        for i in range(3):
            block = jax.tree.map(lambda v, i=i: v[i], tree["blocks"])
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), block, apart[name][f"block{i}"]
            )


@pytest.mark.slow
def test_ensembles_and_batches(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 4, 8)), F32)
    alike: Any = None
    ensemble = nn.vmap(qnn.Dense, in_axes=alike, variable_axes=OWN, split_rngs={"params": True}, axis_size=3)
    module = ensemble(6, **LEARNED)
    variables = observe_batch(module, x[0])
    serving = serves_what_it_trained(module, variables, x[0])
    layer = qnn.Dense(6, **LEARNED)
    for i, y in enumerate(jax.jit(module.apply)(serving, x[0])):
        np.testing.assert_array_equal(layer.apply(jax.tree.map(lambda v, i=i: v[i], serving), x[0]), y)
    conv = qnn.Conv(6, (3,), feature_group_count=2, **STATIC)
    variables = observe_batch(conv, x)
    serving = serves_what_it_trained(conv, variables, x)
    y = conv.apply(serving, x)
    for tree in (serving, variables):
        mapped = jax.jit(jax.vmap(functools.partial(conv.apply, tree)))(x[:, None])
        np.testing.assert_array_equal(mapped[:, 0], y)


class Network(nn.Module):
    """Three wide layers, in floats or quantized, each computed again on the way back or not."""

    way: Any = None
    is_saving: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns what the last layer does."""
        layer = nn.Dense if self.way is None else functools.partial(qnn.Dense, **dict(self.way))

        def body(module: Any, x: Any) -> Any:
            for i in range(3):
                x = nn.relu(layer(64, name=f"layer{i}", parent=module)(x))
            return x

        return (nn.remat(body, policy=jq.save_codes) if self.is_saving else body)(self, x)


@pytest.mark.slow
def test_size_of_the_residuals(rng: np.random.Generator) -> None:
    """Eight bits for each activation and one for its mask, not thirty-two and thirty-two."""
    x = jnp.asarray(rng.normal(size=(2048, 64)), F32)

    def count_residual_bytes(module: Any, variables: Any) -> int:
        def forward(params: Any) -> Any:
            return jax.vjp(lambda p: module.apply({**variables, "params": p}, x), params)[1]

        analysis: Any = jax.jit(forward).lower(variables["params"]).compile().memory_analysis()
        return analysis.output_size_in_bytes

    plain = Network()
    whole = count_residual_bytes(plain, jax.jit(plain.init)(jax.random.key(0), x))
    way = tuple(STATIC.items())
    saving: Any = Network(way, is_saving=True)
    variables = observe_batch(saving, x)
    assert count_residual_bytes(saving, variables) <= 0.3 * whole
    networks: list[Any] = [saving, Network(way)]
    grad = [jax.jit(jax.grad(lambda p, m=m: (m.apply({**variables, "params": p}, x) ** 2).sum()))(variables["params"])
            for m in networks]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *grad)
    y = jax.jit(functools.partial(saving.apply, mutable=["ranges"]))(variables, x)[1]
    assert int(y["ranges"]["layer2"]["DotGeneral_0"]["activation"]["batches"]) == 2


def partitioned(axes: Any) -> Any:
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)


class Sharded(nn.Module):
    """Two layers over a mesh: the features of the first are what the second adds up."""

    way: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns [n, 8]."""
        way = dict(self.way)
        x = nn.relu(qnn.Dense(16, kernel_init=partitioned((None, "model")), name="up", **way)(x))
        return qnn.Dense(8, kernel_init=partitioned(("model", None)), name="down", **way)(x)


@pytest.mark.slow
@pytest.mark.parametrize("way", mark_others_full([STATIC, LEARNED], [LEARNED]), ids=["observed", "learned"])
def test_partitioned_kernels_have_partitioned_codes(rng: np.random.Generator, way: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    module, x = Sharded(tuple(way.items())), jnp.asarray(rng.normal(size=(6, 8)), F32)
    variables = observe_batch(module, x)
    serving = qflax.convert(module, variables)
    specs = nn.get_partition_spec(serving)["params"]
    first, second = specs["up"]["kernel"], specs["down"]["kernel"]
    # The codes of both are stored with the contracted axis last.
    assert (first.stored_codes, first.scale) == (PartitionSpec("model", None), PartitionSpec(None, "model"))
    assert (second.stored_codes, second.scale) == (PartitionSpec(None, "model"), PartitionSpec(None, None))
    if "scales" in variables:
        scale_specs = nn.get_partition_spec(variables)["scales"]
        assert scale_specs["up"]["DotGeneral_0"]["weight_scale"] == PartitionSpec(None, "model")
        assert scale_specs["down"]["DotGeneral_0"]["weight_scale"] == PartitionSpec(None, None)
        assert scale_specs["up"]["DotGeneral_0"]["activation_scale"] == PartitionSpec()
    expected = jax.jit(module.apply)(serving, x)
    np.testing.assert_array_equal(expected, jax.jit(module.apply)(variables, x))
    batch = NamedSharding(mesh, PartitionSpec("data"))
    for tree in (serving, variables):
        places = nn.get_sharding(tree, mesh)
        run = jax.jit(module.apply, in_shardings=(meta.unbox(places), batch))
        placed = jax.device_put(meta.unbox(tree), meta.unbox(places))
        actual = run(placed, jax.device_put(x, batch))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
        if tree is serving:
            np.testing.assert_array_equal(actual, expected)
            kernel = placed["params"]["up"]["kernel"]
            assert {s.data.shape for s in kernel.codes.addressable_shards} == {(8, 4)}
            assert {s.data.shape for s in kernel.scale.addressable_shards} == {(1, 4)}


WAYS: dict[str, Any] = {
    "bfloat16": ({**STATIC, "dtype": BF16}, BF16),
    "bfloat16, learned": ({**LEARNED, "dtype": BF16}, BF16),
    "int8 back": ({**STATIC, "backward": jq.Int8Backward()}, F32),
    "int8 back, by chance": ({**STATIC, "backward": jq.Int8Backward(stochastic_rounding=True)}, F32),
    "both asymmetric": (
        {"weight_spec": jq.QuantSpec("uint4", jq.PerAxis(-1)), "activation_spec": A, "activation_range": AVERAGE},
        F32,
    ),
    "rows": (
        {"weight_spec": W, "activation_spec": jq.QuantSpec("int8", jq.PerAxis(0)), "activation_range": Dynamic()},
        F32,
    ),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", mark_others_full(WAYS, set(WAYS) - {"bfloat16", "int8 back"}))
def test_a_step_of_training(fixed_rng: np.random.Generator, name: str) -> None:
    way, dtype = WAYS[name]
    x = jnp.asarray(fixed_rng.normal(size=(8, 8)), dtype)  # the batch is as large as the layers are wide
    module: Any = nn.Sequential([qnn.Dense(8, **way), nn.relu, qnn.Dense(8, **way)])
    rngs = {"rounding": jax.random.key(7)}
    optimizer = optax.sgd(1e-3)

    @jax.jit
    def run(key: Any, x: Any) -> Any:
        variables = module.init(key, x)
        _, new_ranges = module.apply(variables, x, mutable=["ranges"], rngs=rngs)
        variables = {**variables, **new_ranges}
        learned = {name: variables.pop(name) for name in ("params", "scales") if name in variables}
        rounding = functools.partial(module.apply, rngs=rngs)

        def loss(learned: Any) -> Any:
            return (rounding({**variables, **learned}, x).astype(F32) ** 2).sum()

        value, grads = jax.value_and_grad(loss)(learned)
        updates, _ = optimizer.update(grads, optimizer.init(learned))
        stepped: Any = optax.apply_updates(learned, updates)
        return value, loss(stepped), grads, {**variables, **stepped}

    first_loss, last_loss, grads, variables = run(jax.random.key(1), x)
    assert last_loss < first_loss
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads["params"]))
    assert {str(v.dtype) for v in jax.tree.leaves(variables["params"])} == {"float32"}
    y = jax.jit(functools.partial(module.apply, rngs=rngs))(variables, x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(jax.jit(module.apply)(qflax.convert(module, variables), x), y)


class Attention(nn.Module):
    """Flax's own layers, which are given what to contract with."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns [n, m, 8]."""
        specs = (jq.QuantSpec("int4", jq.PerAxis(-1)), A)
        promote: Any = qflax.promote_dtype
        dot, conv = qflax.dot_general(*specs), qflax.conv_general_dilated(*specs)
        x = nn.Conv(8, (3,), conv_general_dilated=conv, promote_dtype=promote)(x)
        x = nn.Dense(8, dot_general=dot, promote_dtype=promote)(x)
        x = nn.DenseGeneral(8, dot_general_cls=dot, promote_dtype=promote)(x)
        return nn.Dense(8, dot_general=dot, promote_dtype=promote, name="last")(x)


@pytest.mark.slow
def test_flax_s_own_layers_are_given_the_contraction(fixed_rng: np.random.Generator) -> None:
    x = jnp.asarray(fixed_rng.normal(size=(2, 4, 8)), F32)
    variables = observe_batch(Attention(), x)
    assert len(variables["ranges"]) == 4, "one object, but each layer has its own range"
    serving = serves_what_it_trained(Attention(), variables, x)
    assert {str(layer["kernel"].codes.dtype) for layer in serving["params"].values()} == {"int4"}
    dot = qflax.dot_general(W, A)
    attention: Any = nn.MultiHeadDotProductAttention(2, qkv_dot_general=dot, out_dot_general_cls=dot)
    variables = observe_batch(attention, x)
    assert sorted(variables["ranges"]) == ["key", "out", "query", "value"]
    plain: Any = nn.MultiHeadDotProductAttention(2).apply({"params": variables["params"]}, x)
    y = jax.jit(attention.apply)(variables, x)
    assert 0 < np.abs(y - plain).max() < 0.05 * np.abs(plain).max()
    with pytest.raises(ValueError, match=r"^\w+: jaxquant\.flax\.convert: module: expected attention made of jaxquant"):
        qflax.convert(attention, variables)
