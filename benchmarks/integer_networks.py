"""The rows on networks that are integer from the first code to the last, each against ONNX Runtime's fused graph.

- residual: 32x32 images, a convolution, two residual blocks of 32 features, a maximum, a convolution and a residual
  block of 64 features, a mean, and a dense layer
- separable: the same images, five depthwise and pointwise convolutions of 32 to 128 features, a mean, a dense layer
- mlp: three dense layers of 1024 features

A shape is the shape of the batch of codes. The float32 network of plain JAX has the dequantized weights. The opponent
"contractions alone" runs nothing but the contractions, on int8 codes that exist already; it is left out where XLA's own
depthwise convolution would be measured, which jaxquant does not use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxquant as jq

from . import onnxruntime_models as models
from .bare_contractions import CONTRACTIONS_ALONE, contract_alone
from .contest import FLOAT32, ONNX_RUNTIME, Call, Contest, Missing, Row, Table

_UINT8 = jq.QuantSpec("uint8")
_NUMBERS = ("NHWC", "HWIO", "NHWC")
Step = Callable[[Any, Sequence[Any]], Any]


class _Network:
    """A network in three forms: on codes, in floats, and as the nodes of a graph for ONNX Runtime.

    Each array has a number. The scales of results come from the ranges of the float network on a sample.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(0)
        self.steps: list[tuple[tuple[int, ...], Step, Step]] = []
        self.params: list[Any] = []
        self.floats: list[Any] = []
        self.nodes: list[tuple[str, list[str], str, dict[str, Any]]] = []
        self.constants: dict[str, np.ndarray] = {}
        self.weights: list[str] = []  # the names of those constants that are int8 weights or their zero points
        self.x = jq.quantize(self.rng.normal(size=shape).astype(np.float32), _UINT8)
        self.arrays, self.values = [self.x], [self.x.dequantize()]
        self.names = ["x"]

    def conv(self, source: int, features: int, size: int, stride: int = 1, groups: int = 1, relu: bool = True) -> int:
        """Add a convolution; return the number of its result."""
        pads = [(size // 2, size // 2)] * 2
        static: Any = functools.partial(
            lax.conv_general_dilated, window_strides=(stride,) * 2, padding=pads, dimension_numbers=_NUMBERS,
            feature_group_count=groups,
        )  # fmt: skip
        channels = self.arrays[source].shape[-1] // groups
        attributes = {"strides": [stride] * 2, "pads": [size // 2] * 4, "group": groups}
        return self._contract(source, (size, size, channels, features), static, relu, "Conv", attributes)

    def dense(self, source: int, features: int, relu: bool) -> int:
        """Add a dense layer; return the number of its result."""
        return self._contract(source, (self.arrays[source].shape[-1], features), jnp.matmul, relu, "Gemm", {})

    def _contract(
        self, source: int, shape: tuple[int, ...], compute: Any, relu: bool, operator: str, attributes: dict[str, Any]
    ) -> int:
        x, place = self.arrays[source], len(self.params)
        w = jq.quantize(
            self.rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32),
            jq.QuantSpec("int8", jq.PerAxis(-1)),
        )
        bias = jq.codes.quantize_bias(self.rng.normal(0, 0.3, shape[-1]).astype(np.float32), x.scale, w.scale)
        scale = np.asarray(x.scale).reshape(()) * np.asarray(w.scale).reshape(-1)
        activate = jax.nn.relu if relu else lambda y: y
        self.floats.append((w.dequantize(), jnp.asarray(np.asarray(bias) * scale)))

        def run_floats(params: Any, xs: Sequence[Any]) -> Any:
            return activate(compute(xs[0], params[place][0]) + params[place][1])

        output = self._choose_output(run_floats(self.floats, [self.values[source]]))
        convert: Any = jq.matmul
        if operator == "Conv":
            convert = functools.partial(jq.conv_general_dilated, **compute.keywords)
        self.params.append((w.store_last(0) if operator == "Gemm" else w, bias, output))

        def run(params: Any, xs: Sequence[Any]) -> Any:
            kernel, bias, output = params[place]
            return convert(xs[0], kernel, bias=bias, output=output)

        codes = np.asarray(w.codes).transpose(3, 2, 0, 1) if operator == "Conv" else np.asarray(w.codes)
        w_scale = np.asarray(w.scale).reshape(-1)
        held = self._hold(codes)
        inputs = [
            self._dequantize(self.names[source], np.asarray(x.scale), np.asarray(x.zero_point)),
            # Without a zero point of the weights ONNX Runtime keeps a float Gemm.
            self._dequantize(held, w_scale, np.zeros(len(w_scale), np.int8), 0 if operator == "Conv" else 1),
            self._dequantize(self._hold(np.asarray(bias)), scale, np.zeros(len(w_scale), np.int32), 0),
        ]
        _, (*_, point), *_ = next(node for node in self.nodes if node[1][0] == held)
        self.weights += [held, point]
        y = self._add_node(operator, inputs, attributes)
        return self._finish((source,), run, run_floats, self._add_node("Relu", [y], {}) if relu else y)

    def add(self, a: int, b: int) -> int:
        """Add a sum with a relu; return the number of its result."""
        return self._combine(
            (a, b),
            lambda xs, output: jq.codes.add(xs[0], xs[1], output=output),
            lambda xs: jax.nn.relu(xs[0] + xs[1]),
            "Add",
            {},
        )

    def mean(self, source: int) -> int:
        """Add a mean over positions; return the number of its result."""
        return self._combine(
            (source,), lambda xs, output: jq.codes.mean(xs[0], (1, 2), output=output), lambda xs: xs[0].mean((1, 2)),
            "GlobalAveragePool", {},
        )  # fmt: skip

    def max_pool(self, source: int) -> int:
        """Add a maximum over windows of 2x2; return the number of its result."""

        def pool(xs: Sequence[Any]) -> Any:
            return lax.reduce_window(xs[0], -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

        def pool_codes(xs: Sequence[Any], _: Any) -> Any:
            return jq.codes.max_pool(xs[0], window_shape=(2, 2), strides=(2, 2))

        attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
        return self._combine((source,), pool_codes, pool, "MaxPool", attributes)

    def _combine(
        self, sources: tuple[int, ...], run: Callable[..., Any], run_floats: Callable[..., Any], operator: str,
        attributes: dict[str, Any],
    ) -> int:  # fmt: skip
        place = len(self.params)
        self.floats.append(None)
        self.params.append(self._choose_output(run_floats([self.values[source] for source in sources])))
        inputs = []
        for source in sources:
            x = self.arrays[source]
            inputs.append(self._dequantize(self.names[source], np.asarray(x.scale), np.asarray(x.zero_point)))
        y = self._add_node(operator, inputs, attributes)
        if operator == "GlobalAveragePool":
            self.constants["shape"] = np.array([self.x.shape[0], -1])
            y = self._add_node("Reshape", [y, "shape"], {})
        return self._finish(sources, lambda params, xs: run(xs, params[place]), lambda params, xs: run_floats(xs), y)

    def _finish(self, sources: tuple[int, ...], run: Step, run_floats: Step, y: str) -> int:
        """Keep a step whose float result has the name y in the graph, and return the number of its result."""
        self.steps.append((sources, run, run_floats))
        self.arrays.append(run(self.params, [self.arrays[source] for source in sources]))
        self.values.append(run_floats(self.floats, [self.values[source] for source in sources]))
        q = self.arrays[-1]
        scalars = [self._hold(np.asarray(part).reshape(())) for part in (q.scale, q.zero_point)]
        self.names.append(self._add_node("QuantizeLinear", [y, *scalars], {}))
        return len(self.arrays) - 1

    def _choose_output(self, y: Any) -> jq.Quantizer:
        return jq.Quantizer.from_range(_UINT8, (y.min(), y.max()))

    def _hold(self, array: np.ndarray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = array
        return name

    def _dequantize(self, name: str, scale: np.ndarray, zero_point: np.ndarray, axis: int | None = None) -> str:
        parts = [part.reshape(() if axis is None else -1) for part in (scale, zero_point)]
        attributes = {} if axis is None else {"axis": axis}
        return self._add_node("DequantizeLinear", [name, *map(self._hold, parts)], attributes)

    def _add_node(self, operator: str, inputs: list[str], attributes: dict[str, Any]) -> str:
        name = f"y{len(self.nodes)}"
        self.nodes.append((operator, inputs, name, attributes))
        return name

    def run(self, params: Any, x: Any) -> jax.Array:
        """Return the last codes."""
        arrays = [x]
        for sources, step, _ in self.steps:
            arrays.append(step(params, [arrays[source] for source in sources]))
        return arrays[-1].codes

    def run_floats(self, params: Any, x: jax.Array) -> jax.Array:
        """Return the last floats."""
        arrays = [x]
        for sources, _, step in self.steps:
            arrays.append(step(params, [arrays[source] for source in sources]))
        return arrays[-1]


def _residual(network: _Network) -> None:
    y = network.conv(0, 32, 3)
    for features in (32, 32, 64):
        if features == 64:
            y = network.conv(network.max_pool(y), 64, 3)
        y = network.add(network.conv(network.conv(y, features, 3), features, 3, relu=False), y)
    network.dense(network.mean(y), 10, False)


def _separable(network: _Network) -> None:
    y = network.conv(0, 32, 3, stride=2)
    for features, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (128, 1)):
        channels = network.arrays[y].shape[-1]
        y = network.conv(network.conv(y, channels, 3, stride, groups=channels), features, 1)
    network.dense(network.mean(y), 10, False)


def _mlp(network: _Network) -> None:
    y = network.dense(0, 1024, True)
    network.dense(network.dense(y, 1024, True), 1024, False)


def _compare(build: Callable[[_Network], None], shape: tuple[int, ...]) -> Contest:
    network = _Network(shape)
    build(network)
    codes = np.asarray(network.x.codes)
    feeds = {"x": np.ascontiguousarray(np.moveaxis(codes, -1, 1)) if codes.ndim == 4 else codes}
    onnx = models.many_nodes(network.nodes, feeds, network.constants, [network.names[-1]])
    unsigned = {name: models.store_unsigned(network.constants[name]) for name in network.weights}
    exact = models.many_nodes(network.nodes, feeds, network.constants | unsigned, [network.names[-1]])
    params, floats, x = jax.device_put((network.params, network.floats, network.x))
    ours = functools.partial(jax.jit(network.run), params, x)
    plain = functools.partial(jax.jit(network.run_floats), floats, x.dequantize())
    # Each layer holds its floats, each other operation None.
    count = sum(pair is not None for pair in floats)
    alone: Call | Missing = Missing("not comparable")
    if build is not _separable:
        alone = contract_alone(network.run_floats, (floats, x.dequantize()), [True] * count)
    opponents = {ONNX_RUNTIME: onnx, FLOAT32: plain, CONTRACTIONS_ALONE: alone}
    unlike = frozenset({FLOAT32, CONTRACTIONS_ALONE})
    return Contest(ours, opponents, exact, codes.nbytes, unlike=unlike, judges_runtime=True)


_BATCHES = (1, 8, 64)
TABLE = Table(
    "Integer networks",
    (ONNX_RUNTIME, FLOAT32, CONTRACTIONS_ALONE),
    [
        *(
            Row(f"{name} network uint8", (batch, 32, 32, 3), functools.partial(_compare, build, (batch, 32, 32, 3)))
            for name, build in (("residual", _residual), ("separable", _separable))
            for batch in _BATCHES
        ),
        *(Row("mlp uint8", (batch, 1024), functools.partial(_compare, _mlp, (batch, 1024))) for batch in _BATCHES),
    ],
)
