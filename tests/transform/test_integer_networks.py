"""Networks of flax's own layers as integer-only networks: the codes are those of ONNX Runtime's fused graph."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jaxquant as jq

from ..cases import microsoft_exactness as cases
from ..oracles.onnx_graphs import INTEGER_KERNELS, LEVELS, QdqGraph, Tensor
from ..support.prepared import find_ranges

F = np.float32
SPEC = jq.QuantSpec("uint8")
# Weights of 8 bits, as the formulas of the tests have them.
RULES = jq.recipes.onnx_runtime(reduce_range=False)


def show(module: nn.Module, x: jax.Array) -> jax.Array:
    """Return x, and add it to the results of a call that asks for the values at each rounding."""
    module.sow("intermediates", "points", x)
    return x


class Residual(nn.Module):
    """A residual block, batch normalization, both poolings and a concatenation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        def normalize(x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train)(x)

        x = show(self, nn.relu(normalize(nn.Conv(16, (3, 3), use_bias=False)(x))))
        x = show(self, nn.relu(x + show(self, normalize(nn.Conv(16, (3, 3))(x)))))
        branches = [show(self, pool(x, (2, 2), (2, 2))) for pool in (nn.max_pool, nn.avg_pool)]
        x = show(self, jnp.concatenate(branches, -1))
        return nn.Dense(10)(show(self, x.mean((1, 2))))


class Separable(nn.Module):
    """Depthwise and 1x1 convolutions, with strides and relu6."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = show(self, nn.relu6(nn.Conv(16, (3, 3), (2, 2))(x)))
        x = nn.Conv(16, (3, 3), (2, 2), feature_group_count=16, use_bias=False)(x)
        x = show(self, nn.relu6(nn.BatchNorm(use_running_average=True)(x)))
        x = show(self, nn.relu6(nn.BatchNorm(use_running_average=True)(nn.Conv(32, (1, 1))(x))))
        return nn.Dense(10)(show(self, x.mean((1, 2), keepdims=True)).reshape(x.shape[0], -1))


class MLP(nn.Module):
    """Dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (64, 48):
            x = show(self, nn.relu(nn.Dense(features)(x)))
        return nn.Dense(10)(x)


def initialize(model: nn.Module, rng: np.random.Generator, x: jax.Array) -> Any:
    """Return variables as after training: random kernels, biases and statistics."""

    def draw(path: Any, leaf: Any) -> jax.Array:
        if len(leaf.shape) > 1:
            return jnp.asarray(rng.normal(0, np.prod(leaf.shape[:-1]) ** -0.5, leaf.shape), F)
        is_positive = path[-1].key in ("scale", "var")
        return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape) if is_positive else rng.normal(0, 0.3, leaf.shape), F)

    # flax's avg_pool divides by an int.
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree_util.tree_map_with_path(draw, shapes)


