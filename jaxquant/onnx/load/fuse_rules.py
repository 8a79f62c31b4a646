"""Which operators between DequantizeLinear and QuantizeLinear become operators on codes, and with which inputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import Node

if TYPE_CHECKING:
    from .fuse import _Fuser

_EIGHT_BITS = (np.dtype(np.uint8), np.dtype(np.int8))
_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
_MICROSOFT = "com.microsoft"
_POOL_ATTRIBUTES = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
_UNARY: dict[str, tuple[str, tuple[str, ...]]] = {
    "AveragePool": ("QLinearAveragePool", _POOL_ATTRIBUTES),
    "GlobalAveragePool": ("QLinearGlobalAveragePool", ()),
    "LeakyRelu": ("QLinearLeakyRelu", ("alpha",)),
    "Sigmoid": ("QLinearSigmoid", ()),
    "Softmax": ("QLinearSoftmax", ("axis",)),
}
_BINARY = {"Add": "QLinearAdd", "Mul": "QLinearMul"}
# How much the scale of a bias may differ in ONNX Runtime, in all and in proportion.
_CLOSE, _CLOSE_RATIO = 1e-6, 1e-2
Match = tuple[Node, list[Node]]


def select_operator(fuser: _Fuser, node: Node) -> Match | None:
    """Return the last node of a pattern that begins at `node`, and what replaces it; None without a pattern."""
    if node.domain:
        return None
    if node.op == "Conv":
        return _select_conv(fuser, node)
    if node.op in ("MatMul", "Gemm"):
        return _select_matmul(fuser, node)
    if node.op in _UNARY or node.op in _BINARY or node.op in ("Concat", "Where"):
        return _select_elementwise(fuser, node)
    return None


def _find_sources(fuser: _Fuser, names: Any) -> list[Node] | None:
    """Return the DequantizeLinear of each input, or None if one has none or not 8 bits."""
    sources = [fuser.find_source(name) for name in names]
    if any(source is None or fuser.find_codes_dtype(source) not in _EIGHT_BITS for source in sources):
        return None
    return sources  # type: ignore[return-value]


def _find_result(fuser: _Fuser, node: Node, dtype: Any) -> Node | None:
    """Return the QuantizeLinear to codes of this dtype that reads a node."""
    sink = fuser.find_sink(node)
    if sink is None or not fuser.is_per_tensor(sink) or fuser.find_codes_dtype(sink) != dtype:
        return None
    return sink


def _describe(fuser: _Fuser, source: Node) -> tuple[str, str, str]:
    """Return the names of codes, scale and zero point."""
    return source.inputs[0], *fuser.read_affine(source)


def _make_node(
    node: Node, op: str, domain: str, inputs: Any, output: str, attributes: dict[str, Any] | None = None
) -> Node:  # fmt: skip
    return dataclasses.replace(
        node, op=op, domain=domain, inputs=tuple(inputs), outputs=(output,), opset=1,
        attributes=dict(node.attributes) if attributes is None else attributes, label=f"{node.label}, as {op}",
    )  # fmt: skip


def _select_elementwise(fuser: _Fuser, node: Node) -> Match | None:
    """AveragePool, LeakyRelu, Sigmoid, Softmax, Add, Mul, Concat, Where: all codes have one dtype."""
    data = node.inputs[1:] if node.op == "Where" else node.inputs
    sources = _find_sources(fuser, data)
    if sources is None or not all(fuser.is_per_tensor(source) for source in sources):
        return None
    dtypes = {fuser.find_codes_dtype(source) for source in sources}
    sink = _find_result(fuser, node, fuser.find_codes_dtype(sources[0]))
    # ONNX Runtime's kernels take operands of one dtype.
    if len(dtypes) > 1 or sink is None or any(node.outputs[1:]):
        return None
    operands = [name for source in sources for name in _describe(fuser, source)]
    result, output = fuser.read_affine(sink), sink.outputs[0]
    if node.op in _BINARY:
        return sink, [_make_node(node, _BINARY[node.op], _MICROSOFT, [*operands, *result], output, {})]
    if node.op == "Concat":
        return sink, [_make_node(node, "QLinearConcat", _MICROSOFT, [*result, *operands], output)]
    if node.op == "Where":
        return sink, [_make_node(node, "QLinearWhere", _MICROSOFT, [node.inputs[0], *operands, *result], output, {})]
    name, kept = _UNARY[node.op]
    # QLinearAveragePool has no dilations.
    if any(n != 1 for n in node.attributes.get("dilations", ())):
        return None
    attributes = {key: node.attributes[key] for key in kept if key in node.attributes}
    if node.op == "Softmax":
        # The meaning of the axis depends on the opset of Softmax, which QLinearSoftmax has as an attribute.
        attributes = {"axis": attributes.get("axis", -1 if node.opset >= 13 else 1), "opset": node.opset}
    if node.op == "LeakyRelu":
        attributes.setdefault("alpha", 0.01)
    return sink, [_make_node(node, name, _MICROSOFT, [*operands, *result], output, attributes)]


def _select_conv(fuser: _Fuser, node: Node) -> Match | None:
    """Conv of uint8, with a bias of int32, of constant floats, or none."""
    sources = _find_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    dtype = fuser.find_codes_dtype(sources[0])
    sink = _find_result(fuser, node, dtype)
    # On x86-64, ONNX Runtime has no integer convolution of int8 activations.
    if sink is None or dtype == _INT8:
        return None
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    bias = _select_bias(fuser, node, operands)
    if bias is None:
        return None
    inputs = [*operands, *fuser.read_affine(sink), *bias[0]]
    return sink, [*bias[1], _make_node(node, "QLinearConv", "", inputs, sink.outputs[0])]


def _select_bias(fuser: _Fuser, node: Node, operands: list[str]) -> tuple[list[str], list[Node]] | None:
    """Return the int32 bias of a Conv or Gemm as inputs, and the nodes that make it; None if it is no such bias."""
    name = node.inputs[2] if len(node.inputs) > 2 else ""
    if not name:
        return [], []
    source = fuser.producers.get(name)
    if source is not None and source.op == "DequantizeLinear":
        codes = source.inputs[0]
        maker = fuser.producers.get(codes)
        if maker is not None and maker.op == "QuantizeBias":
            return [codes], []
        if codes not in fuser.constants or fuser.constants[codes].dtype != _INT32:
            return None
        # ONNX Runtime compares the scale of the bias with that of the sums for Conv only.
        return ([codes], []) if node.op == "Gemm" or _fits_accumulator(fuser, source, operands) else None
    if name not in fuser.constants or fuser.constants[name].dtype != np.float32:
        return None
    codes = f"{node.outputs[0]}/bias in steps"
    quantized = _make_node(node, "QuantizeBias", "jaxquant", [name, operands[1], operands[4]], codes, {})
    return [codes], [quantized]


def _fits_accumulator(fuser: _Fuser, source: Node, operands: list[str]) -> bool:
    """Return whether the scale of a bias is, about, the product of the scales of x and w."""
    scale, x_scale, w_scale = (fuser.constants.get(name) for name in (source.inputs[1], operands[1], operands[4]))
    if scale is None or x_scale is None or w_scale is None or scale.size not in (1, w_scale.size):
        return False
    product = x_scale.reshape(-1).astype(np.float64) * w_scale.reshape(-1)
    return bool(np.all(np.abs(scale.reshape(-1) - product) <= _CLOSE + _CLOSE_RATIO * np.abs(product)))


def _select_matmul(fuser: _Fuser, node: Node) -> Match | None:
    """MatMul and Gemm, with or without QuantizeLinear, and MatMul with Add."""
    sources = _find_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    left, right = (fuser.find_codes_dtype(source) for source in sources)
    # ONNX Runtime has no kernel for int8 times uint8.
    if left == _INT8 and right != left:
        return None
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    if node.op == "Gemm":
        return _select_gemm(fuser, node, node, operands, left)
    added = find_added_bias(fuser, node)
    if added is not None:
        return _select_gemm(fuser, added[0], added[1], operands, left)
    readers = fuser.readers[node.outputs[0]]
    # As with Conv: on x86-64 only Gemm takes int8 activations.
    if left == _INT8:
        return None
    sink = _find_result(fuser, node, left)
    if sink is not None:
        return sink, [_make_node(node, "QLinearMatMul", "", [*operands, *fuser.read_affine(sink)], sink.outputs[0], {})]
    # A product with several readers, one of which quantizes it, stays in floats.
    if any(reader.op == "QuantizeLinear" for reader in readers):
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, b, a_scale, b_scale, a_point, b_point]
    return node, [_make_node(node, "MatMulIntegerToFloat", _MICROSOFT, inputs, node.outputs[0], {})]


def find_added_bias(fuser: _Fuser, node: Node) -> tuple[Node, Node] | None:
    """Return MatMul and Add as one Gemm, and the Add, for constant weights and a constant for each column."""
    readers = fuser.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op != "Add" or node.outputs[0] in fuser.graph.outputs:
        return None
    (addition,) = readers
    (bias,) = [name for name in addition.inputs if name != node.outputs[0]] or [""]
    weight, stored = (_find_stored(fuser, name) for name in (node.inputs[1], bias))
    if weight is None or weight.ndim != 2 or stored is None:
        return None
    shape = stored.shape
    if not shape or shape[-1] != weight.shape[-1] or any(n != 1 for n in shape[:-1]):
        return None
    inputs = (*node.inputs[:2], bias)
    return dataclasses.replace(node, op="Gemm", inputs=inputs, outputs=addition.outputs, attributes={}), addition


def _find_stored(fuser: _Fuser, name: str) -> np.ndarray | None:
    """Return the constant that a value is, or whose codes it is dequantized or was quantized from."""
    while name not in fuser.constants:
        source = fuser.producers.get(name)
        if source is None or source.op not in ("DequantizeLinear", "QuantizeLinear", "QuantizeBias"):
            return None
        name = source.inputs[0]
    return fuser.constants[name]


def _select_gemm(fuser: _Fuser, gemm: Node, last: Node, operands: list[str], dtype: Any) -> Match | None:
    """Gemm as QGemm, with codes or float32 as its result."""
    has_bias = len(gemm.inputs) > 2 and bool(gemm.inputs[2])
    # QGemm has no beta, and its alpha would scale the steps of the bias, too.
    if has_bias and not gemm.attributes.get("beta", 1.0) == gemm.attributes.get("alpha", 1.0) == 1:
        return None
    sink = fuser.find_sink(last)
    has_codes = sink is not None and _find_result(fuser, last, dtype) is not None
    if not has_codes and any(reader.op == "QuantizeLinear" for reader in fuser.readers[last.outputs[0]]):
        return None
    bias = _select_bias(fuser, gemm, operands)
    # ONNX Runtime quantizes a float bias only for a result in codes.
    if bias is None or (bias[1] and not has_codes):
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, a_scale, a_point, b, b_scale, b_point, *(bias[0] or [""])]
    attributes = {key: gemm.attributes[key] for key in ("alpha", "transA", "transB") if key in gemm.attributes}
    end = last
    if has_codes:
        assert sink is not None
        inputs, end = [*inputs, *fuser.read_affine(sink)], sink
    return end, [*bias[1], _make_node(gemm, "QGemm", _MICROSOFT, inputs, end.outputs[0], attributes)]
