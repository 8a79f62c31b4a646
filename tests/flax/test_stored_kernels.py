"""Converted kernels hold the axes that their layer contracts last in memory, and serve the numbers of training."""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.core import meta

import jaxquant as jq
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

from ..support.hlo import Program
from ..support.matrix import mark_others_full

F32 = np.float32
WAY: Any = {
    "weight_spec": jq.QuantSpec("int8", jq.PerFeature()),
    "activation_spec": jq.QuantSpec("uint8"),
    "activation_range": jq.Dynamic(),
}
PROMOTE: Any = qflax.promote_dtype
LINEN: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "Dense": (qnn.Dense(5, **WAY), (4, 6), (-1, -2)),
    "one row": (qnn.Dense(5, **WAY), (6,), (-1, -2)),
    "int4": (qnn.Dense(5, **{**WAY, "weight_spec": jq.QuantSpec("int4", jq.Blocked(0, 3))}), (4, 6), (-1, -2)),
    "heads out": (qnn.DenseGeneral((2, 3), **WAY), (4, 6), (-2, -1, -3)),
    "heads in": (qnn.DenseGeneral(5, (-2, -1), **WAY), (4, 2, 3), (-1, -3, -2)),
    "heads crossed": (qnn.DenseGeneral(5, (-1, -2), **WAY), (4, 2, 3), (-1, -3, -2)),
    "batch": (qnn.DenseGeneral(5, -1, (0,), **WAY), (3, 4, 6), (-1, -2)),
    "Einsum": (qnn.Einsum((2, 6, 5), "abhd,hdf->abhf", **WAY), (3, 4, 2, 6), (-1, -2)),
    "Einsum of two": (qnn.Einsum((6, 2, 5), "ahd,dhf->af", **WAY), (3, 2, 6), (-1, -2, -3)),
    "features first": (qnn.Einsum((5, 6), "ad,fd->af", **WAY), (3, 6), None),
    "weights alone": (qnn.Dense(5, weight_spec=WAY["weight_spec"]), (4, 6), None),
    "Conv": (qnn.Conv(5, (3,), **WAY), (2, 7, 4), None),
    "flax's own": (
        nn.Dense(5, dot_general=qflax.dot_general(**WAY), promote_dtype=PROMOTE), (4, 6), None,
    ),
}  # fmt: skip
NNX: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "Linear": (functools.partial(qnnx.Linear, 6, 5), (4, 6), (-1, -2)),
    "heads out": (functools.partial(qnnx.LinearGeneral, 6, (2, 3)), (4, 6), (-2, -1, -3)),
    "heads in": (functools.partial(qnnx.LinearGeneral, (2, 3), 5, axis=(-2, -1)), (4, 2, 3), (-1, -3, -2)),
    "heads crossed": (functools.partial(qnnx.LinearGeneral, (2, 3), 5, axis=(-1, -2)), (4, 2, 3), (-1, -3, -2)),
    "batch": (functools.partial(qnnx.LinearGeneral, 6, 5, axis=-1, batch_axis={0: 3}), (3, 4, 6), (-1, -2)),
    "Einsum": (functools.partial(qnnx.Einsum, "ahd,dhf->af", (6, 2, 5)), (3, 2, 6), (-1, -2, -3)),
    "Conv": (functools.partial(qnnx.Conv, 4, 5, (3,)), (2, 7, 4), None),
}


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jq.QuantizedArray)


def in_logical_order(tree: Any) -> Any:
    """Return converted variables as they were before kernels had a stored order."""
    return jax.tree.map(lambda leaf: leaf.store_last() if is_array(leaf) else leaf, tree, is_leaf=is_array)


def sample(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape).astype(F32))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", mark_others_full(LINEN, ["Dense", "one row", "heads in", "Einsum", "weights alone", "flax's own"])
)
def test_linen(name: str, rng: np.random.Generator) -> None:
    layer, shape, order = LINEN[name]
    x = sample(rng, shape)
    variables = layer.init(jax.random.key(0), x)
    _, updates = layer.apply(variables, x, mutable=["ranges"])
    serving = qflax.convert(layer, {**variables, **updates})
    kernel = serving["params"]["kernel"]
    assert kernel.stored_order == order
    assert kernel.shape == variables["params"]["kernel"].shape
    run = jax.jit(layer.apply)
    want = run(variables, x)
    np.testing.assert_array_equal(run(serving, x), want)
    np.testing.assert_array_equal(layer.apply(serving, x), want)
    np.testing.assert_array_equal(run(in_logical_order(serving), x), want)
    batch = jnp.stack([x, x + 1])
    np.testing.assert_array_equal(
        jax.vmap(layer.apply, (None, 0))(serving, batch), jax.vmap(layer.apply, (None, 0))(variables, batch)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others_full(NNX, ["Linear", "heads in"]))
def test_nnx(name: str, rng: np.random.Generator) -> None:
    make, shape, order = NNX[name]
    model, x = make(**WAY, rngs=nnx.Rngs(0)), sample(rng, shape)
    serving = qnnx.convert(model)
    kernel = serving.kernel.get_value()
    assert kernel.stored_order == order
    assert kernel.shape == model.kernel.get_value().shape
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(serving, x), run(model, x))
    serving.kernel.set_value(kernel.store_last())
    np.testing.assert_array_equal(run(serving, x), run(model, x))


