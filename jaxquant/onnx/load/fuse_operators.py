"""Operators between DequantizeLinear and QuantizeLinear that become operators on codes, and with which inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..._core.dtypes import EIGHT_BITS
from .fused_graph import FusedGraph
from .graph import Node

_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
_MICROSOFT = "com.microsoft"
_LIMIT = 2.0**31
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
# What rounding to float32 makes of equal scales, and which part of a softmax the rounding of a factor may take.
_ROUNDING, _MOST_OFF = 1e-6, 1e-2
Match = tuple[Node, list[Node]]


def select_operator(fused: FusedGraph, node: Node) -> Match | None:
    """Return the last node of a pattern that begins at `node`, and what replaces it; None without a pattern."""
    if node.domain:
        return None
    if node.op in ("Conv", "MatMul", "Gemm") and not _allows_bias(fused, node):
        return None
    if node.op == "Conv":
        return _select_conv(fused, node)
    if node.op in ("MatMul", "Gemm"):
        return _select_matmul(fused, node)
    if node.op in _UNARY or node.op in _BINARY or node.op in ("Concat", "Where"):
        return _select_elementwise(fused, node)
    return None


def _match_sources(fused: FusedGraph, names: Any) -> list[Node] | None:
    """Return the DequantizeLinear of each input, or None if one has none or not 8 bits."""
    sources = [fused.match_dequantize(name) for name in names]
    if any(source is None or fused.derive_codes_dtype(source) not in EIGHT_BITS for source in sources):
        return None
    return sources  # type: ignore[return-value]


def _match_result(fused: FusedGraph, node: Node, dtype: np.dtype | None) -> Node | None:
    """Return the QuantizeLinear to codes of this dtype that reads a node."""
    sink = fused.match_quantize(node)
    if sink is None or not fused.is_per_tensor(sink) or fused.derive_codes_dtype(sink) != dtype:
        return None
    return sink


def _describe(fused: FusedGraph, source: Node) -> tuple[str, str, str]:
    """Return the names of codes, scale and zero point."""
    return source.inputs[0], *fused.read_affine(source)


def _make_node(
    node: Node, op: str, domain: str, inputs: Any, output: str, attributes: dict[str, Any] | None = None
) -> Node:  # fmt: skip
    return dataclasses.replace(
        node, op=op, domain=domain, inputs=tuple(inputs), outputs=(output,), opset=1,
        attributes=dict(node.attributes) if attributes is None else attributes, label=f"{node.label}, as {op}",
    )  # fmt: skip


def _select_elementwise(fused: FusedGraph, node: Node) -> Match | None:
    """AveragePool, LeakyRelu, Sigmoid, Softmax, Add, Mul, Concat, Where: all codes have one dtype."""
    data = node.inputs[1:] if node.op == "Where" else node.inputs
    sources = _match_sources(fused, data)
    if sources is None or not all(fused.is_per_tensor(source) for source in sources):
        return None
    dtypes = {fused.derive_codes_dtype(source) for source in sources}
    sink = _match_result(fused, node, fused.derive_codes_dtype(sources[0]))
    # ONNX Runtime's kernels take operands of one dtype.
    if len(dtypes) > 1 or sink is None or any(node.outputs[1:]):
        return None
    if not all(fused.allows_scale(node.op, source) for source in sources):
        return None
    operands = [name for source in sources for name in _describe(fused, source)]
    result, output = fused.read_affine(sink), sink.outputs[0]
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
    if not _keeps_counts(fused, node) or not _keeps_factor(fused, node, sink):
        return None
    if node.op == "Softmax":
        # The meaning of the axis depends on the opset of Softmax, which QLinearSoftmax has as an attribute.
        attributes = {"axis": attributes.get("axis", -1 if node.opset >= 13 else 1), "opset": node.opset}
    if node.op == "LeakyRelu":
        attributes.setdefault("alpha", 0.01)
    return sink, [_make_node(node, name, _MICROSOFT, [*operands, *result], output, attributes)]


def _keeps_counts(fused: FusedGraph, node: Node) -> bool:
    """Return whether QLinearAveragePool divides by ONNX's number of elements, or may divide by another."""
    get = node.attributes.get
    # Windows with stride 1 do not reach beyond the padding.
    is_inside = node.op != "AveragePool" or not (get("ceil_mode") and get("count_include_pad"))
    if is_inside or all(n == 1 for n in get("strides", ())) or get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return True
    size = math.prod(node.attributes["kernel_shape"])
    model = "divides a last window that reaches beyond the padding by the number of its elements within"
    return fused.allows_deviation(node, model, f"divides it by {size}")


