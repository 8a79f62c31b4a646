"""Which operators between DequantizeLinear and QuantizeLinear become operators on codes, and with which inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import Node
from .scales import EIGHT_BITS

if TYPE_CHECKING:
    from .fuse import _Fuser

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


def select_operator(fuser: _Fuser, node: Node) -> Match | None:
    """Return the last node of a pattern that begins at `node`, and what replaces it; None without a pattern."""
    if node.domain:
        return None
    if node.op in ("Conv", "MatMul", "Gemm") and not _allows_bias(fuser, node):
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
    if any(source is None or fuser.find_codes_dtype(source) not in EIGHT_BITS for source in sources):
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
    if not all(fuser.allows_scale(node.op, source) for source in sources):
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
    if not _keeps_counts(fuser, node) or not _keeps_factor(fuser, node, sink):
        return None
    if node.op == "Softmax":
        # The meaning of the axis depends on the opset of Softmax, which QLinearSoftmax has as an attribute.
        attributes = {"axis": attributes.get("axis", -1 if node.opset >= 13 else 1), "opset": node.opset}
    if node.op == "LeakyRelu":
        attributes.setdefault("alpha", 0.01)
    return sink, [_make_node(node, name, _MICROSOFT, [*operands, *result], output, attributes)]


def _keeps_counts(fuser: _Fuser, node: Node) -> bool:
    """Return whether QLinearAveragePool divides by ONNX's number of elements, or may divide by another."""
    get = node.attributes.get
    # Windows with stride 1 do not reach beyond the padding.
    is_inside = node.op != "AveragePool" or not (get("ceil_mode") and get("count_include_pad"))
    if is_inside or all(n == 1 for n in get("strides", ())) or get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return True
    size = math.prod(node.attributes["kernel_shape"])
    model = "divides a last window that reaches beyond the padding by the number of its elements within"
    return fuser.allows_deviation(node, model, f"divides it by {size}")


def _keeps_factor(fuser: _Fuser, node: Node, sink: Node) -> bool:
    """Return whether QLinearSoftmax multiplies by about 1 / y_scale, or may multiply by the integer below."""
    if node.op != "Softmax":
        return True
    scale = fuser.constants[sink.inputs[1]].astype(np.float32).reshape(())
    with np.errstate(all="ignore"):
        exact = 1 / float(scale) if scale else np.inf
        factor = float(np.floor(np.float32(1) / scale))
    if not abs(factor - exact) > _MOST_OFF * abs(exact):
        return True
    return fuser.allows_deviation(node, f"multiplies by 1 / y_scale = {exact:.6g}", f"by {factor:.6g}")


def _select_conv(fuser: _Fuser, node: Node) -> Match | None:
    """Conv of uint8, with a bias of int32, of constant floats, or none."""
    sources = _find_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    dtype = fuser.find_codes_dtype(sources[0])
    sink = _find_result(fuser, node, dtype)
    # On x86-64, ONNX Runtime has no integer convolution of int8 activations.
    if sink is None or dtype == _INT8 or not _has_output_scales(fuser, node, sources[1], 0):
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
        is_made = maker is not None and maker.op == "QuantizeBias"
        if not is_made and (codes not in fuser.constants or fuser.constants[codes].dtype != _INT32):
            return None
        # ONNX Runtime compares the scale of the bias with that of the sums for Conv only. The scale of a bias that it
        # has quantized itself differs where pairs were merged afterwards.
        is_close = _fits_accumulator(fuser, source, operands, (_CLOSE, _CLOSE_RATIO))
        if (node.op != "Gemm" and not is_close) or not _keeps_bias(fuser, node, source, operands):
            return None
        return [codes], []
    if name not in fuser.constants or fuser.constants[name].dtype != np.float32:
        return None
    codes = f"{node.outputs[0]}/bias in steps"
    quantized = _make_node(node, "QuantizeBias", "jaxquant", [name, operands[1], operands[4]], codes, {})
    return [codes], [quantized]


def _find_products(fuser: _Fuser, operands: list[str]) -> np.ndarray:
    """Return the products of the scales of x and w, which are the steps of the sums."""
    x_scale, w_scale = (fuser.constants[name].astype(np.float64).reshape(-1) for name in (operands[1], operands[4]))
    return x_scale * w_scale


def _fits_accumulator(fuser: _Fuser, source: Node, operands: list[str], close: tuple[float, float]) -> bool:
    """Return whether a bias has no zero point, and its scale is about the product of the scales of x and w."""
    scale, products = fuser.constants.get(source.inputs[1]), _find_products(fuser, operands)
    point = fuser.constants.get("".join(source.inputs[2:3]), np.zeros(()))
    if scale is None or scale.size not in (1, products.size) or np.any(point):
        return False
    distance = np.abs(scale.reshape(-1).astype(np.float64) - products)
    return bool(np.all(distance <= close[0] + close[1] * np.abs(products)))