class Graph:
    """The same network for ONNX Runtime, written by hand from the converted parameters and the ranges."""

    def __init__(self, variables: Any, converted: Any, ranges: Any, x: Any, first: str) -> None:
        self.variables, self.converted, self.ranges = variables, converted, ranges
        self.graph = QdqGraph()
        self.points: list[Tensor] = []  # the codes at each rounding
        q = jq.quantize(x, SPEC, range=ranges[first]["0"])
        codes = np.asarray(q.codes)
        codes = np.moveaxis(codes, -1, 1) if codes.ndim == 4 else codes
        self.start = self.graph.feed(codes, np.asarray(q.scale).reshape(()), np.asarray(q.zero_point).reshape(()))

    def find_affine(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        q = jq.Quantizer.from_range(SPEC, jax.tree.map(jnp.ravel, self.ranges[name]["output"]))
        return np.asarray(q.scale).reshape(()), np.asarray(q.zero_point).reshape(())

    def find_weights(self, layer: str, norm: str | None) -> tuple[jq.QuantizedArray, np.ndarray]:
        """Return the codes of a kernel, and the float bias; both are those of numpy, operation by operation."""
        params = jax.tree.map(np.asarray, self.variables["params"])
        kernel, bias = params[layer]["kernel"], params[layer].get("bias")
        if norm is not None:
            stats = jax.tree.map(np.asarray, self.variables["batch_stats"][norm])
            factor = F(1) / np.sqrt(stats["var"] + F(1e-5)) * params[norm]["scale"]
            kernel = kernel * factor
            bias = ((F(0) if bias is None else bias) - stats["mean"]) * factor + params[norm]["bias"]
        q = self.converted.params["params"][layer]["kernel"]
        expected = jq.quantize(kernel, jq.QuantSpec("int8", jq.PerAxis(-1)))
        np.testing.assert_array_equal(q.codes, expected.codes)
        np.testing.assert_array_equal(q.scale, expected.scale)
        return q, bias

    def hold(self, x: Tensor, layer: str, norm: str | None) -> tuple[jq.QuantizedArray, Tensor]:
        q, bias = self.find_weights(layer, norm)
        scale = x[1] * np.asarray(q.scale).reshape(-1)
        return q, self.graph.hold(np.rint(bias / scale).astype(np.int32), scale)

    def conv(
        self, x: Tensor, layer: str, size: int, norm: str | None = None, relu: bool = True, stride: int = 1,
        groups: int = 1, spatial: int = 0,
    ) -> Tensor:  # fmt: skip
        q, bias = self.hold(x, layer, norm)
        weights = self.graph.hold(np.asarray(q.codes).transpose(3, 2, 0, 1), np.asarray(q.scale).reshape(-1))
        (low, high) = lax.padtype_to_pads((spatial,), (size,), (stride,), "SAME")[0] if spatial else [size // 2] * 2
        attributes = {"strides": [stride] * 2, "pads": [int(low)] * 2 + [int(high)] * 2, "group": groups}
        affine = self.find_affine(f"params/{layer}/kernel")
        after = "Relu" if relu else None
        return self.keep(self.graph.apply("Conv", (x, weights, bias), *affine, after=after, **attributes))

    def dense(self, x: Tensor, layer: str, relu: bool) -> Tensor:
        q, bias = self.hold(x, layer, None)
        scale = np.asarray(q.scale).reshape(-1)
        weights = self.graph.hold(np.asarray(q.codes), scale, np.zeros(len(scale), np.int8))
        affine = self.find_affine(f"params/{layer}/kernel")
        after = "Relu" if relu else None
        return self.keep(self.graph.apply("Gemm", (x, weights, bias), *affine, axes=(0, 1, 0), after=after))

    def apply(self, operator: str, inputs: tuple[Tensor, ...], name: str = "", **attributes: Any) -> Tensor:
        affine = self.find_affine(name) if name else inputs[0][1:]
        y = self.graph.apply(operator, inputs, *affine, **attributes)
        return y if operator == "Reshape" else self.keep(y)

    def keep(self, y: Tensor) -> Tensor:
        self.points.append(y)
        return y


def build_residual(graph: Graph) -> Tensor:
    pool: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    x = graph.conv(graph.start, "Conv_0", 3, "BatchNorm_0")
    y = graph.conv(x, "Conv_1", 3, "BatchNorm_1", relu=False)
    x = graph.apply("Add", (x, y), "add@Residual")
    branches = (graph.apply("MaxPool", (x,), **pool), graph.apply("AveragePool", (x,), "average_pool@Residual", **pool))
    x = graph.apply("Concat", branches, "concatenate@Residual", axis=1)
    x = graph.apply("GlobalAveragePool", (x,), "mean@Residual")
    return graph.dense(graph.apply("Reshape", (x,), shape=(-1, 32)), "Dense_0", relu=False)


def build_separable(graph: Graph) -> Tensor:
    x = graph.conv(graph.start, "Conv_0", 3, stride=2, spatial=17)
    x = graph.conv(x, "Conv_1", 3, "BatchNorm_0", stride=2, groups=16, spatial=9)
    x = graph.conv(x, "Conv_2", 1, "BatchNorm_1")
    x = graph.apply("GlobalAveragePool", (x,), "mean@Separable")
    return graph.dense(graph.apply("Reshape", (x,), shape=(-1, 32)), "Dense_0", relu=False)


def build_mlp(graph: Graph) -> Tensor:
    x = graph.dense(graph.start, "Dense_0", relu=True)
    return graph.dense(graph.dense(x, "Dense_1", relu=True), "Dense_2", relu=False)


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...], Callable[[Graph], Tensor]]] = {
    "residual": (Residual(), (3, 16, 16, 3), build_residual),
    "separable": (Separable(), (3, 17, 17, 3), build_separable),
    "mlp": (MLP(), (64, 40), build_mlp),
}