def _keeps_factor(fused: FusedGraph, node: Node, sink: Node) -> bool:
    """Return whether QLinearSoftmax multiplies by about 1 / y_scale, or may multiply by the integer below."""
    if node.op != "Softmax":
        return True
    scale = fused.constants[sink.inputs[1]].astype(np.float32).reshape(())
    with np.errstate(all="ignore"):
        exact = 1 / float(scale) if scale else np.inf
        factor = float(np.floor(np.float32(1) / scale))
    if not abs(factor - exact) > _MOST_OFF * abs(exact):
        return True
    return fused.allows_deviation(node, f"multiplies by 1 / y_scale = {exact:.6g}", f"by {factor:.6g}")


def _select_conv(fused: FusedGraph, node: Node) -> Match | None:
    """Conv of uint8, with a bias of int32, of constant floats, or none."""
    sources = _match_sources(fused, node.inputs[:2])
    if sources is None or not fused.is_per_tensor(sources[0]):
        return None
    dtype = fused.derive_codes_dtype(sources[0])
    sink = _match_result(fused, node, dtype)
    # On x86-64, ONNX Runtime has no integer convolution of int8 activations.
    if sink is None or dtype == _INT8 or not _has_output_scales(fused, node, sources[1], 0):
        return None
    operands = [*_describe(fused, sources[0]), *_describe(fused, sources[1])]
    bias = _select_bias(fused, node, operands)
    if bias is None:
        return None
    inputs = [*operands, *fused.read_affine(sink), *bias[0]]
    return sink, [*bias[1], _make_node(node, "QLinearConv", "", inputs, sink.outputs[0])]


def _select_bias(fused: FusedGraph, node: Node, operands: list[str]) -> tuple[list[str], list[Node]] | None:
    """Return the int32 bias of a Conv or Gemm as inputs, and the nodes that make it; None if it is no such bias."""
    name = node.inputs[2] if len(node.inputs) > 2 else ""
    if not name:
        return [], []
    source = fused.producers.get(name)
    if source is not None and source.op == "DequantizeLinear":
        codes = source.inputs[0]
        maker = fused.producers.get(codes)
        is_made = maker is not None and maker.op == "QuantizeBias"
        if not is_made and (codes not in fused.constants or fused.constants[codes].dtype != _INT32):
            return None
        # ONNX Runtime compares the scale of the bias with the scale of the sums for Conv only. It may have quantized
        # the bias itself, and merged pairs afterwards; then the scales differ.
        is_close = _fits_accumulator(fused, source, operands, (_CLOSE, _CLOSE_RATIO))
        if (node.op != "Gemm" and not is_close) or not _keeps_bias(fused, node, source, operands):
            return None
        return [codes], []
    if name not in fused.constants or fused.constants[name].dtype != np.float32:
        return None
    codes = fused.make_name(f"{node.outputs[0]}/bias in steps")
    quantized = _make_node(node, "QuantizeBias", "jaxquant", [name, operands[1], operands[4]], codes, {})
    return [codes], [quantized]


def _compute_steps(fused: FusedGraph, operands: list[str]) -> np.ndarray:
    """Return the products of the scales of x and w, which are the steps of the sums."""
    x_scale, w_scale = (fused.constants[name].astype(np.float64).reshape(-1) for name in (operands[1], operands[4]))
    return x_scale * w_scale