def _keeps_bias(fuser: _Fuser, node: Node, source: Node, operands: list[str]) -> bool:
    """Return whether a bias as int32 has its value, but for rounding, or may have another."""
    codes = _read_bias(fuser, source)
    most = float(np.max(np.abs(codes), initial=0))
    if most >= _find_limit(fuser, node, operands):
        text = f"adds a bias of {most:.6g} steps"
        return fuser.allows_deviation(node, text, "adds it as int32, where the sums overflow", can_follow=False)
    if _fits_accumulator(fuser, source, operands, (0.0, _ROUNDING)):
        return True
    scale = fuser.constants.get(source.inputs[1])
    point = fuser.constants.get("".join(source.inputs[2:3]), np.zeros(1, np.int32))
    products = _find_products(fuser, operands)
    sizes = (1, codes.size)
    if scale is None or not {scale.size, point.size, products.size} <= set(sizes):
        text = "adds a bias with a scale that is an input" if scale is None else "adds a bias with scales of its own"
        return fuser.allows_deviation(node, text, "takes the scales of x and w", can_follow=False)
    meant = (codes - point.reshape(-1)) * scale.reshape(-1).astype(np.float64)
    used = codes * products
    place = int(np.argmax(np.abs(used - meant)))
    if used[place] == meant[place]:
        return True
    model = f"adds bias[{place}] = {meant[place]:.6g}"
    return fuser.allows_deviation(node, model, f"adds {used[place]:.6g}, in steps of the scales of x and w")


def _read_bias(fuser: _Fuser, source: Node) -> np.ndarray:
    """Return the codes of a bias, which are constants, or those that QuantizeBias will make of constant floats."""
    codes = fuser.constants.get(source.inputs[0])
    if codes is None:
        maker = fuser.producers[source.inputs[0]]
        codes = np.rint(fuser.constants[maker.inputs[0]].astype(np.float64) / fuser.constants[source.inputs[1]])
    return codes.reshape(-1).astype(np.float64)


