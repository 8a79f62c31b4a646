"""Small float networks of many kinds, and what onnxruntime.quantization makes of them; without jaxquant."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

from .onnx_models import Builder, Reader

Network = tuple[Builder, tuple[int, ...], str]


def _activate(b: Builder, y: str, kind: int) -> str:
    """Add an activation, or none."""
    if kind == 1:
        return b.add("Relu", y)
    if kind == 2:
        return b.add("Clip", y, b.hold(0), b.hold(6))
    if kind == 3:
        return b.add("LeakyRelu", y, alpha=0.1)
    if kind == 4:
        return b.add("HardSwish", y)
    if kind == 5:
        return b.add("Sigmoid", y)
    if kind == 6:
        return b.add("Tanh", y)
    return y


def _make_convolutions(b: Builder, rank: int) -> Network:
    """Convolutions with `rank` spatial axes: with and without a bias, groups, strides, dilations and padding."""
    rng = b.rng
    channels, y = 4, "x"
    for _ in range(int(rng.integers(1, 4))):
        group = int(rng.choice([1, channels, *([2] if channels % 2 == 0 else [])]))
        features = group * int(rng.integers(1, 4))
        kernel = [int(n) for n in rng.integers(1, 4, rank)]
        bias = [b.draw(features)] if rng.random() < 0.7 else []
        pads = [n // 2 for n in kernel] * 2
        attributes: dict[str, Any] = {"auto_pad": "SAME_UPPER"} if rng.random() < 0.2 else {"pads": pads}
        if rng.random() < 0.3:
            attributes["strides"] = [int(n) for n in rng.integers(1, 3, rank)]
        elif rng.random() < 0.3 and "pads" in attributes:
            attributes["dilations"] = [2] * rank
            attributes["pads"] = [n // 2 * 2 for n in kernel] * 2
        weight = b.draw(features, channels // group, *kernel)
        y = b.add("Conv", y, weight, *bias, group=group, kernel_shape=kernel, **attributes)
        y, channels = _activate(b, y, int(rng.integers(0, 5))), features
    return b, (2, 4, *[(14, 11, 9)[i] for i in range(rank)]), y


def make_transposed(b: Builder) -> Network:
    """ConvTranspose, with and without groups, behind a Conv."""
    rng = b.rng
    group = int(rng.choice([1, 2]))
    y = b.add("Relu", b.add("Conv", "x", b.draw(4, 3, 3, 3), b.draw(4), pads=[1, 1, 1, 1]))
    bias = [b.draw(2 * group)] if rng.random() < 0.5 else []
    y = b.add("ConvTranspose", y, b.draw(4, 2, 2, 2), *bias, strides=[2, 2], group=group)
    return b, (2, 3, 5, 6), _activate(b, y, int(rng.integers(0, 4)))


def make_channels_last(b: Builder) -> Network:
    """Convolutions as tf2onnx writes them: NHWC outside, Transpose around each, and the weights through a Transpose."""
    rng = b.rng
    y, channels = "x", 3
    for _ in range(2):
        features = int(rng.integers(2, 6))
        weight = b.add("Transpose", b.draw(3, 3, channels, features), perm=[3, 2, 0, 1])
        y = b.add("Transpose", y, perm=[0, 3, 1, 2])
        y = b.add("Conv", y, weight, *([b.draw(features)] if rng.random() < 0.6 else []), auto_pad="SAME_LOWER")
        y = b.add("Transpose", y, perm=[0, 2, 3, 1])
        y, channels = _activate(b, y, int(rng.integers(0, 4))), features
    return b, (2, 6, 7, 3), y


def make_channels_last_residual(b: Builder) -> Network:
    """A residual network as tf2onnx writes it: the sums are outside of the transpositions, and NHWC."""
    rng = b.rng

    def convolve(y: str, features: int) -> str:
        y = b.add("Transpose", y, perm=[0, 3, 1, 2])
        y = b.add(
            "Conv", y, b.draw(features, 4, 3, 3), *([b.draw(features)] if rng.random() < 0.6 else []), pads=[1] * 4
        )
        return b.add("Transpose", y, perm=[0, 2, 3, 1])

    y = "x"
    for _ in range(int(rng.integers(1, 3))):
        z = _activate(b, convolve(y, 4), int(rng.integers(0, 4)))
        if rng.random() < 0.3:
            z = b.add("MaxPool", z, kernel_shape=[3, 3], pads=[1] * 4)
        y = _activate(b, b.add("Add", y, convolve(z, 4)), int(rng.integers(0, 4)))
    return b, (2, 6, 5, 4), convolve(y, 3)


def make_channels_last_1d(b: Builder) -> Network:
    """1-D convolutions as tf2onnx writes them, through Unsqueeze or Reshape and a 2-D one, with one bias for both."""
    rng = b.rng
    y, shared = "x", b.draw(6)
    length = 11
    for channels in (3, 6):
        if rng.random() < 0.5:
            y = b.add("Unsqueeze", y, b.hold([1], np.int64))
        else:
            y = b.add("Reshape", y, b.hold([-1, 1, length, channels], np.int64))
        y = b.add("Transpose", y, perm=[0, 3, 1, 2])
        y = b.add("Conv", y, b.draw(6, channels, 1, 3), shared, pads=[0, 1, 0, 1])
        y = b.add("Neg", y) if rng.random() < 0.3 else y
        y = b.add("Transpose", y, perm=[0, 2, 3, 1])
        y = b.add("Squeeze", y, b.hold([1], np.int64))
        y = _activate(b, y, int(rng.integers(0, 4)))
    y = b.add("Pad", y, b.hold([0, 1, 0, 0, 1, 0], np.int64), mode=str(rng.choice(["constant", "reflect"])))
    return b, (2, length, 3), y


def make_gemms(b: Builder) -> Network:
    """Gemm with its attributes and with biases of each shape that broadcasts."""
    rng = b.rng
    y, width = "x", 6
    for _ in range(2):
        features = int(rng.integers(1, 8))
        flip = int(rng.integers(0, 2))
        attributes: dict[str, Any] = {"transB": flip} if flip or rng.random() < 0.5 else {}
        if rng.random() < 0.3:
            attributes["alpha"] = 0.5
        if rng.random() < 0.3:
            attributes["beta"] = 2.0
        kind = int(rng.integers(0, 3))
        bias = [[], [b.draw(features)], [b.draw(1, features)]][kind]
        y = b.add("Gemm", y, b.draw(*((features, width) if flip else (width, features))), *bias, **attributes)
        y, width = _activate(b, y, int(rng.integers(0, 6))), features
    return b, (5, 6), y


def make_transposed_gemm(b: Builder) -> Network:
    """Gemm with transA."""
    return b, (6, 5), b.add("Gemm", "x", b.draw(6, 4), b.draw(4), transA=1)


def make_products(b: Builder) -> Network:
    """MatMul with leading axes, with a bias of a row, a column or a scalar, and of two activations."""
    rng = b.rng
    y = b.add("MatMul", "x", b.draw(8, 6))
    kind = int(rng.integers(0, 4))
    if kind:
        y = b.add("Add", y, [b.draw(6), b.draw(4, 1), b.hold(0.5)][kind - 1])
    y = _activate(b, y, int(rng.integers(0, 6)))
    z = b.add("MatMul", y, b.add("Transpose", y, perm=[0, 2, 1]))
    if rng.random() < 0.5:
        z = b.add("Softmax", b.add("Div", z, b.hold(2.0)), axis=-1)
    y = b.add("MatMul", z, y)
    if rng.random() < 0.5:
        y = b.add("MatMul", y, b.draw(3, 6, 5))
    return b, (3, 4, 8), y


def make_lstm(b: Builder) -> Network:
    """LSTM or GRU in one or both directions, and a MatMul behind it."""
    rng = b.rng
    op = str(rng.choice(["LSTM", "GRU"]))
    gates, count, hidden = (4 if op == "LSTM" else 3), int(rng.integers(1, 3)), 5
    bias = [b.draw(count, 2 * gates * hidden)] if rng.random() < 0.7 else []
    direction = "bidirectional" if count == 2 else str(rng.choice(["forward", "reverse"]))
    weights = [b.draw(count, gates * hidden, 3), b.draw(count, gates * hidden, hidden)]
    y = b.add(op, "x", *weights, *bias, hidden_size=hidden, direction=direction)
    y = b.add("Reshape", b.add("Transpose", y, perm=[0, 2, 1, 3]), b.hold([0, 0, -1], np.int64))
    return b, (6, 2, 3), b.add("MatMul", y, b.draw(count * hidden, 4))


def make_resampling(b: Builder) -> Network:
    """Resize, Pad, Concat, Split, Slice and pools around a convolution."""
    rng = b.rng
    y = b.add("Conv", "x", b.draw(4, 3, 3, 3), b.draw(4), pads=[1, 1, 1, 1])
    mode = str(rng.choice(["nearest", "linear"]))
    y = b.add("Resize", y, "", b.hold([1, 1, 2, 2]), mode=mode, coordinate_transformation_mode="asymmetric")
    mode = str(rng.choice(["constant", "reflect", "edge"]))
    fill = [b.hold(0.5)] if mode == "constant" and rng.random() < 0.5 else []
    y = b.add("Pad", y, b.hold([0, 0, 1, 0, 0, 0, 0, 2], np.int64), *fill, mode=mode)
    left, right = b.add("Split", y, b.hold([1, 3], np.int64), outputs=2, axis=1)
    right = b.add("MaxPool", right, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    count = int(rng.integers(0, 2))
    left = b.add("AveragePool", left, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=count)
    y = b.add("Concat", left, right, axis=1)
    y = b.add("Slice", y, b.hold([1], np.int64), b.hold([5], np.int64), b.hold([2], np.int64))
    return b, (2, 3, 6, 7), b.add("Conv", y, b.draw(2, 4, 1, 1))


def make_pools(b: Builder) -> Network:
    """A residual network with batch normalization, a scaling by GlobalAveragePool, and a Gemm."""
    rng = b.rng
    y = b.add("Conv", "x", b.draw(4, 3, 3, 3), pads=[1, 1, 1, 1])
    statistics = [rng.uniform(0.5, 2, 4), rng.normal(size=4), rng.normal(size=4), rng.uniform(0.5, 2, 4)]
    y = b.add("Relu", b.add("BatchNormalization", y, *map(b.hold, statistics)))
    gate = b.add("Conv", b.add("GlobalAveragePool", y), b.draw(4, 4, 1, 1), b.draw(4))
    y = b.add("Mul", y, b.add(str(rng.choice(["Sigmoid", "HardSigmoid"])), gate))
    z = b.add("Conv", y, b.draw(4, 4, 3, 3), b.draw(4), pads=[1, 1, 1, 1])
    y = _activate(b, b.add(str(rng.choice(["Add", "Sub"])), z, y), int(rng.integers(0, 4)))
    if rng.random() < 0.5:
        y = b.add("ReduceMean", y, b.hold([2, 3], np.int64), keepdims=0)
    else:
        y = b.add("Flatten", b.add("GlobalAveragePool", y))
    y = b.add("Gemm", y, b.draw(5, 4), b.draw(5), transB=1)
    return b, (2, 3, 6, 5), b.add("Softmax", y, axis=1)


def make_embedding(b: Builder) -> Network:
    """A lookup of rows by the largest entry, LayerNormalization, Where, ReduceMean and two MatMuls."""
    rng = b.rng
    table = b.draw(7, 8)
    y = b.add("Gather", table, b.add("ArgMax", "x", axis=-1, keepdims=0), axis=0)
    y = b.add("LayerNormalization", y, b.hold(rng.uniform(0.5, 1.5, 8)), b.draw(8))
    y = b.add("Add", b.add("MatMul", y, b.draw(8, 16)), b.draw(16))
    y = b.add("Where", b.add("Greater", y, b.hold(0)), y, b.add("Mul", y, b.hold(0.25)))
    y = b.add("MatMul", y, b.draw(16, 8))
    return b, (3, 4, 7), b.add("MatMul", y, b.add("Transpose", table, perm=[1, 0]))


NETWORKS: dict[str, Callable[[Builder], Network]] = {
    "conv1d": lambda b: _make_convolutions(b, 1),
    "conv2d": lambda b: _make_convolutions(b, 2),
    "conv3d": lambda b: _make_convolutions(b, 3),
    "transposed": make_transposed,
    "nhwc": make_channels_last,
    "nhwc-residual": make_channels_last_residual,
    "nhwc1d": make_channels_last_1d,
    "gemm": make_gemms,
    "gemm-transa": make_transposed_gemm,
    "matmul": make_products,
    "recurrent": make_lstm,
    "resampling": make_resampling,
    "pools": make_pools,
    "embedding": make_embedding,
}


# Networks that compute with codes, or with floats that both round alike, between their input and output.
EXACT = {"conv1d", "conv2d", "conv3d", "nhwc", "nhwc-residual", "nhwc1d", "gemm-transa", "resampling"}


class Options(NamedTuple):
    """How a network is quantized.

    Attributes:
        form: "qdq", "operators" or "dynamic".
        activation: the dtype of activations.
        weight: the dtype of weights.
        per_channel: whether each channel of a weight has a scale.
        reduce_range: whether weights have 7 bits.
        extra: the extra_options of onnxruntime.quantization.
    """

    form: str
    activation: str
    weight: str
    per_channel: bool
    reduce_range: bool
    extra: dict[str, Any]


_EXTRAS = (
    "ActivationSymmetric", "AddQDQPairToWeight", "DedicatedQDQPair", "QDQKeepRemovableActivations",
    "ForceQuantizeNoInputCheck", "MatMulConstBOnly", "OpTypesToExcludeOutputQuantization", "QuantizeBias",
)  # fmt: skip


def draw_options(rng: np.random.Generator, has_exact_products: bool) -> Options:
    """Return options that onnxruntime.quantization takes together.

    Weights have 7 bits where the products of 8 bits saturate on this processor.
    """
    form = str(rng.choice(["qdq", "qdq", "operators", "dynamic"]))
    eight, wide, narrow = ["QUInt8", "QInt8"], ["QUInt16", "QInt16"], ["QInt4", "QUInt4"]
    activation, weight = str(rng.choice(eight)), str(rng.choice(eight))
    if form == "qdq":
        kind = rng.random()
        if kind < 0.15:
            activation = str(rng.choice(wide))
        elif kind < 0.3:
            weight = str(rng.choice(narrow))
        elif kind < 0.35:
            activation, weight = str(rng.choice(wide)), "QInt16"
    if activation == "QInt8" and weight == "QUInt8":
        # ONNX Runtime has no kernel for int8 times uint8.
        weight = "QInt8"
    extra: dict[str, Any] = {}
    for name in _EXTRAS:
        if rng.random() < 0.2 and form != "dynamic":
            extra[name] = {"OpTypesToExcludeOutputQuantization": ["Conv", "MatMul"], "QuantizeBias": False}.get(
                name, True
            )
    if rng.random() < 0.25:
        extra["WeightSymmetric"] = bool(rng.integers(0, 2))
    if form == "dynamic" and rng.random() < 0.5:
        extra["MatMulConstBOnly"] = bool(rng.integers(0, 2))
    reduce_range = bool(rng.random() < 0.3) or not has_exact_products
    return Options(form, activation, weight, bool(rng.integers(0, 2)), reduce_range, extra)


def is_exact(kind: str, options: Options) -> bool:
    """Return whether a quantized network has only integers, or floats that both round alike."""
    has_codes = options.activation in ("QUInt8", "QInt8") and options.weight in ("QUInt8", "QInt8")
    has_floats = options.form == "dynamic" or "OpTypesToExcludeOutputQuantization" in options.extra
    return kind in EXACT and has_codes and not has_floats


def draw_network(kind: str, rng: np.random.Generator) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return a network of a kind, and the shape of its input."""
    builder, shape, output = NETWORKS[kind](Builder(rng))
    return builder.build(shape, output), shape


def quantize_network(
    model: onnx.ModelProto, batches: list[np.ndarray], options: Options, folder: pathlib.Path
) -> onnx.ModelProto:
    """Return a model quantized by onnxruntime.quantization."""
    source, target = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(model, source)
    weight = QuantType[options.weight]
    shared: dict[str, Any] = {
        "per_channel": options.per_channel, "reduce_range": options.reduce_range, "weight_type": weight,
        "extra_options": dict(options.extra),
    }  # fmt: skip
    logging.disable(logging.WARNING)
    try:
        if options.form == "dynamic":
            quantize_dynamic(source, target, **shared)
        else:
            form = QuantFormat.QOperator if options.form == "operators" else QuantFormat.QDQ
            activation = QuantType[options.activation]
            quantize_static(source, target, Reader(batches), quant_format=form, activation_type=activation, **shared)
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(target)