def _fits_accumulator(fused: FusedGraph, source: Node, operands: list[str], close: tuple[float, float]) -> bool:
    """Return whether a bias has no zero point, and its scale is about the product of the scales of x and w."""
    scale, products = fused.constants.get(source.inputs[1]), _compute_steps(fused, operands)
    zero_point = fused.constants.get("".join(source.inputs[2:3]), np.zeros(()))
    if scale is None or scale.size not in (1, products.size) or np.any(zero_point):
        return False
    distance = np.abs(scale.reshape(-1).astype(np.float64) - products)
    return bool(np.all(distance <= close[0] + close[1] * np.abs(products)))


def _keeps_bias(fused: FusedGraph, node: Node, source: Node, operands: list[str]) -> bool:
    """Return whether a bias as int32 has its value, but for rounding, or may have another."""
    codes = _read_bias(fused, source)
    most = float(np.max(np.abs(codes), initial=0))
    if most >= _compute_bias_limit(fused, node, operands):
        text = f"adds a bias of {most:.6g} steps"
        return fused.allows_deviation(node, text, "adds it as int32, where the sums overflow", can_follow=False)
    if _fits_accumulator(fused, source, operands, (0.0, _ROUNDING)):
        return True
    scale = fused.constants.get(source.inputs[1])
    zero_point = fused.constants.get("".join(source.inputs[2:3]), np.zeros(1, np.int32))
    products = _compute_steps(fused, operands)
    sizes = (1, codes.size)
    if scale is None or not {scale.size, zero_point.size, products.size} <= set(sizes):
        text = "adds a bias with a scale that is an input" if scale is None else "adds a bias with scales of its own"
        return fused.allows_deviation(node, text, "takes the scales of x and w", can_follow=False)
    meant = (codes - zero_point.reshape(-1)) * scale.reshape(-1).astype(np.float64)
    used = codes * products
    index = int(np.argmax(np.abs(used - meant)))
    if used[index] == meant[index]:
        return True
    model = f"adds bias[{index}] = {meant[index]:.6g}"
    return fused.allows_deviation(node, model, f"adds {used[index]:.6g}, in steps of the scales of x and w")


def _read_bias(fused: FusedGraph, source: Node) -> np.ndarray:
    """Return the codes of a bias, constants or what QuantizeBias will make of constant floats."""
    codes = fused.constants.get(source.inputs[0])
    if codes is None:
        maker = fused.producers[source.inputs[0]]
        codes = np.rint(fused.constants[maker.inputs[0]].astype(np.float64) / fused.constants[source.inputs[1]])
    return codes.reshape(-1).astype(np.float64)


