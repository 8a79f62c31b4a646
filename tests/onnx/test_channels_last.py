"""Images of loaded models with the channels last: random networks beside ONNX Runtime, and their programs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import jaxquant as jq
from jaxquant import onnx as jqonnx

from ..cases.onnx_models import Builder, run_runtime

ACTIVATIONS = ("Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Tanh", "LeakyRelu", "Abs")


class Network:
    """A network on images of one size, to which random layers are added.

    Attributes:
        channels: the channels of each value.
    """

    def __init__(self, rng: np.random.Generator, channels: int) -> None:
        self.rng = rng
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.channels = {"x": channels}

    def add(self, operator: str, inputs: list[str], channels: int, count: int = 1, **attributes: Any) -> list[str]:
        names = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        self.channels.update(dict.fromkeys(names, channels))
        return names

    def keep(self, array: Any) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def draw(self, *shape: int) -> str:
        return self.keep(self.rng.normal(size=shape).astype(np.float32))

    def convolve(self, x: str, channels: int, width: int = 1) -> str:
        weights = self.rng.normal(size=(channels, self.channels[x], width, width)) / width
        inputs = [x, self.keep(weights.astype(np.float32)), self.draw(channels)]
        return self.add("Conv", inputs, channels, pads=[width // 2] * 4)[0]

    def add_layer(self, kind: str) -> None:
        x = str(self.rng.choice(list(self.channels)))
        n = self.channels[x]
        if kind == "convolve":
            self.convolve(x, int(self.rng.integers(2, 7)), int(self.rng.choice([1, 3])))
        elif kind == "depthwise":
            self.add("Conv", [x, self.draw(n, 1, 3, 3)], n, group=n, pads=[1] * 4)
        elif kind == "activate":
            self.add(str(self.rng.choice(ACTIVATIONS)), [x], n)
        elif kind == "combine":
            other = str(self.rng.choice([name for name, count in self.channels.items() if count == n]))
            self.add(str(self.rng.choice(["Add", "Mul", "Sub", "Max"])), [x, other], n)
        elif kind == "scale":
            shapes: list[tuple[int, ...]] = [(n, 1, 1), (1, n, 1, 1), (1,), ()]
            constant = self.draw(*shapes[self.rng.integers(len(shapes))])
            self.add(
                str(self.rng.choice(["Add", "Mul"])), [constant, x] if self.rng.random() < 0.5 else [x, constant], n
            )
        elif kind == "weigh rows":
            self.add("Mul", [x, self.draw(*[(6,), (8, 1), (1, 8, 6), (1, 1, 8, 6)][self.rng.integers(4)])], n)
        elif kind == "clip":
            self.add("Clip", [x, self.keep(np.float32(-1)), self.keep(np.float32(1))], n)
        elif kind == "normalize":
            variance = self.keep(self.rng.uniform(0.5, 2, n).astype(np.float32))
            self.add("BatchNormalization", [x, self.draw(n), self.draw(n), self.draw(n), variance], n)
        elif kind == "join":
            parts = [str(name) for name in self.rng.choice(list(self.channels), self.rng.integers(1, 4))]
            self.add("Concat", parts, sum(self.channels[name] for name in parts), axis=int(self.rng.choice([1, -3])))
        elif kind == "split" and n > 1:
            sizes = np.array([1, n - 1])
            first, second = self.add("Split", [x, self.keep(sizes)], 1, 2, axis=int(self.rng.choice([1, -3])))
            self.channels.update({first: 1, second: n - 1})
        elif kind == "excite":
            # Pooled values have one position, so they are not among the values that other layers read.
            (pooled,) = self.add("GlobalAveragePool", [x], n)
            (factor,) = self.add("HardSigmoid", [self.convolve(pooled, n)], n)
            small = [name for node in self.nodes[-3:] for name in node.output]
            for name in small:
                del self.channels[name]
            self.add("Mul", [x, factor], n)
        elif kind == "pool":
            self.add("MaxPool", [x], n, kernel_shape=[3, 3], pads=[1] * 4)

    def build(self, outputs: list[str]) -> ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", self.channels["x"], 8, 6])
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", [x], infos, self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


KINDS = (
    "convolve", "depthwise", "activate", "combine", "scale", "weigh rows", "clip", "normalize", "join", "split",
    "excite", "pool",
)  # fmt: skip


def draw_network(rng: np.random.Generator, layers: int = 14) -> tuple[ModelProto, np.ndarray]:
    """Return a random network that returns three of its values, and an input."""
    network = Network(rng, int(rng.integers(1, 5)))
    network.convolve("x", 4, 3)
    for kind in rng.choice(KINDS, layers):
        network.add_layer(str(kind))
    named = [name for name in network.channels if name != "x"]
    outputs = [str(name) for name in rng.choice(named, min(3, len(named)), replace=False)]
    return network.build(outputs), rng.normal(size=(2, network.channels["x"], 8, 6)).astype(np.float32)


def check(outputs: Any, expected: Any) -> None:
    for x, y in zip(outputs, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, float(np.max(np.abs(y)))))


def list_outputs(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("number", range(4))
def test_random_networks(number: int, rng: np.random.Generator) -> None:
    model, x = draw_network(rng)
    fn, params = jqonnx.load(model)
    expected = run_runtime(model, {"x": x})
    check(list_outputs(jax.jit(fn)(params, x)), expected)
    mapped = jax.jit(jax.vmap(fn, (None, 0)))(params, jnp.stack([x[:1], x[1:]]))
    check([y.reshape(-1, *y.shape[2:]) for y in list_outputs(mapped)], expected)
    constant, none = jqonnx.load(model, constants=True)
    check(list_outputs(jax.jit(constant)(none, x)), expected)


def test_derivatives(rng: np.random.Generator) -> None:
    """They are those of the graph in ONNX's layout, which is what is recorded for `prepare` and `export`."""
    model, x = draw_network(rng, 8)
    fn, params = jqonnx.load(model)
    exported, arrays = jqonnx.load(jqonnx.export(fn, params, [x]))
    got, want = (
        jax.grad(lambda x, f=f, p=p: sum(jnp.sum(jnp.sin(y)) for y in list_outputs(f(p, x))))(x)
        for f, p in ((fn, params), (exported, arrays))
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(1, float(np.max(np.abs(want)))))