def test_nnx_hooks_and_weights_alone(rng: np.random.Generator) -> None:
    x, run = sample(rng, (4, 6)), nnx.jit(lambda model, x: model(x))
    for hook, order in ((qnnx.dot_general(**WAY, rngs=nnx.Rngs(0)), (-1, -2)),
                        (qnnx.dot_general(WAY["weight_spec"], rngs=nnx.Rngs(0)), None)):  # fmt: skip
        model = nnx.Linear(6, 5, dot_general=hook, promote_dtype=qnnx.promote_dtype, rngs=nnx.Rngs(0))
        serving = qnnx.convert(model)
        kernel: Any = serving.kernel.get_value()
        assert kernel.stored_order == order
        np.testing.assert_array_equal(run(serving, x), run(model, x))


class Network(nn.Module):
    """Layers of all kinds, some of them stacked."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return a float array."""
        table = qnn.Embed(10, 8, **WAY, name="table")
        x = table(tokens)
        stack = nn.scan(Block, variable_axes={"params": 0, "ranges": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack(name="stack")(x, None)
        heads = qnn.DenseGeneral((2, 4), **WAY, name="heads")(x)
        x = qnn.DenseGeneral(8, (-2, -1), **WAY, name="join")(heads)
        return table.attend(x)


class Block(nn.Module):
    """One layer of a stack."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Return the carry of a scan."""
        return nn.relu(qnn.Dense(8, **WAY, name="dense")(x)), None


@functools.cache
def convert_network() -> tuple[Any, Any, Any, Any]:
    """Return (the module, its variables, the converted variables, tokens)."""
    module, tokens = Network(), jnp.arange(6).reshape(2, 3)
    variables = module.init(jax.random.key(0), tokens)
    return module, variables, qflax.convert(module, variables), tokens


@pytest.mark.slow
def test_stacked_layers_and_tables() -> None:
    module, variables, serving, tokens = convert_network()
    params = serving["params"]
    orders = {path[0].key: q.stored_order for path, q in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_array)
              if is_array(q)}  # fmt: skip
    assert orders == {"table": None, "stack": (-1, -2), "heads": (-2, -1, -3), "join": (-1, -3, -2)}
    stacked = params["stack"]["dense"]["kernel"]
    assert (stacked.shape, stacked.stored_codes.shape) == ((3, 8, 8), (3, 8, 8))
    run = jax.jit(module.apply)
    want = run(variables, tokens)
    np.testing.assert_array_equal(run(serving, tokens), want)
    np.testing.assert_array_equal(run(in_logical_order(serving), tokens), want)
    np.testing.assert_array_equal(run(pickle.loads(pickle.dumps(serving)), tokens), want)


@pytest.mark.slow
def test_state_dicts() -> None:
    """flax saves arrays without their static attributes, so the order is saved with them."""
    module, _, serving, tokens = convert_network()
    run = jax.jit(module.apply)
    want, old = run(serving, tokens), in_logical_order(serving)
    for saved in (serving, old):
        content = serialization.to_bytes(saved)
        for target in (serving, old, jax.tree.map(jnp.zeros_like, serving)):
            restored = serialization.from_bytes(target, content)
            assert jax.tree.structure(restored) == jax.tree.structure(target)
            np.testing.assert_array_equal(run(restored, tokens), want)
    state = serialization.to_state_dict(old)["params"]["heads"]["kernel"]
    assert set(state) == {"codes", "scale"}, "as before there were stored orders"


def test_a_wrong_shape_is_refused(rng: np.random.Generator) -> None:
    x = sample(rng, (4, 6))
    serving = qflax.convert(qnn.Dense(5, **WAY), qnn.Dense(5, **WAY).init(jax.random.key(0), x))
    with pytest.raises(Exception, match=r"initializer is expected to generate shape"):
        qnn.Dense(7, **WAY).apply(serving, x)


@pytest.mark.slow
def test_partitioned_kernels(rng: np.random.Generator) -> None:
    """A box names the mesh axes of the dimensions in memory."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "heads", "model"))
    layer, x = qnn.DenseGeneral((2, 4), kernel_init=init, **WAY), sample(rng, (3, 6))
    variables = layer.init(jax.random.key(0), x)
    serving = qflax.convert(layer, variables)
    kernel = serving["params"]["kernel"]
    assert kernel.stored_codes.names == ("heads", "model", None)
    assert kernel.stored_codes.value.shape == (2, 4, 6)
    assert kernel.scale.names == (None, "heads", "model")
    assert meta.unbox(kernel).shape == (6, 2, 4)
    assert "stored_order=(-2, -1, -3)" in repr(kernel)
    np.testing.assert_array_equal(layer.apply(serving, x), layer.apply(variables, x))


MOVED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Dense": (qnn.Dense(40, **WAY), (4, 24)),
    "one row": (qnn.Dense(40, **WAY), (1, 24)),
    "heads out": (qnn.DenseGeneral((5, 8), **WAY), (4, 24)),
    "heads in": (qnn.DenseGeneral(40, (-2, -1), **WAY), (3, 4, 6)),
    "heads crossed": (qnn.DenseGeneral(40, (-1, -2), **WAY), (3, 4, 6)),
    "Einsum": (qnn.Einsum((6, 4, 40), "ahd,dhf->af", **WAY), (3, 4, 6)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MOVED)
def test_the_kernel_is_not_moved(name: str, rng: np.random.Generator) -> None:
    """The compiled program contracts the last dimension of the codes as they are stored."""
    layer, shape = MOVED[name]
    x = sample(rng, shape)
    serving = qflax.convert(layer, layer.init(jax.random.key(0), x))
    size = serving["params"]["kernel"].size
    program = Program(layer.apply, serving, x)
    (dot,) = program.contractions()
    depth = dot.operands[0][1][-1]
    assert ("s8", (size // depth, depth)) in dot.operands
    for body in program.computations.values():
        for step in body:
            moves = any(dtype == "s8" and math.prod(dims) == size for dtype, dims in step.results)
            assert not (moves and step.opcode in ("transpose", "copy")), step
