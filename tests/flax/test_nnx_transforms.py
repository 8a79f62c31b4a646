"""NNX layers under NNX's transforms: jit, grad, an optimizer, vmap, scan over layers, remat; and on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxquant as jq
from jaxquant import Learned
from jaxquant.flax import nnx as qnnx

AVERAGE = jq.Static(jq.calibration.moving_average)
F32 = np.float32
W = jq.QuantSpec("int8", jq.PerAxis(-1))
A = jq.QuantSpec("uint8")
LEARNED: Any = {
    "weight_spec": jq.QuantSpec("int4", jq.PerAxis(-1)), "activation_spec": A, "weight_range": Learned(),
    "activation_range": Learned(jq.LSQPlus()),
}  # fmt: skip
BOTH: Any = {"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE, "weight_range": Learned()}
OBSERVED: Any = {"weight_spec": W, "activation_spec": A, "activation_range": AVERAGE}
TRAINED = nnx.Any(nnx.Param, qnnx.Scale)


class Block(nnx.Module):
    """One of a stack, as wide as the batch is long."""

    def __init__(self, rngs: nnx.Rngs, how: Any = OBSERVED, width: int = 6) -> None:
        self.linear = qnnx.Linear(width, width, **how, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.relu(self.norm(self.linear(x)))


def draw_inputs(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0.3, 1, shape), F32)


def check_equal(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


@pytest.mark.slow
def test_an_optimizer_moves_parameters_and_scales(fixed_rng: np.random.Generator) -> None:
    model, x = Block(nnx.Rngs(0), LEARNED), draw_inputs(fixed_rng, 6, 6)
    qnnx.start(model, x)
    scale = model.linear.dot_general.activation_scale
    scale[...] = scale[...] / 2  # something saturates: else a zero point has no gradient
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=TRAINED)
    traced = []

    @nnx.jit
    def step(model: Block, optimizer: Any, x: jax.Array) -> jax.Array:
        traced.append(x)
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, TRAINED))(model, x)
        with jax.numpy_dtype_promotion("standard"):  # optax's own
            optimizer.update(model, grads)
        return value

    initial_state = jax.tree.map(jnp.copy, nnx.state(model, TRAINED))
    losses = [float(step(model, optimizer, x)) for _ in range(12)]
    assert losses[-1] < losses[0]
    assert len(traced) == 1
    final_state = nnx.state(model, TRAINED)
    names = {path[-1] for path, _ in nnx.to_flat_state(final_state)}
    assert {"kernel", "weight_scale", "activation_scale", "activation_zero_point"} <= names
    for (path, new), old in zip(nnx.to_flat_state(final_state), jax.tree.leaves(initial_state), strict=True):
        assert not np.array_equal(new[...], old), path
    serving = qnnx.convert(model)
    check_equal(serving(x), model(x))
    assert not jax.tree.leaves(nnx.state(serving, qnnx.Scale))


@pytest.mark.slow
def test_the_functional_form(rng: np.random.Generator) -> None:
    model, x = Block(nnx.Rngs(0)), draw_inputs(rng, 6, 6)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params: Any, rest: Any, x: jax.Array) -> Any:
        def run(params: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            return loss(model, x), nnx.state(model, qnnx.Ranges)

        (_, ranges), grads = jax.value_and_grad(run, has_aux=True)(params)
        return grads, ranges

    grads, ranges = step(params, rest, x)
    gradients = nnx.jit(nnx.grad(loss))(model, x)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    check_equal(ranges, nnx.state(model, qnnx.Ranges))
    shapes = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    assert jax.tree.structure(nnx.state(shapes)) == jax.tree.structure(nnx.state(model))
    nnx.update(shapes, nnx.state(model))
    check_equal(shapes.eval() or shapes(x), model.eval() or model(x))


@pytest.mark.slow
def test_scan_over_layers(rng: np.random.Generator) -> None:
    depth, x = 3, draw_inputs(rng, 6, 6)

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make_blocks(rngs: nnx.Rngs) -> Block:
        return Block(rngs, BOTH)

    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.blocks = make_blocks(nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat(policy=jq.save_codes)
            def run(block: Block, x: jax.Array) -> jax.Array:
                return block(x)

            return run(self.blocks, x)

    stack = Stack()
    qnnx.start(stack, x)
    assert stack.blocks.linear.dot_general.weight_scale[...].shape == (depth, 1, 6)
    graph, stacked = nnx.split(stack.blocks)
    alone = [nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], stacked)) for i in range(depth)]

    def unrolled(blocks: Any, x: jax.Array) -> jax.Array:
        for block in blocks:
            x = block(x)
        return x

    y = nnx.jit(lambda stack, x: stack(x))(stack, x)
    expected = nnx.jit(unrolled)(alone, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    ranges = jax.tree.map(lambda *parts: jnp.stack(parts), *(nnx.state(b, qnnx.Ranges) for b in alone))
    for a, b in zip(jax.tree.leaves(nnx.state(stack.blocks, qnnx.Ranges)), jax.tree.leaves(ranges), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    grads = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, TRAINED)))(stack, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    stack.eval()
    serving = qnnx.convert(stack)
    kernel: Any = serving.blocks.linear.kernel.get_value()
    assert kernel.codes.shape == (depth, 6, 6)
    assert kernel.scale.shape == (depth, 1, 6)
    run = nnx.jit(lambda stack, x: stack(x))
    check_equal(run(serving, x), run(stack, x))


@pytest.mark.slow
def test_remat_keeps_codes(rng: np.random.Generator) -> None:
    model, x = nnx.List([Block(nnx.Rngs(0)), Block(nnx.Rngs(1))]), draw_inputs(rng, 6, 6)

    def through(policy: Any) -> Any:
        def network(model: Any, x: jax.Array) -> jax.Array:
            for block in model:

                def call(block: Block, x: jax.Array) -> jax.Array:
                    return block(x)

                x = (call if policy is None else nnx.remat(call, policy=policy))(block, x)
            return jnp.sum(x**2)

        return network

    grads = [nnx.jit(nnx.grad(through(policy)))(model, x) for policy in (None, jq.save_codes)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def list_residuals(policy: Any) -> list[Any]:
        network = through(policy)
        _, pull = jax.vjp(lambda params, x: network(nnx.merge(graph, params, rest, copy=True), x), params, x)
        return [leaf.dtype for leaf in jax.tree.leaves(pull)]

    # The codes of two blocks' kernels and activations are there, and of the floats fewer.
    assert sum(dtype in (jnp.int8, jnp.uint8) for dtype in list_residuals(jq.save_codes)) >= 4
    assert list_residuals(jq.save_codes).count(jnp.float32) < list_residuals(None).count(jnp.float32)


@pytest.mark.slow
def test_vmap_over_models_and_over_examples(rng: np.random.Generator) -> None:
    x = draw_inputs(rng, 2, 5, 4)

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make_models(rngs: nnx.Rngs) -> Any:
        return qnnx.Conv(4, 4, (3,), **OBSERVED, feature_group_count=4, rngs=rngs)

    models = make_models(nnx.Rngs(0))
    run = nnx.jit(nnx.vmap(lambda model, x: model(x)))
    y = run(models, x)
    graph, state = nnx.split(models)
    for i in range(2):
        alone = nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], state))
        check_equal(y[i], (alone.eval() or alone)(x[i]))
    serving = qnnx.convert(models.eval() or models)
    check_equal(run(serving, x), run(models, x))
    first_model = nnx.merge(graph, jax.tree.map(lambda v: v[0], state))
    first_model.eval()
    check_equal(nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(first_model, x), first_model(x))


@pytest.mark.slow
def test_a_backward_pass_in_integers_draws_from_the_rngs(fixed_rng: np.random.Generator) -> None:
    backward = jq.Int8Backward(stochastic_rounding=True)
    layer = qnnx.Linear(16, 5, **OBSERVED, backward=backward, rngs=nnx.Rngs(0, rounding=int(fixed_rng.integers(2**31))))
    exact = qnnx.Linear(16, 5, **OBSERVED, rngs=nnx.Rngs(0))
    nnx.update(layer, nnx.state(exact, nnx.Param))
    x, target = draw_inputs(fixed_rng, 8, 16), draw_inputs(fixed_rng, 8, 5)

    def find_loss(layer: Any) -> jax.Array:
        return jnp.sum((layer(x) - target) ** 2)

    gradient = nnx.jit(nnx.grad(find_loss))
    draws = np.stack([gradient(layer)["kernel"][...] for _ in range(200)])
    assert layer.dot_general.rngs.count[...] == 200
    assert not np.array_equal(draws[0], draws[1])
    expected = np.asarray(gradient(exact)["kernel"][...])
    spread = draws.std(0) / np.sqrt(200)
    assert (np.abs(draws.mean(0) - expected) < 6 * spread + 1e-3 * np.abs(expected)).all()
    check_equal(layer(x), exact(x))
    assert qnnx.convert(layer).dot_general.rngs is None


@pytest.mark.slow
def test_partitioned_kernels(rng: np.random.Generator) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
    with jax.set_mesh(mesh):

        @nnx.jit
        def make_layer() -> Any:
            return qnnx.Linear(8, 4, **BOTH, kernel_init=init, rngs=nnx.Rngs(0))

        layer = make_layer()
        scale = layer.dot_general.weight_scale
        assert scale.get_metadata("out_sharding") == (None, "model")
        assert scale[...].sharding.spec == PartitionSpec(None, "model")
        x = draw_inputs(rng, 6, 8)
        qnnx.start(layer, x)
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    serving = qnnx.convert(layer)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(serving)))
    # The codes are stored with the contracted axis last.
    assert specs["kernel"] == {"codes": PartitionSpec("model", "data"), "scale": PartitionSpec(None, "model")}
    with jax.set_mesh(mesh):
        placed = jax.device_put(nnx.state(serving), nnx.get_named_sharding(nnx.state(serving), mesh))
        nnx.update(serving, placed)
        assert serving.kernel.codes[...].sharding == NamedSharding(mesh, PartitionSpec("model", "data"))
        np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(serving, x), y, rtol=1e-6)


@pytest.mark.slow
def test_shardings_in_types(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh):
        layer = qnnx.Linear(8, 4, **OBSERVED, kernel_init=init, rngs=nnx.Rngs(0))
        x = jax.device_put(draw_inputs(rng, 6, 8), NamedSharding(mesh, PartitionSpec("data", None)))
        y = layer(x, out_sharding=PartitionSpec("data", "model"))
        assert y.sharding == NamedSharding(mesh, PartitionSpec("data", "model"))
        served = qnnx.convert(layer)(x, out_sharding=PartitionSpec("data", "model"))
        assert served.sharding == y.sharding
        check_equal(served, y)