def _find_limit(fuser: _Fuser, node: Node, operands: list[str]) -> float:
    """Return how many steps a bias may have so that no sum with it leaves int32."""
    codes = fuser.constants.get(operands[3])
    if codes is None or not codes.ndim:
        return _LIMIT
    outputs = codes.shape[0 if node.op == "Conv" or node.attributes.get("transB", 0) else -1]
    return _LIMIT - (codes.size // max(outputs, 1)) * 255.0**2


def fits_int32(fuser: _Fuser, node: Node, bias: np.ndarray, operands: list[str], is_noted: bool = True) -> bool:
    """Return whether a float bias has few enough steps for int32; `is_noted` notes the deviation if not."""
    signed = _find_products(fuser, operands)
    products = np.abs(signed)
    values = np.broadcast_to(products, (bias.size,)) if products.size in (1, bias.size) else products[:0]
    with np.errstate(all="ignore"):
        steps = np.abs(bias.reshape(-1).astype(np.float64)) / values if values.size else np.zeros(1)
    if np.all(steps < _find_limit(fuser, node, operands)):
        # `quantize_bias` takes positive steps only.
        return bool(np.all(signed >= np.finfo(np.float32).tiny))
    if not is_noted:
        return False
    place = int(np.argmax(steps))
    model = f"adds bias[{place}] = {bias.reshape(-1)[place]:.6g}"
    runtime = f"adds it as int32 in steps of {values.reshape(-1)[place]:.6g}, where the sums overflow"
    return fuser.allows_deviation(node, model, runtime, can_follow=False)


def _allows_bias(fuser: _Fuser, node: Node) -> bool:
    """Return whether a float bias has few enough steps for int32; note that ONNX Runtime does not ask.

    It quantizes such a bias before it looks for kernels, so that also a contraction that stays in floats gets it.
    """
    sources = _find_sources(fuser, node.inputs[:2])
    last = node
    if sources is not None and node.op == "MatMul" and (added := find_added_bias(fuser, node)) is not None:
        node, last = added
    bias = fuser.constants.get("".join(node.inputs[2:3]))
    if sources is None or bias is None or bias.dtype != np.float32 or not fuser.is_per_tensor(sources[0]):
        return True
    operands = [*_describe(fuser, sources[0]), *_describe(fuser, sources[1])]
    products = _find_products(fuser, operands)
    if products.size not in (1, bias.size):
        return False
    with np.errstate(all="ignore"):
        steps = np.abs(bias.reshape(-1).astype(np.float64) / products)
    if np.all(steps < _find_limit(fuser, node, operands)):
        # `quantize_bias` takes positive steps only.
        return bool(np.all(products >= np.finfo(np.float32).tiny))
    (reader,) = [*fuser.readers[last.outputs[0]], None][:1]
    if reader is not None and reader.op in ("Relu", "Clip"):
        (reader,) = [*fuser.readers[reader.outputs[0]], None][:1]
    if reader is not None and reader.op == "QuantizeLinear":
        place = int(np.argmax(steps))
        model = f"adds bias[{place}] = {bias.reshape(-1)[place]:.6g}"
        step = np.broadcast_to(products, bias.size)[place]
        runtime = f"adds it as int32 in steps of {step:.6g}, where it or a sum overflows"
        fuser.allows_deviation(node, model, runtime, can_follow=False)
    return False


def _has_output_scales(fuser: _Fuser, node: Node, source: Node, axis: int | None) -> bool:
    """Return whether the scales of w are along the dimension of the outputs, or may be taken for such.

    `axis` is that dimension, or None for the last one of any number.
    """
    scale = fuser.constants[source.inputs[1]]
    if scale.size == 1:
        return True
    codes, own = fuser.constants.get(source.inputs[0]), source.attributes.get("axis", 1)
    if scale.ndim != 1 or source.attributes.get("block_size", 0):
        return False
    if codes is None:  # of an unknown rank
        return own == (1 if axis is None else axis)
    expected = codes.ndim - 1 if axis is None else axis
    own = own + codes.ndim if own < 0 else own
    if own == expected:
        return True
    # ONNX Runtime refuses other sizes when it runs, and does not quantize a float bias for such weights.
    (reader,) = [*fuser.readers[node.outputs[0]], None][:1]
    inputs = node.inputs[2:] if node.op != "MatMul" or reader is None or reader.op != "Add" else reader.inputs
    if any(name in fuser.constants for name in inputs):
        return False
    if scale.size != codes.shape[expected] or (node.op == "MatMul" and fuser.find_sink(node) is not None):
        return False
    model = f"the scales of w are along its dimension {own}"
    return fuser.allows_deviation(node, model, f"takes them along dimension {expected}")


def _select_matmul(fuser: _Fuser, node: Node) -> Match | None:
    """MatMul and Gemm, with or without QuantizeLinear, and MatMul with Add."""
    sources = _find_sources(fuser, node.inputs[:2])
    if sources is None or not fuser.is_per_tensor(sources[0]):
        return None
    left, right = (fuser.find_codes_dtype(source) for source in sources)
    # ONNX Runtime has no kernel for int8 times uint8.
    if left == _INT8 and right != left:
        return None
    columns = None if node.op == "MatMul" else 0 if node.attributes.get("transB", 0) else 1
    if not _has_output_scales(fuser, node, sources[1], columns):
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
    if any(reader.op == "QuantizeLinear" for reader in readers) or _feeds_clip(fuser, node):
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, b, a_scale, b_scale, a_point, b_point]
    return node, [_make_node(node, "MatMulIntegerToFloat", _MICROSOFT, inputs, node.outputs[0], {})]


def _feeds_clip(fuser: _Fuser, node: Node) -> bool:
    """Return whether a float result has only a Relu or Clip behind it, with which ONNX Runtime leaves it in floats."""
    readers = fuser.readers[node.outputs[0]]
    if len(readers) != 1 or readers[0].op not in ("Relu", "Clip") or node.outputs[0] in fuser.graph.outputs:
        return False
    result = readers[0].outputs[0]
    return len(fuser.readers[result]) == 1 and result not in fuser.graph.outputs


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
    is_quantized = any(reader.op == "QuantizeLinear" for reader in fuser.readers[last.outputs[0]])
    if not has_codes and (is_quantized or _feeds_clip(fuser, last)):
        return None
    # ONNX Runtime quantizes a float bias only for a result in codes.
    if has_bias and not has_codes and set(gemm.inputs[2:]) & set(fuser.constants):
        return None
    bias = _select_bias(fuser, gemm, operands)
    if bias is None:
        return None
    a, a_scale, a_point, b, b_scale, b_point = operands
    inputs = [a, a_scale, a_point, b, b_scale, b_point, *(bias[0] or [""])]
    attributes = {key: gemm.attributes[key] for key in ("alpha", "transA", "transB") if key in gemm.attributes}
    end = last
    if has_codes:
        assert sink is not None
        inputs, end = [*inputs, *fuser.read_affine(sink)], sink
    return end, [*bias[1], _make_node(gemm, "QGemm", _MICROSOFT, inputs, end.outputs[0], attributes)]
