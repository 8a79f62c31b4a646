"""Float ONNX models made with onnx.helper, and what onnxruntime.quantization makes of them; without jaxquant."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from ..oracles import onnx_runtime

OPSET = 21


class Builder:
    """Nodes and initializers of a graph in the making."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def hold(self, array: Any, dtype: Any = np.float32) -> str:
        """Add an initializer."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def draw(self, *shape: int) -> str:
        """Add an initializer of random weights."""
        fan = int(np.prod(shape[1:] if len(shape) > 2 else shape[:1]))
        return self.hold(self.rng.normal(size=shape) / np.sqrt(max(fan, 1)))

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node and return the name of its output, or the names of its outputs."""
        names = [f"{op.lower()}{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{op}{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def build(self, shape: Any, output: str, opset: int = OPSET) -> onnx.ModelProto:
        """Return the model from x to one output."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        y = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def make_mlp(rng: np.random.Generator) -> onnx.ModelProto:
    """Three layers: Gemm with a bias, MatMul and Add, MatMul."""
    b = Builder(rng)
    y = b.add("Relu", b.add("Gemm", "x", b.draw(16, 32), b.draw(32)))
    y = b.add("Relu", b.add("Add", b.add("MatMul", y, b.draw(32, 32)), b.draw(32)))
    return b.build(["n", 16], b.add("MatMul", y, b.draw(32, 5)))


def make_cnn(rng: np.random.Generator) -> onnx.ModelProto:
    """Convolutions, a depthwise one among them, a residual sum, pools, a Gemm."""
    b = Builder(rng)
    y = b.add("Relu", b.add("Conv", "x", b.draw(8, 3, 3, 3), b.draw(8), pads=[1, 1, 1, 1], strides=[2, 2]))
    z = b.add("Relu", b.add("Conv", y, b.draw(8, 1, 3, 3), b.draw(8), pads=[1, 1, 1, 1], group=8))
    y = b.add("Add", y, b.add("Conv", z, b.draw(8, 8, 1, 1), b.draw(8)))
    y = b.add("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    y = b.add("Concat", y, b.add("Sigmoid", y), axis=1)
    y = b.add("Flatten", b.add("GlobalAveragePool", y))
    return b.build(["n", 3, 16, 16], b.add("Gemm", y, b.draw(10, 16), b.draw(10), transB=1))


def make_encoder(rng: np.random.Generator, length: int = 8, width: int = 32, heads: int = 4) -> onnx.ModelProto:
    """A transformer encoder's layer, with Shape arithmetic for the heads."""
    b = Builder(rng)
    batch = b.add("Gather", b.add("Shape", "x"), b.hold(0, np.int64), axis=0)
    parts = [b.add("Unsqueeze", batch, b.hold([0], np.int64)), b.hold([length, heads, width // heads], np.int64)]
    shape = b.add("Concat", *parts, axis=0)

    def dense(x: str, n: int, m: int) -> str:
        return b.add("Add", b.add("MatMul", x, b.draw(n, m)), b.draw(m))

    def norm(x: str) -> str:
        return b.add("LayerNormalization", x, b.hold(np.ones(width)), b.hold(np.zeros(width)))

    x = norm("x")
    q, k, v = (b.add("Transpose", b.add("Reshape", dense(x, width, width), shape), perm=[0, 2, 1, 3]) for _ in "qkv")
    products = b.add("MatMul", q, b.add("Transpose", k, perm=[0, 1, 3, 2]))
    weights = b.add("Softmax", b.add("Mul", products, b.hold(np.sqrt(heads / width))), axis=-1)
    y = b.add("Transpose", b.add("MatMul", weights, v), perm=[0, 2, 1, 3])
    y = b.add("Reshape", y, b.hold([0, 0, width], np.int64))
    y = b.add("Add", "x", dense(y, width, width))
    z = b.add("Gelu", dense(norm(y), width, 2 * width))
    return b.build(["n", length, width], b.add("Add", y, dense(z, 2 * width, width)))


MODELS = {"mlp": (make_mlp, (8, 16)), "cnn": (make_cnn, (4, 3, 16, 16)), "encoder": (make_encoder, (3, 8, 32))}


class Reader(CalibrationDataReader):
    """The batches of input x that a quantizer reads."""

    def __init__(self, batches: list[np.ndarray]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> Any:
        batch = next(self._batches, None)
        return None if batch is None else {"x": batch}


def quantize_model(
    model: onnx.ModelProto, batches: list[np.ndarray], kind: str, folder: pathlib.Path, per_channel: bool = False
) -> onnx.ModelProto:
    """Return a model quantized by onnxruntime.quantization: "qdq", "int8", "operators", "dynamic" or "nbits"."""
    logging.disable(logging.WARNING)
    source, target = folder / "float.onnx", folder / f"{kind}.onnx"
    onnx.save(model, source)
    if kind == "dynamic":
        quantize_dynamic(source, target, per_channel=per_channel, weight_type=QuantType.QInt8)
    elif kind == "nbits":
        return pack_weights(model)
    else:
        form = QuantFormat.QOperator if kind == "operators" else QuantFormat.QDQ
        activation = QuantType.QInt8 if kind == "int8" else QuantType.QUInt8
        quantize_static(
            source, target, Reader(batches), quant_format=form, per_channel=per_channel,
            activation_type=activation, weight_type=QuantType.QInt8,
        )  # fmt: skip
    logging.disable(logging.NOTSET)
    return onnx.load(target)


def pack_weights(model: onnx.ModelProto, block: int = 16) -> onnx.ModelProto:
    """Return a model whose products with constant matrices are MatMulNBits of 4 bits."""
    packed = onnx.ModelProto()
    packed.CopyFrom(model)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in packed.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            continue
        w = weights[node.input[1]].T
        n, k = w.shape
        blocks = w.reshape(n, k // block, block)
        scale = (np.ptp(blocks, axis=2) / 15).astype(np.float32)
        point = np.clip(np.rint(-blocks.min(axis=2) / scale), 0, 15).astype(np.uint8)
        codes = np.clip(np.rint(blocks / scale[..., None]) + point[..., None], 0, 15).astype(np.uint8)
        pairs = np.pad(point, ((0, 0), (0, point.shape[1] % 2)))
        parts = {
            "b": codes[..., 0::2] | (codes[..., 1::2] << 4),
            "scales": scale.reshape(-1),
            "points": (pairs[:, 0::2] | (pairs[:, 1::2] << 4)).reshape(-1),
        }
        names = [f"{node.input[1]}/{part}" for part in parts]
        tensors = zip(parts.values(), names, strict=True)
        packed.graph.initializer.extend(numpy_helper.from_array(array, name) for array, name in tensors)
        node.input[:] = [node.input[0], *names]
        node.op_type, node.domain = "MatMulNBits", "com.microsoft"
        attributes = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": 1}
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    packed.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return packed


def run_runtime(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], level: str = "all", threads: int = 2
) -> list[np.ndarray]:
    """Return the outputs of ONNX Runtime, with exact sums on every processor."""
    return [np.asarray(y) for y in onnx_runtime.open_session(model, level, threads=threads).run(None, feeds)]


def list_optimized_operators(model: onnx.ModelProto, folder: pathlib.Path) -> list[str]:
    """Return the operators of the graph that ONNX Runtime runs with all optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    path = folder / "optimized.onnx"
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


def make_single(
    op: str, feeds: dict[str, Any], constants: dict[str, Any] | None = None, outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """Return a model of one operator of ONNX Runtime; an input that is None is left out."""
    constants = constants or {}
    names = [name if value is not None else "" for name, value in {**feeds, **constants}.items()]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, domain="com.microsoft", **attributes)
    kind = helper.np_dtype_to_tensor_dtype
    inputs = [helper.make_tensor_value_info(n, kind(x.dtype), x.shape) for n, x in feeds.items() if x is not None]
    values = [helper.make_empty_tensor_value_info(n) for n in results]
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if a is not None]
    graph = helper.make_graph([node], "g", inputs, values, tensors)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)