def make_block(rng: np.random.Generator) -> tuple[ModelProto, np.ndarray]:
    """Return a block with a split, a residual branch and a concatenation between convolutions, and an input."""
    network = Network(rng, 8)
    wide = network.add("Relu", [network.convolve("x", 8, 3)], 8)[0]
    first, second = network.add("Split", [wide, network.keep(np.array([4, 4]))], 4, 2, axis=1)
    inner = network.add("Sigmoid", [network.convolve(second, 4, 3)], 4)[0]
    # The product before a sum is rounded, and the mean of each channel stays an image.
    (scaled,) = network.add("Mul", [network.draw(1), inner], 4)
    (shifted,) = network.add("Add", [scaled, network.draw(1)], 4)
    (mean,) = network.add("GlobalAveragePool", [shifted], 4)
    (excited,) = network.add("Mul", [shifted, network.convolve(mean, 4)], 4)
    (total,) = network.add("Add", [excited, second], 4)
    (joined,) = network.add("Concat", [first, second, total], 12, axis=1)
    return network.build([network.convolve(joined, 8, 3)]), rng.normal(size=(1, 8, 8, 6)).astype(np.float32)


def test_images_are_transposed_at_the_ends_only(rng: np.random.Generator) -> None:
    """Between convolutions no value is in ONNX's layout."""
    model, x = make_block(rng)
    fn, params = jqonnx.load(model)
    text = str(jax.make_jaxpr(fn)(params, x))
    assert len(re.findall(r"= transpose\[", text)) == 2
    np.testing.assert_allclose(jax.jit(fn)(params, x), run_runtime(model, {"x": x})[0], rtol=0, atol=1e-4)


def test_a_function_that_is_prepared_has_onnx_s_layout(rng: np.random.Generator) -> None:
    """Each convolution is one of ONNX's, so that it is quantized and exported as one node."""
    model, x = make_block(rng)
    fn, params = jqonnx.load(model)
    fn(params, x)  # JAX keeps this trace, which must not be used below
    prepared = jq.prepare(fn, params, x, rules=jq.recipes.w8a8_dynamic())
    assert [row.form for row in prepared.coverage.rows] == ["integer"] * 4
    exported = jqonnx.export(fn, params, [x])
    operators = [node.op_type for node in exported.graph.node]
    assert operators.count("Conv") == 4
    assert "Transpose" not in operators


def test_pools_are_the_runtimes(rng: np.random.Generator) -> None:
    """The largest element of each window, whatever its strides, dilations and padding."""
    for _ in range(4):
        kernel, strides, dilations = (rng.integers(1, n, 2).tolist() for n in (5, 4, 3))
        reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        pads = [int(rng.integers(0, min(k - 1, r) + 1)) for k, r in zip(2 * kernel, 2 * reach, strict=True)]
        b = Builder(rng)
        y = b.add("Conv", "x", b.draw(6, 3, 3, 3), b.draw(6), pads=[1, 1, 1, 1])
        y = b.add(
            "MaxPool", y, kernel_shape=kernel, strides=strides, dilations=dilations, pads=pads,
            ceil_mode=int(rng.integers(2)),
        )  # fmt: skip
        model = b.build([2, 3, 13, 11], b.add("Relu", y))
        x = rng.normal(size=(2, 3, 13, 11)).astype(np.float32)
        fn, params = jqonnx.load(model)
        (expected,) = run_runtime(model, {"x": x})
        np.testing.assert_allclose(jax.jit(fn)(params, x), expected, rtol=1e-5, atol=1e-5)
        # By slices, which XLA:CPU computes several times as fast.
        assert "reduce_window" not in str(jax.make_jaxpr(fn)(params, x))


def test_pool_without_a_window_is_empty(rng: np.random.Generator) -> None:
    b = Builder(rng)
    y = b.add("MaxPool", b.add("Conv", "x", b.draw(6, 3, 1, 1)), kernel_shape=[2, 2], strides=[2, 2])
    fn, params = jqonnx.load(b.build([1, 3, 1, 8], y))
    assert jax.jit(fn)(params, np.zeros((1, 3, 1, 8), np.float32)).shape == (1, 6, 0, 4)