def _compute_bias_limit(fused: FusedGraph, node: Node, operands: list[str]) -> float:
    """Return how many steps a bias may have so that no sum with it leaves int32."""
    codes = fused.constants.get(operands[3])
    if codes is None or not codes.ndim:
        return _LIMIT
    outputs = codes.shape[0 if node.op == "Conv" or node.attributes.get("transB", 0) else -1]
    return _LIMIT - (codes.size // max(outputs, 1)) * 255.0**2


def fits_int32(fused: FusedGraph, node: Node, bias: np.ndarray, operands: list[str], is_noted: bool = True) -> bool:
    """Return whether a float bias has few enough steps for int32; `is_noted` notes the deviation if not."""
    signed = _compute_steps(fused, operands)
    products = np.abs(signed)
    values = np.broadcast_to(products, (bias.size,)) if products.size in (1, bias.size) else products[:0]
    with np.errstate(all="ignore"):
        steps = np.abs(bias.reshape(-1).astype(np.float64)) / values if values.size else np.zeros(1)
    if np.all(steps < _compute_bias_limit(fused, node, operands)):
        # `quantize_bias` takes positive steps only.
        return bool(np.all(signed >= np.finfo(np.float32).tiny))
    if not is_noted:
        return False
    index = int(np.argmax(steps))
    model = f"adds bias[{index}] = {bias.reshape(-1)[index]:.6g}"
    runtime = f"adds it as int32 in steps of {values.reshape(-1)[index]:.6g}, where it or a sum overflows"
    return fused.allows_deviation(node, model, runtime, can_follow=False)


def _allows_bias(fused: FusedGraph, node: Node) -> bool:
    """Return whether a float bias has few enough steps for int32; note that ONNX Runtime does not ask.

    It quantizes such a bias before it looks for kernels, so that also a contraction that stays in floats gets it.
    """
    sources = _match_sources(fused, node.inputs[:2])
    last = node
    if sources is not None and node.op == "MatMul" and (added := match_added_bias(fused, node)) is not None:
        node, last = added
    bias = fused.constants.get("".join(node.inputs[2:3]))
    if sources is None or bias is None or bias.dtype != np.float32 or not fused.is_per_tensor(sources[0]):
        return True
    operands = [*_describe(fused, sources[0]), *_describe(fused, sources[1])]
    if _compute_steps(fused, operands).size not in (1, bias.size):
        return False
    reader = fused.get_reader(last)
    if reader is not None and reader.op in ("Relu", "Clip"):
        reader = fused.get_reader(reader)
    is_noted = reader is not None and reader.op == "QuantizeLinear"
    return fits_int32(fused, node, bias, operands, is_noted)


def _has_output_scales(fused: FusedGraph, node: Node, source: Node, axis: int | None) -> bool:
    """Return whether the scales of w are along the dimension of the outputs, or may be taken for such.

    `axis` is that dimension, or None for the last one of any number.
    """
    scale = fused.constants[source.inputs[1]]
    if scale.size == 1:
        return True
    codes, own = fused.constants.get(source.inputs[0]), source.attributes.get("axis", 1)
    maker = fused.producers.get(source.inputs[0])
    if codes is None and maker is not None and maker.op == "QuantizeLinear":
        codes = fused.constants.get(maker.inputs[0])  # floats of the same shape
    if scale.ndim != 1 or source.attributes.get("block_size", 0):
        return False
    if codes is None:  # of an unknown rank
        return own == (1 if axis is None else axis)
    expected = codes.ndim - 1 if axis is None else axis
    own = own + codes.ndim if own < 0 else own
    if own == expected:
        return True
    # ONNX Runtime refuses other sizes when it runs, and does not quantize a float bias for such weights.
    reader = fused.get_reader(node)
    inputs = node.inputs[2:] if node.op != "MatMul" or reader is None or reader.op != "Add" else reader.inputs
    if any(name in fused.constants for name in inputs):
        return False
    if scale.size != codes.shape[expected] or (node.op == "MatMul" and fused.match_quantize(node) is not None):
        return False
    model = f"the scales of w are along its dimension {own}"
    return fused.allows_deviation(node, model, f"takes them along dimension {expected}")


def _select_matmul(fused: FusedGraph, node: Node) -> Match | None:
    """MatMul and Gemm, with or without QuantizeLinear, and MatMul with Add."""
    sources = _match_sources(fused, node.inputs[:2])
    if sources is None or not fused.is_per_tensor(sources[0]):
        return None
    left, right = (fused.derive_codes_dtype(source) for source in sources)
    # ONNX Runtime has no kernel for int8 times uint8.
    if left == _INT8 and right != left:
        return None
    columns = None if node.op == "MatMul" else 0 if node.attributes.get("transB", 0) else 1
    if not _has_output_scales(fused, node, sources[1], columns):
        return None
    operands = [*_describe(fused, sources[0]), *_describe(fused, sources[1])]
    if node.op == "Gemm":
        return _select_gemm(fused, node, node, operands, left)
    added = match_added_bias(fused, node)
    if added is not None:
        return _select_gemm(fused, added[0], added[1], operands, left)
    readers = fused.readers[node.outputs[0]]
    # As with Conv: on x86-64 only Gemm takes int8 activations.
    if left == _INT8:
        return None
    sink = _match_result(fused, node, left)
    if sink is not None:
        return sink, [_make_node(node, "QLinearMatMul", "", [*operands, *fused.read_affine(sink)], sink.outputs[0], {})]
    # A product with several readers stays in floats if one of them quantizes it.
    if any(reader.op == "QuantizeLinear" for reader in readers) or _feeds_clip(fused, node):
        return None
    a, a_scale, a_zero_point, b, b_scale, b_zero_point = operands
    inputs = [a, b, a_scale, b_scale, a_zero_point, b_zero_point]
    return node, [_make_node(node, "MatMulIntegerToFloat", _MICROSOFT, inputs, node.outputs[0], {})]


def _feeds_clip(fused: FusedGraph, node: Node) -> bool:
    """Return whether a float result has only a Relu or Clip behind it, with which ONNX Runtime leaves it in floats."""
    readers = fused.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op not in ("Relu", "Clip") or node.outputs[0] in fused.graph.outputs:
        return False
    result = readers[0].outputs[0]
    return len(fused.readers[result]) == 1 and result not in fused.graph.outputs


def match_added_bias(fused: FusedGraph, node: Node) -> tuple[Node, Node] | None:
    """Return MatMul and Add as one Gemm, and the Add, for constant weights and a constant for each column."""
    readers = fused.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op != "Add" or node.outputs[0] in fused.graph.outputs:
        return None
    (addition,) = readers
    (bias,) = [name for name in addition.inputs if name != node.outputs[0]] or [""]
    weight, stored = (_read_stored(fused, name) for name in (node.inputs[1], bias))
    if weight is None or weight.ndim != 2 or stored is None:
        return None
    shape = stored.shape
    if not shape or shape[-1] != weight.shape[-1] or any(n != 1 for n in shape[:-1]):
        return None
    inputs = (*node.inputs[:2], bias)
    return dataclasses.replace(node, op="Gemm", inputs=inputs, outputs=addition.outputs, attributes={}), addition


def _read_stored(fused: FusedGraph, name: str) -> np.ndarray | None:
    """Return the constant that a value is, or that it is dequantized or quantized from."""
    while name not in fused.constants:
        source = fused.producers.get(name)
        if source is None or source.op not in ("DequantizeLinear", "QuantizeLinear", "QuantizeBias"):
            return None
        name = source.inputs[0]
    return fused.constants[name]


def _select_gemm(
    fused: FusedGraph, gemm: Node, last: Node, operands: list[str], dtype: np.dtype | None
) -> Match | None:
    """Gemm as QGemm, with codes or float32 as its result."""
    has_bias = len(gemm.inputs) > 2 and bool(gemm.inputs[2])
    # QGemm has no beta, and its alpha would scale the steps of the bias, too.
    if has_bias and not gemm.attributes.get("beta", 1.0) == gemm.attributes.get("alpha", 1.0) == 1:
        return None
    sink = fused.match_quantize(last)
    has_codes = sink is not None and _match_result(fused, last, dtype) is not None
    is_quantized = any(reader.op == "QuantizeLinear" for reader in fused.readers[last.outputs[0]])
    if not has_codes and (is_quantized or _feeds_clip(fused, last)):
        return None
    # ONNX Runtime quantizes a float bias only for a result in codes.
    if has_bias and not has_codes and set(gemm.inputs[2:]) & set(fused.constants):
        return None
    bias = _select_bias(fused, gemm, operands)
    if bias is None:
        return None
    a, a_scale, a_zero_point, b, b_scale, b_zero_point = operands
    inputs = [a, a_scale, a_zero_point, b, b_scale, b_zero_point, *(bias[0] or [""])]
    attributes = {key: gemm.attributes[key] for key in ("alpha", "transA", "transB") if key in gemm.attributes}
    end = last
    if has_codes:
        assert sink is not None
        inputs, end = [*inputs, *fused.read_affine(sink)], sink
    return end, [*bias[1], _make_node(gemm, "QGemm", _MICROSOFT, inputs, end.outputs[0], attributes)]
