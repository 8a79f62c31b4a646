"""Networks that compute with codes from the first quantization to the last, code for code as ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxquant as jq

from ..cases import microsoft_exactness as cases
from ..oracles.onnx_graphs import INTEGER_KERNELS, LEVELS, QdqGraph, Tensor

F = np.float32
SPEC = jq.QuantSpec("uint8")
NUMBERS = ("NHWC", "HWIO", "NHWC")


class Recorder:
    """Builds a network of our functions on images (N, H, W, C), and the same graph for ONNX Runtime (N, C, H, W).

    The scales of results come from the ranges of the float operations on the dequantized operands.
    """

    def __init__(self, rng: np.random.Generator, x: np.ndarray) -> None:
        self.rng, self.graph = rng, QdqGraph()
        self.codes: dict[str, Any] = {}
        self.steps: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = []
        self.q = self.start = jq.quantize(x, SPEC)
        codes = np.moveaxis(np.asarray(self.q.codes), -1, 1) if x.ndim == 4 else np.asarray(self.q.codes)
        self.tensor: Tensor = self.graph.feed(codes, *self.find_affine(self.q))

    @staticmethod
    def find_affine(q: jq.QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(q.scale).reshape(()), np.asarray(q.zero_point).reshape(())

    def keep(
        self, q: jq.QuantizedArray, tensor: Tensor, compute: Callable[..., Any], others: Sequence[Tensor] = ()
    ) -> None:  # fmt: skip
        """Keep a result, and how to compute it from the current array and others."""
        self.steps.append((tensor[0], compute, (self.tensor[0], *(other[0] for other in others))))
        self.q, self.tensor = q, tensor
        self.codes[tensor[0]] = np.moveaxis(np.asarray(q.codes), -1, 1) if q.ndim == 4 else np.asarray(q.codes)

    def run(self, x: jq.QuantizedArray) -> jax.Array:
        """Return the last codes of the whole network."""
        arrays: dict[str, Any] = {"x0": x}
        for name, compute, inputs in self.steps:
            arrays[name] = compute(*(arrays[each] for each in inputs))
        return arrays[self.steps[-1][0]].codes

    def choose_output(self, y: Any, is_positive: bool = False) -> jq.Quantizer:
        y = np.asarray(y)
        # Some values saturate.
        return jq.Quantizer.from_range(SPEC, (F(0) if is_positive else np.quantile(y, 0.01), np.quantile(y, 0.99)))

    def draw_weights(self, shape: tuple[int, ...]) -> tuple[jq.QuantizedArray, jax.Array]:
        w = self.rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(F)
        q = jq.quantize(w, jq.QuantSpec("int8", jq.PerAxis(-1)))
        return q, jq.codes.quantize_bias(self.rng.normal(0, 0.3, shape[-1]).astype(F), self.q.scale, q.scale)

    def hold_bias(self, bias: jax.Array, w: jq.QuantizedArray) -> Tensor:
        return self.graph.hold(np.asarray(bias), self.tensor[1] * np.asarray(w.scale).reshape(-1))

    def conv(self, features: int, size: int, stride: int = 1, groups: int = 1, relu: bool = True) -> None:
        w, bias = self.draw_weights((size, size, self.q.shape[-1] // groups, features))
        statics: dict[str, Any] = {"window_strides": (stride, stride), "padding": [(size // 2, size // 2)] * 2}
        statics |= {"dimension_numbers": NUMBERS, "feature_group_count": groups}
        y = jq.conv_general_dilated(self.q, w, bias=bias, **statics)
        output = self.choose_output(y, relu)

        def compute(x: jq.QuantizedArray) -> jq.QuantizedArray:
            y = jq.conv_general_dilated(x, w, bias=bias, output=output, **statics)
            return jq.codes.relu(y) if relu else y

        q = compute(self.q)
        weights = self.graph.hold(np.asarray(w.codes).transpose(3, 2, 0, 1), np.asarray(w.scale).reshape(-1))
        inputs = (self.tensor, weights, self.hold_bias(bias, w))
        attributes: dict[str, Any] = {"strides": [stride] * 2, "pads": [size // 2] * 4, "group": groups}
        name = self.graph.apply("Conv", inputs, *self.find_affine(q), after="Relu" if relu else None, **attributes)
        self.keep(q, name, compute)

    def dense(self, features: int, relu: bool) -> None:
        w, bias = self.draw_weights((self.q.shape[-1], features))
        output = self.choose_output(jq.matmul(self.q, w, bias=bias), relu)

        def compute(x: jq.QuantizedArray) -> jq.QuantizedArray:
            return jq.matmul(x, w, bias=bias, output=output)

        q = compute(self.q)
        scale = np.asarray(w.scale).reshape(-1)
        # Without a zero point of the weights ONNX Runtime keeps a float Gemm.
        weights = self.graph.hold(np.asarray(w.codes), scale, np.zeros(features, np.int8))
        inputs = (self.tensor, weights, self.hold_bias(bias, w))
        after = "Relu" if relu else None
        self.keep(q, self.graph.apply("Gemm", inputs, *self.find_affine(q), axes=(0, 1, 0), after=after), compute)

    def add(self, other: tuple[jq.QuantizedArray, Tensor]) -> None:
        output = self.choose_output(self.q.dequantize() + other[0].dequantize(), True)
        q = jq.codes.add(self.q, other[0], output=output)
        name = self.graph.apply("Add", (self.tensor, other[1]), *self.find_affine(q))
        self.keep(q, name, lambda a, b: jq.codes.relu(jq.codes.add(a, b, output=output)), [other[1]])

    def max_pool(self) -> None:
        q = jq.codes.max_pool(self.q, window_shape=(2, 2), strides=(2, 2))
        attributes: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
        name = self.graph.apply("MaxPool", (self.tensor,), *self.find_affine(q), **attributes)
        self.keep(q, name, lambda x: jq.codes.max_pool(x, window_shape=(2, 2), strides=(2, 2)))

    def average_pool(self) -> None:
        output = self.choose_output(self.q.dequantize(), True)
        q = jq.codes.average_pool(self.q, window_shape=(2, 2), strides=(2, 2), output=output)
        attributes: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
        name = self.graph.apply("AveragePool", (self.tensor,), *self.find_affine(q), **attributes)
        self.keep(q, name, lambda x: jq.codes.average_pool(x, window_shape=(2, 2), strides=(2, 2), output=output))

    def concatenate(self, other: tuple[jq.QuantizedArray, Tensor]) -> None:
        output = self.choose_output(other[0].dequantize(), True)
        q = jq.concatenate([self.q, other[0]], -1, output=output)
        name = self.graph.apply("Concat", (self.tensor, other[1]), *self.find_affine(q), axis=1)
        self.keep(q, name, lambda a, b: jq.concatenate([a, b], -1, output=output), [other[1]])

    def mean(self) -> None:
        output = self.choose_output(self.q.dequantize().mean((1, 2)), True)
        q = jq.codes.mean(self.q, (1, 2), True, output=output)
        name = self.graph.apply("GlobalAveragePool", (self.tensor,), *self.find_affine(q))
        self.keep(q, name, lambda x: jq.codes.mean(x, (1, 2), True, output=output))
        shape = (q.shape[0], q.shape[-1])
        flat = jq.codes.reshape(q, shape)
        name = self.graph.apply("Reshape", (self.tensor,), *self.find_affine(q), shape=shape)
        self.keep(flat, name, lambda x: jq.codes.reshape(x, (x.shape[0], -1)))


def build_residual(rng: np.random.Generator) -> Recorder:
    net = Recorder(rng, rng.normal(size=(3, 16, 16, 3)).astype(F))
    net.conv(16, 3)
    net.max_pool()
    for _ in range(2):
        skip = (net.q, net.tensor)
        net.conv(16, 3)
        net.conv(16, 3, relu=False)
        net.add(skip)
    start = (net.q, net.tensor)
    net.max_pool()
    branch = (net.q, net.tensor)
    net.q, net.tensor = start
    net.average_pool()
    net.concatenate(branch)
    net.conv(24, 1)
    net.mean()
    net.dense(10, relu=False)
    return net


def build_separable(rng: np.random.Generator) -> Recorder:
    net = Recorder(rng, rng.uniform(size=(3, 17, 15, 3)).astype(F))
    net.conv(16, 3, stride=2)
    for features, stride in ((24, 1), (32, 2)):
        net.conv(net.q.shape[-1], 3, stride, groups=net.q.shape[-1])
        net.conv(features, 1)
    net.mean()
    net.dense(10, relu=False)
    return net


def build_mlp(rng: np.random.Generator) -> Recorder:
    net = Recorder(rng, rng.normal(size=(64, 40)).astype(F))
    for features, relu in ((64, True), (48, True), (10, False)):
        net.dense(features, relu)
    return net


NETWORKS: dict[str, Callable[[np.random.Generator], Recorder]] = {
    "residual": build_residual, "separable": build_separable, "mlp": build_mlp
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_codes_are_those_of_onnx_runtime(name: str, rng: np.random.Generator) -> None:
    """At every quantization, and in ONNX Runtime all kernels are integer kernels."""
    if not cases.is_fused():
        pytest.skip("ONNX Runtime has other kernels on this machine")
    net = NETWORKS[name](rng)
    for level in LEVELS:
        outputs, operators = net.graph.run(level)
        assert set(operators) <= INTEGER_KERNELS, operators
        for key, codes in net.codes.items():
            wrong = int((outputs[key] != codes).sum())
            assert wrong == 0, f"{wrong} of {codes.size} codes differ at {key} ({level})"
    last = next(reversed(net.codes.values()))
    assert len(np.unique(last)) > 8
    assert (last != last[:1]).any()
    np.testing.assert_array_equal(jax.jit(net.run)(net.start), last)