def prepare(name: str, rng: np.random.Generator, points: bool = False) -> tuple[Any, Any, Any, jax.Array]:
    """Return a prepared network, its variables, the ranges of a batch, and another batch, of which values saturate.

    With points, the network returns the values at each rounding, too.
    """
    model, shape, _ = NETWORKS[name]
    x = jnp.asarray(rng.normal(0, 1, shape), F)
    variables = initialize(model, rng, x)
    function = functools.partial(model.apply, mutable=["intermediates"] if points else False)
    prepared = jq.prepare(jax.numpy_dtype_promotion("standard")(function), variables, x, rules=RULES, strict=True)
    return prepared, variables, find_ranges(prepared, variables, x), x + F(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.sample(1)
def test_codes_are_those_of_onnx_runtime(name: str, rng: np.random.Generator) -> None:
    """At each rounding of the fused graph, in which all kernels are integer kernels. Training has the same numbers."""
    prepared, variables, ranges, x = prepare(name, rng, points=True)
    assert all(row.output == SPEC for row in prepared.coverage.rows), str(prepared.coverage)
    converted = prepared.convert(variables, ranges)
    y, points = jax.jit(prepared.apply)(converted, x)
    trained = jax.jit(prepared.fake_apply)(prepared.trainable(variables, ranges), x)
    jax.tree.map(np.testing.assert_array_equal, trained, (y, points))
    # The same network, of which only the result is needed.
    alone = jq.prepare(jax.numpy_dtype_promotion("standard")(NETWORKS[name][0].apply), variables, x, rules=RULES)
    np.testing.assert_array_equal(jax.jit(alone.apply)(converted, x), y)
    if not cases.is_fused():
        pytest.skip("ONNX Runtime has other kernels on this machine")
    graph = Graph(variables, converted, ranges, x, prepared.coverage.rows[0].name)
    NETWORKS[name][2](graph)
    values = [*points["intermediates"]["points"], y]
    for level in LEVELS:
        outputs, operators = graph.graph.run(level)
        assert set(operators) <= INTEGER_KERNELS, operators
        for value, (point, scale, zero_point) in zip(values, graph.points, strict=True):
            steps = outputs[point].astype(F) - F(zero_point)
            steps = np.moveaxis(steps, 1, -1) if steps.ndim == 4 else steps
            np.testing.assert_array_equal((steps * scale).reshape(value.shape), value, err_msg=f"{level} {point}")
    assert len(np.unique(y)) > 10


@pytest.mark.slow
def test_floats_are_not_larger_than_a_scale(rng: np.random.Generator) -> None:
    """In the compiled program, except for the input and arrays of less than 2**16 elements, whose fusions are split.

    The sums of average pooling are floats, as in ONNX Runtime's kernel.
    """
    prepared, variables, ranges, _ = prepare("residual", rng)
    x = jax.ShapeDtypeStruct((256, 16, 16, 3), F)
    converted = jax.eval_shape(prepared.convert, variables, ranges)
    text = str(jax.jit(prepared.apply).lower(converted, x).compile().as_text())
    lines = [line for line in text[text.index("ENTRY") :].splitlines() if "average_pool" not in line]
    shapes = set(re.findall(r"f32\[([\d,]*)\]", "\n".join(lines))) - {"256,16,16,3"}
    assert max(np.prod([int(n) for n in shape.split(",") if n]) for shape in shapes) < 2**16
