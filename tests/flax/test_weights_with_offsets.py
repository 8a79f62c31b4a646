"""Layers whose weights have real offsets, or scales that are quantized themselves: training, conversion, serving."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant as jq
from jaxquant import flax as qflax
from jaxquant.flax import linen as qnn
from jaxquant.flax import nnx as qnnx

ROWS = jq.QuantSpec("int8", jq.PerToken())
NAMES = ("offset", "offset of features", "nested", "both")


def make_spec(name: str, axis: int) -> jq.QuantSpec:
    if name == "offset of features":
        return jq.QuantSpec("uint4", jq.PerFeature(), offset=True)
    blocks, outer = jq.Blocked(axis, 4), jq.Blocked(axis, 2)
    if name == "offset":
        return jq.QuantSpec("uint4", blocks, offset=True, scale_dtype="float16")
    if name == "nested":
        return jq.QuantSpec("int4", blocks, scale_spec=jq.QuantSpec("int8", outer))
    return jq.QuantSpec("uint4", blocks, offset=True, scale_spec=jq.QuantSpec("uint6", outer, scale_dtype="float16"))


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0.2, 1, shape), jnp.float32)


def read_floats(q: Any, spec: jq.QuantSpec) -> np.ndarray:
    """Return code * scale + offset in float64, with the parts that the converted layer holds."""
    assert isinstance(q, jq.QuantizedArray)
    assert (q.offset is not None, isinstance(q.scale, jq.QuantizedArray)) == (spec.offset, spec.scale_spec is not None)
    values = np.asarray(q.codes).astype(np.float64)
    for part, is_factor in ((q.scale, True), (q.offset, False)):
        if part is not None:
            floats = np.asarray(part.dequantize() if isinstance(part, jq.QuantizedArray) else part, np.float64)
            for axis, (n, m) in enumerate(zip(floats.shape, values.shape, strict=True)):
                floats = np.repeat(floats, m // n, axis)
            values = values * floats if is_factor else values + floats
    return values


def check_near(actual: Any, expected: Any) -> None:
    """Compare floats that are added in another order."""
    wide = np.asarray(expected, np.float64)
    np.testing.assert_allclose(np.asarray(actual, np.float64), wide, rtol=0, atol=2e-5 * np.abs(wide).max())


def round_rows(x: jax.Array) -> np.ndarray:
    scale = np.abs(np.asarray(x)).max(-1, keepdims=True) / np.float32(127)
    return np.rint(np.asarray(x) / scale).astype(np.float64) * scale


@pytest.mark.parametrize("activation", [None, ROWS], ids=["floats", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_dense_layers(name: str, activation: jq.QuantSpec | None, rng: np.random.Generator) -> None:
    x, spec = draw(rng, 3, 16), make_spec(name, 0)
    specs: dict[str, Any] = {"weight_spec": spec, "activation_spec": activation}
    expected_x = np.asarray(x, np.float64) if activation is None else round_rows(x)
    module = qnn.Dense(8, use_bias=False, **specs)
    variables = module.init(jax.random.key(0), x)
    kernel = draw(rng, 16, 8)
    variables = {**variables, "params": {"kernel": kernel}}
    serving = qflax.convert(module, variables)
    expected = expected_x @ read_floats(serving["params"]["kernel"], spec)
    layer = qnnx.Linear(16, 8, use_bias=False, **specs, rngs=nnx.Rngs(0))
    layer.kernel[...] = kernel
    converted = qnnx.convert(layer)
    check_near(converted(x), expected)
    check_near(layer(x), expected)
    for values in (variables, serving):
        check_near(module.apply(values, x), expected)
        check_near(jax.jit(module.apply)(values, x), expected)
        rows = jax.vmap(lambda row, values=values: module.apply(values, row))(x)  # type: ignore[misc]
        check_near(rows, expected)
    weights = draw(rng, 3, 8)

    def compute_loss(kernel: jax.Array) -> jax.Array:
        return jnp.sum(jnp.asarray(module.apply({**variables, "params": {"kernel": kernel}}, x)) * weights)

    check_near(jax.jit(jax.grad(compute_loss))(kernel), expected_x.T @ np.asarray(weights, np.float64))


@pytest.mark.parametrize("name", NAMES)
def test_lookups_and_products_with_the_table(name: str, rng: np.random.Generator) -> None:
    spec, indices, x = make_spec(name, 1), jnp.asarray([3, 0, 7]), draw(rng, 3, 16)
    module = qnn.Embed(8, 16, weight_spec=spec)
    variables = module.init(jax.random.key(0), indices)
    serving = qflax.convert(module, variables)
    table = read_floats(serving["params"]["embedding"], spec)
    for values in (variables, serving):
        check_near(module.apply(values, indices), table[np.asarray(indices)])
        check_near(module.apply(values, x, method="attend"), np.asarray(x, np.float64) @ table.T)


@pytest.mark.parametrize("name", ["offset", "both"])
def test_einsum(name: str, rng: np.random.Generator) -> None:
    spec, x = make_spec(name, 0), draw(rng, 2, 3, 16)
    module = qnn.Einsum((16, 2, 4), "bti,ihd->bthd", use_bias=False, weight_spec=spec)
    variables = module.init(jax.random.key(0), x)
    serving = qflax.convert(module, variables)
    kernel = read_floats(serving["params"]["kernel"], spec)
    for values in (variables, serving):
        check_near(module.apply(values, x), np.einsum("bti,ihd->bthd", np.asarray(x, np.float64), kernel))


def test_stacked_layers(rng: np.random.Generator) -> None:
    """nn.scan stacks codes, scales and offsets."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return qnn.Dense(16, use_bias=False, weight_spec=make_spec("both", 0), name="dense")(x), None

    module: Any = nn.scan(Layer, variable_axes={"params": 0, "ranges": 0}, split_rngs={"params": True}, length=2)()
    x = draw(rng, 3, 16)
    variables = module.init(jax.random.key(0), x, None)
    serving = qflax.convert(module, variables)
    expected = np.asarray(x, np.float64)
    q = serving["params"]["dense"]["kernel"]
    for layer in (0, 1):
        expected = expected @ read_floats(jax.tree.map(lambda part, layer=layer: part[layer], q), make_spec("both", 0))
    for values in (variables, serving):
        check_near(module.apply(values, x, None)[0], expected)


def test_partitioned_weights(rng: np.random.Generator) -> None:
    """A converted kernel of NNX has one variable for each of its parts, offsets too; nested scales are refused."""
    mesh, x = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,)), draw(rng, 3, 16)
    initialize = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    spec = make_spec("offset", 0)
    with jax.set_mesh(mesh):
        layer = qnnx.Linear(16, 8, use_bias=False, weight_spec=spec, rngs=nnx.Rngs(0), kernel_init=initialize)
        converted = qnnx.convert(layer)
        check_near(converted(x), np.asarray(x, np.float64) @ read_floats(converted.kernel[...], spec))
        other = qnnx.Linear(16, 8, weight_spec=make_spec("nested", 0), rngs=nnx.Rngs(0), kernel_init=initialize)
        with pytest.raises(ValueError, match=r"convert: a partitioned kernel\.scale: expected"):
            qnnx.convert(other)
